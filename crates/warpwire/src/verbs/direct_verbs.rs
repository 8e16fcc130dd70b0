//! Direct verbs: queues of an mlx5 device that are written and read in memory, bypassing the
//! provider library. Streams and kernels need this, because they ring doorbells and poll
//! completions themselves.
//!
//! Completion queues with [`manual_release`](super::CqOptions::manual_release) or
//! [`ignore_overrun`](super::CqOptions::ignore_overrun), and queue pairs with
//! [`poll_doorbell`](super::QpOptions::poll_doorbell), use it. The provider creates and destroys
//! the queues, and knows nothing of their work.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};

use super::post::{SendRequest, SendState, overwrite_with_nop, ring_doorbell, write_wqe};
use super::queues::DirectQueues;
use super::receive;
use super::wr_table::WrTable;
use crate::error::{Error, Kind};
use crate::hca::{CQE_LEN, QueueMemory};
use crate::ibv::DirectCq;
use crate::mlx5::{CqArm, Cqe, CqeOutcome, CqeTail, Queue, owner_bit};
use crate::work::{Completion, PostError, PostResult, ReceiveRequest, WrOp};

/// A queue pair driven with direct verbs.
#[derive(Debug)]
pub(super) struct DirectVerbsQp {
    pub(super) queues: DirectQueues,
    wr_table: WrTable,
    send: Mutex<SendState>,
    receive: Mutex<()>,
}

impl DirectVerbsQp {
    pub(super) fn new(queues: DirectQueues) -> Self {
        let wr_table = WrTable::new(queues.send_wqebbs, queues.receive_entries);
        Self { queues, wr_table, send: Mutex::default(), receive: Mutex::default() }
    }

    /// Locks the send queue, to write work requests.
    pub(super) fn begin(&self) -> DirectVerbsBatch<'_> {
        let state = self.send.lock();
        let next = state.producer;
        DirectVerbsBatch { direct_qp: self, state, next }
    }

    /// Rings the doorbell for all WQEBBs before `wqe_index`.
    pub(super) fn ring_doorbell_to(&self, wqe_index: u64) {
        let _only = self.send.lock();
        ring_doorbell(&self.queues, wqe_index);
    }

    /// Removes the WQEBBs from `wqe_index` on, which no doorbell has announced.
    pub(super) fn unpost_to(&self, wqe_index: u64) {
        let mut state = self.send.lock();
        state.producer = wqe_index;
        self.wr_table.posted.store(wqe_index, Ordering::Release);
    }

    /// Replaces work that no doorbell has announced by a NOP.
    pub(super) fn overwrite_with_nop(&self, wqebbs: Range<u64>) {
        overwrite_with_nop(&self.queues, &mut self.send.lock().scratch, wqebbs);
    }

    pub(super) fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> PostResult {
        let _only = self.receive.lock();
        receive::fill(&self.queues, &self.wr_table, requests)
    }

    /// Empties the queues, after the device has reset its own state.
    pub(super) fn reset(&self) {
        let (mut send, _receive) = (self.send.lock(), self.receive.lock());
        send.producer = 0;
        self.wr_table.clear();
    }
}

/// Work requests being written. The device sees nothing before the doorbell; dropping the batch
/// discards them.
#[derive(Debug)]
pub(super) struct DirectVerbsBatch<'q> {
    direct_qp: &'q DirectVerbsQp,
    state: MutexGuard<'q, SendState>,
    next: u64,
}

impl DirectVerbsBatch<'_> {
    pub(super) fn push(&mut self, request: &SendRequest<'_>) -> PostResult {
        if request.destination.is_some() {
            return Err(PostError::DIRECT_UD);
        }
        if matches!(request.op, WrOp::BindMw(_) | WrOp::LocalInvalidate(_)) {
            return Err(PostError::NO_WINDOWS);
        }
        let Self { direct_qp, state, next } = self;
        let used = *next - direct_qp.wr_table.freed.load(Ordering::Acquire);
        let wqebbs = write_wqe(&direct_qp.queues, &mut state.scratch, request, (*next, used))?;
        let slot = (*next & (u64::from(direct_qp.queues.send_wqebbs) - 1)) as usize;
        direct_qp.wr_table.send_wr_ids[slot].store(request.id, Ordering::Relaxed);
        direct_qp.wr_table.send_wqe_sizes[slot].store(wqebbs as u8, Ordering::Relaxed);
        *next += wqebbs;
        Ok(())
    }

    /// Leaves the work in the queue without a doorbell; returns its WQEBBs.
    pub(super) fn commit_unrung(mut self) -> Range<u64> {
        let first = std::mem::replace(&mut self.state.producer, self.next);
        self.direct_qp.wr_table.posted.store(self.next, Ordering::Release);
        first..self.next
    }

    /// Rings the doorbell.
    pub(super) fn post(mut self) {
        if self.next != self.state.producer {
            self.state.producer = self.next;
            self.direct_qp.wr_table.posted.store(self.next, Ordering::Release);
            ring_doorbell(&self.direct_qp.queues, self.next);
        }
    }
}

/// A completion queue read with direct verbs; entries are released explicitly.
#[derive(Debug)]
pub(super) struct DirectVerbsCq {
    pub(super) entries: QueueMemory,
    dbrec: QueueMemory,
    pub(super) count: u32,
    reader: Mutex<Reader>,
}

#[derive(Debug, Default)]
struct Reader {
    consumed: u64,
    /// Queue pairs attached to this queue, by number.
    direct_qps: Vec<(u32, Weak<DirectVerbsQp>)>,
}

impl DirectVerbsCq {
    pub(super) fn new(mlx5dv: DirectCq) -> Self {
        let (count, reader) = (mlx5dv.count, Mutex::default());
        let [entries, dbrec] = [mlx5dv.entries, mlx5dv.dbrec].map(DirectQueues::memory);
        Self { entries, dbrec, count, reader }
    }

    /// Registers a queue pair, whose completions will arrive here.
    pub(super) fn attach(&self, direct_qp: &Arc<DirectVerbsQp>) {
        let mut reader = self.reader.lock();
        reader.direct_qps.retain(|(_, direct_qp)| direct_qp.strong_count() > 0);
        reader.direct_qps.push((direct_qp.queues.number, Arc::downgrade(direct_qp)));
    }

    pub(super) fn poll(&self, into: &mut [Completion]) -> usize {
        let mut reader = self.reader.lock();
        let mut count = 0;
        while count < into.len() {
            let Some(cqe) = self.read(reader.consumed) else { break };
            reader.consumed += 1;
            let direct_qp = reader.direct_qps.iter().find(|(number, _)| *number == cqe.qpn);
            // Skip completions of destroyed queue pairs.
            if let Some(direct_qp) = direct_qp.and_then(|(_, direct_qp)| direct_qp.upgrade()) {
                into[count] = Completion::of(&cqe, complete_wr(&direct_qp.wr_table, &cqe));
                count += 1;
            }
        }
        count
    }

    /// Completion `number`, if it has been written.
    fn read(&self, number: u64) -> Option<Cqe> {
        if !self.has_cqe(number) {
            return None;
        }
        let slot = (number & (u64::from(self.count) - 1)) * CQE_LEN;
        let mut entry = [0; CQE_LEN as usize];
        self.entries.bytes().read(slot, &mut entry).ok()?;
        Cqe::parse(&entry).ok()
    }

    pub(super) fn has_cqe(&self, number: u64) -> bool {
        let entries = u64::from(self.count);
        let at = (number & (entries - 1)) * CQE_LEN + 60;
        // Acquire: the body was written before this word.
        let tail = self.entries.bytes().load_u32(at).unwrap_or(u32::MAX).to_ne_bytes();
        CqeTail::parse(tail).is_owned(owner_bit(number, entries))
    }

    /// The completion `offset` entries after the next one.
    pub(super) fn peek(&self, offset: u64) -> Option<Cqe> {
        let number = self.reader.lock().consumed + offset;
        (offset < u64::from(self.count)).then(|| self.read(number))?
    }

    /// Lets the device overwrite the first `count` completions since creation.
    pub(super) fn release(&self, count: u64) {
        let reader = self.reader.lock();
        let word = CqArm::consumed_word(count.min(reader.consumed) as u32);
        let _ = self.dbrec.bytes().store_u32(0, u32::from_ne_bytes(word));
    }
}

fn complete_wr(wr_table: &WrTable, cqe: &Cqe) -> u64 {
    match cqe.outcome {
        CqeOutcome::Sent { .. } | CqeOutcome::Failed { queue: Queue::Send, .. } => {
            wr_table.complete_send(cqe.counter)
        }
        _ => wr_table.complete_receive(cqe.counter),
    }
}

/// Direct verbs have no completion events: the provider, which would arm the queue, does not know
/// its consumer index.
#[cold]
pub(super) fn no_events() -> Error {
    Error::new(Kind::Unsupported, "wait for an event of a completion queue")
        .why("it is read with direct verbs, which have no events")
        .fix("poll it, or create it without manual_release and ignore_overrun")
}
