//! `libibverbs.so.1`: the C API of rdma-core's verbs library over warpwire's software HCA.
//!
//! Programs that were written for RDMA devices load it in place of the system's library;
//! `docs/ibverbs.md` describes how, and how it differs from a NIC. This crate only translates
//! calls, handles and error codes; [`warpwire::verbs`] does the work.
//!
//! | module | contents |
//! |---|---|
//! | `exports` | the exported functions, by name; `exports.txt` has their versions |
//! | `abi` | C structures and numbers, with their layout asserted |
//! | `boundary` | null pointers, panics, errno |
//! | `devices` | the devices: one per usable network interface |
//! | `numbers` | queue pair numbers and GIDs as UDP addresses |
//! | `context` | open devices and their attributes |
//! | `memory`, `window` | protection domains, memory regions, memory windows |
//! | `channel`, `events` | completion channels, asynchronous events |
//! | `cq`, `cq_ex` | completion queues |
//! | `qp`, `post`, `qp_ex` | queue pairs, work requests |
//! | `srq`, `ah` | shared receive queues, address handles |
//! | `process`, `capture` | fork and exit; a capture of packets |
//! | `strings`, `private` | names of values; the interface of providers |
//!
//! # Pointers
//! C passes pointers to objects that this library allocated, and to its own structures. The
//! exported functions take them as `Option<&T>` or `Option<Box<T>>`, which have the layout of a
//! pointer that may be null: a null is answered with `EINVAL`. As with any libibverbs, a pointer
//! that is neither null nor valid is undefined behaviour. Objects are shared by threads, so their
//! fields that change are atomics or behind locks.

mod abi;
mod ah;
mod boundary;
mod capture;
mod channel;
mod context;
mod cq;
mod cq_ex;
mod devices;
mod events;
mod exports;
mod log;
mod memory;
mod numbers;
mod post;
mod private;
mod process;
mod qp;
mod qp_ex;
mod srq;
mod strings;
mod window;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod symbols {
    #![allow(unsafe_code)]
    use warpwire_cabi::jump;
    // Jumps to the functions of `exports`, under the names that C programs look up.
    include!(concat!(env!("OUT_DIR"), "/exports.rs"));
}
