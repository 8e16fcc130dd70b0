//! The engine: one step handles doorbells, transmits what is due, receives packets and runs timers.
//!
//! No packet causes an allocation, a lock or formatting. The engine's lock is held for a whole step
//! by the thread that runs it; control calls take it too.

mod control;
mod datagram;
mod summary;
mod transmit;
mod unreliable;

pub(super) use control::no_such_qp;
pub use summary::StepSummary;
pub(super) use transmit::MAX_PACKET_OVERHEAD;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use warpwire_proto::Instant;
use warpwire_proto::qp::{
    PathAttributes, ProtocolEvent, QpAttributes, QpEvent, RxPacket, State, Status,
};
use warpwire_proto::wire::{Transport, UDP_PORT};

use super::complete;
use super::cq::{CqSlot, Overrun};
use super::doorbell_bitmap::DoorbellBitmap;
use super::event::{AsyncEvent, AsyncEventQueue};
use super::host::HostView;
use super::mapped::{Mapped, QUANTUM};
use super::numbers::{Generation, Numbering};
use super::paths::Paths;
use super::protocol::Protocol;
use super::qpc::{QpContext, RecvSource, TakeOutcome};
use super::ring::{SharedReceiveQueue, WQE_POLL_INTERVAL};
use super::stats::{DropReason, Totals};
use crate::error::Result;
use crate::link::{ExportTable, Frame, Link};
use crate::mr::Registry;
use datagram::Destinations;

/// A step that received this many packets probably left more in the link; timers are then postponed
/// until those have been handled, for at most [`MAX_POSTPONED_STEPS`] steps.
const FULL_RX_BATCH: usize = 32;
const MAX_POSTPONED_STEPS: u32 = 16;
/// When to retry access to memory that was not resident, and to look again at a completion queue
/// that other engines write to.
const RETRY_DELAY: Duration = Duration::from_micros(20);
/// How often to look for room in the queue of a peer that takes no packets, at the least; before,
/// it is 1/32 of the time that it has been full.
const MAX_FULL_RETRY_DELAY: Duration = Duration::from_millis(1);
const FULL_RETRY_DIVISOR: u32 = 32;

/// All state that a step needs.
pub(super) struct Engine {
    pub(super) link: Box<dyn Link>,
    /// ACKs are sent in the step that received the request: always in manual mode, where no other
    /// thread makes a next step.
    acks_immediately: bool,
    clock: Clock,
    pub(super) core: Core,
}

/// Time since the device was opened.
#[derive(Clone, Copy, Debug)]
pub(super) struct Clock(std::time::Instant);

impl Clock {
    pub(super) fn start() -> Self {
        Self(std::time::Instant::now())
    }

    #[inline]
    pub(super) fn now(self) -> Instant {
        Instant::from_nanos(self.0.elapsed().as_nanos() as u64)
    }
}

/// All but the link, whose buffers are borrowed while the rest works on them.
pub(super) struct Core {
    pub registry: Registry,
    pub qpcs: Vec<Option<Box<QpContext>>>,
    /// Slots that are free again, oldest first.
    free: VecDeque<u32>,
    /// How often each slot was used: part of ordinary QP numbers, so that late packets do not reach
    /// a slot's next queue pair.
    generations: Vec<Generation>,
    numbering: Numbering,
    /// By number, which is the same in all engines of a device.
    pub cqs: Vec<Option<CqSlot>>,
    pub srqs: Vec<Option<SharedReceiveQueue>>,
    srq_limits: Vec<Option<u32>>,
    /// The peers that datagrams may be sent to.
    destinations: Destinations,
    /// Queue pairs that may have packets to send, served round-robin.
    active: VecDeque<u32>,
    timers: BinaryHeap<Reverse<(Instant, u32)>>,
    /// Consecutive steps that postponed the timers.
    postponed: u32,
    /// Queue pairs whose doorbells are rung without a notification and must be polled.
    poll_doorbell: Vec<u32>,
    pub async_events: Arc<AsyncEventQueue>,
    pub doorbell_bitmap: Arc<DoorbellBitmap>,
    /// The queue pairs of this round of doorbells; kept for its capacity.
    rung_scratch: Vec<u32>,
    /// A queue pair waits for a completion (`WAIT`).
    blocked: bool,
    /// It waits for one that other engines write to, which do not wake this one.
    waits_for_others: bool,
    /// A doorbell announced a WQE that is not visible yet.
    wqe_missing: bool,
    /// A queue pair spent its quantum before its work was done.
    has_more_work: bool,
    /// How many of `active` found no room in the queue of their peer in the last step.
    full: usize,
    /// Since when that is so for all of `active`.
    full_since: Option<Instant>,
    /// Memory of peers that is mapped here, and of ours that they may map.
    pub mapped: Mapped,
    /// The time of the last step.
    pub last_step: Instant,
    pub totals: Totals,
    pub paths: Paths,
    /// Losses of staged writes that the queue pairs of this engine know of.
    losses_seen: u64,
}

/// What distinguishes one engine from another.
#[derive(Clone, Copy, Debug)]
pub(super) struct EngineOptions {
    pub acks_immediately: bool,
    /// How many memories of peers it maps.
    pub max_mappings: u32,
    pub numbering: Numbering,
}

impl Engine {
    pub(super) fn new(
        link: Box<dyn Link>,
        registry: Registry,
        async_events: Arc<AsyncEventQueue>,
        doorbell_bitmap: Arc<DoorbellBitmap>,
        options: EngineOptions,
        clock: Clock,
        export_table: std::result::Result<Arc<ExportTable>, &'static str>,
    ) -> Self {
        let core = Core {
            registry,
            qpcs: Vec::new(),
            free: VecDeque::new(),
            generations: Vec::new(),
            numbering: options.numbering,
            cqs: Vec::new(),
            srqs: Vec::new(),
            srq_limits: Vec::new(),
            destinations: Destinations::default(),
            active: VecDeque::new(),
            timers: BinaryHeap::new(),
            postponed: 0,
            poll_doorbell: Vec::new(),
            async_events,
            doorbell_bitmap,
            rung_scratch: Vec::new(),
            blocked: false,
            waits_for_others: false,
            wqe_missing: false,
            has_more_work: false,
            full: 0,
            full_since: None,
            mapped: Mapped::new(export_table, options.max_mappings),
            last_step: Instant::from_nanos(0),
            totals: Totals::default(),
            paths: Paths::default(),
            losses_seen: 0,
        };
        Self { link, acks_immediately: options.acks_immediately, clock, core }
    }

    pub(super) fn link(&self) -> &dyn Link {
        &*self.link
    }

    /// One step: doorbells, transmit, receive, timers. ACKs are deferred to the next step, so that
    /// a reply posted by the application can be piggy-backed.
    pub(super) fn step(&mut self, now: Instant) -> Result<StepSummary> {
        if self.core.mapped.peer_lost {
            self.find_lost_direct_peers();
        }
        let core = &mut self.core;
        core.last_step = now;
        let (completions_before, direct) = (core.totals.completions, core.totals.direct_operations);
        core.reap_copies(now);
        core.check_kernel_tables(now);
        core.poll_doorbells(now);
        core.launch_copies();
        let copied = core.totals.direct_operations != direct;
        // Copying to a peer's memory takes time. A deadline counts from when its packet is sent.
        let now = if copied { self.clock.now() } else { now };
        let mut sent = self.transmit(now)?;
        let Self { link, core, clock, .. } = self;
        // A wait that a packet asks for begins when the packet has been read, which may be long
        // after the step began. One reading of the clock per batch.
        let mut read_at = None;
        let received = link.receive(&mut |frame| {
            core.on_packet(*read_at.get_or_insert_with(|| clock.now()), &frame);
        })?;
        let now = read_at.unwrap_or(now);
        // Flush write-behind before ACKs: only placed data may be acknowledged.
        core.flush_staged();
        // Timers last: after a pause, responses that wait in the link are handled before they count
        // as missing (no spurious retransmission).
        if received < FULL_RX_BATCH || core.postponed == MAX_POSTPONED_STEPS {
            core.postponed = 0;
            core.run_timers(now);
        } else {
            core.postponed += 1;
        }
        if received > 0 && self.acks_immediately {
            sent += self.transmit(now)?;
        }
        let core = &mut self.core;
        // Peers do not signal room. One that is stopped may have none for seconds.
        let is_full = core.full > 0 && core.full == core.active.len() && sent == 0;
        core.full_since = is_full.then(|| core.full_since.unwrap_or(now));
        // Completions written since the doorbells were handled may release a blocked queue pair.
        let blocked = core.blocked && core.totals.completions != completions_before;
        let may_send = !core.active.is_empty() && !is_full;
        let more = may_send || core.has_more_work || blocked || core.mapped.is_copying();
        let direct = (core.totals.direct_operations - direct) as usize;
        Ok(StepSummary { received, sent, direct, more, is_full })
    }

    /// When the next step is due if nothing happens.
    pub(super) fn next_deadline(&self, now: Instant) -> Instant {
        let timer = self.core.timers.peek().map_or(Instant::NEVER, |Reverse((when, _))| *when);
        let link = self.link.poll_delay().map_or(Instant::NEVER, |wait| now + wait);
        let wqe_missing =
            if self.core.wqe_missing { now + WQE_POLL_INTERVAL } else { Instant::NEVER };
        let others = match self.core.waits_for_others {
            true => now + RETRY_DELAY,
            false => Instant::NEVER,
        };
        let full = self.core.full_since.map_or(Instant::NEVER, |since| {
            now + ((now - since) / FULL_RETRY_DIVISOR).clamp(RETRY_DELAY, MAX_FULL_RETRY_DELAY)
        });
        let copies = if self.core.mapped.is_copying() { now } else { Instant::NEVER };
        let kernels = self.core.mapped.kernel_tables.deadline();
        timer.min(link).min(wqe_missing).min(others).min(full).min(copies).min(kernels)
    }
}

impl Core {
    /// Handles a packet that was read at `now`.
    fn on_packet(&mut self, now: Instant, frame: &Frame<'_>) {
        let transport = match Transport::new_checked(frame.bytes) {
            Ok(transport) => transport,
            Err(_) => return self.totals.count_drop(DropReason::Malformed),
        };
        let number = transport.destination_qp();
        let Some(index) = self.lookup_qpn(number) else {
            return self.totals.count_drop(DropReason::NoQueuePair);
        };
        let Core { qpcs, registry, srqs, totals, .. } = self;
        let Some(Some(qpc)) = qpcs.get_mut(index as usize) else {
            return totals.count_drop(DropReason::NoQueuePair);
        };
        let QpContext { qp: Protocol::Connected(qp), qp_memory, .. } = &mut **qpc else {
            return match qpc.qp {
                Protocol::Unreliable(_) => self.on_unreliable(now, index, &transport, frame),
                _ => self.on_datagram(now, index, &transport, frame),
            };
        };
        if !qp.path().is_some_and(|path| is_from(path, frame.from)) {
            return totals.count_drop(DropReason::WrongPeer);
        }
        totals.packets_received += 1;
        let (headers, payload) = (transport.headers(), transport.payload());
        let payload_len = payload.len() as u32;
        let rx = RxPacket { headers: &headers, payload_len, marked: frame.is_marked() };
        let mut view = HostView { qp_memory, registry, srqs, payload, packet: frame.bytes };
        // Discarded packets are counted by the queue pair.
        let _ = qp.handle_packet(now, &rx, &mut view);
        let may_hold = qp.has_selective_repeat();
        self.activate(index);
        self.post_process(now, index);
        if may_hold {
            self.handle_held(now, index);
        }
    }

    /// Follows every call into a queue pair: reports its completions and sets its timer.
    pub(super) fn post_process(&mut self, now: Instant, index: u32) {
        let has_events =
            |qpc: &Option<Box<QpContext>>| qpc.as_ref().is_some_and(|p| p.qp.has_events());
        if self.qpcs.get(index as usize).is_some_and(has_events) {
            self.report(now, index);
        }
        self.update_path(now, index);
        let Core { qpcs, timers, .. } = self;
        if let Some(Some(qpc)) = qpcs.get_mut(index as usize) {
            set_timer(qpc, timers, now, index);
        }
    }

    /// Writes the CQEs and publishes the asynchronous events of a queue pair.
    #[inline(never)]
    fn report(&mut self, now: Instant, index: u32) {
        let mut freed = false;
        // Data must be visible before the CQE.
        let staging_failed = !self.flush_staged();
        if let Some(Some(qpc)) = self.qpcs.get(index as usize)
            && qpc.qp.state() == State::Err
            && !qpc.failed
        {
            self.registry.reset_fault_state();
        }
        loop {
            let Some(Some(qpc)) = self.qpcs.get_mut(index as usize) else { return };
            let Some(event) = qpc.qp.poll_event() else { break };
            match event {
                ProtocolEvent::Sent(mut completion) => {
                    freed = true;
                    if staging_failed
                        && qpc.qp_memory.staged.get()
                        && completion.status == Status::Success
                    {
                        completion.status = Status::LocalProtection;
                    }
                    let cqe = complete::sent(qpc, &completion);
                    let cqn = qpc.send_cq;
                    if let Some(cqe) = cqe {
                        self.push(cqn, &cqe);
                    }
                }
                ProtocolEvent::Received(mut receive_completion) => {
                    if staging_failed
                        && qpc.qp_memory.staged.get()
                        && receive_completion.status == Status::Success
                    {
                        receive_completion.status = Status::LocalAccess;
                    }
                    qpc.qp_memory.end_receive(receive_completion.id);
                    let cqe = complete::received(qpc, &receive_completion);
                    let cqn = qpc.receive_cq;
                    let shared = match qpc.qp_memory.receives {
                        RecvSource::Srq(srqn) => Some(srqn),
                        RecvSource::Rq(_) => None,
                    };
                    self.push(cqn, &cqe);
                    if let Some(srqn) = shared {
                        self.check_limit(srqn);
                    }
                }
                ProtocolEvent::Async(qp_event) => self.publish(index, qp_event),
            }
        }
        let Some(Some(qpc)) = self.qpcs.get_mut(index as usize) else { return };
        if qpc.qp.state() == State::Err {
            qpc.publish(self.mapped.export_table.as_ref().ok());
            self.flush_receives(index);
        }
        // The state machine has room: take more from the send queue.
        if freed {
            self.take_work(now, index);
        }
    }

    fn publish(&self, index: u32, qp_event: QpEvent) {
        let qpn = self.qpn_of(index);
        self.async_events.publish(match qp_event {
            QpEvent::Established => AsyncEvent::Established { qpn },
            QpEvent::Drained => AsyncEvent::Drained { qpn },
            QpEvent::RequestError => AsyncEvent::RequestError { qpn },
            QpEvent::AccessError => AsyncEvent::AccessError { qpn },
            QpEvent::Fatal => AsyncEvent::Fatal { qpn },
        });
    }

    pub(super) fn push(&mut self, cqn: u32, cqe: &crate::mlx5::Cqe) {
        let Some(Some(cq)) = self.cqs.get_mut(cqn as usize) else { return };
        self.totals.completions += 1;
        // Data must be visible before the CQE, also in write-combining memory.
        self.registry.publish_all();
        if let Some(Err(overrun)) = cq.with_ring(|ring| ring.push(cqe)) {
            self.fail_cq(cqn, overrun);
        }
    }

    /// The same after a write to mapped host memory, whose stores need no flush.
    #[inline]
    pub(super) fn push_fast(&mut self, cqn: u32, sent: &crate::mlx5::SendCqe) {
        let Some(Some(cq)) = self.cqs.get_mut(cqn as usize) else { return };
        self.totals.completions += 1;
        if let Some(Err(overrun)) = cq.with_ring(|ring| ring.push_sent(sent)) {
            self.fail_cq(cqn, overrun);
        }
    }

    #[cold]
    fn fail_cq(&mut self, cqn: u32, overrun: Overrun) {
        if overrun.first {
            self.async_events.publish(AsyncEvent::CqOverrun { cqn });
        }
        // Later, too, if the first one was perhaps another engine's: each fails its own queue
        // pairs.
        if overrun.first || matches!(self.cqs.get(cqn as usize), Some(Some(CqSlot::Shared(_)))) {
            self.fail_users_of(cqn);
        }
    }

    /// Waits for staged data (write-behind through pinned memory). Returns false if a device lost
    /// some of it, which must not be acknowledged.
    #[inline]
    fn flush_staged(&mut self) -> bool {
        let losses = self.registry.flush_staged();
        losses == std::mem::replace(&mut self.losses_seen, losses) || self.fail_staged()
    }

    #[cold]
    fn fail_staged(&mut self) -> bool {
        for (index, qpc) in self.qpcs.iter_mut().enumerate() {
            let Some(qpc) = qpc.as_mut().filter(|qpc| qpc.qp_memory.staged.get()) else { continue };
            let _ = qpc.qp.modify(&QpAttributes::new(State::Err));
            self.doorbell_bitmap.ring(index as u32);
        }
        false
    }

    /// Fails the queue pairs of a completion queue that has overrun.
    #[cold]
    fn fail_users_of(&mut self, cqn: u32) {
        for (index, qpc) in self.qpcs.iter_mut().enumerate() {
            let Some(qpc) = qpc else { continue };
            let is_user = qpc.send_cq == cqn || qpc.receive_cq == cqn;
            if is_user && qpc.qp.state() != State::Err {
                let _ = qpc.qp.modify(&QpAttributes::new(State::Err));
                // The next service of the queue pair reports it.
                self.doorbell_bitmap.ring(index as u32);
            }
        }
    }

    /// Flushes all receives of a failed queue pair, in order.
    #[cold]
    fn flush_receives(&mut self, index: u32) {
        loop {
            let Some(Some(qpc)) = self.qpcs.get_mut(index as usize) else { return };
            let first = !std::mem::replace(&mut qpc.failed, true);
            match &mut qpc.qp_memory.receives {
                RecvSource::Rq(ring) => {
                    let Some(taken) = ring.take() else { return };
                    let cqe = complete::flushed(qpc, taken.counter);
                    let cqn = qpc.receive_cq;
                    self.push(cqn, &cqe);
                }
                RecvSource::Srq(_) => {
                    if first {
                        let qpn = self.qpn_of(index);
                        self.async_events.publish(AsyncEvent::LastReceiveReached { qpn });
                    }
                    return;
                }
            }
        }
    }

    fn check_limit(&mut self, srqn: u32) {
        let Some(Some(srq)) = self.srqs.get(srqn as usize) else { return };
        let Some(limit_slot) = self.srq_limits.get_mut(srqn as usize) else { return };
        if limit_slot.is_some_and(|limit| srq.waiting() < limit) {
            *limit_slot = None; // reported once, until the limit is armed again
            self.async_events.publish(AsyncEvent::LimitReached { srqn });
        }
    }

    fn poll_doorbells(&mut self, now: Instant) {
        // Each queue pair that still is in such a state rings for itself and sets these again.
        (self.blocked, self.wqe_missing, self.has_more_work) = (false, false, false);
        self.waits_for_others = false;
        let mut rung_scratch = std::mem::take(&mut self.rung_scratch);
        self.doorbell_bitmap.take(|index| rung_scratch.push(index));
        for index in rung_scratch.drain(..) {
            self.service_qp(now, index);
        }
        self.rung_scratch = rung_scratch;
        for at in 0..self.poll_doorbell.len() {
            let index = self.poll_doorbell[at];
            self.service_qp(now, index);
        }
    }

    /// Whether a polled doorbell has been rung; cheaper than a step.
    pub(super) fn any_doorbell_rung(&mut self) -> bool {
        let Self { poll_doorbell, qpcs, .. } = self;
        poll_doorbell.iter().any(|index| match qpcs.get_mut(*index as usize) {
            Some(Some(qpc)) => qpc.qp_memory.ring.refresh(),
            _ => false,
        })
    }

    pub(super) fn service_qp(&mut self, now: Instant, index: u32) {
        let Some(Some(qpc)) = self.qpcs.get_mut(index as usize) else { return };
        let is_blocked = qpc.wait.is_some()
            || qpc.qp_memory.ring.is_wqe_missing()
            || qpc.direct.blocked.is_some();
        if qpc.qp_memory.ring.refresh() || is_blocked {
            self.take_work(now, index);
        }
        let Some(Some(qpc)) = self.qpcs.get_mut(index as usize) else { return };
        if qpc.qp.state() == State::Err {
            // Work posted in the error state is flushed immediately.
            self.report(now, index);
        }
    }

    /// Posts the WQEs of the send queue.
    fn take_work(&mut self, now: Instant, index: u32) {
        let Some(Some(qpc)) = self.qpcs.get_mut(index as usize) else { return };
        if !matches!(qpc.qp.state(), State::Rts | State::Sqd | State::Sqe | State::Err) {
            return;
        }
        let (mut budget, before) = (QUANTUM, qpc.qp.outstanding());
        let outcome = loop {
            let Core { qpcs, cqs, registry, mapped, totals, .. } = &mut *self;
            let Some(Some(qpc)) = qpcs.get_mut(index as usize) else { return };
            let produced = |cqn| cqs.get(cqn as usize)?.as_ref().map(CqSlot::produced);
            match qpc.take_work(now, registry, produced, mapped, &mut budget) {
                TakeOutcome::Direct(work) => {
                    self.complete_direct(index, &work, work.len.into());
                }
                TakeOutcome::Packets(why) => {
                    totals.count_indirect(why);
                    self.check_direct_peer(index);
                }
                outcome @ (TakeOutcome::All | TakeOutcome::BudgetSpent) => break outcome,
            }
        };
        let Some(Some(qpc)) = self.qpcs.get_mut(index as usize) else { return };
        let (blocked, wqe_missing) = (qpc.wait.is_some(), qpc.qp_memory.ring.is_wqe_missing());
        if let Some((wait, _)) = &qpc.wait
            && let Some(Some(cq)) = self.cqs.get(wait.cqn as usize)
        {
            self.waits_for_others |= cq.has_other_writers();
        }
        let (more, posted_any) =
            (outcome == TakeOutcome::BudgetSpent, qpc.qp.outstanding() != before);
        self.blocked |= blocked;
        self.wqe_missing |= wqe_missing;
        self.has_more_work |= more;
        if blocked || wqe_missing || more {
            // No doorbell is rung for that: look again in the next step.
            self.doorbell_bitmap.ring(index);
        }
        if posted_any {
            self.activate(index);
        }
    }

    /// The link has no room for what a queue pair has to send, and flushing it made none.
    #[cold]
    fn on_link_full(&mut self, now: Instant, index: u32) {
        let Some(Some(qpc)) = self.qpcs.get_mut(index as usize) else { return };
        if let Protocol::Connected(qp) = &mut qpc.qp {
            qp.on_link_full(now);
            set_timer(qpc, &mut self.timers, now, index);
        }
    }

    fn run_timers(&mut self, now: Instant) {
        while let Some(Reverse((when, index))) = self.timers.peek().copied() {
            if when > now {
                return;
            }
            self.timers.pop();
            let Some(Some(qpc)) = self.qpcs.get_mut(index as usize) else { continue };
            if qpc.timer > when {
                continue; // the timer was set again since
            }
            qpc.timer = Instant::NEVER;
            qpc.qp.handle_timeout(now);
            self.activate(index);
            self.post_process(now, index);
        }
    }

    pub(super) fn activate(&mut self, index: u32) {
        let Some(Some(qpc)) = self.qpcs.get_mut(index as usize) else { return };
        if !std::mem::replace(&mut qpc.active, true) {
            self.active.push_back(index);
        }
    }

    /// Appends a queue pair that was served and has more to send.
    fn requeue(&mut self, index: u32) {
        if self.qpcs.get(index as usize).is_some_and(Option::is_some) {
            self.active.push_back(index);
        }
    }

    /// A slot for a new queue pair. Used slots are taken last, oldest first, and only if several
    /// are free: QP numbers repeat, and late packets must not reach the next user of a number.
    fn alloc_slot(&mut self) -> Option<u32> {
        let made = self.qpcs.len();
        let is_full = made as u32 >= self.numbering.max_qps();
        if self.free.len() >= self.numbering.min_free() || is_full {
            return self.free.pop_front();
        }
        self.qpcs.push(None);
        Some(made as u32)
    }

    fn lookup_qpn(&self, number: u32) -> Option<u32> {
        let index = self.numbering.index(number);
        let generation = *self.generations.get(index as usize)?;
        (self.numbering.number(index, generation) == number).then_some(index)
    }

    pub(super) fn qpn_of(&self, index: u32) -> u32 {
        let generation = self.generations.get(index as usize);
        generation.map_or(0, |generation| self.numbering.number(index, *generation))
    }
}

/// Whether a packet from `from` is the peer's. A peer on port 4791 that did not say which port it
/// sends from may use any: NICs, and Linux's soft-RoCE (rxe), use one per queue pair, not always
/// from the range that the standard has for it. Only their IP address can be checked; the rest is
/// left to the sequence number.
fn is_from(path: &PathAttributes, from: SocketAddr) -> bool {
    let PathAttributes { peer, source_port, .. } = *path;
    peer.ip() == from.ip()
        && match source_port {
            Some(port) => port == from.port(),
            None => peer.port() == UDP_PORT || peer.port() == from.port(),
        }
}

/// Puts a queue pair into the timer heap if it needs an earlier deadline than it has.
fn set_timer(
    qpc: &mut QpContext,
    timers: &mut BinaryHeap<Reverse<(Instant, u32)>>,
    now: Instant,
    index: u32,
) {
    let mut deadline = qpc.qp.poll_timeout(now);
    if std::mem::take(&mut qpc.qp_memory.retry_soon) {
        deadline = deadline.min(now + RETRY_DELAY);
    }
    if deadline < qpc.timer {
        qpc.timer = deadline;
        timers.push(Reverse((deadline, index)));
    }
}
