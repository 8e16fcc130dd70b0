//! Bandwidth: many messages under way at a time.

use std::time::{Duration, Instant};

use warpwire::verbs::{Atomic, Completion, Op, ReceiveRequest, Request};

use super::end::{End, HARVEST, failed};
use super::table::{Figures, Row};
use super::test::Verb;
use super::word::{Done, Watch};
use crate::output::Failure;

/// What may be under way or unsignaled in bytes, so that a run of large messages ends in time.
const MOST_UNDER_WAY: u64 = 1 << 30;
const MOST_UNSIGNALED: u64 = 16 << 20;
const WARM_UP: u64 = 64 << 20;
/// And at least so long: memory of a peer on this machine is mapped when it is first used, and until then packets do it.
const WARM_UP_TIME: Duration = Duration::from_millis(10);
/// The shortest time that a peak is taken over.
const WINDOW: Duration = Duration::from_millis(1);

/// When to stop: after so many messages on each queue pair, or at that time.
#[derive(Clone, Copy)]
struct Limit {
    messages: u64,
    time: Option<Duration>,
}

/// The client's side of a run.
struct Pump<'a> {
    end: &'a End,
    size: u64,
    depth: u64,
    /// One in so many is signaled.
    every: u64,
    /// Messages posted, and ended, on each queue pair.
    posted: Vec<u64>,
    ended: Vec<u64>,
}

pub(super) fn run(end: &End, size: u64, watch: &mut Watch<'_>) -> Result<Done, Failure> {
    let depth = u64::from(end.test.depth).min((MOST_UNDER_WAY / size).max(2));
    let every = (depth / 4).min(MOST_UNSIGNALED / size).max(1);
    let none = vec![0; end.qps.len()];
    let mut pump = Pump { end, size, depth, every, posted: none.clone(), ended: none };
    let some = depth.min((WARM_UP / size).max(1));
    let (mut warm_up, begin) = (0, Instant::now());
    while warm_up == 0 || begin.elapsed() < WARM_UP_TIME {
        warm_up += some;
        pump.run(Limit { messages: warm_up, time: None }, watch)?;
    }
    let before: u64 = pump.ended.iter().sum();
    let time = end.test.seconds.map(Duration::from_secs_f64);
    let messages = end.test.iterations(size).saturating_add(warm_up);
    let (took, peak) = pump.run(Limit { messages, time }, watch)?;
    let iterations = pump.ended.iter().sum::<u64>() - before;
    let rate = iterations as f64 / took.as_secs_f64();
    let row = Row::new(size, iterations, Figures::bw(size, rate, peak.max(rate)));
    Ok(Done { per_qp: pump.ended, row })
}

impl Pump<'_> {
    /// Posts and takes completions up to the limit; returns the time, and the most messages a second in any window.
    fn run(&mut self, limit: Limit, watch: &mut Watch<'_>) -> Result<(Duration, f64), Failure> {
        let start = Instant::now();
        let (mut window, mut in_window, mut peak) = (start, 0, 0.0_f64);
        let mut over = false;
        let mut completions = [Completion::EMPTY; HARVEST];
        loop {
            if !over {
                self.post_all(limit.messages)?;
            }
            let found = self.end.cq.poll(&mut completions)?;
            if found == 0 {
                watch.silent()?;
            }
            for completion in &completions[..found] {
                if !completion.is_success() {
                    return Err(failed(completion, &watch.peer.name));
                }
                let (index, count) = ((completion.id >> 32) as usize, completion.id & 0xffff_ffff);
                self.ended[index] += count;
                in_window += count;
            }
            if found > 0 && in_window >= self.depth && window.elapsed() >= WINDOW {
                let now = Instant::now();
                peak = peak.max(in_window as f64 / (now - window).as_secs_f64());
                (window, in_window) = (now, 0);
            }
            over = over || limit.time.is_some_and(|time| start.elapsed() >= time);
            let all_posted = over || self.posted.iter().all(|posted| *posted >= limit.messages);
            if all_posted && self.posted == self.ended {
                return Ok((start.elapsed(), peak));
            }
        }
    }

    fn post_all(&mut self, messages: u64) -> Result<(), Failure> {
        for index in 0..self.posted.len() {
            loop {
                let under_way = self.posted[index] - self.ended[index];
                let count = self.every.min(messages.saturating_sub(self.posted[index]));
                if count == 0 || under_way + count > self.depth.max(self.every) {
                    break;
                }
                self.post(index, count)?;
            }
        }
        Ok(())
    }

    /// Posts so many messages; the last one's completion stands for all.
    fn post(&mut self, index: usize, count: u64) -> Result<(), Failure> {
        let end = self.end;
        let (offset, remote) = (end.offset(index), end.remote(index));
        let (op, memory) = match end.test.verb {
            Verb::Write => (Op::Write(remote), &end.outgoing),
            Verb::Send => (Op::Send, &end.outgoing),
            Verb::Read => (Op::Read(remote), &end.incoming),
            Verb::Atomic => (Op::Atomic(remote, Atomic::FetchAdd { add: 1 }), &end.incoming),
        };
        let range = [memory.mr.sge(offset, self.size as u32)];
        let id = (index as u64) << 32 | count;
        let last = Request::new(id, op).with(&range);
        let mut requests = [last.unsignaled(); HARVEST];
        let mut left = count as usize;
        while left > 0 {
            let step = left.min(HARVEST);
            left -= step;
            if left == 0 {
                requests[step - 1] = last;
            }
            end.qps[index].post_send(&requests[..step])?;
        }
        self.posted[index] += count;
        Ok(())
    }
}

/// Posts all receives of the server.
pub(super) fn post_receives(end: &End, size: u64) -> Result<(), Failure> {
    let count = end.test.receives(end.role);
    for index in 0..end.qps.len() {
        give_back(end, size, index, count)?;
    }
    Ok(())
}

/// Posts so many receives.
pub(super) fn give_back(end: &End, size: u64, index: usize, count: u32) -> Result<(), Failure> {
    let range = [end.incoming.mr.sge(end.offset(index), size as u32)];
    let requests = [ReceiveRequest { id: index as u64, data: &range }; HARVEST];
    let mut left = count as usize;
    while left > 0 {
        let step = left.min(HARVEST);
        end.qps[index].post_receive(&requests[..step])?;
        left -= step;
    }
    Ok(())
}

/// The server's side: takes what comes until the client has said something.
pub(super) fn serve(end: &End, size: u64, watch: &mut Watch<'_>) -> Result<(), Failure> {
    let mut completions = [Completion::EMPTY; HARVEST];
    let mut free = vec![0; end.qps.len()];
    loop {
        let found = end.cq.poll(&mut completions)?;
        if found == 0 && watch.idle()? {
            return Ok(());
        }
        for completion in &completions[..found] {
            if !completion.is_success() {
                return Err(failed(completion, &watch.peer.name));
            }
            let index = completion.id as usize;
            free[index] += 1;
            if free[index] == HARVEST as u32 {
                give_back(end, size, index, std::mem::take(&mut free[index]))?;
            }
        }
    }
}
