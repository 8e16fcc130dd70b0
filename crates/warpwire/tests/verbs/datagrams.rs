//! Datagrams: delivered to any queue pair whose Q_Key matches, unreliably; wrong or forged ones do
//! no harm.

use std::net::SocketAddr;

use warpwire::link::Link;
use warpwire::mlx5::{AddressVector, Builder, DoorbellRecord, Scratch, WqeOpcode};
use warpwire::verbs::{
    AddressHandle, AsyncEvent, Atomic, Completion, CompletionKind, DatagramSender, GRH_LEN, Grh,
    Mtu, PostError, ProgressMode, QpAttributes, QpOptions, ReceiveRequest, SendRequest, Service,
    Sge, SrqOptions, State, Status, WrOp,
};
use warpwire_proto::Psn;
use warpwire_proto::wire::{Deth, Extension, Headers, Opcode as WireOpcode};

use crate::verbs::fixture::{
    Endpoint, Fixture, KINDS, Kind, Rng, TestBuffer, TestLink, TestQp, Testbed, same,
};
use testkit::cases;

cases!(Fixture; CASES:
    messages_of_every_length,
    replies_reach_the_sender,
    many_peers_in_one_batch,
    wrong_qkeys_are_dropped,
    undeliverable_datagrams_are_counted,
    longer_than_a_packet,
    a_shared_receive_queue,
    beside_connections,
    a_stalled_receiver,
    a_long_series,
    anything_from_the_network,
    datagrams_over_a_bad_network,
);
cases!(Fixture; ONCE:
    operations_that_need_a_connection,
    invalid_addresses,
    invalid_requests,
    invalid_local_memory,
    wqes_without_an_address_handle,
    a_failure_flushes,
    waits_and_nops_in_order,
    states_of_a_datagram_queue_pair,
);

pub(super) const QKEY: u32 = 0x1234;
/// Bytes of the GRH before each payload.
const GRH: u32 = GRH_LEN;

fn options() -> QpOptions {
    QpOptions::default().with_service(Service::Ud)
}

/// A queue pair in RTS with that Q_Key.
fn activate_ud(testbed: &Testbed, end: &Endpoint, qkey: u32) -> TestQp {
    let test_qp = testbed.test_qp(end, options());
    test_qp.qp.activate_ud(qkey).unwrap();
    test_qp
}

pub(super) fn reset(test_qp: &TestQp) {
    test_qp.qp.modify(&QpAttributes::new(State::Reset)).unwrap();
    test_qp.qp.activate_ud(QKEY).unwrap();
}

pub(super) fn address(end: &Endpoint) -> SocketAddr {
    end.context.path().local
}

fn lost(end: &Endpoint, reason: &str) -> u64 {
    end.context.stats().unwrap().dropped.iter().find(|(name, _)| *name == reason).unwrap().1
}

/// Two queue pairs in RTS, a buffer for each, and an address handle from `a` to `b`.
pub(super) struct UdPair {
    pub testbed: Testbed,
    pub a: TestQp,
    pub b: TestQp,
    near: TestBuffer,
    far: TestBuffer,
    to_b: AddressHandle,
}

impl UdPair {
    pub fn new(fixture: &Fixture) -> Self {
        Self::with(fixture, fixture.testbed(), Kind::Host)
    }

    fn with(fixture: &Fixture, testbed: Testbed, kind: Kind) -> Self {
        let [a, b] = [&testbed.a, &testbed.b].map(|end| activate_ud(&testbed, end, QKEY));
        let [near, far] = [&testbed.a, &testbed.b]
            .map(|end| fixture.memory(end, kind, 1 << 17, crate::verbs::fixture::ALL));
        let to_b = testbed.a.context.create_address_handle(address(&testbed.b)).unwrap();
        Self { testbed, a, b, near, far, to_b }
    }

    fn request(&self, id: u64) -> SendRequest<'_> {
        SendRequest::new(id, WrOp::Send).to(&self.to_b, self.b.qp.number(), QKEY)
    }

    pub fn receive(&self, id: u64, offset: u64, len: u32) {
        let data = [self.far.mr.sge(offset, len)];
        self.b.qp.post_receive(&[ReceiveRequest { id, data: &data }]).unwrap();
    }

    /// Asserts that a message arrives.
    pub fn check_traffic(&self) {
        self.receive(900, 0, GRH + 5);
        self.a.qp.post_send(&[self.request(901).inline(b"hello")]).unwrap();
        self.testbed.done(&self.a.sends, 901);
        let done = self.testbed.done(&self.b.receives, 900);
        assert_eq!((done.len, self.known(done.sender)), (GRH + 5, Some(self.sender())));
        same(&self.far.read(GRH.into(), 5), b"hello", "a datagram");
    }

    /// The sender with its listening port: NICs send from another source port.
    fn known(&self, sender: Option<DatagramSender>) -> Option<DatagramSender> {
        let is_device = self.testbed.a.is_device() && !self.testbed.b.is_device();
        sender.map(|DatagramSender { qpn, mut address }| {
            if is_device {
                address.set_port(4791);
            }
            DatagramSender { qpn, address }
        })
    }

    fn sender(&self) -> DatagramSender {
        let address = match self.testbed.b.is_device() {
            // A device reports the address only in the GRH.
            true => "[::]:0".parse().unwrap(),
            false => address(&self.testbed.a),
        };
        DatagramSender { qpn: self.a.qp.number(), address }
    }

    /// How many datagrams the receiver dropped for `reason`.
    fn dropped(&self, reason: &str) -> u64 {
        let stats = self.testbed.b.context.stats().unwrap();
        stats.discarded.iter().find(|(name, _)| *name == reason).unwrap().1
    }

    fn restart(&self) {
        assert_eq!(self.a.qp.state().unwrap(), State::Sqe);
        self.a.qp.modify(&QpAttributes::new(State::Rts)).unwrap();
        self.check_traffic();
    }
}

fn messages_of_every_length(fixture: &Fixture) {
    for (seed, kind) in (0..).zip(KINDS) {
        let ud_pair = UdPair::with(fixture, fixture.testbed(), kind);
        let mtu = ud_pair.testbed.a.context.max_mtu().bytes();
        for (n, len) in [0, 1, 3, 4, 63, 64, 255, mtu - 1, mtu].into_iter().enumerate() {
            let shift = n as u64;
            let wanted = ud_pair.near.pattern(shift, len as usize, seed + shift);
            ud_pair.far.write(0, &vec![0xee; (GRH + len) as usize + 8]);
            // The GRH and the message in separate ranges.
            let pieces = [ud_pair.far.mr.sge(0, GRH + 1), ud_pair.far.mr.sge(41, len + 7)];
            ud_pair.b.qp.post_receive(&[ReceiveRequest { id: 7, data: &pieces }]).unwrap();
            let op = if n % 2 == 0 { WrOp::Send } else { WrOp::SendImm([1, 2, 3, n as u8]) };
            let data = [ud_pair.near.mr.sge(shift, len)];
            let request = SendRequest { op, ..ud_pair.request(8).with(&data) };
            ud_pair.a.qp.post_send(&[request.solicited()]).unwrap();
            ud_pair.testbed.done(&ud_pair.a.sends, 8);
            let done = ud_pair.testbed.done(&ud_pair.b.receives, 7);
            let kind = match op {
                WrOp::Send => CompletionKind::Receive,
                _ => CompletionKind::ReceiveImm([1, 2, 3, n as u8]),
            };
            let solicited = !ud_pair.testbed.b.is_device();
            assert_eq!((done.kind, done.len, done.solicited), (kind, GRH + len, solicited));
            assert_eq!(ud_pair.known(done.sender), Some(ud_pair.sender()));
            let route: [u8; 40] = ud_pair.far.read(0, 40).try_into().unwrap();
            if !fixture.test_link.has_device() {
                // Traffic class and hop limit, as sent: capable of ECN, and Linux's default.
                let is_ipv4 = address(&ud_pair.testbed.b).is_ipv4();
                let ipv6 = (route[0] << 4 | route[1] >> 4, route[7]);
                assert_eq!(if is_ipv4 { (route[21], route[28]) } else { ipv6 }, (2, 64));
            }
            let route = Grh::parse(&route).expect("a header");
            let ends = [&ud_pair.testbed.a, &ud_pair.testbed.b].map(|end| address(end).ip());
            assert_eq!([route.source, route.destination], ends);
            same(&ud_pair.far.read(GRH.into(), len as usize), &wanted, "a datagram");
            same(&ud_pair.far.read((GRH + len).into(), 8), &[0xee; 8], "bytes after the datagram");
        }
        if let (Ok(sent), Ok(received)) = (ud_pair.a.qp.stats(), ud_pair.b.qp.stats()) {
            assert_eq!((sent.packets_sent, received.packets_received), (9, 9));
        }
    }
}

/// The completion (on a device, also the GRH) has all that is needed to reply to a datagram.
fn replies_reach_the_sender(fixture: &Fixture) {
    let ud_pair = UdPair::new(fixture);
    ud_pair.receive(1, 0, GRH + 4);
    ud_pair.a.qp.post_send(&[ud_pair.request(2).inline(b"ask!")]).unwrap();
    let sender = ud_pair.testbed.done(&ud_pair.b.receives, 1).sender;
    let DatagramSender { qpn, mut address } = ud_pair.known(sender).unwrap();
    if address.ip().is_unspecified() {
        let route = ud_pair.far.read(0, 40).try_into().unwrap();
        address = (Grh::parse(&route).expect("a header").source, 4791).into();
    }
    let back = ud_pair.testbed.b.context.create_address_handle(address).unwrap();
    let reply = SendRequest::new(4, WrOp::Send).to(&back, qpn, QKEY).inline(b"answer");
    let receive = ReceiveRequest { id: 3, data: &[ud_pair.near.mr.sge(0, GRH + 6)] };
    // A lone first packet of a host that counts its packets may be lost (docs/link.md).
    for _ in 0..1 + usize::from(ud_pair.testbed.b.is_device()) {
        ud_pair.a.qp.post_receive(&[receive]).unwrap();
        ud_pair.b.qp.post_send(&[reply]).unwrap();
        ud_pair.testbed.done(&ud_pair.b.sends, 4);
    }
    ud_pair.testbed.done(&ud_pair.a.sends, 2);
    ud_pair.testbed.done(&ud_pair.a.receives, 3);
    same(&ud_pair.near.read(GRH.into(), 6), b"answer", "a reply");
}

/// One batch to queue pairs of three other devices and of the sender's own.
fn many_peers_in_one_batch(fixture: &Fixture) {
    let mut links = fixture.test_link.links(4).unwrap().into_iter();
    let mut open =
        || Endpoint::open(links.next().unwrap(), fixture.test_link.options(ProgressMode::Manual));
    let (testbed, others) = (Testbed { a: open(), b: open() }, [open(), open()]);
    let from = activate_ud(&testbed, &testbed.a, 9);
    let ends = [&testbed.a, &testbed.b, &others[0], &others[1]];
    let there: Vec<_> = ends
        .iter()
        .flat_map(|end| [(*end, 1), (*end, 2)])
        .map(|(end, n)| {
            let qkey = 100 + n;
            let test_qp = activate_ud(&testbed, end, qkey);
            let memory = fixture.host(end, 64);
            let data = [memory.mr.sge(0, 64)];
            test_qp.qp.post_receive(&[ReceiveRequest { id: 5, data: &data }]).unwrap();
            let handle = testbed.a.context.create_address_handle(address(end)).unwrap();
            (test_qp, memory, handle, qkey)
        })
        .collect();
    let mut batch = from.qp.batch().unwrap();
    for (n, (test_qp, _, handle, qkey)) in there.iter().enumerate() {
        let text = [n as u8; 8];
        let request = SendRequest::new(n as u64, WrOp::Send).to(handle, test_qp.qp.number(), *qkey);
        batch.push(&request.inline(&text)).unwrap();
    }
    batch.post();
    let step = || {
        testbed.step();
        for end in &others {
            end.context.soft().unwrap().poll().unwrap();
        }
    };
    for (n, (test_qp, memory, ..)) in there.iter().enumerate() {
        let mut one = [Completion::EMPTY];
        testbed.until("a datagram for each", || {
            step();
            test_qp.receives.poll(&mut one).unwrap() == 1
        });
        assert_eq!((one[0].id, one[0].len), (5, GRH + 8));
        assert_eq!(one[0].sender.unwrap().qpn, from.qp.number());
        same(&memory.read(GRH.into(), 8), &[n as u8; 8], "a datagram of the batch");
        testbed.done(&from.sends, n as u64);
    }
}

fn wrong_qkeys_are_dropped(fixture: &Fixture) {
    let ud_pair = UdPair::new(fixture);
    ud_pair.receive(1, 0, 64);
    let number = ud_pair.b.qp.number();
    let wrong = SendRequest::new(2, WrOp::Send).to(&ud_pair.to_b, number, QKEY ^ 1).inline(b"no");
    ud_pair.a.qp.post_send(&[wrong]).unwrap();
    ud_pair.testbed.done(&ud_pair.a.sends, 2);
    ud_pair.testbed.until("a dropped datagram", || ud_pair.dropped("qkey") == 1);
    ud_pair.testbed.expect_no_completion(&ud_pair.b.receives);
    // With the upper bit set the sender's own Q_Key is used, which is the right one here.
    let own = SendRequest::new(3, WrOp::Send).to(&ud_pair.to_b, number, 0x8000_0000).inline(b"own");
    ud_pair.a.qp.post_send(&[own]).unwrap();
    ud_pair.testbed.done(&ud_pair.b.receives, 1);
    same(&ud_pair.far.read(GRH.into(), 3), b"own", "with the sender's own Q_Key");
    ud_pair.testbed.done(&ud_pair.a.sends, 3);
    // A changed Q_Key takes effect immediately.
    let qkey = |key| QpAttributes::new(State::Rts).with_qkey(key);
    ud_pair.b.qp.modify(&qkey(77)).unwrap();
    ud_pair.a.qp.post_send(&[ud_pair.request(4)]).unwrap();
    ud_pair.testbed.done(&ud_pair.a.sends, 4);
    ud_pair.testbed.until("a second dropped datagram", || ud_pair.dropped("qkey") == 2);
    ud_pair.b.qp.modify(&qkey(QKEY)).unwrap();
    ud_pair.check_traffic();
}

/// No receive, too small a receive, no such queue pair: dropped and counted; the send succeeds.
fn undeliverable_datagrams_are_counted(fixture: &Fixture) {
    let ud_pair = UdPair::new(fixture);
    ud_pair.a.qp.post_send(&[ud_pair.request(1)]).unwrap();
    ud_pair.testbed.done(&ud_pair.a.sends, 1);
    ud_pair.testbed.until("no receive", || ud_pair.dropped("no-receive") == 1);
    ud_pair.receive(2, 0, GRH + 3);
    ud_pair.a.qp.post_send(&[ud_pair.request(3).inline(b"four")]).unwrap();
    ud_pair.testbed.done(&ud_pair.a.sends, 3);
    ud_pair.testbed.until("too small a receive", || ud_pair.dropped("length") == 1);
    ud_pair.a.qp.post_send(&[ud_pair.request(4).inline(b"thr")]).unwrap();
    ud_pair.testbed.done(&ud_pair.a.sends, 4);
    ud_pair.testbed.done(&ud_pair.b.receives, 2); // it was not consumed
    let absent = ud_pair.b.qp.number() ^ 0x8000;
    let to_absent = SendRequest::new(5, WrOp::Send).to(&ud_pair.to_b, absent, QKEY);
    ud_pair.a.qp.post_send(&[to_absent]).unwrap();
    ud_pair.testbed.done(&ud_pair.a.sends, 5);
    let unknown_qps = || lost(&ud_pair.testbed.b, "no-queue-pair");
    ud_pair.testbed.until("a datagram to an unknown queue pair", || unknown_qps() == 1);
    ud_pair.check_traffic();
}

fn longer_than_a_packet(fixture: &Fixture) {
    let ud_pair = UdPair::new(fixture);
    let mtu = ud_pair.testbed.a.context.max_mtu().bytes();
    let data = [ud_pair.near.mr.sge(0, mtu + 1)];
    ud_pair.receive(1, 0, 64);
    ud_pair.a.qp.post_send(&[ud_pair.request(2).with(&data), ud_pair.request(3)]).unwrap();
    ud_pair.testbed.failed(&ud_pair.a.sends, 2, Status::LocalLength);
    ud_pair.testbed.failed(&ud_pair.a.sends, 3, Status::Flushed);
    ud_pair.testbed.expect_no_completion(&ud_pair.b.receives);
    // The send queue is in SQE; receives still work.
    let back =
        ud_pair.testbed.b.context.create_address_handle(address(&ud_pair.testbed.a)).unwrap();
    let buffer = [ud_pair.near.mr.sge(0, 64)];
    ud_pair.a.qp.post_receive(&[ReceiveRequest { id: 4, data: &buffer }]).unwrap();
    let request = SendRequest::new(5, WrOp::Send).to(&back, ud_pair.a.qp.number(), QKEY);
    ud_pair.b.qp.post_send(&[request]).unwrap();
    ud_pair.testbed.done(&ud_pair.a.receives, 4);
    ud_pair.a.qp.modify(&QpAttributes::new(State::Rts)).unwrap();
    ud_pair.a.qp.post_send(&[ud_pair.request(6)]).unwrap();
    ud_pair.testbed.done(&ud_pair.a.sends, 6);
    ud_pair.testbed.done(&ud_pair.b.receives, 1);
    // A queue pair may have a smaller MTU than its device.
    let small = options().with_mtu(Mtu::new(256));
    let test_qp = ud_pair.testbed.test_qp(&ud_pair.testbed.a, small);
    test_qp.qp.activate_ud(QKEY).unwrap();
    let data = [ud_pair.near.mr.sge(0, 257)];
    test_qp.qp.post_send(&[ud_pair.request(7).with(&data)]).unwrap();
    ud_pair.testbed.failed(&test_qp.sends, 7, Status::LocalLength);
}

fn a_shared_receive_queue(fixture: &Fixture) {
    let ud_pair = UdPair::new(fixture);
    let end = &ud_pair.testbed.b;
    let small_srq = SrqOptions::default().with_depth(4).with_max_sge(1);
    let srq = end.context.create_srq(&end.pd, small_srq).unwrap();
    let shared = options().with_srq(srq.clone());
    let test_qps: Vec<_> = (0..3).map(|_| ud_pair.testbed.test_qp(end, shared.clone())).collect();
    test_qps.iter().for_each(|test_qp| test_qp.qp.activate_ud(QKEY).unwrap());
    for round in 0..20u64 {
        let buffer = [ud_pair.far.mr.sge(round * 64, 64)];
        srq.post_receive(&[ReceiveRequest { id: round, data: &buffer }]).unwrap();
        let test_qp = &test_qps[round as usize % 3];
        // A datagram that does not fit takes a receive, which is kept for the next one.
        let data = [ud_pair.near.mr.sge(0, 64)];
        let (number, text) = (test_qp.qp.number(), round.to_ne_bytes());
        let request = |id| SendRequest::new(id, WrOp::Send).to(&ud_pair.to_b, number, QKEY);
        let (long, short) = (request(1).with(&data), request(2).inline(&text));
        ud_pair.a.qp.post_send(&[long, short]).unwrap();
        ud_pair.testbed.done(&ud_pair.a.sends, 1);
        ud_pair.testbed.done(&ud_pair.a.sends, 2);
        ud_pair.testbed.done(&test_qp.receives, round);
        same(&ud_pair.far.read(round * 64 + 40, 8), &text, "through a shared queue");
        if round % 5 == 4 {
            // A taken receive is not lost when its queue pair is reset: another one gets it.
            srq.post_receive(&[ReceiveRequest { id: 100, data: &buffer }]).unwrap();
            let seen = ud_pair.dropped("length");
            ud_pair.a.qp.post_send(&[long]).unwrap();
            ud_pair.testbed.done(&ud_pair.a.sends, 1);
            ud_pair.testbed.until("a kept receive", || ud_pair.dropped("length") > seen);
            test_qp.qp.modify(&QpAttributes::new(State::Reset)).unwrap();
            let next = &test_qps[(round as usize + 1) % 3];
            let to_next = SendRequest::new(3, WrOp::Send).to(&ud_pair.to_b, next.qp.number(), QKEY);
            ud_pair.a.qp.post_send(&[to_next]).unwrap();
            ud_pair.testbed.done(&ud_pair.a.sends, 3);
            ud_pair.testbed.done(&next.receives, 100);
            test_qp.qp.activate_ud(QKEY).unwrap();
        }
    }
}

/// RC and UD queue pairs of one device do not disturb each other, and neither accepts the other's
/// packets.
fn beside_connections(fixture: &Fixture) {
    let ud_pair = UdPair::new(fixture);
    let conn = ud_pair.testbed.join(QpOptions::default());
    ud_pair.check_traffic();
    ud_pair.testbed.check_traffic(&conn);
    let other = SendRequest::new(1, WrOp::Send).to(&ud_pair.to_b, conn.b.qp.number(), QKEY);
    ud_pair.a.qp.post_send(&[other]).unwrap();
    ud_pair.testbed.done(&ud_pair.a.sends, 1);
    // A connected queue pair recognizes foreign packets by their source address or their service.
    let rejected = || ud_pair.dropped("service") + lost(&ud_pair.testbed.b, "stranger");
    ud_pair.testbed.until("a datagram to a connection", || rejected() == 1);
    ud_pair.testbed.check_traffic(&conn);
    // An RC queue pair connected to a UD queue pair gets no response.
    let rc = ud_pair.testbed.test_qp(&ud_pair.testbed.a, crate::verbs::fixture::short_timeouts());
    rc.qp.connect(&ud_pair.b.qp.endpoint()).unwrap();
    rc.qp.post_send(&[SendRequest::new(2, WrOp::Send)]).unwrap();
    ud_pair.testbed.failed(&rc.sends, 2, Status::RetryExceeded);
    assert!(ud_pair.dropped("service") > 0);
    ud_pair.check_traffic();
}

/// The receiver makes no progress: datagrams to it are lost, and neither their sender nor other
/// receivers are blocked.
fn a_stalled_receiver(fixture: &Fixture) {
    let mut links = fixture.test_link.links(3).unwrap().into_iter();
    let mut open =
        || Endpoint::open(links.next().unwrap(), fixture.test_link.options(ProgressMode::Manual));
    let (stalled, testbed) = (open(), Testbed { a: open(), b: open() });
    let ud_pair = UdPair::with(fixture, testbed, Kind::Host);
    let there = ud_pair.testbed.a.context.create_address_handle(address(&stalled)).unwrap();
    let receiver = activate_ud(&ud_pair.testbed, &stalled, QKEY);
    let data = [ud_pair.near.mr.sge(0, 1 << 12)];
    let request =
        SendRequest::new(3, WrOp::Send).to(&there, receiver.qp.number(), QKEY).with(&data);
    for _ in 0..60 {
        ud_pair.a.qp.post_send(&[request; 64]).unwrap();
        for _ in 0..64 {
            ud_pair.testbed.done(&ud_pair.a.sends, 3);
        }
    }
    if fixture.test_link != TestLink::Loopback {
        ud_pair.check_traffic(); // the loopback link has one queue for all flows
    }
    let link_full = lost(&ud_pair.testbed.a, "no-room");
    match fixture.test_link {
        TestLink::Udp4 | TestLink::Udp6 => assert_eq!(link_full, 0, "the kernel drops them"),
        _ => assert!(link_full > 0),
    }
    // Once the receiver is polled again, datagrams arrive.
    let memory = fixture.host(&stalled, 1 << 13);
    let data = [memory.mr.sge(0, 1 << 13)];
    receiver.qp.post_receive(&[ReceiveRequest { id: 4, data: &data }]).unwrap();
    let mut one = [Completion::EMPTY];
    ud_pair.testbed.until("a datagram", || receiver.receives.poll(&mut one).unwrap() == 1);
    assert_eq!((one[0].id, one[0].len), (4, GRH + (1 << 12)));
    ud_pair.check_traffic();
}

/// The ring buffers wrap many times.
fn a_long_series(fixture: &Fixture) {
    let ud_pair = UdPair::new(fixture);
    let (mut sent, mut arrived) = (0u64, 0u64);
    let mut done = [Completion::EMPTY; 64];
    const COUNT: u64 = 3000;
    ud_pair.testbed.until("all of them", || {
        while sent < COUNT && sent - arrived < 64 {
            ud_pair.receive(sent, sent % 64 * 64, GRH + 8);
            let text = sent.to_ne_bytes();
            ud_pair.a.qp.post_send(&[ud_pair.request(sent).inline(&text)]).unwrap();
            sent += 1;
        }
        ud_pair.a.sends.poll(&mut done).unwrap();
        let count = ud_pair.b.receives.poll(&mut done).unwrap();
        for completion in &done[..count] {
            assert_eq!((completion.id, completion.len), (arrived, GRH + 8));
            assert_eq!(ud_pair.far.word(arrived % 64 * 64 + u64::from(GRH)), arrived);
            arrived += 1;
        }
        arrived == COUNT
    });
}

/// A foreign link sends noise, valid packets with invalid parts, and valid packets to a UD queue
/// pair.
fn anything_from_the_network(fixture: &Fixture) {
    let mut links = fixture.test_link.links(3).unwrap();
    let mut stranger = links.pop().unwrap();
    let (b, a) = (links.pop().unwrap(), links.pop().unwrap());
    let ud_pair = UdPair::with(fixture, Testbed::over(a, b, ProgressMode::Manual), Kind::Host);
    let bystander = ud_pair.testbed.join(QpOptions::default());
    ud_pair.testbed.check_traffic(&bystander);
    let flow = stranger.open(address(&ud_pair.testbed.b), 0).unwrap();
    let number = ud_pair.b.qp.number();
    let mut rng = Rng::new(11);
    let mut valid = 0;
    for round in 0..400u64 {
        let data = [ud_pair.far.mr.sge(0, 200 + rng.below(200) as u32)];
        // The queue may be full of unconsumed receives.
        let _ = ud_pair.b.qp.post_receive(&[ReceiveRequest { id: round, data: &data }]);
        valid += u64::from(send_something(&mut *stranger, flow, number, round, &mut rng));
        stranger.flush().unwrap();
        ud_pair.testbed.step();
        let mut done = [Completion::EMPTY; 16];
        let count = ud_pair.b.receives.poll(&mut done).unwrap();
        let ours = address(&ud_pair.testbed.a);
        assert!(
            done[..count].iter().all(|one| one.is_success() && one.sender.unwrap().address != ours)
        );
    }
    assert!(valid > 50, "only {valid} of 400 packets were valid");
    let all = || ud_pair.b.qp.stats().unwrap().packets_received >= valid;
    ud_pair.testbed.until("all valid packets", all);
    assert_eq!(ud_pair.b.qp.state().unwrap(), State::Rts);
    ud_pair.testbed.check_traffic(&bystander);
    reset(&ud_pair.b);
    ud_pair.check_traffic();
}

/// Returns whether the packet is one that the queue pair counts as received.
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
        // With this queue pair's number, so that it gets past the lookup.
        slot[5..8].copy_from_slice(&number.to_be_bytes()[1..]);
    } else {
        headers.emit(slot, payload).unwrap();
    }
    link.commit();
    !noise
}

/// A datagram arrives whole or not at all.
fn datagrams_over_a_bad_network(fixture: &Fixture) {
    let testbed =
        fixture.faulty("loss=5%,reorder=5%,dup=5%,corrupt=3%,cut=1%", 5, ProgressMode::Manual);
    let ud_pair = UdPair::with(fixture, testbed, Kind::Host);
    let mut arrived = 0;
    for round in 0..300u64 {
        ud_pair.receive(round, 0, 4096);
        let text = [round as u8; 48];
        ud_pair.a.qp.post_send(&[ud_pair.request(round).inline(&text)]).unwrap();
        ud_pair.testbed.done(&ud_pair.a.sends, round);
        for _ in 0..4 {
            ud_pair.testbed.step();
        }
        let mut done = [Completion::EMPTY; 8];
        let count = ud_pair.b.receives.poll(&mut done).unwrap();
        for one in &done[..count] {
            assert_eq!((one.status, one.len), (Status::Success, GRH + 48));
            arrived += 1;
        }
        let found = ud_pair.far.read(GRH.into(), 48);
        assert!(found.iter().all(|byte| *byte == found[0]), "a torn datagram: {found:?}");
        if round % 100 == 99 {
            reset(&ud_pair.b); // drops unconsumed receives
        }
    }
    assert!((200..330).contains(&arrived), "{arrived} of 300");
}

fn operations_that_need_a_connection(fixture: &Fixture) {
    let ud_pair = UdPair::new(fixture);
    let (at, data) = (ud_pair.far.mr.remote(0), [ud_pair.near.mr.sge(0, 8)]);
    let refused = [
        WrOp::Write(at),
        WrOp::WriteImm(at, [1; 4]),
        WrOp::Read(at),
        WrOp::Atomic(at, Atomic::FetchAdd { add: 1 }),
        WrOp::SendInvalidate(ud_pair.far.mr.rkey()),
    ];
    for op in refused {
        ud_pair.a.qp.post_send(&[SendRequest::new(1, op).with(&data), ud_pair.request(2)]).unwrap();
        ud_pair.testbed.failed(&ud_pair.a.sends, 1, Status::LocalQpOperation);
        ud_pair.testbed.failed(&ud_pair.a.sends, 2, Status::Flushed);
        ud_pair.restart();
    }
    same(&ud_pair.far.read(100, 100), &[0; 100], "nothing was written");
}

fn invalid_addresses(fixture: &Fixture) {
    let testbed = fixture.testbed();
    for wrong in ["10.0.0.2:0", "0.0.0.0:4791", "224.0.0.1:4791", "[::1]:4791"] {
        let refused = testbed.a.context.create_address_handle(wrong.parse().unwrap()).unwrap_err();
        assert!(refused.to_string().contains(wrong), "{refused}");
    }
    // No link has this address: datagrams to it are lost, as on any network.
    let absent =
        testbed.a.context.create_address_handle("10.0.0.77:5000".parse().unwrap()).unwrap();
    let test_qp = activate_ud(&testbed, &testbed.a, QKEY);
    test_qp.qp.post_send(&[SendRequest::new(1, WrOp::Send).to(&absent, 17, QKEY)]).unwrap();
    testbed.done(&test_qp.sends, 1);
    assert_eq!(testbed.a.context.soft().unwrap().link_counters().drops.no_peer, 1);
}

fn invalid_requests(fixture: &Fixture) {
    let ud_pair = UdPair::new(fixture);
    let conn = ud_pair.testbed.join(QpOptions::default());
    let text = |refused: warpwire::Result<()>| refused.unwrap_err().to_string();
    let posted = |refused: Result<(), PostError>| text(refused.map_err(Into::into));
    let why = posted(ud_pair.a.qp.post_send(&[SendRequest::new(1, WrOp::Send)]));
    assert!(why.contains("needs a destination"), "{why}");
    let why = posted(conn.a.qp.post_send(&[ud_pair.request(1)]));
    assert!(why.contains("omit the destination"), "{why}");
    let write = SendRequest { op: WrOp::Write(ud_pair.far.mr.remote(0)), ..ud_pair.request(1) };
    let why = posted(ud_pair.a.qp.post_send(&[write]));
    assert!(why.contains("omit the destination"), "{why}");
    let foreign =
        ud_pair.testbed.b.context.create_address_handle(address(&ud_pair.testbed.a)).unwrap();
    let to_foreign = SendRequest::new(1, WrOp::Send).to(&foreign, 17, 1);
    let why = posted(ud_pair.a.qp.post_send(&[to_foreign]));
    assert!(why.contains("another context"), "{why}");
    let why = text(
        ud_pair.testbed.test_qp(&ud_pair.testbed.a, options()).qp.connect(&ud_pair.b.qp.endpoint()),
    );
    assert!(why.contains("Q_Key"), "{why}");
    let why =
        text(ud_pair.testbed.test_qp(&ud_pair.testbed.a, QpOptions::default()).qp.activate_ud(1));
    assert!(why.contains("access flags"), "{why}");
    let long = options().with_mtu(Mtu::new(1 << 20));
    let cq = &ud_pair.a.sends;
    let end = &ud_pair.testbed.a;
    let why = end.context.create_qp(&end.pd, cq, cq, long).unwrap_err().to_string();
    assert!(why.contains("the maximum of the link"), "{why}");
    ud_pair.check_traffic();
    ud_pair.testbed.check_traffic(&conn);
}

fn invalid_local_memory(fixture: &Fixture) {
    let ud_pair = UdPair::new(fixture);
    let valid = ud_pair.near.mr.sge(0, 8);
    for wrong in [
        Sge { lkey: valid.lkey ^ 0x100, ..valid },
        Sge { address: valid.address + (1 << 17), ..valid },
        Sge { len: 1 << 10, address: valid.address + (1 << 17) - 8, ..valid },
    ] {
        ud_pair.a.qp.post_send(&[ud_pair.request(1).with(&[wrong]), ud_pair.request(2)]).unwrap();
        ud_pair.testbed.failed(&ud_pair.a.sends, 1, Status::LocalProtection);
        ud_pair.testbed.failed(&ud_pair.a.sends, 2, Status::Flushed);
        ud_pair.restart();
    }
    // A receive with an invalid lkey fails its own queue pair: the sender is not at fault.
    let wrong = [Sge { len: 64, lkey: 0x7777_0000, ..ud_pair.far.mr.sge(0, 64) }];
    ud_pair.b.qp.post_receive(&[ReceiveRequest { id: 3, data: &wrong }]).unwrap();
    ud_pair.receive(4, 0, 64);
    ud_pair.a.qp.post_send(&[ud_pair.request(5)]).unwrap();
    ud_pair.testbed.done(&ud_pair.a.sends, 5);
    ud_pair.testbed.failed(&ud_pair.b.receives, 3, Status::LocalProtection);
    ud_pair.testbed.failed(&ud_pair.b.receives, 4, Status::Flushed);
    assert_eq!(ud_pair.b.qp.state().unwrap(), State::Err);
    reset(&ud_pair.b);
    ud_pair.check_traffic();
}

/// Writes a WQE directly into the send queue, as a stream or a kernel does.
pub(super) fn put(ud_pair: &UdPair, index: u16, entry: &[u8]) {
    let (memory, layout) = ud_pair.a.qp.queues().unwrap();
    let at = u64::from(index) * 64;
    memory.bytes().write(layout.send + at, entry).unwrap();
    let word = u32::from_ne_bytes(DoorbellRecord::word(index + entry.len().div_ceil(64) as u16));
    memory.bytes().store_u32(layout.dbrec + DoorbellRecord::SEND as u64, word).unwrap();
    ud_pair.testbed.a.context.soft().unwrap().ring(ud_pair.a.qp.number());
}

/// A WQE may contain any address; only those with an address handle are sent to.
fn wqes_without_an_address_handle(fixture: &Fixture) {
    let ud_pair = UdPair::new(fixture);
    let (mut scratch, mut index) = (Scratch::default(), 0u16);
    let mut entry = |peer: &str, index: u16| {
        let to = AddressVector::new(peer.parse().unwrap(), ud_pair.b.qp.number(), QKEY);
        let number = ud_pair.a.qp.number();
        let entry = Builder::new(&mut scratch, WqeOpcode::Send, index, number).signaled();
        entry.address(&to).inline(b"by hand").finish().unwrap().bytes().to_vec()
    };
    ud_pair.receive(1, 0, 64);
    let valid = entry(&address(&ud_pair.testbed.b).to_string(), index);
    put(&ud_pair, index, &valid);
    index += valid.len().div_ceil(64) as u16;
    ud_pair.testbed.done(&ud_pair.b.receives, 1);
    assert!(ud_pair.testbed.next(&ud_pair.a.sends).is_success());
    same(&ud_pair.far.read(GRH.into(), 7), b"by hand", "a datagram from a handwritten WQE");
    for peer in ["10.0.0.3:4791", "10.0.0.2:4792", "[2001:db8::1]:4791", "0.0.0.0:0"] {
        let entry = entry(peer, index);
        put(&ud_pair, index, &entry);
        index += entry.len().div_ceil(64) as u16;
        let status = ud_pair.testbed.next(&ud_pair.a.sends).status;
        assert_eq!(status, Status::LocalQpOperation, "{peer}");
        ud_pair.a.qp.modify(&QpAttributes::new(State::Rts)).unwrap();
    }
    // Nor to an address whose last handle was dropped.
    let ud_pair = UdPair::new(fixture);
    ud_pair.receive(1, 0, 64);
    ud_pair.a.qp.post_send(&[ud_pair.request(2)]).unwrap();
    let UdPair { testbed, a, b, to_b, .. } = &ud_pair;
    let again = testbed.a.context.create_address_handle(to_b.peer()).unwrap();
    let second = again.clone();
    drop(again);
    testbed.done(&a.sends, 2);
    testbed.done(&b.receives, 1);
    let UdPair { testbed, a, b, to_b, .. } = ud_pair;
    a.qp.post_send(&[SendRequest::new(3, WrOp::Send).to(&second, b.qp.number(), QKEY)]).unwrap();
    drop((to_b, second));
    testbed.failed(&a.sends, 3, Status::LocalQpOperation);
}

fn a_failure_flushes(fixture: &Fixture) {
    let ud_pair = UdPair::new(fixture);
    ud_pair.receive(1, 0, 64);
    ud_pair.receive(2, 0, 64);
    ud_pair.b.qp.modify(&QpAttributes::new(State::Err)).unwrap();
    ud_pair.testbed.failed(&ud_pair.b.receives, 1, Status::Flushed);
    ud_pair.testbed.failed(&ud_pair.b.receives, 2, Status::Flushed);
    ud_pair.b.qp.post_send(&[SendRequest::new(3, WrOp::Nop)]).unwrap();
    ud_pair.testbed.failed(&ud_pair.b.sends, 3, Status::Flushed);
    ud_pair.a.qp.post_send(&[ud_pair.request(4)]).unwrap();
    ud_pair.testbed.done(&ud_pair.a.sends, 4);
    ud_pair.testbed.until("a datagram dropped by the state", || ud_pair.dropped("state") == 1);
    reset(&ud_pair.b);
    ud_pair.check_traffic();
}

fn waits_and_nops_in_order(fixture: &Fixture) {
    let ud_pair = UdPair::new(fixture);
    let end = &ud_pair.testbed.a;
    let other = end.context.create_cq(16).unwrap();
    let gate = end.context.create_qp(&end.pd, &other, &other, options()).unwrap();
    gate.activate_ud(QKEY).unwrap();
    ud_pair.receive(1, 0, 64);
    let wait = SendRequest::new(3, WrOp::Wait { cqn: other.number(), index: 0 });
    let read = [ud_pair.near.mr.sge(0, 8)];
    let dump = SendRequest::new(4, WrOp::Dump).with(&read);
    let send = ud_pair.request(5).unsignaled();
    let batch = [SendRequest::new(2, WrOp::Nop), wait, dump, send, SendRequest::new(6, WrOp::Nop)];
    ud_pair.a.qp.post_send(&batch).unwrap();
    ud_pair.testbed.done(&ud_pair.a.sends, 2);
    ud_pair.testbed.expect_no_completion(&ud_pair.b.receives);
    gate.post_send(&[SendRequest::new(9, WrOp::Nop)]).unwrap();
    for id in 3..=6 {
        ud_pair.testbed.done(&ud_pair.a.sends, id); // signal_all is the default
    }
    ud_pair.testbed.done(&ud_pair.b.receives, 1);
}

/// State transitions of a UD queue pair, and draining.
fn states_of_a_datagram_queue_pair(fixture: &Fixture) {
    let ud_pair = UdPair::new(fixture);
    let fresh = ud_pair.testbed.test_qp(&ud_pair.testbed.a, options());
    let refused = fresh.qp.post_send(&[ud_pair.request(1)]).unwrap_err().to_string();
    assert!(refused.contains("RESET"), "{refused}");
    for step in [fresh.qp.init_attr(), QpAttributes::new(State::Rtr), QpAttributes::new(State::Sqe)]
    {
        fresh.qp.modify(&step).unwrap_err();
        assert_eq!(fresh.qp.state().unwrap(), State::Reset);
    }
    assert_eq!(fresh.qp.service(), Service::Ud);
    ud_pair.testbed.a.async_events();
    let stop = QpAttributes::new(State::Sqd).with_notify_drained(true);
    ud_pair.a.qp.modify(&stop).unwrap();
    ud_pair.receive(1, 0, 64);
    ud_pair.a.qp.post_send(&[ud_pair.request(2)]).unwrap();
    ud_pair.testbed.expect_no_completion(&ud_pair.a.sends);
    let drained = [AsyncEvent::Drained { qpn: ud_pair.a.qp.number() }];
    assert_eq!(ud_pair.testbed.a.async_events(), drained);
    ud_pair.a.qp.modify(&QpAttributes::new(State::Rts)).unwrap();
    ud_pair.testbed.done(&ud_pair.a.sends, 2);
    ud_pair.testbed.done(&ud_pair.b.receives, 1);
    reset(&ud_pair.a);
    ud_pair.check_traffic();
}
