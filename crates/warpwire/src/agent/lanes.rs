//! A queue pair of a connection, and the work on it.

use std::collections::VecDeque;
use std::sync::Arc;

use super::inbox::{FRAGMENT_LEN, fragment, fragments};
use super::transfer::{Active, TransferOp};
use crate::verbs::{
    Completion, Fence, ListPost, PostError, Qp, QpAttributes, RangeList, Remote, SendRequest, Sge,
    State, WrOp,
};

/// Every so many work requests of a transfer one completion is asked for, so that the queue drains
/// while it is filled.
const SIGNAL_INTERVAL: usize = 32;

pub(super) struct Lane {
    pub rail: usize,
    pub qp: Qp,
    /// In the ids of its work requests.
    id: u64,
    depth: u32,
    /// Numbers of the next work request, and of the last one that has completed.
    posted: u32,
    completed: u32,
    /// Work that a completion will be for, oldest first.
    entries: VecDeque<Entry>,
    pub failed: bool,
}

struct Entry {
    transfer: Arc<Active>,
    /// Number of its last work request.
    last: u32,
}

/// What became of work.
pub(super) enum Outcome {
    /// These entries' work is done.
    Done(Arc<Active>),
    /// The first work that failed belongs to this transfer.
    Failed(Option<Arc<Active>>),
    /// Nothing new.
    Nothing,
}

impl Lane {
    /// `slot` is the connection's, `index` the lane's.
    pub(super) fn new(rail: usize, qp: Qp, slot: u32, index: usize, depth: u32) -> Self {
        let id = u64::from(slot) << 40 | (index as u64) << 32;
        let entries = VecDeque::new();
        Self { rail, qp, id, depth, posted: 0, completed: 0, entries, failed: false }
    }

    /// The connection and the lane that a work request's id names.
    pub(super) fn of_id(id: u64) -> (u32, usize) {
        ((id >> 40) as u32, (id >> 32 & 0xff) as usize)
    }

    /// How many more work requests it takes.
    pub(super) fn room(&self) -> usize {
        (self.depth - self.posted.wrapping_sub(self.completed)) as usize
    }

    /// Whether all work has completed, in one way or the other.
    pub(super) fn is_drained(&self) -> bool {
        self.posted == self.completed
    }

    /// Posts pieces of a transfer, for which there is room; returns how many entries they became.
    ///
    /// # Errors
    /// If the queue pair refuses one: none of them was posted.
    pub(super) fn post_pieces(
        &mut self,
        transfer: &Arc<Active>,
        pieces: impl ExactSizeIterator<Item = usize>,
    ) -> Result<usize, PostError> {
        let before = (self.posted, self.entries.len());
        self.try_post_pieces(transfer, pieces).inspect_err(|_| self.restore(before))
    }

    /// Forgets what was not posted.
    fn restore(&mut self, (posted, entries): (u32, usize)) {
        self.posted = posted;
        self.entries.truncate(entries);
    }

    fn try_post_pieces(
        &mut self,
        transfer: &Arc<Active>,
        pieces: impl ExactSizeIterator<Item = usize>,
    ) -> Result<usize, PostError> {
        let lists = &transfer.lists;
        let (count, mut entries) = (pieces.len(), 0);
        let mut batch = self.qp.batch()?;
        for (number, index) in pieces.enumerate() {
            let piece = lists.pieces[index];
            let key = |keys: &[u32], at: u32| keys[at as usize * lists.rails + self.rail];
            let remote =
                Remote { address: piece.remote, rkey: key(&lists.rkeys, piece.remote_key) };
            let lkey = key(&lists.lkeys, piece.local_key);
            let data = [Sge { address: piece.local, len: piece.len, lkey }];
            let op = match transfer.op {
                TransferOp::Write => WrOp::Write(remote),
                TransferOp::Read => WrOp::Read(remote),
            };
            let mut request = SendRequest::new(self.id | u64::from(self.posted), op).with(&data);
            let last = number + 1 == count;
            request.signaled = last || (number + 1) % SIGNAL_INTERVAL == 0;
            batch.push(&request)?;
            self.posted = self.posted.wrapping_add(1);
            if request.signaled {
                let last = self.posted.wrapping_sub(1);
                self.entries.push_back(Entry { transfer: transfer.clone(), last });
                entries += 1;
            }
        }
        batch.post();
        Ok(entries)
    }

    /// Posts a list of pieces as one work request, for which there is room.
    ///
    /// # Errors
    /// If the queue pair refuses it.
    pub(super) fn post_list(
        &mut self,
        transfer: &Arc<Active>,
        list: &Arc<RangeList>,
    ) -> Result<ListPost, PostError> {
        let posted = self.qp.post_list(self.id | u64::from(self.posted), list)?;
        if posted == ListPost::Posted {
            self.entries.push_back(Entry { transfer: transfer.clone(), last: self.posted });
            self.posted = self.posted.wrapping_add(1);
        }
        Ok(posted)
    }

    /// Posts parts of a transfer's notification, as many as there is room for, from `offset` on.
    /// Returns the offset of what is left, and how many entries were added.
    ///
    /// # Errors
    /// If the queue pair refuses one: none of them was posted.
    pub(super) fn post_notification(
        &mut self,
        transfer: &Arc<Active>,
        bytes: &[u8],
        offset: usize,
    ) -> Result<(usize, usize), PostError> {
        let before = (self.posted, self.entries.len());
        self.try_post_notification(transfer, bytes, offset).inspect_err(|_| self.restore(before))
    }

    fn try_post_notification(
        &mut self,
        transfer: &Arc<Active>,
        bytes: &[u8],
        mut offset: usize,
    ) -> Result<(usize, usize), PostError> {
        let count = fragments(bytes.len() - offset).min(self.room());
        if count == 0 {
            return Ok((offset, 0));
        }
        let mut batch = self.qp.batch()?;
        for number in 0..count {
            let mut message = [0; FRAGMENT_LEN];
            let (len, next) = fragment(bytes, offset, &mut message);
            let id = self.id | u64::from(self.posted);
            let mut request = SendRequest::new(id, WrOp::Send).inline(&message[..len]).solicited();
            request.signaled = number + 1 == count;
            if transfer.op == TransferOp::Read && offset == 0 {
                // What it announces is that the reads have ended.
                request.fence = Fence::Reads;
            }
            batch.push(&request)?;
            self.posted = self.posted.wrapping_add(1);
            offset = next;
        }
        batch.post();
        let last = self.posted.wrapping_sub(1);
        self.entries.push_back(Entry { transfer: transfer.clone(), last });
        Ok((offset, 1))
    }

    /// Takes note of a completion.
    pub(super) fn complete(&mut self, completion: &Completion) -> Outcome {
        let number = completion.id as u32;
        self.completed = number.wrapping_add(1);
        let is_before = |entry: &Entry| number.wrapping_sub(entry.last) < 1 << 31;
        if completion.is_success() {
            return match self.entries.pop_front() {
                Some(entry) => Outcome::Done(entry.transfer),
                None => Outcome::Nothing,
            };
        }
        // Work without a completion of its own has one when it fails.
        let culprit = self.entries.front().map(|entry| entry.transfer.clone());
        while self.entries.front().is_some_and(is_before) {
            self.entries.pop_front();
        }
        match std::mem::replace(&mut self.failed, true) {
            false => Outcome::Failed(culprit),
            true => Outcome::Nothing,
        }
    }

    /// Ends all work: what was posted completes as flushed.
    pub(super) fn flush(&mut self) {
        self.failed = true;
        if self.qp.modify(&QpAttributes::new(State::Err)).is_err() {
            // It was never connected, so it has no work.
            self.completed = self.posted;
        }
    }
}
