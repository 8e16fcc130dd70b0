//! Posting work: entries are written into the send queue, and one doorbell tells of all of them.

use std::ops::Range;
use std::sync::atomic::Ordering;

use super::datagram::{AddressHandle, Destination};
use super::hard::{Hard, HardBatch};
use super::qp::Core;
use super::queues::{Places, fence_to_device};
use super::{Service, State};
use crate::error::{Error, Kind, Result};
use crate::hca::{AtOnce, Express};
use crate::mlx5::{
    self, AddressVector, Atomic, BLOCK, Builder, Data, Doorbell, Full, Image, MOST_SEGMENTS,
    Opcode, Piece, Record, SEGMENT, Scratch,
};
use crate::sync::Guard;
use crate::work::{Fence, Op, Remote, Sge};

/// Work to post: [`work::Request`](crate::work::Request) with this room's addresses.
///
/// ```
/// use warpwire::verbs::{Op, Request};
/// let request = Request::new(2, Op::Send).inline(b"hello").solicited();
/// assert_eq!(request.inline, Some(&b"hello"[..]));
/// ```
pub type Request<'a> = crate::work::Request<'a, AddressHandle>;

impl Request<'_> {
    /// How many blocks a simple one takes at most.
    const SIMPLE_BLOCKS: u64 = 2;

    /// Whether it is a write that any connected queue pair takes, if it has the room: few bytes in itself, or one range.
    #[inline]
    fn is_simple(&self) -> bool {
        let fits = match (self.inline, self.data) {
            (Some(bytes), _) => bytes.len() <= BLOCK,
            (None, [range]) => range.len < 1 << 31,
            _ => false,
        };
        fits && matches!(self.op, Op::Write(_)) && self.destination.is_none()
    }

    /// Whether a queue pair of that service can be told of it at all: the device looks for an address exactly in
    /// messages of datagram queue pairs.
    fn check(&self, core: &Core) -> Result<()> {
        let is_message = matches!(self.op, Op::Send | Op::SendImm(_));
        let needs = core.service == Service::Ud && is_message;
        match self.destination {
            Some(to) if needs && to.handle.is_of(&core.hca) => Ok(()),
            None if !needs => Ok(()),
            wrong => Err(wrong_destination(core, wrong.is_some() && needs, needs)),
        }
    }

    fn image<'s>(
        &self,
        scratch: &'s mut Scratch,
        index: u16,
        qpn: u32,
    ) -> std::result::Result<Image<'s>, Full> {
        let opcode = match self.op {
            Op::Send => Opcode::Send,
            Op::SendImm(_) => Opcode::SendImm,
            Op::SendInvalidate(_) => Opcode::SendInvalidate,
            Op::Write(_) => Opcode::RdmaWrite,
            Op::WriteImm(..) => Opcode::RdmaWriteImm,
            Op::Read(_) => Opcode::RdmaRead,
            Op::Atomic(_, Atomic::CompareSwap { .. }) => Opcode::CompareSwap,
            Op::Atomic(_, Atomic::FetchAdd { .. }) => Opcode::FetchAdd,
            Op::Atomic(_, Atomic::MaskedCompareSwap { .. }) => Opcode::MaskedCompareSwap,
            Op::Atomic(_, Atomic::MaskedFetchAdd { .. }) => Opcode::MaskedFetchAdd,
            Op::Nop => Opcode::Nop,
            Op::Wait { .. } => Opcode::Wait,
            Op::Dump => Opcode::Dump,
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
            Fence::Reads => entry.fence(mlx5::Fence::ReadsAndAtomics),
            Fence::All => entry.fence(mlx5::Fence::Strong),
        };
        entry = match self.op {
            Op::SendImm(imm) => entry.imm(imm),
            Op::SendInvalidate(key) => entry.invalidate(key),
            Op::Write(at) | Op::Read(at) => entry.remote(at.address, at.rkey),
            Op::WriteImm(at, imm) => entry.imm(imm).remote(at.address, at.rkey),
            Op::Atomic(at, op) => entry.remote(at.address, at.rkey).atomic(&op),
            Op::Wait { cqn, index } => entry.wait(cqn, index),
            Op::Send | Op::Nop | Op::Dump => entry,
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
pub struct Batch<'q>(Arm<'q>);

enum Arm<'q> {
    Soft(Filling<'q>),
    Hard(HardBatch<'q>),
}

impl std::fmt::Debug for Batch<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match &self.0 {
            Arm::Soft(filling) => {
                write!(f, "Batch({} blocks)", filling.next - filling.state.producer)
            }
            Arm::Hard(batch) => write!(f, "Batch({batch:?})"),
        }
    }
}

impl<'q> Batch<'q> {
    #[inline]
    pub(super) fn soft(core: &'q Core) -> Self {
        Self(Arm::Soft(Filling::new(core)))
    }

    pub(super) fn hard(hard: &'q Hard) -> Self {
        Self(Arm::Hard(hard.batch()))
    }

    /// Adds work.
    ///
    /// # Errors
    /// [`Kind::Busy`] if there is no room: post what there is, and take completions. [`Kind::InvalidArgument`] if the
    /// queue pair is not yet in `RTS`, or the request makes no sense to it.
    #[inline]
    pub fn push(&mut self, request: &Request<'_>) -> Result<()> {
        match &mut self.0 {
            Arm::Soft(filling) => filling.push(request),
            Arm::Hard(batch) => batch.push(request),
        }
    }

    /// Tells the device of all of it. What hardware refuses, though all was in order by what is known of it, ends as
    /// [`Status::LocalQpOperation`](crate::mlx5::Status::LocalQpOperation).
    #[inline]
    pub fn post(self) {
        match self.0 {
            Arm::Soft(filling) => filling.post(),
            Arm::Hard(batch) => batch.post(),
        }
    }
}

/// Work that is being put into a send queue of the software HCA.
pub(super) struct Filling<'q> {
    core: &'q Core,
    state: Guard<'q, SendState>,
    next: u64,
}

impl<'q> Filling<'q> {
    /// Begins with that work in mind, if there is any.
    #[inline]
    pub(super) fn with(core: &'q Core, requests: &[Request<'_>]) -> Self {
        if let Some(Request { op: Op::Write(Remote { address, rkey }), .. }) = requests.first() {
            core.aim.expect(&mlx5::Remote { address: *address, rkey: *rkey });
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
    pub(super) fn push(&mut self, request: &Request<'_>) -> Result<()> {
        let core = self.core;
        if !core.takes_work.load(Ordering::Relaxed) {
            // It may have failed on its way, which the device knows: then what is posted comes back.
            match core.hca.qp_state(core.number)? {
                state @ (State::Reset | State::Init | State::Rtr) => {
                    return Err(too_early(core.number, state));
                }
                _ => core.takes_work.store(true, Ordering::Relaxed),
            }
        }
        request.check(core)?;
        let used = self.next - core.ledger.freed.load(Ordering::Acquire);
        let blocks = put(core, &mut self.state.scratch, request, (self.next, used))?;
        let place = self.next & (u64::from(core.blocks) - 1);
        core.ledger.send_ids[place as usize].store(request.id, Ordering::Relaxed);
        core.ledger.send_sizes[place as usize].store(blocks as u8, Ordering::Relaxed);
        self.next += blocks;
        Ok(())
    }

    /// Has writes done at once, as long as that needs neither packets nor entries; tells how many. The rest must be
    /// pushed like any other, and there is room for it: none is done if one of them might not be taken.
    #[inline]
    pub(super) fn at_once(&mut self, requests: &[Request<'_>]) -> usize {
        let core = self.core;
        let used = self.state.producer - core.ledger.freed.load(Ordering::Acquire);
        let most = requests.len() as u64 * Request::SIMPLE_BLOCKS;
        let has_room = match requests {
            [_] => used < u64::from(core.blocks),
            _ => used + most <= u64::from(core.blocks),
        };
        if !has_room || !requests.iter().all(Request::is_simple) {
            return 0;
        }
        let mut done = 0;
        while done < requests.len() {
            // Others have their turn in between.
            let Some(mut express) = core.hca.express(core.number) else { break };
            let before = done;
            while let Some(request) = requests.get(done)
                && self.write(&mut express, request)
            {
                done += 1;
            }
            if done == before {
                break;
            }
        }
        if done > 0 {
            tell(core, self.next);
        }
        done
    }

    /// Has one write done at once; false if it must be pushed like any other.
    #[inline]
    fn write(&mut self, express: &mut Express<'_>, request: &Request<'_>) -> bool {
        let core = self.core;
        let Op::Write(Remote { address, rkey }) = request.op else { return false };
        let payload = match (request.inline, request.data) {
            (Some(bytes), _) => Piece::Inline(bytes),
            (None, &[Sge { address, len, lkey }]) => Piece::Memory(Data { len, lkey, address }),
            _ => return false,
        };
        let block = self.state.producer;
        // Before the completion, which another thread may take.
        let place = (block & (u64::from(core.blocks) - 1)) as usize;
        core.ledger.send_ids[place].store(request.id, Ordering::Relaxed);
        core.ledger.send_sizes[place].store(1, Ordering::Relaxed);
        core.ledger.posted.store(block + 1, Ordering::Release);
        let remote = mlx5::Remote { address, rkey };
        let (signaled, aim) = (request.signaled, &core.aim);
        if !express.write(&AtOnce { block, remote, payload, signaled, aim }) {
            core.ledger.posted.store(block, Ordering::Release);
            return false;
        }
        self.next = block + 1;
        self.state.producer = self.next;
        true
    }

    /// Leaves the work in the queue without telling the device; returns the blocks that it takes. Somebody else rings.
    pub(super) fn keep(mut self) -> Range<u64> {
        let first = std::mem::replace(&mut self.state.producer, self.next);
        self.core.ledger.posted.store(self.next, Ordering::Release);
        first..self.next
    }

    #[inline]
    pub(super) fn post(mut self) {
        if self.next == self.state.producer {
            return;
        }
        self.state.producer = self.next;
        let core = self.core;
        core.ledger.posted.store(self.next, Ordering::Release);
        tell(core, self.next);
        drop(self.state);
        core.hca.ring(core.number);
    }
}

/// Writes an entry at block `at` of a send queue of which `used` blocks are in use; returns how many it takes.
#[inline]
pub(super) fn put<Q: Places>(
    queues: &Q,
    scratch: &mut Scratch,
    request: &Request<'_>,
    (at, used): (u64, u64),
) -> Result<u64> {
    let image = request.image(scratch, at as u16, queues.number());
    let image = image.map_err(|Full| too_long(request))?;
    let (blocks, room) = (u64::from(image.blocks()), u64::from(queues.blocks()));
    if used + blocks > room {
        return Err(full(queues.number()));
    }
    let place = at & (room - 1);
    let (bytes, begin) = queues.send();
    let before_end = ((room - place) as usize * BLOCK).min(image.bytes().len());
    let (head, tail) = image.bytes().split_at(before_end);
    bytes.write(begin + place * BLOCK as u64, head)?;
    if !tail.is_empty() {
        bytes.write(begin, tail)?;
    }
    Ok(blocks)
}

/// Makes the entry in these blocks do nothing, and complete in its turn.
pub(super) fn blank<Q: Places>(queues: &Q, scratch: &mut Scratch, blocks: Range<u64>) {
    let nothing = Builder::new(scratch, Opcode::Nop, blocks.start as u16, queues.number());
    let Ok(image) = nothing.signaled().finish() else { return };
    let mut control = [0; SEGMENT];
    control.copy_from_slice(image.bytes());
    // As many blocks as before: others may lie behind it.
    let per_block = (BLOCK / SEGMENT) as u64;
    let segments = ((blocks.end - blocks.start) * per_block).min(MOST_SEGMENTS as u64);
    control[7] = segments as u8;
    let place = blocks.start & (u64::from(queues.blocks()) - 1);
    let (bytes, begin) = queues.send();
    let _ = bytes.write(begin + place * BLOCK as u64, &control);
}

/// Record and doorbell: up to where the queue is filled.
#[inline]
pub(super) fn tell<Q: Places>(queues: &Q, next: u64) {
    let index = next as u16;
    let word = u32::from_ne_bytes(Record::word(index));
    let ring = u64::from_ne_bytes(Doorbell::next(queues.number(), index));
    let (record, at) = queues.record();
    // Each store is a release: entries before the record, the record before the doorbell. They fail only if the queues'
    // memory is gone, and the device with it.
    let _ = record.store_u32(at + Record::SEND as u64, word);
    let (doorbell, at) = queues.doorbell();
    if Q::IS_DEVICE {
        fence_to_device();
    }
    let _ = doorbell.store_u64(at, ring);
    if Q::IS_DEVICE {
        fence_to_device();
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
fn wrong_destination(core: &Core, foreign: bool, needed: bool) -> Error {
    let (why, fix) = match (foreign, needed) {
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
pub(super) fn too_early(number: u32, state: State) -> Error {
    Error::new(Kind::InvalidArgument, "post work")
        .on(format!("queue pair {number:#x}"))
        .why(format!("it is in {state}, and takes work from RTS on"))
        .fix("connect it first; a datagram queue pair: make it ready")
}

#[cold]
fn too_long(request: &Request<'_>) -> Error {
    let why = match request.inline {
        Some(bytes) => format!("{} bytes do not fit into an entry", bytes.len()),
        None => {
            format!("{} ranges do not fit into an entry, or one is 2 GiB long", request.data.len())
        }
    };
    Error::new(Kind::InvalidArgument, "post work").why(why).fix("cut it into several requests")
}
