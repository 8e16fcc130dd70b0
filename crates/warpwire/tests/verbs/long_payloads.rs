//! Payloads of many packets: any length and alignment, and memory that changes or is deregistered
//! in flight.

use std::sync::atomic::{AtomicBool, Ordering};

use warpwire::mr::HostMemory;
use warpwire::verbs::{Completion, QpOptions, ReceiveRequest, SendRequest, Status, WrOp};

use crate::verbs::fixture::{
    ALL, Fixture, Kind, QpPair, Rng, TestBuffer, Testbed, same, short_timeouts,
};
use testkit::cases;

cases!(Fixture; CASES:
    long_payloads_of_any_length_and_alignment,
    lists_of_long_ranges,
    long_payloads_into_lists_of_ranges,
    long_payloads_to_invalid_memory,
    a_payload_that_changes_in_flight,
    memory_that_is_deregistered_in_flight,
);

const BUFFER_LEN: u64 = 1 << 19;
/// Around multiples of the packet sizes of all links.
const LENGTHS: [u32; 12] = [
    16_383,
    16_384,
    16_385,
    20_002,
    32_768,
    61_439,
    61_440,
    61_441,
    61_440 + 16_383,
    61_440 + 16_387,
    122_880,
    400_003,
];

struct TransferTest {
    testbed: Testbed,
    conn: QpPair,
    near: TestBuffer,
    far: TestBuffer,
}

impl TransferTest {
    fn new(fixture: &Fixture, kind: Kind) -> Self {
        let testbed = fixture.testbed();
        let conn = testbed.join(QpOptions::default());
        let near = fixture.memory(&testbed.a, kind, BUFFER_LEN, ALL);
        let far = fixture.memory(&testbed.b, kind, BUFFER_LEN, ALL);
        Self { testbed, conn, near, far }
    }

    fn write(&self, id: u64, data: &[warpwire::verbs::Sge], to: u64) {
        let request = SendRequest::new(id, WrOp::Write(self.far.mr.remote(to))).with(data);
        self.conn.a.qp.post_send(&[request]).unwrap();
        self.testbed.done(&self.conn.a.sends, id);
    }
}

fn long_payloads_of_any_length_and_alignment(fixture: &Fixture) {
    for kind in [Kind::Host, Kind::Window] {
        let transfer = TransferTest::new(fixture, kind);
        let TransferTest { testbed, conn, near, far } = &transfer;
        for (n, len) in LENGTHS.into_iter().enumerate() {
            let (id, from, to) = (n as u64, n as u64 * 7 % 67, 64 + n as u64 * 5 % 61);
            let wanted = near.pattern(from, len as usize, id);
            far.write(0, &vec![0xee; len as usize + 256]);
            transfer.write(id, &[near.mr.sge(from, len)], to);
            let found = far.read(0, len as usize + 256);
            let (to, end) = (to as usize, to as usize + len as usize);
            same(&found[to..end], &wanted, "a write");
            assert!(found[..to].iter().chain(&found[end..]).all(|byte| *byte == 0xee), "{len}");
            // The same range as a message.
            let data = [far.mr.sge(64, len)];
            conn.b.qp.post_receive(&[ReceiveRequest { id, data: &data }]).unwrap();
            let data = [near.mr.sge(from, len)];
            let request = SendRequest::new(id, WrOp::SendImm([7; 4])).with(&data);
            conn.a.qp.post_send(&[request]).unwrap();
            testbed.done(&conn.a.sends, id);
            assert_eq!(testbed.done(&conn.b.receives, id).len, len);
            same(&far.read(64, len as usize), &wanted, "a message");
        }
        for (n, len) in LENGTHS.into_iter().enumerate() {
            let (id, from, to) = (n as u64, n as u64 * 7 % 67, 64 + n as u64 * 5 % 61);
            let wanted = far.pattern(from, len as usize, 50 + id);
            let data = [near.mr.sge(to, len)];
            let request = SendRequest::new(id, WrOp::Read(far.mr.remote(from))).with(&data);
            conn.a.qp.post_send(&[request]).unwrap();
            testbed.done(&conn.a.sends, id);
            same(&near.read(to, len as usize), &wanted, "a read");
        }
    }
}

fn lists_of_long_ranges(fixture: &Fixture) {
    let transfer = TransferTest::new(fixture, Kind::Host);
    let TransferTest { near, far, .. } = &transfer;
    let bytes = near.pattern(0, BUFFER_LEN as usize, 3);
    let mut rng = Rng::new(5);
    for id in 0..10 {
        let ranges: [(u64, u32); 3] =
            std::array::from_fn(|_| (rng.below(300_000), 1 + rng.below(70_000) as u32));
        let wanted: Vec<u8> = ranges
            .iter()
            .flat_map(|(at, len)| &bytes[*at as usize..*at as usize + *len as usize])
            .copied()
            .collect();
        transfer.write(id, &ranges.map(|(at, len)| near.mr.sge(at, len)), 11);
        same(&far.read(11, wanted.len()), &wanted, "a list of ranges");
    }
}

fn long_payloads_into_lists_of_ranges(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default().with_max_send_sge(3).with_max_recv_sge(3));
    let near = fixture.host(&testbed.a, BUFFER_LEN);
    let far = fixture.host(&testbed.b, BUFFER_LEN);
    // Adjacent ranges with a guard byte between them.
    const RANGES: [(u64, u32); 3] = [(3, 50_000), (50_004, 70_001), (120_006, 130_000)];
    const LEN: u32 = 50_000 + 70_001 + 130_000;
    let scattered = |found: Vec<u8>, wanted: &[u8]| {
        let mut rest = wanted;
        for (at, len) in RANGES {
            let (part, next) = rest.split_at(len as usize);
            same(&found[at as usize..at as usize + len as usize], part, "a range");
            assert_eq!((found[at as usize - 1], found[at as usize + len as usize]), (0xee, 0xee));
            rest = next;
        }
    };
    for id in 0..4 {
        let wanted = near.pattern(id, LEN as usize, id);
        far.write(0, &vec![0xee; BUFFER_LEN as usize]);
        let data = RANGES.map(|(at, len)| far.mr.sge(at, len));
        conn.b.qp.post_receive(&[ReceiveRequest { id, data: &data }]).unwrap();
        let data = [near.mr.sge(id, LEN)];
        conn.a.qp.post_send(&[SendRequest::new(id, WrOp::Send).with(&data)]).unwrap();
        testbed.done(&conn.a.sends, id);
        assert_eq!(testbed.done(&conn.b.receives, id).len, LEN);
        scattered(far.read(0, BUFFER_LEN as usize), &wanted);

        let wanted = far.pattern(id, LEN as usize, 9 + id);
        near.write(0, &vec![0xee; BUFFER_LEN as usize]);
        let data = RANGES.map(|(at, len)| near.mr.sge(at, len));
        let request = SendRequest::new(id, WrOp::Read(far.mr.remote(id))).with(&data);
        conn.a.qp.post_send(&[request]).unwrap();
        testbed.done(&conn.a.sends, id);
        scattered(near.read(0, BUFFER_LEN as usize), &wanted);
    }
}

/// Long writes to memory without access fail with a remote access error and change no byte.
fn long_payloads_to_invalid_memory(fixture: &Fixture) {
    const LEN: u32 = 200_000;
    let testbed = fixture.testbed();
    let near = fixture.host(&testbed.a, u64::from(LEN));
    let far = fixture.host(&testbed.b, u64::from(LEN));
    far.write(0, &vec![0xee; LEN as usize]);
    let remote = |at: u64, wrong_key: bool| {
        let mut remote = far.mr.remote(0);
        remote.address += at;
        remote.rkey ^= u32::from(wrong_key) << 8;
        remote
    };
    for (id, to) in
        [remote(0, true), remote(1, false), remote(1 << 40, false)].into_iter().enumerate()
    {
        let conn = testbed.join(short_timeouts());
        // A valid write first.
        let (id, half) = (id as u64, [near.mr.sge(0, LEN / 2)]);
        let valid = SendRequest::new(id, WrOp::Write(far.mr.remote(0))).with(&half);
        conn.a.qp.post_send(&[valid]).unwrap();
        testbed.done(&conn.a.sends, id);
        let before = far.read(0, LEN as usize);
        let data = [near.mr.sge(0, LEN)];
        near.pattern(0, LEN as usize, 40 + id);
        conn.a.qp.post_send(&[SendRequest::new(7, WrOp::Write(to)).with(&data)]).unwrap();
        testbed.failed(&conn.a.sends, 7, Status::RemoteAccess);
        same(&far.read(0, LEN as usize), &before, "memory without access");
    }
}

/// If the application changes a payload in flight, the peer gets a mixture of the values, and no
/// failure.
fn a_payload_that_changes_in_flight(fixture: &Fixture) {
    const LEN: u32 = 300_000;
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let memory = HostMemory::new(u64::from(LEN)).unwrap();
    let mr = testbed.a.context.register(&testbed.a.pd, memory.clone(), ALL).unwrap();
    let far = fixture.host(&testbed.b, u64::from(LEN));
    let fill = |value: u8| memory.bytes().write(0, &vec![value; LEN as usize]).unwrap();
    let write = |id| {
        let data = [mr.sge(0, LEN)];
        let request = SendRequest::new(id, WrOp::Write(far.mr.remote(0))).with(&data);
        conn.a.qp.post_send(&[request]).unwrap();
        testbed.done(&conn.a.sends, id);
    };
    let over = AtomicBool::new(false);
    fill(1);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for value in (1..=3).cycle().take_while(|_| !over.load(Ordering::Relaxed)) {
                fill(value);
            }
        });
        for id in 0..30 {
            write(id);
            let found = far.read(0, LEN as usize);
            assert!(
                found.iter().all(|value| (1..=3).contains(value)),
                "bytes that were never written"
            );
        }
        over.store(true, Ordering::Relaxed);
    });
    fill(9);
    write(99);
    same(&far.read(0, LEN as usize), &[9; LEN as usize], "memory that no longer changes");
}

/// After deregistration, no byte of the memory is sent.
fn memory_that_is_deregistered_in_flight(fixture: &Fixture) {
    const LEN: u32 = 300_000;
    const ROUNDS: u32 = 15;
    let (testbed, mut rng) = (fixture.testbed(), Rng::new(11));
    let far = fixture.host(&testbed.b, u64::from(LEN));
    let memory = HostMemory::new(u64::from(LEN)).unwrap();
    let (mut failed, mut succeeded) = (0, 0);
    for round in 0..ROUNDS {
        let conn = testbed.join(short_timeouts());
        memory.bytes().write(0, &vec![1; LEN as usize]).unwrap();
        far.write(0, &vec![0; LEN as usize]);
        let mr = testbed.a.context.register(&testbed.a.pd, memory.clone(), ALL).unwrap();
        let data = [mr.sge(0, LEN)];
        for id in 0..4 {
            let request = SendRequest::new(id, WrOp::Write(far.mr.remote(0))).with(&data);
            conn.a.qp.post_send(&[request]).unwrap();
        }
        // The memory is deregistered and reused after some steps.
        let steps = if round == 0 { 0 } else { rng.below(12) };
        std::thread::scope(|scope| {
            let revoker = scope.spawn(|| {
                mr.deregister().unwrap();
                memory.bytes().write(0, &vec![0xdd; LEN as usize]).unwrap();
            });
            (0..steps).for_each(|_| testbed.step());
            revoker.join().unwrap();
        });
        let mut four = [Completion::EMPTY; 4];
        let mut got = 0;
        testbed.until("all completions", || {
            got += conn.a.sends.poll(&mut four[got..]).unwrap();
            got == 4
        });
        let success = |done: &&Completion| done.status == Status::Success;
        succeeded += four.iter().filter(success).count();
        failed += 4 - four.iter().filter(success).count();
        let found = far.read(0, LEN as usize);
        assert!(found.iter().all(|value| *value <= 1), "round {round}: read after deregistration");
    }
    // With direct access, work is done when it is posted.
    if !fixture.test_link.is_direct() && !fixture.test_link.has_device() {
        assert!(failed > 0, "{succeeded} succeeded");
    }
}
