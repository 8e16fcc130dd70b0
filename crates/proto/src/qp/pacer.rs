//! Pacing: congestion notifications lower the sending rate, time without them raises it again.
//!
//! A simplified DCQCN: a notification halves the rate, at most once per [`CUT_INTERVAL`]; each
//! [`RAISE_INTERVAL`] without one adds 1/32 of the line rate, until the line rate is reached and
//! pacing stops.

use core::time::Duration;

use crate::time::Instant;

/// Minimum time between two cuts, and between two notifications that we send.
pub const CUT_INTERVAL: Duration = Duration::from_micros(50);
/// The rate rises after this long without a notification.
pub const RAISE_INTERVAL: Duration = Duration::from_micros(300);
const RAISE_STEPS: u64 = 32;
const MIN_RATE_DIVISOR: u64 = 1024;

/// The sending rate of one queue pair.
#[derive(Clone, Debug)]
pub(super) struct Pacer {
    /// Line rate in bytes per second; `None` disables pacing.
    line_rate: Option<u64>,
    rate: u64,
    /// When the next packet with payload may be sent.
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

    /// The current rate in bytes per second; `None` when sending is not paced.
    pub(super) fn rate(&self) -> Option<u64> {
        self.line_rate.filter(|line_rate| self.rate < *line_rate).map(|_| self.rate)
    }

    /// Whether a packet with payload may be sent now.
    pub(super) fn is_open(&self, now: Instant) -> bool {
        self.line_rate.is_none() || now >= self.next
    }

    /// When a packet may be sent again; `NEVER` if one may be sent now.
    pub(super) fn opens_at(&self, now: Instant) -> Instant {
        if self.is_open(now) { Instant::NEVER } else { self.next }
    }

    /// Accounts for a packet with this much payload.
    pub(super) fn consume(&mut self, now: Instant, bytes: u32) {
        let Some(line_rate) = self.line_rate else { return };
        if self.rate < line_rate {
            self.raise(now, line_rate);
            let nanos = u64::from(bytes).saturating_mul(1_000_000_000) / self.rate.max(1);
            self.next = self.next.max(now) + Duration::from_nanos(nanos);
        }
    }

    /// Handles a congestion notification.
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

    const LINE: u64 = 1_000_000_000; // one byte per nanosecond

    fn at(micros: u64) -> Instant {
        Instant::from_nanos(micros * 1000)
    }

    #[test]
    fn notification_halves_the_rate_and_time_restores_it() {
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
    fn rate_has_a_minimum() {
        let mut pacer = Pacer::new(Some(LINE));
        (0..100).for_each(|round| pacer.cut(at(1000 * round)));
        assert_eq!(pacer.rate(), Some(LINE / MIN_RATE_DIVISOR));
    }

    #[test]
    fn without_line_rate_nothing_is_paced() {
        let mut pacer = Pacer::new(None);
        pacer.cut(at(1));
        pacer.consume(at(1), u32::MAX);
        assert!(pacer.is_open(at(1)));
        assert_eq!(pacer.opens_at(at(1)), Instant::NEVER);
    }
}
