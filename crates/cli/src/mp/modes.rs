//! The modes in which a device, and not the CPU, sends and waits.

use std::time::{Duration, Instant};

use warpwire::mem::{Allocation, Device, Graph, Stream, Word};
use warpwire::msg::{Buffer, Comm, Lane, LaneOptions, Part, Window};
use warpwire::stream::KernelQp;
use warpwire::stream::kernel::SignalWait;
use warpwire_apps::pingpong_kernels::{Move, PingPongKernels, Side};

use crate::output::Failure;

/// A stream is given so many rounds before the CPU waits for it.
const ROUNDS_AHEAD: u32 = 16;

/// A device's side of the measurement.
pub(super) struct Driven {
    lane: Lane,
    pub(super) stream: Stream,
    pub(super) kernels: PingPongKernels,
    /// A word that the other adds to, and the window that it lies in.
    words: Allocation,
    word_window: Window,
    wait: SignalWait,
    timeout: Duration,
}

/// What one round is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// One answers the other.
    InTurn,
    /// Both send, then wait.
    AtOnce,
    /// Both write to the other's window, and wait until it is there.
    Put,
    /// Both read from it.
    Get,
}

/// What is sent where.
pub(super) struct Exchange<'a> {
    pub(super) comm: &'a Comm,
    pub(super) out: &'a Buffer,
    pub(super) into: &'a Buffer,
    /// What is read from the other's window.
    pub(super) back: &'a Buffer,
    pub(super) window: &'a Window,
    pub(super) size: u64,
    /// How long the kernel before each message computes.
    pub(super) compute: Duration,
    pub(super) what: What,
}

impl Exchange<'_> {
    fn other(&self) -> usize {
        1 - self.comm.rank()
    }

    /// Whether this side sends before it waits.
    fn begins(&self) -> bool {
        self.what != What::InTurn || self.comm.rank() == 0
    }

    fn parts(&self) -> Result<(Part, Part), Failure> {
        Ok((self.out.part(0, self.size)?, self.into.part(0, self.size)?))
    }

    /// What moves between the other's window and our own memory; none if messages do.
    fn moves<'q>(&self, qp: &'q KernelQp) -> Result<Option<Move<'q>>, Failure> {
        let own = match self.what {
            What::Put => self.out,
            What::Get => self.back,
            What::InTurn | What::AtOnce => return Ok(None),
        };
        let there = self.window.remote(self.other(), 0, self.size)?;
        let here = own.part(0, self.size)?.sge()?;
        Ok(Some(Move { qp, there, here, reads: self.what == What::Get }))
    }
}

impl Driven {
    pub(super) fn new(comm: &Comm, device: &Device, timeout: Duration) -> Result<Self, Failure> {
        let options = LaneOptions { patience: timeout, ..LaneOptions::default() };
        let lane = comm.lane(device, options)?;
        let words = device.alloc(64)?;
        words.write(0, &[0; 64])?;
        let word_window = comm.window(&comm.register(words.whole()?)?)?;
        let wait = SignalWait::new(&words.word64(0)?, 0, 1)?;
        let kernels = PingPongKernels::load(device)?;
        Ok(Self { lane, stream: device.stream()?, kernels, words, word_window, wait, timeout })
    }

    fn own(&self) -> Result<Word, Failure> {
        Ok(self.words.word64(0)?)
    }

    /// Waits for the stream; what failed there is told.
    fn finish(&self) -> Result<(), Failure> {
        self.stream.synchronize(self.timeout)?;
        self.lane.check()?;
        Ok(self.kernels.check()?)
    }

    fn compute(&self, time: Duration) -> Result<(), Failure> {
        match time.is_zero() {
            true => Ok(()),
            false => Ok(self.kernels.compute(&self.stream, time)?),
        }
    }

    /// The CPU posts receives and fills the stream; the stream sends and waits.
    pub(super) fn by_stream(&self, ends: &Exchange<'_>, count: u32) -> Result<Duration, Failure> {
        let start = Instant::now();
        let mut left = count;
        while left > 0 {
            let now = left.min(ROUNDS_AHEAD);
            for _ in 0..now {
                self.stream_round(ends)?;
            }
            self.finish()?;
            self.lane.progress()?;
            left -= now;
        }
        Ok(start.elapsed())
    }

    fn stream_round(&self, ends: &Exchange<'_>) -> Result<(), Failure> {
        let (out, into) = ends.parts()?;
        let at = (ends.window, ends.other(), 0);
        if let What::Put | What::Get = ends.what {
            self.compute(ends.compute)?;
            let moved = match ends.what {
                What::Put => self.lane.put_on(&self.stream, at, out)?,
                _ => self.lane.get_on(&self.stream, at, ends.back.part(0, ends.size)?)?,
            };
            return Ok(self.lane.wait_on(&self.stream, &moved)?);
        }
        let receive = self.lane.receive(ends.other(), into)?;
        if !ends.begins() {
            self.lane.wait_on(&self.stream, &receive)?;
        }
        self.compute(ends.compute)?;
        let _send = self.lane.send_on(&self.stream, ends.other(), out)?;
        if ends.begins() {
            self.lane.wait_on(&self.stream, &receive)?;
        }
        Ok(())
    }

    /// One round as a graph: a put with a signal, and the wait for the other's; or a put or a get, and the wait for it.
    fn graph(&self, ends: &Exchange<'_>) -> Result<Graph, Failure> {
        let other = ends.other();
        let kernel = self.lane.kernel(other)?;
        let to = ends.window.remote(other, 0, ends.size)?;
        let word = self.word_window.word(other, 0, 8)?;
        let from = ends.parts()?.0.sge()?;
        let moves = ends.moves(kernel)?;
        let graph = self.stream.capture(|stream| {
            if let Some(Move { there, here, reads, .. }) = moves {
                if !ends.compute.is_zero() {
                    self.kernels.compute(stream, ends.compute)?;
                }
                match reads {
                    true => kernel.get_on(stream, here, there)?,
                    false => kernel.put_on(stream, there, here)?,
                }
                return kernel.wait_on(stream);
            }
            if !ends.begins() {
                kernel.wait_signal_on(stream, &self.wait)?;
            }
            if !ends.compute.is_zero() {
                self.kernels.compute(stream, ends.compute)?;
            }
            kernel.put_signal_on(stream, to, from, word, 1)?;
            if ends.begins() {
                kernel.wait_signal_on(stream, &self.wait)?;
            }
            Ok(())
        })?;
        Ok(graph)
    }

    /// A graph is replayed, once for each round.
    pub(super) fn by_graph(&self, ends: &Exchange<'_>, count: u32) -> Result<Duration, Failure> {
        let graph = self.graph(ends)?;
        let start = Instant::now();
        let mut left = count;
        while left > 0 {
            let now = left.min(ROUNDS_AHEAD);
            for _ in 0..now {
                self.stream.replay(&graph)?;
            }
            self.finish()?;
            left -= now;
        }
        Ok(start.elapsed())
    }

    /// One kernel plays all rounds.
    pub(super) fn by_kernel(&self, ends: &Exchange<'_>, count: u32) -> Result<Duration, Failure> {
        let other = ends.other();
        let own = self.own()?;
        let side = Side {
            qp: self.lane.kernel(other)?,
            to: ends.window.remote(other, 0, ends.size)?,
            from: ends.parts()?.0.sge()?,
            signal: self.word_window.word(other, 0, 8)?,
            own: &own,
            start: own.load()?,
            serves: ends.begins(),
        };
        // Both have read their words before one is changed.
        ends.comm.barrier(self.timeout)?;
        let start = Instant::now();
        match ends.moves(side.qp)? {
            None => {
                self.kernels.play(&self.stream, &side, count.into(), ends.compute, self.timeout)?;
            }
            Some(what) => {
                self.kernels.shift(
                    &self.stream,
                    &what,
                    count.into(),
                    ends.compute,
                    self.timeout,
                )?;
            }
        }
        self.finish()?;
        let took = start.elapsed();
        // The graphs' wait goes on from where the word is now.
        ends.comm.barrier(self.timeout)?;
        Ok(took)
    }

    /// The waits of graphs begin at what the word is now.
    pub(super) fn renew(&mut self) -> Result<(), Failure> {
        let word = self.own()?;
        self.wait = SignalWait::new(&word, word.load()?, 1)?;
        Ok(())
    }
}
