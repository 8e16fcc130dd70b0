//! One end of a connection that a CPU program has: its memory, its queue pair, and what waits.
//!
//! What always holds:
//! 1. Each post is signaled once, by its last entry, and has at most [`ENTRIES`] entries; no more than [`MAX_POSTS`] are
//!    under way. So neither queue is ever full.
//! 2. Bytes are staged until their post has completed, which is when they have landed.
//! 3. Places are kept free among the posts: for a report always, and one more for the end of the stream.
//! 4. Flags are read before landing words: what had landed when a flag was raised is seen.

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

/// Where the landing words lie, a line each, and the ring behind them.
const RECEIVED: u64 = 0;
const TAKEN: u64 = 64;
const RING: u64 = 4096;
/// The most entries of a post: a span that goes around both rings, and the word.
const ENTRIES: u32 = 4;
const MAX_POSTS: u64 = 64;
/// What the completion of a report or of an end bears; that of bytes bears how many were ever sent.
const REPORT_ID: u64 = 1 << 62;
const FIN_ID: u64 = 1 << 63;
/// How long a call looks by itself before it sleeps; and how long where the wait before it was over by then, as in a stream that
/// flows: being woken takes as long.
const SPIN: Duration = Duration::from_micros(50);
const LONG_SPIN: Duration = Duration::from_micros(400);

/// What a call waits for.
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

/// Beside the bits of what a descriptor is armed for: it was raised for it.
const NOTIFIED: u8 = 1 << 7;

/// What has befallen a connection.
mod flag {
    /// Its TCP connection has ended.
    pub(super) const HUNG_UP: u32 = 1;
    /// It was reset: by us, or because work failed.
    pub(super) const FAILED: u32 = 2;
    /// We read no more.
    pub(super) const READ_CLOSED: u32 = 4;
}

/// What an end needs before it knows its peer.
pub(super) struct LocalResources {
    qp: Qp,
    cq: Cq,
    /// The words and the ring, which the peer writes; the staged bytes, which only we do.
    remote_mr: Mr,
    local_mr: Mr,
    memory: HostMemory,
    ring: u64,
    stage: u64,
}

impl LocalResources {
    pub(super) fn new(context: &Context, options: &NetOptions) -> Result<Self> {
        let pd = context.pd();
        // When a queue pair fails, each of its entries ends, signaled or not.
        let cq = context.create_cq(MAX_POSTS as u32 * ENTRIES)?;
        let queue = QpOptions {
            send_depth: MAX_POSTS as u32 * ENTRIES,
            receive_depth: 1,
            max_send_sge: 1,
            max_recv_sge: 1,
            inline: 8,
            signal_all: false,
            access: warpwire_proto::qp::Access::REMOTE_WRITE,
            // A busy machine may keep a peer from answering for a while.
            timeout: 16,
            max_rd_atomic: 1,
            ..QpOptions::default()
        };
        let qp = context.create_qp(&pd, &cq, &cq, queue)?;
        let (ring, stage) = (options.ring, options.stage);
        let memory = HostMemory::new(RING + ring + stage)?;
        let slice = |at, len| MemorySource::from(memory.clone()).slice(at, len);
        let remote_access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let remote_mr = context.register(&pd, slice(0, RING + ring)?, remote_access)?;
        let local_mr = context.register(&pd, slice(RING + ring, stage)?, Access::LOCAL_WRITE)?;
        Ok(Self { qp, cq, remote_mr, local_mr, memory, ring, stage })
    }

    /// What the peer is told.
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
            // What has landed is not kept here.
            window: None,
        }
    }

    /// Connects the queue pair: the peer may write from now on.
    pub(super) fn establish(&self, peer: &Hello) -> Result<()> {
        self.qp.connect(&peer.endpoint)
    }
}

/// An end that is connected.
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
    /// For those who look without the locks: bytes read, sent, and landed at the peer.
    consumed: AtomicU64,
    sent: AtomicU64,
    landed: AtomicU64,
    posted: AtomicU64,
    completed: AtomicU64,
    /// A report that found no place; 0 is none.
    to_report: AtomicU64,
    /// Who reports: the word of an older report must not land after that of a newer.
    reporting: Mutex<()>,
    fin_landed: AtomicBool,
    waiters: [AtomicU32; 2],
    /// Whether the last wait, of either sort, was a short one.
    was_short_wait: [AtomicBool; 2],
    lock: Mutex<()>,
    woken: Condvar,
    signal: OnceLock<EventFd>,
    armed: AtomicU8,
    /// It stands on the list of those that are watched.
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

    /// What its events are known by.
    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Which way its bytes take, and why.
    pub(super) fn path(&self) -> Result<crate::link::LinkPath> {
        self.resources.qp.path()
    }

    /// A landing word, as the peer wrote it.
    #[inline]
    fn word(&self, at: u64) -> u64 {
        // The words lie inside, and are aligned.
        self.resources.memory.bytes().load_u64(at).map_or(0, u64::from_le)
    }

    fn has(&self, flags: u32) -> bool {
        self.flags.load(Ordering::Acquire) & flags != 0
    }

    /// Reads what has come; `None` if that is nothing yet.
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

    /// Tells the peer how much was read, if there is a report to make and a place for it.
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
            // A newer one may have come meanwhile; it stays.
            let (order, fail) = (Ordering::Relaxed, Ordering::Relaxed);
            let _ = self.to_report.compare_exchange(taken, 0, order, fail);
        }
    }

    /// Sends what there is room for; `None` if that is nothing now.
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

    /// Stages bytes, for which there is room, and posts them with the new count.
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

    /// Ends the sending direction.
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

    /// Ends the receiving direction: nobody reads here any more, and the peer need not wait for that.
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
        })
    }

    fn in_flight(&self) -> u64 {
        let completed = self.completed.load(Ordering::Acquire);
        self.posted.load(Ordering::Acquire).saturating_sub(completed)
    }

    /// Whether one more post leaves so many places among all, less one: see rule 3.
    fn has_post_slot(&self, kept: u64) -> bool {
        // Two threads may look at the same time, and both post.
        if self.in_flight() + 2 * kept > MAX_POSTS {
            self.drain();
        }
        self.in_flight() + 2 * kept <= MAX_POSTS
    }

    /// Takes completions, and has the device make a step.
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
        // After the peer's end that only means that it is gone.
        let why = format!("the work that carries bytes ended with {}", completion.status);
        let error = Error::new(Kind::PeerLost, "reach the peer").why(why);
        self.fail(error.fix("look at what became of the peer, and of the way to it"));
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
        // Where it cannot be set the peer sees it end without the end of the stream, which means the same.
        let _ = rustix::net::sockopt::set_socket_linger(&self.tcp, Some(Duration::ZERO));
        let _ = self.tcp.shutdown(std::net::Shutdown::Both);
        self.lost("use a connection")
    }

    /// The TCP connection has ended, or the peer spoke where nothing is to be said.
    pub(super) fn hung_up(&self, got_data: bool) {
        if got_data {
            let error = Error::new(Kind::Malformed, "use a connection");
            drop(self.reset(error.why("the peer spoke on the TCP connection")));
        }
        self.flags.fetch_or(flag::HUNG_UP, Ordering::AcqRel);
        self.wake();
    }

    /// Why a call on a lost connection fails.
    #[cold]
    fn lost(&self, what: &'static str) -> io::Error {
        let has_ended = self.word(RECEIVED) & FIN != 0;
        let (kind, why) = match self.why.get() {
            Some(error) if !has_ended || *error.kind() != Kind::PeerLost => {
                (io::ErrorKind::ConnectionReset, error.reason().to_owned())
            }
            _ if has_ended => (io::ErrorKind::BrokenPipe, "the peer has closed it".to_owned()),
            _ => {
                let why = "the peer died, or reset it: the TCP connection ended before the stream";
                (io::ErrorKind::ConnectionReset, why.to_owned())
            }
        };
        let error = Error::new(Kind::PeerLost, what).on(self.addresses.1.to_string()).why(why);
        io::Error::new(kind, error.fix("connect anew"))
    }

    /// Whether a call would not wait. Without locks: it may say yes too often, never too seldom.
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

    /// Waits until a call may go on, or the time is over; tells whether it may.
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

    /// The rest of waiting: somebody else looks meanwhile.
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

    /// Wakes everybody who waits.
    pub(super) fn wake(&self) {
        drop(self.lock.lock());
        self.woken.notify_all();
        if let Some(signal) = self.signal.get() {
            signal.raise();
        }
    }

    /// A call would have waited: the descriptor is raised when it would not.
    pub(super) fn arm(&self, what: Interest) {
        // First, so that whoever raises it from now on is seen.
        if let Some(signal) = self.signal.get() {
            signal.take();
        }
        let rearmed = |before: u8| Some((before | what.bit()) & !NOTIFIED);
        let _ = self.armed.fetch_update(Ordering::SeqCst, Ordering::SeqCst, rearmed);
        if !self.notify_if_ready() {
            self.net.watch(self);
        }
    }

    /// Raises the descriptor if a call that it is armed for may go on, once for each time it was armed.
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

    /// A call of that sort is made: nobody waits for it any more.
    pub(super) fn disarm(&self, what: Interest) {
        if self.armed.load(Ordering::Relaxed) & what.bit() != 0 {
            self.armed.fetch_and(!what.bit(), Ordering::SeqCst);
        }
    }

    /// The descriptor of readiness. It begins raised.
    pub(super) fn signal(&self) -> Result<&EventFd> {
        if self.signal.get().is_none() {
            let signal = EventFd::new()?;
            signal.raise();
            let _ = self.signal.set(signal);
        }
        // It was set just now, by this thread or by another.
        self.signal.get().ok_or_else(|| Error::new(Kind::Busy, "make a descriptor"))
    }

    /// Looks on behalf of those who sleep: tells whether something happened, and whether somebody still waits.
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

    /// Whether somebody waits for it, who must be told.
    pub(super) fn has_waiters(&self) -> bool {
        let sleeps = self.waiters.iter().any(|count| count.load(Ordering::SeqCst) > 0);
        // It is looked at until it is told: what became true after a look is found by the next.
        let armed = self.armed.load(Ordering::SeqCst);
        let armed = self.signal.get().is_some() && armed != 0 && armed & NOTIFIED == 0;
        let owes = self.to_report.load(Ordering::Relaxed) != 0;
        sleeps || armed || owes && !self.has(flag::FAILED | flag::HUNG_UP)
    }

    /// Nobody has it any more: nobody waits.
    pub(super) fn abandon(&self) {
        self.armed.store(0, Ordering::SeqCst);
        self.to_report.store(0, Ordering::Relaxed);
    }

    /// Ends the TCP connection.
    pub(super) fn hang_up(&self) {
        let _ = self.tcp.shutdown(std::net::Shutdown::Both);
    }

    /// Whether nothing is left to do for a connection that nobody has any more.
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
    let error = error.why("the peer has shut down its receiving direction");
    io::Error::new(io::ErrorKind::BrokenPipe, error.fix("read what it still sends, and close"))
}

#[cold]
fn write_closed() -> io::Error {
    let error = Error::new(Kind::Freed, "write").why("the sending direction was shut down");
    io::Error::new(io::ErrorKind::BrokenPipe, error.fix("write before the shutdown"))
}

/// An error of the house as one of the standard library.
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
