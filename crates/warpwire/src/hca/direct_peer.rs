//! A peer whose memory is mapped: a cache of its keys, and operations on it. See
//! [`direct`](super::direct).

use std::sync::{Arc, Weak};
use std::time::Duration;

use warpwire_proto::Instant;
use warpwire_proto::qp::{self, Atomic, SendOp, SendWr as WireWork, State};

use super::direct::{DirectState, FIRST_KEY_ROW, FastWrite, address_words, row_of};
use super::numbers::qp_row;
use super::qpc::{QpContext, QpMemory};
use super::stats::IndirectReason;
use crate::link::ShmPeer;
use crate::mem::SharedBytes;
use crate::mlx5::DataSegment;
use crate::mr::{Access, AccessDenied, PdId, PeerMapping, Registry};

/// From this length on, work waits until it can be executed directly.
const WAIT_THRESHOLD: u32 = 16 << 10;
/// Shorter work is sent as packets this many times in a row before it waits as well.
const MAX_CONSECUTIVE_INDIRECT: u32 = 16;
/// When an unanswered mapping request is repeated.
const MAPPING_REQUEST_RETRY: Duration = Duration::from_millis(20);

/// A peer's memory mapped here, weakly referenced: the keys that use it keep it mapped.
pub(super) struct Memory {
    number: u64,
    writable: bool,
    mapped: Weak<PeerMapping>,
}

impl Memory {
    pub(super) fn is_alive(&self) -> bool {
        self.mapped.strong_count() > 0
    }
}

/// The cached row of a key.
struct RemoteKey {
    key: u32,
    generation: u64,
    pd: u64,
    access: Access,
    iova: u64,
    len: u64,
    number: u64,
    /// Offset of the registration in that memory.
    start: u64,
    mapping: MappingState,
}

enum MappingState {
    Mapped(Arc<PeerMapping>),
    Requested(Instant),
    Refused,
}

/// A connection to a process whose memory can be mapped.
pub(super) struct DirectPeer {
    pub peer: Arc<ShmPeer>,
    keys: Vec<Option<Box<RemoteKey>>>,
    /// The occupied indices of `keys`.
    known: Vec<u32>,
    /// The first key, from which the others are counted: see [`DirectPeer::key_slot`].
    first_key: u32,
    pub memories: Vec<Memory>,
    users: u32,
    /// How many keys were left after the last sweep.
    swept: usize,
}

/// All peers, by index.
#[derive(Default)]
pub(super) struct DirectPeers(Vec<Option<DirectPeer>>);

impl DirectPeers {
    pub(super) fn get(&self, at: u32) -> Option<&DirectPeer> {
        self.0.get(at as usize)?.as_ref()
    }

    /// Adds a user of this peer's memory; returns the peer's index.
    pub(super) fn attach(&mut self, peer: Arc<ShmPeer>) -> u32 {
        let same = |known: &Option<DirectPeer>| {
            known.as_ref().is_some_and(|known| Arc::ptr_eq(&known.peer, &peer))
        };
        let at = self.0.iter().position(same).unwrap_or_else(|| {
            let free = self.0.iter().position(Option::is_none).unwrap_or(self.0.len());
            if free == self.0.len() {
                self.0.push(None);
            }
            let (keys, known, memories) = (Vec::new(), Vec::new(), Vec::new());
            self.0[free] =
                Some(DirectPeer { peer, keys, known, first_key: 0, memories, users: 0, swept: 0 });
            free
        });
        if let Some(direct_peer) = &mut self.0[at] {
            direct_peer.users += 1;
        }
        at as u32
    }

    /// Removes a user; with the last one the mappings go.
    pub(super) fn detach(&mut self, at: u32) {
        if let Some(slot) = self.0.get_mut(at as usize)
            && let Some(direct_peer) = slot
        {
            direct_peer.users -= 1;
            if direct_peer.users == 0 {
                *slot = None;
            }
        }
    }

    /// Unmaps memory whose registrations have ended.
    pub(super) fn sweep(&mut self) {
        self.0.iter_mut().flatten().for_each(DirectPeer::sweep);
    }

    pub(super) fn try_execute(
        &mut self,
        qpc: &mut QpContext,
        work: &WireWork,
        registry: &Registry,
        now: Instant,
        budget: &mut u32,
    ) -> DirectOutcome {
        let Some(at) = qpc.direct.direct_peer else { return DirectOutcome::UsePackets(None) };
        let (remote, need) = match work.op {
            SendOp::Write(remote) => (remote, Access::REMOTE_WRITE),
            SendOp::Read(remote) => (remote, Access::REMOTE_READ),
            SendOp::Atomic(remote, _) => (remote, Access::REMOTE_ATOMIC),
            _ => return DirectOutcome::UsePackets(None),
        };
        let Some(Some(direct_peer)) = self.0.get_mut(at as usize) else {
            return DirectOutcome::UsePackets(None);
        };
        if work.len == 0 || qpc.qp.state() != State::Rts {
            return DirectOutcome::UsePackets(None);
        }
        let requested = Requested { remote, need, len: work.len };
        let outcome = direct_peer.try_execute(
            qpc,
            &requested,
            now,
            budget,
            |target, qp_memory, from, len| target.execute(qp_memory, registry, work, from, len),
        );
        outcome.unwrap_or_else(|why| DirectOutcome::UsePackets(Some(why)))
    }

    /// Executes a write without a WQE, all of it, to the queue pair with that row. Only the fast
    /// path: whatever differs from the last time is left to [`DirectPeers::try_execute`].
    #[inline]
    pub(super) fn try_write(
        &mut self,
        direct: &mut DirectState,
        row: u32,
        write: &FastWrite<'_>,
        len: u32,
        pd: PdId,
        registry: &Registry,
    ) -> bool {
        let need = Access::REMOTE_WRITE;
        let at = direct.direct_peer.and_then(|at| self.0.get(at as usize));
        let Some(Some(direct_peer)) = at else { return false };
        let peer = &*direct_peer.peer;
        if peer.has_replies() || direct.remote_access & u64::from(need.bits()) == 0 {
            return false;
        }
        let slot = direct_peer.key_slot(write.remote.rkey);
        let Some(Some(known)) = direct_peer.keys.get(slot) else { return false };
        let MappingState::Mapped(memory) = &known.mapping else { return false };
        if known.key != write.remote.rkey {
            return false;
        }
        let Ok(at) = known.offset(direct.pd, need, write.remote.address, len) else { return false };
        let Some(peer_bytes) = memory.bytes(true) else { return false };
        let rows = [row, FIRST_KEY_ROW + (known.key >> 8)];
        let Some(guard) =
            peer.begin_access(rows, [direct.generation, known.generation], len.into())
        else {
            return false;
        };
        let moved = match write.payload {
            DataSegment::Inline(bytes) => peer_bytes.write_cached(at, bytes).is_ok(),
            segment => RemoteTarget { memory, at }
                .put(&peer_bytes, at, segment, 0, len, pd, registry)
                .is_ok(),
        };
        drop(guard);
        write.prefetch_hint.take(&write.remote, peer_bytes.address().wrapping_add(at));
        direct.consecutive_indirect = 0;
        moved
    }

    /// Whether the peer's connection has ended, so that the link should be asked for a new one.
    pub(super) fn is_gone(&self, at: u32) -> bool {
        self.get(at).is_none_or(|direct_peer| direct_peer.peer.is_gone())
    }
}

/// The peer's memory that an operation accesses, and how.
struct Requested {
    remote: qp::Remote,
    need: Access,
    len: u32,
}

/// The result of an attempt at direct access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DirectOutcome {
    /// Executed completely.
    Done,
    /// Incomplete: the quantum is spent.
    OutOfBudget,
    /// Packets of earlier work must be acknowledged first.
    WaitForOutstanding,
    /// To be sent as packets; the reason is counted if there is one.
    UsePackets(Option<IndirectReason>),
}

impl DirectPeer {
    /// The index of a key in `keys`. The owner masks the indexes in its keys (`mr/keys.rs`), and
    /// the difference to another key cancels the mask: the table stays as small as theirs.
    #[inline]
    fn key_slot(&self, key: u32) -> usize {
        (key >> 8 ^ self.first_key >> 8) as usize
    }

    /// Executes the request, or a quantum of it, by `execute`, which gets the target, the first
    /// byte and the length.
    #[inline]
    fn try_execute(
        &mut self,
        qpc: &mut QpContext,
        requested: &Requested,
        now: Instant,
        budget: &mut u32,
        execute: impl FnOnce(&RemoteTarget<'_>, &mut QpMemory, u32, u32) -> Result<(), AccessDenied>,
    ) -> Result<DirectOutcome, IndirectReason> {
        let &Requested { remote, need, len } = requested;
        if self.peer.has_replies() {
            self.process_replies();
        }
        let QpContext { qp, qp_memory, direct, .. } = qpc;
        let qp = qp.connection().ok_or(IndirectReason::QpNotReady)?;
        let row = qp_row(qp.destination());
        if direct.generation == 0 || direct.generation != self.peer.generation(row) {
            self.validate_remote_qp(qp, direct, row)?;
        }
        if direct.remote_access & u64::from(need.bits()) == 0
            || need != Access::REMOTE_WRITE && direct.max_rd_atomic == 0
        {
            return Err(IndirectReason::AccessDenied);
        }
        let at = self.key_slot(remote.rkey);
        let known = match self.keys.get(at) {
            Some(Some(known)) if known.key == remote.rkey => known,
            _ => return Err(self.resolve_key(remote.rkey, now)),
        };
        let MappingState::Mapped(memory) = &known.mapping else {
            return Err(self.resolve_key(remote.rkey, now));
        };
        let offset = known.offset(direct.pd, need, remote.address, len)?;
        if qp.outstanding() > 0 {
            let waits =
                len >= WAIT_THRESHOLD || direct.consecutive_indirect >= MAX_CONSECUTIVE_INDIRECT;
            direct.consecutive_indirect += 1;
            return if waits {
                Ok(DirectOutcome::WaitForOutstanding)
            } else {
                Err(IndirectReason::Outstanding)
            };
        }
        direct.consecutive_indirect = 0;
        if *budget == 0 {
            return Ok(DirectOutcome::OutOfBudget);
        }
        let step = (len - direct.done).min(*budget);
        let rows = [row, FIRST_KEY_ROW + (remote.rkey >> 8)];
        let generations = [direct.generation, known.generation];
        let Some(guard) = self.peer.begin_access(rows, generations, step.into()) else {
            if self.peer.generation(rows[1]) != generations[1] {
                self.evict_key(at);
            }
            return Err(IndirectReason::Revoked);
        };
        let target = RemoteTarget { memory, at: offset.saturating_add(direct.done.into()) };
        let moved = execute(&target, qp_memory, direct.done, step);
        drop(guard);
        moved.map_err(|_| IndirectReason::LocalMemory)?;
        *budget -= step;
        direct.done += step;
        if direct.done < len {
            return Ok(DirectOutcome::OutOfBudget);
        }
        direct.done = 0;
        Ok(DirectOutcome::Done)
    }

    /// Checks that the peer's queue pair is connected to ours and accepts requests.
    #[cold]
    fn validate_remote_qp(
        &self,
        local: &qp::RcQp,
        direct: &mut DirectState,
        row: u32,
    ) -> Result<(), IndirectReason> {
        direct.generation = 0;
        if self.peer.is_gone() || !self.peer.has_table() {
            return Err(IndirectReason::NoExports);
        }
        let (generation, [qpns, remote_access, pd, a, b, c, _]) =
            self.peer.row(row).ok_or(IndirectReason::QpNotReady)?;
        let right = u64::from(local.destination()) << 32 | u64::from(local.number());
        if qpns != right || [a, b, c] != address_words(self.peer.from()) {
            return Err(IndirectReason::QpNotReady);
        }
        (direct.generation, direct.pd, direct.remote_access) = (generation, pd, remote_access);
        Ok(())
    }

    /// Looks a key up in the peer's table, and requests its memory if that is not mapped yet.
    #[cold]
    fn resolve_key(&mut self, key: u32, now: Instant) -> IndirectReason {
        let Some(row) = row_of(key) else { return IndirectReason::KeyNotExported };
        if self.known.is_empty() {
            self.first_key = key;
        }
        let at = self.key_slot(key);
        let generation = self.peer.generation(row);
        if let Some(Some(known)) = self.keys.get(at)
            && (known.key, known.generation) == (key, generation)
        {
            match known.mapping {
                MappingState::Requested(when) if now - when < MAPPING_REQUEST_RETRY => {
                    return IndirectReason::MappingRequested;
                }
                MappingState::Refused => return IndirectReason::KeyNotExported,
                _ => {}
            }
        }
        self.evict_key(at);
        let Some((generation, [number, pd, access, iova, len, memory, start])) = self.peer.row(row)
        else {
            return IndirectReason::KeyNotExported;
        };
        if number != u64::from(key) {
            return IndirectReason::KeyNotExported;
        }
        let access = Access::from_bits_truncate(access as u8);
        let writes = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        let same = |known: &&Memory| known.number == memory && (known.writable || !writes);
        let mapped = self.memories.iter().filter(same).find_map(|known| known.mapped.upgrade());
        let mapping = match mapped {
            Some(mapped) => MappingState::Mapped(mapped),
            None => {
                self.peer.request_file(key, generation);
                MappingState::Requested(now)
            }
        };
        let known =
            RemoteKey { key, generation, pd, access, iova, len, number: memory, start, mapping };
        if self.keys.len() <= at {
            self.keys.resize_with(at + 1, || None);
        }
        self.keys[at] = Some(Box::new(known));
        self.known.push(at as u32);
        if self.known.len() > 2 * self.swept + 64 {
            self.sweep();
        }
        // The next operation uses it.
        IndirectReason::MappingRequested
    }

    /// Processes the replies to mapping requests.
    #[cold]
    fn process_replies(&mut self) {
        for reply in self.peer.take_replies() {
            let at = self.key_slot(reply.key);
            let Some(Some(known)) = self.keys.get_mut(at) else { continue };
            if (known.key, known.generation) != (reply.key, reply.word) {
                continue;
            }
            let writable = known.access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
            let mapped = reply.file.and_then(|file| match PeerMapping::open(file, writable) {
                Ok(mapped) => Some(Arc::new(mapped)),
                Err(why) => {
                    tracing::debug!(%why, "cannot map a peer's memory; packets are used");
                    None
                }
            });
            known.mapping = match mapped {
                Some(mapped) => {
                    let number = known.number;
                    self.memories.retain(Memory::is_alive);
                    let mapped_weakly = Arc::downgrade(&mapped);
                    self.memories.push(Memory { number, writable, mapped: mapped_weakly });
                    MappingState::Mapped(mapped)
                }
                None => MappingState::Refused,
            };
        }
    }

    /// Removes a revoked key.
    #[cold]
    fn evict_key(&mut self, at: usize) {
        if let Some(slot) = self.keys.get_mut(at)
            && slot.take().is_some()
        {
            self.known.retain(|known| *known as usize != at);
        }
    }

    /// Removes revoked keys; memory that no other key uses is unmapped.
    fn sweep(&mut self) {
        let Self { peer, keys, known, swept, .. } = self;
        known.retain(|at| {
            let slot = &mut keys[*at as usize];
            let holds = slot.as_ref().is_some_and(|key| {
                !peer.is_gone() && key.generation == peer.generation(FIRST_KEY_ROW + (key.key >> 8))
            });
            if !holds {
                *slot = None;
            }
            holds
        });
        *swept = known.len();
    }
}

impl RemoteKey {
    /// The offset of a range in the memory, if the key permits the access.
    #[inline]
    fn offset(&self, pd: u64, need: Access, address: u64, len: u32) -> Result<u64, IndirectReason> {
        if self.pd != pd || !self.access.contains(need) {
            return Err(IndirectReason::AccessDenied);
        }
        let offset = address.wrapping_sub(self.iova);
        if address < self.iova || offset > self.len || u64::from(len) > self.len - offset {
            return Err(IndirectReason::AccessDenied);
        }
        // The owner's row is not trusted: the access itself checks the offset against the mapping.
        Ok(self.start.saturating_add(offset))
    }
}

/// The memory of a peer that an operation accesses.
struct RemoteTarget<'a> {
    memory: &'a PeerMapping,
    at: u64,
}

impl RemoteTarget<'_> {
    /// Executes `len` bytes of work, from byte `from` of its payload on.
    #[inline]
    fn execute(
        &self,
        qp_memory: &mut QpMemory,
        registry: &Registry,
        work: &WireWork,
        from: u32,
        len: u32,
    ) -> Result<(), AccessDenied> {
        match work.op {
            SendOp::Write(_) => self.write(qp_memory, registry, work.id, from, len),
            SendOp::Read(_) => self.read(qp_memory, registry, work.id, from, len),
            SendOp::Atomic(_, atomic) => self.execute_atomic(qp_memory, registry, work.id, atomic),
            _ => Err(AccessDenied::Range),
        }
    }

    #[inline]
    fn write(
        &self,
        qp_memory: &QpMemory,
        registry: &Registry,
        wqe_index: u64,
        from: u32,
        len: u32,
    ) -> Result<(), AccessDenied> {
        let peer_bytes = self.memory.bytes(true).ok_or(AccessDenied::Rights)?;
        let mut at = self.at;
        qp_memory.data_segments(wqe_index, from, len, |segment, skip, len| {
            let to = at;
            at = at.saturating_add(len.into());
            self.put(&peer_bytes, to, segment, skip, len, qp_memory.pd, registry)
        })
    }

    /// Writes `len` bytes of a segment, from byte `skip` on, to the peer's memory.
    #[allow(clippy::too_many_arguments)] // source and destination
    #[inline]
    fn put(
        &self,
        peer_bytes: &SharedBytes<'_>,
        to: u64,
        segment: DataSegment<'_>,
        skip: u32,
        len: u32,
        pd: PdId,
        registry: &Registry,
    ) -> Result<(), AccessDenied> {
        match segment {
            DataSegment::Inline(bytes) => {
                let part = bytes.get(skip as usize..(skip + len) as usize);
                peer_bytes
                    .write_cached(to, part.ok_or(AccessDenied::Range)?)
                    .map_err(|_| AccessDenied::Range)
            }
            DataSegment::Memory(data) => {
                let address = data.address.wrapping_add(u64::from(skip));
                let local = LocalRange { key: data.lkey, pd, need: Access::NONE, address, len };
                local.with(registry, |local| peer_bytes.copy_cached(to, &local, 0, len.into()))
            }
        }
    }

    #[inline]
    fn read(
        &self,
        qp_memory: &QpMemory,
        registry: &Registry,
        wqe_index: u64,
        from: u32,
        len: u32,
    ) -> Result<(), AccessDenied> {
        let peer_bytes = self.memory.bytes(false).ok_or(AccessDenied::Rights)?;
        let mut at = self.at;
        qp_memory.data_segments(wqe_index, from, len, |segment, skip, len| {
            let DataSegment::Memory(data) = segment else { return Err(AccessDenied::Range) };
            let source = at;
            at = at.saturating_add(len.into());
            let address = data.address.wrapping_add(u64::from(skip));
            let need = Access::LOCAL_WRITE;
            let local = LocalRange { key: data.lkey, pd: qp_memory.pd, need, address, len };
            local.with(registry, |local| local.copy_cached(0, &peer_bytes, source, len.into()))
        })
    }

    fn execute_atomic(
        &self,
        qp_memory: &QpMemory,
        registry: &Registry,
        wqe_index: u64,
        atomic: Atomic,
    ) -> Result<(), AccessDenied> {
        let width = atomic.width().bytes();
        // One writable range for the result, checked before: nothing may fail once the word has
        // changed.
        let data = qp_memory.wr_state(wqe_index).single_sge.ok_or(AccessDenied::Range)?;
        if data.len < width {
            return Err(AccessDenied::Range);
        }
        let (key, address) = (data.lkey, data.address);
        let local =
            LocalRange { key, pd: qp_memory.pd, need: Access::LOCAL_WRITE, address, len: width };
        let mut outcome = Ok(());
        local.with(registry, |local| {
            outcome = self.memory.atomic(self.at, &atomic).map(|old| {
                // As in the protocol, a four-byte result is big-endian.
                let placed = match width {
                    4 => local.write(0, &(old as u32).to_be_bytes()),
                    _ => local.write(0, &old.to_ne_bytes()),
                };
                debug_assert!(placed.is_ok());
            });
            Ok(())
        })?;
        outcome
    }
}

/// A range of local memory that a WQE names.
struct LocalRange {
    key: u32,
    pd: PdId,
    need: Access,
    address: u64,
    len: u32,
}

impl LocalRange {
    /// Passes its bytes to `then`; fails unless it is host memory.
    #[inline]
    fn with(
        &self,
        registry: &Registry,
        then: impl FnOnce(SharedBytes<'_>) -> crate::error::Result<()>,
    ) -> Result<(), AccessDenied> {
        let span = registry.resolve(self.key, self.pd, self.need, self.address, self.len.into())?;
        let bytes = span.host_bytes().ok_or(AccessDenied::Failed)?;
        then(bytes).map_err(|_| AccessDenied::Range)
    }
}
