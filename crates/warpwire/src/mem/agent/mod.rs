//! The copy agent: a small resident kernel that copies when the CPU rings.
//!
//! A call to the copy engine costs about 7 µs before the first byte moves. A kernel that is there already
//! and watches a word in its memory, which the CPU writes through a [window](super::Window), starts within
//! one or two. It occupies one multiprocessor while it is awake, so nothing starts it unasked; after a
//! while without requests it ends by itself, and the next request starts it again.

use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::allocation::{Allocation, MemoryKind, Region, Word};
use super::device::Device;
use super::program::{Kernel, Launch, Program};
use super::sim::{Block, KernelFault};
use super::stream::Stream;
use super::window::Window;
use crate::error::{Error, Kind, Result};
use crate::sync::Backoff;

const KERNEL: &str = "copy_agent";
const THREADS: u32 = 1024;
/// How long it stays awake without requests, in clock cycles: about a second.
const IDLE_TIMEOUT_CYCLES: u64 = 2_000_000_000;
/// After so many looks at the answer, see whether the kernel still runs.
const POLLS_PER_CHECK: u32 = 2_000;
/// No copy takes as long.
const COPY_TIMEOUT: Duration = Duration::from_secs(10);
/// The length that tells the agent to stop.
const STOP: u64 = u64::MAX;

/// A resident kernel that copies between device memory and pinned host memory.
///
/// ```
/// use warpwire::mem::{Agent, sim::{Sim, SimConfig}};
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let agent = Agent::start(&gpu).unwrap();
/// let (device, host) = (gpu.alloc(4096).unwrap(), gpu.alloc_pinned(4096).unwrap());
/// device.write(0, b"at once").unwrap();
/// agent.copy(&host.region(8, 7).unwrap(), &device.region(0, 7).unwrap()).unwrap();
/// let mut back = [0; 7];
/// host.read(8, &mut back).unwrap();
/// assert_eq!(&back, b"at once");
/// ```
pub struct Agent {
    device: Device,
    kernel: Kernel,
    stream: Stream,
    /// The request, in device memory, and how the CPU writes it.
    request: Allocation,
    window: Window,
    /// The number of the last request that is done, in pinned memory.
    done: Word,
    state: Mutex<State>,
}

struct State {
    /// The number of the last request made.
    sequence: u64,
    failure: Option<Error>,
}

impl Agent {
    /// Starts an agent on the device, which must offer CPU windows.
    pub fn start(device: &Device) -> Result<Arc<Self>> {
        let program =
            Program::new("copy agent").ptx(include_str!("agent.ptx")).block(KERNEL, agent_block);
        // Its own page, so that the request begins aligned; freed without waiting for the agent itself.
        let request = device.alloc_kind(4096, MemoryKind::Vmm)?;
        request.write(0, &[0; 32])?;
        let done = device.alloc_pinned(64)?.word64(0)?;
        done.store(0)?;
        let agent = Self {
            device: device.clone(),
            kernel: device.load(&program)?.kernel(KERNEL)?,
            stream: device.stream()?,
            window: request.window()?,
            request,
            done,
            state: Mutex::new(State { sequence: 0, failure: None }),
        };
        agent.start_kernel(0)?;
        Ok(Arc::new(agent))
    }

    /// The device that it runs on.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Copies `from` to `to`, of the same length, and returns when it is done. One side is memory of the
    /// agent's device; the other may be pinned host memory. Copies of several threads take turns.
    ///
    /// It is fast where both sides lie at the same offset from a multiple of 16 bytes.
    pub fn copy(&self, to: &Region, from: &Region) -> Result<()> {
        let reaches = |region: &Region| {
            let memory = region.allocation();
            let same_backend = memory.device().info().backend == self.device.info().backend;
            *memory.device() == self.device || same_backend && memory.kind() == MemoryKind::Pinned
        };
        if to.len() != from.len() || !reaches(to) || !reaches(from) || to.overlaps(from) {
            return Err(Error::new(Kind::InvalidArgument, "copy by agent")
                .on(self.device.label())
                .why("the two ranges differ in length, overlap, or are of another device"));
        }
        if to.is_empty() {
            return Ok(());
        }
        let mut state = self.state.lock();
        if let Some(failure) = &state.failure {
            return Err(failure.clone());
        }
        state.sequence += 1;
        let outcome = self
            .submit(state.sequence, to.address().raw(), from.address().raw(), to.len())
            .and_then(|()| self.wait_done(state.sequence));
        if let Err(error) = &outcome {
            // The agent may still be at that copy: nothing more can be asked of it, and what the copy uses
            // must stay for good.
            state.failure = Some(error.clone());
            std::mem::forget((to.clone(), from.clone()));
        }
        outcome
    }

    /// Writes a request: first what is asked, then its number, by which the agent knows.
    fn submit(&self, sequence: u64, to: u64, from: u64, len: u64) -> Result<()> {
        let mut request = [0; 24];
        request[..8].copy_from_slice(&to.to_le_bytes());
        request[8..16].copy_from_slice(&from.to_le_bytes());
        request[16..].copy_from_slice(&len.to_le_bytes());
        self.window.write(8, &request)?;
        self.window.write(0, &sequence.to_le_bytes())
    }

    fn wait_done(&self, sequence: u64) -> Result<()> {
        let start = Instant::now();
        let mut backoff = Backoff::default();
        loop {
            for _ in 0..POLLS_PER_CHECK {
                if self.done.load()? == sequence {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            // It went to sleep before it saw the request, or its device is gone.
            if self.stream.is_idle()? && self.done.load()? != sequence {
                self.start_kernel(sequence - 1)?;
            }
            if start.elapsed() > COPY_TIMEOUT {
                return Err(Error::new(Kind::Timeout, "copy by agent")
                    .on(self.device.label())
                    .why(format!("no answer in {COPY_TIMEOUT:?}")));
            }
            backoff.snooze();
        }
    }

    /// Starts the kernel, which has served all requests up to `last`.
    #[allow(unsafe_code)]
    fn start_kernel(&self, last: u64) -> Result<()> {
        let launch = Launch::new(&self.kernel)
            .threads(THREADS)
            .region(&self.request.whole()?)
            .region(self.done.region())
            .value(last)
            .value(IDLE_TIMEOUT_CYCLES);
        // SAFETY: beside the two words that it is given, which the launch keeps alive, the kernel touches
        // what requests name; `copy` takes those from regions, and returns only when they are done with, or
        // keeps them for good.
        unsafe { self.stream.launch(launch) }
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let sequence = self.state.lock().sequence;
        // If that fails the device is gone, and the kernel with it.
        if self.submit(sequence + 1, 0, 0, STOP).is_err() {
            tracing::debug!("a copy agent could not be told to stop");
        }
    }
}

fn agent_block(block: &Block<'_>) -> std::result::Result<(), KernelFault> {
    let (request, done) = (block.address(0)?, block.address(1)?);
    let mut last = block.value(2)?;
    let word =
        |at: u64| request.checked_add(at).ok_or_else(|| KernelFault::new("address overflow"));
    let mut buffer = vec![0; 1 << 16];
    loop {
        // Cycles of a clock of 2 GHz.
        let idle_timeout = Duration::from_nanos(block.value(3)? / 2);
        let start = Instant::now();
        let mut sequence = last;
        block.spin_until(|| {
            sequence = block.load_u64(word(0)?)?;
            Ok(sequence != last || start.elapsed() > idle_timeout)
        })?;
        let (to, from) = (block.load_u64(word(8)?)?, block.load_u64(word(16)?)?);
        let len = block.load_u64(word(24)?)?;
        if sequence == last || len == STOP {
            return Ok(());
        }
        let mut at = 0;
        while at < len {
            let step = (len - at).min(buffer.len() as u64) as usize;
            block.read(super::DeviceAddr::new(from.wrapping_add(at)), &mut buffer[..step])?;
            block.write(super::DeviceAddr::new(to.wrapping_add(at)), &buffer[..step])?;
            at += step as u64;
        }
        last = sequence;
        block.store_u64(done, last)?;
    }
}
