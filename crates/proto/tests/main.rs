//! Protocol tests: packet formats, directed tests of the queue pair, and seeded network
//! simulations.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod directed;
mod footprint;
mod regressions;
mod sim;
mod wire;
