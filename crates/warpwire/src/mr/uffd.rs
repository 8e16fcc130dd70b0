//! Detects with userfaultfd events that host memory is unmapped, remapped or discarded.
//!
//! Ranges are registered in write-protect mode, but no page is ever protected, so page faults are
//! unaffected; the kernel nevertheless reports every unmapping, and lets `munmap` return only after
//! the event was read. One thread reads the events. It takes no lock before it reads, and never
//! frees memory: freeing may unmap, and the thread would wait for itself to read the event.
#![allow(unsafe_code)]

use std::fs::File;
use std::io::Read;
use std::os::fd::{AsFd, AsRawFd, FromRawFd};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, poll};

use crate::error::{Error, Kind, Result};

const API: u64 = 0xaa;
const USER_MODE_ONLY: i32 = 1;
const MODE_WRITE_PROTECT: u64 = 1 << 1;
/// `UFFD_FEATURE_EVENT_REMAP`, `_EVENT_REMOVE` and `_EVENT_UNMAP`.
const FEATURES: u64 = 1 << 2 | 1 << 3 | 1 << 6;
const EVENT_REMAP: u8 = 0x14;
const EVENT_REMOVE: u8 = 0x15;
const EVENT_UNMAP: u8 = 0x16;
const EVENT_SIZE: usize = 32;

const READ_WRITE: libc::c_ulong = 3 << 30;
const READ: libc::c_ulong = 2 << 30;

const fn ioctl_number(
    direction: libc::c_ulong,
    number: libc::c_ulong,
    size: usize,
) -> libc::c_ulong {
    direction | (size as libc::c_ulong) << 16 | (API as libc::c_ulong) << 8 | number
}

const UFFDIO_API: libc::c_ulong = ioctl_number(READ_WRITE, 0x3f, 24);
const UFFDIO_REGISTER: libc::c_ulong = ioctl_number(READ_WRITE, 0x00, 32);
const UFFDIO_UNREGISTER: libc::c_ulong = ioctl_number(READ, 0x01, 16);

/// A watched range. Dropping it ends the watch.
pub(super) struct UffdWatch(Arc<Range>);

struct Range {
    start: u64,
    end: u64,
    invalidated: AtomicBool,
}

impl UffdWatch {
    /// Whether any of the range was unmapped, remapped or discarded since the watch began. Includes
    /// every `munmap` that has returned.
    pub(super) fn is_invalidated(&self) -> bool {
        if let Some(Ok(monitor)) = MONITOR.get() {
            monitor.wait_until_handled();
        }
        self.0.invalidated.load(Ordering::Acquire)
    }
}

impl Drop for UffdWatch {
    fn drop(&mut self) {
        if let Some(Ok(monitor)) = MONITOR.get() {
            monitor.unwatch(&self.0);
        }
    }
}

static MONITOR: OnceLock<Result<UffdMonitor>> = OnceLock::new();

struct UffdMonitor {
    file: File,
    /// Set before events are read, and cleared when their ranges have been marked.
    busy: AtomicBool,
    ranges: Mutex<Vec<Arc<Range>>>,
}

/// Watches `len` bytes at `address` from now on.
pub(super) fn watch(address: u64, len: u64) -> Result<UffdWatch> {
    let monitor = MONITOR.get_or_init(UffdMonitor::start).as_ref().map_err(Clone::clone)?;
    let page = rustix::param::page_size() as u64;
    let (start, end) = (address - address % page, (address + len).next_multiple_of(page));
    // Events read so far are about earlier mappings at these addresses.
    monitor.wait_until_handled();
    let uffd_watch = UffdWatch(Arc::new(Range { start, end, invalidated: AtomicBool::new(false) }));
    monitor.ranges.lock().push(uffd_watch.0.clone());
    let mut params = [start, end - start, MODE_WRITE_PROTECT, 0];
    monitor.control(UFFDIO_REGISTER, &mut params).map_err(|error| {
        let why = match error.raw_os_error() {
            Some(libc::EBUSY) => "another userfaultfd of this process watches it",
            Some(libc::EINVAL) => "userfaultfd does not support this kind of memory",
            _ => return Error::os("watch host memory", &error),
        };
        Error::new(Kind::Unsupported, "watch host memory").why(why)
    })?;
    Ok(uffd_watch)
}

impl UffdMonitor {
    fn start() -> Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
        // SAFETY: the call takes flags only, and returns a descriptor or an error.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let failure = |error: &std::io::Error| {
            Error::os("watch host memory by userfaultfd", error).fix(
                "allow the system call (in a container, by its seccomp profile); until then \
                     each use is checked",
            )
        };
        let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0);
        let fd = fd.ok_or_else(|| failure(&std::io::Error::last_os_error()))?;
        // SAFETY: the kernel has just opened it, and nothing else owns it.
        let file = unsafe { File::from_raw_fd(fd) };
        let monitor = Self { file, busy: AtomicBool::new(false), ranges: Mutex::default() };
        monitor.control(UFFDIO_API, &mut [API, FEATURES, 0]).map_err(|error| failure(&error))?;
        let read = || {
            if let Some(Ok(monitor)) = MONITOR.get() {
                monitor.read_events();
            }
        };
        let wait_and_read = move || {
            while MONITOR.get().is_none() {
                std::thread::yield_now();
            }
            read();
        };
        let thread = crate::sync::thread::spawn("warpwire-unmaps", wait_and_read);
        thread.map_err(|error| failure(&error))?;
        Ok(monitor)
    }

    fn control<const N: usize>(
        &self,
        request: libc::c_ulong,
        words: &mut [u64; N],
    ) -> std::io::Result<()> {
        // SAFETY: each request's structure is `N` words long, as its constant says, and the kernel
        // accesses no other memory.
        match unsafe { libc::ioctl(self.file.as_raw_fd(), request, words.as_mut_ptr()) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }

    /// Reads events until the process exits.
    fn read_events(&self) {
        let mut events = [0; 16 * EVENT_SIZE];
        loop {
            let mut waiting = [PollFd::from_borrowed_fd(self.file.as_fd(), PollFlags::IN)];
            let _ = poll(&mut waiting, None);
            // Before the read, which lets the unmapping thread continue.
            self.busy.store(true, Ordering::SeqCst);
            let len = (&self.file).read(&mut events).unwrap_or(0);
            for event in events[..len].chunks_exact(EVENT_SIZE) {
                self.handle_event(event);
            }
            self.busy.store(false, Ordering::SeqCst);
        }
    }

    fn handle_event(&self, event: &[u8]) {
        let word = |at: usize| {
            event[at..at + 8].iter().rev().fold(0, |word, byte| word << 8 | u64::from(*byte))
        };
        let (start, end) = match event[0] {
            EVENT_REMOVE | EVENT_UNMAP => (word(8), word(16)),
            EVENT_REMAP => (word(8), word(8).saturating_add(word(24))),
            _ => return,
        };
        for range in self.ranges.lock().iter() {
            if range.start < end && start < range.end {
                range.invalidated.store(true, Ordering::Release);
            }
        }
    }

    /// Spins until every event that was read has been handled.
    fn wait_until_handled(&self) {
        let mut spins = 0;
        while self.busy.load(Ordering::SeqCst) {
            spins += 1;
            super::sync::pause(spins);
        }
    }

    /// Removes a range, and unregisters it unless another watched range overlaps it.
    fn unwatch(&self, range: &Arc<Range>) {
        let (mine, is_last) = {
            let mut ranges = self.ranges.lock();
            let at = ranges.iter().position(|known| Arc::ptr_eq(known, range));
            let mine = at.map(|at| ranges.swap_remove(at));
            (mine, !ranges.iter().any(|other| other.start < range.end && range.start < other.end))
        };
        // Outside the lock, which the event thread takes.
        drop(mine);
        if is_last {
            // Fails harmlessly if the memory has been unmapped: then it is no longer registered.
            let _ = self.control(UFFDIO_UNREGISTER, &mut [range.start, range.end - range.start]);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::mm::{
        Advice, MapFlags, MremapFlags, ProtFlags, madvise, mmap_anonymous, mremap, munmap,
    };

    const LEN: usize = 1 << 20;

    /// The event of an unmapped range may be read after another test has got its addresses.
    static ONE_AT_A_TIME: parking_lot::Mutex<()> = parking_lot::Mutex::new(());

    fn map() -> *mut std::ffi::c_void {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address chosen by the kernel affects no other memory.
        unsafe { mmap_anonymous(std::ptr::null_mut(), LEN, protection, MapFlags::PRIVATE) }.unwrap()
    }

    fn watch_or_skip(base: *mut std::ffi::c_void) -> Option<UffdWatch> {
        match watch(base.addr() as u64, LEN as u64) {
            Ok(uffd_watch) => Some(uffd_watch),
            Err(why) => {
                println!("skipped: {why}");
                None
            }
        }
    }

    #[test]
    fn unmap_remap_and_discard_are_detected_before_they_return() {
        let _alone = ONE_AT_A_TIME.lock();
        for round in 0..200 {
            let base = map();
            let Some(uffd_watch) = watch_or_skip(base) else { return };
            // SAFETY: a mapping of this test, to which no reference exists.
            unsafe {
                base.cast::<u8>().write_bytes(7, LEN);
                assert!(!uffd_watch.is_invalidated(), "an access is not an event");
                match round % 3 {
                    // No hole, which memory of another test could take.
                    0 => {
                        let (page, none) = (base.byte_add(LEN / 2), ProtFlags::empty());
                        mmap_anonymous(page, 4096, none, MapFlags::PRIVATE | MapFlags::FIXED)
                            .map(drop)
                            .unwrap();
                    }
                    1 => {
                        let grown = mremap(base, LEN, 2 * LEN, MremapFlags::MAYMOVE).unwrap();
                        if grown == base {
                            munmap(grown, 2 * LEN).unwrap();
                        } else {
                            munmap(grown, 2 * LEN).unwrap();
                            assert!(uffd_watch.is_invalidated(), "moved");
                            continue;
                        }
                    }
                    _ => madvise(base, 4096, Advice::LinuxDontNeed).unwrap(),
                }
                assert!(uffd_watch.is_invalidated(), "round {round}");
                if round % 3 != 1 {
                    munmap(base, LEN).unwrap();
                }
            }
        }
    }

    #[test]
    fn events_of_other_ranges_and_of_dropped_watches_are_ignored() {
        let _alone = ONE_AT_A_TIME.lock();
        let (one, two) = (map(), map());
        let (Some(first), Some(second)) = (watch_or_skip(one), watch_or_skip(two)) else { return };
        drop(first);
        // SAFETY: a mapping of this test, to which no reference exists.
        unsafe { munmap(one, LEN).unwrap() };
        assert!(!second.is_invalidated());
        // SAFETY: as above.
        unsafe { munmap(two, LEN).unwrap() };
        assert!(second.is_invalidated());
    }

    #[test]
    fn memory_that_cannot_be_watched_is_an_error() {
        let _alone = ONE_AT_A_TIME.lock();
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        // SAFETY: a new mapping at an address chosen by the kernel affects no other memory.
        let base = unsafe {
            rustix::mm::mmap(
                std::ptr::null_mut(),
                4096,
                ProtFlags::READ,
                MapFlags::PRIVATE,
                &file,
                0,
            )
        }
        .unwrap();
        // userfaultfd does not support files on a disk; it may support those on tmpfs.
        if let Err(error) = watch(base.addr() as u64, 4096) {
            assert!(error.to_string().contains("watch host memory"), "{error}");
        }
        assert!(watch(4096, 4096).is_err());
        // SAFETY: mapped above.
        unsafe { munmap(base, 4096).unwrap() };
    }
}
