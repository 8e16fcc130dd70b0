//! Sockets for GPU kernels: a threadblock connects, accepts, sends and receives as a process does.
//!
//! A [`SockHost`] serves the kernels of one GPU. Kernels get the address of its table and use the
//! calls of `include/warpwire/sock.cuh`; block functions of the simulated GPU use [`device`], the
//! same API in Rust. A socket of the `inet` family is backed by an ordinary socket of the operating
//! system (TCP or UDP, IPv4 or IPv6), so its peer can be any TCP or UDP program. In the [`warp`]
//! family a kernel writes by RDMA into the ring of its peer, a kernel or a CPU program; the host
//! only establishes the connection.
//!
//! # Data path
//! Each socket has two ring buffers with 64-bit counters. A kernel stores outgoing bytes into
//! pinned host memory; the host stores incoming bytes into device memory, through a
//! [window](crate::mem::Window). Each side polls memory that is local to it, and no call on the
//! data path sends a request to the host. In the `warp` family the kernel posts an RDMA write of
//! the outgoing bytes to a queue pair of its own, and the peer's HCA takes the place of the host.
//! See [`layout`].
//!
//! # When calls return
//! Every blocking call returns when its timeout expires, when the peer closes or resets the
//! connection, when another block closes the socket, and when the host is gone: immediately after a
//! [`SockHost`] was dropped, within [`heartbeat_timeout`](SockOptions::heartbeat_timeout) if its
//! thread died (`ECONNABORTED` in both cases).
//!
//! ```
//! use std::io::{Read, Write};
//! use std::net::TcpListener;
//! use std::time::Duration;
//! use warpwire::mem::{Launch, Program, sim::{Sim, SimConfig}};
//! use warpwire::sock::{SockHost, SockOptions, device::Sockets};
//! # use warpwire::sock::device::{Family, SocketKind};
//! let server = TcpListener::bind("127.0.0.1:0").unwrap();
//! let address = server.local_addr().unwrap();
//! let program = Program::new("greeter").block("greet", move |block| {
//!     let sockets = Sockets::open(block, block.address(0)?)?;
//!     let socket = sockets.socket(Family::V4, SocketKind::Stream)?;
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

mod accepts;
mod arena;
mod byte_counts;
pub mod device;
mod device_cache;
mod gpunet;
mod kinds;
#[doc(hidden)]
pub mod layout;
mod pending;
mod qp_slots;
mod requests;
mod resources;
mod service;
mod shared_area;
mod socket_table;
mod sys;
#[cfg(test)]
mod tests;
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
use qp_slots::{DirectCounts, QpSlots};
use resources::{Counters, Resources};
use service::{ServiceThread, StopFlags};
use shared_area::SharedArea;

/// Where the memory that the host writes and kernels poll is allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum SockMemory {
    /// Device memory if the CPU can map it (has a window onto it), else pinned memory.
    #[default]
    Auto,
    /// Pinned host memory, which kernels poll across the bus.
    Pinned,
    /// Pinned memory by its host addresses: threads of this process use the sockets instead of
    /// kernels, with the same header compiled as C++.
    Threads,
}

/// Limits, sizes and timeouts of a [`SockHost`].
///
/// ```
/// use warpwire::sock::SockOptions;
/// let many = SockOptions::default().with_sockets(8192).with_ring(16 << 10).with_fitting_arena();
/// assert_eq!(many.arena, 8192 * (16 << 10));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SockOptions {
    /// Maximum number of open sockets, 1 to 65535.
    pub sockets: u32,
    /// Maximum number of `warp` connections among them. Each takes about 11 KiB for its queue pair,
    /// all allocated at start; 0 disables the family.
    pub warp_sockets: u32,
    /// Default ring size in bytes, up to 1 GiB; [`SockOption::SendBuffer`](layout::SockOption) and
    /// `ReceiveBuffer` change it per socket.
    pub ring: u64,
    /// Bytes for the rings of all sockets, per direction: a multiple of 4096, up to 64 GiB.
    pub arena: u64,
    /// Maximum number of kernel requests in flight, a power of two up to 65536.
    pub requests: u32,
    /// Kernels consider the host dead after this time without a heartbeat; at least 100 ms.
    /// Default: 10 s, since a thread may wait for a CPU for seconds on a busy machine.
    pub heartbeat_timeout: Duration,
    /// How long the service thread keeps polling after its last work before it sleeps.
    pub spin: Duration,
    /// Where the memory that kernels poll is allocated.
    pub memory: SockMemory,
    /// Whether kernels store into the rings of `warp` peers by themselves, if those are memory of
    /// the same GPU that is mapped here. Takes 4 KiB more for each. On by default.
    pub direct: bool,
}

setters! {
    SockOptions {
        with_sockets => sockets: u32,
        with_warp_sockets => warp_sockets: u32,
        with_ring => ring: u64,
        with_arena => arena: u64,
        with_requests => requests: u32,
        with_heartbeat_timeout => heartbeat_timeout: Duration,
        with_spin => spin: Duration,
        with_memory => memory: SockMemory,
        with_direct => direct: bool,
    }
}

impl Default for SockOptions {
    fn default() -> Self {
        Self {
            sockets: 1024,
            warp_sockets: 1024,
            ring: 64 << 10,
            arena: 64 << 20,
            requests: 256,
            heartbeat_timeout: Duration::from_secs(10),
            spin: Duration::from_micros(50),
            memory: SockMemory::Auto,
            direct: true,
        }
    }
}

impl SockOptions {
    /// Sets `arena` so that every socket can have a ring of the default size.
    #[must_use]
    pub fn with_fitting_arena(mut self) -> Self {
        let ring = arena::rounded(self.ring).unwrap_or(self.ring);
        self.arena = u64::from(self.sockets).saturating_mul(ring);
        self
    }

    fn check(&self) -> Result<()> {
        let refuse = |why: String, fix: &'static str| {
            Err(Error::new(Kind::InvalidArgument, "serve sockets").why(why).fix(fix))
        };
        if !(1..=65_535).contains(&self.sockets) {
            return refuse(format!("{} sockets were requested", self.sockets), "choose 1 to 65535");
        }
        if !self.requests.is_power_of_two() || self.requests > 1 << 16 {
            let why = format!("{} requests in flight were requested", self.requests);
            return refuse(why, "choose a power of two up to 65536");
        }
        if !self.arena.is_multiple_of(arena::MIN_BLOCK) || self.arena == 0 || self.arena > 1 << 36 {
            let why = format!("{} bytes for rings were requested", self.arena);
            return refuse(why, "choose a multiple of 4096 up to 64 GiB");
        }
        // The 32-bit halves of the counters must distinguish a full ring from an empty one.
        if self.ring == 0 || self.ring > requests::MAX_RING || self.ring > self.arena {
            let why = format!("rings of {} bytes were requested", self.ring);
            return refuse(why, "choose 4096 bytes to 1 GiB, at most SockOptions::arena");
        }
        if self.heartbeat_timeout < Duration::from_millis(100) {
            let why = format!("heartbeat_timeout is {:?}", self.heartbeat_timeout);
            return refuse(why, "use 100 ms or more: the heartbeat interval is 20 ms");
        }
        Ok(())
    }
}

/// Counters of a [`SockHost`] since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct SockStats {
    /// Sockets that are open now, connections not yet accepted included.
    pub open: u64,
    /// Kernel requests answered.
    pub requests: u64,
    /// Connections queued at listeners for `accept`.
    pub accepted: u64,
    /// Connections established by `connect`.
    pub connected: u64,
    /// Bytes received from peers of `inet` sockets.
    pub received: u64,
    /// Bytes sent to peers of `inet` sockets.
    pub sent: u64,
    /// Bytes that kernels have read from `warp` sockets.
    pub warp_received: u64,
    /// Bytes that kernels have sent on `warp` sockets.
    pub warp_sent: u64,
    /// Writes to peers of `warp` sockets that kernels have stored by themselves instead of posting.
    pub warp_direct: u64,
    /// Datagrams dropped because they are larger than the receive ring of their socket.
    pub dropped: u64,
    /// Sockets reset because a kernel wrote an impossible counter or datagram record.
    pub misused: u64,
}

/// Serves the sockets of one GPU's kernels. Dropping it stops the service: pending calls return
/// `ECONNABORTED`.
pub struct SockHost {
    device: Device,
    memory: SockMemory,
    shared_area: Arc<SharedArea>,
    counters: Arc<Counters>,
    direct_counts: Option<DirectCounts>,
    stop_flags: Arc<StopFlags>,
    wake: OwnedFd,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl SockHost {
    /// Allocates the memory shared with the device's kernels and starts the service thread.
    pub fn start(device: &Device, options: SockOptions) -> Result<Self> {
        Self::start_with(device, options, None)
    }

    /// As [`start`](Self::start), with this RDMA device for all `warp` connections. The device must
    /// be driven by its own thread ([`ProgressMode::Thread`](crate::verbs::ProgressMode::Thread)),
    /// because kernels ring its doorbells.
    ///
    /// By default a software HCA, on shared memory and UDP, is opened for each local address when
    /// the first connection uses it.
    pub fn start_on(device: &Device, options: SockOptions, context: &Context) -> Result<Self> {
        Self::start_with(device, options, Some(context.clone()))
    }

    fn start_with(device: &Device, options: SockOptions, context: Option<Context>) -> Result<Self> {
        options.check()?;
        let on = |error: Error| error.during("serve sockets").on(device.label());
        let qp_slots = QpSlots::allocate(device, &options).map_err(on)?;
        let qp_slots_addr = qp_slots.as_ref().map_or(0, QpSlots::qp_slots_addr);
        let direct_counts = qp_slots.as_ref().and_then(QpSlots::direct_counts);
        let shared_area =
            Arc::new(SharedArea::allocate(device, &options, qp_slots_addr).map_err(on)?);
        let (counters, stop_flags) = (Arc::<Counters>::default(), Arc::<StopFlags>::default());
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| Error::os("create an eventfd", &errno.into()))?;
        let warp = (qp_slots, context);
        let resources =
            Resources::new(shared_area.clone(), options, warp, &wake, counters.clone())?;
        let service = ServiceThread::new(resources, stop_flags.clone());
        let thread = std::thread::Builder::new()
            .name(format!("sock {}", device.label()))
            .spawn(move || service.run())
            .map_err(|error| Error::os("start the thread of the socket service", &error))?;
        let thread = Mutex::new(Some(thread));
        Ok(Self {
            device: device.clone(),
            memory: options.memory,
            shared_area,
            counters,
            direct_counts,
            stop_flags,
            wake,
            thread,
        })
    }

    /// The address of the table, to be passed to kernels. Valid until this `SockHost` is dropped.
    pub fn table(&self) -> u64 {
        self.shared_area.table()
    }

    /// The device whose kernels this host serves.
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Allocates memory for a program that uses the sockets: device memory of the kind
    /// [`Vmm`](MemoryKind::Vmm), or pinned host memory for [`SockMemory::Threads`].
    pub fn alloc(&self, len: u64) -> Result<Allocation> {
        match self.memory {
            SockMemory::Threads => self.device.alloc_pinned(len),
            SockMemory::Auto | SockMemory::Pinned => self.device.alloc_kind(len, MemoryKind::Vmm),
        }
    }

    /// The address by which such a program accesses `memory`: the device address, or the CPU's for
    /// [`SockMemory::Threads`], which fails for memory without a CPU address.
    pub fn address_of(&self, memory: &Allocation) -> Result<u64> {
        match self.memory {
            SockMemory::Threads => Ok(memory.host_bytes()?.address()),
            SockMemory::Auto | SockMemory::Pinned => Ok(memory.address().raw()),
        }
    }

    /// Why kernels poll pinned memory instead of device memory; `None` if they poll device memory.
    pub fn why_pinned(&self) -> Option<&str> {
        self.shared_area.why_pinned.as_deref()
    }

    /// Reads the counters. `warp` data bypasses the host, so the counters of live `warp`
    /// connections are read from device memory.
    pub fn stats(&self) -> SockStats {
        let warp = self.counters.warp.count(|count| {
            self.shared_area.device_states(count).unwrap_or_else(|error| {
                tracing::warn!(%error, "cannot read the byte counters of `warp` sockets");
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
            warp_direct: self.direct_counts.as_ref().map_or(0, DirectCounts::sum),
            dropped: of(&self.counters.dropped),
            misused: of(&self.counters.misused),
        }
    }

    /// Stops the service: connections are closed, and every call of a kernel returns
    /// `ECONNABORTED`. The shared memory stays allocated until this `SockHost` is dropped.
    pub fn stop(&self) {
        self.stop_flags.stop.store(true, Ordering::Release);
        // If the eventfd's counter is full, it is readable already.
        let _ = rustix::io::write(&self.wake, &1_u64.to_ne_bytes());
        if let Some(thread) = self.thread.lock().take()
            && thread.join().is_err()
        {
            tracing::error!("the thread of the socket service panicked");
        }
    }

    /// Ends the service thread without closing anything, as a crash would. For tests of the
    /// heartbeat.
    #[doc(hidden)]
    pub fn simulate_crash(&self) {
        self.stop_flags.simulate_crash.store(true, Ordering::Release);
        self.stop();
    }
}

impl SockHost {
    /// Writes an impossible value into a socket's device counters. For tests of the check.
    #[doc(hidden)]
    pub fn corrupt_counters(&self, index: u16) {
        if let Err(error) = self.shared_area.publish_device_counters(index, u64::MAX / 3) {
            tracing::error!(%error, "cannot corrupt the device counters");
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
