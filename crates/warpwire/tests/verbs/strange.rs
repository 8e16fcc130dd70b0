//! A peer that is not one of ours, and answers what it likes: each answer gives the status that it deserves.

use std::time::Instant;

use warpwire::link::{FlowId, Link, Spoil};
use warpwire::verbs::{
    Atomic, Change, Completion, Drive, Offer, Op, QpOptions, Request, State, Status,
};
use warpwire_proto::Psn;
use warpwire_proto::wire::{Aeth, Extension, Headers, Opcode, Reth, Syndrome, Transport};

use crate::verbs::fixture::{End, Fixture, Patch, Rng, Side, Which, same, soon};
use testkit::cases;

cases!(Fixture; CASES:
    answers_that_make_no_sense,
    refusals_of_a_peer,
    answers_to_nothing,
    long_packets_that_are_not_right,
    random_answers,
);

const NUMBER: u32 = 0x77;
const LEN: u32 = 2048;

/// A real queue pair, and a peer that is a bare link.
struct Stage {
    end: End,
    side: Side,
    near: Patch,
    link: Box<dyn Link>,
    flow: FlowId,
}

/// What it is asked for: where in the table, and the number of the request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asked {
    Write,
    Read,
    Atomic,
}

impl Stage {
    fn new(fixture: &Fixture) -> Self {
        let mut links = fixture.which.crowd(2).unwrap();
        let mut link = links.pop().unwrap();
        let end = End::open(links.pop().unwrap(), fixture.which.options(Drive::Inline));
        let flow = link.open(end.context.path().local, 0).unwrap();
        let cq = || end.context.create_cq(256).unwrap();
        let (sends, receives) = (cq(), cq());
        let options = QpOptions { timeout: 17, ..QpOptions::default() };
        let qp = end.context.create_qp(&end.pd, &sends, &receives, options).unwrap();
        let near = fixture.host(&end, 8192);
        let stage = Self { end, side: Side { qp, sends, receives }, near, link, flow };
        stage.connect();
        stage
    }

    fn connect(&self) {
        let address = self.link.local();
        let offer =
            Offer { address, qpn: NUMBER, psn: 5, mtu: 1024, max_rd_atomic: 4, lid: 0, gid: 0 };
        self.side.qp.connect(&offer).unwrap();
    }

    /// Asks, and waits for the request on the other side: the number of its last packet.
    fn ask(&mut self, asked: Asked) -> Psn {
        let at = warpwire::verbs::Remote { address: 64, rkey: 9 };
        let (op, len) = match asked {
            Asked::Write => (Op::Write(at), LEN),
            Asked::Read => (Op::Read(at), LEN),
            Asked::Atomic => (Op::Atomic(at, Atomic::FetchAdd { add: 1 }), 8),
        };
        let data = [self.near.mr.sge(0, len)];
        let nop = Request::new(2, Op::Nop);
        self.side.qp.post_send(&[Request::new(1, op).with(&data), nop]).unwrap();
        let wanted = if asked == Asked::Write { LEN / 1024 } else { 1 };
        let (mut seen, mut last) = (0, None);
        let start = Instant::now();
        while seen < wanted {
            self.end.context.hca().poll().unwrap();
            let mut take = |frame: warpwire::link::Frame<'_>| {
                let transport = Transport::new_checked(frame.bytes).unwrap();
                assert_eq!(transport.destination_qp(), NUMBER);
                last = Some(transport.psn());
                seen += 1;
            };
            self.link.receive(&mut take).unwrap();
            assert!(start.elapsed() < soon(), "no request");
        }
        last.unwrap()
    }

    fn answer(&mut self, opcode: Opcode, psn: Psn, extension: Extension, payload: usize) {
        let headers = Headers::new(opcode, self.side.qp.number(), psn, extension);
        let slot = self.link.reserve(self.flow, headers.wire_len(payload)).unwrap();
        let at = headers.emit(slot, payload).unwrap();
        slot[at..at + payload].fill(0xab);
        self.link.commit();
        self.link.flush().unwrap();
    }

    fn next(&mut self) -> Completion {
        let mut one = [Completion::EMPTY];
        let start = Instant::now();
        while self.side.sends.poll(&mut one).unwrap() == 0 {
            self.link.receive(&mut |_| {}).unwrap();
            assert!(start.elapsed() < soon(), "it does not end: {:?}", self.side.qp.stats());
        }
        one[0]
    }

    /// The work fails with that status, and the queue pair with it; then it begins anew.
    fn fails(&mut self, status: Status, what: &str) {
        let first = self.next();
        assert_eq!((first.id, first.status), (1, status), "{what}");
        let second = self.next();
        assert_eq!((second.id, second.status), (2, Status::Flushed), "{what}");
        assert_eq!(self.side.qp.state().unwrap(), State::Err);
        self.again();
    }

    fn again(&mut self) {
        self.side.qp.modify(&Change::to(State::Reset)).unwrap();
        while self.link.receive(&mut |_| {}).unwrap() > 0 {}
        self.connect();
    }
}

fn aeth(byte: u8) -> Aeth {
    Aeth { syndrome: Syndrome::from_byte(byte), msn: 1 }
}

const ACK: u8 = 0x1f;

fn answers_that_make_no_sense(fixture: &Fixture) {
    let mut stage = Stage::new(fixture);
    let data = Extension::Aeth(aeth(ACK));
    let value = Extension::AethAtomic(aeth(ACK), 7);
    use Opcode::{Acknowledge, AtomicAcknowledge, ReadResponseFirst, ReadResponseOnly};
    let table = [
        (Asked::Write, Acknowledge, Extension::Aeth(aeth(0x5f)), 0, "a reserved syndrome"),
        (Asked::Write, Acknowledge, Extension::Aeth(aeth(0xff)), 0, "another"),
        (Asked::Write, Acknowledge, Extension::Aeth(aeth(0x7f)), 0, "an unknown refusal"),
        (Asked::Write, ReadResponseOnly, data, 1024, "data for a write"),
        (Asked::Write, AtomicAcknowledge, value, 0, "a value for a write"),
        (Asked::Read, AtomicAcknowledge, value, 0, "a value for a read"),
        (Asked::Read, ReadResponseFirst, data, 1000, "less data than a packet has"),
        (Asked::Read, ReadResponseOnly, data, 0, "no data"),
        (Asked::Atomic, ReadResponseOnly, data, 8, "data for an atomic"),
    ];
    for (asked, opcode, extension, payload, what) in table {
        stage.near.write(0, &[0x11; 8192]);
        let psn = stage.ask(asked);
        stage.answer(opcode, psn, extension, payload);
        stage.fails(Status::BadResponse, what);
        same(&stage.near.read(0, 8192), &[0x11; 8192], "nothing is placed");
    }
    // The right answer is one after all that.
    let psn = stage.ask(Asked::Atomic);
    stage.answer(AtomicAcknowledge, psn, value, 0);
    assert!(stage.next().is_success() && stage.next().is_success());
    assert_eq!(stage.near.word(0), 7);
}

/// What a peer may say no with, whatever it was asked for.
fn refusals_of_a_peer(fixture: &Fixture) {
    let mut stage = Stage::new(fixture);
    for asked in [Asked::Write, Asked::Read, Asked::Atomic] {
        for (byte, status) in [
            (0x61, Status::RemoteInvalidRequest),
            (0x62, Status::RemoteAccess),
            (0x63, Status::RemoteOperation),
        ] {
            let psn = stage.ask(asked);
            stage.answer(Opcode::Acknowledge, psn, Extension::Aeth(aeth(byte)), 0);
            stage.fails(status, "a refusal");
        }
    }
}

/// Answers to what was never asked, or by somebody else, change nothing.
fn answers_to_nothing(fixture: &Fixture) {
    let mut stage = Stage::new(fixture);
    let psn = stage.ask(Asked::Write);
    let ack = Extension::Aeth(aeth(ACK));
    for ahead in [1, 2, 100, 1 << 22] {
        stage.answer(Opcode::Acknowledge, psn.add(ahead), ack, 0);
        stage.answer(Opcode::Acknowledge, psn.add(ahead), Extension::Aeth(aeth(0x63)), 0);
        stage.answer(Opcode::ReadResponseOnly, psn.add(ahead), ack, 64);
    }
    for _ in 0..20 {
        stage.end.context.hca().poll().unwrap();
    }
    let mut one = [Completion::EMPTY];
    assert_eq!(stage.side.sends.poll(&mut one).unwrap(), 0);
    let dropped: u64 = stage.side.qp.stats().unwrap().drops.iter().sum();
    assert_eq!(dropped, 12, "{:?}", stage.side.qp.stats());
    stage.answer(Opcode::Acknowledge, psn, ack, 0);
    assert!(stage.next().is_success() && stage.next().is_success());
    // Twice is once too often, and nothing happens.
    stage.answer(Opcode::Acknowledge, psn, ack, 0);
    let psn = stage.ask(Asked::Write);
    stage.answer(Opcode::Acknowledge, psn, ack, 0);
    assert!(stage.next().is_success() && stage.next().is_success());
}

/// One that is damaged on its way is as if it had not come, and the next one that is right is taken.
fn long_packets_that_are_not_right(fixture: &Fixture) {
    const LONG: usize = 20_000;
    if !matches!(fixture.which, Which::Udp4 | Which::Udp6) {
        println!("skipped: packets through memory are neither damaged nor summed");
        return;
    }
    let mut stage = Stage::new(fixture);
    stage.side.qp.modify(&Change::to(State::Reset)).unwrap();
    let mtu = 60 << 10;
    let address = stage.link.local();
    let offer = Offer { address, qpn: NUMBER, psn: 5, mtu, max_rd_atomic: 4, lid: 0, gid: 0 };
    stage.side.qp.connect(&offer).unwrap();
    let far = fixture.host(&stage.end, LONG as u64);
    let to = far.mr.remote(0);
    let reth = Reth { address: to.address, rkey: to.rkey, len: LONG as u32 };
    let last = (28 + LONG as u32 + 4) * 8 - 1;
    let mut write = |psn: u32, value: u8, spoil: Spoil| {
        let (number, reth) = (stage.side.qp.number(), Extension::Reth(reth));
        let headers = Headers::new(Opcode::WriteOnly, number, Psn::new(psn), reth);
        let slot = stage.link.reserve(stage.flow, headers.wire_len(LONG)).unwrap();
        let at = headers.emit(slot, LONG).unwrap();
        slot[at..at + LONG].fill(value);
        stage.link.commit_spoiled(spoil);
        stage.link.flush().unwrap();
        let (start, before) = (Instant::now(), stage.side.qp.stats().unwrap().packets_received);
        let dropped = || stage.end.context.hca().link_counters().drops.icrc;
        let dropped_before = dropped();
        // Packets that the link drops are not the queue pair's, unless it had begun with them.
        while stage.side.qp.stats().unwrap().packets_received == before
            && dropped() == dropped_before
        {
            stage.end.context.hca().poll().unwrap();
            assert!(start.elapsed() < soon(), "it does not come");
        }
        (far.read(LONG as u64 - 64, 64), dropped() - dropped_before)
    };
    for (psn, value) in [(5, 1), (6, 2)] {
        assert_eq!(write(psn, value, Spoil::No), (vec![value; 64], 0));
    }
    for psn in 7..10 {
        let (good, bad) = (psn as u8, 0xbb);
        let (end, dropped) = write(psn, bad, Spoil::Flip(last - psn));
        assert!(!end.contains(&bad) && dropped == 1, "{psn}: {dropped} dropped");
        assert_eq!(write(psn, good, Spoil::No), (vec![good; 64], 0));
        same(&far.read(0, LONG), &[good; LONG], "what was right");
    }
    assert_eq!(stage.side.qp.state().unwrap(), State::Rts);
}

/// Any answer, any request of its own: work ends with success or a status, and nothing but its memory changes.
fn random_answers(fixture: &Fixture) {
    let mut stage = Stage::new(fixture);
    stage.near.write(0, &[0x11; 8192]);
    let mut rng = Rng::new(77);
    let opcodes: Vec<_> = Opcode::all().collect();
    for round in 0..200 {
        let asked = [Asked::Write, Asked::Read, Asked::Atomic][round % 3];
        let psn = stage.ask(asked);
        for _ in 0..1 + rng.below(4) {
            let number = stage.side.qp.number();
            let opcode = opcodes[rng.below(opcodes.len() as u64) as usize];
            // Where there are long ones, some are, which are not read before it is known what they are.
            let longest = stage.link.largest().min(20_000) as u64;
            let most = if rng.below(3) == 0 { longest } else { 1216 };
            let len = 16 + rng.below((most - 16) / 4) as usize * 4;
            let slot = stage.link.reserve(stage.flow, len).unwrap();
            slot.iter_mut().for_each(|byte| *byte = rng.next_u64() as u8);
            let near = psn.add(rng.below(5) as u32).value().wrapping_sub(2);
            slot[0] = opcode.byte();
            slot[1] &= 0x40;
            slot[2..4].copy_from_slice(&[0xff, 0xff]);
            slot[4..8].copy_from_slice(&number.to_be_bytes());
            slot[8..12].copy_from_slice(&near.to_be_bytes());
            stage.link.commit();
        }
        stage.link.flush().unwrap();
        for _ in 0..4 {
            stage.end.context.hca().poll().unwrap();
            stage.link.receive(&mut |_| {}).unwrap();
        }
        stage.again();
        while stage.side.sends.poll(&mut [Completion::EMPTY; 8]).unwrap() > 0 {}
    }
    same(&stage.near.read(LEN.into(), 6144), &[0x11; 6144], "what no work named");
    // And it works.
    let psn = stage.ask(Asked::Write);
    stage.answer(Opcode::Acknowledge, psn, Extension::Aeth(aeth(ACK)), 0);
    assert!(stage.next().is_success() && stage.next().is_success());
}
