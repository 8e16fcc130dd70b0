//! A pool of pinned staging buffers for data passed by value: the caller's bytes are copied here,
//! and the stream copies them on.

use parking_lot::Mutex;

use super::allocation::{Allocation, Region};
use super::device::Device;
use crate::error::{Error, Kind, Result};
use crate::units;

/// Minimum buffer size in bytes.
const MIN_BUFFER_LEN: u64 = 64 << 10;
/// Maximum total buffer size of one stream, in bytes.
const MAX_STAGED: u64 = 256 << 20;
/// Alignment of each staged copy: a cache line, for fast copies.
const ALIGNMENT: u64 = 64;

/// Buffers of pinned memory. Each is a bump allocator that is reset when no region of it is in use.
#[derive(Default)]
pub(super) struct StagingPool(Mutex<PoolState>);

#[derive(Default)]
struct PoolState {
    all: Vec<PoolBuffer>,
    bytes: u64,
    /// Index of the buffer that was used last.
    current: usize,
}

struct PoolBuffer {
    memory: Allocation,
    used: u64,
}

impl PoolBuffer {
    fn try_copy_in(&mut self, bytes: &[u8]) -> Result<Option<Region>> {
        if !self.memory.is_in_use() {
            self.used = 0;
        }
        let len = bytes.len() as u64;
        if self.memory.len() - self.used < len {
            return Ok(None);
        }
        let region = self.memory.region(self.used, len)?;
        self.memory.host_bytes()?.write(self.used, bytes)?;
        self.used = (self.used + len).next_multiple_of(ALIGNMENT).min(self.memory.len());
        Ok(Some(region))
    }
}

impl StagingPool {
    /// Copies `bytes` into pinned memory. The copy is kept while the region or a clone of it
    /// exists.
    pub(super) fn copy_in(&self, device: &Device, bytes: &[u8]) -> Result<Region> {
        let mut state = self.0.lock();
        let current = state.current;
        if let Some(buffer) = state.all.get_mut(current)
            && let Some(region) = buffer.try_copy_in(bytes)?
        {
            return Ok(region);
        }
        // Finished operations hold their memory until they are polled.
        device.reclaim();
        for at in 0..state.all.len() {
            if let Some(region) = state.all[at].try_copy_in(bytes)? {
                state.current = at;
                return Ok(region);
            }
        }
        let len = (bytes.len() as u64).max(MIN_BUFFER_LEN).next_multiple_of(ALIGNMENT);
        if state.bytes + len > MAX_STAGED {
            let what = format!("stage {} for a stream", units::bytes(bytes.len() as u64));
            return Err(Error::new(Kind::Busy, what)
                .on(device.label())
                .why(format!("{} are still waiting to be copied", units::bytes(state.bytes)))
                .fix("let the stream make progress first, or copy from your own pinned memory"));
        }
        let mut buffer = PoolBuffer { memory: device.alloc_pinned(len)?, used: 0 };
        let region = buffer.try_copy_in(bytes)?;
        state.current = state.all.len();
        state.bytes += len;
        state.all.push(buffer);
        region.ok_or_else(|| {
            Error::new(Kind::OutOfMemory, "stage bytes for a stream").on(device.label())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::sim::{Sim, SimConfig};

    #[test]
    fn buffers_are_reused_and_never_too_early() {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let staging = StagingPool::default();
        let first = staging.copy_in(&gpu, &[1; 100]).unwrap();
        let second = staging.copy_in(&gpu, &[2; 100]).unwrap();
        assert!(!first.overlaps(&second) && second.offset() == 128);
        drop(first);
        // `second` keeps the buffer in use.
        let third = staging.copy_in(&gpu, &[3; 100]).unwrap();
        assert_eq!(third.offset(), 256);
        drop((second, third));
        let reused = staging.copy_in(&gpu, &[4; 100]).unwrap();
        assert_eq!(reused.offset(), 0);
        let large = staging.copy_in(&gpu, &vec![5; 100 << 10]).unwrap();
        let mut read = vec![0; 100 << 10];
        large.allocation().read(large.offset(), &mut read).unwrap();
        assert!(read.iter().all(|byte| *byte == 5));
        assert_eq!(staging.0.lock().all.len(), 2);
        assert_eq!(staging.copy_in(&gpu, &[]).unwrap().len(), 0);
    }

    #[test]
    fn staged_bytes_are_bounded() {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let staging = StagingPool::default();
        let bytes = vec![0; 64 << 20];
        let held: Vec<_> = (0..4).map(|_| staging.copy_in(&gpu, &bytes).unwrap()).collect();
        let error = staging.copy_in(&gpu, &bytes).unwrap_err();
        assert_eq!(error.kind(), &Kind::Busy, "{error}");
        drop(held);
        staging.copy_in(&gpu, &bytes).unwrap();
    }
}
