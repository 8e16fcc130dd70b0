//! Why a queue pair failed, and who waited then.

use std::fmt;
use std::time::Duration;

use super::ticket::Ticket;
use crate::error::{Error, Kind};
use crate::mlx5::{Queue, Status};

/// A stream that waited for a completion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Waiter {
    /// The stream's name.
    pub stream: String,
    /// What it waited for.
    pub ticket: Ticket,
    /// For how long it has been there; nothing if it had not come to the wait, or nobody looked yet.
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

/// The end of a queue pair: nothing more is taken, and everybody who waited goes on.
#[derive(Clone, Debug)]
pub struct Failure {
    /// What happened, in words.
    pub error: Error,
    /// How the first work that failed ended; nothing if it was not the device that found the failure.
    pub status: Option<Status>,
    /// That work.
    pub ticket: Option<Ticket>,
    /// What the program called it.
    pub id: Option<u64>,
    /// Those who waited for completions of the queue pair when the failure was noticed.
    pub waiters: Vec<Waiter>,
}

impl Failure {
    /// Of work that ended badly.
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
        let mut why = format!("{status}: {ticket}, which the program calls {id}");
        add_waiters(&mut why, &waiters);
        let error = Error::new(Kind::StreamFailed, what).why(why).fix(advice(status));
        Self { error, status: Some(status), ticket: Some(ticket), id: Some(id), waiters }
    }

    /// Of somebody who waited for too long.
    pub(super) fn timed_out(wait_timeout: Duration, waiters: Vec<Waiter>) -> Self {
        let mut why = format!("nothing came in {wait_timeout:.1?}");
        add_waiters(&mut why, &waiters);
        let error = Error::new(Kind::Timeout, "wait for a completion on a stream")
            .why(why)
            .fix("see whether the peer lives and posts what is waited for, or have more patience");
        Self { error, status: None, ticket: None, id: None, waiters }
    }

    /// Of somebody who ended it, or of a device that did without a word.
    pub(super) fn aborted(why: &'static str, waiters: Vec<Waiter>) -> Self {
        let mut text = why.to_owned();
        add_waiters(&mut text, &waiters);
        let error = Error::new(Kind::StreamFailed, "go on").why(text).fix("connect a new one");
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
        Status::RetryExceeded => "see whether the peer lives; then connect new queue pairs",
        Status::RnrRetryExceeded => "let the peer post receives in time; then connect new ones",
        Status::RemoteAccess | Status::RemoteInvalidRequest => {
            "see that the peer's memory is registered for it; then connect new queue pairs"
        }
        Status::LocalProtection | Status::LocalAccess | Status::LocalLength => {
            "see that the memory is registered and long enough; then connect new queue pairs"
        }
        _ => "connect new queue pairs",
    }
}
