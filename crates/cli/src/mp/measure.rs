//! One end of a measurement.

use std::time::{Duration, Instant};

use warpwire::mem::pattern::fill_bytes;
use warpwire::msg::{Buffer, Comm, Part, Window};

use super::table::Figure;
use super::{Mode, Test};
use crate::output::Failure;
use crate::perf::memory::{MemoryChoice, device};

/// A rank with its memory: one half goes out, one comes in.
pub(super) struct End<'a> {
    comm: &'a Comm,
    pub(super) out: Buffer,
    into: Buffer,
    window: Window,
    timeout: Duration,
}

impl<'a> End<'a> {
    pub(super) fn new(
        comm: &'a Comm,
        memory: &MemoryChoice,
        longest: u64,
        timeout: Duration,
    ) -> Result<Self, Failure> {
        let device = device(memory)?;
        let make = || match &device {
            None => comm.alloc(longest),
            Some(device) => comm.register(device.alloc(longest)?.whole()?),
        };
        let (out, into) = (make()?, make()?);
        let window = comm.window(&into)?;
        Ok(Self { comm, out, into, window, timeout })
    }

    fn other(&self) -> usize {
        1 - self.comm.rank()
    }

    fn parts(&self, size: u64) -> Result<(Part, Part), Failure> {
        Ok((self.out.part(0, size)?, self.into.part(0, size)?))
    }

    /// Moves a few messages with other bytes each time, and compares all of them.
    pub(super) fn verify(&self, test: Test, size: u64) -> Result<(), Failure> {
        for round in 0..3 {
            let seed = |rank: usize| size * 7 + round * 2 + rank as u64;
            self.fill(&self.out, size, seed(self.comm.rank()))?;
            self.fill(&self.into, size, !seed(0))?;
            self.comm.barrier(self.timeout)?;
            match test {
                Test::Pingpong | Test::Sendrecv => self.exchange(size)?,
                Test::Putget => self.put(size)?,
            }
            self.comm.barrier(self.timeout)?;
            self.compare(size, seed(self.other()))?;
            if test == Test::Putget {
                // What the other has in its window is what we put there.
                self.get(size)?;
                self.compare(size, seed(self.comm.rank()))?;
                self.comm.barrier(self.timeout)?;
            }
        }
        Ok(())
    }

    fn fill(&self, buffer: &Buffer, size: u64, seed: u64) -> Result<(), Failure> {
        let mut bytes = vec![0; size as usize];
        fill_bytes(&mut bytes, seed, 0);
        Ok(buffer.write(0, &bytes)?)
    }

    fn compare(&self, size: u64, seed: u64) -> Result<(), Failure> {
        let (mut found, mut wanted) = (vec![0; size as usize], vec![0; size as usize]);
        self.into.read(0, &mut found)?;
        fill_bytes(&mut wanted, seed, 0);
        match found.iter().zip(&wanted).position(|(found, wanted)| found != wanted) {
            None => Ok(()),
            Some(at) => {
                let rank = self.comm.rank();
                let what = format!("WRONG DATA at rank {rank}: byte {at} of {size}");
                Err(Failure::Broken(what))
            }
        }
    }

    /// Both send, both receive.
    fn exchange(&self, size: u64) -> Result<(), Failure> {
        let (out, into) = self.parts(size)?;
        let mut receive = self.comm.irecv(self.other(), 0, into)?;
        let mut send = self.comm.isend(self.other(), 0, out)?;
        receive.wait(self.timeout)?;
        send.wait(self.timeout)?;
        Ok(())
    }

    fn put(&self, size: u64) -> Result<(), Failure> {
        let (out, _) = self.parts(size)?;
        self.window.put(self.other(), 0, out)?.wait(self.timeout)?;
        Ok(())
    }

    fn get(&self, size: u64) -> Result<(), Failure> {
        let (_, into) = self.parts(size)?;
        self.window.get(self.other(), 0, into)?.wait(self.timeout)?;
        Ok(())
    }

    /// To and fro, once.
    fn ping(&self, size: u64) -> Result<(), Failure> {
        let (out, into) = self.parts(size)?;
        let mut receive = self.comm.irecv(self.other(), 0, into)?;
        if self.comm.rank() == 0 {
            let mut send = self.comm.isend(1, 0, out)?;
            receive.wait(self.timeout)?;
            send.wait(self.timeout)?;
        } else {
            receive.wait(self.timeout)?;
            self.comm.send(0, 0, out, self.timeout)?;
        }
        Ok(())
    }

    /// Times one row of one mode.
    pub(super) fn measure(
        &self,
        test: Test,
        mode: Mode,
        size: u64,
        iterations: u32,
    ) -> Result<Vec<Figure>, Failure> {
        let figure = |what: &str, half: f64, step: &dyn Fn() -> Result<(), Failure>| {
            let each = self.time(iterations, step)?;
            let name = match what {
                "" => mode.name().to_owned(),
                _ => format!("{what} {}", mode.name()),
            };
            let microseconds = each.as_secs_f64() * 1e6 * half;
            let gigabytes = size as f64 / (microseconds * 1e3).max(1e-9);
            Ok::<_, Failure>(Figure { name, microseconds, gigabytes_per_second: gigabytes })
        };
        match test {
            Test::Pingpong => Ok(vec![figure("", 0.5, &|| self.ping(size))?]),
            Test::Sendrecv => Ok(vec![figure("", 1.0, &|| self.exchange(size))?]),
            Test::Putget => {
                // Rank 0 acts, the other has memory; it drives its device by waiting.
                let put = figure("put", 1.0, &|| self.put(size))?;
                let get = figure("get", 1.0, &|| self.get(size))?;
                Ok(vec![put, get])
            }
        }
    }

    fn time(
        &self,
        iterations: u32,
        step: &dyn Fn() -> Result<(), Failure>,
    ) -> Result<Duration, Failure> {
        for _ in 0..(iterations / 10).clamp(1, 20) {
            step()?;
        }
        self.comm.barrier(self.timeout)?;
        let start = Instant::now();
        for _ in 0..iterations {
            step()?;
        }
        let took = start.elapsed();
        self.comm.barrier(self.timeout)?;
        Ok(took / iterations)
    }
}
