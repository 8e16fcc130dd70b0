//! The verbs: one suite for every link of the software HCA, and for RDMA devices of the machine.
//!
//! Each case runs over each link that is there; where one is absent, a line `skipped: why` is printed, and
//! `WARPWIRE_REQUIRE` with the link's name in it makes it a failure. Cases that are about the device alone run over
//! the loopback link only.
mod bad_responses;
mod chaos;
mod datagrams;
mod devices;
mod direct;
mod events;
mod failures;
pub mod fixture;
mod garbage;
mod mixtures;
mod operations;
mod peer_process;
mod processes;
mod queues;
mod refusals;
mod scale;
mod staged;
mod states;
mod zero_copy;

use testkit::{Case, Collector, Effort, Suite};

use fixture::{Fixture, TestLink};

pub const SUITE: Suite = Suite { name: "verbs", env: &[], collect, role };

/// Cases that every link runs.
const EVERYWHERE: &[&[Case<Fixture>]] = &[
    operations::CASES,
    zero_copy::CASES,
    direct::CASES,
    failures::CASES,
    queues::CASES,
    events::CASES,
    scale::CASES,
    chaos::CASES,
    mixtures::CASES,
    datagrams::CASES,
    bad_responses::CASES,
];
/// Cases with a process on either side.
const BETWEEN_PROCESSES: &[&[Case<Fixture>]] = &[processes::CASES, peer_process::CASES];
/// Cases for which the link does not matter.
const ONCE: &[&[Case<Fixture>]] = &[
    failures::ONCE,
    queues::ONCE,
    events::ONCE,
    states::ONCE,
    scale::ONCE,
    chaos::ONCE,
    mixtures::ONCE,
    garbage::ONCE,
    datagrams::ONCE,
    peer_process::ONCE,
    refusals::ONCE,
];

/// Cases for which the link does not matter, and that a device of the machine can run too.
const ON_DEVICES: &[&[Case<Fixture>]] = &[
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

/// What a process of this suite does, by the first of its words.
fn role(words: &str) {
    let (kind, words) = words.split_once(' ').unwrap_or((words, ""));
    match kind {
        "peer" => processes::run_role(words),
        "apart" => peer_process::run(words),
        "try" => refusals::run(words),
        other => panic!("no role is called {other:?}"),
    }
}

fn collect(suite: &mut Collector) {
    fixture::enter_netns();
    for (test_link, name) in TestLink::all() {
        let quick = test_link == TestLink::Loopback || test_link.has_device();
        if suite.effort() == Effort::Quick && !quick {
            continue;
        }
        if suite.backend(name, test_link.missing().map_or(Ok(()), Err)).is_none() {
            continue;
        }
        let special = match test_link {
            TestLink::Loopback => ONCE,
            test_link if test_link.has_device() => {
                suite.run_serially(); // there is one RoCE port
                ON_DEVICES
            }
            _ => BETWEEN_PROCESSES,
        };
        for cases in EVERYWHERE.iter().chain(special) {
            // How peers of one machine do without packets is no affair of devices.
            if test_link.has_device() && cases[0].name == direct::CASES[0].name {
                continue;
            }
            suite.add(name, cases, move |case| run(name, case, test_link));
        }
    }
}

/// Runs a case, unless it cannot run on this backend.
fn run(backend: &str, case: &Case<Fixture>, test_link: TestLink) {
    let start = std::time::Instant::now();
    let two_testbeds = matches!(case.name, "nobody_is_ready" | "guards_and_threads_move_bytes");
    if two_testbeds && test_link.has_device() && test_link != TestLink::Device {
        testkit::skip("it opens two worlds, and there is one port 4791");
    }
    if let Some(why) = not_on_devices(case.name).filter(|_| test_link.has_device()) {
        testkit::skip(why);
    }
    let run = std::panic::AssertUnwindSafe(|| (case.run)(&Fixture::new(test_link)));
    let ended = std::panic::catch_unwind(run);
    let failed = ended.as_ref().is_err_and(|payload| !testkit::is_skip(payload.as_ref()));
    fixture::end_recording(&format!("{backend}::{}", case.name), failed);
    if let Err(payload) = ended {
        std::panic::resume_unwind(payload);
    }
    if test_link.has_device() {
        eprint!("{:.1} s ", start.elapsed().as_secs_f64());
    }
}
