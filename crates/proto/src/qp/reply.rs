//! The responder's packets: data for reads, results of atomics, acknowledgements and refusals.

use super::host::{Host, Source, Verdict};
use super::responder::{Reply, Responder, Terms};
use super::saved::Asked;
use super::work::Notice;
use super::{Payload, Stats, Transmit};
use crate::wire::{Aeth, Extension, Headers, Nak, Opcode, Syndrome};

impl Responder {
    /// Whether data is to be sent: the answers to reads, which compete with requests of our own.
    pub(super) fn has_data(&mut self) -> bool {
        self.saved.pending().is_some()
    }

    /// The next answer. `Err` fails the queue pair: memory that the peer reads went away.
    pub(super) fn poll_transmit<H: Host>(
        &mut self,
        terms: &Terms,
        may_send_data: bool,
        host: &mut H,
        stats: &mut Stats,
    ) -> Result<Option<Transmit>, Notice> {
        let completed = self.completed;
        let Some(saved) = self.saved.pending() else {
            return Ok(self.acknowledge(terms, stats));
        };
        let psn = saved.first.add(saved.next);
        let aeth = Aeth { syndrome: Syndrome::ACK, msn: completed };
        let (at, len) = match saved.asked {
            Asked::Atomic { before } => {
                self.saved.sent();
                let extension = Extension::AethAtomic(aeth, before);
                let opcode = Opcode::AtomicAcknowledge;
                let headers = Headers::new(opcode, terms.destination, psn, extension);
                return Ok(Some(Transmit { headers, payload: None }));
            }
            Asked::Read { at, len } => (at, len),
        };
        if !may_send_data {
            return Ok(None);
        }
        let offset = terms.mtu.offset(saved.next);
        let len = (len - offset).min(terms.mtu.bytes());
        let from = Source::Remote(at.forward(offset));
        if len > 0 {
            match host.may_fetch(from, len) {
                Verdict::Yes => {}
                Verdict::NotNow => return Ok(None),
                Verdict::Refused => {
                    self.saved.give_up();
                    self.fail(Nak::RemoteAccess, psn);
                    return Err(Notice::AccessError);
                }
            }
        }
        let (is_first, is_last) = (saved.next == saved.start, saved.next + 1 == saved.stop);
        let (opcode, extension) = match (is_first, is_last) {
            (true, true) => (Opcode::ReadResponseOnly, Extension::Aeth(aeth)),
            (true, false) => (Opcode::ReadResponseFirst, Extension::Aeth(aeth)),
            (false, true) => (Opcode::ReadResponseLast, Extension::Aeth(aeth)),
            (false, false) => (Opcode::ReadResponseMiddle, Extension::None),
        };
        self.saved.sent();
        let headers = Headers::new(opcode, terms.destination, psn, extension);
        let payload = (len > 0).then_some(Payload { from, len });
        Ok(Some(Transmit { headers, payload }))
    }

    fn acknowledge(&mut self, terms: &Terms, stats: &mut Stats) -> Option<Transmit> {
        let (syndrome, psn) = match core::mem::replace(&mut self.reply, Reply::None) {
            Reply::None => return None,
            Reply::Ack => (Syndrome::ACK, self.expected.previous()),
            // Meanwhile it came again, and all that was missing.
            Reply::Sequence(came) if self.expected.distance_from(came) > 0 => {
                (Syndrome::ACK, self.expected.previous())
            }
            Reply::NotReady => (Syndrome::RnrNak(terms.min_rnr_timer), self.expected),
            Reply::Sequence(_) => {
                stats.sequence_naks_sent += 1;
                (Syndrome::Nak(Nak::Sequence), self.expected)
            }
            Reply::Fatal(nak, psn) => (Syndrome::Nak(nak), psn),
        };
        let extension = Extension::Aeth(Aeth { syndrome, msn: self.completed });
        let headers = Headers::new(Opcode::Acknowledge, terms.destination, psn, extension);
        Some(Transmit { headers, payload: None })
    }
}
