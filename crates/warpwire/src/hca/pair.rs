//! A queue pair inside the engine: the protocol's state machine, its queues, and the memory that its work names.

use std::cell::Cell;

use warpwire_proto::qp::{self, Op, Status as WireStatus, Work as WireWork};
use warpwire_proto::{Instant, Psn};

use super::ahead::{Ahead, Name, Wanted};
use super::direct::Reach;
use super::memory::QueueMemory;
use super::partner::{Partners, Tried};
use super::protocol::Protocol;
use super::ring::{
    LONGEST_RECEIVE, Layout, ReceiveRing, SendRing, SharedRing, Taken, TakenReceive,
};
use super::stats::Indirect;
use crate::link::FlowId;
use crate::mlx5::{
    self, ADDRESS_SEGMENTS, AddressVector, Atomic, AtomicWidth, Completions, Data, Opcode, Piece,
    SEGMENT, SendKind, Status, Work, Wqe,
};
use crate::mr::{Access, Denied, PdId, Registry, Span};

/// What a queue pair is made of.
#[derive(Clone, Debug)]
pub struct QpSpec {
    /// Its memory.
    pub memory: QueueMemory,
    /// Where its parts lie in it.
    pub layout: Layout,
    /// How many blocks the send queue has: a power of two.
    pub send_blocks: u32,
    /// How many entries the receive queue has, and how long each is: powers of two. None with a shared one.
    pub receive_entries: u32,
    /// How long each is.
    pub receive_stride: u32,
    /// The completion queue of its send queue.
    pub send_cq: u32,
    /// The completion queue of its receive queue.
    pub receive_cq: u32,
    /// The shared receive queue that takes the place of its own.
    pub srq: Option<u32>,
    /// Its protection domain.
    pub pd: PdId,
    /// Whether every work makes a completion.
    pub signal_all: bool,
    /// The number that completions bear beside the queue pair's: 24 bits.
    pub user_index: u32,
    /// Somebody other than this process's CPU rings the doorbell: it must be watched.
    pub watched: bool,
    /// How the protocol is tuned; the depth of the queue is set from `send_blocks`.
    pub options: qp::Options,
    /// For datagrams, of so many bytes at most; `None` for a connection.
    pub datagrams: Option<qp::Mtu>,
}

/// What is remembered of work that is under way, by its first block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Underway {
    pub opcode: Opcode,
    pub completions: Completions,
    pub len: u32,
    /// The only range of its payload, if there is just one: most work is like that.
    pub single: Option<Data>,
    /// Where in the entry's copy its payload lies, if all of it does.
    pub inline: Option<u16>,
}

impl Underway {
    const NONE: Self = Self {
        opcode: Opcode::Nop,
        completions: Completions::Always,
        len: 0,
        single: None,
        inline: None,
    };
}

/// A queue pair of the engine.
#[derive(Debug)]
pub(super) struct Pair {
    pub qp: Protocol,
    pub side: Side,
    pub flow: Option<FlowId>,
    /// In the list of those that may have something to send.
    pub active: bool,
    /// When the earliest timer in the engine's heap is for it.
    pub timer: Instant,
    /// Its failure has been dealt with.
    pub failed: bool,
    /// A failure of its work has been told.
    pub told: bool,
    pub send_cq: u32,
    pub receive_cq: u32,
    pub user_index: u32,
    pub watched: bool,
    pub signal_all: bool,
    /// The queue stands still until a completion queue has made a certain completion; only then is the work begun
    /// that asked for it.
    pub wait: Option<(mlx5::Wait, WireWork)>,
    /// Whether its peer needs packets.
    pub reach: Reach,
}

/// What was taken from a send queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Took {
    /// What there was is begun, or waits.
    All,
    /// This one is done without packets; there may be more.
    Direct(WireWork),
    /// This one goes by packets for that reason; there may be more.
    Packets(Indirect),
    /// The turn is over, and there is more.
    Turn,
}

/// The part of it that the protocol asks about memory.
#[derive(Debug)]
pub(super) struct Side {
    pub ring: SendRing,
    underway: Box<[Underway]>,
    pub receives: Receives,
    /// The receives in use: a message has one, and another may wait for the next.
    in_use: [Option<TakenReceive>; 2],
    pub pd: PdId,
    /// Payload of device memory that was fetched ahead.
    ahead: Ahead,
    /// Why the last range was denied, for whoever asks.
    pub denied: Option<Denied>,
    /// It has placed data in memory that goes through pinned memory.
    pub staged: Cell<bool>,
    /// The peer learns that what it reads is gone.
    pub concludes: bool,
    /// An answer was "not now": poll again soon.
    pub later: bool,
    blocks_mask: u64,
    /// Its messages are datagrams: their entries say whom they are for.
    datagrams: bool,
}

/// Where receives come from.
#[derive(Debug)]
pub(super) enum Receives {
    Own(ReceiveRing),
    Shared(u32),
}

impl Pair {
    pub(super) fn new(number: u32, spec: QpSpec) -> Self {
        let options = qp::Options { send_depth: spec.send_blocks, ..spec.options };
        let ring = SendRing::new(spec.memory.clone(), spec.layout, spec.send_blocks);
        let receives = match spec.srq {
            Some(srqn) => Receives::Shared(srqn),
            None => {
                let (entries, stride) = (spec.receive_entries, spec.receive_stride);
                Receives::Own(ReceiveRing::new(spec.memory, spec.layout, entries, stride))
            }
        };
        let side = Side {
            ring,
            underway: vec![Underway::NONE; spec.send_blocks as usize].into(),
            receives,
            in_use: [None; 2],
            pd: spec.pd,
            ahead: Ahead::default(),
            denied: None,
            staged: Cell::new(false),
            concludes: false,
            later: false,
            blocks_mask: u64::from(spec.send_blocks) - 1,
            datagrams: spec.datagrams.is_some(),
        };
        let qp = match spec.datagrams {
            Some(mtu) => Protocol::datagram(number, mtu, spec.send_blocks),
            None => Protocol::connected(number, options),
        };
        Self {
            qp,
            side,
            flow: None,
            active: false,
            timer: Instant::NEVER,
            failed: false,
            told: false,
            send_cq: spec.send_cq,
            receive_cq: spec.receive_cq,
            user_index: spec.user_index,
            watched: spec.watched,
            signal_all: spec.signal_all,
            wait: None,
            reach: Reach::new(),
        }
    }

    /// Forgets all work, as the protocol just did.
    pub(super) fn reset(&mut self, srqs: &mut [Option<SharedRing>]) {
        (self.failed, self.told, self.wait) = (false, false, None);
        self.side.ring.reset();
        self.side.give_back(srqs);
        self.side.ahead = Ahead::default();
        self.reach.reset();
        if let Receives::Own(ring) = &mut self.side.receives {
            ring.reset();
        }
    }

    /// Takes entries from the send queue and posts them, as long as there are any and there is room. `produced`
    /// tells how many completions a queue has made; `turn` is how many bytes may still be moved without packets.
    pub(super) fn take_work(
        &mut self,
        now: Instant,
        registry: &Registry,
        produced: impl Fn(u32) -> Option<u64>,
        partners: &mut Partners,
        turn: &mut u32,
    ) -> Took {
        loop {
            if self.qp.outstanding() as u64 > self.side.blocks_mask {
                return Took::All;
            }
            if let Some((wait, work)) = self.wait {
                // A queue that is not there, or not yet so far, holds this one up; a failure ends every wait.
                let reached =
                    produced(wait.cqn).is_some_and(|count| has_reached(count, wait.index));
                if !reached && !matches!(self.qp.state(), qp::State::Err | qp::State::Sqe) {
                    return Took::All;
                }
                self.wait = None;
                self.begin(work);
                continue;
            }
            let work = match self.reach.held.take() {
                Some(work) => work,
                None => {
                    let Some(taken) = self.side.ring.take(now) else { return Took::All };
                    match self.understand(&taken, registry) {
                        (work, Some(wait)) => {
                            self.wait = Some((wait, work));
                            continue;
                        }
                        (work, None) => work,
                    }
                }
            };
            match partners.attempt(self, &work, registry, now, turn) {
                Tried::Done => return Took::Direct(work),
                Tried::NotYet => {
                    self.reach.held = Some(work);
                    return Took::Turn;
                }
                Tried::AfterOthers => {
                    self.reach.held = Some(work);
                    return Took::All;
                }
                Tried::No(why) => {
                    self.reach.done = 0;
                    self.begin(work);
                    if let Some(why) = why {
                        return Took::Packets(why);
                    }
                }
            }
        }
    }

    /// What an entry asks for; and what it waits for, if it is a wait.
    fn understand(&mut self, taken: &Taken, registry: &Registry) -> (WireWork, Option<mlx5::Wait>) {
        let parsed = match taken.torn {
            true => Err(Status::LocalQpOperation),
            false => self.side.translate(taken, registry),
        };
        let (op, len, wait) = match parsed {
            Ok(found) => found,
            Err(status) => {
                self.side.note(taken, 0, None, None);
                (Op::Bad(wire_status(status)), 0, None)
            }
        };
        let fence = match taken.control.fence {
            fence if fence.waits_for_all() => qp::Fence::All,
            fence if fence.waits_for_reads() => qp::Fence::Reads,
            _ => qp::Fence::None,
        };
        let work = WireWork {
            id: taken.block,
            op,
            len,
            signaled: self.signal_all || taken.control.is_signaled(),
            fence,
            solicited: taken.control.solicited,
        };
        (work, wait)
    }

    fn begin(&mut self, work: WireWork) {
        let Self { qp, side, .. } = self;
        if qp.post(work, || side.address(work.id)).is_err() {
            // A length that this MTU does not carry, or a state that takes no work: the same to the user.
            let bad = Op::Bad(WireStatus::LocalOperation);
            let _ = qp.post(WireWork { op: bad, len: 0, ..work }, || None);
        }
    }
}

/// Whether a queue that made `count` completions has made the one numbered `index`, modulo 2^32.
fn has_reached(count: u64, index: u32) -> bool {
    (count as u32).wrapping_sub(index).wrapping_sub(1) as i32 >= 0
}

/// The status as the protocol has it.
fn wire_status(status: Status) -> WireStatus {
    match status {
        Status::LocalLength => WireStatus::LocalLength,
        Status::LocalProtection => WireStatus::LocalProtection,
        _ => WireStatus::LocalOperation,
    }
}

impl Side {
    pub(super) fn underway(&self, block: u64) -> Underway {
        self.underway[(block & self.blocks_mask) as usize]
    }

    /// The entry that was taken at that block.
    fn parse(&self, block: u64) -> Result<Wqe<'_>, mlx5::Refused> {
        let copy = self.ring.copy(block);
        match self.datagrams {
            false => Wqe::parse(copy),
            true => Wqe::parse_datagram(copy).map(|(wqe, _)| wqe),
        }
    }

    /// Whom the datagram at that block is for.
    pub(super) fn address(&self, block: u64) -> Option<AddressVector> {
        let segments = ADDRESS_SEGMENTS * SEGMENT;
        let bytes = self.ring.copy(block).get(SEGMENT..SEGMENT + segments)?;
        Some(AddressVector::parse(bytes.try_into().ok()?))
    }

    /// What an entry means to the protocol: operation, length, and a wait if it is one.
    fn translate(
        &mut self,
        taken: &Taken,
        registry: &Registry,
    ) -> Result<(Op, u32, Option<mlx5::Wait>), Status> {
        let wqe = self.parse(taken.block).map_err(|refused| refused.status())?;
        let (mut wait, mut single, mut inline, mut dumped) = (None, None, None, 0);
        let start = self.ring.copy(taken.block).as_ptr().addr();
        let remote = |at: mlx5::Remote| qp::Remote { address: at.address, key: at.rkey };
        let mut note = |payload: &mlx5::Payload<'_>| {
            let mut pieces = payload.pieces();
            match (pieces.next(), pieces.next()) {
                (Some(Piece::Memory(data)), None) => single = Some(data),
                (Some(Piece::Inline(bytes)), None) => {
                    inline = u16::try_from(bytes.as_ptr().addr() - start).ok();
                }
                _ => {}
            }
            payload.len() as u32
        };
        let (op, len) = match wqe.work {
            Work::Nop => (Op::Local, 0),
            Work::Wait(found) => {
                wait = Some(found);
                (Op::Local, 0)
            }
            // What is read locally goes nowhere, and all that was placed before is in its place already.
            Work::Dump { from } => {
                dumped = note(&from);
                (Op::Local, 0)
            }
            Work::Send { kind, payload } => {
                let op = match kind {
                    SendKind::Plain => Op::Send,
                    SendKind::Imm(imm) => Op::SendImm(u32::from_be_bytes(imm)),
                    SendKind::Invalidate(key) => Op::SendInvalidate(key),
                };
                (op, note(&payload))
            }
            Work::Write { remote: at, imm, payload } => {
                let op = match imm {
                    Some(imm) => Op::WriteImm(remote(at), u32::from_be_bytes(imm)),
                    None => Op::Write(remote(at)),
                };
                (op, note(&payload))
            }
            Work::Read { remote: at, into } => (Op::Read(remote(at)), note(&into)),
            Work::Atomic { remote: at, op, into } => {
                note(&into);
                let atomic = to_wire(op);
                (Op::Atomic(remote(at), atomic), atomic.len())
            }
        };
        self.note(taken, len, single, inline);
        match self.may_gather(registry, taken.block, 0, dumped) {
            // Memory that moves is there, and nobody sees what was read of it.
            Ok(()) => Ok((op, len, wait)),
            Err(denied) if denied.passes() => Ok((op, len, wait)),
            Err(denied) => {
                self.denied = Some(denied);
                Err(Status::LocalProtection)
            }
        }
    }

    fn note(&mut self, taken: &Taken, len: u32, single: Option<Data>, inline: Option<u16>) {
        let (opcode, completions) = (taken.control.opcode, taken.control.completions);
        self.underway[(taken.block & self.blocks_mask) as usize] =
            Underway { opcode, completions, len, single, inline };
    }

    /// Calls `each` with the pieces of work's payload that hold `len` bytes from `offset` on, as [`Side::walk`] does, and
    /// faster where there is just one.
    #[inline]
    pub(super) fn pieces(
        &self,
        block: u64,
        offset: u32,
        len: u32,
        mut each: impl FnMut(Piece<'_>, u32, u32) -> Result<(), Denied>,
    ) -> Result<(), Denied> {
        let work = &self.underway[(block & self.blocks_mask) as usize];
        if let Some(data) = work.single {
            return each(Piece::Memory(data), offset, len);
        }
        if let Some(at) = work.inline {
            let bytes = self.ring.copy(block).get(usize::from(at)..).ok_or(Denied::Range)?;
            return each(Piece::Inline(bytes), offset, len);
        }
        self.walk(block, offset, len, each)
    }

    /// Copies payload of work, `offset` bytes into it, to `into`.
    pub(super) fn gather(
        &mut self,
        registry: &Registry,
        block: u64,
        offset: u32,
        into: &mut [u8],
    ) -> Result<(), Denied> {
        if let Some(data) = self.underway(block).single {
            let address = data.address.wrapping_add(u64::from(offset));
            let wanted = Wanted {
                name: Name::Work(block),
                key: data.lkey,
                pd: self.pd,
                need: Access::NONE,
                address,
                left: data.len.saturating_sub(offset),
            };
            return self.ahead.gather(registry, &wanted, into);
        }
        let mut done = 0;
        self.walk(block, offset, into.len() as u32, |piece, skip, len| {
            let part = into.get_mut(done..done + len as usize).ok_or(Denied::Range)?;
            done += len as usize;
            match piece {
                Piece::Inline(bytes) => {
                    let from = bytes.get(skip as usize..(skip + len) as usize);
                    part.copy_from_slice(from.ok_or(Denied::Range)?);
                    Ok(())
                }
                Piece::Memory(data) => {
                    let address = data.address.wrapping_add(u64::from(skip));
                    let (pd, none, len) = (self.pd, Access::NONE, u64::from(len));
                    registry.resolve(data.lkey, pd, none, address, len)?.gather(0, part)
                }
            }
        })
    }

    /// The memory of a packet's payload, if it is one range, and that may be used.
    pub(super) fn single_span<'a>(
        &self,
        registry: &'a Registry,
        from: qp::Source,
        len: u32,
    ) -> Option<Span<'a>> {
        let (key, need, address) = match from {
            qp::Source::Work { id, offset } => {
                let data = self.underway(id).single?;
                (data.lkey, Access::NONE, data.address.wrapping_add(u64::from(offset)))
            }
            qp::Source::Remote { at, .. } => (at.key, Access::REMOTE_READ, at.address),
        };
        registry.resolve(key, self.pd, need, address, u64::from(len)).ok()
    }

    /// The memory that a packet's payload goes to, if it is one range, and that may be used.
    pub(super) fn target_span<'a>(
        &self,
        registry: &'a Registry,
        to: qp::Target,
        len: u32,
    ) -> Option<Span<'a>> {
        let (key, need, address) = match to {
            qp::Target::Remote(at) => (at.key, Access::REMOTE_WRITE, at.address),
            qp::Target::Response { id, offset } => {
                let data = self.underway(id).single?;
                (data.lkey, Access::LOCAL_WRITE, data.address.wrapping_add(u64::from(offset)))
            }
            qp::Target::Receive { id, offset } => {
                let data = self.single_receive(id)?;
                // What does not fit into it is the usual way's to refuse.
                data.len.checked_sub(offset)?.checked_sub(len)?;
                (data.lkey, Access::LOCAL_WRITE, data.address.wrapping_add(u64::from(offset)))
            }
            qp::Target::Route { .. } => return None,
        };
        registry.resolve(key, self.pd, need, address, u64::from(len)).ok()
    }

    /// Copies what a peer reads to `into`; the request asks for `left` bytes from there on.
    pub(super) fn gather_for_peer(
        &mut self,
        registry: &Registry,
        at: qp::Remote,
        left: u32,
        request: Psn,
        into: &mut [u8],
    ) -> Result<(), Denied> {
        let wanted = Wanted {
            name: Name::Read(request),
            key: at.key,
            pd: self.pd,
            need: Access::REMOTE_READ,
            address: at.address,
            left,
        };
        self.ahead.gather(registry, &wanted, into)
    }

    /// Whether payload of work may be fetched.
    pub(super) fn may_gather(
        &self,
        registry: &Registry,
        block: u64,
        offset: u32,
        len: u32,
    ) -> Result<(), Denied> {
        if len == 0 {
            return Ok(());
        }
        let check = |data: Data, skip: u32, len: u32| {
            let address = data.address.wrapping_add(u64::from(skip));
            registry.resolve(data.lkey, self.pd, Access::NONE, address, u64::from(len)).map(drop)
        };
        if let Some(data) = self.underway(block).single {
            return check(data, offset, len);
        }
        self.walk(block, offset, len, |piece, skip, len| match piece {
            Piece::Inline(_) => Ok(()),
            Piece::Memory(data) => check(data, skip, len),
        })
    }

    /// Copies what came for work (a read's data, an atomic's result) into its buffers.
    pub(super) fn scatter(
        &self,
        registry: &Registry,
        block: u64,
        offset: u32,
        from: &[u8],
    ) -> Result<(), Denied> {
        let place = |data: Data, skip: u32, from: &[u8]| {
            let address = data.address.wrapping_add(u64::from(skip));
            let len = from.len() as u64;
            let span = registry.resolve(data.lkey, self.pd, Access::LOCAL_WRITE, address, len)?;
            self.put(&span, from)
        };
        if let Some(data) = self.underway(block).single {
            return place(data, offset, from);
        }
        let mut done = 0;
        self.walk(block, offset, from.len() as u32, |piece, skip, len| {
            let part = from.get(done..done + len as usize).ok_or(Denied::Range)?;
            done += len as usize;
            match piece {
                Piece::Memory(data) => place(data, skip, part),
                Piece::Inline(_) => Err(Denied::Range),
            }
        })
    }

    /// Goes through the pieces of work's payload that hold `len` bytes from `offset` on: each piece, how much of it
    /// to skip, and how much of it is meant.
    fn walk(
        &self,
        block: u64,
        offset: u32,
        len: u32,
        mut each: impl FnMut(Piece<'_>, u32, u32) -> Result<(), Denied>,
    ) -> Result<(), Denied> {
        let wqe = self.parse(block).map_err(|_| Denied::Range)?;
        let payload = match wqe.work {
            Work::Send { payload, .. } | Work::Write { payload, .. } => payload,
            Work::Read { into, .. } | Work::Atomic { into, .. } => into,
            Work::Dump { from } => from,
            Work::Nop | Work::Wait(_) => return Err(Denied::Range),
        };
        walk_pieces(payload.pieces().map(|piece| (piece.len(), piece)), offset, len, &mut each)
    }

    /// Takes a receive for a message that begins.
    pub(super) fn take_receive(&mut self, srqs: &mut [Option<SharedRing>]) -> Option<qp::Receive> {
        // Before one is taken: it must not be lost for want of a place.
        let place = self.in_use.iter_mut().find(|place| place.is_none())?;
        let taken = match &mut self.receives {
            Receives::Own(ring) => ring.take()?,
            Receives::Shared(srqn) => srqs.get_mut(*srqn as usize)?.as_mut()?.take()?,
        };
        let entry = &taken.entry[..taken.len.min(LONGEST_RECEIVE)];
        // An entry that makes no sense has room for nothing: whoever sends into it finds it too small.
        let capacity = mlx5::Receive::parse(entry).map_or(0, |receive| receive.len());
        *place = Some(taken);
        let capacity = u32::try_from(capacity).unwrap_or(u32::MAX);
        Some(qp::Receive { id: u64::from(taken.counter), capacity })
    }

    fn receive_in_use(&self, id: u64) -> Option<mlx5::Receive<'_>> {
        let taken = self.in_use.iter().flatten().find(|taken| u64::from(taken.counter) == id)?;
        mlx5::Receive::parse(&taken.entry[..taken.len.min(LONGEST_RECEIVE)]).ok()
    }

    /// The only piece of memory of a receive in use, if it has one.
    fn single_receive(&self, id: u64) -> Option<Data> {
        let receive = self.receive_in_use(id)?;
        let mut pieces = receive.segments();
        pieces.next().filter(|_| pieces.next().is_none())
    }

    /// Copies a message's bytes into the receive that it uses.
    pub(super) fn place_received(
        &self,
        registry: &Registry,
        id: u64,
        offset: u32,
        from: &[u8],
    ) -> Result<(), Denied> {
        let receive = self.receive_in_use(id).ok_or(Denied::Range)?;
        let pieces = receive.segments().map(|data| (u64::from(data.len), data));
        let mut done = 0;
        walk_pieces(pieces, offset, from.len() as u32, &mut |data, skip, len| {
            let part = from.get(done..done + len as usize).ok_or(Denied::Range)?;
            done += len as usize;
            let address = data.address.wrapping_add(u64::from(skip));
            let (pd, write, len) = (self.pd, Access::LOCAL_WRITE, u64::from(len));
            let span = registry.resolve(data.lkey, pd, write, address, len)?;
            self.put(&span, part)
        })
    }

    /// Copies bytes into memory, and notes whether they are there at once.
    pub(super) fn put(&self, span: &Span<'_>, from: &[u8]) -> Result<(), Denied> {
        if span.is_staged() {
            self.staged.set(true);
        }
        span.scatter(0, from)
    }

    /// Gives the receives in use back, and forgets them: shared ones serve others.
    pub(super) fn give_back(&mut self, srqs: &mut [Option<SharedRing>]) {
        let in_use = std::mem::take(&mut self.in_use);
        let Receives::Shared(srqn) = self.receives else { return };
        let Some(Some(srq)) = srqs.get_mut(srqn as usize) else { return };
        // The last is taken first.
        for taken in in_use.iter().rev().flatten() {
            srq.give_back(taken.counter);
        }
    }

    /// A receive has ended: its place is free.
    pub(super) fn end_receive(&mut self, id: u64) {
        for place in &mut self.in_use {
            if place.is_some_and(|taken| u64::from(taken.counter) == id) {
                *place = None;
                return;
            }
        }
    }
}

/// The pieces, each with its length, that hold `len` bytes from `offset` on.
fn walk_pieces<P>(
    pieces: impl Iterator<Item = (u64, P)>,
    offset: u32,
    len: u32,
    each: &mut impl FnMut(P, u32, u32) -> Result<(), Denied>,
) -> Result<(), Denied> {
    let (mut skip, mut left) = (u64::from(offset), len);
    for (size, piece) in pieces {
        if skip >= size {
            skip -= size;
            continue;
        }
        let here = u32::try_from(size - skip).unwrap_or(u32::MAX).min(left);
        // Less than the piece's size, which is 31 bits.
        each(piece, skip as u32, here)?;
        (skip, left) = (0, left - here);
        if left == 0 {
            return Ok(());
        }
    }
    if left == 0 { Ok(()) } else { Err(Denied::Range) }
}

/// The atomic as the protocol has it.
fn to_wire(op: Atomic) -> qp::Atomic {
    let width = |width| match width {
        AtomicWidth::Four => qp::Width::Four,
        AtomicWidth::Eight => qp::Width::Eight,
    };
    match op {
        Atomic::CompareSwap { compare, swap } => qp::Atomic::CompareSwap { compare, swap },
        Atomic::FetchAdd { add } => qp::Atomic::FetchAdd { add },
        Atomic::MaskedFetchAdd { width: bytes, add, boundary } => {
            qp::Atomic::MaskedFetchAdd { width: width(bytes), add, boundary }
        }
        Atomic::MaskedCompareSwap { width: bytes, compare, swap, compare_mask, swap_mask } => {
            let width = width(bytes);
            qp::Atomic::MaskedCompareSwap { width, compare, swap, compare_mask, swap_mask }
        }
    }
}

/// And back.
pub(super) fn from_wire(op: qp::Atomic) -> Atomic {
    let width = |width| match width {
        qp::Width::Four => AtomicWidth::Four,
        qp::Width::Eight => AtomicWidth::Eight,
    };
    match op {
        qp::Atomic::CompareSwap { compare, swap } => Atomic::CompareSwap { compare, swap },
        qp::Atomic::FetchAdd { add } => Atomic::FetchAdd { add },
        qp::Atomic::MaskedFetchAdd { width: bytes, add, boundary } => {
            Atomic::MaskedFetchAdd { width: width(bytes), add, boundary }
        }
        qp::Atomic::MaskedCompareSwap { width: bytes, compare, swap, compare_mask, swap_mask } => {
            let width = width(bytes);
            Atomic::MaskedCompareSwap { width, compare, swap, compare_mask, swap_mask }
        }
    }
}
