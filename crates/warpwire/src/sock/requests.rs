//! Requests of kernels. Each is answered immediately; what it starts may finish later.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;

use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{SocketType, sockopt};

use super::arena;
use super::byte_counts::ByteCounts;
use super::kinds::{Listener, Progress, SockOpts, Socket, TcpSocket, UdpSocket, new_descriptor};
use super::layout::{
    self, RequestOp, SockOption, address_bytes, address_from, record, request, state,
};
use super::service::ServiceThread;
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
        let request = layout::SockRequest::decode(bytes);
        // The two counts of a close request are in the bytes of the address.
        let wide = |at: u64| {
            let at = (at - request::ADDRESS) as usize;
            let mut word = [0; 8];
            word.copy_from_slice(&request.address[at..at + 8]);
            u64::from_le_bytes(word)
        };
        Self {
            op: request.op,
            handle: request.handle,
            value: request.value,
            option: request.option,
            address: address_from(&request.address),
            bytes: ByteCounts { sent: wide(request::SENT), received: wide(request::CONSUMED) },
        }
    }
}

impl ServiceThread {
    /// Answers pending requests, at most [`MAX_BATCH`]; true if there were any.
    pub(super) fn take_requests(&mut self) -> Result<bool> {
        let mut bytes = [0; request::LEN as usize];
        let mut worked = false;
        for _ in 0..MAX_BATCH {
            if !self.resources.shared_area.request(self.next_request, &mut bytes)? {
                break;
            }
            let (result, address) = match self.answer(&Request::read(&bytes))? {
                Ok((result, address)) => (result, address),
                Err(errno) => (-i64::from(errno.raw_os_error()), None),
            };
            let address = address_bytes(address);
            self.resources.shared_area.reply(self.next_request, result, &address)?;
            self.resources.counters.requests.fetch_add(1, Ordering::Relaxed);
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
        let index = match self.sockets.find(request.handle) {
            Ok(index) => index,
            Err(errno) => return Ok(Err(errno)),
        };
        // Account for bytes that were sent before the request.
        self.poll_counters(index)?;
        match op {
            RequestOp::Socket => Ok(Err(Errno::INVAL)),
            RequestOp::Bind => Ok(self.bind(index, request.address)),
            RequestOp::Listen => self.listen(index, request.value),
            RequestOp::Connect => self.connect(index, request.address),
            RequestOp::Shutdown => self.shut_down(index, request.value),
            RequestOp::Close => {
                let generation = self.sockets[index].common.generation;
                self.resources.counters.warp.close(index, generation, Some(request.bytes));
                self.close(index, request.value)
            }
            RequestOp::SetOption => self.set(index, request.option, request.value as i64),
            RequestOp::GetOption => Ok(self.get(index, request.option)),
            RequestOp::LocalName => {
                Ok(self.name(index, |fd| rustix::net::getsockname(fd).map(Some)))
            }
            RequestOp::PeerName => Ok(self.name(index, |fd| rustix::net::getpeername(fd))),
            RequestOp::Fail => self.give_up(index, request.value),
        }
    }

    fn open(&mut self, value: u64) -> Result<ReplyResult> {
        let v6 = match value & 0xff {
            4 => false,
            6 => true,
            _ => return Ok(Err(Errno::AFNOSUPPORT)),
        };
        let (socket, kind, flags) = match value >> 8 {
            1 => (Socket::Tcp(TcpSocket::default()), SocketType::STREAM, 0),
            2 => (Socket::Udp(UdpSocket::default()), SocketType::DGRAM, state::DATAGRAM),
            3 if self.resources.qp_slots.is_some() => {
                (Socket::Rdma(Box::default()), SocketType::STREAM, state::WARP)
            }
            // The `warp` family is disabled.
            3 => return Ok(Err(Errno::OPNOTSUPP)),
            _ => return Ok(Err(Errno::SOCKTNOSUPPORT)),
        };
        let fd = match new_descriptor(v6, kind) {
            Ok(fd) => fd,
            Err(errno) => return Ok(Err(errno)),
        };
        let options = SockOpts::with_ring(self.resources.options.ring);
        let Some(index) = self.open_slot(options)? else { return Ok(Err(Errno::MFILE)) };
        let slot = &mut self.sockets[index];
        (slot.common.v6, slot.common.fd, slot.common.flags) = (v6, Some(fd), flags);
        slot.socket = socket;
        if let Socket::Udp(udp) = &mut slot.socket {
            slot.common.writable = true;
            let ready = self
                .resources
                .alloc_rings(&mut udp.rings, &options)
                .and_then(|()| self.resources.watch(&mut slot.common));
            if let Err(errno) = ready {
                self.release(index)?;
                return Ok(Err(errno));
            }
        }
        slot.publish(&self.resources)?;
        Ok(Ok((i64::from(slot.common.handle()), None)))
    }

    fn bind(&mut self, index: u16, address: Option<SocketAddr>) -> ReplyResult {
        let slot = &self.sockets[index];
        let is_stream = matches!(slot.socket, Socket::Tcp(_) | Socket::Rdma(_));
        let (fd, address) = slot.common.with_address(address)?;
        if is_stream && slot.common.options.reuse_address {
            sockopt::set_socket_reuseaddr(fd, true)?;
        }
        rustix::net::bind(fd, &address)?;
        DONE
    }

    /// Makes a stream a listener.
    fn listen(&mut self, index: u16, backlog: u64) -> Result<ReplyResult> {
        let slot = &mut self.sockets[index];
        let (rings, is_rdma) = match &mut slot.socket {
            Socket::Vacant | Socket::Listener(_) => return Ok(Err(Errno::INVAL)),
            Socket::Udp(_) => return Ok(Err(Errno::OPNOTSUPP)),
            Socket::Tcp(tcp) => (&mut tcp.rings, false),
            Socket::Rdma(rdma) => (&mut rdma.rings, true),
        };
        if slot.common.has(state::CONNECTED | state::CONNECTING) {
            return Ok(Err(Errno::INVAL));
        }
        let Some(fd) = &slot.common.fd else { return Ok(Err(Errno::INVAL)) };
        let backlog = backlog.clamp(1, MAX_BACKLOG);
        if let Err(errno) = rustix::net::listen(fd, backlog as i32) {
            return Ok(Err(errno));
        }
        // A connect that failed at once has left rings.
        self.resources.free_rings(rings);
        // A listener's ring holds accepted connections; its size options apply to those
        // connections.
        let ring = match self.resources.alloc_accept_ring(backlog * record::LEN) {
            Ok(ring) => ring,
            Err(errno) => return Ok(Err(errno)),
        };
        slot.socket = Socket::Listener(Listener::new(ring, is_rdma));
        slot.common.flags |= state::LISTENING;
        if let Err(errno) = self.resources.watch(&mut slot.common) {
            return Ok(Err(errno));
        }
        slot.publish(&self.resources)?;
        Ok(DONE)
    }

    fn connect(&mut self, index: u16, address: Option<SocketAddr>) -> Result<ReplyResult> {
        let slot = &mut self.sockets[index];
        if let Err(errno) = slot.connect(address, &mut self.resources) {
            return Ok(Err(errno));
        }
        // What a kernel has counted as sent on a stream before this is impossible, also if the
        // stream is connected at once.
        let word = self.resources.shared_area.device_counters(index)?;
        let is_stream = !matches!(slot.socket, Socket::Udp(_));
        if is_stream && slot.rings().is_some_and(|rings| !rings.is_current(word)) {
            self.misused(index)?;
            return Ok(DONE);
        }
        slot.publish(&self.resources)?;
        self.queue(index);
        Ok(DONE)
    }

    fn shut_down(&mut self, index: u16, how: u64) -> Result<ReplyResult> {
        let (receiving, sending) = match how {
            0 => (true, false),
            1 => (false, true),
            2 => (true, true),
            _ => return Ok(Err(Errno::INVAL)),
        };
        match self.sockets[index].shut_down(receiving, sending, &self.resources)? {
            Ok(progress) => self.apply(index, progress).map(|()| DONE),
            Err(errno) => Ok(Err(errno)),
        }
    }

    fn close(&mut self, index: u16, posted: u64) -> Result<ReplyResult> {
        let slot = &mut self.sockets[index];
        if let Socket::Listener(listener) = &mut slot.socket {
            listener.reap_accepted();
        }
        let progress = slot.close(posted, &self.resources)?;
        if progress != Progress::Release {
            self.retry_later(index);
        }
        self.apply(index, progress).map(|()| DONE)
    }

    /// A kernel aborts the connection of an RDMA stream.
    fn give_up(&mut self, index: u16, errno: u64) -> Result<ReplyResult> {
        let slot = &mut self.sockets[index];
        if let Socket::Rdma(rdma) = &mut slot.socket {
            let progress = rdma.give_up(&mut slot.common, errno, &mut self.resources)?;
            self.apply(index, progress)?;
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
        let slot = &mut self.sockets[index];
        let is_datagram = matches!(slot.socket, Socket::Udp(_));
        let options = &mut slot.common.options;
        let on = value != 0;
        let Some(fd) = &slot.common.fd else { return Ok(Err(Errno::INVAL)) };
        let done = match setting {
            SockOption::NoDelay if is_datagram => Err(Errno::OPNOTSUPP),
            SockOption::NoDelay => {
                options.no_delay = on;
                sockopt::set_tcp_nodelay(fd, on)
            }
            SockOption::Linger => {
                options.abort = value == 0;
                match value {
                    0 | i64::MIN..0 => Ok(()),
                    // Close never blocks, so a linger time cannot be honoured.
                    _ => Err(Errno::INVAL),
                }
            }
            SockOption::ReuseAddress => {
                options.reuse_address = on;
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
            // At close, the kernel of an RDMA stream must know whether to send FIN or let the host
            // reset.
            self.resources.publish_state(&slot.common)?;
        }
        Ok(done.map(|()| (0, None)))
    }

    /// Sets a ring size, rounded up to a power of two. `EISCONN` once bytes may have passed through
    /// it.
    fn set_size(&mut self, index: u16, setting: SockOption, value: i64) -> Result<ReplyResult> {
        // As `SockOptions::check`: kernels see sizes and counters as 32-bit numbers.
        let max_size = self.resources.options.arena.min(MAX_RING);
        let size = u64::try_from(value).ok().filter(|size| (1..=max_size).contains(size));
        let Some(size) = size.and_then(arena::rounded) else { return Ok(Err(Errno::INVAL)) };
        let slot = &mut self.sockets[index];
        let is_fixed = match &slot.socket {
            Socket::Tcp(_) | Socket::Rdma(_) => {
                slot.common.has(state::CONNECTED | state::CONNECTING)
            }
            Socket::Udp(udp) => udp.is_used(),
            Socket::Vacant | Socket::Listener(_) => false,
        };
        if is_fixed {
            return Ok(Err(Errno::ISCONN));
        }
        let before = slot.common.options;
        match setting {
            SockOption::SendBuffer => slot.common.options.send_size = size,
            _ => slot.common.options.receive_size = size,
        }
        match &mut slot.socket {
            Socket::Vacant | Socket::Listener(_) => return Ok(DONE),
            Socket::Tcp(tcp) => self.resources.free_rings(&mut tcp.rings),
            Socket::Rdma(rdma) => self.resources.free_rings(&mut rdma.rings),
            Socket::Udp(udp) => {
                self.resources.free_rings(&mut udp.rings);
                let allocated = self.resources.alloc_rings(&mut udp.rings, &slot.common.options);
                if let Err(errno) = allocated {
                    slot.common.options = before;
                    // The blocks that were just freed are free again.
                    let restored = self.resources.alloc_rings(&mut udp.rings, &before);
                    return Ok(Err(restored.err().unwrap_or(errno)));
                }
            }
        }
        slot.publish(&self.resources)?;
        Ok(DONE)
    }

    fn get(&mut self, index: u16, option: u32) -> ReplyResult {
        let setting = SockOption::from_raw(option).ok_or(Errno::NOPROTOOPT)?;
        let common = &self.sockets[index].common;
        let options = &common.options;
        let value = match setting {
            SockOption::SendBuffer => arena::rounded(options.send_size).unwrap_or(0) as i64,
            SockOption::ReceiveBuffer => arena::rounded(options.receive_size).unwrap_or(0) as i64,
            SockOption::NoDelay => i64::from(options.no_delay),
            SockOption::Linger if options.abort => 0,
            SockOption::Linger => -1,
            SockOption::Error => common.errno(),
            SockOption::ReuseAddress => i64::from(options.reuse_address),
            SockOption::KeepAlive | SockOption::Broadcast | SockOption::V6Only => {
                let fd = common.fd.as_ref().ok_or(Errno::INVAL)?;
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
        let fd = self.sockets[index].common.fd.as_ref().ok_or(Errno::NOTCONN)?;
        let name = query(fd)?.and_then(|name| SocketAddr::try_from(name).ok());
        name.map(|name| (0, Some(name))).ok_or(Errno::NOTCONN)
    }
}
