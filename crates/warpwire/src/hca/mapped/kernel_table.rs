//! Memory that running kernels access by themselves: a table that a kernel queue pair's handle
//! refers to, with the peer's memory that is mapped on the kernels' GPU, and the local memory that
//! they use with it.
//!
//! The engine adds an entry when it has executed work of a kernel on that memory; from then on
//! kernels load and store there, and post nothing. `warpwire/detail/direct.cuh` is the kernels'
//! side.
//!
//! # Revocation
//! A kernel announces its access in the entry ([`layout::USERS`]) and then checks the entry's tag;
//! the CPU clears the tag and then reads who is left. Both have a full fence between the two, so
//! one of them sees the other. For the peer's memory the engine holds an access to its rows as long
//! as an entry is open or in use, and closes the entry when a row has been closed: the owner waits
//! for that as for any other access. Local memory is revoked by the thread that ends it
//! ([`KernelUse`]).

use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::sync::{Arc, Weak};
use std::time::Duration;

use parking_lot::Mutex;
use warpwire_proto::Instant;
use warpwire_proto::qp::{SendWr as WireWork, State};

use super::super::engine::Core;
use super::super::memory::QueueMemory;
use super::super::qpc::QpMemory;
use super::imported::ImportedMemory;
use super::rows::RemoteRows;
use crate::error::Result;
use crate::link::{DeviceAccess, ShmPeer};
use crate::mem::{Device, Region};
use crate::mr::{Access, KernelUse, Registry};
use layout::{SLOTS, slot_of};

/// The layout of the table; `struct DirectTable` of `warpwire/detail/direct.cuh`.
pub(crate) mod layout {
    /// Entries of remote memory, followed by as many of local memory.
    pub(crate) const SLOTS: u64 = 32;
    /// Size of an entry in bytes.
    pub(crate) const ENTRY_LEN: u64 = 64;
    /// Offset of the number of work requests that kernels executed by themselves.
    pub(crate) const OPERATIONS: u64 = 2 * SLOTS * ENTRY_LEN;
    /// Size of the table in bytes.
    pub(crate) const LEN: u64 = OPERATIONS + 128;

    /// Offsets in an entry. `key << 32 | number << 8 | access flags`; 0 while it is closed. The
    /// number is another each time.
    pub(crate) const TAG: u64 = 0;
    /// Threads that access the memory, or are about to check whether they may.
    pub(crate) const USERS: u64 = 8;
    /// The first address of the registration, as work requests name it.
    pub(crate) const IOVA: u64 = 16;
    /// Its length in bytes.
    pub(crate) const LENGTH: u64 = 24;
    /// Where it is for this GPU.
    pub(crate) const ADDRESS: u64 = 32;

    /// The slot of a key among those of its kind.
    pub(crate) fn slot_of(key: u32) -> u64 {
        (key as u64 >> 8) % SLOTS
    }
}

/// How often the rows of entries are checked: the owner of memory that ends waits so long.
const CHECK_INTERVAL: Duration = Duration::from_micros(200);
/// How long the entries of a queue pair that was destroyed are waited for: kernels that did not end
/// before that have failed.
const DRAIN_LIMIT: Duration = Duration::from_secs(10);
/// How long closing the device waits for them.
const FINISH_LIMIT: Duration = Duration::from_secs(2);

/// A registration as kernels access it.
pub(super) struct KernelRange {
    pub key: u32,
    pub access: Access,
    pub iova: u64,
    /// Where it is; the whole registration.
    pub region: Region,
}

/// The table of one queue pair.
pub(in crate::hca) struct KernelTable {
    memory: QueueMemory,
    device: Device,
    /// Those of remote memory, then those of local memory.
    slots: [Option<Slot>; 2 * SLOTS as usize],
    /// Distinguishes the entries of a slot.
    opened: u32,
    /// Entries were added since [`KernelTables::schedule`] was told.
    pub has_new: bool,
}

struct Slot {
    key: u32,
    entry: Arc<Entry>,
    /// For memory of the peer: the access to its rows, and what keeps it mapped.
    lease: Option<(DeviceAccess, Arc<ImportedMemory>)>,
}

/// One entry, from when it is opened until no kernel uses it.
struct Entry {
    memory: QueueMemory,
    at: u64,
    /// Its tag has been cleared.
    closed: AtomicBool,
    /// Held while the tag is stored, so that nobody takes an entry for closed before it is.
    closing: Mutex<()>,
    /// It was seen closed and unused: its slot may belong to another entry now.
    ended: AtomicBool,
}

impl std::fmt::Debug for KernelTable {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "KernelTable({} entries)", self.slots.iter().flatten().count())
    }
}

impl Entry {
    /// An entry for a slot that nobody uses; kernels do not see it yet.
    fn new(memory: &QueueMemory, slot: u64) -> Arc<Self> {
        Arc::new(Self {
            memory: memory.clone(),
            at: slot * layout::ENTRY_LEN,
            closed: AtomicBool::new(false),
            closing: Mutex::new(()),
            ended: AtomicBool::new(false),
        })
    }

    /// Shows it to kernels, unless it was closed meanwhile.
    fn open(&self, number: u32, range: &KernelRange) {
        let _closing = self.closing.lock();
        if self.is_closed() {
            return;
        }
        self.store(layout::IOVA, range.iova);
        self.store(layout::LENGTH, range.region.len());
        self.store(layout::ADDRESS, range.region.address().raw());
        // Also for write-combining memory.
        fence(Ordering::SeqCst);
        let (key, number) = (u64::from(range.key) << 32, u64::from(number & 0xff_ffff) << 8);
        self.store(layout::TAG, key | number | u64::from(range.access.bits()));
    }

    fn store(&self, field: u64, value: u64) {
        // In memory without room for it, kernels find nothing.
        let _ = self.memory.bytes().store_u64(self.at + field, value);
    }

    fn close(&self) {
        let _closing = self.closing.lock();
        if !self.is_closed() {
            self.store(layout::TAG, 0);
            self.closed.store(true, Ordering::Release);
        }
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }
}

impl KernelUse for Entry {
    fn revoke(&self) -> bool {
        if self.ended.load(Ordering::Acquire) {
            return true;
        }
        self.close();
        fence(Ordering::SeqCst);
        let users = self.memory.bytes().load_u64(self.at + layout::USERS);
        let unused = users.is_ok_and(|users| users == 0);
        if unused {
            self.ended.store(true, Ordering::Release);
        }
        unused
    }
}

impl KernelTable {
    pub(in crate::hca) fn new(memory: QueueMemory, device: Device) -> Self {
        let slots = [const { None }; 2 * SLOTS as usize];
        Self { memory, device, slots, opened: 0, has_new: false }
    }

    /// Closes the entries of an earlier table in this memory; `false` if kernels still use one:
    /// the next user of its slot could not be told from them.
    pub(in crate::hca) fn clear(memory: &QueueMemory) -> Result<bool> {
        let bytes = memory.bytes();
        let entries = (0..2 * SLOTS).map(|slot| slot * layout::ENTRY_LEN);
        for at in entries.clone() {
            bytes.store_u64(at + layout::TAG, 0)?;
        }
        fence(Ordering::SeqCst);
        for at in entries {
            if bytes.load_u64(at + layout::USERS)? != 0 {
                return Ok(false);
            }
        }
        Ok(true)
    }

    pub(super) fn device(&self) -> &Device {
        &self.device
    }

    /// Whether this memory of the peer has an entry.
    #[inline]
    pub(super) fn has_remote(&self, key: u32) -> bool {
        self.has(slot_of(key), key)
    }

    #[inline]
    fn has(&self, slot: u64, key: u32) -> bool {
        let known = self.slots[slot as usize].as_ref();
        known.is_some_and(|known| known.key == key && !known.entry.is_closed())
    }

    /// Lets kernels access memory of the peer, as long as these rows are open.
    #[cold]
    pub(super) fn add_remote(
        &mut self,
        peer: &Arc<ShmPeer>,
        rows: RemoteRows,
        memory: &Arc<ImportedMemory>,
        range: &KernelRange,
    ) {
        let slot = slot_of(range.key);
        if !self.is_free(slot) {
            return;
        }
        let RemoteRows { rows, generations } = rows;
        let Some(lease) = peer.begin_device_access(rows, generations) else { return };
        self.opened = self.opened.wrapping_add(1);
        let entry = Entry::new(&self.memory, slot);
        entry.open(self.opened, range);
        self.has_new = true;
        let lease = Some((lease, memory.clone()));
        self.slots[slot as usize] = Some(Slot { key: range.key, entry, lease });
    }

    /// Lets kernels access the local memory of a work request, if it is one range of device memory.
    #[inline]
    pub(super) fn add_local(&mut self, qp_memory: &QpMemory, work: &WireWork, registry: &Registry) {
        let Some(data) = qp_memory.wr_state(work.id).single_sge else { return };
        if !self.has(SLOTS + slot_of(data.lkey), data.lkey) {
            self.open_local(qp_memory, data.lkey, (data.address, data.len.into()), registry);
        }
    }

    #[cold]
    fn open_local(
        &mut self,
        qp_memory: &QpMemory,
        key: u32,
        (address, len): (u64, u64),
        registry: &Registry,
    ) {
        let slot = SLOTS + slot_of(key);
        if !self.is_free(slot) {
            return;
        }
        let Ok(span) = registry.resolve(key, qp_memory.pd, Access::NONE, address, len) else {
            return;
        };
        let Some((access, iova, region)) = span.kernel_range() else { return };
        if *region.allocation().device() != self.device {
            return;
        }
        let entry = Entry::new(&self.memory, slot);
        // Before kernels see it: from now on it is revoked with the memory.
        let weak: Weak<Entry> = Arc::downgrade(&entry);
        if !span.add_kernel_use(weak) {
            return;
        }
        self.opened = self.opened.wrapping_add(1);
        entry.open(self.opened, &KernelRange { key, access, iova, region });
        self.has_new = true;
        self.slots[slot as usize] = Some(Slot { key, entry, lease: None });
    }

    /// Whether a slot can be used; frees one that is no longer used.
    fn is_free(&mut self, slot: u64) -> bool {
        let slot = &mut self.slots[slot as usize];
        if slot.as_ref().is_some_and(Slot::has_ended) {
            *slot = None;
        }
        slot.is_none()
    }

    /// Closes all entries.
    pub(super) fn close(&self) {
        self.slots.iter().flatten().for_each(|slot| slot.entry.close());
    }

    /// Closes the entries whose memory the peer has taken back, and ends what no kernel uses.
    fn check(&mut self, is_connected: bool) {
        for slot in &mut self.slots {
            let Some(known) = slot else { continue };
            let is_open = known.lease.as_ref().is_none_or(|(lease, _)| lease.is_open());
            if !is_connected || !is_open {
                known.entry.close();
            }
            if known.has_ended() {
                *slot = None;
            }
        }
    }

    fn is_empty(&self) -> bool {
        self.slots.iter().all(Option::is_none)
    }
}

impl Slot {
    /// Whether it is closed, and no kernel uses it.
    fn has_ended(&self) -> bool {
        self.entry.is_closed() && self.entry.revoke()
    }
}

/// The tables of an engine.
pub(in crate::hca) struct KernelTables {
    /// Queue pairs with a table.
    users: Vec<u32>,
    /// Tables of queue pairs that are gone, and when they are given up.
    draining: Vec<(KernelTable, Instant)>,
    /// [`Instant::NEVER`] while all tables are empty.
    next_check: Instant,
}

impl Default for KernelTables {
    fn default() -> Self {
        Self { users: Vec::new(), draining: Vec::new(), next_check: Instant::NEVER }
    }
}

impl KernelTables {
    pub(in crate::hca) fn add(&mut self, index: u32) {
        self.users.push(index);
    }

    /// Closes the table of a queue pair that is destroyed.
    pub(in crate::hca) fn remove(&mut self, index: u32, table: KernelTable, now: Instant) {
        self.users.retain(|user| *user != index);
        table.close();
        self.draining.push((table, now + DRAIN_LIMIT));
        self.next_check = now;
    }

    /// Notes that a table has entries.
    pub(super) fn schedule(&mut self, now: Instant) {
        self.next_check = self.next_check.min(now + CHECK_INTERVAL);
    }

    /// Waits until kernels use none of the tables of queue pairs that are gone, for a limited time.
    pub(super) fn finish(&mut self) {
        let deadline = std::time::Instant::now() + FINISH_LIMIT;
        let mut backoff = crate::sync::Backoff::default();
        while !self.draining.is_empty() && std::time::Instant::now() < deadline {
            self.draining.retain_mut(|(table, _)| {
                table.check(false);
                !table.is_empty()
            });
            backoff.snooze();
        }
    }

    /// When the tables must be looked at again.
    pub(in crate::hca) fn deadline(&self) -> Instant {
        self.next_check
    }
}

impl Core {
    /// Revokes what peers have taken back.
    #[inline]
    pub(in crate::hca) fn check_kernel_tables(&mut self, now: Instant) {
        if self.mapped.kernel_tables.next_check <= now {
            self.check_tables(now);
        }
    }

    #[inline(never)]
    fn check_tables(&mut self, now: Instant) {
        let Self { mapped, qpcs, .. } = self;
        let tables = &mut mapped.kernel_tables;
        let mut is_empty = true;
        for index in &tables.users {
            let Some(Some(qpc)) = qpcs.get_mut(*index as usize) else { continue };
            let is_connected = qpc.qp.state() == State::Rts;
            if let Some(table) = &mut qpc.direct.kernel_table {
                table.check(is_connected);
                is_empty &= table.is_empty();
            }
        }
        tables.draining.retain_mut(|(table, until)| {
            table.check(false);
            !table.is_empty() && now < *until
        });
        is_empty &= tables.draining.is_empty();
        tables.next_check = if is_empty { Instant::NEVER } else { now + CHECK_INTERVAL };
    }
}
