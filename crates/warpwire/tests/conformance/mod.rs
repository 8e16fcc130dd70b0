//! One suite for every backend: devices, memory, streams, events, graphs, kernels, sharing.
//!
//! Each case runs on the simulated GPU and on CUDA if it is there; where a backend is absent, a line
//! `skipped: why` is printed, and `WARPWIRE_REQUIRE=cuda` makes it a failure.
mod child;
mod cuda_only;
mod fixture;
mod kernels;
mod memory;
mod program;
mod sharing;
mod sim_only;
mod streams;
mod windows;

use testkit::{Case, Collector, Suite};
use warpwire::mem::Backend;

use crate::ptx;
use fixture::Fixture;

pub const SUITE: Suite = Suite { name: "conformance", env: &[], collect, role: child::run };

const EVERYWHERE: &[&[Case<Fixture>]] =
    &[memory::CASES, streams::CASES, program::CASES, sharing::CASES, windows::CASES];

fn collect(suite: &mut Collector) {
    silence_expected_panics();
    add(suite, Backend::Sim, sim_only::CASES);
    if suite.backend("cuda", ptx::cuda_with(&[kernels::PTX])).is_some() {
        add(suite, Backend::Cuda, cuda_only::CASES);
        // All cases share the process's one CUDA context, in which some calls wait for all streams:
        // a case that holds a stream up would hold up the others.
        suite.run_serially();
    }
}

fn add(suite: &mut Collector, backend: Backend, special: &'static [Case<Fixture>]) {
    for cases in EVERYWHERE.iter().chain([&special]) {
        suite.add(&backend.to_string(), cases, move |case| {
            let fixture = Fixture::new(backend);
            (case.run)(&fixture);
            fixture.check_nothing_left();
        });
    }
}

/// Some cases panic on purpose, where it must be caught; their noise would drown real failures.
fn silence_expected_panics() {
    let loud = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let payload = info.payload();
        let text = payload.downcast_ref::<&str>().copied().unwrap_or_default();
        if !text.starts_with("on purpose") {
            loud(info);
        }
    }));
}
