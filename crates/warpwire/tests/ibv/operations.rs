//! Every operation, at lengths from 0 to 1 MiB.

use warpwire::ibv::{CompletionKind, Fence, QpOptions, SendRequest, WrOp};
use warpwire::mlx5::{Atomic, WqeOpcode};

use crate::ibv::testbed::Testbed;
use testkit::cases;

cases!(CASES:
    writes,
    reads,
    sends,
    immediates,
    atomics,
    inline_data,
    fences,
    unsignaled_work,
    long_batches,
    several_ranges,
);

const SIZES: [usize; 12] = [0, 1, 3, 255, 256, 1023, 1024, 1025, 4097, 65_536, 65_541, 1 << 20];

/// Calls `act` at every length, each time with another number.
fn everywhere(act: fn(&Testbed, u64, usize)) {
    let testbed = Testbed::new();
    for (n, len) in SIZES.into_iter().enumerate() {
        act(&testbed, n as u64 + 1, len);
    }
}

fn writes() {
    everywhere(|testbed, n, len| {
        let (from, to) = (n % 13, n % 17);
        testbed.a.fill(from, len, n);
        let range = [testbed.a.mr.sge(from, len as u32)];
        testbed.a.post(SendRequest::new(n, WrOp::Write(testbed.there(to))).with(&range));
        assert_eq!(testbed.a.done(n).kind, CompletionKind::Send(WqeOpcode::RdmaWrite));
        testbed.b.check(to, len, n);
    });
}

fn reads() {
    everywhere(|testbed, n, len| {
        let (from, to) = (n % 13, n % 17);
        testbed.b.fill(from, len, n);
        let range = [testbed.a.mr.sge(to, len as u32)];
        testbed.a.post(SendRequest::new(n, WrOp::Read(testbed.there(from))).with(&range));
        assert_eq!(testbed.a.done(n).kind, CompletionKind::Send(WqeOpcode::RdmaRead));
        testbed.a.check(to, len, n);
    });
}

fn sends() {
    everywhere(|testbed, n, len| {
        let (from, to) = (n % 13, n % 17);
        testbed.a.fill(from, len, n);
        testbed.b.receive(n + 100, to, len as u32 + 3);
        let range = [testbed.a.mr.sge(from, len as u32)];
        let data = if len == 0 { &range[..0] } else { &range[..] };
        testbed.a.post(SendRequest::new(n, WrOp::Send).with(data));
        assert_eq!(testbed.a.done(n).kind, CompletionKind::Send(WqeOpcode::Send));
        let received = testbed.b.done(n + 100);
        assert_eq!((received.kind, received.len as usize), (CompletionKind::Receive, len));
        assert_eq!((received.qpn, received.sender), (testbed.b.qp.number(), None));
        testbed.b.check(to, len, n);
    });
}

fn immediates() {
    const IMM: [u8; 4] = [1, 2, 0xfd, 0xfe];
    let testbed = Testbed::new();
    for (n, len) in [0_usize, 5, 1024, 5000].into_iter().enumerate() {
        let n = n as u64;
        testbed.a.fill(0, len, n);
        let range = [testbed.a.mr.sge(0, len as u32)];
        let data = if len == 0 { &range[..0] } else { &range[..] };
        testbed.b.receive(1, 0, 8000);
        testbed.a.post(SendRequest::new(2, WrOp::SendImm(IMM)).with(data));
        testbed.a.done(2);
        let received = testbed.b.done(1);
        assert_eq!((received.kind, received.len as usize), (CompletionKind::ReceiveImm(IMM), len));
        testbed.b.check(0, len, n);
        testbed.b.receive(3, 0, 0);
        testbed.a.post(SendRequest::new(4, WrOp::WriteImm(testbed.there(9000), IMM)).with(data));
        testbed.a.done(4);
        assert_eq!(testbed.b.done(3).kind, CompletionKind::WriteImm(IMM));
        testbed.b.check(9000, len, n);
    }
}

fn atomics() {
    let testbed = Testbed::new();
    let (here, there) = (testbed.a.memory.bytes(), testbed.b.memory.bytes());
    let range = [testbed.a.mr.sge(64, 8)];
    let act = |id, atomic| {
        testbed.a.post(SendRequest::new(id, WrOp::Atomic(testbed.there(128), atomic)).with(&range));
        let done = testbed.a.done(id);
        (done.kind, here.load_u64(64).unwrap(), there.load_u64(128).unwrap())
    };
    there.store_u64(128, u64::MAX).unwrap();
    let added = act(1, Atomic::FetchAdd { add: 8 });
    assert_eq!(added, (CompletionKind::Send(WqeOpcode::FetchAdd), u64::MAX, 7));
    let swapped = act(2, Atomic::CompareSwap { compare: 7, swap: 0x0102_0304_0506_0708 });
    assert_eq!(swapped, (CompletionKind::Send(WqeOpcode::CompareSwap), 7, 0x0102_0304_0506_0708));
    let kept = act(3, Atomic::CompareSwap { compare: 7, swap: 9 });
    assert_eq!(
        kept,
        (
            CompletionKind::Send(WqeOpcode::CompareSwap),
            0x0102_0304_0506_0708,
            0x0102_0304_0506_0708
        )
    );
}

fn inline_data() {
    let testbed = Testbed::with(|options| QpOptions { max_inline_data: 128, ..options });
    assert!(testbed.a.qp.max_inline_data() >= 128);
    for len in [0, 1, 64, 128] {
        let mut bytes = crate::ibv::testbed::pattern(len as u64, len);
        testbed.b.receive(1, 0, 200);
        testbed.a.post(SendRequest::new(2, WrOp::Send).inline(&bytes));
        // Inline data was copied, so the buffer may change now.
        bytes.fill(0);
        testbed.a.done(2);
        assert_eq!(testbed.b.done(1).len as usize, len);
        testbed.b.check(0, len, len as u64);
    }
}

fn fences() {
    let testbed = Testbed::new();
    testbed.b.fill(0, 60_000, 7);
    let (first, second) = ([testbed.a.mr.sge(0, 60_000)], [testbed.a.mr.sge(0, 60_000)]);
    // The write must send what the read fetched; without the fence it could send the old bytes.
    testbed
        .a
        .qp
        .post_send(&[
            SendRequest::new(1, WrOp::Read(testbed.there(0))).with(&first),
            SendRequest::new(2, WrOp::Write(testbed.there(100_000)))
                .with(&second)
                .fenced(Fence::Reads),
        ])
        .unwrap();
    testbed.a.done(1);
    testbed.a.done(2);
    testbed.b.check(100_000, 60_000, 7);
}

fn unsignaled_work() {
    let testbed = Testbed::with(|options| QpOptions { signal_all: false, ..options });
    testbed.a.fill(0, 300, 5);
    let ranges = [0, 100, 200].map(|at| [testbed.a.mr.sge(at, 100)]);
    let write = |id: u64, at: usize| {
        SendRequest::new(id, WrOp::Write(testbed.there(at as u64 * 100))).with(&ranges[at])
    };
    testbed
        .a
        .qp
        .post_send(&[write(1, 0).unsignaled(), write(2, 1).unsignaled(), write(3, 2)])
        .unwrap();
    testbed.a.done(3);
    testbed.a.expect_no_completion();
    testbed.b.check(0, 300, 5);
}

/// More work requests than are passed to the library in one call.
fn long_batches() {
    const COUNT: u64 = 40;
    let testbed = Testbed::new();
    testbed.a.fill(0, COUNT as usize * 50, 3);
    let ranges: Vec<_> = (0..COUNT).map(|n| [testbed.a.mr.sge(n * 50, 50)]).collect();
    let there: Vec<_> = (0..COUNT).map(|n| [testbed.b.mr.sge(n * 50, 50)]).collect();
    let receives: Vec<_> = there
        .iter()
        .enumerate()
        .map(|(n, data)| warpwire::ibv::ReceiveRequest { id: n as u64, data })
        .collect();
    testbed.b.qp.post_receive(&receives).unwrap();
    let sends: Vec<_> = ranges
        .iter()
        .enumerate()
        .map(|(n, data)| SendRequest::new(n as u64, WrOp::Send).with(data))
        .collect();
    testbed.a.qp.post_send(&sends).unwrap();
    for n in 0..COUNT {
        testbed.a.done(n);
        testbed.b.done(n);
    }
    testbed.b.check(0, COUNT as usize * 50, 3);
}

fn several_ranges() {
    let testbed =
        Testbed::with(|options| QpOptions { max_send_sge: 3, max_recv_sge: 3, ..options });
    testbed.a.fill(0, 3000, 9);
    let from = [testbed.a.mr.sge(0, 7), testbed.a.mr.sge(7, 1993), testbed.a.mr.sge(2000, 1000)];
    let to = [testbed.b.mr.sge(0, 1500), testbed.b.mr.sge(1500, 3), testbed.b.mr.sge(1503, 1497)];
    testbed.b.qp.post_receive(&[warpwire::ibv::ReceiveRequest { id: 1, data: &to }]).unwrap();
    testbed.a.post(SendRequest::new(2, WrOp::Send).with(&from));
    testbed.a.done(2);
    assert_eq!(testbed.b.done(1).len, 3000);
    testbed.b.check(0, 3000, 9);
}
