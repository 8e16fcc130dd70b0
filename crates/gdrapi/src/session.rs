//! What a session and a pin are, and what each call on them means.

use std::collections::BTreeSet;
use std::ffi::c_int;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{MappedRwLockReadGuard, Mutex};
use warpwire::mem::{Device, MappingType, Window, cuda};

use crate::abi::{self, GPU_PAGE, Info, InfoV2, attribute, map, mapping, pin};
use crate::errno::{self, Result};
use crate::extent::{self, Span};
use crate::log::{self, Level};
use crate::process::Process;
use crate::sim;

/// What `gdr_open` gives: pins that are undone together.
pub(crate) struct Session {
    /// Whether it takes simulated memory.
    simulator: bool,
    pins: Mutex<BTreeSet<u64>>,
    /// The devices of its pins: opened once, so that what was proved about their memory stays proved.
    devices: Mutex<Vec<Device>>,
}

/// A range of device memory that is held, and that may be mapped.
///
/// The window is opened when the memory is pinned and goes when it is unpinned: between the two the memory
/// stays, whatever its owner does. Mapping it hands out the pointer.
pub(crate) struct Pin {
    session: u64,
    wanted: Span,
    pages: Span,
    window: Window,
    /// How many bytes from the base copies may reach; 0 while it is not mapped.
    mapped: AtomicU64,
}

type ReadGuard<T> = MappedRwLockReadGuard<'static, T>;

fn session(number: u64) -> Result<ReadGuard<Session>> {
    Process::get().sessions.get(number).ok_or_else(|| {
        log::line(
            Level::Error,
            || "no such session in this process: was it closed, or a parent's?",
        );
        libc::EINVAL
    })
}

fn pinned(handle: u64) -> Result<ReadGuard<Pin>> {
    Process::get().pins.get(handle).ok_or_else(|| {
        log::line(Level::Error, || "no such memory handle in this process: was it unpinned?");
        libc::EINVAL
    })
}

/// The pin, if it is one of that session's.
fn session_pin(number: u64, handle: u64) -> Result<ReadGuard<Pin>> {
    drop(session(number)?);
    let pin = pinned(handle)?;
    if pin.session == number { Ok(pin) } else { Err(invalid("the handle is another session's")) }
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

/// A new session, if this machine has device memory that could be mapped.
pub(crate) fn open() -> Result<u64> {
    let simulator = sim::is_on();
    if !simulator {
        cuda::driver_version().map_err(|error| failed(&error))?;
        check_paths()?;
    }
    let fresh = Session { simulator, pins: Mutex::default(), devices: Mutex::default() };
    Process::get().sessions.insert(fresh).ok_or(libc::ENOMEM)
}

/// Clients take an open session for a promise that pins work (NCCL gives up when one fails): so where no
/// path can lead to device memory, there is no session. Trying a window would say it surely, but it
/// would put a context onto a GPU that the client may not mean to use.
fn check_paths() -> Result<()> {
    /// CUDA 13.3 is the first whose dma-bufs can be mapped.
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

/// Ends a session: waits for the calls on it, then unpins all that it has.
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
        pin::FORCE_PCIE => return Err(invalid("pins that insist on PCIe are not offered")),
        _ => return Err(invalid("unknown pin flags")),
    }
    let wanted = Span::new(address, size);
    let pages = wanted.and_then(Span::pages);
    let Some((wanted, pages)) = wanted.zip(pages) else {
        return Err(invalid("the range is empty or passes the end of the address space"));
    };
    let opened = extent::open(wanted, session.simulator);
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

/// Unpins: waits for copies through the handle, then takes the window away, mapped or not.
pub(crate) fn unpin(number: u64, handle: u64) -> Result<()> {
    let session = session(number)?;
    if !session.pins.lock().remove(&handle) {
        return Err(invalid("the session has no such memory handle"));
    }
    let removed = Process::get().pins.remove(handle);
    log::line(Level::Debug, || format!("unpinned {:?}", removed.as_ref().map(|pin| &pin.window)));
    Ok(())
}

/// Hands out the pointer that stands for the first address of the pin's pages.
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
        return Err(invalid("the size to map is zero or more than was pinned"));
    }
    if wanted.is_some_and(|wanted| wanted != pin.window.mapping()) {
        // gdrcopy's answer without its kernel module, where a type is fixed by the platform too.
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

/// Takes the pointer back.
pub(crate) fn unmap(number: u64, handle: u64, base: usize, size: u64) -> Result<()> {
    let pin = session_pin(number, handle)?;
    let mapped = pin.mapped.load(Ordering::Acquire);
    if mapped == 0 {
        return Err(invalid("the memory is not mapped"));
    }
    if base != pin.base() || size == 0 || pin.mapped_len(size) > mapped {
        return Err(invalid("that is not what was mapped"));
    }
    // Of two threads that unmap, one does.
    let first = pin.mapped.compare_exchange(mapped, 0, Ordering::AcqRel, Ordering::Acquire);
    first.map(|_| ()).map_err(|_| libc::EINVAL)
}

/// What there is to know about a pin.
pub(crate) fn info(number: u64, handle: u64) -> Result<InfoV2> {
    Ok(session_pin(number, handle)?.info())
}

/// Whether the owner's free took the memory away: it never does.
pub(crate) fn callback_flag(number: u64, handle: u64) -> Result<c_int> {
    session_pin(number, handle).map(|_| 0)
}

/// What sort of library this is.
pub(crate) fn attribute(number: u64, attr: std::ffi::c_uint) -> Result<c_int> {
    drop(session(number)?);
    match attr {
        // Pinned memory outlives its free.
        attribute::USE_PERSISTENT_MAPPING => Ok(1),
        attribute::SUPPORT_PIN_FLAG_FORCE_PCIE => Ok(0),
        // "There is no gdrdrv behind this library" is what clients read into it, and it is true whichever
        // path a window takes. NCCL 2.32 then does not ask for the driver's version, and gdrcopy's own
        // tests leave out those that copy the session's structure and hand its descriptor around.
        // Clients that do ask for the version, whatever this says (NCCL up to 2.30, NVSHMEM), get one.
        attribute::USING_DMA_BUF_MMAP => Ok(1),
        _ => Err(invalid("unknown attribute")),
    }
}

/// The version of a driver that could do what this library does.
pub(crate) fn driver_version(number: u64) -> Result<(c_int, c_int)> {
    session(number).map(|_| abi::VERSION)
}

/// Runs `copy` with the window and the offset in it that `size` bytes at `pointer` are, unless the host's
/// side is a null pointer.
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
        return Err(invalid("the host's side is a null pointer"));
    }
    copy(&pin.window, offset).map_err(|error| failed(&error))
}

impl Pin {
    /// The pointer that stands for `pages.start`. What lies below the window there is not mapped, and need
    /// not exist; the wanted range begins at the right distance from it.
    fn base(&self) -> usize {
        let before = self.window.address().raw() - self.pages.start;
        self.window.as_ptr().addr().get().wrapping_sub(before as usize)
    }

    /// How far from the base a mapping of `size` bytes goes: whole CPU pages, counted from the pinned address,
    /// so that clients need not add what that lies above its page.
    fn mapped_len(&self, size: u64) -> u64 {
        const CPU_PAGE: u64 = 4096;
        let size = (self.wanted.start - self.pages.start).saturating_add(size);
        size.checked_next_multiple_of(CPU_PAGE).unwrap_or(u64::MAX).min(self.pages.len())
    }

    /// Where in the window a range is that begins with `pointer`; the window checks its end.
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
