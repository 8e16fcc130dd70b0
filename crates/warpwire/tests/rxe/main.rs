//! The software HCA against Linux's soft-RoCE, which we did not write: every operation, in both roles.
//!
//! `tools/rxe-lab test` boots the guest and runs this there where the guest can be reached; run by itself it has
//! nothing to talk to, and says so. In the guest, `tools/rxe/verbs-peer.c` does what a case asks for, verb by verb.
//! Each case leaves a capture, which the laboratory judges.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod failures;
mod faults;
mod ibv;
mod lab;
mod operations;
mod peer;
mod perftest;
mod pingpong;
mod queues;
mod world;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

use lab::{Bench, Case, Family, Lab};

const CASES: &[&[Case]] = &[
    operations::CASES,
    queues::CASES,
    failures::CASES,
    faults::CASES,
    pingpong::CASES,
    perftest::CASES,
];

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    let Some(lab) = Lab::from_env() else {
        // The laboratory knows whether it must be there; here it never is.
        eprintln!("skipped: rxe (`tools/rxe-lab test` runs these cases against a guest)");
        return ExitCode::SUCCESS;
    };
    // There is one RoCE port, and one guest.
    arguments.test_threads = Some(1);
    let lab: &'static Lab = Box::leak(Box::new(lab));
    let mut trials = Vec::new();
    let mut add = |family, prefix: &str, case: &'static Case, peer| {
        let name = format!("{prefix}::{}", case.name);
        trials.push(Trial::test(name.clone(), move || {
            let start = std::time::Instant::now();
            (case.run)(&Bench { peer, ..lab.bench(family, name) });
            eprint!("{:.1} s ", start.elapsed().as_secs_f64());
            Ok(())
        }));
    };
    for (family, name) in [(Family::V4, "ipv4"), (Family::V6, "ipv6")] {
        for case in CASES.iter().flat_map(|room| room.iter()) {
            add(family, name, case, "/job/verbs-peer");
        }
    }
    for case in ibv::CASES {
        add(Family::V4, "ibv", case, "");
    }
    for case in ibv::both_ways() {
        add(Family::V4, "ibv", case, "/job/ibv-suite peer");
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}
