//! Requests and waits that are prepared and not yet posted on a stream.

use std::sync::Arc;

use super::queue::Shared;
use super::ticket::Ticket;
use super::waits::ProgressMarker;
use crate::error::{Error, Kind, Result};
use crate::mem::StreamRef;

/// Rejects a stream that cannot drive this queue pair.
pub(super) fn check_stream(shared: &Shared, stream: StreamRef<'_>) -> Result<()> {
    let refused = |kind, why: String| {
        let what = format!("use queue pair {:#x} on a stream", shared.qp.number());
        Error::new(kind, what).on(stream.label()).why(why)
    };
    if *stream.device() != shared.device {
        let why = format!("its queues are mapped for {} only", shared.device.label());
        return Err(
            refused(Kind::InvalidArgument, why).fix("create a queue pair for the stream's device")
        );
    }
    if stream.is_capturing()? {
        let why = "a graph would write the same doorbell value in each replay".to_owned();
        return Err(refused(Kind::Unsupported, why)
            .fix("use a KernelQp, whose posts can be replayed, or post outside of the capture"));
    }
    Ok(())
}

/// A request in the send queue whose doorbell has not been rung. Dropping it cancels the request.
#[derive(Debug)]
#[must_use = "nothing happens until it is posted"]
pub struct Prepared {
    pub(super) shared: Arc<Shared>,
    pub(super) ticket: Ticket,
    pub(super) is_posted: bool,
}

impl Prepared {
    /// The request's ticket.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Posts the request on a stream, which rings the doorbell when it reaches that point. If the
    /// stream rejects it, the request is cancelled.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if a request that was prepared earlier is neither posted nor
    /// dropped, or if the stream belongs to another device; the failure of the queue pair or of the
    /// stream, if one has failed.
    pub fn post<'s>(mut self, stream: impl Into<StreamRef<'s>>) -> Result<Ticket> {
        let (shared, stream) = (self.shared.clone(), stream.into());
        check_stream(&shared, stream)?;
        let state = &mut *shared.state.lock();
        let (before, mut ops) = (state.posted(), std::mem::take(&mut state.scratch));
        ops.clear();
        let posted = shared
            .post(state, self.ticket.number, stream, &mut ops)
            .and_then(|()| state.kept.batch(stream, &ops));
        ops.clear();
        state.scratch = ops;
        match posted {
            Ok(()) => self.is_posted = true,
            Err(_) => {
                state.unpost_to(before);
                shared.cancel(state, self.ticket.number);
                self.is_posted = true; // cancelled above, not on drop
            }
        }
        posted.map(|()| self.ticket)
    }

    /// Posts the request immediately from the CPU.
    ///
    /// # Errors
    /// [`Kind::Busy`] if a stream has not reached an earlier request yet.
    pub fn post_now(mut self) -> Result<Ticket> {
        let shared = self.shared.clone();
        shared.post_now(&mut shared.state.lock(), self.ticket.number)?;
        self.is_posted = true;
        Ok(self.ticket)
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        if !self.is_posted {
            self.shared.cancel(&mut self.shared.state.lock(), self.ticket.number);
        }
    }
}

/// A wait for a completion that is not posted on a stream yet. It keeps the CQE slot from being
/// reused until it is posted and passed, or dropped.
#[derive(Debug)]
#[must_use = "nothing happens until it is posted"]
pub struct PreparedWait {
    pub(super) shared: Arc<Shared>,
    pub(super) ticket: Ticket,
    /// `None` if the completion was released before the wait was prepared.
    pub(super) slot: Option<u32>,
    /// The wait is for the next receive; if it is dropped, the next such wait takes that receive.
    pub(super) is_next: bool,
    pub(super) is_posted: bool,
}

impl PreparedWait {
    /// The request or receive that it waits for.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Posts the wait on a stream: the operations behind it run after the work has completed or
    /// failed.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if the request is not posted, or if the stream belongs to another
    /// device; the failure of the stream, if it has failed.
    pub fn post<'s>(mut self, stream: impl Into<StreamRef<'s>>) -> Result<Ticket> {
        let (shared, stream) = (self.shared.clone(), stream.into());
        check_stream(&shared, stream)?;
        let state = &mut *shared.state.lock();
        let mut ops = std::mem::take(&mut state.scratch);
        ops.clear();
        let markers = [ProgressMarker::Word; 2];
        let posted = shared
            .post_wait(state, self.ticket, self.slot, stream, markers, &mut ops)
            .and_then(|()| state.kept.batch(stream, &ops));
        ops.clear();
        state.scratch = ops;
        if posted.is_err() {
            state.unpost_wait(self.slot);
            shared.cancel_wait(state, self.ticket, self.slot, self.is_next);
        }
        self.is_posted = true;
        posted.map(|()| self.ticket)
    }
}

impl Drop for PreparedWait {
    fn drop(&mut self) {
        if !self.is_posted {
            let Self { shared, ticket, slot, is_next, .. } = self;
            shared.cancel_wait(&mut shared.state.lock(), *ticket, *slot, *is_next);
        }
    }
}
