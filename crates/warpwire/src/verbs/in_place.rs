//! Queues of an mlx5 device that are written and read where they lie, past its provider: for streams and kernels, which
//! ring and wait by themselves.
//!
//! Whoever makes a completion queue that is [held](super::CqOptions::held), or a queue pair that is
//! [watched](super::QpOptions::watched), gets these. The provider makes and ends them, and knows nothing of their work.

use std::ops::Range;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};

use parking_lot::{Mutex, MutexGuard};

use super::ledger::Ledger;
use super::post::{Request, SendState, blank, put, tell};
use super::queues::Queues;
use super::receive;
use crate::error::{Error, Kind, Result};
use crate::hca::{CQE_LEN, QueueMemory};
use crate::ibv::DirectCq;
use crate::mlx5::{Arm as Armed, Cqe, Outcome, Queue, Tail, owner_bit};
use crate::work::{Completion, ReceiveRequest};

/// A queue pair that is posted to in place.
#[derive(Debug)]
pub(super) struct InPlace {
    pub(super) queues: Queues,
    ledger: Ledger,
    send: Mutex<SendState>,
    receive: Mutex<()>,
}

impl InPlace {
    pub(super) fn new(queues: Queues) -> Self {
        let ledger = Ledger::new(queues.send_blocks, queues.receive_entries);
        Self { queues, ledger, send: Mutex::default(), receive: Mutex::default() }
    }

    /// Begins to write work, which nobody else does meanwhile.
    pub(super) fn begin(&self) -> Writing<'_> {
        let state = self.send.lock();
        let next = state.producer;
        Writing { pair: self, state, next }
    }

    /// Tells the device of everything up to that block.
    pub(super) fn ring_up_to(&self, block: u64) {
        let _only = self.send.lock();
        tell(&self.queues, block);
    }

    /// Gives everything from that block on back: nobody was told of it.
    pub(super) fn take_back(&self, block: u64) {
        let mut state = self.send.lock();
        state.producer = block;
        self.ledger.posted.store(block, Ordering::Release);
    }

    /// Makes work that nobody was told of do nothing.
    pub(super) fn blank(&self, blocks: Range<u64>) {
        blank(&self.queues, &mut self.send.lock().scratch, blocks);
    }

    pub(super) fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<()> {
        let _only = self.receive.lock();
        receive::fill(&self.queues, &self.ledger, requests)
    }

    /// The queues are empty again, as the device has them.
    pub(super) fn reset(&self) {
        let (mut send, _receive) = (self.send.lock(), self.receive.lock());
        send.producer = 0;
        self.ledger.clear();
    }
}

/// Work that is being written. Nothing of it is seen by the device before it is rung for; dropped, it was never there.
#[derive(Debug)]
pub(super) struct Writing<'q> {
    pair: &'q InPlace,
    state: MutexGuard<'q, SendState>,
    next: u64,
}

impl Writing<'_> {
    pub(super) fn push(&mut self, request: &Request<'_>) -> Result<()> {
        if request.destination.is_some() {
            return Err(Error::new(Kind::Unsupported, "write an entry")
                .why("hardware knows the peers of datagrams by more than their addresses")
                .fix("use a connected queue pair"));
        }
        let Self { pair, state, next } = self;
        let used = *next - pair.ledger.freed.load(Ordering::Acquire);
        let blocks = put(&pair.queues, &mut state.scratch, request, (*next, used))?;
        let place = (*next & (u64::from(pair.queues.send_blocks) - 1)) as usize;
        pair.ledger.send_ids[place].store(request.id, Ordering::Relaxed);
        pair.ledger.send_sizes[place].store(blocks as u8, Ordering::Relaxed);
        *next += blocks;
        Ok(())
    }

    /// Leaves it in the queue without telling the device; returns the blocks that it takes.
    pub(super) fn keep(mut self) -> Range<u64> {
        let first = std::mem::replace(&mut self.state.producer, self.next);
        self.pair.ledger.posted.store(self.next, Ordering::Release);
        first..self.next
    }

    /// Tells the device of it.
    pub(super) fn post(mut self) {
        if self.next != self.state.producer {
            self.state.producer = self.next;
            self.pair.ledger.posted.store(self.next, Ordering::Release);
            tell(&self.pair.queues, self.next);
        }
    }
}

/// A completion queue that is read in place. Its places are given back when told.
#[derive(Debug)]
pub(super) struct InPlaceCq {
    pub(super) entries: QueueMemory,
    record: QueueMemory,
    pub(super) count: u32,
    reader: Mutex<Reader>,
}

#[derive(Debug, Default)]
struct Reader {
    consumed: u64,
    /// Whose completions come here.
    pairs: Vec<(u32, Weak<InPlace>)>,
}

impl InPlaceCq {
    pub(super) fn new(direct: DirectCq) -> Self {
        let (count, reader) = (direct.count, Mutex::default());
        let [entries, record] = [direct.entries, direct.record].map(Queues::memory);
        Self { entries, record, count, reader }
    }

    /// Completions of that queue pair will come here.
    pub(super) fn attach(&self, pair: &Arc<InPlace>) {
        let mut reader = self.reader.lock();
        reader.pairs.retain(|(_, pair)| pair.strong_count() > 0);
        reader.pairs.push((pair.queues.number, Arc::downgrade(pair)));
    }

    pub(super) fn poll(&self, into: &mut [Completion]) -> usize {
        let mut reader = self.reader.lock();
        let mut count = 0;
        while count < into.len() {
            let Some(cqe) = self.read(reader.consumed) else { break };
            reader.consumed += 1;
            let pair = reader.pairs.iter().find(|(number, _)| *number == cqe.qpn);
            // Of a queue pair that is gone, nobody wants to know.
            if let Some(pair) = pair.and_then(|(_, pair)| pair.upgrade()) {
                into[count] = Completion::of(&cqe, ended(&pair.ledger, &cqe));
                count += 1;
            }
        }
        count
    }

    /// The completion of that number, if it is there.
    fn read(&self, number: u64) -> Option<Cqe> {
        if !self.is_there(number) {
            return None;
        }
        let place = (number & (u64::from(self.count) - 1)) * CQE_LEN;
        let mut entry = [0; CQE_LEN as usize];
        self.entries.bytes().read(place, &mut entry).ok()?;
        Cqe::parse(&entry).ok()
    }

    pub(super) fn is_there(&self, number: u64) -> bool {
        let entries = u64::from(self.count);
        let at = (number & (entries - 1)) * CQE_LEN + 60;
        // Acquire: the body was written before this word.
        let tail = self.entries.bytes().load_u32(at).unwrap_or(u32::MAX).to_ne_bytes();
        Tail::parse(tail).is_owned(owner_bit(number, entries))
    }

    /// The completion that lies so many behind the next.
    pub(super) fn peek(&self, ahead: u64) -> Option<Cqe> {
        let number = self.reader.lock().consumed + ahead;
        (ahead < u64::from(self.count)).then(|| self.read(number))?
    }

    /// Tells the device that the first so many may be written over.
    pub(super) fn give_back(&self, count: u64) {
        let reader = self.reader.lock();
        let word = Armed::consumed_word(count.min(reader.consumed) as u32);
        let _ = self.record.bytes().store_u32(0, u32::from_ne_bytes(word));
    }
}

fn ended(ledger: &Ledger, cqe: &Cqe) -> u64 {
    match cqe.outcome {
        Outcome::Sent { .. } | Outcome::Failed { queue: Queue::Send, .. } => {
            ledger.send_ended(cqe.counter)
        }
        _ => ledger.receive_ended(cqe.counter),
    }
}

/// What reads its queues in place makes no events: the provider that would tell of them does not know how far it is.
#[cold]
pub(super) fn no_events() -> Error {
    Error::new(Kind::Unsupported, "wait for an event of a completion queue")
        .why("it is held, and read in place")
        .fix("poll it, or make one that is not held")
}
