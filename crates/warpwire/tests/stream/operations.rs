//! Every call of stream queue pairs, when it succeeds.

use warpwire::error::Kind;
use warpwire::mem::Condition;
use warpwire::stream::Descriptors;
use warpwire::verbs::{
    Atomic, Completion, CompletionKind, QpOptions, ReceiveRequest, SendRequest, WrOp,
};
use warpwire_apps::pattern::Pattern;

use crate::stream::fixture::*;
use testkit::cases;

cases!(Fixture; CASES:
    a_queued_send_carries_what_the_kernel_wrote,
    every_operation_can_be_queued,
    prepared_work_is_not_sent_before_it_is_posted,
    dropped_work_leaves_no_hole,
    the_cpu_posts_in_order,
    streams_that_share_a_queue_pair_keep_its_order,
    several_streams_wait_for_one_completion,
    each_stream_waits_for_its_own_receive,
    completions_are_in_order_with_their_ids,
    waits_for_completed_work_do_not_block,
    waits_are_prepared_and_posted_separately,
    ring_buffers_wrap_around_many_times,
);

fn a_queued_send_carries_what_the_kernel_wrote(fixture: &Fixture) {
    const LEN: u32 = 16 << 10;
    let testbed = fixture.testbed();
    let [a, b] = fixture.pair(&testbed);
    let (from, to) =
        (fixture.memory(&testbed.a, LEN.into()), fixture.memory(&testbed.b, LEN.into()));
    let pattern = Pattern::load(&fixture.gpu).unwrap();
    let (sender, receiver) = (fixture.stream(), fixture.stream());
    let (gate, wrong) = (fixture.word64(), fixture.word64());

    post_receives(&b, &to, 1, LEN);
    b.wait_receive(&receiver).unwrap();
    pattern.check(&receiver, &to.memory.whole().unwrap(), 9, &wrong).unwrap();

    sender.wait_value(&gate, Condition::AtLeast, 1).unwrap();
    pattern.fill(&sender, &from.memory.whole().unwrap(), 9).unwrap();
    let ticket =
        a.queue(&sender, &SendRequest::new(5, WrOp::Send).with(&[from.sge(0, LEN)])).unwrap();
    a.wait_send(&sender, ticket).unwrap();
    // After the wait the buffer may be reused.
    pattern.fill(&sender, &from.memory.whole().unwrap(), 10).unwrap();

    assert_blocked(&sender);
    assert_blocked(&receiver);
    gate.store(1).unwrap();
    sync(&sender);
    sync(&receiver);
    assert_eq!(wrong.load().unwrap(), 0);
    assert!(a.failure().is_none() && b.failure().is_none());
}

fn every_operation_can_be_queued(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, b] = fixture.pair(&testbed);
    let (near, far) = (fixture.memory(&testbed.a, 4096), fixture.memory(&testbed.b, 4096));
    let wanted = near.pattern(0, 1024, 1);
    let other = far.pattern(3072, 512, 2);
    far.memory.write(2048, &41_u64.to_le_bytes()).unwrap();
    let stream = fixture.stream();
    post_receives(&b, &far, 3, 0);

    let data = [near.sge(0, 1024)];
    a.queue(&stream, &SendRequest::new(1, WrOp::Write(far.mr.remote(0))).with(&data)).unwrap();
    let data = [near.sge(1024, 512)];
    a.queue(&stream, &SendRequest::new(2, WrOp::Read(far.mr.remote(3072))).with(&data)).unwrap();
    let data = [near.sge(2048, 8)];
    let add = WrOp::Atomic(far.mr.remote(2048), Atomic::FetchAdd { add: 1 });
    a.queue(&stream, &SendRequest::new(3, add).with(&data)).unwrap();
    let imm = WrOp::WriteImm(far.mr.remote(1024), *b"imm!");
    a.queue(&stream, &SendRequest::new(4, imm).inline(b"small")).unwrap();
    a.queue(&stream, &SendRequest::new(5, WrOp::SendImm(*b"more")).inline(b"")).unwrap();
    let last = a.queue(&stream, &SendRequest::new(6, WrOp::Send).inline(b"")).unwrap();
    a.wait_send(&stream, last).unwrap();
    sync(&stream);

    let ids: Vec<u64> = (0..6).map(|_| next(&a)).map(|done| expect_success(done).id).collect();
    assert_eq!(ids, [1, 2, 3, 4, 5, 6]);
    assert_eq!(far.read(0, 1024), wanted);
    assert_eq!(near.read(1024, 512), other);
    assert_eq!((near.word(2048), far.word(2048)), (41, 42));
    assert_eq!(far.read(1024, 5), b"small");
    let kinds: Vec<_> = (0..3).map(|_| expect_success(next(&b)).kind).collect();
    let [first, second] =
        [CompletionKind::WriteImm(*b"imm!"), CompletionKind::ReceiveImm(*b"more")];
    assert_eq!(kinds, [first, second, CompletionKind::Receive]);
}

fn expect_success(completion: Completion) -> Completion {
    assert!(completion.is_success(), "{completion:?}");
    completion
}

fn prepared_work_is_not_sent_before_it_is_posted(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, _b] = fixture.pair(&testbed);
    let far = fixture.memory(&testbed.b, 64);
    let write = WrOp::Write(far.mr.remote(0));
    let work = a.prepare(&SendRequest::new(1, write).inline(b"later")).unwrap();
    std::thread::sleep(SHORT_WAIT);
    assert_eq!(far.read(0, 5), [0; 5]);

    let stream = fixture.stream();
    let gate = fixture.word64();
    stream.wait_value(&gate, Condition::AtLeast, 1).unwrap();
    let ticket = work.ticket();
    assert_eq!(work.post(&stream).unwrap(), ticket);
    std::thread::sleep(SHORT_WAIT);
    assert_eq!(far.read(0, 5), [0; 5]);
    gate.store(1).unwrap();
    assert_eq!(expect_success(next(&a)).id, 1);
    assert_eq!(far.read(0, 5), b"later");
}

fn dropped_work_leaves_no_hole(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let qp = QpOptions::default().with_send_depth(4);
    let [a, _b] = fixture.pair_with(&testbed, &fixture.options().with_qp(qp));
    let far = fixture.memory(&testbed.b, 64);
    let stream = fixture.stream();
    let write = |id: u64| SendRequest::new(id, WrOp::Write(far.mr.remote(id * 8)));
    // Dropped at the end of the queue: its space is free again, any number of times.
    for _ in 0..1000 {
        drop(a.prepare(&write(0).inline(b"never")).unwrap());
    }
    // Dropped between others, with any length: the later ones are posted, the dropped one is a NOP.
    for round in 0..50_u64 {
        let first = a.prepare(&write(0).inline(b"never")).unwrap();
        let second = a.prepare(&write(0).inline(&[7; 60])).unwrap();
        let third = a.prepare(&write(1).inline(&round.to_le_bytes())).unwrap();
        drop(second);
        drop(first);
        third.post(&stream).unwrap();
        assert_eq!(expect_success(next(&a)).id, 1);
        assert_eq!((far.word(0), far.word(8)), (0, round));
    }
    // All dropped, in both orders.
    for backwards in [true, false] {
        let mut all: Vec<_> =
            (0..3).map(|_| a.prepare(&write(0).inline(b"never")).unwrap()).collect();
        while !all.is_empty() {
            drop(if backwards { all.pop().unwrap() } else { all.remove(0) });
        }
    }
    let ticket = a.queue(&stream, &write(2).inline(b"at last!")).unwrap();
    a.wait_send(&stream, ticket).unwrap();
    sync(&stream);
    assert_eq!(far.read(16, 8), b"at last!");
    assert_eq!(far.word(0), 0);
}

fn the_cpu_posts_in_order(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, _b] = fixture.pair(&testbed);
    let far = fixture.memory(&testbed.b, 64);
    let (stream, gate) = (fixture.stream(), fixture.word64());
    let write = |id: u64| SendRequest::new(id, WrOp::Write(far.mr.remote(0)));
    a.post_now(&write(1).inline(&[1; 8])).unwrap();
    assert_eq!(expect_success(next(&a)).id, 1);

    stream.wait_value(&gate, Condition::AtLeast, 1).unwrap();
    a.queue(&stream, &write(2).inline(&[2; 8])).unwrap();
    let error = a.post_now(&write(3).inline(&[3; 8])).unwrap_err();
    assert_eq!(error.kind(), &Kind::Busy, "{error}");
    assert_eq!(far.read(0, 8), [1; 8]);
    gate.store(1).unwrap();
    sync(&stream);
    a.post_now(&write(4).inline(&[4; 8])).unwrap();
    // A stream posts after the CPU.
    a.queue(&stream, &write(5).inline(&[5; 8])).unwrap();
    let ids: Vec<u64> = (0..3).map(|_| expect_success(next(&a)).id).collect();
    assert_eq!(ids, [2, 4, 5]);
    assert_eq!(far.read(0, 8), [5; 8]);
}

fn streams_that_share_a_queue_pair_keep_its_order(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, _b] = fixture.pair(&testbed);
    let far = fixture.memory(&testbed.b, 64);
    let (first, second, gate) = (fixture.stream(), fixture.stream(), fixture.word64());
    let write = |id: u64| SendRequest::new(id, WrOp::Write(far.mr.remote(0)));
    first.wait_value(&gate, Condition::AtLeast, 1).unwrap();
    a.queue(&first, &write(1).inline(&[1; 8])).unwrap();
    a.queue(&second, &write(2).inline(&[2; 8])).unwrap();
    a.queue(&first, &write(3).inline(&[3; 8])).unwrap();
    a.queue(&second, &write(4).inline(&[4; 8])).unwrap();
    assert_blocked(&second);
    assert_eq!(far.word(0), 0, "the second stream must not ring for the first");
    gate.store(1).unwrap();
    sync(&first);
    sync(&second);
    let ids: Vec<u64> = (0..4).map(|_| expect_success(next(&a)).id).collect();
    assert_eq!(ids, [1, 2, 3, 4]);
    assert_eq!(far.read(0, 8), [4; 8]);
}

fn several_streams_wait_for_one_completion(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, b] = fixture.pair(&testbed);
    let to = fixture.memory(&testbed.b, 64);
    post_receives(&b, &to, 1, 8);
    let streams: Vec<_> = (0..4).map(|_| fixture.stream()).collect();
    let ticket = b.wait_receive(&streams[0]).unwrap();
    for stream in &streams[1..] {
        b.wait_for(stream, ticket).unwrap();
    }
    streams.iter().for_each(assert_blocked);
    a.post_now(&SendRequest::new(1, WrOp::Send).inline(b"everyone")).unwrap();
    streams.iter().for_each(sync);
    assert_eq!(to.read(0, 8), b"everyone");
}

fn each_stream_waits_for_its_own_receive(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, b] = fixture.pair(&testbed);
    let to = fixture.memory(&testbed.b, 64);
    post_receives(&b, &to, 4, 8);
    let streams: Vec<_> = (0..4).map(|_| fixture.stream()).collect();
    let tickets: Vec<_> = streams.iter().map(|stream| b.wait_receive(stream).unwrap()).collect();
    let numbers: Vec<u64> = tickets.iter().map(|ticket| ticket.number()).collect();
    assert_eq!(numbers, [0, 1, 2, 3]);
    for at in 0..4 {
        a.post_now(&SendRequest::new(1, WrOp::Send).inline(&[at as u8; 8])).unwrap();
        sync(&streams[at]);
        assert_eq!(to.read(at as u64 * 8, 8), [at as u8; 8]);
        if let Some(next) = streams.get(at + 1) {
            assert_blocked(next);
        }
    }
}

fn completions_are_in_order_with_their_ids(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, b] = fixture.pair(&testbed);
    let to = fixture.memory(&testbed.b, 4096);
    let streams = [fixture.stream(), fixture.stream()];
    let (mut sent, mut received) = (Vec::new(), Vec::new());
    let mut some = [Completion::EMPTY; 7];
    for round in 0..100_u64 {
        let receive = ReceiveRequest { id: 1000 + round, data: &[to.sge(0, 8)] };
        b.post_receive(&[receive]).unwrap();
        let request = SendRequest::new(round, WrOp::Send).inline(&[1; 8]);
        a.queue(&streams[round as usize % 2], &request).unwrap();
        for (qp, ids) in [(&a, &mut sent), (&b, &mut received)] {
            let count = qp.poll(&mut some).unwrap();
            ids.extend(some[..count].iter().map(|completion| expect_success(*completion).id));
        }
    }
    while sent.len() < 100 {
        sent.push(expect_success(next(&a)).id);
    }
    while received.len() < 100 {
        received.push(expect_success(next(&b)).id);
    }
    assert_eq!(sent, (0..100).collect::<Vec<u64>>());
    assert_eq!(received, (1000..1100).collect::<Vec<u64>>());
    assert_eq!(a.poll(&mut some).unwrap() + b.poll(&mut some).unwrap(), 0);
}

fn waits_for_completed_work_do_not_block(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, _b] = fixture.pair(&testbed);
    let stream = fixture.stream();
    let mut tickets = Vec::new();
    for id in 0..1000 {
        tickets.push(a.queue(&stream, &nop(id)).unwrap());
        assert_eq!(expect_success(next(&a)).id, id);
    }
    // The CQEs of these tickets have been reused many times.
    for ticket in tickets {
        a.wait_send(&stream, ticket).unwrap();
    }
    sync(&stream);
}

fn waits_are_prepared_and_posted_separately(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let [a, b] = fixture.pair(&testbed);
    let to = fixture.memory(&testbed.b, 64);
    post_receives(&b, &to, 2, 8);
    let stream = fixture.stream();
    // A dropped wait consumes no receive: the next wait is for the same one.
    let wait = b.prepare_wait_receive().unwrap();
    assert_eq!(wait.ticket().number(), 0);
    drop(wait);
    let wait = b.prepare_wait_receive().unwrap();
    assert_eq!(wait.ticket().number(), 0);
    // The receive completes, and the CPU polls it, before the wait is posted to the stream.
    a.post_now(&SendRequest::new(1, WrOp::Send).inline(&[1; 8])).unwrap();
    assert_eq!(expect_success(next(&b)).id, 0);
    wait.post(&stream).unwrap();
    sync(&stream);
    let wait = b.prepare_wait_receive().unwrap();
    wait.post(&stream).unwrap();
    assert_blocked(&stream);
    a.post_now(&SendRequest::new(2, WrOp::Send).inline(&[2; 8])).unwrap();
    sync(&stream);
}

/// More WQEBBs than a 16-bit index counts, and hundreds of laps of every ring buffer.
fn ring_buffers_wrap_around_many_times(fixture: &Fixture) {
    const MESSAGES: u64 = 40_000; // of two WQEBBs each
    let testbed = fixture.testbed();
    let qp = QpOptions::default().with_send_depth(64).with_receive_depth(64);
    let [a, b] = fixture.pair_with(&testbed, &fixture.options().with_qp(qp));
    let to = fixture.pinned(&testbed.b, 64 * 64);
    let (sender, receiver) = (fixture.stream(), fixture.stream());
    let mut some = [Completion::EMPTY; 64];
    let (mut posted, mut queued, mut waited, mut seen) = (0, 0, 0, 0);
    let mut list = Descriptors::on(&sender);
    let mut waits = Descriptors::on(&receiver);
    while seen < MESSAGES {
        while posted < MESSAGES && posted - seen < 64 {
            let range = to.sge(posted % 64 * 64, 64);
            match b.post_receive(&[ReceiveRequest { id: posted, data: &[range] }]) {
                Ok(_) => posted += 1,
                Err(busy) => {
                    assert_eq!(busy.kind(), &Kind::Busy, "{busy}");
                    break;
                }
            }
        }
        while queued < posted {
            let mut bytes = [0; 60];
            bytes[..8].copy_from_slice(&queued.to_le_bytes());
            match list.send(&a, &SendRequest::new(queued, WrOp::Send).inline(&bytes)) {
                Ok(_) => queued += 1,
                Err(busy) => {
                    assert_eq!(busy.kind(), &Kind::Busy, "{busy}");
                    break;
                }
            }
        }
        list.post().unwrap();
        while waited < posted {
            waits.wait_receive(&b).unwrap();
            waited += 1;
        }
        waits.post().unwrap();
        a.poll(&mut some).unwrap();
        let count = b.poll(&mut some).unwrap();
        for done in &some[..count] {
            assert_eq!(expect_success(*done).id, seen);
            assert_eq!(to.word(seen % 64 * 64), seen);
            seen += 1;
        }
    }
    sync(&sender);
    sync(&receiver);
    assert!(a.failure().is_none() && b.failure().is_none());
}
