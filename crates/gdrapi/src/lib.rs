//! `libgdrapi.so.2`: the C API of gdrcopy 2.6 on top of warpwire's CPU windows.
//!
//! C programs use `include/gdrapi.h`; `docs/gdrapi.md` describes how to use the library with NCCL,
//! NVSHMEM, UCX and libfabric, and how it differs from the original. This crate only translates the
//! calls and their results; [`warpwire::mem::Window`] maps device memory into the CPU's address
//! space.
//!
//! | module | contents |
//! |---|---|
//! | `api` | the exported functions: check pointers, never unwind |
//! | `abi` | C types and values, with their layout asserted |
//! | `session` | sessions and pins, and the semantics of each call |
//! | `extent` | the part of a pinned range that exists, and a window onto it |
//! | `table` | handles: an index and a generation, never a pointer |
//! | `process` | the state of one process; a forked child starts empty |
//! | `errno`, `log` | errors as errno values, and as log lines |
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
