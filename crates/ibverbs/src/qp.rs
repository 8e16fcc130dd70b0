//! Queue pairs: creation, state, attributes.

use std::cell::Cell;
use std::ffi::c_int;
use std::net::IpAddr;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;
use warpwire::verbs::{
    self, Mtu, PathAttributes, QpAttributes, QpOptions, QpnSlot, Service, State,
};
use warpwire_proto::{Psn, qp::Access};

use crate::abi::{self, QpAttr, QpCap, QpInitAttr, QpInitAttrEx};
use crate::ah;
use crate::boundary::{INVALID, Result, UNSUPPORTED, give, pointer, some};
use crate::context::{ContextPtr, MAX_INLINE, MAX_QP_WR, MAX_SGE, check_port};
use crate::cq::Cq;
use crate::events::Kind;
use crate::memory::{Pd, Used, destroy, object};
use crate::qp_ex::{self, Builder};
use crate::srq::Srq;
use warpwire_cabi::interfaces;

use crate::numbers;

/// `struct ibv_qp`, and `struct ibv_qp_ex`.
#[repr(C)]
pub(crate) struct Qp {
    pub abi: abi::Qp,
    pub verbs: verbs::Qp,
    pub cap: QpCap,
    pub is_datagram: bool,
    sq_sig_all: c_int,
    /// The attributes as they were set.
    attr: Mutex<QpAttr>,
    /// Work that is being built with `ibv_wr_*`.
    pub builder: Builder,
    _uses: Vec<Used>,
}

pub(crate) fn create_qp(pd: Option<&Pd>, attr: Option<&mut QpInitAttr>) -> Result<*mut Qp> {
    create(some(pd)?, some(attr)?, None)
}

pub(crate) extern "C" fn create_qp_ex(
    context: ContextPtr,
    attr: Option<&mut QpInitAttrEx>,
) -> *mut Qp {
    pointer(|| {
        context.get()?;
        let attr = some(attr)?;
        let known = abi::INIT_PD | abi::INIT_SEND_OPS | abi::INIT_CREATE_FLAGS;
        let has_flags = attr.comp_mask & abi::INIT_CREATE_FLAGS != 0 && attr.create_flags != 0;
        if attr.comp_mask & !known != 0 || has_flags {
            return Err(UNSUPPORTED);
        }
        if attr.comp_mask & abi::INIT_PD == 0 {
            return Err(INVALID);
        }
        let mut plain = QpInitAttr {
            qp_context: attr.qp_context,
            send_cq: attr.send_cq,
            recv_cq: attr.recv_cq,
            srq: attr.srq,
            cap: attr.cap,
            qp_type: attr.qp_type,
            sq_sig_all: attr.sq_sig_all,
        };
        let has_ops = attr.comp_mask & abi::INIT_SEND_OPS != 0;
        let send_ops = has_ops.then_some(attr.send_ops_flags);
        let made = create(object(attr.pd)?, &mut plain, send_ops)?;
        attr.cap = plain.cap;
        Ok(made)
    })
}

/// The operations that `ibv_wr_*` can build for a kind of queue pair.
fn supported_ops(service: Service) -> u64 {
    let messages = abi::OPS_SEND | abi::OPS_SEND_IMM;
    let keys = abi::OPS_BIND_MW | abi::OPS_LOCAL_INV;
    let all = match service {
        Service::Ud => messages,
        Service::Uc => messages | keys | abi::OPS_RDMA_WRITE | abi::OPS_RDMA_WRITE_IMM,
        _ => {
            messages
                | keys
                | abi::OPS_SEND_INV
                | abi::OPS_RDMA_WRITE
                | abi::OPS_RDMA_WRITE_IMM
                | abi::OPS_RDMA_READ
                | abi::OPS_CMP_SWP
                | abi::OPS_FETCH_ADD
        }
    };
    all.into()
}

fn check_cap(cap: &QpCap, has_srq: bool) -> Result<()> {
    let receives_fit = has_srq || cap.max_recv_wr <= MAX_QP_WR && cap.max_recv_sge <= MAX_SGE;
    let sends_fit = cap.max_send_wr <= MAX_QP_WR && cap.max_send_sge <= MAX_SGE;
    if receives_fit && sends_fit && cap.max_inline_data <= MAX_INLINE {
        return Ok(());
    }
    Err(INVALID)
}

fn create(pd: &Pd, attr: &mut QpInitAttr, send_ops: Option<u64>) -> Result<*mut Qp> {
    let (context, open) = pd.context().of()?;
    let service = match attr.qp_type {
        abi::QPT_RC => Service::Rc,
        abi::QPT_UC => Service::Uc,
        abi::QPT_UD => Service::Ud,
        _ => return Err(UNSUPPORTED),
    };
    if send_ops.is_some_and(|ops| ops & !supported_ops(service) != 0) {
        return Err(UNSUPPORTED);
    }
    let (send_cq, recv_cq): (&Cq, &Cq) = (object(attr.send_cq)?, object(attr.recv_cq)?);
    let srq: Option<&Srq> = match attr.srq.is_null() {
        true => None,
        false => Some(object(attr.srq)?),
    };
    check_cap(&attr.cap, srq.is_some())?;
    // Inline data up to this length costs no room that a scatter-gather entry would not.
    attr.cap.max_inline_data = attr.cap.max_inline_data.max(64);
    if srq.is_none() {
        // As many as the queue holds: programs post until it is full.
        attr.cap.max_recv_wr = attr.cap.max_recv_wr.max(1).next_power_of_two();
    }
    let cap = attr.cap;
    let mut options = QpOptions::default()
        .with_service(service)
        .with_send_depth(cap.max_send_wr.max(1))
        .with_receive_depth(cap.max_recv_wr.max(1))
        .with_max_send_sge(cap.max_send_sge.max(1))
        .with_max_recv_sge(cap.max_recv_sge.max(1))
        .with_max_inline_data(cap.max_inline_data)
        .with_signal_all(attr.sq_sig_all != 0)
        .with_srq(srq.map(|srq| srq.verbs.clone()))
        .with_mtu((service == Service::Ud).then_some(context.device.mtu));
    options.tuning.send_depth = options.send_depth;
    if srq.is_some() {
        (options.receive_depth, options.max_recv_sge) = (1, 1);
    }
    let verbs = open.verbs.create_qp(&pd.verbs, &send_cq.verbs, &recv_cq.verbs, options)?;
    let number = verbs.number();
    let mut uses = vec![pd.add_user(), send_cq.users.add(), recv_cq.users.add()];
    uses.extend(srq.map(|srq| srq.users.add()));
    let made = give(Qp {
        abi: abi::Qp {
            context: pd.abi.context,
            qp_context: attr.qp_context,
            pd: &raw const pd.abi,
            send_cq: attr.send_cq,
            recv_cq: attr.recv_cq,
            srq: attr.srq,
            handle: number,
            qp_num: number,
            state: AtomicU32::new(0),
            qp_type: attr.qp_type,
            mutex: [0; 5],
            cond: [0; 6],
            events_completed: 0,
            comp_mask: 0,
            wr_id: Cell::new(0),
            wr_flags: Cell::new(0),
            calls: qp_ex::calls(),
        },
        verbs,
        cap,
        is_datagram: service == Service::Ud,
        sq_sig_all: attr.sq_sig_all,
        attr: Mutex::new(QpAttr { cap, ..QpAttr::default() }),
        builder: Builder::new(send_ops.is_some()),
        _uses: uses,
    });
    context.registry.add(Kind::Qp, number, made);
    Ok(made)
}

fn state(number: u32) -> Result<State> {
    const STATES: [State; 7] =
        [State::Reset, State::Init, State::Rtr, State::Rts, State::Sqd, State::Sqe, State::Err];
    STATES.get(number as usize).copied().ok_or(INVALID)
}

fn number(state: State) -> u32 {
    match state {
        State::Reset => 0,
        State::Init => 1,
        State::Rtr => 2,
        State::Rts => 3,
        State::Sqd => 4,
        State::Sqe => 5,
        State::Err => abi::QPS_ERR,
    }
}

fn access(flags: u32) -> Access {
    let known = [
        (abi::ACCESS_REMOTE_WRITE, Access::REMOTE_WRITE),
        (abi::ACCESS_REMOTE_READ, Access::REMOTE_READ),
        (abi::ACCESS_REMOTE_ATOMIC, Access::REMOTE_ATOMIC),
    ];
    let set = known.iter().filter(|(bit, _)| flags & bit != 0);
    set.fold(Access::NONE, |set, (_, right)| set | *right)
}

/// The path to the peer, whose process is in the number of its queue pair.
fn path(attr: &QpAttr, destination: u32) -> Result<PathAttributes> {
    let peer = numbers::address(ah::ip(&attr.ah_attr)?, destination);
    let route = &attr.ah_attr.grh;
    Ok(PathAttributes {
        peer,
        traffic_class: route.traffic_class & !3,
        hop_limit: route.hop_limit.max(1),
        flow_label: route.flow_label & 0xf_ffff,
        source_port: None,
    })
}

/// The path MTU in use: packets between processes of one machine do not pass the interface, and are
/// as large as RoCE has them. Both ends decide alike, from the addresses and both numbers.
fn mtu_to(peer: IpAddr, numbers: [u32; 2], asked: Mtu) -> Mtu {
    let are_ours = numbers.iter().all(|number| QpnSlot::of(*number).is_some());
    let is_local =
        || peer.is_loopback() || interfaces::addresses().iter().any(|known| known.ip == peer);
    if are_ours && is_local() { Mtu::ALL[Mtu::ALL.len() - 1] } else { asked }
}

/// The ACK timeout in use: four times the one asked for, as InfiniBand permits. Programs choose it
/// for NICs, which answer in microseconds; the process at the other end may wait for a CPU first.
fn timeout(asked: u8) -> u8 {
    match asked {
        0 => 0, // none
        1..=29 => asked + 2,
        _ => asked,
    }
}

/// The change that C asks for. What RoCE does not have is left out: alternate paths, migration,
/// rate limits.
fn change(qp: &Qp, attr: &QpAttr, mask: u32, max_mtu: Mtu) -> Result<QpAttributes> {
    const IGNORED: u32 = abi::QP_ALT_PATH | abi::QP_PATH_MIG_STATE | abi::QP_RATE_LIMIT;
    const KNOWN: u32 = (abi::QP_ALT_PATH * 2 - 1)
        | abi::QP_MIN_RNR_TIMER
        | abi::QP_SQ_PSN
        | abi::QP_MAX_DEST_RD_ATOMIC
        | abi::QP_DEST_QPN
        | IGNORED;
    if mask & !KNOWN != 0 {
        return Err(INVALID);
    }
    let has = |bit: u32| mask & bit != 0;
    let to = match has(abi::QP_STATE) {
        true => state(attr.qp_state)?,
        false => qp.verbs.state()?,
    };
    if has(abi::QP_PORT) {
        check_port(attr.port_num.into())?;
    }
    let mtu = match has(abi::QP_PATH_MTU) {
        true => {
            let known = Mtu::ALL.get((attr.path_mtu as usize).wrapping_sub(1)).copied();
            Some(known.filter(|mtu| *mtu <= max_mtu).ok_or(INVALID)?)
        }
        false => None,
    };
    let destination = match has(abi::QP_DEST_QPN) {
        true => attr.dest_qp_num,
        false => qp.attr.lock().dest_qp_num,
    };
    let path = has(abi::QP_AV).then(|| path(attr, destination)).transpose()?;
    let numbers = [qp.verbs.number(), destination];
    let mtu = mtu.map(|asked| path.map_or(asked, |path| mtu_to(path.peer.ip(), numbers, asked)));
    let current_state = has(abi::QP_CUR_STATE).then(|| state(attr.cur_qp_state)).transpose()?;
    let psn = |number: u32| Psn::new(number & 0xff_ffff);
    let mut change = QpAttributes::new(to);
    change.current_state = current_state;
    change.partition_index = has(abi::QP_PKEY_INDEX).then_some(attr.pkey_index);
    change.port = has(abi::QP_PORT).then_some(attr.port_num);
    change.access = has(abi::QP_ACCESS_FLAGS).then(|| access(attr.qp_access_flags));
    change.qkey = has(abi::QP_QKEY).then_some(attr.qkey);
    change.path = path;
    change.mtu = mtu;
    change.destination = has(abi::QP_DEST_QPN).then_some(attr.dest_qp_num);
    change.receive_psn = has(abi::QP_RQ_PSN).then(|| psn(attr.rq_psn));
    change.max_dest_rd_atomic = has(abi::QP_MAX_DEST_RD_ATOMIC).then_some(attr.max_dest_rd_atomic);
    change.min_rnr_timer = has(abi::QP_MIN_RNR_TIMER).then_some(attr.min_rnr_timer);
    change.send_psn = has(abi::QP_SQ_PSN).then(|| psn(attr.sq_psn));
    change.timeout = has(abi::QP_TIMEOUT).then_some(timeout(attr.timeout));
    change.retry_count = has(abi::QP_RETRY_CNT).then_some(attr.retry_cnt);
    change.rnr_retry = has(abi::QP_RNR_RETRY).then_some(attr.rnr_retry);
    change.max_rd_atomic = has(abi::QP_MAX_QP_RD_ATOMIC).then_some(attr.max_rd_atomic);
    change.notify_drained =
        has(abi::QP_EN_SQD_ASYNC_NOTIFY).then_some(attr.en_sqd_async_notify != 0);
    Ok(change)
}

pub(crate) fn modify_qp(qp: Option<&Qp>, attr: Option<&QpAttr>, mask: u32) -> Result<()> {
    let (qp, attr) = (some(qp)?, some(attr)?);
    let context = ContextPtr(qp.abi.context).get()?;
    let change = change(qp, attr, mask, context.device.mtu)?;
    qp.verbs.modify(&change)?;
    let mut known = qp.attr.lock();
    if change.to == State::Reset {
        *known = QpAttr { cap: qp.cap, ..QpAttr::default() };
    }
    remember(&mut known, attr, mask);
    known.qp_state = number(change.to);
    qp.abi.state.store(known.qp_state, Ordering::Relaxed);
    Ok(())
}

/// Stores the attributes that were set, for `ibv_query_qp`.
fn remember(known: &mut QpAttr, attr: &QpAttr, mask: u32) {
    macro_rules! copy {
        ($($bit:ident: $($field:ident),+;)*) => {
            $(if mask & abi::$bit != 0 { $(known.$field = attr.$field;)+ })*
        };
    }
    copy! {
        QP_EN_SQD_ASYNC_NOTIFY: en_sqd_async_notify;
        QP_ACCESS_FLAGS: qp_access_flags;
        QP_PKEY_INDEX: pkey_index;
        QP_PORT: port_num;
        QP_QKEY: qkey;
        QP_AV: ah_attr;
        QP_PATH_MTU: path_mtu;
        QP_TIMEOUT: timeout;
        QP_RETRY_CNT: retry_cnt;
        QP_RNR_RETRY: rnr_retry;
        QP_RQ_PSN: rq_psn;
        QP_MAX_QP_RD_ATOMIC: max_rd_atomic;
        QP_MIN_RNR_TIMER: min_rnr_timer;
        QP_SQ_PSN: sq_psn;
        QP_MAX_DEST_RD_ATOMIC: max_dest_rd_atomic;
        QP_DEST_QPN: dest_qp_num;
    }
}

pub(crate) fn query_qp(
    qp: Option<&Qp>,
    attr: Option<&mut QpAttr>,
    init: Option<&mut QpInitAttr>,
) -> Result<()> {
    let qp = some(qp)?;
    let current = number(qp.verbs.state()?);
    qp.abi.state.store(current, Ordering::Relaxed);
    let known = *qp.attr.lock();
    *some(attr)? = QpAttr { qp_state: current, cur_qp_state: current, ..known };
    if let Some(init) = init {
        *init = QpInitAttr {
            qp_context: qp.abi.qp_context,
            send_cq: qp.abi.send_cq,
            recv_cq: qp.abi.recv_cq,
            srq: qp.abi.srq,
            cap: qp.cap,
            qp_type: qp.abi.qp_type,
            sq_sig_all: qp.sq_sig_all,
        };
    }
    Ok(())
}

pub(crate) fn destroy_qp(qp: Option<Box<Qp>>) -> Result<()> {
    destroy(qp, |qp| {
        ContextPtr(qp.abi.context).get()?.registry.remove(Kind::Qp, qp.verbs.number());
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packets_within_a_machine_are_as_large_as_roce_has_them() {
        let (ours, others) = (0x80_1005, 0x11);
        let [small, large] = [Mtu::ALL[2], Mtu::ALL[4]];
        let [near, far]: [IpAddr; 2] = ["127.0.0.1", "198.51.100.77"].map(|ip| ip.parse().unwrap());
        assert_eq!(mtu_to(near, [ours, ours], small), large);
        assert_eq!(mtu_to(near, [ours, others], small), small, "RoCE's own port");
        assert_eq!(mtu_to(near, [others, ours], small), small);
        assert_eq!(mtu_to(far, [ours, ours], small), small);
        for at in interfaces::addresses() {
            assert_eq!(mtu_to(at.ip, [ours, ours], small), large, "{}", at.ip);
        }
    }
}
