//! Measures packets between two processes of one machine: over shared memory, and over UDP for
//! comparison.
//!
//! ```console
//! $ cargo run --release -p examples --example 05_shm_rate
//! $ cargo run --release -p examples --example 05_shm_rate -- shm ring=4MiB
//! ```
//!
//! The program starts itself a second time. Both sides poll, as an engine does under load. The
//! sender copies each packet from a buffer and the receiver copies it to one, as an engine does
//! with registered memory. Each figure is the best of several short runs, to exclude interference
//! by other processes.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::net::SocketAddr;
use std::process::{Child, Command};
use std::time::{Duration, Instant};

use warpwire::link::{Auto, FlowId, Link, ReserveError, Shm, ShmOptions, Udp, UdpOptions};

const RUNS: usize = 20;
const RUN_TIME: Duration = Duration::from_millis(30);

// The first byte of a packet.
const ECHO: u8 = 1;
const DATA: u8 = 2;
const CREDIT: u8 = 3;
const READY: u8 = 4;
const QUIT: u8 = 5;

fn main() -> warpwire::Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args[..] {
        ["peer", kind, options, address] => return serve(kind, options, address.parse().unwrap()),
        [kind, options] => measure(kind, options)?,
        [kind] => measure(kind, "")?,
        _ => {
            for kind in ["udp", "auto", "shm"] {
                measure(kind, "")?;
            }
        }
    }
    Ok(())
}

fn bind(kind: &str, options: &str) -> warpwire::Result<Box<dyn Link>> {
    let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
    let plain = UdpOptions::default().with_max_packet(65_507);
    Ok(match kind {
        "udp" => Box::new(Udp::bind(any, plain)?),
        "auto" => Box::new(Auto::bind(any, plain, options.parse::<ShmOptions>()?)?),
        _ => Box::new(Shm::bind(any, options.parse::<ShmOptions>()?)?),
    })
}

/// The other process: returns ECHO packets, and credits for DATA packets.
fn serve(kind: &str, options: &str, peer: SocketAddr) -> warpwire::Result<()> {
    let mut link = bind(kind, options)?;
    let flow = link.open(peer, 0)?;
    put(&mut *link, flow, &[READY; 64]);
    link.flush()?;
    let mut memory = vec![0; 1 << 17];
    let (mut echo, mut taken, mut quit) = (None, 0_usize, false);
    let (mut idle, mut last) = (0_u32, Instant::now());
    while !quit {
        let received = link.receive(&mut |frame| match frame.bytes[0] {
            QUIT => quit = true,
            packet_kind => {
                memory[..frame.bytes.len()].copy_from_slice(frame.bytes);
                match packet_kind {
                    ECHO => echo = Some(frame.bytes.len()),
                    _ => taken += 1,
                }
            }
        })?;
        if let Some(len) = echo.take() {
            put(&mut *link, flow, &memory[..len]);
        }
        if taken > 0 {
            let mut credit = [CREDIT; 64];
            credit[8..16].copy_from_slice(&(taken as u64).to_le_bytes());
            put(&mut *link, flow, &credit);
            taken = 0;
        }
        if received > 0 {
            link.flush()?;
            idle = 0;
            continue;
        }
        // Exit if the parent process is gone. The clock is read only once per 65536 idle polls.
        idle += 1;
        if idle == 1 {
            last = Instant::now();
        } else if idle.is_multiple_of(1 << 16) && last.elapsed() > Duration::from_secs(5) {
            break;
        }
    }
    Ok(())
}

fn measure(kind: &str, options: &str) -> warpwire::Result<()> {
    let mut link = bind(kind, options)?;
    let address = link.local().to_string();
    let mut child = Command::new(std::env::current_exe().unwrap())
        .args(["peer", kind, options, &address])
        .spawn()
        .unwrap();
    let measured = measure_with(&mut *link, &mut child);
    if measured.is_err() {
        child.kill().unwrap();
    }
    child.wait().unwrap();
    measured
}

fn measure_with(link: &mut dyn Link, child: &mut Child) -> warpwire::Result<()> {
    let mut peer = None;
    while peer.is_none() {
        assert!(child.try_wait().unwrap().is_none(), "the other process has exited");
        link.receive(&mut |frame| peer = Some(frame.from))?;
    }
    let flow = link.open(peer.unwrap(), 0)?;
    println!("{}", link.flow_path(flow));
    println!("{:>8} {:>14} {:>12} {:>8}", "bytes", "latency", "packets/s", "GB/s");
    for len in [40, 64, 1024, 4096, 65_536] {
        let len = len.min(link.max_packet_to(flow));
        let (mut half, mut rate) = (Duration::MAX, 0.0_f64);
        for _ in 0..RUNS {
            half = half.min(round_trip(link, flow, len)? / 2);
            rate = rate.max(stream(link, flow, len, child)?);
        }
        let gigabytes = rate * len as f64 / 1e9;
        println!("{len:8} {:11.3} us {rate:12.0} {gigabytes:8.2}", half.as_nanos() as f64 / 1e3);
    }
    println!();
    put(link, flow, &[QUIT; 64]);
    link.flush()?;
    Ok(())
}

fn round_trip(link: &mut dyn Link, flow: FlowId, len: usize) -> warpwire::Result<Duration> {
    // Few enough that in some runs neither process is preempted.
    const ROUNDS: u32 = 500;
    let packet = vec![ECHO; len];
    let start = Instant::now();
    for _ in 0..ROUNDS {
        put(link, flow, &packet);
        link.flush()?;
        while link.receive(&mut |_| ())? == 0 {}
    }
    Ok(start.elapsed() / ROUNDS)
}

/// Packets per second, with up to 512 KiB in flight.
fn stream(
    link: &mut dyn Link,
    flow: FlowId,
    len: usize,
    child: &mut Child,
) -> warpwire::Result<f64> {
    let packet = vec![DATA; len];
    let window = ((1 << 19) / len).min(2048);
    let batch = (window / 4).clamp(1, 32);
    let (mut sent, mut taken) = (0_usize, 0_usize);
    let start = Instant::now();
    let mut last = start;
    let mut lasts = true;
    while lasts || taken < sent {
        if lasts && sent + batch <= taken + window {
            for _ in 0..batch {
                put(link, flow, &packet);
            }
            link.flush()?;
            sent += batch;
            lasts = start.elapsed() < RUN_TIME;
        }
        let received = link.receive(&mut |frame| {
            taken += u64::from_le_bytes(*frame.bytes[8..].first_chunk().unwrap()) as usize;
        })?;
        if received > 0 {
            last = Instant::now();
        } else if last.elapsed() > Duration::from_millis(200) {
            // UDP may lose packets, and their credits with them.
            assert!(child.try_wait().unwrap().is_none(), "the other process has exited");
            taken = sent;
        }
    }
    Ok(sent as f64 / start.elapsed().as_secs_f64())
}

fn put(link: &mut dyn Link, flow: FlowId, packet: &[u8]) {
    loop {
        match link.reserve(flow, packet.len()) {
            Ok(space) => break space.copy_from_slice(packet),
            Err(ReserveError::Full) => drop(link.flush()),
            Err(other) => panic!("{other}"),
        }
    }
    link.commit();
}
