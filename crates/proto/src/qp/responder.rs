//! The responder: executes the peer's requests once and in order, and answers them as often as they
//! are retransmitted.
//!
//! A request is checked in this order: its PSN, its position in its message, the queue pair's
//! access flags, resources (a receive, a record for a read or atomic), its length, the memory that
//! it names. A request that cannot be executed yet leaves the state unchanged, so that the peer can
//! retry.

use alloc::boxed::Box;

use super::DiscardReason;
use super::access::Access;
use super::host::{Host, HostStatus, Receive, Remote, Target};
use super::requester::MAX_MESSAGE_LEN;
use super::resource::{RdAtomicOp, Resource, ResourceRing};
use super::selective::{PsnSet, SPAN, psns};
use super::work::{QpEvent, ReceiveCompletion, ReceiveKind, Status};
use super::{Mtu, RxPacket, Stats};
use crate::psn::Psn;
use crate::wire::ext::Reth;
use crate::wire::{Extension, Headers, Nak, Opcode};

/// The connection's attributes that the responder uses.
#[derive(Clone, Copy, Debug)]
pub(super) struct ConnParams {
    pub destination: u32,
    pub mtu: Mtu,
    pub access: Access,
    pub min_rnr_timer: u8,
}

/// The message being received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    None,
    Send { receive: Receive, len: u32 },
    Write { at: Remote, done: u32, total: u32 },
}

/// The reply that is due after the responses to all reads and atomics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    None,
    /// ACK of everything before the expected PSN.
    Ack,
    /// Sequence-error NAK: the expected PSN is missing, this one arrived instead.
    Sequence(Psn),
    /// RNR NAK for the expected PSN.
    NotReady,
    /// This PSN failed, and the queue pair with it.
    Fatal(Nak, Psn),
}

/// Why a request was not executed.
enum Reject {
    /// RNR: there is no receive.
    NotReady,
    /// RNR: the memory is not resident.
    NotResident,
    /// The last receive completion is still pending: treated as packet loss.
    Busy,
    /// The queue pair fails.
    Fatal { nak: Nak, receive: Status, qp_event: QpEvent },
}

impl Reject {
    #[cold]
    fn invalid() -> Self {
        let (nak, receive) = (Nak::InvalidRequest, Status::RemoteInvalidRequest);
        Self::Fatal { nak, receive, qp_event: QpEvent::RequestError }
    }

    #[cold]
    fn too_long() -> Self {
        let (nak, receive) = (Nak::InvalidRequest, Status::LocalLength);
        Self::Fatal { nak, receive, qp_event: QpEvent::RequestError }
    }

    #[cold]
    fn access() -> Self {
        let (nak, receive) = (Nak::RemoteAccess, Status::LocalAccess);
        Self::Fatal { nak, receive, qp_event: QpEvent::AccessError }
    }

    #[cold]
    fn operation() -> Self {
        let (nak, receive) = (Nak::RemoteOperational, Status::LocalProtection);
        Self::Fatal { nak, receive, qp_event: QpEvent::Fatal }
    }
}

/// Converts the host's answer; `denied` gives the failure for a denial.
fn check_host(status: HostStatus, denied: fn() -> Reject) -> Result<(), Reject> {
    match status {
        HostStatus::Ready => Ok(()),
        HostStatus::Retry => Err(Reject::NotResident),
        HostStatus::Denied => Err(denied()),
    }
}

/// The result of handling a request.
pub(super) enum Outcome {
    /// It was executed.
    Accepted,
    /// The host keeps it until its turn comes.
    Held,
    /// It was not executed.
    Dropped(DiscardReason),
    /// It moved the queue pair to the error state.
    Failed(QpEvent),
}

/// State of the responder.
#[derive(Debug)]
pub(super) struct Responder {
    /// The next PSN in order.
    pub(super) expected: Psn,
    /// Messages completed, modulo 2^24 (MSN).
    pub(super) completed: u32,
    message: Message,
    /// A receive taken for a packet that then had to be refused with an RNR NAK.
    pending_receive: Option<Receive>,
    /// A NAK was sent for `expected`, or is due: requests beyond it are ignored until it arrives.
    pub(super) nak_sent: bool,
    /// The last PSN of a send or write that was executed. An ACK carries this PSN and no later one:
    /// reads and atomics are acknowledged only by their responses.
    pub(super) acknowledged: Psn,
    pub(super) reply: Reply,
    pub(super) resource: ResourceRing,
    /// The PSN of the data to be sent next, if the peer has requested it again: if it is not
    /// resident, the peer gets an RNR NAK.
    pub(super) requested_again: Option<Psn>,
    /// How many times in a row memory was not resident.
    pub(super) fault_streak: u8,
    receive_completion: Option<ReceiveCompletion>,
    /// Requests behind `expected` that the host holds, if selective repeat was negotiated.
    pub(super) held: Option<Box<PsnSet>>,
    /// The NAK that failed the queue pair; repeated for retransmitted requests.
    fatal: Option<(Nak, Psn)>,
}

impl Responder {
    pub(super) fn new() -> Self {
        Self {
            expected: Psn::new(0),
            completed: 0,
            message: Message::None,
            pending_receive: None,
            nak_sent: false,
            acknowledged: Psn::new(0),
            reply: Reply::None,
            resource: ResourceRing::new(0),
            requested_again: None,
            fault_streak: 0,
            receive_completion: None,
            held: None,
            fatal: None,
        }
    }

    /// Whether the NAK for our failure is still to be sent.
    pub(super) fn has_fatal_nak(&self) -> bool {
        matches!(self.reply, Reply::Fatal(..))
    }

    pub(super) fn has_failed(&self) -> bool {
        self.fatal.is_some()
    }

    pub(super) fn has_receive_completion(&self) -> bool {
        self.receive_completion.is_some()
    }

    /// The completion of a receive; in the error state also of one whose message is incomplete.
    pub(super) fn poll_receive_completion(&mut self, failed: bool) -> Option<ReceiveCompletion> {
        if let Some(receive_completion) = self.receive_completion.take() {
            return Some(receive_completion);
        }
        if !failed {
            return None;
        }
        let receive = self.take_receive_in_use()?;
        Some(completion_of(receive.id, Status::Flushed, 0, ReceiveKind::Data))
    }

    /// Takes the receive out of the message being received.
    fn take_receive_in_use(&mut self) -> Option<Receive> {
        let of_message = match core::mem::replace(&mut self.message, Message::None) {
            Message::Send { receive, .. } => Some(receive),
            _ => None,
        };
        of_message.or(self.pending_receive.take())
    }

    pub(super) fn handle_request<H: Host>(
        &mut self,
        params: &ConnParams,
        rx: &RxPacket<'_>,
        host: &mut H,
        stats: &mut Stats,
    ) -> Outcome {
        let psn = rx.headers.psn;
        let distance = psn.distance_from(self.expected);
        if distance > 0 {
            return self.on_gap(psn, distance as u32, host, stats);
        }
        if distance < 0 {
            return Outcome::Dropped(self.on_duplicate(params, rx.headers));
        }
        match self.execute(params, rx, host) {
            Ok(()) => {
                self.nak_sent = false;
                self.fault_streak = 0;
                if self.held.is_some() {
                    self.forget_held(psn);
                }
                Outcome::Accepted
            }
            Err(reject @ (Reject::NotReady | Reject::NotResident)) => {
                // The duration is unknown: the RNR timer grows with each attempt.
                let not_resident = matches!(reject, Reject::NotResident);
                self.fault_streak =
                    if not_resident { self.fault_streak.saturating_add(1) } else { 0 };
                self.reply = Reply::NotReady;
                self.nak_sent = true;
                stats.rnr_sent += 1;
                Outcome::Dropped(DiscardReason::Busy)
            }
            Err(Reject::Busy) => Outcome::Dropped(DiscardReason::Busy),
            Err(Reject::Fatal { nak, receive, qp_event }) => {
                if let Some(pending_receive) = self.take_receive_in_use() {
                    self.receive_completion =
                        Some(completion_of(pending_receive.id, receive, 0, ReceiveKind::Data));
                }
                self.fail(nak, psn);
                Outcome::Failed(qp_event)
            }
        }
    }

    pub(super) fn fail(&mut self, nak: Nak, psn: Psn) {
        self.fatal = Some((nak, psn));
        self.reply = Reply::Fatal(nak, psn);
    }

    /// Repeats the NAK for a request that arrives after the failure: the first one may have been
    /// lost. Reads and atomics that were executed before the failure are answered again first.
    ///
    /// The failed PSN may belong to data that the peer already has, if a late duplicate of its
    /// request restarted the response. The peer would ignore a NAK for that PSN; so the NAK is sent
    /// for the requested PSN, or for the first one that was not executed, so that nothing is
    /// acknowledged that was not done.
    pub(super) fn repeat_fatal_nak(&mut self, params: &ConnParams, headers: &Headers) {
        if let Some((nak, psn)) = self.fatal {
            let requested = headers.psn;
            if requested.distance_from(self.expected) < 0 {
                self.on_duplicate(params, headers);
            }
            let first =
                if requested.distance_from(self.expected) > 0 { self.expected } else { requested };
            let repeated = if first.distance_from(psn) > 0 { first } else { psn };
            // Several requests may arrive before the NAK is sent: the first of them is answered,
            // because the peer misses it.
            let is_later = |due: Psn| due != psn && repeated.distance_from(due) > 0;
            if !matches!(self.reply, Reply::Fatal(_, due) if is_later(due)) {
                self.reply = Reply::Fatal(nak, repeated);
            }
        }
    }

    /// Handles a request beyond a missing one: one NAK, until the missing request arrives. If the
    /// NAK is lost, the peer's timer expires. With selective repeat the host keeps the request, and
    /// each such request has a NAK, which says which ones have arrived.
    #[cold]
    #[inline(never)]
    fn on_gap<H: Host>(
        &mut self,
        psn: Psn,
        distance: u32,
        host: &mut H,
        stats: &mut Stats,
    ) -> Outcome {
        if !self.nak_sent {
            self.nak_sent = self.held.is_none();
            self.reply = Reply::Sequence(psn);
        }
        let Some(held) = self.held.as_mut().filter(|_| distance < SPAN) else {
            return Outcome::Dropped(DiscardReason::Gap);
        };
        if held.contains(psn) {
            return Outcome::Dropped(DiscardReason::Duplicate);
        }
        if !host.hold(psn.value() % SPAN) {
            return Outcome::Dropped(DiscardReason::Gap);
        }
        held.insert(psn);
        stats.held += 1;
        Outcome::Held
    }

    /// Requests from `first` on were executed: copies of them are not held any more.
    #[inline(never)]
    fn forget_held(&mut self, first: Psn) {
        if let Some(held) = self.held.as_mut().filter(|held| !held.is_empty()) {
            for psn in psns(first, self.expected).take(SPAN as usize) {
                held.remove(psn);
            }
        }
    }

    /// The slot of a held request whose turn it is; it is no longer held.
    pub(super) fn take_held(&mut self) -> Option<u32> {
        // The next receive completion has no place yet.
        let held = self.held.as_mut().filter(|_| self.receive_completion.is_none())?;
        held.remove(self.expected).then(|| self.expected.value() % SPAN)
    }

    /// Handles a request that was executed before: answered again, never executed again.
    fn on_duplicate(&mut self, params: &ConnParams, headers: &Headers) -> DiscardReason {
        let psn = headers.psn;
        // It requests exactly the missing data, so the peer has everything before it.
        let misses = |resource: &mut Resource| resource.first.add(resource.next) == psn;
        let is_pending = self.resource.pending().is_some_and(misses);
        let found = match headers.extension {
            Extension::Reth(reth) if headers.opcode == Opcode::ReadRequest => {
                if reth.len > MAX_MESSAGE_LEN {
                    return DiscardReason::NoRecord;
                }
                self.resource.replay(psn, params.mtu.packets(reth.len), |resource, index| {
                    let RdAtomicOp::Read { at, len } = resource.requested else { return false };
                    let offset = params.mtu.offset(index);
                    let same_address = at.forward(offset).address == reth.address;
                    // It may stop before the end of the read, but only at a packet boundary.
                    let whole = reth.len == params.mtu.offset(params.mtu.packets(reth.len));
                    let left = len.wrapping_sub(offset);
                    let fits = offset <= len && (reth.len == left || whole && reth.len < left);
                    at.rkey == reth.rkey && (same_address || len == 0) && fits
                })
            }
            Extension::Atomic(_) | Extension::MaskedAtomic(_) => {
                self.resource.replay(psn, 1, |resource, _| {
                    matches!(resource.requested, RdAtomicOp::Atomic { .. })
                })
            }
            _ => {
                if self.reply == Reply::None {
                    self.reply = Reply::Ack;
                }
                true
            }
        };
        if found && is_pending {
            self.requested_again = Some(psn);
        }
        if found { DiscardReason::Duplicate } else { DiscardReason::NoRecord }
    }

    #[inline(always)]
    fn execute<H: Host>(
        &mut self,
        params: &ConnParams,
        rx: &RxPacket<'_>,
        host: &mut H,
    ) -> Result<(), Reject> {
        let (headers, len) = (rx.headers, rx.payload_len);
        let (opcode, extension) = (headers.opcode, headers.extension);
        use Opcode as O;
        match opcode {
            O::SendFirst | O::SendOnly | O::SendOnlyImm | O::SendOnlyInvalidate => {
                self.require_message_start()?;
                let receive = self.receive(host)?;
                check_len(params.mtu, opcode == O::SendFirst, true, len)?;
                self.send_packet(headers, receive, 0, len, host)
            }
            O::SendMiddle | O::SendLast | O::SendLastImm | O::SendLastInvalidate => {
                let Message::Send { receive, len: done } = self.message else {
                    return Err(Reject::invalid());
                };
                check_len(params.mtu, opcode == O::SendMiddle, false, len)?;
                self.send_packet(headers, receive, done, len, host)
            }
            O::WriteFirst | O::WriteOnly | O::WriteOnlyImm => {
                self.require_message_start()?;
                require_access(params.access, Access::REMOTE_WRITE)?;
                if opcode == O::WriteOnlyImm {
                    self.receive(host)?;
                }
                check_len(params.mtu, opcode == O::WriteFirst, true, len)?;
                let (Extension::Reth(reth) | Extension::RethImm(reth, _)) = extension else {
                    return Err(Reject::invalid());
                };
                self.begin_write(headers, reth, len, host)
            }
            O::WriteMiddle | O::WriteLast | O::WriteLastImm => {
                let Message::Write { at, done, total } = self.message else {
                    return Err(Reject::invalid());
                };
                require_access(params.access, Access::REMOTE_WRITE)?;
                if opcode == O::WriteLastImm {
                    self.receive(host)?;
                }
                check_len(params.mtu, opcode == O::WriteMiddle, false, len)?;
                self.write_packet(headers, (at, done, total), len, host)
            }
            O::ReadRequest => {
                self.require_message_start()?;
                require_access(params.access, Access::REMOTE_READ)?;
                let Extension::Reth(reth) = extension else { return Err(Reject::invalid()) };
                self.read(params, headers.psn, reth, len, host)
            }
            O::CompareSwap
            | O::FetchAdd
            | O::MaskedCompareSwap
            | O::MaskedFetchAdd
            | O::MaskedCompareSwap4
            | O::MaskedFetchAdd4 => {
                self.require_message_start()?;
                require_access(params.access, Access::REMOTE_ATOMIC)?;
                self.atomic(headers, len, host)
            }
            _ => Err(Reject::invalid()),
        }
    }

    fn require_message_start(&self) -> Result<(), Reject> {
        if self.message == Message::None { Ok(()) } else { Err(Reject::invalid()) }
    }

    /// The receive for the current message: one taken for it before, or the next of the queue.
    fn receive<H: Host>(&mut self, host: &mut H) -> Result<Receive, Reject> {
        self.pending_receive = self.pending_receive.or_else(|| host.take_receive());
        self.pending_receive.ok_or(Reject::NotReady)
    }

    fn send_packet<H: Host>(
        &mut self,
        headers: &Headers,
        receive: Receive,
        done: u32,
        len: u32,
        host: &mut H,
    ) -> Result<(), Reject> {
        let total = done.saturating_add(len);
        let has_more = matches!(headers.opcode, Opcode::SendFirst | Opcode::SendMiddle);
        if !has_more && self.receive_completion.is_some() {
            return Err(Reject::Busy);
        }
        if total > MAX_MESSAGE_LEN {
            return Err(Reject::invalid());
        }
        if total > receive.capacity {
            return Err(Reject::too_long());
        }
        if len > 0 {
            let to = Target::Receive { id: receive.id, offset: done };
            check_host(host.place(to, len), Reject::operation)?;
        }
        if has_more {
            self.pending_receive = None;
            self.message = Message::Send { receive, len: total };
            self.advance(headers);
            return Ok(());
        }
        let kind = match headers.extension {
            Extension::Imm(imm) => ReceiveKind::Imm(imm),
            Extension::Invalidate(key) => {
                check_host(host.invalidate(key), Reject::access)?;
                ReceiveKind::Invalidated(key)
            }
            _ => ReceiveKind::Data,
        };
        self.finish(headers, Some((receive, total, kind)));
        Ok(())
    }

    fn begin_write<H: Host>(
        &mut self,
        headers: &Headers,
        reth: Reth,
        len: u32,
        host: &mut H,
    ) -> Result<(), Reject> {
        let is_first = headers.opcode == Opcode::WriteFirst;
        let fits = if is_first { reth.len > len } else { reth.len == len };
        if !fits || reth.len > MAX_MESSAGE_LEN {
            return Err(Reject::invalid());
        }
        let at = Remote { address: reth.address, rkey: reth.rkey };
        if reth.len > 0 {
            check_host(host.may_access(Access::REMOTE_WRITE, at, reth.len), Reject::access)?;
        }
        self.write_packet(headers, (at, 0, reth.len), len, host)
    }

    #[inline(always)]
    fn write_packet<H: Host>(
        &mut self,
        headers: &Headers,
        (at, done, total): (Remote, u32, u32),
        len: u32,
        host: &mut H,
    ) -> Result<(), Reject> {
        let has_more = matches!(headers.opcode, Opcode::WriteFirst | Opcode::WriteMiddle);
        let left = total - done;
        let fits = if has_more { len < left } else { len == left };
        if !fits {
            return Err(Reject::invalid());
        }
        let imm = match headers.extension {
            Extension::Imm(_) | Extension::RethImm(..) if self.receive_completion.is_some() => {
                return Err(Reject::Busy);
            }
            Extension::Imm(imm) | Extension::RethImm(_, imm) => Some((self.receive(host)?, imm)),
            _ => None,
        };
        if len > 0 {
            check_host(host.place(Target::Remote(at.forward(done)), len), Reject::access)?;
        }
        if has_more {
            self.message = Message::Write { at, done: done + len, total };
            self.advance(headers);
        } else {
            let receive_completion =
                imm.map(|(receive, imm)| (receive, total, ReceiveKind::WriteImm(imm)));
            self.finish(headers, receive_completion);
        }
        Ok(())
    }

    fn read<H: Host>(
        &mut self,
        params: &ConnParams,
        psn: Psn,
        reth: Reth,
        payload_len: u32,
        host: &mut H,
    ) -> Result<(), Reject> {
        let valid = payload_len == 0 && reth.len <= MAX_MESSAGE_LEN;
        if !valid || !self.resource.has_room() {
            return Err(Reject::invalid());
        }
        let packets = params.mtu.packets(reth.len);
        let at = Remote { address: reth.address, rkey: reth.rkey };
        if reth.len > 0 {
            check_host(host.may_access(Access::REMOTE_READ, at, reth.len), Reject::access)?;
        }
        self.resource.push(psn, packets, RdAtomicOp::Read { at, len: reth.len });
        self.complete_message();
        self.ack_implicitly(packets);
        Ok(())
    }

    fn atomic<H: Host>(
        &mut self,
        headers: &Headers,
        payload_len: u32,
        host: &mut H,
    ) -> Result<(), Reject> {
        let requested = super::atomic::requested(headers.opcode, headers.extension);
        let (at, atomic) = requested.ok_or_else(Reject::invalid)?;
        let aligned = at.address.is_multiple_of(u64::from(atomic.width().bytes()));
        if payload_len != 0 || !aligned || !self.resource.has_room() {
            return Err(Reject::invalid());
        }
        check_host(
            host.may_access(Access::REMOTE_ATOMIC, at, atomic.width().bytes()),
            Reject::access,
        )?;
        let before = match host.execute(at, atomic) {
            Ok(before) => before,
            Err(HostStatus::Retry) => return Err(Reject::NotResident),
            Err(_) => return Err(Reject::access()),
        };
        self.resource.push(headers.psn, 1, RdAtomicOp::Atomic { before });
        self.complete_message();
        self.ack_implicitly(1);
        Ok(())
    }

    /// A message is complete, and with it a receive if it used one.
    fn finish(
        &mut self,
        headers: &Headers,
        receive_completion: Option<(Receive, u32, ReceiveKind)>,
    ) {
        self.message = Message::None;
        self.complete_message();
        if let Some((receive, len, kind)) = receive_completion {
            self.pending_receive = None;
            let receive_completion = completion_of(receive.id, Status::Success, len, kind);
            self.receive_completion =
                Some(ReceiveCompletion { solicited: headers.solicited, ..receive_completion });
        }
        self.advance(headers);
    }

    fn complete_message(&mut self) {
        self.completed = self.completed.wrapping_add(1) & 0xff_ffff;
    }

    fn advance(&mut self, headers: &Headers) {
        self.acknowledged = self.expected;
        self.expected = self.expected.next();
        let ack_due = match self.reply {
            // Packets behind the gap were discarded: the NAK is still due.
            Reply::Sequence(_) => false,
            Reply::NotReady => true,
            _ => headers.ack_request,
        };
        if ack_due {
            self.reply = Reply::Ack;
        }
    }

    /// The response to a read or an atomic acknowledges everything before it.
    fn ack_implicitly(&mut self, psn_count: u32) {
        self.expected = self.expected.add(psn_count);
        if !matches!(self.reply, Reply::Sequence(_)) {
            self.reply = Reply::None;
        }
    }
}

fn completion_of(id: u64, status: Status, len: u32, kind: ReceiveKind) -> ReceiveCompletion {
    ReceiveCompletion { id, status, len, kind, solicited: false, source_qp: 0 }
}

/// All packets of a message but the last have MTU length; the last has at least one byte, unless it
/// is the only one.
fn check_len(mtu: Mtu, has_more: bool, is_first: bool, len: u32) -> Result<(), Reject> {
    let valid = match (has_more, is_first) {
        (true, _) => len == mtu.bytes(),
        (false, true) => len <= mtu.bytes(),
        (false, false) => len >= 1 && len <= mtu.bytes(),
    };
    if valid { Ok(()) } else { Err(Reject::invalid()) }
}

fn require_access(allowed: Access, wanted: Access) -> Result<(), Reject> {
    if allowed.contains(wanted) { Ok(()) } else { Err(Reject::invalid()) }
}
