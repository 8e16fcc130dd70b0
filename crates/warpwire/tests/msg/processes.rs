//! Ranks that are processes, and that die.
//!
//! The ranks are this same program, told by their role what to do. A rank that is to die says `now` on its standard
//! output at the moment in question; the others say what they saw.

use std::io::{BufRead, BufReader};
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use warpwire::Error;
use warpwire::mem::Condition;
use warpwire::msg::{Comm, Writer};

use crate::msg::fixture::{Fixture, TestLink, test_timeout};
use testkit::{Role, cases};

cases!(Fixture; CASES:
    processes_exchange,
    killed_while_others_receive,
    killed_in_a_long_message,
    killed_before_a_barrier,
    killed_while_others_watch_a_word,
    killed_and_then_sent_to,
    one_that_panics,
    one_that_gives_up,
    one_that_leaves,
    one_that_is_stopped,
    all_at_rest_sleep,
);

/// Who is killed.
const VICTIM: usize = 1;
/// How soon the others must know.
fn bound() -> Duration {
    testkit::deadline(Duration::from_secs(5))
}

/// Processes that end with this.
struct Job {
    children: Vec<Child>,
    lines: Vec<std::io::Lines<BufReader<std::process::ChildStdout>>>,
    _folder: tempfile::TempDir,
}

impl Drop for Job {
    fn drop(&mut self) {
        for child in &mut self.children {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl Job {
    fn start(fixture: &Fixture, size: usize, task: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let link = match fixture.test_link {
            TestLink::Hub => unreachable!("processes need a link between them"),
            TestLink::Udp => "udp",
            TestLink::Shm => "shm",
            TestLink::Auto => "auto",
        };
        let start = |rank: usize| {
            Role::new("msg", task)
                .command()
                .env("WARPWIRE_RANK", rank.to_string())
                .env("WARPWIRE_SIZE", size.to_string())
                .env("WARPWIRE_MASTER", format!("file:{}", folder.path().join("a").display()))
                .env("WARPWIRE_LINK", link)
                .stdin(Stdio::null())
                .stdout(Stdio::piped())
                .spawn()
                .unwrap()
        };
        let mut children: Vec<Child> = (0..size).map(start).collect();
        let lines = children
            .iter_mut()
            .map(|child| BufReader::new(child.stdout.take().unwrap()).lines())
            .collect();
        Self { children, lines, _folder: folder }
    }

    /// The next line of a rank; empty if it has ended.
    fn line(&mut self, rank: usize) -> String {
        self.lines[rank].next().map(Result::unwrap).unwrap_or_default()
    }

    fn signal(&self, rank: usize, signal: Signal) {
        kill_process(Pid::from_child(&self.children[rank]), signal).unwrap();
    }

    fn wait(&mut self, rank: usize) -> ExitStatus {
        let start = Instant::now();
        loop {
            if let Some(status) = self.children[rank].try_wait().unwrap() {
                return status;
            }
            assert!(start.elapsed() < test_timeout() * 2, "rank {rank} does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn expect_all_succeed(&mut self) {
        for rank in 0..self.children.len() {
            assert!(self.wait(rank).success(), "rank {rank}");
        }
    }
}

/// Kills the victim when it says so; all others must say that they lost it, and how, soon.
fn kill_during(fixture: &Fixture, size: usize, task: &str) {
    let mut job = Job::start(fixture, size, task);
    assert_eq!(job.line(VICTIM), "now", "{task}");
    std::thread::sleep(Duration::from_millis(30));
    job.signal(VICTIM, Signal::KILL);
    let killed = Instant::now();
    for rank in (0..size).filter(|rank| *rank != VICTIM) {
        let line = job.line(rank);
        assert!(line.starts_with("lost: "), "{task}: rank {rank} says {line:?}");
        assert!(line.contains("rank 1 has ended without a word"), "{task}: rank {rank}: {line}");
        assert!(killed.elapsed() < bound(), "{task}: after {:?}", killed.elapsed());
    }
    for rank in (0..size).filter(|rank| *rank != VICTIM) {
        assert!(job.wait(rank).success(), "{task}: rank {rank}");
    }
}

/// What a rank does, by the task's name.
pub fn run_role(task: &str) {
    let comm = Comm::from_env().unwrap();
    match task {
        "exchange" => exchange(&comm),
        "receive" => expect_peer_loss(&comm, |comm| {
            let memory = comm.alloc(64).unwrap();
            comm.recv(VICTIM, 0, &memory, test_timeout()).map(drop)
        }),
        "long" => long_message(&comm),
        "barrier" => expect_peer_loss(&comm, |comm| comm.barrier(test_timeout())),
        "word" => expect_peer_loss(&comm, |comm| {
            let memory = comm.alloc(64).unwrap();
            let writer = if comm.rank() == 0 { Writer::Any } else { Writer::Rank(VICTIM) };
            comm.wait64(&memory, 0, (Condition::Equal, 1), writer, test_timeout())
        }),
        "send" => expect_peer_loss(&comm, |comm| {
            // Until it is known, messages go as far as there is room.
            let memory = comm.alloc(64).unwrap();
            loop {
                comm.send(VICTIM, 0, &memory, test_timeout())?;
            }
        }),
        "panic" | "abort" | "leave" => end_abnormally(comm, task),
        "stop" => stopped(&comm),
        "rest" => rest(&comm),
        other => panic!("no task {other}"),
    }
}

fn print_line(text: &str) {
    use std::io::Write;
    let mut out = std::io::stdout();
    writeln!(out, "{text}").unwrap();
    out.flush().unwrap();
}

fn lost(error: &Error) {
    print_line(&format!("lost: {error}"));
}

/// The victim waits to be killed; the others do something that will fail.
fn expect_peer_loss(comm: &Comm, run: impl Fn(&Comm) -> warpwire::Result<()>) {
    comm.barrier(test_timeout()).unwrap();
    if comm.rank() == VICTIM {
        print_line("now");
        std::thread::sleep(test_timeout() * 4);
        return;
    }
    let error = run(comm).unwrap_err();
    lost(&error);
    assert!(comm.lost(VICTIM).is_some());
    // Those who live still reach each other.
    let others: Vec<usize> = (0..comm.size()).filter(|rank| *rank != VICTIM).collect();
    let memory = comm.alloc(100).unwrap();
    for other in others {
        let mut receive = comm.irecv(other, 9, memory.slice(50, 50).unwrap()).unwrap();
        comm.send(other, 9, memory.slice(0, 50).unwrap(), test_timeout()).unwrap();
        receive.wait(test_timeout()).unwrap();
    }
    let together = comm.finish(test_timeout()).unwrap_err();
    assert!(together.to_string().contains("rank 1"), "{together}");
}

fn long_message(comm: &Comm) {
    const LEN: u64 = 256 << 20;
    let memory = comm.alloc(LEN).unwrap();
    comm.barrier(test_timeout()).unwrap();
    if comm.rank() == VICTIM {
        // It sends to one, and receives from the other; it is killed on the way.
        let _send = comm.isend(0, 0, &memory).unwrap();
        let _receive = comm.irecv(2, 0, &memory).unwrap();
        print_line("now");
        loop {
            comm.progress().unwrap();
        }
    }
    let again = || -> warpwire::Result<()> {
        loop {
            match comm.rank() {
                0 => comm.recv(VICTIM, 0, &memory, test_timeout())?,
                _ => comm.send(VICTIM, 0, &memory, test_timeout())?,
            };
        }
    };
    lost(&again().unwrap_err());
}

fn exchange(comm: &Comm) {
    for seed in 0..3 {
        crate::msg::messages::exchange(comm, seed);
    }
    comm.finish(test_timeout()).unwrap();
}

fn end_abnormally(comm: Comm, task: &str) {
    let memory = comm.alloc(64).unwrap();
    comm.barrier(test_timeout()).unwrap();
    if comm.rank() == VICTIM {
        // What was sent before is delivered. The others are given the time to come out of the barrier: who ends right behind it
        // may take those along who are still inside.
        comm.send(0, 0, &memory, test_timeout()).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        match task {
            "panic" => panic!("on purpose"),
            "abort" => comm.abort("no more memory"),
            _ => {}
        }
        return;
    }
    if comm.rank() == 0 {
        while comm.lost(VICTIM).is_none() {
            std::thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(comm.recv(VICTIM, 0, &memory, test_timeout()).unwrap().len, 64);
    }
    lost(&comm.recv(VICTIM, 0, &memory, test_timeout()).unwrap_err());
    lost(&comm.send(VICTIM, 0, &memory, test_timeout()).unwrap_err());
}

fn stopped(comm: &Comm) {
    comm.barrier(test_timeout()).unwrap();
    if comm.rank() == VICTIM {
        print_line("now");
    }
    let memory = comm.alloc(64).unwrap();
    for _ in 0..200 {
        comm.barrier(test_timeout()).unwrap();
        let other = (comm.rank() + 1) % comm.size();
        let before = (comm.rank() + comm.size() - 1) % comm.size();
        let mut receive = comm.irecv(before, 0, memory.slice(0, 32).unwrap()).unwrap();
        comm.send(other, 0, memory.slice(32, 32).unwrap(), test_timeout()).unwrap();
        receive.wait(test_timeout()).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    comm.finish(test_timeout()).unwrap();
}

/// Waits for a message that comes after a while, and says how much of a core that took.
fn rest(comm: &Comm) {
    let memory = comm.alloc(64).unwrap();
    comm.barrier(test_timeout()).unwrap();
    let used = || {
        let text = std::fs::read_to_string("/proc/self/schedstat").unwrap();
        let own: u64 = text.split(' ').next().unwrap().parse().unwrap();
        let threads = std::fs::read_dir("/proc/self/task").unwrap();
        let each = threads.flatten().filter_map(|task| {
            let text = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
            text.split(' ').next()?.parse::<u64>().ok()
        });
        each.sum::<u64>().max(own)
    };
    let (start, before) = (Instant::now(), used());
    if comm.rank() == 0 {
        comm.recv(1, 0, &memory, test_timeout()).unwrap();
        let slice = (used() - before) as f64 / start.elapsed().as_nanos() as f64;
        print_line(&format!("rest: {:.3} %", slice * 100.0));
        assert!(slice < 0.02, "{:.2} % of a core while nothing happens", slice * 100.0);
    } else {
        std::thread::sleep(Duration::from_secs(2));
        comm.send(0, 0, &memory, test_timeout()).unwrap();
    }
    comm.finish(test_timeout()).unwrap();
}

fn processes_exchange(fixture: &Fixture) {
    for size in [2, 4] {
        Job::start(fixture, size, "exchange").expect_all_succeed();
    }
}

fn killed_while_others_receive(fixture: &Fixture) {
    kill_during(fixture, 4, "receive");
}

fn killed_in_a_long_message(fixture: &Fixture) {
    kill_during(fixture, 3, "long");
}

fn killed_before_a_barrier(fixture: &Fixture) {
    // Two, so that everybody waits for the victim itself.
    kill_during(fixture, 2, "barrier");
}

fn killed_while_others_watch_a_word(fixture: &Fixture) {
    kill_during(fixture, 3, "word");
}

fn killed_and_then_sent_to(fixture: &Fixture) {
    kill_during(fixture, 3, "send");
}

fn ends_otherwise(fixture: &Fixture, task: &str, text: &str) {
    let mut job = Job::start(fixture, 3, task);
    for rank in [0, 2] {
        for _ in 0..2 {
            let line = job.line(rank);
            assert!(line.starts_with("lost: ") && line.contains(text), "{task}: {line:?}");
        }
        assert!(job.wait(rank).success());
    }
    assert_eq!(job.wait(VICTIM).success(), task != "panic");
}

fn one_that_panics(fixture: &Fixture) {
    ends_otherwise(fixture, "panic", "rank 1 gave up: it panicked");
}

fn one_that_gives_up(fixture: &Fixture) {
    ends_otherwise(fixture, "abort", "rank 1 gave up: no more memory");
}

fn one_that_leaves(fixture: &Fixture) {
    ends_otherwise(fixture, "leave", "rank 1 has left");
}

fn one_that_is_stopped(fixture: &Fixture) {
    let mut job = Job::start(fixture, 3, "stop");
    assert_eq!(job.line(VICTIM), "now");
    for _ in 0..3 {
        job.signal(VICTIM, Signal::STOP);
        std::thread::sleep(Duration::from_millis(300));
        job.signal(VICTIM, Signal::CONT);
        std::thread::sleep(Duration::from_millis(20));
    }
    job.expect_all_succeed();
}

fn all_at_rest_sleep(fixture: &Fixture) {
    let mut job = Job::start(fixture, 2, "rest");
    let line = job.line(0);
    assert!(line.starts_with("rest: "), "{line:?}");
    job.expect_all_succeed();
}
