//! Latency test: one message at a time.

use std::time::{Duration, Instant};

use warpwire::verbs::{Atomic, Completion, WrOp};

use super::bw::repost_receives;
use super::control::{Done, Watchdog};
use super::endpoint::{Endpoint, failed};
use super::table::{Figures, Row};
use super::test::Verb;
use crate::output::Failure;

/// Min warm-up messages.
const WARM_UPS: u64 = 20;
/// Min warm-up time: two polling processes may start on one core, until the scheduler separates
/// them.
const WARM_UP: Duration = Duration::from_millis(50);
/// Max times kept for the percentiles; messages beyond are only counted.
const MAX_SAMPLES: usize = 1 << 24;

/// Messages between two decisions on how to poll.
const ADAPT_INTERVAL: u64 = 256;
/// Polls of memory per poll of the completion queue, if messages arrive without packets.
const POLLS: u32 = 256;

/// Max posted sends whose completions were not polled, far below the lengths of the queues: on a
/// busy machine reply after reply may be there before the completion queue is polled once.
const MAX_IN_FLIGHT: u64 = 32;

/// State of either side of a ping-pong.
struct PingPong<'a> {
    endpoint: &'a Endpoint,
    size: u64,
    /// The message, if it is small and in host memory: sent inline.
    inline_data: Option<Vec<u8>>,
    /// Posted sends whose completions were not polled yet.
    in_flight: u64,
    /// Polls of memory per poll of the completion queue.
    polls: u32,
    direct_seen: u64,
}

/// The result, and the times of single messages in nanoseconds, in the order of measurement.
pub(super) fn run(
    endpoint: &Endpoint,
    size: u64,
    watchdog: &mut Watchdog<'_>,
) -> Result<(Done, Vec<u32>), Failure> {
    let mut ping_pong = PingPong::new(endpoint, size);
    let time = endpoint.test.seconds.map(Duration::from_secs_f64);
    let iterations = endpoint.test.iterations(size);
    let share = if endpoint.test.is_ping_pong() { 2 } else { 1 };
    let mut times: Vec<u32> = Vec::with_capacity(iterations.min(1 << 20) as usize);
    let (mut count, begin) = (0, Instant::now());
    while count < WARM_UPS || begin.elapsed() < WARM_UP {
        ping_pong.ping(count, watchdog)?;
        count += 1;
        ping_pong.adapt_polling(count);
    }
    let (begin, mut done) = (Instant::now(), 0);
    // A round lasts from before its post until its reply has arrived. The clock must not be read
    // after the post: a thread that loses its core in between reads it late, and the round seems
    // shorter than it was.
    let mut before = begin;
    while done < iterations && !time.is_some_and(|time| done > 0 && before - begin >= time) {
        ping_pong.ping(count, watchdog)?;
        (count, done) = (count + 1, done + 1);
        let now = Instant::now();
        if times.len() < MAX_SAMPLES {
            let took = (now - before).as_nanos() / share;
            times.push(u32::try_from(took).unwrap_or(u32::MAX));
        }
        before = now;
    }
    ping_pong.drain_to(0, watchdog)?;
    let row = Row::new(size, done, Figures::lat(&times));
    Ok((Done { per_qp: vec![count], row }, times))
}

/// The server's side: replies until the client sends a control message.
pub(super) fn serve(
    endpoint: &Endpoint,
    size: u64,
    watchdog: &mut Watchdog<'_>,
) -> Result<(), Failure> {
    let mut ping_pong = PingPong::new(endpoint, size);
    let mut count = 0;
    while ping_pong.wait(count, watchdog, true)? {
        ping_pong.post(count, watchdog)?;
        count += 1;
        ping_pong.adapt_polling(count);
    }
    // The client has all replies; their completions may still be in flight.
    ping_pong.drain_quietly(watchdog)
}

/// Last byte of message `number`: never zero, and different from the previous message's.
fn marker(number: u64) -> u8 {
    (number % 255) as u8 + 1
}

impl<'a> PingPong<'a> {
    fn new(endpoint: &'a Endpoint, size: u64) -> Self {
        let inline_data = endpoint.inline_data(0, size);
        Self { endpoint, size, inline_data, in_flight: 0, polls: 1, direct_seen: 0 }
    }

    /// If messages arrive by direct access, the device need not be polled for them to arrive: poll
    /// mostly memory then.
    #[inline]
    fn adapt_polling(&mut self, count: u64) {
        if count.is_multiple_of(ADAPT_INTERVAL) && self.endpoint.test.verb == Verb::Write {
            let stats = self.endpoint.context.stats();
            let direct_seen = stats.map_or(0, |stats| stats.direct.by_peers);
            let mostly_direct = direct_seen
                .wrapping_sub(std::mem::replace(&mut self.direct_seen, direct_seen))
                >= ADAPT_INTERVAL / 2;
            self.polls = if mostly_direct { POLLS } else { 1 };
        }
    }

    /// Posts a message, and waits until it has arrived.
    fn ping(&mut self, number: u64, watchdog: &mut Watchdog<'_>) -> Result<(), Failure> {
        self.post(number, watchdog)?;
        self.wait_arrival(number, watchdog)
    }

    /// Waits for the reply to message `number`, or for its completion (read, atomic).
    fn wait_arrival(&mut self, number: u64, watchdog: &mut Watchdog<'_>) -> Result<(), Failure> {
        match self.endpoint.test.verb {
            Verb::Write | Verb::Send => self.wait(number, watchdog, false).map(drop),
            Verb::Read | Verb::Atomic => self.drain_to(0, watchdog),
        }
    }

    /// Posts message `number`.
    fn post(&mut self, number: u64, watchdog: &mut Watchdog<'_>) -> Result<(), Failure> {
        self.drain_to(MAX_IN_FLIGHT - 1, watchdog)?;
        let endpoint = self.endpoint;
        let remote = endpoint.remote(0);
        let (op, memory) = match endpoint.test.verb {
            Verb::Write => (WrOp::Write(remote), &endpoint.outgoing),
            Verb::Send => (WrOp::Send, &endpoint.outgoing),
            Verb::Read => (WrOp::Read(remote), &endpoint.incoming),
            Verb::Atomic => (WrOp::Atomic(remote, Atomic::FetchAdd { add: 1 }), &endpoint.incoming),
        };
        let marked = endpoint.test.verb == Verb::Write;
        let request = endpoint.request(0, number, op);
        if let Some(inline_data) = &mut self.inline_data {
            let bytes = &mut inline_data[..self.size as usize];
            if marked {
                bytes[self.size as usize - 1] = marker(number);
            }
            endpoint.qps[0].post_send(&[request.inline(bytes)])?;
        } else {
            if marked {
                endpoint.outgoing.set_byte(self.size - 1, marker(number))?;
            }
            let range = [memory.mr.sge(0, self.size as u32)];
            endpoint.qps[0].post_send(&[request.with(&range)])?;
        }
        self.in_flight += 1;
        Ok(())
    }

    /// Polls until message `number` arrives (true) or, if `may_end`, until the peer sends a control
    /// message (false).
    fn wait(
        &mut self,
        number: u64,
        watchdog: &mut Watchdog<'_>,
        may_end: bool,
    ) -> Result<bool, Failure> {
        let by_memory = self.endpoint.test.verb == Verb::Write;
        let wanted = marker(number);
        if self.polls > 1 && self.in_flight > 0 {
            // The last send has most likely completed, and the reply is still in flight.
            self.poll(watchdog)?;
        }
        loop {
            for _ in 0..self.polls {
                if by_memory && self.endpoint.incoming.byte(self.size - 1)? == wanted {
                    return Ok(true);
                }
                // Let the peer get the cache line that is polled here.
                std::hint::spin_loop();
            }
            let (found, received) = self.poll(watchdog)?;
            if received {
                return Ok(true);
            }
            if found {
                continue;
            }
            if may_end && watchdog.poll_idle()? {
                return Ok(false);
            }
            if !may_end {
                watchdog.check_alive()?;
            }
            self.endpoint.wait_event(0)?;
        }
    }

    /// Polls one completion; returns whether there was one, and whether it was a receive.
    #[inline]
    fn poll(&mut self, watchdog: &Watchdog<'_>) -> Result<(bool, bool), Failure> {
        let mut one = [Completion::EMPTY];
        if self.endpoint.cqs[0].poll(&mut one)? == 0 {
            return Ok((false, false));
        }
        let [completion] = one;
        if !completion.is_success() {
            return Err(failed(&completion, &watchdog.peer.name));
        }
        let received = completion.is_receive();
        match received {
            true => repost_receives(self.endpoint, 0, 1)?,
            // The last completions of the previous size may come late.
            false => self.in_flight = self.in_flight.saturating_sub(1),
        }
        Ok((true, received))
    }

    /// Waits until at most `left` sends have not completed.
    #[inline]
    fn drain_to(&mut self, left: u64, watchdog: &mut Watchdog<'_>) -> Result<(), Failure> {
        while self.in_flight > left {
            if !self.poll(watchdog)?.0 {
                watchdog.check_alive()?;
                self.endpoint.wait_event(0)?;
            }
        }
        Ok(())
    }

    /// Waits for all sends, for 1 s at most, while a control message of the peer is waiting.
    fn drain_quietly(&mut self, watchdog: &Watchdog<'_>) -> Result<(), Failure> {
        let start = Instant::now();
        while self.in_flight > 0 && start.elapsed() < Duration::from_secs(1) {
            self.poll(watchdog)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::marker;

    #[test]
    fn markers_are_nonzero_and_differ_from_their_neighbours() {
        for number in 0..1000 {
            assert!(marker(number) != 0 && marker(number) != marker(number + 1));
        }
    }
}
