//! Datagrams: whole, with their sender, or refused.

use std::net::UdpSocket;
use std::time::Duration;

use rustix::io::Errno;
use warpwire::sock::device::Setting;

use crate::sock::puppet::{Do, Puppet, scramble};
use crate::sock::world::{DATAGRAM, STREAM, World, errno, loopbacks, until};
use testkit::cases;

cases!(World; CASES:
    datagrams_of_every_size,
    datagrams_keep_their_bounds,
    a_peer_that_is_named,
    nobody_is_named,
    too_long_a_datagram,
    a_port_that_nobody_has,
    a_burst_is_taken_in_order,
    a_full_ring_leaves_datagrams_outside,
    a_datagram_that_never_fits_is_dropped,
    streams_are_no_datagrams,
);

fn bound(puppet: &Puppet, at: std::net::SocketAddr) -> (u64, std::net::SocketAddr) {
    let socket = puppet.socket(at, DATAGRAM);
    puppet.expect(Do::Bind, &[socket], Some(at));
    (socket, puppet.call(Do::LocalName, &[socket], None).address.unwrap())
}

fn datagrams_of_every_size(world: &World) {
    let options = warpwire::sock::SockOptions { ring: 256 << 10, ..world.options() };
    let stage = world.stage_with(1, options);
    let puppet = stage.first();
    for at in loopbacks() {
        let (socket, name) = bound(puppet, at);
        let peer = world.family.mail(at);
        let mut random = 3;
        let longest = world.family.longest();
        let sizes = [0_usize, 1, 31, 32, 33, 1000, 1472, 4088, 9000, 65_000, 65_507];
        for size in sizes.into_iter().filter(|size| *size <= longest) {
            let bytes: Vec<u8> = (0..size).map(|_| scramble(&mut random) as u8).collect();
            peer.send_to(&bytes, name);
            let answer = puppet.call(Do::RecvFrom, &[socket, 0, 1 << 17], None);
            assert_eq!(answer.result, size as i64);
            assert_eq!(answer.address, Some(peer.local_addr()));
            assert!(puppet.show(0, size) == bytes, "{size} bytes");
            let sent = puppet.call(Do::SendTo, &[socket, 0, size as u64], answer.address);
            assert_eq!(sent.result, size as i64);
            let mut back = vec![0; 70_000];
            let (count, from) = peer.recv_from(&mut back);
            assert_eq!((count, from), (size, name));
            assert!(back[..size] == bytes, "{size} bytes back");
        }
        puppet.expect(Do::Close, &[socket], None);
    }
}

fn datagrams_keep_their_bounds(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let (socket, name) = bound(puppet, loopbacks()[0]);
    let peer = world.family.mail(loopbacks()[0]);
    peer.send_to(b"first", name);
    peer.send_to(b"second", name);
    // What does not fit is lost, and not given to the next.
    assert_eq!(puppet.recv(socket, 2).unwrap(), b"fi");
    assert_eq!(puppet.recv(socket, 100).unwrap(), b"second");
    puppet.expect(Do::Set, &[socket, Setting::ReceiveTimeout as u64, 20_000_000], None);
    assert_eq!(puppet.recv(socket, 100), Err(errno(Errno::TIMEDOUT)));
    puppet.expect(Do::Set, &[socket, Setting::NonBlocking as u64, 1], None);
    assert_eq!(puppet.recv(socket, 100), Err(errno(Errno::AGAIN)));
}

fn a_peer_that_is_named(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    for at in loopbacks() {
        let (peer, stranger) = (world.family.mail(at), world.family.mail(at));
        let socket = puppet.socket(at, DATAGRAM);
        puppet.expect(Do::Connect, &[socket], Some(peer.local_addr()));
        assert_eq!(puppet.send(socket, b"to my peer"), 10);
        let mut bytes = [0; 100];
        let (count, name) = peer.recv_from(&mut bytes);
        assert_eq!(&bytes[..count], b"to my peer");
        stranger.send_to(b"from a stranger", name);
        peer.send_to(b"from the peer", name);
        assert_eq!(puppet.recv(socket, 100).unwrap(), b"from the peer");
        puppet.expect(Do::Close, &[socket], None);
    }
}

fn nobody_is_named(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let socket = puppet.socket(loopbacks()[0], DATAGRAM);
    assert_eq!(puppet.send(socket, b"to whom?"), errno(Errno::DESTADDRREQ));
}

fn too_long_a_datagram(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let peer = world.family.mail(loopbacks()[0]);
    let name = peer.local_addr();
    let (socket, _) = bound(puppet, loopbacks()[0]);
    let long = errno(Errno::MSGSIZE);
    let more = world.family.longest() as u64 + 1;
    assert_eq!(puppet.call(Do::SendTo, &[socket, 0, more], Some(name)).result, long);
    let small = puppet.socket(loopbacks()[0], DATAGRAM);
    puppet.expect(Do::Set, &[small, Setting::SendBuffer as u64, 4096], None);
    assert_eq!(puppet.call(Do::SendTo, &[small, 0, 4065], Some(name)).result, long);
    assert_eq!(puppet.call(Do::SendTo, &[small, 0, 4064], Some(name)).result, 4064);
}

fn a_port_that_nobody_has(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let at = loopbacks()[0];
    let deserted = UdpSocket::bind(at).unwrap().local_addr().unwrap();
    let socket = puppet.socket(at, DATAGRAM);
    puppet.expect(Do::Connect, &[socket], Some(deserted));
    assert_eq!(puppet.send(socket, b"hello?"), 6);
    assert_eq!(puppet.recv(socket, 10), Err(errno(Errno::CONNREFUSED)));
    // It is told once, and the socket goes on.
    let peer = world.family.mail(at);
    puppet.expect(Do::Connect, &[socket], Some(peer.local_addr()));
    assert_eq!(puppet.send(socket, b"hello!"), 6);
    let mut bytes = [0; 10];
    assert_eq!(peer.recv_from(&mut bytes).0, 6);
}

fn a_burst_is_taken_in_order(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let (socket, name) = bound(puppet, loopbacks()[0]);
    let peer = world.family.mail(loopbacks()[0]);
    for number in 0..100_u64 {
        peer.send_to(&number.to_le_bytes(), name);
    }
    for number in 0..100_u64 {
        assert_eq!(puppet.recv(socket, 100).unwrap(), number.to_le_bytes());
    }
}

fn a_full_ring_leaves_datagrams_outside(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let at = loopbacks()[0];
    let socket = puppet.socket(at, DATAGRAM);
    puppet.expect(Do::Set, &[socket, Setting::ReceiveBuffer as u64, 4096], None);
    puppet.expect(Do::Bind, &[socket], Some(at));
    let name = puppet.call(Do::LocalName, &[socket], None).address.unwrap();
    let peer = world.family.mail(at);
    for number in 0..20_u8 {
        peer.send_to(&[number; 1500], name);
    }
    std::thread::sleep(Duration::from_millis(20));
    // Two fit; the others wait in the operating system's queue, or in the device's.
    for number in 0..20_u8 {
        assert_eq!(puppet.recv(socket, 2000).unwrap(), [number; 1500]);
    }
}

fn a_datagram_that_never_fits_is_dropped(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let at = loopbacks()[0];
    let socket = puppet.socket(at, DATAGRAM);
    puppet.expect(Do::Set, &[socket, Setting::ReceiveBuffer as u64, 4096], None);
    puppet.expect(Do::Bind, &[socket], Some(at));
    let name = puppet.call(Do::LocalName, &[socket], None).address.unwrap();
    let peer = world.family.mail(at);
    peer.send_to(&[1; 4070], name);
    peer.send_to(b"small", name);
    assert_eq!(puppet.recv(socket, 100).unwrap(), b"small");
    until("it is counted", || stage.host.stats().dropped == 1);
}

fn streams_are_no_datagrams(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let at = loopbacks()[0];
    let stream = puppet.socket(at, STREAM);
    let sent = puppet.call(Do::SendTo, &[stream, 0, 1], Some(at)).result;
    assert_eq!(sent, errno(Errno::ISCONN));
    let datagrams = puppet.socket(at, DATAGRAM);
    for what in [Do::Borrow, Do::Reserve] {
        assert_eq!(puppet.call(what, &[datagrams, 0, 1], None).result, errno(Errno::OPNOTSUPP));
    }
    assert_eq!(puppet.call(Do::Accept, &[datagrams], None).result, errno(Errno::INVAL));
}
