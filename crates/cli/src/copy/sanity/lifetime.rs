//! Checks of window lifetimes, and of leaked resources.

use std::thread;

use warpwire::mem::{MemoryKind, WindowOptions};
use warpwire_apps::pattern;

use super::data::bytes;
use super::{CheckError, CheckResult, CheckTarget, ensure};

const LEN: usize = 64 << 10;

/// Joins a thread; a panic fails the check.
fn join_thread<T>(
    thread: thread::ScopedJoinHandle<'_, Result<T, CheckError>>,
) -> Result<T, CheckError> {
    thread.join().unwrap_or_else(|_| Err(CheckError::Failed("a thread panicked".to_owned())))
}

pub(super) fn across_threads(target: &CheckTarget) -> CheckResult {
    let memory = target.alloc(LEN as u64)?;
    let sent = bytes(LEN, 3);
    thread::scope(|scope| {
        let window = join_thread(scope.spawn(|| Ok(memory.window()?)))?;
        let (sent, memory) = (&sent, &memory);
        let window = join_thread(scope.spawn(move || {
            window.write(0, sent)?;
            Ok(window)
        }))?;
        // Two threads concurrently on the same buffer, while the first window is open.
        let both = [(); 2].map(|()| {
            scope.spawn(|| {
                for _ in 0..50 {
                    let (window, mut seen) = (memory.window()?, vec![0; LEN]);
                    window.read(0, &mut seen)?;
                    ensure(seen == *sent, || "wrong data in a second thread".to_owned())?;
                }
                Ok(())
            })
        });
        both.into_iter().try_for_each(join_thread)?;
        join_thread(scope.spawn(move || {
            drop(window);
            Ok(())
        }))
    })
}

pub(super) fn after_free(target: &CheckTarget) -> CheckResult {
    let memory = target.alloc(LEN as u64)?;
    let sent = bytes(LEN, 6);
    memory.write(0, &sent)?;
    let window = memory.window()?;
    memory.free()?;
    drop(memory);
    // New allocations must not reuse the memory of the open window.
    let others = (0..8).map(|_| target.alloc(LEN as u64)).collect::<Result<Vec<_>, _>>()?;
    let theirs = bytes(LEN, 9);
    others.iter().try_for_each(|other| other.write(0, &theirs))?;
    let mut seen = vec![0; LEN];
    window.read(0, &mut seen)?;
    // A pool keeps its pages and hands them out again: only access is guaranteed.
    ensure(seen == sent || target.kind == MemoryKind::Pool, || "wrong data".to_owned())
}

pub(super) fn two_windows(target: &CheckTarget) -> CheckResult {
    let (one, other) = (target.alloc(LEN as u64)?, target.alloc(LEN as u64)?);
    let sent = bytes(LEN, 4);
    other.write(0, &sent)?;
    let (first, second) = (one.window()?, other.window()?);
    one.free()?;
    drop((one, first));
    let mut seen = vec![0; LEN];
    second.read(0, &mut seen)?;
    ensure(seen == sent, || "the other buffer's data changed".to_owned())?;
    let sent = bytes(LEN, 5);
    second.write(0, &sent)?;
    other.read(0, &mut seen)?;
    ensure(seen == sent, || "the other buffer's window does not reach it any more".to_owned())
}

/// Open file descriptors and mappings of this process.
fn open_resources() -> Result<(usize, usize), CheckError> {
    let descriptors = std::fs::read_dir("/proc/self/fd")?.count();
    Ok((descriptors, std::fs::read_to_string("/proc/self/maps")?.lines().count()))
}

pub(super) fn ten_thousand(target: &CheckTarget) -> CheckResult {
    const THREADS: u64 = 8;
    const EACH: u64 = 1250;
    let memory = target.alloc(1 << 20)?;
    memory.write(0, &bytes(1 << 20, 3))?;
    let options = WindowOptions::from_env()?;
    drop(memory.window()?); // descriptors opened once per process stay open
    let before = open_resources()?;
    thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS)
            .map(|thread| {
                let (memory, options) = (&memory, &options);
                scope.spawn(move || {
                    let (mut seen, mut wanted) = ([0; 64], [0; 64]);
                    for round in 0..EACH {
                        let offset = (thread * 131_072 + round * 97) % ((1 << 20) - 64) / 8 * 8;
                        memory.window_with(offset, 64, options)?.read(0, &mut seen)?;
                        pattern::fill_bytes(&mut wanted, 3, offset);
                        ensure(seen == wanted, || format!("wrong data at {offset}"))?;
                    }
                    Ok(())
                })
            })
            .collect();
        threads.into_iter().try_for_each(join_thread)
    })?;
    let after = open_resources()?;
    // Threads may leave stacks and arenas mapped; windows must leave nothing.
    let clean = after.0 <= before.0 + 4 && after.1 <= before.1 + 64;
    ensure(clean, || {
        let (fds, maps) = (before.0, before.1);
        format!("{fds} descriptors and {maps} mappings became {} and {}", after.0, after.1)
    })
}
