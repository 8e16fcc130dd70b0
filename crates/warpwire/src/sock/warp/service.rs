//! The thread behind CPU programs' sockets: it lets connections in, sees them end, and looks at landing words for those
//! who sleep.
//!
//! Its rules:
//! 1. It never waits for a peer. Meetings that take too long, and the oldest of too many, are ended.
//! 2. Connections that nobody waits for cost nothing but their place in the epoll set.
//! 3. The longer nothing happens, the longer it naps, so that rest is cheap.

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

/// The shortest and the longest nap while somebody waits; in between, a part of the time for which nothing happened.
const MIN_SLEEP: Duration = Duration::from_micros(20);
const MAX_SLEEP: Duration = Duration::from_millis(4);
const SLEEP_DIVISOR: u32 = 64;
/// The nap while nobody waits: meetings have their deadlines.
const IDLE_SLEEP: Duration = Duration::from_millis(250);
/// How long a listener that lacks descriptors or places rests.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// For how long nobody's meeting is ended for the sake of another's.
const MIN_HANDSHAKE_TIME: Duration = Duration::from_millis(100);
/// How long what was sent may take to land after its socket was dropped.
const LINGER_TIMEOUT: Duration = Duration::from_secs(60);
const EVENTS: usize = 256;
/// The event that only wakes.
const WAKE: u64 = 0;

/// What the thread is told.
pub(super) enum Command {
    /// A connection is there.
    Add(Weak<Connection>),
    /// Somebody waits for it.
    Watch(u64),
    /// Nobody has it any more.
    Close(Arc<Connection>),
    /// A listener is there, or gone.
    Listen(Arc<ListenerShared>),
    CloseListener(u64),
    /// A listener that was full has room again.
    Accepted(u64),
    Stop,
}

/// Where commands are left.
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

/// A meeting under way, and since when.
struct PendingConn {
    conn_setup: ConnSetup,
    listener: Arc<ListenerShared>,
    since: Instant,
}

pub(super) struct Service {
    command_queue: Arc<CommandQueue>,
    poll: OwnedFd,
    connections: HashMap<u64, Weak<Connection>>,
    /// Those that somebody waits for.
    watched: Vec<Arc<Connection>>,
    closing: Vec<(Arc<Connection>, Instant)>,
    listeners: HashMap<u64, Arc<ListenerShared>>,
    /// Listeners that could not take all who wait.
    deferred: Vec<u64>,
    retry_at: Instant,
    pending: HashMap<u64, PendingConn>,
    /// In the order of their arrival; some may be gone.
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
        started.map(drop).map_err(|why| Error::os("start the thread that watches sockets", &why))
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
                    tracing::error!(%error, "warp sockets are not watched any more");
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

    /// Does what it was told.
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
        // Those that are gone make room now and then.
        if self.connections.len().is_power_of_two() {
            self.connections.retain(|_, connection| connection.strong_count() > 0);
        }
        let flags = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET;
        let data = EventData::new_u64(strong.number());
        // It may be in the set since it was a guest; under the guest's number, that is.
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

    /// Looks at those that somebody waits for.
    fn progress(&mut self) -> bool {
        let mut worked = false;
        self.watched.retain(|connection| {
            let (happened, has_waiters) = connection.progress();
            worked |= happened;
            if has_waiters {
                return true;
            }
            connection.is_watched.store(false, std::sync::atomic::Ordering::SeqCst);
            // Who came in between thought that it was listed.
            connection.has_waiters()
                && !connection.is_watched.swap(true, std::sync::atomic::Ordering::SeqCst)
        });
        worked
    }

    /// Lets go of connections whose last words have landed.
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
        let mut room = [MaybeUninit::<epoll::Event>::uninit(); EVENTS];
        let (seconds, nanos) = (idle_wait.as_secs() as i64, idle_wait.subsec_nanos());
        let timeout = Timespec { tv_sec: seconds, tv_nsec: nanos.into() };
        let events = match epoll::wait(&self.poll, &mut room[..], Some(&timeout)) {
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

    /// Something happened to the TCP connection of an end.
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

    /// Takes the TCP connections that wait at a listener.
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
                    tracing::warn!(%why, "a listener takes nobody for a moment");
                    self.defer_accept(number);
                    return;
                }
            }
        }
        // Whoever accepts says so.
        if !listener.waits_for_room() {
            self.defer_accept(number);
        }
    }

    /// Whether one more guest has a place; the oldest is put out for it, if it has had some time.
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
        let begun = prepare(&tcp).map_err(|why| Error::os("prepare a connection", &why));
        let conn_setup = match begun.and_then(|()| listener.net.begin(tcp)) {
            Ok(conn_setup) => conn_setup,
            Err(error) => return tracing::warn!(%error, "a connection is not taken"),
        };
        let number = listener.net.number();
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        let data = EventData::new_u64(number);
        if let Err(errno) = epoll::add(&self.poll, &conn_setup.tcp, data, flags) {
            return tracing::warn!(%errno, "a connection is not taken");
        }
        let pending_conn =
            PendingConn { conn_setup, listener: listener.clone(), since: Instant::now() };
        self.pending.insert(number, pending_conn);
        self.pending_order.push_back(number);
        self.advance(number);
    }

    /// Goes on with a meeting.
    fn advance(&mut self, number: u64) {
        let Some(pending_conn) = self.pending.get_mut(&number) else { return };
        match pending_conn.conn_setup.advance() {
            Ok(false) => {}
            Err(error) => {
                tracing::debug!(%error, "a meeting ended early");
                self.pending.remove(&number);
            }
            Ok(true) => {
                let Some(PendingConn { conn_setup, listener, .. }) = self.pending.remove(&number)
                else {
                    return;
                };
                match listener.net.finish_handshake(conn_setup) {
                    // It is added before anybody has it.
                    Ok(connection) => {
                        self.add(&Arc::downgrade(&connection));
                        listener.put(connection);
                    }
                    Err(error) => tracing::debug!(%error, "a connection ended early"),
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
                // That one is gone already; the next may be there.
                std::io::ErrorKind::ConnectionAborted | std::io::ErrorKind::Interrupted => {}
                _ => return Err(why),
            },
        }
    }
}
