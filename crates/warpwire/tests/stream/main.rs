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
mod processes;
mod refusals;
mod storm;

use std::os::unix::process::CommandExt;
use std::process::{Command, ExitCode};

use libtest_mimic::{Arguments, Trial};
use warpwire::mem::Backend;

use fixture::{Case, FLAVOURS, Fixture};

/// Cases for every flavour of queues.
const EVERYWHERE: &[&[Case]] = &[operations::CASES, descriptors::CASES, failures::CASES];
/// Cases for which that does not matter.
const ONCE: &[&[Case]] = &[refusals::ONCE, pressure::ONCE, processes::ONCE, storm::ONCE];

fn main() -> ExitCode {
    if let Ok(words) = std::env::var(processes::VARIABLE) {
        processes::live(&words);
        return ExitCode::SUCCESS;
    }
    if std::env::var_os(QUEUES).is_none() {
        return anew_with_more_queues();
    }
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

/// How many hardware queues CUDA's streams share: 8 if not set. A stream that waits holds up those that share its queue.
const QUEUES: &str = "CUDA_DEVICE_MAX_CONNECTIONS";

/// CUDA reads the variable when it starts, so this program starts once more.
fn anew_with_more_queues() -> ExitCode {
    let program = std::env::current_exe().unwrap();
    let error = Command::new(program).args(std::env::args_os().skip(1)).env(QUEUES, "32").exec();
    eprintln!("failed: cannot start anew: {error}");
    ExitCode::FAILURE
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
