//! Warpwire moves GPU memory: mapped by the CPU, registered with a NIC, sent and received by CPU
//! threads, by CUDA streams, or from inside a running kernel.
//!
//! # The house
//! A room may import the rooms below it, never one above or beside it; a test reads this table and
//! holds every `use` to it. `error` and `units` belong to everyone.
//!
//! ```text
//! sock      sockets for kernels: TCP and UDP through the host, or RDMA rings by themselves
//! msg       ranks and messages: launchers, send and receive, windows, collectives
//! stream    verbs that a stream orders, or that a running kernel posts by itself
//! verbs     one API for RDMA devices: contexts, memory, queue pairs, completions
//! hca | ibv  the software HCA: ConnectX's queues in memory, RoCEv2 on a link | the machine's RDMA devices, by libibverbs
//! mr | link  protection domains, keys, registered memory | RoCEv2 packets in and out
//! mem       devices, memory, streams: the CUDA backend and the simulated GPU
//! host      the machine as files: PCI, NUMA, drivers, NICs, limits
//! work      requests, completions, news: the words that every device shares
//! mlx5      ConnectX's queue formats: work queue entries, completions, doorbells, as bytes
//! sync      barriers that one side pays for, and what stands on them: doors, a lock with a usual owner
//! ```

pub mod error;
pub mod hca;
pub mod host;
pub mod ibv;
pub mod link;
pub mod mem;
pub mod mlx5;
pub mod mr;
pub mod msg;
pub mod sock;
pub mod stream;
mod sync;
pub mod units;
pub mod verbs;
pub mod work;

pub use error::{Error, Result};
