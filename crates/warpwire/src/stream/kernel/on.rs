//! Stream-ordered operations and waits: one-thread kernels, which a graph replays as new work.
#![allow(unsafe_code)]

use std::time::Duration;

use super::kernels::KernelId;
use super::{KernelQp, layout};
use crate::error::{Error, Kind, Result};
use crate::mem::{Allocation, Launch, MemoryKind, Region, Stream, Word};
use crate::mlx5::INVALID_KEY;
use crate::verbs::{Remote, Sge};

/// A word of device memory that a stream waits for, one step further each time: the peer adds the
/// step once per message.
///
/// The next expected value is kept in device memory and is advanced by each run of the wait, so
/// that a replayed graph waits for the next message each time.
#[derive(Clone, Debug)]
pub struct SignalWait {
    word: Word,
    next: Allocation,
    step: u64,
}

impl SignalWait {
    /// Waits for `word`, whose value is `start` before the first message; each message adds `step`.
    pub fn new(word: &Word, start: u64, step: u64) -> Result<Self> {
        let device = word.region().allocation().device();
        // Pool memory is freed without waiting for the device; plain memory would not be freed
        // while streams are busy.
        let next = match device.alloc_kind(8, MemoryKind::Pool) {
            Ok(memory) => memory,
            Err(_) => device.alloc(8)?,
        };
        next.write(0, &start.to_le_bytes())?;
        Ok(Self { word: word.clone(), next, step })
    }
}

impl KernelQp {
    /// RDMA WRITE to the peer's memory when the stream reaches this point.
    ///
    /// As all methods that end in `_on_stream` it can be captured into a graph, and each replay is
    /// a new operation. If the queue is full the stream waits, up to
    /// [`KernelQpOptions::wait_timeout`](super::KernelQpOptions::wait_timeout). A failure releases
    /// the stream and is reported by [`check`](Self::check).
    pub fn put_on_stream(&self, stream: &Stream, to: Remote, from: Sge) -> Result<()> {
        let args = [to.address, to.rkey.into(), from.address, from.lkey.into(), from.len.into()];
        self.run(stream, KernelId::Put, &args)
    }

    /// RDMA WRITE with immediate: completes a receive of the peer with `imm`.
    pub fn put_imm_on_stream(
        &self,
        stream: &Stream,
        to: Remote,
        from: Sge,
        imm: u32,
    ) -> Result<()> {
        let Sge { address, len, lkey } = from;
        let args = [to.address, to.rkey.into(), address, lkey.into(), len.into(), imm.into()];
        self.run(stream, KernelId::PutImm, &args)
    }

    /// RDMA WRITE, then an atomic add to a 64-bit word of the peer: once the peer sees the new
    /// value, it sees the data.
    pub fn put_signal_on_stream(
        &self,
        stream: &Stream,
        to: Remote,
        from: Sge,
        word: Remote,
        add: u64,
    ) -> Result<()> {
        let Sge { address, len, lkey } = from;
        let data = [to.address, to.rkey.into(), address, lkey.into(), len.into()];
        let signal = [word.address, word.rkey.into(), add];
        self.run(stream, KernelId::PutSignal, &[&data[..], &signal].concat())
    }

    /// RDMA READ of the peer's memory.
    pub fn get_on_stream(&self, stream: &Stream, to: Sge, from: Remote) -> Result<()> {
        let args = [to.address, to.lkey.into(), from.address, from.rkey.into(), to.len.into()];
        self.run(stream, KernelId::Get, &args)
    }

    /// Sends a message into a receive of the peer.
    pub fn send_on_stream(&self, stream: &Stream, from: Sge) -> Result<()> {
        self.run(stream, KernelId::Send, &[from.address, from.lkey.into(), from.len.into(), 0, 0])
    }

    /// Sends a message with immediate data.
    pub fn send_imm_on_stream(&self, stream: &Stream, from: Sge, imm: u32) -> Result<()> {
        let args = [from.address, from.lkey.into(), from.len.into(), 1, imm.into()];
        self.run(stream, KernelId::Send, &args)
    }

    /// Atomic add to a 64-bit word of the peer. The previous value is stored to `result`, 8 bytes,
    /// or discarded.
    pub fn fetch_add_on_stream(
        &self,
        stream: &Stream,
        word: Remote,
        add: u64,
        result: Option<Sge>,
    ) -> Result<()> {
        self.atomic_on_stream(stream, word, [0, add, 0], result)
    }

    /// Atomic compare and swap of a 64-bit word of the peer. The previous value is stored to
    /// `result`, 8 bytes, or discarded.
    pub fn compare_swap_on_stream(
        &self,
        stream: &Stream,
        word: Remote,
        [expected, desired]: [u64; 2],
        result: Option<Sge>,
    ) -> Result<()> {
        self.atomic_on_stream(stream, word, [1, expected, desired], result)
    }

    fn atomic_on_stream(
        &self,
        stream: &Stream,
        word: Remote,
        [swaps, first, second]: [u64; 3],
        result: Option<Sge>,
    ) -> Result<()> {
        let result = match result {
            Some(Sge { address, len: 8, lkey }) => [address, lkey.into()],
            None => [0, INVALID_KEY.into()],
            Some(Sge { len, .. }) => {
                return Err(Error::new(Kind::InvalidArgument, "queue an atomic operation")
                    .on(stream.label())
                    .why(format!("the result buffer has {len} bytes"))
                    .fix("pass 8 bytes"));
            }
        };
        let operation = [word.address, word.rkey.into(), swaps, first, second];
        self.run(stream, KernelId::Atomic, &[&operation[..], &result].concat())
    }

    /// Blocks the stream until all operations posted before have completed.
    pub fn wait_on_stream(&self, stream: &Stream) -> Result<()> {
        self.run(stream, KernelId::Wait, &[])
    }

    /// Posts a receive when the stream reaches this point.
    pub fn post_receive_on_stream(&self, stream: &Stream, into: Sge) -> Result<()> {
        self.run(stream, KernelId::PostReceive, &[into.address, into.lkey.into(), into.len.into()])
    }

    /// Blocks the stream until the next message has arrived, in the order of the receives; each
    /// message is consumed once. Its length, immediate data, whether it has immediate data, and the
    /// status are stored to `message`, 32 bits each.
    pub fn receive_on_stream(&self, stream: &Stream, message: Option<&Region>) -> Result<()> {
        let Some(message) = message else { return self.run(stream, KernelId::Receive, &[0]) };
        if message.len() < 16 || !message.address().is_aligned_to(4) {
            return Err(Error::new(Kind::InvalidArgument, "queue a wait for a message")
                .on(stream.label())
                .why(format!(
                    "{} bytes at {} cannot hold four words",
                    message.len(),
                    message.address()
                ))
                .fix("pass 16 bytes, aligned to 4"));
        }
        let launch =
            self.begin(KernelId::Receive)?.value(message.address().raw()).keep_alive(message);
        self.start(stream, launch)
    }

    /// Blocks the stream until the word has reached the next step.
    pub fn wait_signal_on_stream(&self, stream: &Stream, signal: &SignalWait) -> Result<()> {
        let Some(kernels) = &self.0.kernels else { return Err(self.no_streams()) };
        let handle = self.0.handle.region()?;
        let report = handle.address().raw() + layout::REPORT;
        let launch = Launch::new(kernels.get(KernelId::WaitSignal))
            .value(report)
            .keep_alive(&handle)
            .region(signal.word.region())
            .value(signal.word.region().len())
            .region(&signal.next.whole()?)
            .value(signal.step);
        self.start(stream, launch)
    }

    /// The kernel with its first two arguments: the handle, and the address of the report.
    fn begin(&self, id: KernelId) -> Result<Launch> {
        let Some(kernels) = &self.0.kernels else { return Err(self.no_streams()) };
        let report = self.handle().raw() + layout::REPORT;
        Ok(self.pass(Launch::new(kernels.get(id)))?.value(report))
    }

    fn run(&self, stream: &Stream, id: KernelId, args: &[u64]) -> Result<()> {
        let launch = args.iter().fold(self.begin(id)?, |launch, value| launch.value(*value));
        self.start(stream, launch)
    }

    /// Adds the last argument, the timeout, and launches the kernel.
    fn start(&self, stream: &Stream, launch: Launch) -> Result<()> {
        let launch = launch.value(nanos(self.0.wait_timeout));
        // SAFETY: the kernels access the handle, the queues that it points to, and the regions that
        // they are given, all of which the launch keeps alive. Data is addressed by keys, which the
        // engine checks.
        unsafe { stream.launch(launch) }
    }

    #[cold]
    fn no_streams(&self) -> Error {
        Error::new(Kind::Unsupported, "queue work on a stream")
            .on(self.label())
            .why("it was created for CPU threads")
            .fix("create it for a device, with KernelQp::create")
    }
}

/// The timeout as kernels take it, in nanoseconds; `u64::MAX` means no timeout.
fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
