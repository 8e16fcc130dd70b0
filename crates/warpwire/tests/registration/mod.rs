//! Memory registration by handle, by address, by descriptor and on demand, and how each can fail.
//!
//! Cases run on host memory and on the simulated GPU, over the loopback link; some also over UDP.
//! The cases of `kinds` also run on CUDA if available; otherwise a line `skipped: <reason>` is
//! printed, which `WARPWIRE_REQUIRE=cuda` turns into a failure. `WARPWIRE_SEED` replays one seed,
//! `WARPWIRE_SOAK` sets the duration of the soak test in seconds.
#![allow(unsafe_code)] // to register memory by its address

mod child;
mod clients;
mod deregistration;
mod descriptors;
mod harness;
mod kinds;
mod moves;
mod on_demand;
mod peers;
mod ranges;
mod soak;
mod staged;

use testkit::{Case, Collector, Effort, Suite};
use warpwire::mem::{Device, cuda};

use crate::verbs::fixture::TestLink;
use harness::Harness;

pub const SUITE: Suite = Suite { name: "registration", env: &[], collect, role: child::run_role };

/// Cases that depend on the link.
const EVERYWHERE: &[&[Case<Harness>]] = &[kinds::CASES, moves::CASES];
const ONCE: &[&[Case<Harness>]] = &[
    clients::CASES,
    peers::CASES,
    descriptors::CASES,
    deregistration::CASES,
    ranges::CASES,
    on_demand::CASES,
    staged::CASES,
    soak::CASES,
];

fn collect(suite: &mut Collector) {
    add(suite, "loopback", TestLink::Loopback, &[EVERYWHERE, ONCE]);
    // The suite `verbs` runs over all links.
    if suite.effort() > Effort::Quick {
        add(suite, "udp4", TestLink::Udp4, &[EVERYWHERE]);
    }
    let gpu = cuda::devices().map_err(|why| why.reason().to_owned());
    let gpu = gpu.and_then(|found| found.into_iter().next().ok_or("there is no device".into()));
    if let Some(gpu) = suite.backend("cuda", gpu) {
        suite.add("cuda", kinds::CASES, move |case| {
            run(case, TestLink::Loopback, Some(gpu.clone()))
        });
    }
}

fn add(
    suite: &mut Collector,
    name: &str,
    test_link: TestLink,
    lists: &[&[&'static [Case<Harness>]]],
) {
    if suite.backend(name, test_link.missing().map_or(Ok(()), Err)).is_some() {
        for cases in lists.iter().copied().flatten() {
            suite.add(name, cases, move |case| run(case, test_link, None));
        }
    }
}

fn run(case: &Case<Harness>, test_link: TestLink, gpu: Option<Device>) {
    let harness = Harness::new(test_link, gpu);
    (case.run)(&harness);
    harness.check_nothing_left();
}
