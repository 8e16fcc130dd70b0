//! Warpwire's protocol half, sans-IO: no clock, no socket, no thread, no allocation once
//! a queue pair is connected.
//!
//! Everything that happens on the wire is decided here, from three inputs (packets, time, posted work)
//! and told in three outputs (packets, deadlines, events), so that a whole lossy network runs in one
//! thread from one seed. This crate imports nothing.
//!
//! | module | what it holds |
//! |---|---|
//! | [`psn`] | 24-bit packet sequence numbers and their circular order |
//! | [`time`] | the integer clock that callers pass in |
//! | [`wire`] | RoCEv2 packets as bytes and as what they mean |
//! | [`qp`] | the queue pair: reliable connected, and datagram |
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

pub mod psn;
pub mod qp;
pub mod time;
pub mod wire;

pub use psn::Psn;
pub use time::Instant;
