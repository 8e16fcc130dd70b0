//! Memory windows: keys for parts of a region, bound and invalidated by work requests.

use warpwire::verbs::{
    Access, CompletionKind, Fence, MwBind, MwType, Qp, QpOptions, ReceiveRequest, Remote,
    SendRequest, Service, State, Status, WqeOpcode, WrOp, next_rkey,
};

use crate::verbs::fixture::{ALL, Fixture, KINDS, Kind, QpPair, TestBuffer, Testbed, same};
use testkit::cases;

cases!(Fixture; CASES:
    windows_of_every_memory,
    a_peer_invalidates_a_window,
    windows_of_unreliable_connections,
);
cases!(Fixture; ONCE:
    binds_and_invalidations_in_order,
    binds_that_fail,
    windows_of_other_queue_pairs,
    a_window_is_deallocated,
);

const LEN: u64 = 1 << 16;

/// Two connected queue pairs; the second one's memory permits windows.
struct MwPair {
    testbed: Testbed,
    conn: QpPair,
    near: TestBuffer,
    far: TestBuffer,
}

impl MwPair {
    fn new(fixture: &Fixture, kind: Kind) -> Self {
        Self::with(fixture, kind, QpOptions::default())
    }

    fn with(fixture: &Fixture, kind: Kind, options: QpOptions) -> Self {
        let testbed = fixture.testbed();
        let conn = testbed.join(options);
        let near = fixture.memory(&testbed.a, kind, LEN, ALL);
        // Peers have no right to the region itself.
        let far = fixture.memory(&testbed.b, kind, LEN, Access::LOCAL_WRITE | Access::MW_BIND);
        Self { testbed, conn, near, far }
    }

    /// Bytes 4096 to 8191, for all that peers can do.
    fn request(&self, kind: MwType, rkey: u32) -> MwBind {
        let (lkey, address) = (self.far.mr.lkey(), self.far.mr.iova() + 4096);
        MwBind { kind, rkey, lkey, address, len: 4096, access: ALL }
    }

    /// Work of the second queue pair on its keys.
    fn change(&self, op: WrOp) {
        self.conn.b.qp.post_send(&[SendRequest::new(50, op)]).unwrap();
        let done = self.testbed.done(&self.conn.b.sends, 50);
        let opcode = match op {
            WrOp::BindMw(_) => WqeOpcode::BindMw,
            _ => WqeOpcode::LocalInvalidate,
        };
        assert_eq!(done.kind, CompletionKind::Send(opcode));
    }

    fn start(&self, op: WrOp, len: u32) {
        let data = [self.near.mr.sge(0, len)];
        self.conn.a.qp.post_send(&[SendRequest::new(60, op).with(&data)]).unwrap();
    }

    /// A write of the first queue pair that is refused; it, and its peer, fail.
    fn expect_denied(self, to: Remote) {
        self.start(WrOp::Write(to), 8);
        self.testbed.failed(&self.conn.a.sends, 60, Status::RemoteAccess);
        same(&self.far.read(0, 4096), &[0; 4096], "bytes before the window");
    }

    fn at(&self, bind: &MwBind, offset: u64) -> Remote {
        Remote { address: bind.address + offset, rkey: bind.rkey }
    }
}

fn windows_of_every_memory(fixture: &Fixture) {
    for kind in KINDS {
        let pair = MwPair::new(fixture, kind);
        let window = pair.testbed.b.context.alloc_mw(&pair.testbed.b.pd, MwType::Type1).unwrap();
        let mut rkey = window.rkey();
        for zero_based in [false, true] {
            rkey = next_rkey(rkey);
            let mut bind = pair.request(MwType::Type1, rkey);
            let mut at = bind.address;
            if zero_based {
                bind.access |= Access::ZERO_BASED;
                at = 0;
            }
            pair.change(WrOp::BindMw(bind));
            assert_eq!(pair.far.mr.bound_windows(), 1);
            let bytes = pair.near.pattern(0, 4096, 7 + u64::from(zero_based));
            pair.start(WrOp::Write(Remote { address: at, rkey }), 4096);
            pair.testbed.done(&pair.conn.a.sends, 60);
            same(&pair.far.read(4096, 4096), &bytes, "written through a window");
            pair.near.write(0, &[0; 4096]);
            pair.start(WrOp::Read(Remote { address: at, rkey }), 4096);
            pair.testbed.done(&pair.conn.a.sends, 60);
            same(&pair.near.read(0, 4096), &bytes, "read through a window");
        }
        // The key before the last one is no longer valid.
        let old = Remote { address: pair.far.mr.iova() + 4096, rkey: next_rkey(window.rkey()) };
        pair.expect_denied(old);
    }
    let pair = MwPair::new(fixture, Kind::Host);
    let window = pair.testbed.b.context.alloc_mw(&pair.testbed.b.pd, MwType::Type1).unwrap();
    let bind = pair.request(MwType::Type1, next_rkey(window.rkey()));
    pair.change(WrOp::BindMw(bind));
    let past_the_end = pair.at(&bind, 4089);
    pair.expect_denied(past_the_end);
}

fn a_peer_invalidates_a_window(fixture: &Fixture) {
    let pair = MwPair::new(fixture, Kind::Host);
    let window = pair.testbed.b.context.alloc_mw(&pair.testbed.b.pd, MwType::Type2).unwrap();
    let mut bind = pair.request(MwType::Type2, window.rkey());
    for round in 0..3 {
        bind.rkey = next_rkey(bind.rkey);
        pair.change(WrOp::BindMw(bind));
        let bytes = pair.near.pattern(0, 64, round);
        pair.start(WrOp::Write(pair.at(&bind, 0)), 64);
        pair.testbed.done(&pair.conn.a.sends, 60);
        same(&pair.far.read(4096, 64), &bytes, "written through a window");
        pair.conn.b.qp.post_receive(&[ReceiveRequest { id: 70, data: &[] }]).unwrap();
        pair.start(WrOp::SendInvalidate(bind.rkey), 0);
        pair.testbed.done(&pair.conn.a.sends, 60);
        let got = pair.testbed.done(&pair.conn.b.receives, 70);
        assert_eq!(got.kind, CompletionKind::ReceiveInvalidate(bind.rkey));
        assert_eq!(pair.far.mr.bound_windows(), 0);
    }
    let invalid = pair.at(&bind, 0);
    pair.expect_denied(invalid);
}

/// A write through an invalid key is lost, not refused.
fn windows_of_unreliable_connections(fixture: &Fixture) {
    let options = QpOptions::default().with_service(Service::Uc);
    let pair = MwPair::with(fixture, Kind::Host, options);
    let window = pair.testbed.b.context.alloc_mw(&pair.testbed.b.pd, MwType::Type2).unwrap();
    let bind = pair.request(MwType::Type2, next_rkey(window.rkey()));
    pair.change(WrOp::BindMw(bind));
    pair.near.pattern(0, 64, 3);
    let transfer = |seed| {
        let bytes = pair.near.pattern(0, 64, seed);
        pair.conn.b.qp.post_receive(&[ReceiveRequest { id: 70, data: &[] }]).unwrap();
        pair.start(WrOp::Write(pair.at(&bind, 0)), 64);
        pair.testbed.done(&pair.conn.a.sends, 60);
        pair.start(WrOp::Send, 0); // shows that the write has been handled
        pair.testbed.done(&pair.conn.a.sends, 60);
        pair.testbed.done(&pair.conn.b.receives, 70);
        bytes
    };
    let bytes = transfer(1);
    same(&pair.far.read(4096, 64), &bytes, "written through a window");
    pair.change(WrOp::LocalInvalidate(bind.rkey));
    transfer(2);
    same(&pair.far.read(4096, 64), &bytes, "not written any more");
    assert_eq!(pair.conn.b.qp.state().unwrap(), State::Rts);
}

/// The peer learns the key from a message behind the bind, and the reply invalidates it.
fn binds_and_invalidations_in_order(fixture: &Fixture) {
    let pair = MwPair::new(fixture, Kind::Host);
    let window = pair.testbed.b.context.alloc_mw(&pair.testbed.b.pd, MwType::Type2).unwrap();
    let mut bind = pair.request(MwType::Type2, window.rkey());
    for seed in 0..20 {
        bind.rkey = next_rkey(bind.rkey);
        let into = [pair.near.mr.sge(8192, 8)];
        pair.conn.a.qp.post_receive(&[ReceiveRequest { id: 80, data: &into }]).unwrap();
        let key = u64::from(bind.rkey).to_ne_bytes();
        pair.conn
            .b
            .qp
            .post_send(&[
                SendRequest::new(1, WrOp::BindMw(bind)).unsignaled(),
                SendRequest::new(2, WrOp::Send).inline(&key),
            ])
            .unwrap();
        pair.testbed.done(&pair.conn.a.receives, 80);
        let rkey = pair.near.word(8192) as u32;
        assert_eq!(rkey, bind.rkey);
        let bytes = pair.near.pattern(0, 256, seed);
        pair.start(WrOp::Write(Remote { address: bind.address, rkey }), 256);
        pair.testbed.done(&pair.conn.a.sends, 60);
        same(&pair.far.read(4096, 256), &bytes, "written through a window");
        // signal_all is the default: the bind completes, too.
        pair.testbed.done(&pair.conn.b.sends, 1);
        pair.testbed.done(&pair.conn.b.sends, 2);
        // Invalidated and bound again in one batch, behind a fence.
        let again = MwBind { rkey: next_rkey(bind.rkey), ..bind };
        let invalidate = SendRequest::new(3, WrOp::LocalInvalidate(bind.rkey)).fenced(Fence::Reads);
        let rebind = SendRequest::new(4, WrOp::BindMw(again));
        let last = SendRequest::new(5, WrOp::LocalInvalidate(again.rkey));
        pair.conn.b.qp.post_send(&[invalidate, rebind, last]).unwrap();
        for id in 3..=5 {
            pair.testbed.done(&pair.conn.b.sends, id);
        }
        bind = again;
    }
    assert_eq!(pair.far.mr.bound_windows(), 0);
}

fn binds_that_fail(fixture: &Fixture) {
    let outcome = |change: &dyn Fn(&MwPair, &mut MwBind)| {
        let pair = MwPair::new(fixture, Kind::Host);
        let window = pair.testbed.b.context.alloc_mw(&pair.testbed.b.pd, MwType::Type2).unwrap();
        let mut bind = pair.request(MwType::Type2, next_rkey(window.rkey()));
        change(&pair, &mut bind);
        let [bind, after] =
            [SendRequest::new(1, WrOp::BindMw(bind)), SendRequest::new(2, WrOp::Nop)];
        pair.conn.b.qp.post_send(&[bind, after]).unwrap();
        pair.testbed.failed(&pair.conn.b.sends, 1, Status::MwBind);
        pair.testbed.failed(&pair.conn.b.sends, 2, Status::Flushed);
        assert_eq!(pair.conn.b.qp.state().unwrap(), State::Err);
        assert_eq!(pair.far.mr.bound_windows(), 0);
    };
    outcome(&|_, bind| bind.len = LEN);
    outcome(&|_, bind| bind.len = 0);
    outcome(&|_, bind| bind.kind = MwType::Type1);
    outcome(&|_, bind| bind.lkey ^= 0x100);
    outcome(&|pair, bind| bind.rkey = pair.far.mr.rkey());
    let pair = MwPair::new(fixture, Kind::Host);
    for key in [0x7777_0000, pair.far.mr.rkey()] {
        let pair = MwPair::new(fixture, Kind::Host);
        let invalidate = SendRequest::new(1, WrOp::LocalInvalidate(key));
        pair.conn.b.qp.post_send(&[invalidate]).unwrap();
        pair.testbed.failed(&pair.conn.b.sends, 1, Status::LocalQpOperation);
    }
    // Datagrams have no windows.
    let ud = pair.testbed.test_qp(&pair.testbed.b, QpOptions::default().with_service(Service::Ud));
    ud.qp.activate_ud(1).unwrap();
    let bind = pair.request(MwType::Type1, 0x100);
    ud.qp.post_send(&[SendRequest::new(1, WrOp::BindMw(bind))]).unwrap();
    pair.testbed.failed(&ud.sends, 1, Status::LocalQpOperation);
}

fn windows_of_other_queue_pairs(fixture: &Fixture) {
    let pair = MwPair::new(fixture, Kind::Host);
    let second = pair.testbed.join(QpOptions::default());
    let context = &pair.testbed.b.context;
    let [one, two] = [MwType::Type1, MwType::Type2]
        .map(|kind| context.alloc_mw(&pair.testbed.b.pd, kind).unwrap());
    let binds = [&one, &two].map(|window| pair.request(window.kind(), next_rkey(window.rkey())));
    binds.iter().for_each(|bind| pair.change(WrOp::BindMw(*bind)));
    assert_eq!(pair.far.mr.bound_windows(), 2);
    let data = [pair.near.mr.sge(0, 8)];
    let write = |qp: &Qp, bind: &MwBind| {
        let to = pair.at(bind, 0);
        qp.post_send(&[SendRequest::new(1, WrOp::Write(to)).with(&data)]).unwrap();
    };
    write(&second.a.qp, &binds[0]);
    pair.testbed.done(&second.a.sends, 1);
    write(&second.a.qp, &binds[1]);
    pair.testbed.failed(&second.a.sends, 1, Status::RemoteAccess);
}

fn a_window_is_deallocated(fixture: &Fixture) {
    let pair = MwPair::new(fixture, Kind::Host);
    let window = pair.testbed.b.context.alloc_mw(&pair.testbed.b.pd, MwType::Type2).unwrap();
    let bind = pair.request(MwType::Type2, next_rkey(window.rkey()));
    pair.change(WrOp::BindMw(bind));
    drop(window);
    assert_eq!(pair.far.mr.bound_windows(), 0);
    let gone = pair.at(&bind, 0);
    pair.expect_denied(gone);
}
