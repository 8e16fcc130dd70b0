//! Registering any memory: by handle, by address, by descriptor, on demand; and what goes wrong with each.
//!
//! Cases run on host memory and on the simulated GPU, over the loopback link, and some over UDP too. Those of `kinds` run
//! on CUDA where it is there; where it is not, a line `skipped: why` is printed, and `WARPWIRE_REQUIRE=cuda` makes that a
//! failure. `WARPWIRE_SEED` replays one seed, `WARPWIRE_SOAK` says for how many seconds the soak goes on.
#![allow(unsafe_code)] // registering by address is; each use says why it is right

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

/// Cases for which the link matters.
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
    // The verbs' own suite has all links.
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
