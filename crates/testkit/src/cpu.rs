//! CPU time of processes, to show that idle ones sleep.

use std::time::{Duration, Instant};

/// How many windows a measurement is divided into.
const WINDOWS: u32 = 10;

/// CPU time used so far by the living threads of a process, from `/proc`.
fn cpu_time(process: u32) -> Duration {
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap().flatten();
    let of_thread = |task: std::fs::DirEntry| -> Option<u64> {
        let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        text.split_whitespace().next()?.parse().ok()
    };
    Duration::from_nanos(tasks.filter_map(of_thread).sum())
}

/// The fraction of a core that each process uses: the median of ten windows within `time`.
///
/// The median, because a machine that shares its CPUs with others charges the time for which it was
/// suspended to whichever thread was running: one such event of 40 ms is 1 % of four seconds, but
/// falls into one window. A thread that does not sleep uses its CPU in all of them.
pub fn cpu_share<const N: usize>(processes: [u32; N], time: Duration) -> [f64; N] {
    let mut windows = [const { Vec::new() }; N];
    for _ in 0..WINDOWS {
        let (before, start) = (processes.map(cpu_time), Instant::now());
        std::thread::sleep(time / WINDOWS);
        for ((process, before), shares) in processes.iter().zip(before).zip(&mut windows) {
            let used = cpu_time(*process).saturating_sub(before);
            shares.push(used.as_secs_f64() / start.elapsed().as_secs_f64());
        }
    }
    windows.map(|mut shares| {
        shares.sort_by(f64::total_cmp);
        shares[shares.len() / 2]
    })
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::*;

    #[test]
    fn a_thread_that_spins_is_seen() {
        let [begun, ended] = [(); 2].map(|()| AtomicBool::new(false));
        let share = std::thread::scope(|scope| {
            scope.spawn(|| {
                begun.store(true, Ordering::Relaxed);
                while !ended.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
            crate::until("the thread spins", || begun.load(Ordering::Relaxed));
            let [share] = cpu_share([std::process::id()], Duration::from_millis(500));
            ended.store(true, Ordering::Relaxed);
            share
        });
        assert!(share > 0.05, "{share}");
    }
}
