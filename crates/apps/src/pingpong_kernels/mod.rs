//! Ping-pong between kernels of two ranks, a kernel that puts or gets, one that relays words
//! without an HCA, and one that busy-waits: for benchmarks, and as an example of kernels that use a
//! [device channel](warpwire::msg::device_channel).
//!
//! [`pingpong`](crate::pingpong) measures the round trip between a kernel and the CPU instead.

use std::time::{Duration, Instant};

use warpwire::error::{Error, Kind, Result};
use warpwire::mem::sim::{Block, KernelFault};
use warpwire::mem::{
    Allocation, Condition, Device, DeviceAddr, Kernel, Launch, Program, Region, Stream, Word,
    WordWidth,
};
use warpwire::stream::KernelQp;
use warpwire::stream::kernel::KernelStatus;
use warpwire::stream::kernel::device::{DeviceQp, Local, wait_signal};
use warpwire::verbs::{Remote, Sge};

const COMPUTE: &str = "pingpong_compute";
const PLAY: &str = "pingpong_play";
const MOVE: &str = "pingpong_move";
const RELAY: &str = "pingpong_relay";
/// The operation in error texts.
const WHAT: &str = "run a ping-pong between kernels";

/// The kernels, loaded onto a device.
#[derive(Clone, Debug)]
pub struct PingPongKernels {
    compute: Kernel,
    ping_pong: Kernel,
    transfer: Kernel,
    relay: Kernel,
    /// Status of the first kernel that failed, or 0.
    report: Allocation,
}

/// One side of a ping-pong: what it sends, and the word that it polls.
#[derive(Clone, Debug)]
pub struct PingPongEnd<'a> {
    /// The queue pair to the other rank.
    pub qp: &'a KernelQp,
    /// The peer's memory that the data is written to.
    pub to: Remote,
    /// The data.
    pub from: Sge,
    /// The peer's word, to which one is added after the data.
    pub signal: Remote,
    /// The local word, to which the peer adds: 64 bits of device memory.
    pub own: &'a Word,
    /// Initial value of the local word.
    pub start: u64,
    /// Whether this side sends first.
    pub sends_first: bool,
}

/// Repeated transfers between local and remote memory.
#[derive(Clone, Debug)]
pub struct KernelTransfer<'a> {
    /// The queue pair to the other rank.
    pub qp: &'a KernelQp,
    /// The peer's memory.
    pub there: Remote,
    /// The local memory.
    pub here: Sge,
    /// Whether to read the peer's memory instead of writing it.
    pub reads: bool,
}

/// One side of a relay of words, without queue pairs.
#[derive(Clone, Debug)]
pub struct Relay<'a> {
    /// Pinned memory of at least 72 bytes: the doorbell at offset 0, the value that it announces at
    /// offset 64, on a separate cache line.
    pub bell: &'a Region,
    /// The local 64-bit word, to which a host thread writes the peer's value.
    pub own: &'a Word,
    /// Whether this side sends first.
    pub sends_first: bool,
}

impl PingPongKernels {
    /// Loads the kernels.
    pub fn load(device: &Device) -> Result<Self> {
        let program = Program::new("ping-pong kernels")
            .ptx(include_str!("pingpong_kernels.ptx"))
            .block(COMPUTE, |block| take_time(block, block.value(0)?))
            .block(PLAY, ping_pong)
            .block(MOVE, transfer)
            .block(RELAY, relay);
        let module = device.load(&program)?;
        let report = device.alloc_pinned(8)?;
        report.host_bytes()?.store_u64(0, 0)?;
        Ok(Self {
            compute: module.kernel(COMPUTE)?,
            ping_pong: module.kernel(PLAY)?,
            transfer: module.kernel(MOVE)?,
            relay: module.kernel(RELAY)?,
            report,
        })
    }

    /// Launches a kernel that busy-waits for `time`, as a stand-in for one that computes.
    pub fn compute(&self, stream: &Stream, time: Duration) -> Result<()> {
        start(stream, Launch::new(&self.compute).value(nanos(time)))
    }

    /// Launches a kernel that plays `rounds` rounds, busy-waiting for `compute` in each. It fails
    /// if a single wait exceeds `timeout`.
    pub fn ping_pong(
        &self,
        stream: &Stream,
        side: &PingPongEnd<'_>,
        rounds: u64,
        compute: Duration,
        timeout: Duration,
    ) -> Result<()> {
        check_word(side.own, stream)?;
        let launch = side
            .qp
            .pass(Launch::new(&self.ping_pong))?
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
            .value(side.sends_first.into())
            .value(nanos(compute))
            .value(nanos(timeout));
        start(stream, launch)
    }

    /// Launches a kernel that puts or gets `rounds` times, waiting for each before the next.
    pub fn transfer(
        &self,
        stream: &Stream,
        what: &KernelTransfer<'_>,
        rounds: u64,
        compute: Duration,
        timeout: Duration,
    ) -> Result<()> {
        let launch = what
            .qp
            .pass(Launch::new(&self.transfer))?
            .region(&self.report.whole()?)
            .value(what.there.address)
            .value(what.there.rkey.into())
            .value(what.here.address)
            .value(what.here.lkey.into())
            .value(what.here.len.into())
            .value(what.reads.into())
            .value(rounds)
            .value(nanos(compute))
            .value(nanos(timeout));
        start(stream, launch)
    }

    /// Launches a kernel that exchanges words with the host thread that polls its doorbell: the
    /// baseline, a relay without HCA.
    pub fn relay(
        &self,
        stream: &Stream,
        relay: &Relay<'_>,
        rounds: u64,
        timeout: Duration,
    ) -> Result<()> {
        check_word(relay.own, stream)?;
        if relay.bell.len() < DOORBELL_LEN {
            let why = format!("its doorbell has {} bytes", relay.bell.len());
            let error = Error::new(Kind::InvalidArgument, WHAT).on(stream.label());
            return Err(error.why(why).fix(format!("pass {DOORBELL_LEN} bytes of pinned memory")));
        }
        let launch = Launch::new(&self.relay)
            .region(&self.report.whole()?)
            .region(relay.bell)
            .region(relay.own.region())
            .value(rounds)
            .value(relay.sends_first.into())
            .value(nanos(timeout));
        start(stream, launch)
    }

    /// Returns an error if one of these kernels failed. Call it after synchronizing their stream.
    pub fn check(&self) -> Result<()> {
        match self.report.host_bytes()?.load_u64(0)? {
            0 => Ok(()),
            word => Err(Error::new(Kind::StreamFailed, WHAT)
                .why(KernelStatus::from_code(word as u32 as i32).to_string())),
        }
    }
}

/// Bytes of the doorbell's cache line, and of the value behind it.
const DOORBELL_LEN: u64 = 72;

fn check_word(word: &Word, stream: &Stream) -> Result<()> {
    if word.width() == WordWidth::Bits64 {
        return Ok(());
    }
    let error = Error::new(Kind::InvalidArgument, WHAT).on(stream.label());
    Err(error.why("its word has 32 bits").fix("use a word of 64 bits"))
}

#[allow(unsafe_code)]
fn start(stream: &Stream, launch: Launch) -> Result<()> {
    // SAFETY: the kernels access the handle and the queues that it points to, the report, the
    // doorbell and the word, all of which the launch keeps alive. Data is addressed by keys, which
    // the engine checks.
    unsafe { stream.launch(launch) }
}

fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

fn take_time(block: &Block<'_>, nanos: u64) -> std::result::Result<(), KernelFault> {
    let (start, time) = (Instant::now(), Duration::from_nanos(nanos));
    match nanos {
        0 => Ok(()),
        _ => block.spin_until(|| Ok(start.elapsed() >= time)).map(drop),
    }
}

fn ping_pong(block: &Block<'_>) -> std::result::Result<(), KernelFault> {
    let qp = DeviceQp::open(block, block.address(0)?)?;
    let to = Remote { address: block.value(2)?, rkey: block.value(3)? as u32 };
    let from = Local { address: block.value(4)?, lkey: block.value(5)? as u32 };
    let len = block.value(6)?;
    let word = Remote { address: block.value(7)?, rkey: block.value(8)? as u32 };
    let (own, start, rounds) = (block.address(9)?, block.value(10)?, block.value(11)?);
    let (sends_first, compute) = (block.value(12)? != 0, block.value(13)?);
    let timeout = Duration::from_nanos(block.value(14)?);
    let wait_round = |round: u64| {
        let wanted = start.wrapping_add(round);
        wait_signal(block, own, WordWidth::Bits64, Condition::AtLeast, wanted, timeout)
    };
    let mut status = KernelStatus::Ok;
    for round in 1..=rounds {
        if !sends_first {
            status = wait_round(round)?;
        }
        if status.is_ok() {
            take_time(block, compute)?;
            status = qp.put_signal(to, from, len, (word, 1), timeout)?.status;
        }
        if sends_first && status.is_ok() {
            status = wait_round(round)?;
        }
        if !status.is_ok() {
            break;
        }
    }
    if status.is_ok() {
        status = qp.quiet(timeout)?;
    }
    report_status(block, 1, status)
}

/// Stores a failure to the report, which is argument number `report`, unless another kernel has
/// failed before.
fn report_status(
    block: &Block<'_>,
    report: usize,
    status: KernelStatus,
) -> std::result::Result<(), KernelFault> {
    if !status.is_ok() {
        let code = 1 << 63 | u64::from(status.code() as u32);
        block.compare_exchange_u64(block.address(report)?, 0, code)?;
    }
    Ok(())
}

fn transfer(block: &Block<'_>) -> std::result::Result<(), KernelFault> {
    let qp = DeviceQp::open(block, block.address(0)?)?;
    let there = Remote { address: block.value(2)?, rkey: block.value(3)? as u32 };
    let here = Local { address: block.value(4)?, lkey: block.value(5)? as u32 };
    let (len, reads, rounds) = (block.value(6)?, block.value(7)? != 0, block.value(8)?);
    let (compute, timeout) = (block.value(9)?, Duration::from_nanos(block.value(10)?));
    let mut status = KernelStatus::Ok;
    for _ in 0..rounds {
        take_time(block, compute)?;
        let ticket = match reads {
            true => qp.get(here, there, len, timeout)?,
            false => qp.put(there, here, len, timeout)?,
        };
        status = if ticket.status.is_ok() { qp.wait(ticket, timeout)? } else { ticket.status };
        if !status.is_ok() {
            break;
        }
    }
    report_status(block, 1, status)
}

fn relay(block: &Block<'_>) -> std::result::Result<(), KernelFault> {
    let (bell, own) = (block.address(1)?, block.address(2)?);
    let (rounds, sends_first) = (block.value(3)?, block.value(4)? != 0);
    let timeout = Duration::from_nanos(block.value(5)?);
    let value = DeviceAddr::new(bell.raw() + 64);
    let wait_round =
        |round| wait_signal(block, own, WordWidth::Bits64, Condition::AtLeast, round, timeout);
    let mut status = KernelStatus::Ok;
    for round in 1..=rounds {
        if !sends_first {
            status = wait_round(round)?;
        }
        if status.is_ok() {
            block.store_u64(value, round)?;
            block.store_u64(bell, round)?;
        }
        if sends_first {
            status = wait_round(round)?;
        }
        if !status.is_ok() {
            break;
        }
    }
    report_status(block, 0, status)
}
