//! Ranks and messages: one suite for every link, with ranks as threads and as processes.
mod collectives;
mod fixture;
mod lanes;
mod meeting;
mod messages;
mod processes;
mod windows;

use testkit::{Case, Collector, Effort, Suite};

use fixture::{Fixture, Which};

pub const SUITE: Suite = Suite { name: "msg", env: &[], collect, role: processes::live };

/// Cases that every link runs.
const EVERYWHERE: &[&[Case<Fixture>]] =
    &[messages::CASES, windows::CASES, collectives::CASES, lanes::CASES];
/// Cases for which the link does not matter.
const ONCE: &[&[Case<Fixture>]] = &[messages::ONCE, meeting::ONCE, lanes::ONCE];
/// Cases with ranks that are processes.
const BETWEEN_PROCESSES: &[&[Case<Fixture>]] = &[processes::CASES];

fn collect(suite: &mut Collector) {
    for (which, name) in Which::ALL {
        if suite.effort() == Effort::Quick && which != Which::Hub {
            continue;
        }
        let special = if which == Which::Hub { ONCE } else { BETWEEN_PROCESSES };
        for cases in EVERYWHERE.iter().chain(special) {
            suite.add(name, cases, move |case| (case.run)(&Fixture::new(which)));
        }
    }
}
