//! Every operation, with odd sizes and alignments, on every kind of memory.

use std::sync::Arc;

use parking_lot::Mutex;
use warpwire::mem::Allocation;
use warpwire::mlx5::AtomicWidth;
use warpwire::mr::{AccessDenied, CustomMemory, MemorySource};
use warpwire::verbs::{
    Atomic, Completion, CompletionKind, Fence, QpOptions, ReceiveRequest, SendRequest, Sge, WrOp,
};
use warpwire::verbs::{Mtu, Status};

use crate::verbs::fixture::{Fixture, KINDS, Kind, QpPair, TestBuffer, Testbed, same};
use testkit::{Effort, cases};

cases!(Fixture; CASES:
    writes_arrive,
    reads_arrive,
    messages_arrive,
    large_transfers,
    every_mtu,
    scatter_gather_lists,
    inline_up_to_the_limit,
    immediates_and_invalidation,
    atomics_of_every_kind,
    masked_atomics,
    local_work,
    waiting_for_another_queue,
    wqes_wrap_in_the_ring,
    fences_keep_order,
    atomics_under_contention,
    writes_are_there_before_a_later_atomic,
);

const SIZES: [usize; 18] =
    [0, 1, 2, 3, 4, 63, 64, 65, 255, 256, 257, 1023, 1024, 1025, 4095, 4096, 4097, 65535];
const GUARD: u8 = 0xa5;

/// Two connected queue pairs with a buffer of the same kind at each end.
struct TransferTest {
    testbed: Testbed,
    conn: QpPair,
    near: TestBuffer,
    far: TestBuffer,
}

impl TransferTest {
    fn new(fixture: &Fixture, kind: Kind, len: u64, options: QpOptions) -> Self {
        let testbed = fixture.testbed();
        let conn = testbed.join(options);
        let near = fixture.memory(&testbed.a, kind, len, crate::verbs::fixture::ALL);
        let far = fixture.memory(&testbed.b, kind, len, crate::verbs::fixture::ALL);
        Self { testbed, conn, near, far }
    }

    fn send(&self, request: SendRequest<'_>) -> Completion {
        let id = request.id;
        self.conn.a.qp.post_send(&[request]).unwrap();
        self.testbed.done(&self.conn.a.sends, id)
    }

    fn receive_into(&self, id: u64, data: &[Sge]) {
        self.conn.b.qp.post_receive(&[ReceiveRequest { id, data }]).unwrap();
    }

    fn received(&self, id: u64) -> Completion {
        self.testbed.done(&self.conn.b.receives, id)
    }
}

/// Fills the range at `offset`, and 64 bytes on either side, with guard bytes.
fn guard(buffer: &TestBuffer, offset: u64, len: usize) {
    buffer.write(offset - 64, &vec![GUARD; len + 128]);
}

/// Asserts that the range holds `wanted` and that the guard bytes are intact.
fn expect(buffer: &TestBuffer, offset: u64, wanted: &[u8], what: &str) {
    let found = buffer.read(offset - 64, wanted.len() + 128);
    same(&found[..64], &[GUARD; 64], &format!("{what}: guard before it"));
    same(&found[64..64 + wanted.len()], wanted, what);
    same(&found[64 + wanted.len()..], &[GUARD; 64], &format!("{what}: guard after it"));
}

fn writes_arrive(fixture: &Fixture) {
    for kind in KINDS {
        let transfer = TransferTest::new(fixture, kind, 1 << 17, QpOptions::default());
        for (n, len) in SIZES.into_iter().enumerate() {
            let (from, to) = (100 + n as u64 * 7 % 13, 100 + n as u64 * 5 % 17);
            let wanted = transfer.near.pattern(from, len, n as u64);
            guard(&transfer.far, to, len);
            let range = [transfer.near.mr.sge(from, len as u32)];
            let done = transfer.send(
                SendRequest::new(n as u64, WrOp::Write(transfer.far.mr.remote(to))).with(&range),
            );
            assert_eq!(done.kind, CompletionKind::Send(warpwire::mlx5::WqeOpcode::RdmaWrite));
            expect(&transfer.far, to, &wanted, &format!("{len} bytes written, {kind:?}"));
        }
    }
}

fn reads_arrive(fixture: &Fixture) {
    for kind in KINDS {
        let transfer = TransferTest::new(fixture, kind, 1 << 17, QpOptions::default());
        for (n, len) in SIZES.into_iter().enumerate() {
            let (from, to) = (100 + n as u64 * 7 % 13, 100 + n as u64 * 5 % 17);
            let wanted = transfer.far.pattern(from, len, n as u64);
            guard(&transfer.near, to, len);
            let range = [transfer.near.mr.sge(to, len as u32)];
            let done = transfer.send(
                SendRequest::new(n as u64, WrOp::Read(transfer.far.mr.remote(from))).with(&range),
            );
            assert_eq!(done.len as usize, len);
            expect(&transfer.near, to, &wanted, &format!("{len} bytes read, {kind:?}"));
        }
    }
}

fn messages_arrive(fixture: &Fixture) {
    for kind in KINDS {
        let transfer = TransferTest::new(fixture, kind, 1 << 17, QpOptions::default());
        for (n, len) in SIZES.into_iter().enumerate() {
            let (from, to) = (100 + n as u64 * 7 % 13, 100 + n as u64 * 5 % 17);
            let wanted = transfer.near.pattern(from, len, n as u64);
            guard(&transfer.far, to, len);
            // The receive is longer than the message.
            transfer.receive_into(n as u64, &[transfer.far.mr.sge(to, len as u32 + 13)]);
            transfer.send(
                SendRequest::new(n as u64, WrOp::Send)
                    .with(&[transfer.near.mr.sge(from, len as u32)]),
            );
            let arrived = transfer.received(n as u64);
            assert_eq!((arrived.len as usize, arrived.kind), (len, CompletionKind::Receive));
            expect(&transfer.far, to, &wanted, &format!("message of {len} bytes, {kind:?}"));
        }
    }
}

fn large_transfers(fixture: &Fixture) {
    // An RDMA device of the machine may be emulated and slow.
    let max_len = match fixture.test_link.has_device() {
        true => 1 << 20,
        false => Effort::choose([20 << 20, 20 << 20, 64 << 20]),
    };
    for (kind, len) in [
        (Kind::Host, max_len),
        (Kind::Window, (1 << 20) + 1),
        (Kind::Engine, (1 << 20) + 1),
        (Kind::Staged, (1 << 20) + 1),
    ] {
        let transfer = TransferTest::new(fixture, kind, len as u64 + 4096, QpOptions::default());
        let wanted = transfer.near.pattern(1001, len, 9);
        guard(&transfer.far, 333, len);
        let range = [transfer.near.mr.sge(1001, len as u32)];
        transfer.send(SendRequest::new(1, WrOp::Write(transfer.far.mr.remote(333))).with(&range));
        expect(&transfer.far, 333, &wanted, "a large write");
        guard(&transfer.near, 1001, len);
        transfer.send(SendRequest::new(2, WrOp::Read(transfer.far.mr.remote(333))).with(&range));
        expect(&transfer.near, 1001, &wanted, "a large read");
        guard(&transfer.far, 333, len);
        transfer.receive_into(3, &[transfer.far.mr.sge(333, len as u32)]);
        transfer.send(SendRequest::new(4, WrOp::Send).with(&range));
        assert_eq!(transfer.received(3).len as usize, len);
        expect(&transfer.far, 333, &wanted, "a large message");
    }
}

/// Packets sent; 0 for an RDMA device of the machine, which does not count them.
fn packets_sent(transfer: &TransferTest) -> u64 {
    transfer.conn.a.qp.stats().map_or(0, |stats| stats.packets_sent)
}

fn every_mtu(fixture: &Fixture) {
    for mtu in Mtu::ALL {
        if mtu.bytes() > fixture.testbed().a.context.max_mtu().bytes() {
            continue;
        }
        let transfer =
            TransferTest::new(fixture, Kind::Host, 1 << 16, QpOptions::default().with_mtu(mtu));
        let size = mtu.bytes() as usize;
        for (n, len) in
            [1, size - 1, size, size + 1, 3 * size, 3 * size + 5].into_iter().enumerate()
        {
            let id = n as u64;
            let wanted = transfer.near.pattern(128, len, id);
            let range = [transfer.near.mr.sge(128, len as u32)];
            guard(&transfer.far, 256, len);
            let before = packets_sent(&transfer);
            transfer
                .send(SendRequest::new(id, WrOp::Write(transfer.far.mr.remote(256))).with(&range));
            let packets = packets_sent(&transfer) - before;
            let direct = fixture.test_link.is_direct() && packets == 0;
            let enough = packets >= len.div_ceil(size) as u64;
            assert!(
                enough || direct || transfer.testbed.a.is_device(),
                "{packets} packets of {mtu:?} for {len}"
            );
            expect(&transfer.far, 256, &wanted, &format!("{len} bytes by {mtu:?}"));
            guard(&transfer.near, 128, len);
            transfer
                .send(SendRequest::new(id, WrOp::Read(transfer.far.mr.remote(256))).with(&range));
            expect(&transfer.near, 128, &wanted, &format!("{len} bytes read by {mtu:?}"));
        }
    }
}

/// Scatter-gather lists at both ends, with lengths that match neither each other nor the MTU, and
/// empty ranges among them.
fn scatter_gather_lists(fixture: &Fixture) {
    let options = QpOptions::default().with_max_send_sge(12).with_max_recv_sge(12);
    for kind in KINDS {
        let transfer = TransferTest::new(fixture, kind, 1 << 16, options.clone());
        let lens = [1u32, 0, 4095, 3, 0, 256, 7000, 13, 1, 64];
        let total: u32 = lens.iter().sum();
        let (mut near, mut far, mut wanted) = (Vec::new(), Vec::new(), Vec::new());
        let mut at = 200;
        for (n, len) in lens.into_iter().enumerate() {
            wanted.extend(transfer.near.pattern(at, len as usize, n as u64));
            near.push(transfer.near.mr.sge(at, len));
            at += u64::from(len) + 17;
        }
        let mut at = 300;
        for len in lens.into_iter().rev() {
            guard(&transfer.far, at, len as usize);
            far.push(transfer.far.mr.sge(at, len));
            at += u64::from(len) + 130;
        }
        transfer.receive_into(1, &far);
        transfer.send(SendRequest::new(2, WrOp::Send).with(&near));
        assert_eq!(transfer.received(1).len, total);
        let mut at = 0;
        for range in &far {
            let (offset, len) = (range.address - transfer.far.mr.iova(), range.len as usize);
            expect(&transfer.far, offset, &wanted[at..at + len], "a range of a receive");
            at += len;
        }
        guard(&transfer.far, 30_000, total as usize);
        transfer.send(SendRequest::new(3, WrOp::Write(transfer.far.mr.remote(30_000))).with(&near));
        expect(&transfer.far, 30_000, &wanted, "ranges written");
        for range in &near {
            transfer
                .near
                .write(range.address - transfer.near.mr.iova(), &vec![0; range.len as usize]);
        }
        transfer.send(SendRequest::new(4, WrOp::Read(transfer.far.mr.remote(30_000))).with(&near));
        let found: Vec<u8> = near
            .iter()
            .flat_map(|r| transfer.near.read(r.address - transfer.near.mr.iova(), r.len as usize))
            .collect();
        same(&found, &wanted, "ranges read");
    }
}

fn inline_up_to_the_limit(fixture: &Fixture) {
    let options = QpOptions::default().with_max_inline_data(900);
    let transfer = TransferTest::new(fixture, Kind::Host, 1 << 16, options);
    let mut bytes = [0; 1000];
    for len in [0usize, 1, 11, 12, 13, 27, 28, 29, 44, 45, 60, 61, 200, 899, 900] {
        warpwire_apps::pattern::fill_bytes(&mut bytes, len as u64, 0);
        guard(&transfer.far, 128, len);
        let remote = transfer.far.mr.remote(128);
        let request = SendRequest::new(1, WrOp::Write(remote)).inline(&bytes[..len]);
        transfer.conn.a.qp.post_send(&[request]).unwrap();
        let kept = bytes;
        bytes.fill(0xee); // copied when it was posted
        transfer.testbed.done(&transfer.conn.a.sends, 1);
        expect(&transfer.far, 128, &kept[..len], &format!("{len} inline bytes"));
        transfer.receive_into(2, &[transfer.far.mr.sge(4096, 1000)]);
        transfer.send(SendRequest::new(3, WrOp::Send).inline(&kept[..len]));
        assert_eq!(transfer.received(2).len as usize, len);
        same(&transfer.far.read(4096, len), &kept[..len], "an inline message");
    }
    let max_inline = [0; 972]; // 61 segments of 16 bytes, less the inline header
    transfer
        .send(SendRequest::new(5, WrOp::Write(transfer.far.mr.remote(128))).inline(&max_inline));
    let refused =
        transfer.conn.a.qp.post_send(&[SendRequest::new(4, WrOp::Send).inline(&[0; 989])]);
    let text = refused.unwrap_err().to_string();
    assert!(text.contains("989 inline bytes do not fit"), "{text}");
    transfer.testbed.expect_no_completion(&transfer.conn.a.sends);
}

fn immediates_and_invalidation(fixture: &Fixture) {
    let transfer = TransferTest::new(fixture, Kind::Host, 1 << 16, QpOptions::default());
    let wanted = transfer.near.pattern(0, 5000, 3);
    let range = [transfer.near.mr.sge(0, 5000)];
    transfer.receive_into(1, &[transfer.far.mr.sge(0, 5000)]);
    transfer.send(SendRequest::new(2, WrOp::SendImm([1, 2, 3, 4])).with(&range));
    let arrived = transfer.received(1);
    assert_eq!((arrived.kind, arrived.len), (CompletionKind::ReceiveImm([1, 2, 3, 4]), 5000));
    same(&transfer.far.read(0, 5000), &wanted, "a message with an immediate");
    // A write with immediate consumes a receive and does not write to its memory.
    guard(&transfer.far, 20_000, 5000);
    transfer.far.write(100, &[7; 64]);
    transfer.receive_into(3, &[transfer.far.mr.sge(100, 64)]);
    transfer.send(
        SendRequest::new(4, WrOp::WriteImm(transfer.far.mr.remote(20_000), [9; 4])).with(&range),
    );
    let arrived = transfer.received(3);
    assert_eq!((arrived.kind, arrived.len), (CompletionKind::WriteImm([9; 4]), 5000));
    expect(&transfer.far, 20_000, &wanted, "a write with an immediate");
    same(&transfer.far.read(100, 64), &[7; 64], "the memory of the consumed receive");
    if transfer.testbed.b.is_device() {
        return; // there only memory windows can be invalidated
    }
    transfer.receive_into(5, &[]);
    transfer.send(SendRequest::new(6, WrOp::WriteImm(transfer.far.mr.remote(0), [8; 4])));
    assert_eq!(transfer.received(5).len, 0);
    // The key is invalid once the receive completes.
    let victim = fixture.host(&transfer.testbed.b, 4096);
    transfer.receive_into(7, &[]);
    transfer.send(SendRequest::new(8, WrOp::SendInvalidate(victim.mr.rkey())));
    assert_eq!(transfer.received(7).kind, CompletionKind::ReceiveInvalidate(victim.mr.rkey()));
    transfer
        .conn
        .a
        .qp
        .post_send(&[SendRequest::new(9, WrOp::Write(victim.mr.remote(0))).inline(b"x")])
        .unwrap();
    transfer.testbed.failed(&transfer.conn.a.sends, 9, Status::RemoteAccess);
    same(&victim.read(0, 1), &[0], "memory behind an invalidated key");
}

fn atomics_of_every_kind(fixture: &Fixture) {
    for kind in KINDS {
        let transfer = TransferTest::new(fixture, kind, 4096, QpOptions::default());
        let run = |op: Atomic, before: u64| {
            transfer.far.write(64, &before.to_ne_bytes());
            guard(&transfer.near, 128, 8);
            let request = SendRequest::new(1, WrOp::Atomic(transfer.far.mr.remote(64), op));
            let done = transfer.send(request.with(&[transfer.near.mr.sge(128, 8)]));
            assert_eq!(done.len, 8);
            expect(&transfer.near, 128, &before.to_ne_bytes(), "the value before the atomic");
            transfer.far.word(64)
        };
        assert_eq!(run(Atomic::FetchAdd { add: 5 }, u64::MAX - 1), 3);
        assert_eq!(run(Atomic::FetchAdd { add: u64::MAX }, 10), 9);
        assert_eq!(run(Atomic::CompareSwap { compare: 7, swap: 99 }, 7), 99);
        assert_eq!(run(Atomic::CompareSwap { compare: 8, swap: 99 }, 7), 7);
    }
}

fn masked_atomics(fixture: &Fixture) {
    for kind in KINDS {
        masked_atomics_on(&TransferTest::new(fixture, kind, 4096, QpOptions::default()));
    }
}

fn masked_atomics_on(transfer: &TransferTest) {
    let eight = |op: Atomic, before: u64| {
        transfer.far.write(64, &before.to_ne_bytes());
        let request = SendRequest::new(1, WrOp::Atomic(transfer.far.mr.remote(64), op));
        transfer.send(request.with(&[transfer.near.mr.sge(128, 8)]));
        assert_eq!(transfer.near.word(128), before);
        transfer.far.word(64)
    };
    let width = AtomicWidth::Eight;
    let add = |add, boundary| Atomic::MaskedFetchAdd { width, add, boundary };
    assert_eq!(eight(add(1, 0), u64::MAX), 0);
    assert_eq!(eight(add(0xf0f0, u64::MAX), 0xff00), 0x0ff0); // no carry at all: XOR
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
        transfer.far.write(64, &[0x77; 12]);
        transfer.far.write(68, &before.to_ne_bytes());
        guard(&transfer.near, 128, 4);
        let request = SendRequest::new(1, WrOp::Atomic(transfer.far.mr.remote(68), op));
        let done = transfer.send(request.with(&[transfer.near.mr.sge(128, 4)]));
        assert_eq!(done.len, 4);
        expect(
            &transfer.near,
            128,
            &before.to_be_bytes(),
            "the value before the atomic, big-endian",
        );
        same(&transfer.far.read(64, 4), &[0x77; 4], "the word before it");
        same(&transfer.far.read(72, 4), &[0x77; 4], "the word after it");
        u32::from_ne_bytes(transfer.far.read(68, 4).try_into().unwrap())
    };
    let width = AtomicWidth::Four;
    assert_eq!(four(Atomic::MaskedFetchAdd { width, add: 3, boundary: 0 }, u32::MAX), 2);
    let swap =
        Atomic::MaskedCompareSwap { width, compare: 1, swap: 2, compare_mask: 3, swap_mask: 0xf };
    assert_eq!(four(swap, 0x1235), 0x1232);
}

fn local_work(fixture: &Fixture) {
    let transfer = TransferTest::new(fixture, Kind::Host, 4096, QpOptions::default());
    transfer.send(SendRequest::new(1, WrOp::Nop));
    transfer.send(SendRequest::new(2, WrOp::Dump).with(&[transfer.near.mr.sge(0, 4096)]));
    let before = transfer.conn.a.qp.stats().unwrap().packets_sent;
    let nop = |id| SendRequest::new(id, WrOp::Nop);
    transfer.conn.a.qp.post_send(&[nop(3), nop(4).unsignaled(), nop(5)]).unwrap();
    for id in [3, 4, 5] {
        transfer.testbed.done(&transfer.conn.a.sends, id); // signal_all
    }
    assert_eq!(transfer.conn.a.qp.stats().unwrap().packets_sent, before, "local work sent packets");
    transfer
        .conn
        .a
        .qp
        .post_send(&[SendRequest::new(6, WrOp::Dump).with(&[transfer.near.mr.sge(1, 4096)])])
        .unwrap();
    transfer.testbed.failed(&transfer.conn.a.sends, 6, Status::LocalProtection);
}

/// A queue pair waits until a completion queue of the same device has reached an index.
fn waiting_for_another_queue(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let (main, other) = (testbed.join(QpOptions::default()), testbed.join(QpOptions::default()));
    let far = fixture.host(&testbed.b, 4096);
    let wait = WrOp::Wait { cqn: main.a.sends.number(), index: 1 };
    let write = SendRequest::new(2, WrOp::Write(far.mr.remote(0))).inline(b"go");
    other.a.qp.post_send(&[SendRequest::new(1, wait), write]).unwrap();
    testbed.poll_for(std::time::Duration::from_millis(5));
    same(&far.read(0, 2), &[0; 2], "a write that waits");
    main.a.qp.post_send(&[SendRequest::new(3, WrOp::Nop)]).unwrap();
    testbed.done(&main.a.sends, 3);
    testbed.poll_for(std::time::Duration::from_millis(5));
    same(&far.read(0, 2), &[0; 2], "a write that waits for one more completion");
    main.a.qp.post_send(&[SendRequest::new(4, WrOp::Nop)]).unwrap();
    testbed.done(&main.a.sends, 4);
    testbed.done(&other.a.sends, 1);
    testbed.done(&other.a.sends, 2);
    same(&far.read(0, 2), b"go", "a write that has waited");
    // An index that is already reached does not wait; a queue that does not exist waits forever.
    other.a.qp.post_send(&[SendRequest::new(5, wait)]).unwrap();
    testbed.done(&other.a.sends, 5);
    let no_such_cq = WrOp::Wait { cqn: 0xabcdef, index: 0 };
    other
        .a
        .qp
        .post_send(&[SendRequest::new(6, no_such_cq), SendRequest::new(7, WrOp::Nop)])
        .unwrap();
    testbed.expect_no_completion(&other.a.sends);
    testbed.check_traffic(&main);
}

/// WQEs of one to three WQEBBs in a power-of-two ring: every WQEBB becomes the middle of a WQE.
fn wqes_wrap_in_the_ring(fixture: &Fixture) {
    let options = QpOptions::default().with_send_depth(4).with_max_inline_data(150);
    let transfer = TransferTest::new(fixture, Kind::Host, 4096, options);
    let mut bytes = [0; 150];
    for round in 0..300 {
        let len = 1 + (round * 37) % 150;
        warpwire_apps::pattern::fill_bytes(&mut bytes[..len], round as u64, 0);
        guard(&transfer.far, 64, len);
        let request = SendRequest::new(round as u64, WrOp::Write(transfer.far.mr.remote(64)));
        transfer.send(request.inline(&bytes[..len]));
        expect(&transfer.far, 64, &bytes[..len], &format!("round {round}"));
    }
}

/// A fenced request sends the data of the read before it.
fn fences_keep_order(fixture: &Fixture) {
    let transfer = TransferTest::new(fixture, Kind::Host, 1 << 18, QpOptions::default());
    let strongest_fence = if transfer.testbed.a.is_device() { Fence::Reads } else { Fence::All };
    for (round, fence) in [Fence::Reads, strongest_fence].into_iter().cycle().take(20).enumerate() {
        let wanted = transfer.far.pattern(0, 60_000, round as u64);
        transfer.near.write(0, &vec![0; 60_000]);
        let range = [transfer.near.mr.sge(0, 60_000)];
        let read =
            SendRequest::new(1, WrOp::Read(transfer.far.mr.remote(0))).with(&range).unsignaled();
        let back = WrOp::Write(transfer.far.mr.remote(100_000));
        let write = SendRequest::new(2, back).with(&range).fenced(fence);
        transfer.conn.a.qp.post_send(&[read, write]).unwrap();
        transfer.testbed.done(&transfer.conn.a.sends, 1);
        transfer.testbed.done(&transfer.conn.a.sends, 2);
        same(&transfer.far.read(100_000, 60_000), &wanted, "data that was read, then written");
    }
}

/// Eight queue pairs increment one word; each previous value is returned once.
fn atomics_under_contention(fixture: &Fixture) {
    const EACH: u64 = 100;
    for kind in [Kind::Host, Kind::Window] {
        let testbed = fixture.testbed();
        let far = fixture.memory(&testbed.b, kind, 4096, crate::verbs::fixture::ALL);
        let near = fixture.host(&testbed.a, 8 * EACH * 8);
        let all: Vec<_> = (0..8).map(|_| testbed.join(QpOptions::default())).collect();
        for (n, conn) in all.iter().enumerate() {
            for turn in 0..EACH {
                let offset = (n as u64 * EACH + turn) * 8;
                let add = WrOp::Atomic(far.mr.remote(8), Atomic::FetchAdd { add: 1 });
                conn.a
                    .qp
                    .post_send(&[SendRequest::new(turn, add).with(&[near.mr.sge(offset, 8)])])
                    .unwrap();
            }
        }
        for conn in &all {
            for turn in 0..EACH {
                testbed.done(&conn.a.sends, turn);
            }
        }
        assert_eq!(far.word(8), 8 * EACH);
        let mut seen: Vec<_> = (0..8 * EACH).map(|n| near.word(n * 8)).collect();
        seen.sort_unstable();
        assert!(seen.into_iter().eq(0..8 * EACH), "each previous value is returned once");
    }
}

/// A word that notes, when it is changed, what the first bytes of other memory are.
struct Watcher {
    data: Allocation,
    seen: Mutex<Vec<Vec<u8>>>,
    len: usize,
}

impl CustomMemory for Watcher {
    fn check(&self, _: u64, _: u64, _: bool) -> Result<(), AccessDenied> {
        Ok(())
    }

    fn read(&self, _: u64, into: &mut [u8]) -> Result<(), AccessDenied> {
        into.fill(0);
        Ok(())
    }

    fn write(&self, _: u64, _: &[u8]) -> Result<(), AccessDenied> {
        Ok(())
    }

    fn atomic(&self, _: u64, _: &Atomic) -> Result<u64, AccessDenied> {
        let mut bytes = vec![0; self.len];
        self.data.read(0, &mut bytes).map_err(|_| AccessDenied::Failed)?;
        self.seen.lock().push(bytes);
        Ok(7)
    }
}

/// Who polls a word that an atomic changes relies on the writes before it, also where these went to
/// other memory, in which writes are staged.
fn writes_are_there_before_a_later_atomic(fixture: &Fixture) {
    if fixture.test_link.has_device() {
        testkit::skip("the memory of callbacks is the software HCA's");
    }
    for (kind, len) in [(Kind::Staged, 5000), (Kind::Engine, 300_000), (Kind::Window, 70_000)] {
        let test = TransferTest::new(fixture, kind, 1 << 20, QpOptions::default());
        let data = test.far.allocation().clone();
        let watcher = Arc::new(Watcher { data, seen: Mutex::default(), len });
        let far = &test.testbed.b;
        let word = MemorySource::custom(watcher.clone(), 1 << 40, 8);
        let word = far.context.register(&far.pd, word, crate::verbs::fixture::ALL).unwrap();
        let wanted = test.near.pattern(0, len, len as u64);
        let (from, into) = ([test.near.mr.sge(0, len as u32)], [test.near.mr.sge(1 << 19, 8)]);
        let write = SendRequest::new(1, WrOp::Write(test.far.mr.remote(0))).with(&from);
        let add = WrOp::Atomic(word.remote(0), Atomic::FetchAdd { add: 1 });
        let posted = [write.unsignaled(), SendRequest::new(2, add).with(&into)];
        test.conn.a.qp.post_send(&posted).unwrap();
        loop {
            // Both complete if all sends do.
            if test.testbed.next(&test.conn.a.sends).id == 2 {
                break;
            }
        }
        assert_eq!(test.near.word(1 << 19), 7);
        let seen = watcher.seen.lock();
        assert_eq!(seen.len(), 1);
        same(&seen[0], &wanted, "what the word's reader sees");
    }
}
