//! Work and waits that are ready, and that no stream has been told of.

use std::sync::Arc;

use super::queue::Shared;
use super::ticket::Ticket;
use super::waits::ProgressMarker;
use crate::error::{Error, Kind, Result};
use crate::mem::Stream;

/// Refuses a stream that cannot drive this queue pair.
pub(super) fn check_stream(shared: &Shared, stream: &Stream) -> Result<()> {
    let refused = |kind, why: String| {
        let what = format!("use queue pair {:#x} on a stream", shared.qp.number());
        Error::new(kind, what).on(stream.label()).why(why)
    };
    if *stream.device() != shared.device {
        let why = format!("its queues lie where {} reaches them", shared.device.label());
        return Err(refused(Kind::InvalidArgument, why).fix("make a queue pair for that device"));
    }
    if stream.is_capturing() {
        let why = "a graph would ring with the same value in each replay".to_owned();
        return Err(refused(Kind::Unsupported, why)
            .fix("use a KernelQp, whose posts a graph replays, or leave it out of the capture"));
    }
    Ok(())
}

/// A request that lies in the send queue; the device knows nothing of it. Dropped, it was never there.
#[derive(Debug)]
#[must_use = "nothing happens until it is posted"]
pub struct Prepared {
    pub(super) shared: Arc<Shared>,
    pub(super) ticket: Ticket,
    pub(super) is_posted: bool,
}

impl Prepared {
    /// What it is called.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Posts it on a stream: the stream rings when it gets there. If the stream refuses, it is dropped.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if one that was prepared before it is neither posted nor dropped, or the stream is of
    /// another device; the failure of the queue pair or of the stream, if one has failed.
    pub fn post(mut self, stream: &Stream) -> Result<Ticket> {
        let shared = self.shared.clone();
        check_stream(&shared, stream)?;
        let state = &mut *shared.state.lock();
        let (before, mut ops) = (state.posted(), std::mem::take(&mut state.scratch));
        ops.clear();
        let posted = shared
            .post(state, self.ticket.number, stream, &mut ops)
            .and_then(|_| stream.batch(&ops));
        ops.clear();
        state.scratch = ops;
        match posted {
            Ok(()) => self.is_posted = true,
            Err(_) => {
                state.unpost_to(before);
                shared.cancel(state, self.ticket.number);
                self.is_posted = true; // there is nothing left to give up
            }
        }
        posted.map(|()| self.ticket)
    }

    /// Posts it from the CPU, now.
    ///
    /// # Errors
    /// [`Kind::Busy`] if a stream has not come to an earlier request.
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

/// A wait for a completion that no stream has been told of. Until it is posted or dropped, the completion's place is
/// kept.
#[derive(Debug)]
#[must_use = "nothing happens until it is posted"]
pub struct PreparedWait {
    pub(super) shared: Arc<Shared>,
    pub(super) ticket: Ticket,
    /// None if it is over already.
    pub(super) slot: Option<u32>,
    /// It is for the next receive: dropped, another will be.
    pub(super) is_next: bool,
    pub(super) is_posted: bool,
}

impl PreparedWait {
    /// What it waits for.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Posts it on a stream: what follows on the stream runs when the work has ended, well or not.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if the request is not posted, or the stream is of another device; the failure of the
    /// stream, if it has failed.
    pub fn post(mut self, stream: &Stream) -> Result<Ticket> {
        let shared = self.shared.clone();
        check_stream(&shared, stream)?;
        let state = &mut *shared.state.lock();
        let mut ops = std::mem::take(&mut state.scratch);
        ops.clear();
        let markers = [ProgressMarker::Word; 2];
        let posted = shared
            .post_wait(state, self.ticket, self.slot, stream, markers, &mut ops)
            .and_then(|()| stream.batch(&ops));
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
