//! Completion queues.

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use warpwire::verbs::WqeOpcode;
use warpwire::verbs::{self, Completion, CompletionKind};
use warpwire_cabi::Unacked;

use crate::abi::{self, Wc};
use crate::boundary::{INVALID, Result, UNSUPPORTED, count, pointer, some, status};
use crate::channel::{self, Channel};
use crate::context::{ContextPtr, MAX_CQE};
use crate::cq_ex::{self, Reader};
use crate::events::Kind;
use crate::memory::{Used, Users, destroy, object};

/// `struct ibv_cq`, and `struct ibv_cq_ex`.
#[repr(C)]
pub(crate) struct Cq {
    pub abi: abi::Cq,
    pub verbs: verbs::Cq,
    pub users: Users,
    /// Completion events.
    unacked: Arc<Unacked>,
    channel: Option<Arc<channel::Shared>>,
    pub reader: Reader,
    _device: Used,
}

/// How long work that was posted may take before a queue is resized.
const RESIZE_LIMIT: Duration = Duration::from_millis(10);

/// How a queue is to be made.
struct Request {
    cqe: u32,
    cq_context: *mut c_void,
    channel: *const abi::CompChannel,
    comp_vector: u32,
    single_threaded: bool,
}

pub(crate) fn create_cq(
    context: ContextPtr,
    cqe: c_int,
    cq_context: *mut c_void,
    channel: *const abi::CompChannel,
    comp_vector: c_int,
) -> Result<*mut Cq> {
    let cqe = u32::try_from(cqe).map_err(|_| INVALID)?;
    let comp_vector = u32::try_from(comp_vector).map_err(|_| INVALID)?;
    create(context, &Request { cqe, cq_context, channel, comp_vector, single_threaded: false })
}

pub(crate) extern "C" fn create_cq_ex(
    context: ContextPtr,
    attr: Option<&abi::CqInitAttrEx>,
) -> *mut Cq {
    pointer(|| {
        let attr = some(attr)?;
        let known = abi::CQ_INIT_FLAGS | abi::CQ_INIT_PD;
        let flags = if attr.comp_mask & abi::CQ_INIT_FLAGS == 0 { 0 } else { attr.flags };
        let unknown_fields = attr.wc_flags & !u64::from(abi::WC_STANDARD_FLAGS) != 0;
        if attr.comp_mask & !known != 0 || unknown_fields || flags & !abi::CQ_SINGLE_THREADED != 0 {
            return Err(UNSUPPORTED);
        }
        create(
            context,
            &Request {
                cqe: attr.cqe,
                cq_context: attr.cq_context,
                channel: attr.channel,
                comp_vector: attr.comp_vector,
                single_threaded: flags & abi::CQ_SINGLE_THREADED != 0,
            },
        )
    })
}

fn create(context: ContextPtr, request: &Request) -> Result<*mut Cq> {
    let device = context.get()?;
    if request.cqe == 0 || request.cqe > MAX_CQE || request.comp_vector != 0 {
        return Err(INVALID);
    }
    let channel: Option<&Channel> = match request.channel.is_null() {
        true => None,
        false => Some(object(request.channel)?),
    };
    if channel.is_some_and(|channel| !channel.is_of(context)) {
        return Err(INVALID); // numbers of queues are unique within a device
    }
    let verbs = device.open()?.verbs.create_cq(request.cqe)?;
    let unacked = Arc::default();
    let made = Box::new(Cq {
        abi: abi::Cq {
            context: context.0,
            channel: request.channel,
            cq_context: request.cq_context,
            handle: verbs.number(),
            cqe: AtomicI32::new(verbs.entries() as c_int),
            mutex: [0; 5],
            cond: [0; 6],
            comp_events_completed: 0,
            async_events_completed: 0,
            comp_mask: 0,
            status: Cell::new(0),
            wr_id: Cell::new(0),
            calls: cq_ex::calls(),
        },
        verbs: verbs.clone(),
        users: Users::default(),
        unacked: Arc::clone(&unacked),
        channel: channel.map(|channel| channel.shared.clone()),
        reader: Reader::new(request.single_threaded),
        _device: device.users.add(),
    });
    if let Some(channel) = channel {
        channel.shared.add(&raw const *made, request.cq_context, &verbs, &unacked)?;
        channel.count(1);
    }
    device.registry.add(Kind::Cq, verbs.number(), &raw const *made);
    Ok(Box::into_raw(made))
}

pub(crate) fn destroy_cq(cq: Option<Box<Cq>>) -> Result<()> {
    destroy(cq, |cq| {
        cq.users.check_none()?;
        if let Some(channel) = &cq.channel {
            channel.remove(&cq.verbs);
            if let Ok(channel) = object::<_, Channel>(cq.abi.channel) {
                channel.count(-1);
            }
        }
        cq.unacked.wait();
        ContextPtr(cq.abi.context).get()?.registry.remove(Kind::Cq, cq.verbs.number());
        Ok(())
    })
}

pub(crate) fn resize_cq(cq: Option<&Cq>, cqe: c_int) -> Result<()> {
    let cq = some(cq)?;
    let (_, open) = ContextPtr(cq.abi.context).of()?;
    // Work that was posted would have completed on a NIC: its completions must fit, too.
    if let Some(hca) = open.verbs.soft() {
        hca.flush(RESIZE_LIMIT);
    }
    cq.verbs.resize(u32::try_from(cqe).map_err(|_| INVALID)?)?;
    cq.abi.cqe.store(cq.verbs.entries() as c_int, Ordering::Relaxed);
    Ok(())
}

/// Moderation of events is a hint.
pub(crate) extern "C" fn modify_cq(cq: Option<&Cq>, attr: Option<&abi::ModifyCqAttr>) -> c_int {
    status(|| {
        some(cq)?;
        if some(attr)?.attr_mask & !1 == 0 { Ok(()) } else { Err(INVALID) }
    })
}

pub(crate) extern "C" fn req_notify_cq(cq: Option<&Cq>, solicited_only: c_int) -> c_int {
    status(|| Ok(some(cq)?.verbs.arm(solicited_only != 0)?))
}

pub(crate) fn ack_events(cq: Option<&Cq>, events: u32) {
    if let Some(cq) = cq {
        cq.unacked.ack(events.into());
    }
}

/// Polls up to `entries` completions; -1 if the device has failed.
pub(crate) extern "C" fn poll_cq(cq: Option<&Cq>, entries: c_int, into: *mut Wc) -> c_int {
    count(|| {
        let cq = some(cq)?;
        let mut left = crate::post::completions(into, entries)?;
        let (mut done, mut total) = ([Completion::EMPTY; 16], 0);
        while !left.is_empty() {
            let asked = left.len().min(done.len());
            let found = cq.verbs.poll(&mut done[..asked])?;
            for (into, completion) in left.iter_mut().zip(&done[..found]) {
                into.write(wc(completion));
            }
            left = &mut left[found..];
            total += found as c_int;
            if found < asked {
                break;
            }
        }
        Ok(total)
    })
}

/// A completion as C sees it.
pub(crate) fn wc(completion: &Completion) -> Wc {
    let mut wc = Wc {
        wr_id: completion.id,
        status: completion.status as u32,
        vendor_err: completion.vendor_error,
        byte_len: completion.len,
        qp_num: completion.qpn,
        ..Wc::default()
    };
    wc.opcode = match completion.kind {
        CompletionKind::Send(opcode) => match opcode {
            WqeOpcode::RdmaWrite | WqeOpcode::RdmaWriteImm => abi::WC_RDMA_WRITE,
            WqeOpcode::RdmaRead => abi::WC_RDMA_READ,
            WqeOpcode::CompareSwap | WqeOpcode::MaskedCompareSwap => abi::WC_COMP_SWAP,
            WqeOpcode::FetchAdd | WqeOpcode::MaskedFetchAdd => abi::WC_FETCH_ADD,
            WqeOpcode::BindMw => abi::WC_BIND_MW,
            WqeOpcode::LocalInvalidate => abi::WC_LOCAL_INV,
            _ => abi::WC_SEND,
        },
        CompletionKind::Receive | CompletionKind::ReceiveFailed => abi::WC_RECV,
        CompletionKind::ReceiveImm(imm) => {
            (wc.imm_data, wc.wc_flags) = (imm, abi::WC_WITH_IMM);
            abi::WC_RECV
        }
        CompletionKind::ReceiveInvalidate(rkey) => {
            (wc.imm_data, wc.wc_flags) = (rkey.to_ne_bytes(), abi::WC_WITH_INV);
            abi::WC_RECV
        }
        CompletionKind::WriteImm(imm) => {
            (wc.imm_data, wc.wc_flags) = (imm, abi::WC_WITH_IMM);
            abi::WC_RECV_RDMA_WITH_IMM
        }
        // Failed sends; the opcode is undefined then.
        _ => abi::WC_SEND,
    };
    if let Some(sender) = completion.sender {
        wc.src_qp = sender.qpn;
        wc.wc_flags |= abi::WC_GRH;
        // RoCE has no service level here: NICs report the kind of IP header, and UCX reads it to
        // know where the addresses are.
        wc.sl = if sender.address.is_ipv4() { 0xa } else { 0x9 };
    }
    wc
}
