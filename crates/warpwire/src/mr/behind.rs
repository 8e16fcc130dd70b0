//! Writes to device memory that has no window: collected in pinned memory, and carried on by the copy engine.
//!
//! A copy into device memory costs microseconds, however short it is, and packets are short. So neighbours are
//! collected, and the engine of the device copies one part while the next is being filled. Whoever tells that data has
//! arrived [settles](Behind::settle) first, and waits until all of it is there.

use std::time::Duration;

use crate::error::Result;
use crate::mem::copy::Staging;
use crate::mem::{Allocation, Event, Stop, Stream};

/// No half takes as long.
const PATIENCE: Duration = Duration::from_secs(10);

/// What has been written to one piece of memory, and is not there yet.
pub(super) struct Behind {
    memory: Allocation,
    staging: Staging,
    /// What was written first, and its place; it may be all there is.
    small: Vec<u8>,
    small_at: u64,
    /// Made when there is more than little.
    pipe: Option<Pipe>,
}

struct Pipe {
    staging: Staging,
    stream: Stream,
    halves: [Half; 2],
    /// Which one is being filled, and how far.
    current: usize,
    filled: u64,
    /// The neighbours that have not been carried on: where they lie in the half, and where they go.
    run: u64,
    run_at: u64,
}

struct Half {
    memory: Allocation,
    event: Event,
    /// The engine may still read from it.
    busy: bool,
}

impl Behind {
    pub(super) fn new(memory: &Allocation, staging: Staging) -> Self {
        let small = Vec::with_capacity(staging.small as usize);
        Self { memory: memory.clone(), staging, small, small_at: 0, pipe: None }
    }

    /// Takes `from`, to be written at `at`. If it must stop waiting for the device, it has taken a part of it or none,
    /// and what it took before is carried on by the next call.
    pub(super) fn write(&mut self, at: u64, from: &[u8], stop: Stop<'_>) -> Result<()> {
        let idle = self.pipe.as_ref().is_none_or(Pipe::is_idle);
        let next = self.small_at + self.small.len() as u64;
        let fits = self.small.is_empty() || at == next;
        if idle && fits && self.small.len() + from.len() <= self.staging.small as usize {
            if self.small.is_empty() {
                self.small_at = at;
            }
            self.small.extend_from_slice(from);
            return Ok(());
        }
        let pipe = match &mut self.pipe {
            Some(pipe) => pipe,
            None => self.pipe.insert(Pipe::new(&self.memory, self.staging)?),
        };
        if !self.small.is_empty() {
            // The pipe was idle, and this fits into a half: nothing is waited for.
            pipe.write(&self.memory, self.small_at, &self.small, stop)?;
            self.small.clear();
        }
        pipe.write(&self.memory, at, from, stop)
    }

    /// Waits until everything that was taken is in its place. If it must stop, all is as before.
    pub(super) fn settle(&mut self, stop: Stop<'_>) -> Result<()> {
        if !self.small.is_empty() {
            let written = self.memory.write(self.small_at, &self.small);
            self.small.clear();
            written?;
        }
        self.pipe.as_mut().map_or(Ok(()), |pipe| pipe.settle(&self.memory, stop))
    }
}

impl Pipe {
    fn new(memory: &Allocation, staging: Staging) -> Result<Self> {
        let device = memory.device();
        let half = || -> Result<Half> {
            let memory = device.alloc_pinned(staging.half)?;
            Ok(Half { memory, event: device.event()?, busy: false })
        };
        let (stream, halves) = (device.stream()?, [half()?, half()?]);
        Ok(Self { staging, stream, halves, current: 0, filled: 0, run: 0, run_at: 0 })
    }

    fn is_idle(&self) -> bool {
        self.run == self.filled && !self.halves.iter().any(|half| half.busy)
    }

    fn write(
        &mut self,
        memory: &Allocation,
        mut at: u64,
        mut from: &[u8],
        stop: Stop<'_>,
    ) -> Result<()> {
        let Staging { half, step, .. } = self.staging;
        while !from.is_empty() {
            if at != self.run_at + (self.filled - self.run) {
                self.carry_on(memory)?;
                self.run_at = at;
            }
            if self.filled == half {
                self.turn(memory, stop)?;
                self.run_at = at;
            }
            let len = from.len().min((half - self.filled) as usize);
            let (now, later) = from.split_at(len);
            self.halves[self.current].memory.host_bytes()?.write(self.filled, now)?;
            self.filled += len as u64;
            (at, from) = (at + len as u64, later);
            if self.filled - self.run >= step {
                self.carry_on(memory)?;
                self.run_at = at;
            }
        }
        Ok(())
    }

    /// Has the engine copy what was collected.
    fn carry_on(&mut self, memory: &Allocation) -> Result<()> {
        let len = self.filled - self.run;
        if len > 0 {
            let half = &mut self.halves[self.current];
            let to = memory.region(self.run_at, len)?;
            self.stream.copy(&to, &half.memory.region(self.run, len)?)?;
            half.busy = true;
            self.run = self.filled;
        }
        Ok(())
    }

    /// Goes on with the other half, when the engine is done with it.
    fn turn(&mut self, memory: &Allocation, stop: Stop<'_>) -> Result<()> {
        self.carry_on(memory)?;
        self.stream.record(&self.halves[self.current].event)?;
        // First the wait, then the change: who must stop waiting begins here again.
        let next = &mut self.halves[1 - self.current];
        if next.busy {
            next.event.synchronize_unless(PATIENCE, stop)?;
            next.busy = false;
        }
        self.current = 1 - self.current;
        (self.filled, self.run) = (0, 0);
        Ok(())
    }

    fn settle(&mut self, memory: &Allocation, stop: Stop<'_>) -> Result<()> {
        let carried = self.carry_on(memory);
        let busy = self.halves[self.current].busy;
        let recorded = match busy {
            true => self.stream.record(&self.halves[self.current].event),
            false => Ok(()),
        };
        let outcome = carried.and(recorded).and_then(|()| {
            let mut waiting = self.halves.iter().filter(|half| half.busy);
            waiting.try_for_each(|half| half.event.synchronize_unless(PATIENCE, stop))
        });
        if outcome.is_err() && stop() {
            return outcome;
        }
        // Whatever came of it: nothing is collected any more.
        (self.filled, self.run) = (0, 0);
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
    fn what_is_written_is_there_after_settling() {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let memory = gpu.alloc(4 << 20).unwrap();
        let mut behind = Behind::new(&memory, Staging::default());
        let mut expected = vec![0; 4 << 20];
        let mut random = 7_u64;
        for round in 0..40 {
            // Runs of neighbours, jumps, and all sizes.
            let mut at = 0;
            for _ in 0..round * 5 {
                random = random.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                let len = [1, 100, 4096, 9000, 70_000, 200_000][(random >> 40) as usize % 6];
                if random >> 60 < 3 || at + len > expected.len() {
                    at = (random >> 20) as usize % (expected.len() - len);
                }
                let bytes: Vec<u8> = (0..len).map(|i| (i as u64 ^ random) as u8).collect();
                behind.write(at as u64, &bytes, &|| false).unwrap();
                expected[at..at + len].copy_from_slice(&bytes);
                at += len;
            }
            behind.settle(&|| false).unwrap();
            let mut found = vec![0; expected.len()];
            memory.read(0, &mut found).unwrap();
            assert!(found == expected, "round {round}");
        }
    }

    #[test]
    fn memory_that_is_gone_is_an_error_and_no_more() {
        let sim = Sim::start(SimConfig::default()).unwrap();
        let memory = sim.device(0).unwrap().alloc(1 << 20).unwrap();
        let mut behind = Behind::new(&memory, Staging::default());
        behind.write(0, &[1; 100_000], &|| false).unwrap();
        sim.control(0).unwrap().free_under_users(&memory).unwrap();
        assert!(behind.settle(&|| false).is_err());
        // Nothing is left of it.
        assert!(behind.settle(&|| false).is_ok());
    }
}
