//! The solver's kernel: PTX for CUDA, a block function for the simulated GPU.

use std::time::Duration;

use warpwire::Result;
use warpwire::mem::sim::{Block, KernelFault};
use warpwire::mem::{Condition, Device, DeviceAddr, Kernel, Program, WordWidth};
use warpwire::stream::kernel::KernelStatus;
use warpwire::stream::kernel::device::{DeviceQp, Local, wait_signal};
use warpwire::verbs::Remote;

const STEP: &str = "jacobi_step";

/// Words per neighbour in the kernel's parameters, and in total.
pub const SIDE_WORDS: usize = 7;
pub const WORDS: usize = 2 * SIDE_WORDS + 4;

pub fn load(device: &Device) -> Result<Kernel> {
    let program = Program::new("jacobi").ptx(include_str!("jacobi.ptx")).block(STEP, step);
    device.load(&program)?.kernel(STEP)
}

/// The kernel's parameters, in the layout of `struct Exchange` in jacobi.cu.
struct Exchange {
    words: [u64; WORDS],
}

impl Exchange {
    fn side(&self, down: bool) -> &[u64] {
        let at = if down { SIDE_WORDS } else { 0 };
        &self.words[at..at + SIDE_WORDS]
    }

    fn shared(&self) -> [u64; 4] {
        std::array::from_fn(|index| self.words[2 * SIDE_WORDS + index])
    }
}

type FaultResult<T> = std::result::Result<T, KernelFault>;

fn step(block: &Block<'_>) -> FaultResult<()> {
    let (from, to) = (block.value(0)?, block.value(1)?);
    let (rows, columns, step, at) =
        (block.value(2)?, block.value(3)?, block.value(4)?, block.value(5)?);
    let exchange = match at {
        0 => None,
        at => {
            let mut words = [0; WORDS];
            for (index, word) in words.iter_mut().enumerate() {
                *word = block.load_u64(DeviceAddr::new(at + index as u64 * 8))?;
            }
            Some(Exchange { words })
        }
    };
    let bytes = columns * 4;
    let (mut row, mut next) = (1 + u64::from(block.index()), vec![0; bytes as usize]);
    let mut old = vec![0; 3 * bytes as usize];
    while row <= rows {
        if let Some(exchange) = &exchange {
            for (is_edge, down) in [(row == 1, false), (row == rows, true)] {
                if is_edge {
                    wait_for(block, exchange, down, step)?;
                }
            }
        }
        block.read(DeviceAddr::new(from + (row - 1) * bytes), &mut old)?;
        let value = |at: u64| -> f32 {
            let at = at as usize * 4;
            f32::from_le_bytes(std::array::from_fn(|index| old[at + index]))
        };
        for column in 1..columns - 1 {
            let at = columns + column;
            let (above, below) = (value(at - columns), value(at + columns));
            let new = ((above + below) + (value(at - 1) + value(at + 1))) * 0.25;
            let offset = column as usize * 4;
            next[offset..offset + 4].copy_from_slice(&new.to_le_bytes());
        }
        let inner = &next[4..bytes as usize - 4];
        block.write(DeviceAddr::new(to + row * bytes + 4), inner)?;
        row += u64::from(block.grid());
    }
    let Some(exchange) = exchange else { return Ok(()) };
    let [lkey, finished, report, timeout] = exchange.shared();
    let before = block.fetch_add_u64(DeviceAddr::new(finished), 1)?;
    if before + 1 != u64::from(block.grid()) * (step + 1) {
        return Ok(());
    }
    for (down, row) in [(false, 1), (true, rows)] {
        let side = exchange.side(down);
        if side[0] == 0 {
            continue;
        }
        let qp = DeviceQp::open(block, DeviceAddr::new(side[0]))?;
        let target = Remote { address: side[1 + (step as usize + 1) % 2], rkey: side[3] as u32 };
        let word = Remote { address: side[4], rkey: side[5] as u32 };
        let mine = Local { address: to + row * bytes, lkey: lkey as u32 };
        let timeout = Duration::from_nanos(timeout);
        let ticket = qp.put_signal(target, mine, bytes, (word, 1), timeout)?;
        check(block, report, ticket.status)?;
    }
    Ok(())
}

fn wait_for(block: &Block<'_>, exchange: &Exchange, down: bool, step: u64) -> FaultResult<()> {
    let side = exchange.side(down);
    if side[0] == 0 || step == 0 {
        return Ok(());
    }
    let [_, _, report, timeout] = exchange.shared();
    let (own, timeout) = (DeviceAddr::new(side[6]), Duration::from_nanos(timeout));
    let status = wait_signal(block, own, WordWidth::Bits64, Condition::AtLeast, step, timeout)?;
    check(block, report, status)
}

fn check(block: &Block<'_>, report: u64, status: KernelStatus) -> FaultResult<()> {
    if !status.is_ok() {
        let word = 1 << 63 | u64::from(status.code() as u32);
        block.compare_exchange_u64(DeviceAddr::new(report), 0, word)?;
    }
    Ok(())
}
