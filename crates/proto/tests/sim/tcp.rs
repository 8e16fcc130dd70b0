//! TCP-like senders that share a bottleneck with queue pairs: windows of CUBIC (RFC 9438) and Reno
//! (RFC 5681), written apart from those of the protocol, with selective acknowledgement. They send
//! without end; segments have no content.

use core::time::Duration;

use testkit::Effort;
use warpwire_proto::Instant;
use warpwire_proto::qp::TransportOptions;

use crate::sim::congested::{Bottleneck, Congestion, StreamKind};
use crate::sim::link::Faults;
use crate::sim::net::{ConnParams, Network, SimEvent};

/// Wire bytes of a segment on Ethernet.
const SEGMENT: usize = 1514;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TcpKind {
    Cubic,
    Reno,
}

#[derive(Debug)]
pub struct TcpFlow {
    kind: TcpKind,
    bottleneck: usize,
    /// One way, without the queue.
    delay: Duration,
    window: f64,
    threshold: f64,
    in_flight: f64,
    /// The window before the last reduction, and when that was.
    max: f64,
    reduced_at: Instant,
    round_trip: f64,
    pub acked: u64,
}

impl TcpFlow {
    fn new(kind: TcpKind, bottleneck: usize, delay: Duration) -> Self {
        Self {
            kind,
            bottleneck,
            delay,
            window: 10.0,
            threshold: f64::MAX,
            in_flight: 0.0,
            max: 0.0,
            reduced_at: Instant::default(),
            round_trip: 2.0 * delay.as_secs_f64(),
            acked: 0,
        }
    }

    fn on_ack(&mut self, now: Instant) {
        self.acked += 1;
        if self.window < self.threshold {
            self.window += 1.0;
            return;
        }
        let reno = match self.kind {
            TcpKind::Reno => 1.0,
            // Reno with a factor of 0.7.
            TcpKind::Cubic if self.window < self.max => 9.0 / 17.0,
            TcpKind::Cubic => 1.0,
        };
        let mut growth = reno / self.window;
        if self.kind == TcpKind::Cubic {
            let k = ((self.max - self.threshold).max(0.0) / 0.4).cbrt();
            let elapsed = (now - self.reduced_at).as_secs_f64() + self.round_trip;
            let target = 0.4 * (elapsed - k).powi(3) + self.max;
            let target = target.clamp(self.window, 1.5 * self.window);
            growth = growth.max((target - self.window) / self.window);
        }
        self.window += growth;
    }

    /// A segment that was sent at `sent` was lost: one reduction per window.
    fn on_loss(&mut self, now: Instant, sent: Instant) {
        if sent < self.reduced_at {
            return;
        }
        let (factor, convergence) = match self.kind {
            TcpKind::Cubic => (0.7, 0.85),
            TcpKind::Reno => (0.5, 1.0),
        };
        self.max = if self.window < self.max { self.window * convergence } else { self.window };
        self.window = (self.window * factor).max(2.0);
        (self.threshold, self.reduced_at) = (self.window, now);
    }
}

impl Network {
    /// Adds a TCP stream through a bottleneck.
    pub fn add_tcp(&mut self, kind: TcpKind, bottleneck: usize, delay: Duration) {
        let flows = &mut self.congestion.as_mut().expect("bottlenecks").tcp;
        flows.push(TcpFlow::new(kind, bottleneck, delay));
        let flow = flows.len() - 1;
        self.send_tcp(flow);
    }

    /// The sender hears of a segment that it sent at `sent`.
    pub fn on_tcp(&mut self, flow: usize, sent: Instant, lost: bool) {
        let now = self.now;
        let tcp = &mut self.congestion.as_mut().expect("bottlenecks").tcp[flow];
        tcp.in_flight -= 1.0;
        if lost {
            tcp.on_loss(now, sent);
        } else {
            tcp.round_trip += ((now - sent).as_secs_f64() - tcp.round_trip) / 8.0;
            tcp.on_ack(now);
        }
        self.send_tcp(flow);
    }

    fn send_tcp(&mut self, flow: usize) {
        let (now, mut events) = (self.now, Vec::new());
        let Congestion { tcp, bottlenecks, .. } = self.congestion.as_mut().expect("bottlenecks");
        let tcp = &mut tcp[flow];
        let bottleneck = &mut bottlenecks[tcp.bottleneck];
        while tcp.in_flight + 1.0 <= tcp.window {
            tcp.in_flight += 1.0;
            let passed = bottleneck.enqueue(now, SEGMENT);
            // Segments behind a lost one tell of it, about when its own ACK would have come.
            let leaves = passed.map_or(bottleneck.busy_until(now), |(leaves, _)| leaves);
            events.push((leaves + tcp.delay * 2, passed.is_none()));
        }
        for (at, lost) in events {
            self.at(at, SimEvent::Tcp { flow, sent: now, lost });
        }
    }
}

/// A bottleneck that `queue_pairs` to one host share with one TCP stream.
struct Shared {
    kind: TcpKind,
    queue_pairs: usize,
    /// Bytes per second, round trip without a queue, and packets that the queue holds.
    rate: u64,
    rtt: Duration,
    queue: u64,
}

impl Shared {
    /// The bytes per second of the queue pairs and of TCP, and the part of the packets of the queue
    /// pairs that was sent again, after a third of the time.
    fn run(&self, time: Duration) -> (f64, f64, f64) {
        let mut net = Network::new(7, 2);
        net.link(0, 1, Faults { delay: self.rtt / 2, ..Faults::default() });
        let bottleneck = Bottleneck::new(self.rate, self.queue * SEGMENT as u64, None);
        let route = [((0, 1), 0), ((1, 0), 1)].into();
        net.congestion = Some(Congestion::new(vec![bottleneck; 2], route));
        let params = ConnParams {
            timeout: 17,
            selective: [true; 2],
            options: TransportOptions::default().with_send_depth(16),
            ..ConnParams::default()
        };
        const MESSAGE: u32 = 32 << 10;
        let volume = self.rate * time.as_millis() as u64 / 1000;
        let each = volume / self.queue_pairs as u64 / u64::from(MESSAGE) + 32;
        for _ in 0..self.queue_pairs {
            let conns = net.connect(0, 1, params);
            net.add_stream(0, conns[0], StreamKind::Writes, each, MESSAGE);
        }
        net.start();
        net.add_tcp(self.kind, 0, self.rtt / 2);
        let end = Instant::default() + time;
        net.run_until(Instant::default() + time / 3);
        let count = |net: &Network| {
            let stats = net.nodes[0].conns.iter().map(|conn| conn.qp.stats());
            let sums = stats.fold((0, 0), |sum, s| (sum.0 + s.packets_sent, sum.1 + s.resent));
            (net.completed_bytes(0), net.congestion.as_ref().unwrap().tcp[0].acked, sums)
        };
        let (bytes, segments, (sent, again)) = count(&net);
        net.run_until(end);
        let (bytes_end, segments_end, (sent_end, again_end)) = count(&net);
        let seconds = (time - time / 3).as_secs_f64();
        (
            (bytes_end - bytes) as f64 / seconds,
            (segments_end - segments) as f64 * SEGMENT as f64 / seconds,
            (again_end - again) as f64 / (sent_end - sent).max(1) as f64,
        )
    }
}

/// Averages over many periods of the windows: within 1 : 2, whatever the number of queue pairs. On
/// the short path the windows are some 60 packets, where CUBIC grows like Reno; on the long one
/// some 250, where CUBIC is meant to be faster than Reno, and needs a minute to converge.
/// `WARPWIRE_TCP_SECONDS=n` sets the simulated time on the short path.
#[test]
fn queue_pairs_and_tcp_share_a_bottleneck() {
    let seconds = Effort::pick("WARPWIRE_TCP_SECONDS", [10, 12, 60]);
    let counts: &[usize] = Effort::choose([&[1, 16], &[1, 4, 16, 64], &[1, 4, 16, 64]]);
    let short = (Duration::from_millis(10), 25, seconds);
    let long = (Duration::from_millis(60), 120, 6 * seconds);
    for (kind, (rtt, queue, seconds)) in
        [(TcpKind::Cubic, short), (TcpKind::Reno, short), (TcpKind::Cubic, long)]
    {
        for queue_pairs in counts.iter().copied() {
            let shared = Shared { kind, queue_pairs, rate: 3_000_000, rtt, queue };
            let (ours, tcp, resent) = shared.run(Duration::from_secs(seconds));
            let ratio = ours / tcp;
            println!(
                "{queue_pairs:>3} queue pairs beside {kind:?}, {rtt:?}, queue of {queue}: {:.2} \
                 and {:.2} MB/s, {ratio:.2}, {:.2} % resent",
                ours / 1e6,
                tcp / 1e6,
                resent * 100.0
            );
            assert!((0.5..=2.0).contains(&ratio), "{kind:?}: {ours:.0} and {tcp:.0} B/s");
            assert!(ours + tcp > 0.85 * shared.rate as f64, "the line is not used");
            assert!(resent < 0.03, "{resent:.3} resent");
        }
    }
}

/// Its share is more packets in flight than a NAK tells of: the queue holds a megabyte.
#[test]
fn one_queue_pair_has_its_share_of_a_fast_line() {
    let (kind, rate, rtt) = (TcpKind::Cubic, 125_000_000, Duration::from_micros(200));
    let shared = Shared { kind, queue_pairs: 1, rate, rtt, queue: 660 };
    let (ours, tcp, resent) = shared.run(Duration::from_secs(Effort::choose([4, 9, 60])));
    println!("{:.1} and {:.1} MB/s, {:.3} % resent", ours / 1e6, tcp / 1e6, resent * 100.0);
    assert!((0.5..=2.0).contains(&(ours / tcp)), "{ours:.0} and {tcp:.0} B/s");
}
