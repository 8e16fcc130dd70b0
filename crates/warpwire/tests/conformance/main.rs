//! One suite for every backend: devices, memory, streams, events, graphs, kernels, sharing.
//!
//! Each case runs on the simulated GPU and on CUDA if it is there; where a backend is absent, a line
//! `skipped: why` is printed, and `WARPWIRE_REQUIRE=cuda` makes it a failure.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

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

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use warpwire::mem::Backend;

use fixture::{Case, Fixture};

fn main() -> ExitCode {
    if let Some(code) = child::run_if_asked() {
        return code;
    }
    let mut arguments = Arguments::from_args();
    hush_panics_on_purpose();
    let mut trials = trials(
        Backend::Sim,
        &[
            memory::CASES,
            streams::CASES,
            program::CASES,
            sharing::CASES,
            windows::CASES,
            sim_only::CASES,
        ],
    );
    match warpwire::mem::cuda::devices() {
        Ok(_) => {
            trials.extend(trials_on_cuda());
            // All cases share the process's one CUDA context, in which some calls wait for all streams:
            // a case that holds a stream up would hold up the others.
            arguments.test_threads = Some(1);
        }
        Err(error) => {
            // To stderr: test runners read the list of tests from stdout.
            eprintln!("skipped: {}", error.reason());
            if required("cuda") {
                eprintln!("failed: WARPWIRE_REQUIRE asks for cuda");
                return ExitCode::FAILURE;
            }
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn trials_on_cuda() -> Vec<Trial> {
    trials(
        Backend::Cuda,
        &[
            memory::CASES,
            streams::CASES,
            program::CASES,
            sharing::CASES,
            windows::CASES,
            cuda_only::CASES,
        ],
    )
}

fn trials(backend: Backend, rooms: &[&'static [Case]]) -> Vec<Trial> {
    let cases = rooms.iter().flat_map(|room| room.iter());
    let trial = |case: &'static Case| {
        Trial::test(format!("{backend}::{}", case.name), move || {
            let fixture = Fixture::new(backend);
            (case.run)(&fixture);
            fixture.check_nothing_left();
            Ok(())
        })
    };
    cases.map(trial).collect()
}

/// Some cases panic on purpose, where it must be caught; their noise would drown real failures.
fn hush_panics_on_purpose() {
    let loud = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |info| {
        let payload = info.payload();
        let text = payload.downcast_ref::<&str>().copied().unwrap_or_default();
        if !text.starts_with("on purpose") {
            loud(info);
        }
    }));
}

fn required(backend: &str) -> bool {
    let list = std::env::var("WARPWIRE_REQUIRE").unwrap_or_default();
    list.split(',').any(|name| name.trim() == backend)
}
