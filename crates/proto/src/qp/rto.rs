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
pub(super) const MIN_RTO: Duration = Duration::from_nanos(4096 << 10);
pub(super) const INITIAL_RTO: Duration = Duration::from_nanos(4096 << 13);

/// Round trips of one connection. Times are in nanoseconds.
#[derive(Clone, Debug, Default)]
pub(super) struct RtoEstimator {
    /// Smoothed round trip and its variation; 0 before the first measurement.
    smoothed: u64,
    variation: u64,
    /// A packet that was sent once, and when.
    sample: Option<(Psn, Instant)>,
    /// How many waits in a row ended without an answer.
    timeouts: u8,
    /// How long the peer has been silent, without the wait in progress.
    silence: Duration,
    /// The wait in progress.
    wait: Duration,
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
        self.measure((now - sent).as_nanos() as u64);
        Some(now - sent)
    }

    /// This packet has arrived, although one before it may be missing. Returns its round trip, if
    /// it was measured.
    pub(super) fn on_delivered(&mut self, now: Instant, psn: Psn) -> Option<Duration> {
        let (_, sent) = self.sample.take_if(|(sampled, _)| *sampled == psn)?;
        self.measure((now - sent).as_nanos() as u64);
        Some(now - sent)
    }

    /// The packet whose round trip is being measured.
    pub(super) fn sampled(&self) -> Option<Psn> {
        self.sample.map(|(psn, _)| psn)
    }

    /// The peer answered. Waits stay as long as they are until a round trip is measured: perhaps
    /// they were shorter than it, and every packet was sent twice.
    #[inline]
    pub(super) fn on_answer(&mut self) {
        self.silence = Duration::ZERO;
    }

    fn measure(&mut self, round_trip: u64) {
        self.timeouts = 0;
        if self.smoothed == 0 {
            (self.smoothed, self.variation) = (round_trip.max(1), round_trip / 2);
            return;
        }
        let deviation = self.smoothed.abs_diff(round_trip);
        self.variation = self.variation - self.variation / 4 + deviation / 4;
        self.smoothed = (self.smoothed - self.smoothed / 8 + round_trip / 8).max(1);
    }

    /// How long to wait for a response from now on.
    pub(super) fn next_wait(&mut self, timeout: Duration, retry_count: u8) -> Duration {
        // Round trips that hardly vary would leave no time for a queue that begins to build up.
        let margin = (4 * self.variation).max(self.smoothed / 2);
        let measured = Duration::from_nanos(self.smoothed.saturating_add(margin));
        let base = if self.smoothed == 0 { INITIAL_RTO } else { measured.max(MIN_RTO) };
        let wait = base.saturating_mul(1 << self.timeouts.min(20)).min(timeout);
        let left = limit(timeout, retry_count).saturating_sub(self.silence);
        self.wait = wait.min(left).max(Duration::from_nanos(1));
        self.wait
    }

    /// The wait in progress, or the last one.
    pub(super) fn wait(&self) -> Duration {
        self.wait
    }

    /// A wait ended without an answer; returns whether the peer has been silent for too long.
    pub(super) fn on_timeout(&mut self, timeout: Duration, retry_count: u8) -> bool {
        self.timeouts = self.timeouts.saturating_add(1);
        self.silence += self.wait;
        self.silence >= limit(timeout, retry_count)
    }
}

/// The longest silence of a peer: `retry_count` retries, each after `timeout`.
fn limit(timeout: Duration, retry_count: u8) -> Duration {
    timeout.saturating_mul(u32::from(retry_count) + 1)
}

#[cfg(test)]
mod tests {
    use alloc::vec::Vec;

    use super::*;

    const TIMEOUT: Duration = Duration::from_millis(500);

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
        assert!(
            slow >= Duration::from_millis(100) && slow <= Duration::from_millis(150),
            "{slow:?}"
        );
        let varying = measured(&[20_000, 60_000].repeat(20)).next_wait(TIMEOUT, 7);
        assert!(varying > Duration::from_millis(80), "{varying:?}");
        assert_eq!(measured(&[900_000; 3]).next_wait(TIMEOUT, 7), TIMEOUT);
        assert_eq!(RtoEstimator::default().next_wait(Duration::from_micros(8), 7).as_micros(), 8);
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
        let mut total = Duration::ZERO;
        let mut waits = Vec::new();
        loop {
            let wait = rto.next_wait(TIMEOUT, 7);
            waits.push(wait.as_millis());
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
            let mut answer = Duration::from_millis(100);
            loop {
                let wait = rto.next_wait(Duration::from_secs(1), 7);
                if wait >= answer {
                    break;
                }
                rto.on_timeout(Duration::from_secs(1), 7);
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
