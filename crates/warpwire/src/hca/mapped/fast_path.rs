//! The fast path: an RDMA write that a CPU thread executes into mapped memory without writing a
//! WQE: into host memory, or, if it is short, through a window into device memory. It is the one
//! exception to the rule that work reaches the engine through queues in memory, and all of it is
//! here.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use warpwire_proto::qp::State;

use super::super::complete;
use super::super::engine::{Core, Engine};
use super::super::numbers::qp_row;
use super::super::qpc::QpContext;
use super::device_window::{PeerWindow, SHORT_LEN};
use super::host_memory::RemoteTarget;
use super::peer::{DirectPeers, MappingState};
use super::rows::FIRST_KEY_ROW;
use super::{DirectState, PeerMemory};
use crate::mem::SharedBytes;
use crate::mem::copy::prefetch_for_write;
use crate::mlx5::{self, DataSegment};
use crate::mr::{Access, AccessDenied, PdId, PeerMapping, Registry};
use crate::sync::Guard;

/// The locked engine, for inline writes: see [`Hca::fast_path`](crate::hca::Hca::fast_path).
pub struct FastPath<'a> {
    pub(in crate::hca) engine: Guard<'a, Engine>,
    pub(in crate::hca) index: u32,
    /// Bytes that may still be moved before other queue pairs are served.
    pub(in crate::hca) budget: u32,
}

impl FastPath<'_> {
    /// Executes a write if its send queue is empty. On `false` nothing has happened, and it must be
    /// posted.
    #[inline]
    pub fn write(&mut self, write: &FastWrite<'_>) -> bool {
        let len = write.len();
        if !(1..=self.budget).contains(&len) || !self.engine.core.fast_write(self.index, write, len)
        {
            return false;
        }
        self.budget -= len;
        true
    }
}

/// Where a queue pair's last inline write found the memory of its key. The peer is usually spinning
/// on the target word and owns its cache line; prefetching the line for write overlaps its transfer
/// with the access checks.
#[derive(Debug, Default)]
pub struct PrefetchHint {
    key: AtomicU32,
    /// Mapped address minus the peer's address.
    delta: AtomicU64,
}

impl PrefetchHint {
    /// Prefetches the target of a write. If the memory has been unmapped meanwhile, that does no
    /// harm: it is a hint.
    #[inline]
    pub fn prefetch(&self, remote: &mlx5::Remote) {
        if self.key.load(Ordering::Relaxed) == remote.rkey {
            prefetch_for_write(remote.address.wrapping_add(self.delta.load(Ordering::Relaxed)));
        }
    }

    #[inline]
    pub(super) fn take(&self, remote: &mlx5::Remote, mapped_at: u64) {
        self.key.store(remote.rkey, Ordering::Relaxed);
        self.delta.store(mapped_at.wrapping_sub(remote.address), Ordering::Relaxed);
    }
}

/// A write handed over without a WQE, to be executed now or not at all.
pub struct FastWrite<'a> {
    /// Index of the WQEBB that its WQE would start at, without wrap-around.
    pub wqe_index: u64,
    /// The target.
    pub remote: mlx5::Remote,
    /// Inline bytes, or one range of memory.
    pub payload: DataSegment<'a>,
    /// Whether success produces a completion.
    pub signaled: bool,
    /// Updated with the address that was written to.
    pub prefetch_hint: &'a PrefetchHint,
}

impl FastWrite<'_> {
    #[inline]
    fn len(&self) -> u32 {
        u32::try_from(self.payload.len()).unwrap_or(u32::MAX)
    }
}

impl Core {
    /// Executes a write that has no WQE, if nothing is ahead of it. Returns false if it must be
    /// posted.
    #[inline]
    fn fast_write(&mut self, index: u32, write: &FastWrite<'_>, len: u32) -> bool {
        let Core { qpcs, mapped, registry, .. } = self;
        let Some(Some(qpc)) = qpcs.get_mut(index as usize) else { return false };
        let QpContext { qp, qp_memory, direct, wait, poll_doorbell, .. } = &mut **qpc;
        let Some(qp) = qp.connection() else { return false };
        let is_next = qp_memory.ring.is_at(write.wqe_index) && qp.outstanding() == 0;
        let waits = wait.is_some() || direct.is_busy() || *poll_doorbell;
        if !is_next || waits || qp.state() != State::Rts {
            return false;
        }
        let row = qp_row(qp.destination());
        if !mapped.peers.try_write(direct, row, write, len, qp_memory.pd, registry) {
            return false;
        }
        qp_memory.ring.skip_one();
        self.totals.direct_operations += 1;
        self.totals.direct_bytes += u64::from(len);
        if qpc.signal_all || write.signaled {
            let (sent, cqn) = (complete::fast_write_cqe(qpc, write.wqe_index), qpc.send_cq);
            self.push_fast(cqn, &sent);
        }
        true
    }
}

/// A peer's memory that the fast path writes to.
enum FastTarget<'a> {
    Host(&'a PeerMapping, SharedBytes<'a>),
    Device(&'a PeerWindow),
}

impl<'a> FastTarget<'a> {
    /// `None` if it is left to other ways. Those show device memory to the queue pair's kernels,
    /// if it has any.
    #[inline]
    fn of(memory: &'a PeerMemory, len: u32, has_kernels: bool) -> Option<Self> {
        match memory {
            PeerMemory::Host(memory) => Some(Self::Host(memory, memory.bytes(true)?)),
            PeerMemory::Device(memory) if len as usize <= SHORT_LEN && !has_kernels => {
                let window = memory.window()?;
                window.is_for(Access::REMOTE_WRITE, len).then_some(Self::Device(window))
            }
            _ => None,
        }
    }

    #[inline]
    fn put(
        &self,
        at: u64,
        write: &FastWrite<'_>,
        len: u32,
        pd: PdId,
        registry: &Registry,
    ) -> Result<(), AccessDenied> {
        match self {
            Self::Host(memory, peer_bytes) => {
                write.prefetch_hint.take(&write.remote, peer_bytes.address().wrapping_add(at));
                RemoteTarget { memory, at }.put(peer_bytes, at, write.payload, 0, len, pd, registry)
            }
            Self::Device(window) => window.put(at, write.payload, pd, registry),
        }
    }
}

impl DirectPeers {
    /// Executes a write without a WQE, all of it, to the queue pair with that row. Only the fast
    /// path: whatever differs from the last time is left to [`DirectPeers::try_execute`].
    #[inline]
    fn try_write(
        &mut self,
        direct: &mut DirectState,
        row: u32,
        write: &FastWrite<'_>,
        len: u32,
        pd: PdId,
        registry: &Registry,
    ) -> bool {
        let need = Access::REMOTE_WRITE;
        let Some(direct_peer) = direct.direct_peer.and_then(|at| self.get(at)) else {
            return false;
        };
        let peer = &*direct_peer.peer;
        if peer.is_gone()
            || peer.has_replies()
            || direct.remote_access & u64::from(need.bits()) == 0
        {
            return false;
        }
        let Some(known) = direct_peer.key(write.remote.rkey) else { return false };
        let MappingState::Mapped(memory) = &known.mapping else { return false };
        let has_kernels = direct.kernel_table.is_some();
        let Some(target) = FastTarget::of(memory, len, has_kernels) else { return false };
        known.used.set(direct_peer.epoch);
        let Ok(at) = known.offset(direct.pd, need, write.remote.address, len.into()) else {
            return false;
        };
        let rows = [row, FIRST_KEY_ROW + (known.key >> 8)];
        let Some(guard) =
            peer.begin_access(rows, [direct.generation, known.generation], len.into())
        else {
            return false;
        };
        let moved = target.put(at, write, len, pd, registry);
        drop(guard);
        direct.consecutive_indirect = 0;
        moved.is_ok()
    }
}
