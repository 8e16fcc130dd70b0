//! The state shared by all handles of a communicator, and how threads block.

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use rustix::event::{PollFd, PollFlags, Timespec, epoll, poll};

use super::buffer::{Buffer, BufferSlice, Domain};
use super::comm::CommOptions;
use super::entries::RequestKind;
use super::guard::StateGuard;
use super::header::{Channel, MAX_SLICES};
use super::rank_info::RankInfo;
use super::request::Request;
use super::state::State;
use crate::error::{Error, Kind, Result};
use crate::verbs::bootstrap::Bootstrap;
use crate::verbs::{Cq, EventFd};

/// How long a waiter polls before it sleeps.
const SPIN: Duration = Duration::from_micros(50);
/// Maximum sleep between two polls of words, whose writes wake no thread.
const MAX_SLEEP: Duration = Duration::from_micros(500);

pub(super) struct Shared {
    pub rank_info: RankInfo,
    pub options: CommOptions,
    pub domain: Arc<Domain>,
    pub cq: Cq,
    /// Locked by [`lock`](Self::lock).
    pub state: Mutex<State>,
    /// Followers sleep here.
    pub woken: Condvar,
    /// Wakes the leader from `poll`: an event other than a completion.
    pub wakeup: EventFd,
    /// For the failure detector's thread: tasks wait, and no thread leads.
    pub drive: EventFd,
    /// For event loops.
    pub events: Events,
    /// The TCP connections of the failure detector; `None` for this rank.
    pub links: Vec<Option<Mutex<Bootstrap>>>,
    /// A word per rank: the number of its ready notifications.
    pub table: Buffer,
    /// Number of ready notifications consumed, by rank.
    pub consumed: Mutex<Vec<u64>>,
    /// Number of ready notifications sent, by rank.
    pub ready_sent: Mutex<Vec<u64>>,
    /// Sequence number of collectives, so that messages of different calls are not mixed up.
    pub round: Mutex<u32>,
    /// Memory into which reductions receive, kept between calls.
    pub scratch: Mutex<Option<Buffer>>,
}

/// What an event loop watches.
pub(super) struct Events {
    /// Raised when a request has ended or the completion queue has to be armed again.
    raised: EventFd,
    /// Readable if that is raised, or the completion queue's event has occurred.
    pub epoll: OwnedFd,
    /// A program has asked for the descriptor.
    pub are_watched: AtomicBool,
}

impl Events {
    pub fn new(cq: &Cq) -> Result<Self> {
        let failed = |why: rustix::io::Errno| Error::os("create an epoll descriptor", &why.into());
        let raised = EventFd::new()?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        let (data, input) = (epoll::EventData::new_u64(0), epoll::EventFlags::IN);
        epoll::add(&epoll, &raised, data, input).map_err(failed)?;
        epoll::add(&epoll, cq, data, input).map_err(failed)?;
        Ok(Self { raised, epoll, are_watched: AtomicBool::new(false) })
    }

    /// Makes the descriptor readable, if an event loop has it.
    fn raise(&self) {
        if self.are_watched.load(Ordering::SeqCst) {
            self.raised.raise();
        }
    }

    /// An event loop has asked for the descriptor. It is readable at first: the completion queue
    /// has not been armed.
    pub fn watch(&self) {
        if !self.are_watched.swap(true, Ordering::SeqCst) {
            self.raised.raise();
        }
    }
}

impl Shared {
    pub fn lock(&self) -> StateGuard<'_> {
        StateGuard::new(self.state.lock())
    }

    /// Waits until `ready` returns a value; `None` on timeout. Leader/followers: one of the waiting
    /// threads blocks in `poll` and wakes the others.
    pub fn wait_until<T>(
        &self,
        timeout: Duration,
        mut ready: impl FnMut(&mut State) -> Option<T>,
    ) -> Result<Option<T>> {
        let start = Instant::now();
        let mut state = self.lock();
        loop {
            if let Some(found) = ready(&mut state) {
                self.wake_followers(&state);
                return Ok(Some(found));
            }
            self.step(&mut state)?;
            if let Some(found) = ready(&mut state) {
                self.wake_followers(&state);
                return Ok(Some(found));
            }
            let waited = start.elapsed();
            if waited >= timeout {
                self.wake_followers(&state);
                return Ok(None);
            }
            if waited < SPIN {
                state.unlocked(std::hint::spin_loop);
            } else {
                self.sleep(&mut state, timeout - waited)?;
            }
        }
    }

    /// Makes progress, and wakes threads whose requests have completed.
    pub fn step(&self, state: &mut State) -> Result<()> {
        let ended = state.entries.ended;
        let made = state.progress(&self.cq);
        if made.is_err() {
            // They get the error when they are polled.
            state.entries.wake_tasks();
        }
        self.notify_completed(state, ended);
        made
    }

    /// Wakes sleeping threads if requests have ended since `before` was read. The leader sleeps
    /// until the next completion event; the completion that it waits for may have been consumed
    /// here.
    pub fn notify_completed(&self, state: &State, before: u64) {
        if state.entries.ended != before {
            if state.has_leader {
                self.wakeup.raise();
            }
            self.wake_followers(state);
            self.events.raise();
        }
    }

    /// Another thread may become the leader, or its request may have completed.
    fn wake_followers(&self, state: &State) {
        if state.followers > 0 {
            self.woken.notify_all();
        } else if !state.has_leader && state.entries.has_driven_tasks() {
            self.drive.raise();
        }
    }

    fn sleep(&self, state: &mut StateGuard<'_>, timeout: Duration) -> Result<()> {
        state.return_all_credits();
        if state.has_leader {
            state.followers += 1;
            state.wait_for(&self.woken, timeout);
            state.followers -= 1;
            return Ok(());
        }
        state.has_leader = true;
        let woken = state.unlocked(|| self.sleep_on_descriptors(timeout));
        state.has_leader = false;
        // The leader has consumed the completion queue's event.
        self.events.raise();
        woken
    }

    /// For the failure detector's thread: becomes the leader if tasks wait and no thread leads.
    /// After this it sleeps on [`leader_fds`](Self::leader_fds) too.
    pub fn lead_for_tasks(&self) -> bool {
        self.drive.take();
        let mut state = self.lock();
        if state.has_leader {
            return false;
        }
        if state.entries.has_driven_tasks() {
            let stepped = self.step(&mut state);
            state.return_all_credits();
            if stepped.is_ok() && state.entries.has_driven_tasks() {
                match self.cq.arm(false) {
                    Ok(()) => state.has_leader = true,
                    Err(_) => state.entries.wake_tasks(),
                }
            }
        }
        if !state.has_leader {
            self.wake_followers(&state);
        }
        state.has_leader
    }

    /// What a leader sleeps on.
    pub fn leader_fds(&self) -> [PollFd<'_>; 2] {
        [PollFd::new(&self.cq, PollFlags::IN), PollFd::new(&self.wakeup, PollFlags::IN)]
    }

    /// Ends [`lead_for_tasks`](Self::lead_for_tasks). A thread that waits takes over at once, if
    /// there is one: it needs no other thread then.
    pub fn stop_leading(&self) {
        self.cq.take_event();
        self.wakeup.take();
        let mut state = self.lock();
        state.has_leader = false;
        if state.followers > 0 {
            self.woken.notify_all();
        }
        self.events.raise();
    }

    /// Makes progress for an event loop, and makes its descriptor readable only for what happens
    /// afterwards; returns whether it was.
    pub fn clear_events(&self) -> Result<bool> {
        let completion = self.cq.take_event();
        let mut state = self.lock();
        let stepped = self.step(&mut state);
        state.return_all_credits();
        // Under the lock: requests that end later raise it again.
        let raised = self.events.raised.take();
        stepped.and_then(|()| self.cq.arm(false))?;
        Ok(completion || raised)
    }

    fn sleep_on_descriptors(&self, timeout: Duration) -> Result<()> {
        // If there is a completion already, arming raises the event immediately.
        self.cq.arm(false)?;
        let mut fds = self.leader_fds();
        let timeout = Timespec {
            tv_sec: timeout.as_secs().min(1 << 30) as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        let slept = poll(&mut fds, Some(&timeout));
        let [completion, wakeup] = [0, 1].map(|index| !fds[index].revents().is_empty());
        if completion {
            self.cq.take_event();
        }
        if wakeup {
            self.wakeup.take();
        }
        match slept {
            Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
            Err(why) => Err(Error::os("wait for a message", &why.into())),
        }
    }

    /// Waits for memory that peers write, which raises no event. Polls `check` with increasing
    /// intervals, up to `MAX_SLEEP`.
    pub fn poll_until<T>(
        &self,
        timeout: Duration,
        mut check: impl FnMut(&mut State) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let start = Instant::now();
        loop {
            {
                let mut state = self.lock();
                self.step(&mut state)?;
                if let Some(found) = check(&mut state)? {
                    return Ok(Some(found));
                }
                if start.elapsed() > SPIN {
                    state.return_all_credits();
                }
            }
            let waited = start.elapsed();
            if waited >= timeout {
                return Ok(None);
            }
            match waited > SPIN {
                true => std::thread::sleep((waited / 16).min(MAX_SLEEP)),
                false => std::hint::spin_loop(),
            }
        }
    }

    /// Wakes all sleeping threads.
    pub fn wake_all(&self) {
        self.wakeup.raise();
        self.woken.notify_all();
        self.events.raise();
    }

    /// Checks that there is such a rank.
    pub fn check_rank(&self, rank: usize, what: &str) -> Result<()> {
        let size = self.rank_info.size;
        if rank < size {
            return Ok(());
        }
        let error = Error::new(Kind::InvalidArgument, format!("{what} rank {rank}"));
        Err(error.why(format!("there are {size} ranks, counted from 0")))
    }

    fn check_slices(&self, slices: &[BufferSlice], what: &str, rank: usize) -> Result<()> {
        let wrong = |why: String, fix: &'static str| {
            let error = Error::new(Kind::InvalidArgument, format!("{what} rank {rank}"));
            Err(error.why(why).fix(fix))
        };
        if slices.len() > MAX_SLICES {
            let why = format!("it has {} slices", slices.len());
            return wrong(why, "use at most 15 slices");
        }
        if slices.iter().any(|slice| !slice.buffer.is_of(&self.domain)) {
            let why = "the buffer was registered with another communicator".to_owned();
            return wrong(why, "register it with this one");
        }
        Ok(())
    }

    /// Allocates an entry for a request and lets `begin` start it.
    pub fn start(
        self: &Arc<Self>,
        kind: RequestKind,
        rank: usize,
        slices: &[BufferSlice],
        begin: impl FnOnce(&mut State, u32),
    ) -> Result<Request> {
        let verb = match kind {
            RequestKind::Send | RequestKind::Free => "send to",
            RequestKind::Receive => "receive from",
            RequestKind::Put => "put to",
            RequestKind::Get => "get from",
        };
        self.check_rank(rank, verb)?;
        self.check_slices(slices, verb, rank)?;
        let mut state = self.lock();
        let peer = &state.peers[rank];
        if kind != RequestKind::Receive
            && let Some(why) = &peer.end
        {
            return Err(why.clone().during(format!("{verb} rank {rank}")));
        }
        let waiting = match kind {
            RequestKind::Receive => peer.receives.len(),
            _ if rank == self.rank_info.rank => peer.unexpected.len(),
            _ => peer.send_queue.len(),
        };
        if waiting >= state.queue as usize {
            // Progress may free queue space for a retry.
            self.step(&mut state)?;
            state.return_all_credits();
            return Err(busy(verb, rank, waiting));
        }
        let Some(index) = state.entries.add(kind, rank, slices) else {
            return Err(busy(verb, rank, self.options.max_requests as usize));
        };
        let ended = state.entries.ended;
        begin(&mut state, index);
        self.notify_completed(&state, ended);
        let generation = state.entries.generation(index);
        drop(state);
        Ok(Request::new(self.clone(), index, generation))
    }

    /// Starts a send on a channel.
    pub fn start_send(
        self: &Arc<Self>,
        channel: Channel,
        to: usize,
        tag: u32,
        slices: &[BufferSlice],
    ) -> Result<Request> {
        self.start(RequestKind::Send, to, slices, |state, index| {
            let entry = state.entries.get(index);
            (entry.channel, entry.tag) = (channel, tag);
            state.send(to, index);
        })
    }

    /// Starts a receive on a channel.
    pub fn start_receive(
        self: &Arc<Self>,
        channel: Channel,
        from: usize,
        wants: super::entries::Match,
        slices: &[BufferSlice],
    ) -> Result<Request> {
        self.start(RequestKind::Receive, from, slices, |state, index| {
            let entry = state.entries.get(index);
            (entry.channel, entry.wants) = (channel, wants);
            state.receive(from, index);
        })
    }
}

#[cold]
fn busy(verb: &str, rank: usize, waiting: usize) -> Error {
    Error::new(Kind::Busy, format!("{verb} rank {rank}"))
        .why(format!("{waiting} requests are queued, the maximum"))
        .fix("wait for some of them first")
}
