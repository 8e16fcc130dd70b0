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
//! | [`Drive`] | who runs the engine |
//! | [`Signal`], [`AsyncEvent`] | how sleepers are woken, and what befalls queues beside completions |
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

mod ahead;
mod complete;
mod cq;
mod direct;
mod drive;
mod engine;
mod event;
mod host;
mod memory;
mod pair;
mod partner;
mod protocol;
pub mod publish;
mod ring;
mod rung;
mod stats;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant as Clock};

use warpwire_proto::Instant;
use warpwire_proto::qp::{self, Change, State};

pub use cq::{CQE_LEN, CqSpec};
pub use direct::{Aim, AtOnce, Express};
pub use drive::Drive;
pub use engine::Progress;
pub use event::{AsyncEvent, Signal};
pub use memory::QueueMemory;
pub use pair::QpSpec;
pub use ring::Layout;
pub use stats::{Direct, Indirect, Lost, Stats, Sum};

use crate::error::{Error, Kind, Result};
use crate::link::{self, Link};
use crate::mr::Registry;
use crate::sync::Biased;
use drive::Sleeper;
use engine::Engine;
use event::News;
use ring::{LONGEST_RECEIVE, SharedRing};
use rung::Rung;

/// How a software HCA is opened.
#[derive(Clone, Copy, Debug)]
pub struct HcaOptions {
    /// Who drives it.
    pub drive: Drive,
    /// Whether peers of this machine may map registered memory and work in it without packets, and this device in
    /// theirs. Links that wrap others switch it off by themselves.
    pub direct: bool,
}

impl Default for HcaOptions {
    fn default() -> Self {
        Self { drive: Drive::default(), direct: true }
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
    pub record: u64,
}

/// A software HCA. Clones are the same one; it ends with the last.
#[derive(Clone)]
pub struct Hca(Arc<Shared>);

struct Shared {
    engine: Biased<Engine>,
    registry: Registry,
    news: Arc<News>,
    rung: Arc<Rung>,
    sleeper: Arc<Sleeper>,
    start: Clock,
    path: link::Path,
    largest: usize,
    watches: std::sync::atomic::AtomicU32,
    /// Some queue pair has a peer whose memory it may reach by itself.
    reaches: Arc<AtomicBool>,
    has_thread: bool,
    drive: Drive,
}

impl fmt::Debug for Hca {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hca({})", self.0.path)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        self.sleeper.stop();
        self.engine.get_mut().end();
    }
}

impl Shared {
    fn now(&self) -> Instant {
        Instant::from_nanos(self.start.elapsed().as_nanos() as u64)
    }

    fn step(&self) -> Result<Progress> {
        let mut engine = self.engine.lock();
        engine.core.totals.steps += 1;
        engine.step(self.now())
    }

    /// How long the engine may sleep.
    fn time_to_sleep(&self, watching: Duration, longest: Duration) -> Duration {
        let mut engine = self.engine.lock();
        engine.core.partners.sweep();
        // Asking arms links that signal only on request.
        let _ = engine.link().wait_fd();
        let now = self.now();
        let longest = match self.watches.load(Ordering::Relaxed) {
            0 => longest,
            _ => watching,
        };
        (engine.next_deadline(now) - now).min(longest)
    }
}

impl Hca {
    /// Opens a device on a link.
    pub fn open(link: impl Link + 'static, options: HcaOptions) -> Result<Self> {
        let shared = Self::start(link, options)?;
        publish::add(Arc::downgrade(&shared));
        Ok(Self(shared))
    }

    fn start(mut link: impl Link + 'static, options: HcaOptions) -> Result<Arc<Shared>> {
        let registry = Registry::new();
        let offer = match options.direct {
            true => offer(&mut link, &registry),
            false => Err("switched off"),
        };
        let (mut path, largest) = (link.path(), link.largest());
        path.why += &match &offer {
            Ok(_) => "; direct where peers and we can map each other's memory".to_owned(),
            Err(why) => format!("; packets only: {why}"),
        };
        let news = Arc::new(News::new()?);
        let rung = Arc::new(Rung::new());
        let alone = options.drive == Drive::Inline;
        let engine =
            Engine::new(Box::new(link), registry.clone(), news.clone(), rung.clone(), alone, offer);
        let reaches = engine.core.reaches.clone();
        let shared = Arc::new(Shared {
            engine: match options.drive {
                Drive::Thread { .. } => Biased::unowned(engine),
                Drive::Guarded | Drive::Inline => Biased::new(engine),
            },
            registry,
            news,
            rung,
            sleeper: Arc::new(Sleeper::new()?),
            start: Clock::now(),
            path,
            largest,
            watches: 0.into(),
            reaches,
            has_thread: options.drive != Drive::Inline,
            drive: options.drive,
        });
        drive::start(&shared, options.drive)?;
        Ok(shared)
    }

    /// A device that is on no network, which nobody drives and nobody is told of.
    pub(crate) fn idle() -> Result<Self> {
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        let link = link::Hub::new().endpoint(nowhere)?;
        let options = HcaOptions { drive: Drive::Inline, direct: false };
        Ok(Self(Self::start(link, options)?))
    }

    /// The registrations of this device.
    pub fn registry(&self) -> &Registry {
        &self.0.registry
    }

    /// The link that it uses, and why.
    pub fn path(&self) -> &link::Path {
        &self.0.path
    }

    /// The most payload that a packet on its link has room for.
    pub fn largest_payload(&self) -> usize {
        self.0.largest.saturating_sub(engine::LONGEST_AROUND)
    }

    /// Whether both are one device.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether a thread works on when nobody polls: then a program may sleep until it is woken.
    pub fn wakes_sleepers(&self) -> bool {
        self.0.has_thread
    }

    /// Who drives it.
    pub fn drive(&self) -> Drive {
        self.0.drive
    }

    /// Makes a step, unless somebody else is making one.
    ///
    /// # Errors
    /// If the link is beyond repair.
    #[inline]
    pub fn poll(&self) -> Result<Progress> {
        let steps = &self.0.sleeper.inline_steps;
        let Some(mut engine) = self.0.engine.try_lock() else {
            steps.fetch_add(1, Ordering::Relaxed);
            return Ok(Progress::default());
        };
        // A change is all that anybody looks for: one that is lost to those who did not get in is no loss.
        steps.store(steps.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        engine.core.totals.steps += 1;
        let progress = engine.step(self.0.now());
        self.0.sleeper.stepped();
        progress
    }

    /// Makes a completion queue; returns its number.
    pub fn create_cq(&self, spec: CqSpec) -> Result<u32> {
        must_be_power_of_two(spec.entries, "completion queue entries")?;
        must_hold(&spec.memory, u64::from(spec.entries) * CQE_LEN, "the completion queue")?;
        must_hold(&spec.memory, spec.record.saturating_add(8), "the completion queue's record")?;
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
        must_be_power_of_two(spec.entries, "shared receive queue entries")?;
        check_stride(spec.stride, 32, LONGEST_RECEIVE as u32 * 2)?;
        let bytes = u64::from(spec.entries) * u64::from(spec.stride);
        must_hold(&spec.memory, bytes, "the shared receive queue")?;
        must_hold(&spec.memory, spec.record.saturating_add(4), "its record")?;
        let ring = SharedRing::new(spec.memory, spec.record, spec.entries, spec.stride);
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
        must_be_power_of_two(spec.send_blocks, "send queue blocks")?;
        if spec.send_blocks > crate::mlx5::MOST_BLOCKS {
            return Err(wrong("send queue blocks", "32768 at most"));
        }
        let Layout { receive, send, record, doorbell } = spec.layout;
        let send_end = send.saturating_add(u64::from(spec.send_blocks) * 64);
        must_hold(&spec.memory, send_end, "the send queue")?;
        must_hold(&spec.memory, record.saturating_add(8), "the doorbell record")?;
        must_hold(&spec.memory, doorbell.saturating_add(264), "the doorbell")?;
        if record % 8 != 0 || doorbell % 8 != 0 {
            return Err(wrong("the doorbell and its record", "aligned to 8 bytes"));
        }
        if spec.srq.is_none() {
            must_be_power_of_two(spec.receive_entries, "receive queue entries")?;
            check_stride(spec.receive_stride, 16, LONGEST_RECEIVE as u32)?;
            let bytes = u64::from(spec.receive_entries) * u64::from(spec.receive_stride);
            must_hold(&spec.memory, receive.saturating_add(bytes), "the receive queue")?;
        }
        if let Some(mtu) = spec.datagrams
            && mtu.bytes() as usize > self.largest_payload()
        {
            let most =
                format!("at most {}, which is what the link carries", self.largest_payload());
            return Err(wrong("the length of datagrams", &most));
        }
        let watched = spec.watched;
        let number = self.0.engine.lock().add_pair(spec)?;
        if watched {
            self.0.watches.fetch_add(1, Ordering::Relaxed);
            self.0.sleeper.wake();
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
        if engine.pair(qpn).is_ok_and(|pair| pair.watched) {
            self.0.watches.fetch_sub(1, Ordering::Relaxed);
        }
        engine.remove_pair(qpn);
    }

    /// Takes a queue pair a step further, or changes its attributes; what is refused changes nothing.
    pub fn modify_qp(&self, qpn: u32, change: &Change) -> Result<()> {
        let now = self.0.now();
        self.0.engine.lock().modify(qpn, change, now)?;
        self.0.sleeper.wake();
        Ok(())
    }

    /// The state of a queue pair.
    pub fn qp_state(&self, qpn: u32) -> Result<State> {
        Ok(self.0.engine.lock().pair(qpn)?.qp.state())
    }

    /// What a queue pair has counted.
    pub fn qp_stats(&self, qpn: u32) -> Result<qp::Stats> {
        Ok(*self.0.engine.lock().pair(qpn)?.qp.stats())
    }

    /// Why the last key or range of a queue pair was denied, if one was.
    pub fn qp_denied(&self, qpn: u32) -> Option<crate::mr::Denied> {
        self.0.engine.lock().pair(qpn).ok()?.side.denied
    }

    /// A way to have writes done here and now that a peer's memory takes without packets, as if they had been posted and
    /// their doorbell rung: only if there is such a peer, and nobody else makes a step.
    #[inline]
    pub fn express(&self, qpn: u32) -> Option<Express<'_>> {
        if !self.0.reaches.load(Ordering::Relaxed) {
            return None;
        }
        let engine = self.0.engine.try_lock()?;
        Some(Express { engine, index: engine::place_of(qpn), left: direct::TURN })
    }

    /// To be called by who is about to sleep until something completes: whoever drives the engine otherwise does so at once.
    pub fn hand_over(&self) {
        self.0.sleeper.call();
    }

    /// Tells the engine that a doorbell was rung. Rings that nobody tells of are seen only on queue pairs that are
    /// [watched](QpSpec::watched).
    #[inline]
    pub fn ring(&self, qpn: u32) {
        let index = engine::place_of(qpn);
        // Where a peer's memory is mapped, most work can be done here and now, if nobody else makes a step. What is left from
        // the last time is done with it: a queue that is never empty takes no writes at once, though they cost much less.
        let turns = if self.0.reaches.load(Ordering::Relaxed) { direct::MOST_TURNS } else { 0 };
        for _ in 0..turns {
            match self.0.engine.try_lock().map(|mut engine| engine.core.do_at_once(index)) {
                Some(direct::Left::Nothing) => return,
                Some(direct::Left::ForTurns) => {}
                Some(direct::Left::ForSteps) | None => break,
            }
        }
        self.0.rung.ring(index);
        self.0.sleeper.wake();
    }

    /// The oldest news that nobody has taken.
    pub fn next_event(&self) -> Option<AsyncEvent> {
        self.0.news.take()
    }

    /// Raised while there is news.
    pub fn events(&self) -> &Signal {
        &self.0.news.signal
    }

    /// What it has counted.
    pub fn stats(&self) -> Stats {
        let engine = self.0.engine.lock();
        let mut stats = Stats::of(&engine.core.totals, engine.pairs().map(|pair| pair.qp.stats()));
        if let Ok(offer) = &engine.core.offer {
            [stats.direct.by_peers, stats.direct.bytes_by_peers] = offer.visits();
        }
        stats
    }

    /// Which way a queue pair's work takes, and why: its link, and whether it needs packets.
    pub fn qp_path(&self, qpn: u32) -> Result<link::Path> {
        self.0.engine.lock().pair_path(qpn)
    }

    /// What its link has counted.
    pub fn link_counters(&self) -> link::Counters {
        self.0.engine.lock().link().counters()
    }
}

/// Offers registered memory to peers, if the link can; or says why it cannot.
fn offer(
    link: &mut impl Link,
    registry: &Registry,
) -> std::result::Result<Arc<link::Offer>, &'static str> {
    let files = registry.clone();
    let offer = link::Offer::new(Box::new(move |key| files.file_of(key))).map_err(|why| {
        tracing::debug!(%why, "peers need packets");
        "this process has no memory for the table of what peers may reach"
    })?;
    link.offer(&offer)?;
    registry.watch(Arc::new(direct::Grants(Arc::downgrade(&offer))));
    Ok(offer)
}

fn wrong(what: &str, must_be: &str) -> Error {
    Error::new(Kind::InvalidArgument, "make a queue").why(format!("{what} must be {must_be}"))
}

fn must_be_power_of_two(count: u32, what: &str) -> Result<()> {
    if count.is_power_of_two() { Ok(()) } else { Err(wrong(what, "a power of two")) }
}

fn check_stride(stride: u32, least: u32, most: u32) -> Result<()> {
    if stride.is_power_of_two() && (least..=most).contains(&stride) {
        return Ok(());
    }
    Err(wrong("the length of an entry", &format!("a power of two from {least} to {most}")))
}

fn must_hold(memory: &QueueMemory, end: u64, what: &str) -> Result<()> {
    if end <= memory.bytes().len() {
        return Ok(());
    }
    let why = format!("{what} ends at byte {end} of memory with {}", memory.bytes().len());
    Err(Error::new(Kind::OutOfRange, "make a queue").why(why).fix("give it more memory"))
}
