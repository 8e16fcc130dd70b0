//! Copies between buffers of the host and one piece of device memory, by the fastest way for each size.

use std::sync::Arc;

use parking_lot::Mutex;

use super::super::agent::Agent;
use super::super::allocation::Allocation;
use super::super::window::Window;
use super::plan::{Direction, Plan, Way};
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
    helper: Option<Helper>,
}

/// An agent and the pinned memory that it carries through.
struct Helper {
    agent: Arc<Agent>,
    staging: Mutex<Allocation>,
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
            Ok::<_, Error>(Helper { agent, staging: Mutex::new(staging) })
        });
        let helper = helper.transpose()?;
        Ok(Self { memory: memory.clone(), window: memory.window(), plan, helper })
    }

    /// The window that it uses, or why there is none.
    pub fn window(&self) -> std::result::Result<&Window, &Error> {
        self.window.as_ref()
    }

    /// The way that a copy of `len` bytes takes.
    pub fn way(&self, direction: Direction, len: u64) -> Way {
        let way = match &self.helper {
            Some(_) => self.plan.way_with_agent(direction, len),
            None => self.plan.way(direction, len),
        };
        match (way, &self.window) {
            (Way::Window, Err(_)) => Way::Engine,
            (way, _) => way,
        }
    }

    /// Copies `from` into the memory at `offset`.
    pub fn write(&self, offset: u64, from: &[u8]) -> Result<()> {
        match (self.way(Direction::Write, from.len() as u64), &self.window) {
            (Way::Window, Ok(window)) => {
                // The window outlives a free; the memory's own rules hold all the same.
                let _in_use = self.memory.region(offset, from.len() as u64)?;
                window.write(offset, from)
            }
            _ => self.memory.write(offset, from),
        }
    }

    /// Copies from the memory at `offset` into `into`.
    pub fn read(&self, offset: u64, into: &mut [u8]) -> Result<()> {
        match (self.way(Direction::Read, into.len() as u64), &self.window, &self.helper) {
            (Way::Window, Ok(window), _) => {
                let _in_use = self.memory.region(offset, into.len() as u64)?;
                window.read(offset, into)
            }
            (Way::Agent, _, Some(helper)) => helper.read(&self.memory, offset, into),
            _ => self.memory.read(offset, into),
        }
    }
}

impl Helper {
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
