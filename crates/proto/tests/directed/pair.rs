//! Two queue pairs whose packets are passed by hand, on a virtual clock.

use core::time::Duration;
use std::net::SocketAddr;

use warpwire_proto::qp::{
    Access, Arrived, Atomic, Change, Discard, Event, Mtu, Notice, Op, Options, Path, Qp, Receipt,
    Remote, State, Status, Transmit, Work,
};
use warpwire_proto::wire::{Aeth, Extension, Headers, Nak, Opcode, Syndrome};
use warpwire_proto::{Instant, Psn};

use crate::directed::host::Script;

/// The end that asks, in most tests, and the end that answers.
pub const A: usize = 0;
pub const B: usize = 1;
pub const NUMBERS: [u32; 2] = [0x11, 0x22];
pub const MTU: u32 = 256;
/// Memory of the other end.
pub const PLACE: Remote = Remote { address: 0x1000, key: 0x77 };
pub const ADD: Atomic = Atomic::FetchAdd { add: 5 };
pub const ROOMY: u32 = 1 << 20;

/// How the two are connected.
#[derive(Clone, Copy)]
pub struct Terms {
    pub options: Options,
    pub access: Access,
    pub mtu: u32,
    pub psn: [u32; 2],
    pub timeout: u8,
    pub retry_count: u8,
    pub rnr_retry: u8,
    pub min_rnr_timer: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
}

impl Default for Terms {
    fn default() -> Self {
        Self {
            options: Options::default(),
            access: Access::ALL,
            mtu: MTU,
            psn: [0x100, 0x500],
            timeout: 10,
            retry_count: 3,
            rnr_retry: 3,
            min_rnr_timer: 5,
            max_rd_atomic: 4,
            max_dest_rd_atomic: 4,
        }
    }
}

impl Terms {
    pub fn to_init(self) -> Change {
        Change {
            partition_index: Some(0),
            port: Some(1),
            access: Some(self.access),
            ..Change::to(State::Init)
        }
    }

    pub fn to_rtr(self, end: usize) -> Change {
        let peer = SocketAddr::from(([10, 0, 0, 1], 4791));
        Change {
            path: Some(Path { peer, traffic_class: 0, hop_limit: 64, flow_label: 1 }),
            mtu: Mtu::new(self.mtu),
            destination: Some(NUMBERS[1 - end]),
            receive_psn: Some(Psn::new(self.psn[1 - end])),
            max_dest_rd_atomic: Some(self.max_dest_rd_atomic),
            min_rnr_timer: Some(self.min_rnr_timer),
            ..Change::to(State::Rtr)
        }
    }

    pub fn to_rts(self, end: usize) -> Change {
        Change {
            send_psn: Some(Psn::new(self.psn[end])),
            timeout: Some(self.timeout),
            retry_count: Some(self.retry_count),
            rnr_retry: Some(self.rnr_retry),
            max_rd_atomic: Some(self.max_rd_atomic),
            ..Change::to(State::Rts)
        }
    }

    pub fn bring_up(&self, qp: &mut Qp, end: usize) {
        for change in [self.to_init(), self.to_rtr(end), self.to_rts(end)] {
            qp.modify(&change).unwrap();
        }
    }

    /// How long the asking end waits for an answer.
    pub fn patience(self) -> Duration {
        Duration::from_nanos(4096 << self.timeout)
    }
}

pub struct End {
    pub qp: Qp,
    pub host: Script,
    pub sent: Vec<(u64, Status)>,
    pub received: Vec<Receipt>,
    pub notices: Vec<Notice>,
    /// Its events are not taken.
    pub deaf: bool,
}

impl End {
    pub fn listen(&mut self) {
        while let Some(event) = self.qp.poll_event() {
            match event {
                Event::Sent(completion) => self.sent.push((completion.id, completion.status)),
                Event::Received(receipt) => self.received.push(receipt),
                Event::Notice(notice) => self.notices.push(notice),
            }
        }
    }

    pub fn receipts(&self) -> Vec<(u64, Status)> {
        self.received.iter().map(|receipt| (receipt.id, receipt.status)).collect()
    }

    pub fn dropped(&self, reason: Discard) -> u64 {
        self.qp.stats().dropped(reason)
    }
}

pub struct Pair {
    pub terms: Terms,
    pub now: Instant,
    pub ends: [End; 2],
    /// The number of the next request made by hand.
    pub number: Psn,
}

impl Pair {
    pub fn new() -> Self {
        Self::with(Terms::default())
    }

    /// Both ready to send; the answering end has no receives yet.
    pub fn with(terms: Terms) -> Self {
        let end = |end: usize| {
            let mut qp = Qp::new(NUMBERS[end], terms.options);
            terms.bring_up(&mut qp, end);
            let (sent, received, notices) = (Vec::new(), Vec::new(), Vec::new());
            End { qp, host: Script::default(), sent, received, notices, deaf: false }
        };
        let now = Instant::from_nanos(1_000_000);
        Self { terms, now, ends: [end(A), end(B)], number: Psn::new(terms.psn[A]) }
    }

    /// With `count` receives at the answering end that hold whatever comes.
    pub fn with_receives(terms: Terms, count: u64) -> Self {
        let mut pair = Self::with(terms);
        (0..count).for_each(|id| pair.ends[B].host.add_receive(id, ROOMY));
        pair
    }

    pub fn post(&mut self, end: usize, id: u64, op: Op, len: u32) {
        self.post_work(end, Work::new(id, op, len));
    }

    pub fn post_work(&mut self, end: usize, work: Work) {
        self.ends[end].qp.post(work).unwrap();
        self.listen(end);
    }

    fn listen(&mut self, end: usize) {
        if !self.ends[end].deaf {
            self.ends[end].listen();
        }
    }

    /// The next packet of that end.
    pub fn send(&mut self, end: usize) -> Option<Transmit> {
        let sender = &mut self.ends[end];
        let packet = sender.qp.poll_transmit(self.now, &mut sender.host);
        self.listen(end);
        packet
    }

    /// All packets that it has now.
    pub fn send_all(&mut self, end: usize) -> Vec<Transmit> {
        let packets: Vec<_> = std::iter::from_fn(|| self.send(end)).take(100_000).collect();
        assert!(packets.len() < 100_000, "it never stops sending");
        packets
    }

    /// A packet of the other end arrives at that one.
    pub fn arrive(&mut self, end: usize, packet: &Transmit) -> Result<(), Discard> {
        let payload_len = packet.payload.map_or(0, |payload| payload.len);
        self.arrive_as(end, Arrived { headers: &packet.headers, payload_len, marked: false })
    }

    pub fn arrive_as(&mut self, end: usize, arrived: Arrived<'_>) -> Result<(), Discard> {
        let receiver = &mut self.ends[end];
        let outcome = receiver.qp.handle_packet(self.now, &arrived, &mut receiver.host);
        self.listen(end);
        outcome
    }

    pub fn arrive_all(&mut self, end: usize, packets: &[Transmit]) -> Vec<Result<(), Discard>> {
        packets.iter().map(|packet| self.arrive(end, packet)).collect()
    }

    /// Sends all that `from` has, and all of it arrives and is used.
    pub fn pass(&mut self, from: usize) -> Vec<Transmit> {
        let packets = self.send_all(from);
        for packet in &packets {
            assert_eq!(self.arrive(1 - from, packet), Ok(()), "{packet:?}");
        }
        packets
    }

    /// Passes packets both ways until there are none.
    pub fn exchange(&mut self) -> Vec<Transmit> {
        let mut all = Vec::new();
        loop {
            let before = all.len();
            for from in [A, B] {
                for packet in self.send_all(from) {
                    let _ = self.arrive(1 - from, &packet);
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
        self.ends.iter().map(|end| end.qp.poll_timeout(self.now)).min().unwrap()
    }

    /// Sets the clock, and tells both.
    pub fn go_to(&mut self, when: Instant) {
        self.now = when;
        for end in [A, B] {
            self.ends[end].qp.handle_timeout(when);
            self.listen(end);
        }
    }

    pub fn wait(&mut self, time: Duration) {
        self.go_to(self.now + time);
    }

    /// Exchanges, and lets time pass, until all work is done.
    pub fn run(&mut self) -> Vec<Transmit> {
        let mut all = Vec::new();
        for _ in 0..1000 {
            all.extend(self.exchange());
            if self.ends.iter().all(|end| end.qp.outstanding() == 0) {
                return all;
            }
            let deadline = self.next_deadline();
            if deadline != Instant::NEVER {
                self.go_to(deadline);
            }
        }
        panic!("it does not come to an end: {:?}", self.ends[A].qp);
    }

    /// A request made by hand arrives at the answering end, with the next number.
    pub fn ask(&mut self, opcode: Opcode, extension: Extension, len: u32) -> Result<(), Discard> {
        let headers = Headers::new(opcode, NUMBERS[B], self.number, extension);
        self.number = self.number.next();
        self.arrive_as(B, Arrived { headers: &headers, payload_len: len, marked: false })
    }

    /// An answer made by hand arrives at the asking end.
    pub fn tell(
        &mut self,
        opcode: Opcode,
        psn: u32,
        ext: Extension,
        len: u32,
    ) -> Result<(), Discard> {
        let headers = Headers::new(opcode, NUMBERS[A], Psn::new(psn), ext);
        self.arrive_as(A, Arrived { headers: &headers, payload_len: len, marked: false })
    }

    pub fn tell_ack(&mut self, psn: u32, syndrome: Syndrome) -> Result<(), Discard> {
        self.tell(Opcode::Acknowledge, psn, Extension::Aeth(Aeth { syndrome, msn: 0 }), 0)
    }

    /// The answering end failed: it says so with `nak`, and with `notice` to its user.
    #[track_caller]
    pub fn assert_failed(&mut self, nak: Nak, notice: Notice) {
        let said = self.send_all(B).last().map(|packet| syndrome(packet));
        assert_eq!(said, Some(Syndrome::Nak(nak)));
        assert_eq!(self.ends[B].qp.state(), State::Err);
        assert_eq!(self.ends[B].notices, [notice]);
    }

    /// Work was posted at the asking end; with the answering end as it is, it must end so, and the answering
    /// end must tell its user `notice`, if anything.
    #[track_caller]
    pub fn assert_ends(&mut self, status: Status, notice: Option<Notice>) {
        self.exchange();
        let sent = &self.ends[A].sent;
        assert_eq!(sent.first().map(|(_, status)| *status), Some(status));
        assert!(sent[1..].iter().all(|(_, status)| *status == Status::Flushed), "{sent:?}");
        assert_eq!(self.ends[A].qp.state(), State::Err);
        let peer = if notice.is_some() { State::Err } else { State::Rts };
        assert_eq!(self.ends[B].qp.state(), peer);
        assert_eq!(self.ends[B].notices, Vec::from_iter(notice));
    }

    #[track_caller]
    pub fn assert_all_succeed(&mut self, works: u64) {
        self.run();
        let wanted: Vec<_> = (0..works).map(|id| (id, Status::Success)).collect();
        assert_eq!(self.ends[A].sent, wanted);
    }
}

#[track_caller]
pub fn aeth(packet: &Transmit) -> Aeth {
    match packet.headers.extension {
        Extension::Aeth(aeth) | Extension::AethAtomic(aeth, _) => aeth,
        _ => panic!("no acknowledgement: {packet:?}"),
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

/// The same packet with its headers edited on the way.
pub fn edited(packet: &Transmit, edit: impl FnOnce(&mut Headers)) -> Transmit {
    let mut packet = *packet;
    edit(&mut packet.headers);
    packet
}

/// One of each operation, with the length that it needs for `packets` packets (an atomic has one always).
pub fn one_of_each(packets: u32) -> [(Op, u32); 8] {
    let len = MTU * packets;
    [
        (Op::Send, len),
        (Op::SendImm(7), len),
        (Op::SendInvalidate(8), len),
        (Op::Write(PLACE), len),
        (Op::WriteImm(PLACE, 9), len),
        (Op::Read(PLACE), len),
        (Op::Atomic(PLACE, ADD), 8),
        (Op::Atomic(PLACE, Atomic::CompareSwap { compare: 0, swap: 1 }), 8),
    ]
}
