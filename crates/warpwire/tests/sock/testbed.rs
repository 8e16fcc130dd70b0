//! The fixture of a case: a GPU with sockets, scripted kernels, and peers that are ordinary sockets
//! of this process.
#![allow(unsafe_code)] // launches and calls of the header's code, each with a SAFETY comment

use rustix::net::{AddressFamily, SocketType};
use std::fmt;
use std::net::{SocketAddr, UdpSocket};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use warpwire::mem::sim::{Sim, SimConfig};
use warpwire::mem::{Allocation, Device, Kernel, Launch, Program, Stream, cuda};
use warpwire::sock::{SockHost, SockMemory, SockOptions};
use warpwire_apps::kv::{KvOptions, KvServer};
use warpwire_apps::similarity::{
    KernelClient, Queries, SearchHit, SimilarOptions, SimilarServer, ask_from_thread,
};

use crate::ptx;
use crate::sock::peer::{Family, Peer};
use crate::sock::scripted::{self, KernelOp, ScriptedKernel, test_timeout};

/// What runs the calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Platform {
    Sim,
    SimPinned,
    Threads,
    Cuda,
    CudaPinned,
}

impl fmt::Display for Platform {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Sim => "sim",
            Self::SimPinned => "sim-pinned",
            Self::Threads => "threads",
            Self::Cuda => "cuda",
            Self::CudaPinned => "cuda-pinned",
        })
    }
}

pub struct Testbed {
    pub platform: Platform,
    pub family: Family,
    pub gpu: Device,
    _sim: Option<Sim>,
}

impl Testbed {
    pub fn new(platform: Platform, family: Family) -> Self {
        match platform {
            Platform::Cuda | Platform::CudaPinned => {
                Self { platform, family, gpu: cuda::device(0).unwrap(), _sim: None }
            }
            Platform::Sim | Platform::SimPinned | Platform::Threads => {
                Self::on_sim(platform, family, Duration::ZERO)
            }
        }
    }

    fn on_sim(platform: Platform, family: Family, jitter: Duration) -> Self {
        let config = SimConfig::default().with_memory(4 << 30).with_jitter(jitter);
        let sim = Sim::start(config).unwrap();
        Self { platform, family, gpu: sim.device(0).unwrap(), _sim: Some(sim) }
    }

    /// As [`new`](Self::new), with kernels that pause at random; simulated GPU only.
    pub fn with_jitter(&self, jitter: Duration) -> Self {
        match self.platform {
            Platform::Sim | Platform::SimPinned => Self::on_sim(self.platform, self.family, jitter),
            _ => testkit::skip("only the simulated GPU pauses kernels"),
        }
    }

    /// The options for this platform.
    pub fn options(&self) -> SockOptions {
        let memory = match self.platform {
            Platform::Sim | Platform::Cuda => SockMemory::Auto,
            Platform::SimPinned | Platform::CudaPinned => SockMemory::Pinned,
            Platform::Threads => SockMemory::Threads,
        };
        SockOptions::default().with_memory(memory)
    }

    /// Sockets with few slots, and `scripted_kernels` kernels that use them.
    pub fn harness(&self, scripted_kernels: u64) -> Harness {
        let options = self.options().with_sockets(64).with_arena(16 << 20);
        self.harness_with(scripted_kernels, options)
    }

    pub fn harness_with(&self, scripted_kernels: u64, options: SockOptions) -> Harness {
        let [harness] = self.harnesses(scripted_kernels, [options]);
        harness
    }

    /// Several harnesses. Everything is loaded and allocated before the first kernel starts: a GPU
    /// whose kernels wait for the host cannot load more.
    pub fn harnesses<const N: usize>(
        &self,
        scripted_kernels: u64,
        options: [SockOptions; N],
    ) -> [Harness; N] {
        let ready = options.map(|options| {
            let host = SockHost::start(&self.gpu, options).unwrap();
            (host, ScriptedKernel::memory(&self.gpu, scripted_kernels), self.kernel_and_stream())
        });
        ready.map(|(host, memory, kernel_and_stream)| {
            let made = |index| ScriptedKernel::new(&memory.0, &memory.1, index, self.family);
            let kernels = (0..scripted_kernels).map(made).collect();
            let kernel_run = match kernel_and_stream {
                None => KernelRun::on_threads(&host, &memory, scripted_kernels),
                Some(kernel_and_stream) => {
                    KernelRun::on_device(kernel_and_stream, &host, &memory, scripted_kernels)
                }
            };
            Harness { scripted_kernels: kernels, kernel_run: Some(kernel_run), host, memory }
        })
    }

    /// The kernel of scripted kernels and its stream; none for threads.
    fn kernel_and_stream(&self) -> Option<(Kernel, Stream)> {
        if self.platform == Platform::Threads {
            return None;
        }
        let program = Program::new("scripted kernels").block("scripted", scripted::scripted_block);
        let module = ptx::load(&self.gpu, scripted::PTX, program).unwrap();
        let kernel = module.kernel("scripted").unwrap();
        Some((kernel, self.gpu.stream().unwrap()))
    }
}

impl Testbed {
    /// A key-value server with these options, on this platform.
    pub fn kv<'a>(&self, host: &'a SockHost, options: KvOptions) -> KvServer<'a> {
        if self.platform != Platform::Threads {
            return KvServer::start(host, options).unwrap();
        }
        KvServer::start_on_threads(host, options, worker(b"kv_server_thread\0")).unwrap()
    }

    /// A similarity server with these vectors and options, on this platform.
    pub fn similar<'a>(
        &self,
        host: &'a SockHost,
        vectors: &[f32],
        dimension: u32,
        options: SimilarOptions,
    ) -> SimilarServer<'a> {
        if self.platform != Platform::Threads {
            return SimilarServer::start(host, vectors, dimension, options).unwrap();
        }
        let work = worker(b"similarity_server_thread\0");
        SimilarServer::start_on_threads(host, vectors, dimension, options, work).unwrap()
    }
}

impl Testbed {
    /// A client of similarity servers in a kernel; to be created before a server runs.
    pub fn asker<'a>(&self, host: &'a SockHost) -> Asker<'a> {
        match self.platform {
            Platform::Threads => Asker::Thread(host),
            _ => Asker::Kernel(KernelClient::load(host).unwrap()),
        }
    }
}

/// A client of similarity servers, in a kernel or in a thread.
pub enum Asker<'a> {
    Kernel(KernelClient<'a>),
    Thread(&'a SockHost),
}

impl Asker<'_> {
    pub fn ask(&self, asked: &Queries<'_>) -> warpwire::Result<Vec<Vec<SearchHit>>> {
        match self {
            Self::Kernel(client) => client.ask(asked),
            Self::Thread(host) => {
                ask_from_thread(host, asked, worker(b"similarity_client_thread\0"))
            }
        }
    }
}

/// A server's worker as C++: gets the address of the setup and its number.
fn worker(name: &[u8]) -> impl Fn(u64, u64) + Clone + Send + 'static {
    // SAFETY: the library was built from the servers' sources, which define the functions with this
    // type.
    let run = unsafe { symbol::<unsafe extern "C" fn(u64, u64)>(name) };
    // SAFETY: the server passes the address of its setup, and keeps the setup and what it refers to
    // alive until the worker has ended.
    move |setup, worker| unsafe { run(setup, worker) }
}

/// A function of the library compiled as C++.
///
/// # Safety
/// The function must have the type `F` in the library.
pub unsafe fn symbol<F: Copy>(name: &[u8]) -> F {
    // SAFETY: as promised by the caller; nothing unloads the library.
    unsafe { *compiled().as_ref().unwrap().get::<F>(name).unwrap() }
}

/// Sockets, and scripted kernels that use them.
pub struct Harness {
    pub scripted_kernels: Vec<ScriptedKernel>,
    kernel_run: Option<KernelRun>,
    pub host: SockHost,
    memory: (Allocation, Allocation),
}

impl Harness {
    pub fn first(&self) -> &ScriptedKernel {
        &self.scripted_kernels[0]
    }
}

impl Drop for Harness {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // A hanging kernel must not hang the test: its calls return when the host ends.
            self.host.stop();
        }
        for scripted in &self.scripted_kernels {
            let start = Instant::now();
            while !scripted.is_done() && start.elapsed() < test_timeout() {
                std::thread::sleep(Duration::from_millis(1));
            }
            scripted.start(KernelOp::Stop, &[], None);
        }
        let ended = self.kernel_run.take().map(KernelRun::end);
        if !std::thread::panicking() {
            ended.unwrap().unwrap();
        }
        let _ = &self.memory;
    }
}

/// Running scripted kernels.
enum KernelRun {
    Device(Stream),
    Threads(Vec<std::thread::JoinHandle<()>>),
}

impl KernelRun {
    fn on_device(
        (kernel, stream): (Kernel, Stream),
        host: &SockHost,
        memory: &(Allocation, Allocation),
        scripted_kernels: u64,
    ) -> Self {
        let launch = Launch::new(&kernel)
            .grid(scripted_kernels as u32)
            .threads(128)
            .value(host.table())
            .region(&memory.0.whole().unwrap())
            .region(&memory.1.whole().unwrap());
        // SAFETY: the kernel uses its mailboxes and buffers, which the launch keeps alive, and the
        // sockets' memory, which the harness keeps alive until the kernel has ended.
        unsafe { stream.launch(launch) }.unwrap();
        Self::Device(stream)
    }

    fn on_threads(
        host: &SockHost,
        memory: &(Allocation, Allocation),
        scripted_kernels: u64,
    ) -> Self {
        let base = |memory: &Allocation| {
            // The view starts at the address of the memory.
            let bytes = memory.host_bytes().unwrap();
            host_address(&bytes)
        };
        let (table, mailboxes, buffers) = (host.table(), base(&memory.0), base(&memory.1));
        let start = |index: u64| {
            // SAFETY: the library was built from scripted.cu, where the function has this type.
            let run =
                unsafe { symbol::<unsafe extern "C" fn(u64, u64, u64)>(b"scripted_thread\0") };
            let (mailbox, buffer) =
                (mailboxes + index * scripted::MAILBOX, buffers + index * scripted::BUFFER);
            std::thread::spawn(move || {
                // SAFETY: the addresses are those of the sockets' table, a mailbox and a buffer,
                // which the harness keeps alive until this thread has ended.
                unsafe { run(table, mailbox, buffer) }
            })
        };
        Self::Threads((0..scripted_kernels).map(start).collect())
    }

    fn end(self) -> Result<(), String> {
        match self {
            Self::Device(stream) => {
                stream.synchronize(test_timeout()).map_err(|error| error.to_string())
            }
            Self::Threads(threads) => {
                let ended: Vec<_> =
                    threads.into_iter().map(std::thread::JoinHandle::join).collect();
                match ended.iter().all(Result::is_ok) {
                    true => Ok(()),
                    false => Err("the thread of a scripted kernel panicked".into()),
                }
            }
        }
    }
}

/// The CPU address of pinned memory.
fn host_address(bytes: &warpwire::mem::SharedBytes<'_>) -> u64 {
    bytes.address()
}

static LIBRARY: OnceLock<Result<libloading::Library, String>> = OnceLock::new();

fn compiled() -> &'static Result<libloading::Library, String> {
    LIBRARY.get_or_init(build_library)
}

/// Compiles the header and the scripted kernels as a library for threads.
pub fn compile_for_threads() -> Result<(), String> {
    compiled().as_ref().map(|_| ()).map_err(Clone::clone)
}

fn build_library() -> Result<libloading::Library, String> {
    let root = PathBuf::from(option_env!("CARGO_MANIFEST_DIR").unwrap_or("."));
    let sources = [
        "sock/scripted.cu",
        "sock/echo_client_threads.cpp",
        "../../apps/src/kv/kv.cu",
        "../../apps/src/similarity/similarity.cu",
    ]
    .map(|path| root.join(path));
    if !sources[0].exists() {
        return Err("the sources are missing".into());
    }
    let folder = tempfile::tempdir().map_err(|error| error.to_string())?;
    let library = folder.path().join("libscripted.so");
    // Flags of tools/sock-sanitizers. Its preloaded runtime is not meant for the compiler.
    let more = std::env::var("WARPWIRE_SOCK_CXXFLAGS").unwrap_or_default();
    let built = std::process::Command::new("g++")
        .env_remove("LD_PRELOAD")
        .args(more.split_whitespace())
        .args(["-x", "c++", "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC"])
        .args(["-shared", "-pthread", "-I"])
        .arg(root.join("../../../include"))
        .args(sources)
        .arg("-o")
        .arg(&library)
        .output()
        .map_err(|error| format!("g++ did not run: {error}"))?;
    if !built.status.success() {
        panic!("scripted.cu does not compile as C++:\n{}", String::from_utf8_lossy(&built.stderr));
    }
    // SAFETY: the library has no initializers, and nothing unloads it.
    unsafe { libloading::Library::new(&library) }.map_err(|error| error.to_string())
}

/// An address without a listener, bound so that none can appear.
pub struct ClosedPort {
    pub name: SocketAddr,
    _held: OwnedFd,
}

impl ClosedPort {
    pub fn at(at: SocketAddr) -> Self {
        let family = if at.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
        let held = rustix::net::socket(family, SocketType::STREAM, None).unwrap();
        rustix::net::bind(&held, &at).unwrap();
        let name = rustix::net::getsockname(&held).unwrap().try_into().unwrap();
        Self { name, _held: held }
    }
}

/// The loopback addresses of both IP versions, with port 0.
pub fn loopbacks() -> [SocketAddr; 2] {
    [SocketAddr::from(([127, 0, 0, 1], 0)), "[::1]:0".parse().unwrap()]
}

/// The IP version of an address: 4 or 6.
pub fn family(address: SocketAddr) -> u64 {
    if address.is_ipv6() { 6 } else { 4 }
}

pub const STREAM: u64 = 1;
pub const DATAGRAM: u64 = 2;
pub const WARP_STREAM: u64 = 3;
/// Does not exist: `socket` refuses it.
pub const WARP_DATAGRAM: u64 = 4;

/// A negated errno, as calls return it.
pub fn errno(errno: rustix::io::Errno) -> i64 {
    -i64::from(errno.raw_os_error())
}

/// Calls that must succeed.
impl ScriptedKernel {
    pub fn expect(&self, what: KernelOp, args: &[u64], address: Option<SocketAddr>) -> i64 {
        let answer = self.call(what, args, address);
        assert!(answer.result >= 0, "{what:?} {args:?}: errno {}", -answer.result);
        answer.result
    }

    /// The kind in the family of the case; datagrams are always UDP.
    pub fn kind(&self, kind: u64) -> u64 {
        if kind == STREAM && self.family == Family::Warp { WARP_STREAM } else { kind }
    }

    pub fn socket(&self, at: SocketAddr, kind: u64) -> u64 {
        self.expect(KernelOp::Socket, &[family(at), self.kind(kind)], None) as u64
    }

    /// A listener at a free port, and its address.
    pub fn listener(&self, at: SocketAddr, backlog: u64) -> (u64, SocketAddr) {
        let socket = self.socket(at, STREAM);
        self.expect(KernelOp::Bind, &[socket], Some(at));
        self.expect(KernelOp::Listen, &[socket, backlog], None);
        let name = self.call(KernelOp::LocalName, &[socket], None).address.unwrap();
        (socket, name)
    }

    pub fn send(&self, socket: u64, bytes: &[u8]) -> i64 {
        self.put(0, bytes);
        self.call(KernelOp::Send, &[socket, 0, bytes.len() as u64], None).result
    }

    pub fn recv(&self, socket: u64, most: usize) -> Result<Vec<u8>, i64> {
        let answer = self.call(KernelOp::Recv, &[socket, 0, most as u64], None);
        if answer.result < 0 {
            Err(answer.result)
        } else {
            Ok(self.show(0, answer.result as usize))
        }
    }

    /// A scripted kernel's stream and the test's end of it. The kernel connects.
    pub fn connected(&self, at: SocketAddr) -> (u64, Peer) {
        let server = self.family.serve(at);
        let socket = self.socket(at, STREAM);
        self.expect(KernelOp::Connect, &[socket], Some(server.local_addr()));
        (socket, server.accept())
    }

    /// As [`connected`](Self::connected), with the kernel accepting.
    pub fn accepted(&self, at: SocketAddr) -> (u64, Peer) {
        let (listener, name) = self.listener(at, 8);
        let peer = self.family.dial(name);
        let answer = self.call(KernelOp::Accept, &[listener], None);
        assert!(answer.result >= 0, "{answer:?}");
        assert_eq!(answer.address, Some(peer.local_addr()));
        self.expect(KernelOp::Close, &[listener], None);
        (answer.result as u64, peer)
    }
}

/// A UDP socket of the test.
pub fn udp(at: SocketAddr) -> UdpSocket {
    let socket = UdpSocket::bind(at).unwrap();
    socket.set_read_timeout(Some(test_timeout())).unwrap();
    socket
}

/// Waits until `ask` returns true.
pub fn until(what: &str, mut ask: impl FnMut() -> bool) {
    let start = Instant::now();
    while !ask() {
        assert!(start.elapsed() < test_timeout(), "never: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

impl Harness {
    /// Writes impossible device counters of a socket.
    pub fn corrupt_counters(&self, socket: u64) {
        self.host.corrupt_counters((socket & 0xffff) as u16);
    }
}
