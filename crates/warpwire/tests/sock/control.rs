//! Making, naming, connecting and closing; settings; what is refused.

use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use warpwire::sock::SockOptions;
use warpwire::sock::device::Setting;

use crate::sock::puppet::Do;
use crate::sock::world::{
    DATAGRAM, Deserted, STREAM, WARP_DATAGRAM, WARP_STREAM, World, errno, loopbacks, until,
};
use testkit::cases;

cases!(World; CASES:
    names_are_told,
    an_address_in_use_is_refused,
    nobody_listens,
    a_closed_handle_is_refused,
    too_many_sockets,
    no_room_for_rings,
    settings_come_back,
    bad_settings_are_refused,
    bad_calls_are_refused,
    streams_are_no_datagrams,
    kinds_that_do_not_exist,
    connecting_again_after_a_refusal,
    options_that_make_no_sense,
);

fn names_are_told(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    for at in loopbacks() {
        let (socket, peer) = puppet.connected(at);
        let local = puppet.call(Do::LocalName, &[socket], None);
        assert_eq!(local.address, Some(peer.peer_addr()));
        let remote = puppet.call(Do::PeerName, &[socket], None);
        assert_eq!(remote.address, Some(peer.local_addr()));
        puppet.expect(Do::Close, &[socket], None);
        let fresh = puppet.socket(at, STREAM);
        assert_eq!(puppet.call(Do::PeerName, &[fresh], None).result, errno(Errno::NOTCONN));
        puppet.expect(Do::Close, &[fresh], None);
    }
}

fn an_address_in_use_is_refused(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    for at in loopbacks() {
        let taken = TcpListener::bind(at).unwrap();
        let name = taken.local_addr().unwrap();
        let socket = puppet.socket(at, STREAM);
        // Binding to a listener's address fails at once, or when it is listened at.
        let bound = puppet.call(Do::Bind, &[socket], Some(name)).result;
        let refused = errno(Errno::ADDRINUSE);
        assert!(bound == refused || puppet.call(Do::Listen, &[socket, 5], None).result == refused);
        drop(taken);
        puppet.expect(Do::Close, &[socket], None);
        let socket = puppet.socket(at, STREAM);
        puppet.expect(Do::Bind, &[socket], Some(name));
        puppet.expect(Do::Listen, &[socket, 5], None);
        assert!(TcpListener::bind(name).is_err(), "now the kernel has it");
        puppet.expect(Do::Close, &[socket], None);
    }
}

fn nobody_listens(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    for at in loopbacks() {
        let socket = puppet.socket(at, STREAM);
        let deserted = Deserted::at(at);
        let answer = puppet.call(Do::Connect, &[socket], Some(deserted.name));
        assert_eq!(answer.result, errno(Errno::CONNREFUSED));
        assert_eq!(puppet.call(Do::Get, &[socket, Setting::Error as u64], None).result, 111);
        assert_eq!(puppet.send(socket, b"x"), errno(Errno::CONNREFUSED));
        puppet.expect(Do::Close, &[socket], None);
    }
}

fn a_closed_handle_is_refused(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let at = loopbacks()[0];
    let (socket, _peer) = puppet.connected(at);
    puppet.expect(Do::Close, &[socket], None);
    let bad = errno(Errno::BADF);
    assert_eq!(puppet.call(Do::Close, &[socket], None).result, bad);
    assert_eq!(puppet.send(socket, b"x"), bad);
    assert_eq!(puppet.recv(socket, 1), Err(bad));
    assert_eq!(puppet.call(Do::Get, &[socket, Setting::NoDelay as u64], None).result, bad);
    assert_eq!(puppet.call(Do::Accept, &[socket], None).result, bad);
    // The same place with another generation, places that are not there, and no handles at all.
    for strange in [socket ^ 1 << 16, 63 | 1 << 16, 0xffff | 1 << 16, 5, 0x8000_0001, 0xffff_ffff] {
        assert_eq!(puppet.call(Do::Close, &[strange], None).result, bad, "{strange:#x}");
        assert_eq!(puppet.send(strange, b"x"), bad, "{strange:#x}");
    }
}

fn too_many_sockets(world: &World) {
    let options = SockOptions { sockets: 4, arena: 1 << 20, ..world.options() };
    let stage = world.stage_with(1, options);
    let puppet = stage.first();
    let at = loopbacks()[0];
    let mut open: Vec<_> = (0..4).map(|_| puppet.socket(at, STREAM)).collect();
    assert_eq!(
        puppet.call(Do::Socket, &[4, puppet.kind(STREAM)], None).result,
        errno(Errno::MFILE)
    );
    puppet.expect(Do::Close, &[open.remove(2)], None);
    open.push(puppet.socket(at, STREAM));
    assert_eq!(
        puppet.call(Do::Socket, &[4, puppet.kind(STREAM)], None).result,
        errno(Errno::MFILE)
    );
    assert_eq!(stage.host.stats().open, 4);
    for socket in open {
        puppet.expect(Do::Close, &[socket], None);
    }
    until("all are closed", || stage.host.stats().open == 0);
}

fn no_room_for_rings(world: &World) {
    // Two rings of each direction.
    let options = SockOptions { arena: 128 << 10, ..world.options() };
    let stage = world.stage_with(1, options);
    let puppet = stage.first();
    let at = loopbacks()[0];
    let (first, second) = (puppet.connected(at), puppet.connected(at));
    let server = world.family.serve(at);
    let name = server.local_addr();
    let third = puppet.socket(at, STREAM);
    assert_eq!(puppet.call(Do::Connect, &[third], Some(name)).result, errno(Errno::NOBUFS));
    puppet.expect(Do::Close, &[first.0], None);
    until("its rings are back", || stage.host.stats().open == 2);
    puppet.expect(Do::Connect, &[third], Some(name));
    puppet.expect(Do::Close, &[second.0], None);
}

fn settings_come_back(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let socket = puppet.socket(loopbacks()[1], STREAM);
    let pairs = [
        (Setting::NonBlocking, 0, 1, 1),
        (Setting::SendTimeout, 0, 5_000_000, 5_000_000),
        (Setting::ReceiveTimeout, 0, 7_000_000, 7_000_000),
        (Setting::SendBuffer, 64 << 10, 100_000, 128 << 10),
        (Setting::ReceiveBuffer, 64 << 10, 1, 4096),
        (Setting::NoDelay, 1, 0, 0),
        (Setting::ReuseAddress, 1, 0, 0),
        (Setting::KeepAlive, 0, 1, 1),
        (Setting::OnlyV6, 0, 1, 1),
        (Setting::Linger, -1, 0, 0),
    ];
    for (setting, before, wanted, after) in pairs {
        let get = || puppet.call(Do::Get, &[socket, setting as u64], None).result;
        assert_eq!(get(), before, "{setting:?} at first");
        puppet.expect(Do::Set, &[socket, setting as u64, wanted], None);
        assert_eq!(get(), after, "{setting:?}");
    }
    puppet.expect(Do::Set, &[socket, Setting::NonBlocking as u64, 0], None);
    assert_eq!(puppet.call(Do::Get, &[socket, Setting::NonBlocking as u64], None).result, 0);
    puppet.expect(Do::Close, &[socket], None);
}

fn bad_settings_are_refused(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let socket = puppet.socket(loopbacks()[0], STREAM);
    let set = |socket, setting: Setting, value: i64| {
        puppet.call(Do::Set, &[socket, setting as u64, value as u64], None).result
    };
    assert_eq!(set(socket, Setting::SendBuffer, 0), errno(Errno::INVAL));
    assert_eq!(set(socket, Setting::SendBuffer, -1), errno(Errno::INVAL));
    assert_eq!(set(socket, Setting::ReceiveBuffer, 1 << 40), errno(Errno::INVAL));
    assert_eq!(set(socket, Setting::SendTimeout, -5), errno(Errno::INVAL));
    assert_eq!(set(socket, Setting::Linger, 7), errno(Errno::INVAL));
    assert_eq!(set(socket, Setting::Error, 7), errno(Errno::NOPROTOOPT));
    let (connected, _peer) = puppet.connected(loopbacks()[0]);
    assert_eq!(set(connected, Setting::SendBuffer, 8192), errno(Errno::ISCONN));
    let datagrams = puppet.socket(loopbacks()[0], DATAGRAM);
    assert_eq!(set(datagrams, Setting::NoDelay, 1), errno(Errno::OPNOTSUPP));
    assert_eq!(set(datagrams, Setting::SendBuffer, 8192), 0);
}

fn bad_calls_are_refused(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let [v4, v6] = loopbacks();
    let socket = puppet.socket(v4, STREAM);
    assert_eq!(puppet.call(Do::Bind, &[socket], Some(v6)).result, errno(Errno::AFNOSUPPORT));
    assert_eq!(puppet.call(Do::Connect, &[socket], Some(v6)).result, errno(Errno::AFNOSUPPORT));
    assert_eq!(puppet.send(socket, b"x"), errno(Errno::NOTCONN));
    assert_eq!(puppet.recv(socket, 1), Err(errno(Errno::NOTCONN)));
    assert_eq!(puppet.call(Do::Accept, &[socket], None).result, errno(Errno::INVAL));
    assert_eq!(puppet.call(Do::Shutdown, &[socket, 1], None).result, errno(Errno::NOTCONN));
    let far: SocketAddr = "192.0.2.1:9".parse().unwrap();
    assert_eq!(puppet.call(Do::Bind, &[socket], Some(far)).result, errno(Errno::ADDRNOTAVAIL));
    let (connected, _peer) = puppet.connected(v4);
    assert_eq!(puppet.call(Do::Connect, &[connected], Some(v4)).result, errno(Errno::ISCONN));
    assert_eq!(puppet.call(Do::Listen, &[connected, 1], None).result, errno(Errno::INVAL));
    let datagrams = puppet.socket(v4, DATAGRAM);
    assert_eq!(puppet.call(Do::Listen, &[datagrams, 1], None).result, errno(Errno::OPNOTSUPP));
    let (listener, _) = puppet.listener(v4, 4);
    assert_eq!(puppet.call(Do::Connect, &[listener], Some(v4)).result, errno(Errno::OPNOTSUPP));
    assert_eq!(puppet.send(listener, b"x"), errno(Errno::NOTCONN));
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

/// Among them datagrams of the family `warp`.
fn kinds_that_do_not_exist(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    for kind in [0, WARP_DATAGRAM, 5, 256, u64::from(u32::MAX >> 1)] {
        for family in [4, 6] {
            let refused = puppet.call(Do::Socket, &[family, kind], None).result;
            assert_eq!(refused, errno(Errno::SOCKTNOSUPPORT), "kind {kind} of IPv{family}");
        }
    }
    assert_eq!(stage.host.stats().open, 0, "a refusal takes no place");
    for kind in [STREAM, DATAGRAM, WARP_STREAM] {
        puppet.expect(Do::Socket, &[4, kind], None);
    }
}

fn connecting_again_after_a_refusal(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let at = loopbacks()[0];
    let socket = puppet.socket(at, STREAM);
    let deserted = Deserted::at(at);
    let refused = puppet.call(Do::Connect, &[socket], Some(deserted.name));
    assert_eq!(refused.result, errno(Errno::CONNREFUSED));
    let server = world.family.serve(at);
    puppet.expect(Do::Connect, &[socket], Some(server.local_addr()));
    assert_eq!(puppet.send(socket, b"at last"), 7);
    assert_eq!(puppet.call(Do::Get, &[socket, Setting::Error as u64], None).result, 0);
}

fn options_that_make_no_sense(world: &World) {
    let good = world.options();
    let start = Instant::now();
    for bad in [
        SockOptions { sockets: 0, ..good },
        SockOptions { sockets: 70_000, ..good },
        SockOptions { requests: 3, ..good },
        SockOptions { arena: 5000, ..good },
        SockOptions { ring: 0, ..good },
        SockOptions { ring: 1 << 31, ..good },
        SockOptions { ring: 8192, arena: 4096, ..good },
        SockOptions { silence: Duration::from_millis(1), ..good },
    ] {
        let error = warpwire::sock::SockHost::start(&world.gpu, bad).unwrap_err();
        assert_eq!(error.kind(), &warpwire::error::Kind::InvalidArgument);
        assert!(error.advice().is_some(), "{error}");
    }
    assert!(start.elapsed() < Duration::from_secs(5));
}
