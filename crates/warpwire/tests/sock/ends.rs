//! However it ends, every call returns, with the right errno, and soon.

use std::io::{Read, Write};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use warpwire::sock::SockOptions;
use warpwire::sock::device::Setting;
use warpwire::sock::layout::events;

use crate::sock::peer::Peer;
use crate::sock::polling::poll;
use crate::sock::puppet::{Do, Puppet};
use crate::sock::world::{STREAM, Stage, World, errno, loopbacks, until};
use testkit::cases;

cases!(World; CASES:
    a_reset_reaches_a_waiting_receiver,
    a_reset_reaches_a_waiting_sender,
    what_came_before_a_reset_is_received,
    a_peer_that_is_gone_breaks_the_pipe,
    closing_with_a_reset,
    closed_by_another_block,
    the_host_ends_under_every_call,
    the_host_dies_under_every_call,
    a_listener_goes_with_those_that_wait,
    a_peer_dies_before_it_is_accepted,
    a_kernel_that_lies_harms_itself_only,
);

fn a_reset_reaches_a_waiting_receiver(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    for at in loopbacks() {
        let (socket, peer) = puppet.connected(at);
        puppet.start(Do::Recv, &[socket, 0, 10], None);
        std::thread::sleep(Duration::from_millis(10));
        assert!(!puppet.is_done());
        peer.reset();
        assert_eq!(puppet.finish().result, errno(Errno::CONNRESET));
        assert_eq!(puppet.recv(socket, 1), Err(errno(Errno::CONNRESET)), "and stays so");
        assert!(puppet.send(socket, b"x") < 0);
        puppet.expect(Do::Close, &[socket], None);
    }
}

fn a_reset_reaches_a_waiting_sender(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let (socket, peer) = puppet.accepted(loopbacks()[0]);
    // Much more than fits anywhere, to a peer that takes nothing.
    puppet.start(Do::StreamOut, &[socket, 1, 1 << 30, 100_000], None);
    std::thread::sleep(Duration::from_millis(50));
    assert!(!puppet.is_done());
    peer.reset();
    assert_eq!(puppet.finish().result, errno(Errno::CONNRESET));
}

fn what_came_before_a_reset_is_received(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let (socket, mut peer) = puppet.connected(loopbacks()[0]);
    peer.write_all(b"the last you hear of me").unwrap();
    assert_eq!(poll(puppet, &[(socket, events::IN)], u64::MAX).0, 1, "it is in the ring");
    peer.reset();
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(puppet.recv(socket, 100).unwrap(), b"the last you hear of me");
    assert_eq!(puppet.recv(socket, 100), Err(errno(Errno::CONNRESET)));
}

fn a_peer_that_is_gone_breaks_the_pipe(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let (socket, peer) = puppet.connected(loopbacks()[0]);
    drop(peer);
    assert_eq!(puppet.recv(socket, 1).unwrap(), b"");
    // The first bytes are answered with a reset; then it is known.
    let broken = [errno(Errno::PIPE), errno(Errno::CONNRESET)];
    until("the pipe is broken", || broken.contains(&puppet.send(socket, b"anybody there?")));
}

fn closing_with_a_reset(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let (socket, mut peer) = puppet.connected(loopbacks()[0]);
    puppet.expect(Do::Set, &[socket, Setting::Linger as u64, 0], None);
    puppet.expect(Do::Close, &[socket], None);
    let mut byte = [0];
    let error = peer.read(&mut byte).unwrap_err();
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

fn closed_by_another_block(world: &World) {
    let stage = world.stage(2);
    let (puppet, other) = (&stage.puppets[0], &stage.puppets[1]);
    let at = loopbacks()[0];
    for what in [Do::Recv, Do::StreamOut, Do::Accept] {
        let listener = puppet.listener(at, 4);
        let (socket, _peer) = puppet.connected(at);
        let target = if what == Do::Accept { listener.0 } else { socket };
        puppet.start(what, &[target, 0, 1 << 30, 60_000], None);
        std::thread::sleep(Duration::from_millis(30));
        assert!(!puppet.is_done(), "{what:?} waits");
        other.expect(Do::Close, &[target], None);
        assert_eq!(puppet.finish().result, errno(Errno::BADF), "{what:?}");
    }
}

/// A puppet for each call that waits, all of them waiting.
fn all_wait(stage: &Stage) -> Vec<Peer> {
    let at = loopbacks()[0];
    let mut peers = Vec::new();
    let mut connected = |puppet: &Puppet| {
        let (socket, peer) = puppet.connected(at);
        peers.push(peer);
        socket
    };
    let [receiver, sender, accepter, poller, borrower] = &stage.puppets[..5] else {
        panic!("five puppets")
    };
    receiver.start(Do::Recv, &[connected(receiver), 0, 10], None);
    sender.start(Do::StreamOut, &[connected(sender), 1, 1 << 30, 100_000], None);
    let (listener, _) = accepter.listener(at, 4);
    accepter.start(Do::Accept, &[listener], None);
    let socket = connected(poller);
    poller.put(0, &(socket as u32).to_le_bytes());
    poller.put(4, &[1, 0, 0, 0]);
    poller.start(Do::Poll, &[0, 1, u64::MAX], None);
    borrower.start(Do::Borrow, &[connected(borrower), 0, 10], None);
    std::thread::sleep(Duration::from_millis(60));
    for (number, puppet) in stage.puppets.iter().enumerate() {
        assert!(!puppet.is_done(), "puppet {number} waits");
    }
    peers
}

fn all_are_told(stage: &Stage) {
    for (number, puppet) in stage.puppets.iter().enumerate() {
        assert_eq!(puppet.finish().result, errno(Errno::CONNABORTED), "puppet {number}");
    }
    // And whatever is tried later.
    let puppet = stage.first();
    let made = puppet.call(Do::Socket, &[4, puppet.kind(STREAM)], None).result;
    assert_eq!(made, errno(Errno::CONNABORTED));
}

fn the_host_ends_under_every_call(world: &World) {
    let stage = world.stage(5);
    let mut peers = all_wait(&stage);
    let start = Instant::now();
    stage.host.stop();
    all_are_told(&stage);
    assert!(start.elapsed() < Duration::from_secs(3), "{:?}", start.elapsed());
    // Peers see their connections end.
    let mut byte = [0];
    assert!(matches!(peers[0].read(&mut byte), Ok(0) | Err(_)));
}

fn the_host_dies_under_every_call(world: &World) {
    let silence = Duration::from_millis(400);
    let options = SockOptions { sockets: 64, arena: 16 << 20, silence, ..world.options() };
    let stage = world.stage_with(5, options);
    let _peers = all_wait(&stage);
    let start = Instant::now();
    stage.host.vanish();
    all_are_told(&stage);
    assert!(start.elapsed() >= silence / 2, "nobody said a word: {:?}", start.elapsed());
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

fn a_listener_goes_with_those_that_wait(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let (listener, name) = puppet.listener(loopbacks()[0], 16);
    let peers: Vec<_> = (0..5).map(|_| world.family.dial(name)).collect();
    until("they wait", || stage.host.stats().accepted == 5);
    let first = puppet.expect(Do::Accept, &[listener], None) as u64;
    puppet.expect(Do::Close, &[listener], None);
    until("only the accepted one stays", || stage.host.stats().open == 1);
    let mut served = 0;
    for mut peer in peers {
        peer.set_read_timeout(Duration::from_millis(300));
        let mut byte = [0];
        use std::io::ErrorKind::{TimedOut, WouldBlock};
        let waits = |error: &std::io::Error| [TimedOut, WouldBlock].contains(&error.kind());
        served += usize::from(peer.read(&mut byte).is_err_and(|error| waits(&error)));
    }
    assert_eq!(served, 1, "the others have seen their end");
    puppet.expect(Do::Close, &[first], None);
}

fn a_peer_dies_before_it_is_accepted(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let (listener, name) = puppet.listener(loopbacks()[0], 16);
    world.family.dial(name).reset();
    let mut polite = world.family.dial(name);
    polite.write_all(b"goodbye").unwrap();
    drop(polite);
    let mut endings = Vec::new();
    for _ in 0..2 {
        puppet.expect(Do::Set, &[listener, Setting::ReceiveTimeout as u64, 300_000_000], None);
        let accepted = puppet.call(Do::Accept, &[listener], None).result;
        if accepted < 0 {
            continue; // the system had thrown the dead one away
        }
        endings.push(puppet.recv(accepted as u64, 100));
        puppet.expect(Do::Close, &[accepted as u64], None);
    }
    assert!(endings.contains(&Ok(b"goodbye".to_vec())), "{endings:?}");
    let others: Vec<_> =
        endings.iter().filter(|ending| **ending != Ok(b"goodbye".to_vec())).collect();
    assert!(others.iter().all(|ending| **ending == Err(errno(Errno::CONNRESET))), "{endings:?}");
}

fn a_kernel_that_lies_harms_itself_only(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let (victim, _peer) = puppet.connected(loopbacks()[0]);
    let (bystander, mut peer) = puppet.connected(loopbacks()[0]);
    // More bytes than the ring has, by a commit that the library would refuse.
    stage.spoil(victim);
    until("it is found", || stage.host.stats().misused == 1);
    assert_eq!(puppet.recv(victim, 1), Err(errno(Errno::INVAL)));
    assert_eq!(puppet.send(victim, b"x"), errno(Errno::INVAL));
    assert_eq!(puppet.send(bystander, b"fine"), 4);
    let mut bytes = [0; 4];
    peer.read_exact(&mut bytes).unwrap();
    puppet.expect(Do::Close, &[victim], None);
    puppet.expect(Do::Close, &[bystander], None);
}
