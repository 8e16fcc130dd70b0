//! The responder's packets: data for reads, results of atomics, acknowledgements and refusals.

use super::host::{Host, Source, Verdict};
use super::responder::{Reply, Responder, Terms};
use super::saved::Asked;
use super::work::Notice;
use super::{Payload, Stats, Transmit};
use crate::psn::Psn;
use crate::wire::{Aeth, Extension, Headers, Nak, Opcode, Syndrome};

/// The code of the time after which to come again, when memory was not there that often: longer each time, up to
/// 1.28 ms, so that a long absence does not fill the wire.
fn patience(code: u8, absences: u8) -> u8 {
    const LONGEST: u8 = 14;
    match code {
        // The code of the longest time of all.
        0 => 0,
        code => code.max(code.saturating_add(absences.saturating_sub(1)).min(LONGEST)),
    }
}

impl Responder {
    /// Whether there is something to say, which competes with requests of our own.
    pub(super) fn has_answers(&mut self) -> bool {
        self.reply != Reply::None || self.saved.pending().is_some()
    }

    /// Puts the next answer into `packet`; tells whether there is one. `Err` fails the queue pair: memory that the
    /// peer reads went away before it had been sent.
    pub(super) fn poll_transmit<H: Host>(
        &mut self,
        terms: &Terms,
        may_send_data: bool,
        host: &mut H,
        stats: &mut Stats,
        packet: &mut Transmit,
    ) -> Result<bool, Notice> {
        let completed = self.completed;
        let Some(saved) = self.saved.pending() else {
            return Ok(self.acknowledge(terms, stats, packet));
        };
        let headers = &mut packet.headers;
        (headers.solicited, headers.ack_request) = (false, false);
        headers.destination_qp = terms.destination;
        headers.psn = saved.first.add(saved.next);
        packet.payload = None;
        let aeth = Aeth { syndrome: Syndrome::ACK, msn: completed };
        let again = saved.was_answered();
        let (at, len) = match saved.asked {
            Asked::Atomic { before } => {
                headers.opcode = Opcode::AtomicAcknowledge;
                headers.extension = Extension::AethAtomic(aeth, before);
                self.saved.sent();
                return Ok(true);
            }
            Asked::Read { at, len } => (at, len),
        };
        if !may_send_data {
            return Ok(false);
        }
        let (is_first, is_last) = (saved.next == saved.start, saved.next + 1 == saved.stop);
        (headers.opcode, headers.extension) = match (is_first, is_last) {
            (true, true) => (Opcode::ReadResponseOnly, Extension::Aeth(aeth)),
            (true, false) => (Opcode::ReadResponseFirst, Extension::Aeth(aeth)),
            (false, true) => (Opcode::ReadResponseLast, Extension::Aeth(aeth)),
            (false, false) => (Opcode::ReadResponseMiddle, Extension::None),
        };
        let offset = terms.mtu.offset(saved.next);
        let left = len - offset;
        let len = left.min(terms.mtu.bytes());
        if len > 0 {
            let from = Source::Remote { at: at.forward(offset), left, request: saved.first };
            match host.fetch(from, len, headers.len()) {
                Verdict::Yes => {
                    (self.stalled, self.parked) = (false, false);
                    packet.payload = Some(Payload { from, len });
                }
                // Most absences are short: the peer need not know. One that has come back is told again.
                Verdict::NotNow if self.parked => {
                    self.park(headers.psn);
                    return Ok(self.acknowledge(terms, stats, packet));
                }
                Verdict::NotNow => {
                    self.stalled = true;
                    return Ok(false);
                }
                Verdict::Refused if again => {
                    // A copy of the request may have come late, when the peer had its data and the registration was
                    // ended, as it may be. The peer does not listen to that number then. If it does, it misses the
                    // data, and learns why it does not get it.
                    let (psn, syndrome) = (headers.psn, Syndrome::Nak(Nak::RemoteAccess));
                    self.saved.skip();
                    (self.stalled, self.parked) = (false, false);
                    *headers = without_data(terms, psn, syndrome, completed);
                    return Ok(true);
                }
                Verdict::Refused => {
                    let psn = headers.psn;
                    self.saved.give_up();
                    self.fail(Nak::RemoteAccess, psn);
                    return Err(Notice::AccessError);
                }
            }
        }
        self.saved.sent();
        Ok(true)
    }

    fn acknowledge(&mut self, terms: &Terms, stats: &mut Stats, packet: &mut Transmit) -> bool {
        let (syndrome, psn) = match core::mem::replace(&mut self.reply, Reply::None) {
            Reply::None => return false,
            Reply::Ack => (Syndrome::ACK, self.acknowledged),
            // Meanwhile it came again, and all that was missing.
            Reply::Sequence(came) if self.expected.distance_from(came) > 0 => {
                (Syndrome::ACK, self.acknowledged)
            }
            Reply::NotReady => {
                (Syndrome::RnrNak(patience(terms.min_rnr_timer, self.absences)), self.expected)
            }
            Reply::Stalled(psn) => {
                stats.rnr_sent += 1;
                (Syndrome::RnrNak(patience(terms.min_rnr_timer, self.absences)), psn)
            }
            Reply::Sequence(_) => {
                stats.sequence_naks_sent += 1;
                (Syndrome::Nak(Nak::Sequence), self.expected)
            }
            Reply::Fatal(nak, psn) => (Syndrome::Nak(nak), psn),
        };
        packet.headers = without_data(terms, psn, syndrome, self.completed);
        packet.payload = None;
        true
    }
}

/// An acknowledgement, or a refusal.
fn without_data(terms: &Terms, psn: Psn, syndrome: Syndrome, msn: u32) -> Headers {
    let extension = Extension::Aeth(Aeth { syndrome, msn });
    Headers::new(Opcode::Acknowledge, terms.destination, psn, extension)
}
