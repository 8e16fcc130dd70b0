//! The simulator's streams: each has a thread that runs its operations in order.

use std::any::Any;
use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::super::backend::{EventBackend, ForeignStreamBackend, GraphBackend, StreamBackend};
use super::super::op::{HostCall, MemOp, PendingWait, StreamOp};
use super::super::stream::capture_in_progress;
use super::device::SimDevice;
use super::execute::{MAX_BLOCKS, Runner};
use crate::error::{Error, Kind, Result};

pub(super) struct SimStream {
    core: Arc<Core>,
}

pub(super) struct Core {
    pub(super) device: Arc<SimDevice>,
    number: u64,
    queue: Mutex<Queue>,
    work_available: Condvar,
}

#[derive(Default)]
struct Queue {
    waiting: VecDeque<QueuedOp>,
    running: bool,
    closed: bool,
    failure: Option<Error>,
    captured: Option<Vec<StreamOp>>,
    blocked: Option<StreamOp>,
}

/// A queued operation, with the event record that it completes or waits for.
pub(super) struct QueuedOp {
    pub(super) op: StreamOp,
    pub(super) event_record: Option<Arc<EventRecord>>,
}

impl QueuedOp {
    /// Binds the operation, at the time it is queued, to an event record.
    pub(super) fn new(op: StreamOp) -> Self {
        let event_record = match &op {
            StreamOp::Record(event) => sim_event(event).map(SimEvent::event_record),
            StreamOp::WaitEvent(event) => sim_event(event).and_then(SimEvent::last_record),
            _ => None,
        };
        Self { op, event_record }
    }

    /// Fails the event record, so that waits for it end.
    fn fail(&self, error: &Error) {
        if let (StreamOp::Record(_), Some(event_record)) = (&self.op, &self.event_record) {
            event_record.fail(error);
        }
    }
}

fn sim_event(event: &super::super::stream::Event) -> Option<&SimEvent> {
    let any: &dyn Any = &**event.backend();
    any.downcast_ref()
}

impl SimStream {
    pub(super) fn start(device: Arc<SimDevice>, number: u64) -> Result<Self> {
        let core = Arc::new(Core {
            device,
            number,
            queue: Mutex::default(),
            work_available: Condvar::new(),
        });
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
        self.core.work_available.notify_one();
    }
}

impl Core {
    /// Body of the stream's thread: runs until the stream is dropped and its work has completed.
    fn run(self: Arc<Self>) {
        while let Some(entry) = self.next() {
            // Listeners and closures are user code: a panic fails the stream, not its thread.
            let run = || {
                let outcome = Runner::new(&self).run(&entry);
                outcome.inspect_err(|error| entry.fail(error))
            };
            let outcome = self.catch_panic(run);
            // Resources of the operation are released before the stream can look idle.
            let dropped = self.catch_panic(move || {
                drop(entry);
                Ok(())
            });
            self.finish(outcome.and(dropped));
        }
        self.device.count_stream(false);
    }

    fn catch_panic(&self, run: impl FnOnce() -> Result<()>) -> Result<()> {
        catch_unwind(AssertUnwindSafe(run)).unwrap_or_else(|_| {
            Err(Error::new(Kind::StreamFailed, "finish an operation")
                .on(self.label())
                .why("code that it called panicked"))
        })
    }

    fn next(&self) -> Option<QueuedOp> {
        let mut queue = self.queue.lock();
        loop {
            if let Some(entry) = queue.waiting.pop_front() {
                queue.running = true;
                return Some(entry);
            }
            if queue.closed {
                return None;
            }
            self.work_available.wait(&mut queue);
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
        let _ = self.catch_panic(move || {
            drop(dropped);
            Ok(())
        });
    }

    /// Publishes the wait that the stream is in, for `blocked_on`.
    pub(super) fn set_blocked(&self, op: Option<StreamOp>) {
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

    fn enqueue(&self, op: StreamOp) -> Result<()> {
        if let StreamOp::Launch(launch) = &op
            && launch.grid > MAX_BLOCKS
        {
            let what = format!("launch {} blocks", launch.grid);
            return Err(Error::new(Kind::InvalidArgument, what)
                .on(self.core.label())
                .why(format!("the simulator runs at most {MAX_BLOCKS} concurrent blocks")));
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
        queue.waiting.push_back(QueuedOp::new(op));
        drop(queue);
        self.core.work_available.notify_one();
        Ok(())
    }

    fn is_idle(&self) -> Result<bool> {
        let queue = self.core.queue.lock();
        if let Some(failure) = &queue.failure {
            return Err(failure.clone());
        }
        if queue.captured.is_some() {
            return Err(capture_in_progress("query whether it is idle", self.core.label()));
        }
        Ok(queue.waiting.is_empty() && !queue.running)
    }

    fn blocked_on(&self) -> Option<PendingWait> {
        let blocked = self.core.queue.lock().blocked.clone()?;
        PendingWait::first_pending(blocked.mem_ops())
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

/// A stream by its number, as other libraries' streams are known by their handles: keeps nothing.
pub(super) struct SimForeignStream(pub(super) Weak<SimStream>);

impl SimForeignStream {
    fn enqueue(&self, op: StreamOp) -> Result<()> {
        let stream = self.0.upgrade().ok_or_else(|| {
            Error::new(Kind::Freed, "queue work on a stream").why("its owner has dropped it")
        })?;
        stream.enqueue(op)
    }
}

impl ForeignStreamBackend for SimForeignStream {
    fn is_capturing(&self) -> Result<bool> {
        Ok(self.0.upgrade().is_some_and(|stream| stream.core.queue.lock().captured.is_some()))
    }

    fn batch(&self, ops: &[MemOp]) -> Result<()> {
        self.enqueue(StreamOp::Batch(ops.into()))
    }

    fn call_host(&self, host: HostCall) -> Result<()> {
        self.enqueue(StreamOp::Call(Arc::new(host)))
    }
}

/// Captured operations.
pub(super) struct SimGraph {
    pub(super) ops: Vec<StreamOp>,
}

impl GraphBackend for SimGraph {
    fn operations(&self) -> usize {
        self.ops.len()
    }
}

/// One recording of an event.
#[derive(Default)]
pub(super) struct EventRecord(Mutex<EventRecordState>);

#[derive(Default)]
struct EventRecordState {
    completed_at: Option<Instant>,
    failure: Option<Error>,
}

impl EventRecord {
    pub(super) fn complete(&self) {
        self.0.lock().completed_at = Some(Instant::now());
    }

    pub(super) fn is_complete(&self) -> Result<bool> {
        let state = self.0.lock();
        match &state.failure {
            Some(failure) => Err(failure.clone()),
            None => Ok(state.completed_at.is_some()),
        }
    }

    fn fail(&self, error: &Error) {
        self.0.lock().failure = Some(error.clone());
    }
}

/// An event: refers to its latest record; a wait for an earlier one holds that record.
pub(super) struct SimEvent {
    device: Arc<SimDevice>,
    latest: Mutex<Option<Arc<EventRecord>>>,
}

impl SimEvent {
    pub(super) fn new(device: Arc<SimDevice>) -> Self {
        device.count_event(true);
        Self { device, latest: Mutex::default() }
    }

    fn event_record(&self) -> Arc<EventRecord> {
        let event_record = Arc::new(EventRecord::default());
        *self.latest.lock() = Some(event_record.clone());
        event_record
    }

    fn last_record(&self) -> Option<Arc<EventRecord>> {
        self.latest.lock().clone()
    }

    fn completion_time(&self) -> Result<Instant> {
        let completed_at =
            self.last_record().and_then(|event_record| event_record.0.lock().completed_at);
        completed_at.ok_or_else(|| {
            Error::new(Kind::Busy, "query the time of an event")
                .on(self.device.label())
                .why("it was not recorded, or has not been reached")
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
    fn is_complete(&self) -> Result<bool> {
        self.last_record().map_or(Ok(true), |event_record| event_record.is_complete())
    }

    fn elapsed_since(&self, earlier: &dyn EventBackend) -> Result<Duration> {
        let earlier: &dyn Any = earlier;
        let Some(earlier) = earlier.downcast_ref::<SimEvent>() else {
            return Err(Error::new(Kind::InvalidArgument, "compare two events")
                .on(self.device.label())
                .why("the other one belongs to another backend"));
        };
        Ok(self.completion_time()?.saturating_duration_since(earlier.completion_time()?))
    }
}
