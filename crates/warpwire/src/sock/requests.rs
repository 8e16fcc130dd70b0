//! Requests of kernels. Each is answered immediately; what it starts may finish later.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::agent::{Agent, LINGER_TIMEOUT};
use super::arena;
use super::byte_counts::ByteCounts;
use super::layout::{
    ADDRESS_LEN, RequestOp, SockOption, address_bytes, address_from, record, request, state,
};
use super::socket::{Socket, SocketRole};
use crate::error::Result;

/// The result of a request: a number of 0 or more and an optional address, or an errno.
pub(super) type ReplyResult = std::result::Result<(i64, Option<SocketAddr>), Errno>;

const DONE: ReplyResult = Ok((0, None));
/// Maximum number of connections that wait at a listener.
const MAX_BACKLOG: u64 = 4096;
/// Maximum size of a ring.
pub(super) const MAX_RING: u64 = 1 << 30;
/// Requests answered before sockets are polled again.
const MAX_BATCH: u32 = 64;

/// A decoded request of a kernel.
#[derive(Default)]
pub(super) struct Request {
    pub(super) op: u32,
    pub(super) handle: i32,
    pub(super) value: u64,
    pub(super) option: u32,
    pub(super) address: Option<SocketAddr>,
    /// Close only: bytes that the kernel has sent and read.
    pub(super) bytes: ByteCounts,
}

impl Request {
    fn read(bytes: &[u8; request::LEN as usize]) -> Self {
        let word = |at: u64| {
            let mut word = [0; 4];
            word.copy_from_slice(&bytes[at as usize..at as usize + 4]);
            u32::from_le_bytes(word)
        };
        let wide = |at: u64| u64::from(word(at + 4)) << 32 | u64::from(word(at));
        let mut address = [0; ADDRESS_LEN];
        let at = request::ADDRESS as usize;
        address.copy_from_slice(&bytes[at..at + ADDRESS_LEN]);
        Self {
            op: word(request::OP),
            handle: word(request::HANDLE) as i32,
            value: wide(request::VALUE),
            option: word(request::OPTION),
            address: address_from(&address),
            bytes: ByteCounts { sent: wide(request::SENT), received: wide(request::CONSUMED) },
        }
    }
}

impl Agent {
    /// Answers pending requests, at most [`MAX_BATCH`]; true if there were any.
    pub(super) fn take_requests(&mut self) -> Result<bool> {
        let mut bytes = [0; request::LEN as usize];
        let mut worked = false;
        for _ in 0..MAX_BATCH {
            if !self.shared_area.request(self.next_request, &mut bytes)? {
                break;
            }
            let (result, address) = match self.answer(&Request::read(&bytes))? {
                Ok((result, address)) => (result, address),
                Err(errno) => (-i64::from(errno.raw_os_error()), None),
            };
            self.shared_area.reply(self.next_request, result, &address_bytes(address))?;
            self.counters.requests.fetch_add(1, Ordering::Relaxed);
            self.next_request += 1;
            worked = true;
        }
        Ok(worked)
    }

    pub(super) fn answer(&mut self, request: &Request) -> Result<ReplyResult> {
        let Some(op) = RequestOp::from_raw(request.op) else { return Ok(Err(Errno::NOSYS)) };
        if op == RequestOp::Socket {
            return self.open(request.value);
        }
        let index = match self.find(request.handle) {
            Ok(index) => index,
            Err(errno) => return Ok(Err(errno)),
        };
        // Account for bytes that were sent before the request.
        self.poll_counters(index)?;
        match op {
            RequestOp::Socket => Ok(Err(Errno::INVAL)),
            RequestOp::Bind => self.bind(index, request.address),
            RequestOp::Listen => self.listen(index, request.value),
            RequestOp::Connect => self.connect(index, request.address),
            RequestOp::Shutdown => self.shut_down(index, request.value),
            RequestOp::Close => {
                let generation = self.socket(index).generation;
                self.counters.warp.close(index, generation, Some(request.bytes));
                self.close(index, request.value)
            }
            RequestOp::SetOption => self.set(index, request.option, request.value as i64),
            RequestOp::GetOption => Ok(self.get(index, request.option)),
            RequestOp::LocalName => {
                Ok(self.name(index, |fd| rustix::net::getsockname(fd).map(Some)))
            }
            RequestOp::PeerName => Ok(self.name(index, |fd| rustix::net::getpeername(fd))),
            RequestOp::Fail => self.give_up(index, request.value).map(|_| DONE),
        }
    }

    fn open(&mut self, value: u64) -> Result<ReplyResult> {
        let v6 = match value & 0xff {
            4 => false,
            6 => true,
            _ => return Ok(Err(Errno::AFNOSUPPORT)),
        };
        let (role, is_warp) = match value >> 8 {
            1 => (SocketRole::Stream, false),
            2 => (SocketRole::Datagram, false),
            3 if self.qp_slots.is_some() => (SocketRole::Stream, true),
            // The `warp` family is disabled.
            3 => return Ok(Err(Errno::OPNOTSUPP)),
            _ => return Ok(Err(Errno::SOCKTNOSUPPORT)),
        };
        let fd = match new_descriptor(v6, role) {
            Ok(fd) => fd,
            Err(errno) => return Ok(Err(errno)),
        };
        let Some(index) = self.alloc_socket()? else { return Ok(Err(Errno::MFILE)) };
        let socket = &mut self.sockets[usize::from(index)];
        (socket.v6, socket.role, socket.fd) = (v6, role, Some(fd));
        socket.is_warp = is_warp;
        if role == SocketRole::Datagram {
            socket.flags |= state::DATAGRAM;
            socket.writable = true;
            if let Err(errno) = self.alloc_rings(index).and_then(|()| self.watch(index)) {
                self.release_socket(index)?;
                return Ok(Err(errno));
            }
        }
        self.publish_socket(index)?;
        Ok(Ok((i64::from(self.sockets[usize::from(index)].handle(index)), None)))
    }

    fn socket(&mut self, index: u16) -> &mut Socket {
        &mut self.sockets[usize::from(index)]
    }

    /// The descriptor and the address; `EAFNOSUPPORT` if the address is of another family.
    fn with_address(
        &self,
        index: u16,
        address: Option<SocketAddr>,
    ) -> std::result::Result<(&OwnedFd, SocketAddr), Errno> {
        let socket = &self.sockets[usize::from(index)];
        let address = address.ok_or(Errno::AFNOSUPPORT)?;
        if address.is_ipv6() != socket.v6 {
            return Err(Errno::AFNOSUPPORT);
        }
        Ok((socket.fd.as_ref().ok_or(Errno::INVAL)?, address))
    }

    fn bind(&mut self, index: u16, address: Option<SocketAddr>) -> Result<ReplyResult> {
        let socket = &self.sockets[usize::from(index)];
        let reuse = socket.role == SocketRole::Stream && socket.sockopts.reuse_address;
        let outcome = self.with_address(index, address).and_then(|(fd, address)| {
            if reuse {
                sockopt::set_socket_reuseaddr(fd, true)?;
            }
            rustix::net::bind(fd, &address)
        });
        Ok(outcome.map(|()| (0, None)))
    }

    fn listen(&mut self, index: u16, backlog: u64) -> Result<ReplyResult> {
        let socket = self.socket(index);
        if socket.role == SocketRole::Datagram {
            return Ok(Err(Errno::OPNOTSUPP));
        }
        if socket.role == SocketRole::Listener || socket.has(state::CONNECTED | state::CONNECTING) {
            return Ok(Err(Errno::INVAL));
        }
        let Some(fd) = &socket.fd else { return Ok(Err(Errno::INVAL)) };
        let backlog = backlog.clamp(1, MAX_BACKLOG);
        if let Err(errno) = rustix::net::listen(fd, backlog as i32) {
            return Ok(Err(errno));
        }
        // A listener's ring holds accepted connections; its size options apply to those
        // connections.
        let size = arena::rounded(backlog * record::LEN).unwrap_or(arena::MIN_BLOCK);
        // A connect that failed at once has left rings.
        self.free_rings(index);
        let Some(at) = self.receive_arena.take(size) else { return Ok(Err(Errno::NOBUFS)) };
        let socket = self.socket(index);
        socket.receive_ring = (at, size);
        socket.role = SocketRole::Listener;
        socket.flags |= state::LISTENING;
        if let Err(errno) = self.watch(index) {
            return Ok(Err(errno));
        }
        self.publish_socket(index)?;
        Ok(DONE)
    }

    fn connect(&mut self, index: u16, address: Option<SocketAddr>) -> Result<ReplyResult> {
        if let Err(errno) = self.prepare_to_connect(index) {
            return Ok(Err(errno));
        }
        let no_delay = self.sockets[usize::from(index)].sockopts.no_delay;
        let is_stream = self.sockets[usize::from(index)].role == SocketRole::Stream;
        let outcome = self.with_address(index, address).and_then(|(fd, address)| {
            if is_stream && no_delay {
                sockopt::set_tcp_nodelay(fd, true)?;
            }
            rustix::net::connect(fd, &address)
        });
        let socket = self.socket(index);
        match outcome {
            // TCP is connected; the `warp` handshake follows.
            Ok(()) if socket.is_warp => {
                socket.flags |= state::CONNECTING;
                (socket.readable, socket.writable) = (true, true);
            }
            Ok(()) => {
                socket.flags |= state::CONNECTED;
                (socket.readable, socket.writable) = (true, true);
                self.counters.connected.fetch_add(1, Ordering::Relaxed);
            }
            Err(Errno::INPROGRESS) => {
                socket.flags |= state::CONNECTING;
                socket.writable = false;
            }
            Err(errno) => return Ok(Err(errno)),
        }
        // Not earlier: epoll reports an unconnected descriptor as hung up.
        if let Err(errno) = self.watch(index) {
            return Ok(Err(errno));
        }
        self.publish_socket(index)?;
        self.queue(index);
        Ok(DONE)
    }

    fn prepare_to_connect(&mut self, index: u16) -> std::result::Result<(), Errno> {
        let socket = self.socket(index);
        if socket.role == SocketRole::Datagram {
            return Ok(());
        }
        if socket.role == SocketRole::Listener {
            return Err(Errno::OPNOTSUPP);
        }
        if socket.has(state::CONNECTING) {
            return Err(Errno::ALREADY);
        }
        if socket.has(state::CONNECTED) {
            return Err(Errno::ISCONN);
        }
        if socket.errno() != 0 {
            // An earlier attempt failed; a new descriptor may succeed.
            socket.fd = Some(new_descriptor(socket.v6, SocketRole::Stream)?);
            (socket.flags, socket.watched, socket.read_until_empty) = (0, false, false);
            socket.send_window = 0;
        }
        self.alloc_rings(index)
    }

    fn shut_down(&mut self, index: u16, how: u64) -> Result<ReplyResult> {
        let socket = self.socket(index);
        if how > 2 {
            return Ok(Err(Errno::INVAL));
        }
        if !socket.has(state::CONNECTED) {
            return Ok(Err(Errno::NOTCONN));
        }
        if how != 1 {
            // Further input is discarded, so that the peer does not block on a full ring.
            socket.discard_input = !socket.is_warp && !socket.has(state::RECEIVE_END);
            socket.flags |= state::RECEIVE_END;
        }
        if socket.is_warp {
            // The kernel notifies the peer.
            socket.flags |= if how != 0 { state::SEND_END } else { 0 };
            self.publish_state(index)?;
            return Ok(DONE);
        }
        if how != 0 {
            socket.shut_send = true;
        }
        self.publish_state(index)?;
        self.finish(index)?;
        self.queue(index);
        Ok(DONE)
    }

    fn close(&mut self, index: u16, posted: u64) -> Result<ReplyResult> {
        self.reap_accepted(index);
        let socket = self.socket(index);
        socket.closing = Some(Instant::now() + LINGER_TIMEOUT);
        if socket.is_warp && socket.role == SocketRole::Stream && socket.has(state::CONNECTED) {
            socket.warp.posted = posted;
            self.finish_warp(index)?;
            if self.sockets[usize::from(index)].closing.is_some() {
                self.retry_later(index);
            }
            return Ok(DONE);
        }
        let sends_on = socket.role != SocketRole::Listener
            && socket.fd.is_some()
            && socket.unsent() > 0
            && (socket.has(state::CONNECTED) || socket.role == SocketRole::Datagram);
        if !sends_on {
            self.release_socket(index)?;
            return Ok(DONE);
        }
        self.finish(index)?;
        if self.sockets[usize::from(index)].closing.is_some() {
            self.retry_later(index);
            self.queue(index);
        }
        Ok(DONE)
    }

    fn set(&mut self, index: u16, option: u32, value: i64) -> Result<ReplyResult> {
        let Some(setting) = SockOption::from_raw(option) else {
            return Ok(Err(Errno::NOPROTOOPT));
        };
        if matches!(setting, SockOption::SendBuffer | SockOption::ReceiveBuffer) {
            return self.set_size(index, setting, value);
        }
        let socket = self.socket(index);
        let on = value != 0;
        let Some(fd) = &socket.fd else { return Ok(Err(Errno::INVAL)) };
        let done = match setting {
            SockOption::NoDelay if socket.role == SocketRole::Datagram => Err(Errno::OPNOTSUPP),
            SockOption::NoDelay => {
                socket.sockopts.no_delay = on;
                sockopt::set_tcp_nodelay(fd, on)
            }
            SockOption::Linger => {
                socket.sockopts.abort = value == 0;
                match value {
                    0 | i64::MIN..0 => Ok(()),
                    // Close never blocks, so a linger time cannot be honoured.
                    _ => Err(Errno::INVAL),
                }
            }
            SockOption::ReuseAddress => {
                socket.sockopts.reuse_address = on;
                sockopt::set_socket_reuseaddr(fd, on)
            }
            SockOption::KeepAlive => sockopt::set_socket_keepalive(fd, on),
            SockOption::Broadcast => sockopt::set_socket_broadcast(fd, on),
            SockOption::V6Only => sockopt::set_ipv6_v6only(fd, on),
            // Kernels keep these options in their device state.
            SockOption::NonBlocking | SockOption::SendTimeout | SockOption::ReceiveTimeout => {
                Err(Errno::INVAL)
            }
            SockOption::Error | SockOption::SendBuffer | SockOption::ReceiveBuffer => {
                Err(Errno::NOPROTOOPT)
            }
        };
        if setting == SockOption::Linger {
            // At close, a `warp` kernel must know whether to send FIN or let the host reset.
            self.publish_state(index)?;
        }
        Ok(done.map(|()| (0, None)))
    }

    /// Sets a ring size, rounded up to a power of two. `EISCONN` once bytes may have passed through
    /// it.
    fn set_size(&mut self, index: u16, setting: SockOption, value: i64) -> Result<ReplyResult> {
        // As `SockOptions::check`: kernels see sizes and counters as 32-bit numbers.
        let max_size = self.options.arena.min(MAX_RING);
        let socket = self.socket(index);
        let size = u64::try_from(value).ok().filter(|size| (1..=max_size).contains(size));
        let Some(size) = size.and_then(arena::rounded) else { return Ok(Err(Errno::INVAL)) };
        let fixed = match socket.role {
            SocketRole::Stream => socket.has(state::CONNECTED | state::CONNECTING),
            SocketRole::Datagram => socket.received != 0 || socket.sent != 0,
            SocketRole::Listener => false,
        };
        if fixed {
            return Ok(Err(Errno::ISCONN));
        }
        let before = socket.sockopts;
        match setting {
            SockOption::SendBuffer => socket.sockopts.send_size = size,
            _ => socket.sockopts.receive_size = size,
        }
        if socket.role == SocketRole::Listener {
            return Ok(DONE);
        }
        self.free_rings(index);
        if self.sockets[usize::from(index)].role == SocketRole::Datagram
            && let Err(errno) = self.alloc_rings(index)
        {
            self.socket(index).sockopts = before;
            // The blocks that were just freed are free again.
            if let Err(errno) = self.alloc_rings(index) {
                return Ok(Err(errno));
            }
            return Ok(Err(errno));
        }
        self.publish_socket(index)?;
        Ok(DONE)
    }

    fn get(&mut self, index: u16, option: u32) -> ReplyResult {
        let setting = SockOption::from_raw(option).ok_or(Errno::NOPROTOOPT)?;
        let socket = self.socket(index);
        let value = match setting {
            SockOption::SendBuffer => arena::rounded(socket.sockopts.send_size).unwrap_or(0) as i64,
            SockOption::ReceiveBuffer => {
                arena::rounded(socket.sockopts.receive_size).unwrap_or(0) as i64
            }
            SockOption::NoDelay => i64::from(socket.sockopts.no_delay),
            SockOption::Linger if socket.sockopts.abort => 0,
            SockOption::Linger => -1,
            SockOption::Error => socket.errno(),
            SockOption::ReuseAddress => i64::from(socket.sockopts.reuse_address),
            SockOption::KeepAlive | SockOption::Broadcast | SockOption::V6Only => {
                let fd = socket.fd.as_ref().ok_or(Errno::INVAL)?;
                i64::from(match setting {
                    SockOption::KeepAlive => sockopt::socket_keepalive(fd)?,
                    SockOption::Broadcast => sockopt::socket_broadcast(fd)?,
                    _ => sockopt::ipv6_v6only(fd)?,
                })
            }
            SockOption::NonBlocking | SockOption::SendTimeout | SockOption::ReceiveTimeout => {
                return Err(Errno::INVAL);
            }
        };
        Ok((value, None))
    }

    fn name(
        &mut self,
        index: u16,
        query: impl Fn(&OwnedFd) -> rustix::io::Result<Option<rustix::net::SocketAddrAny>>,
    ) -> ReplyResult {
        let fd = self.socket(index).fd.as_ref().ok_or(Errno::NOTCONN)?;
        let name = query(fd)?.and_then(|name| SocketAddr::try_from(name).ok());
        name.map(|name| (0, Some(name))).ok_or(Errno::NOTCONN)
    }
}

fn new_descriptor(v6: bool, role: SocketRole) -> std::result::Result<OwnedFd, Errno> {
    let family = if v6 { AddressFamily::INET6 } else { AddressFamily::INET };
    let kind = match role {
        SocketRole::Datagram => SocketType::DGRAM,
        SocketRole::Stream | SocketRole::Listener => SocketType::STREAM,
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    rustix::net::socket_with(family, kind, flags, None)
}
