//! The service thread of one GPU's sockets: it answers requests of kernels, polls their counters,
//! and moves bytes between rings and the operating system's sockets.
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
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::event::Timespec;
use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;

use super::SockOptions;
use super::arena::{self, Arena};
use super::byte_counts::WarpByteCounts;
use super::device_cache::{ConnMemory, DeviceCache};
use super::handshakes::{PENDING_BIT, PendingHandshakes};
use super::layout::{host_state, split_handle, state};
use super::qp_slots::QpSlots;
use super::shared_area::SharedArea;
use super::socket::{Ring, Socket};
use crate::error::{Error, Result};
use crate::verbs::Context;

/// Bytes moved for one socket per turn. A UDP datagram fits.
pub(super) const QUANTUM: usize = 128 << 10;
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
/// A closed socket with unsent bytes is reset after this time without progress.
pub(super) const LINGER_TIMEOUT: Duration = Duration::from_secs(60);
/// Events of a socket, edge-triggered. `PRI` is urgent data (`MSG_OOB`), at which a read stops.
const WATCHED: EventFlags = EventFlags::IN
    .union(EventFlags::PRI)
    .union(EventFlags::OUT)
    .union(EventFlags::RDHUP)
    .union(EventFlags::ET);
/// The epoll data of the wake-up eventfd.
const WAKE: u64 = u64::MAX;
/// How often sockets on the retry list are checked: no event announces what they wait for.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// How often queue pairs are checked for failure.
const QP_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Counters of the service thread, read by [`SockHost::stats`](super::SockHost::stats).
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) open: AtomicU64,
    pub(super) requests: AtomicU64,
    pub(super) accepted: AtomicU64,
    pub(super) connected: AtomicU64,
    pub(super) received: AtomicU64,
    pub(super) sent: AtomicU64,
    pub(super) dropped: AtomicU64,
    pub(super) misused: AtomicU64,
    /// Bytes of `warp` sockets.
    pub(super) warp: WarpByteCounts,
}

/// How the service thread is stopped.
#[derive(Debug, Default)]
pub(super) struct StopFlags {
    pub(super) stop: AtomicBool,
    /// Test hook: end without closing anything, as if the thread had crashed.
    pub(super) simulate_crash: AtomicBool,
}

pub(super) struct Agent {
    pub(super) shared_area: Arc<SharedArea>,
    pub(super) options: SockOptions,
    pub(super) sockets: Vec<Socket>,
    /// Free slots, the least recently used first.
    pub(super) vacant: VecDeque<u16>,
    /// Slots from this index on have never been used.
    pub(super) used_up_to: u16,
    pub(super) qp_slots: Option<QpSlots>,
    pub(super) device_cache: DeviceCache,
    pub(super) pending: PendingHandshakes,
    pub(super) receive_arena: Arena,
    pub(super) send_arena: Arena,
    poll: OwnedFd,
    /// Sockets with work to do.
    to_serve: VecDeque<u16>,
    /// The retry list: listeners that lack a slot, a ring or a descriptor, and closed sockets whose
    /// peer has not taken everything yet.
    pub(super) waiting: Vec<u16>,
    pub(super) bounce: Vec<u8>,
    pub(super) next_request: u64,
    pub(super) counters: Arc<Counters>,
    pub(super) stop_flags: Arc<StopFlags>,
    heartbeat: u64,
}

impl Agent {
    pub(super) fn new(
        shared_area: Arc<SharedArea>,
        options: SockOptions,
        (qp_slots, context): (Option<QpSlots>, Option<Context>),
        wake: &OwnedFd,
        counters: Arc<Counters>,
        stop_flags: Arc<StopFlags>,
    ) -> Result<Self> {
        let failed = |errno: Errno| Error::os("watch sockets", &errno.into());
        let poll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        epoll::add(&poll, wake, EventData::new_u64(WAKE), EventFlags::IN).map_err(failed)?;
        let (receive_arena, send_arena) = SharedArea::arenas(&options);
        let slots = options.sockets as u16;
        Ok(Self {
            sockets: (0..slots).map(|_| Socket::vacant()).collect(),
            vacant: (0..slots).collect(),
            used_up_to: 0,
            qp_slots,
            device_cache: DeviceCache::new(context),
            pending: PendingHandshakes::default(),
            receive_arena,
            send_arena,
            poll,
            to_serve: VecDeque::with_capacity(usize::from(slots)),
            waiting: Vec::with_capacity(usize::from(slots)),
            bounce: vec![0; QUANTUM],
            next_request: 0,
            counters,
            stop_flags,
            heartbeat: 0,
            shared_area,
            options,
        })
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
        // Connections that were not closed end with a reset, not with an orderly end of stream.
        for index in 0..self.used_up_to {
            if self.sockets[usize::from(index)].is_warp {
                self.sockets[usize::from(index)].sockopts.abort = true;
                self.drop_descriptor(index);
                self.detach(index);
            }
        }
        // If that fails, kernels notice that the heartbeat has stopped.
        if let Err(error) = self.shared_area.close() {
            tracing::error!(%error, "cannot notify kernels that the socket service has ended");
        }
    }

    fn serve_all(&mut self) -> Result<()> {
        let start = Instant::now();
        let (mut last_work, mut last_heartbeat, mut last_retry, mut last_check) =
            (start, start, start, start);
        self.shared_area.heartbeat(1)?;
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
                self.shared_area.heartbeat(self.heartbeat + 1)?;
            }
            if now - last_retry >= RETRY_INTERVAL
                && !(self.waiting.is_empty() && self.pending.is_empty())
            {
                last_retry = now;
                self.retry(now)?;
            }
            if now - last_check >= QP_CHECK_INTERVAL && self.qp_slots.is_some() {
                last_check = now;
                self.check_queue_pairs()?;
            }
        }
        Ok(())
    }

    /// Serves requests, counters and sockets once; true if there was work.
    pub(super) fn poll_round(&mut self) -> Result<bool> {
        Ok(self.take_requests()? | self.poll_all_counters()? | self.serve_some()?)
    }

    /// How long to sleep when nothing has happened for `idle`.
    fn idle_wait(&self, idle: Duration) -> Duration {
        if !self.to_serve.is_empty() || idle < self.options.spin {
            Duration::ZERO
        } else if self.vacant.len() == self.sockets.len() {
            (idle / SLEEP_DIVISOR).clamp(MIN_SLEEP, IDLE_SLEEP)
        } else {
            (idle / SLEEP_DIVISOR).clamp(MIN_SLEEP, MAX_SLEEP)
        }
    }

    fn poll_all_counters(&mut self) -> Result<bool> {
        let mut worked = false;
        for index in 0..self.used_up_to {
            worked |= self.poll_counters(index)?;
        }
        Ok(worked)
    }

    /// Reads how much kernels have sent and consumed on one socket; true if that changed.
    #[inline]
    pub(super) fn poll_counters(&mut self, index: u16) -> Result<bool> {
        let word = self.shared_area.device_counters(index)?;
        let socket = &mut self.sockets[usize::from(index)];
        if word as u32 == socket.sent as u32 && (word >> 32) as u32 == socket.consumed as u32 {
            return Ok(false);
        }
        if socket.update_counters(word) {
            self.queue(index);
            return Ok(true);
        }
        self.misused(index)
    }

    /// A kernel has written an impossible counter: resets that socket only.
    #[cold]
    fn misused(&mut self, index: u16) -> Result<bool> {
        let socket = &mut self.sockets[usize::from(index)];
        if !socket.open || socket.errno() == i64::from(Errno::INVAL.raw_os_error()) {
            return Ok(false);
        }
        tracing::warn!(index, "a kernel wrote an impossible counter; its socket is reset");
        socket.fail(Some(Errno::INVAL), Some(Errno::INVAL));
        socket.sockopts.abort = true;
        self.drop_descriptor(index);
        self.detach(index);
        self.publish_state(index)?;
        // Counted after the error was published to the kernel.
        self.counters.misused.fetch_add(1, Ordering::Release);
        Ok(true)
    }

    /// Queues a socket for service, once.
    pub(super) fn queue(&mut self, index: u16) {
        let socket = &mut self.sockets[usize::from(index)];
        if !socket.queued {
            socket.queued = true;
            self.to_serve.push_back(index);
        }
    }

    /// Serves each socket that is queued now once.
    fn serve_some(&mut self) -> Result<bool> {
        let count = self.to_serve.len();
        for _ in 0..count {
            let Some(index) = self.to_serve.pop_front() else { break };
            self.sockets[usize::from(index)].queued = false;
            if self.serve(index)? {
                self.queue(index);
            }
        }
        Ok(count > 0)
    }

    /// Handles events of the operating system; sleeps for at most `idle_wait`.
    pub(super) fn take_events(&mut self, idle_wait: Duration) -> Result<bool> {
        let mut buffer = [MaybeUninit::<epoll::Event>::uninit(); EVENTS];
        let timeout = Timespec { tv_sec: 0, tv_nsec: idle_wait.as_nanos() as _ };
        let events = match epoll::wait(&self.poll, &mut buffer[..], Some(&timeout)) {
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
                self.on_pending_event(data & !PENDING_BIT)?;
                worked = true;
                continue;
            }
            let (index, generation) = split_handle(data as i32);
            let Some(socket) = self.sockets.get_mut(usize::from(index)) else { continue };
            if socket.generation != generation || socket.fd.is_none() {
                continue;
            }
            let flags = event.flags;
            let ended = EventFlags::ERR | EventFlags::HUP | EventFlags::RDHUP;
            let uneven = ended | EventFlags::PRI;
            socket.readable |= flags.intersects(EventFlags::IN | uneven);
            socket.writable |=
                flags.intersects(EventFlags::OUT | EventFlags::ERR | EventFlags::HUP);
            socket.read_until_empty |= flags.intersects(uneven);
            self.queue(index);
            worked = true;
        }
        Ok(worked)
    }

    /// Adds a descriptor to the epoll set, edge-triggered.
    pub(super) fn watch_descriptor(
        &self,
        fd: &OwnedFd,
        data: u64,
    ) -> std::result::Result<(), Errno> {
        epoll::add(&self.poll, fd, EventData::new_u64(data), WATCHED)
    }

    /// Replaces the epoll data of a descriptor, of a pending handshake so far, by that of a socket.
    pub(super) fn rewatch(&mut self, index: u16) -> std::result::Result<(), Errno> {
        let socket = &self.sockets[usize::from(index)];
        if let Some(fd) = &socket.fd {
            epoll::delete(&self.poll, fd)?;
        }
        self.watch(index)
    }

    /// Adds a socket's descriptor to the epoll set, if it is not in it.
    pub(super) fn watch(&mut self, index: u16) -> std::result::Result<(), Errno> {
        let socket = &mut self.sockets[usize::from(index)];
        let data = socket.handle(index) as u64;
        let Some(fd) = socket.fd.as_ref().filter(|_| !socket.watched) else { return Ok(()) };
        epoll::add(&self.poll, fd, EventData::new_u64(data), WATCHED)?;
        socket.watched = true;
        Ok(())
    }

    /// Puts a socket on the retry list.
    pub(super) fn retry_later(&mut self, index: u16) {
        let socket = &mut self.sockets[usize::from(index)];
        if !socket.in_retry_list {
            socket.in_retry_list = true;
            self.waiting.push(index);
        }
    }

    /// Periodic: expires pending handshakes and retries the sockets on the retry list.
    fn retry(&mut self, now: Instant) -> Result<()> {
        self.expire_pending(now)?;
        let waiting = std::mem::take(&mut self.waiting);
        for index in waiting {
            let socket = &mut self.sockets[usize::from(index)];
            socket.in_retry_list = false;
            if socket.closing.is_some_and(|until| now > until) {
                // The peer takes no more data: the rest is discarded, and the peer sees a reset.
                socket.sockopts.abort = true;
                self.release_socket(index)?;
            } else if socket.closing.is_some() {
                self.finish_warp(index)?;
                if self.sockets[usize::from(index)].closing.is_some() {
                    self.retry_later(index);
                }
            } else {
                self.queue(index);
            }
        }
        Ok(())
    }

    /// Takes a free slot for a new socket, with a new generation; `None` if all are used.
    pub(super) fn alloc_socket(&mut self) -> Result<Option<u16>> {
        let Some(index) = self.vacant.pop_front() else { return Ok(None) };
        self.used_up_to = self.used_up_to.max(index + 1);
        self.shared_area.clear_device_counters(index)?;
        let old = &self.sockets[usize::from(index)];
        let (generation, queued, in_retry_list) =
            (old.generation % 0x7fff + 1, old.queued, old.in_retry_list);
        let socket = &mut self.sockets[usize::from(index)];
        *socket = Socket::vacant();
        (socket.open, socket.generation) = (true, generation);
        (socket.queued, socket.in_retry_list) = (queued, in_retry_list);
        socket.sockopts.receive_size = self.options.ring;
        socket.sockopts.send_size = self.options.ring;
        self.counters.open.fetch_add(1, Ordering::Relaxed);
        Ok(Some(index))
    }

    /// Allocates a socket's rings in the sizes that its options give, unless it has them.
    pub(super) fn alloc_rings(&mut self, index: u16) -> std::result::Result<(), Errno> {
        let sockopts = self.sockets[usize::from(index)].sockopts;
        if self.sockets[usize::from(index)].receive_ring.1 == 0 {
            let receive = alloc_ring(&mut self.receive_arena, sockopts.receive_size)?;
            match alloc_ring(&mut self.send_arena, sockopts.send_size) {
                Ok(send) => {
                    let socket = &mut self.sockets[usize::from(index)];
                    (socket.receive_ring, socket.send_ring) = (receive, send);
                }
                Err(errno) => {
                    self.receive_arena.release(receive.0, receive.1);
                    return Err(errno);
                }
            }
        }
        Ok(())
    }

    /// The memory of a socket that an RDMA device accesses.
    pub(super) fn conn_memory(&self, index: u16) -> Result<ConnMemory> {
        let socket = &self.sockets[usize::from(index)];
        self.shared_area.conn_memory(index, socket.receive_ring, socket.send_ring)
    }

    /// Frees the rings.
    pub(super) fn free_rings(&mut self, index: u16) {
        let socket = &mut self.sockets[usize::from(index)];
        let (receive, send) = (socket.receive_ring, socket.send_ring);
        (socket.receive_ring, socket.send_ring) = ((0, 0), (0, 0));
        if receive.1 != 0 {
            self.receive_arena.release(receive.0, receive.1);
        }
        if send.1 != 0 {
            self.send_arena.release(send.0, send.1);
        }
    }

    /// Publishes a socket's whole host state to kernels.
    pub(super) fn publish_socket(&self, index: u16) -> Result<()> {
        let socket = &self.sockets[usize::from(index)];
        let rings = self.shared_area.ring_addresses(socket.receive_ring.0, socket.send_ring.0);
        let conn_resources = socket.warp.conn_resources.as_ref().zip(self.qp_slots.as_ref());
        let qp_descriptor = conn_resources.map_or(0, |(conn_resources, qp_slots)| {
            qp_slots.qp_descriptor_addr(conn_resources.qp_slot)
        });
        self.shared_area.write_host_state(index, &socket.line(rings, qp_descriptor))
    }

    /// Publishes a socket's state word to kernels.
    pub(super) fn publish_state(&self, index: u16) -> Result<()> {
        self.shared_area.store_word(
            index,
            host_state::STATE,
            self.sockets[usize::from(index)].state(),
        )
    }

    /// Closes the descriptor, with a reset if `abort` is set.
    pub(super) fn drop_descriptor(&mut self, index: u16) {
        let socket = &mut self.sockets[usize::from(index)];
        if let Some(fd) = socket.fd.take()
            && socket.sockopts.abort
            // If it cannot be set, the peer sees an ordinary end of stream.
            && let Err(errno) = rustix::net::sockopt::set_socket_linger(&fd, Some(Duration::ZERO))
        {
            tracing::debug!(%errno, "cannot reset a connection");
        }
        socket.watched = false;
        (socket.readable, socket.writable) = (false, false);
    }

    /// Frees a slot: its kernel has closed the socket, or never got its handle.
    pub(super) fn release_socket(&mut self, index: u16) -> Result<()> {
        // In this order: after an orderly close the peer must see the end before its work requests
        // fail.
        self.drop_descriptor(index);
        self.detach(index);
        self.free_rings(index);
        let handle = self.sockets[usize::from(index)].handle(index);
        if self.sockets[usize::from(index)].is_warp {
            self.pending.remove_listener(handle);
            self.counters.warp.close(index, self.sockets[usize::from(index)].generation, None);
        }
        let socket = &mut self.sockets[usize::from(index)];
        socket.open = false;
        socket.closing = None;
        (socket.sent, socket.consumed, socket.taken, socket.received) = (0, 0, 0, 0);
        let unaccepted = std::mem::take(&mut socket.waiting);
        self.shared_area.clear_device_counters(index)?;
        self.publish_state(index)?;
        self.vacant.push_back(index);
        self.counters.open.fetch_sub(1, Ordering::Relaxed);
        for handle in unaccepted {
            // A kernel may have closed it without having accepted it: then another socket may have
            // its slot.
            if let Ok(pending_index) = self.find(handle) {
                self.release_socket(pending_index)?;
            }
        }
        Ok(())
    }

    /// The slot that a handle names; `EBADF` if it is closed or of another generation.
    pub(super) fn find(&self, handle: i32) -> std::result::Result<u16, Errno> {
        let (index, generation) = split_handle(handle);
        let socket = self.sockets.get(usize::from(index));
        match socket {
            Some(socket)
                if socket.open && socket.closing.is_none() && socket.generation == generation =>
            {
                Ok(index)
            }
            _ => Err(Errno::BADF),
        }
    }

    /// Whether a stream is connected.
    pub(super) fn is_connected(&self, index: u16) -> bool {
        self.sockets[usize::from(index)].has(state::CONNECTED)
    }
}

fn alloc_ring(area: &mut Arena, size: u64) -> std::result::Result<Ring, Errno> {
    let size = arena::rounded(size).ok_or(Errno::NOBUFS)?;
    area.take(size).map(|at| (at, size)).ok_or(Errno::NOBUFS)
}
