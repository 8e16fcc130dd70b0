//! Shared receive queues: receives that whichever queue pair needs one takes.

use std::sync::Arc;

use super::cq::lacks;
use super::explain::Attempt;
use super::ids::{Book, Naming};
use super::library::{Raw, call, end, make};
use super::memory::{Domain, Pd};
use super::post::{PostError, check_receives, receive};
use super::sys;
use crate::error::Result;
use crate::work::ReceiveRequest;

/// A shared receive queue. Clones are the same one; it ends with the last queue pair that uses it.
#[derive(Clone, Debug)]
pub struct Srq(pub(super) Arc<Shared>);

#[derive(Debug)]
pub(super) struct Shared {
    pub(super) raw: Raw<sys::Srq>,
    pub(super) pd: Arc<Domain>,
    post: sys::PostSrqRecv,
    ranges: u32,
    book: Arc<Book>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        end!(self.pd.context.library, destroy_srq(self.raw.ptr()));
        self.pd.context.stages.forget(self.book.numbers());
        self.pd.context.ids.remove(&self.book);
    }
}

impl Pd {
    /// Makes a shared receive queue with room for so many receives of so many ranges, at least.
    pub fn create_srq(&self, depth: u32, ranges: u32) -> Result<Srq> {
        let pd = self.0.clone();
        let context = &pd.context;
        // SAFETY: an open device; its operations do not change once it is open.
        let post = unsafe { (*context.raw.ptr()).ops.post_srq_recv };
        let post = post.ok_or_else(|| lacks(context, "shared receive queues"))?;
        let attr = sys::SrqAttr { max_wr: depth, max_sge: ranges, srq_limit: 0 };
        let mut init = sys::SrqInitAttr { srq_context: std::ptr::null_mut(), attr };
        let raw = make!(context.library, Attempt::CreateSrq, create_srq(pd.raw.ptr(), &mut init))?;
        // What was made may be larger than what was asked for.
        let ranges = init.attr.max_sge.max(ranges);
        let book = context.ids.add_shared(init.attr.max_wr.max(depth));
        let book = book.inspect_err(|_| end!(context.library, destroy_srq(raw.ptr())))?;
        Ok(Srq(Arc::new(Shared { raw, pd: pd.clone(), post, ranges, book })))
    }
}

impl Srq {
    /// Its number, as events tell it.
    pub fn number(&self) -> u32 {
        // SAFETY: the library's object, which lives as long as this.
        unsafe { (*self.0.raw.ptr()).handle }
    }

    /// Asks for an event, once, when fewer than `limit` receives wait; 0 asks for none.
    pub fn arm(&self, limit: u32) -> Result<()> {
        let mut attr = sys::SrqAttr { max_wr: 0, max_sge: 0, srq_limit: limit };
        let shared = &*self.0;
        let mask = sys::SRQ_LIMIT as i32;
        call!(
            shared.pd.context.library,
            Attempt::ArmSrq,
            modify_srq(shared.raw.ptr(), &mut attr, mask)
        )
    }

    /// Posts receives, in their order.
    ///
    /// # Errors
    /// With how many were posted.
    #[inline]
    pub fn post_receive(
        &self,
        requests: &[ReceiveRequest<'_>],
    ) -> std::result::Result<(), PostError> {
        let shared = &*self.0;
        self.post(requests, &mut shared.book.name_shared())
    }

    /// Posts receives, all of them or none.
    pub fn post_all_receives(&self, requests: &[ReceiveRequest<'_>]) -> Result<()> {
        let mut naming = self.0.book.name_shared();
        check_receives(requests, self.0.ranges, naming.room())?;
        self.post(requests, &mut naming).map_err(|refused| refused.error)
    }

    fn post(
        &self,
        requests: &[ReceiveRequest<'_>],
        naming: &mut impl Naming,
    ) -> std::result::Result<(), PostError> {
        let shared = &*self.0;
        let stages = &shared.pd.context.stages;
        receive(requests, shared.ranges, (naming, stages), |first, bad| {
            // SAFETY: a queue that lives, and a chain of entries that lives until the call returns.
            unsafe { (shared.post)(shared.raw.ptr(), first, bad) }
        })
    }
}
