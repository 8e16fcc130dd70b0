//! A rate that congestion notifications lower and quiet time raises again.
//!
//! A simple relative of DCQCN: a notification halves the rate, at most once in [`CUT_INTERVAL`]; each
//! [`RAISE_INTERVAL`] without one adds a share of the line's rate, until the line's rate is reached and
//! nothing is paced any more.

use core::time::Duration;

use crate::time::Instant;

/// The least time between two cuts, and between two notifications that we send.
pub const CUT_INTERVAL: Duration = Duration::from_micros(50);
/// After this long without a notification, the rate rises.
pub const RAISE_INTERVAL: Duration = Duration::from_micros(300);
const RAISE_STEPS: u64 = 32;
const MIN_RATE_DIVISOR: u64 = 1024;

/// The sending rate of one queue pair.
#[derive(Clone, Debug)]
pub(super) struct Pacer {
    /// Bytes in a second that the line carries; `None` turns pacing off.
    line_rate: Option<u64>,
    rate: u64,
    /// When the next packet with payload may go.
    next: Instant,
    last_cut: Instant,
    last_raise: Instant,
}

impl Pacer {
    pub(super) fn new(line_rate: Option<u64>) -> Self {
        let start = Instant::default();
        let rate = line_rate.unwrap_or(0);
        Self { line_rate, rate, next: start, last_cut: start, last_raise: start }
    }

    /// Bytes in a second at present; `None` when nothing is held back.
    pub(super) fn rate(&self) -> Option<u64> {
        self.line_rate.filter(|line_rate| self.rate < *line_rate).map(|_| self.rate)
    }

    /// Whether a packet with payload may go now.
    pub(super) fn is_open(&self, now: Instant) -> bool {
        self.line_rate.is_none() || now >= self.next
    }

    /// When it opens again, if it is closed.
    pub(super) fn opens_at(&self, now: Instant) -> Instant {
        if self.is_open(now) { Instant::NEVER } else { self.next }
    }

    /// A packet with that much payload went.
    pub(super) fn consume(&mut self, now: Instant, bytes: u32) {
        let Some(line_rate) = self.line_rate else { return };
        if self.rate < line_rate {
            self.raise(now, line_rate);
            let nanos = u64::from(bytes).saturating_mul(1_000_000_000) / self.rate.max(1);
            self.next = self.next.max(now) + Duration::from_nanos(nanos);
        }
    }

    /// A notification came.
    pub(super) fn cut(&mut self, now: Instant) {
        let Some(line_rate) = self.line_rate else { return };
        let first = self.rate == line_rate;
        if first || now - self.last_cut >= CUT_INTERVAL {
            self.rate = (self.rate / 2).max(line_rate / MIN_RATE_DIVISOR).max(1);
            self.last_cut = now;
        }
        self.last_raise = now;
    }

    fn raise(&mut self, now: Instant, line_rate: u64) {
        let intervals = (now - self.last_raise).as_nanos() / RAISE_INTERVAL.as_nanos();
        if intervals > 0 {
            let steps = u64::try_from(intervals).unwrap_or(u64::MAX);
            let gain = steps.saturating_mul((line_rate / RAISE_STEPS).max(1));
            self.rate = self.rate.saturating_add(gain).min(line_rate);
            self.last_raise = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LINE: u64 = 1_000_000_000; // one byte in a nanosecond

    fn at(micros: u64) -> Instant {
        Instant::from_nanos(micros * 1000)
    }

    #[test]
    fn a_notification_halves_and_quiet_time_restores() {
        let mut pacer = Pacer::new(Some(LINE));
        assert_eq!(pacer.rate(), None);
        pacer.cut(at(1000));
        assert_eq!(pacer.rate(), Some(LINE / 2));
        pacer.cut(at(1010)); // too soon after the first
        assert_eq!(pacer.rate(), Some(LINE / 2));
        pacer.cut(at(1060));
        assert_eq!(pacer.rate(), Some(LINE / 4));
        pacer.consume(at(1060), 1000);
        assert!(!pacer.is_open(at(1063)));
        assert!(pacer.is_open(at(1064)));
        pacer.consume(at(20_000), 1000);
        assert_eq!(pacer.rate(), None);
    }

    #[test]
    fn it_never_stops_altogether() {
        let mut pacer = Pacer::new(Some(LINE));
        (0..100).for_each(|turn| pacer.cut(at(1000 * turn)));
        assert_eq!(pacer.rate(), Some(LINE / MIN_RATE_DIVISOR));
    }

    #[test]
    fn without_the_option_nothing_is_held_back() {
        let mut pacer = Pacer::new(None);
        pacer.cut(at(1));
        pacer.consume(at(1), u32::MAX);
        assert!(pacer.is_open(at(1)));
        assert_eq!(pacer.opens_at(at(1)), Instant::NEVER);
    }
}
