//! Kernels of two ranks that send to and fro by themselves, and a kernel that only takes time: for measurements, and as an
//! example of kernels that use a [lane](super::lane).

use std::time::{Duration, Instant};

use crate::error::{Error, Kind, Result};
use crate::mem::sim::{Block, Fault};
use crate::mem::{Allocation, Condition, Device, Kernel, Launch, Program, Stream, Width, Word};
use crate::stream::KernelQp;
use crate::stream::kernel::Ended;
use crate::stream::kernel::device::{Local, Qp, wait_signal};
use crate::verbs::{Remote, Sge};

const COMPUTE: &str = "rally_compute";
const PLAY: &str = "rally_play";

/// The kernels, loaded onto a device.
#[derive(Clone, Debug)]
pub struct Rally {
    compute: Kernel,
    play: Kernel,
    /// How the first that failed ended.
    report: Allocation,
}

/// What one side of a rally sends, and where it looks.
#[derive(Clone, Debug)]
pub struct Side<'a> {
    /// The queue pair to the other rank.
    pub qp: &'a KernelQp,
    /// Where the data goes.
    pub to: Remote,
    /// The data.
    pub from: Sge,
    /// The other's word, to which one is added after the data.
    pub signal: Remote,
    /// Our own, to which the other adds: 64 bits of device memory.
    pub own: &'a Word,
    /// What our own word is before.
    pub start: u64,
    /// Whether this side begins.
    pub serves: bool,
}

impl Rally {
    /// Loads the kernels.
    pub fn load(device: &Device) -> Result<Self> {
        let program = Program::new("rally")
            .ptx(include_str!("rally.ptx"))
            .block(COMPUTE, |block| take_time(block, block.value(0)?))
            .block(PLAY, play);
        let module = device.load(&program)?;
        let report = device.alloc_pinned(8)?;
        report.host_bytes()?.store_u64(0, 0)?;
        Ok(Self { compute: module.kernel(COMPUTE)?, play: module.kernel(PLAY)?, report })
    }

    /// A kernel that does nothing for so long.
    pub fn compute(&self, stream: &Stream, time: Duration) -> Result<()> {
        start(stream, Launch::new(&self.compute).value(nanos(time)))
    }

    /// A kernel that plays so many rounds, each with so much time for computing, and gives up when it has waited for
    /// `patience`.
    pub fn play(
        &self,
        stream: &Stream,
        side: &Side<'_>,
        rounds: u64,
        compute: Duration,
        patience: Duration,
    ) -> Result<()> {
        if side.own.width() != Width::Bits64 {
            let error = Error::new(Kind::InvalidArgument, "play a rally").on(stream.label());
            return Err(error.why("its word has 32 bits").fix("use a word of 64 bits"));
        }
        let launch = side
            .qp
            .pass(Launch::new(&self.play))?
            .region(&self.report.whole()?)
            .value(side.to.address)
            .value(side.to.rkey.into())
            .value(side.from.address)
            .value(side.from.lkey.into())
            .value(side.from.len.into())
            .value(side.signal.address)
            .value(side.signal.rkey.into())
            .region(side.own.region())
            .value(side.start)
            .value(rounds)
            .value(side.serves.into())
            .value(nanos(compute))
            .value(nanos(patience));
        start(stream, launch)
    }

    /// An error if a rally did not end well: ask when its stream has been synchronized.
    pub fn check(&self) -> Result<()> {
        match self.report.host_bytes()?.load_u64(0)? {
            0 => Ok(()),
            word => Err(Error::new(Kind::StreamFailed, "play a rally")
                .why(Ended::from_code(word as u32 as i32).to_string())),
        }
    }
}

#[allow(unsafe_code)]
fn start(stream: &Stream, launch: Launch) -> Result<()> {
    // SAFETY: the kernels touch the handle and the queues that it names, the report and the word, all of which the launch
    // keeps alive. Data is named by keys, and looked up by the engine.
    unsafe { stream.launch(launch) }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn take_time(block: &Block<'_>, nanos: u64) -> std::result::Result<(), Fault> {
    let (start, time) = (Instant::now(), Duration::from_nanos(nanos));
    match nanos {
        0 => Ok(()),
        _ => block.spin_until(|| Ok(start.elapsed() >= time)).map(drop),
    }
}

fn play(block: &Block<'_>) -> std::result::Result<(), Fault> {
    let qp = Qp::open(block, block.address(0)?)?;
    let to = Remote { address: block.value(2)?, rkey: block.value(3)? as u32 };
    let from = Local { address: block.value(4)?, lkey: block.value(5)? as u32 };
    let len = block.value(6)?;
    let word = Remote { address: block.value(7)?, rkey: block.value(8)? as u32 };
    let (own, start, rounds) = (block.address(9)?, block.value(10)?, block.value(11)?);
    let (serves, compute) = (block.value(12)? != 0, block.value(13)?);
    let timeout = Duration::from_nanos(block.value(14)?);
    let came = |round: u64| {
        let wanted = start.wrapping_add(round);
        wait_signal(block, own, Width::Bits64, Condition::AtLeast, wanted, timeout)
    };
    let mut ended = Ended::Ok;
    for round in 1..=rounds {
        if !serves {
            ended = came(round)?;
        }
        if ended.is_ok() {
            take_time(block, compute)?;
            ended = qp.put_signal(to, from, len, (word, 1), timeout)?.ended;
        }
        if serves && ended.is_ok() {
            ended = came(round)?;
        }
        if !ended.is_ok() {
            break;
        }
    }
    if ended.is_ok() {
        ended = qp.quiet(timeout)?;
    }
    if !ended.is_ok() {
        let report = 1 << 63 | u64::from(ended.code() as u32);
        block.compare_exchange_u64(block.address(1)?, 0, report)?;
    }
    Ok(())
}
