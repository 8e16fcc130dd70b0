//! The library's own kernels, and their equivalents for the simulated GPU.

use std::sync::Arc;
use std::time::Duration;

use super::device::{DeviceQp, Local, wait_signal};
use super::status::KernelStatus;
use crate::error::Result;
use crate::mem::sim::{Block, KernelFault};
use crate::mem::{Condition, Device, DeviceAddr, Kernel, Program, WordWidth};
use crate::mlx5::INVALID_KEY;
use crate::verbs::Remote;

type FaultResult<T> = std::result::Result<T, KernelFault>;

/// A kernel's symbol, its name in messages, and its block function for the simulated GPU.
type Row = (&'static str, &'static str, fn(&Block<'_>) -> FaultResult<()>);

/// The kernels, indexed by [`KernelId`], as in reports.
const KERNELS: [Row; 10] = [
    ("stream_put", "put", put),
    ("stream_put_imm", "put with immediate data", put_imm),
    ("stream_put_signal", "put with a signal", put_signal),
    ("stream_get", "get", get),
    ("stream_send", "send", send),
    ("stream_atomic", "atomic operation", atomic),
    ("stream_wait", "wait for completion", wait),
    ("stream_post_receive", "receive post", post_receive),
    ("stream_receive", "wait for a message", receive),
    ("stream_wait_signal", "wait for a signal", wait_for_signal),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KernelId {
    Put,
    PutImm,
    PutSignal,
    Get,
    Send,
    Atomic,
    Wait,
    PostReceive,
    Receive,
    WaitSignal,
}

/// The kernels that post and wait from a stream, loaded onto a device. Clones share them.
///
/// CUDA loads code only while all streams are idle, so applications with several queue pairs should
/// load the kernels once and pass them in
/// [`KernelQpOptions::kernels`](super::KernelQpOptions::kernels).
#[derive(Clone, Debug)]
pub struct Kernels(Arc<[Kernel]>);

impl Kernels {
    /// Loads the kernels. Blocks while streams of the device are busy.
    pub fn load(device: &Device) -> Result<Self> {
        let program = Program::new("verbs").ptx(include_str!("kernels.ptx"));
        let program =
            KERNELS.iter().fold(program, |program, (name, _, run)| program.block(*name, run));
        let module = device.load(&program)?;
        let all: Result<Vec<Kernel>> =
            KERNELS.iter().map(|(name, ..)| module.kernel(name)).collect();
        Ok(Self(all?.into()))
    }

    /// The device that the kernels are loaded on.
    pub fn device(&self) -> &Device {
        self.0[0].device()
    }

    pub(super) fn get(&self, id: KernelId) -> &Kernel {
        &self.0[id as usize]
    }
}

/// Decodes a report word into the kernel's name and its status.
pub(super) fn read_report(word: u64) -> Option<(&'static str, KernelStatus)> {
    if word == 0 {
        return None;
    }
    let number = (word >> 32 & 0xff) as usize;
    let what = KERNELS.get(number).map_or("kernel", |(_, what, _)| what);
    Some((what, KernelStatus::from_code(word as u32 as i32)))
}

/// Stores the first failure for the host.
fn report(
    block: &Block<'_>,
    at: DeviceAddr,
    id: KernelId,
    status: KernelStatus,
) -> FaultResult<()> {
    if !status.is_ok() {
        let word = 1 << 63 | (id as u64) << 32 | u64::from(status.code() as u32);
        block.compare_exchange_u64(at, 0, word)?;
    }
    Ok(())
}

/// Reads an argument as a timeout in nanoseconds; `u64::MAX` means none.
fn time(block: &Block<'_>, argument: usize) -> FaultResult<Duration> {
    Ok(match block.value(argument)? {
        u64::MAX => Duration::MAX,
        nanos => Duration::from_nanos(nanos),
    })
}

fn remote(block: &Block<'_>, argument: usize) -> FaultResult<Remote> {
    Ok(Remote { address: block.value(argument)?, rkey: block.value(argument + 1)? as u32 })
}

fn local(block: &Block<'_>, argument: usize) -> FaultResult<Local> {
    Ok(Local { address: block.value(argument)?, lkey: block.value(argument + 1)? as u32 })
}

fn put(block: &Block<'_>) -> FaultResult<()> {
    let (to, from) = (remote(block, 2)?, local(block, 4)?);
    let qp = DeviceQp::open(block, block.address(0)?)?;
    let ticket = qp.put(to, from, block.value(6)?, time(block, 7)?)?;
    report(block, block.address(1)?, KernelId::Put, ticket.status)
}

fn put_imm(block: &Block<'_>) -> FaultResult<()> {
    let (to, from) = (remote(block, 2)?, local(block, 4)?);
    let (len, imm) = (block.value(6)?, block.value(7)? as u32);
    let qp = DeviceQp::open(block, block.address(0)?)?;
    let ticket = qp.put_imm(to, from, len, imm, time(block, 8)?)?;
    report(block, block.address(1)?, KernelId::PutImm, ticket.status)
}

fn put_signal(block: &Block<'_>) -> FaultResult<()> {
    let (to, from) = (remote(block, 2)?, local(block, 4)?);
    let signal = (remote(block, 7)?, block.value(9)?);
    let qp = DeviceQp::open(block, block.address(0)?)?;
    let ticket = qp.put_signal(to, from, block.value(6)?, signal, time(block, 10)?)?;
    report(block, block.address(1)?, KernelId::PutSignal, ticket.status)
}

fn get(block: &Block<'_>) -> FaultResult<()> {
    let (to, from) = (local(block, 2)?, remote(block, 4)?);
    let qp = DeviceQp::open(block, block.address(0)?)?;
    let ticket = qp.get(to, from, block.value(6)?, time(block, 7)?)?;
    report(block, block.address(1)?, KernelId::Get, ticket.status)
}

fn send(block: &Block<'_>) -> FaultResult<()> {
    let (from, len) = (local(block, 2)?, block.value(4)?);
    let imm = (block.value(5)? != 0).then_some(block.value(6)? as u32);
    let qp = DeviceQp::open(block, block.address(0)?)?;
    let ticket = qp.send(from, len, imm, time(block, 7)?)?;
    report(block, block.address(1)?, KernelId::Send, ticket.status)
}

fn atomic(block: &Block<'_>) -> FaultResult<()> {
    let (word, result) = (remote(block, 2)?, local(block, 7)?);
    let (first, second, timeout) = (block.value(5)?, block.value(6)?, time(block, 9)?);
    let result = (result.lkey != INVALID_KEY).then_some(result);
    let qp = DeviceQp::open(block, block.address(0)?)?;
    let ticket = match block.value(4)? {
        0 => qp.fetch_add(word, first, result, timeout)?,
        _ => qp.compare_swap(word, [first, second], result, timeout)?,
    };
    report(block, block.address(1)?, KernelId::Atomic, ticket.status)
}

fn wait(block: &Block<'_>) -> FaultResult<()> {
    let status = DeviceQp::open(block, block.address(0)?)?.quiet(time(block, 2)?)?;
    report(block, block.address(1)?, KernelId::Wait, status)
}

fn post_receive(block: &Block<'_>) -> FaultResult<()> {
    let (into, len) = (local(block, 2)?, block.value(4)? as u32);
    let ticket =
        DeviceQp::open(block, block.address(0)?)?.post_receive(into, len, time(block, 5)?)?;
    report(block, block.address(1)?, KernelId::PostReceive, ticket.status)
}

fn receive(block: &Block<'_>) -> FaultResult<()> {
    let found = DeviceQp::open(block, block.address(0)?)?.next_receive(time(block, 3)?)?;
    let (length, imm, status) = match found {
        Ok((_, message)) => (message.length, message.imm, KernelStatus::Ok),
        Err(status) => (0, None, status),
    };
    let words = [length, imm.unwrap_or(0), imm.is_some().into(), status.code() as u32];
    let message = block.value(2)?;
    if message != 0 {
        for (at, word) in (message..).step_by(4).zip(words) {
            block.store_u32(DeviceAddr::new(at), word)?;
        }
    }
    report(block, block.address(1)?, KernelId::Receive, status)
}

fn wait_for_signal(block: &Block<'_>) -> FaultResult<()> {
    let (word, counter, step) = (block.address(1)?, block.address(3)?, block.value(4)?);
    let wanted = block.load_u64(counter)?.wrapping_add(step);
    block.store_u64(counter, wanted)?;
    let (width, wanted) = match block.value(2)? {
        4 => (WordWidth::Bits32, wanted & u64::from(u32::MAX)),
        _ => (WordWidth::Bits64, wanted),
    };
    let timeout = time(block, 5)?;
    let status = wait_signal(block, word, width, Condition::AtLeast, wanted, timeout)?;
    report(block, block.address(0)?, KernelId::WaitSignal, status)
}
