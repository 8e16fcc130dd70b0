//! Verbs that a stream orders, or that a running kernel posts by itself.

pub mod kernel;

pub use kernel::{KernelQp, KernelQpOptions};
