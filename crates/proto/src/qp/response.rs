//! The responder's packets: read responses, results of atomics, ACKs and NAKs.

use super::host::{FollowingReads, Host, HostStatus, Source};
use super::resource::RdAtomicOp;
use super::responder::{ConnParams, Reply, Responder};
use super::work::QpEvent;
use super::{Payload, Stats, Transmit};
use crate::psn::Psn;
use crate::wire::{Aeth, Extension, Headers, Nak, Opcode, Syndrome};

/// The RNR timer code: `code` if there is no receive. If memory was not resident, `fault_streak`
/// times in a row: 10 µs at first, because most page faults are short, and longer each time, up to
/// 1.28 ms, so that long waits do not fill the wire.
fn rnr_timer_code(code: u8, fault_streak: u8) -> u8 {
    const MAX_FAULT_CODE: u8 = 14;
    if fault_streak == 0 { code } else { fault_streak.min(MAX_FAULT_CODE) }
}

impl Responder {
    /// Whether there are responses to send, which compete with our own requests.
    pub(super) fn has_responses(&mut self) -> bool {
        self.reply != Reply::None || self.resource.pending().is_some()
    }

    /// Puts the next response into `packet`; returns whether there is one. `Err` fails the queue
    /// pair: memory that the peer reads was deregistered before it was sent.
    pub(super) fn poll_transmit<H: Host>(
        &mut self,
        params: &ConnParams,
        host: &mut H,
        stats: &mut Stats,
        packet: &mut Transmit,
    ) -> Result<bool, QpEvent> {
        let completed = self.completed;
        let Some(resource) = self.resource.pending() else {
            return Ok(self.reply != Reply::None && self.acknowledge(params, stats, packet));
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
            let request = resource.first;
            let following = match is_first {
                true => self.resource.following(),
                false => FollowingReads { len: 0, last: request },
            };
            let from = Source::Remote { at: at.forward(offset), left, request, following };
            match host.fetch(from, len, headers.len()) {
                HostStatus::Ready => {
                    self.requested_again = None;
                    packet.payload = Some(Payload { from, len });
                }
                HostStatus::Retry => return Ok(self.report_not_resident(params, stats, packet)),
                HostStatus::Denied if was_sent_before => {
                    // A late duplicate of the request may arrive after the peer has the data and
                    // the registration has ended, which is legal. The peer then ignores this PSN.
                    // If the data was lost, the NAK tells the peer why it does not get it.
                    let (psn, syndrome) = (headers.psn, Syndrome::Nak(Nak::RemoteAccess));
                    self.resource.skip();
                    self.requested_again = None;
                    *headers = without_data(params, psn, syndrome, completed);
                    return Ok(true);
                }
                HostStatus::Denied => {
                    let psn = headers.psn;
                    self.resource.deny();
                    self.fail(Nak::RemoteAccess, psn);
                    return Err(QpEvent::AccessError);
                }
            }
        }
        self.resource.sent();
        Ok(true)
    }

    /// The data to be sent next is not resident. Most page faults are short, and the peer need not
    /// know. If it requests that data again it gets an RNR NAK, so that its retries do not run out.
    /// The data is sent as soon as it is resident in any case: the NAK may be about a request from
    /// before the peer got what was in flight, and it then ignores it.
    #[cold]
    fn report_not_resident(
        &mut self,
        params: &ConnParams,
        stats: &mut Stats,
        packet: &mut Transmit,
    ) -> bool {
        let psn = packet.headers.psn;
        if self.requested_again.take() != Some(psn) || self.has_failed() {
            return false;
        }
        stats.rnr_sent += 1;
        self.fault_streak = self.fault_streak.saturating_add(1);
        let code = rnr_timer_code(params.min_rnr_timer, self.fault_streak);
        packet.headers = without_data(params, psn, Syndrome::RnrNak(code), self.completed);
        packet.payload = None;
        true
    }

    fn acknowledge(
        &mut self,
        params: &ConnParams,
        stats: &mut Stats,
        packet: &mut Transmit,
    ) -> bool {
        let (syndrome, psn) = match core::mem::replace(&mut self.reply, Reply::None) {
            Reply::None => return false,
            // Unless the request at `expected` was refused, for which the peer has an RNR NAK.
            Reply::Ack | Reply::Sequence(_)
                if !self.nak_sent
                    && let Some(held) = self.held.as_ref().filter(|held| !held.is_empty()) =>
            {
                stats.sequence_naks_sent += 1;
                let syndrome = Syndrome::Nak(Nak::Sequence);
                packet.headers = without_data(params, self.expected, syndrome, self.completed);
                packet.headers.extension = Extension::AethSack(
                    Aeth { syndrome, msn: self.completed },
                    held.behind(self.expected),
                );
                packet.payload = None;
                return true;
            }
            Reply::Ack => (Syndrome::ACK, self.acknowledged),
            // The missing packets have arrived meanwhile.
            Reply::Sequence(received) if self.expected.distance_from(received) > 0 => {
                (Syndrome::ACK, self.acknowledged)
            }
            Reply::NotReady => (
                Syndrome::RnrNak(rnr_timer_code(params.min_rnr_timer, self.fault_streak)),
                self.expected,
            ),
            Reply::Sequence(_) => {
                stats.sequence_naks_sent += 1;
                self.nak_sent = true;
                (Syndrome::Nak(Nak::Sequence), self.expected)
            }
            Reply::Fatal(nak, psn) => (Syndrome::Nak(nak), psn),
        };
        packet.headers = without_data(params, psn, syndrome, self.completed);
        packet.payload = None;
        true
    }
}

/// An ACK or a NAK.
fn without_data(params: &ConnParams, psn: Psn, syndrome: Syndrome, msn: u32) -> Headers {
    let extension = Extension::Aeth(Aeth { syndrome, msn });
    Headers::new(Opcode::Acknowledge, params.destination, psn, extension)
}
