//! What kernels ask for: each request is answered at once, whatever comes of it later.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::time::Instant;

use rustix::fd::OwnedFd;
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, sockopt};

use super::agent::{Agent, LAST_WORDS};
use super::arena;
use super::layout::{
    ADDRESS_LEN, Op, Setting, address_bytes, address_from, record, request, state,
};
use super::ledger::Bytes;
use super::socket::{Socket, Sort};
use crate::error::Result;

/// What comes of a request: a number of 0 or more, perhaps an address, or an errno.
type Outcome = std::result::Result<(i64, Option<SocketAddr>), Errno>;

const DONE: Outcome = Ok((0, None));
/// The most connections that may wait at a listener.
const LONGEST_QUEUE: u64 = 4096;
/// Requests answered before sockets are looked at again.
const AT_ONCE: u32 = 64;

/// A request, as a kernel wrote it.
struct Request {
    op: u32,
    handle: i32,
    value: u64,
    option: u32,
    address: Option<SocketAddr>,
    /// What a kernel that closes has sent and read.
    bytes: Bytes,
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
            bytes: Bytes { sent: wide(request::SENT), received: wide(request::CONSUMED) },
        }
    }
}

impl Agent {
    /// Answers the requests that are there.
    pub(super) fn take_requests(&mut self) -> Result<bool> {
        let mut bytes = [0; request::LEN as usize];
        let mut worked = false;
        for _ in 0..AT_ONCE {
            if !self.ground.request(self.next_request, &mut bytes)? {
                break;
            }
            let (result, address) = match self.answer(&Request::read(&bytes))? {
                Ok((result, address)) => (result, address),
                Err(errno) => (-i64::from(errno.raw_os_error()), None),
            };
            self.ground.reply(self.next_request, result, &address_bytes(address))?;
            self.counters.requests.fetch_add(1, Ordering::Relaxed);
            self.next_request += 1;
            worked = true;
        }
        Ok(worked)
    }

    fn answer(&mut self, request: &Request) -> Result<Outcome> {
        let Some(op) = Op::from_raw(request.op) else { return Ok(Err(Errno::NOSYS)) };
        if op == Op::Socket {
            return self.open(request.value);
        }
        let index = match self.find(request.handle) {
            Ok(index) => index,
            Err(errno) => return Ok(Err(errno)),
        };
        // What was sent before the request is part of what it is about.
        self.look_at(index)?;
        match op {
            Op::Socket => Ok(Err(Errno::INVAL)),
            Op::Bind => self.bind(index, request.address),
            Op::Listen => self.listen(index, request.value),
            Op::Connect => self.connect(index, request.address),
            Op::Shutdown => self.shut_down(index, request.value),
            Op::Close => {
                let generation = self.socket(index).generation;
                self.counters.warp.close(index, generation, Some(request.bytes));
                self.close(index, request.value)
            }
            Op::SetOption => self.set(index, request.option, request.value as i64),
            Op::GetOption => Ok(self.get(index, request.option)),
            Op::LocalName => Ok(self.name(index, |fd| rustix::net::getsockname(fd).map(Some))),
            Op::PeerName => Ok(self.name(index, |fd| rustix::net::getpeername(fd))),
            Op::Fail => self.give_up(index, request.value).map(|_| DONE),
        }
    }

    fn open(&mut self, value: u64) -> Result<Outcome> {
        let v6 = match value & 0xff {
            4 => false,
            6 => true,
            _ => return Ok(Err(Errno::AFNOSUPPORT)),
        };
        let (sort, is_warp) = match value >> 8 {
            1 => (Sort::Stream, false),
            2 => (Sort::Datagram, false),
            3 if self.berths.is_some() => (Sort::Stream, true),
            // That family is switched off.
            3 => return Ok(Err(Errno::OPNOTSUPP)),
            _ => return Ok(Err(Errno::SOCKTNOSUPPORT)),
        };
        let fd = match new_descriptor(v6, sort) {
            Ok(fd) => fd,
            Err(errno) => return Ok(Err(errno)),
        };
        let Some(index) = self.take_place()? else { return Ok(Err(Errno::MFILE)) };
        let socket = &mut self.sockets[usize::from(index)];
        (socket.v6, socket.sort, socket.fd) = (v6, sort, Some(fd));
        socket.is_warp = is_warp;
        if sort == Sort::Datagram {
            socket.flags |= state::DATAGRAM;
            socket.writable = true;
            if let Err(errno) = self.give_rings(index).and_then(|()| self.watch(index)) {
                self.vacate(index)?;
                return Ok(Err(errno));
            }
        }
        self.tell_line(index)?;
        Ok(Ok((i64::from(self.sockets[usize::from(index)].handle(index)), None)))
    }

    fn socket(&mut self, index: u16) -> &mut Socket {
        &mut self.sockets[usize::from(index)]
    }

    /// The descriptor, and the address if it is of the socket's family.
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

    fn bind(&mut self, index: u16, address: Option<SocketAddr>) -> Result<Outcome> {
        let socket = &self.sockets[usize::from(index)];
        let reuse = socket.sort == Sort::Stream && socket.wishes.reuse_address;
        let outcome = self.with_address(index, address).and_then(|(fd, address)| {
            if reuse {
                sockopt::set_socket_reuseaddr(fd, true)?;
            }
            rustix::net::bind(fd, &address)
        });
        Ok(outcome.map(|()| (0, None)))
    }

    fn listen(&mut self, index: u16, backlog: u64) -> Result<Outcome> {
        let socket = self.socket(index);
        if socket.sort == Sort::Datagram {
            return Ok(Err(Errno::OPNOTSUPP));
        }
        if socket.sort == Sort::Listener || socket.has(state::CONNECTED | state::CONNECTING) {
            return Ok(Err(Errno::INVAL));
        }
        let Some(fd) = &socket.fd else { return Ok(Err(Errno::INVAL)) };
        let backlog = backlog.clamp(1, LONGEST_QUEUE);
        if let Err(errno) = rustix::net::listen(fd, backlog as i32) {
            return Ok(Err(errno));
        }
        // A listener's ring holds connections; the sizes that it was told are for those.
        let size = arena::rounded(backlog * record::LEN).unwrap_or(arena::SMALLEST);
        let Some(at) = self.receive_arena.take(size) else { return Ok(Err(Errno::NOBUFS)) };
        let socket = self.socket(index);
        socket.receive_ring = (at, size);
        socket.sort = Sort::Listener;
        socket.flags |= state::LISTENING;
        if let Err(errno) = self.watch(index) {
            return Ok(Err(errno));
        }
        self.tell_line(index)?;
        Ok(DONE)
    }

    fn connect(&mut self, index: u16, address: Option<SocketAddr>) -> Result<Outcome> {
        if let Err(errno) = self.prepare_to_connect(index) {
            return Ok(Err(errno));
        }
        let no_delay = self.sockets[usize::from(index)].wishes.no_delay;
        let is_stream = self.sockets[usize::from(index)].sort == Sort::Stream;
        let outcome = self.with_address(index, address).and_then(|(fd, address)| {
            if is_stream && no_delay {
                sockopt::set_tcp_nodelay(fd, true)?;
            }
            rustix::net::connect(fd, &address)
        });
        let socket = self.socket(index);
        match outcome {
            // TCP stands, and the ends have still to meet.
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
        // Only now: a descriptor that is not connected counts as hung up.
        if let Err(errno) = self.watch(index) {
            return Ok(Err(errno));
        }
        self.tell_line(index)?;
        self.queue(index);
        Ok(DONE)
    }

    fn prepare_to_connect(&mut self, index: u16) -> std::result::Result<(), Errno> {
        let socket = self.socket(index);
        if socket.sort == Sort::Datagram {
            return Ok(());
        }
        if socket.sort == Sort::Listener {
            return Err(Errno::OPNOTSUPP);
        }
        if socket.has(state::CONNECTING) {
            return Err(Errno::ALREADY);
        }
        if socket.has(state::CONNECTED) {
            return Err(Errno::ISCONN);
        }
        if socket.errno() != 0 {
            // It failed before; with another descriptor it may succeed.
            socket.fd = Some(new_descriptor(socket.v6, Sort::Stream)?);
            (socket.flags, socket.watched, socket.end_seen) = (0, false, false);
            socket.send_window = 0;
        }
        self.give_rings(index)
    }

    fn shut_down(&mut self, index: u16, how: u64) -> Result<Outcome> {
        let socket = self.socket(index);
        if how > 2 {
            return Ok(Err(Errno::INVAL));
        }
        if !socket.has(state::CONNECTED) {
            return Ok(Err(Errno::NOTCONN));
        }
        if how != 1 {
            // The peer must not wait for a reader that is not there: what still comes is thrown away.
            socket.deaf = !socket.is_warp && !socket.has(state::RECEIVE_END);
            socket.flags |= state::RECEIVE_END;
        }
        if socket.is_warp {
            // Its kernel tells the peer.
            socket.flags |= if how != 0 { state::SEND_END } else { 0 };
            self.tell_state(index)?;
            return Ok(DONE);
        }
        if how != 0 {
            socket.shut_send = true;
        }
        self.tell_state(index)?;
        self.finish(index)?;
        self.queue(index);
        Ok(DONE)
    }

    fn close(&mut self, index: u16, posted: u64) -> Result<Outcome> {
        self.forget_taken(index);
        let socket = self.socket(index);
        socket.closing = Some(Instant::now() + LAST_WORDS);
        if socket.is_warp && socket.sort == Sort::Stream && socket.has(state::CONNECTED) {
            socket.warp.posted = posted;
            self.finish_warp(index)?;
            if self.sockets[usize::from(index)].closing.is_some() {
                self.look_again_at(index);
            }
            return Ok(DONE);
        }
        let sends_on = socket.sort != Sort::Listener
            && socket.fd.is_some()
            && socket.unsent() > 0
            && (socket.has(state::CONNECTED) || socket.sort == Sort::Datagram);
        if !sends_on {
            self.vacate(index)?;
            return Ok(DONE);
        }
        self.finish(index)?;
        if self.sockets[usize::from(index)].closing.is_some() {
            self.look_again_at(index);
            self.queue(index);
        }
        Ok(DONE)
    }

    fn set(&mut self, index: u16, option: u32, value: i64) -> Result<Outcome> {
        let Some(setting) = Setting::from_raw(option) else {
            return Ok(Err(Errno::NOPROTOOPT));
        };
        if matches!(setting, Setting::SendBuffer | Setting::ReceiveBuffer) {
            return self.set_size(index, setting, value);
        }
        let socket = self.socket(index);
        let on = value != 0;
        let Some(fd) = &socket.fd else { return Ok(Err(Errno::INVAL)) };
        let done = match setting {
            Setting::NoDelay if socket.sort == Sort::Datagram => Err(Errno::OPNOTSUPP),
            Setting::NoDelay => {
                socket.wishes.no_delay = on;
                sockopt::set_tcp_nodelay(fd, on)
            }
            Setting::Linger => {
                socket.wishes.abort = value == 0;
                match value {
                    0 | i64::MIN..0 => Ok(()),
                    // Closing never waits, so that there is nothing in between.
                    _ => Err(Errno::INVAL),
                }
            }
            Setting::ReuseAddress => {
                socket.wishes.reuse_address = on;
                sockopt::set_socket_reuseaddr(fd, on)
            }
            Setting::KeepAlive => sockopt::set_socket_keepalive(fd, on),
            Setting::Broadcast => sockopt::set_socket_broadcast(fd, on),
            Setting::OnlyV6 => sockopt::set_ipv6_v6only(fd, on),
            // These are the kernel's own.
            Setting::NonBlocking | Setting::SendTimeout | Setting::ReceiveTimeout => {
                Err(Errno::INVAL)
            }
            Setting::Error | Setting::SendBuffer | Setting::ReceiveBuffer => Err(Errno::NOPROTOOPT),
        };
        if setting == Setting::Linger {
            // Kernels of the family `warp` must know whether they tell the peer of an end.
            self.tell_state(index)?;
        }
        Ok(done.map(|()| (0, None)))
    }

    /// Rings have the size that was asked for, rounded up; once bytes went through them they stay.
    fn set_size(&mut self, index: u16, setting: Setting, value: i64) -> Result<Outcome> {
        let largest = self.options.arena;
        let socket = self.socket(index);
        let size = u64::try_from(value).ok().filter(|size| (1..=largest).contains(size));
        let Some(size) = size.and_then(arena::rounded) else { return Ok(Err(Errno::INVAL)) };
        let fixed = match socket.sort {
            Sort::Stream => socket.has(state::CONNECTED | state::CONNECTING),
            Sort::Datagram => socket.received != 0 || socket.sent != 0,
            Sort::Listener => false,
        };
        if fixed {
            return Ok(Err(Errno::ISCONN));
        }
        let before = socket.wishes;
        match setting {
            Setting::SendBuffer => socket.wishes.send_size = size,
            _ => socket.wishes.receive_size = size,
        }
        if socket.sort == Sort::Listener {
            return Ok(DONE);
        }
        self.take_rings(index);
        if self.sockets[usize::from(index)].sort == Sort::Datagram
            && let Err(errno) = self.give_rings(index)
        {
            self.socket(index).wishes = before;
            // What it had a moment ago is there again.
            if let Err(errno) = self.give_rings(index) {
                return Ok(Err(errno));
            }
            return Ok(Err(errno));
        }
        self.tell_line(index)?;
        Ok(DONE)
    }

    fn get(&mut self, index: u16, option: u32) -> Outcome {
        let setting = Setting::from_raw(option).ok_or(Errno::NOPROTOOPT)?;
        let socket = self.socket(index);
        let value = match setting {
            Setting::SendBuffer => arena::rounded(socket.wishes.send_size).unwrap_or(0) as i64,
            Setting::ReceiveBuffer => {
                arena::rounded(socket.wishes.receive_size).unwrap_or(0) as i64
            }
            Setting::NoDelay => i64::from(socket.wishes.no_delay),
            Setting::Linger if socket.wishes.abort => 0,
            Setting::Linger => -1,
            Setting::Error => socket.errno(),
            Setting::ReuseAddress => i64::from(socket.wishes.reuse_address),
            Setting::KeepAlive | Setting::Broadcast | Setting::OnlyV6 => {
                let fd = socket.fd.as_ref().ok_or(Errno::INVAL)?;
                i64::from(match setting {
                    Setting::KeepAlive => sockopt::socket_keepalive(fd)?,
                    Setting::Broadcast => sockopt::socket_broadcast(fd)?,
                    _ => sockopt::ipv6_v6only(fd)?,
                })
            }
            Setting::NonBlocking | Setting::SendTimeout | Setting::ReceiveTimeout => {
                return Err(Errno::INVAL);
            }
        };
        Ok((value, None))
    }

    fn name(
        &mut self,
        index: u16,
        ask: impl Fn(&OwnedFd) -> rustix::io::Result<Option<rustix::net::SocketAddrAny>>,
    ) -> Outcome {
        let fd = self.socket(index).fd.as_ref().ok_or(Errno::NOTCONN)?;
        let name = ask(fd)?.and_then(|name| SocketAddr::try_from(name).ok());
        name.map(|name| (0, Some(name))).ok_or(Errno::NOTCONN)
    }
}

fn new_descriptor(v6: bool, sort: Sort) -> std::result::Result<OwnedFd, Errno> {
    let family = if v6 { AddressFamily::INET6 } else { AddressFamily::INET };
    let kind = match sort {
        Sort::Datagram => SocketType::DGRAM,
        Sort::Stream | Sort::Listener => SocketType::STREAM,
    };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    rustix::net::socket_with(family, kind, flags, None)
}
