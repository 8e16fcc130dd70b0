//! Mapped memory: where a peer on this machine lets us map its memory, writes, reads and atomics
//! are executed there without packets.
//!
//! A queue pair's work has two ways: packets (the protocol over a link), and this one, tried first
//! by [`Mapped::try_execute`]. Host memory is accessed by the CPU (`host_memory.rs`; `fast_path.rs`
//! is its exception for single writes) or, if it cannot be mapped, by the kernel
//! (`process_memory.rs`), device memory by copies of the GPU (`device_copies.rs`) or, if the
//! operation is short, by the CPU (`device_window.rs`).
//!
//! The owner's side is a table that peers read ([`ExportTable`]): a row per queue pair that accepts
//! requests, and a row per registration that peers may access (`rows.rs`). The requester's side is
//! a [`DirectPeer`](peer::DirectPeer) per connection, a cache of the peer's keys, and a
//! [`DirectState`] per queue pair.
//!
//! # Promises
//! 1. **An operation is executed directly only if the protocol would execute it with success.** The
//!    rows hold all that the peer's responder checks: the queue pair's state, peer, access flags
//!    and protection domain; the key with its tag, domain, access flags and bounds. Everything else
//!    takes the protocol, which then fails on the right side with the right status.
//! 2. **Order is kept**: nothing of the queue pair is outstanding in the protocol when an operation
//!    is executed directly. Work that is large, or was sent as packets several times in a row,
//!    waits for that; the rest is sent as packets behind what is in flight. Likewise everything
//!    that is not a copy of the GPU waits for those in flight.
//! 3. **Revoked memory is not touched**: each access is announced, and each row checked again after
//!    that ([`ShmPeer::begin_access`](crate::link::ShmPeer::begin_access)).
//! 4. No step moves more than [`QUANTUM`] bytes by the CPU: other queue pairs are served in
//!    between, and a revocation waits for one quantum at most.

mod device_copies;
mod device_window;
mod fast_path;
mod host_memory;
mod imported;
mod kernel_table;
mod lists;
mod peer;
mod process_memory;
mod rows;

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use warpwire_proto::Instant;
use warpwire_proto::qp::{self, Fence, QpAttributes, SendOp, SendWr as WireWork, State};

use super::complete;
use super::engine::{Core, Engine};
use super::qpc::QpContext;
use super::stats::IndirectReason;
use crate::link::ExportTable;
use crate::link::shm::exports::RowContent;
use crate::mr::{Access, PeerMapping, Registry};
use device_copies::DeviceCopies;
pub use fast_path::{FastPath, FastWrite, PrefetchHint};
use imported::ImportedMemory;
pub(crate) use kernel_table::layout as kernel_table_layout;
pub(super) use kernel_table::{KernelTable, KernelTables};
use lists::PostedList;
pub(crate) use lists::{ListPost, ListRange, ListRegions, RangeList};
use peer::DirectPeers;
pub(super) use rows::ExportPublisher;

/// Bytes that one queue pair moves before others are served: 1 MiB.
pub(super) const QUANTUM: u32 = 1 << 20;
/// Quanta that a posting thread executes before `post` returns.
pub(super) const MAX_POSTER_QUANTA: u32 = 2;

/// What an engine has mapped of its peers, and lets them map.
pub(super) struct Mapped {
    /// Memory that peers on this machine may access directly; or why there is none.
    pub export_table: std::result::Result<Arc<ExportTable>, &'static str>,
    /// Peers whose memory we may access directly.
    pub peers: DirectPeers,
    /// Copies between device memory of this process and of peers.
    copies: DeviceCopies,
    /// What kernels access by themselves.
    pub kernel_tables: KernelTables,
    /// A direct peer has disconnected.
    pub peer_lost: bool,
    /// Whether there is any direct peer; read by posters.
    pub has_peers: Arc<AtomicBool>,
}

/// Memory of a peer that is mapped here.
enum PeerMemory {
    Host(Arc<PeerMapping>),
    Device(Arc<ImportedMemory>),
    /// Not mapped: the kernel copies between the two processes.
    Process,
}

/// The result of an attempt at direct access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DirectOutcome {
    /// Executed completely.
    Done,
    /// The GPU executes it; [`Core::reap_copies`] completes it.
    Started,
    /// Incomplete: the quantum is spent, or the queue of copies is full.
    OutOfBudget,
    /// Packets of earlier work must be acknowledged first.
    WaitForOutstanding,
    /// Copies of earlier work must end first.
    WaitForCopies,
    /// It cannot be executed at all any more.
    Failed(qp::Status),
    /// To be sent as packets; the reason is counted if there is one.
    UsePackets(Option<IndirectReason>),
}

impl Mapped {
    pub(super) fn new(
        export_table: std::result::Result<Arc<ExportTable>, &'static str>,
        max_mappings: u32,
    ) -> Self {
        Self {
            export_table,
            peers: DirectPeers::new(max_mappings as usize),
            copies: DeviceCopies::default(),
            kernel_tables: KernelTables::default(),
            peer_lost: false,
            has_peers: Arc::default(),
        }
    }

    /// Executes or starts work of a queue pair that needs no packets. `budget` is how many bytes
    /// the CPU may still move.
    #[inline]
    pub(super) fn try_execute(
        &mut self,
        qpc: &mut QpContext,
        work: &WireWork,
        registry: &Registry,
        now: Instant,
        budget: &mut u32,
    ) -> DirectOutcome {
        if qpc.direct.in_flight > 0 && work.fence != Fence::None {
            return DirectOutcome::WaitForCopies;
        }
        if work.op == SendOp::Local
            && !qpc.direct.lists.is_empty()
            && let Some(outcome) = self.start_list(qpc, work, registry, now)
        {
            return outcome;
        }
        let outcome = self.peers.try_execute(qpc, work, registry, now, budget, &mut self.copies);
        if let Some(table) = &mut qpc.direct.kernel_table
            && std::mem::take(&mut table.has_new)
        {
            self.kernel_tables.schedule(now);
        }
        match outcome {
            DirectOutcome::UsePackets(_) if qpc.direct.in_flight > 0 => {
                DirectOutcome::WaitForCopies
            }
            outcome => outcome,
        }
    }

    /// Whether copies of the GPU are in flight.
    #[inline]
    pub(super) fn is_copying(&self) -> bool {
        self.copies.is_busy()
    }
}

/// What is left of posted work after one quantum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Remaining {
    Nothing,
    /// Work that the poster can execute.
    MoreQuanta,
    /// Packets, of a queue pair with little outstanding.
    Packets,
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
    max_rd_atomic: u8,
    /// The content of this queue pair's row, while it is open.
    published: Option<RowContent>,
    /// Index of the peer whose memory is accessible.
    pub direct_peer: Option<u32>,
    /// Why there is no `direct_peer`.
    why: &'static str,
    /// The generation of the peer's row that was validated, with its protection domain and access
    /// flags; 0 if none.
    generation: u64,
    pd: u64,
    remote_access: u64,
    /// Work that waits for outstanding packets, for copies or for the next quantum, and how many
    /// bytes of it are done.
    pub blocked: Option<WireWork>,
    pub done: u32,
    /// Consecutive operations sent as packets because earlier ones were still outstanding.
    consecutive_indirect: u32,
    /// Operations that the GPU executes.
    pub in_flight: u32,
    /// Lists that were posted and not started.
    lists: VecDeque<PostedList>,
    /// What its kernels access by themselves, if it has kernels.
    pub kernel_table: Option<Box<KernelTable>>,
    /// How often the queue pair was reset: copies of before are not its work any more.
    resets: u32,
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
            in_flight: 0,
            lists: VecDeque::new(),
            kernel_table: None,
            resets: 0,
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
        self.lists.clear();
        if let Some(table) = &self.kernel_table {
            table.close();
        }
        (self.in_flight, self.resets) = (0, self.resets.wrapping_add(1));
    }

    /// Whether work has been taken from the send queue that is neither done nor in the protocol.
    #[inline]
    fn is_busy(&self) -> bool {
        self.blocked.is_some() || self.in_flight > 0
    }

    /// A description for people: whether direct access is on, and why not.
    fn describe(&self, peers: &DirectPeers) -> String {
        match self.direct_peer.and_then(|at| peers.get(at)) {
            None => format!("direct access: off ({})", self.why),
            Some(direct_peer) if !direct_peer.peer.has_table() => {
                "direct access: off (the peer exports no memory)".to_owned()
            }
            Some(_) if self.generation == 0 => "direct access: on (not used yet)".to_owned(),
            Some(direct_peer) => direct_peer.describe(),
        }
    }
}

impl Core {
    /// Executes posted work that needs no packets, one quantum of it. Uses the time of the last
    /// step: what depends on the time is left to the next step.
    pub(super) fn execute_posted(&mut self, index: u32) -> Remaining {
        /// In a ping-pong, the ACK of the message before comes behind the reply. With more, a step
        /// sends them as one batch.
        const MAX_OUTSTANDING: u32 = 1;
        let Some(Some(qpc)) = self.qpcs.get(index as usize) else { return Remaining::NeedsEngine };
        if qpc.direct.direct_peer.is_none()
            || qpc.qp.state() != State::Rts
            || qpc.qp.outstanding() > MAX_OUTSTANDING
        {
            return Remaining::NeedsEngine;
        }
        let done = self.totals.direct_operations;
        self.service_qp(self.last_step, index);
        self.launch_copies();
        let Some(Some(qpc)) = self.qpcs.get_mut(index as usize) else {
            return Remaining::NeedsEngine;
        };
        qpc.qp_memory.ring.reset_missing();
        let is_empty = !qpc.active && qpc.wait.is_none() && !qpc.direct.is_busy();
        if qpc.direct.in_flight > 0 {
            return Remaining::NeedsEngine;
        }
        match self.totals.direct_operations != done {
            true if is_empty => Remaining::Nothing,
            true => Remaining::MoreQuanta,
            false if qpc.active => Remaining::Packets,
            false => Remaining::NeedsEngine,
        }
    }

    /// Completes work that was executed directly.
    #[inline]
    pub(super) fn complete_direct(&mut self, index: u32, work: &WireWork, bytes: u64) {
        let Some(Some(qpc)) = self.qpcs.get_mut(index as usize) else { return };
        self.totals.direct_operations += 1;
        self.totals.direct_bytes += bytes;
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
        self.mapped.peer_lost |=
            qpc.direct.direct_peer.is_some_and(|at| self.mapped.peers.is_gone(at));
    }

    /// Launches the copies that queue pairs have started.
    #[inline]
    pub(super) fn launch_copies(&mut self) {
        if self.mapped.copies.is_busy() {
            self.mapped.copies.launch(self.last_step);
        }
    }

    /// Completes work whose copies have ended.
    #[inline]
    pub(super) fn reap_copies(&mut self, now: Instant) {
        if self.mapped.copies.is_busy() {
            self.reap(now);
        }
    }

    #[inline(never)]
    fn reap(&mut self, now: Instant) {
        self.mapped.copies.poll(now);
        while let Some((posted, succeeded)) = self.mapped.copies.pop_ended() {
            let Some(Some(qpc)) = self.qpcs.get_mut(posted.index as usize) else { continue };
            // The slot may have another queue pair by now, or the same one begun anew.
            if (qpc.qp.number(), qpc.direct.resets) != (posted.qpn, posted.resets) {
                continue;
            }
            qpc.direct.in_flight -= 1;
            if qpc.direct.in_flight == 0 && (qpc.direct.blocked.is_some() || qpc.wait.is_some()) {
                self.doorbell_bitmap.ring(posted.index);
            }
            if succeeded {
                self.complete_direct(posted.index, &posted.work, posted.bytes);
            } else {
                qpc.fail_work(&posted.work, qp::Status::LocalProtection);
                self.activate(posted.index);
                self.post_process(now, posted.index);
            }
        }
    }
}

impl Engine {
    /// Asks the link for the peer whose memory a queue pair may access.
    pub(super) fn find_direct_peer(&mut self, index: u32) {
        let Core { qpcs, mapped, .. } = &mut self.core;
        let Some(Some(qpc)) = qpcs.get_mut(index as usize) else { return };
        if let Some(at) = qpc.direct.direct_peer.take() {
            mapped.peers.detach(at);
        }
        let found = match (&mapped.export_table, qpc.flow) {
            (Err(why), _) => Err(*why),
            (Ok(_), None) => Err("not connected"),
            (Ok(_), Some(flow)) => self.link.direct_peer(flow),
        };
        match found {
            Ok(peer) => {
                qpc.direct.direct_peer = Some(mapped.peers.attach(peer));
                mapped.has_peers.store(true, Ordering::Relaxed);
            }
            Err(why) => qpc.direct.why = why,
        }
    }

    /// The same for all queue pairs whose peer has disconnected.
    #[cold]
    pub(super) fn find_lost_direct_peers(&mut self) {
        self.core.mapped.peer_lost = false;
        for index in 0..self.core.qpcs.len() {
            let Some(Some(qpc)) = self.core.qpcs.get(index) else { continue };
            if qpc.direct.direct_peer.is_some_and(|at| self.core.mapped.peers.is_gone(at)) {
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
        path.why = format!("{}; {}", path.why, qpc.direct.describe(&self.core.mapped.peers));
        Ok(path)
    }

    /// Closes the rows of all queue pairs, and waits for copies in flight, and for kernels: peers
    /// that see this process disconnect take it that there are none.
    pub(super) fn end(&mut self) {
        let Core { qpcs, mapped, last_step, .. } = &mut self.core;
        for qpc in qpcs.iter_mut().flatten() {
            qpc.unpublish(mapped.export_table.as_ref().ok());
            if let Some(table) = qpc.direct.kernel_table.take() {
                mapped.kernel_tables.remove(qpc.index, *table, *last_step);
            }
        }
        mapped.copies.finish();
        mapped.kernel_tables.finish();
    }
}
