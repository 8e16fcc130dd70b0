//! CPU windows: mappings of device memory for loads and stores of the CPU.
#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;
use std::str::FromStr;

use serde::Serialize;

use super::address::{DeviceAddr, check_range};
use super::allocation::Region;
use super::backend::MemoryBackend;
use super::bytes::SharedBytes;
use super::copy::{self, Routine};
use crate::error::{Error, Kind, Result};

/// Environment variable that selects the path: `dmabuf`, `rm`, `gdrdrv`, `memfd` or `auto`.
pub const ENV_VAR: &str = "WARPWIRE_WINDOW";

/// How a window is mapped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
pub enum WindowPath {
    /// `mmap` of the dma-buf that CUDA exports (driver R610, CUDA 13.3, or newer).
    DmaBuf,
    /// The resource manager's map call, which every NVIDIA driver has.
    ResourceManager,
    /// gdrcopy's kernel module.
    Gdrdrv,
    /// The memfd that backs simulated memory.
    Memfd,
}

impl WindowPath {
    const ALL: [(&'static str, Self); 4] = [
        ("dmabuf", Self::DmaBuf),
        ("rm", Self::ResourceManager),
        ("gdrdrv", Self::Gdrdrv),
        ("memfd", Self::Memfd),
    ];
}

impl fmt::Display for WindowPath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::DmaBuf => "dma-buf mmap",
            Self::ResourceManager => "resource manager",
            Self::Gdrdrv => "gdrdrv",
            Self::Memfd => "memfd",
        })
    }
}

impl FromStr for WindowPath {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let found = Self::ALL.into_iter().find(|(name, _)| *name == text);
        found.map(|(_, path)| path).ok_or_else(|| {
            Error::new(Kind::Malformed, format!("read {text:?} as a window path"))
                .fix("use dmabuf, rm, gdrdrv or memfd")
        })
    }
}

/// The memory type of a mapping: how the CPU performs accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum MappingType {
    /// Stores are combined into bursts; loads are not cached. The usual case over PCIe.
    WriteCombining,
    /// As ordinary memory: coherent platforms, and the simulator.
    Cached,
    /// As device registers (some Arm platforms).
    Device,
}

impl fmt::Display for MappingType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::WriteCombining => "write-combining",
            Self::Cached => "cached",
            Self::Device => "device",
        })
    }
}

/// Requirements on a window.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct WindowOptions {
    /// Use only this path.
    pub path: Option<WindowPath>,
    /// Require this memory type; most platforms offer only one.
    pub mapping: Option<MappingType>,
}

setters! {
    WindowOptions {
    } optional {
        with_path => path: WindowPath,
        with_mapping => mapping: MappingType,
    }
}

impl WindowOptions {
    /// The path that `WARPWIRE_WINDOW` selects (`dmabuf`, `rm`, `gdrdrv`, `memfd`); the best one if
    /// it is unset, empty or `auto`.
    pub fn from_env() -> Result<Self> {
        let path = match std::env::var(ENV_VAR) {
            Ok(text) if text.is_empty() || text == "auto" => None,
            Ok(text) => Some(text.parse().map_err(|error: Error| error.on(ENV_VAR))?),
            Err(_) => None,
        };
        Ok(Self { path, mapping: None })
    }
}

/// A path that could not be used.
#[derive(Clone, Debug)]
pub struct RejectedPath {
    /// The path.
    pub path: WindowPath,
    /// Why it failed.
    pub why: Error,
}

/// A range that a backend mapped for the CPU. Dropping it unmaps the range.
pub struct CpuMapping {
    base: NonNull<u8>,
    len: u64,
    mapping: MappingType,
    _owner: Box<dyn Send + Sync>,
}

// SAFETY: the range belongs to this value; it is accessed through atomics and device copies only.
unsafe impl Send for CpuMapping {}
// SAFETY: as above.
unsafe impl Sync for CpuMapping {}

impl CpuMapping {
    /// `len` readable and writable bytes at `base`, which stay mapped until `owner` is dropped.
    pub(super) fn new(
        base: NonNull<u8>,
        len: u64,
        mapping: MappingType,
        owner: Box<dyn Send + Sync>,
    ) -> Self {
        Self { base, len, mapping, _owner: owner }
    }

    pub(super) fn base(&self) -> NonNull<u8> {
        self.base
    }
}

/// A range of device memory as the CPU sees it.
///
/// # Visibility
/// - **Another CPU thread** sees stores through [`bytes`](Window::bytes) with their release
///   ordering; [`write`](Window::write) is complete when it returns, and ordered before later
///   stores.
/// - **A kernel launched later** sees everything written before the launch.
/// - **A running kernel** sees a write some time after [`write`](Window::write) or
///   [`flush`](Window::flush) returns, without tearing 8-byte words. To publish data and then a
///   flag, write the data, then store the flag, and have the kernel read with volatile or acquire
///   loads at system scope.
/// - **Loads** through the window see what the device has written to its memory, and wait for the
///   CPU's own earlier writes through it.
///
/// The window keeps the memory alive: after a free it shows the old contents until it is dropped. A
/// child process does not inherit it.
///
/// ```
/// use warpwire::mem::sim::{Sim, SimConfig};
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let memory = gpu.alloc(4096).unwrap();
/// let window = memory.window().unwrap();
/// window.write(3, b"through the window").unwrap();
/// let mut back = [0; 18];
/// memory.read(3, &mut back).unwrap();
/// assert_eq!(&back, b"through the window");
/// assert!(window.write(4090, b"past the end").is_err());
/// ```
pub struct Window {
    mapped: CpuMapping,
    address: DeviceAddr,
    path: WindowPath,
    rejected: Vec<RejectedPath>,
    stores: Routine,
    loads: Routine,
}

impl Window {
    pub(super) fn open(
        region: &Region,
        memory: &dyn MemoryBackend,
        options: &WindowOptions,
    ) -> Result<Self> {
        let failure = |kind, why: String| {
            let what = format!("open a CPU window of {} bytes", region.len());
            Error::new(kind, what).on(region.allocation().describe()).why(why)
        };
        if region.is_empty() {
            return Err(failure(Kind::InvalidArgument, "the length is zero".into()));
        }
        let paths = memory.window_paths();
        if paths.is_empty() {
            let why = "it is host memory, which the CPU can access directly".into();
            return Err(failure(Kind::InvalidArgument, why).fix("use host_bytes"));
        }
        let wanted = |path: &WindowPath| options.path.is_none_or(|only| only == *path);
        let mut rejected = Vec::new();
        for path in paths.iter().copied().filter(wanted) {
            let mapped = memory.map(region.offset(), region.len(), path);
            match mapped.and_then(|mapped| check_mapping(mapped, options.mapping)) {
                Ok(mapped) => return Ok(Self::new(mapped, region.address(), path, rejected)),
                Err(why) => rejected.push(RejectedPath { path, why }),
            }
        }
        let reasons: Vec<_> = rejected.iter().map(|r| format!("{}: {}", r.path, r.why)).collect();
        let why = match reasons.is_empty() {
            true => "this memory has no path of that name".into(),
            false => reasons.join("; "),
        };
        Err(failure(Kind::Unsupported, why).fix("copy without a window: read and write"))
    }

    pub(super) fn new(
        mapped: CpuMapping,
        address: DeviceAddr,
        path: WindowPath,
        rejected: Vec<RejectedPath>,
    ) -> Self {
        let (stores, loads) = (Routine::for_stores(), Routine::for_loads());
        tracing::debug!(%path, %address, len = mapped.len, "window opened");
        Self { mapped, address, path, rejected, stores, loads }
    }

    /// Device address of the first byte.
    pub fn address(&self) -> DeviceAddr {
        self.address
    }

    /// Length in bytes.
    #[allow(clippy::len_without_is_empty)] // no window is empty
    pub fn len(&self) -> u64 {
        self.mapped.len
    }

    /// The path by which it is mapped.
    pub fn path(&self) -> WindowPath {
        self.path
    }

    /// The better paths that were tried, and why each failed.
    pub fn rejected_paths(&self) -> &[RejectedPath] {
        &self.rejected
    }

    /// The memory type of the mapping.
    pub fn mapping(&self) -> MappingType {
        self.mapped.mapping
    }

    /// A view for atomic access to single words. Over PCIe, aligned loads and stores are not torn;
    /// read-modify-write is atomic among CPU threads only.
    pub fn bytes(&self) -> SharedBytes<'_> {
        // SAFETY: mapped while this window lives, which the view's lifetime does not exceed.
        unsafe { SharedBytes::new(self.mapped.base, self.mapped.len as usize) }
    }

    /// Pointer to the first byte, for C programs. Valid while the window lives; use aligned
    /// volatile or atomic accesses.
    pub fn as_ptr(&self) -> NonNull<u8> {
        self.mapped.base
    }

    /// Copies `from` to device memory at `offset` of the window, with the widest stores available,
    /// and drains the write-combining buffers.
    #[inline]
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        let to = self.pointer(offset, from.len())?;
        // SAFETY: both ranges are valid for that length; the routine was detected as available;
        // `from` is ordinary memory, which cannot overlap device memory.
        unsafe { copy::store(self.stores, to.as_ptr(), from.as_ptr(), from.len()) };
        copy::store_fence();
        Ok(())
    }

    /// Like [`write`](Self::write), split over `threads` threads. Thread start-up pays off for
    /// megabytes.
    pub fn write_parallel(&self, threads: usize, offset: u64, from: &[u8]) -> Result<()> {
        check_range(offset, from.len() as u64, self.len(), "a CPU window")?;
        let part = from.len().div_ceil(threads.max(1)).max(1).next_multiple_of(4096);
        std::thread::scope(|scope| {
            let mut parts = from.chunks(part).enumerate();
            let own = parts.next();
            let write = |(number, bytes): (usize, &[u8])| {
                self.write(offset + (number * part) as u64, bytes)
            };
            let others: Vec<_> = parts.map(|chunk| scope.spawn(move || write(chunk))).collect();
            let mut outcome = own.map_or(Ok(()), write);
            for other in others {
                // The copy does not panic; if a thread did not finish, its bytes were not written.
                let lost = || Error::new(Kind::Busy, "write through a window by several threads");
                outcome = outcome.and(other.join().unwrap_or_else(|_| Err(lost())));
            }
            outcome
        })
    }

    /// Like [`write`](Self::write), with a given routine, for comparisons.
    pub fn write_with(&self, routine: Routine, offset: u64, from: &[u8]) -> Result<()> {
        let to = self.pointer(offset, from.len())?;
        check_routine(routine)?;
        // SAFETY: as in `write`; the routine is available.
        unsafe { copy::store(routine, to.as_ptr(), from.as_ptr(), from.len()) };
        copy::store_fence();
        Ok(())
    }

    /// Copies device memory at `offset` of the window into `into`, with the widest loads available.
    #[inline]
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        let from = self.pointer(offset, into.len())?;
        // SAFETY: as in `write`.
        unsafe { copy::load(self.loads, into.as_mut_ptr(), from.as_ptr(), into.len()) };
        Ok(())
    }

    /// Like [`read`](Self::read), with a given routine, for comparisons.
    pub fn read_with(&self, routine: Routine, offset: u64, into: &mut [u8]) -> Result<()> {
        let from = self.pointer(offset, into.len())?;
        check_routine(routine)?;
        // SAFETY: as in `write`; the routine is available.
        unsafe { copy::load(routine, into.as_mut_ptr(), from.as_ptr(), into.len()) };
        Ok(())
    }

    /// Waits until everything written through the window has reached the device. Costs a PCIe round
    /// trip.
    pub fn flush(&self) {
        copy::store_fence();
        // A PCIe read does not pass earlier posted writes.
        let _ = self.bytes().load_u32(0).or_else(|_| {
            let mut byte = [0];
            self.bytes().read(0, &mut byte).map(|()| 0)
        });
    }

    #[inline]
    fn pointer(&self, offset: u64, len: usize) -> Result<NonNull<u8>> {
        check_range(offset, len as u64, self.len(), "a CPU window")?;
        // SAFETY: in range by the check above.
        Ok(unsafe { self.mapped.base.add(offset as usize) })
    }
}

fn check_routine(routine: Routine) -> Result<()> {
    if routine.is_available() {
        return Ok(());
    }
    Err(Error::new(Kind::Unsupported, format!("copy with {routine}"))
        .why("this processor does not support it"))
}

fn check_mapping(mapped: CpuMapping, wanted: Option<MappingType>) -> Result<CpuMapping> {
    match wanted {
        Some(wanted) if wanted != mapped.mapping => {
            Err(Error::new(Kind::Unsupported, format!("map as {wanted}"))
                .why(format!("this platform maps it as {}", mapped.mapping)))
        }
        _ => Ok(mapped),
    }
}

impl fmt::Debug for Window {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Window({} bytes at {}, by {})", self.len(), self.address, self.path)
    }
}
