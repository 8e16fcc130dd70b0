//! A similarity server inside a kernel: clients send a vector, and get the `k` most similar of those in device memory.
//!
//! Similarity is the inner product; of vectors of length 1 that is the cosine. Each block is a worker with connections of its
//! own, and looks at all vectors for each query, a thread per vector. The answer is exact, and the same to the bit as that of
//! [`search`].
//!
//! # What is said
//! Words of 32 bits, little-endian, one query after the other:
//!
//! | | |
//! |---|---|
//! | query | [`MAGIC`], `k`, the dimension, 0; then the components, as floats |
//! | answer | [`MAGIC`], the [`Status`], how many matches follow, 0; then for each its id and its score, the best first |
//!
//! Any status but [`Found`](Status::Found) comes without matches, and closes the connection. Whoever sends half a query and then
//! nothing for [`patience`](SimilarOptions::patience), or takes no answers for as long, is closed. Nobody else notices.

mod client;
mod wire;
mod worker;

use std::net::SocketAddr;
use std::time::Duration;

use serde::Serialize;
use warpwire::error::{Error, Kind, Result};
use warpwire::mem::sim::{Block, KernelFault};
use warpwire::mem::{Allocation, DeviceAddr, Program};
use warpwire::sock::SockHost;
use warpwire::sock::device;
use warpwire::sock::layout::{ADDRESS_LEN, address_bytes};

use crate::serving::{CONTROL_LEN, Memory, Server, check_numbers, read_setup, setup_bytes};
pub use client::{KernelClient, Questions, ask_from_thread};
pub use wire::{HEAD, MAGIC, MATCH, Match, Status, ask, query_bytes, random_vectors, search};

const KERNEL: &str = "similarity_server";
const CLIENT_KERNEL: &str = "similarity_client";
/// Threads of a worker's block, and how many vectors each looks at between two rounds of choosing.
const THREADS: u32 = 256;
const VECTORS_PER_THREAD: u64 = 8;
/// What a connection has beside its buffers, and its entry in the list of those that are polled.
const CONNECTION: u64 = 32;
const POLLED: u64 = 8;
/// What lies before a worker's lists of candidates and of the best.
const DESK: u64 = 16;

/// Counters in device memory.
mod counts {
    pub(super) const CLIENTS: u64 = 0;
    pub(super) const QUERIES: u64 = 8;
    pub(super) const REFUSED: u64 = 16;
    pub(super) const CLOSED: u64 = 24;
    pub(super) const LEN: u64 = 32;
}

/// The family of sockets that a server's clients use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Over {
    /// TCP: any program.
    #[default]
    Inet,
    /// RDMA: kernels, and CPU programs with [`warp::WarpStream`](warpwire::sock::warp::WarpStream).
    Warp,
}

impl Over {
    fn kind(self) -> device::SocketKind {
        match self {
            Self::Inet => device::SocketKind::Stream,
            Self::Warp => device::SocketKind::WarpStream,
        }
    }
}

/// The kind of sockets that a setup's number means.
fn kind_of(number: u64) -> device::SocketKind {
    let warp = device::SocketKind::WarpStream;
    if number == warp as u64 { warp } else { device::SocketKind::Stream }
}

/// The kernels of both sides.
fn program() -> Program {
    Program::new("similarity")
        .ptx(include_str!("similarity.ptx"))
        .block(KERNEL, worker::similarity_block)
        .block(CLIENT_KERNEL, client::client_block)
}

/// How large the server is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimilarOptions {
    /// Where it listens; port 0 lets the system choose.
    pub address: SocketAddr,
    /// In which family.
    pub over: Over,
    /// How many blocks serve.
    pub workers: u32,
    /// How many clients there may be at a time.
    pub clients: u32,
    /// The most matches that a query may ask for.
    pub most_k: u32,
    /// How long half a query, or an answer that is not taken, is borne.
    pub patience: Duration,
}

impl SimilarOptions {
    /// A server of moderate size at an address.
    pub fn at(address: SocketAddr) -> Self {
        Self {
            address,
            over: Over::Inet,
            workers: 4,
            clients: 128,
            most_k: 128,
            patience: Duration::from_secs(10),
        }
    }

    fn check(&self) -> Result<()> {
        check_numbers("start a similarity server", self.workers, self.clients)?;
        let refuse = |why: String, fix: &'static str| {
            Err(Error::new(Kind::InvalidArgument, "start a similarity server").why(why).fix(fix))
        };
        if self.most_k == 0 || self.most_k > 4096 {
            return refuse(format!("{} matches", self.most_k), "ask for 1 to 4096");
        }
        Ok(())
    }
}

/// What kernels read: everything about the server. The same as in similarity.cu.
#[derive(Clone, Copy, Debug, Default)]
struct Setup {
    table: u64,
    vectors: u64,
    vector_count: u64,
    dimension: u64,
    most_k: u64,
    connections: u64,
    connection_size: u64,
    in_size: u64,
    per_worker: u64,
    workers: u64,
    patience: u64,
    control: u64,
    most_clients: u64,
    counts: u64,
    kind: u64,
    desks: u64,
    desk_size: u64,
    address: [u8; ADDRESS_LEN],
}

const SETUP_WORDS: usize = 17;
const SETUP_LEN: usize = SETUP_WORDS * 8 + ADDRESS_LEN;

impl Setup {
    fn words(&mut self) -> [&mut u64; SETUP_WORDS] {
        [
            &mut self.table,
            &mut self.vectors,
            &mut self.vector_count,
            &mut self.dimension,
            &mut self.most_k,
            &mut self.connections,
            &mut self.connection_size,
            &mut self.in_size,
            &mut self.per_worker,
            &mut self.workers,
            &mut self.patience,
            &mut self.control,
            &mut self.most_clients,
            &mut self.counts,
            &mut self.kind,
            &mut self.desks,
            &mut self.desk_size,
        ]
    }

    fn bytes(mut self) -> Vec<u8> {
        let address = self.address;
        setup_bytes(self.words(), &address)
    }

    fn read(block: &Block<'_>, at: DeviceAddr) -> std::result::Result<Self, KernelFault> {
        let mut setup = Self::default();
        setup.address = read_setup(block, at, setup.words())?;
        Ok(setup)
    }
}

/// What a server has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SimilarStats {
    /// Clients that are connected now.
    pub clients: u64,
    /// Queries answered.
    pub queries: u64,
    /// Connections closed for what they asked.
    pub refused: u64,
    /// Connections that have ended.
    pub closed: u64,
}

/// A similarity server at work. Dropping it ends it.
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

/// Lays out all memory of a server.
fn lay(host: &SockHost, vectors: &[f32], dimension: u32, o: &SimilarOptions) -> Result<Memory> {
    let count = wire::check_vectors(vectors, dimension)?;
    let most_k = u64::from(o.most_k).min(count);
    let per_worker = u64::from(o.clients.div_ceil(o.workers)) + 1;
    let in_size = HEAD as u64 + u64::from(dimension) * 4;
    let out_size = HEAD as u64 + most_k * MATCH as u64;
    let connection_size = (CONNECTION + in_size + out_size).next_multiple_of(16);
    let workers = u64::from(o.workers);
    let candidates = u64::from(THREADS) * VECTORS_PER_THREAD;
    let desk_size = (DESK + (most_k + candidates) * MATCH as u64).next_multiple_of(128);
    let lists = (workers * (per_worker + 1) * POLLED).next_multiple_of(16);
    let stored = host.alloc(vectors.len() as u64 * 4)?;
    let connections = host.alloc(lists + workers * per_worker * connection_size)?;
    let desks = host.alloc(workers * desk_size)?;
    let (counts, setup) = (host.alloc(counts::LEN)?, host.alloc(SETUP_LEN as u64)?);
    let control = host.device().alloc_pinned(CONTROL_LEN)?;
    counts.write(0, &[0; counts::LEN as usize])?;
    control.write(0, &[0; CONTROL_LEN as usize])?;
    store(&stored, vectors, dimension as usize)?;
    let told = Setup {
        table: host.table(),
        vectors: host.address_of(&stored)?,
        vector_count: count,
        dimension: u64::from(dimension),
        most_k: u64::from(o.most_k),
        connections: host.address_of(&connections)?,
        connection_size,
        in_size,
        per_worker,
        workers,
        patience: o.patience.as_nanos() as u64,
        control: host.address_of(&control)?,
        most_clients: u64::from(o.clients),
        counts: host.address_of(&counts)?,
        kind: o.over.kind() as u64,
        desks: host.address_of(&desks)?,
        desk_size,
        address: address_bytes(Some(o.address)),
    };
    setup.write(0, &told.bytes())?;
    Ok(Memory { setup, control, counts, _others: [stored, connections, desks] })
}

/// Stores vectors so that one component of all lies together: neighbouring threads read neighbouring words.
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
    /// Stores the vectors, of that dimension and one behind the other, in the memory of the host's device, starts the
    /// kernel, and returns when it listens.
    pub fn start(
        host: &'a SockHost,
        vectors: &[f32],
        dimension: u32,
        options: SimilarOptions,
    ) -> Result<Self> {
        options.check()?;
        let device = host.device();
        let kernel = device.load(&program())?.kernel(KERNEL)?;
        let memory = lay(host, vectors, dimension, &options)?;
        let blocks = (options.workers, THREADS);
        let serving = Server::start(host, &kernel, blocks, memory, options.address)?;
        Ok(Self { serving })
    }

    /// Starts workers as threads of a host for
    /// [`Place::Threads`](warpwire::sock::Place::Threads): `run` gets the setup's address and the
    /// worker's number. For tests of similarity.cu as C++.
    #[doc(hidden)]
    pub fn start_on_threads(
        host: &'a SockHost,
        vectors: &[f32],
        dimension: u32,
        options: SimilarOptions,
        run: impl Fn(u64, u64) + Clone + Send + 'static,
    ) -> Result<Self> {
        options.check()?;
        let memory = lay(host, vectors, dimension, &options)?;
        let (workers, asked) = (options.workers, options.address);
        let serving = Server::start_on_threads(host, workers, memory, asked, run)?;
        Ok(Self { serving })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.serving.address()
    }

    /// What it has done.
    pub fn stats(&self) -> Result<SimilarStats> {
        let [clients, queries, refused, closed] = self.serving.counts()?;
        Ok(SimilarStats { clients, queries, refused, closed })
    }

    /// Ends it: connections are closed, and the kernel returns.
    pub fn stop(&self) -> Result<()> {
        self.serving.stop()
    }
}

impl std::fmt::Debug for SimilarServer<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimilarServer({:?})", self.serving)
    }
}
