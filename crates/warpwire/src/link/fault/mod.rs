//! A link that misbehaves on purpose: packets are lost, doubled, overtaken, damaged, delayed, all from one seed.
//!
//! Given the same calls, the same packets meet the same faults. Each direction draws by itself, and each packet draws
//! the same number of times, whatever happens to it.
//!
//! Packets sent are damaged after they were sealed, so that the receiver's check must find them. Packets received have
//! passed that check already; damaging them here means that the check would have failed, so they are counted as a
//! wrong ICRC and go no further. (A CRC-32 finds every single flipped bit.)
//!
//! A capture belongs inside: `Fault::new(Tap::new(link, …), …)` captures what is on the wire.

mod lane;
mod plan;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub use plan::{Chance, Direction, Plan, VARIABLE};

use super::flows::FlowId;
use super::{Counters, Flushed, Frame, Link, Offer, Path, Peer, Refused, Spoil};
use crate::error::Result;
use lane::{Lane, When};

/// Any link, with faults.
///
/// ```
/// use warpwire::link::{Fault, Hub, Link};
/// let hub = Hub::new();
/// let one = hub.endpoint("10.0.0.1:1".parse().unwrap())?;
/// let mut two = hub.endpoint("10.0.0.2:1".parse().unwrap())?;
/// let mut one = Fault::new(one, "loss=100%".parse()?);
/// let flow = one.open(two.local(), 0)?;
/// one.reserve(flow, 64).unwrap().fill(1);
/// one.commit();
/// one.flush()?;
/// assert_eq!(two.receive(&mut |_| ())?, 0);
/// assert_eq!(one.counters().drops.injected, 1);
/// # Ok::<(), warpwire::Error>(())
/// ```
pub struct Fault<L: Link> {
    inner: L,
    plan: Plan,
    clock: Clock,
    cut: Arc<AtomicBool>,
    out: Option<Outgoing>,
    incoming: Option<Lane<About>>,
    counters: Counters,
}

/// Packets on their way out.
struct Outgoing {
    lane: Lane<(FlowId, Spoil)>,
    stage: Box<[u8]>,
    reserved: Option<(FlowId, usize)>,
}

/// What is kept of a packet received.
#[derive(Clone, Copy)]
struct About {
    from: SocketAddr,
    to: SocketAddr,
    marked: bool,
    identification: u16,
    sealed: bool,
}

/// Cuts a link off, and joins it again, from anywhere.
#[derive(Clone, Debug)]
pub struct Partition {
    cut: Arc<AtomicBool>,
}

impl Partition {
    /// From now on everything is lost.
    pub fn cut(&self) {
        self.cut.store(true, Ordering::Relaxed);
    }

    /// From now on packets go through again.
    pub fn heal(&self) {
        self.cut.store(false, Ordering::Relaxed);
    }
}

/// The time since a link's beginning: the machine's, or one that a test moves.
#[derive(Clone, Debug)]
pub struct Clock(Time);

#[derive(Clone, Debug)]
enum Time {
    Real(Instant),
    Moved(Arc<AtomicU64>),
}

impl Clock {
    /// The machine's clock.
    pub fn real() -> Self {
        Self(Time::Real(Instant::now()))
    }

    /// A clock that stands still until it is moved.
    pub fn still() -> Self {
        Self(Time::Moved(Arc::default()))
    }

    /// Moves a still clock on; the machine's goes by itself.
    pub fn advance(&self, step: Duration) {
        if let Time::Moved(now) = &self.0 {
            let step = u64::try_from(step.as_nanos()).unwrap_or(u64::MAX);
            now.fetch_add(step, Ordering::Relaxed);
        }
    }

    fn now(&self) -> u64 {
        match &self.0 {
            Time::Real(start) => u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
            Time::Moved(now) => now.load(Ordering::Relaxed),
        }
    }
}

impl<L: Link> Fault<L> {
    /// Puts faults around a link.
    pub fn new(inner: L, plan: Plan) -> Self {
        Self::with_clock(inner, plan, Clock::real())
    }

    /// As [`Fault::new`], by another clock: a test in which time matters and nothing waits.
    pub fn with_clock(mut inner: L, plan: Plan, clock: Clock) -> Self {
        inner.always_seal();
        let largest = inner.largest();
        let faults = |side: Direction| {
            !plan.is_harmless() && (plan.direction == Direction::Both || plan.direction == side)
        };
        let out = faults(Direction::Out).then(|| Outgoing {
            lane: Lane::new(plan.seed, largest),
            stage: vec![0; largest].into_boxed_slice(),
            reserved: None,
        });
        // Another stream of draws for the other direction.
        let incoming = faults(Direction::In).then(|| Lane::new(!plan.seed, largest));
        let cut = Arc::new(AtomicBool::new(false));
        Self { inner, plan, clock, cut, out, incoming, counters: Counters::default() }
    }

    /// What cuts this link off and joins it again.
    pub fn partition(&self) -> Partition {
        Partition { cut: Arc::clone(&self.cut) }
    }

    /// The link inside.
    pub fn into_inner(self) -> L {
        self.inner
    }

    fn is_cut(&self, now: u64) -> bool {
        let planned = self.plan.partition.is_some_and(|(from, length)| {
            let now = Duration::from_nanos(now);
            now >= from && now - from < length
        });
        planned || self.cut.load(Ordering::Relaxed)
    }

    fn described(&self, mut path: Path) -> Path {
        path.why = if self.out.is_none() && self.incoming.is_none() {
            format!("{}; around it no faults", path.why)
        } else {
            format!("{}; around it faults on purpose: {}", path.why, self.plan)
        };
        path
    }

    /// Passes on the packets whose time has come; what the inner link has no room for stays.
    fn pump(&mut self, now: u64) -> Result<()> {
        let Some(out) = &mut self.out else { return Ok(()) };
        while let Some(slot) = out.lane.due(now) {
            let Some((held, (flow, spoil))) =
                out.lane.held(slot).and_then(|held| Some((held, held.about?)))
            else {
                out.lane.release(slot);
                continue;
            };
            let bytes = held.bytes.get(..held.len).unwrap_or_default();
            let mut passed = pass(&mut self.inner, flow, bytes, spoil);
            if passed == Err(Refused::Full) {
                self.inner.flush()?;
                passed = pass(&mut self.inner, flow, bytes, spoil);
            }
            match passed {
                Ok(()) => {}
                Err(Refused::Full) => break,
                // The flow was closed while its packet was held back.
                Err(Refused::Closed | Refused::Length) => self.counters.drops.no_peer += 1,
            }
            out.lane.release(slot);
        }
        Ok(())
    }
}

/// Puts a packet into a link's batch.
fn pass<L: Link>(
    link: &mut L,
    flow: FlowId,
    bytes: &[u8],
    spoil: Spoil,
) -> std::result::Result<(), Refused> {
    link.reserve(flow, bytes.len())?.copy_from_slice(bytes);
    link.commit_spoiled(spoil);
    Ok(())
}

impl<L: Link> Link for Fault<L> {
    fn path(&self) -> Path {
        self.described(self.inner.path())
    }

    fn flow_path(&self, flow: FlowId) -> Path {
        self.described(self.inner.flow_path(flow))
    }

    fn local(&self) -> SocketAddr {
        self.inner.local()
    }

    fn largest(&self) -> usize {
        self.inner.largest()
    }

    /// What is held back lies in buffers of one length; without faults nothing is.
    fn largest_to(&self, flow: FlowId) -> usize {
        if self.out.is_some() || self.incoming.is_some() {
            return self.inner.largest();
        }
        self.inner.largest_to(flow)
    }

    fn open(&mut self, peer: SocketAddr, label: u32) -> Result<FlowId> {
        self.inner.open(peer, label)
    }

    fn close(&mut self, flow: FlowId) {
        self.inner.close(flow);
    }

    fn reserve(&mut self, flow: FlowId, len: usize) -> std::result::Result<&mut [u8], Refused> {
        let room = self.inner.reserve(flow, len)?;
        match &mut self.out {
            None => Ok(room),
            Some(out) => {
                out.reserved = Some((flow, len));
                out.stage.get_mut(..len).ok_or(Refused::Length)
            }
        }
    }

    fn commit_spoiled(&mut self, spoil: Spoil) -> Option<Frame<'_>> {
        let now = self.clock.now();
        let cut = self.is_cut(now);
        let Some(out) = &mut self.out else {
            if cut {
                // Taken back by reserving nothing: a reservation without a commit is forgotten.
                self.counters.drops.injected += 1;
                return None;
            }
            return self.inner.commit_spoiled(spoil);
        };
        let (flow, len) = out.reserved.take()?;
        let mut fate = out.lane.decide(&self.plan, now, len);
        if spoil != Spoil::No {
            fate.spoil = spoil;
        }
        if cut || fate.lost {
            self.counters.drops.injected += 1;
            return None;
        }
        let bytes = out.stage.get(..len)?;
        let mut held = true;
        if fate.twice {
            held &= out.lane.hold(bytes, (flow, Spoil::No), fate.when);
        }
        let at_once = fate.when == When::Now && !out.lane.has_due(now);
        if at_once && pass(&mut self.inner, flow, bytes, fate.spoil).is_ok() {
            return None;
        }
        held &= out.lane.hold(bytes, (flow, fate.spoil), fate.when);
        if !held {
            self.counters.drops.overrun += 1;
        }
        None
    }

    fn flush(&mut self) -> Result<Flushed> {
        if self.out.is_some() {
            self.pump(self.clock.now())?;
        }
        self.inner.flush()
    }

    fn receive(&mut self, take: &mut dyn FnMut(Frame<'_>)) -> Result<usize> {
        let now = self.clock.now();
        let cut = self.is_cut(now);
        let Self { inner, incoming, counters, plan, .. } = self;
        let mut delivered = 0;
        let Some(lane) = incoming else {
            inner.receive(&mut |frame| {
                if cut {
                    counters.drops.injected += 1;
                } else {
                    delivered += 1;
                    take(frame);
                }
            })?;
            return Ok(delivered);
        };
        inner.receive(&mut |frame| {
            let fate = lane.decide(plan, now, frame.bytes.len());
            if cut || fate.lost {
                counters.drops.injected += 1;
                return;
            }
            let Frame { from, to, marked, identification, sealed, bytes } = frame;
            let about = About { from, to, marked, identification, sealed };
            if fate.twice && !lane.hold(bytes, about, fate.when) {
                counters.drops.overrun += 1;
            }
            if fate.spoil != Spoil::No {
                counters.drops.icrc += 1;
            } else if fate.when == When::Now && !lane.has_due(now) {
                delivered += 1;
                take(frame);
            } else if !lane.hold(bytes, about, fate.when) {
                counters.drops.overrun += 1;
            }
        })?;
        while let Some(slot) = lane.due(now) {
            if let Some((held, about)) = lane.held(slot).and_then(|held| Some((held, held.about?)))
            {
                let About { from, to, marked, identification, sealed } = about;
                let bytes = held.bytes.get(..held.len).unwrap_or_default();
                delivered += 1;
                take(Frame { from, to, bytes, marked, identification, sealed });
            }
            lane.release(slot);
        }
        Ok(delivered)
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_fd()
    }

    fn wakes_in(&self) -> Option<Duration> {
        let out = self.out.as_ref().and_then(|out| out.lane.next());
        let incoming = self.incoming.as_ref().and_then(Lane::next);
        let now = self.clock.now();
        let mine = out.into_iter().chain(incoming).min();
        let mine = mine.map(|at| Duration::from_nanos(at.saturating_sub(now)));
        mine.into_iter().chain(self.inner.wakes_in()).min()
    }

    /// The inner link's, and what was lost on purpose. Packets received are those delivered by the inner link.
    /// What goes past the link nobody would see.
    fn offer(&mut self, _: &Arc<Offer>) -> std::result::Result<(), &'static str> {
        Err("faults must see every packet")
    }

    fn peer(&self, _: FlowId) -> std::result::Result<Arc<Peer>, &'static str> {
        Err("faults must see every packet")
    }

    fn counters(&self) -> Counters {
        let mut counters = self.inner.counters();
        counters.drops.injected += self.counters.drops.injected;
        counters.drops.overrun += self.counters.drops.overrun;
        counters.drops.icrc += self.counters.drops.icrc;
        counters.drops.no_peer += self.counters.drops.no_peer;
        counters
    }
}
