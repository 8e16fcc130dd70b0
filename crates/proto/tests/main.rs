//! The protocol: packets, the queue pair one situation at a time, and whole networks from one seed.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod directed;
mod footprint;
mod regressions;
mod sim;
mod wire;
