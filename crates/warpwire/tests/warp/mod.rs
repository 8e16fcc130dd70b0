//! One suite of CPU programs' sockets of the family `warp`, over every link.
mod ends;
mod meeting;
mod readiness;
mod streams;
mod world;

use testkit::{Case, Collector, Effort, Suite};

use world::{Way, World};

pub const SUITE: Suite = Suite { name: "warp", env: &[], collect, role: ends::play };

const CASES: &[&[Case<World>]] = &[streams::CASES, ends::CASES, readiness::CASES, meeting::CASES];

fn collect(suite: &mut Collector) {
    for way in Way::ALL {
        if suite.effort() == Effort::Quick && way != Way::Shm {
            continue;
        }
        for cases in CASES {
            suite.add(&format!("{way:?}"), cases, move |case| (case.run)(&World::new(way)));
        }
    }
}
