//! Congestion control: how many packets the queue pairs that lead to one peer may have in flight
//! together.
//!
//! State belongs to a [`Path`], not to a queue pair: 64 queue pairs to one peer are as polite as
//! one. A queue pair reports what it saw ([`PathSignals`]); the path answers with room for more
//! packets. It is sans-IO like the rest of the protocol, and has no timer of its own.
//!
//! The default is [`Cubic`] (RFC 9438), with the slow start of HyStart++ (RFC 9406), which notices
//! a queue by its delay, and the smaller reduction for ECN marks of RFC 8511. The reason: software
//! RoCE runs beside TCP, mostly CUBIC, through queues that drop. An algorithm that keeps queues
//! short by delay alone (Swift, TIMELY) gets nothing there, and one that relies on marks (DCQCN,
//! DCTCP) needs switches that mark. [`FixedWindow`] is for lossless networks and for comparisons.

use alloc::boxed::Box;
use core::fmt;
use core::time::Duration;

use crate::time::Instant;

/// Packets in flight before the first acknowledgement (RFC 6928).
const INITIAL_WINDOW: u64 = 10;
/// Bounds of a window, in packets.
const MIN_WINDOW: u64 = 2;
const MAX_WINDOW: u64 = 1 << 16;

/// Windows are fixed-point numbers with this many fractional bits.
const FRACTION: u32 = 16;
const ONE: u64 = 1 << FRACTION;

/// Payload of TCP's segments on Ethernet, in bytes. Windows grow by packets per time; where packets
/// are smaller, they grow by more of them, to get as many bytes as TCP.
const SEGMENT: u32 = 1448;

/// What a queue pair has seen since it was last asked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PathSignals {
    /// Packets that were acknowledged.
    pub acked: u32,
    /// A measured round trip.
    pub round_trip: Option<Duration>,
    /// A packet was lost: the peer reported a gap.
    pub lost: bool,
    /// No answer came in time to a packet that was sent this long ago, or longer.
    pub timed_out: Option<Duration>,
    /// The answer that did not come in time came after all: nothing was lost.
    pub spurious_timeout: bool,
    /// The peer received packets with a congestion mark (ECN).
    pub marked: bool,
}

/// Why a window is reduced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CongestionSignal {
    /// A packet was lost.
    Loss,
    /// A packet was marked.
    Mark,
    /// The path has been silent.
    Silence,
}

/// An acknowledgement, as an algorithm sees it.
#[derive(Clone, Copy, Debug)]
pub struct PathAck {
    /// When it arrived.
    pub now: Instant,
    /// Packets that it acknowledges.
    pub packets: u32,
    /// A round trip measured with it.
    pub round_trip: Option<Duration>,
    /// The smoothed round trip of the path.
    pub smoothed_round_trip: Duration,
    /// Whether the window, and not the sender, limited what was in flight.
    pub window_limited: bool,
}

/// An algorithm of congestion control.
pub trait CongestionControl: fmt::Debug + Send {
    /// How many packets may be in flight, at least one.
    fn window(&self) -> u32;
    /// Packets were acknowledged.
    fn on_ack(&mut self, ack: &PathAck);
    /// The network is congested. Called at most once per round trip.
    fn on_congestion(&mut self, now: Instant, signal: CongestionSignal);
    /// The last call of [`on_congestion`](Self::on_congestion) was a mistake: answers were late,
    /// and nothing was lost. By default nothing is undone.
    fn undo_congestion(&mut self) {}
    /// Packets carry up to this many bytes. By default it makes no difference.
    fn set_mtu(&mut self, bytes: u32) {
        let _ = bytes;
    }
}

/// A window that never changes.
#[derive(Clone, Copy, Debug)]
pub struct FixedWindow(pub u32);

impl CongestionControl for FixedWindow {
    fn window(&self) -> u32 {
        self.0.max(1)
    }

    fn on_ack(&mut self, _: &PathAck) {}

    fn on_congestion(&mut self, _: Instant, _: CongestionSignal) {}
}

/// The way to one peer, shared by the queue pairs that lead there.
///
/// ```
/// use core::time::Duration;
/// use warpwire_proto::Instant;
/// use warpwire_proto::congestion::{Path, PathSignals};
/// let mut path = Path::default();
/// assert_eq!(path.room(), 10);
/// path.set_in_flight(0, 10);
/// assert_eq!(path.room(), 0);
/// path.set_in_flight(10, 0);
/// let round_trip = Some(Duration::from_micros(50));
/// let all = PathSignals { acked: 10, round_trip, ..PathSignals::default() };
/// path.on_signals(Instant::from_nanos(50_000), &all);
/// assert_eq!(path.room(), 20);
/// ```
#[derive(Debug)]
pub struct Path {
    control: Box<dyn CongestionControl>,
    mtu: u32,
    in_flight: u32,
    /// The largest number in flight since the last acknowledgement.
    peak: u32,
    /// Smoothed, in nanoseconds; 0 before the first measurement.
    smoothed: u64,
    last_ack: Instant,
    /// When the window was last reduced, and whether a timeout was the reason.
    reduced_at: Instant,
    reduced_by_timeout: bool,
}

impl Default for Path {
    fn default() -> Self {
        Self::new(Box::new(Cubic::default()))
    }
}

impl Path {
    /// A path with this algorithm.
    pub fn new(control: Box<dyn CongestionControl>) -> Self {
        let (last_ack, reduced_at) = (Instant::default(), Instant::default());
        let (in_flight, peak, smoothed, reduced_by_timeout) = (0, 0, 0, false);
        Self {
            control,
            mtu: 0,
            in_flight,
            peak,
            smoothed,
            last_ack,
            reduced_at,
            reduced_by_timeout,
        }
    }

    /// A queue pair with this MTU, in bytes of payload, uses the path. If they differ, the largest
    /// one counts.
    pub fn add_mtu(&mut self, bytes: u32) {
        if bytes > self.mtu {
            self.mtu = bytes;
            self.control.set_mtu(bytes);
        }
    }

    /// How many more packets may be sent.
    #[inline]
    pub fn room(&self) -> u32 {
        self.window().saturating_sub(self.in_flight)
    }

    /// How many packets may be in flight.
    #[inline]
    pub fn window(&self) -> u32 {
        self.control.window()
    }

    /// Packets in flight.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// A queue pair had `before` packets in flight, and has `after`.
    #[inline]
    pub fn set_in_flight(&mut self, before: u32, after: u32) {
        self.in_flight = self.in_flight.saturating_sub(before).saturating_add(after);
        self.peak = self.peak.max(self.in_flight);
    }

    /// What a queue pair has seen.
    pub fn on_signals(&mut self, now: Instant, signals: &PathSignals) {
        if let Some(round_trip) = signals.round_trip {
            let sample = round_trip.as_nanos() as u64;
            self.smoothed = match self.smoothed {
                0 => sample.max(1),
                smoothed => (smoothed - smoothed / 8 + sample / 8).max(1),
            };
        }
        let smoothed_round_trip = Duration::from_nanos(self.smoothed);
        if signals.acked > 0 {
            let window_limited = 2 * u64::from(self.peak) > u64::from(self.window());
            self.peak = self.in_flight;
            self.control.on_ack(&PathAck {
                now,
                packets: signals.acked,
                round_trip: signals.round_trip,
                smoothed_round_trip,
                window_limited,
            });
        }
        let is_silent = now - self.last_ack > smoothed_round_trip * 2;
        if signals.acked > 0 {
            self.last_ack = now;
        }
        if signals.spurious_timeout && core::mem::take(&mut self.reduced_by_timeout) {
            self.control.undo_congestion();
        }
        let (signal, age) = match signals {
            // The timeout of one queue pair, while others get answers, is a loss.
            PathSignals { timed_out: Some(age), .. } if is_silent => {
                (CongestionSignal::Silence, *age)
            }
            PathSignals { timed_out: Some(age), .. } => (CongestionSignal::Loss, *age),
            PathSignals { lost: true, .. } => (CongestionSignal::Loss, smoothed_round_trip),
            PathSignals { marked: true, .. } => (CongestionSignal::Mark, smoothed_round_trip),
            _ => return,
        };
        // What was sent before the last reduction reports the same congestion: one queue pair by a
        // NAK after a round trip, another one, whose last packet was lost, by a timeout later.
        if now >= self.reduced_at + age {
            (self.reduced_at, self.reduced_by_timeout) = (now, signals.timed_out.is_some());
            self.control.on_congestion(now, signal);
        }
    }
}

/// CUBIC (RFC 9438) with HyStart++ (RFC 9406).
#[derive(Clone, Debug)]
pub struct Cubic {
    /// Windows in packets, in fixed point.
    window: u64,
    /// Slow start ends here.
    threshold: u64,
    /// The window before the last reduction.
    max: u64,
    /// The window that Reno would have.
    reno: u64,
    /// When the growth after a reduction began.
    epoch: Option<Instant>,
    slow_start: SlowStart,
    /// Packets that count as one segment of TCP.
    per_segment: u64,
    /// Window, threshold, maximum, Reno's window and epoch before the last reduction.
    before: Option<(u64, u64, u64, u64, Option<Instant>)>,
}

impl Default for Cubic {
    fn default() -> Self {
        Self {
            window: INITIAL_WINDOW * ONE,
            threshold: MAX_WINDOW * ONE,
            max: 0,
            reno: 0,
            epoch: None,
            slow_start: SlowStart::default(),
            per_segment: ONE,
            before: None,
        }
    }
}

impl Cubic {
    /// After a loss the window is 7/10, after a mark 17/20 of what it was.
    const LOSS_FACTOR: (u64, u64) = (7, 10);
    const MARK_FACTOR: (u64, u64) = (17, 20);

    /// Growth in congestion avoidance, by `packets` acknowledged packets.
    fn avoid(&mut self, ack: &PathAck) {
        let epoch = *self.epoch.get_or_insert_with(|| {
            self.max = self.max.max(self.window);
            self.reno = self.window;
            ack.now
        });
        let elapsed = ack.now + ack.smoothed_round_trip - epoch;
        let target = self.curve(elapsed).clamp(self.window, self.window + self.window / 2);
        let packets = u64::from(ack.packets);
        let steps =
            |distance: u64| packets.saturating_mul(distance) / (self.window >> FRACTION).max(1);
        let cubic = self.window + steps(target - self.window).min(target - self.window);
        // Reno with CUBIC's factor: 9/17 packets per round trip until the old maximum, then 1.
        let alpha = if self.reno < self.max { self.per_segment * 9 / 17 } else { self.per_segment };
        self.reno += steps(alpha);
        self.window = cubic.max(self.reno).min(MAX_WINDOW * ONE);
    }

    /// The window at this time after the reduction: `C * (t - K)^3 + max`, with C = 0.4 segments
    /// per second cubed, and K such that it begins at the reduced window.
    fn curve(&self, elapsed: Duration) -> u64 {
        let begin = self.max.saturating_sub(self.threshold.min(self.max));
        // K in milliseconds: the cube root of 2.5 times the difference in segments, times 10^9.
        let k = cube_root(u128::from(begin) * 2_500_000_000 / u128::from(self.per_segment));
        let from_k = elapsed.as_millis() as i128 - i128::from(k);
        let cube = from_k.clamp(-1_000_000, 1_000_000).pow(3);
        let grown = i128::from(self.max) + cube * i128::from(self.per_segment) * 2 / 5_000_000_000;
        grown.clamp(0, i128::from(MAX_WINDOW * ONE)) as u64
    }
}

impl CongestionControl for Cubic {
    fn window(&self) -> u32 {
        (self.window >> FRACTION) as u32
    }

    fn on_ack(&mut self, ack: &PathAck) {
        if !ack.window_limited {
            return;
        }
        if self.window >= self.threshold {
            return self.avoid(ack);
        }
        let growth = self.slow_start.on_ack(ack, (self.window >> FRACTION) as u32);
        match growth {
            Some(divisor) => {
                let more = u64::from(ack.packets) * ONE / divisor;
                self.window = (self.window + more).min(self.threshold);
            }
            None => self.threshold = self.window,
        }
    }

    fn on_congestion(&mut self, _: Instant, signal: CongestionSignal) {
        let (numerator, divisor) = match signal {
            CongestionSignal::Mark => Self::MARK_FACTOR,
            CongestionSignal::Loss | CongestionSignal::Silence => Self::LOSS_FACTOR,
        };
        self.before = Some((self.window, self.threshold, self.max, self.reno, self.epoch));
        // Fast convergence: below the last maximum, leave room for a flow that has begun.
        let shrinks = self.window < self.max;
        self.max = if shrinks { self.window * 17 / 20 } else { self.window };
        self.threshold = (self.window * numerator / divisor).max(MIN_WINDOW * ONE);
        self.window = match signal {
            CongestionSignal::Silence => MIN_WINDOW * ONE,
            _ => self.threshold,
        };
        self.epoch = None;
        self.slow_start = SlowStart::default();
    }

    fn set_mtu(&mut self, bytes: u32) {
        self.per_segment = (u64::from(SEGMENT) * ONE / u64::from(bytes.max(256))).max(ONE);
    }

    fn undo_congestion(&mut self) {
        if let Some((window, threshold, max, reno, epoch)) = self.before.take() {
            self.window = self.window.max(window);
            (self.threshold, self.max, self.reno, self.epoch) = (threshold, max, reno, epoch);
        }
    }
}

/// HyStart++: slow start ends when round trips grow, before packets are lost. In between, growth is
/// conservative, in case it was noise.
#[derive(Clone, Debug, Default)]
struct SlowStart {
    /// Packets until the round ends.
    left: u32,
    /// The smallest round trip of this round and of the last one.
    smallest: Option<Duration>,
    last_smallest: Option<Duration>,
    /// The round trip at which conservative growth began, and how many rounds it has lasted.
    conservative: Option<(Duration, u32)>,
}

impl SlowStart {
    const MIN_INCREASE: Duration = Duration::from_millis(4);
    const MAX_INCREASE: Duration = Duration::from_millis(16);
    const CONSERVATIVE_DIVISOR: u64 = 4;
    const CONSERVATIVE_ROUNDS: u32 = 5;

    /// The divisor of growth; `None` if slow start has ended.
    fn on_ack(&mut self, ack: &PathAck, window: u32) -> Option<u64> {
        if let Some(sample) = ack.round_trip {
            self.smallest = Some(self.smallest.map_or(sample, |smallest| smallest.min(sample)));
        }
        self.left = self.left.saturating_sub(ack.packets);
        if self.left == 0 {
            self.left = window;
            if !self.end_round() {
                return None;
            }
        }
        Some(if self.conservative.is_some() { Self::CONSERVATIVE_DIVISOR } else { 1 })
    }

    /// Whether slow start goes on.
    fn end_round(&mut self) -> bool {
        let (smallest, last) = (self.smallest.take(), self.last_smallest);
        self.last_smallest = smallest.or(last);
        match (&mut self.conservative, smallest, last) {
            (Some((baseline, _)), Some(now), _) if now < *baseline => self.conservative = None,
            (Some((_, rounds)), ..) => {
                *rounds += 1;
                return *rounds < Self::CONSERVATIVE_ROUNDS;
            }
            (None, Some(now), Some(last)) => {
                let increase = (last / 8).clamp(Self::MIN_INCREASE, Self::MAX_INCREASE);
                if now >= last + increase {
                    self.conservative = Some((now, 0));
                }
            }
            _ => {}
        }
        true
    }
}

/// The integer cube root, rounded down.
fn cube_root(value: u128) -> u64 {
    let (mut low, mut high) = (0_u128, 1_u128 << 42);
    while low < high {
        let middle = (low + high).div_ceil(2);
        if middle.pow(3) <= value {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    low as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(micros: u64) -> Instant {
        Instant::from_nanos(micros * 1000)
    }

    fn ack(packets: u32, round_trip: Duration) -> PathSignals {
        PathSignals { acked: packets, round_trip: Some(round_trip), ..PathSignals::default() }
    }

    /// Sends and acknowledges full windows, one per round trip.
    fn rounds(path: &mut Path, start: u64, round_trip: u64, count: u64) -> u64 {
        for round in 1..=count {
            let window = path.window();
            path.set_in_flight(0, window);
            path.set_in_flight(window, 0);
            let now = at(start + round * round_trip);
            path.on_signals(now, &ack(window, Duration::from_micros(round_trip)));
        }
        start + count * round_trip
    }

    const LOST: PathSignals = PathSignals {
        acked: 0,
        round_trip: None,
        lost: true,
        timed_out: None,
        spurious_timeout: false,
        marked: false,
    };

    /// No answer for this time.
    fn timed_out(micros: u64) -> PathSignals {
        PathSignals { timed_out: Some(Duration::from_micros(micros)), ..PathSignals::default() }
    }

    #[test]
    fn slow_start_doubles_until_a_loss_and_then_grows_slowly() {
        let mut path = Path::default();
        let now = rounds(&mut path, 0, 1000, 4);
        assert_eq!(path.window(), 160);
        path.on_signals(at(now), &LOST);
        assert_eq!(path.window(), 112);
        // The same congestion, reported again.
        path.on_signals(at(now + 10), &LOST);
        assert_eq!(path.window(), 112);
        rounds(&mut path, now, 1000, 10);
        assert!((113..=125).contains(&path.window()), "{}", path.window());
    }

    /// RFC 9438: a window of 160 packets is reached again after K = cbrt(160 * 0.3 / 0.4) = 4.9 s,
    /// where Reno, on a path this long, is slower.
    #[test]
    fn the_old_window_is_reached_again_after_k_seconds() {
        let mut path = Path::default();
        let mut now = rounds(&mut path, 0, 100_000, 4);
        path.on_signals(at(now), &LOST);
        now = rounds(&mut path, now, 100_000, 30);
        assert!((135..160).contains(&path.window()), "{}", path.window());
        now = rounds(&mut path, now, 100_000, 22);
        assert!((155..=165).contains(&path.window()), "{}", path.window());
        rounds(&mut path, now, 100_000, 60);
        assert!(path.window() > 220, "{}", path.window());
    }

    #[test]
    fn marks_cut_less_than_losses_and_silence_cuts_most() {
        for (signals, quiet, window) in [
            (PathSignals { marked: true, ..PathSignals::default() }, 0, 136),
            (timed_out(1000), 0, 112),
            (timed_out(9000), 9000, 2),
        ] {
            let mut path = Path::default();
            let now = rounds(&mut path, 0, 1000, 4);
            path.on_signals(at(now + quiet), &signals);
            assert_eq!(path.window(), window, "{signals:?} after {quiet} us");
        }
    }

    #[test]
    fn silence_again_and_again_leaves_a_window() {
        let mut path = Path::default();
        for second in 1..100 {
            path.on_signals(at(second * 1_000_000), &timed_out(900_000));
        }
        assert_eq!(path.window(), 2);
        rounds(&mut path, 100_000_000, 1000, 3);
        assert!(path.window() > 2);
    }

    /// Of several queue pairs some notice a loss by a NAK, and those whose last packet was lost by
    /// a timeout, some round trips later.
    /// In bytes, the windows of small packets grow like TCP's; those of large ones by packets.
    #[test]
    fn windows_of_small_packets_grow_by_more_of_them() {
        let grown = |mtu: u32| {
            let mut path = Path::default();
            path.add_mtu(mtu);
            let now = rounds(&mut path, 0, 20_000, 3);
            path.on_signals(at(now), &LOST);
            let before = path.window();
            rounds(&mut path, now, 20_000, 8);
            path.window() - before
        };
        let of_segments = grown(SEGMENT);
        assert_eq!((grown(4096), grown(0)), (of_segments, of_segments));
        for mtu in [512, 1024] {
            let bytes = grown(mtu) * mtu / SEGMENT;
            assert!(bytes.abs_diff(of_segments) <= of_segments / 5 + 1, "{mtu}: {bytes}");
        }
        // Of several, the largest counts.
        let mut path = Path::default();
        path.add_mtu(1024);
        path.add_mtu(256);
        assert_eq!(path.mtu, 1024);
    }

    #[test]
    fn one_episode_of_congestion_reduces_the_window_once() {
        let mut path = Path::default();
        let mut now = rounds(&mut path, 0, 1000, 4);
        path.on_signals(at(now), &LOST);
        assert_eq!(path.window(), 112);
        // Sent before the reduction, at the latest at the same time as what was lost.
        now = rounds(&mut path, now, 1000, 4);
        let window = path.window();
        path.on_signals(at(now), &timed_out(4500));
        assert_eq!(path.window(), window);
        // Sent after it: another episode.
        path.on_signals(at(now), &timed_out(3500));
        assert_eq!(path.window(), window * 7 / 10);
    }

    #[test]
    fn a_spurious_timeout_is_undone_and_a_loss_is_not() {
        let spurious = PathSignals { spurious_timeout: true, ..PathSignals::default() };
        for quiet in [1500, 9000] {
            let mut path = Path::default();
            let now = rounds(&mut path, 0, 1000, 4) + quiet;
            path.on_signals(at(now), &timed_out(quiet));
            assert!(path.window() < 160);
            path.on_signals(at(now + 10), &spurious);
            assert_eq!(path.window(), 160);
            // Once, and not what is not known to be a mistake.
            path.on_signals(at(now + 20_000), &LOST);
            let window = path.window();
            assert!(window < 160);
            path.on_signals(at(now + 20_010), &spurious);
            assert_eq!(path.window(), window);
        }
        // A loss after the timeout stays.
        let mut path = Path::default();
        let now = rounds(&mut path, 0, 1000, 4) + 9000;
        path.on_signals(at(now), &timed_out(9000));
        let now = rounds(&mut path, now, 1000, 5);
        path.on_signals(at(now), &LOST);
        let window = path.window();
        path.on_signals(at(now + 10), &spurious);
        assert_eq!(path.window(), window);
    }

    #[test]
    fn a_window_that_is_not_used_does_not_grow() {
        let mut path = Path::default();
        for round in 0..100 {
            path.set_in_flight(0, 4);
            path.set_in_flight(4, 0);
            path.on_signals(at(round * 1000), &ack(4, Duration::from_millis(1)));
        }
        assert_eq!(path.window(), 10);
    }

    #[test]
    fn growing_round_trips_end_slow_start() {
        let mut path = Path::default();
        let mut now = 0;
        // A queue builds up: each round takes as long as its packets at 60 us each.
        for _ in 0..40 {
            let window = path.window();
            now = rounds(&mut path, now, u64::from(window) * 60 + 100, 1);
        }
        // Doubling every round, it would have the maximum by far.
        assert!((100..2000).contains(&path.window()), "{}", path.window());
        // One slow round is noise: slow start goes on.
        let mut path = Path::default();
        now = rounds(&mut path, 0, 1000, 2);
        now = rounds(&mut path, now, 20_000, 1);
        rounds(&mut path, now, 1000, 8);
        assert!(path.window() > 1000, "{}", path.window());
    }

    #[test]
    fn windows_stay_in_bounds_and_nothing_overflows() {
        let mut path = Path::default();
        let mut now = rounds(&mut path, 0, 10, 100);
        assert_eq!(path.window(), MAX_WINDOW as u32);
        path.on_signals(at(now), &LOST);
        now = rounds(&mut path, now, 10_000_000, 100);
        assert_eq!(path.window(), MAX_WINDOW as u32);
        let late = PathSignals { acked: u32::MAX, ..ack(1, Duration::MAX) };
        path.on_signals(at(u64::MAX / 1001), &late);
        path.on_signals(at(now), &LOST);
        path.set_in_flight(5, u32::MAX);
        path.set_in_flight(0, 9);
        assert_eq!(path.room(), 0);
        let fixed = Path::new(Box::new(FixedWindow(0)));
        assert_eq!(fixed.room(), 1);
    }

    #[test]
    fn cube_roots_are_rounded_down() {
        for (value, root) in [(0, 0), (1, 1), (7, 1), (8, 2), (26, 2), (27, 3)] {
            assert_eq!(cube_root(value), root);
        }
        assert_eq!(cube_root((1 << 120) - 1), (1 << 40) - 1);
    }
}
