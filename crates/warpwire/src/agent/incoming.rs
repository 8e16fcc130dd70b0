//! Connections that peers have made: their queue pairs answer by themselves, and notifications
//! arrive on them.

use std::collections::HashMap;
use std::sync::Arc;

use super::check_name;
use super::control::{self, Hello, Welcome};
use super::inbox::Reassembly;
use super::options::{MAX_QUEUE_PAIRS, MAX_RAILS};
use super::progress::Shared;
use crate::error::{Error, Kind, Result};
use crate::units::printable;
use crate::verbs::bootstrap::Bootstrap;
use crate::verbs::{Qp, QpAttributes, QpEndpoint, State};

pub(super) struct Incoming {
    pub control: Bootstrap,
    name: Arc<str>,
    qps: RailQps,
    reassembly: Reassembly,
}

/// A notification that is complete, and who sent it.
pub(super) type Complete = (Arc<str>, Vec<u8>);
/// Queue pairs, each with the number of its rail.
type RailQps = Vec<(usize, Qp)>;

/// All of them, by number.
#[derive(Default)]
pub(super) struct IncomingTable {
    pub all: HashMap<u64, Incoming>,
    /// By rail and queue pair number.
    by_qpn: HashMap<(usize, u32), u64>,
}

impl IncomingTable {
    fn add(&mut self, number: u64, incoming: Incoming) {
        for (rail, qp) in &incoming.qps {
            self.by_qpn.insert((*rail, qp.number()), number);
        }
        self.all.insert(number, incoming);
    }

    pub(super) fn remove(&mut self, agent: &Shared, number: u64) {
        let Some(incoming) = self.all.remove(&number) else { return };
        for (rail, qp) in &incoming.qps {
            self.by_qpn.remove(&(*rail, qp.number()));
            agent.rails[*rail].destroyed_qps(1);
        }
        // The queue pairs go before the control connection: the peer takes its end as the sign that
        // nothing is written any more.
        drop(incoming.qps);
        drop(incoming.control);
    }

    /// Adds a message of this queue pair's peer; returns a notification if it is complete, and who
    /// sent it.
    ///
    /// # Errors
    /// The connection's number, if the peer does not keep to the format.
    pub(super) fn receive(
        &mut self,
        (rail, qpn): (usize, u32),
        message: &[u8],
    ) -> std::result::Result<Option<Complete>, u64> {
        let Some(number) = self.by_qpn.get(&(rail, qpn)).copied() else { return Ok(None) };
        let Some(incoming) = self.all.get_mut(&number) else { return Ok(None) };
        match incoming.reassembly.add(message) {
            Ok(complete) => Ok(complete.map(|bytes| (incoming.name.clone(), bytes))),
            Err(error) => {
                tracing::warn!(peer = &*incoming.name, %error, "a connection is ended");
                Err(number)
            }
        }
    }

    /// Stops the queue pairs of a connection, so that no more completions arrive for them.
    pub(super) fn stop(&self, number: u64) {
        let Some(incoming) = self.all.get(&number) else { return };
        for (_, qp) in &incoming.qps {
            let _ = qp.modify(&QpAttributes::new(State::Err));
        }
    }
}

/// Answers a hello; a connection that is refused ends.
pub(super) fn accept(agent: &Arc<Shared>, mut control: Bootstrap) {
    let hello: Hello = match control.recv() {
        Ok(hello) => hello,
        Err(error) => {
            tracing::warn!(peer = %control.peer(), why = error.reason(), "rejected a connection");
            return;
        }
    };
    let name: Arc<str> = printable(&hello.name).to_string().into();
    match connect(agent, &hello) {
        Ok((qps, endpoints)) => {
            control::keep_alive(control.stream());
            let (number, reassembly) = (agent.next_number(), Reassembly::default());
            // Before the answer: the peer may send as soon as it has that.
            let mut incoming = Incoming { control, name, qps, reassembly };
            let mut table = agent.incoming.lock();
            if agent.is_closed() {
                return;
            }
            let sent = incoming.control.send(&Welcome::Accepted(endpoints));
            table.add(number, incoming);
            if let Err(error) = sent {
                tracing::debug!(%error, "a peer has gone while it connected");
                table.remove(agent, number);
            }
        }
        Err(error) => {
            tracing::warn!(peer = &*name, why = error.reason(), "refused a peer");
            let _ = control.send(&Welcome::Refused(error.reason().to_owned()));
        }
    }
}

fn connect(agent: &Shared, hello: &Hello) -> Result<(RailQps, Vec<QpEndpoint>)> {
    let refused = |why: &'static str| Err(Error::new(Kind::PermissionDenied, "connect").why(why));
    check_name(&hello.name)?;
    if !constant_time_eq(hello.token.as_bytes(), agent.token.as_bytes()) {
        return refused("the token is not this agent's");
    }
    if hello.to != agent.incarnation {
        return refused("the metadata is of an earlier agent at this address");
    }
    let rails = agent.rails.len();
    if hello.lanes.len() > MAX_RAILS * MAX_QUEUE_PAIRS
        || hello.lanes.iter().any(|lane| lane.rail >= rails)
    {
        return refused("it has other devices than this agent");
    }
    let (mut qps, mut endpoints) = (Vec::new(), Vec::new());
    for lane in &hello.lanes {
        let created = agent.rails[lane.rail].create_qp(&agent.options).and_then(|qp| {
            qp.connect(&lane.endpoint)?;
            Ok(qp)
        });
        match created {
            Ok(qp) => {
                endpoints.push(qp.endpoint());
                qps.push((lane.rail, qp));
            }
            Err(error) => {
                qps.iter().for_each(|(rail, _)| agent.rails[*rail].destroyed_qps(1));
                return Err(error);
            }
        }
    }
    Ok((qps, endpoints))
}

/// Compares without telling, by the time that it takes, how much is equal.
fn constant_time_eq(a: &[u8], b: &[u8]) -> bool {
    a.len() == b.len() && a.iter().zip(b).fold(0, |all, (a, b)| all | (a ^ b)) == 0
}
