//! The service thread of one GPU's sockets: it answers requests of kernels, polls their counters,
//! waits for events, and serves sockets one turn at a time. What a turn does is up to the
//! [kind](super::kinds) of the socket.
//!
//! Rules:
//! 1. It never blocks on a kernel or on a peer. Work that cannot proceed is set aside and resumed
//!    when an event allows it.
//! 2. Everything that a kernel writes is checked: an impossible counter resets that socket, an
//!    invalid request gets an errno.
//! 3. A socket is served one quantum at a time, and queued again at the end of the list if more is
//!    to be done.
//! 4. A slot is reused only after its kernel has closed it and nothing is left to send.

use std::collections::VecDeque;
use std::mem::MaybeUninit;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll;
use rustix::io::Errno;

use super::kinds::{CounterUpdate, Progress, SockOpts, Socket};
use super::pending::{PENDING_BIT, PendingHandshakes};
use super::resources::{Resources, WAKE};
use super::socket_table::SocketTable;
use crate::error::{Error, Result};

/// Maximum number of events per `epoll_wait`.
const EVENTS: usize = 256;
/// How often the heartbeat counter is incremented.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(20);
/// Bounds of the sleep while sockets are open; in between it is idle time / [`SLEEP_DIVISOR`].
const MIN_SLEEP: Duration = Duration::from_micros(20);
const MAX_SLEEP: Duration = Duration::from_millis(1);
/// Upper bound of the sleep while no socket is open.
const IDLE_SLEEP: Duration = Duration::from_millis(4);
const SLEEP_DIVISOR: u32 = 16;
/// Polls of counters and requests between two `epoll_wait` calls.
const POLL_ROUNDS: u32 = 4;
/// How often sockets on the retry list are checked: no event announces what they wait for.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// How often queue pairs are checked for failure.
const QP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// How the service thread is stopped.
#[derive(Debug, Default)]
pub(super) struct StopFlags {
    pub(super) stop: AtomicBool,
    /// Test hook: end without closing anything, as if the thread had crashed.
    pub(super) simulate_crash: AtomicBool,
}

/// The state of the thread.
pub(super) struct ServiceThread {
    pub(super) resources: Resources,
    pub(super) sockets: SocketTable,
    pub(super) pending: PendingHandshakes,
    /// Sockets with work to do.
    to_serve: VecDeque<u16>,
    /// Listeners that lack a slot, a ring or a descriptor, and closed sockets whose peer has not
    /// taken everything yet.
    retry_list: Vec<u16>,
    pub(super) next_request: u64,
    stop_flags: Arc<StopFlags>,
    heartbeat: u64,
    /// How often the counters of a socket were read.
    #[cfg(test)]
    pub(super) counter_loads: u64,
}

impl ServiceThread {
    pub(super) fn new(resources: Resources, stop_flags: Arc<StopFlags>) -> Self {
        let slots = resources.options.sockets as u16;
        Self {
            sockets: SocketTable::new(slots),
            pending: PendingHandshakes::default(),
            to_serve: VecDeque::with_capacity(usize::from(slots)),
            retry_list: Vec::with_capacity(usize::from(slots)),
            next_request: 0,
            stop_flags,
            heartbeat: 0,
            #[cfg(test)]
            counter_loads: 0,
            resources,
        }
    }

    /// Serves until [`StopFlags::stop`] is set or the shared memory fails.
    pub(super) fn run(mut self) {
        let outcome = self.serve_all();
        if self.stop_flags.simulate_crash.load(Ordering::Acquire) {
            return;
        }
        if let Err(error) = outcome {
            tracing::error!(%error, "the socket service has failed");
        }
        // RDMA streams that were not closed end with a reset, not with an orderly end of stream.
        for index in 0..self.sockets.used_up_to {
            let slot = &mut self.sockets[index];
            if let Socket::Rdma(rdma) = &mut slot.socket {
                slot.common.options.abort = true;
                slot.common.close_descriptor();
                rdma.detach();
            }
        }
        // If that fails, kernels notice that the heartbeat has stopped.
        if let Err(error) = self.resources.shared_area.close() {
            tracing::error!(%error, "cannot notify kernels that the socket service has ended");
        }
    }

    fn serve_all(&mut self) -> Result<()> {
        let start = Instant::now();
        let (mut last_work, mut last_heartbeat, mut last_retry, mut last_check) =
            (start, start, start, start);
        self.resources.shared_area.heartbeat(1)?;
        while !self.stop_flags.stop.load(Ordering::Acquire) {
            let mut worked = false;
            for _ in 0..POLL_ROUNDS {
                worked |= self.poll_round()?;
            }
            let now = Instant::now();
            if worked {
                last_work = now;
            }
            worked |= self.take_events(self.idle_wait(now - last_work))?;
            if worked {
                last_work = now;
            }
            if now - last_heartbeat >= HEARTBEAT_INTERVAL {
                last_heartbeat = now;
                self.heartbeat += 1;
                self.resources.shared_area.heartbeat(self.heartbeat + 1)?;
            }
            if now - last_retry >= RETRY_INTERVAL
                && !(self.retry_list.is_empty() && self.pending.is_empty())
            {
                last_retry = now;
                self.retry(now)?;
            }
            if now - last_check >= QP_CHECK_INTERVAL && self.resources.qp_slots.is_some() {
                last_check = now;
                self.check_queue_pairs()?;
            }
        }
        Ok(())
    }

    /// Serves requests, counters and sockets once; true if there was work.
    pub(super) fn poll_round(&mut self) -> Result<bool> {
        Ok(self.take_requests()? | self.poll_active_counters()? | self.serve_some()?)
    }

    /// How long to sleep when nothing has happened for `idle`.
    fn idle_wait(&self, idle: Duration) -> Duration {
        if !self.to_serve.is_empty() || idle < self.resources.options.spin {
            Duration::ZERO
        } else if self.sockets.has_open() {
            (idle / SLEEP_DIVISOR).clamp(MIN_SLEEP, MAX_SLEEP)
        } else {
            (idle / SLEEP_DIVISOR).clamp(MIN_SLEEP, IDLE_SLEEP)
        }
    }

    /// Polls the counters of sockets whose activity flag is set; others are idle.
    fn poll_active_counters(&mut self) -> Result<bool> {
        let used = self.sockets.used_up_to;
        let mut active = self.resources.shared_area.take_activity(used)?;
        let mut worked = false;
        while active != 0 {
            let flag = active.trailing_zeros();
            active &= active - 1;
            for index in self.resources.shared_area.sockets_of(flag, used) {
                worked |= self.poll_counters(index)?;
            }
        }
        Ok(worked)
    }

    /// Reads how much kernels have sent and consumed on one socket; true if that changed.
    #[inline]
    pub(super) fn poll_counters(&mut self, index: u16) -> Result<bool> {
        #[cfg(test)]
        {
            self.counter_loads += 1;
        }
        let word = self.resources.shared_area.device_counters(index)?;
        match self.sockets[index].update_counters(word) {
            CounterUpdate::Same => Ok(false),
            CounterUpdate::Changed => {
                self.queue(index);
                Ok(true)
            }
            CounterUpdate::Impossible => self.misused(index),
        }
    }

    /// A kernel has written an impossible counter: resets that socket only.
    #[cold]
    pub(super) fn misused(&mut self, index: u16) -> Result<bool> {
        let slot = &mut self.sockets[index];
        if slot.common.errno() == i64::from(Errno::INVAL.raw_os_error()) {
            return Ok(false);
        }
        tracing::warn!(index, "a kernel wrote an impossible counter; its socket is reset");
        slot.reset(Errno::INVAL, &mut self.resources)?;
        // Counted after the error was published to the kernel.
        self.resources.counters.misused.fetch_add(1, Ordering::Release);
        Ok(true)
    }

    /// Queues a socket for service, once.
    pub(super) fn queue(&mut self, index: u16) {
        let common = &mut self.sockets[index].common;
        if !common.queued {
            common.queued = true;
            self.to_serve.push_back(index);
        }
    }

    /// Serves each socket that is queued now once.
    fn serve_some(&mut self) -> Result<bool> {
        let count = self.to_serve.len();
        for _ in 0..count {
            let Some(index) = self.to_serve.pop_front() else { break };
            let slot = &mut self.sockets[index];
            slot.common.queued = false;
            let progress = match slot.socket {
                Socket::Listener(_) => self.accept_some(index)?,
                _ => slot.serve(&mut self.resources)?,
            };
            self.apply(index, progress)?;
        }
        Ok(count > 0)
    }

    /// Does what a socket's progress asks for.
    pub(super) fn apply(&mut self, index: u16, progress: Progress) -> Result<()> {
        match progress {
            Progress::Idle => {}
            Progress::More => self.queue(index),
            Progress::Retry => self.retry_later(index),
            Progress::Established => self.on_established(index)?,
            Progress::Release => self.release(index)?,
        }
        Ok(())
    }

    /// Handles events of the operating system; sleeps for at most `idle_wait`.
    pub(super) fn take_events(&mut self, idle_wait: Duration) -> Result<bool> {
        let mut buffer = [MaybeUninit::<epoll::Event>::uninit(); EVENTS];
        let timeout = Timespec { tv_sec: 0, tv_nsec: idle_wait.as_nanos() as _ };
        let events = match epoll::wait(&self.resources.epoll, &mut buffer[..], Some(&timeout)) {
            Ok((events, _)) => events,
            Err(Errno::INTR) => return Ok(false),
            Err(errno) => return Err(Error::os("watch sockets", &errno.into())),
        };
        let mut worked = false;
        for event in events {
            let data = event.data.u64();
            if data == WAKE {
                continue;
            }
            if data & PENDING_BIT != 0 {
                self.on_pending_event(data)?;
            } else if let Some(slot) = self.sockets.watched(data as i32) {
                slot.common.on_event(event.flags);
                let index = slot.common.index;
                self.queue(index);
            } else {
                continue;
            }
            worked = true;
        }
        Ok(worked)
    }

    /// Puts a socket on the retry list.
    pub(super) fn retry_later(&mut self, index: u16) {
        let common = &mut self.sockets[index].common;
        if !common.in_retry_list {
            common.in_retry_list = true;
            self.retry_list.push(index);
        }
    }

    /// Periodic: expires pending handshakes and retries the sockets on the retry list.
    fn retry(&mut self, now: Instant) -> Result<()> {
        self.expire_pending(now)?;
        for index in std::mem::take(&mut self.retry_list) {
            let slot = &mut self.sockets[index];
            slot.common.in_retry_list = false;
            let Some(until) = slot.common.closing else {
                self.queue(index);
                continue;
            };
            if now > until {
                // The peer takes no more data: the rest is discarded, and the peer sees a reset.
                slot.common.options.abort = true;
                self.release(index)?;
                continue;
            }
            let progress = slot.poll_close();
            self.apply(index, progress)?;
            if progress != Progress::Release {
                self.retry_later(index);
            }
        }
        Ok(())
    }

    /// Checks the queue pairs of all connections for failure.
    fn check_queue_pairs(&mut self) -> Result<()> {
        for index in 0..self.sockets.used_up_to {
            let slot = &mut self.sockets[index];
            if let Socket::Rdma(rdma) = &mut slot.socket {
                let progress = rdma.check_queue_pair(&mut slot.common, &mut self.resources)?;
                self.apply(index, progress)?;
            }
        }
        Ok(())
    }

    /// Takes a free slot for a new socket; `None` if all are used. The caller sets its kind.
    pub(super) fn open_slot(&mut self, options: SockOpts) -> Result<Option<u16>> {
        let Some(index) = self.sockets.open(options) else { return Ok(None) };
        self.resources.shared_area.clear_device_counters(index)?;
        self.resources.counters.open.fetch_add(1, Ordering::Relaxed);
        Ok(Some(index))
    }

    /// Frees a slot: its kernel has closed the socket, or never got its handle.
    pub(super) fn release(&mut self, index: u16) -> Result<()> {
        let slot = &mut self.sockets[index];
        let handle = slot.common.handle();
        let released = slot.release(&mut self.resources);
        self.pending.remove_listener(handle);
        if let Some(parent) = released.parent
            && let Some((_, listener)) = self.sockets.listener(parent.listener)
        {
            listener.pending_accepts -= 1;
        }
        self.resources.shared_area.clear_device_counters(index)?;
        self.resources.publish_state(&self.sockets[index].common)?;
        self.sockets.vacant.push_back(index);
        self.resources.counters.open.fetch_sub(1, Ordering::Relaxed);
        for handle in released.unaccepted {
            // A kernel may have closed it without having accepted it: then another socket may have
            // its slot.
            if let Ok(pending_index) = self.sockets.find(handle) {
                self.release(pending_index)?;
            }
        }
        Ok(())
    }
}
