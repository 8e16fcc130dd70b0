//! Warpwire moves GPU memory: mapped by the CPU, registered with a NIC, sent and received by CPU
//! threads, by CUDA streams, or from inside a running kernel.
//!
//! It works with RDMA NICs and CUDA GPUs, and without either: a software HCA implements RoCEv2 over
//! UDP or shared memory, and a simulated GPU has memory, streams and concurrent kernels. The same
//! program runs on both; objects report which path they use, and why not a better one.
//!
//! # Which module to use
//!
//! | need | use | example |
//! |---|---|---|
//! | RDMA from CPU threads, with or without NIC | [`verbs::Context`] | `04_write`, `15_send_recv` |
//! | GPU memory, streams, kernels, CPU mappings | [`mem::discover`] | `01_move` |
//! | GPU memory that another library allocated | [`mem::cuda`] | `02_foreign_pointer` |
//! | registration of such memory for RDMA | [`verbs::MemorySource`] | `06_register` |
//! | repeated registration of the same memory | [`mr::MrCache`] | `07_register_time` |
//! | RDMA ordered by a CUDA stream | [`stream::StreamQp`] | `11_jacobi`, mode `stream` |
//! | RDMA posted by a running kernel | [`stream::KernelQp`] | `10_kernels` |
//! | ranks, messages, windows, collectives | [`msg::Comm`] | `16_ranks`, `11_jacobi` |
//! | lists of ranges to and from peers that come and go | [`agent::Agent`] | `14_agents` |
//! | messages in stream order, or from a kernel | [`msg::DeviceChannel`] | `12_together` |
//! | TCP, UDP or RDMA sockets inside a kernel | [`sock::SockHost`] | `warpwire sock` |
//! | RoCEv2 over UDP | [`link::Udp`] | `03_udp_rate` |
//! | low latency between processes of one machine | [`link::Shm`] | `05_shm_rate`, `08_direct` |
//! | shared memory where possible, else UDP | [`link::Auto`] | `warpwire perf --link auto` |
//! | packet loss and delay; captures | [`link::fault`], [`link::pcap`] | `warpwire perf --help` |
//! | tuning of staged device memory | [`mem::copy::StagingOptions`] | `09_staging` |
//!
//! The examples are in the folder `examples` of the repository:
//! `cargo run --release -p examples --example 04_write`. The protocol alone, sans-IO and without
//! dependencies, is the crate `warpwire-proto`; what a machine can do, and its topology, is
//! `warpwire-doctor`.
//!
//! # An RDMA write without hardware
//!
//! ```
//! use std::time::Duration;
//! use warpwire::link::Hub;
//! use warpwire::mr::HostMemory;
//! use warpwire::verbs::{Access, Context, QpOptions, SendRequest, WrOp};
//!
//! // Two software HCAs on a network inside this process; a `Udp` or `Shm` link reaches others.
//! let hub = Hub::new();
//! let alice = Context::open(hub.endpoint("10.0.0.1:4791".parse().unwrap())?)?;
//! let bob = Context::open(hub.endpoint("10.0.0.2:4791".parse().unwrap())?)?;
//!
//! // Registered memory; Bob's may be written by the peer.
//! let (alice_pd, bob_pd) = (alice.alloc_pd(), bob.alloc_pd());
//! let (source, target) = (HostMemory::new(4096)?, HostMemory::new(4096)?);
//! source.bytes().write(0, b"hello")?;
//! let source_mr = alice.register(&alice_pd, source, Access::NONE)?;
//! let rights = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
//! let target_mr = bob.register(&bob_pd, target.clone(), rights)?;
//!
//! // A connected pair of queue pairs.
//! let (alice_cq, bob_cq) = (alice.create_cq(16)?, bob.create_cq(16)?);
//! let alice_qp = alice.create_qp(&alice_pd, &alice_cq, &alice_cq, QpOptions::default())?;
//! let bob_qp = bob.create_qp(&bob_pd, &bob_cq, &bob_cq, QpOptions::default())?;
//! alice_qp.connect(&bob_qp.endpoint())?;
//! bob_qp.connect(&alice_qp.endpoint())?;
//!
//! // The write, and its completion.
//! let from = [source_mr.sge(0, 5)];
//! alice_qp.post_send(&[SendRequest::new(1, WrOp::Write(target_mr.remote(0))).with(&from)])?;
//! let done = alice_cq.wait_next(Duration::from_secs(5))?.expect("a completion");
//! assert!(done.is_success());
//! let mut received = [0; 5];
//! target.bytes().read(0, &mut received)?;
//! assert_eq!(&received, b"hello");
//! # Ok::<(), warpwire::Error>(())
//! ```
//!
//! # Layers
//! A module may import only modules listed below it, never one above or beside it; a test parses
//! this table and checks every `use`. `error` and `units` may be used everywhere.
//!
//! ```text
//! tokio     waiting for completions, messages and notifications in tokio's reactor
//! agent     transfer agents: peers that come and go, lists of ranges, notifications
//! sock      sockets for kernels: TCP and UDP through the host, or RDMA without it
//! msg       ranks and messages: launchers, send and receive, windows, collectives
//! stream    verbs in stream order, and verbs posted by running kernels
//! verbs     one API for RDMA devices: contexts, memory, queue pairs, completions
//! hca | ibv  software HCA: mlx5 queues, RoCEv2 on a link | RDMA devices through libibverbs
//! mr | link  protection domains, keys, registrations | RoCEv2 packet transports
//! mem       devices, memory, streams: the CUDA backend and the simulated GPU
//! host      facts of the machine: PCI, NUMA, drivers, NICs, limits
//! work      work requests, completions and events, shared by all devices
//! mlx5      ConnectX formats: WQEs, CQEs, doorbells
//! sync      asymmetric fences (membarrier), revocation, a biased mutex
//! ```

// Hidden modules are not part of the API and change without notice. Tests, tools and the other
// crates of the workspace use them.
#[macro_use(setters)]
extern crate warpwire_proto;

pub mod agent;
pub mod error;
#[doc(hidden)]
pub mod hca;
#[doc(hidden)]
pub mod host;
#[doc(hidden)]
pub mod ibv;
pub mod link;
pub mod mem;
#[doc(hidden)]
pub mod mlx5;
pub mod mr;
pub mod msg;
pub mod sock;
pub mod stream;
mod sync;
#[cfg(feature = "tokio")]
pub mod tokio;
#[doc(hidden)]
pub mod units;
pub mod verbs;
#[doc(hidden)]
pub mod work;

pub use error::{Error, Result};
