//! Device code on an NVIDIA GPU.

use std::ffi::{CString, c_void};
use std::sync::Arc;
use std::time::Duration;

use super::super::backend::{KernelBackend, ModuleBackend};
use super::super::program::Program;
use super::deferred_free::PendingFree;
use super::device::CudaDevice;
use super::driver::{call, get};
use super::sys::{self, Function, ModuleHandle};
use crate::error::{Error, Kind, Result};

/// Time that loading waits for the streams to become idle. The driver itself would wait without
/// limit, and block driver calls of all other threads meanwhile.
const LOAD_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) struct CudaModule {
    device: Arc<CudaDevice>,
    program: String,
    handle: ModuleHandle,
}

impl CudaModule {
    pub(super) fn load(device: Arc<CudaDevice>, program: &Program) -> Result<Self> {
        let ptx = program.ptx_text().ok_or_else(|| program.missing_form("PTX", device.label()))?;
        let what = format!("load program {:?}", program.name());
        let text = CString::new(ptx).map_err(|_| {
            Error::new(Kind::Malformed, what.clone()).why("its PTX contains a NUL byte")
        })?;
        let current = device.make_current()?;
        let mut log = vec![0_u8; 8192];
        let mut options = [sys::JIT_ERROR_LOG, sys::JIT_ERROR_LOG_SIZE];
        let mut values: [*mut c_void; 2] = [log.as_mut_ptr().cast(), log.len() as *mut c_void];
        let driver = device.driver;
        let loaded = device.deferred_free.while_idle(driver, LOAD_TIMEOUT, || {
            let (count, text) = (options.len() as u32, text.as_ptr().cast());
            let (options, values) = (options.as_mut_ptr(), values.as_mut_ptr());
            get!(driver, ModuleHandle::NULL, module_load(text, count, options, values))
        });
        drop(current);
        let loaded = loaded.ok_or_else(|| busy(what.clone(), &device))?;
        let handle = loaded.map_err(|error| {
            let log = String::from_utf8_lossy(&log);
            let log = log.trim_matches(['\0', '\n', ' ']);
            let why = if log.is_empty() {
                error.reason().to_string()
            } else {
                format!("{}: {log}", error.reason())
            };
            device.error_context(what)(error.why(why))
        })?;
        Ok(Self { device, program: program.name().to_string(), handle })
    }
}

#[cold]
fn busy(what: String, device: &CudaDevice) -> Error {
    Error::new(Kind::Busy, what)
        .on(device.label())
        .why("streams have work, and the driver loads code only when none has")
        .fix("load programs and look up kernels before starting work that waits")
}

impl ModuleBackend for CudaModule {
    fn kernel(self: Arc<Self>, name: &str) -> Result<Arc<dyn KernelBackend>> {
        let missing = || Program::no_such_kernel(&self.program, name, self.device.label());
        let symbol = CString::new(name).map_err(|_| missing())?;
        let _current = self.device.make_current()?;
        let handle = self.handle;
        let function =
            get!(self.device.driver, Function::NULL, module_function(handle, symbol.as_ptr()))
                .map_err(|_| missing())?;
        let driver = self.device.driver;
        let loaded =
            self.device.deferred_free.while_idle(driver, LOAD_TIMEOUT, || self.load_now(function));
        let loaded = loaded.ok_or_else(|| busy(format!("load kernel {name:?}"), &self.device))?;
        loaded
            .map_err(|error| self.device.error_context(format!("load kernel {name:?}"))(error))?;
        let parameters = self.parameters(name, function)?;
        Ok(Arc::new(CudaKernel {
            name: name.to_string(),
            function,
            parameters,
            _module: self.clone(),
        }))
    }

    fn set(&self, variable: &str, bytes: &[u8]) -> Result<()> {
        let what = || format!("set {variable:?} of program {:?}", self.program);
        let refuse = |why: String| {
            Err(Error::new(Kind::InvalidArgument, what()).on(self.device.label()).why(why))
        };
        let Ok(symbol) = CString::new(variable) else {
            return refuse("the name contains a NUL byte".into());
        };
        let _current = self.device.make_current()?;
        let (driver, handle, mut size) = (self.device.driver, self.handle, 0);
        // With lazy loading, the driver may load the module now.
        let found = self.device.deferred_free.while_idle(driver, LOAD_TIMEOUT, || {
            get!(driver, 0, module_global(&mut size, handle, symbol.as_ptr()))
        });
        let Ok(address) = found.ok_or_else(|| busy(what(), &self.device))? else {
            return refuse("the program has no variable of that name".into());
        };
        if size != bytes.len() {
            return refuse(format!("it has {size} bytes, but {} were given", bytes.len()));
        }
        self.device
            .copy_sync(address, bytes.as_ptr() as u64, bytes.len())
            .map_err(|error| self.device.error_context(what())(error))
    }
}

impl CudaModule {
    /// Makes the driver load the kernel onto the device. It would otherwise do so at the first
    /// launch (lazy loading), and wait there for every stream that has work, possibly for ever.
    fn load_now(&self, function: Function) -> Result<()> {
        let driver = self.device.driver;
        if driver.functions.function_load.is_some() {
            return call!(driver, function_load(function));
        }
        // Before CUDA 12.4, querying an attribute has the same effect.
        get!(driver, 0, function_attribute(sys::FUNCTION_REGISTERS, function)).map(|_| ())
    }

    /// Sizes of the kernel's parameters, 4 or 8 bytes each; `None` on drivers that do not report
    /// them (before CUDA 12.4).
    fn parameters(&self, name: &str, function: Function) -> Result<Option<Vec<usize>>> {
        let driver = self.device.driver;
        if driver.functions.function_parameter.is_none() {
            return Ok(None);
        }
        let (mut sizes, mut offset, mut size) = (Vec::new(), 0, 0);
        // The driver rejects the first index that is not a parameter.
        while call!(driver, function_parameter(function, sizes.len(), &mut offset, &mut size))
            .is_ok()
        {
            if size != size_of::<u64>() && size != size_of::<u32>() {
                let what = format!("use kernel {name:?}");
                let number = sizes.len();
                let why = format!(
                    "its parameter {number} has {size} bytes; only 32 and 64 bits are supported"
                );
                return Err(Error::new(Kind::Unsupported, what).on(self.device.label()).why(why));
            }
            sizes.push(size);
        }
        Ok(Some(sizes))
    }
}

impl Drop for CudaModule {
    fn drop(&mut self) {
        let _current = self.device.make_current();
        self.device.deferred_free.defer(&self.device, PendingFree::Module(self.handle));
    }
}

pub(super) struct CudaKernel {
    name: String,
    pub(super) function: Function,
    parameters: Option<Vec<usize>>,
    /// Keeps the code loaded.
    _module: Arc<CudaModule>,
}

impl CudaKernel {
    /// Rejects a wrong number of arguments (the driver would read past the end) and a value that is
    /// too large for its parameter (the driver would truncate it).
    pub(super) fn check_arguments(&self, given: &[u64]) -> Result<()> {
        let Some(wanted) = &self.parameters else { return Ok(()) };
        let refuse = |why: String| {
            let what = format!("launch kernel {:?}", self.name);
            Err(Error::new(Kind::InvalidArgument, what).why(why))
        };
        if wanted.len() != given.len() {
            let (wanted, given) = (wanted.len(), given.len());
            return refuse(format!("it takes {wanted} arguments, but {given} were given"));
        }
        let narrow = |(size, value): (&usize, &u64)| {
            *size == size_of::<u32>() && u32::try_from(*value).is_err()
        };
        match wanted.iter().zip(given).position(narrow) {
            Some(number) => refuse(format!(
                "its parameter {number} has 32 bits; {} does not fit",
                given[number]
            )),
            None => Ok(()),
        }
    }
}

impl KernelBackend for CudaKernel {
    fn name(&self) -> &str {
        &self.name
    }
}
