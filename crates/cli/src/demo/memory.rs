//! Demo stages that move memory between devices and the host.

use std::time::{Duration, Instant};

use indicatif::ProgressBar;
use warpwire::Result;
use warpwire::mem::{Allocation, Condition, Device, Stream, Word};
use warpwire_apps::pattern::{Pattern, fill_bytes};

use super::Stage;

const SEED: u64 = 0x5eed;
/// Longer than any stage takes on a working machine.
const TIMEOUT: Duration = Duration::from_secs(30);
/// Timed repetitions of a copy.
const COPIES: u32 = 8;
/// Bytes written through the CPU window.
const WINDOW_LEN: u64 = 64 << 10;
const ROUND_TRIPS: u32 = 500;
const REPLAYS: u32 = 200;

/// Runs all stages in order; each uses the data that the previous one left.
pub(super) fn stages(
    device_pair: &[Device; 2],
    size: u64,
    spinner: &ProgressBar,
) -> Result<Vec<Stage>> {
    let [near, far] = device_pair;
    let (near_endpoint, far_endpoint) = (Endpoint::new(near, size)?, Endpoint::new(far, size)?);
    let pinned = near.alloc_pinned(size)?;
    let mut stages = Vec::new();
    let mut add = |what: &str, stage: &dyn Fn() -> Result<Stage>| -> Result<()> {
        spinner.set_message(what.to_owned());
        stages.push(stage()?);
        Ok(())
    };
    add("fill", &|| near_endpoint.fill())?;
    add("device to device", &|| between(&near_endpoint, &far_endpoint))?;
    add("device to host", &|| to_host(&near_endpoint, &pinned))?;
    add("host to device", &|| to_device(&pinned, &near_endpoint))?;
    add("CPU window", &|| window(&near_endpoint))?;
    add("word round trip", &|| round_trips(near))?;
    add("graph replay", &|| replays(&near_endpoint))?;
    Ok(stages)
}

/// A device with a buffer, and kernels that fill and verify it.
struct Endpoint {
    device: Device,
    stream: Stream,
    memory: Allocation,
    pattern: Pattern,
    mismatches: Word,
}

impl Endpoint {
    fn new(device: &Device, size: u64) -> Result<Self> {
        Ok(Self {
            device: device.clone(),
            stream: device.stream()?,
            memory: device.alloc(size)?,
            pattern: Pattern::load(device)?,
            mismatches: device.alloc_pinned(8)?.word64(0)?,
        })
    }

    /// Fills the buffer with a kernel.
    fn fill(&self) -> Result<Stage> {
        let region = self.memory.whole()?;
        let took = self.repeat(|| self.pattern.fill(&self.stream, &region, SEED))?;
        let stage = Stage::new("fill by kernel", "-", self.device.label(), self.memory.len());
        Ok(stage.took(took, COPIES).checked(self.holds_pattern()?))
    }

    /// Verifies the buffer with a kernel.
    fn holds_pattern(&self) -> Result<bool> {
        self.mismatches.store(0)?;
        self.pattern.check(&self.stream, &self.memory.whole()?, SEED, &self.mismatches)?;
        self.stream.synchronize(TIMEOUT)?;
        Ok(self.mismatches.load()? == 0)
    }

    /// Zeroes the buffer, so that verification cannot succeed on old data.
    fn clear(&self) -> Result<()> {
        self.stream.fill(&self.memory.whole()?, 0)?;
        self.stream.synchronize(TIMEOUT)
    }

    /// Total time of [`COPIES`] runs of `queue`, after one warm-up run.
    fn repeat(&self, queue: impl Fn() -> Result<()>) -> Result<Duration> {
        queue()?;
        self.stream.synchronize(TIMEOUT)?;
        let start = Instant::now();
        (0..COPIES).try_for_each(|_| queue())?;
        self.stream.synchronize(TIMEOUT)?;
        Ok(start.elapsed())
    }
}

fn between(from: &Endpoint, to: &Endpoint) -> Result<Stage> {
    let stage = |what| Stage::new(what, from.device.label(), to.device.label(), to.memory.len());
    to.clear()?;
    let same_backend = from.device.info().backend == to.device.info().backend;
    if same_backend {
        let (target, source) = (to.memory.whole()?, from.memory.whole()?);
        let took = from.repeat(|| from.stream.copy(&target, &source))?;
        return Ok(stage("device to device").took(took, COPIES).checked(to.holds_pattern()?));
    }
    // No stream can access memory of both backends: copy through the host.
    let start = Instant::now();
    let mut buffer = vec![0; usize::try_from(from.memory.len()).unwrap_or(0)];
    from.memory.read(0, &mut buffer)?;
    to.memory.write(0, &buffer)?;
    Ok(stage("device to device, staged").took(start.elapsed(), 1).checked(to.holds_pattern()?))
}

fn to_host(from: &Endpoint, pinned: &Allocation) -> Result<Stage> {
    let (target, source) = (pinned.whole()?, from.memory.whole()?);
    let took = from.repeat(|| from.stream.copy(&target, &source))?;
    let verified = host_holds_pattern(pinned)?;
    let stage = Stage::new("device to host", from.device.label(), "pinned", pinned.len());
    Ok(stage.took(took, COPIES).checked(verified))
}

/// Verifies pinned memory with the CPU.
fn host_holds_pattern(pinned: &Allocation) -> Result<bool> {
    let (mut found, mut wanted) = (vec![0; 1 << 20], vec![0; 1 << 20]);
    let mut at = 0;
    while at < pinned.len() {
        let step =
            usize::try_from(pinned.len() - at).map_or(found.len(), |left| left.min(found.len()));
        pinned.read(at, &mut found[..step])?;
        fill_bytes(&mut wanted[..step], SEED, at);
        if found[..step] != wanted[..step] {
            return Ok(false);
        }
        at += step as u64;
    }
    Ok(true)
}

fn to_device(pinned: &Allocation, to: &Endpoint) -> Result<Stage> {
    to.clear()?;
    let (target, source) = (to.memory.whole()?, pinned.whole()?);
    let took = to.repeat(|| to.stream.copy(&target, &source))?;
    let stage = Stage::new("host to device", "pinned", to.device.label(), pinned.len());
    Ok(stage.took(took, COPIES).checked(to.holds_pattern()?))
}

/// The CPU stores to device memory through the window and the device verifies it; then the device
/// writes, and the CPU reads through the window.
fn window(end: &Endpoint) -> Result<Stage> {
    let memory = end.device.alloc(WINDOW_LEN)?;
    let stage = Stage::new("write through CPU window", "cpu", end.device.label(), WINDOW_LEN);
    let window = match memory.window() {
        Ok(window) => window,
        Err(error) => return Ok(stage.skipped(error.reason())),
    };
    let (mut sent, mut found) = (vec![0; WINDOW_LEN as usize], vec![0; WINDOW_LEN as usize]);
    fill_bytes(&mut sent, SEED, 0);
    end.stream.fill(&memory.whole()?, 0)?;
    end.stream.synchronize(TIMEOUT)?;
    let start = Instant::now();
    (0..COPIES).try_for_each(|_| window.write(0, &sent))?;
    window.flush();
    let took = start.elapsed();
    end.mismatches.store(0)?;
    end.pattern.check(&end.stream, &memory.whole()?, SEED, &end.mismatches)?;
    end.pattern.fill(&end.stream, &memory.whole()?, SEED + 1)?;
    end.stream.synchronize(TIMEOUT)?;
    let arrived = end.mismatches.load()? == 0;
    window.read(0, &mut found)?;
    fill_bytes(&mut sent, SEED + 1, 0);
    Ok(stage.took(took, COPIES).checked(arrived && found == sent))
}

/// Two streams exchange words: each waits for the value that the other writes.
fn round_trips(device: &Device) -> Result<Stage> {
    let words = device.alloc_pinned(128)?;
    let (ping, pong) = (words.word64(0)?, words.word64(64)?);
    ping.store(0)?;
    pong.store(0)?;
    let (first, second) = (device.stream()?, device.stream()?);
    // Everything is enqueued behind a gate, so that enqueueing does not count.
    let gate = device.alloc_pinned(8)?.word64(0)?;
    gate.store(0)?;
    first.wait_value(&gate, Condition::AtLeast, 1)?;
    for round in 1..=u64::from(ROUND_TRIPS) {
        first.write_value(&ping, round)?;
        second.wait_value(&ping, Condition::AtLeast, round)?;
        second.write_value(&pong, round)?;
        first.wait_value(&pong, Condition::AtLeast, round)?;
    }
    let start = Instant::now();
    gate.store(1)?;
    first.synchronize(TIMEOUT)?;
    let took = start.elapsed();
    second.synchronize(TIMEOUT)?;
    let verified = pong.load()? == u64::from(ROUND_TRIPS);
    let stage = Stage::new("word round trip", "stream", "stream", 8);
    Ok(stage.took(took, ROUND_TRIPS).checked(verified))
}

/// Replays a captured graph of a fill, a copy and a word write.
fn replays(end: &Endpoint) -> Result<Stage> {
    let small = end.device.alloc(4096)?;
    let count = end.device.alloc_pinned(8)?.word64(0)?;
    count.store(0)?;
    let graph = end.stream.capture(|stream| {
        stream.fill(&small.whole()?, 0)?;
        stream.copy(&small.whole()?, &end.memory.region(0, 4096)?)?;
        stream.write_value(&count, 1)
    })?;
    let start = Instant::now();
    (0..REPLAYS).try_for_each(|_| end.stream.replay(&graph))?;
    end.stream.synchronize(TIMEOUT)?;
    let took = start.elapsed();
    let (mut found, mut wanted) = (vec![0; 4096], vec![0; 4096]);
    small.read(0, &mut found)?;
    fill_bytes(&mut wanted, SEED, 0);
    let verified = found == wanted && count.load()? == 1;
    let label = end.device.label();
    let stage = Stage::new("graph replay: fill, copy, word", &label, &label, 4096);
    Ok(stage.took(took, REPLAYS).checked(verified))
}
