//! Out-of-band exchange of connection data: one line of JSON per message, over TCP.
//!
//! Each line carries a version number, so that incompatible peers fail with an error that says so.
//! Programs add data of their own (keys, addresses, sizes) as any type that serde serializes.
//!
//! Any program can connect to a port, so nothing that arrives is trusted: a timeout covers a whole
//! message and not each read, lines are bounded, and text for people is freed of control
//! characters. [`BootstrapListener`] serves peers while strangers dawdle.

mod listener;
mod pingpong;

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, poll};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use listener::BootstrapListener;
pub use pingpong::PingpongHandshake;

use crate::error::{Error, Kind, Result};
use crate::units::printable;

/// Version of the line format.
const VERSION: u32 = 1;
/// Maximum length of a line in bytes; a longer one is malformed.
const MAX_LINE_LEN: usize = 1 << 20;
/// Bytes that one read takes from the socket.
const READ_LEN: usize = 4096;

/// Connection data: what a queue pair must know to connect to its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpEndpoint {
    /// The address that the peer's packets are sent to. On hardware the port is 4791.
    pub address: SocketAddr,
    /// Queue pair number, 24 bits.
    pub qpn: u32,
    /// Packet sequence number of its first request, 24 bits.
    pub psn: u32,
    /// Maximum path MTU in bytes; a connection uses the smaller of both ends.
    pub mtu: u32,
    /// Maximum path MTU to an end at the same IP address, whose packets do not pass an interface;
    /// such connections use the smaller of both ends. 0 if it is not known.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub mtu_on_host: u32,
    /// Maximum number of RDMA reads and atomics that it executes at a time (`max_dest_rd_atomic`).
    pub max_rd_atomic: u8,
    /// The UDP port that it sends from; packets from other ports are discarded. 0 if that is not
    /// known, as with hardware.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub source_port: u16,
    /// LID of its port on InfiniBand; 0 on Ethernet.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lid: u16,
    /// GID of its port where that is not an IP address; 0 otherwise.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub gid: u128,
    /// It supports selective repeat, an extension of Warpwire's software HCA. Connections use it if
    /// both ends do; other devices and older versions do not have this field.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub selective_repeat: bool,
}

impl QpEndpoint {
    /// The path MTU of a connection to another endpoint, in bytes: the smaller of both. It is
    /// larger if both are at one IP address and packets therefore pass no interface.
    ///
    /// ```
    /// use warpwire::verbs::QpEndpoint;
    /// let end = |address: &str, mtu, mtu_on_host| QpEndpoint {
    ///     address: address.parse().unwrap(), qpn: 1, psn: 1, mtu, mtu_on_host, max_rd_atomic: 1,
    ///     source_port: 0, lid: 0, gid: 0, selective_repeat: false,
    /// };
    /// let ours = end("192.0.2.1:4000", 1024, 4096);
    /// assert_eq!(ours.path_mtu(&end("192.0.2.1:5000", 1024, 2048)), 2048);
    /// assert_eq!(ours.path_mtu(&end("192.0.2.2:5000", 4096, 4096)), 1024, "another host");
    /// assert_eq!(ours.path_mtu(&end("192.0.2.1:5000", 512, 0)), 512, "it does not say");
    /// ```
    pub fn path_mtu(&self, peer: &Self) -> u32 {
        let on_host = self.mtu_on_host.min(peer.mtu_on_host);
        match self.address.ip() == peer.address.ip() && on_host > 0 {
            true => on_host,
            false => self.mtu.min(peer.mtu),
        }
    }
}

fn is_zero<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

#[derive(Serialize, Deserialize)]
struct Line<T> {
    warpwire: u32,
    words: T,
}

/// Serializes `words` as one line, with its line feed.
pub(crate) fn encode_line<T: Serialize>(words: &T) -> Result<String> {
    let line = Line { warpwire: VERSION, words };
    let mut text = serde_json::to_string(&line).map_err(|why| {
        Error::new(Kind::InvalidArgument, "encode a message").why(why.to_string())
    })?;
    text.push('\n');
    Ok(text)
}

/// Parses one line.
pub(crate) fn decode_line<T: DeserializeOwned>(line: &[u8]) -> Result<T> {
    let what = "read a message of the peer";
    let line: Line<serde_json::Value> = serde_json::from_slice(line).map_err(|why| {
        let why = format!("not a warpwire message: {}", printable(&why.to_string()));
        let error = Error::new(Kind::Malformed, what).why(why);
        error.fix("check the port, and that the peer is warpwire")
    })?;
    if line.warpwire != VERSION {
        let why = format!("the peer has protocol version {}, not {VERSION}", line.warpwire);
        let error = Error::new(Kind::Unsupported, what).why(why);
        return Err(error.fix("use the same version on both ends"));
    }
    serde_json::from_value(line.words).map_err(|why| {
        // The reason quotes what the peer sent.
        let why = format!("unexpected content: {}", printable(&why.to_string()));
        let error = Error::new(Kind::Malformed, what).why(why);
        error.fix("use the same version and the same command on both ends")
    })
}

/// A TCP connection over which two ends exchange connection data, and messages of their own beside
/// the traffic of their queue pairs. Messages arrive in order.
#[derive(Debug)]
pub struct Bootstrap {
    /// Non-blocking: waits are polls with a deadline.
    stream: TcpStream,
    /// Received, not yet parsed.
    buffered: Vec<u8>,
    /// Length of the part of `buffered` that contains no line feed.
    scanned: usize,
    peer: SocketAddr,
    timeout: Duration,
}

impl Bootstrap {
    /// Accepts one connection, whoever makes it. `timeout` limits the wait and, afterwards, each
    /// message. A port that strangers can reach needs a [`BootstrapListener`].
    ///
    /// Sets the listener to non-blocking mode.
    ///
    /// # Errors
    /// [`Kind::Timeout`] if no peer connects in time.
    pub fn accept(listener: &TcpListener, timeout: Duration) -> Result<Self> {
        let deadline = Instant::now() + timeout;
        let failed = |why: &std::io::Error| Error::os("accept a peer", why);
        listener.set_nonblocking(true).map_err(|why| failed(&why))?;
        loop {
            match listener.accept() {
                Ok((stream, _)) => return Self::from_stream(stream, timeout),
                Err(why) if why.kind() == ErrorKind::WouldBlock => {
                    if !wait_until(listener, PollFlags::IN, deadline)? {
                        return Err(listener::nobody(timeout));
                    }
                }
                Err(why) => return Err(failed(&why)),
            }
        }
    }

    /// Connects to a listening peer: tries every address that the name resolves to, and all of
    /// them again every 5 ms until `timeout` has passed, as the peer may start later. `timeout`
    /// then applies to each message.
    ///
    /// # Errors
    /// If the name does not resolve, or the last attempt's failure once the time is over.
    pub fn connect(
        address: impl ToSocketAddrs + std::fmt::Debug,
        timeout: Duration,
    ) -> Result<Self> {
        let what = format!("connect to {address:?}");
        let found = address.to_socket_addrs().map_err(|why| Error::os(what.clone(), &why))?;
        let found: Vec<SocketAddr> = found.collect();
        let deadline = Instant::now() + timeout;
        loop {
            match connect_any(&found, deadline, timeout) {
                Ok(stream) => return Self::from_stream(stream, timeout),
                Err(why) if why.kind() == ErrorKind::AddrNotAvailable && found.is_empty() => {
                    let error = Error::new(Kind::InvalidArgument, what);
                    return Err(error.why("the name has no address"));
                }
                Err(why) if Instant::now() >= deadline => {
                    return Err(Error::os(what, &why).fix("start the listening end first"));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Uses an existing connection, in non-blocking mode. `timeout` applies to each message; its
    /// minimum is 1 ms.
    pub fn from_stream(stream: TcpStream, timeout: Duration) -> Result<Self> {
        let failed = |why: &std::io::Error| Error::os("prepare a connection", why);
        stream.set_nodelay(true).map_err(|why| failed(&why))?;
        stream.set_nonblocking(true).map_err(|why| failed(&why))?;
        let peer = stream.peer_addr().map_err(|why| failed(&why))?;
        let mut bootstrap =
            Self { stream, buffered: Vec::new(), scanned: 0, peer, timeout: Duration::ZERO };
        bootstrap.set_timeout(timeout);
        Ok(bootstrap)
    }

    /// Sets the timeout of each message, from its first byte to its last; its minimum is 1 ms.
    pub fn set_timeout(&mut self, timeout: Duration) {
        self.timeout = timeout.max(Duration::from_millis(1));
    }

    /// The TCP stream, to wait for input. Data may already have been read ahead of it into the
    /// buffer: ask [`is_readable`](Self::is_readable) first.
    pub fn stream(&self) -> &TcpStream {
        &self.stream
    }

    /// The peer's address.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// The local address of the connection.
    pub fn local(&self) -> Result<SocketAddr> {
        let local = self.stream.local_addr();
        local.map_err(|why| Error::os("query the local address", &why))
    }

    /// Sends a message. Blocks while the socket's send buffer is full.
    ///
    /// # Errors
    /// If the message does not serialize, or the connection fails or times out.
    pub fn send<T: Serialize>(&mut self, words: &T) -> Result<()> {
        let deadline = self.deadline();
        self.send_bytes(encode_line(words)?.as_bytes(), deadline)
    }

    /// Waits up to `timeout` until the peer has sent data or closed the connection; returns whether
    /// it has. [`recv`](Self::recv) then blocks only for the rest of the line.
    pub fn is_readable(&self, timeout: Duration) -> Result<bool> {
        if !self.buffered.is_empty() {
            return Ok(true);
        }
        crate::hca::EventFd::wait_readable(&self.stream, timeout)
    }

    /// Receives a message.
    ///
    /// # Errors
    /// [`Kind::Timeout`] if none is complete in time, [`Kind::Freed`] if the peer closed the
    /// connection, [`Kind::Malformed`] or [`Kind::Unsupported`] if the peer uses another protocol
    /// or version.
    pub fn recv<T: DeserializeOwned>(&mut self) -> Result<T> {
        let deadline = self.deadline();
        self.recv_until(deadline)
    }

    /// Receives a message if one is complete; `None` if not. Does not block.
    ///
    /// # Errors
    /// As for [`recv`](Self::recv).
    pub fn try_recv<T: DeserializeOwned>(&mut self) -> Result<Option<T>> {
        loop {
            if let Some(line) = self.take_line()? {
                return self.decode(&line).map(Some);
            }
            if !self.fill()? {
                return Ok(None);
            }
        }
    }

    /// Sends `local`, then receives the peer's message, both within one timeout. Both ends must
    /// call it at the same point of their exchange.
    pub fn swap<T: Serialize + DeserializeOwned>(&mut self, local: &T) -> Result<T> {
        let deadline = self.deadline();
        self.send_bytes(encode_line(local)?.as_bytes(), deadline)?;
        self.recv_until(deadline)
    }

    fn deadline(&self) -> Instant {
        Instant::now() + self.timeout
    }

    fn recv_until<T: DeserializeOwned>(&mut self, deadline: Instant) -> Result<T> {
        loop {
            if let Some(line) = self.take_line()? {
                return self.decode(&line);
            }
            self.fill_until(deadline)?;
        }
    }

    fn decode<T: DeserializeOwned>(&self, line: &[u8]) -> Result<T> {
        decode_line(line).map_err(|error| error.during(self.what()))
    }

    fn what(&self) -> String {
        format!("receive from {}", self.peer)
    }

    /// Takes a line off the buffer, if one is complete.
    fn take_line(&mut self) -> Result<Option<Vec<u8>>> {
        let end = self.buffered[self.scanned..].iter().position(|byte| *byte == b'\n');
        let Some(end) = end else {
            self.scanned = self.buffered.len();
            if self.scanned < MAX_LINE_LEN {
                return Ok(None);
            }
            let why = format!("a line is longer than {MAX_LINE_LEN} bytes");
            let error = Error::new(Kind::Malformed, self.what()).why(why);
            return Err(error.fix("check the port, and that the peer is warpwire"));
        };
        let rest = self.buffered.split_off(self.scanned + end + 1);
        self.scanned = 0;
        Ok(Some(std::mem::replace(&mut self.buffered, rest)))
    }

    /// Reads once into the buffer; false if nothing is there.
    fn fill(&mut self) -> Result<bool> {
        let mut bytes = [0; READ_LEN];
        loop {
            match self.stream.read(&mut bytes) {
                Ok(0) => {
                    let error = Error::new(Kind::Freed, self.what());
                    let error = error.why("the peer closed the connection");
                    return Err(error.fix("see the output of the peer"));
                }
                Ok(count) => {
                    self.buffered.extend_from_slice(&bytes[..count]);
                    return Ok(true);
                }
                Err(why) if why.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(why) if why.kind() == ErrorKind::Interrupted => {}
                Err(why) => return Err(Error::os(self.what(), &why)),
            }
        }
    }

    /// Reads at least a byte into the buffer.
    fn fill_until(&mut self, deadline: Instant) -> Result<()> {
        // Also where bytes keep coming: a peer that drips them would never meet an empty socket.
        while Instant::now() < deadline {
            if self.fill()? {
                return Ok(());
            }
            wait_until(&self.stream, PollFlags::IN, deadline)?;
        }
        Err(Error::new(Kind::Timeout, self.what()).why("no complete message arrived in time"))
    }

    fn send_bytes(&mut self, mut bytes: &[u8], deadline: Instant) -> Result<()> {
        let what = || format!("send to {}", self.peer);
        while !bytes.is_empty() {
            match (&self.stream).write(bytes) {
                Ok(count) => bytes = &bytes[count..],
                Err(why) if why.kind() == ErrorKind::Interrupted => {}
                Err(why) if why.kind() == ErrorKind::WouldBlock => {
                    if !wait_until(&self.stream, PollFlags::OUT, deadline)? {
                        let error = Error::new(Kind::Timeout, what());
                        return Err(error.why("the peer does not read"));
                    }
                }
                Err(why) => return Err(Error::os(what(), &why)),
            }
        }
        Ok(())
    }
}

/// Waits for an event; false if the deadline has passed.
fn wait_until(fd: &impl std::os::fd::AsFd, what: PollFlags, deadline: Instant) -> Result<bool> {
    let left = deadline.saturating_duration_since(Instant::now());
    if left.is_zero() {
        return Ok(false);
    }
    poll_for(&mut [PollFd::new(fd, what)], left)?;
    Ok(true)
}

/// Waits up to `timeout` for an event of any of `fds`.
fn poll_for(fds: &mut [PollFd<'_>], timeout: Duration) -> Result<()> {
    let timeout = rustix::event::Timespec {
        tv_sec: timeout.as_secs().min(1 << 30) as i64,
        tv_nsec: timeout.subsec_nanos().into(),
    };
    match poll(fds, Some(&timeout)) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(why) => Err(Error::os("wait for a peer", &why.into())),
    }
}

/// Connects to the first of several addresses that accepts, none for longer than `each`.
///
/// # Errors
/// That of the last address.
pub(crate) fn connect_any(
    addresses: &[SocketAddr],
    deadline: Instant,
    each: Duration,
) -> std::io::Result<TcpStream> {
    let mut last = ErrorKind::AddrNotAvailable.into();
    for address in addresses {
        let left = deadline.saturating_duration_since(Instant::now()).min(each);
        match TcpStream::connect_timeout(address, left.max(Duration::from_millis(1))) {
            Ok(stream) => return Ok(stream),
            Err(why) => last = why,
        }
    }
    Err(last)
}
