//! The devices that sockets of the family `warp` use, and what each connection has of them.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use warpwire_proto::qp::Access as QpAccess;

use super::qp_slots::QpSlots;
use super::warp::{Hello, RemoteAddr};
use crate::error::Result;
use crate::hca::HcaOptions;
use crate::link::{Auto, shm, udp};
use crate::mem::Region;
use crate::mlx5::Status;
use crate::stream::kernel::PreallocQp;
use crate::verbs::{Access, Context, Mr, ProgressMode, QpOptions, State};

/// How long the device's thread looks for doorbells after the last work before it naps.
const SPIN: Duration = Duration::from_micros(100);
/// How long an answer of a peer is waited for: 4.096 µs · 2^16, tried eight times, two seconds in all. That a process has died is
/// known at once, by its TCP connection.
const TIMEOUT: u8 = 16;

/// Open devices, by the address that they are bound to.
pub(super) struct DeviceCache {
    fixed: Option<Context>,
    opened: Vec<(SocketAddr, Context)>,
}

impl DeviceCache {
    pub(super) fn new(fixed: Option<Context>) -> Self {
        Self { fixed, opened: Vec::new() }
    }

    /// The device for connections from that address of ours.
    fn context(&mut self, local: SocketAddr) -> Result<Context> {
        if let Some(context) = &self.fixed {
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
        let progress_mode = ProgressMode::Thread { spin: SPIN, core: None };
        let context =
            Context::open_with(link, HcaOptions { progress_mode, ..HcaOptions::default() })?;
        self.opened.push((local, context.clone()));
        Ok(context)
    }
}

/// What a connection has: a queue pair, and registrations in a domain of its own, so that its peer can write nothing else.
pub(super) struct ConnResources {
    // The queue pair ends before what it writes to.
    qp: PreallocQp,
    send: Mr,
    receive: Mr,
    words: Mr,
    pub(super) qp_slot: u32,
}

/// The memory of a socket that its peer writes, or that is written from: a region, and the address that kernels know it by.
pub(super) struct ConnMemory {
    pub(super) send: (Region, u64),
    pub(super) receive: (Region, u64),
    /// `received` and `taken`.
    pub(super) words: (Region, u64),
}

impl ConnResources {
    pub(super) fn new(
        device_cache: &mut DeviceCache,
        qp_slots: &QpSlots,
        qp_slot: u32,
        local: SocketAddr,
        conn_memory: ConnMemory,
    ) -> Result<Self> {
        let context = device_cache.context(local)?;
        let pd = context.pd();
        let options = QpOptions {
            access: QpAccess::REMOTE_WRITE,
            timeout: TIMEOUT,
            retry_count: 7,
            ..QpOptions::default()
        };
        let qp = qp_slots.queue_pair(qp_slot, &context, &pd, options)?;
        let register = |(region, address): (Region, u64), access| {
            context.register_at(&pd, region, Some(address), access)
        };
        let written = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        Ok(Self {
            qp,
            send: register(conn_memory.send, Access::NONE)?,
            receive: register(conn_memory.receive, written)?,
            words: register(conn_memory.words, written)?,
            qp_slot,
        })
    }

    /// What the peer must know.
    pub(super) fn hello(&self) -> Hello {
        let remote_addr = |mr: &Mr, offset: u64| {
            let remote = mr.remote(offset);
            RemoteAddr { address: remote.address, rkey: remote.rkey }
        };
        Hello {
            endpoint: self.qp.qp().endpoint(),
            ring: remote_addr(&self.receive, 0),
            ring_size: self.receive.len(),
            received: remote_addr(&self.words, 0),
            taken: remote_addr(&self.words, 8),
            window: Some(self.send.len()),
        }
    }

    /// Connects to the peer, and tells kernels of it. From now on it may write.
    pub(super) fn connect_qp(&self, qp_slots: &QpSlots, peer_hello: &Hello) -> Result<()> {
        self.qp.qp().connect(&peer_hello.endpoint)?;
        qp_slots.write_descriptor(self.qp_slot, &self.qp, peer_hello, self.send.lkey())
    }

    /// Whether everything that a kernel says it has posted has ended.
    pub(super) fn is_drained(&self, posted: u64) -> bool {
        self.qp.is_drained(posted)
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
