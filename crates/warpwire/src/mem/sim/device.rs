//! One simulated GPU.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;

use super::super::address::DeviceAddr;
use super::super::allocation::MemoryKind;
use super::super::backend::{
    DeviceBackend, EventBackend, ForeignStreamBackend, HostOwner, KernelBackend, MemoryBackend,
    ModuleBackend, StreamBackend,
};
use super::super::device::{Backend, Capabilities, Capability, DeviceInfo, MemoryUsage};
use super::super::program::{BlockFn, Program};
use super::super::share::IpcHandle;
use super::config::{FailNth, OpKind, SimConfig};
use super::memory::{Borrowed, SimMemory, address_space};
use super::stream::{SimEvent, SimForeignStream, SimStream};
use crate::error::{Error, Kind, Result};
use crate::units;

/// The objects that exist on a simulated GPU. All counts are zero after everything was dropped.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LiveObjects {
    /// Allocations, including pinned, registered and imported memory.
    pub allocations: u64,
    /// Bytes of device memory.
    pub device_bytes: u64,
    /// Bytes of pinned host memory.
    pub pinned_bytes: u64,
    /// Streams, including those that were dropped with work in flight.
    pub streams: u64,
    /// Events.
    pub events: u64,
}

#[derive(Default)]
struct Counters {
    allocations: AtomicU64,
    device_bytes: AtomicU64,
    pinned_bytes: AtomicU64,
    streams: AtomicU64,
    events: AtomicU64,
}

/// Injected faults and their counters.
struct FaultInjection {
    /// The operation to fail, and the number of operations of that kind so far.
    fail: Option<(FailNth, u64)>,
    copy_delay: Duration,
    move_every: Option<u64>,
    free_at: Option<u64>,
    stream_ops: u64,
}

pub(super) struct SimDevice {
    info: DeviceInfo,
    peer_access: bool,
    jitter: Duration,
    capabilities: Capabilities,
    counters: Counters,
    fault_injection: Mutex<FaultInjection>,
    next_stream: AtomicU64,
    streams: Mutex<BTreeMap<u64, Weak<SimStream>>>,
    dead: AtomicBool,
}

impl SimDevice {
    pub(super) fn new(ordinal: u32, config: &SimConfig) -> Self {
        let pid = std::process::id();
        let info = DeviceInfo {
            backend: Backend::Sim,
            ordinal,
            name: "Warpwire simulated GPU".into(),
            uuid: format!(
                "GPU-51570000-{:04x}-{:04x}-0000-{ordinal:012x}",
                pid >> 16,
                pid & 0xffff
            ),
            pci: None,
            numa_node: None,
            total_memory: config.memory,
            multiprocessors: 1,
        };
        let no_nic =
            || Capability::No("NICs cannot access simulated memory; the software HCA can".into());
        let capabilities = Capabilities {
            dmabuf_export: Capability::Yes,
            gpudirect_rdma: no_nic(),
            gpudirect_rdma_vmm: no_nic(),
            vmm: Capability::Yes,
            pool: Capability::Yes,
            ipc: Capability::Yes,
            stream_mem_ops: Capability::Yes,
            stream_wait_nor: Capability::when(
                config.wait_nor,
                "the simulated GPU is configured with nor=off",
            ),
            flush_remote_writes: Capability::Yes,
            graphs: Capability::Yes,
            notify: Capability::Yes,
        };
        let fault_injection = FaultInjection {
            fail: config.fail.map(|nth| (nth, 0)),
            copy_delay: config.copy_delay,
            move_every: config.move_every,
            free_at: config.free_at,
            stream_ops: 0,
        };
        Self {
            info,
            peer_access: config.peer_access,
            jitter: config.jitter,
            capabilities,
            counters: Counters::default(),
            fault_injection: Mutex::new(fault_injection),
            next_stream: AtomicU64::new(1),
            streams: Mutex::default(),
            dead: AtomicBool::new(false),
        }
    }

    pub(super) fn label(&self) -> String {
        self.info.label()
    }

    pub(super) fn ordinal(&self) -> u32 {
        self.info.ordinal
    }

    /// Whether this device can map memory of that one.
    pub(super) fn check_peer_access(&self, owner: u32) -> Result<()> {
        if self.peer_access || owner == self.ordinal() {
            return Ok(());
        }
        Err(Error::new(Kind::Unsupported, "open an inter-process handle")
            .on(self.label())
            .why(format!("it has no access to memory of sim:{owner} (peer_access=off)"))
            .fix("send the data instead, or use one GPU"))
    }

    /// Accounts for `len` bytes. Fails with `OutOfMemory` if fewer are free.
    pub(super) fn reserve(&self, len: u64, kind: MemoryKind) -> Result<()> {
        self.check_alive()?;
        self.count_op(OpKind::Alloc)?;
        let reserved = match kind {
            MemoryKind::Pinned => {
                self.counters.pinned_bytes.fetch_add(len, Ordering::AcqRel);
                true
            }
            // Imported memory is accounted for in the exporting process.
            MemoryKind::Imported => true,
            _ => self.take_device_bytes(len),
        };
        if !reserved {
            let used = self.counters.device_bytes.load(Ordering::Acquire);
            let (free, total) =
                (self.info.total_memory.saturating_sub(used), self.info.total_memory);
            return Err(Error::new(Kind::OutOfMemory, format!("allocate {}", units::bytes(len)))
                .on(self.label())
                .why(format!("{} of {} are free", units::bytes(free), units::bytes(total)))
                .fix("free some, or set a larger memory= in WARPWIRE_SIM"));
        }
        self.counters.allocations.fetch_add(1, Ordering::AcqRel);
        Ok(())
    }

    fn take_device_bytes(&self, len: u64) -> bool {
        let total = self.info.total_memory;
        let take = |used: u64| used.checked_add(len).filter(|sum| *sum <= total);
        self.counters.device_bytes.fetch_update(Ordering::AcqRel, Ordering::Acquire, take).is_ok()
    }

    pub(super) fn release(&self, len: u64, kind: MemoryKind) {
        match kind {
            MemoryKind::Pinned => {
                self.counters.pinned_bytes.fetch_sub(len, Ordering::AcqRel);
            }
            MemoryKind::Imported => {}
            _ => {
                self.counters.device_bytes.fetch_sub(len, Ordering::AcqRel);
            }
        }
        self.counters.allocations.fetch_sub(1, Ordering::AcqRel);
    }

    pub(super) fn live_objects(&self) -> LiveObjects {
        let read = |counter: &AtomicU64| counter.load(Ordering::Acquire);
        LiveObjects {
            allocations: read(&self.counters.allocations),
            device_bytes: read(&self.counters.device_bytes),
            pinned_bytes: read(&self.counters.pinned_bytes),
            streams: read(&self.counters.streams),
            events: read(&self.counters.events),
        }
    }

    pub(super) fn count_stream(&self, created: bool) {
        count(&self.counters.streams, created);
    }

    pub(super) fn count_event(&self, created: bool) {
        count(&self.counters.events, created);
    }

    /// Counts an operation, and fails it if it is the one configured to fail.
    pub(super) fn count_op(&self, kind: OpKind) -> Result<()> {
        let mut fault_injection = self.fault_injection.lock();
        let Some((nth, seen)) = &mut fault_injection.fail else {
            return Ok(());
        };
        if !nth.kind.covers(kind) {
            return Ok(());
        }
        *seen += 1;
        if *seen < nth.number {
            return Ok(());
        }
        let injected = *nth;
        fault_injection.fail = None;
        Err(Error::new(Kind::StreamFailed, "finish an operation")
            .on(self.label())
            .why(format!("the simulator was configured to fail {injected}")))
    }

    /// Called after a stream operation on `memory`: moves or frees it if configured.
    pub(super) fn after_op(&self, memory: &SimMemory) {
        let (moves, frees) = {
            let mut fault_injection = self.fault_injection.lock();
            fault_injection.stream_ops += 1;
            let count = fault_injection.stream_ops;
            let moves = fault_injection.move_every.is_some_and(|every| count.is_multiple_of(every));
            (moves, fault_injection.free_at == Some(count))
        };
        // Memory that cannot move, or was freed meanwhile, is skipped until the next time.
        if moves {
            let _ = memory.relocate();
        }
        if frees {
            let _ = memory.force_remove();
        }
    }

    /// Pauses the calling kernel at random: see `SimConfig::jitter`.
    pub(super) fn inject_jitter(&self) {
        thread_local!(static RANDOM: Cell<u64> = const { Cell::new(0) });
        if self.jitter.is_zero() {
            return;
        }
        let random = RANDOM.with(|word| {
            // Seeded with the address of a local variable, which differs between threads.
            let seed = if word.get() == 0 { std::ptr::from_ref(&word) as u64 } else { word.get() };
            let next = seed.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(0x1405_7b7e_f767_814f);
            word.set(next);
            next >> 32
        });
        if random.is_multiple_of(16) {
            std::thread::sleep(self.jitter.mul_f64((random >> 4) as f64 / f64::from(1 << 28)));
        }
    }

    pub(super) fn copy_delay(&self) -> Duration {
        self.fault_injection.lock().copy_delay
    }

    pub(super) fn set_copy_delay(&self, delay: Duration) {
        self.fault_injection.lock().copy_delay = delay;
    }

    pub(super) fn set_failure(&self, nth: FailNth) {
        self.fault_injection.lock().fail = Some((nth, 0));
    }

    /// Simulates a device that falls off the bus: all work fails.
    pub(super) fn kill(&self) {
        self.dead.store(true, Ordering::Release);
    }

    pub(super) fn is_dead(&self) -> bool {
        self.dead.load(Ordering::Acquire)
    }

    pub(super) fn check_alive(&self) -> Result<()> {
        if !self.is_dead() {
            return Ok(());
        }
        Err(Error::new(Kind::DeviceLost, "use the device").on(self.label()).why("it was killed"))
    }
}

fn count(counter: &AtomicU64, created: bool) {
    if created {
        counter.fetch_add(1, Ordering::AcqRel);
    } else {
        counter.fetch_sub(1, Ordering::AcqRel);
    }
}

impl DeviceBackend for SimDevice {
    fn info(&self) -> &DeviceInfo {
        &self.info
    }

    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn memory_usage(&self) -> Result<MemoryUsage> {
        self.check_alive()?;
        let total = self.info.total_memory;
        let used = self.counters.device_bytes.load(Ordering::Acquire);
        Ok(MemoryUsage { free: total.saturating_sub(used), total })
    }

    fn allocate(self: Arc<Self>, len: u64, kind: MemoryKind) -> Result<Arc<dyn MemoryBackend>> {
        if matches!(kind, MemoryKind::Borrowed | MemoryKind::Imported) {
            return Err(Error::new(Kind::InvalidArgument, "allocate memory")
                .on(self.label())
                .why(format!("{kind} memory cannot be allocated")));
        }
        Ok(SimMemory::create(self, len, kind)?)
    }

    fn borrow(self: Arc<Self>, address: DeviceAddr, len: u64) -> Result<Arc<dyn MemoryBackend>> {
        self.check_alive()?;
        let failure = |why: String| {
            Err(Error::new(Kind::NotDeviceMemory, format!("borrow {len} bytes at {address}"))
                .on(self.label())
                .why(why))
        };
        let Some((owner, _)) = address_space().find(address, len) else {
            return failure("no simulated memory holds all of that range".into());
        };
        if !Arc::ptr_eq(owner.device(), &self) {
            return failure(format!("the memory belongs to {}", owner.device().label()));
        }
        Ok(Arc::new(Borrowed { device: self, address, len }))
    }

    fn register_host(
        self: Arc<Self>,
        base: NonNull<u8>,
        len: u64,
        _io: bool,
        owner: HostOwner,
    ) -> Result<Arc<dyn MemoryBackend>> {
        self.check_alive()?;
        Ok(SimMemory::register(self, (base, len), owner)?)
    }

    fn open_ipc(
        self: Arc<Self>,
        handle: &IpcHandle,
        descriptors: Option<Vec<OwnedFd>>,
    ) -> Result<Arc<dyn MemoryBackend>> {
        Ok(SimMemory::open(self, handle, descriptors)?)
    }

    fn create_stream(self: Arc<Self>) -> Result<Arc<dyn StreamBackend>> {
        self.check_alive()?;
        let number = self.next_stream.fetch_add(1, Ordering::Relaxed);
        let stream = Arc::new(SimStream::start(self.clone(), number)?);
        let mut streams = self.streams.lock();
        streams.retain(|_, known| known.strong_count() > 0);
        streams.insert(number, Arc::downgrade(&stream));
        Ok(stream)
    }

    fn foreign_stream(self: Arc<Self>, handle: u64) -> Result<Arc<dyn ForeignStreamBackend>> {
        let known =
            self.streams.lock().get(&handle).filter(|known| known.strong_count() > 0).cloned();
        let stream = known.ok_or_else(|| {
            Error::new(Kind::InvalidArgument, format!("use stream {handle} of another library"))
                .on(self.label())
                .why("the simulated GPU has no stream of this number")
                .fix("use the number of a stream that exists (Stream::number)")
        })?;
        Ok(Arc::new(SimForeignStream(stream)))
    }

    fn create_event(self: Arc<Self>) -> Result<Arc<dyn EventBackend>> {
        self.check_alive()?;
        Ok(Arc::new(SimEvent::new(self)))
    }

    fn load(self: Arc<Self>, program: &Program) -> Result<Arc<dyn ModuleBackend>> {
        self.check_alive()?;
        if program.blocks().is_empty() {
            return Err(program.missing_form("block functions for the simulator", self.label()));
        }
        Ok(Arc::new(SimModule { device: self, program: program.clone() }))
    }
}

struct SimModule {
    device: Arc<SimDevice>,
    program: Program,
}

impl ModuleBackend for SimModule {
    fn kernel(self: Arc<Self>, name: &str) -> Result<Arc<dyn KernelBackend>> {
        let found = self.program.blocks().iter().find(|(known, _)| known == name);
        let Some((_, run)) = found else {
            return Err(Program::no_such_kernel(self.program.name(), name, self.device.label()));
        };
        Ok(Arc::new(SimKernel { name: name.to_string(), run: run.clone() }))
    }

    fn set(&self, variable: &str, _: &[u8]) -> Result<()> {
        let what = format!("set {variable:?} of program {:?}", self.program.name());
        Err(Error::new(Kind::Unsupported, what)
            .on(self.device.label())
            .why("block functions have no device variables")
            .fix("capture the value in the function, or pass it as an argument"))
    }
}

pub(super) struct SimKernel {
    name: String,
    pub(super) run: BlockFn,
}

impl KernelBackend for SimKernel {
    fn name(&self) -> &str {
        &self.name
    }
}
