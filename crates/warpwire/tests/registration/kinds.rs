//! Work requests read and write every kind of memory, at unaligned offsets and nothing outside.

use warpwire::error::Kind;
use warpwire::mr::{AccessPath, RegisteredBy};
use warpwire::verbs::{
    Access, Atomic, QpOptions, ReceiveRequest, Remote, SendRequest, Status, WrOp,
};

use crate::registration::harness::{Buffer, Harness, MEM_KINDS, MemKind, refused};
use crate::verbs::fixture::{QpPair, TestLink, Testbed, same};
use testkit::cases;

cases!(Harness; CASES:
    every_memory_kind_is_read_and_written,
    every_memory_kind_reports_its_path,
    a_chosen_iova_is_used_by_work_requests,
    rights_not_granted_bad_flow,
    ranges_outside_bad_flow,
    invalid_access_flags_bad_flow,
    another_protection_domain_bad_flow,
);

const LEN: u64 = 40_000;
/// Offsets of the buffers from a page boundary, in bytes.
const SKEWS: [u64; 4] = [0, 1, 4093, 2056];

/// A write, a read, a message and, where the memory supports it, an atomic; checks every byte.
pub fn exchange(testbed: &Testbed, conn: &QpPair, near: &Buffer, far: &Buffer, seed: u64) {
    let what = format!("{:?} with {:?}", near.mem_kind, far.mem_kind);
    let len = 17_003usize;
    let wanted = near.pattern(3, len, seed);
    far.write(5, &vec![0; len]);
    far.write(20_001, &vec![0; len]);
    let (from, back) = ([near.mr().sge(3, len as u32)], [near.mr().sge(20_007, len as u32)]);
    let into = [far.mr().sge(20_001, len as u32)];
    conn.b.qp.post_receive(&[ReceiveRequest { id: 9, data: &into }]).unwrap();
    conn.a
        .qp
        .post_send(&[
            SendRequest::new(1, WrOp::Write(far.mr().remote(5))).with(&from),
            SendRequest::new(2, WrOp::Read(far.mr().remote(5))).with(&back),
            SendRequest::new(3, WrOp::Send).with(&from),
        ])
        .unwrap();
    (1..=3).for_each(|id| {
        let done = testbed.next(&conn.a.sends);
        let [ours, theirs] = [near, far].map(|end| (end.mr().faults(), end.mr().failure()));
        let why = testbed.b.context.soft().unwrap().qp_denied(conn.b.qp.number());
        let context_text = format!("{what}: {ours:?} {theirs:?}, responder denied: {why:?}");
        assert_eq!((done.id, done.status), (id, Status::Success), "{context_text}");
    });
    testbed.done(&conn.b.receives, 9);
    same(&far.read(5, len), &wanted, &format!("a write: {what}"));
    same(&near.read(20_007, len), &wanted, &format!("a read: {what}"));
    same(&far.read(20_001, len), &wanted, &format!("a message: {what}"));
    if far.mem_kind.has_atomics() {
        let at = (8 - far.start % 8) % 8 + 39_000;
        far.write(at, &seed.to_ne_bytes());
        let word = [near.mr().sge(39_500, 8)];
        let add = WrOp::Atomic(far.mr().remote(at), Atomic::FetchAdd { add: 5 });
        conn.a.qp.post_send(&[SendRequest::new(4, add).with(&word)]).unwrap();
        testbed.done(&conn.a.sends, 4);
        assert_eq!((near.word(39_500), far.word(at)), (seed, seed.wrapping_add(5)), "{what}");
    }
    near.check_guards();
    far.check_guards();
}

fn every_memory_kind_is_read_and_written(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    for (n, near) in MEM_KINDS.into_iter().enumerate() {
        for (m, far) in MEM_KINDS.into_iter().enumerate() {
            // Over slower links, each kind is paired only with itself and one other.
            if harness.fixture.test_link != TestLink::Loopback
                && (n + m) % MEM_KINDS.len() > 1
                && n != m
            {
                continue;
            }
            let near = Buffer::new(harness, &testbed.a, near, LEN, SKEWS[m % 4]);
            let far = Buffer::new(harness, &testbed.b, far, LEN, SKEWS[n % 4]);
            exchange(&testbed, &conn, &near, &far, (n * 100 + m) as u64);
        }
    }
}

fn every_memory_kind_reports_its_path(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    for mem_kind in MEM_KINDS {
        let buffer = Buffer::new(harness, &testbed.a, mem_kind, 4096, 0);
        let mr = buffer.mr();
        let is_window = matches!(mr.path(), AccessPath::Window(_));
        match mem_kind {
            MemKind::HostHandle => assert_eq!(
                (mr.path(), mr.registered_by()),
                (AccessPath::Host, &RegisteredBy::Handle)
            ),
            MemKind::HostAddress | MemKind::Anonymous => {
                assert_eq!((mr.path(), mr.client()), (AccessPath::Host, Some("host")));
                assert_eq!(mr.iova() % 4096, 0);
            }
            MemKind::HostOnDemand | MemKind::AnonymousOnDemand => {
                assert_eq!((mr.path(), mr.client()), (AccessPath::OnDemand, Some("host")));
            }
            MemKind::Memfd => assert_eq!(mr.path(), AccessPath::DmaBuf),
            MemKind::DeviceEngine => {
                assert!(matches!(mr.path(), AccessPath::Engine | AccessPath::Staged))
            }
            MemKind::DeviceAddress | MemKind::DeviceAddressOnDemand => {
                assert_eq!(mr.client(), Some(harness.gpu().info().backend.to_string().as_str()));
                assert_eq!(mr.iova(), buffer.allocation().address().raw() + buffer.start);
            }
            MemKind::DmaBufStatic => assert_eq!(mr.registered_by().to_string(), "dma-buf (pinned)"),
            MemKind::DmaBufDynamic => {
                assert_eq!(mr.registered_by().to_string(), "dma-buf (may move)")
            }
            MemKind::Pinned => assert_eq!(mr.path(), AccessPath::Host),
            MemKind::Device | MemKind::DeviceOnDemand => {
                assert_eq!(mr.registered_by(), &RegisteredBy::Handle)
            }
        }
        if mem_kind.is_device() && mem_kind != MemKind::DeviceEngine {
            assert!(is_window || !mr.why().is_empty(), "{mem_kind:?}: no window and no reason");
        }
    }
}

fn a_chosen_iova_is_used_by_work_requests(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 4096, 0);
    let far = Buffer::new(harness, &testbed.b, MemKind::DeviceAddress, 4096, 100);
    let (end, access) = (&testbed.b, Access::ALL);
    let address = far.allocation().address().raw() + far.start;
    let chosen = 0xffff_ffff_0000_0007;
    // SAFETY: the buffer outlives both registrations.
    let at = unsafe { end.context.register_address(&end.pd, address, 4096, Some(chosen), access) };
    let zero = access | Access::ZERO_BASED;
    // SAFETY: as above.
    let based = unsafe { end.context.register_address(&end.pd, address, 4096, None, zero) };
    let (at, based) = (at.unwrap(), based.unwrap());
    assert_eq!((at.iova(), based.iova()), (chosen, 0));
    let wanted = near.pattern(0, 100, 3);
    let from = [near.mr().sge(0, 100)];
    for (n, (mr, address)) in [(&at, chosen + 11), (&based, 500)].into_iter().enumerate() {
        let remote = Remote { address, rkey: mr.rkey() };
        conn.a.qp.post_send(&[SendRequest::new(1, WrOp::Write(remote)).with(&from)]).unwrap();
        testbed.done(&conn.a.sends, 1);
        same(&far.read([11, 500][n], 100), &wanted, "a write to a chosen iova");
    }
    // A chosen iova and zero-based contradict each other, for every kind of registration.
    // SAFETY: as above.
    let both = unsafe { end.context.register_address(&end.pd, address, 4096, Some(8), zero) };
    refused(both, &["zero-based"]);
    let region = far.allocation().region(far.start, 4096).unwrap();
    refused(end.context.register_at(&end.pd, region, Some(8), zero), &["zero-based"]);
    far.check_guards();
}

/// Access without the right fails the work on the correct side, for every kind of memory.
fn rights_not_granted_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 4096, 0);
    let from = [near.mr().sge(0, 64)];
    for mem_kind in MEM_KINDS {
        let only = |access| Buffer::with(harness, &testbed.b, mem_kind, 4096, 0, access).unwrap();
        let (none, read) = (only(Access::NONE), only(Access::REMOTE_READ));
        let write = only(Access::LOCAL_WRITE | Access::REMOTE_WRITE);
        let atomic = Atomic::FetchAdd { add: 1 };
        for (far, op) in [
            (&none, WrOp::Write(none.mr().remote(0))),
            (&none, WrOp::Read(none.mr().remote(0))),
            (&read, WrOp::Write(read.mr().remote(0))),
            (&read, WrOp::Atomic(read.mr().remote(0), atomic)),
            (&write, WrOp::Read(write.mr().remote(0))),
            (&write, WrOp::Atomic(write.mr().remote(0), atomic)),
        ] {
            let conn = testbed.join(QpOptions::default());
            let data = if matches!(op, WrOp::Atomic(..)) { [near.mr().sge(0, 8)] } else { from };
            conn.a.qp.post_send(&[SendRequest::new(1, op).with(&data)]).unwrap();
            testbed.failed(&conn.a.sends, 1, Status::RemoteAccess);
            assert_eq!(far.read(0, 4096), vec![0; 4096], "{mem_kind:?} {op:?}");
        }
        // A receive buffer needs local-write; the receiver gets the protection error.
        let conn = testbed.join(QpOptions::default());
        let into = [read.mr().sge(0, 64)];
        conn.b.qp.post_receive(&[ReceiveRequest { id: 2, data: &into }]).unwrap();
        conn.a.qp.post_send(&[SendRequest::new(1, WrOp::Send).with(&from)]).unwrap();
        testbed.failed(&conn.a.sends, 1, Status::RemoteOperation);
        testbed.failed(&conn.b.receives, 2, Status::LocalProtection);
    }
}

fn ranges_outside_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 8192, 0);
    for mem_kind in MEM_KINDS {
        let far = Buffer::new(harness, &testbed.b, mem_kind, 5000, 9);
        let mr = far.mr();
        let beyond = [
            (mr.remote(4999), 2),
            (mr.remote(5000), 1),
            (mr.remote(0), 5001),
            (mr.remote(u64::MAX), 1),
            (mr.remote(u64::MAX), 2),
            (Remote { address: u64::MAX, rkey: mr.rkey() }, 3),
            (Remote { rkey: mr.rkey() ^ 1, ..mr.remote(0) }, 1),
            (Remote { rkey: mr.rkey().wrapping_add(0x100), ..mr.remote(0) }, 1),
        ];
        for (at, len) in beyond {
            for op in [WrOp::Write(at), WrOp::Read(at)] {
                let conn = testbed.join(QpOptions::default());
                let data = [near.mr().sge(0, len)];
                conn.a.qp.post_send(&[SendRequest::new(1, op).with(&data)]).unwrap();
                testbed.failed(&conn.a.sends, 1, Status::RemoteAccess);
            }
        }
        // The last byte is inside.
        let conn = testbed.join(QpOptions::default());
        let data = [near.mr().sge(0, 1)];
        let last = SendRequest::new(1, WrOp::Write(mr.remote(4999))).with(&data);
        conn.a.qp.post_send(&[last]).unwrap();
        testbed.done(&conn.a.sends, 1);
        far.check_guards();
        // The same on the requester's side: a local protection error.
        let own = Buffer::new(harness, &testbed.a, mem_kind, 5000, 9);
        let target = Buffer::new(harness, &testbed.b, MemKind::HostHandle, 8192, 0);
        for (offset, len) in [(4999, 2), (5000, 1), (u64::MAX, 2)] {
            let conn = testbed.join(QpOptions::default());
            let data = [own.mr().sge(offset, len)];
            let write = SendRequest::new(1, WrOp::Write(target.mr().remote(0))).with(&data);
            conn.a.qp.post_send(&[write]).unwrap();
            testbed.failed(&conn.a.sends, 1, Status::LocalProtection);
            assert_eq!(target.read(0, 16), [0; 16]);
        }
    }
}

fn invalid_access_flags_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let sums = [
        Access::REMOTE_WRITE,
        Access::REMOTE_ATOMIC,
        Access::REMOTE_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
    ];
    for mem_kind in MEM_KINDS {
        for access in sums {
            let made = Buffer::with(harness, &testbed.a, mem_kind, 4096, 0, access);
            let error = refused(made.map(drop), &["local-write"]);
            assert_eq!(error.kind(), &Kind::InvalidArgument);
        }
        let more = match mem_kind {
            MemKind::Memfd | MemKind::DmaBufStatic | MemKind::DmaBufDynamic => {
                Some([mem_kind.all() | Access::ZERO_BASED, mem_kind.all() | Access::ON_DEMAND])
            }
            MemKind::HostOnDemand | MemKind::AnonymousOnDemand => Some([Access::ALL; 2]),
            _ => None,
        };
        for access in more.into_iter().flatten() {
            let made = Buffer::with(harness, &testbed.a, mem_kind, 4096, 0, access);
            refused(made.map(drop), &["register"]);
        }
        assert!(
            testbed.a.context.registry().unwrap().is_empty(),
            "{mem_kind:?} left a registration"
        );
    }
}

fn another_protection_domain_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 4096, 0);
    let foreign = crate::verbs::fixture::Endpoint {
        context: testbed.b.context.clone(),
        pd: testbed.b.context.alloc_pd(),
    };
    for mem_kind in MEM_KINDS {
        let far = Buffer::new(harness, &foreign, mem_kind, 4096, 0);
        let data = [near.mr().sge(0, 64)];
        for op in [WrOp::Write(far.mr().remote(0)), WrOp::Read(far.mr().remote(0))] {
            let conn = testbed.join(QpOptions::default());
            conn.a.qp.post_send(&[SendRequest::new(1, op).with(&data)]).unwrap();
            testbed.failed(&conn.a.sends, 1, Status::RemoteAccess);
        }
        let conn = testbed.join(QpOptions::default());
        let into = [far.mr().sge(0, 64)];
        conn.b.qp.post_receive(&[ReceiveRequest { id: 2, data: &into }]).unwrap();
        conn.a.qp.post_send(&[SendRequest::new(1, WrOp::Send).with(&data)]).unwrap();
        testbed.failed(&conn.b.receives, 2, Status::LocalProtection);
        assert_eq!(far.read(0, 64), [0; 64], "{mem_kind:?}");
    }
}
