//! Without a copy: borrowed and reserved spans.

use std::io::{Read, Write};
use std::time::Duration;

use rustix::io::Errno;
use warpwire::sock::device::Setting;

use crate::sock::peer::Family;
use crate::sock::puppet::Do;
use crate::sock::world::{World, errno, loopbacks, until};
use testkit::cases;

cases!(World; CASES:
    a_borrowed_span_shows_what_came,
    a_part_is_given_back,
    a_reserved_span_is_sent,
    an_abandoned_reservation_sends_nothing,
    spans_at_the_ring_end_are_shorter,
    spans_that_are_not_out,
    a_span_keeps_others_away,
);

fn a_borrowed_span_shows_what_came(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let (socket, mut peer) = puppet.connected(loopbacks()[0]);
    peer.write_all(b"where it lies").unwrap();
    let span = puppet.call(Do::Borrow, &[socket, 0, 1000], None);
    assert_eq!(puppet.show(0, span.result as usize), b"where it lies"[..span.result as usize]);
    assert!(span.second != 0);
    puppet.expect(Do::GiveBack, &[socket, 0, span.result as u64], None);
    drop(peer);
    while puppet.call(Do::Borrow, &[socket, 0, 1000], None).result > 0 {
        puppet.expect(Do::GiveBack, &[socket, 0, 1], None);
    }
    // At the end there is nothing to give back.
    assert_eq!(puppet.call(Do::GiveBack, &[socket, 0, 0], None).result, errno(Errno::INVAL));
}

fn a_part_is_given_back(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let (socket, mut peer) = puppet.connected(loopbacks()[0]);
    peer.write_all(b"0123456789").unwrap();
    assert_eq!(puppet.expect(Do::Borrow, &[socket, 0, 4], None), 4);
    puppet.expect(Do::GiveBack, &[socket, 0, 1], None);
    assert_eq!(puppet.recv(socket, 3).unwrap(), b"123");
}

fn a_reserved_span_is_sent(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let (socket, mut peer) = puppet.connected(loopbacks()[1]);
    puppet.put(0, b"written in place, and more");
    assert_eq!(puppet.expect(Do::Reserve, &[socket, 0, 26], None), 26);
    puppet.expect(Do::Commit, &[socket, 0, 16], None);
    let mut bytes = [0; 16];
    peer.read_exact(&mut bytes).unwrap();
    assert_eq!(&bytes, b"written in place");
}

fn an_abandoned_reservation_sends_nothing(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let (socket, mut peer) = puppet.connected(loopbacks()[0]);
    puppet.expect(Do::Reserve, &[socket, 0, 100], None);
    puppet.expect(Do::Commit, &[socket, 0, 0], None);
    assert_eq!(puppet.send(socket, b"only this"), 9);
    puppet.expect(Do::Close, &[socket], None);
    let mut text = String::new();
    peer.read_to_string(&mut text).unwrap();
    assert_eq!(text, "only this");
}

fn spans_at_the_ring_end_are_shorter(world: &World) {
    let options = warpwire::sock::SockOptions { ring: 4096, arena: 1 << 20, ..world.options() };
    let stage = world.stage_with(1, options);
    let puppet = stage.first();
    let (socket, mut peer) = puppet.connected(loopbacks()[0]);
    assert_eq!(puppet.send(socket, &[1; 4000]), 4000);
    let mut sink = vec![0; 4000];
    peer.read_exact(&mut sink).unwrap();
    // Until the ring is free again, of which the host tells, or the peer.
    match world.family {
        Family::Inet => until("all is taken", || stage.host.stats().sent == 4000),
        Family::Warp => std::thread::sleep(Duration::from_millis(50)),
    }
    assert_eq!(puppet.expect(Do::Reserve, &[socket, 0, 1000], None), 96, "up to the end");
    puppet.expect(Do::Commit, &[socket, 0, 96], None);
    assert_eq!(
        puppet.expect(Do::Reserve, &[socket, 0, 1000], None),
        1000,
        "and from the beginning"
    );
    puppet.expect(Do::Commit, &[socket, 0, 1000], None);
    let mut sink = vec![0; 1096];
    peer.read_exact(&mut sink).unwrap();
}

fn spans_that_are_not_out(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let (socket, mut peer) = puppet.connected(loopbacks()[0]);
    let invalid = errno(Errno::INVAL);
    assert_eq!(puppet.call(Do::Commit, &[socket, 0, 1], None).result, invalid);
    assert_eq!(puppet.call(Do::GiveBack, &[socket, 0, 1], None).result, invalid);
    peer.write_all(b"1234").unwrap();
    puppet.expect(Do::Borrow, &[socket, 0, 4], None);
    assert_eq!(
        puppet.call(Do::GiveBack, &[socket, 0, 5000], None).result,
        invalid,
        "more than came"
    );
    puppet.expect(Do::GiveBack, &[socket, 0, 0], None);
    puppet.expect(Do::Reserve, &[socket, 0, 4], None);
    assert_eq!(puppet.call(Do::Commit, &[socket, 0, 1 << 30], None).result, invalid, "than fits");
    puppet.expect(Do::Commit, &[socket, 0, 0], None);
}

fn a_span_keeps_others_away(world: &World) {
    let stage = world.stage(2);
    let (puppet, other) = (&stage.puppets[0], &stage.puppets[1]);
    let (socket, mut peer) = puppet.connected(loopbacks()[0]);
    peer.write_all(b"mine").unwrap();
    match world.family {
        Family::Inet => until("it came", || stage.host.stats().received == 4),
        Family::Warp => std::thread::sleep(Duration::from_millis(50)),
    }
    assert_eq!(puppet.expect(Do::Borrow, &[socket, 0, 4], None), 4);
    assert_eq!(puppet.call(Do::Close, &[socket], None).result, errno(Errno::BUSY));
    other.start(Do::Recv, &[socket, 0, 10], None);
    std::thread::sleep(Duration::from_millis(20));
    assert!(!other.is_done(), "it waits for the span");
    puppet.expect(Do::GiveBack, &[socket, 0, 2], None);
    assert_eq!(other.finish().result, 2);
    assert_eq!(other.show(0, 2), b"ne");
    puppet.expect(Do::Reserve, &[socket, 0, 4], None);
    puppet.expect(Do::Set, &[socket, Setting::NonBlocking as u64, 1], None);
    assert_eq!(other.send(socket, b"x"), errno(Errno::AGAIN));
    puppet.expect(Do::Commit, &[socket, 0, 0], None);
    assert_eq!(other.send(socket, b"x"), 1);
    puppet.expect(Do::Close, &[socket], None);
}
