//! `warpwire sock load`: load for key-value servers, like redis-benchmark's: N clients, each with M
//! commands in flight.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;

use super::peer;
use crate::copy::target::iterations;
use crate::output::{Failure, Reporter};

/// Load a key-value server (RESP), and verify every reply
///
/// Runs PING, SET, GET and INCR in turn and prints commands per second, and the 50th and 99th
/// percentile of the time until a whole pipeline is answered, in microseconds.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Arguments {
    /// Address of the server
    #[arg(value_name = "ADDRESS:PORT", value_parser = super::address)]
    server: SocketAddr,

    /// Number of clients, one thread each
    #[arg(short = 'c', long, value_name = "N", default_value = "50", value_parser = iterations)]
    clients: u32,

    /// Total number of commands of each kind
    #[arg(short = 'n', long, value_name = "N", default_value = "100000", value_parser = iterations)]
    requests: u32,

    /// Commands that a client sends before it waits for replies
    #[arg(short = 'P', long, value_name = "N", default_value = "1", value_parser = iterations)]
    pipeline: u32,

    /// Size of a value, in bytes
    #[arg(short = 's', long, value_name = "BYTES", default_value_t = 3)]
    size: usize,

    /// Print JSON: {"rows": [{"command": …, "per_second": …, "p50_us": …, "p99_us": …, "wrong":
    /// …}]}
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire sock load 127.0.0.1:6379
  warpwire sock load 127.0.0.1:6379 -c 16 -P 16 -s 64";

#[derive(Serialize)]
struct Report {
    clients: u32,
    pipeline: u32,
    rows: Vec<Row>,
}

#[derive(Serialize)]
struct Row {
    command: &'static str,
    per_second: f64,
    /// Time until a whole pipeline is answered.
    p50_us: f64,
    p99_us: f64,
    wrong: u64,
}

const COMMANDS: [&str; 4] = ["PING", "SET", "GET", "INCR"];

/// A command and its expected reply; `None` if any number is right.
fn exchange(command: &str, number: u32, value: &str) -> (String, Option<String>) {
    let key = format!("load:{:04}", number % 1000);
    let bulk = |words: &[&str]| {
        let words: String =
            words.iter().map(|word| format!("${}\r\n{word}\r\n", word.len())).collect();
        words
    };
    match command {
        "SET" => (format!("*3\r\n{}", bulk(&["SET", &key, value])), Some("+OK\r\n".to_owned())),
        "GET" => {
            let answer = format!("${}\r\n{value}\r\n", value.len());
            (format!("*2\r\n{}", bulk(&["GET", &key])), Some(answer))
        }
        "INCR" => (format!("*2\r\n{}", bulk(&["INCR", "load:counter"])), None),
        _ => (format!("*1\r\n{}", bulk(&["PING"])), Some("+PONG\r\n".to_owned())),
    }
}

/// Reads a reply line; true if it is a RESP integer.
fn number(stream: &mut TcpStream) -> std::io::Result<bool> {
    let mut byte = [0];
    stream.read_exact(&mut byte)?;
    let mut good = byte[0] == b':';
    loop {
        stream.read_exact(&mut byte)?;
        match byte[0] {
            b'\n' => return Ok(good),
            b'\r' | b'0'..=b'9' => {}
            _ => good = false,
        }
    }
}

struct Outcome {
    times: Vec<Duration>,
    wrong: u64,
}

impl Arguments {
    /// Runs one client's share of the commands.
    fn client(&self, command: &str, mut stream: TcpStream, share: u32) -> std::io::Result<Outcome> {
        let value = "x".repeat(self.size);
        let (mut times, mut wrong, mut done) = (Vec::new(), 0, 0);
        while done < share {
            let count = self.pipeline.min(share - done);
            let batch: Vec<_> = (0..count).map(|at| exchange(command, done + at, &value)).collect();
            let bytes: String = batch.iter().map(|(ask, _)| ask.as_str()).collect();
            let begun = Instant::now();
            stream.write_all(bytes.as_bytes())?;
            for (_, answer) in &batch {
                let good = match answer {
                    None => number(&mut stream)?,
                    Some(answer) => {
                        let mut found = vec![0; answer.len()];
                        stream.read_exact(&mut found)?;
                        found == answer.as_bytes()
                    }
                };
                wrong += u64::from(!good);
            }
            times.push(begun.elapsed());
            done += count;
        }
        Ok(Outcome { times, wrong })
    }

    fn row(&self, command: &'static str) -> Result<Row, Failure> {
        let share = self.requests.div_ceil(self.clients);
        let streams: Result<Vec<_>, _> =
            (0..self.clients).map(|_| peer::connect(self.server)).collect();
        let begun = Instant::now();
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let start = |stream| scope.spawn(move || self.client(command, stream, share));
            let clients: Vec<_> = streams?.into_iter().map(start).collect();
            let lost = || Err(std::io::Error::other("a client thread panicked"));
            Ok::<_, Failure>(
                clients.into_iter().map(|one| one.join().unwrap_or_else(|_| lost())).collect(),
            )
        })?;
        let seconds = begun.elapsed().as_secs_f64();
        let (mut times, mut wrong) = (Vec::new(), 0);
        for outcome in outcomes {
            let outcome = outcome.map_err(|error| {
                Failure::Runtime(format!("{command} at {}: {error}", self.server))
            })?;
            times.extend(outcome.times);
            wrong += outcome.wrong;
        }
        times.sort_unstable();
        let at = |part: usize| times[(times.len() - 1) * part / 100].as_secs_f64() * 1e6;
        let per_second = f64::from(share) * f64::from(self.clients) / seconds;
        Ok(Row { command, per_second, p50_us: at(50), p99_us: at(99), wrong })
    }

    pub(super) fn run(&self) -> Result<ExitCode, Failure> {
        let reporter = Reporter::for_measurement(self.json);
        reporter.print(&format!(
            "# {} clients, {} commands in flight each, values of {} bytes\n\
             {:<8}  {:>12}  {:>12}  {:>12}  {:>6}\n",
            self.clients, self.pipeline, self.size, "command", "per second", "p50", "p99", "wrong"
        ))?;
        let mut rows = Vec::new();
        for command in COMMANDS {
            reporter.set_status(command);
            let row = self.row(command)?;
            reporter.print(&format!(
                "{:<8}  {:>12.0}  {:>9.1} us  {:>9.1} us  {:>6}\n",
                row.command, row.per_second, row.p50_us, row.p99_us, row.wrong
            ))?;
            rows.push(row);
        }
        let wrong: u64 = rows.iter().map(|row| row.wrong).sum();
        reporter.finish(&Report { clients: self.clients, pipeline: self.pipeline, rows })?;
        Ok(if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }
}
