//! Objects whose destruction would wait for the device.
//!
//! `cuMemFree`, `cuMemFreeHost`, `cuIpcCloseMemHandle` and `cuModuleUnload` return only when all work
//! on the device has ended (measured: they block while any stream waits for a word). A program that
//! drops a buffer while a stream waits for that same program's next step would never take that step. A
//! thread for it would not help: while one thread waits in `cuMemFree`, the calls of all others wait
//! too (measured as well). So they are buried here and destroyed when no stream of ours is at work.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::driver::{Driver, call};
use super::stream::InFlight;
use super::sys::{Address, ModuleHandle, StreamHandle};

/// Something to be destroyed.
pub(super) enum Remains {
    Memory(Address),
    Pinned(HostPointer),
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
    streams: Mutex<Vec<StreamEntry>>,
    orphans: Mutex<Vec<Orphan>>,
    remains: Mutex<Vec<Remains>>,
}

impl Graveyard {
    pub(super) fn stream_born(&self, entry: &StreamEntry) {
        self.streams.lock().push(entry.clone());
    }

    pub(super) fn stream_died(&self, handle: StreamHandle) {
        self.streams.lock().retain(|known| known.handle != handle);
    }

    pub(super) fn adopt(&self, orphan: Orphan) {
        self.orphans.lock().push(orphan);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.orphans.lock().is_empty() && self.remains.lock().is_empty()
    }

    /// Destroys `remains` as soon as that does not wait. The context is current.
    pub(super) fn bury(&self, driver: &Driver, remains: Remains) {
        self.remains.lock().push(remains);
        self.settle(driver);
    }

    /// Destroys what can be destroyed now without waiting. The context is current.
    pub(super) fn settle(&self, driver: &Driver) {
        self.end_orphans(driver);
        if self.remains.lock().is_empty() || self.is_busy(driver) {
            return;
        }
        let due = std::mem::take(&mut *self.remains.lock());
        for remains in due {
            let outcome = match remains {
                Remains::Memory(address) => call!(driver, memory_free(address)),
                Remains::Pinned(pointer) => call!(driver, host_free(pointer.0)),
                Remains::Imported(address) => call!(driver, ipc_close(address)),
                Remains::Module(module) => call!(driver, module_unload(module)),
            };
            if let Err(error) = outcome {
                tracing::warn!(%error, "a CUDA object was not destroyed");
            }
        }
    }

    /// Gives the streams a moment to become idle; false if there is nothing to destroy, or still is.
    pub(super) fn settle_within(&self, driver: &Driver, patience: Duration) -> bool {
        if self.is_empty() {
            return false;
        }
        self.wait_idle(driver, patience);
        self.settle(driver);
        self.is_empty()
    }

    /// Whether all streams were idle at once before the time ran out.
    pub(super) fn wait_idle(&self, driver: &Driver, patience: Duration) -> bool {
        let start = Instant::now();
        while self.is_busy(driver) {
            if start.elapsed() > patience {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        true
    }

    fn is_busy(&self, driver: &Driver) -> bool {
        let streams = self.streams.lock();
        streams.iter().any(|stream| {
            // A stream that answers with an error does no more work: freeing goes ahead.
            stream.capturing.load(Ordering::Acquire)
                || !driver.stream_is_idle(stream.handle).unwrap_or(true)
        })
    }

    fn end_orphans(&self, driver: &Driver) {
        let ended: Vec<Orphan> = {
            let mut orphans = self.orphans.lock();
            let (ended, busy) = std::mem::take(&mut *orphans)
                .into_iter()
                .partition(|orphan| driver.stream_is_idle(orphan.entry.handle).unwrap_or(true));
            *orphans = busy;
            ended
        };
        for orphan in ended {
            self.stream_died(orphan.entry.handle);
            orphan.in_flight.destroy(driver);
            if let Err(error) = call!(driver, stream_destroy(orphan.entry.handle)) {
                tracing::warn!(%error, "a stream was not destroyed");
            }
        }
    }
}
