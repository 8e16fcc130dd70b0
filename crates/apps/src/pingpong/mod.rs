//! A kernel that answers the CPU, one word per round, to measure the round-trip time.

use std::time::{Duration, Instant};

use warpwire::error::{Error, Kind, Result};
use warpwire::mem::sim::{Block, KernelFault};
use warpwire::mem::{Device, DeviceAddr, Kernel, Launch, Program, Stream, Word, WordWidth};

const NARROW: &str = "pingpong_32";
const WIDE: &str = "pingpong_64";
/// How long the kernel waits for the CPU, in clock cycles: about ten seconds.
const TIMEOUT_CYCLES: u64 = 20_000_000_000;

/// The ping-pong kernels, loaded onto a device.
///
/// ```
/// use std::time::Duration;
/// use warpwire::mem::sim::{Sim, SimConfig};
/// use warpwire_apps::pingpong::PingPong;
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let (memory, pinned) = (gpu.alloc(8).unwrap(), gpu.alloc_pinned(8).unwrap());
/// let (ask, answer) = (memory.word64(0).unwrap(), pinned.word64(0).unwrap());
/// ask.store(0).unwrap();
/// answer.store(0).unwrap();
/// let (window, stream) = (memory.window().unwrap(), gpu.stream().unwrap());
/// PingPong::load(&gpu).unwrap().start(&stream, &ask, &answer, 10).unwrap();
/// for round in 1..=10 {
///     window.bytes().store_u64(0, round).unwrap(); // on CUDA: window.write, which flushes
///     while answer.load().unwrap() < round {
///         std::hint::spin_loop();
///     }
/// }
/// stream.synchronize(Duration::from_secs(5)).unwrap();
/// ```
#[derive(Clone, Debug)]
pub struct PingPong {
    narrow: Kernel,
    wide: Kernel,
}

impl PingPong {
    /// Loads the kernels.
    pub fn load(device: &Device) -> Result<Self> {
        let program = Program::new("pingpong")
            .ptx(include_str!("pingpong.ptx"))
            .block(NARROW, |block| {
                let load = |at| block.load_u32(at).map(u64::from);
                answer_each(block, load, |at, value| block.store_u32(at, value as u32))
            })
            .block(WIDE, |block| {
                answer_each(block, |at| block.load_u64(at), |at, value| block.store_u64(at, value))
            });
        let module = device.load(&program)?;
        Ok(Self { narrow: module.kernel(NARROW)?, wide: module.kernel(WIDE)? })
    }

    /// Starts a kernel that waits until the word `ask` is 1, sets `answer` to 1, waits for 2, and
    /// so on up to `rounds`. Both words must be 0 before. It ends after the last round, or when it
    /// has waited for the CPU for about ten seconds.
    ///
    /// The words must have the same width, and be in device or pinned memory.
    pub fn start(&self, stream: &Stream, ask: &Word, answer: &Word, rounds: u64) -> Result<()> {
        let failure = |why: &str| {
            Err(Error::new(Kind::InvalidArgument, "start a ping-pong")
                .on(stream.label())
                .why(why.to_owned()))
        };
        if ask.width() != answer.width() {
            return failure("the words differ in width");
        }
        if ask.address() == answer.address() {
            return failure("the two words are the same");
        }
        if !ask.width().fits(rounds) {
            return failure("the words are too narrow for that many rounds");
        }
        let kernel = if ask.width() == WordWidth::Bits32 { &self.narrow } else { &self.wide };
        let launch = Launch::new(kernel)
            .region(ask.region())
            .region(answer.region())
            .value(rounds)
            .value(TIMEOUT_CYCLES);
        start(stream, launch)
    }
}

#[allow(unsafe_code)]
fn start(stream: &Stream, launch: Launch) -> Result<()> {
    // SAFETY: the kernels access only the two words that they are given, which the launch keeps
    // alive.
    unsafe { stream.launch(launch) }
}

fn answer_each(
    block: &Block<'_>,
    load: impl Fn(DeviceAddr) -> std::result::Result<u64, KernelFault>,
    store: impl Fn(DeviceAddr, u64) -> std::result::Result<(), KernelFault>,
) -> std::result::Result<(), KernelFault> {
    let (ask, answer, rounds) = (block.address(0)?, block.address(1)?, block.value(2)?);
    // Clock cycles at 2 GHz.
    let timeout = Duration::from_nanos(block.value(3)? / 2);
    for round in 1..=rounds {
        let (start, mut asked) = (Instant::now(), false);
        block.spin_until(|| {
            asked = load(ask)? >= round;
            Ok(asked || start.elapsed() > timeout)
        })?;
        if !asked {
            return Ok(());
        }
        store(answer, round)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use warpwire::mem::sim::{Sim, SimConfig};

    #[test]
    fn mismatched_words_are_rejected() {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        let (pingpong, stream) = (PingPong::load(&gpu).unwrap(), gpu.stream().unwrap());
        let memory = gpu.alloc_pinned(64).unwrap();
        let (narrow, wide) = (memory.word32(0).unwrap(), memory.word64(8).unwrap());
        let other = memory.word32(16).unwrap();
        for (ask, answer, rounds) in
            [(&narrow, &wide, 1), (&wide, &wide, 1), (&narrow, &other, 1 << 32)]
        {
            let error = pingpong.start(&stream, ask, answer, rounds).unwrap_err();
            assert_eq!(error.kind(), &Kind::InvalidArgument, "{error}");
        }
    }
}
