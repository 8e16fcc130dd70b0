//! Shared receive queues.

use std::ffi::{c_int, c_void};

use warpwire::verbs::{self, SrqOptions};

use crate::abi::{self, SrqAttr};
use crate::boundary::{INVALID, Result, UNSUPPORTED, give, pointer, some, status};
use crate::context::{ContextPtr, MAX_SRQ_SGE, MAX_SRQ_WR};
use crate::events::Kind;
use crate::memory::{Pd, Used, Users, destroy, object};

/// `struct ibv_srq`.
#[repr(C)]
pub(crate) struct Srq {
    pub abi: abi::Srq,
    pub verbs: verbs::Srq,
    pub users: Users,
    attr: SrqAttr,
    _pd: Used,
}

impl Srq {
    pub(crate) fn max_sge(&self) -> u32 {
        self.attr.max_sge
    }
}

pub(crate) fn create_srq(
    pd: Option<&Pd>,
    srq_context: *mut c_void,
    attr: &mut SrqAttr,
) -> Result<*mut Srq> {
    let pd = some(pd)?;
    let (context, open) = pd.context().of()?;
    if attr.max_wr == 0 || attr.max_wr > MAX_SRQ_WR || attr.max_sge > MAX_SRQ_SGE {
        return Err(INVALID);
    }
    attr.max_sge = attr.max_sge.max(1);
    let options = SrqOptions::default().with_depth(attr.max_wr).with_max_sge(attr.max_sge);
    let verbs = open.verbs.create_srq(&pd.verbs, options)?;
    let made = give(Srq {
        abi: abi::Srq {
            context: pd.abi.context,
            srq_context,
            pd: &raw const pd.abi,
            handle: verbs.number(),
            mutex: [0; 5],
            cond: [0; 6],
            events_completed: 0,
        },
        users: Users::default(),
        attr: *attr,
        _pd: pd.add_user(),
        verbs: verbs.clone(),
    });
    context.registry.add(Kind::Srq, verbs.number(), made);
    Ok(made)
}

/// Ordinary queues only: neither XRC nor tag matching.
pub(crate) extern "C" fn create_srq_ex(
    context: ContextPtr,
    attr: Option<&mut abi::SrqInitAttrEx>,
) -> *mut Srq {
    pointer(|| {
        context.get()?;
        let attr = some(attr)?;
        let has_type = attr.comp_mask & abi::SRQ_INIT_TYPE != 0;
        let is_basic = !has_type || attr.srq_type == abi::SRQT_BASIC;
        if attr.comp_mask & !(abi::SRQ_INIT_TYPE | abi::SRQ_INIT_PD) != 0 || !is_basic {
            return Err(UNSUPPORTED);
        }
        if attr.comp_mask & abi::SRQ_INIT_PD == 0 {
            return Err(INVALID);
        }
        create_srq(Some(object(attr.pd)?), attr.srq_context, &mut attr.attr)
    })
}

pub(crate) extern "C" fn get_srq_num(srq: Option<&Srq>, number: Option<&mut u32>) -> c_int {
    status(|| {
        *some(number)? = some(srq)?.verbs.number();
        Ok(())
    })
}

/// Arms the limit; queues are not resized.
pub(crate) fn modify_srq(srq: Option<&Srq>, attr: Option<&SrqAttr>, mask: u32) -> Result<()> {
    let (srq, attr) = (some(srq)?, some(attr)?);
    if mask & !(abi::SRQ_LIMIT | abi::SRQ_MAX_WR) != 0 {
        return Err(INVALID);
    }
    if mask & abi::SRQ_MAX_WR != 0 {
        return Err(UNSUPPORTED);
    }
    if mask & abi::SRQ_LIMIT != 0 {
        if attr.srq_limit > srq.attr.max_wr {
            return Err(INVALID);
        }
        srq.verbs.arm(attr.srq_limit);
    }
    Ok(())
}

pub(crate) fn query_srq(srq: Option<&Srq>, attr: Option<&mut SrqAttr>) -> Result<()> {
    let srq = some(srq)?;
    *some(attr)? = SrqAttr { srq_limit: srq.verbs.limit(), ..srq.attr };
    Ok(())
}

pub(crate) fn destroy_srq(srq: Option<Box<Srq>>) -> Result<()> {
    destroy(srq, |srq| {
        srq.users.check_none()?;
        ContextPtr(srq.abi.context).get()?.registry.remove(Kind::Srq, srq.verbs.number());
        Ok(())
    })
}
