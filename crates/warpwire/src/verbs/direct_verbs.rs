//! Queues of an mlx5 device that are written and read where they lie, past its provider: for streams and kernels, which
//! ring and wait by themselves.
//!
//! Whoever makes a completion queue that is [held](super::CqOptions::held), or a queue pair that is
//! [watched](super::QpOptions::watched), gets these. The provider makes and ends them, and knows nothing of their work.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};

use super::post::{SendRequest, SendState, overwrite_with_nop, ring_doorbell, write_wqe};
use super::queues::DirectQueues;
use super::receive;
use super::wr_table::WrTable;
use crate::error::{Error, Kind, Result};
use crate::hca::{CQE_LEN, QueueMemory};
use crate::ibv::DirectCq;
use crate::mlx5::{CqArm, Cqe, CqeOutcome, CqeTail, Queue, owner_bit};
use crate::work::{Completion, ReceiveRequest};

/// A queue pair that is posted to in place.
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

    /// Begins to write work, which nobody else does meanwhile.
    pub(super) fn begin(&self) -> DirectVerbsBatch<'_> {
        let state = self.send.lock();
        let next = state.producer;
        DirectVerbsBatch { direct_qp: self, state, next }
    }

    /// Tells the device of everything up to that block.
    pub(super) fn ring_doorbell_to(&self, wqe_index: u64) {
        let _only = self.send.lock();
        ring_doorbell(&self.queues, wqe_index);
    }

    /// Gives everything from that block on back: nobody was told of it.
    pub(super) fn unpost_to(&self, wqe_index: u64) {
        let mut state = self.send.lock();
        state.producer = wqe_index;
        self.wr_table.posted.store(wqe_index, Ordering::Release);
    }

    /// Makes work that nobody was told of do nothing.
    pub(super) fn overwrite_with_nop(&self, wqebbs: Range<u64>) {
        overwrite_with_nop(&self.queues, &mut self.send.lock().scratch, wqebbs);
    }

    pub(super) fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<()> {
        let _only = self.receive.lock();
        receive::fill(&self.queues, &self.wr_table, requests)
    }

    /// The queues are empty again, as the device has them.
    pub(super) fn reset(&self) {
        let (mut send, _receive) = (self.send.lock(), self.receive.lock());
        send.producer = 0;
        self.wr_table.clear();
    }
}

/// Work that is being written. Nothing of it is seen by the device before it is rung for; dropped, it was never there.
#[derive(Debug)]
pub(super) struct DirectVerbsBatch<'q> {
    direct_qp: &'q DirectVerbsQp,
    state: MutexGuard<'q, SendState>,
    next: u64,
}

impl DirectVerbsBatch<'_> {
    pub(super) fn push(&mut self, request: &SendRequest<'_>) -> Result<()> {
        if request.destination.is_some() {
            return Err(Error::new(Kind::Unsupported, "write an entry")
                .why("hardware knows the peers of datagrams by more than their addresses")
                .fix("use a connected queue pair"));
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

    /// Leaves it in the queue without telling the device; returns the blocks that it takes.
    pub(super) fn commit_unrung(mut self) -> Range<u64> {
        let first = std::mem::replace(&mut self.state.producer, self.next);
        self.direct_qp.wr_table.posted.store(self.next, Ordering::Release);
        first..self.next
    }

    /// Tells the device of it.
    pub(super) fn post(mut self) {
        if self.next != self.state.producer {
            self.state.producer = self.next;
            self.direct_qp.wr_table.posted.store(self.next, Ordering::Release);
            ring_doorbell(&self.direct_qp.queues, self.next);
        }
    }
}

/// A completion queue that is read in place. Its places are given back when told.
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
    /// Whose completions come here.
    direct_qps: Vec<(u32, Weak<DirectVerbsQp>)>,
}

impl DirectVerbsCq {
    pub(super) fn new(mlx5dv: DirectCq) -> Self {
        let (count, reader) = (mlx5dv.count, Mutex::default());
        let [entries, dbrec] = [mlx5dv.entries, mlx5dv.dbrec].map(DirectQueues::memory);
        Self { entries, dbrec, count, reader }
    }

    /// Completions of that queue pair will come here.
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
            // Of a queue pair that is gone, nobody wants to know.
            if let Some(direct_qp) = direct_qp.and_then(|(_, direct_qp)| direct_qp.upgrade()) {
                into[count] = Completion::of(&cqe, complete_wr(&direct_qp.wr_table, &cqe));
                count += 1;
            }
        }
        count
    }

    /// The completion of that number, if it is there.
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

    /// The completion that lies so many behind the next.
    pub(super) fn peek(&self, offset: u64) -> Option<Cqe> {
        let number = self.reader.lock().consumed + offset;
        (offset < u64::from(self.count)).then(|| self.read(number))?
    }

    /// Tells the device that the first so many may be written over.
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

/// What reads its queues in place makes no events: the provider that would tell of them does not know how far it is.
#[cold]
pub(super) fn no_events() -> Error {
    Error::new(Kind::Unsupported, "wait for an event of a completion queue")
        .why("it is held, and read in place")
        .fix("poll it, or make one that is not held")
}
