//! CPU windows through gdrcopy's kernel module (gdrdrv), where it is loaded.
//!
//! Written against the module's public interface; not tested on a machine that has the module.

use std::fs::File;
use std::os::fd::{AsRawFd, OwnedFd};

use super::super::window::{CpuMapping, MappingType};
use super::window::MappedRange;
use crate::error::{Error, Result};

const NODE: &str = "/dev/gdrdrv";
const MAGIC: u64 = 0xda;
/// The module pins in units of this GPU page size.
const GPU_PAGE: u64 = 64 << 10;

#[repr(C)]
#[derive(Default)]
struct PinParams {
    address: u64,
    size: u64,
    token: u64,
    va_space: u32,
    padding: u32,
    handle: u64,
}

#[repr(C)]
struct UnpinParams {
    handle: u64,
}

const PIN: u64 = request(1, 40);
/// All requests except pins encode the size of a pointer.
const UNPIN: u64 = request(2, 8);

const _: () = assert!(size_of::<PinParams>() == 40 && PIN == 0xc028_da01 && UNPIN == 0xc008_da02);

const fn request(number: u64, size: u64) -> u64 {
    3 << 30 | size << 16 | MAGIC << 8 | number
}

/// Pinned memory; unpinned on drop, and in any case when the descriptor is closed.
struct Pinned {
    module: OwnedFd,
    handle: u64,
}

pub(super) fn map(start: u64, len: u64) -> Result<CpuMapping> {
    let module = File::options().read(true).write(true).open(NODE).map(OwnedFd::from);
    let module = module.map_err(|error| {
        Error::os("map GPU memory", &error)
            .on(NODE)
            .fix("load the gdrdrv module, or use another path")
    })?;
    let first = start - start % GPU_PAGE;
    let size = (start + len).next_multiple_of(GPU_PAGE) - first;
    let mut pin = PinParams { address: first, size, ..PinParams::default() };
    call(&module, PIN, &mut pin)?;
    let pinned = Pinned { module, handle: pin.handle };
    // The offset of the mapping, in pages, is the handle by which the module finds the memory.
    let offset = pinned.handle * rustix::param::page_size() as u64;
    let mapped_range = MappedRange::of(&pinned.module, offset, size)?;
    let base = mapped_range.at(start - first);
    Ok(CpuMapping::new(base, len, MappingType::WriteCombining, Box::new((mapped_range, pinned))))
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let mut unpin = UnpinParams { handle: self.handle };
        if let Err(error) = call(&self.module, UNPIN, &mut unpin) {
            tracing::warn!(%error, "memory was not unpinned");
        }
    }
}

fn call<T>(module: &OwnedFd, code: u64, argument: &mut T) -> Result<()> {
    // SAFETY: each caller passes the structure that belongs to the request code.
    let done = unsafe { libc::ioctl(module.as_raw_fd(), code, std::ptr::from_mut(argument)) };
    if done == 0 {
        return Ok(());
    }
    Err(Error::os("issue an ioctl", &std::io::Error::last_os_error()).on(NODE))
}
