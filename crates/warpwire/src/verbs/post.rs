//! Posting sends: WQEs are written to the send queue, and one doorbell announces all of them.

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::datagram::{AddressHandle, Destination};
use super::hard::{Hard, HardBatch};
use super::qp::Core;
use super::queues::{QueueAccess, mmio_flush_writes};
use super::{Service, State};
use crate::hca::{FastPath, FastWrite, ListPost, RangeList};
use crate::mlx5::{
    AddressVector, Atomic, Builder, Data, DataSegment, Doorbell, DoorbellRecord, EncodedWqe,
    MAX_SEGMENTS, SEGMENT_LEN, Scratch, WQEBB_LEN, WqeOpcode, WqeTooLong,
};
use crate::sync::{Guard, this_thread};
use crate::work::{Fence, PostError, PostResult, Sge, WrOp};

/// A send work request (`ibv_send_wr`): [`work::SendRequest`](crate::work::SendRequest) with this
/// module's [`AddressHandle`].
///
/// ```
/// use warpwire::verbs::{WrOp, SendRequest};
/// let request = SendRequest::new(2, WrOp::Send).inline(b"hello").solicited();
/// assert_eq!(request.inline, Some(&b"hello"[..]));
/// ```
pub type SendRequest<'a> = crate::work::SendRequest<'a, AddressHandle>;

impl SendRequest<'_> {
    /// Maximum WQEBBs of a request that is eligible for the fast path.
    const MAX_FAST_WQEBBS: u64 = 2;

    /// Whether it is an RDMA write that any connected queue pair accepts if it has room: with at
    /// most 64 inline bytes, or one scatter-gather entry.
    #[inline]
    fn is_fast_path_eligible(&self) -> bool {
        let fits = match (self.inline, self.data) {
            (Some(bytes), _) => bytes.len() <= WQEBB_LEN,
            (None, [range]) => range.len < 1 << 31,
            _ => false,
        };
        fits && matches!(self.op, WrOp::Write(_)) && self.destination.is_none()
    }

    /// Checks that the destination matches the service: the device expects an address vector in
    /// messages of UD queue pairs, and nowhere else.
    fn check(&self, core: &Core) -> PostResult {
        let is_message = matches!(self.op, WrOp::Send | WrOp::SendImm(_));
        let needs = core.service == Service::Ud && is_message;
        match self.destination {
            Some(to) if needs && to.handle.belongs_to(&core.hca) => Ok(()),
            None if !needs => Ok(()),
            Some(_) if needs => Err(PostError::FOREIGN_HANDLE),
            None => Err(PostError::NO_DESTINATION),
            Some(_) => Err(PostError::SURPLUS_DESTINATION),
        }
    }

    fn wqe<'s>(
        &self,
        scratch: &'s mut Scratch,
        index: u16,
        qpn: u32,
    ) -> std::result::Result<EncodedWqe<'s>, WqeTooLong> {
        let opcode = match self.op {
            WrOp::Send => WqeOpcode::Send,
            WrOp::SendImm(_) => WqeOpcode::SendImm,
            WrOp::SendInvalidate(_) => WqeOpcode::SendInvalidate,
            WrOp::Write(_) => WqeOpcode::RdmaWrite,
            WrOp::WriteImm(..) => WqeOpcode::RdmaWriteImm,
            WrOp::Read(_) => WqeOpcode::RdmaRead,
            WrOp::Atomic(_, Atomic::CompareSwap { .. }) => WqeOpcode::CompareSwap,
            WrOp::Atomic(_, Atomic::FetchAdd { .. }) => WqeOpcode::FetchAdd,
            WrOp::Atomic(_, Atomic::MaskedCompareSwap { .. }) => WqeOpcode::MaskedCompareSwap,
            WrOp::Atomic(_, Atomic::MaskedFetchAdd { .. }) => WqeOpcode::MaskedFetchAdd,
            WrOp::BindMw(_) => WqeOpcode::BindMw,
            WrOp::LocalInvalidate(_) => WqeOpcode::LocalInvalidate,
            WrOp::Nop => WqeOpcode::Nop,
            WrOp::Wait { .. } => WqeOpcode::Wait,
            WrOp::Dump => WqeOpcode::Dump,
        };
        let mut entry = Builder::new(scratch, opcode, index, qpn);
        if self.signaled {
            entry = entry.signaled();
        }
        if self.solicited {
            entry = entry.solicited();
        }
        if self.fence != Fence::None {
            entry = entry.fence(self.fence.into());
        }
        entry = match self.op {
            WrOp::SendImm(imm) => entry.imm(imm),
            WrOp::SendInvalidate(key) => entry.invalidate(key),
            WrOp::Write(at) | WrOp::Read(at) => entry.remote(at.address, at.rkey),
            WrOp::WriteImm(at, imm) => entry.imm(imm).remote(at.address, at.rkey),
            WrOp::Atomic(at, op) => entry.remote(at.address, at.rkey).atomic(&op),
            WrOp::BindMw(bind) => entry.bind(&bind),
            WrOp::LocalInvalidate(rkey) => entry.local_invalidate(rkey),
            WrOp::Wait { cqn, index } => entry.wait(cqn, index),
            WrOp::Send | WrOp::Nop | WrOp::Dump => entry,
        };
        if let Some(Destination { handle, qpn, qkey }) = self.destination {
            entry = entry.address(&AddressVector::new(handle.peer(), qpn, qkey));
        }
        if let Some(bytes) = self.inline {
            return entry.inline(bytes).finish();
        }
        for range in self.data.iter().filter(|range| range.len > 0) {
            entry = entry.data(range.len, range.lkey, range.address);
        }
        entry.finish()
    }
}

/// Producer state of a send queue.
#[derive(Default)]
pub(crate) struct SendState {
    /// Index of the next free WQEBB; it does not wrap.
    pub producer: u64,
    pub(super) scratch: Scratch,
}

impl std::fmt::Debug for SendState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SendState({})", self.producer)
    }
}

/// Work requests being collected for one doorbell. The device sees none of them before
/// [`Batch::post`]; dropping the batch discards them.
///
/// A batch holds the lock of the send queue: other threads that post to the queue pair wait. The
/// thread that holds the batch gets [`PostError::BatchHeld`] if it posts to the queue pair in
/// another way.
#[must_use = "nothing happens until the batch is posted"]
pub struct Batch<'q> {
    // Dropped, and its lock released, before the holder is forgotten.
    backend: Backend<'q>,
    _holder: BatchHolder<'q>,
}

/// Which thread has a batch of a queue pair: the lock is not reentrant.
#[derive(Debug, Default)]
pub(super) struct BatchThread(AtomicU64);

impl BatchThread {
    /// # Errors
    /// [`PostError::BatchHeld`] if the calling thread has a batch: it would wait for itself.
    #[inline]
    pub(super) fn check(&self) -> PostResult {
        // Relaxed: only the thread's own store matters.
        match self.0.load(Ordering::Relaxed) {
            0 => Ok(()),
            thread if thread == this_thread() => Err(PostError::BatchHeld),
            _ => Ok(()),
        }
    }
}

/// Marks the thread as the holder of a batch until it is dropped.
struct BatchHolder<'q>(&'q BatchThread);

impl Drop for BatchHolder<'_> {
    fn drop(&mut self) {
        // Another thread may hold the next batch already, and stays.
        let thread = this_thread();
        let _ = self.0.0.compare_exchange(thread, 0, Ordering::Relaxed, Ordering::Relaxed);
    }
}

enum Backend<'q> {
    Soft(SendBatch<'q>),
    Hard(HardBatch<'q>),
}

impl std::fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.backend {
            Backend::Soft(batch) => {
                write!(f, "Batch({} WQEBBs)", batch.next - batch.state.producer)
            }
            Backend::Hard(batch) => write!(f, "Batch({batch:?})"),
        }
    }
}

impl<'q> Batch<'q> {
    pub(super) fn soft(core: &'q Core, thread: &'q BatchThread) -> Self {
        Self::new(Backend::Soft(SendBatch::new(core)), thread)
    }

    pub(super) fn hard(hard: &'q Hard, thread: &'q BatchThread) -> Self {
        Self::new(Backend::Hard(hard.batch()), thread)
    }

    fn new(backend: Backend<'q>, thread: &'q BatchThread) -> Self {
        thread.0.store(this_thread(), Ordering::Relaxed);
        Self { backend, _holder: BatchHolder(thread) }
    }

    /// Adds a request. Inline data is copied; other buffers must stay valid until the completion.
    ///
    /// # Errors
    /// [`PostError::Full`] if the send queue is full: post the batch and poll completions.
    /// [`PostError::NotReady`] if the queue pair is not yet in `RTS`; other variants if the request
    /// is malformed or does not fit the service. The batch keeps its earlier requests.
    #[inline]
    pub fn push(&mut self, request: &SendRequest<'_>) -> Result<(), PostError> {
        match &mut self.backend {
            Backend::Soft(batch) => batch.push(request),
            Backend::Hard(batch) => batch.push(request),
        }
    }

    /// Posts all requests with one doorbell. If hardware rejects requests that passed all checks,
    /// they complete with [`Status::LocalQpOperation`](crate::mlx5::Status::LocalQpOperation).
    #[inline]
    pub fn post(self) {
        match self.backend {
            Backend::Soft(batch) => batch.post(),
            Backend::Hard(batch) => batch.post(),
        }
    }
}

/// Work requests being written to a send queue of the software HCA; holds its lock.
pub(super) struct SendBatch<'q> {
    core: &'q Core,
    state: Guard<'q, SendState>,
    next: u64,
}

impl<'q> SendBatch<'q> {
    /// Locks the queue, after prefetching the target of the first RDMA write.
    #[inline]
    pub(super) fn with(core: &'q Core, requests: &[SendRequest<'_>]) -> Self {
        if let Some(SendRequest { op: WrOp::Write(remote), .. }) = requests.first() {
            core.prefetch_hint.prefetch(remote);
        }
        Self::new(core)
    }

    #[inline]
    pub(super) fn new(core: &'q Core) -> Self {
        let state = core.send.lock();
        let next = state.producer;
        Self { core, state, next }
    }

    #[inline]
    pub(super) fn push(&mut self, request: &SendRequest<'_>) -> PostResult {
        let core = self.core;
        if !core.accepts_posts.load(Ordering::Relaxed) {
            // The engine knows the state. If the QP has failed, posted work is flushed.
            match core.hca.qp_state(core.number).map_err(|error| PostError::device(&error))? {
                state @ (State::Reset | State::Init | State::Rtr) => {
                    return Err(PostError::NotReady(state));
                }
                _ => core.accepts_posts.store(true, Ordering::Relaxed),
            }
        }
        request.check(core)?;
        let used = self.next - core.wr_table.freed.load(Ordering::Acquire);
        let wqebbs = write_wqe(core, &mut self.state.scratch, request, (self.next, used))?;
        let slot = self.next & (u64::from(core.wqebbs) - 1);
        core.wr_table.send_wr_ids[slot as usize].store(request.id, Ordering::Relaxed);
        core.wr_table.send_wqe_sizes[slot as usize].store(wqebbs as u8, Ordering::Relaxed);
        self.next += wqebbs;
        Ok(())
    }

    /// Fast path: executes RDMA writes directly in the peer's mapped memory, without WQEs or
    /// packets, for as long as that is possible; returns how many. The caller must push the rest,
    /// for which there is room: none is executed unless all requests would fit.
    #[inline]
    pub(super) fn try_fast_path(&mut self, requests: &[SendRequest<'_>]) -> usize {
        let core = self.core;
        let used = self.state.producer - core.wr_table.freed.load(Ordering::Acquire);
        let max_wqebbs = requests.len() as u64 * SendRequest::MAX_FAST_WQEBBS;
        let has_room = match requests {
            [_] => used < u64::from(core.wqebbs),
            _ => used + max_wqebbs <= u64::from(core.wqebbs),
        };
        if !has_room || !requests.iter().all(SendRequest::is_fast_path_eligible) {
            return 0;
        }
        let mut done = 0;
        while done < requests.len() {
            // Release the engine between quanta, so that other queue pairs make progress.
            let Some(mut fast_path) = core.engine.fast_path(core.number) else { break };
            let before = done;
            while let Some(request) = requests.get(done)
                && self.write(&mut fast_path, request)
            {
                done += 1;
            }
            if done == before {
                break;
            }
        }
        if done > 0 {
            ring_doorbell(core, self.next);
        }
        done
    }

    /// Executes one write on the fast path; false if it must be pushed instead.
    #[inline]
    fn write(&mut self, fast_path: &mut FastPath<'_>, request: &SendRequest<'_>) -> bool {
        let core = self.core;
        let WrOp::Write(remote) = request.op else { return false };
        let payload = match (request.inline, request.data) {
            (Some(bytes), _) => DataSegment::Inline(bytes),
            (None, &[Sge { address, len, lkey }]) => {
                DataSegment::Memory(Data { len, lkey, address })
            }
            _ => return false,
        };
        let wqe_index = self.state.producer;
        // Before the completion is written: another thread may poll it.
        let slot = (wqe_index & (u64::from(core.wqebbs) - 1)) as usize;
        core.wr_table.send_wr_ids[slot].store(request.id, Ordering::Relaxed);
        core.wr_table.send_wqe_sizes[slot].store(1, Ordering::Relaxed);
        core.wr_table.posted.store(wqe_index + 1, Ordering::Release);
        let (signaled, prefetch_hint) = (request.signaled, &core.prefetch_hint);
        if !fast_path.write(&FastWrite { wqe_index, remote, payload, signaled, prefetch_hint }) {
            core.wr_table.posted.store(wqe_index, Ordering::Release);
            return false;
        }
        self.next = wqe_index + 1;
        self.state.producer = self.next;
        true
    }

    /// Posts a list, for which nothing may have been pushed before.
    pub(super) fn post_list(mut self, id: u64, list: &Arc<RangeList>) -> PostResult<ListPost> {
        let core = self.core;
        let descriptors = match core.engine.list_descriptors(core.number, list) {
            Ok(descriptors) => descriptors,
            Err(why_not) => return Ok(why_not),
        };
        let wqe_index = self.next;
        self.push(&SendRequest::new(id, WrOp::Nop))?;
        core.engine.attach_list(core.number, wqe_index, list, descriptors);
        self.post();
        Ok(ListPost::Posted)
    }

    /// Leaves the work in the queue without a doorbell; returns its WQEBBs. The caller rings later.
    pub(super) fn commit_unrung(mut self) -> Range<u64> {
        let first = std::mem::replace(&mut self.state.producer, self.next);
        self.core.wr_table.posted.store(self.next, Ordering::Release);
        first..self.next
    }

    #[inline]
    pub(super) fn post(mut self) {
        if self.next == self.state.producer {
            return;
        }
        self.state.producer = self.next;
        let core = self.core;
        core.wr_table.posted.store(self.next, Ordering::Release);
        ring_doorbell(core, self.next);
        drop(self.state);
        core.engine.ring(core.number);
    }
}

/// Writes a WQE at WQEBB `at` of a send queue that has `used` WQEBBs in use; returns how many it
/// takes.
#[inline]
pub(super) fn write_wqe<Q: QueueAccess>(
    queues: &Q,
    scratch: &mut Scratch,
    request: &SendRequest<'_>,
    (at, used): (u64, u64),
) -> PostResult<u64> {
    let wqe = request.wqe(scratch, at as u16, queues.number());
    let wqe = wqe.map_err(|WqeTooLong| too_long(request))?;
    let (wqebbs, room) = (u64::from(wqe.wqebbs()), u64::from(queues.wqebbs()));
    if used + wqebbs > room {
        return Err(PostError::Full);
    }
    let slot = at & (room - 1);
    let (bytes, begin) = queues.send();
    let until_wrap = ((room - slot) as usize * WQEBB_LEN).min(wqe.bytes().len());
    let (head, tail) = wqe.bytes().split_at(until_wrap);
    let mut written = bytes.write(begin + slot * WQEBB_LEN as u64, head);
    if !tail.is_empty() {
        written = written.and_then(|()| bytes.write(begin, tail));
    }
    written.map_err(|error| PostError::device(&error))?;
    Ok(wqebbs)
}

/// Replaces the WQE in these WQEBBs by a signaled NOP.
pub(super) fn overwrite_with_nop<Q: QueueAccess>(
    queues: &Q,
    scratch: &mut Scratch,
    wqebbs: Range<u64>,
) {
    let nop = Builder::new(scratch, WqeOpcode::Nop, wqebbs.start as u16, queues.number());
    let Ok(wqe) = nop.signaled().finish() else { return };
    let mut control = [0; SEGMENT_LEN];
    control.copy_from_slice(wqe.bytes());
    // Of the same size, because other WQEs may follow.
    let segments_per_wqebb = (WQEBB_LEN / SEGMENT_LEN) as u64;
    let segments = ((wqebbs.end - wqebbs.start) * segments_per_wqebb).min(MAX_SEGMENTS as u64);
    control[7] = segments as u8;
    let slot = wqebbs.start & (u64::from(queues.wqebbs()) - 1);
    let (bytes, begin) = queues.send();
    let _ = bytes.write(begin + slot * WQEBB_LEN as u64, &control);
}

/// Writes the producer index to the doorbell record, then to the doorbell.
#[inline]
pub(super) fn ring_doorbell<Q: QueueAccess>(queues: &Q, next: u64) {
    let index = next as u16;
    let word = u32::from_ne_bytes(DoorbellRecord::word(index));
    let ring = u64::from_ne_bytes(Doorbell::next(queues.number(), index));
    let (dbrec, at) = queues.dbrec();
    // Release stores: WQEs before the record, the record before the doorbell. They fail only if
    // the memory of the queues is gone, and the device with it.
    let _ = dbrec.store_u32(at + DoorbellRecord::SEND as u64, word);
    let (doorbell, at) = queues.doorbell();
    if Q::IS_MMIO {
        mmio_flush_writes();
    }
    let _ = doorbell.store_u64(at, ring);
    if Q::IS_MMIO {
        mmio_flush_writes();
    }
}

#[cold]
fn too_long(request: &SendRequest<'_>) -> PostError {
    match request.inline {
        Some(bytes) => {
            let max = ((MAX_SEGMENTS - 2) * SEGMENT_LEN) as u32;
            PostError::InlineTooLong { len: bytes.len() as u32, max }
        }
        None => {
            let max = MAX_SEGMENTS as u32 - 2;
            PostError::TooManySge { count: request.data.len() as u32, max }
        }
    }
}
