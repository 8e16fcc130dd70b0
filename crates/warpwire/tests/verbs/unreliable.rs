//! Unreliable connections: messages arrive whole or not at all, and nobody is told of those that
//! are lost.

use warpwire::verbs::{
    Access, Atomic, Completion, CompletionKind, ProgressMode, QpAttributes, QpOptions,
    ReceiveRequest, Remote, SendRequest, Service, Sge, SrqOptions, State, Status, WrOp,
};

use crate::verbs::fixture::{
    ALL, Fixture, KINDS, Kind, QpPair, SHORT_WAIT, TestBuffer, Testbed, connect, same, test_timeout,
};
use testkit::cases;

cases!(Fixture; CASES:
    sends_and_writes_of_every_length,
    messages_without_receive_or_right_are_lost,
    messages_over_a_bad_network,
    a_peer_that_does_not_drain,
);
cases!(Fixture; ONCE:
    operations_of_reliable_connections,
    invalid_local_memory_of_unreliable_work,
    a_shared_receive_queue_of_unreliable_connections,
);

const LEN: u64 = 1 << 17;

fn options() -> QpOptions {
    QpOptions::default().with_service(Service::Uc)
}

/// Two connected queue pairs, and a buffer for each.
struct UcPair {
    testbed: Testbed,
    conn: QpPair,
    near: TestBuffer,
    far: TestBuffer,
}

impl UcPair {
    fn new(fixture: &Fixture, kind: Kind) -> Self {
        Self::with(fixture, fixture.testbed(), kind, options())
    }

    fn with(fixture: &Fixture, testbed: Testbed, kind: Kind, b: QpOptions) -> Self {
        let conn = testbed.join_with(options(), b);
        let [near, far] = [&testbed.a, &testbed.b].map(|end| fixture.memory(end, kind, LEN, ALL));
        Self { testbed, conn, near, far }
    }

    fn receive(&self, id: u64, offset: u64, len: u32) {
        let data = [self.far.mr.sge(offset, len)];
        self.conn.b.qp.post_receive(&[ReceiveRequest { id, data: &data }]).unwrap();
    }

    fn send(&self, id: u64, op: WrOp, len: u32) {
        let data = [self.near.mr.sge(0, len)];
        self.conn.a.qp.post_send(&[SendRequest::new(id, op).with(&data)]).unwrap();
        self.testbed.done(&self.conn.a.sends, id);
    }

    fn dropped(&self, reason: &str) -> u64 {
        let discarded = self.testbed.b.context.stats().unwrap().discarded;
        discarded.iter().find(|(name, _)| *name == reason).unwrap().1
    }
}

fn sends_and_writes_of_every_length(fixture: &Fixture) {
    for kind in KINDS {
        let pair = UcPair::new(fixture, kind);
        assert_eq!(pair.conn.a.qp.service(), Service::Uc);
        let mtu = pair.conn.a.qp.endpoint().mtu;
        for (seed, len) in [0, 1, 63, mtu, mtu + 1, 3 * mtu + 5].into_iter().enumerate() {
            let len = len.min(LEN as u32 / 2);
            let bytes = pair.near.pattern(0, len as usize, seed as u64);
            let half = LEN / 2;
            let imm = [1, 2, 3, seed as u8];
            let far = pair.far.mr.remote(half);
            for op in [WrOp::Send, WrOp::SendImm(imm), WrOp::WriteImm(far, imm), WrOp::Write(far)] {
                pair.far.write(0, &vec![0xee; LEN as usize]);
                pair.receive(1, 0, len);
                pair.send(2, op, len);
                if let WrOp::Write(_) = op {
                    // The message behind it shows that it has arrived.
                    pair.send(3, WrOp::Send, 0);
                }
                let done = pair.testbed.done(&pair.conn.b.receives, 1);
                let (expected_kind, at, expected_len) = match op {
                    WrOp::Send => (CompletionKind::Receive, 0, len),
                    WrOp::SendImm(_) => (CompletionKind::ReceiveImm(imm), 0, len),
                    WrOp::Write(_) => (CompletionKind::Receive, half, 0),
                    _ => (CompletionKind::WriteImm(imm), half, len),
                };
                assert_eq!((done.kind, done.len), (expected_kind, expected_len), "{op:?}");
                same(&pair.far.read(at, len as usize), &bytes, &format!("{kind:?} {op:?} {len}"));
            }
        }
        if let Ok(stats) = pair.conn.b.qp.stats() {
            assert_eq!(stats.drops.iter().sum::<u64>(), 0);
        }
    }
}

/// The sender's work succeeds, the receiver's queue pair stays as it is, and the next message
/// arrives.
fn messages_without_receive_or_right_are_lost(fixture: &Fixture) {
    let pair = UcPair::new(fixture, Kind::Host);
    let read_only = fixture.memory(&pair.testbed.b, Kind::Host, 4096, Access::REMOTE_READ);
    pair.send(1, WrOp::Send, 100);
    pair.testbed.until("a message without receive", || pair.dropped("no-receive") == 1);
    for (count, wrong) in [
        read_only.mr.remote(0),
        pair.far.mr.remote(LEN - 50),
        Remote { rkey: 0x7777_0000, ..pair.far.mr.remote(0) },
    ]
    .into_iter()
    .enumerate()
    {
        pair.send(2, WrOp::Write(wrong), 100);
        pair.testbed.until("a write without right", || pair.dropped("access") == count as u64 + 1);
    }
    same(&pair.far.read(LEN - 50, 50), &[0; 50], "nothing was written");
    // A message that is too long; the receive stays for the next.
    pair.receive(3, 0, 10);
    pair.send(4, WrOp::Send, 11);
    pair.testbed.until("a message that is too long", || pair.dropped("length") == 1);
    pair.send(5, WrOp::Send, 10);
    assert_eq!(pair.testbed.done(&pair.conn.b.receives, 3).len, 10);
    assert_eq!(pair.conn.b.qp.state().unwrap(), State::Rts);
    assert_eq!(pair.testbed.b.async_events(), []);
}

/// Whatever is lost, reordered and repeated: messages that arrive are whole.
fn messages_over_a_bad_network(fixture: &Fixture) {
    let plan = "loss=5%,dup=2%,reorder=2%,corrupt=2%";
    let testbed = fixture.faulty(plan, 7, ProgressMode::Manual);
    let pair = UcPair::with(fixture, testbed, Kind::Host, options());
    let len = 20_000_u32.min(4 * pair.conn.a.qp.endpoint().mtu);
    let mut arrived = 0;
    pair.receive(0, 0, len);
    for seed in 0..200_u64 {
        let bytes = pair.near.pattern(0, len as usize, seed);
        pair.near.write(0, &seed.to_ne_bytes());
        pair.send(seed, WrOp::Send, len);
        // Some messages are lost; duplicates of an earlier one may follow it.
        let micros = if arrived < 20 { 3000 } else { 300 };
        pair.testbed.poll_for(std::time::Duration::from_micros(micros));
        let mut got = [Completion::EMPTY];
        while pair.conn.b.receives.poll(&mut got).unwrap() == 1 {
            assert_eq!((got[0].status, got[0].len), (Status::Success, len));
            if pair.far.word(0) == seed {
                same(&pair.far.read(8, len as usize - 8), &bytes[8..], "a message");
                arrived += 1;
            }
            pair.receive(0, 0, len);
        }
    }
    assert!(arrived >= 20, "{arrived} of 200");
    assert_eq!(pair.conn.b.qp.state().unwrap(), State::Rts);
}

/// Work for a peer that takes nothing completes: there is no answer whose absence would fail it.
fn a_peer_that_does_not_drain(fixture: &Fixture) {
    let pair = UcPair::new(fixture, Kind::Host);
    let data = [pair.near.mr.sge(0, LEN as u32)];
    let write = WrOp::Write(pair.far.mr.remote(0));
    let hca = pair.testbed.a.context.soft().unwrap();
    let start = std::time::Instant::now();
    for id in 0..200 {
        pair.conn.a.qp.post_send(&[SendRequest::new(id, write).with(&data)]).unwrap();
        let mut done = [Completion::EMPTY];
        while pair.conn.a.sends.poll(&mut done).unwrap() == 0 {
            hca.poll().unwrap();
            assert!(start.elapsed() < test_timeout(), "work {id}");
        }
        assert_eq!((done[0].id, done[0].status), (id, Status::Success));
    }
    // The connection goes on when the peer drains again.
    pair.testbed.poll_for(SHORT_WAIT);
    pair.receive(1, 0, 8);
    pair.testbed.until("a message", || {
        pair.send(2, WrOp::Send, 8);
        let mut done = [Completion::EMPTY];
        pair.conn.b.receives.poll(&mut done).unwrap() == 1 && done[0].is_success()
    });
}

fn operations_of_reliable_connections(fixture: &Fixture) {
    let pair = UcPair::new(fixture, Kind::Host);
    let (at, data) = (pair.far.mr.remote(0), [pair.near.mr.sge(0, 8)]);
    for op in [
        WrOp::Read(at),
        WrOp::Atomic(at, Atomic::FetchAdd { add: 1 }),
        WrOp::SendInvalidate(pair.far.mr.rkey()),
    ] {
        let requests = [SendRequest::new(1, op).with(&data), SendRequest::new(2, WrOp::Send)];
        pair.conn.a.qp.post_send(&requests).unwrap();
        pair.testbed.failed(&pair.conn.a.sends, 1, Status::LocalQpOperation);
        pair.testbed.failed(&pair.conn.a.sends, 2, Status::Flushed);
        assert_eq!(pair.conn.a.qp.state().unwrap(), State::Sqe, "{op:?}");
        pair.conn.a.qp.modify(&QpAttributes::new(State::Rts)).unwrap();
        pair.testbed.check_traffic(&pair.conn);
    }
    // An RC queue pair has other attributes, and understands other packets.
    let wrong = pair.testbed.test_qp(&pair.testbed.a, options());
    wrong.qp.modify(&wrong.qp.init_attr()).unwrap();
    let peer = pair.conn.b.qp.endpoint();
    let rtr = wrong.qp.rtr_attr(&peer).unwrap();
    let refused = wrong.qp.modify(&rtr.with_max_dest_rd_atomic(1)).unwrap_err().to_string();
    assert!(refused.contains("the limit of the peer's reads and atomics"), "{refused}");
    let reliable = pair.testbed.test_qp(&pair.testbed.b, QpOptions::default());
    let mixed = pair.testbed.test_qp(&pair.testbed.a, options());
    connect(&mixed.qp, &reliable.qp);
    mixed.qp.post_send(&[SendRequest::new(1, WrOp::Send)]).unwrap();
    pair.testbed.done(&mixed.sends, 1);
    pair.testbed.until("a packet of another service", || {
        reliable.qp.stats().unwrap().drops.iter().sum::<u64>() > 0
    });
    assert_eq!(reliable.qp.state().unwrap(), State::Rts);
}

fn invalid_local_memory_of_unreliable_work(fixture: &Fixture) {
    let pair = UcPair::new(fixture, Kind::Host);
    let valid = pair.near.mr.sge(0, 8);
    for wrong in
        [Sge { lkey: valid.lkey ^ 0x100, ..valid }, Sge { address: valid.address + LEN, ..valid }]
    {
        pair.conn.a.qp.post_send(&[SendRequest::new(1, WrOp::Send).with(&[wrong])]).unwrap();
        pair.testbed.failed(&pair.conn.a.sends, 1, Status::LocalProtection);
        pair.conn.a.qp.modify(&QpAttributes::new(State::Rts)).unwrap();
    }
    let wrong = [Sge { lkey: 0x7777_0000, ..pair.far.mr.sge(0, 64) }];
    pair.conn.b.qp.post_receive(&[ReceiveRequest { id: 3, data: &wrong }]).unwrap();
    pair.receive(4, 0, 64);
    pair.send(5, WrOp::Send, 8);
    pair.testbed.failed(&pair.conn.b.receives, 3, Status::LocalProtection);
    pair.testbed.failed(&pair.conn.b.receives, 4, Status::Flushed);
    assert_eq!(pair.conn.b.qp.state().unwrap(), State::Err);
}

fn a_shared_receive_queue_of_unreliable_connections(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let srq = testbed.b.context.create_srq(&testbed.b.pd, SrqOptions::default()).unwrap();
    let pair = UcPair::with(fixture, testbed, Kind::Host, options().with_srq(srq.clone()));
    let data = [pair.far.mr.sge(0, 100)];
    srq.post_receive(&[ReceiveRequest { id: 9, data: &data }]).unwrap();
    let bytes = pair.near.pattern(0, 100, 3);
    pair.send(1, WrOp::Send, 100);
    assert_eq!(pair.testbed.done(&pair.conn.b.receives, 9).len, 100);
    same(&pair.far.read(0, 100), &bytes, "a message");
}
