//! Operations that kernels execute by themselves in the peer's memory.
//!
//! Every case runs over every link: where nothing is mapped, everything is posted, with the same
//! results.

use std::time::{Duration, Instant};

use warpwire::error::Kind;
use warpwire::mem::{Allocation, Stream};
use warpwire::stream::kernel::KernelStatus;
use warpwire::verbs::{QpOptions, Status};

use crate::kernels::calls::at;
use crate::kernels::device_calls::{MODES, make_every_call};
use crate::kernels::fixture::{Endpoint, Fixture, TestLink, WORD, bytes, test_timeout};
use testkit::{cases, until};

cases!(Fixture; CASES:
    every_call_is_direct_where_it_can_be,
    direct_access_is_an_option,
    round_trips_of_every_length,
    direct_and_posted_work_keep_their_order,
    memory_that_the_peer_deregisters_is_not_touched,
    local_memory_that_is_deregistered_is_not_used,
    a_queue_pair_of_the_peer_that_ends,
    a_queue_pair_that_is_closed_ends_direct_access,
    memory_that_moves_is_followed,
    memory_that_is_freed_is_an_error,
    more_memory_than_the_table_has_slots,
    mapped_memory_is_the_peers,
    mapped_memory_is_revoked,
    mapped_memory_that_is_not_unmapped_is_busy,
);

fn code(status: KernelStatus) -> i64 {
    status.code().into()
}

fn failed(status: Status) -> i64 {
    code(KernelStatus::Failed(status))
}

fn direct(end: &Endpoint) -> u64 {
    end.qp.progress().unwrap().direct
}

/// A connection that ends soon after its peer, but not because a peer had to wait for a CPU.
pub fn patient() -> QpOptions {
    QpOptions::default().with_timeout(16).with_retry_count(3)
}

/// Puts until kernels do so by themselves, on links with mapped memory; otherwise puts a few times.
pub fn warm_up(fixture: &Fixture, end: &Endpoint) {
    let (stream, kernel) = (fixture.gpu.stream().unwrap(), fixture.kernel("calls_loop"));
    let start = Instant::now();
    for round in 0.. {
        end.start(&stream, &kernel, 1, &[2, 8]);
        stream.synchronize(test_timeout()).unwrap();
        assert_eq!(end.results(), [2, 0]);
        // The second put, and its get, find both entries of the first ones.
        let is_direct = direct(end) > 0;
        if is_direct || fixture.test_link == TestLink::Loopback && round == 3 {
            assert_eq!(is_direct, fixture.test_link == TestLink::Shm);
            return;
        }
        let path = end.qp.qp().path().unwrap();
        assert!(start.elapsed() < test_timeout(), "never direct: {path}");
    }
}

/// Starts round trips that end with a failure, and waits until they are under way.
pub fn start_traffic(fixture: &Fixture, end: &Endpoint) -> Stream {
    let stream = fixture.gpu.stream().unwrap();
    let before = direct(end);
    end.start(&stream, &fixture.kernel("calls_loop"), 1, &[u64::MAX, 64]);
    if fixture.test_link == TestLink::Shm {
        until("kernels access the peer's memory", || direct(end) > before + 100);
    } else {
        std::thread::sleep(Duration::from_millis(5));
    }
    stream
}

fn every_call_is_direct_where_it_can_be(fixture: &Fixture) {
    for (mode, threads) in MODES {
        let options = fixture.options().with_direct_atomics(true);
        let ends = fixture.shareable_ends(options);
        let [a, b] = &ends;
        warm_up(fixture, a);
        let before = direct(a);
        b.memory.write(0, &vec![0; b.memory.len() as usize]).unwrap();
        make_every_call(fixture, &ends, mode, threads);
        // Seven of eleven: not the messages and the write with immediate data, nor what follows
        // them, perhaps; and a thread alone posts a put of 4 KiB, as it does a get.
        let expected = match (fixture.test_link, threads) {
            (TestLink::Loopback, _) => 0..=0,
            (TestLink::Shm, 1) => 5..=6,
            (TestLink::Shm, _) => 7..=8,
        };
        assert!(expected.contains(&(direct(a) - before)), "{}, {expected:?}", direct(a) - before);
    }
}

fn direct_access_is_an_option(fixture: &Fixture) {
    let [a, b] = fixture.shareable_ends(fixture.options().with_direct(false));
    let stream = fixture.gpu.stream().unwrap();
    for _ in 0..20 {
        a.start(&stream, &fixture.kernel("calls_loop"), 1, &[10, 8]);
        stream.synchronize(test_timeout()).unwrap();
        assert_eq!(a.results(), [10, 0]);
    }
    let progress = a.qp.progress().unwrap();
    assert_eq!((progress.posted, progress.direct), (400, 0));
    assert_eq!(b.read64(0), 10);
    // Without the option for atomics they are posted.
    let ends = fixture.shareable_ends(fixture.options());
    warm_up(fixture, &ends[0]);
    let before = direct(&ends[0]);
    ends[1].memory.write(0, &vec![0; ends[1].memory.len() as usize]).unwrap();
    make_every_call(fixture, &ends, 2, 256);
    assert!(direct(&ends[0]) - before <= 4, "{before}, {}", direct(&ends[0]));
}

fn round_trips_of_every_length(fixture: &Fixture) {
    let [a, b] = fixture.shareable_ends(fixture.options());
    warm_up(fixture, &a);
    let stream = fixture.gpu.stream().unwrap();
    let mut seed = 1_u8;
    for (threads, len) in
        [(1, 8), (1, 24), (1, 512), (1, 520), (32, 1000), (32, 8192), (256, 16384)]
    {
        seed = seed.wrapping_add(17);
        let pattern = bytes(16384, seed);
        a.memory.write(0, &pattern).unwrap();
        b.memory.write(0, &[0xee; 16384 + 64]).unwrap();
        a.start(&stream, &fixture.kernel("calls_loop"), threads, &[3, len]);
        stream.synchronize(test_timeout()).unwrap();
        assert_eq!(a.results(), [3, 0], "{len} bytes by {threads} threads");
        let len = len as usize;
        let there = b.read(0, len);
        // The kernel writes the first and the last word.
        let inner = 8..(len - 8).max(8);
        assert_eq!(there[inner.clone()], pattern[inner], "{len} bytes");
        assert_eq!(b.read(len as u64, 64), [0xee; 64], "behind {len} bytes");
        assert_eq!(a.read(16384, len), there, "{len} bytes come back");
    }
}

fn direct_and_posted_work_keep_their_order(fixture: &Fixture) {
    const ROUNDS: u64 = 2000;
    let [a, b] = fixture.shareable_ends(fixture.options());
    warm_up(fixture, &a);
    b.memory.write(0, &[0; 8]).unwrap();
    let stream = fixture.gpu.stream().unwrap();
    let before = direct(&a);
    a.start(&stream, &fixture.kernel("calls_order"), 1, &[ROUNDS]);
    let (mut last, start) = (0, Instant::now());
    while last < 3 * ROUNDS {
        let now = b.read64(0);
        assert!(now >= last, "{now} after {last}");
        last = now;
        assert!(start.elapsed() < test_timeout(), "{last}; {:?}", a.qp.check());
    }
    stream.synchronize(test_timeout()).unwrap();
    assert_eq!(a.results(), [0, 0]);
    // At least after each time that everything was waited for.
    let was_direct = direct(&a) - before >= ROUNDS / 8;
    assert_eq!(was_direct, fixture.test_link == TestLink::Shm);
}

fn memory_that_the_peer_deregisters_is_not_touched(fixture: &Fixture) {
    for _ in 0..5 {
        let [a, b] = fixture.shareable_ends(fixture.options());
        warm_up(fixture, &a);
        let stream = start_traffic(fixture, &a);
        let Endpoint { qp, memory, mr, .. } = b;
        mr.deregister().unwrap();
        memory.write(0, &[0x77; 64]).unwrap();
        stream.synchronize(test_timeout()).unwrap();
        let [_, status] = a.results();
        assert_eq!(status, failed(Status::RemoteAccess));
        let mut bytes = [0; 64];
        memory.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [0x77; 64], "deregistered memory was written");
        drop(qp);
    }
}

fn local_memory_that_is_deregistered_is_not_used(fixture: &Fixture) {
    for _ in 0..5 {
        let [mut a, b] = fixture.shareable_ends(fixture.options());
        warm_up(fixture, &a);
        let stream = start_traffic(fixture, &a);
        let other = a._context.register(&a._pd, a.memory.whole().unwrap(), a.mr.access()).unwrap();
        std::mem::replace(&mut a.mr, other).deregister().unwrap();
        // Where gets go to, between the words that the kernel compares.
        a.memory.write(16384 + 16, &[0x77; 32]).unwrap();
        stream.synchronize(test_timeout()).unwrap();
        let [_, status] = a.results();
        assert_eq!(status, failed(Status::LocalProtection));
        assert_eq!(a.read(16384 + 16, 32), [0x77; 32], "deregistered memory was written");
        drop(b);
    }
}

fn a_queue_pair_of_the_peer_that_ends(fixture: &Fixture) {
    let options = fixture.options().with_connection(patient());
    let [a, b] = fixture.shareable_ends(options);
    warm_up(fixture, &a);
    let stream = start_traffic(fixture, &a);
    let Endpoint { qp, mr, .. } = b;
    drop(qp);
    stream.synchronize(test_timeout()).unwrap();
    let [_, status] = a.results();
    assert_eq!(status, failed(Status::RetryExceeded));
    mr.deregister().unwrap();
}

fn a_queue_pair_that_is_closed_ends_direct_access(fixture: &Fixture) {
    let [a, b] = fixture.shareable_ends(fixture.options());
    warm_up(fixture, &a);
    let stream = start_traffic(fixture, &a);
    let Endpoint { qp, list, .. } = a;
    drop(qp);
    stream.synchronize(test_timeout()).unwrap();
    let mut status = [0; 8];
    list.read((at::RESULTS + 1) * 8, &mut status).unwrap();
    assert_eq!(i64::from_le_bytes(status), code(KernelStatus::Closed));
    b.mr.deregister().unwrap();
}

fn memory_that_moves_is_followed(fixture: &Fixture) {
    let Some(control) = fixture.control() else { return };
    let [a, b] = fixture.shareable_ends(fixture.options());
    warm_up(fixture, &a);
    let stream = fixture.gpu.stream().unwrap();
    a.start(&stream, &fixture.kernel("calls_loop"), 1, &[3000, 64]);
    for round in 0..20 {
        let moved = if round % 2 == 0 { &a } else { &b };
        control.relocate(&moved.memory).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    stream.synchronize(test_timeout()).unwrap();
    assert_eq!(a.results(), [3000, 0]);
    assert_eq!(b.read64(0), 3000);
}

fn memory_that_is_freed_is_an_error(fixture: &Fixture) {
    let Some(control) = fixture.control() else { return };
    for is_remote in [true, false] {
        let [a, b] = fixture.shareable_ends(fixture.options());
        warm_up(fixture, &a);
        // The kernel itself must not touch what is freed.
        let stream = fixture.gpu.stream().unwrap();
        a.start(&stream, &fixture.kernel("calls_one"), 1, &[]);
        stream.synchronize(test_timeout()).unwrap();
        assert_eq!(a.results(), [0, 0]);
        control.force_free(if is_remote { &b.memory } else { &a.memory }).unwrap();
        a.start(&stream, &fixture.kernel("calls_one"), 1, &[]);
        stream.synchronize(test_timeout()).unwrap();
        let wanted = if is_remote { Status::RemoteAccess } else { Status::LocalProtection };
        assert_eq!(a.results(), [0, failed(wanted)]);
    }
}

/// Registrations share slots of the table: work on those without one is posted.
fn more_memory_than_the_table_has_slots(fixture: &Fixture) {
    const COUNT: usize = 70;
    let [a, b] = fixture.shareable_ends(fixture.options());
    warm_up(fixture, &a);
    let again = |end: &Endpoint| {
        end._context.register(&end._pd, end.memory.whole().unwrap(), end.mr.access()).unwrap()
    };
    let all: Vec<_> = (0..COUNT).map(|_| (again(&a), again(&b))).collect();
    let (stream, kernel) = (fixture.gpu.stream().unwrap(), fixture.kernel("calls_loop"));
    let before = direct(&a);
    for round in 0..2 {
        for (number, (here, there)) in all.iter().enumerate() {
            a.set_param(at::HERE, here.iova());
            a.set_param(at::HERE_KEY, here.lkey().into());
            a.set_param(at::THERE, there.iova());
            a.set_param(at::THERE_KEY, there.rkey().into());
            a.memory.write(0, &[number as u8 | 1; 64]).unwrap();
            b.memory.write(0, &[0; 64]).unwrap();
            a.start(&stream, &kernel, 1, &[3, 64]);
            stream.synchronize(test_timeout()).unwrap();
            assert_eq!(a.results(), [3, 0], "registration {number} in round {round}");
            assert_eq!(b.read(8, 48), a.read(8, 48), "registration {number} in round {round}");
        }
    }
    let [direct, posted] = [direct(&a) - before, a.qp.progress().unwrap().posted];
    assert_eq!(direct > 0, fixture.test_link == TestLink::Shm);
    assert!(posted > COUNT as u64, "{posted} were posted, {direct} not");
}

fn mapped_memory_is_the_peers(fixture: &Fixture) {
    let stream = fixture.gpu.stream().unwrap();
    for threads in [1, 32, 256] {
        let [a, b] = fixture.shareable_ends(fixture.options());
        // Memory that no work request has used is not mapped.
        a.start(&stream, &fixture.kernel("calls_exchange"), threads, &[]);
        stream.synchronize(test_timeout()).unwrap();
        assert_eq!(a.results(), [0, 1]);
        warm_up(fixture, &a);
        let (sent, fetched) = (bytes(4096, 1), bytes(4096, 2));
        a.memory.write(0, &sent).unwrap();
        b.memory.write(16384, &fetched).unwrap();
        a.start(&stream, &fixture.kernel("calls_exchange"), threads, &[]);
        stream.synchronize(test_timeout()).unwrap();
        if fixture.test_link == TestLink::Loopback {
            assert_eq!(a.results(), [0, 1]);
            continue;
        }
        assert_eq!(a.results(), [1, 0]);
        assert_eq!((b.read(0, 4096), a.read(16384, 4096), b.word()), (sent, fetched, 1));
        // Nothing is left that deregistration would wait for.
        b.mr.deregister().unwrap();
    }
}

/// Starts a kernel that stores to mapped memory, and waits until it does.
fn start_storing(fixture: &Fixture, [a, b]: &[Endpoint; 2], stubborn: bool) -> Stream {
    warm_up(fixture, a);
    b.memory.write(0, &[0; 8]).unwrap();
    let stream = fixture.gpu.stream().unwrap();
    a.start(&stream, &fixture.kernel("calls_hold"), 1, &[stubborn.into()]);
    until("the kernel stores", || b.read64(0) > 0);
    stream
}

fn mapped_memory_is_revoked(fixture: &Fixture) {
    if fixture.test_link == TestLink::Loopback {
        let [a, _b] = fixture.shareable_ends(fixture.options());
        let stream = fixture.gpu.stream().unwrap();
        a.start(&stream, &fixture.kernel("calls_hold"), 1, &[0]);
        stream.synchronize(test_timeout()).unwrap();
        return assert_eq!(a.results(), [0, 0]);
    }
    for end_qp in [false, true] {
        let ends = fixture.shareable_ends(fixture.options());
        let stream = start_storing(fixture, &ends, false);
        let [a, Endpoint { qp, memory, mr, .. }] = ends;
        let qp = (!end_qp).then_some(qp);
        mr.deregister().unwrap();
        memory.write(0, &[0x77; 64]).unwrap();
        stream.synchronize(test_timeout()).unwrap();
        let [stored, revoked] = a.results();
        assert!(stored > 0 && revoked == 1, "{stored}, {revoked}");
        let mut bytes = [0; 64];
        memory.read(0, &mut bytes).unwrap();
        assert_eq!(bytes, [0x77; 64], "deregistered memory was written");
        drop(qp);
    }
}

/// A kernel that does not unmap is waited for no longer than others that access the memory.
fn mapped_memory_that_is_not_unmapped_is_busy(fixture: &Fixture) {
    if fixture.test_link == TestLink::Loopback {
        testkit::skip("nothing is mapped over loopback");
    }
    let ends = fixture.shareable_ends(fixture.options());
    let stream = start_storing(fixture, &ends, true);
    let [a, Endpoint { qp, memory, mr, .. }] = ends;
    let error = mr.deregister().unwrap_err();
    assert_eq!(error.kind(), &Kind::Busy, "{error}");
    // The memory is kept, and the kernel stores on.
    let word = |memory: &Allocation| {
        let mut bytes = [0; 8];
        memory.read(0, &mut bytes).unwrap();
        u64::from_le_bytes(bytes)
    };
    let before = word(&memory);
    until("the kernel stores on", || word(&memory) > before);
    a.memory.write(WORD, &1_u64.to_le_bytes()).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    let [stored, revoked] = a.results();
    assert_eq!((stored as u64, revoked), (word(&memory), 1));
    drop(qp);
}
