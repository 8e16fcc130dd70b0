//! Kernels: the same program as PTX for CUDA and as Rust block functions for the simulator.

use std::borrow::Cow;
use std::fmt;
use std::sync::{Arc, Weak};

use super::allocation::Region;
use super::backend::{DeviceBackend, KernelBackend, ModuleBackend};
use super::device::Device;
use super::sim::{Block, KernelFault};
use crate::error::{Error, Kind, Result};

/// A function that the simulator runs for each block of a grid.
pub type BlockFn = Arc<dyn Fn(&Block<'_>) -> std::result::Result<(), KernelFault> + Send + Sync>;

/// A set of kernels in the form that each backend takes. A device loads the form it understands.
///
/// ```
/// use std::time::Duration;
/// use warpwire::mem::{Launch, Program, sim::{Sim, SimConfig}};
/// let program = Program::new("adder").block("add_one", |block| {
///     let word = block.address(0)?;
///     block.fetch_add_u64(word, 1)?;
///     Ok(())
/// });
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let kernel = gpu.load(&program).unwrap().kernel("add_one").unwrap();
/// let memory = gpu.alloc(8).unwrap();
/// memory.write(0, &[0; 8]).unwrap();
/// let stream = gpu.stream().unwrap();
/// let launch = Launch::new(&kernel).grid(32).region(&memory.whole().unwrap());
/// // SAFETY: the kernel accesses only the word that is passed to it.
/// unsafe { stream.launch(launch) }.unwrap();
/// stream.synchronize(Duration::from_secs(5)).unwrap();
/// assert_eq!(memory.word64(0).unwrap().load().unwrap(), 32);
/// ```
#[derive(Clone)]
pub struct Program {
    name: Cow<'static, str>,
    ptx: Option<Cow<'static, str>>,
    blocks: Vec<(Cow<'static, str>, BlockFn)>,
}

impl Program {
    /// A program without code; add it with [`ptx`](Self::ptx) and [`block`](Self::block).
    pub fn new(name: impl Into<Cow<'static, str>>) -> Self {
        Self { name: name.into(), ptx: None, blocks: Vec::new() }
    }

    /// Adds the CUDA form, PTX text that contains all kernels.
    #[must_use]
    pub fn ptx(mut self, text: impl Into<Cow<'static, str>>) -> Self {
        self.ptx = Some(text.into());
        self
    }

    /// Adds the simulator's form of one kernel.
    #[must_use]
    pub fn block(
        mut self,
        kernel: impl Into<Cow<'static, str>>,
        run: impl Fn(&Block<'_>) -> std::result::Result<(), KernelFault> + Send + Sync + 'static,
    ) -> Self {
        self.blocks.push((kernel.into(), Arc::new(run)));
        self
    }

    /// Name used in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(super) fn ptx_text(&self) -> Option<&str> {
        self.ptx.as_deref()
    }

    pub(super) fn blocks(&self) -> &[(Cow<'static, str>, BlockFn)] {
        &self.blocks
    }

    #[cold]
    pub(super) fn missing_form(&self, form: &str, device: String) -> Error {
        Error::new(Kind::Unsupported, format!("load program {:?}", self.name))
            .on(device)
            .why(format!("it has no {form}"))
    }

    #[cold]
    pub(super) fn no_such_kernel(program: &str, kernel: &str, device: String) -> Error {
        Error::new(Kind::InvalidArgument, format!("find kernel {kernel:?} in program {program:?}"))
            .on(device)
            .why("the program has no kernel of that name")
    }
}

/// A program loaded on a device.
#[derive(Clone)]
pub struct Module {
    device: Device,
    program: String,
    backend: Arc<dyn ModuleBackend>,
}

impl Module {
    pub(super) fn new(device: Device, program: String, backend: Arc<dyn ModuleBackend>) -> Self {
        Self { device, program, backend }
    }

    pub(super) fn downgrade(&self) -> WeakModule {
        let (device, program) = (self.device.clone(), self.program.clone());
        WeakModule { device: device.downgrade(), program, backend: Arc::downgrade(&self.backend) }
    }

    /// Looks up a kernel by name. Fails with `InvalidArgument` if the program has none.
    pub fn kernel(&self, name: &str) -> Result<Kernel> {
        let backend = self.backend.clone().kernel(name)?;
        Ok(Kernel { device: self.device.clone(), backend })
    }

    /// Sets a `__device__` variable, by its name in the PTX; `bytes` must cover it exactly. Call
    /// this before launching a kernel that reads it. Block functions of the simulated GPU have no
    /// variables: `Unsupported`.
    pub fn set(&self, variable: &str, bytes: &[u8]) -> Result<()> {
        self.backend.set(variable, bytes)
    }
}

/// A module that others may unload.
pub(super) struct WeakModule {
    device: Weak<dyn DeviceBackend>,
    program: String,
    backend: Weak<dyn ModuleBackend>,
}

impl WeakModule {
    pub(super) fn is_loaded(&self) -> bool {
        self.backend.strong_count() > 0
    }

    /// The module, if it is loaded on that device.
    pub(super) fn upgrade(&self, device: &Device) -> Option<Module> {
        let backend = self.backend.upgrade()?;
        device.is_backend(&self.device).then(|| Module {
            device: device.clone(),
            program: self.program.clone(),
            backend,
        })
    }
}

impl fmt::Debug for Module {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Module({} on {})", self.program, self.device.label())
    }
}

/// A kernel of a loaded program.
#[derive(Clone)]
pub struct Kernel {
    device: Device,
    backend: Arc<dyn KernelBackend>,
}

impl Kernel {
    /// The device that it is loaded on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Name in the program.
    pub fn name(&self) -> &str {
        self.backend.name()
    }

    pub(super) fn backend(&self) -> &Arc<dyn KernelBackend> {
        &self.backend
    }
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernel({} on {})", self.name(), self.device.label())
    }
}

/// A kernel with its grid and arguments, ready for [`Stream::launch`](super::Stream::launch).
#[derive(Clone, Debug)]
pub struct Launch {
    pub(super) kernel: Kernel,
    pub(super) grid: u32,
    pub(super) threads: u32,
    pub(super) args: Vec<u64>,
    /// Regions among the arguments, kept alive until the kernel has completed.
    pub(super) regions: Vec<Region>,
}

impl Launch {
    /// One block of one thread, without arguments.
    pub fn new(kernel: &Kernel) -> Self {
        Self { kernel: kernel.clone(), grid: 1, threads: 1, args: Vec::new(), regions: Vec::new() }
    }

    /// Sets the number of blocks. Default: 1.
    #[must_use]
    pub fn grid(mut self, blocks: u32) -> Self {
        self.grid = blocks;
        self
    }

    /// Sets the number of threads per block. Default: 1.
    #[must_use]
    pub fn threads(mut self, threads: u32) -> Self {
        self.threads = threads;
        self
    }

    /// Appends an integer argument, for a 64-bit parameter, or a 32-bit one if it fits. Kernels for
    /// this interface take no other types.
    #[must_use]
    pub fn value(mut self, value: u64) -> Self {
        self.args.push(value);
        self
    }

    /// Appends the address of a region, which is kept alive until the kernel has completed.
    #[must_use]
    pub fn region(mut self, region: &Region) -> Self {
        self.args.push(region.address().raw());
        self.regions.push(region.clone());
        self
    }

    /// Keeps alive, until the kernel has completed, a region that it accesses without an argument.
    #[must_use]
    pub fn keep_alive(mut self, region: &Region) -> Self {
        self.regions.push(region.clone());
        self
    }
}
