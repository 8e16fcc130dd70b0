//! Checks that take more than one process.

use std::time::{Duration, Instant};

use warpwire::mem::{Allocation, MemoryKind};

use super::apart::Helper;
use super::data::bytes;
use super::raw::{Fate, in_a_fork, touch_after_close, touch_in_a_fork};
use super::{Checked, Subject, Trouble, ensure};

const LEN: usize = 64 << 10;
/// What the process that is killed holds: enough to be missed.
const HOARD: u64 = 256 << 20;
/// What others may take or leave on the device meanwhile.
const SLACK: u64 = HOARD / 2;
/// How long a driver may take to clean up after a process.
const CLEANING: Duration = Duration::from_secs(10);

const TOUCH: &str = "touch";
const OCCUPY: &str = "occupy";
const HOLD: &str = "hold";

/// In a child: its part of a check.
pub(super) fn role(role: &str, subject: &Subject) -> Checked {
    match role {
        TOUCH => {
            let window = subject.alloc(LEN as u64)?.window()?;
            window.write(0, &[7; 8])?;
            ready()?;
            let seen = touch_after_close(window);
            Err(Trouble::Failed(format!("it read {seen}")))
        }
        OCCUPY => {
            let taken =
                (0..32).map(|_| subject.alloc(LEN as u64)).collect::<Result<Vec<_>, _>>()?;
            taken.iter().try_for_each(|memory| memory.write(0, &bytes(LEN, 99)))?;
            ready()?;
            await_word()
        }
        HOLD => {
            let memory = subject.alloc(HOARD)?;
            let _window = memory.window()?;
            ready()?;
            await_word()
        }
        _ => Err(Trouble::Failed(format!("there is no role {role:?}"))),
    }
}

fn ready() -> Checked {
    crate::output::print("ready\n").map_err(Trouble::Failed)
}

/// Waits until the parent says something, or is gone.
fn await_word() -> Checked {
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    Ok(())
}

/// Starts a child in a role of `check`, and waits until it is ready.
fn helper(role: &str, check: &str, subject: &Subject) -> Result<Helper, Trouble> {
    let task = format!("{role}:{check}_{}", subject.kind);
    let mut helper = Helper::start(&task, &subject.device)?;
    match helper.line().as_str() {
        "ready" => Ok(helper),
        said => Err(Trouble::Failed(format!("its second process said {said:?}"))),
    }
}

pub(super) fn closed_window_faults(subject: &Subject) -> Checked {
    subject.alloc(64)?;
    let fate = helper(TOUCH, "a_closed_window_faults", subject)?.end()?;
    ensure(fate.is_fault(), || format!("no fault: the process ended with {fate:?}"))
}

pub(super) fn stale_window(subject: &Subject) -> Checked {
    let memory = subject.alloc(LEN as u64)?;
    let sent = bytes(LEN, 8);
    memory.write(0, &sent)?;
    let window = memory.window()?;
    memory.free()?;
    drop(memory);
    let other = helper(OCCUPY, "a_stale_window_never_shows_another_process", subject)?;
    let mut seen = vec![0; LEN];
    window.read(0, &mut seen)?;
    ensure(seen != bytes(LEN, 99), || "the window shows the other process's data".to_owned())?;
    ensure(seen == sent, || "the window shows other data".to_owned())?;
    let fate = other.end()?;
    ensure(fate == Fate::Exited(0), || format!("its second process ended with {fate:?}"))
}

/// Memory with known contents, for a fork to meddle with.
fn prepared(subject: &Subject) -> Result<(Allocation, Vec<u8>), Trouble> {
    let (memory, sent) = (subject.alloc(LEN as u64)?, bytes(LEN, 2));
    memory.write(0, &sent)?;
    Ok((memory, sent))
}

fn unharmed(window: &warpwire::mem::Window, sent: &[u8]) -> Checked {
    let mut seen = vec![0; sent.len()];
    window.read(0, &mut seen)?;
    ensure(seen == sent, || "the parent's window shows other data".to_owned())
}

pub(super) fn fork_and_touch(subject: &Subject) -> Checked {
    let (memory, sent) = prepared(subject)?;
    let window = memory.window()?;
    let fate = touch_in_a_fork(&window)?;
    ensure(fate.is_fault(), || format!("no fault: the child ended with {fate:?}"))?;
    unharmed(&window, &sent)
}

pub(super) fn fork_and_open(subject: &Subject) -> Checked {
    const OPENED: i32 = 42;
    let (memory, sent) = prepared(subject)?;
    let window = memory.window()?;
    let fate = in_a_fork(|| match memory.window() {
        Ok(window) => {
            // It must not even be dropped here: that would close what the parent may share.
            std::mem::forget(window);
            OPENED
        }
        Err(_) => 0,
    })?;
    ensure(!fate.is_timeout(), || "the child hung".to_owned())?;
    ensure(fate == Fate::Exited(0), || match fate {
        Fate::Exited(OPENED) => "the child has a window onto its parent's memory".to_owned(),
        _ => format!("the child ended with {fate:?}"),
    })?;
    unharmed(&window, &sent)
}

pub(super) fn fork_and_free(subject: &Subject) -> Checked {
    let (memory, sent) = prepared(subject)?;
    let window = memory.window()?;
    // Whether the child may free is not the question.
    in_a_fork(|| i32::from(memory.free().is_err()))?;
    unharmed(&window, &sent)?;
    let sent = bytes(sent.len(), 3);
    window.write(0, &sent)?;
    let mut seen = vec![0; sent.len()];
    memory.read(0, &mut seen)?;
    ensure(seen == sent, || "the window does not reach the memory any more".to_owned())
}

pub(super) fn killed_with_windows(subject: &Subject) -> Checked {
    subject.alloc(64)?;
    let free = || subject.device.memory_usage().map(|usage| usage.free);
    let before = free()?;
    if before < 2 * HOARD && subject.kind != MemoryKind::Pinned {
        return Err(Trouble::Waived("too little device memory is free to tell".to_owned()));
    }
    helper(HOLD, "a_killed_process_leaves_nothing_behind", subject)?.kill()?;
    let start = Instant::now();
    while free()? + SLACK < before {
        let left = before - free()?;
        ensure(start.elapsed() < CLEANING, || {
            format!("{left} bytes of device memory are still taken")
        })?;
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(())
}
