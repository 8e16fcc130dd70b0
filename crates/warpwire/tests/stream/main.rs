//! Verbs that streams order: one suite for every backend and every way to make the queues.
//!
//! Cases run on the simulated GPU and on CUDA if it is there; where it is absent, a line `skipped: why` is printed,
//! and `WARPWIRE_REQUIRE=cuda` makes that a failure.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod descriptors;
mod failures;
mod fixture;
mod operations;
mod pressure;
mod refusals;
mod storm;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use warpwire::mem::Backend;

use fixture::{Case, FLAVOURS, Fixture};

/// Cases for every flavour of queues.
const EVERYWHERE: &[&[Case]] = &[operations::CASES, descriptors::CASES, failures::CASES];
/// Cases for which that does not matter.
const ONCE: &[&[Case]] = &[refusals::ONCE, pressure::ONCE, storm::ONCE];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    let mut trials = trials(Backend::Sim);
    match warpwire::mem::cuda::devices() {
        Ok(_) => {
            trials.extend(self::trials(Backend::Cuda));
            // All cases share the process's one CUDA context, in which some calls wait for all streams.
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

fn trials(backend: Backend) -> Vec<Trial> {
    let mut trials = Vec::new();
    for (index, flavour) in FLAVOURS.into_iter().enumerate() {
        // What a CUDA device can do is not ours to say.
        if backend == Backend::Cuda && !flavour.nor {
            continue;
        }
        let once = if index == 0 { ONCE } else { &[] };
        for case in EVERYWHERE.iter().chain(once).flat_map(|room| room.iter()) {
            let name = format!("{backend}::{}::{}", flavour.name, case.name);
            trials.push(Trial::test(name, move || {
                let fixture = Fixture::new(backend, flavour);
                (case.run)(&fixture);
                fixture.check_nothing_left();
                Ok(())
            }));
        }
    }
    trials
}

fn required(backend: &str) -> bool {
    let list = std::env::var("WARPWIRE_REQUIRE").unwrap_or_default();
    list.split(',').any(|name| name.trim() == backend)
}
