//! The suite's kernels: calls.cu, and block functions with the same code for the simulated GPU.

use std::time::Duration;

use warpwire::mem::sim::{Block, KernelFault};
use warpwire::mem::{Condition, Device, DeviceAddr, Module, Program, WordWidth};
use warpwire::stream::kernel::KernelStatus;
use warpwire::stream::kernel::device::{DeviceQp, DeviceTicket, Local, wait_signal};
use warpwire::verbs::{Access, Remote};

use crate::ptx;

/// Indices in a kernel's parameter list.
pub mod at {
    pub const HERE: u64 = 0;
    pub const HERE_KEY: u64 = 1;
    pub const THERE: u64 = 2;
    pub const THERE_KEY: u64 = 3;
    pub const WORD: u64 = 4;
    pub const WORD_KEY: u64 = 5;
    pub const OWN_WORD: u64 = 6;
    pub const TIMEOUT: u64 = 7;
    pub const BAD_KEY: u64 = 8;
    pub const RESULTS: u64 = 16;
}

type FaultResult<T> = Result<T, KernelFault>;

/// The PTX that CUDA loads.
pub const PTX: &str = "kernels/calls";

/// The kernels of the program.
pub const NAMES: [&str; 12] = [
    "calls_active",
    "calls_passive",
    "calls_fail",
    "calls_one",
    "calls_storm",
    "calls_ping",
    "calls_relay",
    "calls_loop",
    "calls_order",
    "calls_exchange",
    "calls_hold",
    "calls_ping_mapped",
];

pub fn load(gpu: &Device) -> warpwire::Result<Module> {
    let program = Program::new("calls")
        .block("calls_active", active)
        .block("calls_passive", passive)
        .block("calls_fail", fail)
        .block("calls_one", one)
        .block("calls_storm", storm)
        .block("calls_ping", ping)
        .block("calls_relay", relay)
        .block("calls_loop", repeat)
        .block("calls_order", order)
        .block("calls_exchange", exchange)
        .block("calls_hold", hold)
        .block("calls_ping_mapped", ping_mapped);
    ptx::load(gpu, PTX, program)
}

/// A kernel's parameter list.
struct List<'b> {
    block: &'b Block<'b>,
    at: u64,
    next: u64,
}

impl<'b> List<'b> {
    fn new(block: &'b Block<'b>, at: u64) -> Self {
        Self { block, at, next: at::RESULTS }
    }

    fn word(&self, place: u64) -> FaultResult<u64> {
        self.block.load_u64(DeviceAddr::new(self.at + place * 8))
    }

    fn push_result(&mut self, value: u64) -> FaultResult<()> {
        let at = DeviceAddr::new(self.at + self.next * 8);
        self.next += 1;
        self.block.store_u64(at, value)
    }

    fn status(&mut self, status: KernelStatus) -> FaultResult<()> {
        self.push_result(i64::from(status.code()) as u64)
    }

    fn here(&self) -> FaultResult<Local> {
        Ok(Local { address: self.word(at::HERE)?, lkey: self.word(at::HERE_KEY)? as u32 })
    }

    fn there(&self, offset: u64) -> FaultResult<Remote> {
        let address = self.word(at::THERE)? + offset;
        Ok(Remote { address, rkey: self.word(at::THERE_KEY)? as u32 })
    }

    fn counter(&self) -> FaultResult<Remote> {
        Ok(Remote { address: self.word(at::WORD)?, rkey: self.word(at::WORD_KEY)? as u32 })
    }

    fn timeout(&self) -> FaultResult<Duration> {
        self.word(at::TIMEOUT).map(Duration::from_nanos)
    }
}

fn active(block: &Block<'_>) -> FaultResult<()> {
    let qp = DeviceQp::open(block, block.address(0)?)?;
    let mut list = List::new(block, block.value(1)?);
    let (here, word, timeout) = (list.here()?, list.counter()?, list.timeout()?);
    let result = Local { address: here.address + 8, ..here };
    let wait = |ticket: DeviceTicket| qp.wait(ticket, timeout);
    let fetched = || block.load_u64(DeviceAddr::new(result.address));
    list.status(wait(qp.put(list.there(0)?, here, 4096, timeout)?)?)?;
    let value = 0x1122_3344_5566_7788_u64.to_le_bytes();
    list.status(wait(qp.put_inline(list.there(4096)?, &value, timeout)?)?)?;
    list.status(wait(qp.put_signal(list.there(8192)?, here, 64, (word, 5), timeout)?)?)?;
    let to = Local { address: here.address + 16384, ..here };
    list.status(wait(qp.get(to, list.there(16384)?, 4096, timeout)?)?)?;
    list.status(wait(qp.fetch_add(word, 7, Some(result), timeout)?)?)?;
    list.push_result(fetched()?)?;
    list.status(wait(qp.compare_swap(word, [12, 99], Some(result), timeout)?)?)?;
    list.push_result(fetched()?)?;
    list.status(qp.send(here, 100, None, timeout)?.status)?;
    list.status(qp.send(here, 50, Some(77), timeout)?.status)?;
    list.status(qp.put_imm(list.there(12288)?, here, 16, 88, timeout)?.status)?;
    let last = qp.put(list.there(0)?, here, 0, timeout)?;
    list.status(qp.quiet(timeout)?)?;
    list.status(qp.wait(last, Duration::ZERO)?)?;
    list.status(qp.put_inline(list.there(0)?, &[0; 29], timeout)?.status)?;
    let beyond = DeviceTicket { number: u64::MAX - 1, status: KernelStatus::Ok };
    list.status(qp.wait(beyond, Duration::ZERO)?)
}

fn passive(block: &Block<'_>) -> FaultResult<()> {
    let qp = DeviceQp::open(block, block.address(0)?)?;
    let mut list = List::new(block, block.value(1)?);
    let (here, timeout) = (list.here()?, list.timeout()?);
    let mut receives = Vec::new();
    for number in 0..3 {
        let into = Local { address: here.address + 32768 + 256 * number, ..here };
        receives.push(qp.post_receive(into, 256, timeout)?);
    }
    let word = DeviceAddr::new(list.word(at::OWN_WORD)?);
    list.status(wait_signal(block, word, WordWidth::Bits64, Condition::AtLeast, 5, timeout)?)?;
    for receive in receives {
        match qp.wait_receive(receive, timeout)? {
            Ok(message) => {
                list.status(KernelStatus::Ok)?;
                let imm = message.imm.map_or(0, |imm| 1 << 31 | u64::from(imm));
                list.push_result(u64::from(message.length) << 32 | imm)?;
            }
            Err(status) => {
                list.status(status)?;
                list.push_result(0)?;
            }
        }
    }
    Ok(())
}

fn fail(block: &Block<'_>) -> FaultResult<()> {
    let qp = DeviceQp::open(block, block.address(0)?)?;
    let mut list = List::new(block, block.value(1)?);
    let (there, timeout) = (list.there(0)?, list.timeout()?);
    let wrong = Remote { rkey: list.word(at::BAD_KEY)? as u32, ..there };
    let write = |to| qp.put_inline(to, &1_u64.to_le_bytes(), timeout);
    let (first, second, third) = (write(there)?, write(wrong)?, write(there)?);
    for ticket in [third, second, first] {
        list.status(qp.wait(ticket, timeout)?)?;
    }
    list.status(qp.quiet(timeout)?)?;
    list.status(write(there)?.status)?;
    let receive = qp.post_receive(list.here()?, 8, Duration::ZERO)?;
    list.status(receive.status)
}

fn one(block: &Block<'_>) -> FaultResult<()> {
    let qp = DeviceQp::open(block, block.address(0)?)?;
    let mut list = List::new(block, block.value(1)?);
    let timeout = list.timeout()?;
    let ticket = qp.put(list.there(0)?, list.here()?, 8, timeout)?;
    list.status(ticket.status)?;
    list.status(qp.wait(ticket, timeout)?)
}

/// A block is one thread here.
fn storm(block: &Block<'_>) -> FaultResult<()> {
    let (thread, pairs) = (u64::from(block.index()), block.value(2)?);
    let which = thread % pairs;
    let entry = |argument| -> FaultResult<u64> {
        block.load_u64(DeviceAddr::new(block.value(argument)? + which * 8))
    };
    let qp = DeviceQp::open(block, DeviceAddr::new(entry(0)?))?;
    let list = List::new(block, entry(1)?);
    let (place, word, timeout) = (list.there(thread * 8)?, list.counter()?, list.timeout()?);
    let (rounds, mut failures) = (block.value(3)?, 0);
    for round in 1..=rounds {
        let wrote = qp.put_inline(place, &round.to_le_bytes(), timeout)?;
        let added = qp.fetch_add(word, 1, None, timeout)?;
        failures += u64::from(!wrote.status.is_ok()) + u64::from(!added.status.is_ok());
        if round % 16 == 0 || round == rounds {
            failures += u64::from(!qp.wait(added, timeout)?.is_ok());
        }
    }
    if failures > 0 {
        block.fetch_add_u64(block.address(5)?, failures)?;
    }
    Ok(())
}

fn ping(block: &Block<'_>) -> FaultResult<()> {
    let qp = DeviceQp::open(block, block.address(0)?)?;
    let list = List::new(block, block.value(1)?);
    let (word, timeout) = (list.counter()?, list.timeout()?);
    ping_by(block, |i| Ok(qp.put_inline(word, &i.to_le_bytes(), timeout)?.status))
}

/// The same by stores to mapped memory.
fn ping_mapped(block: &Block<'_>) -> FaultResult<()> {
    let qp = DeviceQp::open(block, block.address(0)?)?;
    let word = List::new(block, block.value(1)?).counter()?;
    let mapped = qp.map_remote(word, 8, Access::REMOTE_WRITE)?;
    ping_by(block, |i| match &mapped {
        None => Ok(KernelStatus::NotReady),
        Some(word) if word.is_revoked()? => Ok(KernelStatus::Closed),
        Some(word) => block.store_u64(word.address(), i).map(|()| KernelStatus::Ok),
    })
}

fn ping_by(block: &Block<'_>, put: impl Fn(u64) -> FaultResult<KernelStatus>) -> FaultResult<()> {
    let list = List::new(block, block.value(1)?);
    let (side, rounds, timeout) = (block.value(2)?, block.value(3)?, list.timeout()?);
    let mine = DeviceAddr::new(list.word(at::OWN_WORD)?);
    let wait = |i| wait_signal(block, mine, WordWidth::Bits64, Condition::AtLeast, i, timeout);
    let mut status = KernelStatus::Ok;
    for i in 1..=rounds {
        if side == 1 && status.is_ok() {
            status = wait(i)?;
        }
        if status.is_ok() {
            status = put(i)?;
        }
        if side == 0 && status.is_ok() {
            status = wait(i)?;
        }
    }
    block.store_u64(block.address(4)?, u64::from(status.code() as u32))
}

fn relay(block: &Block<'_>) -> FaultResult<()> {
    let (side, rounds, doorbell) = (block.value(0)?, block.value(1)?, block.value(2)?);
    let (mine, timeout) = (block.address(3)?, Duration::from_nanos(block.value(4)?));
    let wait = |i| wait_signal(block, mine, WordWidth::Bits64, Condition::AtLeast, i, timeout);
    let mut status = KernelStatus::Ok;
    for i in 1..=rounds {
        if side == 1 && status.is_ok() {
            status = wait(i)?;
        }
        block.store_u64(DeviceAddr::new(doorbell + 64), i)?;
        block.store_u64(DeviceAddr::new(doorbell), i)?;
        if side == 0 && status.is_ok() {
            status = wait(i)?;
        }
    }
    block.store_u64(block.address(5)?, u64::from(status.code() as u32))
}

/// The status of a round trip that brought back something else.
pub const MISMATCH: i64 = -9999;

/// Puts bytes and gets them back, until all rounds are done or a call fails.
fn repeat(block: &Block<'_>) -> FaultResult<()> {
    let qp = DeviceQp::open(block, block.address(0)?)?;
    let mut list = List::new(block, block.value(1)?);
    let (rounds, len, timeout) = (block.value(2)?, block.value(3)?, list.timeout()?);
    let (here, there) = (list.here()?, list.there(0)?);
    let back = Local { address: here.address + 16384, ..here };
    let ends = |at: u64| [at, at + len - 8].map(DeviceAddr::new);
    let (mut done, mut status) = (0, KernelStatus::Ok);
    while done < rounds && status.is_ok() {
        for at in ends(here.address) {
            block.store_u64(at, done + 1)?;
        }
        status = qp.wait(qp.put(there, here, len, timeout)?, timeout)?;
        if status.is_ok() {
            status = qp.wait(qp.get(back, there, len, timeout)?, timeout)?;
        }
        if status.is_ok() {
            for at in ends(back.address) {
                if block.load_u64(at)? != done + 1 {
                    list.push_result(done)?;
                    return list.push_result(MISMATCH as u64);
                }
            }
            done += 1;
        }
    }
    list.push_result(done)?;
    list.status(status)
}

/// Writes 1, 2, 3, … to a word of the peer: by short puts, which may be direct, and by long ones,
/// which are posted and not waited for.
fn order(block: &Block<'_>) -> FaultResult<()> {
    let qp = DeviceQp::open(block, block.address(0)?)?;
    let mut list = List::new(block, block.value(1)?);
    let (rounds, timeout) = (block.value(2)?, list.timeout()?);
    let (here, there) = (list.here()?, list.there(0)?);
    let mut status = KernelStatus::Ok;
    for round in 0..rounds {
        let long = Local { address: here.address + 4096 * (round % 8), ..here };
        block.store_u64(DeviceAddr::new(long.address), 3 * round + 1)?;
        qp.put(there, long, 1024, timeout)?;
        qp.put_inline(there, &(3 * round + 2).to_le_bytes(), timeout)?;
        if round % 8 == 7 {
            status = qp.quiet(timeout)?;
        }
        qp.put_inline(there, &(3 * round + 3).to_le_bytes(), timeout)?;
        if !status.is_ok() {
            break;
        }
    }
    list.status(status)?;
    list.status(qp.quiet(timeout)?)
}

/// Exchanges 4 KiB with the peer's memory by loads and stores, then stores 1 to its word.
fn exchange(block: &Block<'_>) -> FaultResult<()> {
    let qp = DeviceQp::open(block, block.address(0)?)?;
    let mut list = List::new(block, block.value(1)?);
    let (here, there, word) = (list.here()?.address, list.there(0)?, list.counter()?);
    let both = Access::REMOTE_READ | Access::REMOTE_WRITE;
    let memory = qp.map_remote(there, 65536, both)?;
    let signal = qp.map_remote(word, 8, Access::REMOTE_WRITE)?;
    let (Some(memory), Some(signal)) = (memory, signal) else {
        list.push_result(0)?;
        return list.push_result(1);
    };
    let mut bytes = [0; 4096];
    block.read(DeviceAddr::new(here), &mut bytes)?;
    block.write(memory.address(), &bytes)?;
    block.read(DeviceAddr::new(memory.address().raw() + 16384), &mut bytes)?;
    block.write(DeviceAddr::new(here + 16384), &bytes)?;
    block.store_u64(signal.address(), 1)?;
    list.push_result(1)?;
    list.push_result(memory.is_revoked()?.into())
}

/// Stores 1, 2, 3, … to mapped memory until that is revoked or, if stubborn, until the own word is
/// not 0.
fn hold(block: &Block<'_>) -> FaultResult<()> {
    let qp = DeviceQp::open(block, block.address(0)?)?;
    let mut list = List::new(block, block.value(1)?);
    let own = DeviceAddr::new(list.word(at::OWN_WORD)?);
    let stubborn = block.value(2)? != 0;
    let (mut stored, mut revoked) = (0, false);
    if let Some(memory) = qp.map_remote(list.there(0)?, 64, Access::REMOTE_WRITE)? {
        while !(if stubborn { block.load_u64(own)? != 0 } else { memory.is_revoked()? }) {
            stored += 1;
            block.store_u64(memory.address(), stored)?;
        }
        revoked = memory.is_revoked()?;
    }
    list.push_result(stored)?;
    list.push_result(revoked.into())
}
