//! Bandwidth test: many messages in flight.

use std::time::{Duration, Instant};

use warpwire::verbs::{Atomic, Completion, ReceiveRequest, SendRequest, WrOp};

use super::control::{Done, Watchdog};
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
/// Min warm-up time: memory of a peer on this machine is mapped after its first use; until then
/// data travels in packets.
const WARM_UP_TIME: Duration = Duration::from_millis(10);
/// Min window of a peak rate.
const WINDOW: Duration = Duration::from_millis(1);

/// When to stop: at `messages` per queue pair, or after `time`.
#[derive(Clone, Copy)]
struct Limit {
    messages: u64,
    time: Option<Duration>,
}

/// The client's side of a test.
struct BwSender<'a> {
    endpoint: &'a Endpoint,
    size: u64,
    depth: u64,
    /// Every n-th message is signaled.
    signal_interval: u64,
    /// Messages posted, per queue pair.
    posted: Vec<u64>,
    /// Messages completed, per queue pair.
    completed: Vec<u64>,
}

pub(super) fn run(
    endpoint: &Endpoint,
    size: u64,
    watchdog: &mut Watchdog<'_>,
) -> Result<Done, Failure> {
    let depth = u64::from(endpoint.test.depth).min((MAX_IN_FLIGHT / size).max(2));
    let signal_interval = (depth / 4).min(MAX_UNSIGNALED / size).max(1);
    let none = vec![0; endpoint.qps.len()];
    let mut sender =
        BwSender { endpoint, size, depth, signal_interval, posted: none.clone(), completed: none };
    let some = depth.min((WARM_UP / size).max(1));
    let (mut warm_up, begin) = (0, Instant::now());
    while warm_up == 0 || begin.elapsed() < WARM_UP_TIME {
        warm_up += some;
        sender.run(Limit { messages: warm_up, time: None }, watchdog)?;
    }
    let before: u64 = sender.completed.iter().sum();
    let time = endpoint.test.seconds.map(Duration::from_secs_f64);
    let messages = endpoint.test.iterations(size).saturating_add(warm_up);
    let (took, peak) = sender.run(Limit { messages, time }, watchdog)?;
    let iterations = sender.completed.iter().sum::<u64>() - before;
    let rate = iterations as f64 / took.as_secs_f64();
    let row = Row::new(size, iterations, Figures::bw(size, rate, peak.max(rate)));
    Ok(Done { per_qp: sender.completed, row })
}

impl BwSender<'_> {
    /// Posts and polls up to the limit; returns the elapsed time, and the peak messages per second.
    fn run(
        &mut self,
        limit: Limit,
        watchdog: &mut Watchdog<'_>,
    ) -> Result<(Duration, f64), Failure> {
        let start = Instant::now();
        let (mut window, mut in_window, mut peak) = (start, 0, 0.0_f64);
        let mut stopped = false;
        let mut completions = [Completion::EMPTY; POLL_BATCH];
        loop {
            if !stopped {
                self.post_all(limit.messages)?;
            }
            let found = self.endpoint.cq.poll(&mut completions)?;
            if found == 0 {
                watchdog.check_alive()?;
            }
            for completion in &completions[..found] {
                if !completion.is_success() {
                    return Err(failed(completion, &watchdog.peer.name));
                }
                let (index, count) = ((completion.id >> 32) as usize, completion.id & 0xffff_ffff);
                self.completed[index] += count;
                in_window += count;
            }
            if found > 0 && in_window >= self.depth && window.elapsed() >= WINDOW {
                let now = Instant::now();
                peak = peak.max(in_window as f64 / (now - window).as_secs_f64());
                (window, in_window) = (now, 0);
            }
            stopped = stopped || limit.time.is_some_and(|time| start.elapsed() >= time);
            let all_posted = stopped || self.posted.iter().all(|posted| *posted >= limit.messages);
            if all_posted && self.posted == self.completed {
                return Ok((start.elapsed(), peak));
            }
        }
    }

    fn post_all(&mut self, messages: u64) -> Result<(), Failure> {
        for index in 0..self.posted.len() {
            loop {
                let in_flight = self.posted[index] - self.completed[index];
                let count = self.signal_interval.min(messages.saturating_sub(self.posted[index]));
                if count == 0 || in_flight + count > self.depth.max(self.signal_interval) {
                    break;
                }
                self.post(index, count)?;
            }
        }
        Ok(())
    }

    /// Posts `count` messages, of which only the last is signaled.
    fn post(&mut self, index: usize, count: u64) -> Result<(), Failure> {
        let endpoint = self.endpoint;
        let (offset, remote) = (endpoint.offset(index), endpoint.remote(index));
        let (op, memory) = match endpoint.test.verb {
            Verb::Write => (WrOp::Write(remote), &endpoint.outgoing),
            Verb::Send => (WrOp::Send, &endpoint.outgoing),
            Verb::Read => (WrOp::Read(remote), &endpoint.incoming),
            Verb::Atomic => (WrOp::Atomic(remote, Atomic::FetchAdd { add: 1 }), &endpoint.incoming),
        };
        let range = [memory.mr.sge(offset, self.size as u32)];
        let id = (index as u64) << 32 | count;
        let last = SendRequest::new(id, op).with(&range);
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
        self.posted[index] += count;
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
    let size = endpoint.test.max_size();
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

/// The server's side: receives until the client sends a control message.
pub(super) fn serve(endpoint: &Endpoint, watchdog: &mut Watchdog<'_>) -> Result<(), Failure> {
    let mut completions = [Completion::EMPTY; POLL_BATCH];
    let mut free = vec![0; endpoint.qps.len()];
    loop {
        let found = endpoint.cq.poll(&mut completions)?;
        if found == 0 && watchdog.poll_idle()? {
            // The next size starts with all receives posted.
            return (0..free.len()).try_for_each(|at| repost_receives(endpoint, at, free[at]));
        }
        for completion in &completions[..found] {
            if !completion.is_success() {
                return Err(failed(completion, &watchdog.peer.name));
            }
            let index = completion.id as usize;
            free[index] += 1;
            if free[index] == POLL_BATCH as u32 {
                repost_receives(endpoint, index, std::mem::take(&mut free[index]))?;
            }
        }
    }
}
