//! A key-value server inside a kernel: it speaks RESP, so that `redis-cli` and `redis-benchmark` are its clients.
//!
//! Each block is a worker with connections of its own. The store lies in device memory: buckets of 16 slots with a lock
//! each, keys of up to 112 bytes, values of up to [`most_value`](KvOptions::most_value). It knows `GET`, `SET`, `DEL`,
//! `EXISTS`, `INCR`, `DECR`, `MGET`, `PING`, `ECHO`, `DBSIZE` and `QUIT`, pipelined as the client likes, and answers what
//! clients ask when they connect.
//!
//! Whoever sends what is no RESP, or lengths beyond the limits, or half a command and then nothing for
//! [`patience`](KvOptions::patience), or takes no answers for as long, is closed, with an error where that can be said.
//! Clients beyond [`clients`](KvOptions::clients) are told so and closed. Nobody else notices.

mod resp;
mod store;
mod worker;

use std::net::SocketAddr;
use std::time::Duration;

use serde::Serialize;
use warpwire::error::{Error, Kind, Result};
use warpwire::mem::sim::{Block, KernelFault};
use warpwire::mem::{DeviceAddr, Program};
use warpwire::sock::SockHost;
use warpwire::sock::layout::{ADDRESS_LEN, address_bytes};

use crate::serving::{Memory, SOON, Server, check_numbers, read_setup, setup_bytes};

const KERNEL: &str = "kv_server";
/// Threads of a worker's block.
const THREADS: u32 = 64;
const SLOTS_PER_BUCKET: u64 = 16;
const MOST_KEY: u64 = 112;
/// What a connection has beside its buffers, and its entry in the list of those that are polled.
const CONNECTION: u64 = 32;
const POLLED: u64 = 8;

/// Words of a slot, and what is in it.
mod slot {
    pub(super) const VACANT: u32 = 0;
    pub(super) const TEXT: u32 = 1;
    /// A number, as a word where text would be.
    pub(super) const NUMBER: u32 = 2;
    pub(super) const USED: u64 = 0;
    pub(super) const HASH: u64 = 4;
    pub(super) const KEY_LENGTH: u64 = 8;
    pub(super) const VALUE_LENGTH: u64 = 12;
    pub(super) const KEY: u64 = 16;
}

/// Words in pinned memory, for the host and the kernel.
mod control {
    pub(super) use crate::serving::{CONTROL_LEN as LEN, STOP};
}

/// Counters in device memory.
mod counts {
    pub(super) const CLIENTS: u64 = 0;
    pub(super) const KEYS: u64 = 8;
    pub(super) const COMMANDS: u64 = 16;
    pub(super) const REFUSED: u64 = 24;
    pub(super) const CLOSED: u64 = 32;
    pub(super) const LEN: u64 = 40;
}

/// How large the server is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvOptions {
    /// Where it listens; port 0 lets the system choose.
    pub address: SocketAddr,
    /// How many blocks serve.
    pub workers: u32,
    /// How many clients there may be at a time.
    pub clients: u32,
    /// Buckets of 16 keys each, a power of two.
    pub buckets: u64,
    /// The longest value.
    pub most_value: u64,
    /// How long half a command, or an answer that is not taken, is borne.
    pub patience: Duration,
}

impl KvOptions {
    /// A server of moderate size at an address.
    pub fn at(address: SocketAddr) -> Self {
        Self {
            address,
            workers: 4,
            clients: 128,
            buckets: 4096,
            most_value: 1024,
            patience: Duration::from_secs(10),
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
        if !(16..=1 << 20).contains(&self.most_value) || !self.most_value.is_multiple_of(16) {
            let why = format!("values of {} bytes", self.most_value);
            return refuse(why, "ask for 16 bytes to 1 MiB, a multiple of 16");
        }
        Ok(())
    }
}

/// What kernels read: everything about the server. The same as in kv.cu.
#[derive(Clone, Copy, Debug, Default)]
struct Setup {
    table: u64,
    slots: u64,
    locks: u64,
    bucket_mask: u64,
    slot_size: u64,
    most_value: u64,
    connections: u64,
    connection_size: u64,
    in_size: u64,
    out_size: u64,
    per_worker: u64,
    workers: u64,
    patience: u64,
    control: u64,
    most_clients: u64,
    counts: u64,
    address: [u8; ADDRESS_LEN],
}

const SETUP_LEN: usize = 160;

impl Setup {
    fn words(&mut self) -> [&mut u64; 16] {
        [
            &mut self.table,
            &mut self.slots,
            &mut self.locks,
            &mut self.bucket_mask,
            &mut self.slot_size,
            &mut self.most_value,
            &mut self.connections,
            &mut self.connection_size,
            &mut self.in_size,
            &mut self.out_size,
            &mut self.per_worker,
            &mut self.workers,
            &mut self.patience,
            &mut self.control,
            &mut self.most_clients,
            &mut self.counts,
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
pub struct KvStats {
    /// Clients that are connected now.
    pub clients: u64,
    /// Keys that are stored.
    pub keys: u64,
    /// Commands executed.
    pub commands: u64,
    /// Connections closed for breaking the protocol or a limit.
    pub refused: u64,
    /// Connections that have ended.
    pub closed: u64,
}

/// A key-value server at work. Dropping it ends it.
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

/// Lays out all memory of a server.
fn lay(host: &SockHost, options: &KvOptions) -> Result<Memory> {
    let slot_size = slot::KEY + MOST_KEY + options.most_value;
    let per_worker = u64::from(options.clients.div_ceil(options.workers)) + 1;
    let in_size = (options.most_value * 2 + 4096).next_multiple_of(4096);
    let out_size = (options.most_value * 16 + 8192).next_multiple_of(4096);
    let connection_size = CONNECTION + in_size + out_size;
    let workers = u64::from(options.workers);
    let slots = host.alloc(options.buckets * SLOTS_PER_BUCKET * slot_size)?;
    let locks = host.alloc(options.buckets * 4)?;
    let lists = (workers * (per_worker + 1) * POLLED).next_multiple_of(16);
    let connections = host.alloc(lists + workers * per_worker * connection_size)?;
    let (counts, setup) = (host.alloc(counts::LEN)?, host.alloc(SETUP_LEN as u64)?);
    let (control, stream) = (host.device().alloc_pinned(control::LEN)?, host.device().stream()?);
    for memory in [&slots, &locks, &counts] {
        stream.fill(&memory.whole()?, 0)?;
    }
    stream.synchronize(SOON)?;
    control.write(0, &[0; control::LEN as usize])?;
    let told = Setup {
        table: host.table(),
        slots: host.address_of(&slots)?,
        locks: host.address_of(&locks)?,
        bucket_mask: options.buckets - 1,
        slot_size,
        most_value: options.most_value,
        connections: host.address_of(&connections)?,
        connection_size,
        in_size,
        out_size,
        per_worker,
        workers,
        patience: options.patience.as_nanos() as u64,
        control: host.address_of(&control)?,
        most_clients: u64::from(options.clients),
        counts: host.address_of(&counts)?,
        address: address_bytes(Some(options.address)),
    };
    setup.write(0, &told.bytes())?;
    Ok(Memory { setup, control, counts, _others: [slots, locks, connections] })
}

impl<'a> KvServer<'a> {
    /// Starts the kernel on the host's device, and returns when it listens.
    pub fn start(host: &'a SockHost, options: KvOptions) -> Result<Self> {
        options.check()?;
        let device = host.device();
        let program = Program::new("key-value server")
            .ptx(include_str!("kv.ptx"))
            .block(KERNEL, worker::kv_block);
        let kernel = device.load(&program)?.kernel(KERNEL)?;
        let memory = lay(host, &options)?;
        let blocks = (options.workers, THREADS);
        let serving = Server::start(host, &kernel, blocks, memory, options.address)?;
        Ok(Self { serving })
    }

    /// Starts workers as threads of a host for
    /// [`Place::Threads`](warpwire::sock::Place::Threads): `run` gets the setup's address and the
    /// worker's number. For tests of kv.cu as C++.
    #[doc(hidden)]
    pub fn start_on_threads(
        host: &'a SockHost,
        options: KvOptions,
        run: impl Fn(u64, u64) + Clone + Send + 'static,
    ) -> Result<Self> {
        options.check()?;
        let memory = lay(host, &options)?;
        let (workers, asked) = (options.workers, options.address);
        let serving = Server::start_on_threads(host, workers, memory, asked, run)?;
        Ok(Self { serving })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.serving.address()
    }

    /// What it has done.
    pub fn stats(&self) -> Result<KvStats> {
        let [clients, keys, commands, refused, closed] = self.serving.counts()?;
        Ok(KvStats { clients, keys, commands, refused, closed })
    }

    /// Ends it: connections are closed, and the kernel returns.
    pub fn stop(&self) -> Result<()> {
        self.serving.stop()
    }
}

impl std::fmt::Debug for KvServer<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KvServer({:?})", self.serving)
    }
}
