//! The simulator's streams: a thread each, which runs operations in order.

use std::any::Any;
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::super::backend::{EventBackend, GraphBackend, StreamBackend};
use super::super::op::{Op, PendingWait};
use super::super::stream::capture_in_progress;
use super::device::SimDevice;
use super::execute::{MOST_BLOCKS, Runner};
use crate::error::{Error, Kind, Result};

pub(super) struct SimStream {
    core: Arc<Core>,
}

pub(super) struct Core {
    pub(super) device: Arc<SimDevice>,
    number: u64,
    queue: Mutex<Queue>,
    arrival: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<Entry>,
    running: bool,
    closed: bool,
    failure: Option<Error>,
    captured: Option<Vec<Op>>,
    blocked: Option<Op>,
}

/// An operation in a queue, with the recording that it makes or waits for.
pub(super) struct Entry {
    pub(super) op: Op,
    pub(super) ticket: u64,
}

impl Entry {
    /// Fixes, when the operation is queued, which recording of an event it means.
    pub(super) fn new(op: Op) -> Self {
        let ticket = match &op {
            Op::Record(event) => sim_event(event).map_or(0, SimEvent::mark),
            Op::Await(event) => sim_event(event).map_or(0, SimEvent::last_mark),
            _ => 0,
        };
        Self { op, ticket }
    }
}

pub(super) fn sim_event(event: &super::super::stream::Event) -> Option<&SimEvent> {
    let any: &dyn Any = &**event.backend();
    any.downcast_ref()
}

impl SimStream {
    pub(super) fn start(device: Arc<SimDevice>, number: u64) -> Result<Self> {
        let core =
            Arc::new(Core { device, number, queue: Mutex::default(), arrival: Condvar::new() });
        let worker = core.clone();
        std::thread::Builder::new()
            .name(format!("sim stream {number}"))
            .spawn(move || worker.run())
            .map_err(|e| Error::os("start a simulated stream's thread", &e))?;
        core.device.count_stream(true);
        Ok(Self { core })
    }
}

impl Drop for SimStream {
    fn drop(&mut self) {
        self.core.queue.lock().closed = true;
        self.core.arrival.notify_one();
    }
}

impl Core {
    /// The stream's thread: until the stream is dropped and its work done.
    fn run(self: Arc<Self>) {
        while let Some(entry) = self.next() {
            let outcome = Runner::new(&self).run(&entry);
            if let (Err(error), Op::Record(event)) = (&outcome, &entry.op) {
                fail_event(event, error);
            }
            // What the operation used is let go before the stream can look idle.
            drop(entry);
            self.finish(outcome);
        }
        self.device.count_stream(false);
    }

    fn next(&self) -> Option<Entry> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(entry) = queue.waiting.pop_front() {
                queue.running = true;
                return Some(entry);
            }
            if queue.closed {
                return None;
            }
            self.arrival.wait(&mut queue);
        }
    }

    fn finish(&self, outcome: Result<()>) {
        let mut queue = self.queue.lock();
        queue.running = false;
        let Err(error) = outcome else { return };
        let dropped = std::mem::take(&mut queue.waiting);
        queue.failure = Some(error.clone());
        drop(queue);
        for entry in &dropped {
            if let Op::Record(event) = &entry.op {
                fail_event(event, &error);
            }
        }
    }

    /// Notes the wait that the stream is in, for whoever asks what it is blocked on.
    pub(super) fn set_blocked(&self, op: Option<Op>) {
        self.queue.lock().blocked = op;
    }

    pub(super) fn label(&self) -> String {
        format!("{} stream {}", self.device.label(), self.number)
    }
}

fn fail_event(event: &super::super::stream::Event, error: &Error) {
    if let Some(event) = sim_event(event) {
        event.fail(error);
    }
}

impl StreamBackend for SimStream {
    fn number(&self) -> u64 {
        self.core.number
    }

    fn enqueue(&self, op: Op) -> Result<()> {
        if let Op::Launch(launch) = &op
            && launch.grid > MOST_BLOCKS
        {
            let what = format!("launch {} blocks", launch.grid);
            return Err(Error::new(Kind::InvalidArgument, what)
                .on(self.core.label())
                .why(format!("the simulator runs at most {MOST_BLOCKS} blocks at once")));
        }
        let mut queue = self.core.queue.lock();
        if let Some(failure) = &queue.failure {
            return Err(failure.clone());
        }
        self.core.device.check_alive()?;
        if let Some(captured) = &mut queue.captured {
            captured.push(op);
            return Ok(());
        }
        queue.waiting.push_back(Entry::new(op));
        drop(queue);
        self.core.arrival.notify_one();
        Ok(())
    }

    fn is_idle(&self) -> Result<bool> {
        let queue = self.core.queue.lock();
        if let Some(failure) = &queue.failure {
            return Err(failure.clone());
        }
        if queue.captured.is_some() {
            return Err(capture_in_progress("ask whether it is idle", self.core.label()));
        }
        Ok(queue.waiting.is_empty() && !queue.running)
    }

    fn blocked_on(&self) -> Option<PendingWait> {
        let blocked = self.core.queue.lock().blocked.clone()?;
        PendingWait::first_in(blocked.mem_ops())
    }

    fn begin_capture(&self) -> Result<()> {
        let mut queue = self.core.queue.lock();
        if let Some(failure) = &queue.failure {
            return Err(failure.clone());
        }
        if queue.captured.is_some() {
            return Err(capture_in_progress("begin a capture", self.core.label()));
        }
        queue.captured = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&self) -> Result<Arc<dyn GraphBackend>> {
        let captured = self.core.queue.lock().captured.take();
        let ops = captured.unwrap_or_default();
        Ok(Arc::new(SimGraph { ops }))
    }
}

/// Captured operations.
pub(super) struct SimGraph {
    pub(super) ops: Vec<Op>,
}

impl GraphBackend for SimGraph {
    fn operations(&self) -> usize {
        self.ops.len()
    }
}

/// An event: recordings are numbered as they are queued, and reached in that order.
pub(super) struct SimEvent {
    device: Arc<SimDevice>,
    state: Mutex<EventState>,
}

#[derive(Default)]
struct EventState {
    marked: u64,
    reached: u64,
    at: Option<Instant>,
    failure: Option<Error>,
}

impl SimEvent {
    pub(super) fn new(device: Arc<SimDevice>) -> Self {
        device.count_event(true);
        Self { device, state: Mutex::default() }
    }

    pub(super) fn mark(&self) -> u64 {
        let mut state = self.state.lock();
        state.marked += 1;
        state.failure = None;
        state.marked
    }

    pub(super) fn last_mark(&self) -> u64 {
        self.state.lock().marked
    }

    pub(super) fn reach(&self, ticket: u64) {
        let mut state = self.state.lock();
        if ticket > state.reached {
            state.reached = ticket;
            state.at = Some(Instant::now());
        }
    }

    pub(super) fn has_reached(&self, ticket: u64) -> Result<bool> {
        let state = self.state.lock();
        match &state.failure {
            Some(failure) => Err(failure.clone()),
            None => Ok(state.reached >= ticket),
        }
    }

    fn fail(&self, error: &Error) {
        self.state.lock().failure = Some(error.clone());
    }

    fn moment(&self) -> Result<Instant> {
        let state = self.state.lock();
        let reached = state.reached == state.marked;
        state.at.filter(|_| reached).ok_or_else(|| {
            Error::new(Kind::Busy, "take the time of an event")
                .on(self.device.label())
                .why("it has not been recorded and reached")
                .fix("record it and synchronize first")
        })
    }
}

impl Drop for SimEvent {
    fn drop(&mut self) {
        self.device.count_event(false);
    }
}

impl EventBackend for SimEvent {
    fn is_reached(&self) -> Result<bool> {
        let last = self.last_mark();
        self.has_reached(last)
    }

    fn elapsed_since(&self, earlier: &dyn EventBackend) -> Result<Duration> {
        let earlier: &dyn Any = earlier;
        let Some(earlier) = earlier.downcast_ref::<SimEvent>() else {
            return Err(Error::new(Kind::InvalidArgument, "compare two events")
                .on(self.device.label())
                .why("the other one belongs to another backend"));
        };
        Ok(self.moment()?.saturating_duration_since(earlier.moment()?))
    }
}
