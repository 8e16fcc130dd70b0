//! Listeners for CPU programs.

use std::collections::VecDeque;
use std::io;
use std::net::{SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, RawFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Condvar, Mutex};

use super::connection::{Connection, io_error};
use super::net::{Inner, Net};
use super::service::Command;
use super::stream::WarpStream;
use crate::error::Error;
use crate::verbs::EventFd;

/// State shared by a listener and the service thread.
pub(super) struct Shared {
    pub(super) tcp: TcpListener,
    pub(super) net: Arc<Inner>,
    pub(super) number: u64,
    ready: Mutex<AcceptQueue>,
    accept_ready: Condvar,
    signal: EventFd,
}

#[derive(Default)]
struct AcceptQueue {
    connections: VecDeque<Arc<Connection>>,
    /// The service thread accepts no more until a connection is taken.
    full: bool,
    failure: Option<Error>,
}

impl Shared {
    /// Whether the queue has room for another connection.
    pub(super) fn has_room(&self) -> bool {
        self.ready.lock().connections.len() < self.net.options.backlog
    }

    /// Marks the queue as full, so that the next [`take`](Self::take) notifies the service thread;
    /// false if there is room.
    pub(super) fn waits_for_room(&self) -> bool {
        let mut ready = self.ready.lock();
        ready.full = ready.connections.len() >= self.net.options.backlog;
        ready.full
    }

    /// Queues an established connection.
    pub(super) fn put(&self, connection: Arc<Connection>) {
        self.ready.lock().connections.push_back(connection);
        self.accept_ready.notify_one();
        self.signal.raise();
    }

    /// Fails all further calls of `accept`.
    pub(super) fn fail(&self, error: Error) {
        self.ready.lock().failure = Some(error);
        self.accept_ready.notify_all();
        self.signal.raise();
    }

    /// The next connection; `None` if the queue is empty.
    fn take(&self, ready: &mut AcceptQueue) -> io::Result<Option<Arc<Connection>>> {
        if let Some(connection) = ready.connections.pop_front() {
            if std::mem::take(&mut ready.full) {
                self.net.submit(Command::Accepted(self.number));
            }
            return Ok(Some(connection));
        }
        match &ready.failure {
            Some(error) => Err(io_error(error.clone())),
            None => Ok(None),
        }
    }
}

/// Accepts `warp` connections.
///
/// A listener is bound to a TCP address and port. A connection is accepted after its handshake, so
/// a client that does not complete it is never returned. For async runtimes the descriptor is
/// readable while a connection may be waiting, until [`accept`](Self::accept) returns `WouldBlock`.
#[derive(Debug)]
pub struct WarpListener {
    shared: Arc<Shared>,
    nonblocking: AtomicBool,
}

impl WarpListener {
    /// Listens at `address`, with the process-wide [`Net::shared`].
    pub fn bind(address: impl ToSocketAddrs) -> io::Result<Self> {
        Net::shared().map_err(io_error)?.listen(address)
    }

    pub(super) fn new(net: &Arc<Inner>, address: impl ToSocketAddrs) -> io::Result<Self> {
        let tcp = TcpListener::bind(address)?;
        tcp.set_nonblocking(true)?;
        let shared = Arc::new(Shared {
            tcp,
            net: net.clone(),
            number: net.number(),
            ready: Mutex::default(),
            accept_ready: Condvar::new(),
            signal: EventFd::new().map_err(io_error)?,
        });
        net.submit(Command::Listen(shared.clone()));
        Ok(Self { shared, nonblocking: AtomicBool::new(false) })
    }

    /// The next connection and its peer's address. Blocks, unless the listener is non-blocking.
    pub fn accept(&self) -> io::Result<(WarpStream, SocketAddr)> {
        let shared = &self.shared;
        let mut ready = shared.ready.lock();
        loop {
            if let Some(connection) = shared.take(&mut ready)? {
                let peer = connection.addresses.1;
                return Ok((WarpStream::new(connection), peer));
            }
            if self.nonblocking.load(Ordering::Relaxed) {
                // Under the lock, so a later connection signals again.
                shared.signal.take();
                return Err(io::ErrorKind::WouldBlock.into());
            }
            shared.accept_ready.wait(&mut ready);
        }
    }

    /// An endless iterator over accepted connections.
    pub fn incoming(&self) -> Connections<'_> {
        Connections(self)
    }

    /// The address that the listener is bound to.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.shared.tcp.local_addr()
    }

    /// Whether [`accept`](Self::accept) returns [`WouldBlock`](io::ErrorKind::WouldBlock) instead
    /// of blocking.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.nonblocking.store(nonblocking, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for WarpListener {
    fn drop(&mut self) {
        self.shared.net.submit(Command::CloseListener(self.shared.number));
        // Connections that were not accepted are dropped: their peers see a reset.
        let unaccepted = std::mem::take(&mut self.shared.ready.lock().connections);
        drop(unaccepted);
    }
}

impl AsFd for WarpListener {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.signal.as_fd()
    }
}

impl AsRawFd for WarpListener {
    fn as_raw_fd(&self) -> RawFd {
        self.as_fd().as_raw_fd()
    }
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.tcp)
    }
}

/// Iterator over the connections of a listener, see [`WarpListener::incoming`].
#[derive(Debug)]
pub struct Connections<'a>(&'a WarpListener);

impl Iterator for Connections<'_> {
    type Item = io::Result<WarpStream>;

    fn next(&mut self) -> Option<Self::Item> {
        Some(self.0.accept().map(|(stream, _)| stream))
    }
}
