//! Descriptor lists: one submission, all or nothing.

use warpwire::error::Kind;
use warpwire::mem::{Condition, Word, WordWidth};
use warpwire::stream::Descriptors;
use warpwire::verbs::{ReceiveRequest, SendRequest, WrOp};

use crate::stream::fixture::*;
use testkit::cases;

cases!(Fixture; CASES:
    a_list_does_everything_in_order,
    all_four_wait_conditions,
    bytes_are_copied_when_added,
    a_failing_element_leaves_nothing_behind,
    a_dropped_list_has_no_effect,
    two_queue_pairs_play_ping_pong_in_lists,
    a_wait_may_follow_its_request_in_the_list,
);

fn a_list_does_everything_in_order(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, b] = fixture.pair(&testbed);
    let (near, far) = (fixture.memory(&testbed.a, 4096), fixture.memory(&testbed.b, 4096));
    let (gate, passed) = (fixture.word32(), fixture.word64());
    let (sender, receiver) = (fixture.stream(), fixture.stream());
    post_receives(&b, &far, 1, 1024);

    let mut wanted = vec![0; 1024];
    warpwire_apps::pattern::fill_bytes(&mut wanted, 3, 0);
    let mut list = Descriptors::on(&sender);
    list.wait_value(&gate, Condition::Equal, 7).unwrap();
    list.write_memory(&near.memory.region(0, 1024).unwrap(), &wanted).unwrap();
    let data = [near.sge(0, 1024)];
    let request = SendRequest::new(1, WrOp::Send).with(&data);
    let ticket = list.send(&a, &request).unwrap();
    list.wait_send(&a, ticket).unwrap();
    list.write_value(&passed, 1 << 40).unwrap();
    assert_eq!((list.len(), list.is_empty()), (5, false));
    list.post().unwrap();
    assert!(list.is_empty());
    let mut waits = Descriptors::on(&receiver);
    waits.wait_receive(&b).unwrap();
    waits.post().unwrap();

    assert_blocked(&sender);
    assert_blocked(&receiver);
    assert_eq!(passed.load().unwrap(), 0);
    gate.store(7).unwrap();
    sync(&receiver);
    assert_eq!(far.read(0, 1024), wanted);
    sync(&sender);
    assert_eq!(passed.load().unwrap(), 1 << 40);
    // Posting an empty list succeeds.
    list.post().unwrap();
}

fn all_four_wait_conditions(fixture: &Fixture) {
    let stream = fixture.stream();
    let high = 1_u64 << 63;
    // Condition, width, value, a word that does not satisfy the condition, one that does.
    let table = [
        (Condition::AtLeast, WordWidth::Bits32, 5, 4, 6),
        (Condition::AtLeast, WordWidth::Bits32, 0xffff_fff0, 0xffff_ff00, 3),
        (Condition::AtLeast, WordWidth::Bits64, 1 << 40, (1 << 40) - 1, 1 << 40),
        (Condition::AtLeast, WordWidth::Bits64, 3, high | 3, 4),
        (Condition::Equal, WordWidth::Bits32, 5, 6, 5),
        (Condition::Equal, WordWidth::Bits64, high, 0, high),
        (Condition::And, WordWidth::Bits32, 0b110, 0b1001, 0b0100),
        (Condition::And, WordWidth::Bits64, high, 1, high | 1),
        (Condition::Nor, WordWidth::Bits32, 0xffff_0000, 0x0000_ffff, 0x0000_fffe),
        (Condition::Nor, WordWidth::Bits64, u64::MAX << 1, 1, 0),
    ];
    for (condition, width, value, before, after) in table {
        let memory = fixture.gpu.alloc_pinned(8).unwrap();
        let word: Word = match width {
            WordWidth::Bits32 => memory.word32(0).unwrap(),
            WordWidth::Bits64 => memory.word64(0).unwrap(),
        };
        word.store(before).unwrap();
        let mut list = Descriptors::on(&stream);
        let added = list.wait_value(&word, condition, value);
        if condition == Condition::Nor && !fixture.gpu.capabilities().stream_wait_nor.is_yes() {
            assert_eq!(added.unwrap_err().kind(), &Kind::Unsupported);
            continue;
        }
        added.unwrap();
        list.post().unwrap();
        assert_blocked(&stream);
        word.store(after).unwrap();
        sync(&stream);
    }
}

fn bytes_are_copied_when_added(fixture: &Fixture) {
    let stream = fixture.stream();
    let gate = fixture.word64();
    let memory = fixture.gpu.alloc(1 << 20).unwrap();
    memory.write(0, &vec![0xee; 1 << 20]).unwrap();
    let mut list = Descriptors::on(&stream);
    list.wait_value(&gate, Condition::AtLeast, 1).unwrap();
    let mut expected = Vec::new();
    let mut bytes = Vec::new();
    // Words and copies, unaligned lengths and offsets, an empty range.
    for (at, (offset, len)) in
        [(0, 4), (64, 64), (129, 8), (1000, 3), (4096, 300_000), (600_000, 1), (700_001, 0)]
            .into_iter()
            .enumerate()
    {
        bytes.clear();
        bytes.resize(len, at as u8 + 1);
        list.write_memory(&memory.region(offset, len as u64).unwrap(), &bytes).unwrap();
        expected.push((offset, bytes.clone()));
        bytes.fill(0xdd);
    }
    list.post().unwrap();
    let wrong = list.write_memory(&memory.region(0, 8).unwrap(), &[0; 9]).unwrap_err();
    assert_eq!(wrong.kind(), &Kind::InvalidArgument, "{wrong}");
    gate.store(1).unwrap();
    sync(&stream);
    for (offset, bytes) in expected {
        let mut found = vec![0; bytes.len() + 1];
        memory.read(offset, &mut found).unwrap();
        assert_eq!(found[..bytes.len()], bytes);
        assert_eq!(found[bytes.len()], 0xee, "after {} bytes at {offset}", bytes.len());
    }
}

fn a_failing_element_leaves_nothing_behind(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, b] = fixture.pair(&testbed);
    let far = fixture.memory(&testbed.b, 64);
    let (stream, word) = (fixture.stream(), fixture.word64());
    post_receives(&b, &far, 1, 8);
    let write = WrOp::Write(far.mr.remote(0));
    // The list is refused as a whole: its third element waits for a request that was prepared
    // outside the list and not posted.
    let elsewhere = a.prepare(&nop(9)).unwrap();
    let mut list = Descriptors::on(&stream);
    list.write_value(&word, 1).unwrap();
    list.wait_receive(&b).unwrap();
    list.wait_send(&a, elsewhere.ticket()).unwrap();
    list.send(&a, &SendRequest::new(1, write).inline(&[1; 8])).unwrap();
    let error = list.post().unwrap_err();
    assert_eq!(error.kind(), &Kind::InvalidArgument, "{error}");
    assert!(list.is_empty());
    sync(&stream);
    assert_eq!((word.load().unwrap(), far.word(0)), (0, 0));
    drop(elsewhere);
    // Nothing changed: the next wait is for the same receive, and requests can be posted.
    let mut list = Descriptors::on(&stream);
    assert_eq!(list.wait_receive(&b).unwrap().number(), 0);
    drop(list);
    let ticket = a.queue(&stream, &SendRequest::new(2, write).inline(&[2; 8])).unwrap();
    a.wait_send(&stream, ticket).unwrap();
    sync(&stream);
    assert_eq!((done(&a), far.read(0, 8)), (2, vec![2; 8]));
    // A failed stream refuses work; the queue pair still works.
    if fixture.other_gpu().is_some() {
        let broken = fixture.stream();
        broken.call_host(|| std::panic::resume_unwind(Box::new("on purpose"))).unwrap();
        until("the stream fails", || broken.is_idle().is_err());
        let mut list = Descriptors::on(&broken);
        let ticket = list.send(&a, &SendRequest::new(3, write).inline(&[3; 8])).unwrap();
        list.wait_send(&a, ticket).unwrap();
        assert_eq!(list.post().unwrap_err().kind(), &Kind::StreamFailed);
        a.queue(&broken, &SendRequest::new(4, write).inline(&[4; 8])).unwrap_err();
        a.queue(&stream, &SendRequest::new(5, write).inline(&[5; 8])).unwrap();
        assert_eq!((done(&a), far.read(0, 8)), (5, vec![5; 8]));
    }
}

fn a_dropped_list_has_no_effect(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, b] = fixture.pair(&testbed);
    let far = fixture.memory(&testbed.b, 64);
    let stream = fixture.stream();
    post_receives(&b, &far, 1, 8);
    for _ in 0..1000 {
        let mut list = Descriptors::on(&stream);
        let ticket = list.send(&a, &SendRequest::new(1, WrOp::Send).inline(&[1; 8])).unwrap();
        list.wait_send(&a, ticket).unwrap();
        assert_eq!(list.wait_receive(&b).unwrap().number(), 0);
    }
    a.queue(&stream, &SendRequest::new(2, WrOp::Send).inline(&[2; 8])).unwrap();
    b.wait_receive(&stream).unwrap();
    sync(&stream);
    assert_eq!(far.read(0, 8), [2; 8]);
}

fn two_queue_pairs_play_ping_pong_in_lists(fixture: &Fixture) {
    const ROUNDS: u64 = 50;
    let testbed = fixture.testbed();
    let [a, b] = fixture.pair(&testbed);
    let (near, far) = (fixture.pinned(&testbed.a, 8), fixture.pinned(&testbed.b, 8));
    let (ping, pong) = (fixture.stream(), fixture.stream());
    for (qp, buffer) in [(&a, &near), (&b, &far)] {
        for id in 0..ROUNDS {
            qp.post_receive(&[ReceiveRequest { id, data: &[buffer.sge(0, 8)] }]).unwrap();
        }
    }
    let (mut asks, mut answers) = (Descriptors::on(&ping), Descriptors::on(&pong));
    for round in 0..ROUNDS {
        let bytes = (round + 1).to_le_bytes();
        asks.send(&a, &SendRequest::new(round, WrOp::Send).inline(&bytes)).unwrap();
        asks.wait_receive(&a).unwrap();
        answers.wait_receive(&b).unwrap();
        answers.send(&b, &SendRequest::new(round, WrOp::Send).inline(&bytes)).unwrap();
    }
    answers.post().unwrap();
    asks.post().unwrap();
    sync(&ping);
    sync(&pong);
    assert_eq!((near.word(0), far.word(0)), (ROUNDS, ROUNDS));
    for qp in [&a, &b] {
        for _ in 0..2 * ROUNDS {
            assert!(next(qp).is_success());
        }
    }
}

fn a_wait_may_follow_its_request_in_the_list(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, _b] = fixture.pair(&testbed);
    let stream = fixture.stream();
    let mut list = Descriptors::on(&stream);
    // In the other order the stream would wait for ever, so it is refused.
    let work = a.prepare(&nop(1)).unwrap();
    list.wait_send(&a, work.ticket()).unwrap();
    list.send_prepared(work).unwrap();
    assert_eq!(list.post().unwrap_err().kind(), &Kind::InvalidArgument);
    let work = a.prepare(&nop(2)).unwrap();
    let ticket = list.send_prepared(work).unwrap();
    list.wait_send(&a, ticket).unwrap();
    list.post().unwrap();
    sync(&stream);
    assert_eq!(done(&a), 2);
}
