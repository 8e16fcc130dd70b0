//! Runs the Rust code blocks of README.md and docs/*.md as tests; `build.rs` extracts them.
#![cfg(test)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, unsafe_code, unused)]

mod blocks;

include!(concat!(env!("OUT_DIR"), "/blocks.rs"));
