//! What sockets of all kinds use: the shared memory, the allocators of rings, queue pairs, the
//! epoll set and the counters.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use rustix::event::epoll::{self, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::RecvFlags;

use super::SockOptions;
use super::arena::{self, Arena};
use super::byte_counts::WarpByteCounts;
use super::device_cache::{ConnMemory, DeviceCache};
use super::kinds::{CallResult, Common, Ring, Rings, SockOpts};
use super::layout::{HostState, host_state};
use super::qp_slots::QpSlots;
use super::shared_area::SharedArea;
use super::sys;
use crate::error::{Error, Result};
use crate::verbs::Context;

/// Bytes moved for one socket per turn. A UDP datagram fits.
pub(super) const QUANTUM: u64 = 128 << 10;
/// Events of a socket, edge-triggered. `PRI` is urgent data (`MSG_OOB`), at which a read stops.
const WATCHED: EventFlags = EventFlags::IN
    .union(EventFlags::PRI)
    .union(EventFlags::OUT)
    .union(EventFlags::RDHUP)
    .union(EventFlags::ET);
/// The epoll data of the wake-up eventfd.
pub(super) const WAKE: u64 = u64::MAX;

/// Counters of the service thread, read by [`SockHost::stats`](super::SockHost::stats).
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) open: AtomicU64,
    pub(super) requests: AtomicU64,
    pub(super) accepted: AtomicU64,
    pub(super) connected: AtomicU64,
    pub(super) received: AtomicU64,
    pub(super) sent: AtomicU64,
    pub(super) dropped: AtomicU64,
    pub(super) misused: AtomicU64,
    /// Bytes of `warp` sockets.
    pub(super) warp: WarpByteCounts,
}

/// What the host state of an RDMA stream has beside its rings.
pub(super) struct RdmaState {
    /// Usable bytes of the send ring.
    pub(super) send_window: u64,
    /// Maximum number of bytes that the peer keeps in flight or unread.
    pub(super) peer_window: u64,
    /// Address of the QP descriptor, 0 if there is none.
    pub(super) qp_descriptor: u64,
}

/// The resources of one service thread.
pub(super) struct Resources {
    pub(super) shared_area: Arc<SharedArea>,
    pub(super) options: SockOptions,
    pub(super) counters: Arc<Counters>,
    pub(super) qp_slots: Option<QpSlots>,
    pub(super) device_cache: DeviceCache,
    pub(super) receive_arena: Arena,
    pub(super) send_arena: Arena,
    /// Receives bytes that do not go into a ring at once: rings behind a window, and input that is
    /// discarded.
    pub(super) bounce: Vec<u8>,
    pub(super) epoll: OwnedFd,
}

impl Resources {
    pub(super) fn new(
        shared_area: Arc<SharedArea>,
        options: SockOptions,
        (qp_slots, context): (Option<QpSlots>, Option<Context>),
        wake: &OwnedFd,
        counters: Arc<Counters>,
    ) -> Result<Self> {
        let failed = |errno: Errno| Error::os("watch sockets", &errno.into());
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        epoll::add(&epoll, wake, EventData::new_u64(WAKE), EventFlags::IN).map_err(failed)?;
        let (receive_arena, send_arena) = SharedArea::arenas(&options);
        Ok(Self {
            shared_area,
            options,
            counters,
            qp_slots,
            device_cache: DeviceCache::new(context),
            receive_arena,
            send_arena,
            bounce: vec![0; QUANTUM as usize],
            epoll,
        })
    }

    /// Allocates rings in the sizes that the options give, unless they are allocated.
    pub(super) fn alloc_rings(
        &mut self,
        rings: &mut Rings,
        options: &SockOpts,
    ) -> std::result::Result<(), Errno> {
        if rings.is_allocated() {
            return Ok(());
        }
        let receive = alloc_ring(&mut self.receive_arena, options.receive_size)?;
        match alloc_ring(&mut self.send_arena, options.send_size) {
            Ok(send) => (rings.receive, rings.send) = (receive, send),
            Err(errno) => {
                self.receive_arena.release(receive.0, receive.1);
                return Err(errno);
            }
        }
        Ok(())
    }

    /// Frees rings. Their counters stay, as kernels keep theirs.
    pub(super) fn free_rings(&mut self, rings: &mut Rings) {
        let (receive, send) = (rings.receive, rings.send);
        (rings.receive, rings.send) = ((0, 0), (0, 0));
        if receive.1 != 0 {
            self.receive_arena.release(receive.0, receive.1);
        }
        if send.1 != 0 {
            self.send_arena.release(send.0, send.1);
        }
    }

    /// Allocates the ring of a listener.
    pub(super) fn alloc_accept_ring(&mut self, size: u64) -> std::result::Result<Ring, Errno> {
        alloc_ring(&mut self.receive_arena, size)
    }

    /// The memory of a socket that an RDMA device accesses.
    pub(super) fn conn_memory(&self, common: &Common, rings: &Rings) -> Result<ConnMemory> {
        self.shared_area.conn_memory(common.index, rings.receive, rings.send)
    }

    /// Adds a descriptor to the epoll set, edge-triggered.
    pub(super) fn watch_descriptor(
        &self,
        fd: &OwnedFd,
        data: u64,
    ) -> std::result::Result<(), Errno> {
        epoll::add(&self.epoll, fd, EventData::new_u64(data), WATCHED)
    }

    /// Replaces the epoll data of a descriptor, of a pending handshake so far, by that of a socket.
    pub(super) fn rewatch(&self, common: &mut Common) -> std::result::Result<(), Errno> {
        if let Some(fd) = &common.fd {
            epoll::delete(&self.epoll, fd)?;
        }
        self.watch(common)
    }

    /// Adds a socket's descriptor to the epoll set, if it is not in it.
    pub(super) fn watch(&self, common: &mut Common) -> std::result::Result<(), Errno> {
        let data = common.handle() as u64;
        let Some(fd) = common.fd.as_ref().filter(|_| !common.watched) else { return Ok(()) };
        self.watch_descriptor(fd, data)?;
        common.watched = true;
        Ok(())
    }

    /// Sends `len` bytes of a send ring from counter `at` on, without a copy in between.
    pub(super) fn send(
        &self,
        fd: &OwnedFd,
        (ring, at): (Ring, u64),
        len: u64,
        to: Option<SocketAddr>,
    ) -> CallResult<usize> {
        let parts = self.shared_area.send_parts(ring, at, len)?;
        Ok(sys::send(fd, parts, to))
    }

    /// Receives at most `len` bytes, up to [`QUANTUM`], into a receive ring from counter `at` on:
    /// in place if the CPU may write there in any way, else through a buffer.
    pub(super) fn receive(
        &mut self,
        fd: &OwnedFd,
        (ring, at): (Ring, u64),
        len: u64,
        flags: RecvFlags,
    ) -> CallResult<(usize, Option<SocketAddr>)> {
        if let Some(parts) = self.shared_area.receive_parts(ring, at, len)? {
            return Ok(sys::receive(fd, parts, flags));
        }
        let bounce = &mut self.bounce[..len as usize];
        let (count, from) =
            match rustix::net::recvfrom(fd, &mut *bounce, flags | RecvFlags::DONTWAIT) {
                Ok((_, count, from)) => (count, from),
                Err(errno) => return Ok(Err(errno)),
            };
        self.shared_area.put(ring, at, &bounce[..count.min(len as usize)])?;
        Ok(Ok((count, from.and_then(|from| SocketAddr::try_from(from).ok()))))
    }

    /// Publishes a socket's whole host state to kernels. `rdma` is that of an RDMA stream.
    pub(super) fn publish(
        &self,
        common: &Common,
        rings: &Rings,
        rdma: Option<RdmaState>,
    ) -> Result<()> {
        let addresses = self.shared_area.ring_addresses(rings.receive.0, rings.send.0);
        let rdma = rdma.unwrap_or(RdmaState {
            send_window: rings.send.1,
            peer_window: u64::MAX,
            qp_descriptor: 0,
        });
        let report_at = (rings.receive.1.min(rdma.peer_window) / 4).max(1);
        let line = HostState {
            state: common.state(),
            received: rings.received,
            taken: rings.taken,
            receive_ring: addresses.0,
            send_ring: addresses.1,
            receive_size: rings.receive.1 as u32,
            send_size: rdma.send_window as u32,
            qp_descriptor: rdma.qp_descriptor,
            report_at: report_at as u32,
            unused: 0,
        };
        self.shared_area.write_host_state(common.index, &line)
    }

    /// Publishes a socket's state word to kernels.
    pub(super) fn publish_state(&self, common: &Common) -> Result<()> {
        self.shared_area.store_word(common.index, host_state::STATE, common.state())
    }

    /// Publishes how much was put into the receive ring.
    pub(super) fn publish_received(&self, common: &Common, rings: &Rings) -> Result<()> {
        self.shared_area.store_word(common.index, host_state::RECEIVED, rings.received)
    }

    /// Publishes how much was taken from the send ring.
    pub(super) fn publish_taken(&self, common: &Common, rings: &Rings) -> Result<()> {
        self.shared_area.store_word(common.index, host_state::TAKEN, rings.taken)
    }
}

fn alloc_ring(arena: &mut Arena, size: u64) -> std::result::Result<Ring, Errno> {
    let size = arena::rounded(size).ok_or(Errno::NOBUFS)?;
    arena.take(size).map(|at| (at, size)).ok_or(Errno::NOBUFS)
}
