//! Every operation, started by us and by them, at every length that a packet's edge makes special.

use warpwire::verbs::{Access, Atomic, CompletionKind, Fence, Op, Remote, Request, Status};

use crate::rxe::lab::Bench;
use crate::rxe::peer::{ALL_ACCESS, FENCE, INLINE, Post, WINDOWS};
use crate::rxe::world::{Terms, World};
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

/// Runs it at every MTU and length: the world, a number that differs each time, and the length.
fn everywhere(bench: &Bench, act: fn(&mut World, u64, usize)) {
    for mtu in MTUS {
        let mut world = World::open(bench, Terms { mtu, ..Terms::default() });
        for (n, len) in SIZES.into_iter().enumerate() {
            act(&mut world, u64::from(mtu) + n as u64, len);
        }
    }
}

fn we_write(bench: &Bench) {
    everywhere(bench, |world, n, len| {
        let (from, to) = (n % 13, n % 17);
        world.near.fill(from, len, n);
        let range = [world.near.mr.sge(from, len as u32)];
        world.post(Request::new(n, Op::Write(world.far.remote(to))).with(&range));
        world.done(n);
        let far = world.far;
        world.peer.check(&far, to, len, n);
    });
}

fn they_write(bench: &Bench) {
    everywhere(bench, |world, n, len| {
        let (from, to, far) = (n % 13, n % 17, world.far);
        world.peer.fill(&far, from, len, n);
        let remote = world.near.mr.remote(to);
        world.peer.post(&far, Post::new(n, "write").from(from, len as u32).at(remote));
        world.peer.done(n);
        world.near.check(to, len, n);
    });
}

fn we_read(bench: &Bench) {
    everywhere(bench, |world, n, len| {
        let (from, to, far) = (n % 13, n % 17, world.far);
        world.peer.fill(&far, from, len, n);
        let range = [world.near.mr.sge(to, len as u32)];
        world.post(Request::new(n, Op::Read(far.remote(from))).with(&range));
        assert_eq!(world.done(n).len as usize, len);
        world.near.check(to, len, n);
    });
}

fn they_read(bench: &Bench) {
    everywhere(bench, |world, n, len| {
        let (from, to, far) = (n % 13, n % 17, world.far);
        world.near.fill(from, len, n);
        let remote = world.near.mr.remote(from);
        world.peer.post(&far, Post::new(n, "read").from(to, len as u32).at(remote));
        world.peer.done(n);
        world.peer.check(&far, to, len, n);
    });
}

fn we_send(bench: &Bench) {
    everywhere(bench, |world, n, len| {
        let (from, to, far) = (n % 13, n % 17, world.far);
        world.near.fill(from, len, n);
        // The receive has room for more than comes.
        world.peer.receive(0, n, &far, to, len as u32 + 3);
        let range = [world.near.mr.sge(from, len as u32)];
        world.post(Request::new(n, Op::Send).with(&range));
        world.done(n);
        assert_eq!(world.peer.done(n).len as usize, len);
        world.peer.check(&far, to, len, n);
    });
}

fn they_send(bench: &Bench) {
    everywhere(bench, |world, n, len| {
        let (from, to, far) = (n % 13, n % 17, world.far);
        world.peer.fill(&far, from, len, n);
        world.receive(n, to, len as u32 + 3);
        world.peer.post(&far, Post::new(n, "send").from(from, len as u32));
        world.peer.done(n);
        let done = world.done(n);
        assert_eq!((done.len as usize, done.kind), (len, CompletionKind::Receive));
        world.near.check(to, len, n);
    });
}

fn immediates(bench: &Bench) {
    const IMM: u32 = 0x0102_fdfe;
    let mut world = World::open(bench, Terms::default());
    let far = world.far;
    for (n, len) in [0_u64, 5, 1024, 5000].into_iter().enumerate() {
        let (n, size) = (n as u64, len as u32);
        let range = [world.near.mr.sge(0, size)];
        world.near.fill(0, len as usize, n);
        world.peer.receive(0, n, &far, 0, 6000);
        world.post(Request::new(n, Op::SendImm(IMM.to_be_bytes())).with(&range));
        world.done(n);
        let done = world.peer.done(n);
        assert_eq!((done.imm, done.len), (IMM.into(), len));
        world.peer.check(&far, 0, len as usize, n);

        world.peer.receive(0, n, &far, 0, 0);
        let op = Op::WriteImm(far.remote(8192), IMM.to_be_bytes());
        world.post(Request::new(n, op).with(&range));
        world.done(n);
        let done = world.peer.done(n);
        assert_eq!((done.imm, done.len), (IMM.into(), len));
        world.peer.check(&far, 8192, len as usize, n);

        world.peer.fill(&far, 0, len as usize, n + 50);
        world.receive(n, 0, 6000);
        let send = Post::new(n, "send_imm").from(0, size);
        world.peer.post(&far, Post { first: IMM.into(), ..send });
        world.peer.done(n);
        let done = world.done(n);
        assert_eq!(done.kind, CompletionKind::ReceiveImm(IMM.to_be_bytes()));
        assert_eq!(u64::from(done.len), len);
        world.near.check(0, len as usize, n + 50);

        world.receive(n, 0, 0);
        let write = Post::new(n, "write_imm").from(0, size).at(world.near.mr.remote(8192));
        world.peer.post(&far, Post { first: IMM.into(), ..write });
        world.peer.done(n);
        let done = world.done(n);
        assert_eq!(done.kind, CompletionKind::WriteImm(IMM.to_be_bytes()));
        assert_eq!(u64::from(done.len), len);
        world.near.check(8192, len as usize, n + 50);
    }
}

/// What an atomic finds, what it is given, and what it leaves.
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
    let mut world = World::open(bench, Terms::default());
    let far = world.far;
    for (n, Change { before, op, after }) in changes().into_iter().enumerate() {
        let n = n as u64;
        world.peer.put(&far, 64, before);
        let range = [world.near.mr.sge(128, 8)];
        world.post(Request::new(n, Op::Atomic(far.remote(64), op)).with(&range));
        world.done(n);
        assert_eq!((world.near.get(128), world.peer.get(&far, 64)), (before, after));

        world.near.put(64, before);
        let (name, first, second) = match op {
            Atomic::FetchAdd { add } => ("fadd", add, 0),
            Atomic::CompareSwap { compare, swap } => ("cas", compare, swap),
            _ => unreachable!("rxe has these two"),
        };
        let post = Post::new(n, name).from(128, 8).at(world.near.mr.remote(64));
        world.peer.post(&far, Post { first, second, ..post });
        world.peer.done(n);
        assert_eq!((world.peer.get(&far, 128), world.near.get(64)), (before, after));
    }
}

fn sequence_numbers_wrap(bench: &Bench) {
    let psn = [0xff_fffc, 0xff_fff9];
    let mut world = World::open(bench, Terms { mtu: 256, psn, ..Terms::default() });
    let far = world.far;
    for n in 0..4 {
        // Each is of several packets, so that the wrap falls into the middle of one.
        let len = 1000 + n as usize;
        world.near.fill(0, len, n);
        let range = [world.near.mr.sge(0, len as u32)];
        world.post(Request::new(n, Op::Write(far.remote(0))).with(&range));
        world.done(n);
        world.peer.check(&far, 0, len, n);
        let range = [world.near.mr.sge(4096, len as u32)];
        world.post(Request::new(n, Op::Read(far.remote(0))).with(&range));
        world.done(n);
        world.near.check(4096, len, n);

        world.peer.fill(&far, 8192, len, n + 9);
        let write = Post::new(n, "write").from(8192, len as u32).at(world.near.mr.remote(8192));
        world.peer.post(&far, write);
        world.peer.done(n);
        world.near.check(8192, len, n + 9);
        let read = Post::new(n, "read").from(16384, len as u32).at(world.near.mr.remote(8192));
        world.peer.post(&far, read);
        world.peer.done(n);
        world.peer.check(&far, 16384, len, n + 9);
        let add = Post::new(n, "fadd").from(32768, 8).at(world.near.mr.remote(32768));
        world.peer.post(&far, Post { first: 1, ..add });
        world.peer.done(n);
        assert_eq!((world.near.get(32768), world.peer.get(&far, 32768)), (n + 1, n));
    }
    world.works();
}

fn long_messages(bench: &Bench) {
    const LEN: usize = (1 << 20) + 1;
    let terms = Terms { mtu: 4096, memory: 1 << 21, ..Terms::default() };
    let mut world = World::open(bench, terms);
    let far = world.far;
    world.near.fill(0, LEN, 1);
    let range = [world.near.mr.sge(0, LEN as u32)];
    world.post(Request::new(1, Op::Write(far.remote(0))).with(&range));
    world.done(1);
    world.peer.check(&far, 0, LEN, 1);
    world.peer.receive(0, 2, &far, 3, LEN as u32);
    world.post(Request::new(2, Op::Send).with(&range));
    world.done(2);
    world.peer.done(2);
    world.peer.check(&far, 3, LEN, 1);

    world.peer.fill(&far, 0, LEN, 2);
    world.post(Request::new(3, Op::Read(far.remote(0))).with(&range));
    world.done(3);
    world.near.check(0, LEN, 2);
    world.peer.fill(&far, 0, LEN, 3);
    world.peer.post(&far, Post::new(4, "write").from(0, LEN as u32).at(world.near.mr.remote(5)));
    world.peer.done(4);
    world.near.check(5, LEN, 3);
    world.peer.fill(&far, 0, LEN, 4);
    world.peer.post(&far, Post::new(5, "read").from(0, LEN as u32).at(world.near.mr.remote(5)));
    world.peer.done(5);
    world.peer.check(&far, 0, LEN, 3);
    world.receive(6, 0, LEN as u32);
    world.peer.post(&far, Post::new(6, "send").from(0, LEN as u32));
    world.peer.done(6);
    world.done(6);
    world.near.check(0, LEN, 3);
}

fn many_reads_at_once(bench: &Bench) {
    const COUNT: u64 = 40;
    for reads in [1, 4, 16] {
        let mut world = World::open(bench, Terms { reads, ..Terms::default() });
        let far = world.far;
        for n in 0..COUNT {
            world.peer.fill(&far, n * 3000, 2500, n);
            world.near.fill(n * 3000, 2500, n + 100);
        }
        let ranges: Vec<_> =
            (0..COUNT).map(|n| [world.near.mr.sge(130_000 + n * 3000, 2500)]).collect();
        let request =
            |n: u64| Request::new(n, Op::Read(far.remote(n * 3000))).with(&ranges[n as usize]);
        world.qp().post_send(&(0..COUNT).map(request).collect::<Vec<_>>()).unwrap();
        for n in 0..COUNT {
            world.done(n);
            world.near.check(130_000 + n * 3000, 2500, n);
        }
        for n in 0..COUNT {
            let at = world.near.mr.remote(n * 3000);
            world.peer.post(&far, Post::new(n, "read").from(130_000 + n * 3000, 2500).at(at));
        }
        for n in 0..COUNT {
            world.peer.done(n);
            world.peer.check(&far, 130_000 + n * 3000, 2500, n + 100);
        }
    }
}

fn fences(bench: &Bench) {
    let mut world = World::open(bench, Terms::default());
    let far = world.far;
    // What is written back must be what was read just before.
    for n in 0..10 {
        world.peer.fill(&far, 0, 5000, n);
        let range = [world.near.mr.sge(0, 5000)];
        let read = Request::new(1, Op::Read(far.remote(0))).with(&range);
        let back = Request::new(2, Op::Write(far.remote(10_000))).with(&range);
        world.qp().post_send(&[read, back.fenced(Fence::Reads)]).unwrap();
        world.done(1);
        world.done(2);
        world.peer.check(&far, 10_000, 5000, n);

        world.near.fill(20_000, 5000, n + 30);
        let read = Post::new(1, "read").from(20_000, 5000).at(world.near.mr.remote(20_000));
        world.peer.post(&far, read);
        let back = Post::new(2, "write").from(20_000, 5000).at(world.near.mr.remote(30_000));
        world.peer.post(&far, Post { flags: FENCE, ..back });
        world.peer.done(1);
        world.peer.done(2);
        world.near.check(30_000, 5000, n + 30);
    }
}

fn inline_data(bench: &Bench) {
    let mut world = World::open(bench, Terms::default());
    let far = world.far;
    world.post(Request::new(1, Op::Write(far.remote(8))).inline(&42_u64.to_le_bytes()));
    world.done(1);
    assert_eq!(world.peer.get(&far, 8), 42);
    world.peer.put(&far, 16, 43);
    let write = Post::new(2, "write").from(16, 8).at(world.near.mr.remote(8));
    world.peer.post(&far, Post { flags: INLINE, ..write });
    world.peer.done(2);
    assert_eq!(world.near.get(8), 43);
}

fn they_invalidate_a_key(bench: &Bench) {
    let mut world = World::open(bench, Terms::default());
    let far = world.far;
    let memory = warpwire::mr::HostMemory::new(4096).unwrap();
    let mr = world.context.register(&world.pd, memory, Access::ALL).unwrap();
    let (key, remote) = (mr.rkey(), mr.remote(0));
    world.peer.post(&far, Post::new(1, "write").from(0, 8).at(remote));
    world.peer.done(1);
    world.receive(2, 0, 64);
    world.peer.post(&far, Post { first: key.into(), ..Post::new(2, "send_inv").from(0, 8) });
    world.peer.done(2);
    assert_eq!(world.done(2).kind, CompletionKind::ReceiveInvalidate(key));
    // The key is of no use any more.
    world.peer.post(&far, Post::new(3, "write").from(0, 8).at(remote));
    world.peer.failed(3, Status::RemoteAccess);
}

fn we_invalidate_a_key(bench: &Bench) {
    let mut world = World::open(bench, Terms::default());
    // rxe invalidates windows only.
    let memory = world.peer.memory(4096, ALL_ACCESS | WINDOWS);
    let key = world.peer.ok(&format!("window 0 {}", memory.number))[0] as u32;
    let remote = Remote { rkey: key, ..memory.remote(8) };
    world.post(Request::new(1, Op::Write(remote)).inline(&42_u64.to_le_bytes()));
    world.done(1);
    assert_eq!(world.peer.get(&memory, 8), 42);
    world.peer.receive(0, 2, &memory, 64, 64);
    world.post(Request::new(2, Op::SendInvalidate(key)).inline(b"no more"));
    world.done(2);
    let done = world.peer.done(2);
    assert_eq!((done.imm, done.len), (key.into(), 7));
    world.post(Request::new(3, Op::Write(remote)).inline(&43_u64.to_le_bytes()));
    world.failed(3, Status::RemoteAccess);
    assert_eq!(world.peer.get(&memory, 8), 42);
}
