//! Tasks for a second process: the test binary starts itself with a task in its environment.
#![allow(unsafe_code)] // fork

use std::os::fd::{FromRawFd, OwnedFd};
use std::process::Output;

use testkit::Role;
use warpwire::mem::Backend;

use crate::conformance::fixture::Fixture;
use crate::conformance::{copy_lists, program, sharing, sim_only};

pub enum Task {
    OpenIpc(Backend, Vec<u8>),
    OpenIpcWith(Backend, Vec<u8>, Vec<i32>),
    FailToOpenIpc(Backend, Vec<u8>),
    CopyListToIpc(Backend, Vec<u8>),
    Trespass(Backend),
    Discover,
    ForkWithWindow(Backend),
}

pub struct ChildOutput(Output);

impl Task {
    pub fn spawn(&self) -> ChildOutput {
        self.spawn_with(&[])
    }

    pub fn spawn_with(&self, environment: &[(&str, &str)]) -> ChildOutput {
        let text = match self {
            Self::OpenIpc(backend, bytes) => format!("open-ipc {backend} {}", hex(bytes)),
            Self::OpenIpcWith(backend, bytes, fds) => {
                let fds: Vec<_> = fds.iter().map(ToString::to_string).collect();
                format!("open-ipc-with {backend} {} {}", hex(bytes), fds.join(" "))
            }
            Self::FailToOpenIpc(backend, bytes) => format!("fail-ipc {backend} {}", hex(bytes)),
            Self::CopyListToIpc(backend, bytes) => format!("copy-list {backend} {}", hex(bytes)),
            Self::Trespass(backend) => format!("trespass {backend}"),
            Self::Discover => "discover".into(),
            Self::ForkWithWindow(backend) => format!("fork {backend}"),
        };
        let mut command = Role::new("conformance", text).command();
        command.envs(environment.iter().copied());
        ChildOutput(command.output().unwrap())
    }
}

impl ChildOutput {
    pub fn expect_success(self) {
        let Self(output) = self;
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "the child exited with {}: {text}", output.status);
    }
}

/// Runs a task; called in the child.
pub fn run(task: &str) {
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
        "open-ipc-with" => {
            let fds = words.filter(|word| !word.is_empty()).map(|fd| fd.parse().unwrap());
            // SAFETY: the parent passed its descriptors on, and nothing else here knows them.
            let fds = fds.map(|fd| unsafe { OwnedFd::from_raw_fd(fd) }).collect();
            sharing::open_ipc_with(&fixture, &bytes, fds);
        }
        "fail-ipc" => sharing::fail_to_open_ipc(&fixture, &bytes),
        "copy-list" => copy_lists::copy_list_to_ipc(&fixture, &bytes),
        "trespass" => program::trespass(&fixture),
        "fork" => fork_with_window(&fixture),
        other => panic!("unknown task {other}"),
    }
}

/// A forked child must fault when it accesses its parent's window; the parent must be unaffected.
fn fork_with_window(f: &Fixture) {
    let memory = f.gpu.alloc(4096).unwrap();
    memory.write(0, &[7; 8]).unwrap();
    let window = memory.window().unwrap();
    // SAFETY: the child only makes async-signal-safe calls: it reads one address and exits.
    let status = unsafe {
        let child = libc::fork();
        if child == 0 {
            let seen = window.as_ptr().as_ptr().read_volatile();
            libc::_exit(i32::from(seen));
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &mut status, 0), child);
        status
    };
    assert!(libc::WIFSIGNALED(status), "the child read the parent's memory: {status:#x}");
    assert_eq!(window.bytes().load_u64(0).unwrap(), 0x0707_0707_0707_0707);
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Vec<u8> {
    let digits = text.as_bytes().chunks(2);
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.map(byte).collect()
}
