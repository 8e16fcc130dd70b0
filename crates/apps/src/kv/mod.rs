//! A key-value server inside a kernel. It speaks RESP, so that `redis-cli` and `redis-benchmark`
//! can be its clients.
//!
//! Each block is a worker with its own connections. The store is a hash table in device memory:
//! buckets of 16 slots with one lock each, keys of up to 112 bytes, values of up to
//! [`max_value`](KvOptions::max_value) bytes. It implements `GET`, `SET`, `DEL`, `EXISTS`,
//! `INCR`, `DECR`, `MGET`, `PING`, `ECHO`, `DBSIZE` and `QUIT`, pipelined or not, and the commands
//! that clients send when they connect.
//!
//! The server closes connections that violate RESP or exceed a limit, after an error reply where
//! possible, and those with a partial command, or unread replies, older than
//! [`idle_timeout`](KvOptions::idle_timeout). Clients beyond [`clients`](KvOptions::clients) get an
//! error reply and are closed. Other clients are not affected.

mod resp;
mod store;
mod worker;

use std::net::SocketAddr;
use std::time::Duration;

use serde::Serialize;
use warpwire::error::{Error, Kind, Result};
use warpwire::mem::Program;
use warpwire::sock::SockHost;
use warpwire::sock::layout::address_bytes;

use crate::serving::{CONNECTION, CONTROL_LEN, KERNEL_TIMEOUT, Memory, POLLED, Server};
use crate::serving::{check_numbers, setup};

const KERNEL: &str = "kv_server";
/// Threads per block.
const THREADS: u32 = 64;
const SLOTS_PER_BUCKET: u64 = 16;
const MAX_KEY: u64 = 112;

/// Byte offsets in a slot, and the values of `USED`.
mod slot {
    pub(super) const VACANT: u32 = 0;
    pub(super) const TEXT: u32 = 1;
    /// An integer, stored as a 64-bit word in place of the text.
    pub(super) const NUMBER: u32 = 2;
    pub(super) const USED: u64 = 0;
    pub(super) const HASH: u64 = 4;
    pub(super) const KEY_LENGTH: u64 = 8;
    pub(super) const VALUE_LENGTH: u64 = 12;
    pub(super) const KEY: u64 = 16;
}

/// Byte offsets of the counters in device memory.
mod counts {
    pub(super) const CLIENTS: u64 = 0;
    pub(super) const KEYS: u64 = 8;
    pub(super) const COMMANDS: u64 = 16;
    pub(super) const REFUSED: u64 = 24;
    pub(super) const CLOSED: u64 = 32;
    pub(super) const LEN: u64 = 40;
}

/// Options of a key-value server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvOptions {
    /// The address to listen on; port 0 lets the system choose.
    pub address: SocketAddr,
    /// Number of blocks, 1 to 256.
    pub workers: u32,
    /// Maximum number of simultaneous clients, 1 to 60000.
    pub clients: u32,
    /// Number of buckets of 16 keys each, a power of two up to 2^24.
    pub buckets: u64,
    /// Maximum length of a value, 16 bytes to 1 MiB, a multiple of 16.
    pub max_value: u64,
    /// How long a partial command, or an unread reply, may stay before the connection is closed.
    pub idle_timeout: Duration,
}

impl KvOptions {
    /// The defaults: 4 workers, 128 clients, 4096 buckets, values up to 1 KiB, 10 s.
    pub fn at(address: SocketAddr) -> Self {
        Self {
            address,
            workers: 4,
            clients: 128,
            buckets: 4096,
            max_value: 1024,
            idle_timeout: Duration::from_secs(10),
        }
    }

    fn check(&self) -> Result<()> {
        check_numbers("start a key-value server", self.workers, self.clients)?;
        let refuse = |why: String, fix: &'static str| {
            Err(Error::new(Kind::InvalidArgument, "start a key-value server").why(why).fix(fix))
        };
        if !self.buckets.is_power_of_two() || self.buckets > 1 << 24 {
            return refuse(
                format!("{} buckets", self.buckets),
                "ask for a power of two up to 2^24",
            );
        }
        if !(16..=1 << 20).contains(&self.max_value) || !self.max_value.is_multiple_of(16) {
            let why = format!("values of {} bytes", self.max_value);
            return refuse(why, "ask for 16 bytes to 1 MiB, a multiple of 16");
        }
        Ok(())
    }
}

setup! {
    /// The kernels' argument block, as in kv.cu.
    struct Setup {
        table, slots, locks, bucket_mask, slot_size, max_value, connections, connection_size,
        in_size, out_size, per_worker, workers, idle_timeout, control, max_clients, counts,
    }
}
const _: () = assert!(Setup::LEN == 152, "as in kv.cu");

/// Counters of a server.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct KvStats {
    /// Clients currently connected.
    pub clients: u64,
    /// Keys stored.
    pub keys: u64,
    /// Commands executed.
    pub commands: u64,
    /// Connections closed because of a protocol violation or an exceeded limit.
    pub refused: u64,
    /// Connections closed.
    pub closed: u64,
}

/// A running key-value server. Dropping it stops it.
///
/// ```
/// use std::io::{Read, Write};
/// use std::net::TcpStream;
/// use warpwire::mem::sim::{Sim, SimConfig};
/// use warpwire::sock::{SockHost, SockOptions};
/// use warpwire_apps::kv::{KvOptions, KvServer};
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let host = SockHost::start(&gpu, SockOptions::default()).unwrap();
/// let options = KvOptions { buckets: 64, ..KvOptions::at(([127, 0, 0, 1], 0).into()) };
/// let server = KvServer::start(&host, options).unwrap();
/// let mut client = TcpStream::connect(server.address()).unwrap();
/// client.write_all(b"SET colour blue\r\nGET colour\r\nQUIT\r\n").unwrap();
/// let mut answers = String::new();
/// client.read_to_string(&mut answers).unwrap();
/// assert_eq!(answers, "+OK\r\n$4\r\nblue\r\n+OK\r\n");
/// ```
pub struct KvServer<'a> {
    serving: Server<'a>,
}

/// Allocates and initializes all memory of a server.
fn allocate(host: &SockHost, options: &KvOptions) -> Result<Memory> {
    let slot_size = slot::KEY + MAX_KEY + options.max_value;
    let per_worker = u64::from(options.clients.div_ceil(options.workers)) + 1;
    let in_size = (options.max_value * 2 + 4096).next_multiple_of(4096);
    let out_size = (options.max_value * 16 + 8192).next_multiple_of(4096);
    let connection_size = CONNECTION + in_size + out_size;
    let workers = u64::from(options.workers);
    let slots = host.alloc(options.buckets * SLOTS_PER_BUCKET * slot_size)?;
    let locks = host.alloc(options.buckets * 4)?;
    let lists = (workers * (per_worker + 1) * POLLED).next_multiple_of(16);
    let connections = host.alloc(lists + workers * per_worker * connection_size)?;
    let (counts, setup) = (host.alloc(counts::LEN)?, host.alloc(Setup::LEN)?);
    let (control, stream) = (host.device().alloc_pinned(CONTROL_LEN)?, host.device().stream()?);
    for memory in [&slots, &locks, &counts] {
        stream.fill(&memory.whole()?, 0)?;
    }
    stream.synchronize(KERNEL_TIMEOUT)?;
    control.write(0, &[0; CONTROL_LEN as usize])?;
    let values = Setup {
        table: host.table(),
        slots: host.address_of(&slots)?,
        locks: host.address_of(&locks)?,
        bucket_mask: options.buckets - 1,
        slot_size,
        max_value: options.max_value,
        connections: host.address_of(&connections)?,
        connection_size,
        in_size,
        out_size,
        per_worker,
        workers,
        idle_timeout: options.idle_timeout.as_nanos() as u64,
        control: host.address_of(&control)?,
        max_clients: u64::from(options.clients),
        counts: host.address_of(&counts)?,
        address: address_bytes(Some(options.address)),
    };
    setup.write(0, &values.bytes())?;
    Ok(Memory { setup, control, counts, _others: [slots, locks, connections] })
}

impl<'a> KvServer<'a> {
    /// Launches the kernel on the host's device, and returns when it listens.
    pub fn start(host: &'a SockHost, options: KvOptions) -> Result<Self> {
        options.check()?;
        let device = host.device();
        let program = Program::new("key-value server")
            .ptx(include_str!("kv.ptx"))
            .block(KERNEL, worker::kv_block);
        let kernel = device.load(&program)?.kernel(KERNEL)?;
        let memory = allocate(host, &options)?;
        let blocks = (options.workers, THREADS);
        let serving = Server::start(host, &kernel, blocks, memory, options.address)?;
        Ok(Self { serving })
    }

    /// Runs the workers on threads of a host for
    /// [`Place::Threads`](warpwire::sock::Place::Threads): `run` gets the address of the setup and
    /// the index of the worker. For tests of kv.cu as C++.
    #[doc(hidden)]
    pub fn start_on_threads(
        host: &'a SockHost,
        options: KvOptions,
        run: impl Fn(u64, u64) + Clone + Send + 'static,
    ) -> Result<Self> {
        options.check()?;
        let memory = allocate(host, &options)?;
        let (workers, asked) = (options.workers, options.address);
        let serving = Server::start_on_threads(host, workers, memory, asked, run)?;
        Ok(Self { serving })
    }

    /// The address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.serving.address()
    }

    /// The current counters.
    pub fn stats(&self) -> Result<KvStats> {
        let [clients, keys, commands, refused, closed] = self.serving.counts()?;
        Ok(KvStats { clients, keys, commands, refused, closed })
    }

    /// Stops the server: closes all connections and waits for the kernel.
    pub fn stop(&self) -> Result<()> {
        self.serving.stop()
    }
}

impl std::fmt::Debug for KvServer<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KvServer({:?})", self.serving)
    }
}
