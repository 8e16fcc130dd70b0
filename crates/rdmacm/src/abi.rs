//! The structures of `rdma/rdma_cma.h`, release 44, what is used of `infiniband/verbs.h`, and their
//! numbers. Fields have the headers' names; a test compares every size, offset and number with the
//! installed headers.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

pub(crate) use warpwire_cabi::verbs::*;

/// A pointer that this library passes on: an object of libibverbs, or the program's.
pub(crate) type Pointer = *mut c_void;

/// `struct sockaddr_storage`.
#[derive(Clone, Copy, PartialEq, Eq)]
#[repr(C, align(8))]
pub(crate) struct Sockaddr(pub(crate) [u8; 128]);

impl Sockaddr {
    pub(crate) const EMPTY: Self = Self([0; 128]);

    /// The address, if it is one of IPv4 or IPv6.
    pub(crate) fn get(&self) -> Option<SocketAddr> {
        let at = |from: usize, to: usize| self.0.get(from..to);
        let family = u16::from_ne_bytes(at(0, 2)?.try_into().ok()?);
        let port = u16::from_be_bytes(at(2, 4)?.try_into().ok()?);
        match c_int::from(family) {
            libc::AF_INET => {
                let ip: [u8; 4] = at(4, 8)?.try_into().ok()?;
                Some(SocketAddr::new(Ipv4Addr::from(ip).into(), port))
            }
            libc::AF_INET6 => {
                let ip: [u8; 16] = at(8, 24)?.try_into().ok()?;
                let scope = u32::from_ne_bytes(at(24, 28)?.try_into().ok()?);
                Some(SocketAddrV6::new(Ipv6Addr::from(ip), port, 0, scope).into())
            }
            _ => None,
        }
    }

    /// The length of the structure of its family.
    pub(crate) fn len(&self) -> usize {
        match self.get() {
            Some(SocketAddr::V4(_)) => size_of::<libc::sockaddr_in>(),
            Some(SocketAddr::V6(_)) => size_of::<libc::sockaddr_in6>(),
            None => 0,
        }
    }
}

impl From<SocketAddr> for Sockaddr {
    fn from(address: SocketAddr) -> Self {
        let mut made = [0; 128];
        let mut put = |at: usize, bytes: &[u8]| {
            if let Some(room) = made.get_mut(at..at + bytes.len()) {
                room.copy_from_slice(bytes);
            }
        };
        let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        put(0, &(family as u16).to_ne_bytes());
        put(2, &address.port().to_be_bytes());
        match address {
            SocketAddr::V4(four) => put(4, &four.ip().octets()),
            SocketAddr::V6(six) => {
                put(8, &six.ip().octets());
                put(24, &six.scope_id().to_ne_bytes());
            }
        }
        Self(made)
    }
}

/// An IP address as RoCE has it in a GID.
pub(crate) fn gid(ip: IpAddr) -> Gid {
    match ip {
        IpAddr::V4(four) => four.to_ipv6_mapped().octets(),
        IpAddr::V6(six) => six.octets(),
    }
}

/// The IP address in a GID, or a mapped one as the IPv4 address that it is.
pub(crate) fn ip(gid: Gid) -> IpAddr {
    Ipv6Addr::from(gid).to_canonical()
}

#[repr(C)]
pub(crate) struct EventChannel {
    pub fd: c_int,
}

#[repr(C, align(8))]
pub(crate) struct IbAddr {
    pub sgid: Cell<Gid>,
    pub dgid: Cell<Gid>,
    /// In network byte order; both bytes of the only key are the same.
    pub pkey: Cell<u16>,
}

#[repr(C)]
pub(crate) struct Route {
    pub src_addr: Cell<Sockaddr>,
    pub dst_addr: Cell<Sockaddr>,
    pub ibaddr: IbAddr,
    pub path_rec: Cell<*const PathRec>,
    pub num_paths: Cell<c_int>,
}

#[derive(Clone, Copy, Default)]
#[repr(C, align(8))]
pub(crate) struct PathRec {
    pub dgid: Gid,
    pub sgid: Gid,
    pub dlid: u16,
    pub slid: u16,
    pub raw_traffic: c_int,
    pub flow_label: u32,
    pub hop_limit: u8,
    pub traffic_class: u8,
    pub reversible: c_int,
    pub numb_path: u8,
    pub pkey: u16,
    pub sl: u8,
    pub mtu_selector: u8,
    pub mtu: u8,
    pub rate_selector: u8,
    pub rate: u8,
    pub packet_life_time_selector: u8,
    pub packet_life_time: u8,
    pub preference: u8,
}

#[repr(C)]
pub(crate) struct CmId {
    pub verbs: Cell<Pointer>,
    pub channel: Cell<*const EventChannel>,
    /// The program may change it.
    pub context: Cell<Pointer>,
    pub qp: Cell<Pointer>,
    pub route: Route,
    pub ps: u32,
    pub port_num: Cell<u8>,
    pub event: Cell<*mut CmEvent>,
    pub send_cq_channel: Cell<Pointer>,
    pub send_cq: Cell<Pointer>,
    pub recv_cq_channel: Cell<Pointer>,
    pub recv_cq: Cell<Pointer>,
    pub srq: Cell<Pointer>,
    pub pd: Cell<Pointer>,
    pub qp_type: Cell<u32>,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ConnParam {
    pub private_data: *const u8,
    pub private_data_len: u8,
    pub responder_resources: u8,
    pub initiator_depth: u8,
    pub flow_control: u8,
    pub retry_count: u8,
    pub rnr_retry_count: u8,
    pub srq: u8,
    pub qp_num: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UdParam {
    pub private_data: *const u8,
    pub private_data_len: u8,
    pub ah_attr: AhAttr,
    pub qp_num: u32,
    pub qkey: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) union EventParam {
    pub conn: ConnParam,
    pub ud: UdParam,
}

#[repr(C)]
pub(crate) struct CmEvent {
    pub id: *const CmId,
    pub listen_id: *const CmId,
    pub event: u32,
    pub status: c_int,
    pub param: EventParam,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct AddrInfo {
    pub ai_flags: c_int,
    pub ai_family: c_int,
    pub ai_qp_type: c_int,
    pub ai_port_space: c_int,
    pub ai_src_len: u32,
    pub ai_dst_len: u32,
    pub ai_src_addr: *const libc::sockaddr,
    pub ai_dst_addr: *const libc::sockaddr,
    pub ai_src_canonname: *const c_char,
    pub ai_dst_canonname: *const c_char,
    pub ai_route_len: usize,
    pub ai_route: Pointer,
    pub ai_connect_len: usize,
    pub ai_connect: Pointer,
    pub ai_next: Pointer,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct QpInitAttr {
    pub qp_context: Pointer,
    pub send_cq: Pointer,
    pub recv_cq: Pointer,
    pub srq: Pointer,
    pub cap: QpCap,
    pub qp_type: u32,
    pub sq_sig_all: c_int,
}

/// The beginning of the extended attributes. The first part has no padding at its end, so it is
/// spelled out.
#[repr(C)]
pub(crate) struct QpInitAttrEx {
    pub qp_context: Pointer,
    pub send_cq: Pointer,
    pub recv_cq: Pointer,
    pub srq: Pointer,
    pub cap: QpCap,
    pub qp_type: u32,
    pub sq_sig_all: c_int,
    pub comp_mask: u32,
    pub pd: Pointer,
    pub others: [u64; 8],
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct SrqInitAttr {
    pub srq_context: Pointer,
    pub attr: SrqAttr,
}

#[repr(C)]
pub(crate) struct SrqInitAttrEx {
    pub srq_context: Pointer,
    pub attr: SrqAttr,
    pub comp_mask: u32,
    pub srq_type: u32,
    pub pd: Pointer,
    pub others: [u64; 4],
}

/// A port's attributes, and room for those that other releases add.
#[repr(C)]
pub(crate) struct PortAttrRoom {
    pub attr: PortAttr,
    pub room: [u64; 8],
}

/// The beginning of a queue pair.
#[repr(C)]
pub(crate) struct Qp {
    pub pointers: [Pointer; 6],
    pub handle: u32,
    pub qp_num: u32,
}

warpwire_cabi::layouts! {
    pub(crate),
    "struct sockaddr_storage" Sockaddr, 128, {}
    "struct rdma_event_channel" EventChannel, 4, { fd 0 }
    "struct rdma_ib_addr" IbAddr, 40, { sgid 0, dgid 16, pkey 32 }
    "struct rdma_route" Route, 312, { path_rec 296, num_paths 304 }
    "struct ibv_sa_path_rec" PathRec, 64, { dgid 0, sgid 16, dlid 32, slid 34, raw_traffic 36, flow_label 40, hop_limit 44, traffic_class 45, reversible 48, numb_path 52, pkey 54, sl 56, mtu_selector 57, mtu 58, rate_selector 59, rate 60, packet_life_time_selector 61, packet_life_time 62, preference 63 }
    "struct rdma_cm_id" CmId, 416, { verbs 0, channel 8, context 16, qp 24, route 32, ps 344, port_num 348, event 352, send_cq_channel 360, send_cq 368, recv_cq_channel 376, recv_cq 384, srq 392, pd 400, qp_type 408 }
    "struct rdma_conn_param" ConnParam, 24, { private_data 0, private_data_len 8, responder_resources 9, initiator_depth 10, flow_control 11, retry_count 12, rnr_retry_count 13, srq 14, qp_num 16 }
    "struct rdma_ud_param" UdParam, 56, { private_data 0, private_data_len 8, ah_attr 16, qp_num 48, qkey 52 }
    "struct rdma_cm_event" CmEvent, 80, { id 0, listen_id 8, event 16, status 20, param 24 }
    "struct rdma_addrinfo" AddrInfo, 96, { ai_flags 0, ai_family 4, ai_qp_type 8, ai_port_space 12, ai_src_len 16, ai_dst_len 20, ai_src_addr 24, ai_dst_addr 32, ai_src_canonname 40, ai_dst_canonname 48, ai_route_len 56, ai_route 64, ai_connect_len 72, ai_connect 80, ai_next 88 }
    "struct ibv_qp_init_attr" QpInitAttr, 64, { qp_context 0, send_cq 8, recv_cq 16, srq 24, cap 32, qp_type 52, sq_sig_all 56 }
    "struct ibv_qp_init_attr_ex" QpInitAttrEx, 136, { qp_context 0, send_cq 8, recv_cq 16, srq 24, cap 32, qp_type 52, sq_sig_all 56, comp_mask 60, pd 64 }
    "struct ibv_srq_init_attr" SrqInitAttr, 24, { srq_context 0, attr 8 }
    "struct ibv_srq_init_attr_ex" SrqInitAttrEx, 64, { srq_context 0, attr 8, comp_mask 20, srq_type 24, pd 32 }
    "struct ibv_qp" Qp, 56, { handle 48, qp_num 52 }
}

warpwire_cabi::numbers! {
    pub(crate),
    PS_TCP RDMA_PS_TCP 0x0106;
    PS_UDP RDMA_PS_UDP 0x0111;
    UDP_QKEY RDMA_UDP_QKEY 0x0123_4567;
    MAX_RESP_RES RDMA_MAX_RESP_RES 0xff;
    EVENT_ADDR_RESOLVED RDMA_CM_EVENT_ADDR_RESOLVED 0;
    EVENT_ROUTE_RESOLVED RDMA_CM_EVENT_ROUTE_RESOLVED 2;
    EVENT_CONNECT_REQUEST RDMA_CM_EVENT_CONNECT_REQUEST 4;
    EVENT_CONNECT_RESPONSE RDMA_CM_EVENT_CONNECT_RESPONSE 5;
    EVENT_CONNECT_ERROR RDMA_CM_EVENT_CONNECT_ERROR 6;
    EVENT_UNREACHABLE RDMA_CM_EVENT_UNREACHABLE 7;
    EVENT_REJECTED RDMA_CM_EVENT_REJECTED 8;
    EVENT_ESTABLISHED RDMA_CM_EVENT_ESTABLISHED 9;
    EVENT_DISCONNECTED RDMA_CM_EVENT_DISCONNECTED 10;
    RAI_PASSIVE RAI_PASSIVE 1;
    RAI_NUMERICHOST RAI_NUMERICHOST 2;
    RAI_FAMILY RAI_FAMILY 8;
    OPTION_ID RDMA_OPTION_ID 0;
    OPTION_ID_TOS RDMA_OPTION_ID_TOS 0;
    OPTION_ID_REUSEADDR RDMA_OPTION_ID_REUSEADDR 1;
    OPTION_ID_AFONLY RDMA_OPTION_ID_AFONLY 2;
    OPTION_ID_ACK_TIMEOUT RDMA_OPTION_ID_ACK_TIMEOUT 3;
}

/// Where `struct verbs_context` has its call, counted from `struct ibv_context` backwards, and the
/// size that it must have at least.
pub(crate) mod verbs_context {
    pub(crate) const SZ_BEFORE: usize = 8;
    pub(crate) const CREATE_QP_EX_BEFORE: usize = 320 - 264;
    pub(crate) const SIZE_WITH_CREATE_QP_EX: usize = 648 - 264;
    pub(crate) const ABI_COMPAT: usize = 320;
}

#[cfg(test)]
#[path = "abi_tests.rs"]
mod tests;
