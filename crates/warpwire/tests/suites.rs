//! The suites that run one list of cases on several backends, each suite in a process of its own.
//! `cargo test -p warpwire --test suites verbs::` runs one suite.
//!
//! | suite | subject: backends |
//! |---|---|
//! | `agent` | transfer agents: every link, an RDMA device, threads and processes |
//! | `allocations` | no allocation in post, packet and poll: handles, addresses, dma-bufs |
//! | `conformance` | devices, memory, streams: the simulated GPU, CUDA |
//! | `ibv` | RDMA devices through libibverbs: rxe in a virtual machine |
//! | `kernels` | verbs inside kernels: simulated, CUDA, the header as C++ |
//! | `mlx5` | streams and kernels on the queues of a ConnectX: a fake device |
//! | `msg` | ranks and messages: every link, an RDMA device, threads and processes |
//! | `registration` | registration of every kind of memory: host, simulated, CUDA |
//! | `rxe` | interoperability with Linux's soft-RoCE (rxe): a virtual machine |
//! | `sock` | sockets inside kernels: simulated, the header as C++, CUDA |
//! | `stream` | verbs ordered by streams: every kind of queue, simulated, CUDA |
//! | `verbs` | verbs: every link of the software HCA, RDMA devices |
//! | `warp` | sockets of CPU programs (family `warp`): every link |
//!
//! A backend that is not available prints `skipped: <reason>`; `WARPWIRE_REQUIRE=cuda,…` turns
//! that into a failure. `WARPWIRE_EFFORT=quick|change|full` sets how thorough the tests are.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod agent;
mod allocations;
mod conformance;
mod ibv;
mod kernels;
mod mlx5;
mod msg;
mod ptx;
mod rdma_device;
mod registration;
mod rxe;
mod sock;
mod stream;
mod verbs;
mod warp;

use std::process::ExitCode;

#[global_allocator]
static ALLOCATOR: testkit::CountingAllocator = testkit::CountingAllocator;

fn main() -> ExitCode {
    // The longest first: they run beside each other.
    testkit::run(&[
        verbs::SUITE,
        msg::SUITE,
        sock::SUITE,
        agent::SUITE,
        warp::SUITE,
        stream::SUITE,
        kernels::SUITE,
        registration::SUITE,
        conformance::SUITE,
        allocations::SUITE,
        ibv::SUITE,
        mlx5::SUITE,
        rxe::SUITE,
    ])
}
