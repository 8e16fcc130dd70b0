//! Operations on the memory of other ranks: the data, and behind it the signal, on one queue pair.
//! A reliable connection executes in order, so a kernel that sees the signal has the data.

use warpwire::verbs::{Atomic, PostError, Remote, SendRequest, Sge, WrOp};

use super::abi::{Id, SIGNAL_ADD, SIGNAL_INC};
use super::coll::{Coll, State};
use super::requests::RequestId;
use crate::result::{Failure, INTERNAL, INVALID_ARGUMENT, Result};

/// Maximum bytes of one work request.
const MAX_WORK_REQUEST: u64 = 1 << 30;

/// A range of symmetric memory.
#[derive(Clone, Copy)]
pub(super) struct Range {
    pub memory: Id,
    pub offset: u64,
}

/// A signal behind the data.
#[derive(Clone, Copy)]
pub(super) struct Signal {
    pub at: Range,
    pub value: u64,
    pub op: u32,
}

/// Which way data goes.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    /// To the rank.
    Put,
    /// From the rank.
    Get,
}

/// An operation.
#[derive(Clone, Copy)]
pub(super) struct Transfer {
    pub direction: Direction,
    pub rank: u32,
    pub own: Range,
    pub theirs: Range,
    pub len: u64,
    pub signal: Option<Signal>,
}

/// An operation whose ranges were found.
struct Resolved {
    sge: Sge,
    data: Remote,
    signal: Option<(Remote, u64)>,
}

impl Coll {
    /// Posts an operation.
    ///
    /// # Errors
    /// If an argument is wrong, the rank has ended, or more operations are outstanding than were
    /// announced. Nothing is written then.
    pub(super) fn post(&self, transfer: &Transfer) -> Result<Id> {
        self.check_rank(transfer.rank)?;
        let mut state = self.state.lock();
        let resolved = resolve(&state, transfer)?;
        let Some(request) = state.requests.post(transfer.rank) else {
            self.progress(&mut state);
            let room = state.requests.room(transfer.rank);
            let text = format!("more than {room} operations to rank {}", transfer.rank);
            return Err(Failure::new(INTERNAL, text));
        };
        let posted = self.post_all(&mut state, transfer, &resolved, request);
        posted.inspect_err(|_| state.requests.cancel(request))?;
        Ok(request.to_nccl())
    }

    /// An operation that is complete when all earlier ones to the rank are.
    pub(super) fn post_flush(&self, rank: u32) -> Result<Id> {
        let nothing = Range { memory: std::ptr::null(), offset: 0 };
        let direction = Direction::Put;
        let (own, theirs) = (nothing, nothing);
        self.post(&Transfer { direction, rank, own, theirs, len: 0, signal: None })
    }

    fn post_all(
        &self,
        state: &mut State,
        transfer: &Transfer,
        resolved: &Resolved,
        request: RequestId,
    ) -> Result {
        let Resolved { sge, data, signal } = resolved;
        let (id, mut offset) = (request.wr_id(), 0);
        // Whatever fails from here on fails the connection: a part may be posted.
        while transfer.len - offset > MAX_WORK_REQUEST {
            let entry = [part(sge, offset, MAX_WORK_REQUEST)];
            let work = SendRequest::new(id, transfer.op(data, offset)).with(&entry);
            self.post_some(state, transfer.rank, &[work.unsignaled()])?;
            offset += MAX_WORK_REQUEST;
        }
        let entry = [part(sge, offset, transfer.len - offset)];
        let last = SendRequest::new(id, transfer.op(data, offset)).with(&entry);
        let Some((word, add)) = signal else {
            return match transfer.len {
                0 => self.post_some(state, transfer.rank, &[SendRequest::new(id, WrOp::Nop)]),
                _ => self.post_some(state, transfer.rank, &[last]),
            };
        };
        let previous = [self.scratch.sge(0, size_of::<u64>() as u32)];
        let atomic = WrOp::Atomic(*word, Atomic::FetchAdd { add: *add });
        let mark = SendRequest::new(id, atomic).with(&previous);
        match transfer.len {
            0 => self.post_some(state, transfer.rank, &[mark]),
            _ => self.post_some(state, transfer.rank, &[last.unsignaled(), mark]),
        }
    }

    /// Posts work requests, after waiting for room in the queue if data before them is long.
    fn post_some(&self, state: &mut State, rank: u32, work: &[SendRequest<'_>]) -> Result {
        let qp = self.mesh.qp(rank)?;
        loop {
            match qp.post_send(work) {
                Ok(()) => return Ok(()),
                Err(PostError::Full) => {
                    self.progress(state);
                    self.check_rank(rank)?;
                    std::thread::yield_now();
                }
                Err(why) => {
                    self.check_rank(rank)?;
                    return Err(warpwire::Error::from(why).into());
                }
            }
        }
    }
}

impl Transfer {
    #[inline]
    fn op(&self, data: &Remote, offset: u64) -> WrOp {
        let at = Remote { address: data.address.wrapping_add(offset), rkey: data.rkey };
        match self.direction {
            Direction::Put => WrOp::Write(at),
            Direction::Get => WrOp::Read(at),
        }
    }
}

#[inline]
fn part(whole: &Sge, offset: u64, len: u64) -> Sge {
    Sge { address: whole.address.wrapping_add(offset), len: len as u32, lkey: whole.lkey }
}

/// Finds and checks all ranges of an operation. Without data, its ranges are not looked at: NCCL
/// passes none with a signal alone.
#[inline]
fn resolve(state: &State, transfer: &Transfer) -> Result<Resolved> {
    let Transfer { rank, own, theirs, len, signal, .. } = *transfer;
    let mut resolved = Resolved {
        sge: Sge { address: 0, len: 0, lkey: 0 },
        data: Remote { address: 0, rkey: 0 },
        signal: None,
    };
    if len > 0 {
        resolved.sge = state.regions.get(own.memory)?.local(own.offset, len)?;
        resolved.data = state.regions.get(theirs.memory)?.remote(rank, theirs.offset, len)?;
    }
    if let Some(Signal { at, value, op }) = signal {
        let add = match op {
            SIGNAL_INC => 1,
            SIGNAL_ADD => value,
            _ => {
                let text = format!("signal operation {op}; INC (1) and ADD (2) are supported");
                return Err(Failure::new(INVALID_ARGUMENT, text));
            }
        };
        resolved.signal = Some((state.regions.get(at.memory)?.word(rank, at.offset)?, add));
    }
    Ok(resolved)
}
