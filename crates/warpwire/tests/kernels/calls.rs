//! The suite's kernels: calls.cu, and their twins for the simulated GPU.

use std::time::Duration;

use warpwire::mem::sim::{Block, Fault};
use warpwire::mem::{Condition, Device, DeviceAddr, Module, Program, Width};
use warpwire::stream::kernel::Ended;
use warpwire::stream::kernel::device::{Local, Qp, Ticket, wait_signal};
use warpwire::verbs::Remote;

use crate::ptx;

/// Places in the list of words that a kernel gets.
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
    pub const FINDINGS: u64 = 16;
}

type Faulty<T> = Result<T, Fault>;

/// Whose PTX CUDA loads.
pub const PTX: &str = "kernels/calls";

/// The kernels of the program.
pub const NAMES: [&str; 7] = [
    "calls_active",
    "calls_passive",
    "calls_fail",
    "calls_one",
    "calls_storm",
    "calls_ping",
    "calls_relay",
];

pub fn load(gpu: &Device) -> warpwire::Result<Module> {
    let program = Program::new("calls")
        .block("calls_active", active)
        .block("calls_passive", passive)
        .block("calls_fail", fail)
        .block("calls_one", one)
        .block("calls_storm", storm)
        .block("calls_ping", ping)
        .block("calls_relay", relay);
    ptx::load(gpu, PTX, program)
}

/// The list of words that a kernel gets.
struct List<'b> {
    block: &'b Block<'b>,
    at: u64,
    next: u64,
}

impl<'b> List<'b> {
    fn new(block: &'b Block<'b>, at: u64) -> Self {
        Self { block, at, next: at::FINDINGS }
    }

    fn word(&self, place: u64) -> Faulty<u64> {
        self.block.load_u64(DeviceAddr::new(self.at + place * 8))
    }

    fn note(&mut self, value: u64) -> Faulty<()> {
        let at = DeviceAddr::new(self.at + self.next * 8);
        self.next += 1;
        self.block.store_u64(at, value)
    }

    fn ended(&mut self, ended: Ended) -> Faulty<()> {
        self.note(i64::from(ended.code()) as u64)
    }

    fn here(&self) -> Faulty<Local> {
        Ok(Local { address: self.word(at::HERE)?, lkey: self.word(at::HERE_KEY)? as u32 })
    }

    fn there(&self, offset: u64) -> Faulty<Remote> {
        let address = self.word(at::THERE)? + offset;
        Ok(Remote { address, rkey: self.word(at::THERE_KEY)? as u32 })
    }

    fn counter(&self) -> Faulty<Remote> {
        Ok(Remote { address: self.word(at::WORD)?, rkey: self.word(at::WORD_KEY)? as u32 })
    }

    fn timeout(&self) -> Faulty<Duration> {
        self.word(at::TIMEOUT).map(Duration::from_nanos)
    }
}

fn active(block: &Block<'_>) -> Faulty<()> {
    let qp = Qp::open(block, block.address(0)?)?;
    let mut list = List::new(block, block.value(1)?);
    let (here, word, timeout) = (list.here()?, list.counter()?, list.timeout()?);
    let result = Local { address: here.address + 8, ..here };
    let wait = |ticket: Ticket| qp.wait(ticket, timeout);
    let fetched = || block.load_u64(DeviceAddr::new(result.address));
    list.ended(wait(qp.put(list.there(0)?, here, 4096, timeout)?)?)?;
    let value = 0x1122_3344_5566_7788_u64.to_le_bytes();
    list.ended(wait(qp.put_inline(list.there(4096)?, &value, timeout)?)?)?;
    list.ended(wait(qp.put_signal(list.there(8192)?, here, 64, (word, 5), timeout)?)?)?;
    let to = Local { address: here.address + 16384, ..here };
    list.ended(wait(qp.get(to, list.there(16384)?, 4096, timeout)?)?)?;
    list.ended(wait(qp.fetch_add(word, 7, Some(result), timeout)?)?)?;
    list.note(fetched()?)?;
    list.ended(wait(qp.compare_swap(word, [12, 99], Some(result), timeout)?)?)?;
    list.note(fetched()?)?;
    list.ended(qp.send(here, 100, None, timeout)?.ended)?;
    list.ended(qp.send(here, 50, Some(77), timeout)?.ended)?;
    list.ended(qp.put_imm(list.there(12288)?, here, 16, 88, timeout)?.ended)?;
    let last = qp.put(list.there(0)?, here, 0, timeout)?;
    list.ended(qp.quiet(timeout)?)?;
    list.ended(qp.wait(last, Duration::ZERO)?)?;
    list.ended(qp.put_inline(list.there(0)?, &[0; 29], timeout)?.ended)?;
    let beyond = Ticket { number: last.number + 1, ended: Ended::Ok };
    list.ended(qp.wait(beyond, Duration::ZERO)?)
}

fn passive(block: &Block<'_>) -> Faulty<()> {
    let qp = Qp::open(block, block.address(0)?)?;
    let mut list = List::new(block, block.value(1)?);
    let (here, timeout) = (list.here()?, list.timeout()?);
    let mut receives = Vec::new();
    for number in 0..3 {
        let into = Local { address: here.address + 32768 + 256 * number, ..here };
        receives.push(qp.post_receive(into, 256, timeout)?);
    }
    let word = DeviceAddr::new(list.word(at::OWN_WORD)?);
    list.ended(wait_signal(block, word, Width::Bits64, Condition::AtLeast, 5, timeout)?)?;
    for receive in receives {
        match qp.wait_receive(receive, timeout)? {
            Ok(arrival) => {
                list.ended(Ended::Ok)?;
                let imm = arrival.imm.map_or(0, |imm| 1 << 31 | u64::from(imm));
                list.note(u64::from(arrival.length) << 32 | imm)?;
            }
            Err(ended) => {
                list.ended(ended)?;
                list.note(0)?;
            }
        }
    }
    Ok(())
}

fn fail(block: &Block<'_>) -> Faulty<()> {
    let qp = Qp::open(block, block.address(0)?)?;
    let mut list = List::new(block, block.value(1)?);
    let (there, timeout) = (list.there(0)?, list.timeout()?);
    let wrong = Remote { rkey: list.word(at::BAD_KEY)? as u32, ..there };
    let write = |to| qp.put_inline(to, &1_u64.to_le_bytes(), timeout);
    let (first, second, third) = (write(there)?, write(wrong)?, write(there)?);
    for ticket in [third, second, first] {
        list.ended(qp.wait(ticket, timeout)?)?;
    }
    list.ended(qp.quiet(timeout)?)?;
    list.ended(write(there)?.ended)?;
    let receive = qp.post_receive(list.here()?, 8, Duration::ZERO)?;
    list.ended(receive.ended)
}

fn one(block: &Block<'_>) -> Faulty<()> {
    let qp = Qp::open(block, block.address(0)?)?;
    let mut list = List::new(block, block.value(1)?);
    let timeout = list.timeout()?;
    let ticket = qp.put(list.there(0)?, list.here()?, 8, timeout)?;
    list.ended(ticket.ended)?;
    list.ended(qp.wait(ticket, timeout)?)
}

/// A block is one thread here.
fn storm(block: &Block<'_>) -> Faulty<()> {
    let (thread, pairs) = (u64::from(block.index()), block.value(2)?);
    let which = thread % pairs;
    let entry = |argument| -> Faulty<u64> {
        block.load_u64(DeviceAddr::new(block.value(argument)? + which * 8))
    };
    let qp = Qp::open(block, DeviceAddr::new(entry(0)?))?;
    let list = List::new(block, entry(1)?);
    let (place, word, timeout) = (list.there(thread * 8)?, list.counter()?, list.timeout()?);
    let (rounds, mut failures) = (block.value(3)?, 0);
    for round in 1..=rounds {
        let wrote = qp.put_inline(place, &round.to_le_bytes(), timeout)?;
        let added = qp.fetch_add(word, 1, None, timeout)?;
        failures += u64::from(!wrote.ended.is_ok()) + u64::from(!added.ended.is_ok());
        if round % 16 == 0 || round == rounds {
            failures += u64::from(!qp.wait(added, timeout)?.is_ok());
        }
    }
    if failures > 0 {
        block.fetch_add_u64(block.address(5)?, failures)?;
    }
    Ok(())
}

fn ping(block: &Block<'_>) -> Faulty<()> {
    let qp = Qp::open(block, block.address(0)?)?;
    let list = List::new(block, block.value(1)?);
    let (side, rounds, timeout) = (block.value(2)?, block.value(3)?, list.timeout()?);
    let (mine, word) = (DeviceAddr::new(list.word(at::OWN_WORD)?), list.counter()?);
    let wait = |i| wait_signal(block, mine, Width::Bits64, Condition::AtLeast, i, timeout);
    let mut ended = Ended::Ok;
    for i in 1..=rounds {
        if side == 1 && ended.is_ok() {
            ended = wait(i)?;
        }
        if ended.is_ok() {
            ended = qp.put_inline(word, &i.to_le_bytes(), timeout)?.ended;
        }
        if side == 0 && ended.is_ok() {
            ended = wait(i)?;
        }
    }
    block.store_u64(block.address(4)?, u64::from(ended.code() as u32))
}

fn relay(block: &Block<'_>) -> Faulty<()> {
    let (side, rounds, bell) = (block.value(0)?, block.value(1)?, block.value(2)?);
    let (mine, timeout) = (block.address(3)?, Duration::from_nanos(block.value(4)?));
    let wait = |i| wait_signal(block, mine, Width::Bits64, Condition::AtLeast, i, timeout);
    let mut ended = Ended::Ok;
    for i in 1..=rounds {
        if side == 1 && ended.is_ok() {
            ended = wait(i)?;
        }
        block.store_u64(DeviceAddr::new(bell + 64), i)?;
        block.store_u64(DeviceAddr::new(bell), i)?;
        if side == 0 && ended.is_ok() {
            ended = wait(i)?;
        }
    }
    block.store_u64(block.address(5)?, u64::from(ended.code() as u32))
}
