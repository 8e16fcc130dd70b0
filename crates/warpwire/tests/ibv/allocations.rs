//! Nothing is allocated for a post or a poll.
#![allow(unsafe_code)] // an allocator is

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicU64, Ordering};

use warpwire::ibv::{Completion, Op, ReceiveRequest, Request};

use crate::cases;
use crate::world::World;

cases!(posting_and_polling);

struct Counting;

static COUNT: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call goes to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        COUNT.fetch_add(1, Ordering::Relaxed);
        // SAFETY: as it came.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as it came.
        unsafe { System.dealloc(at, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn posting_and_polling() {
    const COUNT_EACH: usize = 40;
    let world = World::new();
    let (from, to) = ([world.a.mr.sge(0, 64)], [world.b.mr.sge(0, 64)]);
    let receives = [ReceiveRequest { id: 1, data: &to }; COUNT_EACH];
    let sends = [Request::new(2, Op::Send).with(&from); COUNT_EACH];
    let mut found = [Completion::EMPTY; 16];
    let before = COUNT.load(Ordering::Relaxed);
    world.b.qp.post_receive(&receives).unwrap();
    world.a.qp.post_send(&sends).unwrap();
    let mut ended = 0;
    while ended < 2 * COUNT_EACH {
        for cq in [&world.a.cq, &world.b.cq] {
            let count = cq.poll(&mut found).unwrap();
            assert!(found[..count].iter().all(Completion::is_success));
            ended += count;
        }
        world.a.cq.arm(false).unwrap();
        std::thread::yield_now();
    }
    assert_eq!(COUNT.load(Ordering::Relaxed), before, "allocations");
    // The counter counts.
    let boxed = std::hint::black_box(vec![1_u8; 100]);
    assert!(COUNT.load(Ordering::Relaxed) > before, "{}", boxed.len());
}
