//! The exported functions. Each one checks its pointers, never unwinds into C, and leaves the work
//! to the module of its object. Results follow libibverbs: an errno value, -1 with `errno`, or null
//! with `errno`, depending on the function.

use std::ffi::{c_char, c_int, c_uint, c_void};

use crate::abi::{self, AhAttr, AsyncEvent, Pointer, QpAttr, QpInitAttr, SrqAttr, SrqInitAttr, Wc};
use crate::ah::{self, Ah};
use crate::boundary::{
    Errno, INVALID, UNSUPPORTED, count, nothing, pointer, set_errno, some, status,
};
use crate::channel::{self, Channel};
use crate::context::{self, ContextPtr, PKEY, check_port, gid_entry};
use crate::cq::{self, Cq};
use crate::devices::{self, Device, List};
use crate::events;
use crate::memory::{self, Mr, Pd};
use crate::numbers::Gid;
use crate::qp::{self, Qp};
use crate::srq::{self, Srq};
use crate::strings;

// Devices.

pub(crate) extern "C" fn ibv_get_device_list(number: Option<&mut c_int>) -> *mut List {
    pointer(|| {
        let devices = devices::all()?;
        let mut list: List = [std::ptr::null(); _];
        list.iter_mut().zip(devices).for_each(|(slot, device)| *slot = device);
        if let Some(number) = number {
            *number = devices.len() as c_int;
        }
        Ok(Box::into_raw(Box::new(list)))
    })
}

pub(crate) extern "C" fn ibv_free_device_list(list: Option<Box<List>>) {
    drop(list);
}

pub(crate) extern "C" fn ibv_get_device_name(device: Option<&Device>) -> *const c_char {
    device.map_or(std::ptr::null(), |device| device.abi.name.as_ptr())
}

pub(crate) extern "C" fn ibv_get_device_guid(device: Option<&Device>) -> u64 {
    device.map_or(0, Device::guid)
}

pub(crate) extern "C" fn ibv_get_device_index(device: Option<&Device>) -> c_int {
    device.map_or(-1, |device| device.index() as c_int)
}

pub(crate) extern "C" fn ibv_open_device(device: Option<&'static Device>) -> *mut abi::Context {
    pointer(|| context::open_device(some(device)?))
}

pub(crate) extern "C" fn ibv_close_device(context: ContextPtr) -> c_int {
    status(|| context::close_device(context))
}

pub(crate) extern "C" fn ibv_query_device(
    context: ContextPtr,
    attr: Option<&mut abi::DeviceAttr>,
) -> c_int {
    status(|| {
        *some(attr)? = context::query_device(context)?;
        Ok(())
    })
}

pub(crate) extern "C" fn ibv_query_port(context: ContextPtr, port: u8, attr: *mut c_void) -> c_int {
    status(|| context::query_port_old(context, port, attr))
}

/// An index without GID is all zeros.
pub(crate) extern "C" fn ibv_query_gid(
    context: ContextPtr,
    port: u8,
    index: c_int,
    gid: Option<&mut Gid>,
) -> c_int {
    count(|| {
        let index = u32::try_from(index).ok().filter(|index| *index < 256).ok_or(INVALID)?;
        let entry = gid_entry(context, port.into(), index);
        *some(gid)? = match entry {
            Err(Errno(libc::ENODATA)) => [0; 16],
            entry => entry?.gid,
        };
        Ok(0)
    })
}

pub(crate) extern "C" fn _ibv_query_gid_ex(
    context: ContextPtr,
    port: u32,
    index: u32,
    entry: Option<&mut abi::GidEntry>,
    flags: u32,
    size: usize,
) -> c_int {
    status(|| {
        if flags != 0 || size < size_of::<abi::GidEntry>() {
            return Err(INVALID);
        }
        *some(entry)? = gid_entry(context, port, index)?;
        Ok(())
    })
}

/// The number of entries, or a negative errno value.
pub(crate) extern "C" fn _ibv_query_gid_table(
    context: ContextPtr,
    entries: Option<&mut abi::GidEntry>,
    max: usize,
    flags: u32,
    size: usize,
) -> isize {
    if max == 0 {
        set_errno(INVALID);
        return -(libc::EINVAL as isize);
    }
    match _ibv_query_gid_ex(context, 1, 0, entries, flags, size) {
        0 => 1,
        errno => -(errno as isize),
    }
}

/// 1: RoCE v2, in the numbers of this function.
pub(crate) extern "C" fn ibv_query_gid_type(
    context: ContextPtr,
    port: u8,
    index: c_uint,
    kind: Option<&mut c_uint>,
) -> c_int {
    count(|| {
        gid_entry(context, port.into(), index)?;
        *some(kind)? = 1;
        Ok(0)
    })
}

pub(crate) extern "C" fn ibv_query_pkey(
    context: ContextPtr,
    port: u8,
    index: c_int,
    pkey: Option<&mut u16>,
) -> c_int {
    count(|| {
        context.get()?;
        check_port(port.into())?;
        if index != 0 {
            return Err(INVALID);
        }
        *some(pkey)? = PKEY;
        Ok(0)
    })
}

pub(crate) extern "C" fn ibv_get_pkey_index(context: ContextPtr, port: u8, pkey: u16) -> c_int {
    count(|| {
        context.get()?;
        check_port(port.into())?;
        if pkey == PKEY { Ok(0) } else { Err(INVALID) }
    })
}

// Domains and memory.

pub(crate) extern "C" fn ibv_alloc_pd(context: ContextPtr) -> *mut Pd {
    pointer(|| memory::alloc_pd(context))
}

pub(crate) extern "C" fn ibv_dealloc_pd(pd: Option<Box<Pd>>) -> c_int {
    status(|| memory::dealloc_pd(pd))
}

pub(crate) extern "C" fn ibv_reg_mr(
    pd: Option<&Pd>,
    addr: Pointer,
    len: usize,
    access: c_int,
) -> *mut Mr {
    pointer(|| memory::reg_mr(pd, addr, len, Some(addr.addr() as u64), access as u32))
}

pub(crate) extern "C" fn ibv_reg_mr_iova(
    pd: Option<&Pd>,
    addr: Pointer,
    len: usize,
    iova: u64,
    access: c_int,
) -> *mut Mr {
    pointer(|| memory::reg_mr(pd, addr, len, Some(iova), access as u32))
}

pub(crate) extern "C" fn ibv_reg_mr_iova2(
    pd: Option<&Pd>,
    addr: Pointer,
    len: usize,
    iova: u64,
    access: c_uint,
) -> *mut Mr {
    pointer(|| memory::reg_mr(pd, addr, len, Some(iova), access))
}

pub(crate) extern "C" fn ibv_reg_dmabuf_mr(
    pd: Option<&Pd>,
    offset: u64,
    len: usize,
    iova: u64,
    fd: c_int,
    access: c_int,
) -> *mut Mr {
    pointer(|| memory::reg_dmabuf_mr(pd, (offset, len), iova, fd, access as u32))
}

pub(crate) extern "C" fn ibv_dereg_mr(mr: Option<Box<Mr>>) -> c_int {
    status(|| memory::dereg_mr(mr))
}

/// 0, or -1 for wrong arguments, or -4 if the registration was refused.
pub(crate) extern "C" fn ibv_rereg_mr(
    mr: Option<&Mr>,
    flags: c_int,
    pd: Option<&Pd>,
    addr: Pointer,
    len: usize,
    access: c_int,
) -> c_int {
    match status(|| memory::rereg_mr(mr, flags as u32, pd, (addr, len), access as u32)) {
        0 => 0,
        libc::EINVAL => -1,
        _ => -4,
    }
}

// Completion queues and channels.

pub(crate) extern "C" fn ibv_create_comp_channel(context: ContextPtr) -> *mut Channel {
    pointer(|| channel::create(context))
}

pub(crate) extern "C" fn ibv_destroy_comp_channel(channel: Option<Box<Channel>>) -> c_int {
    status(|| channel::destroy_channel(channel))
}

pub(crate) extern "C" fn ibv_get_cq_event(
    channel: Option<&Channel>,
    cq: Option<&mut usize>,
    cq_context: Option<&mut usize>,
) -> c_int {
    count(|| channel::next_event(channel, cq, cq_context).map(|()| 0))
}

pub(crate) extern "C" fn ibv_ack_cq_events(cq: Option<&Cq>, events: c_uint) {
    nothing(|| cq::ack_events(cq, events));
}

pub(crate) extern "C" fn ibv_create_cq(
    context: ContextPtr,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *const abi::CompChannel,
    comp_vector: c_int,
) -> *mut Cq {
    pointer(|| cq::create_cq(context, cqe, cq_context, channel, comp_vector))
}

pub(crate) extern "C" fn ibv_resize_cq(cq: Option<&Cq>, cqe: c_int) -> c_int {
    status(|| cq::resize_cq(cq, cqe))
}

pub(crate) extern "C" fn ibv_destroy_cq(cq: Option<Box<Cq>>) -> c_int {
    status(|| cq::destroy_cq(cq))
}

pub(crate) extern "C" fn ibv_get_async_event(
    context: ContextPtr,
    event: Option<&mut AsyncEvent>,
) -> c_int {
    count(|| events::next(context, event).map(|()| 0))
}

pub(crate) extern "C" fn ibv_ack_async_event(event: Option<&AsyncEvent>) {
    nothing(|| events::ack(event));
}

// Queue pairs, shared receive queues, address handles.

pub(crate) extern "C" fn ibv_create_qp(pd: Option<&Pd>, attr: Option<&mut QpInitAttr>) -> *mut Qp {
    pointer(|| qp::create_qp(pd, attr))
}

pub(crate) extern "C" fn ibv_modify_qp(
    qp: Option<&Qp>,
    attr: Option<&QpAttr>,
    mask: c_int,
) -> c_int {
    status(|| qp::modify_qp(qp, attr, mask as u32))
}

pub(crate) extern "C" fn ibv_query_qp(
    qp: Option<&Qp>,
    attr: Option<&mut QpAttr>,
    _mask: c_int,
    init: Option<&mut QpInitAttr>,
) -> c_int {
    status(|| qp::query_qp(qp, attr, init))
}

pub(crate) extern "C" fn ibv_destroy_qp(qp: Option<Box<Qp>>) -> c_int {
    status(|| qp::destroy_qp(qp))
}

/// The queue pair, if it was made for `ibv_wr_*`.
pub(crate) extern "C" fn ibv_qp_to_qp_ex(qp: Option<&Qp>) -> *const Qp {
    qp.filter(|qp| qp.builder.is_enabled).map_or(std::ptr::null(), std::ptr::from_ref)
}

/// Data may be written in any order.
pub(crate) extern "C" fn ibv_query_qp_data_in_order(_: Pointer, _: c_uint, _: u32) -> c_int {
    0
}

/// Enhanced connection establishment is for NICs that are to agree on extensions: there are none.
pub(crate) extern "C" fn ibv_query_ece(_: Pointer, ece: Option<&mut [u32; 3]>) -> c_int {
    status(|| {
        *some(ece)? = [0; 3];
        Err(UNSUPPORTED)
    })
}

pub(crate) extern "C" fn ibv_set_ece(_: Pointer, _: Pointer) -> c_int {
    status(|| Err(UNSUPPORTED))
}

pub(crate) extern "C" fn ibv_create_srq(
    pd: Option<&Pd>,
    attr: Option<&mut SrqInitAttr>,
) -> *mut Srq {
    pointer(|| {
        let attr = some(attr)?;
        srq::create_srq(pd, attr.srq_context, &mut attr.attr)
    })
}

pub(crate) extern "C" fn ibv_modify_srq(
    srq: Option<&Srq>,
    attr: Option<&SrqAttr>,
    mask: c_int,
) -> c_int {
    status(|| srq::modify_srq(srq, attr, mask as u32))
}

pub(crate) extern "C" fn ibv_query_srq(srq: Option<&Srq>, attr: Option<&mut SrqAttr>) -> c_int {
    status(|| srq::query_srq(srq, attr))
}

pub(crate) extern "C" fn ibv_destroy_srq(srq: Option<Box<Srq>>) -> c_int {
    status(|| srq::destroy_srq(srq))
}

pub(crate) extern "C" fn ibv_create_ah(pd: Option<&Pd>, attr: Option<&AhAttr>) -> *mut Ah {
    pointer(|| ah::create(pd, attr))
}

pub(crate) extern "C" fn ibv_init_ah_from_wc(
    context: ContextPtr,
    port: u8,
    wc: Option<&Wc>,
    grh: Option<&[u8; 40]>,
    attr: Option<&mut AhAttr>,
) -> c_int {
    count(|| {
        context.get()?;
        *some(attr)? = ah::from_wc(port, wc, grh)?;
        Ok(0)
    })
}

pub(crate) extern "C" fn ibv_create_ah_from_wc(
    pd: Option<&Pd>,
    wc: Option<&Wc>,
    grh: Option<&[u8; 40]>,
    port: u8,
) -> *mut Ah {
    pointer(|| ah::create(pd, Some(&ah::from_wc(port, wc, grh)?)))
}

pub(crate) extern "C" fn ibv_destroy_ah(ah: Option<Box<Ah>>) -> c_int {
    status(|| ah::destroy_ah(ah))
}

pub(crate) extern "C" fn ibv_attach_mcast(_: Pointer, _: Pointer, _: u16) -> c_int {
    status(|| Err(UNSUPPORTED))
}

pub(crate) extern "C" fn ibv_detach_mcast(_: Pointer, _: Pointer, _: u16) -> c_int {
    status(|| Err(UNSUPPORTED))
}

pub(crate) extern "C" fn ibv_resolve_eth_l2_from_gid(
    _: Pointer,
    _: Pointer,
    _: Pointer,
    _: Pointer,
) -> c_int {
    status(|| Err(UNSUPPORTED))
}

// Objects of other processes: a kernel would hand them over.

pub(crate) extern "C" fn ibv_import_device(_: c_int) -> *mut abi::Context {
    pointer(|| Err(UNSUPPORTED))
}

pub(crate) extern "C" fn ibv_import_pd(_: Pointer, _: u32) -> *mut Pd {
    pointer(|| Err(UNSUPPORTED))
}

pub(crate) extern "C" fn ibv_import_mr(_: Pointer, _: u32) -> *mut Mr {
    pointer(|| Err(UNSUPPORTED))
}

pub(crate) extern "C" fn ibv_import_dm(_: Pointer, _: u32) -> *mut c_void {
    pointer(|| Err(UNSUPPORTED))
}

pub(crate) extern "C" fn ibv_unimport_pd(_: Pointer) {}
pub(crate) extern "C" fn ibv_unimport_mr(_: Pointer) {}
pub(crate) extern "C" fn ibv_unimport_dm(_: Pointer) {}

// Conversions of kernel structures, for a connection manager in the kernel.

pub(crate) extern "C" fn ibv_copy_ah_attr_from_kern(_: Pointer, _: Pointer) {}
pub(crate) extern "C" fn ibv_copy_qp_attr_from_kern(_: Pointer, _: Pointer) {}
pub(crate) extern "C" fn ibv_copy_path_rec_from_kern(_: Pointer, _: Pointer) {}
pub(crate) extern "C" fn ibv_copy_path_rec_to_kern(_: Pointer, _: Pointer) {}

// The process and its environment.

/// The CPU moves the data: forks need no preparation.
pub(crate) extern "C" fn ibv_fork_init() -> c_int {
    0
}

pub(crate) extern "C" fn ibv_is_fork_initialized() -> c_int {
    abi::FORK_UNNEEDED as c_int
}

pub(crate) extern "C" fn ibv_dontfork_range(_: Pointer, _: usize) -> c_int {
    0
}

pub(crate) extern "C" fn ibv_dofork_range(_: Pointer, _: usize) -> c_int {
    0
}

pub(crate) extern "C" fn ibv_get_sysfs_path() -> *const c_char {
    c"/sys".as_ptr()
}

/// Devices have no files in sysfs.
pub(crate) extern "C" fn ibv_read_sysfs_file(
    _: Pointer,
    _: Pointer,
    _: Pointer,
    _: usize,
) -> c_int {
    count(|| Err(Errno(libc::ENOENT)))
}

pub(crate) extern "C" fn ibv_wc_status_str(number: c_int) -> *const c_char {
    strings::status(number).as_ptr()
}

pub(crate) extern "C" fn ibv_event_type_str(number: c_int) -> *const c_char {
    strings::event(number).as_ptr()
}

pub(crate) extern "C" fn ibv_node_type_str(number: c_int) -> *const c_char {
    strings::node_type(number).as_ptr()
}

pub(crate) extern "C" fn ibv_port_state_str(number: c_int) -> *const c_char {
    strings::port_state(number).as_ptr()
}

pub(crate) extern "C" fn ibv_rate_to_mult(rate: c_int) -> c_int {
    strings::rate_to_mult(rate)
}

pub(crate) extern "C" fn mult_to_ibv_rate(mult: c_int) -> c_int {
    strings::mult_to_rate(mult)
}

pub(crate) extern "C" fn ibv_rate_to_mbps(rate: c_int) -> c_int {
    strings::rate_to_mbps(rate)
}

pub(crate) extern "C" fn mbps_to_ibv_rate(mbps: c_int) -> c_int {
    strings::mbps_to_rate(mbps)
}
