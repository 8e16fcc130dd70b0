//! Invariant 5: once connected, a queue pair allocates nothing, whatever work goes through it.
#![allow(unsafe_code, clippy::unwrap_used, clippy::panic)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

#[path = "../benches/pump/mod.rs"]
mod pump;

use pump::{Pump, WORK, len_of};
use warpwire_proto::qp::{Mtu, Options, Qp, Ud};

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

#[test]
fn memory_is_what_was_asked_for() {
    // What stands in docs/protocol.md: a queue pair's fixed part, and what each work in its queue adds.
    let one = Qp::new(1, Options { send_depth: 1, ..Options::default() });
    let many = Qp::new(1, Options { send_depth: 1024, ..Options::default() });
    let each = (many.footprint() - one.footprint()) / 1023;
    assert!(one.footprint() <= 1024, "{}", one.footprint());
    assert_eq!(each, 80);
    let datagrams = Ud::new(1, Mtu::new(4096).unwrap(), 1024);
    assert!(datagrams.footprint() <= 1024 * 64 + 512, "{}", datagrams.footprint());
}
