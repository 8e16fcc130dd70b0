//! Datagrams of the family `warp`: between kernels, and between a kernel and peers that answer late, wrongly, or not at all.

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use warpwire::sock::device::Setting;
use warpwire::sock::warp::{Card, Datagram, WORDS_LEN, Words};

use crate::sock::puppet::{Do, Puppet, soon};
use crate::sock::warp::Two;
use crate::sock::world::{DATAGRAM, World, errno, loopbacks, until};
use testkit::cases;

cases!(World; CASES:
    between_two_kernels,
    any_address_will_do,
    a_name_without_an_address,
    those_to_others_go_on,
    a_peer_that_begins_anew,
    a_thousand_are_received_or_counted,
    a_thousand_for_a_kernel_that_sleeps,
    strange_words_harm_nobody,
    answers_that_nobody_asked_for,
    closed_while_it_asks,
    a_name_is_one_sockets,
    the_last_words_of_a_socket,
);

fn bound(puppet: &Puppet, at: SocketAddr) -> (u64, SocketAddr) {
    let socket = puppet.socket(at, DATAGRAM);
    puppet.expect(Do::Bind, &[socket], Some(at));
    (socket, puppet.call(Do::LocalName, &[socket], None).address.unwrap())
}

fn send_to(puppet: &Puppet, socket: u64, bytes: &[u8], to: SocketAddr) {
    puppet.put(0, bytes);
    let sent = puppet.call(Do::SendTo, &[socket, 0, bytes.len() as u64], Some(to)).result;
    assert_eq!(sent, bytes.len() as i64);
}

fn between_two_kernels(world: &World) {
    let two = Two::small(world, 1);
    let (here, there) = (two.here.first(), two.there.first());
    for at in loopbacks() {
        let ((a, a_name), (b, b_name)) = (bound(here, at), bound(there, at));
        for number in 0..50_u64 {
            send_to(here, a, &number.to_le_bytes(), b_name);
            let answer = there.call(Do::RecvFrom, &[b, 0, 100], None);
            assert_eq!((answer.result, answer.address), (8, Some(a_name)));
            send_to(there, b, &[7; 3000], a_name);
            let answer = here.call(Do::RecvFrom, &[a, 0, 4000], None);
            assert_eq!((answer.result, answer.address), (3000, Some(b_name)));
        }
        here.expect(Do::Connect, &[a], Some(b_name));
        assert_eq!(here.call(Do::PeerName, &[a], None).address, Some(b_name));
        assert_eq!(here.send(a, b"named"), 5);
        assert_eq!(there.recv(b, 10).unwrap(), b"named");
        assert_eq!(there.call(Do::PeerName, &[b], None).result, errno(Errno::NOTCONN));
        here.expect(Do::Close, &[a], None);
        there.expect(Do::Close, &[b], None);
    }
}

/// A socket that is bound to any address is reached by each, and answers by it.
fn any_address_will_do(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    for (any, at) in [("0.0.0.0:0", loopbacks()[0]), ("[::]:0", loopbacks()[1])] {
        let (socket, name) = bound(puppet, any.parse().unwrap());
        let peer = world.family.mail(at);
        peer.send_to(b"hello", (at.ip(), name.port()).into());
        let answer = puppet.call(Do::RecvFrom, &[socket, 0, 100], None);
        assert_eq!((answer.result, answer.address), (5, Some(peer.local_addr())));
        send_to(puppet, socket, b"yes", peer.local_addr());
        let mut bytes = [0; 10];
        let (count, from) = peer.recv_from(&mut bytes);
        assert_eq!((&bytes[..count], from), (&b"yes"[..], (at.ip(), name.port()).into()));
        puppet.expect(Do::Close, &[socket], None);
    }
}

/// A socket that sends before it has a name gets one.
fn a_name_without_an_address(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let at = loopbacks()[0];
    let (socket, peer) = (puppet.socket(at, DATAGRAM), world.family.mail(at));
    send_to(puppet, socket, b"who am I?", peer.local_addr());
    let mut bytes = [0; 10];
    let (_, from) = peer.recv_from(&mut bytes);
    let name = puppet.call(Do::LocalName, &[socket], None).address.unwrap();
    assert_eq!((from.ip(), from.port()), (at.ip(), name.port()));
    let six = puppet.call(Do::SendTo, &[socket, 0, 1], Some("[::1]:9".parse().unwrap())).result;
    assert_eq!(six, 1, "what is wrong with it is told later, as by UDP");
    assert_eq!(puppet.recv(socket, 10), Err(errno(Errno::AFNOSUPPORT)));
    send_to(puppet, socket, b"all", "224.0.0.1:9".parse().unwrap());
    assert_eq!(puppet.recv(socket, 10), Err(errno(Errno::OPNOTSUPP)));
}

fn those_to_others_go_on(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let at = loopbacks()[0];
    let (socket, _) = bound(puppet, at);
    // Somebody who is there, and says nothing.
    let silent = UdpSocket::bind(at).unwrap();
    let peer = world.family.mail(at);
    let begun = Instant::now();
    // More than may wait for one name.
    for _ in 0..100 {
        send_to(puppet, socket, b"hello?", silent.local_addr().unwrap());
    }
    send_to(puppet, socket, b"hello!", peer.local_addr());
    let mut bytes = [0; 10];
    assert_eq!(peer.recv_from(&mut bytes).0, 6);
    assert!(begun.elapsed() < Duration::from_millis(900), "it waited for the silent one");
    assert_eq!(puppet.recv(socket, 10), Err(errno(Errno::HOSTUNREACH)));
    assert!(begun.elapsed() >= Duration::from_millis(900), "it gave up too soon");
    until("all are counted", || stage.host.stats().dropped == 100);
}

fn a_peer_that_begins_anew(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let at = loopbacks()[0];
    let (socket, _) = bound(puppet, at);
    let mut peer = Datagram::bind(at).unwrap();
    let name = peer.local_addr().unwrap();
    for _ in 0..2 {
        peer.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        until("it is found", || {
            send_to(puppet, socket, b"are you there?", name);
            peer.recv(&mut [0; 20]).is_ok()
        });
        drop(peer);
        peer = Datagram::bind(name).unwrap();
    }
}

fn a_thousand_are_received_or_counted(world: &World) {
    const COUNT: u64 = 1000;
    let stage = world.stage(1);
    let puppet = stage.first();
    let at = loopbacks()[0];
    let (socket, _) = bound(puppet, at);
    let peer = Datagram::bind(at).unwrap();
    peer.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    for number in 0..COUNT {
        send_to(puppet, socket, &number.to_le_bytes(), peer.local_addr().unwrap());
    }
    let (mut received, mut last) = (0, None);
    let mut bytes = [0; 8];
    while peer.recv(&mut bytes).is_ok() {
        let number = u64::from_le_bytes(bytes);
        assert!(last.is_none_or(|last| last < number), "{number} after {last:?}");
        (received, last) = (received + 1, Some(number));
    }
    let (there, here) = (peer.stats(), stage.host.stats());
    assert_eq!(there.received, received);
    assert_eq!(received + there.dropped + here.dropped, COUNT, "{there:?} {here:?}");
    assert!(received >= 200, "{there:?} {here:?}");
}

fn a_thousand_for_a_kernel_that_sleeps(world: &World) {
    const COUNT: u64 = 1000;
    let stage = world.stage(1);
    let puppet = stage.first();
    let at = loopbacks()[0];
    let socket = puppet.socket(at, DATAGRAM);
    puppet.expect(Do::Set, &[socket, Setting::ReceiveBuffer as u64, 4096], None);
    puppet.expect(Do::Bind, &[socket], Some(at));
    let name = puppet.call(Do::LocalName, &[socket], None).address.unwrap();
    let peer = Datagram::bind(at).unwrap();
    for number in 0..COUNT {
        assert_eq!(peer.send_to(&number.to_le_bytes(), name).unwrap(), 8);
    }
    puppet.expect(Do::Set, &[socket, Setting::ReceiveTimeout as u64, 200_000_000], None);
    let mut received = 0;
    while puppet.recv(socket, 8).is_ok() {
        received += 1;
    }
    assert!(received >= 200, "{received}");
    until("the rest is counted", || received + stage.host.stats().dropped == COUNT);
}

fn ask(udp: &UdpSocket, words: &[u8], at: SocketAddr) -> Option<Words> {
    udp.send_to(words, at).unwrap();
    let mut bytes = [0; 100];
    let (count, from) = udp.recv_from(&mut bytes).ok()?;
    assert_eq!((count, from), (WORDS_LEN, at), "no answer is longer than its question");
    Words::read(&bytes[..count]).ok()
}

fn strange_words_harm_nobody(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let at = loopbacks()[0];
    let (socket, name) = bound(puppet, at);
    let udp = UdpSocket::bind(at).unwrap();
    udp.set_read_timeout(Some(Duration::from_millis(50))).unwrap();
    let good = Words::Question { nonce: 5, asked: name };
    let elsewhere = Words::Question { nonce: 5, asked: "10.9.8.7:9".parse().unwrap() };
    let card = Card { port: 1, qpn: 1, qkey: 1, longest: 1 };
    let answer = Words::Answer { nonce: 5, asked: name, card };
    let mut old = good.bytes();
    old[4] = 9;
    let long = [&good.bytes()[..], &[0]].concat();
    for strange in
        [&b""[..], b"hello", &[0; 2000], &long, &old, &elsewhere.bytes(), &answer.bytes()]
    {
        assert_eq!(ask(&udp, strange, name), None, "{strange:?}");
    }
    udp.set_read_timeout(Some(soon())).unwrap();
    match ask(&udp, &good.bytes(), name) {
        Some(Words::Answer { nonce, asked, card }) => {
            assert_eq!((nonce, asked, card.longest), (5, name, 4088));
        }
        other => panic!("{other:?}"),
    }
    let peer = world.family.mail(at);
    peer.send_to(b"still there?", name);
    assert_eq!(puppet.recv(socket, 100).unwrap(), b"still there?");
}

/// Somebody answers, but not what was asked; then rightly.
fn answers_that_nobody_asked_for(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let at = loopbacks()[0];
    let (socket, _) = bound(puppet, at);
    let (liar, real) = (UdpSocket::bind(at).unwrap(), world.family.mail(at));
    let name = liar.local_addr().unwrap();
    let asking = Words::Question { nonce: 1, asked: real.local_addr() };
    liar.set_read_timeout(Some(soon())).unwrap();
    let Some(Words::Answer { card, .. }) = ask(&liar, &asking.bytes(), real.local_addr()) else {
        panic!("no answer");
    };
    send_to(puppet, socket, b"hello", name);
    let mut bytes = [0; 100];
    let (count, from) = liar.recv_from(&mut bytes).unwrap();
    let Ok(Words::Question { nonce, asked }) = Words::read(&bytes[..count]) else { panic!() };
    assert_eq!(asked, name);
    let other = real.local_addr();
    for wrong in [
        Words::Answer { nonce: nonce ^ 1, asked, card },
        Words::Answer { nonce, asked: other, card },
        Words::Question { nonce, asked },
    ] {
        liar.send_to(&wrong.bytes(), from).unwrap();
    }
    // Another than was asked may know everything, and is not heard.
    let right = Words::Answer { nonce, asked, card };
    UdpSocket::bind(at).unwrap().send_to(&right.bytes(), from).unwrap();
    let (count, _) = liar.recv_from(&mut bytes).unwrap();
    assert_eq!(Words::read(&bytes[..count]), Ok(Words::Question { nonce, asked }), "asked again");
    liar.send_to(&right.bytes(), from).unwrap();
    assert_eq!(real.recv_from(&mut bytes).0, 5);
}

fn closed_while_it_asks(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let at = loopbacks()[0];
    let silent = UdpSocket::bind(at).unwrap();
    let (socket, name) = bound(puppet, at);
    send_to(puppet, socket, b"hello?", silent.local_addr().unwrap());
    let begun = Instant::now();
    puppet.expect(Do::Close, &[socket], None);
    assert!(begun.elapsed() < Duration::from_millis(500), "closing waits for nobody");
    assert_eq!(puppet.recv(socket, 1), Err(errno(Errno::BADF)));
    until("its place is free", || stage.host.stats().open == 0);
    bound(puppet, name);
}

fn a_name_is_one_sockets(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let (_, name) = bound(puppet, loopbacks()[0]);
    let second = puppet.socket(name, DATAGRAM);
    let taken = puppet.call(Do::Bind, &[second], Some(name)).result;
    assert_eq!(taken, errno(Errno::ADDRINUSE));
    let far = puppet.call(Do::Bind, &[second], Some("192.0.2.1:0".parse().unwrap())).result;
    assert_eq!(far, errno(Errno::ADDRNOTAVAIL));
    assert!(Datagram::bind(name).is_err(), "nor a CPU program's");
}

/// What was sent before a socket was closed goes, though the name was unknown.
fn the_last_words_of_a_socket(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let at = loopbacks()[0];
    let peer = world.family.mail(at);
    for number in 0..10_u8 {
        let (socket, _) = bound(puppet, at);
        send_to(puppet, socket, &[number], peer.local_addr());
        puppet.expect(Do::Close, &[socket], None);
        let mut bytes = [0; 10];
        assert_eq!(peer.recv_from(&mut bytes).0, 1);
        assert_eq!(bytes[0], number);
    }
}
