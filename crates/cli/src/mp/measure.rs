//! One rank of a measurement.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use warpwire::msg::{Buffer, BufferSlice, Comm, RmaWindow};
use warpwire_apps::pattern::fill_bytes;

use super::modes::{DeviceRunner, Transfer, TransferKind};
use super::table::Figure;
use super::{Mode, Test};
use crate::baseline::Baseline;
use crate::output::Failure;
use crate::perf::memory::{MemoryChoice, device};

/// A rank with its send and receive buffers.
pub(super) struct Endpoint<'a> {
    comm: &'a Comm,
    pub(super) out: Buffer,
    into: Buffer,
    /// Destination of reads from the peer's window.
    back: Buffer,
    window: RmaWindow,
    device_runner: Option<RefCell<DeviceRunner>>,
    timeout: Duration,
}

impl<'a> Endpoint<'a> {
    pub(super) fn new(
        comm: &'a Comm,
        memory: &MemoryChoice,
        max_size: u64,
        needs_device: bool,
        timeout: Duration,
    ) -> Result<Self, Failure> {
        let device = device(memory)?;
        let make = || match &device {
            None => comm.alloc(max_size),
            Some(device) => comm.register(device.alloc(max_size)?.whole()?),
        };
        let (out, into, back) = (make()?, make()?, make()?);
        let window = comm.window(&into)?;
        let device_runner = match &device {
            Some(device) if needs_device => {
                Some(RefCell::new(DeviceRunner::new(comm, device, timeout)?))
            }
            _ => None,
        };
        Ok(Self { comm, out, into, back, window, device_runner, timeout })
    }

    fn other(&self) -> usize {
        1 - self.comm.rank()
    }

    fn slices(&self, size: u64) -> Result<(BufferSlice, BufferSlice), Failure> {
        Ok((self.out.slice(0, size)?, self.into.slice(0, size)?))
    }

    /// Transfers three messages with different bytes, and verifies each.
    pub(super) fn verify(&self, test: Test, mode: Mode, size: u64) -> Result<(), Failure> {
        for round in 0..3 {
            let seed = |rank: usize| size * 7 + round * 2 + rank as u64;
            self.fill(&self.out, size, seed(self.comm.rank()))?;
            self.fill(&self.into, size, !seed(0))?;
            self.comm.barrier(self.timeout)?;
            match (mode, test) {
                (Mode::Cpu, Test::Pingpong | Test::Sendrecv) => self.exchange(size)?,
                (Mode::Cpu, Test::Putget) => self.put(size)?,
                (mode, test) => {
                    self.by_device(test.rounds()[0], mode, size, Duration::ZERO, 1)?;
                }
            }
            self.comm.barrier(self.timeout)?;
            self.compare(&self.into, size, seed(self.other()))?;
            if test == Test::Putget {
                // The peer's window holds what this rank put there.
                self.fill(&self.back, size, !seed(0))?;
                match mode {
                    Mode::Cpu => self.get(size)?,
                    _ => {
                        self.by_device(TransferKind::Get, mode, size, Duration::ZERO, 1)?;
                    }
                }
                self.compare(&self.back, size, seed(self.comm.rank()))?;
                self.comm.barrier(self.timeout)?;
            }
        }
        Ok(())
    }

    /// Measures the baseline on rank 0, if a device sends or waits; the other rank returns `None`
    /// and waits at its next barrier.
    pub(super) fn baseline(&self) -> Result<Option<Baseline>, Failure> {
        match (&self.device_runner, self.comm.rank()) {
            (Some(device_runner), 0) => Baseline::of_device(device_runner.borrow().stream.device()),
            _ => Ok(None),
        }
    }

    /// Runs `count` rounds in a device mode; returns the elapsed time.
    fn by_device(
        &self,
        what: TransferKind,
        mode: Mode,
        size: u64,
        compute: Duration,
        count: u32,
    ) -> Result<Duration, Failure> {
        let Some(device_runner) = &self.device_runner else {
            let message =
                format!("mode {} needs a device; give --mem sim:0 or cuda:0", mode.name());
            return Err(Failure::Usage(message));
        };
        let (comm, window) = (self.comm, &self.window);
        let (out, into, back) = (&self.out, &self.into, &self.back);
        let transfer = Transfer { comm, out, into, back, window, size, compute, what };
        device_runner.borrow_mut().rearm_signal()?;
        // Both ranks must have read their signal words before either adds to them.
        comm.barrier(self.timeout)?;
        let device_runner = device_runner.borrow();
        match mode {
            Mode::Cpu | Mode::Stream => device_runner.by_stream(&transfer, count),
            Mode::Graph => device_runner.by_graph(&transfer, count),
            Mode::Kernel => device_runner.by_kernel(&transfer, count),
        }
    }

    /// Runs the compute kernel before a CPU message, and waits for it.
    fn compute(&self, time: Duration) -> Result<(), Failure> {
        if time.is_zero() {
            return Ok(());
        }
        let Some(device_runner) = &self.device_runner else {
            let message = "a kernel needs a device; give --mem sim:0 or cuda:0".to_owned();
            return Err(Failure::Usage(message));
        };
        let device_runner = device_runner.borrow();
        device_runner.kernels.compute(&device_runner.stream, time)?;
        Ok(device_runner.stream.synchronize(self.timeout)?)
    }

    fn fill(&self, buffer: &Buffer, size: u64, seed: u64) -> Result<(), Failure> {
        let mut bytes = vec![0; size as usize];
        fill_bytes(&mut bytes, seed, 0);
        Ok(buffer.write(0, &bytes)?)
    }

    fn compare(&self, buffer: &Buffer, size: u64, seed: u64) -> Result<(), Failure> {
        let (mut found, mut wanted) = (vec![0; size as usize], vec![0; size as usize]);
        buffer.read(0, &mut found)?;
        fill_bytes(&mut wanted, seed, 0);
        match found.iter().zip(&wanted).position(|(found, wanted)| found != wanted) {
            None => Ok(()),
            Some(at) => {
                let rank = self.comm.rank();
                let what = format!("WRONG DATA at rank {rank}: byte {at} of {size}");
                Err(Failure::Runtime(what))
            }
        }
    }

    /// Both ranks send and receive.
    fn exchange(&self, size: u64) -> Result<(), Failure> {
        let (out, into) = self.slices(size)?;
        let mut receive = self.comm.irecv(self.other(), 0, into)?;
        let mut send = self.comm.isend(self.other(), 0, out)?;
        receive.wait(self.timeout)?;
        send.wait(self.timeout)?;
        Ok(())
    }

    fn put(&self, size: u64) -> Result<(), Failure> {
        let (out, _) = self.slices(size)?;
        self.window.put(self.other(), 0, out)?.wait(self.timeout)?;
        Ok(())
    }

    fn get(&self, size: u64) -> Result<(), Failure> {
        let back = self.back.slice(0, size)?;
        self.window.get(self.other(), 0, back)?.wait(self.timeout)?;
        Ok(())
    }

    /// One round trip.
    fn ping(&self, size: u64, compute: Duration) -> Result<(), Failure> {
        let (out, into) = self.slices(size)?;
        let mut receive = self.comm.irecv(self.other(), 0, into)?;
        if self.comm.rank() == 0 {
            self.compute(compute)?;
            let mut send = self.comm.isend(1, 0, out)?;
            receive.wait(self.timeout)?;
            send.wait(self.timeout)?;
        } else {
            receive.wait(self.timeout)?;
            self.compute(compute)?;
            self.comm.send(0, 0, out, self.timeout)?;
        }
        Ok(())
    }

    /// Measures one mode at one size, with a compute kernel of that duration before each message.
    pub(super) fn measure(
        &self,
        test: Test,
        mode: Mode,
        size: u64,
        compute: Duration,
        count: u32,
    ) -> Result<Vec<Figure>, Failure> {
        let half = if test == Test::Pingpong { 0.5 } else { 1.0 };
        let figure = |what: &str, each: Duration| {
            let kernel = if compute.is_zero() { "" } else { "+kernel" };
            let space = if what.is_empty() { "" } else { " " };
            let name = format!("{what}{space}{}{kernel}", mode.name());
            let microseconds = each.as_secs_f64() * 1e6 * half;
            let gigabytes_per_second = size as f64 / (microseconds * 1e3).max(1e-9);
            Figure { name, microseconds, gigabytes_per_second }
        };
        if mode != Mode::Cpu {
            let mut figures = Vec::new();
            for what in test.rounds() {
                self.by_device(*what, mode, size, compute, (count / 10).clamp(1, 20))?;
                self.comm.barrier(self.timeout)?;
                let took = self.by_device(*what, mode, size, compute, count)?;
                self.comm.barrier(self.timeout)?;
                let name = match what {
                    TransferKind::PingPong | TransferKind::Simultaneous => "",
                    TransferKind::Put => "put",
                    TransferKind::Get => "get",
                };
                figures.push(figure(name, took / count));
            }
            return Ok(figures);
        }
        match test {
            Test::Pingpong => Ok(vec![figure("", self.time(count, &|| self.ping(size, compute))?)]),
            Test::Sendrecv => {
                let step = || self.compute(compute).and_then(|()| self.exchange(size));
                Ok(vec![figure("", self.time(count, &step)?)])
            }
            Test::Putget => {
                let put = || self.compute(compute).and_then(|()| self.put(size));
                let get = || self.compute(compute).and_then(|()| self.get(size));
                let put = figure("put", self.time(count, &put)?);
                Ok(vec![put, figure("get", self.time(count, &get)?)])
            }
        }
    }

    fn time(
        &self,
        count: u32,
        step: &dyn Fn() -> Result<(), Failure>,
    ) -> Result<Duration, Failure> {
        for _ in 0..(count / 10).clamp(1, 20) {
            step()?;
        }
        self.comm.barrier(self.timeout)?;
        let start = Instant::now();
        for _ in 0..count {
            step()?;
        }
        let took = start.elapsed();
        self.comm.barrier(self.timeout)?;
        Ok(took / count)
    }
}
