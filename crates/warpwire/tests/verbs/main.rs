//! The verbs over the software HCA: one suite for every link.
//!
//! Each case runs over each link that is there; where one is absent, a line `skipped: why` is printed, and
//! `WARPWIRE_REQUIRE` with the link's name in it makes it a failure. Cases that are about the device alone run over
//! the loopback link only.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod apart;
mod chaos;
mod datagrams;
mod direct;
mod events;
mod failures;
mod fixture;
mod garbage;
mod mixtures;
mod operations;
mod processes;
mod queues;
mod scale;
mod states;
mod strange;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

use fixture::{Case, Fixture, Which};

/// Cases that every link runs.
const EVERYWHERE: &[&[Case]] = &[
    operations::CASES,
    direct::CASES,
    failures::CASES,
    queues::CASES,
    events::CASES,
    scale::CASES,
    chaos::CASES,
    mixtures::CASES,
    datagrams::CASES,
    strange::CASES,
];
/// Cases with a process on either side.
const BETWEEN_PROCESSES: &[&[Case]] = &[processes::CASES, apart::CASES];
/// Cases for which the link does not matter.
const ONCE: &[&[Case]] = &[
    failures::ONCE,
    queues::ONCE,
    events::ONCE,
    states::ONCE,
    scale::ONCE,
    chaos::ONCE,
    mixtures::ONCE,
    garbage::ONCE,
    datagrams::ONCE,
    apart::ONCE,
];

fn main() -> ExitCode {
    if let Ok(words) = std::env::var(processes::VARIABLE) {
        processes::live(&words);
        return ExitCode::SUCCESS;
    }
    if let Some(ended) = apart::run_if_asked() {
        return ended;
    }
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for (which, name) in Which::ALL {
        if let Some(why) = which.missing() {
            // To stderr: test runners read the list of tests from stdout.
            eprintln!("skipped: {name}: {why}");
            if required(name) {
                eprintln!("failed: WARPWIRE_REQUIRE asks for {name}");
                return ExitCode::FAILURE;
            }
            continue;
        }
        let special = if which == Which::Loopback { ONCE } else { BETWEEN_PROCESSES };
        let rooms = EVERYWHERE.iter().chain(special);
        for case in rooms.flat_map(|room| room.iter()) {
            trials.push(Trial::test(format!("{name}::{}", case.name), move || {
                (case.run)(&Fixture::new(which));
                Ok(())
            }));
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn required(link: &str) -> bool {
    let list = std::env::var("WARPWIRE_REQUIRE").unwrap_or_default();
    list.split(',').any(|name| name.trim() == link)
}
