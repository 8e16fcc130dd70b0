//! Server kernels: their argument blocks, the control words shared by kernel and host, waiting for
//! the listener, and the loop of a worker. serving.cuh is the equivalent for CUDA.

mod worker;

use std::net::SocketAddr;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use warpwire::error::{Error, Kind, Result};
use warpwire::mem::sim::Block;
use warpwire::mem::{Allocation, DeviceAddr, Kernel, Launch, Stream};
use warpwire::sock::SockHost;
use warpwire::sock::device::{self, Family, Sock, SockError, SockOption, SockResult, Sockets};
use warpwire::sock::layout::{ADDRESS_LEN, address_bytes, address_from};

pub(crate) use worker::{Connection, Service, WorkerSetup, serve};

/// Byte offsets of the control words: the host's stop request, the kernel's listener (plus one),
/// and the errno if it failed. Other control words belong to the program.
pub(super) const STOP: u64 = 0;
pub(super) const LISTENER: u64 = 8;
pub(super) const FAILED: u64 = 16;
/// Offset of the listener's address in servers with several workers, and size of their control
/// words.
pub(super) const NAME: u64 = 24;
pub(super) const CONTROL_LEN: u64 = 48;
/// Size of a connection's state without its buffers, and of its poll list entry, as in serving.cuh.
pub(super) const CONNECTION: u64 = 32;
pub(super) const POLLED: u64 = 8;

/// How long a kernel may take to start, and to stop.
pub(super) const KERNEL_TIMEOUT: Duration = Duration::from_secs(20);

/// Waits until a kernel listens at the address `asked`; returns the address that the kernel stored
/// at offset `name`.
pub(super) fn await_listener(
    host: &SockHost,
    control: &Allocation,
    name: u64,
    asked: SocketAddr,
) -> Result<SocketAddr> {
    let begun = Instant::now();
    let bytes = control.host_bytes()?;
    let failed = |why: String| {
        Error::new(Kind::Unavailable, format!("listen on {asked}"))
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
            return Err(failed(why).fix("use an address of this machine and a free port"));
        }
        if begun.elapsed() > KERNEL_TIMEOUT {
            return Err(failed(format!("the kernel did not start in {KERNEL_TIMEOUT:?}")));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What runs the workers.
enum Runner {
    Kernel(Stream),
    Threads(Mutex<Vec<JoinHandle<()>>>),
}

/// The memory of a server whose workers have a setup block, control words and counters.
pub(super) struct Memory {
    pub(super) setup: Allocation,
    pub(super) control: Allocation,
    pub(super) counts: Allocation,
    /// Other memory that the setup refers to, kept alive.
    pub(super) _others: [Allocation; 3],
}

/// A running server. Dropping it stops it.
pub(super) struct Server<'a> {
    host: &'a SockHost,
    runner: Runner,
    address: SocketAddr,
    memory: Memory,
}

impl<'a> Server<'a> {
    /// Launches `workers` blocks of `threads` threads with the setup as argument, and waits until
    /// they listen.
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
        Self::wait_started(host, Runner::Kernel(stream), memory, asked)
    }

    /// Runs the workers as host threads: `run` gets the address of the setup and the index of the
    /// worker.
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
        let runner = Runner::Threads(Mutex::new(workers.collect()));
        Self::wait_started(host, runner, memory, asked)
    }

    fn wait_started(
        host: &'a SockHost,
        runner: Runner,
        memory: Memory,
        asked: SocketAddr,
    ) -> Result<Self> {
        let mut server = Self { host, runner, address: asked, memory };
        server.address = await_listener(host, &server.memory.control, NAME, asked)?;
        Ok(server)
    }

    pub(super) fn address(&self) -> SocketAddr {
        self.address
    }

    /// The first words of the counters.
    pub(super) fn counts<const WORDS: usize>(&self) -> Result<[u64; WORDS]> {
        let mut counts = [0; WORDS];
        for (at, count) in (0..).step_by(8).zip(&mut counts) {
            let mut bytes = [0; 8];
            self.memory.counts.read(at, &mut bytes)?;
            *count = u64::from_le_bytes(bytes);
        }
        Ok(counts)
    }

    /// Asks the workers to stop, and waits until they have.
    pub(super) fn stop(&self) -> Result<()> {
        self.memory.control.host_bytes()?.store_u64(STOP, 1)?;
        match &self.runner {
            Runner::Kernel(stream) => stream.synchronize(KERNEL_TIMEOUT),
            Runner::Threads(threads) => {
                for thread in std::mem::take(&mut *threads.lock()) {
                    let stopped = || Error::new(Kind::Unavailable, "stop a server");
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
            tracing::warn!(%error, at = %self.address, "a server kernel did not stop");
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
    // SAFETY: the kernel uses the memory that its setup refers to, which the server keeps until the
    // kernel has finished, and the sockets' memory, which the server's borrow of the host keeps.
    unsafe { stream.launch(launch) }
}

/// Checks the numbers of workers and clients of a server; `what` is the operation in the error
/// text.
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

/// A kernel's argument block: words in the order of its struct in the `.cu` file, then the address.
macro_rules! setup {
    ($(#[$about:meta])* struct $name:ident { $($word:ident),* $(,)? }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default)]
        struct $name {
            $($word: u64,)*
            address: [u8; warpwire::sock::layout::ADDRESS_LEN],
        }

        impl $name {
            const LEN: u64 = size_of::<Self>() as u64;

            fn bytes(self) -> Vec<u8> {
                let mut bytes = Vec::new();
                $(bytes.extend(self.$word.to_le_bytes());)*
                bytes.extend(self.address);
                bytes
            }

            /// Reads the block's first argument.
            fn read(
                block: &warpwire::mem::sim::Block<'_>,
            ) -> std::result::Result<Self, warpwire::mem::sim::KernelFault> {
                let (mut setup, mut at) = (Self::default(), block.address(0)?.raw());
                $(
                    setup.$word = block.load_u64(warpwire::mem::DeviceAddr::new(at))?;
                    at += 8;
                )*
                block.read(warpwire::mem::DeviceAddr::new(at), &mut setup.address)?;
                Ok(setup)
            }
        }
    };
}
pub(crate) use setup;

/// The listener of a server's workers: the first opens it, the others wait for it; `None` if that
/// failed or the server stops.
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
