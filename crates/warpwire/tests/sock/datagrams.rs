//! UDP datagrams: complete, with their sender, or refused.

use std::net::UdpSocket;
use std::time::Duration;

use rustix::io::Errno;
use warpwire::sock::device::SockOption;
use warpwire::sock::layout::events;

use crate::sock::polling::{FOREVER, poll};
use crate::sock::scripted::{KernelOp, ScriptedKernel, scramble};
use crate::sock::testbed::{DATAGRAM, Testbed, errno, loopbacks, udp, until};
use testkit::cases;

cases!(Testbed; CASES:
    datagrams_of_every_size,
    datagrams_keep_their_bounds,
    a_connected_datagram_socket,
    sending_without_a_destination,
    a_datagram_that_is_too_long,
    a_closed_port,
    a_burst_is_taken_in_order,
    a_full_ring_leaves_datagrams_queued,
    a_datagram_that_never_fits_is_dropped,
    datagrams_are_polled_too,
    between_two_kernels,
    an_address_is_bound_once,
    bytes_are_sent_after_close,
);

fn bound(scripted: &ScriptedKernel, at: std::net::SocketAddr) -> (u64, std::net::SocketAddr) {
    let socket = scripted.socket(at, DATAGRAM);
    scripted.expect(KernelOp::Bind, &[socket], Some(at));
    (socket, scripted.call(KernelOp::LocalName, &[socket], None).address.unwrap())
}

fn datagrams_of_every_size(testbed: &Testbed) {
    let options = testbed.options().with_ring(256 << 10);
    let harness = testbed.harness_with(1, options);
    let scripted = harness.first();
    for at in loopbacks() {
        let (socket, name) = bound(scripted, at);
        let peer = udp(at);
        let mut random = 3;
        for size in [0_usize, 1, 31, 32, 33, 1000, 1472, 4088, 9000, 65_000, 65_507] {
            let bytes: Vec<u8> = (0..size).map(|_| scramble(&mut random) as u8).collect();
            peer.send_to(&bytes, name).unwrap();
            let answer = scripted.call(KernelOp::RecvFrom, &[socket, 0, 1 << 17], None);
            assert_eq!(answer.result, size as i64);
            assert_eq!(answer.address, Some(peer.local_addr().unwrap()));
            assert!(scripted.show(0, size) == bytes, "{size} bytes");
            let sent = scripted.call(KernelOp::SendTo, &[socket, 0, size as u64], answer.address);
            assert_eq!(sent.result, size as i64);
            let mut back = vec![0; 70_000];
            let (count, from) = peer.recv_from(&mut back).unwrap();
            assert_eq!((count, from), (size, name));
            assert!(back[..size] == bytes, "{size} bytes back");
        }
        scripted.expect(KernelOp::Close, &[socket], None);
    }
}

fn datagrams_keep_their_bounds(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, name) = bound(scripted, loopbacks()[0]);
    let peer = udp(loopbacks()[0]);
    peer.send_to(b"first", name).unwrap();
    peer.send_to(b"second", name).unwrap();
    // Bytes that do not fit are discarded, not returned by the next call.
    assert_eq!(scripted.recv(socket, 2).unwrap(), b"fi");
    assert_eq!(scripted.recv(socket, 100).unwrap(), b"second");
    scripted.expect(KernelOp::Set, &[socket, SockOption::ReceiveTimeout as u64, 20_000_000], None);
    assert_eq!(scripted.recv(socket, 100), Err(errno(Errno::TIMEDOUT)));
    scripted.expect(KernelOp::Set, &[socket, SockOption::NonBlocking as u64, 1], None);
    assert_eq!(scripted.recv(socket, 100), Err(errno(Errno::AGAIN)));
}

fn a_connected_datagram_socket(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    for at in loopbacks() {
        let (peer, stranger) = (udp(at), udp(at));
        let socket = scripted.socket(at, DATAGRAM);
        scripted.expect(KernelOp::Connect, &[socket], Some(peer.local_addr().unwrap()));
        assert_eq!(scripted.send(socket, b"to my peer"), 10);
        let mut bytes = [0; 100];
        let (count, name) = peer.recv_from(&mut bytes).unwrap();
        assert_eq!(&bytes[..count], b"to my peer");
        stranger.send_to(b"from a stranger", name).unwrap();
        peer.send_to(b"from the peer", name).unwrap();
        assert_eq!(scripted.recv(socket, 100).unwrap(), b"from the peer");
        scripted.expect(KernelOp::Close, &[socket], None);
    }
}

fn sending_without_a_destination(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let socket = scripted.socket(loopbacks()[0], DATAGRAM);
    assert_eq!(scripted.send(socket, b"no peer!"), errno(Errno::DESTADDRREQ));
}

fn a_datagram_that_is_too_long(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let peer = udp(loopbacks()[0]);
    let name = peer.local_addr().unwrap();
    let (socket, _) = bound(scripted, loopbacks()[0]);
    let long = errno(Errno::MSGSIZE);
    assert_eq!(scripted.call(KernelOp::SendTo, &[socket, 0, 65_508], Some(name)).result, long);
    let small = scripted.socket(loopbacks()[0], DATAGRAM);
    scripted.expect(KernelOp::Set, &[small, SockOption::SendBuffer as u64, 4096], None);
    assert_eq!(scripted.call(KernelOp::SendTo, &[small, 0, 4065], Some(name)).result, long);
    assert_eq!(scripted.call(KernelOp::SendTo, &[small, 0, 4064], Some(name)).result, 4064);
}

fn a_closed_port(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let at = loopbacks()[0];
    // A socket that is connected to itself: as good as closed for others, and nobody else's.
    let reserved = UdpSocket::bind(at).unwrap();
    let closed_port = reserved.local_addr().unwrap();
    reserved.connect(closed_port).unwrap();
    let socket = scripted.socket(at, DATAGRAM);
    scripted.expect(KernelOp::Connect, &[socket], Some(closed_port));
    assert_eq!(scripted.send(socket, b"hello?"), 6);
    assert_eq!(scripted.recv(socket, 10), Err(errno(Errno::CONNREFUSED)));
    // The error is returned once, and the socket stays usable.
    let peer = udp(at);
    scripted.expect(KernelOp::Connect, &[socket], Some(peer.local_addr().unwrap()));
    assert_eq!(scripted.send(socket, b"hello!"), 6);
    let mut bytes = [0; 10];
    assert_eq!(peer.recv(&mut bytes).unwrap(), 6);
}

fn a_burst_is_taken_in_order(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, name) = bound(scripted, loopbacks()[0]);
    let peer = udp(loopbacks()[0]);
    for number in 0..100_u64 {
        peer.send_to(&number.to_le_bytes(), name).unwrap();
    }
    for number in 0..100_u64 {
        assert_eq!(scripted.recv(socket, 100).unwrap(), number.to_le_bytes());
    }
}

fn a_full_ring_leaves_datagrams_queued(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let at = loopbacks()[0];
    let socket = scripted.socket(at, DATAGRAM);
    scripted.expect(KernelOp::Set, &[socket, SockOption::ReceiveBuffer as u64, 4096], None);
    scripted.expect(KernelOp::Bind, &[socket], Some(at));
    let name = scripted.call(KernelOp::LocalName, &[socket], None).address.unwrap();
    let peer = udp(at);
    for number in 0..20_u8 {
        peer.send_to(&[number; 1500], name).unwrap();
    }
    std::thread::sleep(Duration::from_millis(20));
    // Two fit; the others wait in the operating system's queue.
    for number in 0..20_u8 {
        assert_eq!(scripted.recv(socket, 2000).unwrap(), [number; 1500]);
    }
}

fn a_datagram_that_never_fits_is_dropped(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let at = loopbacks()[0];
    let socket = scripted.socket(at, DATAGRAM);
    scripted.expect(KernelOp::Set, &[socket, SockOption::ReceiveBuffer as u64, 4096], None);
    scripted.expect(KernelOp::Bind, &[socket], Some(at));
    let name = scripted.call(KernelOp::LocalName, &[socket], None).address.unwrap();
    let peer = udp(at);
    peer.send_to(&[1; 4070], name).unwrap();
    peer.send_to(b"small", name).unwrap();
    assert_eq!(scripted.recv(socket, 100).unwrap(), b"small");
    until("it is counted", || harness.host.stats().dropped == 1);
}

fn datagrams_are_polled_too(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, name) = bound(scripted, loopbacks()[0]);
    let both = events::IN | events::OUT;
    assert_eq!(poll(scripted, &[(socket, both)], FOREVER), (1, vec![events::OUT]));
    udp(loopbacks()[0]).send_to(b"x", name).unwrap();
    assert_eq!(poll(scripted, &[(socket, events::IN)], FOREVER), (1, vec![events::IN]));
}

fn between_two_kernels(testbed: &Testbed) {
    let harness = testbed.harness(2);
    let (here, there) = (&harness.scripted_kernels[0], &harness.scripted_kernels[1]);
    for at in loopbacks() {
        let ((a, a_name), (b, b_name)) = (bound(here, at), bound(there, at));
        for number in 0..20_u8 {
            here.put(0, &[number; 100]);
            assert_eq!(here.call(KernelOp::SendTo, &[a, 0, 100], Some(b_name)).result, 100);
            let answer = there.call(KernelOp::RecvFrom, &[b, 0, 200], None);
            assert_eq!((answer.result, answer.address), (100, Some(a_name)));
            assert_eq!(there.show(0, 100), [number; 100]);
        }
        here.expect(KernelOp::Connect, &[a], Some(b_name));
        assert_eq!(here.call(KernelOp::PeerName, &[a], None).address, Some(b_name));
        assert_eq!(there.call(KernelOp::PeerName, &[b], None).result, errno(Errno::NOTCONN));
        here.expect(KernelOp::Close, &[a], None);
        there.expect(KernelOp::Close, &[b], None);
    }
}

fn an_address_is_bound_once(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (first, name) = bound(scripted, loopbacks()[0]);
    let second = scripted.socket(name, DATAGRAM);
    let bind =
        |at: &str| scripted.call(KernelOp::Bind, &[second], Some(at.parse().unwrap())).result;
    assert_eq!(bind(&name.to_string()), errno(Errno::ADDRINUSE));
    assert_eq!(bind("192.0.2.1:0"), errno(Errno::ADDRNOTAVAIL));
    scripted.expect(KernelOp::Close, &[first], None);
    assert_eq!(bind(&name.to_string()), 0);
}

fn bytes_are_sent_after_close(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let peer = udp(loopbacks()[0]);
    for number in 0..10_u8 {
        let (socket, _) = bound(scripted, loopbacks()[0]);
        scripted.put(0, &[number]);
        scripted.expect(KernelOp::SendTo, &[socket, 0, 1], Some(peer.local_addr().unwrap()));
        scripted.expect(KernelOp::Close, &[socket], None);
        let mut bytes = [0; 10];
        assert_eq!((peer.recv(&mut bytes).unwrap(), bytes[0]), (1, number));
    }
    until("all are free", || harness.host.stats().open == 0);
}
