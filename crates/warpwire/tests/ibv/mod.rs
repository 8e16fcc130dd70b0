//! RDMA devices through libibverbs: every operation between two queue pairs of one device, and what goes wrong.
//!
//! `tools/rxe-lab test` runs this in a guest, on Linux's soft-RoCE. Elsewhere it runs on the device that
//! `WARPWIRE_IBV_DEVICE` names, and without one says that it does not run. `ibv peer DEVICE` does what the cases of
//! `tests/rxe` ask for, one verb per line.
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
        _ => panic!("no role is called {words:?}"),
    }
}

fn collect(suite: &mut Collector) {
    let device = std::env::var(testbed::DEVICE).map_err(|_| {
        format!(
            "`tools/rxe-lab test` runs it in a guest; elsewhere {} names a device",
            testbed::DEVICE
        )
    });
    if suite.backend("ibv", device).is_none() {
        return;
    }
    // Some cases change the machine's settings for a moment.
    suite.run_serially();
    for (group, cases) in CASES {
        suite.add(group, cases, |case| {
            let start = std::time::Instant::now();
            (case.run)(&());
            eprint!("{:.1} s ", start.elapsed().as_secs_f64());
        });
    }
}
