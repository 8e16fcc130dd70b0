//! Posting and polling do not allocate.

use warpwire::ibv::{Completion, ReceiveRequest, SendRequest, WrOp};

use crate::ibv::testbed::Testbed;
use testkit::{CountingAllocator, cases};

cases!(CASES: posting_and_polling);

fn posting_and_polling() {
    const COUNT_EACH: usize = 40;
    let testbed = Testbed::new();
    let (from, to) = ([testbed.a.mr.sge(0, 64)], [testbed.b.mr.sge(0, 64)]);
    let receives = [ReceiveRequest { id: 1, data: &to }; COUNT_EACH];
    let sends = [SendRequest::new(2, WrOp::Send).with(&from); COUNT_EACH];
    let mut found = [Completion::EMPTY; 16];
    let before = CountingAllocator::process_allocations();
    testbed.b.qp.post_receive(&receives).unwrap();
    testbed.a.qp.post_send(&sends).unwrap();
    let mut ended = 0;
    while ended < 2 * COUNT_EACH {
        for cq in [&testbed.a.cq, &testbed.b.cq] {
            let count = cq.poll(&mut found).unwrap();
            assert!(found[..count].iter().all(Completion::is_success));
            ended += count;
        }
        testbed.a.cq.arm(false).unwrap();
        std::thread::yield_now();
    }
    assert_eq!(CountingAllocator::process_allocations(), before, "allocations");
    // The counter works.
    let boxed = std::hint::black_box(vec![1_u8; 100]);
    assert!(CountingAllocator::process_allocations() > before, "{}", boxed.len());
}
