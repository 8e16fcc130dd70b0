//! `ibv_wr_*`: work is described call by call, and posted all at once or not at all.

use std::ffi::c_int;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::Mutex;
use warpwire::verbs::{Atomic, Remote, SendRequest, Sge, WrOp};

use crate::abi::{self, DataBuf, Pointer};
use crate::ah::Ah;
use crate::boundary::{Errno, INVALID, Result, UNSUPPORTED, nothing, some, status};
use crate::post::{bytes, push, slice, with_flags};
use crate::qp::Qp;
use crate::window::{Mw, bind_type_2};

/// Work between `ibv_wr_start` and `ibv_wr_complete`.
pub(crate) struct Builder {
    /// The queue pair was made for `ibv_wr_*`.
    pub is_enabled: bool,
    /// A thread builds; others that start wait for its end.
    busy: AtomicBool,
    work: Mutex<Work>,
}

/// The requests; kept for their capacity.
#[derive(Default)]
struct Work {
    requests: Vec<Request>,
    sges: Vec<Sge>,
    inline: Vec<u8>,
    /// The first mistake, which `ibv_wr_complete` reports.
    refused: Option<Errno>,
}

struct Request {
    id: u64,
    flags: u32,
    op: WrOp,
    data: Range<usize>,
    inline: Option<Range<usize>>,
    to: Option<(*const Ah, u32, u32)>,
}

impl Builder {
    pub(crate) fn new(is_enabled: bool) -> Self {
        Self { is_enabled, busy: AtomicBool::new(false), work: Mutex::default() }
    }
}

pub(crate) fn calls() -> abi::QpCalls {
    abi::QpCalls {
        wr_atomic_cmp_swp: wr_atomic_cmp_swp as Pointer,
        wr_atomic_fetch_add: wr_atomic_fetch_add as Pointer,
        wr_bind_mw: wr_bind_mw as Pointer,
        wr_local_inv: wr_local_inv as Pointer,
        wr_rdma_read: wr_rdma_read as Pointer,
        wr_rdma_write: wr_rdma_write as Pointer,
        wr_rdma_write_imm: wr_rdma_write_imm as Pointer,
        wr_send: wr_send as Pointer,
        wr_send_imm: wr_send_imm as Pointer,
        wr_send_inv: wr_send_inv as Pointer,
        wr_send_tso: wr_unsupported as Pointer,
        wr_set_ud_addr: wr_set_ud_addr as Pointer,
        wr_set_xrc_srqn: wr_unsupported as Pointer,
        wr_set_inline_data: wr_set_inline_data as Pointer,
        wr_set_inline_data_list: wr_set_inline_data_list as Pointer,
        wr_set_sge: wr_set_sge as Pointer,
        wr_set_sge_list: wr_set_sge_list as Pointer,
        wr_start: wr_start as Pointer,
        wr_complete: wr_complete as Pointer,
        wr_abort: wr_abort as Pointer,
        wr_atomic_write: wr_unsupported as Pointer,
        wr_flush: wr_unsupported as Pointer,
    }
}

extern "C" fn wr_start(qp: Option<&Qp>) {
    let Some(qp) = qp else { return };
    while qp.builder.busy.swap(true, Ordering::Acquire) {
        std::thread::yield_now();
    }
    let mut work = qp.builder.work.lock();
    work.requests.clear();
    work.sges.clear();
    work.inline.clear();
    work.refused = None;
}

extern "C" fn wr_abort(qp: Option<&Qp>) {
    if let Some(qp) = qp {
        qp.builder.busy.store(false, Ordering::Release);
    }
}

extern "C" fn wr_complete(qp: Option<&Qp>) -> c_int {
    let posted = status(|| {
        let qp = some(qp)?;
        let work = qp.builder.work.lock();
        if let Some(refused) = work.refused {
            return Err(refused);
        }
        let mut batch = qp.verbs.batch()?;
        for request in &work.requests {
            let made = with_flags(SendRequest::new(request.id, request.op), request.flags)?;
            let made = match &request.inline {
                Some(range) => made.inline(work.inline.get(range.clone()).ok_or(INVALID)?),
                None => made.with(work.sges.get(request.data.clone()).ok_or(INVALID)?),
            };
            let to = match request.to {
                Some((ah, qpn, qkey)) => Some((crate::memory::object(ah)?, qpn, qkey)),
                None => None,
            };
            // A refusal drops the batch, and all of its requests.
            push(&mut batch, made, to)?;
        }
        batch.post();
        Ok(())
    });
    wr_abort(qp);
    posted
}

/// Adds a request, whose id and flags are in the queue pair.
fn add(qp: Option<&Qp>, op: WrOp) {
    nothing(|| {
        let Some(qp) = qp else { return };
        let mut work = qp.builder.work.lock();
        let start = work.sges.len();
        let (id, flags) = (qp.abi.wr_id.get(), qp.abi.wr_flags.get());
        work.requests.push(Request { id, flags, op, data: start..start, inline: None, to: None });
    });
}

/// Changes the last request; a mistake is kept for `ibv_wr_complete`.
fn change(qp: Option<&Qp>, change: impl FnOnce(&Qp, &mut Work) -> Result<()>) {
    nothing(|| {
        let Some(qp) = qp else { return };
        let mut work = qp.builder.work.lock();
        let changed = match work.requests.is_empty() {
            true => Err(INVALID),
            false => change(qp, &mut work),
        };
        if let Err(refused) = changed {
            work.refused.get_or_insert(refused);
        }
    });
}

impl Work {
    fn set_sges(&mut self, sges: &[Sge], max: u32) -> Result<()> {
        if sges.len() > max.max(1) as usize {
            return Err(INVALID);
        }
        let start = self.sges.len();
        self.sges.extend_from_slice(sges);
        if let Some(last) = self.requests.last_mut() {
            last.data = start..start + sges.len();
        }
        Ok(())
    }

    fn set_inline<'a>(
        &mut self,
        parts: impl Iterator<Item = Result<&'a [u8]>>,
        max: u32,
    ) -> Result<()> {
        let start = self.inline.len();
        for part in parts {
            self.inline.extend_from_slice(part?);
        }
        if self.inline.len() - start > max as usize {
            return Err(INVALID);
        }
        let end = self.inline.len();
        if let Some(last) = self.requests.last_mut() {
            last.inline = Some(start..end);
        }
        Ok(())
    }
}

/// Keeps a mistake for `ibv_wr_complete`.
fn refuse(qp: Option<&Qp>, why: Errno) {
    nothing(|| {
        if let Some(qp) = qp {
            qp.builder.work.lock().refused.get_or_insert(why);
        }
    });
}

extern "C" fn wr_unsupported(qp: Option<&Qp>) {
    refuse(qp, UNSUPPORTED);
}

extern "C" fn wr_bind_mw(
    qp: Option<&Qp>,
    mw: Option<&Mw>,
    rkey: u32,
    info: Option<&abi::MwBindInfo>,
) {
    let bind = || bind_type_2(some(qp)?, some(mw)?, some(info)?, rkey);
    match bind() {
        Ok(op) => add(qp, op),
        Err(refused) => refuse(qp, refused),
    }
}

extern "C" fn wr_local_inv(qp: Option<&Qp>, rkey: u32) {
    match qp {
        Some(datagrams) if datagrams.is_datagram => refuse(qp, INVALID),
        _ => add(qp, WrOp::LocalInvalidate(rkey)),
    }
}

extern "C" fn wr_send(qp: Option<&Qp>) {
    add(qp, WrOp::Send);
}

extern "C" fn wr_send_imm(qp: Option<&Qp>, imm: u32) {
    add(qp, WrOp::SendImm(imm.to_ne_bytes()));
}

extern "C" fn wr_send_inv(qp: Option<&Qp>, rkey: u32) {
    add(qp, WrOp::SendInvalidate(rkey));
}

extern "C" fn wr_rdma_read(qp: Option<&Qp>, rkey: u32, address: u64) {
    add(qp, WrOp::Read(Remote { address, rkey }));
}

extern "C" fn wr_rdma_write(qp: Option<&Qp>, rkey: u32, address: u64) {
    add(qp, WrOp::Write(Remote { address, rkey }));
}

extern "C" fn wr_rdma_write_imm(qp: Option<&Qp>, rkey: u32, address: u64, imm: u32) {
    add(qp, WrOp::WriteImm(Remote { address, rkey }, imm.to_ne_bytes()));
}

extern "C" fn wr_atomic_cmp_swp(qp: Option<&Qp>, rkey: u32, address: u64, compare: u64, swap: u64) {
    add(qp, WrOp::Atomic(Remote { address, rkey }, Atomic::CompareSwap { compare, swap }));
}

extern "C" fn wr_atomic_fetch_add(qp: Option<&Qp>, rkey: u32, address: u64, add_value: u64) {
    add(qp, WrOp::Atomic(Remote { address, rkey }, Atomic::FetchAdd { add: add_value }));
}

extern "C" fn wr_set_ud_addr(qp: Option<&Qp>, ah: *const Ah, qpn: u32, qkey: u32) {
    change(qp, |qp, work| {
        if ah.is_null() || !qp.is_datagram {
            return Err(INVALID);
        }
        if let Some(last) = work.requests.last_mut() {
            last.to = Some((ah, qpn, qkey));
        }
        Ok(())
    });
}

extern "C" fn wr_set_sge(qp: Option<&Qp>, lkey: u32, address: u64, len: u32) {
    let sge = Sge { address, len, lkey };
    change(qp, |qp, work| work.set_sges(&[sge], qp.cap.max_send_sge));
}

extern "C" fn wr_set_sge_list(qp: Option<&Qp>, count: usize, list: *const Sge) {
    change(qp, |qp, work| work.set_sges(slice(list, count)?, qp.cap.max_send_sge));
}

extern "C" fn wr_set_inline_data(qp: Option<&Qp>, address: *const u8, len: usize) {
    let part = || bytes(address.expose_provenance() as u64, len);
    change(qp, |qp, work| work.set_inline([part()].into_iter(), qp.cap.max_inline_data));
}

extern "C" fn wr_set_inline_data_list(qp: Option<&Qp>, count: usize, list: *const DataBuf) {
    change(qp, |qp, work| {
        let parts = slice(list, count)?.iter();
        let parts = parts.map(|part| bytes(part.addr.expose_provenance() as u64, part.length));
        work.set_inline(parts, qp.cap.max_inline_data)
    });
}
