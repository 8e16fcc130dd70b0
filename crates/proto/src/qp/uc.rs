//! The unreliable connected queue pair: messages of any length to one peer, without
//! acknowledgement.
//!
//! 1. Work completes when its last packet is sent, in the order of posting.
//! 2. A message arrives whole or not at all: if one of its packets is lost, out of order, of the
//!    wrong length or not allowed, or the message is longer than its receive, the rest of it is
//!    dropped silently. Bytes that came before stay written; a send's receive is used for the next
//!    message.
//! 3. The first packet of a message is accepted with any PSN: nothing is retransmitted, so a gap
//!    ends with the next message. A message whose packets the network duplicates arrives twice.
//! 4. The peer cannot fail it. Local errors do: memory of its own requests moves the send queue to
//!    `SQE`, memory of a receive the queue pair to `ERR`.

use alloc::collections::VecDeque;

use super::attr::{ModifyError, Mtu, PathAttributes, QpAttributes, Service, State};
use super::host::{Host, HostStatus, Receive, Remote, Source, Target};
use super::work::{
    ProtocolEvent, QpEvent, ReceiveCompletion, ReceiveKind, SendCompletion, SendOp, SendQueueError,
    SendWr, Status,
};
use super::{
    Access, DiscardReason, Established, MAX_MESSAGE_PACKETS, Payload, RxPacket, Stats, Transmit,
};
use crate::psn::Psn;
use crate::wire::packet::DEFAULT_PARTITION;
use crate::wire::{Extension, Headers, Opcode, Position, Reth};

/// A message that is being received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Incoming {
    /// None: the next packet must be the first of its message.
    None,
    /// A send, into the pending receive, with this many bytes so far.
    Send(u32),
    /// An RDMA write: where the next packet goes, the bytes that are left, and those before.
    Write { at: Remote, left: u32, done: u32 },
}

/// An unreliable connected queue pair, used in the same way as [`RcQp`](super::RcQp).
#[derive(Debug)]
pub struct Uc {
    number: u32,
    state: State,
    depth: usize,
    path: Option<PathAttributes>,
    destination: u32,
    mtu: Mtu,
    access: Access,
    next: Psn,
    /// Posted and not sent entirely.
    posted: VecDeque<SendWr>,
    /// Packets of the first posted work that were sent.
    sent: u32,
    /// Sent or failed, and not reported.
    completed: VecDeque<SendCompletion>,
    expected: Psn,
    incoming: Incoming,
    /// Of the message that is being received, or of one that was dropped.
    pending_receive: Option<Receive>,
    receive_completion: Option<ReceiveCompletion>,
    qp_event: Option<QpEvent>,
    established: Established,
    notify_drained: bool,
    stats: Stats,
}

impl Uc {
    /// Creates a queue pair in `RESET`, for `depth` work requests (1 to 2^20).
    pub fn new(number: u32, depth: u32) -> Self {
        let depth = depth.clamp(1, 1 << 20) as usize;
        Self {
            number,
            state: State::Reset,
            depth,
            path: None,
            destination: 0,
            mtu: Mtu::ALL[0],
            access: Access::NONE,
            next: Psn::new(0),
            posted: VecDeque::with_capacity(depth),
            sent: 0,
            completed: VecDeque::with_capacity(depth),
            expected: Psn::new(0),
            incoming: Incoming::None,
            pending_receive: None,
            receive_completion: None,
            qp_event: None,
            established: Established::No,
            notify_drained: false,
            stats: Stats::default(),
        }
    }

    /// The queue pair number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The current state.
    pub fn state(&self) -> State {
        self.state
    }

    /// The path to the peer, once connected.
    pub fn path(&self) -> Option<&PathAttributes> {
        self.path.as_ref()
    }

    /// The path MTU.
    pub fn mtu(&self) -> Mtu {
        self.mtu
    }

    /// Posted work requests whose completion has not been polled yet.
    pub fn outstanding(&self) -> u32 {
        (self.posted.len() + self.completed.len()) as u32
    }

    /// The counters since the queue pair was created.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// All memory that it holds, in bytes; it never changes.
    pub fn footprint(&self) -> usize {
        let posted = self.posted.capacity() * size_of::<SendWr>();
        size_of::<Self>() + posted + self.completed.capacity() * size_of::<SendCompletion>()
    }

    /// Changes state or attributes according to the [table](super::attr::TRANSITIONS). A rejected
    /// change has no effect.
    pub fn modify(&mut self, attr: &QpAttributes) -> Result<(), ModifyError> {
        attr.check(Service::Uc, self.state)?;
        match attr.to {
            State::Reset => {
                self.posted.clear();
                self.completed.clear();
                (self.sent, self.incoming, self.path) = (0, Incoming::None, None);
                (self.pending_receive, self.receive_completion) = (None, None);
                (self.qp_event, self.notify_drained) = (None, false);
                self.established = Established::No;
            }
            State::Err => self.fail(State::Err),
            State::Sqd if self.state == State::Rts => {
                self.notify_drained = attr.notify_drained.unwrap_or(false);
            }
            _ => {}
        }
        self.path = attr.path.or(self.path);
        self.destination = attr.destination.unwrap_or(self.destination);
        self.mtu = attr.mtu.unwrap_or(self.mtu);
        self.access = attr.access.unwrap_or(self.access);
        self.next = attr.send_psn.unwrap_or(self.next);
        self.expected = attr.receive_psn.unwrap_or(self.expected);
        self.state = attr.to;
        Ok(())
    }

    /// Posts work: sends, RDMA writes, both with or without immediate data, and work on keys of
    /// memory windows. Other operations fail in queue order with [`Status::LocalQpOperation`], and
    /// move the send queue to `SQE`.
    pub fn post(&mut self, work: SendWr) -> Result<(), SendQueueError> {
        if !matches!(self.state, State::Rts | State::Sqd | State::Sqe | State::Err) {
            return Err(SendQueueError::State(self.state));
        }
        if work.len > 1 << 31 || self.mtu.packets(work.len) > MAX_MESSAGE_PACKETS {
            return Err(SendQueueError::Length(work.len));
        }
        if self.posted.len() + self.completed.len() >= self.depth {
            return Err(SendQueueError::Full);
        }
        self.posted.push_back(work);
        if matches!(self.state, State::Sqe | State::Err) {
            self.flush();
        }
        Ok(())
    }

    /// The next packet to send. Work completes when its last packet is returned.
    pub fn poll_transmit<H: Host>(&mut self, host: &mut H) -> Option<Transmit> {
        loop {
            // A queue that drains finishes the message that it has begun.
            let may_send = match self.state {
                State::Rts => true,
                State::Sqd => self.sent > 0,
                _ => false,
            };
            let work = *self.posted.front().filter(|_| may_send)?;
            let local = match work.op {
                SendOp::Send | SendOp::SendImm(_) | SendOp::Write(_) | SendOp::WriteImm(..) => None,
                SendOp::Local => Some(Status::Success),
                // The host cannot do it now: nothing else is sent before it.
                SendOp::Bind(_) | SendOp::LocalInvalidate(_) => Some(work.op.change_key(host)?),
                SendOp::Bad(status) => Some(status),
                _ => Some(Status::LocalQpOperation),
            };
            match local {
                Some(status) => self.complete_first(status),
                None => return self.transmit(&work, host),
            }
        }
    }

    fn transmit<H: Host>(&mut self, work: &SendWr, host: &mut H) -> Option<Transmit> {
        let packets = self.mtu.packets(work.len);
        let offset = self.mtu.offset(self.sent);
        let len = (work.len - offset).min(self.mtu.bytes());
        let is_last = self.sent + 1 == packets;
        let position = match (self.sent, is_last) {
            (0, true) => Position::Only,
            (0, false) => Position::First,
            (_, true) => Position::Last,
            (_, false) => Position::Middle,
        };
        let (opcode, extension) = headers_of(work, position);
        let plain = Headers::new(opcode, self.destination, self.next, extension);
        let headers = Headers { solicited: work.solicited && is_last, ..plain };
        let from = Source::SendWr { id: work.id, offset };
        let fetched =
            if len > 0 { host.fetch(from, len, headers.len()) } else { HostStatus::Ready };
        match fetched {
            HostStatus::Ready => {}
            HostStatus::Retry => return None,
            HostStatus::Denied => {
                self.complete_first(Status::LocalProtection);
                return None;
            }
        }
        self.next = self.next.next();
        self.sent += 1;
        if is_last {
            self.complete_first(Status::Success);
        }
        self.stats.packets_sent += 1;
        self.stats.bytes_sent += u64::from(len);
        Some(Transmit { headers, payload: (len > 0).then_some(Payload { from, len }) })
    }

    fn complete_first(&mut self, status: Status) {
        let Some(SendWr { id, signaled, .. }) = self.posted.pop_front() else { return };
        self.sent = 0;
        self.completed.push_back(SendCompletion { id, status, signaled });
        if status != Status::Success {
            self.fail(State::Sqe);
        }
    }

    /// Handles a packet of the peer. `Err` is the reason for which it was discarded.
    pub fn handle_packet<H: Host>(
        &mut self,
        rx: &RxPacket<'_>,
        host: &mut H,
    ) -> Result<(), DiscardReason> {
        self.stats.packets_received += 1;
        self.stats.bytes_received += u64::from(rx.payload_len);
        let outcome = self.receive(rx, host);
        if let Err(reason) = outcome {
            self.stats.count(reason);
        }
        outcome
    }

    fn receive<H: Host>(&mut self, rx: &RxPacket<'_>, host: &mut H) -> Result<(), DiscardReason> {
        let headers = rx.headers;
        // A packet that does not belong to the connection leaves its message alone.
        if !headers.opcode.is_uc() {
            return Err(DiscardReason::Service);
        }
        if matches!(self.state, State::Reset | State::Init | State::Err) {
            return Err(DiscardReason::State);
        }
        if headers.partition | 0x8000 != DEFAULT_PARTITION {
            return Err(DiscardReason::Partition);
        }
        if self.state == State::Rtr && self.established == Established::No {
            self.established = Established::Pending;
        }
        let outcome = self.continue_message(rx, host);
        if outcome.is_err() {
            // The rest of its message is of no use either.
            self.incoming = Incoming::None;
        }
        outcome
    }

    fn continue_message<H: Host>(
        &mut self,
        rx: &RxPacket<'_>,
        host: &mut H,
    ) -> Result<(), DiscardReason> {
        if self.receive_completion.is_some() {
            return Err(DiscardReason::Busy);
        }
        let headers = rx.headers;
        let is_write = headers.opcode.is_uc_write();
        let position = headers.opcode.position();
        let is_first = matches!(position, Position::First | Position::Only);
        let is_last = matches!(position, Position::Last | Position::Only);
        let in_order = headers.psn == self.expected;
        self.expected = headers.psn.next();
        if !is_first && !in_order {
            return Err(DiscardReason::Gap);
        }
        if is_first {
            self.begin(headers, is_write, host)?;
        }
        // All packets but the last are full.
        let (len, mtu) = (rx.payload_len, self.mtu.bytes());
        let fits = if is_last { len <= mtu && (is_first || len > 0) } else { len == mtu };
        if !fits {
            return Err(DiscardReason::Length);
        }
        match (self.incoming, is_write) {
            (Incoming::Send(done), false) => self.place_send(headers, done, len, is_last, host),
            (Incoming::Write { at, left, done }, true) => {
                if len > left || is_last && len != left {
                    return Err(DiscardReason::Length);
                }
                if len > 0 {
                    placed(host.place(Target::Remote(at), len))?;
                }
                let (at, left, done) = (at.forward(len), left - len, done + len);
                self.incoming = Incoming::Write { at, left, done };
                if is_last { self.end_write(headers, done, host) } else { Ok(()) }
            }
            _ => Err(DiscardReason::Gap),
        }
    }

    /// Begins a message, instead of one that has not ended.
    fn begin<H: Host>(
        &mut self,
        headers: &Headers,
        is_write: bool,
        host: &mut H,
    ) -> Result<(), DiscardReason> {
        if !is_write {
            self.pending_receive = self.pending_receive.or_else(|| host.take_receive());
            self.pending_receive.ok_or(DiscardReason::NoReceive)?;
            self.incoming = Incoming::Send(0);
            return Ok(());
        }
        let (Extension::Reth(reth) | Extension::RethImm(reth, _)) = headers.extension else {
            return Err(DiscardReason::Service);
        };
        let at = Remote { address: reth.address, rkey: reth.rkey };
        if reth.len > 0 {
            let is_allowed = self.access.contains(Access::REMOTE_WRITE);
            if !is_allowed {
                return Err(DiscardReason::Access);
            }
            placed(host.may_access(Access::REMOTE_WRITE, at, reth.len))?;
        }
        self.incoming = Incoming::Write { at, left: reth.len, done: 0 };
        Ok(())
    }

    fn place_send<H: Host>(
        &mut self,
        headers: &Headers,
        done: u32,
        len: u32,
        is_last: bool,
        host: &mut H,
    ) -> Result<(), DiscardReason> {
        let receive = self.pending_receive.ok_or(DiscardReason::NoReceive)?;
        let total = done.saturating_add(len);
        if total > receive.capacity {
            return Err(DiscardReason::Length);
        }
        if len > 0 {
            match host.place(Target::Receive { id: receive.id, offset: done }, len) {
                HostStatus::Ready => {}
                HostStatus::Retry => return Err(DiscardReason::Busy),
                HostStatus::Denied => {
                    let status = Status::LocalProtection;
                    self.complete_receive(headers, total, status, ReceiveKind::Data);
                    return Ok(());
                }
            }
        }
        self.incoming = Incoming::Send(total);
        if is_last {
            let kind = match headers.extension {
                Extension::Imm(imm) => ReceiveKind::Imm(imm),
                _ => ReceiveKind::Data,
            };
            self.complete_receive(headers, total, Status::Success, kind);
        }
        Ok(())
    }

    fn end_write<H: Host>(
        &mut self,
        headers: &Headers,
        len: u32,
        host: &mut H,
    ) -> Result<(), DiscardReason> {
        self.incoming = Incoming::None;
        let (Extension::Imm(imm) | Extension::RethImm(_, imm)) = headers.extension else {
            return Ok(());
        };
        self.pending_receive = self.pending_receive.or_else(|| host.take_receive());
        self.pending_receive.ok_or(DiscardReason::NoReceive)?;
        self.complete_receive(headers, len, Status::Success, ReceiveKind::WriteImm(imm));
        Ok(())
    }

    /// Completes the pending receive. A failure is local, and fails the queue pair.
    fn complete_receive(&mut self, headers: &Headers, len: u32, status: Status, kind: ReceiveKind) {
        self.incoming = Incoming::None;
        let Some(Receive { id, .. }) = self.pending_receive.take() else { return };
        let solicited = headers.solicited;
        self.receive_completion =
            Some(ReceiveCompletion { id, status, len, kind, solicited, source_qp: 0 });
        if status != Status::Success {
            self.qp_event = Some(QpEvent::Fatal);
            self.fail(State::Err);
        }
    }

    fn is_drained(&self) -> bool {
        self.notify_drained && self.state == State::Sqd && self.sent == 0
    }

    /// Whether [`poll_event`](Self::poll_event) has an event.
    pub fn has_events(&self) -> bool {
        !self.completed.is_empty()
            || self.receive_completion.is_some()
            || self.qp_event.is_some()
            || self.established == Established::Pending
            || self.pending_receive.is_some() && self.state == State::Err
            || self.is_drained()
    }

    /// The next event. Call it until `None`.
    pub fn poll_event(&mut self) -> Option<ProtocolEvent> {
        if let Some(completion) = self.completed.pop_front() {
            return Some(ProtocolEvent::Sent(completion));
        }
        if let Some(receive_completion) = self.receive_completion.take() {
            return Some(ProtocolEvent::Received(receive_completion));
        }
        let receive = self.pending_receive.take_if(|_| self.state == State::Err);
        if let Some(Receive { id, .. }) = receive {
            let (status, kind) = (Status::Flushed, ReceiveKind::Data);
            let flushed =
                ReceiveCompletion { id, status, len: 0, kind, solicited: false, source_qp: 0 };
            return Some(ProtocolEvent::Received(flushed));
        }
        if self.established == Established::Pending {
            self.established = Established::Reported;
            return Some(ProtocolEvent::Async(QpEvent::Established));
        }
        if let Some(event) = self.qp_event.take() {
            return Some(ProtocolEvent::Async(event));
        }
        if self.is_drained() {
            self.notify_drained = false;
            return Some(ProtocolEvent::Async(QpEvent::Drained));
        }
        None
    }

    fn fail(&mut self, state: State) {
        self.state = state;
        self.flush();
    }

    fn flush(&mut self) {
        self.sent = 0;
        while let Some(SendWr { id, signaled, .. }) = self.posted.pop_front() {
            self.completed.push_back(SendCompletion { id, status: Status::Flushed, signaled });
        }
    }
}

/// Memory that the peer named: what is not possible is dropped.
fn placed(status: HostStatus) -> Result<(), DiscardReason> {
    match status {
        HostStatus::Ready => Ok(()),
        HostStatus::Retry => Err(DiscardReason::Busy),
        HostStatus::Denied => Err(DiscardReason::Access),
    }
}

/// The opcode and extension headers of a packet.
fn headers_of(work: &SendWr, position: Position) -> (Opcode, Extension) {
    let (write, imm) = match work.op {
        SendOp::Write(at) => (Some(at), None),
        SendOp::WriteImm(at, imm) => (Some(at), Some(imm)),
        SendOp::SendImm(imm) => (None, Some(imm)),
        _ => (None, None),
    };
    let reth = |Remote { address, rkey }| Reth { address, rkey, len: work.len };
    match (position, write, imm) {
        (Position::First, None, _) => (Opcode::UcSendFirst, Extension::None),
        (Position::Middle, None, _) => (Opcode::UcSendMiddle, Extension::None),
        (Position::Last, None, None) => (Opcode::UcSendLast, Extension::None),
        (Position::Last, None, Some(imm)) => (Opcode::UcSendLastImm, Extension::Imm(imm)),
        (Position::Only, None, None) => (Opcode::UcSendOnly, Extension::None),
        (Position::Only, None, Some(imm)) => (Opcode::UcSendOnlyImm, Extension::Imm(imm)),
        (Position::First, Some(at), _) => (Opcode::UcWriteFirst, Extension::Reth(reth(at))),
        (Position::Middle, Some(_), _) => (Opcode::UcWriteMiddle, Extension::None),
        (Position::Last, Some(_), None) => (Opcode::UcWriteLast, Extension::None),
        (Position::Last, Some(_), Some(imm)) => (Opcode::UcWriteLastImm, Extension::Imm(imm)),
        (Position::Only, Some(at), None) => (Opcode::UcWriteOnly, Extension::Reth(reth(at))),
        (Position::Only, Some(at), Some(imm)) => {
            (Opcode::UcWriteOnlyImm, Extension::RethImm(reth(at), imm))
        }
    }
}
