//! Streams of CPU programs.

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

/// How long a stream that is dropped waits for its last bytes to land, if it is not non-blocking. The rest goes on behind.
const LINGER: Duration = Duration::from_millis(200);

/// A connection of the family `warp`: bytes go straight from memory to memory.
///
/// It is used as [`std::net::TcpStream`] is; `&WarpStream` reads and writes too, so that one thread may read while another
/// writes, and [`try_clone`](Self::try_clone) gives another handle to the same connection. When the last is dropped the peer
/// reads what is left, then the end.
///
/// # Readiness
/// For async runtimes: [`set_nonblocking`](Self::set_nonblocking), then watch the descriptor ([`AsFd`]) for *reading*,
/// whatever you wait for. It is readable, by level and by edge, when a call that returned
/// [`WouldBlock`](io::ErrorKind::WouldBlock) may go on, in either direction, and stays so until that call is made again; so try
/// both directions that you wait for. It begins readable: try first, then wait. Nothing is to be read from it.
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
    /// Nanoseconds; 0 is for ever.
    read_timeout: AtomicU64,
    write_timeout: AtomicU64,
    /// It was reset, and says nothing more.
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

    /// Connects to a listener, with what this process shares: [`Net::shared`].
    pub fn connect(address: impl ToSocketAddrs) -> io::Result<Self> {
        Net::shared().map_err(io_error)?.connect(address)
    }

    /// Connects to a listener in that time.
    pub fn connect_timeout(address: &SocketAddr, timeout: Duration) -> io::Result<Self> {
        Net::shared().map_err(io_error)?.connect_timeout(address, timeout)
    }

    /// Another handle to the same connection, with the same settings.
    pub fn try_clone(&self) -> io::Result<Self> {
        Ok(Self(self.0.clone()))
    }

    /// Ends a direction, or both. The peer reads what was sent, then the end.
    pub fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        if matches!(how, Shutdown::Write | Shutdown::Both) {
            self.0.connection.close_write();
        }
        if matches!(how, Shutdown::Read | Shutdown::Both) {
            self.0.connection.close_read();
        }
        Ok(())
    }

    /// Ends the connection without the end of the stream: the peer's calls, and ours, fail with
    /// [`ConnectionReset`](io::ErrorKind::ConnectionReset).
    pub fn reset(&self) {
        self.0.is_reset.store(true, Ordering::Release);
        let error = Error::new(Kind::PeerLost, "use a connection").why("it was reset by us");
        drop(self.0.connection.reset(error));
    }

    /// The peer's address.
    pub fn peer_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.0.connection.addresses.1)
    }

    /// Our own.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        Ok(self.0.connection.addresses.0)
    }

    /// Which way its bytes take, and why.
    pub fn path(&self) -> crate::Result<crate::link::LinkPath> {
        self.0.connection.path()
    }

    /// Whether calls return [`WouldBlock`](io::ErrorKind::WouldBlock) instead of waiting.
    ///
    /// # Errors
    /// If there is no descriptor left to tell of readiness by.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        if nonblocking {
            self.0.connection.signal().map_err(io_error)?;
        }
        self.0.nonblocking.store(nonblocking, Ordering::Relaxed);
        Ok(())
    }

    /// How long reading may wait before it fails with [`TimedOut`](io::ErrorKind::TimedOut); `None` is for ever.
    ///
    /// # Errors
    /// If it is zero.
    pub fn set_read_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        store(&self.0.read_timeout, timeout)
    }

    /// How long writing may wait, as above.
    ///
    /// # Errors
    /// If it is zero.
    pub fn set_write_timeout(&self, timeout: Option<Duration>) -> io::Result<()> {
        store(&self.0.write_timeout, timeout)
    }

    /// How long reading may wait.
    pub fn read_timeout(&self) -> io::Result<Option<Duration>> {
        Ok(load(&self.0.read_timeout))
    }

    /// How long writing may wait.
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
        Interest::Reading => ("read", "the peer sent nothing"),
        Interest::Writing => ("write", "the peer took nothing"),
    };
    let why = format!("{why} in {:?}", timeout.unwrap_or_default());
    let error = Error::new(Kind::Timeout, call).on(format!("{connection:?}")).why(why);
    io::Error::new(io::ErrorKind::TimedOut, error.fix("try again, or give it more time"))
}

fn store(cell: &AtomicU64, timeout: Option<Duration>) -> io::Result<()> {
    if timeout.is_some_and(|timeout| timeout.is_zero()) {
        let error = Error::new(Kind::InvalidArgument, "set a timeout").why("it is zero");
        return Err(io_error(error.fix("use set_nonblocking, or None to wait for ever")));
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

    /// Does nothing: what was written is on its way.
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
        // A stream that does not block has the first. Where it does and none can be made, the TCP connection's tells of the
        // end at least.
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
