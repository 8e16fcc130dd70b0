//! Ranks that are processes: traffic between them, and ranks that die, panic, leave or stop.
//!
//! The ranks are this same test binary with a task in its environment. The victim prints `now` when
//! it is ready to be killed; the other ranks print the error that they get.

use std::io::{BufRead, BufReader};
use std::process::{Child, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use warpwire::Error;
use warpwire::mem::Condition;
use warpwire::msg::{Buffer, Comm, CommOptions, Writer};

use crate::msg::fixture::{Fixture, TestLink, test_timeout};
use crate::msg::futures::run;
use testkit::{Role, cases, cpu_share};

cases!(Fixture; CASES:
    processes_exchange,
    killed_while_others_receive,
    killed_while_others_await,
    killed_in_a_long_message,
    killed_before_a_barrier,
    killed_while_others_watch_a_word,
    killed_and_then_sent_to,
    a_rank_that_panics,
    a_rank_that_aborts,
    a_rank_that_leaves,
    a_rank_that_is_stopped,
    idle_ranks_sleep,
    idle_tasks_sleep,
);

/// The rank that is killed.
const VICTIM: usize = 1;
/// Time within which the other ranks must detect the loss.
fn detection_limit() -> Duration {
    testkit::deadline(Duration::from_secs(5))
}

/// The processes of one job; killed on drop.
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
        let device_link = crate::rdma_device::link();
        let link = match fixture.test_link {
            TestLink::Hub => unreachable!("processes need a link between them"),
            TestLink::Udp => "udp",
            TestLink::Shm => "shm",
            TestLink::Auto => "auto",
            TestLink::Device => &device_link,
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

    /// The next line that a rank prints; empty if it has exited.
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
            assert!(start.elapsed() < test_timeout() * 2, "rank {rank} does not exit");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn expect_all_succeed(&mut self) {
        for rank in 0..self.children.len() {
            assert!(self.wait(rank).success(), "rank {rank}");
        }
    }
}

/// Kills the victim after its `now`; all others must report the loss in time.
fn kill_during(fixture: &Fixture, size: usize, task: &str) {
    let mut job = Job::start(fixture, size, task);
    assert_eq!(job.line(VICTIM), "now", "{task}");
    // The others may need as long to see its barrier.
    std::thread::sleep(Duration::from_millis(200));
    job.signal(VICTIM, Signal::KILL);
    let killed = Instant::now();
    for rank in (0..size).filter(|rank| *rank != VICTIM) {
        let line = job.line(rank);
        assert!(line.starts_with("lost: "), "{task}: rank {rank} printed {line:?}");
        assert!(line.contains("rank 1 exited without leaving"), "{task}: rank {rank}: {line}");
        assert!(killed.elapsed() < detection_limit(), "{task}: after {:?}", killed.elapsed());
    }
    for rank in (0..size).filter(|rank| *rank != VICTIM) {
        assert!(job.wait(rank).success(), "{task}: rank {rank}");
    }
}

/// Runs a task in a rank's process.
pub fn run_role(task: &str) {
    // The environment takes precedence, whatever the options were made for.
    let options = CommOptions::for_streams().with_env().unwrap();
    let link = std::env::var("WARPWIRE_LINK").unwrap();
    assert_eq!(options.link.to_string(), link);
    let comm = Comm::from_env_with(CommOptions::default()).unwrap();
    match task {
        "exchange" => exchange(&comm),
        "receive" => expect_peer_loss(&comm, |comm| {
            let memory = comm.alloc(64).unwrap();
            comm.recv(VICTIM, 0, &memory, test_timeout()).map(drop)
        }),
        "await" => expect_peer_loss(&comm, |comm| {
            let (memory, other) = (comm.alloc(64).unwrap(), comm.alloc(64).unwrap());
            let _also = comm.irecv(VICTIM, 1, &other)?;
            run(&mut comm.irecv(VICTIM, 0, &memory)?, test_timeout()).0.unwrap().map(drop)
        }),
        "long" => long_message(&comm),
        "barrier" => expect_peer_loss(&comm, |comm| comm.barrier(test_timeout())),
        "word" => expect_peer_loss(&comm, |comm| {
            let memory = comm.alloc(64).unwrap();
            let writer = if comm.rank() == 0 { Writer::Any } else { Writer::Rank(VICTIM) };
            comm.wait64(&memory, 0, (Condition::Equal, 1), writer, test_timeout())
        }),
        "send" => expect_peer_loss(&comm, |comm| {
            // Until the loss is detected, sends succeed as long as queues have space.
            let memory = comm.alloc(64).unwrap();
            loop {
                comm.send(VICTIM, 0, &memory, test_timeout())?;
            }
        }),
        "panic" | "abort" | "leave" => end_abnormally(comm, task),
        "stop" => run_while_stopped(&comm),
        "rest" => measure_idle(&comm, |memory| {
            comm.recv(1, 0, memory, test_timeout()).unwrap();
        }),
        "rest of tasks" => measure_idle(&comm, |memory| {
            let (ended, polls) = run(&mut comm.irecv(1, 0, memory).unwrap(), test_timeout());
            ended.unwrap().unwrap();
            assert!(polls <= 3, "{polls} polls for one message");
        }),
        other => panic!("no task {other}"),
    }
}

fn print_line(text: &str) {
    use std::io::Write;
    let mut out = std::io::stdout();
    writeln!(out, "{text}").unwrap();
    out.flush().unwrap();
}

fn print_loss(error: &Error) {
    print_line(&format!("lost: {error}"));
}

/// The victim waits to be killed; the others call `run`, which must fail.
fn expect_peer_loss(comm: &Comm, run: impl Fn(&Comm) -> warpwire::Result<()>) {
    comm.barrier(test_timeout()).unwrap();
    if comm.rank() == VICTIM {
        print_line("now");
        std::thread::sleep(test_timeout() * 4);
        return;
    }
    let error = run(comm).unwrap_err();
    print_loss(&error);
    assert!(comm.lost(VICTIM).is_some());
    // The surviving ranks can still exchange messages.
    let others: Vec<usize> = (0..comm.size()).filter(|rank| *rank != VICTIM).collect();
    let memory = comm.alloc(100).unwrap();
    for other in others {
        let mut receive = comm.irecv(other, 9, memory.slice(50, 50).unwrap()).unwrap();
        comm.send(other, 9, memory.slice(0, 50).unwrap(), test_timeout()).unwrap();
        receive.wait(test_timeout()).unwrap();
    }
    let unfinished = comm.finish(test_timeout()).unwrap_err();
    assert!(unfinished.to_string().contains("rank 1"), "{unfinished}");
}

fn long_message(comm: &Comm) {
    const LEN: u64 = 256 << 20;
    let memory = comm.alloc(LEN).unwrap();
    comm.barrier(test_timeout()).unwrap();
    if comm.rank() == VICTIM {
        // The victim sends to rank 0 and receives from rank 2, and is killed during the transfers.
        let _send = comm.isend(0, 0, &memory).unwrap();
        let _receive = comm.irecv(2, 0, &memory).unwrap();
        print_line("now");
        loop {
            comm.progress().unwrap();
        }
    }
    let transfer_until_failure = || -> warpwire::Result<()> {
        loop {
            match comm.rank() {
                0 => comm.recv(VICTIM, 0, &memory, test_timeout())?,
                _ => comm.send(VICTIM, 0, &memory, test_timeout())?,
            };
        }
    };
    print_loss(&transfer_until_failure().unwrap_err());
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
        // A message sent before the end is delivered. The sleep lets the other ranks leave the
        // barrier: a rank that exits right after it would fail those still inside.
        comm.send(0, 0, &memory, test_timeout()).unwrap();
        std::thread::sleep(Duration::from_millis(300));
        match task {
            "panic" => {
                // No message: it would look like that of a test.
                std::panic::set_hook(Box::new(|_| {}));
                panic!("on purpose")
            }
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
    print_loss(&comm.recv(VICTIM, 0, &memory, test_timeout()).unwrap_err());
    print_loss(&comm.send(VICTIM, 0, &memory, test_timeout()).unwrap_err());
}

fn run_while_stopped(comm: &Comm) {
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

/// Rank 0 waits for a message that is sent late, and prints the CPU time that it used.
fn measure_idle(comm: &Comm, receive: impl Fn(&Buffer)) {
    let memory = comm.alloc(64).unwrap();
    comm.barrier(test_timeout()).unwrap();
    if comm.rank() == 0 {
        let idle = || cpu_share([std::process::id()], Duration::from_secs(2));
        let share = std::thread::spawn(idle);
        receive(&memory);
        let [share] = share.join().unwrap();
        print_line(&format!("rest: {:.3} %", share * 100.0));
        assert!(share < 0.02, "{:.2} % of a core while idle", share * 100.0);
    } else {
        std::thread::sleep(Duration::from_millis(2500));
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

fn killed_while_others_await(fixture: &Fixture) {
    kill_during(fixture, 4, "await");
}

fn killed_in_a_long_message(fixture: &Fixture) {
    kill_during(fixture, 3, "long");
}

fn killed_before_a_barrier(fixture: &Fixture) {
    // Two ranks, so that the other one waits for the victim itself.
    kill_during(fixture, 2, "barrier");
}

fn killed_while_others_watch_a_word(fixture: &Fixture) {
    kill_during(fixture, 3, "word");
}

fn killed_and_then_sent_to(fixture: &Fixture) {
    kill_during(fixture, 3, "send");
}

fn expect_reported_end(fixture: &Fixture, task: &str, text: &str) {
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

fn a_rank_that_panics(fixture: &Fixture) {
    expect_reported_end(fixture, "panic", "rank 1 aborted: it panicked");
}

fn a_rank_that_aborts(fixture: &Fixture) {
    expect_reported_end(fixture, "abort", "rank 1 aborted: no more memory");
}

fn a_rank_that_leaves(fixture: &Fixture) {
    expect_reported_end(fixture, "leave", "rank 1 has left");
}

fn a_rank_that_is_stopped(fixture: &Fixture) {
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

fn idle_ranks_sleep(fixture: &Fixture) {
    expect_idle(fixture, "rest");
}

fn idle_tasks_sleep(fixture: &Fixture) {
    expect_idle(fixture, "rest of tasks");
}

fn expect_idle(fixture: &Fixture, task: &str) {
    let mut job = Job::start(fixture, 2, task);
    let line = job.line(0);
    assert!(line.starts_with("rest: "), "{line:?}");
    job.expect_all_succeed();
}
