//! What the library knows, per process.
//!
//! A child made by `fork` has its parent's memory but neither its threads, its windows nor its CUDA: locks
//! may be held by threads that are not there, and handles name windows that it did not inherit. So a
//! child starts with nothing. The pointer to what is known lies in a page that the kernel clears in a
//! child: noticing costs one load, where asking for the process number would cost a system call.
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

/// Everything that one process has open.
pub(crate) struct Process {
    pub(crate) sessions: Table<Session>,
    pub(crate) pins: Table<Pin>,
    /// What the test helpers allocated, by address.
    pub(crate) simulated: Mutex<BTreeMap<u64, Allocation>>,
}

type ProcessCell = AtomicPtr<Process>;

const PAGE: usize = 4096;

/// The page that children find empty.
static CLEARED_BY_FORK: AtomicPtr<ProcessCell> = AtomicPtr::new(null_mut());

impl Process {
    /// This process's.
    pub(crate) fn get() -> &'static Self {
        let process_cell = process_cell();
        let current = process_cell.load(Ordering::Acquire);
        // SAFETY: what is stored there comes from Box::into_raw below and is never freed.
        unsafe { current.as_ref() }.unwrap_or_else(|| start(process_cell))
    }

    fn new() -> Self {
        let salt = salt();
        Self {
            sessions: Table::new(salt),
            // Apart, so that a session's number is not taken for a pin's.
            pins: Table::new(salt.rotate_left(16) ^ 0x5eed),
            simulated: Mutex::default(),
        }
    }
}

/// The word that holds the pointer. No lock: it might be held at the moment of a fork.
fn process_cell() -> &'static ProcessCell {
    let current = CLEARED_BY_FORK.load(Ordering::Acquire);
    // SAFETY: only pointers to mapped or leaked words are stored there, which stay for good.
    unsafe { current.as_ref() }.unwrap_or_else(init_process_cell)
}

#[cold]
fn init_process_cell() -> &'static ProcessCell {
    let page = map_page();
    let process_cell = page.map_or_else(
        // Without memory for a page, go on without the protection.
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
                // SAFETY: mapped above and seen by nobody else.
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
    // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
    let page = unsafe { mmap_anonymous(null_mut(), PAGE, protection, MapFlags::PRIVATE) }.ok()?;
    // SAFETY: mapped just now, for this length.
    if let Err(error) = unsafe { madvise(page, PAGE, Advice::LinuxWipeOnFork) } {
        log::line(Level::Warn, || format!("children will not be told apart: {error}"));
    }
    NonNull::new(page.cast())
}

#[cold]
fn start(process_cell: &'static ProcessCell) -> &'static Process {
    let fresh = Box::into_raw(Box::new(Process::new()));
    match process_cell.compare_exchange(null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
        // SAFETY: just made, and never freed from here on.
        Ok(_) => unsafe { &*fresh },
        Err(earlier) => {
            // SAFETY: made above, and seen by nobody else.
            drop(unsafe { Box::from_raw(fresh) });
            // SAFETY: not null, so another thread's, never freed.
            unsafe { &*earlier }
        }
    }
}

/// A number that a child does not share with its parent.
fn salt() -> u32 {
    let time =
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_nanos() as u64);
    let mixed = (time ^ u64::from(std::process::id()) << 40).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    // The top bit stays clear: there is room for many generations before a slot wraps around.
    (mixed >> 33) as u32
}
