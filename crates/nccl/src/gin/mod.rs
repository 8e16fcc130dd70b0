//! Device-initiated networking (GIN) of type *proxy*: kernels write descriptors of operations into
//! queues of NCCL's, and a thread of NCCL's calls this plugin for each.
//!
//! | module | contents |
//! |---|---|
//! | `exports`, `abi` | the tables of functions that NCCL looks up, and their layout |
//! | `mesh`, `peers` | set-up between all ranks over TCP; registrations, and whether ranks live |
//! | `coll`, `context` | a communicator, and the contexts of NCCL 2.30 |
//! | `regions`, `requests` | symmetric memory and outstanding operations, by number |
//! | `put` | writes, reads and signals |
//!
//! # Invariants
//! 1. Data and signal of an operation go through one queue pair, the signal behind the data, as an
//!    atomic addition. RC executes in order, and the HCA orders its writes to device memory before
//!    the atomic, so whoever sees the signal has the data.
//! 2. Numbers of memory and of operations come back from kernels or NCCL: they are looked up, never
//!    dereferenced.
//! 3. All ranges are checked against what the rank registered before anything is posted.
//! 4. No operation allocates memory. One lock is taken, the communicator's own, which registrations
//!    hold only to add their result.

mod abi;
mod coll;
mod context;
mod exports;
mod mesh;
mod peers;
mod put;
mod regions;
mod requests;
