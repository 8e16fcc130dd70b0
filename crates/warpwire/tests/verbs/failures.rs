//! Each row of the table of failures: the right status on the right side; and what follows a failure.

use std::time::Duration;

use warpwire::mlx5::AtomicWidth;
use warpwire::verbs::{
    Access, AsyncEvent, Atomic, Completion, CompletionKind, Mtu, Op, QpOptions, ReceiveRequest,
    Remote, Request, Sge, State, Status,
};
use warpwire_proto::qp::Access as QpAccess;

use crate::verbs::fixture::{
    A_MOMENT, End, Fixture, Joined, KINDS, Kind, Patch, Side, World, connect, impatient, same,
};
use testkit::{cases, skip};

cases!(Fixture; CASES:
    local_memory_that_may_not_be_read,
    remote_memory_that_may_not_be_used,
    flags_of_the_queue_pair,
    receives_that_do_not_fit,
    answers_without_a_place,
    nobody_answers,
    a_peer_that_takes_nothing,
    nobody_is_ready,
    a_failure_flushes_in_order,
    a_failure_in_the_middle_of_a_message,
    after_a_reset_it_works_again,
    registrations_that_end_under_traffic,
);
cases!(Fixture; ONCE:
    atomics_that_are_not_aligned,
    unread_completions_of_a_former_life,
    freed_memory_under_a_registration,
    zero_bytes_need_no_key,
);

/// A connection on trial, and one of the same devices that must not suffer.
struct Trial {
    world: World,
    joined: Joined,
    bystander: Joined,
    near: Patch,
    far: Patch,
}

impl Trial {
    fn new(fixture: &Fixture, options: QpOptions) -> Self {
        Self::with(fixture, options.clone(), options)
    }

    fn with(fixture: &Fixture, a: QpOptions, b: QpOptions) -> Self {
        let world = fixture.world();
        let bystander = world.join(QpOptions::default());
        let joined = world.join_with(a, b);
        let (near, far) = (fixture.host(&world.a, 1 << 16), fixture.host(&world.b, 1 << 17));
        Self { world, joined, bystander, near, far }
    }

    fn post(&self, request: Request<'_>) {
        self.joined.a.qp.post_send(&[request]).unwrap();
    }

    fn receive(&self, id: u64, data: &[Sge]) {
        self.joined.b.qp.post_receive(&[ReceiveRequest { id, data }]).unwrap();
    }

    /// The requester fails with that status, and its peer with that news, or with none.
    fn expect(&self, id: u64, status: Status, news: Option<fn(u32) -> AsyncEvent>) {
        let Self { world, joined, .. } = self;
        world.failed(&joined.a.sends, id, status);
        assert_eq!(joined.a.qp.state().unwrap(), State::Err);
        if world.b.is_device() {
            world.b.news(); // rxe tells of nothing, others do
            world.works(&self.bystander);
            return self.again();
        }
        let qpn = joined.b.qp.number();
        let wanted: Vec<_> = news.map(|event| event(qpn)).into_iter().collect();
        let told: Vec<_> =
            world.b.news().into_iter().filter(|e| *e != AsyncEvent::Established { qpn }).collect();
        assert_eq!(told, wanted);
        let peer = joined.b.qp.state().unwrap();
        assert_eq!(peer, if news.is_some() { State::Err } else { State::Rts });
        world.works(&self.bystander);
        self.again();
    }

    /// Both go back to the beginning, and talk anew.
    fn again(&self) {
        reset(&self.joined);
        self.world.works(&self.joined);
        self.world.a.news();
        self.world.b.news();
    }
}

fn reset(joined: &Joined) {
    for side in [&joined.a, &joined.b] {
        side.qp.modify(&warpwire::verbs::Change::to(State::Reset)).unwrap();
        assert_eq!(side.qp.state().unwrap(), State::Reset);
    }
    connect(&joined.a.qp, &joined.b.qp);
}

fn access_error(qpn: u32) -> AsyncEvent {
    AsyncEvent::AccessError { qpn }
}

fn request_error(qpn: u32) -> AsyncEvent {
    AsyncEvent::RequestError { qpn }
}

fn fatal(qpn: u32) -> AsyncEvent {
    AsyncEvent::Fatal { qpn }
}

fn local_memory_that_may_not_be_read(fixture: &Fixture) {
    let trial = Trial::new(fixture, QpOptions::default());
    let near = &trial.near.mr;
    let foreign = End { context: trial.world.a.context.clone(), pd: trial.world.a.context.pd() };
    let foreign = fixture.host(&foreign, 4096);
    let good = near.sge(0, 100);
    let bad = [
        Sge { lkey: near.lkey() ^ 1, ..good },
        Sge { lkey: 0xffff_ff00, ..good },
        Sge { lkey: 0, ..good },
        near.sge(1 << 16, 1),
        near.sge((1 << 16) - 99, 100),
        near.sge(0, (1 << 16) + 1),
        near.sge(u64::MAX, 2),
        Sge { address: u64::MAX - 10, ..good },
        foreign.mr.sge(0, 100),
    ];
    let remote = trial.far.mr.remote(0);
    for range in bad {
        for op in [Op::Send, Op::Write(remote), Op::WriteImm(remote, [1; 4])] {
            trial.receive(1, &[trial.far.mr.sge(0, 1 << 17)]);
            trial.post(Request::new(2, op).with(&[good, range]));
            trial.expect(2, Status::LocalProtection, None);
        }
    }
}

fn remote_memory_that_may_not_be_used(fixture: &Fixture) {
    let trial = Trial::new(fixture, QpOptions::default());
    let end = &trial.world.b;
    let other_pd = End { context: end.context.clone(), pd: end.context.pd() };
    let foreign = fixture.host(&other_pd, 4096);
    let no_write = fixture.memory(
        end,
        Kind::Host,
        4096,
        Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_ATOMIC,
    );
    let no_read = fixture.memory(
        end,
        Kind::Host,
        4096,
        Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_ATOMIC,
    );
    let no_atomic = fixture.memory(
        end,
        Kind::Host,
        4096,
        Access::LOCAL_WRITE | Access::REMOTE_WRITE | Access::REMOTE_READ,
    );
    let far = trial.far.mr.remote(0);
    let add = Atomic::FetchAdd { add: 1 };
    let places = [
        Remote { rkey: far.rkey ^ 0x80, ..far },
        Remote { rkey: 0x00ab_cd00, ..far },
        trial.far.mr.remote((1 << 17) - 4),
        Remote { address: u64::MAX - 3, ..far },
        Remote { address: far.address.wrapping_sub(1), ..far },
        foreign.mr.remote(0),
    ];
    let mut bad: Vec<_> = vec![
        Op::Write(no_write.mr.remote(0)),
        Op::WriteImm(no_write.mr.remote(0), [0; 4]),
        Op::Read(no_read.mr.remote(0)),
        Op::Atomic(no_atomic.mr.remote(0), add),
    ];
    bad.extend(places.into_iter().flat_map(|at| [Op::Write(at), Op::Read(at)]));
    bad.push(Op::Atomic(Remote { rkey: far.rkey ^ 0x80, ..far }, add));
    // rxe takes the message, and fails afterwards.
    if !end.is_device() {
        bad.push(Op::SendInvalidate(far.rkey ^ 0x80));
        bad.push(Op::SendInvalidate(foreign.mr.rkey()));
    }
    for op in bad {
        let receives = matches!(op, Op::SendInvalidate(_) | Op::WriteImm(..));
        if receives {
            trial.receive(1, &[]);
        }
        let data = [trial.near.mr.sge(0, 8)];
        let request = Request::new(2, op);
        let invalidates = matches!(op, Op::SendInvalidate(_));
        trial.post(if invalidates { request } else { request.with(&data) });
        if receives {
            // The receive is used up, and tells why.
            trial.world.failed(&trial.joined.b.receives, 1, Status::LocalAccess);
        }
        trial.expect(2, Status::RemoteAccess, Some(access_error));
    }
    for patch in [&no_write, &no_read, &no_atomic, &foreign] {
        same(&patch.read(0, 64), &[0; 64], "memory that may not be used");
    }
}

fn flags_of_the_queue_pair(fixture: &Fixture) {
    let remote_of = |trial: &Trial| trial.far.mr.remote(0);
    let all = [
        (QpAccess::REMOTE_READ | QpAccess::REMOTE_ATOMIC, 0),
        (QpAccess::REMOTE_WRITE | QpAccess::REMOTE_ATOMIC, 1),
        (QpAccess::REMOTE_WRITE | QpAccess::REMOTE_READ, 2),
    ];
    for (access, forbidden) in all {
        let trial = Trial::with(
            fixture,
            QpOptions::default(),
            QpOptions { access, ..QpOptions::default() },
        );
        let at = remote_of(&trial);
        let ops = [Op::Write(at), Op::Read(at), Op::Atomic(at, Atomic::FetchAdd { add: 1 })];
        for (n, op) in ops.into_iter().enumerate() {
            let request = Request::new(n as u64, op);
            trial.post(request.with(&[trial.near.mr.sge(0, 8)]));
            if n == forbidden {
                trial.expect(n as u64, Status::RemoteInvalidRequest, Some(request_error));
            } else {
                trial.world.done(&trial.joined.a.sends, n as u64);
            }
        }
    }
}

fn receives_that_do_not_fit(fixture: &Fixture) {
    let trial = Trial::new(fixture, QpOptions::default());
    let end = &trial.world.b;
    let read_only = fixture.memory(end, Kind::Host, 4096, Access::NONE);
    for (len, room) in [(1, 0), (100, 99), (5000, 4999), (20_000, 4096)] {
        trial.receive(1, &[trial.far.mr.sge(0, room)]);
        trial.post(Request::new(2, Op::Send).with(&[trial.near.mr.sge(0, len)]));
        trial.world.failed(&trial.joined.b.receives, 1, Status::LocalLength);
        trial.expect(2, Status::RemoteInvalidRequest, Some(request_error));
    }
    let far = &trial.far.mr;
    let bad = [
        Sge { lkey: far.lkey() ^ 3, ..far.sge(0, 4096) },
        far.sge((1 << 17) - 10, 4096),
        read_only.mr.sge(0, 4096),
    ];
    for range in bad {
        trial.receive(1, &[range]);
        trial.post(Request::new(2, Op::Send).with(&[trial.near.mr.sge(0, 100)]));
        trial.world.failed(&trial.joined.b.receives, 1, Status::LocalProtection);
        trial.expect(2, Status::RemoteOperation, Some(fatal));
    }
}

fn answers_without_a_place(fixture: &Fixture) {
    let trial = Trial::new(fixture, QpOptions::default());
    let read_only = fixture.memory(&trial.world.a, Kind::Host, 4096, Access::NONE);
    let far = trial.far.mr.remote(0);
    let good = trial.near.mr.sge(0, 8);
    let bad = [
        Sge { lkey: good.lkey ^ 1, ..good },
        read_only.mr.sge(0, 8),
        trial.near.mr.sge((1 << 16) - 7, 8),
    ];
    for range in bad {
        for op in [Op::Read(far), Op::Atomic(far, Atomic::FetchAdd { add: 1 })] {
            trial.post(Request::new(1, op).with(&[range]));
            trial.expect(1, Status::LocalProtection, None);
        }
    }
    // No place for the value before.
    trial.post(
        Request::new(1, Op::Atomic(far, Atomic::FetchAdd { add: 1 }))
            .with(&[trial.near.mr.sge(0, 7)]),
    );
    trial.expect(1, Status::LocalLength, None);
}

fn nobody_answers(fixture: &Fixture) {
    let World { a, b } = fixture.world();
    let world = World { a, b };
    let options = impatient();
    let (one, two) = (world.side(&world.a, options.clone()), world.side(&world.b, options));
    connect(&one.qp, &two.qp);
    let near = fixture.host(&world.a, 4096);
    let far = fixture.host(&world.b, 4096);
    let remote = far.mr.remote(0);
    drop((two, far));
    // The queue pair is gone, its device is there.
    one.qp.post_send(&[Request::new(1, Op::Write(remote)).with(&[near.mr.sge(0, 4096)])]).unwrap();
    world.failed(&one.sends, 1, Status::RetryExceeded);
    if let Ok(stats) = one.qp.stats() {
        assert!(stats.timeouts >= 3);
    }
    assert!(world.b.is_device() || lost(&world.b, "no-queue-pair") > 0);
    // The device is gone too.
    let World { a, b } = world;
    let three = {
        let world = World { a, b };
        let joined = world.join(impatient());
        world.works(&joined);
        let Joined { a: three, b: four } = joined;
        let World { a, b } = world;
        drop((four, b));
        (three, a)
    };
    let (side, end) = three;
    for op in [Op::Read(remote), Op::Send] {
        side.qp.post_send(&[Request::new(5, op)]).unwrap();
    }
    assert_eq!(alone(&end, &side).status, Status::RetryExceeded);
    assert_eq!(alone(&end, &side).status, Status::Flushed);
}

/// The peer lives, and its device stands still: what lies between the two fills up, and nobody waits for ever.
fn a_peer_that_takes_nothing(fixture: &Fixture) {
    const LEN: u32 = 1 << 20;
    const COUNT: u64 = 32;
    if fixture.which.has_device() {
        skip("a device answers by itself");
    }
    let world = fixture.world();
    let [first, second] = [(); 2].map(|()| world.join(impatient()));
    let near = fixture.host(&world.a, LEN.into());
    for id in 0..COUNT {
        let data = [near.mr.sge(0, LEN)];
        first.a.qp.post_send(&[Request::new(id, Op::Send).with(&data)]).unwrap();
    }
    for id in 0..COUNT {
        let completion = alone(&world.a, &first.a);
        let wanted = if id == 0 { Status::RetryExceeded } else { Status::Flushed };
        assert_eq!((completion.id, completion.status), (id, wanted));
    }
    // Another queue pair finds no room at all.
    second.a.qp.post_send(&[Request::new(1, Op::Send)]).unwrap();
    assert_eq!(alone(&world.a, &second.a).status, Status::RetryExceeded);
    // Once it goes on, so does everybody else.
    world.drive_for(A_MOMENT);
    world.works(&world.join(QpOptions::default()));
}

fn lost(end: &End, reason: &str) -> u64 {
    end.context.stats().lost.iter().find(|(name, _)| *name == reason).unwrap().1
}

/// The next completion of a side whose peer is gone.
fn alone(end: &End, side: &Side) -> Completion {
    let mut one = [Completion::EMPTY];
    let start = std::time::Instant::now();
    while side.sends.poll(&mut one).unwrap() == 0 {
        end.context.hca().poll().unwrap();
        assert!(start.elapsed() < crate::verbs::fixture::soon());
    }
    one[0]
}

fn nobody_is_ready(fixture: &Fixture) {
    let trial = Trial::new(fixture, impatient());
    trial.post(Request::new(1, Op::Send).inline(b"hello"));
    trial.expect(1, Status::RnrRetryExceeded, None);
    trial.post(Request::new(2, Op::WriteImm(trial.far.mr.remote(0), [0; 4])).inline(b"hello"));
    trial.expect(2, Status::RnrRetryExceeded, None);
    // Without end, and with a receive in the end.
    let patient = Trial::new(fixture, QpOptions { rnr_retry: 7, ..impatient() });
    patient.post(Request::new(3, Op::Send).inline(b"hello"));
    patient.world.drive_for(Duration::from_millis(10));
    patient.receive(4, &[patient.far.mr.sge(0, 5)]);
    patient.world.done(&patient.joined.a.sends, 3);
    patient.world.done(&patient.joined.b.receives, 4);
    if let Ok(stats) = patient.joined.b.qp.stats() {
        assert!(stats.rnr_sent > 2);
    }
    same(&patient.far.read(0, 5), b"hello", "a message that had to wait");
}

fn a_failure_flushes_in_order(fixture: &Fixture) {
    let options = QpOptions { signal_all: false, ..QpOptions::default() };
    let trial = Trial::new(fixture, options);
    for id in 0..5 {
        let data = [trial.near.mr.sge(0, 64)];
        trial.joined.a.qp.post_receive(&[ReceiveRequest { id: 50 + id, data: &data }]).unwrap();
    }
    let good = Request::new(1, Op::Write(trial.far.mr.remote(0))).inline(b"before").unsignaled();
    let bad =
        Request::new(2, Op::Write(Remote { address: 0, rkey: 0 })).inline(b"bad").unsignaled();
    let later = |id| Request::new(id, Op::Write(trial.far.mr.remote(16))).inline(b"later");
    let wait = Request::new(8, Op::Wait { cqn: 0xffff, index: 0 });
    let posted = [
        good,
        bad,
        later(3).unsignaled(),
        later(4),
        Request::new(5, Op::Nop),
        later(6),
        wait,
        later(9),
    ];
    trial.joined.a.qp.post_send(&posted).unwrap();
    trial.world.failed(&trial.joined.a.sends, 2, Status::RemoteAccess);
    for id in [3, 4, 5, 6, 8, 9] {
        trial.world.failed(&trial.joined.a.sends, id, Status::Flushed);
    }
    for id in 50..55 {
        trial.world.failed(&trial.joined.a.receives, id, Status::Flushed);
    }
    same(&trial.far.read(0, 21), b"before\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0", "what was written");
    // What is posted to a queue pair that has failed comes back, in order.
    for id in 10..20 {
        trial.post(later(id));
        trial.joined.a.qp.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
    }
    for id in 10..20 {
        trial.world.failed(&trial.joined.a.sends, id, Status::Flushed);
        trial.world.failed(&trial.joined.a.receives, id, Status::Flushed);
    }
    trial.world.works(&trial.bystander);
    trial.again();
}

/// The receiver fails while a message comes in: the receive that it had begun comes back too.
fn a_failure_in_the_middle_of_a_message(fixture: &Fixture) {
    let trial = Trial::new(fixture, impatient());
    let (near, far) =
        (fixture.host(&trial.world.a, 4 << 20), fixture.host(&trial.world.b, 4 << 20));
    trial.receive(1, &[far.mr.sge(0, 4 << 20)]);
    trial.receive(2, &[]);
    trial.post(Request::new(3, Op::Send).with(&[near.mr.sge(0, 4 << 20)]));
    let begun = || trial.joined.b.qp.stats().unwrap().packets_received > 20;
    trial.world.until("a message that has begun", begun);
    trial.joined.b.qp.modify(&warpwire::verbs::Change::to(State::Err)).unwrap();
    trial.world.failed(&trial.joined.b.receives, 1, Status::Flushed);
    trial.world.failed(&trial.joined.b.receives, 2, Status::Flushed);
    trial.world.failed(&trial.joined.a.sends, 3, Status::RetryExceeded);
    trial.world.works(&trial.bystander);
    trial.again();
}

fn after_a_reset_it_works_again(fixture: &Fixture) {
    let trial = Trial::new(fixture, QpOptions::default());
    for round in 0..30 {
        // Reset with work of either side in every stage.
        trial.post(
            Request::new(1, Op::Read(trial.far.mr.remote(0)))
                .with(&[trial.near.mr.sge(0, 1 << 15)]),
        );
        trial.post(Request::new(2, Op::Nop));
        trial.receive(3, &[]);
        for _ in 0..round {
            trial.world.step();
        }
        trial.again();
        let wanted = trial.near.pattern(0, 9000, round);
        trial.post(
            Request::new(4, Op::Write(trial.far.mr.remote(7))).with(&[trial.near.mr.sge(0, 9000)]),
        );
        trial.world.done(&trial.joined.a.sends, 4);
        same(&trial.far.read(7, 9000), &wanted, "a write after a reset");
    }
}

/// Registrations end while they are read and written, on either side: never a crash, never another's memory.
fn registrations_that_end_under_traffic(fixture: &Fixture) {
    for (round, kind) in KINDS.into_iter().cycle().take(12).enumerate() {
        // Small packets, so that some are always left to send.
        let options = QpOptions { mtu: Mtu::new(1024), ..QpOptions::default() };
        let trial = Trial::new(fixture, options);
        let near = fixture.memory(&trial.world.a, kind, 1 << 20, crate::verbs::fixture::ALL);
        let far = fixture.memory(&trial.world.b, kind, 1 << 20, crate::verbs::fixture::ALL);
        let range = [near.mr.sge(0, 1 << 20)];
        let writes = round % 2 == 0;
        let at = far.mr.remote(0);
        trial.post(Request::new(1, if writes { Op::Write(at) } else { Op::Read(at) }).with(&range));
        for _ in 0..=round {
            trial.world.step();
        }
        let remote_ends = round % 4 < 2;
        let gone = if remote_ends { far } else { near };
        drop(gone); // waits for whoever is inside
        let completion = trial.world.next(&trial.joined.a.sends);
        let wanted = if remote_ends { Status::RemoteAccess } else { Status::LocalProtection };
        assert_eq!(completion.status, wanted, "round {round}, {kind:?}");
        trial.world.works(&trial.bystander);
        trial.again();
    }
}

fn atomics_that_are_not_aligned(fixture: &Fixture) {
    let trial = Trial::new(fixture, QpOptions::default());
    let width = AtomicWidth::Four;
    let ops = [
        (1, Atomic::FetchAdd { add: 1 }),
        (4, Atomic::CompareSwap { compare: 0, swap: 1 }),
        (2, Atomic::MaskedFetchAdd { width, add: 1, boundary: 0 }),
    ];
    for (offset, op) in ops {
        let request = Request::new(1, Op::Atomic(trial.far.mr.remote(offset), op));
        trial.post(request.with(&[trial.near.mr.sge(0, 8)]));
        trial.expect(1, Status::RemoteInvalidRequest, Some(request_error));
    }
}

/// Completions that nobody took belong neither to the next life of a queue pair nor to the next in its place.
fn unread_completions_of_a_former_life(fixture: &Fixture) {
    let world = fixture.world();
    let joined = world.join(QpOptions { send_depth: 8, ..QpOptions::default() });
    for id in 0..5 {
        joined.a.qp.post_send(&[Request::new(id, Op::Nop)]).unwrap();
    }
    world.drive_for(Duration::from_millis(2));
    reset(&joined);
    for id in 100..140 {
        joined.a.qp.post_send(&[Request::new(id, Op::Nop)]).unwrap();
        world.done(&joined.a.sends, id);
    }
    // The next one in the place of one that is no more, on the same completion queue.
    let Joined { a, b } = joined;
    a.qp.post_send(&[Request::new(7, Op::Nop), Request::new(8, Op::Nop)]).unwrap();
    b.qp.post_receive(&[ReceiveRequest { id: 9, data: &[] }]).unwrap();
    world.drive_for(Duration::from_millis(2));
    let old = a.qp.number();
    drop(a.qp);
    let (end, sends) = (&world.a, a.sends);
    let qp = end.context.create_qp(&end.pd, &sends, &sends, QpOptions::default()).unwrap();
    assert_ne!(qp.number(), old);
    b.qp.modify(&warpwire::verbs::Change::to(State::Reset)).unwrap();
    connect(&qp, &b.qp);
    world.quiet(&sends);
    qp.post_send(&[Request::new(10, Op::Nop)]).unwrap();
    world.done(&sends, 10);
}

fn freed_memory_under_a_registration(fixture: &Fixture) {
    for kind in [Kind::Window, Kind::Engine, Kind::Staged] {
        let trial = Trial::new(fixture, QpOptions::default());
        let far = fixture.memory(&trial.world.b, kind, 1 << 16, crate::verbs::fixture::ALL);
        let near = fixture.memory(&trial.world.a, kind, 1 << 16, crate::verbs::fixture::ALL);
        let range = [trial.near.mr.sge(0, 1 << 15)];
        fixture.control().free_under_users(far.allocation()).unwrap();
        for op in [Op::Write(far.mr.remote(0)), Op::Read(far.mr.remote(0))] {
            trial.post(Request::new(1, op).with(&range));
            trial.expect(1, Status::RemoteAccess, Some(access_error));
        }
        fixture.control().free_under_users(near.allocation()).unwrap();
        let range = [near.mr.sge(0, 1 << 15)];
        for op in [Op::Write(trial.far.mr.remote(0)), Op::Read(trial.far.mr.remote(0)), Op::Dump] {
            trial.post(Request::new(1, op).with(&range));
            trial.expect(1, Status::LocalProtection, None);
        }
    }
}

fn zero_bytes_need_no_key(fixture: &Fixture) {
    let trial = Trial::new(fixture, QpOptions::default());
    let nowhere = Remote { address: 0x1234_5678, rkey: 0xdead_be00 };
    for op in [Op::Write(nowhere), Op::Read(nowhere)] {
        trial.post(Request::new(1, op));
        let done = trial.world.done(&trial.joined.a.sends, 1);
        assert!(matches!(done.kind, CompletionKind::Send(_)));
    }
}
