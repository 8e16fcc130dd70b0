//! Work and waits that a stream carries: kernels of one thread, which a graph replays as new work.
#![allow(unsafe_code)]

use std::time::Duration;

use super::kernels::KernelId;
use super::{KernelQp, layout};
use crate::error::{Error, Kind, Result};
use crate::mem::{Allocation, Launch, MemoryKind, Region, Stream, Word};
use crate::mlx5::INVALID_KEY;
use crate::verbs::{Remote, Sge};

/// A word of device memory that a stream waits for, one step further each time: a peer adds the step once per message.
///
/// The value that is waited for next is kept in device memory and moves on with each run of the wait, so that a graph that
/// is replayed waits for the next message each time.
#[derive(Clone, Debug)]
pub struct SignalWait {
    word: Word,
    next: Allocation,
    step: u64,
}

impl SignalWait {
    /// Waits of that word, whose value is `start` before the first message; each message adds `step`.
    pub fn new(word: &Word, start: u64, step: u64) -> Result<Self> {
        let device = word.region().allocation().device();
        // Freed at once where that is possible: streams that never rest would keep plain memory.
        let next = match device.alloc_kind(8, MemoryKind::Pool) {
            Ok(memory) => memory,
            Err(_) => device.alloc(8)?,
        };
        next.write(0, &start.to_le_bytes())?;
        Ok(Self { word: word.clone(), next, step })
    }
}

impl KernelQp {
    /// Writes to the peer's memory when the stream gets there.
    ///
    /// As all calls that end in `_on`: it can be captured into a graph, and each replay is a new operation. If the queue
    /// is full the stream waits, for as long as [`KernelQpOptions::wait_timeout`](super::KernelQpOptions::patience). A failure
    /// releases the stream, and [`check`](Self::check) tells of it.
    pub fn put_on_stream(&self, stream: &Stream, to: Remote, from: Sge) -> Result<()> {
        let args = [to.address, to.rkey.into(), from.address, from.lkey.into(), from.len.into()];
        self.run(stream, KernelId::Put, &args)
    }

    /// Writes, then completes a receive of the peer with `imm`.
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

    /// Writes, then adds to a 64-bit word of the peer: who sees the word has the data.
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

    /// Reads the peer's memory.
    pub fn get_on_stream(&self, stream: &Stream, to: Sge, from: Remote) -> Result<()> {
        let args = [to.address, to.lkey.into(), from.address, from.rkey.into(), to.len.into()];
        self.run(stream, KernelId::Get, &args)
    }

    /// Sends a message into a receive of the peer.
    pub fn send_on_stream(&self, stream: &Stream, from: Sge) -> Result<()> {
        self.run(stream, KernelId::Send, &[from.address, from.lkey.into(), from.len.into(), 0, 0])
    }

    /// Sends a message with a number beside it.
    pub fn send_imm_on_stream(&self, stream: &Stream, from: Sge, imm: u32) -> Result<()> {
        let args = [from.address, from.lkey.into(), from.len.into(), 1, imm.into()];
        self.run(stream, KernelId::Send, &args)
    }

    /// Adds to a 64-bit word of the peer; what was there before comes to `result`, 8 bytes, or nowhere.
    pub fn fetch_add_on_stream(
        &self,
        stream: &Stream,
        word: Remote,
        add: u64,
        result: Option<Sge>,
    ) -> Result<()> {
        self.atomic_on_stream(stream, word, [0, add, 0], result)
    }

    /// Puts `desired` in place of `expected` in a 64-bit word of the peer; what was there before comes to `result`.
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
                    .why(format!("the result has {len} bytes of room"))
                    .fix("give it 8 bytes"));
            }
        };
        let operation = [word.address, word.rkey.into(), swaps, first, second];
        self.run(stream, KernelId::Atomic, &[&operation[..], &result].concat())
    }

    /// Holds the stream up until everything that was posted before is complete.
    pub fn wait_on_stream(&self, stream: &Stream) -> Result<()> {
        self.run(stream, KernelId::Wait, &[])
    }

    /// Gives memory for a message, when the stream gets there.
    pub fn post_receive_on_stream(&self, stream: &Stream, into: Sge) -> Result<()> {
        self.run(stream, KernelId::PostReceive, &[into.address, into.lkey.into(), into.len.into()])
    }

    /// Holds the stream up until the next message is there, in the order of the receives; each message is waited for
    /// once. Its length, the number beside it, whether there is one, and the status, 32 bits each, come to `message`.
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
                .fix("give it 16 bytes, aligned to 4"));
        }
        let launch =
            self.begin(KernelId::Receive)?.value(message.address().raw()).keep_alive(message);
        self.start(stream, launch)
    }

    /// Holds the stream up until the word has moved on by another step.
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

    /// The kernel with its first two arguments: the handle, and where to report.
    fn begin(&self, id: KernelId) -> Result<Launch> {
        let Some(kernels) = &self.0.kernels else { return Err(self.no_streams()) };
        let report = self.handle().raw() + layout::REPORT;
        Ok(self.pass(Launch::new(kernels.get(id)))?.value(report))
    }

    fn run(&self, stream: &Stream, id: KernelId, args: &[u64]) -> Result<()> {
        let launch = args.iter().fold(self.begin(id)?, |launch, value| launch.value(*value));
        self.start(stream, launch)
    }

    /// Adds the last argument, the time-out, and starts it.
    fn start(&self, stream: &Stream, launch: Launch) -> Result<()> {
        let launch = launch.value(nanos(self.0.wait_timeout));
        // SAFETY: the kernels touch the handle, the queues that it names, and the regions that they are given, all of
        // which the launch keeps alive. Data is named by keys, and looked up by the engine.
        unsafe { stream.launch(launch) }
    }

    #[cold]
    fn no_streams(&self) -> Error {
        Error::new(Kind::Unsupported, "queue work on a stream")
            .on(self.label())
            .why("it is for threads of the CPU")
            .fix("make it by KernelQp::create, for a device")
    }
}

/// The time as kernels have it: all ones is for ever.
fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
