//! Registered device memory: one copier per allocation, revoked when the memory is moved or freed.
//!
//! Where the memory's owner reports moves and frees, the slot is closed before they happen. Where
//! it does not, as with another library's CUDA memory, each use compares CUDA's buffer ids with
//! those at registration.

use std::os::fd::OwnedFd;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, memfd_create};

use super::atomics;
use super::deferred_writes::WriteBehind;
use super::denied::AccessDenied;
use super::export::{self, ExportObserver};
use super::kernel_use::KernelUse;
use super::memory::{AccessPath, DeviceAccess};
use super::on_demand::{OdpCounters, OdpStats, count};
use super::pager;
use super::revocable_slot::RevocableSlot;
use crate::error::{Error, Kind, Result};
use crate::mem::copy::{Copier, CopyDirection, CopyMethod, CopyPlan, StagingOptions};
use crate::mem::{
    Allocation, BackingAllocation, CancelCheck, CopyTicket, MappingType, MemoryEvent, MemoryKind,
    MemoryListener, WatchGuard, Window,
};
use crate::mlx5::Atomic;
use crate::sync::Backoff;

// Labels of the revocable slot.
const READY: u32 = 0;
const MOVING: u32 = 1;
const GONE: u32 = 2;
const BROKEN: u32 = 3;
const ABSENT: u32 = 4;

/// How long a free waits for copies that this process's GPU executes.
const FREE_LIMIT: Duration = Duration::from_secs(2);

/// The device memory of a registry with staged writes that have not been flushed.
#[derive(Default)]
pub(super) struct PendingWrites {
    /// There are writes to flush.
    dirty: AtomicBool,
    /// How often writes were lost. A counter and no flag, because every engine of a device must
    /// learn of a loss.
    losses: AtomicU64,
    /// Held during a flush, so that concurrent flushes wait for it. The data path does not take it.
    flush_lock: Mutex<()>,
    memories: Mutex<Vec<Arc<DeviceMemory>>>,
}

impl PendingWrites {
    /// Blocks until all staged writes have reached the memory. Returns how often writes were lost
    /// since the registry was created.
    #[inline]
    pub(super) fn flush_staged(&self) -> u64 {
        self.wait();
        self.losses.load(Ordering::Acquire)
    }

    /// Blocks until all staged writes have reached the memory. A loss is reported by the next
    /// `flush_staged`.
    #[inline]
    pub(super) fn wait(&self) {
        if self.dirty.load(Ordering::Acquire) {
            self.flush_all();
        }
    }

    fn add(&self, memory: Arc<DeviceMemory>) {
        self.memories.lock().push(memory);
        self.dirty.store(true, Ordering::Release);
    }

    fn record_loss(&self) {
        self.losses.fetch_add(1, Ordering::AcqRel);
    }

    #[inline(never)]
    fn flush_all(&self) {
        let _exclusive = self.flush_lock.lock();
        let taken = std::mem::take(&mut *self.memories.lock());
        // A failure does not keep the others from being flushed.
        for memory in &taken {
            // Never cancelled: this thread holds no span that a revocation could wait for.
            let _ = memory.flush_staged(&|| false);
        }
        // Cleared only now, so that concurrent callers wait for the lock.
        let memories = self.memories.lock();
        self.dirty.store(!memories.is_empty(), Ordering::Release);
    }
}

/// A device allocation, shared by all its registrations with the same options.
pub(super) struct DeviceMemory {
    allocation: Allocation,
    device_access: DeviceAccess,
    staging: StagingOptions,
    revocable_slot: RevocableSlot<Arc<Copier>>,
    move_state: Mutex<MoveState>,
    failure: Mutex<Option<Error>>,
    /// Whether the window is write-combining, so that `publish` needs a store fence.
    write_combining: AtomicBool,
    /// Staged writes, if the memory has no window; decided when it is first mapped.
    deferred_writes: OnceLock<Option<Mutex<WriteBehind>>>,
    has_deferred_writes: AtomicBool,
    pending_writes: Arc<PendingWrites>,
    /// Buffer ids at registration, where frees are not reported; otherwise empty.
    backing_allocations: Box<[BackingAllocation]>,
    /// A remap is queued on the pager.
    remap_requested: AtomicBool,
    /// An access found the memory not mapped, and none has succeeded since.
    was_absent: AtomicBool,
    counts: OdpCounters,
    /// Peers on this machine that may map it.
    exported: Mutex<Exported>,
    /// Batches of copies that this process's GPU executes and that access it.
    copies: Mutex<Vec<CopyTicket>>,
    /// Kernels that access it by themselves.
    kernel_uses: Mutex<Vec<Weak<dyn KernelUse>>>,
    /// For jobs on the pager and for listeners.
    weak_self: Weak<Self>,
}

/// How local peers know the memory.
struct Exported {
    /// Identifies the memory at its present location, among all that this process exports.
    id: u64,
    /// Registrations that peers may access directly.
    keys: Vec<(u32, Arc<dyn ExportObserver>)>,
}

#[derive(Default)]
struct MoveState {
    /// Generation counter, incremented by each event: a copier created in an older generation is
    /// stale.
    events: u64,
    moving: bool,
    gone: bool,
    /// `None` if frees are not reported; then `watch_error` has the reason.
    watch: Option<WatchGuard>,
    watch_error: Option<Error>,
}

impl DeviceMemory {
    pub(super) fn open(
        allocation: &Allocation,
        device_access: &DeviceAccess,
        pending_writes: &Arc<PendingWrites>,
    ) -> Result<Arc<Self>> {
        let backing_allocations = match device_access.window_only {
            true => Box::default(),
            false => allocation.backing_allocations()?.into(),
        };
        let staging = match device_access.staging {
            Some(staging) => staging.check().map(|()| staging),
            None => StagingOptions::from_env(),
        }?;
        let memory = Arc::new_cyclic(|weak_self| Self {
            allocation: allocation.clone(),
            device_access: device_access.clone(),
            staging,
            revocable_slot: RevocableSlot::closed(if device_access.on_demand {
                ABSENT
            } else {
                READY
            }),
            move_state: Mutex::default(),
            failure: Mutex::default(),
            write_combining: AtomicBool::new(false),
            deferred_writes: OnceLock::new(),
            has_deferred_writes: AtomicBool::new(false),
            pending_writes: pending_writes.clone(),
            backing_allocations,
            remap_requested: AtomicBool::new(false),
            was_absent: AtomicBool::new(false),
            counts: OdpCounters::default(),
            exported: Mutex::new(Exported { id: export::next_id(), keys: Vec::new() }),
            copies: Mutex::default(),
            kernel_uses: Mutex::default(),
            weak_self: weak_self.clone(),
        });
        // Weak, because the memory owns the watch, which owns the listener.
        let weak = memory.weak_self.clone();
        let listener: MemoryListener = Arc::new(move |event| {
            if let Some(memory) = weak.upgrade() {
                memory.on_memory_event(event);
            }
        });
        let watch = allocation.watch(listener);
        {
            let mut move_state = memory.move_state.lock();
            match watch {
                Ok(watch) => move_state.watch = Some(watch),
                Err(error) if *error.kind() == Kind::Unsupported => {
                    move_state.watch_error = Some(error)
                }
                Err(error) => return Err(error),
            }
        }
        // The watch reports later frees only; a read detects an earlier one.
        allocation.read(0, &mut [0])?;
        if !device_access.on_demand {
            memory.remap()?;
        }
        Ok(memory)
    }

    pub(super) fn is_same_memory(
        &self,
        allocation: &Allocation,
        device_access: &DeviceAccess,
    ) -> bool {
        let same = self.allocation.address() == allocation.address()
            && self.allocation.len() == allocation.len()
            && self.allocation.kind() == allocation.kind()
            && self.allocation.device() == allocation.device();
        // Without mapping the memory: a registration may never be used.
        let is_there = || match self.revocable_slot.peek() {
            (_, true) => self.check(0, self.allocation.len()).is_ok(),
            (label, false) => label != BROKEN && !self.move_state.lock().gone,
        };
        same && self.device_access.is_same(device_access) && is_there()
    }

    /// Handles a move or a free, on the thread that performs it.
    fn on_memory_event(&self, event: MemoryEvent) {
        {
            let mut move_state = self.move_state.lock();
            move_state.events += 1;
            move_state.moving = event == MemoryEvent::Moving;
            move_state.gone |= event == MemoryEvent::Freed;
        }
        match event {
            // When this returns, no thread and no peer accesses the old location.
            MemoryEvent::Moving => {
                count(&self.counts.lost);
                drop(self.revocable_slot.close(MOVING));
                self.close_exports();
                if !self.revoke_kernel_uses(FREE_LIMIT) {
                    tracing::warn!("memory moves while kernels that do not end access it");
                }
            }
            MemoryEvent::Freed => {
                drop(self.revocable_slot.close(GONE));
                self.close_exports();
                // A copy of freed memory is an error that ends all work of the GPU's context.
                if !self.wait_for_copies(FREE_LIMIT) {
                    tracing::warn!("memory was freed while copies that do not end access it");
                }
            }
            MemoryEvent::Moved if self.device_access.on_demand => {
                drop(self.revocable_slot.close(ABSENT));
                // A waiting queue pair retries periodically, and the memory may move more often
                // than that, so it is mapped in advance.
                if self.was_absent.load(Ordering::Relaxed) {
                    self.request_remap();
                }
            }
            MemoryEvent::Moved => self.remap_or_fail(),
        }
    }

    /// Lets peers map the memory for this registration, if it may be accessed in place. `open` is
    /// called with the id of the memory; no move or free happens meanwhile.
    pub(super) fn export(
        &self,
        key: u32,
        observer: &Arc<dyn ExportObserver>,
        open: impl FnOnce(u64),
    ) {
        if !self.is_in_place() {
            return;
        }
        let mut exported = self.exported.lock();
        let has_moved = self.has_moved();
        if !has_moved {
            exported.keys.push((key, observer.clone()));
            open(exported.id);
        }
    }

    /// Whether the memory is being moved, or gone.
    fn has_moved(&self) -> bool {
        let move_state = self.move_state.lock();
        move_state.moving || move_state.gone
    }

    /// Forgets a registration that has ended.
    pub(super) fn end_export(&self, key: u32) {
        self.exported.lock().keys.retain(|(known, _)| *known != key);
    }

    /// Excludes peers from the present location: they use packets from then on.
    fn close_exports(&self) {
        let mut exported = self.exported.lock();
        exported.id = export::next_id();
        let keys = std::mem::take(&mut exported.keys);
        keys.iter().for_each(|(key, observer)| observer.closing(*key));
        let limit = export::PEER_ACCESS_LIMIT;
        if !keys.iter().all(|(key, observer)| observer.wait_until_unused(*key, limit)) {
            tracing::warn!(
                "a peer that does not run is accessing device memory that moves or ends"
            );
        }
    }

    /// Whether a GPU's copies may access it where it is: it is neither staged nor paged.
    pub(super) fn is_in_place(&self) -> bool {
        let DeviceAccess { no_window, staged, window_only, on_demand, agent, .. } =
            &self.device_access;
        let is_plain = !no_window && !staged && !window_only && !on_demand && agent.is_none();
        is_plain && !self.is_staged()
    }

    /// The files with which a peer maps it: one with its handle, then the handle's descriptors.
    pub(super) fn shared_files(&self) -> Vec<OwnedFd> {
        let share = || {
            let handle = self.allocation.export_ipc()?.to_bytes();
            let descriptors = self.allocation.ipc_descriptors()?;
            let name = "warpwire device memory";
            let file = memfd_create(name, MemfdFlags::CLOEXEC)
                .and_then(|file| rustix::io::write(&file, &handle).map(|_| file))
                .map_err(|error| Error::os("export device memory", &error.into()))?;
            Ok::<_, Error>(std::iter::once(file).chain(descriptors).collect::<Vec<_>>())
        };
        if !self.is_in_place() {
            return Vec::new();
        }
        share().unwrap_or_else(|why| {
            tracing::debug!(%why, "peers cannot map device memory; packets are used");
            Vec::new()
        })
    }

    /// Notes that a batch of copies accesses the memory. The caller holds a guard of the
    /// registration, so that its end, and the end of the memory, wait for the batch.
    pub(super) fn add_copies(&self, ticket: &CopyTicket) {
        let mut copies = self.copies.lock();
        if copies.last().is_some_and(|last| last.is_same(ticket)) {
            return;
        }
        copies.retain(|ticket| !ticket.is_done());
        copies.push(ticket.clone());
    }

    /// Notes that kernels access the memory by themselves. The caller holds a guard of the
    /// registration. `false` if the memory moves or is gone.
    pub(super) fn add_kernel_use(&self, kernel_use: Weak<dyn KernelUse>) -> bool {
        let mut uses = self.kernel_uses.lock();
        // A move that begins now finds the use in the list.
        let has_moved = self.has_moved();
        if !has_moved {
            uses.retain(|known| known.strong_count() > 0);
            uses.push(kernel_use);
        }
        !has_moved
    }

    /// Lets kernels no longer access the memory; `false` if one still does after `limit`.
    fn revoke_kernel_uses(&self, limit: Duration) -> bool {
        let is_used = |known: &Weak<dyn KernelUse>| {
            known.upgrade().is_some_and(|kernel_use| !kernel_use.revoke())
        };
        // A copy: others may wait for the same ones.
        let mut left = self.kernel_uses.lock().clone();
        let (deadline, mut backoff) = (Instant::now() + limit, Backoff::default());
        loop {
            left.retain(is_used);
            if left.is_empty() || Instant::now() >= deadline {
                break;
            }
            backoff.snooze();
        }
        self.kernel_uses.lock().retain(is_used);
        left.is_empty()
    }

    /// Waits for the batches and kernels that access the memory; `false` if one has not ended after
    /// `limit`.
    pub(super) fn wait_for_copies(&self, limit: Duration) -> bool {
        let by_kernels = self.revoke_kernel_uses(limit);
        let copies = self.copies.lock().clone();
        let (deadline, mut backoff) = (Instant::now() + limit, Backoff::default());
        let ended = copies.iter().all(|ticket| {
            while !ticket.is_done() && Instant::now() < deadline {
                backoff.snooze();
            }
            ticket.has_ended()
        });
        self.copies.lock().retain(|ticket| !ticket.is_done());
        ended && by_kernels
    }

    /// Maps the memory at its current location, and records an error if that fails.
    fn remap_or_fail(&self) {
        if let Err(error) = self.remap() {
            count(&self.counts.refused);
            // After a transient failure the next use retries.
            self.revocable_slot.close(if error.is_transient() { ABSENT } else { BROKEN });
            self.record_failure(error);
        }
        // Last, so that retries meanwhile queue no second remap. If the memory has moved again, the
        // next use requests one.
        self.remap_requested.store(false, Ordering::Release);
    }

    /// Queues a remap on the pager thread, unless one is queued.
    #[cold]
    fn request_remap(&self) {
        if self.remap_requested.swap(true, Ordering::AcqRel) {
            return;
        }
        if self.revocable_slot.peek().1 {
            // Mapped since the caller looked.
            self.remap_requested.store(false, Ordering::Release);
            return;
        }
        count(&self.counts.faults);
        let weak_self = self.weak_self.clone();
        pager::submit(move || {
            if let Some(memory) = weak_self.upgrade() {
                memory.remap_or_fail();
            }
        });
    }

    /// Maps the memory now, if it is on demand and not mapped.
    pub(super) fn prefetch(&self) -> Result<()> {
        if self.revocable_slot.peek() == (ABSENT, false) {
            count(&self.counts.prefetched);
            self.remap()?;
        }
        Ok(())
    }

    pub(super) fn prefetch_later(&self) {
        if self.revocable_slot.peek() == (ABSENT, false) {
            self.request_remap();
        }
    }

    pub(super) fn faults(&self) -> OdpStats {
        self.counts.get()
    }

    /// Creates a copier and opens the slot with it, unless the memory is being moved or was freed.
    fn remap(&self) -> Result<()> {
        loop {
            let seen = {
                let move_state = self.move_state.lock();
                if move_state.gone || move_state.moving {
                    return Ok(());
                }
                move_state.events
            };
            // Without the lock: this may wait for device work, which may be what moves the memory.
            let copier = self.copier()?;
            let move_state = self.move_state.lock();
            if move_state.events == seen {
                let mapping = self.window(&copier).map(Window::mapping);
                let write_combining = mapping == Some(MappingType::WriteCombining);
                let staged =
                    self.device_access.staged || !self.device_access.no_window && mapping.is_none();
                let deferred_writes =
                    || staged.then(|| Mutex::new(WriteBehind::new(&self.allocation, self.staging)));
                self.deferred_writes.get_or_init(deferred_writes);
                self.write_combining.store(write_combining, Ordering::Relaxed);
                // An open slot already has a copier for the same location.
                let _ = self.revocable_slot.open(READY, Arc::new(copier));
                return Ok(());
            }
        }
    }

    fn copier(&self) -> Result<Copier> {
        let plan = match self.device_access.no_window {
            _ if self.device_access.window_only => {
                Arc::new(CopyPlan::with_thresholds(u64::MAX, u64::MAX))
            }
            true if self.device_access.staged => {
                Arc::new(CopyPlan::with_thresholds(0, 0).with_min_staged_read(self.staging.reads))
            }
            true => Arc::new(CopyPlan::with_thresholds(0, 0)),
            false => CopyPlan::for_device(self.allocation.device())?,
        };
        let copier = Copier::with(&self.allocation, plan, self.device_access.agent.clone())?;
        if let (true, Err(error)) = (self.device_access.window_only, copier.window()) {
            return Err(error.clone().during("register memory for access through a window only"));
        }
        Ok(copier.with_staging(self.staging))
    }

    /// Checks that the range is accessible now.
    #[inline]
    pub(super) fn check(&self, at: u64, len: u64) -> std::result::Result<(), AccessDenied> {
        match self.revocable_slot.peek() {
            (_, true) if self.backing_allocations.is_empty() => Ok(()),
            (_, true) => self.check_buffer_ids(at, len),
            (label, false) => Err(self.closed_reason(label)),
        }
    }

    /// Checks that the range is still the same allocation, for memory whose frees are not reported.
    fn check_buffer_ids(&self, at: u64, len: u64) -> std::result::Result<(), AccessDenied> {
        let touched = |backing: &&BackingAllocation| {
            backing.offset < at + len && at < backing.offset + backing.len
        };
        for backing in self.backing_allocations.iter().filter(touched) {
            match self.allocation.buffer_id(backing.offset) {
                Ok(Some(id)) if id == backing.id => {}
                // The driver could not answer: retry later.
                Err(error) if error.is_transient() => return Err(AccessDenied::NotResident),
                Err(error) if *error.kind() == Kind::DeviceLost => {
                    return Err(self.record_failure(error));
                }
                Ok(_) | Err(_) => {
                    self.on_memory_event(MemoryEvent::Freed);
                    return Err(AccessDenied::Gone);
                }
            }
        }
        Ok(())
    }

    /// The access path, and why no better one is used.
    pub(super) fn path(&self) -> (AccessPath, Vec<String>) {
        let mut why = Vec::new();
        let borrowed = self.allocation.kind() == MemoryKind::Borrowed;
        if let (Some(watch_error), true) = (&self.move_state.lock().watch_error, borrowed) {
            why.push(match self.backing_allocations.is_empty() {
                true => format!("frees by its owner are not detected: {watch_error}"),
                false => format!("frees by its owner are detected at the next use: {watch_error}"),
            });
        }
        if let Err(error) = self.prefetch() {
            why.push(error.to_string());
        }
        let Ok(copier) = self.revocable_slot.enter(|_| true) else {
            why.push("the memory is being moved, or was freed".to_owned());
            return (AccessPath::Engine, why);
        };
        if let Some(window) = self.window(&copier) {
            let refused = window.rejected_paths().iter();
            why.extend(refused.map(|r| format!("not by {}: {}", r.path, r.why)));
            return (AccessPath::Window(window.path()), why);
        }
        match copier.window() {
            Ok(_) => why.push("no window: it was registered without one".to_owned()),
            Err(error) => why.push(format!("no window: {error}")),
        }
        (if self.is_staged() { AccessPath::Staged } else { AccessPath::Engine }, why)
    }

    /// Whether writes are staged through pinned memory.
    #[inline]
    pub(super) fn is_staged(&self) -> bool {
        self.deferred_writes().is_some()
    }

    #[inline]
    fn deferred_writes(&self) -> Option<&Mutex<WriteBehind>> {
        self.deferred_writes.get()?.as_ref()
    }

    /// The window, if there is one and the registration may use it.
    fn window<'a>(&self, copier: &'a Copier) -> Option<&'a Window> {
        copier.window().ok().filter(|_| !self.device_access.no_window)
    }

    /// Copies from the memory. Here and below, `cancelled` is polled while waiting for the device,
    /// and ends the wait.
    pub(super) fn read(
        &self,
        at: u64,
        into: &mut [u8],
        cancelled: CancelCheck<'_>,
    ) -> std::result::Result<(), AccessDenied> {
        let len = into.len() as u64;
        self.flush_staged(cancelled)?;
        self.with_copier(CopyDirection::Read, len, |copier| {
            copier.read_or_cancel(at, into, cancelled)
        })
    }

    /// Whether the copy engine is the fastest way to read `len` bytes.
    pub(super) fn reads_by_engine(&self, len: u64) -> bool {
        let DeviceAccess { window_only, on_demand, agent, .. } = &self.device_access;
        if *window_only || *on_demand || agent.is_some() {
            return false;
        }
        let Ok(copier) = self.revocable_slot.enter(|_| true) else { return false };
        match copier.method(CopyDirection::Read, len) {
            CopyMethod::Staged => true,
            CopyMethod::Engine => !self.is_staged(),
            CopyMethod::Window | CopyMethod::Threads | CopyMethod::Agent => false,
        }
    }

    /// Precedes a read by the copy engine.
    pub(super) fn begin_read(
        &self,
        cancelled: CancelCheck<'_>,
    ) -> std::result::Result<(), AccessDenied> {
        self.flush_staged(cancelled)?;
        drop(self.revocable_slot.enter(|_| true).map_err(|(label, _)| self.closed_reason(label))?);
        self.clear_absent();
        Ok(())
    }

    pub(super) fn write(
        &self,
        at: u64,
        from: &[u8],
        cancelled: CancelCheck<'_>,
    ) -> std::result::Result<(), AccessDenied> {
        if let Some(deferred_writes) = self.deferred_writes() {
            return self.write_behind(deferred_writes, at, from, cancelled);
        }
        self.with_copier(CopyDirection::Write, from.len() as u64, |copier| copier.write(at, from))
    }

    /// Buffers a write. The engine copies to the device address, which a move does not change.
    fn write_behind(
        &self,
        deferred_writes: &Mutex<WriteBehind>,
        at: u64,
        from: &[u8],
        cancelled: CancelCheck<'_>,
    ) -> std::result::Result<(), AccessDenied> {
        drop(self.revocable_slot.enter(|_| true).map_err(|(label, _)| self.closed_reason(label))?);
        self.clear_absent();
        let written = deferred_writes.lock().write(at, from, cancelled);
        if !self.has_deferred_writes.swap(true, Ordering::AcqRel)
            && let Some(memory) = self.weak_self.upgrade()
        {
            self.pending_writes.add(memory);
        }
        written.map_err(|error| self.record_failure(error))
    }

    /// Blocks until all staged writes have reached the memory. Writes to memory that was then freed
    /// are lost with it, which is not an error; what is lost to a device failure is reported by
    /// [`PendingWrites::flush_staged`].
    fn flush_staged(&self, cancelled: CancelCheck<'_>) -> std::result::Result<(), AccessDenied> {
        let Some(deferred_writes) = self.deferred_writes() else { return Ok(()) };
        if !self.has_deferred_writes.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut deferred_writes = deferred_writes.lock();
        let flushed = deferred_writes.flush(cancelled);
        if flushed.is_err() && cancelled() {
            // The outcome is unknown: the next flush that is not cancelled determines it.
            return Err(AccessDenied::Gone);
        }
        // Only after the flush: other threads rely on it.
        self.has_deferred_writes.store(false, Ordering::Release);
        let denied = flushed.map_err(|error| self.record_failure(error));
        if denied.is_err_and(|denied| denied != AccessDenied::Gone) {
            self.pending_writes.record_loss();
        }
        Ok(())
    }

    /// Flushes staged writes after a registration was revoked, because the memory may be about to
    /// be freed. If it is freed already, returns without waiting: this may run on a driver thread.
    pub(super) fn flush_if_live(&self) {
        if self.has_deferred_writes.load(Ordering::Acquire)
            && self.allocation.read(0, &mut [0]).is_ok()
        {
            let _ = self.flush_staged(&|| false);
        }
    }

    /// Notes that an access succeeded.
    #[inline]
    fn clear_absent(&self) {
        if self.was_absent.load(Ordering::Relaxed) {
            self.was_absent.store(false, Ordering::Relaxed);
        }
    }

    /// Runs `copy` under a guard of the slot, so that the memory does not move under its window.
    #[inline]
    fn with_copier(
        &self,
        direction: CopyDirection,
        len: u64,
        copy: impl FnOnce(&Copier) -> Result<()>,
    ) -> std::result::Result<(), AccessDenied> {
        let copier =
            self.revocable_slot.enter(|_| true).map_err(|(label, _)| self.closed_reason(label))?;
        self.clear_absent();
        let done = match copier.method(direction, len) {
            CopyMethod::Window | CopyMethod::Threads | CopyMethod::Engine => copy(&copier),
            // These wait for device work, which may be what moves the memory and waits for this
            // guard, so the guard is dropped first. They use device addresses, which a move does
            // not change.
            CopyMethod::Agent | CopyMethod::Staged => {
                let own = Arc::clone(&copier);
                drop(copier);
                copy(&own)
            }
        };
        done.map_err(|error| self.record_failure(error))
    }

    /// Applies `op` to a word, atomically among all registrations of this process.
    pub(super) fn atomic(
        &self,
        at: u64,
        op: &Atomic,
        cancelled: CancelCheck<'_>,
    ) -> std::result::Result<u64, AccessDenied> {
        self.flush_staged(cancelled)?;
        let copier =
            self.revocable_slot.enter(|_| true).map_err(|(label, _)| self.closed_reason(label))?;
        let address = self.allocation.address().raw().wrapping_add(at);
        let _exclusive = atomics::lock_word(address);
        let done = match self.window(&copier) {
            Some(window) if window.mapping() == MappingType::Cached => {
                atomics::rmw_shared(&window.bytes(), at, op)
            }
            Some(window) => atomics::rmw_mapped(&window.bytes(), at, op),
            None => atomics::rmw_copied(&copier, at, op),
        };
        done.map_err(|error| self.record_failure(error))
    }

    /// Whether each copy has a high fixed cost: a driver call.
    #[inline]
    pub(super) fn has_costly_copies(&self) -> bool {
        !self.device_access.window_only
    }

    /// Waits until everything written before has reached the device.
    pub(super) fn flush(&self) {
        let _ = self.flush_staged(&|| false);
        let Ok(copier) = self.revocable_slot.enter(|_| true) else { return };
        if let Some(window) = self.window(&copier) {
            window.flush();
        }
    }

    /// Orders earlier writes through the window before this thread's later stores.
    #[inline]
    pub(super) fn publish(&self) {
        if self.write_combining.load(Ordering::Relaxed) {
            atomics::store_fence();
        }
    }

    #[cold]
    fn record_failure(&self, error: Error) -> AccessDenied {
        if *error.kind() == Kind::Freed {
            return AccessDenied::Gone;
        }
        if error.is_transient() {
            tracing::debug!(%error, "a copy of registered memory is delayed");
            *self.failure.lock() = Some(error);
            return AccessDenied::NotResident;
        }
        tracing::warn!(%error, "a copy of registered memory failed");
        *self.failure.lock() = Some(error);
        AccessDenied::Failed
    }

    pub(super) fn failure(&self) -> Option<Error> {
        self.failure.lock().clone()
    }

    /// Why the slot is closed. A free is final, whichever of two concurrent events closed it last.
    #[cold]
    fn closed_reason(&self, label: u32) -> AccessDenied {
        match label {
            _ if self.move_state.lock().gone => AccessDenied::Gone,
            MOVING => {
                self.was_absent.store(true, Ordering::Relaxed);
                AccessDenied::Moving
            }
            ABSENT => {
                self.was_absent.store(true, Ordering::Relaxed);
                self.request_remap();
                AccessDenied::NotResident
            }
            _ => AccessDenied::Failed,
        }
    }
}
