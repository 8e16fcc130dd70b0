//! The harness that all of Warpwire's tests share.
//!
//! | need | here |
//! |---|---|
//! | one list of cases, run on every backend that is present | [`Suite`], [`Collector`], [`cases!`] |
//! | how much a run should try: the inner loop, a change, everything | [`Effort`] |
//! | something absent: `skipped: why`, or a failure if required | [`Collector::backend`], [`skip`] |
//! | a deadline that holds on a busy machine too | [`deadline`], [`until`] |
//! | seeds, one of which can be replayed | [`for_each_seed`], [`Rng`] |
//! | a second process that runs part of a test | [`Role`], [`Process`] |
//! | device code that only tests have | [`ptx()`] |
//! | allocations of a thread, or of the process | [`CountingAllocator`] |
//!
//! Everything here may panic: it runs inside tests.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod alloc;
mod clock;
mod effort;
mod process;
mod ptx;
mod random;
mod requirement;
mod suite;

pub use alloc::CountingAllocator;
pub use clock::{deadline, until, wakeup_time};
pub use effort::Effort;
pub use process::{Process, Role};
pub use ptx::ptx;
pub use random::{Rng, assert_same, for_each_seed};
pub use requirement::{is_skip, skip};
pub use suite::{Case, Collector, Suite, run};
