//! Windows: memory of every rank that the others write to and read from.

use std::sync::Arc;
use std::time::Duration;

use super::buffer::{self, Part};
use super::comm::Comm;
use super::entries::{Notice, What};
use super::header::{RANGE, Range};
use super::request::Request;
use super::shared::Shared;
use super::state::State;
use crate::error::{Error, Kind, Result};
use crate::mem::Width;
use crate::units;
use crate::verbs::{Atomic, Remote};

/// What becomes of a word when the data before it is in its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Signal {
    /// It gets this value.
    Set32(u32),
    /// It gets this value.
    Set64(u64),
    /// This is added to it, atomically.
    Add64(u64),
}

impl Signal {
    pub(super) fn width(self) -> Width {
        match self {
            Self::Set32(_) => Width::Bits32,
            Self::Set64(_) | Self::Add64(_) => Width::Bits64,
        }
    }

    fn notice(self) -> Notice {
        match self {
            Self::Set32(value) => Notice::Write(u64::from(value).to_le_bytes(), 4),
            Self::Set64(value) => Notice::Write(value.to_le_bytes(), 8),
            Self::Add64(add) => Notice::Atomic(Atomic::FetchAdd { add }),
        }
    }
}

/// Memory of every rank, made together. Ranges are checked over their whole length before anything is sent.
///
/// Dropping it ends nothing: the memory stays registered with its buffer. [`Window::close`] waits for the others, so
/// that a buffer can be dropped after it.
pub struct Window {
    comm: Comm,
    own: Part,
    members: Vec<Range>,
}

impl std::fmt::Debug for Window {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Window(rank {}, {})", self.comm.rank(), units::bytes(self.own.len))
    }
}

impl Comm {
    /// Makes a window: every rank does so, in the same order among all that ranks do together, each with memory of
    /// its own, perhaps of another length.
    pub fn window(&self, part: impl Into<Part>) -> Result<Window> {
        let own = part.into();
        let (address, rkey) = own.buffer.remote(own.offset);
        let mine = Range { address, len: own.len, rkey };
        let told = self.gather_all(&mine.encode(), RANGE)?;
        let range = |bytes: &[u8]| Range::parse(&std::array::from_fn(|index| bytes[index]));
        let members = told.chunks_exact(RANGE).map(range).collect();
        Ok(Window { comm: self.clone(), own, members })
    }
}

impl Window {
    fn shared(&self) -> &Arc<Shared> {
        &self.comm.shared
    }

    /// The memory of this rank.
    pub fn own(&self) -> &Part {
        &self.own
    }

    /// How much memory a rank has in it; nothing if there is no such rank.
    pub fn len_of(&self, rank: usize) -> u64 {
        self.members.get(rank).map_or(0, |member| member.len)
    }

    /// Begins to write to a rank's memory. It has ended when the data is there.
    ///
    /// What is put, got and sent to one rank is done in that order.
    pub fn put(&self, rank: usize, offset: u64, part: impl Into<Part>) -> Result<Request> {
        self.putv(rank, offset, &[part.into()])
    }

    /// Begins to write parts, one after the other; 15 at most.
    pub fn putv(&self, rank: usize, offset: u64, parts: &[Part]) -> Result<Request> {
        let at = self.place("put to", rank, offset, total(parts)?)?;
        self.transfer(What::Put, rank, at, parts, None)
    }

    /// Begins to write to a rank's memory and then, when that is done, to change the word at `word` of it.
    pub fn put_signal(
        &self,
        rank: usize,
        offset: u64,
        part: impl Into<Part>,
        word: u64,
        signal: Signal,
    ) -> Result<Request> {
        let parts = [part.into()];
        let at = self.place("put to", rank, offset, total(&parts)?)?;
        let word = self.word_at(rank, word, signal.width().bytes())?;
        self.transfer(What::Put, rank, at, &parts, Some((signal.notice(), word)))
    }

    /// Begins to read from a rank's memory.
    pub fn get(&self, rank: usize, offset: u64, part: impl Into<Part>) -> Result<Request> {
        self.getv(rank, offset, &[part.into()])
    }

    /// Begins to read into parts, one after the other; 15 at most.
    pub fn getv(&self, rank: usize, offset: u64, parts: &[Part]) -> Result<Request> {
        let at = self.place("get from", rank, offset, total(parts)?)?;
        self.transfer(What::Get, rank, at, parts, None)
    }

    /// Ends the window: returns when every rank has come to this point, and nobody uses the memory any more.
    pub fn close(self, timeout: Duration) -> Result<()> {
        self.comm.barrier(timeout)
    }

    /// A range of a rank's memory as kernels and work requests name it, if all of it is there.
    pub fn remote(&self, rank: usize, offset: u64, len: u64) -> Result<Remote> {
        let Range { address, rkey, .. } = self.place("reach", rank, offset, len)?;
        Ok(Remote { address, rkey })
    }

    /// A word of a rank's memory as kernels and work requests name it; `width` is 4 or 8.
    pub fn word(&self, rank: usize, offset: u64, width: u64) -> Result<Remote> {
        let Range { address, rkey, .. } = self.word_at(rank, offset, width)?;
        Ok(Remote { address, rkey })
    }

    fn word_at(&self, rank: usize, offset: u64, width: u64) -> Result<Range> {
        let word = self.place("signal", rank, offset, width)?;
        if width == 0 || !word.address.is_multiple_of(width) {
            let error = Error::new(Kind::Misaligned, format!("signal rank {rank}"));
            return Err(error.why(format!("a word of {width} bytes lies at multiples of {width}")));
        }
        Ok(word)
    }

    /// Where a range of a rank's memory lies, if all of it is there.
    fn place(&self, verb: &str, rank: usize, offset: u64, len: u64) -> Result<Range> {
        self.shared().check_rank(rank, verb)?;
        let member = self.members[rank];
        if offset.checked_add(len).is_none_or(|end| end > member.len) {
            let error = Error::new(Kind::OutOfRange, format!("{verb} rank {rank}"));
            let why = format!(
                "its window has {} bytes, and {len} at offset {offset} do not lie in it",
                member.len
            );
            return Err(error.why(why));
        }
        Ok(Range { address: member.address.wrapping_add(offset), len, rkey: member.rkey })
    }

    fn transfer(
        &self,
        what: What,
        rank: usize,
        at: Range,
        parts: &[Part],
        notice: Option<(Notice, Range)>,
    ) -> Result<Request> {
        let own = self.comm.rank();
        self.shared().start(what, rank, parts, |state, index| {
            let entry = state.entries.get(index);
            entry.remote.push(at);
            entry.tag = 0;
            entry.notice = notice.map(|(notice, word)| (notice, word.address, word.rkey));
            if rank == own {
                self.by_hand(state, index, at, notice);
            } else {
                state.peers[rank].outbox.push_back(index);
                state.pump(rank);
            }
        })
    }

    /// To and from this rank itself.
    fn by_hand(&self, state: &mut State, index: u32, at: Range, notice: Option<(Notice, Range)>) {
        let (base, _) = self.own.buffer.remote(0);
        let there = Part {
            buffer: self.own.buffer.clone(),
            offset: at.address.wrapping_sub(base),
            len: at.len,
        };
        let entry = state.entries.get(index);
        let here = entry.parts.clone();
        let there = std::slice::from_ref(&there);
        let moved = match entry.what {
            What::Put => buffer::copy(there, &here, at.len),
            _ => buffer::copy(&here, there, at.len),
        };
        let moved = moved.and_then(|()| match notice {
            Some((notice, word)) => self.own.buffer.change(word.address.wrapping_sub(base), notice),
            None => Ok(()),
        });
        (entry.posted, entry.notice) = (entry.total, None);
        entry.failure = moved.err();
        state.conclude(index);
    }
}

/// The length of all parts; an error if there is no such number.
fn total(parts: &[Part]) -> Result<u64> {
    let sum = parts.iter().try_fold(0u64, |sum, part| sum.checked_add(part.len));
    sum.ok_or_else(|| {
        Error::new(Kind::OutOfRange, "use several parts").why("they are longer than any memory")
    })
}
