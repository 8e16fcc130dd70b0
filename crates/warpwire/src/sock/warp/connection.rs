//! One end of a connection of a CPU program: its memory, its queue pair, and its waiting callers.
//!
//! Invariants:
//! 1. Each post is signaled once, by its last work request, and has at most [`ENTRIES`] of them; at
//!    most [`MAX_POSTS`] posts are in flight. So neither the send queue nor the CQ can overflow.
//! 2. Bytes are staged until their post has completed, which means that they have arrived.
//! 3. Post slots are reserved: one for a report at any time, and one more for FIN.
//! 4. Flags are read before the counter words, so what had arrived when a flag was set is seen.

use std::io;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::flow::{FIN, READ_CLOSED, ReceiveFlow, SendFlow};
use super::handshake::{Hello, RemoteAddr};
use super::net::{Inner, NetOptions};
use crate::error::{Error, Kind, Result};
use crate::mr::{HostMemory, MemorySource};
use crate::verbs::{
    Access, Completion, Context, Cq, EventFd, Mr, Qp, QpOptions, SendRequest, Sge, WrOp,
};

/// Offsets: the counter words, each in its own cache line, and the ring behind them.
const RECEIVED: u64 = 0;
const TAKEN: u64 = 64;
const RING: u64 = 4096;
/// Maximum number of work requests per post: data that wraps in both rings, and the word.
const ENTRIES: u32 = 4;
const MAX_POSTS: u64 = 64;
/// `wr_id` of a report and of FIN; that of data is the total number of bytes sent.
const REPORT_ID: u64 = 1 << 62;
const FIN_ID: u64 = 1 << 63;
/// A call polls for `SPIN` before it sleeps; for `LONG_SPIN` if the last wait in this direction was
/// shorter than that, as in a continuous stream, because a wake-up takes about as long.
const SPIN: Duration = Duration::from_micros(50);
const LONG_SPIN: Duration = Duration::from_micros(400);

/// The direction that a call waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Interest {
    Reading,
    Writing,
}

impl Interest {
    const BOTH: [Self; 2] = [Self::Reading, Self::Writing];

    fn bit(self) -> u8 {
        1 << self as u8
    }
}

/// Set in `armed`, beside the bits of [`Interest`], once the descriptor was signaled.
const NOTIFIED: u8 = 1 << 7;

/// State flags of a connection.
mod flag {
    /// The TCP connection has ended.
    pub(super) const HUNG_UP: u32 = 1;
    /// The connection was reset by us, or a work request failed.
    pub(super) const FAILED: u32 = 2;
    /// Our receiving direction is shut down.
    pub(super) const READ_CLOSED: u32 = 4;
}

/// Resources of an end, created before the handshake.
pub(super) struct LocalResources {
    qp: Qp,
    cq: Cq,
    /// `remote_mr`: the words and the ring, which the peer writes; `local_mr`: the staged bytes.
    remote_mr: Mr,
    local_mr: Mr,
    memory: HostMemory,
    ring: u64,
    stage: u64,
}

impl LocalResources {
    pub(super) fn new(context: &Context, options: &NetOptions) -> Result<Self> {
        let pd = context.alloc_pd();
        // When a queue pair fails, every work request completes, signaled or not.
        let cq = context.create_cq(MAX_POSTS as u32 * ENTRIES)?;
        let queue = QpOptions {
            send_depth: MAX_POSTS as u32 * ENTRIES,
            receive_depth: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 8,
            signal_all: false,
            access: Access::REMOTE_WRITE,
            max_rd_atomic: 1,
            ..QpOptions::default()
        };
        let qp = context.create_qp(&pd, &cq, &cq, queue)?;
        let (ring, stage) = (options.ring, options.send_buffer);
        let memory = HostMemory::new(RING + ring + stage)?;
        let slice = |at, len| MemorySource::from(memory.clone()).slice(at, len);
        let remote_access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let remote_mr = context.register(&pd, slice(0, RING + ring)?, remote_access)?;
        let local_mr = context.register(&pd, slice(RING + ring, stage)?, Access::LOCAL_WRITE)?;
        Ok(Self { qp, cq, remote_mr, local_mr, memory, ring, stage })
    }

    /// The hello for the peer.
    pub(super) fn hello(&self) -> Hello {
        let remote_addr = |offset| {
            let remote = self.remote_mr.remote(offset);
            RemoteAddr { address: remote.address, rkey: remote.rkey }
        };
        Hello {
            endpoint: self.qp.endpoint(),
            ring: remote_addr(RING),
            ring_size: self.ring,
            received: remote_addr(RECEIVED),
            taken: remote_addr(TAKEN),
            // Staged bytes are freed when they have arrived, not when they are read.
            window: None,
        }
    }

    /// Connects the queue pair: the peer may write from here on.
    pub(super) fn establish(&self, peer: &Hello) -> Result<()> {
        self.qp.connect(&peer.endpoint)
    }
}

/// An established connection.
pub(super) struct Connection {
    resources: LocalResources,
    peer: Hello,
    pub(super) tcp: TcpStream,
    pub(super) addresses: (SocketAddr, SocketAddr),
    pub(super) net: Arc<Inner>,
    incoming: Mutex<ReceiveFlow>,
    outgoing: Mutex<SendFlow>,
    flags: AtomicU32,
    why: OnceLock<Error>,
    /// Readable without the locks: total bytes read, sent, and arrived at the peer.
    consumed: AtomicU64,
    sent: AtomicU64,
    landed: AtomicU64,
    posted: AtomicU64,
    completed: AtomicU64,
    /// The value of `taken` to be reported to the peer; 0 if none is pending.
    to_report: AtomicU64,
    /// Serialises reports: an older value must not be written after a newer one.
    reporting: Mutex<()>,
    fin_landed: AtomicBool,
    waiters: [AtomicU32; 2],
    /// Per direction: whether the last wait was shorter than `LONG_SPIN`.
    was_short_wait: [AtomicBool; 2],
    lock: Mutex<()>,
    woken: Condvar,
    signal: OnceLock<EventFd>,
    armed: AtomicU8,
    /// The service thread polls it.
    pub(super) is_watched: AtomicBool,
    number: u64,
}

impl Connection {
    pub(super) fn new(
        resources: LocalResources,
        peer: Hello,
        tcp: TcpStream,
        net: Arc<Inner>,
    ) -> io::Result<Self> {
        let addresses = (tcp.local_addr()?, tcp.peer_addr()?);
        let number = net.number();
        Ok(Self {
            incoming: Mutex::new(ReceiveFlow::from_window(resources.ring, peer.window)),
            outgoing: Mutex::new(SendFlow::new(peer.ring_size)),
            resources,
            peer,
            tcp,
            addresses,
            net,
            flags: AtomicU32::new(0),
            why: OnceLock::new(),
            consumed: AtomicU64::new(0),
            sent: AtomicU64::new(0),
            landed: AtomicU64::new(0),
            posted: AtomicU64::new(0),
            completed: AtomicU64::new(0),
            to_report: AtomicU64::new(0),
            reporting: Mutex::new(()),
            fin_landed: AtomicBool::new(false),
            waiters: [AtomicU32::new(0), AtomicU32::new(0)],
            was_short_wait: [AtomicBool::new(false), AtomicBool::new(false)],
            lock: Mutex::new(()),
            woken: Condvar::new(),
            signal: OnceLock::new(),
            armed: AtomicU8::new(0),
            is_watched: AtomicBool::new(false),
            number,
        })
    }

    /// The epoll data of its events.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// The path of its data, and why it is not a better one.
    pub(super) fn path(&self) -> Result<crate::link::LinkPath> {
        self.resources.qp.path()
    }

    /// A counter word, as the peer wrote it.
    #[inline]
    fn word(&self, at: u64) -> u64 {
        // The words are inside the memory and aligned.
        self.resources.memory.bytes().load_u64(at).map_or(0, u64::from_le)
    }

    fn has(&self, flags: u32) -> bool {
        self.flags.load(Ordering::Acquire) & flags != 0
    }

    /// Reads available bytes; `None` if there are none.
    pub(super) fn try_read(&self, into: &mut [u8]) -> io::Result<Option<usize>> {
        let mut incoming = self.incoming.lock();
        let flags = self.flags.load(Ordering::Acquire);
        if into.is_empty() || flags & flag::READ_CLOSED != 0 {
            return Ok(Some(0));
        }
        if let Err(violation) = incoming.update(self.word(RECEIVED)) {
            return Err(self.reset(violation));
        }
        let mut count = 0;
        while count < into.len() && incoming.waiting() > 0 {
            let (offset, piece) = incoming.piece();
            let piece = (piece as usize).min(into.len() - count);
            let read = self.resources.memory.bytes();
            read.read_cached(RING + offset, &mut into[count..count + piece]).map_err(io_error)?;
            count += piece;
            if let Some(taken) = incoming.consume(piece as u64) {
                self.to_report.store(taken, Ordering::Relaxed);
            }
        }
        if count > 0 {
            let consumed = self.consumed.load(Ordering::Relaxed) + count as u64;
            self.consumed.store(consumed, Ordering::Release);
            self.report();
            return Ok(Some(count));
        }
        match incoming.is_at_end() {
            true => Ok(Some(0)),
            false if flags & (flag::HUNG_UP | flag::FAILED) != 0 => Err(self.lost("read")),
            false => Ok(None),
        }
    }

    /// Reports the consumed count to the peer, if a report is pending and a post slot is free.
    fn report(&self) {
        if self.to_report.load(Ordering::Relaxed) == 0 {
            return;
        }
        let _turn = self.reporting.lock();
        let taken = self.to_report.load(Ordering::Relaxed);
        if taken == 0 || self.has(flag::FAILED | flag::HUNG_UP) || !self.has_post_slot(2) {
            return;
        }
        let word = taken.to_le_bytes();
        let request =
            SendRequest::new(REPORT_ID, WrOp::Write(self.peer.taken.at_offset(0))).inline(&word);
        if self.post(&[request]).is_ok() {
            // A newer value stays pending.
            let (order, fail) = (Ordering::Relaxed, Ordering::Relaxed);
            let _ = self.to_report.compare_exchange(taken, 0, order, fail);
        }
    }

    /// Sends as many bytes as fit; `None` if none do.
    pub(super) fn try_write(&self, from: &[u8]) -> io::Result<Option<usize>> {
        let mut outgoing = self.outgoing.lock();
        if outgoing.has_ended() {
            return Err(write_closed());
        }
        if self.has(flag::HUNG_UP | flag::FAILED) {
            return Err(self.lost("write"));
        }
        if from.is_empty() {
            return Ok(Some(0));
        }
        if let Err(violation) = outgoing.update(self.word(TAKEN)) {
            return Err(self.reset(violation));
        }
        if outgoing.is_read_closed() {
            return Err(peer_read_closed(self.addresses.1));
        }
        let staged = outgoing.sent() - self.landed.load(Ordering::Acquire);
        if self.in_flight() >= MAX_POSTS / 4 || staged * 2 > self.resources.stage {
            self.drain();
        }
        let free = self.resources.stage - (outgoing.sent() - self.landed.load(Ordering::Acquire));
        let count = outgoing.room().min(free).min(from.len() as u64);
        if count == 0 || !self.has_post_slot(3) {
            return Ok(None);
        }
        self.send(&mut outgoing, &from[..count as usize])?;
        Ok(Some(count as usize))
    }

    /// Stages bytes, which fit, and posts them with the new count.
    fn send(&self, outgoing: &mut SendFlow, bytes: &[u8]) -> io::Result<()> {
        let mut spans = [Sge { address: 0, len: 0, lkey: 0 }; ENTRIES as usize - 1];
        let mut targets = [self.peer.ring.at_offset(0); ENTRIES as usize - 1];
        let (mut done, mut count) = (0, 0);
        while done < bytes.len() && count < spans.len() {
            let at = outgoing.sent() & (self.resources.stage - 1);
            let (offset, fits) = outgoing.piece();
            let piece = fits.min(self.resources.stage - at).min((bytes.len() - done) as u64);
            let base = RING + self.resources.ring;
            let stage = self.resources.memory.bytes();
            let slice = &bytes[done..done + piece as usize];
            stage.write_cached(base + at, slice).map_err(io_error)?;
            spans[count] = self.resources.local_mr.sge(at, piece as u32);
            targets[count] = self.peer.ring.at_offset(offset);
            outgoing.wrote(piece);
            done += piece as usize;
            count += 1;
        }
        let word = outgoing.word().to_le_bytes();
        let last = SendRequest::new(outgoing.sent(), WrOp::Write(self.peer.received.at_offset(0)));
        let mut requests = [last.inline(&word); ENTRIES as usize];
        for at in 0..count {
            let span = std::slice::from_ref(&spans[at]);
            requests[at] = SendRequest::new(0, WrOp::Write(targets[at])).with(span).unsignaled();
        }
        self.sent.store(outgoing.sent(), Ordering::Release);
        self.post(&requests[..=count]).map_err(|error| self.reset(error))
    }

    /// Shuts down the sending direction.
    pub(super) fn close_write(&self) {
        let mut outgoing = self.outgoing.lock();
        if outgoing.has_ended() {
            return;
        }
        outgoing.close();
        if self.has(flag::HUNG_UP | flag::FAILED) {
            return;
        }
        if !self.has_post_slot(1) {
            self.drain();
        }
        let word = outgoing.word().to_le_bytes();
        let request =
            SendRequest::new(FIN_ID, WrOp::Write(self.peer.received.at_offset(0))).inline(&word);
        if let Err(error) = self.post(&[request]) {
            self.reset(error);
        }
    }

    /// Shuts down the receiving direction, and notifies the peer, so that it does not wait for
    /// room.
    pub(super) fn close_read(&self) {
        let incoming = self.incoming.lock();
        self.flags.fetch_or(flag::READ_CLOSED, Ordering::AcqRel);
        let consumed = self.consumed.load(Ordering::Relaxed);
        self.to_report.store(consumed | READ_CLOSED, Ordering::Relaxed);
        drop(incoming);
        self.report();
        if self.to_report.load(Ordering::Relaxed) != 0 {
            self.net.watch(self);
        }
        self.wake();
    }

    fn post(&self, requests: &[SendRequest<'_>]) -> Result<()> {
        self.posted.fetch_add(1, Ordering::AcqRel);
        self.resources.qp.post_send(requests).inspect_err(|_| {
            self.posted.fetch_sub(1, Ordering::AcqRel);
        })?;
        Ok(())
    }

    fn in_flight(&self) -> u64 {
        let completed = self.completed.load(Ordering::Acquire);
        self.posted.load(Ordering::Acquire).saturating_sub(completed)
    }

    /// Whether a post is possible that leaves `kept - 1` slots to others, see rule 3.
    fn has_post_slot(&self, kept: u64) -> bool {
        // Counted twice: two threads may check at the same time, and both post.
        if self.in_flight() + 2 * kept > MAX_POSTS {
            self.drain();
        }
        self.in_flight() + 2 * kept <= MAX_POSTS
    }

    /// Polls the completion queue, which also advances a software HCA.
    pub(super) fn drain(&self) {
        let mut some = [Completion::EMPTY; 16];
        loop {
            let count = match self.resources.cq.poll(&mut some) {
                Ok(count) => count,
                Err(error) => return drop(self.reset(error)),
            };
            for completion in &some[..count] {
                self.completed.fetch_add(1, Ordering::AcqRel);
                match completion.id {
                    _ if !completion.is_success() => self.work_failed(completion),
                    REPORT_ID => {}
                    FIN_ID => self.fin_landed.store(true, Ordering::Release),
                    sent => drop(self.landed.fetch_max(sent, Ordering::AcqRel)),
                }
            }
            if count < some.len() {
                return;
            }
        }
    }

    #[cold]
    fn work_failed(&self, completion: &Completion) {
        // After the peer's FIN this only means that the peer is gone.
        let why = format!("an RDMA write failed: {}", completion.status);
        let error = Error::new(Kind::PeerLost, "reach the peer").why(why);
        self.fail(error.fix("check that the peer is running and reachable"));
    }

    fn fail(&self, error: Error) {
        let _ = self.why.set(error);
        self.flags.fetch_or(flag::FAILED, Ordering::AcqRel);
        self.wake();
    }

    /// Resets the connection: the peer sees its TCP connection reset.
    #[cold]
    pub(super) fn reset(&self, error: Error) -> io::Error {
        tracing::debug!(peer = %self.addresses.1, %error, "a connection is reset");
        self.fail(error);
        // If it cannot be set, the peer sees TCP end without FIN, which means the same.
        let _ = rustix::net::sockopt::set_socket_linger(&self.tcp, Some(Duration::ZERO));
        let _ = self.tcp.shutdown(std::net::Shutdown::Both);
        self.lost("use a connection")
    }

    /// The TCP connection has ended, or the peer has sent data on it.
    pub(super) fn hung_up(&self, got_data: bool) {
        if got_data {
            let error = Error::new(Kind::Malformed, "use a connection");
            drop(self.reset(error.why("the peer sent data on the TCP connection")));
        }
        self.flags.fetch_or(flag::HUNG_UP, Ordering::AcqRel);
        self.wake();
    }

    /// The error of a call on a lost connection.
    #[cold]
    fn lost(&self, what: &'static str) -> io::Error {
        let has_ended = self.word(RECEIVED) & FIN != 0;
        let (kind, why) = match self.why.get() {
            Some(error) if !has_ended || *error.kind() != Kind::PeerLost => {
                (io::ErrorKind::ConnectionReset, error.reason().to_owned())
            }
            _ if has_ended => {
                (io::ErrorKind::BrokenPipe, "the peer has closed the connection".to_owned())
            }
            _ => {
                let why = "the peer died or reset the connection: TCP ended before the stream";
                (io::ErrorKind::ConnectionReset, why.to_owned())
            }
        };
        let error = Error::new(Kind::PeerLost, what).on(self.addresses.1.to_string()).why(why);
        io::Error::new(kind, error.fix("reconnect"))
    }

    /// Whether a call would not block. Without locks: false positives are possible, false negatives
    /// are not.
    fn is_ready(&self, what: Interest) -> bool {
        if self.has(flag::HUNG_UP | flag::FAILED) {
            return true;
        }
        match what {
            Interest::Reading if self.has(flag::READ_CLOSED) => true,
            Interest::Reading => {
                let word = self.word(RECEIVED);
                word & FIN != 0 || word != self.consumed.load(Ordering::Acquire)
            }
            Interest::Writing => {
                let (sent, taken) = (self.sent.load(Ordering::Acquire), self.word(TAKEN));
                if taken & READ_CLOSED != 0 {
                    return true;
                }
                let remote_room = sent.wrapping_sub(taken) < self.peer.ring_size;
                let local_room = sent - self.landed.load(Ordering::Acquire) < self.resources.stage;
                remote_room && local_room && self.in_flight() + 6 <= MAX_POSTS
            }
        }
    }

    /// Waits until a call may proceed or the time is over; returns whether it may.
    pub(super) fn wait(&self, what: Interest, until: Option<Instant>) -> bool {
        let begun = Instant::now();
        let was_short_wait = &self.was_short_wait[what as usize];
        let spin = if was_short_wait.load(Ordering::Relaxed) { LONG_SPIN } else { SPIN };
        while begun.elapsed() < spin {
            self.drain();
            if self.is_ready(what) {
                return true;
            }
            std::hint::spin_loop();
        }
        let ready = self.sleep(what, until);
        was_short_wait.store(begun.elapsed() < LONG_SPIN, Ordering::Relaxed);
        ready
    }

    /// Sleeps; the service thread polls in the meantime.
    fn sleep(&self, what: Interest, until: Option<Instant>) -> bool {
        let waiters = &self.waiters[what as usize];
        waiters.fetch_add(1, Ordering::SeqCst);
        let mut guard = self.lock.lock();
        let mut ready = self.is_ready(what);
        while !ready {
            self.net.watch(self);
            let over = match until {
                None => {
                    self.woken.wait(&mut guard);
                    false
                }
                Some(until) => self.woken.wait_until(&mut guard, until).timed_out(),
            };
            ready = self.is_ready(what);
            if over {
                break;
            }
        }
        drop(guard);
        waiters.fetch_sub(1, Ordering::SeqCst);
        ready
    }

    /// Wakes all waiting callers.
    pub(super) fn wake(&self) {
        drop(self.lock.lock());
        self.woken.notify_all();
        if let Some(signal) = self.signal.get() {
            signal.raise();
        }
    }

    /// A call would have blocked: signal the descriptor once it would not.
    pub(super) fn arm(&self, what: Interest) {
        // Cleared first, so that a signal raised from here on is not lost.
        if let Some(signal) = self.signal.get() {
            signal.take();
        }
        let rearmed = |before: u8| Some((before | what.bit()) & !NOTIFIED);
        let _ = self.armed.fetch_update(Ordering::SeqCst, Ordering::SeqCst, rearmed);
        if !self.notify_if_ready() {
            self.net.watch(self);
        }
    }

    /// Signals the descriptor if a call that it is armed for may proceed, once per arming.
    fn notify_if_ready(&self) -> bool {
        let armed = self.armed.load(Ordering::SeqCst);
        let is_ready = |what: Interest| armed & what.bit() != 0 && self.is_ready(what);
        let Some(signal) = self.signal.get().filter(|_| armed & NOTIFIED == 0) else {
            return false;
        };
        if !Interest::BOTH.into_iter().any(is_ready) {
            return false;
        }
        self.armed.fetch_or(NOTIFIED, Ordering::SeqCst);
        signal.raise();
        true
    }

    /// A call in this direction is made: it is no longer waited for.
    pub(super) fn disarm(&self, what: Interest) {
        if self.armed.load(Ordering::Relaxed) & what.bit() != 0 {
            self.armed.fetch_and(!what.bit(), Ordering::SeqCst);
        }
    }

    /// The readiness descriptor. It starts signaled.
    pub(super) fn signal(&self) -> Result<&EventFd> {
        if self.signal.get().is_none() {
            let signal = EventFd::new()?;
            signal.raise();
            let _ = self.signal.set(signal);
        }
        // Set above, by this thread or by another.
        self.signal.get().ok_or_else(|| Error::new(Kind::Busy, "create a descriptor"))
    }

    /// The service thread polls for sleeping callers: returns whether something happened, and
    /// whether there are still waiters.
    pub(super) fn progress(&self) -> (bool, bool) {
        if self.in_flight() > 0 {
            self.drain();
        }
        self.report();
        let sleeps = |what: Interest| self.waiters[what as usize].load(Ordering::SeqCst) > 0;
        let mut happened = false;
        if Interest::BOTH.into_iter().any(|what| sleeps(what) && self.is_ready(what)) {
            drop(self.lock.lock());
            self.woken.notify_all();
            happened = true;
        }
        happened |= self.notify_if_ready();
        (happened, self.has_waiters())
    }

    /// Whether the service thread must keep polling this connection.
    pub(super) fn has_waiters(&self) -> bool {
        let sleeps = self.waiters.iter().any(|count| count.load(Ordering::SeqCst) > 0);
        // Polled until it is signaled: a change after one poll is found by the next.
        let armed = self.armed.load(Ordering::SeqCst);
        let armed = self.signal.get().is_some() && armed != 0 && armed & NOTIFIED == 0;
        let owes = self.to_report.load(Ordering::Relaxed) != 0;
        sleeps || armed || owes && !self.has(flag::FAILED | flag::HUNG_UP)
    }

    /// The last handle was dropped: nothing waits any more.
    pub(super) fn abandon(&self) {
        self.armed.store(0, Ordering::SeqCst);
        self.to_report.store(0, Ordering::Relaxed);
    }

    /// Closes the TCP connection.
    pub(super) fn hang_up(&self) {
        let _ = self.tcp.shutdown(std::net::Shutdown::Both);
    }

    /// Whether a dropped connection has nothing left to send.
    pub(super) fn is_finished(&self) -> bool {
        self.drain();
        self.fin_landed.load(Ordering::Acquire) || self.has(flag::FAILED | flag::HUNG_UP)
    }
}

impl std::fmt::Debug for Connection {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} to {}", self.addresses.0, self.addresses.1)
    }
}

#[cold]
fn peer_read_closed(peer: SocketAddr) -> io::Error {
    let error = Error::new(Kind::PeerLost, "write").on(peer.to_string());
    let error = error.why("the peer shut down its receiving direction");
    io::Error::new(io::ErrorKind::BrokenPipe, error.fix("read the remaining data, then close"))
}

#[cold]
fn write_closed() -> io::Error {
    let error = Error::new(Kind::Freed, "write").why("the sending direction was shut down");
    io::Error::new(io::ErrorKind::BrokenPipe, error.fix("write before the shutdown"))
}

/// Converts an error to one of the standard library, with the closest kind.
#[cold]
pub(super) fn io_error(error: Error) -> io::Error {
    let kind = match error.kind() {
        Kind::Os(errno) => io::Error::from_raw_os_error(*errno).kind(),
        Kind::InvalidArgument | Kind::OutOfRange | Kind::Misaligned => io::ErrorKind::InvalidInput,
        Kind::Malformed => io::ErrorKind::InvalidData,
        Kind::OutOfMemory => io::ErrorKind::OutOfMemory,
        Kind::Timeout => io::ErrorKind::TimedOut,
        Kind::Unsupported => io::ErrorKind::Unsupported,
        Kind::PermissionDenied => io::ErrorKind::PermissionDenied,
        Kind::PeerLost => io::ErrorKind::ConnectionReset,
        Kind::Freed => io::ErrorKind::NotConnected,
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, error)
}
