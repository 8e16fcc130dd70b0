//! Staged device memory: an RDMA device that cannot access it uses pinned bounce buffers, and the
//! data must not differ.
//!
//! A software HCA at one end accesses the same memory with the copy engine, so the two paths are
//! compared.

use warpwire::error::Kind as ErrorKind;
use warpwire::mr::{AccessPath, MemorySource};
use warpwire::verbs::{
    Access, Atomic, CompletionKind, Fence, QpAttributes, QpOptions, ReceiveRequest, SendRequest,
    SrqOptions, State, Status, WrOp,
};

use crate::verbs::fixture::{Endpoint, Fixture, Kind, TestBuffer, connect, same};
use testkit::cases;

cases!(Fixture; CASES:
    staged_messages,
    staged_batches,
    staged_reads_and_atomics,
    staged_work_without_completions,
    staged_shared_receives,
    staged_memory_of_other_receives_is_unchanged,
    staged_work_that_fails,
    staged_memory_has_no_remote_access,
);

const LEN: u64 = 128 << 10;

/// Memory of the simulated GPU, without a window, with local access only.
fn memory(fixture: &Fixture, end: &Endpoint) -> TestBuffer {
    let buffer = fixture.memory(end, Kind::Engine, LEN, Access::LOCAL_WRITE);
    if end.is_device() {
        assert_eq!(buffer.mr.path(), AccessPath::Staged);
        let why = buffer.mr.why().join("; ");
        for part in ["no dma-buf: ", "no peer memory: ", "no window: ", "staged: no other path"] {
            assert!(why.contains(part), "{why}");
        }
    }
    buffer
}

/// Sends and receives of several ranges; memory beyond the message is not changed.
fn staged_messages(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let (near, far) = (memory(fixture, &testbed.a), memory(fixture, &testbed.b));
    for (id, len) in [1, 7, 2999, 3000, 3001, 8192, 70_000].into_iter().enumerate() {
        let id = id as u64;
        far.write(0, &vec![0xee; LEN as usize]);
        let sent = near.pattern(100, len, id);
        let into = [far.mr.sge(8, 3000), far.mr.sge(4096, 100_000)];
        conn.b.qp.post_receive(&[ReceiveRequest { id, data: &into }]).unwrap();
        let first = (len / 3) as u32;
        let from =
            [near.mr.sge(100, first), near.mr.sge(100 + u64::from(first), len as u32 - first)];
        conn.a.qp.post_send(&[SendRequest::new(id, WrOp::Send).with(&from)]).unwrap();
        testbed.done(&conn.a.sends, id);
        assert_eq!(testbed.done(&conn.b.receives, id).len as usize, len);
        let head = len.min(3000);
        same(&far.read(8, head), &sent[..head], "the first range");
        same(&far.read(4096, len - head), &sent[head..], "the second range");
        same(&far.read(4096 + (len - head) as u64, 500), &[0xee; 500], "bytes after the message");
    }
}

/// A batch sends the contents at the time it is posted, not pushed.
fn staged_batches(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let (near, far) = (memory(fixture, &testbed.a), fixture.host(&testbed.b, LEN));
    near.write(0, b"too early");
    let mut batch = conn.a.qp.batch().unwrap();
    let write = |id, at| SendRequest::new(id, WrOp::Write(far.mr.remote(at)));
    batch.push(&write(1, 0).with(&[near.mr.sge(0, 9)])).unwrap();
    batch.push(&write(2, 50).with(&[near.mr.sge(4, 5)])).unwrap();
    near.write(0, b"just now!");
    batch.post();
    testbed.done(&conn.a.sends, 1);
    testbed.done(&conn.a.sends, 2);
    same(&far.read(0, 9), b"just now!", "a write of a batch");
    same(&far.read(50, 5), b" now!", "the second write of a batch");
}

fn staged_reads_and_atomics(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let (near, far) = (memory(fixture, &testbed.a), fixture.host(&testbed.b, LEN));
    let wanted = far.pattern(0, 50_000, 3);
    let into = [near.mr.sge(0, 20_000), near.mr.sge(30_000, 30_000)];
    conn.a.qp.post_send(&[SendRequest::new(1, WrOp::Read(far.mr.remote(0))).with(&into)]).unwrap();
    testbed.done(&conn.a.sends, 1);
    same(&near.read(0, 20_000), &wanted[..20_000], "a read's first range");
    same(&near.read(30_000, 30_000), &wanted[20_000..], "a read's second range");
    far.write(64, &40u64.to_ne_bytes());
    let (add, swap) = (Atomic::FetchAdd { add: 2 }, Atomic::CompareSwap { compare: 42, swap: 7 });
    for (id, atomic, before) in [(2, add, 40), (3, swap, 42)] {
        let result = [near.mr.sge(8 * id, 8)];
        let request = SendRequest::new(id, WrOp::Atomic(far.mr.remote(64), atomic)).with(&result);
        conn.a.qp.post_send(&[request]).unwrap();
        testbed.done(&conn.a.sends, id);
        assert_eq!((near.word(8 * id), id), (before, id));
    }
    assert_eq!(far.word(64), 7);
}

/// A send fenced after a read sends what was read. An unsignaled read has finished when a later
/// signaled request completes.
fn staged_work_without_completions(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default().with_signal_all(false));
    let (near, far) = (memory(fixture, &testbed.a), fixture.host(&testbed.b, LEN));
    for round in 0..10 {
        let wanted = far.pattern(0, 9000, round);
        near.write(0, &[0; 12_000]);
        near.write(9000, b"and these");
        let data = [far.mr.sge(40_000, 10_000)];
        conn.b.qp.post_receive(&[ReceiveRequest { id: 1, data: &data }]).unwrap();
        let (into, from) = ([near.mr.sge(0, 9000)], [near.mr.sge(0, 9009)]);
        let read = SendRequest::new(2, WrOp::Read(far.mr.remote(0))).with(&into).unsignaled();
        let send =
            SendRequest { fence: Fence::Reads, ..SendRequest::new(3, WrOp::Send).with(&from) };
        conn.a.qp.post_send(&[read, send]).unwrap();
        testbed.done(&conn.a.sends, 3);
        testbed.done(&conn.b.receives, 1);
        same(&near.read(0, 9000), &wanted, "data that was read");
        same(&far.read(40_000, 9000), &wanted, "data that was forwarded");
        same(&far.read(49_000, 9), b"and these", "data after the read");
    }
}

fn staged_shared_receives(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let end = &testbed.b;
    let srq = end
        .context
        .create_srq(&end.pd, SrqOptions::default().with_depth(4).with_max_sge(1))
        .unwrap();
    let cq = end.context.create_cq(16).unwrap();
    let (near, far) = (fixture.host(&testbed.a, LEN), memory(fixture, end));
    let test_qps = [(); 2].map(|()| {
        let options = QpOptions::default().with_srq(srq.clone());
        let test_qp = testbed.test_qp(&testbed.a, QpOptions::default());
        let qp = end.context.create_qp(&end.pd, &cq, &cq, options).unwrap();
        connect(&test_qp.qp, &qp);
        (test_qp, qp)
    });
    for round in 0..6_u64 {
        for slot in 0..2 {
            let data = [far.mr.sge(slot * 8192, 8192)];
            srq.post_receive(&[ReceiveRequest { id: slot, data: &data }]).unwrap();
        }
        for (at, (test_qp, _)) in (0..).zip(&test_qps) {
            near.pattern(at * 8192, 5000, round * 2 + at);
            let from = [near.mr.sge(at * 8192, 5000)];
            test_qp.qp.post_send(&[SendRequest::new(at, WrOp::Send).with(&from)]).unwrap();
            testbed.done(&test_qp.sends, at);
            let done = testbed.next(&cq);
            assert!(done.is_success(), "{done:?}");
            same(&far.read(done.id * 8192, 5000), &near.read(at * 8192, 5000), "a shared receive");
        }
    }
}

/// A write with immediate consumes a receive but writes elsewhere; an empty message writes nothing.
fn staged_memory_of_other_receives_is_unchanged(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let (far, elsewhere) = (memory(fixture, &testbed.b), fixture.host(&testbed.b, 4096));
    far.write(0, b"as it was");
    let data = [far.mr.sge(0, 100)];
    conn.b.qp.post_receive(&[ReceiveRequest { id: 1, data: &data }; 2]).unwrap();
    let write = SendRequest::new(2, WrOp::WriteImm(elsewhere.mr.remote(0), [1, 2, 3, 4]));
    conn.a.qp.post_send(&[write.inline(b"elsewhere"), SendRequest::new(3, WrOp::Send)]).unwrap();
    let done = testbed.done(&conn.b.receives, 1);
    assert_eq!(done.kind, CompletionKind::WriteImm([1, 2, 3, 4]));
    assert_eq!(testbed.done(&conn.b.receives, 1).len, 0);
    same(&far.read(0, 9), b"as it was", "memory that was not written");
    same(&elsewhere.read(0, 9), b"elsewhere", "data that was written");
}

/// Failed work writes nothing, and neither does work discarded by a reset.
fn staged_work_that_fails(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let (near, far) = (memory(fixture, &testbed.a), fixture.host(&testbed.b, 4096));
    near.write(0, b"as it was");
    let mut wrong = far.mr.remote(0);
    wrong.rkey ^= 0x5500;
    let data = [near.mr.sge(0, 4096)];
    conn.a.qp.post_send(&[SendRequest::new(1, WrOp::Read(wrong)).with(&data)]).unwrap();
    testbed.failed(&conn.a.sends, 1, Status::RemoteAccess);
    conn.a.qp.post_receive(&[ReceiveRequest { id: 2, data: &data }]).unwrap();
    for qp in [&conn.a.qp, &conn.b.qp] {
        qp.modify(&QpAttributes::new(State::Reset)).unwrap();
    }
    connect(&conn.a.qp, &conn.b.qp);
    testbed.check_traffic(&conn);
    same(&near.read(0, 9), b"as it was", "memory that was not written");
    // The device rejects ranges beyond the registration.
    let beyond = [near.mr.sge(LEN - 4, 8)];
    let write = SendRequest::new(3, WrOp::Write(far.mr.remote(0))).with(&beyond);
    conn.a.qp.post_send(&[write]).unwrap();
    testbed.failed(&conn.a.sends, 3, Status::LocalProtection);
}

fn staged_memory_has_no_remote_access(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let end = if testbed.a.is_device() { &testbed.a } else { &testbed.b };
    let allocation = fixture.gpu().alloc(LEN).unwrap();
    let whole = || MemorySource::from(allocation.whole().unwrap());
    for (right, name) in [
        (Access::REMOTE_READ, "remote-read"),
        (Access::LOCAL_WRITE | Access::REMOTE_WRITE, "remote-write"),
        (Access::LOCAL_WRITE | Access::REMOTE_ATOMIC, "remote-atomic"),
    ] {
        for (memory, more) in [
            (whole().without_window(), "no dma-buf: "),
            (whole().staged(), "stage 128 KiB of device memory"),
        ] {
            let refused = end.context.register(&end.pd, memory, right).unwrap_err();
            assert_eq!(refused.kind(), &ErrorKind::Unsupported, "{refused}");
            let text = refused.to_string();
            for part in [name, more, "would not be copied", "have peers send"] {
                assert!(text.contains(part), "no {part}: {text}");
            }
        }
    }
    // Without remote access, staging works as requested.
    let mr = end.context.register(&end.pd, whole().staged(), Access::LOCAL_WRITE).unwrap();
    assert_eq!((mr.path(), mr.why()), (AccessPath::Staged, vec!["staged: requested".to_owned()]));
    assert_eq!((mr.iova(), mr.len()), (allocation.address().raw(), LEN));
}
