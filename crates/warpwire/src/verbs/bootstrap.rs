//! What two ends must know of each other, and a way to tell it: a line each over TCP.
//!
//! The line is JSON with a version in it, so that ends that do not understand each other say so. Programs add words
//! of their own (keys, addresses, sizes) as any type that serde knows.

mod pingpong;

use std::io::{BufRead, BufReader, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use pingpong::PingpongHandshake;

use crate::error::{Error, Kind, Result};

/// The version of the line.
const VERSION: u32 = 1;
/// The longest line.
const MAX_LINE_LEN: u64 = 1 << 20;

/// What a queue pair must know of its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpEndpoint {
    /// Where its packets go.
    pub address: SocketAddr,
    /// The queue pair's number.
    pub qpn: u32,
    /// The sequence number of its first request.
    pub psn: u32,
    /// The largest MTU that it takes, in bytes.
    pub mtu: u32,
    /// How many reads and atomics it answers at a time.
    pub max_rd_atomic: u8,
    /// The local identifier of its port, on InfiniBand; 0 elsewhere.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lid: u16,
    /// The address of its port, where that is no IP address; else 0.
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

/// Words as a line of this language, with its end.
pub(crate) fn encode_line<T: Serialize>(words: &T) -> Result<String> {
    let line = Line { warpwire: VERSION, words };
    let mut text = serde_json::to_string(&line)
        .map_err(|why| Error::new(Kind::InvalidArgument, "tell the peer").why(why.to_string()))?;
    text.push('\n');
    Ok(text)
}

/// The words of a line.
pub(crate) fn decode_line<T: DeserializeOwned>(line: &[u8]) -> Result<T> {
    let what = "hear a peer";
    let line: Line<serde_json::Value> = serde_json::from_slice(line).map_err(|why| {
        let error = Error::new(Kind::Malformed, what).why(format!("not our language: {why}"));
        error.fix("check that the other end is warpwire, and the port")
    })?;
    if line.warpwire != VERSION {
        let why = format!("it speaks version {}, we speak {VERSION}", line.warpwire);
        let error = Error::new(Kind::Unsupported, what).why(why);
        return Err(error.fix("use one version on both ends"));
    }
    serde_json::from_value(line.words).map_err(|why| {
        let error = Error::new(Kind::Malformed, what).why(format!("not what was expected: {why}"));
        error.fix("use one version, and the same command, on both ends")
    })
}

/// A conversation between two ends, before and beside their queue pairs.
#[derive(Debug)]
pub struct Bootstrap {
    reader: BufReader<TcpStream>,
    peer: SocketAddr,
}

impl Bootstrap {
    /// Waits for one peer.
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
                        let why = format!("none came in {} s", timeout.as_secs_f64());
                        return Err(error.why(why).fix("start the other end, with this address"));
                    }
                    std::thread::sleep(Duration::from_millis(1));
                }
                Err(why) => return Err(failed(&why)),
            }
        }
    }

    /// Connects to a peer that waits; tries again until the time is over, as the peer may start later.
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
                    return Err(Error::os(what, &why).fix("start the other end first"));
                }
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Over a connection that is there. `timeout`, at least a millisecond, is for each word.
    pub fn from_stream(stream: TcpStream, timeout: Duration) -> Result<Self> {
        let failed = |why: &std::io::Error| Error::os("prepare a connection", why);
        stream.set_nodelay(true).map_err(|why| failed(&why))?;
        let peer = stream.peer_addr().map_err(|why| failed(&why))?;
        let mut bootstrap = Self { reader: BufReader::new(stream), peer };
        bootstrap.set_timeout(timeout)?;
        Ok(bootstrap)
    }

    /// Changes how long each word may take; at least a millisecond.
    pub fn set_timeout(&mut self, timeout: Duration) -> Result<()> {
        let stream = self.reader.get_ref();
        let timeout = Some(timeout.max(Duration::from_millis(1)));
        let set = stream.set_read_timeout(timeout).and_then(|()| stream.set_write_timeout(timeout));
        set.map_err(|why| Error::os("prepare a connection", &why))
    }

    /// The connection itself, to wait for what comes; words may have been read ahead of it, which
    /// [`is_readable`](Self::is_readable) knows.
    pub fn stream(&self) -> &TcpStream {
        self.reader.get_ref()
    }

    /// The peer's address.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Our own address, as the peer sees it.
    pub fn local(&self) -> Result<SocketAddr> {
        let local = self.reader.get_ref().local_addr();
        local.map_err(|why| Error::os("ask for our own address", &why))
    }

    /// Tells the peer something.
    pub fn send<T: Serialize>(&mut self, words: &T) -> Result<()> {
        let sent = self.reader.get_mut().write_all(encode_line(words)?.as_bytes());
        sent.map_err(|why| Error::os(format!("tell {}", self.peer), &why))
    }

    /// Whether the peer has said something, or hung up, within that time: then [`recv`](Self::hear) returns at once,
    /// or as soon as the rest of the line is there.
    pub fn is_readable(&self, timeout: Duration) -> Result<bool> {
        if !self.reader.buffer().is_empty() {
            return Ok(true);
        }
        crate::hca::EventFd::wait_readable(self.reader.get_ref(), timeout)
    }

    /// Hears what the peer tells.
    pub fn recv<T: DeserializeOwned>(&mut self) -> Result<T> {
        let what = || format!("hear {}", self.peer);
        let mut text = Vec::new();
        let mut limited = std::io::Read::take(&mut self.reader, MAX_LINE_LEN);
        let read = limited.read_until(b'\n', &mut text);
        let count = read.map_err(|why| match why.kind() {
            std::io::ErrorKind::WouldBlock | std::io::ErrorKind::TimedOut => {
                Error::new(Kind::Timeout, what()).why("it says nothing")
            }
            _ => Error::os(what(), &why),
        })?;
        if count == 0 {
            let error = Error::new(Kind::Freed, what()).why("it has hung up");
            return Err(error.fix("look at what the other end printed"));
        }
        decode_line(&text).map_err(|error| error.during(what()))
    }

    /// Tells and hears: both ends do it at the same point.
    pub fn swap<T: Serialize + DeserializeOwned>(&mut self, local: &T) -> Result<T> {
        self.send(local)?;
        self.recv()
    }
}
