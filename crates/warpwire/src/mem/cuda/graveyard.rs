//! Objects whose destruction would wait for the device.
//!
//! `cuMemFree`, `cuMemFreeHost`, `cuIpcCloseMemHandle` and `cuModuleUnload` return only when all work on
//! the device has ended (measured: they block while any stream waits for a word). A program that drops a
//! buffer while a stream waits for that same program's next step would never take that step. A thread that
//! makes those calls would not help: while one thread waits in `cuMemFree`, the calls of all others wait
//! too (measured as well). So they are buried here, and destroyed at a moment when no stream of ours is at
//! work: at the next call that looks, or by a thread that looks from time to time while there is
//! something to destroy.
//!
//! The *gate* keeps that moment: queueing work holds it shared, calls that wait for the device hold it
//! alone, so that no work arrives between the look and the call.

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

/// Something to be destroyed.
pub(super) enum Remains {
    Memory(Address),
    Pinned(HostPointer),
    /// With what keeps it mapped.
    Registered(HostPointer, Option<HostOwner>),
    Imported(Address),
    Module(ModuleHandle),
}

/// The start of pinned memory.
#[derive(Clone, Copy)]
pub(super) struct HostPointer(pub(super) *mut std::ffi::c_void);

// SAFETY: it is only ever handed back to the driver.
unsafe impl Send for HostPointer {}

/// A stream as the graveyard needs it.
#[derive(Clone)]
pub(super) struct StreamEntry {
    pub(super) handle: StreamHandle,
    /// Asking a stream that is being captured whether it is idle would spoil the capture.
    pub(super) capturing: Arc<AtomicBool>,
}

/// A stream that was dropped with work in flight, and what that work uses.
pub(super) struct Orphan {
    pub(super) entry: StreamEntry,
    pub(super) in_flight: InFlight,
}

#[derive(Default)]
pub(super) struct Graveyard {
    gate: RwLock<()>,
    streams: Mutex<Vec<StreamEntry>>,
    live: Mutex<Vec<std::sync::Weak<Core>>>,
    orphans: Mutex<Vec<Orphan>>,
    remains: Mutex<Vec<Remains>>,
    reaper_runs: AtomicBool,
}

impl Graveyard {
    /// Held while work is queued.
    pub(super) fn queueing(&self) -> RwLockReadGuard<'_, ()> {
        self.gate.read_recursive()
    }

    pub(super) fn stream_born(&self, entry: &StreamEntry, core: &Arc<Core>) {
        self.streams.lock().push(entry.clone());
        let mut live = self.live.lock();
        live.retain(|core| core.strong_count() > 0);
        live.push(Arc::downgrade(core));
    }

    /// The streams that are in use.
    pub(super) fn live_streams(&self) -> Vec<Arc<Core>> {
        self.live.lock().iter().filter_map(std::sync::Weak::upgrade).collect()
    }

    /// Destroys a stream when its work has ended.
    pub(super) fn adopt(&self, device: &Arc<CudaDevice>, orphan: Orphan) {
        self.orphans.lock().push(orphan);
        self.settle_soon(device);
    }

    /// Destroys `remains` as soon as that does not wait. The context is current.
    pub(super) fn bury(&self, device: &Arc<CudaDevice>, remains: Remains) {
        self.remains.lock().push(remains);
        self.settle_soon(device);
    }

    fn settle_soon(&self, device: &Arc<CudaDevice>) {
        self.settle(device.driver);
        if !self.is_empty() {
            self.start_reaper(device);
        }
    }

    fn is_empty(&self) -> bool {
        self.orphans.lock().is_empty() && self.remains.lock().is_empty()
    }

    /// A thread that looks from time to time, until everything is destroyed. It holds the device, which
    /// therefore goes last.
    fn start_reaper(&self, device: &Arc<CudaDevice>) {
        const FIRST_PAUSE: Duration = Duration::from_millis(1);
        const LONGEST_PAUSE: Duration = Duration::from_millis(100);
        if self.reaper_runs.swap(true, Ordering::AcqRel) {
            return;
        }
        let held = device.clone();
        let reap = move || {
            let graveyard = &held.graveyard;
            let mut pause = FIRST_PAUSE;
            loop {
                while !graveyard.is_empty() {
                    std::thread::sleep(pause);
                    pause = (pause * 2).min(LONGEST_PAUSE);
                    if let Ok(_current) = held.enter() {
                        graveyard.settle(held.driver);
                    }
                }
                graveyard.reaper_runs.store(false, Ordering::Release);
                // Whoever buried something just now may have seen this thread still running.
                if graveyard.is_empty() || graveyard.reaper_runs.swap(true, Ordering::AcqRel) {
                    return;
                }
            }
        };
        let started = std::thread::Builder::new().name("warpwire reaper".into()).spawn(reap);
        if let Err(error) = started {
            self.reaper_runs.store(false, Ordering::Release);
            tracing::warn!(%error, "dropped CUDA objects wait for the next call that looks");
        }
    }

    /// Destroys what can be destroyed now without waiting. The context is current.
    pub(super) fn settle(&self, driver: &Driver) {
        self.end_orphans(driver);
        if self.remains.lock().is_empty() {
            return;
        }
        let Some(_alone) = self.gate.try_write() else { return };
        if self.is_busy(driver) {
            return;
        }
        let due = std::mem::take(&mut *self.remains.lock());
        for remains in due {
            let outcome = match remains {
                Remains::Memory(address) => call!(driver, memory_free(address)),
                Remains::Pinned(pointer) => call!(driver, host_free(pointer.0)),
                Remains::Registered(pointer, _owner) => {
                    call!(driver, host_unregister(pointer.0))
                }
                Remains::Imported(address) => call!(driver, ipc_close(address)),
                Remains::Module(module) => call!(driver, module_unload(module)),
            };
            if let Err(error) = outcome {
                tracing::warn!(%error, "a CUDA object was not destroyed");
            }
        }
    }

    /// Gives the streams a moment to become idle; false if there was nothing to destroy, or still is.
    pub(super) fn settle_within(&self, driver: &Driver, patience: Duration) -> bool {
        if self.is_empty() {
            return false;
        }
        let start = Instant::now();
        while start.elapsed() < patience {
            self.settle(driver);
            if self.is_empty() {
                return true;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        false
    }

    /// Runs `call`, which waits for the device, while no stream is at work; `None` if that did not come
    /// to pass in time. The context is current.
    pub(super) fn while_idle<R>(
        &self,
        driver: &Driver,
        patience: Duration,
        call: impl FnOnce() -> R,
    ) -> Option<R> {
        let start = Instant::now();
        loop {
            if let Some(_alone) = self.gate.try_write()
                && !self.is_busy(driver)
            {
                return Some(call());
            }
            if start.elapsed() > patience {
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
                    // On a lost context nothing runs any more; any other error tells nothing.
                    Err(error) => error.kind() != &Kind::DeviceLost,
                }
        })
    }

    fn end_orphans(&self, driver: &Driver) {
        let mut orphans = self.orphans.lock();
        let (mut ended, mut lost) = (Vec::new(), Vec::new());
        for orphan in std::mem::take(&mut *orphans) {
            match driver.stream_is_idle(orphan.entry.handle) {
                Ok(true) => ended.push(orphan),
                Err(error) if error.kind() == &Kind::DeviceLost => lost.push(orphan),
                _ => orphans.push(orphan),
            }
        }
        drop(orphans);
        let dead = |handle| ended.iter().chain(&lost).any(|o: &Orphan| o.entry.handle == handle);
        self.streams.lock().retain(|known| !dead(known.handle));
        for orphan in ended {
            orphan.in_flight.destroy(driver);
            if let Err(error) = call!(driver, stream_destroy(orphan.entry.handle)) {
                tracing::warn!(%error, "a stream was not destroyed");
            }
        }
        // The driver may be inside one of their host calls: on a lost context they stay.
        lost.into_iter().for_each(|orphan| std::mem::forget(orphan.in_flight));
    }
}
