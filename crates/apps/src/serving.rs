//! Kernels that serve: the words by which they and the host talk, how the host learns that one listens, and what workers
//! have in common. serving.cuh is the same for CUDA.

use std::net::SocketAddr;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use warpwire::error::{Error, Kind, Result};
use warpwire::mem::sim::{Block, KernelFault};
use warpwire::mem::{Allocation, DeviceAddr, Kernel, Launch, Stream};
use warpwire::sock::SockHost;
use warpwire::sock::device::{self, Family, Sock, SockError, SockOption, SockResult, Sockets};
use warpwire::sock::layout::{ADDRESS_LEN, address_bytes, address_from};

/// Where the host asks it to end, where it puts its listener, and where the errno if it failed. What else lies in its control
/// words is the program's own.
pub(super) const STOP: u64 = 0;
pub(super) const LISTENER: u64 = 8;
pub(super) const FAILED: u64 = 16;
/// Where servers with several workers put their name, and how long their words are.
pub(super) const NAME: u64 = 24;
pub(super) const CONTROL_LEN: u64 = 48;

/// How long a kernel may take to start, and to end.
pub(super) const SOON: Duration = Duration::from_secs(20);

/// Waits until a kernel that was asked to listen there does; returns where, which it wrote at `name`.
pub(super) fn await_listener(
    host: &SockHost,
    control: &Allocation,
    name: u64,
    asked: SocketAddr,
) -> Result<SocketAddr> {
    let begun = Instant::now();
    let bytes = control.host_bytes()?;
    let failed = |why: String| {
        Error::new(Kind::Unavailable, format!("listen at {asked}"))
            .on(host.device().label())
            .why(why)
    };
    loop {
        if bytes.load_u64(LISTENER)? != 0 {
            let mut found = [0; ADDRESS_LEN];
            bytes.read(name, &mut found)?;
            return Ok(address_from(&found).unwrap_or(asked));
        }
        let errno = bytes.load_u64(FAILED)? as i32;
        if errno != 0 {
            let why = std::io::Error::from_raw_os_error(errno).to_string();
            return Err(failed(why).fix("choose an address that is this machine's and free"));
        }
        if begun.elapsed() > SOON {
            return Err(failed(format!("the kernel did not start in {SOON:?}")));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Workers at work.
enum Play {
    Kernel(Stream),
    Threads(Mutex<Vec<JoinHandle<()>>>),
}

/// The memory of a server whose workers have a setup to read, words of control, and counts.
pub(super) struct Memory {
    pub(super) setup: Allocation,
    pub(super) control: Allocation,
    pub(super) counts: Allocation,
    /// What else the setup names.
    pub(super) _others: [Allocation; 3],
}

/// A server at work. Dropping it ends it.
pub(super) struct Server<'a> {
    host: &'a SockHost,
    play: Play,
    address: SocketAddr,
    memory: Memory,
}

impl<'a> Server<'a> {
    /// Starts blocks of so many threads, which get the setup, and returns when they listen.
    pub(super) fn start(
        host: &'a SockHost,
        kernel: &Kernel,
        (workers, threads): (u32, u32),
        memory: Memory,
        asked: SocketAddr,
    ) -> Result<Self> {
        let stream = host.device().stream()?;
        let setup = memory.setup.whole()?;
        let launch = Launch::new(kernel).grid(workers).threads(threads).region(&setup);
        start(&stream, launch)?;
        Self::begun(host, Play::Kernel(stream), memory, asked)
    }

    /// Starts workers as threads: `run` gets the setup's address and the worker's number.
    pub(super) fn start_on_threads(
        host: &'a SockHost,
        workers: u32,
        memory: Memory,
        asked: SocketAddr,
        run: impl Fn(u64, u64) + Clone + Send + 'static,
    ) -> Result<Self> {
        let setup = host.address_of(&memory.setup)?;
        let workers = (0..u64::from(workers)).map(|worker| {
            let run = run.clone();
            std::thread::spawn(move || run(setup, worker))
        });
        let play = Play::Threads(Mutex::new(workers.collect()));
        Self::begun(host, play, memory, asked)
    }

    fn begun(host: &'a SockHost, play: Play, memory: Memory, asked: SocketAddr) -> Result<Self> {
        let mut server = Self { host, play, address: asked, memory };
        server.address = await_listener(host, &server.memory.control, NAME, asked)?;
        Ok(server)
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The first words of its counts.
    pub(super) fn counts<const WORDS: usize>(&self) -> Result<[u64; WORDS]> {
        let mut counts = [0; WORDS];
        for (at, count) in (0..).step_by(8).zip(&mut counts) {
            let mut bytes = [0; 8];
            self.memory.counts.read(at, &mut bytes)?;
            *count = u64::from_le_bytes(bytes);
        }
        Ok(counts)
    }

    /// Asks workers to end, and waits until they have.
    pub(super) fn stop(&self) -> Result<()> {
        self.memory.control.host_bytes()?.store_u64(STOP, 1)?;
        match &self.play {
            Play::Kernel(stream) => stream.synchronize(SOON),
            Play::Threads(threads) => {
                for thread in std::mem::take(&mut *threads.lock()) {
                    let stopped = || Error::new(Kind::Unavailable, "end a server");
                    thread.join().map_err(|_| stopped().why("a worker panicked"))?;
                }
                Ok(())
            }
        }
    }
}

impl Drop for Server<'_> {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            tracing::warn!(%error, at = %self.address, "a server inside a kernel did not end");
        }
    }
}

impl std::fmt::Debug for Server<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} on {}", self.address, self.host.device().label())
    }
}

#[allow(unsafe_code)]
pub(super) fn start(stream: &Stream, launch: Launch) -> Result<()> {
    // SAFETY: the kernel uses the memory that its setup names, which the server keeps until the kernel has ended, and the
    // sockets' memory, which the server's borrow of the host keeps.
    unsafe { stream.launch(launch) }
}

/// How many workers and clients a server may have; `what` is being done.
pub(super) fn check_numbers(what: &'static str, workers: u32, clients: u32) -> Result<()> {
    let refuse = |why: String, fix: &'static str| {
        Err(Error::new(Kind::InvalidArgument, what).why(why).fix(fix))
    };
    if workers == 0 || workers > 256 {
        return refuse(format!("{workers} workers"), "ask for 1 to 256");
    }
    if clients == 0 || clients > 60_000 {
        return refuse(format!("{clients} clients"), "ask for 1 to 60000");
    }
    Ok(())
}

/// What kernels read of a server: words, then the address.
pub(super) fn setup_bytes<const WORDS: usize>(
    words: [&mut u64; WORDS],
    address: &[u8; ADDRESS_LEN],
) -> Vec<u8> {
    let mut bytes: Vec<u8> = words.into_iter().flat_map(|word| word.to_le_bytes()).collect();
    bytes.extend(address);
    bytes
}

/// Reads what [`setup_bytes`] wrote.
pub(super) fn read_setup<const WORDS: usize>(
    block: &Block<'_>,
    at: DeviceAddr,
    words: [&mut u64; WORDS],
) -> std::result::Result<[u8; ADDRESS_LEN], KernelFault> {
    for (number, word) in words.into_iter().enumerate() {
        *word = block.load_u64(DeviceAddr::new(at.raw() + number as u64 * 8))?;
    }
    let mut address = [0; ADDRESS_LEN];
    block.read(DeviceAddr::new(at.raw() + WORDS as u64 * 8), &mut address)?;
    Ok(address)
}

/// The listener of a server's workers: made by the first, and waited for by the others; `None` if there is none.
pub(super) fn listener(
    block: &Block<'_>,
    sockets: &Sockets<'_>,
    control: u64,
    address: &[u8; ADDRESS_LEN],
    kind: device::SocketKind,
) -> SockResult<Option<Sock>> {
    let word = |at: u64| DeviceAddr::new(control + at);
    if block.index() != 0 {
        let mut listener = 0;
        block.spin_until(|| {
            listener = block.load_u64(word(LISTENER))?;
            let failed = block.load_u64(word(FAILED))?;
            let stop = block.load_u64(word(STOP))?;
            Ok(listener != 0 || failed != 0 || stop != 0)
        })?;
        return Ok((listener != 0).then(|| Sock::from_raw(listener as i32 - 1)));
    }
    match open_listener(block, sockets, word(NAME), address, kind) {
        Ok(listener) => {
            block.store_u64(word(LISTENER), listener.raw() as u64 + 1)?;
            Ok(Some(listener))
        }
        Err(SockError::Errno(errno)) => {
            block.store_u64(word(FAILED), errno.raw_os_error() as u64)?;
            Ok(None)
        }
        Err(fault) => Err(fault),
    }
}

fn open_listener(
    block: &Block<'_>,
    sockets: &Sockets<'_>,
    name: DeviceAddr,
    address: &[u8; ADDRESS_LEN],
    kind: device::SocketKind,
) -> SockResult<Sock> {
    let address = address_from(address).ok_or(rustix::io::Errno::AFNOSUPPORT)?;
    let family = if address.is_ipv6() { Family::V6 } else { Family::V4 };
    let listener = sockets.socket(family, kind)?;
    sockets.bind(listener, address)?;
    sockets.listen(listener, 1024)?;
    sockets.set(listener, SockOption::NonBlocking, 1)?;
    block.write(name, &address_bytes(Some(sockets.local_name(listener)?)))?;
    Ok(listener)
}
