//! One side of a test: its device, queue pairs and memory.

use std::time::Duration;

use warpwire::hca::{Hca, HcaOptions};
use warpwire::link::Capture;
use warpwire::verbs::{
    AddressHandle, Completion, Context, Cq, DeviceOptions, Mtu, Qp, QpOptions, Remote, SendRequest,
    WrOp,
};
use warpwire_apps::pattern::fill_bytes;

use super::control::{EndpointInfo, Ready};
use super::memory::{self, Buffer};
use super::test::{Connection, Metric, Test, Verb};
use super::{Arguments, ProgressChoice, links};
use crate::machine;
use crate::output::Failure;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Client,
    Server,
}

pub(super) struct Endpoint {
    pub(super) role: Role,
    pub(super) test: Test,
    pub(super) context: Context,
    /// One per engine. Queue pairs use them in turn.
    pub(super) cqs: Vec<Cq>,
    pub(super) qps: Vec<Qp>,
    /// Memory that this side sends from, or that the peer reads.
    pub(super) outgoing: Buffer,
    /// Memory that data arrives in.
    pub(super) incoming: Buffer,
    /// The peer's memory.
    pub(super) remote: Remote,
    /// The peer's queue pairs, if messages are datagrams.
    destinations: Vec<(AddressHandle, u32)>,
    pub(super) info: EndpointInfo,
    capture: Option<Capture>,
}

/// Completions polled, and requests posted, at a time.
pub(super) const POLL_BATCH: usize = 32;
/// Q_Key of all datagrams.
const QKEY: u32 = 0x1111_1111;
/// How long a thread sleeps before it looks after the peer, with `-e`.
const EVENT_TIMEOUT: Duration = Duration::from_millis(20);

/// Opens `--device`, or the software HCA on `--link`.
fn open(
    local_ip: std::net::IpAddr,
    arguments: &Arguments,
    qps: u32,
) -> Result<(Context, Option<Capture>), Failure> {
    if let Some(name) = &arguments.device {
        let options = DeviceOptions::default()
            .with_port(arguments.ib_port)
            .with_gid_index(arguments.gid_index);
        return Ok((Context::open_device_with(name, options)?, None));
    }
    let (link, capture) =
        links::make(&arguments.link, local_ip, arguments.fault, arguments.capture())?;
    let options = HcaOptions::default()
        .with_progress_mode(arguments.progress.mode())
        .with_direct(!arguments.no_direct)
        .with_engines(arguments.engines(qps));
    Ok((Context::open_with(link, options)?, capture))
}

impl Endpoint {
    pub(super) fn new(
        role: Role,
        test: Test,
        local_ip: std::net::IpAddr,
        arguments: &Arguments,
    ) -> Result<Self, Failure> {
        if test.events && matches!(arguments.progress, ProgressChoice::Manual) {
            let why = "with -e threads sleep, and with --progress manual nothing wakes them: omit \
                       one of them";
            return Err(Failure::Usage(why.to_owned()));
        }
        let (context, capture) = open(local_ip, arguments, test.qps)?;
        let pd = context.alloc_pd();
        let memory = arguments.memory();
        let device = memory::device(&memory)
            .map_err(|error| Failure::Usage(format!("--mem {memory}: {error}")))?;
        let (sends, takes) = test.uses(role);
        let len = |used: bool| if used { test.stride() * u64::from(test.qps) } else { 64 };
        let by = arguments.reg;
        let buffer = |used| Buffer::new(&context, &pd, device.as_ref(), len(used), by);
        let (outgoing, incoming) = (buffer(sends)?, buffer(takes)?);

        let receives = test.receives(role);
        // The queue pairs of a completion queue are on one engine.
        let engines = context.soft().map_or(1, Hca::engines) as u32;
        let cq_qps = test.qps.div_ceil(engines);
        let signaled = if test.cq_mod.is_some() { test.depth } else { test.depth.min(64) };
        let entries = cq_qps.saturating_mul(receives + signaled).saturating_add(64);
        let cqs = (0..engines.min(test.qps)).map(|_| context.create_cq(entries.min(1 << 22)));
        let cqs: Vec<Cq> = cqs.collect::<warpwire::Result<_>>()?;
        let options = QpOptions::default()
            .with_send_depth(test.depth.max(64))
            .with_receive_depth(receives.max(1))
            .with_max_send_sge(1)
            .with_max_recv_sge(1)
            .with_service(test.connection.service())
            .with_max_inline_data(test.inline())
            .with_signal_all(false)
            .with_mtu(arguments.mtu.and_then(Mtu::new));
        let cq_of = |index: u32| &cqs[index as usize % cqs.len()];
        let qps = (0..test.qps).map(cq_of);
        let qps = qps.map(|cq| context.create_qp(&pd, cq, cq, options.clone()));
        let qps: Vec<Qp> = qps.collect::<warpwire::Result<_>>()?;

        let exposed = if test.verb == Verb::Read { &outgoing.mr } else { &incoming.mr };
        let own = if role == Role::Client && sends { &outgoing.mr } else { exposed };
        let endpoint = qps[0].endpoint();
        let info = EndpointInfo {
            link: context.path().to_string(),
            memory: memory.to_string(),
            path: own.path().to_string(),
            registered: own.registered_by().to_string(),
            why: own.why(),
            qpn: endpoint.qpn,
            psn: endpoint.psn,
            rkey: exposed.rkey(),
            address: exposed.iova(),
            mtu: endpoint.mtu,
            host: machine::host(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
        };
        let (remote, destinations) = (Remote { address: 0, rkey: 0 }, Vec::new());
        Ok(Self {
            role,
            test,
            context,
            cqs,
            qps,
            outgoing,
            incoming,
            remote,
            destinations,
            info,
            capture,
        })
    }

    pub(super) fn ready(&self) -> Ready {
        Ready { info: self.info.clone(), qp_endpoints: self.qps.iter().map(Qp::endpoint).collect() }
    }

    pub(super) fn connect(&mut self, peer: &Ready) -> Result<(), Failure> {
        if peer.qp_endpoints.len() != self.qps.len() {
            let (theirs, ours) = (peer.qp_endpoints.len(), self.qps.len());
            let why = format!("the peer has {theirs} queue pairs, this side {ours}");
            return Err(Failure::Runtime(why));
        }
        for (qp, endpoint) in self.qps.iter().zip(&peer.qp_endpoints) {
            if self.test.connection == Connection::Ud {
                qp.activate_ud(QKEY)?;
                let handle = self.context.create_address_handle(endpoint.address)?;
                self.destinations.push((handle, endpoint.qpn));
            } else {
                qp.connect(endpoint)?;
                self.info.mtu = qp.endpoint().path_mtu(endpoint);
            }
        }
        self.remote = Remote { address: peer.info.address, rkey: peer.info.rkey };
        Ok(())
    }

    /// The queue pairs of a completion queue, by number.
    pub(super) fn group(&self, cq: usize) -> impl Iterator<Item = usize> + Clone {
        (cq..self.qps.len()).step_by(self.cqs.len())
    }

    /// Offset of a queue pair's memory in either buffer.
    pub(super) fn offset(&self, index: usize) -> u64 {
        self.test.stride() * index as u64
    }

    /// Offset of a queue pair's received messages in `incoming`.
    pub(super) fn incoming_offset(&self, index: usize) -> u64 {
        self.offset(index) + self.test.header()
    }

    /// A request on a queue pair, with its destination if it is a datagram.
    #[inline]
    pub(super) fn request(&self, index: usize, id: u64, op: WrOp) -> SendRequest<'_> {
        let request = SendRequest::new(id, op);
        match self.destinations.get(index) {
            Some((handle, qpn)) => request.to(handle, *qpn, QKEY),
            None => request,
        }
    }

    /// The message of a queue pair if it is sent inline: small, and from host memory.
    pub(super) fn inline_data(&self, index: usize, size: u64) -> Option<Vec<u8>> {
        let sends = matches!(self.test.verb, Verb::Write | Verb::Send);
        let fits = sends && size <= u64::from(self.test.inline()) && self.outgoing.is_host();
        fits.then(|| {
            let mut bytes = vec![0; size as usize];
            fill_bytes(&mut bytes, self.seed(size, index), 0);
            bytes
        })
    }

    /// With `-e`, sleeps until a completion event, or for a short time.
    #[inline]
    pub(super) fn wait_event(&self, group: usize) -> Result<(), Failure> {
        if self.test.events {
            self.cqs[group].arm(false)?;
            self.cqs[group].wait_event(EVENT_TIMEOUT)?;
        }
        Ok(())
    }

    /// The peer's memory for a queue pair.
    pub(super) fn remote(&self, index: usize) -> Remote {
        Remote { address: self.remote.address + self.offset(index), ..self.remote }
    }

    /// Seed of the pattern for a size and a queue pair.
    pub(super) fn seed(&self, size: u64, index: usize) -> u64 {
        size.wrapping_mul(31).wrapping_add(index as u64)
    }

    /// Fills the memory to be sent with a pattern, and clears the memory to be overwritten.
    pub(super) fn prepare(&self, size: u64) -> Result<(), Failure> {
        let (sends, takes) = self.test.uses(self.role);
        for index in 0..self.qps.len() {
            if sends && self.test.verify {
                self.outgoing.fill(self.offset(index), size, self.seed(size, index))?;
            }
            if takes {
                self.incoming.zero(self.incoming_offset(index), size)?;
            }
        }
        Ok(())
    }

    /// Verifies received data, of so many messages per queue pair; returns what is wrong, if
    /// anything.
    pub(super) fn verify(&self, size: u64, per_qp: &[u64]) -> Result<Option<String>, Failure> {
        let (_, takes) = self.test.uses(self.role);
        if !self.test.verify || !takes {
            return Ok(None);
        }
        for (index, count) in per_qp.iter().enumerate().filter(|(_, count)| **count > 0) {
            let at = self.incoming_offset(index);
            if self.test.verb == Verb::Atomic {
                let is_target = self.role == Role::Server || self.test.bidirectional;
                let found = self.incoming.word(at)?;
                if is_target && found != *count {
                    let wrong =
                        format!("queue pair {index}: {count} additions resulted in {found}");
                    return Ok(Some(wrong));
                }
                continue;
            }
            // The last byte of a message is its marker in a write latency test.
            let marked = self.test.metric == Metric::Lat && self.test.verb == Verb::Write;
            let len = if marked { size - 1 } else { size };
            // What was lost is still zero.
            let may_be_zero = self.test.connection.is_lossy();
            let seed = self.seed(size, index);
            if let Some(at) = self.incoming.first_mismatch_or_zero(at, len, seed, may_be_zero)? {
                let what = format!("queue pair {index}, {size} bytes: byte {at} is wrong");
                return Ok(Some(what));
            }
        }
        Ok(None)
    }

    /// Flushes the packet capture, if there is one; returns the number of packets for which it had
    /// no room.
    pub(super) fn finish(&self) -> Result<u64, Failure> {
        let Some(capture) = &self.capture else { return Ok(0) };
        capture.finish()?;
        Ok(capture.omitted())
    }
}

/// The error for a failed completion.
#[cold]
pub(super) fn failed(completion: &Completion, peer: &str) -> Failure {
    let qpn = completion.qpn;
    Failure::Runtime(format!(
        "work on queue pair {qpn:#x} with {peer} failed: {:?}; see the peer's output if it is gone",
        completion.status
    ))
}

impl Test {
    /// Whether that side sends from its memory, and whether data arrives in it.
    pub(super) fn uses(&self, role: Role) -> (bool, bool) {
        let client = role == Role::Client;
        let both = self.is_ping_pong() || self.bidirectional;
        match self.verb {
            Verb::Write | Verb::Send => (client || both, !client || both),
            Verb::Read => (!client || both, client || both),
            // Fetched values go to the outgoing memory if the peer adds to the incoming one.
            Verb::Atomic => (both, true),
        }
    }

    /// Posted receives per queue pair of that side.
    pub(super) fn receives(&self, role: Role) -> u32 {
        match (self.verb, self.metric, role) {
            (Verb::Send, Metric::Lat, _) => 16,
            (Verb::Send, Metric::Bw, role) if role == Role::Server || self.bidirectional => {
                // Twice the client's depth, so that no message finds the receive queue empty.
                let wanted = self.depth.saturating_mul(2).max(512);
                wanted.min((1 << 21) / self.qps.max(1)).clamp(1, 1 << 15)
            }
            _ => 0,
        }
    }
}
