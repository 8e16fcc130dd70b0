//! `warpwire copy sanity`: checks of CPU windows, as in gdrcopy_sanity.

mod child;
mod data;
mod lifetime;
mod processes;
mod raw;
mod table;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use warpwire::error::Kind;
use warpwire::mem::{Allocation, Device, MemoryKind};

use super::target::DeviceChoice;
use super::{Failure, Reporter};

pub(super) use child::{ChildArguments, run_child};
use table::{Case, Run};

/// Check the correctness of CPU windows
///
/// Runs a check for each behaviour that gdrcopy_sanity tests, and some more, one at a time. Checks
/// that fork, fault or kill run in child processes. A check that does not apply is waived, with the
/// reason. The exit status is 0 only if none failed.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Arguments {
    #[command(flatten)]
    device: DeviceChoice,

    /// List the checks without running them
    #[arg(short = 'l', long)]
    list: bool,

    /// Run only this check (may be repeated); a name without a kind of memory means all kinds
    #[arg(short = 't', long = "test", value_name = "NAME")]
    tests: Vec<String>,

    /// Print what each check tests, and how long it took
    #[arg(short = 'v', long)]
    verbose: bool,

    /// Print no summary
    #[arg(short = 's', long)]
    no_summary: bool,

    /// Print JSON: {"device": …, "checks": [{"name": …, "outcome": "passed", …}], "total": …, …}
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire copy sanity
  warpwire copy sanity -l                                   list the checks
  warpwire copy sanity -v -t freed_memory_stays_readable    one check, on every kind of memory
  warpwire copy sanity --json | jq '.checks[] | select(.outcome == \"failed\")'";

/// Why a check did not pass.
#[derive(Debug)]
enum CheckError {
    Failed(String),
    Waived(String),
}

impl From<warpwire::Error> for CheckError {
    fn from(error: warpwire::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

impl From<std::io::Error> for CheckError {
    fn from(error: std::io::Error) -> Self {
        Self::Failed(error.to_string())
    }
}

type CheckResult = Result<(), CheckError>;

/// Fails the check unless `right` is true.
fn ensure(right: bool, otherwise: impl FnOnce() -> String) -> CheckResult {
    if right { Ok(()) } else { Err(CheckError::Failed(otherwise())) }
}

/// The device and the kind of memory to check.
struct CheckTarget {
    device: Device,
    kind: MemoryKind,
}

impl CheckTarget {
    /// Allocates memory of the checked kind; waives the check if the device lacks it.
    fn alloc(&self, len: u64) -> Result<Allocation, CheckError> {
        self.device.alloc_kind(len, self.kind).map_err(|error| match error.kind() {
            Kind::Unsupported => CheckError::Waived(error.reason().to_owned()),
            _ => error.into(),
        })
    }
}

#[derive(Clone, Copy, PartialEq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    Passed,
    Failed,
    Waived,
}

#[derive(Serialize)]
struct Entry {
    name: String,
    outcome: Outcome,
    /// Why the check failed or was waived.
    why: Option<String>,
    milliseconds: u64,
}

#[derive(Serialize)]
struct Summary {
    device: String,
    checks: Vec<Entry>,
    total: usize,
    passed: usize,
    failed: usize,
    waived: usize,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let cases = select_cases(&arguments.tests)?;
    if arguments.list {
        let lines = cases.iter().map(|case| format!("{:<60} {}\n", case.name(), case.about));
        crate::output::print(&lines.collect::<String>()).map_err(Failure::Runtime)?;
        return Ok(ExitCode::SUCCESS);
    }
    let (device, no_cuda) = arguments.device.open()?;
    let reporter = Reporter::new(arguments.json);
    reporter.print(&format!("# copy sanity on {} ({})\n", device.label(), device.info().name))?;
    if let Some(why) = no_cuda {
        reporter.print(&format!("# no CUDA device: {why}\n"))?;
    }
    let mut checks = Vec::new();
    for case in &cases {
        let name = case.name();
        reporter.set_status(name.clone());
        reporter.print(&format!("&&&& RUNNING {name}\n"))?;
        if arguments.verbose {
            reporter.print(&format!("     {}\n", case.about))?;
        }
        let entry = run_check(case, &device);
        reporter.print(&result_line(&entry, arguments.verbose))?;
        checks.push(entry);
    }
    let count = |outcome| checks.iter().filter(|entry| entry.outcome == outcome).count();
    let (passed, failed) = (count(Outcome::Passed), count(Outcome::Failed));
    let (total, waived) = (checks.len(), count(Outcome::Waived));
    let summary = Summary { device: device.label(), checks, total, passed, failed, waived };
    if !arguments.no_summary {
        reporter.print(&summary.to_text())?;
    }
    reporter.finish(&summary)?;
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The requested checks, or all of them.
fn select_cases(tests: &[String]) -> Result<Vec<Case>, Failure> {
    let all = table::cases();
    for test in tests {
        if !all.iter().any(|case| case.has_name(test)) {
            return Err(Failure::Usage(format!(
                "there is no check {test:?}; `warpwire copy sanity -l` lists them"
            )));
        }
    }
    let wanted = |case: &Case| tests.is_empty() || tests.iter().any(|test| case.has_name(test));
    Ok(all.into_iter().filter(wanted).collect())
}

fn run_check(case: &Case, device: &Device) -> Entry {
    let start = Instant::now();
    let checked = match case.run {
        Run::InProcess(run) => run(&CheckTarget { device: device.clone(), kind: case.kind() }),
        Run::InChild(_) => child::run(case, device),
        Run::Waived(why) => Err(CheckError::Waived(why.to_owned())),
    };
    let (outcome, why) = match checked {
        Ok(()) => (Outcome::Passed, None),
        Err(CheckError::Failed(why)) => (Outcome::Failed, Some(why)),
        Err(CheckError::Waived(why)) => (Outcome::Waived, Some(why)),
    };
    let milliseconds = u64::try_from(start.elapsed().as_millis()).unwrap_or(u64::MAX);
    Entry { name: case.name(), outcome, why, milliseconds }
}

fn result_line(entry: &Entry, verbose: bool) -> String {
    let word = match entry.outcome {
        Outcome::Passed => "PASSED",
        Outcome::Failed => "FAILED",
        Outcome::Waived => "WAIVED",
    };
    let why = entry.why.as_ref().map(|why| format!(" ({why})")).unwrap_or_default();
    let took = Duration::from_millis(entry.milliseconds);
    let took = if verbose { format!(" in {took:?}") } else { String::new() };
    format!("&&&& {word} {}{took}{why}\n", entry.name)
}

impl Summary {
    fn to_text(&self) -> String {
        let Self { total, passed, failed, waived, .. } = self;
        let mut text =
            format!("\nTotal: {total}, Passed: {passed}, Failed: {failed}, Waived: {waived}\n");
        let lists = [("failed", Outcome::Failed), ("waived", Outcome::Waived)];
        for (word, outcome) in lists {
            let mut entries =
                self.checks.iter().filter(|entry| entry.outcome == outcome).peekable();
            if entries.peek().is_some() {
                text += &format!("\nList of {word} tests:\n");
            }
            for Entry { name, why, .. } in entries {
                text += &format!("    {name}: {}\n", why.as_deref().unwrap_or_default());
            }
        }
        text
    }
}
