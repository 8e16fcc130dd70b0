//! Streams, events and graphs.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use warpwire::error::Kind;
use warpwire::mem::{Condition, MemOp, MemoryKind, Stream, Word};

use crate::conformance::fixture::{Fixture, SHORT_WAIT, expect_pattern, put_pattern, test_timeout};
use testkit::{cases, until};

cases!(Fixture; CASES:
    copies_go_in_all_directions,
    copies_between_devices,
    wrong_copies_are_refused,
    fills_are_exact,
    work_runs_in_order,
    streams_run_concurrently,
    waits_end_when_their_condition_holds,
    waits_compare_with_wraparound,
    batches_keep_their_order,
    long_batches_are_complete,
    batches_copy_and_flush_in_their_order,
    source_bytes_may_change_after_the_call,
    wrong_word_operations_are_refused,
    a_timeout_names_the_awaited_value,
    events_order_streams,
    events_measure_time,
    host_calls_run_in_stream_order,
    a_panicking_host_call_fails_the_stream,
    graphs_replay_a_thousand_times,
    captures_run_nothing,
    a_failed_capture_leaves_the_stream_usable,
    calls_that_disturb_a_capture_are_refused,
    graphs_keep_what_they_use,
    a_dropped_stream_finishes_its_work,
    operations_keep_what_they_use,
    a_panic_in_a_capture_ends_it,
    other_threads_are_kept_out_of_a_capture,
    graphs_are_replayed_from_many_threads,
    waiters_wait_for_the_recording_that_they_saw,
    finished_operations_release_their_memory,
    memory_of_another_device_is_refused,
);

fn pinned_word(f: &Fixture) -> Word {
    let word = f.gpu.alloc_pinned(8).unwrap().word64(0).unwrap();
    word.store(0).unwrap();
    word
}

/// A stream that is blocked until the word is set.
fn gated_stream(f: &Fixture) -> (Stream, Word) {
    let (stream, gate) = (f.gpu.stream().unwrap(), pinned_word(f));
    stream.wait_value(&gate, Condition::AtLeast, 1).unwrap();
    (stream, gate)
}

fn copies_go_in_all_directions(f: &Fixture) {
    let stream = f.gpu.stream().unwrap();
    let kinds = f.device_kinds().into_iter().chain([MemoryKind::Pinned]);
    let buffers: Vec<_> = kinds.map(|kind| f.gpu.alloc_kind(70_001, kind).unwrap()).collect();
    for (number, from) in buffers.iter().enumerate() {
        for to in buffers.iter().filter(|to| to.address() != from.address()) {
            put_pattern(from, number as u64);
            stream.fill(&to.whole().unwrap(), 0).unwrap();
            stream.copy(&to.whole().unwrap(), &from.whole().unwrap()).unwrap();
            stream.synchronize(test_timeout()).unwrap();
            expect_pattern(to, number as u64);
        }
    }
    // Both ends unaligned, inside one allocation.
    let memory = &buffers[0];
    put_pattern(memory, 3);
    let mut expected = [0; 999];
    memory.read(13, &mut expected).unwrap();
    stream.copy(&memory.region(50_001, 999).unwrap(), &memory.region(13, 999).unwrap()).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    let mut found = [0; 999];
    memory.read(50_001, &mut found).unwrap();
    assert_eq!(found, expected);
}

fn copies_between_devices(f: &Fixture) {
    let Some(other) = f.other() else { return };
    let (from, to) = (f.gpu.alloc(65_537).unwrap(), other.alloc(65_537).unwrap());
    put_pattern(&from, 8);
    let stream = f.gpu.stream().unwrap();
    stream.copy(&to.whole().unwrap(), &from.whole().unwrap()).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    expect_pattern(&to, 8);
}

fn wrong_copies_are_refused(f: &Fixture) {
    let stream = f.gpu.stream().unwrap();
    let memory = f.gpu.alloc(100).unwrap();
    let region = |offset, len| memory.region(offset, len).unwrap();
    for (to, from) in [((0, 10), (20, 11)), ((0, 10), (9, 10)), ((5, 5), (5, 5))] {
        let error = stream.copy(&region(to.0, to.1), &region(from.0, from.1)).unwrap_err();
        assert_eq!(error.kind(), &Kind::InvalidArgument, "{error}");
    }
    stream.copy(&region(0, 0), &region(5, 0)).unwrap();
    if f.backend == warpwire::mem::Backend::Cuda {
        let simulated = warpwire::mem::open("sim:0").unwrap().alloc(10).unwrap();
        let error = stream.copy(&region(0, 10), &simulated.whole().unwrap()).unwrap_err();
        assert!(error.advice().is_some(), "{error}");
    }
}

fn fills_are_exact(f: &Fixture) {
    let memory = f.gpu.alloc(4096).unwrap();
    let stream = f.gpu.stream().unwrap();
    stream.fill(&memory.whole().unwrap(), 0x11).unwrap();
    stream.fill(&memory.region(3, 1001).unwrap(), 0x22).unwrap();
    stream.fill_u32(&memory.region(2048, 12).unwrap(), 0xdead_beef).unwrap();
    stream.fill(&memory.region(7, 0).unwrap(), 0x33).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    let mut bytes = [0; 4096];
    memory.read(0, &mut bytes).unwrap();
    assert!(bytes[..3].iter().chain(&bytes[1004..2048]).all(|byte| *byte == 0x11));
    assert!(bytes[3..1004].iter().all(|byte| *byte == 0x22));
    assert_eq!(&bytes[2048..2060], 0xdead_beef_u32.to_le_bytes().repeat(3));
    for (offset, len) in [(1, 8), (4, 7)] {
        let error = stream.fill_u32(&memory.region(offset, len).unwrap(), 0).unwrap_err();
        assert_eq!(error.kind(), &Kind::Misaligned);
    }
}

fn work_runs_in_order(f: &Fixture) {
    let memory = f.gpu.alloc(1 << 16).unwrap();
    let stream = f.gpu.stream().unwrap();
    for round in 0..200_u8 {
        stream.fill(&memory.whole().unwrap(), round).unwrap();
    }
    stream.synchronize(test_timeout()).unwrap();
    let mut bytes = vec![0; 1 << 16];
    memory.read(0, &mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 199));
}

fn streams_run_concurrently(f: &Fixture) {
    let (waiting, gate) = gated_stream(f);
    let other = f.gpu.stream().unwrap();
    let memory = f.gpu.alloc(4096).unwrap();
    other.fill(&memory.whole().unwrap(), 1).unwrap();
    other.synchronize(test_timeout()).unwrap();
    assert!(!waiting.is_idle().unwrap());
    // One stream unblocks the other.
    other.write_value(&gate, 1).unwrap();
    waiting.synchronize(test_timeout()).unwrap();
}

fn waits_end_when_their_condition_holds(f: &Fixture) {
    let stream = f.gpu.stream().unwrap();
    for kind in [MemoryKind::Plain, MemoryKind::Pinned] {
        let memory = f.gpu.alloc_kind(64, kind).unwrap();
        for word in [memory.word32(8).unwrap(), memory.word64(16).unwrap()] {
            for (condition, expected, not_yet, enough) in [
                (Condition::AtLeast, 5, 4, 6),
                (Condition::Equal, 5, 6, 5),
                (Condition::And, 0b0110, 0b1001, 0b1011),
                (
                    Condition::Nor,
                    0xff,
                    if word.region().len() == 4 { 0xffff_ff00 } else { !0xff },
                    0,
                ),
            ] {
                if condition == Condition::Nor && !f.gpu.capabilities().stream_wait_nor.is_yes() {
                    continue;
                }
                word.store(not_yet).unwrap();
                stream.wait_value(&word, condition, expected).unwrap();
                std::thread::sleep(SHORT_WAIT / 4);
                assert!(!stream.is_idle().unwrap(), "{kind} {condition:?} passed too early");
                word.store(enough).unwrap();
                stream.synchronize(test_timeout()).unwrap();
            }
        }
    }
}

fn waits_compare_with_wraparound(f: &Fixture) {
    let stream = f.gpu.stream().unwrap();
    let memory = f.gpu.alloc_pinned(16).unwrap();
    let (narrow, wide) = (memory.word32(0).unwrap(), memory.word64(8).unwrap());
    narrow.store(2).unwrap();
    stream.wait_value(&narrow, Condition::AtLeast, 0xffff_fff0).unwrap();
    wide.store(2).unwrap();
    stream.wait_value(&wide, Condition::AtLeast, u64::MAX - 5).unwrap();
    stream.synchronize(test_timeout()).unwrap();
}

fn batches_keep_their_order(f: &Fixture) {
    let (stream, gate, done) = (f.gpu.stream().unwrap(), pinned_word(f), pinned_word(f));
    let device = f.gpu.alloc(8).unwrap();
    let on_device = device.word64(0).unwrap();
    on_device.store(0).unwrap();
    stream
        .batch(&[
            MemOp::Wait { word: gate.clone(), condition: Condition::AtLeast, value: 1 },
            MemOp::Write { word: on_device.clone(), value: 7 },
            MemOp::Barrier,
            MemOp::Wait { word: on_device.clone(), condition: Condition::Equal, value: 7 },
            MemOp::Write { word: done.clone(), value: 9 },
        ])
        .unwrap();
    std::thread::sleep(SHORT_WAIT);
    assert_eq!(done.load().unwrap(), 0);
    gate.store(1).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    assert_eq!((on_device.load().unwrap(), done.load().unwrap()), (7, 9));
    stream.batch(&[]).unwrap();
}

fn long_batches_are_complete(f: &Fixture) {
    let count = 700;
    let memory = f.gpu.alloc(count * 8).unwrap();
    let words: Vec<_> = (0..count).map(|at| memory.word64(at * 8).unwrap()).collect();
    let write =
        |(at, word): (usize, &Word)| MemOp::Write { word: word.clone(), value: at as u64 + 1 };
    let ops: Vec<_> = words.iter().enumerate().map(write).collect();
    let stream = f.gpu.stream().unwrap();
    stream.batch(&ops).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    let mut bytes = vec![0; (count * 8) as usize];
    memory.read(0, &mut bytes).unwrap();
    for (at, word) in bytes.chunks_exact(8).enumerate() {
        assert_eq!(word, (at as u64 + 1).to_le_bytes());
    }
}

fn batches_copy_and_flush_in_their_order(f: &Fixture) {
    let (stream, gate) = (f.gpu.stream().unwrap(), pinned_word(f));
    let (from, to) = (f.gpu.alloc_pinned(4096).unwrap(), f.gpu.alloc(4096).unwrap());
    put_pattern(&from, 5);
    let on_device = f.gpu.alloc(8).unwrap().word64(0).unwrap();
    on_device.store(0).unwrap();
    let copy =
        |len| MemOp::Copy { to: to.region(0, len).unwrap(), from: from.region(0, 4096).unwrap() };
    let mut ops = vec![
        MemOp::Wait { word: gate.clone(), condition: Condition::AtLeast, value: 1 },
        copy(4096),
        MemOp::Write { word: on_device.clone(), value: 3 },
    ];
    if f.gpu.capabilities().flush_remote_writes.is_yes() {
        ops.insert(1, MemOp::Flush);
    } else {
        assert_eq!(stream.batch(&[MemOp::Flush]).unwrap_err().kind(), &Kind::Unsupported);
    }
    // The lengths of the copy differ: no operation of the batch runs.
    let wrong = stream.batch(&[MemOp::Write { word: on_device.clone(), value: 9 }, copy(8)]);
    assert_eq!(wrong.unwrap_err().kind(), &Kind::InvalidArgument);
    let mixed = MemOp::Copy { to: to.region(0, 64).unwrap(), from: to.region(32, 64).unwrap() };
    assert_eq!(stream.check(&mixed).unwrap_err().kind(), &Kind::InvalidArgument);
    stream.batch(&ops).unwrap();
    std::thread::sleep(SHORT_WAIT);
    assert_eq!(on_device.load().unwrap(), 0);
    gate.store(1).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    assert_eq!(on_device.load().unwrap(), 3);
    expect_pattern(&to, 5);
}

fn source_bytes_may_change_after_the_call(f: &Fixture) {
    let (stream, gate) = (f.gpu.stream().unwrap(), pinned_word(f));
    let memory = f.gpu.alloc(100_000).unwrap();
    memory.write(0, &vec![0; 100_000]).unwrap();
    let mut bytes = vec![7; 30_001];
    // One write before the stream blocks: it may allocate a staging buffer, which would wait for
    // the stream.
    stream.write_memory(&memory.region(0, 30_001).unwrap(), &bytes).unwrap();
    stream.wait_value(&gate, Condition::AtLeast, 1).unwrap();
    bytes.fill(8);
    stream.write_memory(&memory.region(30_001, 30_001).unwrap(), &bytes).unwrap();
    bytes.fill(9);
    gate.store(1).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    let mut found = vec![0; 100_000];
    memory.read(0, &mut found).unwrap();
    assert!(found[..30_001].iter().all(|byte| *byte == 7));
    assert!(found[30_001..60_002].iter().all(|byte| *byte == 8));
    assert!(found[60_002..].iter().all(|byte| *byte == 0));
    let wrong = stream.write_memory(&memory.region(0, 3).unwrap(), &[0; 4]).unwrap_err();
    assert_eq!(wrong.kind(), &Kind::InvalidArgument);
}

fn wrong_word_operations_are_refused(f: &Fixture) {
    let stream = f.gpu.stream().unwrap();
    let memory = f.gpu.alloc(64).unwrap();
    let narrow = memory.word32(0).unwrap();
    let too_wide = stream.write_value(&narrow, 1 << 32).unwrap_err();
    assert_eq!(too_wide.kind(), &Kind::InvalidArgument);
    assert!(stream.wait_value(&narrow, Condition::Equal, u64::MAX).is_err());
    // A batch with one invalid operation is refused as a whole.
    let good = memory.word32(4).unwrap();
    good.store(0).unwrap();
    let batch = [
        MemOp::Write { word: good.clone(), value: 1 },
        MemOp::Write { word: narrow, value: 1 << 40 },
    ];
    assert!(stream.batch(&batch).is_err());
    stream.synchronize(test_timeout()).unwrap();
    assert_eq!(good.load().unwrap(), 0);
}

fn a_timeout_names_the_awaited_value(f: &Fixture) {
    for kind in [MemoryKind::Plain, MemoryKind::Pinned] {
        let word = f.gpu.alloc_kind(8, kind).unwrap().word64(0).unwrap();
        word.store(0x11).unwrap();
        let stream = f.gpu.stream().unwrap();
        stream.wait_value(&word, Condition::AtLeast, 0x77).unwrap();
        until("the stream waits", || stream.blocked_on().is_some());
        let error = stream.synchronize(Duration::from_millis(50)).unwrap_err();
        assert_eq!(error.kind(), &Kind::Timeout);
        let text = error.to_string();
        for part in [stream.label(), word.address().to_string(), "0x77".into(), "0x11".into()] {
            assert!(text.contains(&part), "{part} is not in: {text}");
        }
        let wait = stream.blocked_on().unwrap();
        assert_eq!((wait.address, wait.expected, wait.actual), (word.address(), 0x77, Some(0x11)));
        word.store(0x77).unwrap();
        stream.synchronize(test_timeout()).unwrap();
        assert_eq!(stream.blocked_on(), None);
    }
}

fn events_order_streams(f: &Fixture) {
    let (first, gate) = gated_stream(f);
    let second = f.gpu.stream().unwrap();
    let memory = f.gpu.alloc(4096).unwrap();
    let event = f.gpu.event().unwrap();
    assert!(event.is_complete().unwrap(), "an event never recorded is complete");
    first.fill(&memory.whole().unwrap(), 1).unwrap();
    first.record(&event).unwrap();
    second.wait_event(&event).unwrap();
    second.fill(&memory.whole().unwrap(), 2).unwrap();
    std::thread::sleep(SHORT_WAIT);
    assert!(!event.is_complete().unwrap());
    assert!(!second.is_idle().unwrap());
    let error = event.synchronize(SHORT_WAIT).unwrap_err();
    assert_eq!(error.kind(), &Kind::Timeout);
    gate.store(1).unwrap();
    event.synchronize(test_timeout()).unwrap();
    second.synchronize(test_timeout()).unwrap();
    let mut byte = [0];
    memory.read(4095, &mut byte).unwrap();
    assert_eq!(byte, [2]);
}

fn events_measure_time(f: &Fixture) {
    let (start, end) = (f.gpu.event().unwrap(), f.gpu.event().unwrap());
    let (stream, gate) = (f.gpu.stream().unwrap(), pinned_word(f));
    assert!(end.elapsed_since(&start).is_err(), "neither was recorded");
    stream.record(&start).unwrap();
    stream.wait_value(&gate, Condition::AtLeast, 1).unwrap();
    stream.record(&end).unwrap();
    start.synchronize(test_timeout()).unwrap();
    std::thread::sleep(Duration::from_millis(20));
    gate.store(1).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    let elapsed = end.elapsed_since(&start).unwrap();
    assert!(elapsed >= Duration::from_millis(19) && elapsed < test_timeout(), "{elapsed:?}");
}

fn host_calls_run_in_stream_order(f: &Fixture) {
    let (stream, gate) = gated_stream(f);
    let actual = Arc::new(AtomicU64::new(0));
    let word = pinned_word(f);
    stream.write_value(&word, 3).unwrap();
    let (at_call, reader) = (actual.clone(), word.clone());
    stream
        .call_host(move || at_call.store(reader.load().unwrap() + 100, Ordering::SeqCst))
        .unwrap();
    stream.write_value(&word, 4).unwrap();
    std::thread::sleep(SHORT_WAIT);
    assert_eq!(actual.load(Ordering::SeqCst), 0);
    gate.store(1).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    assert_eq!(actual.load(Ordering::SeqCst), 103);
}

fn a_panicking_host_call_fails_the_stream(f: &Fixture) {
    let stream = f.gpu.stream().unwrap();
    stream.call_host(|| panic!("on purpose: a host call that panics")).unwrap();
    let error = stream.synchronize(test_timeout()).unwrap_err();
    assert_eq!(error.kind(), &Kind::StreamFailed);
    let memory = f.gpu.alloc(8).unwrap();
    let again = stream.fill(&memory.whole().unwrap(), 0).unwrap_err();
    assert!(again.to_string().contains("panicked"), "{again}");
    // Other streams keep working.
    f.gpu.stream().unwrap().fill(&memory.whole().unwrap(), 0).unwrap();
}

fn graphs_replay_a_thousand_times(f: &Fixture) {
    let stream = f.gpu.stream().unwrap();
    let (from, to) = (f.gpu.alloc(4096).unwrap(), f.gpu.alloc(4096).unwrap());
    let (flag, calls) = (pinned_word(f), Arc::new(AtomicU64::new(0)));
    let event = f.gpu.event().unwrap();
    put_pattern(&from, 21);
    let counter = calls.clone();
    let graph = stream
        .capture(|stream| {
            stream.fill(&to.whole()?, 0)?;
            stream.write_value(&flag, 5)?;
            stream.batch(&[
                MemOp::Wait { word: flag.clone(), condition: Condition::Equal, value: 5 },
                MemOp::Barrier,
                MemOp::Write { word: flag.clone(), value: 6 },
            ])?;
            stream.copy(&to.whole()?, &from.whole()?)?;
            stream.record(&event)?;
            let counter = counter.clone();
            stream.call_host(move || {
                counter.fetch_add(1, Ordering::SeqCst);
            })
        })
        .unwrap();
    assert_eq!(graph.len(), 6);
    for _ in 0..1000 {
        stream.replay(&graph).unwrap();
    }
    stream.synchronize(test_timeout()).unwrap();
    assert_eq!(calls.load(Ordering::SeqCst), 1000);
    assert_eq!(flag.load().unwrap(), 6);
    assert!(event.is_complete().unwrap());
    expect_pattern(&to, 21);
    // On another stream as well.
    let other = f.gpu.stream().unwrap();
    other.replay(&graph).unwrap();
    other.synchronize(test_timeout()).unwrap();
    assert_eq!(calls.load(Ordering::SeqCst), 1001);
}

fn captures_run_nothing(f: &Fixture) {
    let stream = f.gpu.stream().unwrap();
    let word = pinned_word(f);
    let graph = stream.capture(|stream| stream.write_value(&word, 1)).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    std::thread::sleep(SHORT_WAIT);
    assert_eq!(word.load().unwrap(), 0);
    stream.replay(&graph).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    assert_eq!(word.load().unwrap(), 1);
    let empty = stream.capture(|_| Ok(())).unwrap();
    assert!(empty.is_empty());
    stream.replay(&empty).unwrap();
    stream.synchronize(test_timeout()).unwrap();
}

fn a_failed_capture_leaves_the_stream_usable(f: &Fixture) {
    let stream = f.gpu.stream().unwrap();
    let word = pinned_word(f);
    let error = stream
        .capture(|stream| {
            stream.write_value(&word, 1)?;
            stream.fill_u32(&f.gpu.alloc(8)?.region(1, 4)?, 0)
        })
        .unwrap_err();
    assert_eq!(error.kind(), &Kind::Misaligned);
    stream.write_value(&word, 2).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    assert_eq!(word.load().unwrap(), 2);
}

fn calls_that_disturb_a_capture_are_refused(f: &Fixture) {
    let stream = f.gpu.stream().unwrap();
    let word = pinned_word(f);
    let graph = stream
        .capture(|stream| {
            assert_eq!(stream.is_idle().unwrap_err().kind(), &Kind::Busy);
            assert_eq!(stream.synchronize(test_timeout()).unwrap_err().kind(), &Kind::Busy);
            assert_eq!(stream.capture(|_| Ok(())).unwrap_err().kind(), &Kind::Busy);
            // Memory may be allocated and dropped during a capture.
            drop(f.gpu.alloc(4096)?);
            stream.write_value(&word, 8)
        })
        .unwrap();
    stream.replay(&graph).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    assert_eq!(word.load().unwrap(), 8);
}

fn graphs_keep_what_they_use(f: &Fixture) {
    let stream = f.gpu.stream().unwrap();
    let (from, to) = (f.gpu.alloc(4096).unwrap(), f.gpu.alloc(4096).unwrap());
    put_pattern(&from, 4);
    let graph = stream.capture(|s| s.copy(&to.whole()?, &from.whole()?)).unwrap();
    assert_eq!(from.free().unwrap_err().kind(), &Kind::Busy);
    drop(from);
    stream.replay(&graph).unwrap();
    drop(graph);
    stream.synchronize(test_timeout()).unwrap();
    expect_pattern(&to, 4);
    to.free().unwrap();
}

fn a_dropped_stream_finishes_its_work(f: &Fixture) {
    let (stream, gate) = gated_stream(f);
    let done = pinned_word(f);
    stream.write_value(&done, 1).unwrap();
    drop(stream);
    assert_eq!(done.load().unwrap(), 0);
    gate.store(1).unwrap();
    let start = std::time::Instant::now();
    while done.load().unwrap() == 0 {
        assert!(start.elapsed() < test_timeout(), "the work was lost");
        std::thread::yield_now();
    }
}

fn operations_keep_what_they_use(f: &Fixture) {
    let (stream, gate) = gated_stream(f);
    let to = f.gpu.alloc(1 << 20).unwrap();
    // More operations than a stream has between two checkpoints, each with memory of its own.
    for round in 0..100 {
        let from = f.gpu.alloc(1 << 20).unwrap();
        put_pattern(&from, round);
        stream.copy(&to.whole().unwrap(), &from.whole().unwrap()).unwrap();
    }
    gate.store(1).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    expect_pattern(&to, 99);
}

fn a_panic_in_a_capture_ends_it(f: &Fixture) {
    let (stream, word) = (f.gpu.stream().unwrap(), pinned_word(f));
    let capture = || stream.capture(|_| panic!("on purpose: a capture that panics"));
    assert!(catch_unwind(AssertUnwindSafe(capture)).is_err());
    stream.write_value(&word, 1).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    assert_eq!(word.load().unwrap(), 1);
    stream.capture(|stream| stream.write_value(&word, 2)).unwrap();
}

fn other_threads_are_kept_out_of_a_capture(f: &Fixture) {
    let (stream, word) = (f.gpu.stream().unwrap(), pinned_word(f));
    let graph = stream.capture(|capturing| {
        std::thread::scope(|scope| {
            let other = scope.spawn(|| {
                assert_eq!(stream.write_value(&word, 9).unwrap_err().kind(), &Kind::Busy);
                assert_eq!(stream.is_idle().unwrap_err().kind(), &Kind::Busy);
                assert_eq!(stream.capture(|_| Ok(())).unwrap_err().kind(), &Kind::Busy);
            });
            other.join().unwrap();
        });
        capturing.write_value(&word, 1)
    });
    assert_eq!(graph.unwrap().len(), 1);
}

fn graphs_are_replayed_from_many_threads(f: &Fixture) {
    let (memory, count) = (f.gpu.alloc(4096).unwrap(), Arc::new(AtomicU64::new(0)));
    let counter = count.clone();
    let graph = f
        .gpu
        .stream()
        .unwrap()
        .capture(|stream| {
            stream.fill(&memory.whole()?, 1)?;
            let counter = counter.clone();
            stream.call_host(move || {
                counter.fetch_add(1, Ordering::SeqCst);
            })
        })
        .unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                let stream = f.gpu.stream().unwrap();
                (0..50).for_each(|_| stream.replay(&graph).unwrap());
                stream.synchronize(test_timeout()).unwrap();
            });
        }
    });
    assert_eq!(count.load(Ordering::SeqCst), 200);
}

fn waiters_wait_for_the_recording_that_they_saw(f: &Fixture) {
    let (first, gate) = gated_stream(f);
    let (second, waiter) = (f.gpu.stream().unwrap(), f.gpu.stream().unwrap());
    let event = f.gpu.event().unwrap();
    first.record(&event).unwrap();
    waiter.wait_event(&event).unwrap();
    // A later recording that is reached immediately does not release the waiter.
    second.record(&event).unwrap();
    second.synchronize(test_timeout()).unwrap();
    assert!(event.is_complete().unwrap(), "the event refers to its latest recording");
    std::thread::sleep(SHORT_WAIT);
    assert!(!waiter.is_idle().unwrap());
    gate.store(1).unwrap();
    waiter.synchronize(test_timeout()).unwrap();
}

fn finished_operations_release_their_memory(f: &Fixture) {
    let (stream, event) = (f.gpu.stream().unwrap(), f.gpu.event().unwrap());
    let memory = f.gpu.alloc(4096).unwrap();
    stream.fill(&memory.whole().unwrap(), 1).unwrap();
    stream.record(&event).unwrap();
    event.synchronize(test_timeout()).unwrap();
    // No call on the stream is needed: soon its last operation releases the memory.
    let start = std::time::Instant::now();
    while let Err(error) = memory.free() {
        assert_eq!(error.kind(), &Kind::Busy);
        assert!(start.elapsed() < test_timeout(), "{error}");
        std::thread::yield_now();
    }
}

fn memory_of_another_device_is_refused(f: &Fixture) {
    let Some(other) = f.other() else { return };
    let stream = f.gpu.stream().unwrap();
    let (memory, pinned) = (other.alloc(64).unwrap(), other.alloc_pinned(64).unwrap());
    let error = stream.fill(&memory.whole().unwrap(), 1).unwrap_err();
    assert!(error.to_string().contains(&other.label()), "{error}");
    assert!(stream.write_value(&memory.word64(0).unwrap(), 1).is_err());
    stream.write_value(&pinned.word64(0).unwrap(), 1).unwrap();
    stream.synchronize(test_timeout()).unwrap();
}
