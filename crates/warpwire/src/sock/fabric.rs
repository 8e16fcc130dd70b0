//! The devices that sockets of the family `warp` use, and what each connection has of them.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use warpwire_proto::qp::Access as QpAccess;

use super::berths::Berths;
use super::warp::{Hello, Spot};
use crate::error::Result;
use crate::hca::HcaOptions;
use crate::link::{Auto, shm, udp};
use crate::mem::Region;
use crate::mlx5::Status;
use crate::stream::kernel::LaidQp;
use crate::verbs::{Access, Context, Drive, Mr, QpOptions, State};

/// How long the device's thread looks for doorbells after the last work before it naps.
const SPIN: Duration = Duration::from_micros(100);
/// How long an answer of a peer is waited for: 4.096 µs · 2^16, tried eight times, two seconds in all. That a process has died is
/// known at once, by its TCP connection.
const TIMEOUT: u8 = 16;

/// Open devices, by the address that they are bound to.
pub(super) struct Fabric {
    given: Option<Context>,
    opened: Vec<(SocketAddr, Context)>,
}

impl Fabric {
    pub(super) fn new(given: Option<Context>) -> Self {
        Self { given, opened: Vec::new() }
    }

    /// The device for connections from that address of ours.
    fn context(&mut self, local: SocketAddr) -> Result<Context> {
        if let Some(context) = &self.given {
            return Ok(context.clone());
        }
        let mut local = match local.ip().to_canonical() {
            IpAddr::V4(ip) => SocketAddr::from((ip, 0)),
            IpAddr::V6(_) => local,
        };
        local.set_port(0);
        if let Some((_, context)) = self.opened.iter().find(|(bound, _)| *bound == local) {
            return Ok(context.clone());
        }
        let link = Auto::bind(local, udp::Options::from_env()?, shm::Options::from_env()?)?;
        let drive = Drive::Thread { spin: SPIN, core: None };
        let context = Context::open_with(link, HcaOptions { drive, ..HcaOptions::default() })?;
        self.opened.push((local, context.clone()));
        Ok(context)
    }
}

/// What a connection has: a queue pair, and registrations in a domain of its own, so that its peer can write nothing else.
pub(super) struct Moored {
    // The queue pair ends before what it writes to.
    qp: LaidQp,
    send: Mr,
    receive: Mr,
    words: Mr,
    pub(super) berth: u32,
}

/// The memory of a socket that its peer writes, or that is written from: a region, and the address that kernels know it by.
pub(super) struct Shores {
    pub(super) send: (Region, u64),
    pub(super) receive: (Region, u64),
    /// `received` and `taken`.
    pub(super) words: (Region, u64),
}

impl Moored {
    pub(super) fn new(
        fabric: &mut Fabric,
        berths: &Berths,
        berth: u32,
        local: SocketAddr,
        shores: Shores,
    ) -> Result<Self> {
        let context = fabric.context(local)?;
        let pd = context.pd();
        let options = QpOptions {
            access: QpAccess::REMOTE_WRITE,
            timeout: TIMEOUT,
            retry_count: 7,
            ..QpOptions::default()
        };
        let qp = berths.queue_pair(berth, &context, &pd, options)?;
        let register = |(region, address): (Region, u64), access| {
            context.register_at(&pd, region, Some(address), access)
        };
        let written = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        Ok(Self {
            qp,
            send: register(shores.send, Access::NONE)?,
            receive: register(shores.receive, written)?,
            words: register(shores.words, written)?,
            berth,
        })
    }

    /// What the peer must know.
    pub(super) fn hello(&self) -> Hello {
        let spot = |mr: &Mr, offset: u64| {
            let remote = mr.remote(offset);
            Spot { address: remote.address, rkey: remote.rkey }
        };
        Hello {
            offer: self.qp.qp().offer(),
            ring: spot(&self.receive, 0),
            ring_size: self.receive.len(),
            received: spot(&self.words, 0),
            taken: spot(&self.words, 8),
            window: Some(self.send.len()),
        }
    }

    /// Connects to the peer, and tells kernels of it. From now on it may write.
    pub(super) fn meet(&self, berths: &Berths, theirs: &Hello) -> Result<()> {
        self.qp.qp().connect(&theirs.offer)?;
        berths.tell(self.berth, &self.qp, theirs, self.send.lkey())
    }

    /// Whether everything that a kernel says it has posted has ended.
    pub(super) fn has_ended(&self, posted: u64) -> bool {
        self.qp.has_ended(posted)
    }

    /// Whether the queue pair has failed, and if its completions tell, why.
    pub(super) fn failure(&self) -> Option<Option<Status>> {
        match self.qp.qp().state() {
            Ok(State::Err) => Some(self.qp.failure()),
            Ok(_) => None,
            Err(_) => Some(None),
        }
    }
}
