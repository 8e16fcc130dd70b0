//! Queue pairs for kernels: calls from inside kernels, and from streams, over the software HCA.
//!
//! Each case runs on the simulated GPU and on CUDA if it is there; where it is absent, a line `skipped: why` is printed,
//! and `WARPWIRE_REQUIRE=cuda` makes it a failure. `cpu` has the header's own code on CPU threads.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod calls;
mod cpu;
mod fixture;
mod inside;
mod refusals;
mod streams;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use warpwire::mem::Backend;

use fixture::{Case, Fixture, Which};

const ROOMS: &[&[Case]] = &[inside::CASES, streams::CASES, refusals::CASES];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    let mut trials = cpu::trials();
    for (which, link) in [(Which::Loopback, "loopback"), (Which::Shm, "shm")] {
        trials.extend(trials_on(Backend::Sim, which, link));
    }
    match warpwire::mem::cuda::devices() {
        Ok(_) => {
            for (which, link) in [(Which::Loopback, "loopback"), (Which::Shm, "shm")] {
                trials.extend(trials_on(Backend::Cuda, which, link));
            }
            // All cases share the process's one CUDA context: see the conformance suite.
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

fn trials_on(backend: Backend, which: Which, link: &str) -> Vec<Trial> {
    let cases = ROOMS.iter().flat_map(|room| room.iter());
    let trial = |case: &'static Case| {
        Trial::test(format!("{backend}::{link}::{}", case.name), move || {
            (case.run)(&Fixture::new(backend, which));
            Ok(())
        })
    };
    cases.map(trial).collect()
}

pub fn required(what: &str) -> bool {
    let list = std::env::var("WARPWIRE_REQUIRE").unwrap_or_default();
    list.split(',').any(|name| name.trim() == what)
}
