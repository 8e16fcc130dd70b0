//! Addresses, routes and connections of ids: what the calls of programs do.

use std::ffi::c_int;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use crate::abi::{self, AddrInfo, ConnParam, Gid, Pointer, QpInitAttr};
use crate::boundary::{Errno, INVALID, Result, address, bytes, object, some};
use crate::channel::Event;
use crate::events::{self, REJECT_DATA_LEN, reply_data_len, request_data_len};
use crate::id::{self, Id};
use crate::message::{EndPoint, Message, Parameters, PrivateData, Reply, Request, Space};
use crate::service::service;
use crate::session::{Phase, REASON_CONSUMER, Told};
use crate::sockets::{self, tcp_port};
use crate::verbs::OpenDevice;
use crate::{devices, qp};

/// The length of the queue of a listener whose program sets none.
const BACKLOG: usize = 1024;
/// What a program that sets no retry counts gets.
const RETRIES: u8 = 7;

fn ip(device: &OpenDevice) -> IpAddr {
    abi::ip(device.gid)
}

/// Binds the id's socket to an address, if it has none.
fn bind_socket(id: &Id, at: SocketAddr) -> Result<SocketAddr> {
    let mut state = service()?.lock();
    let conn = state.get(id.number)?;
    if conn.phase != Phase::Idle {
        return Err(INVALID);
    }
    if let (Some(_), Some(local)) = (&conn.socket, conn.local) {
        return Ok(local);
    }
    let (socket, local) = sockets::bind(id.space, at, id.is_v6_only.get())?;
    (conn.socket, conn.local) = (Some(socket), Some(local));
    Ok(local)
}

pub(crate) fn bind_addr(id: &Id, at: *const libc::sockaddr) -> Result<()> {
    let at = some(address(at).and_then(|at| at.get()))?;
    let is_bound = service()?.lock().get(id.number)?.socket.is_some();
    if is_bound {
        return Err(INVALID);
    }
    let device = match at.ip().to_canonical().is_unspecified() {
        true => None,
        false => Some(devices::with_address(at.ip())?),
    };
    let local = bind_socket(id, at)?;
    id.abi.route.src_addr.set(local.into());
    device.map_or(Ok(()), |device| id.bind_to(device))
}

/// Finds the device for a destination, and the address of this side.
pub(crate) fn resolve_addr(
    id: &Id,
    source: *const libc::sockaddr,
    destination: *const libc::sockaddr,
) -> Result<()> {
    let to = some(address(destination).and_then(|to| to.get()))?;
    let source = address(source).and_then(|from| from.get());
    let is_set = |from: &SocketAddr| !from.ip().to_canonical().is_unspecified();
    let device = match (id.device.get(), source.filter(is_set)) {
        (Some(device), _) => device,
        (None, Some(from)) => devices::with_address(from.ip())?,
        (None, None) => devices::towards(to.ip())?,
    };
    let port = source.map_or(0, |from| from.port());
    let local = bind_socket(id, SocketAddr::new(ip(device), port))?;
    let local = SocketAddr::new(ip(device), local.port());
    id.bind_to(device)?;
    id.set_addresses(local, to);
    id.abi.route.ibaddr.dgid.set(gid_of(to.ip(), device));
    let mut state = service()?.lock();
    let conn = state.get(id.number)?;
    (conn.local, conn.remote) = (Some(local), Some(to));
    conn.tell(id.number, Told::AddressResolved);
    drop(state);
    id.complete()
}

/// The GID that stands for an address; a loopback address means this machine.
fn gid_of(to: IpAddr, device: &OpenDevice) -> Gid {
    match to.to_canonical().is_loopback() {
        true => device.gid,
        false => abi::gid(to),
    }
}

pub(crate) fn resolve_route(id: &Id) -> Result<()> {
    id.device()?;
    some(id.abi.route.dst_addr.get().get())?;
    id.set_route(id.abi.route.ibaddr.dgid.get());
    service()?.lock().get(id.number)?.tell(id.number, Told::RouteResolved);
    id.complete()
}

pub(crate) fn listen(id: &Id, backlog: c_int) -> Result<()> {
    let local = bind_socket(id, SocketAddr::new(Ipv4Addr::UNSPECIFIED.into(), 0))?;
    id.abi.route.src_addr.set(local.into());
    let backlog = usize::try_from(backlog).ok().filter(|backlog| *backlog > 0);
    service()?.listen(id.number, backlog.unwrap_or(BACKLOG).min(BACKLOG))
}

/// Private data of a program, if it fits.
fn private_data(data: *const u8, len: u8, max: u8) -> Result<PrivateData> {
    if len > max {
        return Err(INVALID);
    }
    PrivateData::new(bytes(data, len.into())).ok_or(INVALID)
}

/// What a program asks for, limited to what the device has.
fn parameters(param: Option<&ConnParam>, device: &OpenDevice) -> Parameters {
    // The largest number stands for the device's limit.
    let limited = |asked: u8, limit: u8| match u32::from(asked) {
        abi::MAX_RESP_RES => limit,
        _ => asked.min(limit),
    };
    match param {
        Some(param) => Parameters {
            responder_resources: limited(param.responder_resources, device.max_resources),
            initiator_depth: limited(param.initiator_depth, device.max_depth),
            flow_control: param.flow_control,
            retry_count: param.retry_count.min(7),
            rnr_retry_count: param.rnr_retry_count.min(7),
            srq: param.srq,
        },
        None => Parameters {
            responder_resources: device.max_resources,
            initiator_depth: device.max_depth,
            flow_control: 1,
            retry_count: RETRIES,
            rnr_retry_count: RETRIES,
            srq: 0,
        },
    }
}

/// What both sides can do: a side has no more reads outstanding than the other answers. The RNR
/// retry count of a side is for its peer.
pub(crate) fn agreed(own: Parameters, peer: Parameters) -> Parameters {
    Parameters {
        responder_resources: own.responder_resources.min(peer.initiator_depth),
        initiator_depth: own.initiator_depth.min(peer.responder_resources),
        rnr_retry_count: peer.rnr_retry_count,
        ..own
    }
}

/// What the side that accepts uses: the request's retry count is for both sides.
fn answer(own: Parameters, peer: Parameters) -> Parameters {
    Parameters { retry_count: peer.retry_count, ..agreed(own, peer) }
}

/// What the side that accepts uses if its program asks for no less: programs with queue pairs of
/// their own connect them before they accept.
pub(crate) fn default_answer(device: &OpenDevice, peer: Parameters) -> Parameters {
    answer(parameters(None, device), peer)
}

fn end_point(id: &Id, device: &OpenDevice, qp_num: u32) -> EndPoint {
    let qkey = match id.space {
        Space::Tcp => 0,
        Space::Udp => abi::UDP_QKEY,
    };
    EndPoint { qp_num: qp_num & 0xff_ffff, psn: id.psn, gid: device.gid, mtu: device.mtu, qkey }
}

pub(crate) fn connect(id: &Id, param: Option<&ConnParam>) -> Result<()> {
    let device = id.device()?;
    let to = some(id.abi.route.dst_addr.get().get()).ok().filter(|to| to.port() != 0);
    let to = to.ok_or(INVALID)?;
    let qp_num = qp::number(id, param.map_or(0, |param| param.qp_num));
    if id.space == Space::Tcp && qp_num == 0 {
        return Err(INVALID);
    }
    let max = request_data_len(id.space);
    let (data, len) =
        param.map_or((std::ptr::null(), 0), |param| (param.private_data, param.private_data_len));
    let data = private_data(data, len, max)?;
    let own = parameters(param, device);
    id.parameters.set(own);
    id.rnr_retries_of_peer.set(own.rnr_retry_count);
    let from_port = id.abi.route.src_addr.get().get().map_or(0, |from| from.port());
    let request = Message::Request(Request {
        space: id.space,
        to_port: to.port(),
        from_port,
        end_point: end_point(id, device, qp_num),
        parameters: own,
        data,
    });
    let mut tcp = to;
    tcp.set_port(tcp_port(id.space, to.port()));
    service()?.connect(id.number, tcp, request)?;
    id.complete()
}

pub(crate) fn accept(id: &Id, param: Option<&ConnParam>) -> Result<()> {
    let device = id.device()?;
    let (phase, peer) = {
        let mut state = service()?.lock();
        let conn = state.get(id.number)?;
        (conn.phase, conn.peer)
    };
    match phase {
        Phase::Requested => {}
        Phase::Ended => return Err(Errno(libc::ECONNRESET)),
        _ => return Err(INVALID),
    }
    let (_, peer) = peer.ok_or(INVALID)?;
    let qp_num = qp::number(id, param.map_or(0, |param| param.qp_num));
    if qp_num == 0 {
        return Err(INVALID);
    }
    let (data, len) =
        param.map_or((std::ptr::null(), 0), |param| (param.private_data, param.private_data_len));
    let data = private_data(data, len, reply_data_len(id.space))?;
    let own = parameters(param, device);
    let agreed = answer(own, peer);
    id.parameters.set(agreed);
    id.rnr_retries_of_peer.set(own.rnr_retry_count);
    let is_connection = id.space == Space::Tcp;
    if is_connection && !id.abi.qp.get().is_null() {
        qp::connect(id).inspect_err(|_| qp::fail(id))?;
    }
    let told = Parameters { rnr_retry_count: own.rnr_retry_count, ..agreed };
    let end_point = end_point(id, device, qp_num);
    let reply = Message::Reply(Reply { end_point, parameters: told, data });
    if let Err(errno) = service()?.reply(id.number, reply) {
        qp::fail(id);
        return Err(errno);
    }
    match is_connection {
        true => id.complete(),
        false => Ok(()),
    }
}

/// Refuses a request, or a reply that the program has yet to complete.
pub(crate) fn reject(id: &Id, data: *const u8, len: u8) -> Result<()> {
    let data = private_data(data, len, REJECT_DATA_LEN)?;
    let phase = service()?.lock().get(id.number)?.phase;
    match phase {
        Phase::Requested | Phase::Replied => {
            let last = Message::Reject { reason: REASON_CONSUMER, data };
            // A peer that is gone needs no answer.
            let _ = service()?.end(id.number, &last);
            Ok(())
        }
        Phase::Ended => Ok(()),
        _ => Err(INVALID),
    }
}

/// Completes a connection whose queue pair the program has connected itself.
pub(crate) fn establish(id: &Id) -> Result<()> {
    let phase = service()?.lock().get(id.number)?.phase;
    match phase {
        Phase::Replied if id.abi.qp.get().is_null() => events::ready(id),
        Phase::Ended => Err(Errno(libc::ECONNRESET)),
        _ => Err(INVALID),
    }
}

/// Ends a connection; the queue pair's work is flushed.
pub(crate) fn disconnect(id: &Id) -> Result<()> {
    if id.space == Space::Udp {
        return Err(INVALID);
    }
    let service = service()?;
    let phase = service.lock().get(id.number)?.phase;
    if !matches!(phase, Phase::Connected | Phase::Accepted | Phase::Replied | Phase::Ended) {
        return Err(INVALID);
    }
    // Acknowledgements leave before the peer hears of the end.
    qp::fail(id);
    service.disconnect(id.number)?;
    if id.is_sync.get() {
        let of_id = |event: &Event| event.number == id.number;
        let is_told = service.lock().get(id.number)?.queue.count(of_id) > 0;
        is_told.then_some(()).ok_or(INVALID)?; // it was ended before
    }
    id.complete()
}

/// An id that is bound, or whose address and route are resolved, with a queue pair.
pub(crate) fn create_end_point(
    info: &AddrInfo,
    pd: Pointer,
    attr: Option<&mut QpInitAttr>,
) -> Result<*mut Id> {
    let made = id::create(std::ptr::null(), std::ptr::null_mut(), info.ai_port_space as u32)?;
    let fill = |id: &Id| -> Result<()> {
        if info.ai_flags as u32 & abi::RAI_PASSIVE != 0 {
            bind_addr(id, info.ai_src_addr)?;
            if !pd.is_null() {
                id.abi.pd.set(pd);
            }
            let qp_type = info.ai_qp_type as u32;
            id.init_attr.set(attr.as_deref().map(|attr| QpInitAttr { qp_type, ..*attr }));
            return Ok(());
        }
        resolve_addr(id, info.ai_src_addr, info.ai_dst_addr)?;
        resolve_route(id)?;
        let Some(attr) = attr else { return Ok(()) };
        attr.qp_type = info.ai_qp_type as u32;
        qp::create(id, pd, attr)
    };
    let filled = some(object(made)).and_then(fill);
    if let Err(errno) = filled {
        let _ = id::destroy_end_point(made);
        return Err(errno);
    }
    Ok(made)
}

/// Waits for a request to a synchronous listener.
pub(crate) fn get_request(listener: &Id) -> Result<*const Id> {
    if !listener.is_sync.get() {
        return Err(INVALID);
    }
    let event = events::next(object(listener.abi.channel.get()))?;
    let taken: &abi::CmEvent = some(object(event))?;
    if taken.event != abi::EVENT_CONNECT_REQUEST {
        events::ack(event);
        return Err(INVALID);
    }
    let made: *const Id = taken.id.cast();
    let id: &Id = some(object(made))?;
    if let Some(mut attr) = listener.init_attr.get()
        && let Err(errno) = qp::create(id, listener.abi.pd.get(), &mut attr)
    {
        events::ack(event);
        let _ = reject(id, std::ptr::null(), 0);
        let _ = id::destroy(made.cast_mut());
        return Err(errno);
    }
    id.abi.event.set(event);
    Ok(made)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_side_has_no_more_reads_outstanding_than_the_other_answers() {
        let side = |responder_resources, initiator_depth, rnr_retry_count| Parameters {
            responder_resources,
            initiator_depth,
            rnr_retry_count,
            retry_count: 5,
            ..Parameters::default()
        };
        let (own, peer) = (side(16, 4, 1), side(2, 8, 6));
        let known = agreed(own, peer);
        assert_eq!((known.responder_resources, known.initiator_depth), (8, 2));
        assert_eq!((known.rnr_retry_count, known.retry_count), (6, 5));
        let other = agreed(peer, own);
        assert_eq!((other.responder_resources, other.initiator_depth), (2, 8));
    }
}
