//! Transfers: what the program holds of one, and its outcome.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, OnceLock, Weak};
use std::task::{Context as TaskContext, Poll, Waker};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::MAX_NOTIFICATION_LEN;
use super::connection::Connection;
use super::prepared::{Lists, PreparedTransfer};
use super::progress::Shared;
use super::stream_order;
use crate::error::{Error, Kind, Result};
use crate::mem::{StreamRef, Word};

/// Connections that are tried for a transfer which finds each of them failed.
const MAX_CONNECTIONS: usize = 8;

/// The direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TransferOp {
    /// From local memory to the peer's.
    Write,
    /// From the peer's memory to local memory.
    Read,
}

/// What a transfer has beside its lists.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct TransferOptions {
    /// Sent to the peer when all data is in place: after a write it can see the data, after a read
    /// it may change it.
    pub notification: Option<Vec<u8>>,
    /// The transfer fails with [`Kind::Timeout`] if it takes longer. Default: no limit but those of
    /// the transport, which gives up after 4.3 s without an answer.
    pub timeout: Option<Duration>,
}

setters! {
    TransferOptions {} optional {
        with_notification => notification: Vec<u8>,
        with_timeout => timeout: Duration,
    }
}

/// The state of a transfer.
#[derive(Clone, Debug)]
pub enum TransferState {
    /// It goes on.
    InProgress,
    /// All data is in place, and the notification has been delivered to the peer's agent.
    Done,
    /// It has ended without success; nothing of it is written any more. Some of the data may have
    /// been.
    Failed(Error),
}

/// A transfer that was posted. Dropping it does not end it.
///
/// It is a future as well: it is polled again when the transfer has ended, by whatever executor.
#[derive(Clone)]
pub struct Transfer {
    agent: Arc<Shared>,
    op: TransferOp,
    bytes: u64,
    end: Arc<End>,
    /// What is worked on. Not kept alive from here: when the end is known, the memory is free.
    active: Weak<Active>,
}

impl std::fmt::Debug for Transfer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { op, bytes, end, .. } = self;
        write!(f, "Transfer({op:?} of {bytes} bytes, {:?})", end.outcome)
    }
}

/// The end of a transfer, and who waits for it.
#[derive(Default)]
pub(super) struct End {
    outcome: OnceLock<Result<()>>,
    waker: Mutex<Option<Waker>>,
    /// Words that streams wait for.
    words: Mutex<Vec<Word>>,
}

impl End {
    pub(super) fn set(&self, outcome: Result<()>) {
        let _ = self.outcome.set(outcome);
        // Words that come later find the outcome.
        self.words.lock().drain(..).for_each(|word| stream_order::release(&word));
    }

    /// Releases the word when it has ended, which may be now.
    fn release_at_end(&self, word: Word) {
        let mut words = self.words.lock();
        match self.outcome.get() {
            None => words.push(word),
            Some(_) => stream_order::release(&word),
        }
    }

    /// Wakes the task that waits for it.
    pub(super) fn wake(&self) {
        let waker = self.waker.lock().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// A transfer, from its posting to its end.
pub(super) struct Active {
    pub number: u64,
    pub op: TransferOp,
    pub lists: Arc<Lists>,
    pub notification: Option<Box<[u8]>>,
    pub deadline: Option<Instant>,
    pub progress: Mutex<Progress>,
    /// The connection that works on it; another one after it was posted again.
    pub connection: Mutex<Option<Arc<Connection>>>,
    pub end: Arc<End>,
}

/// How far it is.
#[derive(Debug, Default)]
pub(super) struct Progress {
    /// The next piece to post.
    pub next: usize,
    /// Entries of lanes that are not complete.
    pub outstanding: usize,
    /// How many bytes of the notification were posted; `None` before its first message.
    pub notified: Option<usize>,
    /// Since when it has been waiting for the peer's memory to be mapped.
    pub mapping_since: Option<Instant>,
    /// Why nothing more is posted.
    pub cancelled: Option<Error>,
}

impl Active {
    /// Whether the whole notification was posted, or there is none.
    pub(super) fn is_notified(&self, progress: &Progress) -> bool {
        match &self.notification {
            Some(bytes) => progress.notified == Some(bytes.len()),
            None => true,
        }
    }
}

pub(super) fn post(
    agent: &Arc<Shared>,
    op: TransferOp,
    prepared: &PreparedTransfer,
    options: TransferOptions,
) -> Result<Transfer> {
    let (transfer, active) = create(agent, op, prepared, options)?;
    start(agent, active)?;
    Ok(transfer)
}

pub(super) fn post_on_stream(
    agent: &Arc<Shared>,
    stream: StreamRef<'_>,
    op: TransferOp,
    prepared: &PreparedTransfer,
    options: TransferOptions,
) -> Result<Transfer> {
    let (transfer, active) = create(agent, op, prepared, options)?;
    stream_order::post(agent, stream, active)?;
    Ok(transfer)
}

fn create(
    agent: &Arc<Shared>,
    op: TransferOp,
    prepared: &PreparedTransfer,
    options: TransferOptions,
) -> Result<(Transfer, Arc<Active>)> {
    let lists = &prepared.0;
    let wrong = |why: String| Error::new(Kind::InvalidArgument, "post a transfer").why(why);
    if !lists.peer.belongs_to(agent) {
        return Err(wrong("the lists were prepared by another agent".into()));
    }
    if let Some(bytes) = &options.notification
        && bytes.len() > MAX_NOTIFICATION_LEN
    {
        return Err(wrong(format!(
            "the notification has {} bytes, more than {MAX_NOTIFICATION_LEN}",
            bytes.len()
        )));
    }
    let end = Arc::new(End::default());
    let active = Arc::new(Active {
        number: agent.next_number(),
        op,
        lists: lists.clone(),
        notification: options.notification.map(Vec::into_boxed_slice),
        deadline: options.timeout.and_then(|timeout| Instant::now().checked_add(timeout)),
        progress: Mutex::default(),
        connection: Mutex::new(None),
        end: end.clone(),
    });
    let (bytes, weak) = (lists.bytes, Arc::downgrade(&active));
    agent.add_deadline(&active);
    Ok((Transfer { agent: agent.clone(), op, bytes, end, active: weak }, active))
}

/// Gives a transfer to the connection to its peer.
pub(super) fn start(agent: &Arc<Shared>, mut transfer: Arc<Active>) -> Result<()> {
    let peer = transfer.lists.peer.clone();
    let mut cause = None;
    for _ in 0..MAX_CONNECTIONS {
        let connection = peer.connection(agent)?;
        match connection.post(agent, transfer) {
            Ok(()) => return Ok(()),
            // It failed between the two calls.
            Err(back) => (transfer, cause) = (back, connection.cause()),
        }
    }
    Err(cause.unwrap_or_else(|| {
        Error::new(Kind::PeerLost, "post a transfer")
            .why(format!("connections to peer {:?} fail as soon as they are made", peer.name()))
            .fix("see the output of the peer")
    }))
}

impl Transfer {
    /// Its state now. Also makes progress, so that a loop which asks needs no other thread.
    pub fn state(&self) -> TransferState {
        if self.end.outcome.get().is_none() {
            self.agent.poll();
        }
        match self.end.outcome.get() {
            None => TransferState::InProgress,
            Some(Ok(())) => TransferState::Done,
            Some(Err(error)) => TransferState::Failed(error.clone()),
        }
    }

    /// Whether it has ended, with success or not.
    pub fn is_ended(&self) -> bool {
        !matches!(self.state(), TransferState::InProgress)
    }

    /// Waits until it is done.
    ///
    /// # Errors
    /// [`Kind::Timeout`] if it is still in progress after `timeout`: it goes on. Else why it
    /// failed.
    pub fn wait(&self, timeout: Duration) -> Result<()> {
        let deadline = Instant::now().checked_add(timeout);
        match self.agent.wait(deadline, || self.end.outcome.get().cloned())? {
            Some(outcome) => outcome,
            None => Err(Error::new(Kind::Timeout, "wait for a transfer")
                .why(format!("it is still in progress after {} s", timeout.as_secs_f64()))
                .fix("wait longer, or cancel it")),
        }
    }

    /// Makes a stream wait: the work behind this point starts when the transfer has ended, with
    /// success or not. Does not wait here; look at the [`state`](Self::state) when the stream has
    /// passed.
    ///
    /// The transfer fails with [`Kind::Timeout`] if it has no deadline and takes 30 s from now.
    /// This call maps the peer's memory, if need be: that may take some milliseconds the first
    /// time.
    ///
    /// While the stream waits, calls of CUDA that wait for the device may never return: `cudaFree`,
    /// or the first launch of a kernel, which loads it.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] if the stream is being captured into a graph, or its device cannot
    /// wait for words.
    pub fn wait_on_stream<'a>(&self, stream: impl Into<StreamRef<'a>>) -> Result<()> {
        let word = stream_order::wait(&self.agent, stream.into(), self.active.upgrade())?;
        self.end.release_at_end(word);
        // Nothing else may ask for completions.
        self.agent.wake_for_sleeper();
        Ok(())
    }

    /// Cancels it: nothing more of it is posted, and it ends as [`Kind::Cancelled`] once what was
    /// posted before has ended; unless that completes it. Does not wait.
    pub fn cancel(&self) {
        let why = Error::new(Kind::Cancelled, "transfer").why("it was cancelled");
        if let Some(active) = self.active.upgrade() {
            self.agent.cancel(&active, why);
        }
    }

    /// Bytes of its lists.
    pub fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Future for Transfer {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, task: &mut TaskContext<'_>) -> Poll<Self::Output> {
        let ended = || self.end.outcome.get().cloned();
        if ended().is_none() {
            // Before the second look: whoever ends it in between finds the waker.
            *self.end.waker.lock() = Some(task.waker().clone());
            self.agent.wake_for_sleeper();
        }
        ended().map_or(Poll::Pending, Poll::Ready)
    }
}
