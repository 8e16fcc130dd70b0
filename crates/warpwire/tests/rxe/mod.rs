//! Interoperability of the software HCA with Linux's soft-RoCE (rxe): every operation, in both
//! roles.
//!
//! `tools/rxe-lab test` boots the guest and runs this suite where the guest is reachable; otherwise
//! the suite is skipped. In the guest, `tools/rxe/verbs-peer.c` executes verbs for the cases. Each
//! case leaves a capture, which `tools/rxe/wire.py` checks.
mod failures;
mod faults;
mod ibv;
mod lab;
mod operations;
mod peer;
mod perftest;
mod pingpong;
mod queues;
mod testbed;

use testkit::{Case, Collector, Effort, Suite};

use lab::{Bench, Family, Lab};

pub const SUITE: Suite = Suite { name: "rxe", env: &[], collect, role: |_| {} };

const CASES: &[&[Case<Bench>]] = &[
    operations::CASES,
    queues::CASES,
    failures::CASES,
    faults::CASES,
    pingpong::CASES,
    perftest::CASES,
];

fn collect(suite: &mut Collector) {
    let Some(lab) = Lab::from_env() else {
        // `tools/rxe-lab` decides whether the suite is required.
        return eprintln!("skipped: rxe (`tools/rxe-lab test` runs these cases against a guest)");
    };
    // There is only one RoCE port and one guest.
    suite.run_serially();
    let lab: &'static Lab = Box::leak(Box::new(lab));
    let run = |family, prefix: &'static str, peer| {
        move |case: &'static Case<Bench>| {
            let start = std::time::Instant::now();
            let name = format!("{prefix}::{}", case.name);
            (case.run)(&Bench { peer, ..lab.bench(family, name) });
            eprint!("{:.1} s ", start.elapsed().as_secs_f64());
        }
    };
    for (family, name) in [(Family::V4, "ipv4"), (Family::V6, "ipv6")] {
        // IPv6 packets differ in their headers only: below full effort, the operations suffice.
        let core = suite.effort() < Effort::Full && family == Family::V6;
        for cases in if core { &CASES[..1] } else { CASES } {
            suite.add(name, cases, run(family, name, "/job/verbs-peer rxe0"));
        }
    }
    suite.add("ibv", ibv::CASES, run(Family::V4, "ibv", ""));
    for case in ibv::both_ways() {
        let peer = "env WARPWIRE_TEST_ROLE=\"ibv peer rxe0\" /job/suites";
        suite.add("ibv", std::slice::from_ref(case), run(Family::V4, "ibv", peer));
    }
}
