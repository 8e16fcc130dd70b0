//! Stream-ordered verbs: the CPU prepares a work request, and the stream rings the doorbell or
//! waits for a completion when it reaches that point. Also verbs that a running kernel posts.
//!
//! | type | what it is |
//! |---|---|
//! | [`StreamQp`], [`StreamQpOptions`] | a queue pair whose queues streams can access |
//! | [`Prepared`], [`PreparedWait`] | requests and waits that are ready to be posted |
//! | [`Descriptors`] | several of them, with word and memory operations, in one submission |
//! | [`Ticket`] | identifies a request or receive until its completion is consumed |
//! | [`Failure`], [`Waiter`] | why a queue pair failed, and which streams waited then |
//! | [`DoorbellValues`], [`CqeWait`] | the values that a stream writes and waits for |
//! | [`KernelQp`], [`kernel`] | a queue pair that kernels post to, also from graphs |
//! | [`Mlx5Qp`], [`Mlx5Cq`] | the queue addresses of a ConnectX |
//!
//! # Order
//! Everything a stream did before it rings the doorbell is visible to the request: if a kernel
//! writes a buffer, the request behind it sends what the kernel wrote. Everything a stream does
//! after a wait sees the received data. Requests of one queue pair are sent in the order in which
//! they were posted, also from several streams: a stream that posts after another one waits for its
//! doorbell.
//!
//! # No stream blocks for ever
//! A failed request ends the wait for it, as a successful one does; after synchronizing the stream,
//! check [`StreamQp::failure`]. A queue pair that fails flushes all of its work. A stream that
//! waits longer than [`StreamQpOptions::wait_timeout`] fails its queue pair, and so does dropping
//! it.
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
//!     Context::open_with(link, HcaOptions::default().with_progress_mode(progress_mode)).unwrap()
//! });
//! let (pd, there) = (a.alloc_pd(), b.alloc_pd());
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
pub use doorbells::DoorbellMode;
#[doc(hidden)]
pub use doorbells::{CqeWait, DoorbellValues};
pub use failure::{Failure, Waiter};
#[doc(hidden)]
pub use hardware::{Mlx5Cq, Mlx5Qp};
pub use kernel::{KernelQp, KernelQpOptions};
pub use prepared::{Prepared, PreparedWait};
pub use ticket::Ticket;

use crate::error::{Error, Kind, Result};
use crate::hca::QueueMemory;
use crate::mem::{self, Allocation, StreamRef, Word};
use crate::mlx5::{DoorbellRecord, MAX_SEND_WQEBBS, WQEBB_LEN};
use crate::verbs::{
    Completion, Context, Cq, CqOptions, Pd, ProgressMode, Qp, QpEndpoint, QpOptions,
    ReceiveRequest, SendRequest, Service,
};
use doorbells::{CqeTails, DoorbellWords};
use queue::{Shared, State};
use waits::{WORDS_LEN, Waits};

/// Where the completion queues of a [`StreamQp`] are allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum CqMemory {
    /// In pinned host memory: fast for the CPU to read.
    #[default]
    Pinned,
    /// In device memory, mapped into the CPU's address space: fast for streams to poll.
    Device,
}

/// Options of a [`StreamQp`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct StreamQpOptions {
    /// The RC queue pair. `memory` and `srq` must be `None`; `poll_doorbell` and `signal_all` are
    /// always set, so that every request generates a completion.
    pub qp: QpOptions,
    /// Minimum number of entries of either completion queue. An entry stays in use until the CPU
    /// has polled it and no stream waits for it. Default: twice the send or receive depth.
    pub cq_entries: Option<u32>,
    /// Maximum number of waits in flight, 1 to 2^20.
    pub max_waits: u32,
    /// Where the completion queues are allocated. Ignored for hardware queue pairs.
    pub cq_memory: CqMemory,
    /// Which words a stream writes to ring the doorbell. Ignored for hardware queue pairs, which
    /// need both.
    pub doorbell_mode: DoorbellMode,
    /// How long a stream may wait, counted from when it reached the wait, before the queue pair
    /// fails. With `None`, streams may wait for ever, and each wait saves one store.
    pub wait_timeout: Option<Duration>,
}

setters! {
    StreamQpOptions {
        with_qp => qp: QpOptions,
        with_max_waits => max_waits: u32,
        with_cq_memory => cq_memory: CqMemory,
        with_doorbell_mode => doorbell_mode: DoorbellMode,
    } optional {
        with_cq_entries => cq_entries: u32,
        with_wait_timeout => wait_timeout: Duration,
    }
}

impl Default for StreamQpOptions {
    fn default() -> Self {
        Self {
            qp: QpOptions::default(),
            cq_entries: None,
            max_waits: 256,
            cq_memory: CqMemory::default(),
            doorbell_mode: DoorbellMode::default(),
            wait_timeout: Some(Duration::from_secs(30)),
        }
    }
}

/// A queue pair driven by streams. Clones share it; it is destroyed with the last clone and the
/// last request or wait prepared for it.
///
/// The CPU writes WQEs and posts receives; streams ring doorbells and wait. All methods may be
/// called from any thread.
#[derive(Clone, Debug)]
pub struct StreamQp(Arc<Shared>);

impl StreamQp {
    /// Creates a queue pair whose queues streams of `device` can access.
    ///
    /// On an mlx5 NIC the provider allocates the queues. They are registered with `device`,
    /// together with the page that holds the doorbell register, which streams ring after the
    /// doorbell record.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if no thread drives the context (a stream's doorbell write wakes
    /// none), or if options are invalid; [`Kind::Unsupported`] if the device's streams cannot write
    /// and wait for words, or if the hardware is not mlx5, so that the addresses of its queues are
    /// unknown.
    pub fn create(
        context: &Context,
        pd: &Pd,
        device: &mem::Device,
        options: StreamQpOptions,
    ) -> Result<Self> {
        check(context, device, &options)?;
        let StreamQpOptions {
            qp: wanted,
            cq_entries,
            max_waits,
            cq_memory,
            doorbell_mode,
            wait_timeout,
        } = options;
        let entries = |depth: u32| cq_entries.unwrap_or(0).max(depth * 2).next_power_of_two();
        let entries = [wanted.send_depth, wanted.receive_depth].map(|depth| entries(depth.max(1)));
        let wanted = QpOptions { poll_doorbell: true, signal_all: true, ..wanted };
        let StreamQpParts { qp, cqs, tails, dbrec, doorbell } = match context.soft() {
            Some(_) => {
                create_soft_qp(context, pd, device, wanted, (entries, cq_memory, doorbell_mode))?
            }
            None => hardware::create_hardware_qp(context, pd, device, wanted, entries)?,
        };
        let [sends, receives] = cqs.each_ref().map(Cq::entries);
        let for_waits = u64::from(max_waits) * WORDS_LEN;
        let words = device.alloc_pinned(for_waits + u64::from(sends) * 4)?;
        words.host_bytes()?.fill(0, words.len(), &[0])?;
        let rung_words = (0..sends).map(|at| words.word32(for_waits + u64::from(at) * 4));
        let rung_words = rung_words.collect::<Result<_>>()?;
        let number = qp.number();
        let doorbells = DoorbellWords::new(number, dbrec, doorbell, rung_words);
        let waits = Waits::new(&words, max_waits, number)?;
        let state = State::new(waits, [sends, receives]);
        let device = device.clone();
        let shared = Arc::new(Shared::new(qp, cqs, tails, doorbells, device, wait_timeout, state));
        watchdog::monitor(&shared)?;
        Ok(Self(shared))
    }

    /// The queue pair number (QPN).
    pub fn number(&self) -> u32 {
        self.0.qp.number()
    }

    /// The underlying queue pair, for its state, path and counters. Post work through this type
    /// only.
    pub fn qp(&self) -> &Qp {
        &self.0.qp
    }

    /// The device whose streams drive the queue pair.
    pub fn device(&self) -> &mem::Device {
        &self.0.device
    }

    /// The connection data that the peer passes to [`connect`](Self::connect).
    pub fn endpoint(&self) -> QpEndpoint {
        self.0.qp.endpoint()
    }

    /// Connects the queue pair to the peer with this endpoint.
    pub fn connect(&self, peer: &QpEndpoint) -> Result<()> {
        self.0.qp.connect(peer)
    }

    /// Writes a request into the send queue without ringing the doorbell. The request always
    /// generates a completion, whatever its `signaled` flag.
    ///
    /// # Errors
    /// [`Kind::Busy`] if the queue is full: take completions with [`poll`](Self::poll) and let
    /// streams make progress. The [`failure`](Self::failure), if the queue pair has failed.
    pub fn prepare(&self, request: &SendRequest<'_>) -> Result<Prepared> {
        let ticket = self.0.prepare(&mut self.0.state.lock(), request)?;
        Ok(Prepared { shared: self.0.clone(), ticket, is_posted: false })
    }

    /// Prepares a request and posts it on a stream.
    pub fn queue<'s>(
        &self,
        stream: impl Into<StreamRef<'s>>,
        request: &SendRequest<'_>,
    ) -> Result<Ticket> {
        self.prepare(request)?.post(stream)
    }

    /// Prepares a request and posts it immediately from the CPU.
    pub fn post_now(&self, request: &SendRequest<'_>) -> Result<Ticket> {
        self.prepare(request)?.post_now()
    }

    /// Posts receives, all of them or none. Returns the ticket of the first; the others
    /// [follow](Ticket::after).
    pub fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<Ticket> {
        self.0.post_receive(requests)
    }

    /// Prepares a wait for the completion of a request or receive.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if there is no such request or receive; [`Kind::Busy`] if the
    /// maximum number of waits is in flight.
    pub fn prepare_wait(&self, ticket: Ticket) -> Result<PreparedWait> {
        let slot = self.0.prepare_wait(&mut self.0.state.lock(), ticket)?;
        let shared = self.0.clone();
        Ok(PreparedWait { shared, ticket, slot, is_next: false, is_posted: false })
    }

    /// Prepares a wait for the next receive in posting order. Each call takes the receive after
    /// that of the previous call, whether or not the CPU has polled its completion.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if that receive has not been posted: the stream might wait for
    /// ever.
    pub fn prepare_wait_receive(&self) -> Result<PreparedWait> {
        let (ticket, slot) = self.0.prepare_next(&mut self.0.state.lock())?;
        let shared = self.0.clone();
        Ok(PreparedWait { shared, ticket, slot, is_next: true, is_posted: false })
    }

    /// Blocks a stream until the request has completed or failed.
    ///
    /// # Errors
    /// Those of [`prepare_wait`](Self::prepare_wait) and [`PreparedWait::post`]; also
    /// [`Kind::InvalidArgument`] if the ticket is of a receive.
    pub fn wait_send<'s>(&self, stream: impl Into<StreamRef<'s>>, ticket: Ticket) -> Result<()> {
        ticket.check_send()?;
        self.wait_for(stream, ticket)
    }

    /// Blocks a stream until the request or receive has completed or failed.
    pub fn wait_for<'s>(&self, stream: impl Into<StreamRef<'s>>, ticket: Ticket) -> Result<()> {
        self.prepare_wait(ticket)?.post(stream).map(drop)
    }

    /// Blocks a stream until the next receive has completed or failed; returns its ticket.
    pub fn wait_receive<'s>(&self, stream: impl Into<StreamRef<'s>>) -> Result<Ticket> {
        self.prepare_wait_receive()?.post(stream)
    }

    /// Takes completions, those of requests before those of receives, each in order; returns the
    /// number of entries of `into` that were filled. Never blocks. Streams may still wait for
    /// completions that were taken.
    ///
    /// # Errors
    /// If the device has failed fatally.
    pub fn poll(&self, into: &mut [Completion]) -> Result<usize> {
        self.0.poll(into)
    }

    /// Returns the next completion, blocking up to `timeout`; `None` on timeout. Polls for 50 µs,
    /// then every 50 µs.
    pub fn wait_next(&self, timeout: Duration) -> Result<Option<Completion>> {
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

    /// Why the queue pair failed; `None` while it works.
    pub fn failure(&self) -> Option<Arc<Failure>> {
        self.0.failure()
    }

    /// Fails the queue pair: all posted work is flushed, and waiting streams resume.
    pub fn abort(&self) {
        self.0.end("the application aborted the queue pair");
    }
}

fn check(context: &Context, device: &mem::Device, options: &StreamQpOptions) -> Result<()> {
    let wrong = |why: String| {
        Error::new(Kind::InvalidArgument, "create a stream queue pair").on(device.label()).why(why)
    };
    device.capabilities().stream_mem_ops.require("ring doorbells from streams", device.info())?;
    if context.soft().is_some_and(|hca| !matches!(hca.progress_mode(), ProgressMode::Thread { .. }))
    {
        return Err(wrong(
            "no thread drives the context, and a stream's doorbell write wakes none".into(),
        )
        .fix("open the context with ProgressMode::Thread"));
    }
    if options.qp.service != Service::Rc || options.qp.srq.is_some() {
        return Err(wrong("stream queue pairs are RC with a receive queue of their own".into())
            .fix("use Service::Rc and no SRQ"));
    }
    if options.qp.memory.is_some() {
        return Err(wrong("the queues are allocated on that device".into())
            .fix("leave QpOptions::memory unset"));
    }
    if options.max_waits == 0 || options.max_waits > 1 << 20 {
        return Err(wrong(format!("{} waits is out of range", options.max_waits))
            .fix("ask for 1 to 1048576"));
    }
    if options.qp.send_depth.max(options.qp.receive_depth) > MAX_SEND_WQEBBS / 2 {
        return Err(wrong(format!("the queue depth would exceed {}", MAX_SEND_WQEBBS / 2))
            .fix("ask for a smaller depth"));
    }
    Ok(())
}

struct StreamQpParts {
    qp: Qp,
    cqs: [Cq; 2],
    tails: [CqeTails; 2],
    /// The doorbell record's send word.
    dbrec: Word,
    doorbell: Option<Word>,
}

/// Creates a queue pair of the software HCA, with its queues in pinned memory of the device.
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
    let layout = qp.soft_layout()?;
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

/// Limits the send queue to half of the doorbell record's 16-bit index range, so that an index is
/// distinct from that of the lap before.
fn check_blocks(blocks: u64, device: &mem::Device) -> Result<()> {
    if blocks <= u64::from(MAX_SEND_WQEBBS / 2) {
        return Ok(());
    }
    let why =
        format!("the send queue would have {blocks} WQEBBs, and may have {}", MAX_SEND_WQEBBS / 2);
    Err(Error::new(Kind::InvalidArgument, "create a stream queue pair")
        .on(device.label())
        .why(why)
        .fix("ask for a smaller depth, fewer SGEs or less inline data"))
}

/// A completion queue and the allocation that holds it.
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
