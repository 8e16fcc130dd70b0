//! Ids: creation, destruction, options, and the device that they are bound to.

use std::cell::Cell;
use std::collections::hash_map::RandomState;
use std::ffi::{c_int, c_void};
use std::hash::BuildHasher;
use std::net::SocketAddr;
use std::ptr::null_mut;
use std::sync::Arc;

use warpwire_cabi::Unacked;

use crate::abi::{self, CmId, IbAddr, PathRec, Pointer, QpInitAttr, Route, Sockaddr};
use crate::boundary::{Errno, INVALID, IdPtr, Result, bytes, give, object, some, take};
use crate::channel::Channel;
use crate::connect;
use crate::events;
use crate::message::{Parameters, Space};
use crate::qp;
use crate::service::{Conn, service};
use crate::verbs::OpenDevice;

/// `struct rdma_cm_id`. A program uses an id in one thread at a time.
#[repr(C)]
pub(crate) struct Id {
    pub abi: CmId,
    /// Of its connection in the service.
    pub number: u64,
    unacked: Arc<Unacked>,
    pub space: Space,
    /// The id has a channel of its own, and its calls wait for their events.
    pub is_sync: Cell<bool>,
    /// First sequence number.
    pub psn: u32,
    path: Cell<PathRec>,
    pub device: Cell<Option<&'static OpenDevice>>,
    /// As agreed with the peer.
    pub parameters: Cell<Parameters>,
    /// How often the peer tries again if it finds no receive request here, as it was told.
    pub rnr_retries_of_peer: Cell<u8>,
    pub is_v6_only: Cell<bool>,
    pub ack_timeout: Cell<Option<u8>>,
    pub traffic_class: Cell<u8>,
    /// For the queue pairs of a listener's connections.
    pub init_attr: Cell<Option<QpInitAttr>>,
}

fn space(number: u32) -> Result<Space> {
    match number {
        abi::PS_TCP => Ok(Space::Tcp),
        abi::PS_UDP => Ok(Space::Udp),
        // IPoIB and InfiniBand's own service ids need a subnet.
        _ => Err(Errno(libc::EPROTONOSUPPORT)),
    }
}

/// A sequence number that peers cannot guess.
fn random_psn() -> u32 {
    RandomState::new().hash_one(0) as u32 & 0xff_ffff
}

fn new(
    space: Space,
    number: u64,
    unacked: Arc<Unacked>,
    channel: *const Channel,
    context: Pointer,
) -> Id {
    let (null, empty) = (|| Cell::new(null_mut::<c_void>()), || Cell::new(Sockaddr::EMPTY));
    let (ps, qp_type) = match space {
        Space::Tcp => (abi::PS_TCP, abi::QPT_RC),
        Space::Udp => (abi::PS_UDP, abi::QPT_UD),
    };
    let gid = || Cell::new([0; 16]);
    let route = Route {
        src_addr: empty(),
        dst_addr: empty(),
        ibaddr: IbAddr { sgid: gid(), dgid: gid(), pkey: Cell::new(0) },
        path_rec: Cell::new(std::ptr::null()),
        num_paths: Cell::new(0),
    };
    let abi = CmId {
        verbs: null(),
        channel: Cell::new(channel.cast()),
        context: Cell::new(context),
        qp: null(),
        route,
        ps,
        port_num: Cell::new(0),
        event: Cell::new(null_mut()),
        send_cq_channel: null(),
        send_cq: null(),
        recv_cq_channel: null(),
        recv_cq: null(),
        srq: null(),
        pd: null(),
        qp_type: Cell::new(qp_type),
    };
    Id {
        abi,
        number,
        unacked,
        space,
        is_sync: Cell::new(false),
        psn: random_psn(),
        path: Cell::default(),
        device: Cell::new(None),
        parameters: Cell::default(),
        rnr_retries_of_peer: Cell::default(),
        is_v6_only: Cell::new(false),
        ack_timeout: Cell::new(None),
        traffic_class: Cell::new(0),
        init_attr: Cell::new(None),
    }
}

/// A new id; without channel, a synchronous one.
pub(crate) fn create(channel: *const Channel, context: Pointer, ps: u32) -> Result<*mut Id> {
    let (space, service) = (space(ps)?, service()?);
    crate::devices::all()?;
    let is_sync = channel.is_null();
    let channel = if is_sync { Channel::create()? } else { channel.cast_mut() };
    let queue = some(object::<_, Channel>(channel))?.queue()?;
    let conn = Conn::new(space, queue);
    let unacked = conn.unacked.clone();
    let mut state = service.lock();
    let number = state.add(conn);
    let id = new(space, number, unacked, channel, context);
    id.is_sync.set(is_sync);
    let made = give(id);
    state.get(number)?.id = IdPtr(made);
    Ok(made)
}

/// The id of a request that a listener has got.
pub(crate) fn create_child(number: u64, listener: &Id) -> Result<*mut Id> {
    let mut state = service()?.lock();
    let conn = state.get(number)?;
    let (local, remote) = (some(conn.local)?, some(conn.remote)?);
    let (peer, asked) = some(conn.peer)?;
    let channel = listener.abi.channel.get();
    let context = listener.abi.context.get();
    let id = new(conn.space, number, conn.unacked.clone(), channel.cast(), context);
    id.traffic_class.set(listener.traffic_class.get());
    id.ack_timeout.set(listener.ack_timeout.get());
    let made = give(id);
    conn.id = IdPtr(made);
    drop(state);
    let id: &Id = some(object(made))?;
    let bound = crate::devices::with_address(local.ip()).and_then(|device| {
        id.set_addresses(local, remote);
        id.parameters.set(connect::default_answer(device, asked));
        id.bind_to(device)
    });
    if let Err(errno) = bound {
        drop(take::<_, Id>(made));
        return Err(errno);
    }
    id.set_route(peer.gid);
    Ok(made)
}

impl Id {
    pub(crate) fn set_addresses(&self, local: SocketAddr, remote: SocketAddr) {
        self.abi.route.src_addr.set(local.into());
        self.abi.route.dst_addr.set(remote.into());
    }

    /// Binds the id to a device, with the device's domain unless it has one.
    pub(crate) fn bind_to(&self, device: &'static OpenDevice) -> Result<()> {
        if self.abi.pd.get().is_null() {
            self.abi.pd.set(device.default_pd()?);
        }
        self.device.set(Some(device));
        self.abi.verbs.set(device.context());
        self.abi.port_num.set(1);
        self.abi.route.ibaddr.sgid.set(device.gid);
        self.abi.route.ibaddr.pkey.set(0xffff);
        Ok(())
    }

    /// # Errors
    /// `ENODEV` if it is not bound to a device.
    pub(crate) fn device(&self) -> Result<&'static OpenDevice> {
        self.device.get().ok_or(crate::boundary::NO_DEVICE)
    }

    /// Sets the path to a peer.
    pub(crate) fn set_route(&self, dgid: abi::Gid) {
        let Some(device) = self.device.get() else { return };
        self.path.set(PathRec {
            dgid,
            sgid: device.gid,
            hop_limit: 64,
            traffic_class: self.traffic_class.get(),
            reversible: 1,
            numb_path: 1,
            pkey: 0xffff,
            mtu_selector: 2, // exactly
            mtu: device.mtu,
            ..PathRec::default()
        });
        self.abi.route.ibaddr.dgid.set(dgid);
        self.abi.route.path_rec.set(self.path.as_ptr());
        self.abi.route.num_paths.set(1);
    }

    fn release_event(&self) {
        events::ack(self.abi.event.replace(null_mut()));
    }

    /// Waits for the event of a call, if the id is synchronous.
    ///
    /// # Errors
    /// What the event says: `ECONNREFUSED` if the peer refused.
    pub(crate) fn complete(&self) -> Result<()> {
        if !self.is_sync.get() {
            return Ok(());
        }
        self.release_event();
        let event = events::next(object(self.abi.channel.get()))?;
        self.abi.event.set(event);
        let event: &abi::CmEvent = some(object(event))?;
        match (event.event, event.status) {
            (_, 0) => Ok(()),
            (abi::EVENT_REJECTED, _) => Err(Errno(libc::ECONNREFUSED)),
            (_, status) => Err(Errno(status.abs())),
        }
    }
}

/// Destroys an id; waits until all its events are acknowledged, as every librdmacm does.
pub(crate) fn destroy(id: *mut Id) -> Result<()> {
    let known: &Id = some(object(id))?;
    let is_sync = known.is_sync.get();
    let channel = known.abi.channel.get();
    service()?.remove(known.number);
    known.release_event();
    known.unacked.wait();
    drop(take::<_, Id>(id));
    if is_sync {
        Channel::destroy(channel.cast_mut().cast());
    }
    Ok(())
}

/// Destroys an id with its queue pair and shared receive queue.
pub(crate) fn destroy_end_point(id: *mut Id) -> Result<()> {
    let known: &Id = some(object(id))?;
    qp::destroy(known);
    qp::destroy_srq(known);
    destroy(id)
}

/// Moves an id to another channel; to one of its own, if there is none.
pub(crate) fn migrate(id: &Id, channel: *const Channel) -> Result<()> {
    let will_be_sync = channel.is_null();
    let channel = if will_be_sync { Channel::create()? } else { channel.cast_mut() };
    let queue = some(object::<_, Channel>(channel))?.queue()?;
    if let Err(errno) = service()?.migrate(id.number, &queue) {
        if will_be_sync {
            Channel::destroy(channel);
        }
        return Err(errno);
    }
    let before = id.abi.channel.replace(channel.cast());
    let was_sync = id.is_sync.replace(will_be_sync);
    if was_sync {
        id.release_event();
    }
    id.unacked.wait();
    if was_sync {
        Channel::destroy(before.cast_mut().cast());
    }
    Ok(())
}

pub(crate) fn set_option(
    id: &Id,
    level: c_int,
    name: c_int,
    value: *const u8,
    len: usize,
) -> Result<()> {
    if level as u32 != abi::OPTION_ID {
        return Err(Errno(libc::ENOSYS));
    }
    let value = bytes(value, len);
    let byte = || value.first().copied().filter(|_| len == 1).ok_or(INVALID);
    let is_set = || match value.try_into().map(i32::from_ne_bytes) {
        Ok(number) => Ok(number != 0),
        Err(_) => Err(INVALID),
    };
    match name as u32 {
        abi::OPTION_ID_TOS => id.traffic_class.set(byte()?),
        // Old connections of a port never keep it here.
        abi::OPTION_ID_REUSEADDR => drop(is_set()?),
        abi::OPTION_ID_AFONLY => id.is_v6_only.set(is_set()?),
        abi::OPTION_ID_ACK_TIMEOUT => {
            id.ack_timeout.set(Some(Some(byte()?).filter(|value| *value < 32).ok_or(INVALID)?));
        }
        _ => return Err(Errno(libc::ENOSYS)),
    }
    Ok(())
}
