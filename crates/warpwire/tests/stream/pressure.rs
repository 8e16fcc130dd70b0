//! Back-pressure: full queues are reported as `Busy`, and nothing is lost.

use warpwire::error::Kind;
use warpwire::mem::Condition;
use warpwire::verbs::{Completion, QpOptions, ReceiveRequest};

use crate::stream::fixture::*;
use testkit::cases;

cases!(Fixture; ONCE:
    a_full_send_queue_is_busy,
    unpolled_completions_block_new_work,
    lagging_streams_block_new_work,
    too_many_waits_are_busy,
    a_full_receive_queue_is_busy,
);

fn a_full_send_queue_is_busy(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let qp = QpOptions::default().with_send_depth(8);
    let [a, _b] = fixture.pair_with(&testbed, &fixture.options().with_qp(qp));
    let (stream, gate) = (fixture.stream(), fixture.word64());
    stream.wait_value(&gate, Condition::AtLeast, 1).unwrap();
    let mut count = 0;
    let busy = loop {
        match a.queue(&stream, &nop(count)) {
            Ok(_) => count += 1,
            Err(error) => break error,
        }
        assert!(count < 1000);
    };
    assert_eq!(busy.kind(), &Kind::Busy, "{busy}");
    assert!(count >= 8, "{count}");
    assert_eq!(a.poll(&mut [Completion::EMPTY; 4]).unwrap(), 0);
    gate.store(1).unwrap();
    for id in 0..count {
        assert_eq!(done(&a), id);
    }
    a.queue(&stream, &nop(count)).unwrap();
    assert_eq!(done(&a), count);
}

fn unpolled_completions_block_new_work(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let qp = QpOptions::default().with_send_depth(8);
    let [a, _b] = fixture.pair_with(&testbed, &fixture.options().with_qp(qp));
    let stream = fixture.stream();
    let mut count = 0;
    while let Ok(ticket) = a.queue(&stream, &nop(count)) {
        a.wait_send(&stream, ticket).unwrap();
        sync(&stream);
        count += 1;
        assert!(count < 1000);
    }
    for id in 0..count {
        assert_eq!(done(&a), id);
    }
    a.queue(&stream, &nop(7)).unwrap();
    assert_eq!(done(&a), 7);
}

/// The CPU polls completions that a stream still waits for: their CQEs are not reused before the
/// stream has passed.
fn lagging_streams_block_new_work(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let qp = QpOptions::default().with_send_depth(4);
    let [a, _b] = fixture.pair_with(&testbed, &fixture.options().with_qp(qp));
    let (stream, slow, gate) = (fixture.stream(), fixture.stream(), fixture.word64());
    slow.wait_value(&gate, Condition::AtLeast, 1).unwrap();
    let first = a.queue(&stream, &nop(0)).unwrap();
    a.wait_send(&slow, first).unwrap();
    assert_eq!(done(&a), 0);
    // One lap of the CQ, and no further.
    let mut count = 1;
    let busy = loop {
        match a.queue(&stream, &nop(count)) {
            Ok(_) => assert_eq!(done(&a), count),
            Err(error) => break error,
        }
        count += 1;
        assert!(count < 1000);
    };
    assert_eq!(busy.kind(), &Kind::Busy, "{busy}");
    assert_eq!(count, 8, "the CQ has twice the depth");
    gate.store(1).unwrap();
    sync(&slow);
    for id in count..1000 {
        a.queue(&stream, &nop(id)).unwrap();
        assert_eq!(done(&a), id);
    }
}

fn too_many_waits_are_busy(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, b] = fixture.pair_with(&testbed, &fixture.options().with_max_waits(3));
    let far = fixture.memory(&testbed.b, 64);
    post_receives(&b, &far, 5, 8);
    let stream = fixture.stream();
    for _ in 0..3 {
        b.wait_receive(&stream).unwrap();
    }
    let busy = b.wait_receive(&stream).unwrap_err();
    assert_eq!(busy.kind(), &Kind::Busy, "{busy}");
    let send = |id| warpwire::verbs::SendRequest::new(id, warpwire::verbs::WrOp::Send);
    for id in 0..3 {
        a.post_now(&send(id).inline(&[1; 8])).unwrap();
    }
    sync(&stream);
    // The refused wait consumed no receive.
    assert_eq!(b.wait_receive(&stream).unwrap().number(), 3);
    a.post_now(&send(3).inline(&[1; 8])).unwrap();
    sync(&stream);
}

fn a_full_receive_queue_is_busy(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let qp = QpOptions::default().with_receive_depth(4);
    let [_a, b] = fixture.pair_with(&testbed, &fixture.options().with_qp(qp));
    let far = fixture.memory(&testbed.b, 64);
    let data = [far.sge(0, 8)];
    let many = [ReceiveRequest { id: 1, data: &data }; 5];
    let busy = b.post_receive(&many).unwrap_err();
    assert_eq!(busy.kind(), &Kind::Busy, "{busy}");
    let first = b.post_receive(&many[..4]).unwrap();
    assert_eq!(first.number(), 0, "a refused batch posts nothing");
    let busy = b.post_receive(&many[..1]).unwrap_err();
    assert_eq!(busy.kind(), &Kind::Busy, "{busy}");
}
