//! Zero-copy: borrowed and reserved spans.

use std::io::{Read, Write};
use std::time::Duration;

use rustix::io::Errno;
use warpwire::sock::device::SockOption;

use crate::sock::peer::Family;
use crate::sock::scripted::KernelOp;
use crate::sock::testbed::{Testbed, errno, loopbacks, until};
use testkit::cases;

cases!(Testbed; CASES:
    a_borrowed_span_has_the_received_bytes,
    unconsumed_bytes_are_received_again,
    a_reserved_span_is_sent,
    an_abandoned_reservation_sends_nothing,
    spans_at_the_ring_end_are_shorter,
    consume_and_commit_without_a_span,
    a_span_excludes_other_calls,
);

fn a_borrowed_span_has_the_received_bytes(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, mut peer) = scripted.connected(loopbacks()[0]);
    peer.write_all(b"borrowed data").unwrap();
    let span = scripted.call(KernelOp::Borrow, &[socket, 0, 1000], None);
    assert_eq!(scripted.show(0, span.result as usize), b"borrowed data"[..span.result as usize]);
    assert!(span.second != 0);
    scripted.expect(KernelOp::Consume, &[socket, 0, span.result as u64], None);
    drop(peer);
    while scripted.call(KernelOp::Borrow, &[socket, 0, 1000], None).result > 0 {
        scripted.expect(KernelOp::Consume, &[socket, 0, 1], None);
    }
    // At the end of the stream there is nothing to consume.
    assert_eq!(scripted.call(KernelOp::Consume, &[socket, 0, 0], None).result, errno(Errno::INVAL));
}

fn unconsumed_bytes_are_received_again(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, mut peer) = scripted.connected(loopbacks()[0]);
    peer.write_all(b"0123456789").unwrap();
    assert_eq!(scripted.expect(KernelOp::Borrow, &[socket, 0, 4], None), 4);
    scripted.expect(KernelOp::Consume, &[socket, 0, 1], None);
    assert_eq!(scripted.recv(socket, 3).unwrap(), b"123");
}

fn a_reserved_span_is_sent(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, mut peer) = scripted.connected(loopbacks()[1]);
    scripted.put(0, b"written directly, and more");
    assert_eq!(scripted.expect(KernelOp::Reserve, &[socket, 0, 26], None), 26);
    scripted.expect(KernelOp::Commit, &[socket, 0, 16], None);
    let mut bytes = [0; 16];
    peer.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"written directly");
}

fn an_abandoned_reservation_sends_nothing(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, mut peer) = scripted.connected(loopbacks()[0]);
    scripted.expect(KernelOp::Reserve, &[socket, 0, 100], None);
    scripted.expect(KernelOp::Commit, &[socket, 0, 0], None);
    assert_eq!(scripted.send(socket, b"only this"), 9);
    scripted.expect(KernelOp::Close, &[socket], None);
    let mut text = String::new();
    peer.read_to_string(&mut text).unwrap();
    assert_eq!(text, "only this");
}

fn spans_at_the_ring_end_are_shorter(testbed: &Testbed) {
    let options = testbed.options().with_ring(4096).with_arena(1 << 20);
    let harness = testbed.harness_with(1, options);
    let scripted = harness.first();
    let (socket, mut peer) = scripted.connected(loopbacks()[0]);
    assert_eq!(scripted.send(socket, &[1; 4000]), 4000);
    let mut sink = vec![0; 4000];
    peer.read_exact(&mut sink).unwrap();
    // Until the ring is free again: the host's or the peer's counter shows it.
    match testbed.family {
        Family::Inet => until("everything is taken", || harness.host.stats().sent == 4000),
        Family::Warp => std::thread::sleep(Duration::from_millis(50)),
    }
    assert_eq!(scripted.expect(KernelOp::Reserve, &[socket, 0, 1000], None), 96, "up to the end");
    scripted.expect(KernelOp::Commit, &[socket, 0, 96], None);
    assert_eq!(
        scripted.expect(KernelOp::Reserve, &[socket, 0, 1000], None),
        1000,
        "then from the start"
    );
    scripted.expect(KernelOp::Commit, &[socket, 0, 1000], None);
    let mut sink = vec![0; 1096];
    peer.read_exact(&mut sink).unwrap();
}

fn consume_and_commit_without_a_span(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, mut peer) = scripted.connected(loopbacks()[0]);
    let invalid = errno(Errno::INVAL);
    assert_eq!(scripted.call(KernelOp::Commit, &[socket, 0, 1], None).result, invalid);
    assert_eq!(scripted.call(KernelOp::Consume, &[socket, 0, 1], None).result, invalid);
    peer.write_all(b"1234").unwrap();
    scripted.expect(KernelOp::Borrow, &[socket, 0, 4], None);
    assert_eq!(
        scripted.call(KernelOp::Consume, &[socket, 0, 5000], None).result,
        invalid,
        "more than was received"
    );
    scripted.expect(KernelOp::Consume, &[socket, 0, 0], None);
    scripted.expect(KernelOp::Reserve, &[socket, 0, 4], None);
    assert_eq!(
        scripted.call(KernelOp::Commit, &[socket, 0, 1 << 30], None).result,
        invalid,
        "more than fits"
    );
    scripted.expect(KernelOp::Commit, &[socket, 0, 0], None);
}

fn a_span_excludes_other_calls(testbed: &Testbed) {
    let harness = testbed.harness(2);
    let (scripted, other) = (&harness.scripted_kernels[0], &harness.scripted_kernels[1]);
    let (socket, mut peer) = scripted.connected(loopbacks()[0]);
    peer.write_all(b"mine").unwrap();
    match testbed.family {
        Family::Inet => until("it arrived", || harness.host.stats().received == 4),
        Family::Warp => std::thread::sleep(Duration::from_millis(50)),
    }
    assert_eq!(scripted.expect(KernelOp::Borrow, &[socket, 0, 4], None), 4);
    assert_eq!(scripted.call(KernelOp::Close, &[socket], None).result, errno(Errno::BUSY));
    other.start(KernelOp::Recv, &[socket, 0, 10], None);
    std::thread::sleep(Duration::from_millis(20));
    assert!(!other.is_done(), "it waits for the span");
    scripted.expect(KernelOp::Consume, &[socket, 0, 2], None);
    assert_eq!(other.finish().result, 2);
    assert_eq!(other.show(0, 2), b"ne");
    scripted.expect(KernelOp::Reserve, &[socket, 0, 4], None);
    scripted.expect(KernelOp::Set, &[socket, SockOption::NonBlocking as u64, 1], None);
    assert_eq!(other.send(socket, b"x"), errno(Errno::AGAIN));
    scripted.expect(KernelOp::Commit, &[socket, 0, 0], None);
    assert_eq!(other.send(socket, b"x"), 1);
    scripted.expect(KernelOp::Close, &[socket], None);
}
