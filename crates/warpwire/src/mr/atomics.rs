//! Atomic operations on words of registered memory.

use parking_lot::{Mutex, MutexGuard};

use crate::error::Result;
use crate::mem::SharedBytes;
use crate::mem::copy::{self, Copier};
use crate::mlx5::{Atomic, AtomicWidth};

/// Lock striping for words of device memory. The device address selects the lock, so overlapping
/// registrations of any software HCA in this process use the same one.
const LOCK_COUNT: usize = 64;

static WORD_LOCKS: [Mutex<()>; LOCK_COUNT] = [const { Mutex::new(()) }; LOCK_COUNT];

/// Locks the stripe of the word at a device address.
pub(super) fn lock_word(address: u64) -> MutexGuard<'static, ()> {
    WORD_LOCKS[(address / 8) as usize % LOCK_COUNT].lock()
}

/// Read-modify-write with CPU atomics. Returns the previous value.
pub(super) fn rmw_shared(bytes: &SharedBytes<'_>, at: u64, op: &Atomic) -> Result<u64> {
    match (op, op.width()) {
        (Atomic::FetchAdd { add }, _) => bytes.fetch_add_u64(at, *add),
        (Atomic::CompareSwap { compare, swap }, _) => {
            bytes.compare_exchange_u64(at, *compare, *swap)
        }
        (_, AtomicWidth::Eight) => {
            let mut old = bytes.load_u64(at)?;
            loop {
                let seen = bytes.compare_exchange_u64(at, old, op.apply(old))?;
                if seen == old {
                    return Ok(old);
                }
                old = seen;
            }
        }
        (_, AtomicWidth::Four) => {
            let mut old = bytes.load_u32(at)?;
            loop {
                let new = op.apply(u64::from(old)) as u32;
                let seen = bytes.compare_exchange_u32(at, old, new)?;
                if seen == old {
                    return Ok(u64::from(old));
                }
                old = seen;
            }
        }
    }
}

/// Read-modify-write by a load and a store, for windows over a bus without atomic operations. The
/// caller holds the word's lock. Returns the previous value.
pub(super) fn rmw_mapped(bytes: &SharedBytes<'_>, at: u64, op: &Atomic) -> Result<u64> {
    let old = match op.width() {
        AtomicWidth::Four => u64::from(bytes.load_u32(at)?),
        AtomicWidth::Eight => bytes.load_u64(at)?,
    };
    match (op.apply(old), op.width()) {
        (same, _) if same == old => {}
        (new, AtomicWidth::Four) => bytes.store_u32(at, new as u32)?,
        (new, AtomicWidth::Eight) => bytes.store_u64(at, new)?,
    }
    store_fence();
    Ok(old)
}

/// Read-modify-write by two copies, for memory without a window. The caller holds the word's lock.
/// Returns the previous value.
pub(super) fn rmw_copied(copier: &Copier, at: u64, op: &Atomic) -> Result<u64> {
    let mut word = [0; 8];
    let len = op.width().bytes() as usize;
    copier.read(at, &mut word[..len])?;
    // Devices are little-endian, so a 4-byte word is in the low half.
    let old = u64::from_le_bytes(word);
    let new = op.apply(old);
    if new != old {
        copier.write(at, &new.to_le_bytes()[..len])?;
    }
    Ok(old)
}

/// Orders this thread's earlier stores, write-combining ones included, before its later stores.
#[inline]
pub(super) fn store_fence() {
    copy::store_fence();
}
