//! A test session: negotiation, setup, measurement of each size, verification.

use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use warpwire::Error;
use warpwire::error::Kind;
use warpwire::verbs::bootstrap::{Bootstrap, BootstrapListener};

use super::control::{ControlChannel, ControlMsg, Done, EndpointInfo, Verdict};
use super::endpoint::{Endpoint, Role};
use super::samples::{self, Samples};
use super::table::{self, Report, Row};
use super::test::{Metric, Test, Verb};
use super::{Arguments, bw, lat};
use crate::machine::{CpuMeter, Machine};
use crate::output::{Failure, HostPort, Reporter, print};

/// Min value of the timeout once connected, whatever `--timeout` is.
const TIMEOUT: Duration = Duration::from_secs(5);

pub(super) fn client(
    host: HostPort<'_>,
    test: Test,
    arguments: &Arguments,
    reporter: &Reporter,
) -> Result<Report, Failure> {
    reporter.set_status(format!("connecting to {host}"));
    let connect = || Bootstrap::connect(host, arguments.timeout());
    let bootstrap = reporter.wait_for(&host.to_string(), connect)?;
    run_client(bootstrap, test, arguments, reporter)
}

pub(super) fn run_client(
    bootstrap: Bootstrap,
    test: Test,
    arguments: &Arguments,
    reporter: &Reporter,
) -> Result<Report, Failure> {
    run_session(bootstrap, (Role::Client, test, None), arguments, reporter)
}

pub(super) fn server(
    test: &Test,
    arguments: &Arguments,
    reporter: &Reporter,
) -> Result<Report, Failure> {
    let port = if arguments.announce { 0 } else { arguments.port };
    let address = SocketAddr::new(arguments.bind, port);
    let listener = TcpListener::bind(address).map_err(|why| {
        let fix = "give another port with -p, or an address of this machine with --bind";
        Failure::Runtime(format!("cannot listen on {address}: {why}; {fix}"))
    })?;
    let address = listener.local_addr().unwrap_or(address);
    if arguments.announce {
        print(&format!("{}\n", address.port())).map_err(Failure::Runtime)?;
    }
    if !arguments.csv {
        reporter.print(&format!("# waiting for a client on {address}\n"))?;
    }
    reporter.set_status("waiting");
    let max_memory = arguments.max_memory();
    let mut listener = BootstrapListener::new(listener)?;
    let accepted = listener.accept(arguments.timeout(), |peer| receive_test(peer, max_memory));
    let (bootstrap, theirs) = accepted.map_err(|error| {
        Failure::Runtime(format!(
            "{error} (client: warpwire perf {} {})",
            test.name(),
            address.ip()
        ))
    })?;
    run_session(bootstrap, (Role::Server, test.clone(), Some(theirs)), arguments, reporter)
}

/// The first message of a client: a test that this side can run. A connection that sends anything
/// else is told why, and dropped.
fn receive_test(peer: &mut Bootstrap, max_memory: u64) -> warpwire::Result<Test> {
    let received = peer.recv().and_then(|msg| {
        match msg {
            ControlMsg::Test(test) => test.check_for_server(max_memory).map(|()| test),
            _ => Err("it did not send a test".to_owned()),
        }
        .map_err(|why| Error::new(Kind::InvalidArgument, "run a test").why(why))
    });
    if let Err(error) = &received {
        let _ = peer.send(&ControlMsg::Failed(error.reason().to_owned()));
    }
    received
}

/// The role, this side's test, and the peer's if it is known.
type Negotiation = (Role, Test, Option<Test>);

fn run_session(
    bootstrap: Bootstrap,
    negotiation: Negotiation,
    arguments: &Arguments,
    reporter: &Reporter,
) -> Result<Report, Failure> {
    let mut peer = ControlChannel::new(bootstrap, arguments.timeout().max(TIMEOUT));
    let outcome = run_test(&mut peer, negotiation, arguments, reporter);
    if let Err(failure) = &outcome {
        peer.send_failure(failure);
    }
    outcome
}

/// Exchanges the tests and returns the client's; fails if the server was started for another verb
/// or metric.
fn negotiate(
    peer: &mut ControlChannel,
    (role, mine, theirs): Negotiation,
) -> Result<Test, Failure> {
    peer.send(&ControlMsg::Test(mine.clone()))?;
    let theirs = match theirs {
        Some(theirs) => theirs,
        None => match peer.recv()? {
            ControlMsg::Test(theirs) => theirs,
            other => return Err(peer.unexpected(&other)),
        },
    };
    if (theirs.verb, theirs.metric) != (mine.verb, mine.metric) {
        return Err(Failure::Runtime(format!(
            "{} runs perf {}, this side perf {}; run the same test on both",
            peer.name,
            theirs.name(),
            mine.name()
        )));
    }
    let test = if role == Role::Client { mine } else { theirs };
    test.check().map_err(Failure::Runtime)?;
    Ok(test)
}

fn run_test(
    peer: &mut ControlChannel,
    negotiation: Negotiation,
    arguments: &Arguments,
    reporter: &Reporter,
) -> Result<Report, Failure> {
    let role = negotiation.0;
    let test = negotiate(peer, negotiation)?;
    reporter.set_status("preparing memory and queue pairs");
    // The client of --local, on the same machine, says it for both.
    let mut machine = match arguments.announce {
        true => Machine::now(),
        false => reporter.machine(),
    };
    let mut endpoint = Endpoint::new(role, test, peer.local_ip()?, arguments)?;
    let mut ready = match peer.swap(&ControlMsg::Ready(endpoint.ready()))? {
        ControlMsg::Ready(ready) => ready,
        other => return Err(peer.unexpected(&other)),
    };
    let mtu = endpoint.info.mtu.min(ready.info.mtu);
    if !endpoint.test.limit_sizes(mtu) && role == Role::Client {
        reporter.note(&format!("# UD messages are at most the MTU: {mtu} bytes here"));
    }
    endpoint.connect(&ready)?;
    ready.info.mtu = ready.info.mtu.max(endpoint.info.mtu);
    print_head(&endpoint, &ready.info, arguments, reporter)?;
    if endpoint.test.verb == Verb::Send {
        bw::post_receives(&endpoint)?;
    }
    let interrupted = catch_interrupts(&endpoint.test)?;
    let mut rows = Vec::new();
    for number in 0.. {
        let sizes = &endpoint.test.sizes;
        let size = match sizes.get(number) {
            Some(size) => *size,
            None if endpoint.test.endless => sizes[number % sizes.len()],
            None => break,
        };
        reporter.set_status(format!("{}: {size} bytes", endpoint.test.name()));
        endpoint.prepare(size)?;
        if !peer.barrier_unless(interrupted.load(Ordering::Relaxed))? {
            break;
        }
        let (row, samples) = one_size(&endpoint, peer, size)?;
        let row = samples::add(row, &samples, arguments);
        reporter.print(&table::row(&row, arguments))?;
        reporter.print(&samples::render(&row, arguments))?;
        rows.push(row);
    }
    let (counters, direct) =
        endpoint.context.stats().map(|stats| (stats.pairs, stats.direct)).unzip();
    if role == Role::Client && !arguments.csv {
        reporter.print(&direct.as_ref().map_or_else(String::new, table::direct))?;
    }
    // A side that exits early leaves the peer's last packets unacknowledged.
    peer.barrier()?;
    let omitted = endpoint.finish()?;
    if let (Some((path, max_bytes)), 1..) = (arguments.capture(), omitted) {
        let (path, max_bytes) = (path.display(), warpwire::units::bytes(max_bytes));
        reporter.note(&format!(
            "# {path} is full at {max_bytes}: {omitted} packets are not in it; see --pcap-max"
        ));
    }
    if !arguments.announce {
        reporter.finish_machine(&mut machine);
    }
    let (test, local, remote) = (endpoint.test, endpoint.info, ready.info);
    Ok(Report { machine, test, local, remote, rows, counters, direct })
}

fn print_head(
    endpoint: &Endpoint,
    remote: &EndpointInfo,
    arguments: &Arguments,
    reporter: &Reporter,
) -> Result<(), Failure> {
    let (test, local) = (&endpoint.test, &endpoint.info);
    if !arguments.csv {
        // Once connected, `auto` has chosen a link.
        let link = endpoint.qps[0].path().map_or_else(|_| local.link.clone(), |it| it.to_string());
        let chosen = EndpointInfo { link, ..local.clone() };
        reporter.print(&table::head(test, &chosen, remote))?;
        if arguments.verbose {
            reporter.print(&table::details(local, remote))?;
        }
    }
    reporter.print(&table::columns(test.metric, arguments))
}

/// Set by SIGINT and SIGTERM if the test has no end of its own.
fn catch_interrupts(test: &Test) -> Result<Arc<AtomicBool>, Failure> {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let interrupted = Arc::new(AtomicBool::new(false));
    if test.endless {
        for signal in [SIGINT, SIGTERM] {
            signal_hook::flag::register(signal, interrupted.clone())
                .map_err(|why| Failure::Runtime(format!("cannot listen for signals: {why}")))?;
        }
    }
    Ok(interrupted)
}

/// Results of the sides that send, and the messages that this side received.
struct Outcome {
    /// The result of this side, or of the only side that sends.
    done: Done,
    /// The other side's, if both send.
    peer_done: Option<Done>,
    received: u64,
}

fn one_size(
    endpoint: &Endpoint,
    peer: &mut ControlChannel,
    size: u64,
) -> Result<(Row, Samples), Failure> {
    let cpu = CpuMeter::start();
    let mut samples = Samples::new();
    let outcome = match (endpoint.role, endpoint.test.metric) {
        (_, Metric::Bw) if endpoint.test.bidirectional => both_ways(endpoint, peer, size)?,
        (Role::Client, metric) => {
            let mut watchdog = peer.watchdog(&endpoint.context, &endpoint.test);
            let done = match metric {
                Metric::Bw => bw::run(endpoint, size, &mut watchdog)?.0,
                Metric::Lat => {
                    let (done, times) = lat::run(endpoint, size, &mut watchdog)?;
                    samples = times;
                    done
                }
            };
            Outcome { done, peer_done: None, received: 0 }
        }
        (Role::Server, metric) => {
            let mut watchdog = peer.watchdog(&endpoint.context, &endpoint.test);
            let received = match metric {
                Metric::Lat if endpoint.test.is_ping_pong() => {
                    lat::serve(endpoint, size, &mut watchdog).map(|()| 0)?
                }
                _ => bw::serve(endpoint, &mut watchdog)?,
            };
            Outcome { done: recv_done(peer, endpoint)?, peer_done: None, received }
        }
    };
    let cpu_percent = cpu.percent();
    if endpoint.role == Role::Client && outcome.peer_done.is_none() {
        peer.send(&ControlMsg::Done(outcome.done.clone()))?;
    }
    Ok((exchange_verdicts(endpoint, peer, size, outcome, cpu_percent)?, samples))
}

/// Both sides send. The one that finishes first goes on receiving until the other has finished.
fn both_ways(
    endpoint: &Endpoint,
    peer: &mut ControlChannel,
    size: u64,
) -> Result<Outcome, Failure> {
    let mut watchdog = peer.watchdog(&endpoint.context, &endpoint.test);
    let (done, mut received) = bw::run(endpoint, size, &mut watchdog)?;
    watchdog.peer.send(&ControlMsg::Done(done.clone()))?;
    received += bw::serve(endpoint, &mut watchdog)?;
    let peer_done = match watchdog.peer_done.take() {
        Some(early) if early.per_qp.len() == endpoint.qps.len() => early,
        Some(early) => return Err(peer.unexpected(&ControlMsg::Done(early))),
        None => recv_done(peer, endpoint)?,
    };
    Ok(Outcome { done, peer_done: Some(peer_done), received })
}

fn recv_done(peer: &mut ControlChannel, endpoint: &Endpoint) -> Result<Done, Failure> {
    match peer.recv()? {
        ControlMsg::Done(done) if done.per_qp.len() == endpoint.qps.len() => Ok(done),
        other => Err(peer.unexpected(&other)),
    }
}

/// Both sides verify their memory and exchange the results.
fn exchange_verdicts(
    endpoint: &Endpoint,
    peer: &mut ControlChannel,
    size: u64,
    outcome: Outcome,
    cpu_percent: f64,
) -> Result<Row, Failure> {
    let test = &endpoint.test;
    let Outcome { done, peer_done, received } = outcome;
    // What arrived here was sent by the peer, if both sides send.
    let arrived = match &peer_done {
        Some(theirs) if test.verb != Verb::Read => theirs,
        _ => &done,
    };
    let (_, takes) = test.uses(endpoint.role);
    let is_counted = test.verb == Verb::Send && test.metric == Metric::Bw && takes;
    let received = (is_counted && test.connection.is_lossy()).then_some(received);
    let wrong = match received {
        Some(0) => Some(format!("{size} bytes: no message arrived")),
        _ => endpoint.verify(size, &arrived.per_qp)?,
    };
    let mine = Verdict { wrong, received, cpu_percent };
    let theirs = match peer.swap(&ControlMsg::Verdict(mine.clone()))? {
        ControlMsg::Verdict(theirs) => theirs,
        other => return Err(peer.unexpected(&other)),
    };
    if let Some(wrong) = mine.wrong {
        return Err(Failure::Runtime(format!("WRONG DATA from {}: {wrong}", peer.name)));
    }
    if let Some(wrong) = theirs.wrong {
        return Err(Failure::Runtime(format!("WRONG DATA at {}: {wrong}", peer.name)));
    }
    let sent =
        |done: &Done| done.per_qp.iter().fold(0_u64, |sum, count| sum.saturating_add(*count));
    let lost = |received: Option<u64>, from: &Done| {
        received.map(|received| sent(from).saturating_sub(received))
    };
    // Each side counts what it received of the other.
    let lost = match (lost(mine.received, arrived), lost(theirs.received, &done)) {
        (None, None) => None,
        (here, there) => Some(here.unwrap_or(0).saturating_add(there.unwrap_or(0))),
    };
    let figures = match peer_done {
        Some(theirs) => done.row.figures.sum(&theirs.row.figures),
        None => done.row.figures,
    };
    Ok(Row {
        figures,
        verified: test.verify,
        local_cpu_percent: cpu_percent,
        remote_cpu_percent: theirs.cpu_percent,
        lost,
        ..done.row
    })
}
