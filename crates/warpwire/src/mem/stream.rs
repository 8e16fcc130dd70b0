//! Streams, events and graphs: ordered, asynchronous work.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::allocation::{Allocation, Region, Word};
use super::backend::{EventBackend, GraphBackend, StreamBackend};
use super::device::Device;
use super::op::{Condition, HostCall, MemOp, PendingWait, StreamOp};
use super::program::Launch;
use super::staging::StagingPool;
use crate::error::{Error, Kind, Result};
use crate::sync::Backoff;

/// An ordered queue of work on a device. Clones refer to the same stream.
///
/// Calls return immediately; operations run in order, concurrently with other streams. Everything
/// that an operation uses is kept alive until it has completed. After an operation fails, every
/// later call on the stream returns that error, and operations queued behind it do not run. On CUDA
/// a kernel fault destroys the whole device context, and all of its streams report that; operations
/// queued behind a host call that panicked still run there, since the driver does not know about
/// panics.
///
/// Dropping the last handle does not cancel work in flight.
///
/// ```
/// use std::time::Duration;
/// use warpwire::mem::{Condition, sim::{Sim, SimConfig}};
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let memory = gpu.alloc(4096).unwrap();
/// let flag = gpu.alloc_pinned(8).unwrap().word64(0).unwrap();
/// flag.store(0).unwrap();
///
/// let stream = gpu.stream().unwrap();
/// stream.wait_value(&flag, Condition::AtLeast, 1).unwrap();
/// stream.fill(&memory.whole().unwrap(), 0xab).unwrap();
/// assert!(!stream.is_idle().unwrap());
///
/// flag.store(1).unwrap();
/// stream.synchronize(Duration::from_secs(5)).unwrap();
/// ```
#[derive(Clone)]
pub struct Stream {
    device: Device,
    backend: Arc<dyn StreamBackend>,
    /// ID of the thread that is capturing; 0 if none is.
    capturing: Arc<AtomicU64>,
    /// Pinned memory for data passed by value.
    staging: Arc<StagingPool>,
}

impl Stream {
    pub(super) fn new(device: Device, backend: Arc<dyn StreamBackend>) -> Self {
        Self { device, backend, capturing: Arc::default(), staging: Arc::default() }
    }

    /// The device that it belongs to.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Name in messages: `sim:0 stream 3`.
    pub fn label(&self) -> String {
        format!("{} stream {}", self.device.label(), self.backend.number())
    }

    /// Stream number, unique on its device.
    pub fn number(&self) -> u64 {
        self.backend.number()
    }

    /// Whether operations are currently captured into a graph instead of run.
    pub fn is_capturing(&self) -> bool {
        self.capturing.load(Ordering::Acquire) != 0
    }

    fn enqueue(&self, op: StreamOp) -> Result<()> {
        self.check_capture("queue work")?;
        self.backend.enqueue(op)
    }

    /// Rejects calls from other threads during a capture: their work would end up in its graph.
    fn check_capture(&self, what: &'static str) -> Result<()> {
        match self.capturing.load(Ordering::Acquire) {
            owner if owner == 0 || owner == thread_id() => Ok(()),
            _ => Err(capture_in_progress(what, self.label())),
        }
    }

    /// Copies `from` to `to`, which has the same length, in any direction between device memory,
    /// pinned memory and other devices of the same backend. The ranges must not overlap.
    pub fn copy(&self, to: &Region, from: &Region) -> Result<()> {
        self.check_copy(to, from)?;
        if to.is_empty() {
            return Ok(());
        }
        self.enqueue(StreamOp::Copy { to: to.clone(), from: from.clone() })
    }

    fn check_copy(&self, to: &Region, from: &Region) -> Result<()> {
        let failure = |kind, why: String| {
            let what = format!("copy {} bytes to {} bytes", from.len(), to.len());
            Err(Error::new(kind, what).on(self.label()).why(why))
        };
        if to.len() != from.len() {
            return failure(Kind::InvalidArgument, "the lengths differ".into());
        }
        let backends = [to, from].map(|region| region.allocation().device().info().backend);
        let own_backend = self.device.info().backend;
        if backends.iter().any(|side| *side != own_backend) {
            let why = format!("a {own_backend} stream cannot access memory of another backend");
            return failure(Kind::InvalidArgument, why)
                .map_err(|e| e.fix("copy through the host: Allocation::read, then write"));
        }
        if to.overlaps(from) {
            return failure(Kind::InvalidArgument, "the two ranges overlap".into());
        }
        Ok(())
    }

    /// Copies `bytes` to `to`, which has the same length, in stream order. The bytes are staged
    /// before this returns: the caller may reuse them immediately.
    pub fn write_memory(&self, to: &Region, bytes: &[u8]) -> Result<()> {
        let from = self.stage(bytes)?;
        self.copy(to, &from)
    }

    /// Copies `bytes` into pinned memory that this stream can access. The memory is recycled once
    /// the region and the operations that use it are gone. Fails with `Busy` if 256 MiB are staged.
    pub fn stage(&self, bytes: &[u8]) -> Result<Region> {
        self.staging.copy_in(&self.device, bytes)
    }

    /// Fills `region` with one byte value.
    pub fn fill(&self, region: &Region, byte: u8) -> Result<()> {
        self.fill_units(region, u32::from(byte), 1)
    }

    /// Fills `region`, whose address and length are multiples of 4, with one 32-bit value.
    pub fn fill_u32(&self, region: &Region, value: u32) -> Result<()> {
        self.fill_units(region, value, 4)
    }

    fn fill_units(&self, region: &Region, pattern: u32, unit: u8) -> Result<()> {
        self.check_accessible(region.allocation(), "fill memory")?;
        let aligned = region.address().is_aligned_to(u64::from(unit))
            && region.len().is_multiple_of(u64::from(unit));
        if !aligned {
            let what = format!("fill {} bytes at {}", region.len(), region.address());
            return Err(Error::new(Kind::Misaligned, what)
                .on(self.label())
                .why(format!("address and length must be multiples of {unit}")));
        }
        if region.is_empty() {
            return Ok(());
        }
        self.enqueue(StreamOp::Fill { region: region.clone(), pattern, unit })
    }

    /// Writes a word once all earlier work of this stream is visible system-wide.
    pub fn write_value(&self, word: &Word, value: u64) -> Result<()> {
        self.mem_op(MemOp::Write { word: word.clone(), value })
    }

    /// Blocks the stream until the word satisfies the condition.
    pub fn wait_value(&self, word: &Word, condition: Condition, value: u64) -> Result<()> {
        self.mem_op(MemOp::Wait { word: word.clone(), condition, value })
    }

    fn mem_op(&self, op: MemOp) -> Result<()> {
        self.check_mem_op(&op)?;
        self.enqueue(StreamOp::Mem(op))
    }

    /// Queues several word operations, submitted to the device as one batch.
    pub fn batch(&self, ops: &[MemOp]) -> Result<()> {
        for op in ops {
            self.check_mem_op(op)?;
        }
        if ops.is_empty() {
            return Ok(());
        }
        self.enqueue(StreamOp::Batch(ops.into()))
    }

    /// Checks whether [`batch`](Self::batch) would accept the operation.
    pub fn check(&self, op: &MemOp) -> Result<()> {
        self.check_mem_op(op)
    }

    fn check_mem_op(&self, op: &MemOp) -> Result<()> {
        let capabilities = self.device.capabilities();
        let info = self.device.info();
        capabilities.stream_mem_ops.require("use stream memory operations", info)?;
        if let MemOp::Write { word, .. } | MemOp::Wait { word, .. } = op {
            self.check_accessible(word.region().allocation(), "use a word")?;
        }
        match op {
            MemOp::Wait { condition: Condition::Nor, .. } => {
                capabilities.stream_wait_nor.require("wait for NOR", info)?;
            }
            MemOp::Flush => {
                capabilities.flush_remote_writes.require("flush remote writes", info)?;
            }
            MemOp::Copy { to, from } => self.check_copy(to, from)?,
            _ => {}
        }
        op.check()
    }

    /// Records `event` at this point of the stream; it no longer marks its earlier point.
    pub fn record(&self, event: &Event) -> Result<()> {
        self.check_backend(&event.device, "record an event")?;
        self.enqueue(StreamOp::Record(event.clone()))
    }

    /// Blocks this stream until the point that `event` marks has been reached.
    ///
    /// During a capture, record the event before the wait on the same stream, or outside the graph.
    pub fn wait_event(&self, event: &Event) -> Result<()> {
        self.check_backend(&event.device, "wait for an event")?;
        self.enqueue(StreamOp::WaitEvent(event.clone()))
    }

    /// Calls `run` on a host thread, in stream order; later operations wait until it returns. It
    /// must not call into devices. If captured into a graph, it is called in every replay.
    pub fn call_host(&self, run: impl Fn() + Send + Sync + 'static) -> Result<()> {
        self.enqueue(StreamOp::Call(Arc::new(HostCall::new(run))))
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// While it runs, the kernel must only access memory it is allowed to. Regions passed to the
    /// launch are kept alive; the caller is responsible for addresses that the kernel obtains in
    /// any other way. The simulator catches a wrong address; on CUDA it may hit pinned host memory.
    #[allow(unsafe_code)]
    pub unsafe fn launch(&self, launch: Launch) -> Result<()> {
        let failure = |why: &str| {
            let what = format!("launch kernel {:?}", launch.kernel.name());
            Err(Error::new(Kind::InvalidArgument, what).on(self.label()).why(why.to_string()))
        };
        if launch.grid == 0 || launch.threads == 0 {
            return failure("the grid or the block is empty");
        }
        if *launch.kernel.device() != self.device {
            return failure("the kernel was loaded onto another device");
        }
        for region in &launch.regions {
            self.check_accessible(region.allocation(), "launch a kernel")?;
        }
        self.enqueue(StreamOp::Launch(Arc::new(launch)))
    }

    /// Captures the operations that `record` queues on this stream into a graph, without running
    /// them.
    ///
    /// Argument values are fixed at capture. If `record` fails, the capture is discarded and the
    /// error returned.
    pub fn capture(&self, record: impl FnOnce(&Stream) -> Result<()>) -> Result<Graph> {
        self.device.capabilities().graphs.require("capture a graph", self.device.info())?;
        self.check_capture("begin a capture")?;
        self.backend.begin_capture()?;
        self.capturing.store(thread_id(), Ordering::Release);
        // If `record` panics, the guard ends the capture.
        let capture = CaptureGuard { stream: self, ended: false };
        let recorded = record(self);
        let graph = capture.end();
        recorded?;
        Ok(Graph { device: self.device.clone(), backend: graph? })
    }

    /// Queues a captured graph on the stream.
    pub fn replay(&self, graph: &Graph) -> Result<()> {
        self.check_backend(&graph.device, "replay a graph")?;
        self.enqueue(StreamOp::Replay(graph.clone()))
    }

    /// Whether all work has completed. Reports an earlier failure as an error.
    pub fn is_idle(&self) -> Result<bool> {
        self.check_capture("query whether it is idle")?;
        self.backend.is_idle()
    }

    /// The wait that blocks the stream now, if any.
    pub fn blocked_on(&self) -> Option<PendingWait> {
        self.backend.blocked_on()
    }

    /// Waits until all work has completed. Fails with `Timeout` after `timeout`; the work then
    /// continues.
    ///
    /// The timeout error names the word that the stream waits for and its current value.
    pub fn synchronize(&self, timeout: Duration) -> Result<()> {
        if poll_until(timeout, || self.is_idle())? {
            return Ok(());
        }
        let why = match self.blocked_on() {
            Some(wait) => format!("after {timeout:?} {wait}"),
            None => format!("after {timeout:?} its work is still running"),
        };
        Err(Error::new(Kind::Timeout, "synchronize").on(self.label()).why(why))
    }

    /// Rejects memory other than this device's own or pinned memory, which all devices of a backend
    /// can access.
    fn check_accessible(&self, memory: &Allocation, what: &'static str) -> Result<()> {
        self.check_backend(memory.device(), what)?;
        if self.device.can_access(memory) {
            return Ok(());
        }
        Err(Error::new(Kind::InvalidArgument, what)
            .on(self.label())
            .why(format!("the memory belongs to {}", memory.device().label()))
            .fix("use a stream of that device, or copy"))
    }

    fn check_backend(&self, other: &Device, what: &'static str) -> Result<()> {
        let (own_backend, other_backend) = (self.device.info().backend, other.info().backend);
        if own_backend == other_backend {
            return Ok(());
        }
        Err(Error::new(Kind::InvalidArgument, what)
            .on(self.label())
            .why(format!("it belongs to a {other_backend} device")))
    }
}

impl fmt::Debug for Stream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Stream({})", self.label())
    }
}

/// A capture in progress; dropping it ends the capture.
struct CaptureGuard<'a> {
    stream: &'a Stream,
    ended: bool,
}

impl CaptureGuard<'_> {
    fn end(mut self) -> Result<Arc<dyn GraphBackend>> {
        self.ended = true;
        let graph = self.stream.backend.end_capture();
        self.stream.capturing.store(0, Ordering::Release);
        graph
    }
}

impl Drop for CaptureGuard<'_> {
    fn drop(&mut self) {
        if !self.ended {
            let _ = self.stream.backend.end_capture();
            self.stream.capturing.store(0, Ordering::Release);
        }
    }
}

/// A unique number for the calling thread, never 0.
fn thread_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static NUMBER: u64 = NEXT.fetch_add(1, Ordering::Relaxed);
    }
    NUMBER.with(|number| *number)
}

/// Returns true if a wait for the device must be abandoned: another thread waits for the caller,
/// and the device may be waiting for that thread.
pub(crate) type CancelCheck<'a> = &'a dyn Fn() -> bool;

/// A point in a stream. Clones refer to the same event.
#[derive(Clone)]
pub struct Event {
    device: Device,
    backend: Arc<dyn EventBackend>,
}

impl Event {
    pub(super) fn new(device: Device, backend: Arc<dyn EventBackend>) -> Self {
        Self { device, backend }
    }

    /// Whether the point has been reached; true for an event that was never recorded.
    pub fn is_complete(&self) -> Result<bool> {
        self.backend.is_complete()
    }

    /// Waits until the point has been reached. Fails with `Timeout` after `timeout`.
    pub fn synchronize(&self, timeout: Duration) -> Result<()> {
        self.synchronize_or_cancel(timeout, &|| false)
    }

    /// Like [`synchronize`](Self::synchronize), but fails with `Freed` as soon as `cancelled`
    /// returns true.
    pub(crate) fn synchronize_or_cancel(
        &self,
        timeout: Duration,
        cancelled: CancelCheck<'_>,
    ) -> Result<()> {
        let mut was_cancelled = false;
        let reached = poll_until(timeout, || {
            let reached = self.is_complete()?;
            was_cancelled = !reached && cancelled();
            Ok(reached || was_cancelled)
        })?;
        let failure = |kind, why: String| {
            Err(Error::new(kind, "wait for an event").on(self.device.label()).why(why))
        };
        match reached {
            true if was_cancelled => failure(Kind::Freed, "the memory is being revoked".into()),
            true => Ok(()),
            false => failure(Kind::Timeout, format!("it was not reached in {timeout:?}")),
        }
    }

    /// Time from the point that `earlier` marks to this one; both must have been reached.
    pub fn elapsed_since(&self, earlier: &Event) -> Result<Duration> {
        self.backend.elapsed_since(&*earlier.backend)
    }

    pub(super) fn backend(&self) -> &Arc<dyn EventBackend> {
        &self.backend
    }
}

impl fmt::Debug for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Event({})", self.device.label())
    }
}

/// Captured work that can be replayed any number of times. Clones refer to the same graph.
#[derive(Clone)]
pub struct Graph {
    device: Device,
    backend: Arc<dyn GraphBackend>,
}

impl Graph {
    /// Number of captured operations.
    pub fn len(&self) -> usize {
        self.backend.operations()
    }

    /// Whether nothing was captured.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub(super) fn backend(&self) -> &Arc<dyn GraphBackend> {
        &self.backend
    }
}

impl fmt::Debug for Graph {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Graph({}, {} operations)", self.device.label(), self.len())
    }
}

/// Polls until ready, spinning first and then with increasing backoff; false on timeout.
fn poll_until(timeout: Duration, mut is_ready: impl FnMut() -> Result<bool>) -> Result<bool> {
    let start = Instant::now();
    let mut backoff = Backoff::default();
    loop {
        if is_ready()? {
            return Ok(true);
        }
        if start.elapsed() >= timeout {
            return Ok(false);
        }
        backoff.snooze();
    }
}

/// The error for calls that are invalid during a capture.
#[cold]
pub(super) fn capture_in_progress(what: &'static str, stream: String) -> Error {
    Error::new(Kind::Busy, what).on(stream).why("it is being captured").fix("end the capture first")
}
