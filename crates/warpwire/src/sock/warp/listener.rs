//! Listeners of CPU programs.

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

/// What a listener and the thread share.
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
    /// The thread takes no more until there is room.
    full: bool,
    failure: Option<Error>,
}

impl Shared {
    /// Whether another connection may wait.
    pub(super) fn has_room(&self) -> bool {
        self.ready.lock().connections.len() < self.net.options.backlog
    }

    /// Whether somebody who accepts will say that there is room; else there is some already.
    pub(super) fn waits_for_room(&self) -> bool {
        let mut ready = self.ready.lock();
        ready.full = ready.connections.len() >= self.net.options.backlog;
        ready.full
    }

    /// A connection is ready.
    pub(super) fn put(&self, connection: Arc<Connection>) {
        self.ready.lock().connections.push_back(connection);
        self.accept_ready.notify_one();
        self.signal.raise();
    }

    /// Nothing will come any more.
    pub(super) fn fail(&self, error: Error) {
        self.ready.lock().failure = Some(error);
        self.accept_ready.notify_all();
        self.signal.raise();
    }

    /// The next connection; `None` if there is none now.
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

/// Takes connections of the family `warp`.
///
/// Connections come with an address and a port of TCP, and are ready when they are accepted: whoever does not say what a peer
/// must has no part in it. For async runtimes its descriptor is readable while a connection may wait, until
/// [`accept`](Self::accept) has said that it would block.
#[derive(Debug)]
pub struct WarpListener {
    shared: Arc<Shared>,
    nonblocking: AtomicBool,
}

impl WarpListener {
    /// Listens at that address, with what this process shares: [`Net::shared`].
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

    /// The next connection, and who made it. Waits for it, unless the listener is non-blocking.
    pub fn accept(&self) -> io::Result<(WarpStream, SocketAddr)> {
        let shared = &self.shared;
        let mut ready = shared.ready.lock();
        loop {
            if let Some(connection) = shared.take(&mut ready)? {
                let peer = connection.addresses.1;
                return Ok((WarpStream::new(connection), peer));
            }
            if self.nonblocking.load(Ordering::Relaxed) {
                // Under the lock: what comes after this raises it again.
                shared.signal.take();
                return Err(io::ErrorKind::WouldBlock.into());
            }
            shared.accept_ready.wait(&mut ready);
        }
    }

    /// Connections, one after the other, without end.
    pub fn incoming(&self) -> Connections<'_> {
        Connections(self)
    }

    /// Where it listens.
    pub fn local_addr(&self) -> io::Result<SocketAddr> {
        self.shared.tcp.local_addr()
    }

    /// Whether [`accept`](Self::accept) returns [`WouldBlock`](io::ErrorKind::WouldBlock) instead of waiting.
    pub fn set_nonblocking(&self, nonblocking: bool) -> io::Result<()> {
        self.nonblocking.store(nonblocking, Ordering::Relaxed);
        Ok(())
    }
}

impl Drop for WarpListener {
    fn drop(&mut self) {
        self.shared.net.submit(Command::CloseListener(self.shared.number));
        // Nobody will accept these: their peers see a reset.
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

/// The connections of a listener: see [`WarpListener::incoming`].
#[derive(Debug)]
pub struct Connections<'a>(&'a WarpListener);

impl Iterator for Connections<'_> {
    type Item = io::Result<WarpStream>;

    fn next(&mut self) -> Option<Self::Item> {
        Some(self.0.accept().map(|(stream, _)| stream))
    }
}
