//! Many operations of all kinds on many streams and queue pairs, in order.
//!
//! One thread queues all operations. Each has memory slots of its own, and depends only on earlier
//! ones in that sequence, so no deadlock is possible. A consumer on another stream copies the data
//! right after its wait: if the wait ended too early, the copy is still zero.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use warpwire::error::Kind;
use warpwire::mem::Stream;
use warpwire::stream::{Descriptors, StreamQp};
use warpwire::verbs::{Atomic, Completion, QpOptions, ReceiveRequest, SendRequest, WrOp};

use crate::stream::fixture::*;
use testkit::{Effort, cases};

cases!(Fixture; ONCE: thousands_of_operations_complete_in_order);

const PAIRS: usize = 16;
const STREAMS: usize = 8;
const SLOT: u64 = 8;

/// One end of a connection, and the ids of its outstanding work in posting order.
struct StormQp {
    qp: StreamQp,
    sends: VecDeque<u64>,
    receives: VecDeque<u64>,
    /// Number of fetch-and-adds posted.
    added: u64,
}

impl StormQp {
    fn new(qp: StreamQp) -> Self {
        Self { qp, sends: VecDeque::new(), receives: VecDeque::new(), added: 0 }
    }

    /// Polls completions and asserts that they succeeded in order. Returns their number.
    fn drain_completions(&mut self) -> usize {
        let mut some = [Completion::EMPTY; 32];
        let count = self.qp.poll(&mut some).unwrap();
        for done in &some[..count] {
            assert!(done.is_success(), "{done:?}: {:?}", self.qp.failure());
            let queue = if done.is_receive() { &mut self.receives } else { &mut self.sends };
            assert_eq!(queue.pop_front(), Some(done.id), "in order");
        }
        count
    }
}

struct Storm<'f> {
    storm_qps: Vec<StormQp>,
    streams: Vec<Stream>,
    /// Per end: slots for received, fetched and written values, and counters for the peer's
    /// atomics.
    slots: [TestBuffer; 2],
    counters: [TestBuffer; 2],
    /// Filled by the consumers' copies.
    log: TestBuffer,
    expected: Vec<u64>,
    random: u64,
    fixture: &'f Fixture,
}

impl Storm<'_> {
    /// A pseudo-random number (xorshift64).
    fn random_below(&mut self, below: u64) -> u64 {
        self.random ^= self.random << 13;
        self.random ^= self.random >> 7;
        self.random ^= self.random << 17;
        self.random % below
    }

    /// Retries while the queue is full; polls completions in between.
    fn retry_while_busy<T>(
        &mut self,
        mut attempt: impl FnMut(&mut Self) -> warpwire::Result<T>,
    ) -> T {
        let start = Instant::now();
        loop {
            match attempt(self) {
                Ok(done) => return done,
                Err(busy) if busy.kind() == &Kind::Busy => {
                    let drained: usize =
                        self.storm_qps.iter_mut().map(StormQp::drain_completions).sum();
                    if drained == 0 {
                        std::thread::sleep(Duration::from_micros(100));
                    }
                    let blocked: Vec<_> = self.streams.iter().map(Stream::blocked_on).collect();
                    assert!(start.elapsed() < test_timeout(), "still full: {busy}; {blocked:?}");
                }
                Err(other) => panic!("{other}"),
            }
        }
    }

    /// A consumer: copies an operation's slot to the log, in stream order.
    fn consume(&mut self, stream: usize, end: usize, number: u64, value: u64) {
        let from = self.slots[end].memory.region(number * SLOT, SLOT).unwrap();
        let to = self.log.memory.region(number * SLOT, SLOT).unwrap();
        self.streams[stream].copy(&to, &from).unwrap();
        self.expected.push(value);
    }

    fn step(&mut self, number: u64) {
        let qp_index = self.random_below(2 * PAIRS as u64) as usize;
        let (pair, end) = (qp_index / 2, qp_index % 2);
        let [from, to] = [
            self.random_below(STREAMS as u64) as usize,
            self.random_below(STREAMS as u64) as usize,
        ];
        if self.random_below(10) == 0 {
            // A prepared request is dropped.
            let idle =
                self.retry_while_busy(|storm| storm.storm_qps[qp_index].qp.prepare(&nop(u64::MAX)));
            drop(idle);
        }
        match self.random_below(4) {
            0 => self.message(number, qp_index, from, to),
            1 => self.write_and_read(number, qp_index, from, to),
            2 => self.fetch_and_add(number, qp_index, from, to),
            _ => self.list(number, pair, end, from),
        }
    }

    fn receive(&mut self, number: u64, qp_index: usize) {
        let range = self.slots[qp_index % 2].sge(number * SLOT, SLOT as u32);
        self.retry_while_busy(|storm| {
            let request = ReceiveRequest { id: number, data: &[range] };
            storm.storm_qps[qp_index].qp.post_receive(&[request])
        });
        self.storm_qps[qp_index].receives.push_back(number);
    }

    /// A message from one stream to another.
    fn message(&mut self, number: u64, qp_index: usize, from: usize, to: usize) {
        let peer = qp_index ^ 1;
        self.receive(number, peer);
        let bytes = (number + 1).to_le_bytes();
        self.retry_while_busy(|storm| {
            let request = SendRequest::new(number, WrOp::Send).inline(&bytes);
            storm.storm_qps[qp_index].qp.queue(&storm.streams[from], &request)
        });
        self.storm_qps[qp_index].sends.push_back(number);
        self.retry_while_busy(|storm| storm.storm_qps[peer].qp.wait_receive(&storm.streams[to]));
        self.consume(to, peer % 2, number, number + 1);
    }

    /// Writes to the peer and reads it back: ordered by the queue pair, posted by two streams.
    fn write_and_read(&mut self, number: u64, qp_index: usize, from: usize, to: usize) {
        let (end, peer) = (qp_index % 2, (qp_index % 2) ^ 1);
        let bytes = (number + 1).to_le_bytes();
        let there = self.slots[peer].mr.remote(number * SLOT);
        self.retry_while_busy(|storm| {
            let request = SendRequest::new(number, WrOp::Write(there)).inline(&bytes);
            storm.storm_qps[qp_index].qp.queue(&storm.streams[from], &request)
        });
        self.storm_qps[qp_index].sends.push_back(number);
        let range = self.slots[end].sge(number * SLOT, SLOT as u32);
        let ticket = self.retry_while_busy(|storm| {
            let data = [range];
            let request = SendRequest::new(number, WrOp::Read(there)).with(&data);
            storm.storm_qps[qp_index].qp.queue(&storm.streams[to], &request)
        });
        self.storm_qps[qp_index].sends.push_back(number);
        self.retry_while_busy(|storm| {
            storm.storm_qps[qp_index].qp.wait_send(&storm.streams[from], ticket)
        });
        self.consume(from, end, number, number + 1);
    }

    /// The fetched value is the number of earlier fetch-and-adds.
    fn fetch_and_add(&mut self, number: u64, qp_index: usize, from: usize, to: usize) {
        let (end, peer) = (qp_index % 2, (qp_index % 2) ^ 1);
        let counter = self.counters[peer].mr.remote(qp_index as u64 * SLOT);
        let range = self.slots[end].sge(number * SLOT, SLOT as u32);
        let ticket = self.retry_while_busy(|storm| {
            let data = [range];
            let add = WrOp::Atomic(counter, Atomic::FetchAdd { add: 1 });
            let work =
                storm.storm_qps[qp_index].qp.prepare(&SendRequest::new(number, add).with(&data))?;
            work.post(&storm.streams[from])
        });
        self.storm_qps[qp_index].sends.push_back(number);
        self.retry_while_busy(|storm| {
            storm.storm_qps[qp_index].qp.wait_send(&storm.streams[to], ticket)
        });
        let before = self.storm_qps[qp_index].added;
        self.storm_qps[qp_index].added += 1;
        self.consume(to, end, number, before);
    }

    /// A send and the waits for it on both ends, in one list on one stream.
    fn list(&mut self, number: u64, pair: usize, end: usize, on: usize) {
        let [qp_index, peer] = [pair * 2 + end, pair * 2 + (end ^ 1)];
        self.receive(number, peer);
        let bytes = (number + 1).to_le_bytes();
        self.retry_while_busy(|storm| {
            let mut list = Descriptors::on(&storm.streams[on]);
            let request = SendRequest::new(number, WrOp::Send).inline(&bytes);
            let ticket = list.send(&storm.storm_qps[qp_index].qp, &request)?;
            list.wait_receive(&storm.storm_qps[peer].qp)?;
            list.wait_send(&storm.storm_qps[qp_index].qp, ticket)?;
            list.post()
        });
        self.storm_qps[qp_index].sends.push_back(number);
        self.consume(on, peer % 2, number, number + 1);
    }

    /// Waits for all work and checks the log and the counters.
    fn check(&mut self) {
        self.streams.iter().for_each(sync);
        let start = Instant::now();
        while self
            .storm_qps
            .iter()
            .any(|storm_qp| !storm_qp.sends.is_empty() || !storm_qp.receives.is_empty())
        {
            for storm_qp in &mut self.storm_qps {
                storm_qp.drain_completions();
            }
            assert!(start.elapsed() < test_timeout(), "some work does not complete");
        }
        let log = self.log.read(0, self.expected.len() * SLOT as usize);
        for (number, (found, wanted)) in log.chunks(SLOT as usize).zip(&self.expected).enumerate() {
            assert_eq!(found, wanted.to_le_bytes(), "operation {number}");
        }
        for (qp_index, storm_qp) in self.storm_qps.iter().enumerate() {
            assert_eq!(
                self.counters[(qp_index % 2) ^ 1].word(qp_index as u64 * SLOT),
                storm_qp.added
            );
            assert!(storm_qp.qp.failure().is_none());
        }
        assert!(self.fixture.gpu.memory_usage().is_ok());
    }
}

fn thousands_of_operations_complete_in_order(fixture: &Fixture) {
    let count = Effort::pick("WARPWIRE_STREAM_STORM", [10_000, 20_000, 1_000_000]);
    let testbed = fixture.testbed();
    let qp = QpOptions::default().with_send_depth(32).with_receive_depth(32);
    let options = fixture.options().with_qp(qp);
    let mut storm_qps = Vec::new();
    for _ in 0..PAIRS {
        storm_qps.extend(fixture.pair_with(&testbed, &options).map(StormQp::new));
    }
    let ends = [&testbed.a, &testbed.b];
    let mut storm = Storm {
        storm_qps,
        streams: (0..STREAMS).map(|_| fixture.stream()).collect(),
        slots: ends.map(|end| fixture.memory(end, count * SLOT)),
        counters: ends.map(|end| fixture.memory(end, 2 * PAIRS as u64 * SLOT)),
        log: fixture.memory(&testbed.a, count * SLOT),
        expected: Vec::with_capacity(count as usize),
        random: 0x9e37_79b9_7f4a_7c15,
        fixture,
    };
    for number in 0..count {
        storm.step(number);
    }
    storm.check();
}
