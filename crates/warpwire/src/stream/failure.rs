//! Why a queue pair failed, and which streams were waiting then.

use std::fmt;
use std::time::Duration;

use super::ticket::Ticket;
use crate::error::{Error, Kind};
use crate::mlx5::{Queue, Status};

/// A stream that was waiting for a completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// The device and number of the stream.
    pub stream: String,
    /// The request or receive that it waited for.
    pub ticket: Ticket,
    /// How long it had waited; `None` if it had not reached the wait when last checked.
    pub waited: Option<Duration>,
}

impl fmt::Display for Waiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} waits for {}", self.stream, self.ticket)?;
        match self.waited {
            Some(waited) => write!(f, " since {waited:.1?}"),
            None => Ok(()),
        }
    }
}

/// The failure of a queue pair: it accepts no more work, and all waiting streams resume.
#[derive(Clone, Debug)]
pub struct Failure {
    /// The failure as an error with its description.
    pub error: Error,
    /// Status of the first work that failed; `None` if the failure was not reported by the device.
    pub status: Option<Status>,
    /// The request or receive that failed first.
    pub ticket: Option<Ticket>,
    /// The `id` of that request or receive.
    pub id: Option<u64>,
    /// The streams that were waiting when the failure was detected.
    pub waiters: Vec<Waiter>,
}

impl Failure {
    /// Work completed with an error status.
    pub(super) fn from_status(
        ticket: Ticket,
        id: u64,
        status: Status,
        waiters: Vec<Waiter>,
    ) -> Self {
        let what = match ticket.queue {
            Queue::Send => "finish a request",
            Queue::Receive => "finish a receive",
        };
        let mut why = format!("{status}: {ticket}, id {id}");
        add_waiters(&mut why, &waiters);
        let error = Error::new(Kind::StreamFailed, what).why(why).fix(advice(status));
        Self { error, status: Some(status), ticket: Some(ticket), id: Some(id), waiters }
    }

    /// A wait exceeded its timeout.
    pub(super) fn timed_out(wait_timeout: Duration, waiters: Vec<Waiter>) -> Self {
        let mut why = format!("no completion within {wait_timeout:.1?}");
        add_waiters(&mut why, &waiters);
        let error = Error::new(Kind::Timeout, "wait for a completion on a stream")
            .why(why)
            .fix("check that the peer is alive and posts matching work, or raise wait_timeout");
        Self { error, status: None, ticket: None, id: None, waiters }
    }

    /// The application aborted the queue pair, or the device failed it without a status.
    pub(super) fn aborted(why: &'static str, waiters: Vec<Waiter>) -> Self {
        let mut text = why.to_owned();
        add_waiters(&mut text, &waiters);
        let error = Error::new(Kind::StreamFailed, "use a stream queue pair")
            .why(text)
            .fix("connect new queue pairs");
        Self { error, status: None, ticket: None, id: None, waiters }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.error.fmt(f)
    }
}

fn add_waiters(why: &mut String, waiters: &[Waiter]) {
    for waiter in waiters.iter().take(4) {
        *why += "; ";
        *why += &waiter.to_string();
    }
    if waiters.len() > 4 {
        *why += &format!("; and {} more", waiters.len() - 4);
    }
}

fn advice(status: Status) -> &'static str {
    match status {
        Status::RetryExceeded => "check that the peer is alive; then connect new queue pairs",
        Status::RnrRetryExceeded => {
            "have the peer post receives in time; then connect new queue pairs"
        }
        Status::RemoteAccess | Status::RemoteInvalidRequest => {
            "check the registration of the peer's memory; then connect new queue pairs"
        }
        Status::LocalProtection | Status::LocalAccess | Status::LocalLength => {
            "check that the memory is registered and long enough; then connect new queue pairs"
        }
        _ => "connect new queue pairs",
    }
}
