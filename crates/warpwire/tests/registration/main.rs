//! Registering any memory: by handle, by address, by descriptor, on demand; and what goes wrong with each.
//!
//! Cases run on host memory and on the simulated GPU, over the loopback link, and some over UDP too. Those of `sorts` run
//! on CUDA where it is there; where it is not, a line `skipped: why` is printed, and `WARPWIRE_REQUIRE=cuda` makes that a
//! failure. `WARPWIRE_SEED` replays one seed, `WARPWIRE_SOAK` says for how many seconds the soak goes on.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]
#![allow(unsafe_code)] // registering by address is; each use says why it is right

mod child;
mod clients;
mod descriptors;
mod ends;
#[path = "../verbs/fixture.rs"]
#[allow(dead_code, unused_macros, unused_imports)] // it is another suite's too
mod fixture;
mod moves;
mod on_demand;
mod peers;
mod ranges;
mod soak;
mod sorts;
mod stage;
mod staged;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};
use warpwire::mem::{Device, cuda};

use fixture::Which;
use stage::{Case, Stage};

/// Cases for which the link matters.
const EVERYWHERE: &[&[Case]] = &[sorts::CASES, moves::CASES];
const ONCE: &[&[Case]] = &[
    clients::CASES,
    peers::CASES,
    descriptors::CASES,
    ends::CASES,
    ranges::CASES,
    on_demand::CASES,
    staged::CASES,
    soak::CASES,
];

fn main() -> ExitCode {
    if let Some(code) = child::run_if_asked() {
        return code;
    }
    let arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for (which, name) in Which::LINKS {
        if !matches!(which, Which::Loopback | Which::Udp4) {
            continue; // the verbs' own suite has them all
        }
        if let Some(why) = which.missing() {
            eprintln!("skipped: {name}: {why}");
            if required(name) {
                return ExitCode::FAILURE;
            }
            continue;
        }
        let rooms = EVERYWHERE.iter().chain(ONCE.iter().filter(|_| which == Which::Loopback));
        for case in rooms.flat_map(|room| room.iter()) {
            trials.push(trial(name, case, which, None));
        }
    }
    match cuda::devices().map(|devices| devices.into_iter().next()) {
        Ok(Some(gpu)) => {
            let cases = sorts::CASES.iter();
            trials
                .extend(cases.map(|case| trial("cuda", case, Which::Loopback, Some(gpu.clone()))));
        }
        found => {
            let why =
                found.err().map_or("there is no device".into(), |why| why.reason().to_owned());
            eprintln!("skipped: cuda: {why}");
            if required("cuda") {
                eprintln!("failed: WARPWIRE_REQUIRE asks for cuda");
                return ExitCode::FAILURE;
            }
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

fn trial(place: &str, case: &'static Case, which: Which, gpu: Option<Device>) -> Trial {
    Trial::test(format!("{place}::{}", case.name), move || {
        let stage = Stage::new(which, gpu);
        (case.run)(&stage);
        stage.check_nothing_left();
        Ok(())
    })
}

fn required(what: &str) -> bool {
    let list = std::env::var("WARPWIRE_REQUIRE").unwrap_or_default();
    list.split(',').any(|name| name.trim() == what)
}
