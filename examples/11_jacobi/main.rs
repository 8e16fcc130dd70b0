//! A Jacobi solver on a grid whose rows are divided among ranks. After each step, neighbours
//! exchange their outermost rows (halo exchange), in three modes: the CPU waits for the GPU and
//! sends (`cpu`); the stream sends and waits (`stream`); the computing kernel itself sends, and
//! waits before it reads (`kernel`). The results of all modes are bit-identical to those of a
//! single rank.
//!
//! ```console
//! # Two ranks as threads, on the simulated GPU:
//! $ cargo run --release -p examples --example 11_jacobi
//! # Four processes; size, steps, device:
//! $ warpwire run -n 4 -- target/release/examples/11_jacobi 1024 500 cuda:0
//! ```
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs)]

mod kernel;
mod solver;

use std::time::Duration;

use warpwire::link::Hub;
use warpwire::msg::{Comm, CommOptions, Launcher, RankInfo};
use warpwire::verbs::LinkChoice;
use warpwire::{Result, mem};

use solver::{Mode, Solver};

const TIMEOUT: Duration = Duration::from_secs(60);

/// The problem: a grid of `size` × `size` and the number of steps.
#[derive(Clone)]
struct Task {
    size: u64,
    steps: u64,
    device: String,
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: u64| {
        words.get(at).map_or(default, |word| word.parse().expect("a number"))
    };
    let device = words.get(2).cloned().unwrap_or_else(|| "sim:0".to_owned());
    let task = Task { size: number(0, 256), steps: number(1, 100), device };
    let rank_info = RankInfo::from_env()?;
    let mut options = CommOptions::for_streams().with_timeout(TIMEOUT);
    if rank_info.launcher != Launcher::Standalone {
        return solve(&Comm::open(rank_info, options.with_env()?)?, &task);
    }
    options.link = LinkChoice::Hub(Hub::new());
    let comms = Comm::local_with(2, &options)?;
    std::thread::scope(|scope| {
        let ranks: Vec<_> =
            comms.into_iter().map(|comm| scope.spawn(|| solve(&{ comm }, &task))).collect();
        ranks.into_iter().try_for_each(|rank| rank.join().expect("a rank"))
    })
}

fn solve(comm: &Comm, task: &Task) -> Result<()> {
    let device = mem::open(&task.device)?;
    let wanted = (comm.rank() == 0).then(|| solver::reference(task.size, task.steps));
    let mut first = None;
    for mode in [Mode::Cpu, Mode::Stream, Mode::Kernel] {
        let mut solver = Solver::new(comm, &device, task.size)?;
        // Warm up, then start over.
        solver.run(mode, task.steps.min(10))?;
        solver.reset()?;
        let took = solver.run(mode, task.steps)?;
        let found = solver.gather()?;
        if let (Some(wanted), Some(found)) = (&wanted, found) {
            let wrong = wanted.iter().zip(&found).position(|(a, b)| a.to_bits() != b.to_bits());
            assert_eq!(wrong, None, "{mode:?}: differs from the single-rank result");
            let each = took.as_secs_f64() * 1e6 / task.steps as f64;
            let base = *first.get_or_insert(each);
            println!(
                "{:>7}: {} x {} on {} ranks, {} steps: {each:.1} us per step, \
                 {:.2} of the cpu mode; bit-identical",
                format!("{mode:?}").to_lowercase(),
                task.size,
                task.size,
                comm.size(),
                task.steps,
                each / base
            );
        }
        comm.barrier(TIMEOUT)?;
    }
    comm.finish(TIMEOUT)
}
