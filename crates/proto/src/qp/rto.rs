//! The retransmission timeout: measured round trips (RFC 6298) and exponential backoff; and how
//! long the peer has been silent.
//!
//! One packet at a time is timed, and only one that was sent once (Karn's rule). Waits are at least
//! [`MIN_RTO`], because threads of the peer are scheduled, and at most the queue pair's `timeout`.
//! Waits without an answer add up: their sum, not their number, fails the queue pair.

use core::time::Duration;

use crate::psn::Psn;
use crate::time::Instant;

/// The minimum of a wait, and the wait before the first measurement: 4.2 and 33.6 ms, as the codes
/// 10 and 13 of `timeout`, which limits both.
const MIN_RTO: u64 = 4096 << 10;
const INITIAL_RTO: u64 = 4096 << 13;

/// Round trips of one connection. Times are in nanoseconds, because a timer is started for almost
/// every packet, and arithmetic of `Duration` would be half of its cost.
#[derive(Clone, Debug)]
pub(super) struct RtoEstimator {
    /// Smoothed round trip and its variation; 0 before the first measurement.
    smoothed: u64,
    variation: u64,
    /// The wait that follows from them, without backoff.
    base: u64,
    /// A packet that was sent once, and when.
    sample: Option<(Psn, Instant)>,
    /// How many waits in a row ended without an answer.
    timeouts: u8,
    /// How long the peer has been silent, without the wait in progress.
    silence: u64,
    /// The wait in progress.
    wait: u64,
}

impl Default for RtoEstimator {
    fn default() -> Self {
        let (smoothed, variation, base, sample) = (0, 0, INITIAL_RTO, None);
        Self { smoothed, variation, base, sample, timeouts: 0, silence: 0, wait: 0 }
    }
}

impl RtoEstimator {
    /// A packet that needs a response was sent for the first time.
    #[inline]
    pub(super) fn on_sent(&mut self, now: Instant, psn: Psn) {
        if self.sample.is_none() {
            self.sample = Some((psn, now));
        }
    }

    /// Packets will be sent again: a response cannot be assigned to one of the transmissions.
    pub(super) fn forget_sample(&mut self) {
        self.sample = None;
    }

    /// Everything before `unacked` is acknowledged. Returns a round trip, if one was measured.
    #[inline]
    pub(super) fn on_progress(&mut self, now: Instant, unacked: Psn) -> Option<Duration> {
        self.on_answer();
        let (_, sent) = self.sample.take_if(|(psn, _)| unacked.distance_from(*psn) > 0)?;
        Some(self.measure(now, sent))
    }

    /// This packet has arrived, although one before it may be missing. Returns its round trip, if
    /// it was measured.
    pub(super) fn on_delivered(&mut self, now: Instant, psn: Psn) -> Option<Duration> {
        let (_, sent) = self.sample.take_if(|(sampled, _)| *sampled == psn)?;
        Some(self.measure(now, sent))
    }

    /// The packet whose round trip is being measured.
    pub(super) fn sampled(&self) -> Option<Psn> {
        self.sample.map(|(psn, _)| psn)
    }

    /// The peer answered. Waits stay as long as they are until a round trip is measured: perhaps
    /// they were shorter than it, and every packet was sent twice.
    #[inline]
    pub(super) fn on_answer(&mut self) {
        self.silence = 0;
    }

    fn measure(&mut self, now: Instant, sent: Instant) -> Duration {
        let round_trip = now.as_nanos().saturating_sub(sent.as_nanos());
        self.timeouts = 0;
        if self.smoothed == 0 {
            (self.smoothed, self.variation) = (round_trip.max(1), round_trip / 2);
        } else {
            let deviation = self.smoothed.abs_diff(round_trip);
            self.variation = self.variation - self.variation / 4 + deviation / 4;
            self.smoothed = (self.smoothed - self.smoothed / 8 + round_trip / 8).max(1);
        }
        // Round trips that hardly vary would leave no time for a queue that begins to build up.
        let margin = self.variation.saturating_mul(4).max(self.smoothed / 2);
        self.base = self.smoothed.saturating_add(margin).max(MIN_RTO);
        Duration::from_nanos(round_trip)
    }

    /// How long to wait for a response from now on.
    #[inline]
    pub(super) fn next_wait(&mut self, timeout: u64, retry_count: u8) -> u64 {
        let wait = self.base.saturating_mul(1 << self.timeouts.min(20)).min(timeout);
        let left = limit(timeout, retry_count).saturating_sub(self.silence);
        self.wait = wait.min(left).max(1);
        self.wait
    }

    /// The wait in progress, or the last one.
    pub(super) fn wait(&self) -> Duration {
        Duration::from_nanos(self.wait)
    }

    /// A wait ended without an answer; returns whether the peer has been silent for too long.
    pub(super) fn on_timeout(&mut self, timeout: u64, retry_count: u8) -> bool {
        self.timeouts = self.timeouts.saturating_add(1);
        self.silence = self.silence.saturating_add(self.wait);
        self.silence >= limit(timeout, retry_count)
    }
}

/// The longest silence of a peer: `retry_count` retries, each after `timeout`.
fn limit(timeout: u64, retry_count: u8) -> u64 {
    timeout.saturating_mul(u64::from(retry_count) + 1)
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    const MILLISECOND: u64 = 1_000_000;
    const TIMEOUT: u64 = 500 * MILLISECOND;

    fn at(micros: u64) -> Instant {
        Instant::from_nanos(micros * 1000)
    }

    fn measured(round_trips: &[u64]) -> RtoEstimator {
        let mut rto = RtoEstimator::default();
        for (n, micros) in (0..).zip(round_trips) {
            rto.on_sent(at(0), Psn::new(n));
            rto.on_progress(at(*micros), Psn::new(n + 1));
        }
        rto
    }

    #[test]
    fn waits_follow_the_round_trips_within_bounds() {
        assert_eq!(RtoEstimator::default().next_wait(TIMEOUT, 7), INITIAL_RTO);
        assert_eq!(measured(&[10; 20]).next_wait(TIMEOUT, 7), MIN_RTO);
        let slow = measured(&[100_000; 40]).next_wait(TIMEOUT, 7);
        assert!((100 * MILLISECOND..=150 * MILLISECOND).contains(&slow), "{slow}");
        let varying = measured(&[20_000, 60_000].repeat(20)).next_wait(TIMEOUT, 7);
        assert!(varying > 80 * MILLISECOND, "{varying}");
        assert_eq!(measured(&[900_000; 3]).next_wait(TIMEOUT, 7), TIMEOUT);
        assert_eq!(RtoEstimator::default().next_wait(8_000, 7), 8_000);
    }

    #[test]
    fn retransmitted_packets_are_not_measured() {
        let mut rto = RtoEstimator::default();
        rto.on_sent(at(0), Psn::new(1));
        rto.forget_sample();
        rto.on_progress(at(90_000), Psn::new(2));
        assert_eq!(rto.smoothed, 0);
        // Nor is progress before the timed packet.
        rto.on_sent(at(0), Psn::new(5));
        rto.on_progress(at(90_000), Psn::new(5));
        assert_eq!(rto.smoothed, 0);
        rto.on_progress(at(90_000), Psn::new(6));
        assert_eq!(rto.smoothed, 90_000_000);
    }

    #[test]
    fn silence_is_limited_by_its_length_and_waits_double() {
        let mut rto = measured(&[10]);
        let mut total = 0;
        let mut waits = Vec::new();
        loop {
            let wait = rto.next_wait(TIMEOUT, 7);
            waits.push(wait / MILLISECOND);
            total += wait;
            if rto.on_timeout(TIMEOUT, 7) {
                break;
            }
        }
        assert_eq!(total, TIMEOUT * 8);
        assert_eq!(waits[..8], [4, 8, 16, 33, 67, 134, 268, 500]);
        rto.on_answer();
        assert_eq!(rto.next_wait(TIMEOUT, 7), TIMEOUT, "until a round trip is measured");
        assert!(!rto.on_timeout(TIMEOUT, 7));
        rto.on_sent(at(0), Psn::new(9));
        rto.on_progress(at(10), Psn::new(10));
        assert_eq!(rto.next_wait(TIMEOUT, 7), MIN_RTO);
    }

    /// A round trip longer than the first wait is measured all the same: the next wait is longer.
    #[test]
    fn a_long_round_trip_is_measured_after_timeouts() {
        let mut rto = RtoEstimator::default();
        let (mut now, mut timeouts) = (0, 0);
        for psn in 0..5 {
            rto.on_sent(at(now), Psn::new(psn));
            let mut answer = 100 * MILLISECOND;
            loop {
                let wait = rto.next_wait(1000 * MILLISECOND, 7);
                if wait >= answer {
                    break;
                }
                rto.on_timeout(1000 * MILLISECOND, 7);
                rto.forget_sample();
                answer -= wait;
                timeouts += 1;
            }
            now += 100_000;
            rto.on_progress(at(now), Psn::new(psn + 1));
        }
        // 34 ms and 67 ms were too short.
        assert_eq!((timeouts, rto.smoothed), (2, 100_000_000));
    }
}
