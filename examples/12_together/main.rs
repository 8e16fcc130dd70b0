//! Broadcast, all-reduce and barrier in stream order, composed of the messages of a device channel.
//! The CPU posts receives and enqueues work on the stream, and waits for it at the end. In each
//! round another rank generates numbers and broadcasts them, every rank adds its own, and an
//! all-reduce computes the sums.
//!
//! ```console
//! # Four ranks as threads, on the simulated GPU:
//! $ cargo run --release -p examples --example 12_together
//! # Four processes; numbers, rounds, device:
//! $ warpwire run -n 4 -- target/release/examples/12_together 4096 16 cuda:0
//! ```
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, unsafe_code)]

mod kernels;

use std::time::{Duration, Instant};

use warpwire::error::Kind;
use warpwire::link::Hub;
use warpwire::mem::{Allocation, Stream};
use warpwire::msg::{Buffer, ChannelOptions, Comm, CommOptions, DeviceChannel, Launcher, RankInfo};
use warpwire::verbs::LinkChoice;
use warpwire::{Result, mem};

use kernels::Kernels;

const TIMEOUT: Duration = Duration::from_secs(60);
const RANKS: usize = 4;

#[derive(Clone)]
struct Task {
    /// Numbers per rank; a multiple of the number of ranks.
    count: u64,
    rounds: u64,
    device: String,
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let number = |at: usize, default: u64| {
        words.get(at).map_or(default, |word| word.parse().expect("a number"))
    };
    let device = words.get(2).cloned().unwrap_or_else(|| "sim:0".to_owned());
    let task = Task { count: number(0, 1000), rounds: number(1, 16), device };
    let rank_info = RankInfo::from_env()?;
    let options = CommOptions::for_streams().with_timeout(TIMEOUT);
    if rank_info.launcher != Launcher::Standalone {
        return all_rounds(&Comm::open(rank_info, options.with_env()?)?, &task);
    }
    let run_ranks = |run: fn(&Comm, &Task) -> Result<()>| -> Result<()> {
        let link = LinkChoice::Hub(Hub::new());
        let comms = Comm::local_with(RANKS, &options.clone().with_link(link))?;
        std::thread::scope(|scope| {
            let start = |comm| scope.spawn(|| run(&{ comm }, &task));
            let ranks: Vec<_> = comms.into_iter().map(start).collect();
            ranks.into_iter().try_for_each(|rank| rank.join().expect("a rank"))
        })
    };
    run_ranks(all_rounds)?;
    run_ranks(one_rank_fails)
}

/// A rank with its device memory.
struct Rank<'a> {
    comm: &'a Comm,
    device_channel: DeviceChannel,
    stream: Stream,
    kernels: Kernels,
    /// The numbers that are broadcast and summed (`numbers` is their registration), and those that
    /// only this rank has.
    memory: Allocation,
    mine: Allocation,
    numbers: Buffer,
    /// Received partial sums, one slice per step of the reduce-scatter.
    arrivals: Allocation,
    arriving: Buffer,
    /// The sums of all rounds.
    log: Allocation,
}

impl<'a> Rank<'a> {
    fn new(comm: &'a Comm, task: &Task) -> Result<Self> {
        let device = mem::open(&task.device)?;
        let (bytes, ranks) = (task.count * 8, comm.size() as u64);
        assert!(task.count.is_multiple_of(ranks), "{} numbers, {ranks} ranks", task.count);
        let (memory, mine) = (device.alloc(bytes)?, device.alloc(bytes)?);
        let arrivals = device.alloc(bytes)?;
        let this = Self {
            comm,
            device_channel: comm.device_channel(&device, ChannelOptions::default())?,
            stream: device.stream()?,
            kernels: Kernels::load(&device)?,
            numbers: comm.register(memory.whole()?)?,
            arriving: comm.register(arrivals.whole()?)?,
            log: device.alloc(bytes * task.rounds)?,
            memory,
            mine,
            arrivals,
        };
        // CUDA cannot load kernels while streams of the GPU wait, and ranks may share a GPU: no
        // rank starts before all have loaded their kernels.
        comm.barrier(TIMEOUT)?;
        Ok(this)
    }

    /// Broadcasts the root's numbers, as they are at this point of its stream, along a binomial
    /// tree.
    ///
    /// A posted receive may be filled at any time. The barrier at the end of each round guarantees
    /// that no rank is more than one round ahead.
    fn broadcast_on(&self, root: usize) -> Result<()> {
        let (size, rank) = (self.comm.size(), self.comm.rank());
        let relative_rank = (rank + size - root) % size;
        let mut sends = Vec::new();
        let mut distance = 1;
        while distance < size {
            let (to, from) = ((rank + distance) % size, (rank + size - distance) % size);
            if relative_rank < distance && relative_rank + distance < size {
                sends.push(self.device_channel.send_on_stream(
                    &self.stream,
                    to,
                    self.numbers.whole(),
                )?);
            } else if (distance..2 * distance).contains(&relative_rank) {
                let receive = self.device_channel.receive(from, self.numbers.whole())?;
                self.device_channel.wait_on_stream(&self.stream, &receive)?;
            }
            distance *= 2;
        }
        // After the sends the numbers may be overwritten.
        self.device_channel.wait_all_on_stream(&self.stream, &sends)
    }

    /// Sums the numbers of all ranks (ring all-reduce): a reduce-scatter, then an all-gather.
    ///
    /// The final sum of a slice arrives only after every rank has added to it, so this rank's send
    /// of that slice has completed and the slice may be overwritten.
    fn all_reduce_on(&self) -> Result<()> {
        let (size, rank) = (self.comm.size(), self.comm.rank());
        let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
        let bytes = self.memory.len() / size as u64;
        let at = |slice: usize| (slice % size) as u64 * bytes;
        let mut sends = Vec::new();
        for step in 0..size - 1 {
            let (outgoing, incoming) = (at(rank + size - step), at(rank + 2 * size - step - 1));
            let offset = step as u64 * bytes;
            let receive =
                self.device_channel.receive(before, self.arriving.slice(offset, bytes)?)?;
            sends.push(self.device_channel.send_on_stream(
                &self.stream,
                next,
                self.numbers.slice(outgoing, bytes)?,
            )?);
            self.device_channel.wait_on_stream(&self.stream, &receive)?;
            let (sum, arrived) =
                (self.memory.region(incoming, bytes)?, self.arrivals.region(offset, bytes)?);
            self.kernels.add(&self.stream, &sum, &arrived)?;
        }
        for step in 0..size - 1 {
            let (outgoing, incoming) = (at(rank + size + 1 - step), at(rank + size - step));
            let receive =
                self.device_channel.receive(before, self.numbers.slice(incoming, bytes)?)?;
            sends.push(self.device_channel.send_on_stream(
                &self.stream,
                next,
                self.numbers.slice(outgoing, bytes)?,
            )?);
            self.device_channel.wait_on_stream(&self.stream, &receive)?;
        }
        self.device_channel.wait_all_on_stream(&self.stream, &sends)
    }

    /// Enqueues one round on the stream, without waiting for any of it.
    fn round_on(&self, round: u64) -> Result<()> {
        let (size, rank) = (self.comm.size(), self.comm.rank());
        let root = round as usize % size;
        let numbers = self.memory.whole()?;
        if rank == root {
            self.kernels.fill(&self.stream, &numbers, random_values(round, 0), RANDOM_STEP)?;
        }
        self.broadcast_on(root)?;
        let own = rank as u64 + 1;
        self.kernels.fill(&self.stream, &self.mine.whole()?, own, own)?;
        self.kernels.add(&self.stream, &numbers, &self.mine.whole()?)?;
        self.all_reduce_on()?;
        let log = self.log.region(round * numbers.len(), numbers.len())?;
        self.stream.copy(&log, &numbers)?;
        // The next broadcast must not overwrite numbers that a rank has not copied yet.
        self.device_channel.barrier_on_stream(&self.stream)
    }

    fn finish(&self) -> Result<()> {
        self.stream.synchronize(TIMEOUT)?;
        self.device_channel.check()
    }
}

const RANDOM_STEP: u64 = 0x9e37_79b9;

/// The number at `index` that the root of a round generates.
fn random_values(round: u64, index: u64) -> u64 {
    (round + 1).wrapping_mul(1_000_003).wrapping_add(index.wrapping_mul(RANDOM_STEP))
}

fn all_rounds(comm: &Comm, task: &Task) -> Result<()> {
    let rank = Rank::new(comm, task)?;
    let start = Instant::now();
    for round in 0..task.rounds {
        rank.round_on(round)?;
        // The number of pending requests is limited: every 8 rounds the CPU waits for the stream.
        if round % 8 == 7 {
            rank.finish()?;
            rank.device_channel.progress()?;
        }
    }
    rank.finish()?;
    let took = start.elapsed();
    let mut found = vec![0; rank.log.len() as usize];
    rank.log.read(0, &mut found)?;
    let ranks = comm.size() as u64;
    let own: u64 = (1..=ranks).sum();
    for (position, found) in (0..).zip(found.chunks(8)) {
        let (round, index) = (position / task.count, position % task.count);
        let wanted = random_values(round, index)
            .wrapping_mul(ranks)
            .wrapping_add(own.wrapping_mul(index + 1));
        let found = u64::from_le_bytes(found.try_into().unwrap());
        assert_eq!(found, wanted, "round {round}, number {index}, rank {}", comm.rank());
    }
    comm.barrier(TIMEOUT)?;
    if comm.rank() == 0 {
        println!(
            "{} ranks, {} rounds of {} numbers: broadcast, all-reduce and barrier on the stream: \
             {:.1} us per round; all sums are correct",
            comm.size(),
            task.rounds,
            task.count,
            took.as_secs_f64() * 1e6 / task.rounds as f64
        );
    }
    comm.finish(TIMEOUT)
}

/// The last rank aborts before a round: the streams of the others are released, and the cause is
/// reported.
fn one_rank_fails(comm: &Comm, task: &Task) -> Result<()> {
    let rank = Rank::new(comm, task)?;
    let last = comm.size() - 1;
    if comm.rank() == last {
        // A barrier would not do: the others may still be in it when this rank has left it.
        for other in 0..last {
            comm.wait_ready(other, TIMEOUT)?;
        }
        comm.abort("no more numbers");
        return Ok(());
    }
    let ready = comm.send_ready(last, TIMEOUT);
    let outcome = ready.and_then(|()| rank.round_on(0)).and_then(|()| rank.finish());
    let error = outcome.expect_err("a round without the last rank");
    assert_eq!(error.kind(), &Kind::PeerLost, "{error}");
    if comm.rank() == 0 {
        println!("after rank {last} aborted: {error}");
    }
    // No rank leaves before all have seen the abort.
    std::thread::sleep(Duration::from_millis(200));
    Ok(())
}
