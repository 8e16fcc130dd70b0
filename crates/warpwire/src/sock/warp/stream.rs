//! Streams for CPU programs.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::connection::{Connection, Interest, io_error};
use super::net::Net;
use super::service::Command;
use crate::error::{Error, Kind};
use crate::sync::Backoff;

/// How long dropping a blocking stream waits for its last bytes to arrive; after that the service
/// thread finishes in the background.
const LINGER: Duration = Duration::from_millis(200);

/// A `warp` connection: bytes are written by RDMA into the peer's memory.
///
/// It is used like [`std::net::TcpStream`]. `&WarpStream` implements [`Read`] and [`Write`] too, so
/// one thread may read while another writes, and [`try_clone`](Self::try_clone) returns another
/// handle of the same connection. When the last handle is dropped, the peer reads the rest, then
/// the end of the stream.
///
/// # Readiness
/// For async runtimes: call [`set_nonblocking`](Self::set_nonblocking), then wait until the
/// descriptor ([`AsFd`]) is *readable*, for either direction. It becomes readable, level- and
/// edge-triggered, when a call that returned [`WouldBlock`](io::ErrorKind::WouldBlock) may proceed,
/// and stays readable until that call is repeated; so retry each direction that you wait for. It
/// starts readable: call first, then wait. Do not read from it.
///
/// ```
/// use std::io::{Read, Write};
/// use warpwire::sock::warp::{WarpListener, WarpStream};
/// let listener = WarpListener::bind("127.0.0.1:0")?;
/// let mut client = WarpStream::connect(listener.local_addr()?)?;
/// let (mut server, _) = listener.accept()?;
/// client.write_all(b"ping")?;
/// client.shutdown(std::net::Shutdown::Write)?;
/// let mut text = String::new();
/// server.read_to_string(&mut text)?;
/// assert_eq!(text, "ping");
/// # Ok::<(), std::io::Error>(())
/// ```
#[derive(Debug)]
pub struct WarpStream(Arc<Handle>);

#[derive(Debug)]
struct Handle {
    connection: Arc<Connection>,
    nonblocking: AtomicBool,
    /// Nanoseconds; 0 means no timeout.
    read_timeout: AtomicU64,
    write_timeout: AtomicU64,
    /// Reset by us: dropping it sends no FIN.
    is_reset: AtomicBool,
}

impl WarpStream {
    pub(super) fn new(connection: Arc<Connection>) -> Self {
        Self(Arc::new(Handle {
            connection,
            nonblocking: AtomicBool::new(false),
            read_timeout: AtomicU64::new(0),
            write_timeout: AtomicU64::new(0),
            is_reset: AtomicBool::new(false),
        }))
    }

    /// Connects to a listener, with the process-wide [`Net::shared`].
    pub fn connect(address: impl ToSocketAddrs) -> io::Result<Self> {
        Net::shared().map_err(io_error)?.connect(address)
    }

    /// Connects to a listener within `timeout`, handshake included.
    pub fn connect_timeout(address: &SocketAddr, timeout: Duration) -> io::Result<Self> {
        Net::shared().map_err(io_error)?.connect_timeout(address, timeout)
    }

    /// Another handle of the same connection, with the same settings.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(self.0.clone()))
    }

    /// Shuts down a direction or both. The peer reads what was sent, then the end of the stream.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        if matches!(how, Shutdown::Write | Shutdown::Both) {
            self.0.connection.close_write();
        }
        if matches!(how, Shutdown::Read | Shutdown::Both) {
            self.0.connection.close_read();
        }
        Ok(())
    }

    /// Resets the connection, without FIN: calls of both ends fail with
    /// [`ConnectionReset`](io::ErrorKind::ConnectionReset).
    pub fn reset(&self) {
        self.0.is_reset.store(true, Ordering::Release);
        let error = Error::new(Kind::PeerLost, "use a connection").why("it was reset locally");
        drop(self.0.connection.reset(error));
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.0.connection.addresses.1)
    }

    /// The local address.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.0.connection.addresses.0)
    }

    /// The path of its data, and why it is not a better one.
    pub fn path(&self) -> crate::Result<crate::link::LinkPath> {
        self.0.connection.path()
    }

    /// Whether calls return [`WouldBlock`](io::ErrorKind::WouldBlock) instead of blocking.
    ///
    /// # Errors
    /// If the readiness descriptor cannot be created.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        if nonblocking {
            self.0.connection.signal().map_err(io_error)?;
        }
        self.0.nonblocking.store(nonblocking, Ordering::Relaxed);
        Ok(())
    }

    /// Limits how long reading blocks before it fails with [`TimedOut`](io::ErrorKind::TimedOut);
    /// `None`, the default, means no limit.
    ///
    /// # Errors
    /// [`InvalidInput`](io::ErrorKind::InvalidInput) if it is zero.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        store(&self.0.read_timeout, timeout)
    }

    /// Limits how long writing blocks, as [`set_read_timeout`](Self::set_read_timeout) does.
    ///
    /// # Errors
    /// [`InvalidInput`](io::ErrorKind::InvalidInput) if it is zero.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        store(&self.0.write_timeout, timeout)
    }

    /// The read timeout; `None` if there is none.
    pub fn read_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(load(&self.0.read_timeout))
    }

    /// The write timeout; `None` if there is none.
    pub fn write_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(load(&self.0.write_timeout))
    }

    fn until_done<T>(
        &self,
        what: Interest,
        mut call: impl FnMut(&Connection) -> io::Result<Option<T>>,
    ) -> io::Result<T> {
        let connection = &*self.0.connection;
        connection.disarm(what);
        if let Some(done) = call(connection)? {
            return Ok(done);
        }
        if self.0.nonblocking.load(Ordering::Relaxed) {
            connection.arm(what);
            return Err(io::ErrorKind::WouldBlock.into());
        }
        let timeout = match what {
            Interest::Reading => load(&self.0.read_timeout),
            Interest::Writing => load(&self.0.write_timeout),
        };
        let until = timeout.map(|timeout| Instant::now() + timeout);
        loop {
            let ready = connection.wait(what, until);
            if let Some(done) = call(connection)? {
                return Ok(done);
            }
            if !ready {
                return Err(timed_out(what, timeout, connection));
            }
        }
    }
}

#[cold]
fn timed_out(what: Interest, timeout: Option<Duration>, connection: &Connection) -> io::Error {
    let (call, why) = match what {
        Interest::Reading => ("read", "no data arrived"),
        Interest::Writing => ("write", "the peer read nothing"),
    };
    let why = format!("{why} in {:?}", timeout.unwrap_or_default());
    let error = Error::new(Kind::Timeout, call).on(format!("{connection:?}")).why(why);
    io::Error::new(io::ErrorKind::TimedOut, error.fix("retry, or raise the timeout"))
}

fn store(cell: &AtomicU64, timeout: Option<Duration>) -> io::Result<()> {
    if timeout.is_some_and(|timeout| timeout.is_zero()) {
        let error = Error::new(Kind::InvalidArgument, "set a timeout").why("it is zero");
        return Err(io_error(error.fix("use set_nonblocking, or None for no timeout")));
    }
    let nanos = timeout.map_or(0, |timeout| u64::try_from(timeout.as_nanos()).unwrap_or(u64::MAX));
    cell.store(nanos, Ordering::Relaxed);
    Ok(())
}

fn load(cell: &AtomicU64) -> Option<Duration> {
    match cell.load(Ordering::Relaxed) {
        0 => None,
        nanos => Some(Duration::from_nanos(nanos)),
    }
}

impl Read for &WarpStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.until_done(Interest::Reading, |connection| connection.try_read(into))
    }
}

impl Write for &WarpStream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        self.until_done(Interest::Writing, |connection| connection.try_write(from))
    }

    /// Does nothing: written bytes are posted already.
    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Read for WarpStream {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        (&*self).read(into)
    }
}

impl Write for WarpStream {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        (&*self).write(from)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl AsFd for WarpStream {
    fn as_fd(&self) -> BorrowedFd<'_> {
        // A non-blocking stream has a signal. If none can be created for a blocking one, the TCP
        // connection reports the end at least.
        match self.0.connection.signal() {
            Ok(signal) => signal.as_fd(),
            Err(_) => self.0.connection.tcp.as_fd(),
        }
    }
}

impl AsRawFd for WarpStream {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        let connection = &self.connection;
        connection.abandon();
        if self.is_reset.load(Ordering::Acquire) {
            return;
        }
        connection.close_write();
        let (begun, mut backoff) = (Instant::now(), Backoff::default());
        let linger = if self.nonblocking.load(Ordering::Relaxed) { Duration::ZERO } else { LINGER };
        while !connection.is_finished() {
            if begun.elapsed() >= linger {
                connection.net.submit(Command::Close(connection.clone()));
                return;
            }
            backoff.snooze();
        }
        connection.hang_up();
    }
}
