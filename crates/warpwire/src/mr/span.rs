//! Memory that a key gave.

use std::fmt;

use super::atomics;
use super::denied::AccessDenied;
use super::registration::{Registration, Target};
use super::revocable_slot::SlotGuard;
use crate::mem::SharedBytes;
use crate::mlx5::Atomic;

/// A range of registered memory that may be used now.
///
/// While it exists the registration does not end: keep it for one copy, and never while ending the
/// registration. Leaking one keeps its registration alive for good.
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
    /// Nothing for a range of no bytes, which needs no key.
    guard: Option<SlotGuard<'a, Registration>>,
    /// Where it begins, from the start of the registration's memory.
    offset: u64,
    len: u64,
}

impl<'a> Span<'a> {
    pub(super) fn empty() -> Self {
        Self { guard: None, offset: 0, len: 0 }
    }

    /// The range is known to lie inside the registration.
    #[inline]
    pub(super) fn new(guard: SlotGuard<'a, Registration>, offset: u64, len: u64) -> Self {
        Self { guard: Some(guard), offset, len }
    }

    /// How many bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether there is no byte.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Whether the memory is a device's: each copy has a price of its own there, and few large ones cost less than
    /// many small ones.
    pub fn is_device(&self) -> bool {
        match self.guard.as_deref().map(|registration| &registration.target) {
            Some(Target::Device { .. }) => true,
            Some(Target::Custom { custom_memory, .. }) => custom_memory.is_slow(),
            Some(Target::Host(_)) | None => false,
        }
    }

    /// Whether what is placed in it must be [settled](super::Registry::settle) before it is there.
    pub fn is_staged(&self) -> bool {
        match self.guard.as_deref().map(|registration| &registration.target) {
            Some(Target::Device { memory, .. }) => memory.is_staged(),
            _ => false,
        }
    }

    /// Copies from the memory, `offset` bytes into the range, to `into`.
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
        }
    }

    /// Copies `from` to the memory, `offset` bytes into the range.
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
        }
    }

    /// Puts `swap` into the 64-bit word at `offset` if `compare` is there; gives what was there before.
    pub fn compare_swap(&self, offset: u64, compare: u64, swap: u64) -> Result<u64, AccessDenied> {
        self.atomic(offset, &Atomic::CompareSwap { compare, swap })
    }

    /// Adds to the 64-bit word at `offset`; gives what was there before.
    pub fn fetch_add(&self, offset: u64, add: u64) -> Result<u64, AccessDenied> {
        self.atomic(offset, &Atomic::FetchAdd { add })
    }

    /// Changes the word at `offset`, of 4 or 8 bytes, in the host's byte order; gives what was there before.
    ///
    /// The word must be aligned where it really lies, which a registration with an address of its own choice
    /// may not show.
    pub fn atomic(&self, offset: u64, op: &Atomic) -> Result<u64, AccessDenied> {
        let width = op.width().bytes();
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
        }
    }

    /// Whether the memory is being taken back, by somebody who waits until this is dropped. He may be on a thread of
    /// the device, which then does nothing that we could wait for.
    fn is_revoked(&self) -> bool {
        self.guard.as_ref().is_some_and(SlotGuard::is_revoked)
    }

    /// Sends what was placed on its way, before anything that this thread stores later: a completion.
    ///
    /// Needed where stores wait in write-combining buffers; costs nothing elsewhere.
    #[inline]
    pub fn publish(&self) {
        match self.guard.as_deref() {
            Some(Registration { target: Target::Device { memory, .. }, .. }) => memory.publish(),
            _ => std::sync::atomic::fence(std::sync::atomic::Ordering::Release),
        }
    }

    /// The bytes themselves, where they are the host's: for system calls that take addresses.
    pub fn host_bytes(&self) -> Option<SharedBytes<'_>> {
        match &self.guard.as_deref()?.target {
            Target::Host(range) => range.bytes().slice(self.offset, self.len).ok(),
            Target::Device { .. } | Target::Custom { .. } => None,
        }
    }

    /// The memory that `len` bytes at `offset` of the range lie in, and where in it they begin; nothing if
    /// there are none.
    #[inline]
    fn locate(&self, offset: u64, len: u64) -> Result<Option<(&Target, u64)>, AccessDenied> {
        if offset > self.len || len > self.len - offset {
            return Err(AccessDenied::Range);
        }
        // In range by the check above and that of the resolver, so the sum exists.
        Ok(self.guard.as_deref().map(|found| (&found.target, self.offset + offset)))
    }
}

impl fmt::Debug for Span<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Span({} bytes at offset {})", self.len, self.offset)
    }
}
