//! `librdmacm.so.1`: the C API of rdma-core's connection manager, over TCP.
//!
//! Programs that connect by RDMA's connection manager load it beside the `libibverbs.so.1` of
//! `warpwire-ibverbs`, whose C interface is all that it uses: both libraries have the same devices
//! and objects. `docs/ibverbs.md` describes how they are installed, and how they differ from a NIC
//! and a kernel.
//!
//! | module | contents |
//! |---|---|
//! | `exports` | the exported functions, by name; `exports.txt` has their versions |
//! | `abi` | C structures and numbers, with their layout asserted |
//! | `boundary` | null pointers, panics, errno |
//! | `verbs`, `devices` | libibverbs, loaded at run time; its devices by address |
//! | `message`, `session` | messages between connection managers, states: no I/O |
//! | `sockets`, `service` | TCP sockets and ports; the thread that serves connections |
//! | `channel`, `events` | event channels, events |
//! | `id`, `connect`, `qp` | ids, their connections, their queue pairs |
//! | `addrinfo` | `rdma_getaddrinfo` |
//! | `process` | fork, signals |
//!
//! # Pointers
//! As in `warpwire-ibverbs`, exported functions take pointers of C as `Option<&T>` where they can:
//! a null is answered with `EINVAL`, a pointer that is neither null nor valid is undefined
//! behaviour.
//! An id is used by one thread at a time, but for its events, as with any librdmacm.

mod abi;
mod addrinfo;
mod boundary;
mod channel;
mod connect;
mod devices;
mod events;
mod exports;
mod id;
mod log;
mod message;
mod process;
mod qp;
mod service;
mod session;
mod sockets;
mod strings;
mod verbs;

#[cfg(any(target_arch = "x86_64", target_arch = "aarch64"))]
mod symbols {
    #![allow(unsafe_code)]
    use warpwire_cabi::jump;
    // Jumps to the functions of `exports`, under the names that C programs look up.
    include!(concat!(env!("OUT_DIR"), "/exports.rs"));
}
