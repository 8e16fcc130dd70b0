//! Tests of the built command.

// Test helpers may panic; clippy allows that only in functions marked as tests.
#![allow(clippy::unwrap_used)]

mod cli;
mod copy;
mod devices;
mod doc_pages;
mod examples;
mod nccl;
mod ordered;
mod perf;
mod pingpong;
mod report;
mod run;
mod sock;
mod verbs;

use std::process::{Command, Output};

/// The command, without the environment variables that would change its behaviour.
fn warpwire() -> Command {
    const PREFIXES: [&str; 9] = [
        "WARPWIRE_",
        "RANK",
        "WORLD_SIZE",
        "OMPI_",
        "PMI_",
        "SLURM_",
        "MASTER_",
        "NO_COLOR",
        "COLUMNS",
    ];
    let mut command = Command::new(env!("CARGO_BIN_EXE_warpwire"));
    for (variable, _) in std::env::vars_os() {
        let name = variable.to_string_lossy();
        if PREFIXES.iter().any(|prefix| name.starts_with(prefix)) {
            command.env_remove(variable);
        }
    }
    command
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}
