//! Sessions and pins, and the semantics of each call on them.

use std::collections::BTreeSet;
use std::ffi::c_int;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{MappedRwLockReadGuard, Mutex};
use warpwire::mem::{Device, MappingType, Window, cuda};

use crate::abi::{self, GPU_PAGE, Info, InfoV2, attribute, map, mapping, pin};
use crate::errno::{self, Result};
use crate::extent::{self, Span};
use crate::log::{self, Level};
use crate::process::Process;
use crate::sim;

/// Differences from gdrcopy with its kernel module to remove, separated by commas: `map` (an
/// address that is not a multiple of 64 KiB cannot be mapped), `fork` (attribute 3 is 0).
const STRICT_VAR: &str = "WARPWIRE_GDRAPI_STRICT";

/// The object behind `gdr_open`: a set of pins that are released together.
pub(crate) struct Session {
    /// Whether simulated memory is accepted.
    simulator: bool,
    pins: Mutex<BTreeSet<u64>>,
    /// The devices of its pins, kept open so that their memory is validated only once.
    devices: Mutex<Vec<Device>>,
}

/// A pinned range of device memory, which may be mapped.
///
/// The window is opened when the memory is pinned and dropped when it is unpinned: in between the
/// memory stays valid, even if its owner frees it. Mapping returns the pointer.
pub(crate) struct Pin {
    session: u64,
    wanted: Span,
    pages: Span,
    window: Window,
    /// Number of bytes from the base that copies may access; 0 while not mapped.
    mapped: AtomicU64,
}

type ReadGuard<T> = MappedRwLockReadGuard<'static, T>;

fn session(number: u64) -> Result<ReadGuard<Session>> {
    Process::get().sessions.get(number).ok_or_else(|| {
        log::line(
            Level::Error,
            || "no such session in this process: it was closed, or belongs to the parent",
        );
        libc::EINVAL
    })
}

fn pinned(handle: u64) -> Result<ReadGuard<Pin>> {
    Process::get().pins.get(handle).ok_or_else(|| {
        log::line(
            Level::Error,
            || "no such memory handle in this process: it may have been unpinned",
        );
        libc::EINVAL
    })
}

/// The pin, if it belongs to this session.
fn session_pin(number: u64, handle: u64) -> Result<ReadGuard<Pin>> {
    drop(session(number)?);
    let pin = pinned(handle)?;
    if pin.session == number {
        Ok(pin)
    } else {
        Err(invalid("the handle belongs to another session"))
    }
}

#[cold]
fn invalid(why: &str) -> errno::Errno {
    log::line(Level::Error, || why);
    libc::EINVAL
}

#[cold]
fn failed(error: &warpwire::Error) -> errno::Errno {
    log::line(Level::Error, || error);
    errno::of(error)
}

/// Whether [`STRICT_VAR`] lists this difference from gdrcopy, which is then removed.
fn strict(what: &str) -> bool {
    static LIST: OnceLock<String> = OnceLock::new();
    let list = LIST.get_or_init(|| std::env::var(STRICT_VAR).unwrap_or_default());
    list.split(',').any(|entry| entry.trim() == what)
}

/// Opens a session, if device memory can be mapped on this machine.
pub(crate) fn open() -> Result<u64> {
    let simulator = sim::is_on();
    if !simulator {
        cuda::driver_version().map_err(|error| failed(&error))?;
        check_paths()?;
    }
    let fresh = Session { simulator, pins: Mutex::default(), devices: Mutex::default() };
    Process::get().sessions.insert(fresh).ok_or(libc::ENOMEM)
}

/// Clients expect pins to work once a session is open (NCCL gives up if one fails): so if there is
/// no path to device memory, opening a session fails. Opening a window would be a reliable test,
/// but it would create a context on a GPU that the client may not use.
fn check_paths() -> Result<()> {
    /// CUDA 13.3 is the first version whose dma-bufs can be mapped.
    const MAPPABLE: (u32, u32) = (13, 3);
    let usable = |path| std::fs::File::options().read(true).write(true).open(path).is_ok();
    let mappable = cuda::driver_version().is_ok_and(|version| version >= MAPPABLE);
    if mappable || usable("/dev/nvidiactl") || usable("/dev/gdrdrv") {
        return Ok(());
    }
    log::line(Level::Error, || {
        "no way to map device memory: CUDA is older than 13.3, and neither /dev/nvidiactl nor \
         /dev/gdrdrv can be opened"
    });
    Err(libc::ENODEV)
}

/// Closes a session: waits for calls in progress, then unpins all of its memory.
pub(crate) fn close(number: u64) -> Result<()> {
    let process = Process::get();
    let ended = process.sessions.remove(number).ok_or_else(|| invalid("no such session"))?;
    for handle in std::mem::take(&mut *ended.pins.lock()) {
        drop(process.pins.remove(handle));
    }
    Ok(())
}

/// Pins `size` bytes at `address`.
pub(crate) fn pin(number: u64, address: u64, size: u64, flags: u32) -> Result<u64> {
    let session = session(number)?;
    match flags {
        pin::DEFAULT => {}
        pin::FORCE_PCIE => return Err(invalid("pins that require PCIe are not supported")),
        _ => return Err(invalid("unknown pin flags")),
    }
    let wanted = Span::new(address, size);
    let pages = wanted.and_then(Span::pages);
    let Some((wanted, pages)) = wanted.zip(pages) else {
        return Err(invalid("the range is empty or exceeds the address space"));
    };
    let opened = extent::open(wanted, pages, session.simulator);
    let (window, device) = opened.map_err(|error| failed(&error))?;
    log::line(Level::Info, || format!("pinned {size} bytes at {address:#x}: {window:?}"));
    let mut devices = session.devices.lock();
    if !devices.contains(&device) {
        devices.push(device);
    }
    drop(devices);
    let pin = Pin { session: number, wanted, pages, window, mapped: AtomicU64::new(0) };
    let handle = Process::get().pins.insert(pin).ok_or(libc::ENOMEM)?;
    session.pins.lock().insert(handle);
    Ok(handle)
}

/// Unpins: waits for copies through the handle, then drops the window, even if it is mapped.
pub(crate) fn unpin(number: u64, handle: u64) -> Result<()> {
    let session = session(number)?;
    if !session.pins.lock().remove(&handle) {
        return Err(invalid("the session has no such memory handle"));
    }
    let removed = Process::get().pins.remove(handle);
    log::line(Level::Debug, || format!("unpinned {:?}", removed.as_ref().map(|pin| &pin.window)));
    Ok(())
}

/// Returns the pointer that corresponds to the first address of the pin's pages.
pub(crate) fn map(number: u64, handle: u64, size: u64, flags: c_int) -> Result<usize> {
    let pin = session_pin(number, handle)?;
    let wanted = match flags {
        map::DEFAULT => None,
        map::WRITE_COMBINING => Some(MappingType::WriteCombining),
        map::CACHED => Some(MappingType::Cached),
        map::DEVICE => Some(MappingType::Device),
        _ => return Err(invalid("unknown map flags")),
    };
    if pin.mapped.load(Ordering::Acquire) != 0 {
        log::line(Level::Error, || "the memory is mapped already");
        return Err(libc::EAGAIN);
    }
    if size == 0 || size > pin.pages.len() {
        return Err(invalid("the size to map is zero or exceeds the pinned pages"));
    }
    if strict("map") && pin.wanted.start != pin.pages.start {
        return Err(invalid("the pinned address is not a multiple of 64 KiB (strict mode)"));
    }
    if wanted.is_some_and(|wanted| wanted != pin.window.mapping()) {
        // The same answer as gdrcopy without its kernel module, where the platform determines the
        // type too.
        let offered = pin.window.mapping();
        log::line(Level::Error, || format!("this platform maps device memory as {offered}"));
        return Err(libc::EINVAL);
    }
    let mapped_len = pin.mapped_len(size);
    let first = pin.mapped.compare_exchange(0, mapped_len, Ordering::AcqRel, Ordering::Acquire);
    first.map_err(|_| libc::EAGAIN)?;
    log::line(Level::Debug, || format!("mapped {size} bytes of {:?}", pin.window));
    Ok(pin.base())
}

/// Invalidates the pointer.
pub(crate) fn unmap(number: u64, handle: u64, base: usize, size: u64) -> Result<()> {
    let pin = session_pin(number, handle)?;
    let mapped = pin.mapped.load(Ordering::Acquire);
    if mapped == 0 {
        return Err(invalid("the memory is not mapped"));
    }
    if base != pin.base() || size == 0 || pin.mapped_len(size) > mapped {
        return Err(invalid("pointer or size do not match the mapping"));
    }
    // If two threads unmap at the same time, one succeeds.
    let first = pin.mapped.compare_exchange(mapped, 0, Ordering::AcqRel, Ordering::Acquire);
    first.map(|_| ()).map_err(|_| libc::EINVAL)
}

/// Describes a pin.
pub(crate) fn info(number: u64, handle: u64) -> Result<InfoV2> {
    Ok(session_pin(number, handle)?.info())
}

/// Whether the owner's free invalidated the memory: it never does.
pub(crate) fn callback_flag(number: u64, handle: u64) -> Result<c_int> {
    session_pin(number, handle).map(|_| 0)
}

/// The value of a library attribute.
pub(crate) fn attribute(number: u64, attr: std::ffi::c_uint) -> Result<c_int> {
    drop(session(number)?);
    match attr {
        // Pinned memory outlives its free.
        attribute::USE_PERSISTENT_MAPPING => Ok(1),
        attribute::SUPPORT_PIN_FLAG_FORCE_PCIE => Ok(0),
        // Clients read this as "no gdrdrv behind the library", which is true for every kind of
        // window. NCCL 2.32 then does not query the driver's version, and gdrcopy's own tests skip
        // those that copy the session's structure and pass its descriptor around. Clients that
        // query the version anyway (NCCL up to 2.30, NVSHMEM) get one. The tests of fork are
        // skipped too, although a child gets neither mappings nor handles here: with 0 they run.
        attribute::USING_DMA_BUF_MMAP => Ok(c_int::from(!strict("fork"))),
        _ => Err(invalid("unknown attribute")),
    }
}

/// The version of the driver that this library emulates.
pub(crate) fn driver_version(number: u64) -> Result<(c_int, c_int)> {
    session(number).map(|_| abi::VERSION)
}

/// Calls `copy` with the window and the offset of the `size` bytes at `pointer` in it, unless the
/// host pointer is null.
pub(crate) fn copy(
    handle: u64,
    pointer: usize,
    size: usize,
    host_is_null: bool,
    copy: impl FnOnce(&Window, u64) -> warpwire::Result<()>,
) -> Result<()> {
    let pin = pinned(handle)?;
    let mapped = pin.mapped.load(Ordering::Acquire);
    if mapped == 0 {
        return Err(invalid("the memory is not mapped"));
    }
    if size == 0 {
        return Ok(());
    }
    let offset = pin.offset(pointer, size as u64, mapped);
    let offset = offset.ok_or_else(|| invalid("the range is not inside the mapping"))?;
    if host_is_null {
        return Err(invalid("the host pointer is null"));
    }
    copy(&pin.window, offset).map_err(|error| failed(&error))
}

impl Pin {
    /// The pointer that corresponds to `pages.start`. The part below the window is not mapped and
    /// need not exist; the pinned range is at the correct distance from it.
    fn base(&self) -> usize {
        let before = self.window.address().raw() - self.pages.start;
        self.window.as_ptr().addr().get().wrapping_sub(before as usize)
    }

    /// The length of a mapping of `size` bytes, from the base: whole CPU pages, counted from the
    /// pinned address, so that clients need not add its offset in its page.
    fn mapped_len(&self, size: u64) -> u64 {
        const CPU_PAGE: u64 = 4096;
        let size = (self.wanted.start - self.pages.start).saturating_add(size);
        size.checked_next_multiple_of(CPU_PAGE).unwrap_or(u64::MAX).min(self.pages.len())
    }

    /// The offset in the window of a range that begins at `pointer`; `None` if it is outside.
    fn offset(&self, pointer: usize, size: u64, mapped: u64) -> Option<u64> {
        let at = pointer.wrapping_sub(self.base()) as u64;
        if at.checked_add(size)? > mapped {
            return None;
        }
        let offset = (self.pages.start + at).checked_sub(self.window.address().raw())?;
        (offset.checked_add(size)? <= self.window.len()).then_some(offset)
    }

    fn info(&self) -> InfoV2 {
        let mapped = self.mapped.load(Ordering::Acquire) != 0;
        let (mapping_type, bits) = match (mapped, self.window.mapping()) {
            (false, _) => (mapping::NONE, 0),
            (true, MappingType::WriteCombining) => {
                (mapping::WRITE_COMBINING, abi::BIT_MAPPED | abi::BIT_WRITE_COMBINING)
            }
            (true, MappingType::Cached) => (mapping::CACHED, abi::BIT_MAPPED),
            (true, MappingType::Device) => (mapping::DEVICE, abi::BIT_MAPPED),
        };
        let first = Info {
            va: self.pages.start,
            mapped_size: self.pages.len(),
            page_size: GPU_PAGE as u32,
            bits,
            ..Info::default()
        };
        InfoV2 { first, mapping_type }
    }
}
