//! Suites: lists of cases, run on every backend that is present.

use std::fmt::Display;
use std::io::{Read, Seek, Write};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::process::{Command, ExitCode, ExitStatus};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use libtest_mimic::{Arguments, Failed, Trial};

use crate::process::Role;
use crate::requirement::{Skipped, required};
use crate::{Effort, clock};

/// Names the suite that a process runs; if unset, the process starts a child for each suite.
const ENV_VAR: &str = "WARPWIRE_TEST_SUITE";

/// One behaviour, tested on backends with a fixture of type `F`.
pub struct Case<F: 'static> {
    /// The name of the test function.
    pub name: &'static str,
    /// The minimum effort at which it runs.
    pub effort: Effort,
    /// The test; it panics on failure.
    pub run: fn(&F),
}

/// Lists functions as cases under their own names.
///
/// ```ignore
/// cases!(Fixture; CASES: writes, reads; change: a_storm; full: a_long_storm);
/// ```
///
/// defines `pub const CASES: &[Case<Fixture>]`; `cases!(CASES: a, b)` is for functions without a
/// fixture. Cases after `change:` and `full:` run from that [`Effort`] on.
#[macro_export]
macro_rules! cases {
    ($list:ident: $($name:ident),* $(,)?) => {
        pub const $list: &[$crate::Case<()>] = &[$($crate::Case {
            name: stringify!($name), effort: $crate::Effort::Quick, run: |()| $name(),
        },)*];
    };
    ($fixture:ty; $list:ident: $($quick:ident),* $(,)?
     $(; change: $($change:ident),* $(,)?)? $(; full: $($full:ident),* $(,)?)?) => {
        pub const $list: &[$crate::Case<$fixture>] = &[
            $($crate::Case {
                name: stringify!($quick), effort: $crate::Effort::Quick, run: $quick,
            },)*
            $($($crate::Case {
                name: stringify!($change), effort: $crate::Effort::Change, run: $change,
            },)*)?
            $($($crate::Case {
                name: stringify!($full), effort: $crate::Effort::Full, run: $full,
            },)*)?
        ];
    };
}

/// A group of cases that runs in a process of its own.
pub struct Suite {
    /// The first part of the names of its cases.
    pub name: &'static str,
    /// Environment variables for the process; those already set are kept.
    pub env: &'static [(&'static str, &'static str)],
    /// Detects the backends that are present, and adds the cases for each.
    pub collect: fn(&mut Collector),
    /// The entry point of a [`Role`] of this suite, with its arguments.
    pub role: fn(&str),
}

/// Collects the cases of one suite.
pub struct Collector {
    suite: &'static str,
    effort: Effort,
    trials: Vec<Trial>,
    serial: bool,
}

impl Collector {
    /// The effort of this run.
    pub fn effort(&self) -> Effort {
        self.effort
    }

    /// Runs the cases one after the other, because they share an exclusive resource.
    pub fn run_serially(&mut self) {
        self.serial = true;
    }

    /// The backend, if it is present. If not, prints why; if it is required, adds a failing case.
    pub fn backend<T>(&mut self, name: &str, found: Result<T, impl Display>) -> Option<T> {
        let why = match found {
            Ok(backend) => return Some(backend),
            Err(why) => why.to_string(),
        };
        // To stderr: test runners read the list of tests from stdout.
        eprintln!("skipped: {}: {name}: {why}", self.suite);
        if required(name) {
            let text = format!("WARPWIRE_REQUIRE lists {name}: {why}");
            let fail = move || Err(Failed::from(text));
            self.trials.push(Trial::test(format!("{}::{name}::is_present", self.suite), fail));
        }
        None
    }

    /// Adds the cases that run at this effort, named `SUITE::PREFIX::CASE`; `run` creates the
    /// fixture and calls the case.
    pub fn add<F>(
        &mut self,
        prefix: &str,
        cases: &'static [Case<F>],
        run: impl Fn(&'static Case<F>) + Clone + Send + 'static,
    ) {
        for case in cases.iter().filter(|case| case.effort <= self.effort) {
            let name = match prefix {
                "" => format!("{}::{}", self.suite, case.name),
                prefix => format!("{}::{prefix}::{}", self.suite, case.name),
            };
            let (run, trial_name) = (run.clone(), name.clone());
            self.trials.push(Trial::test(name, move || {
                run_one(&trial_name, || run(case));
                Ok(())
            }));
        }
    }
}

/// Runs a case and handles a skip. `WARPWIRE_TIMES=0.5` prints the duration of each case that takes
/// half a second or more.
fn run_one(name: &str, run: impl FnOnce()) {
    let start = Instant::now();
    let result = catch_unwind(AssertUnwindSafe(run));
    let threshold = std::env::var("WARPWIRE_TIMES").ok().and_then(|text| text.parse().ok());
    if threshold
        .is_some_and(|threshold_secs| start.elapsed() >= Duration::from_secs_f64(threshold_secs))
    {
        eprintln!("{:6.2} s  {name}", start.elapsed().as_secs_f64());
    }
    match result.map_err(|payload| payload.downcast::<Skipped>()) {
        Ok(()) => {}
        Err(Ok(skipped)) => eprintln!("skipped: {name}: {}", skipped.0),
        Err(Err(payload)) => resume_unwind(payload),
    }
}

/// The `main` of a test binary: runs each suite in a process of its own, so that its side effects
/// (environment, descriptors, hooks, a crash) do not affect others. They run beside each other, the
/// first ones first, because most cases wait more than they compute.
pub fn run(suites: &[Suite]) -> ExitCode {
    let find = |name: &str| {
        let found = suites.iter().find(|suite| suite.name == name);
        found.unwrap_or_else(|| panic!("no suite is called {name:?}"))
    };
    if let Some((suite, args)) = Role::current() {
        (find(&suite).role)(&args);
        return ExitCode::SUCCESS;
    }
    let arguments = Arguments::from_args();
    if let Ok(name) = std::env::var(ENV_VAR) {
        return run_suite(find(&name), arguments);
    }
    let wanted = suites.iter().filter(|suite| may_match(&arguments, suites, suite.name));
    let wanted: Vec<&Suite> = wanted.collect();
    let jobs = jobs(&arguments).min(wanted.len());
    let (queue, failed) = (Mutex::new(wanted.into_iter()), Mutex::new(Vec::new()));
    let work = || {
        loop {
            let Some(suite) = queue.lock().unwrap().next() else { break };
            let status = run_process(suite, jobs > 1);
            if !status.success() {
                failed.lock().unwrap().push(format!("{} ({status})", suite.name));
            }
        }
    };
    std::thread::scope(|scope| (0..jobs).for_each(|_| drop(scope.spawn(work))));
    let failed = failed.into_inner().unwrap();
    if failed.is_empty() {
        return ExitCode::SUCCESS;
    }
    eprintln!("failed suites: {}", failed.join(", "));
    ExitCode::FAILURE
}

/// How many suites run beside each other. One where cases share a GPU, and where the output is read
/// by a program.
fn jobs(arguments: &Arguments) -> usize {
    let has_gpu = std::path::Path::new("/dev/nvidiactl").exists();
    match arguments.list || has_gpu {
        true => 1,
        false => std::thread::available_parallelism().map_or(1, usize::from).min(4),
    }
}

/// Runs a suite in a process of its own. Beside others its output is printed when it has ended.
fn run_process(suite: &Suite, is_beside_others: bool) -> ExitStatus {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let (slowdown, value) = clock::inherit();
    command.args(std::env::args_os().skip(1)).env(ENV_VAR, suite.name).env(slowdown, value);
    let unset = suite.env.iter().filter(|(variable, _)| std::env::var_os(variable).is_none());
    command.envs(unset.copied());
    if !is_beside_others {
        return command.status().unwrap();
    }
    let mut output = tempfile::tempfile().unwrap();
    let clone = || output.try_clone().unwrap();
    let status = command.stdout(clone()).stderr(clone()).status().unwrap();
    let mut bytes = Vec::new();
    output.rewind().unwrap();
    output.read_to_end(&mut bytes).unwrap();
    std::io::stdout().lock().write_all(&bytes).unwrap();
    status
}

fn run_suite(suite: &Suite, mut arguments: Arguments) -> ExitCode {
    let (effort, trials) = (Effort::current(), Vec::new());
    let mut collector = Collector { suite: suite.name, effort, trials, serial: false };
    (suite.collect)(&mut collector);
    let Collector { trials, serial, .. } = collector;
    let matches = |name: &str| match &arguments.filter {
        Some(filter) if arguments.exact => name == filter,
        Some(filter) => name.contains(filter.as_str()),
        None => true,
    };
    if !arguments.list && !trials.iter().any(|trial| matches(trial.name())) {
        return ExitCode::SUCCESS; // another suite's filter
    }
    if serial {
        arguments.test_threads = Some(1);
    }
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// Whether a suite may contain cases that match the command line: `verbs::udp4` matches one suite.
fn may_match(arguments: &Arguments, suites: &[Suite], suite: &str) -> bool {
    let filter = arguments.filter.as_deref().unwrap_or_default();
    match filter.split_once("::") {
        Some((first, _)) if suites.iter().any(|known| known.name == first) => first == suite,
        _ => true,
    }
}
