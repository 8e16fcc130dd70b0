//! The state that an agent's handles and its thread share, and what drives it.
//!
//! Whoever asks for a state polls the completion queues. While nothing asks, the agent's thread
//! sleeps on the queues' descriptors, the listener and the control connections.
//!
//! Locks, in the order in which they are taken: a rail's `polling`, transfers that streams have not
//! reached, `peers` and a peer's link, a connection's state, a transfer's progress; `connections`,
//! `incoming` and `inbox` are held for a look-up only. Outcomes are told without a lock.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, poll};

use super::connection::{Connection, Ended};
use super::inbox::{FRAGMENT_LEN, Inbox, Notification};
use super::incoming::{self, IncomingTable};
use super::lanes::Lane;
use super::memory::{MemoryTable, Registered};
use super::metadata::Metadata;
use super::options::AgentOptions;
use super::peer::Peer;
use super::rail::{Polling, Rail};
use super::stream_order::{self, StreamOrder};
use super::transfer::Active;
use crate::error::{Error, Kind, Result};
use crate::sync::random_u64;
use crate::verbs::bootstrap::BootstrapListener;
use crate::verbs::{Completion, EventFd};

/// How long a call that waits polls before it sleeps: as long as a GPU copies some 100 MB, because
/// nothing wakes a thread when it has.
const SPIN: Duration = Duration::from_micros(200);
/// While the program polls, the thread looks this often whether it still does, and lets the
/// completion queues wake nobody.
const POLLED_INTERVAL: Duration = Duration::from_millis(2);
/// How often failing connections are looked at.
const TICK: Duration = Duration::from_millis(2);
/// How often connections without a first message are looked at.
const PENDING_INTERVAL: Duration = Duration::from_secs(1);
/// The longest sleep.
const MAX_SLEEP: Duration = Duration::from_secs(30);

pub(super) struct Shared {
    pub name: String,
    pub incarnation: u64,
    pub token: String,
    pub address: SocketAddr,
    pub options: AgentOptions,
    pub rails: Vec<Rail>,
    pub memory: MemoryTable,
    pub peers: Mutex<HashMap<String, Peer>>,
    pub connections: Mutex<HashMap<u32, Arc<Connection>>>,
    pub incoming: Mutex<IncomingTable>,
    inbox: Mutex<Inbox>,
    pub stream_order: StreamOrder,
    /// Transfers with a deadline.
    deadlines: Mutex<BTreeMap<(Instant, u64), Weak<Active>>>,
    numbers: AtomicU64,
    slots: AtomicU32,
    /// For the program: a transfer has ended, or a notification has arrived.
    pub events: EventFd,
    /// For the agent's thread.
    pub wake: EventFd,
    is_closed: AtomicBool,
    start: Instant,
    /// When the program last polled, in microseconds after `start`.
    last_poll: AtomicU64,
    /// Calls that sleep.
    sleepers: AtomicU32,
    /// Counts what they may wait for.
    changes: Mutex<u64>,
    changed: Condvar,
}

impl Shared {
    pub(super) fn new(
        name: &str,
        options: AgentOptions,
        rails: Vec<Rail>,
        address: SocketAddr,
    ) -> Result<Arc<Self>> {
        Ok(Arc::new(Self {
            name: name.to_owned(),
            incarnation: random_u64(),
            token: format!("{:016x}{:016x}", random_u64(), random_u64()),
            address,
            options,
            rails,
            memory: MemoryTable::default(),
            peers: Mutex::default(),
            connections: Mutex::default(),
            incoming: Mutex::default(),
            inbox: Mutex::default(),
            stream_order: StreamOrder::default(),
            deadlines: Mutex::default(),
            numbers: AtomicU64::new(0),
            slots: AtomicU32::new(0),
            events: EventFd::new()?,
            wake: EventFd::new()?,
            is_closed: AtomicBool::new(false),
            start: Instant::now(),
            last_poll: AtomicU64::new(0),
            sleepers: AtomicU32::new(0),
            changes: Mutex::new(0),
            changed: Condvar::new(),
        }))
    }

    pub(super) fn is_closed(&self) -> bool {
        self.is_closed.load(Ordering::Acquire)
    }

    pub(super) fn next_number(&self) -> u64 {
        self.numbers.fetch_add(1, Ordering::Relaxed)
    }

    /// 24 bits; a number comes again after 16 million connections.
    pub(super) fn next_slot(&self) -> u32 {
        self.slots.fetch_add(1, Ordering::Relaxed) & 0xff_ffff
    }

    /// Queue pairs of a connection.
    pub(super) fn lanes_per_connection(&self) -> usize {
        self.rails.len() * self.options.queue_pairs
    }

    pub(super) fn metadata<'a>(
        &self,
        memory: impl Iterator<Item = &'a Registered>,
        partial: bool,
    ) -> Metadata {
        let memory = memory.map(Registered::metadata).collect();
        let identity = (self.name.as_str(), self.incarnation, self.token.as_str());
        Metadata::new(identity, self.address, self.rails.len(), memory, partial)
    }

    pub(super) fn add_peer(self: &Arc<Self>, metadata: Metadata) -> Result<Peer> {
        let mut peers = self.peers.lock();
        if let Some(known) = peers.get(&metadata.name)
            && known.is_same(&metadata)
        {
            known.update(metadata.memory, metadata.partial);
            return Ok(known.clone());
        }
        let name = metadata.name.clone();
        let peer = Peer::new(self, metadata);
        let before = peers.insert(name.clone(), peer.clone());
        drop(peers);
        if let Some(before) = before {
            let why = format!("peer {name:?} was restarted, and another process took its place");
            before.disconnect(Error::new(Kind::Stale, "transfer").why(why));
            self.wake.raise();
        }
        peer.connection(self)?;
        Ok(peer)
    }

    /// Takes completions, unless another thread is at it.
    pub(super) fn poll(&self) {
        let now = self.start.elapsed().as_micros() as u64;
        self.last_poll.store(now, Ordering::Relaxed);
        for rail in 0..self.rails.len() {
            let polling = self.rails[rail].polling.try_lock();
            let ended = polling.map(|mut polling| self.drain(rail, &mut polling));
            self.end(ended.unwrap_or_default());
        }
    }

    /// Takes completions, when no other thread is at it.
    fn drain_all(&self) {
        for (number, rail) in self.rails.iter().enumerate() {
            let ended = self.drain(number, &mut rail.polling.lock());
            self.end(ended);
        }
    }

    /// Takes all completions of a rail; returns the transfers that they end.
    fn drain(&self, rail: usize, polling: &mut Polling) -> Ended {
        let mut ended = Ended::new();
        loop {
            let Polling { completions, withheld } = polling;
            let taken = match self.rails[rail].cq.poll(&mut completions[..]) {
                Ok(taken) => taken,
                Err(error) => {
                    let all: Vec<_> = self.connections.lock().values().cloned().collect();
                    all.iter().for_each(|connection| connection.fail(error.clone()));
                    break;
                }
            };
            for completion in &completions[..taken] {
                if completion.is_receive() {
                    self.receive(rail, completion, withheld);
                    continue;
                }
                let (slot, lane) = Lane::of_id(completion.id);
                let connection = self.connections.lock().get(&slot).cloned();
                if let Some(connection) = connection {
                    connection.complete(lane, completion, &mut ended);
                    if connection.needs_tick_soon() {
                        self.wake.raise();
                    }
                }
            }
            if taken < completions.len() {
                break;
            }
        }
        if !polling.withheld.is_empty() {
            self.post_withheld(rail, polling);
        }
        ended
    }

    /// A message of a peer has arrived, in the slot that the completion names.
    fn receive(&self, rail: usize, completion: &Completion, withheld: &mut Vec<u64>) {
        let (slot, mut message) = (completion.id, [0; FRAGMENT_LEN]);
        let len = (completion.len as usize).min(FRAGMENT_LEN);
        let is_read = completion.is_success()
            && self.rails[rail].read_fragment(slot, &mut message[..len]).is_ok();
        if is_read {
            let from = (rail, completion.qpn);
            let mut table = self.incoming.lock();
            match table.receive(from, &message[..len]) {
                Ok(None) => {}
                Ok(Some((name, bytes))) => {
                    drop(table);
                    self.inbox.lock().push(name, bytes);
                    self.announce();
                }
                Err(number) => table.remove(self, number),
            }
        }
        // While too many wait to be taken, peers get RNR NAKs and try again.
        let is_full = self.inbox.lock().bytes() > self.options.max_pending_notifications;
        if is_full || self.rails[rail].post_receive(slot).is_err() {
            withheld.push(slot);
        }
    }

    fn post_withheld(&self, rail: usize, polling: &mut Polling) {
        if self.inbox.lock().bytes() > self.options.max_pending_notifications {
            return;
        }
        polling.withheld.retain(|slot| self.rails[rail].post_receive(*slot).is_err());
    }

    pub(super) fn take_notification(&self) -> Option<Notification> {
        self.inbox.lock().pop()
    }

    #[cfg(feature = "tokio")]
    pub(super) fn has_notifications(&self) -> bool {
        !self.inbox.lock().is_empty()
    }

    /// Tells transfers their outcome. Their memory is not used any more then.
    pub(super) fn end(&self, ended: Ended) {
        if ended.is_empty() {
            return;
        }
        let mut ends = Vec::with_capacity(ended.len());
        for (transfer, outcome) in ended {
            if let Some(deadline) = transfer.deadline {
                self.deadlines.lock().remove(&(deadline, transfer.number));
            }
            *transfer.connection.lock() = None;
            let end = transfer.end.clone();
            drop(transfer);
            end.set(outcome);
            ends.push(end);
        }
        self.announce();
        ends.iter().for_each(|end| end.wake());
    }

    /// Wakes all who wait.
    fn announce(&self) {
        self.events.raise();
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            *self.changes.lock() += 1;
            self.changed.notify_all();
        }
    }

    /// A task will sleep until the thread wakes it.
    pub(super) fn wake_for_sleeper(&self) {
        self.last_poll.store(0, Ordering::Relaxed);
        self.wake.raise();
    }

    /// Waits until `ready` has a value; `None` at the deadline.
    pub(super) fn wait<T>(
        &self,
        deadline: Option<Instant>,
        mut ready: impl FnMut() -> Option<T>,
    ) -> Result<Option<T>> {
        let start = Instant::now();
        loop {
            self.poll();
            if let Some(value) = ready() {
                return Ok(Some(value));
            }
            let now = Instant::now();
            if deadline.is_some_and(|deadline| now >= deadline) {
                return Ok(None);
            }
            if now.saturating_duration_since(start) < SPIN {
                continue;
            }
            self.sleepers.fetch_add(1, Ordering::SeqCst);
            let seen = *self.changes.lock();
            // What was announced before there was a sleeper is seen here.
            let value = ready();
            if value.is_none() {
                self.wake_for_sleeper();
                let until = (now + MAX_SLEEP).min(deadline.unwrap_or(now + MAX_SLEEP));
                let mut changes = self.changes.lock();
                if *changes == seen {
                    self.changed.wait_until(&mut changes, until);
                }
            }
            self.sleepers.fetch_sub(1, Ordering::SeqCst);
            if value.is_some() {
                return Ok(value);
            }
        }
    }

    pub(super) fn add_deadline(&self, transfer: &Arc<Active>) {
        if let Some(deadline) = transfer.deadline {
            let entry = ((deadline, transfer.number), Arc::downgrade(transfer));
            self.deadlines.lock().insert(entry.0, entry.1);
            self.wake.raise();
        }
    }

    /// Gives a transfer without a deadline this one.
    pub(super) fn limit_wait(&self, transfer: &Arc<Active>, deadline: Instant) {
        if transfer.deadline.is_none() {
            let key = (deadline, transfer.number);
            self.deadlines.lock().insert(key, Arc::downgrade(transfer));
            self.wake.raise();
        }
    }

    pub(super) fn cancel(&self, transfer: &Arc<Active>, why: Error) {
        if let Some(parked) = self.stream_order.take(transfer.number) {
            return self.end(vec![(parked, Err(why))]);
        }
        let connection = transfer.connection.lock().clone();
        if let Some(connection) = connection {
            let ended = connection.cancel(transfer, why);
            self.end(ended);
            self.wake.raise();
        }
    }

    /// Ends everything: nothing is written any more when this returns.
    pub(super) fn close(self: &Arc<Self>) {
        self.is_closed.store(true, Ordering::Release);
        self.wake.raise();
        let error = Error::new(Kind::Freed, "transfer").why("the agent was closed");
        self.peers.lock().clear();
        let parked = self.stream_order.take_all().into_iter();
        self.end(parked.map(|transfer| (transfer, Err(error.clone()))).collect());
        let connections: Vec<_> = self.connections.lock().values().cloned().collect();
        for connection in connections {
            let ended = connection.abandon(self, &error);
            self.end(ended);
        }
        let mut incoming = self.incoming.lock();
        let numbers: Vec<u64> = incoming.all.keys().copied().collect();
        numbers.into_iter().for_each(|number| incoming.remove(self, number));
    }

    /// Cancels transfers that take too long; returns when the next one does.
    fn expire(&self, now: Instant) -> Option<Instant> {
        loop {
            let mut deadlines = self.deadlines.lock();
            let (&key, _) = deadlines.first_key_value()?;
            if key.0 > now {
                return Some(key.0);
            }
            let transfer = deadlines.remove(&key).and_then(|transfer| transfer.upgrade());
            drop(deadlines);
            if let Some(transfer) = transfer {
                let why = Error::new(Kind::Timeout, "transfer").why("it took too long");
                self.cancel(&transfer, why);
            }
        }
    }
}

/// Starts the agent's thread.
pub(super) fn start(shared: &Arc<Shared>, listener: BootstrapListener) -> Result<()> {
    let agent = shared.clone();
    let body = move || run(&agent, listener);
    let thread = std::thread::Builder::new().name("warpwire-agent".into()).spawn(body);
    thread.map(drop).map_err(|why| Error::os("start an agent's thread", &why))
}

fn run(agent: &Arc<Shared>, mut listener: BootstrapListener) {
    while !agent.is_closed() {
        if let Err(error) = step(agent, &mut listener) {
            tracing::warn!(%error, "an agent's thread cannot wait; trying again");
            std::thread::sleep(TICK);
        }
    }
}

/// Sleeps until something happens, and handles it.
fn step(agent: &Arc<Shared>, listener: &mut BootstrapListener) -> Result<()> {
    let now = Instant::now();
    let next_deadline = agent.expire(now);
    let connections: Vec<_> = agent.connections.lock().values().cloned().collect();
    connections.iter().for_each(|connection| connection.tick(agent, now));
    let mut sleep = MAX_SLEEP;
    if let Some(deadline) = next_deadline {
        sleep = sleep.min(deadline.saturating_duration_since(now));
    }
    if connections.iter().any(|connection| connection.needs_tick()) {
        sleep = sleep.min(TICK);
    }
    if listener.has_pending() {
        sleep = sleep.min(PENDING_INTERVAL);
    }
    let polled = Duration::from_micros(agent.last_poll.load(Ordering::Relaxed));
    let is_polled = !polled.is_zero()
        && agent.start.elapsed().saturating_sub(polled) < POLLED_INTERVAL
        && agent.sleepers.load(Ordering::SeqCst) == 0;
    if is_polled {
        sleep = sleep.min(POLLED_INTERVAL);
    } else {
        agent.rails.iter().try_for_each(|rail| rail.cq.arm(false))?;
    }
    wait_for_events(agent, listener, sleep, is_polled)?;
    agent.wake.take();
    stream_order::post_reached(agent);
    if !is_polled {
        agent.rails.iter().for_each(|rail| {
            rail.cq.take_event();
        });
        agent.drain_all();
    }
    while let Some(control) = listener.next(Duration::ZERO)? {
        incoming::accept(agent, control);
    }
    connections.iter().for_each(|connection| connection.check_control());
    remove_ended(agent);
    Ok(())
}

/// Waits until a descriptor is readable, or `sleep` is over.
fn wait_for_events(
    agent: &Shared,
    listener: &BootstrapListener,
    sleep: Duration,
    is_polled: bool,
) -> Result<()> {
    use std::os::fd::{AsFd, OwnedFd};
    // Duplicates: a connection may be closed by another thread while this one waits.
    let mut owned: Vec<OwnedFd> = Vec::new();
    let duplicate = |control: &crate::verbs::bootstrap::Bootstrap| {
        control.stream().as_fd().try_clone_to_owned().ok()
    };
    let connections: Vec<_> = agent.connections.lock().values().cloned().collect();
    for connection in connections {
        owned.extend(connection.with_control(duplicate).flatten());
    }
    for incoming in agent.incoming.lock().all.values() {
        owned.extend(duplicate(&incoming.control));
    }
    let mut fds: Vec<PollFd<'_>> = owned.iter().map(|fd| PollFd::new(fd, PollFlags::IN)).collect();
    fds.push(PollFd::new(&agent.wake, PollFlags::IN));
    let listening = listener.descriptors();
    fds.extend(listening.iter().map(|fd| PollFd::from_borrowed_fd(*fd, PollFlags::IN)));
    if !is_polled {
        fds.extend(agent.rails.iter().map(|rail| PollFd::new(&rail.cq, PollFlags::IN)));
    }
    let timeout = rustix::event::Timespec {
        tv_sec: sleep.as_secs() as i64,
        tv_nsec: sleep.subsec_nanos().into(),
    };
    match poll(&mut fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(why) => Err(Error::os("wait for peers of an agent", &why.into())),
    }
}

/// Removes connections that peers have closed. What arrived on them before is taken first: the peer
/// was told that it has been delivered.
fn remove_ended(agent: &Arc<Shared>) {
    let ended: Vec<u64> = {
        let mut table = agent.incoming.lock();
        let ended = |incoming: &mut incoming::Incoming| {
            incoming.control.try_recv::<serde_json::Value>().is_err()
        };
        table.all.iter_mut().filter_map(|(number, one)| ended(one).then_some(*number)).collect()
    };
    if ended.is_empty() {
        return;
    }
    ended.iter().for_each(|number| agent.incoming.lock().stop(*number));
    agent.drain_all();
    ended.iter().for_each(|number| agent.incoming.lock().remove(agent, *number));
}
