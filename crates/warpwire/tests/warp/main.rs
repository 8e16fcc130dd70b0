//! One suite of CPU programs' sockets of the family `warp`, over every link.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod datagrams;
mod ends;
mod meeting;
mod readiness;
mod streams;
mod world;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

use world::{Case, Way, World};

fn main() -> ExitCode {
    if let Some(role) = std::env::var_os(ends::ROLE) {
        ends::play(role.to_str().unwrap());
        return ExitCode::SUCCESS;
    }
    let arguments = Arguments::from_args();
    let rooms = [streams::CASES, ends::CASES, readiness::CASES, meeting::CASES, datagrams::CASES];
    let trial = |way: Way, case: &'static Case| {
        Trial::test(format!("{way:?}::{}", case.name), move || {
            (case.run)(&World::new(way));
            Ok(())
        })
    };
    let cases = || rooms.iter().flat_map(|room| room.iter());
    let trials = Way::ALL.into_iter().flat_map(|way| cases().map(move |case| trial(way, case)));
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}
