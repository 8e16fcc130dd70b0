//! Queue pairs for kernels: calls from inside kernels, and from streams, over the software HCA.
//!
//! Each case runs on the simulated GPU, and on CUDA if there is a GPU; otherwise a line `skipped:
//! why` is printed, and `WARPWIRE_REQUIRE=cuda` makes that a failure. `cpu` runs the header's code
//! on CPU threads.
mod calls;
mod cpu;
mod device_calls;
mod direct;
mod fixture;
mod processes;
mod refusals;
mod streams;

use testkit::{Case, Collector, Effort, Suite};
use warpwire::mem::Backend;

use crate::ptx;
use fixture::{Fixture, TestLink};

pub const SUITE: Suite = Suite { name: "kernels", env: &[], collect, role: processes::run_role };

const CASES: &[&[Case<Fixture>]] =
    &[device_calls::CASES, direct::CASES, streams::CASES, refusals::CASES];

fn collect(suite: &mut Collector) {
    if suite.effort() > Effort::Quick {
        cpu::collect(suite);
    }
    add(suite, Backend::Sim);
    if suite.backend("cuda", ptx::cuda_with(&[calls::PTX])).is_some() {
        add(suite, Backend::Cuda);
        // All cases share the process's one CUDA context: see the conformance suite.
        suite.run_serially();
    }
}

fn add(suite: &mut Collector, backend: Backend) {
    for (test_link, link) in TestLink::ALL {
        if suite.effort() == Effort::Quick && test_link != TestLink::Loopback {
            continue;
        }
        // Two processes map memory over shared memory only.
        let processes = (test_link == TestLink::Shm).then_some(processes::CASES);
        for cases in CASES.iter().copied().chain(processes) {
            suite.add(&format!("{backend}::{link}"), cases, move |case| {
                (case.run)(&Fixture::new(backend, test_link));
            });
        }
    }
}
