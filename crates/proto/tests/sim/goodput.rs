//! Goodput on lossy paths, with go-back-N and with selective repeat: the table of docs/network.md.
//!
//! ```text
//! WARPWIRE_EFFORT=full cargo test -p warpwire-proto --test proto goodput -- --nocapture
//! ```

use core::time::Duration;

use testkit::Effort;
use warpwire_proto::Instant;
use warpwire_proto::qp::TransportOptions;

use crate::sim::congested::{Bottleneck, Congestion, StreamKind};
use crate::sim::link::Faults;
use crate::sim::net::{ConnParams, Network};

const RATE: u64 = 125_000_000;
const MTU: u32 = 1024;

struct Measured {
    /// Of completed writes or reads, in MB/s.
    goodput: f64,
    /// Data packets that were not the first ones with their data, of all.
    resent: f64,
    packets: f64,
    timeouts: u64,
}

/// One queue pair, loss per mille in each direction.
fn measure(
    kind: StreamKind,
    selective: bool,
    loss: u32,
    rtt: Duration,
    time: Duration,
) -> Measured {
    let mut net = Network::new(11, 2);
    net.link(0, 1, Faults { loss, delay: rtt / 2, ..Faults::default() });
    let bottlenecks = vec![Bottleneck::new(RATE, 1 << 20, None); 2];
    net.congestion = Some(Congestion::new(bottlenecks, [((0, 1), 0), ((1, 0), 1)].into()));
    let params = ConnParams {
        mtu: MTU,
        timeout: 17,
        selective: [selective; 2],
        options: TransportOptions::default().with_send_depth(64),
        rd_atomic: 16,
        ..ConnParams::default()
    };
    let conns = net.connect(0, 1, params);
    let len = 4 << 10;
    // Not less than there is time for, and not much more.
    let most = RATE.min((256 * u64::from(MTU)) * 1_000_000 / rtt.as_micros() as u64);
    let count = most * time.as_millis() as u64 / 1000 / u64::from(len) + 64;
    net.add_stream(0, conns[0], kind, count, len);
    net.start();
    net.run_until(Instant::default() + time);
    let sender = usize::from(kind == StreamKind::Reads);
    let sent = net.conn(sender, conns[sender]).qp.stats().bytes_sent as f64;
    let completed = net.completed_bytes(0) as f64;
    Measured {
        goodput: completed / 1e6 / time.as_secs_f64(),
        resent: (sent - completed) / sent,
        packets: sent / f64::from(MTU),
        timeouts: net.conn(0, conns[0]).qp.stats().timeouts,
    }
}

/// The window of Reno under random loss is sqrt(3 / 2p) packets (Mathis et al., 1997).
fn reno(loss: u32, rtt: Duration) -> f64 {
    let window = (1.5 / (f64::from(loss) / 1000.0)).sqrt();
    (window * f64::from(MTU) / rtt.as_secs_f64()).min(RATE as f64) / 1e6
}

#[test]
fn goodput_with_loss() {
    let effort = Effort::pick("WARPWIRE_GOODPUT", [1, 1, 10]) as u32;
    println!("MB/s of payload (data sent again; timeouts per second)");
    println!(
        "kind   loss     RTT      go-back-N               selective repeat        Reno's window"
    );
    for kind in [StreamKind::Writes, StreamKind::Reads] {
        for &loss in Effort::choose([&[10, 50][..], &[1, 10, 50], &[1, 10, 50]]) {
            for millis in [1, 10, 50] {
                let rtt = Duration::from_millis(millis);
                // Some dozens of losses, so that chance does not decide.
                let rare = if loss == 1 { 6 } else { 1 };
                let time = (rtt * 60).max(Duration::from_millis(300)) * effort * rare;
                let [plain, selective] =
                    [false, true].map(|selective| measure(kind, selective, loss, rtt, time));
                let cell = |m: &Measured| {
                    let timeouts = m.timeouts as f64 / time.as_secs_f64();
                    let cell =
                        format!("{:.2} ({:.1} %; {timeouts:.1})", m.goodput, m.resent * 100.0);
                    format!("{cell:<24}")
                };
                println!(
                    "{:<6} {:>3.1} % {millis:>4} ms   {}{}{:.2}",
                    format!("{kind:?}"),
                    f64::from(loss) / 10.0,
                    cell(&plain),
                    cell(&selective),
                    reno(loss, rtt),
                );
                assert!(
                    selective.goodput >= plain.goodput * 0.8,
                    "{kind:?} {loss} per mille {millis} ms: {:.2} and {:.2} MB/s",
                    plain.goodput,
                    selective.goodput
                );
                // What is on its way at the end counts too.
                let most = f64::from(loss) / 1000.0 * 3.0 + 0.01 + 64.0 / selective.packets;
                assert!(selective.resent <= most, "{:.3} resent", selective.resent);
            }
        }
    }
}
