//! Messages over the TCP connection between two agents. It is made before queue pairs are
//! connected, and stays open while they are: its end tells that the other side has gone.

use std::net::{SocketAddr, TcpStream};
use std::time::Duration;

use rustix::net::sockopt;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Kind, Result};
use crate::units::printable;
use crate::verbs::QpEndpoint;
use crate::verbs::bootstrap::Bootstrap;

/// The first message: of the agent that connects.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    /// From the metadata of the agent that it connects to.
    pub token: String,
    pub to: u64,
    pub name: String,
    pub incarnation: u64,
    /// Its queue pairs.
    pub lanes: Vec<LaneEndpoint>,
}

#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct LaneEndpoint {
    pub rail: usize,
    pub endpoint: QpEndpoint,
}

/// The answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Welcome {
    /// The queue pairs that it has connected to those of the hello, in the same order.
    Accepted(Vec<QpEndpoint>),
    Refused(String),
}

/// Idle time after which a silent peer's machine is asked, and between such questions.
const KEEP_ALIVE: Duration = Duration::from_secs(5);
const KEEP_ALIVE_COUNT: u32 = 3;

/// Lets the kernel notice a machine that has gone without a word.
pub(super) fn keep_alive(stream: &TcpStream) {
    // Without it, such a peer is noticed by the next transfer.
    let _ = sockopt::set_socket_keepalive(stream, true);
    let _ = sockopt::set_tcp_keepidle(stream, KEEP_ALIVE);
    let _ = sockopt::set_tcp_keepintvl(stream, KEEP_ALIVE);
    let _ = sockopt::set_tcp_keepcnt(stream, KEEP_ALIVE_COUNT);
}

/// Connects and says hello; returns the peer's queue pairs.
///
/// # Errors
/// [`Kind::PeerLost`] if nobody answers, [`Kind::Stale`] if the peer refuses.
pub(super) fn say_hello(
    address: SocketAddr,
    hello: &Hello,
    timeout: Duration,
) -> Result<(Bootstrap, Vec<QpEndpoint>)> {
    let what = || format!("connect to the agent at {address}");
    let lost = |why: String| {
        Error::new(Kind::PeerLost, what())
            .why(why)
            .fix("check that the peer runs, and get its metadata again")
    };
    let stream = TcpStream::connect_timeout(&address, timeout.max(Duration::from_millis(1)))
        .map_err(|why| lost(why.to_string()))?;
    keep_alive(&stream);
    let mut control = Bootstrap::from_stream(stream, timeout)?;
    let answer = control.send(hello).and_then(|()| control.recv());
    let welcome = answer.map_err(|error| match error.kind() {
        Kind::Malformed | Kind::Unsupported => error.during(what()),
        _ => lost(error.reason().to_owned()),
    })?;
    match welcome {
        Welcome::Accepted(endpoints) if endpoints.len() == hello.lanes.len() => {
            Ok((control, endpoints))
        }
        Welcome::Accepted(endpoints) => {
            let (there, here) = (endpoints.len(), hello.lanes.len());
            let why = format!("it has connected {there} queue pairs instead of {here}");
            Err(Error::new(Kind::Malformed, what()).why(why))
        }
        Welcome::Refused(why) => Err(Error::new(Kind::Stale, what())
            .why(format!("it refused: {}", printable(&why)))
            .fix("get the peer's metadata again")),
    }
}
