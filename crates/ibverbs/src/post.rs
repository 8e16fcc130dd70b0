//! Work requests: lists of C structures become batches.
#![allow(unsafe_code)]

use std::ffi::c_int;
use std::mem::MaybeUninit;

use warpwire::verbs::{
    AddressHandle, Atomic, Batch, Fence, ReceiveRequest, Remote, SendRequest, Sge, WrOp,
};

use crate::abi::{self, RecvWr, SendWr, Wc, WrBindMw};
use crate::ah::Ah;
use crate::boundary::{INVALID, Result, some, status};
use crate::context::MAX_INLINE;
use crate::qp::Qp;
use crate::srq::Srq;
use crate::window::bind_type_2;

/// The array that a poll fills.
pub(crate) fn completions<'a>(into: *mut Wc, entries: c_int) -> Result<&'a mut [MaybeUninit<Wc>]> {
    let entries = usize::try_from(entries).map_err(|_| INVALID)?;
    if into.is_null() && entries > 0 {
        return Err(INVALID);
    }
    if entries == 0 {
        return Ok(&mut []);
    }
    // SAFETY: not null, so the program's array of this many entries, which it may not have
    // initialized.
    Ok(unsafe { std::slice::from_raw_parts_mut(into.cast(), entries) })
}

/// A list of the program's: scatter-gather entries, or buffers.
pub(crate) fn slice<'a, T>(list: *const T, count: usize) -> Result<&'a [T]> {
    if count == 0 {
        return Ok(&[]);
    }
    if list.is_null() || count > 1 << 16 {
        return Err(INVALID);
    }
    // SAFETY: not null, so the program's list of this many entries.
    Ok(unsafe { std::slice::from_raw_parts(list, count) })
}

/// Memory that the program wants to send inline.
pub(crate) fn bytes<'a>(address: u64, len: usize) -> Result<&'a [u8]> {
    if len > MAX_INLINE as usize {
        return Err(INVALID);
    }
    slice(std::ptr::with_exposed_provenance::<u8>(address as usize), len)
}

/// The entries of a work request, if there are no more than the queue was made for.
fn entries<'a>(list: *const Sge, count: c_int, max: u32) -> Result<&'a [Sge]> {
    let count = u32::try_from(count).ok().filter(|count| *count <= max.max(1)).ok_or(INVALID)?;
    slice(list, count as usize)
}

impl SendWr<'_> {
    fn remote(&self) -> Remote {
        Remote { address: self.wr[0], rkey: self.wr[1] as u32 }
    }

    fn op(&self, qp: &Qp) -> Result<WrOp> {
        let atomic = || Remote { address: self.wr[0], rkey: self.wr[3] as u32 };
        let (first, second) = (self.wr[1], self.wr[2]);
        Ok(match self.opcode {
            abi::WR_RDMA_WRITE => WrOp::Write(self.remote()),
            abi::WR_RDMA_WRITE_WITH_IMM => WrOp::WriteImm(self.remote(), self.imm_data),
            abi::WR_SEND => WrOp::Send,
            abi::WR_SEND_WITH_IMM => WrOp::SendImm(self.imm_data),
            abi::WR_SEND_WITH_INV => WrOp::SendInvalidate(u32::from_ne_bytes(self.imm_data)),
            abi::WR_RDMA_READ => WrOp::Read(self.remote()),
            abi::WR_ATOMIC_CMP_AND_SWP => {
                WrOp::Atomic(atomic(), Atomic::CompareSwap { compare: first, swap: second })
            }
            abi::WR_ATOMIC_FETCH_AND_ADD => WrOp::Atomic(atomic(), Atomic::FetchAdd { add: first }),
            abi::WR_LOCAL_INV => WrOp::LocalInvalidate(u32::from_ne_bytes(self.imm_data)),
            abi::WR_BIND_MW => {
                let WrBindMw { mw, rkey, bind_info } = &self.bind_mw;
                bind_type_2(qp, crate::memory::object(*mw)?, bind_info, *rkey)?
            }
            _ => return Err(INVALID),
        })
    }

    /// Address handle, queue pair and Q_Key of a datagram.
    fn datagram(&self) -> Result<(&Ah, u32, u32)> {
        let ah = std::ptr::with_exposed_provenance::<abi::Ah>(self.wr[0] as usize);
        let (qpn, qkey) = (self.wr[1] as u32, (self.wr[1] >> 32) as u32);
        Ok((crate::memory::object(ah)?, qpn, qkey))
    }
}

/// Flags of a work request.
pub(crate) fn with_flags(mut request: SendRequest<'_>, flags: u32) -> Result<SendRequest<'_>> {
    const KNOWN: u32 =
        abi::SEND_FENCE | abi::SEND_SIGNALED | abi::SEND_SOLICITED | abi::SEND_INLINE;
    if flags & !KNOWN != 0 {
        return Err(INVALID);
    }
    request.signaled = flags & abi::SEND_SIGNALED != 0;
    request.solicited = flags & abi::SEND_SOLICITED != 0;
    request.fence = if flags & abi::SEND_FENCE == 0 { Fence::None } else { Fence::Reads };
    Ok(request)
}

/// Adds a request to a batch, with its destination if it is a datagram.
pub(crate) fn push(
    batch: &mut Batch<'_>,
    request: SendRequest<'_>,
    to: Option<(&Ah, u32, u32)>,
) -> Result<()> {
    match to {
        None => Ok(batch.push(&request)?),
        Some((ah, qpn, qkey)) => ah.with_destination(qpn, |handle: &AddressHandle| {
            Ok(batch.push(&request.to(handle, qpn, qkey))?)
        }),
    }
}

fn push_wr(qp: &Qp, batch: &mut Batch<'_>, wr: &SendWr<'_>) -> Result<()> {
    let request = with_flags(SendRequest::new(wr.wr_id, wr.op(qp)?), wr.send_flags)?;
    if matches!(request.op, WrOp::BindMw(_) | WrOp::LocalInvalidate(_)) {
        // Without data, and without a destination.
        return if qp.is_datagram { Err(INVALID) } else { push(batch, request, None) };
    }
    let data = entries(wr.sg_list, wr.num_sge, qp.cap.max_send_sge)?;
    let to = if qp.is_datagram { Some(wr.datagram()?) } else { None };
    if wr.send_flags & abi::SEND_INLINE == 0 {
        return push(batch, request.with(data), to);
    }
    let max = qp.cap.max_inline_data as usize;
    if let [one] = data {
        let inline = bytes(one.address, one.len as usize)?;
        return if inline.len() <= max {
            push(batch, request.inline(inline), to)
        } else {
            Err(INVALID)
        };
    }
    let (mut gathered, mut len) = ([0; MAX_INLINE as usize], 0);
    for part in data {
        let part = bytes(part.address, part.len as usize)?;
        let room = gathered.get_mut(len..len + part.len()).ok_or(INVALID)?;
        room.copy_from_slice(part);
        len += part.len();
    }
    if len > max {
        return Err(INVALID);
    }
    push(batch, request.inline(&gathered[..len]), to)
}

/// Posts requests up to the first that is refused, which `bad` then names.
pub(crate) extern "C" fn post_send<'a>(
    qp: Option<&Qp>,
    wr: Option<&'a SendWr<'a>>,
    bad: Option<&mut *const SendWr<'a>>,
) -> c_int {
    let mut next = wr;
    let posted = status(|| {
        let qp = some(qp)?;
        let mut batch = qp.verbs.batch()?;
        let mut refused = Ok(());
        while let Some(wr) = next {
            refused = push_wr(qp, &mut batch, wr);
            if refused.is_err() {
                break;
            }
            next = wr.next;
        }
        batch.post();
        refused
    });
    report(posted, next.map(std::ptr::from_ref), bad)
}

/// Posts receives up to the first that is refused, which `bad` then names.
fn post_receives<'a>(
    wr: Option<&'a RecvWr<'a>>,
    bad: Option<&mut *const RecvWr<'a>>,
    max_sge: impl Fn() -> Result<u32>,
    post: impl Fn(&[ReceiveRequest<'_>]) -> Result<()>,
) -> c_int {
    let mut next = wr;
    let posted = status(|| {
        let max_sge = max_sge()?;
        while let Some(wr) = next {
            let data = entries(wr.sg_list, wr.num_sge, max_sge)?;
            post(&[ReceiveRequest { id: wr.wr_id, data }])?;
            next = wr.next;
        }
        Ok(())
    });
    report(posted, next.map(std::ptr::from_ref), bad)
}

fn report<T>(posted: c_int, next: Option<*const T>, bad: Option<&mut *const T>) -> c_int {
    if let (true, Some(next), Some(bad)) = (posted != 0, next, bad) {
        *bad = next;
    }
    posted
}

pub(crate) extern "C" fn post_recv<'a>(
    qp: Option<&Qp>,
    wr: Option<&'a RecvWr<'a>>,
    bad: Option<&mut *const RecvWr<'a>>,
) -> c_int {
    post_receives(
        wr,
        bad,
        || Ok(some(qp)?.cap.max_recv_sge),
        |requests| {
            let qp = some(qp)?;
            // RESET keeps no work.
            if qp.abi.state.load(std::sync::atomic::Ordering::Relaxed) == 0 {
                return Err(INVALID);
            }
            Ok(qp.verbs.post_receive(requests)?)
        },
    )
}

pub(crate) extern "C" fn post_srq_recv<'a>(
    srq: Option<&Srq>,
    wr: Option<&'a RecvWr<'a>>,
    bad: Option<&mut *const RecvWr<'a>>,
) -> c_int {
    post_receives(
        wr,
        bad,
        || Ok(some(srq)?.max_sge()),
        |requests| Ok(some(srq)?.verbs.post_receive(requests)?),
    )
}
