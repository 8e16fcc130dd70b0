//! Events as programs take them. As in every librdmacm, taking one does the part of it that
//! concerns the program's objects: a request gets its id, a reply moves the queue pair to RTS.

use std::ffi::c_int;
use std::sync::Arc;

use warpwire_cabi::Unacked;

use crate::abi::{self, CmEvent, ConnParam, EventParam, UdParam};
use crate::boundary::{Errno, IdPtr, Result, object, some, take};
use crate::channel::{Channel, Event};
use crate::id::{self, Id};
use crate::message::{EndPoint, Message, Parameters, PrivateData, Reply, Request, Space};
use crate::service::service;
use crate::session::{Phase, REASON_CONSUMER, Told};
use crate::{connect, log, qp};

/// `struct rdma_cm_event`, with what it points to.
#[repr(C)]
struct Taken {
    abi: CmEvent,
    data: [u8; PrivateData::MAX],
    unacked: Arc<Unacked>,
}

/// Private data has the length that InfiniBand's messages leave for it, with zeros behind what was
/// sent.
pub(crate) const fn request_data_len(space: Space) -> u8 {
    match space {
        Space::Tcp => 56,
        Space::Udp => 180,
    }
}

pub(crate) const fn reply_data_len(space: Space) -> u8 {
    match space {
        Space::Tcp => 196,
        Space::Udp => 136,
    }
}

pub(crate) const REJECT_DATA_LEN: u8 = 148;

/// What an event says.
struct Says {
    id: IdPtr,
    listener: IdPtr,
    event: u32,
    status: c_int,
    /// Its data, and how much of it the program sees.
    data: Option<(PrivateData, u8)>,
    peer: Peer,
}

impl Says {
    fn new(id: IdPtr, event: u32, status: c_int) -> Self {
        Self { id, listener: IdPtr::NONE, event, status, data: None, peer: None }
    }

    /// The event for C.
    fn give(self, space: Space, unacked: Arc<Unacked>) -> *mut CmEvent {
        let (data, len) = self.data.unwrap_or((PrivateData::EMPTY, 0));
        let (id, listen_id) = (self.id.abi(), self.listener.abi());
        let (event, status) = (self.event, self.status);
        // All of the union is set, so that no byte of it is undefined.
        let param = EventParam { ud: datagram((std::ptr::null(), 0), None) };
        let mut taken = Box::new(Taken {
            abi: CmEvent { id, listen_id, event, status, param },
            data: data.padded(),
            unacked,
        });
        let seen = if len == 0 { std::ptr::null() } else { taken.data.as_ptr() };
        match space {
            Space::Udp => taken.abi.param.ud = datagram((seen, len), self.peer),
            Space::Tcp => taken.abi.param.conn = connection((seen, len), self.peer),
        }
        Box::into_raw(taken).cast()
    }
}

type Peer = Option<(EndPoint, Parameters)>;

fn datagram((private_data, private_data_len): (*const u8, u8), peer: Peer) -> UdParam {
    let to = peer.map(|(end_point, _)| end_point);
    UdParam {
        private_data,
        private_data_len,
        ah_attr: to.map(|to| qp::path_to(to.gid, 0)).unwrap_or_default(),
        qp_num: to.map_or(0, |to| to.qp_num),
        qkey: to.map_or(0, |to| to.qkey),
    }
}

fn connection((private_data, private_data_len): (*const u8, u8), peer: Peer) -> ConnParam {
    let (end_point, of) = peer.unzip();
    let of = of.unwrap_or_default();
    ConnParam {
        private_data,
        private_data_len,
        // What the peer has outstanding, this side answers.
        responder_resources: of.initiator_depth,
        initiator_depth: of.responder_resources,
        flow_control: of.flow_control,
        retry_count: of.retry_count,
        rnr_retry_count: of.rnr_retry_count,
        srq: of.srq,
        qp_num: end_point.map_or(0, |end_point| end_point.qp_num),
    }
}

/// Waits for the next event of a channel.
pub(crate) fn next(channel: Option<&Channel>) -> Result<*mut CmEvent> {
    let queue = some(channel)?.queue()?;
    loop {
        let event = queue.next()?;
        let unacked = event.unacked.clone();
        match translate(event) {
            Ok((says, space)) => return Ok(says.give(space, unacked)),
            Err(Errno(errno)) => {
                log::line(|| format!("an event was dropped: error {errno}"));
                unacked.ack(1);
            }
        }
    }
}

/// Gives an event back.
pub(crate) fn ack(event: *mut CmEvent) {
    if let Some(taken) = take::<_, Taken>(event) {
        taken.unacked.ack(1);
    }
}

fn translate(event: Event) -> Result<(Says, Space)> {
    let id = some(event.id.get())?;
    let of = event.id;
    let plain = |kind: u32| Says::new(of, kind, 0);
    let says = match event.told {
        Told::AddressResolved => plain(abi::EVENT_ADDR_RESOLVED),
        Told::RouteResolved => plain(abi::EVENT_ROUTE_RESOLVED),
        Told::Established => plain(abi::EVENT_ESTABLISHED),
        Told::Disconnected => plain(abi::EVENT_DISCONNECTED),
        Told::Unreachable(errno) => Says::new(of, abi::EVENT_UNREACHABLE, -errno),
        Told::Rejected { reason, data } => {
            let data = Some((data, REJECT_DATA_LEN));
            Says { data, ..Says::new(of, abi::EVENT_REJECTED, reason.into()) }
        }
        Told::Request(request) => requested(event.number, of, id, &request)?,
        Told::Reply(reply) => replied(of, id, &reply),
    };
    Ok((says, id.space))
}

/// Makes the id of a request.
fn requested(number: u64, of: IdPtr, listener: &Id, request: &Request) -> Result<Says> {
    let made = id::create_child(number, listener).inspect_err(|_| {
        // No device has the address that it came to.
        if let Ok(service) = service() {
            service.remove(number);
        }
    })?;
    if listener.is_sync.get()
        && let Err(errno) = some(object(made)).and_then(|id| id::migrate(id, std::ptr::null()))
    {
        id::destroy(made)?;
        return Err(errno);
    }
    Ok(Says {
        id: IdPtr(made),
        listener: of,
        data: Some((request.data, request_data_len(request.space))),
        peer: Some((request.end_point, request.parameters)),
        ..Says::new(of, abi::EVENT_CONNECT_REQUEST, 0)
    })
}

/// Completes a connection whose peer has accepted; with a queue pair on the id, this side is ready.
fn replied(of: IdPtr, id: &Id, reply: &Reply) -> Says {
    id.set_route(reply.end_point.gid);
    id.parameters.set(connect::agreed(id.parameters.get(), reply.parameters));
    let data = Some((reply.data, reply_data_len(id.space)));
    let peer = Some((reply.end_point, reply.parameters));
    let event = match id.space {
        Space::Tcp if id.abi.qp.get().is_null() => abi::EVENT_CONNECT_RESPONSE,
        Space::Tcp => match qp::connect(id).and_then(|()| ready(id)) {
            Ok(()) => abi::EVENT_ESTABLISHED,
            Err(Errno(errno)) => {
                let (reason, data) = (REASON_CONSUMER, PrivateData::EMPTY);
                if let Ok(service) = service() {
                    // The peer may be gone already.
                    let _ = service.end(id.number, &Message::Reject { reason, data });
                }
                qp::fail(id);
                return Says::new(of, abi::EVENT_CONNECT_ERROR, -errno);
            }
        },
        Space::Udp => abi::EVENT_ESTABLISHED,
    };
    Says { data, peer, ..Says::new(of, event, 0) }
}

/// Tells the peer that this side is ready.
pub(crate) fn ready(id: &Id) -> Result<()> {
    let mut state = service()?.lock();
    let conn = state.get(id.number)?;
    if conn.phase == Phase::Replied {
        // If the peer is gone, the event of that follows.
        let _ = conn.send(&Message::Ready);
        conn.phase = Phase::Connected;
    }
    Ok(())
}
