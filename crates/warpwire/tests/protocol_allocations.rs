//! Invariant 5 of the protocol: once connected, a queue pair allocates nothing, whatever work goes through it.
//!
//! It stands here because counting needs an allocator of its own, which is unsafe code, and the protocol crate has none.
#![allow(unsafe_code, clippy::unwrap_used, clippy::panic, missing_docs)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

#[path = "../../proto/benches/pump/mod.rs"]
mod pump;

use pump::{Pump, WORK, len_of};

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// The system's allocator, counting for each thread.
struct Counting;

// SAFETY: every call is passed on unchanged; the counter is a thread's own and needs no allocation itself.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promise is passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, place: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is passed on.
        unsafe { System.dealloc(place, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn no_packet_allocates() {
    for (name, op, packets) in WORK {
        let mut pump = Pump::new(1024, 64);
        let before = COUNT.with(Cell::get);
        pump.run(op, len_of(op, packets, 1024), 10_000);
        assert_eq!(COUNT.with(Cell::get) - before, 0, "{name}");
    }
}

#[test]
fn the_counter_counts() {
    let before = COUNT.with(Cell::get);
    drop(std::hint::black_box(Box::new(7)));
    assert!(COUNT.with(Cell::get) > before);
}
