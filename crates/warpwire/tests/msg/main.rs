//! Ranks and messages: one suite for every link, with ranks as threads and as processes.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod collectives;
mod fixture;
mod lanes;
mod meeting;
mod messages;
mod processes;
mod windows;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

use fixture::{Case, Fixture, Which};

/// Cases that every link runs.
const EVERYWHERE: &[&[Case]] = &[messages::CASES, windows::CASES, collectives::CASES, lanes::CASES];
/// Cases for which the link does not matter.
const ONCE: &[&[Case]] = &[messages::ONCE, meeting::ONCE, lanes::ONCE];
/// Cases with ranks that are processes.
const BETWEEN_PROCESSES: &[&[Case]] = &[processes::CASES];

fn main() -> ExitCode {
    if let Ok(task) = std::env::var(processes::VARIABLE) {
        processes::live(&task);
        return ExitCode::SUCCESS;
    }
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for (which, name) in Which::ALL {
        let special = if which == Which::Hub { ONCE } else { BETWEEN_PROCESSES };
        for case in EVERYWHERE.iter().chain(special).flat_map(|room| room.iter()) {
            trials.push(Trial::test(format!("{name}::{}", case.name), move || {
                (case.run)(&Fixture::new(which));
                Ok(())
            }));
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}
