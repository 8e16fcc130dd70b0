//! Every operation, at lengths from nothing to a mebibyte.

use warpwire::ibv::{CompletionKind, Fence, Op, QpOptions, Request};
use warpwire::mlx5::{Atomic, Opcode};

use crate::ibv::world::World;
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

/// Runs it at every length, with a number that differs each time.
fn everywhere(act: fn(&World, u64, usize)) {
    let world = World::new();
    for (n, len) in SIZES.into_iter().enumerate() {
        act(&world, n as u64 + 1, len);
    }
}

fn writes() {
    everywhere(|world, n, len| {
        let (from, to) = (n % 13, n % 17);
        world.a.fill(from, len, n);
        let range = [world.a.mr.sge(from, len as u32)];
        world.a.post(Request::new(n, Op::Write(world.there(to))).with(&range));
        assert_eq!(world.a.done(n).kind, CompletionKind::Send(Opcode::RdmaWrite));
        world.b.check(to, len, n);
    });
}

fn reads() {
    everywhere(|world, n, len| {
        let (from, to) = (n % 13, n % 17);
        world.b.fill(from, len, n);
        let range = [world.a.mr.sge(to, len as u32)];
        world.a.post(Request::new(n, Op::Read(world.there(from))).with(&range));
        assert_eq!(world.a.done(n).kind, CompletionKind::Send(Opcode::RdmaRead));
        world.a.check(to, len, n);
    });
}

fn sends() {
    everywhere(|world, n, len| {
        let (from, to) = (n % 13, n % 17);
        world.a.fill(from, len, n);
        world.b.receive(n + 100, to, len as u32 + 3);
        let range = [world.a.mr.sge(from, len as u32)];
        let data = if len == 0 { &range[..0] } else { &range[..] };
        world.a.post(Request::new(n, Op::Send).with(data));
        assert_eq!(world.a.done(n).kind, CompletionKind::Send(Opcode::Send));
        let received = world.b.done(n + 100);
        assert_eq!((received.kind, received.len as usize), (CompletionKind::Receive, len));
        assert_eq!((received.qpn, received.sender), (world.b.qp.number(), None));
        world.b.check(to, len, n);
    });
}

fn immediates() {
    const IMM: [u8; 4] = [1, 2, 0xfd, 0xfe];
    let world = World::new();
    for (n, len) in [0_usize, 5, 1024, 5000].into_iter().enumerate() {
        let n = n as u64;
        world.a.fill(0, len, n);
        let range = [world.a.mr.sge(0, len as u32)];
        let data = if len == 0 { &range[..0] } else { &range[..] };
        world.b.receive(1, 0, 8000);
        world.a.post(Request::new(2, Op::SendImm(IMM)).with(data));
        world.a.done(2);
        let received = world.b.done(1);
        assert_eq!((received.kind, received.len as usize), (CompletionKind::ReceiveImm(IMM), len));
        world.b.check(0, len, n);
        world.b.receive(3, 0, 0);
        world.a.post(Request::new(4, Op::WriteImm(world.there(9000), IMM)).with(data));
        world.a.done(4);
        assert_eq!(world.b.done(3).kind, CompletionKind::WriteImm(IMM));
        world.b.check(9000, len, n);
    }
}

fn atomics() {
    let world = World::new();
    let (here, there) = (world.a.memory.bytes(), world.b.memory.bytes());
    let range = [world.a.mr.sge(64, 8)];
    let act = |id, atomic| {
        world.a.post(Request::new(id, Op::Atomic(world.there(128), atomic)).with(&range));
        let done = world.a.done(id);
        (done.kind, here.load_u64(64).unwrap(), there.load_u64(128).unwrap())
    };
    there.store_u64(128, u64::MAX).unwrap();
    let added = act(1, Atomic::FetchAdd { add: 8 });
    assert_eq!(added, (CompletionKind::Send(Opcode::FetchAdd), u64::MAX, 7));
    let swapped = act(2, Atomic::CompareSwap { compare: 7, swap: 0x0102_0304_0506_0708 });
    assert_eq!(swapped, (CompletionKind::Send(Opcode::CompareSwap), 7, 0x0102_0304_0506_0708));
    let kept = act(3, Atomic::CompareSwap { compare: 7, swap: 9 });
    assert_eq!(
        kept,
        (CompletionKind::Send(Opcode::CompareSwap), 0x0102_0304_0506_0708, 0x0102_0304_0506_0708)
    );
}

fn inline_data() {
    let world = World::with(|options| QpOptions { inline: 128, ..options });
    assert!(world.a.qp.inline_room() >= 128);
    for len in [0, 1, 64, 128] {
        let mut bytes = crate::ibv::world::pattern(len as u64, len);
        world.b.receive(1, 0, 200);
        world.a.post(Request::new(2, Op::Send).inline(&bytes));
        // They were copied: what happens to them now does not matter.
        bytes.fill(0);
        world.a.done(2);
        assert_eq!(world.b.done(1).len as usize, len);
        world.b.check(0, len, len as u64);
    }
}

fn fences() {
    let world = World::new();
    world.b.fill(0, 60_000, 7);
    let (first, second) = ([world.a.mr.sge(0, 60_000)], [world.a.mr.sge(0, 60_000)]);
    // The write sends what the read fetched: without the fence, what was there before.
    world
        .a
        .qp
        .post_send(&[
            Request::new(1, Op::Read(world.there(0))).with(&first),
            Request::new(2, Op::Write(world.there(100_000))).with(&second).fenced(Fence::Reads),
        ])
        .unwrap();
    world.a.done(1);
    world.a.done(2);
    world.b.check(100_000, 60_000, 7);
}

fn unsignaled_work() {
    let world = World::with(|options| QpOptions { signal_all: false, ..options });
    world.a.fill(0, 300, 5);
    let ranges = [0, 100, 200].map(|at| [world.a.mr.sge(at, 100)]);
    let write = |id: u64, at: usize| {
        Request::new(id, Op::Write(world.there(at as u64 * 100))).with(&ranges[at])
    };
    world
        .a
        .qp
        .post_send(&[write(1, 0).unsignaled(), write(2, 1).unsignaled(), write(3, 2)])
        .unwrap();
    world.a.done(3);
    world.a.quiet();
    world.b.check(0, 300, 5);
}

/// More than is handed to the library at a time.
fn long_batches() {
    const COUNT: u64 = 40;
    let world = World::new();
    world.a.fill(0, COUNT as usize * 50, 3);
    let ranges: Vec<_> = (0..COUNT).map(|n| [world.a.mr.sge(n * 50, 50)]).collect();
    let there: Vec<_> = (0..COUNT).map(|n| [world.b.mr.sge(n * 50, 50)]).collect();
    let receives: Vec<_> = there
        .iter()
        .enumerate()
        .map(|(n, data)| warpwire::ibv::ReceiveRequest { id: n as u64, data })
        .collect();
    world.b.qp.post_receive(&receives).unwrap();
    let sends: Vec<_> = ranges
        .iter()
        .enumerate()
        .map(|(n, data)| Request::new(n as u64, Op::Send).with(data))
        .collect();
    world.a.qp.post_send(&sends).unwrap();
    for n in 0..COUNT {
        world.a.done(n);
        world.b.done(n);
    }
    world.b.check(0, COUNT as usize * 50, 3);
}

fn several_ranges() {
    let world = World::with(|options| QpOptions { send_ranges: 3, receive_ranges: 3, ..options });
    world.a.fill(0, 3000, 9);
    let from = [world.a.mr.sge(0, 7), world.a.mr.sge(7, 1993), world.a.mr.sge(2000, 1000)];
    let to = [world.b.mr.sge(0, 1500), world.b.mr.sge(1500, 3), world.b.mr.sge(1503, 1497)];
    world.b.qp.post_receive(&[warpwire::ibv::ReceiveRequest { id: 1, data: &to }]).unwrap();
    world.a.post(Request::new(2, Op::Send).with(&from));
    world.a.done(2);
    assert_eq!(world.b.done(1).len, 3000);
    world.b.check(0, 3000, 9);
}
