//! Verbs conformance: one suite for every link of the software HCA, and for RDMA devices of the
//! machine.
//!
//! Each case runs over every available link. A missing link prints `skipped: why`, or fails if
//! `WARPWIRE_REQUIRE` names it. Cases that only concern the device run over the loopback link.
mod bad_responses;
mod chaos;
mod datagrams;
mod device_direct;
mod devices;
mod direct;
mod engines;
mod events;
mod failures;
pub mod fixture;
mod garbage;
mod long_payloads;
mod mixtures;
mod operations;
mod peer_process;
mod processes;
mod queues;
mod refusals;
mod scale;
mod staged;
mod states;
mod timing;
mod unreliable;
mod windows;

use testkit::{Case, Collector, Effort, Suite};

use fixture::{Fixture, TestLink};

pub const SUITE: Suite = Suite { name: "verbs", env: &[], collect, role };

/// Cases that run over every link.
const EVERYWHERE: &[&[Case<Fixture>]] = &[
    operations::CASES,
    long_payloads::CASES,
    direct::CASES,
    device_direct::CASES,
    failures::CASES,
    queues::CASES,
    events::CASES,
    scale::CASES,
    chaos::CASES,
    mixtures::CASES,
    datagrams::CASES,
    unreliable::CASES,
    windows::CASES,
    bad_responses::CASES,
];
/// Cases whose peer is another process.
const BETWEEN_PROCESSES: &[&[Case<Fixture>]] = &[processes::CASES, peer_process::CASES];
/// Cases of [`EVERYWHERE`] that also run on devices with several engines. The others address a
/// device by its first engine's port, or by shared memory.
const ON_ENGINES: &[&[Case<Fixture>]] = &[
    operations::CASES,
    long_payloads::CASES,
    failures::CASES,
    queues::CASES,
    events::CASES,
    scale::CASES,
    chaos::CASES,
    mixtures::CASES,
];
/// Cases that do not depend on the link.
const ONCE: &[&[Case<Fixture>]] = &[
    failures::ONCE,
    queues::ONCE,
    events::ONCE,
    states::ONCE,
    timing::ONCE,
    scale::ONCE,
    chaos::ONCE,
    mixtures::ONCE,
    garbage::ONCE,
    datagrams::ONCE,
    unreliable::ONCE,
    windows::ONCE,
    peer_process::ONCE,
    refusals::ONCE,
];

/// Cases that do not depend on the link and also run on an RDMA device of the machine.
const ON_DEVICES: &[&[Case<Fixture>]] = &[
    devices::CASES,
    staged::CASES,
    refusals::CASES,
    failures::ONCE,
    queues::ONCE,
    events::ONCE,
    states::ONCE,
];

/// Cases that an RDMA device of the machine cannot run, by reason.
const NOT_ON_DEVICES: &[(&str, &[&str])] = &[
    (
        "libibverbs has no such operation",
        &[
            "masked_atomics",
            "local_work",
            "waiting_for_another_queue",
            "waits_and_late_wqes_on_a_thread",
            "a_failure_flushes_in_order",
        ],
    ),
    ("the limits are those of the device", &["inline_up_to_the_limit", "invalid_sizes"]),
    (
        "the provider rejects such work requests when they are posted",
        &["responses_that_do_not_fit", "atomics_that_are_not_aligned"],
    ),
    (
        "only the provider fills and reads a device's queues",
        &[
            "wqes_of_other_writers",
            "only_the_first_error",
            "a_polled_doorbell_is_noticed",
            "ignored_overruns",
            "a_collapsed_queue",
            "queues_in_device_memory",
        ],
    ),
    (
        "a device counts neither dropped packets nor packets per queue pair",
        &[
            "strangers_are_dropped",
            "wrong_qkeys_are_dropped",
            "undeliverable_datagrams_are_counted",
            "beside_connections",
            "a_failure_in_the_middle_of_a_message",
            "a_shared_receive_in_use",
            "a_shared_receive_queue",
            "a_peer_that_vanishes",
            "messages_without_receive_or_right_are_lost",
            "messages_over_a_bad_network",
            "a_peer_that_does_not_drain",
        ],
    ),
    (
        "memory windows are those of the software HCA",
        &[
            "windows_of_every_memory",
            "a_peer_invalidates_a_window",
            "windows_of_unreliable_connections",
        ],
    ),
    ("rxe sends datagrams longer than its MTU", &["longer_than_a_packet"]),
    (
        "rxe reports no such async events",
        &[
            "limits_of_shared_receives",
            "last_wqe_reached_is_reported",
            "an_overrun_fails_its_users",
            "the_queue_is_drained",
        ],
    ),
    ("rxe does not flush work posted in ERR", &["work_before_rts"]),
    (
        "a device's registration pins its memory until deregistration",
        &["freed_memory_under_a_registration", "registrations_that_end_under_traffic"],
    ),
    ("the driver decides which attributes it accepts", &["attributes_of_other_transitions"]),
    (
        "it measures wake-up times of the software HCA, and these processors are emulated",
        &["a_poller_that_goes_to_sleep_is_served_soon"],
    ),
    (
        "16-bit counters are specific to mlx5, and wrapping them takes long on emulated processors",
        &[
            "indices_wrap_at_sixteen_bits",
            "receive_counters_wrap_at_sixteen_bits",
            "a_thousand_queue_pairs",
        ],
    ),
];

/// Why a case cannot run on an RDMA device of the machine, if it cannot.
fn not_on_devices(name: &str) -> Option<&'static str> {
    NOT_ON_DEVICES.iter().find(|(_, names)| names.contains(&name)).map(|(why, _)| *why)
}

/// Entry point of child processes: the first word names the role, the rest are its arguments.
fn role(words: &str) {
    let (kind, words) = words.split_once(' ').unwrap_or((words, ""));
    match kind {
        "peer" => processes::run_role(words),
        "writer" => peer_process::run(words),
        "try" => refusals::run(words),
        other => panic!("unknown role {other:?}"),
    }
}

fn collect(suite: &mut Collector) {
    fixture::enter_netns();
    for (test_link, name) in TestLink::all() {
        let several = test_link == TestLink::Udp4Engines;
        let quick = test_link == TestLink::Loopback || test_link.has_device();
        if suite.effort() == Effort::Quick && !quick && !several {
            continue;
        }
        if suite.backend(name, test_link.missing().map_or(Ok(()), Err)).is_none() {
            continue;
        }
        let special = match test_link {
            TestLink::Loopback => ONCE,
            test_link if test_link.has_device() => {
                suite.run_serially(); // there is only one RoCE port
                ON_DEVICES
            }
            _ => BETWEEN_PROCESSES,
        };
        let (cases, special) = match (several, suite.effort()) {
            (true, Effort::Quick) => (&[][..], &[engines::CASES][..]),
            (true, _) => (ON_ENGINES, &[engines::CASES][..]),
            (false, _) => (EVERYWHERE, special),
        };
        for cases in cases.iter().chain(special) {
            // Direct access between peers of one machine does not concern RDMA devices.
            let first = cases[0].name;
            let direct = first == direct::CASES[0].name || first == device_direct::CASES[0].name;
            if test_link.has_device() && direct {
                continue;
            }
            suite.add(name, cases, move |case| run(name, case, test_link));
        }
    }
}

/// Runs a case, unless it cannot run on this backend.
fn run(backend: &str, case: &Case<Fixture>, test_link: TestLink) {
    let start = std::time::Instant::now();
    let two_testbeds =
        matches!(case.name, "receiver_not_ready" | "fallback_and_engine_threads_move_bytes");
    if two_testbeds && test_link.has_device() && test_link != TestLink::Device {
        testkit::skip("it opens two testbeds, and there is only one port 4791");
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
