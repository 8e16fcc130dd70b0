//! Queue pairs, completion queues and shared receive queues of ids; attributes of connections.

use std::ptr::null_mut;

use crate::abi::{self, AhAttr, Gid, GlobalRoute, QpAttr, QpInitAttr, QpInitAttrEx};
use crate::abi::{Pointer, SrqInitAttr, SrqInitAttrEx};
use crate::boundary::{INVALID, Result, UNSUPPORTED};
use crate::id::Id;
use crate::message::Space;
use crate::service::service;
use crate::verbs::{qp_num, verbs};

/// The ACK timeout of connections whose program sets none: 67 ms, as perftest has it.
const ACK_TIMEOUT: u8 = 14;
/// How long a sender waits that found no receive request: 0.64 ms if it tries again for ever.
const SHORT_RNR_TIMER: u8 = 12;
/// Otherwise 655 ms, as of connections that Linux makes: programs count on retries for that long.
const LONG_RNR_TIMER: u8 = 0;
const FOR_EVER: u8 = 7;

/// The path to a port.
pub(crate) fn path_to(dgid: Gid, traffic_class: u8) -> AhAttr {
    let grh = GlobalRoute { dgid, hop_limit: 64, traffic_class, ..GlobalRoute::default() };
    AhAttr { grh, is_global: 1, port_num: 1, ..AhAttr::default() }
}

/// The number of the id's queue pair, or the one that the program has set.
pub(crate) fn number(id: &Id, set: u32) -> u32 {
    qp_num(id.abi.qp.get()).unwrap_or(set)
}

/// Completion queues that the program left to the library are the id's.
fn add_queues(
    id: &Id,
    send_cq: &mut Pointer,
    recv_cq: &mut Pointer,
    cap: abi::QpCap,
) -> Result<()> {
    let (verbs, context) = (verbs()?, id.abi.verbs.get());
    let of: Pointer = std::ptr::from_ref(id).cast_mut().cast();
    if send_cq.is_null() {
        let (channel, cq) = verbs.create_cq(context, cap.max_send_wr, of)?;
        id.abi.send_cq_channel.set(channel);
        id.abi.send_cq.set(cq);
        *send_cq = cq;
    }
    if recv_cq.is_null() {
        let (channel, cq) = verbs.create_cq(context, cap.max_recv_wr, of)?;
        id.abi.recv_cq_channel.set(channel);
        id.abi.recv_cq.set(cq);
        *recv_cq = cq;
    }
    Ok(())
}

fn remove_queues(id: &Id) {
    let of = &id.abi;
    for (channel, cq) in [(&of.send_cq_channel, &of.send_cq), (&of.recv_cq_channel, &of.recv_cq)] {
        if let Ok(verbs) = verbs() {
            verbs.destroy_cq(channel.replace(null_mut()), cq.replace(null_mut()));
        }
    }
}

/// Adopts a queue pair that was made, or ends the attempt.
fn adopt(id: &Id, made: Result<Pointer>, pd: Pointer, qp_type: u32, srq: Pointer) -> Result<()> {
    let adopted = made.and_then(|qp| {
        id.abi.qp.set(qp);
        id.abi.qp_type.set(qp_type);
        initialize(id).inspect_err(|_| {
            id.abi.qp.set(null_mut());
            let _ = verbs().and_then(|verbs| verbs.destroy_qp(qp));
        })
    });
    match adopted {
        Ok(()) => {
            id.abi.pd.set(pd);
            if !srq.is_null() {
                id.abi.srq.set(srq);
            }
        }
        Err(_) => remove_queues(id),
    }
    adopted
}

/// A new queue pair in state INIT; one for datagrams is ready to send.
fn initialize(id: &Id) -> Result<()> {
    modify(id, abi::QPS_INIT)?;
    if id.abi.qp_type.get() == abi::QPT_UD {
        modify(id, abi::QPS_RTR)?;
        modify(id, abi::QPS_RTS)?;
    }
    Ok(())
}

fn check(id: &Id, qp_type: u32) -> Result<()> {
    id.device()?;
    let fits = match id.space {
        Space::Tcp => qp_type == abi::QPT_RC || qp_type == abi::QPT_UC,
        Space::Udp => qp_type == abi::QPT_UD,
    };
    if !fits || !id.abi.qp.get().is_null() {
        return Err(INVALID);
    }
    Ok(())
}

pub(crate) fn create(id: &Id, pd: Pointer, attr: &mut QpInitAttr) -> Result<()> {
    check(id, attr.qp_type)?;
    let pd = choose_pd(id, pd)?;
    if attr.srq.is_null() {
        attr.srq = id.abi.srq.get();
    }
    add_queues(id, &mut attr.send_cq, &mut attr.recv_cq, attr.cap)
        .inspect_err(|_| remove_queues(id))?;
    let made = verbs()?.create_qp(pd, attr);
    adopt(id, made, pd, attr.qp_type, std::ptr::null_mut())
}

pub(crate) fn create_ex(id: &Id, attr: &mut QpInitAttrEx) -> Result<()> {
    check(id, attr.qp_type)?;
    let set = if attr.comp_mask & abi::INIT_PD != 0 { attr.pd } else { null_mut() };
    let pd = choose_pd(id, set)?;
    attr.pd = pd;
    attr.comp_mask |= abi::INIT_PD;
    if attr.srq.is_null() {
        attr.srq = id.abi.srq.get();
    }
    add_queues(id, &mut attr.send_cq, &mut attr.recv_cq, attr.cap)
        .inspect_err(|_| remove_queues(id))?;
    let made = verbs()?.create_qp_ex(id.abi.verbs.get(), attr);
    adopt(id, made, pd, attr.qp_type, std::ptr::null_mut())
}

fn choose_pd(id: &Id, set: Pointer) -> Result<Pointer> {
    match (set.is_null(), id.abi.pd.get()) {
        (false, _) => Ok(set),
        (true, own) if !own.is_null() => Ok(own),
        _ => id.device()?.default_pd(),
    }
}

pub(crate) fn destroy(id: &Id) {
    let qp = id.abi.qp.replace(null_mut());
    if !qp.is_null() {
        let _ = verbs().and_then(|verbs| verbs.destroy_qp(qp));
    }
    remove_queues(id);
}

pub(crate) fn create_srq(id: &Id, pd: Pointer, attr: &mut SrqInitAttr) -> Result<()> {
    if !id.abi.srq.get().is_null() {
        return Err(INVALID);
    }
    let pd = choose_pd(id, pd)?;
    id.abi.srq.set(verbs()?.create_srq(pd, attr)?);
    id.abi.pd.set(pd);
    Ok(())
}

pub(crate) fn create_srq_ex(id: &Id, attr: &mut SrqInitAttrEx) -> Result<()> {
    if attr.comp_mask & !(abi::SRQ_INIT_TYPE | abi::SRQ_INIT_PD) != 0
        || attr.comp_mask & abi::SRQ_INIT_TYPE != 0 && attr.srq_type != abi::SRQT_BASIC
    {
        return Err(UNSUPPORTED);
    }
    let pd = if attr.comp_mask & abi::SRQ_INIT_PD != 0 { attr.pd } else { null_mut() };
    let mut plain = SrqInitAttr { srq_context: attr.srq_context, attr: attr.attr };
    create_srq(id, pd, &mut plain)?;
    attr.attr = plain.attr;
    Ok(())
}

pub(crate) fn destroy_srq(id: &Id) {
    let srq = id.abi.srq.replace(null_mut());
    if !srq.is_null() {
        let _ = verbs().and_then(|verbs| verbs.destroy_srq(srq));
    }
}

/// Moves the id's queue pair to a state.
fn modify(id: &Id, state: u32) -> Result<()> {
    let (attr, mask) = attributes(id, state)?;
    verbs()?.modify_qp(id.abi.qp.get(), &attr, mask)
}

/// Connects the id's queue pair to the peer.
pub(crate) fn connect(id: &Id) -> Result<()> {
    modify(id, abi::QPS_RTR)?;
    modify(id, abi::QPS_RTS)
}

/// Ends the work of the id's queue pair, if it has one.
pub(crate) fn fail(id: &Id) {
    if !id.abi.qp.get().is_null() {
        let attr = QpAttr { qp_state: abi::QPS_ERR, ..QpAttr::default() };
        let _ = verbs().and_then(|verbs| verbs.modify_qp(id.abi.qp.get(), &attr, abi::QP_STATE));
    }
}

/// The attributes of a queue pair in a state, and their mask.
///
/// # Errors
/// `EINVAL` if the state is none of a connection, or nothing is known of a peer.
pub(crate) fn attributes(id: &Id, state: u32) -> Result<(QpAttr, u32)> {
    let attr = QpAttr { qp_state: state, port_num: 1, ..QpAttr::default() };
    let is_datagram = id.abi.qp_type.get() == abi::QPT_UD;
    match (state, is_datagram) {
        (abi::QPS_INIT, true) => {
            let mask = abi::QP_STATE | abi::QP_PKEY_INDEX | abi::QP_PORT | abi::QP_QKEY;
            Ok((QpAttr { qkey: abi::UDP_QKEY, ..attr }, mask))
        }
        (abi::QPS_INIT, false) => {
            let mask = abi::QP_STATE | abi::QP_PKEY_INDEX | abi::QP_PORT | abi::QP_ACCESS_FLAGS;
            let qp_access_flags =
                abi::ACCESS_REMOTE_WRITE | abi::ACCESS_REMOTE_READ | abi::ACCESS_REMOTE_ATOMIC;
            Ok((QpAttr { qp_access_flags, ..attr }, mask))
        }
        (abi::QPS_RTR, true) => Ok((attr, abi::QP_STATE)),
        (abi::QPS_RTS, true) => Ok((attr, abi::QP_STATE | abi::QP_SQ_PSN)),
        (abi::QPS_RTR, false) => {
            let (peer, _) = service()?.lock().get(id.number)?.peer.ok_or(INVALID)?;
            let device = id.device()?;
            let mut mask =
                abi::QP_STATE | abi::QP_AV | abi::QP_PATH_MTU | abi::QP_DEST_QPN | abi::QP_RQ_PSN;
            if id.abi.qp_type.get() == abi::QPT_RC {
                mask |= abi::QP_MAX_DEST_RD_ATOMIC | abi::QP_MIN_RNR_TIMER;
            }
            let min_rnr_timer = match id.rnr_retries_of_peer.get() {
                FOR_EVER => SHORT_RNR_TIMER,
                _ => LONG_RNR_TIMER,
            };
            let attr = QpAttr {
                ah_attr: path_to(peer.gid, id.traffic_class.get()),
                path_mtu: peer.mtu.min(device.mtu).into(),
                dest_qp_num: peer.qp_num,
                rq_psn: peer.psn,
                max_dest_rd_atomic: id.parameters.get().responder_resources,
                min_rnr_timer,
                ..attr
            };
            Ok((attr, mask))
        }
        (abi::QPS_RTS, false) => {
            let mut mask = abi::QP_STATE | abi::QP_SQ_PSN;
            if id.abi.qp_type.get() == abi::QPT_RC {
                mask |= abi::QP_TIMEOUT
                    | abi::QP_RETRY_CNT
                    | abi::QP_RNR_RETRY
                    | abi::QP_MAX_QP_RD_ATOMIC;
            }
            let agreed = id.parameters.get();
            let attr = QpAttr {
                sq_psn: id.psn,
                timeout: id.ack_timeout.get().unwrap_or(ACK_TIMEOUT),
                retry_cnt: agreed.retry_count,
                rnr_retry: agreed.rnr_retry_count,
                max_rd_atomic: agreed.initiator_depth,
                ..attr
            };
            Ok((attr, mask))
        }
        _ => Err(INVALID),
    }
}
