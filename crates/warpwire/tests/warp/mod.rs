//! The suite of `warp` sockets of CPU programs, over every link.
mod ends;
mod handshake;
mod readiness;
mod streams;
mod testbed;

use testkit::{Case, Collector, Effort, Suite};

use testbed::{TestLink, Testbed};

pub const SUITE: Suite = Suite { name: "warp", env: &[], collect, role: ends::run_role };

const CASES: &[&[Case<Testbed>]] =
    &[streams::CASES, ends::CASES, readiness::CASES, handshake::CASES];

fn collect(suite: &mut Collector) {
    for test_link in TestLink::ALL {
        if suite.effort() == Effort::Quick && test_link != TestLink::Shm {
            continue;
        }
        for cases in CASES {
            suite.add(&format!("{test_link:?}"), cases, move |case| {
                (case.run)(&Testbed::new(test_link))
            });
        }
    }
}
