//! The connections of this process, and the thread that serves their sockets.
//!
//! 1. No lock is held while something waits; the thread waits in `epoll` only.
//! 2. A peer that connects is unknown: it has [`REQUEST_DEADLINE`] for a whole request, and what
//!    it says is compared with what is known about it.
//! 3. Every wait for a peer has a deadline, but for the end of an established connection.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{EventfdFlags, Timespec, epoll, eventfd};
use rustix::net::{RecvFlags, SendFlags};
use warpwire_cabi::Unacked;

use crate::boundary::{Errno, INVALID, IdPtr, Result};
use crate::channel::{Event, EventQueue};
use crate::message::{EndPoint, MAX_LEN, Message, Parameters, PrivateData, Space};
use crate::session::{self, Phase, REASON_NO_LISTENER, Step, Told};
use crate::sockets;
use crate::{devices, log, process};

/// For the request of a TCP connection that a listener has accepted.
const REQUEST_DEADLINE: Duration = Duration::from_secs(5);
/// For a TCP connection to be made.
const CONNECT_DEADLINE: Duration = Duration::from_secs(10);
/// For the program at the other end to accept or to complete: about what InfiniBand's retries take.
const ANSWER_DEADLINE: Duration = Duration::from_secs(60);
/// How long a connection is tried where nothing listens. Programs connect shortly before their
/// server listens again (perftest), and expect the time that a request takes to be refused.
const REFUSED_DEADLINE: Duration = Duration::from_millis(500);
const REFUSED_PAUSE: Duration = Duration::from_millis(20);
/// How long a listener pauses when the process has no descriptors left.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);
/// TCP connections without request, at most.
const MAX_AWAITING_REQUEST: usize = 1024;
/// The number of the descriptor that wakes the thread.
const WAKE: u64 = 0;

/// An id's connection, or a listener.
pub(crate) struct Conn {
    pub phase: Phase,
    pub socket: Option<OwnedFd>,
    pub queue: Arc<EventQueue>,
    pub id: IdPtr,
    pub unacked: Arc<Unacked>,
    pub space: Space,
    /// With the ports that programs see.
    pub local: Option<SocketAddr>,
    pub remote: Option<SocketAddr>,
    /// What the peer has said about itself.
    pub peer: Option<(EndPoint, Parameters)>,
    inbox: Vec<u8>,
    deadline: Option<Instant>,
    attempt: Option<Attempt>,
    /// Of a TCP connection without request.
    listener: Option<u64>,
    backlog: usize,
}

/// A TCP connection in the making.
struct Attempt {
    to: SocketAddr,
    request: Message,
    refused_until: Instant,
    again_at: Option<Instant>,
}

impl Conn {
    pub(crate) fn new(space: Space, queue: Arc<EventQueue>) -> Self {
        Self {
            phase: Phase::Idle,
            socket: None,
            queue,
            id: IdPtr::NONE,
            unacked: Arc::default(),
            space,
            local: None,
            remote: None,
            peer: None,
            inbox: Vec::new(),
            deadline: None,
            attempt: None,
            listener: None,
            backlog: 0,
        }
    }

    pub(crate) fn tell(&self, number: u64, told: Told) {
        let (id, unacked) = (self.id, self.unacked.clone());
        self.queue.push(Event { number, id, unacked, told });
    }

    /// Sends a message, which always fits the socket's buffer: a peer that leaves it full is gone.
    pub(crate) fn send(&self, message: &Message) -> Result<()> {
        let socket = self.socket.as_ref().ok_or(Errno(libc::ENOTCONN))?;
        let text = message.build();
        match rustix::net::send(socket, &text, SendFlags::NOSIGNAL | SendFlags::DONTWAIT)? {
            sent if sent == text.len() => Ok(()),
            _ => Err(Errno(libc::ECONNRESET)),
        }
    }

    fn wakes_at(&self) -> Option<Instant> {
        let again_at = self.attempt.as_ref().and_then(|attempt| attempt.again_at);
        [self.deadline, again_at].into_iter().flatten().min()
    }
}

#[derive(Default)]
pub(crate) struct State {
    pub conns: HashMap<u64, Conn>,
    last: u64,
}

impl State {
    pub(crate) fn add(&mut self, conn: Conn) -> u64 {
        self.last += 1; // never WAKE
        self.conns.insert(self.last, conn);
        self.last
    }

    /// # Errors
    /// `EINVAL` if there is no such connection.
    pub(crate) fn get(&mut self, number: u64) -> Result<&mut Conn> {
        self.conns.get_mut(&number).ok_or(INVALID)
    }
}

pub(crate) struct Service {
    epoll: OwnedFd,
    wake: OwnedFd,
    state: Mutex<State>,
}

/// The service, started if it was not.
pub(crate) fn service() -> Result<&'static Service> {
    static SERVICE: OnceLock<Result<&'static Service>> = OnceLock::new();
    let started = SERVICE.get_or_init(|| {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        let data = epoll::EventData::new_u64(WAKE);
        epoll::add(&epoll, &wake, data, epoll::EventFlags::IN)?;
        let made = Box::leak(Box::new(Service { epoll, wake, state: Mutex::default() }));
        let service: &'static Service = made;
        process::start_thread("rdmacm", || service.run())?;
        Ok(service)
    });
    *started
}

impl Service {
    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    fn run(&self) {
        const EMPTY: epoll::Event =
            epoll::Event { flags: epoll::EventFlags::empty(), data: epoll::EventData::new_u64(0) };
        let mut events = [EMPTY; 32];
        loop {
            let timeout = self.expire();
            let count = epoll::wait(&self.epoll, &mut events, timeout.as_ref()).unwrap_or(0);
            for event in events.iter().take(count) {
                match event.data.u64() {
                    WAKE => drop(rustix::io::read(&self.wake, &mut [0; 8])),
                    number => self.ready(number),
                }
            }
        }
    }

    /// A connection's socket has something to do.
    fn ready(&self, number: u64) {
        let mut state = self.lock();
        let Some(conn) = state.conns.get_mut(&number) else { return };
        match conn.phase {
            Phase::Listening => self.accept(&mut state, number),
            Phase::Connecting => self.connected(&mut state, number),
            _ => self.read(&mut state, number),
        }
    }

    /// Ends waits whose time is over, and makes due attempts; returns when the next one is due.
    fn expire(&self) -> Option<Timespec> {
        let now = Instant::now();
        let mut state = self.lock();
        let is_due = |conn: &Conn| conn.wakes_at().is_some_and(|at| at <= now);
        let due = state.conns.iter().filter(|(_, conn)| is_due(conn));
        let due: Vec<u64> = due.map(|(number, _)| *number).collect();
        for number in due {
            let Some(conn) = state.conns.get_mut(&number) else { continue };
            if conn.phase == Phase::Listening {
                conn.deadline = None;
                let _ = self.watch(conn.socket.as_ref(), number, epoll::EventFlags::IN);
            } else if conn.deadline.is_some_and(|deadline| deadline <= now) {
                let step = session::expired(conn.phase);
                self.apply(&mut state, number, step);
            } else {
                self.attempt(&mut state, number);
            }
        }
        let next = state.conns.values().filter_map(Conn::wakes_at).min()?;
        // A millisecond more: waking too early would spin.
        let rest = next.saturating_duration_since(now) + Duration::from_millis(1);
        Some(Timespec { tv_sec: rest.as_secs() as i64, tv_nsec: rest.subsec_nanos().into() })
    }

    /// Makes the thread look at deadlines that another thread has set.
    fn wake(&self) {
        // Fails only if the counter is full, and the thread awake.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
    }

    fn watch(&self, socket: Option<&OwnedFd>, number: u64, flags: epoll::EventFlags) -> Result<()> {
        let socket = socket.ok_or(Errno(libc::ENOTCONN))?;
        let data = epoll::EventData::new_u64(number);
        match epoll::add(&self.epoll, socket, data, flags) {
            Err(rustix::io::Errno::EXIST) => Ok(epoll::modify(&self.epoll, socket, data, flags)?),
            result => Ok(result?),
        }
    }

    /// Closes a socket. It is taken out of the poll set first: a forked child may have a copy.
    fn close(&self, socket: Option<OwnedFd>) {
        if let Some(socket) = socket {
            let _ = epoll::delete(&self.epoll, &socket);
        }
    }

    /// Begins to listen with the socket that the id is bound to.
    pub(crate) fn listen(&self, number: u64, backlog: usize) -> Result<()> {
        let mut state = self.lock();
        let conn = state.get(number)?;
        if conn.phase != Phase::Idle {
            return Err(INVALID);
        }
        let socket = conn.socket.as_ref().ok_or(INVALID)?;
        rustix::net::listen(socket, i32::try_from(backlog).unwrap_or(i32::MAX))?;
        self.watch(conn.socket.as_ref(), number, epoll::EventFlags::IN)?;
        (conn.phase, conn.backlog) = (Phase::Listening, backlog);
        Ok(())
    }

    fn accept(&self, state: &mut State, number: u64) {
        let awaiting =
            state.conns.values().filter(|conn| conn.phase == Phase::AwaitingRequest).count();
        let Some(conn) = state.conns.get_mut(&number) else { return };
        let accepted = conn.socket.as_ref().map(sockets::accept);
        let (socket, peer) = match accepted {
            Some(Ok(accepted)) => accepted,
            Some(Err(Errno(libc::EMFILE | libc::ENFILE | libc::ENOMEM | libc::ENOBUFS))) => {
                let _ = self.watch(conn.socket.as_ref(), number, epoll::EventFlags::empty());
                conn.deadline = Some(Instant::now() + ACCEPT_PAUSE);
                return;
            }
            _ => return,
        };
        if awaiting >= MAX_AWAITING_REQUEST {
            log::line(|| format!("{peer}: too many connections without request"));
            return;
        }
        let mut stranger = Conn::new(conn.space, conn.queue.clone());
        stranger.phase = Phase::AwaitingRequest;
        stranger.remote = Some(peer);
        stranger.listener = Some(number);
        stranger.deadline = Some(Instant::now() + REQUEST_DEADLINE);
        stranger.socket = Some(socket);
        let child = state.add(stranger);
        if let Some(conn) = state.conns.get(&child) {
            let _ = self.watch(conn.socket.as_ref(), child, epoll::EventFlags::IN);
        }
    }

    /// Begins to connect, with the socket that the id is bound to, and to send this request.
    pub(crate) fn connect(&self, number: u64, to: SocketAddr, request: Message) -> Result<()> {
        let mut state = self.lock();
        let conn = state.get(number)?;
        if conn.phase != Phase::Idle || conn.socket.is_none() {
            return Err(INVALID);
        }
        let now = Instant::now();
        let refused_until = now + REFUSED_DEADLINE;
        conn.phase = Phase::Connecting;
        conn.deadline = Some(now + CONNECT_DEADLINE);
        conn.attempt = Some(Attempt { to, request, refused_until, again_at: None });
        self.attempt(&mut state, number);
        drop(state);
        self.wake();
        Ok(())
    }

    fn attempt(&self, state: &mut State, number: u64) {
        let Some(conn) = state.conns.get_mut(&number) else { return };
        let (Some(socket), Some(attempt)) = (&conn.socket, &mut conn.attempt) else { return };
        attempt.again_at = None;
        let started = sockets::connect(socket, attempt.to);
        let watched = self.watch(Some(socket), number, epoll::EventFlags::OUT);
        if let Err(errno) = started.and(watched) {
            self.failed(state, number, errno);
        }
    }

    /// An attempt to connect has an outcome.
    fn connected(&self, state: &mut State, number: u64) {
        let Some(conn) = state.conns.get_mut(&number) else { return };
        let Some(socket) = &conn.socket else { return };
        let outcome = rustix::net::sockopt::socket_error(socket);
        if let Err(errno) | Ok(Err(errno)) = outcome {
            return self.failed(state, number, errno.into());
        }
        let Some(attempt) = conn.attempt.take() else { return };
        conn.phase = Phase::Requesting;
        conn.deadline = Some(Instant::now() + ANSWER_DEADLINE);
        let watched = self.watch(conn.socket.as_ref(), number, epoll::EventFlags::IN);
        if conn.send(&attempt.request).and(watched).is_err() {
            let step = session::closed(Phase::Requesting);
            self.apply(state, number, step);
        }
    }

    fn failed(&self, state: &mut State, number: u64, errno: Errno) {
        let Some(conn) = state.conns.get_mut(&number) else { return };
        let now = Instant::now();
        let (Some(attempt), Some(socket)) = (&mut conn.attempt, &conn.socket) else { return };
        let told = match errno {
            Errno(libc::ECONNREFUSED) if now < attempt.refused_until => {
                let _ = epoll::delete(&self.epoll, socket);
                attempt.again_at = Some(now + REFUSED_PAUSE);
                return;
            }
            Errno(libc::ECONNREFUSED) => {
                Told::Rejected { reason: REASON_NO_LISTENER, data: PrivateData::EMPTY }
            }
            Errno(errno) => Told::Unreachable(errno),
        };
        log::line(|| format!("{}: cannot connect: {told:?}", attempt.to));
        self.apply(state, number, (Phase::Ended, Some(told)));
    }

    fn read(&self, state: &mut State, number: u64) {
        let mut buffer = [0; MAX_LEN];
        let Some(conn) = state.conns.get_mut(&number) else { return };
        let Some(socket) = &conn.socket else { return };
        let step = match rustix::net::recv(socket, &mut buffer, RecvFlags::DONTWAIT) {
            Ok((received @ 1.., _)) => {
                conn.inbox.extend(buffer.iter().take(received));
                return self.parse(state, number);
            }
            Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => return,
            _ => session::closed(conn.phase),
        };
        self.apply(state, number, step);
    }

    /// Handles the messages that have come. Each read adds one message's length at most, so the
    /// inbox stays short.
    fn parse(&self, state: &mut State, number: u64) {
        while let Some(conn) = state.conns.get_mut(&number) {
            let step = match Message::parse(&conn.inbox) {
                Ok(None) => return,
                Ok(Some((message, len))) => {
                    conn.inbox.drain(..len);
                    session::received(conn.phase, message)
                }
                Err(why) => {
                    log::line(|| format!("{:?}: refused a message: {why}", conn.remote));
                    session::closed(conn.phase)
                }
            };
            self.apply(state, number, step);
            if state.conns.get(&number).is_none_or(|conn| conn.socket.is_none()) {
                return;
            }
        }
    }

    /// Takes a step of a connection, and tells its program.
    fn apply(&self, state: &mut State, number: u64, (phase, told): Step) {
        let Some(conn) = state.conns.get_mut(&number) else { return };
        conn.phase = phase;
        conn.deadline = None;
        let has_known_peer = match &told {
            Some(Told::Request(request)) => {
                let (end_point, parameters) = (request.end_point, request.parameters);
                return self.requested(state, number, (end_point, parameters), told);
            }
            Some(Told::Reply(reply)) => {
                conn.peer = Some((reply.end_point, reply.parameters));
                conn.socket.as_ref().and_then(sockets::peer).is_some_and(|address| {
                    let is_believable = devices::is_believable(reply.end_point.gid, address);
                    if !is_believable {
                        log::line(|| format!("{address} names another machine as its own"));
                    }
                    is_believable
                })
            }
            _ => true,
        };
        let told = match has_known_peer {
            true => told,
            false => session::closed(Phase::Requesting).1,
        };
        // Datagrams have no connection: the reply is all there is.
        let is_over = phase == Phase::Ended || !has_known_peer || conn.space == Space::Udp;
        if is_over {
            conn.phase = Phase::Ended;
            conn.attempt = None;
            self.close(conn.socket.take());
        }
        if let Some(told) = told {
            conn.tell(number, told);
        }
        if is_over && conn.listener.is_some() {
            state.conns.remove(&number); // no program knows it
        }
    }

    /// A request has come: checks it, and tells the listener's program.
    fn requested(
        &self,
        state: &mut State,
        number: u64,
        peer: (EndPoint, Parameters),
        told: Option<Told>,
    ) {
        let Some(mut conn) = state.conns.remove(&number) else { return };
        let listener = conn.listener.take().and_then(|listener| state.conns.get(&listener));
        let accepted = listener.ok_or("its listener is gone").and_then(|listener| {
            self.check(&mut conn, listener, peer, told.as_ref())?;
            Ok((listener.queue.clone(), listener.id, listener.unacked.clone()))
        });
        match (accepted, told) {
            (Ok((queue, id, unacked)), Some(told)) => {
                conn.queue = queue.clone();
                state.conns.insert(number, conn);
                queue.push(Event { number, id, unacked, told });
            }
            (refused, _) => {
                log::line(|| format!("{:?}: refused a request: {:?}", conn.remote, refused.err()));
                let (reason, data) = (REASON_NO_LISTENER, PrivateData::EMPTY);
                let _ = conn.send(&Message::Reject { reason, data });
                self.close(conn.socket.take());
            }
        }
    }

    fn check(
        &self,
        conn: &mut Conn,
        listener: &Conn,
        peer: (EndPoint, Parameters),
        told: Option<&Told>,
    ) -> std::result::Result<(), &'static str> {
        let Some(Told::Request(request)) = told else { return Err("it is none") };
        let port = listener.local.map(|local| local.port());
        if listener.phase != Phase::Listening
            || request.space != listener.space
            || Some(request.to_port) != port
        {
            return Err("nothing listens at its port");
        }
        let address = conn.remote.ok_or("its address is not known")?;
        if !devices::is_believable(peer.0.gid, address) {
            return Err("it names another machine as its own");
        }
        let is_of_listener = |event: &Event| Arc::ptr_eq(&event.unacked, &listener.unacked);
        if listener.queue.count(is_of_listener) >= listener.backlog {
            return Err("the program has not taken earlier requests");
        }
        let local = conn.socket.as_ref().and_then(sockets::local).ok_or("it has gone")?;
        conn.local = Some(SocketAddr::new(local.ip(), request.to_port));
        conn.remote = Some(SocketAddr::new(address.ip(), request.from_port));
        conn.peer = Some(peer);
        Ok(())
    }

    /// Answers a request, and goes on.
    pub(crate) fn reply(&self, number: u64, reply: Message) -> Result<()> {
        let mut state = self.lock();
        let conn = state.get(number)?;
        match conn.phase {
            Phase::Requested => {}
            Phase::Ended => return Err(Errno(libc::ECONNRESET)),
            _ => return Err(INVALID),
        }
        conn.send(&reply)?;
        if conn.space == Space::Udp {
            conn.phase = Phase::Ended;
            self.close(conn.socket.take());
            return Ok(());
        }
        conn.phase = Phase::Accepted;
        conn.deadline = Some(Instant::now() + ANSWER_DEADLINE);
        drop(state);
        self.wake();
        Ok(())
    }

    /// Sends a last message, if there is a connection, and ends it.
    pub(crate) fn end(&self, number: u64, last: &Message) -> Result<()> {
        let mut state = self.lock();
        let conn = state.get(number)?;
        let sent = conn.send(last);
        (conn.phase, conn.deadline, conn.attempt) = (Phase::Ended, None, None);
        self.close(conn.socket.take());
        sent
    }

    /// Ends a connection, and tells its program, unless it has ended already.
    pub(crate) fn disconnect(&self, number: u64) -> Result<()> {
        let mut state = self.lock();
        let conn = state.get(number)?;
        let (phase, told) = session::closed(conn.phase);
        if told.is_some() {
            // The peer may have gone in the meantime.
            let _ = conn.send(&Message::Disconnect);
            conn.deadline = None;
            self.close(conn.socket.take());
            conn.tell(number, Told::Disconnected);
        }
        conn.phase = phase;
        Ok(())
    }

    /// Forgets a connection, with its events and, of a listener, the requests that were not taken.
    pub(crate) fn remove(&self, number: u64) {
        let mut state = self.lock();
        let Some(conn) = state.conns.remove(&number) else { return };
        let of_conn = |event: &Event| Arc::ptr_eq(&event.unacked, &conn.unacked);
        for event in conn.queue.remove(of_conn) {
            if event.number != number
                && let Some(request) = state.conns.remove(&event.number)
            {
                self.close(request.socket);
            }
        }
        let is_stranger = |other: &Conn| other.listener == Some(number);
        for (_, stranger) in state.conns.extract_if(|_, other| is_stranger(other)) {
            self.close(stranger.socket);
        }
        self.close(conn.socket);
    }

    /// Moves a connection, and its events, to another channel.
    pub(crate) fn migrate(&self, number: u64, queue: &Arc<EventQueue>) -> Result<()> {
        let mut state = self.lock();
        let conn = state.get(number)?;
        let of_conn = |event: &Event| Arc::ptr_eq(&event.unacked, &conn.unacked);
        let events = conn.queue.remove(of_conn);
        conn.queue = queue.clone();
        events.into_iter().for_each(|event| queue.push(event));
        Ok(())
    }
}
