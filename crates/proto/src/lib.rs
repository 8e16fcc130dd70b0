//! The RoCEv2 protocol, sans-IO: no clock, no socket, no thread, and no allocation once a queue
//! pair is connected.
//!
//! All protocol decisions are made here, from three inputs (packets, time, posted work) to three
//! outputs (packets, deadlines, events), so that a whole lossy network can be simulated in one
//! thread from one seed. This crate has no dependencies, unless the feature `serde` asks for them.
//!
//! | module | contents |
//! |---|---|
//! | [`psn`] | 24-bit packet sequence numbers and their circular order |
//! | [`time`] | the integer clock that callers pass in |
//! | [`wire`] | RoCEv2 packets: parsing, building, ICRC |
//! | [`qp`] | the queue pair: reliable (RC) and unreliable connected (UC), and datagram (UD) |
//! | [`congestion`] | how many packets may be in flight to one peer |
#![no_std]
#![forbid(unsafe_code)]

extern crate alloc;

#[macro_use]
mod options;

pub mod congestion;
pub mod psn;
pub mod qp;
pub mod time;
pub mod wire;

pub use psn::Psn;
pub use time::Instant;
