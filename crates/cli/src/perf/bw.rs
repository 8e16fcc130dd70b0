//! Bandwidth test: many messages in flight.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use warpwire::hca::IndirectReason;
use warpwire::verbs::{Atomic, Completion, ReceiveRequest, WrOp};

use super::control::{Done, Watchdog, YIELD_INTERVAL};
use super::endpoint::{Endpoint, POLL_BATCH, failed};
use super::table::{Figures, Row};
use super::test::Verb;
use crate::output::Failure;

/// Max bytes in flight, so that a run of large messages stops in time.
const MAX_IN_FLIGHT: u64 = 1 << 30;
/// Max bytes between two signaled messages, for the same reason.
const MAX_UNSIGNALED: u64 = 16 << 20;
/// Warm-up step, in bytes.
const WARM_UP: u64 = 64 << 20;
/// Min warm-up time.
const WARM_UP_TIME: Duration = Duration::from_millis(10);
/// Max warm-up time: memory of a peer on this machine is mapped after its first use, that of a GPU
/// some hundred milliseconds after it; until then data travels in packets.
const MAX_WARM_UP_TIME: Duration = Duration::from_secs(5);
/// Max warm-up time while such a peer has not said which memory it has: one with `--no-direct` says
/// nothing.
const MAX_PEER_TIME: Duration = Duration::from_secs(1);
/// Min window of a peak rate.
const WINDOW: Duration = Duration::from_millis(1);

/// When to stop: at `messages` per queue pair, or after `time`.
#[derive(Clone, Copy)]
struct Limit {
    messages: u64,
    time: Option<Duration>,
}

/// The client's side of a test, on the queue pairs of one completion queue.
struct BwSender<'a> {
    endpoint: &'a Endpoint,
    size: u64,
    depth: u64,
    /// Every n-th message is signaled.
    signal_interval: u64,
    /// The completion queue.
    group: usize,
    /// Of each queue pair of the group.
    counts: Vec<Counts>,
    /// The message of each queue pair of the group, if it is sent inline.
    inline: Vec<Option<Vec<u8>>>,
    /// Where receives arrive, too.
    receiver: Receiver<'a>,
    name: &'a str,
}

/// Messages of a queue pair, on a cache line of their own.
#[derive(Clone, Default)]
#[repr(align(128))]
struct Counts {
    posted: u64,
    completed: u64,
}

/// Messages that a sender has completed, on a cache line of its own.
#[derive(Default)]
#[repr(align(128))]
struct Progress(AtomicU64);

/// Start, end, and the peak messages per second of a sender's run.
type Times = (Instant, Instant, f64);

/// The result, and the number of received messages if both sides send.
pub(super) fn run(
    endpoint: &Endpoint,
    size: u64,
    watchdog: &mut Watchdog<'_>,
) -> Result<(Done, u64), Failure> {
    let depth = u64::from(endpoint.test.depth).min((MAX_IN_FLIGHT / size).max(2));
    let signal_interval = match endpoint.test.cq_mod {
        Some(count) => u64::from(count).min(depth),
        None => (depth / 4).min(MAX_UNSIGNALED / size).max(1),
    };
    let name = &watchdog.peer.name.clone();
    let sender = |group| {
        let counts = vec![Counts::default(); endpoint.group(group).count()];
        let inline = endpoint.group(group).map(|index| endpoint.inline_data(index, size)).collect();
        let receiver = Receiver::new(endpoint);
        BwSender { endpoint, size, depth, signal_interval, group, counts, inline, receiver, name }
    };
    let mut senders: Vec<_> = (0..endpoint.cqs.len()).map(sender).collect();
    let some = depth.min((WARM_UP / size).max(1));
    let (mut warm_up, begin) = (0, Instant::now());
    loop {
        warm_up += some;
        let before = indirect_operations(endpoint);
        run_all(&mut senders, Limit { messages: warm_up, time: None }, watchdog)?;
        let [mapping, unknown] = indirect_operations(endpoint);
        let max_time = match (mapping > before[0], unknown > before[1]) {
            (true, _) => MAX_WARM_UP_TIME,
            (false, true) => MAX_PEER_TIME,
            _ => WARM_UP_TIME,
        };
        if begin.elapsed() >= max_time {
            break;
        }
    }
    let total = |senders: &[BwSender<'_>]| senders.iter().map(BwSender::total).sum::<u64>();
    let before = total(&senders);
    let time = endpoint.test.seconds.map(Duration::from_secs_f64);
    let messages = endpoint.test.iterations(size).saturating_add(warm_up);
    let (took, peak) = run_all(&mut senders, Limit { messages, time }, watchdog)?;
    let iterations = total(&senders) - before;
    let rate = iterations as f64 / took.as_secs_f64();
    let row = Row::new(size, iterations, Figures::bw(size, rate, peak.max(rate)));
    let mut per_qp = vec![0; endpoint.qps.len()];
    let mut received = 0;
    for sender in &mut senders {
        let group = endpoint.group(sender.group).zip(&sender.counts);
        group.for_each(|(index, counts)| per_qp[index] = counts.completed);
        sender.receiver.finish()?;
        received += sender.receiver.received;
    }
    Ok((Done { per_qp, row }, received))
}

/// Number of operations that were sent as packets because the peer's memory was not mapped yet, and
/// because the peer had not said yet which memory it has.
fn indirect_operations(endpoint: &Endpoint) -> [u64; 2] {
    let Some(stats) = endpoint.context.stats() else { return [0; 2] };
    let count = |reason: IndirectReason| stats.direct.not.get(reason.name()).copied().unwrap_or(0);
    let [no_exports, not_ready] =
        [IndirectReason::NoExports, IndirectReason::QpNotReady].map(count);
    [count(IndirectReason::MappingRequested), no_exports + not_ready]
}

/// Runs all senders up to the limit, each in a thread of its own: the first in this one, which also
/// watches the peer. Returns the elapsed time, and the peak messages per second.
fn run_all(
    senders: &mut [BwSender<'_>],
    limit: Limit,
    watchdog: &mut Watchdog<'_>,
) -> Result<(Duration, f64), Failure> {
    let progress: Vec<Progress> = senders.iter().map(|_| Progress::default()).collect();
    let (start, stop) = (Barrier::new(senders.len()), AtomicBool::new(false));
    let (progress, start) = (&progress[..], &start);
    let [first, others @ ..] = senders else { return Ok((Duration::ZERO, 0.0)) };
    let times = in_threads(
        others,
        &stop,
        |sender, idle| sender.run(limit, start, &progress[sender.group..], idle),
        |stopped| {
            let idle = || Ok(stopped() || watchdog.check_alive().map(|()| false)?);
            first.run(limit, start, progress, idle)
        },
    )?;
    let begin = times.iter().map(|(begin, ..)| *begin).min();
    let end = times.iter().map(|(_, end, _)| *end).max();
    let took = begin.zip(end).map_or(Duration::ZERO, |(begin, end)| end - begin);
    // The first one's peak is that of all.
    Ok((took, times.first().map_or(0.0, |(.., peak)| *peak)))
}

/// Runs `first` in this thread, and `other` in a thread per item; returns their results, that of
/// `first` first. They stop each other when one fails: `first` learns it from the closure that it
/// gets, the others when they call theirs, which they do while they find nothing.
fn in_threads<T: Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    stop: &AtomicBool,
    other: impl Fn(T, &mut dyn FnMut() -> Result<bool, Failure>) -> Result<R, Failure> + Sync,
    first: impl FnOnce(&dyn Fn() -> bool) -> Result<R, Failure>,
) -> Result<Vec<R>, Failure> {
    let stopped = || stop.load(Ordering::Relaxed);
    let ended = |result: Result<R, Failure>| {
        if result.is_err() {
            stop.store(true, Ordering::Relaxed);
        }
        result
    };
    let (other, ended) = (&other, &ended);
    std::thread::scope(|scope| {
        let spawn = |item| {
            scope.spawn(move || {
                let mut calls = 0_u32;
                let mut idle = || {
                    calls = calls.wrapping_add(1);
                    // With fewer cores than busy threads, another one may need this core.
                    if calls.is_multiple_of(YIELD_INTERVAL) {
                        std::thread::yield_now();
                    }
                    Ok(stopped())
                };
                ended(other(item, &mut idle))
            })
        };
        let others: Vec<_> = items.into_iter().map(spawn).collect();
        let mut results = vec![ended(first(&stopped))];
        for thread in others {
            let panicked = |_| Err(Failure::Runtime("a thread of the test panicked".to_owned()));
            results.push(thread.join().unwrap_or_else(panicked));
        }
        results.into_iter().collect()
    })
}

impl BwSender<'_> {
    fn total(&self) -> u64 {
        self.counts.iter().map(|counts| counts.completed).sum()
    }

    /// Posts and polls up to the limit, or until `idle`, which is called when a poll found nothing,
    /// says that another thread has failed. The peak is that of all senders in `progress`, of which
    /// this one is the first.
    fn run(
        &mut self,
        limit: Limit,
        start: &Barrier,
        progress: &[Progress],
        mut idle: impl FnMut() -> Result<bool, Failure>,
    ) -> Result<Times, Failure> {
        start.wait();
        let start = Instant::now();
        let all = || progress.iter().map(|one| one.0.load(Ordering::Relaxed)).sum::<u64>();
        let (mut window, mut before, mut peak) = (start, 0, 0.0_f64);
        let (mut mine, mut in_window) = (0, 0);
        let mut stopped = false;
        let mut completions = [Completion::EMPTY; POLL_BATCH];
        loop {
            if !stopped {
                self.post_all(limit.messages)?;
            }
            let found = self.endpoint.cqs[self.group].poll(&mut completions)?;
            if found == 0 {
                self.endpoint.wait_event(self.group)?;
                if idle()? {
                    return Ok((start, Instant::now(), peak));
                }
            }
            for completion in &completions[..found] {
                if !completion.is_success() {
                    return Err(failed(completion, self.name));
                }
                if completion.is_receive() {
                    self.receiver.take(completion)?;
                    continue;
                }
                let (at, count) = ((completion.id >> 32) as usize, completion.id & 0xffff_ffff);
                self.counts[at].completed += count;
                mine += count;
                in_window += count;
            }
            if found > 0 {
                progress[0].0.store(mine, Ordering::Relaxed);
            }
            if found > 0 && in_window >= self.depth && window.elapsed() >= WINDOW {
                let (now, total) = (Instant::now(), all());
                peak = peak.max((total - before) as f64 / (now - window).as_secs_f64());
                (window, before, in_window) = (now, total, 0);
            }
            stopped = stopped || limit.time.is_some_and(|time| start.elapsed() >= time);
            let is_done = |Counts { posted, completed }: &Counts| {
                (stopped || *posted >= limit.messages) && posted == completed
            };
            if self.counts.iter().all(is_done) {
                return Ok((start, Instant::now(), peak));
            }
        }
    }

    fn post_all(&mut self, messages: u64) -> Result<(), Failure> {
        for (at, index) in self.endpoint.group(self.group).enumerate() {
            loop {
                let Counts { posted, completed } = self.counts[at];
                let in_flight = posted - completed;
                let count = self.signal_interval.min(messages.saturating_sub(posted));
                if count == 0 || in_flight + count > self.depth.max(self.signal_interval) {
                    break;
                }
                self.post(at, index, count)?;
            }
        }
        Ok(())
    }

    /// Posts `count` messages, of which only the last is signaled, to queue pair `index`, which is
    /// number `at` of the group.
    fn post(&mut self, at: usize, index: usize, count: u64) -> Result<(), Failure> {
        let endpoint = self.endpoint;
        let (offset, remote) = (endpoint.offset(index), endpoint.remote(index));
        let (op, memory) = match endpoint.test.verb {
            Verb::Write => (WrOp::Write(remote), &endpoint.outgoing),
            Verb::Send => (WrOp::Send, &endpoint.outgoing),
            Verb::Read => (WrOp::Read(remote), &endpoint.incoming),
            Verb::Atomic => {
                let results = match endpoint.test.bidirectional {
                    true => &endpoint.outgoing,
                    false => &endpoint.incoming,
                };
                (WrOp::Atomic(remote, Atomic::FetchAdd { add: 1 }), results)
            }
        };
        let range = [memory.mr.sge(offset, self.size as u32)];
        let id = (at as u64) << 32 | count;
        let last = match &self.inline[at] {
            Some(bytes) => endpoint.request(index, id, op).inline(bytes),
            None => endpoint.request(index, id, op).with(&range),
        };
        let mut requests = [last.unsignaled(); POLL_BATCH];
        let mut left = count as usize;
        while left > 0 {
            let step = left.min(POLL_BATCH);
            left -= step;
            if left == 0 {
                requests[step - 1] = last;
            }
            endpoint.qps[index].post_send(&requests[..step])?;
        }
        self.counts[at].posted += count;
        Ok(())
    }
}

/// Posts all receives of this side, once for all sizes.
pub(super) fn post_receives(endpoint: &Endpoint) -> Result<(), Failure> {
    let count = endpoint.test.receives(endpoint.role);
    for index in 0..endpoint.qps.len() {
        repost_receives(endpoint, index, count)?;
    }
    Ok(())
}

/// Posts `count` receives on one queue pair. They have room for the largest size: those that one
/// size leaves unused serve the next.
pub(super) fn repost_receives(
    endpoint: &Endpoint,
    index: usize,
    count: u32,
) -> Result<(), Failure> {
    let size = endpoint.test.max_size() + endpoint.test.header();
    let range = [endpoint.incoming.mr.sge(endpoint.offset(index), size as u32)];
    let requests = [ReceiveRequest { id: index as u64, data: &range }; POLL_BATCH];
    let mut left = count as usize;
    while left > 0 {
        let step = left.min(POLL_BATCH);
        endpoint.qps[index].post_receive(&requests[..step])?;
        left -= step;
    }
    Ok(())
}

/// Counts received messages, and posts their receives again.
struct Receiver<'a> {
    endpoint: &'a Endpoint,
    /// Receives of each queue pair that are not posted.
    free: Vec<u32>,
    received: u64,
}

impl<'a> Receiver<'a> {
    fn new(endpoint: &'a Endpoint) -> Self {
        Self { endpoint, free: vec![0; endpoint.qps.len()], received: 0 }
    }

    fn take(&mut self, completion: &Completion) -> Result<(), Failure> {
        let index = completion.id as usize;
        self.received += 1;
        self.free[index] += 1;
        if self.free[index] == POLL_BATCH as u32 {
            repost_receives(self.endpoint, index, std::mem::take(&mut self.free[index]))?;
        }
        Ok(())
    }

    /// The next size starts with all receives posted.
    fn finish(&mut self) -> Result<(), Failure> {
        for (index, free) in self.free.iter_mut().enumerate().filter(|(_, free)| **free > 0) {
            repost_receives(self.endpoint, index, std::mem::take(free))?;
        }
        Ok(())
    }
}

/// The side that receives: until the peer sends a control message, or has sent its result. A thread
/// per completion queue polls it. Returns the number of messages.
pub(super) fn serve(endpoint: &Endpoint, watchdog: &mut Watchdog<'_>) -> Result<u64, Failure> {
    let stop = AtomicBool::new(false);
    let name = &watchdog.peer.name.clone();
    let counts = in_threads(
        1..endpoint.cqs.len(),
        &stop,
        |group, idle| serve_group(endpoint, group, name, idle),
        |stopped| {
            let idle = || Ok(stopped() || watchdog.peer_done.is_some() || watchdog.poll_idle()?);
            let ended = serve_group(endpoint, 0, name, idle);
            stop.store(true, Ordering::Relaxed);
            ended
        },
    )?;
    Ok(counts.iter().sum())
}

/// Receives on the queue pairs of a completion queue until `idle`, which is called when a poll
/// found nothing, returns true.
fn serve_group(
    endpoint: &Endpoint,
    group: usize,
    name: &str,
    mut idle: impl FnMut() -> Result<bool, Failure>,
) -> Result<u64, Failure> {
    let mut completions = [Completion::EMPTY; POLL_BATCH];
    let mut receiver = Receiver::new(endpoint);
    loop {
        let found = endpoint.cqs[group].poll(&mut completions)?;
        if found == 0 {
            if idle()? {
                receiver.finish()?;
                return Ok(receiver.received);
            }
            endpoint.wait_event(group)?;
        }
        for completion in &completions[..found] {
            if !completion.is_success() {
                return Err(failed(completion, name));
            }
            receiver.take(completion)?;
        }
    }
}
