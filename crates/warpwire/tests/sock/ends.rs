//! However a connection ends, every call returns soon, with the right errno.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use warpwire::sock::device::SockOption;
use warpwire::sock::layout::events;

use crate::sock::peer::Peer;
use crate::sock::polling::poll;
use crate::sock::scripted::{KernelOp, ScriptedKernel};
use crate::sock::testbed::{Harness, STREAM, Testbed, errno, loopbacks, until};
use testkit::{cases, deadline};

cases!(Testbed; CASES:
    a_reset_reaches_a_waiting_receiver,
    a_reset_reaches_a_waiting_sender,
    bytes_before_a_reset_are_received,
    a_peer_that_is_gone_breaks_the_pipe,
    closing_with_a_reset,
    closed_by_another_block,
    the_host_ends_under_every_call,
    the_host_dies_under_every_call,
    closing_a_listener_closes_unaccepted_connections,
    a_peer_dies_before_it_is_accepted,
    impossible_counters_harm_one_socket_only,
);

fn a_reset_reaches_a_waiting_receiver(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    for at in loopbacks() {
        let (socket, peer) = scripted.connected(at);
        scripted.start(KernelOp::Recv, &[socket, 0, 10], None);
        std::thread::sleep(Duration::from_millis(10));
        assert!(!scripted.is_done());
        peer.reset();
        assert_eq!(scripted.finish().result, errno(Errno::CONNRESET));
        assert_eq!(scripted.recv(socket, 1), Err(errno(Errno::CONNRESET)), "repeatedly");
        assert!(scripted.send(socket, b"x") < 0);
        scripted.expect(KernelOp::Close, &[socket], None);
    }
}

fn a_reset_reaches_a_waiting_sender(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, peer) = scripted.accepted(loopbacks()[0]);
    // Much more than all buffers hold, to a peer that does not read.
    scripted.start(KernelOp::StreamOut, &[socket, 1, 1 << 30, 100_000], None);
    std::thread::sleep(Duration::from_millis(50));
    assert!(!scripted.is_done());
    peer.reset();
    assert_eq!(scripted.finish().result, errno(Errno::CONNRESET));
}

fn bytes_before_a_reset_are_received(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, mut peer) = scripted.connected(loopbacks()[0]);
    peer.write_all(b"last bytes before reset").unwrap();
    assert_eq!(poll(scripted, &[(socket, events::IN)], u64::MAX).0, 1, "it is in the ring");
    peer.reset();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(scripted.recv(socket, 100).unwrap(), b"last bytes before reset");
    assert_eq!(scripted.recv(socket, 100), Err(errno(Errno::CONNRESET)));
}

fn a_peer_that_is_gone_breaks_the_pipe(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, peer) = scripted.connected(loopbacks()[0]);
    drop(peer);
    assert_eq!(scripted.recv(socket, 1).unwrap(), b"");
    // The first bytes are answered with a reset; then the error is known.
    let broken = [errno(Errno::PIPE), errno(Errno::CONNRESET)];
    until("the pipe is broken", || broken.contains(&scripted.send(socket, b"are you there?")));
}

fn closing_with_a_reset(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, mut peer) = scripted.connected(loopbacks()[0]);
    scripted.expect(KernelOp::Set, &[socket, SockOption::Linger as u64, 0], None);
    scripted.expect(KernelOp::Close, &[socket], None);
    let mut byte = [0];
    let error = peer.read(&mut byte).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

fn closed_by_another_block(testbed: &Testbed) {
    let harness = testbed.harness(2);
    let (scripted, other) = (&harness.scripted_kernels[0], &harness.scripted_kernels[1]);
    let at = loopbacks()[0];
    for what in [KernelOp::Recv, KernelOp::StreamOut, KernelOp::Accept] {
        let listener = scripted.listener(at, 4);
        let (socket, _peer) = scripted.connected(at);
        let target = if what == KernelOp::Accept { listener.0 } else { socket };
        scripted.start(what, &[target, 0, 1 << 30, 60_000], None);
        std::thread::sleep(Duration::from_millis(30));
        assert!(!scripted.is_done(), "{what:?} is blocked");
        other.expect(KernelOp::Close, &[target], None);
        assert_eq!(scripted.finish().result, errno(Errno::BADF), "{what:?}");
    }
}

/// One scripted kernel in each blocking call.
fn all_wait(harness: &Harness) -> Vec<Peer> {
    let at = loopbacks()[0];
    let mut peers = Vec::new();
    let mut connected = |scripted: &ScriptedKernel| {
        let (socket, peer) = scripted.connected(at);
        peers.push(peer);
        socket
    };
    let [receiver, sender, accepter, poller, borrower] = &harness.scripted_kernels[..5] else {
        panic!("five scripted kernels")
    };
    receiver.start(KernelOp::Recv, &[connected(receiver), 0, 10], None);
    sender.start(KernelOp::StreamOut, &[connected(sender), 1, 1 << 30, 100_000], None);
    let (listener, _) = accepter.listener(at, 4);
    accepter.start(KernelOp::Accept, &[listener], None);
    let socket = connected(poller);
    poller.put(0, &(socket as u32).to_le_bytes());
    poller.put(4, &[1, 0, 0, 0]);
    poller.start(KernelOp::Poll, &[0, 1, u64::MAX], None);
    borrower.start(KernelOp::Borrow, &[connected(borrower), 0, 10], None);
    std::thread::sleep(Duration::from_millis(60));
    for (number, scripted) in harness.scripted_kernels.iter().enumerate() {
        assert!(!scripted.is_done(), "kernel {number} is blocked");
    }
    peers
}

fn check_all_woken(harness: &Harness) {
    for (number, scripted) in harness.scripted_kernels.iter().enumerate() {
        assert_eq!(scripted.finish().result, errno(Errno::CONNABORTED), "kernel {number}");
    }
    // Later calls too.
    let scripted = harness.first();
    let made = scripted.call(KernelOp::Socket, &[4, scripted.kind(STREAM)], None).result;
    assert_eq!(made, errno(Errno::CONNABORTED));
}

fn the_host_ends_under_every_call(testbed: &Testbed) {
    let harness = testbed.harness(5);
    let mut peers = all_wait(&harness);
    let start = Instant::now();
    harness.host.stop();
    check_all_woken(&harness);
    assert!(start.elapsed() < deadline(Duration::from_secs(3)), "{:?}", start.elapsed());
    // Peers see their connections end.
    let mut byte = [0];
    assert!(matches!(peers[0].read(&mut byte), Ok(0) | Err(_)));
}

fn the_host_dies_under_every_call(testbed: &Testbed) {
    let heartbeat_timeout = Duration::from_millis(1500);
    let options = testbed
        .options()
        .with_sockets(64)
        .with_arena(16 << 20)
        .with_heartbeat_timeout(heartbeat_timeout);
    let harness = testbed.harness_with(5, options);
    let _peers = all_wait(&harness);
    let start = Instant::now();
    harness.host.simulate_crash();
    check_all_woken(&harness);
    assert!(
        start.elapsed() >= heartbeat_timeout / 2,
        "without a notification: {:?}",
        start.elapsed()
    );
    assert!(start.elapsed() < deadline(Duration::from_secs(10)), "{:?}", start.elapsed());
}

fn closing_a_listener_closes_unaccepted_connections(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (listener, name) = scripted.listener(loopbacks()[0], 16);
    let peers: Vec<_> = (0..5).map(|_| testbed.family.dial(name)).collect();
    until("they wait", || harness.host.stats().accepted == 5);
    let first = scripted.expect(KernelOp::Accept, &[listener], None) as u64;
    scripted.expect(KernelOp::Close, &[listener], None);
    until("only the accepted one stays", || harness.host.stats().open == 1);
    let mut served = 0;
    for mut peer in peers {
        peer.set_read_timeout(Duration::from_secs(1));
        let mut byte = [0];
        use std::io::ErrorKind::{TimedOut, WouldBlock};
        let waits = |error: &std::io::Error| [TimedOut, WouldBlock].contains(&error.kind());
        served += usize::from(peer.read(&mut byte).is_err_and(|error| waits(&error)));
    }
    assert_eq!(served, 1, "the others were closed");
    scripted.expect(KernelOp::Close, &[first], None);
}

fn a_peer_dies_before_it_is_accepted(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (listener, name) = scripted.listener(loopbacks()[0], 16);
    testbed.family.dial(name).reset();
    let mut polite = testbed.family.dial(name);
    polite.write_all(b"goodbye").unwrap();
    drop(polite);
    // The kernel may have dropped the dead connection.
    loop {
        let accepted = scripted.expect(KernelOp::Accept, &[listener], None) as u64;
        let ending = scripted.recv(accepted, 100);
        scripted.expect(KernelOp::Close, &[accepted], None);
        if ending == Ok(b"goodbye".to_vec()) {
            break;
        }
        assert_eq!(ending, Err(errno(Errno::CONNRESET)));
    }
}

fn impossible_counters_harm_one_socket_only(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (victim, _peer) = scripted.connected(loopbacks()[0]);
    let (bystander, mut peer) = scripted.connected(loopbacks()[0]);
    // More bytes than the ring holds, which the library would refuse.
    harness.corrupt_counters(victim);
    until("it is detected", || harness.host.stats().misused == 1);
    assert_eq!(scripted.recv(victim, 1), Err(errno(Errno::INVAL)));
    assert_eq!(scripted.send(victim, b"x"), errno(Errno::INVAL));
    assert_eq!(scripted.send(bystander, b"fine"), 4);
    let mut bytes = [0; 4];
    peer.read_exact(&mut bytes).unwrap();
    scripted.expect(KernelOp::Close, &[victim], None);
    scripted.expect(KernelOp::Close, &[bystander], None);
}
