//! Two queue pairs whose packets are delivered by hand, on a virtual clock.

use core::time::Duration;
use std::net::SocketAddr;

use warpwire_proto::qp::{
    Access, Atomic, DiscardReason, Mtu, PathAttributes, ProtocolEvent, QpAttributes, QpEvent, RcQp,
    ReceiveCompletion, Remote, RxPacket, SendOp, SendWr, State, Status, Transmit, TransportOptions,
};
use warpwire_proto::wire::{Aeth, Extension, Headers, Nak, Opcode, Syndrome};
use warpwire_proto::{Instant, Psn};

use crate::directed::host::ScriptedHost;

/// In most tests, the requester and the responder.
pub const A: usize = 0;
pub const B: usize = 1;
pub const QPNS: [u32; 2] = [0x11, 0x22];
pub const MTU: u32 = 256;
/// Memory of the peer.
pub const REMOTE_ADDR: Remote = Remote { address: 0x1000, rkey: 0x77 };
pub const ADD: Atomic = Atomic::FetchAdd { add: 5 };
pub const LARGE_RECEIVE: u32 = 1 << 20;

/// Connection parameters of both ends.
#[derive(Clone, Copy)]
pub struct ConnParams {
    pub options: TransportOptions,
    pub access: Access,
    pub mtu: u32,
    pub psn: [u32; 2],
    pub timeout: u8,
    pub retry_count: u8,
    pub rnr_retry: u8,
    pub min_rnr_timer: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub selective: bool,
}

impl Default for ConnParams {
    fn default() -> Self {
        Self {
            options: TransportOptions::default(),
            access: Access::ALL,
            mtu: MTU,
            psn: [0x100, 0x500],
            timeout: 10,
            retry_count: 3,
            rnr_retry: 3,
            min_rnr_timer: 5,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
            selective: false,
        }
    }
}

impl ConnParams {
    pub fn init_attr(self) -> QpAttributes {
        QpAttributes::new(State::Init).with_partition_index(0).with_port(1).with_access(self.access)
    }

    pub fn rtr_attr(self, end: usize) -> QpAttributes {
        let peer = SocketAddr::from(([10, 0, 0, 1], 4791));
        QpAttributes::new(State::Rtr)
            .with_path(PathAttributes {
                peer,
                traffic_class: 0,
                hop_limit: 64,
                flow_label: 1,
                source_port: None,
            })
            .with_mtu(Mtu::new(self.mtu))
            .with_destination(QPNS[1 - end])
            .with_receive_psn(Psn::new(self.psn[1 - end]))
            .with_max_dest_rd_atomic(self.max_dest_rd_atomic)
            .with_min_rnr_timer(self.min_rnr_timer)
            .with_selective_repeat(self.selective.then_some(true))
    }

    pub fn rts_attr(self, end: usize) -> QpAttributes {
        QpAttributes::new(State::Rts)
            .with_send_psn(Psn::new(self.psn[end]))
            .with_timeout(self.timeout)
            .with_retry_count(self.retry_count)
            .with_rnr_retry(self.rnr_retry)
            .with_max_rd_atomic(self.max_rd_atomic)
    }

    pub fn bring_to_rts(&self, qp: &mut RcQp, end: usize) {
        for attr in [self.init_attr(), self.rtr_attr(end), self.rts_attr(end)] {
            qp.modify(&attr).unwrap();
        }
    }

    /// The requester's ACK timeout.
    pub fn ack_timeout(self) -> Duration {
        Duration::from_nanos(4096 << self.timeout)
    }
}

pub struct Endpoint {
    pub qp: RcQp,
    pub host: ScriptedHost,
    pub sent: Vec<(u64, Status)>,
    pub received: Vec<ReceiveCompletion>,
    pub qp_events: Vec<QpEvent>,
    /// Events are left in the queue pair.
    pub ignore_events: bool,
}

impl Endpoint {
    pub fn drain_events(&mut self) {
        while let Some(event) = self.qp.poll_event() {
            match event {
                ProtocolEvent::Sent(completion) => {
                    self.sent.push((completion.id, completion.status))
                }
                ProtocolEvent::Received(receive_completion) => {
                    self.received.push(receive_completion)
                }
                ProtocolEvent::Async(qp_event) => self.qp_events.push(qp_event),
            }
        }
    }

    pub fn receive_statuses(&self) -> Vec<(u64, Status)> {
        self.received
            .iter()
            .map(|receive_completion| (receive_completion.id, receive_completion.status))
            .collect()
    }

    pub fn dropped(&self, reason: DiscardReason) -> u64 {
        self.qp.stats().dropped(reason)
    }
}

pub struct Pair {
    pub params: ConnParams,
    pub now: Instant,
    pub endpoints: [Endpoint; 2],
    /// PSN of the next injected request.
    pub number: Psn,
}

impl Pair {
    pub fn new() -> Self {
        Self::with(ConnParams::default())
    }

    /// Both in RTS; the responder has no receives yet.
    pub fn with(params: ConnParams) -> Self {
        let end = |end: usize| {
            let mut qp = RcQp::new(QPNS[end], params.options);
            params.bring_to_rts(&mut qp, end);
            let (sent, received, qp_events) = (Vec::new(), Vec::new(), Vec::new());
            Endpoint {
                qp,
                host: ScriptedHost::default(),
                sent,
                received,
                qp_events,
                ignore_events: false,
            }
        };
        let now = Instant::from_nanos(1_000_000);
        Self { params, now, endpoints: [end(A), end(B)], number: Psn::new(params.psn[A]) }
    }

    /// With `count` receives of `LARGE_RECEIVE` bytes at the responder.
    pub fn with_receives(params: ConnParams, count: u64) -> Self {
        let mut pair = Self::with(params);
        (0..count).for_each(|id| pair.endpoints[B].host.add_receive(id, LARGE_RECEIVE));
        pair
    }

    /// Has a message of one packet in each direction acknowledged, so that the windows are open.
    /// The next PSNs are one further on.
    pub fn open_windows(&mut self) {
        for end in [A, B] {
            self.post(end, 1000, SendOp::Write(REMOTE_ADDR), 1);
        }
        self.exchange();
        self.endpoints.iter_mut().for_each(|end| end.sent.clear());
    }

    pub fn post(&mut self, end: usize, id: u64, op: SendOp, len: u32) {
        self.post_work(end, SendWr::new(id, op, len));
    }

    pub fn post_work(&mut self, end: usize, work: SendWr) {
        self.endpoints[end].qp.post(work).unwrap();
        self.drain_events(end);
    }

    fn drain_events(&mut self, end: usize) {
        if !self.endpoints[end].ignore_events {
            self.endpoints[end].drain_events();
        }
    }

    /// The next packet that `end` sends.
    pub fn send(&mut self, end: usize) -> Option<Transmit> {
        let sender = &mut self.endpoints[end];
        let packet = sender.qp.poll_transmit(self.now, &mut sender.host);
        self.drain_events(end);
        packet
    }

    /// All packets that `end` sends now.
    pub fn send_all(&mut self, end: usize) -> Vec<Transmit> {
        let packets: Vec<_> = std::iter::from_fn(|| self.send(end)).take(100_000).collect();
        assert!(packets.len() < 100_000, "sending does not end");
        packets
    }

    /// Delivers a packet of the peer to `end`.
    pub fn deliver(&mut self, end: usize, packet: &Transmit) -> Result<(), DiscardReason> {
        let payload_len = packet.payload.map_or(0, |payload| payload.len);
        self.deliver_rx(end, RxPacket { headers: &packet.headers, payload_len, marked: false })
    }

    pub fn deliver_rx(&mut self, end: usize, rx: RxPacket<'_>) -> Result<(), DiscardReason> {
        let receiver = &mut self.endpoints[end];
        receiver.host.current = Some((*rx.headers, rx.payload_len));
        let outcome = receiver.qp.handle_packet(self.now, &rx, &mut receiver.host);
        self.drain_events(end);
        self.deliver_held(end);
        outcome
    }

    /// Delivers packets that the host kept, and whose turn has come.
    fn deliver_held(&mut self, end: usize) {
        while let Some(slot) = self.endpoints[end].qp.take_held() {
            let Endpoint { qp, host, .. } = &mut self.endpoints[end];
            host.current = None;
            let (headers, payload_len) = host.held.remove(&slot).expect("a packet in this slot");
            let rx = RxPacket { headers: &headers, payload_len, marked: false };
            let _ = qp.handle_held(self.now, &rx, host);
            self.drain_events(end);
        }
    }

    pub fn deliver_all(
        &mut self,
        end: usize,
        packets: &[Transmit],
    ) -> Vec<Result<(), DiscardReason>> {
        packets.iter().map(|packet| self.deliver(end, packet)).collect()
    }

    /// Sends all packets of `from`; all must be accepted.
    pub fn transfer(&mut self, from: usize) -> Vec<Transmit> {
        let packets = self.send_all(from);
        for packet in &packets {
            assert_eq!(self.deliver(1 - from, packet), Ok(()), "{packet:?}");
        }
        packets
    }

    /// Delivers packets in both directions until there are none.
    pub fn exchange(&mut self) -> Vec<Transmit> {
        let mut all = Vec::new();
        loop {
            let before = all.len();
            for from in [A, B] {
                for packet in self.send_all(from) {
                    let _ = self.deliver(1 - from, &packet);
                    all.push(packet);
                }
            }
            assert!(all.len() < 100_000, "the exchange does not end");
            if all.len() == before {
                return all;
            }
        }
    }

    pub fn next_deadline(&self) -> Instant {
        self.endpoints.iter().map(|end| end.qp.poll_timeout(self.now)).min().unwrap()
    }

    /// Sets the clock and runs the timers of both ends.
    pub fn advance_to(&mut self, when: Instant) {
        self.now = when;
        for end in [A, B] {
            self.endpoints[end].qp.handle_timeout(when);
            self.drain_events(end);
        }
    }

    pub fn wait(&mut self, time: Duration) {
        self.advance_to(self.now + time);
    }

    /// Exchanges packets and advances the clock until all work is complete.
    pub fn run(&mut self) -> Vec<Transmit> {
        let mut all = Vec::new();
        for _ in 0..1000 {
            all.extend(self.exchange());
            if self.endpoints.iter().all(|end| end.qp.outstanding() == 0) {
                return all;
            }
            let deadline = self.next_deadline();
            if deadline != Instant::NEVER {
                self.advance_to(deadline);
            }
        }
        panic!("work does not complete: {:?}", self.endpoints[A].qp);
    }

    /// Delivers a handmade request with the next PSN to the responder.
    pub fn inject_request(
        &mut self,
        opcode: Opcode,
        extension: Extension,
        len: u32,
    ) -> Result<(), DiscardReason> {
        let headers = Headers::new(opcode, QPNS[B], self.number, extension);
        self.number = self.number.next();
        self.deliver_rx(B, RxPacket { headers: &headers, payload_len: len, marked: false })
    }

    /// Delivers a handmade response to the requester.
    pub fn inject_response(
        &mut self,
        opcode: Opcode,
        psn: u32,
        ext: Extension,
        len: u32,
    ) -> Result<(), DiscardReason> {
        let headers = Headers::new(opcode, QPNS[A], Psn::new(psn), ext);
        self.deliver_rx(A, RxPacket { headers: &headers, payload_len: len, marked: false })
    }

    pub fn inject_ack(&mut self, psn: u32, syndrome: Syndrome) -> Result<(), DiscardReason> {
        self.inject_response(
            Opcode::Acknowledge,
            psn,
            Extension::Aeth(Aeth { syndrome, msn: 0 }),
            0,
        )
    }

    /// Asserts that the responder failed with `nak` on the wire and `qp_event` to its user.
    #[track_caller]
    pub fn assert_failed(&mut self, nak: Nak, qp_event: QpEvent) {
        let last_syndrome = self.send_all(B).last().map(|packet| syndrome(packet));
        assert_eq!(last_syndrome, Some(Syndrome::Nak(nak)));
        assert_eq!(self.endpoints[B].qp.state(), State::Err);
        assert_eq!(self.endpoints[B].qp_events, [qp_event]);
    }

    /// Asserts that work posted at the requester completes with `status`, and that the responder
    /// raises `qp_event`, if any.
    #[track_caller]
    pub fn assert_ends(&mut self, status: Status, qp_event: Option<QpEvent>) {
        self.exchange();
        let sent = &self.endpoints[A].sent;
        assert_eq!(sent.first().map(|(_, status)| *status), Some(status));
        assert!(sent[1..].iter().all(|(_, status)| *status == Status::Flushed), "{sent:?}");
        assert_eq!(self.endpoints[A].qp.state(), State::Err);
        let peer = if qp_event.is_some() { State::Err } else { State::Rts };
        assert_eq!(self.endpoints[B].qp.state(), peer);
        assert_eq!(self.endpoints[B].qp_events, Vec::from_iter(qp_event));
    }

    #[track_caller]
    pub fn assert_all_succeed(&mut self, works: u64) {
        self.run();
        let wanted: Vec<_> = (0..works).map(|id| (id, Status::Success)).collect();
        assert_eq!(self.endpoints[A].sent, wanted);
    }
}

#[track_caller]
pub fn aeth(packet: &Transmit) -> Aeth {
    match packet.headers.extension {
        Extension::Aeth(aeth) | Extension::AethAtomic(aeth, _) => aeth,
        _ => panic!("no AETH: {packet:?}"),
    }
}

#[track_caller]
pub fn syndrome(packet: &Transmit) -> Syndrome {
    aeth(packet).syndrome
}

pub fn psn(packet: &Transmit) -> u32 {
    packet.headers.psn.value()
}

pub fn psns(packets: &[Transmit]) -> Vec<u32> {
    packets.iter().map(psn).collect()
}

pub fn opcodes(packets: &[Transmit]) -> Vec<Opcode> {
    packets.iter().map(|packet| packet.headers.opcode).collect()
}

/// The packet with edited headers.
pub fn edited(packet: &Transmit, edit: impl FnOnce(&mut Headers)) -> Transmit {
    let mut packet = *packet;
    edit(&mut packet.headers);
    packet
}

/// One of each operation, with a length of `packets` packets (atomics always have one).
pub fn one_of_each_op(packets: u32) -> [(SendOp, u32); 8] {
    let len = MTU * packets;
    [
        (SendOp::Send, len),
        (SendOp::SendImm(7), len),
        (SendOp::SendInvalidate(8), len),
        (SendOp::Write(REMOTE_ADDR), len),
        (SendOp::WriteImm(REMOTE_ADDR, 9), len),
        (SendOp::Read(REMOTE_ADDR), len),
        (SendOp::Atomic(REMOTE_ADDR, ADD), 8),
        (SendOp::Atomic(REMOTE_ADDR, Atomic::CompareSwap { compare: 0, swap: 1 }), 8),
    ]
}
