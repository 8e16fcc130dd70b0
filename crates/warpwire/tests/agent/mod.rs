//! Transfer agents over every link and on an RDMA device: in one process, and between processes
//! that die or stop.
mod failures;
mod fixture;
mod lists;
mod notifications;
mod peers;
mod processes;
mod streams;
mod transfers;

use testkit::{Case, Collector, Effort, Suite};

use crate::rdma_device;
use fixture::{Fixture, TestLink};

pub const SUITE: Suite = Suite { name: "agent", env: &[], collect, role: processes::run_role };

/// Cases that every link runs.
const EVERYWHERE: &[&[Case<Fixture>]] = &[
    transfers::CASES,
    lists::CASES,
    notifications::CASES,
    peers::CASES,
    streams::CASES,
    failures::CASES,
];
/// Cases between processes.
const BETWEEN_PROCESSES: &[&[Case<Fixture>]] = &[processes::CASES];

fn collect(suite: &mut Collector) {
    for (test_link, name) in rdma_device::with_links(suite, &TestLink::LINKS, TestLink::Device) {
        let quick = matches!(test_link, TestLink::Hub | TestLink::Auto) || rdma_device::is_named();
        if suite.effort() == Effort::Quick && !quick {
            continue;
        }
        let special = if test_link == TestLink::Hub { &[] } else { BETWEEN_PROCESSES };
        for cases in EVERYWHERE.iter().chain(special) {
            suite.add(name, cases, move |case| (case.run)(&Fixture::new(test_link)));
        }
    }
}
