//! The part of libibverbs' ABI that is used here: structures, constants, and the symbols of
//! `libibverbs.so.1`, which are resolved when the library is loaded. A symbol that an older library
//! lacks is `None`.
//!
//! Fields have the names of `infiniband/verbs.h`, so that a test can compare every offset with the
//! header. Structures that the library allocates are declared as far as they are read.

use std::ffi::{c_char, c_int, c_uint, c_void};

use libloading::Library;

/// Maximum length of a device name in sysfs, with its terminating zero.
const NAME_LEN: usize = 64;
const PATH_LEN: usize = 256;

#[repr(C)]
pub(super) struct IbvDevice {
    ops: [*mut c_void; 2],
    pub(super) node_type: c_int,
    pub(super) transport_type: c_int,
    pub(super) name: [c_char; NAME_LEN],
    pub(super) dev_name: [c_char; NAME_LEN],
    pub(super) dev_path: [c_char; PATH_LEN],
    pub(super) ibdev_path: [c_char; PATH_LEN],
}

/// A function that is not called through this table.
type Unused = *mut c_void;

pub(super) type PollCq = unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int;
pub(super) type NotifyCq = unsafe extern "C" fn(*mut Cq, c_int) -> c_int;
pub(super) type PostSend = unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int;
pub(super) type PostRecv = unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int;
pub(super) type PostSrqRecv =
    unsafe extern "C" fn(*mut Srq, *mut RecvWr, *mut *mut RecvWr) -> c_int;

/// Operations of the provider that the header's inline functions call.
#[repr(C)]
pub(super) struct ContextOps {
    first: [Unused; 11],
    pub(super) poll_cq: Option<PollCq>,
    pub(super) req_notify_cq: Option<NotifyCq>,
    cq_and_srq: [Unused; 7],
    pub(super) post_srq_recv: Option<PostSrqRecv>,
    qp: [Unused; 4],
    pub(super) post_send: Option<PostSend>,
    pub(super) post_recv: Option<PostRecv>,
    last: [Unused; 5],
}

#[repr(C)]
pub(super) struct Context {
    pub(super) device: *mut IbvDevice,
    pub(super) ops: ContextOps,
    pub(super) cmd_fd: c_int,
    pub(super) async_fd: c_int,
    pub(super) num_comp_vectors: c_int,
}

#[repr(C)]
pub(super) struct Pd {
    pub(super) context: *mut Context,
    pub(super) handle: u32,
}

#[repr(C)]
pub(super) struct Mr {
    pub(super) context: *mut Context,
    pub(super) pd: *mut Pd,
    pub(super) addr: *mut c_void,
    pub(super) length: usize,
    pub(super) handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

#[repr(C)]
pub(super) struct CompChannel {
    pub(super) context: *mut Context,
    pub(super) fd: c_int,
    pub(super) refcnt: c_int,
}

#[repr(C)]
pub(super) struct Cq {
    pub(super) context: *mut Context,
    pub(super) channel: *mut CompChannel,
    pub(super) cq_context: *mut c_void,
    pub(super) handle: u32,
    pub(super) cqe: c_int,
}

#[repr(C)]
pub(super) struct Srq {
    pub(super) context: *mut Context,
    pub(super) srq_context: *mut c_void,
    pub(super) pd: *mut Pd,
    pub(super) handle: u32,
}

#[repr(C)]
pub(super) struct Qp {
    pub(super) context: *mut Context,
    pub(super) qp_context: *mut c_void,
    pub(super) pd: *mut Pd,
    pub(super) send_cq: *mut Cq,
    pub(super) recv_cq: *mut Cq,
    pub(super) srq: *mut Srq,
    pub(super) handle: u32,
    pub(super) qp_num: u32,
    pub(super) state: c_int,
    pub(super) qp_type: c_int,
}

/// Allocated and read by the library only.
#[repr(C)]
pub(super) struct Ah {
    pub(super) context: *mut Context,
    pub(super) pd: *mut Pd,
    pub(super) handle: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct DeviceAttr {
    pub(super) fw_ver: [c_char; 64],
    pub(super) node_guid: u64,
    pub(super) sys_image_guid: u64,
    pub(super) max_mr_size: u64,
    pub(super) page_size_cap: u64,
    pub(super) vendor_id: u32,
    pub(super) vendor_part_id: u32,
    pub(super) hw_ver: u32,
    pub(super) max_qp: c_int,
    pub(super) max_qp_wr: c_int,
    pub(super) device_cap_flags: c_uint,
    pub(super) max_sge: c_int,
    pub(super) max_sge_rd: c_int,
    pub(super) max_cq: c_int,
    pub(super) max_cqe: c_int,
    pub(super) max_mr: c_int,
    pub(super) max_pd: c_int,
    pub(super) max_qp_rd_atom: c_int,
    max_ee_rd_atom: c_int,
    max_res_rd_atom: c_int,
    pub(super) max_qp_init_rd_atom: c_int,
    max_ee_init_rd_atom: c_int,
    pub(super) atomic_cap: c_int,
    max_ee: c_int,
    max_rdd: c_int,
    max_mw: c_int,
    max_raw_ipv6_qp: c_int,
    max_raw_ethy_qp: c_int,
    max_mcast_grp: c_int,
    max_mcast_qp_attach: c_int,
    max_total_mcast_qp_attach: c_int,
    pub(super) max_ah: c_int,
    max_fmr: c_int,
    max_map_per_fmr: c_int,
    pub(super) max_srq: c_int,
    pub(super) max_srq_wr: c_int,
    pub(super) max_srq_sge: c_int,
    pub(super) max_pkeys: u16,
    pub(super) local_ca_ack_delay: u8,
    pub(super) phys_port_cnt: u8,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct PortAttr {
    pub(super) state: c_int,
    pub(super) max_mtu: c_int,
    pub(super) active_mtu: c_int,
    pub(super) gid_tbl_len: c_int,
    pub(super) port_cap_flags: u32,
    pub(super) max_msg_sz: u32,
    bad_pkey_cntr: u32,
    qkey_viol_cntr: u32,
    pub(super) pkey_tbl_len: u16,
    pub(super) lid: u16,
    pub(super) sm_lid: u16,
    pub(super) lmc: u8,
    max_vl_num: u8,
    sm_sl: u8,
    subnet_timeout: u8,
    init_type_reply: u8,
    pub(super) active_width: u8,
    pub(super) active_speed: u8,
    pub(super) phys_state: u8,
    pub(super) link_layer: u8,
    pub(super) flags: u8,
    port_cap_flags2: u16,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct GidEntry {
    /// A 16-byte union with 8-byte alignment.
    pub(super) gid: [u64; 2],
    pub(super) gid_index: u32,
    pub(super) port_num: u32,
    pub(super) gid_type: u32,
    pub(super) ndev_ifindex: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct GlobalRoute {
    pub(super) dgid: [u64; 2],
    pub(super) flow_label: u32,
    pub(super) sgid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct AhAttr {
    pub(super) grh: GlobalRoute,
    pub(super) dlid: u16,
    pub(super) sl: u8,
    pub(super) src_path_bits: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port_num: u8,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct QpCap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct QpInitAttr {
    pub(super) qp_context: *mut c_void,
    pub(super) send_cq: *mut Cq,
    pub(super) recv_cq: *mut Cq,
    pub(super) srq: *mut Srq,
    pub(super) cap: QpCap,
    pub(super) qp_type: c_int,
    pub(super) sq_sig_all: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct QpAttr {
    pub(super) qp_state: c_int,
    pub(super) cur_qp_state: c_int,
    pub(super) path_mtu: c_int,
    path_mig_state: c_int,
    pub(super) qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qp_num: u32,
    pub(super) qp_access_flags: c_uint,
    cap: QpCap,
    pub(super) ah_attr: AhAttr,
    alt_ah_attr: AhAttr,
    pub(super) pkey_index: u16,
    alt_pkey_index: u16,
    pub(super) en_sqd_async_notify: u8,
    sq_draining: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) port_num: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    alt_port_num: u8,
    alt_timeout: u8,
    rate_limit: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct SrqAttr {
    pub(super) max_wr: u32,
    pub(super) max_sge: u32,
    pub(super) srq_limit: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct SrqInitAttr {
    pub(super) srq_context: *mut c_void,
    pub(super) attr: SrqAttr,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Wc {
    pub(super) wr_id: u64,
    pub(super) status: c_uint,
    pub(super) opcode: c_uint,
    pub(super) vendor_err: u32,
    pub(super) byte_len: u32,
    /// Immediate data in network order, or the invalidated rkey.
    pub(super) imm_data: u32,
    pub(super) qp_num: u32,
    pub(super) src_qp: u32,
    pub(super) wc_flags: c_uint,
    pub(super) pkey_index: u16,
    pub(super) slid: u16,
    pub(super) sl: u8,
    pub(super) dlid_path_bits: u8,
}

/// The union `wr` of a work request.
#[derive(Clone, Copy)]
#[repr(C)]
pub(super) union WrTarget {
    pub(super) rdma: Rdma,
    pub(super) atomic: AtomicTarget,
    pub(super) ud: Datagram,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Rdma {
    pub(super) remote_addr: u64,
    pub(super) rkey: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct AtomicTarget {
    pub(super) remote_addr: u64,
    pub(super) compare_add: u64,
    pub(super) swap: u64,
    pub(super) rkey: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct Datagram {
    pub(super) ah: *mut Ah,
    pub(super) remote_qpn: u32,
    pub(super) remote_qkey: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct SendWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut SendWr,
    pub(super) sg_list: *mut crate::work::Sge,
    pub(super) num_sge: c_int,
    pub(super) opcode: c_uint,
    pub(super) send_flags: c_uint,
    pub(super) imm_data: u32,
    pub(super) wr: WrTarget,
    pub(super) qp_type: u32,
    /// Memory windows and segmentation offload; not used.
    pub(super) bind_mw: [u64; 6],
}

impl SendWr {
    /// All zeros.
    pub(super) const EMPTY: Self = Self {
        wr_id: 0,
        next: std::ptr::null_mut(),
        sg_list: std::ptr::null_mut(),
        num_sge: 0,
        opcode: 0,
        send_flags: 0,
        imm_data: 0,
        wr: WrTarget { atomic: AtomicTarget { remote_addr: 0, compare_add: 0, swap: 0, rkey: 0 } },
        qp_type: 0,
        bind_mw: [0; 6],
    };
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct RecvWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut RecvWr,
    pub(super) sg_list: *mut crate::work::Sge,
    pub(super) num_sge: c_int,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(super) struct AsyncEvent {
    /// The object concerned, or a port number.
    pub(super) element: *mut c_void,
    pub(super) event_type: c_int,
}

/// Asserts sizes and offsets, and records them for the test against the header.
macro_rules! layouts {
    ($($c:literal $name:ty, $size:expr, { $($field:ident $offset:literal),* })*) => {
        const _: () = {
            $(
                if let Some(size) = $size {
                    let size: usize = size;
                    assert!(size_of::<$name>() == size);
                }
                $(assert!(std::mem::offset_of!($name, $field) == $offset);)*
            )*
        };

        #[cfg(test)]
        type Layout = (&'static str, Option<usize>, &'static [(&'static str, usize)]);

        #[cfg(test)]
        const LAYOUTS: &[Layout] = &[$(($c, $size, &[$((stringify!($field), $offset)),*])),*];
    };
}

/// Allocated by the library, so only a prefix is declared.
const PREFIX: Option<usize> = None;

layouts! {
    "struct ibv_device" IbvDevice, Some(664), { node_type 16, transport_type 20, name 24, dev_name 88, dev_path 152, ibdev_path 408 }
    "struct ibv_context_ops" ContextOps, Some(256), { poll_cq 88, req_notify_cq 96, post_srq_recv 160, post_send 200, post_recv 208 }
    "struct ibv_context" Context, PREFIX, { device 0, ops 8, cmd_fd 264, async_fd 268, num_comp_vectors 272 }
    "struct ibv_pd" Pd, Some(16), { context 0, handle 8 }
    "struct ibv_mr" Mr, Some(48), { context 0, pd 8, addr 16, length 24, handle 32, lkey 36, rkey 40 }
    "struct ibv_comp_channel" CompChannel, Some(16), { context 0, fd 8, refcnt 12 }
    "struct ibv_cq" Cq, PREFIX, { context 0, channel 8, cq_context 16, handle 24, cqe 28 }
    "struct ibv_srq" Srq, PREFIX, { context 0, srq_context 8, pd 16, handle 24 }
    "struct ibv_qp" Qp, PREFIX, { context 0, qp_context 8, pd 16, send_cq 24, recv_cq 32, srq 40, handle 48, qp_num 52, state 56, qp_type 60 }
    "struct ibv_ah" Ah, Some(24), { context 0, pd 8, handle 16 }
    "struct ibv_device_attr" DeviceAttr, Some(232), { fw_ver 0, node_guid 64, sys_image_guid 72, max_mr_size 80, page_size_cap 88, vendor_id 96, vendor_part_id 100, hw_ver 104, max_qp 108, max_qp_wr 112, device_cap_flags 116, max_sge 120, max_sge_rd 124, max_cq 128, max_cqe 132, max_mr 136, max_pd 140, max_qp_rd_atom 144, max_qp_init_rd_atom 156, atomic_cap 164, max_ah 200, max_srq 212, max_srq_wr 216, max_srq_sge 220, max_pkeys 224, local_ca_ack_delay 226, phys_port_cnt 227 }
    "struct ibv_port_attr" PortAttr, Some(52), { state 0, max_mtu 4, active_mtu 8, gid_tbl_len 12, port_cap_flags 16, max_msg_sz 20, pkey_tbl_len 32, lid 34, sm_lid 36, lmc 38, active_width 43, active_speed 44, phys_state 45, link_layer 46, flags 47, port_cap_flags2 48 }
    "struct ibv_gid_entry" GidEntry, Some(32), { gid 0, gid_index 16, port_num 20, gid_type 24, ndev_ifindex 28 }
    "struct ibv_global_route" GlobalRoute, Some(24), { dgid 0, flow_label 16, sgid_index 20, hop_limit 21, traffic_class 22 }
    "struct ibv_ah_attr" AhAttr, Some(32), { grh 0, dlid 24, sl 26, src_path_bits 27, static_rate 28, is_global 29, port_num 30 }
    "struct ibv_qp_cap" QpCap, Some(20), { max_send_wr 0, max_recv_wr 4, max_send_sge 8, max_recv_sge 12, max_inline_data 16 }
    "struct ibv_qp_init_attr" QpInitAttr, Some(64), { qp_context 0, send_cq 8, recv_cq 16, srq 24, cap 32, qp_type 52, sq_sig_all 56 }
    "struct ibv_qp_attr" QpAttr, Some(144), { qp_state 0, cur_qp_state 4, path_mtu 8, qkey 16, rq_psn 20, sq_psn 24, dest_qp_num 28, qp_access_flags 32, cap 36, ah_attr 56, alt_ah_attr 88, pkey_index 120, en_sqd_async_notify 124, max_rd_atomic 126, max_dest_rd_atomic 127, min_rnr_timer 128, port_num 129, timeout 130, retry_cnt 131, rnr_retry 132, rate_limit 136 }
    "struct ibv_srq_attr" SrqAttr, Some(12), { max_wr 0, max_sge 4, srq_limit 8 }
    "struct ibv_srq_init_attr" SrqInitAttr, Some(24), { srq_context 0, attr 8 }
    "struct ibv_wc" Wc, Some(48), { wr_id 0, status 8, opcode 12, vendor_err 16, byte_len 20, imm_data 24, qp_num 28, src_qp 32, wc_flags 36, pkey_index 40, slid 42, sl 44, dlid_path_bits 45 }
    "struct ibv_send_wr" SendWr, Some(128), { wr_id 0, next 8, sg_list 16, num_sge 24, opcode 28, send_flags 32, imm_data 36, wr 40, qp_type 72, bind_mw 80 }
    "struct ibv_recv_wr" RecvWr, Some(32), { wr_id 0, next 8, sg_list 16, num_sge 24 }
    "struct ibv_async_event" AsyncEvent, Some(16), { element 0, event_type 8 }
}

const _: () = {
    assert!(size_of::<crate::work::Sge>() == 16);
    assert!(std::mem::offset_of!(crate::work::Sge, address) == 0);
    assert!(std::mem::offset_of!(crate::work::Sge, len) == 8);
    assert!(std::mem::offset_of!(crate::work::Sge, lkey) == 12);
    assert!(std::mem::offset_of!(AtomicTarget, rkey) == 24);
    assert!(std::mem::offset_of!(Datagram, remote_qkey) == 12);
};

/// Declares constants of the header, and records them for the test against it.
macro_rules! numbers {
    ($($name:ident = $c:ident $value:expr;)*) => {
        $(pub(super) const $name: u32 = $value;)*

        #[cfg(test)]
        const NUMBERS: &[(&str, u32)] = &[$((stringify!($c), $value)),*];
    };
}

numbers! {
    PORT_DOWN = IBV_PORT_DOWN 1;
    PORT_ACTIVE = IBV_PORT_ACTIVE 4;
    LINK_INFINIBAND = IBV_LINK_LAYER_INFINIBAND 1;
    LINK_ETHERNET = IBV_LINK_LAYER_ETHERNET 2;
    TRANSPORT_IB = IBV_TRANSPORT_IB 0;
    TRANSPORT_IWARP = IBV_TRANSPORT_IWARP 1;
    GID_ROCE_V1 = IBV_GID_TYPE_ROCE_V1 1;
    GID_ROCE_V2 = IBV_GID_TYPE_ROCE_V2 2;
    ATOMIC_NONE = IBV_ATOMIC_NONE 0;
    QPT_RC = IBV_QPT_RC 2;
    QPT_UC = IBV_QPT_UC 3;
    QPT_UD = IBV_QPT_UD 4;
    QPS_RESET = IBV_QPS_RESET 0;
    QPS_INIT = IBV_QPS_INIT 1;
    QPS_RTR = IBV_QPS_RTR 2;
    QPS_RTS = IBV_QPS_RTS 3;
    QPS_SQD = IBV_QPS_SQD 4;
    QPS_SQE = IBV_QPS_SQE 5;
    QPS_ERR = IBV_QPS_ERR 6;
    MTU_256 = IBV_MTU_256 1;
    MTU_4096 = IBV_MTU_4096 5;
    QP_STATE = IBV_QP_STATE 1;
    QP_CUR_STATE = IBV_QP_CUR_STATE 1 << 1;
    QP_EN_SQD_ASYNC_NOTIFY = IBV_QP_EN_SQD_ASYNC_NOTIFY 1 << 2;
    QP_ACCESS_FLAGS = IBV_QP_ACCESS_FLAGS 1 << 3;
    QP_PKEY_INDEX = IBV_QP_PKEY_INDEX 1 << 4;
    QP_PORT = IBV_QP_PORT 1 << 5;
    QP_QKEY = IBV_QP_QKEY 1 << 6;
    QP_AV = IBV_QP_AV 1 << 7;
    QP_PATH_MTU = IBV_QP_PATH_MTU 1 << 8;
    QP_TIMEOUT = IBV_QP_TIMEOUT 1 << 9;
    QP_RETRY_CNT = IBV_QP_RETRY_CNT 1 << 10;
    QP_RNR_RETRY = IBV_QP_RNR_RETRY 1 << 11;
    QP_RQ_PSN = IBV_QP_RQ_PSN 1 << 12;
    QP_MAX_QP_RD_ATOMIC = IBV_QP_MAX_QP_RD_ATOMIC 1 << 13;
    QP_MIN_RNR_TIMER = IBV_QP_MIN_RNR_TIMER 1 << 15;
    QP_SQ_PSN = IBV_QP_SQ_PSN 1 << 16;
    QP_MAX_DEST_RD_ATOMIC = IBV_QP_MAX_DEST_RD_ATOMIC 1 << 17;
    QP_DEST_QPN = IBV_QP_DEST_QPN 1 << 20;
    ACCESS_LOCAL_WRITE = IBV_ACCESS_LOCAL_WRITE 1;
    ACCESS_REMOTE_WRITE = IBV_ACCESS_REMOTE_WRITE 1 << 1;
    ACCESS_REMOTE_READ = IBV_ACCESS_REMOTE_READ 1 << 2;
    ACCESS_REMOTE_ATOMIC = IBV_ACCESS_REMOTE_ATOMIC 1 << 3;
    ACCESS_MW_BIND = IBV_ACCESS_MW_BIND 1 << 4;
    ACCESS_ZERO_BASED = IBV_ACCESS_ZERO_BASED 1 << 5;
    ACCESS_ON_DEMAND = IBV_ACCESS_ON_DEMAND 1 << 6;
    ACCESS_RELAXED_ORDERING = IBV_ACCESS_RELAXED_ORDERING 1 << 20;
    WR_RDMA_WRITE = IBV_WR_RDMA_WRITE 0;
    WR_RDMA_WRITE_WITH_IMM = IBV_WR_RDMA_WRITE_WITH_IMM 1;
    WR_SEND = IBV_WR_SEND 2;
    WR_SEND_WITH_IMM = IBV_WR_SEND_WITH_IMM 3;
    WR_RDMA_READ = IBV_WR_RDMA_READ 4;
    WR_ATOMIC_CMP_AND_SWP = IBV_WR_ATOMIC_CMP_AND_SWP 5;
    WR_ATOMIC_FETCH_AND_ADD = IBV_WR_ATOMIC_FETCH_AND_ADD 6;
    WR_SEND_WITH_INV = IBV_WR_SEND_WITH_INV 9;
    SEND_FENCE = IBV_SEND_FENCE 1;
    SEND_SIGNALED = IBV_SEND_SIGNALED 1 << 1;
    SEND_SOLICITED = IBV_SEND_SOLICITED 1 << 2;
    SEND_INLINE = IBV_SEND_INLINE 1 << 3;
    WC_SEND = IBV_WC_SEND 0;
    WC_RDMA_WRITE = IBV_WC_RDMA_WRITE 1;
    WC_RDMA_READ = IBV_WC_RDMA_READ 2;
    WC_COMP_SWAP = IBV_WC_COMP_SWAP 3;
    WC_FETCH_ADD = IBV_WC_FETCH_ADD 4;
    WC_RECV_RDMA_WITH_IMM = IBV_WC_RECV_RDMA_WITH_IMM 129;
    WC_GRH = IBV_WC_GRH 1;
    WC_WITH_IMM = IBV_WC_WITH_IMM 1 << 1;
    WC_WITH_INV = IBV_WC_WITH_INV 1 << 3;
    SRQ_LIMIT = IBV_SRQ_LIMIT 1 << 1;
    EVENT_CQ_ERR = IBV_EVENT_CQ_ERR 0;
    EVENT_QP_FATAL = IBV_EVENT_QP_FATAL 1;
    EVENT_QP_REQ_ERR = IBV_EVENT_QP_REQ_ERR 2;
    EVENT_QP_ACCESS_ERR = IBV_EVENT_QP_ACCESS_ERR 3;
    EVENT_COMM_EST = IBV_EVENT_COMM_EST 4;
    EVENT_SQ_DRAINED = IBV_EVENT_SQ_DRAINED 5;
    EVENT_DEVICE_FATAL = IBV_EVENT_DEVICE_FATAL 8;
    EVENT_PORT_ACTIVE = IBV_EVENT_PORT_ACTIVE 9;
    EVENT_PORT_ERR = IBV_EVENT_PORT_ERR 10;
    EVENT_SM_CHANGE = IBV_EVENT_SM_CHANGE 13;
    EVENT_SRQ_ERR = IBV_EVENT_SRQ_ERR 14;
    EVENT_SRQ_LIMIT_REACHED = IBV_EVENT_SRQ_LIMIT_REACHED 15;
    EVENT_QP_LAST_WQE_REACHED = IBV_EVENT_QP_LAST_WQE_REACHED 16;
    EVENT_CLIENT_REREGISTER = IBV_EVENT_CLIENT_REREGISTER 17;
    EVENT_GID_CHANGE = IBV_EVENT_GID_CHANGE 18;
}

macro_rules! functions {
    ($($field:ident = $symbol:literal ($($parameter:ty),*) -> $result:ty, since $version:literal;)*) => {
        pub(super) struct Functions {
            $(pub(super) $field: Option<unsafe extern "C" fn($($parameter),*) -> $result>,)*
        }

        impl Functions {
            pub(super) fn load(library: &Library) -> Self {
                // SAFETY: each signature is the one that infiniband/verbs.h declares for the
                // symbol. If the library has several versions, the newest one, the header's, is
                // found.
                unsafe {
                    Self { $($field: library.get($symbol.as_bytes()).ok().map(|found| *found),)* }
                }
            }
        }

        /// Symbol names, and the first rdma-core release that has them; 0 for all releases.
        #[allow(non_upper_case_globals, dead_code)]
        pub(super) mod symbol {
            $(pub(crate) const $field: (&str, u32) = ($symbol, $version);)*
        }

        #[cfg(test)]
        const SYMBOLS: &[(&str, u32)] = &[$(($symbol, $version)),*];
    };
}

functions! {
    get_device_list = "ibv_get_device_list"(*mut c_int) -> *mut *mut IbvDevice, since 0;
    free_device_list = "ibv_free_device_list"(*mut *mut IbvDevice) -> (), since 0;
    get_device_guid = "ibv_get_device_guid"(*mut IbvDevice) -> u64, since 0;
    open_device = "ibv_open_device"(*mut IbvDevice) -> *mut Context, since 0;
    close_device = "ibv_close_device"(*mut Context) -> c_int, since 0;
    query_device = "ibv_query_device"(*mut Context, *mut DeviceAttr) -> c_int, since 0;
    query_port = "ibv_query_port"(*mut Context, u8, *mut PortAttr) -> c_int, since 0;
    query_gid_table = "_ibv_query_gid_table"(*mut Context, *mut GidEntry, usize, u32, usize) -> isize, since 32;
    alloc_pd = "ibv_alloc_pd"(*mut Context) -> *mut Pd, since 0;
    dealloc_pd = "ibv_dealloc_pd"(*mut Pd) -> c_int, since 0;
    reg_mr = "ibv_reg_mr"(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr, since 0;
    reg_mr_iova2 = "ibv_reg_mr_iova2"(*mut Pd, *mut c_void, usize, u64, c_uint) -> *mut Mr, since 28;
    reg_dmabuf_mr = "ibv_reg_dmabuf_mr"(*mut Pd, u64, usize, u64, c_int, c_int) -> *mut Mr, since 34;
    dereg_mr = "ibv_dereg_mr"(*mut Mr) -> c_int, since 0;
    create_comp_channel = "ibv_create_comp_channel"(*mut Context) -> *mut CompChannel, since 0;
    destroy_comp_channel = "ibv_destroy_comp_channel"(*mut CompChannel) -> c_int, since 0;
    create_cq = "ibv_create_cq"(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq, since 0;
    destroy_cq = "ibv_destroy_cq"(*mut Cq) -> c_int, since 0;
    get_cq_event = "ibv_get_cq_event"(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int, since 0;
    ack_cq_events = "ibv_ack_cq_events"(*mut Cq, c_uint) -> (), since 0;
    create_srq = "ibv_create_srq"(*mut Pd, *mut SrqInitAttr) -> *mut Srq, since 0;
    modify_srq = "ibv_modify_srq"(*mut Srq, *mut SrqAttr, c_int) -> c_int, since 0;
    destroy_srq = "ibv_destroy_srq"(*mut Srq) -> c_int, since 0;
    create_qp = "ibv_create_qp"(*mut Pd, *mut QpInitAttr) -> *mut Qp, since 0;
    modify_qp = "ibv_modify_qp"(*mut Qp, *mut QpAttr, c_int) -> c_int, since 0;
    query_qp = "ibv_query_qp"(*mut Qp, *mut QpAttr, c_int, *mut QpInitAttr) -> c_int, since 0;
    destroy_qp = "ibv_destroy_qp"(*mut Qp) -> c_int, since 0;
    create_ah = "ibv_create_ah"(*mut Pd, *mut AhAttr) -> *mut Ah, since 0;
    destroy_ah = "ibv_destroy_ah"(*mut Ah) -> c_int, since 0;
    get_async_event = "ibv_get_async_event"(*mut Context, *mut AsyncEvent) -> c_int, since 0;
    ack_async_event = "ibv_ack_async_event"(*mut AsyncEvent) -> (), since 0;
}

#[cfg(test)]
#[path = "sys_tests.rs"]
mod tests;
