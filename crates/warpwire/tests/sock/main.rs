//! One suite of sockets for every way to call them.
//!
//! Each case runs with puppets on the simulated GPU (its receive rings behind a window, then in pinned memory), with the
//! header compiled as C++ for threads where there is a compiler, and with the header as CUDA where there is a GPU.
//! What is absent prints `skipped: why`, and `WARPWIRE_REQUIRE=cuda` makes it a failure.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod control;
mod datagrams;
mod ends;
mod keys;
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

use world::{Case, Way, World};

fn main() -> ExitCode {
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
        scale::CASES,
        warp::CASES,
        keys::CASES,
        similar::CASES,
    ];
    let trial = |way: Way, case: &'static Case| {
        Trial::test(format!("{way}::{}", case.name), move || {
            (case.run)(&World::new(way));
            Ok(())
        })
    };
    let cases = || rooms.iter().flat_map(|room| room.iter());
    let trials = ways.into_iter().flat_map(|way| cases().map(move |case| trial(way, case)));
    libtest_mimic::run(&arguments, trials.collect()).exit_code()
}
