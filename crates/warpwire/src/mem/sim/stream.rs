//! The simulator's streams: a thread each, which runs operations in order.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
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

/// An operation in a queue, with the recording of an event that it makes or waits for.
pub(super) struct Entry {
    pub(super) op: Op,
    pub(super) mark: Option<Arc<Mark>>,
}

impl Entry {
    /// Fixes, when the operation is queued, which recording of an event it means.
    pub(super) fn new(op: Op) -> Self {
        let mark = match &op {
            Op::Record(event) => sim_event(event).map(SimEvent::mark),
            Op::Await(event) => sim_event(event).and_then(SimEvent::last_mark),
            _ => None,
        };
        Self { op, mark }
    }

    /// Tells those who wait for the recording that it will not come.
    fn fail(&self, error: &Error) {
        if let (Op::Record(_), Some(mark)) = (&self.op, &self.mark) {
            mark.fail(error);
        }
    }
}

fn sim_event(event: &super::super::stream::Event) -> Option<&SimEvent> {
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
            // Listeners and closures are anybody's code: their panics fail the stream, not its thread.
            let run = || {
                let outcome = Runner::new(&self).run(&entry);
                outcome.inspect_err(|error| entry.fail(error))
            };
            let outcome = self.guarded(run);
            // What the operation used is let go before the stream can look idle.
            let dropped = self.guarded(move || {
                drop(entry);
                Ok(())
            });
            self.finish(outcome.and(dropped));
        }
        self.device.count_stream(false);
    }

    fn guarded(&self, run: impl FnOnce() -> Result<()>) -> Result<()> {
        catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
            Err(Error::new(Kind::StreamFailed, "finish an operation")
                .on(self.label())
                .why("code that it called panicked"))
        })
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
        dropped.iter().for_each(|entry| entry.fail(&error));
        let _ = self.guarded(move || {
            drop(dropped);
            Ok(())
        });
    }

    /// Notes the wait that the stream is in, for whoever asks what it is blocked on.
    pub(super) fn set_blocked(&self, op: Option<Op>) {
        self.queue.lock().blocked = op;
    }

    pub(super) fn label(&self) -> String {
        format!("{} stream {}", self.device.label(), self.number)
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

/// One recording of an event.
#[derive(Default)]
pub(super) struct Mark(Mutex<MarkState>);

#[derive(Default)]
struct MarkState {
    reached: Option<Instant>,
    failure: Option<Error>,
}

impl Mark {
    pub(super) fn reach(&self) {
        self.0.lock().reached = Some(Instant::now());
    }

    pub(super) fn is_reached(&self) -> Result<bool> {
        let state = self.0.lock();
        match &state.failure {
            Some(failure) => Err(failure.clone()),
            None => Ok(state.reached.is_some()),
        }
    }

    fn fail(&self, error: &Error) {
        self.0.lock().failure = Some(error.clone());
    }
}

/// An event: it stands for its newest recording; who waits for an earlier one holds that.
pub(super) struct SimEvent {
    device: Arc<SimDevice>,
    newest: Mutex<Option<Arc<Mark>>>,
}

impl SimEvent {
    pub(super) fn new(device: Arc<SimDevice>) -> Self {
        device.count_event(true);
        Self { device, newest: Mutex::default() }
    }

    fn mark(&self) -> Arc<Mark> {
        let mark = Arc::new(Mark::default());
        *self.newest.lock() = Some(mark.clone());
        mark
    }

    fn last_mark(&self) -> Option<Arc<Mark>> {
        self.newest.lock().clone()
    }

    fn moment(&self) -> Result<Instant> {
        let reached = self.last_mark().and_then(|mark| mark.0.lock().reached);
        reached.ok_or_else(|| {
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
        self.last_mark().map_or(Ok(true), |mark| mark.is_reached())
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
