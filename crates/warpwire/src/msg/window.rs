//! RMA windows: memory of every rank for one-sided access by the others.

use std::sync::Arc;
use std::time::Duration;

use super::buffer::{self, BufferSlice};
use super::comm::Comm;
use super::entries::{RequestKind, WordUpdate};
use super::header::{RANGE_LEN, RemoteRange};
use super::request::Request;
use super::shared::Shared;
use super::state::State;
use crate::error::{Error, Kind, Result};
use crate::mem::WordWidth;
use crate::units;
use crate::verbs::{Atomic, Remote};

/// How a word is updated after the data of a put has been written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// Stores this 32-bit value.
    Set32(u32),
    /// Stores this 64-bit value.
    Set64(u64),
    /// Atomically adds this to a 64-bit word.
    Add64(u64),
}

impl Signal {
    pub(super) fn width(self) -> WordWidth {
        match self {
            Self::Set32(_) => WordWidth::Bits32,
            Self::Set64(_) | Self::Add64(_) => WordWidth::Bits64,
        }
    }

    fn word_update(self) -> WordUpdate {
        match self {
            Self::Set32(value) => WordUpdate::Write(u64::from(value).to_le_bytes(), 4),
            Self::Set64(value) => WordUpdate::Write(value.to_le_bytes(), 8),
            Self::Add64(add) => WordUpdate::Atomic(Atomic::FetchAdd { add }),
        }
    }
}

/// Memory of every rank, created collectively. Ranges are checked over their whole length before
/// anything is sent.
///
/// Dropping it does nothing: the memory stays registered with its buffer. [`RmaWindow::close`]
/// waits for all ranks, so that the buffer can be dropped after it.
pub struct RmaWindow {
    comm: Comm,
    own: BufferSlice,
    members: Vec<RemoteRange>,
}

impl std::fmt::Debug for RmaWindow {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RmaWindow(rank {}, {})", self.comm.rank(), units::bytes(self.own.len))
    }
}

impl Comm {
    /// Creates a window. Collective: every rank calls it, in the same order as other collectives.
    /// Each rank contributes memory of its own, whose length may differ.
    pub fn window(&self, slice: impl Into<BufferSlice>) -> Result<RmaWindow> {
        let own = slice.into();
        let (address, rkey) = own.buffer.remote(own.offset);
        let mine = RemoteRange { address, len: own.len, rkey };
        let gathered = self.all_gather_bytes(&mine.encode(), RANGE_LEN)?;
        let range = |bytes: &[u8]| RemoteRange::parse(&std::array::from_fn(|index| bytes[index]));
        let members = gathered.chunks_exact(RANGE_LEN).map(range).collect();
        Ok(RmaWindow { comm: self.clone(), own, members })
    }
}

impl RmaWindow {
    fn shared(&self) -> &Arc<Shared> {
        &self.comm.shared
    }

    /// This rank's memory.
    pub fn own(&self) -> &BufferSlice {
        &self.own
    }

    /// Length of a rank's memory in bytes; 0 if there is no such rank.
    pub fn len_of(&self, rank: usize) -> u64 {
        self.members.get(rank).map_or(0, |member| member.len)
    }

    /// Starts to write to a rank's memory. The request has completed when the data is there.
    ///
    /// Puts, gets and messages to one rank are executed in order.
    pub fn put(&self, rank: usize, offset: u64, slice: impl Into<BufferSlice>) -> Result<Request> {
        self.putv(rank, offset, &[slice.into()])
    }

    /// Starts to write slices, in order, to contiguous memory of a rank; at most 15.
    pub fn putv(&self, rank: usize, offset: u64, slices: &[BufferSlice]) -> Result<Request> {
        let at = self.checked_range("put to", rank, offset, total(slices)?)?;
        self.transfer(RequestKind::Put, rank, at, slices, None)
    }

    /// Starts to write to a rank's memory, and then to update the word at offset `word` of it. A
    /// peer that sees the updated word sees the data.
    pub fn put_signal(
        &self,
        rank: usize,
        offset: u64,
        slice: impl Into<BufferSlice>,
        word: u64,
        signal: Signal,
    ) -> Result<Request> {
        let slices = [slice.into()];
        let at = self.checked_range("put to", rank, offset, total(&slices)?)?;
        let word = self.word_at(rank, word, signal.width().bytes())?;
        self.transfer(RequestKind::Put, rank, at, &slices, Some((signal.word_update(), word)))
    }

    /// Starts to read from a rank's memory.
    pub fn get(&self, rank: usize, offset: u64, slice: impl Into<BufferSlice>) -> Result<Request> {
        self.getv(rank, offset, &[slice.into()])
    }

    /// Starts to read contiguous memory of a rank into slices, in order; at most 15.
    pub fn getv(&self, rank: usize, offset: u64, slices: &[BufferSlice]) -> Result<Request> {
        let at = self.checked_range("get from", rank, offset, total(slices)?)?;
        self.transfer(RequestKind::Get, rank, at, slices, None)
    }

    /// Closes the window: returns when every rank has called it, after which no rank accesses the
    /// memory.
    pub fn close(self, timeout: Duration) -> Result<()> {
        self.comm.barrier(timeout)
    }

    /// Address and rkey of a range, for kernels and work requests. Fails if the range exceeds the
    /// rank's memory.
    pub fn remote(&self, rank: usize, offset: u64, len: u64) -> Result<Remote> {
        let RemoteRange { address, rkey, .. } = self.checked_range("reach", rank, offset, len)?;
        Ok(Remote { address, rkey })
    }

    /// Address and rkey of a word, for kernels and work requests; `width` is 4 or 8 bytes.
    pub fn word(&self, rank: usize, offset: u64, width: u64) -> Result<Remote> {
        let RemoteRange { address, rkey, .. } = self.word_at(rank, offset, width)?;
        Ok(Remote { address, rkey })
    }

    fn word_at(&self, rank: usize, offset: u64, width: u64) -> Result<RemoteRange> {
        let word = self.checked_range("signal", rank, offset, width)?;
        if width == 0 || !word.address.is_multiple_of(width) {
            let error = Error::new(Kind::Misaligned, format!("signal rank {rank}"));
            return Err(error.why(format!("a word of {width} bytes must be aligned to {width}")));
        }
        Ok(word)
    }

    /// Checks a range of a rank's memory and returns its address.
    fn checked_range(&self, verb: &str, rank: usize, offset: u64, len: u64) -> Result<RemoteRange> {
        self.shared().check_rank(rank, verb)?;
        let member = self.members[rank];
        if offset.checked_add(len).is_none_or(|end| end > member.len) {
            let error = Error::new(Kind::OutOfRange, format!("{verb} rank {rank}"));
            let why = format!(
                "its window has {} bytes, and {len} at offset {offset} exceed it",
                member.len
            );
            return Err(error.why(why));
        }
        Ok(RemoteRange { address: member.address.wrapping_add(offset), len, rkey: member.rkey })
    }

    fn transfer(
        &self,
        kind: RequestKind,
        rank: usize,
        at: RemoteRange,
        slices: &[BufferSlice],
        word_update: Option<(WordUpdate, RemoteRange)>,
    ) -> Result<Request> {
        let own = self.comm.rank();
        self.shared().start(kind, rank, slices, |state, index| {
            let entry = state.entries.get(index);
            entry.remote.push(at);
            entry.tag = 0;
            entry.word_update =
                word_update.map(|(word_update, word)| (word_update, word.address, word.rkey));
            if rank == own {
                self.copy_local(state, index, at, word_update);
            } else {
                state.peers[rank].send_queue.push_back(index);
                state.pump(rank);
            }
        })
    }

    /// A transfer within this rank.
    fn copy_local(
        &self,
        state: &mut State,
        index: u32,
        at: RemoteRange,
        word_update: Option<(WordUpdate, RemoteRange)>,
    ) {
        let (base, _) = self.own.buffer.remote(0);
        let remote_slice = BufferSlice {
            buffer: self.own.buffer.clone(),
            offset: at.address.wrapping_sub(base),
            len: at.len,
        };
        let entry = state.entries.get(index);
        let local_slices = entry.slices.clone();
        let remote_slice = std::slice::from_ref(&remote_slice);
        let moved = match entry.kind {
            RequestKind::Put => buffer::copy(remote_slice, &local_slices, at.len),
            _ => buffer::copy(&local_slices, remote_slice, at.len),
        };
        let moved = moved.and_then(|()| match word_update {
            Some((word_update, word)) => {
                self.own.buffer.apply_update(word.address.wrapping_sub(base), word_update)
            }
            None => Ok(()),
        });
        (entry.posted, entry.word_update) = (entry.total, None);
        entry.failure = moved.err();
        state.complete_if_done(index);
    }
}

/// The total length of slices; an error if it overflows.
fn total(slices: &[BufferSlice]) -> Result<u64> {
    let sum = slices.iter().try_fold(0u64, |sum, slice| sum.checked_add(slice.len));
    sum.ok_or_else(|| {
        Error::new(Kind::OutOfRange, "use several slices").why("their total length overflows")
    })
}
