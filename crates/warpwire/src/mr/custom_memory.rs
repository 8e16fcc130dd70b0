//! Memory that is neither plain host memory nor a known device's: its provider does the copying.

use super::denied::AccessDenied;
use crate::mlx5::Atomic;

/// Access to memory by callbacks. The caller has checked that offsets and lengths are in range.
///
/// A [`PeerClient`](super::PeerClient) returns one through
/// [`MemorySource::custom`](super::MemorySource::custom) where its memory is neither host memory
/// nor a region of a known device. [`AccessDenied::NotResident`] makes the queue pair wait and
/// retry; any other error fails its work request. Permanent errors must be reported by
/// [`check`](CustomMemory::check): a copy that fails after a successful check is retried.
pub trait CustomMemory: Send + Sync {
    /// Checks that `len` bytes at `offset` are accessible now, for writing too if `writes`.
    fn check(&self, offset: u64, len: u64, writes: bool) -> Result<(), AccessDenied>;
    /// Copies `into.len()` bytes at `offset` to `into`.
    fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), AccessDenied>;
    /// Copies `from` to the memory at `offset`.
    fn write(&self, offset: u64, from: &[u8]) -> Result<(), AccessDenied>;
    /// Applies `op` to the aligned word at `offset` and returns its previous value.
    fn atomic(&self, offset: u64, op: &Atomic) -> Result<u64, AccessDenied>;
    /// Whether each copy has a high fixed cost, so that few large copies are better than many small
    /// ones. Default: `false`.
    fn is_slow(&self) -> bool {
        false
    }
}
