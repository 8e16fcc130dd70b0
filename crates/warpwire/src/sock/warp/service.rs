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

use super::end::End;
use super::listener::Shared as Listening;
use super::net::{Meeting, prepare};
use crate::error::{Error, Result};
use crate::verbs::Signal;

/// The shortest and the longest nap while somebody waits; in between, a part of the time for which nothing happened.
const SHORTEST_NAP: Duration = Duration::from_micros(20);
const LONGEST_NAP: Duration = Duration::from_millis(4);
const NAP_PART: u32 = 64;
/// The nap while nobody waits: meetings have their deadlines.
const REST: Duration = Duration::from_millis(250);
/// How long a listener that lacks descriptors or places rests.
const RETRY: Duration = Duration::from_millis(10);
/// For how long nobody's meeting is ended for the sake of another's.
const GRACE: Duration = Duration::from_millis(100);
/// How long what was sent may take to land after its socket was dropped.
const LAST_WORDS: Duration = Duration::from_secs(60);
const EVENTS: usize = 256;
/// The event that only wakes.
const WAKE: u64 = 0;

/// What the thread is told.
pub(super) enum Command {
    /// A connection is there.
    Add(Weak<End>),
    /// Somebody waits for it.
    Watch(u64),
    /// Nobody has it any more.
    Close(Arc<End>),
    /// A listener is there, or gone.
    Listen(Arc<Listening>),
    Deafen(u64),
    /// A listener that was full has room again.
    Accepted(u64),
    Stop,
}

/// Where commands are left.
pub(super) struct Desk {
    commands: Mutex<Vec<Command>>,
    wake: Signal,
}

impl Desk {
    pub(super) fn new() -> Result<Self> {
        Ok(Self { commands: Mutex::default(), wake: Signal::new()? })
    }

    pub(super) fn tell(&self, command: Command) {
        self.commands.lock().push(command);
        self.wake.raise();
    }
}

/// A meeting under way, and since when.
struct Guest {
    meeting: Meeting,
    listener: Arc<Listening>,
    since: Instant,
}

pub(super) struct Service {
    desk: Arc<Desk>,
    poll: OwnedFd,
    ends: HashMap<u64, Weak<End>>,
    /// Those that somebody waits for.
    watched: Vec<Arc<End>>,
    closing: Vec<(Arc<End>, Instant)>,
    listeners: HashMap<u64, Arc<Listening>>,
    /// Listeners that could not take all who wait.
    starved: Vec<u64>,
    retry_at: Instant,
    guests: HashMap<u64, Guest>,
    /// In the order of their arrival; some may be gone.
    arrivals: VecDeque<u64>,
    stopped: bool,
}

impl Service {
    pub(super) fn start(desk: Arc<Desk>) -> Result<()> {
        let failed = |errno: Errno| Error::os("watch sockets", &errno.into());
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        let wake = EventData::new_u64(WAKE);
        epoll::add(&poll, desk.wake.as_fd(), wake, EventFlags::IN).map_err(failed)?;
        let service = Self {
            desk,
            poll,
            ends: HashMap::new(),
            watched: Vec::new(),
            closing: Vec::new(),
            listeners: HashMap::new(),
            starved: Vec::new(),
            retry_at: Instant::now(),
            guests: HashMap::new(),
            arrivals: VecDeque::new(),
            stopped: false,
        };
        let thread = std::thread::Builder::new().name("warp sockets".to_owned());
        let started = thread.spawn(move || service.run());
        started.map(drop).map_err(|why| Error::os("start the thread that watches sockets", &why))
    }

    fn run(mut self) {
        let mut last_work = Instant::now();
        while !self.stopped {
            let mut worked = self.obey();
            worked |= self.look();
            let now = Instant::now();
            worked |= self.see_off(now);
            if worked {
                last_work = now;
            }
            match self.take_events(self.nap(now - last_work)) {
                Ok(false) => {}
                Ok(true) => last_work = Instant::now(),
                Err(error) => {
                    tracing::error!(%error, "warp sockets are not watched any more");
                    self.ends.values().filter_map(Weak::upgrade).for_each(|end| end.hung_up(false));
                    return;
                }
            }
            if !self.starved.is_empty() && self.retry_at <= Instant::now() {
                std::mem::take(&mut self.starved).into_iter().for_each(|at| self.let_in(at));
            }
            self.put_out_the_slow();
        }
    }

    fn nap(&self, idle: Duration) -> Duration {
        let busy = !self.watched.is_empty() || !self.closing.is_empty();
        match (busy, self.starved.is_empty()) {
            (true, _) => (idle / NAP_PART).clamp(SHORTEST_NAP, LONGEST_NAP),
            (false, true) if self.guests.is_empty() => REST * 16,
            (false, true) => REST,
            (false, false) => RETRY,
        }
    }

    /// Does what it was told.
    fn obey(&mut self) -> bool {
        let commands = std::mem::take(&mut *self.desk.commands.lock());
        let worked = !commands.is_empty();
        for command in commands {
            match command {
                Command::Add(end) => self.add(&end),
                Command::Watch(number) => {
                    self.watched.extend(self.ends.get(&number).and_then(Weak::upgrade));
                }
                Command::Close(end) => self.closing.push((end, Instant::now() + LAST_WORDS)),
                Command::Listen(listener) => self.listen(listener),
                Command::Deafen(number) => self.deafen(number),
                Command::Accepted(number) => self.let_in(number),
                Command::Stop => self.stopped = true,
            }
        }
        worked
    }

    fn add(&mut self, end: &Weak<End>) {
        let Some(strong) = end.upgrade() else { return };
        // Those that are gone make room now and then.
        if self.ends.len().is_power_of_two() {
            self.ends.retain(|_, end| end.strong_count() > 0);
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
        self.ends.insert(strong.number(), end.clone());
    }

    /// Looks at those that somebody waits for.
    fn look(&mut self) -> bool {
        let mut worked = false;
        self.watched.retain(|end| {
            let (happened, waited_for) = end.look();
            worked |= happened;
            if waited_for {
                return true;
            }
            end.listed.store(false, std::sync::atomic::Ordering::SeqCst);
            // Who came in between thought that it was listed.
            end.is_waited_for() && !end.listed.swap(true, std::sync::atomic::Ordering::SeqCst)
        });
        worked
    }

    /// Lets go of connections whose last words have landed.
    fn see_off(&mut self, now: Instant) -> bool {
        let before = self.closing.len();
        self.closing.retain(|(end, until)| {
            let stays = !end.is_over() && now < *until;
            if !stays {
                end.hang_up();
            }
            stays
        });
        self.closing.len() != before
    }

    fn take_events(&mut self, nap: Duration) -> Result<bool> {
        let mut room = [MaybeUninit::<epoll::Event>::uninit(); EVENTS];
        let (seconds, nanos) = (nap.as_secs() as i64, nap.subsec_nanos());
        let timeout = Timespec { tv_sec: seconds, tv_nsec: nanos.into() };
        let events = match epoll::wait(&self.poll, &mut room[..], Some(&timeout)) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => return Ok(false),
            Err(errno) => return Err(Error::os("watch sockets", &errno.into())),
        };
        let worked = !events.is_empty();
        for event in events {
            match event.data.u64() {
                WAKE => drop(self.desk.wake.take()),
                number if self.guests.contains_key(&number) => self.go_on(number),
                number if self.listeners.contains_key(&number) => self.let_in(number),
                number => self.hear_of(number),
            }
        }
        Ok(worked)
    }

    /// Something happened to the TCP connection of an end.
    fn hear_of(&mut self, number: u64) {
        let Some(end) = self.ends.get(&number).and_then(Weak::upgrade) else {
            self.ends.remove(&number);
            return;
        };
        let mut byte = [0; 1];
        match std::io::Read::read(&mut &end.tcp, &mut byte) {
            Ok(0) => end.hung_up(false),
            Ok(_) => end.hung_up(true),
            Err(why) if why.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => end.hung_up(false),
        }
    }

    fn listen(&mut self, listener: Arc<Listening>) {
        let flags = EventFlags::IN | EventFlags::ET;
        let data = EventData::new_u64(listener.number);
        if let Err(errno) = epoll::add(&self.poll, &listener.tcp, data, flags) {
            listener.fail(Error::os("watch a listener", &errno.into()));
            return;
        }
        let number = listener.number;
        self.listeners.insert(number, listener);
        self.let_in(number);
    }

    fn deafen(&mut self, number: u64) {
        if let Some(listener) = self.listeners.remove(&number) {
            let _ = epoll::delete(&self.poll, &listener.tcp);
            self.guests.retain(|_, guest| guest.listener.number != number);
        }
    }

    /// Takes the TCP connections that wait at a listener.
    fn let_in(&mut self, number: u64) {
        let Some(listener) = self.listeners.get(&number).cloned() else { return };
        while listener.has_room() {
            if !self.has_place(listener.net.options.meeting) {
                return self.starve(number);
            }
            match take_one(&listener.tcp) {
                Ok(Some(tcp)) => self.welcome(&listener, tcp),
                Ok(None) => return,
                Err(why) => {
                    tracing::warn!(%why, "a listener takes nobody for a moment");
                    self.starve(number);
                    return;
                }
            }
        }
        // Whoever accepts says so.
        if !listener.waits_for_room() {
            self.starve(number);
        }
    }

    /// Whether one more guest has a place; the oldest is put out for it, if it has had some time.
    fn has_place(&mut self, most: usize) -> bool {
        while self.guests.len() >= most {
            let Some(oldest) = self.arrivals.front() else { return true };
            match self.guests.get(oldest) {
                Some(guest) if guest.since.elapsed() < GRACE => return false,
                _ => drop(self.guests.remove(oldest)),
            }
            self.arrivals.pop_front();
        }
        true
    }

    fn starve(&mut self, number: u64) {
        self.retry_at = Instant::now() + RETRY;
        if !self.starved.contains(&number) {
            self.starved.push(number);
        }
    }

    fn welcome(&mut self, listener: &Arc<Listening>, tcp: std::net::TcpStream) {
        let begun = prepare(&tcp).map_err(|why| Error::os("prepare a connection", &why));
        let meeting = match begun.and_then(|()| listener.net.begin(tcp)) {
            Ok(meeting) => meeting,
            Err(error) => return tracing::warn!(%error, "a connection is not taken"),
        };
        let number = listener.net.number();
        let flags = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
        let data = EventData::new_u64(number);
        if let Err(errno) = epoll::add(&self.poll, &meeting.tcp, data, flags) {
            return tracing::warn!(%errno, "a connection is not taken");
        }
        let guest = Guest { meeting, listener: listener.clone(), since: Instant::now() };
        self.guests.insert(number, guest);
        self.arrivals.push_back(number);
        self.go_on(number);
    }

    /// Goes on with a meeting.
    fn go_on(&mut self, number: u64) {
        let Some(guest) = self.guests.get_mut(&number) else { return };
        match guest.meeting.go_on() {
            Ok(false) => {}
            Err(error) => {
                tracing::debug!(%error, "a meeting ended early");
                self.guests.remove(&number);
            }
            Ok(true) => {
                let Some(Guest { meeting, listener, .. }) = self.guests.remove(&number) else {
                    return;
                };
                match listener.net.welcome(meeting) {
                    // It is added before anybody has it.
                    Ok(end) => {
                        self.add(&Arc::downgrade(&end));
                        listener.put(end);
                    }
                    Err(error) => tracing::debug!(%error, "a connection ended early"),
                }
            }
        }
    }

    fn put_out_the_slow(&mut self) {
        while let Some(first) = self.arrivals.front() {
            match self.guests.get(first) {
                Some(guest) if guest.since.elapsed() < guest.listener.net.options.patience => {
                    return;
                }
                Some(_) => drop(self.guests.remove(first)),
                None => {}
            }
            self.arrivals.pop_front();
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
