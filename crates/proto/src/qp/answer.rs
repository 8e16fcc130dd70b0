//! The requester's reading of answers: acknowledgements, data, and refusals.

use super::host::{Host, Target, Verdict};
use super::requester::{Requester, Terms};
use super::work::{Op, Status};
use super::{Arrived, Discard, Stats};
use crate::psn::Psn;
use crate::time::Instant;
use crate::wire::ext::rnr_time;
use crate::wire::{Extension, Nak, Opcode, Syndrome};
use core::time::Duration;

/// How long to wait before asking again for data that the host has no place for now.
const FAULT_PAUSE: Duration = Duration::from_micros(100);

/// What became of an answer.
pub(super) enum Outcome {
    /// It was used.
    Used,
    /// It was not.
    Dropped(Discard),
    /// It fails the work at `tail`, and the queue pair.
    Failed(Status),
}

use Outcome::{Dropped, Failed, Used};

impl Requester {
    pub(super) fn handle_answer<H: Host>(
        &mut self,
        now: Instant,
        terms: &Terms,
        arrived: &Arrived<'_>,
        host: &mut H,
        stats: &mut Stats,
    ) -> Outcome {
        let headers = arrived.headers;
        if headers.psn.distance_from(self.unsent) >= 0 {
            return Dropped(Discard::Ghost);
        }
        if headers.psn.distance_from(self.unacked) < 0 {
            return Dropped(Discard::Stale);
        }
        let before = self.unacked;
        let outcome = match (headers.opcode, headers.extension) {
            (Opcode::Acknowledge, Extension::Aeth(aeth)) => {
                self.acknowledged(now, headers.psn, aeth.syndrome, stats)
            }
            (Opcode::AtomicAcknowledge, Extension::AethAtomic(_, value)) => {
                self.atomic_result(now, headers.psn, value, host, stats)
            }
            _ => self.read_data(now, terms, headers.psn, arrived.payload_len, host, stats),
        };
        if self.unacked != before {
            self.went_back_at = self.went_back_at.filter(|at| *at == self.unacked);
            self.restart_timer(now, terms);
        }
        outcome
    }

    /// All numbers before `target` are answered, as far as an acknowledgement can answer them: it stops at a
    /// read or an atomic, whose data must come. Tells whether it got there.
    pub(super) fn settle(&mut self, target: Psn) -> bool {
        while self.tail != self.started {
            let entry = self.entry(self.tail);
            let end = entry.end();
            if !entry.work.op.is_local() {
                if entry.work.op.awaits_data() && self.unacked != end {
                    break;
                }
                if end.distance_from(target) > 0 {
                    if target.distance_from(self.unacked) > 0 {
                        self.answered_to(target);
                    }
                    break;
                }
            }
            if self.unacked != end {
                self.answered_to(end);
            }
            self.tail = self.tail.wrapping_add(1);
        }
        // Answers to what was sent before going back may overtake what is sent again.
        if self.next.distance_from(self.unacked) < 0 {
            (self.next, self.reading) = (self.unacked, 0);
        }
        if (self.current.wrapping_sub(self.tail) as i32) < 0 {
            self.current = self.tail;
        }
        debug_assert!((self.tail.wrapping_sub(self.reported) as i32) >= 0);
        debug_assert!((self.started.wrapping_sub(self.current) as i32) >= 0);
        debug_assert!(self.unsent.distance_from(self.next) >= 0);
        self.unacked.distance_from(target) >= 0
    }

    fn acknowledged(
        &mut self,
        now: Instant,
        psn: Psn,
        syndrome: Syndrome,
        stats: &mut Stats,
    ) -> Outcome {
        match syndrome {
            Syndrome::Ack(_) => match self.settle(psn.next()) {
                true => Used,
                false => self.answer_missing(stats),
            },
            Syndrome::RnrNak(code) => {
                stats.rnr_received += 1;
                if !self.settle(psn) {
                    return self.answer_missing(stats);
                }
                self.not_ready(now, code)
            }
            Syndrome::Nak(Nak::Sequence) => {
                stats.sequence_naks_received += 1;
                self.settle(psn);
                self.missing_there()
            }
            Syndrome::Nak(nak) => {
                // Data that is missing before it will not come any more: the peer has failed.
                self.settle(psn);
                Failed(match nak {
                    Nak::InvalidRequest => Status::RemoteInvalidRequest,
                    Nak::RemoteAccess => Status::RemoteAccess,
                    Nak::RemoteOperational => Status::RemoteOperation,
                    Nak::Sequence | Nak::Unknown(_) => Status::BadResponse,
                })
            }
            Syndrome::Reserved(_) => {
                self.settle(psn);
                Failed(Status::BadResponse)
            }
        }
    }

    /// The peer misses what stands at `unacked`: go back. That costs one try for each place; when it is said
    /// again (the packet was lost again, or the message was repeated on its way) the timer runs on, so that a
    /// packet that never arrives fails in the end.
    fn missing_there(&mut self) -> Outcome {
        if self.next == self.unacked {
            return Used; // it has gone back, and nothing went since
        }
        if self.went_back_at != Some(self.unacked) {
            self.went_back_at = Some(self.unacked);
            return self.retry().map_or_else(Failed, |()| Used);
        }
        let deadline = self.deadline;
        self.go_back();
        self.deadline = deadline;
        Used
    }

    /// The peer has no receive, or no page, for what stands at `unacked`.
    fn not_ready(&mut self, now: Instant, code: u8) -> Outcome {
        const WITHOUT_END: u8 = 7;
        if now < self.resume {
            return Used; // said twice
        }
        if self.rnr_left != WITHOUT_END {
            match self.rnr_left.checked_sub(1) {
                Some(left) => self.rnr_left = left,
                None => return Failed(Status::RnrRetryExceeded),
            }
        }
        // It answers: tries are for peers that do not.
        self.retries_left = self.retry_count;
        self.go_back();
        self.resume = now + rnr_time(code);
        Used
    }

    /// An answer came from behind one that has not: go back, but once for each place. The answers behind it
    /// say the same, and after going back they are still under way.
    fn answer_missing(&mut self, stats: &mut Stats) -> Outcome {
        if self.went_back_at != Some(self.unacked) {
            stats.answers_missed += 1;
            self.went_back_at = Some(self.unacked);
            self.go_back();
        }
        Dropped(Discard::ResponseGap)
    }

    fn read_data<H: Host>(
        &mut self,
        now: Instant,
        terms: &Terms,
        psn: Psn,
        len: u32,
        host: &mut H,
        stats: &mut Stats,
    ) -> Outcome {
        if !self.settle(psn) {
            return self.answer_missing(stats);
        }
        let entry = *self.entry(self.tail);
        if !matches!(entry.work.op, Op::Read(_)) {
            return Failed(Status::BadResponse);
        }
        let index = psn.distance_from(entry.first) as u32;
        let offset = terms.mtu.offset(index);
        if len != (entry.work.len - offset).min(terms.mtu.bytes()) {
            return Failed(Status::BadResponse);
        }
        if len > 0 {
            match host.place(Target::Response { id: entry.work.id, offset }, len) {
                Verdict::Yes => {}
                Verdict::NotNow => return self.no_place(now),
                Verdict::Refused => return Failed(Status::LocalProtection),
            }
        }
        let ends_piece = (index + 1).is_multiple_of(terms.read_chunk) || index + 1 == entry.packets;
        self.data_came(psn, ends_piece);
        Used
    }

    fn atomic_result<H: Host>(
        &mut self,
        now: Instant,
        psn: Psn,
        value: u64,
        host: &mut H,
        stats: &mut Stats,
    ) -> Outcome {
        if !self.settle(psn) {
            return self.answer_missing(stats);
        }
        let work = self.entry(self.tail).work;
        if !matches!(work.op, Op::Atomic(..)) {
            return Failed(Status::BadResponse);
        }
        match host.store_result(work.id, value) {
            Verdict::Yes => {}
            Verdict::NotNow => return self.no_place(now),
            Verdict::Refused => return Failed(Status::LocalProtection),
        }
        self.data_came(psn, true);
        Used
    }

    /// The host has no place for data that came: ask for it again later, and each time later.
    fn no_place(&mut self, now: Instant) -> Outcome {
        // It answers: tries are for peers that do not.
        self.retries_left = self.retry_count;
        self.go_back();
        let pause = FAULT_PAUSE * (1 << self.faults.min(7));
        self.faults = self.faults.saturating_add(1);
        self.resume = self.resume.max(now + pause);
        Dropped(Discard::Busy)
    }

    /// The data of that number is here; it was the one at `unacked`.
    fn data_came(&mut self, psn: Psn, ends_request: bool) {
        self.answered_to(psn.next());
        if ends_request && self.next.distance_from(self.unacked) >= 0 {
            self.reading = self.reading.saturating_sub(1);
        }
        self.settle(self.unacked);
    }
}
