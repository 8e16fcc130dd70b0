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
const RAISES_TO_FULL: u64 = 32;
const SLOWEST_SHARE: u64 = 1024;

/// The sending rate of one queue pair.
#[derive(Clone, Debug)]
pub(super) struct Pace {
    /// Bytes in a second that the line carries; `None` turns pacing off.
    line: Option<u64>,
    rate: u64,
    /// When the next packet with payload may go.
    next: Instant,
    last_cut: Instant,
    last_raise: Instant,
}

impl Pace {
    pub(super) fn new(line: Option<u64>) -> Self {
        let start = Instant::default();
        let rate = line.unwrap_or(0);
        Self { line, rate, next: start, last_cut: start, last_raise: start }
    }

    /// Bytes in a second at present; `None` when nothing is held back.
    pub(super) fn rate(&self) -> Option<u64> {
        self.line.filter(|line| self.rate < *line).map(|_| self.rate)
    }

    /// Whether a packet with payload may go now.
    pub(super) fn is_open(&self, now: Instant) -> bool {
        self.line.is_none() || now >= self.next
    }

    /// When it opens again, if it is closed.
    pub(super) fn opens_at(&self, now: Instant) -> Instant {
        if self.is_open(now) { Instant::NEVER } else { self.next }
    }

    /// A packet with that much payload went.
    pub(super) fn spend(&mut self, now: Instant, bytes: u32) {
        let Some(line) = self.line else { return };
        if self.rate < line {
            self.raise(now, line);
            let nanos = u64::from(bytes).saturating_mul(1_000_000_000) / self.rate.max(1);
            self.next = self.next.max(now) + Duration::from_nanos(nanos);
        }
    }

    /// A notification came.
    pub(super) fn cut(&mut self, now: Instant) {
        let Some(line) = self.line else { return };
        let first = self.rate == line;
        if first || now - self.last_cut >= CUT_INTERVAL {
            self.rate = (self.rate / 2).max(line / SLOWEST_SHARE).max(1);
            self.last_cut = now;
        }
        self.last_raise = now;
    }

    fn raise(&mut self, now: Instant, line: u64) {
        let quiet = (now - self.last_raise).as_nanos() / RAISE_INTERVAL.as_nanos();
        if quiet > 0 {
            let steps = u64::try_from(quiet).unwrap_or(u64::MAX);
            let gain = steps.saturating_mul((line / RAISES_TO_FULL).max(1));
            self.rate = self.rate.saturating_add(gain).min(line);
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
        let mut pace = Pace::new(Some(LINE));
        assert_eq!(pace.rate(), None);
        pace.cut(at(1000));
        assert_eq!(pace.rate(), Some(LINE / 2));
        pace.cut(at(1010)); // too soon after the first
        assert_eq!(pace.rate(), Some(LINE / 2));
        pace.cut(at(1060));
        assert_eq!(pace.rate(), Some(LINE / 4));
        pace.spend(at(1060), 1000);
        assert!(!pace.is_open(at(1063)));
        assert!(pace.is_open(at(1064)));
        pace.spend(at(20_000), 1000);
        assert_eq!(pace.rate(), None);
    }

    #[test]
    fn it_never_stops_altogether() {
        let mut pace = Pace::new(Some(LINE));
        (0..100).for_each(|turn| pace.cut(at(1000 * turn)));
        assert_eq!(pace.rate(), Some(LINE / SLOWEST_SHARE));
    }

    #[test]
    fn without_the_option_nothing_is_held_back() {
        let mut pace = Pace::new(None);
        pace.cut(at(1));
        pace.spend(at(1), u32::MAX);
        assert!(pace.is_open(at(1)));
        assert_eq!(pace.opens_at(at(1)), Instant::NEVER);
    }
}
