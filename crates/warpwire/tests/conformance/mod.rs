//! Conformance of GPU backends: devices, memory, streams, events, graphs, kernels, sharing.
//!
//! Each case runs on the simulated GPU, and on CUDA if available. Without CUDA a line
//! `skipped: <reason>` is printed; `WARPWIRE_REQUIRE=cuda` turns that into a failure.
mod child;
mod copy_lists;
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

const EVERYWHERE: &[&[Case<Fixture>]] = &[
    memory::CASES,
    streams::CASES,
    copy_lists::CASES,
    program::CASES,
    sharing::CASES,
    windows::CASES,
];

fn collect(suite: &mut Collector) {
    silence_expected_panics();
    add(suite, Backend::Sim, sim_only::CASES);
    if suite.backend("cuda", ptx::cuda_with(&[kernels::PTX])).is_some() {
        add(suite, Backend::Cuda, cuda_only::CASES);
        // All cases share the one CUDA context of the process, in which some calls wait for all
        // streams: a case that blocks a stream would block the others.
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

/// Some cases panic on purpose, to test that the library catches it. Suppresses their messages.
fn silence_expected_panics() {
    let default_hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let payload = info.payload();
        let text = payload.downcast_ref::<&str>().copied().unwrap_or_default();
        if !text.starts_with("on purpose") {
            default_hook(info);
        }
    }));
}
