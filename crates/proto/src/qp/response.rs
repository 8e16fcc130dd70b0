//! The responder's packets: data for reads, results of atomics, acknowledgements and refusals.

use super::host::{Host, HostStatus, Source};
use super::resource::RdAtomicOp;
use super::responder::{ConnParams, Reply, Responder};
use super::work::QpEvent;
use super::{Payload, Stats, Transmit};
use crate::psn::Psn;
use crate::wire::{Aeth, Extension, Headers, Nak, Opcode, Syndrome};

/// The code of the time after which to come again, when memory was not there that often: longer each time, up to
/// 1.28 ms, so that a long absence does not fill the wire.
fn rnr_timer_code(code: u8, fault_streak: u8) -> u8 {
    const MAX_RNR_CODE: u8 = 14;
    match code {
        // The code of the longest time of all.
        0 => 0,
        code => code.max(code.saturating_add(fault_streak.saturating_sub(1)).min(MAX_RNR_CODE)),
    }
}

impl Responder {
    /// Whether there is something to say, which competes with requests of our own.
    pub(super) fn has_responses(&mut self) -> bool {
        self.reply != Reply::None || self.resource.pending().is_some()
    }

    /// Puts the next answer into `packet`; tells whether there is one. `Err` fails the queue pair: memory that the
    /// peer reads went away before it had been sent.
    pub(super) fn poll_transmit<H: Host>(
        &mut self,
        params: &ConnParams,
        may_send_data: bool,
        host: &mut H,
        stats: &mut Stats,
        packet: &mut Transmit,
    ) -> Result<bool, QpEvent> {
        let completed = self.completed;
        let Some(resource) = self.resource.pending() else {
            return Ok(self.acknowledge(params, stats, packet));
        };
        let headers = &mut packet.headers;
        (headers.solicited, headers.ack_request) = (false, false);
        headers.destination_qp = params.destination;
        headers.psn = resource.first.add(resource.next);
        packet.payload = None;
        let aeth = Aeth { syndrome: Syndrome::ACK, msn: completed };
        let was_sent_before = resource.was_sent();
        let (at, len) = match resource.requested {
            RdAtomicOp::Atomic { before } => {
                headers.opcode = Opcode::AtomicAcknowledge;
                headers.extension = Extension::AethAtomic(aeth, before);
                self.resource.sent();
                return Ok(true);
            }
            RdAtomicOp::Read { at, len } => (at, len),
        };
        if !may_send_data {
            return Ok(false);
        }
        let (is_first, is_last) =
            (resource.next == resource.start, resource.next + 1 == resource.stop);
        (headers.opcode, headers.extension) = match (is_first, is_last) {
            (true, true) => (Opcode::ReadResponseOnly, Extension::Aeth(aeth)),
            (true, false) => (Opcode::ReadResponseFirst, Extension::Aeth(aeth)),
            (false, true) => (Opcode::ReadResponseLast, Extension::Aeth(aeth)),
            (false, false) => (Opcode::ReadResponseMiddle, Extension::None),
        };
        let offset = params.mtu.offset(resource.next);
        let left = len - offset;
        let len = left.min(params.mtu.bytes());
        if len > 0 {
            let from = Source::Remote { at: at.forward(offset), left, request: resource.first };
            match host.fetch(from, len, headers.len()) {
                HostStatus::Ready => {
                    (self.stalled, self.parked) = (false, false);
                    packet.payload = Some(Payload { from, len });
                }
                // Most absences are short: the peer need not know. One that has come back is told again.
                HostStatus::Retry if self.parked => {
                    self.park(headers.psn);
                    return Ok(self.acknowledge(params, stats, packet));
                }
                HostStatus::Retry => {
                    self.stalled = true;
                    return Ok(false);
                }
                HostStatus::Denied if was_sent_before => {
                    // A copy of the request may have come late, when the peer had its data and the registration was
                    // ended, as it may be. The peer does not listen to that number then. If it does, it misses the
                    // data, and learns why it does not get it.
                    let (psn, syndrome) = (headers.psn, Syndrome::Nak(Nak::RemoteAccess));
                    self.resource.skip();
                    (self.stalled, self.parked) = (false, false);
                    *headers = without_data(params, psn, syndrome, completed);
                    return Ok(true);
                }
                HostStatus::Denied => {
                    let psn = headers.psn;
                    self.resource.clear();
                    self.fail(Nak::RemoteAccess, psn);
                    return Err(QpEvent::AccessError);
                }
            }
        }
        self.resource.sent();
        Ok(true)
    }

    fn acknowledge(
        &mut self,
        params: &ConnParams,
        stats: &mut Stats,
        packet: &mut Transmit,
    ) -> bool {
        let (syndrome, psn) = match core::mem::replace(&mut self.reply, Reply::None) {
            Reply::None => return false,
            Reply::Ack => (Syndrome::ACK, self.acknowledged),
            // Meanwhile it came again, and all that was missing.
            Reply::Sequence(came) if self.expected.distance_from(came) > 0 => {
                (Syndrome::ACK, self.acknowledged)
            }
            Reply::NotReady => (
                Syndrome::RnrNak(rnr_timer_code(params.min_rnr_timer, self.fault_streak)),
                self.expected,
            ),
            Reply::Stalled(psn) => {
                stats.rnr_sent += 1;
                (Syndrome::RnrNak(rnr_timer_code(params.min_rnr_timer, self.fault_streak)), psn)
            }
            Reply::Sequence(_) => {
                stats.sequence_naks_sent += 1;
                (Syndrome::Nak(Nak::Sequence), self.expected)
            }
            Reply::Fatal(nak, psn) => (Syndrome::Nak(nak), psn),
        };
        packet.headers = without_data(params, psn, syndrome, self.completed);
        packet.payload = None;
        true
    }
}

/// An acknowledgement, or a refusal.
fn without_data(params: &ConnParams, psn: Psn, syndrome: Syndrome, msn: u32) -> Headers {
    let extension = Extension::Aeth(Aeth { syndrome, msn });
    Headers::new(Opcode::Acknowledge, params.destination, psn, extension)
}
