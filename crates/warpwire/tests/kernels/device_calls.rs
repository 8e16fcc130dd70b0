//! Calls from inside kernels.
#![allow(unsafe_code)]

use std::time::{Duration, Instant};

use warpwire::mem::{Backend, Launch};
use warpwire::stream::KernelQpOptions;
use warpwire::stream::kernel::{CqPlacement, KernelStatus};
use warpwire::verbs::Status;

use crate::kernels::calls::at;
use crate::kernels::fixture::{Endpoint, Fixture, WORD, bytes, short_timeouts, test_timeout};
use testkit::cases;

cases!(Fixture; CASES:
    every_call_transfers_its_data,
    completions_in_pinned_memory,
    the_smallest_queues,
    a_failure_is_reported_with_its_cause,
    a_peer_that_is_gone_is_an_error_soon,
    work_that_is_not_connected_times_out_and_begins_when_it_is,
    closing_ends_waits,
    many_threads_lose_nothing,
    kernels_keep_what_they_use,
);

const OK: i64 = 0;

fn code(status: KernelStatus) -> i64 {
    status.code().into()
}

fn every_call(fixture: &Fixture, options: KernelQpOptions) {
    // One thread, a warp, a block: the simulator runs one thread for each.
    for (mode, threads) in MODES {
        let [a, b] = fixture.ends_with(options.clone());
        make_every_call(fixture, &[a, b], mode, threads);
    }
}

/// The modes of `calls_active` and `calls_passive`, with the numbers of threads.
pub const MODES: [(u64, u32); 3] = [(0, 1), (1, 32), (2, 256)];

/// Makes every call from one end to the other, which must have made none before, and checks the
/// results.
pub fn make_every_call(fixture: &Fixture, [a, b]: &[Endpoint; 2], mode: u64, threads: u32) {
    let before = a.qp.progress().unwrap();
    let (sent, fetched) = (bytes(8192, 1), bytes(4096, 2));
    a.memory.write(0, &sent).unwrap();
    b.memory.write(16384, &fetched).unwrap();
    let streams = [fixture.gpu.stream().unwrap(), fixture.gpu.stream().unwrap()];
    b.start(&streams[1], &fixture.kernel("calls_passive"), threads, &[mode]);
    a.start(&streams[0], &fixture.kernel("calls_active"), threads, &[mode]);
    for stream in &streams {
        stream.synchronize(test_timeout()).unwrap();
    }
    let wanted = [
        OK,
        OK,
        OK,
        OK,
        OK,
        5, // the value before 7 was added
        OK,
        12, // the value that 99 replaced
        OK,
        OK,
        OK,
        OK,
        OK,
        code(KernelStatus::TooLong),
        code(KernelStatus::BadTicket),
    ];
    assert_eq!(a.results(), wanted);
    let imm = |length: i64, imm: i64| length << 32 | 1 << 31 | imm;
    assert_eq!(b.results(), [OK, OK, 100 << 32, OK, imm(50, 77), OK, imm(16, 88)]);
    assert_eq!(b.word(), 99);
    assert_eq!(b.read(0, 4096), sent[..4096]);
    assert_eq!(b.read64(4096), 0x1122_3344_5566_7788);
    assert_eq!(b.read(8192, 64), sent[..64]);
    assert_eq!(a.read(16384, 4096), fetched);
    // Later messages were sent with the results of the atomics in them.
    let later = a.read(0, 100);
    assert_eq!(b.read(12288, 16), later[..16]);
    assert_eq!(b.read(32768, 100), later);
    assert_eq!(b.read(32768 + 256, 50), later[..50]);
    let progress = a.qp.progress().unwrap();
    let made = progress.posted + progress.direct - before.posted - before.direct;
    assert_eq!((made, progress.failure), (11, None));
    assert_eq!(b.qp.progress().unwrap().receives_posted, 3);
    a.qp.check().unwrap();
    b.qp.check().unwrap();
}

fn every_call_transfers_its_data(fixture: &Fixture) {
    every_call(fixture, fixture.options());
}

fn completions_in_pinned_memory(fixture: &Fixture) {
    let completions = CqPlacement::Pinned;
    every_call(fixture, fixture.options().with_completions(completions));
}

fn the_smallest_queues(fixture: &Fixture) {
    every_call(fixture, fixture.options().with_send_depth(2).with_receive_depth(4));
}

fn a_failure_is_reported_with_its_cause(fixture: &Fixture) {
    let [a, b] = fixture.ends();
    let stream = fixture.gpu.stream().unwrap();
    a.start(&stream, &fixture.kernel("calls_fail"), 1, &[]);
    stream.synchronize(test_timeout()).unwrap();
    let (denied, flushed) =
        (KernelStatus::Failed(Status::RemoteAccess), KernelStatus::Failed(Status::Flushed));
    let [third, second, first, quiet, later, receive] = a.results();
    assert_eq!(
        [third, second, first].map(|code| KernelStatus::from_code(code as i32)),
        [flushed, denied, KernelStatus::Ok]
    );
    assert_eq!((quiet, later), (code(denied), code(flushed)));
    // A receive may be posted before the failure was seen; then it is flushed as well.
    assert!([OK, code(flushed)].contains(&receive), "{receive}");
    assert_eq!(a.qp.progress().unwrap().failure, Some((1, Status::RemoteAccess)));
    let error = a.qp.check().unwrap_err().to_string();
    assert!(error.contains("operation 1") && error.contains("remote access"), "{error}");
    assert_eq!(b.read64(0), 1);
}

fn a_peer_that_is_gone_is_an_error_soon(fixture: &Fixture) {
    let options = fixture.options().with_connection(short_timeouts());
    let [a, b] = fixture.ends_with(options);
    drop(b);
    let stream = fixture.gpu.stream().unwrap();
    let start = Instant::now();
    a.start(&stream, &fixture.kernel("calls_one"), 1, &[]);
    stream.synchronize(test_timeout()).unwrap();
    assert!(start.elapsed() < test_timeout() / 2, "{:?}", start.elapsed());
    assert_eq!(a.results(), [OK, code(KernelStatus::Failed(Status::RetryExceeded))]);
    let error = a.qp.check().unwrap_err().to_string();
    assert!(error.contains("operation 0") && error.contains("peer"), "{error}");
}

fn work_that_is_not_connected_times_out_and_begins_when_it_is(fixture: &Fixture) {
    let [context, other] = crate::kernels::fixture::contexts(fixture.test_link);
    let a = crate::kernels::fixture::Endpoint::new(context, &fixture.gpu, fixture.options());
    let b = crate::kernels::fixture::Endpoint::new(other, &fixture.gpu, fixture.options());
    a.write_params(b.mr.remote(0), b.mr.remote(WORD));
    a.memory.write(0, &77_u64.to_le_bytes()).unwrap();
    a.set_param(at::TIMEOUT, 20_000_000);
    let stream = fixture.gpu.stream().unwrap();
    let kernel = fixture.kernel("calls_one");
    a.start(&stream, &kernel, 1, &[]);
    stream.synchronize(test_timeout()).unwrap();
    assert_eq!(a.results(), [OK, code(KernelStatus::Timeout)]);
    a.set_param(at::TIMEOUT, 0);
    a.start(&stream, &kernel, 1, &[]);
    stream.synchronize(test_timeout()).unwrap();
    assert_eq!(a.results(), [OK, code(KernelStatus::NotReady)]);
    a.qp.connect(&b.qp.endpoint()).unwrap();
    b.qp.connect(&a.qp.endpoint()).unwrap();
    a.set_param(at::TIMEOUT, test_timeout().as_nanos() as u64);
    a.start(&stream, &kernel, 1, &[]);
    stream.synchronize(test_timeout()).unwrap();
    assert_eq!(a.results(), [OK, OK]);
    assert_eq!(b.read64(0), 77);
}

fn closing_ends_waits(fixture: &Fixture) {
    let [context, other] = crate::kernels::fixture::contexts(fixture.test_link);
    let a = crate::kernels::fixture::Endpoint::new(context, &fixture.gpu, fixture.options());
    let b = crate::kernels::fixture::Endpoint::new(other, &fixture.gpu, fixture.options());
    a.write_params(b.mr.remote(0), b.mr.remote(WORD));
    let stream = fixture.gpu.stream().unwrap();
    a.start(&stream, &fixture.kernel("calls_one"), 1, &[]); // not connected
    std::thread::sleep(Duration::from_millis(20));
    assert!(!stream.is_idle().unwrap());
    a.qp.close();
    stream.synchronize(test_timeout()).unwrap();
    assert_eq!(a.results(), [OK, code(KernelStatus::Closed)]);
    let error = a.qp.check().unwrap_err().to_string();
    assert!(error.contains("closed"), "{error}");
}

fn many_threads_lose_nothing(fixture: &Fixture) {
    const PAIRS: usize = 4;
    // A warp that posts together needs room for all of its entries.
    let (grid, threads, rounds, modes, send_depth) = match fixture.backend {
        Backend::Sim => (8, 1, 300, 1, 16),
        Backend::Cuda => (8, 128, 64, 2, 256),
    };
    let options = fixture.options().with_send_depth(send_depth);
    let ends: Vec<_> = (0..PAIRS).map(|_| fixture.ends_with(options.clone())).collect();
    for mode in 0..modes {
        let table = fixture.gpu.alloc(4096).unwrap();
        for (number, [a, b]) in ends.iter().enumerate() {
            b.memory.write(0, &vec![0; WORD as usize + 8]).unwrap();
            let at = number as u64 * 8;
            table.write(at, &a.qp.handle().raw().to_le_bytes()).unwrap();
            table.write(1024 + at, &a.list.address().raw().to_le_bytes()).unwrap();
        }
        table.write(2048, &[0; 8]).unwrap();
        let stream = fixture.gpu.stream().unwrap();
        let kernel = fixture.kernel("calls_storm");
        let mut launch = Launch::new(&kernel).grid(grid).threads(threads);
        for offset in [0, 1024] {
            launch = launch.region(&table.region(offset, 1024).unwrap());
        }
        launch = launch.value(PAIRS as u64).value(rounds).value(mode);
        launch = launch.region(&table.region(2048, 8).unwrap());
        // SAFETY: the kernel accesses the handles and lists in the table, whose ends outlive the
        // stream's work.
        unsafe { stream.launch(launch) }.unwrap();
        stream.synchronize(test_timeout() * 3).unwrap();
        let mut wrong = [0; 8];
        table.read(2048, &mut wrong).unwrap();
        assert_eq!(u64::from_le_bytes(wrong), 0, "{:?}", ends[0][0].qp.check());
        let per_pair = u64::from(grid * threads) / PAIRS as u64;
        let mut places = 0;
        for [a, b] in &ends {
            assert_eq!(b.word(), per_pair * rounds);
            places += (0..u64::from(grid * threads)).filter(|t| b.read64(t * 8) == rounds).count();
            let progress = a.qp.progress().unwrap();
            assert_eq!(progress.posted + progress.direct, (mode + 1) * per_pair * rounds * 2);
            a.qp.check().unwrap();
        }
        assert_eq!(places as u32, grid * threads);
    }
}

fn kernels_keep_what_they_use(fixture: &Fixture) {
    let [a, b] = fixture.ends();
    let stream = fixture.gpu.stream().unwrap();
    b.set_param(at::TIMEOUT, 300_000_000);
    let list = b.list.clone();
    b.start(&stream, &fixture.kernel("calls_passive"), 1, &[0]); // no message ever arrives
    drop((a, b));
    stream.synchronize(test_timeout()).unwrap();
    let mut first = [0; 8];
    list.read(at::RESULTS * 8, &mut first).unwrap();
    assert_eq!(i64::from_le_bytes(first), code(KernelStatus::Timeout));
}
