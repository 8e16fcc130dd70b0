//! Posting work: entries are written into the send queue, and one doorbell tells of all of them.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::datagram::{AddressHandle, Destination};
use super::hard::{Hard, HardBatch};
use super::qp::Core;
use super::queues::{QueueAccess, mmio_flush_writes};
use super::{Service, State};
use crate::error::{Error, Kind, Result};
use crate::hca::{FastPath, FastWrite};
use crate::mlx5::{
    self, AddressVector, Atomic, Builder, Data, DataSegment, Doorbell, DoorbellRecord, EncodedWqe,
    MAX_SEGMENTS, Opcode, SEGMENT, Scratch, WQEBB_LEN, WqeTooLong,
};
use crate::sync::Guard;
use crate::work::{Fence, Remote, Sge, WrOp};

/// Work to post: [`work::SendRequest`](crate::work::Request) with this room's addresses.
///
/// ```
/// use warpwire::verbs::{WrOp, SendRequest};
/// let request = SendRequest::new(2, WrOp::Send).inline(b"hello").solicited();
/// assert_eq!(request.inline, Some(&b"hello"[..]));
/// ```
pub type SendRequest<'a> = crate::work::SendRequest<'a, AddressHandle>;

impl SendRequest<'_> {
    /// How many blocks a simple one takes at most.
    const MAX_FAST_WQEBBS: u64 = 2;

    /// Whether it is a write that any connected queue pair takes, if it has the room: few bytes in itself, or one range.
    #[inline]
    fn is_fast_path_eligible(&self) -> bool {
        let fits = match (self.inline, self.data) {
            (Some(bytes), _) => bytes.len() <= WQEBB_LEN,
            (None, [range]) => range.len < 1 << 31,
            _ => false,
        };
        fits && matches!(self.op, WrOp::Write(_)) && self.destination.is_none()
    }

    /// Whether a queue pair of that service can be told of it at all: the device looks for an address exactly in
    /// messages of datagram queue pairs.
    fn check(&self, core: &Core) -> Result<()> {
        let is_message = matches!(self.op, WrOp::Send | WrOp::SendImm(_));
        let needs = core.service == Service::Ud && is_message;
        match self.destination {
            Some(to) if needs && to.handle.belongs_to(&core.hca) => Ok(()),
            None if !needs => Ok(()),
            wrong => Err(wrong_destination(core, wrong.is_some() && needs, needs)),
        }
    }

    fn wqe<'s>(
        &self,
        scratch: &'s mut Scratch,
        index: u16,
        qpn: u32,
    ) -> std::result::Result<EncodedWqe<'s>, WqeTooLong> {
        let opcode = match self.op {
            WrOp::Send => Opcode::Send,
            WrOp::SendImm(_) => Opcode::SendImm,
            WrOp::SendInvalidate(_) => Opcode::SendInvalidate,
            WrOp::Write(_) => Opcode::RdmaWrite,
            WrOp::WriteImm(..) => Opcode::RdmaWriteImm,
            WrOp::Read(_) => Opcode::RdmaRead,
            WrOp::Atomic(_, Atomic::CompareSwap { .. }) => Opcode::CompareSwap,
            WrOp::Atomic(_, Atomic::FetchAdd { .. }) => Opcode::FetchAdd,
            WrOp::Atomic(_, Atomic::MaskedCompareSwap { .. }) => Opcode::MaskedCompareSwap,
            WrOp::Atomic(_, Atomic::MaskedFetchAdd { .. }) => Opcode::MaskedFetchAdd,
            WrOp::Nop => Opcode::Nop,
            WrOp::Wait { .. } => Opcode::Wait,
            WrOp::Dump => Opcode::Dump,
        };
        let mut entry = Builder::new(scratch, opcode, index, qpn);
        if self.signaled {
            entry = entry.signaled();
        }
        if self.solicited {
            entry = entry.solicited();
        }
        entry = match self.fence {
            Fence::None => entry,
            Fence::Reads => entry.fence(mlx5::FenceMode::ReadsAndAtomics),
            Fence::All => entry.fence(mlx5::FenceMode::Strong),
        };
        entry = match self.op {
            WrOp::SendImm(imm) => entry.imm(imm),
            WrOp::SendInvalidate(key) => entry.invalidate(key),
            WrOp::Write(at) | WrOp::Read(at) => entry.remote(at.address, at.rkey),
            WrOp::WriteImm(at, imm) => entry.imm(imm).remote(at.address, at.rkey),
            WrOp::Atomic(at, op) => entry.remote(at.address, at.rkey).atomic(&op),
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

/// The producer's side of a send queue.
#[derive(Default)]
pub(crate) struct SendState {
    /// The next free block, counted without end.
    pub producer: u64,
    pub(super) scratch: Scratch,
}

impl std::fmt::Debug for SendState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SendState({})", self.producer)
    }
}

/// Work that is being put into a send queue. Nothing of it is seen by the device before [`Batch::post`]; dropped, it
/// is as if it had never been.
#[must_use = "nothing happens until the batch is posted"]
pub struct Batch<'q>(Backend<'q>);

enum Backend<'q> {
    Soft(SendBatch<'q>),
    Hard(HardBatch<'q>),
}

impl std::fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Backend::Soft(batch) => {
                write!(f, "Batch({} blocks)", batch.next - batch.state.producer)
            }
            Backend::Hard(batch) => write!(f, "Batch({batch:?})"),
        }
    }
}

impl<'q> Batch<'q> {
    #[inline]
    pub(super) fn soft(core: &'q Core) -> Self {
        Self(Backend::Soft(SendBatch::new(core)))
    }

    pub(super) fn hard(hard: &'q Hard) -> Self {
        Self(Backend::Hard(hard.batch()))
    }

    /// Adds work.
    ///
    /// # Errors
    /// [`Kind::Busy`] if there is no room: post what there is, and take completions. [`Kind::InvalidArgument`] if the
    /// queue pair is not yet in `RTS`, or the request makes no sense to it.
    #[inline]
    pub fn push(&mut self, request: &SendRequest<'_>) -> Result<()> {
        match &mut self.0 {
            Backend::Soft(batch) => batch.push(request),
            Backend::Hard(batch) => batch.push(request),
        }
    }

    /// Tells the device of all of it. What hardware refuses, though all was in order by what is known of it, ends as
    /// [`Status::LocalQpOperation`](crate::mlx5::Status::LocalQpOperation).
    #[inline]
    pub fn post(self) {
        match self.0 {
            Backend::Soft(batch) => batch.post(),
            Backend::Hard(batch) => batch.post(),
        }
    }
}

/// Work that is being put into a send queue of the software HCA.
pub(super) struct SendBatch<'q> {
    core: &'q Core,
    state: Guard<'q, SendState>,
    next: u64,
}

impl<'q> SendBatch<'q> {
    /// Begins with that work in mind, if there is any.
    #[inline]
    pub(super) fn with(core: &'q Core, requests: &[SendRequest<'_>]) -> Self {
        if let Some(SendRequest { op: WrOp::Write(Remote { address, rkey }), .. }) =
            requests.first()
        {
            core.prefetch_hint.prefetch(&mlx5::Remote { address: *address, rkey: *rkey });
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
    pub(super) fn push(&mut self, request: &SendRequest<'_>) -> Result<()> {
        let core = self.core;
        if !core.accepts_posts.load(Ordering::Relaxed) {
            // It may have failed on its way, which the device knows: then what is posted comes back.
            match core.hca.qp_state(core.number)? {
                state @ (State::Reset | State::Init | State::Rtr) => {
                    return Err(not_in_rts(core.number, state));
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

    /// Has writes done at once, as long as that needs neither packets nor entries; tells how many. The rest must be
    /// pushed like any other, and there is room for it: none is done if one of them might not be taken.
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
            // Others have their turn in between.
            let Some(mut fast_path) = core.hca.fast_path(core.number) else { break };
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

    /// Has one write done at once; false if it must be pushed like any other.
    #[inline]
    fn write(&mut self, fast_path: &mut FastPath<'_>, request: &SendRequest<'_>) -> bool {
        let core = self.core;
        let WrOp::Write(Remote { address, rkey }) = request.op else { return false };
        let payload = match (request.inline, request.data) {
            (Some(bytes), _) => DataSegment::Inline(bytes),
            (None, &[Sge { address, len, lkey }]) => {
                DataSegment::Memory(Data { len, lkey, address })
            }
            _ => return false,
        };
        let wqe_index = self.state.producer;
        // Before the completion, which another thread may take.
        let slot = (wqe_index & (u64::from(core.wqebbs) - 1)) as usize;
        core.wr_table.send_wr_ids[slot].store(request.id, Ordering::Relaxed);
        core.wr_table.send_wqe_sizes[slot].store(1, Ordering::Relaxed);
        core.wr_table.posted.store(wqe_index + 1, Ordering::Release);
        let remote = mlx5::Remote { address, rkey };
        let (signaled, prefetch_hint) = (request.signaled, &core.prefetch_hint);
        if !fast_path.write(&FastWrite { wqe_index, remote, payload, signaled, prefetch_hint }) {
            core.wr_table.posted.store(wqe_index, Ordering::Release);
            return false;
        }
        self.next = wqe_index + 1;
        self.state.producer = self.next;
        true
    }

    /// Leaves the work in the queue without telling the device; returns the blocks that it takes. Somebody else rings.
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
        core.hca.ring(core.number);
    }
}

/// Writes an entry at block `at` of a send queue of which `used` blocks are in use; returns how many it takes.
#[inline]
pub(super) fn write_wqe<Q: QueueAccess>(
    queues: &Q,
    scratch: &mut Scratch,
    request: &SendRequest<'_>,
    (at, used): (u64, u64),
) -> Result<u64> {
    let wqe = request.wqe(scratch, at as u16, queues.number());
    let wqe = wqe.map_err(|WqeTooLong| too_long(request))?;
    let (wqebbs, room) = (u64::from(wqe.wqebbs()), u64::from(queues.wqebbs()));
    if used + wqebbs > room {
        return Err(full(queues.number()));
    }
    let slot = at & (room - 1);
    let (bytes, begin) = queues.send();
    let until_wrap = ((room - slot) as usize * WQEBB_LEN).min(wqe.bytes().len());
    let (head, tail) = wqe.bytes().split_at(until_wrap);
    bytes.write(begin + slot * WQEBB_LEN as u64, head)?;
    if !tail.is_empty() {
        bytes.write(begin, tail)?;
    }
    Ok(wqebbs)
}

/// Makes the entry in these blocks do nothing, and complete in its turn.
pub(super) fn overwrite_with_nop<Q: QueueAccess>(
    queues: &Q,
    scratch: &mut Scratch,
    wqebbs: Range<u64>,
) {
    let nothing = Builder::new(scratch, Opcode::Nop, wqebbs.start as u16, queues.number());
    let Ok(wqe) = nothing.signaled().finish() else { return };
    let mut control = [0; SEGMENT];
    control.copy_from_slice(wqe.bytes());
    // As many blocks as before: others may lie behind it.
    let segments_per_wqebb = (WQEBB_LEN / SEGMENT) as u64;
    let segments = ((wqebbs.end - wqebbs.start) * segments_per_wqebb).min(MAX_SEGMENTS as u64);
    control[7] = segments as u8;
    let slot = wqebbs.start & (u64::from(queues.wqebbs()) - 1);
    let (bytes, begin) = queues.send();
    let _ = bytes.write(begin + slot * WQEBB_LEN as u64, &control);
}

/// Record and doorbell: up to where the queue is filled.
#[inline]
pub(super) fn ring_doorbell<Q: QueueAccess>(queues: &Q, next: u64) {
    let index = next as u16;
    let word = u32::from_ne_bytes(DoorbellRecord::word(index));
    let ring = u64::from_ne_bytes(Doorbell::next(queues.number(), index));
    let (dbrec, at) = queues.dbrec();
    // Each store is a release: entries before the record, the record before the doorbell. They fail only if the queues'
    // memory is gone, and the device with it.
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
fn full(number: u32) -> Error {
    Error::new(Kind::Busy, "post work")
        .on(format!("queue pair {number:#x}"))
        .why("the send queue is full")
        .fix("take completions first, or make it deeper")
}

#[cold]
fn wrong_destination(core: &Core, wrong_context: bool, needed: bool) -> Error {
    let (why, fix) = match (wrong_context, needed) {
        (true, _) => ("the address handle was made by another context", "make one by this context"),
        (_, true) => ("a datagram needs an address", "say whom it is for: Request::to"),
        _ => ("only messages of datagram queue pairs have an address", "leave the address out"),
    };
    Error::new(Kind::InvalidArgument, "post work")
        .on(format!("queue pair {:#x}", core.number))
        .why(why)
        .fix(fix)
}

#[cold]
pub(super) fn not_in_rts(number: u32, state: State) -> Error {
    Error::new(Kind::InvalidArgument, "post work")
        .on(format!("queue pair {number:#x}"))
        .why(format!("it is in {state}, and takes work from RTS on"))
        .fix("connect it first; a datagram queue pair: make it ready")
}

#[cold]
fn too_long(request: &SendRequest<'_>) -> Error {
    let why = match request.inline {
        Some(bytes) => format!("{} bytes do not fit into an entry", bytes.len()),
        None => {
            format!("{} ranges do not fit into an entry, or one is 2 GiB long", request.data.len())
        }
    };
    Error::new(Kind::InvalidArgument, "post work").why(why).fix("cut it into several requests")
}
