//! Work for a second process: the test binary starts itself with a task in its environment.

use std::panic::catch_unwind;
use std::process::{Command, ExitCode, Output};

use warpwire::mem::Backend;

use crate::fixture::Fixture;
use crate::{program, sharing, sim_only};

const VARIABLE: &str = "WARPWIRE_TEST_CHILD";

pub enum Task {
    OpenIpc(Backend, Vec<u8>),
    FailToOpenIpc(Backend, Vec<u8>),
    Trespass(Backend),
    Discover,
}

pub struct Ended(Output);

impl Task {
    pub fn spawn(&self) -> Ended {
        self.spawn_with(&[])
    }

    pub fn spawn_with(&self, environment: &[(&str, &str)]) -> Ended {
        let text = match self {
            Self::OpenIpc(backend, bytes) => format!("open-ipc {backend} {}", hex(bytes)),
            Self::FailToOpenIpc(backend, bytes) => format!("fail-ipc {backend} {}", hex(bytes)),
            Self::Trespass(backend) => format!("trespass {backend}"),
            Self::Discover => "discover".into(),
        };
        let program = std::env::current_exe().unwrap();
        let mut command = Command::new(program);
        command.env(VARIABLE, text).envs(environment.iter().copied());
        Ended(command.output().unwrap())
    }
}

impl Ended {
    pub fn expect_success(self) {
        let Self(output) = self;
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "the child ended with {}: {text}", output.status);
    }
}

/// In a child: does its task and says how it ended.
pub fn run_if_asked() -> Option<ExitCode> {
    let task = std::env::var(VARIABLE).ok()?;
    let ended = catch_unwind(|| run(&task));
    Some(if ended.is_ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn run(task: &str) {
    let mut words = task.split(' ');
    let name = words.next().unwrap();
    if name == "discover" {
        return sim_only::discover();
    }
    let backend = if words.next() == Some("cuda") { Backend::Cuda } else { Backend::Sim };
    let bytes = words.next().map(unhex).unwrap_or_default();
    let fixture = Fixture::new(backend);
    match name {
        "open-ipc" => sharing::open_ipc(&fixture, &bytes),
        "fail-ipc" => sharing::fail_to_open_ipc(&fixture, &bytes),
        "trespass" => program::trespass(&fixture),
        other => panic!("unknown task {other}"),
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.map(byte).collect()
}
