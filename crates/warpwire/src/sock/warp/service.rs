//! The service thread of CPU programs' sockets: it accepts connections, notices their end, and
//! polls the counter words for sleeping callers.
//!
//! Rules:
//! 1. It never blocks on a peer. Handshakes that take too long, and the oldest of too many, are
//!    dropped.
//! 2. Connections without waiters cost only their entry in the epoll set.
//! 3. It backs off: the longer nothing happens, the longer it sleeps.

use std::collections::{HashMap, VecDeque};
use std::mem::MaybeUninit;
use std::net::TcpListener;
use std::os::fd::{AsFd, OwnedFd};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

use super::connection::Connection;
use super::listener::Shared as ListenerShared;
use super::net::{ConnSetup, prepare};
use crate::error::{Error, Result};
use crate::verbs::EventFd;

/// Bounds of the sleep while there are waiters; in between it is idle time / [`SLEEP_DIVISOR`].
const MIN_SLEEP: Duration = Duration::from_micros(20);
const MAX_SLEEP: Duration = Duration::from_millis(4);
const SLEEP_DIVISOR: u32 = 64;
/// The sleep while only handshakes, which have deadlines, are pending.
const IDLE_SLEEP: Duration = Duration::from_millis(250);
/// Retry interval of a listener that lacks descriptors or handshake slots.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// A handshake younger than this is not evicted for another.
const MIN_HANDSHAKE_TIME: Duration = Duration::from_millis(100);
/// Time limit for sent bytes to arrive after their socket was dropped.
const LINGER_TIMEOUT: Duration = Duration::from_secs(60);
const EVENTS: usize = 256;
/// The epoll data of the wake-up event.
const WAKE: u64 = 0;

/// A command to the service thread.
pub(super) enum Command {
    /// Adds a connection.
    Add(Weak<Connection>),
    /// A caller waits for the connection with this number.
    Watch(u64),
    /// The last handle was dropped; the rest is still to be sent.
    Close(Arc<Connection>),
    /// Adds a listener.
    Listen(Arc<ListenerShared>),
    CloseListener(u64),
    /// A listener whose queue was full has room again.
    Accepted(u64),
    Stop,
}

/// Commands for the service thread, and its wake-up event.
pub(super) struct CommandQueue {
    commands: Mutex<Vec<Command>>,
    wake: EventFd,
}

impl CommandQueue {
    pub(super) fn new() -> Result<Self> {
        Ok(Self { commands: Mutex::default(), wake: EventFd::new()? })
    }

    pub(super) fn submit(&self, command: Command) {
        self.commands.lock().push(command);
        self.wake.raise();
    }
}

/// A handshake in progress.
struct PendingConn {
    conn_setup: ConnSetup,
    listener: Arc<ListenerShared>,
    since: Instant,
}

pub(super) struct Service {
    command_queue: Arc<CommandQueue>,
    poll: OwnedFd,
    connections: HashMap<u64, Weak<Connection>>,
    /// Connections with waiters, which are polled.
    watched: Vec<Arc<Connection>>,
    closing: Vec<(Arc<Connection>, Instant)>,
    listeners: HashMap<u64, Arc<ListenerShared>>,
    /// Listeners to retry at `retry_at`.
    deferred: Vec<u64>,
    retry_at: Instant,
    pending: HashMap<u64, PendingConn>,
    /// In order of arrival; entries may be gone already.
    pending_order: VecDeque<u64>,
    stopped: bool,
}

impl Service {
    pub(super) fn start(command_queue: Arc<CommandQueue>) -> Result<()> {
        let failed = |errno: Errno| Error::os("watch sockets", &errno.into());
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        let wake = EventData::new_u64(WAKE);
        epoll::add(&poll, command_queue.wake.as_fd(), wake, EventFlags::IN).map_err(failed)?;
        let service = Self {
            command_queue,
            poll,
            connections: HashMap::new(),
            watched: Vec::new(),
            closing: Vec::new(),
            listeners: HashMap::new(),
            deferred: Vec::new(),
            retry_at: Instant::now(),
            pending: HashMap::new(),
            pending_order: VecDeque::new(),
            stopped: false,
        };
        let thread = std::thread::Builder::new().name("warp sockets".to_owned());
        let started = thread.spawn(move || service.run());
        started.map(drop).map_err(|why| Error::os("start the thread of warp sockets", &why))
    }

    fn run(mut self) {
        let mut last_work = Instant::now();
        while !self.stopped {
            let mut worked = self.run_commands();
            worked |= self.progress();
            let now = Instant::now();
            worked |= self.reap_closing(now);
            if worked {
                last_work = now;
            }
            match self.take_events(self.idle_wait(now - last_work)) {
                Ok(false) => {}
                Ok(true) => last_work = Instant::now(),
                Err(error) => {
                    tracing::error!(%error, "the thread of warp sockets has failed");
                    self.connections
                        .values()
                        .filter_map(Weak::upgrade)
                        .for_each(|connection| connection.hung_up(false));
                    return;
                }
            }
            if !self.deferred.is_empty() && self.retry_at <= Instant::now() {
                std::mem::take(&mut self.deferred)
                    .into_iter()
                    .for_each(|at| self.accept_pending(at));
            }
            self.expire_pending();
        }
    }

    fn idle_wait(&self, idle: Duration) -> Duration {
        let busy = !self.watched.is_empty() || !self.closing.is_empty();
        match (busy, self.deferred.is_empty()) {
            (true, _) => (idle / SLEEP_DIVISOR).clamp(MIN_SLEEP, MAX_SLEEP),
            (false, true) if self.pending.is_empty() => IDLE_SLEEP * 16,
            (false, true) => IDLE_SLEEP,
            (false, false) => RETRY_INTERVAL,
        }
    }

    /// Runs the queued commands; true if there were any.
    fn run_commands(&mut self) -> bool {
        let commands = std::mem::take(&mut *self.command_queue.commands.lock());
        let worked = !commands.is_empty();
        for command in commands {
            match command {
                Command::Add(connection) => self.add(&connection),
                Command::Watch(number) => {
                    self.watched.extend(self.connections.get(&number).and_then(Weak::upgrade));
                }
                Command::Close(connection) => {
                    self.closing.push((connection, Instant::now() + LINGER_TIMEOUT))
                }
                Command::Listen(listener) => self.listen(listener),
                Command::CloseListener(number) => self.close_listener(number),
                Command::Accepted(number) => self.accept_pending(number),
                Command::Stop => self.stopped = true,
            }
        }
        worked
    }

    fn add(&mut self, connection: &Weak<Connection>) {
        let Some(strong) = connection.upgrade() else { return };
        // Amortised: remove entries of dropped connections.
        if self.connections.len().is_power_of_two() {
            self.connections.retain(|_, connection| connection.strong_count() > 0);
        }
        let flags = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET;
        let data = EventData::new_u64(strong.number());
        // An accepted connection is in the set already, under the number of its handshake.
        let watched = match epoll::add(&self.poll, &strong.tcp, data, flags) {
            Err(Errno::EXIST) => epoll::modify(&self.poll, &strong.tcp, data, flags),
            other => other,
        };
        if let Err(errno) = watched {
            let error = Error::os("watch a connection", &errno.into());
            drop(strong.reset(error));
        }
        self.connections.insert(strong.number(), connection.clone());
    }

    /// Polls connections with waiters; true if something happened.
    fn progress(&mut self) -> bool {
        let mut worked = false;
        self.watched.retain(|connection| {
            let (happened, has_waiters) = connection.progress();
            worked |= happened;
            if has_waiters {
                return true;
            }
            connection.is_watched.store(false, std::sync::atomic::Ordering::SeqCst);
            // A caller that came in between may have seen the flag still set.
            connection.has_waiters()
                && !connection.is_watched.swap(true, std::sync::atomic::Ordering::SeqCst)
        });
        worked
    }

    /// Closes dropped connections whose FIN has arrived.
    fn reap_closing(&mut self, now: Instant) -> bool {
        let before = self.closing.len();
        self.closing.retain(|(connection, until)| {
            let stays = !connection.is_finished() && now < *until;
            if !stays {
                connection.hang_up();
            }
            stays
        });
        self.closing.len() != before
    }

    fn take_events(&mut self, idle_wait: Duration) -> Result<bool> {
        let mut buffer = [MaybeUninit::<epoll::Event>::uninit(); EVENTS];
        let (seconds, nanos) = (idle_wait.as_secs() as i64, idle_wait.subsec_nanos());
        let timeout = Timespec { tv_sec: seconds, tv_nsec: nanos.into() };
        let events = match epoll::wait(&self.poll, &mut buffer[..], Some(&timeout)) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => return Ok(false),
            Err(errno) => return Err(Error::os("watch sockets", &errno.into())),
        };
        let worked = !events.is_empty();
        for event in events {
            match event.data.u64() {
                WAKE => drop(self.command_queue.wake.take()),
                number if self.pending.contains_key(&number) => self.advance(number),
                number if self.listeners.contains_key(&number) => self.accept_pending(number),
                number => self.on_socket_event(number),
            }
        }
        Ok(worked)
    }

    /// An event of a connection's TCP socket.
    fn on_socket_event(&mut self, number: u64) {
        let Some(connection) = self.connections.get(&number).and_then(Weak::upgrade) else {
            self.connections.remove(&number);
            return;
        };
        let mut byte = [0; 1];
        match std::io::Read::read(&mut &connection.tcp, &mut byte) {
            Ok(0) => connection.hung_up(false),
            Ok(_) => connection.hung_up(true),
            Err(why) if why.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => connection.hung_up(false),
        }
    }

    fn listen(&mut self, listener: Arc<ListenerShared>) {
        let flags = EventFlags::IN | EventFlags::ET;
        let data = EventData::new_u64(listener.number);
        if let Err(errno) = epoll::add(&self.poll, &listener.tcp, data, flags) {
            listener.fail(Error::os("watch a listener", &errno.into()));
            return;
        }
        let number = listener.number;
        self.listeners.insert(number, listener);
        self.accept_pending(number);
    }

    fn close_listener(&mut self, number: u64) {
        if let Some(listener) = self.listeners.remove(&number) {
            let _ = epoll::delete(&self.poll, &listener.tcp);
            self.pending.retain(|_, pending_conn| pending_conn.listener.number != number);
        }
    }

    /// Accepts the TCP connections that wait at a listener.
    fn accept_pending(&mut self, number: u64) {
        let Some(listener) = self.listeners.get(&number).cloned() else { return };
        while listener.has_room() {
            if !self.has_slot(listener.net.options.max_handshakes) {
                return self.defer_accept(number);
            }
            match take_one(&listener.tcp) {
                Ok(Some(tcp)) => self.start_handshake(&listener, tcp),
                Ok(None) => return,
                Err(why) => {
                    tracing::warn!(%why, "cannot accept a connection; retrying");
                    self.defer_accept(number);
                    return;
                }
            }
        }
        // `accept` notifies this thread when there is room.
        if !listener.waits_for_room() {
            self.defer_accept(number);
        }
    }

    /// Whether another handshake may start; evicts the oldest if it is older than
    /// [`MIN_HANDSHAKE_TIME`].
    fn has_slot(&mut self, max: usize) -> bool {
        while self.pending.len() >= max {
            let Some(oldest) = self.pending_order.front() else { return true };
            match self.pending.get(oldest) {
                Some(pending_conn) if pending_conn.since.elapsed() < MIN_HANDSHAKE_TIME => {
                    return false;
                }
                _ => drop(self.pending.remove(oldest)),
            }
            self.pending_order.pop_front();
        }
        true
    }

    fn defer_accept(&mut self, number: u64) {
        self.retry_at = Instant::now() + RETRY_INTERVAL;
        if !self.deferred.contains(&number) {
            self.deferred.push(number);
        }
    }

    fn start_handshake(&mut self, listener: &Arc<ListenerShared>, tcp: std::net::TcpStream) {
        if let Err(error) = prepare(&tcp) {
            return tracing::warn!(%error, "a connection is rejected");
        }
        let conn_setup = ConnSetup::accepted(tcp);
        let number = listener.net.number();
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        let data = EventData::new_u64(number);
        if let Err(errno) = epoll::add(&self.poll, &conn_setup.tcp, data, flags) {
            return tracing::warn!(%errno, "a connection is rejected");
        }
        let pending_conn =
            PendingConn { conn_setup, listener: listener.clone(), since: Instant::now() };
        self.pending.insert(number, pending_conn);
        self.pending_order.push_back(number);
        self.advance(number);
    }

    /// Continues a handshake.
    fn advance(&mut self, number: u64) {
        let Some(pending_conn) = self.pending.get_mut(&number) else { return };
        match pending_conn.conn_setup.advance(&pending_conn.listener.net) {
            Ok(false) => {}
            Err(error) => {
                tracing::debug!(%error, "a handshake failed");
                self.pending.remove(&number);
            }
            Ok(true) => {
                let Some(PendingConn { conn_setup, listener, .. }) = self.pending.remove(&number)
                else {
                    return;
                };
                match listener.net.finish_handshake(conn_setup) {
                    // Added before the caller gets it.
                    Ok(connection) => {
                        self.add(&Arc::downgrade(&connection));
                        listener.put(connection);
                    }
                    Err(error) => {
                        tracing::debug!(%error, "a connection failed after its handshake")
                    }
                }
            }
        }
    }

    fn expire_pending(&mut self) {
        while let Some(first) = self.pending_order.front() {
            match self.pending.get(first) {
                Some(pending_conn)
                    if pending_conn.since.elapsed()
                        < pending_conn.listener.net.options.handshake_timeout =>
                {
                    return;
                }
                Some(_) => drop(self.pending.remove(first)),
                None => {}
            }
            self.pending_order.pop_front();
        }
    }
}

fn take_one(listener: &TcpListener) -> std::io::Result<Option<std::net::TcpStream>> {
    loop {
        match listener.accept() {
            Ok((tcp, _)) => return Ok(Some(tcp)),
            Err(why) => match why.kind() {
                std::io::ErrorKind::WouldBlock => return Ok(None),
                // The connection was closed while it waited; try the next.
                std::io::ErrorKind::ConnectionAborted | std::io::ErrorKind::Interrupted => {}
                _ => return Err(why),
            },
        }
    }
}
