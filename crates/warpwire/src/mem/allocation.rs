//! Device-accessible memory, and ranges and words of it.

use std::fmt;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;

use super::address::{DeviceAddr, is_inside, range_error};
use super::backend::MemoryBackend;
use super::bytes::SharedBytes;
use super::device::Device;
use super::exports;
use super::share::{DmaBuf, DmaBufRoute, IpcHandle};
use super::window::{Window, WindowOptions, WindowPath};
use crate::error::{Error, Kind, Result};
use crate::units;

/// How memory was allocated, which decides what can be done with it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryKind {
    /// Ordinary device memory (`cuMemAlloc`). `cuMemFree` waits for the whole device to be idle, so
    /// the free is deferred while this library's streams have work; programs whose streams are
    /// never idle should use [`Vmm`](Self::Vmm) or [`Pool`](Self::Pool).
    Plain,
    /// Device memory from the virtual memory management API (`cuMemCreate`), in pages of 2 MiB. It
    /// can be shared by file descriptor and with NICs, and is freed immediately.
    Vmm,
    /// Device memory from a pool (`cuMemAllocFromPoolAsync`): fast to allocate, freed immediately.
    Pool,
    /// Pinned host memory that the device can access by address.
    Pinned,
    /// Memory owned by another library.
    Borrowed,
    /// Memory of another process.
    Imported,
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Plain => "plain",
            Self::Vmm => "vmm",
            Self::Pool => "pool",
            Self::Pinned => "pinned",
            Self::Borrowed => "borrowed",
            Self::Imported => "imported",
        })
    }
}

/// A change to memory that affects its users.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MemoryEvent {
    /// The memory is about to move: users of its physical backing must stop before they return.
    Moving,
    /// The memory has moved: same device address, different backing.
    Moved,
    /// The memory has been freed.
    Freed,
}

/// Called for each [`MemoryEvent`], on the thread that causes it.
pub type MemoryListener = Arc<dyn Fn(MemoryEvent) + Send + Sync>;

/// A subscription to [`MemoryEvent`]s; dropping it unsubscribes.
#[must_use = "events stop when the watch is dropped"]
pub struct WatchGuard {
    end: Option<Box<dyn FnOnce() + Send + Sync>>,
}

impl WatchGuard {
    /// A subscription that calls `end` when dropped.
    pub fn new(end: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self { end: Some(Box::new(end)) }
    }
}

impl Drop for WatchGuard {
    fn drop(&mut self) {
        if let Some(end) = self.end.take() {
            end();
        }
    }
}

/// Keeps memory from moving until dropped.
#[must_use = "the memory may move when the pin is dropped"]
pub struct PinGuard(#[allow(dead_code)] WatchGuard);

impl PinGuard {
    /// A pin that calls `end` when dropped.
    pub fn new(end: impl FnOnce() + Send + Sync + 'static) -> Self {
        Self(WatchGuard::new(end))
    }
}

/// A weak reference to an allocation, which may have been freed.
pub(crate) struct WeakAllocation(std::sync::Weak<Shared>);

impl WeakAllocation {
    pub(crate) fn upgrade(&self) -> Option<Allocation> {
        let shared = self.0.upgrade().filter(|shared| !shared.users.is_closed())?;
        Some(Allocation { shared })
    }
}

impl fmt::Debug for WeakAllocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad("WeakAllocation")
    }
}

/// One allocation of another library within borrowed memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackingAllocation {
    /// Offset of its first byte in the borrowed memory.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
    /// Unique ID; never reused, even when the address is.
    pub id: u64,
}

/// Memory that a device can access by address. Clones refer to the same memory.
///
/// The memory is freed when the last handle and the last [`Region`] are dropped, or earlier by
/// [`free`](Allocation::free). Stream operations hold the regions they use, so memory is never
/// freed under a running copy.
#[derive(Clone)]
pub struct Allocation {
    shared: Arc<Shared>,
}

struct Shared {
    device: Device,
    memory: Arc<dyn MemoryBackend>,
    users: UseCount,
    /// PID of the owner. A forked child inherits the handle, but has no right to the memory.
    process: u32,
}

/// Number of regions of an allocation, and whether it has been freed, in one word: "free if unused"
/// is one compare-exchange.
struct UseCount(AtomicU64);

const FREED: u64 = 1 << 63;

impl UseCount {
    fn enter(&self) -> bool {
        let enter = |count| (count & FREED == 0).then_some(count + 1);
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, enter).is_ok()
    }

    fn leave(&self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }

    /// Marks the memory freed. Fails with the number of users, or `None` if it was freed before.
    fn close(&self) -> std::result::Result<(), Option<u64>> {
        self.0
            .compare_exchange(0, FREED, Ordering::AcqRel, Ordering::Acquire)
            .map(|_| ())
            .map_err(|count| (count & FREED == 0).then_some(count))
    }

    #[inline]
    fn is_closed(&self) -> bool {
        self.0.load(Ordering::Acquire) & FREED != 0
    }
}

impl Allocation {
    pub(super) fn new(device: Device, memory: Arc<dyn MemoryBackend>) -> Self {
        let users = UseCount(AtomicU64::new(0));
        let process = std::process::id();
        Self { shared: Arc::new(Shared { device, memory, users, process }) }
    }

    /// The device that owns the memory.
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// Whether both are handles of one allocation.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// Device address of the first byte.
    pub fn address(&self) -> DeviceAddr {
        self.shared.memory.address()
    }

    /// Size in bytes, never 0.
    #[allow(clippy::len_without_is_empty)] // no allocation is empty
    pub fn len(&self) -> u64 {
        self.shared.memory.len()
    }

    /// How the memory was allocated.
    pub fn kind(&self) -> MemoryKind {
        self.shared.memory.kind()
    }

    /// The range `offset..offset + len`, for use in stream operations. Fails if the memory was
    /// freed.
    pub fn region(&self, offset: u64, len: u64) -> Result<Region> {
        if !is_inside(offset, len, self.len()) {
            return Err(range_error(offset, len, self.len(), self.describe()));
        }
        if !self.shared.users.enter() {
            return Err(self.freed_error("use memory"));
        }
        Ok(Region { memory: self.clone(), offset, len })
    }

    /// The whole range, for use in stream operations.
    pub fn whole(&self) -> Result<Region> {
        self.region(0, self.len())
    }

    /// The aligned 32-bit word at `offset`, for stream writes and waits.
    pub fn word32(&self, offset: u64) -> Result<Word> {
        self.word(offset, WordWidth::Bits32)
    }

    /// The aligned 64-bit word at `offset`, for stream writes and waits.
    pub fn word64(&self, offset: u64) -> Result<Word> {
        self.word(offset, WordWidth::Bits64)
    }

    fn word(&self, offset: u64, width: WordWidth) -> Result<Word> {
        let region = self.region(offset, width.bytes())?;
        if !region.address().is_aligned_to(width.bytes()) {
            let what = format!("use a {width} word at {}", region.address());
            return Err(Error::new(Kind::Misaligned, what)
                .on(self.describe())
                .why(format!("the address is not a multiple of {}", width.bytes()))
                .fix("use an aligned offset"));
        }
        Ok(Word { region, width })
    }

    /// Whether a region of it exists, held by an operation in flight or by a caller.
    pub(super) fn is_in_use(&self) -> bool {
        self.shared.users.0.load(Ordering::Acquire) & !FREED != 0
    }

    /// Copies `from` into the memory at `offset`; complete on return.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let _in_use = self.region(offset, from.len() as u64)?;
        self.shared.memory.write(offset, from)
    }

    /// Copies from the memory at `offset` into `into`; complete on return.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let _in_use = self.region(offset, into.len() as u64)?;
        self.shared.memory.read(offset, into)
    }

    /// Fails if the memory has been freed.
    #[inline]
    pub(super) fn check_live(&self) -> Result<()> {
        if self.shared.users.is_closed() { Err(self.freed_error("use memory")) } else { Ok(()) }
    }

    /// The bytes as the CPU sees them. Fails for memory other than pinned.
    pub fn host_bytes(&self) -> Result<SharedBytes<'_>> {
        if self.shared.users.is_closed() {
            return Err(self.freed_error("access memory"));
        }
        self.shared.memory.host_bytes().ok_or_else(|| {
            Error::new(Kind::Unsupported, "access memory")
                .on(self.describe())
                .why("memory of this kind is not mapped for the CPU")
                .fix("copy it, or allocate with alloc_pinned")
        })
    }

    /// Exports the range `offset..offset + len` as a dma-buf.
    ///
    /// The descriptor covers whole pages around the range; [`DmaBuf::offset`] is where in it the
    /// range begins. The descriptor keeps the memory alive.
    pub fn export_dmabuf(&self, offset: u64, len: u64) -> Result<DmaBuf> {
        self.export_dmabuf_by(offset, len, DmaBufRoute::Default)
    }

    /// Like [`export_dmabuf`](Self::export_dmabuf), by a given route. Drivers that offer no choice
    /// reject all but the default.
    pub fn export_dmabuf_by(&self, offset: u64, len: u64, route: DmaBufRoute) -> Result<DmaBuf> {
        let in_use = self.region(offset, len)?;
        if len == 0 {
            return Err(Error::new(Kind::InvalidArgument, "export a dma-buf")
                .on(self.describe())
                .why("the length is zero"));
        }
        let mut buffer = self.shared.memory.export_dmabuf(in_use.offset, len, route)?;
        let at = self.address().raw() + in_use.offset;
        let start = DeviceAddr::new(at.wrapping_sub(buffer.offset()));
        buffer.attach_export(exports::record(buffer.as_fd(), self, start)?);
        Ok(buffer)
    }

    /// Keeps the memory from moving until the guard is dropped.
    ///
    /// ```
    /// use warpwire::{error::Kind, mem::sim::{Sim, SimConfig}};
    /// let sim = Sim::start(SimConfig::default()).unwrap();
    /// let memory = sim.device(0).unwrap().alloc(4096).unwrap();
    /// let pin = memory.pin().unwrap();
    /// let moved = sim.control(0).unwrap().relocate(&memory);
    /// assert_eq!(moved.unwrap_err().kind(), &Kind::Busy);
    /// drop(pin);
    /// sim.control(0).unwrap().relocate(&memory).unwrap();
    /// ```
    pub fn pin(&self) -> Result<PinGuard> {
        let _in_use = self.whole()?;
        self.shared.memory.clone().pin()
    }

    pub(crate) fn downgrade(&self) -> WeakAllocation {
        WeakAllocation(Arc::downgrade(&self.shared))
    }

    /// The underlying allocations that borrowed memory consists of. An ID changes when the memory
    /// is freed and its addresses are reused. Empty if the memory cannot be freed unnoticed: this
    /// library's own, and memory that [`watch`](Self::watch) reports on.
    pub fn backing_allocations(&self) -> Result<Vec<BackingAllocation>> {
        let mut backing_allocations = Vec::new();
        let mut at = 0;
        while at < self.len() {
            let Some(id) = self.shared.memory.buffer_id(at)? else {
                return Ok(backing_allocations);
            };
            let end = self.shared.memory.backing_end(at)?.clamp(at + 1, self.len());
            backing_allocations.push(BackingAllocation { offset: at, len: end - at, id });
            at = end;
        }
        Ok(backing_allocations)
    }

    /// ID of the underlying allocation at `offset`, if any: see
    /// [`backing_allocations`](Self::backing_allocations).
    pub fn buffer_id(&self, offset: u64) -> Result<Option<u64>> {
        self.shared.memory.buffer_id(offset)
    }

    /// A handle with which another process can open this memory.
    ///
    /// # Errors
    /// [`Kind::Unsupported`], or the driver's error, if the memory was allocated in a way that
    /// cannot be shared, with the reason.
    pub fn export_ipc(&self) -> Result<IpcHandle> {
        let _in_use = self.whole()?;
        self.shared.memory.export_ipc()
    }

    /// Duplicates of the descriptors that belong to [`export_ipc`](Self::export_ipc)'s handle, to
    /// be sent with it over a Unix socket for [`Device::open_ipc_with`]. None for memory of
    /// `cuMemAlloc`, whose handle consists of bytes only. Each keeps the memory allocated while it
    /// is open.
    ///
    /// # Errors
    /// Those of [`export_ipc`](Self::export_ipc), and of duplicating descriptors.
    pub fn ipc_descriptors(&self) -> Result<Vec<OwnedFd>> {
        let _in_use = self.whole()?;
        self.shared.memory.ipc_descriptors()
    }

    /// Calls `listener` when the memory moves or is freed.
    pub fn watch(&self, listener: MemoryListener) -> Result<WatchGuard> {
        let _in_use = self.whole()?;
        self.shared.memory.clone().watch(listener)
    }

    /// A CPU window onto all of the memory, by the best path available.
    pub fn window(&self) -> Result<Window> {
        self.window_with(0, self.len(), &WindowOptions::from_env()?)
    }

    /// A CPU window onto `offset..offset + len`.
    ///
    /// The paths are tried in order, best first, unless the options name one; the window reports
    /// which it took and why earlier ones failed. If none works, the error gives the reason for
    /// each. A forked child cannot open windows onto its parent's memory.
    pub fn window_with(&self, offset: u64, len: u64, options: &WindowOptions) -> Result<Window> {
        let region = self.region(offset, len)?;
        self.check_process()?;
        Window::open(&region, &*self.shared.memory, options)
    }

    /// Rejects a forked child: the memory and its mappings belong to the parent.
    fn check_process(&self) -> Result<()> {
        if self.shared.process == std::process::id() {
            return Ok(());
        }
        Err(Error::new(Kind::Unsupported, "open a CPU window")
            .on(self.describe())
            .why("the memory belongs to the process that this one was forked from")
            .fix("use windows in the process that allocated, or share the memory by export_ipc"))
    }

    /// A CPU window onto `len` bytes at `start`. The range covers all of this memory and may extend
    /// beyond it, as GPU pages do, into other allocations of this process within the same driver
    /// allocation.
    ///
    /// For callers that work in whole pages, such as gdrcopy's. They are responsible for what they
    /// access beyond this memory.
    pub fn window_around(&self, start: DeviceAddr, len: u64) -> Result<Window> {
        let in_use = self.whole()?;
        self.check_process()?;
        let fits = start <= self.address()
            && start
                .checked_add(len)
                .is_some_and(|end| end.raw() >= self.address().raw() + self.len());
        if !fits {
            return Err(Error::new(
                Kind::OutOfRange,
                format!("open a window of {len} bytes at {start}"),
            )
            .on(self.describe())
            .why("the range does not cover all of the memory"));
        }
        let mapped = self.shared.memory.map_around(start, len)?;
        drop(in_use);
        Ok(Window::new(mapped, start, WindowPath::ResourceManager, Vec::new()))
    }

    /// Frees the memory now. Other handles stay valid; using one is an error.
    ///
    /// Fails with `Busy` while a region or a queued operation uses the memory; the call may be
    /// repeated later.
    pub fn free(&self) -> Result<()> {
        if self.kind() == MemoryKind::Borrowed {
            return Err(Error::new(Kind::InvalidArgument, "free memory")
                .on(self.describe())
                .why("it is borrowed")
                .fix("let its owner free it, and drop this handle"));
        }
        let mut closed = self.shared.users.close();
        if let Err(Some(_)) = closed {
            // The users may be operations that have finished but were not yet polled.
            self.device().reclaim();
            closed = self.shared.users.close();
        }
        match closed {
            Ok(()) => self.shared.memory.free(),
            Err(None) => Err(self.freed_error("free memory")),
            Err(Some(users)) => Err(Error::new(Kind::Busy, "free memory")
                .on(self.describe())
                .why(format!("{users} regions or queued operations still use it"))
                .fix("drop them or synchronize their streams first")),
        }
    }

    /// Describes the memory in messages, in one line.
    pub(super) fn describe(&self) -> String {
        let (label, kind) = (self.device().label(), self.kind());
        let (len, address) = (units::bytes(self.len()), self.address());
        format!("{label} {kind} memory at {address} ({len})")
    }

    #[cold]
    fn freed_error(&self, what: &'static str) -> Error {
        Error::new(Kind::Freed, what).on(self.describe()).why("it has been freed")
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        if self.users.close().is_err() {
            return; // freed before: the last region cannot outlive the last handle
        }
        if let Err(error) = self.memory.free() {
            tracing::warn!(%error, "memory was not freed");
        }
    }
}

impl fmt::Debug for Allocation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Allocation({})", self.describe())
    }
}

/// A range of an [`Allocation`] in use: the memory cannot be freed while a region of it exists.
pub struct Region {
    memory: Allocation,
    offset: u64,
    len: u64,
}

impl Region {
    /// The allocation that contains the range.
    pub fn allocation(&self) -> &Allocation {
        &self.memory
    }

    /// Device address of the first byte.
    pub fn address(&self) -> DeviceAddr {
        // In range since the region was created, so the sum does not overflow.
        DeviceAddr::new(self.memory.address().raw() + self.offset)
    }

    /// Offset of the first byte in the allocation.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the two ranges have a byte in common.
    pub fn overlaps(&self, other: &Region) -> bool {
        let (a, b) = (self.address().raw(), other.address().raw());
        a < b + other.len && b < a + self.len
    }
}

impl Clone for Region {
    fn clone(&self) -> Self {
        // A region exists, so the memory is not freed and entering succeeds.
        self.memory.shared.users.enter();
        Self { memory: self.memory.clone(), offset: self.offset, len: self.len }
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.memory.shared.users.leave();
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (label, address) = (self.memory.device().label(), self.address());
        write!(f, "Region({label} {address}, {} bytes)", self.len)
    }
}

/// The width of a [`Word`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WordWidth {
    /// 4 bytes.
    Bits32,
    /// 8 bytes.
    Bits64,
}

impl WordWidth {
    /// Size in bytes.
    pub const fn bytes(self) -> u64 {
        match self {
            Self::Bits32 => 4,
            Self::Bits64 => 8,
        }
    }

    /// Whether `value` fits into a word of this width.
    pub const fn fits(self, value: u64) -> bool {
        matches!(self, Self::Bits64) || value <= u32::MAX as u64
    }
}

impl fmt::Display for WordWidth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}-bit", self.bytes() * 8)
    }
}

/// An aligned word of device or pinned memory, for stream writes and waits.
#[derive(Clone, Debug)]
pub struct Word {
    region: Region,
    width: WordWidth,
}

impl Word {
    /// Device address.
    pub fn address(&self) -> DeviceAddr {
        self.region.address()
    }

    /// 32 or 64 bits.
    pub fn width(&self) -> WordWidth {
        self.width
    }

    /// The range that the word occupies.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Reads the current value. For device memory this is a synchronous copy.
    pub fn load(&self) -> Result<u64> {
        let memory = &self.region.memory;
        if let Ok(bytes) = memory.host_bytes() {
            return match self.width {
                WordWidth::Bits32 => bytes.load_u32(self.region.offset).map(u64::from),
                WordWidth::Bits64 => bytes.load_u64(self.region.offset),
            };
        }
        let mut raw = [0; 8];
        let part = &mut raw[..self.width.bytes() as usize];
        memory.shared.memory.read(self.region.offset, part)?;
        Ok(u64::from_le_bytes(raw))
    }

    /// Writes a value from the CPU. For device memory this is a synchronous copy.
    pub fn store(&self, value: u64) -> Result<()> {
        self.check_value(value)?;
        let memory = &self.region.memory;
        if let Ok(bytes) = memory.host_bytes() {
            return match self.width {
                WordWidth::Bits32 => bytes.store_u32(self.region.offset, value as u32),
                WordWidth::Bits64 => bytes.store_u64(self.region.offset, value),
            };
        }
        let raw = value.to_le_bytes();
        let part = &raw[..self.width.bytes() as usize];
        memory.shared.memory.write(self.region.offset, part)
    }

    /// Rejects a value that is wider than the word.
    pub(super) fn check_value(&self, value: u64) -> Result<()> {
        if self.width.fits(value) {
            return Ok(());
        }
        let what = format!("store {value:#x} in a {} word", self.width);
        Err(Error::new(Kind::InvalidArgument, what)
            .on(self.region.memory.describe())
            .why("the value is wider than the word")
            .fix("use word64"))
    }
}
