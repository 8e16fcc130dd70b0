//! RDMA devices of `warp` sockets, and the resources of each connection.

use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use super::qp_slots::QpSlots;
use super::warp::{DevicesByAddress, Hello, RemoteAddr};
use crate::error::Result;
use crate::hca::HcaOptions;
use crate::link::{Auto, ShmOptions, UdpOptions};
use crate::mem::Region;
use crate::mlx5::Status;
use crate::stream::kernel::PreallocQp;
use crate::verbs::{Access, Context, Mr, ProgressMode, QpOptions, State};

/// How long the device's thread polls doorbells after its last work before it sleeps.
const SPIN: Duration = Duration::from_micros(100);
/// ACK timeout: 4.096 µs · 2^17 = 0.54 s. With 7 retries the queue pair fails after 4.3 seconds of
/// silence. The death of a process is noticed immediately, by its TCP connection.
const TIMEOUT: u8 = 17;

/// Open devices by the local address that they are bound to.
pub(super) struct DeviceCache {
    fixed: Option<Context>,
    opened: DevicesByAddress<SocketAddr>,
}

impl DeviceCache {
    pub(super) fn new(fixed: Option<Context>) -> Self {
        Self { fixed, opened: DevicesByAddress::default() }
    }

    /// Whether the device is a NIC, whose address may differ from that of TCP connections.
    pub(super) fn is_hardware(&self) -> bool {
        self.fixed.as_ref().is_some_and(|context| context.soft().is_none())
    }

    /// The device for connections with this local address; opened on first use.
    fn context(&mut self, local: SocketAddr) -> Result<Context> {
        if let Some(context) = &self.fixed {
            return Ok(context.clone());
        }
        let mut local = match local.ip().to_canonical() {
            IpAddr::V4(ip) => SocketAddr::from((ip, 0)),
            IpAddr::V6(_) => local,
        };
        local.set_port(0);
        self.opened.get(local, || {
            let link = Auto::bind(local, UdpOptions::from_env()?, ShmOptions::from_env()?)?;
            let progress_mode = ProgressMode::Thread { spin: SPIN, core: None };
            Context::open_with(link, HcaOptions { progress_mode, ..HcaOptions::default() })
        })
    }
}

/// A connection's queue pair and its registrations, in a protection domain of its own, so that its
/// peer can write nothing else.
pub(super) struct ConnResources {
    // Drop order: the queue pair before the memory that it accesses.
    qp: PreallocQp,
    send: Mr,
    receive: Mr,
    words: Mr,
    pub(super) qp_slot: u32,
}

/// The memory of a socket that RDMA accesses: each a region and the address that kernels use for
/// it.
pub(super) struct ConnMemory {
    pub(super) send: (Region, u64),
    pub(super) receive: (Region, u64),
    /// The words `received` and `taken`.
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
        let pd = context.alloc_pd();
        let options = QpOptions {
            access: Access::REMOTE_WRITE,
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

    /// The hello for the peer.
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

    /// Connects the queue pair and publishes its descriptor to kernels. The peer may write from
    /// here on.
    pub(super) fn connect_qp(&self, qp_slots: &QpSlots, peer_hello: &Hello) -> Result<()> {
        self.qp.qp().connect(&peer_hello.endpoint)?;
        qp_slots.write_descriptor(self.qp_slot, &self.qp, peer_hello, self.send.lkey())
    }

    /// Whether all `posted` work requests of the kernel have completed.
    pub(super) fn is_drained(&self, posted: u64) -> bool {
        self.qp.is_drained(posted)
    }

    /// `Some` if the queue pair has failed, with the status if a completion reported it.
    pub(super) fn failure(&self) -> Option<Option<Status>> {
        match self.qp.qp().state() {
            Ok(State::Err) => Some(self.qp.failure()),
            Ok(_) => None,
            Err(_) => Some(None),
        }
    }
}
