//! Checks with more than one process.

use std::time::{Duration, Instant};

use warpwire::mem::{Allocation, MemoryKind};

use super::child::ChildProcess;
use super::data::bytes;
use super::raw::{ChildExit, read_after_close, read_in_fork, run_in_fork};
use super::{CheckError, CheckResult, CheckTarget, ensure};

const LEN: usize = 64 << 10;
/// Allocation of the killed process: large enough for a leak to be noticed.
const LARGE_ALLOC: u64 = 256 << 20;
/// Tolerated change of free memory by other processes.
const SLACK: u64 = LARGE_ALLOC / 2;
/// How long the driver may take to clean up after a killed process.
const CLEANUP_TIMEOUT: Duration = Duration::from_secs(10);

/// Roles of the child process.
const TOUCH: &str = "touch";
const OCCUPY: &str = "occupy";
const HOLD: &str = "hold";

/// In a child: runs its role of a check.
pub(super) fn role(role: &str, target: &CheckTarget) -> CheckResult {
    match role {
        TOUCH => {
            let window = target.alloc(LEN as u64)?.window()?;
            window.write(0, &[7; 8])?;
            ready()?;
            let seen = read_after_close(window);
            Err(CheckError::Failed(format!("it read {seen}")))
        }
        OCCUPY => {
            let allocations =
                (0..32).map(|_| target.alloc(LEN as u64)).collect::<Result<Vec<_>, _>>()?;
            allocations.iter().try_for_each(|memory| memory.write(0, &bytes(LEN, 99)))?;
            ready()?;
            wait_for_parent()
        }
        HOLD => {
            let memory = target.alloc(LARGE_ALLOC)?;
            let _window = memory.window()?;
            ready()?;
            wait_for_parent()
        }
        _ => Err(CheckError::Failed(format!("there is no role {role:?}"))),
    }
}

fn ready() -> CheckResult {
    crate::output::print("ready\n").map_err(CheckError::Failed)
}

/// Waits until the parent writes a line or exits.
fn wait_for_parent() -> CheckResult {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    Ok(())
}

/// Starts a child in a role of `check`, and waits until it is ready.
fn child_process(
    role: &str,
    check: &str,
    target: &CheckTarget,
) -> Result<ChildProcess, CheckError> {
    let task = format!("{role}:{check}_{}", target.kind);
    let mut child_process = ChildProcess::start(&task, &target.device)?;
    match child_process.line().as_str() {
        "ready" => Ok(child_process),
        text => Err(CheckError::Failed(format!("its second process printed {text:?}"))),
    }
}

pub(super) fn closed_window_faults(target: &CheckTarget) -> CheckResult {
    target.alloc(64)?;
    let child_exit = child_process(TOUCH, "a_closed_window_faults", target)?.end()?;
    ensure(child_exit.is_fault(), || format!("no fault: the process exited with {child_exit:?}"))
}

pub(super) fn stale_window(target: &CheckTarget) -> CheckResult {
    let memory = target.alloc(LEN as u64)?;
    let sent = bytes(LEN, 8);
    memory.write(0, &sent)?;
    let window = memory.window()?;
    memory.free()?;
    drop(memory);
    let other = child_process(OCCUPY, "a_stale_window_never_shows_another_process", target)?;
    let mut seen = vec![0; LEN];
    window.read(0, &mut seen)?;
    ensure(seen != bytes(LEN, 99), || "the window shows the other process's data".to_owned())?;
    ensure(seen == sent, || "the window shows wrong data".to_owned())?;
    let child_exit = other.end()?;
    ensure(child_exit == ChildExit::Exited(0), || {
        format!("its second process exited with {child_exit:?}")
    })
}

/// Memory with known contents.
fn prepared(target: &CheckTarget) -> Result<(Allocation, Vec<u8>), CheckError> {
    let (memory, sent) = (target.alloc(LEN as u64)?, bytes(LEN, 2));
    memory.write(0, &sent)?;
    Ok((memory, sent))
}

fn check_unchanged(window: &warpwire::mem::Window, sent: &[u8]) -> CheckResult {
    let mut seen = vec![0; sent.len()];
    window.read(0, &mut seen)?;
    ensure(seen == sent, || "the parent's window shows wrong data".to_owned())
}

pub(super) fn fork_and_touch(target: &CheckTarget) -> CheckResult {
    let (memory, sent) = prepared(target)?;
    let window = memory.window()?;
    let child_exit = read_in_fork(&window)?;
    ensure(child_exit.is_fault(), || format!("no fault: the child exited with {child_exit:?}"))?;
    check_unchanged(&window, &sent)
}

pub(super) fn fork_and_open(target: &CheckTarget) -> CheckResult {
    const OPENED: i32 = 42;
    let (memory, sent) = prepared(target)?;
    let window = memory.window()?;
    let child_exit = run_in_fork(|| match memory.window() {
        Ok(window) => {
            // Do not drop it here: that could close resources shared with the parent.
            std::mem::forget(window);
            OPENED
        }
        Err(_) => 0,
    })?;
    ensure(!child_exit.is_timeout(), || "the child hung".to_owned())?;
    ensure(child_exit == ChildExit::Exited(0), || match child_exit {
        ChildExit::Exited(OPENED) => "the child has a window onto its parent's memory".to_owned(),
        _ => format!("the child exited with {child_exit:?}"),
    })?;
    check_unchanged(&window, &sent)
}

pub(super) fn fork_and_free(target: &CheckTarget) -> CheckResult {
    let (memory, sent) = prepared(target)?;
    let window = memory.window()?;
    // The child's free may succeed or fail; only the parent's window matters.
    run_in_fork(|| i32::from(memory.free().is_err()))?;
    check_unchanged(&window, &sent)?;
    let sent = bytes(sent.len(), 3);
    window.write(0, &sent)?;
    let mut seen = vec![0; sent.len()];
    memory.read(0, &mut seen)?;
    ensure(seen == sent, || "the window no longer accesses the memory".to_owned())
}

pub(super) fn killed_with_windows(target: &CheckTarget) -> CheckResult {
    target.alloc(64)?;
    let free = || target.device.memory_usage().map(|usage| usage.free);
    let before = free()?;
    if before < 2 * LARGE_ALLOC && target.kind != MemoryKind::Pinned {
        return Err(CheckError::Waived(
            "too little free device memory to detect a leak".to_owned(),
        ));
    }
    child_process(HOLD, "a_killed_process_leaves_nothing_behind", target)?.kill()?;
    let start = Instant::now();
    while free()? + SLACK < before {
        let left = before - free()?;
        ensure(start.elapsed() < CLEANUP_TIMEOUT, || {
            format!("{left} bytes of device memory are still allocated")
        })?;
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
