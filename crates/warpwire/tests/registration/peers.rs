//! Custom memory under traffic: available, temporarily unavailable, denied, invalidated.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use warpwire::error::Kind;
use warpwire::mlx5;
use warpwire::mr::{
    AccessDenied, CustomMemory, InvalidationHandle, PeerClient, PeerPages, Persistence,
    ReleaseReason as Ended,
};
use warpwire::verbs::{
    Access, Atomic, MemorySource, Mr, QpOptions, ReceiveRequest, SendRequest, Status, WrOp,
};
use warpwire::{Error, Result};

use parking_lot::Mutex;

use crate::registration::harness::{Buffer, Harness, MemKind, TestMemory};
use crate::verbs::fixture::{Endpoint, QpPair, Rng, Testbed, connect, same};
use testkit::cases;

cases!(Harness; CASES:
    traffic_with_custom_memory,
    temporarily_unavailable_memory,
    memory_that_becomes_unavailable_during_a_transfer,
    denied_memory_bad_flow,
    memory_unavailable_between_check_and_copy,
    memory_invalidated_under_traffic_bad_flow,
);

const BASE: u64 = 0xbeef_0000_0000_0000;
const LEN: usize = 1 << 18;

/// A client with one range of memory, at `BASE`.
struct RemoteClient {
    memory: Arc<dyn CustomMemory>,
    handles: Mutex<Vec<InvalidationHandle>>,
}

struct Pages(Arc<RemoteClient>, u64, u64);

impl PeerClient for RemoteClient {
    fn name(&self) -> &str {
        "remote"
    }

    fn persistence(&self) -> Persistence {
        Persistence::Invalidates
    }

    fn acquire(self: Arc<Self>, address: u64, len: u64) -> Result<Box<dyn PeerPages>> {
        let offset = address.wrapping_sub(BASE);
        if offset.checked_add(len).is_none_or(|end| end > LEN as u64) {
            return Err(
                Error::new(Kind::NotDeviceMemory, "find it").why("not this client's memory")
            );
        }
        assert_eq!(offset, 0, "the cases register the whole range");
        Ok(Box::new(Pages(self, address, len)))
    }
}

impl PeerPages for Pages {
    fn page_size(&self) -> u64 {
        4096
    }

    fn get_pages(&self, _: bool, invalidate: InvalidationHandle) -> Result<()> {
        self.0.handles.lock().push(invalidate);
        Ok(())
    }

    fn dma_map(&self, _: &str) -> Result<MemorySource> {
        Ok(MemorySource::custom(self.0.memory.clone(), self.1, self.2))
    }

    fn dma_unmap(&self, _: &str) {}

    fn put_pages(&self, _: Ended) {}
}

/// Adds a client for this memory and registers it.
fn register(end: &Endpoint, memory: Arc<dyn CustomMemory>) -> (Mr, Arc<RemoteClient>) {
    let client = Arc::new(RemoteClient { memory, handles: Mutex::default() });
    end.context.add_client(client.clone()).unwrap();
    // SAFETY: the client keeps its memory, and copies it under a lock.
    let mr = unsafe { end.context.register_address(&end.pd, BASE, LEN as u64, None, Access::ALL) };
    (mr.unwrap(), client)
}

fn traffic_with_custom_memory(harness: &Harness) {
    for slow in [false, true] {
        let testbed = harness.fixture.testbed();
        let conn = testbed.join(QpOptions::default());
        let (near, far) = (TestMemory::new(LEN, slow), TestMemory::new(LEN, slow));
        let (near_mr, _one) = register(&testbed.a, near.clone());
        let (far_mr, _two) = register(&testbed.b, far.clone());
        let mut wanted = vec![0; 100_001];
        warpwire_apps::pattern::fill_bytes(&mut wanted, 77, 0);
        near.set(3, &wanted);
        let (from, back) = ([near_mr.sge(3, 100_001)], [near_mr.sge(120_005, 100_001)]);
        let into = [far_mr.sge(120_001, 100_001)];
        conn.b.qp.post_receive(&[ReceiveRequest { id: 9, data: &into }]).unwrap();
        let word = [near_mr.sge(255_000, 8)];
        let add = WrOp::Atomic(far_mr.remote(256_000), Atomic::FetchAdd { add: 9 });
        let odd = WrOp::Atomic(far_mr.remote(256_001), Atomic::FetchAdd { add: 9 });
        let work = [
            SendRequest::new(1, WrOp::Write(far_mr.remote(7))).with(&from),
            SendRequest::new(2, WrOp::Read(far_mr.remote(7))).with(&back),
            SendRequest::new(3, WrOp::Send).with(&from),
            SendRequest::new(4, add).with(&word),
            SendRequest::new(5, odd).with(&word),
        ];
        conn.a.qp.post_send(&work).unwrap();
        (1..=4).for_each(|id| {
            testbed.done(&conn.a.sends, id);
        });
        // An atomic on an unaligned word is refused.
        let odd = testbed.next(&conn.a.sends);
        assert!(!odd.is_success(), "{odd:?}");
        testbed.done(&conn.b.receives, 9);
        same(&far.get(7, 100_001), &wanted, "a write");
        same(&near.get(120_005, 100_001), &wanted, "a read");
        same(&far.get(120_001, 100_001), &wanted, "a message");
        assert_eq!(far.get(256_000, 8), 9u64.to_ne_bytes());
        assert_eq!(far.get(0, 7), [0; 7]);
    }
}

/// Memory unavailable for longer than all retries: the requester pauses, the responder sends RNR
/// NAKs, and nothing is lost.
fn temporarily_unavailable_memory(harness: &Harness) {
    // Retries for 14 ms in total.
    let options = QpOptions::default().with_timeout(9).with_retry_count(6);
    for (near_goes, far_goes) in [(true, false), (false, true), (true, true)] {
        let testbed = harness.fixture.testbed();
        let conn = testbed.join(options.clone());
        let bystander = testbed.join(options.clone());
        let (near, far) = (TestMemory::new(LEN, false), TestMemory::new(LEN, false));
        let (near_mr, _one) = register(&testbed.a, near.clone());
        let (far_mr, _two) = register(&testbed.b, far.clone());
        let mut wanted = vec![0; 50_000];
        warpwire_apps::pattern::fill_bytes(&mut wanted, 5, 0);
        near.set(0, &wanted);
        let (from, back, word) =
            ([near_mr.sge(0, 50_000)], [near_mr.sge(60_000, 50_000)], [near_mr.sge(255_000, 8)]);
        let into = [far_mr.sge(120_000, 50_000)];
        let add = WrOp::Atomic(far_mr.remote(256_000), Atomic::FetchAdd { add: 3 });
        let work = [
            SendRequest::new(1, WrOp::Write(far_mr.remote(0))).with(&from),
            SendRequest::new(2, add).with(&word),
            SendRequest::new(3, WrOp::Read(far_mr.remote(0))).with(&back),
            SendRequest::new(4, WrOp::Send).with(&from),
            SendRequest::new(5, add).with(&word),
        ];
        for round in 0..4u64 {
            conn.b.qp.post_receive(&[ReceiveRequest { id: 9, data: &into }]).unwrap();
            near.set(60_000, &[0; 50_000]);
            let gone = [(near_goes, &near), (far_goes, &far)];
            let gone = gone.into_iter().filter(|(goes, _)| *goes).map(|(_, memory)| memory);
            gone.clone().for_each(|memory| memory.set_absent_for(Duration::from_secs(3600)));
            conn.a.qp.post_send(&work).unwrap();
            // Other queue pairs are unaffected.
            for _ in 0..20 {
                testbed.check_traffic(&bystander);
            }
            testbed.poll_for(Duration::from_millis(30));
            testbed.expect_no_completion(&conn.a.sends);
            gone.for_each(|memory| memory.set_absent_for(Duration::ZERO));
            for id in 1..=5 {
                let done = testbed.next(&conn.a.sends);
                let stats = [&conn.a, &conn.b].map(|test_qp| test_qp.qp.stats());
                assert!(done.is_success() && done.id == id, "{done:?} {near_goes} {stats:?}");
            }
            testbed.done(&conn.b.receives, 9);
            same(&far.get(0, 50_000), &wanted, "a write");
            same(&near.get(60_000, 50_000), &wanted, "a read");
            same(&far.get(120_000, 50_000), &wanted, "a message");
            let sum = u64::from_ne_bytes(far.get(256_000, 8).try_into().unwrap());
            assert_eq!(sum, 6 * (round + 1), "each addition once");
        }
    }
}

/// Memory unavailable during a transfer, for longer than all retries; also for a read that the
/// responder has already accepted.
fn memory_that_becomes_unavailable_during_a_transfer(harness: &Harness) {
    // Retries for 14 ms in total.
    let options = QpOptions::default().with_timeout(9).with_retry_count(6);
    for round in 0..24u64 {
        let testbed = harness.fixture.testbed();
        let mtu = Some(warpwire::verbs::Mtu::new(1024).unwrap());
        let conn = testbed.join(options.clone().with_mtu(mtu));
        let (near, far) = (TestMemory::new(LEN, false), TestMemory::new(LEN, false));
        let (near_mr, _one) = register(&testbed.a, near.clone());
        let (far_mr, _two) = register(&testbed.b, far.clone());
        let mut wanted = vec![0; LEN];
        warpwire_apps::pattern::fill_bytes(&mut wanted, round, 0);
        let is_read = round % 2 == 0;
        if is_read {
            far.set(0, &wanted)
        } else {
            near.set(0, &wanted)
        }
        let data = [near_mr.sge(0, LEN as u32)];
        let at = far_mr.remote(0);
        let op = if is_read { WrOp::Read(at) } else { WrOp::Write(at) };
        conn.a.qp.post_send(&[SendRequest::new(1, op).with(&data)]).unwrap();
        (0..1 + round / 4).for_each(|_| testbed.step());
        let goes = if round % 4 < 2 { &far } else { &near };
        goes.set_absent_for(Duration::from_millis(40));
        testbed.done(&conn.a.sends, 1);
        same(&near.get(0, LEN), &wanted, "this end");
        same(&far.get(0, LEN), &wanted, "the other end");
    }
}

/// A permanent denial is a protection error of the side that owns the memory.
fn denied_memory_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let host =
        [&testbed.a, &testbed.b].map(|end| Buffer::new(harness, end, MemKind::HostHandle, 4096, 0));
    let (near, far) = (TestMemory::new(LEN, false), TestMemory::new(LEN, false));
    let (near_mr, _one) = register(&testbed.a, near.clone());
    let (far_mr, _two) = register(&testbed.b, far.clone());
    for denied in
        [AccessDenied::Gone, AccessDenied::Failed, AccessDenied::Rights, AccessDenied::Range]
    {
        let atomic = Atomic::FetchAdd { add: 1 };
        *far.denied.lock() = Some(denied);
        let plain = [host[0].mr().sge(0, 8)];
        for op in [
            WrOp::Write(far_mr.remote(0)),
            WrOp::Read(far_mr.remote(0)),
            WrOp::Atomic(far_mr.remote(0), atomic),
        ] {
            let conn = testbed.join(QpOptions::default());
            conn.a.qp.post_send(&[SendRequest::new(1, op).with(&plain)]).unwrap();
            testbed.failed(&conn.a.sends, 1, Status::RemoteAccess);
        }
        let conn = testbed.join(QpOptions::default());
        let into = [far_mr.sge(0, 64)];
        conn.b.qp.post_receive(&[ReceiveRequest { id: 2, data: &into }]).unwrap();
        conn.a.qp.post_send(&[SendRequest::new(1, WrOp::Send).with(&plain)]).unwrap();
        testbed.failed(&conn.a.sends, 1, Status::RemoteOperation);
        testbed.failed(&conn.b.receives, 2, Status::LocalProtection);
        *far.denied.lock() = None;
        *near.denied.lock() = Some(denied);
        let own = [near_mr.sge(0, 8)];
        for op in [
            WrOp::Write(host[1].mr().remote(0)),
            WrOp::Read(host[1].mr().remote(0)),
            WrOp::Atomic(host[1].mr().remote(0), atomic),
            WrOp::Send,
        ] {
            let conn = testbed.join(QpOptions::default());
            conn.b.qp.post_receive(&[ReceiveRequest { id: 2, data: &[] }]).unwrap();
            conn.a.qp.post_send(&[SendRequest::new(1, op).with(&own)]).unwrap();
            testbed.failed(&conn.a.sends, 1, Status::LocalProtection);
        }
        *near.denied.lock() = None;
    }
}

/// Memory that passes `check` but is not resident at every n-th copy.
struct IntermittentMemory {
    memory: Arc<TestMemory>,
    copies: AtomicU64,
    every: u64,
}

impl IntermittentMemory {
    fn fail_sometimes(&self) -> std::result::Result<(), AccessDenied> {
        match self.copies.fetch_add(1, Ordering::Relaxed) % self.every {
            0 => Err(AccessDenied::NotResident),
            _ => Ok(()),
        }
    }
}

impl CustomMemory for IntermittentMemory {
    fn check(&self, offset: u64, len: u64, writes: bool) -> std::result::Result<(), AccessDenied> {
        self.memory.check(offset, len, writes)
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> std::result::Result<(), AccessDenied> {
        self.fail_sometimes().and_then(|()| self.memory.read(offset, into))
    }

    fn write(&self, offset: u64, from: &[u8]) -> std::result::Result<(), AccessDenied> {
        self.fail_sometimes().and_then(|()| self.memory.write(offset, from))
    }

    fn atomic(&self, offset: u64, op: &mlx5::Atomic) -> std::result::Result<u64, AccessDenied> {
        self.fail_sometimes().and_then(|()| self.memory.atomic(offset, op))
    }
}

/// Such a copy consumes no retry and needs no timer: it works with `timeout` and `retry_count` 0.
fn memory_unavailable_between_check_and_copy(harness: &Harness) {
    for every in [2, 3, 7] {
        let testbed = harness.fixture.testbed();
        let options = QpOptions::default().with_timeout(0).with_retry_count(0);
        let conn = testbed.join(options);
        let memories = [TestMemory::new(LEN, false), TestMemory::new(LEN, false)];
        let intermittent = |n: usize| {
            let memory = memories[n].clone();
            Arc::new(IntermittentMemory { memory, copies: AtomicU64::new(0), every })
        };
        let (near_mr, _one) = register(&testbed.a, intermittent(0));
        let (far_mr, _two) = register(&testbed.b, intermittent(1));
        let mut wanted = vec![0; 50_000];
        warpwire_apps::pattern::fill_bytes(&mut wanted, every, 0);
        memories[0].set(0, &wanted);
        let (from, back, word) =
            ([near_mr.sge(0, 50_000)], [near_mr.sge(60_000, 50_000)], [near_mr.sge(255_000, 8)]);
        let into = [far_mr.sge(120_000, 50_000)];
        let add = WrOp::Atomic(far_mr.remote(256_000), Atomic::FetchAdd { add: 3 });
        let work = [
            SendRequest::new(1, WrOp::Write(far_mr.remote(0))).with(&from),
            SendRequest::new(2, WrOp::Read(far_mr.remote(0))).with(&back),
            SendRequest::new(3, add).with(&word),
            SendRequest::new(4, WrOp::Send).with(&from),
        ];
        for round in 1..=5u64 {
            conn.b.qp.post_receive(&[ReceiveRequest { id: 9, data: &into }]).unwrap();
            memories[0].set(60_000, &[0; 50_000]);
            conn.a.qp.post_send(&work).unwrap();
            (1..=4).for_each(|id| {
                testbed.done(&conn.a.sends, id);
            });
            testbed.done(&conn.b.receives, 9);
            same(&memories[1].get(0, 50_000), &wanted, "a write");
            same(&memories[0].get(60_000, 50_000), &wanted, "a read");
            same(&memories[1].get(120_000, 50_000), &wanted, "a message");
            let sum = u64::from_ne_bytes(memories[1].get(256_000, 8).try_into().unwrap());
            assert_eq!(sum, 3 * round, "each addition once");
        }
    }
}

/// The client invalidates its memory during transfers, at many points, on either side.
fn memory_invalidated_under_traffic_bad_flow(harness: &Harness) {
    let mut rng = Rng::new(11);
    let mut seen = [0; 2];
    for round in 0..120u64 {
        let testbed = harness.fixture.testbed();
        let conn = testbed.join(QpOptions::default());
        let memory = TestMemory::new(LEN, false);
        let ours = round % 2 == 0;
        let (mr, client) = register(if ours { &testbed.a } else { &testbed.b }, memory.clone());
        let other_end = if ours { &testbed.b } else { &testbed.a };
        let other = Buffer::new(harness, other_end, MemKind::HostHandle, LEN as u64, 0);
        let (near, far) = if ours { (&mr, other.mr()) } else { (other.mr(), &mr) };
        let data = [near.sge(0, LEN as u32)];
        let op = match (round / 2) % 2 {
            0 => WrOp::Write(far.remote(0)),
            _ => WrOp::Read(far.remote(0)),
        };
        conn.a.qp.post_send(&[SendRequest::new(1, op).with(&data)]).unwrap();
        (0..rng.below(14)).for_each(|_| testbed.step());
        let handle = client.handles.lock().pop().unwrap();
        handle.invalidate();
        // From now on only the client accesses the memory.
        memory.set(0, &[0xde; LEN]);
        let done = testbed.next(&conn.a.sends);
        let protection = if ours { Status::LocalProtection } else { Status::RemoteAccess };
        assert!(done.status == protection || done.is_success(), "round {round}: {done:?}");
        seen[usize::from(done.is_success())] += 1;
        assert!(memory.get(0, LEN).iter().all(|byte| *byte == 0xde), "written after invalidation");
        assert!(other.read(0, LEN).iter().all(|byte| *byte == 0), "read after invalidation");
        reconnect(&testbed, &conn);
    }
    assert!(seen.iter().all(|count| *count > 5), "failures and successes: {seen:?}");
}

/// Resets and connects both queue pairs, and checks that they work.
fn reconnect(testbed: &Testbed, conn: &QpPair) {
    for test_qp in [&conn.a, &conn.b] {
        test_qp
            .qp
            .modify(&warpwire::verbs::QpAttributes::new(warpwire::verbs::State::Reset))
            .unwrap();
    }
    connect(&conn.a.qp, &conn.b.qp);
    testbed.check_traffic(conn);
}
