//! The requester's handling of responses: ACKs, data, and NAKs.

use super::host::{Host, HostStatus, Target};
use super::requester::{ConnParams, Requester};
use super::work::{SendOp, Status};
use super::{DiscardReason, RxPacket, Stats};
use crate::psn::Psn;
use crate::time::Instant;
use crate::wire::ext::rnr_time;
use crate::wire::{Extension, Nak, Opcode, Syndrome};
use core::time::Duration;

/// Initial backoff before data that the host could not place is requested again.
const FAULT_BACKOFF: Duration = Duration::from_micros(100);

/// How often the wait after an RNR NAK doubles, and the maximum that it reaches unless the peer
/// asks for more.
const MAX_RNR_DOUBLINGS: u8 = 7;
const MAX_RNR_WAIT: Duration = Duration::from_millis(100);

/// The result of handling a response.
pub(super) enum Outcome {
    /// It was used.
    Accepted,
    /// It was discarded.
    Dropped(DiscardReason),
    /// It fails the work at `tail`, and the queue pair.
    Failed(Status),
}

use Outcome::{Accepted, Dropped, Failed};

/// The response belongs behind one that is missing.
pub(super) const GAP: Outcome = Dropped(DiscardReason::ResponseGap);

impl Requester {
    pub(super) fn handle_response<H: Host>(
        &mut self,
        now: Instant,
        params: &ConnParams,
        rx: &RxPacket<'_>,
        host: &mut H,
        stats: &mut Stats,
    ) -> Outcome {
        let headers = rx.headers;
        if headers.psn.distance_from(self.unsent) >= 0 {
            return Dropped(DiscardReason::UnexpectedResponse);
        }
        if headers.psn.distance_from(self.unacked) < 0 {
            return Dropped(DiscardReason::StaleResponse);
        }
        let before = self.unacked;
        let outcome = match (headers.opcode, headers.extension) {
            (Opcode::Acknowledge, Extension::Aeth(aeth)) => {
                self.on_ack(now, headers.psn, aeth.syndrome, stats)
            }
            (Opcode::Acknowledge, Extension::AethSack(aeth, sack)) => {
                let is_gap = aeth.syndrome == Syndrome::Nak(Nak::Sequence);
                if is_gap && self.selective.is_some() && !sack.is_empty() {
                    stats.sequence_naks_received += 1;
                    self.on_selective_nak(now, params, headers.psn, &sack, stats)
                } else {
                    self.on_ack(now, headers.psn, aeth.syndrome, stats)
                }
            }
            (Opcode::AtomicAcknowledge, Extension::AethAtomic(aeth, value)) => {
                self.on_atomic_response(now, params, headers.psn, (aeth.syndrome, value), host)
            }
            _ => self.on_read_response(now, params, rx, host),
        };
        let outcome = match outcome {
            Dropped(DiscardReason::ResponseGap) => {
                self.on_response_gap(now, params, rx, host, stats)
            }
            other => other,
        };
        if self.unacked != before {
            if let Some(at) = self.timed_out_at.take() {
                // Since the timeout one packet was sent. If more have arrived, they had before, and
                // the answer was late (F-RTO, RFC 5682).
                self.signals.spurious_timeout |= self.unacked.distance_from(at) > 1;
            }
            self.last_go_back = self.last_go_back.filter(|at| *at == self.unacked);
            self.last_nak = self.last_nak.filter(|at| at.distance_from(self.unacked) >= 0);
            if let Some(measured) = self.rto.on_progress(now, self.unacked) {
                self.signals.round_trip = Some(measured);
            }
            self.restart_timer(now, params);
            if let (Accepted, Some((psn, status))) = (&outcome, self.rejection)
                && self.ack_until(psn)
            {
                return Failed(status);
            }
        }
        outcome
    }

    /// Acknowledges all PSNs before `target`, as far as an ACK can: it stops at a read or an
    /// atomic, whose data must arrive. Returns whether it got there.
    pub(super) fn ack_until(&mut self, target: Psn) -> bool {
        while self.tail != self.started {
            let entry = self.entry(self.tail);
            let end = entry.end();
            if !entry.work.op.is_local() {
                if entry.work.op.awaits_response() && self.unacked != end {
                    break;
                }
                if end.distance_from(target) > 0 {
                    if target.distance_from(self.unacked) > 0 {
                        self.advance_unacked(target);
                    }
                    break;
                }
            }
            if self.unacked != end {
                self.advance_unacked(end);
            }
            self.tail = self.tail.wrapping_add(1);
        }
        self.catch_up();
        debug_assert!((self.tail.wrapping_sub(self.reported) as i32) >= 0);
        self.unacked.distance_from(target) >= 0
    }

    /// Responses to packets sent before going back may overtake the retransmission.
    #[inline]
    fn catch_up(&mut self) {
        if self.next.distance_from(self.unacked) < 0 {
            (self.next, self.outstanding_reads) = (self.unacked, 0);
        }
        if (self.current.wrapping_sub(self.tail) as i32) < 0 {
            self.current = self.tail;
        }
        debug_assert!((self.started.wrapping_sub(self.current) as i32) >= 0);
        debug_assert!(self.unsent.distance_from(self.next) >= 0);
    }

    /// Whether data with this PSN may be placed: everything before it is acknowledged, by it.
    /// Usually everything was.
    #[inline]
    fn is_next_response(&mut self, psn: Psn) -> bool {
        psn == self.unacked || self.ack_until(psn)
    }

    fn on_ack(&mut self, now: Instant, psn: Psn, syndrome: Syndrome, stats: &mut Stats) -> Outcome {
        match syndrome {
            Syndrome::Ack(_) => match self.ack_until(psn.next()) {
                true => Accepted,
                false => GAP,
            },
            Syndrome::RnrNak(code) => {
                stats.rnr_received += 1;
                if !self.ack_until(psn) {
                    return GAP;
                }
                self.on_rnr_nak(now, code)
            }
            Syndrome::Nak(Nak::Sequence) => {
                stats.sequence_naks_received += 1;
                self.ack_until(psn);
                self.on_sequence_nak(psn)
            }
            Syndrome::Nak(nak) => {
                let status = match nak {
                    Nak::InvalidRequest => Status::RemoteInvalidRequest,
                    Nak::RemoteAccess => Status::RemoteAccess,
                    Nak::RemoteOperational => Status::RemoteOperation,
                    Nak::Sequence | Nak::Unknown(_) => Status::BadResponse,
                };
                self.on_rejection(psn, status)
            }
            Syndrome::Reserved(_) => self.on_rejection(psn, Status::BadResponse),
        }
    }

    /// The peer rejected the request with this PSN. If the response to an earlier read or atomic is
    /// missing, that one is requested again first (implied NAK), and the rejection is kept: it
    /// fails the work that it is for, not the one before it.
    fn on_rejection(&mut self, psn: Psn, status: Status) -> Outcome {
        if self.ack_until(psn) {
            return Failed(status);
        }
        self.rejection = Some((psn, status));
        GAP
    }

    /// The peer misses the packet with this PSN: go back. Copies of that NAK are ignored until
    /// there is progress or a timeout (each would send the whole window again), and do not end the
    /// peer's silence: a packet that never arrives fails in the end.
    fn on_sequence_nak(&mut self, psn: Psn) -> Outcome {
        if self.last_nak.replace(psn) != Some(psn) {
            self.rto.on_answer();
        } else if self.nak_ignored {
            return Accepted;
        }
        self.nak_ignored = true;
        // If nothing was sent since going back, the NAK says nothing new.
        if self.next != self.unacked {
            self.report_loss();
            self.go_back();
        }
        Accepted
    }

    /// The peer has no receive, or no resident page, for the packet at `unacked`. It gets that
    /// packet alone, after a wait that doubles each time, until it accepts it.
    fn on_rnr_nak(&mut self, now: Instant, code: u8) -> Outcome {
        const INFINITE: u8 = 7;
        // A duplicate, unless the wait is our own, for memory that is paged out: the refused packet
        // is then still counted as sent.
        if now < self.resume && self.next == self.unacked {
            return Accepted;
        }
        if self.rnr_left != INFINITE {
            match self.rnr_left.checked_sub(1) {
                Some(left) => self.rnr_left = left,
                None => return Failed(Status::RnrRetryExceeded),
            }
        }
        self.rto.on_answer();
        self.go_back();
        self.probing = true;
        let asked = rnr_time(code);
        let wait = asked * (1 << self.rnr_streak.min(MAX_RNR_DOUBLINGS));
        self.rnr_streak = self.rnr_streak.saturating_add(1);
        self.resume = self.resume.max(now + wait.min(asked.max(MAX_RNR_WAIT)));
        Accepted
    }

    /// A response arrived before an earlier one: go back, but once per PSN. The responses behind it
    /// show the same gap, and are still in flight after going back. With selective repeat it is
    /// kept, and what is missing is requested again.
    #[cold]
    #[inline(never)]
    fn on_response_gap<H: Host>(
        &mut self,
        now: Instant,
        params: &ConnParams,
        rx: &RxPacket<'_>,
        host: &mut H,
        stats: &mut Stats,
    ) -> Outcome {
        if self.selective.is_some() {
            return self.hold_response(now, params, rx, host, stats);
        }
        if self.last_go_back != Some(self.unacked) {
            stats.response_gaps += 1;
            self.last_go_back = Some(self.unacked);
            self.report_loss();
            self.go_back();
        }
        GAP
    }

    fn on_read_response<H: Host>(
        &mut self,
        now: Instant,
        params: &ConnParams,
        rx: &RxPacket<'_>,
        host: &mut H,
    ) -> Outcome {
        let (psn, len) = (rx.headers.psn, rx.payload_len);
        if !self.is_next_response(psn) {
            return GAP;
        }
        let entry = self.entry(self.tail);
        if !matches!(entry.work.op, SendOp::Read(_)) {
            return Failed(Status::BadResponse);
        }
        let (id, total) = (entry.work.id, entry.work.len);
        let index = psn.distance_from(entry.first) as u32;
        let offset = params.mtu.offset(index);
        let begins_chunk = index.is_multiple_of(params.read_chunk);
        let ends_chunk =
            (index + 1).is_multiple_of(params.read_chunk) || index + 1 == entry.packets;
        // A NAK has no data: data with a NAK's syndrome is neither.
        let is_negative =
            matches!(rx.headers.extension, Extension::Aeth(aeth) if !aeth.syndrome.is_ack());
        if is_negative
            || !self.is_in_order(rx.headers.opcode, psn, begins_chunk, ends_chunk)
            || len != (total - offset).min(params.mtu.bytes())
        {
            return Failed(Status::BadResponse);
        }
        if len > 0 {
            match host.place(Target::Response { id, offset }, len) {
                HostStatus::Ready => {}
                HostStatus::Retry => return self.back_off_after_fault(now, params, psn),
                HostStatus::Denied => return Failed(Status::LocalProtection),
            }
        }
        self.complete_response(psn, ends_chunk);
        Accepted
    }

    /// Whether a read response may have this opcode at this place in its request. A request that
    /// resumed in the middle of a chunk is answered from there on, by a "first"; the response to
    /// the request before it may still arrive too, and continues by a "middle".
    #[inline]
    fn is_in_order(&self, opcode: Opcode, psn: Psn, begins: bool, ends: bool) -> bool {
        let may_begin = begins || self.resumed_at == Some(psn);
        let in_order = match opcode {
            Opcode::ReadResponseFirst => may_begin && !ends,
            Opcode::ReadResponseMiddle => !begins && !ends,
            Opcode::ReadResponseLast => !begins && ends,
            Opcode::ReadResponseOnly => may_begin && ends,
            _ => return false,
        };
        // With selective repeat any packet may have been requested again, alone.
        in_order || self.selective.is_some()
    }

    fn on_atomic_response<H: Host>(
        &mut self,
        now: Instant,
        params: &ConnParams,
        psn: Psn,
        (syndrome, value): (Syndrome, u64),
        host: &mut H,
    ) -> Outcome {
        if !self.is_next_response(psn) {
            return GAP;
        }
        let work = &self.entry(self.tail).work;
        if !matches!(work.op, SendOp::Atomic(..)) || !syndrome.is_ack() {
            return Failed(Status::BadResponse);
        }
        let id = work.id;
        match host.store_result(id, value) {
            HostStatus::Ready => {}
            HostStatus::Retry => return self.back_off_after_fault(now, params, psn),
            HostStatus::Denied => return Failed(Status::LocalProtection),
        }
        self.complete_response(psn, true);
        Accepted
    }

    /// The host could not place data that arrived: request it again, with exponential backoff.
    fn back_off_after_fault(&mut self, now: Instant, params: &ConnParams, psn: Psn) -> Outcome {
        self.rto.on_answer();
        let backoff = FAULT_BACKOFF * (1 << self.fault_streak.min(7));
        self.fault_streak = self.fault_streak.saturating_add(1);
        self.resume = self.resume.max(now + backoff);
        if self.lose(psn) {
            self.start_timer(self.resume, params);
        } else {
            self.go_back();
        }
        Dropped(DiscardReason::Busy)
    }

    /// The data of this PSN, the one at `unacked`, has been placed.
    fn complete_response(&mut self, psn: Psn, ends_request: bool) {
        self.advance_unacked(psn.next());
        if !ends_request {
            return self.catch_up();
        }
        if self.next.distance_from(self.unacked) >= 0 {
            self.outstanding_reads = self.outstanding_reads.saturating_sub(1);
        }
        self.ack_until(self.unacked);
    }
}
