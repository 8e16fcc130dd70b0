//! The unreliable datagram queue pair: one packet per message, to any destination, without
//! acknowledgement.
//!
//! Each receive starts with the 40 bytes of a global route header (GRH), which identifies the
//! sender and is written by the host; for IPv4 its last 20 bytes are the IP header. Queue pair 1,
//! of the connection manager, is a datagram queue pair with the well-known Q_Key
//! [`Ud::MANAGEMENT_QKEY`].

use alloc::collections::VecDeque;

use super::attr::{ModifyError, Mtu, QpAttributes, Service, State};
use super::host::{Host, HostStatus, Receive, Source, Target};
use super::work::{
    ProtocolEvent, QpEvent, ReceiveCompletion, ReceiveKind, SendCompletion, SendQueueError, Status,
};
use super::{DiscardReason, Payload, RxPacket, Stats, Transmit};
use crate::psn::Psn;
use crate::wire::packet::DEFAULT_PARTITION;
use crate::wire::{Deth, Extension, Headers, Opcode};

/// Length of the GRH at the start of each receive, in bytes.
pub const GRH_LEN: u32 = 40;

/// A datagram to send. Only the host knows its network address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Datagram {
    /// The host's identifier.
    pub id: u64,
    /// The destination queue pair's number.
    pub destination: u32,
    /// The destination's Q_Key. With the top bit set, the sending queue pair's own Q_Key is sent
    /// instead.
    pub qkey: u32,
    /// Length in bytes; at most the MTU.
    pub len: u32,
    /// Immediate data.
    pub imm: Option<u32>,
    /// Whether the user wants a completion on success.
    pub signaled: bool,
    /// Solicited event: the receiver's completion wakes waiters that are armed for solicited
    /// events.
    pub solicited: bool,
}

/// Posted work that has not completed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UdWr {
    Datagram(Datagram),
    /// Nothing to send: completes in queue order, like this.
    Local(SendCompletion),
}

impl UdWr {
    fn completed(&self, status: Status) -> SendCompletion {
        let (id, signaled) = match *self {
            Self::Datagram(Datagram { id, signaled, .. }) => (id, signaled),
            Self::Local(SendCompletion { id, signaled, .. }) => (id, signaled),
        };
        SendCompletion { id, status, signaled }
    }
}

/// A datagram queue pair, used in the same way as [`RcQp`](super::RcQp).
#[derive(Debug)]
pub struct Ud {
    number: u32,
    state: State,
    mtu: Mtu,
    depth: usize,
    qkey: u32,
    next: Psn,
    /// Posted and not sent.
    posted: VecDeque<UdWr>,
    /// Sent or failed, and not reported.
    completed: VecDeque<SendCompletion>,
    /// Taken for a datagram that did not fit; used for the next one.
    pending_receive: Option<Receive>,
    receive_completion: Option<ReceiveCompletion>,
    notify_drained: bool,
    stats: Stats,
}

impl Ud {
    /// The Q_Key of queue pair 1.
    pub const MANAGEMENT_QKEY: u32 = 0x8001_0000;

    /// Creates a datagram queue pair in `RESET`, for `depth` datagrams (1 to 2^20) of at most `mtu`
    /// bytes.
    pub fn new(number: u32, mtu: Mtu, depth: u32) -> Self {
        let depth = depth.clamp(1, 1 << 20) as usize;
        Self {
            number,
            state: State::Reset,
            mtu,
            depth,
            qkey: 0,
            next: Psn::new(0),
            posted: VecDeque::with_capacity(depth),
            completed: VecDeque::with_capacity(depth),
            pending_receive: None,
            receive_completion: None,
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

    /// The maximum payload of a datagram.
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
        let posted = self.posted.capacity() * size_of::<UdWr>();
        size_of::<Self>() + posted + self.completed.capacity() * size_of::<SendCompletion>()
    }

    /// Changes state or attributes according to the [table](super::attr::TRANSITIONS). A rejected
    /// change has no effect.
    pub fn modify(&mut self, attr: &QpAttributes) -> Result<(), ModifyError> {
        attr.check(Service::Ud, self.state)?;
        match attr.to {
            State::Reset => {
                self.posted.clear();
                self.completed.clear();
                (self.pending_receive, self.receive_completion, self.notify_drained) =
                    (None, None, false);
            }
            State::Err => self.fail(State::Err),
            State::Sqd if self.state == State::Rts => {
                self.notify_drained = attr.notify_drained.unwrap_or(false);
            }
            _ => {}
        }
        self.qkey = attr.qkey.unwrap_or(self.qkey);
        self.next = attr.send_psn.unwrap_or(self.next);
        self.state = attr.to;
        Ok(())
    }

    /// Posts a datagram.
    pub fn post(&mut self, datagram: Datagram) -> Result<(), SendQueueError> {
        if datagram.len > self.mtu.bytes() {
            return Err(SendQueueError::Length(datagram.len));
        }
        self.enqueue(UdWr::Datagram(datagram))
    }

    /// Posts work without a packet. It completes in queue order with this status; a failure moves
    /// the send queue to `SQE`.
    pub fn post_local(&mut self, work: SendCompletion) -> Result<(), SendQueueError> {
        self.enqueue(UdWr::Local(work))
    }

    fn enqueue(&mut self, work: UdWr) -> Result<(), SendQueueError> {
        if !matches!(self.state, State::Rts | State::Sqd | State::Sqe | State::Err) {
            return Err(SendQueueError::State(self.state));
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

    /// Handles a packet received for this queue pair. `Err` is the reason for which it was
    /// discarded.
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
        let (headers, len) = (rx.headers, rx.payload_len);
        let (deth, kind) = match headers.extension {
            Extension::Deth(deth) => (deth, ReceiveKind::Data),
            Extension::DethImm(deth, imm) => (deth, ReceiveKind::Imm(imm)),
            _ => return Err(DiscardReason::Service),
        };
        if matches!(self.state, State::Reset | State::Init | State::Err) {
            return Err(DiscardReason::State);
        }
        if headers.partition | 0x8000 != DEFAULT_PARTITION {
            return Err(DiscardReason::Partition);
        }
        if deth.qkey != self.qkey {
            return Err(DiscardReason::Qkey);
        }
        if self.receive_completion.is_some() {
            return Err(DiscardReason::Busy);
        }
        self.pending_receive = self.pending_receive.or_else(|| host.take_receive());
        let receive = self.pending_receive.ok_or(DiscardReason::NoReceive)?;
        let total_len = len.saturating_add(GRH_LEN);
        // Anyone that knows the Q_Key may send: a datagram that does not fit must not consume the
        // receive.
        if len > self.mtu.bytes() || total_len > receive.capacity {
            return Err(DiscardReason::Length);
        }
        let grh_target = Target::Grh { id: receive.id };
        let payload_target = Target::Receive { id: receive.id, offset: GRH_LEN };
        let mut status = Status::Success;
        let parts = [(grh_target, GRH_LEN), (payload_target, len)];
        for (target, len) in parts.into_iter().filter(|(_, len)| *len > 0) {
            match host.place(target, len) {
                HostStatus::Ready => {}
                HostStatus::Retry => return Err(DiscardReason::Busy),
                HostStatus::Denied => status = Status::LocalProtection,
            }
        }
        self.pending_receive = None;
        let (solicited, source_qp) = (headers.solicited, deth.source_qp);
        let id = receive.id;
        self.receive_completion =
            Some(ReceiveCompletion { id, status, len: total_len, kind, solicited, source_qp });
        if status != Status::Success {
            self.fail(State::Err);
        }
        Ok(())
    }

    /// The datagram that [`poll_transmit`](Self::poll_transmit) would send, for a host that must
    /// know the destination before it reserves a buffer. Completes local work ahead of it.
    pub fn peek_transmit(&mut self) -> Option<Datagram> {
        while self.state == State::Rts {
            match *self.posted.front()? {
                UdWr::Datagram(datagram) => return Some(datagram),
                UdWr::Local(work) => self.complete_first(work.status),
            }
        }
        None
    }

    /// Fails the next datagram with this status; the send queue moves to `SQE`.
    pub fn fail_transmit(&mut self, status: Status) {
        if self.peek_transmit().is_some() {
            self.complete_first(status);
        }
    }

    fn complete_first(&mut self, status: Status) {
        let Some(work) = self.posted.pop_front() else { return };
        self.completed.push_back(work.completed(status));
        if status != Status::Success {
            self.fail(State::Sqe);
        }
    }

    /// The next datagram to send. It completes as soon as it is returned.
    pub fn poll_transmit<H: Host>(&mut self, host: &mut H) -> Option<Transmit> {
        let datagram = self.peek_transmit()?;
        let Datagram { id, len, .. } = datagram;
        let qkey = if datagram.qkey >> 31 == 1 { self.qkey } else { datagram.qkey };
        let deth = Deth { qkey, source_qp: self.number };
        let (opcode, extension) = match datagram.imm {
            Some(imm) => (Opcode::UdSendOnlyImm, Extension::DethImm(deth, imm)),
            None => (Opcode::UdSendOnly, Extension::Deth(deth)),
        };
        let plain = Headers::new(opcode, datagram.destination, self.next, extension);
        let headers = Headers { solicited: datagram.solicited, ..plain };
        let from = Source::SendWr { id, offset: 0 };
        let fetched =
            if len > 0 { host.fetch(from, len, headers.len()) } else { HostStatus::Ready };
        match fetched {
            HostStatus::Ready => self.complete_first(Status::Success),
            HostStatus::Retry => return None,
            HostStatus::Denied => {
                self.complete_first(Status::LocalProtection);
                return None;
            }
        }
        self.next = self.next.next();
        self.stats.packets_sent += 1;
        self.stats.bytes_sent += u64::from(len);
        Some(Transmit { headers, payload: (len > 0).then_some(Payload { from, len }) })
    }

    /// Whether [`poll_event`](Self::poll_event) has an event.
    pub fn has_events(&self) -> bool {
        !self.completed.is_empty()
            || self.receive_completion.is_some()
            || self.pending_receive.is_some() && self.state == State::Err
            || self.notify_drained && self.state == State::Sqd
    }

    /// The next event. Call it until `None`.
    pub fn poll_event(&mut self) -> Option<ProtocolEvent> {
        if let Some(completion) = self.completed.pop_front() {
            return Some(ProtocolEvent::Sent(completion));
        }
        if let Some(receive_completion) = self.receive_completion.take() {
            return Some(ProtocolEvent::Received(receive_completion));
        }
        let receive = self.pending_receive.filter(|_| self.state == State::Err);
        if let Some(Receive { id, .. }) = receive {
            self.pending_receive = None;
            let (status, kind) = (Status::Flushed, ReceiveKind::Data);
            let flushed =
                ReceiveCompletion { id, status, len: 0, kind, solicited: false, source_qp: 0 };
            return Some(ProtocolEvent::Received(flushed));
        }
        if self.state == State::Sqd && core::mem::take(&mut self.notify_drained) {
            return Some(ProtocolEvent::Async(QpEvent::Drained));
        }
        None
    }

    fn fail(&mut self, state: State) {
        self.state = state;
        self.flush();
    }

    fn flush(&mut self) {
        while let Some(work) = self.posted.pop_front() {
            self.completed.push_back(work.completed(Status::Flushed));
        }
    }
}
