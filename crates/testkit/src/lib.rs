//! The test harness of the workspace.
//!
//! | need | item |
//! |---|---|
//! | one list of cases for every backend that is present | [`Suite`], [`Collector`], [`cases!`] |
//! | thoroughness of a run: inner loop, a change, everything | [`Effort`] |
//! | a missing backend: `skipped: why`, or a failure | [`Collector::backend`], [`skip`] |
//! | deadlines that hold on a busy machine too | [`deadline`], [`until`], [`once_within`] |
//! | retransmission timeouts that do | [`timeout_exponent`] |
//! | seeds that can be replayed individually | [`for_each_seed`], [`Rng`] |
//! | a second process that runs part of a test | [`Role`], [`Process`] |
//! | device code for tests only | [`ptx()`] |
//! | C programs, and the values of a header | [`c`] |
//! | allocation counts of a thread or of the process | [`CountingAllocator`] |
//! | CPU use of idle processes | [`cpu_share`] |
//!
//! Everything here may panic: it runs inside tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod alloc;
pub mod c;
mod clock;
mod cpu;
mod effort;
mod process;
mod ptx;
mod random;
mod requirement;
mod suite;

pub use alloc::CountingAllocator;
pub use clock::{deadline, once_within, timeout_exponent, until};
pub use cpu::cpu_share;
pub use effort::Effort;
pub use process::{Process, Role};
pub use ptx::ptx;
pub use random::{Rng, ascending_words, assert_same, for_each_seed, random_bytes};
pub use requirement::{is_skip, skip};
pub use suite::{Case, Collector, Suite, run};
