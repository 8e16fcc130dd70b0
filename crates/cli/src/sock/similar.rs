//! `warpwire sock similar`: the similarity search server, and clients that verify every reply with
//! their own search.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use warpwire::sock::{SockOptions, SockStats, warp};
use warpwire_apps::similarity::{
    KernelClient, Queries, SimilarOptions, SimilarServer, SimilarStats, SocketFamily, ask,
    random_vectors, search,
};

use super::peer::Family;
use super::serve::{announce, traffic, wait};
use super::{SockTarget, heading};
use crate::copy::target::iterations;
use crate::output::{self, Failure, Reporter, print_json};

/// How long a client waits for a reply.
const TIMEOUT: Duration = Duration::from_secs(30);
/// First seed of the queries; seeds of the vectors are smaller.
const QUERIES: u64 = 1 << 20;

/// Serve similarity search from a kernel, or query such a server (--connect)
///
/// The vectors are random and generated from --seed, in device memory. A client generates the same
/// vectors and verifies every reply bit by bit with its own search, so --vectors, --dimension and
/// --seed must match the server's. The matches of a query are the vectors with the highest inner
/// products.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Arguments {
    #[command(flatten)]
    target: SockTarget,

    /// Address to listen on; with port 0 the system chooses a port
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        default_value = "127.0.0.1:7001",
        value_parser = super::address,
        conflicts_with = "connect"
    )]
    bind: SocketAddr,

    /// Query the server at this address from the CPU, instead of serving
    #[arg(long, value_name = "ADDRESS:PORT", value_parser = super::address)]
    connect: Option<SocketAddr>,

    /// Query from a kernel instead of the CPU: one client, one query at a time
    #[arg(long, requires = "connect")]
    from_kernel: bool,

    /// Number of vectors
    #[arg(long, value_name = "N", default_value = "10000", value_parser = iterations)]
    vectors: u32,

    /// Components of a vector
    #[arg(long, value_name = "N", default_value = "128", value_parser = iterations)]
    dimension: u32,

    /// Seed of the vectors
    #[arg(long, value_name = "N", default_value_t = 1,
        value_parser = clap::value_parser!(u64).range(..QUERIES))]
    seed: u64,

    /// Matches per query; for a server, the max that a query may ask for
    #[arg(short = 'k', long, value_name = "N", default_value = "10", value_parser = iterations)]
    matches: u32,

    /// Number of concurrent clients; for a server, the max
    #[arg(short = 'c', long, value_name = "N", default_value = "8", value_parser = iterations)]
    clients: u32,

    /// Thread blocks of the kernel
    #[arg(short = 'w', long, value_name = "N", default_value_t = 4)]
    workers: u32,

    /// Total number of queries
    #[arg(short = 'n', long, value_name = "N", default_value = "1000", value_parser = iterations)]
    queries: u32,

    /// Stop serving after this time; default: serve until interrupted
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,

    /// Print JSON; server: {"address": …, "similar": {…}, "sockets": {…}}, client:
    /// {"per_second": …, "p50_us": …, "wrong": …}
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire sock similar --vectors 100000                       the server
  warpwire sock similar --vectors 100000 --connect 127.0.0.1:7001 -n 10000 -c 4
  warpwire sock similar --family warp --connect 127.0.0.1:7001 --from-kernel";

#[derive(Serialize)]
struct ServerReport {
    address: String,
    similar: SimilarStats,
    sockets: SockStats,
}

#[derive(Serialize)]
struct ClientReport {
    clients: u32,
    queries: u64,
    per_second: f64,
    /// `None` with `--from-kernel`, which measures the total time only.
    #[serde(skip_serializing_if = "Option::is_none")]
    p50_us: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    p99_us: Option<f64>,
    wrong: u64,
}

/// A connection of either family.
trait ReadWrite: Read + Write + Send {}
impl<T: Read + Write + Send> ReadWrite for T {}

impl Arguments {
    pub(super) fn run(&self) -> Result<ExitCode, Failure> {
        if self.vectors as u64 * self.dimension as u64 > 1 << 32 {
            return Err(Failure::Usage(format!(
                "cannot make {} vectors of dimension {}: that is more than 16 GiB; use fewer",
                self.vectors, self.dimension
            )));
        }
        match self.connect {
            Some(server) if self.from_kernel => self.ask_from_kernel(server),
            Some(server) => self.ask(server),
            None => self.serve(),
        }
    }

    fn over(&self) -> SocketFamily {
        match self.target.family {
            Family::Inet => SocketFamily::Inet,
            Family::Warp => SocketFamily::Warp,
        }
    }

    fn ask_from_kernel(&self, server: SocketAddr) -> Result<ExitCode, Failure> {
        let (host, _) = self.target.open(SockOptions::default())?;
        let vectors: Vec<f32> = (0..u64::from(self.queries))
            .flat_map(|number| random_vectors(QUERIES + number, 1, self.dimension))
            .collect();
        let asked = Queries {
            server,
            over: self.over(),
            k: self.matches,
            vectors: &vectors,
            dimension: self.dimension,
            timeout: TIMEOUT,
        };
        let client = KernelClient::load(&host)?;
        let begun = Instant::now();
        let found = client.ask(&asked)?;
        let seconds = begun.elapsed().as_secs_f64();
        let make_vectors = self.make_vectors();
        let each = vectors.chunks_exact(self.dimension as usize);
        let wrong = each
            .zip(&found)
            .filter(|(query, found)| search(&make_vectors, query, self.matches) != **found);
        let (queries, wrong) = (found.len() as u64, wrong.count() as u64);
        let per_second = queries as f64 / seconds;
        self.print_report(&ClientReport {
            clients: 1,
            queries,
            per_second,
            p50_us: None,
            p99_us: None,
            wrong,
        })
    }

    /// Prints the clients' figures.
    fn print_report(&self, report: &ClientReport) -> Result<ExitCode, Failure> {
        let reporter = Reporter::for_measurement(self.json);
        let time = |time: Option<f64>| time.map_or("-".to_owned(), |us| format!("{us:.1} us"));
        let head = format!(
            "# {} vectors of {}, {} matches, {} clients\n",
            self.vectors, self.dimension, self.matches, report.clients
        );
        let rows = format!(
            "{:>10}  {:>12}  {:>12}  {:>12}  {:>6}\n{:>10}  {:>12.0}  {:>12}  {:>12}  {:>6}\n",
            "queries",
            "per second",
            "p50",
            "p99",
            "wrong",
            report.queries,
            report.per_second,
            time(report.p50_us),
            time(report.p99_us),
            report.wrong
        );
        reporter.print(&(head + &rows))?;
        reporter.finish(report)?;
        Ok(if report.wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
    }

    fn make_vectors(&self) -> Vec<f32> {
        random_vectors(self.seed, self.vectors.into(), self.dimension)
    }

    fn serve(&self) -> Result<ExitCode, Failure> {
        // Clients above the limit need a socket too, to be refused.
        let sockets = (self.clients.saturating_add(64)).min(65_535);
        let options = SockOptions::default().with_sockets(sockets).with_fitting_arena();
        let (host, no_cuda) = self.target.open(options)?;
        let options = SimilarOptions {
            over: self.over(),
            workers: self.workers,
            clients: self.clients,
            max_k: self.matches,
            ..SimilarOptions::at(self.bind)
        };
        let server = SimilarServer::start(&host, &self.make_vectors(), self.dimension, options)?;
        let head = heading("similar", &host, no_cuda.as_deref());
        announce(self.json, &head, "a similarity kernel", server.address())?;
        wait(self.seconds);
        let (address, similar) = (server.address().to_string(), server.stats()?);
        drop(server);
        let sockets = host.stats();
        if self.json {
            print_json(&ServerReport { address, similar, sockets }).map_err(Failure::Runtime)?;
        } else {
            let text = format!(
                "{} queries, {} connections, {} refused, {}\n",
                similar.queries,
                sockets.accepted,
                similar.refused,
                traffic(&sockets)
            );
            output::print(&text).map_err(Failure::Runtime)?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn open(&self, server: SocketAddr) -> std::io::Result<Box<dyn ReadWrite>> {
        match self.target.family {
            Family::Inet => {
                let stream = TcpStream::connect(server)?;
                stream.set_nodelay(true)?;
                stream.set_read_timeout(Some(TIMEOUT))?;
                Ok(Box::new(stream))
            }
            Family::Warp => {
                let stream = warp::WarpStream::connect(server)?;
                stream.set_read_timeout(Some(TIMEOUT))?;
                Ok(Box::new(stream))
            }
        }
    }

    /// Runs one client; returns the times of its queries, and the number of wrong replies.
    fn client(
        &self,
        vectors: &[f32],
        mut server: Box<dyn ReadWrite>,
        first: u64,
        share: u64,
    ) -> std::io::Result<(Vec<Duration>, u64)> {
        let (mut times, mut wrong) = (Vec::new(), 0);
        for number in first..first + share {
            let query = random_vectors(QUERIES + number, 1, self.dimension);
            let begun = Instant::now();
            let found = ask(&mut server, self.matches, &query)?;
            times.push(begun.elapsed());
            wrong += u64::from(found != search(vectors, &query, self.matches));
        }
        Ok((times, wrong))
    }

    fn ask(&self, server: SocketAddr) -> Result<ExitCode, Failure> {
        let failed =
            |error: std::io::Error| Failure::Runtime(format!("cannot query {server}: {error}"));
        let (vectors, share) =
            (self.make_vectors(), u64::from(self.queries.div_ceil(self.clients)));
        let streams: Result<Vec<_>, _> = (0..self.clients).map(|_| self.open(server)).collect();
        let streams = streams.map_err(failed)?;
        let outcomes: Vec<_> = std::thread::scope(|scope| {
            let vectors = &vectors;
            let start = |(number, stream)| {
                let first = number as u64 * share;
                scope.spawn(move || self.client(vectors, stream, first, share))
            };
            let clients: Vec<_> = streams.into_iter().enumerate().map(start).collect();
            let lost = || Err(std::io::Error::other("a client thread panicked"));
            clients.into_iter().map(|one| one.join().unwrap_or_else(|_| lost())).collect()
        });
        let (mut times, mut wrong, mut slowest_client) = (Vec::new(), 0, Duration::ZERO);
        for outcome in outcomes {
            let (client_times, client_errors) = outcome.map_err(failed)?;
            slowest_client = slowest_client.max(client_times.iter().sum());
            times.extend(client_times);
            wrong += client_errors;
        }
        times.sort_unstable();
        let at = |part: usize| times[(times.len() - 1) * part / 100].as_secs_f64() * 1e6;
        // Time spent on verification does not count.
        let per_second = times.len() as f64 / slowest_client.as_secs_f64();
        let (clients, queries) = (self.clients, times.len() as u64);
        let (p50_us, p99_us) = (Some(at(50)), Some(at(99)));
        self.print_report(&ClientReport { clients, queries, per_second, p50_us, p99_us, wrong })
    }
}
