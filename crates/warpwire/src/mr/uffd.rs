//! Hearing of it when host memory is unmapped, moved or dropped: by userfaultfd's events.
//!
//! Ranges are registered for write protection, and nothing in them is ever protected, so that no page fault changes;
//! but the kernel tells of every unmapping, and lets it return only when the event was read. One thread reads them.
//! It takes no lock before it reads, and frees no memory at all: freeing may unmap, which would wait for itself.
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
/// Events of remapping, of dropped contents, of unmapping.
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

/// Some memory that is watched. Dropping it ends that.
pub(super) struct UffdWatch(Arc<Range>);

struct Range {
    start: u64,
    end: u64,
    invalidated: AtomicBool,
}

impl UffdWatch {
    /// Whether any of it was unmapped, moved or dropped since it is watched. Unmappings that have returned count.
    pub(super) fn is_invalidated(&self) -> bool {
        if let Some(Ok(monitor)) = MONITOR.get() {
            monitor.wait_until_noted();
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
    /// Events were, or are being, read that have not been noted yet.
    busy: AtomicBool,
    ranges: Mutex<Vec<Arc<Range>>>,
}

/// Watches `len` bytes at `address` from now on.
pub(super) fn watch(address: u64, len: u64) -> Result<UffdWatch> {
    let monitor = MONITOR.get_or_init(UffdMonitor::start).as_ref().map_err(Clone::clone)?;
    let page = rustix::param::page_size() as u64;
    let (start, end) = (address - address % page, (address + len).next_multiple_of(page));
    // What happened at these addresses before is no news of this memory.
    monitor.wait_until_noted();
    let uffd_watch = UffdWatch(Arc::new(Range { start, end, invalidated: AtomicBool::new(false) }));
    monitor.ranges.lock().push(uffd_watch.0.clone());
    let mut params = [start, end - start, MODE_WRITE_PROTECT, 0];
    monitor.control(UFFDIO_REGISTER, &mut params).map_err(|error| {
        let why = match error.raw_os_error() {
            Some(libc::EBUSY) => "another userfaultfd of this process has it",
            Some(libc::EINVAL) => "it is memory of a sort that userfaultfd does not watch",
            _ => return Error::os("watch host memory", &error),
        };
        Error::new(Kind::Unsupported, "watch host memory").why(why)
    })?;
    Ok(uffd_watch)
}

impl UffdMonitor {
    fn start() -> Result<Self> {
        let flags = libc::O_CLOEXEC | libc::O_NONBLOCK | USER_MODE_ONLY;
        // SAFETY: the call takes flags, and gives a descriptor or an error.
        let fd = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
        let failure = |error: &std::io::Error| {
            Error::os("watch host memory by userfaultfd", error)
                .fix("allow the system call, in a container by its seccomp profile; each use is checked instead")
        };
        let fd = i32::try_from(fd).ok().filter(|fd| *fd >= 0);
        let fd = fd.ok_or_else(|| failure(&std::io::Error::last_os_error()))?;
        // SAFETY: the kernel has just opened it for us.
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
        let thread =
            std::thread::Builder::new().name("warpwire-unmaps".into()).spawn(wait_and_read);
        thread.map_err(|error| failure(&error))?;
        Ok(monitor)
    }

    fn control<const N: usize>(
        &self,
        request: libc::c_ulong,
        words: &mut [u64; N],
    ) -> std::io::Result<()> {
        // SAFETY: the structure of each request is so many words, which the callers' constants say.
        match unsafe { libc::ioctl(self.file.as_raw_fd(), request, words.as_mut_ptr()) } {
            0 => Ok(()),
            _ => Err(std::io::Error::last_os_error()),
        }
    }

    /// Reads events for as long as the process lives.
    fn read_events(&self) {
        let mut events = [0; 16 * EVENT_SIZE];
        loop {
            let mut waiting = [PollFd::from_borrowed_fd(self.file.as_fd(), PollFlags::IN)];
            let _ = poll(&mut waiting, None);
            // Before the read, which lets the unmapping thread go on.
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

    /// Waits until every event that was read is noted.
    fn wait_until_noted(&self) {
        let mut spins = 0;
        while self.busy.load(Ordering::SeqCst) {
            spins += 1;
            super::sync::pause(spins);
        }
    }

    /// Ends the watch of a range, where nobody else watches.
    fn unwatch(&self, range: &Arc<Range>) {
        let (mine, is_last) = {
            let mut ranges = self.ranges.lock();
            let at = ranges.iter().position(|known| Arc::ptr_eq(known, range));
            let mine = at.map(|at| ranges.swap_remove(at));
            (mine, !ranges.iter().any(|other| other.start < range.end && range.start < other.end))
        };
        // Outside of the lock, which the reader of events takes.
        drop(mine);
        if is_last {
            // Memory that was unmapped meanwhile is not registered any more, which is no harm.
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

    fn map() -> *mut std::ffi::c_void {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
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
    fn whatever_takes_memory_away_is_heard_before_it_returns() {
        for round in 0..200 {
            let base = map();
            let Some(uffd_watch) = watch_or_skip(base) else { return };
            // SAFETY: our own mapping, of which nobody holds a reference.
            unsafe {
                base.cast::<u8>().write_bytes(7, LEN);
                assert!(!uffd_watch.is_invalidated(), "touching it is no event");
                match round % 3 {
                    0 => munmap(base.byte_add(LEN / 2), 4096).unwrap(),
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
    fn neighbours_are_not_meant_and_what_is_forgotten_is_quiet() {
        let (one, two) = (map(), map());
        let (Some(first), Some(second)) = (watch_or_skip(one), watch_or_skip(two)) else { return };
        drop(first);
        // SAFETY: our own mapping, of which nobody holds a reference.
        unsafe { munmap(one, LEN).unwrap() };
        assert!(!second.is_invalidated());
        // SAFETY: as above.
        unsafe { munmap(two, LEN).unwrap() };
        assert!(second.is_invalidated());
    }

    #[test]
    fn memory_that_cannot_be_watched_says_so() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing.
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
        // A file on a disk is none of userfaultfd's business; one in memory may be.
        if let Err(error) = watch(base.addr() as u64, 4096) {
            assert!(error.to_string().contains("watch host memory"), "{error}");
        }
        assert!(watch(4096, 4096).is_err());
        // SAFETY: mapped above.
        unsafe { munmap(base, 4096).unwrap() };
    }
}
