//! Every operation, posted locally and by the guest, at every length around packet boundaries.

use warpwire::verbs::{Access, Atomic, CompletionKind, Fence, Remote, SendRequest, Status, WrOp};

use crate::rxe::lab::Bench;
use crate::rxe::peer::{ALL_ACCESS, FENCE, INLINE, PeerPost, WINDOWS};
use crate::rxe::testbed::{ConnParams, Testbed};
use testkit::cases;

cases!(Bench; CASES:
    we_write,
    they_write,
    we_read,
    they_read,
    we_send,
    they_send,
    immediates,
    atomics,
    sequence_numbers_wrap,
    long_messages,
    many_reads_at_once,
    fences,
    inline_data,
    they_invalidate_a_key,
    we_invalidate_a_key,
);

const SIZES: [usize; 14] =
    [0, 1, 3, 4, 255, 256, 257, 1023, 1024, 1025, 4096, 4099, 65_536, 65_541];
const MTUS: [u32; 3] = [256, 1024, 4096];

/// Calls `act` at every MTU and length with the testbed, a number that differs each time, and the
/// length.
fn everywhere(bench: &Bench, act: fn(&mut Testbed, u64, usize)) {
    for mtu in MTUS {
        let mut testbed = Testbed::open(bench, ConnParams { mtu, ..ConnParams::default() });
        for (n, len) in SIZES.into_iter().enumerate() {
            act(&mut testbed, u64::from(mtu) + n as u64, len);
        }
    }
}

fn we_write(bench: &Bench) {
    everywhere(bench, |testbed, n, len| {
        let (from, to) = (n % 13, n % 17);
        testbed.near.fill(from, len, n);
        let range = [testbed.near.mr.sge(from, len as u32)];
        testbed.post(SendRequest::new(n, WrOp::Write(testbed.far.remote(to))).with(&range));
        testbed.done(n);
        let far = testbed.far;
        testbed.peer.check(&far, to, len, n);
    });
}

fn they_write(bench: &Bench) {
    everywhere(bench, |testbed, n, len| {
        let (from, to, far) = (n % 13, n % 17, testbed.far);
        testbed.peer.fill(&far, from, len, n);
        let remote = testbed.near.mr.remote(to);
        testbed.peer.post(&far, PeerPost::new(n, "write").from(from, len as u32).at(remote));
        testbed.peer.done(n);
        testbed.near.check(to, len, n);
    });
}

fn we_read(bench: &Bench) {
    everywhere(bench, |testbed, n, len| {
        let (from, to, far) = (n % 13, n % 17, testbed.far);
        testbed.peer.fill(&far, from, len, n);
        let range = [testbed.near.mr.sge(to, len as u32)];
        testbed.post(SendRequest::new(n, WrOp::Read(far.remote(from))).with(&range));
        assert_eq!(testbed.done(n).len as usize, len);
        testbed.near.check(to, len, n);
    });
}

fn they_read(bench: &Bench) {
    everywhere(bench, |testbed, n, len| {
        let (from, to, far) = (n % 13, n % 17, testbed.far);
        testbed.near.fill(from, len, n);
        let remote = testbed.near.mr.remote(from);
        testbed.peer.post(&far, PeerPost::new(n, "read").from(to, len as u32).at(remote));
        testbed.peer.done(n);
        testbed.peer.check(&far, to, len, n);
    });
}

fn we_send(bench: &Bench) {
    everywhere(bench, |testbed, n, len| {
        let (from, to, far) = (n % 13, n % 17, testbed.far);
        testbed.near.fill(from, len, n);
        // The receive is longer than the message.
        testbed.peer.receive(0, n, &far, to, len as u32 + 3);
        let range = [testbed.near.mr.sge(from, len as u32)];
        testbed.post(SendRequest::new(n, WrOp::Send).with(&range));
        testbed.done(n);
        assert_eq!(testbed.peer.done(n).len as usize, len);
        testbed.peer.check(&far, to, len, n);
    });
}

fn they_send(bench: &Bench) {
    everywhere(bench, |testbed, n, len| {
        let (from, to, far) = (n % 13, n % 17, testbed.far);
        testbed.peer.fill(&far, from, len, n);
        testbed.receive(n, to, len as u32 + 3);
        testbed.peer.post(&far, PeerPost::new(n, "send").from(from, len as u32));
        testbed.peer.done(n);
        let done = testbed.done(n);
        assert_eq!((done.len as usize, done.kind), (len, CompletionKind::Receive));
        testbed.near.check(to, len, n);
    });
}

fn immediates(bench: &Bench) {
    const IMM: u32 = 0x0102_fdfe;
    let mut testbed = Testbed::open(bench, ConnParams::default());
    let far = testbed.far;
    for (n, len) in [0_u64, 5, 1024, 5000].into_iter().enumerate() {
        let (n, size) = (n as u64, len as u32);
        let range = [testbed.near.mr.sge(0, size)];
        testbed.near.fill(0, len as usize, n);
        testbed.peer.receive(0, n, &far, 0, 6000);
        testbed.post(SendRequest::new(n, WrOp::SendImm(IMM.to_be_bytes())).with(&range));
        testbed.done(n);
        let done = testbed.peer.done(n);
        assert_eq!((done.imm, done.len), (IMM.into(), len));
        testbed.peer.check(&far, 0, len as usize, n);

        testbed.peer.receive(0, n, &far, 0, 0);
        let op = WrOp::WriteImm(far.remote(8192), IMM.to_be_bytes());
        testbed.post(SendRequest::new(n, op).with(&range));
        testbed.done(n);
        let done = testbed.peer.done(n);
        assert_eq!((done.imm, done.len), (IMM.into(), len));
        testbed.peer.check(&far, 8192, len as usize, n);

        testbed.peer.fill(&far, 0, len as usize, n + 50);
        testbed.receive(n, 0, 6000);
        let send = PeerPost::new(n, "send_imm").from(0, size);
        testbed.peer.post(&far, PeerPost { first: IMM.into(), ..send });
        testbed.peer.done(n);
        let done = testbed.done(n);
        assert_eq!(done.kind, CompletionKind::ReceiveImm(IMM.to_be_bytes()));
        assert_eq!(u64::from(done.len), len);
        testbed.near.check(0, len as usize, n + 50);

        testbed.receive(n, 0, 0);
        let write = PeerPost::new(n, "write_imm").from(0, size).at(testbed.near.mr.remote(8192));
        testbed.peer.post(&far, PeerPost { first: IMM.into(), ..write });
        testbed.peer.done(n);
        let done = testbed.done(n);
        assert_eq!(done.kind, CompletionKind::WriteImm(IMM.to_be_bytes()));
        assert_eq!(u64::from(done.len), len);
        testbed.near.check(8192, len as usize, n + 50);
    }
}

/// An atomic: the value before it, its operands, and the value after it.
struct Change {
    before: u64,
    op: Atomic,
    after: u64,
}

fn changes() -> [Change; 5] {
    let add = |add| Atomic::FetchAdd { add };
    let swap = |compare, swap| Atomic::CompareSwap { compare, swap };
    let (big, odd) = (0x0123_4567_89ab_cdef, 0xfedc_ba98_7654_3210);
    [
        Change { before: big, op: add(0), after: big },
        Change { before: u64::MAX, op: add(3), after: 2 },
        Change { before: 7, op: add(u64::MAX), after: 6 },
        Change { before: big, op: swap(big, odd), after: odd },
        Change { before: big, op: swap(odd, 1), after: big },
    ]
}

fn atomics(bench: &Bench) {
    let mut testbed = Testbed::open(bench, ConnParams::default());
    let far = testbed.far;
    for (n, Change { before, op, after }) in changes().into_iter().enumerate() {
        let n = n as u64;
        testbed.peer.put(&far, 64, before);
        let range = [testbed.near.mr.sge(128, 8)];
        testbed.post(SendRequest::new(n, WrOp::Atomic(far.remote(64), op)).with(&range));
        testbed.done(n);
        assert_eq!((testbed.near.get(128), testbed.peer.get(&far, 64)), (before, after));

        testbed.near.put(64, before);
        let (name, first, second) = match op {
            Atomic::FetchAdd { add } => ("fadd", add, 0),
            Atomic::CompareSwap { compare, swap } => ("cas", compare, swap),
            _ => unreachable!("rxe has these two"),
        };
        let post = PeerPost::new(n, name).from(128, 8).at(testbed.near.mr.remote(64));
        testbed.peer.post(&far, PeerPost { first, second, ..post });
        testbed.peer.done(n);
        assert_eq!((testbed.peer.get(&far, 128), testbed.near.get(64)), (before, after));
    }
}

fn sequence_numbers_wrap(bench: &Bench) {
    let psn = [0xff_fffc, 0xff_fff9];
    let mut testbed = Testbed::open(bench, ConnParams { mtu: 256, psn, ..ConnParams::default() });
    let far = testbed.far;
    for n in 0..4 {
        // Each has several packets, so that the PSN wraps in the middle of one.
        let len = 1000 + n as usize;
        testbed.near.fill(0, len, n);
        let range = [testbed.near.mr.sge(0, len as u32)];
        testbed.post(SendRequest::new(n, WrOp::Write(far.remote(0))).with(&range));
        testbed.done(n);
        testbed.peer.check(&far, 0, len, n);
        let range = [testbed.near.mr.sge(4096, len as u32)];
        testbed.post(SendRequest::new(n, WrOp::Read(far.remote(0))).with(&range));
        testbed.done(n);
        testbed.near.check(4096, len, n);

        testbed.peer.fill(&far, 8192, len, n + 9);
        let write =
            PeerPost::new(n, "write").from(8192, len as u32).at(testbed.near.mr.remote(8192));
        testbed.peer.post(&far, write);
        testbed.peer.done(n);
        testbed.near.check(8192, len, n + 9);
        let read =
            PeerPost::new(n, "read").from(16384, len as u32).at(testbed.near.mr.remote(8192));
        testbed.peer.post(&far, read);
        testbed.peer.done(n);
        testbed.peer.check(&far, 16384, len, n + 9);
        let add = PeerPost::new(n, "fadd").from(32768, 8).at(testbed.near.mr.remote(32768));
        testbed.peer.post(&far, PeerPost { first: 1, ..add });
        testbed.peer.done(n);
        assert_eq!((testbed.near.get(32768), testbed.peer.get(&far, 32768)), (n + 1, n));
    }
    testbed.check_traffic();
}

fn long_messages(bench: &Bench) {
    const LEN: usize = (1 << 20) + 1;
    let params = ConnParams { mtu: 4096, memory: 1 << 21, ..ConnParams::default() };
    let mut testbed = Testbed::open(bench, params);
    let far = testbed.far;
    testbed.near.fill(0, LEN, 1);
    let range = [testbed.near.mr.sge(0, LEN as u32)];
    testbed.post(SendRequest::new(1, WrOp::Write(far.remote(0))).with(&range));
    testbed.done(1);
    testbed.peer.check(&far, 0, LEN, 1);
    testbed.peer.receive(0, 2, &far, 3, LEN as u32);
    testbed.post(SendRequest::new(2, WrOp::Send).with(&range));
    testbed.done(2);
    testbed.peer.done(2);
    testbed.peer.check(&far, 3, LEN, 1);

    testbed.peer.fill(&far, 0, LEN, 2);
    testbed.post(SendRequest::new(3, WrOp::Read(far.remote(0))).with(&range));
    testbed.done(3);
    testbed.near.check(0, LEN, 2);
    testbed.peer.fill(&far, 0, LEN, 3);
    testbed
        .peer
        .post(&far, PeerPost::new(4, "write").from(0, LEN as u32).at(testbed.near.mr.remote(5)));
    testbed.peer.done(4);
    testbed.near.check(5, LEN, 3);
    testbed.peer.fill(&far, 0, LEN, 4);
    testbed
        .peer
        .post(&far, PeerPost::new(5, "read").from(0, LEN as u32).at(testbed.near.mr.remote(5)));
    testbed.peer.done(5);
    testbed.peer.check(&far, 0, LEN, 3);
    testbed.receive(6, 0, LEN as u32);
    testbed.peer.post(&far, PeerPost::new(6, "send").from(0, LEN as u32));
    testbed.peer.done(6);
    testbed.done(6);
    testbed.near.check(0, LEN, 3);
}

fn many_reads_at_once(bench: &Bench) {
    const COUNT: u64 = 40;
    for reads in [1, 4, 16] {
        let mut testbed = Testbed::open(bench, ConnParams { reads, ..ConnParams::default() });
        let far = testbed.far;
        for n in 0..COUNT {
            testbed.peer.fill(&far, n * 3000, 2500, n);
            testbed.near.fill(n * 3000, 2500, n + 100);
        }
        let ranges: Vec<_> =
            (0..COUNT).map(|n| [testbed.near.mr.sge(130_000 + n * 3000, 2500)]).collect();
        let request = |n: u64| {
            SendRequest::new(n, WrOp::Read(far.remote(n * 3000))).with(&ranges[n as usize])
        };
        testbed.qp().post_send(&(0..COUNT).map(request).collect::<Vec<_>>()).unwrap();
        for n in 0..COUNT {
            testbed.done(n);
            testbed.near.check(130_000 + n * 3000, 2500, n);
        }
        for n in 0..COUNT {
            let at = testbed.near.mr.remote(n * 3000);
            testbed.peer.post(&far, PeerPost::new(n, "read").from(130_000 + n * 3000, 2500).at(at));
        }
        for n in 0..COUNT {
            testbed.peer.done(n);
            testbed.peer.check(&far, 130_000 + n * 3000, 2500, n + 100);
        }
    }
}

fn fences(bench: &Bench) {
    let mut testbed = Testbed::open(bench, ConnParams::default());
    let far = testbed.far;
    // The write must send what the read fetched.
    for n in 0..10 {
        testbed.peer.fill(&far, 0, 5000, n);
        let range = [testbed.near.mr.sge(0, 5000)];
        let read = SendRequest::new(1, WrOp::Read(far.remote(0))).with(&range);
        let back = SendRequest::new(2, WrOp::Write(far.remote(10_000))).with(&range);
        testbed.qp().post_send(&[read, back.fenced(Fence::Reads)]).unwrap();
        testbed.done(1);
        testbed.done(2);
        testbed.peer.check(&far, 10_000, 5000, n);

        testbed.near.fill(20_000, 5000, n + 30);
        let read = PeerPost::new(1, "read").from(20_000, 5000).at(testbed.near.mr.remote(20_000));
        testbed.peer.post(&far, read);
        let back = PeerPost::new(2, "write").from(20_000, 5000).at(testbed.near.mr.remote(30_000));
        testbed.peer.post(&far, PeerPost { flags: FENCE, ..back });
        testbed.peer.done(1);
        testbed.peer.done(2);
        testbed.near.check(30_000, 5000, n + 30);
    }
}

fn inline_data(bench: &Bench) {
    let mut testbed = Testbed::open(bench, ConnParams::default());
    let far = testbed.far;
    testbed.post(SendRequest::new(1, WrOp::Write(far.remote(8))).inline(&42_u64.to_le_bytes()));
    testbed.done(1);
    assert_eq!(testbed.peer.get(&far, 8), 42);
    testbed.peer.put(&far, 16, 43);
    let write = PeerPost::new(2, "write").from(16, 8).at(testbed.near.mr.remote(8));
    testbed.peer.post(&far, PeerPost { flags: INLINE, ..write });
    testbed.peer.done(2);
    assert_eq!(testbed.near.get(8), 43);
}

fn they_invalidate_a_key(bench: &Bench) {
    let mut testbed = Testbed::open(bench, ConnParams::default());
    let far = testbed.far;
    let memory = warpwire::mr::HostMemory::new(4096).unwrap();
    let mr = testbed.context.register(&testbed.pd, memory, Access::ALL).unwrap();
    let (key, remote) = (mr.rkey(), mr.remote(0));
    testbed.peer.post(&far, PeerPost::new(1, "write").from(0, 8).at(remote));
    testbed.peer.done(1);
    testbed.receive(2, 0, 64);
    testbed
        .peer
        .post(&far, PeerPost { first: key.into(), ..PeerPost::new(2, "send_inv").from(0, 8) });
    testbed.peer.done(2);
    assert_eq!(testbed.done(2).kind, CompletionKind::ReceiveInvalidate(key));
    // The key is invalid now.
    testbed.peer.post(&far, PeerPost::new(3, "write").from(0, 8).at(remote));
    testbed.peer.failed(3, Status::RemoteAccess);
}

fn we_invalidate_a_key(bench: &Bench) {
    let mut testbed = Testbed::open(bench, ConnParams::default());
    // rxe can invalidate memory windows only.
    let memory = testbed.peer.memory(4096, ALL_ACCESS | WINDOWS);
    let key = testbed.peer.ok(&format!("window 0 {}", memory.number))[0] as u32;
    let remote = Remote { rkey: key, ..memory.remote(8) };
    testbed.post(SendRequest::new(1, WrOp::Write(remote)).inline(&42_u64.to_le_bytes()));
    testbed.done(1);
    assert_eq!(testbed.peer.get(&memory, 8), 42);
    testbed.peer.receive(0, 2, &memory, 64, 64);
    testbed.post(SendRequest::new(2, WrOp::SendInvalidate(key)).inline(b"no more"));
    testbed.done(2);
    let done = testbed.peer.done(2);
    assert_eq!((done.imm, done.len), (key.into(), 7));
    testbed.post(SendRequest::new(3, WrOp::Write(remote)).inline(&43_u64.to_le_bytes()));
    testbed.failed(3, Status::RemoteAccess);
    assert_eq!(testbed.peer.get(&memory, 8), 42);
}
