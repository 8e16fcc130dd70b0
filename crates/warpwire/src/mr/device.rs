//! Device memory under registrations: one copier for each piece, taken away when the memory moves or goes.
//!
//! Where the memory's owner tells of moves and frees, the gate closes before they happen. Where nobody tells, as with
//! another library's CUDA memory, each use asks CUDA whether the same memory is still there.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use parking_lot::Mutex;

use super::behind::Behind;
use super::denied::Denied;
use super::gate::Gate;
use super::memory::{How, Path};
use super::on_demand::{Counts, Faults, count};
use super::pager;
use super::word;
use crate::error::{Error, Kind, Result};
use crate::mem::copy::{Copier, Direction, Plan, Staging, Way};
use crate::mem::{
    Allocation, Listener, MappingType, MemoryEvent, MemoryKind, Piece, Stop, Watch, Window,
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
pub(super) struct Unsettled {
    /// There is something to settle, or a loss to tell of.
    any: AtomicBool,
    /// Something was lost on the way, and nobody who can draw the conclusion has been told.
    lost: AtomicBool,
    /// Held by who settles, so that others wait for him. Nothing that work needs is locked meanwhile.
    settling: Mutex<()>,
    memories: Mutex<Vec<Arc<DeviceMemory>>>,
}

impl Unsettled {
    /// Waits until everything is in its place; says whether all went well since it was last asked.
    #[inline]
    pub(super) fn settle(&self) -> bool {
        !self.any.load(Ordering::Acquire) || {
            self.settle_all();
            !self.lost.swap(false, Ordering::AcqRel)
        }
    }

    /// Waits until everything is in its place. What got lost is told to whoever asks.
    #[inline]
    pub(super) fn wait(&self) {
        if self.any.load(Ordering::Acquire) {
            self.settle_all();
        }
    }

    fn add(&self, memory: Arc<DeviceMemory>) {
        self.memories.lock().push(memory);
        self.any.store(true, Ordering::Release);
    }

    fn lose(&self) {
        self.lost.store(true, Ordering::Release);
        self.any.store(true, Ordering::Release);
    }

    #[inline(never)]
    fn settle_all(&self) {
        let _alone = self.settling.lock();
        let taken = std::mem::take(&mut *self.memories.lock());
        // Each is settled, also behind one that fails.
        for memory in &taken {
            // Nobody waits for us here: no work is under way on this thread.
            let _ = memory.settle(&|| false);
        }
        // Only now: who comes meanwhile waits for the lock.
        let memories = self.memories.lock();
        let more = !memories.is_empty() || self.lost.load(Ordering::Acquire);
        self.any.store(more, Ordering::Release);
    }
}

/// A piece of device memory that registrations share.
pub(super) struct DeviceMemory {
    allocation: Allocation,
    how: How,
    staging: Staging,
    gate: Gate<Arc<Copier>>,
    life: Mutex<Life>,
    failure: Mutex<Option<Error>>,
    /// Whether copies wait in write-combining buffers until they are pushed out.
    combines: AtomicBool,
    /// Writes that go through pinned memory, where there is no window: known when the memory was first found.
    behind: OnceLock<Option<Mutex<Behind>>>,
    is_behind: AtomicBool,
    unsettled: Arc<Unsettled>,
    /// Whose memory it was when it was registered, where nobody tells of a free.
    pieces: Box<[Piece]>,
    /// The pager has been asked to find it.
    wanted: AtomicBool,
    /// Somebody found it away, and has not got at it since.
    missed: AtomicBool,
    counts: Counts,
    /// For the pager, and for listeners.
    me: Weak<Self>,
}

/// What is known of the memory's moves.
#[derive(Default)]
struct Life {
    /// Grows with each event, so that a copier made meanwhile is known to be of yesterday.
    events: u64,
    moving: bool,
    gone: bool,
    /// None while none could be had: then frees are not seen, and `blind` says why.
    watch: Option<Watch>,
    blind: Option<Error>,
}

impl DeviceMemory {
    pub(super) fn open(
        allocation: &Allocation,
        how: &How,
        unsettled: &Arc<Unsettled>,
    ) -> Result<Arc<Self>> {
        let pieces = allocation.pieces()?.into();
        let staging = match how.staging {
            Some(staging) => staging.check().map(|()| staging),
            None => Staging::from_env(),
        }?;
        let memory = Arc::new_cyclic(|me| Self {
            allocation: allocation.clone(),
            how: how.clone(),
            staging,
            gate: Gate::closed(if how.on_demand { ABSENT } else { READY }),
            life: Mutex::default(),
            failure: Mutex::default(),
            combines: AtomicBool::new(false),
            behind: OnceLock::new(),
            is_behind: AtomicBool::new(false),
            unsettled: unsettled.clone(),
            pieces,
            wanted: AtomicBool::new(false),
            missed: AtomicBool::new(false),
            counts: Counts::default(),
            me: me.clone(),
        });
        // Weak, because the watch lies in the memory that the listener is about.
        let weak = memory.me.clone();
        let listener: Listener = Arc::new(move |event| {
            if let Some(memory) = weak.upgrade() {
                memory.notice(event);
            }
        });
        let watch = allocation.watch(listener);
        {
            let mut life = memory.life.lock();
            match watch {
                Ok(watch) => life.watch = Some(watch),
                Err(error) if *error.kind() == Kind::Unsupported => life.blind = Some(error),
                Err(error) => return Err(error),
            }
        }
        // The watch tells of what comes; whether the memory was gone before, only a look tells.
        allocation.read(0, &mut [0])?;
        if !how.on_demand {
            memory.reopen()?;
        }
        Ok(memory)
    }

    pub(super) fn is_for(&self, allocation: &Allocation, how: &How) -> bool {
        let same = self.allocation.address() == allocation.address()
            && self.allocation.len() == allocation.len()
            && self.allocation.kind() == allocation.kind()
            && self.allocation.device() == allocation.device();
        // A look only: nothing is to be found for a registration, which may never be used.
        let there = || match self.gate.peek() {
            (_, true) => self.check(0, self.allocation.len()).is_ok(),
            (label, false) => label != BROKEN && !self.life.lock().gone,
        };
        same && self.how.is_same(how) && there()
    }

    /// What happens to the memory; on the thread that makes it happen.
    fn notice(&self, event: MemoryEvent) {
        {
            let mut life = self.life.lock();
            life.events += 1;
            life.moving = event == MemoryEvent::Moving;
            life.gone |= event == MemoryEvent::Freed;
        }
        match event {
            // Nobody touches the old place once this returns.
            MemoryEvent::Moving => {
                count(&self.counts.lost);
                drop(self.gate.close(MOVING));
            }
            MemoryEvent::Freed => drop(self.gate.close(GONE)),
            MemoryEvent::Moved if self.how.on_demand => {
                drop(self.gate.close(ABSENT));
                // Who waits for it asks now and then, and it may move more often than that: so it is found beforehand.
                if self.missed.load(Ordering::Relaxed) {
                    self.want();
                }
            }
            MemoryEvent::Moved => self.find(),
        }
    }

    /// Finds the memory where it is now.
    fn find(&self) {
        if let Err(error) = self.reopen() {
            count(&self.counts.refused);
            // What is short now may be there later: the next use asks again.
            self.gate.close(if error.passes() { ABSENT } else { BROKEN });
            self.fail(error);
        }
        // Last, so that whoever waits meanwhile asks for nothing; if it moved on meanwhile, the next use asks again.
        self.wanted.store(false, Ordering::Release);
    }

    /// Has it found, by somebody who may wait.
    #[cold]
    fn want(&self) {
        if self.wanted.swap(true, Ordering::AcqRel) {
            return;
        }
        if self.gate.peek().1 {
            // Found since it was looked at.
            self.wanted.store(false, Ordering::Release);
            return;
        }
        count(&self.counts.faults);
        let me = self.me.clone();
        pager::later(move || {
            if let Some(memory) = me.upgrade() {
                memory.find();
            }
        });
    }

    /// Finds it now, if it is to be found on demand and is not there.
    pub(super) fn prefetch(&self) -> Result<()> {
        if self.gate.peek() == (ABSENT, false) {
            count(&self.counts.prefetched);
            self.reopen()?;
        }
        Ok(())
    }

    pub(super) fn prefetch_later(&self) {
        if self.gate.peek() == (ABSENT, false) {
            self.want();
        }
    }

    pub(super) fn faults(&self) -> Faults {
        self.counts.get()
    }

    /// Makes a copier and opens the gate with it, unless the memory moves or goes meanwhile.
    fn reopen(&self) -> Result<()> {
        loop {
            let seen = {
                let life = self.life.lock();
                if life.gone || life.moving {
                    return Ok(());
                }
                life.events
            };
            // Not under the lock: work of the device that this waits for may be what moves the memory.
            let copier = self.copier()?;
            let life = self.life.lock();
            if life.events == seen {
                let mapping = self.window(&copier).map(Window::mapping);
                let combines = mapping == Some(MappingType::WriteCombining);
                let staged = self.how.staged || !self.how.no_window && mapping.is_none();
                let behind =
                    || staged.then(|| Mutex::new(Behind::new(&self.allocation, self.staging)));
                self.behind.get_or_init(behind);
                self.combines.store(combines, Ordering::Relaxed);
                // An open gate has a copier already, of the same place.
                let _ = self.gate.open(READY, Arc::new(copier));
                return Ok(());
            }
        }
    }

    fn copier(&self) -> Result<Copier> {
        let plan = match self.how.no_window {
            true if self.how.staged => {
                Arc::new(Plan::by_hand(0, 0).staged_from(self.staging.reads))
            }
            true => Arc::new(Plan::by_hand(0, 0)),
            false => Plan::for_device(self.allocation.device())?,
        };
        let copier = Copier::with(&self.allocation, plan, self.how.agent.clone())?;
        Ok(copier.staged_by(self.staging))
    }

    /// Nothing while that range is there, else what stands in the way.
    #[inline]
    pub(super) fn check(&self, at: u64, len: u64) -> std::result::Result<(), Denied> {
        match self.gate.peek() {
            (_, true) if self.pieces.is_empty() => Ok(()),
            (_, true) => self.ask(at, len),
            (label, false) => Err(self.reason(label)),
        }
    }

    /// Whether the memory is still whose it was: for memory whose end nobody tells of.
    fn ask(&self, at: u64, len: u64) -> std::result::Result<(), Denied> {
        let touched = |piece: &&Piece| piece.offset < at + len && at < piece.offset + piece.len;
        for piece in self.pieces.iter().filter(touched) {
            match self.allocation.identity(piece.offset) {
                Ok(Some(id)) if id == piece.id => {}
                // The driver could not say: that is no answer.
                Err(error) if error.passes() => return Err(Denied::Absent),
                Err(error) if *error.kind() == Kind::DeviceLost => return Err(self.fail(error)),
                Ok(_) | Err(_) => {
                    self.notice(MemoryEvent::Freed);
                    return Err(Denied::Gone);
                }
            }
        }
        Ok(())
    }

    /// How it is reached, and why not in better ways.
    pub(super) fn path(&self) -> (Path, Vec<String>) {
        let mut why = Vec::new();
        let borrowed = self.allocation.kind() == MemoryKind::Borrowed;
        if let (Some(blind), true) = (&self.life.lock().blind, borrowed) {
            why.push(match self.pieces.is_empty() {
                true => format!("frees by its owner are not seen: {blind}"),
                false => format!("frees by its owner are found out at the next use: {blind}"),
            });
        }
        if let Err(error) = self.prefetch() {
            why.push(error.to_string());
        }
        let Ok(copier) = self.gate.enter(|_| true) else {
            why.push("the memory is moving or gone".to_owned());
            return (Path::Engine, why);
        };
        if let Some(window) = self.window(&copier) {
            let refused = window.refused().iter();
            why.extend(refused.map(|r| format!("not by {}: {}", r.path, r.why)));
            return (Path::Window(window.path()), why);
        }
        match copier.window() {
            Ok(_) => why.push("no window: it was registered without one".to_owned()),
            Err(error) => why.push(format!("no window: {error}")),
        }
        (if self.is_staged() { Path::Staged } else { Path::Engine }, why)
    }

    /// Whether writes go through pinned memory.
    #[inline]
    pub(super) fn is_staged(&self) -> bool {
        self.behind().is_some()
    }

    #[inline]
    fn behind(&self) -> Option<&Mutex<Behind>> {
        self.behind.get()?.as_ref()
    }

    /// The window, if this memory may be reached by one.
    fn window<'a>(&self, copier: &'a Copier) -> Option<&'a Window> {
        copier.window().ok().filter(|_| !self.how.no_window)
    }

    /// Copies out of it. `stop` says when to wait for the device no longer: here and below.
    pub(super) fn read(
        &self,
        at: u64,
        into: &mut [u8],
        stop: Stop<'_>,
    ) -> std::result::Result<(), Denied> {
        let len = into.len() as u64;
        self.settle(stop)?;
        self.with_copier(Direction::Read, len, |copier| copier.read_unless(at, into, stop))
    }

    pub(super) fn write(
        &self,
        at: u64,
        from: &[u8],
        stop: Stop<'_>,
    ) -> std::result::Result<(), Denied> {
        if let Some(behind) = self.behind() {
            return self.write_behind(behind, at, from, stop);
        }
        self.with_copier(Direction::Write, from.len() as u64, |copier| copier.write(at, from))
    }

    /// Collects what is written. It goes by device address, so that a move does not harm it.
    fn write_behind(
        &self,
        behind: &Mutex<Behind>,
        at: u64,
        from: &[u8],
        stop: Stop<'_>,
    ) -> std::result::Result<(), Denied> {
        drop(self.gate.enter(|_| true).map_err(|(label, _)| self.reason(label))?);
        self.got();
        let written = behind.lock().write(at, from, stop);
        if !self.is_behind.swap(true, Ordering::AcqRel)
            && let Some(memory) = self.me.upgrade()
        {
            self.unsettled.add(memory);
        }
        written.map_err(|error| self.fail(error))
    }

    /// Waits until all that was written is in its place. What was written before a free is lost with the memory, which is
    /// nobody's failure; what a device loses is told by [`Unsettled::settle`].
    fn settle(&self, stop: Stop<'_>) -> std::result::Result<(), Denied> {
        let Some(behind) = self.behind() else { return Ok(()) };
        if !self.is_behind.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut behind = behind.lock();
        let settled = behind.settle(stop);
        if settled.is_err() && stop() {
            // Nothing is known of it: whoever need not stop finds out.
            return Err(Denied::Gone);
        }
        // Not before it is so: others go by it.
        self.is_behind.store(false, Ordering::Release);
        let denied = settled.map_err(|error| self.fail(error));
        if denied.is_err_and(|denied| denied != Denied::Gone) {
            self.unsettled.lose();
        }
        Ok(())
    }

    /// A registration has been taken off the memory, which may be going: what was placed through it is there when this
    /// returns. Memory that is gone already gets nothing any more, and nothing is waited for: this may be a thread of
    /// the device.
    pub(super) fn let_go(&self) {
        if self.is_behind.load(Ordering::Acquire) && self.allocation.read(0, &mut [0]).is_ok() {
            let _ = self.settle(&|| false);
        }
    }

    /// Somebody got at it.
    #[inline]
    fn got(&self) {
        if self.missed.load(Ordering::Relaxed) {
            self.missed.store(false, Ordering::Relaxed);
        }
    }

    /// Runs `copy` inside the gate, so that memory does not move under a window.
    #[inline]
    fn with_copier(
        &self,
        direction: Direction,
        len: u64,
        copy: impl FnOnce(&Copier) -> Result<()>,
    ) -> std::result::Result<(), Denied> {
        let copier = self.gate.enter(|_| true).map_err(|(label, _)| self.reason(label))?;
        self.got();
        let done = match copier.way(direction, len) {
            Way::Window | Way::Threads | Way::Engine => copy(&copier),
            // These wait for work of the device, which may itself be what moves the memory, and wait for
            // us to leave the gate. They go by device address, so that a move does not harm them.
            Way::Agent | Way::Staged => {
                let own = Arc::clone(&copier);
                drop(copier);
                copy(&own)
            }
        };
        done.map_err(|error| self.fail(error))
    }

    /// Changes a word, alone among all registrations of this process.
    pub(super) fn atomic(
        &self,
        at: u64,
        op: &Atomic,
        stop: Stop<'_>,
    ) -> std::result::Result<u64, Denied> {
        self.settle(stop)?;
        let copier = self.gate.enter(|_| true).map_err(|(label, _)| self.reason(label))?;
        let address = self.allocation.address().raw().wrapping_add(at);
        let _alone = word::alone(address);
        let done = match self.window(&copier) {
            Some(window) if window.mapping() == MappingType::Cached => {
                word::change_shared(&window.bytes(), at, op)
            }
            Some(window) => word::change_plain(&window.bytes(), at, op),
            None => word::change_copied(&copier, at, op),
        };
        done.map_err(|error| self.fail(error))
    }

    /// Sends what was written on its way, before anything that is written later.
    #[inline]
    pub(super) fn publish(&self) {
        if self.combines.load(Ordering::Relaxed) {
            word::store_fence();
        }
    }

    #[cold]
    fn fail(&self, error: Error) -> Denied {
        if *error.kind() == Kind::Freed {
            return Denied::Gone;
        }
        if error.passes() {
            tracing::debug!(%error, "a copy of registered memory has to wait");
            *self.failure.lock() = Some(error);
            return Denied::Absent;
        }
        tracing::warn!(%error, "a copy of registered memory failed");
        *self.failure.lock() = Some(error);
        Denied::Failed
    }

    pub(super) fn failure(&self) -> Option<Error> {
        self.failure.lock().clone()
    }

    /// Why the gate is closed. A free is final, whichever of two events came to the gate last.
    #[cold]
    fn reason(&self, label: u32) -> Denied {
        match label {
            _ if self.life.lock().gone => Denied::Gone,
            MOVING => {
                self.missed.store(true, Ordering::Relaxed);
                Denied::Moving
            }
            ABSENT => {
                self.missed.store(true, Ordering::Relaxed);
                self.want();
                Denied::Absent
            }
            _ => Denied::Failed,
        }
    }
}
