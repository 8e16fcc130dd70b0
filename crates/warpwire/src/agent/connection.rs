//! A connection to a peer that this agent has made: its queue pairs, and the transfers on them.
//!
//! ```text
//! connecting ── hello, welcome ──> ready ── a lane or the peer fails, or it is removed ──> failing
//!     └───────────── cannot connect ─────────────> closed <── nothing is in flight any more ──┘
//! ```
//!
//! # Invariants
//! 1. A transfer is reported as failed only in `closed`, or when none of its work is outstanding:
//!    nothing of it is written afterwards. Before that, the lanes are drained (their work completes
//!    or is flushed), and the peer has closed its end, which it does after it has destroyed its
//!    queue pairs.
//! 2. If the peer refused access to memory, the work behind it on the lane was not executed, and
//!    that of other lanes completes. What is left is posted again, on a new connection.
//! 3. Transfers are told of their outcome without a lock held: wakers are foreign code.

use std::cmp;
use std::collections::{BTreeMap, VecDeque};
use std::net::Shutdown;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::control::{self, Hello, LaneEndpoint};
use super::lanes::{Lane, Outcome};
use super::peer::Peer;
use super::progress::Shared;
use super::transfer::{self, Active, Progress};
use crate::error::{Error, Kind, Result};
use crate::verbs::bootstrap::Bootstrap;
use crate::verbs::{Completion, ListPost, PostError, QpEndpoint, Status};

/// How long a failing connection waits for its lanes to drain, and then for the peer.
const DRAIN_LIMIT: Duration = Duration::from_secs(1);
/// How long cancelled work may take to complete before the connection is ended.
const CANCEL_LIMIT: Duration = Duration::from_secs(1);
/// How long a list waits for the peer's memory to be mapped; then it is posted piece by piece.
const MAPPING_LIMIT: Duration = Duration::from_millis(500);

const CONNECTING: u8 = 0;
const READY: u8 = 1;
const FAILING: u8 = 2;
const CLOSED: u8 = 3;

pub(super) struct Connection {
    pub slot: u32,
    peer: Peer,
    /// As in `State`, for those who only ask.
    phase: AtomicU8,
    /// The next transfer waits for the peer's memory to be mapped.
    is_mapping: AtomicBool,
    state: Mutex<State>,
}

struct State {
    lanes: Vec<Lane>,
    /// Transfers with something left to post, in order.
    queue: VecDeque<Arc<Active>>,
    /// All transfers that have not ended, by number.
    transfers: BTreeMap<u64, Arc<Active>>,
    control: Option<Bootstrap>,
    failure: Option<Failure>,
    /// Why it failed, or was closed.
    cause: Option<Error>,
    /// When the oldest cancelled transfer with outstanding work was cancelled.
    cancelled_at: Option<Instant>,
}

struct Failure {
    /// The transfer whose fault it is: the others are posted again.
    culprit: Option<u64>,
    since: Instant,
    drained: Option<Instant>,
}

/// Transfers whose outcome is known, to be told without a lock held.
pub(super) type Ended = Vec<(Arc<Active>, Result<()>)>;

impl Connection {
    /// Creates its queue pairs and begins to connect, in a thread of its own.
    pub(super) fn start(agent: &Arc<Shared>, peer: &Peer) -> Result<Arc<Self>> {
        let metadata = peer.metadata();
        if metadata.rails != agent.rails.len() {
            let why = format!(
                "it has {} devices, and this agent has {}",
                metadata.rails,
                agent.rails.len()
            );
            return Err(Error::new(Kind::Unsupported, format!("connect to {:?}", peer.name()))
                .why(why)
                .fix("open both agents with as many rails, or engines"));
        }
        let slot = agent.next_slot();
        let mut lanes = Vec::new();
        for index in 0..agent.lanes_per_connection() {
            let rail = index % agent.rails.len();
            let qp = agent.rails[rail].create_qp(&agent.options)?;
            lanes.push(Lane::new(rail, qp, slot, index, agent.options.send_depth));
        }
        let endpoints = lanes
            .iter()
            .map(|lane| LaneEndpoint { rail: lane.rail, endpoint: lane.qp.endpoint() })
            .collect();
        let hello = Hello {
            token: metadata.token.clone(),
            to: metadata.incarnation,
            name: agent.name.clone(),
            incarnation: agent.incarnation,
            lanes: endpoints,
        };
        let state = State {
            lanes,
            queue: VecDeque::new(),
            transfers: BTreeMap::new(),
            control: None,
            failure: None,
            cause: None,
            cancelled_at: None,
        };
        let connection = Arc::new(Self {
            slot,
            peer: peer.clone(),
            phase: AtomicU8::new(CONNECTING),
            is_mapping: AtomicBool::new(false),
            state: Mutex::new(state),
        });
        agent.connections.lock().insert(slot, connection.clone());
        let (address, timeout) = (metadata.address, agent.options.connect_timeout);
        let (this, weak) = (connection.clone(), Arc::downgrade(agent));
        let connect = move || {
            let result = control::say_hello(address, &hello, timeout);
            if let Some(agent) = weak.upgrade() {
                this.connected(&agent, result);
            }
        };
        let thread = std::thread::Builder::new().name("warpwire-connect".into()).spawn(connect);
        if let Err(why) = thread {
            agent.connections.lock().remove(&slot);
            return Err(Error::os("start a thread that connects", &why));
        }
        Ok(connection)
    }

    pub(super) fn is_ready(&self) -> bool {
        self.phase.load(Ordering::Acquire) == READY
    }

    /// Whether transfers can be posted: it is, or will be, ready.
    pub(super) fn is_usable(&self) -> bool {
        self.phase.load(Ordering::Acquire) <= READY
    }

    pub(super) fn is_failing(&self) -> bool {
        self.phase.load(Ordering::Acquire) == FAILING
    }

    /// Whether time has something to do here: see [`tick`](Self::tick).
    pub(super) fn needs_tick(&self) -> bool {
        self.needs_tick_soon() || self.state.lock().cancelled_at.is_some()
    }

    /// The same, of what a completion may have begun.
    pub(super) fn needs_tick_soon(&self) -> bool {
        self.is_failing() || self.is_mapping.load(Ordering::Acquire)
    }

    pub(super) fn path(&self) -> Vec<String> {
        let state = self.state.lock();
        let path = |lane: &Lane| match lane.qp.path() {
            Ok(path) => path.to_string(),
            Err(error) => error.to_string(),
        };
        state.lanes.iter().filter(|_| self.is_ready()).map(path).collect()
    }

    /// Whether it is being made, or the peer's memory of a transfer is being mapped; asks for that.
    pub(super) fn is_preparing(&self, transfer: &Active) -> bool {
        if !self.is_ready() {
            return self.is_usable();
        }
        let state = self.state.lock();
        let lists = transfer.lists.all_range_lists(transfer.op);
        state.lanes.first().is_some_and(|lane| lists.iter().any(|list| lane.qp.is_mapping(list)))
    }

    fn set_phase(&self, phase: u8) {
        self.phase.store(phase, Ordering::Release);
    }

    fn connected(&self, agent: &Arc<Shared>, result: Result<(Bootstrap, Vec<QpEndpoint>)>) {
        let mut ended = Ended::new();
        let mut state = self.state.lock();
        if self.phase.load(Ordering::Acquire) != CONNECTING {
            // It was removed meanwhile; dropping the control connection ends the peer's side.
            return;
        }
        let connected = result.and_then(|(control, endpoints)| {
            let mut lanes = state.lanes.iter().zip(&endpoints);
            lanes
                .try_for_each(|(lane, endpoint)| lane.qp.connect(endpoint))
                .map_err(|error| connect_failure(error, self.peer.name()))?;
            Ok(control)
        });
        match connected {
            Ok(control) => {
                state.control = Some(control);
                self.set_phase(READY);
                self.pump(&mut state, &mut ended);
            }
            Err(error) => {
                tracing::debug!(peer = self.peer.name(), %error, "cannot connect to an agent");
                self.close(agent, &mut state, &error, &mut ended);
            }
        }
        drop(state);
        agent.end(ended);
        agent.wake.raise();
    }

    /// Adds a transfer and posts what there is room for.
    ///
    /// # Errors
    /// The transfer, if the connection has failed.
    pub(super) fn post(
        self: &Arc<Self>,
        agent: &Arc<Shared>,
        transfer: Arc<Active>,
    ) -> std::result::Result<(), Arc<Active>> {
        let mut ended = Ended::new();
        {
            let mut state = self.state.lock();
            if !self.is_usable() {
                return Err(transfer);
            }
            *transfer.connection.lock() = Some(self.clone());
            state.transfers.insert(transfer.number, transfer.clone());
            state.queue.push_back(transfer);
            self.pump(&mut state, &mut ended);
        }
        if self.needs_tick_soon() {
            agent.wake.raise();
        }
        agent.end(ended);
        Ok(())
    }

    /// Why it failed, or was closed, if so.
    pub(super) fn cause(&self) -> Option<Error> {
        self.state.lock().cause.clone()
    }

    /// Posts what there is room for.
    fn pump(&self, state: &mut State, ended: &mut Ended) {
        if !self.is_ready() {
            return;
        }
        self.is_mapping.store(false, Ordering::Release);
        while let Some(transfer) = state.queue.front().cloned() {
            match post_some(&mut state.lanes, &transfer) {
                Ok(Posted::All) => {
                    state.queue.pop_front();
                    state.end_if_done(&transfer, ended);
                }
                Ok(Posted::NoRoom) => return,
                Ok(Posted::Mapping) => {
                    self.is_mapping.store(true, Ordering::Release);
                    return;
                }
                Err(why) => {
                    let error = Error::from(why).during("post a transfer");
                    self.begin_failure(state, error, Some(transfer.number));
                    return;
                }
            }
        }
    }

    /// Takes note of completions of one lane.
    pub(super) fn complete(&self, lane: usize, completion: &Completion, ended: &mut Ended) {
        let mut state = self.state.lock();
        let Some(lane) = state.lanes.get_mut(lane) else { return };
        match lane.complete(completion) {
            Outcome::Done(transfer) => {
                let ready_to_notify = {
                    let mut progress = transfer.progress.lock();
                    progress.outstanding -= 1;
                    let all_posted = progress.next == transfer.lists.pieces.len();
                    progress.outstanding == 0 && all_posted && !transfer.is_notified(&progress)
                };
                // With several lanes, a notification waits for all data.
                let is_queued =
                    state.queue.front().is_some_and(|front| Arc::ptr_eq(front, &transfer));
                if ready_to_notify && !is_queued && state.transfers.contains_key(&transfer.number) {
                    state.queue.push_front(transfer.clone());
                }
                state.end_if_done(&transfer, ended);
                self.pump(&mut state, ended);
            }
            Outcome::Failed(culprit) => {
                let culprit = culprit.filter(|_| is_refusal(completion.status));
                let error = failure(completion, self.peer.name());
                self.begin_failure(&mut state, error, culprit.map(|transfer| transfer.number));
            }
            Outcome::Nothing => {}
        }
    }

    /// Ends all work. Transfers are told when nothing is in flight any more: see
    /// [`tick`](Self::tick).
    pub(super) fn fail(&self, error: Error) {
        let mut state = self.state.lock();
        self.begin_failure(&mut state, error, None);
    }

    fn begin_failure(&self, state: &mut State, error: Error, culprit: Option<u64>) {
        if self.phase.load(Ordering::Acquire) >= FAILING {
            // A second failure: what one transfer caused may now be everybody's.
            if let (Some(failure), None) = (&mut state.failure, culprit) {
                failure.culprit = None;
                state.lanes.iter_mut().filter(|lane| !lane.failed).for_each(Lane::flush);
            }
            return;
        }
        tracing::debug!(peer = self.peer.name(), %error, "a connection to an agent fails");
        if culprit.is_none() {
            state.lanes.iter_mut().filter(|lane| !lane.failed).for_each(Lane::flush);
        }
        state.cause = Some(error);
        state.failure = Some(Failure { culprit, since: Instant::now(), drained: None });
        self.set_phase(FAILING);
    }

    /// Reads from the peer, which says nothing more once it is connected: its end is what there is
    /// to see.
    pub(super) fn check_control(&self) {
        let mut state = self.state.lock();
        let Some(control) = &mut state.control else { return };
        let Err(error) = control.try_recv::<serde_json::Value>() else { return };
        state.control = None;
        if self.is_ready() {
            let why = format!("peer {:?} has closed the connection, or has died", self.peer.name());
            let lost = Error::new(Kind::PeerLost, "transfer")
                .why(why)
                .fix("see the output of the peer; add its metadata again when it is back");
            tracing::debug!(%error, "the control connection has ended");
            self.begin_failure(&mut state, lost, None);
        }
    }

    /// The descriptor of the control connection, for `poll`.
    pub(super) fn with_control<T>(&self, use_it: impl FnOnce(&Bootstrap) -> T) -> Option<T> {
        self.state.lock().control.as_ref().map(use_it)
    }

    /// What time does: posts transfers whose memory is mapped by now, and ends connections whose
    /// failure is complete.
    pub(super) fn tick(&self, agent: &Arc<Shared>, now: Instant) {
        let mut ended = Ended::new();
        let mut again = Vec::new();
        {
            let mut state = self.state.lock();
            if self.is_ready() {
                let late = |at: Instant| now.saturating_duration_since(at) > CANCEL_LIMIT;
                if state.cancelled_at.is_some_and(late) {
                    let why = "cancelled work did not complete, so the connection was ended";
                    let error = Error::new(Kind::PeerLost, "transfer").why(why);
                    self.begin_failure(&mut state, error, None);
                } else if self.is_mapping.load(Ordering::Acquire) {
                    self.pump(&mut state, &mut ended);
                }
            }
            if !self.is_failing() || !state.is_quiet(now) {
                drop(state);
                agent.end(ended);
                return;
            }
            let Some(failure) = state.failure.take() else { return };
            let Some(cause) = state.cause.clone() else { return };
            if let Some(culprit) = failure.culprit {
                again = state.take_restartable(culprit);
            }
            self.close(agent, &mut state, &cause, &mut ended);
        }
        agent.end(ended);
        for transfer in again {
            *transfer.progress.lock() = Progress::default();
            if let Err(error) = transfer::start(agent, transfer.clone()) {
                agent.end(vec![(transfer, Err(error))]);
            }
        }
    }

    /// Destroys the queue pairs; all transfers that are left have failed.
    fn close(&self, agent: &Arc<Shared>, state: &mut State, error: &Error, ended: &mut Ended) {
        state.cause.get_or_insert_with(|| error.clone());
        self.set_phase(CLOSED);
        for lane in state.lanes.drain(..) {
            agent.rails[lane.rail].destroyed_qps(1);
        }
        state.control = None;
        state.queue.clear();
        for transfer in std::mem::take(&mut state.transfers).into_values() {
            let cancelled = transfer.progress.lock().cancelled.clone();
            ended.push((transfer, Err(cancelled.unwrap_or_else(|| error.clone()))));
        }
        agent.connections.lock().remove(&self.slot);
    }

    /// Ends everything at once: the agent is closed.
    pub(super) fn abandon(&self, agent: &Arc<Shared>, error: &Error) -> Ended {
        let mut ended = Ended::new();
        self.close(agent, &mut self.state.lock(), error, &mut ended);
        ended
    }

    /// Posts nothing more of a transfer; it ends when nothing of it is outstanding.
    pub(super) fn cancel(&self, transfer: &Arc<Active>, why: Error) -> Ended {
        let mut ended = Ended::new();
        let mut state = self.state.lock();
        if !state.transfers.contains_key(&transfer.number) {
            return ended;
        }
        let outstanding = {
            let mut progress = transfer.progress.lock();
            progress.cancelled.get_or_insert(why);
            progress.outstanding
        };
        state.queue.retain(|queued| !Arc::ptr_eq(queued, transfer));
        if outstanding == 0 && !self.is_failing() {
            state.end_if_done(transfer, &mut ended);
        } else {
            state.cancelled_at.get_or_insert_with(Instant::now);
        }
        // The next ones have room.
        self.pump(&mut state, &mut ended);
        ended
    }
}

impl State {
    /// Ends a transfer if nothing of it is left to do.
    fn end_if_done(&mut self, transfer: &Arc<Active>, ended: &mut Ended) {
        let progress = transfer.progress.lock();
        let all_posted =
            progress.next == transfer.lists.pieces.len() && transfer.is_notified(&progress);
        if progress.outstanding > 0 || !(all_posted || progress.cancelled.is_some()) {
            return;
        }
        let outcome = match &progress.cancelled {
            Some(why) if !all_posted => Err(why.clone()),
            _ => Ok(()),
        };
        let was_cancelled = progress.cancelled.is_some();
        drop(progress);
        if self.transfers.remove(&transfer.number).is_some() {
            ended.push((transfer.clone(), outcome));
        }
        if was_cancelled {
            let mut others = self.transfers.values();
            let more = others.any(|other| other.progress.lock().cancelled.is_some());
            self.cancelled_at = more.then(Instant::now);
        }
    }

    /// Whether nothing is in flight in either direction, or it has been waited for long enough.
    fn is_quiet(&mut self, now: Instant) -> bool {
        let Some(failure) = &mut self.failure else { return true };
        let late = |since: Instant| now.saturating_duration_since(since) > DRAIN_LIMIT;
        if failure.drained.is_none() {
            let drained = self.lanes.iter().all(Lane::is_drained);
            if !drained && !late(failure.since) {
                return false;
            }
            if !drained && failure.culprit.take().is_some() {
                // Other lanes did not end by themselves.
                self.lanes.iter_mut().filter(|lane| !lane.failed).for_each(Lane::flush);
                failure.since = now;
                return false;
            }
            failure.drained = Some(now);
            if let Some(control) = &self.control {
                let _ = control.stream().shutdown(Shutdown::Write);
            }
        }
        // The peer closes its end when it has destroyed its queue pairs.
        let ended = match &mut self.control {
            Some(control) => control.try_recv::<serde_json::Value>().is_err(),
            None => true,
        };
        ended || failure.drained.is_some_and(late)
    }

    /// Takes the transfers that are to be posted again: those that have nothing to do with the
    /// failure.
    fn take_restartable(&mut self, culprit: u64) -> Vec<Arc<Active>> {
        let all = std::mem::take(&mut self.transfers);
        let (kept, again) = all.into_iter().partition(|(number, transfer)| {
            *number == culprit || transfer.progress.lock().cancelled.is_some()
        });
        self.transfers = kept;
        let again: BTreeMap<u64, Arc<Active>> = again;
        again.into_values().collect()
    }
}

/// What was posted of a transfer.
enum Posted {
    /// All of it; or it has to wait for its data before it is announced.
    All,
    NoRoom,
    /// It waits for the peer's memory to be mapped.
    Mapping,
}

/// Posts the pieces that a GPU can execute as lists. What is left is to be posted piece by piece if
/// the result is `All`.
fn post_lists(
    lanes: &mut [Lane],
    transfer: &Arc<Active>,
    progress: &mut Progress,
) -> Result<Posted, PostError> {
    let lists = &transfer.lists;
    for list in lists.range_lists(transfer.op) {
        match list.part.start.cmp(&progress.next) {
            cmp::Ordering::Less => continue, // posted
            cmp::Ordering::Equal => {}
            // Some of the list before it were posted in another way.
            cmp::Ordering::Greater => break,
        }
        let first_rail = lanes.iter_mut().filter(|lane| lane.rail == 0);
        let Some(lane) = first_rail.max_by_key(|lane| lane.room()) else { break };
        if lane.room() == 0 {
            return Ok(Posted::NoRoom);
        }
        match lane.post_list(transfer, list)? {
            ListPost::Posted => {
                progress.outstanding += 1;
                progress.next = list.part.end;
            }
            ListPost::Mapping if lists.is_long() => {
                let since = *progress.mapping_since.get_or_insert_with(Instant::now);
                if since.elapsed() > MAPPING_LIMIT {
                    break;
                }
                return Ok(Posted::Mapping);
            }
            ListPost::Mapping | ListPost::Refused => break,
        }
    }
    Ok(Posted::All)
}

/// Posts what there is room for.
fn post_some(lanes: &mut [Lane], transfer: &Arc<Active>) -> Result<Posted, PostError> {
    let mut progress = transfer.progress.lock();
    let pieces = transfer.lists.pieces.len();
    match post_lists(lanes, transfer, &mut progress)? {
        Posted::All => {}
        not_yet => return Ok(not_yet),
    }
    while progress.next < pieces {
        let count = lanes.len();
        // Those with the most room first, so that all have work.
        let Some(lane) = lanes.iter_mut().max_by_key(|lane| lane.room()) else {
            return Ok(Posted::All);
        };
        let left = pieces - progress.next;
        let share = if count == 1 { left } else { left.div_ceil(count).min(16) };
        let step = share.min(lane.room());
        if step == 0 {
            return Ok(Posted::NoRoom);
        }
        let range = progress.next..progress.next + step;
        progress.outstanding += lane.post_pieces(transfer, range)?;
        progress.next += step;
    }
    let Some(bytes) = &transfer.notification else { return Ok(Posted::All) };
    if lanes.len() > 1 && progress.outstanding > 0 && progress.notified.is_none() {
        return Ok(Posted::All);
    }
    let from = progress.notified.unwrap_or(0);
    if progress.notified == Some(bytes.len()) {
        return Ok(Posted::All);
    }
    let (next, entries) = lanes[0].post_notification(transfer, bytes, from)?;
    if entries == 0 {
        return Ok(Posted::NoRoom);
    }
    progress.outstanding += entries;
    progress.notified = Some(next);
    Ok(if next == bytes.len() { Posted::All } else { Posted::NoRoom })
}

/// Why queue pairs were not connected after the peer had answered.
#[cold]
fn connect_failure(error: Error, peer: &str) -> Error {
    match error.kind() {
        Kind::Unavailable => Error::new(Kind::PeerLost, "connect to an agent")
            .why(format!("peer {peer:?} has died meanwhile: {error}"))
            .fix("see the output of the peer; add its metadata again when it is back"),
        _ => error,
    }
}

/// Whether the peer refused this work, and nothing else is wrong with the connection.
fn is_refusal(status: Status) -> bool {
    matches!(status, Status::RemoteAccess | Status::LocalProtection)
}

/// Why work failed.
#[cold]
fn failure(completion: &Completion, peer: &str) -> Error {
    let what = "transfer";
    match completion.status {
        Status::RemoteAccess => Error::new(Kind::Stale, what)
            .why(format!("peer {peer:?} does not grant access to this memory any more"))
            .fix("get the peer's metadata again, and prepare the lists with it"),
        Status::LocalProtection => Error::new(Kind::Freed, what)
            .why("local memory was freed, or is not registered for this")
            .fix("keep the memory allocated, and register it for writing if it is read into"),
        Status::RetryExceeded => Error::new(Kind::PeerLost, what)
            .why(format!("peer {peer:?} does not answer"))
            .fix("check that it runs, and the network between"),
        status => Error::new(Kind::PeerLost, what)
            .why(format!("the connection to peer {peer:?} failed: {status:?}")),
    }
}
