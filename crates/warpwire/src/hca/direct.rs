//! Operations without packets: where a peer of this machine lets us map its memory, the requester writes, reads and
//! changes words there by itself.
//!
//! The owner's side is a table that peers read ([`ExportTable`]): a row per queue pair that takes requests, a row per
//! registration that peers may use. [`ExportPublisher`] keeps it. The requester's side is a [`DirectPeer`](super::partner::Partner) per connection, with what it knows of
//! the peer's keys, and a [`DirectState`] per queue pair.
//!
//! # Promises
//! 1. **An operation is done directly only if the protocol would do it, with success.** The rows say all that the peer's
//!    responder looks at: the queue pair's state, its peer, its rights, its domain, the key and its tag, domain, rights, bounds.
//!    Whatever does not fit takes the protocol, which then fails on the right side with the right status.
//! 2. **Order is kept**: nothing of the queue pair is outstanding in the protocol when an operation is done directly. Work that is large, or that
//!    had to give way often, waits for that; the rest goes by packets behind what is under way.
//! 3. **What has ended is not touched**: each visit is announced, and each row looked at again after that
//!    ([`ShmPeer::begin_access`](crate::link::Peer::visit)).
//! 4. No step is longer than [`QUANTUM`] bytes: others have their turn in between, and who takes memory back waits for
//!    one turn at most.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use warpwire_proto::qp::{self, QpAttributes, SendWr as WireWork, State};

use super::complete;
use super::direct_peer::DirectPeers;
use super::engine::{Core, Engine, qpn_to_index};
use super::qpc::QpContext;
use crate::link::ExportTable;
use crate::link::shm::exports::RowContent;
use crate::mem::copy::prefetch_for_write;
use crate::mlx5::{self, DataSegment};
use crate::mr::{Access, ExportObserver, MrExport};
use crate::sync::Guard;

/// How many bytes one turn of a queue pair moves.
pub(super) const QUANTUM: u32 = 1 << 20;
/// How many turns a poster makes at most before it goes on.
pub(super) const MAX_POSTER_QUANTA: u32 = 2;

/// Rows of queue pairs come first, then those of keys.
pub(super) const FIRST_KEY_ROW: u32 = 1 << 16;
const MAX_KEY_ROWS: u32 = 1 << 16;

/// The row of a key, if it has one: those beyond the first 65 536 registrations have none.
pub(super) fn row_of(key: u32) -> Option<u32> {
    (key >> 8 < MAX_KEY_ROWS).then_some(FIRST_KEY_ROW + (key >> 8))
}

/// The owner's side. Registrations may outlive the device; its table ends with it, and with the table all rows.
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
}

/// An address in words that compare.
pub(super) fn address_words(address: SocketAddr) -> [u64; 3] {
    let (ip, scope) = match address {
        SocketAddr::V4(v4) => (v4.ip().to_ipv6_mapped(), 0),
        SocketAddr::V6(v6) => (*v6.ip(), v6.scope_id()),
    };
    let ip = u128::from(ip);
    [(ip >> 64) as u64, ip as u64, u64::from(scope) << 32 | u64::from(address.port())]
}

/// The bits of a queue pair's rights.
fn access_bits(access: qp::Access, reads: bool) -> u64 {
    let qpcs = [
        (qp::Access::REMOTE_WRITE, Access::REMOTE_WRITE, true),
        (qp::Access::REMOTE_READ, Access::REMOTE_READ, reads),
        (qp::Access::REMOTE_ATOMIC, Access::REMOTE_ATOMIC, reads),
    ];
    let blocked = qpcs.iter().filter(|(right, _, allowed)| *allowed && access.contains(*right));
    blocked.fold(0, |bits, (_, right, _)| bits | u64::from(right.bits()))
}

/// What a turn has left of posted work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Remaining {
    Nothing,
    /// More of the same.
    MoreQuanta,
    /// What is not for the poster to do.
    NeedsEngine,
}

/// What a queue pair says and knows about operations without packets.
#[derive(Debug)]
pub(super) struct DirectState {
    /// What its peer may do here, and how many of its reads and atomics there may be.
    access: qp::Access,
    max_dest_rd_atomic: u8,
    /// How many reads and atomics of its own there may be.
    pub max_rd_atomic: u8,
    /// What stands in its row.
    published: Option<RowContent>,
    /// The partner whose memory it reaches.
    pub direct_peer: Option<u32>,
    /// Why there is none.
    pub why: &'static str,
    /// The opening of the peer's queue pair that was found right, with its domain and rights.
    pub generation: u64,
    pub pd: u64,
    pub remote_access: u64,
    /// Work that waits, or is done in part.
    pub blocked: Option<WireWork>,
    pub done: u32,
    /// So often did work take the protocol because something was outstanding.
    pub consecutive_indirect: u32,
}

impl DirectState {
    pub(super) fn new() -> Self {
        Self {
            access: qp::Access::NONE,
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

    /// Keeps what the protocol keeps for itself.
    pub(super) fn update_attr(&mut self, change: &QpAttributes) {
        self.access = change.access.unwrap_or(self.access);
        self.max_dest_rd_atomic = change.max_dest_rd_atomic.unwrap_or(self.max_dest_rd_atomic);
        self.max_rd_atomic = change.max_rd_atomic.unwrap_or(self.max_rd_atomic);
    }

    /// Forgets all work, and what the peer was.
    pub(super) fn reset(&mut self) {
        (self.blocked, self.done, self.generation, self.consecutive_indirect) = (None, 0, 0, 0);
        (self.access, self.max_dest_rd_atomic, self.max_rd_atomic) = (qp::Access::NONE, 0, 0);
    }

    /// For people: whether this queue pair needs packets.
    pub(super) fn describe(&self, direct_peers: &DirectPeers) -> String {
        match self.direct_peer.and_then(|at| direct_peers.get(at)) {
            None => format!("packets only: {}", self.why),
            Some(direct_peer) if !direct_peer.peer.has_table() => {
                "packets only: the peer has offered no memory".to_owned()
            }
            Some(_) if self.generation == 0 => {
                "direct where the peer's memory can be mapped; not used so far".to_owned()
            }
            Some(direct_peer) => {
                let count = direct_peer.memories.iter().filter(|known| known.is_alive()).count();
                format!("direct: writes, reads and atomics in {count} mapped memories of the peer")
            }
        }
    }
}

impl QpContext {
    /// Brings the row of a queue pair up to date: open while it takes requests.
    pub(super) fn publish(&mut self, export_table: Option<&Arc<ExportTable>>) {
        let Some(export_table) = export_table else { return };
        let row = qpn_to_index(self.qp.number()) as usize;
        let takes = matches!(self.qp.state(), State::Rts | State::Sqd);
        let connection = self.qp.connection().filter(|_| takes);
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

    /// Shuts the row for good.
    pub(super) fn unpublish(&mut self, export_table: Option<&Arc<ExportTable>>) {
        if let (Some(export_table), Some(_)) = (export_table, self.direct.published.take()) {
            export_table.close(qpn_to_index(self.qp.number()) as usize);
        }
    }
}

impl Core {
    /// Does what was posted, as far as that needs no packets, for one turn. The time is that of the last step: what depends on
    /// it is left to the next one.
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

    /// Does a write that has no entry, if nothing is in its way; else it must be posted like any other.
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
        let row = qpn_to_index(qp.destination());
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

    /// Tells of work that was done without packets.
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

    /// A peer that went may be back: its queue pairs ask the link.
    #[cold]
    pub(super) fn check_direct_peer(&mut self, index: u32) {
        let Some(Some(qpc)) = self.qpcs.get(index as usize) else { return };
        self.direct_peer_lost |=
            qpc.direct.direct_peer.is_some_and(|at| self.direct_peers.is_gone(at));
    }
}

impl Engine {
    /// Asks the link whose memory a queue pair may reach.
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

    /// The same for all whose partner went.
    #[cold]
    pub(super) fn find_lost_direct_peers(&mut self) {
        self.core.direct_peer_lost = false;
        for index in 0..self.core.qpcs.len() {
            let Some(Some(qpc)) = self.core.qpcs.get(index) else { continue };
            if qpc.direct.direct_peer.is_some_and(|at| self.core.direct_peers.is_gone(at)) {
                self.find_direct_peer(index as u32);
            }
        }
    }

    /// Which way a queue pair's work takes, and why.
    pub(super) fn qp_path(&self, number: u32) -> crate::error::Result<crate::link::LinkPath> {
        let qpc = self.qpc(number)?;
        let mut path = qpc.flow.map_or_else(|| self.link.path(), |flow| self.link.flow_path(flow));
        path.why = format!("{}; {}", path.why, qpc.direct.describe(&self.core.direct_peers));
        Ok(path)
    }

    /// Takes back all that peers may reach.
    pub(super) fn end(&mut self) {
        let Core { qpcs, export_table, .. } = &mut self.core;
        qpcs.iter_mut().flatten().for_each(|qpc| qpc.unpublish(export_table.as_ref().ok()));
    }
}

/// The device, held for writes that are done here and now. See [`Hca::fast_path`](super::Hca::express).
pub struct FastPath<'a> {
    pub(super) engine: Guard<'a, Engine>,
    pub(super) index: u32,
    /// So many bytes may still be moved before others have their turn.
    pub(super) budget: u32,
}

impl FastPath<'_> {
    /// Does a write, only if its queue is empty. If not (`false`), nothing has happened.
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

/// Where a queue pair's last such write found the memory of its key. A peer that waits for a word looks at it all the time,
/// and so has its line; to fetch that takes longer than all that is to be made sure of before the store, and goes on meanwhile.
#[derive(Debug, Default)]
pub struct PrefetchHint {
    key: AtomicU32,
    /// What is to be added to the peer's address.
    delta: AtomicU64,
}

impl PrefetchHint {
    /// A write to `remote` is about to be tried. That the memory may be another by now, or gone, does no harm: it is a hint.
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

/// A write that its poster hands over without an entry in the queue, to be done now or not at all.
pub struct FastWrite<'a> {
    /// The block of the send queue that its entry would begin with, counted without end.
    pub wqe_index: u64,
    /// Where it goes.
    pub remote: mlx5::Remote,
    /// What is written: bytes, or one range of memory.
    pub payload: DataSegment<'a>,
    /// Whether success makes a completion.
    pub signaled: bool,
    /// Keeps where it went.
    pub prefetch_hint: &'a PrefetchHint,
}

impl FastWrite<'_> {
    #[inline]
    fn len(&self) -> u32 {
        u32::try_from(self.payload.len()).unwrap_or(u32::MAX)
    }
}
