//! The service thread against kernels and peers that misbehave, step by step and without a thread.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::time::Duration;

use rustix::event::{EventfdFlags, eventfd};
use rustix::io::Errno;
use rustix::net::SendFlags;

use super::SockOptions;
use super::agent::Agent;
use super::layout::{RequestOp, SockOption};
use super::requests::Request;
use super::shared_area::SharedArea;
use crate::mem::sim::{Sim, SimConfig};

const ARENA: u64 = 1 << 20;
const RING: u64 = 64 << 10;
/// The value of a request for an IPv4 stream.
const STREAM: u64 = 4 | 1 << 8;

fn agent(sockets: u32) -> Agent {
    let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
    let options = SockOptions::default().with_sockets(sockets).with_ring(RING).with_arena(ARENA);
    let shared_area = Arc::new(SharedArea::allocate(&gpu, &options, 0).unwrap());
    let wake = eventfd(0, EventfdFlags::CLOEXEC).unwrap();
    Agent::new(shared_area, options, (None, None), &wake, Arc::default(), Arc::default()).unwrap()
}

/// The agent's answer to a request: a number and an address, or an errno.
fn ask(agent: &mut Agent, op: RequestOp, request: Request) -> super::requests::ReplyResult {
    agent.answer(&Request { op: op as u32, ..request }).unwrap()
}

fn socket(agent: &mut Agent) -> i32 {
    let request = Request { value: STREAM, ..Request::default() };
    ask(agent, RequestOp::Socket, request).unwrap().0 as i32
}

fn of(handle: i32) -> Request {
    Request { handle, ..Request::default() }
}

fn to(handle: i32, address: SocketAddr) -> Request {
    Request { address: Some(address), ..of(handle) }
}

/// Makes the socket a listener; returns its address.
fn listen(agent: &mut Agent, handle: i32) -> SocketAddr {
    let anywhere = SocketAddr::from(([127, 0, 0, 1], 0));
    ask(agent, RequestOp::Bind, to(handle, anywhere)).unwrap();
    ask(agent, RequestOp::Listen, Request { value: 8, ..of(handle) }).unwrap();
    ask(agent, RequestOp::LocalName, of(handle)).unwrap().1.unwrap()
}

fn turn(agent: &mut Agent) {
    agent.poll_round().unwrap();
    agent.take_events(Duration::from_millis(1)).unwrap();
}

/// A listener's first connection; returns the peer's end and the handle.
fn accept(agent: &mut Agent, name: SocketAddr) -> (TcpStream, i32) {
    let peer = TcpStream::connect(name).unwrap();
    peer.set_nodelay(true).unwrap();
    let mut found = None;
    testkit::until("it is accepted", || {
        turn(agent);
        found = agent.sockets[0].waiting.front().copied();
        found.is_some()
    });
    (peer, found.unwrap())
}

/// A kernel counts bytes as sent before its stream is connected, and then makes the ring smaller:
/// its peer must not get what is behind that ring.
#[test]
fn bytes_that_were_sent_before_a_connection_are_impossible() {
    let mut agent = agent(4);
    let stream = socket(&mut agent);
    let nobody = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let refused = ask(&mut agent, RequestOp::Connect, to(stream, nobody));
    for _ in 0..10 {
        turn(&mut agent);
    }
    assert!(refused == Err(Errno::CONNREFUSED) || agent.sockets[0].errno() != 0);
    agent.shared_area.set_device_counters(0, RING).unwrap();
    turn(&mut agent);
    let option = SockOption::SendBuffer as u32;
    let smaller = Request { option, value: 4096, ..of(stream) };
    ask(&mut agent, RequestOp::SetOption, smaller).unwrap();
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    ask(&mut agent, RequestOp::Connect, to(stream, server.local_addr().unwrap())).unwrap();
    for _ in 0..10 {
        turn(&mut agent);
    }
    let (mut peer, _) = server.accept().unwrap();
    peer.set_nonblocking(true).unwrap();
    assert!(!matches!(peer.read(&mut [0; 1]), Ok(1..)), "it got bytes of other sockets");
    assert_eq!(agent.sockets[0].errno(), i64::from(Errno::INVAL.raw_os_error()));
}

/// A kernel closes a connection that it has not accepted, by its handle; another socket gets the
/// slot. Closing the listener must not close that one.
#[test]
fn a_connection_that_was_closed_but_never_accepted() {
    let mut agent = agent(2);
    let listener = socket(&mut agent);
    let name = listen(&mut agent, listener);
    let (_peer, connection) = accept(&mut agent, name);
    ask(&mut agent, RequestOp::Close, of(connection)).unwrap();
    let other = socket(&mut agent);
    assert_eq!(other & 0xffff, connection & 0xffff, "the same slot");
    ask(&mut agent, RequestOp::Close, of(listener)).unwrap();
    assert!(agent.find(other).is_ok(), "another socket was closed");
    assert_eq!(agent.vacant, [0]);
    ask(&mut agent, RequestOp::Close, of(other)).unwrap();
    assert_eq!(agent.vacant, [0, 1]);
}

#[test]
fn a_failed_connect_before_listen_leaves_no_ring() {
    let mut agent = agent(2);
    let listener = socket(&mut agent);
    let other_family = "[::1]:9".parse().unwrap();
    let refused = ask(&mut agent, RequestOp::Connect, to(listener, other_family));
    assert_eq!(refused, Err(Errno::AFNOSUPPORT));
    listen(&mut agent, listener);
    ask(&mut agent, RequestOp::Close, of(listener)).unwrap();
    assert_eq!((agent.receive_arena.take(ARENA), agent.send_arena.take(ARENA)), (Some(0), Some(0)));
}

/// A read stops at urgent data, and no further event announces what is behind it.
#[test]
fn bytes_behind_urgent_data_are_received() {
    let mut agent = agent(2);
    let listener = socket(&mut agent);
    let name = listen(&mut agent, listener);
    let (mut peer, connection) = accept(&mut agent, name);
    let index = agent.find(connection).unwrap();
    for round in 1..=3 {
        while agent.poll_round().unwrap() | agent.take_events(Duration::from_millis(1)).unwrap() {}
        peer.write_all(b"before").unwrap();
        rustix::net::send(&peer, b"!", SendFlags::OOB).unwrap();
        peer.write_all(b"behind").unwrap();
        testkit::until("all bytes but the urgent ones are received", || {
            turn(&mut agent);
            agent.sockets[usize::from(index)].received == round * 12
        });
    }
}

#[test]
fn rings_that_32_bits_cannot_count_are_refused() {
    let mut agent = agent(2);
    agent.options.arena = 1 << 36;
    let stream = socket(&mut agent);
    for option in [SockOption::SendBuffer, SockOption::ReceiveBuffer] {
        let mut set = |value: i64| {
            let (option, value) = (option as u32, value as u64);
            ask(&mut agent, RequestOp::SetOption, Request { option, value, ..of(stream) })
        };
        for refused in [0, -1, (1 << 30) + 1, 1 << 32, 1 << 36, i64::MAX, i64::MIN] {
            assert_eq!(set(refused), Err(Errno::INVAL), "{refused}");
        }
        assert!(set(1 << 30).is_ok() && set(1).is_ok());
    }
}
