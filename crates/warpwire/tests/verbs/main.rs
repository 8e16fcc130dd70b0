//! The verbs: one suite for every link of the software HCA, and for RDMA devices of the machine.
//!
//! Each case runs over each link that is there; where one is absent, a line `skipped: why` is printed, and
//! `WARPWIRE_REQUIRE` with the link's name in it makes it a failure. Cases that are about the device alone run over
//! the loopback link only.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod apart;
mod chaos;
mod datagrams;
mod devices;
mod direct;
mod events;
mod failures;
mod fixture;
mod garbage;
mod lent;
mod mixtures;
mod operations;
mod processes;
mod queues;
mod refusals;
mod scale;
mod staged;
mod states;
mod strange;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

use fixture::{Case, Fixture, Which};

/// Cases that every link runs.
const EVERYWHERE: &[&[Case]] = &[
    operations::CASES,
    lent::CASES,
    direct::CASES,
    failures::CASES,
    queues::CASES,
    events::CASES,
    scale::CASES,
    chaos::CASES,
    mixtures::CASES,
    datagrams::CASES,
    strange::CASES,
];
/// Cases with a process on either side.
const BETWEEN_PROCESSES: &[&[Case]] = &[processes::CASES, apart::CASES];
/// Cases for which the link does not matter.
const ONCE: &[&[Case]] = &[
    failures::ONCE,
    queues::ONCE,
    events::ONCE,
    states::ONCE,
    scale::ONCE,
    chaos::ONCE,
    mixtures::ONCE,
    garbage::ONCE,
    datagrams::ONCE,
    apart::ONCE,
    refusals::ONCE,
];

/// Cases for which the link does not matter, and that a device of the machine can run too.
const ON_DEVICES: &[&[Case]] = &[
    devices::CASES,
    staged::CASES,
    refusals::CASES,
    failures::ONCE,
    queues::ONCE,
    events::ONCE,
    states::ONCE,
];

/// What devices of the machine cannot be asked for, and why.
const NOT_ON_DEVICES: &[(&str, &[&str])] = &[
    (
        "libibverbs has no such work",
        &[
            "masked_atomics",
            "local_work",
            "waiting_for_another_queue",
            "waits_and_late_entries_on_a_thread",
            "a_failure_flushes_in_order",
        ],
    ),
    ("a device has limits of its own", &["inline_up_to_the_limit", "sizes_that_cannot_be"]),
    (
        "the provider refuses such work as it is posted",
        &["answers_without_a_place", "atomics_that_are_not_aligned"],
    ),
    (
        "nobody else fills or reads the queues of a device",
        &[
            "entries_of_other_writers",
            "only_the_first_error",
            "a_doorbell_that_wakes_nobody",
            "overruns_that_nobody_minds",
            "a_collapsed_queue",
            "queues_in_device_memory",
        ],
    ),
    (
        "a device does not count what it drops, nor packets of a queue pair",
        &[
            "strangers_are_dropped",
            "keys_that_do_not_fit",
            "nobody_waits_for_it",
            "beside_connections",
            "a_failure_in_the_middle_of_a_message",
            "a_shared_receive_in_use",
            "a_shared_receive_queue",
            "a_peer_that_vanishes",
        ],
    ),
    ("rxe sends datagrams that are longer than its MTU", &["longer_than_a_packet"]),
    (
        "rxe tells no such news",
        &[
            "limits_of_shared_receives",
            "the_last_receive_is_told",
            "an_overrun_fails_its_users",
            "the_queue_is_drained",
        ],
    ),
    ("rxe does not give back what was posted to it in ERR", &["work_before_its_time"]),
    (
        "the memory of a device's registration stays until it ends",
        &["freed_memory_under_a_registration", "registrations_that_end_under_traffic"],
    ),
    ("a driver has the last word about attributes", &["attributes_that_do_not_belong"]),
    (
        "it is about our own device's time, and processors are emulated there",
        &["who_polls_and_then_sleeps_is_served_soon"],
    ),
    (
        "counters of 16 bits are ConnectX's, and many rounds take long where processors are emulated",
        &[
            "indices_wrap_at_sixteen_bits",
            "receive_counters_wrap_at_sixteen_bits",
            "a_thousand_queue_pairs",
        ],
    ),
];

/// Why a case cannot run on devices of the machine, if it cannot.
fn not_on_devices(name: &str) -> Option<&'static str> {
    NOT_ON_DEVICES.iter().find(|(_, names)| names.contains(&name)).map(|(why, _)| *why)
}

fn main() -> ExitCode {
    if let Ok(words) = std::env::var(processes::VARIABLE) {
        processes::live(&words);
        return ExitCode::SUCCESS;
    }
    if let Some(ended) = apart::run_if_asked() {
        return ended;
    }
    if let Some(ended) = refusals::run_if_asked() {
        return ended;
    }
    fixture::move_beside();
    let mut arguments = Arguments::from_args();
    let mut trials = Vec::new();
    for (which, name) in Which::all() {
        if let Some(why) = which.missing() {
            // To stderr: test runners read the list of tests from stdout.
            eprintln!("skipped: {name}: {why}");
            if required(name) {
                eprintln!("failed: WARPWIRE_REQUIRE asks for {name}");
                return ExitCode::FAILURE;
            }
            continue;
        }
        let special = match which {
            Which::Loopback => ONCE,
            which if which.has_device() => {
                // There is one RoCE port.
                arguments.test_threads = Some(1);
                ON_DEVICES
            }
            _ => BETWEEN_PROCESSES,
        };
        let rooms = EVERYWHERE.iter().chain(special);
        // How peers of one machine do without packets is no affair of devices.
        let skipped = |room: &&&[Case]| which.has_device() && room[0].name == direct::CASES[0].name;
        for case in rooms.filter(|room| !skipped(room)).flat_map(|room| room.iter()) {
            let name = format!("{name}::{}", case.name);
            trials.push(Trial::test(name.clone(), move || {
                run(&name, case, which);
                Ok(())
            }));
        }
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Runs a case, unless it finds that this backend cannot.
fn run(name: &str, case: &Case, which: Which) {
    let start = std::time::Instant::now();
    let two_worlds = matches!(case.name, "nobody_is_ready" | "guards_and_threads_move_bytes");
    if two_worlds && which.has_device() && which != Which::Device {
        return eprintln!("skipped: {name}: it opens two worlds, and there is one port 4791");
    }
    if let Some(why) = not_on_devices(case.name).filter(|_| which.has_device()) {
        return eprintln!("skipped: {name}: {why}");
    }
    let run = std::panic::AssertUnwindSafe(|| (case.run)(&Fixture::new(which)));
    let ended = std::panic::catch_unwind(run);
    let failed = ended.as_ref().is_err_and(|payload| !payload.is::<fixture::Skipped>());
    fixture::end_recording(name, failed);
    let Err(payload) = ended else {
        if which.has_device() {
            eprint!("{:.1} s ", start.elapsed().as_secs_f64());
        }
        return;
    };
    match payload.downcast::<fixture::Skipped>() {
        Ok(skipped) => eprintln!("skipped: {name}: {}", skipped.0),
        Err(payload) => std::panic::resume_unwind(payload),
    }
}

fn required(link: &str) -> bool {
    let list = std::env::var("WARPWIRE_REQUIRE").unwrap_or_default();
    list.split(',').any(|name| name.trim() == link)
}
