//! Nothing is allocated for a post or a poll.

use warpwire::ibv::{Completion, Op, ReceiveRequest, Request};

use crate::ibv::world::World;
use testkit::{CountingAllocator, cases};

cases!(CASES: posting_and_polling);

fn posting_and_polling() {
    const COUNT_EACH: usize = 40;
    let world = World::new();
    let (from, to) = ([world.a.mr.sge(0, 64)], [world.b.mr.sge(0, 64)]);
    let receives = [ReceiveRequest { id: 1, data: &to }; COUNT_EACH];
    let sends = [Request::new(2, Op::Send).with(&from); COUNT_EACH];
    let mut found = [Completion::EMPTY; 16];
    let before = CountingAllocator::of_process();
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
    assert_eq!(CountingAllocator::of_process(), before, "allocations");
    // The counter counts.
    let boxed = std::hint::black_box(vec![1_u8; 100]);
    assert!(CountingAllocator::of_process() > before, "{}", boxed.len());
}
