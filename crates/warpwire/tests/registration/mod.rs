//! Registering any memory: by handle, by address, by descriptor, on demand; and what goes wrong with each.
//!
//! Cases run on host memory and on the simulated GPU, over the loopback link, and some over UDP too. Those of `sorts` run
//! on CUDA where it is there; where it is not, a line `skipped: why` is printed, and `WARPWIRE_REQUIRE=cuda` makes that a
//! failure. `WARPWIRE_SEED` replays one seed, `WARPWIRE_SOAK` says for how many seconds the soak goes on.
#![allow(unsafe_code)] // registering by address is; each use says why it is right

mod child;
mod clients;
mod descriptors;
mod ends;
mod moves;
mod on_demand;
mod peers;
mod ranges;
mod soak;
mod sorts;
mod stage;
mod staged;

use testkit::{Case, Collector, Effort, Suite};
use warpwire::mem::{Device, cuda};

use crate::verbs::fixture::Which;
use stage::Stage;

pub const SUITE: Suite = Suite { name: "registration", env: &[], collect, role: child::live };

/// Cases for which the link matters.
const EVERYWHERE: &[&[Case<Stage>]] = &[sorts::CASES, moves::CASES];
const ONCE: &[&[Case<Stage>]] = &[
    clients::CASES,
    peers::CASES,
    descriptors::CASES,
    ends::CASES,
    ranges::CASES,
    on_demand::CASES,
    staged::CASES,
    soak::CASES,
];

fn collect(suite: &mut Collector) {
    add(suite, "loopback", Which::Loopback, &[EVERYWHERE, ONCE]);
    // The verbs' own suite has all links.
    if suite.effort() > Effort::Quick {
        add(suite, "udp4", Which::Udp4, &[EVERYWHERE]);
    }
    let gpu = cuda::devices().map_err(|why| why.reason().to_owned());
    let gpu = gpu.and_then(|found| found.into_iter().next().ok_or("there is no device".into()));
    if let Some(gpu) = suite.backend("cuda", gpu) {
        suite.add("cuda", sorts::CASES, move |case| run(case, Which::Loopback, Some(gpu.clone())));
    }
}

fn add(suite: &mut Collector, name: &str, which: Which, lists: &[&[&'static [Case<Stage>]]]) {
    if suite.backend(name, which.missing().map_or(Ok(()), Err)).is_some() {
        for cases in lists.iter().copied().flatten() {
            suite.add(name, cases, move |case| run(case, which, None));
        }
    }
}

fn run(case: &Case<Stage>, which: Which, gpu: Option<Device>) {
    let stage = Stage::new(which, gpu);
    (case.run)(&stage);
    stage.check_nothing_left();
}
