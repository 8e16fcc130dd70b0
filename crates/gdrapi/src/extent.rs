//! Determines the part of a pinned range that exists, and opens a window onto it.
//!
//! gdrcopy's kernel module pins GPU pages of 64 KiB regardless of allocation boundaries, so clients
//! round freely: UCX and libfabric pin from the page below a buffer to the page above, libfabric
//! one page too many if the buffer ends at a page boundary. CUDA knows allocations, not pages, so a
//! pinned range may exceed its allocation. Where small allocations share a block of device memory,
//! the window covers the whole pages inside that block. Otherwise the range may begin less than a
//! page before the allocation and end at most a page behind it; the window covers the part that
//! exists. If another allocation is in the omitted part, it is ambiguous which of the two the
//! client means, and the pin is rejected.
//!
//! The other way round, clients access more than they pinned: gdrcopy's own `pplat` pins 4 bytes
//! and copies 8. So a window covers the pinned pages as far as the allocation extends in them.
#![allow(unsafe_code)]

use warpwire::Error;
use warpwire::error::Kind;
use warpwire::mem::{self, Allocation, Backend, Device, DeviceAddr, Window, WindowOptions};

use crate::abi::GPU_PAGE;

/// CUDA allocations start at multiples of this.
const ALLOC_GRANULARITY: u64 = 256;

/// A range of device addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

impl Span {
    /// The range that a client pins; `None` if it is empty or exceeds the address space.
    pub(crate) fn new(address: u64, size: u64) -> Option<Self> {
        let end = address.checked_add(size)?;
        (size > 0).then_some(Self { start: address, end })
    }

    pub(crate) fn len(self) -> u64 {
        self.end - self.start
    }

    /// The range rounded out to whole GPU pages.
    pub(crate) fn pages(self) -> Option<Self> {
        let end = self.end.checked_next_multiple_of(GPU_PAGE)?;
        Some(Self { start: self.start - self.start % GPU_PAGE, end })
    }
}

/// Opens a window onto the pages of `wanted`, as far as they belong to the same allocation, or else
/// as [`open_exact`] does.
pub(crate) fn open(wanted: Span, pages: Span, simulator: bool) -> Result<(Window, Device), Error> {
    if wanted != pages
        && let Ok((device, anchor)) = owner(wanted, simulator)
        && anchor == wanted.start
        && borrow(&device, wanted).is_ok()
    {
        let found = match borrow(&device, pages) {
            Ok(_) => pages,
            Err(_) => mapped_extent(&device, anchor, pages),
        };
        let options = WindowOptions::from_env()?;
        // A window may be impossible although the memory exists: none spans two VMM objects.
        if let Ok(window) = borrow(&device, found).and_then(|memory| window(&memory, &options)) {
            return Ok((window, device));
        }
    }
    open_exact(wanted, simulator)
}

/// Opens a window onto the part of `wanted` that exists; returns the device as well.
fn open_exact(wanted: Span, simulator: bool) -> Result<(Window, Device), Error> {
    let options = WindowOptions::from_env()?;
    let (device, anchor) = owner(wanted, simulator)?;
    let rejection = match borrow(&device, wanted) {
        Ok(memory) => match window(&memory, &options) {
            Ok(window) => return Ok((window, device)),
            Err(rejection) => rejection,
        },
        Err(rejection) => {
            let found = mapped_extent(&device, anchor, wanted);
            // Small allocations share pages: then the window covers whole pages, as the kernel
            // module does.
            let around =
                borrow(&device, found)?.window_around(DeviceAddr::new(wanted.start), wanted.len());
            if let Ok(window) = around {
                return Ok((window, device));
            }
            check_gap_unowned(wanted, found, rejection)?;
            return Ok((window(&borrow(&device, found)?, &options)?, device));
        }
    };
    // libfabric's extra page may belong to the next object, and no window spans two objects.
    let shorter = Span { start: wanted.start, end: wanted.end.saturating_sub(GPU_PAGE) };
    if !wanted.end.is_multiple_of(GPU_PAGE) || shorter.end <= anchor {
        return Err(rejection);
    }
    let opened = borrow(&device, shorter).and_then(|memory| window(&memory, &options));
    opened.map(|window| (window, device)).map_err(|_| rejection)
}

/// The device, and the first address within the first page of the range that is device memory.
fn owner(wanted: Span, simulator: bool) -> Result<(Device, u64), Error> {
    let mut rejection = None;
    let later = (wanted.start + 1).next_multiple_of(ALLOC_GRANULARITY)
        ..wanted.end.min(wanted.start + GPU_PAGE);
    for at in std::iter::once(wanted.start).chain(later.step_by(ALLOC_GRANULARITY as usize)) {
        match mem::owner_of(DeviceAddr::new(at)) {
            Ok(device) if device.info().backend == Backend::Sim && !simulator => {
                return Err(Error::new(Kind::NotDeviceMemory, "pin memory")
                    .on(device.label())
                    .why("it is simulated memory")
                    .fix(format!("set {}=1", crate::sim::ENV_VAR)));
            }
            Ok(device) => return Ok((device, at)),
            Err(error) if error.kind() == &Kind::NotDeviceMemory => {
                rejection = rejection.or(Some(error));
            }
            // The simulator does not know the address, and CUDA is absent.
            Err(error) if simulator && error.kind() == &Kind::Unavailable => {}
            // Any other address would get the same answer.
            Err(error) => return Err(error),
        }
    }
    Err(rejection.unwrap_or_else(|| {
        Error::new(Kind::NotDeviceMemory, "pin memory").why("no device has memory at this address")
    }))
}

fn borrow(device: &Device, span: Span) -> Result<Allocation, Error> {
    // SAFETY: the borrow ends before the pinning call returns, and the C API requires the memory to
    // stay allocated during that call. The window, which outlives it, keeps the memory alive.
    unsafe { device.borrow(DeviceAddr::new(span.start), span.len()) }
}

fn window(memory: &Allocation, options: &WindowOptions) -> Result<Window, Error> {
    memory.window_with(0, memory.len(), options)
}

/// The contiguous memory around `anchor` inside `wanted`, by binary search: a driver quickly
/// reports whether a range is all memory, but not how far the memory extends.
fn mapped_extent(device: &Device, anchor: u64, wanted: Span) -> Span {
    let exists = |start, end| borrow(device, Span { start, end }).is_ok();
    let (mut from, mut good) = (wanted.start, anchor);
    while from < good {
        let middle = from + (good - from) / 2;
        if exists(middle, anchor + 1) { good = middle } else { from = middle + 1 }
    }
    let start = good;
    let (mut good, mut to) = (anchor + 1, wanted.end);
    while good < to {
        let middle = to - (to - good) / 2;
        if exists(anchor, middle) { good = middle } else { to = middle - 1 }
    }
    Span { start, end: good }
}

/// Rejects a pin whose omitted part exceeds what a client's rounding explains, or contains another
/// allocation.
fn check_gap_unowned(wanted: Span, found: Span, rejection: Error) -> Result<(), Error> {
    if found.start - wanted.start >= GPU_PAGE || wanted.end - found.end > GPU_PAGE {
        return Err(rejection);
    }
    let before = (wanted.start.next_multiple_of(ALLOC_GRANULARITY)..found.start)
        .step_by(ALLOC_GRANULARITY as usize);
    let behind = (found.end.next_multiple_of(ALLOC_GRANULARITY)..wanted.end)
        .step_by(ALLOC_GRANULARITY as usize);
    let other = before.chain(behind).find(|at| mem::owner_of(DeviceAddr::new(*at)).is_ok());
    match other {
        None => Ok(()),
        Some(at) => Err(Error::new(Kind::Unsupported, "pin memory")
            .why(format!(
                "the pages of {:#x} hold an allocation at {:#x}, another at {at:#x} and a gap \
                 between them",
                wanted.start, found.start
            ))
            .fix("pin the buffer itself, not the pages around it, or allocate at least 64 KiB")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use warpwire::mem::sim::{Sim, SimConfig};

    fn memory(len: u64) -> (Device, Allocation) {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let memory = gpu.alloc(len).unwrap();
        (gpu, memory)
    }

    #[test]
    fn ranges_round_to_pages() {
        assert_eq!(Span::new(5, 0), None);
        assert_eq!(Span::new(u64::MAX, 2), None);
        let span = Span::new(0x1_2345, 1).unwrap();
        assert_eq!(span.pages(), Some(Span { start: 0x1_0000, end: 0x2_0000 }));
        assert_eq!(Span::new(0x1_0000, 0x1_0000).unwrap().pages(), Span::new(0x1_0000, 0x1_0000));
        assert_eq!(Span::new(u64::MAX - 9, 5).unwrap().pages(), None);
    }

    #[test]
    fn a_rounded_range_is_clipped_to_the_memory() {
        let (_gpu, memory) = memory(1000);
        let start = memory.address().raw();
        for (from, size) in [(0, 1000), (0, 65_536), (-512, 1512), (-65_280, 2 * 65_536), (999, 1)]
        {
            let wanted = Span::new(start.wrapping_add_signed(from), size).unwrap();
            let (window, _) = open_exact(wanted, true).unwrap();
            assert_eq!(window.address().raw(), wanted.start.max(start));
            assert_eq!(window.address().raw() + window.len(), wanted.end.min(start + 1000));
        }
    }

    #[test]
    fn a_window_covers_the_pinned_pages_of_the_allocation() {
        let (_gpu, memory) = memory(3 * GPU_PAGE + 1000);
        let (start, end) = (memory.address().raw(), memory.address().raw() + memory.len());
        for (from, size) in [(0, 4), (8, 4), (GPU_PAGE + 5000, 1), (3 * GPU_PAGE + 990, 10)] {
            let wanted = Span::new(start + from, size).unwrap();
            let pages = wanted.pages().unwrap();
            let (window, _) = open(wanted, pages, true).unwrap();
            assert_eq!(window.address().raw(), pages.start.max(start));
            assert_eq!(window.address().raw() + window.len(), pages.end.min(end));
        }
    }

    #[test]
    fn a_range_beyond_rounding_is_rejected() {
        let (_gpu, memory) = memory(1000);
        let start = memory.address().raw();
        for (from, size) in [(0, 1000 + 65_537), (-65_536, 66_000), (1000, 1), (-70_000, 80_000)] {
            let wanted = Span::new(start.wrapping_add_signed(from), size).unwrap();
            let error = open(wanted, wanted.pages().unwrap(), true).unwrap_err();
            assert_eq!(error.kind(), &Kind::NotDeviceMemory, "{from}");
        }
    }

    #[test]
    fn simulated_memory_is_rejected_unless_enabled() {
        let (_gpu, memory) = memory(64);
        let wanted = Span::new(memory.address().raw(), 64).unwrap();
        let error = open(wanted, wanted.pages().unwrap(), false).unwrap_err();
        assert_eq!(error.kind(), &Kind::NotDeviceMemory);
    }
}
