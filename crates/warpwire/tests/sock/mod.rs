//! The suite of kernel sockets, on every platform that can call them.
//!
//! Each case runs for both families, with peers of the same family in this process. It runs with
//! scripted kernels on the simulated GPU (receive rings behind a window, then in pinned memory),
//! with the header compiled as C++ for threads if there is a compiler, and with the header as CUDA
//! if there is a GPU. A missing platform prints `skipped: why`; `WARPWIRE_REQUIRE=cuda` makes that
//! a failure.
mod control;
mod datagrams;
mod direct;
mod ends;
mod gpunet;
mod keys;
mod killed;
mod peer;
mod polling;
mod scale;
mod scripted;
mod similar;
mod spans;
mod streams;
mod testbed;
mod warp;

use testkit::{Case, Collector, Effort, Suite};

use crate::ptx;
use peer::Family;
use testbed::{Platform, Testbed};

pub const SUITE: Suite = Suite { name: "sock", env: &[], collect, role: killed::run_role };

/// Cases that run for both families.
const BOTH: &[&[Case<Testbed>]] = &[
    control::CASES,
    streams::CASES,
    polling::CASES,
    spans::CASES,
    ends::CASES,
    gpunet::CASES,
    killed::CASES,
];
const INET: &[&[Case<Testbed>]] = &[datagrams::CASES, keys::CASES, similar::CASES];
const WARP: &[&[Case<Testbed>]] = &[warp::CASES, direct::CASES, killed::of_warp::CASES];
/// Many sockets: for both families, and for the second. On the simulated GPU once, as where the
/// rings are makes no difference to them.
const SCALE: [&[Case<Testbed>]; 2] = [scale::CASES, warp::SCALE];

fn collect(suite: &mut Collector) {
    let mut platforms = vec![Platform::Sim];
    if suite.effort() > Effort::Quick {
        platforms.push(Platform::SimPinned);
        platforms.extend(
            suite.backend("g++", testbed::compile_for_threads()).map(|()| Platform::Threads),
        );
    }
    if suite.backend("cuda", ptx::cuda_with(&[scripted::PTX, gpunet::PTX])).is_some() {
        platforms.extend([Platform::Cuda, Platform::CudaPinned]);
        // All cases share the process's one context, in which some calls wait for all streams.
        suite.run_serially();
    }
    for platform in platforms {
        let run = |family| {
            move |case: &'static Case<Testbed>| (case.run)(&Testbed::new(platform, family))
        };
        let is_scaled = platform != Platform::SimPinned || suite.effort() == Effort::Full;
        let scale = if is_scaled { &SCALE[..] } else { &[] };
        for cases in BOTH.iter().chain(INET).chain(scale.first()) {
            suite.add(&platform.to_string(), cases, run(Family::Inet));
        }
        for cases in BOTH.iter().chain(WARP).chain(scale) {
            suite.add(&format!("{platform}::warp"), cases, run(Family::Warp));
        }
    }
}
