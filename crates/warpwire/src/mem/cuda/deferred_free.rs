//! Deferred destruction of objects whose destruction would wait for the device.
//!
//! `cuMemFree`, `cuMemFreeHost`, `cuIpcCloseMemHandle` and `cuModuleUnload` return only when all
//! work on the device has completed (measured: they block while any stream waits for a word). A
//! program that drops a buffer while a stream waits for that program's next step would deadlock. A
//! helper thread making the calls would not help: while one thread blocks in `cuMemFree`, driver
//! calls of all other threads block too (also measured). So the objects are queued here and
//! destroyed when no stream of this library has work: by the next call that checks, or by a reaper
//! thread that polls while the queue is not empty.
//!
//! `idle_lock` closes the race between check and call: queueing work holds it shared, calls that
//! wait for the device hold it exclusively.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock, RwLockReadGuard};

use super::super::backend::HostOwner;
use super::device::CudaDevice;
use super::driver::{Driver, call};
use super::stream::{Core, InFlight};
use super::sys::{Address, ModuleHandle, StreamHandle};
use crate::error::Kind;

/// An object to be destroyed.
pub(super) enum PendingFree {
    Memory(Address),
    Pinned(HostPointer),
    /// With the owner that keeps it mapped until it is unregistered.
    Registered(HostPointer, Option<HostOwner>),
    Imported(Address),
    Module(ModuleHandle),
}

/// Start of pinned or registered memory.
#[derive(Clone, Copy)]
pub(super) struct HostPointer(pub(super) *mut std::ffi::c_void);

// SAFETY: it is only passed back to the driver, never dereferenced.
unsafe impl Send for HostPointer {}

/// The part of a stream that idle checks need.
#[derive(Clone)]
pub(super) struct StreamEntry {
    pub(super) handle: StreamHandle,
    /// Querying a stream during a capture would invalidate the capture.
    pub(super) capturing: Arc<AtomicBool>,
}

/// A stream that was dropped with work in flight, and the resources of that work.
pub(super) struct DetachedStream {
    pub(super) entry: StreamEntry,
    pub(super) in_flight: InFlight,
}

#[derive(Default)]
pub(super) struct DeferredFree {
    idle_lock: RwLock<()>,
    streams: Mutex<Vec<StreamEntry>>,
    live: Mutex<Vec<std::sync::Weak<Core>>>,
    detached: Mutex<Vec<DetachedStream>>,
    pending: Mutex<Vec<PendingFree>>,
    reaper_runs: AtomicBool,
}

impl DeferredFree {
    /// Held while work is queued.
    pub(super) fn enqueue_guard(&self) -> RwLockReadGuard<'_, ()> {
        self.idle_lock.read_recursive()
    }

    pub(super) fn add_stream(&self, entry: &StreamEntry, core: &Arc<Core>) {
        self.streams.lock().push(entry.clone());
        let mut live = self.live.lock();
        live.retain(|core| core.strong_count() > 0);
        live.push(Arc::downgrade(core));
    }

    /// The streams that have not been dropped.
    pub(super) fn live_streams(&self) -> Vec<Arc<Core>> {
        self.live.lock().iter().filter_map(std::sync::Weak::upgrade).collect()
    }

    /// Destroys a stream once its work has completed.
    pub(super) fn add_detached(&self, device: &Arc<CudaDevice>, detached_stream: DetachedStream) {
        self.detached.lock().push(detached_stream);
        self.free_or_start_reaper(device);
    }

    /// Destroys `pending` as soon as that does not block. The context must be current.
    pub(super) fn defer(&self, device: &Arc<CudaDevice>, pending: PendingFree) {
        self.pending.lock().push(pending);
        self.free_or_start_reaper(device);
    }

    fn free_or_start_reaper(&self, device: &Arc<CudaDevice>) {
        self.free_ready(device.driver);
        if !self.is_empty() {
            self.start_reaper(device);
        }
    }

    fn is_empty(&self) -> bool {
        self.detached.lock().is_empty() && self.pending.lock().is_empty()
    }

    /// Starts a thread that polls until everything is destroyed. It holds the device, which is
    /// therefore dropped last.
    fn start_reaper(&self, device: &Arc<CudaDevice>) {
        const FIRST_PAUSE: Duration = Duration::from_millis(1);
        const MAX_PAUSE: Duration = Duration::from_millis(100);
        if self.reaper_runs.swap(true, Ordering::AcqRel) {
            return;
        }
        let held = device.clone();
        let reap = move || {
            let deferred_free = &held.deferred_free;
            let mut pause = FIRST_PAUSE;
            loop {
                while !deferred_free.is_empty() {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(MAX_PAUSE);
                    if let Ok(_current) = held.make_current() {
                        deferred_free.free_ready(held.driver);
                    }
                }
                deferred_free.reaper_runs.store(false, Ordering::Release);
                // A thread that queued an object just now may have seen this one still running.
                if deferred_free.is_empty()
                    || deferred_free.reaper_runs.swap(true, Ordering::AcqRel)
                {
                    return;
                }
            }
        };
        let started = crate::sync::thread::spawn("warpwire-reaper", reap);
        if let Err(error) = started {
            self.reaper_runs.store(false, Ordering::Release);
            tracing::warn!(%error, "no reaper thread: dropped CUDA objects are destroyed later");
        }
    }

    /// Destroys what can be destroyed now without blocking. The context must be current.
    pub(super) fn free_ready(&self, driver: &Driver) {
        self.destroy_detached(driver);
        if self.pending.lock().is_empty() {
            return;
        }
        let Some(_exclusive) = self.idle_lock.try_write() else { return };
        if self.is_busy(driver) {
            return;
        }
        let due = std::mem::take(&mut *self.pending.lock());
        for pending in due {
            let outcome = match pending {
                PendingFree::Memory(address) => call!(driver, memory_free(address)),
                PendingFree::Pinned(pointer) => call!(driver, host_free(pointer.0)),
                PendingFree::Registered(pointer, _owner) => {
                    call!(driver, host_unregister(pointer.0))
                }
                PendingFree::Imported(address) => call!(driver, ipc_close(address)),
                PendingFree::Module(module) => call!(driver, module_unload(module)),
            };
            if let Err(error) = outcome {
                tracing::warn!(%error, "a CUDA object was not destroyed");
            }
        }
    }

    /// Waits up to `timeout` for the streams to become idle. True if everything pending was
    /// destroyed; false on timeout or if nothing was pending.
    pub(super) fn free_within(&self, driver: &Driver, timeout: Duration) -> bool {
        if self.is_empty() {
            return false;
        }
        let start = Instant::now();
        while start.elapsed() < timeout {
            self.free_ready(driver);
            if self.is_empty() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        false
    }

    /// Runs `call`, which waits for the device, while no stream has work; `None` on timeout. The
    /// context must be current.
    pub(super) fn while_idle<R>(
        &self,
        driver: &Driver,
        timeout: Duration,
        call: impl FnOnce() -> R,
    ) -> Option<R> {
        let start = Instant::now();
        loop {
            if let Some(_exclusive) = self.idle_lock.try_write()
                && !self.is_busy(driver)
            {
                return Some(call());
            }
            if start.elapsed() > timeout {
                return None;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn is_busy(&self, driver: &Driver) -> bool {
        let streams = self.streams.lock();
        streams.iter().any(|stream| {
            stream.capturing.load(Ordering::Acquire)
                || match driver.stream_is_idle(stream.handle) {
                    Ok(idle) => !idle,
                    // On a lost context nothing runs any more; any other error is inconclusive.
                    Err(error) => error.kind() != &Kind::DeviceLost,
                }
        })
    }

    fn destroy_detached(&self, driver: &Driver) {
        let mut detached = self.detached.lock();
        let (mut ended, mut lost) = (Vec::new(), Vec::new());
        for detached_stream in std::mem::take(&mut *detached) {
            match driver.stream_is_idle(detached_stream.entry.handle) {
                Ok(true) => ended.push(detached_stream),
                Err(error) if error.kind() == &Kind::DeviceLost => lost.push(detached_stream),
                _ => detached.push(detached_stream),
            }
        }
        drop(detached);
        let dead =
            |handle| ended.iter().chain(&lost).any(|o: &DetachedStream| o.entry.handle == handle);
        self.streams.lock().retain(|known| !dead(known.handle));
        for detached_stream in ended {
            detached_stream.in_flight.destroy(driver);
            if let Err(error) = call!(driver, stream_destroy(detached_stream.entry.handle)) {
                tracing::warn!(%error, "a stream was not destroyed");
            }
        }
        // The driver may still be inside a host call of theirs: on a lost context they are leaked.
        lost.into_iter().for_each(|detached_stream| std::mem::forget(detached_stream.in_flight));
    }
}
