//! Memory windows.
//!
//! Type 2 is type 2B of the specification, as NICs and Linux's soft-RoCE have it: a bound window
//! belongs to a queue pair and a protection domain, and its queue pair may be destroyed first.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

use warpwire::verbs::{self, Access, MwBind, MwType, SendRequest, WrOp, next_rkey};

use crate::abi::{self, MwBindInfo};
use crate::boundary::{Errno, INVALID, Result, give, pointer, some, status};
use crate::memory::{self, Mr, Pd, Used, destroy, object};
use crate::post::{push, with_flags};
use crate::qp::Qp;

/// `struct ibv_mw`.
#[repr(C)]
pub(crate) struct Mw {
    abi: abi::Mw,
    verbs: verbs::Mw,
    _pd: Used,
}

pub(crate) extern "C" fn alloc_mw(pd: Option<&Pd>, kind: u32) -> *mut Mw {
    pointer(|| {
        let pd = some(pd)?;
        let (_, open) = pd.context().of()?;
        let mw_type = match kind {
            abi::MW_TYPE_1 => MwType::Type1,
            abi::MW_TYPE_2 => MwType::Type2,
            _ => return Err(INVALID),
        };
        let verbs = open.verbs.alloc_mw(&pd.verbs, mw_type)?;
        let abi = abi::Mw {
            context: pd.abi.context,
            pd: &raw const pd.abi,
            rkey: AtomicU32::new(verbs.rkey()),
            handle: verbs.rkey() >> 8,
            kind,
        };
        Ok(give(Mw { abi, verbs, _pd: pd.add_user() }))
    })
}

pub(crate) extern "C" fn dealloc_mw(mw: Option<Box<Mw>>) -> c_int {
    status(|| destroy(mw, |_| Ok(())))
}

/// `ibv_bind_mw`, for windows of type 1: the library chooses the next key.
pub(crate) extern "C" fn bind_mw(
    qp: Option<&Qp>,
    mw: Option<&Mw>,
    bind: Option<&abi::MwBind>,
) -> c_int {
    status(|| {
        let (qp, mw, bind) = (some(qp)?, some(mw)?, some(bind)?);
        // Only windows of type 2 can be zero-based.
        let zero_based = bind.bind_info.mw_access_flags & abi::ACCESS_ZERO_BASED != 0;
        if mw.verbs.kind() != MwType::Type1 || zero_based {
            return Err(INVALID);
        }
        let rkey = next_rkey(mw.abi.rkey.load(Ordering::Relaxed));
        let op = operation(qp, mw, &bind.bind_info, rkey)?;
        let request = with_flags(SendRequest::new(bind.wr_id, op), bind.send_flags)?;
        let mut batch = qp.verbs.batch()?;
        push(&mut batch, request, None)?;
        batch.post();
        mw.abi.rkey.store(rkey, Ordering::Relaxed);
        Ok(())
    })
}

/// The work that binds a window of type 2 under the key that the program chose.
pub(crate) fn bind_type_2(qp: &Qp, mw: &Mw, info: &MwBindInfo, rkey: u32) -> Result<WrOp> {
    if mw.verbs.kind() != MwType::Type2 {
        return Err(INVALID);
    }
    operation(qp, mw, info, rkey)
}

fn operation(qp: &Qp, mw: &Mw, info: &MwBindInfo, rkey: u32) -> Result<WrOp> {
    let mr: Option<&Mr> = match info.mr.is_null() {
        true if info.length > 0 => return Err(INVALID),
        true => None,
        false => Some(object(info.mr)?),
    };
    let same_index = (rkey ^ mw.verbs.rkey()) >> 8 == 0;
    if qp.is_datagram || !same_index {
        return Err(INVALID);
    }
    let own = domain(mw.abi.pd)?;
    for pd in [Some(qp.abi.pd), mr.map(Mr::domain)].into_iter().flatten() {
        if domain(pd)? != own {
            return Err(Errno(libc::EPERM));
        }
    }
    Ok(WrOp::BindMw(MwBind {
        kind: mw.verbs.kind(),
        rkey,
        lkey: mr.map_or(0, Mr::lkey),
        address: info.addr,
        len: info.length,
        access: access(info.mw_access_flags)?,
    }))
}

/// What a protection domain stands for: a parent domain for the one that it was made of.
fn domain<'a>(pd: *const abi::Pd) -> Result<&'a verbs::Pd> {
    Ok(&object::<_, Pd>(pd)?.verbs)
}

/// The rights of a window. The local one, which the region has, is accepted as well.
fn access(flags: u32) -> Result<Access> {
    const KNOWN: u32 = abi::ACCESS_LOCAL_WRITE
        | abi::ACCESS_REMOTE_WRITE
        | abi::ACCESS_REMOTE_READ
        | abi::ACCESS_REMOTE_ATOMIC
        | abi::ACCESS_ZERO_BASED;
    if flags & !KNOWN == 0 { memory::access(flags) } else { Err(INVALID) }
}
