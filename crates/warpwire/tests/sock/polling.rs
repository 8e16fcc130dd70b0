//! poll: only requested events end a wait.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use warpwire::sock::device::SockOption;
use warpwire::sock::layout::events;

use crate::sock::scripted::{KernelOp, ScriptedKernel};
use crate::sock::testbed::{ClosedPort, STREAM, Testbed, loopbacks};
use testkit::cases;

cases!(Testbed; CASES:
    send_space_ends_no_wait_for_input,
    input_is_reported,
    a_listener_is_readable,
    a_full_ring_is_not_writable,
    ends_and_errors_are_always_reported,
    a_bad_handle_is_always_reported,
    one_of_many,
    a_connection_becomes_writable,
);

pub const FOREVER: u64 = u64::MAX;

/// Polls; returns the number of ready entries, and the events of each.
pub fn poll(scripted: &ScriptedKernel, list: &[(u64, u16)], timeout: u64) -> (i64, Vec<u16>) {
    start(scripted, list, timeout);
    let ready = scripted.finish().result;
    (ready, found(scripted, list.len()))
}

fn start(scripted: &ScriptedKernel, list: &[(u64, u16)], timeout: u64) {
    for (number, (socket, events)) in list.iter().enumerate() {
        let mut entry = [0; 8];
        entry[..4].copy_from_slice(&(*socket as u32).to_le_bytes());
        entry[4..6].copy_from_slice(&events.to_le_bytes());
        scripted.put(number as u64 * 8, &entry);
    }
    scripted.start(KernelOp::Poll, &[0, list.len() as u64, timeout], None);
}

fn found(scripted: &ScriptedKernel, count: usize) -> Vec<u16> {
    let bytes = scripted.show(0, count * 8);
    bytes.chunks_exact(8).map(|entry| u16::from_le_bytes([entry[6], entry[7]])).collect()
}

fn send_space_ends_no_wait_for_input(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, mut peer) = scripted.connected(loopbacks()[0]);
    let begun = Instant::now();
    assert_eq!(poll(scripted, &[(socket, events::IN)], 50_000_000), (0, vec![0]));
    assert!(begun.elapsed() >= Duration::from_millis(50));
    assert_eq!(poll(scripted, &[(socket, events::OUT)], FOREVER), (1, vec![events::OUT]));
    start(scripted, &[(socket, events::IN)], FOREVER);
    std::thread::sleep(Duration::from_millis(30));
    assert!(!scripted.is_done(), "the socket is writable, but that was not requested");
    peer.write_all(b"x").unwrap();
    assert_eq!(scripted.finish().result, 1);
    assert_eq!(found(scripted, 1), [events::IN]);
}

fn input_is_reported(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, mut peer) = scripted.accepted(loopbacks()[1]);
    assert_eq!(poll(scripted, &[(socket, events::IN)], 0), (0, vec![0]));
    peer.write_all(b"xyz").unwrap();
    assert_eq!(poll(scripted, &[(socket, events::IN)], FOREVER), (1, vec![events::IN]));
    assert_eq!(scripted.recv(socket, 3).unwrap(), b"xyz");
    assert_eq!(poll(scripted, &[(socket, events::IN)], 0), (0, vec![0]));
    peer.shutdown(Shutdown::Write);
    let both = events::IN | events::RDHUP;
    assert_eq!(poll(scripted, &[(socket, both)], FOREVER), (1, vec![both]));
    assert_eq!(scripted.recv(socket, 3).unwrap(), b"");
}

fn a_listener_is_readable(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (listener, name) = scripted.listener(loopbacks()[0], 4);
    assert_eq!(poll(scripted, &[(listener, events::IN | events::OUT)], 0), (0, vec![0]));
    let _peer = testbed.family.dial(name);
    assert_eq!(poll(scripted, &[(listener, events::IN)], FOREVER), (1, vec![events::IN]));
    assert!(scripted.call(KernelOp::Accept, &[listener], None).result > 0);
    assert_eq!(poll(scripted, &[(listener, events::IN)], 0), (0, vec![0]));
}

fn a_full_ring_is_not_writable(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, mut peer) = scripted.connected(loopbacks()[0]);
    scripted.expect(KernelOp::Set, &[socket, SockOption::NonBlocking as u64, 1], None);
    let piece = vec![0; 100_000];
    // The host takes bytes, at its own pace, until the operating system's buffers are full too. A
    // poll that ends before the peer has read anything came before that.
    testkit::until("a poll of the full ring waits for 20 ms", || {
        while scripted.send(socket, &piece) >= 0 {}
        start(scripted, &[(socket, events::OUT)], FOREVER);
        std::thread::sleep(Duration::from_millis(20));
        let waits = !scripted.is_done();
        if !waits {
            assert_eq!(found(scripted, 1), [events::OUT]);
        }
        waits
    });
    let mut sink = vec![0; 8 << 20];
    // The kernel may poll only after everything was read.
    peer.set_read_timeout(Duration::from_millis(100));
    while !scripted.is_done() {
        let _ = peer.read(&mut sink);
    }
    assert_eq!(found(scripted, 1), [events::OUT]);
}

fn ends_and_errors_are_always_reported(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, peer) = scripted.connected(loopbacks()[0]);
    start(scripted, &[(socket, 0)], FOREVER);
    std::thread::sleep(Duration::from_millis(10));
    assert!(!scripted.is_done());
    peer.reset();
    assert_eq!(scripted.finish().result, 1);
    assert_eq!(found(scripted, 1), [events::ERR | events::HUP]);
}

fn a_bad_handle_is_always_reported(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let socket = scripted.socket(loopbacks()[0], STREAM);
    scripted.expect(KernelOp::Close, &[socket], None);
    let list = [(socket, events::IN), (0xffff_ffff, 0)];
    assert_eq!(poll(scripted, &list, FOREVER), (2, vec![events::NVAL, events::NVAL]));
    assert_eq!(poll(scripted, &[], 1_000_000), (0, vec![]), "no entries: waits for the timeout");
}

fn one_of_many(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let mut pairs: Vec<_> = (0..20).map(|n| scripted.connected(loopbacks()[n % 2])).collect();
    let list: Vec<_> = pairs.iter().map(|(socket, _)| (*socket, events::IN)).collect();
    for chosen in [3, 19, 0] {
        start(scripted, &list, FOREVER);
        pairs[chosen].1.write_all(b"me").unwrap();
        assert_eq!(scripted.finish().result, 1);
        let found = found(scripted, list.len());
        assert_eq!(found.iter().position(|events| *events != 0), Some(chosen));
        assert_eq!(scripted.recv(list[chosen].0, 10).unwrap(), b"me");
    }
}

fn a_connection_becomes_writable(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let server = testbed.family.serve(loopbacks()[0]);
    let socket = scripted.socket(loopbacks()[0], STREAM);
    assert_eq!(poll(scripted, &[(socket, events::OUT)], 0), (0, vec![0]), "not before");
    scripted.expect(KernelOp::Set, &[socket, SockOption::NonBlocking as u64, 1], None);
    scripted.call(KernelOp::Connect, &[socket], Some(server.local_addr()));
    assert_eq!(poll(scripted, &[(socket, events::OUT)], FOREVER), (1, vec![events::OUT]));
    assert_eq!(scripted.call(KernelOp::Get, &[socket, SockOption::Error as u64], None).result, 0);
    // A connection that fails becomes ready too.
    let closed_port = ClosedPort::at(loopbacks()[0]);
    let other = scripted.socket(loopbacks()[0], STREAM);
    scripted.expect(KernelOp::Set, &[other, SockOption::NonBlocking as u64, 1], None);
    scripted.call(KernelOp::Connect, &[other], Some(closed_port.name));
    let (ready, found) = poll(scripted, &[(other, events::OUT)], FOREVER);
    assert_eq!((ready, found[0] & events::ERR), (1, events::ERR));
    assert_eq!(scripted.call(KernelOp::Get, &[other, SockOption::Error as u64], None).result, 111);
}
