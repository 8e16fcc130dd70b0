//! Work without packets: taken where it can be, in order, with the protocol's own statuses, and over when it must be.
//!
//! Every link runs every case: where there is no such way, the same must come of it by packets.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use warpwire::mr::HostMemory;
use warpwire::verbs::{
    Access, Atomic, Change, Completion, Fence, Mr, Op, QpOptions, ReceiveRequest, Remote, Request,
    State, Status,
};
use warpwire_proto::qp::Access as QpAccess;

use crate::verbs::fixture::{
    End, Fixture, Joined, Kind, Patch, Which, World, connect, impatient, same, soon,
};
use testkit::cases;

cases!(Fixture; CASES:
    direct_where_it_can_be,
    direct_work_keeps_its_order,
    direct_data_is_right_at_every_size,
    direct_atomics_count_with_the_others,
    direct_failures_are_the_protocols,
    direct_ends_with_the_registration,
    direct_ends_with_the_queue_pair,
    direct_over_a_thousand_registrations,
    direct_registrations_end_under_traffic,
    direct_leaves_other_memory_to_packets,
    direct_begins_anew_with_the_next_connection,
    direct_writes_lap_the_queue_with_entries_between,
    direct_work_that_fell_behind_is_caught_up_with,
);

/// Two connected ends with memory, and operations until the peer's memory is mapped.
struct Field {
    world: World,
    joined: Joined,
    near: Patch,
    far: Patch,
}

fn operations(end: &End) -> u64 {
    end.context.stats().direct.operations
}

impl Field {
    fn new(fixture: &Fixture, options: QpOptions) -> Self {
        let world = fixture.world();
        let joined = world.join(options);
        let (near, far) = (fixture.host(&world.a, 1 << 20), fixture.host(&world.b, 1 << 20));
        let field = Self { world, joined, near, far };
        field.warm(fixture.which, &field.far.mr);
        field
    }

    /// Works in that memory until it is done without packets, where it can be.
    fn warm(&self, which: Which, mr: &Mr) {
        let before = operations(&self.world.a);
        let start = Instant::now();
        loop {
            self.run(Request::new(1, Op::Write(mr.remote(0))).inline(b"warm"));
            if !which.is_direct() || operations(&self.world.a) > before {
                return;
            }
            let path = self.joined.a.qp.path().unwrap();
            let stats = self.world.a.context.stats().direct;
            assert!(start.elapsed() < soon(), "never direct: {path}; {stats:?}");
        }
    }

    fn run(&self, request: Request<'_>) {
        self.joined.a.qp.post_send(&[request]).unwrap();
        self.world.done(&self.joined.a.sends, request.id);
    }

    /// Runs it, and tells whether it needed no packets.
    fn is_direct(&self, request: Request<'_>) -> bool {
        let before = operations(&self.world.a);
        self.run(request);
        operations(&self.world.a) > before
    }
}

fn direct_where_it_can_be(fixture: &Fixture) {
    let field = Field::new(fixture, QpOptions::default());
    let Field { world, joined, near, far } = &field;
    let (remote, data) = (far.mr.remote(64), [near.mr.sge(0, 8)]);
    let add = Op::Atomic(remote, Atomic::FetchAdd { add: 1 });
    let direct = fixture.which.is_direct();
    for op in [Op::Write(remote), Op::Read(remote), add] {
        let packets = joined.a.qp.stats().unwrap().packets_sent;
        assert_eq!(field.is_direct(Request::new(1, op).with(&data)), direct, "{op:?}");
        let sent = joined.a.qp.stats().unwrap().packets_sent - packets;
        assert_eq!(sent > 0, !direct, "{sent} packets for {op:?}");
    }
    // Those that take a receive, or nothing at all, go by packets.
    joined.b.qp.post_receive(&[ReceiveRequest { id: 9, data: &[] }; 2]).unwrap();
    for op in [Op::Send, Op::WriteImm(remote, [1; 4]), Op::Write(remote)] {
        assert!(!field.is_direct(Request::new(2, op)), "{op:?}");
    }
    let (mine, theirs) = (world.a.context.stats().direct, world.b.context.stats().direct);
    assert_eq!(mine.operations > 0, direct);
    assert_eq!((theirs.by_peers, theirs.bytes_by_peers), (mine.operations, mine.bytes));
    let path = joined.a.qp.path().unwrap().why;
    let word =
        if direct { "direct: writes, reads and atomics in 1 mapped" } else { "packets only: " };
    assert!(path.contains(word), "{path}");
    let word = if direct { "; direct where" } else { "; packets only: " };
    assert!(world.a.context.path().why.contains(word), "{}", world.a.context.path());
    for _ in 0..2 {
        world.done(&joined.b.receives, 9);
    }
    world.works(joined);
}

/// More than one turn's worth is done as it is posted, so that the queue is empty again and what follows needs no entry.
fn direct_work_that_fell_behind_is_caught_up_with(fixture: &Fixture) {
    const EACH: u64 = 64 << 10;
    let field = Field::new(fixture, QpOptions::default());
    let Field { world, joined, near, far } = &field;
    let data = [near.mr.sge(0, EACH as u32)];
    near.write(0, &[7; EACH as usize]);
    let before = operations(&world.a);
    let mut batch = joined.a.qp.batch();
    for place in 0..8 {
        let request = Request::new(place, Op::Write(far.mr.remote(place * EACH)));
        batch.push(&request.with(&data)).unwrap();
    }
    batch.post();
    // Nobody has polled.
    if fixture.which.is_direct() {
        assert_eq!(operations(&world.a) - before, 8);
    }
    for place in 0..8 {
        world.done(&joined.a.sends, place);
        assert_eq!(far.word(place * EACH + EACH - 8), u64::from_ne_bytes([7; 8]));
    }
}

fn direct_work_keeps_its_order(fixture: &Fixture) {
    let field = Field::new(fixture, QpOptions::default());
    let Field { world, joined, near, far } = &field;
    for round in 0..200_u64 {
        let word = |step: u64| (round * 10 + step).to_ne_bytes();
        // What a message tells of is there when it comes; what follows it has not undone that.
        joined.b.qp.post_receive(&[ReceiveRequest { id: round, data: &[] }]).unwrap();
        let (large, at) = ([near.mr.sge(0, 20_000)], |offset| Op::Write(far.mr.remote(offset)));
        near.write(0, &[round as u8; 20_000]);
        let (first, second, third) = (word(1), word(2), word(3));
        let back = [near.mr.sge(65_536, 16)];
        let work = [
            Request::new(1, at(0)).inline(&first),
            Request::new(2, Op::Send),
            Request::new(3, at(8)).inline(&second),
            Request::new(4, at(4096)).with(&large),
            Request::new(5, Op::Read(far.mr.remote(0))).with(&back),
            // A read may be overtaken, by verbs' own rules.
            Request { fence: Fence::Reads, ..Request::new(6, at(0)).inline(&third) },
        ];
        if round % 3 == 0 {
            joined.a.qp.post_send(&work).unwrap();
        } else {
            work.iter().for_each(|one| joined.a.qp.post_send(&[*one]).unwrap());
        }
        let mut told = [Completion::EMPTY];
        world.until("the message", || joined.b.receives.poll(&mut told).unwrap() == 1);
        assert!(
            far.word(0) == round * 10 + 1 || far.word(0) == round * 10 + 3,
            "before the message"
        );
        for id in 1..=6 {
            world.done(&joined.a.sends, id);
        }
        assert_eq!((far.word(0), far.word(8)), (round * 10 + 3, round * 10 + 2));
        same(&far.read(4096, 20_000), &[round as u8; 20_000], "a large write among small ones");
        assert_eq!((near.word(65_536), near.word(65_544)), (round * 10 + 1, round * 10 + 2));
    }
    assert_eq!(operations(&world.a) > 100, fixture.which.is_direct());
}

fn direct_data_is_right_at_every_size(fixture: &Fixture) {
    let field = Field::new(fixture, QpOptions::default());
    let Field { world, near, far, .. } = &field;
    let sizes = [1, 7, 8, 63, 64, 127, 128, 129, 4095, 4096, 65_537, 262_144, 262_145, 900_001];
    for (seed, len) in sizes.into_iter().enumerate() {
        let (from, to) = (seed as u64 * 3 % 17, seed as u64 * 5 % 23);
        let wanted = near.pattern(from, len, seed as u64);
        let ranges = [
            near.mr.sge(from, (len / 3) as u32),
            near.mr.sge(from + len as u64 / 3, (len - len / 3) as u32),
        ];
        field.run(Request::new(1, Op::Write(far.mr.remote(to))).with(&ranges));
        same(&far.read(to, len), &wanted, "a write");
        near.write(0, &vec![0; 1 << 20]);
        field.run(Request::new(2, Op::Read(far.mr.remote(to))).with(&ranges));
        same(&near.read(from, len), &wanted, "a read");
    }
    let direct = world.a.context.stats().direct;
    assert_eq!(
        direct.operations >= 2 * sizes.len() as u64,
        fixture.which.is_direct(),
        "{direct:?}"
    );
}

fn direct_atomics_count_with_the_others(fixture: &Fixture) {
    let field = Field::new(fixture, QpOptions::default());
    let Field { world, near, far, .. } = &field;
    let slow = world.join(QpOptions::default());
    far.write(0, &[0; 16]);
    let (result, other) = ([near.mr.sge(0, 8)], [near.mr.sge(8, 8)]);
    let add = |id, at| Request::new(id, Op::Atomic(at, Atomic::FetchAdd { add: 1 }));
    for round in 0..100 {
        // Behind a message it goes by packets.
        slow.b.qp.post_receive(&[ReceiveRequest { id: 1, data: &[] }]).unwrap();
        let at = far.mr.remote(0);
        slow.a.qp.post_send(&[Request::new(1, Op::Send), add(2, at).with(&other)]).unwrap();
        field.run(add(3, at).with(&result));
        world.done(&slow.a.sends, 1);
        world.done(&slow.a.sends, 2);
        world.done(&slow.b.receives, 1);
        assert_eq!(near.word(0) + near.word(8), 4 * round + 1, "each saw another's");
    }
    assert_eq!(far.word(0), 200);
    let swap = Atomic::CompareSwap { compare: 200, swap: 7 };
    field.run(Request::new(1, Op::Atomic(far.mr.remote(0), swap)).with(&result));
    assert_eq!((near.word(0), far.word(0)), (200, 7));
    // The result has no place: the word may change or not, but nothing else does.
    let narrow = [near.mr.sge(0, 4)];
    field.joined.a.qp.post_send(&[add(5, far.mr.remote(8)).with(&narrow)]).unwrap();
    assert!(!world.next(&field.joined.a.sends).is_success());
}

/// Makes an operation that is wrong: with memory of another domain, and with memory that may only be read.
type Wrong = fn(&Field, &Patch, &Patch) -> Op;

/// Every way in which an operation may be wrong, on a connection that works without packets.
fn direct_failures_are_the_protocols(fixture: &Fixture) {
    let read_only = QpAccess::REMOTE_READ;
    let trials: [(QpOptions, Wrong, Status); 9] = [
        (impatient(), |f, _, _| write(f.far.mr.rkey() ^ 1, f.far.mr.iova()), Status::RemoteAccess),
        (impatient(), |f, _, _| write(0xffff_ff00, f.far.mr.iova()), Status::RemoteAccess),
        (impatient(), |f, _, _| Op::Write(f.far.mr.remote((1 << 20) - 7)), Status::RemoteAccess),
        (impatient(), |f, _, _| write(f.far.mr.rkey(), f.far.mr.iova() - 1), Status::RemoteAccess),
        (impatient(), |f, _, _| write(f.far.mr.rkey(), u64::MAX - 3), Status::RemoteAccess),
        (impatient(), |_, foreign, _| Op::Write(foreign.mr.remote(0)), Status::RemoteAccess),
        (impatient(), |_, _, shut| Op::Write(shut.mr.remote(0)), Status::RemoteAccess),
        (impatient(), |f, _, _| misaligned(f), Status::RemoteInvalidRequest),
        (
            QpOptions { access: read_only, ..impatient() },
            |f, _, _| Op::Write(f.far.mr.remote(0)),
            Status::RemoteInvalidRequest,
        ),
    ];
    for (number, (options, op, status)) in trials.into_iter().enumerate() {
        let world = fixture.world();
        let joined = world.join(options);
        let (near, far) = (fixture.host(&world.a, 4096), fixture.host(&world.b, 1 << 20));
        let field = Field { world, joined, near, far };
        let other = End { context: field.world.b.context.clone(), pd: field.world.b.context.pd() };
        let foreign = fixture.host(&other, 4096);
        let shut = fixture.memory(&field.world.b, Kind::Host, 4096, Access::REMOTE_READ);
        // By reads, which all of them allow.
        let data = [field.near.mr.sge(0, 8)];
        for _ in 0..200 {
            field.run(Request::new(1, Op::Read(field.far.mr.remote(0))).with(&data));
        }
        assert_eq!(operations(&field.world.a) > 100, fixture.which.is_direct());
        let before = operations(&field.world.a);
        let op = op(&field, &foreign, &shut);
        field.joined.a.qp.post_send(&[Request::new(2, op).with(&data)]).unwrap();
        let ended = field.world.next(&field.joined.a.sends);
        let expected = if number == 7 && ended.status == Status::RemoteAccess {
            Status::RemoteAccess // either is right for a word that is not aligned
        } else {
            status
        };
        assert_eq!((ended.id, ended.status), (2, expected), "trial {number}");
        assert_eq!(operations(&field.world.a), before, "trial {number} was done");
        assert_eq!(field.joined.b.qp.state().unwrap(), State::Err, "trial {number}");
    }
}

fn write(rkey: u32, address: u64) -> Op {
    Op::Write(Remote { address, rkey })
}

fn misaligned(field: &Field) -> Op {
    Op::Atomic(field.far.mr.remote(4), Atomic::FetchAdd { add: 1 })
}

fn direct_ends_with_the_registration(fixture: &Fixture) {
    let mut field = Field::new(fixture, impatient());
    let memory = HostMemory::new(4096).unwrap();
    let end = field.world.b.context.clone();
    for invalidated in [false, true] {
        let mr = end.register(&field.world.b.pd, memory.clone(), Access::ALL).unwrap();
        field.warm(fixture.which, &mr);
        let remote = mr.remote(0);
        if invalidated {
            field.joined.b.qp.post_receive(&[ReceiveRequest { id: 4, data: &[] }]).unwrap();
            field.run(Request::new(3, Op::SendInvalidate(remote.rkey)));
            field.world.done(&field.joined.b.receives, 4);
        } else {
            drop(mr);
        }
        memory.bytes().fill(0, 4096, &[7]).unwrap();
        let request = Request::new(5, Op::Write(remote)).inline(b"too late");
        field.joined.a.qp.post_send(&[request]).unwrap();
        field.world.failed(&field.joined.a.sends, 5, Status::RemoteAccess);
        assert_eq!(memory.bytes().load_u64(0).unwrap(), u64::from_ne_bytes([7; 8]));
        field.joined = field.world.join(impatient());
    }
}

fn direct_ends_with_the_queue_pair(fixture: &Fixture) {
    let mut field = Field::new(fixture, impatient());
    for to in [State::Err, State::Reset] {
        let word = field.far.word(0);
        field.joined.b.qp.modify(&Change::to(to)).unwrap();
        let request = Request::new(2, Op::Write(field.far.mr.remote(0))).inline(b"too late");
        field.joined.a.qp.post_send(&[request]).unwrap();
        field.world.failed(&field.joined.a.sends, 2, Status::RetryExceeded);
        assert_eq!(field.far.word(0), word);
        // It begins anew, with a peer of the same number, and works again.
        for side in [&field.joined.a, &field.joined.b] {
            side.qp.modify(&Change::to(State::Reset)).unwrap();
        }
        connect(&field.joined.a.qp, &field.joined.b.qp);
        field.warm(fixture.which, &field.far.mr);
    }
    // Another connection of the same devices does not pass for this one.
    let other = field.world.join(impatient());
    drop(std::mem::replace(&mut field.joined, other));
    field.warm(fixture.which, &field.far.mr);
}

fn direct_over_a_thousand_registrations(fixture: &Fixture) {
    let field = Field::new(fixture, QpOptions::default());
    let shared = HostMemory::new(1 << 20).unwrap();
    let context = &field.world.b.context;
    for round in 0..2 {
        let memories: Vec<HostMemory> = (0..1000)
            .map(|n| if n % 2 == 0 { shared.clone() } else { HostMemory::new(4096).unwrap() })
            .collect();
        let register = |memory: &HostMemory| {
            context.register(&field.world.b.pd, memory.clone(), Access::ALL).unwrap()
        };
        let mrs: Vec<Mr> = memories.iter().map(register).collect();
        let before = operations(&field.world.a);
        for pass in 0..3_u64 {
            for (number, mr) in mrs.iter().enumerate() {
                let word = (number as u64 * 10 + pass).to_ne_bytes();
                let at = mr.remote(number as u64 % 500 * 8);
                field.run(Request::new(1, Op::Write(at)).inline(&word));
            }
        }
        for (number, memory) in memories.iter().enumerate() {
            let expected = match number % 2 == 0 && number < 500 {
                true => number as u64 + 500, // the same place of the shared memory is written later
                false => number as u64,
            };
            let found = memory.bytes().load_u64(number as u64 % 500 * 8).unwrap();
            assert_eq!(found, expected * 10 + 2, "registration {number}");
        }
        let direct = operations(&field.world.a) - before;
        assert_eq!(direct > 1000, fixture.which.is_direct(), "{direct} in round {round}");
    }
    field.warm(fixture.which, &field.far.mr);
}

/// Registrations end while another thread works in their memory: afterwards nothing of it changes.
fn direct_registrations_end_under_traffic(fixture: &Fixture) {
    let field = Field::new(fixture, QpOptions { timeout: 10, ..QpOptions::default() });
    let Field { world, near, .. } = &field;
    let memory = HostMemory::new(1 << 20).unwrap();
    let rounds = 40;
    for round in 0..rounds {
        let joined = world.join(QpOptions { timeout: 10, retry_count: 7, ..QpOptions::default() });
        let mr = world.b.context.register(&world.b.pd, memory.clone(), Access::ALL).unwrap();
        let (remote, stop) = (mr.remote(0), AtomicBool::new(false));
        near.write(0, &[round as u8 | 1; 300_000]);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let data = [near.mr.sge(0, if round % 2 == 0 { 300_000 } else { 3000 })];
                while !stop.load(Ordering::Relaxed) {
                    let write = Request::new(1, Op::Write(remote)).with(&data);
                    joined.a.qp.post_send(&[write]).unwrap();
                    if !world.next(&joined.a.sends).is_success() {
                        return;
                    }
                }
            });
            std::thread::sleep(Duration::from_micros(300 * (round % 8)));
            drop(mr);
            memory.bytes().fill(0, 1 << 20, &[0xee]).unwrap();
            std::thread::sleep(Duration::from_millis(1));
            stop.store(true, Ordering::Relaxed);
        });
        let mut found = vec![0; 1 << 20];
        memory.bytes().read(0, &mut found).unwrap();
        assert!(found.iter().all(|byte| *byte == 0xee), "round {round}: written after its end");
    }
}

fn direct_leaves_other_memory_to_packets(fixture: &Fixture) {
    let field = Field::new(fixture, QpOptions::default());
    for kind in [Kind::Window, Kind::Engine] {
        let (near, far) = (
            fixture.memory(&field.world.a, kind, 8192, Access::ALL),
            fixture.memory(&field.world.b, kind, 8192, Access::ALL),
        );
        let wanted = near.pattern(0, 8192, 3);
        for (from, to) in [(&near, &field.far), (&field.near, &far), (&near, &far)] {
            from.write(0, &wanted);
            for _ in 0..3 {
                let data = [from.mr.sge(0, 8192)];
                let write = Request::new(1, Op::Write(to.mr.remote(0))).with(&data);
                assert!(!field.is_direct(write), "{kind:?}");
            }
            same(&to.read(0, 8192), &wanted, "a write by packets");
        }
    }
    let not = field.world.a.context.stats().direct.not;
    let counted = not.contains_key("key-not-granted") && not.contains_key("local-memory");
    assert_eq!(counted, fixture.which.is_direct(), "{not:?}");
    // And where one may only read, nothing is written.
    let shut = fixture.memory(&field.world.b, Kind::Host, 4096, Access::REMOTE_READ);
    let data = [field.near.mr.sge(0, 64)];
    let read = || field.is_direct(Request::new(1, Op::Read(shut.mr.remote(0))).with(&data));
    let direct = (0..100).filter(|_| read()).count();
    assert_eq!(direct > 50, fixture.which.is_direct());
}

/// The last connection to a peer ends, and with it all that was mapped; the next begins anew.
fn direct_begins_anew_with_the_next_connection(fixture: &Fixture) {
    let world = fixture.world();
    let near = fixture.host(&world.a, 4096);
    for _ in 0..3 {
        let far = fixture.host(&world.b, 4096);
        let joined = world.join(impatient());
        let mut direct = 0;
        for _ in 0..100 {
            let before = operations(&world.a);
            let data = [near.mr.sge(0, 64)];
            let write = Request::new(1, Op::Write(far.mr.remote(0))).with(&data);
            joined.a.qp.post_send(&[write]).unwrap();
            world.done(&joined.a.sends, 1);
            direct += operations(&world.a) - before;
        }
        assert_eq!(direct > 50, fixture.which.is_direct());
        // The last flow takes the connection with it; the next one is made anew.
        drop(joined);
        world.drive_for(Duration::from_millis(2));
    }
    let visits = world.b.context.stats().direct.by_peers;
    assert_eq!(visits > 150, fixture.which.is_direct());
}

/// Single writes have no entry in the queue; those with one find their place among them, also after the count of blocks,
/// which has sixteen bits, has come round.
fn direct_writes_lap_the_queue_with_entries_between(fixture: &Fixture) {
    let options = QpOptions { send_depth: 8, signal_all: false, ..QpOptions::default() };
    let field = Field::new(fixture, options);
    let Field { world, joined, near, far } = &field;
    let count = if fixture.which.is_direct() { 150_000_u64 } else { 3000 };
    let data = [near.mr.sge(0, 8)];
    for number in 0..count {
        let word = number.to_ne_bytes();
        let write = Request::new(number, Op::Write(far.mr.remote(0))).inline(&word);
        // One in four is told of, so that the queue's places are given back in its turn.
        let told = number % 4 == 3;
        joined.a.qp.post_send(&[if told { write } else { write.unsignaled() }]).unwrap();
        if told {
            world.done(&joined.a.sends, number);
            assert_eq!(far.word(0), number);
        }
        if number % 997 == 3 {
            near.write(0, &(!number).to_ne_bytes());
            let write = Request::new(1, Op::Write(far.mr.remote(8))).with(&data);
            joined.b.qp.post_receive(&[ReceiveRequest { id: 3, data: &[] }]).unwrap();
            joined.a.qp.post_send(&[write.unsignaled(), Request::new(2, Op::Send)]).unwrap();
            world.done(&joined.a.sends, 2);
            world.done(&joined.b.receives, 3);
            assert_eq!(far.word(8), !number);
        }
    }
    assert_eq!(operations(&world.a) > count * 9 / 10, fixture.which.is_direct());
}
