//! Datagram sockets of CPU programs.

use std::io;
use std::net::{SocketAddr, ToSocketAddrs, UdpSocket};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use serde::Serialize;

use super::office::Office;
use super::post::{Post, Wait};
use crate::error::{Error, Kind};
use crate::sock::warp::end::{For, io_error};
use crate::sock::warp::net::{Inner, Net};
use crate::sock::warp::service::Command;
use crate::sock::warp::stream::{load, store};

/// How long a socket that is dropped waits until its last datagrams are gone, if it is not non-blocking. The rest goes on behind.
const LINGER: Duration = Duration::from_millis(200);

/// What a datagram socket has counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DatagramStats {
    /// Datagrams that went.
    pub sent: u64,
    /// Datagrams that were received.
    pub received: u64,
    /// Datagrams that were lost here: nobody has the name that they were for, too many waited for it, or, of those that came, too
    /// many waited to be received (hardware does not count these).
    pub dropped: u64,
    /// Questions, answers and datagrams that were none, and datagrams of others than the peer.
    pub strange: u64,
}

/// Datagrams of the family `warp`: as those of [`std::net::UdpSocket`], by RDMA.
///
/// Each arrives whole, with its sender's address, or not at all; up to [`longest`](Self::longest) bytes. Peers are other sockets of
/// this sort, of CPU programs and of kernels. When a name is first sent to, it is asked for; what is sent to it meanwhile waits, 64
/// datagrams at most, and if nobody answers for a second (or the name is nobody's) it is lost, and the next call fails:
/// [`HostUnreachable`](io::ErrorKind::HostUnreachable), [`ConnectionRefused`](io::ErrorKind::ConnectionRefused). Calls to others go on.
///
/// # Readiness
/// As for [`Stream`](super::super::Stream): the descriptor ([`AsFd`]) is to be watched for *reading*, whatever is waited for.
///
/// ```
/// use warpwire::sock::warp::Datagram;
/// let (here, there) = (Datagram::bind("127.0.0.1:0")?, Datagram::bind("127.0.0.1:0")?);
/// here.send_to(b"ping", there.local_addr()?)?;
/// let mut bytes = [0; 16];
/// let (count, from) = there.recv_from(&mut bytes)?;
/// assert_eq!((&bytes[..count], from), (&b"ping"[..], here.local_addr()?));
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct Datagram(Arc<Handle>);

#[derive(Debug)]
struct Handle {
    post: Arc<Post>,
    nonblocking: AtomicBool,
    /// Nanoseconds; 0 is for ever.
    read_timeout: AtomicU64,
    write_timeout: AtomicU64,
}

impl Datagram {
    /// At that address, with what this process shares: [`Net::shared`]. Port 0 stands for any that is free.
    pub fn bind(address: impl ToSocketAddrs) -> io::Result<Self> {
        Net::shared().map_err(io_error)?.datagram(address)
    }

    pub(in crate::sock::warp) fn new(
        net: &Arc<Inner>,
        address: impl ToSocketAddrs,
    ) -> io::Result<Self> {
        let udp = UdpSocket::bind(address)?;
        let local = udp.local_addr()?;
        let office = Office::new(udp, Duration::MAX, &mut &**net)
            .map_err(|errno| failed("bind", errno, local, 0))?;
        let post = Arc::new(Post::new(office, net).map_err(io_error)?);
        net.tell(Command::Post(Arc::downgrade(&post)));
        post.with(|office, _| net.watch_post(office, post.number))?;
        Ok(Self(Arc::new(Handle {
            post,
            nonblocking: AtomicBool::new(false),
            read_timeout: AtomicU64::new(0),
            write_timeout: AtomicU64::new(0),
        })))
    }

    /// Another handle to the same socket, with the same settings.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(self.0.clone()))
    }

    /// Names the peer, for [`send`](Self::send) and [`recv`](Self::recv): datagrams of others are not received any more.
    ///
    /// # Errors
    /// If nothing can be sent to any of the addresses from here. Whether somebody has that name is not asked.
    pub fn connect(&self, address: impl ToSocketAddrs) -> io::Result<()> {
        let mut last = io::Error::from(io::ErrorKind::InvalidInput);
        for to in address.to_socket_addrs()? {
            let connected = self.0.post.with(|office, devices| office.connect(to, devices));
            match connected.map_err(|errno| failed("connect", errno, to, 0)) {
                Ok(()) => return Ok(()),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// Sends a datagram, to the first of the addresses. Waits only while the device is busy with many others.
    ///
    /// # Errors
    /// If it is too long, if nothing can be sent there from here, or if something that was sent before could not be: that
    /// is told once, and this datagram is not sent.
    pub fn send_to(&self, bytes: &[u8], address: impl ToSocketAddrs) -> io::Result<usize> {
        let none = || io::Error::from(io::ErrorKind::InvalidInput);
        let to = address.to_socket_addrs()?.next().ok_or_else(none)?;
        self.send_some(bytes, Some(to))
    }

    /// Sends a datagram to the peer.
    ///
    /// # Errors
    /// As for [`send_to`](Self::send_to); if there is no peer.
    pub fn send(&self, bytes: &[u8]) -> io::Result<usize> {
        self.send_some(bytes, None)
    }

    fn send_some(&self, bytes: &[u8], to: Option<SocketAddr>) -> io::Result<usize> {
        let timeout = load(&self.0.write_timeout);
        let sent =
            self.0.post.until_done(For::Writing, self.wait(timeout), |office, devices| {
                let to_whom = to.or(office.peer()).unwrap_or(office.local());
                let tell = |errno, longest| failed("send a datagram", errno, to_whom, longest);
                if let Some(errno) = office.take_failure() {
                    return Err(tell(errno, 0));
                }
                let sent = office.send(Instant::now(), to, bytes, devices);
                let longest = office.longest();
                sent.map(|sent| sent.then_some(bytes.len())).map_err(|errno| tell(errno, longest))
            })?;
        sent.ok_or_else(|| over("send a datagram", "the device took nothing", timeout))
    }

    /// Receives a datagram, and tells who sent it. What does not fit is lost.
    ///
    /// # Errors
    /// If its time is over; or if something that was sent could not be, which is told once.
    pub fn recv_from(&self, into: &mut [u8]) -> io::Result<(usize, SocketAddr)> {
        let timeout = load(&self.0.read_timeout);
        let received = self.0.post.until_done(For::Reading, self.wait(timeout), |office, _| {
            if let Some(errno) = office.take_failure() {
                let to = office.peer().unwrap_or(office.local());
                return Err(failed("receive a datagram", errno, to, 0));
            }
            let next = office.take_next(into);
            Ok(next.map(|(len, from)| (len.min(into.len()), from)))
        })?;
        received.ok_or_else(|| over("receive a datagram", "none came", timeout))
    }

    /// Receives a datagram, as above.
    pub fn recv(&self, into: &mut [u8]) -> io::Result<usize> {
        self.recv_from(into).map(|(count, _)| count)
    }

    fn wait(&self, timeout: Option<Duration>) -> Wait {
        match timeout {
            _ if self.0.nonblocking.load(Ordering::Relaxed) => Wait::Not,
            Some(time) => Wait::For(time),
            None => Wait::ForEver,
        }
    }

    /// Its name.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.0.post.with(|office, _| office.local()))
    }

    /// The peer's, if one was named.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        let peer = self.0.post.with(|office, _| office.peer());
        peer.ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    /// The longest datagram that can be sent: what a packet carries, 4088 bytes at most. Peers on another device may take less.
    pub fn longest(&self) -> usize {
        self.0.post.with(|office, _| office.longest())
    }

    /// What it has counted.
    pub fn stats(&self) -> DatagramStats {
        let tally = self.0.post.tally();
        DatagramStats {
            sent: tally.sent,
            received: tally.received,
            dropped: tally.dropped,
            strange: tally.strange,
        }
    }

    /// Whether calls return [`WouldBlock`](io::ErrorKind::WouldBlock) instead of waiting.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.0.nonblocking.store(nonblocking, Ordering::Relaxed);
        Ok(())
    }

    /// How long receiving may wait before it fails with [`TimedOut`](io::ErrorKind::TimedOut); `None` is for ever.
    ///
    /// # Errors
    /// If it is zero.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        store(&self.0.read_timeout, timeout)
    }

    /// How long sending may wait, as above.
    ///
    /// # Errors
    /// If it is zero.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        store(&self.0.write_timeout, timeout)
    }

    /// How long receiving may wait.
    pub fn read_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(load(&self.0.read_timeout))
    }

    /// How long sending may wait.
    pub fn write_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(load(&self.0.write_timeout))
    }
}

impl AsFd for Datagram {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.post.signal.as_fd()
    }
}

impl AsRawFd for Datagram {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let post = &self.post;
        post.abandon();
        let begun = Instant::now();
        let linger = if self.nonblocking.load(Ordering::Relaxed) { Duration::ZERO } else { LINGER };
        while !post.is_over() {
            // Names that are asked for are the thread's business.
            if begun.elapsed() >= linger || post.with(|office, _| office.has_parked()) {
                post.net.tell(Command::Leave(post.clone()));
                return;
            }
            std::thread::yield_now();
        }
        post.close();
    }
}

#[cold]
fn over(what: &'static str, why: &str, timeout: Option<Duration>) -> io::Error {
    let why = format!("{why} in {:?}", timeout.unwrap_or_default());
    let error = Error::new(Kind::Timeout, what).why(why);
    io::Error::new(io::ErrorKind::TimedOut, error.fix("try again, or give it more time"))
}

/// An errno in words.
#[cold]
fn failed(what: &'static str, errno: Errno, on: SocketAddr, longest: usize) -> io::Error {
    use io::ErrorKind as Sort;
    let number = errno.raw_os_error();
    let (sort, why, fix): (_, String, _) = match errno {
        Errno::MSGSIZE if longest > 0 => {
            let why = format!("{longest} bytes are the most that a packet carries");
            (Sort::InvalidInput, why, "send less at a time, or use a stream")
        }
        Errno::MSGSIZE => {
            let why = "it was longer than the peer takes".to_owned();
            (Sort::InvalidInput, why, "send less at a time, or use a stream")
        }
        Errno::HOSTUNREACH => {
            let why = "nobody answered for a name that was sent to".to_owned();
            (Sort::HostUnreachable, why, "check that a warp datagram socket is bound there")
        }
        Errno::CONNREFUSED => {
            let why = "nobody has a name that was sent to".to_owned();
            (Sort::ConnectionRefused, why, "bind the other end first, and check the port")
        }
        Errno::DESTADDRREQ => {
            (Sort::NotConnected, "no peer was named".to_owned(), "connect, or use send_to")
        }
        Errno::AFNOSUPPORT => {
            let why = "one address is of IPv4, the other of IPv6".to_owned();
            (Sort::InvalidInput, why, "bind to an address of the peer's family")
        }
        Errno::OPNOTSUPP => {
            let why = "it is the address of many".to_owned();
            (Sort::Unsupported, why, "send to each of them")
        }
        Errno::ADDRNOTAVAIL => {
            let why = "no device has that address".to_owned();
            (Sort::AddrNotAvailable, why, "bind to an address of this machine, the device's")
        }
        _ => {
            let why = io::Error::from_raw_os_error(number);
            (why.kind(), why.to_string(), "look at the log: WARPWIRE_LOG=warpwire::sock=debug")
        }
    };
    io::Error::new(sort, Error::new(Kind::Os(number), what).on(on.to_string()).why(why).fix(fix))
}

impl Net {
    /// A socket for datagrams; port 0 stands for any that is free.
    ///
    /// # Errors
    /// If the address is another's, or no device has it: with a [device of one's own](Net::over), only the device's will do, or
    /// the unspecified one.
    pub fn datagram(&self, address: impl ToSocketAddrs) -> io::Result<Datagram> {
        Datagram::new(&self.0, address)
    }
}
