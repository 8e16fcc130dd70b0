//! A similarity server inside a kernel: clients send a vector and get the `k` most similar ones of
//! those in device memory.
//!
//! Similarity is the inner product; for unit vectors that is the cosine. Each block is a worker
//! with its own connections and scans all vectors for each query, one thread per vector. The result
//! is exact, and bitwise equal to that of [`search`].
//!
//! # Wire format
//! 32-bit words, little-endian, one query after the other:
//!
//! | | |
//! |---|---|
//! | query | [`MAGIC`], `k`, the dimension, 0; then the components, as floats |
//! | reply | [`MAGIC`], the [`ReplyStatus`], match count, 0; then (id, score) pairs, best first |
//!
//! A reply with any status but [`Found`](ReplyStatus::Found) has no matches, and the connection is
//! closed after it. The server also closes connections with a partial query, or an unread reply,
//! older than [`idle_timeout`](SimilarOptions::idle_timeout). Other clients are not affected.

mod client;
mod wire;
mod worker;

use std::net::SocketAddr;
use std::time::Duration;

use serde::Serialize;
use warpwire::error::{Error, Kind, Result};
use warpwire::mem::{Allocation, Program};
use warpwire::sock::SockHost;
use warpwire::sock::device;
use warpwire::sock::layout::address_bytes;

use crate::serving::{CONNECTION, CONTROL_LEN, Memory, POLLED, Server, check_numbers, setup};
pub use client::{KernelClient, Queries, ask_from_thread};
pub use wire::{
    HEAD, MAGIC, MATCH, ReplyStatus, SearchHit, ask, query_bytes, random_vectors, search,
};

const KERNEL: &str = "similarity_server";
const CLIENT_KERNEL: &str = "similarity_client";
/// Threads per block, and number of vectors that each scans between two merges into the best
/// matches.
const THREADS: u32 = 256;
const VECTORS_PER_THREAD: u64 = 8;
/// Size of the header before a worker's lists of best matches and candidates.
const WORKSPACE_HEADER: u64 = 16;

/// Byte offsets of the counters in device memory.
mod counts {
    pub(super) const CLIENTS: u64 = 0;
    pub(super) const QUERIES: u64 = 8;
    pub(super) const REFUSED: u64 = 16;
    pub(super) const CLOSED: u64 = 24;
    pub(super) const LEN: u64 = 32;
}

/// The socket family of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SocketFamily {
    /// TCP: any client.
    #[default]
    Inet,
    /// RDMA: kernels, and CPU programs with [`warp::WarpStream`](warpwire::sock::warp::WarpStream).
    Warp,
}

impl SocketFamily {
    fn kind(self) -> device::SocketKind {
        match self {
            Self::Inet => device::SocketKind::Stream,
            Self::Warp => device::SocketKind::WarpStream,
        }
    }
}

/// The socket kind with this number, as in a setup.
fn kind_of(number: u64) -> device::SocketKind {
    let warp = device::SocketKind::WarpStream;
    if number == warp as u64 { warp } else { device::SocketKind::Stream }
}

/// The kernels of server and client.
fn program() -> Program {
    Program::new("similarity")
        .ptx(include_str!("similarity.ptx"))
        .block(KERNEL, worker::similarity_block)
        .block(CLIENT_KERNEL, client::client_block)
}

/// Options of a similarity server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimilarOptions {
    /// The address to listen on; port 0 lets the system choose.
    pub address: SocketAddr,
    /// The socket family.
    pub over: SocketFamily,
    /// Number of blocks, 1 to 256.
    pub workers: u32,
    /// Maximum number of simultaneous clients, 1 to 60000.
    pub clients: u32,
    /// Maximum number of matches per query, 1 to 4096.
    pub max_k: u32,
    /// How long a partial query, or an unread reply, may stay before the connection is closed.
    pub idle_timeout: Duration,
}

impl SimilarOptions {
    /// The defaults: 4 workers, 128 clients, up to 128 matches, 10 s.
    pub fn at(address: SocketAddr) -> Self {
        Self {
            address,
            over: SocketFamily::Inet,
            workers: 4,
            clients: 128,
            max_k: 128,
            idle_timeout: Duration::from_secs(10),
        }
    }

    fn check(&self) -> Result<()> {
        check_numbers("start a similarity server", self.workers, self.clients)?;
        let refuse = |why: String, fix: &'static str| {
            Err(Error::new(Kind::InvalidArgument, "start a similarity server").why(why).fix(fix))
        };
        if self.max_k == 0 || self.max_k > 4096 {
            return refuse(format!("{} matches", self.max_k), "ask for 1 to 4096");
        }
        Ok(())
    }
}

setup! {
    /// The kernels' argument block, as in similarity.cu.
    struct Setup {
        table, vectors, vector_count, dimension, max_k, connections, connection_size, in_size,
        per_worker, workers, idle_timeout, control, max_clients, counts, kind, workspaces,
        workspace_size,
    }
}
const _: () = assert!(Setup::LEN == 160, "as in similarity.cu");

/// Counters of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SimilarStats {
    /// Clients currently connected.
    pub clients: u64,
    /// Queries answered.
    pub queries: u64,
    /// Connections closed because of an invalid query.
    pub refused: u64,
    /// Connections closed.
    pub closed: u64,
}

/// A running similarity server. Dropping it stops it.
///
/// ```
/// use std::net::TcpStream;
/// use warpwire::mem::sim::{Sim, SimConfig};
/// use warpwire::sock::{SockHost, SockOptions};
/// use warpwire_apps::similarity::{SimilarOptions, SimilarServer, ask, random_vectors, search};
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let host = SockHost::start(&gpu, SockOptions::default()).unwrap();
/// let vectors = random_vectors(1, 1000, 16);
/// let options = SimilarOptions::at(([127, 0, 0, 1], 0).into());
/// let server = SimilarServer::start(&host, &vectors, 16, options).unwrap();
/// let client = TcpStream::connect(server.address()).unwrap();
/// let query = random_vectors(2, 1, 16);
/// assert_eq!(ask(&client, 5, &query).unwrap(), search(&vectors, &query, 5));
/// ```
pub struct SimilarServer<'a> {
    serving: Server<'a>,
}

/// Allocates and initializes all memory of a server.
fn allocate(
    host: &SockHost,
    vectors: &[f32],
    dimension: u32,
    o: &SimilarOptions,
) -> Result<Memory> {
    let count = wire::check_vectors(vectors, dimension)?;
    let max_k = u64::from(o.max_k).min(count);
    let per_worker = u64::from(o.clients.div_ceil(o.workers)) + 1;
    let in_size = HEAD as u64 + u64::from(dimension) * 4;
    let out_size = HEAD as u64 + max_k * MATCH as u64;
    let connection_size = (CONNECTION + in_size + out_size).next_multiple_of(16);
    let workers = u64::from(o.workers);
    let candidates = u64::from(THREADS) * VECTORS_PER_THREAD;
    let workspace_size =
        (WORKSPACE_HEADER + (max_k + candidates) * MATCH as u64).next_multiple_of(128);
    let lists = (workers * (per_worker + 1) * POLLED).next_multiple_of(16);
    let stored = host.alloc(vectors.len() as u64 * 4)?;
    let connections = host.alloc(lists + workers * per_worker * connection_size)?;
    let workspaces = host.alloc(workers * workspace_size)?;
    let (counts, setup) = (host.alloc(counts::LEN)?, host.alloc(Setup::LEN)?);
    let control = host.device().alloc_pinned(CONTROL_LEN)?;
    counts.write(0, &[0; counts::LEN as usize])?;
    control.write(0, &[0; CONTROL_LEN as usize])?;
    store(&stored, vectors, dimension as usize)?;
    let values = Setup {
        table: host.table(),
        vectors: host.address_of(&stored)?,
        vector_count: count,
        dimension: u64::from(dimension),
        max_k: u64::from(o.max_k),
        connections: host.address_of(&connections)?,
        connection_size,
        in_size,
        per_worker,
        workers,
        idle_timeout: o.idle_timeout.as_nanos() as u64,
        control: host.address_of(&control)?,
        max_clients: u64::from(o.clients),
        counts: host.address_of(&counts)?,
        kind: o.over.kind() as u64,
        workspaces: host.address_of(&workspaces)?,
        workspace_size,
        address: address_bytes(Some(o.address)),
    };
    setup.write(0, &values.bytes())?;
    Ok(Memory { setup, control, counts, _others: [stored, connections, workspaces] })
}

/// Stores vectors transposed, component by component, so that accesses of neighbouring threads
/// coalesce.
fn store(memory: &Allocation, vectors: &[f32], dimension: usize) -> Result<()> {
    let count = vectors.len() / dimension;
    let mut row = Vec::with_capacity(count * 4);
    for component in 0..dimension {
        row.clear();
        let parts = vectors.iter().skip(component).step_by(dimension);
        row.extend(parts.flat_map(|part| part.to_le_bytes()));
        memory.write((component * count * 4) as u64, &row)?;
    }
    Ok(())
}

impl<'a> SimilarServer<'a> {
    /// Copies the vectors, contiguous and of that dimension, to device memory, launches the kernel,
    /// and returns when it listens.
    pub fn start(
        host: &'a SockHost,
        vectors: &[f32],
        dimension: u32,
        options: SimilarOptions,
    ) -> Result<Self> {
        options.check()?;
        let device = host.device();
        let kernel = device.load(&program())?.kernel(KERNEL)?;
        let memory = allocate(host, vectors, dimension, &options)?;
        let blocks = (options.workers, THREADS);
        let serving = Server::start(host, &kernel, blocks, memory, options.address)?;
        Ok(Self { serving })
    }

    /// Runs the workers on threads of a host for
    /// [`Place::Threads`](warpwire::sock::Place::Threads): `run` gets the address of the setup and
    /// the index of the worker. For tests of similarity.cu as C++.
    #[doc(hidden)]
    pub fn start_on_threads(
        host: &'a SockHost,
        vectors: &[f32],
        dimension: u32,
        options: SimilarOptions,
        run: impl Fn(u64, u64) + Clone + Send + 'static,
    ) -> Result<Self> {
        options.check()?;
        let memory = allocate(host, vectors, dimension, &options)?;
        let (workers, asked) = (options.workers, options.address);
        let serving = Server::start_on_threads(host, workers, memory, asked, run)?;
        Ok(Self { serving })
    }

    /// The address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.serving.address()
    }

    /// The current counters.
    pub fn stats(&self) -> Result<SimilarStats> {
        let [clients, queries, refused, closed] = self.serving.counts()?;
        Ok(SimilarStats { clients, queries, refused, closed })
    }

    /// Stops the server: closes all connections and waits for the kernel.
    pub fn stop(&self) -> Result<()> {
        self.serving.stop()
    }
}

impl std::fmt::Debug for SimilarServer<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimilarServer({:?})", self.serving)
    }
}
