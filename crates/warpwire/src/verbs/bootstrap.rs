//! Out-of-band exchange of connection data: one line of JSON per message, over TCP.
//!
//! Each line carries a version number, so that incompatible peers fail with an error that says so.
//! Programs add data of their own (keys, addresses, sizes) as any type that serde serializes.

mod pingpong;

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use pingpong::PingpongHandshake;

use crate::error::{Error, Kind, Result};

/// Version of the line format.
const VERSION: u32 = 1;
/// Maximum length of a line in bytes; a longer one is malformed.
const MAX_LINE_LEN: u64 = 1 << 20;

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
    /// Maximum number of RDMA reads and atomics that it executes at a time (`max_dest_rd_atomic`).
    pub max_rd_atomic: u8,
    /// LID of its port on InfiniBand; 0 on Ethernet.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lid: u16,
    /// GID of its port where that is not an IP address; 0 otherwise.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub gid: u128,
}

fn is_zero<T: Default + PartialEq>(number: &T) -> bool {
    *number == T::default()
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
        let error = Error::new(Kind::Malformed, what).why(format!("not a warpwire message: {why}"));
        error.fix("check the port, and that the peer is warpwire")
    })?;
    if line.warpwire != VERSION {
        let why = format!("the peer has protocol version {}, not {VERSION}", line.warpwire);
        let error = Error::new(Kind::Unsupported, what).why(why);
        return Err(error.fix("use the same version on both ends"));
    }
    serde_json::from_value(line.words).map_err(|why| {
        let error = Error::new(Kind::Malformed, what).why(format!("unexpected content: {why}"));
        error.fix("use the same version and the same command on both ends")
    })
}

/// A TCP connection over which two ends exchange connection data, and messages of their own beside
/// the traffic of their queue pairs. Messages arrive in order.
#[derive(Debug)]
pub struct Bootstrap {
    reader: BufReader<TcpStream>,
    peer: SocketAddr,
}

impl Bootstrap {
    /// Accepts one connection. `timeout` limits the wait and, afterwards, each message.
    ///
    /// Sets the listener to non-blocking mode and polls it every millisecond.
    ///
    /// # Errors
    /// [`Kind::Timeout`] if no peer connects in time.
    pub fn accept(listener: &TcpListener, timeout: Duration) -> Result<Self> {
        let start = Instant::now();
        let failed = |why: &std::io::Error| Error::os("accept a peer", why);
        listener.set_nonblocking(true).map_err(|why| failed(&why))?;
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false).map_err(|why| failed(&why))?;
                    return Self::from_stream(stream, timeout);
                }
                Err(why) if why.kind() == std::io::ErrorKind::WouldBlock => {
                    if start.elapsed() >= timeout {
                        let error = Error::new(Kind::Timeout, "accept a peer");
                        let why = format!("no peer connected within {} s", timeout.as_secs_f64());
                        return Err(error.why(why).fix("start the peer with this address"));
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(why) => return Err(failed(&why)),
            }
        }
    }

    /// Connects to a listening peer, at the first address that the name resolves to. Retries every
    /// 5 ms until `timeout` has passed, as the peer may start later; `timeout` then applies to each
    /// message.
    ///
    /// # Errors
    /// If the name does not resolve, or the last attempt's failure once the time is over.
    pub fn connect(
        address: impl ToSocketAddrs + std::fmt::Debug,
        timeout: Duration,
    ) -> Result<Self> {
        let what = format!("connect to {address:?}");
        let mut found = address.to_socket_addrs().map_err(|why| Error::os(what.clone(), &why))?;
        let peer = found.next().ok_or_else(|| {
            Error::new(Kind::InvalidArgument, what.clone()).why("the name has no address")
        })?;
        let start = Instant::now();
        loop {
            let left = timeout.saturating_sub(start.elapsed()).max(Duration::from_millis(1));
            match TcpStream::connect_timeout(&peer, left) {
                Ok(stream) => return Self::from_stream(stream, timeout),
                Err(why) if start.elapsed() >= timeout => {
                    return Err(Error::os(what, &why).fix("start the listening end first"));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Uses an existing connection. `timeout` applies to each message; its minimum is 1 ms.
    pub fn from_stream(stream: TcpStream, timeout: Duration) -> Result<Self> {
        let failed = |why: &std::io::Error| Error::os("prepare a connection", why);
        stream.set_nodelay(true).map_err(|why| failed(&why))?;
        let peer = stream.peer_addr().map_err(|why| failed(&why))?;
        let mut bootstrap = Self { reader: BufReader::new(stream), peer };
        bootstrap.set_timeout(timeout)?;
        Ok(bootstrap)
    }

    /// Sets the timeout of each send and receive; its minimum is 1 ms.
    pub fn set_timeout(&mut self, timeout: Duration) -> Result<()> {
        let stream = self.reader.get_ref();
        let timeout = Some(timeout.max(Duration::from_millis(1)));
        let set = stream.set_read_timeout(timeout).and_then(|()| stream.set_write_timeout(timeout));
        set.map_err(|why| Error::os("prepare a connection", &why))
    }

    /// The TCP stream, to wait for input. Data may already have been read ahead of it into the
    /// buffer: ask [`is_readable`](Self::is_readable) first.
    pub fn stream(&self) -> &TcpStream {
        self.reader.get_ref()
    }

    /// The peer's address.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// The local address of the connection.
    pub fn local(&self) -> Result<SocketAddr> {
        let local = self.reader.get_ref().local_addr();
        local.map_err(|why| Error::os("query the local address", &why))
    }

    /// Sends a message. Blocks while the socket's send buffer is full.
    ///
    /// # Errors
    /// If the message does not serialize, or the connection fails or times out.
    pub fn send<T: Serialize>(&mut self, words: &T) -> Result<()> {
        let sent = self.reader.get_mut().write_all(encode_line(words)?.as_bytes());
        sent.map_err(|why| Error::os(format!("send to {}", self.peer), &why))
    }

    /// Waits up to `timeout` until the peer has sent data or closed the connection; returns whether
    /// it has. [`recv`](Self::recv) then blocks only for the rest of the line.
    pub fn is_readable(&self, timeout: Duration) -> Result<bool> {
        if !self.reader.buffer().is_empty() {
            return Ok(true);
        }
        crate::hca::EventFd::wait_readable(self.reader.get_ref(), timeout)
    }

    /// Receives a message.
    ///
    /// # Errors
    /// [`Kind::Timeout`] if none arrives in time, [`Kind::Freed`] if the peer closed the
    /// connection, [`Kind::Malformed`] or [`Kind::Unsupported`] if the peer uses another protocol
    /// or version.
    pub fn recv<T: DeserializeOwned>(&mut self) -> Result<T> {
        let what = || format!("receive from {}", self.peer);
        let mut text = Vec::new();
        let mut limited = std::io::Read::take(&mut self.reader, MAX_LINE_LEN);
        let read = limited.read_until(b'\n', &mut text);
        let count = read.map_err(|why| match why.kind() {
            std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
                Error::new(Kind::Timeout, what()).why("no message arrived in time")
            }
            _ => Error::os(what(), &why),
        })?;
        if count == 0 {
            let error = Error::new(Kind::Freed, what()).why("the peer closed the connection");
            return Err(error.fix("see the output of the peer"));
        }
        decode_line(&text).map_err(|error| error.during(what()))
    }

    /// Sends `local`, then receives the peer's message. Both ends must call it at the same point of
    /// their exchange.
    pub fn swap<T: Serialize + DeserializeOwned>(&mut self, local: &T) -> Result<T> {
        self.send(local)?;
        self.recv()
    }
}
