//! One suite of sockets for every way to call them.
//!
//! Each case runs for both families, with peers of the same in this process; and with puppets on the simulated GPU (its receive rings behind a window, then in pinned memory), with the
//! header compiled as C++ for threads where there is a compiler, and with the header as CUDA where there is a GPU.
//! What is absent prints `skipped: why`, and `WARPWIRE_REQUIRE=cuda` makes it a failure.
mod control;
mod datagrams;
mod ends;
mod gpunet;
mod keys;
mod killed;
mod peer;
mod polling;
mod puppet;
mod scale;
mod similar;
mod spans;
mod streams;
mod warp;
mod world;

use testkit::{Case, Collector, Effort, Suite};

use crate::ptx;
use peer::Family;
use world::{Way, World};

pub const SUITE: Suite = Suite { name: "sock", env: &[], collect, role: killed::play };

/// Cases of both families.
const BOTH: &[&[Case<World>]] = &[
    control::CASES,
    streams::CASES,
    polling::CASES,
    spans::CASES,
    ends::CASES,
    gpunet::CASES,
    killed::CASES,
    scale::CASES,
];
const INET: &[&[Case<World>]] = &[datagrams::CASES, keys::CASES, similar::CASES];
const WARP: &[&[Case<World>]] = &[warp::CASES, killed::of_warp::CASES];

fn collect(suite: &mut Collector) {
    let mut ways = vec![Way::Sim];
    if suite.effort() > Effort::Quick {
        ways.push(Way::SimPinned);
        ways.extend(suite.backend("g++", world::compile_for_threads()).map(|()| Way::Threads));
    }
    if suite.backend("cuda", ptx::cuda_with(&[puppet::PTX, gpunet::PTX])).is_some() {
        ways.extend([Way::Cuda, Way::CudaPinned]);
        // All cases share the process's one context, in which some calls wait for all streams.
        suite.one_at_a_time();
    }
    for way in ways {
        let run = |family| move |case: &'static Case<World>| (case.run)(&World::new(way, family));
        for cases in BOTH.iter().chain(INET) {
            suite.add(&way.to_string(), cases, run(Family::Inet));
        }
        for cases in BOTH.iter().chain(WARP) {
            suite.add(&format!("{way}::warp"), cases, run(Family::Warp));
        }
    }
}
