//! Feeds each fuzz target its seeds, and mutations of these: without libFuzzer, in every build.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

use std::panic::{catch_unwind, resume_unwind};
use std::process::ExitCode;

use testkit::{Collector, Effort, Rng, Suite, cases, for_each_seed};
use warpwire_fuzz as targets;

cases!(CASES: wire, qp, handshake, metadata, queues, verbs);

fn main() -> ExitCode {
    let collect = |collector: &mut Collector| collector.add("", CASES, |case| (case.run)(&()));
    let role = |_: &str| panic!("no roles");
    testkit::run(&[Suite { name: "fuzz", env: &[("WARPWIRE_IB_DEVICES", "lo")], collect, role }])
}

fn wire() {
    replay("wire", targets::wire::run, [1000, 10_000, 100_000]);
}

fn qp() {
    replay("qp", targets::qp::run, [1000, 10_000, 100_000]);
}

fn handshake() {
    replay("handshake", targets::handshake::run, [1000, 10_000, 100_000]);
}

fn metadata() {
    replay("metadata", targets::metadata::run, [1000, 10_000, 100_000]);
}

fn queues() {
    replay("queues", targets::queues::run, [100, 1000, 10_000]);
}

fn verbs() {
    replay("verbs", targets::verbs::run, [100, 1000, 10_000]);
}

/// Runs the inputs of `seeds/TARGET.txt`, then mutations of these: as many as the effort says.
fn replay(target: &str, run: fn(&[u8]), mutations: [u64; 3]) {
    let seeds = seeds(target);
    assert!(!seeds.is_empty(), "seeds/{target}.txt has no inputs");
    seeds.iter().for_each(|seed| run_one(target, run, seed));
    for_each_seed(0..Effort::choose(mutations), |number| {
        run_one(target, run, &mutation(&seeds, &mut Rng::new(number)));
    });
}

/// One input a line, in hexadecimal, perhaps with spaces; `#` begins a comment.
fn seeds(target: &str) -> Vec<Vec<u8>> {
    let path = format!("{}/seeds/{target}.txt", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let inputs = text.lines().filter(|line| !line.trim().is_empty() && !line.starts_with('#'));
    inputs.map(decode).collect()
}

fn decode(line: &str) -> Vec<u8> {
    let digits: String = line.split_whitespace().collect();
    assert!(digits.len().is_multiple_of(2), "half a byte: {line}");
    let byte = |at: usize| u8::from_str_radix(&digits[at..at + 2], 16);
    (0..digits.len()).step_by(2).map(|at| byte(at).expect("hexadecimal digits")).collect()
}

/// A seed with one to four changes: a byte, a bit, an end that is cut off, a piece of another seed.
fn mutation(seeds: &[Vec<u8>], rng: &mut Rng) -> Vec<u8> {
    let any = |rng: &mut Rng| &seeds[rng.below(seeds.len() as u64) as usize];
    let mut input = any(rng).clone();
    for _ in 0..=rng.below(4) {
        let at = rng.below(input.len() as u64) as usize;
        match (rng.below(8), input.get_mut(at)) {
            (0..4, Some(byte)) => *byte = rng.next_u64() as u8,
            (4 | 5, Some(byte)) => *byte ^= 1 << rng.below(8),
            (6, Some(_)) => input.truncate(at),
            _ => {
                let other = any(rng);
                let from = rng.below(other.len() as u64) as usize;
                input.splice(at..at, other[from..].iter().copied().take(64));
            }
        }
    }
    input
}

/// Runs one input, and prints it if the target panics.
fn run_one(target: &str, run: fn(&[u8]), input: &[u8]) {
    if let Err(payload) = catch_unwind(|| run(input)) {
        let digits: String = input.iter().map(|byte| format!("{byte:02x}")).collect();
        eprintln!("{target} failed with this input, a line for fuzz/seeds/{target}.txt: {digits}");
        resume_unwind(payload);
    }
}
