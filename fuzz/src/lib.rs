//! Fuzz targets: functions that are fed arbitrary bytes, and panic if an invariant does not hold.
//!
//! | target | what the bytes are |
//! |---|---|
//! | [`wire`] | packets, and headers to encode |
//! | [`qp`] | calls and packets of a queue pair of the protocol crate |
//! | [`handshake`] | what the peer of a warp socket says, in pieces |
//! | [`metadata`] | the metadata of a transfer agent |
//! | [`queues`] | stores into queues, doorbells and records of the software HCA |
//! | [`verbs`] | calls of libibverbs through its C ABI |
//!
//! `tools/fuzz` runs them under libFuzzer; the test `seeds` feeds them their seeds and inputs near
//! these.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

#[cfg(feature = "library")]
pub mod handshake;
#[cfg(feature = "library")]
pub mod metadata;
pub mod qp;
#[cfg(feature = "library")]
pub mod queues;
#[cfg(feature = "library")]
pub mod verbs;
pub mod wire;
