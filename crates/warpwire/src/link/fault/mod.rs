//! A link that misbehaves on purpose: packets are lost, doubled, overtaken, damaged, delayed, all from one seed.
//!
//! Given the same calls, the same packets meet the same faults. Each direction draws by itself, and each packet draws
//! the same number of times, whatever happens to it.
//!
//! Packets sent are damaged after they were sealed, so that the receiver's check must find them. Packets received have
//! passed that check already; damaging them here means that the check would have failed, so they are counted as a
//! wrong ICRC and go no further. (A CRC-32 finds every single flipped bit.)
//!
//! A capture belongs inside: `FaultInjector::new(Tap::new(link, …), …)` captures what is on the wire.

mod delay_queue;
mod plan;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub use plan::{ENV_VAR, FaultDirection, FaultPlan, Probability};

use super::flows::FlowId;
use super::{
    Corruption, Counters, ExportTable, Flushed, Frame, Link, LinkPath, ReserveError, ShmPeer,
};
use crate::error::Result;
use delay_queue::{DelayQueue, Schedule};

/// Any link, with faults.
///
/// ```
/// use warpwire::link::{FaultInjector, Hub, Link};
/// let hub = Hub::new();
/// let one = hub.endpoint("10.0.0.1:1".parse().unwrap())?;
/// let mut two = hub.endpoint("10.0.0.2:1".parse().unwrap())?;
/// let mut one = FaultInjector::new(one, "loss=100%".parse()?);
/// let flow = one.open(two.local(), 0)?;
/// one.reserve(flow, 64).unwrap().fill(1);
/// one.commit();
/// one.flush()?;
/// assert_eq!(two.receive(&mut |_| ())?, 0);
/// assert_eq!(one.counters().drops.injected, 1);
/// # Ok::<(), warpwire::Error>(())
/// ```
pub struct FaultInjector<L: Link> {
    inner: L,
    plan: FaultPlan,
    clock: Clock,
    cut: Arc<AtomicBool>,
    out: Option<Outgoing>,
    incoming: Option<DelayQueue<PacketInfo>>,
    counters: Counters,
}

/// Packets on their way out.
struct Outgoing {
    delay_queue: DelayQueue<(FlowId, Corruption)>,
    stage: Box<[u8]>,
    reserved: Option<(FlowId, usize)>,
}

/// What is kept of a packet received.
#[derive(Clone, Copy)]
struct PacketInfo {
    from: SocketAddr,
    to: SocketAddr,
    marked: bool,
    identification: u16,
    has_icrc: bool,
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
    Manual(Arc<AtomicU64>),
}

impl Clock {
    /// The machine's clock.
    pub fn real() -> Self {
        Self(Time::Real(Instant::now()))
    }

    /// A clock that stands still until it is moved.
    pub fn manual() -> Self {
        Self(Time::Manual(Arc::default()))
    }

    /// Moves a still clock on; the machine's goes by itself.
    pub fn advance(&self, step: Duration) {
        if let Time::Manual(now) = &self.0 {
            let step = u64::try_from(step.as_nanos()).unwrap_or(u64::MAX);
            now.fetch_add(step, Ordering::Relaxed);
        }
    }

    fn now(&self) -> u64 {
        match &self.0 {
            Time::Real(start) => u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX),
            Time::Manual(now) => now.load(Ordering::Relaxed),
        }
    }
}

impl<L: Link> FaultInjector<L> {
    /// Puts faults around a link.
    pub fn new(inner: L, plan: FaultPlan) -> Self {
        Self::with_clock(inner, plan, Clock::real())
    }

    /// As [`FaultInjector::new`], by another clock: a test in which time matters and nothing waits.
    pub fn with_clock(mut inner: L, plan: FaultPlan, clock: Clock) -> Self {
        inner.force_icrc();
        let max_packet = inner.max_packet();
        let faults = |side: FaultDirection| {
            !plan.is_noop() && (plan.direction == FaultDirection::Both || plan.direction == side)
        };
        let out = faults(FaultDirection::Out).then(|| Outgoing {
            delay_queue: DelayQueue::new(plan.seed, max_packet),
            stage: vec![0; max_packet].into_boxed_slice(),
            reserved: None,
        });
        // Another stream of draws for the other direction.
        let incoming = faults(FaultDirection::In).then(|| DelayQueue::new(!plan.seed, max_packet));
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

    fn with_faults(&self, mut path: LinkPath) -> LinkPath {
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
        while let Some(slot) = out.delay_queue.due(now) {
            let Some((held, (flow, corruption))) =
                out.delay_queue.held(slot).and_then(|held| Some((held, held.info?)))
            else {
                out.delay_queue.release(slot);
                continue;
            };
            let bytes = held.bytes.get(..held.len).unwrap_or_default();
            let mut forwarded = forward(&mut self.inner, flow, bytes, corruption);
            if forwarded == Err(ReserveError::Full) {
                self.inner.flush()?;
                forwarded = forward(&mut self.inner, flow, bytes, corruption);
            }
            match forwarded {
                Ok(()) => {}
                Err(ReserveError::Full) => break,
                // The flow was closed while its packet was held back.
                Err(ReserveError::Closed | ReserveError::Length) => {
                    self.counters.drops.no_peer += 1
                }
            }
            out.delay_queue.release(slot);
        }
        Ok(())
    }
}

/// Puts a packet into a link's batch.
fn forward<L: Link>(
    link: &mut L,
    flow: FlowId,
    bytes: &[u8],
    corruption: Corruption,
) -> std::result::Result<(), ReserveError> {
    link.reserve(flow, bytes.len())?.copy_from_slice(bytes);
    link.commit_corrupted(corruption);
    Ok(())
}

impl<L: Link> Link for FaultInjector<L> {
    fn path(&self) -> LinkPath {
        self.with_faults(self.inner.path())
    }

    fn flow_path(&self, flow: FlowId) -> LinkPath {
        self.with_faults(self.inner.flow_path(flow))
    }

    fn local(&self) -> SocketAddr {
        self.inner.local()
    }

    fn max_packet(&self) -> usize {
        self.inner.max_packet()
    }

    /// What is held back lies in buffers of one length; without faults nothing is.
    fn max_packet_to(&self, flow: FlowId) -> usize {
        if self.out.is_some() || self.incoming.is_some() {
            return self.inner.max_packet();
        }
        self.inner.max_packet_to(flow)
    }

    fn open(&mut self, peer: SocketAddr, label: u32) -> Result<FlowId> {
        self.inner.open(peer, label)
    }

    fn close(&mut self, flow: FlowId) {
        self.inner.close(flow);
    }

    fn reserve(
        &mut self,
        flow: FlowId,
        len: usize,
    ) -> std::result::Result<&mut [u8], ReserveError> {
        let room = self.inner.reserve(flow, len)?;
        match &mut self.out {
            None => Ok(room),
            Some(out) => {
                out.reserved = Some((flow, len));
                out.stage.get_mut(..len).ok_or(ReserveError::Length)
            }
        }
    }

    fn commit_corrupted(&mut self, corruption: Corruption) -> Option<Frame<'_>> {
        let now = self.clock.now();
        let cut = self.is_cut(now);
        let Some(out) = &mut self.out else {
            if cut {
                // Taken back by reserving nothing: a reservation without a commit is forgotten.
                self.counters.drops.injected += 1;
                return None;
            }
            return self.inner.commit_corrupted(corruption);
        };
        let (flow, len) = out.reserved.take()?;
        let mut decision = out.delay_queue.decide(&self.plan, now, len);
        if corruption != Corruption::Intact {
            decision.corruption = corruption;
        }
        if cut || decision.lost {
            self.counters.drops.injected += 1;
            return None;
        }
        let bytes = out.stage.get(..len)?;
        let mut held = true;
        if decision.duplicate {
            held &= out.delay_queue.enqueue(bytes, (flow, Corruption::Intact), decision.schedule);
        }
        let at_once = decision.schedule == Schedule::Now && !out.delay_queue.has_due(now);
        if at_once && forward(&mut self.inner, flow, bytes, decision.corruption).is_ok() {
            return None;
        }
        held &= out.delay_queue.enqueue(bytes, (flow, decision.corruption), decision.schedule);
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
        let Some(delay_queue) = incoming else {
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
            let decision = delay_queue.decide(plan, now, frame.bytes.len());
            if cut || decision.lost {
                counters.drops.injected += 1;
                return;
            }
            let Frame { from, to, marked, identification, has_icrc, bytes } = frame;
            let info = PacketInfo { from, to, marked, identification, has_icrc };
            if decision.duplicate && !delay_queue.enqueue(bytes, info, decision.schedule) {
                counters.drops.overrun += 1;
            }
            if decision.corruption != Corruption::Intact {
                counters.drops.icrc += 1;
            } else if decision.schedule == Schedule::Now && !delay_queue.has_due(now) {
                delivered += 1;
                take(frame);
            } else if !delay_queue.enqueue(bytes, info, decision.schedule) {
                counters.drops.overrun += 1;
            }
        })?;
        while let Some(slot) = delay_queue.due(now) {
            if let Some((held, info)) =
                delay_queue.held(slot).and_then(|held| Some((held, held.info?)))
            {
                let PacketInfo { from, to, marked, identification, has_icrc } = info;
                let bytes = held.bytes.get(..held.len).unwrap_or_default();
                delivered += 1;
                take(Frame { from, to, bytes, marked, identification, has_icrc });
            }
            delay_queue.release(slot);
        }
        Ok(delivered)
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        self.inner.wait_fd()
    }

    fn poll_delay(&self) -> Option<Duration> {
        let out = self.out.as_ref().and_then(|out| out.delay_queue.next());
        let incoming = self.incoming.as_ref().and_then(DelayQueue::next);
        let now = self.clock.now();
        let mine = out.into_iter().chain(incoming).min();
        let mine = mine.map(|at| Duration::from_nanos(at.saturating_sub(now)));
        mine.into_iter().chain(self.inner.poll_delay()).min()
    }

    /// The inner link's, and what was lost on purpose. Packets received are those delivered by the inner link.
    /// What goes past the link nobody would see.
    fn install_exports(&mut self, _: &Arc<ExportTable>) -> std::result::Result<(), &'static str> {
        Err("faults must see every packet")
    }

    fn direct_peer(&self, _: FlowId) -> std::result::Result<Arc<ShmPeer>, &'static str> {
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
