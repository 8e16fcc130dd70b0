//! Events that a program holds.

use parking_lot::{Condvar, Mutex};

/// Events of an object that were handed out and not acknowledged: destroying it waits for them.
#[derive(Debug, Default)]
pub struct Unacked {
    count: Mutex<u64>,
    changed: Condvar,
}

impl Unacked {
    /// An event is handed out.
    pub fn add(&self) {
        *self.count.lock() += 1;
    }

    /// That many were acknowledged. More than there are count as all.
    pub fn ack(&self, events: u64) {
        let mut count = self.count.lock();
        *count = count.saturating_sub(events);
        self.changed.notify_all();
    }

    /// Waits until all are acknowledged.
    pub fn wait(&self) {
        let mut count = self.count.lock();
        while *count > 0 {
            self.changed.wait(&mut count);
        }
    }
}
