//! A test from the first word to the last.

use std::net::{SocketAddr, TcpListener};
use std::time::Duration;

use warpwire::verbs::exchange::Exchange;

use super::end::{End, Role};
use super::table::{self, Report, Row};
use super::test::{Metric, Test, Verb};
use super::word::{Done, Peer, Word};
use super::{Arguments, bw, lat};
use crate::output::{Failure, Screen, print};

/// Once connected, a peer that works says the next word within this, or within --timeout if that is longer.
const PATIENCE: Duration = Duration::from_secs(5);

pub(super) fn client(
    host: (&str, u16),
    test: Test,
    arguments: &Arguments,
    screen: &Screen,
) -> Result<Report, Failure> {
    screen.working(format!("connecting to {}:{}", host.0, host.1));
    let exchange = Exchange::connect(host, arguments.timeout())?;
    talk(exchange, Role::Client, test, arguments, screen)
}

pub(super) fn server(
    test: &Test,
    arguments: &Arguments,
    screen: &Screen,
) -> Result<Report, Failure> {
    let port = if arguments.announce { 0 } else { arguments.port };
    let address = SocketAddr::new(arguments.bind, port);
    let listener = TcpListener::bind(address).map_err(|why| {
        let fix = "give another port with -p, or an address of this machine with --bind";
        Failure::Broken(format!("cannot listen on {address}: {why}; {fix}"))
    })?;
    let address = listener.local_addr().unwrap_or(address);
    if arguments.announce {
        print(&format!("{}\n", address.port())).map_err(Failure::Broken)?;
    }
    screen.say(&format!(" Waiting for a client on {address}\n"))?;
    screen.working("waiting");
    let exchange = Exchange::accept(&listener, arguments.timeout()).map_err(|error| {
        Failure::Broken(format!("{error} (here: warpwire perf {} {})", test.name(), address.ip()))
    })?;
    talk(exchange, Role::Server, test.clone(), arguments, screen)
}

fn talk(
    exchange: Exchange,
    role: Role,
    test: Test,
    arguments: &Arguments,
    screen: &Screen,
) -> Result<Report, Failure> {
    let mut peer = Peer::new(exchange, arguments.timeout().max(PATIENCE));
    let outcome = converse(&mut peer, role, test, arguments, screen);
    if let Err(failure) = &outcome {
        peer.despair(failure);
    }
    outcome
}

/// The test that is run: the client's, if the server was started for it.
fn agree(peer: &mut Peer, role: Role, mine: Test) -> Result<Test, Failure> {
    let theirs = match peer.swap(&Word::Test(mine.clone()))? {
        Word::Test(theirs) => theirs,
        other => return Err(peer.unexpected(&other)),
    };
    if (theirs.verb, theirs.metric) != (mine.verb, mine.metric) {
        return Err(Failure::Broken(format!(
            "{} runs perf {}, and this side perf {}; run the same on both",
            peer.name,
            theirs.name(),
            mine.name()
        )));
    }
    let test = if role == Role::Client { mine } else { theirs };
    test.check().map_err(Failure::Broken)?;
    Ok(test)
}

fn converse(
    peer: &mut Peer,
    role: Role,
    test: Test,
    arguments: &Arguments,
    screen: &Screen,
) -> Result<Report, Failure> {
    let test = agree(peer, role, test)?;
    screen.working("preparing memory and queue pairs");
    let mut end = End::new(role, test, peer.sees()?, arguments)?;
    let ready = match peer.swap(&Word::Ready(end.ready()))? {
        Word::Ready(ready) => ready,
        other => return Err(peer.unexpected(&other)),
    };
    end.connect(&ready)?;
    screen.say(&table::head(&end.test, &end.side, &ready.side))?;
    screen.say(&table::columns(end.test.metric, arguments.report_gbits))?;
    let mut rows = Vec::new();
    for size in end.test.sizes.clone() {
        screen.working(format!("{}: {size} bytes", end.test.name()));
        let row = one_size(&end, peer, size)?;
        screen.say(&row.render(arguments.report_gbits))?;
        rows.push(row);
    }
    let counters = end.context.stats().pairs;
    // Who leaves early lets the other's last packets go unanswered.
    peer.meet()?;
    end.finish()?;
    Ok(Report { test: end.test, local: end.side, remote: ready.side, rows, counters })
}

fn one_size(end: &End, peer: &mut Peer, size: u64) -> Result<Row, Failure> {
    end.prepare(size)?;
    if end.test.verb == Verb::Send {
        bw::post_receives(end, size)?;
    }
    peer.meet()?;
    let mut watch = peer.watch(&end.context);
    let done = match (end.role, end.test.metric) {
        (Role::Client, Metric::Bw) => bw::run(end, size, &mut watch)?,
        (Role::Client, Metric::Lat) => lat::run(end, size, &mut watch)?,
        (Role::Server, metric) => {
            match metric {
                Metric::Lat if end.test.answers() => lat::serve(end, size, &mut watch)?,
                _ => bw::serve(end, size, &mut watch)?,
            }
            hear_done(peer, end)?
        }
    };
    if end.role == Role::Client {
        peer.tell(&Word::Done(done.clone()))?;
    }
    judge(end, peer, size, done)
}

fn hear_done(peer: &mut Peer, end: &End) -> Result<Done, Failure> {
    match peer.hear()? {
        Word::Done(done) if done.per_qp.len() == end.qps.len() => Ok(done),
        other => Err(peer.unexpected(&other)),
    }
}

/// Both sides look at their memory, and tell each other.
fn judge(end: &End, peer: &mut Peer, size: u64, done: Done) -> Result<Row, Failure> {
    let mine = end.verify(size, &done.per_qp)?;
    let theirs = match peer.swap(&Word::Verdict(mine.clone()))? {
        Word::Verdict(theirs) => theirs,
        other => return Err(peer.unexpected(&other)),
    };
    if let Some(wrong) = mine {
        return Err(Failure::Broken(format!("WRONG DATA from {}: {wrong}", peer.name)));
    }
    if let Some(wrong) = theirs {
        return Err(Failure::Broken(format!("WRONG DATA at {}: {wrong}", peer.name)));
    }
    Ok(Row { verified: end.test.verify, ..done.row })
}
