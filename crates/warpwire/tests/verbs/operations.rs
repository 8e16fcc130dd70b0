//! Every operation, with sizes and alignments that are odd, over every sort of memory.

use warpwire::mlx5::AtomicWidth;
use warpwire::verbs::{
    Atomic, Completion, CompletionKind, Fence, Op, QpOptions, ReceiveRequest, Request, Sge,
};
use warpwire::verbs::{Mtu, Status};

use crate::verbs::fixture::{Fixture, Joined, KINDS, Kind, Patch, World, same};
use testkit::cases;

cases!(Fixture; CASES:
    writes_arrive,
    reads_arrive,
    messages_arrive,
    large_transfers,
    every_mtu,
    ranges_are_joined,
    inline_up_to_the_limit,
    immediates_and_invalidation,
    atomics_of_every_sort,
    masked_atomics,
    local_work,
    waiting_for_another_queue,
    entries_wrap_in_the_ring,
    fences_keep_order,
    atomics_under_contention,
);

const SIZES: [usize; 18] =
    [0, 1, 2, 3, 4, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097, 65535];
const GUARD: u8 = 0xa5;

/// Source and target, on either side, of one kind.
struct Field {
    world: World,
    joined: Joined,
    near: Patch,
    far: Patch,
}

impl Field {
    fn new(fixture: &Fixture, kind: Kind, len: u64, options: QpOptions) -> Self {
        let world = fixture.world();
        let joined = world.join(options);
        let near = fixture.memory(&world.a, kind, len, crate::verbs::fixture::ALL);
        let far = fixture.memory(&world.b, kind, len, crate::verbs::fixture::ALL);
        Self { world, joined, near, far }
    }

    fn send(&self, request: Request<'_>) -> Completion {
        let id = request.id;
        self.joined.a.qp.post_send(&[request]).unwrap();
        self.world.done(&self.joined.a.sends, id)
    }

    fn receive_into(&self, id: u64, data: &[Sge]) {
        self.joined.b.qp.post_receive(&[ReceiveRequest { id, data }]).unwrap();
    }

    fn received(&self, id: u64) -> Completion {
        self.world.done(&self.joined.b.receives, id)
    }
}

/// Guard bytes around the place at `offset`.
fn guard(patch: &Patch, offset: u64, len: usize) {
    patch.write(offset - 64, &vec![GUARD; len + 128]);
}

/// The place holds `wanted`, and around it nothing has changed.
fn expect(patch: &Patch, offset: u64, wanted: &[u8], what: &str) {
    let found = patch.read(offset - 64, wanted.len() + 128);
    same(&found[..64], &[GUARD; 64], &format!("{what}, before it"));
    same(&found[64..64 + wanted.len()], wanted, what);
    same(&found[64 + wanted.len()..], &[GUARD; 64], &format!("{what}, behind it"));
}

fn writes_arrive(fixture: &Fixture) {
    for kind in KINDS {
        let field = Field::new(fixture, kind, 1 << 17, QpOptions::default());
        for (n, len) in SIZES.into_iter().enumerate() {
            let (from, to) = (100 + n as u64 * 7 % 13, 100 + n as u64 * 5 % 17);
            let wanted = field.near.pattern(from, len, n as u64);
            guard(&field.far, to, len);
            let range = [field.near.mr.sge(from, len as u32)];
            let done =
                field.send(Request::new(n as u64, Op::Write(field.far.mr.remote(to))).with(&range));
            assert_eq!(done.kind, CompletionKind::Send(warpwire::mlx5::Opcode::RdmaWrite));
            expect(&field.far, to, &wanted, &format!("{len} bytes written, {kind:?}"));
        }
    }
}

fn reads_arrive(fixture: &Fixture) {
    for kind in KINDS {
        let field = Field::new(fixture, kind, 1 << 17, QpOptions::default());
        for (n, len) in SIZES.into_iter().enumerate() {
            let (from, to) = (100 + n as u64 * 7 % 13, 100 + n as u64 * 5 % 17);
            let wanted = field.far.pattern(from, len, n as u64);
            guard(&field.near, to, len);
            let range = [field.near.mr.sge(to, len as u32)];
            let done = field
                .send(Request::new(n as u64, Op::Read(field.far.mr.remote(from))).with(&range));
            assert_eq!(done.len as usize, len);
            expect(&field.near, to, &wanted, &format!("{len} bytes read, {kind:?}"));
        }
    }
}

fn messages_arrive(fixture: &Fixture) {
    for kind in KINDS {
        let field = Field::new(fixture, kind, 1 << 17, QpOptions::default());
        for (n, len) in SIZES.into_iter().enumerate() {
            let (from, to) = (100 + n as u64 * 7 % 13, 100 + n as u64 * 5 % 17);
            let wanted = field.near.pattern(from, len, n as u64);
            guard(&field.far, to, len);
            // The receive has room for more than comes.
            field.receive_into(n as u64, &[field.far.mr.sge(to, len as u32 + 13)]);
            field.send(
                Request::new(n as u64, Op::Send).with(&[field.near.mr.sge(from, len as u32)]),
            );
            let arrived = field.received(n as u64);
            assert_eq!((arrived.len as usize, arrived.kind), (len, CompletionKind::Receive));
            expect(&field.far, to, &wanted, &format!("message of {len} bytes, {kind:?}"));
        }
    }
}

fn large_transfers(fixture: &Fixture) {
    // A device of the machine may be emulated, which takes its time.
    let largest = if fixture.which.has_device() { 1 << 20 } else { 64 << 20 };
    for (kind, len) in [
        (Kind::Host, largest),
        (Kind::Window, (1 << 20) + 1),
        (Kind::Engine, (1 << 20) + 1),
        (Kind::Staged, (1 << 20) + 1),
    ] {
        let field = Field::new(fixture, kind, len as u64 + 4096, QpOptions::default());
        let wanted = field.near.pattern(1001, len, 9);
        guard(&field.far, 333, len);
        let range = [field.near.mr.sge(1001, len as u32)];
        field.send(Request::new(1, Op::Write(field.far.mr.remote(333))).with(&range));
        expect(&field.far, 333, &wanted, "a large write");
        guard(&field.near, 1001, len);
        field.send(Request::new(2, Op::Read(field.far.mr.remote(333))).with(&range));
        expect(&field.near, 1001, &wanted, "a large read");
        guard(&field.far, 333, len);
        field.receive_into(3, &[field.far.mr.sge(333, len as u32)]);
        field.send(Request::new(4, Op::Send).with(&range));
        assert_eq!(field.received(3).len as usize, len);
        expect(&field.far, 333, &wanted, "a large message");
    }
}

/// How many packets were sent; a device of the machine does not tell.
fn packets_sent(field: &Field) -> u64 {
    field.joined.a.qp.stats().map_or(0, |stats| stats.packets_sent)
}

fn every_mtu(fixture: &Fixture) {
    for mtu in Mtu::ALL {
        if mtu.bytes() > fixture.world().a.context.largest_mtu().bytes() {
            continue;
        }
        let field = Field::new(
            fixture,
            Kind::Host,
            1 << 16,
            QpOptions { mtu: Some(mtu), ..QpOptions::default() },
        );
        let size = mtu.bytes() as usize;
        for (n, len) in
            [1, size - 1, size, size + 1, 3 * size, 3 * size + 5].into_iter().enumerate()
        {
            let id = n as u64;
            let wanted = field.near.pattern(128, len, id);
            let range = [field.near.mr.sge(128, len as u32)];
            guard(&field.far, 256, len);
            let before = packets_sent(&field);
            field.send(Request::new(id, Op::Write(field.far.mr.remote(256))).with(&range));
            let packets = packets_sent(&field) - before;
            let direct = fixture.which.is_direct() && packets == 0;
            let enough = packets >= len.div_ceil(size) as u64;
            assert!(
                enough || direct || field.world.a.is_device(),
                "{packets} packets of {mtu:?} for {len}"
            );
            expect(&field.far, 256, &wanted, &format!("{len} bytes by {mtu:?}"));
            guard(&field.near, 128, len);
            field.send(Request::new(id, Op::Read(field.far.mr.remote(256))).with(&range));
            expect(&field.near, 128, &wanted, &format!("{len} bytes read by {mtu:?}"));
        }
    }
}

/// Several ranges on either side, cut at places that fit neither each other nor the MTU; empty ones among them.
fn ranges_are_joined(fixture: &Fixture) {
    let options = QpOptions { send_ranges: 12, receive_ranges: 12, ..QpOptions::default() };
    for kind in KINDS {
        let field = Field::new(fixture, kind, 1 << 16, options.clone());
        let lens = [1u32, 0, 4095, 3, 0, 256, 7000, 13, 1, 64];
        let total: u32 = lens.iter().sum();
        let (mut near, mut far, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
        let mut at = 200;
        for (n, len) in lens.into_iter().enumerate() {
            wanted.extend(field.near.pattern(at, len as usize, n as u64));
            near.push(field.near.mr.sge(at, len));
            at += u64::from(len) + 17;
        }
        let mut at = 300;
        for len in lens.into_iter().rev() {
            guard(&field.far, at, len as usize);
            far.push(field.far.mr.sge(at, len));
            at += u64::from(len) + 130;
        }
        field.receive_into(1, &far);
        field.send(Request::new(2, Op::Send).with(&near));
        assert_eq!(field.received(1).len, total);
        let mut at = 0;
        for range in &far {
            let (offset, len) = (range.address - field.far.mr.iova(), range.len as usize);
            expect(&field.far, offset, &wanted[at..at + len], "a range of a receive");
            at += len;
        }
        guard(&field.far, 30_000, total as usize);
        field.send(Request::new(3, Op::Write(field.far.mr.remote(30_000))).with(&near));
        expect(&field.far, 30_000, &wanted, "ranges written");
        for range in &near {
            field.near.write(range.address - field.near.mr.iova(), &vec![0; range.len as usize]);
        }
        field.send(Request::new(4, Op::Read(field.far.mr.remote(30_000))).with(&near));
        let found: Vec<u8> = near
            .iter()
            .flat_map(|r| field.near.read(r.address - field.near.mr.iova(), r.len as usize))
            .collect();
        same(&found, &wanted, "ranges read");
    }
}

fn inline_up_to_the_limit(fixture: &Fixture) {
    let options = QpOptions { inline: 900, ..QpOptions::default() };
    let field = Field::new(fixture, Kind::Host, 1 << 16, options);
    let mut bytes = [0; 1000];
    for len in [0usize, 1, 11, 12, 13, 27, 28, 29, 44, 45, 60, 61, 200, 899, 900] {
        warpwire_apps::pattern::fill_bytes(&mut bytes, len as u64, 0);
        guard(&field.far, 128, len);
        let remote = field.far.mr.remote(128);
        let request = Request::new(1, Op::Write(remote)).inline(&bytes[..len]);
        field.joined.a.qp.post_send(&[request]).unwrap();
        let kept = bytes;
        bytes.fill(0xee); // taken when it was posted
        field.world.done(&field.joined.a.sends, 1);
        expect(&field.far, 128, &kept[..len], &format!("{len} inline bytes"));
        field.receive_into(2, &[field.far.mr.sge(4096, 1000)]);
        field.send(Request::new(3, Op::Send).inline(&kept[..len]));
        assert_eq!(field.received(2).len as usize, len);
        same(&field.far.read(4096, len), &kept[..len], "an inline message");
    }
    let longest = [0; 972]; // 61 segments of 16 bytes, less the inline header
    field.send(Request::new(5, Op::Write(field.far.mr.remote(128))).inline(&longest));
    let refused = field.joined.a.qp.post_send(&[Request::new(4, Op::Send).inline(&[0; 989])]);
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("989 bytes do not fit"), "{text}");
    field.world.quiet(&field.joined.a.sends);
}

fn immediates_and_invalidation(fixture: &Fixture) {
    let field = Field::new(fixture, Kind::Host, 1 << 16, QpOptions::default());
    let wanted = field.near.pattern(0, 5000, 3);
    let range = [field.near.mr.sge(0, 5000)];
    field.receive_into(1, &[field.far.mr.sge(0, 5000)]);
    field.send(Request::new(2, Op::SendImm([1, 2, 3, 4])).with(&range));
    let arrived = field.received(1);
    assert_eq!((arrived.kind, arrived.len), (CompletionKind::ReceiveImm([1, 2, 3, 4]), 5000));
    same(&field.far.read(0, 5000), &wanted, "a message with an immediate");
    // A write with an immediate takes a receive, and leaves its memory alone.
    guard(&field.far, 20_000, 5000);
    field.far.write(100, &[7; 64]);
    field.receive_into(3, &[field.far.mr.sge(100, 64)]);
    field.send(Request::new(4, Op::WriteImm(field.far.mr.remote(20_000), [9; 4])).with(&range));
    let arrived = field.received(3);
    assert_eq!((arrived.kind, arrived.len), (CompletionKind::WriteImm([9; 4]), 5000));
    expect(&field.far, 20_000, &wanted, "a write with an immediate");
    same(&field.far.read(100, 64), &[7; 64], "the receive of a write");
    if field.world.b.is_device() {
        return; // peers invalidate memory windows there, and no plain registration
    }
    field.receive_into(5, &[]);
    field.send(Request::new(6, Op::WriteImm(field.far.mr.remote(0), [8; 4])));
    assert_eq!(field.received(5).len, 0);
    // Invalidation: the key is dead when the receive completes.
    let victim = fixture.host(&field.world.b, 4096);
    field.receive_into(7, &[]);
    field.send(Request::new(8, Op::SendInvalidate(victim.mr.rkey())));
    assert_eq!(field.received(7).kind, CompletionKind::ReceiveInvalidate(victim.mr.rkey()));
    field
        .joined
        .a
        .qp
        .post_send(&[Request::new(9, Op::Write(victim.mr.remote(0))).inline(b"x")])
        .unwrap();
    field.world.failed(&field.joined.a.sends, 9, Status::RemoteAccess);
    same(&victim.read(0, 1), &[0], "memory behind a key that is no more");
}

fn atomics_of_every_sort(fixture: &Fixture) {
    for kind in KINDS {
        let field = Field::new(fixture, kind, 4096, QpOptions::default());
        let run = |op: Atomic, before: u64| {
            field.far.write(64, &before.to_ne_bytes());
            guard(&field.near, 128, 8);
            let request = Request::new(1, Op::Atomic(field.far.mr.remote(64), op));
            let done = field.send(request.with(&[field.near.mr.sge(128, 8)]));
            assert_eq!(done.len, 8);
            expect(&field.near, 128, &before.to_ne_bytes(), "the value before");
            field.far.word(64)
        };
        assert_eq!(run(Atomic::FetchAdd { add: 5 }, u64::MAX - 1), 3);
        assert_eq!(run(Atomic::FetchAdd { add: u64::MAX }, 10), 9);
        assert_eq!(run(Atomic::CompareSwap { compare: 7, swap: 99 }, 7), 99);
        assert_eq!(run(Atomic::CompareSwap { compare: 8, swap: 99 }, 7), 7);
    }
}

fn masked_atomics(fixture: &Fixture) {
    for kind in KINDS {
        masked_atomics_on(&Field::new(fixture, kind, 4096, QpOptions::default()));
    }
}

fn masked_atomics_on(field: &Field) {
    let eight = |op: Atomic, before: u64| {
        field.far.write(64, &before.to_ne_bytes());
        let request = Request::new(1, Op::Atomic(field.far.mr.remote(64), op));
        field.send(request.with(&[field.near.mr.sge(128, 8)]));
        assert_eq!(field.near.word(128), before);
        field.far.word(64)
    };
    let width = AtomicWidth::Eight;
    let add = |add, boundary| Atomic::MaskedFetchAdd { width, add, boundary };
    assert_eq!(eight(add(1, 0), u64::MAX), 0);
    assert_eq!(eight(add(0xf0f0, u64::MAX), 0xff00), 0x0ff0); // no carry at all: exclusive or
    assert_eq!(eight(add(1, 1 << 7), 0xff), 0); // two fields, the carry stops between them
    let swap = |compare, swap, compare_mask, swap_mask| Atomic::MaskedCompareSwap {
        width,
        compare,
        swap,
        compare_mask,
        swap_mask,
    };
    assert_eq!(eight(swap(0x12, 0xabcd, 0xff, 0xff00), 0x9912), 0xab12);
    assert_eq!(eight(swap(0x13, 0xabcd, 0xff, 0xff00), 0x9912), 0x9912);
    assert_eq!(eight(swap(0, 0xabcd, 0, u64::MAX), 0x9912), 0xabcd);

    let four = |op: Atomic, before: u32| {
        field.far.write(64, &[0x77; 12]);
        field.far.write(68, &before.to_ne_bytes());
        guard(&field.near, 128, 4);
        let request = Request::new(1, Op::Atomic(field.far.mr.remote(68), op));
        let done = field.send(request.with(&[field.near.mr.sge(128, 4)]));
        assert_eq!(done.len, 4);
        expect(&field.near, 128, &before.to_be_bytes(), "the value before, big-endian");
        same(&field.far.read(64, 4), &[0x77; 4], "the word before it");
        same(&field.far.read(72, 4), &[0x77; 4], "the word behind it");
        u32::from_ne_bytes(field.far.read(68, 4).try_into().unwrap())
    };
    let width = AtomicWidth::Four;
    assert_eq!(four(Atomic::MaskedFetchAdd { width, add: 3, boundary: 0 }, u32::MAX), 2);
    let swap =
        Atomic::MaskedCompareSwap { width, compare: 1, swap: 2, compare_mask: 3, swap_mask: 0xf };
    assert_eq!(four(swap, 0x1235), 0x1232);
}

fn local_work(fixture: &Fixture) {
    let field = Field::new(fixture, Kind::Host, 4096, QpOptions::default());
    field.send(Request::new(1, Op::Nop));
    field.send(Request::new(2, Op::Dump).with(&[field.near.mr.sge(0, 4096)]));
    let before = field.joined.a.qp.stats().unwrap().packets_sent;
    let nop = |id| Request::new(id, Op::Nop);
    field.joined.a.qp.post_send(&[nop(3), nop(4).unsignaled(), nop(5)]).unwrap();
    for id in [3, 4, 5] {
        field.world.done(&field.joined.a.sends, id); // signal_all
    }
    assert_eq!(field.joined.a.qp.stats().unwrap().packets_sent, before, "they send nothing");
    field
        .joined
        .a
        .qp
        .post_send(&[Request::new(6, Op::Dump).with(&[field.near.mr.sge(1, 4096)])])
        .unwrap();
    field.world.failed(&field.joined.a.sends, 6, Status::LocalProtection);
}

/// A queue pair of the same device stands still until another's completion queue is so far.
fn waiting_for_another_queue(fixture: &Fixture) {
    let world = fixture.world();
    let (main, other) = (world.join(QpOptions::default()), world.join(QpOptions::default()));
    let far = fixture.host(&world.b, 4096);
    let wait = Op::Wait { cqn: main.a.sends.number(), index: 1 };
    let write = Request::new(2, Op::Write(far.mr.remote(0))).inline(b"go");
    other.a.qp.post_send(&[Request::new(1, wait), write]).unwrap();
    world.drive_for(std::time::Duration::from_millis(5));
    same(&far.read(0, 2), &[0; 2], "a write that waits");
    main.a.qp.post_send(&[Request::new(3, Op::Nop)]).unwrap();
    world.done(&main.a.sends, 3);
    world.drive_for(std::time::Duration::from_millis(5));
    same(&far.read(0, 2), &[0; 2], "a write that waits for one more");
    main.a.qp.post_send(&[Request::new(4, Op::Nop)]).unwrap();
    world.done(&main.a.sends, 4);
    world.done(&other.a.sends, 1);
    world.done(&other.a.sends, 2);
    same(&far.read(0, 2), b"go", "a write that has waited");
    // What is there already is not waited for, and no queue is never there.
    other.a.qp.post_send(&[Request::new(5, wait)]).unwrap();
    world.done(&other.a.sends, 5);
    let nobody = Op::Wait { cqn: 0xabcdef, index: 0 };
    other.a.qp.post_send(&[Request::new(6, nobody), Request::new(7, Op::Nop)]).unwrap();
    world.quiet(&other.a.sends);
    world.works(&main);
}

/// Entries of three blocks in a ring of a power of two: each place in the ring is in the middle of one, sometime.
fn entries_wrap_in_the_ring(fixture: &Fixture) {
    let options = QpOptions { send_depth: 4, inline: 150, ..QpOptions::default() };
    let field = Field::new(fixture, Kind::Host, 4096, options);
    let mut bytes = [0; 150];
    for round in 0..300 {
        let len = 1 + (round * 37) % 150;
        warpwire_apps::pattern::fill_bytes(&mut bytes[..len], round as u64, 0);
        guard(&field.far, 64, len);
        let request = Request::new(round as u64, Op::Write(field.far.mr.remote(64)));
        field.send(request.inline(&bytes[..len]));
        expect(&field.far, 64, &bytes[..len], &format!("round {round}"));
    }
}

/// What is sent behind a fence carries what was read before it.
fn fences_keep_order(fixture: &Fixture) {
    let field = Field::new(fixture, Kind::Host, 1 << 18, QpOptions::default());
    let strongest = if field.world.a.is_device() { Fence::Reads } else { Fence::All };
    for (round, fence) in [Fence::Reads, strongest].into_iter().cycle().take(20).enumerate() {
        let wanted = field.far.pattern(0, 60_000, round as u64);
        field.near.write(0, &vec![0; 60_000]);
        let range = [field.near.mr.sge(0, 60_000)];
        let read = Request::new(1, Op::Read(field.far.mr.remote(0))).with(&range).unsignaled();
        let back = Op::Write(field.far.mr.remote(100_000));
        let write = Request::new(2, back).with(&range).fenced(fence);
        field.joined.a.qp.post_send(&[read, write]).unwrap();
        field.world.done(&field.joined.a.sends, 1);
        field.world.done(&field.joined.a.sends, 2);
        same(&field.far.read(100_000, 60_000), &wanted, "what was read, then written");
    }
}

/// Eight queue pairs count in one word; every value before is seen once.
fn atomics_under_contention(fixture: &Fixture) {
    const EACH: u64 = 100;
    for kind in [Kind::Host, Kind::Window] {
        let world = fixture.world();
        let far = fixture.memory(&world.b, kind, 4096, crate::verbs::fixture::ALL);
        let near = fixture.host(&world.a, 8 * EACH * 8);
        let all: Vec<_> = (0..8).map(|_| world.join(QpOptions::default())).collect();
        for (n, joined) in all.iter().enumerate() {
            for turn in 0..EACH {
                let place = (n as u64 * EACH + turn) * 8;
                let add = Op::Atomic(far.mr.remote(8), Atomic::FetchAdd { add: 1 });
                joined
                    .a
                    .qp
                    .post_send(&[Request::new(turn, add).with(&[near.mr.sge(place, 8)])])
                    .unwrap();
            }
        }
        for joined in &all {
            for turn in 0..EACH {
                world.done(&joined.a.sends, turn);
            }
        }
        assert_eq!(far.word(8), 8 * EACH);
        let mut seen: Vec<_> = (0..8 * EACH).map(|n| near.word(n * 8)).collect();
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..8 * EACH), "every value before is seen once");
    }
}
