//! The structures of `infiniband/verbs.h`, release 44, and its numbers. Fields have the header's
//! names; `tests/c_abi.rs` compares every size, offset and number with the installed header.
//!
//! Objects that programs hold are declared here as far as the header declares them; what this
//! library adds lies behind.

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_void};
use std::sync::atomic::{AtomicI32, AtomicU32};

use warpwire::verbs::Sge;

pub(crate) use warpwire_cabi::verbs::*;

pub(crate) type Pointer = *const c_void;

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct Device {
    pub ops: [usize; 2],
    pub node_type: c_int,
    pub transport_type: c_int,
    pub name: [c_char; 64],
    pub dev_name: [c_char; 64],
    pub dev_path: [c_char; 256],
    pub ibdev_path: [c_char; 256],
}

/// Calls that the header makes through this table. Unused ones are null.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ContextOps {
    pub query_device: Pointer,
    pub query_port: Pointer,
    pub before_mw: [Pointer; 5],
    pub alloc_mw: Pointer,
    pub bind_mw: Pointer,
    pub dealloc_mw: Pointer,
    pub before_poll: Pointer,
    pub poll_cq: Pointer,
    pub req_notify_cq: Pointer,
    pub before_srq: [Pointer; 7],
    pub post_srq_recv: Pointer,
    pub before_send: [Pointer; 4],
    pub post_send: Pointer,
    pub post_recv: Pointer,
    pub last: [Pointer; 5],
}

#[repr(C)]
pub(crate) struct Context {
    pub device: *const Device,
    pub ops: ContextOps,
    pub cmd_fd: c_int,
    pub async_fd: c_int,
    pub num_comp_vectors: c_int,
    pub mutex: [u64; 5],
    /// All ones: the context is part of a [`VerbsContext`].
    pub abi_compat: Pointer,
}

/// The calls that were added over time, in front of the context. Null ones are answered with
/// `EOPNOTSUPP` by the header.
#[repr(C)]
pub(crate) struct VerbsContext {
    pub query_port: Pointer,
    pub before_parent_domain: [Pointer; 13],
    pub alloc_parent_domain: Pointer,
    pub dealloc_td: Pointer,
    pub alloc_td: Pointer,
    pub modify_cq: Pointer,
    pub before_cq_ex: [Pointer; 7],
    pub create_cq_ex: Pointer,
    pub private: Pointer,
    pub query_device_ex: Pointer,
    pub before_qp_ex: [Pointer; 5],
    pub create_qp_ex: Pointer,
    pub get_srq_num: Pointer,
    pub create_srq_ex: Pointer,
    pub last: [Pointer; 3],
    /// Size of this structure, by which the header knows which calls there are.
    pub sz: usize,
    pub context: Context,
}

#[repr(C)]
pub(crate) struct Pd {
    pub context: *const Context,
    pub handle: u32,
}

#[repr(C)]
pub(crate) struct Mr {
    pub context: *const Context,
    pub pd: Cell<*const Pd>,
    pub addr: Cell<Pointer>,
    pub length: Cell<usize>,
    pub handle: u32,
    pub lkey: Cell<u32>,
    pub rkey: Cell<u32>,
}

#[repr(C)]
pub(crate) struct Mw {
    pub context: *const Context,
    pub pd: *const Pd,
    /// Programs change it, too.
    pub rkey: AtomicU32,
    pub handle: u32,
    /// `type` in the header.
    pub kind: u32,
}

/// `struct ibv_mw_bind_info`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct MwBindInfo {
    pub mr: *const Mr,
    pub addr: u64,
    pub length: u64,
    pub mw_access_flags: u32,
}

/// `struct ibv_mw_bind`, of `ibv_bind_mw`.
#[repr(C)]
pub(crate) struct MwBind {
    pub wr_id: u64,
    pub send_flags: u32,
    pub bind_info: MwBindInfo,
}

/// The part of a work request that binds a window.
#[repr(C)]
pub(crate) struct WrBindMw {
    pub mw: *const Mw,
    pub rkey: u32,
    pub bind_info: MwBindInfo,
}

#[repr(C)]
pub(crate) struct CompChannel {
    pub context: *const Context,
    pub fd: c_int,
    pub refcnt: AtomicI32,
}

/// `struct ibv_cq_ex`, whose beginning is `struct ibv_cq`.
#[repr(C)]
pub(crate) struct Cq {
    pub context: *const Context,
    pub channel: *const CompChannel,
    pub cq_context: *mut c_void,
    pub handle: u32,
    pub cqe: AtomicI32,
    pub mutex: [u64; 5],
    pub cond: [u64; 6],
    pub comp_events_completed: u32,
    pub async_events_completed: u32,
    pub comp_mask: u32,
    pub status: Cell<u32>,
    pub wr_id: Cell<u64>,
    pub calls: CqCalls,
}

/// The calls of an extended completion queue.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct CqCalls {
    pub start_poll: Pointer,
    pub next_poll: Pointer,
    pub end_poll: Pointer,
    pub read_opcode: Pointer,
    pub read_vendor_err: Pointer,
    pub read_byte_len: Pointer,
    pub read_imm_data: Pointer,
    pub read_qp_num: Pointer,
    pub read_src_qp: Pointer,
    pub read_wc_flags: Pointer,
    pub read_slid: Pointer,
    pub read_sl: Pointer,
    pub read_dlid_path_bits: Pointer,
    pub read_completion_ts: Pointer,
    pub read_cvlan: Pointer,
    pub read_flow_tag: Pointer,
    pub read_tm_info: Pointer,
    pub read_completion_wallclock_ns: Pointer,
}

#[repr(C)]
pub(crate) struct Srq {
    pub context: *const Context,
    pub srq_context: *mut c_void,
    pub pd: *const Pd,
    pub handle: u32,
    pub mutex: [u64; 5],
    pub cond: [u64; 6],
    pub events_completed: u32,
}

/// `struct ibv_qp_ex`, whose beginning is `struct ibv_qp`. The last call exists since release 46.
#[repr(C)]
pub(crate) struct Qp {
    pub context: *const Context,
    pub qp_context: *mut c_void,
    pub pd: *const Pd,
    pub send_cq: *const Cq,
    pub recv_cq: *const Cq,
    pub srq: *const Srq,
    pub handle: u32,
    pub qp_num: u32,
    pub state: AtomicU32,
    pub qp_type: u32,
    pub mutex: [u64; 5],
    pub cond: [u64; 6],
    pub events_completed: u32,
    pub comp_mask: u64,
    pub wr_id: Cell<u64>,
    pub wr_flags: Cell<u32>,
    pub calls: QpCalls,
}

/// The calls of an extended queue pair, `ibv_wr_*`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct QpCalls {
    pub wr_atomic_cmp_swp: Pointer,
    pub wr_atomic_fetch_add: Pointer,
    pub wr_bind_mw: Pointer,
    pub wr_local_inv: Pointer,
    pub wr_rdma_read: Pointer,
    pub wr_rdma_write: Pointer,
    pub wr_rdma_write_imm: Pointer,
    pub wr_send: Pointer,
    pub wr_send_imm: Pointer,
    pub wr_send_inv: Pointer,
    pub wr_send_tso: Pointer,
    pub wr_set_ud_addr: Pointer,
    pub wr_set_xrc_srqn: Pointer,
    pub wr_set_inline_data: Pointer,
    pub wr_set_inline_data_list: Pointer,
    pub wr_set_sge: Pointer,
    pub wr_set_sge_list: Pointer,
    pub wr_start: Pointer,
    pub wr_complete: Pointer,
    pub wr_abort: Pointer,
    pub wr_atomic_write: Pointer,
    pub wr_flush: Pointer,
}

#[repr(C)]
pub(crate) struct Ah {
    pub context: *const Context,
    pub pd: *const Pd,
    pub handle: u32,
}

#[repr(C)]
pub(crate) struct Td {
    pub context: *const Context,
}

/// Of the extended attributes, only the number of ports is not zero.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct DeviceAttrEx {
    pub orig_attr: DeviceAttr,
    pub comp_mask: u32,
    pub extensions: [u32; 40],
    pub phys_port_cnt_ex: u32,
}

#[derive(Clone, Copy)]
#[repr(C, align(8))]
pub(crate) struct GidEntry {
    pub gid: Gid,
    pub gid_index: u32,
    pub port_num: u32,
    pub gid_type: u32,
    pub ndev_ifindex: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct QpInitAttr {
    pub qp_context: *mut c_void,
    pub send_cq: *const Cq,
    pub recv_cq: *const Cq,
    pub srq: *const Srq,
    pub cap: QpCap,
    pub qp_type: u32,
    pub sq_sig_all: c_int,
}

/// The extended attributes, up to the last one that is used here. The first part has no padding at
/// its end, so it is spelled out.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct QpInitAttrEx {
    pub qp_context: *mut c_void,
    pub send_cq: *const Cq,
    pub recv_cq: *const Cq,
    pub srq: *const Srq,
    pub cap: QpCap,
    pub qp_type: u32,
    pub sq_sig_all: c_int,
    pub comp_mask: u32,
    pub pd: *const Pd,
    pub xrcd: Pointer,
    pub create_flags: u32,
    pub max_tso_header: u16,
    pub rwq_ind_tbl: Pointer,
    pub rx_hash_conf: [u64; 3],
    pub source_qpn: u32,
    pub send_ops_flags: u64,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct SrqInitAttr {
    pub srq_context: *mut c_void,
    pub attr: SrqAttr,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct SrqInitAttrEx {
    pub srq_context: *mut c_void,
    pub attr: SrqAttr,
    pub comp_mask: u32,
    pub srq_type: u32,
    pub pd: *const Pd,
    pub xrcd: Pointer,
    pub cq: Pointer,
    pub tm_cap: [u32; 3],
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct CqInitAttrEx {
    pub cqe: u32,
    pub cq_context: *mut c_void,
    pub channel: *const CompChannel,
    pub comp_vector: u32,
    pub wc_flags: u64,
    pub comp_mask: u32,
    pub flags: u32,
    pub parent_domain: *const Pd,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ModifyCqAttr {
    pub attr_mask: u32,
    pub moderate: [u16; 2],
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct ParentDomainInitAttr {
    pub pd: *const Pd,
    pub td: *const Td,
    pub comp_mask: u32,
    pub alloc: Pointer,
    pub free: Pointer,
    pub pd_context: *mut c_void,
}

#[derive(Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct Wc {
    pub wr_id: u64,
    pub status: u32,
    pub opcode: u32,
    pub vendor_err: u32,
    pub byte_len: u32,
    /// Immediate data in network order, or the invalidated rkey.
    pub imm_data: [u8; 4],
    pub qp_num: u32,
    pub src_qp: u32,
    pub wc_flags: u32,
    pub pkey_index: u16,
    pub slid: u16,
    pub sl: u8,
    pub dlid_path_bits: u8,
}

#[repr(C)]
pub(crate) struct SendWr<'a> {
    pub wr_id: u64,
    pub next: Option<&'a SendWr<'a>>,
    pub sg_list: *const Sge,
    pub num_sge: c_int,
    pub opcode: u32,
    pub send_flags: u32,
    pub imm_data: [u8; 4],
    /// A union: see [`SendWr::remote`] and the other accessors.
    pub wr: [u64; 4],
    pub qp_type: u32,
    /// In a union with other operations.
    pub bind_mw: WrBindMw,
}

#[repr(C)]
pub(crate) struct RecvWr<'a> {
    pub wr_id: u64,
    pub next: Option<&'a RecvWr<'a>>,
    pub sg_list: *const Sge,
    pub num_sge: c_int,
}

/// `struct ibv_data_buf`: inline data of `ibv_wr_set_inline_data_list`.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct DataBuf {
    pub addr: *const u8,
    pub length: usize,
}

#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct AsyncEvent {
    /// The object concerned, or a port number.
    pub element: usize,
    pub event_type: u32,
}

warpwire_cabi::layouts! {
    pub(crate),
    "struct ibv_device" Device, 664, { node_type 16, transport_type 20, name 24, dev_name 88, dev_path 152, ibdev_path 408 }
    "struct ibv_context_ops" ContextOps, 256, { alloc_mw 56, bind_mw 64, dealloc_mw 72, poll_cq 88, req_notify_cq 96, post_srq_recv 160, post_send 200, post_recv 208 }
    "struct ibv_context" Context, 328, { device 0, ops 8, cmd_fd 264, async_fd 268, num_comp_vectors 272, mutex 280, abi_compat 320 }
    "struct verbs_context" VerbsContext, 648, { query_port 0, alloc_parent_domain 112, dealloc_td 120, alloc_td 128, modify_cq 136, create_cq_ex 200, query_device_ex 216, create_qp_ex 264, get_srq_num 272, create_srq_ex 280, sz 312, context 320 }
    "struct ibv_pd" Pd, 16, { context 0, handle 8 }
    "struct ibv_mr" Mr, 48, { context 0, pd 8, addr 16, length 24, handle 32, lkey 36, rkey 40 }
    "struct ibv_mw" Mw, 32, { context 0, pd 8, rkey 16, handle 20 }
    "struct ibv_mw_bind_info" MwBindInfo, 32, { mr 0, addr 8, length 16, mw_access_flags 24 }
    "struct ibv_mw_bind" MwBind, 48, { wr_id 0, send_flags 8, bind_info 16 }
    "struct ibv_comp_channel" CompChannel, 16, { context 0, fd 8, refcnt 12 }
    "struct ibv_cq" Cq, 128, { context 0, channel 8, cq_context 16, handle 24, cqe 28, mutex 32, cond 72, comp_events_completed 120, async_events_completed 124 }
    "struct ibv_cq_ex" Cq, 288, { comp_mask 128, status 132, wr_id 136 }
    "struct ibv_srq" Srq, 128, { context 0, srq_context 8, pd 16, handle 24, mutex 32, cond 72, events_completed 120 }
    "struct ibv_qp" Qp, 160, { context 0, qp_context 8, pd 16, send_cq 24, recv_cq 32, srq 40, handle 48, qp_num 52, state 56, qp_type 60, mutex 64, cond 104, events_completed 152 }
    "struct ibv_qp_ex" Qp, 352, { comp_mask 160, wr_id 168, wr_flags 176 }
    "struct ibv_ah" Ah, 24, { context 0, pd 8, handle 16 }
    "struct ibv_td" Td, 8, { context 0 }
    "struct ibv_device_attr_ex" DeviceAttrEx, 400, { orig_attr 0, comp_mask 232, phys_port_cnt_ex 396 }
    "struct ibv_gid_entry" GidEntry, 32, { gid 0, gid_index 16, port_num 20, gid_type 24, ndev_ifindex 28 }
    "struct ibv_qp_init_attr" QpInitAttr, 64, { qp_context 0, send_cq 8, recv_cq 16, srq 24, cap 32, qp_type 52, sq_sig_all 56 }
    "struct ibv_qp_init_attr_ex" QpInitAttrEx, 136, { qp_context 0, send_cq 8, recv_cq 16, srq 24, cap 32, qp_type 52, sq_sig_all 56, comp_mask 60, pd 64, xrcd 72, create_flags 80, max_tso_header 84, rwq_ind_tbl 88, rx_hash_conf 96, source_qpn 120, send_ops_flags 128 }
    "struct ibv_srq_init_attr" SrqInitAttr, 24, { srq_context 0, attr 8 }
    "struct ibv_srq_init_attr_ex" SrqInitAttrEx, 64, { srq_context 0, attr 8, comp_mask 20, srq_type 24, pd 32, xrcd 40, cq 48, tm_cap 56 }
    "struct ibv_cq_init_attr_ex" CqInitAttrEx, 56, { cqe 0, cq_context 8, channel 16, comp_vector 24, wc_flags 32, comp_mask 40, flags 44, parent_domain 48 }
    "struct ibv_modify_cq_attr" ModifyCqAttr, 8, { attr_mask 0, moderate 4 }
    "struct ibv_parent_domain_init_attr" ParentDomainInitAttr, 48, { pd 0, td 8, comp_mask 16, alloc 24, free 32, pd_context 40 }
    "struct ibv_wc" Wc, 48, { wr_id 0, status 8, opcode 12, vendor_err 16, byte_len 20, imm_data 24, qp_num 28, src_qp 32, wc_flags 36, pkey_index 40, slid 42, sl 44, dlid_path_bits 45 }
    "struct ibv_send_wr" SendWr<'_>, 128, { wr_id 0, next 8, sg_list 16, num_sge 24, opcode 28, send_flags 32, imm_data 36, wr 40, qp_type 72, bind_mw 80 }
    "struct ibv_recv_wr" RecvWr<'_>, 32, { wr_id 0, next 8, sg_list 16, num_sge 24 }
    "struct ibv_data_buf" DataBuf, 16, { addr 0, length 8 }
    "struct ibv_async_event" AsyncEvent, 16, { element 0, event_type 8 }
}

/// The calls of extended objects: the test compares their offsets as well.
macro_rules! calls {
    ($($c:literal $name:ident of $whole:ident $base:literal: $($field:ident)*;)*) => {
        const _: () = { $(assert!(std::mem::offset_of!($whole, calls) == $base);)* };

        #[cfg(test)]
        const CALLS: &[(&str, usize, &[(&str, usize)])] = &[$(($c, $base, &[
            $((stringify!($field), std::mem::offset_of!($name, $field)),)*
        ])),*];
    };
}

calls! {
    "struct ibv_cq_ex" CqCalls of Cq 144: start_poll next_poll end_poll read_opcode read_vendor_err
        read_byte_len read_imm_data read_qp_num read_src_qp read_wc_flags read_slid read_sl
        read_dlid_path_bits read_completion_ts read_cvlan read_flow_tag read_tm_info
        read_completion_wallclock_ns;
    "struct ibv_qp_ex" QpCalls of Qp 184: wr_atomic_cmp_swp wr_atomic_fetch_add wr_bind_mw
        wr_local_inv wr_rdma_read wr_rdma_write wr_rdma_write_imm wr_send wr_send_imm wr_send_inv
        wr_send_tso wr_set_ud_addr wr_set_xrc_srqn wr_set_inline_data wr_set_inline_data_list
        wr_set_sge wr_set_sge_list wr_start wr_complete wr_abort wr_atomic_write;
}

warpwire_cabi::numbers! {
    pub(crate),
    NODE_CA IBV_NODE_CA 1;
    TRANSPORT_IB IBV_TRANSPORT_IB 0;
    PORT_ACTIVE IBV_PORT_ACTIVE 4;
    LINK_ETHERNET IBV_LINK_LAYER_ETHERNET 2;
    GID_ROCE_V2 IBV_GID_TYPE_ROCE_V2 2;
    ATOMIC_HCA IBV_ATOMIC_HCA 1;
    CAP_CURR_QP_STATE_MOD IBV_DEVICE_CURR_QP_STATE_MOD 1 << 7;
    CAP_PORT_ACTIVE_EVENT IBV_DEVICE_PORT_ACTIVE_EVENT 1 << 10;
    CAP_SYS_IMAGE_GUID IBV_DEVICE_SYS_IMAGE_GUID 1 << 11;
    CAP_RC_RNR_NAK_GEN IBV_DEVICE_RC_RNR_NAK_GEN 1 << 12;
    CAP_MEM_WINDOW IBV_DEVICE_MEM_WINDOW 1 << 17;
    CAP_MEM_WINDOW_TYPE_2B IBV_DEVICE_MEM_WINDOW_TYPE_2B 1 << 24;
    MW_TYPE_1 IBV_MW_TYPE_1 1;
    MW_TYPE_2 IBV_MW_TYPE_2 2;
    INIT_CREATE_FLAGS IBV_QP_INIT_ATTR_CREATE_FLAGS 1 << 2;
    INIT_SEND_OPS IBV_QP_INIT_ATTR_SEND_OPS_FLAGS 1 << 6;
    CQ_INIT_FLAGS IBV_CQ_INIT_ATTR_MASK_FLAGS 1;
    CQ_INIT_PD IBV_CQ_INIT_ATTR_MASK_PD 1 << 1;
    CQ_SINGLE_THREADED IBV_CREATE_CQ_ATTR_SINGLE_THREADED 1;
    OPS_RDMA_WRITE IBV_QP_EX_WITH_RDMA_WRITE 1;
    OPS_RDMA_WRITE_IMM IBV_QP_EX_WITH_RDMA_WRITE_WITH_IMM 1 << 1;
    OPS_SEND IBV_QP_EX_WITH_SEND 1 << 2;
    OPS_SEND_IMM IBV_QP_EX_WITH_SEND_WITH_IMM 1 << 3;
    OPS_RDMA_READ IBV_QP_EX_WITH_RDMA_READ 1 << 4;
    OPS_CMP_SWP IBV_QP_EX_WITH_ATOMIC_CMP_AND_SWP 1 << 5;
    OPS_FETCH_ADD IBV_QP_EX_WITH_ATOMIC_FETCH_AND_ADD 1 << 6;
    OPS_LOCAL_INV IBV_QP_EX_WITH_LOCAL_INV 1 << 7;
    OPS_BIND_MW IBV_QP_EX_WITH_BIND_MW 1 << 8;
    OPS_SEND_INV IBV_QP_EX_WITH_SEND_WITH_INV 1 << 9;
    REREG_TRANSLATION IBV_REREG_MR_CHANGE_TRANSLATION 1;
    REREG_PD IBV_REREG_MR_CHANGE_PD 1 << 1;
    REREG_ACCESS IBV_REREG_MR_CHANGE_ACCESS 1 << 2;
    WR_RDMA_WRITE IBV_WR_RDMA_WRITE 0;
    WR_RDMA_WRITE_WITH_IMM IBV_WR_RDMA_WRITE_WITH_IMM 1;
    WR_SEND IBV_WR_SEND 2;
    WR_SEND_WITH_IMM IBV_WR_SEND_WITH_IMM 3;
    WR_RDMA_READ IBV_WR_RDMA_READ 4;
    WR_ATOMIC_CMP_AND_SWP IBV_WR_ATOMIC_CMP_AND_SWP 5;
    WR_ATOMIC_FETCH_AND_ADD IBV_WR_ATOMIC_FETCH_AND_ADD 6;
    WR_LOCAL_INV IBV_WR_LOCAL_INV 7;
    WR_BIND_MW IBV_WR_BIND_MW 8;
    WR_SEND_WITH_INV IBV_WR_SEND_WITH_INV 9;
    SEND_FENCE IBV_SEND_FENCE 1;
    SEND_SIGNALED IBV_SEND_SIGNALED 1 << 1;
    SEND_SOLICITED IBV_SEND_SOLICITED 1 << 2;
    SEND_INLINE IBV_SEND_INLINE 1 << 3;
    WC_SEND IBV_WC_SEND 0;
    WC_RDMA_WRITE IBV_WC_RDMA_WRITE 1;
    WC_RDMA_READ IBV_WC_RDMA_READ 2;
    WC_COMP_SWAP IBV_WC_COMP_SWAP 3;
    WC_FETCH_ADD IBV_WC_FETCH_ADD 4;
    WC_BIND_MW IBV_WC_BIND_MW 5;
    WC_LOCAL_INV IBV_WC_LOCAL_INV 6;
    WC_RECV IBV_WC_RECV 128;
    WC_RECV_RDMA_WITH_IMM IBV_WC_RECV_RDMA_WITH_IMM 129;
    WC_GRH IBV_WC_GRH 1;
    WC_WITH_IMM IBV_WC_WITH_IMM 1 << 1;
    WC_WITH_INV IBV_WC_WITH_INV 1 << 3;
    WC_STANDARD_FLAGS IBV_WC_STANDARD_FLAGS 0x7f;
    SRQ_MAX_WR IBV_SRQ_MAX_WR 1;
    SRQ_LIMIT IBV_SRQ_LIMIT 1 << 1;
    EVENT_CQ_ERR IBV_EVENT_CQ_ERR 0;
    EVENT_QP_FATAL IBV_EVENT_QP_FATAL 1;
    EVENT_QP_REQ_ERR IBV_EVENT_QP_REQ_ERR 2;
    EVENT_QP_ACCESS_ERR IBV_EVENT_QP_ACCESS_ERR 3;
    EVENT_COMM_EST IBV_EVENT_COMM_EST 4;
    EVENT_SQ_DRAINED IBV_EVENT_SQ_DRAINED 5;
    EVENT_DEVICE_FATAL IBV_EVENT_DEVICE_FATAL 8;
    EVENT_SRQ_ERR IBV_EVENT_SRQ_ERR 14;
    EVENT_SRQ_LIMIT_REACHED IBV_EVENT_SRQ_LIMIT_REACHED 15;
    EVENT_QP_LAST_WQE_REACHED IBV_EVENT_QP_LAST_WQE_REACHED 16;
    FORK_UNNEEDED IBV_FORK_UNNEEDED 2;
}

const _: () = {
    assert!(size_of::<Sge>() == 16);
    assert!(std::mem::offset_of!(Sge, address) == 0);
    assert!(std::mem::offset_of!(Sge, len) == 8);
    assert!(std::mem::offset_of!(Sge, lkey) == 12);
};

#[cfg(test)]
#[path = "abi_tests.rs"]
mod tests;
