//! The similarity server, and clients that compare every answer with a search of their own.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;
use warpwire::sock::{SockOptions, SockStats, warp};
use warpwire_apps::similarity::{
    KernelClient, Over, Questions, SimilarOptions, SimilarServer, SimilarStats, ask,
    random_vectors, search,
};

use super::peer::Family;
use super::serve::{announce, traffic, wait};
use super::{SockTarget, heading};
use crate::copy::target::iterations;
use crate::output::{self, Failure, Reporter, print_json};

/// How long a client waits for an answer.
const TIMEOUT: Duration = Duration::from_secs(30);
/// What queries are made from; vectors have smaller seeds.
const QUERIES: u64 = 1 << 20;

/// Serve similar vectors from a kernel, or ask such a server (--connect)
///
/// The vectors are random, by their seed: both ends make the same, so that a client can search by itself and compare every
/// answer, to the bit. They lie in device memory; a query's most similar are those with the highest inner products.
#[derive(Args)]
pub(super) struct Arguments {
    #[command(flatten)]
    target: SockTarget,

    /// Where to listen; port 0 lets the system choose
    #[arg(
        long,
        value_name = "ADDRESS:PORT",
        default_value = "127.0.0.1:7001",
        conflicts_with = "connect"
    )]
    bind: SocketAddr,

    /// Ask the server there, from this CPU, instead of serving
    #[arg(long, value_name = "ADDRESS:PORT")]
    connect: Option<SocketAddr>,

    /// Ask from a kernel of the device instead: one client, one query after the other
    #[arg(long, requires = "connect")]
    from_kernel: bool,

    /// How many vectors
    #[arg(long, value_name = "N", default_value = "10000", value_parser = iterations)]
    vectors: u32,

    /// Components of a vector
    #[arg(long, value_name = "N", default_value = "128", value_parser = iterations)]
    dimension: u32,

    /// What the vectors are made from
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(..QUERIES))]
    seed: u64,

    /// Matches that a query asks for; a server's limit
    #[arg(short = 'k', long, value_name = "N", default_value = "10", value_parser = iterations)]
    matches: u32,

    /// Clients: a server's limit, or how many ask at a time
    #[arg(short = 'c', long, value_name = "N", default_value = "8", value_parser = iterations)]
    clients: u32,

    /// Blocks of the kernel
    #[arg(short = 'w', long, value_name = "N", default_value_t = 4)]
    workers: u32,

    /// Queries in all
    #[arg(short = 'n', long, value_name = "N", default_value = "1000", value_parser = iterations)]
    queries: u32,

    /// Stop serving after so long; without it, serve until interrupted
    #[arg(long, value_name = "SECONDS")]
    seconds: Option<u64>,

    /// Print JSON: of a server {"address": …, "similar": {…}, "sockets": {…}}, of clients {"per_second": …, "p50_us": …, "wrong": …}
    #[arg(long)]
    json: bool,
}

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
    /// By a clock of the CPU's: a kernel tells its whole time alone.
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
                "cannot make {} vectors of {}: that is more than 16 GiB; ask for fewer",
                self.vectors, self.dimension
            )));
        }
        match self.connect {
            Some(server) if self.from_kernel => self.ask_from_kernel(server),
            Some(server) => self.ask(server),
            None => self.serve(),
        }
    }

    fn over(&self) -> Over {
        match self.target.family {
            Family::Inet => Over::Inet,
            Family::Warp => Over::Warp,
        }
    }

    fn ask_from_kernel(&self, server: SocketAddr) -> Result<ExitCode, Failure> {
        let (host, _) = self.target.open(SockOptions::default())?;
        let vectors: Vec<f32> = (0..u64::from(self.queries))
            .flat_map(|number| random_vectors(QUERIES + number, 1, self.dimension))
            .collect();
        let asked = Questions {
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

    /// Prints what clients have seen.
    fn print_report(&self, report: &ClientReport) -> Result<ExitCode, Failure> {
        let reporter = Reporter::new(self.json);
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
        // Those that are turned away need places too.
        let sockets = (self.clients.saturating_add(64)).min(65_535);
        let options = SockOptions { sockets, ..SockOptions::default() }.fitted();
        let (host, no_cuda) = self.target.open(options)?;
        let options = SimilarOptions {
            over: self.over(),
            workers: self.workers,
            clients: self.clients,
            most_k: self.matches,
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

    /// What one client does: the times of its queries, and how many answers were wrong.
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
            |error: std::io::Error| Failure::Runtime(format!("cannot ask {server}: {error}"));
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
            let set_status: Vec<_> = streams.into_iter().enumerate().map(start).collect();
            let lost = || Err(std::io::Error::other("a client stopped"));
            set_status.into_iter().map(|one| one.join().unwrap_or_else(|_| lost())).collect()
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
        // Comparing is no part of it.
        let per_second = times.len() as f64 / slowest_client.as_secs_f64();
        let (clients, queries) = (self.clients, times.len() as u64);
        let (p50_us, p99_us) = (Some(at(50)), Some(at(99)));
        self.print_report(&ClientReport { clients, queries, per_second, p50_us, p99_us, wrong })
    }
}
