//! Programs that use Warpwire from inside a kernel: servers, and the kernels that benchmarks,
//! demonstrations and tests start. They are no part of the library, and need only what it makes
//! public.
//!
//! | module | what runs on the device |
//! |---|---|
//! | [`kv`] | a key-value server for clients of Redis (RESP) |
//! | [`similarity`] | a server that finds the most similar vectors, and its client |
//! | [`programs`] | small servers (echo, sink, HTTP) and a client that measures |
//! | [`pattern`] | fills memory with a pattern, and counts the words that differ from it |
//! | [`pingpong`] | answers the CPU word by word |
//! | [`pingpong_kernels`] | ping-pong between kernels of two ranks, puts and gets, a relay without HCA |
//! | [`spin`] | takes time, and does nothing else |
//!
//! Each program is a `.cu` for CUDA, the PTX that `tools/ptx` makes of it beside it, and the same
//! kernel as a Rust block function for the simulated GPU.
#![deny(unsafe_code)]

pub mod kv;
pub mod pattern;
pub mod pingpong;
pub mod pingpong_kernels;
pub mod programs;
mod serving;
pub mod similarity;
pub mod spin;
