//! `--cpu`: the same tools with CPU threads at both ends, over sockets of either family.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use warpwire::units;
use warpwire_apps::pattern;

use super::peer::{Connection, CpuPeer, Family, Listener, Role};
use crate::output::{Failure, Reporter};

/// The `--cpu` flag.
#[derive(Args)]
pub(super) struct CpuFlag {
    /// Use a CPU thread at this end too, without a kernel or a device
    #[arg(long, conflicts_with_all = ["device", "pinned"])]
    pub(super) cpu: bool,
}

pub(super) fn socket_error(error: io::Error) -> Failure {
    Failure::Runtime(format!("a CPU socket failed: {error}"))
}

/// Figures of one socket family, and of TCP measured by the same code in the same run.
#[derive(Serialize)]
struct Report {
    family: &'static str,
    size: u64,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    what: &'static str,
    value: f64,
    tcp: f64,
    unit: &'static str,
    ratio: f64,
}

fn print_report(reporter: Reporter, tool: &str, report: &Report) -> Result<ExitCode, Failure> {
    let family = report.family;
    let mut text = format!(
        "# sock {tool} between two CPU threads, {} messages\n{:<14}  {:>14}  {:>14}  {:>6}\n",
        units::bytes(report.size),
        "",
        family,
        "TCP",
        "ratio"
    );
    for Row { what, value, tcp, unit, ratio } in &report.rows {
        let cell = |value: f64| format!("{value:.2} {unit}");
        text += &format!("{what:<14}  {:>14}  {:>14}  {ratio:>6.2}\n", cell(*value), cell(*tcp));
    }
    reporter.print(&text)?;
    reporter.finish(report)?;
    Ok(ExitCode::SUCCESS)
}

/// Measures round trips to an echo server; every reply is verified.
pub(super) fn lat(family: Family, size: u64, rounds: u32, json: bool) -> Result<ExitCode, Failure> {
    let reporter = Reporter::for_measurement(json);
    let each = |family: Family| -> Result<f64, Failure> {
        reporter.set_status(format!("{} round trips, {}", rounds, family.name()));
        ping(family, size, rounds.min(100))?;
        Ok(ping(family, size, rounds)?.as_secs_f64() * 1e6 / f64::from(rounds))
    };
    let (value, tcp) = (each(family)?, each(Family::Inet)?);
    let row = Row { what: "round trip", value, tcp, unit: "us", ratio: value / tcp };
    print_report(reporter, "lat", &Report { family: family.name(), size, rows: vec![row] })
}

fn ping(family: Family, size: u64, rounds: u32) -> Result<Duration, Failure> {
    let echo = CpuPeer::start(family, Role::Echo, size as usize, None)?;
    let connection = family.connect(echo.address)?;
    let mut stream = &connection;
    let (mut sent, mut back) = (vec![0; size as usize], vec![0; size as usize]);
    pattern::fill_bytes(&mut sent, size, 0);
    let begun = Instant::now();
    for round in 0..rounds {
        sent[0] = round as u8;
        stream.write_all(&sent).map_err(socket_error)?;
        stream.read_exact(&mut back).map_err(socket_error)?;
        if sent != back {
            return Err(Failure::Runtime(format!("round trip {round} returned wrong data")));
        }
    }
    let time = begun.elapsed();
    connection.shutdown(Shutdown::Both).map_err(socket_error)?;
    drop(connection);
    echo.finish()?;
    Ok(time)
}

/// Measures bandwidth in either direction, in MB/s (10⁶ bytes).
pub(super) fn bw(family: Family, size: u64, total: u64, json: bool) -> Result<ExitCode, Failure> {
    let reporter = Reporter::for_measurement(json);
    let rounds = total.div_ceil(size);
    let mut rows = Vec::new();
    for (what, sends) in [("to the peer", true), ("from the peer", false)] {
        let rate = |family: Family| -> Result<f64, Failure> {
            reporter.set_status(format!("{what}, {}", family.name()));
            let time = transfer(family, size, rounds, sends)?;
            Ok((rounds * size) as f64 / 1e6 / time.as_secs_f64())
        };
        let (value, tcp) = (rate(family)?, rate(Family::Inet)?);
        rows.push(Row { what, value, tcp, unit: "MB/s", ratio: value / tcp });
    }
    print_report(reporter, "bw", &Report { family: family.name(), size, rows })
}

fn transfer(family: Family, size: u64, rounds: u64, sends: bool) -> Result<Duration, Failure> {
    let role = if sends { Role::Sink } else { Role::Source(rounds * size) };
    let peer = CpuPeer::start(family, role, size as usize, None)?;
    let connection = family.connect(peer.address)?;
    let mut stream = &connection;
    let mut buffer = vec![0; size as usize];
    let begun = Instant::now();
    for _ in 0..rounds {
        match sends {
            true => stream.write_all(&buffer),
            false => stream.read_exact(&mut buffer),
        }
        .map_err(socket_error)?;
    }
    if sends {
        connection.shutdown(Shutdown::Write).map_err(socket_error)?;
        stream.read_exact(&mut buffer[..1]).map_err(socket_error)?;
    }
    let time = begun.elapsed();
    drop(connection);
    peer.finish()?;
    Ok(time)
}

/// Counters of the CPU server.
#[derive(Default)]
pub(super) struct ServeCounters {
    pub(super) connections: AtomicU64,
    pub(super) received: AtomicU64,
    pub(super) sent: AtomicU64,
}

/// Starts a server with one thread per client, which runs until the process exits; returns its
/// address and counters.
pub(super) fn serve(
    family: Family,
    bind: SocketAddr,
    is_echo: bool,
) -> Result<(SocketAddr, Arc<ServeCounters>), Failure> {
    let listening = Listener::bind(family, bind);
    let (listener, address) = listening.map_err(|error| {
        Failure::Usage(format!(
            "cannot listen at {bind}: {error}; choose a free address of this machine"
        ))
    })?;
    let served = Arc::new(ServeCounters::default());
    let counts = served.clone();
    std::thread::spawn(move || {
        loop {
            let Ok(connection) = listener.accept() else {
                // Out of descriptors, or the client has gone; keep accepting.
                std::thread::sleep(Duration::from_millis(10));
                continue;
            };
            let counts = counts.clone();
            std::thread::spawn(move || client(&connection, is_echo, &counts));
        }
    });
    Ok((address, served))
}

/// Serves one client until it closes; socket errors end the connection and are not reported.
fn client(connection: &Connection, is_echo: bool, counts: &ServeCounters) {
    counts.connections.fetch_add(1, Ordering::Relaxed);
    let mut stream = connection;
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = stream.read(&mut buffer) {
        counts.received.fetch_add(count as u64, Ordering::Relaxed);
        if is_echo {
            if stream.write_all(&buffer[..count]).is_err() {
                return;
            }
            counts.sent.fetch_add(count as u64, Ordering::Relaxed);
        }
    }
    if !is_echo {
        let _ = stream.write_all(&[1]);
    }
}

/// Connects, sends `request`, shuts down writing, and returns up to `max_bytes` bytes of the reply.
pub(super) fn talk(
    family: Family,
    server: SocketAddr,
    request: &[u8],
    max_bytes: u64,
    timeout: Duration,
) -> Result<Vec<u8>, Failure> {
    let connection = family.connect(server)?;
    connection.set_timeout(timeout).map_err(socket_error)?;
    let mut stream = &connection;
    stream.write_all(request).map_err(socket_error)?;
    connection.shutdown(Shutdown::Write).map_err(socket_error)?;
    let mut answer = Vec::new();
    stream.take(max_bytes).read_to_end(&mut answer).map_err(socket_error)?;
    Ok(answer)
}
