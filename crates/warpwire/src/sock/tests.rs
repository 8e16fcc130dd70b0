//! The service thread against kernels and peers that misbehave, step by step and without a thread.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::SendFlags;

use super::SockOptions;
use super::kinds::{SockOpts, Socket, TcpSocket};
use super::layout::{RequestOp, SockOption, activity_shift};
use super::requests::Request;
use super::resources::Resources;
use super::service::ServiceThread;
use super::shared_area::SharedArea;
use crate::mem::sim::{Sim, SimConfig};

const ARENA: u64 = 1 << 20;
const RING: u64 = 64 << 10;
/// The value of a request for an IPv4 stream.
const STREAM: u64 = 4 | 1 << 8;

fn service(sockets: u32) -> ServiceThread {
    let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
    let options = SockOptions::default().with_sockets(sockets).with_ring(RING).with_arena(ARENA);
    let shared_area = Arc::new(SharedArea::allocate(&gpu, &options, 0).unwrap());
    let wake = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    let resources =
        Resources::new(shared_area, options, (None, None), &wake, Arc::default()).unwrap();
    ServiceThread::new(resources, Arc::default())
}

/// The answer to a request: a number and an address, or an errno.
fn ask(
    service: &mut ServiceThread,
    op: RequestOp,
    request: Request,
) -> super::requests::ReplyResult {
    service.answer(&Request { op: op as u32, ..request }).unwrap()
}

fn socket(service: &mut ServiceThread) -> i32 {
    let request = Request { value: STREAM, ..Request::default() };
    ask(service, RequestOp::Socket, request).unwrap().0 as i32
}

fn of(handle: i32) -> Request {
    Request { handle, ..Request::default() }
}

fn to(handle: i32, address: SocketAddr) -> Request {
    Request { address: Some(address), ..of(handle) }
}

/// Makes the socket a listener; returns its address.
fn listen(service: &mut ServiceThread, handle: i32) -> SocketAddr {
    let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
    ask(service, RequestOp::Bind, to(handle, anywhere)).unwrap();
    ask(service, RequestOp::Listen, Request { value: 8, ..of(handle) }).unwrap();
    ask(service, RequestOp::LocalName, of(handle)).unwrap().1.unwrap()
}

fn turn(service: &mut ServiceThread) {
    service.poll_round().unwrap();
    service.take_events(Duration::from_millis(1)).unwrap();
}

/// A listener's first connection; returns the peer's end and the handle.
fn accept(service: &mut ServiceThread, name: SocketAddr) -> (TcpStream, i32) {
    let peer = TcpStream::connect(name).unwrap();
    peer.set_nodelay(true).unwrap();
    let mut found = None;
    testkit::until("it is accepted", || {
        turn(service);
        if let Socket::Listener(listener) = &service.sockets[0].socket {
            found = listener.waiting.front().copied();
        }
        found.is_some()
    });
    (peer, found.unwrap())
}

/// A kernel counts bytes as sent before its stream is connected, and then makes the ring smaller:
/// its peer must not get what is behind that ring.
#[test]
fn bytes_that_were_sent_before_a_connection_are_impossible() {
    let mut service = service(4);
    let stream = socket(&mut service);
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let refused = ask(&mut service, RequestOp::Connect, to(stream, nobody));
    testkit::until("the connection is refused", || {
        turn(&mut service);
        refused == Err(Errno::CONNREFUSED) || service.sockets[0].common.errno() != 0
    });
    service.resources.shared_area.publish_device_counters(0, RING).unwrap();
    turn(&mut service);
    let option = SockOption::SendBuffer as u32;
    let smaller = Request { option, value: 4096, ..of(stream) };
    ask(&mut service, RequestOp::SetOption, smaller).unwrap();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    ask(&mut service, RequestOp::Connect, to(stream, server.local_addr().unwrap())).unwrap();
    let (mut peer, _) = server.accept().unwrap();
    testkit::until("the socket fails", || {
        turn(&mut service);
        service.sockets[0].common.errno() == i64::from(Errno::INVAL.raw_os_error())
    });
    peer.set_nonblocking(true).unwrap();
    assert!(!matches!(peer.read(&mut [0; 1]), Ok(1..)), "it got bytes of other sockets");
}

/// A kernel closes a connection that it has not accepted, by its handle; another socket gets the
/// slot. Closing the listener must not close that one.
#[test]
fn a_connection_that_was_closed_but_never_accepted() {
    let mut service = service(2);
    let listener = socket(&mut service);
    let name = listen(&mut service, listener);
    let (_peer, connection) = accept(&mut service, name);
    ask(&mut service, RequestOp::Close, of(connection)).unwrap();
    let other = socket(&mut service);
    assert_eq!(other & 0xffff, connection & 0xffff, "the same slot");
    ask(&mut service, RequestOp::Close, of(listener)).unwrap();
    assert!(service.sockets.find(other).is_ok(), "another socket was closed");
    assert_eq!(service.sockets.vacant, [0]);
    ask(&mut service, RequestOp::Close, of(other)).unwrap();
    assert_eq!(service.sockets.vacant, [0, 1]);
}

#[test]
fn a_failed_connect_before_listen_leaves_no_ring() {
    let mut service = service(2);
    let listener = socket(&mut service);
    let other_family = "[::1]:9".parse().unwrap();
    let refused = ask(&mut service, RequestOp::Connect, to(listener, other_family));
    assert_eq!(refused, Err(Errno::AFNOSUPPORT));
    listen(&mut service, listener);
    ask(&mut service, RequestOp::Close, of(listener)).unwrap();
    assert_eq!(
        (service.resources.receive_arena.take(ARENA), service.resources.send_arena.take(ARENA)),
        (Some(0), Some(0))
    );
}

/// A read stops at urgent data, and no further event announces what is behind it.
#[test]
fn bytes_behind_urgent_data_are_received() {
    let mut service = service(2);
    let listener = socket(&mut service);
    let name = listen(&mut service, listener);
    let (mut peer, connection) = accept(&mut service, name);
    let index = service.sockets.find(connection).unwrap();
    for round in 1..=3 {
        while service.poll_round().unwrap() | service.take_events(Duration::from_millis(1)).unwrap()
        {
        }
        peer.write_all(b"before").unwrap();
        rustix::net::send(&peer, b"!", SendFlags::OOB).unwrap();
        peer.write_all(b"behind").unwrap();
        testkit::until("all bytes but the urgent ones are received", || {
            turn(&mut service);
            service.sockets[index].rings().unwrap().received == round * 12
        });
    }
}

#[test]
fn rings_that_32_bits_cannot_count_are_refused() {
    let mut service = service(2);
    service.resources.options.arena = 1 << 36;
    let stream = socket(&mut service);
    for option in [SockOption::SendBuffer, SockOption::ReceiveBuffer] {
        let mut set = |value: i64| {
            let (option, value) = (option as u32, value as u64);
            ask(&mut service, RequestOp::SetOption, Request { option, value, ..of(stream) })
        };
        for refused in [0, -1, (1 << 30) + 1, 1 << 32, 1 << 36, i64::MAX, i64::MIN] {
            assert_eq!(set(refused), Err(Errno::INVAL), "{refused}");
        }
        assert!(set(1 << 30).is_ok() && set(1).is_ok());
    }
}

/// The cost of a round is that of the sockets in use, however many others are open.
#[test]
fn counters_of_idle_sockets_are_not_read() {
    const IDLE: u16 = 1000;
    let mut service = service(1024);
    let listener = socket(&mut service);
    let name = listen(&mut service, listener);
    let (_peer, connection) = accept(&mut service, name);
    let index = service.sockets.find(connection).unwrap();
    for _ in 0..IDLE {
        // Without descriptors, as a process may have no more than 1024.
        let slot = service.open_slot(SockOpts::with_ring(RING)).unwrap().unwrap();
        service.sockets[slot].socket = Socket::Tcp(TcpSocket::default());
    }
    while service.poll_round().unwrap() {}
    let before = service.counter_loads;
    for _ in 0..100 {
        service.poll_round().unwrap();
    }
    assert_eq!(service.counter_loads, before, "a round without activity");
    let sent = |service: &ServiceThread| service.sockets[index].rings().unwrap().sent;
    for round in 1..=100 {
        service.resources.shared_area.publish_device_counters(index, round).unwrap();
        assert!(service.poll_round().unwrap());
        assert_eq!(sent(&service), round);
    }
    let per_round = (service.counter_loads - before) / 100;
    assert_eq!(per_round, 1 << activity_shift(1024), "those that share its flag");
}

/// A flag alone changes nothing, and one that is set again is seen again. Flags of sockets that
/// never existed are not looked at.
#[test]
fn activity_flags_without_new_counters_are_harmless() {
    let mut service = service(1024);
    let stream = socket(&mut service);
    let index = service.sockets.find(stream).unwrap();
    let area = service.resources.shared_area.clone();
    for _ in 0..3 {
        area.publish_device_counters(index, 0).unwrap();
        assert!(!service.poll_round().unwrap());
    }
    area.publish_device_counters(1023, u64::MAX).unwrap();
    assert_eq!(area.take_activity(service.sockets.used_up_to).unwrap(), 0);
    assert!(!service.poll_round().unwrap());
    assert_eq!(area.take_activity(1024).unwrap(), 1 << 127);
    assert_eq!(area.take_activity(1024).unwrap(), 0, "taken once");
    assert_eq!((area.sockets_of(127, 1024), area.sockets_of(127, 1017)), (1016..1024, 1016..1017));
}
