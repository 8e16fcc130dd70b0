//! Which part of a pinned range exists, and a window onto it.
//!
//! gdrcopy's kernel module pins GPU pages of 64 KiB whoever owns what lies in them, so clients round as they
//! like: UCX and libfabric pin from the page below a buffer to the page above, libfabric a whole page
//! too many where the buffer ends with one. CUDA knows allocations, not pages. So a pinned range may
//! pass its owner's allocation. Where small allocations share a piece of device memory, the window shows the
//! whole pages inside that piece. Elsewhere it may pass by less than a page before the allocation, and by a page
//! behind it; the window shows what is there. Should another allocation lie in the part that is left out,
//! nobody can say which of the two the client means, and the pin is refused.
#![allow(unsafe_code)]

use warpwire::Error;
use warpwire::error::Kind;
use warpwire::mem::{self, Allocation, Backend, Device, DeviceAddr, Window, WindowOptions};

use crate::abi::GPU_PAGE;

/// CUDA's allocations begin at multiples of this.
const ALLOC_GRANULARITY: u64 = 256;

/// A range of device addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) start: u64,
    pub(crate) end: u64,
}

impl Span {
    /// The range that a client pins, unless it is empty or passes the end of the address space.
    pub(crate) fn new(address: u64, size: u64) -> Option<Self> {
        let end = address.checked_add(size)?;
        (size > 0).then_some(Self { start: address, end })
    }

    pub(crate) fn len(self) -> u64 {
        self.end - self.start
    }

    /// The GPU pages around it.
    pub(crate) fn pages(self) -> Option<Self> {
        let end = self.end.checked_next_multiple_of(GPU_PAGE)?;
        Some(Self { start: self.start - self.start % GPU_PAGE, end })
    }
}

/// Opens a window onto what exists of `wanted`, and tells the device.
pub(crate) fn open(wanted: Span, simulator: bool) -> Result<(Window, Device), Error> {
    let options = WindowOptions::from_env()?;
    let (device, anchor) = owner(wanted, simulator)?;
    let refusal = match borrow(&device, wanted) {
        Ok(memory) => match window(&memory, &options) {
            Ok(window) => return Ok((window, device)),
            Err(refusal) => refusal,
        },
        Err(refusal) => {
            let found = mapped_extent(&device, anchor, wanted);
            // Small allocations share pages: then all of the pages are shown, as the module would.
            let around =
                borrow(&device, found)?.window_around(DeviceAddr::new(wanted.start), wanted.len());
            if let Ok(window) = around {
                return Ok((window, device));
            }
            check_gap_unowned(wanted, found, refusal)?;
            return Ok((window(&borrow(&device, found)?, &options)?, device));
        }
    };
    // libfabric's page too many may belong to the object behind, which no window spans with this one.
    let shorter = Span { start: wanted.start, end: wanted.end.saturating_sub(GPU_PAGE) };
    if !wanted.end.is_multiple_of(GPU_PAGE) || shorter.end <= anchor {
        return Err(refusal);
    }
    let opened = borrow(&device, shorter).and_then(|memory| window(&memory, &options));
    opened.map(|window| (window, device)).map_err(|_| refusal)
}

/// The device, and the first address in the first page of the range that is memory.
fn owner(wanted: Span, simulator: bool) -> Result<(Device, u64), Error> {
    let mut refusal = None;
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
                refusal = refusal.or(Some(error));
            }
            // The simulator does not know it, and there is no CUDA to ask.
            Err(error) if simulator && error.kind() == &Kind::Unavailable => {}
            // No other address would be answered differently.
            Err(error) => return Err(error),
        }
    }
    Err(refusal.unwrap_or_else(|| {
        Error::new(Kind::NotDeviceMemory, "pin memory").why("no device has memory there")
    }))
}

fn borrow(device: &Device, span: Span) -> Result<Allocation, Error> {
    // SAFETY: the borrow ends before the call that pins does, and C's rule for that call is that the
    // memory stays allocated during it. What is left then is a window, which keeps it alive by itself.
    unsafe { device.borrow(DeviceAddr::new(span.start), span.len()) }
}

fn window(memory: &Allocation, options: &WindowOptions) -> Result<Window, Error> {
    memory.window_with(0, memory.len(), options)
}

/// The memory around `anchor` without a gap, inside `wanted`: found by halving, since a driver is quick to
/// say whether a range is all memory, and does not say how far it goes.
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

/// Refuses to leave out more than a client's rounding explains, or what may be what it wanted.
fn check_gap_unowned(wanted: Span, found: Span, refusal: Error) -> Result<(), Error> {
    if found.start - wanted.start >= GPU_PAGE || wanted.end - found.end > GPU_PAGE {
        return Err(refusal);
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
                "the pages of {:#x} hold an allocation at {:#x}, another at {at:#x} and a gap between them",
                wanted.start, found.start
            ))
            .fix("pin the buffer itself, not the pages around it, or allocate 64 KiB and more")),
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
    fn what_passes_the_memory_by_a_rounding_is_left_out() {
        let (_gpu, memory) = memory(1000);
        let start = memory.address().raw();
        for (from, size) in [(0, 1000), (0, 65_536), (-512, 1512), (-65_280, 2 * 65_536), (999, 1)]
        {
            let wanted = Span::new(start.wrapping_add_signed(from), size).unwrap();
            let (window, _) = open(wanted, true).unwrap();
            assert_eq!(window.address().raw(), wanted.start.max(start));
            assert_eq!(window.address().raw() + window.len(), wanted.end.min(start + 1000));
        }
    }

    #[test]
    fn what_passes_it_further_is_refused() {
        let (_gpu, memory) = memory(1000);
        let start = memory.address().raw();
        for (from, size) in [(0, 1000 + 65_537), (-65_536, 66_000), (1000, 1), (-70_000, 80_000)] {
            let wanted = Span::new(start.wrapping_add_signed(from), size).unwrap();
            assert_eq!(open(wanted, true).unwrap_err().kind(), &Kind::NotDeviceMemory, "{from}");
        }
    }

    #[test]
    fn simulated_memory_is_no_memory_unless_asked_for() {
        let (_gpu, memory) = memory(64);
        let wanted = Span::new(memory.address().raw(), 64).unwrap();
        assert_eq!(open(wanted, false).unwrap_err().kind(), &Kind::NotDeviceMemory);
    }
}
