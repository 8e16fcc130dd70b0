//! Control messages over TCP, their timeouts, and detection of a dead peer.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use warpwire::units::printable;
use warpwire::verbs::bootstrap::Bootstrap;
use warpwire::verbs::{AsyncEvent, Context, QpEndpoint};

use super::table::Row;
use super::test::Test;
use crate::output::Failure;

/// Description of one side, for the peer and for the table's heading.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct EndpointInfo {
    pub(super) link: String,
    /// The value of `--mem`.
    pub(super) memory: String,
    /// How the device accesses the memory.
    pub(super) path: String,
    /// Why no better path was taken.
    pub(super) why: Vec<String>,
    /// How the memory was registered.
    pub(super) registered: String,
    pub(super) qpn: u32,
    pub(super) psn: u32,
    pub(super) rkey: u32,
    pub(super) address: u64,
    pub(super) mtu: u32,
    /// Name of the machine.
    #[serde(default)]
    pub(super) host: String,
    /// Version of the command.
    #[serde(default)]
    pub(super) version: String,
}

impl EndpointInfo {
    /// Frees the text of a peer of control characters.
    fn into_printable(mut self) -> Self {
        let Self { link, memory, path, registered, host, version, .. } = &mut self;
        for text in [link, memory, path, registered, host, version] {
            *text = printable(text);
        }
        // More reasons than any side has would only scroll the terminal.
        self.why.truncate(16);
        self.why.iter_mut().for_each(|text| *text = printable(text));
        self
    }
}

/// Connection data of one side.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Ready {
    pub(super) info: EndpointInfo,
    pub(super) qp_endpoints: Vec<QpEndpoint>,
}

/// The result of a side that sends, for one size.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Done {
    /// Messages per queue pair, including warm-up.
    pub(super) per_qp: Vec<u64>,
    pub(super) row: Row,
}

/// What a side found after one size.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Verdict {
    /// What is wrong with the received data, if anything.
    pub(super) wrong: Option<String>,
    /// Received messages, where they are counted and may be lost.
    pub(super) received: Option<u64>,
    /// CPU time of this side in percent of one CPU.
    pub(super) cpu_percent: f64,
}

/// A control message.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum ControlMsg {
    Test(Test),
    Ready(Ready),
    /// Barrier: this side is ready for the next step.
    Go,
    /// In the place of `Go`: this side was interrupted, and the test ends here.
    Stop,
    Done(Done),
    Verdict(Verdict),
    /// This side has failed.
    Failed(String),
}

/// The TCP connection to the peer.
pub(super) struct ControlChannel {
    bootstrap: Bootstrap,
    pub(super) name: String,
    /// How long the peer may be silent during a test.
    timeout: Duration,
}

impl ControlChannel {
    pub(super) fn new(bootstrap: Bootstrap, timeout: Duration) -> Self {
        let name = bootstrap.peer().to_string();
        Self { bootstrap, name, timeout }
    }

    /// Our address on the TCP connection.
    pub(super) fn local_ip(&self) -> Result<std::net::IpAddr, Failure> {
        Ok(self.bootstrap.local()?.ip())
    }

    pub(super) fn send(&mut self, msg: &ControlMsg) -> Result<(), Failure> {
        Ok(self.bootstrap.send(msg)?)
    }

    pub(super) fn recv(&mut self) -> Result<ControlMsg, Failure> {
        let msg = self.bootstrap.recv()?;
        self.accept(msg)
    }

    pub(super) fn swap(&mut self, mine: &ControlMsg) -> Result<ControlMsg, Failure> {
        let msg = self.bootstrap.swap(mine)?;
        self.accept(msg)
    }

    /// A failure of the peer becomes an error; its text is made fit for a terminal.
    fn accept(&self, msg: ControlMsg) -> Result<ControlMsg, Failure> {
        match msg {
            ControlMsg::Failed(why) => {
                Err(Failure::Runtime(format!("{} failed: {}", self.name, printable(&why))))
            }
            ControlMsg::Ready(ready) => {
                let info = ready.info.into_printable();
                Ok(ControlMsg::Ready(Ready { info, ..ready }))
            }
            ControlMsg::Verdict(verdict) => {
                let wrong = verdict.wrong.map(|wrong| printable(&wrong));
                Ok(ControlMsg::Verdict(Verdict { wrong, ..verdict }))
            }
            msg => Ok(msg),
        }
    }

    /// Waits until both sides have called this.
    pub(super) fn barrier(&mut self) -> Result<(), Failure> {
        match self.swap(&ControlMsg::Go)? {
            ControlMsg::Go => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    /// As [`barrier`](Self::barrier); false if either side wants to stop.
    pub(super) fn barrier_unless(&mut self, stop: bool) -> Result<bool, Failure> {
        let mine = if stop { ControlMsg::Stop } else { ControlMsg::Go };
        match self.swap(&mine)? {
            ControlMsg::Go => Ok(!stop),
            ControlMsg::Stop => Ok(false),
            other => Err(self.unexpected(&other)),
        }
    }

    pub(super) fn unexpected(&self, msg: &ControlMsg) -> Failure {
        let text = format!("{msg:?}");
        let msg = text.split(['(', ' ']).next().unwrap_or_default();
        Failure::Runtime(format!(
            "{} sent an unexpected {msg:?}; use the same version on both sides",
            self.name
        ))
    }

    /// Sends the reason of a failure to the peer; ignores errors.
    pub(super) fn send_failure(&mut self, failure: &Failure) {
        let (Failure::Usage(why) | Failure::Runtime(why)) = failure;
        let _ = self.bootstrap.send(&ControlMsg::Failed(why.clone()));
    }

    pub(super) fn watchdog<'a>(&'a mut self, context: &'a Context, test: &'a Test) -> Watchdog<'a> {
        let (now, packets) = (Instant::now(), 0);
        let (last_activity, last_check) = (now, now);
        let peer_done = None;
        Watchdog {
            peer: self,
            context,
            test,
            calls: 0,
            last_activity,
            last_check,
            packets,
            peer_done,
        }
    }
}

/// Watches the peer while this side polls: control messages and signs of life.
pub(super) struct Watchdog<'a> {
    pub(super) peer: &'a mut ControlChannel,
    context: &'a Context,
    test: &'a Test,
    calls: u32,
    /// When the peer's packet counter last changed.
    last_activity: Instant,
    last_check: Instant,
    packets: u64,
    /// The peer's result, if both sides send and the peer has finished first.
    pub(super) peer_done: Option<Done>,
}

/// Idle polls between two checks of the TCP connection: a system call on every poll would add to
/// the latency.
const CHECK_INTERVAL: u32 = 512;

/// How long a message of a ping-pong may take before it counts as lost.
const MAX_LOSS: Duration = Duration::from_secs(3);

/// Idle polls before the thread yields its core.
pub(super) const YIELD_INTERVAL: u32 = 64;

impl Watchdog<'_> {
    /// Call when a poll found nothing. True if a control message is waiting.
    #[inline]
    pub(super) fn poll_idle(&mut self) -> Result<bool, Failure> {
        self.calls = self.calls.wrapping_add(1);
        if self.calls.is_multiple_of(YIELD_INTERVAL) {
            // With fewer cores than busy threads, the peer may need this core.
            std::thread::yield_now();
        }
        // A thread that waits for events calls seldom.
        if !self.calls.is_multiple_of(CHECK_INTERVAL) && !self.test.events {
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
        self.check_events()?;
        // Direct accesses by the peer, without packets, are a sign of life too.
        let packets = self
            .context
            .stats()
            .map(|stats| stats.pairs.packets_received.wrapping_add(stats.direct.by_peers));
        // Hardware has no packet counters here: only the TCP connection shows that the peer is
        // gone.
        if packets.is_none_or(|packets| std::mem::replace(&mut self.packets, packets) != packets) {
            self.last_activity = self.last_check;
        }
        let is_lossy = self.test.is_ping_pong() && self.test.connection.is_lossy();
        if is_lossy && self.last_activity.elapsed() > MAX_LOSS {
            let name = self.test.connection.name();
            return Err(Failure::Runtime(format!(
                "a message to or from {} was lost, and {name} does not retransmit; use -c RC",
                self.peer.name
            )));
        }
        if self.last_activity.elapsed() < self.peer.timeout {
            return Ok(false);
        }
        Err(Failure::Runtime(format!(
            "no packet and no control message from {} for {} s; check that it runs, and that no \
             firewall drops UDP",
            self.peer.name,
            self.peer.timeout.as_secs_f64()
        )))
    }

    /// A queue that has failed may be unable to report it by a completion.
    fn check_events(&self) -> Result<(), Failure> {
        while let Some(event) = self.context.next_event() {
            let failed = match event {
                AsyncEvent::CqOverrun { cqn } => format!("completion queue {cqn:#x} is overrun"),
                AsyncEvent::Fatal { qpn }
                | AsyncEvent::RequestError { qpn }
                | AsyncEvent::AccessError { qpn } => {
                    format!("queue pair {qpn:#x} failed: {event:?}")
                }
                AsyncEvent::DeviceFailed => "the device failed".to_owned(),
                _ => continue,
            };
            return Err(Failure::Runtime(format!("{failed}, in a test with {}", self.peer.name)));
        }
        Ok(())
    }

    /// As [`Watchdog::poll_idle`], where no control message is expected but the result of a peer
    /// that sends too: another one is an error.
    #[inline]
    pub(super) fn check_alive(&mut self) -> Result<(), Failure> {
        if !self.poll_idle()? {
            return Ok(());
        }
        self.recv_early()
    }

    #[cold]
    fn recv_early(&mut self) -> Result<(), Failure> {
        match self.peer.recv()? {
            ControlMsg::Done(done) if self.test.bidirectional && self.peer_done.is_none() => {
                self.peer_done = Some(done);
                Ok(())
            }
            msg => Err(self.peer.unexpected(&msg)),
        }
    }
}
