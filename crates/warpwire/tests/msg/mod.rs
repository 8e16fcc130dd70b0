//! Ranks and messages over every link, with ranks as threads and as processes.
mod collectives;
mod device_channels;
mod fixture;
mod futures;
mod messages;
mod processes;
mod rendezvous;
mod windows;

use testkit::{Case, Collector, Effort, Suite};

use fixture::{Fixture, TestLink};

pub const SUITE: Suite = Suite { name: "msg", env: &[], collect, role: processes::run_role };

/// Cases that every link runs.
const EVERYWHERE: &[&[Case<Fixture>]] =
    &[messages::CASES, futures::CASES, windows::CASES, collectives::CASES, device_channels::CASES];
/// Cases that do not depend on the link; they run over the hub.
const ONCE: &[&[Case<Fixture>]] =
    &[messages::ONCE, futures::ONCE, rendezvous::ONCE, device_channels::ONCE];
/// Cases whose ranks are processes.
const BETWEEN_PROCESSES: &[&[Case<Fixture>]] = &[processes::CASES];

fn collect(suite: &mut Collector) {
    for (test_link, name) in TestLink::ALL {
        if suite.effort() == Effort::Quick && test_link != TestLink::Hub {
            continue;
        }
        let special = if test_link == TestLink::Hub { ONCE } else { BETWEEN_PROCESSES };
        for cases in EVERYWHERE.iter().chain(special) {
            suite.add(name, cases, move |case| (case.run)(&Fixture::new(test_link)));
        }
    }
}
