//! Write-behind for device memory without a window: writes are collected in pinned memory and
//! copied by the device's copy engine.
//!
//! A copy into device memory costs microseconds, however short it is, and packets are short. So
//! adjacent writes are coalesced, and the engine copies one half of a double buffer while the other
//! is being filled. Before data is reported as arrived, it must be
//! [flushed](WriteBehind::flush), which waits for the engine.

use std::time::Duration;

use crate::error::Result;
use crate::mem::copy::StagingOptions;
use crate::mem::{Allocation, CancelCheck, Event, Stream};

/// Far longer than the copy of one half takes.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(10);

/// Writes to one allocation that have not reached it yet.
pub(super) struct WriteBehind {
    memory: Allocation,
    staging: StagingOptions,
    /// The first contiguous bytes, and their target offset. Short messages need nothing else.
    small: Vec<u8>,
    small_at: u64,
    /// Allocated when `small` does not suffice: for more than `staging.small` bytes, or for a gap.
    double_buffer: Option<DoubleBuffer>,
}

struct DoubleBuffer {
    staging: StagingOptions,
    stream: Stream,
    halves: [Half; 2],
    /// The half that is being filled, and its fill level in bytes.
    current: usize,
    filled: u64,
    /// The contiguous bytes not submitted yet: their start in the half, and their target offset.
    pending_start: u64,
    pending_target: u64,
}

struct Half {
    memory: Allocation,
    event: Event,
    /// The engine may still read from it.
    busy: bool,
}

impl WriteBehind {
    pub(super) fn new(memory: &Allocation, staging: StagingOptions) -> Self {
        let small = Vec::with_capacity(staging.small as usize);
        Self { memory: memory.clone(), staging, small, small_at: 0, double_buffer: None }
    }

    /// Buffers `from`, to be written at offset `at`. If cancelled while it waits for the device, it
    /// has buffered a prefix of `from`, possibly none; the next call continues with what was
    /// buffered.
    pub(super) fn write(&mut self, at: u64, from: &[u8], cancelled: CancelCheck<'_>) -> Result<()> {
        let idle = self.double_buffer.as_ref().is_none_or(DoubleBuffer::is_idle);
        let next = self.small_at + self.small.len() as u64;
        let fits = self.small.is_empty() || at == next;
        if idle && fits && self.small.len() + from.len() <= self.staging.small as usize {
            if self.small.is_empty() {
                self.small_at = at;
            }
            self.small.extend_from_slice(from);
            return Ok(());
        }
        let double_buffer = match &mut self.double_buffer {
            Some(double_buffer) => double_buffer,
            None => self.double_buffer.insert(DoubleBuffer::new(&self.memory, self.staging)?),
        };
        if !self.small.is_empty() {
            // The buffer is idle, and this fits into a half, so it does not block.
            double_buffer.write(&self.memory, self.small_at, &self.small, cancelled)?;
            self.small.clear();
        }
        double_buffer.write(&self.memory, at, from, cancelled)
    }

    /// Blocks until everything buffered has reached the memory. If cancelled, the state is
    /// unchanged and the next call waits again.
    pub(super) fn flush(&mut self, cancelled: CancelCheck<'_>) -> Result<()> {
        if !self.small.is_empty() {
            let written = self.memory.write(self.small_at, &self.small);
            self.small.clear();
            written?;
        }
        self.double_buffer
            .as_mut()
            .map_or(Ok(()), |double_buffer| double_buffer.flush(&self.memory, cancelled))
    }
}

impl DoubleBuffer {
    fn new(memory: &Allocation, staging: StagingOptions) -> Result<Self> {
        let device = memory.device();
        let half = || -> Result<Half> {
            let memory = device.alloc_pinned(staging.half)?;
            Ok(Half { memory, event: device.event()?, busy: false })
        };
        let (stream, halves) = (device.stream()?, [half()?, half()?]);
        Ok(Self {
            staging,
            stream,
            halves,
            current: 0,
            filled: 0,
            pending_start: 0,
            pending_target: 0,
        })
    }

    fn is_idle(&self) -> bool {
        self.pending_start == self.filled && !self.halves.iter().any(|half| half.busy)
    }

    fn write(
        &mut self,
        memory: &Allocation,
        mut at: u64,
        mut from: &[u8],
        cancelled: CancelCheck<'_>,
    ) -> Result<()> {
        let StagingOptions { half, step, .. } = self.staging;
        while !from.is_empty() {
            if at != self.pending_target + (self.filled - self.pending_start) {
                self.submit_copy(memory)?;
                self.pending_target = at;
            }
            if self.filled == half {
                self.switch_half(memory, cancelled)?;
                self.pending_target = at;
            }
            let len = from.len().min((half - self.filled) as usize);
            let (now, later) = from.split_at(len);
            self.halves[self.current].memory.host_bytes()?.write(self.filled, now)?;
            self.filled += len as u64;
            (at, from) = (at + len as u64, later);
            if self.filled - self.pending_start >= step {
                self.submit_copy(memory)?;
                self.pending_target = at;
            }
        }
        Ok(())
    }

    /// Submits a copy of the pending bytes to the engine.
    fn submit_copy(&mut self, memory: &Allocation) -> Result<()> {
        let len = self.filled - self.pending_start;
        if len > 0 {
            let half = &mut self.halves[self.current];
            let to = memory.region(self.pending_target, len)?;
            self.stream.copy(&to, &half.memory.region(self.pending_start, len)?)?;
            half.busy = true;
            self.pending_start = self.filled;
        }
        Ok(())
    }

    /// Continues with the other half, after waiting until the engine has read it.
    fn switch_half(&mut self, memory: &Allocation, cancelled: CancelCheck<'_>) -> Result<()> {
        self.submit_copy(memory)?;
        self.stream.record(&self.halves[self.current].event)?;
        // Wait before changing any state, so that a cancelled call can be repeated.
        let next = &mut self.halves[1 - self.current];
        if next.busy {
            next.event.synchronize_or_cancel(FLUSH_TIMEOUT, cancelled)?;
            next.busy = false;
        }
        self.current = 1 - self.current;
        (self.filled, self.pending_start) = (0, 0);
        Ok(())
    }

    fn flush(&mut self, memory: &Allocation, cancelled: CancelCheck<'_>) -> Result<()> {
        let submitted = self.submit_copy(memory);
        let busy = self.halves[self.current].busy;
        let recorded = match busy {
            true => self.stream.record(&self.halves[self.current].event),
            false => Ok(()),
        };
        let outcome = submitted.and(recorded).and_then(|()| {
            let mut waiting = self.halves.iter().filter(|half| half.busy);
            waiting.try_for_each(|half| half.event.synchronize_or_cancel(FLUSH_TIMEOUT, cancelled))
        });
        if outcome.is_err() && cancelled() {
            return outcome;
        }
        // Whether it succeeded or failed, the buffer is empty now.
        (self.filled, self.pending_start) = (0, 0);
        for half in &mut self.halves {
            half.busy = false;
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mem::sim::{Sim, SimConfig};

    #[test]
    fn writes_are_visible_after_a_flush() {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let memory = gpu.alloc(4 << 20).unwrap();
        let mut write_behind = WriteBehind::new(&memory, StagingOptions::default());
        let mut expected = vec![0; 4 << 20];
        let mut random = 7_u64;
        for round in 0..40 {
            // Contiguous runs, jumps, and various sizes.
            let mut at = 0;
            for _ in 0..round * 5 {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let len = [1, 100, 4096, 9000, 70_000, 200_000][(random >> 40) as usize % 6];
                if random >> 60 < 3 || at + len > expected.len() {
                    at = (random >> 20) as usize % (expected.len() - len);
                }
                let bytes = testkit::random_bytes(random, len);
                write_behind.write(at as u64, &bytes, &|| false).unwrap();
                expected[at..at + len].copy_from_slice(&bytes);
                at += len;
            }
            write_behind.flush(&|| false).unwrap();
            let mut found = vec![0; expected.len()];
            memory.read(0, &mut found).unwrap();
            assert!(found == expected, "round {round}");
        }
    }

    #[test]
    fn a_flush_to_freed_memory_fails_once() {
        let sim = Sim::start(SimConfig::default()).unwrap();
        let memory = sim.device(0).unwrap().alloc(1 << 20).unwrap();
        let mut write_behind = WriteBehind::new(&memory, StagingOptions::default());
        write_behind.write(0, &[1; 100_000], &|| false).unwrap();
        sim.control(0).unwrap().force_free(&memory).unwrap();
        assert!(write_behind.flush(&|| false).is_err());
        // The lost bytes were discarded.
        assert!(write_behind.flush(&|| false).is_ok());
    }
}
