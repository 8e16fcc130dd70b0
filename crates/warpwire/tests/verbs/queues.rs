//! Rings that fill, wrap and are shared; completion queues of every sort; entries that others write.

use std::time::Duration;

use warpwire::error::Kind as ErrorKind;
use warpwire::hca::QueueMemory;
use warpwire::mlx5::{self, Builder, Doorbell, Opcode, Record, Scratch};
use warpwire::verbs::{
    AsyncEvent, Change, Completion, Cq, CqOptions, Drive, Op, Qp, QpOptions, ReceiveRequest,
    Remote, Request, SrqOptions, State, Status,
};

use crate::verbs::fixture::{Fixture, Joined, Side, World, connect, same, soon};
use testkit::cases;

cases!(Fixture; CASES:
    unsignaled_chains,
    a_full_ring_is_busy,
    receive_queues_wrap,
    many_share_receives,
    two_queue_pairs_on_one_completion_queue,
);
cases!(Fixture; ONCE:
    indices_wrap_at_sixteen_bits,
    receive_counters_wrap_at_sixteen_bits,
    limits_of_shared_receives,
    shared_receives_outlive_their_users,
    a_shared_receive_in_use,
    the_last_receive_is_told,
    an_overrun_fails_its_users,
    overruns_that_nobody_minds,
    a_collapsed_queue,
    queues_in_device_memory,
    entries_of_other_writers,
    only_the_first_error,
);

fn unsignaled_chains(fixture: &Fixture) {
    let world = fixture.world();
    let joined =
        world.join(QpOptions { signal_all: false, send_depth: 16, ..QpOptions::default() });
    let far = fixture.host(&world.b, 4096);
    for round in 0..50u64 {
        let mut batch = joined.a.qp.batch();
        for n in 0..15 {
            let at = far.mr.remote(n * 8);
            let bytes = (round * 100 + n).to_ne_bytes();
            batch.push(&Request::new(n, Op::Write(at)).inline(&bytes).unsignaled()).unwrap();
        }
        batch.push(&Request::new(99, Op::Write(far.mr.remote(200))).inline(b"last")).unwrap();
        batch.post();
        world.done(&joined.a.sends, 99);
        assert!((0..15).all(|n| far.word(n * 8) == round * 100 + n));
    }
    world.quiet(&joined.a.sends);
    // A batch that is dropped never was.
    let mut batch = joined.a.qp.batch();
    batch.push(&Request::new(5, Op::Write(far.mr.remote(0))).inline(b"never")).unwrap();
    drop(batch);
    joined.a.qp.post_send(&[Request::new(6, Op::Nop)]).unwrap();
    world.done(&joined.a.sends, 6);
    assert_eq!(far.word(0), 4900);
}

fn a_full_ring_is_busy(fixture: &Fixture) {
    let world = fixture.world();
    let joined = world.join(QpOptions { send_depth: 4, receive_depth: 4, ..QpOptions::default() });
    for round in 0..20u64 {
        let mut posted = 0;
        let refused = loop {
            match joined.a.qp.post_send(&[Request::new(round * 1000 + posted, Op::Nop)]) {
                Ok(()) => posted += 1,
                Err(why) => break why,
            }
        };
        assert_eq!(refused.kind(), &ErrorKind::Busy);
        assert!(refused.to_string().contains("full"), "{refused}");
        assert!((4..=64).contains(&posted));
        for n in 0..posted {
            world.done(&joined.a.sends, round * 1000 + n);
        }
        // All or none.
        let many = vec![Request::new(0, Op::Nop); posted as usize + 1];
        assert_eq!(joined.a.qp.post_send(&many).unwrap_err().kind(), &ErrorKind::Busy);
        world.step();
        let mut one = [Completion::EMPTY];
        assert_eq!(joined.a.sends.poll(&mut one).unwrap(), 0, "nothing of it was posted");
    }
    let four = [ReceiveRequest { id: 1, data: &[] }; 4];
    joined.b.qp.post_receive(&four[..3]).unwrap();
    assert_eq!(joined.b.qp.post_receive(&four[..2]).unwrap_err().kind(), &ErrorKind::Busy);
    joined.b.qp.post_receive(&four[..1]).unwrap();
    assert_eq!(joined.b.qp.post_receive(&four[..1]).unwrap_err().kind(), &ErrorKind::Busy);
    let srq = world.b.context.create_srq(&world.b.pd, SrqOptions { depth: 3, ranges: 1 }).unwrap();
    srq.post_receive(&four[..3]).unwrap();
    assert_eq!(srq.post_receive(&four[..1]).unwrap_err().kind(), &ErrorKind::Busy);
}

/// The doorbell's and the record's counts go round; at each step of the last lap the engine has time to be misled.
fn indices_wrap_at_sixteen_bits(fixture: &Fixture) {
    let world = fixture.world();
    let joined = world.join(QpOptions { signal_all: false, inline: 20, ..QpOptions::default() });
    let far = fixture.host(&world.b, 4096);
    let nop = Request::new(1, Op::Nop).unsignaled();
    let mut posted = 0u64;
    while posted < 2 * 65_536 + 300 {
        let near_the_end = posted % 65_536 > 65_536 - 200 || posted % 65_536 < 30;
        let count = if near_the_end { 9 } else { 100 };
        let mut requests = vec![nop; count];
        let value = posted.to_ne_bytes();
        requests.push(Request::new(posted, Op::Write(far.mr.remote(8))).inline(&value));
        joined.a.qp.post_send(&requests).unwrap();
        world.done(&joined.a.sends, posted);
        assert_eq!(far.word(8), posted);
        posted += requests.len() as u64;
        if near_the_end {
            joined.a.qp.post_receive(&[]).unwrap(); // a ring without news
            world.drive_for(Duration::from_millis(22));
            assert_eq!(joined.a.qp.state().unwrap(), State::Rts, "at block {posted}");
        }
    }
}

fn exchange(joined: &Joined, rounds: u64, depth: u64) {
    let post = |id| joined.b.qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
    (0..depth).for_each(post);
    let mut done = [Completion::EMPTY; 32];
    let (mut sent, mut acknowledged, mut received) = (0, 0, 0);
    while received < rounds {
        while sent < rounds && sent < acknowledged + depth {
            let imm = (sent as u32).to_be_bytes();
            joined.a.qp.post_send(&[Request::new(sent, Op::SendImm(imm))]).unwrap();
            sent += 1;
        }
        acknowledged += joined.a.sends.poll(&mut done).unwrap() as u64;
        let count = joined.b.receives.poll(&mut done).unwrap();
        for arrived in &done[..count] {
            let imm = warpwire::verbs::CompletionKind::ReceiveImm((received as u32).to_be_bytes());
            assert_eq!(
                (arrived.id, arrived.kind, arrived.status),
                (received, imm, Status::Success)
            );
            post(received + depth);
            received += 1;
        }
    }
}

fn receive_queues_wrap(fixture: &Fixture) {
    let world = fixture.world();
    let joined = world.join(QpOptions { receive_depth: 8, ..QpOptions::default() });
    exchange(&joined, 500, 8);
}

fn receive_counters_wrap_at_sixteen_bits(fixture: &Fixture) {
    let world = fixture.world();
    let joined = world.join(QpOptions { receive_depth: 32, ..QpOptions::default() });
    exchange(&joined, 66_000, 32);
}

/// Twenty queue pairs take from one queue of receives; each message is whole, and each slot used again and again.
fn many_share_receives(fixture: &Fixture) {
    const PAIRS: usize = 20;
    let world = fixture.world();
    let end = &world.b;
    let srq = end.context.create_srq(&end.pd, SrqOptions { depth: 15, ranges: 2 }).unwrap();
    let memory = fixture.host(end, 64 * 16_384);
    let cq = end.context.create_cq(64).unwrap();
    let post = |slot: u64| {
        let data = [memory.mr.sge(slot * 16_384, 3000), memory.mr.sge(slot * 16_384 + 8192, 7000)];
        srq.post_receive(&[ReceiveRequest { id: slot, data: &data }]).unwrap();
    };
    (0..15).for_each(post);
    // More is sent than received at a time, so that senders are told to come again. If twenty of them come after 10 µs,
    // an emulated processor does nothing else: 3 messages a second were seen to arrive. These come after 10 ms.
    let min_rnr_timer = if end.is_device() { 20 } else { QpOptions::default().min_rnr_timer };
    let mut pairs = Vec::new();
    for _ in 0..PAIRS {
        let options = QpOptions { srq: Some(srq.clone()), min_rnr_timer, ..QpOptions::default() };
        let a = world.side(&world.a, QpOptions::default());
        let qp = end.context.create_qp(&end.pd, &cq, &cq, options).unwrap();
        assert!(qp.post_receive(&[]).unwrap_err().to_string().contains("shared"));
        connect(&a.qp, &qp);
        pairs.push((a, qp));
    }
    let near = fixture.host(&world.a, 1 << 16);
    let wanted = near.pattern(0, 10_000, 5);
    let mut done = [Completion::EMPTY];
    let (mut sent, mut received) = (0, 0);
    let start = std::time::Instant::now();
    while received < 600 {
        assert!(start.elapsed() < soon() * 3, "{received} of {sent} have come");
        while sent < 600 && sent < received + 40 {
            let len = 1 + (sent * 397) % 10_000;
            let request = Request::new(sent as u64, Op::Send);
            let (side, _) = &pairs[sent % PAIRS];
            side.qp.post_send(&[request.with(&[near.mr.sge(0, len as u32)])]).unwrap();
            sent += 1;
        }
        for (side, _) in &pairs {
            while side.sends.poll(&mut done).unwrap() == 1 {
                assert!(done[0].is_success(), "{:?}", done[0]);
            }
        }
        while cq.poll(&mut done).unwrap() == 1 {
            let (slot, len) = (done[0].id, done[0].len as usize);
            assert!(done[0].is_success() && pairs.iter().any(|(_, qp)| qp.number() == done[0].qpn));
            let first = len.min(3000);
            same(&memory.read(slot * 16_384, first), &wanted[..first], "a shared receive");
            let rest = memory.read(slot * 16_384 + 8192, len - first);
            same(&rest, &wanted[first..len], "a shared receive's second range");
            post(slot);
            received += 1;
        }
    }
}

/// A queue pair with shared receives, and its peer.
fn sharing(world: &World, depth: u32) -> (warpwire::verbs::Srq, Joined) {
    let end = &world.b;
    let srq = end.context.create_srq(&end.pd, SrqOptions { depth, ranges: 1 }).unwrap();
    let options = QpOptions { srq: Some(srq.clone()), ..QpOptions::default() };
    let joined = world.join_with(QpOptions::default(), options);
    world.b.news();
    (srq, joined)
}

fn send(world: &World, side: &Side) {
    side.qp.post_send(&[Request::new(0, Op::Send)]).unwrap();
    world.done(&side.sends, 0);
}

fn limits_of_shared_receives(fixture: &Fixture) {
    let world = fixture.world();
    let (srq, joined) = sharing(&world, 8);
    srq.post_receive(&[ReceiveRequest { id: 0, data: &[] }; 6]).unwrap();
    srq.arm(4);
    let news = || {
        world.b.news().into_iter().filter(|e| matches!(e, AsyncEvent::LimitReached { .. })).count()
    };
    send(&world, &joined.a);
    send(&world, &joined.a);
    assert_eq!(news(), 0, "four wait, which is not fewer than four");
    send(&world, &joined.a);
    world.until("news", || world.b.context.events().wait(Duration::ZERO).unwrap());
    assert_eq!(news(), 1);
    send(&world, &joined.a);
    assert_eq!(news(), 0, "told once");
    srq.arm(4);
    assert_eq!(news(), 1, "it was passed already");
    srq.arm(1);
    srq.arm(0);
    send(&world, &joined.a);
    send(&world, &joined.a);
    assert_eq!(news(), 0, "nobody asks any more");
}

/// Slots come back, whatever becomes of the queue pairs that used them and of their completions.
fn shared_receives_outlive_their_users(fixture: &Fixture) {
    let world = fixture.world();
    let end = &world.b;
    let srq = end.context.create_srq(&end.pd, SrqOptions { depth: 7, ranges: 1 }).unwrap();
    let cq = end.context.create_cq(16).unwrap();
    for round in 0..40 {
        let options = QpOptions { srq: Some(srq.clone()), ..QpOptions::default() };
        let side = world.side(&world.a, QpOptions::default());
        let qp = end.context.create_qp(&end.pd, &cq, &cq, options).unwrap();
        connect(&side.qp, &qp);
        srq.post_receive(&[ReceiveRequest { id: round, data: &[] }; 3]).unwrap();
        (0..3).for_each(|_| send(&world, &side));
        if round % 2 == 0 {
            qp.modify(&Change::to(State::Reset)).unwrap();
        }
        drop(qp); // with three completions that nobody has read
    }
    world.quiet(&cq);
}

/// A queue pair goes in the middle of a message: the receive that it took serves the next.
fn a_shared_receive_in_use(fixture: &Fixture) {
    let world = fixture.world();
    let end = &world.b;
    let near = fixture.host(&world.a, 1 << 20);
    let far = fixture.host(end, 1 << 20);
    let srq = end.context.create_srq(&end.pd, SrqOptions { depth: 1, ranges: 1 }).unwrap();
    let options = QpOptions { srq: Some(srq.clone()), ..QpOptions::default() };
    let data = [near.mr.sge(0, 1 << 20)];
    let place = [far.mr.sge(0, 1 << 20)];
    srq.post_receive(&[ReceiveRequest { id: 1, data: &place }]).unwrap();
    for round in 0..4 {
        let joined = world.join_with(QpOptions::default(), options.clone());
        joined.a.qp.post_send(&[Request::new(2, Op::Send).with(&data)]).unwrap();
        let begun = || joined.b.qp.stats().unwrap().packets_received > 0;
        world.until("a message that has begun", begun);
        if round % 2 == 0 {
            joined.b.qp.modify(&Change::to(State::Reset)).unwrap();
        }
    }
    let joined = world.join_with(QpOptions::default(), options);
    let wanted = near.pattern(0, 1 << 20, 4);
    joined.a.qp.post_send(&[Request::new(2, Op::Send).with(&data)]).unwrap();
    world.done(&joined.a.sends, 2);
    world.done(&joined.b.receives, 1);
    same(&far.read(0, 1 << 20), &wanted, "the receive that nobody used up");
    srq.post_receive(&[ReceiveRequest { id: 1, data: &place }]).unwrap();
}

fn the_last_receive_is_told(fixture: &Fixture) {
    let world = fixture.world();
    let (srq, joined) = sharing(&world, 8);
    srq.post_receive(&[ReceiveRequest { id: 0, data: &[] }; 5]).unwrap();
    send(&world, &joined.a);
    world.done(&joined.b.receives, 0);
    joined.b.qp.modify(&Change::to(State::Err)).unwrap();
    world.quiet(&joined.b.receives); // what is shared is not flushed
    let qpn = joined.b.qp.number();
    assert_eq!(world.b.news(), [AsyncEvent::LastReceiveReached { qpn }]);
    // Another takes from it.
    let options = QpOptions { srq: Some(srq.clone()), ..QpOptions::default() };
    let other = world.join_with(QpOptions::default(), options);
    (0..4).for_each(|_| send(&world, &other.a));
}

fn two_queue_pairs_on_one_completion_queue(fixture: &Fixture) {
    let world = fixture.world();
    let cq = world.a.context.create_cq(256).unwrap();
    let mut peers = Vec::new();
    for _ in 0..2 {
        let qp = world.a.context.create_qp(&world.a.pd, &cq, &cq, QpOptions::default()).unwrap();
        let peer = world.side(&world.b, QpOptions::default());
        connect(&qp, &peer.qp);
        peers.push((qp, peer));
    }
    let mut counts = [[0; 2]; 2];
    for id in 0..50 {
        for (qp, peer) in &peers {
            qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
            peer.qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
            qp.post_send(&[Request::new(id, Op::Send)]).unwrap();
            peer.qp.post_send(&[Request::new(id, Op::Send)]).unwrap();
        }
    }
    for _ in 0..200 {
        let done = world.next(&cq);
        let which = usize::from(done.qpn == peers[1].0.number());
        let count = &mut counts[which][usize::from(done.is_receive())];
        assert_eq!((done.id, done.is_success()), (*count, true), "each queue in its own order");
        *count += 1;
    }
    assert_eq!(counts, [[50; 2]; 2]);
}

/// Nobody reads, and it is full: that is told once, and those who use it fail; others go on.
fn an_overrun_fails_its_users(fixture: &Fixture) {
    let world = fixture.world();
    let bystander = world.join(QpOptions::default());
    let cq = world.a.context.create_cq(4).unwrap();
    let other_cq = world.a.context.create_cq(64).unwrap();
    let qp = |sends: &Cq, receives: &Cq| {
        let qp =
            world.a.context.create_qp(&world.a.pd, sends, receives, QpOptions::default()).unwrap();
        let peer = world.side(&world.b, QpOptions::default());
        connect(&qp, &peer.qp);
        (qp, peer)
    };
    let users: [(Qp, Side); 3] = [qp(&cq, &other_cq), qp(&other_cq, &cq), qp(&cq, &cq)];
    let unconcerned = qp(&other_cq, &other_cq);
    let nops: Vec<_> = (0..10).map(|id| Request::new(id, Op::Nop)).collect();
    users[0].0.post_send(&nops).unwrap();
    world.until("an overrun", || world.a.context.events().wait(Duration::ZERO).unwrap());
    world.drive_for(Duration::from_millis(2));
    let news = world.a.news();
    let overruns =
        news.iter().filter(|e| **e == AsyncEvent::CqOverrun { cqn: cq.number() }).count();
    assert_eq!(overruns, 1, "{news:?}");
    for (user, _) in &users {
        assert_eq!(user.state().unwrap(), State::Err);
    }
    let mut done = [Completion::EMPTY; 16];
    assert_eq!(cq.poll(&mut done).unwrap(), 4, "what fitted is there");
    assert!(done[..4].iter().zip(0..).all(|(done, id)| done.id == id && done.is_success()));
    users[0].0.post_send(&nops).unwrap();
    world.drive_for(Duration::from_millis(2));
    assert_eq!(cq.poll(&mut done).unwrap(), 0, "it takes no more");
    assert_eq!(unconcerned.0.state().unwrap(), State::Rts);
    world.works(&bystander);
}

fn overruns_that_nobody_minds(fixture: &Fixture) {
    let world = fixture.world();
    let options = CqOptions { entries: 4, ignore_overrun: true, ..CqOptions::default() };
    let cq = world.a.context.create_cq_with(options).unwrap();
    let qp = world.a.context.create_qp(&world.a.pd, &cq, &cq, QpOptions::default()).unwrap();
    let peer = world.side(&world.b, QpOptions::default());
    connect(&qp, &peer.qp);
    world.a.news();
    for count in 1..=10u16 {
        qp.post_send(&[Request::new(0, Op::Nop)]).unwrap();
        world.drive_for(Duration::from_millis(1));
        let place = u64::from(count - 1) % 4;
        let tail = cq.memory().bytes().load_u32(place * 64 + 60).unwrap();
        let tail = mlx5::Tail::parse(tail.to_ne_bytes());
        assert_eq!((tail.counter, tail.owner), (count - 1, (count - 1) / 4 % 2 == 1));
    }
    assert_eq!((world.a.news(), qp.state().unwrap()), (vec![], State::Rts));
}

fn a_collapsed_queue(fixture: &Fixture) {
    let world = fixture.world();
    let options =
        CqOptions { entries: 1, collapsed: true, ignore_overrun: true, memory: None, held: false };
    let cq = world.a.context.create_cq_with(options).unwrap();
    let qp = world.a.context.create_qp(&world.a.pd, &cq, &cq, QpOptions::default()).unwrap();
    let peer = world.side(&world.b, QpOptions::default());
    connect(&qp, &peer.qp);
    let latest = |reserved| {
        let tail = cq.memory().bytes().load_u32(60).unwrap();
        mlx5::collapsed_latest(reserved, mlx5::Tail::parse(tail.to_ne_bytes()).counter)
    };
    assert_eq!(latest(0), None);
    for count in 1..=20u64 {
        qp.post_send(&[Request::new(0, Op::Nop)]).unwrap();
        world.until("the counter", || latest(count) == Some(count - 1));
    }
}

/// Queues, records and doorbells behind a window of a simulated GPU, and in its pinned memory.
fn queues_in_device_memory(fixture: &Fixture) {
    let world = fixture.world();
    let gpu = fixture.gpu();
    let (a, b) = (QpOptions::default(), QpOptions { send_ranges: 5, ..QpOptions::default() });
    let behind = |len: u64| {
        let memory = gpu.alloc(len).unwrap();
        QueueMemory::window(memory.window().unwrap())
    };
    let options =
        CqOptions { entries: 64, memory: Some(behind(Cq::memory_for(64))), ..CqOptions::default() };
    let cq = world.a.context.create_cq_with(options).unwrap();
    let memory = Some(behind(Qp::memory_for(&a).unwrap()));
    let qp = world.a.context.create_qp(&world.a.pd, &cq, &cq, QpOptions { memory, ..a }).unwrap();
    let pinned = gpu.alloc_pinned(Qp::memory_for(&b).unwrap()).unwrap();
    let memory = Some(QueueMemory::pinned(pinned).unwrap());
    let peer = world.side(&world.b, QpOptions { memory, ..b });
    connect(&qp, &peer.qp);
    let far = fixture.host(&world.b, 4096);
    for id in 0..300 {
        qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
        qp.post_send(&[Request::new(id, Op::Write(far.mr.remote(8))).inline(&id.to_ne_bytes())])
            .unwrap();
        world.done(&cq, id);
        assert_eq!(far.word(8), id);
        peer.qp.post_send(&[Request::new(id, Op::Send)]).unwrap();
        world.done(&cq, id);
        world.done(&peer.sends, id);
    }
    let short = QpOptions { memory: Some(behind(64)), ..QpOptions::default() };
    assert!(world.a.context.create_qp(&world.a.pd, &cq, &cq, short).is_err());
    let short = CqOptions { entries: 64, memory: Some(behind(64)), ..CqOptions::default() };
    assert!(world.a.context.create_cq_with(short).is_err());
}

/// Puts an entry into a send queue by hand.
fn put(qp: &Qp, index: u16, blocks: u64, entry: &[u8]) {
    let (memory, layout) = qp.queues();
    let place = u64::from(index) % blocks;
    memory.bytes().write(layout.send + place * 64, entry).unwrap();
}

/// The manners of other writers: the last entry's own bytes as the doorbell, either half, the record alone, the
/// doorbell alone, the entry behind the doorbell; and nobody tells the engine.
fn entries_of_other_writers(fixture: &Fixture) {
    let drive = Drive::Thread { spin: Duration::ZERO, core: None };
    let world = fixture.driven(drive);
    let joined = world.join(QpOptions { watched: true, ..QpOptions::default() });
    let qp = &joined.a.qp;
    let far = fixture.host(&world.b, 4096);
    let (memory, layout) = qp.queues();
    let Remote { address, rkey } = far.mr.remote(8);
    let mut scratch = Scratch::default();
    for index in 0..60u16 {
        let value = u64::from(index) + 1000;
        let entry = Builder::new(&mut scratch, Opcode::RdmaWrite, index, qp.number());
        let entry =
            entry.signaled().remote(address, rkey).inline(&value.to_ne_bytes()).finish().unwrap();
        let (doorbell, next) = (entry.doorbell(), Doorbell::next(qp.number(), index + 1));
        let manner = index % 5;
        if manner != 4 {
            put(qp, index, 1 << 15, entry.bytes());
        }
        let store = |at: u64, value: [u8; 8]| {
            memory.bytes().store_u64(at, u64::from_ne_bytes(value)).unwrap()
        };
        match manner {
            0 => store(layout.doorbell, doorbell),
            1 => store(layout.doorbell + 256, doorbell),
            2 => store(layout.doorbell, next),
            3 => memory
                .bytes()
                .store_u32(layout.record + 4, u32::from_ne_bytes(Record::word(index + 1)))
                .unwrap(),
            _ => {
                store(layout.doorbell, next);
                std::thread::sleep(Duration::from_micros(300));
                put(qp, index, 1 << 15, entry.bytes());
            }
        }
        let done = joined.a.sends.next(Duration::from_secs(5)).unwrap().expect("it ends");
        assert!(done.is_success(), "{index}: {done:?}");
        assert_eq!(far.word(8), value);
    }
}

/// An entry may ask for a completion of the first error only.
fn only_the_first_error(fixture: &Fixture) {
    let world = fixture.world();
    let joined = world.join(QpOptions { signal_all: false, ..QpOptions::default() });
    let qp = &joined.a.qp;
    let (memory, layout) = qp.queues();
    let mut scratch = Scratch::default();
    for index in 0..4u16 {
        let entry = Builder::new(&mut scratch, Opcode::RdmaWrite, index, qp.number());
        let mut bytes = entry.remote(0, 0).inline(b"x").finish().unwrap().bytes().to_vec();
        bytes[11] |= 1 << 2; // completions: of the first error
        put(qp, index, 1 << 15, &bytes);
    }
    let word = u32::from_ne_bytes(Record::word(4));
    memory.bytes().store_u32(layout.record + 4, word).unwrap();
    world.a.context.hca().ring(qp.number());
    assert_eq!(world.next(&joined.a.sends).status, Status::RemoteAccess);
    world.quiet(&joined.a.sends);
}
