//! Every suite that runs one list of cases on several backends, each in a process of its own:
//! `cargo test -p warpwire --test suites verbs::` runs one of them.
//!
//! | suite | what, on which backends |
//! |---|---|
//! | `allocations` | what is posted, carried and polled without an allocation |
//! | `conformance` | devices, memory, streams: the simulated GPU, CUDA |
//! | `ibv` | RDMA devices through libibverbs: rxe in a guest |
//! | `kernels` | verbs inside kernels: simulated, CUDA, the header as C++ |
//! | `mlx5` | streams and kernels on the queues of a ConnectX, which is a stand-in |
//! | `msg` | ranks and messages: every link, threads and processes |
//! | `registration` | any memory under a key: host, simulated, CUDA |
//! | `rxe` | the software HCA against Linux's soft-RoCE in a guest |
//! | `sock` | sockets inside kernels: simulated, the header as C++, CUDA |
//! | `stream` | verbs that streams order: every kind of queue, simulated, CUDA |
//! | `verbs` | verbs: every link of the software HCA, RDMA devices |
//! | `warp` | CPU programs' sockets of the family `warp`: every link |
//!
//! What is absent prints `skipped: why`; `WARPWIRE_REQUIRE=cuda,…` makes that a failure.
//! `WARPWIRE_EFFORT=quick|change|full` says how much to try.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod allocations;
mod conformance;
mod ibv;
mod kernels;
mod mlx5;
mod msg;
mod ptx;
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
    testkit::run(&[
        allocations::SUITE,
        conformance::SUITE,
        ibv::SUITE,
        kernels::SUITE,
        mlx5::SUITE,
        msg::SUITE,
        registration::SUITE,
        rxe::SUITE,
        sock::SUITE,
        stream::SUITE,
        verbs::SUITE,
        warp::SUITE,
    ])
}
