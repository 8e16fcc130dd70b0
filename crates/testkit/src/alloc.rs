//! Counts allocations per thread and per process.
#![allow(unsafe_code)] // an allocator is unsafe to write

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

static PROCESS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    static THREAD: Cell<u64> = const { Cell::new(0) };
}

/// The system allocator with counters. A test binary enables it with `#[global_allocator] static
/// ALLOCATOR: CountingAllocator = CountingAllocator;`.
pub struct CountingAllocator;

impl CountingAllocator {
    /// Allocations of the calling thread so far.
    pub fn thread_allocations() -> u64 {
        THREAD.with(Cell::get)
    }

    /// Allocations of the whole process so far. Meaningful only in a process that runs one test at
    /// a time.
    pub fn process_allocations() -> u64 {
        PROCESS.load(Ordering::Relaxed)
    }

    fn count() {
        PROCESS.fetch_add(1, Ordering::Relaxed);
        // The counter of a thread that is being torn down is gone.
        let _ = THREAD.try_with(|count| count.set(count.get() + 1));
    }
}

// SAFETY: every call is forwarded unchanged; counting does not allocate.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        Self::count();
        // SAFETY: the caller's guarantees are those that `System` requires.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller's guarantees are those that `System` requires.
        unsafe { System.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, len: usize) -> *mut u8 {
        Self::count();
        // SAFETY: the caller's guarantees are those that `System` requires.
        unsafe { System.realloc(at, layout, len) }
    }
}

#[cfg(test)]
mod tests {
    use super::CountingAllocator;

    #[global_allocator]
    static ALLOCATOR: CountingAllocator = CountingAllocator;

    #[test]
    fn allocations_are_counted_per_thread_and_per_process() {
        let (thread, process) =
            (CountingAllocator::thread_allocations(), CountingAllocator::process_allocations());
        let mut bytes = std::hint::black_box(vec![1_u8; 100]);
        bytes.reserve_exact(1000);
        assert_eq!(CountingAllocator::thread_allocations() - thread, 2);
        std::thread::spawn(|| drop(std::hint::black_box(vec![1_u8; 100]))).join().unwrap();
        assert!(
            CountingAllocator::process_allocations() - process
                > CountingAllocator::thread_allocations() - thread
        );
    }
}
