//! Stream operations.

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use super::address::DeviceAddr;
use super::allocation::{Region, Word, WordWidth};
use super::program::Launch;
use super::stream::{Event, Graph};
use crate::error::Result;

/// When a stream wait is satisfied.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Condition {
    /// The word is at least the value, as serial numbers: the signed difference is not negative.
    AtLeast,
    /// The word equals the value.
    Equal,
    /// The word and the value have a set bit in common.
    And,
    /// At least one bit is clear in both the word and the value.
    Nor,
}

impl Condition {
    /// Whether a word of this width with value `actual` satisfies the condition for `expected`.
    ///
    /// ```
    /// use warpwire::mem::{Condition, WordWidth};
    /// assert!(Condition::AtLeast.holds(WordWidth::Bits32, 1, 0xffff_fffe)); // past the wrap
    /// assert!(!Condition::Nor.holds(WordWidth::Bits32, 0xffff_0000, 0x0000_ffff));
    /// ```
    pub fn holds(self, width: WordWidth, actual: u64, expected: u64) -> bool {
        match (self, width) {
            (Self::AtLeast, WordWidth::Bits32) => {
                (actual as u32).wrapping_sub(expected as u32) as i32 >= 0
            }
            (Self::AtLeast, WordWidth::Bits64) => actual.wrapping_sub(expected) as i64 >= 0,
            (Self::Equal, _) => actual == expected,
            (Self::And, _) => actual & expected != 0,
            (Self::Nor, WordWidth::Bits32) => !(actual as u32 | expected as u32) != 0,
            (Self::Nor, WordWidth::Bits64) => !(actual | expected) != 0,
        }
    }
}

impl fmt::Display for Condition {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::AtLeast => ">=",
            Self::Equal => "==",
            Self::And => "&",
            Self::Nor => "nor",
        })
    }
}

/// An operation on a word of memory. [`Stream::batch`](super::Stream::batch) submits several in one
/// call.
#[derive(Clone, Debug)]
pub enum MemOp {
    /// Writes the word once all earlier work of the stream is visible system-wide.
    Write {
        /// The word to write.
        word: Word,
        /// Value to store; must fit into the word.
        value: u64,
    },
    /// Blocks the stream until the word satisfies the condition.
    Wait {
        /// The word to wait for.
        word: Word,
        /// How the word is compared with `value`.
        condition: Condition,
        /// The value that the word is compared with.
        value: u64,
    },
    /// Makes all earlier writes of the stream visible to the CPU and to other devices.
    Barrier,
    /// Makes earlier writes of NICs to the device's memory visible to the work that follows.
    Flush,
    /// Copies between two disjoint ranges of the same length. On CUDA it is a separate driver call,
    /// ordered with the batch's word operations.
    Copy {
        /// Destination.
        to: Region,
        /// Source.
        from: Region,
    },
}

impl MemOp {
    pub(super) fn check(&self) -> Result<()> {
        match self {
            Self::Write { word, value } | Self::Wait { word, value, .. } => {
                word.check_value(*value)
            }
            Self::Barrier | Self::Flush | Self::Copy { .. } => Ok(()),
        }
    }
}

/// A wait that blocks a stream.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PendingWait {
    /// Device address of the word.
    pub address: DeviceAddr,
    /// Width of the word.
    pub width: WordWidth,
    /// How the word is compared with `expected`.
    pub condition: Condition,
    /// The value that the word is compared with.
    pub expected: u64,
    /// Current value of the word, if it can be read.
    pub actual: Option<u64>,
}

impl PendingWait {
    /// The wait with the word's current value; `None` if it is satisfied.
    pub(super) fn if_pending(word: &Word, condition: Condition, expected: u64) -> Option<Self> {
        let actual = word.load().ok();
        let satisfied =
            actual.is_some_and(|actual| condition.holds(word.width(), actual, expected));
        (!satisfied).then(|| Self {
            address: word.address(),
            width: word.width(),
            condition,
            expected,
            actual,
        })
    }

    /// The first wait among `ops` that is not satisfied now.
    pub(super) fn first_pending<'a>(ops: impl IntoIterator<Item = &'a MemOp>) -> Option<Self> {
        ops.into_iter().find_map(|op| match op {
            MemOp::Wait { word, condition, value } => Self::if_pending(word, *condition, *value),
            _ => None,
        })
    }
}

impl fmt::Display for PendingWait {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { address, width, condition, expected, actual } = self;
        write!(f, "it waits for the {width} word at {address} to be {condition} {expected:#x}; ")?;
        match actual {
            Some(actual) => write!(f, "it holds {actual:#x}"),
            None => write!(f, "it cannot be read now"),
        }
    }
}

/// A host function that a stream calls.
pub struct HostCall {
    run: Box<dyn Fn() + Send + Sync>,
    panicked: AtomicBool,
}

impl HostCall {
    pub(super) fn new(run: impl Fn() + Send + Sync + 'static) -> Self {
        Self { run: Box::new(run), panicked: AtomicBool::new(false) }
    }

    /// Runs the function. A panic is caught and recorded: it must not unwind into a driver thread.
    pub(super) fn call(&self) {
        if catch_unwind(AssertUnwindSafe(|| (self.run)())).is_err() {
            self.panicked.store(true, Ordering::Release);
        }
    }

    /// Whether any call has panicked.
    pub(super) fn has_panicked(&self) -> bool {
        self.panicked.load(Ordering::Acquire)
    }
}

/// One operation, validated, holding references to all memory that it uses.
#[derive(Clone)]
pub enum StreamOp {
    /// Copies between two regions of the same length.
    Copy {
        /// Destination.
        to: Region,
        /// Source.
        from: Region,
    },
    /// Repeats a pattern of 1, 2 or 4 bytes over a region.
    Fill {
        /// Range to fill.
        region: Region,
        /// Pattern, in the low bytes.
        pattern: u32,
        /// Pattern length in bytes: 1, 2 or 4.
        unit: u8,
    },
    /// One operation on a word.
    Mem(MemOp),
    /// Several operations on words, in order.
    Batch(Arc<[MemOp]>),
    /// Records an event at this point.
    Record(Event),
    /// Blocks the stream until the event's recorded point has been reached.
    WaitEvent(Event),
    /// Calls a host function.
    Call(Arc<HostCall>),
    /// Launches a kernel.
    Launch(Arc<Launch>),
    /// Replays a captured graph.
    Replay(Graph),
}

impl StreamOp {
    /// Short name, for messages.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Copy { .. } => "copy",
            Self::Fill { .. } => "fill",
            Self::Mem(MemOp::Write { .. }) => "write-value",
            Self::Mem(MemOp::Wait { .. }) => "wait-value",
            Self::Mem(MemOp::Barrier) => "barrier",
            Self::Mem(MemOp::Flush) => "flush",
            Self::Mem(MemOp::Copy { .. }) => "copy",
            Self::Batch(_) => "batch",
            Self::Record(_) => "record",
            Self::WaitEvent(_) => "await",
            Self::Call(_) => "host call",
            Self::Launch(_) => "launch",
            Self::Replay(_) => "replay",
        }
    }

    /// The word operations that it consists of, in order; empty for other operations.
    pub(super) fn mem_ops(&self) -> &[MemOp] {
        match self {
            Self::Mem(op) => std::slice::from_ref(op),
            Self::Batch(ops) => ops,
            _ => &[],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn conditions_follow_the_drivers_definitions() {
        let (narrow, wide) = (WordWidth::Bits32, WordWidth::Bits64);
        assert!(Condition::AtLeast.holds(narrow, 5, 5));
        assert!(!Condition::AtLeast.holds(narrow, 4, 5));
        assert!(Condition::AtLeast.holds(wide, 3, u64::MAX));
        assert!(!Condition::AtLeast.holds(wide, u64::MAX, 3));
        assert!(Condition::Equal.holds(wide, 9, 9));
        assert!(Condition::And.holds(narrow, 0b110, 0b010));
        assert!(!Condition::And.holds(narrow, 0b100, 0b010));
        assert!(Condition::Nor.holds(narrow, 0, 0));
        assert!(!Condition::Nor.holds(narrow, 0xffff_ffff, 0));
        assert!(!Condition::Nor.holds(wide, u64::MAX << 4, 0xf));
        assert!(Condition::Nor.holds(wide, u64::from(u32::MAX), 0));
    }

    #[test]
    fn an_operation_stays_small() {
        // Streams hold one of these per operation in flight.
        assert!(size_of::<StreamOp>() <= 64, "{}", size_of::<StreamOp>());
    }

    #[test]
    fn a_panicking_host_call_is_caught_and_remembered() {
        let quiet = std::panic::take_hook();
        std::panic::set_hook(Box::new(|_| ()));
        let call = HostCall::new(|| panic!("on purpose"));
        call.call();
        std::panic::set_hook(quiet);
        assert!(call.has_panicked());
    }
}
