//! Measures the UDP link over the loopback interface, with and without each offload.
//!
//! ```console
//! $ cargo run --release -p examples --example 03_udp_rate
//! ```
//!
//! One thread alternates between sending and receiving, so the figures are the cost of both sides
//! on one core. Each figure is the best of several short runs, to exclude interference by other
//! processes.
#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use warpwire::link::{FlowId, Hub, Link, Udp, UdpOptions};

const BATCH: usize = 60;
const RUNS: usize = 10;
const RUN_TIME: Duration = Duration::from_millis(40);

fn main() -> warpwire::Result<()> {
    println!(
        "{:32} {:>6} {:>12} {:>8} {:>7} {:>8}",
        "link", "bytes", "packets/s", "GB/s", "ratio", "min rtt"
    );
    for len in [64, 1064, 4140] {
        let mut base = None;
        for options in [
            "gso=off,gro=off,mmsg=off",
            "gso=off,gro=off,mmsg=on",
            "gso=off,gro=on,mmsg=on",
            "gso=on,gro=off,mmsg=on",
            "gso=on,gro=on,mmsg=off",
            "gso=on,gro=on,mmsg=on",
        ] {
            let bind = || Udp::bind("127.0.0.1:0".parse().unwrap(), options.parse::<UdpOptions>()?);
            let (mut one, mut two) = (bind()?, bind()?);
            report(options, len, &mut base, &mut one, &mut two)?;
        }
        let hub = Hub::new();
        let mut one = hub.endpoint("10.0.0.1:1".parse().unwrap())?;
        let mut two = hub.endpoint("10.0.0.2:1".parse().unwrap())?;
        report("hub (in memory)", len, &mut base, &mut one, &mut two)?;
        println!();
    }
    Ok(())
}

fn report(
    name: &str,
    len: usize,
    base: &mut Option<f64>,
    one: &mut dyn Link,
    two: &mut dyn Link,
) -> warpwire::Result<()> {
    let forward = one.open(two.local(), 0)?;
    let reverse = two.open(one.local(), 0)?;
    let mut rate = 0.0;
    let mut round = Duration::MAX;
    for _ in 0..RUNS {
        rate = stream(one, forward, two, len)?.max(rate);
        round = round_trip(one, forward, two, reverse)?.min(round);
    }
    let base = *base.get_or_insert(rate);
    println!(
        "{name:32} {len:6} {rate:12.0} {:8.2} {:6.1}x {:6.1}us",
        rate * len as f64 / 1e9,
        rate / base,
        round.as_nanos() as f64 / 1e3
    );
    Ok(())
}

/// Packets per second from one link to the other.
fn stream(
    one: &mut dyn Link,
    flow: FlowId,
    two: &mut dyn Link,
    len: usize,
) -> warpwire::Result<f64> {
    let (mut count, start) = (0, Instant::now());
    while start.elapsed() < RUN_TIME {
        for _ in 0..BATCH {
            put(one, flow, len);
        }
        one.flush()?;
        let mut left = BATCH;
        while left > 0 {
            left -= two.receive(&mut |_| ())?;
        }
        count += BATCH;
    }
    Ok(count as f64 / start.elapsed().as_secs_f64())
}

/// Time of a 40-byte packet and a 20-byte answer.
fn round_trip(
    one: &mut dyn Link,
    forward: FlowId,
    two: &mut dyn Link,
    reverse: FlowId,
) -> warpwire::Result<Duration> {
    const ROUNDS: u32 = 200;
    let start = Instant::now();
    for _ in 0..ROUNDS {
        put(one, forward, 40);
        one.flush()?;
        while two.receive(&mut |_| ())? == 0 {}
        put(two, reverse, 20);
        two.flush()?;
        while one.receive(&mut |_| ())? == 0 {}
    }
    Ok(start.elapsed() / ROUNDS)
}

fn put(link: &mut dyn Link, flow: FlowId, len: usize) {
    link.reserve(flow, len).unwrap()[..len - 4].fill(0x5a);
    link.commit();
}
