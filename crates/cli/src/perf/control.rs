//! What the two ends tell each other over TCP, and how long they wait for it.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use warpwire::verbs::bootstrap::Bootstrap;
use warpwire::verbs::{Context, QpEndpoint};

use super::table::Row;
use super::test::Test;
use crate::output::Failure;

/// What one side is: for the peer, and for the table's head.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct EndpointInfo {
    pub(super) link: String,
    /// The kind of memory that was asked for.
    pub(super) memory: String,
    /// How the device reaches it, and why not by a better way.
    pub(super) path: String,
    pub(super) why: Vec<String>,
    /// How it was named to the device.
    pub(super) registered: String,
    pub(super) qpn: u32,
    pub(super) psn: u32,
    pub(super) rkey: u32,
    pub(super) address: u64,
    pub(super) mtu: u32,
}

/// What an end offers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Ready {
    pub(super) info: EndpointInfo,
    pub(super) qp_endpoints: Vec<QpEndpoint>,
}

/// The end of a size.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Done {
    /// Messages on each queue pair, those for warming up too.
    pub(super) per_qp: Vec<u64>,
    pub(super) row: Row,
}

/// Everything that is said.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum ControlMsg {
    Test(Test),
    Ready(Ready),
    /// This end is ready for the next step.
    Go,
    Done(Done),
    /// What was found in memory: nothing wrong, or what.
    Verdict(Option<String>),
    /// This end gives up.
    Failed(String),
}

/// The peer, and the patience that we have with it.
pub(super) struct ControlChannel {
    bootstrap: Bootstrap,
    pub(super) name: String,
    timeout: Duration,
}

impl ControlChannel {
    pub(super) fn new(bootstrap: Bootstrap, timeout: Duration) -> Self {
        let name = bootstrap.peer().to_string();
        Self { bootstrap, name, timeout }
    }

    /// The address at which it sees us.
    pub(super) fn local_ip(&self) -> Result<std::net::IpAddr, Failure> {
        Ok(self.bootstrap.local()?.ip())
    }

    pub(super) fn send(&mut self, msg: &ControlMsg) -> Result<(), Failure> {
        Ok(self.bootstrap.send(msg)?)
    }

    pub(super) fn recv(&mut self) -> Result<ControlMsg, Failure> {
        match self.bootstrap.recv()? {
            ControlMsg::Failed(why) => {
                Err(Failure::Runtime(format!("{} gave up: {why}", self.name)))
            }
            msg => Ok(msg),
        }
    }

    pub(super) fn swap(&mut self, mine: &ControlMsg) -> Result<ControlMsg, Failure> {
        self.send(mine)?;
        self.recv()
    }

    /// Waits until both ends are here.
    pub(super) fn barrier(&mut self) -> Result<(), Failure> {
        match self.swap(&ControlMsg::Go)? {
            ControlMsg::Go => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    pub(super) fn unexpected(&self, msg: &ControlMsg) -> Failure {
        let text = format!("{msg:?}");
        let msg = text.split(['(', ' ']).next().unwrap_or_default();
        Failure::Runtime(format!(
            "{} said {msg:?} out of turn; use one version on both ends",
            self.name
        ))
    }

    /// Tells the peer why this end gives up, if it still listens.
    pub(super) fn send_failure(&mut self, failure: &Failure) {
        let (Failure::Usage(why) | Failure::Runtime(why)) = failure;
        let _ = self.bootstrap.send(&ControlMsg::Failed(why.clone()));
    }

    pub(super) fn watchdog<'a>(&'a mut self, context: &'a Context) -> Watchdog<'a> {
        let (now, packets) = (Instant::now(), 0);
        Watchdog { peer: self, context, calls: 0, last_activity: now, last_check: now, packets }
    }
}

/// Watches the peer while we spin: whether it said something, and whether it lives.
pub(super) struct Watchdog<'a> {
    pub(super) peer: &'a mut ControlChannel,
    context: &'a Context,
    calls: u32,
    /// The last sign of life.
    last_activity: Instant,
    last_check: Instant,
    packets: u64,
}

/// System calls between packets would be felt; this is often enough to notice the end.
const CHECK_INTERVAL: u32 = 512;

/// Fruitless polls before the core is offered to others.
const YIELD_INTERVAL: u32 = 64;

impl Watchdog<'_> {
    /// To be called when there is nothing to do; tells whether the peer said something.
    #[inline]
    pub(super) fn poll_idle(&mut self) -> Result<bool, Failure> {
        self.calls = self.calls.wrapping_add(1);
        if self.calls.is_multiple_of(YIELD_INTERVAL) {
            // On a machine with fewer cores than work, the peer may wait for this one.
            std::thread::yield_now();
        }
        if !self.calls.is_multiple_of(CHECK_INTERVAL) {
            return Ok(false);
        }
        self.check_peer()
    }

    #[cold]
    fn check_peer(&mut self) -> Result<bool, Failure> {
        if self.peer.bootstrap.is_readable(Duration::ZERO)? {
            return Ok(true);
        }
        if self.last_check.elapsed() < Duration::from_millis(500) {
            return Ok(false);
        }
        self.last_check = Instant::now();
        // What the peer does without packets is a sign of life too.
        let stats = self.context.stats();
        let packets = stats.pairs.packets_received.wrapping_add(stats.direct.by_peers);
        // Hardware tells nothing of packets: there the connection must end for the peer to be gone.
        let is_hardware = self.context.soft().is_none();
        if std::mem::replace(&mut self.packets, packets) != packets || is_hardware {
            self.last_activity = self.last_check;
        }
        if self.last_activity.elapsed() < self.peer.timeout {
            return Ok(false);
        }
        Err(Failure::Runtime(format!(
            "no packet and no word from {} for {} s; look whether it runs, and whether a firewall drops UDP",
            self.peer.name,
            self.peer.timeout.as_secs_f64()
        )))
    }

    /// As [`Watchdog::poll_idle`], for those who do not expect a word: it can only be bad news.
    #[inline]
    pub(super) fn check_alive(&mut self) -> Result<(), Failure> {
        if !self.poll_idle()? {
            return Ok(());
        }
        let msg = self.peer.recv()?;
        Err(self.peer.unexpected(&msg))
    }
}
