//! Two processes with a transfer agent each: one writes and reads the other's memory, in one piece
//! and in lists of many, with notifications.
//!
//! ```text
//! cargo run --release -p examples --example 14_agents -- cuda:0
//! ```
//!
//! The first argument is where the memory is: `host` (the default), `sim:0`, `cuda:0`. The process
//! starts itself once more. All bytes of each last round are compared.

use std::error::Error;
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use warpwire::agent::{Agent, AgentOptions, Memory, Peer, TransferOp};
use warpwire::mem::{self, Allocation, Backend, MemoryKind};
use warpwire::mr::HostMemory;
use warpwire::units;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Of these many runs the median counts.
const ROUNDS: usize = 7;

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let place = arguments.first().map_or("host", String::as_str);
    match arguments.get(1).map(String::as_str) {
        Some("serve") => serve(place),
        _ => measure(place),
    }
}

/// Registered memory whose bytes the CPU can fill and compare.
struct Block {
    memory: Memory,
    bytes: Bytes,
}

enum Bytes {
    Host(HostMemory),
    Device(Allocation),
}

impl Block {
    fn new(agent: &Agent, place: &str) -> Result<Self, Box<dyn Error>> {
        if place == "host" {
            let host = HostMemory::new(256 << 20)?;
            return Ok(Self { memory: agent.register(host.clone())?, bytes: Bytes::Host(host) });
        }
        let gpu = mem::open(place)?;
        let vmm = gpu.capabilities().vmm.is_yes();
        let kind = if vmm { MemoryKind::Vmm } else { MemoryKind::Plain };
        let len = if gpu.info().backend == Backend::Cuda { 2 << 30 } else { 16 << 20 };
        let device = gpu.alloc_kind(len, kind)?;
        Ok(Self { memory: agent.register(device.whole()?)?, bytes: Bytes::Device(device) })
    }

    /// Fills its first bytes with some that depend on the seed and their place.
    fn fill(&self, len: u64, seed: u64) -> Result<(), Box<dyn Error>> {
        let mut chunk = vec![0; 16 << 20];
        for at in (0..len).step_by(chunk.len()) {
            let chunk = &mut chunk[..(len - at).min(16 << 20) as usize];
            pattern(seed, at, chunk);
            match &self.bytes {
                Bytes::Host(host) => host.bytes().write(at, chunk)?,
                Bytes::Device(device) => device.write(at, chunk)?,
            }
        }
        Ok(())
    }

    /// Whether it has the bytes of another block of this seed, in ranges of the opposite order.
    fn is_reverse_of(&self, seed: u64, size: u64, count: u64) -> Result<bool, Box<dyn Error>> {
        let mut found = vec![0; (size * count) as usize];
        match &self.bytes {
            Bytes::Host(host) => host.bytes().read(0, &mut found)?,
            Bytes::Device(device) => device.read(0, &mut found)?,
        }
        let mut wanted = vec![0; size as usize];
        let mut ranges = found.chunks(size as usize).zip(0..);
        Ok(ranges.all(|(range, n)| {
            pattern(seed, (count - 1 - n) * size, &mut wanted);
            range == wanted
        }))
    }
}

/// Words that depend on the seed and their place; all lengths are multiples of a word's.
fn pattern(seed: u64, at: u64, into: &mut [u8]) {
    for (word, at) in into.chunks_exact_mut(8).zip((at..).step_by(8)) {
        let value = (at ^ seed << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&(value ^ value >> 29).to_le_bytes());
    }
}

/// The process whose memory is used. It answers notifications: `fill LEN SEED`, `compare SEED SIZE
/// COUNT`, and anything else with the same.
fn serve(place: &str) -> Result<(), Box<dyn Error>> {
    let agent = Agent::open("target", AgentOptions::default().with_env()?)?;
    let block = Block::new(&agent, place)?;
    println!("{}", String::from_utf8(agent.metadata()?)?.trim());
    let mut line = String::new();
    std::io::stdin().read_line(&mut line)?;
    let peer = agent.add_peer(line.as_bytes())?;
    while let Some(notification) = agent.wait_notification(TIMEOUT)? {
        let text = String::from_utf8_lossy(notification.bytes()).into_owned();
        let words: Vec<&str> = text.split(' ').collect();
        let answer = match words[..] {
            ["end"] => return Ok(()),
            ["fill", len, seed] => {
                block.fill(len.parse()?, seed.parse()?)?;
                "filled"
            }
            ["compare", seed, size, count] => {
                match block.is_reverse_of(seed.parse()?, size.parse()?, count.parse()?)? {
                    true => "same",
                    false => "different",
                }
            }
            _ => &text,
        };
        agent.notify(&peer, answer.as_bytes())?;
    }
    Err("the other process is silent".into())
}

fn measure(place: &str) -> Result<(), Box<dyn Error>> {
    let agent = Agent::open("initiator", AgentOptions::default().with_env()?)?;
    let block = Block::new(&agent, place)?;
    let mut command = Command::new(std::env::current_exe()?);
    let command = command.args([place, "serve"]).stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut child = command.spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().ok_or("no output")?).read_line(&mut line)?;
    let peer = agent.add_peer(line.as_bytes())?;
    let mut input = child.stdin.take().ok_or("no input")?;
    std::io::Write::write_all(&mut input, &agent.metadata()?)?;
    let bench = Bench { agent, peer, block };
    bench.latency()?;
    println!(
        "{:>20} {:>6} {:>11} {:>12} {:>9}   (min to max)",
        "ranges", "", "prepare ms", "transfer ms", "GB/s"
    );
    let len = bench.block.memory.len();
    for (size, count) in [
        (64 << 10, 1),
        (1 << 20, 1),
        (64 << 20, 1),
        (len, 1),
        (48 << 10, 16_384),
        (16 << 10, 100_000),
        (64, 100_000),
    ] {
        let size = size.min(len);
        bench.run(size, (len / size).min(count))?;
    }
    println!("path: {}", bench.peer.path().join("; "));
    bench.agent.notify(&bench.peer, b"end")?.wait(TIMEOUT)?;
    child.wait()?;
    Ok(())
}

struct Bench {
    agent: Agent,
    peer: Peer,
    block: Block,
}

impl Bench {
    fn ask(&self, text: &str) -> Result<String, Box<dyn Error>> {
        self.agent.notify(&self.peer, text.as_bytes())?;
        let answer = self.agent.wait_notification(TIMEOUT)?.ok_or("no answer")?;
        Ok(String::from_utf8(answer.into_bytes())?)
    }

    /// Half the time of 8 bytes there with a notification, and a notification back.
    fn latency(&self) -> Result<(), Box<dyn Error>> {
        let there = [self.peer.memory()[0].range(0, 8)?];
        let eight = self.agent.prepare(&self.peer, &[self.block.memory.range(0, 8)?], &there)?;
        let mut times = Vec::new();
        for _ in 0..2000 {
            let start = Instant::now();
            self.agent.post(TransferOp::Write, &eight, Some(b"ping"))?;
            while self.agent.next_notification().is_none() {}
            times.push(start.elapsed().as_secs_f64() / 2.0 * 1e6);
        }
        times.sort_by(f64::total_cmp);
        println!("8 bytes and a notification: half round trip {:.1} us (median)", times[1000]);
        Ok(())
    }

    /// Writes and reads `count` ranges, in the opposite order at the target.
    fn run(&self, size: u64, count: u64) -> Result<(), Box<dyn Error>> {
        let there = &self.peer.memory()[0];
        let lists: (Vec<_>, Vec<_>) = (0..count)
            .map(|n| {
                let remote = there.range((count - 1 - n) * size, size);
                Ok::<_, warpwire::Error>((self.block.memory.range(n * size, size)?, remote?))
            })
            .collect::<Result<Vec<_>, _>>()?
            .into_iter()
            .unzip();
        let start = Instant::now();
        let prepared = self.agent.prepare(&self.peer, &lists.0, &lists.1)?;
        let prepare = start.elapsed().as_secs_f64() * 1e3;
        for op in [TransferOp::Write, TransferOp::Read] {
            let (ours, theirs) = (3 + op as u64, 7 + op as u64);
            self.block.fill(size * count, ours)?;
            self.ask(&format!("fill {} {theirs}", size * count))?;
            let mut times = Vec::new();
            for _ in 0..ROUNDS {
                let start = Instant::now();
                self.agent.post(op, &prepared, None)?.wait(TIMEOUT)?;
                times.push(start.elapsed().as_secs_f64());
            }
            let same = match op {
                TransferOp::Write => self.ask(&format!("compare {ours} {size} {count}"))? == "same",
                TransferOp::Read => self.block.is_reverse_of(theirs, size, count)?,
            };
            if !same {
                return Err(format!("wrong bytes after {op:?} of {count} x {size}").into());
            }
            times.sort_by(f64::total_cmp);
            let rate = |time: f64| (size * count) as f64 / time / 1e9;
            println!(
                "{count:>9} x {:>8} {:>6} {prepare:>11.3} {:>12.3} {:>9.1}   ({:.1} to {:.1})",
                units::bytes(size),
                format!("{op:?}").to_lowercase(),
                times[ROUNDS / 2] * 1e3,
                rate(times[ROUNDS / 2]),
                rate(times[ROUNDS - 1]),
                rate(times[0])
            );
        }
        Ok(())
    }
}
