//! Verbs that streams order: one suite for every backend and every way to make the queues.
//!
//! Cases run on the simulated GPU and on CUDA if it is there; where it is absent, a line `skipped: why` is printed,
//! and `WARPWIRE_REQUIRE=cuda` makes that a failure.
mod descriptors;
mod failures;
mod fixture;
mod operations;
mod pressure;
mod processes;
mod refusals;
mod storm;

use testkit::{Case, Collector, Effort, Suite};
use warpwire::mem::Backend;

use fixture::{Fixture, VARIANTS};

pub const SUITE: Suite = Suite { name: "stream", env: QUEUES, collect, role: processes::run_role };

/// How many hardware queues CUDA's streams share: 8 if not set. A stream that waits holds up those that share its
/// queue. CUDA reads the variable when it starts.
const QUEUES: &[(&str, &str)] = &[("CUDA_DEVICE_MAX_CONNECTIONS", "32")];

/// Cases for every flavour of queues.
const EVERYWHERE: &[&[Case<Fixture>]] = &[operations::CASES, descriptors::CASES, failures::CASES];
/// Cases for which that does not matter.
const ONCE: &[&[Case<Fixture>]] = &[refusals::ONCE, pressure::ONCE, processes::ONCE, storm::ONCE];

fn collect(suite: &mut Collector) {
    add(suite, Backend::Sim);
    if suite.backend("cuda", warpwire::mem::cuda::devices()).is_some() {
        add(suite, Backend::Cuda);
        // All cases share the process's one CUDA context, in which some calls wait for all streams.
        suite.run_serially();
    }
}

fn add(suite: &mut Collector, backend: Backend) {
    let most = if suite.effort() == Effort::Quick { 1 } else { VARIANTS.len() };
    for (index, variant) in VARIANTS.into_iter().take(most).enumerate() {
        // What a CUDA device can do is not ours to say.
        if backend == Backend::Cuda && !variant.nor {
            continue;
        }
        let once = if index == 0 { ONCE } else { &[] };
        for cases in EVERYWHERE.iter().chain(once) {
            suite.add(&format!("{backend}::{}", variant.name), cases, move |case| {
                let fixture = Fixture::new(backend, variant);
                (case.run)(&fixture);
                fixture.check_nothing_left();
            });
        }
    }
}
