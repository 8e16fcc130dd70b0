//! RDMA devices through libibverbs: every operation between two queue pairs of one device, and
//! failures.
//!
//! `tools/rxe-lab test` runs this suite in a guest, on Linux's soft-RoCE (rxe). Elsewhere it runs
//! on the device that `WARPWIRE_IBV_DEVICE` names, and is skipped without one. The role
//! `ibv peer DEVICE` executes verbs for the cases of `tests/rxe`, one per line.
mod allocations;
mod datagrams;
mod failures;
mod operations;
mod peer;
mod queues;
mod setup;
mod testbed;

use testkit::{Case, Collector, Suite};

pub const SUITE: Suite = Suite { name: "ibv", env: &[], collect, role };

const CASES: &[(&str, &[Case<()>])] = &[
    ("setup", setup::CASES),
    ("operations", operations::CASES),
    ("allocations", allocations::CASES),
    ("queues", queues::CASES),
    ("datagrams", datagrams::CASES),
    ("failures", failures::CASES),
];

fn role(words: &str) {
    let words: Vec<&str> = words.split(' ').collect();
    match words[..] {
        ["peer", device] => peer::serve(device),
        ["try", ref arguments @ ..] => setup::try_as_this_user(arguments),
        _ => panic!("unknown role {words:?}"),
    }
}

fn collect(suite: &mut Collector) {
    let device = std::env::var(testbed::DEVICE).map_err(|_| {
        format!(
            "`tools/rxe-lab test` runs it in a guest; elsewhere set {} to a device",
            testbed::DEVICE
        )
    });
    if suite.backend("ibv", device).is_none() {
        return;
    }
    // Some cases temporarily change settings of the machine.
    suite.run_serially();
    for (group, cases) in CASES {
        suite.add(group, cases, |case| {
            let start = std::time::Instant::now();
            (case.run)(&());
            eprint!("{:.1} s ", start.elapsed().as_secs_f64());
        });
    }
}
