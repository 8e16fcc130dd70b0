//! Create, bind, connect, close, options, and refusals.

use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use warpwire::sock::device::SockOption;

use crate::sock::scripted::KernelOp;
use crate::sock::testbed::{
    ClosedPort, DATAGRAM, STREAM, Testbed, WARP_DATAGRAM, WARP_STREAM, errno, loopbacks, until,
};
use testkit::{cases, deadline};

cases!(Testbed; CASES:
    names_are_returned,
    an_address_in_use_is_refused,
    connecting_without_a_listener_is_refused,
    a_closed_handle_is_refused,
    too_many_sockets,
    no_memory_for_rings,
    options_are_kept,
    bad_options_are_refused,
    bad_calls_are_refused,
    streams_refuse_datagram_calls,
    kinds_that_do_not_exist,
    connecting_again_after_a_refusal,
    invalid_sock_options,
);

fn names_are_returned(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    for at in loopbacks() {
        let (socket, peer) = scripted.connected(at);
        let local = scripted.call(KernelOp::LocalName, &[socket], None);
        assert_eq!(local.address, Some(peer.peer_addr()));
        let remote = scripted.call(KernelOp::PeerName, &[socket], None);
        assert_eq!(remote.address, Some(peer.local_addr()));
        scripted.expect(KernelOp::Close, &[socket], None);
        let fresh = scripted.socket(at, STREAM);
        assert_eq!(scripted.call(KernelOp::PeerName, &[fresh], None).result, errno(Errno::NOTCONN));
        scripted.expect(KernelOp::Close, &[fresh], None);
    }
}

fn an_address_in_use_is_refused(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    for at in loopbacks() {
        let taken = TcpListener::bind(at).unwrap();
        let name = taken.local_addr().unwrap();
        let socket = scripted.socket(at, STREAM);
        // Binding to a listener's address fails immediately, or when listening.
        let bound = scripted.call(KernelOp::Bind, &[socket], Some(name)).result;
        let refused = errno(Errno::ADDRINUSE);
        assert!(
            bound == refused
                || scripted.call(KernelOp::Listen, &[socket, 5], None).result == refused
        );
        drop(taken);
        scripted.expect(KernelOp::Close, &[socket], None);
        // Another process may get the port first.
        let socket = scripted.socket(at, STREAM);
        if scripted.call(KernelOp::Bind, &[socket], Some(name)).result == refused {
            println!("skipped: another process has {name}");
            scripted.expect(KernelOp::Close, &[socket], None);
            continue;
        }
        scripted.expect(KernelOp::Listen, &[socket, 5], None);
        assert!(TcpListener::bind(name).is_err(), "the kernel is bound to it");
        scripted.expect(KernelOp::Close, &[socket], None);
    }
}

fn connecting_without_a_listener_is_refused(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    for at in loopbacks() {
        let socket = scripted.socket(at, STREAM);
        let closed_port = ClosedPort::at(at);
        let answer = scripted.call(KernelOp::Connect, &[socket], Some(closed_port.name));
        assert_eq!(answer.result, errno(Errno::CONNREFUSED));
        assert_eq!(
            scripted.call(KernelOp::Get, &[socket, SockOption::Error as u64], None).result,
            111
        );
        assert_eq!(scripted.send(socket, b"x"), errno(Errno::CONNREFUSED));
        scripted.expect(KernelOp::Close, &[socket], None);
    }
}

fn a_closed_handle_is_refused(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let at = loopbacks()[0];
    let (socket, _peer) = scripted.connected(at);
    scripted.expect(KernelOp::Close, &[socket], None);
    let bad = errno(Errno::BADF);
    assert_eq!(scripted.call(KernelOp::Close, &[socket], None).result, bad);
    assert_eq!(scripted.send(socket, b"x"), bad);
    assert_eq!(scripted.recv(socket, 1), Err(bad));
    assert_eq!(
        scripted.call(KernelOp::Get, &[socket, SockOption::NoDelay as u64], None).result,
        bad
    );
    assert_eq!(scripted.call(KernelOp::Accept, &[socket], None).result, bad);
    // The same slot with another generation, slots that do not exist, and invalid handles.
    for strange in [socket ^ 1 << 16, 63 | 1 << 16, 0xffff | 1 << 16, 5, 0x8000_0001, 0xffff_ffff] {
        assert_eq!(scripted.call(KernelOp::Close, &[strange], None).result, bad, "{strange:#x}");
        assert_eq!(scripted.send(strange, b"x"), bad, "{strange:#x}");
    }
}

fn too_many_sockets(testbed: &Testbed) {
    let options = testbed.options().with_sockets(4).with_arena(1 << 20);
    let harness = testbed.harness_with(1, options);
    let scripted = harness.first();
    let at = loopbacks()[0];
    let mut open: Vec<_> = (0..4).map(|_| scripted.socket(at, STREAM)).collect();
    assert_eq!(
        scripted.call(KernelOp::Socket, &[4, scripted.kind(STREAM)], None).result,
        errno(Errno::MFILE)
    );
    scripted.expect(KernelOp::Close, &[open.remove(2)], None);
    open.push(scripted.socket(at, STREAM));
    assert_eq!(
        scripted.call(KernelOp::Socket, &[4, scripted.kind(STREAM)], None).result,
        errno(Errno::MFILE)
    );
    assert_eq!(harness.host.stats().open, 4);
    for socket in open {
        scripted.expect(KernelOp::Close, &[socket], None);
    }
    until("all are closed", || harness.host.stats().open == 0);
}

fn no_memory_for_rings(testbed: &Testbed) {
    // Two rings in each direction.
    let options = testbed.options().with_arena(128 << 10);
    let harness = testbed.harness_with(1, options);
    let scripted = harness.first();
    let at = loopbacks()[0];
    let (first, second) = (scripted.connected(at), scripted.connected(at));
    let server = testbed.family.serve(at);
    let name = server.local_addr();
    let third = scripted.socket(at, STREAM);
    assert_eq!(scripted.call(KernelOp::Connect, &[third], Some(name)).result, errno(Errno::NOBUFS));
    scripted.expect(KernelOp::Close, &[first.0], None);
    until("its rings are free", || harness.host.stats().open == 2);
    scripted.expect(KernelOp::Connect, &[third], Some(name));
    scripted.expect(KernelOp::Close, &[second.0], None);
}

fn options_are_kept(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let socket = scripted.socket(loopbacks()[1], STREAM);
    let pairs = [
        (SockOption::NonBlocking, 0, 1, 1),
        (SockOption::SendTimeout, 0, 5_000_000, 5_000_000),
        (SockOption::ReceiveTimeout, 0, 7_000_000, 7_000_000),
        (SockOption::SendBuffer, 64 << 10, 100_000, 128 << 10),
        (SockOption::ReceiveBuffer, 64 << 10, 1, 4096),
        (SockOption::NoDelay, 1, 0, 0),
        (SockOption::ReuseAddress, 1, 0, 0),
        (SockOption::KeepAlive, 0, 1, 1),
        (SockOption::V6Only, 0, 1, 1),
        (SockOption::Linger, -1, 0, 0),
    ];
    for (setting, before, wanted, after) in pairs {
        let get = || scripted.call(KernelOp::Get, &[socket, setting as u64], None).result;
        assert_eq!(get(), before, "{setting:?} by default");
        scripted.expect(KernelOp::Set, &[socket, setting as u64, wanted], None);
        assert_eq!(get(), after, "{setting:?}");
    }
    scripted.expect(KernelOp::Set, &[socket, SockOption::NonBlocking as u64, 0], None);
    assert_eq!(
        scripted.call(KernelOp::Get, &[socket, SockOption::NonBlocking as u64], None).result,
        0
    );
    scripted.expect(KernelOp::Close, &[socket], None);
}

fn bad_options_are_refused(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let socket = scripted.socket(loopbacks()[0], STREAM);
    let set = |socket, setting: SockOption, value: i64| {
        scripted.call(KernelOp::Set, &[socket, setting as u64, value as u64], None).result
    };
    assert_eq!(set(socket, SockOption::SendBuffer, 0), errno(Errno::INVAL));
    assert_eq!(set(socket, SockOption::SendBuffer, -1), errno(Errno::INVAL));
    assert_eq!(set(socket, SockOption::ReceiveBuffer, 1 << 40), errno(Errno::INVAL));
    assert_eq!(set(socket, SockOption::SendTimeout, -5), errno(Errno::INVAL));
    assert_eq!(set(socket, SockOption::Linger, 7), errno(Errno::INVAL));
    assert_eq!(set(socket, SockOption::Error, 7), errno(Errno::NOPROTOOPT));
    let (connected, _peer) = scripted.connected(loopbacks()[0]);
    assert_eq!(set(connected, SockOption::SendBuffer, 8192), errno(Errno::ISCONN));
    let datagrams = scripted.socket(loopbacks()[0], DATAGRAM);
    assert_eq!(set(datagrams, SockOption::NoDelay, 1), errno(Errno::OPNOTSUPP));
    assert_eq!(set(datagrams, SockOption::SendBuffer, 8192), 0);
}

fn bad_calls_are_refused(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let [v4, v6] = loopbacks();
    let socket = scripted.socket(v4, STREAM);
    assert_eq!(
        scripted.call(KernelOp::Bind, &[socket], Some(v6)).result,
        errno(Errno::AFNOSUPPORT)
    );
    assert_eq!(
        scripted.call(KernelOp::Connect, &[socket], Some(v6)).result,
        errno(Errno::AFNOSUPPORT)
    );
    assert_eq!(scripted.send(socket, b"x"), errno(Errno::NOTCONN));
    assert_eq!(scripted.recv(socket, 1), Err(errno(Errno::NOTCONN)));
    assert_eq!(scripted.call(KernelOp::Accept, &[socket], None).result, errno(Errno::INVAL));
    assert_eq!(scripted.call(KernelOp::Shutdown, &[socket, 1], None).result, errno(Errno::NOTCONN));
    let far: SocketAddr = "192.0.2.1:9".parse().unwrap();
    assert_eq!(
        scripted.call(KernelOp::Bind, &[socket], Some(far)).result,
        errno(Errno::ADDRNOTAVAIL)
    );
    let (connected, _peer) = scripted.connected(v4);
    assert_eq!(
        scripted.call(KernelOp::Connect, &[connected], Some(v4)).result,
        errno(Errno::ISCONN)
    );
    assert_eq!(scripted.call(KernelOp::Listen, &[connected, 1], None).result, errno(Errno::INVAL));
    let datagrams = scripted.socket(v4, DATAGRAM);
    assert_eq!(
        scripted.call(KernelOp::Listen, &[datagrams, 1], None).result,
        errno(Errno::OPNOTSUPP)
    );
    let (listener, _) = scripted.listener(v4, 4);
    assert_eq!(
        scripted.call(KernelOp::Connect, &[listener], Some(v4)).result,
        errno(Errno::OPNOTSUPP)
    );
    assert_eq!(scripted.send(listener, b"x"), errno(Errno::NOTCONN));
}

fn streams_refuse_datagram_calls(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let at = loopbacks()[0];
    let stream = scripted.socket(at, STREAM);
    let sent = scripted.call(KernelOp::SendTo, &[stream, 0, 1], Some(at)).result;
    assert_eq!(sent, errno(Errno::ISCONN));
    let datagrams = scripted.socket(at, DATAGRAM);
    for what in [KernelOp::Borrow, KernelOp::Reserve] {
        assert_eq!(scripted.call(what, &[datagrams, 0, 1], None).result, errno(Errno::OPNOTSUPP));
    }
    assert_eq!(scripted.call(KernelOp::Accept, &[datagrams], None).result, errno(Errno::INVAL));
}

/// `warp` datagrams among them.
fn kinds_that_do_not_exist(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    for kind in [0, WARP_DATAGRAM, 5, 256, u64::from(u32::MAX >> 1)] {
        for family in [4, 6] {
            let refused = scripted.call(KernelOp::Socket, &[family, kind], None).result;
            assert_eq!(refused, errno(Errno::SOCKTNOSUPPORT), "kind {kind} of IPv{family}");
        }
    }
    assert_eq!(harness.host.stats().open, 0, "a refusal uses no slot");
    for kind in [STREAM, DATAGRAM, WARP_STREAM] {
        scripted.expect(KernelOp::Socket, &[4, kind], None);
    }
}

fn connecting_again_after_a_refusal(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let at = loopbacks()[0];
    let socket = scripted.socket(at, STREAM);
    let closed_port = ClosedPort::at(at);
    let refused = scripted.call(KernelOp::Connect, &[socket], Some(closed_port.name));
    assert_eq!(refused.result, errno(Errno::CONNREFUSED));
    let server = testbed.family.serve(at);
    scripted.expect(KernelOp::Connect, &[socket], Some(server.local_addr()));
    assert_eq!(scripted.send(socket, b"at last"), 7);
    assert_eq!(scripted.call(KernelOp::Get, &[socket, SockOption::Error as u64], None).result, 0);
}

fn invalid_sock_options(testbed: &Testbed) {
    let good = testbed.options();
    let start = Instant::now();
    for bad in [
        good.with_sockets(0),
        good.with_sockets(70_000),
        good.with_requests(3),
        good.with_arena(5000),
        good.with_ring(0),
        good.with_ring(1 << 31),
        good.with_ring(8192).with_arena(4096),
        good.with_heartbeat_timeout(Duration::from_millis(1)),
    ] {
        let error = warpwire::sock::SockHost::start(&testbed.gpu, bad).unwrap_err();
        assert_eq!(error.kind(), &warpwire::error::Kind::InvalidArgument);
        assert!(error.advice().is_some(), "{error}");
    }
    assert!(start.elapsed() < deadline(Duration::from_secs(5)));
}
