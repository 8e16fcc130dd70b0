//! Copies between buffers of the host and one piece of device memory, by the fastest way for each size.

use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::super::agent::Agent;
use super::super::allocation::{Allocation, Region};
use super::super::stream::{Event, Stop, Stream};
use super::super::window::Window;
use super::plan::{Direction, Plan, Way, median, threads};
use super::staging::Staging;
use crate::error::{Error, Result};

/// How much the agent carries at a time.
const STAGING: u64 = 1 << 20;
/// The agent is fast where both sides have the same offset from a multiple of this.
const AGENT_ALIGNMENT: u64 = 16;

/// Copies to and from one allocation by the fastest way there is for each size and direction.
///
/// Both calls return when the bytes are there. It may be used from many threads.
///
/// ```
/// use warpwire::mem::{copy::Copier, sim::{Sim, SimConfig}};
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let memory = gpu.alloc(1 << 20).unwrap();
/// let copier = Copier::new(&memory).unwrap();
/// copier.write(5, b"the fastest way").unwrap();
/// let mut back = [0; 15];
/// copier.read(5, &mut back).unwrap();
/// assert_eq!(&back, b"the fastest way");
/// ```
pub struct Copier {
    memory: Allocation,
    window: Result<Window>,
    plan: Arc<Plan>,
    /// Writes up to this size go through the window, whatever else there is.
    direct_writes: u64,
    helper: Option<Helper>,
    staging: Staging,
    /// Made at the first staged read.
    stage: Mutex<Option<Stage>>,
}

/// An agent and the pinned memory that it carries through.
struct Helper {
    agent: Arc<Agent>,
    staging: Mutex<Allocation>,
    /// The reads that it serves fastest.
    reads: Option<RangeInclusive<u64>>,
}

impl Copier {
    /// A copier by the device's own plan, without an agent.
    pub fn new(memory: &Allocation) -> Result<Self> {
        let plan = Plan::for_device(memory.device())?;
        Self::with(memory, plan, None)
    }

    /// A copier by a given plan, with an agent of the memory's device if there is one.
    pub fn with(memory: &Allocation, plan: Arc<Plan>, agent: Option<Arc<Agent>>) -> Result<Self> {
        let helper = agent.map(|agent| {
            let staging = memory.device().alloc_pinned(STAGING + AGENT_ALIGNMENT)?;
            let mut helper = Helper { agent, staging: Mutex::new(staging), reads: None };
            helper.reads = plan.agent_reads(helper.latency(memory)?);
            Ok::<_, Error>(helper)
        });
        let helper = helper.transpose()?;
        let direct_writes = plan.direct_writes();
        let (window, stage) = (memory.window(), Mutex::new(None));
        let staging = Staging::default();
        Ok(Self { memory: memory.clone(), window, plan, direct_writes, helper, staging, stage })
    }

    /// The same copier with other parts for copies through pinned memory.
    #[must_use]
    pub fn staged_by(mut self, staging: Staging) -> Self {
        self.staging = staging;
        self
    }

    /// The window that it uses, or why there is none.
    pub fn window(&self) -> std::result::Result<&Window, &Error> {
        self.window.as_ref()
    }

    /// The way that a copy of `len` bytes takes.
    #[inline]
    pub fn way(&self, direction: Direction, len: u64) -> Way {
        let by_agent = |helper: &Helper| {
            direction == Direction::Read && helper.reads.as_ref().is_some_and(|r| r.contains(&len))
        };
        let way = match &self.helper {
            Some(helper) if by_agent(helper) => Way::Agent,
            _ => self.plan.way(direction, len),
        };
        match (way, &self.window) {
            (Way::Window | Way::Threads, Err(_)) => Way::Engine,
            (way, _) => way,
        }
    }

    /// Copies `from` into the memory at `offset`.
    #[inline]
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        // Small writes take nanoseconds: they are told by one comparison.
        if from.len() as u64 <= self.direct_writes
            && let Ok(window) = &self.window
        {
            self.memory.check_live()?;
            return window.write(offset, from);
        }
        match (self.way(Direction::Write, from.len() as u64), &self.window) {
            (Way::Window, Ok(window)) => {
                // The window outlives a free, so that a look beforehand is enough.
                self.memory.check_live()?;
                window.write(offset, from)
            }
            (Way::Threads, Ok(window)) => {
                self.memory.check_live()?;
                window.write_by_threads(threads(), offset, from)
            }
            _ => self.memory.write(offset, from),
        }
    }

    /// Copies from the memory at `offset` into `into`.
    #[inline]
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        self.read_unless(offset, into, &|| false)
    }

    /// The same, for those who may have to stop waiting for the device.
    #[inline]
    pub(crate) fn read_unless(&self, offset: u64, into: &mut [u8], stop: Stop<'_>) -> Result<()> {
        match (self.way(Direction::Read, into.len() as u64), &self.window, &self.helper) {
            (Way::Window, Ok(window), _) => {
                self.memory.check_live()?;
                window.read(offset, into)
            }
            (Way::Agent, _, Some(helper)) => helper.read(&self.memory, offset, into),
            (Way::Staged, _, _) => self.read_staged(offset, into, stop),
            _ => self.memory.read(offset, into),
        }
    }

    fn read_staged(&self, offset: u64, into: &mut [u8], stop: Stop<'_>) -> Result<()> {
        let from = self.memory.region(offset, into.len() as u64)?;
        let mut stage = self.stage.lock();
        let made = match stage.take() {
            Some(made) => made,
            None => Stage::new(&self.memory, self.staging)?,
        };
        stage.insert(made).read(&from, into, stop)
    }
}

impl Helper {
    /// What a small read takes, in microseconds.
    fn latency(&self, memory: &Allocation) -> Result<f64> {
        let mut buffer = [0; 1024];
        let len = memory.len().min(buffer.len() as u64) as usize;
        median(|| self.read(memory, 0, &mut buffer[..len]))
    }

    fn read(&self, memory: &Allocation, offset: u64, into: &mut [u8]) -> Result<()> {
        let staging = self.staging.lock();
        let mut at = offset;
        for part in into.chunks_mut(STAGING as usize) {
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

/// Pinned memory in two halves: the engine fills one while the CPU empties the other. An engine that
/// copies into ordinary memory stages inside the driver, more slowly.
pub(super) struct Stage {
    staging: Staging,
    stream: Stream,
    halves: [(Allocation, Event); 2],
}

/// No half takes as long.
const PATIENCE: Duration = Duration::from_secs(10);

impl Stage {
    pub(super) fn new(memory: &Allocation, staging: Staging) -> Result<Self> {
        let device = memory.device();
        let half = || Ok::<_, Error>((device.alloc_pinned(staging.half)?, device.event()?));
        Ok(Self { staging, stream: device.stream()?, halves: [half()?, half()?] })
    }

    /// Copies `from` into `into`, which is as long, unless it must stop waiting for the device.
    pub(super) fn read(&self, from: &Region, into: &mut [u8], stop: Stop<'_>) -> Result<()> {
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
            event.synchronize_unless(PATIENCE, stop)?;
            half.host_bytes()?.read(0, part)?;
        }
        Ok(())
    }
}
