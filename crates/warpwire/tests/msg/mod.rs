//! Ranks and messages over every link and on an RDMA device, with ranks as threads and as
//! processes.
mod collectives;
mod device_channels;
mod fixture;
mod futures;
mod messages;
mod processes;
mod rendezvous;
mod windows;

use testkit::{Case, Collector, Effort, Suite};

use crate::rdma_device;
use fixture::{Fixture, TestLink};

pub const SUITE: Suite = Suite { name: "msg", env: &[], collect, role: processes::run_role };

/// Cases that every link runs.
const EVERYWHERE: &[&[Case<Fixture>]] =
    &[messages::CASES, futures::CASES, windows::CASES, collectives::CASES];
/// Cases that need queues which streams and kernels can fill: those of a software HCA.
const ON_LINKS: &[&[Case<Fixture>]] = &[device_channels::CASES];
/// Cases that do not depend on the link; they run over the hub.
const ONCE: &[&[Case<Fixture>]] =
    &[messages::ONCE, futures::ONCE, rendezvous::ONCE, device_channels::ONCE];
/// Cases whose ranks are processes.
const BETWEEN_PROCESSES: &[&[Case<Fixture>]] = &[processes::CASES];

fn collect(suite: &mut Collector) {
    let effort = suite.effort();
    for (test_link, name) in rdma_device::with_links(suite, &TestLink::LINKS, TestLink::Device) {
        let quick = test_link == TestLink::Hub || rdma_device::is_named();
        if effort == Effort::Quick && !quick {
            continue;
        }
        let special = match test_link {
            TestLink::Hub => [ON_LINKS, ONCE],
            TestLink::Device => [BETWEEN_PROCESSES, &[]],
            _ => [ON_LINKS, BETWEEN_PROCESSES],
        };
        for cases in EVERYWHERE.iter().chain(special.into_iter().flatten()) {
            suite.add(name, cases, move |case| (case.run)(&Fixture::new(test_link)));
        }
    }
}
