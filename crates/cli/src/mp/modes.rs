//! The modes in which a device, not the CPU, sends and waits.

use std::time::{Duration, Instant};

use warpwire::mem::{Allocation, Device, Graph, Stream, Word};
use warpwire::msg::{Buffer, BufferSlice, ChannelOptions, Comm, DeviceChannel, RmaWindow};
use warpwire::stream::KernelQp;
use warpwire::stream::kernel::SignalWait;
use warpwire_apps::pingpong_kernels::{KernelTransfer, PingPongEnd, PingPongKernels};

use crate::output::Failure;

/// Rounds enqueued on a stream before the CPU waits for it.
const ROUNDS_IN_FLIGHT: u32 = 16;

/// A device's side of the measurement.
pub(super) struct DeviceRunner {
    device_channel: DeviceChannel,
    pub(super) stream: Stream,
    pub(super) kernels: PingPongKernels,
    /// Our signal word, which the peer adds to.
    words: Allocation,
    /// The window of both ranks' signal words.
    word_window: RmaWindow,
    wait: SignalWait,
    timeout: Duration,
}

/// The transfer of one round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TransferKind {
    /// Rank 0 sends, rank 1 replies.
    PingPong,
    /// Both ranks send, then wait.
    Simultaneous,
    /// Both ranks write to the peer's window, and wait until the data has arrived.
    Put,
    /// Both ranks read from the peer's window.
    Get,
}

/// Buffers and parameters of a round.
pub(super) struct Transfer<'a> {
    pub(super) comm: &'a Comm,
    pub(super) out: &'a Buffer,
    pub(super) into: &'a Buffer,
    /// Destination of reads from the peer's window.
    pub(super) back: &'a Buffer,
    pub(super) window: &'a RmaWindow,
    pub(super) size: u64,
    /// Duration of the compute kernel before each message; no kernel if zero.
    pub(super) compute: Duration,
    pub(super) what: TransferKind,
}

impl Transfer<'_> {
    fn other(&self) -> usize {
        1 - self.comm.rank()
    }

    /// True if this rank sends before it waits.
    fn starts_round(&self) -> bool {
        self.what != TransferKind::PingPong || self.comm.rank() == 0
    }

    fn slices(&self) -> Result<(BufferSlice, BufferSlice), Failure> {
        Ok((self.out.slice(0, self.size)?, self.into.slice(0, self.size)?))
    }

    /// The put or get between the peer's window and our memory; `None` for messages.
    fn moves<'q>(&self, qp: &'q KernelQp) -> Result<Option<KernelTransfer<'q>>, Failure> {
        let own = match self.what {
            TransferKind::Put => self.out,
            TransferKind::Get => self.back,
            TransferKind::PingPong | TransferKind::Simultaneous => return Ok(None),
        };
        let there = self.window.remote(self.other(), 0, self.size)?;
        let here = own.slice(0, self.size)?.sge()?;
        Ok(Some(KernelTransfer { qp, there, here, reads: self.what == TransferKind::Get }))
    }
}

impl DeviceRunner {
    pub(super) fn new(comm: &Comm, device: &Device, timeout: Duration) -> Result<Self, Failure> {
        let options = ChannelOptions::default().with_wait_timeout(timeout);
        let device_channel = comm.device_channel(device, options)?;
        let words = device.alloc(64)?;
        words.write(0, &[0; 64])?;
        let word_window = comm.window(&comm.register(words.whole()?)?)?;
        let wait = SignalWait::new(&words.word64(0)?, 0, 1)?;
        let kernels = PingPongKernels::load(device)?;
        Ok(Self {
            device_channel,
            stream: device.stream()?,
            kernels,
            words,
            word_window,
            wait,
            timeout,
        })
    }

    fn own(&self) -> Result<Word, Failure> {
        Ok(self.words.word64(0)?)
    }

    /// Waits for the stream; returns the failure of the channel or of a kernel.
    fn finish(&self) -> Result<(), Failure> {
        self.stream.synchronize(self.timeout)?;
        self.device_channel.check()?;
        Ok(self.kernels.check()?)
    }

    fn compute(&self, time: Duration) -> Result<(), Failure> {
        match time.is_zero() {
            true => Ok(()),
            false => Ok(self.kernels.compute(&self.stream, time)?),
        }
    }

    /// The CPU posts receives and enqueues; the stream sends and waits.
    pub(super) fn by_stream(
        &self,
        transfer: &Transfer<'_>,
        count: u32,
    ) -> Result<Duration, Failure> {
        let start = Instant::now();
        let mut left = count;
        while left > 0 {
            let now = left.min(ROUNDS_IN_FLIGHT);
            for _ in 0..now {
                self.stream_round(transfer)?;
            }
            self.finish()?;
            self.device_channel.progress()?;
            left -= now;
        }
        Ok(start.elapsed())
    }

    fn stream_round(&self, transfer: &Transfer<'_>) -> Result<(), Failure> {
        let (out, into) = transfer.slices()?;
        let at = (transfer.window, transfer.other(), 0);
        if let TransferKind::Put | TransferKind::Get = transfer.what {
            self.compute(transfer.compute)?;
            let moved = match transfer.what {
                TransferKind::Put => self.device_channel.put_on_stream(&self.stream, at, out)?,
                _ => self.device_channel.get_on_stream(
                    &self.stream,
                    at,
                    transfer.back.slice(0, transfer.size)?,
                )?,
            };
            return Ok(self.device_channel.wait_on_stream(&self.stream, &moved)?);
        }
        let receive = self.device_channel.receive(transfer.other(), into)?;
        if !transfer.starts_round() {
            self.device_channel.wait_on_stream(&self.stream, &receive)?;
        }
        self.compute(transfer.compute)?;
        let _send = self.device_channel.send_on_stream(&self.stream, transfer.other(), out)?;
        if transfer.starts_round() {
            self.device_channel.wait_on_stream(&self.stream, &receive)?;
        }
        Ok(())
    }

    /// Captures one round: a put with signal and the wait for the peer's signal; or a put or get
    /// and the wait for its completion.
    fn graph(&self, transfer: &Transfer<'_>) -> Result<Graph, Failure> {
        let other = transfer.other();
        let kernel = self.device_channel.kernel(other)?;
        let to = transfer.window.remote(other, 0, transfer.size)?;
        let word = self.word_window.word(other, 0, 8)?;
        let from = transfer.slices()?.0.sge()?;
        let moves = transfer.moves(kernel)?;
        let graph = self.stream.capture(|stream| {
            if let Some(KernelTransfer { there, here, reads, .. }) = moves {
                if !transfer.compute.is_zero() {
                    self.kernels.compute(stream, transfer.compute)?;
                }
                match reads {
                    true => kernel.get_on_stream(stream, here, there)?,
                    false => kernel.put_on_stream(stream, there, here)?,
                }
                return kernel.wait_on_stream(stream);
            }
            if !transfer.starts_round() {
                kernel.wait_signal_on_stream(stream, &self.wait)?;
            }
            if !transfer.compute.is_zero() {
                self.kernels.compute(stream, transfer.compute)?;
            }
            kernel.put_signal_on_stream(stream, to, from, word, 1)?;
            if transfer.starts_round() {
                kernel.wait_signal_on_stream(stream, &self.wait)?;
            }
            Ok(())
        })?;
        Ok(graph)
    }

    /// Replays a graph for each round.
    pub(super) fn by_graph(
        &self,
        transfer: &Transfer<'_>,
        count: u32,
    ) -> Result<Duration, Failure> {
        let graph = self.graph(transfer)?;
        let start = Instant::now();
        let mut left = count;
        while left > 0 {
            let now = left.min(ROUNDS_IN_FLIGHT);
            for _ in 0..now {
                self.stream.replay(&graph)?;
            }
            self.finish()?;
            left -= now;
        }
        Ok(start.elapsed())
    }

    /// One kernel runs all rounds.
    pub(super) fn by_kernel(
        &self,
        transfer: &Transfer<'_>,
        count: u32,
    ) -> Result<Duration, Failure> {
        let other = transfer.other();
        let own = self.own()?;
        let side = PingPongEnd {
            qp: self.device_channel.kernel(other)?,
            to: transfer.window.remote(other, 0, transfer.size)?,
            from: transfer.slices()?.0.sge()?,
            signal: self.word_window.word(other, 0, 8)?,
            own: &own,
            start: own.load()?,
            sends_first: transfer.starts_round(),
        };
        // Both ranks must have read their signal words before either adds to them.
        transfer.comm.barrier(self.timeout)?;
        let start = Instant::now();
        match transfer.moves(side.qp)? {
            None => {
                self.kernels.ping_pong(
                    &self.stream,
                    &side,
                    count.into(),
                    transfer.compute,
                    self.timeout,
                )?;
            }
            Some(what) => {
                self.kernels.transfer(
                    &self.stream,
                    &what,
                    count.into(),
                    transfer.compute,
                    self.timeout,
                )?;
            }
        }
        self.finish()?;
        let took = start.elapsed();
        // Both kernels must be done before a graph's wait starts from the word's current value.
        transfer.comm.barrier(self.timeout)?;
        Ok(took)
    }

    /// Makes graphs wait for signals beyond the word's current value.
    pub(super) fn rearm_signal(&mut self) -> Result<(), Failure> {
        let word = self.own()?;
        self.wait = SignalWait::new(&word, word.load()?, 1)?;
        Ok(())
    }
}
