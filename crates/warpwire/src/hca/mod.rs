//! The software HCA: ConnectX queues in memory, RoCEv2 on a link.
//!
//! A CPU thread, a CUDA stream or a kernel fills mlx5 queues and rings a doorbell. The engine takes
//! WQEs from send queues, runs the transport protocol over a [`Link`], moves bytes between packets
//! and registered memory, and writes CQEs. The contents of queues and packets are never trusted:
//! invalid ones produce an error completion, or are counted and dropped.
//!
//! | type | what it is |
//! |---|---|
//! | [`Hca`] | the device: engine, registry, queues by number |
//! | [`QpSpec`], [`CqSpec`], [`SrqSpec`] | the memory and layout of queues |
//! | [`QueueMemory`] | host, pinned or device memory for queues |
//! | [`ProgressMode`] | which threads run the engine |
//! | [`EventFd`], [`AsyncEvent`] | wake-ups, and events outside completions |
//! | [`HcaStats`] | counters |
//! | [`publish`] | counters for other processes, through a Unix socket |
//!
//! This is the level of registers and bytes; programs use [`verbs`](crate::verbs).
//!
//! # A step of the engine
//! 1. Doorbells: WQEs are copied out of send queues and posted.
//! 2. Transmit: every queue pair with packets due sends a bounded number of them, in one batch.
//! 3. Receive: packets are dispatched to the state machines of their queue pairs, payload is
//!    placed, CQEs are written.
//! 4. Timers.
//!
//! Polling a CQ also advances the engine ([`Hca::poll`]), so no hand-off to another thread is
//! needed. A fallback thread advances it when nothing polls.

mod complete;
mod cq;
mod direct;
mod direct_peer;
mod doorbell_bitmap;
mod engine;
mod event;
mod held;
mod host;
mod memory;
mod numbers;
mod paths;
mod progress_mode;
mod protocol;
pub mod publish;
mod qpc;
mod read_ahead;
mod ring;
mod stats;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use warpwire_proto::Instant;
use warpwire_proto::qp::{self, QpAttributes, State};

pub use cq::{CQE_LEN, CqSpec};
pub use direct::{FastPath, FastWrite, PrefetchHint};
pub use engine::StepSummary;
pub use event::{AsyncEvent, EventFd};
pub(crate) use held::MAX_HELD_PAYLOAD;
pub use memory::QueueMemory;
pub use numbers::QpnSlot;
pub use progress_mode::ProgressMode;
pub use qpc::QpSpec;
pub use ring::QpLayout;
pub use stats::{DirectStats, DropReason, HcaStats, IndirectReason, QpTotals};

use crate::error::{Error, Kind, Result};
use crate::link::{self, Link};
use crate::mr::Registry;
use crate::sync::BiasedMutex;
use doorbell_bitmap::DoorbellBitmap;
use engine::{Clock, Engine, EngineOptions};
use event::AsyncEventQueue;
use numbers::{Numbering, qp_row};
use progress_mode::Waker;
use ring::{MAX_RECV_WQE_LEN, SharedReceiveQueue};

/// How to open a software HCA.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct HcaOptions {
    /// Which threads run the engine.
    pub progress_mode: ProgressMode,
    /// Whether peers on this machine may map registered memory and access it without packets, and
    /// this device theirs (direct access). Links that wrap others, such as fault injection, disable
    /// it. Default: true.
    pub direct: bool,
    /// Whether ACKs are sent in the step that received the request, as a NIC sends them, so before
    /// a thread that polls sees the completion. Default: false: the next step sends them, together
    /// with a reply that the program has posted by then.
    pub immediate_acks: bool,
    /// A slot that all numbers of queue pairs carry, for devices that share an IP address. The
    /// device then has at most 4096 queue pairs. Default: none, and at most 65 536.
    pub qpn_slot: Option<QpnSlot>,
}

setters! {
    HcaOptions {
        with_progress_mode => progress_mode: ProgressMode,
        with_direct => direct: bool,
        with_immediate_acks => immediate_acks: bool,
    } optional {
        with_qpn_slot => qpn_slot: QpnSlot,
    }
}

impl Default for HcaOptions {
    fn default() -> Self {
        Self {
            progress_mode: ProgressMode::default(),
            direct: true,
            immediate_acks: false,
            qpn_slot: None,
        }
    }
}

/// The memory and layout of a shared receive queue.
#[derive(Clone, Debug)]
pub struct SrqSpec {
    /// Memory of the queue: entries from offset 0, each linked to the next.
    pub memory: QueueMemory,
    /// Number of entries, a power of two.
    pub entries: u32,
    /// Bytes per entry, a power of two.
    pub stride: u32,
    /// Offset of the doorbell record: the producer counter.
    pub dbrec: u64,
}

/// A software HCA. Clones share the device; dropping the last one closes it.
#[derive(Clone)]
pub struct Hca(Arc<HcaInner>);

struct HcaInner {
    engine: BiasedMutex<Engine>,
    registry: Registry,
    async_events: Arc<AsyncEventQueue>,
    doorbell_bitmap: Arc<DoorbellBitmap>,
    waker: Arc<Waker>,
    clock: Clock,
    path: link::LinkPath,
    max_packet: usize,
    polled_doorbells: std::sync::atomic::AtomicU32,
    /// Whether any queue pair has a peer whose memory it may access directly.
    has_direct_peers: Arc<AtomicBool>,
    /// Our memory that peers may access directly.
    export_table: Option<Arc<link::ExportTable>>,
    numbering: Numbering,
    has_thread: bool,
    progress_mode: ProgressMode,
}

impl fmt::Debug for Hca {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hca({})", self.0.path)
    }
}

impl Drop for HcaInner {
    fn drop(&mut self) {
        self.waker.stop();
        self.engine.get_mut().end();
    }
}

/// How long closing a queue pair waits for a direct access of its peer, which takes some 100 µs
/// unless the peer is stopped. Only deregistration promises that none is in progress.
const DRAIN_LIMIT: Duration = Duration::from_millis(20);

impl HcaInner {
    /// Waits for the peer's direct access through a queue pair that accepts no more, outside the
    /// engine's lock.
    fn drain_peer(&self, qpn: u32) {
        if let Some(export_table) = &self.export_table
            && !export_table.wait_until_unused(qp_row(qpn) as usize, DRAIN_LIMIT)
        {
            tracing::debug!(qpn, "a peer that does not run is still accessing memory");
        }
    }

    fn now(&self) -> Instant {
        self.clock.now()
    }

    fn step(&self) -> Result<StepSummary> {
        let mut engine = self.engine.lock();
        engine.core.totals.steps += 1;
        engine.step(self.now())
    }

    /// How long the engine's thread may sleep: until the next deadline, at most `limit`, or
    /// `polling_limit` if doorbells are polled.
    fn sleep_duration(&self, polling_limit: Duration, limit: Duration) -> Duration {
        let mut engine = self.engine.lock();
        engine.core.direct_peers.sweep();
        // Asking for the descriptor arms links that signal only on request.
        let _ = engine.link().wait_fd();
        let now = self.now();
        let limit = match self.polled_doorbells.load(Ordering::Relaxed) {
            0 => limit,
            _ => polling_limit,
        };
        (engine.next_deadline(now) - now).min(limit)
    }
}

impl Hca {
    /// Opens a device on a link.
    pub fn open(link: impl Link + 'static, options: HcaOptions) -> Result<Self> {
        let shared = Self::start(link, options)?;
        publish::add(Arc::downgrade(&shared));
        Ok(Self(shared))
    }

    fn start(mut link: impl Link + 'static, options: HcaOptions) -> Result<Arc<HcaInner>> {
        let registry = Registry::new();
        let export_table = match options.direct {
            true => export_table(&mut link, &registry),
            false => Err("disabled by option"),
        };
        let (mut path, max_packet) = (link.path(), link.max_packet());
        path.why += &match &export_table {
            Ok(_) => "; direct access: on where memory can be mapped".to_owned(),
            Err(why) => format!("; direct access: off ({why})"),
        };
        let async_events = Arc::new(AsyncEventQueue::new()?);
        let doorbell_bitmap = Arc::new(DoorbellBitmap::new());
        let manual_progress = options.progress_mode == ProgressMode::Manual;
        let clock = Clock::start();
        let numbering = Numbering::random(options.qpn_slot);
        let engine_options = EngineOptions {
            acks_immediately: options.immediate_acks || manual_progress,
            numbering,
        };
        let engine = Engine::new(
            Box::new(link),
            registry.clone(),
            async_events.clone(),
            doorbell_bitmap.clone(),
            engine_options,
            clock,
            export_table,
        );
        let has_direct_peers = engine.core.has_direct_peers.clone();
        let export_table = engine.core.export_table.as_ref().ok().cloned();
        let shared = Arc::new(HcaInner {
            engine: match options.progress_mode {
                ProgressMode::Thread { .. } => BiasedMutex::unbiased(engine),
                ProgressMode::Auto | ProgressMode::Manual => BiasedMutex::new(engine),
            },
            registry,
            async_events,
            doorbell_bitmap,
            waker: Arc::new(Waker::new()?),
            clock,
            path,
            max_packet,
            polled_doorbells: 0.into(),
            has_direct_peers,
            export_table,
            numbering,
            has_thread: options.progress_mode != ProgressMode::Manual,
            progress_mode: options.progress_mode,
        });
        progress_mode::start(&shared, options.progress_mode)?;
        Ok(shared)
    }

    /// The memory registrations of this device.
    pub fn registry(&self) -> &Registry {
        &self.0.registry
    }

    /// The link, and why it was chosen.
    pub fn path(&self) -> &link::LinkPath {
        &self.0.path
    }

    /// The maximum payload of a packet on the link, in bytes.
    pub fn max_payload(&self) -> usize {
        self.0.max_packet.saturating_sub(engine::MAX_PACKET_OVERHEAD)
    }

    /// Whether both handles refer to one device.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether a thread advances the engine while nothing polls, so that a program may block until
    /// it is woken. False in [`ProgressMode::Manual`].
    pub fn supports_blocking_wait(&self) -> bool {
        self.0.has_thread
    }

    /// Which threads run the engine.
    pub fn progress_mode(&self) -> ProgressMode {
        self.0.progress_mode
    }

    /// Advances the engine by one step, unless another thread is doing so.
    ///
    /// # Errors
    /// If the link has failed permanently.
    #[inline]
    pub fn poll(&self) -> Result<StepSummary> {
        let steps = &self.0.waker.poller_steps;
        let Some(mut engine) = self.0.engine.try_lock() else {
            steps.fetch_add(1, Ordering::Relaxed);
            return Ok(StepSummary::default());
        };
        // Observers look only for a change, so an increment lost to a thread that did not get the
        // lock does no harm.
        steps.store(steps.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        engine.core.totals.steps += 1;
        let progress = engine.step(self.0.now());
        self.0.waker.on_poller_step();
        progress
    }

    /// Creates a completion queue; returns its number.
    ///
    /// # Errors
    /// If a size is not a power of two, or the memory is too small.
    pub fn create_cq(&self, spec: CqSpec) -> Result<u32> {
        check_power_of_two(spec.entries, "completion queue entries")?;
        check_fits(&spec.memory, u64::from(spec.entries) * CQE_LEN, "the completion queue")?;
        check_fits(&spec.memory, spec.dbrec.saturating_add(8), "its doorbell record")?;
        self.0.engine.lock().add_cq(spec)
    }

    /// Continues a completion queue in larger memory: `entries` CQEs, a power of two, all empty,
    /// and the doorbell record behind them. CQEs from number `consumed` on are copied. The caller
    /// holds off the queue's readers.
    ///
    /// # Errors
    /// If the queue does not exist, or the memory is too small.
    pub(crate) fn resize_cq(
        &self,
        cqn: u32,
        memory: QueueMemory,
        entries: u32,
        consumed: u64,
    ) -> Result<()> {
        check_power_of_two(entries, "completion queue entries")?;
        check_fits(&memory, u64::from(entries) * CQE_LEN + 8, "the completion queue")?;
        match self.0.engine.lock().core.cqs.get_mut(cqn as usize) {
            Some(Some(cq)) => cq.resize(memory, entries, consumed),
            _ => Err(invalid("the completion queue", "one that exists")),
        }
    }

    /// How many completions a queue has received since it was created.
    pub(crate) fn cq_produced(&self, cqn: u32) -> u64 {
        let engine = self.0.engine.lock();
        engine.core.cqs.get(cqn as usize).and_then(Option::as_ref).map_or(0, |cq| cq.produced())
    }

    /// Destroys a completion queue; further completions for it are dropped.
    pub fn destroy_cq(&self, cqn: u32) {
        if let Some(slot) = self.0.engine.lock().core.cqs.get_mut(cqn as usize) {
            *slot = None;
        }
    }

    /// Creates a shared receive queue; returns its number.
    ///
    /// # Errors
    /// If a size is not a power of two or out of range, or the memory is too small.
    pub fn create_srq(&self, spec: SrqSpec) -> Result<u32> {
        check_power_of_two(spec.entries, "shared receive queue entries")?;
        check_stride(spec.stride, 32, MAX_RECV_WQE_LEN as u32 * 2)?;
        let bytes = u64::from(spec.entries) * u64::from(spec.stride);
        check_fits(&spec.memory, bytes, "the shared receive queue")?;
        check_fits(&spec.memory, spec.dbrec.saturating_add(4), "its doorbell record")?;
        let ring = SharedReceiveQueue::new(spec.memory, spec.dbrec, spec.entries, spec.stride);
        self.0.engine.lock().add_srq(ring)
    }

    /// Requests one [`AsyncEvent::LimitReached`] when fewer than `limit` receives are posted; 0
    /// disarms.
    pub fn arm_srq(&self, srqn: u32, limit: u32) {
        self.0.engine.lock().set_limit(srqn, limit);
    }

    /// The limit that a shared receive queue is armed with; 0 if it is not armed.
    pub fn srq_limit(&self, srqn: u32) -> u32 {
        self.0.engine.lock().limit(srqn)
    }

    /// Destroys a shared receive queue.
    pub fn destroy_srq(&self, srqn: u32) {
        if let Some(slot) = self.0.engine.lock().core.srqs.get_mut(srqn as usize) {
            *slot = None;
        }
    }

    /// Creates a queue pair in the state `RESET`; returns its number.
    ///
    /// # Errors
    /// If a size or an alignment is invalid, the memory is too small, the datagram MTU exceeds the
    /// link's packets, or no number is free.
    pub fn create_qp(&self, spec: QpSpec) -> Result<u32> {
        check_power_of_two(spec.send_wqebbs, "send queue WQEBBs")?;
        if spec.send_wqebbs > crate::mlx5::MAX_SEND_WQEBBS {
            return Err(invalid("send queue WQEBBs", "at most 32768"));
        }
        let QpLayout { receive, send, dbrec, doorbell } = spec.layout;
        let send_end = send.saturating_add(u64::from(spec.send_wqebbs) * 64);
        check_fits(&spec.memory, send_end, "the send queue")?;
        check_fits(&spec.memory, dbrec.saturating_add(8), "the doorbell record")?;
        check_fits(&spec.memory, doorbell.saturating_add(264), "the doorbell")?;
        if dbrec % 8 != 0 || doorbell % 8 != 0 {
            return Err(invalid("the doorbell and its record", "aligned to 8 bytes"));
        }
        if spec.srq.is_none() {
            check_power_of_two(spec.receive_entries, "receive queue entries")?;
            check_stride(spec.receive_stride, 16, MAX_RECV_WQE_LEN as u32)?;
            let bytes = u64::from(spec.receive_entries) * u64::from(spec.receive_stride);
            check_fits(&spec.memory, receive.saturating_add(bytes), "the receive queue")?;
        }
        if let Some(mtu) = spec.datagrams
            && mtu.bytes() as usize > self.max_payload()
        {
            let max = format!("at most {}, the maximum of the link", self.max_payload());
            return Err(invalid("the datagram MTU", &max));
        }
        let poll_doorbell = spec.poll_doorbell;
        let number = self.0.engine.lock().add_qp(spec)?;
        if poll_doorbell {
            self.0.polled_doorbells.fetch_add(1, Ordering::Relaxed);
            self.0.waker.wake();
        }
        Ok(number)
    }

    /// Prepares to send datagrams to `peer`, so that WQEs may name it. Slow: for setup only. Every
    /// call needs a [`close_destination`](Self::close_destination).
    ///
    /// # Errors
    /// If the address cannot be reached from here, with the reason.
    pub fn open_destination(&self, peer: SocketAddr) -> Result<()> {
        self.0.engine.lock().open_destination(peer)
    }

    /// Undoes one [`open_destination`](Self::open_destination). Datagrams to a peer that is not
    /// open fail.
    pub fn close_destination(&self, peer: SocketAddr) {
        self.0.engine.lock().close_destination(peer);
    }

    /// Destroys a queue pair, after its pending ACKs were sent: once this returns, nothing of it is
    /// sent, received or completed.
    pub fn destroy_qp(&self, qpn: u32) {
        let now = self.0.now();
        {
            let mut engine = self.0.engine.lock();
            if engine.qpc(qpn).is_ok_and(|qpc| qpc.poll_doorbell) {
                self.0.polled_doorbells.fetch_sub(1, Ordering::Relaxed);
            }
            engine.remove_qp(qpn, now);
        }
        self.0.drain_peer(qpn);
    }

    /// Changes the state or the attributes of a queue pair. A rejected change has no effect.
    pub fn modify_qp(&self, qpn: u32, change: &QpAttributes) -> Result<()> {
        let now = self.0.now();
        self.0.engine.lock().modify(qpn, change, now)?;
        self.0.waker.wake();
        if matches!(change.to, State::Reset | State::Err) {
            self.0.drain_peer(qpn);
        }
        Ok(())
    }

    /// The state of a queue pair.
    pub fn qp_state(&self, qpn: u32) -> Result<State> {
        Ok(self.0.engine.lock().qpc(qpn)?.qp.state())
    }

    /// The counters of a queue pair.
    pub fn qp_stats(&self, qpn: u32) -> Result<qp::Stats> {
        Ok(*self.0.engine.lock().qpc(qpn)?.qp.stats())
    }

    /// Why the last key or range of a queue pair was denied, if one was.
    pub fn qp_denied(&self, qpn: u32) -> Option<crate::mr::AccessDenied> {
        self.0.engine.lock().qpc(qpn).ok()?.qp_memory.denied
    }

    /// A guard through which RDMA writes are executed inline (fast path) into a peer's mapped
    /// memory, as if they had been posted and their doorbell rung. `None` if there is no such peer,
    /// or another thread is running the engine.
    #[inline]
    pub fn fast_path(&self, qpn: u32) -> Option<FastPath<'_>> {
        if !self.0.has_direct_peers.load(Ordering::Relaxed) {
            return None;
        }
        let engine = self.0.engine.try_lock()?;
        Some(FastPath { engine, index: self.0.numbering.index(qpn), budget: direct::QUANTUM })
    }

    /// To be called by a poller before it blocks on a completion: the fallback thread takes over
    /// the engine immediately.
    pub fn wake_fallback(&self) {
        self.0.waker.wake_fallback();
    }

    /// Notifies the engine that a doorbell was rung. A doorbell rung without this call is seen only
    /// on queue pairs with [`QpSpec::poll_doorbell`].
    #[inline]
    pub fn ring(&self, qpn: u32) {
        let index = self.0.numbering.index(qpn);
        // Where a peer's memory is mapped, the poster executes most work itself if no other thread
        // is running the engine. It drains leftovers of earlier posts too: the inline fast path
        // requires an empty send queue.
        let quanta = if self.0.has_direct_peers.load(Ordering::Relaxed) {
            direct::MAX_POSTER_QUANTA
        } else {
            0
        };
        for _ in 0..quanta {
            match self.0.engine.try_lock().map(|mut engine| engine.core.execute_posted(index)) {
                Some(direct::Remaining::Nothing) => return,
                Some(direct::Remaining::MoreQuanta) => {}
                Some(direct::Remaining::NeedsEngine) | None => break,
            }
        }
        self.0.doorbell_bitmap.ring(index);
        self.0.waker.wake();
    }

    /// Takes the oldest pending asynchronous event.
    pub fn next_event(&self) -> Option<AsyncEvent> {
        self.0.async_events.take()
    }

    /// Readable while asynchronous events are pending.
    pub fn events(&self) -> &EventFd {
        &self.0.async_events.signal
    }

    /// The counters of the device since it was opened.
    pub fn stats(&self) -> HcaStats {
        let engine = self.0.engine.lock();
        let mut stats = HcaStats::of(&engine.core.totals, engine.qpcs().map(|qpc| qpc.qp.stats()));
        if let Ok(export_table) = &engine.core.export_table {
            [stats.direct.by_peers, stats.direct.bytes_by_peers] = export_table.access_counts();
        }
        stats
    }

    /// The path that a queue pair's work takes, and why: its link, and whether direct access is
    /// possible.
    pub fn qp_path(&self, qpn: u32) -> Result<link::LinkPath> {
        self.0.engine.lock().qp_path(qpn)
    }

    /// The counters of the link.
    pub fn link_counters(&self) -> link::Counters {
        self.0.engine.lock().link().counters()
    }
}

/// Exports registered memory to peers, if the link can; or the reason why it cannot.
fn export_table(
    link: &mut impl Link,
    registry: &Registry,
) -> std::result::Result<Arc<link::ExportTable>, &'static str> {
    let files = registry.clone();
    let export_table = link::ExportTable::new(Box::new(move |key| files.file_for_key(key)))
        .map_err(|why| {
            tracing::debug!(%why, "direct access is off");
            "the export table could not be allocated"
        })?;
    link.install_exports(&export_table)?;
    registry.observer(Arc::new(direct::ExportPublisher(Arc::downgrade(&export_table))));
    Ok(export_table)
}

fn invalid(what: &str, must_be: &str) -> Error {
    Error::new(Kind::InvalidArgument, "create a queue").why(format!("{what} must be {must_be}"))
}

fn check_power_of_two(count: u32, what: &str) -> Result<()> {
    if count.is_power_of_two() { Ok(()) } else { Err(invalid(what, "a power of two")) }
}

fn check_stride(stride: u32, min: u32, max: u32) -> Result<()> {
    if stride.is_power_of_two() && (min..=max).contains(&stride) {
        return Ok(());
    }
    Err(invalid("the entry stride", &format!("a power of two from {min} to {max}")))
}

fn check_fits(memory: &QueueMemory, end: u64, what: &str) -> Result<()> {
    if end <= memory.bytes().len() {
        return Ok(());
    }
    let why = format!("{what} ends at byte {end}, the memory at {}", memory.bytes().len());
    Err(Error::new(Kind::OutOfRange, "create a queue").why(why).fix("provide more memory"))
}
