//! Agents in processes of their own, which are killed, stopped and started again.
//!
//! The other process is this same test binary. It prints the metadata of its agent and answers
//! notifications: `fill SEED` and `compare SEED` of its memory, with a notification of its own.

use std::collections::VecDeque;
use std::io::Read;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use testkit::{Effort, Process, Rng, Role, cases, until};
use warpwire::agent::{Agent, AgentOptions, Peer, Transfer, TransferOp, TransferOptions};
use warpwire::error::Kind;

use crate::agent::fixture::{Block, Fixture, PLACES, Place, TestLink, limit, same};

cases!(Fixture; CASES:
    processes_transfer,
    the_target_is_killed,
    the_initiator_is_killed,
    the_target_is_stopped;
    change: killed_and_started_again,
);

/// The length of a block of the other process.
const LEN: u64 = 4 << 20;

/// Another process with an agent.
struct Other {
    process: Process,
    metadata: Vec<u8>,
}

impl Other {
    fn start(fixture: &Fixture, task: &str) -> Self {
        let device_link = crate::rdma_device::link();
        let link = match fixture.test_link {
            TestLink::Hub => unreachable!("processes need a link between them"),
            TestLink::Udp => "udp",
            TestLink::Shm => "shm",
            TestLink::Auto => "auto",
            TestLink::Device => &device_link,
        };
        let mut command = Role::new("agent", task).command();
        command.env("WARPWIRE_LINK", link).env("WARPWIRE_ADDRESS", "127.0.0.1");
        let mut process = Process::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()));
        let metadata = process.line().into_bytes();
        Self { process, metadata }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.process.child), signal).unwrap();
    }
}

/// What the other process does: see the module.
pub fn run_role(task: &str) {
    let fixture = Fixture::new(TestLink::Auto);
    let agent = Agent::open("other", AgentOptions::default().with_env().unwrap()).unwrap();
    let blocks = PLACES.map(|place| fixture.block(&agent, place, LEN));
    print!("{}", String::from_utf8(agent.metadata().unwrap()).unwrap());
    // The parent's end of the pipe closes with it, however it ends.
    std::thread::spawn(|| {
        let _ = std::io::stdin().read(&mut [0]);
        std::process::exit(0);
    });
    match task.split_once(' ') {
        Some(("write", metadata)) => write_for_ever(&agent, &blocks, metadata),
        _ => serve(&agent, &blocks),
    }
}

fn serve(agent: &Agent, blocks: &[Block]) {
    loop {
        let Some(notification) = agent.wait_notification(limit() * 100).unwrap() else { return };
        let text = String::from_utf8(notification.bytes().to_vec()).unwrap();
        let (verb, rest) = text.split_once(' ').unwrap();
        let (seed, metadata) = rest.split_once(' ').unwrap();
        let seed = seed.parse().unwrap();
        let is_same = |block: &Block| {
            let before = block.read(0, LEN as usize);
            before == block.fill(seed)
        };
        let answer = match verb {
            "fill" => {
                blocks.iter().for_each(|block| drop(block.fill(seed)));
                "filled"
            }
            _ if blocks.iter().all(is_same) => "same",
            _ => "different",
        };
        let peer = agent.add_peer(metadata.as_bytes()).unwrap();
        agent.notify(&peer, answer.as_bytes()).unwrap();
    }
}

fn write_for_ever(agent: &Agent, blocks: &[Block], metadata: &str) {
    let peer = agent.add_peer(metadata.as_bytes()).unwrap();
    let there = &peer.memory()[0];
    let prepared =
        agent.prepare(&peer, &[blocks[0].range(0, LEN)], &[there.range(0, LEN).unwrap()]).unwrap();
    for round in 0_u64.. {
        blocks[0].write(0, &[round as u8 | 1; 4096]);
        let sent = agent.post(TransferOp::Write, &prepared, Some(b"round")).unwrap();
        if sent.wait(limit()).is_err() {
            return;
        }
    }
}

/// Asks the other process to do something with its memory.
fn ask(agent: &Agent, peer: &Peer, verb: &str, seed: u64) -> String {
    let metadata = String::from_utf8(agent.metadata().unwrap()).unwrap();
    let text = format!("{verb} {seed} {}", metadata.trim());
    agent.notify(peer, text.as_bytes()).unwrap();
    let answer = agent.wait_notification(limit()).unwrap().expect("an answer");
    assert_eq!(answer.from(), "other");
    String::from_utf8(answer.into_bytes()).unwrap()
}

fn processes_transfer(fixture: &Fixture) {
    let alice = fixture.agent("alice");
    let blocks = PLACES.map(|place| fixture.block(&alice, place, LEN));
    let other = Other::start(fixture, "serve");
    let peer = alice.add_peer(&other.metadata).unwrap();
    let remote = peer.memory();
    assert_eq!(remote.len(), PLACES.len());
    for (round, block) in blocks.iter().enumerate() {
        let seed = 10 + round as u64;
        block.fill(seed);
        // Written whole, in pieces of many lengths, to both places.
        let mut rng = Rng::new(seed);
        let (mut here, mut there, mut at) = (Vec::new(), Vec::new(), 0);
        while at < LEN {
            let len = [1 + rng.below(500), 1 + rng.below(300_000)][rng.below(2) as usize];
            let len = len.min(LEN - at);
            for memory in &remote {
                here.push(block.range(at, len));
                there.push(memory.range(at, len).unwrap());
            }
            at += len;
        }
        let prepared = alice.prepare(&peer, &here, &there).unwrap();
        alice.post(TransferOp::Write, &prepared, None).unwrap().wait(limit()).unwrap();
        assert_eq!(ask(&alice, &peer, "compare", seed), "same");
        // Read back from each.
        for memory in &remote {
            let seed = seed + 100;
            assert_eq!(ask(&alice, &peer, "fill", seed), "filled");
            let wanted = blocks[1 - round].fill(seed);
            block.fill(0);
            let range = [memory.range(0, LEN).unwrap()];
            let prepared = alice.prepare(&peer, &[block.range(0, LEN)], &range).unwrap();
            alice.post(TransferOp::Read, &prepared, None).unwrap().wait(limit()).unwrap();
            same(&block.read(0, LEN as usize), &wanted, "what was read");
        }
    }
    assert_eq!(peer.path().len(), 1);
}

/// Transfers to a process that is killed at a random moment end with the cause, and the agent goes
/// on.
fn the_target_is_killed(fixture: &Fixture) {
    let rounds = Effort::pick("WARPWIRE_AGENT_KILLS", [2, 4, 40]);
    let alice = fixture.agent("alice");
    let blocks = PLACES.map(|place| fixture.block(&alice, place, LEN));
    for round in 0..rounds {
        let mut rng = Rng::new(round);
        let mut other = Other::start(fixture, "serve");
        let peer = alice.add_peer(&other.metadata).unwrap();
        let (near, memory) = (&blocks[round as usize % 2], &peer.memory()[rng.below(2) as usize]);
        // One range, or a list of some that are no neighbours.
        let parts = [1, 64][rng.below(2) as usize];
        let part = LEN / parts;
        let here: Vec<_> = (0..parts).map(|at| near.range(at * part, part)).collect();
        let there: Vec<_> =
            (0..parts).rev().map(|at| memory.range(at * part, part).unwrap()).collect();
        let prepared = alice.prepare(&peer, &here, &there).unwrap();
        let op = [TransferOp::Write, TransferOp::Read][rng.below(2) as usize];
        if rng.below(3) > 0 {
            alice.post(op, &prepared, None).unwrap().wait(limit()).unwrap();
        }
        let after = Duration::from_micros(rng.below(20_000));
        let killed = std::thread::scope(|scope| {
            let killer = scope.spawn(|| {
                std::thread::sleep(after);
                other.process.kill()
            });
            let post = || alice.post(op, &prepared, None);
            transfer_until_lost(post, || killer.is_finished());
            killer.join().unwrap()
        });
        assert!(killed.elapsed() < limit(), "{:?}", killed.elapsed());
        // Nothing is written here any more.
        near.write(0, &[0; 4096]);
        std::thread::sleep(Duration::from_millis(5));
        same(&near.read(0, 4096), &[0; 4096], "memory after the transfers have ended");
        near.fill(round);
    }
}

/// Keeps transfers in flight until the peer is lost, which each of them reports then.
fn transfer_until_lost(
    post: impl Fn() -> warpwire::Result<Transfer>,
    is_killed: impl Fn() -> bool,
) {
    const IN_FLIGHT: usize = 100;
    let is_lost = |ended: warpwire::Result<()>| match ended {
        Ok(()) => false,
        Err(error) => {
            assert_eq!(error.kind(), &Kind::PeerLost, "{error}");
            true
        }
    };
    let mut posted = VecDeque::new();
    let mut deadline = None;
    loop {
        if is_killed() {
            let deadline = *deadline.get_or_insert_with(|| Instant::now() + limit());
            assert!(Instant::now() < deadline, "transfers to a process that was killed succeed");
        }
        match post() {
            Ok(transfer) => posted.push_back(transfer),
            Err(error) => break assert!(is_lost(Err(error))),
        }
        if posted.len() == IN_FLIGHT && is_lost(posted.pop_front().unwrap().wait(limit())) {
            break;
        }
    }
    for transfer in posted {
        is_lost(transfer.wait(limit()));
    }
}

fn the_initiator_is_killed(fixture: &Fixture) {
    let bob = fixture.agent("bob");
    let far = fixture.block(&bob, Place::Host, LEN);
    let metadata = String::from_utf8(bob.metadata().unwrap()).unwrap();
    for round in 0..3 {
        let mut other = Other::start(fixture, &format!("write {}", metadata.trim()));
        for _ in 0..5 {
            bob.wait_notification(limit()).unwrap().expect("a round");
        }
        std::thread::sleep(Duration::from_millis(round * 3));
        other.process.kill();
        // What it had sent may still be on its way; then nothing comes any more.
        let mut quiet = 0;
        until("nothing comes from the process that was killed", || {
            while bob.next_notification().is_some() {}
            far.write(0, &[0; 4096]);
            std::thread::sleep(Duration::from_millis(50));
            let silent = bob.next_notification().is_none() && far.read(0, 4096) == [0; 4096];
            quiet = if silent { quiet + 1 } else { 0 };
            quiet == 5
        });
    }
}

/// A process that is stopped does not answer: deadlines end transfers, and it is used again when
/// it goes on.
fn the_target_is_stopped(fixture: &Fixture) {
    let alice = fixture.agent("alice");
    let near = fixture.block(&alice, Place::Host, LEN);
    let other = Other::start(fixture, "serve");
    let peer = alice.add_peer(&other.metadata).unwrap();
    let lists = ([near.range(0, LEN)], [peer.memory()[0].range(0, LEN).unwrap()]);
    let prepared = alice.prepare(&peer, &lists.0, &lists.1).unwrap();
    let limited = TransferOptions::default().with_timeout(Duration::from_millis(200));
    let notified = limited.with_notification(b"fill 1 {}".to_vec());
    alice.post(TransferOp::Write, &prepared, None).unwrap().wait(limit()).unwrap();
    other.signal(Signal::STOP);
    other.process.until_stopped();
    let start = Instant::now();
    // Mapped memory can be written without the peer; a notification needs it.
    let posted: Vec<_> = (0..3)
        .map(|_| alice.post_with(TransferOp::Write, &prepared, notified.clone()).unwrap())
        .collect();
    for transfer in posted {
        let error = transfer.wait(limit()).unwrap_err();
        assert!(matches!(error.kind(), Kind::Timeout | Kind::PeerLost), "{error}");
    }
    assert!(start.elapsed() < limit(), "{:?}", start.elapsed());
    drop(other);
    let other = Other::start(fixture, "serve");
    let peer = alice.add_peer(&other.metadata).unwrap();
    assert_eq!(ask(&alice, &peer, "fill", 3), "filled");
}

fn killed_and_started_again(fixture: &Fixture) {
    let alice = fixture.agent("alice");
    let near = fixture.block(&alice, Place::Host, LEN);
    let mut stale = None;
    for round in 0..4 {
        let mut other = Other::start(fixture, "serve");
        let peer = alice.add_peer(&other.metadata).unwrap();
        let wanted = near.fill(round);
        let lists = ([near.range(0, LEN)], [peer.memory()[0].range(0, LEN).unwrap()]);
        let prepared = alice.prepare(&peer, &lists.0, &lists.1).unwrap();
        alice.post(TransferOp::Write, &prepared, None).unwrap().wait(limit()).unwrap();
        near.fill(99);
        alice.post(TransferOp::Read, &prepared, None).unwrap().wait(limit()).unwrap();
        same(&near.read(0, LEN as usize), &wanted, "what the new process has");
        if let Some(stale) = stale.replace(prepared) {
            let error = alice.post(TransferOp::Write, &stale, None).unwrap_err();
            assert_eq!(error.kind(), &Kind::Stale, "{error}");
        }
        other.process.kill();
    }
}
