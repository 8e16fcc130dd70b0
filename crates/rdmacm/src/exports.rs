//! The exported functions. Each one checks its pointers, never unwinds into C, and leaves the work
//! to the module of its object. Results follow librdmacm: 0, or -1 with `errno`, or null with
//! `errno`.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::abi::{
    AddrInfo, CmEvent, ConnParam, Pointer, QpAttr, QpInitAttr, QpInitAttrEx, SrqInitAttr,
    SrqInitAttrEx,
};
use crate::boundary::{UNSUPPORTED, nothing, pointer, set_errno, some, status, take, text};
use crate::channel::Channel;
use crate::id::{self, Id};
use crate::{addrinfo, connect, devices, events, qp, strings};

/// Devices in a list, at most.
const MAX_DEVICES: usize = 64;
type List = [Pointer; MAX_DEVICES + 1];

// Channels and events.

pub(crate) extern "C" fn rdma_create_event_channel() -> *mut Channel {
    pointer(|| {
        // Programs look here whether there is RDMA at all.
        devices::all()?;
        Channel::create()
    })
}

pub(crate) extern "C" fn rdma_destroy_event_channel(channel: *mut Channel) {
    nothing(|| Channel::destroy(channel));
}

pub(crate) extern "C" fn rdma_get_cm_event(
    channel: Option<&Channel>,
    event: Option<&mut *mut CmEvent>,
) -> c_int {
    status(|| {
        *some(event)? = events::next(channel)?;
        Ok(())
    })
}

pub(crate) extern "C" fn rdma_ack_cm_event(event: *mut CmEvent) -> c_int {
    status(|| {
        some((!event.is_null()).then_some(()))?;
        events::ack(event);
        Ok(())
    })
}

pub(crate) extern "C" fn rdma_event_str(event: c_uint) -> *const c_char {
    strings::event(event).as_ptr()
}

// Ids.

pub(crate) extern "C" fn rdma_create_id(
    channel: *const Channel,
    id: Option<&mut *mut Id>,
    context: *mut c_void,
    ps: c_uint,
) -> c_int {
    status(|| {
        *some(id)? = id::create(channel, context, ps)?;
        Ok(())
    })
}

pub(crate) extern "C" fn rdma_destroy_id(id: *mut Id) -> c_int {
    status(|| id::destroy(id))
}

pub(crate) extern "C" fn rdma_create_ep(
    id: Option<&mut *mut Id>,
    info: Option<&AddrInfo>,
    pd: Pointer,
    attr: Option<&mut QpInitAttr>,
) -> c_int {
    status(|| {
        *some(id)? = connect::create_end_point(some(info)?, pd, attr)?;
        Ok(())
    })
}

pub(crate) extern "C" fn rdma_destroy_ep(id: *mut Id) {
    nothing(|| {
        let _ = id::destroy_end_point(id);
    });
}

pub(crate) extern "C" fn rdma_migrate_id(id: Option<&Id>, channel: *const Channel) -> c_int {
    status(|| id::migrate(some(id)?, channel))
}

pub(crate) extern "C" fn rdma_set_option(
    id: Option<&Id>,
    level: c_int,
    name: c_int,
    value: *const u8,
    len: usize,
) -> c_int {
    status(|| id::set_option(some(id)?, level, name, value, len))
}

pub(crate) extern "C" fn rdma_get_src_port(id: Option<&Id>) -> u16 {
    let address = id.and_then(|id| id.abi.route.src_addr.get().get());
    address.map_or(0, |address| address.port().to_be())
}

pub(crate) extern "C" fn rdma_get_dst_port(id: Option<&Id>) -> u16 {
    let address = id.and_then(|id| id.abi.route.dst_addr.get().get());
    address.map_or(0, |address| address.port().to_be())
}

// Addresses and devices.

pub(crate) extern "C" fn rdma_getaddrinfo(
    node: *const c_char,
    service: *const c_char,
    hints: Option<&AddrInfo>,
    result: Option<&mut *mut AddrInfo>,
) -> c_int {
    status(|| {
        *some(result)? = addrinfo::get(text(node), text(service), hints)?;
        Ok(())
    })
}

pub(crate) extern "C" fn rdma_freeaddrinfo(list: *mut AddrInfo) {
    nothing(|| addrinfo::free(list));
}

pub(crate) extern "C" fn rdma_get_devices(number: Option<&mut c_int>) -> *mut List {
    pointer(|| {
        let devices = devices::all()?;
        let mut list: List = [std::ptr::null_mut(); _];
        let slots = list.iter_mut().take(MAX_DEVICES);
        slots.zip(devices).for_each(|(slot, device)| *slot = device.context());
        if let Some(number) = number {
            *number = devices.len().min(MAX_DEVICES) as c_int;
        }
        Ok(Box::into_raw(Box::new(list)))
    })
}

pub(crate) extern "C" fn rdma_free_devices(list: *mut List) {
    nothing(|| drop(take::<_, List>(list)));
}

pub(crate) extern "C" fn rdma_bind_addr(id: Option<&Id>, at: *const libc::sockaddr) -> c_int {
    status(|| connect::bind_addr(some(id)?, at))
}

/// The time limit does not matter: nothing has to be asked.
pub(crate) extern "C" fn rdma_resolve_addr(
    id: Option<&Id>,
    source: *const libc::sockaddr,
    destination: *const libc::sockaddr,
    _timeout: c_int,
) -> c_int {
    status(|| connect::resolve_addr(some(id)?, source, destination))
}

pub(crate) extern "C" fn rdma_resolve_route(id: Option<&Id>, _timeout: c_int) -> c_int {
    status(|| connect::resolve_route(some(id)?))
}

// Connections.

pub(crate) extern "C" fn rdma_listen(id: Option<&Id>, backlog: c_int) -> c_int {
    status(|| connect::listen(some(id)?, backlog))
}

pub(crate) extern "C" fn rdma_get_request(
    listener: Option<&Id>,
    id: Option<&mut *const Id>,
) -> c_int {
    status(|| {
        *some(id)? = connect::get_request(some(listener)?)?;
        Ok(())
    })
}

pub(crate) extern "C" fn rdma_connect(id: Option<&Id>, param: Option<&ConnParam>) -> c_int {
    status(|| connect::connect(some(id)?, param))
}

pub(crate) extern "C" fn rdma_accept(id: Option<&Id>, param: Option<&ConnParam>) -> c_int {
    status(|| connect::accept(some(id)?, param))
}

pub(crate) extern "C" fn rdma_reject(id: Option<&Id>, data: *const u8, len: u8) -> c_int {
    status(|| connect::reject(some(id)?, data, len))
}

/// There is nothing to negotiate: the same as a plain reject.
pub(crate) extern "C" fn rdma_reject_ece(id: Option<&Id>, data: *const u8, len: u8) -> c_int {
    rdma_reject(id, data, len)
}

pub(crate) extern "C" fn rdma_establish(id: Option<&Id>) -> c_int {
    status(|| connect::establish(some(id)?))
}

pub(crate) extern "C" fn rdma_disconnect(id: Option<&Id>) -> c_int {
    status(|| connect::disconnect(some(id)?))
}

/// Programs pass on that data came before the connection was established; the message that
/// establishes it cannot be lost here, so nothing has to be done.
pub(crate) extern "C" fn rdma_notify(id: Option<&Id>, _event: c_uint) -> c_int {
    status(|| some(id).map(|_| ()))
}

// Queue pairs.

pub(crate) extern "C" fn rdma_create_qp(
    id: Option<&Id>,
    pd: Pointer,
    attr: Option<&mut QpInitAttr>,
) -> c_int {
    status(|| qp::create(some(id)?, pd, some(attr)?))
}

pub(crate) extern "C" fn rdma_create_qp_ex(
    id: Option<&Id>,
    attr: Option<&mut QpInitAttrEx>,
) -> c_int {
    status(|| qp::create_ex(some(id)?, some(attr)?))
}

pub(crate) extern "C" fn rdma_destroy_qp(id: Option<&Id>) {
    nothing(|| id.into_iter().for_each(qp::destroy));
}

pub(crate) extern "C" fn rdma_create_srq(
    id: Option<&Id>,
    pd: Pointer,
    attr: Option<&mut SrqInitAttr>,
) -> c_int {
    status(|| qp::create_srq(some(id)?, pd, some(attr)?))
}

pub(crate) extern "C" fn rdma_create_srq_ex(
    id: Option<&Id>,
    attr: Option<&mut SrqInitAttrEx>,
) -> c_int {
    status(|| qp::create_srq_ex(some(id)?, some(attr)?))
}

pub(crate) extern "C" fn rdma_destroy_srq(id: Option<&Id>) {
    nothing(|| id.into_iter().for_each(qp::destroy_srq));
}

pub(crate) extern "C" fn rdma_init_qp_attr(
    id: Option<&Id>,
    attr: Option<&mut QpAttr>,
    mask: Option<&mut c_int>,
) -> c_int {
    status(|| {
        let (attr, mask) = (some(attr)?, some(mask)?);
        let (filled, set) = qp::attributes(some(id)?, attr.qp_state)?;
        (*attr, *mask) = (filled, set as c_int);
        Ok(())
    })
}

// What there is not: enhanced connection establishment, multicast, rsockets.

pub(crate) extern "C" fn rdma_set_local_ece(_: Pointer, _: Pointer) -> c_int {
    status(|| Err(UNSUPPORTED))
}

pub(crate) extern "C" fn rdma_get_remote_ece(_: Pointer, ece: Option<&mut [u32; 3]>) -> c_int {
    status(|| {
        *some(ece)? = [0; 3];
        Err(UNSUPPORTED)
    })
}

pub(crate) extern "C" fn rdma_join_multicast(_: Pointer, _: Pointer, _: Pointer) -> c_int {
    status(|| Err(UNSUPPORTED))
}

pub(crate) extern "C" fn rdma_join_multicast_ex(_: Pointer, _: Pointer, _: Pointer) -> c_int {
    status(|| Err(UNSUPPORTED))
}

pub(crate) extern "C" fn rdma_leave_multicast(_: Pointer, _: Pointer) -> c_int {
    status(|| Err(UNSUPPORTED))
}

/// Calls that return an `int`, `ssize_t` or `off_t`.
pub(crate) extern "C" fn refuse() -> isize {
    set_errno(UNSUPPORTED);
    -1
}

pub(crate) extern "C" fn rpoll(
    set: *mut libc::pollfd,
    count: libc::nfds_t,
    timeout: c_int,
) -> c_int {
    addrinfo::poll(set, count, timeout)
}
