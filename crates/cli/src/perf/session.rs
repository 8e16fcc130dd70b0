//! A test session: negotiation, setup, measurement of each size, verification.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use warpwire::Error;
use warpwire::error::Kind;
use warpwire::verbs::bootstrap::{Bootstrap, BootstrapListener};

use super::control::{ControlChannel, ControlMsg, Done};
use super::endpoint::{Endpoint, Role};
use super::table::{self, Report, Row};
use super::test::{Metric, Test, Verb};
use super::{Arguments, bw, lat};
use crate::output::{Failure, Reporter, print};

/// Min value of the timeout once connected, whatever `--timeout` is.
const TIMEOUT: Duration = Duration::from_secs(5);

pub(super) fn client(
    host: (&str, u16),
    test: Test,
    arguments: &Arguments,
    reporter: &Reporter,
) -> Result<Report, Failure> {
    reporter.set_status(format!("connecting to {}:{}", host.0, host.1));
    let bootstrap = Bootstrap::connect(host, arguments.timeout())?;
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
    reporter.print(&format!(" Waiting for a client on {address}\n"))?;
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
    let mut endpoint = Endpoint::new(role, test, peer.local_ip()?, arguments)?;
    let ready = match peer.swap(&ControlMsg::Ready(endpoint.ready()))? {
        ControlMsg::Ready(ready) => ready,
        other => return Err(peer.unexpected(&other)),
    };
    endpoint.connect(&ready)?;
    reporter.print(&table::head(&endpoint.test, &endpoint.info, &ready.info))?;
    reporter.print(&table::columns(endpoint.test.metric, arguments.report_gbits))?;
    if endpoint.test.verb == Verb::Send {
        bw::post_receives(&endpoint)?;
    }
    let mut rows = Vec::new();
    for size in endpoint.test.sizes.clone() {
        reporter.set_status(format!("{}: {size} bytes", endpoint.test.name()));
        let row = one_size(&endpoint, peer, size)?;
        reporter.print(&row.render(arguments.report_gbits))?;
        rows.push(row);
    }
    let counters = endpoint.context.stats().map(|stats| stats.pairs);
    // A side that exits early leaves the peer's last packets unacknowledged.
    peer.barrier()?;
    endpoint.finish()?;
    Ok(Report { test: endpoint.test, local: endpoint.info, remote: ready.info, rows, counters })
}

fn one_size(endpoint: &Endpoint, peer: &mut ControlChannel, size: u64) -> Result<Row, Failure> {
    endpoint.prepare(size)?;
    peer.barrier()?;
    let mut watchdog = peer.watchdog(&endpoint.context);
    let done = match (endpoint.role, endpoint.test.metric) {
        (Role::Client, Metric::Bw) => bw::run(endpoint, size, &mut watchdog)?,
        (Role::Client, Metric::Lat) => lat::run(endpoint, size, &mut watchdog)?,
        (Role::Server, metric) => {
            match metric {
                Metric::Lat if endpoint.test.is_ping_pong() => {
                    lat::serve(endpoint, size, &mut watchdog)?
                }
                _ => bw::serve(endpoint, &mut watchdog)?,
            }
            recv_done(peer, endpoint)?
        }
    };
    if endpoint.role == Role::Client {
        peer.send(&ControlMsg::Done(done.clone()))?;
    }
    exchange_verdicts(endpoint, peer, size, done)
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
    done: Done,
) -> Result<Row, Failure> {
    let mine = endpoint.verify(size, &done.per_qp)?;
    let theirs = match peer.swap(&ControlMsg::Verdict(mine.clone()))? {
        ControlMsg::Verdict(theirs) => theirs,
        other => return Err(peer.unexpected(&other)),
    };
    if let Some(wrong) = mine {
        return Err(Failure::Runtime(format!("WRONG DATA from {}: {wrong}", peer.name)));
    }
    if let Some(wrong) = theirs {
        return Err(Failure::Runtime(format!("WRONG DATA at {}: {wrong}", peer.name)));
    }
    Ok(Row { verified: endpoint.test.verify, ..done.row })
}
