//! The copy agent: a small resident (persistent) kernel that copies when the CPU rings a doorbell.
//!
//! A copy engine call costs about 7 µs before the first byte moves. A running kernel that polls a
//! word in device memory, written by the CPU through a [window](super::Window), starts in one or
//! two microseconds. It occupies one multiprocessor while it runs, so it is only started on
//! request; after about a second without requests it exits, and the next request restarts it.

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
/// Time without requests after which the kernel exits, in clock cycles: about a second.
const IDLE_TIMEOUT_CYCLES: u64 = 2_000_000_000;
/// Polls of the completion word between two checks that the kernel still runs.
const POLLS_PER_CHECK: u32 = 2_000;
/// Far longer than any copy takes.
const COPY_TIMEOUT: Duration = Duration::from_secs(10);
/// A request length that makes the agent exit.
const STOP: u64 = u64::MAX;

/// A resident kernel that copies between device memory and pinned host memory.
///
/// ```
/// use warpwire::mem::{CopyAgent, sim::{Sim, SimConfig}};
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let agent = CopyAgent::start(&gpu).unwrap();
/// let (device, host) = (gpu.alloc(4096).unwrap(), gpu.alloc_pinned(4096).unwrap());
/// device.write(0, b"payload").unwrap();
/// agent.copy(&host.region(8, 7).unwrap(), &device.region(0, 7).unwrap()).unwrap();
/// let mut back = [0; 7];
/// host.read(8, &mut back).unwrap();
/// assert_eq!(&back, b"payload");
/// ```
pub struct CopyAgent {
    device: Device,
    kernel: Kernel,
    stream: Stream,
    /// The request slot, in device memory, and the window through which the CPU writes it.
    request: Allocation,
    window: Window,
    /// Sequence number of the last completed request, in pinned memory.
    done: Word,
    state: Mutex<State>,
}

struct State {
    /// Sequence number of the last submitted request.
    sequence: u64,
    failure: Option<Error>,
}

impl CopyAgent {
    /// Starts an agent on the device, which must support CPU windows.
    pub fn start(device: &Device) -> Result<Arc<Self>> {
        let program =
            Program::new("copy agent").ptx(include_str!("agent.ptx")).block(KERNEL, agent_block);
        // VMM memory is page-aligned, and freeing it does not wait for the running kernel.
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

    /// Copies `from` to `to`, of the same length, and returns when the copy is complete. One side
    /// is memory of the agent's device; the other may be pinned host memory. Concurrent calls are
    /// serialized.
    ///
    /// Fast only if both addresses are equal modulo 16; otherwise it copies byte by byte.
    pub fn copy(&self, to: &Region, from: &Region) -> Result<()> {
        let accessible = |region: &Region| self.device.can_access(region.allocation());
        if to.len() != from.len() || !accessible(to) || !accessible(from) || to.overlaps(from) {
            return Err(Error::new(Kind::InvalidArgument, "copy by agent")
                .on(self.device.label())
                .why("the ranges differ in length, overlap, or belong to another device"));
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
            // The agent may still be executing that copy: it takes no further requests, and the
            // memory is leaked because it may still be accessed.
            state.failure = Some(error.clone());
            std::mem::forget((to.clone(), from.clone()));
        }
        outcome
    }

    /// Writes a request: first its arguments, then its sequence number, which triggers the agent.
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
            // The kernel exited before it saw the request, or the device is lost.
            if self.stream.is_idle()? && self.done.load()? != sequence {
                self.start_kernel(sequence - 1)?;
            }
            if start.elapsed() > COPY_TIMEOUT {
                return Err(Error::new(Kind::Timeout, "copy by agent")
                    .on(self.device.label())
                    .why(format!("no response within {COPY_TIMEOUT:?}")));
            }
            backoff.snooze();
        }
    }

    /// Launches the kernel; it skips requests up to `last`.
    #[allow(unsafe_code)]
    fn start_kernel(&self, last: u64) -> Result<()> {
        let launch = Launch::new(&self.kernel)
            .threads(THREADS)
            .region(&self.request.whole()?)
            .region(self.done.region())
            .value(last)
            .value(IDLE_TIMEOUT_CYCLES);
        // SAFETY: besides its two arguments, which the launch keeps alive, the kernel only accesses
        // memory that requests name. `copy` takes those ranges from regions and returns only after
        // completion; on failure it leaks them.
        unsafe { self.stream.launch(launch) }
    }
}

impl Drop for CopyAgent {
    fn drop(&mut self) {
        let sequence = self.state.lock().sequence;
        // If this fails, the device is lost and the kernel with it.
        if self.submit(sequence + 1, 0, 0, STOP).is_err() {
            tracing::debug!("could not stop a copy agent");
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
        // The argument counts cycles of a 2 GHz clock.
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
