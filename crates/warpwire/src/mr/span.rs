//! Ranges of registered memory that a key was resolved to.

use std::fmt;
use std::sync::Weak;

use super::Access;
use super::atomics;
use super::denied::AccessDenied;
use super::kernel_use::KernelUse;
use super::registration::{Registration, Target};
use super::revocable_slot::SlotGuard;
use crate::mem::{CopyTicket, Device, Region, SharedBytes};
use crate::mlx5::Atomic;

/// A range of registered memory, checked for access.
///
/// While it exists, deregistration blocks: keep it for one copy, and never while deregistering. A
/// leaked span blocks deregistration forever.
///
/// ```
/// use warpwire::mem::sim::{Sim, SimConfig};
/// use warpwire::mr::{Access, Registry};
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let registry = Registry::new();
/// let pd = registry.pd();
/// let memory = gpu.alloc(4096).unwrap();
/// let mr = registry.register(&pd, memory.whole().unwrap(), Some(0), Access::ALL).unwrap();
/// let span = registry.resolve(mr.rkey(), pd.id(), Access::REMOTE_ATOMIC, 64, 8).unwrap();
/// assert_eq!(span.fetch_add(0, 5).unwrap(), span.compare_swap(0, 5, 9).unwrap() - 5);
/// let mut atomics = [0; 8];
/// span.gather(0, &mut atomics).unwrap();
/// assert_eq!(u64::from_ne_bytes(atomics), 9);
/// ```
pub struct Span<'a> {
    /// `None` for an empty range, which needs no key.
    guard: Option<SlotGuard<'a, Registration>>,
    /// From the start of the registration.
    offset: u64,
    len: u64,
}

impl<'a> Span<'a> {
    pub(super) fn empty() -> Self {
        Self { guard: None, offset: 0, len: 0 }
    }

    /// The caller has checked that the range is inside the registration.
    #[inline]
    pub(super) fn new(guard: SlotGuard<'a, Registration>, offset: u64, len: u64) -> Self {
        Self { guard: Some(guard), offset, len }
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether each copy has a high fixed cost, as on device memory that is not accessed through a
    /// window only, so that few large copies are cheaper than many small ones.
    pub fn is_device(&self) -> bool {
        match self.guard.as_deref().map(|registration| &registration.target) {
            Some(Target::Device { memory, .. }) => memory.has_costly_copies(),
            Some(Target::Custom { custom_memory, .. }) => custom_memory.is_slow(),
            Some(Target::Host(_) | Target::Window(_)) | None => false,
        }
    }

    /// Whether writes are staged, and reach the memory only by
    /// [`Registry::flush_staged`](super::Registry::flush_staged).
    pub fn is_staged(&self) -> bool {
        match self.guard.as_deref().map(|registration| &registration.target) {
            Some(Target::Device { memory, .. }) => memory.is_staged(),
            _ => false,
        }
    }

    /// Copies `into.len()` bytes at `offset` of the range to `into`.
    #[inline]
    pub fn gather(&self, offset: u64, into: &mut [u8]) -> Result<(), AccessDenied> {
        let Some((target, at)) = self.locate(offset, into.len() as u64)? else { return Ok(()) };
        match target {
            Target::Host(range) => {
                range.bytes().read_cached(at, into).map_err(|_| AccessDenied::Range)
            }
            Target::Device { memory, region } => {
                memory.read(region.offset() + at, into, &|| self.is_revoked())
            }
            Target::Custom { custom_memory, .. } => custom_memory.read(at, into),
            Target::Window(_) => Err(AccessDenied::Range),
        }
    }

    /// Copies `from` to `offset` of the range.
    #[inline]
    pub fn scatter(&self, offset: u64, from: &[u8]) -> Result<(), AccessDenied> {
        let Some((target, at)) = self.locate(offset, from.len() as u64)? else { return Ok(()) };
        match target {
            Target::Host(range) => {
                range.bytes().write_cached(at, from).map_err(|_| AccessDenied::Range)
            }
            Target::Device { memory, region } => {
                memory.write(region.offset() + at, from, &|| self.is_revoked())
            }
            Target::Custom { custom_memory, .. } => custom_memory.write(at, from),
            Target::Window(_) => Err(AccessDenied::Range),
        }
    }

    /// Stores `swap` in the 64-bit word at `offset` if it equals `compare`. Returns the previous
    /// value.
    pub fn compare_swap(&self, offset: u64, compare: u64, swap: u64) -> Result<u64, AccessDenied> {
        self.atomic(offset, &Atomic::CompareSwap { compare, swap })
    }

    /// Adds to the 64-bit word at `offset`. Returns the previous value.
    pub fn fetch_add(&self, offset: u64, add: u64) -> Result<u64, AccessDenied> {
        self.atomic(offset, &Atomic::FetchAdd { add })
    }

    /// Applies `op` to the word at `offset`, of 4 or 8 bytes in host byte order. Returns the
    /// previous value.
    ///
    /// The word's own address must be aligned; with a custom `iova`, the address in the work
    /// request does not show that.
    pub fn atomic(&self, offset: u64, op: &Atomic) -> Result<u64, AccessDenied> {
        let width = u64::from(op.width().bytes());
        let Some((target, at)) = self.locate(offset, width)? else {
            return Err(AccessDenied::Range);
        };
        let aligned = |address: u64| match address.wrapping_add(at) % width {
            0 => Ok(()),
            _ => Err(AccessDenied::Misaligned),
        };
        match target {
            Target::Host(range) => {
                aligned(range.address())?;
                atomics::rmw_shared(&range.bytes(), at, op).map_err(|_| AccessDenied::Range)
            }
            Target::Device { memory, region } => {
                aligned(region.address().raw())?;
                memory.atomic(region.offset() + at, op, &|| self.is_revoked())
            }
            Target::Custom { custom_memory, address } => {
                aligned(*address)?;
                custom_memory.atomic(at, op)
            }
            Target::Window(_) => Err(AccessDenied::Range),
        }
    }

    /// Whether a deregistration or revocation is waiting for this span. It may run on a driver
    /// thread, so waiting for the device here would deadlock.
    fn is_revoked(&self) -> bool {
        self.guard.as_ref().is_some_and(SlotGuard::is_revoked)
    }

    /// Orders the bytes written through this span before this thread's later stores, such as a
    /// completion.
    ///
    /// Needed where stores go through write-combining buffers; costs nothing elsewhere on x86.
    #[inline]
    pub fn publish(&self) {
        match self.guard.as_deref() {
            Some(Registration { target: Target::Device { memory, .. }, .. }) => memory.publish(),
            _ => std::sync::atomic::fence(std::sync::atomic::Ordering::Release),
        }
    }

    /// The GPU, if this is device memory that its copies may access where it is.
    pub(crate) fn device(&self) -> Option<&Device> {
        match &self.guard.as_deref()?.target {
            Target::Device { memory, region } if memory.is_in_place() => {
                Some(region.allocation().device())
            }
            _ => None,
        }
    }

    /// The region, if this is device memory that a GPU's copies may access where it is.
    pub(crate) fn device_region(&self) -> Option<Region> {
        match &self.guard.as_deref()?.target {
            Target::Device { memory, region } if memory.is_in_place() => {
                region.allocation().region(region.offset() + self.offset, self.len).ok()
            }
            _ => None,
        }
    }

    /// The GPU, if its copy engine is the fastest way to read this memory.
    pub(crate) fn copy_engine(&self) -> Option<Device> {
        match &self.guard.as_deref()?.target {
            Target::Device { memory, region } if memory.reads_by_engine(self.len) => {
                Some(region.allocation().device().clone())
            }
            _ => None,
        }
    }

    /// The region to read, in which everything that was written has arrived.
    pub(crate) fn begin_read(&self) -> Result<Region, AccessDenied> {
        match self.guard.as_deref().map(|registration| &registration.target) {
            Some(Target::Device { memory, region }) => {
                memory.begin_read(&|| self.is_revoked())?;
                let at = region.offset() + self.offset;
                region.allocation().region(at, self.len).map_err(|_| AccessDenied::Range)
            }
            _ => Err(AccessDenied::Range),
        }
    }

    /// Notes that a batch of copies accesses the memory: deregistration waits for its end.
    pub(crate) fn add_copies(&self, ticket: &CopyTicket) {
        if let Some(Registration { target: Target::Device { memory, .. }, .. }) =
            self.guard.as_deref()
        {
            memory.add_copies(ticket);
        }
    }

    /// The registration's access flags, first address and region, if this is device memory that
    /// kernels may access where it is.
    pub(crate) fn kernel_range(&self) -> Option<(Access, u64, Region)> {
        let registration = self.guard.as_deref()?;
        match &registration.target {
            Target::Device { memory, region } if memory.is_in_place() => {
                Some((registration.access, registration.iova, region.clone()))
            }
            _ => None,
        }
    }

    /// Notes that kernels access the memory by themselves: deregistration revokes that. `false` if
    /// the memory moves or is gone.
    pub(crate) fn add_kernel_use(&self, kernel_use: Weak<dyn KernelUse>) -> bool {
        match self.guard.as_deref() {
            Some(Registration { target: Target::Device { memory, .. }, .. }) => {
                memory.add_kernel_use(kernel_use)
            }
            _ => false,
        }
    }

    /// The bytes, if this is host memory: for system calls that take addresses.
    pub fn host_bytes(&self) -> Option<SharedBytes<'_>> {
        match &self.guard.as_deref()?.target {
            Target::Host(range) => range.bytes().slice(self.offset, self.len).ok(),
            Target::Device { .. } | Target::Custom { .. } | Target::Window(_) => None,
        }
    }

    /// The target of `len` bytes at `offset` of the range, and their offset in it; `None` if the
    /// span is empty.
    #[inline]
    fn locate(&self, offset: u64, len: u64) -> Result<Option<(&Target, u64)>, AccessDenied> {
        if offset > self.len || len > self.len - offset {
            return Err(AccessDenied::Range);
        }
        // In range by the check above and by that of `resolve`, so the sum does not overflow.
        Ok(self.guard.as_deref().map(|found| (&found.target, self.offset + offset)))
    }
}

impl fmt::Debug for Span<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Span({} bytes at offset {})", self.len, self.offset)
    }
}
