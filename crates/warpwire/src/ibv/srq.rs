//! Shared receive queues: receives that any attached queue pair may consume.

use std::sync::Arc;

use super::cq::unsupported;
use super::explain::Attempt;
use super::library::{Raw, call, create, destroy};
use super::memory::{Pd, PdInner};
use super::post::{PartialPost, check_receives, receive};
use super::sys;
use super::wr_ids::{QueueEntry, WrIdAllocator};
use crate::error::Result;
use crate::work::{PostResult, ReceiveRequest};

/// A shared receive queue (`ibv_srq`). Clones refer to the same queue; it is destroyed when the
/// last clone and the last queue pair that uses it are dropped.
#[derive(Clone, Debug)]
pub struct Srq(pub(super) Arc<SrqInner>);

#[derive(Debug)]
pub(super) struct SrqInner {
    pub(super) raw: Raw<sys::Srq>,
    pub(super) pd: Arc<PdInner>,
    post: sys::PostSrqRecv,
    max_sge: u32,
    queue_entry: Arc<QueueEntry>,
}

impl Drop for SrqInner {
    fn drop(&mut self) {
        destroy!(self.pd.context.library, destroy_srq(self.raw.ptr()));
        self.pd.context.staging_table.discard(self.queue_entry.wr_ids());
        self.pd.context.wr_ids.remove(&self.queue_entry);
    }
}

impl Pd {
    /// Creates a shared receive queue for at least `depth` outstanding receives of at least
    /// `max_sge` scatter-gather entries each.
    ///
    /// # Errors
    /// If the device has no SRQs, or its limits are exceeded.
    pub fn create_srq(&self, depth: u32, max_sge: u32) -> Result<Srq> {
        let pd = self.0.clone();
        let context = &pd.context;
        // SAFETY: the device is open; its operations table does not change after that.
        let post = unsafe { (*context.raw.ptr()).ops.post_srq_recv };
        let post = post.ok_or_else(|| unsupported(context, "shared receive queues"))?;
        let attr = sys::SrqAttr { max_wr: depth, max_sge, srq_limit: 0 };
        let mut init = sys::SrqInitAttr { srq_context: std::ptr::null_mut(), attr };
        let raw =
            create!(context.library, Attempt::CreateSrq, create_srq(pd.raw.ptr(), &mut init))?;
        // The provider may have allocated more than requested.
        let max_sge = init.attr.max_sge.max(max_sge);
        let queue_entry = context.wr_ids.add_srq(init.attr.max_wr.max(depth));
        let queue_entry =
            queue_entry.inspect_err(|_| destroy!(context.library, destroy_srq(raw.ptr())))?;
        Ok(Srq(Arc::new(SrqInner { raw, pd: pd.clone(), post, max_sge, queue_entry })))
    }
}

impl Srq {
    /// The queue's number, which asynchronous events name.
    pub fn number(&self) -> u32 {
        // SAFETY: the library's object lives as long as this handle.
        unsafe { (*self.0.raw.ptr()).handle }
    }

    /// Sets the limit (`IBV_SRQ_LIMIT`): an event is generated, once, when fewer than `limit`
    /// receives are outstanding; 0 disarms.
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

    /// Posts receives in order (`ibv_post_srq_recv`).
    ///
    /// # Errors
    /// [`PartialPost::posted`] receives were posted before the failure.
    #[inline]
    pub fn post_receive(
        &self,
        requests: &[ReceiveRequest<'_>],
    ) -> std::result::Result<(), PartialPost> {
        let shared = &*self.0;
        self.post(requests, &mut shared.queue_entry.alloc_srq())
    }

    /// Posts all receives or none.
    ///
    /// # Errors
    /// [`PostError::Full`](crate::work::PostError::Full) if the queue has no room for all of them.
    pub fn post_all_receives(&self, requests: &[ReceiveRequest<'_>]) -> PostResult {
        let mut allocator = self.0.queue_entry.alloc_srq();
        check_receives(requests, self.0.max_sge, allocator.room())?;
        self.post(requests, &mut allocator).map_err(|refused| refused.error)
    }

    fn post(
        &self,
        requests: &[ReceiveRequest<'_>],
        allocator: &mut impl WrIdAllocator,
    ) -> std::result::Result<(), PartialPost> {
        let shared = &*self.0;
        let staging_table = &shared.pd.context.staging_table;
        receive(requests, shared.max_sge, (allocator, staging_table), |first, bad| {
            // SAFETY: the queue is alive, and so is the chain of requests until the call returns.
            unsafe { (shared.post)(shared.raw.ptr(), first, bad) }
        })
    }
}
