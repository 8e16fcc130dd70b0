//! The requester: turns posted work into request packets, and goes back to the first unacknowledged
//! one when a response is missing (go-back-N), or sends what is missing again (`selective`).
//!
//! ```text
//!            reported      tail         current      started        posted
//!  ring  ───────┼───────────┼─────────────┼────────────┼──────────────┼───▶
//!    reported   │ done, to  │ waiting for │ to be sent │ not started  │ free
//!    to host    │ report    │ responses   │ again      │ yet          │
//!  PSNs                   unacked        next        unsent
//! ```
//!
//! Going back always restarts at `unacked`: everything before it is acknowledged, so `current`
//! becomes `tail`. A read is split into requests of at most `read_chunk` packets; that bounds how
//! much the peer sends in one go, and lets a read that lost a packet resume from there.

use alloc::boxed::Box;
use alloc::vec;

use super::attr::Mtu;
use super::host::{Host, HostStatus, Remote, Source};
use super::rto::RtoEstimator;
use super::selective::Recovery;
use super::work::{Fence, SendCompletion, SendOp, SendQueueError, SendWr, Status};
use super::{Payload, Stats, Transmit};
use crate::congestion::PathSignals;
use crate::psn::Psn;
use crate::time::Instant;
use crate::wire::ext::Reth;
use crate::wire::{Extension, Headers, Opcode};

/// Maximum message length in bytes.
pub(super) const MAX_MESSAGE_LEN: u32 = 1 << 31;

/// The connection's attributes that the requester uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnParams {
    pub destination: u32,
    pub mtu: Mtu,
    /// The longest wait between two transmissions of a packet, in nanoseconds; `None` means
    /// forever. Silence of `retry_count` + 1 times as long fails the queue pair.
    pub timeout: Option<u64>,
    pub max_rd_atomic: u32,
    /// Maximum of unacknowledged packets of up to 4096 bytes.
    pub window: u32,
    /// The same for packets of full MTU.
    pub full_mtu_window: u32,
    /// Maximum of packets that one read request may cover.
    pub read_chunk: u32,
}

impl ConnParams {
    /// Whether `packets` unacknowledged packets fill the window for one more of a message of `len`
    /// bytes. For payloads beyond RoCE's maximum the window is smaller: buffers on the path fill by
    /// bytes.
    #[inline(always)] // usually a single comparison
    fn window_full(&self, packets: u32, len: u32) -> bool {
        packets >= self.full_mtu_window && self.window_full_for(packets, len)
    }

    fn window_full_for(&self, packets: u32, len: u32) -> bool {
        packets >= scale_to_payload(self.window, len.min(self.mtu.bytes()))
    }
}

/// Maximum payload of a RoCE packet in bytes.
const MAX_ROCE_PAYLOAD: u32 = 4096;

/// Converts a number of packets of RoCE's maximum payload to packets of `len` bytes: at least one.
pub(super) fn scale_to_payload(packets: u32, len: u32) -> u32 {
    match len {
        0..=MAX_ROCE_PAYLOAD => packets,
        _ => (packets / len.div_ceil(MAX_ROCE_PAYLOAD)).max(1),
    }
}

/// Converts a number of packets of RoCE's maximum payload to packets of a smaller MTU. Without
/// selective repeat it is not done: a loss costs what is in flight.
pub(super) fn scale_to_mtu(packets: u32, mtu: Mtu) -> u32 {
    packets.saturating_mul((MAX_ROCE_PAYLOAD / mtu.bytes()).max(1))
}

/// Packets without a request for an acknowledgement, at most.
const MAX_UNREQUESTED: u32 = 64;

/// Packets that may be sent on a new connection before the first response: it may say that the peer
/// has no receive, or is not there.
const INITIAL_WINDOW: u32 = 16;

/// Work in the ring, with the PSNs that it got when it was started.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub work: SendWr,
    pub first: Psn,
    pub packets: u32,
}

impl Entry {
    const EMPTY: Self =
        Self { work: SendWr::new(0, SendOp::Local, 0), first: Psn::new(0), packets: 0 };

    /// The PSN after its last.
    pub fn end(&self) -> Psn {
        self.first.add(self.packets)
    }
}

/// State of the requester. Ring positions are free-running; PSNs compare by distance.
#[derive(Debug)]
pub(super) struct Requester {
    ring: Box<[Entry]>,
    pub(super) reported: u32,
    pub(super) tail: u32,
    pub(super) current: u32,
    pub(super) started: u32,
    posted: u32,
    /// The first unacknowledged PSN.
    pub(super) unacked: Psn,
    /// The next PSN to send.
    pub(super) next: Psn,
    /// The first PSN that was never sent.
    pub(super) unsent: Psn,
    /// Read requests and atomics between `unacked` and `next`.
    pub(super) outstanding_reads: u32,
    /// Packets since the last one with `ack_request`.
    pub(super) since_ack_request: u32,
    /// The PSN after the last packet that needs a response: the timer runs while it is ahead of
    /// `unacked`.
    pub(super) ack_due: Psn,
    /// Configured retries, and those after RNR NAKs that are left; refilled by every
    /// acknowledgement.
    retry_count: u8,
    rnr_retry: u8,
    pub(super) rnr_left: u8,
    /// How many RNR NAKs came in a row.
    pub(super) rnr_streak: u8,
    /// The retransmission timeout, and how long the peer has been silent.
    pub(super) rto: RtoEstimator,
    /// After a timeout or an RNR NAK only the first packet is sent, until there is progress.
    pub(super) probing: bool,
    /// There was progress on this connection: the window is open.
    opened: bool,
    /// How many times in a row the host could not place a response.
    pub(super) fault_streak: u8,
    /// When the retransmission timer expires.
    pub(super) deadline: Instant,
    /// Do not send before: backoff after an RNR NAK, or after a local page fault.
    pub(super) resume: Instant,
    /// The value of `unacked` at which a missing response already made us go back.
    pub(super) last_go_back: Option<Psn>,
    /// The PSN of the last sequence-error NAK, and whether copies of it are ignored.
    pub(super) last_nak: Option<Psn>,
    pub(super) nak_ignored: bool,
    /// The PSN in the middle of a chunk at which a read was last requested again.
    pub(super) resumed_at: Option<Psn>,
    /// How many packets may be in flight, by the window of the path.
    pub(super) allowance: u32,
    /// There is a packet to send that only the allowance prevents.
    pub(super) blocked_by_path: bool,
    /// What the path has not been told yet.
    pub(super) signals: PathSignals,
    /// The first unacknowledged PSN at a timeout at which several packets were in flight, until
    /// there is progress, or a packet is known to be missing.
    pub(super) timed_out_at: Option<Psn>,
    /// A PSN that the peer rejected, with the status for its work, while responses before it are
    /// missing.
    pub(super) rejection: Option<(Psn, Status)>,
    /// The failure of the work at `tail`.
    failure: Option<Status>,
    /// With selective repeat: what is known about each packet in flight.
    pub(super) selective: Option<Box<Recovery>>,
    /// PSNs between `unacked` and `next` that are not in flight: they have arrived, or are lost.
    /// 0 without selective repeat.
    pub(super) absent: u32,
}

impl Requester {
    pub(super) fn new(depth: u32) -> Self {
        let ring = vec![Entry::EMPTY; depth.max(1).next_power_of_two() as usize].into();
        Self {
            ring,
            reported: 0,
            tail: 0,
            current: 0,
            started: 0,
            posted: 0,
            unacked: Psn::new(0),
            next: Psn::new(0),
            unsent: Psn::new(0),
            outstanding_reads: 0,
            since_ack_request: 0,
            ack_due: Psn::new(0),
            retry_count: 0,
            rnr_retry: 0,
            rnr_left: 0,
            rnr_streak: 0,
            rto: RtoEstimator::default(),
            probing: false,
            opened: false,
            fault_streak: 0,
            deadline: Instant::NEVER,
            resume: Instant::default(),
            last_go_back: None,
            last_nak: None,
            nak_ignored: false,
            resumed_at: None,
            allowance: u32::MAX,
            blocked_by_path: false,
            signals: PathSignals::default(),
            timed_out_at: None,
            rejection: None,
            failure: None,
            selective: None,
            absent: 0,
        }
    }

    /// Resets everything but keeps the memory.
    pub(super) fn reset(&mut self) {
        let ring = core::mem::take(&mut self.ring);
        *self = Self { ring, ..Self::new(0) };
    }

    pub(super) fn begin_at(&mut self, psn: Psn) {
        (self.unacked, self.next, self.unsent, self.ack_due) = (psn, psn, psn, psn);
    }

    pub(super) fn set_retries(&mut self, retry_count: Option<u8>, rnr_retry: Option<u8>) {
        if let Some(count) = retry_count {
            self.retry_count = count;
        }
        if let Some(count) = rnr_retry {
            (self.rnr_retry, self.rnr_left) = (count, count);
        }
    }

    /// Everything before `psn` is acknowledged: the retry counters are refilled.
    pub(super) fn advance_unacked(&mut self, psn: Psn) {
        let known = if self.absent > 0 { self.forget_until(psn) } else { 0 };
        self.signals.acked += psn.distance_from(self.unacked) as u32 - known;
        self.unacked = psn;
        self.rnr_left = self.rnr_retry;
        (self.fault_streak, self.rnr_streak) = (0, 0);
        (self.probing, self.opened) = (false, true);
    }

    pub(super) fn footprint(&self) -> usize {
        size_of_val(&*self.ring) + self.selective.as_ref().map_or(0, |known| size_of_val(&**known))
    }

    pub(super) fn entry(&self, position: u32) -> &Entry {
        &self.ring[position as usize & (self.ring.len() - 1)]
    }

    fn entry_mut(&mut self, position: u32) -> &mut Entry {
        let mask = self.ring.len() - 1;
        &mut self.ring[position as usize & mask]
    }

    /// Posted work whose completion has not been polled yet.
    pub(super) fn outstanding(&self) -> u32 {
        self.posted.wrapping_sub(self.reported)
    }

    pub(super) fn post(&mut self, work: SendWr, depth: u32) -> Result<(), SendQueueError> {
        let valid_len = match work.op {
            SendOp::Atomic(_, atomic) => work.len == atomic.width().bytes(),
            _ => work.len <= MAX_MESSAGE_LEN,
        };
        if !valid_len {
            return Err(SendQueueError::Length(work.len));
        }
        if self.outstanding() >= depth {
            return Err(SendQueueError::Full);
        }
        *self.entry_mut(self.posted) = Entry { work, ..Entry::EMPTY };
        self.posted = self.posted.wrapping_add(1);
        Ok(())
    }

    /// Whether every message that was started has completed.
    pub(super) fn is_drained(&self) -> bool {
        self.tail == self.started
    }

    /// Whether there may be something to send.
    pub(super) fn has_work(&self) -> bool {
        self.current != self.posted || self.has_lost()
    }

    /// Whether [`poll_transmit`](Self::poll_transmit) may find a request.
    #[inline]
    pub(super) fn may_transmit(&self, now: Instant) -> bool {
        now >= self.resume && (self.current != self.posted || self.absent > 0)
    }

    /// Puts the next request into `packet`; returns whether there is one. `may_start` is whether a
    /// new message may be started. `Err` fails the queue pair.
    #[inline]
    pub(super) fn poll_transmit<H: Host>(
        &mut self,
        now: Instant,
        params: &ConnParams,
        may_start: bool,
        host: &mut H,
        stats: &mut Stats,
        packet: &mut Transmit,
    ) -> Result<bool, Status> {
        if now < self.resume {
            return Ok(false);
        }
        if self.absent > 0 && self.has_lost() {
            return self.resend(now, params, host, stats, packet);
        }
        while self.current != self.posted {
            let is_new_message = self.current == self.started;
            if is_new_message && !may_start {
                return Ok(false);
            }
            let entry = self.entry(self.current);
            let at_start = is_new_message || self.next == entry.first;
            let blocked = match entry.work.fence {
                Fence::None => false,
                Fence::Reads => self.outstanding_reads > 0,
                Fence::All => self.current != self.tail,
            };
            if at_start && blocked {
                return Ok(false);
            }
            match entry.work.op {
                SendOp::Bad(status) if self.current == self.tail => return Err(status),
                SendOp::Bad(_) => return Ok(false),
                SendOp::Local => self.complete_local(is_new_message),
                SendOp::Bind(_) | SendOp::LocalInvalidate(_) => {
                    // Once: a retransmission of what stands before it comes here again.
                    let op = entry.work.op;
                    let done =
                        if is_new_message { op.change_key(host) } else { Some(Status::Success) };
                    match done {
                        Some(Status::Success) => self.complete_local(is_new_message),
                        Some(status) => {
                            self.entry_mut(self.current).work.op = SendOp::Bad(status);
                        }
                        None => return Ok(false),
                    }
                }
                _ => {
                    let sent = self.request(now, params, is_new_message, host, stats, packet)?;
                    if sent && let Some(known) = &mut self.selective {
                        let psn = packet.headers.psn;
                        known.on_sent(psn, self.next.distance_from(psn) as u32);
                    }
                    return Ok(sent);
                }
            }
        }
        Ok(false)
    }

    /// Work without packets: completes as soon as everything before it has.
    fn complete_local(&mut self, is_new_message: bool) {
        if is_new_message {
            let next = self.next;
            self.entry_mut(self.current).first = next;
            self.started = self.started.wrapping_add(1);
        }
        self.current = self.current.wrapping_add(1);
        self.ack_until(self.unacked);
    }

    /// Whether the path has room again without another packet. The allowance may have shrunk since
    /// packets were sent that request no ACK: one more packet must, or none would ever come.
    #[inline]
    pub(super) fn may_wait_for_room(&self, in_flight: u32) -> bool {
        in_flight == 0 || self.since_ack_request == 0
    }

    #[inline(always)] // the only caller is hot, and seven arguments cost more than the body
    fn request<H: Host>(
        &mut self,
        now: Instant,
        params: &ConnParams,
        is_new_message: bool,
        host: &mut H,
        stats: &mut Stats,
        packet: &mut Transmit,
    ) -> Result<bool, Status> {
        let in_flight = self.in_flight();
        if in_flight >= self.allowance && self.may_wait_for_room(in_flight) {
            self.blocked_by_path = true;
            if self.next == self.unacked {
                self.deadline = Instant::NEVER; // the link has room again, and nothing is due
            }
            return Ok(false);
        }
        let (next, unsent, unacked) = (self.next, self.unsent, self.unacked);
        let outstanding_reads = self.outstanding_reads;
        let is_oldest = self.current == self.tail;
        let limit = match (self.probing, self.opened) {
            (true, _) => 1,
            (false, false) => INITIAL_WINDOW,
            (false, true) => u32::MAX,
        };
        let entry = self.entry_mut(self.current);
        let awaits_response = entry.work.op.awaits_response();
        // Retransmissions were counted already: a limit that was lowered since must not block them.
        let is_new = next == unsent;
        // The window limits the distance of PSNs, also if packets in between have arrived.
        let span = next.distance_from(unacked) as u32;
        if params.window_full(span, entry.work.len)
            || in_flight >= limit
            || awaits_response && is_new && outstanding_reads >= params.max_rd_atomic
        {
            let impossible = awaits_response && params.max_rd_atomic == 0 && is_oldest;
            return if impossible { Err(Status::LocalQpOperation) } else { Ok(false) };
        }
        if is_new_message {
            // Harmless if the message is not started after all: the PSNs are then assigned again.
            (entry.first, entry.packets) = (next, params.mtu.packets(entry.work.len));
        }
        let entry = &*entry;
        let index = next.distance_from(entry.first) as u32;
        let headers = &mut packet.headers;
        let segment = Segment::at(entry, index, params, headers);
        packet.payload = None;
        if segment.len > 0 {
            let from = Source::SendWr { id: entry.work.id, offset: segment.offset };
            match host.fetch(from, segment.len, headers.len()) {
                HostStatus::Ready => {}
                HostStatus::Denied if self.current == self.tail => {
                    return Err(Status::LocalProtection);
                }
                // A denied fetch fails in queue order, once everything before it is acknowledged.
                HostStatus::Retry | HostStatus::Denied => return Ok(false),
            }
            packet.payload = Some(Payload { from, len: segment.len });
        }
        let is_last = index + segment.psn_count == entry.packets;
        let resumes = awaits_response && !index.is_multiple_of(params.read_chunk);
        headers.solicited = is_last && entry.work.solicited && segment.can_solicit;
        headers.destination_qp = params.destination;
        headers.psn = next;
        self.started = self.started.wrapping_add(u32::from(is_new_message));
        self.current = self.current.wrapping_add(u32::from(is_last));
        self.outstanding_reads += u32::from(awaits_response);
        if resumes {
            self.resumed_at = Some(next);
        }
        stats.resent += u64::from(!is_new);
        self.since_ack_request += 1;
        // Request an ACK at the end of a message, before the window closes, every quarter window or
        // less in between, and on the first retransmitted packet: perhaps only the response was
        // lost. Messages of several packets use the window for full MTU.
        headers.ack_request = is_last
            || span + segment.psn_count >= params.full_mtu_window
            || self.since_ack_request >= MAX_UNREQUESTED.min(params.full_mtu_window / 4)
            || !is_new && next == unacked
            || in_flight + segment.psn_count >= limit.min(self.allowance);
        self.next = next.add(segment.psn_count);
        if self.next.distance_from(unsent) > 0 {
            self.unsent = self.next;
        }
        if headers.ack_request || awaits_response {
            self.since_ack_request = 0;
            let is_first_due = self.ack_due.distance_from(unacked) <= 0;
            self.ack_due = self.next;
            if is_new {
                self.rto.on_sent(now, next);
            }
            // A timer may run that was started because the link was full, before the packet was
            // sent.
            if self.deadline == Instant::NEVER || is_first_due {
                self.restart_timer(now, params);
            }
        }
        Ok(true)
    }

    /// The peer, or data behind a gap, says that a packet was lost.
    pub(super) fn report_loss(&mut self) {
        self.signals.lost = true;
        self.timed_out_at = None;
    }

    /// Restarts the timer, if a response is due.
    pub(super) fn restart_timer(&mut self, now: Instant, params: &ConnParams) {
        self.deadline = Instant::NEVER;
        if self.ack_due.distance_from(self.unacked) > 0 {
            self.start_timer(now, params);
        }
    }

    pub(super) fn start_timer(&mut self, now: Instant, params: &ConnParams) {
        if let Some(timeout) = params.timeout {
            let wait = self.rto.next_wait(timeout, self.retry_count);
            self.deadline = Instant::from_nanos(now.as_nanos().saturating_add(wait));
        }
    }

    /// The link has no room for a packet that is due: the timer runs as if it had been sent, so
    /// that a peer that stopped draining is not waited for forever.
    pub(super) fn on_link_full(&mut self, now: Instant, params: &ConnParams) {
        if self.deadline == Instant::NEVER && self.has_work() && self.resume <= now {
            self.start_timer(now, params);
        }
    }

    /// Restarts transmission at the first unacknowledged PSN (go-back-N).
    pub(super) fn go_back(&mut self) {
        self.next = self.unacked;
        self.current = self.tail;
        self.ack_due = self.unacked;
        self.forget_requests();
        self.outstanding_reads = 0;
        self.deadline = Instant::NEVER;
        self.rto.forget_sample();
    }

    /// The packet with this PSN, the last one that was made, was not sent after all.
    pub(super) fn undo(&mut self, psn: Psn) {
        self.rto.forget_sample();
        // Perhaps it was the one that requested an ACK of those before it.
        self.since_ack_request = self.since_ack_request.max(1);
        if self.ack_due == psn.next() {
            (self.ack_due, self.deadline) = (self.unacked, Instant::NEVER);
        }
        if self.lose(psn) {
            return;
        }
        if self.unsent == psn.next() {
            self.unsent = psn;
        }
        self.next = psn;
        let before = self.current.wrapping_sub(1);
        if self.current != self.tail && self.entry(before).end() == psn.next() {
            self.current = before; // it was the last one of its message
        }
    }

    /// Handles an expired retransmission timer. `Err` fails the queue pair.
    pub(super) fn handle_timeout(
        &mut self,
        now: Instant,
        params: &ConnParams,
        stats: &mut Stats,
    ) -> Result<(), Status> {
        if now < self.deadline {
            return Ok(());
        }
        stats.timeouts += 1;
        // If nothing is in flight, the link was full, and the path has lost nothing.
        if self.next != self.unacked {
            self.signals.timed_out = Some(self.rto.wait());
        }
        if self.absent == 0 && self.next.distance_from(self.unacked) > 1 {
            self.timed_out_at = Some(self.unacked);
        }
        let timeout = params.timeout.unwrap_or(u64::MAX);
        if self.rto.on_timeout(timeout, self.retry_count) {
            return Err(Status::RetryExceeded);
        }
        (self.last_go_back, self.nak_ignored) = (None, false);
        if self.selective.is_some() {
            self.lose_from(params, self.unacked);
            self.deadline = Instant::NEVER;
            self.rto.forget_sample();
        } else {
            self.go_back();
        }
        self.probing = true;
        Ok(())
    }

    /// The work at `tail` failed with `failure`; with `None` no local work failed, and everything
    /// is flushed.
    pub(super) fn stop(&mut self, failure: Option<Status>) {
        self.failure = failure;
        self.deadline = Instant::NEVER;
        self.resume = Instant::default();
    }

    /// The next completion: a success, or, in the error state, a failure.
    pub(super) fn poll_completion(&mut self, failed: bool) -> Option<SendCompletion> {
        let status = if self.reported != self.tail {
            Status::Success
        } else if failed && self.reported != self.posted {
            let after = self.tail.wrapping_add(1);
            (self.tail, self.current, self.started) = (after, after, after);
            self.failure.take().unwrap_or(Status::Flushed)
        } else {
            return None;
        };
        let work = &self.entry(self.reported).work;
        let (id, signaled) = (work.id, work.signaled);
        self.reported = self.reported.wrapping_add(1);
        Some(SendCompletion { id, status, signaled })
    }
}

/// One packet of a request.
pub(super) struct Segment {
    /// Offset of its payload in the message, and its length.
    pub offset: u32,
    pub len: u32,
    /// How many PSNs it consumes.
    pub psn_count: u32,
    pub can_solicit: bool,
}

impl Segment {
    /// The packet with this index; for a read, the request for the rest of its chunk. Writes opcode
    /// and extension to `headers`.
    #[inline(always)]
    pub(super) fn at(
        entry: &Entry,
        index: u32,
        params: &ConnParams,
        headers: &mut Headers,
    ) -> Self {
        let work = &entry.work;
        let offset = params.mtu.offset(index);
        let is_first = index == 0;
        let is_last = index + 1 == entry.packets;
        // Fast path for the middle packets of long messages, which have no extension header.
        if !is_first && !is_last && !work.op.awaits_response() {
            headers.opcode = work.op.middle();
            headers.extension = Extension::None;
            let len = params.mtu.bytes();
            return Self { offset, len, psn_count: 1, can_solicit: false };
        }
        let len = if is_last { work.len.wrapping_sub(offset) } else { params.mtu.bytes() };
        let (opcode, extension) = match work.op {
            SendOp::Read(at) => return Self::read(entry, index, u32::MAX, params, at, headers),
            SendOp::Atomic(at, atomic) => return Self::atomic(at, atomic, headers),
            SendOp::Write(at) => {
                (WRITE.at(is_first, is_last), write_header(is_first, at, work.len))
            }
            SendOp::Send
            | SendOp::Bind(_)
            | SendOp::LocalInvalidate(_)
            | SendOp::Local
            | SendOp::Bad(_) => (SEND.at(is_first, is_last), Extension::None),
            SendOp::SendImm(imm) if is_last => {
                let opcode = if is_first { Opcode::SendOnlyImm } else { Opcode::SendLastImm };
                (opcode, Extension::Imm(imm))
            }
            SendOp::SendInvalidate(key) if is_last => {
                let last = Opcode::SendLastInvalidate;
                let opcode = if is_first { Opcode::SendOnlyInvalidate } else { last };
                (opcode, Extension::Invalidate(key))
            }
            SendOp::SendImm(_) | SendOp::SendInvalidate(_) => {
                (SEND.at(is_first, false), Extension::None)
            }
            SendOp::WriteImm(at, imm) if is_last => {
                let reth = Reth { address: at.address, rkey: at.rkey, len: work.len };
                match is_first {
                    true => (Opcode::WriteOnlyImm, Extension::RethImm(reth, imm)),
                    false => (Opcode::WriteLastImm, Extension::Imm(imm)),
                }
            }
            SendOp::WriteImm(at, _) => {
                (WRITE.at(is_first, false), write_header(is_first, at, work.len))
            }
        };
        (headers.opcode, headers.extension) = (opcode, extension);
        let can_solicit = !matches!(work.op, SendOp::Write(_));
        Self { offset, len, psn_count: 1, can_solicit }
    }

    /// The request for the rest of a chunk from `index` on, at most `limit` packets.
    pub(super) fn read(
        entry: &Entry,
        index: u32,
        limit: u32,
        params: &ConnParams,
        at: Remote,
        headers: &mut Headers,
    ) -> Self {
        let psn_count =
            (entry.packets - index).min(params.read_chunk - index % params.read_chunk).min(limit);
        let offset = params.mtu.offset(index);
        let len = match index + psn_count == entry.packets {
            true => entry.work.len - offset,
            false => params.mtu.offset(psn_count),
        };
        let from = at.forward(offset);
        headers.opcode = Opcode::ReadRequest;
        headers.extension = Extension::Reth(Reth { address: from.address, rkey: from.rkey, len });
        Self { offset, len: 0, psn_count, can_solicit: false }
    }

    fn atomic(at: Remote, atomic: super::Atomic, headers: &mut Headers) -> Self {
        (headers.opcode, headers.extension) = super::atomic::request(at, atomic);
        Self { offset: 0, len: 0, psn_count: 1, can_solicit: false }
    }
}

/// The four opcodes of an operation without immediate data or invalidation.
struct Opcodes {
    first: Opcode,
    middle: Opcode,
    last: Opcode,
    only: Opcode,
}

const SEND: Opcodes = Opcodes {
    first: Opcode::SendFirst,
    middle: Opcode::SendMiddle,
    last: Opcode::SendLast,
    only: Opcode::SendOnly,
};
const WRITE: Opcodes = Opcodes {
    first: Opcode::WriteFirst,
    middle: Opcode::WriteMiddle,
    last: Opcode::WriteLast,
    only: Opcode::WriteOnly,
};

impl Opcodes {
    fn at(&self, is_first: bool, is_last: bool) -> Opcode {
        match (is_first, is_last) {
            (true, true) => self.only,
            (true, false) => self.first,
            (false, true) => self.last,
            (false, false) => self.middle,
        }
    }
}

fn write_header(is_first: bool, at: Remote, len: u32) -> Extension {
    match is_first {
        true => Extension::Reth(Reth { address: at.address, rkey: at.rkey, len }),
        false => Extension::None,
    }
}
