//! Copies between host buffers and one device allocation, by the fastest method for each size.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::super::agent::CopyAgent;
use super::super::allocation::{Allocation, Region};
use super::super::stream::{CancelCheck, Event, Stream};
use super::super::window::Window;
use super::plan::{CopyDirection, CopyMethod, CopyPlan, median, threads};
use super::staging::StagingOptions;
use crate::error::{Error, Result};

/// Maximum length of one request to the agent.
const AGENT_CHUNK: u64 = 1 << 20;
/// The agent is fast if both addresses are equal modulo this.
const AGENT_ALIGNMENT: u64 = 16;

/// Copies to and from one allocation by the fastest method for each size and direction.
///
/// Both calls return when the copy is complete. May be used from many threads.
///
/// ```
/// use warpwire::mem::{copy::Copier, sim::{Sim, SimConfig}};
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let memory = gpu.alloc(1 << 20).unwrap();
/// let copier = Copier::new(&memory).unwrap();
/// copier.write(5, b"the fastest method").unwrap();
/// let mut back = [0; 18];
/// copier.read(5, &mut back).unwrap();
/// assert_eq!(&back, b"the fastest method");
/// ```
pub struct Copier {
    memory: Allocation,
    window: Result<Window>,
    plan: Arc<CopyPlan>,
    /// Writes up to this length use the window, whatever other methods exist.
    max_window_write: u64,
    agent_reader: Option<AgentReader>,
    staging: StagingOptions,
    /// Created by the first staged read.
    staged_reader: Mutex<Option<StagedReader>>,
}

/// An agent and the pinned memory that it copies to.
struct AgentReader {
    agent: Arc<CopyAgent>,
    staging: Mutex<Allocation>,
    /// Lengths of reads for which the agent is the fastest method.
    reads: Option<RangeInclusive<u64>>,
}

impl Copier {
    /// A copier with the device's own plan, without an agent.
    pub fn new(memory: &Allocation) -> Result<Self> {
        let plan = CopyPlan::for_device(memory.device())?;
        Self::with(memory, plan, None)
    }

    /// A copier with a given plan and, optionally, an agent of the memory's device.
    pub fn with(
        memory: &Allocation,
        plan: Arc<CopyPlan>,
        agent: Option<Arc<CopyAgent>>,
    ) -> Result<Self> {
        let agent_reader = agent.map(|agent| {
            let staging = memory.device().alloc_pinned(AGENT_CHUNK + AGENT_ALIGNMENT)?;
            let mut agent_reader = AgentReader { agent, staging: Mutex::new(staging), reads: None };
            agent_reader.reads = plan.agent_reads(agent_reader.latency(memory)?);
            Ok::<_, Error>(agent_reader)
        });
        let agent_reader = agent_reader.transpose()?;
        let max_window_write = plan.max_window_write();
        let (window, staged_reader) = (memory.window(), Mutex::new(None));
        let staging = StagingOptions::default();
        Ok(Self {
            memory: memory.clone(),
            window,
            plan,
            max_window_write,
            agent_reader,
            staging,
            staged_reader,
        })
    }

    /// Sets the chunk sizes of copies through pinned memory.
    #[must_use]
    pub fn with_staging(mut self, staging: StagingOptions) -> Self {
        self.staging = staging;
        self
    }

    /// The window that it uses, or why there is none.
    pub fn window(&self) -> std::result::Result<&Window, &Error> {
        self.window.as_ref()
    }

    /// The method used for a copy of `len` bytes.
    #[inline]
    pub fn method(&self, direction: CopyDirection, len: u64) -> CopyMethod {
        let by_agent = |agent_reader: &AgentReader| {
            direction == CopyDirection::Read
                && agent_reader.reads.as_ref().is_some_and(|r| r.contains(&len))
        };
        let method = match &self.agent_reader {
            Some(agent_reader) if by_agent(agent_reader) => CopyMethod::Agent,
            _ => self.plan.method(direction, len),
        };
        match (method, &self.window) {
            (CopyMethod::Window | CopyMethod::Threads, Err(_)) => CopyMethod::Engine,
            (method, _) => method,
        }
    }

    /// Copies `from` into the memory at `offset`; complete on return.
    #[inline]
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        // Small writes take nanoseconds: one comparison selects them.
        if from.len() as u64 <= self.max_window_write
            && let Ok(window) = &self.window
        {
            self.memory.check_live()?;
            return window.write(offset, from);
        }
        match (self.method(CopyDirection::Write, from.len() as u64), &self.window) {
            (CopyMethod::Window, Ok(window)) => {
                // The window outlives a free, so checking once beforehand is enough.
                self.memory.check_live()?;
                window.write(offset, from)
            }
            (CopyMethod::Threads, Ok(window)) => {
                self.memory.check_live()?;
                window.write_parallel(threads(), offset, from)
            }
            _ => self.memory.write(offset, from),
        }
    }

    /// Copies from the memory at `offset` into `into`; complete on return.
    #[inline]
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.read_or_cancel(offset, into, &|| false)
    }

    /// Like [`read`](Self::read), for callers that may have to abandon a wait for the device.
    #[inline]
    pub(crate) fn read_or_cancel(
        &self,
        offset: u64,
        into: &mut [u8],
        cancelled: CancelCheck<'_>,
    ) -> Result<()> {
        match (
            self.method(CopyDirection::Read, into.len() as u64),
            &self.window,
            &self.agent_reader,
        ) {
            (CopyMethod::Window, Ok(window), _) => {
                self.memory.check_live()?;
                window.read(offset, into)
            }
            (CopyMethod::Agent, _, Some(agent_reader)) => {
                agent_reader.read(&self.memory, offset, into)
            }
            (CopyMethod::Staged, _, _) => self.read_staged(offset, into, cancelled),
            _ => self.memory.read(offset, into),
        }
    }

    fn read_staged(&self, offset: u64, into: &mut [u8], cancelled: CancelCheck<'_>) -> Result<()> {
        let from = self.memory.region(offset, into.len() as u64)?;
        let mut staged_reader = self.staged_reader.lock();
        let made = match staged_reader.take() {
            Some(made) => made,
            None => StagedReader::new(&self.memory, self.staging)?,
        };
        staged_reader.insert(made).read(&from, into, cancelled)
    }
}

impl AgentReader {
    /// Median time of a small read, in microseconds.
    fn latency(&self, memory: &Allocation) -> Result<f64> {
        let mut buffer = [0; 1024];
        let len = memory.len().min(buffer.len() as u64) as usize;
        median(|| self.read(memory, 0, &mut buffer[..len]))
    }

    fn read(&self, memory: &Allocation, offset: u64, into: &mut [u8]) -> Result<()> {
        let staging = self.staging.lock();
        let mut at = offset;
        for part in into.chunks_mut(AGENT_CHUNK as usize) {
            let len = part.len() as u64;
            let from = memory.region(at, len)?;
            let shift = from.address().raw() % AGENT_ALIGNMENT;
            self.agent.copy(&staging.region(shift, len)?, &from)?;
            staging.host_bytes()?.read(shift, part)?;
            at += len;
        }
        Ok(())
    }
}

/// Double-buffered pinned memory: the copy engine fills one half while the CPU drains the other.
/// Engine copies to pageable memory are staged inside the driver, more slowly.
pub(super) struct StagedReader {
    staging: StagingOptions,
    stream: Stream,
    halves: [(Allocation, Event); 2],
}

/// Far longer than the copy of one half takes.
const STAGING_TIMEOUT: Duration = Duration::from_secs(10);

impl StagedReader {
    pub(super) fn new(memory: &Allocation, staging: StagingOptions) -> Result<Self> {
        let device = memory.device();
        let half = || Ok::<_, Error>((device.alloc_pinned(staging.half)?, device.event()?));
        Ok(Self { staging, stream: device.stream()?, halves: [half()?, half()?] })
    }

    /// Copies `from` into `into`, which has the same length, unless the wait is cancelled.
    pub(super) fn read(
        &self,
        from: &Region,
        into: &mut [u8],
        cancelled: CancelCheck<'_>,
    ) -> Result<()> {
        let step = self.staging.fetch(from.len());
        let count = into.len().div_ceil(step as usize);
        let fetch = |number: usize| {
            let (half, event) = &self.halves[number % 2];
            let at = number as u64 * step;
            let len = (from.len() - at).min(step);
            let part = from.allocation().region(from.offset() + at, len)?;
            self.stream.copy(&half.region(0, len)?, &part)?;
            self.stream.record(event)
        };
        fetch(0)?;
        for (number, part) in into.chunks_mut(step as usize).enumerate() {
            if number + 1 < count {
                fetch(number + 1)?;
            }
            let (half, event) = &self.halves[number % 2];
            event.synchronize_or_cancel(STAGING_TIMEOUT, cancelled)?;
            half.host_bytes()?.read(0, part)?;
        }
        Ok(())
    }
}
