//! Memory that is neither plain host memory nor a device's: whoever offers it does the copying.

use super::denied::AccessDenied;
use crate::mlx5::Atomic;

/// A way to memory. Offsets and lengths that are passed in lie inside it.
///
/// A [`PeerClient`](super::PeerClient) offers one by [`MemorySource::reached_by`](super::Memory::reached_by), where neither
/// host memory nor a device's region says what it has. Answers with [`AccessDenied::NotResident`] make the queue pair wait and
/// ask again; others fail its work. What is refused for good, [`check`](Reach::check) must refuse: a copy that fails
/// after it said yes is tried again.
pub trait CustomMemory: Send + Sync {
    /// Whether `len` bytes at `offset` can be reached now.
    fn check(&self, offset: u64, len: u64, writes: bool) -> Result<(), AccessDenied>;
    /// Copies out.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), AccessDenied>;
    /// Copies in.
    fn write(&self, offset: u64, from: &[u8]) -> Result<(), AccessDenied>;
    /// Changes an aligned word; gives what was there before.
    fn atomic(&self, offset: u64, op: &Atomic) -> Result<u64, AccessDenied>;
    /// Whether a copy has a price of its own, however short it is, so that few large ones are better.
    fn is_slow(&self) -> bool {
        false
    }
}
