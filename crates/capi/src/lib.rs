//! `libwarpwire.so`: transfer agents, device memory, CPU windows, queue pairs and sockets for
//! kernels, and diagnosis for C and C++.
//!
//! C programs use `include/warpwire.h`, which describes every function; `docs/c.md` says how to
//! install and link the library. This crate only translates: [`warpwire`] does the work.
//!
//! | module | contents |
//! |---|---|
//! | `agent`, `transfer`, `memory`, `kernel`, `util` | the exported functions |
//! | `abi` | C structures, with their layout asserted |
//! | `status` | errors as numbers, and the last one of each thread as text |
//! | `table` | handles: numbers that are never reused, never pointers |
//! | `pointer` | what a program passes by pointer: texts, arrays, options, output parameters |
//! | `block` | what a program frees: structures with their texts in one allocation |

pub mod abi;
pub mod agent;
mod block;
pub mod kernel;
pub mod memory;
mod pointer;
mod status;
mod table;
pub mod transfer;
pub mod util;

pub use status::STATUSES;
