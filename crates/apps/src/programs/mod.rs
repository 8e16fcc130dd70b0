//! Small programs that use sockets inside kernels: a [`Server`] that echoes, discards or answers
//! HTTP, and a benchmark client. They are examples of such kernels, and the command `warpwire sock`
//! uses them.

mod blocks;

use std::net::SocketAddr;
use std::time::Duration;

use warpwire::error::{Error, Kind, Result};
use warpwire::mem::{Allocation, Kernel, Launch, MemoryKind, Program, Region, Stream};
use warpwire::sock::SockHost;
use warpwire::sock::device::SocketKind as Streams;
use warpwire::sock::layout::address_bytes;

use crate::serving::{KERNEL_TIMEOUT, await_listener, setup};

const SERVE: &str = "sock_serve";
const CLIENT: &str = "sock_client";
const THREADS: u32 = 256;
/// How often a server polls its stop word.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// What a server does with received data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServerKind {
    /// Sends it back.
    Echo = 0,
    /// Discards it, and sends one byte at end of stream.
    Sink = 1,
    /// Replies to HTTP requests.
    Http = 2,
}

/// What a client does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClientKind {
    /// Sends a message and waits until it has come back, in each round.
    Ping = 3,
    /// Sends all rounds, shuts down its send direction, and waits for one byte.
    Push = 4,
    /// Receives all rounds.
    Pull = 5,
}

/// The mode numbers of programs.cu.
#[derive(Clone, Copy)]
enum Mode {
    Echo = 0,
    Http = 2,
    Ping = 3,
    Push = 4,
    Pull = 5,
    Talk = 6,
}

mod control {
    pub(super) use crate::serving::{FAILED, LISTENER, STOP};
    pub(super) const NANOSECONDS: u64 = 24;
    pub(super) const BYTES: u64 = 32;
    pub(super) const DONE: u64 = 40;
    pub(super) const NAME: u64 = 56;
    pub(super) const LEN: u64 = 80;
}

setup! {
    /// The kernels' argument block, as in programs.cu.
    struct Setup {
        table, control, buffers, buffer_size, mode, size, rounds, timeout, kind,
    }
}
const _: () = assert!(Setup::LEN == 96, "as in programs.cu");

/// The kernels, loaded onto a device. Load them before launching kernels that run indefinitely:
/// CUDA may block while loading.
#[derive(Clone, Debug)]
pub struct Programs {
    serve: Kernel,
    client: Kernel,
    kind: Streams,
}

impl Programs {
    /// Loads the kernels onto the device whose sockets `host` serves.
    pub fn load(host: &SockHost) -> Result<Self> {
        let program = Program::new("socket programs")
            .ptx(include_str!("programs.ptx"))
            .block(SERVE, blocks::serve_block)
            .block(CLIENT, blocks::client_block);
        let module = host.device().load(&program)?;
        Ok(Self {
            serve: module.kernel(SERVE)?,
            client: module.kernel(CLIENT)?,
            kind: Streams::Stream,
        })
    }

    /// The same kernels with sockets of that kind: [`WarpStream`](Streams::WarpStream) for the
    /// family `warp`.
    #[must_use]
    pub fn over(&self, kind: Streams) -> Self {
        Self { kind, ..self.clone() }
    }

    /// Starts a server of `workers` blocks (1 to 256), each with one client at a time, and returns
    /// when it listens.
    ///
    /// ```
    /// use std::io::{Read, Write};
    /// use warpwire::mem::sim::{Sim, SimConfig};
    /// use warpwire::sock::{SockHost, SockOptions};
    /// use warpwire_apps::programs::{Programs, ServerKind};
    /// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
    /// let host = SockHost::start(&gpu, SockOptions::default()).unwrap();
    /// let programs = Programs::load(&host).unwrap();
    /// let any = ([127, 0, 0, 1], 0).into();
    /// let server = programs.serve(&host, ServerKind::Echo, any, 2).unwrap();
    /// let mut client = std::net::TcpStream::connect(server.address()).unwrap();
    /// client.write_all(b"hello").unwrap();
    /// let mut back = [0; 5];
    /// client.read_exact(&mut back).unwrap();
    /// assert_eq!(&back, b"hello");
    /// ```
    pub fn serve<'a>(
        &self,
        host: &'a SockHost,
        service: ServerKind,
        address: SocketAddr,
        workers: u32,
    ) -> Result<Server<'a>> {
        if workers == 0 || workers > 256 {
            return Err(Error::new(Kind::InvalidArgument, "start a server")
                .why(format!("{workers} blocks were asked for"))
                .fix("ask for 1 to 256"));
        }
        let session = Session::new(host, 64 << 10, u64::from(workers))?;
        let setup = Setup {
            mode: service as u64,
            timeout: STOP_POLL_INTERVAL.as_nanos() as u64,
            address: address_bytes(Some(address)),
            kind: self.kind as u64,
            ..session.setup()
        };
        session.launch(&self.serve, workers, setup)?;
        let address = await_listener(host, &session.control, control::NAME, address)?;
        Ok(Server { session, address })
    }

    /// Connects to a server and exchanges `rounds` messages of `size` bytes.
    pub fn client(
        &self,
        host: &SockHost,
        work: ClientKind,
        server: SocketAddr,
        size: u64,
        rounds: u64,
        timeout: Duration,
    ) -> Result<Measurement> {
        if size == 0 || rounds == 0 {
            return Err(Error::new(Kind::InvalidArgument, "run a benchmark client")
                .why("size or rounds is 0"));
        }
        let session = Session::new(host, size, 1)?;
        let setup = Setup {
            mode: work as u64,
            size,
            rounds,
            timeout: timeout.as_nanos() as u64,
            address: address_bytes(Some(server)),
            kind: self.kind as u64,
            ..session.setup()
        };
        session.run(&self.client, setup, server, timeout)
    }

    /// Connects to a server, sends a request, and returns what the server sends until it closes: at
    /// most `max_len` bytes.
    pub fn talk(
        &self,
        host: &SockHost,
        server: SocketAddr,
        question: &[u8],
        max_len: u64,
        timeout: Duration,
    ) -> Result<Vec<u8>> {
        let session = Session::new(host, max_len.max(question.len() as u64).max(1), 1)?;
        session.buffers.write(0, question)?;
        let setup = Setup {
            mode: Mode::Talk as u64,
            size: question.len() as u64,
            rounds: 1,
            timeout: timeout.as_nanos() as u64,
            address: address_bytes(Some(server)),
            kind: self.kind as u64,
            ..session.setup()
        };
        let measured = session.run(&self.client, setup, server, timeout)?;
        let mut answer = vec![0; measured.bytes as usize];
        session.buffers.read(0, &mut answer)?;
        Ok(answer)
    }
}

/// Duration and volume of a client run, by the kernel's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measurement {
    /// From the first byte to the last.
    pub time: Duration,
    /// Bytes sent, or bytes received for [`ClientKind::Pull`].
    pub bytes: u64,
}

/// Memory and stream of a running program.
struct Session<'a> {
    host: &'a SockHost,
    stream: Stream,
    control: Allocation,
    buffers: Allocation,
    setup: Allocation,
    buffer_size: u64,
}

impl<'a> Session<'a> {
    fn new(host: &'a SockHost, buffer_size: u64, buffers: u64) -> Result<Self> {
        let device = host.device();
        let control = device.alloc_pinned(control::LEN)?;
        control.write(0, &[0; control::LEN as usize])?;
        let buffer_size = buffer_size.next_multiple_of(16);
        Ok(Self {
            host,
            stream: device.stream()?,
            control,
            buffers: device.alloc_kind(buffers * buffer_size, MemoryKind::Vmm)?,
            setup: device.alloc_kind(Setup::LEN, MemoryKind::Vmm)?,
            buffer_size,
        })
    }

    fn setup(&self) -> Setup {
        Setup {
            table: self.host.table(),
            control: self.control.address().raw(),
            buffers: self.buffers.address().raw(),
            buffer_size: self.buffer_size,
            ..Setup::default()
        }
    }

    /// Runs a client to completion.
    fn run(
        &self,
        kernel: &Kernel,
        setup: Setup,
        server: SocketAddr,
        timeout: Duration,
    ) -> Result<Measurement> {
        self.launch(kernel, 1, setup)?;
        // A round may take as long as the timeout, but the total is bounded.
        self.stream.synchronize(timeout * 4 + KERNEL_TIMEOUT)?;
        let bytes = self.control.host_bytes()?;
        match bytes.load_u64(control::FAILED)? as i32 {
            0 => Ok(Measurement {
                time: Duration::from_nanos(bytes.load_u64(control::NANOSECONDS)?),
                bytes: bytes.load_u64(control::BYTES)?,
            }),
            errno => {
                let what = format!("talk to {server} from a kernel");
                let why = std::io::Error::from_raw_os_error(errno);
                Err(Error::os(what, &why).on(self.host.device().label()))
            }
        }
    }

    #[allow(unsafe_code)]
    fn launch(&self, kernel: &Kernel, grid: u32, setup: Setup) -> Result<()> {
        self.setup.write(0, &setup.bytes())?;
        let whole: Region = self.setup.whole()?;
        let launch = Launch::new(kernel).grid(grid).threads(THREADS).region(&whole);
        // SAFETY: the kernel uses the memory that its setup refers to: that of this session, which
        // waits for the kernel before it is freed, and the sockets', which the borrow of the host
        // keeps.
        unsafe { self.stream.launch(launch) }
    }
}

impl Drop for Session<'_> {
    fn drop(&mut self) {
        let stop = self.control.host_bytes().and_then(|bytes| bytes.store_u64(control::STOP, 1));
        if let Err(error) = stop.and_then(|()| self.stream.synchronize(KERNEL_TIMEOUT)) {
            tracing::warn!(%error, "a socket program did not stop");
        }
    }
}

/// A running server. Dropping it stops it.
pub struct Server<'a> {
    session: Session<'a>,
    address: SocketAddr,
}

impl Server<'_> {
    /// The address on which it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

impl std::fmt::Debug for Server<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Server({} on {})", self.address, self.session.host.device().label())
    }
}
