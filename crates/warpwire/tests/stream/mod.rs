//! Stream-ordered verbs on every backend and every variant of queues.
//!
//! Cases run on the simulated GPU, and on CUDA if available. Without CUDA a line
//! `skipped: <reason>` is printed; `WARPWIRE_REQUIRE=cuda` turns that into a failure.
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

/// Number of hardware queues that CUDA streams share; the default is 8. A stream that waits blocks
/// those that share its queue. CUDA reads the variable when it starts.
const QUEUES: &[(&str, &str)] = &[("CUDA_DEVICE_MAX_CONNECTIONS", "32")];

/// Cases that run with every variant.
const EVERYWHERE: &[&[Case<Fixture>]] = &[operations::CASES, descriptors::CASES, failures::CASES];
/// Cases that do not depend on the variant; they run with the first one.
const ONCE: &[&[Case<Fixture>]] = &[refusals::ONCE, pressure::ONCE, processes::ONCE, storm::ONCE];

fn collect(suite: &mut Collector) {
    add(suite, Backend::Sim);
    if suite.backend("cuda", warpwire::mem::cuda::devices()).is_some() {
        add(suite, Backend::Cuda);
        // All cases share the one CUDA context of the process, in which some calls wait for all
        // streams.
        suite.run_serially();
    }
}

fn add(suite: &mut Collector, backend: Backend) {
    let count = if suite.effort() == Effort::Quick { 1 } else { VARIANTS.len() };
    for (index, variant) in VARIANTS.into_iter().take(count).enumerate() {
        // The capabilities of a CUDA device cannot be configured.
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
