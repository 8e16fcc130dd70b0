//! One suite of sockets for every way to call them.
//!
//! Each case runs for both families, with peers of the same in this process; and with puppets on the simulated GPU (its receive rings behind a window, then in pinned memory), with the
//! header compiled as C++ for threads where there is a compiler, and with the header as CUDA where there is a GPU.
//! What is absent prints `skipped: why`, and `WARPWIRE_REQUIRE=cuda` makes it a failure.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod control;
mod datagrams;
mod ends;
mod gpunet;
mod keys;
mod killed;
mod mail;
mod peer;
mod polling;
mod puppet;
mod scale;
mod similar;
mod spans;
mod streams;
mod warp;
mod world;

use std::process::ExitCode;

use libtest_mimic::{Arguments, Trial};

use peer::Family;
use world::{Case, Way, World};

fn main() -> ExitCode {
    if let Some(role) = std::env::var_os(killed::ROLE) {
        killed::play(&role.to_string_lossy());
        return ExitCode::SUCCESS;
    }
    let mut arguments = Arguments::from_args();
    let mut ways = vec![Way::Sim, Way::SimPinned];
    match world::compile_for_threads() {
        Ok(()) => ways.push(Way::Threads),
        Err(why) => eprintln!("skipped: the header as C++ ({why})"),
    }
    match warpwire::mem::cuda::devices() {
        Ok(_) => {
            ways.extend([Way::Cuda, Way::CudaPinned]);
            // All cases share the process's one context, in which some calls wait for all streams.
            arguments.test_threads = Some(1);
        }
        Err(error) => {
            eprintln!("skipped: {}", error.reason());
            let list = std::env::var("WARPWIRE_REQUIRE").unwrap_or_default();
            if list.split(',').any(|name| name.trim() == "cuda") {
                eprintln!("failed: WARPWIRE_REQUIRE asks for cuda");
                return ExitCode::FAILURE;
            }
        }
    }
    let rooms = [
        control::CASES,
        streams::CASES,
        datagrams::CASES,
        polling::CASES,
        spans::CASES,
        ends::CASES,
        gpunet::CASES,
        killed::CASES,
        scale::CASES,
        keys::CASES,
        similar::CASES,
    ];
    let of_warp = [
        control::CASES,
        streams::CASES,
        datagrams::CASES,
        mail::CASES,
        polling::CASES,
        spans::CASES,
        ends::CASES,
        gpunet::CASES,
        killed::CASES,
        scale::CASES,
        warp::CASES,
        killed::of_warp::CASES,
    ];
    let trial = |way: Way, family: Family, case: &'static Case| {
        let name = match family {
            Family::Inet => format!("{way}::{}", case.name),
            Family::Warp => format!("{way}::warp::{}", case.name),
        };
        Trial::test(name, move || {
            (case.run)(&World::new(way, family));
            Ok(())
        })
    };
    let mut trials = Vec::new();
    for way in ways {
        trials.extend(rooms.iter().copied().flatten().map(|case| trial(way, Family::Inet, case)));
        let warp = of_warp.iter().copied().flatten();
        trials.extend(warp.map(|case| trial(way, Family::Warp, case)));
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}
