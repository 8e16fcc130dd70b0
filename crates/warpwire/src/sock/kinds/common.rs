//! What sockets of all kinds share: the slot's generation, options, the descriptor with its
//! readiness, the state word, and membership in the lists of the service thread.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use rustix::event::epoll::EventFlags;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use crate::sock::layout::{handle, state};
use crate::sock::resources::Resources;

/// A closed socket with unsent bytes is reset after this time without progress.
const LINGER_TIMEOUT: Duration = Duration::from_secs(60);

/// Options that are set before there is a descriptor, or inherited by accepted connections.
#[derive(Clone, Copy, Debug)]
pub(in crate::sock) struct SockOpts {
    pub(in crate::sock) receive_size: u64,
    pub(in crate::sock) send_size: u64,
    pub(in crate::sock) no_delay: bool,
    pub(in crate::sock) reuse_address: bool,
    /// Close resets the connection (`SO_LINGER` 0).
    pub(in crate::sock) abort: bool,
}

impl SockOpts {
    pub(in crate::sock) fn with_ring(size: u64) -> Self {
        Self {
            receive_size: size,
            send_size: size,
            no_delay: true,
            reuse_address: true,
            abort: false,
        }
    }
}

/// The part of a slot of the socket table that all kinds have.
pub(in crate::sock) struct Common {
    /// The slot's index.
    pub(in crate::sock) index: u16,
    pub(in crate::sock) generation: u16,
    /// A kernel has its handle, or will get it.
    pub(in crate::sock) open: bool,
    pub(in crate::sock) v6: bool,
    pub(in crate::sock) options: SockOpts,
    pub(in crate::sock) fd: Option<OwnedFd>,
    /// The state word without the generation: flags and errnos.
    pub(in crate::sock) flags: u64,
    /// The last readiness that epoll reported: a read, or a write, may succeed.
    pub(in crate::sock) readable: bool,
    pub(in crate::sock) writable: bool,
    /// epoll has reported a hang-up, an error or urgent data: a short read does not mean that
    /// nothing is left.
    pub(in crate::sock) read_until_empty: bool,
    /// Its descriptor is in the epoll set.
    pub(in crate::sock) watched: bool,
    /// It is queued for service.
    pub(in crate::sock) queued: bool,
    /// It is on the retry list: no event announces what it waits for.
    pub(in crate::sock) in_retry_list: bool,
    /// Closed by its kernel: freed when everything is sent, or reset at this deadline.
    pub(in crate::sock) closing: Option<Instant>,
}

impl Common {
    pub(in crate::sock) fn vacant(index: u16) -> Self {
        Self {
            index,
            generation: 0,
            open: false,
            v6: false,
            options: SockOpts::with_ring(0),
            fd: None,
            flags: 0,
            readable: false,
            writable: false,
            read_until_empty: false,
            watched: false,
            queued: false,
            in_retry_list: false,
            closing: None,
        }
    }

    /// Opens a vacant slot with the next generation. The lists may still hold its index.
    pub(in crate::sock) fn reopen(&mut self, options: SockOpts) {
        *self = Self {
            generation: self.generation % 0x7fff + 1,
            open: true,
            options,
            queued: self.queued,
            in_retry_list: self.in_retry_list,
            ..Self::vacant(self.index)
        };
    }

    /// The state word, 0 if the socket is not open.
    pub(in crate::sock) fn state(&self) -> u64 {
        if !self.open {
            return 0;
        }
        let resets = self.has(state::WARP) && self.options.abort;
        self.flags | u64::from(self.generation) | if resets { state::RESET_ON_CLOSE } else { 0 }
    }

    pub(in crate::sock) fn handle(&self) -> i32 {
        handle(self.index, self.generation)
    }

    pub(in crate::sock) fn has(&self, flag: u64) -> bool {
        self.flags & flag != 0
    }

    /// Records that receiving, sending or both have failed; the first errno of each is kept.
    pub(in crate::sock) fn fail(&mut self, receiving: Option<Errno>, sending: Option<Errno>) {
        let mut note = |shift: u32, end: u64, errno: Option<Errno>| {
            let Some(errno) = errno else { return };
            if self.flags >> shift & 0xff == 0 {
                self.flags |= (errno.raw_os_error() as u64 & 0xff) << shift;
            }
            self.flags |= end;
        };
        note(state::RECEIVE_ERROR, state::RECEIVE_END, receiving);
        note(state::SEND_ERROR, state::SEND_END, sending);
        self.flags &= !state::CONNECTING;
    }

    /// The errno that ended the socket, that of receiving first; 0 if there is none.
    pub(in crate::sock) fn errno(&self) -> i64 {
        let of = |shift: u32| (self.flags >> shift & 0xff) as i64;
        match of(state::RECEIVE_ERROR) {
            0 => of(state::SEND_ERROR),
            errno => errno,
        }
    }

    /// epoll has reported these events.
    pub(in crate::sock) fn on_event(&mut self, flags: EventFlags) {
        let ended = EventFlags::ERR | EventFlags::HUP | EventFlags::RDHUP;
        let uneven = ended | EventFlags::PRI;
        self.readable |= flags.intersects(EventFlags::IN | uneven);
        self.writable |= flags.intersects(EventFlags::OUT | EventFlags::ERR | EventFlags::HUP);
        self.read_until_empty |= flags.intersects(uneven);
    }

    /// Closes the descriptor, with a reset if the option `abort` is set.
    pub(in crate::sock) fn close_descriptor(&mut self) {
        if let Some(fd) = self.fd.take()
            && self.options.abort
            // If it cannot be set, the peer sees an ordinary end of stream.
            && let Err(errno) = sockopt::set_socket_linger(&fd, Some(Duration::ZERO))
        {
            tracing::debug!(%errno, "cannot reset a connection");
        }
        self.watched = false;
        (self.readable, self.writable) = (false, false);
    }

    /// Starts the linger timeout, or restarts it if that has begun.
    pub(in crate::sock) fn linger(&mut self) {
        self.closing = Some(Instant::now() + LINGER_TIMEOUT);
    }

    /// The descriptor and the address; `EAFNOSUPPORT` if the address is of another family.
    pub(in crate::sock) fn with_address(
        &self,
        address: Option<SocketAddr>,
    ) -> Result<(&OwnedFd, SocketAddr), Errno> {
        let address = address.ok_or(Errno::AFNOSUPPORT)?;
        if address.is_ipv6() != self.v6 {
            return Err(Errno::AFNOSUPPORT);
        }
        Ok((self.fd.as_ref().ok_or(Errno::INVAL)?, address))
    }

    /// Checks that a stream may connect. A descriptor whose connect has failed is replaced.
    pub(super) fn prepare_to_connect(&mut self) -> Result<(), Errno> {
        if self.has(state::CONNECTING) {
            return Err(Errno::ALREADY);
        }
        if self.has(state::CONNECTED) {
            return Err(Errno::ISCONN);
        }
        if self.errno() != 0 {
            self.fd = Some(new_descriptor(self.v6, SocketType::STREAM)?);
            self.flags &= state::WARP;
            (self.watched, self.read_until_empty) = (false, false);
        }
        Ok(())
    }

    /// Connects the descriptor of a stream; false if that is in progress.
    pub(super) fn connect_stream(&mut self, address: Option<SocketAddr>) -> Result<bool, Errno> {
        let (fd, address) = self.with_address(address)?;
        if self.options.no_delay {
            sockopt::set_tcp_nodelay(fd, true)?;
        }
        match rustix::net::connect(fd, &address) {
            Ok(()) => Ok(true),
            Err(Errno::INPROGRESS) => Ok(false),
            Err(errno) => Err(errno),
        }
    }

    /// It is connected, and may have something to read; counts it.
    pub(super) fn set_connected(&mut self, resources: &Resources) {
        self.flags = self.flags & !state::CONNECTING | state::CONNECTED;
        (self.readable, self.writable) = (true, true);
        resources.counters.connected.fetch_add(1, Ordering::Relaxed);
    }

    /// The outcome of a connect in progress; `None` if it is not known yet.
    pub(super) fn poll_connect(&mut self) -> Option<Result<(), Errno>> {
        let fd = self.fd.as_ref().filter(|_| self.writable)?;
        match sockopt::socket_error(fd) {
            // epoll may report a new descriptor as hung up before connect was tried.
            Ok(Ok(())) if rustix::net::getpeername(fd).is_err() => {
                self.writable = false;
                None
            }
            Ok(outcome) => Some(outcome),
            Err(errno) => Some(Err(errno)),
        }
    }

    /// The local address of the descriptor.
    pub(super) fn local_address(&self) -> Option<SocketAddr> {
        let name = rustix::net::getsockname(self.fd.as_ref()?).ok()?;
        SocketAddr::try_from(name).ok()
    }

    /// The peer's address.
    pub(super) fn peer_address(&self) -> Option<SocketAddr> {
        let name = rustix::net::getpeername(self.fd.as_ref()?).ok()??;
        SocketAddr::try_from(name).ok()
    }
}

/// A descriptor of the operating system, non-blocking.
pub(in crate::sock) fn new_descriptor(v6: bool, kind: SocketType) -> Result<OwnedFd, Errno> {
    let family = if v6 { AddressFamily::INET6 } else { AddressFamily::INET };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    rustix::net::socket_with(family, kind, flags, None)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_error_is_kept() {
        let mut common = Common::vacant(0);
        (common.open, common.generation) = (true, 3);
        common.fail(None, Some(Errno::PIPE));
        assert_eq!(common.errno(), 32);
        common.fail(Some(Errno::CONNRESET), Some(Errno::CONNRESET));
        assert_eq!(common.errno(), 104);
        assert_eq!(common.state() & 0xffff_ffff, 32 << 24 | 104 << 16 | 3);
        assert!(common.has(state::RECEIVE_END) && common.has(state::SEND_END));
    }

    #[test]
    fn a_reopened_slot_keeps_only_its_place_in_lists() {
        let mut common = Common::vacant(5);
        common.reopen(SockOpts::with_ring(4096));
        (common.flags, common.readable, common.queued) = (state::CONNECTED, true, true);
        common.linger();
        let before = common.handle();
        common.reopen(SockOpts::with_ring(8192));
        assert_ne!(common.handle(), before, "handles of the earlier socket are refused");
        assert!(common.queued && !common.readable && common.closing.is_none());
        assert_eq!((common.flags, common.options.send_size), (0, 8192));
        common.generation = 0x7fff;
        common.reopen(SockOpts::with_ring(4096));
        assert_eq!(common.generation, 1, "no handle is negative, none has generation 0");
    }
}
