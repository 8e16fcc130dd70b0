//! Structures of `infiniband/verbs.h`, release 44, that hold no pointers, and its numbers. Fields
//! have the header's names; the libraries' tests compare them with the installed header.
#![allow(missing_docs)] // the header's

use std::ffi::{c_int, c_uint};

/// `union ibv_gid`.
pub type Gid = [u8; 16];

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct DeviceAttr {
    pub fw_ver: [u8; 64],
    pub node_guid: u64,
    pub sys_image_guid: u64,
    pub max_mr_size: u64,
    pub page_size_cap: u64,
    pub vendor_id: u32,
    pub vendor_part_id: u32,
    pub hw_ver: u32,
    pub max_qp: c_int,
    pub max_qp_wr: c_int,
    pub device_cap_flags: c_uint,
    pub max_sge: c_int,
    pub max_sge_rd: c_int,
    pub max_cq: c_int,
    pub max_cqe: c_int,
    pub max_mr: c_int,
    pub max_pd: c_int,
    pub max_qp_rd_atom: c_int,
    pub max_ee_rd_atom: c_int,
    pub max_res_rd_atom: c_int,
    pub max_qp_init_rd_atom: c_int,
    pub max_ee_init_rd_atom: c_int,
    pub atomic_cap: c_int,
    pub before_max_mw: [c_int; 2],
    pub max_mw: c_int,
    pub before_max_ah: [c_int; 5],
    pub max_ah: c_int,
    pub max_fmr: c_int,
    pub max_map_per_fmr: c_int,
    pub max_srq: c_int,
    pub max_srq_wr: c_int,
    pub max_srq_sge: c_int,
    pub max_pkeys: u16,
    pub local_ca_ack_delay: u8,
    pub phys_port_cnt: u8,
}

#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct PortAttr {
    pub state: c_int,
    pub max_mtu: c_int,
    pub active_mtu: c_int,
    pub gid_tbl_len: c_int,
    pub port_cap_flags: u32,
    pub max_msg_sz: u32,
    pub bad_pkey_cntr: u32,
    pub qkey_viol_cntr: u32,
    pub pkey_tbl_len: u16,
    pub lid: u16,
    pub sm_lid: u16,
    pub lmc: u8,
    pub max_vl_num: u8,
    pub sm_sl: u8,
    pub subnet_timeout: u8,
    pub init_type_reply: u8,
    pub active_width: u8,
    pub active_speed: u8,
    pub phys_state: u8,
    pub link_layer: u8,
    pub flags: u8,
    pub port_cap_flags2: u16,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C, align(8))]
pub struct GlobalRoute {
    pub dgid: Gid,
    pub flow_label: u32,
    pub sgid_index: u8,
    pub hop_limit: u8,
    pub traffic_class: u8,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct AhAttr {
    pub grh: GlobalRoute,
    pub dlid: u16,
    pub sl: u8,
    pub src_path_bits: u8,
    pub static_rate: u8,
    pub is_global: u8,
    pub port_num: u8,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct QpCap {
    pub max_send_wr: u32,
    pub max_recv_wr: u32,
    pub max_send_sge: u32,
    pub max_recv_sge: u32,
    pub max_inline_data: u32,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct QpAttr {
    pub qp_state: u32,
    pub cur_qp_state: u32,
    pub path_mtu: u32,
    pub path_mig_state: u32,
    pub qkey: u32,
    pub rq_psn: u32,
    pub sq_psn: u32,
    pub dest_qp_num: u32,
    pub qp_access_flags: u32,
    pub cap: QpCap,
    pub ah_attr: AhAttr,
    pub alt_ah_attr: AhAttr,
    pub pkey_index: u16,
    pub alt_pkey_index: u16,
    pub en_sqd_async_notify: u8,
    pub sq_draining: u8,
    pub max_rd_atomic: u8,
    pub max_dest_rd_atomic: u8,
    pub min_rnr_timer: u8,
    pub port_num: u8,
    pub timeout: u8,
    pub retry_cnt: u8,
    pub rnr_retry: u8,
    pub alt_port_num: u8,
    pub alt_timeout: u8,
    pub rate_limit: u32,
}

#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
pub struct SrqAttr {
    pub max_wr: u32,
    pub max_sge: u32,
    pub srq_limit: u32,
}

crate::layouts! {
    pub,
    "struct ibv_device_attr" DeviceAttr, 232, { fw_ver 0, node_guid 64, sys_image_guid 72, max_mr_size 80, page_size_cap 88, vendor_id 96, vendor_part_id 100, hw_ver 104, max_qp 108, max_qp_wr 112, device_cap_flags 116, max_sge 120, max_sge_rd 124, max_cq 128, max_cqe 132, max_mr 136, max_pd 140, max_qp_rd_atom 144, max_res_rd_atom 152, max_qp_init_rd_atom 156, atomic_cap 164, max_mw 176, max_ah 200, max_srq 212, max_srq_wr 216, max_srq_sge 220, max_pkeys 224, local_ca_ack_delay 226, phys_port_cnt 227 }
    "struct ibv_port_attr" PortAttr, 52, { state 0, max_mtu 4, active_mtu 8, gid_tbl_len 12, port_cap_flags 16, max_msg_sz 20, bad_pkey_cntr 24, qkey_viol_cntr 28, pkey_tbl_len 32, lid 34, sm_lid 36, lmc 38, max_vl_num 39, sm_sl 40, subnet_timeout 41, init_type_reply 42, active_width 43, active_speed 44, phys_state 45, link_layer 46, flags 47, port_cap_flags2 48 }
    "struct ibv_global_route" GlobalRoute, 24, { dgid 0, flow_label 16, sgid_index 20, hop_limit 21, traffic_class 22 }
    "struct ibv_ah_attr" AhAttr, 32, { grh 0, dlid 24, sl 26, src_path_bits 27, static_rate 28, is_global 29, port_num 30 }
    "struct ibv_qp_cap" QpCap, 20, { max_send_wr 0, max_recv_wr 4, max_send_sge 8, max_recv_sge 12, max_inline_data 16 }
    "struct ibv_qp_attr" QpAttr, 144, { qp_state 0, cur_qp_state 4, path_mtu 8, path_mig_state 12, qkey 16, rq_psn 20, sq_psn 24, dest_qp_num 28, qp_access_flags 32, cap 36, ah_attr 56, alt_ah_attr 88, pkey_index 120, alt_pkey_index 122, en_sqd_async_notify 124, sq_draining 125, max_rd_atomic 126, max_dest_rd_atomic 127, min_rnr_timer 128, port_num 129, timeout 130, retry_cnt 131, rnr_retry 132, alt_port_num 133, alt_timeout 134, rate_limit 136 }
    "struct ibv_srq_attr" SrqAttr, 12, { max_wr 0, max_sge 4, srq_limit 8 }
}

crate::numbers! {
    pub,
    QPT_RC IBV_QPT_RC 2;
    QPT_UD IBV_QPT_UD 4;
    QPT_UC IBV_QPT_UC 3;
    QPS_ERR IBV_QPS_ERR 6;
    QPS_INIT IBV_QPS_INIT 1;
    QPS_RTR IBV_QPS_RTR 2;
    QPS_RTS IBV_QPS_RTS 3;
    QP_STATE IBV_QP_STATE 1;
    QP_CUR_STATE IBV_QP_CUR_STATE 1 << 1;
    QP_EN_SQD_ASYNC_NOTIFY IBV_QP_EN_SQD_ASYNC_NOTIFY 1 << 2;
    QP_ACCESS_FLAGS IBV_QP_ACCESS_FLAGS 1 << 3;
    QP_PKEY_INDEX IBV_QP_PKEY_INDEX 1 << 4;
    QP_PORT IBV_QP_PORT 1 << 5;
    QP_QKEY IBV_QP_QKEY 1 << 6;
    QP_AV IBV_QP_AV 1 << 7;
    QP_PATH_MTU IBV_QP_PATH_MTU 1 << 8;
    QP_TIMEOUT IBV_QP_TIMEOUT 1 << 9;
    QP_RETRY_CNT IBV_QP_RETRY_CNT 1 << 10;
    QP_RNR_RETRY IBV_QP_RNR_RETRY 1 << 11;
    QP_RQ_PSN IBV_QP_RQ_PSN 1 << 12;
    QP_MAX_QP_RD_ATOMIC IBV_QP_MAX_QP_RD_ATOMIC 1 << 13;
    QP_ALT_PATH IBV_QP_ALT_PATH 1 << 14;
    QP_MIN_RNR_TIMER IBV_QP_MIN_RNR_TIMER 1 << 15;
    QP_SQ_PSN IBV_QP_SQ_PSN 1 << 16;
    QP_MAX_DEST_RD_ATOMIC IBV_QP_MAX_DEST_RD_ATOMIC 1 << 17;
    QP_PATH_MIG_STATE IBV_QP_PATH_MIG_STATE 1 << 18;
    QP_DEST_QPN IBV_QP_DEST_QPN 1 << 20;
    QP_RATE_LIMIT IBV_QP_RATE_LIMIT 1 << 25;
    INIT_PD IBV_QP_INIT_ATTR_PD 1;
    SRQ_INIT_TYPE IBV_SRQ_INIT_ATTR_TYPE 1;
    SRQ_INIT_PD IBV_SRQ_INIT_ATTR_PD 1 << 1;
    SRQT_BASIC IBV_SRQT_BASIC 0;
    ACCESS_LOCAL_WRITE IBV_ACCESS_LOCAL_WRITE 1;
    ACCESS_REMOTE_WRITE IBV_ACCESS_REMOTE_WRITE 1 << 1;
    ACCESS_REMOTE_READ IBV_ACCESS_REMOTE_READ 1 << 2;
    ACCESS_REMOTE_ATOMIC IBV_ACCESS_REMOTE_ATOMIC 1 << 3;
    ACCESS_MW_BIND IBV_ACCESS_MW_BIND 1 << 4;
    ACCESS_ZERO_BASED IBV_ACCESS_ZERO_BASED 1 << 5;
    ACCESS_ON_DEMAND IBV_ACCESS_ON_DEMAND 1 << 6;
    ACCESS_HUGETLB IBV_ACCESS_HUGETLB 1 << 7;
    ACCESS_RELAXED_ORDERING IBV_ACCESS_RELAXED_ORDERING 1 << 20;
    ACCESS_OPTIONAL IBV_ACCESS_OPTIONAL_RANGE 0x3ff0_0000;
}
