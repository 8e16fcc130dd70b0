//! Sockets for kernels: a threadblock connects, accepts, sends and receives as a process does.
//!
//! A [`SockHost`] serves the kernels of one GPU. They get the address of its table and use the calls of
//! `include/warpwire/sock.cuh`; block functions of the simulated GPU use [`device`], which is the same in Rust.
//! Behind a socket of the family `inet` is an ordinary one of the operating system, TCP or UDP, IPv4 or IPv6: peers are
//! whoever speaks those. In the family [`warp`] kernels write into each other's rings by RDMA, and into those of CPU
//! programs; the host only brings them together.
//!
//! # How bytes go
//! Each socket has two rings with 64-bit counters. What a kernel sends it stores into pinned host memory; what it
//! receives the host stores into device memory, through a [window](crate::mem::Window). Both look at memory that is
//! near, and no call of the data path asks the host for anything. In the family `warp` the kernel posts a write of what it
//! has sent to a queue pair of its own, and the peer's device does what the host does in the other. See [`layout`].
//!
//! # How calls end
//! Every call that waits returns when its time is over, when the peer closes or resets, when the socket is closed by
//! another block, and when the host is gone: at once if a [`SockHost`] is dropped, after
//! [`heartbeat_timeout`](SockOptions::silence) if its thread dies (`ECONNABORTED` both).
//!
//! ```
//! use std::io::{Read, Write};
//! use std::net::TcpListener;
//! use std::time::Duration;
//! use warpwire::mem::{Launch, Program, sim::{Sim, SimConfig}};
//! use warpwire::sock::{SockHost, SockOptions, device::Sockets};
//! # use warpwire::sock::device::{Family, Kind};
//! let server = TcpListener::bind("127.0.0.1:0").unwrap();
//! let address = server.local_addr().unwrap();
//! let program = Program::new("greeter").block("greet", move |block| {
//!     let sockets = Sockets::open(block, block.address(0)?)?;
//!     let socket = sockets.socket(Family::V4, Kind::Stream)?;
//!     sockets.connect(socket, address)?;
//!     sockets.send(socket, b"hello from a kernel")?;
//!     Ok(sockets.close(socket)?)
//! });
//! let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
//! let host = SockHost::start(&gpu, SockOptions::default()).unwrap();
//! let (module, stream) = (gpu.load(&program).unwrap(), gpu.stream().unwrap());
//! let launch = Launch::new(&module.kernel("greet").unwrap()).value(host.table());
//! // SAFETY: the kernel uses the sockets' memory, which `host` keeps until after the kernel's end.
//! unsafe { stream.launch(launch) }.unwrap();
//! let mut text = String::new();
//! server.accept().unwrap().0.read_to_string(&mut text).unwrap();
//! assert_eq!(text, "hello from a kernel");
//! stream.synchronize(Duration::from_secs(10)).unwrap();
//! ```

mod agent;
mod arena;
mod byte_counts;
mod datagrams;
pub mod device;
mod device_cache;
mod gpunet;
mod handshakes;
pub mod layout;
mod qp_slots;
mod requests;
mod shared_area;
mod socket;
mod transfer;
pub mod warp;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread::JoinHandle;
use std::time::Duration;

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};
use serde::Serialize;

use crate::error::{Error, Kind, Result};
use crate::mem::{Allocation, Device, MemoryKind};
use crate::verbs::Context;
use agent::{Agent, Counters, StopFlags};
use qp_slots::QpSlots;
use shared_area::SharedArea;

/// Where the memory lies that the host writes and kernels watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SockMemory {
    /// Device memory if the CPU has a window onto it, else pinned memory.
    #[default]
    Auto,
    /// Pinned memory: kernels look at it across the bus.
    Pinned,
    /// Host memory by host addresses: not kernels but threads of this process use the sockets, by the same header
    /// compiled as C++.
    Threads,
}

/// How many sockets, how large, how patient.
///
/// ```
/// use warpwire::sock::SockOptions;
/// let many = SockOptions { sockets: 8192, ring: 16 << 10, ..SockOptions::default() }.fitted();
/// assert_eq!(many.arena, 8192 * (16 << 10));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SockOptions {
    /// How many sockets may be open at a time: at most 65 535.
    pub sockets: u32,
    /// How many of them may be connections of the family `warp`. Each takes some 11 KiB for its queue pair, and none are
    /// given away later; 0 switches the family off.
    pub warp_sockets: u32,
    /// Bytes of a ring, unless a socket asks for another size.
    pub ring: u64,
    /// Bytes for all rings of one direction.
    pub arena: u64,
    /// How many requests of kernels may be under way at a time, a power of two.
    pub requests: u32,
    /// After how long without a sign of life the host counts as dead.
    pub heartbeat_timeout: Duration,
    /// How long the host's thread spins after the last work before it naps.
    pub spin: Duration,
    /// Where the memory lies that kernels watch.
    pub memory: SockMemory,
}

impl Default for SockOptions {
    fn default() -> Self {
        Self {
            sockets: 1024,
            warp_sockets: 1024,
            ring: 64 << 10,
            arena: 64 << 20,
            requests: 256,
            heartbeat_timeout: Duration::from_secs(3),
            spin: Duration::from_micros(50),
            memory: SockMemory::Auto,
        }
    }
}

impl SockOptions {
    /// The same, with room for the rings of all sockets.
    #[must_use]
    pub fn fitted(mut self) -> Self {
        let ring = arena::rounded(self.ring).unwrap_or(self.ring);
        self.arena = u64::from(self.sockets).saturating_mul(ring);
        self
    }

    fn check(&self) -> Result<()> {
        let refuse = |why: String, fix: &'static str| {
            Err(Error::new(Kind::InvalidArgument, "serve sockets").why(why).fix(fix))
        };
        if !(1..=65_535).contains(&self.sockets) {
            return refuse(
                format!("{} sockets were asked for", self.sockets),
                "ask for 1 to 65535",
            );
        }
        if !self.requests.is_power_of_two() || self.requests > 1 << 16 {
            let why = format!("{} requests at a time were asked for", self.requests);
            return refuse(why, "ask for a power of two up to 65536");
        }
        if !self.arena.is_multiple_of(arena::MIN_BLOCK) || self.arena == 0 || self.arena > 1 << 36 {
            let why = format!("{} bytes for rings were asked for", self.arena);
            return refuse(why, "ask for a multiple of 4096 up to 64 GiB");
        }
        // The lower halves of counters must tell full from empty.
        if self.ring == 0 || self.ring > 1 << 30 || self.ring > self.arena {
            let why = format!("rings of {} bytes were asked for", self.ring);
            return refuse(why, "ask for 4096 bytes to 1 GiB, and no more than there is for all");
        }
        if self.heartbeat_timeout < Duration::from_millis(100) {
            let why = format!("it would count as dead after {:?}", self.heartbeat_timeout);
            return refuse(why, "give it 100 ms or more: it shows every 20 ms that it lives");
        }
        Ok(())
    }
}

/// What a [`SockHost`] has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SockStats {
    /// Sockets that are open now.
    pub open: u64,
    /// Requests answered.
    pub requests: u64,
    /// Connections accepted.
    pub accepted: u64,
    /// Connections made.
    pub connected: u64,
    /// Bytes that came from peers through the host: of the family `inet`.
    pub received: u64,
    /// Bytes that went to peers through the host.
    pub sent: u64,
    /// Bytes of the family `warp` that kernels have read.
    pub warp_received: u64,
    /// Bytes of the family `warp` that kernels have sent.
    pub warp_sent: u64,
    /// Datagrams that were lost here: they fit into no ring.
    pub dropped: u64,
    /// Sockets that were reset because a kernel wrote nonsense.
    pub misused: u64,
}

/// Serves the sockets of one GPU's kernels. Dropping it ends them: calls under way return `ECONNABORTED`.
pub struct SockHost {
    device: Device,
    memory: SockMemory,
    shared_area: Arc<SharedArea>,
    counters: Arc<Counters>,
    stop_flags: Arc<StopFlags>,
    wake: OwnedFd,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl SockHost {
    /// Lays out memory that the device's kernels reach, and starts the thread that serves them.
    pub fn start(device: &Device, options: SockOptions) -> Result<Self> {
        Self::start_with(device, options, None)
    }

    /// The same, with this RDMA device for all connections of the family `warp`. It must be driven by a thread of its own
    /// ([`ProgressMode::Thread`](crate::verbs::Drive::Thread)): kernels ring its doorbells.
    ///
    /// By default a software HCA is opened for each address of this machine that a connection uses, when it is first used: on
    /// shared memory and UDP.
    pub fn start_on(device: &Device, options: SockOptions, context: &Context) -> Result<Self> {
        Self::start_with(device, options, Some(context.clone()))
    }

    fn start_with(device: &Device, options: SockOptions, context: Option<Context>) -> Result<Self> {
        options.check()?;
        let on = |error: Error| error.during("serve sockets").on(device.label());
        let qp_slots = QpSlots::allocate(device, &options).map_err(on)?;
        let qp_slots_addr = qp_slots.as_ref().map_or(0, QpSlots::qp_slots_addr);
        let shared_area =
            Arc::new(SharedArea::allocate(device, &options, qp_slots_addr).map_err(on)?);
        let (counters, stop_flags) = (Arc::<Counters>::default(), Arc::<StopFlags>::default());
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| Error::os("make an eventfd", &errno.into()))?;
        let warp = (qp_slots, context);
        let agent = Agent::new(
            shared_area.clone(),
            options,
            warp,
            &wake,
            counters.clone(),
            stop_flags.clone(),
        )?;
        let thread = std::thread::Builder::new()
            .name(format!("sock {}", device.label()))
            .spawn(move || agent.run())
            .map_err(|error| Error::os("start the thread that serves sockets", &error))?;
        let thread = Mutex::new(Some(thread));
        Ok(Self {
            device: device.clone(),
            memory: options.memory,
            shared_area,
            counters,
            stop_flags,
            wake,
            thread,
        })
    }

    /// What kernels get: the address of the table. It is valid while this lives.
    pub fn table(&self) -> u64 {
        self.shared_area.table()
    }

    /// The device whose kernels it serves.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Memory for a program that uses the sockets: the device's (of the kind
    /// [`Vmm`](MemoryKind::Vmm)), or pinned memory of the host for [`SockMemory::Threads`].
    pub fn alloc(&self, len: u64) -> Result<Allocation> {
        match self.memory {
            SockMemory::Threads => self.device.alloc_pinned(len),
            SockMemory::Auto | SockMemory::Pinned => self.device.alloc_kind(len, MemoryKind::Vmm),
        }
    }

    /// The address at which such a program finds `memory`: the device's, or the CPU's for
    /// [`SockMemory::Threads`], which fails for memory that the CPU has no address for.
    pub fn address_of(&self, memory: &Allocation) -> Result<u64> {
        match self.memory {
            SockMemory::Threads => Ok(memory.host_bytes()?.address()),
            SockMemory::Auto | SockMemory::Pinned => Ok(memory.address().raw()),
        }
    }

    /// Why kernels watch pinned memory instead of their own; `None` if they watch their own.
    pub fn why_pinned(&self) -> Option<&str> {
        self.shared_area.why_pinned.as_deref()
    }

    /// What it has done. Bytes of the family `warp` pass it by: while connections stand, their counters are read from device memory.
    pub fn stats(&self) -> SockStats {
        let warp = self.counters.warp.count(|count| {
            self.shared_area.device_states(count).unwrap_or_else(|error| {
                tracing::warn!(%error, "bytes of the family `warp` could not be counted");
                Vec::new()
            })
        });
        let of = |counter: &std::sync::atomic::AtomicU64| counter.load(Ordering::Relaxed);
        SockStats {
            open: of(&self.counters.open),
            requests: of(&self.counters.requests),
            accepted: of(&self.counters.accepted),
            connected: of(&self.counters.connected),
            received: of(&self.counters.received),
            sent: of(&self.counters.sent),
            warp_received: warp.received,
            warp_sent: warp.sent,
            dropped: of(&self.counters.dropped),
            misused: of(&self.counters.misused),
        }
    }

    /// Ends the service: connections are closed, and every call of a kernel returns `ECONNABORTED`. The memory stays
    /// until this is dropped.
    pub fn stop(&self) {
        self.stop_flags.stop.store(true, Ordering::Release);
        // A full counter wakes as well.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the thread that served sockets had panicked");
        }
    }

    /// Lets the thread die without a word, as a crash of it would. For tests of what kernels make of that.
    #[doc(hidden)]
    pub fn simulate_crash(&self) {
        self.stop_flags.simulate_crash.store(true, Ordering::Release);
        self.stop();
    }
}

impl SockHost {
    /// Writes nonsense where a kernel says how much it has sent. For tests of what comes of that.
    #[doc(hidden)]
    pub fn corrupt_counters(&self, index: u16) {
        if let Err(error) = self.shared_area.corrupt_device_counters(index) {
            tracing::error!(%error, "nothing was spoilt");
        }
    }
}

impl Drop for SockHost {
    fn drop(&mut self) {
        self.stop();
    }
}

impl std::fmt::Debug for SockHost {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SockHost({})", self.device.label())
    }
}
