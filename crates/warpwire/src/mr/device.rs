//! Device memory under registrations: one copier for each piece, taken away when the memory moves or goes.
//!
//! Where the memory's owner tells of moves and frees, the gate closes before they happen. Where nobody tells, as with
//! another library's CUDA memory, each use asks CUDA whether the same memory is still there.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::atomics;
use super::deferred_writes::WriteBehind;
use super::denied::AccessDenied;
use super::memory::{AccessPath, DeviceAccess};
use super::on_demand::{OdpCounters, OdpStats, count};
use super::pager;
use super::revocable_slot::RevocableSlot;
use crate::error::{Error, Kind, Result};
use crate::mem::copy::{Copier, CopyDirection, CopyMethod, CopyPlan, StagingOptions};
use crate::mem::{
    Allocation, BackingAllocation, CancelCheck, MappingType, MemoryEvent, MemoryKind,
    MemoryListener, WatchGuard, Window,
};
use crate::mlx5::Atomic;

/// Labels of the gate.
const READY: u32 = 0;
const MOVING: u32 = 1;
const GONE: u32 = 2;
const BROKEN: u32 = 3;
const ABSENT: u32 = 4;

/// Device memory with writes that are not in their place yet.
#[derive(Default)]
pub(super) struct PendingWrites {
    /// There is something to settle, or a loss to tell of.
    dirty: AtomicBool,
    /// Something was lost on the way, and nobody who can draw the conclusion has been told.
    lost: AtomicBool,
    /// Held by who settles, so that others wait for him. Nothing that work needs is locked meanwhile.
    flush_lock: Mutex<()>,
    memories: Mutex<Vec<Arc<DeviceMemory>>>,
}

impl PendingWrites {
    /// Waits until everything is in its place; says whether all went well since it was last asked.
    #[inline]
    pub(super) fn flush_staged(&self) -> bool {
        !self.dirty.load(Ordering::Acquire) || {
            self.flush_all();
            !self.lost.swap(false, Ordering::AcqRel)
        }
    }

    /// Waits until everything is in its place. What got lost is told to whoever asks.
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
        self.lost.store(true, Ordering::Release);
        self.dirty.store(true, Ordering::Release);
    }

    #[inline(never)]
    fn flush_all(&self) {
        let _exclusive = self.flush_lock.lock();
        let taken = std::mem::take(&mut *self.memories.lock());
        // Each is settled, also behind one that fails.
        for memory in &taken {
            // Nobody waits for us here: no work is under way on this thread.
            let _ = memory.flush_staged(&|| false);
        }
        // Only now: who comes meanwhile waits for the lock.
        let memories = self.memories.lock();
        let more = !memories.is_empty() || self.lost.load(Ordering::Acquire);
        self.dirty.store(more, Ordering::Release);
    }
}

/// A piece of device memory that registrations share.
pub(super) struct DeviceMemory {
    allocation: Allocation,
    device_access: DeviceAccess,
    staging: StagingOptions,
    revocable_slot: RevocableSlot<Arc<Copier>>,
    move_state: Mutex<MoveState>,
    failure: Mutex<Option<Error>>,
    /// Whether copies wait in write-combining buffers until they are pushed out.
    write_combining: AtomicBool,
    /// Writes that go through pinned memory, where there is no window: known when the memory was first found.
    deferred_writes: OnceLock<Option<Mutex<WriteBehind>>>,
    has_deferred_writes: AtomicBool,
    pending_writes: Arc<PendingWrites>,
    /// Whose memory it was when it was registered, where nobody tells of a free.
    backing_allocations: Box<[BackingAllocation]>,
    /// The pager has been asked to find it.
    remap_requested: AtomicBool,
    /// Somebody found it away, and has not got at it since.
    was_absent: AtomicBool,
    counts: OdpCounters,
    /// For the pager, and for listeners.
    weak_self: Weak<Self>,
}

/// What is known of the memory's moves.
#[derive(Default)]
struct MoveState {
    /// Grows with each event, so that a copier made meanwhile is known to be of yesterday.
    events: u64,
    moving: bool,
    gone: bool,
    /// None while none could be had: then frees are not seen, and `watch_error` says why.
    watch: Option<WatchGuard>,
    watch_error: Option<Error>,
}

impl DeviceMemory {
    pub(super) fn open(
        allocation: &Allocation,
        device_access: &DeviceAccess,
        pending_writes: &Arc<PendingWrites>,
    ) -> Result<Arc<Self>> {
        let backing_allocations = allocation.backing_allocations()?.into();
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
            weak_self: weak_self.clone(),
        });
        // Weak, because the watch lies in the memory that the listener is about.
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
        // The watch tells of what comes; whether the memory was gone before, only a look tells.
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
        // A look only: nothing is to be found for a registration, which may never be used.
        let is_there = || match self.revocable_slot.peek() {
            (_, true) => self.check(0, self.allocation.len()).is_ok(),
            (label, false) => label != BROKEN && !self.move_state.lock().gone,
        };
        same && self.device_access.is_same(device_access) && is_there()
    }

    /// What happens to the memory; on the thread that makes it happen.
    fn on_memory_event(&self, event: MemoryEvent) {
        {
            let mut move_state = self.move_state.lock();
            move_state.events += 1;
            move_state.moving = event == MemoryEvent::Moving;
            move_state.gone |= event == MemoryEvent::Freed;
        }
        match event {
            // Nobody touches the old place once this returns.
            MemoryEvent::Moving => {
                count(&self.counts.lost);
                drop(self.revocable_slot.close(MOVING));
            }
            MemoryEvent::Freed => drop(self.revocable_slot.close(GONE)),
            MemoryEvent::Moved if self.device_access.on_demand => {
                drop(self.revocable_slot.close(ABSENT));
                // Who waits for it asks now and then, and it may move more often than that: so it is found beforehand.
                if self.was_absent.load(Ordering::Relaxed) {
                    self.request_remap();
                }
            }
            MemoryEvent::Moved => self.remap_or_fail(),
        }
    }

    /// Finds the memory where it is now.
    fn remap_or_fail(&self) {
        if let Err(error) = self.remap() {
            count(&self.counts.refused);
            // What is short now may be there later: the next use asks again.
            self.revocable_slot.close(if error.is_transient() { ABSENT } else { BROKEN });
            self.record_failure(error);
        }
        // Last, so that whoever waits meanwhile asks for nothing; if it moved on meanwhile, the next use asks again.
        self.remap_requested.store(false, Ordering::Release);
    }

    /// Has it found, by somebody who may wait.
    #[cold]
    fn request_remap(&self) {
        if self.remap_requested.swap(true, Ordering::AcqRel) {
            return;
        }
        if self.revocable_slot.peek().1 {
            // Found since it was looked at.
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

    /// Finds it now, if it is to be found on demand and is not there.
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

    /// Makes a copier and opens the gate with it, unless the memory moves or goes meanwhile.
    fn remap(&self) -> Result<()> {
        loop {
            let seen = {
                let move_state = self.move_state.lock();
                if move_state.gone || move_state.moving {
                    return Ok(());
                }
                move_state.events
            };
            // Not under the lock: work of the device that this waits for may be what moves the memory.
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
                // An open gate has a copier already, of the same place.
                let _ = self.revocable_slot.open(READY, Arc::new(copier));
                return Ok(());
            }
        }
    }

    fn copier(&self) -> Result<Copier> {
        let plan = match self.device_access.no_window {
            true if self.device_access.staged => {
                Arc::new(CopyPlan::with_thresholds(0, 0).with_min_staged_read(self.staging.reads))
            }
            true => Arc::new(CopyPlan::with_thresholds(0, 0)),
            false => CopyPlan::for_device(self.allocation.device())?,
        };
        let copier = Copier::with(&self.allocation, plan, self.device_access.agent.clone())?;
        Ok(copier.with_staging(self.staging))
    }

    /// Nothing while that range is there, else what stands in the way.
    #[inline]
    pub(super) fn check(&self, at: u64, len: u64) -> std::result::Result<(), AccessDenied> {
        match self.revocable_slot.peek() {
            (_, true) if self.backing_allocations.is_empty() => Ok(()),
            (_, true) => self.check_buffer_ids(at, len),
            (label, false) => Err(self.closed_reason(label)),
        }
    }

    /// Whether the memory is still whose it was: for memory whose end nobody tells of.
    fn check_buffer_ids(&self, at: u64, len: u64) -> std::result::Result<(), AccessDenied> {
        let touched = |backing: &&BackingAllocation| {
            backing.offset < at + len && at < backing.offset + backing.len
        };
        for backing in self.backing_allocations.iter().filter(touched) {
            match self.allocation.buffer_id(backing.offset) {
                Ok(Some(id)) if id == backing.id => {}
                // The driver could not say: that is no answer.
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

    /// How it is reached, and why not in better ways.
    pub(super) fn path(&self) -> (AccessPath, Vec<String>) {
        let mut why = Vec::new();
        let borrowed = self.allocation.kind() == MemoryKind::Borrowed;
        if let (Some(watch_error), true) = (&self.move_state.lock().watch_error, borrowed) {
            why.push(match self.backing_allocations.is_empty() {
                true => format!("frees by its owner are not seen: {watch_error}"),
                false => format!("frees by its owner are found out at the next use: {watch_error}"),
            });
        }
        if let Err(error) = self.prefetch() {
            why.push(error.to_string());
        }
        let Ok(copier) = self.revocable_slot.enter(|_| true) else {
            why.push("the memory is moving or gone".to_owned());
            return (AccessPath::Engine, why);
        };
        if let Some(window) = self.window(&copier) {
            let refused = window.refused().iter();
            why.extend(refused.map(|r| format!("not by {}: {}", r.path, r.why)));
            return (AccessPath::Window(window.path()), why);
        }
        match copier.window() {
            Ok(_) => why.push("no window: it was registered without one".to_owned()),
            Err(error) => why.push(format!("no window: {error}")),
        }
        (if self.is_staged() { AccessPath::Staged } else { AccessPath::Engine }, why)
    }

    /// Whether writes go through pinned memory.
    #[inline]
    pub(super) fn is_staged(&self) -> bool {
        self.deferred_writes().is_some()
    }

    #[inline]
    fn deferred_writes(&self) -> Option<&Mutex<WriteBehind>> {
        self.deferred_writes.get()?.as_ref()
    }

    /// The window, if this memory may be reached by one.
    fn window<'a>(&self, copier: &'a Copier) -> Option<&'a Window> {
        copier.window().ok().filter(|_| !self.device_access.no_window)
    }

    /// Copies out of it. `cancelled` says when to wait for the device no longer: here and below.
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

    /// Collects what is written. It goes by device address, so that a move does not harm it.
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

    /// Waits until all that was written is in its place. What was written before a free is lost with the memory, which is
    /// nobody's failure; what a device loses is told by [`PendingWrites::flush_staged`].
    fn flush_staged(&self, cancelled: CancelCheck<'_>) -> std::result::Result<(), AccessDenied> {
        let Some(deferred_writes) = self.deferred_writes() else { return Ok(()) };
        if !self.has_deferred_writes.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut deferred_writes = deferred_writes.lock();
        let flushed = deferred_writes.flush(cancelled);
        if flushed.is_err() && cancelled() {
            // Nothing is known of it: whoever need not stop finds out.
            return Err(AccessDenied::Gone);
        }
        // Not before it is so: others go by it.
        self.has_deferred_writes.store(false, Ordering::Release);
        let denied = flushed.map_err(|error| self.record_failure(error));
        if denied.is_err_and(|denied| denied != AccessDenied::Gone) {
            self.pending_writes.record_loss();
        }
        Ok(())
    }

    /// A registration has been taken off the memory, which may be going: what was placed through it is there when this
    /// returns. Memory that is gone already gets nothing any more, and nothing is waited for: this may be a thread of
    /// the device.
    pub(super) fn flush_if_live(&self) {
        if self.has_deferred_writes.load(Ordering::Acquire)
            && self.allocation.read(0, &mut [0]).is_ok()
        {
            let _ = self.flush_staged(&|| false);
        }
    }

    /// Somebody got at it.
    #[inline]
    fn clear_absent(&self) {
        if self.was_absent.load(Ordering::Relaxed) {
            self.was_absent.store(false, Ordering::Relaxed);
        }
    }

    /// Runs `copy` inside the gate, so that memory does not move under a window.
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
            // These wait for work of the device, which may itself be what moves the memory, and wait for
            // us to leave the gate. They go by device address, so that a move does not harm them.
            CopyMethod::Agent | CopyMethod::Staged => {
                let own = Arc::clone(&copier);
                drop(copier);
                copy(&own)
            }
        };
        done.map_err(|error| self.record_failure(error))
    }

    /// Changes a word, alone among all registrations of this process.
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

    /// Sends what was written on its way, before anything that is written later.
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
            tracing::debug!(%error, "a copy of registered memory has to wait");
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

    /// Why the gate is closed. A free is final, whichever of two events came to the gate last.
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
