//! A peer whose memory is mapped: a cache of its keys, and the checks of an operation.

use std::cell::Cell;
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, Weak};
use std::time::Duration;

use warpwire_proto::Instant;
use warpwire_proto::qp::{self, SendOp, SendWr as WireWork, State};

use super::super::numbers::qp_row;
use super::super::qpc::QpContext;
use super::super::stats::IndirectReason;
use super::device_copies::{self, DeviceCopies, PostedWork, RemoteRange};
use super::device_window;
use super::host_memory::RemoteTarget;
use super::imported::{ImportState, ImportedMemory};
use super::kernel_table::{KernelRange, KernelTable};
use super::lists::UsedKey;
use super::process_memory::{self, ProcessTarget};
use super::rows::{FIRST_KEY_ROW, RemoteRows, address_words, decode_access, row_of};
use super::{DirectOutcome, DirectState, PeerMemory};
use crate::link::ShmPeer;
use crate::mr::{self, Access, AccessDenied, PeerMapping, Registry, Sharing};

/// From this length on, work waits until it can be executed directly.
const WAIT_THRESHOLD: u32 = 16 << 10;
/// Shorter work is sent as packets this many times in a row before it waits as well.
const MAX_CONSECUTIVE_INDIRECT: u32 = 16;
/// When an unanswered mapping request is repeated.
const MAPPING_REQUEST_RETRY: Duration = Duration::from_millis(20);

/// A peer's memory mapped here, weakly referenced: the keys that use it keep it mapped.
struct Memory {
    number: u64,
    writable: bool,
    mapped: WeakMemory,
}

enum WeakMemory {
    Host(Weak<PeerMapping>),
    Device(Weak<ImportedMemory>),
}

impl Memory {
    fn upgrade(&self) -> Option<PeerMemory> {
        match &self.mapped {
            WeakMemory::Host(mapped) => mapped.upgrade().map(PeerMemory::Host),
            WeakMemory::Device(mapped) => mapped.upgrade().map(PeerMemory::Device),
        }
    }
}

/// The cached row of a key.
pub(super) struct RemoteKey {
    pub key: u32,
    pub generation: u64,
    pd: u64,
    access: Access,
    iova: u64,
    len: u64,
    number: u64,
    /// Offset of the registration in that memory.
    start: u64,
    sharing: Sharing,
    /// When it was looked up first.
    since: Instant,
    /// When the peer was asked for its memory again, for another GPU.
    asked_again: Cell<Option<Instant>>,
    /// The epoch of its last use: see [`DirectPeer::epoch`].
    pub used: Cell<u64>,
    pub mapping: MappingState,
}

pub(super) enum MappingState {
    Mapped(PeerMemory),
    Requested(Instant),
    Refused,
}

/// A connection to a process whose memory can be mapped.
pub(in crate::hca) struct DirectPeer {
    pub peer: Arc<ShmPeer>,
    keys: Vec<Option<Box<RemoteKey>>>,
    /// The occupied indices of `keys`.
    known: Vec<u32>,
    /// The first key, from which the others are counted: see [`DirectPeer::key_slot`].
    first_key: u32,
    memories: Vec<Memory>,
    /// Why memory could not be mapped, the last time.
    refusal: Option<String>,
    /// A clock for uses of memory: it advances when memory has been mapped, on any peer.
    pub epoch: u64,
    /// Memory was mapped in this epoch.
    has_new: bool,
    users: u32,
    /// How many keys were left after the last sweep.
    swept: usize,
}

/// All peers, by index.
pub(in crate::hca) struct DirectPeers {
    peers: Vec<Option<DirectPeer>>,
    /// How many memories may be mapped.
    max_mappings: usize,
    epoch: u64,
}

impl DirectPeers {
    pub(super) fn new(max_mappings: usize) -> Self {
        Self { peers: Vec::new(), max_mappings, epoch: 0 }
    }

    pub(in crate::hca) fn get(&self, at: u32) -> Option<&DirectPeer> {
        self.peers.get(at as usize)?.as_ref()
    }

    /// The peer of a queue pair.
    pub(super) fn of(&mut self, qpc: &QpContext) -> Option<&mut DirectPeer> {
        let at = qpc.direct.direct_peer? as usize;
        if self.peers.get(at)?.as_ref()?.has_new {
            self.limit_mappings();
        }
        self.peers.get_mut(at)?.as_mut()
    }

    /// Begins an epoch. If too much is mapped, unmaps what was not used for the longest time, an
    /// eighth of the limit more than it must, so that this is seldom needed.
    #[cold]
    fn limit_mappings(&mut self) {
        self.epoch += 1;
        let mut count = 0;
        for direct_peer in self.peers.iter_mut().flatten() {
            (direct_peer.epoch, direct_peer.has_new) = (self.epoch, false);
            count += direct_peer.memories.len();
        }
        if count <= self.max_mappings {
            return;
        }
        let mut uses = Vec::new();
        for (at, direct_peer) in self.peers.iter().enumerate() {
            let known = direct_peer.iter().flat_map(DirectPeer::last_uses);
            uses.extend(known.map(|(number, epoch)| (epoch, at, number)));
        }
        uses.sort_unstable();
        let wanted = self.max_mappings - self.max_mappings / 8;
        uses.truncate(uses.len().saturating_sub(wanted));
        let mut unmapped = Vec::new();
        for (at, direct_peer) in self.peers.iter_mut().enumerate() {
            let numbers = uses.iter().filter(|(_, of, _)| *of == at).map(|(_, _, number)| *number);
            if let Some(direct_peer) = direct_peer {
                direct_peer.unmap(&numbers.collect(), &mut unmapped);
            }
        }
        tracing::debug!(unmapped = unmapped.len(), "more memory of peers than may be mapped");
        // The system and the driver may take their time.
        mr::run_on_pager(move || drop(unmapped));
    }

    /// Adds a user of this peer's memory; returns the peer's index.
    pub(in crate::hca) fn attach(&mut self, peer: Arc<ShmPeer>) -> u32 {
        let same = |known: &Option<DirectPeer>| {
            known.as_ref().is_some_and(|known| Arc::ptr_eq(&known.peer, &peer))
        };
        let at = self.peers.iter().position(same).unwrap_or_else(|| {
            let free = self.peers.iter().position(Option::is_none).unwrap_or(self.peers.len());
            if free == self.peers.len() {
                self.peers.push(None);
            }
            let (keys, known, memories) = (Vec::new(), Vec::new(), Vec::new());
            let (first_key, has_new, users, swept) = (0, false, 0, 0);
            let epoch = self.epoch;
            self.peers[free] = Some(DirectPeer {
                peer,
                keys,
                known,
                first_key,
                memories,
                refusal: None,
                epoch,
                has_new,
                users,
                swept,
            });
            free
        });
        if let Some(direct_peer) = &mut self.peers[at] {
            direct_peer.users += 1;
        }
        at as u32
    }

    /// Removes a user; with the last one the mappings go.
    pub(in crate::hca) fn detach(&mut self, at: u32) {
        if let Some(slot) = self.peers.get_mut(at as usize)
            && let Some(direct_peer) = slot
        {
            direct_peer.users -= 1;
            if direct_peer.users == 0 {
                *slot = None;
            }
        }
    }

    /// Unmaps memory whose registrations have ended.
    pub(in crate::hca) fn sweep(&mut self) {
        self.peers.iter_mut().flatten().for_each(DirectPeer::sweep);
    }

    pub(super) fn try_execute(
        &mut self,
        qpc: &mut QpContext,
        work: &WireWork,
        registry: &Registry,
        now: Instant,
        budget: &mut u32,
        copies: &mut DeviceCopies,
    ) -> DirectOutcome {
        let (remote, need) = match work.op {
            SendOp::Write(remote) => (remote, Access::REMOTE_WRITE),
            SendOp::Read(remote) => (remote, Access::REMOTE_READ),
            SendOp::Atomic(remote, _) => (remote, Access::REMOTE_ATOMIC),
            _ => return DirectOutcome::UsePackets(None),
        };
        let Some(direct_peer) = self.of(qpc) else { return DirectOutcome::UsePackets(None) };
        if work.len == 0 || qpc.qp.state() != State::Rts {
            return DirectOutcome::UsePackets(None);
        }
        let requested = Requested { remote, need, work };
        let outcome = direct_peer.try_execute(qpc, &requested, registry, now, budget, copies);
        outcome.unwrap_or_else(|why| DirectOutcome::UsePackets(Some(why)))
    }

    /// Whether the peer's connection has ended, so that the link should be asked for a new one.
    pub(in crate::hca) fn is_gone(&self, at: u32) -> bool {
        self.get(at).is_none_or(|direct_peer| direct_peer.peer.is_gone())
    }
}

/// The peer's memory that an operation accesses, and how.
struct Requested<'a> {
    remote: qp::Remote,
    need: Access,
    work: &'a WireWork,
}

impl DirectPeer {
    /// The index of a key in `keys`. The owner masks the indexes in its keys (`mr/keys.rs`), and
    /// the difference to another key cancels the mask: the table stays as small as theirs.
    #[inline]
    fn key_slot(&self, key: u32) -> usize {
        (key >> 8 ^ self.first_key >> 8) as usize
    }

    /// The cached row of a key.
    #[inline]
    pub(super) fn key(&self, key: u32) -> Option<&RemoteKey> {
        self.keys.get(self.key_slot(key))?.as_deref().filter(|known| known.key == key)
    }

    /// Checks that the peer's queue pair accepts requests which need this access; returns its row.
    #[inline]
    pub(super) fn check_qp(
        &mut self,
        qp: &qp::RcQp,
        direct: &mut DirectState,
        need: Access,
    ) -> Result<u32, IndirectReason> {
        if self.peer.is_gone() {
            return Err(IndirectReason::NoExports);
        }
        if self.peer.has_replies() {
            self.process_replies();
        }
        let row = qp_row(qp.destination());
        if direct.generation == 0 || direct.generation != self.peer.generation(row) {
            self.validate_remote_qp(qp, direct, row)?;
        }
        if direct.remote_access & u64::from(need.bits()) == 0
            || need != Access::REMOTE_WRITE && direct.max_rd_atomic == 0
        {
            return Err(IndirectReason::AccessDenied);
        }
        Ok(row)
    }

    /// The device memory of a key, the offset in it of the addresses that a list uses, and the
    /// generation of the key's row.
    pub(super) fn device_memory(
        &mut self,
        used: &UsedKey,
        pd: u64,
        need: Access,
        now: Instant,
    ) -> Result<(&Arc<ImportedMemory>, u64, u64), IndirectReason> {
        if self.key(used.key).is_none_or(|known| known.is_pending()) {
            return Err(self.resolve_key(used.key, now));
        }
        let known = self.key(used.key).ok_or(IndirectReason::KeyNotExported)?;
        let MappingState::Mapped(PeerMemory::Device(memory)) = &known.mapping else {
            return Err(IndirectReason::KeyNotExported);
        };
        if known.generation != self.peer.generation(FIRST_KEY_ROW + (used.key >> 8)) {
            return Err(IndirectReason::Revoked);
        }
        known.used.set(self.epoch);
        let offset = known.offset(pd, need, used.start, used.len())?;
        Ok((memory, offset, known.generation))
    }

    /// Executes the request, or a quantum of it.
    #[inline]
    fn try_execute(
        &mut self,
        qpc: &mut QpContext,
        requested: &Requested<'_>,
        registry: &Registry,
        now: Instant,
        budget: &mut u32,
        copies: &mut DeviceCopies,
    ) -> Result<DirectOutcome, IndirectReason> {
        let &Requested { remote, need, work } = requested;
        let len = work.len;
        let QpContext { qp, qp_memory, direct, .. } = qpc;
        let qp = qp.connection().ok_or(IndirectReason::QpNotReady)?;
        let row = self.check_qp(qp, direct, need)?;
        let known = match self.key(remote.rkey) {
            Some(known) if !known.is_pending() => known,
            _ => {
                let why = self.resolve_key(remote.rkey, now);
                return self.or_wait(why, requested, now);
            }
        };
        let MappingState::Mapped(memory) = &known.mapping else {
            return Err(IndirectReason::KeyNotExported);
        };
        known.used.set(self.epoch);
        let offset = known.offset(direct.pd, need, remote.address, len.into())?;
        if let (Some(table), PeerMemory::Device(memory)) = (&mut direct.kernel_table, memory) {
            table.add_local(qp_memory, work, registry);
            if !table.has_remote(remote.rkey) {
                let rows = RemoteRows::new(row, direct.generation, remote.rkey, known.generation);
                self.show_kernels(table, known, memory, rows, direct.remote_access);
                self.request_next(remote.rkey, now);
            }
        }
        let window = match memory {
            PeerMemory::Device(memory) => {
                if len < device_copies::MIN_COPY && memory.is_new() {
                    device_window::request(memory, qp_memory, work, registry);
                }
                memory.window().filter(|window| window.is_for(need, len))
            }
            _ => None,
        };
        if let Some(outcome) = self.must_wait(memory, window.is_some(), qp, direct, requested)? {
            return Ok(outcome);
        }
        let allowed = RemoteRows::new(row, direct.generation, remote.rkey, known.generation);
        let RemoteRows { rows, generations } = allowed;
        let outcome = match memory {
            PeerMemory::Device(memory) if window.is_none() => {
                let peer = &self.peer;
                let remote = RemoteRange { peer, rows: allowed, memory, offset };
                let (index, qpn, bytes) = (qpc.index, qp.number(), len.into());
                let posted = PostedWork { index, qpn, resets: direct.resets, work: *work, bytes };
                copies.start(&remote, posted, qp_memory, registry, direct)
            }
            _ if *budget == 0 => return Ok(DirectOutcome::OutOfBudget),
            memory => {
                // A short operation through a window is executed as a whole.
                let step = if window.is_some() { len } else { (len - direct.done).min(*budget) };
                match self.peer.begin_access(rows, generations, step.into()) {
                    None => Err(IndirectReason::Revoked),
                    Some(_guard) => {
                        let at = offset.saturating_add(direct.done.into());
                        let (done, peer) = (direct.done, &*self.peer);
                        *budget = budget.saturating_sub(step);
                        direct.done += step;
                        match (memory, window) {
                            (_, Some(window)) => window.execute(at, qp_memory, registry, work),
                            (PeerMemory::Host(memory), _) => RemoteTarget { memory, at }
                                .execute(qp_memory, registry, work, done, step),
                            _ => ProcessTarget { peer, address: at }
                                .execute(qp_memory, registry, work, done, step),
                        }
                        .map(|()| DirectOutcome::Done)
                        .map_err(|denied| match denied {
                            AccessDenied::NotResident => IndirectReason::KeyNotExported,
                            _ => IndirectReason::LocalMemory,
                        })
                    }
                }
            }
        };
        match outcome {
            Err(IndirectReason::Revoked) => {
                if self.peer.generation(rows[1]) != generations[1] {
                    self.evict_key(self.key_slot(remote.rkey));
                }
                Err(IndirectReason::Revoked)
            }
            Err(IndirectReason::KeyNotExported) => {
                // Not again: most such memory is that of a device.
                let at = self.key_slot(remote.rkey);
                if let Some(Some(known)) = self.keys.get_mut(at) {
                    let refused = std::mem::replace(&mut known.mapping, MappingState::Refused);
                    if let MappingState::Mapped(PeerMemory::Device(memory)) = refused
                        && let Some(why) = memory.failure()
                    {
                        self.refusal = Some(format!("device memory by packets: {}", why.reason()));
                    }
                }
                Err(IndirectReason::KeyNotExported)
            }
            Ok(DirectOutcome::Done) if direct.done < len => Ok(DirectOutcome::OutOfBudget),
            Ok(DirectOutcome::Done) => {
                direct.done = 0;
                Ok(DirectOutcome::Done)
            }
            Err(why) => self.or_wait(why, requested, now),
            outcome => outcome,
        }
    }

    /// Lets kernels of the queue pair access this memory by themselves, once it is opened on their
    /// GPU.
    #[cold]
    fn show_kernels(
        &self,
        table: &mut KernelTable,
        known: &RemoteKey,
        memory: &Arc<ImportedMemory>,
        rows: RemoteRows,
        remote_access: u64,
    ) {
        let Some(memory) = memory.on(table.device()) else { return };
        let ImportState::Opened(opened) = memory.open_on(table.device(), false) else { return };
        let Ok(region) = opened.region(known.start, known.len) else { return };
        let access = Access::from_bits_truncate(known.access.bits() & remote_access as u8);
        let range = KernelRange { key: known.key, access, iova: known.iova, region };
        table.add_remote(&self.peer, rows, memory, &range);
    }

    /// Whether work on this memory must wait for earlier work of the queue pair.
    #[inline]
    fn must_wait(
        &self,
        memory: &PeerMemory,
        by_window: bool,
        qp: &qp::RcQp,
        direct: &mut DirectState,
        requested: &Requested<'_>,
    ) -> Result<Option<DirectOutcome>, IndirectReason> {
        let (need, len) = (requested.need, requested.work.len);
        let min = match memory {
            PeerMemory::Host(_) => 0,
            PeerMemory::Device(_) if by_window => 0,
            PeerMemory::Device(_) => device_copies::MIN_COPY,
            PeerMemory::Process if self.peer.is_process_accessible() => process_memory::MIN_COPY,
            PeerMemory::Process => return Err(IndirectReason::KeyNotExported),
        };
        if len < min || min > 0 && need == Access::REMOTE_ATOMIC {
            return Err(IndirectReason::Small);
        }
        if direct.in_flight > 0 && (by_window || !matches!(memory, PeerMemory::Device(_))) {
            return Ok(Some(DirectOutcome::WaitForCopies));
        }
        if qp.outstanding() > 0 {
            let waits =
                len >= WAIT_THRESHOLD || direct.consecutive_indirect >= MAX_CONSECUTIVE_INDIRECT;
            direct.consecutive_indirect += 1;
            return match waits {
                true => Ok(Some(DirectOutcome::WaitForOutstanding)),
                false => Err(IndirectReason::Outstanding),
            };
        }
        direct.consecutive_indirect = 0;
        Ok(None)
    }

    /// Lets long work wait for device memory that is being opened.
    #[cold]
    fn or_wait(
        &self,
        why: IndirectReason,
        requested: &Requested<'_>,
        now: Instant,
    ) -> Result<DirectOutcome, IndirectReason> {
        self.request_next(requested.remote.rkey, now);
        let len = requested.work.len;
        let soon = self.key(requested.remote.rkey).is_some_and(|known| {
            known.sharing == Sharing::Device && now - known.since < device_copies::max_wait(len)
        });
        let long = len >= device_copies::MIN_WAIT;
        match why {
            IndirectReason::MappingRequested if soon && long => Ok(DirectOutcome::OutOfBudget),
            why => Err(why),
        }
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
        // A request that is repeated does not begin anew for those who wait.
        let since = match self.keys.get(at) {
            Some(Some(known)) if (known.key, known.generation) == (key, generation) => known.since,
            _ => now,
        };
        self.evict_key(at);
        let Some((generation, [number, pd, access, iova, len, memory, start])) = self.peer.row(row)
        else {
            return IndirectReason::KeyNotExported;
        };
        if number != u64::from(key) {
            return IndirectReason::KeyNotExported;
        }
        let Some((access, sharing)) = decode_access(access) else {
            return IndirectReason::KeyNotExported;
        };
        let writes = access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        let same = |known: &&Memory| known.number == memory && (known.writable || !writes);
        let mapped = self.memories.iter().filter(same).find_map(Memory::upgrade);
        let mapping = match mapped {
            _ if sharing == Sharing::Process => MappingState::Mapped(PeerMemory::Process),
            Some(mapped) => MappingState::Mapped(mapped),
            None => {
                self.peer.request_file(key, generation);
                MappingState::Requested(now)
            }
        };
        let known = RemoteKey {
            key,
            generation,
            pd,
            access,
            iova,
            len,
            number: memory,
            start,
            sharing,
            since,
            asked_again: Cell::new(None),
            used: Cell::new(self.epoch),
            mapping,
        };
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

    /// Asks the peer for memory again that another GPU of this process needs as well.
    #[cold]
    pub(super) fn request_next(&self, key: u32, now: Instant) {
        if let Some(known) = self.key(key)
            && let MappingState::Mapped(PeerMemory::Device(memory)) = &known.mapping
            && memory.wants_next()
            && known.asked_again.get().is_none_or(|when| now - when >= MAPPING_REQUEST_RETRY)
        {
            known.asked_again.set(Some(now));
            self.peer.request_file(key, known.generation);
        }
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
            if let MappingState::Mapped(PeerMemory::Device(memory)) = &known.mapping {
                match ImportedMemory::new(reply.files) {
                    Ok(next) => memory.add_next(next),
                    Err(why) => tracing::debug!(%why, "cannot map a peer's memory on another GPU"),
                }
                continue;
            }
            let writable = known.access.intersects(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
            let mapped = match known.sharing {
                Sharing::Device => ImportedMemory::new(reply.files).map(|memory| {
                    let memory = Arc::new(memory);
                    (WeakMemory::Device(Arc::downgrade(&memory)), PeerMemory::Device(memory))
                }),
                _ => PeerMapping::open(reply.files, writable).map(|memory| {
                    let memory = Arc::new(memory);
                    (WeakMemory::Host(Arc::downgrade(&memory)), PeerMemory::Host(memory))
                }),
            };
            known.mapping = match mapped {
                Ok((mapped, memory)) => {
                    // All of a device's memory is writable for those who can map it.
                    let writable = writable || known.sharing == Sharing::Device;
                    self.memories.retain(|known| known.upgrade().is_some());
                    self.memories.push(Memory { number: known.number, writable, mapped });
                    self.has_new = true;
                    known.used.set(self.epoch);
                    MappingState::Mapped(memory)
                }
                Err(why) => {
                    tracing::debug!(%why, "cannot map a peer's memory; packets are used");
                    self.refusal = Some(format!("memory by packets: {}", why.reason()));
                    MappingState::Refused
                }
            };
        }
    }

    /// A description for people: what of the peer is mapped.
    pub(super) fn describe(&self) -> String {
        let (mut host, mut device, mut windows, mut handle_types) = (0, 0, 0, Vec::new());
        for memory in self.memories.iter().filter_map(Memory::upgrade) {
            match memory {
                PeerMemory::Host(_) | PeerMemory::Process => host += 1,
                PeerMemory::Device(memory) if memory.failure().is_none() => {
                    device += 1;
                    windows += u32::from(memory.window().is_some());
                    if !handle_types.contains(&memory.handle_type()) {
                        handle_types.push(memory.handle_type());
                    }
                }
                // The next work that uses it notes why.
                PeerMemory::Device(_) => {}
            }
        }
        let refusal = self.refusal.as_ref().map_or_else(String::new, |why| format!("; {why}"));
        let on_device = match device {
            0 => String::new(),
            count => {
                let by = handle_types.join(", ");
                let short = if windows > 0 { "the CPU" } else { "packets" };
                format!(", of device memory: {count} by {by}, short operations by {short}")
            }
        };
        let by_kernel = match self.peer.is_process_accessible() {
            true => "",
            false => "; memory without a file by packets: the kernel does not copy it",
        };
        format!(
            "direct access: on (peer mappings: {}{on_device}){refusal}{by_kernel}",
            host + device
        )
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

    /// The mapped memories, and the epochs in which they were last used.
    fn last_uses(&self) -> HashMap<u64, u64> {
        let mut uses = HashMap::new();
        for key in self.known.iter().filter_map(|at| self.keys[*at as usize].as_deref()) {
            if key.is_mapped_here() {
                let last = uses.entry(key.number).or_default();
                *last = key.used.get().max(*last);
            }
        }
        uses
    }

    /// Forgets these memories with their keys; what the keys held is added to `unmapped`.
    fn unmap(&mut self, numbers: &HashSet<u64>, unmapped: &mut Vec<PeerMemory>) {
        let Self { keys, known, memories, .. } = self;
        memories.retain(|known| known.upgrade().is_some() && !numbers.contains(&known.number));
        known.retain(|at| {
            let slot = &mut keys[*at as usize];
            match slot.take() {
                Some(key) if key.is_mapped_here() && numbers.contains(&key.number) => {
                    if let MappingState::Mapped(memory) = key.mapping {
                        unmapped.push(memory);
                    }
                    false
                }
                key => {
                    *slot = key;
                    true
                }
            }
        });
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
    /// Whether its memory has been requested, or must be.
    #[inline]
    fn is_pending(&self) -> bool {
        !matches!(self.mapping, MappingState::Mapped(_))
    }

    /// Whether it keeps memory mapped.
    fn is_mapped_here(&self) -> bool {
        matches!(self.mapping, MappingState::Mapped(PeerMemory::Host(_) | PeerMemory::Device(_)))
    }

    /// The offset of a range in the memory, if the key permits the access.
    #[inline]
    pub(super) fn offset(
        &self,
        pd: u64,
        need: Access,
        address: u64,
        len: u64,
    ) -> Result<u64, IndirectReason> {
        if self.pd != pd || !self.access.contains(need) {
            return Err(IndirectReason::AccessDenied);
        }
        let offset = address.wrapping_sub(self.iova);
        if address < self.iova || offset > self.len || len > self.len - offset {
            return Err(IndirectReason::AccessDenied);
        }
        // The owner's row is not trusted: the access itself checks the offset against the mapping.
        Ok(self.start.saturating_add(offset))
    }
}
