//! A peer that sends arbitrary responses: each leads to the status that the specification demands.

use std::time::Instant;

use warpwire::link::{Corruption, FlowId, Link};
use warpwire::verbs::{
    Atomic, Completion, ProgressMode, QpAttributes, QpEndpoint, QpOptions, SendRequest, State,
    Status, WrOp,
};
use warpwire_proto::Psn;
use warpwire_proto::wire::{Aeth, Extension, Headers, Opcode, Reth, Syndrome, Transport};

use crate::verbs::fixture::{
    Endpoint, Fixture, Rng, TestBuffer, TestLink, TestQp, same, test_timeout,
};
use testkit::cases;

cases!(Fixture; CASES:
    invalid_responses,
    naks_of_a_peer,
    responses_to_no_request,
    damaged_packets_of_a_known_sender,
    random_responses,
);

const NUMBER: u32 = 0x77;
const LEN: u32 = 2048;

/// A real queue pair whose peer is a bare link.
struct Harness {
    end: Endpoint,
    test_qp: TestQp,
    near: TestBuffer,
    link: Box<dyn Link>,
    flow: FlowId,
}

/// The request in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestKind {
    Write,
    Read,
    Atomic,
}

impl Harness {
    fn new(fixture: &Fixture) -> Self {
        let mut links = fixture.test_link.links(2).unwrap();
        let mut link = links.pop().unwrap();
        let end =
            Endpoint::open(links.pop().unwrap(), fixture.test_link.options(ProgressMode::Manual));
        let flow = link.open(end.context.path().local, 0).unwrap();
        let cq = || end.context.create_cq(256).unwrap();
        let (sends, receives) = (cq(), cq());
        let options = QpOptions::default().with_timeout(17);
        let qp = end.context.create_qp(&end.pd, &sends, &receives, options).unwrap();
        let near = fixture.host(&end, 8192);
        let harness = Self { end, test_qp: TestQp { qp, sends, receives }, near, link, flow };
        harness.connect();
        harness
    }

    fn connect(&self) {
        let address = self.link.local();
        let endpoint = QpEndpoint {
            address,
            qpn: NUMBER,
            psn: 5,
            mtu: 1024,
            max_rd_atomic: 4,
            source_port: 0,
            lid: 0,
            gid: 0,
            mtu_on_host: 0,
            selective_repeat: false,
        };
        self.test_qp.qp.connect(&endpoint).unwrap();
    }

    /// Posts a request and waits until the link has received it; returns the PSN of its last
    /// packet.
    fn send_request(&mut self, request_kind: RequestKind) -> Psn {
        let at = warpwire::verbs::Remote { address: 64, rkey: 9 };
        let (op, len) = match request_kind {
            RequestKind::Write => (WrOp::Write(at), LEN),
            RequestKind::Read => (WrOp::Read(at), LEN),
            RequestKind::Atomic => (WrOp::Atomic(at, Atomic::FetchAdd { add: 1 }), 8),
        };
        let data = [self.near.mr.sge(0, len)];
        let nop = SendRequest::new(2, WrOp::Nop);
        self.test_qp.qp.post_send(&[SendRequest::new(1, op).with(&data), nop]).unwrap();
        let wanted = if request_kind == RequestKind::Write { LEN / 1024 } else { 1 };
        let (mut seen, mut last) = (0, None);
        let start = Instant::now();
        while seen < wanted {
            self.end.context.soft().unwrap().poll().unwrap();
            let mut take = |frame: warpwire::link::Frame<'_>| {
                let transport = Transport::new_checked(frame.bytes).unwrap();
                assert_eq!(transport.destination_qp(), NUMBER);
                last = Some(transport.psn());
                seen += 1;
            };
            self.link.receive(&mut take).unwrap();
            assert!(start.elapsed() < test_timeout(), "no request arrived");
        }
        last.unwrap()
    }

    fn send_response(&mut self, opcode: Opcode, psn: Psn, extension: Extension, payload: usize) {
        let headers = Headers::new(opcode, self.test_qp.qp.number(), psn, extension);
        let slot = self.link.reserve(self.flow, headers.wire_len(payload)).unwrap();
        let at = headers.emit(slot, payload).unwrap();
        slot[at..at + payload].fill(0xab);
        self.link.commit();
        self.link.flush().unwrap();
    }

    fn next(&mut self) -> Completion {
        let mut one = [Completion::EMPTY];
        let start = Instant::now();
        while self.test_qp.sends.poll(&mut one).unwrap() == 0 {
            self.link.receive(&mut |_| {}).unwrap();
            assert!(
                start.elapsed() < test_timeout(),
                "no completion: {:?}",
                self.test_qp.qp.stats()
            );
        }
        one[0]
    }

    /// Asserts that the request fails with `status` and the queue pair with it, then reconnects.
    fn expect_failure(&mut self, status: Status, what: &str) {
        let first = self.next();
        assert_eq!((first.id, first.status), (1, status), "{what}");
        let second = self.next();
        assert_eq!((second.id, second.status), (2, Status::Flushed), "{what}");
        assert_eq!(self.test_qp.qp.state().unwrap(), State::Err);
        self.reconnect();
    }

    fn reconnect(&mut self) {
        self.test_qp.qp.modify(&QpAttributes::new(State::Reset)).unwrap();
        while self.link.receive(&mut |_| {}).unwrap() > 0 {}
        self.connect();
    }
}

fn aeth(byte: u8) -> Aeth {
    Aeth { syndrome: Syndrome::from_byte(byte), msn: 1 }
}

const ACK: u8 = 0x1f;

fn invalid_responses(fixture: &Fixture) {
    let mut harness = Harness::new(fixture);
    let data = Extension::Aeth(aeth(ACK));
    let value = Extension::AethAtomic(aeth(ACK), 7);
    use Opcode::{Acknowledge, AtomicAcknowledge, ReadResponseFirst, ReadResponseOnly};
    let table = [
        (RequestKind::Write, Acknowledge, Extension::Aeth(aeth(0x5f)), 0, "a reserved syndrome"),
        (RequestKind::Write, Acknowledge, Extension::Aeth(aeth(0xff)), 0, "another"),
        (RequestKind::Write, Acknowledge, Extension::Aeth(aeth(0x7f)), 0, "an unknown NAK code"),
        (RequestKind::Write, ReadResponseOnly, data, 1024, "data for a write"),
        (RequestKind::Write, AtomicAcknowledge, value, 0, "a value for a write"),
        (RequestKind::Read, AtomicAcknowledge, value, 0, "a value for a read"),
        (RequestKind::Read, ReadResponseFirst, data, 1000, "a first packet shorter than the MTU"),
        (RequestKind::Read, ReadResponseOnly, data, 0, "no data"),
        (RequestKind::Atomic, ReadResponseOnly, data, 8, "data for an atomic"),
    ];
    for (request_kind, opcode, extension, payload, what) in table {
        harness.near.write(0, &[0x11; 8192]);
        let psn = harness.send_request(request_kind);
        harness.send_response(opcode, psn, extension, payload);
        harness.expect_failure(Status::BadResponse, what);
        same(&harness.near.read(0, 8192), &[0x11; 8192], "memory that must not be written");
    }
    // A valid response is still accepted.
    let psn = harness.send_request(RequestKind::Atomic);
    harness.send_response(AtomicAcknowledge, psn, value, 0);
    assert!(harness.next().is_success() && harness.next().is_success());
    assert_eq!(harness.near.word(0), 7);
}

/// Every NAK that a peer may send, for every kind of request.
fn naks_of_a_peer(fixture: &Fixture) {
    let mut harness = Harness::new(fixture);
    for request_kind in [RequestKind::Write, RequestKind::Read, RequestKind::Atomic] {
        for (byte, status) in [
            (0x61, Status::RemoteInvalidRequest),
            (0x62, Status::RemoteAccess),
            (0x63, Status::RemoteOperation),
        ] {
            let psn = harness.send_request(request_kind);
            harness.send_response(Opcode::Acknowledge, psn, Extension::Aeth(aeth(byte)), 0);
            harness.expect_failure(status, "a NAK");
        }
    }
}

/// Responses to requests that were never sent change nothing.
fn responses_to_no_request(fixture: &Fixture) {
    let mut harness = Harness::new(fixture);
    let psn = harness.send_request(RequestKind::Write);
    let ack = Extension::Aeth(aeth(ACK));
    for psn_offset in [1, 2, 100, 1 << 22] {
        harness.send_response(Opcode::Acknowledge, psn.add(psn_offset), ack, 0);
        harness.send_response(
            Opcode::Acknowledge,
            psn.add(psn_offset),
            Extension::Aeth(aeth(0x63)),
            0,
        );
        harness.send_response(Opcode::ReadResponseOnly, psn.add(psn_offset), ack, 64);
    }
    let dropped = || harness.test_qp.qp.stats().unwrap().drops.iter().sum::<u64>();
    testkit::until("all responses are dropped", || {
        harness.end.context.soft().unwrap().poll().unwrap();
        dropped() >= 12
    });
    let mut one = [Completion::EMPTY];
    assert_eq!(harness.test_qp.sends.poll(&mut one).unwrap(), 0);
    assert_eq!(dropped(), 12, "{:?}", harness.test_qp.qp.stats());
    harness.send_response(Opcode::Acknowledge, psn, ack, 0);
    assert!(harness.next().is_success() && harness.next().is_success());
    // A duplicate ACK is ignored.
    harness.send_response(Opcode::Acknowledge, psn, ack, 0);
    let psn = harness.send_request(RequestKind::Write);
    harness.send_response(Opcode::Acknowledge, psn, ack, 0);
    assert!(harness.next().is_success() && harness.next().is_success());
}

/// Damaged packets are dropped by the link and have no other effect, whatever their headers say and
/// however many valid ones the sender has sent.
fn damaged_packets_of_a_known_sender(fixture: &Fixture) {
    if !matches!(fixture.test_link, TestLink::Udp4 | TestLink::Udp6) {
        println!("skipped: packets in shared memory have no ICRC and are not corrupted");
        return;
    }
    const PAYLOAD: usize = 1024;
    let mut harness = Harness::new(fixture);
    let far = fixture.host(&harness.end, PAYLOAD as u64);
    far.write(0, &[0xee; PAYLOAD]);
    let to = far.mr.remote(0);
    let number = harness.test_qp.qp.number();
    let reth = |rkey| Extension::Reth(Reth { address: to.address, rkey, len: PAYLOAD as u32 });
    let dropped =
        |harness: &Harness| harness.end.context.soft().unwrap().link_counters().drops.icrc;
    let mut send = |opcode, psn, extension, corruption| {
        let headers = Headers::new(opcode, number, Psn::new(psn), extension);
        let slot = harness.link.reserve(harness.flow, headers.wire_len(PAYLOAD)).unwrap();
        let at = headers.emit(slot, PAYLOAD).unwrap();
        slot[at..at + PAYLOAD].fill(psn as u8);
        harness.link.commit_corrupted(corruption);
        harness.link.flush().unwrap();
        let counts = |harness: &Harness| {
            (harness.test_qp.qp.stats().unwrap().packets_received, dropped(harness))
        };
        let (start, before) = (Instant::now(), counts(&harness));
        while counts(&harness) == before {
            harness.end.context.soft().unwrap().poll().unwrap();
            assert!(start.elapsed() < test_timeout(), "the packet did not arrive");
        }
        let after = counts(&harness);
        (after.0 - before.0, after.1 - before.1)
    };
    let (write, good) = (Opcode::WriteOnly, reth(to.rkey));
    for psn in [5, 6] {
        assert_eq!(send(write, psn, good, Corruption::Intact), (1, 0));
    }
    let last = (28 + PAYLOAD as u32 + 4) * 8 - 1;
    for (opcode, psn, extension) in [
        (write, 7, good),
        (Opcode::SendMiddle, 7, Extension::None),
        (write, 7, reth(to.rkey ^ 0x100)),
        (write, 9, good),
        (Opcode::SendOnly, 7, Extension::None),
        (Opcode::ReadResponseOnly, 7, Extension::Aeth(aeth(ACK))),
    ] {
        for bit in [last, 8 * 100] {
            let outcome = send(opcode, psn, extension, Corruption::FlipBit(bit));
            assert_eq!(outcome, (0, 1), "{opcode:?} {psn}");
        }
    }
    same(&far.read(0, PAYLOAD), &[6; PAYLOAD], "damaged packets were placed");
    assert_eq!(send(write, 7, good, Corruption::Intact), (1, 0));
    same(&far.read(0, PAYLOAD), &[7; PAYLOAD], "the valid packet's payload");
    assert_eq!(harness.test_qp.qp.state().unwrap(), State::Rts);
}

/// Random packets in reply to each request: work completes with some status, and only its own
/// memory changes.
fn random_responses(fixture: &Fixture) {
    let mut harness = Harness::new(fixture);
    harness.near.write(0, &[0x11; 8192]);
    let mut rng = Rng::new(77);
    let opcodes: Vec<_> = Opcode::all().collect();
    for round in 0..200 {
        let request_kind = [RequestKind::Write, RequestKind::Read, RequestKind::Atomic][round % 3];
        let psn = harness.send_request(request_kind);
        for _ in 0..1 + rng.below(4) {
            let number = harness.test_qp.qp.number();
            let opcode = opcodes[rng.below(opcodes.len() as u64) as usize];
            let max_packet = harness.link.max_packet().min(20_000) as u64;
            let len_limit = if rng.below(3) == 0 { max_packet } else { 1216 };
            let len = 16 + rng.below((len_limit - 16) / 4) as usize * 4;
            let slot = harness.link.reserve(harness.flow, len).unwrap();
            slot.iter_mut().for_each(|byte| *byte = rng.next_u64() as u8);
            let near = psn.add(rng.below(5) as u32).value().wrapping_sub(2);
            slot[0] = opcode.byte();
            slot[1] &= 0x40;
            slot[2..4].copy_from_slice(&[0xff, 0xff]);
            slot[4..8].copy_from_slice(&number.to_be_bytes());
            slot[8..12].copy_from_slice(&near.to_be_bytes());
            harness.link.commit();
        }
        harness.link.flush().unwrap();
        for _ in 0..4 {
            harness.end.context.soft().unwrap().poll().unwrap();
            harness.link.receive(&mut |_| {}).unwrap();
        }
        harness.reconnect();
        while harness.test_qp.sends.poll(&mut [Completion::EMPTY; 8]).unwrap() > 0 {}
    }
    same(&harness.near.read(LEN.into(), 6144), &[0x11; 6144], "memory that no request named");
    // The queue pair still works.
    let psn = harness.send_request(RequestKind::Write);
    harness.send_response(Opcode::Acknowledge, psn, Extension::Aeth(aeth(ACK)), 0);
    assert!(harness.next().is_success() && harness.next().is_success());
}
