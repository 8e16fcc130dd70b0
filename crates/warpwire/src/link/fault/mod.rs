//! Fault injection: drops, duplicates, reorders, corrupts and delays the packets of a link, all
//! from one seed.
//!
//! Given the same calls, the same packets meet the same faults. Each direction has its own random
//! sequence, and each packet consumes the same number of draws, whatever happens to it.
//!
//! Packets sent are corrupted after their ICRC was appended, so that the receiver's check must
//! detect them. Packets received have passed that check already; one that is corrupted here would
//! have failed it, so it is counted as a wrong ICRC and dropped. (A CRC-32 detects every single
//! flipped bit.)
//!
//! A capture belongs inside: `FaultInjector::new(Tap::new(link, …), …)` captures what is on the
//! wire.

mod delay_queue;
mod plan;
#[cfg(test)]
mod tests;

use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

pub use plan::{FaultDirection, FaultPlan, Probability};

use super::flows::FlowId;
use super::{
    Corruption, Counters, ExportTable, Flushed, Frame, Link, LinkPath, ReserveError, ShmPeer,
};
use crate::error::Result;
use delay_queue::{DelayQueue, Schedule};

/// Wraps any link and injects faults.
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

/// State of the transmit direction.
struct Outgoing {
    delay_queue: DelayQueue<(FlowId, Corruption)>,
    stage: Box<[u8]>,
    reserved: Option<(FlowId, usize)>,
}

/// Metadata of a received packet that is held back.
#[derive(Clone, Copy)]
struct PacketInfo {
    from: SocketAddr,
    to: SocketAddr,
    traffic_class: u8,
    hop_limit: u8,
    identification: u16,
    has_icrc: bool,
}

/// Disconnects a link and reconnects it, from any thread.
#[derive(Clone, Debug)]
pub struct Partition {
    cut: Arc<AtomicBool>,
}

impl Partition {
    /// Drops all packets from now on.
    pub fn cut(&self) {
        self.cut.store(true, Ordering::Relaxed);
    }

    /// Lets packets through again.
    pub fn heal(&self) {
        self.cut.store(false, Ordering::Relaxed);
    }
}

/// The time since a link was created: real time, or one that a test advances.
#[derive(Clone, Debug)]
pub struct Clock(Time);

#[derive(Clone, Debug)]
enum Time {
    Real(Instant),
    Manual(Arc<AtomicU64>),
}

impl Clock {
    /// Real time.
    pub fn real() -> Self {
        Self(Time::Real(Instant::now()))
    }

    /// A clock that does not advance until [`advance`](Clock::advance) is called.
    pub fn manual() -> Self {
        Self(Time::Manual(Arc::default()))
    }

    /// Advances a manual clock; no effect on a real one.
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
    /// Injects faults into a link.
    pub fn new(inner: L, plan: FaultPlan) -> Self {
        Self::with_clock(inner, plan, Clock::real())
    }

    /// As [`FaultInjector::new`], with another clock: for tests that depend on time but do not
    /// wait.
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
        // A different random sequence for the other direction.
        let incoming = faults(FaultDirection::In).then(|| DelayQueue::new(!plan.seed, max_packet));
        let cut = Arc::new(AtomicBool::new(false));
        Self { inner, plan, clock, cut, out, incoming, counters: Counters::default() }
    }

    /// A handle that disconnects this link and reconnects it.
    pub fn partition(&self) -> Partition {
        Partition { cut: Arc::clone(&self.cut) }
    }

    /// Unwraps the link.
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
            format!("{}; fault injection: none", path.why)
        } else {
            format!("{}; fault injection: {}", path.why, self.plan)
        };
        path
    }

    /// Forwards the packets that are due; those for which the inner link has no space stay queued.
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

/// Adds a packet to a link's batch.
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

    /// Packets are held back in buffers of one length; without faults none are.
    fn max_packet_to(&self, flow: FlowId) -> usize {
        if self.out.is_some() || self.incoming.is_some() {
            return self.inner.max_packet();
        }
        self.inner.max_packet_to(flow)
    }

    fn max_packet_on_host(&self) -> usize {
        if self.out.is_some() || self.incoming.is_some() {
            return self.inner.max_packet();
        }
        self.inner.max_packet_on_host()
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
        let packet = self.inner.reserve(flow, len)?;
        match &mut self.out {
            None => Ok(packet),
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
                // The inner reservation is never committed, and therefore discarded.
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
        let forward_now = decision.schedule == Schedule::Now && !out.delay_queue.has_due(now);
        if forward_now && forward(&mut self.inner, flow, bytes, decision.corruption).is_ok() {
            return None;
        }
        held &= out.delay_queue.enqueue(bytes, (flow, decision.corruption), decision.schedule);
        if !held {
            self.counters.drops.overrun += 1;
        }
        None
    }

    fn can_congest(&self, flow: FlowId) -> bool {
        self.inner.can_congest(flow)
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
            let Frame { from, to, traffic_class, hop_limit, identification, has_icrc, bytes } =
                frame;
            let info = PacketInfo { from, to, traffic_class, hop_limit, identification, has_icrc };
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
                let PacketInfo { from, to, traffic_class, hop_limit, identification, has_icrc } =
                    info;
                let bytes = held.bytes.get(..held.len).unwrap_or_default();
                delivered += 1;
                take(Frame { from, to, bytes, traffic_class, hop_limit, identification, has_icrc });
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

    /// It has the same faults, and is disconnected with this one.
    fn sibling(&self) -> Result<Box<dyn Link>> {
        let inner = self.inner.sibling()?;
        let mut sibling = FaultInjector::with_clock(inner, self.plan, self.clock.clone());
        sibling.cut = Arc::clone(&self.cut);
        Ok(Box::new(sibling))
    }

    /// Direct access would bypass the faults.
    fn install_exports(&mut self, _: &Arc<ExportTable>) -> std::result::Result<(), &'static str> {
        Err("faults must see every packet")
    }

    fn direct_peer(&self, _: FlowId) -> std::result::Result<Arc<ShmPeer>, &'static str> {
        Err("faults must see every packet")
    }

    /// The inner link's counters plus injected faults; `received` counts packets that the inner
    /// link delivered.
    fn counters(&self) -> Counters {
        let mut counters = self.inner.counters();
        counters.drops.injected += self.counters.drops.injected;
        counters.drops.overrun += self.counters.drops.overrun;
        counters.drops.icrc += self.counters.drops.icrc;
        counters.drops.no_peer += self.counters.drops.no_peer;
        counters
    }
}
