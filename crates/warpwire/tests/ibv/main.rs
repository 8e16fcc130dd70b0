//! RDMA devices through libibverbs: every operation between two queue pairs of one device, and what goes wrong.
//!
//! `tools/rxe-lab test` runs this in a guest, on Linux's soft-RoCE. Elsewhere it runs on the device that
//! `WARPWIRE_IBV_DEVICE` names, and without one says that it does not run. `ibv peer DEVICE` does what the cases of
//! `tests/rxe` ask for, one verb per line.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod allocations;
mod datagrams;
mod failures;
mod operations;
mod peer;
mod queues;
mod setup;
mod world;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

pub struct Case {
    pub name: &'static str,
    pub run: fn(),
}

/// Lists the functions as cases under their own names.
macro_rules! cases {
    ($($name:ident),* $(,)?) => {
        pub const CASES: &[crate::Case] =
            &[$(crate::Case { name: stringify!($name), run: $name }),*];
    };
}
pub(crate) use cases;

const ROOMS: &[(&str, &[Case])] = &[
    ("setup", setup::CASES),
    ("operations", operations::CASES),
    ("allocations", allocations::CASES),
    ("queues", queues::CASES),
    ("datagrams", datagrams::CASES),
    ("failures", failures::CASES),
];

fn main() -> ExitCode {
    let given: Vec<String> = std::env::args().collect();
    match given.get(1).map(String::as_str) {
        Some("peer") => return peer::serve(given.get(2).map_or("rxe0", String::as_str)),
        Some("try") => return setup::try_as_this_user(&given[2..]),
        _ => {}
    }
    let mut arguments = Arguments::from_args();
    if std::env::var_os(world::DEVICE).is_none() {
        eprintln!(
            "skipped: ibv (`tools/rxe-lab test` runs these cases in a guest; elsewhere {} names a device)",
            world::DEVICE
        );
        return ExitCode::SUCCESS;
    }
    // Some cases change the machine's settings for a moment.
    arguments.test_threads = Some(1);
    let mut trials = Vec::new();
    for (room, cases) in ROOMS {
        for case in *cases {
            trials.push(Trial::test(format!("{room}::{}", case.name), || {
                let start = std::time::Instant::now();
                (case.run)();
                eprint!("{:.1} s ", start.elapsed().as_secs_f64());
                Ok(())
            }));
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}
