//! Datagrams: to anyone who has the key, without promise, and no harm from anyone who has not.

use std::net::SocketAddr;

use warpwire::link::Link;
use warpwire::mlx5::{AddressVector, Builder, Opcode, Record, Scratch};
use warpwire::verbs::{
    AddressHandle, AsyncEvent, Atomic, Change, Completion, CompletionKind, Drive, Mtu, Op,
    QpOptions, ROUTE_LEN, ReceiveRequest, Request, Route, Sender, Service, Sge, SrqOptions, State,
    Status,
};
use warpwire_proto::Psn;
use warpwire_proto::wire::{Deth, Extension, Headers, Opcode as WireOpcode};

use crate::verbs::fixture::{End, Fixture, KINDS, Kind, Patch, Rng, Side, Which, World, same};
use testkit::{cases, for_each_seed};

cases!(Fixture; CASES:
    messages_of_every_length,
    answers_go_to_the_sender,
    many_peers_in_one_batch,
    keys_that_do_not_fit,
    nobody_waits_for_it,
    longer_than_a_packet,
    a_shared_receive_queue,
    beside_connections,
    a_receiver_that_stands_still,
    a_long_series,
    anything_from_the_network,
    datagrams_over_a_bad_network,
);
cases!(Fixture; ONCE:
    what_needs_a_connection,
    addresses_that_cannot_be,
    requests_without_sense,
    local_memory_that_is_wrong,
    entries_that_name_nobody,
    a_failure_flushes,
    waits_and_nops_in_order,
    states_of_a_datagram_queue_pair,
    random_entries_of_datagrams,
);

const QKEY: u32 = 0x1234;
/// The route before a message.
const FRONT: u32 = ROUTE_LEN;

fn options() -> QpOptions {
    QpOptions { service: Service::Ud, ..QpOptions::default() }
}

/// A queue pair that is ready, with that key.
fn ready(world: &World, end: &End, qkey: u32) -> Side {
    let side = world.side(end, options());
    side.qp.ready(qkey).unwrap();
    side
}

fn address(end: &End) -> SocketAddr {
    end.context.path().local
}

/// Two ready queue pairs, memory for each, and the way from one to the other.
struct Talk {
    world: World,
    a: Side,
    b: Side,
    near: Patch,
    far: Patch,
    to_b: AddressHandle,
}

impl Talk {
    fn new(fixture: &Fixture) -> Self {
        Self::with(fixture, fixture.world(), Kind::Host)
    }

    fn with(fixture: &Fixture, world: World, kind: Kind) -> Self {
        let [a, b] = [&world.a, &world.b].map(|end| ready(&world, end, QKEY));
        let [near, far] = [&world.a, &world.b]
            .map(|end| fixture.memory(end, kind, 1 << 17, crate::verbs::fixture::ALL));
        let to_b = world.a.context.address_handle(address(&world.b)).unwrap();
        Self { world, a, b, near, far, to_b }
    }

    fn request(&self, id: u64) -> Request<'_> {
        Request::new(id, Op::Send).to(&self.to_b, self.b.qp.number(), QKEY)
    }

    fn receive(&self, id: u64, offset: u64, len: u32) {
        let data = [self.far.mr.sge(offset, len)];
        self.b.qp.post_receive(&[ReceiveRequest { id, data: &data }]).unwrap();
    }

    /// A message goes through.
    fn works(&self) {
        self.receive(900, 0, FRONT + 5);
        self.a.qp.post_send(&[self.request(901).inline(b"hello")]).unwrap();
        self.world.done(&self.a.sends, 901);
        let done = self.world.done(&self.b.receives, 900);
        assert_eq!((done.len, self.known(done.sender)), (FRONT + 5, Some(self.sender())));
        same(&self.far.read(FRONT.into(), 5), b"hello", "a datagram");
    }

    /// A sender, by the port that it listens on: NICs send from another.
    fn known(&self, sender: Option<Sender>) -> Option<Sender> {
        let is_device = self.world.a.is_device() && !self.world.b.is_device();
        sender.map(|Sender { qpn, mut address }| {
            if is_device {
                address.set_port(4791);
            }
            Sender { qpn, address }
        })
    }

    fn sender(&self) -> Sender {
        let address = match self.world.b.is_device() {
            // It stands before the message, and nowhere else.
            true => "[::]:0".parse().unwrap(),
            false => address(&self.world.a),
        };
        Sender { qpn: self.a.qp.number(), address }
    }

    /// How many datagrams the receiver dropped for that reason.
    fn dropped(&self, reason: &str) -> u64 {
        let stats = self.world.b.context.stats();
        stats.discarded.iter().find(|(name, _)| *name == reason).unwrap().1
    }

    fn restart(&self) {
        assert_eq!(self.a.qp.state().unwrap(), State::Sqe);
        self.a.qp.modify(&Change::to(State::Rts)).unwrap();
        self.works();
    }
}

fn messages_of_every_length(fixture: &Fixture) {
    for (seed, kind) in (0..).zip(KINDS) {
        let talk = Talk::with(fixture, fixture.world(), kind);
        let mtu = talk.world.a.context.largest_mtu().bytes();
        for (n, len) in [0, 1, 3, 4, 63, 64, 255, mtu - 1, mtu].into_iter().enumerate() {
            let shift = n as u64;
            let wanted = talk.near.pattern(shift, len as usize, seed + shift);
            talk.far.write(0, &vec![0xee; (FRONT + len) as usize + 8]);
            // The route and the message in pieces of their own.
            let pieces = [talk.far.mr.sge(0, FRONT + 1), talk.far.mr.sge(41, len + 7)];
            talk.b.qp.post_receive(&[ReceiveRequest { id: 7, data: &pieces }]).unwrap();
            let op = if n % 2 == 0 { Op::Send } else { Op::SendImm([1, 2, 3, n as u8]) };
            let data = [talk.near.mr.sge(shift, len)];
            let request = Request { op, ..talk.request(8).with(&data) };
            talk.a.qp.post_send(&[request.solicited()]).unwrap();
            talk.world.done(&talk.a.sends, 8);
            let done = talk.world.done(&talk.b.receives, 7);
            let kind = match op {
                Op::Send => CompletionKind::Receive,
                _ => CompletionKind::ReceiveImm([1, 2, 3, n as u8]),
            };
            let solicited = !talk.world.b.is_device();
            assert_eq!((done.kind, done.len, done.solicited), (kind, FRONT + len, solicited));
            assert_eq!(talk.known(done.sender), Some(talk.sender()));
            let route = talk.far.read(0, 40).try_into().unwrap();
            let route = Route::parse(&route).expect("a header");
            let ends = [&talk.world.a, &talk.world.b].map(|end| address(end).ip());
            assert_eq!([route.source, route.destination], ends);
            same(&talk.far.read(FRONT.into(), len as usize), &wanted, "a datagram");
            same(&talk.far.read((FRONT + len).into(), 8), &[0xee; 8], "what lies behind it");
        }
        if let (Ok(sent), Ok(received)) = (talk.a.qp.stats(), talk.b.qp.stats()) {
            assert_eq!((sent.packets_sent, received.packets_received), (9, 9));
        }
    }
}

/// Whoever gets a datagram can answer it: with what the completion says, and nothing else.
fn answers_go_to_the_sender(fixture: &Fixture) {
    let talk = Talk::new(fixture);
    talk.receive(1, 0, FRONT + 4);
    talk.a.qp.post_send(&[talk.request(2).inline(b"ask!")]).unwrap();
    let asked = talk.world.done(&talk.b.receives, 1);
    let Sender { qpn, mut address } = talk.known(asked.sender).unwrap();
    if address.ip().is_unspecified() {
        let route = talk.far.read(0, 40).try_into().unwrap();
        address = (Route::parse(&route).expect("a header").source, 4791).into();
    }
    let back = talk.world.b.context.address_handle(address).unwrap();
    let place = [talk.near.mr.sge(0, FRONT + 6)];
    talk.a.qp.post_receive(&[ReceiveRequest { id: 3, data: &place }]).unwrap();
    let answer = Request::new(4, Op::Send).to(&back, qpn, QKEY).inline(b"answer");
    talk.b.qp.post_send(&[answer]).unwrap();
    talk.world.done(&talk.a.sends, 2);
    talk.world.done(&talk.b.sends, 4);
    talk.world.done(&talk.a.receives, 3);
    same(&talk.near.read(FRONT.into(), 6), b"answer", "an answer");
}

/// One batch to queue pairs of three other devices, and to one of its own.
fn many_peers_in_one_batch(fixture: &Fixture) {
    let mut links = fixture.which.crowd(4).unwrap().into_iter();
    let mut open = || End::open(links.next().unwrap(), fixture.which.options(Drive::Inline));
    let (world, others) = (World { a: open(), b: open() }, [open(), open()]);
    let from = ready(&world, &world.a, 9);
    let ends = [&world.a, &world.b, &others[0], &others[1]];
    let there: Vec<_> = ends
        .iter()
        .flat_map(|end| [(*end, 1), (*end, 2)])
        .map(|(end, n)| {
            let qkey = 100 + n;
            let side = ready(&world, end, qkey);
            let memory = fixture.host(end, 64);
            let data = [memory.mr.sge(0, 64)];
            side.qp.post_receive(&[ReceiveRequest { id: 5, data: &data }]).unwrap();
            let handle = world.a.context.address_handle(address(end)).unwrap();
            (side, memory, handle, qkey)
        })
        .collect();
    let mut batch = from.qp.batch();
    for (n, (side, _, handle, qkey)) in there.iter().enumerate() {
        let text = [n as u8; 8];
        let request = Request::new(n as u64, Op::Send).to(handle, side.qp.number(), *qkey);
        batch.push(&request.inline(&text)).unwrap();
    }
    batch.post();
    let step = || {
        world.step();
        for end in &others {
            end.context.hca().poll().unwrap();
        }
    };
    for (n, (side, memory, ..)) in there.iter().enumerate() {
        let mut one = [Completion::EMPTY];
        world.until("a datagram for each", || {
            step();
            side.receives.poll(&mut one).unwrap() == 1
        });
        assert_eq!((one[0].id, one[0].len), (5, FRONT + 8));
        assert_eq!(one[0].sender.unwrap().qpn, from.qp.number());
        same(&memory.read(FRONT.into(), 8), &[n as u8; 8], "each its own");
        world.done(&from.sends, n as u64);
    }
}

fn keys_that_do_not_fit(fixture: &Fixture) {
    let talk = Talk::new(fixture);
    talk.receive(1, 0, 64);
    let number = talk.b.qp.number();
    let wrong = Request::new(2, Op::Send).to(&talk.to_b, number, QKEY ^ 1).inline(b"no");
    talk.a.qp.post_send(&[wrong]).unwrap();
    talk.world.done(&talk.a.sends, 2);
    talk.world.until("a dropped datagram", || talk.dropped("qkey") == 1);
    talk.world.quiet(&talk.b.receives);
    // The upper bit stands for the sender's own key, which is the right one here.
    let own = Request::new(3, Op::Send).to(&talk.to_b, number, 0x8000_0000).inline(b"own");
    talk.a.qp.post_send(&[own]).unwrap();
    talk.world.done(&talk.b.receives, 1);
    same(&talk.far.read(FRONT.into(), 3), b"own", "by its own key");
    talk.world.done(&talk.a.sends, 3);
    // Another key for the receiver, at once.
    let change = Change { qkey: Some(77), ..Change::to(State::Rts) };
    talk.b.qp.modify(&change).unwrap();
    talk.a.qp.post_send(&[talk.request(4)]).unwrap();
    talk.world.done(&talk.a.sends, 4);
    talk.world.until("another dropped one", || talk.dropped("qkey") == 2);
    talk.b.qp.modify(&Change { qkey: Some(QKEY), ..Change::to(State::Rts) }).unwrap();
    talk.works();
}

/// No receive, one that is too small, no such queue pair: lost and counted, and the sender is content.
fn nobody_waits_for_it(fixture: &Fixture) {
    let talk = Talk::new(fixture);
    talk.a.qp.post_send(&[talk.request(1)]).unwrap();
    talk.world.done(&talk.a.sends, 1);
    talk.world.until("no receive", || talk.dropped("no-receive") == 1);
    talk.receive(2, 0, FRONT + 3);
    talk.a.qp.post_send(&[talk.request(3).inline(b"four")]).unwrap();
    talk.world.done(&talk.a.sends, 3);
    talk.world.until("too small a receive", || talk.dropped("length") == 1);
    talk.a.qp.post_send(&[talk.request(4).inline(b"thr")]).unwrap();
    talk.world.done(&talk.a.sends, 4);
    talk.world.done(&talk.b.receives, 2); // it serves the next
    let nobody = talk.b.qp.number() ^ 0x8000;
    talk.a.qp.post_send(&[Request::new(5, Op::Send).to(&talk.to_b, nobody, QKEY)]).unwrap();
    talk.world.done(&talk.a.sends, 5);
    let lost = || {
        let stats = talk.world.b.context.stats();
        stats.lost.iter().find(|(name, _)| *name == "no-queue-pair").unwrap().1
    };
    talk.world.until("nobody", || lost() == 1);
    talk.works();
}

fn longer_than_a_packet(fixture: &Fixture) {
    let talk = Talk::new(fixture);
    let mtu = talk.world.a.context.largest_mtu().bytes();
    let data = [talk.near.mr.sge(0, mtu + 1)];
    talk.receive(1, 0, 64);
    talk.a.qp.post_send(&[talk.request(2).with(&data), talk.request(3)]).unwrap();
    talk.world.failed(&talk.a.sends, 2, Status::LocalLength);
    talk.world.failed(&talk.a.sends, 3, Status::Flushed);
    talk.world.quiet(&talk.b.receives);
    // The send queue stands still; receiving goes on.
    let back = talk.world.b.context.address_handle(address(&talk.world.a)).unwrap();
    let place = [talk.near.mr.sge(0, 64)];
    talk.a.qp.post_receive(&[ReceiveRequest { id: 4, data: &place }]).unwrap();
    let request = Request::new(5, Op::Send).to(&back, talk.a.qp.number(), QKEY);
    talk.b.qp.post_send(&[request]).unwrap();
    talk.world.done(&talk.a.receives, 4);
    talk.a.qp.modify(&Change::to(State::Rts)).unwrap();
    talk.a.qp.post_send(&[talk.request(6)]).unwrap();
    talk.world.done(&talk.a.sends, 6);
    talk.world.done(&talk.b.receives, 1);
    // A smaller MTU is the queue pair's own.
    let small = QpOptions { mtu: Mtu::new(256), ..options() };
    let side = talk.world.side(&talk.world.a, small);
    side.qp.ready(QKEY).unwrap();
    let data = [talk.near.mr.sge(0, 257)];
    side.qp.post_send(&[talk.request(7).with(&data)]).unwrap();
    talk.world.failed(&side.sends, 7, Status::LocalLength);
}

fn a_shared_receive_queue(fixture: &Fixture) {
    let talk = Talk::new(fixture);
    let end = &talk.world.b;
    let srq = end.context.create_srq(&end.pd, SrqOptions { depth: 4, ranges: 1 }).unwrap();
    let shared = QpOptions { srq: Some(srq.clone()), ..options() };
    let sides: Vec<_> = (0..3).map(|_| talk.world.side(end, shared.clone())).collect();
    sides.iter().for_each(|side| side.qp.ready(QKEY).unwrap());
    for round in 0..20u64 {
        let place = [talk.far.mr.sge(round * 64, 64)];
        srq.post_receive(&[ReceiveRequest { id: round, data: &place }]).unwrap();
        let side = &sides[round as usize % 3];
        // One that does not fit takes a receive, and keeps it for the next.
        let data = [talk.near.mr.sge(0, 64)];
        let long = Request::new(1, Op::Send).to(&talk.to_b, side.qp.number(), QKEY).with(&data);
        let text = round.to_ne_bytes();
        let short = Request::new(2, Op::Send).to(&talk.to_b, side.qp.number(), QKEY).inline(&text);
        talk.a.qp.post_send(&[long, short]).unwrap();
        talk.world.done(&talk.a.sends, 1);
        talk.world.done(&talk.a.sends, 2);
        talk.world.done(&side.receives, round);
        same(&talk.far.read(round * 64 + 40, 8), &text, "through a shared queue");
        if round % 5 == 4 {
            // A receive in hand is not lost with its queue pair: another gets it.
            srq.post_receive(&[ReceiveRequest { id: 100, data: &place }]).unwrap();
            let seen = talk.dropped("length");
            talk.a.qp.post_send(&[long]).unwrap();
            talk.world.done(&talk.a.sends, 1);
            talk.world.until("one in hand", || talk.dropped("length") > seen);
            side.qp.modify(&Change::to(State::Reset)).unwrap();
            let next = &sides[(round as usize + 1) % 3];
            let to_next = Request::new(3, Op::Send).to(&talk.to_b, next.qp.number(), QKEY);
            talk.a.qp.post_send(&[to_next]).unwrap();
            talk.world.done(&talk.a.sends, 3);
            talk.world.done(&next.receives, 100);
            side.qp.ready(QKEY).unwrap();
        }
    }
}

/// Connections and datagrams of one device do not disturb each other, and neither takes the other's packets.
fn beside_connections(fixture: &Fixture) {
    let talk = Talk::new(fixture);
    let joined = talk.world.join(QpOptions::default());
    talk.works();
    talk.world.works(&joined);
    let other = Request::new(1, Op::Send).to(&talk.to_b, joined.b.qp.number(), QKEY);
    talk.a.qp.post_send(&[other]).unwrap();
    talk.world.done(&talk.a.sends, 1);
    let strange = || {
        let stats = talk.world.b.context.stats();
        // A connection that has one peer knows strangers by their address, if that differs, or by their service.
        talk.dropped("service") + stats.lost.iter().find(|(name, _)| *name == "stranger").unwrap().1
    };
    talk.world.until("a datagram to a connection", || strange() == 1);
    talk.world.works(&joined);
    // And a connection whose peer is a datagram queue pair gets no answer.
    let lost = talk.world.side(&talk.world.a, crate::verbs::fixture::impatient());
    lost.qp.connect(&talk.b.qp.offer()).unwrap();
    lost.qp.post_send(&[Request::new(2, Op::Send)]).unwrap();
    talk.world.failed(&lost.sends, 2, Status::RetryExceeded);
    assert!(talk.dropped("service") > 0);
    talk.works();
}

/// Nobody drives the receiver: datagrams are lost, and neither their sender nor others wait for it.
fn a_receiver_that_stands_still(fixture: &Fixture) {
    let mut links = fixture.which.crowd(3).unwrap().into_iter();
    let mut open = || End::open(links.next().unwrap(), fixture.which.options(Drive::Inline));
    let (still, world) = (open(), World { a: open(), b: open() });
    let talk = Talk::with(fixture, world, Kind::Host);
    let there = talk.world.a.context.address_handle(address(&still)).unwrap();
    let asleep = ready(&talk.world, &still, QKEY);
    let data = [talk.near.mr.sge(0, 1 << 12)];
    let request = Request::new(3, Op::Send).to(&there, asleep.qp.number(), QKEY).with(&data);
    for _ in 0..60 {
        talk.a.qp.post_send(&[request; 64]).unwrap();
        for _ in 0..64 {
            talk.world.done(&talk.a.sends, 3);
        }
    }
    if fixture.which != Which::Loopback {
        talk.works(); // on that link, one queue is for all
    }
    let lost = |reason: &str| {
        let stats = talk.world.a.context.stats();
        stats.lost.iter().find(|(name, _)| *name == reason).unwrap().1
    };
    match fixture.which {
        Which::Udp4 | Which::Udp6 => assert_eq!(lost("no-room"), 0, "the kernel loses them"),
        _ => assert!(lost("no-room") > 0),
    }
    // When it moves again, so do they.
    let place = fixture.host(&still, 1 << 13);
    asleep.qp.post_receive(&[ReceiveRequest { id: 4, data: &[place.mr.sge(0, 1 << 13)] }]).unwrap();
    let mut one = [Completion::EMPTY];
    talk.world.until("it moves again", || asleep.receives.poll(&mut one).unwrap() == 1);
    assert_eq!((one[0].id, one[0].len), (4, FRONT + (1 << 12)));
    talk.works();
}

/// Rings go round many times.
fn a_long_series(fixture: &Fixture) {
    let talk = Talk::new(fixture);
    let (mut sent, mut arrived) = (0u64, 0u64);
    let mut done = [Completion::EMPTY; 64];
    const COUNT: u64 = 3000;
    talk.world.until("all of them", || {
        while sent < COUNT && sent - arrived < 64 {
            talk.receive(sent, sent % 64 * 64, FRONT + 8);
            let text = sent.to_ne_bytes();
            talk.a.qp.post_send(&[talk.request(sent).inline(&text)]).unwrap();
            sent += 1;
        }
        talk.a.sends.poll(&mut done).unwrap();
        let count = talk.b.receives.poll(&mut done).unwrap();
        for completion in &done[..count] {
            assert_eq!((completion.id, completion.len), (arrived, FRONT + 8));
            assert_eq!(talk.far.word(arrived % 64 * 64 + u64::from(FRONT)), arrived);
            arrived += 1;
        }
        arrived == COUNT
    });
}

/// A stranger sends noise, right packets with wrong parts, and right ones, to a datagram queue pair.
fn anything_from_the_network(fixture: &Fixture) {
    let mut links = fixture.which.crowd(3).unwrap();
    let mut stranger = links.pop().unwrap();
    let (b, a) = (links.pop().unwrap(), links.pop().unwrap());
    let talk = Talk::with(fixture, World::over(a, b, Drive::Inline), Kind::Host);
    let bystander = talk.world.join(QpOptions::default());
    talk.world.works(&bystander);
    let flow = stranger.open(address(&talk.world.b), 0).unwrap();
    let number = talk.b.qp.number();
    let mut rng = Rng::new(11);
    let mut right = 0;
    for round in 0..400u64 {
        let data = [talk.far.mr.sge(0, 200 + rng.below(200) as u32)];
        // Full of those that nobody used, at times.
        let _ = talk.b.qp.post_receive(&[ReceiveRequest { id: round, data: &data }]);
        right += u64::from(send_something(&mut *stranger, flow, number, round, &mut rng));
        stranger.flush().unwrap();
        talk.world.step();
        let mut done = [Completion::EMPTY; 16];
        let count = talk.b.receives.poll(&mut done).unwrap();
        let ours = address(&talk.world.a);
        assert!(
            done[..count].iter().all(|one| one.is_success() && one.sender.unwrap().address != ours)
        );
    }
    assert!(right > 50, "the rng have six sides");
    let all = || talk.b.qp.stats().unwrap().packets_received >= right;
    talk.world.until("those that were right", all);
    assert_eq!(talk.b.qp.state().unwrap(), State::Rts);
    talk.world.works(&bystander);
    talk.b.qp.modify(&Change::to(State::Reset)).unwrap();
    talk.b.qp.ready(QKEY).unwrap();
    talk.works();
}

/// Tells whether it was a datagram that the queue pair counts.
fn send_something(
    link: &mut dyn Link,
    flow: warpwire::link::FlowId,
    number: u32,
    round: u64,
    rng: &mut Rng,
) -> bool {
    let payload = rng.below(300) as usize;
    let deth = Deth {
        qkey: if rng.below(3) == 0 { rng.next_u64() as u32 } else { QKEY },
        source_qp: rng.next_u64() as u32 & 0xff_ffff,
    };
    let opcodes = [
        (WireOpcode::UdSendOnly, Extension::Deth(deth)),
        (WireOpcode::UdSendOnlyImm, Extension::DethImm(deth, 5)),
        (WireOpcode::SendOnly, Extension::None),
        (WireOpcode::SendOnlyImm, Extension::Imm(3)),
    ];
    let (opcode, extension) = opcodes[rng.below(4) as usize];
    let mut headers = Headers::new(opcode, number, Psn::new(round as u32), extension);
    if rng.below(8) == 0 {
        headers.partition = rng.next_u64() as u16;
    }
    let len = headers.wire_len(payload);
    let noise = rng.below(3) == 0;
    let Ok(slot) = link.reserve(flow, len) else { return false };
    slot.iter_mut().for_each(|byte| *byte = rng.next_u64() as u8);
    if noise {
        // Sometimes for this queue pair, so that it is looked at further.
        slot[5..8].copy_from_slice(&number.to_be_bytes()[1..]);
    } else {
        headers.emit(slot, payload).unwrap();
    }
    link.commit();
    !noise
}

/// What arrives is whole, whatever else happens; what does not arrive is missing and nothing worse.
fn datagrams_over_a_bad_network(fixture: &Fixture) {
    let world = fixture.faulty("loss=5%,reorder=5%,dup=5%,corrupt=3%,cut=1%", 5, Drive::Inline);
    let talk = Talk::with(fixture, world, Kind::Host);
    let mut arrived = 0;
    for round in 0..300u64 {
        talk.receive(round, 0, 4096);
        let text = [round as u8; 48];
        talk.a.qp.post_send(&[talk.request(round).inline(&text)]).unwrap();
        talk.world.done(&talk.a.sends, round);
        for _ in 0..4 {
            talk.world.step();
        }
        let mut done = [Completion::EMPTY; 8];
        let count = talk.b.receives.poll(&mut done).unwrap();
        for one in &done[..count] {
            assert_eq!((one.status, one.len), (Status::Success, FRONT + 48));
            arrived += 1;
        }
        let found = talk.far.read(FRONT.into(), 48);
        assert!(found.iter().all(|byte| *byte == found[0]), "whole: {found:?}");
        if round % 100 == 99 {
            // Receives that nobody used up.
            talk.b.qp.modify(&Change::to(State::Reset)).unwrap();
            talk.b.qp.ready(QKEY).unwrap();
        }
    }
    assert!((200..330).contains(&arrived), "{arrived} of 300");
}

fn what_needs_a_connection(fixture: &Fixture) {
    let talk = Talk::new(fixture);
    let (at, data) = (talk.far.mr.remote(0), [talk.near.mr.sge(0, 8)]);
    let refused = [
        Op::Write(at),
        Op::WriteImm(at, [1; 4]),
        Op::Read(at),
        Op::Atomic(at, Atomic::FetchAdd { add: 1 }),
        Op::SendInvalidate(talk.far.mr.rkey()),
    ];
    for op in refused {
        talk.a.qp.post_send(&[Request::new(1, op).with(&data), talk.request(2)]).unwrap();
        talk.world.failed(&talk.a.sends, 1, Status::LocalQpOperation);
        talk.world.failed(&talk.a.sends, 2, Status::Flushed);
        talk.restart();
    }
    same(&talk.far.read(100, 100), &[0; 100], "nothing was written");
}

fn addresses_that_cannot_be(fixture: &Fixture) {
    let world = fixture.world();
    for wrong in ["10.0.0.2:0", "0.0.0.0:4791", "224.0.0.1:4791", "[::1]:4791"] {
        let refused = world.a.context.address_handle(wrong.parse().unwrap()).unwrap_err();
        assert!(refused.to_string().contains(wrong), "{refused}");
    }
    // Nobody has this one: datagrams are lost, as on any network.
    let nobody = world.a.context.address_handle("10.0.0.77:5000".parse().unwrap()).unwrap();
    let side = ready(&world, &world.a, QKEY);
    side.qp.post_send(&[Request::new(1, Op::Send).to(&nobody, 17, QKEY)]).unwrap();
    world.done(&side.sends, 1);
    assert_eq!(world.a.context.hca().link_counters().drops.no_peer, 1);
}

fn requests_without_sense(fixture: &Fixture) {
    let talk = Talk::new(fixture);
    let joined = talk.world.join(QpOptions::default());
    let text = |refused: warpwire::Result<()>| refused.unwrap_err().to_string();
    let why = text(talk.a.qp.post_send(&[Request::new(1, Op::Send)]));
    assert!(why.contains("needs an address"), "{why}");
    let why = text(joined.a.qp.post_send(&[talk.request(1)]));
    assert!(why.contains("leave the address out"), "{why}");
    let write = Request { op: Op::Write(talk.far.mr.remote(0)), ..talk.request(1) };
    let why = text(talk.a.qp.post_send(&[write]));
    assert!(why.contains("leave the address out"), "{why}");
    let foreign = talk.world.b.context.address_handle(address(&talk.world.a)).unwrap();
    let why = text(talk.a.qp.post_send(&[Request::new(1, Op::Send).to(&foreign, 17, 1)]));
    assert!(why.contains("another context"), "{why}");
    let why = text(talk.world.side(&talk.world.a, options()).qp.connect(&talk.b.qp.offer()));
    assert!(why.contains("queue key"), "{why}");
    let why = text(talk.world.side(&talk.world.a, QpOptions::default()).qp.ready(1));
    assert!(why.contains("access flags"), "{why}");
    let long = QpOptions { mtu: Mtu::new(1 << 20), ..options() };
    let cq = &talk.a.sends;
    let end = &talk.world.a;
    let why = end.context.create_qp(&end.pd, cq, cq, long).unwrap_err().to_string();
    assert!(why.contains("what the link carries"), "{why}");
    talk.works();
    talk.world.works(&joined);
}

fn local_memory_that_is_wrong(fixture: &Fixture) {
    let talk = Talk::new(fixture);
    let right = talk.near.mr.sge(0, 8);
    for wrong in [
        Sge { lkey: right.lkey ^ 0x100, ..right },
        Sge { address: right.address + (1 << 17), ..right },
        Sge { len: 1 << 10, address: right.address + (1 << 17) - 8, ..right },
    ] {
        talk.a.qp.post_send(&[talk.request(1).with(&[wrong]), talk.request(2)]).unwrap();
        talk.world.failed(&talk.a.sends, 1, Status::LocalProtection);
        talk.world.failed(&talk.a.sends, 2, Status::Flushed);
        talk.restart();
    }
    // A receive whose key is wrong takes its queue pair with it, as no sender is to blame.
    let wrong = [Sge { len: 64, lkey: 0x7777_0000, ..talk.far.mr.sge(0, 64) }];
    talk.b.qp.post_receive(&[ReceiveRequest { id: 3, data: &wrong }]).unwrap();
    talk.receive(4, 0, 64);
    talk.a.qp.post_send(&[talk.request(5)]).unwrap();
    talk.world.done(&talk.a.sends, 5);
    talk.world.failed(&talk.b.receives, 3, Status::LocalProtection);
    talk.world.failed(&talk.b.receives, 4, Status::Flushed);
    assert_eq!(talk.b.qp.state().unwrap(), State::Err);
    talk.b.qp.modify(&Change::to(State::Reset)).unwrap();
    talk.b.qp.ready(QKEY).unwrap();
    talk.works();
}

/// Writes an entry as a stream or a kernel would.
fn put(talk: &Talk, index: u16, entry: &[u8]) {
    let (memory, layout) = talk.a.qp.queues();
    let at = u64::from(index) * 64;
    memory.bytes().write(layout.send + at, entry).unwrap();
    let word = u32::from_ne_bytes(Record::word(index + entry.len().div_ceil(64) as u16));
    memory.bytes().store_u32(layout.record + Record::SEND as u64, word).unwrap();
    talk.world.a.context.hca().ring(talk.a.qp.number());
}

/// An entry may name any address; only those with a handle are sent to.
fn entries_that_name_nobody(fixture: &Fixture) {
    let talk = Talk::new(fixture);
    let (mut scratch, mut index) = (Scratch::default(), 0u16);
    let mut entry = |peer: &str, index: u16| {
        let to = AddressVector::new(peer.parse().unwrap(), talk.b.qp.number(), QKEY);
        let number = talk.a.qp.number();
        let entry = Builder::new(&mut scratch, Opcode::Send, index, number).signaled();
        entry.address(&to).inline(b"by hand").finish().unwrap().bytes().to_vec()
    };
    talk.receive(1, 0, 64);
    let right = entry(&address(&talk.world.b).to_string(), index);
    put(&talk, index, &right);
    index += right.len().div_ceil(64) as u16;
    talk.world.done(&talk.b.receives, 1);
    assert!(talk.world.next(&talk.a.sends).is_success());
    same(&talk.far.read(FRONT.into(), 7), b"by hand", "an entry by hand");
    for peer in ["10.0.0.3:4791", "10.0.0.2:4792", "[2001:db8::1]:4791", "0.0.0.0:0"] {
        let entry = entry(peer, index);
        put(&talk, index, &entry);
        index += entry.len().div_ceil(64) as u16;
        assert_eq!(talk.world.next(&talk.a.sends).status, Status::LocalQpOperation, "{peer}");
        talk.a.qp.modify(&Change::to(State::Rts)).unwrap();
    }
    // Nor is one sent to whose handle is gone.
    let talk = Talk::new(fixture);
    talk.receive(1, 0, 64);
    talk.a.qp.post_send(&[talk.request(2)]).unwrap();
    let Talk { world, a, b, to_b, .. } = &talk;
    let again = world.a.context.address_handle(to_b.peer()).unwrap();
    let second = again.clone();
    drop(again);
    world.done(&a.sends, 2);
    world.done(&b.receives, 1);
    let Talk { world, a, b, to_b, .. } = talk;
    a.qp.post_send(&[Request::new(3, Op::Send).to(&second, b.qp.number(), QKEY)]).unwrap();
    drop((to_b, second));
    world.failed(&a.sends, 3, Status::LocalQpOperation);
}

fn a_failure_flushes(fixture: &Fixture) {
    let talk = Talk::new(fixture);
    talk.receive(1, 0, 64);
    talk.receive(2, 0, 64);
    talk.b.qp.modify(&Change::to(State::Err)).unwrap();
    talk.world.failed(&talk.b.receives, 1, Status::Flushed);
    talk.world.failed(&talk.b.receives, 2, Status::Flushed);
    talk.b.qp.post_send(&[Request::new(3, Op::Nop)]).unwrap();
    talk.world.failed(&talk.b.sends, 3, Status::Flushed);
    talk.a.qp.post_send(&[talk.request(4)]).unwrap();
    talk.world.done(&talk.a.sends, 4);
    talk.world.until("a datagram that nobody takes", || talk.dropped("state") == 1);
    talk.b.qp.modify(&Change::to(State::Reset)).unwrap();
    talk.b.qp.ready(QKEY).unwrap();
    talk.works();
}

fn waits_and_nops_in_order(fixture: &Fixture) {
    let talk = Talk::new(fixture);
    let end = &talk.world.a;
    let other = end.context.create_cq(16).unwrap();
    let gate = end.context.create_qp(&end.pd, &other, &other, options()).unwrap();
    gate.ready(QKEY).unwrap();
    talk.receive(1, 0, 64);
    let wait = Request::new(3, Op::Wait { cqn: other.number(), index: 0 });
    let read = [talk.near.mr.sge(0, 8)];
    let dump = Request::new(4, Op::Dump).with(&read);
    let send = talk.request(5).unsignaled();
    let batch = [Request::new(2, Op::Nop), wait, dump, send, Request::new(6, Op::Nop)];
    talk.a.qp.post_send(&batch).unwrap();
    talk.world.done(&talk.a.sends, 2);
    talk.world.quiet(&talk.b.receives);
    gate.post_send(&[Request::new(9, Op::Nop)]).unwrap();
    for id in 3..=6 {
        talk.world.done(&talk.a.sends, id); // all are signaled by default
    }
    talk.world.done(&talk.b.receives, 1);
}

/// The steps of a datagram queue pair, and draining.
fn states_of_a_datagram_queue_pair(fixture: &Fixture) {
    let talk = Talk::new(fixture);
    let fresh = talk.world.side(&talk.world.a, options());
    let refused = fresh.qp.post_send(&[talk.request(1)]).unwrap_err().to_string();
    assert!(refused.contains("RESET"), "{refused}");
    for step in [fresh.qp.to_init(), Change::to(State::Rtr), Change::to(State::Sqe)] {
        fresh.qp.modify(&step).unwrap_err();
        assert_eq!(fresh.qp.state().unwrap(), State::Reset);
    }
    assert_eq!(fresh.qp.service(), Service::Ud);
    talk.world.a.news();
    let stop = Change { notify_drained: Some(true), ..Change::to(State::Sqd) };
    talk.a.qp.modify(&stop).unwrap();
    talk.receive(1, 0, 64);
    talk.a.qp.post_send(&[talk.request(2)]).unwrap();
    talk.world.quiet(&talk.a.sends);
    assert_eq!(talk.world.a.news(), [AsyncEvent::Drained { qpn: talk.a.qp.number() }]);
    talk.a.qp.modify(&Change::to(State::Rts)).unwrap();
    talk.world.done(&talk.a.sends, 2);
    talk.world.done(&talk.b.receives, 1);
    talk.a.qp.modify(&Change::to(State::Reset)).unwrap();
    talk.a.qp.ready(QKEY).unwrap();
    talk.works();
}

/// Noise in the send queue of a datagram queue pair.
fn random_entries_of_datagrams(fixture: &Fixture) {
    let talk = Talk::new(fixture);
    let peer = address(&talk.world.b);
    for_each_seed(crate::verbs::garbage::seeds(1500), |seed| {
        let mut rng = Rng::new(seed);
        let mut entry = vec![0; 64 * (1 + rng.below(3) as usize)];
        entry.iter_mut().for_each(|byte| *byte = rng.next_u64() as u8);
        entry[1..3].copy_from_slice(&[0, 0]);
        let codes = [0, 8, 0xa, 0xa, 0xa, 0xb, 0xb, 0xf, 0x10, 0x23];
        entry[3] = codes[rng.below(codes.len() as u64) as usize];
        entry[7] = 1 + rng.below(entry.len() as u64 / 16) as u8;
        if rng.below(2) == 0 {
            // An address that leads somewhere.
            let to = AddressVector::new(peer, talk.b.qp.number(), QKEY).encode();
            entry[16..64].copy_from_slice(&to);
        }
        talk.receive(1, 0, 4096);
        put(&talk, 0, &entry);
        (0..6).for_each(|_| talk.world.step());
        for side in [&talk.a, &talk.b] {
            side.qp.modify(&Change::to(State::Reset)).unwrap();
            side.qp.ready(QKEY).unwrap();
        }
        if seed % 10 == 0 {
            talk.works();
            talk.a.qp.modify(&Change::to(State::Reset)).unwrap();
            talk.a.qp.ready(QKEY).unwrap();
        }
    });
}
