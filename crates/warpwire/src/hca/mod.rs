//! The software HCA: ConnectX's queues in memory, RoCEv2 on a link.
//!
//! Whoever fills mlx5 queues and rings a doorbell drives it: a CPU thread, a CUDA stream, a kernel. It takes entries
//! from send queues, runs the protocol over a [`Link`], moves bytes between packets and registered memory, and
//! writes completions. What it finds in queues and packets is never trusted: it gives an error completion or is
//! counted and dropped.
//!
//! | type | what it is |
//! |---|---|
//! | [`Hca`] | the device: engine, registry, queues by number |
//! | [`QpSpec`], [`CqSpec`], [`SrqSpec`] | what queues are made of: memory and where things lie in it |
//! | [`QueueMemory`] | host, pinned or device memory for them |
//! | [`ProgressMode`] | who runs the engine |
//! | [`EventFd`], [`AsyncEvent`] | how sleepers are woken, and what befalls queues beside completions |
//! | [`Stats`] | what it has counted |
//! | [`publish`] | the same, for other processes to see |
//!
//! This is the level of registers and bytes; [`verbs`](crate::verbs) is the one for programs.
//!
//! # A step
//! 1. doorbells: entries are copied out of send queues and posted;
//! 2. timers;
//! 3. packets that are due, each queue pair a few in its turn, in one batch;
//! 4. packets that came in: sorted by queue pair, handed to its state machine, payload placed, completions written.
//!
//! Who polls a completion queue makes steps himself ([`Hca::poll`]), so that no thread stands in between; a guard
//! steps in when nobody polls.

mod complete;
mod cq;
mod direct;
mod direct_peer;
mod doorbell_bitmap;
mod engine;
mod event;
mod host;
mod memory;
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
use std::time::{Duration, Instant as Clock};

use warpwire_proto::Instant;
use warpwire_proto::qp::{self, QpAttributes, State};

pub use cq::{CQE_LEN, CqSpec};
pub use direct::{FastPath, FastWrite, PrefetchHint};
pub use engine::StepSummary;
pub use event::{AsyncEvent, EventFd};
pub use memory::QueueMemory;
pub use progress_mode::ProgressMode;
pub use qpc::QpSpec;
pub use ring::QpLayout;
pub use stats::{DirectStats, DropReason, IndirectReason, QpTotals, Stats};

use crate::error::{Error, Kind, Result};
use crate::link::{self, Link};
use crate::mr::Registry;
use crate::sync::BiasedMutex;
use doorbell_bitmap::DoorbellBitmap;
use engine::Engine;
use event::AsyncEventQueue;
use progress_mode::Waker;
use ring::{MAX_RECV_WQE_LEN, SharedReceiveQueue};

/// How a software HCA is opened.
#[derive(Clone, Copy, Debug)]
pub struct HcaOptions {
    /// Who drives it.
    pub progress_mode: ProgressMode,
    /// Whether peers of this machine may map registered memory and work in it without packets, and this device in
    /// theirs. Links that wrap others switch it off by themselves.
    pub direct: bool,
}

impl Default for HcaOptions {
    fn default() -> Self {
        Self { progress_mode: ProgressMode::default(), direct: true }
    }
}

/// What a shared receive queue is made of.
#[derive(Clone, Debug)]
pub struct SrqSpec {
    /// Its memory: entries from the beginning on, each linked to the next.
    pub memory: QueueMemory,
    /// How many: a power of two.
    pub entries: u32,
    /// How long each is: a power of two.
    pub stride: u32,
    /// Where the word lies that counts what was posted.
    pub dbrec: u64,
}

/// A software HCA. Clones are the same one; it ends with the last.
#[derive(Clone)]
pub struct Hca(Arc<HcaInner>);

struct HcaInner {
    engine: BiasedMutex<Engine>,
    registry: Registry,
    async_events: Arc<AsyncEventQueue>,
    doorbell_bitmap: Arc<DoorbellBitmap>,
    waker: Arc<Waker>,
    start: Clock,
    path: link::LinkPath,
    max_packet: usize,
    polled_doorbells: std::sync::atomic::AtomicU32,
    /// Some queue pair has a peer whose memory it may reach by itself.
    has_direct_peers: Arc<AtomicBool>,
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

impl HcaInner {
    fn now(&self) -> Instant {
        Instant::from_nanos(self.start.elapsed().as_nanos() as u64)
    }

    fn step(&self) -> Result<StepSummary> {
        let mut engine = self.engine.lock();
        engine.core.totals.steps += 1;
        engine.step(self.now())
    }

    /// How long the engine may sleep.
    fn sleep_duration(&self, polling_limit: Duration, limit: Duration) -> Duration {
        let mut engine = self.engine.lock();
        engine.core.direct_peers.sweep();
        // Asking arms links that signal only on request.
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
            false => Err("switched off"),
        };
        let (mut path, max_packet) = (link.path(), link.max_packet());
        path.why += &match &export_table {
            Ok(_) => "; direct where peers and we can map each other's memory".to_owned(),
            Err(why) => format!("; packets only: {why}"),
        };
        let async_events = Arc::new(AsyncEventQueue::new()?);
        let doorbell_bitmap = Arc::new(DoorbellBitmap::new());
        let manual_progress = options.progress_mode == ProgressMode::Manual;
        let engine = Engine::new(
            Box::new(link),
            registry.clone(),
            async_events.clone(),
            doorbell_bitmap.clone(),
            manual_progress,
            export_table,
        );
        let has_direct_peers = engine.core.has_direct_peers.clone();
        let shared = Arc::new(HcaInner {
            engine: match options.progress_mode {
                ProgressMode::Thread { .. } => BiasedMutex::unbiased(engine),
                ProgressMode::Auto | ProgressMode::Manual => BiasedMutex::new(engine),
            },
            registry,
            async_events,
            doorbell_bitmap,
            waker: Arc::new(Waker::new()?),
            start: Clock::now(),
            path,
            max_packet,
            polled_doorbells: 0.into(),
            has_direct_peers,
            has_thread: options.progress_mode != ProgressMode::Manual,
            progress_mode: options.progress_mode,
        });
        progress_mode::start(&shared, options.progress_mode)?;
        Ok(shared)
    }

    /// A device that is on no network, which nobody drives and nobody is told of.
    pub(crate) fn placeholder() -> Result<Self> {
        let unspecified = SocketAddr::from(([0, 0, 0, 0], 0));
        let link = link::Hub::new().endpoint(unspecified)?;
        let options = HcaOptions { progress_mode: ProgressMode::Manual, direct: false };
        Ok(Self(Self::start(link, options)?))
    }

    /// The registrations of this device.
    pub fn registry(&self) -> &Registry {
        &self.0.registry
    }

    /// The link that it uses, and why.
    pub fn path(&self) -> &link::LinkPath {
        &self.0.path
    }

    /// The most payload that a packet on its link has room for.
    pub fn max_payload(&self) -> usize {
        self.0.max_packet.saturating_sub(engine::MAX_PACKET_OVERHEAD)
    }

    /// Whether both are one device.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether a thread works on when nobody polls: then a program may sleep until it is woken.
    pub fn supports_blocking_wait(&self) -> bool {
        self.0.has_thread
    }

    /// Who drives it.
    pub fn progress_mode(&self) -> ProgressMode {
        self.0.progress_mode
    }

    /// Makes a step, unless somebody else is making one.
    ///
    /// # Errors
    /// If the link is beyond repair.
    #[inline]
    pub fn poll(&self) -> Result<StepSummary> {
        let steps = &self.0.waker.poller_steps;
        let Some(mut engine) = self.0.engine.try_lock() else {
            steps.fetch_add(1, Ordering::Relaxed);
            return Ok(StepSummary::default());
        };
        // A change is all that anybody looks for: one that is lost to those who did not get in is no loss.
        steps.store(steps.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        engine.core.totals.steps += 1;
        let progress = engine.step(self.0.now());
        self.0.waker.on_poller_step();
        progress
    }

    /// Makes a completion queue; returns its number.
    pub fn create_cq(&self, spec: CqSpec) -> Result<u32> {
        check_power_of_two(spec.entries, "completion queue entries")?;
        check_fits(&spec.memory, u64::from(spec.entries) * CQE_LEN, "the completion queue")?;
        check_fits(&spec.memory, spec.dbrec.saturating_add(8), "the completion queue's record")?;
        self.0.engine.lock().add_cq(spec)
    }

    /// Ends a completion queue; what would go there is lost.
    pub fn destroy_cq(&self, cqn: u32) {
        if let Some(place) = self.0.engine.lock().core.cqs.get_mut(cqn as usize) {
            *place = None;
        }
    }

    /// Makes a shared receive queue; returns its number.
    pub fn create_srq(&self, spec: SrqSpec) -> Result<u32> {
        check_power_of_two(spec.entries, "shared receive queue entries")?;
        check_stride(spec.stride, 32, MAX_RECV_WQE_LEN as u32 * 2)?;
        let bytes = u64::from(spec.entries) * u64::from(spec.stride);
        check_fits(&spec.memory, bytes, "the shared receive queue")?;
        check_fits(&spec.memory, spec.dbrec.saturating_add(4), "its record")?;
        let ring = SharedReceiveQueue::new(spec.memory, spec.dbrec, spec.entries, spec.stride);
        self.0.engine.lock().add_srq(ring)
    }

    /// Asks for [`AsyncEvent::LimitReached`], once, when fewer than `limit` receives wait; 0 asks for none.
    pub fn arm_srq(&self, srqn: u32, limit: u32) {
        self.0.engine.lock().set_limit(srqn, limit);
    }

    /// Ends a shared receive queue.
    pub fn destroy_srq(&self, srqn: u32) {
        if let Some(place) = self.0.engine.lock().core.srqs.get_mut(srqn as usize) {
            *place = None;
        }
    }

    /// Makes a queue pair, in `RESET`; returns its number.
    pub fn create_qp(&self, spec: QpSpec) -> Result<u32> {
        check_power_of_two(spec.send_wqebbs, "send queue blocks")?;
        if spec.send_wqebbs > crate::mlx5::MAX_SEND_WQEBBS {
            return Err(invalid("send queue blocks", "32768 at most"));
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
            let max = format!("at most {}, which is what the link carries", self.max_payload());
            return Err(invalid("the length of datagrams", &max));
        }
        let poll_doorbell = spec.poll_doorbell;
        let number = self.0.engine.lock().add_qp(spec)?;
        if poll_doorbell {
            self.0.polled_doorbells.fetch_add(1, Ordering::Relaxed);
            self.0.waker.wake();
        }
        Ok(number)
    }

    /// Makes ready to send datagrams to that peer: entries may name it from now on. Slow, for setup; closed as often as
    /// it was opened.
    ///
    /// # Errors
    /// If nothing can be sent to this address from here, with the reason.
    pub fn open_destination(&self, peer: SocketAddr) -> Result<()> {
        self.0.engine.lock().open_destination(peer)
    }

    /// Ends what [`open_destination`](Self::open_destination) began. Datagrams to a peer that nobody has opened fail.
    pub fn close_destination(&self, peer: SocketAddr) {
        self.0.engine.lock().close_destination(peer);
    }

    /// Ends a queue pair: nothing of it is sent, received or completed any more when this returns.
    pub fn destroy_qp(&self, qpn: u32) {
        let mut engine = self.0.engine.lock();
        if engine.qpc(qpn).is_ok_and(|qpc| qpc.poll_doorbell) {
            self.0.polled_doorbells.fetch_sub(1, Ordering::Relaxed);
        }
        engine.remove_qp(qpn);
    }

    /// Takes a queue pair a step further, or changes its attributes; what is refused changes nothing.
    pub fn modify_qp(&self, qpn: u32, change: &QpAttributes) -> Result<()> {
        let now = self.0.now();
        self.0.engine.lock().modify(qpn, change, now)?;
        self.0.waker.wake();
        Ok(())
    }

    /// The state of a queue pair.
    pub fn qp_state(&self, qpn: u32) -> Result<State> {
        Ok(self.0.engine.lock().qpc(qpn)?.qp.state())
    }

    /// What a queue pair has counted.
    pub fn qp_stats(&self, qpn: u32) -> Result<qp::Stats> {
        Ok(*self.0.engine.lock().qpc(qpn)?.qp.stats())
    }

    /// Why the last key or range of a queue pair was denied, if one was.
    pub fn qp_denied(&self, qpn: u32) -> Option<crate::mr::AccessDenied> {
        self.0.engine.lock().qpc(qpn).ok()?.qp_memory.denied
    }

    /// A way to have writes done here and now that a peer's memory takes without packets, as if they had been posted and
    /// their doorbell rung: only if there is such a peer, and nobody else makes a step.
    #[inline]
    pub fn fast_path(&self, qpn: u32) -> Option<FastPath<'_>> {
        if !self.0.has_direct_peers.load(Ordering::Relaxed) {
            return None;
        }
        let engine = self.0.engine.try_lock()?;
        Some(FastPath { engine, index: engine::qpn_to_index(qpn), budget: direct::QUANTUM })
    }

    /// To be called by who is about to sleep until something completes: whoever drives the engine otherwise does so at once.
    pub fn wake_fallback(&self) {
        self.0.waker.wake_fallback();
    }

    /// Tells the engine that a doorbell was rung. Rings that nobody tells of are seen only on queue pairs that are
    /// [watched](QpSpec::watched).
    #[inline]
    pub fn ring(&self, qpn: u32) {
        let index = engine::qpn_to_index(qpn);
        // Where a peer's memory is mapped, most work can be done here and now, if nobody else makes a step. What is left from
        // the last time is done with it: a queue that is never empty takes no writes at once, though they cost much less.
        let turns = if self.0.has_direct_peers.load(Ordering::Relaxed) {
            direct::MAX_POSTER_QUANTA
        } else {
            0
        };
        for _ in 0..turns {
            match self.0.engine.try_lock().map(|mut engine| engine.core.execute_posted(index)) {
                Some(direct::Remaining::Nothing) => return,
                Some(direct::Remaining::MoreQuanta) => {}
                Some(direct::Remaining::NeedsEngine) | None => break,
            }
        }
        self.0.doorbell_bitmap.ring(index);
        self.0.waker.wake();
    }

    /// The oldest news that nobody has taken.
    pub fn next_event(&self) -> Option<AsyncEvent> {
        self.0.async_events.take()
    }

    /// Raised while there is news.
    pub fn events(&self) -> &EventFd {
        &self.0.async_events.signal
    }

    /// What it has counted.
    pub fn stats(&self) -> Stats {
        let engine = self.0.engine.lock();
        let mut stats = Stats::of(&engine.core.totals, engine.qpcs().map(|qpc| qpc.qp.stats()));
        if let Ok(export_table) = &engine.core.export_table {
            [stats.direct.by_peers, stats.direct.bytes_by_peers] = export_table.access_counts();
        }
        stats
    }

    /// Which way a queue pair's work takes, and why: its link, and whether it needs packets.
    pub fn qp_path(&self, qpn: u32) -> Result<link::LinkPath> {
        self.0.engine.lock().qp_path(qpn)
    }

    /// What its link has counted.
    pub fn link_counters(&self) -> link::Counters {
        self.0.engine.lock().link().counters()
    }
}

/// Offers registered memory to peers, if the link can; or says why it cannot.
fn export_table(
    link: &mut impl Link,
    registry: &Registry,
) -> std::result::Result<Arc<link::ExportTable>, &'static str> {
    let files = registry.clone();
    let export_table = link::ExportTable::new(Box::new(move |key| files.file_for_key(key)))
        .map_err(|why| {
            tracing::debug!(%why, "peers need packets");
            "this process has no memory for the table of what peers may reach"
        })?;
    link.install_exports(&export_table)?;
    registry.observer(Arc::new(direct::ExportPublisher(Arc::downgrade(&export_table))));
    Ok(export_table)
}

fn invalid(what: &str, must_be: &str) -> Error {
    Error::new(Kind::InvalidArgument, "make a queue").why(format!("{what} must be {must_be}"))
}

fn check_power_of_two(count: u32, what: &str) -> Result<()> {
    if count.is_power_of_two() { Ok(()) } else { Err(invalid(what, "a power of two")) }
}

fn check_stride(stride: u32, min: u32, max: u32) -> Result<()> {
    if stride.is_power_of_two() && (min..=max).contains(&stride) {
        return Ok(());
    }
    Err(invalid("the length of an entry", &format!("a power of two from {min} to {max}")))
}

fn check_fits(memory: &QueueMemory, end: u64, what: &str) -> Result<()> {
    if end <= memory.bytes().len() {
        return Ok(());
    }
    let why = format!("{what} ends at byte {end} of memory with {}", memory.bytes().len());
    Err(Error::new(Kind::OutOfRange, "make a queue").why(why).fix("give it more memory"))
}
