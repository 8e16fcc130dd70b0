//! Applications that use Warpwire from inside a kernel: servers, and the kernels that benchmarks,
//! demonstrations and tests launch. They are not part of the library and use only its public API.
//!
//! | module | what runs on the device |
//! |---|---|
//! | [`kv`] | a key-value server for clients of Redis (RESP) |
//! | [`similarity`] | a server that finds the most similar vectors, and its client |
//! | [`programs`] | small servers (echo, discard, HTTP) and a benchmark client |
//! | [`pattern`] | fills memory with a pattern, and counts the words that differ from it |
//! | [`pingpong`] | answers the CPU, one word per round trip |
//! | [`pingpong_kernels`] | ping-pong between kernels of two ranks, puts, gets, relay without HCA |
//! | [`spin`] | busy-waits for a given time |
//!
//! Each program is a `.cu` file for CUDA, the PTX that `tools/ptx` compiles from it, and an
//! equivalent Rust block function for the simulated GPU.
#![deny(unsafe_code)]

pub mod kv;
pub mod pattern;
pub mod pingpong;
pub mod pingpong_kernels;
pub mod programs;
mod serving;
pub mod similarity;
pub mod spin;
