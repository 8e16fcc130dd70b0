//! A listener that reads first messages of several connections at a time, so that a connection
//! that sends nothing, or only a part of a message, delays no other.

use std::collections::VecDeque;
use std::net::{SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};

use super::pingpong::{HANDSHAKE_LEN, parse_handshake};
use super::{Bootstrap, poll_for};
use crate::error::{Error, Kind, Result};

/// Maximum number of connections without a complete first message; one more evicts the oldest.
const MAX_PENDING: usize = 256;
/// A connection younger than this is not evicted: new ones wait in the kernel's queue.
const MIN_PENDING_TIME: Duration = Duration::from_millis(200);
/// How long a connection may take for its first message.
const FIRST_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum length of a first message, in bytes.
const MAX_FIRST_LEN: usize = 16 << 10;
/// Pause after a connection could not be accepted.
const RETRY_INTERVAL: Duration = Duration::from_millis(10);
/// Longest sleep: evictions and deadlines of connections are checked this often.
const MAX_WAIT: Duration = Duration::from_millis(50);

/// What a first message is.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Framing {
    Line,
    Handshake,
}

impl Framing {
    fn is_complete(self, bytes: &[u8]) -> bool {
        match self {
            Self::Line => bytes.contains(&b'\n'),
            Self::Handshake => bytes.len() >= HANDSHAKE_LEN,
        }
    }
}

/// Accepts [`Bootstrap`] connections and returns them when their first message is complete.
///
/// At most 256 connections are pending, with 16 KiB each; a connection that takes longer than 5 s
/// for its first message is dropped, as is the oldest of too many.
///
/// ```
/// use std::net::{TcpListener, TcpStream};
/// use std::time::Duration;
/// use warpwire::verbs::bootstrap::{Bootstrap, BootstrapListener};
/// let second = Duration::from_secs(1);
/// let listener = TcpListener::bind("127.0.0.1:0").unwrap();
/// let address = listener.local_addr().unwrap();
/// let mut listener = BootstrapListener::new(listener)?;
/// let silent = TcpStream::connect(address).unwrap();
/// let mut client = Bootstrap::connect(address, second)?;
/// client.send(&"ping")?;
/// let (_server, word) = listener.accept(second, |peer| peer.recv::<String>())?;
/// assert_eq!(word, "ping");
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Debug)]
pub struct BootstrapListener {
    listener: TcpListener,
    /// Oldest first.
    pending: VecDeque<(Bootstrap, Instant)>,
}

impl BootstrapListener {
    /// Sets the listener to non-blocking mode.
    pub fn new(listener: TcpListener) -> Result<Self> {
        let set = listener.set_nonblocking(true);
        set.map_err(|why| Error::os("listen for peers", &why))?;
        Ok(Self { listener, pending: VecDeque::new() })
    }

    /// The address that the listener is bound to.
    pub fn local_addr(&self) -> Result<SocketAddr> {
        self.listener.local_addr().map_err(|why| Error::os("query the local address", &why))
    }

    /// Waits for a connection whose first message `receive` accepts: it is called once a line is
    /// complete, so that [`Bootstrap::recv`] does not block. Other connections are dropped with a
    /// warning. `timeout` limits the whole wait and, afterwards, each message.
    ///
    /// # Errors
    /// [`Kind::Timeout`] if no such connection is made in time.
    pub fn accept<T>(
        &mut self,
        timeout: Duration,
        mut receive: impl FnMut(&mut Bootstrap) -> Result<T>,
    ) -> Result<(Bootstrap, T)> {
        let deadline = Instant::now() + timeout;
        loop {
            let mut bootstrap = self.next_until(Framing::Line, deadline, timeout)?;
            bootstrap.set_timeout(timeout);
            match receive(&mut bootstrap) {
                Ok(value) => return Ok((bootstrap, value)),
                Err(error) => reject(&bootstrap, &error),
            }
        }
    }

    /// As [`accept`](Self::accept), for a peer that sends a
    /// [`PingpongHandshake`](super::PingpongHandshake): waits until a valid one is there, for
    /// [`Bootstrap::handshake_as_server`].
    ///
    /// # Errors
    /// As for [`accept`](Self::accept).
    pub fn accept_handshake(&mut self, timeout: Duration) -> Result<Bootstrap> {
        let deadline = Instant::now() + timeout;
        loop {
            let mut bootstrap = self.next_until(Framing::Handshake, deadline, timeout)?;
            bootstrap.set_timeout(timeout);
            match parse_handshake(&bootstrap.buffered[..HANDSHAKE_LEN]) {
                Ok(_) => return Ok(bootstrap),
                Err(error) => reject(&bootstrap, &error),
            }
        }
    }

    fn next_until(
        &mut self,
        framing: Framing,
        deadline: Instant,
        timeout: Duration,
    ) -> Result<Bootstrap> {
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            if let Some(bootstrap) = self.poll_next(framing, left.min(MAX_WAIT))? {
                return Ok(bootstrap);
            }
            if left.is_zero() {
                return Err(nobody(timeout));
            }
        }
    }

    /// Waits up to `timeout`, 50 ms at most, for a connection whose first line is complete; `None`
    /// if there is none. [`Bootstrap::recv`] returns the line without blocking.
    ///
    /// # Errors
    /// If the operating system cannot wait.
    pub fn next(&mut self, timeout: Duration) -> Result<Option<Bootstrap>> {
        self.poll_next(Framing::Line, timeout.min(MAX_WAIT))
    }

    /// Whether there are connections without a complete message, which are dropped after a while.
    pub(crate) fn has_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// What to wait for before [`next`](Self::next) is called again, for a thread that waits for
    /// other things as well: the listener, and the connections without a complete message.
    pub(crate) fn descriptors(&self) -> Vec<BorrowedFd<'_>> {
        let pending = self.pending.iter().map(|(bootstrap, _)| bootstrap.stream().as_fd());
        pending.chain([self.listener.as_fd()]).collect()
    }

    fn poll_next(&mut self, framing: Framing, timeout: Duration) -> Result<Option<Bootstrap>> {
        if let Some(complete) = self.take_complete(framing) {
            return Ok(Some(complete));
        }
        let now = Instant::now();
        self.pending.retain(|(_, since)| now.saturating_duration_since(*since) < FIRST_TIMEOUT);
        let may_accept = self.slot_for_next(framing, now).is_some();
        let is_ready = |fd: &PollFd<'_>| !fd.revents().is_empty();
        let ready: Vec<bool> = {
            let fds = self
                .pending
                .iter()
                .map(|(bootstrap, _)| PollFd::new(bootstrap.stream(), PollFlags::IN));
            // If none can be accepted, a waiting connection must not end the wait.
            let listener = may_accept.then(|| PollFd::new(&self.listener, PollFlags::IN));
            let mut fds: Vec<_> = fds.chain(listener).collect();
            poll_for(&mut fds, timeout)?;
            fds.iter().map(is_ready).collect()
        };
        let mut ready = ready.into_iter();
        self.pending.retain_mut(|(bootstrap, _)| {
            !ready.next().unwrap_or(false) || read_first(bootstrap, framing)
        });
        while let Some(evicted) = self.slot_for_next(framing, now) {
            let stream = match self.listener.accept() {
                Ok((stream, _)) => stream,
                Err(why) if why.kind() == std::io::ErrorKind::WouldBlock => break,
                Err(why) => {
                    // Too many open files, for example: it may pass, and must not become a spin.
                    tracing::warn!(%why, "cannot accept a connection; retrying");
                    std::thread::sleep(RETRY_INTERVAL);
                    break;
                }
            };
            self.pending.remove(evicted);
            let Ok(mut bootstrap) = Bootstrap::from_stream(stream, FIRST_TIMEOUT) else { continue };
            if read_first(&mut bootstrap, framing) {
                self.pending.push_back((bootstrap, Instant::now()));
            }
        }
        Ok(self.take_complete(framing))
    }

    fn take_complete(&mut self, framing: Framing) -> Option<Bootstrap> {
        let at = self
            .pending
            .iter()
            .position(|(bootstrap, _)| framing.is_complete(&bootstrap.buffered))?;
        self.pending.remove(at).map(|(bootstrap, _)| bootstrap)
    }

    /// Where another connection would be accepted: at the end, or in place of the oldest one whose
    /// message is incomplete; `None` if that is too young to be evicted.
    fn slot_for_next(&self, framing: Framing, now: Instant) -> Option<usize> {
        if self.pending.len() < MAX_PENDING {
            return Some(self.pending.len());
        }
        self.pending.iter().position(|(bootstrap, since)| {
            let is_old = now.saturating_duration_since(*since) > MIN_PENDING_TIME;
            is_old && !framing.is_complete(&bootstrap.buffered)
        })
    }
}

/// Reads what is there of a first message; false if the connection is to be dropped.
fn read_first(bootstrap: &mut Bootstrap, framing: Framing) -> bool {
    while !framing.is_complete(&bootstrap.buffered) {
        if bootstrap.buffered.len() >= MAX_FIRST_LEN {
            let error = Error::new(Kind::Malformed, bootstrap.what());
            reject(bootstrap, &error.why(format!("it sent {MAX_FIRST_LEN} bytes without a line")));
            return false;
        }
        match bootstrap.fill() {
            Ok(true) => {}
            Ok(false) => return true,
            Err(error) => {
                tracing::debug!(peer = %bootstrap.peer(), %error, "a connection has ended");
                return false;
            }
        }
    }
    true
}

fn reject(bootstrap: &Bootstrap, error: &Error) {
    tracing::warn!(peer = %bootstrap.peer(), why = error.reason(), "rejected a connection");
}

/// The error if no peer connects in time.
#[cold]
pub(super) fn nobody(timeout: Duration) -> Error {
    let why = format!("no peer connected within {} s", timeout.as_secs_f64());
    Error::new(Kind::Timeout, "accept a peer").why(why).fix("start the peer with this address")
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpStream;

    use super::*;

    fn listener() -> (BootstrapListener, SocketAddr) {
        let listener = BootstrapListener::new(TcpListener::bind("127.0.0.1:0").unwrap()).unwrap();
        let address = listener.local_addr().unwrap();
        (listener, address)
    }

    fn soon() -> Duration {
        testkit::deadline(Duration::from_secs(10))
    }

    /// Connects and sends a byte every 20 ms until the peer closes.
    fn drip(address: SocketAddr) -> std::thread::JoinHandle<()> {
        std::thread::spawn(move || {
            // The test may be over before this thread runs.
            let Ok(mut stream) = TcpStream::connect(address) else { return };
            while stream.write_all(b" ").is_ok() {
                std::thread::sleep(Duration::from_millis(20));
            }
        })
    }

    #[test]
    fn a_timeout_covers_a_whole_message() {
        let (listener, address) = listener();
        let dripping = drip(address);
        let start = Instant::now();
        let mut bootstrap = Bootstrap::accept(&listener.listener, soon()).unwrap();
        bootstrap.set_timeout(Duration::from_millis(300));
        let error = bootstrap.recv::<String>().unwrap_err();
        assert_eq!(error.kind(), &Kind::Timeout, "{error}");
        assert_eq!(bootstrap.try_recv::<String>().unwrap(), None);
        let error = bootstrap.swap(&"word".to_owned()).unwrap_err();
        assert_eq!(error.kind(), &Kind::Timeout, "{error}");
        assert!(start.elapsed() < soon(), "{:?}", start.elapsed());
        drop((bootstrap, listener));
        dripping.join().unwrap();
    }

    #[test]
    fn a_peer_is_served_while_strangers_dawdle() {
        let (mut listener, address) = listener();
        let dripping: Vec<_> = (0..3).map(|_| drip(address)).collect();
        // More than there are slots, and garbage of every kind; then the peer.
        let connecting = std::thread::spawn(move || {
            let silent: Vec<_> = (0..MAX_PENDING).map(|_| TcpStream::connect(address)).collect();
            for bytes in [&b"GET / HTTP/1.1\r\n\r\n"[..], &[0xff; 2 * MAX_FIRST_LEN], b""] {
                let _ = TcpStream::connect(address).unwrap().write_all(bytes);
            }
            let mut peer = Bootstrap::connect(address, soon()).unwrap();
            peer.send(&"hello").unwrap();
            let answer = peer.recv::<String>().unwrap();
            drop(silent);
            answer
        });
        let (mut peer, word) = listener.accept(soon(), |peer| peer.recv::<String>()).unwrap();
        assert_eq!(word, "hello");
        assert!(listener.pending.len() <= MAX_PENDING);
        peer.send(&"and back").unwrap();
        assert_eq!(connecting.join().unwrap(), "and back");
        drop(listener);
        dripping.into_iter().for_each(|thread| thread.join().unwrap());
    }

    #[test]
    fn without_a_peer_the_wait_ends_in_time() {
        let (mut listener, address) = listener();
        let dripping = drip(address);
        let start = Instant::now();
        let wait = Duration::from_millis(300);
        let error = listener.accept(wait, |peer| peer.recv::<String>()).unwrap_err();
        assert_eq!(error.kind(), &Kind::Timeout, "{error}");
        let error = listener.accept_handshake(wait).unwrap_err();
        assert_eq!(error.kind(), &Kind::Timeout, "{error}");
        assert!(start.elapsed() < soon(), "{:?}", start.elapsed());
        drop(listener);
        dripping.join().unwrap();
    }

    #[test]
    fn a_handshake_is_found_among_others() {
        let (mut listener, address) = listener();
        let text = "0000:000011:f6e120:00000000000000000000ffff7f000001";
        let mut http = TcpStream::connect(address).unwrap();
        http.write_all(&[b'x'; 100]).unwrap();
        let mut peer = TcpStream::connect(address).unwrap();
        peer.write_all(format!("{text}\0done\0").as_bytes()).unwrap();
        let mut bootstrap = listener.accept_handshake(soon()).unwrap();
        let local = text.parse().unwrap();
        let received = bootstrap.handshake_as_server(&local, |_| Ok(())).unwrap();
        assert_eq!(received, local);
    }

    #[test]
    fn every_address_of_a_name_is_tried() {
        let (mut listener, address) = listener();
        // Bound, and nothing listens: connections are refused.
        let closed = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let addresses = [closed, address];
        let mut peer = Bootstrap::connect(&addresses[..], soon()).unwrap();
        peer.send(&1_u8).unwrap();
        assert_eq!(listener.accept(soon(), |peer| peer.recv::<u8>()).unwrap().1, 1);
        let error = Bootstrap::connect(&addresses[..0], soon()).unwrap_err();
        assert!(error.to_string().contains("no address"), "{error}");
    }
}
