//! Direct access: where a peer on this machine lets us map its memory, the requester executes
//! writes, reads and atomics there without packets.
//!
//! The owner's side is a table that peers read ([`ExportTable`]): a row per queue pair that accepts
//! requests, and a row per registration that peers may access, maintained by [`ExportPublisher`].
//! The requester's side is a [`DirectPeer`](super::direct_peer::DirectPeer) per connection, a cache
//! of the peer's keys, and a [`DirectState`] per queue pair.
//!
//! # Promises
//! 1. **An operation is executed directly only if the protocol would execute it with success.** The
//!    rows hold all that the peer's responder checks: the queue pair's state, peer, access flags
//!    and protection domain; the key with its tag, domain, access flags and bounds. Everything else
//!    takes the protocol, which then fails on the right side with the right status.
//! 2. **Order is kept**: nothing of the queue pair is outstanding in the protocol when an operation
//!    is executed directly. Work that is large, or was sent as packets several times in a row,
//!    waits for that; the rest is sent as packets behind what is in flight.
//! 3. **Revoked memory is not touched**: each access is announced, and each row checked again after
//!    that ([`ShmPeer::begin_access`](crate::link::ShmPeer::begin_access)).
//! 4. No step moves more than [`QUANTUM`] bytes: other queue pairs are served in between, and a
//!    revocation waits for one quantum at most.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use warpwire_proto::qp::{self, QpAttributes, SendWr as WireWork, State};

use super::complete;
use super::direct_peer::DirectPeers;
use super::engine::{Core, Engine};
use super::numbers::qp_row;
use super::qpc::QpContext;
use crate::link::ExportTable;
use crate::link::shm::exports::RowContent;
use crate::mem::copy::prefetch_for_write;
use crate::mlx5::{self, DataSegment};
use crate::mr::{Access, ExportObserver, MrExport};
use crate::sync::Guard;

/// Bytes that one queue pair moves before others are served: 1 MiB.
pub(super) const QUANTUM: u32 = 1 << 20;
/// Quanta that a posting thread executes before `post` returns.
pub(super) const MAX_POSTER_QUANTA: u32 = 2;

/// Rows of queue pairs come first, then those of keys.
pub(super) const FIRST_KEY_ROW: u32 = 1 << 16;
const MAX_KEY_ROWS: u32 = 1 << 16;

/// The row of a key; `None` beyond the first 65 536 registrations.
pub(super) fn row_of(key: u32) -> Option<u32> {
    (key >> 8 < MAX_KEY_ROWS).then_some(FIRST_KEY_ROW + (key >> 8))
}

/// Publishes registrations in the export table. Registrations may outlive the device; the table,
/// and all its rows with it, ends with the device.
pub(super) struct ExportPublisher(pub Weak<ExportTable>);

impl ExportObserver for ExportPublisher {
    fn opened(&self, export: &MrExport) {
        let (Some(row), Some(export_table)) = (row_of(export.key), self.0.upgrade()) else {
            return;
        };
        let MrExport { key, pd, access, iova, len, memory, offset } = *export;
        let content = [key.into(), pd, access.bits().into(), iova, len, memory, offset];
        export_table.open(row as usize, &content);
    }

    fn closing(&self, key: u32) {
        if let (Some(row), Some(export_table)) = (row_of(key), self.0.upgrade()) {
            export_table.close(row as usize);
        }
    }

    fn wait_until_unused(&self, key: u32, limit: Duration) -> bool {
        match (row_of(key), self.0.upgrade()) {
            (Some(row), Some(export_table)) => export_table.wait_until_unused(row as usize, limit),
            _ => true,
        }
    }
}

/// An address as words, for comparison in a row.
pub(super) fn address_words(address: SocketAddr) -> [u64; 3] {
    let (ip, scope) = match address {
        SocketAddr::V4(v4) => (v4.ip().to_ipv6_mapped(), 0),
        SocketAddr::V6(v6) => (*v6.ip(), v6.scope_id()),
    };
    let ip = u128::from(ip);
    [(ip >> 64) as u64, ip as u64, u64::from(scope) << 32 | u64::from(address.port())]
}

/// The access flags of a queue pair, as a row stores them; `reads` is whether it accepts reads and
/// atomics.
fn access_bits(access: Access, reads: bool) -> u64 {
    let rights = [
        (Access::REMOTE_WRITE, true),
        (Access::REMOTE_READ, reads),
        (Access::REMOTE_ATOMIC, reads),
    ];
    let granted = rights.iter().filter(|(right, allowed)| *allowed && access.contains(*right));
    granted.fold(0, |bits, (right, _)| bits | u64::from(right.bits()))
}

/// What is left of posted work after one quantum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Remaining {
    Nothing,
    /// Work that the poster can execute.
    MoreQuanta,
    /// Work that only a step of the engine can execute.
    NeedsEngine,
}

/// Direct access of one queue pair.
#[derive(Debug)]
pub(super) struct DirectState {
    /// What the peer may do here: its access flags, and the limit of its outstanding reads and
    /// atomics.
    access: Access,
    max_dest_rd_atomic: u8,
    /// The limit of our own outstanding reads and atomics.
    pub max_rd_atomic: u8,
    /// The content of this queue pair's row, while it is open.
    published: Option<RowContent>,
    /// Index of the peer whose memory is accessible.
    pub direct_peer: Option<u32>,
    /// Why there is no `direct_peer`.
    pub why: &'static str,
    /// The generation of the peer's row that was validated, with its protection domain and access
    /// flags; 0 if none.
    pub generation: u64,
    pub pd: u64,
    pub remote_access: u64,
    /// Work that waits for outstanding packets or for the next quantum, and how many bytes of it
    /// are done.
    pub blocked: Option<WireWork>,
    pub done: u32,
    /// Consecutive operations sent as packets because earlier ones were still outstanding.
    pub consecutive_indirect: u32,
}

impl DirectState {
    pub(super) fn new() -> Self {
        Self {
            access: Access::NONE,
            max_dest_rd_atomic: 0,
            max_rd_atomic: 0,
            published: None,
            direct_peer: None,
            why: "not connected",
            generation: 0,
            pd: 0,
            remote_access: 0,
            blocked: None,
            done: 0,
            consecutive_indirect: 0,
        }
    }

    /// Copies the attributes that the protocol keeps private.
    pub(super) fn update_attr(&mut self, change: &QpAttributes) {
        self.access = change.access.unwrap_or(self.access);
        self.max_dest_rd_atomic = change.max_dest_rd_atomic.unwrap_or(self.max_dest_rd_atomic);
        self.max_rd_atomic = change.max_rd_atomic.unwrap_or(self.max_rd_atomic);
    }

    /// Drops all work, and what was validated of the peer.
    pub(super) fn reset(&mut self) {
        (self.blocked, self.done, self.generation, self.consecutive_indirect) = (None, 0, 0, 0);
        (self.access, self.max_dest_rd_atomic, self.max_rd_atomic) = (Access::NONE, 0, 0);
    }

    /// A description for people: whether direct access is on, and why not.
    pub(super) fn describe(&self, direct_peers: &DirectPeers) -> String {
        match self.direct_peer.and_then(|at| direct_peers.get(at)) {
            None => format!("direct access: off ({})", self.why),
            Some(direct_peer) if !direct_peer.peer.has_table() => {
                "direct access: off (the peer exports no memory)".to_owned()
            }
            Some(_) if self.generation == 0 => "direct access: on (not used yet)".to_owned(),
            Some(direct_peer) => {
                let count = direct_peer.memories.iter().filter(|known| known.is_alive()).count();
                format!("direct access: on (peer mappings: {count})")
            }
        }
    }
}

impl QpContext {
    /// Updates the row of the queue pair: open while the queue pair accepts requests.
    pub(super) fn publish(&mut self, export_table: Option<&Arc<ExportTable>>) {
        let Some(export_table) = export_table else { return };
        let row = qp_row(self.qp.number()) as usize;
        let accepts = matches!(self.qp.state(), State::Rts | State::Sqd);
        let connection = self.qp.connection().filter(|_| accepts);
        let content =
            connection.and_then(|qp| qp.path().map(|path| (qp, path))).map(|(qp, path)| {
                let qpns = u64::from(qp.number()) << 32 | u64::from(qp.destination());
                let remote_access =
                    access_bits(self.direct.access, self.direct.max_dest_rd_atomic > 0);
                let [a, b, c] = address_words(path.peer);
                [qpns, remote_access, self.qp_memory.pd.raw(), a, b, c, 0]
            });
        if content == self.direct.published {
            return;
        }
        if self.direct.published.take().is_some() {
            export_table.close(row);
        }
        if let Some(content) = content {
            export_table.open(row, &content);
            self.direct.published = Some(content);
        }
    }

    /// Closes the row for good.
    pub(super) fn unpublish(&mut self, export_table: Option<&Arc<ExportTable>>) {
        if let (Some(export_table), Some(_)) = (export_table, self.direct.published.take()) {
            export_table.close(qp_row(self.qp.number()) as usize);
        }
    }
}

impl Core {
    /// Executes posted work that needs no packets, one quantum of it. Uses the time of the last
    /// step: what depends on the time is left to the next step.
    pub(super) fn execute_posted(&mut self, index: u32) -> Remaining {
        let Some(Some(qpc)) = self.qpcs.get(index as usize) else { return Remaining::NeedsEngine };
        if qpc.direct.direct_peer.is_none()
            || qpc.qp.state() != State::Rts
            || qpc.qp.outstanding() > 0
        {
            return Remaining::NeedsEngine;
        }
        let done = self.totals.direct_operations;
        self.service_qp(self.last_step, index);
        let Some(Some(qpc)) = self.qpcs.get_mut(index as usize) else {
            return Remaining::NeedsEngine;
        };
        qpc.qp_memory.ring.reset_missing();
        let is_empty = !qpc.active && qpc.wait.is_none() && qpc.direct.blocked.is_none();
        match self.totals.direct_operations != done {
            true if is_empty => Remaining::Nothing,
            true => Remaining::MoreQuanta,
            false => Remaining::NeedsEngine,
        }
    }

    /// Executes a write that has no WQE, if nothing is ahead of it. Returns false if it must be
    /// posted.
    #[inline]
    fn fast_write(&mut self, index: u32, write: &FastWrite<'_>, len: u32) -> bool {
        let Core { qpcs, direct_peers, registry, .. } = self;
        let Some(Some(qpc)) = qpcs.get_mut(index as usize) else { return false };
        let QpContext { qp, qp_memory, direct, wait, poll_doorbell, .. } = &mut **qpc;
        let Some(qp) = qp.connection() else { return false };
        let is_next = qp_memory.ring.is_at(write.wqe_index) && qp.outstanding() == 0;
        let waits = wait.is_some() || direct.blocked.is_some() || *poll_doorbell;
        if !is_next || waits || qp.state() != State::Rts {
            return false;
        }
        let row = qp_row(qp.destination());
        if !direct_peers.try_write(direct, row, write, len, qp_memory.pd, registry) {
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

    /// Completes work that was executed directly.
    #[inline]
    pub(super) fn complete_direct(&mut self, index: u32, work: &WireWork) {
        let Some(Some(qpc)) = self.qpcs.get_mut(index as usize) else { return };
        self.totals.direct_operations += 1;
        self.totals.direct_bytes += u64::from(work.len);
        let done = qp::SendCompletion {
            id: work.id,
            status: qp::Status::Success,
            signaled: work.signaled,
        };
        let (cqe, cqn) = (complete::sent(qpc, &done), qpc.send_cq);
        if let Some(cqe) = cqe {
            self.push(cqn, &cqe);
        }
    }

    /// Notes that the peer of a queue pair has disconnected; the next step asks the link for a new
    /// connection.
    #[cold]
    pub(super) fn check_direct_peer(&mut self, index: u32) {
        let Some(Some(qpc)) = self.qpcs.get(index as usize) else { return };
        self.direct_peer_lost |=
            qpc.direct.direct_peer.is_some_and(|at| self.direct_peers.is_gone(at));
    }
}

impl Engine {
    /// Asks the link for the peer whose memory a queue pair may access.
    pub(super) fn find_direct_peer(&mut self, index: u32) {
        let Core { qpcs, direct_peers, export_table, .. } = &mut self.core;
        let Some(Some(qpc)) = qpcs.get_mut(index as usize) else { return };
        if let Some(at) = qpc.direct.direct_peer.take() {
            direct_peers.detach(at);
        }
        let found = match (&export_table, qpc.flow) {
            (Err(why), _) => Err(*why),
            (Ok(_), None) => Err("not connected"),
            (Ok(_), Some(flow)) => self.link.direct_peer(flow),
        };
        match found {
            Ok(peer) => {
                qpc.direct.direct_peer = Some(direct_peers.attach(peer));
                self.core.has_direct_peers.store(true, Ordering::Relaxed);
            }
            Err(why) => qpc.direct.why = why,
        }
    }

    /// The same for all queue pairs whose peer has disconnected.
    #[cold]
    pub(super) fn find_lost_direct_peers(&mut self) {
        self.core.direct_peer_lost = false;
        for index in 0..self.core.qpcs.len() {
            let Some(Some(qpc)) = self.core.qpcs.get(index) else { continue };
            if qpc.direct.direct_peer.is_some_and(|at| self.core.direct_peers.is_gone(at)) {
                self.find_direct_peer(index as u32);
                // The flow may have moved to another transport.
                self.find_path(index as u32);
            }
        }
    }

    /// The path that a queue pair's work takes, and why.
    pub(super) fn qp_path(&self, number: u32) -> crate::error::Result<crate::link::LinkPath> {
        let qpc = self.qpc(number)?;
        let mut path = qpc.flow.map_or_else(|| self.link.path(), |flow| self.link.flow_path(flow));
        path.why = format!("{}; {}", path.why, qpc.direct.describe(&self.core.direct_peers));
        Ok(path)
    }

    /// Closes the rows of all queue pairs.
    pub(super) fn end(&mut self) {
        let Core { qpcs, export_table, .. } = &mut self.core;
        qpcs.iter_mut().flatten().for_each(|qpc| qpc.unpublish(export_table.as_ref().ok()));
    }
}

/// The locked engine, for inline writes: see [`Hca::fast_path`](super::Hca::fast_path).
pub struct FastPath<'a> {
    pub(super) engine: Guard<'a, Engine>,
    pub(super) index: u32,
    /// Bytes that may still be moved before other queue pairs are served.
    pub(super) budget: u32,
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
