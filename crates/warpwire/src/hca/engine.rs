//! The engine: one step looks at doorbells and timers, sends what is due, and takes what came in.
//!
//! Nothing is allocated, locked or formatted for a packet. The engine's own lock is taken for a whole step, by
//! whoever drives it; control calls take it too.

mod control;
mod datagram;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use warpwire_proto::Instant;
use warpwire_proto::qp::{
    Arrived, Change, Event, Notice, Payload, Source, State, Status as WireStatus, Transmit,
};
use warpwire_proto::wire::packet::{BTH_LEN, ICRC_LEN};
use warpwire_proto::wire::{Transport, UDP_PORT};

use super::complete;
use super::cq::CompletionRing;
use super::direct::TURN;
use super::event::{AsyncEvent, News};
use super::host::{Body, View};
use super::pair::{Pair, Receives, Took};
use super::partner::Partners;
use super::protocol::Protocol;
use super::ring::{NOT_THERE_YET, SharedRing};
use super::rung::Rung;
use super::stats::{Lost, Totals};
use crate::error::Result;
use crate::link::{Arrival, FlowId, Frame, Link, Offer, Rest, Unread, WORTH_LENDING};
use crate::mr::{Denied, Registry};
use datagram::Destinations;

/// How many packets a queue pair may send before another has its turn, and how many bytes.
const BUDGET: usize = 32;
const BUDGET_BYTES: usize = 128 << 10;
/// As many packets in one step: the link may hold more, and timers wait for these, for at most
/// [`MOST_POSTPONED`] steps.
const MORE_MAY_WAIT: usize = 32;
const MOST_POSTPONED: u32 = 16;
/// How soon to come back to memory that was not there.
const COME_BACK: Duration = Duration::from_micros(20);

/// Everything that a step needs.
pub(super) struct Engine {
    pub(super) link: Box<dyn Link>,
    /// Nobody makes a next step if the program does not: what came in is answered in the same.
    answers_at_once: bool,
    pub(super) core: Core,
}

/// All but the link, which lends its buffers while the rest works on them.
pub(super) struct Core {
    pub registry: Registry,
    pub pairs: Vec<Option<Box<Pair>>>,
    /// Places that were used and are free, the one that has been free for longest first.
    free: VecDeque<u32>,
    /// How often each place has been used: part of the number, so that late packets find nobody.
    generations: Vec<u8>,
    pub cqs: Vec<Option<CompletionRing>>,
    pub srqs: Vec<Option<SharedRing>>,
    srq_limits: Vec<Option<u32>>,
    /// Whom datagrams may go to.
    destinations: Destinations,
    /// Queue pairs that may have something to send, in turn.
    active: VecDeque<u32>,
    timers: BinaryHeap<Reverse<(Instant, u32)>>,
    /// Steps in a row in which timers were not looked at.
    postponed: u32,
    /// Those whose doorbells are rung by others than our CPU.
    watched: Vec<u32>,
    pub news: Arc<News>,
    pub rung: Arc<Rung>,
    /// Those that were rung, while they are looked at; kept for its room.
    looked_at: Vec<u32>,
    /// A queue pair stands still until some completion is made.
    held: bool,
    /// An entry was promised and is not there yet.
    missing: bool,
    /// A queue pair's turn was over before its work was.
    goes_on: bool,
    /// What peers of this machine may reach by themselves; or why they may not.
    pub offer: std::result::Result<Arc<Offer>, &'static str>,
    /// Whose memory we reach by ourselves.
    pub partners: Partners,
    /// A partner's connection has ended.
    pub parted: bool,
    /// There is one, for those who ring.
    pub reaches: Arc<AtomicBool>,
    /// When the last step was made.
    pub last: Instant,
    pub totals: Totals,
}

/// Queue pair numbers begin here: the first few mean something in InfiniBand.
const FIRST_NUMBER: u32 = 0x10;
/// So many places are free before one of them is used again.
const ENOUGH_FREE: usize = 256;
/// How many queue pairs an engine may have.
pub(super) const MOST_PAIRS: u32 = 1 << 16;

/// What a step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Progress {
    /// Packets that came in.
    pub received: usize,
    /// Packets that went out.
    pub sent: usize,
    /// Operations that were done without packets.
    pub direct: usize,
    /// Something is left to do at once.
    pub more: bool,
}

impl Progress {
    /// Whether it did nothing, and nothing is left.
    pub fn is_idle(&self) -> bool {
        self.received == 0 && self.sent == 0 && self.direct == 0 && !self.more
    }
}

impl Engine {
    pub(super) fn new(
        link: Box<dyn Link>,
        registry: Registry,
        news: Arc<News>,
        rung: Arc<Rung>,
        answers_at_once: bool,
        offer: std::result::Result<Arc<Offer>, &'static str>,
    ) -> Self {
        let core = Core {
            registry,
            pairs: Vec::new(),
            free: VecDeque::new(),
            generations: Vec::new(),
            cqs: Vec::new(),
            srqs: Vec::new(),
            srq_limits: Vec::new(),
            destinations: Destinations::default(),
            active: VecDeque::new(),
            timers: BinaryHeap::new(),
            postponed: 0,
            watched: Vec::new(),
            news,
            rung,
            looked_at: Vec::new(),
            held: false,
            missing: false,
            goes_on: false,
            offer,
            partners: Partners::default(),
            parted: false,
            reaches: Arc::default(),
            last: Instant::from_nanos(0),
            totals: Totals::default(),
        };
        Self { link, answers_at_once, core }
    }

    pub(super) fn link(&self) -> &dyn Link {
        &*self.link
    }

    /// One step: doorbells, out, in, timers. What just came in is answered in the next: whoever waits for it sees it
    /// first, and what he has to say to it goes out together with its acknowledgement.
    pub(super) fn step(&mut self, now: Instant) -> Result<Progress> {
        if self.core.parted {
            self.find_partners();
        }
        let core = &mut self.core;
        core.last = now;
        let (told, direct) = (core.totals.completions, core.totals.direct_operations);
        core.look_at_doorbells(now);
        let mut sent = self.transmit(now)?;
        let core = &mut self.core;
        let received = self.link.receive_unread(&mut |arrival| match arrival {
            Arrival::Read(frame) => core.arrive(now, &frame, None),
            Arrival::Unread(Unread { head, len, rest }) => {
                core.arrive(now, &head, Some((rest, len)))
            }
        })?;
        // Nothing is acknowledged that is not in its place.
        core.settle();
        // Timers last: after a pause, answers that lie in the link are taken before they are called
        // missing (no spurious retransmission).
        if received < MORE_MAY_WAIT || core.postponed == MOST_POSTPONED {
            core.postponed = 0;
            core.run_timers(now);
        } else {
            core.postponed += 1;
        }
        if received > 0 && self.answers_at_once {
            sent += self.transmit(now)?;
        }
        let core = &self.core;
        // Completions that were made since the doorbells were looked at may be what somebody waits for.
        let held = core.held && core.totals.completions != told;
        let more = !core.active.is_empty() || core.goes_on || held;
        let direct = (core.totals.direct_operations - direct) as usize;
        Ok(Progress { received, sent, direct, more })
    }

    /// When the next step is due if nothing happens.
    pub(super) fn next_deadline(&self, now: Instant) -> Instant {
        let timer = self.core.timers.peek().map_or(Instant::NEVER, |Reverse((when, _))| *when);
        let link = self.link.wakes_in().map_or(Instant::NEVER, |wait| now + wait);
        let missing = if self.core.missing { now + NOT_THERE_YET } else { Instant::NEVER };
        timer.min(link).min(missing)
    }

    fn transmit(&mut self, now: Instant) -> Result<usize> {
        let mut sent = 0;
        // Each that is in the list now has one turn.
        for _ in 0..self.core.active.len() {
            let Some(index) = self.core.active.pop_front() else { break };
            let (count, outcome) = self.transmit_one(now, index);
            sent += count;
            match outcome {
                Turn::Done => {}
                Turn::More => self.core.requeue(index),
                Turn::LinkFull => {
                    let left = self.link.flush()?;
                    self.core.requeue(index);
                    // Nobody has room; the next in the list is the first to try again, and learns of it then.
                    if left.waiting > 0 {
                        return Ok(sent);
                    }
                    // Or its own peer has none: others do not wait for that.
                }
            }
        }
        self.link.flush()?;
        Ok(sent)
    }

    fn transmit_one(&mut self, now: Instant, index: u32) -> (usize, Turn) {
        let Core { pairs, registry, srqs, totals, .. } = &mut self.core;
        let Some(Some(pair)) = pairs.get_mut(index as usize) else { return (0, Turn::Done) };
        let Pair { qp: Protocol::Connected(qp), side, flow, active, .. } = &mut **pair else {
            return self.transmit_datagrams(now, index);
        };
        let Some(flow) = *flow else {
            *active = false;
            return (0, Turn::Done);
        };
        let room = qp.mtu().bytes() as usize + LONGEST_AROUND;
        let (mut count, mut bytes, mut packet) = (0, 0, Transmit::new());
        let turn = loop {
            if count == BUDGET || bytes >= BUDGET_BYTES {
                break Turn::More;
            }
            match self.link.reserve(flow, room.min(self.link.largest())) {
                Ok(_) => {}
                Err(crate::link::Refused::Full) => {
                    qp.held_up(now);
                    break Turn::LinkFull;
                }
                Err(_) => {
                    totals.lose(Lost::NoFlow);
                    break Turn::Done;
                }
            }
            let mut view = View { side, registry, srqs, payload: Body::NONE };
            if !qp.transmit_into(now, &mut view, &mut packet) {
                break Turn::Done;
            }
            let len = packet.payload.map_or(0, |payload| payload.len as usize);
            let wire_len = packet.headers.wire_len(len);
            if len >= WORTH_LENDING
                && lend(&mut *self.link, flow, side, registry, &packet).is_some()
            {
                count += 1;
                bytes += wire_len;
                continue;
            }
            let Ok(slot) = self.link.reserve(flow, wire_len) else {
                totals.lose(Lost::TooLong);
                continue;
            };
            let Some(at) = packet.headers.emit(slot, len) else { continue };
            // Memory that went away since it was looked at.
            let part = &mut slot[at..at + len];
            if let Some(payload) = packet.payload
                && let Err(denied) = gather(side, registry, payload, part)
            {
                totals.lose(Lost::MemoryGone);
                // Where the next look sees it too, the packet is made again then. Where a copy fails for another
                // reason it is lost, and tries are spent on it, so that it fails in the end.
                if denied.passes() || denied == Denied::Gone {
                    qp.take_back(&packet);
                    side.later = true;
                    break Turn::Done;
                }
                continue;
            }
            self.link.commit();
            count += 1;
            bytes += wire_len;
        };
        if matches!(turn, Turn::Done) {
            *active = false;
        }
        if std::mem::take(&mut side.concludes) {
            registry.conclude();
        }
        self.core.after(now, index);
        (count, turn)
    }
}

/// How a queue pair's turn to send ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Turn {
    Done,
    More,
    LinkFull,
}

/// The most that stands around a payload: a write's headers with immediate, and the ICRC. An MTU needs no pad.
pub(super) const LONGEST_AROUND: usize = BTH_LEN + 20 + ICRC_LEN;

/// Sends a packet with its payload where that lies, if it is one piece of the host's memory, and the link can do that.
#[inline(never)]
fn lend(
    link: &mut dyn Link,
    flow: FlowId,
    side: &super::pair::Side,
    registry: &Registry,
    packet: &Transmit,
) -> Option<()> {
    let Payload { from, len } = packet.payload?;
    // Held while the link works on it: the memory stays.
    let span = side.single_span(registry, from, len)?;
    let bytes = span.host_bytes()?;
    let slot = link.reserve(flow, packet.headers.wire_len(len as usize)).ok()?;
    let headers = packet.headers.emit(slot, len as usize)?;
    link.commit_lent(headers, &bytes).then_some(())
}

fn gather(
    side: &mut super::pair::Side,
    registry: &Registry,
    payload: Payload,
    into: &mut [u8],
) -> std::result::Result<(), crate::mr::Denied> {
    match payload.from {
        Source::Work { id, offset } => side.gather(registry, id, offset, into),
        Source::Remote { at, left, request } => {
            side.gather_for_peer(registry, at, left, request, into)
        }
    }
}

impl Core {
    /// A packet came; or its beginning, and the link has the rest of it: so many bytes in all.
    fn arrive(&mut self, now: Instant, frame: &Frame<'_>, rest: Option<(&mut dyn Rest, usize)>) {
        let transport = match Transport::new_checked(frame.bytes) {
            Ok(transport) => transport,
            Err(_) => return self.totals.lose(Lost::Malformed),
        };
        let number = transport.destination_qp();
        let Some(index) = self.index_of(number) else {
            return self.totals.lose(Lost::NoQueuePair);
        };
        let Core { pairs, registry, srqs, totals, .. } = self;
        let Some(Some(pair)) = pairs.get_mut(index as usize) else {
            return totals.lose(Lost::NoQueuePair);
        };
        let Pair { qp: Protocol::Connected(qp), side, .. } = &mut **pair else {
            let Some((rest, _)) = rest else {
                return self.arrive_datagram(now, index, &transport, frame);
            };
            // A route goes with it, to the same place: it is read first.
            if let Some(bytes) = rest.read() {
                self.arrive(now, &Frame { bytes, ..*frame }, None);
            }
            return;
        };
        if !qp.path().is_some_and(|path| is_from(path.peer, frame.from)) {
            return totals.lose(Lost::Stranger);
        }
        totals.packets_received += 1;
        let headers = transport.headers();
        let payload = transport.payload();
        let (payload, payload_len) = match rest {
            None => (Body::Here(payload), payload.len()),
            Some((rest, len)) => {
                let unread = len.saturating_sub(frame.bytes.len());
                (Body::Unread { rest, headers: headers.len() }, payload.len() + unread)
            }
        };
        let arrived =
            Arrived { headers: &headers, payload_len: payload_len as u32, marked: frame.marked };
        let mut view = View { side, registry, srqs, payload };
        // Counted by the queue pair itself.
        let _ = qp.handle_packet(now, &arrived, &mut view);
        self.activate(index);
        self.after(now, index);
    }

    /// What follows every call of a queue pair: completions, a place in the heap of timers.
    fn after(&mut self, now: Instant, index: u32) {
        let has_events =
            |pair: &Option<Box<Pair>>| pair.as_ref().is_some_and(|p| p.qp.has_events());
        if self.pairs.get(index as usize).is_some_and(has_events) {
            self.report(now, index);
        }
        let Core { pairs, timers, .. } = self;
        if let Some(Some(pair)) = pairs.get_mut(index as usize) {
            set_timer(pair, timers, now, index);
        }
    }

    /// Tells the completion queues and the news what happened.
    #[inline(never)]
    fn report(&mut self, now: Instant, index: u32) {
        let mut freed = false;
        // Data before the completion that tells of it.
        let lost = !self.settle();
        if let Some(Some(pair)) = self.pairs.get(index as usize)
            && pair.qp.state() == State::Err
            && !pair.failed
        {
            self.registry.conclude();
        }
        loop {
            let Some(Some(pair)) = self.pairs.get_mut(index as usize) else { return };
            let Some(event) = pair.qp.poll_event() else { break };
            match event {
                Event::Sent(mut completion) => {
                    freed = true;
                    if lost && pair.side.staged.get() && completion.status == WireStatus::Success {
                        completion.status = WireStatus::LocalProtection;
                    }
                    let cqe = complete::sent(pair, &completion);
                    let cqn = pair.send_cq;
                    if let Some(cqe) = cqe {
                        self.push(cqn, &cqe);
                    }
                }
                Event::Received(mut receipt) => {
                    if lost && pair.side.staged.get() && receipt.status == WireStatus::Success {
                        receipt.status = WireStatus::LocalAccess;
                    }
                    pair.side.end_receive(receipt.id);
                    let cqe = complete::received(pair, &receipt);
                    let cqn = pair.receive_cq;
                    let shared = match pair.side.receives {
                        Receives::Shared(srqn) => Some(srqn),
                        Receives::Own(_) => None,
                    };
                    self.push(cqn, &cqe);
                    if let Some(srqn) = shared {
                        self.check_limit(srqn);
                    }
                }
                Event::Notice(notice) => self.tell(index, notice),
            }
        }
        let Some(Some(pair)) = self.pairs.get_mut(index as usize) else { return };
        if pair.qp.state() == State::Err {
            pair.tell(self.offer.as_ref().ok());
            self.flush_receives(index);
        }
        // Room in the state machine: more of the send queue fits.
        if freed {
            self.take_work(now, index);
        }
    }

    fn tell(&self, index: u32, notice: Notice) {
        let qpn = self.number_of(index);
        self.news.tell(match notice {
            Notice::Established => AsyncEvent::Established { qpn },
            Notice::Drained => AsyncEvent::Drained { qpn },
            Notice::RequestError => AsyncEvent::RequestError { qpn },
            Notice::AccessError => AsyncEvent::AccessError { qpn },
            Notice::Fatal => AsyncEvent::Fatal { qpn },
        });
    }

    pub(super) fn push(&mut self, cqn: u32, cqe: &crate::mlx5::Cqe) {
        let Some(Some(cq)) = self.cqs.get_mut(cqn as usize) else { return };
        self.totals.completions += 1;
        // Data before the completion that tells of it, also where stores are combined.
        self.registry.publish_all();
        if cq.push(cqe).is_err() {
            self.lose_cq(cqn);
        }
    }

    /// The same, of a write into mapped host memory, whose stores nothing holds back.
    #[inline]
    pub(super) fn push_at_once(&mut self, cqn: u32, sent: &crate::mlx5::Sent) {
        let Some(Some(cq)) = self.cqs.get_mut(cqn as usize) else { return };
        self.totals.completions += 1;
        if cq.push_sent(sent).is_err() {
            self.lose_cq(cqn);
        }
    }

    #[cold]
    fn lose_cq(&mut self, cqn: u32) {
        self.news.tell(AsyncEvent::CqOverrun { cqn });
        self.fail_users_of(cqn);
    }

    /// Waits for data that goes through pinned memory. What a device lost on the way must not be acknowledged.
    #[inline]
    fn settle(&mut self) -> bool {
        self.registry.settle() || self.fail_staged()
    }

    #[cold]
    fn fail_staged(&mut self) -> bool {
        for (index, pair) in self.pairs.iter_mut().enumerate() {
            let Some(pair) = pair.as_mut().filter(|pair| pair.side.staged.get()) else { continue };
            let _ = pair.qp.modify(&Change::to(State::Err));
            self.rung.ring(index as u32);
        }
        false
    }

    /// A completion queue is lost: so are the queue pairs that use it.
    #[cold]
    fn fail_users_of(&mut self, cqn: u32) {
        for (index, pair) in self.pairs.iter_mut().enumerate() {
            let Some(pair) = pair else { continue };
            if pair.send_cq == cqn || pair.receive_cq == cqn {
                let _ = pair.qp.modify(&Change::to(State::Err));
                // What it has to say is said when it is looked at next.
                self.rung.ring(index as u32);
            }
        }
    }

    /// All receives of a queue pair that failed come back, in order.
    #[cold]
    fn flush_receives(&mut self, index: u32) {
        loop {
            let Some(Some(pair)) = self.pairs.get_mut(index as usize) else { return };
            let first = !std::mem::replace(&mut pair.failed, true);
            match &mut pair.side.receives {
                Receives::Own(ring) => {
                    let Some(taken) = ring.take() else { return };
                    let cqe = complete::flushed(pair, taken.counter);
                    let cqn = pair.receive_cq;
                    self.push(cqn, &cqe);
                }
                Receives::Shared(_) => {
                    if first {
                        let qpn = self.number_of(index);
                        self.news.tell(AsyncEvent::LastReceiveReached { qpn });
                    }
                    return;
                }
            }
        }
    }

    fn check_limit(&mut self, srqn: u32) {
        let Some(Some(srq)) = self.srqs.get(srqn as usize) else { return };
        let Some(place) = self.srq_limits.get_mut(srqn as usize) else { return };
        if place.is_some_and(|limit| srq.waiting() < limit) {
            *place = None; // once, then it must be set again
            self.news.tell(AsyncEvent::LimitReached { srqn });
        }
    }

    fn look_at_doorbells(&mut self, now: Instant) {
        // Set again by those who still are, as each of them rings for itself.
        (self.held, self.missing, self.goes_on) = (false, false, false);
        let mut looked_at = std::mem::take(&mut self.looked_at);
        self.rung.take(|index| looked_at.push(index));
        for index in looked_at.drain(..) {
            self.look_at(now, index);
        }
        self.looked_at = looked_at;
        for at in 0..self.watched.len() {
            let index = self.watched[at];
            self.look_at(now, index);
        }
    }

    /// Whether a doorbell that is watched has been rung: told without a step.
    pub(super) fn is_rung(&mut self) -> bool {
        let Self { watched, pairs, .. } = self;
        watched.iter().any(|index| match pairs.get_mut(*index as usize) {
            Some(Some(pair)) => pair.side.ring.look(),
            _ => false,
        })
    }

    pub(super) fn look_at(&mut self, now: Instant, index: u32) {
        let Some(Some(pair)) = self.pairs.get_mut(index as usize) else { return };
        let waits = pair.wait.is_some() || pair.side.ring.is_waiting() || pair.reach.held.is_some();
        if pair.side.ring.look() || waits {
            self.take_work(now, index);
        }
        let Some(Some(pair)) = self.pairs.get_mut(index as usize) else { return };
        if pair.qp.state() == State::Err {
            // Whatever is posted now comes back at once.
            self.report(now, index);
        }
    }

    /// Posts what lies in the send queue.
    fn take_work(&mut self, now: Instant, index: u32) {
        let Some(Some(pair)) = self.pairs.get_mut(index as usize) else { return };
        if !matches!(pair.qp.state(), State::Rts | State::Sqd | State::Sqe | State::Err) {
            return;
        }
        let (mut turn, before) = (TURN, pair.qp.outstanding());
        let took = loop {
            let Core { pairs, cqs, registry, partners, totals, .. } = &mut *self;
            let Some(Some(pair)) = pairs.get_mut(index as usize) else { return };
            let produced = |cqn| cqs.get(cqn as usize)?.as_ref().map(CompletionRing::produced);
            match pair.take_work(now, registry, produced, partners, &mut turn) {
                Took::Direct(work) => self.complete_direct(index, &work),
                Took::Packets(why) => {
                    totals.went_by_packets(why);
                    self.look_for_partner(index);
                }
                took @ (Took::All | Took::Turn) => break took,
            }
        };
        let Some(Some(pair)) = self.pairs.get_mut(index as usize) else { return };
        let (held, missing) = (pair.wait.is_some(), pair.side.ring.is_waiting());
        let (more, begun) = (took == Took::Turn, pair.qp.outstanding() != before);
        self.held |= held;
        self.missing |= missing;
        self.goes_on |= more;
        if held || missing || more {
            // Nobody rings for that: look again at the next step.
            self.rung.ring(index);
        }
        if begun {
            self.activate(index);
        }
    }

    fn run_timers(&mut self, now: Instant) {
        while let Some(Reverse((when, index))) = self.timers.peek().copied() {
            if when > now {
                return;
            }
            self.timers.pop();
            let Some(Some(pair)) = self.pairs.get_mut(index as usize) else { continue };
            if pair.timer > when {
                continue; // it was set anew since
            }
            pair.timer = Instant::NEVER;
            pair.qp.handle_timeout(now);
            self.activate(index);
            self.after(now, index);
        }
    }

    pub(super) fn activate(&mut self, index: u32) {
        let Some(Some(pair)) = self.pairs.get_mut(index as usize) else { return };
        if !std::mem::replace(&mut pair.active, true) {
            self.active.push_back(index);
        }
    }

    /// Puts one that had its turn and is not done at the end of the list.
    fn requeue(&mut self, index: u32) {
        if self.pairs.get(index as usize).is_some_and(Option::is_some) {
            self.active.push_back(index);
        }
    }

    /// A place for a queue pair. One that was used before comes last, and only when several are free: its number
    /// comes again after it has had 256 queue pairs, and late packets must not find one of them.
    fn free_place(&mut self) -> Option<u32> {
        let made = self.pairs.len();
        let is_full = made as u32 >= MOST_PAIRS - FIRST_NUMBER;
        if self.free.len() >= ENOUGH_FREE || is_full {
            return self.free.pop_front();
        }
        self.pairs.push(None);
        Some(made as u32)
    }

    fn index_of(&self, number: u32) -> Option<u32> {
        let index = (number & (MOST_PAIRS - 1)).checked_sub(FIRST_NUMBER)?;
        let generation = *self.generations.get(index as usize)?;
        (u32::from(generation) == number >> 16).then_some(index)
    }

    pub(super) fn number_of(&self, index: u32) -> u32 {
        let generation = self.generations.get(index as usize).copied().unwrap_or(0);
        u32::from(generation) << 16 | (index + FIRST_NUMBER)
    }
}

/// The place of the queue pair with that number; any number gives one.
#[inline]
pub(super) fn place_of(number: u32) -> u32 {
    (number & (MOST_PAIRS - 1)).wrapping_sub(FIRST_NUMBER)
}

/// Whether a packet from `from` is the peer's. Port 4791 is everybody's: those who listen there (NICs, and Linux's
/// soft-RoCE) send from any port, not the same for all queue pairs, and not all of them from the range that the
/// standard has for it. Their IP address is all that can be asked for; the rest is the sequence number's business.
fn is_from(peer: SocketAddr, from: SocketAddr) -> bool {
    peer.ip() == from.ip() && (peer.port() == UDP_PORT || peer.port() == from.port())
}

/// Puts a queue pair into the heap if it wants to be woken earlier than it would be.
fn set_timer(
    pair: &mut Pair,
    timers: &mut BinaryHeap<Reverse<(Instant, u32)>>,
    now: Instant,
    index: u32,
) {
    let mut deadline = pair.qp.poll_timeout(now);
    if std::mem::take(&mut pair.side.later) {
        deadline = deadline.min(now + COME_BACK);
    }
    if deadline < pair.timer {
        pair.timer = deadline;
        timers.push(Reverse((deadline, index)));
    }
}
