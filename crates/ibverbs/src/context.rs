//! Open devices, and the attributes of devices and ports.
//!
//! Programs open devices only to look at them, so the software HCA behind one (a UDP socket, a
//! thread) is opened when its first object is created.
#![allow(unsafe_code)]

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::net::SocketAddr;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::sync::OnceLock;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::epoll;
use warpwire::link::{Auto, Link, ShmOptions, Tap, Udp, UdpOptions};
use warpwire::verbs::{self, AddressHandle, HcaOptions, ProgressMode, QpnSlot};

use crate::abi::{self, Pointer};
use crate::boundary::{Errno, INVALID, Result, give, some};
use crate::devices::Device;
use crate::events::Registry;
use crate::memory::Users;
use crate::numbers::{self, gid};
use crate::{capture, cq, exports, log, memory, post, process, qp, srq, window};

/// Limits that are reported and enforced.
pub(crate) const MAX_QP_WR: u32 = 16384;
pub(crate) const MAX_SGE: u32 = 16;
pub(crate) const MAX_INLINE: u32 = 512;
pub(crate) const MAX_CQE: u32 = 1 << 22;
pub(crate) const MAX_SRQ_WR: u32 = 32767;
pub(crate) const MAX_SRQ_SGE: u32 = 15;
const MAX_RD_ATOMIC: c_int = 16;
const MAX_MESSAGE: u32 = 1 << 30;
/// How long the engine's thread spins after its last work.
const SPIN: Duration = Duration::from_micros(200);
/// The table's only GID and partition key.
pub(crate) const PKEY: u16 = 0xffff;

/// `struct verbs_context`, with what belongs to it. C holds a pointer to `abi.context`.
#[repr(C)]
pub(crate) struct Context {
    abi: abi::VerbsContext,
    pub device: &'static Device,
    pub async_fd: OwnedFd,
    pub registry: Registry,
    /// Protection domains and completion queues, which point to this structure.
    pub users: Users,
    opened: OnceLock<Open>,
    opening: Mutex<()>,
}

/// The software HCA of an open device.
pub(crate) struct Open {
    pub verbs: verbs::Context,
    /// Where datagrams may be sent.
    destinations: Mutex<Destinations<AddressHandle>>,
    /// In the list of devices that an exit flushes.
    exit_number: u64,
}

impl Drop for Open {
    fn drop(&mut self) {
        process::remove(self.exit_number);
    }
}

/// A pointer to an open device, as C passes it and as objects hold it.
#[derive(Clone, Copy)]
#[repr(transparent)]
pub(crate) struct ContextPtr(pub(crate) *const abi::Context);

impl ContextPtr {
    /// # Errors
    /// `EINVAL` if it is null.
    pub(crate) fn get<'a>(self) -> Result<&'a Context> {
        let offset = std::mem::offset_of!(abi::VerbsContext, context);
        // SAFETY: not null, so `ibv_open_device` returned it: it points into a `Context`, which
        // begins this many bytes before it, and lives until the program closes the device.
        let whole =
            |context: *const abi::Context| unsafe { &*context.byte_sub(offset).cast::<Context>() };
        some((!self.0.is_null()).then(|| whole(self.0)))
    }

    /// The context of an object of this library.
    pub(crate) fn of<'a>(self) -> Result<(&'a Context, &'a Open)> {
        let context = self.get()?;
        Ok((context, context.open()?))
    }
}

impl Context {
    /// The software HCA, opened if it was not.
    pub(crate) fn open(&self) -> Result<&Open> {
        if let Some(open) = self.opened.get() {
            return Ok(open);
        }
        let _only = self.opening.lock();
        if let Some(open) = self.opened.get() {
            return Ok(open);
        }
        let verbs = open_hca(self.device)?;
        let data = epoll::EventData::new_u64(0);
        epoll::add(&self.async_fd, verbs.events().as_fd(), data, epoll::EventFlags::IN)?;
        let exit_number = process::add(&verbs);
        Ok(self.opened.get_or_init(|| Open { verbs, destinations: Mutex::default(), exit_number }))
    }

    /// The software HCA, if there is one yet.
    pub(crate) fn opened(&self) -> Option<&Open> {
        self.opened.get()
    }
}

impl Open {
    /// Where a datagram for this queue pair goes.
    pub(crate) fn destination(&self, peer: SocketAddr) -> Result<AddressHandle> {
        let create = || Ok(self.verbs.create_address_handle(peer)?);
        self.destinations.lock().get(peer, create)
    }
}

/// Handles of the last [`MAX_DESTINATIONS`] peers. They are kept when the program destroys its
/// address handles, because messages may still be queued; not for ever, because a program that
/// answers datagrams has a destination for each sender that somebody makes up.
struct Destinations<H> {
    known: HashMap<SocketAddr, H>,
    /// The oldest first.
    order: VecDeque<SocketAddr>,
}

/// As many as the messages that fit into a queue.
const MAX_DESTINATIONS: usize = MAX_QP_WR as usize;

impl<H> Default for Destinations<H> {
    fn default() -> Self {
        Self { known: HashMap::new(), order: VecDeque::new() }
    }
}

impl<H: Clone> Destinations<H> {
    /// The handle of a peer, made by `create` if there is none.
    fn get(&mut self, peer: SocketAddr, create: impl FnOnce() -> Result<H>) -> Result<H> {
        if let Some(handle) = self.known.get(&peer) {
            return Ok(handle.clone());
        }
        let handle = create()?;
        if self.order.len() >= MAX_DESTINATIONS
            && let Some(oldest) = self.order.pop_front()
        {
            self.known.remove(&oldest);
        }
        self.known.insert(peer, handle.clone());
        self.order.push_back(peer);
        Ok(handle)
    }
}

/// The settings of a device, from the environment.
#[derive(Clone, Copy)]
struct Settings {
    progress_mode: ProgressMode,
    /// No shared memory.
    is_udp_only: bool,
    /// RoCE's own port, where NICs and soft-RoCE send to.
    is_standard_port: bool,
}

impl Settings {
    /// # Errors
    /// `EINVAL` for a value that is none; the log has its variable.
    fn read() -> Result<Self> {
        let value = |name: &str| std::env::var(name).unwrap_or_default().trim().to_owned();
        let wrong = |name: &str, value: &str, known: &str| {
            log::line(|| format!("{name} is {value:?}; unset it, or set {known}"));
            INVALID
        };
        let port = value("WARPWIRE_IB_PORT");
        let link = value("WARPWIRE_IB_LINK");
        let progress = value("WARPWIRE_IB_PROGRESS");
        if !["", "4791"].contains(&port.as_str()) {
            return Err(wrong("WARPWIRE_IB_PORT", &port, "4791"));
        }
        if !["", "auto", "udp"].contains(&link.as_str()) {
            return Err(wrong("WARPWIRE_IB_LINK", &link, "auto or udp"));
        }
        let progress_mode = ProgressMode::from_setting(&progress, SPIN).ok_or_else(|| {
            wrong("WARPWIRE_IB_PROGRESS", &progress, "auto, thread or microseconds to spin")
        })?;
        Ok(Self { progress_mode, is_udp_only: link == "udp", is_standard_port: !port.is_empty() })
    }
}

/// Opens a software HCA on the first free slot of the device's address, or on RoCE's own port.
fn open_hca(device: &Device) -> Result<verbs::Context> {
    let settings = Settings::read()?;
    if settings.is_standard_port {
        return bind(device, None, settings);
    }
    // Processes start at different slots: a port that was just closed is not taken at once.
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let clock = clock.map_or(0, |since| since.subsec_nanos());
    let start = (std::process::id().wrapping_mul(37) ^ clock >> 10) as u16 % QpnSlot::COUNT;
    for offset in 0..QpnSlot::COUNT {
        let slot = QpnSlot::new((start + offset) % QpnSlot::COUNT);
        match bind(device, slot, settings) {
            Err(Errno(libc::EADDRINUSE)) => {}
            opened => return opened,
        }
    }
    log::line(|| format!("all {} UDP ports of {} are in use", QpnSlot::COUNT, device.ip));
    Err(Errno(libc::EADDRINUSE))
}

fn bind(device: &Device, qpn_slot: Option<QpnSlot>, settings: Settings) -> Result<verbs::Context> {
    let at = SocketAddr::new(device.ip, numbers::port(qpn_slot));
    let options = HcaOptions::default()
        .with_progress_mode(settings.progress_mode)
        .with_immediate_acks(true)
        .with_qpn_slot(qpn_slot);
    if settings.is_udp_only {
        return open_on(Udp::bind(at, UdpOptions::default())?, options);
    }
    open_on(Auto::bind(at, UdpOptions::default(), ShmOptions::default())?, options)
}

/// Opens the software HCA on a link, whose packets are captured if the program's user wants that.
fn open_on(link: impl Link + 'static, options: HcaOptions) -> Result<verbs::Context> {
    Ok(match capture::get()? {
        Some(capture) => verbs::Context::open_with(Tap::new(link, capture), options)?,
        None => verbs::Context::open_with(link, options)?,
    })
}

pub(crate) fn open_device(device: &'static Device) -> Result<*mut abi::Context> {
    let async_fd = epoll::create(epoll::CreateFlags::CLOEXEC)?;
    let context = abi::Context {
        device: &raw const device.abi,
        ops: context_ops(),
        // There is no kernel to command; programs that share devices duplicate the descriptor.
        cmd_fd: async_fd.as_raw_fd(),
        async_fd: async_fd.as_raw_fd(),
        num_comp_vectors: 1,
        mutex: [0; 5],
        abi_compat: std::ptr::without_provenance(usize::MAX),
    };
    let null = std::ptr::null();
    let abi = abi::VerbsContext {
        query_port: query_port as Pointer,
        before_parent_domain: [null; 13],
        alloc_parent_domain: memory::alloc_parent_domain as Pointer,
        dealloc_td: memory::dealloc_td as Pointer,
        alloc_td: memory::alloc_td as Pointer,
        modify_cq: cq::modify_cq as Pointer,
        before_cq_ex: [null; 7],
        create_cq_ex: cq::create_cq_ex as Pointer,
        private: null,
        query_device_ex: query_device_ex as Pointer,
        before_qp_ex: [null; 5],
        create_qp_ex: qp::create_qp_ex as Pointer,
        get_srq_num: srq::get_srq_num as Pointer,
        create_srq_ex: srq::create_srq_ex as Pointer,
        last: [null; 3],
        sz: size_of::<abi::VerbsContext>(),
        context,
    };
    let made = give(Context {
        abi,
        device,
        async_fd,
        registry: Registry::default(),
        users: Users::default(),
        opened: OnceLock::new(),
        opening: Mutex::new(()),
    });
    let offset = std::mem::offset_of!(abi::VerbsContext, context);
    Ok(made.wrapping_byte_add(offset).cast())
}

fn context_ops() -> abi::ContextOps {
    let null = std::ptr::null();
    abi::ContextOps {
        query_device: exports::ibv_query_device as Pointer,
        query_port: exports::ibv_query_port as Pointer,
        before_mw: [null; 5],
        alloc_mw: window::alloc_mw as Pointer,
        bind_mw: window::bind_mw as Pointer,
        dealloc_mw: window::dealloc_mw as Pointer,
        before_poll: null,
        poll_cq: cq::poll_cq as Pointer,
        req_notify_cq: cq::req_notify_cq as Pointer,
        before_srq: [null; 7],
        post_srq_recv: post::post_srq_recv as Pointer,
        before_send: [null; 4],
        post_send: post::post_send as Pointer,
        post_recv: post::post_recv as Pointer,
        last: [null; 5],
    }
}

/// Closes a device. Objects that the program has not destroyed keep its software HCA open, and its
/// memory: calls that destroy them later, in the wrong order, still find it.
pub(crate) fn close_device(context: ContextPtr) -> Result<()> {
    let whole = context.get()?;
    if whole.users.check_none().is_err() {
        log::line(|| "a device was closed before its protection domains and completion queues");
        return Ok(());
    }
    let whole = std::ptr::from_ref(whole).cast_mut();
    // SAFETY: `open_device` leaked it; no object points to it, and the program does not use it
    // after this call.
    drop(unsafe { Box::from_raw(whole) });
    Ok(())
}

fn device_attr(device: &Device) -> abi::DeviceAttr {
    let mut fw_ver = [0; 64];
    fw_ver.iter_mut().zip(env!("CARGO_PKG_VERSION").bytes()).for_each(|(to, from)| *to = from);
    abi::DeviceAttr {
        fw_ver,
        node_guid: device.guid(),
        sys_image_guid: device.guid(),
        max_mr_size: u64::MAX,
        page_size_cap: !0xfff,
        // A locally administered identifier: no vendor's.
        vendor_id: 0x02_7777,
        vendor_part_id: 1,
        hw_ver: 0,
        max_qp: 4096,
        max_qp_wr: MAX_QP_WR as c_int,
        device_cap_flags: abi::CAP_CURR_QP_STATE_MOD
            | abi::CAP_PORT_ACTIVE_EVENT
            | abi::CAP_SYS_IMAGE_GUID
            | abi::CAP_RC_RNR_NAK_GEN
            | abi::CAP_MEM_WINDOW
            | abi::CAP_MEM_WINDOW_TYPE_2B,
        max_sge: MAX_SGE as c_int,
        max_sge_rd: MAX_SGE as c_int,
        max_cq: 1 << 16,
        max_cqe: MAX_CQE as c_int,
        max_mr: 1 << 20,
        max_pd: 1 << 16,
        max_qp_rd_atom: MAX_RD_ATOMIC,
        max_ee_rd_atom: 0,
        max_res_rd_atom: MAX_RD_ATOMIC * 4096,
        max_qp_init_rd_atom: MAX_RD_ATOMIC,
        max_ee_init_rd_atom: 0,
        atomic_cap: abi::ATOMIC_HCA as c_int,
        before_max_mw: [0; 2],
        max_mw: 1 << 20,
        before_max_ah: [0; 5],
        max_ah: 1 << 16,
        max_fmr: 0,
        max_map_per_fmr: 0,
        max_srq: 1 << 16,
        max_srq_wr: MAX_SRQ_WR as c_int,
        max_srq_sge: MAX_SRQ_SGE as c_int,
        max_pkeys: 1,
        local_ca_ack_delay: 0,
        phys_port_cnt: 1,
    }
}

pub(crate) fn query_device(context: ContextPtr) -> Result<abi::DeviceAttr> {
    Ok(device_attr(context.get()?.device))
}

/// `ibv_query_device_ex`: fills as much as the caller's structure has.
pub(crate) extern "C" fn query_device_ex(
    context: ContextPtr,
    _input: Pointer,
    attr: *mut c_void,
    len: usize,
) -> c_int {
    crate::boundary::status(|| {
        let orig_attr = device_attr(context.get()?.device);
        let all =
            abi::DeviceAttrEx { orig_attr, comp_mask: 0, extensions: [0; 40], phys_port_cnt_ex: 1 };
        fill(attr, len, &all)
    })
}

/// `ibv_query_port`: fills as much as the caller's structure has.
pub(crate) extern "C" fn query_port(
    context: ContextPtr,
    port: u8,
    attr: *mut c_void,
    len: usize,
) -> c_int {
    crate::boundary::status(|| fill(attr, len, &port_attr(context, port)?))
}

/// The port's attributes for callers whose structure ends before the link layer's extensions.
pub(crate) fn query_port_old(context: ContextPtr, port: u8, attr: *mut c_void) -> Result<()> {
    const LEN: usize = 48;
    fill(attr, LEN, &port_attr(context, port)?)
}

fn port_attr(context: ContextPtr, port: u8) -> Result<abi::PortAttr> {
    let device = context.get()?.device;
    check_port(port.into())?;
    let mtu = device.mtu.bytes().ilog2() as c_int - 7;
    Ok(abi::PortAttr {
        state: abi::PORT_ACTIVE as c_int,
        max_mtu: 5,
        active_mtu: mtu,
        gid_tbl_len: 1,
        port_cap_flags: 0,
        max_msg_sz: MAX_MESSAGE,
        bad_pkey_cntr: 0,
        qkey_viol_cntr: 0,
        pkey_tbl_len: 1,
        lid: 0,
        sm_lid: 0,
        lmc: 0,
        max_vl_num: 1,
        sm_sl: 0,
        subnet_timeout: 0,
        init_type_reply: 0,
        // 4 lanes of 25 Gb/s: what one core moves, and a value that all programs know.
        active_width: 2,
        active_speed: 32,
        phys_state: 5,
        link_layer: abi::LINK_ETHERNET as u8,
        flags: 0,
        port_cap_flags2: 0,
    })
}

/// Copies a structure into the caller's, which may be shorter or longer; the rest becomes zero.
fn fill<T: Copy>(into: *mut c_void, len: usize, from: &T) -> Result<()> {
    if into.is_null() {
        return Err(INVALID);
    }
    // SAFETY: the caller passes a structure of `len` bytes; structures of integers may be copied
    // as bytes.
    unsafe {
        std::ptr::write_bytes(into.cast::<u8>(), 0, len);
        let known = len.min(size_of::<T>());
        std::ptr::copy_nonoverlapping(std::ptr::from_ref(from).cast::<u8>(), into.cast(), known);
    }
    Ok(())
}

/// A device has the port 1 only.
pub(crate) fn check_port(port: u32) -> Result<()> {
    if port == 1 { Ok(()) } else { Err(INVALID) }
}

/// The entry of the GID table; `None` if the index has none.
pub(crate) fn gid_entry(context: ContextPtr, port: u32, index: u32) -> Result<abi::GidEntry> {
    let device = context.get()?.device;
    check_port(port)?;
    if index != 0 {
        return Err(Errno(libc::ENODATA));
    }
    Ok(abi::GidEntry {
        gid: gid(device.ip),
        gid_index: 0,
        port_num: 1,
        gid_type: abi::GID_ROCE_V2,
        ndev_ifindex: device.ifindex,
    })
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;
    use std::sync::Arc;

    use super::*;

    #[test]
    fn the_oldest_of_too_many_destinations_is_forgotten() {
        let mut destinations = Destinations::default();
        let peer = |number: u32| SocketAddr::new(Ipv4Addr::from(number).into(), 24576);
        let handle = Arc::new(());
        for number in 0..3 * MAX_DESTINATIONS as u32 {
            for _ in 0..2 {
                destinations.get(peer(number), || Ok(handle.clone())).unwrap();
            }
        }
        let count = MAX_DESTINATIONS;
        assert_eq!((destinations.known.len(), destinations.order.len()), (count, count));
        assert_eq!(Arc::strong_count(&handle), count + 1, "the others are dropped");
        let known = |number: u32| destinations.known.contains_key(&peer(number));
        assert!(known(3 * count as u32 - 1) && known(2 * count as u32) && !known(count as u32));
        assert_eq!(destinations.get(peer(7), || Err(INVALID)).err(), Some(INVALID));
        assert_eq!(destinations.known.len(), count, "a failure evicts nothing");
    }

    #[test]
    fn settings_of_the_engine() {
        let progress_mode = |text: &str| ProgressMode::from_setting(text, SPIN);
        let spins = |text: &str| match progress_mode(text) {
            Some(ProgressMode::Thread { spin, core: None }) => Some(spin.as_micros()),
            _ => None,
        };
        assert_eq!(progress_mode("auto"), Some(ProgressMode::Auto));
        assert_eq!((spins("thread"), spins("0"), spins("1500")), (Some(200), Some(0), Some(1500)));
        assert!(progress_mode("").is_some());
        for wrong in ["Thread", "-1", "5us", "99999999999"] {
            assert_eq!(progress_mode(wrong), None, "{wrong}");
        }
    }
}
