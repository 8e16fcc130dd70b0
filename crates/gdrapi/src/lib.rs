//! `libgdrapi.so.2`: the C API of gdrcopy 2.6, over warpwire's CPU windows.
//!
//! C programs use `include/gdrapi.h`; `docs/gdrapi.md` says how to put the library under NCCL, NVSHMEM,
//! UCX and libfabric, and what differs from the original. This crate only translates: which calls there
//! are and what they return is here, how device memory gets into the CPU's address space is
//! [`warpwire::mem::Window`]'s business.
//!
//! | module | what it holds |
//! |---|---|
//! | `api` | the exported functions: pointers are checked, nothing unwinds |
//! | `abi` | C's types and values, with their layout asserted |
//! | `session` | what a session and a pin are, and what each call means |
//! | `extent` | which part of a pinned range exists, and a window onto it |
//! | `table` | handles: an index and a generation, never a pointer |
//! | `process` | the state of one process; a child starts afresh |
//! | `errno`, `log` | errors as C sees them, and as people read them |
//! | `sim` | helpers for tests on the simulated GPU |

pub mod abi;
pub mod api;
mod errno;
mod extent;
mod log;
mod process;
mod session;
pub mod sim;
mod table;
