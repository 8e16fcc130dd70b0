//! Runs the Rust code blocks of README.md and docs/*.md as tests; `build.rs` extracts them. Checks
//! links, blocks that quote a file, and diagrams.
#![cfg(test)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, unsafe_code, unused)]

mod blocks;
mod diagrams;
mod links;
mod pages;
mod quotes;

include!(concat!(env!("OUT_DIR"), "/blocks.rs"));
