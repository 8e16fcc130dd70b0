//! A queue pair inside the engine: the protocol's state machine, the queues, and the memory that
//! work requests name.

use std::cell::Cell;

use warpwire_proto::qp::{self, SendOp, SendQueueError, SendWr as WireWork};
use warpwire_proto::{Instant, Psn};

use super::held::HeldPackets;
use super::mapped::{DirectOutcome, DirectState, Mapped};
use super::memory::QueueMemory;
use super::paths::PathUse;
use super::protocol::Protocol;
use super::read_ahead::{FetchRequest, MessageId, ReadAhead};
use super::ring::{
    MAX_RECV_WQE_LEN, QpLayout, ReceiveRing, SendRing, SharedReceiveQueue, TakenReceive, TakenWqe,
};
use super::stats::IndirectReason;
use crate::link::FlowId;
use crate::mlx5::{
    self, ADDRESS_SEGMENTS, AddressVector, CqUpdate, Data, DataSegment, SEGMENT_LEN, SendKind,
    Status, Work, Wqe, WqeOpcode,
};
use crate::mr::{Access, AccessDenied, PdId, Registry, Span};

/// The memory, layout and options of a queue pair.
#[derive(Clone, Debug)]
pub struct QpSpec {
    /// Memory of its queues and doorbells.
    pub memory: QueueMemory,
    /// Offsets in that memory.
    pub layout: QpLayout,
    /// WQEBBs of the send queue, a power of two.
    pub send_wqebbs: u32,
    /// Entries of the receive queue, a power of two; ignored with `srq`.
    pub receive_entries: u32,
    /// Bytes per receive entry, a power of two; ignored with `srq`.
    pub receive_stride: u32,
    /// The completion queue of the send queue.
    pub send_cq: u32,
    /// The completion queue of the receive queue.
    pub receive_cq: u32,
    /// The shared receive queue that replaces its own.
    pub srq: Option<u32>,
    /// The protection domain.
    pub pd: PdId,
    /// Whether all send work is signaled.
    pub signal_all: bool,
    /// A 24-bit number that CQEs carry beside the QP number.
    pub user_index: u32,
    /// Poll the doorbell: set if a stream, a kernel or another process rings it, without
    /// [`Hca::ring`](super::Hca::ring).
    pub poll_doorbell: bool,
    /// Options of the protocol; the queue depth is set from `send_wqebbs`.
    pub options: qp::TransportOptions,
    /// The maximum datagram (UD); `None` for a connection.
    pub datagrams: Option<qp::Mtu>,
    /// Whether a connection is unreliable (UC) rather than reliable (RC).
    pub is_unreliable: bool,
}

/// State of a work request in progress, by the index of its first WQEBB.
#[derive(Clone, Copy, Debug)]
pub(super) struct WrState {
    pub opcode: WqeOpcode,
    pub cq_update: CqUpdate,
    pub len: u32,
    /// The only range of its payload, if there is just one: the common case.
    pub single_sge: Option<Data>,
    /// Offset of its payload in the copy of the WQE, if all of it is inline.
    pub inline: Option<u16>,
}

impl WrState {
    const NONE: Self = Self {
        opcode: WqeOpcode::Nop,
        cq_update: CqUpdate::Always,
        len: 0,
        single_sge: None,
        inline: None,
    };
}

/// A queue pair of the engine.
// Aligned so that it shares no cache line with one of another engine.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct QpContext {
    /// Its slot in the engine.
    pub index: u32,
    pub qp: Protocol,
    pub qp_memory: QpMemory,
    pub flow: Option<FlowId>,
    /// Whether it is in the engine's list of queue pairs that may have packets to send.
    pub active: bool,
    /// Its earliest deadline in the engine's timer heap.
    pub timer: Instant,
    /// The transition to the error state has been handled.
    pub failed: bool,
    /// An error CQE of its send queue has been written.
    pub error_reported: bool,
    pub send_cq: u32,
    pub receive_cq: u32,
    pub user_index: u32,
    pub poll_doorbell: bool,
    pub signal_all: bool,
    /// The send queue is held until a completion queue has produced a given completion; only then
    /// does the work that requested it (`WAIT`) complete.
    pub wait: Option<(mlx5::Wait, WireWork)>,
    /// Direct access to the peer's memory.
    pub direct: DirectState,
    /// Congestion control.
    pub path_use: PathUse,
}

/// What was taken from a send queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TakeOutcome {
    /// Everything available was started, or waits.
    All,
    /// This one was executed without packets; there may be more.
    Direct(WireWork),
    /// This one is sent as packets, for this reason; there may be more.
    Packets(IndirectReason),
    /// The quantum is spent, and there is more.
    BudgetSpent,
}

/// The queues and the memory that the protocol accesses through its `Host`.
#[derive(Debug)]
pub(super) struct QpMemory {
    pub ring: SendRing,
    wr_state: Box<[WrState]>,
    pub receives: RecvSource,
    /// Receives in use: one by the current message, one perhaps taken for the next.
    active_receives: [Option<TakenReceive>; 2],
    /// The protection domain, with the number of the queue pair.
    pub pd: PdId,
    /// Read-ahead of device memory for requests and for responses, which take turns.
    read_ahead: ReadAhead,
    response_read_ahead: ReadAhead,
    /// Packets that arrived out of order.
    pub held: HeldPackets,
    /// Why the last range was denied, for queries.
    pub denied: Option<AccessDenied>,
    /// Data was placed through staging, and may not have reached device memory yet.
    pub staged: Cell<bool>,
    /// The peer gets a NAK because the memory that it reads is gone.
    pub resets_faults: bool,
    /// The host answered `Retry`: poll again soon.
    pub retry_soon: bool,
    wqebb_mask: u64,
    /// UD: WQEs contain the destination.
    datagrams: bool,
}

/// Where receives come from.
#[derive(Debug)]
pub(super) enum RecvSource {
    Rq(ReceiveRing),
    Srq(u32),
}

impl QpContext {
    pub(super) fn new(index: u32, number: u32, spec: QpSpec) -> Self {
        let options = spec.options.with_send_depth(spec.send_wqebbs);
        let ring = SendRing::new(spec.memory.clone(), spec.layout, spec.send_wqebbs);
        let receives = match spec.srq {
            Some(srqn) => RecvSource::Srq(srqn),
            None => {
                let (entries, stride) = (spec.receive_entries, spec.receive_stride);
                RecvSource::Rq(ReceiveRing::new(spec.memory, spec.layout, entries, stride))
            }
        };
        let qp_memory = QpMemory {
            ring,
            wr_state: vec![WrState::NONE; spec.send_wqebbs as usize].into(),
            receives,
            active_receives: [None; 2],
            pd: spec.pd.of_qp(number),
            read_ahead: ReadAhead::new(!spec.is_unreliable && spec.datagrams.is_none()),
            response_read_ahead: ReadAhead::new(true),
            held: HeldPackets::default(),
            denied: None,
            staged: Cell::new(false),
            resets_faults: false,
            retry_soon: false,
            wqebb_mask: u64::from(spec.send_wqebbs) - 1,
            datagrams: spec.datagrams.is_some(),
        };
        let qp = match spec.datagrams {
            Some(mtu) => Protocol::datagram(number, mtu, spec.send_wqebbs),
            None if spec.is_unreliable => Protocol::unreliable(number, spec.send_wqebbs),
            None => Protocol::connected(number, options),
        };
        Self {
            index,
            qp,
            qp_memory,
            flow: None,
            active: false,
            timer: Instant::NEVER,
            failed: false,
            error_reported: false,
            send_cq: spec.send_cq,
            receive_cq: spec.receive_cq,
            user_index: spec.user_index,
            poll_doorbell: spec.poll_doorbell,
            signal_all: spec.signal_all,
            wait: None,
            direct: DirectState::new(),
            path_use: PathUse::default(),
        }
    }

    /// Drops all work, after the protocol was reset.
    pub(super) fn reset(&mut self, srqs: &mut [Option<SharedReceiveQueue>]) {
        (self.failed, self.error_reported, self.wait) = (false, false, None);
        self.qp_memory.ring.reset();
        self.qp_memory.release(srqs);
        self.qp_memory.read_ahead.forget();
        self.qp_memory.response_read_ahead.forget();
        self.direct.reset();
        if let RecvSource::Rq(ring) = &mut self.qp_memory.receives {
            ring.reset();
        }
    }

    /// Takes WQEs from the send queue and posts them, as long as the protocol has room. `produced`
    /// returns the number of completions of a CQ; `budget` is how many bytes may still be moved by
    /// direct access.
    pub(super) fn take_work(
        &mut self,
        now: Instant,
        registry: &Registry,
        produced: impl Fn(u32) -> Option<u64>,
        mapped: &mut Mapped,
        budget: &mut u32,
    ) -> TakeOutcome {
        loop {
            if self.qp.outstanding() as u64 > self.qp_memory.wqebb_mask {
                return TakeOutcome::All;
            }
            if let Some((wait, work)) = self.wait {
                // A CQ that does not exist or has not reached the index holds the queue; an error
                // of the queue pair ends the wait.
                let reached =
                    produced(wait.cqn).is_some_and(|count| has_reached(count, wait.index));
                let waits = !reached && !matches!(self.qp.state(), qp::State::Err | qp::State::Sqe);
                if waits || self.direct.in_flight > 0 {
                    return TakeOutcome::All;
                }
                self.wait = None;
                self.begin(work);
                continue;
            }
            let work = match self.direct.blocked.take() {
                Some(work) => work,
                None => {
                    let Some(taken) = self.qp_memory.ring.take(now) else {
                        return TakeOutcome::All;
                    };
                    match self.decode(&taken, registry) {
                        (work, Some(wait)) => {
                            self.wait = Some((wait, work));
                            continue;
                        }
                        (work, None) => work,
                    }
                }
            };
            match mapped.try_execute(self, &work, registry, now, budget) {
                DirectOutcome::Done => return TakeOutcome::Direct(work),
                DirectOutcome::Started => {}
                DirectOutcome::OutOfBudget => {
                    self.direct.blocked = Some(work);
                    return TakeOutcome::BudgetSpent;
                }
                DirectOutcome::WaitForOutstanding | DirectOutcome::WaitForCopies => {
                    self.direct.blocked = Some(work);
                    return TakeOutcome::All;
                }
                DirectOutcome::Failed(status) => self.fail_work(&work, status),
                DirectOutcome::UsePackets(why) => {
                    self.direct.done = 0;
                    self.begin(work);
                    if let Some(why) = why {
                        return TakeOutcome::Packets(why);
                    }
                }
            }
        }
    }

    /// The work that a WQE requests, and its condition if it is a `WAIT`.
    fn decode(&mut self, taken: &TakenWqe, registry: &Registry) -> (WireWork, Option<mlx5::Wait>) {
        let parsed = match taken.torn {
            true => Err(Status::LocalQpOperation),
            false => self.qp_memory.translate(taken, registry),
        };
        let (op, len, wait) = match parsed {
            Ok(found) => found,
            Err(status) => {
                self.qp_memory.record_wr(taken, 0, None, None);
                (SendOp::Bad(status), 0, None)
            }
        };
        let fence = taken.control.fence.into();
        let work = WireWork {
            id: taken.wqe_index,
            op,
            len,
            signaled: self.signal_all || taken.control.is_signaled(),
            fence,
            solicited: taken.control.solicited,
        };
        (work, wait)
    }

    /// Fails work that was taken from the send queue, and with it the queue pair.
    #[cold]
    pub(super) fn fail_work(&mut self, work: &WireWork, status: Status) {
        self.begin(WireWork { op: SendOp::Bad(status), len: 0, ..*work });
    }

    fn begin(&mut self, work: WireWork) {
        let Self { qp, qp_memory, .. } = self;
        if let Err(refused) = qp.post(work, || qp_memory.address(work.id)) {
            let status = match refused {
                SendQueueError::Length(_) => Status::LocalLength,
                // The queue is never full here; in a wrong state all work is flushed.
                _ => Status::LocalQpOperation,
            };
            let _ = qp.post(WireWork { op: SendOp::Bad(status), len: 0, ..work }, || None);
        }
    }
}

/// Whether a queue with `count` completions has produced the one with `index`, modulo 2^32.
fn has_reached(count: u64, index: u32) -> bool {
    (count as u32).wrapping_sub(index).wrapping_sub(1) as i32 >= 0
}

impl QpMemory {
    pub(super) fn wr_state(&self, wqe_index: u64) -> WrState {
        self.wr_state[(wqe_index & self.wqebb_mask) as usize]
    }

    /// Parses the WQE that was taken at that index.
    fn parse(&self, wqe_index: u64) -> Result<Wqe<'_>, mlx5::WqeError> {
        let copy = self.ring.copy(wqe_index);
        match self.datagrams {
            false => Wqe::parse(copy),
            true => Wqe::parse_datagram(copy).map(|(wqe, _)| wqe),
        }
    }

    /// The destination of the datagram at that index.
    pub(super) fn address(&self, wqe_index: u64) -> Option<AddressVector> {
        let segments = ADDRESS_SEGMENTS * SEGMENT_LEN;
        let bytes = self.ring.copy(wqe_index).get(SEGMENT_LEN..SEGMENT_LEN + segments)?;
        Some(AddressVector::parse(bytes.try_into().ok()?))
    }

    /// The operation and length of a WQE in the protocol's terms, and the condition of a `WAIT`.
    fn translate(
        &mut self,
        taken: &TakenWqe,
        registry: &Registry,
    ) -> Result<(SendOp, u32, Option<mlx5::Wait>), Status> {
        let wqe = self.parse(taken.wqe_index).map_err(|refused| refused.status())?;
        let (mut wait, mut single_sge, mut inline, mut dump_len) = (None, None, None, 0);
        let start = self.ring.copy(taken.wqe_index).as_ptr().addr();
        let mut record_wr = |payload: &mlx5::WqePayload<'_>| {
            let mut data_segments = payload.data_segments();
            match (data_segments.next(), data_segments.next()) {
                (Some(DataSegment::Memory(data)), None) => single_sge = Some(data),
                (Some(DataSegment::Inline(bytes)), None) => {
                    inline = u16::try_from(bytes.as_ptr().addr() - start).ok();
                }
                _ => {}
            }
            payload.len() as u32
        };
        let (op, len) = match wqe.work {
            Work::Nop => (SendOp::Local, 0),
            Work::Bind(bind) => (SendOp::Bind(bind), 0),
            Work::LocalInvalidate(rkey) => (SendOp::LocalInvalidate(rkey), 0),
            Work::Wait(found) => {
                wait = Some(found);
                (SendOp::Local, 0)
            }
            // Data placed before is visible already, so the local read itself can be omitted; only
            // its range is checked.
            Work::Dump { from } => {
                dump_len = record_wr(&from);
                (SendOp::Local, 0)
            }
            Work::Send { kind, payload } => {
                let op = match kind {
                    SendKind::Plain => SendOp::Send,
                    SendKind::Imm(imm) => SendOp::SendImm(u32::from_be_bytes(imm)),
                    SendKind::Invalidate(key) => SendOp::SendInvalidate(key),
                };
                (op, record_wr(&payload))
            }
            Work::Write { remote: at, imm, payload } => {
                let op = match imm {
                    Some(imm) => SendOp::WriteImm(at, u32::from_be_bytes(imm)),
                    None => SendOp::Write(at),
                };
                (op, record_wr(&payload))
            }
            Work::Read { remote: at, into } => (SendOp::Read(at), record_wr(&into)),
            Work::Atomic { remote: at, op, into } => {
                record_wr(&into);
                (SendOp::Atomic(at, op), op.width().bytes())
            }
        };
        self.record_wr(taken, len, single_sge, inline);
        match self.check_gather(registry, taken.wqe_index, 0, dump_len) {
            // Non-resident memory passes: the data read would be discarded anyway.
            Ok(()) => Ok((op, len, wait)),
            Err(denied) if denied.is_transient() => Ok((op, len, wait)),
            Err(denied) => {
                self.denied = Some(denied);
                Err(Status::LocalProtection)
            }
        }
    }

    fn record_wr(
        &mut self,
        taken: &TakenWqe,
        len: u32,
        single_sge: Option<Data>,
        inline: Option<u16>,
    ) {
        let (opcode, cq_update) = (taken.control.opcode, taken.control.cq_update);
        self.wr_state[(taken.wqe_index & self.wqebb_mask) as usize] =
            WrState { opcode, cq_update, len, single_sge, inline };
    }

    /// Calls `each` for the segments that hold `len` bytes of the payload from `offset` on:
    /// [`QpMemory::walk`] with a fast path for a single segment.
    #[inline]
    pub(super) fn data_segments(
        &self,
        wqe_index: u64,
        offset: u32,
        len: u32,
        mut each: impl FnMut(DataSegment<'_>, u32, u32) -> Result<(), AccessDenied>,
    ) -> Result<(), AccessDenied> {
        let work = &self.wr_state[(wqe_index & self.wqebb_mask) as usize];
        if let Some(data) = work.single_sge {
            return each(DataSegment::Memory(data), offset, len);
        }
        if let Some(at) = work.inline {
            let bytes =
                self.ring.copy(wqe_index).get(usize::from(at)..).ok_or(AccessDenied::Range)?;
            return each(DataSegment::Inline(bytes), offset, len);
        }
        self.walk(wqe_index, offset, len, each)
    }

    /// Copies the payload of a work request, from byte `offset` on, to `into`.
    pub(super) fn gather(
        &mut self,
        registry: &Registry,
        wqe_index: u64,
        offset: u32,
        into: &mut [u8],
    ) -> Result<(), AccessDenied> {
        if let Some(data) = self.wr_state(wqe_index).single_sge {
            let address = data.address.wrapping_add(u64::from(offset));
            let fetch_request = FetchRequest {
                message: MessageId::Work(wqe_index),
                last: MessageId::Work(wqe_index),
                following: 0,
                key: data.lkey,
                pd: self.pd,
                need: Access::NONE,
                address,
                remaining: data.len.saturating_sub(offset),
            };
            return self.read_ahead.gather(registry, &fetch_request, into);
        }
        let mut done = 0;
        self.walk(wqe_index, offset, into.len() as u32, |segment, skip, len| {
            let part = into.get_mut(done..done + len as usize).ok_or(AccessDenied::Range)?;
            done += len as usize;
            match segment {
                DataSegment::Inline(bytes) => {
                    let from = bytes.get(skip as usize..(skip + len) as usize);
                    part.copy_from_slice(from.ok_or(AccessDenied::Range)?);
                    Ok(())
                }
                DataSegment::Memory(data) => {
                    let address = data.address.wrapping_add(u64::from(skip));
                    let (pd, none, len) = (self.pd, Access::NONE, u64::from(len));
                    registry.resolve(data.lkey, pd, none, address, len)?.gather(0, part)
                }
            }
        })
    }

    /// Copies the data of a read response to `into`; the request has `remaining` bytes from there
    /// on.
    pub(super) fn gather_read_response(
        &mut self,
        registry: &Registry,
        at: qp::Remote,
        remaining: u32,
        request: Psn,
        following: qp::FollowingReads,
        into: &mut [u8],
    ) -> Result<(), AccessDenied> {
        let fetch_request = FetchRequest {
            message: MessageId::Read(request),
            last: MessageId::Read(following.last),
            following: following.len,
            key: at.rkey,
            pd: self.pd,
            need: Access::REMOTE_READ,
            address: at.address,
            remaining,
        };
        self.response_read_ahead.gather(registry, &fetch_request, into)
    }

    /// Checks that the payload of a work request is accessible.
    pub(super) fn check_gather(
        &self,
        registry: &Registry,
        wqe_index: u64,
        offset: u32,
        len: u32,
    ) -> Result<(), AccessDenied> {
        if len == 0 {
            return Ok(());
        }
        let check = |data: Data, skip: u32, len: u32| {
            let address = data.address.wrapping_add(u64::from(skip));
            registry.resolve(data.lkey, self.pd, Access::NONE, address, u64::from(len)).map(drop)
        };
        if let Some(data) = self.wr_state(wqe_index).single_sge {
            return check(data, offset, len);
        }
        self.walk(wqe_index, offset, len, |segment, skip, len| match segment {
            DataSegment::Inline(_) => Ok(()),
            DataSegment::Memory(data) => check(data, skip, len),
        })
    }

    /// Copies received data of a work request (a read response, an atomic's result) into its
    /// memory.
    pub(super) fn scatter(
        &self,
        registry: &Registry,
        wqe_index: u64,
        offset: u32,
        from: &[u8],
    ) -> Result<(), AccessDenied> {
        let place = |data: Data, skip: u32, from: &[u8]| {
            let address = data.address.wrapping_add(u64::from(skip));
            let len = from.len() as u64;
            let span = registry.resolve(data.lkey, self.pd, Access::LOCAL_WRITE, address, len)?;
            self.put(&span, from)
        };
        if let Some(data) = self.wr_state(wqe_index).single_sge {
            return place(data, offset, from);
        }
        let mut done = 0;
        self.walk(wqe_index, offset, from.len() as u32, |segment, skip, len| {
            let part = from.get(done..done + len as usize).ok_or(AccessDenied::Range)?;
            done += len as usize;
            match segment {
                DataSegment::Memory(data) => place(data, skip, part),
                DataSegment::Inline(_) => Err(AccessDenied::Range),
            }
        })
    }

    /// Calls `each` for the segments that hold `len` bytes of the payload from `offset` on, with
    /// the number of bytes to skip in the segment and the number to use.
    fn walk(
        &self,
        wqe_index: u64,
        offset: u32,
        len: u32,
        mut each: impl FnMut(DataSegment<'_>, u32, u32) -> Result<(), AccessDenied>,
    ) -> Result<(), AccessDenied> {
        let wqe = self.parse(wqe_index).map_err(|_| AccessDenied::Range)?;
        let payload = match wqe.work {
            Work::Send { payload, .. } | Work::Write { payload, .. } => payload,
            Work::Read { into, .. } | Work::Atomic { into, .. } => into,
            Work::Dump { from } => from,
            Work::Nop | Work::Wait(_) | Work::Bind(_) | Work::LocalInvalidate(_) => {
                return Err(AccessDenied::Range);
            }
        };
        walk_segments(
            payload.data_segments().map(|segment| (segment.len(), segment)),
            offset,
            len,
            &mut each,
        )
    }

    /// Takes a receive for a message that starts.
    pub(super) fn take_receive(
        &mut self,
        srqs: &mut [Option<SharedReceiveQueue>],
    ) -> Option<qp::Receive> {
        // Find a slot first: a receive that was taken must not be lost.
        let slot = self.active_receives.iter_mut().find(|slot| slot.is_none())?;
        let taken = match &mut self.receives {
            RecvSource::Rq(ring) => ring.take()?,
            RecvSource::Srq(srqn) => srqs.get_mut(*srqn as usize)?.as_mut()?.take()?,
        };
        let entry = &taken.entry[..taken.len.min(MAX_RECV_WQE_LEN)];
        // A malformed receive WQE has no capacity: messages find it too small.
        let capacity = mlx5::ReceiveWqe::parse(entry).map_or(0, |receive| receive.len());
        *slot = Some(taken);
        let capacity = u32::try_from(capacity).unwrap_or(u32::MAX);
        Some(qp::Receive { id: u64::from(taken.counter), capacity })
    }

    fn active_receive(&self, id: u64) -> Option<mlx5::ReceiveWqe<'_>> {
        let taken =
            self.active_receives.iter().flatten().find(|taken| u64::from(taken.counter) == id)?;
        mlx5::ReceiveWqe::parse(&taken.entry[..taken.len.min(MAX_RECV_WQE_LEN)]).ok()
    }

    /// Copies data of a message into its receive.
    pub(super) fn scatter_received(
        &self,
        registry: &Registry,
        id: u64,
        offset: u32,
        from: &[u8],
    ) -> Result<(), AccessDenied> {
        let receive = self.active_receive(id).ok_or(AccessDenied::Range)?;
        let data_segments = receive.segments().map(|data| (u64::from(data.len), data));
        let mut done = 0;
        walk_segments(data_segments, offset, from.len() as u32, &mut |data, skip, len| {
            let part = from.get(done..done + len as usize).ok_or(AccessDenied::Range)?;
            done += len as usize;
            let address = data.address.wrapping_add(u64::from(skip));
            let (pd, write, len) = (self.pd, Access::LOCAL_WRITE, u64::from(len));
            let span = registry.resolve(data.lkey, pd, write, address, len)?;
            self.put(&span, part)
        })
    }

    /// Copies bytes into memory; notes in `staged` whether they went through staging.
    pub(super) fn put(&self, span: &Span<'_>, from: &[u8]) -> Result<(), AccessDenied> {
        if span.is_staged() {
            self.staged.set(true);
        }
        span.scatter(0, from)
    }

    /// Releases the receives in use; those of a shared receive queue are returned to it.
    pub(super) fn release(&mut self, srqs: &mut [Option<SharedReceiveQueue>]) {
        let active_receives = std::mem::take(&mut self.active_receives);
        let RecvSource::Srq(srqn) = self.receives else { return };
        let Some(Some(srq)) = srqs.get_mut(srqn as usize) else { return };
        // In reverse, because a shared receive queue hands out the last one returned first.
        for taken in active_receives.iter().rev().flatten() {
            srq.release(taken.counter);
        }
    }

    /// Frees the slot of a completed receive.
    pub(super) fn end_receive(&mut self, id: u64) {
        for slot in &mut self.active_receives {
            if slot.is_some_and(|taken| u64::from(taken.counter) == id) {
                *slot = None;
                return;
            }
        }
    }
}

/// Calls `each` for the segments (with their lengths) that hold `len` bytes from `offset` on.
fn walk_segments<P>(
    data_segments: impl Iterator<Item = (u64, P)>,
    offset: u32,
    len: u32,
    each: &mut impl FnMut(P, u32, u32) -> Result<(), AccessDenied>,
) -> Result<(), AccessDenied> {
    let (mut skip, mut remaining) = (u64::from(offset), len);
    for (size, segment) in data_segments {
        if skip >= size {
            skip -= size;
            continue;
        }
        let chunk = u32::try_from(size - skip).unwrap_or(u32::MAX).min(remaining);
        // `skip` is below the segment's length, which has 31 bits.
        each(segment, skip as u32, chunk)?;
        (skip, remaining) = (0, remaining - chunk);
        if remaining == 0 {
            return Ok(());
        }
    }
    if remaining == 0 { Ok(()) } else { Err(AccessDenied::Range) }
}
