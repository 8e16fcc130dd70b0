//! Streams, events and graphs of an NVIDIA GPU.

use std::any::Any;
use std::collections::VecDeque;
use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use parking_lot::Mutex;

use super::super::allocation::WordWidth;
use super::super::backend::{EventBackend, GraphBackend, StreamBackend};
use super::super::op::{Condition, HostCall, MemOp, PendingWait, StreamOp};
use super::super::program::Launch;
use super::super::stream::capture_in_progress;
use super::deferred_free::{DetachedStream, StreamEntry};
use super::device::CudaDevice;
use super::driver::{Driver, call, get};
use super::module::CudaKernel;
use super::sys::{self, BatchOp, EventHandle, GraphExec, GraphHandle, StreamHandle, batch};
use crate::error::{Error, Kind, Result};

/// Operations between two checkpoints (events up to which finished operations are released).
const CHECKPOINT_INTERVAL: u64 = 32;
/// Maximum number of word operations per driver call (the driver's limit is 256).
const MAX_BATCH_OPS: usize = 128;

pub(super) struct CudaStream {
    core: Arc<Core>,
}

/// The stream's state; the device also accesses it, to reclaim finished operations.
pub(super) struct Core {
    device: Arc<CudaDevice>,
    number: u64,
    entry: StreamEntry,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    in_flight: InFlight,
    captured: Option<Vec<StreamOp>>,
    failure: Option<Error>,
    /// The stream was dropped: [`DeferredFree`](super::deferred_free::DeferredFree) owns its handle
    /// now.
    dropped: bool,
}

/// Operations that may not have completed; they hold the resources that they use.
///
/// An event is recorded periodically; once it is reached, all earlier operations are released.
#[derive(Default)]
pub(super) struct InFlight {
    ops: VecDeque<(u64, StreamOp)>,
    checkpoints: VecDeque<(u64, EventHandle)>,
    spare: Vec<EventHandle>,
    next: u64,
}

impl InFlight {
    fn push(&mut self, op: StreamOp) {
        self.ops.push_back((self.next, op));
        self.next += 1;
    }

    fn needs_checkpoint(&self) -> bool {
        let last = self.checkpoints.back().map_or(0, |(number, _)| *number);
        let oldest = self.ops.front().map_or(self.next, |(number, _)| *number);
        self.next - last.max(oldest) >= CHECKPOINT_INTERVAL
    }

    fn set_checkpoint(&mut self, driver: &Driver, stream: StreamHandle) -> Result<()> {
        let event = match self.spare.pop() {
            Some(event) => event,
            None => get!(driver, EventHandle::NULL, event_create(sys::EVENT_DISABLE_TIMING))?,
        };
        // Only a recorded event may be a checkpoint: an old one would look reached.
        let recorded = call!(driver, event_record(event, stream, 0));
        match &recorded {
            Ok(()) => self.checkpoints.push_back((self.next, event)),
            Err(_) => self.spare.push(event),
        }
        recorded
    }

    /// Removes operations before reached checkpoints; the caller drops them where that is safe.
    fn take_finished(&mut self, driver: &Driver) -> Vec<StreamOp> {
        let mut reached = 0;
        while let Some((number, event)) = self.checkpoints.front().copied() {
            if !driver.event_is_complete(event).unwrap_or(false) {
                break;
            }
            reached = number;
            self.spare.push(event);
            self.checkpoints.pop_front();
        }
        let finished = self.ops.iter().take_while(|(number, _)| *number < reached).count();
        self.ops.drain(..finished).map(|(_, op)| op).collect()
    }

    /// Removes all operations; the stream must be idle.
    fn take_all(&mut self) -> Vec<StreamOp> {
        self.spare.extend(self.checkpoints.drain(..).map(|(_, event)| event));
        self.ops.drain(..).map(|(_, op)| op).collect()
    }

    /// Releases everything; the stream must be idle and the context current.
    pub(super) fn destroy(mut self, driver: &Driver) {
        drop(self.take_all());
        for event in self.spare {
            if let Err(error) = call!(driver, event_destroy(event)) {
                tracing::warn!(%error, "an event was not destroyed");
            }
        }
    }
}

impl CudaStream {
    pub(super) fn create(device: Arc<CudaDevice>, number: u64) -> Result<Self> {
        let current = device.make_current()?;
        device.deferred_free.free_ready(device.driver);
        let handle =
            get!(device.driver, StreamHandle::NULL, stream_create(sys::STREAM_NON_BLOCKING))
                .map_err(device.error_context("create a stream"))?;
        let entry = StreamEntry { handle, capturing: Arc::new(AtomicBool::new(false)) };
        let core = Arc::new(Core {
            device: device.clone(),
            number,
            entry: entry.clone(),
            state: Mutex::default(),
        });
        core.assign_hardware_queue();
        drop(current);
        device.deferred_free.add_stream(&entry, &core);
        Ok(Self { core })
    }
}

impl Core {
    fn label(&self) -> String {
        format!("{} stream {}", self.device.label(), self.number)
    }

    /// Adds the stream and the attempted operation to a driver error.
    fn error_context(&self, what: &'static str) -> impl FnOnce(Error) -> Error {
        move |error| error.during(what).on(self.label())
    }

    /// Makes the driver assign a hardware queue now. It does so at the first work, and two streams
    /// whose first work is concurrent may get the same queue: a kernel that waits for a kernel of
    /// the other stream would then wait for ever (seen in 5 of 100 pairs; never if each had work
    /// before). Events do not count as work here.
    fn assign_hardware_queue(&self) {
        if let Err(error) = issue_batch(&self.device, self.entry.handle, &[MemOp::Barrier]) {
            tracing::debug!(%error, "a new stream has no hardware queue yet");
        }
    }

    fn issue(&self, op: &StreamOp, capturing: bool) -> Result<()> {
        let (driver, stream) = (self.device.driver, self.entry.handle);
        let external = if capturing { sys::EVENT_EXTERNAL } else { 0 };
        match op {
            StreamOp::Copy { to, from } => {
                let (to_address, from_address) = (to.address().raw(), from.address().raw());
                call!(driver, copy_async(to_address, from_address, to.len() as usize, stream))
            }
            StreamOp::Fill { region, pattern, unit } => {
                let (at, count) =
                    (region.address().raw(), (region.len() / u64::from(*unit)) as usize);
                match unit {
                    1 => call!(driver, fill_u8_async(at, *pattern as u8, count, stream)),
                    2 => call!(driver, fill_u16_async(at, *pattern as u16, count, stream)),
                    _ => call!(driver, fill_u32_async(at, *pattern, count, stream)),
                }
            }
            StreamOp::Mem(_) | StreamOp::Batch(_) => {
                issue_batch(&self.device, stream, op.mem_ops())
            }
            StreamOp::Record(event) => {
                call!(driver, event_record(handle_of(event)?, stream, external))
            }
            StreamOp::WaitEvent(event) => {
                call!(driver, stream_wait_event(stream, handle_of(event)?, external))
            }
            StreamOp::Call(host) => {
                let argument = Arc::as_ptr(host).cast_mut().cast::<c_void>();
                call!(driver, stream_call_host(stream, call_host, argument))
            }
            StreamOp::Launch(launch) => self.issue_launch(launch),
            StreamOp::Replay(graph) => {
                let graph: &dyn Any = &**graph.backend();
                let graph = graph.downcast_ref::<CudaGraph>().ok_or_else(wrong_backend)?;
                // The driver requires calls on one graph to be serialized.
                let exec = graph.exec.lock();
                call!(driver, graph_launch(*exec, stream))
            }
        }
    }

    fn issue_launch(&self, launch: &Launch) -> Result<()> {
        let kernel: &dyn Any = &**launch.kernel.backend();
        let kernel = kernel.downcast_ref::<CudaKernel>().ok_or_else(wrong_backend)?;
        kernel.check_arguments(&launch.args)?;
        // The driver reads the arguments through these pointers before the call returns.
        let mut args: Vec<*mut c_void> =
            launch.args.iter().map(|arg| std::ptr::from_ref(arg).cast_mut().cast()).collect();
        let (driver, stream) = (self.device.driver, self.entry.handle);
        call!(
            driver,
            launch_kernel(
                kernel.function,
                launch.grid,
                1,
                1,
                launch.threads,
                1,
                1,
                0,
                stream,
                args.as_mut_ptr(),
                std::ptr::null_mut()
            )
        )
    }

    /// Drops finished operations, outside of the lock: dropping what they hold may run arbitrary
    /// code.
    fn retire(&self, finished: Vec<StreamOp>) {
        if finished.iter().any(has_panicked) {
            let failure = Error::new(Kind::StreamFailed, "run a host function")
                .on(self.label())
                .why("it panicked");
            self.state.lock().failure.get_or_insert(failure);
        }
        drop(finished);
    }

    /// Releases what finished operations hold, and sets a checkpoint so that the next call can
    /// release more. The context must be current.
    pub(super) fn reclaim(&self) {
        let driver = self.device.driver;
        let mut state = self.state.lock();
        if state.dropped || state.captured.is_some() {
            return;
        }
        let finished = if driver.stream_is_idle(self.entry.handle).unwrap_or(false) {
            state.in_flight.take_all()
        } else {
            let finished = state.in_flight.take_finished(driver);
            if state.in_flight.set_checkpoint(driver, self.entry.handle).is_err() {
                tracing::debug!("no checkpoint could be set");
            }
            finished
        };
        drop(state);
        self.retire(finished);
    }
}

/// Queues word operations and copies on a stream. The context must be current.
pub(super) fn issue_batch(device: &CudaDevice, stream: StreamHandle, ops: &[MemOp]) -> Result<()> {
    let driver = device.driver;
    let issue_words = |params: &mut [BatchOp]| match params.len() as u32 {
        0 => Ok(()),
        count => call!(driver, stream_batch(stream, count, params.as_mut_ptr(), 0)),
    };
    let mut params = [BatchOp::default(); MAX_BATCH_OPS];
    let mut count = 0;
    for op in ops {
        let param = batch_op(op);
        if count == MAX_BATCH_OPS || param.is_none() {
            issue_words(&mut params[..count])?;
            count = 0;
        }
        match (param, op) {
            (Some(param), _) => {
                params[count] = param;
                count += 1;
            }
            (None, MemOp::Copy { to, from }) => {
                let (to_address, from_address) = (to.address().raw(), from.address().raw());
                call!(driver, copy_async(to_address, from_address, to.len() as usize, stream))?;
            }
            (None, _) => {}
        }
    }
    issue_words(&mut params[..count])
}

fn has_panicked(op: &StreamOp) -> bool {
    match op {
        StreamOp::Call(call) => call.has_panicked(),
        StreamOp::Replay(graph) => {
            let graph: &dyn Any = &**graph.backend();
            graph
                .downcast_ref::<CudaGraph>()
                .is_some_and(|graph| graph.ops.iter().any(has_panicked))
        }
        _ => false,
    }
}

/// The driver's form of a word operation; `None` for copies.
fn batch_op(op: &MemOp) -> Option<BatchOp> {
    let word = |operation, word: &super::super::allocation::Word, value, flags| BatchOp {
        operation,
        address: word.address().raw(),
        value,
        flags,
        ..BatchOp::default()
    };
    Some(match op {
        MemOp::Copy { .. } => return None,
        MemOp::Barrier => BatchOp { operation: batch::BARRIER, ..BatchOp::default() },
        MemOp::Flush => BatchOp { operation: batch::FLUSH, ..BatchOp::default() },
        MemOp::Write { word: at, value } => match at.width() {
            WordWidth::Bits32 => word(batch::WRITE_32, at, *value, 0),
            WordWidth::Bits64 => word(batch::WRITE_64, at, *value, 0),
        },
        MemOp::Wait { word: at, condition, value } => {
            let flags = match condition {
                Condition::AtLeast => batch::GEQ,
                Condition::Equal => batch::EQ,
                Condition::And => batch::AND,
                Condition::Nor => batch::NOR,
            };
            match at.width() {
                WordWidth::Bits32 => word(batch::WAIT_32, at, *value, flags),
                WordWidth::Bits64 => word(batch::WAIT_64, at, *value, flags),
            }
        }
    })
}

/// Called by the driver, on its own thread, when a stream reaches a host call.
///
/// # Safety
/// `argument` is a `HostCall` that the stream or graph keeps alive until it has been called.
unsafe extern "C" fn call_host(argument: *mut c_void) {
    // SAFETY: by this function's contract; HostCall is shared and lets no panic escape.
    unsafe { &*argument.cast::<HostCall>() }.call();
}

fn handle_of(event: &super::super::stream::Event) -> Result<EventHandle> {
    let event: &dyn Any = &**event.backend();
    event.downcast_ref::<CudaEvent>().map(|event| event.handle).ok_or_else(wrong_backend)
}

#[cold]
fn wrong_backend() -> Error {
    Error::new(Kind::InvalidArgument, "").why("the object belongs to another backend")
}

impl Core {
    fn enqueue(&self, op: StreamOp) -> Result<()> {
        let _current = self.device.make_current()?;
        let enqueue_guard = self.device.deferred_free.enqueue_guard();
        let mut state = self.state.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        let capturing = state.captured.is_some();
        if let Err(error) = self.issue(&op, capturing) {
            let name = op.name();
            if !capturing {
                // Part of a long batch may have been queued: keep what it uses.
                state.in_flight.push(op);
            }
            return Err(self.error_context(name)(error));
        }
        if let Some(captured) = &mut state.captured {
            captured.push(op);
            return Ok(());
        }
        state.in_flight.push(op);
        if !state.in_flight.needs_checkpoint() {
            return Ok(());
        }
        let finished = state.in_flight.take_finished(self.device.driver);
        let set = state.in_flight.set_checkpoint(self.device.driver, self.entry.handle);
        drop(state);
        drop(enqueue_guard);
        self.retire(finished);
        // The operation itself is queued: without a checkpoint, resources are only held longer.
        if let Err(error) = set {
            tracing::debug!(%error, "no checkpoint could be set");
        }
        Ok(())
    }

    fn is_idle(&self) -> Result<bool> {
        let _current = self.device.make_current()?;
        let mut state = self.state.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        if state.captured.is_some() {
            return Err(capture_in_progress("query whether it is idle", self.label()));
        }
        let idle = self.device.driver.stream_is_idle(self.entry.handle).map_err(|error| {
            let failure = self.error_context("finish its work")(error);
            state.failure = Some(failure.clone());
            failure
        })?;
        if !idle {
            return Ok(false);
        }
        let finished = state.in_flight.take_all();
        drop(state);
        self.retire(finished);
        self.device.deferred_free.free_ready(self.device.driver);
        match &self.state.lock().failure {
            Some(failure) => Err(failure.clone()),
            None => Ok(true),
        }
    }

    fn blocked_on(&self) -> Option<PendingWait> {
        let _current = self.device.make_current().ok()?;
        let waits: Vec<MemOp> = {
            let mut state = self.state.lock();
            let finished = state.in_flight.take_finished(self.device.driver);
            let waits =
                state.in_flight.ops.iter().flat_map(|(_, op)| op.mem_ops()).cloned().collect();
            drop(state);
            self.retire(finished);
            waits
        };
        PendingWait::first_pending(&waits)
    }

    fn begin_capture(&self) -> Result<()> {
        let _current = self.device.make_current()?;
        let _enqueue_guard = self.device.deferred_free.enqueue_guard();
        let mut state = self.state.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        if state.captured.is_some() {
            return Err(capture_in_progress("begin a capture", self.label()));
        }
        let (driver, stream) = (self.device.driver, self.entry.handle);
        self.entry.capturing.store(true, Ordering::Release);
        call!(driver, stream_begin_capture(stream, sys::CAPTURE_RELAXED)).map_err(|error| {
            self.entry.capturing.store(false, Ordering::Release);
            self.error_context("begin a capture")(error)
        })?;
        state.captured = Some(Vec::new());
        Ok(())
    }

    fn end_capture(&self) -> Result<Arc<dyn GraphBackend>> {
        let _current = self.device.make_current()?;
        let driver = self.device.driver;
        let mut graph = GraphHandle::NULL;
        let mut state = self.state.lock();
        let ended = call!(driver, stream_end_capture(self.entry.handle, &mut graph));
        self.entry.capturing.store(false, Ordering::Release);
        let ops = state.captured.take().unwrap_or_default();
        drop(state);
        let exec = ended.and_then(|()| get!(driver, GraphExec::NULL, graph_instantiate(graph, 0)));
        if graph != GraphHandle::NULL {
            drop(call!(driver, graph_destroy(graph)));
        }
        let exec = exec.map_err(self.error_context("capture a graph"))?;
        Ok(Arc::new(CudaGraph { device: self.device.clone(), exec: Mutex::new(exec), ops }))
    }
}

impl StreamBackend for CudaStream {
    fn number(&self) -> u64 {
        self.core.number
    }

    fn enqueue(&self, op: StreamOp) -> Result<()> {
        self.core.enqueue(op)
    }

    fn is_idle(&self) -> Result<bool> {
        self.core.is_idle()
    }

    fn blocked_on(&self) -> Option<PendingWait> {
        self.core.blocked_on()
    }

    fn begin_capture(&self) -> Result<()> {
        self.core.begin_capture()
    }

    fn end_capture(&self) -> Result<Arc<dyn GraphBackend>> {
        self.core.end_capture()
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        let Core { device, entry, state, .. } = &*self.core;
        let in_flight = {
            let mut state = state.lock();
            state.dropped = true;
            std::mem::take(&mut state.in_flight)
        };
        let _current = device.make_current();
        device
            .deferred_free
            .add_detached(device, DetachedStream { entry: entry.clone(), in_flight });
    }
}

/// Captured work. It holds what its operations use.
struct CudaGraph {
    device: Arc<CudaDevice>,
    exec: Mutex<GraphExec>,
    ops: Vec<StreamOp>,
}

impl GraphBackend for CudaGraph {
    fn operations(&self) -> usize {
        self.ops.len()
    }
}

impl Drop for CudaGraph {
    fn drop(&mut self) {
        let Ok(_current) = self.device.make_current() else {
            return;
        };
        if let Err(error) = call!(self.device.driver, graph_exec_destroy(*self.exec.get_mut())) {
            tracing::warn!(%error, "a graph was not destroyed");
        }
    }
}

pub(super) struct CudaEvent {
    device: Arc<CudaDevice>,
    handle: EventHandle,
}

impl CudaEvent {
    pub(super) fn create(device: Arc<CudaDevice>) -> Result<Self> {
        let current = device.make_current()?;
        let handle = get!(device.driver, EventHandle::NULL, event_create(0))
            .map_err(device.error_context("create an event"))?;
        drop(current);
        Ok(Self { device, handle })
    }
}

impl EventBackend for CudaEvent {
    fn is_complete(&self) -> Result<bool> {
        let _current = self.device.make_current()?;
        let reached = self.device.driver.event_is_complete(self.handle);
        reached.map_err(self.device.error_context("query an event"))
    }

    fn elapsed_since(&self, earlier: &dyn EventBackend) -> Result<Duration> {
        let earlier: &dyn Any = earlier;
        let _current = self.device.make_current()?;
        let elapsed =
            earlier.downcast_ref::<CudaEvent>().ok_or_else(wrong_backend).and_then(|earlier| {
                get!(self.device.driver, 0.0_f32, event_elapsed(earlier.handle, self.handle))
            });
        let milliseconds = elapsed.map_err(self.device.error_context("compare two events"))?;
        Ok(Duration::from_secs_f64(f64::from(milliseconds.max(0.0)) / 1e3))
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        let Ok(_current) = self.device.make_current() else {
            return;
        };
        if let Err(error) = call!(self.device.driver, event_destroy(self.handle)) {
            tracing::warn!(%error, "an event was not destroyed");
        }
    }
}
