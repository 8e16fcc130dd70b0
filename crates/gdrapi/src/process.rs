//! The library's state, per process.
//!
//! A child created by `fork` has its parent's memory, but not its threads, windows or CUDA context:
//! locks may be held by threads that do not exist in the child, and handles refer to windows that
//! it did not inherit. So a child starts empty. The pointer to the state is in a page that the
//! kernel clears in a child (`MADV_WIPEONFORK`): detecting a fork costs one load, where `getpid`
//! would cost a system call.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ptr::{NonNull, null_mut};
use std::sync::atomic::{AtomicPtr, Ordering};
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};
use warpwire::mem::Allocation;

use crate::log::{self, Level};
use crate::session::{Pin, Session};
use crate::table::Table;

/// The objects that one process has open.
pub(crate) struct Process {
    pub(crate) sessions: Table<Session>,
    pub(crate) pins: Table<Pin>,
    /// Allocations of the test helpers, by address.
    pub(crate) simulated: Mutex<BTreeMap<u64, Allocation>>,
}

type ProcessCell = AtomicPtr<Process>;

const PAGE: usize = 4096;

/// The page that is zero in a forked child.
static CLEARED_BY_FORK: AtomicPtr<ProcessCell> = AtomicPtr::new(null_mut());

impl Process {
    /// The state of this process.
    pub(crate) fn get() -> &'static Self {
        let process_cell = process_cell();
        let current = process_cell.load(Ordering::Acquire);
        // SAFETY: the stored pointer comes from Box::into_raw below and is never freed.
        unsafe { current.as_ref() }.unwrap_or_else(|| start(process_cell))
    }

    fn new() -> Self {
        let salt = salt();
        Self {
            sessions: Table::new(salt),
            // A different salt, so that a session's handle is not mistaken for a pin's.
            pins: Table::new(salt.rotate_left(16) ^ 0x5eed),
            simulated: Mutex::default(),
        }
    }
}

/// The word that holds the pointer. No lock: it might be held at the time of a fork.
fn process_cell() -> &'static ProcessCell {
    let current = CLEARED_BY_FORK.load(Ordering::Acquire);
    // SAFETY: only pointers to mapped or leaked words are stored, and these are never freed.
    unsafe { current.as_ref() }.unwrap_or_else(init_process_cell)
}

#[cold]
fn init_process_cell() -> &'static ProcessCell {
    let page = map_page();
    let process_cell = page.map_or_else(
        // If a page cannot be mapped, continue without fork detection.
        || Box::into_raw(Box::new(ProcessCell::new(null_mut()))),
        |page| page.as_ptr().cast(),
    );
    let installed = CLEARED_BY_FORK.compare_exchange(
        null_mut(),
        process_cell,
        Ordering::AcqRel,
        Ordering::Acquire,
    );
    let process_cell = match installed {
        Ok(_) => process_cell,
        Err(earlier) => {
            if let Some(page) = page {
                // SAFETY: mapped above, and not shared with any other thread.
                let _ = unsafe { munmap(page.as_ptr().cast(), PAGE) };
            }
            earlier
        }
    };
    // SAFETY: a zeroed page is a null AtomicPtr, aligned; it is never unmapped.
    unsafe { &*process_cell }
}

fn map_page() -> Option<NonNull<u8>> {
    let protection = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address chosen by the kernel affects no existing memory.
    let page = unsafe { mmap_anonymous(null_mut(), PAGE, protection, MapFlags::PRIVATE) }.ok()?;
    // SAFETY: mapped above with this length.
    if let Err(error) = unsafe { madvise(page, PAGE, Advice::LinuxWipeOnFork) } {
        log::line(Level::Warn, || format!("forked children will not be detected: {error}"));
    }
    NonNull::new(page.cast())
}

#[cold]
fn start(process_cell: &'static ProcessCell) -> &'static Process {
    let fresh = Box::into_raw(Box::new(Process::new()));
    match process_cell.compare_exchange(null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: just allocated, and never freed from here on.
        Ok(_) => unsafe { &*fresh },
        Err(earlier) => {
            // SAFETY: allocated above, and not shared with any other thread.
            drop(unsafe { Box::from_raw(fresh) });
            // SAFETY: not null, so set by another thread, and never freed.
            unsafe { &*earlier }
        }
    }
}

/// A number that differs between a child and its parent.
fn salt() -> u32 {
    let time =
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
    let mixed = (time ^ u64::from(std::process::id()) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    // The top bit stays clear, which leaves many generations before a slot wraps around.
    (mixed >> 33) as u32
}
