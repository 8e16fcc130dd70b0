//! Execution of stream operations on the simulated GPU.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use parking_lot::{Mutex, RwLock};

use super::super::allocation::{Region, Word, WordWidth};
use super::super::op::{Condition, MemOp, StreamOp};
use super::super::program::Launch;
use super::block::{Block, KernelFault};
use super::config::OpKind;
use super::device::SimKernel;
use super::memory::{SimMemory, address_space};
use super::stream::{Core, QueuedOp, SimGraph};
use crate::error::{Error, Kind, Result};
use crate::sync::Backoff;

/// Maximum number of blocks in a grid; each runs on its own thread.
pub(super) const MAX_BLOCKS: u32 = 512;

/// Executes the operations of one stream.
pub(super) struct Runner<'a> {
    stream: &'a Core,
}

impl<'a> Runner<'a> {
    pub(super) fn new(stream: &'a Core) -> Self {
        Self { stream }
    }

    pub(super) fn run(&self, entry: &QueuedOp) -> Result<()> {
        self.stream.device.check_alive()?;
        match &entry.op {
            StreamOp::Copy { to, from } => self.copy(to, from),
            StreamOp::Fill { region, pattern, unit } => {
                self.fill(region, &pattern.to_le_bytes()[..usize::from(*unit)])
            }
            StreamOp::Mem(_) | StreamOp::Batch(_) => self.mem_ops(&entry.op),
            StreamOp::Record(_) => {
                entry.event_record.iter().for_each(|event_record| event_record.complete());
                Ok(())
            }
            StreamOp::WaitEvent(_) => match &entry.event_record {
                Some(event_record) => self.wait_until(|| event_record.is_complete()),
                None => Ok(()),
            },
            StreamOp::Call(call) => {
                call.call();
                if call.has_panicked() {
                    Err(self.failure("run a host function", "it panicked"))
                } else {
                    Ok(())
                }
            }
            StreamOp::Launch(launch) => self.launch(launch),
            StreamOp::Replay(graph) => {
                let graph: &dyn Any = &**graph.backend();
                let ops = graph.downcast_ref::<SimGraph>().map_or(&[][..], |graph| &graph.ops);
                // Each replay makes a new event record, at the time of execution.
                ops.iter().try_for_each(|op| self.run(&QueuedOp::new(op.clone())))
            }
        }
    }

    fn copy(&self, to: &Region, from: &Region) -> Result<()> {
        self.stream.device.count_op(OpKind::Copy)?;
        std::thread::sleep(self.stream.device.copy_delay());
        self.move_bytes(to, from)
    }

    fn move_bytes(&self, to: &Region, from: &Region) -> Result<()> {
        let (target, target_offset) = self.find(to)?;
        let (source, source_offset) = self.find(from)?;
        target.with_bytes(|into| {
            source.with_bytes(|bytes| {
                into.copy_from(target_offset, &bytes, source_offset, from.len())
            })
        })?;
        self.stream.device.after_op(&target);
        Ok(())
    }

    fn fill(&self, region: &Region, pattern: &[u8]) -> Result<()> {
        self.stream.device.count_op(OpKind::Copy)?;
        std::thread::sleep(self.stream.device.copy_delay());
        let (memory, offset) = self.find(region)?;
        memory.with_bytes(|bytes| bytes.fill(offset, region.len(), pattern))?;
        self.stream.device.after_op(&memory);
        Ok(())
    }

    fn mem_ops(&self, op: &StreamOp) -> Result<()> {
        self.stream.device.count_op(OpKind::Mem)?;
        for single in op.mem_ops() {
            match single {
                MemOp::Write { word, value } => self.write(word, *value)?,
                MemOp::Wait { word, condition, value } => {
                    self.stream.set_blocked(Some(StreamOp::Mem(single.clone())));
                    let outcome = self.wait(word, *condition, *value);
                    self.stream.set_blocked(None);
                    outcome?;
                }
                MemOp::Copy { to, from } => self.move_bytes(to, from)?,
                // The stream's thread writes in order, and so do all other writers to its memory.
                MemOp::Barrier | MemOp::Flush => {}
            }
        }
        Ok(())
    }

    fn write(&self, word: &Word, value: u64) -> Result<()> {
        let (memory, offset) = self.find(word.region())?;
        memory.with_bytes(|bytes| match word.width() {
            WordWidth::Bits32 => bytes.store_u32(offset, value as u32),
            WordWidth::Bits64 => bytes.store_u64(offset, value),
        })?;
        self.stream.device.after_op(&memory);
        Ok(())
    }

    fn wait(&self, word: &Word, condition: Condition, expected: u64) -> Result<()> {
        self.wait_until(|| {
            let (memory, offset) = self.find(word.region())?;
            let actual = memory.with_bytes(|bytes| match word.width() {
                WordWidth::Bits32 => bytes.load_u32(offset).map(u64::from),
                WordWidth::Bits64 => bytes.load_u64(offset),
            })?;
            Ok(condition.holds(word.width(), actual, expected))
        })
    }

    fn wait_until(&self, mut is_ready: impl FnMut() -> Result<bool>) -> Result<()> {
        let mut backoff = Backoff::default();
        while !is_ready()? {
            self.stream.device.check_alive()?;
            backoff.snooze();
        }
        Ok(())
    }

    fn launch(&self, launch: &Launch) -> Result<()> {
        self.stream.device.count_op(OpKind::Launch)?;
        let kernel: &dyn Any = &**launch.kernel.backend();
        let Some(kernel) = kernel.downcast_ref::<SimKernel>() else {
            return Err(self.failure("launch a kernel", "it belongs to another backend"));
        };
        run_grid(launch.grid, |index, faulted| {
            let Launch { grid, threads, args, .. } = launch;
            let block = Block::new(&self.stream.device, faulted, index, *grid, *threads, args);
            let ran = catch_unwind(AssertUnwindSafe(|| (kernel.run)(&block)));
            ran.unwrap_or_else(|_| Err(KernelFault::new("a block panicked")))
        })
        .map_err(|fault| {
            let what = format!("run kernel {:?}", launch.kernel.name());
            Error::new(Kind::StreamFailed, what).on(self.stream.label()).why(fault.to_string())
        })
    }

    fn find(&self, region: &Region) -> Result<(Arc<SimMemory>, u64)> {
        address_space().find(region.address(), region.len()).ok_or_else(|| {
            let why = format!("the memory at {} was freed under its users", region.address());
            Error::new(Kind::Freed, "access memory").on(self.stream.label()).why(why)
        })
    }

    #[cold]
    fn failure(&self, what: &'static str, why: &'static str) -> Error {
        Error::new(Kind::StreamFailed, what).on(self.stream.label()).why(why)
    }
}

/// Runs all blocks of a grid concurrently and returns the first fault.
///
/// No block starts before all have a thread: blocks may wait for each other, so an incomplete grid
/// could never finish.
fn run_grid(
    grid: u32,
    run: impl Fn(u32, &AtomicBool) -> std::result::Result<(), KernelFault> + Sync,
) -> std::result::Result<(), KernelFault> {
    let start = RwLock::new(true);
    let faulted = AtomicBool::new(false);
    let first_fault = Mutex::new(None);
    std::thread::scope(|scope| {
        let mut start_lock = start.write();
        for index in 0..grid {
            let (run, start, faulted, first_fault) = (&run, &start, &faulted, &first_fault);
            let body = move || {
                let outcome = if *start.read() { run(index, faulted) } else { Ok(()) };
                if let Err(fault) = outcome {
                    first_fault.lock().get_or_insert(fault);
                    faulted.store(true, Ordering::Release);
                }
            };
            if let Err(error) = std::thread::Builder::new().spawn_scoped(scope, body) {
                *start_lock = false;
                let fault = KernelFault::new(format!("no thread for block {index}: {error}"));
                first_fault.lock().get_or_insert(fault);
                break;
            }
        }
    });
    match first_fault.into_inner() {
        Some(fault) => Err(fault),
        None => Ok(()),
    }
}
