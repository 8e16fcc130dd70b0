//! The state of a stream-driven queue pair: which requests are prepared, posted, completed and
//! passed by streams.
//!
//! # Invariants
//! 1. Every request generates one completion, in order: the `n`-th request generates the `n`-th
//!    entry of the send CQ. The same holds for receives.
//! 2. `released <= read <= reserved <= released + entries`, for either queue: no completion
//!    overwrites one that the CPU has not read or that a stream may poll.
//! 3. By 2, a stream waits only for a CQE slot that holds the previous lap's entry or none.
//! 4. Doorbells are rung in the order of requests: a stream that posts after another one waits for
//!    its doorbell.
//! 5. A wait refers to posted work only: a stream or the CPU has rung its doorbell, or will.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::doorbells::{CqeTails, CqeWait, DoorbellWords};
use super::failure::{Failure, Waiter};
use super::ticket::{Ticket, side};
use super::waits::{ProgressMarker, Waits};
use crate::error::{Error, Kind, Result};
use crate::hca::CQE_LEN;
use crate::mem::{self, KeptMemory, MemOp, StreamRef};
use crate::mlx5::{CqeOutcome, Queue, Status};
use crate::verbs::{
    Completion, Cq, Qp, QpAttributes, ReceiveRequest, SendRequest, State as QpState,
};

/// How long the device may take to flush after a failure before streams are released without it.
const FLUSH_TIME: Duration = Duration::from_millis(500);

/// A queue pair and its queues, shared by handles, prepared work and the watchdog.
#[derive(Debug)]
pub(super) struct Shared {
    pub qp: Qp,
    pub cqs: [Cq; 2],
    pub tails: [CqeTails; 2],
    pub doorbells: DoorbellWords,
    pub device: mem::Device,
    /// Streams flush remote writes after each wait ([`MemOp::Flush`]).
    pub flushes: bool,
    pub wait_timeout: Option<Duration>,
    pub state: Mutex<State>,
    failed: AtomicBool,
    failure: Mutex<Option<Arc<Failure>>>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Prepared,
    Posted,
    /// Dropped before posting: a NOP that completes in order.
    Cancelled,
}

#[derive(Clone, Debug)]
struct Entry {
    first: u64,
    end: u64,
    stage: Stage,
}

/// Slot accounting of one of the two completion queues.
#[derive(Debug)]
struct CqTracker {
    /// Number of completions that posted and prepared work generates, counted from the start.
    reserved: u64,
    read: u64,
    released: u64,
    /// By CQE slot: the number of waits for it, and the `id` of its work request.
    waiters: Box<[u32]>,
    ids: Box<[u64]>,
}

impl CqTracker {
    fn new(entries: u32) -> Self {
        let count = entries as usize;
        let (waiters, ids) = (vec![0; count].into(), vec![0; count].into());
        Self { reserved: 0, read: 0, released: 0, waiters, ids }
    }

    fn cqe_slot(&self, number: u64) -> usize {
        (number & (self.waiters.len() as u64 - 1)) as usize
    }

    fn has_room_for(&self, count: usize) -> bool {
        self.reserved - self.released + count as u64 <= self.waiters.len() as u64
    }
}

/// How far the send queue has been posted.
#[derive(Clone, Copy, Debug)]
pub(super) struct Posted {
    /// All requests before this one are posted or cancelled.
    pub requests: u64,
    /// The last posted request.
    pub last: Option<u64>,
    /// WQEBB index up to which the doorbell has been rung, or will be by a stream.
    pub blocks: u64,
    /// The stream that rings it; `None` for the CPU.
    pub by: Option<u64>,
}

#[derive(Debug)]
pub(super) struct State {
    trackers: [CqTracker; 2],
    entries: Box<[Entry]>,
    posted: Posted,
    /// The receive that [`StreamQp::wait_receive`](super::StreamQp::wait_receive) waits for next.
    next_receive: u64,
    waits: Waits,
    failed_at: Option<Instant>,
    /// Waits were ended without the device: some CQEs were written by the CPU.
    device_lost: bool,
    /// Kept to reuse its capacity.
    pub scratch: Vec<MemOp>,
    /// What streams of other libraries use.
    pub kept: KeptMemory,
}

impl State {
    pub(super) fn new(waits: Waits, entries: [u32; 2]) -> Self {
        let nothing = Entry { first: 0, end: 0, stage: Stage::Cancelled };
        Self {
            trackers: entries.map(CqTracker::new),
            entries: vec![nothing; entries[0] as usize].into(),
            posted: Posted { requests: 0, last: None, blocks: 0, by: None },
            next_receive: 0,
            waits,
            failed_at: None,
            device_lost: false,
            scratch: Vec::with_capacity(8),
            kept: KeptMemory::default(),
        }
    }

    fn entry(&mut self, number: u64) -> &mut Entry {
        &mut self.entries[(number & (self.entries.len() as u64 - 1)) as usize]
    }

    /// How far the send queue is posted, for [`unpost_to`](Self::unpost_to) if the stream rejects
    /// the batch.
    pub(super) fn posted(&self) -> Posted {
        self.posted
    }

    pub(super) fn unpost_to(&mut self, to: Posted) {
        for number in to.requests..self.posted.requests {
            let entry = self.entry(number);
            if entry.stage == Stage::Posted {
                entry.stage = Stage::Prepared;
            }
        }
        self.posted = to;
    }

    pub(super) fn unpost_wait(&mut self, slot: Option<u32>) {
        if let Some(slot) = slot {
            self.waits.unpost(slot);
        }
    }
}

impl Shared {
    #[allow(clippy::too_many_arguments)]
    pub(super) fn new(
        qp: Qp,
        cqs: [Cq; 2],
        tails: [CqeTails; 2],
        doorbells: DoorbellWords,
        device: mem::Device,
        wait_timeout: Option<Duration>,
        state: State,
    ) -> Self {
        let flushes = device.capabilities().flush_remote_writes.is_yes();
        let (failed, failure) = (AtomicBool::new(false), Mutex::new(None));
        let state = Mutex::new(state);
        let shared = Self {
            qp,
            cqs,
            tails,
            doorbells,
            device,
            flushes,
            wait_timeout,
            state,
            failed,
            failure,
        };
        for queue in [Queue::Send, Queue::Receive] {
            for number in 0..shared.tails[side(queue)].entries() {
                shared.clear(queue, number);
            }
            if let Some(memory) = shared.cqs[side(queue)].memory() {
                memory.flush_stores();
            }
        }
        shared
    }

    pub(super) fn ticket(&self, queue: Queue, number: u64) -> Ticket {
        Ticket { qpn: self.qp.number(), queue, number }
    }

    /// Resets a CQE slot so that a written entry can be distinguished from an unwritten one.
    fn clear(&self, queue: Queue, number: u64) {
        if let Some((at, value)) = self.tails[side(queue)].reset_store(number)
            && let Some(memory) = self.cqs[side(queue)].memory()
        {
            let _ = memory.bytes().store_u32(at, value);
        }
    }

    fn has_cqe(&self, state: &State, ticket: Ticket) -> bool {
        let queue = side(ticket.queue);
        ticket.number < state.trackers[queue].read || self.cqs[queue].has_cqe(ticket.number)
    }

    /// Writes a request into the queue without ringing the doorbell.
    pub(super) fn prepare(&self, state: &mut State, request: &SendRequest<'_>) -> Result<Ticket> {
        self.check_failure()?;
        if !state.trackers[0].has_room_for(1) {
            self.reclaim_cqes(state);
            if !state.trackers[0].has_room_for(1) {
                return Err(self.no_room("post a request"));
            }
        }
        let request = SendRequest { signaled: true, ..*request };
        let blocks = self.qp.prepare(&request)?;
        let number = state.trackers[0].reserved;
        state.trackers[0].reserved += 1;
        let cqe_slot = state.trackers[0].cqe_slot(number);
        state.trackers[0].ids[cqe_slot] = request.id;
        *state.entry(number) =
            Entry { first: blocks.start, end: blocks.end, stage: Stage::Prepared };
        Ok(self.ticket(Queue::Send, number))
    }

    /// Cancels a request that was not posted.
    pub(super) fn cancel(&self, state: &mut State, number: u64) {
        let entry = state.entry(number);
        if entry.stage != Stage::Prepared {
            return;
        }
        entry.stage = Stage::Cancelled;
        let blocks = entry.first..entry.end;
        self.qp.overwrite_with_nop(blocks);
        // Cancelled requests at the end of the queue are removed.
        while state.trackers[0].reserved > state.posted.requests {
            let last = state.trackers[0].reserved - 1;
            let Entry { first, stage, .. } = *state.entry(last);
            if stage != Stage::Cancelled {
                return;
            }
            self.qp.unpost_to(first);
            state.trackers[0].reserved = last;
        }
    }

    /// Records that the stream `by` (`None`: the CPU) posts this request; returns the WQEBB index
    /// up to which the doorbell is rung.
    fn advance(&self, state: &mut State, number: u64, by: Option<u64>) -> Result<u64> {
        self.check_failure()?;
        for earlier in state.posted.requests..number {
            if state.entry(earlier).stage == Stage::Prepared {
                let (ticket, first) =
                    (self.ticket(Queue::Send, number), self.ticket(Queue::Send, earlier));
                return Err(out_of_order(ticket, first));
            }
        }
        let entry = state.entry(number);
        entry.stage = Stage::Posted;
        let blocks = entry.end;
        state.posted = Posted { requests: number + 1, last: Some(number), blocks, by };
        Ok(blocks)
    }

    /// Posts a request on a stream: appends the stream's operations to `ops`.
    pub(super) fn post(
        &self,
        state: &mut State,
        number: u64,
        stream: StreamRef<'_>,
        ops: &mut Vec<MemOp>,
    ) -> Result<()> {
        let before = state.posted;
        let blocks = self.advance(state, number, Some(stream.number()))?;
        if before.by != Some(stream.number())
            && let Some(last) = before.last
            && !self.doorbells.is_rung(last)
        {
            self.doorbells.wait_until_rung(last, ops);
        }
        self.doorbells.ring(number, blocks, ops);
        Ok(())
    }

    /// Posts a request from the CPU.
    pub(super) fn post_now(&self, state: &mut State, number: u64) -> Result<()> {
        if state.posted.last.is_some_and(|last| !self.doorbells.is_rung(last)) {
            let ticket = self.ticket(Queue::Send, number);
            return Err(Error::new(Kind::Busy, format!("post {ticket} from the CPU"))
                .why("a stream has not reached an earlier request yet")
                .fix("post it on that stream, or wait for it"));
        }
        let blocks = self.advance(state, number, None)?;
        self.qp.ring_doorbell_to(blocks);
        self.doorbells.mark_rung(number);
        Ok(())
    }

    /// Posts receives; returns the ticket of the first.
    pub(super) fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<Ticket> {
        let state = &mut *self.state.lock();
        self.check_failure()?;
        if !state.trackers[1].has_room_for(requests.len()) {
            self.reclaim_cqes(state);
            if !state.trackers[1].has_room_for(requests.len()) {
                return Err(self.no_room("post a receive"));
            }
        }
        self.qp.post_receive(requests)?;
        let side = &mut state.trackers[1];
        let first = side.reserved;
        for request in requests {
            let cqe_slot = side.cqe_slot(side.reserved);
            side.ids[cqe_slot] = request.id;
            side.reserved += 1;
        }
        Ok(self.ticket(Queue::Receive, first))
    }

    /// Prepares a wait for a completion; no slot if the completion has been released already.
    pub(super) fn prepare_wait(&self, state: &mut State, ticket: Ticket) -> Result<Option<u32>> {
        if ticket.qpn != self.qp.number() {
            let why = format!("this is queue pair {:#x}", self.qp.number());
            return Err(Error::new(Kind::InvalidArgument, format!("wait for {ticket}")).why(why));
        }
        let queue = side(ticket.queue);
        if ticket.number >= state.trackers[queue].reserved {
            return Err(never_posted(ticket));
        }
        if ticket.number < state.trackers[queue].released {
            return Ok(None);
        }
        let slot = match state.waits.add_wait(ticket) {
            Ok(slot) => slot,
            Err(_) => {
                self.reclaim_cqes(state);
                state.waits.add_wait(ticket)?
            }
        };
        let cqe_slot = state.trackers[queue].cqe_slot(ticket.number);
        state.trackers[queue].waiters[cqe_slot] += 1;
        Ok(Some(slot))
    }

    /// Prepares a wait for the next receive in posting order.
    pub(super) fn prepare_next(&self, state: &mut State) -> Result<(Ticket, Option<u32>)> {
        let ticket = self.ticket(Queue::Receive, state.next_receive);
        let slot = self.prepare_wait(state, ticket)?;
        state.next_receive += 1;
        Ok((ticket, slot))
    }

    /// Cancels a wait that was not posted.
    pub(super) fn cancel_wait(
        &self,
        state: &mut State,
        ticket: Ticket,
        slot: Option<u32>,
        next: bool,
    ) {
        if let Some(slot) = slot {
            state.waits.release_wait(slot);
            self.release_wait(state, ticket);
        }
        if next && state.next_receive == ticket.number + 1 {
            state.next_receive -= 1;
        }
    }

    fn release_wait(&self, state: &mut State, ticket: Ticket) {
        let side = &mut state.trackers[side(ticket.queue)];
        let cqe_slot = side.cqe_slot(ticket.number);
        side.waiters[cqe_slot] = side.waiters[cqe_slot].saturating_sub(1);
    }

    /// Posts a wait on a stream: appends the stream's operations to `ops`. The markers show that
    /// the stream has reached the wait, and that it has passed it.
    pub(super) fn post_wait(
        &self,
        state: &mut State,
        ticket: Ticket,
        slot: Option<u32>,
        stream: StreamRef<'_>,
        [arrived, passed]: [ProgressMarker; 2],
        ops: &mut Vec<MemOp>,
    ) -> Result<()> {
        if ticket.queue == Queue::Send {
            let is_cancelled =
                slot.is_some() && state.entry(ticket.number).stage == Stage::Cancelled;
            if ticket.number >= state.posted.requests || is_cancelled {
                return Err(never_posted(ticket));
            }
        }
        let arrived = if self.wait_timeout.is_some() { arrived } else { ProgressMarker::Unknown };
        if let Some(slot) = slot {
            let [before, after] = state.waits.post(slot, stream.number(), arrived, passed);
            ops.extend(before);
            ops.push(self.tails[side(ticket.queue)].wait(ticket.number));
            if self.flushes {
                ops.push(MemOp::Flush);
            }
            ops.extend(after);
        } else if self.flushes {
            ops.push(MemOp::Flush);
        }
        Ok(())
    }

    /// Takes completions: those of requests first, then those of receives.
    pub(super) fn poll(&self, into: &mut [Completion]) -> Result<usize> {
        let state = &mut *self.state.lock();
        if state.device_lost {
            return Ok(0);
        }
        let mut count = self.take(state, Queue::Send, into)?;
        count += self.take(state, Queue::Receive, &mut into[count..])?;
        self.reclaim_cqes(state);
        Ok(count)
    }

    fn take(&self, state: &mut State, queue: Queue, into: &mut [Completion]) -> Result<usize> {
        let found = self.cqs[side(queue)].poll(into)?;
        let mut kept = 0;
        for at in 0..found {
            let number = state.trackers[side(queue)].read;
            state.trackers[side(queue)].read += 1;
            let completion = into[at];
            if queue == Queue::Send && state.entry(number).stage == Stage::Cancelled {
                continue;
            }
            if !completion.is_success() {
                self.record_failure(state, self.ticket(queue, number), completion.status);
            }
            into[kept] = completion;
            kept += 1;
        }
        Ok(kept)
    }

    /// Frees the waits that streams have passed, and returns CQE slots to the device once they are
    /// read and no stream waits for them.
    pub(super) fn reclaim_cqes(&self, state: &mut State) {
        let State { waits, trackers, .. } = state;
        waits.reap(&self.doorbells, |ticket| {
            let side = &mut trackers[side(ticket.queue)];
            let cqe_slot = side.cqe_slot(ticket.number);
            side.waiters[cqe_slot] = side.waiters[cqe_slot].saturating_sub(1);
        });
        for queue in [Queue::Send, Queue::Receive] {
            let at = side(queue);
            let before = state.trackers[at].released;
            while state.trackers[at].released < state.trackers[at].read
                && state.trackers[at].waiters
                    [state.trackers[at].cqe_slot(state.trackers[at].released)]
                    == 0
            {
                let next_lap = state.trackers[at].released + self.tails[at].entries();
                self.clear(queue, next_lap);
                state.trackers[at].released += 1;
            }
            if state.trackers[at].released != before {
                self.cqs[at].release(state.trackers[at].released);
            }
        }
    }

    // --- failures ---

    /// Returns the failure as an error, if there is one.
    #[inline]
    pub(super) fn check_failure(&self) -> Result<()> {
        if !self.failed.load(Ordering::Acquire) {
            return Ok(());
        }
        match &*self.failure.lock() {
            Some(failure) => Err(failure.error.clone()),
            None => Ok(()),
        }
    }

    /// Why the queue pair failed, if it did. Checks the device's state first.
    pub(super) fn failure(&self) -> Option<Arc<Failure>> {
        if !self.failed.load(Ordering::Acquire) {
            self.detect_failure(&mut self.state.lock());
        }
        self.failure.lock().clone()
    }

    /// If the device reports a failed queue pair, looks for the cause in unread completions.
    #[cold]
    fn detect_failure(&self, state: &mut State) {
        if !matches!(self.qp.state(), Ok(QpState::Err | QpState::Sqe)) {
            return;
        }
        match self.find_failed(state) {
            Some((ticket, status)) => self.fail_with_status(state, ticket, status),
            None => {
                let waiters = self.waiters(state);
                let why = "the device failed it: the peer broke the protocol, or a queue was lost";
                self.fail(state, Failure::aborted(why, waiters));
            }
        }
    }

    /// The first failure among unread completions. Flushed work comes after the work that failed,
    /// which may be in the other queue.
    fn find_failed(&self, state: &State) -> Option<(Ticket, Status)> {
        let mut first: Option<(Ticket, Status)> = None;
        for queue in [Queue::Send, Queue::Receive] {
            let mut lookahead = 0;
            while let Some(cqe) = self.cqs[side(queue)].peek(lookahead) {
                if let CqeOutcome::Failed { status, .. } = cqe.outcome
                    && first.is_none_or(|(_, known)| known == Status::Flushed && status != known)
                {
                    let number = state.trackers[side(queue)].read + lookahead;
                    first = Some((self.ticket(queue, number), status));
                }
                lookahead += 1;
            }
        }
        first
    }

    fn waiters(&self, state: &State) -> Vec<Waiter> {
        state.waits.waiters(&self.device.label(), |ticket| self.has_cqe(state, ticket))
    }

    #[cold]
    fn record_failure(&self, state: &mut State, ticket: Ticket, status: Status) {
        if self.failed.load(Ordering::Acquire) {
            return;
        }
        let (ticket, status) = match self.find_failed(state) {
            Some((cause, found)) if status == Status::Flushed && found != status => (cause, found),
            _ => (ticket, status),
        };
        self.fail_with_status(state, ticket, status);
    }

    /// Fails the queue pair because of this request or receive.
    #[cold]
    fn fail_with_status(&self, state: &mut State, ticket: Ticket, status: Status) {
        let side = &state.trackers[side(ticket.queue)];
        let id = side.ids[side.cqe_slot(ticket.number)];
        let waiters = self.waiters(state);
        self.fail(state, Failure::from_status(ticket, id, status, waiters));
    }

    /// Fails the queue pair. The first cause is kept; all posted work is flushed, and waiting
    /// streams resume.
    #[cold]
    pub(super) fn fail(&self, state: &mut State, failure: Failure) {
        {
            let mut known = self.failure.lock();
            if known.is_some() {
                return;
            }
            tracing::debug!(%failure, "a stream queue pair has failed");
            *known = Some(Arc::new(failure));
        }
        self.failed.store(true, Ordering::Release);
        state.failed_at = Some(Instant::now());
        self.flush(state);
    }

    /// Makes the device flush all posted work, including requests whose doorbell no stream has rung
    /// yet.
    fn flush(&self, state: &State) {
        // The queue pair may be in the error state already, or the device may be lost.
        let _ = self.qp.modify(&QpAttributes::new(QpState::Err));
        self.qp.ring_doorbell_to(state.posted.blocks);
        self.doorbells.mark_rung_before(state.posted.requests);
    }

    pub(super) fn end(&self, why: &'static str) {
        let state = &mut *self.state.lock();
        let waiters = self.waiters(state);
        self.fail(state, Failure::aborted(why, waiters));
    }

    /// One check by the watchdog: frees passed waits, detects failures and timeouts.
    pub(super) fn monitor(&self, now: Instant) {
        let state = &mut *self.state.lock();
        self.reclaim_cqes(state);
        if !self.failed.load(Ordering::Acquire) {
            self.detect_failure(state);
        }
        let posted: Vec<_> = state.waits.posted().collect();
        let mut has_timed_out = false;
        for (slot, ticket) in posted {
            let is_complete = self.has_cqe(state, ticket);
            let since = state.waits.update_since(slot, &self.doorbells, is_complete, now);
            let waited = since.map(|since| now.saturating_duration_since(since));
            has_timed_out |=
                self.wait_timeout.is_some_and(|limit| waited.is_some_and(|w| w >= limit));
        }
        if has_timed_out && !self.failed.load(Ordering::Acquire) {
            let waiters = self.waiters(state);
            let wait_timeout = self.wait_timeout.unwrap_or_default();
            self.fail(state, Failure::timed_out(wait_timeout, waiters));
        }
        // If the device does not even flush, it is lost; release its streams without it.
        if state.failed_at.is_some_and(|at| now.saturating_duration_since(at) >= FLUSH_TIME) {
            self.release_all(state);
        }
    }

    /// Ends all waits without the device, by writing error CQEs.
    fn release_all(&self, state: &mut State) {
        for (_, ticket) in state.waits.posted() {
            if self.has_cqe(state, ticket) {
                continue;
            }
            let at = side(ticket.queue);
            let entries = self.tails[at].entries();
            let cqe_slot = (ticket.number & (entries - 1)) * CQE_LEN + 60;
            let word = CqeWait::synthetic_error(ticket.queue, ticket.number, entries);
            let Some(memory) = self.cqs[at].memory() else { continue };
            let _ = memory.bytes().store_u32(cqe_slot, word);
            memory.flush_stores();
            // Its own completions, if it still writes them, cannot be told from these.
            state.device_lost = true;
        }
    }

    #[cold]
    fn no_room(&self, what: &'static str) -> Error {
        Error::new(Kind::Busy, what)
            .on(format!("queue pair {:#x}", self.qp.number()))
            .why("completions have not been polled, or streams have not passed them")
            .fix("call poll, let streams make progress, or raise StreamQpOptions::completions")
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        let state = &mut *self.state.lock();
        self.flush(state);
        self.release_all(state);
    }
}

#[cold]
fn out_of_order(ticket: Ticket, first: Ticket) -> Error {
    Error::new(Kind::InvalidArgument, format!("post {ticket}"))
        .why(format!("{first} was prepared before it and is not posted"))
        .fix("post in the order of preparation, or drop the earlier one")
}

#[cold]
fn never_posted(ticket: Ticket) -> Error {
    Error::new(Kind::InvalidArgument, format!("wait for {ticket}"))
        .why("it has not been posted, so the stream might wait for ever")
        .fix("post it first, or in the same batch before the wait")
}
