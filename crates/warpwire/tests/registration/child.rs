//! A second process that allocates memory and hands its descriptor over, or runs a whole task.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::process::{Child, Stdio};

use testkit::Role;
use warpwire::mem;
use warpwire::mr::HostMemory;

pub const FILL: u8 = 0x6b;

/// Runs a task in a child process.
pub fn run_role(what: &str) {
    match what {
        "soak" => crate::registration::soak::run(),
        "descriptors" => crate::registration::staged::run_short_of_descriptors(),
        memory => export_until_end(memory),
    }
}

/// Prints a descriptor of new memory and keeps it until standard input is closed.
fn export_until_end(what: &str) {
    let fd: OwnedFd;
    let _keep: Box<dyn std::any::Any> = if what == "sim" {
        let memory = mem::open("sim:0").unwrap().alloc(4096).unwrap();
        memory.write(0, &[FILL; 4096]).unwrap();
        fd = memory.export_dmabuf(0, 4096).unwrap().into_fd();
        Box::new(memory)
    } else {
        let memory = HostMemory::new(4096).unwrap();
        memory.bytes().fill(0, 4096, &[FILL]).unwrap();
        fd = memory.as_fd().try_clone_to_owned().unwrap();
        Box::new(memory)
    };
    println!("{}", fd.as_raw_fd());
    std::io::stdout().flush().unwrap();
    let mut end = [0];
    let _ = std::io::stdin().read(&mut end);
}

/// Runs a task in a process of its own and returns its standard output.
pub fn run(what: &str) -> String {
    let mut command = Role::new("registration", what).command();
    let output = command.stderr(Stdio::inherit()).output().unwrap();
    let stdout_text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{what} exited with {}: {stdout_text}", output.status);
    stdout_text
}

pub struct ExportingProcess(Child);

/// Starts a process with memory of that kind, and opens its descriptor.
pub fn export(what: &str) -> (OwnedFd, ExportingProcess) {
    let mut child = Role::new("registration", what)
        .command()
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    let path = format!("/proc/{}/fd/{}", child.id(), line.trim());
    let fd = std::fs::File::options().read(true).write(true).open(path).unwrap();
    (fd.into(), ExportingProcess(child))
}

impl ExportingProcess {
    pub fn end(mut self) {
        drop(self.0.stdin.take());
        assert!(self.0.wait().unwrap().success());
    }
}
