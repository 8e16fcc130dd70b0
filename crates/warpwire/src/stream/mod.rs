//! Verbs that a stream orders: the CPU prepares, and the stream, when it gets there, rings the doorbell or waits for a
//! completion. And verbs that a running kernel posts by itself.
//!
//! | type | what it is |
//! |---|---|
//! | [`StreamQp`], [`StreamQpOptions`] | a queue pair whose queues a stream reaches |
//! | [`Prepared`], [`PreparedWait`] | work and waits that are ready to be posted |
//! | [`Descriptors`] | several of them, and operations on words and memory, in one submission |
//! | [`Ticket`] | what work is called until it has ended |
//! | [`Failure`], [`Waiter`] | why a queue pair failed, and who waited then |
//! | [`DoorbellValues`], [`CqeWait`] | what a stream writes and waits for, as numbers |
//! | [`KernelQp`], [`kernel`] | a queue pair that kernels drive, also from graphs |
//! | [`Mlx5Qp`], [`Mlx5Cq`] | where a ConnectX has them |
//!
//! # Order
//! What a stream did before it rings is done: a kernel writes a buffer, the request behind it sends what the kernel
//! wrote. What a stream does after it waited sees what arrived. Requests of one queue pair go out in the order in which
//! they were posted, also from several streams: a stream that posts after another one waits for it.
//!
//! # No stream is left waiting
//! Work that fails ends the wait for it, as success does; whoever synchronizes the stream then asks
//! [`StreamQp::failure`]. A queue pair that fails gives everything back. A stream that waits for longer than
//! [`StreamQpOptions::wait_timeout`] makes its queue pair fail, and so does dropping it.
//!
//! ```
//! use std::time::Duration;
//! use warpwire::hca::HcaOptions;
//! use warpwire::link::Hub;
//! use warpwire::mem::sim::{Sim, SimConfig};
//! use warpwire::stream::{StreamQp, StreamQpOptions};
//! use warpwire::verbs::{Access, Context, ProgressMode, WrOp, ReceiveRequest, SendRequest};
//!
//! let gpu = Sim::start(SimConfig::default())?.device(0)?;
//! let hub = Hub::new();
//! let progress_mode = ProgressMode::Thread { spin: Duration::ZERO, core: None };
//! let [a, b] = ["10.0.0.1:4791", "10.0.0.2:4791"].map(|address| {
//!     let link = hub.endpoint(address.parse().unwrap()).unwrap();
//!     Context::open_with(link, HcaOptions { progress_mode, ..HcaOptions::default() }).unwrap()
//! });
//! let (pd, there) = (a.pd(), b.pd());
//! let qp = StreamQp::create(&a, &pd, &gpu, StreamQpOptions::default())?;
//! let peer = StreamQp::create(&b, &there, &gpu, StreamQpOptions::default())?;
//! qp.connect(&peer.endpoint())?;
//! peer.connect(&qp.endpoint())?;
//!
//! let (from, to) = (gpu.alloc(4096)?, gpu.alloc(4096)?);
//! let source = a.register(&pd, from.whole()?, Access::LOCAL_WRITE)?;
//! let target = b.register(&there, to.whole()?, Access::LOCAL_WRITE)?;
//! let (sender, receiver) = (gpu.stream()?, gpu.stream()?);
//!
//! peer.post_receive(&[ReceiveRequest { id: 1, data: &[target.sge(0, 4096)] }])?;
//! peer.wait_receive(&receiver)?; // now; the message comes later
//! sender.fill(&from.whole()?, 0x5a)?; // a kernel would do
//! qp.queue(&sender, &SendRequest::new(2, WrOp::Send).with(&[source.sge(0, 4096)]))?;
//! receiver.synchronize(Duration::from_secs(10))?;
//! let mut arrived = [0; 4096];
//! to.read(0, &mut arrived)?;
//! assert_eq!(arrived, [0x5a; 4096]);
//! assert!(peer.failure().is_none());
//! # Ok::<(), warpwire::Error>(())
//! ```

mod descriptors;
mod doorbells;
mod failure;
mod hardware;
pub mod kernel;
mod prepared;
mod queue;
mod ticket;
mod waits;
mod watchdog;

use std::sync::Arc;
use std::time::{Duration, Instant};

pub use descriptors::Descriptors;
pub use doorbells::{CqeWait, DoorbellMode, DoorbellValues};
pub use failure::{Failure, Waiter};
pub use hardware::{Mlx5Cq, Mlx5Qp};
pub use kernel::{KernelQp, KernelQpOptions};
pub use prepared::{Prepared, PreparedWait};
pub use ticket::Ticket;

use crate::error::{Error, Kind, Result};
use crate::hca::QueueMemory;
use crate::mem::{self, Allocation, Stream, Word};
use crate::mlx5::{DoorbellRecord, MAX_SEND_WQEBBS, WQEBB_LEN};
use crate::verbs::{
    Completion, Context, Cq, CqOptions, Pd, ProgressMode, Qp, QpEndpoint, QpOptions,
    ReceiveRequest, SendRequest, Service,
};
use doorbells::{CqeTails, DoorbellWords};
use queue::{Shared, State};
use waits::{WORDS_LEN, Waits};

/// Where the completions of a [`StreamQp`] lie.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CqMemory {
    /// In pinned host memory: fast for the CPU to read.
    #[default]
    Pinned,
    /// In the device's memory, behind a CPU window: fast for streams to watch.
    Device,
}

/// How a [`StreamQp`] is made.
#[derive(Clone, Debug)]
pub struct StreamQpOptions {
    /// The queue pair. Its memory, its shared receive queue and whether it is watched are decided here; every request
    /// makes a completion.
    pub qp: QpOptions,
    /// How many completions either queue has room for, at least: those that nobody has taken, and those that streams
    /// have not passed. By default twice as many as requests or receives.
    pub completions: Option<u32>,
    /// How many waits may be on their way.
    pub waits: u32,
    /// Where completions lie.
    pub cq_memory: CqMemory,
    /// How a stream rings.
    pub doorbell_mode: DoorbellMode,
    /// For how long a stream may wait, from when it came to the wait, before the queue pair counts as failed. Without
    /// it, streams wait for ever, and one store less is needed for each wait.
    pub wait_timeout: Option<Duration>,
}

impl Default for StreamQpOptions {
    fn default() -> Self {
        Self {
            qp: QpOptions::default(),
            completions: None,
            waits: 256,
            cq_memory: CqMemory::default(),
            doorbell_mode: DoorbellMode::default(),
            wait_timeout: Some(Duration::from_secs(30)),
        }
    }
}

/// A queue pair that streams drive. Clones are the same one; it ends with the last, and with what was prepared for it.
///
/// The CPU writes entries and posts receives; streams ring and wait. All calls are for any thread.
#[derive(Clone, Debug)]
pub struct StreamQp(Arc<Shared>);

impl StreamQp {
    /// Makes one whose queues lie where that device's streams reach them.
    ///
    /// On an mlx5 device of the machine its queues lie where their provider has put them, and that device is let reach them:
    /// also the page with the NIC's doorbell, which streams ring after the record. Where completions lie is then not ours to
    /// choose.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if nobody drives the context when a stream rings, or the options make no sense;
    /// [`Kind::Unsupported`] if the device's streams cannot write and wait for words, or the context is hardware that is
    /// not mlx5: nobody tells where its queues lie.
    pub fn create(
        context: &Context,
        pd: &Pd,
        device: &mem::Device,
        options: StreamQpOptions,
    ) -> Result<Self> {
        check(context, device, &options)?;
        let StreamQpOptions {
            qp: wanted,
            completions,
            waits,
            cq_memory,
            doorbell_mode,
            wait_timeout,
        } = options;
        let entries = |depth: u32| completions.unwrap_or(0).max(depth * 2).next_power_of_two();
        let entries = [wanted.send_depth, wanted.receive_depth].map(|depth| entries(depth.max(1)));
        let wanted = QpOptions { poll_doorbell: true, signal_all: true, ..wanted };
        let StreamQpParts { qp, cqs, tails, dbrec, doorbell } = match context.soft() {
            Some(_) => {
                create_soft_qp(context, pd, device, wanted, (entries, cq_memory, doorbell_mode))?
            }
            None => hardware::create_hardware_qp(context, pd, device, wanted, entries)?,
        };
        let [sends, receives] = cqs.each_ref().map(Cq::entries);
        let for_waits = u64::from(waits) * WORDS_LEN;
        let words = device.alloc_pinned(for_waits + u64::from(sends) * 4)?;
        words.host_bytes()?.fill(0, words.len(), &[0])?;
        let rung_words = (0..sends).map(|at| words.word32(for_waits + u64::from(at) * 4));
        let rung_words = rung_words.collect::<Result<_>>()?;
        let number = qp.number();
        let doorbells = DoorbellWords::new(number, dbrec, doorbell, rung_words);
        let waits = Waits::new(&words, waits, number)?;
        let state = State::new(waits, [sends, receives]);
        let device = device.clone();
        let shared = Arc::new(Shared::new(qp, cqs, tails, doorbells, device, wait_timeout, state));
        watchdog::monitor(&shared)?;
        Ok(Self(shared))
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        self.0.qp.number()
    }

    /// The queue pair below: its state, its path, its counters. Work goes through this type alone.
    pub fn qp(&self) -> &Qp {
        &self.0.qp
    }

    /// The device whose streams drive it.
    pub fn device(&self) -> &mem::Device {
        &self.0.device
    }

    /// What a peer must know to connect to it.
    pub fn endpoint(&self) -> QpEndpoint {
        self.0.qp.endpoint()
    }

    /// Connects it to the peer that made this offer.
    pub fn connect(&self, peer: &QpEndpoint) -> Result<()> {
        self.0.qp.connect(peer)
    }

    /// Writes a request into the send queue, and tells nobody. Every request makes a completion, whatever it says.
    ///
    /// # Errors
    /// [`Kind::Busy`] if there is no room: take completions with [`poll`](Self::poll), and let streams go on. The
    /// failure, if the queue pair has failed.
    pub fn prepare(&self, request: &SendRequest<'_>) -> Result<Prepared> {
        let ticket = self.0.prepare(&mut self.0.state.lock(), request)?;
        Ok(Prepared { shared: self.0.clone(), ticket, is_posted: false })
    }

    /// Prepares a request and posts it on a stream.
    pub fn queue(&self, stream: &Stream, request: &SendRequest<'_>) -> Result<Ticket> {
        self.prepare(request)?.post(stream)
    }

    /// Prepares a request and posts it from the CPU, now.
    pub fn post_now(&self, request: &SendRequest<'_>) -> Result<Ticket> {
        self.prepare(request)?.post_now()
    }

    /// Posts receives, all of them or none; returns what the first is called, the others come
    /// [after](Ticket::after) it.
    pub fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<Ticket> {
        self.0.post_receive(requests)
    }

    /// Prepares the wait for the end of a request or a receive.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if there is no such request or receive; [`Kind::Busy`] if too many waits are on their
    /// way.
    pub fn prepare_wait(&self, ticket: Ticket) -> Result<PreparedWait> {
        let slot = self.0.prepare_wait(&mut self.0.state.lock(), ticket)?;
        let shared = self.0.clone();
        Ok(PreparedWait { shared, ticket, slot, is_next: false, is_posted: false })
    }

    /// Prepares the wait for the next receive that nobody has waited for in this way: first for the first that was
    /// posted, then for the second, whatever the CPU has taken meanwhile.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if it was not posted: the stream might wait for ever.
    pub fn prepare_wait_receive(&self) -> Result<PreparedWait> {
        let (ticket, slot) = self.0.prepare_next(&mut self.0.state.lock())?;
        let shared = self.0.clone();
        Ok(PreparedWait { shared, ticket, slot, is_next: true, is_posted: false })
    }

    /// Holds a stream up until that request has ended, well or not.
    ///
    /// # Errors
    /// As [`prepare_wait`](Self::prepare_wait) and [`PreparedWait::post`]; also if it is the ticket of a receive.
    pub fn wait_send(&self, stream: &Stream, ticket: Ticket) -> Result<()> {
        ticket.check_send()?;
        self.wait_for(stream, ticket)
    }

    /// Holds a stream up until that request or that receive has ended, well or not.
    pub fn wait_for(&self, stream: &Stream, ticket: Ticket) -> Result<()> {
        self.prepare_wait(ticket)?.post(stream).map(drop)
    }

    /// Holds a stream up until the next receive has ended, well or not; returns which that is.
    pub fn wait_receive(&self, stream: &Stream) -> Result<Ticket> {
        self.prepare_wait_receive()?.post(stream)
    }

    /// Takes completions, requests' before receives', each in order; returns how many of `into` were filled. Never
    /// blocks. Streams may wait for completions that were taken.
    ///
    /// # Errors
    /// If the device is beyond repair.
    pub fn poll(&self, into: &mut [Completion]) -> Result<usize> {
        self.0.poll(into)
    }

    /// The next completion, waiting for it if need be; `None` when the time is over.
    pub fn next(&self, timeout: Duration) -> Result<Option<Completion>> {
        const SPIN: Duration = Duration::from_micros(50);
        let start = Instant::now();
        let mut one = [Completion::EMPTY];
        loop {
            if self.poll(&mut one)? == 1 {
                return Ok(Some(one[0]));
            }
            let waited = start.elapsed();
            if waited >= timeout {
                return Ok(None);
            }
            if waited > SPIN {
                std::thread::sleep(SPIN);
            }
        }
    }

    /// Why it failed, if it did.
    pub fn failure(&self) -> Option<Arc<Failure>> {
        self.0.failure()
    }

    /// Ends it: everything that was posted comes back, and whoever waits goes on.
    pub fn abort(&self) {
        self.0.end("the program ended it");
    }
}

fn check(context: &Context, device: &mem::Device, options: &StreamQpOptions) -> Result<()> {
    let wrong = |why: String| {
        Error::new(Kind::InvalidArgument, "make a queue pair for streams")
            .on(device.label())
            .why(why)
    };
    device.capabilities().stream_mem_ops.require("ring from streams", device.info())?;
    if context.soft().is_some_and(|hca| !matches!(hca.progress_mode(), ProgressMode::Thread { .. }))
    {
        return Err(wrong("a stream's ring wakes nobody, and no thread drives the context".into())
            .fix("open the context with Drive::Thread"));
    }
    if options.qp.service != Service::Rc || options.qp.srq.is_some() {
        return Err(wrong("streams know connections with receives of their own only".into())
            .fix("use Service::Rc, and no shared receive queue"));
    }
    if options.qp.memory.is_some() {
        return Err(wrong("its queues lie in memory of that device".into())
            .fix("leave QpOptions::memory out"));
    }
    if options.waits == 0 || options.waits > 1 << 20 {
        return Err(wrong(format!("{} is not a number of waits", options.waits))
            .fix("ask for 1 to 1048576"));
    }
    if options.qp.send_depth.max(options.qp.receive_depth) > MAX_SEND_WQEBBS / 2 {
        return Err(wrong(format!("its queues would be deeper than {}", MAX_SEND_WQEBBS / 2))
            .fix("ask for a smaller depth"));
    }
    Ok(())
}

/// A queue pair that a stream reaches.
struct StreamQpParts {
    qp: Qp,
    cqs: [Cq; 2],
    tails: [CqeTails; 2],
    /// The doorbell record's send word.
    dbrec: Word,
    doorbell: Option<Word>,
}

/// A queue pair of the software HCA, in memory of the device.
fn create_soft_qp(
    context: &Context,
    pd: &Pd,
    device: &mem::Device,
    mut wanted: QpOptions,
    (entries, cq_memory, doorbell_mode): ([u32; 2], CqMemory, DoorbellMode),
) -> Result<StreamQpParts> {
    let (sends, send_memory) = make_cq(context, device, entries[0], cq_memory)?;
    let (receives, receive_memory) = make_cq(context, device, entries[1], cq_memory)?;
    let memory = device.alloc_pinned(Qp::required_memory(&wanted)?)?;
    wanted.memory = Some(QueueMemory::pinned(memory.clone())?);
    let qp = context.create_qp(pd, &sends, &receives, wanted)?;
    let (_, layout) = qp.queues();
    check_blocks((layout.dbrec - layout.send) / WQEBB_LEN as u64, device)?;
    let has_nor = device.capabilities().stream_wait_nor.is_yes();
    let tails = [
        CqeTails::new((&send_memory, 0), sends.entries(), has_nor)?,
        CqeTails::new((&receive_memory, 0), receives.entries(), has_nor)?,
    ];
    let dbrec = memory.word32(layout.dbrec + DoorbellRecord::SEND as u64)?;
    let doorbell = match doorbell_mode {
        DoorbellMode::DoorbellRecord => None,
        DoorbellMode::RecordAndDoorbell => Some(memory.word64(layout.doorbell)?),
    };
    Ok(StreamQpParts { qp, cqs: [sends, receives], tails, dbrec, doorbell })
}

/// What the doorbell record says must be told from what it said a lap before, and half of its numbers is enough for that.
fn check_blocks(blocks: u64, device: &mem::Device) -> Result<()> {
    if blocks <= u64::from(MAX_SEND_WQEBBS / 2) {
        return Ok(());
    }
    let why =
        format!("its send queue would have {blocks} blocks, and may have {}", MAX_SEND_WQEBBS / 2);
    Err(Error::new(Kind::InvalidArgument, "make a queue pair for streams")
        .on(device.label())
        .why(why)
        .fix("ask for a smaller depth, fewer ranges or less inline data"))
}

/// A completion queue, and the memory that it lies in.
fn make_cq(
    context: &Context,
    device: &mem::Device,
    entries: u32,
    cq_memory: CqMemory,
) -> Result<(Cq, Allocation)> {
    let len = Cq::required_memory(entries);
    let (allocation, memory) = match cq_memory {
        CqMemory::Pinned => {
            let allocation = device.alloc_pinned(len)?;
            (allocation.clone(), QueueMemory::pinned(allocation)?)
        }
        CqMemory::Device => {
            let allocation = device.alloc(len)?;
            let window = allocation.window()?;
            (allocation, QueueMemory::window(window))
        }
    };
    let options =
        CqOptions { entries, memory: Some(memory), manual_release: true, ..CqOptions::default() };
    Ok((context.create_cq_with(options)?, allocation))
}
