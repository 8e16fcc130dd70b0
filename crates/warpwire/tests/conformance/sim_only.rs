//! Only on the simulated GPU: fault injection, moving memory, delays.
#![allow(unsafe_code)] // to launch kernels

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use warpwire::error::Kind;
use warpwire::mem::sim::{FailNth, OpKind, POISON, Sim, SimConfig};
use warpwire::mem::{Condition, Launch, MemoryEvent, Program};

use crate::conformance::child::Task;
use crate::conformance::fixture::{Fixture, borrow, expect_pattern, put_pattern, test_timeout};
use crate::conformance::kernels;
use testkit::{cases, once_within};

cases!(Fixture; CASES:
    moved_memory_keeps_its_contents_and_notifies,
    old_pages_are_poisoned_after_a_move,
    memory_moves_under_running_work,
    memory_freed_under_users_is_an_error,
    the_nth_operation_fails,
    a_failed_stream_drops_what_was_queued,
    a_failure_reaches_waiting_streams,
    slow_copies_are_slow,
    a_dead_device_fails_all_work,
    kernels_with_faults_fail_their_stream,
    the_environment_sets_up_the_machine,
    huge_memory_costs_nothing_until_written,
    a_fault_ends_the_whole_grid,
    a_panicking_listener_fails_the_stream,
    watches_may_own_watches,
    memory_files_cannot_be_resized,
    memory_can_be_freed_after_n_operations,
    block_functions_have_no_variables,
);

fn moved_memory_keeps_its_contents_and_notifies(f: &Fixture) {
    let memory = f.gpu.alloc(100_000).unwrap();
    put_pattern(&memory, 6);
    let events = Arc::new(Mutex::new(Vec::new()));
    let log = events.clone();
    let watch = memory.watch(Arc::new(move |event| log.lock().push(event))).unwrap();
    let address = memory.address();
    f.control().relocate(&memory).unwrap();
    assert_eq!(memory.address(), address);
    expect_pattern(&memory, 6);
    assert_eq!(*events.lock(), [MemoryEvent::Moving, MemoryEvent::Moved]);
    drop(watch);
    f.control().relocate(&memory).unwrap();
    assert_eq!(events.lock().len(), 2, "a dropped watch receives no events");
    let pinned = f.gpu.alloc_pinned(64).unwrap();
    assert_eq!(f.control().relocate(&pinned).unwrap_err().kind(), &Kind::Unsupported);
    let gone = f.gpu.alloc(64).unwrap();
    gone.free().unwrap();
    assert_eq!(f.control().relocate(&gone).unwrap_err().kind(), &Kind::NotDeviceMemory);
}

fn old_pages_are_poisoned_after_a_move(f: &Fixture) {
    let memory = f.gpu.alloc(8192).unwrap();
    put_pattern(&memory, 6);
    let before = memory.export_dmabuf(0, 8192).unwrap();
    f.control().relocate(&memory).unwrap();
    let mut bytes = [0; 8192];
    rustix::io::pread(before.as_fd(), &mut bytes, 0).unwrap();
    assert!(bytes.iter().all(|byte| *byte == POISON));
    let after = memory.export_dmabuf(0, 8192).unwrap();
    f.control().force_free(&memory).unwrap();
    rustix::io::pread(after.as_fd(), &mut bytes, 0).unwrap();
    assert!(bytes.iter().all(|byte| *byte == POISON));
}

fn memory_moves_under_running_work(_: &Fixture) {
    let sim = Sim::start(SimConfig::default().with_move_every(3)).unwrap();
    let gpu = sim.device(0).unwrap();
    let (a, b) = (gpu.alloc(50_000).unwrap(), gpu.alloc(50_000).unwrap());
    put_pattern(&a, 9);
    let streams = [gpu.stream().unwrap(), gpu.stream().unwrap()];
    let other = gpu.alloc(50_000).unwrap();
    for round in 0..300 {
        let (to, from) = if round % 2 == 0 { (&b, &a) } else { (&a, &b) };
        streams[0].copy(&to.whole().unwrap(), &from.whole().unwrap()).unwrap();
        streams[1].copy(&other.whole().unwrap(), &a.whole().unwrap()).unwrap();
    }
    for stream in &streams {
        stream.synchronize(test_timeout()).unwrap();
    }
    expect_pattern(&a, 9);
    expect_pattern(&b, 9);
}

fn memory_freed_under_users_is_an_error(f: &Fixture) {
    let (memory, other) = (f.gpu.alloc(4096).unwrap(), f.gpu.alloc(4096).unwrap());
    let borrowed = borrow(&f.gpu, memory.address(), 4096).unwrap();
    let events_seen = Arc::new(Mutex::new(Vec::new()));
    let log = events_seen.clone();
    let _watch = memory.watch(Arc::new(move |event| log.lock().push(event))).unwrap();
    f.control().force_free(&memory).unwrap();
    assert_eq!(*events_seen.lock(), [MemoryEvent::Freed]);
    assert_eq!(memory.read(0, &mut [0]).unwrap_err().kind(), &Kind::Freed);
    assert_eq!(borrowed.read(0, &mut [0]).unwrap_err().kind(), &Kind::Freed);
    assert!(borrow(&f.gpu, memory.address(), 1).is_err());
    assert!(f.control().force_free(&memory).is_err());
    // A copy from freed memory fails its stream, and no other.
    let stream = f.gpu.stream().unwrap();
    stream.copy(&other.whole().unwrap(), &memory.whole().unwrap()).unwrap();
    assert_eq!(stream.synchronize(test_timeout()).unwrap_err().kind(), &Kind::Freed);
    let stream = f.gpu.stream().unwrap();
    stream.fill(&other.whole().unwrap(), 1).unwrap();
    stream.synchronize(test_timeout()).unwrap();
}

fn the_nth_operation_fails(f: &Fixture) {
    let memory = f.gpu.alloc(4096).unwrap();
    f.control().fail(FailNth { kind: OpKind::Copy, number: 3 });
    let stream = f.gpu.stream().unwrap();
    for _ in 0..2 {
        stream.fill(&memory.whole().unwrap(), 1).unwrap();
        stream.synchronize(test_timeout()).unwrap();
    }
    stream.fill(&memory.whole().unwrap(), 1).unwrap();
    let error = stream.synchronize(test_timeout()).unwrap_err();
    assert!(error.to_string().contains("copy:3"), "{error}");
    f.gpu.stream().unwrap().fill(&memory.whole().unwrap(), 1).unwrap();

    f.control().fail(FailNth { kind: OpKind::Alloc, number: 1 });
    assert!(f.gpu.alloc(64).is_err());
    assert!(f.gpu.alloc(64).is_ok());

    f.control().fail(FailNth { kind: OpKind::Mem, number: 1 });
    let stream = f.gpu.stream().unwrap();
    stream.write_value(&memory.word32(0).unwrap(), 1).unwrap();
    assert!(stream.synchronize(test_timeout()).is_err());
}

fn a_failed_stream_drops_what_was_queued(f: &Fixture) {
    let (memory, flag) =
        (f.gpu.alloc(4096).unwrap(), f.gpu.alloc_pinned(8).unwrap().word64(0).unwrap());
    flag.store(0).unwrap();
    let gate = f.gpu.alloc_pinned(8).unwrap().word64(0).unwrap();
    gate.store(0).unwrap();
    f.control().fail(FailNth { kind: OpKind::Copy, number: 1 });
    let stream = f.gpu.stream().unwrap();
    stream.wait_value(&gate, Condition::AtLeast, 1).unwrap();
    stream.fill(&memory.whole().unwrap(), 1).unwrap();
    stream.write_value(&flag, 1).unwrap();
    gate.store(1).unwrap();
    let first = stream.synchronize(test_timeout()).unwrap_err();
    for _ in 0..3 {
        let later = stream.write_value(&flag, 1).unwrap_err();
        assert_eq!(later.to_string(), first.to_string(), "later calls report the first failure");
    }
    assert!(stream.capture(|_| Ok(())).is_err());
    assert_eq!(flag.load().unwrap(), 0);
    memory.free().unwrap();
}

fn a_failure_reaches_waiting_streams(f: &Fixture) {
    let (first, second) = (f.gpu.stream().unwrap(), f.gpu.stream().unwrap());
    let (gate, event) = (f.gpu.alloc_pinned(8).unwrap().word64(0).unwrap(), f.gpu.event().unwrap());
    gate.store(0).unwrap();
    let memory = f.gpu.alloc(64).unwrap();
    first.wait_value(&gate, Condition::AtLeast, 1).unwrap();
    first.fill(&memory.whole().unwrap(), 1).unwrap();
    first.record(&event).unwrap();
    second.wait_event(&event).unwrap();
    f.control().fail(FailNth { kind: OpKind::Copy, number: 1 });
    gate.store(1).unwrap();
    assert!(first.synchronize(test_timeout()).is_err());
    assert!(second.synchronize(test_timeout()).is_err(), "the event is never reached");
    assert!(event.is_complete().is_err());
}

fn slow_copies_are_slow(f: &Fixture) {
    let memory = f.gpu.alloc(64).unwrap();
    f.control().delay_copies(Duration::from_millis(50));
    let stream = f.gpu.stream().unwrap();
    once_within(Duration::from_millis(150), "queueing", || {
        stream.synchronize(test_timeout()).unwrap();
        for _ in 0..4 {
            stream.fill(&memory.whole().unwrap(), 1).unwrap();
        }
    });
    let start = Instant::now();
    for _ in 0..4 {
        stream.fill(&memory.whole().unwrap(), 1).unwrap();
    }
    stream.synchronize(test_timeout()).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(200));
}

fn a_dead_device_fails_all_work(_: &Fixture) {
    let sim = Sim::start(SimConfig::default()).unwrap();
    let (gpu, control) = (sim.device(0).unwrap(), sim.control(0).unwrap());
    let words = gpu.alloc_pinned(64).unwrap();
    words.write(0, &[0; 64]).unwrap();
    let (waiting, running) = (gpu.stream().unwrap(), gpu.stream().unwrap());
    waiting.wait_value(&words.word64(0).unwrap(), Condition::AtLeast, 1).unwrap();
    let kernel = kernels::load(&gpu).unwrap().kernel("answer").unwrap();
    let (ask, answer) = (words.word64(8).unwrap(), words.word64(16).unwrap());
    let launch = Launch::new(&kernel).region(ask.region()).region(answer.region()).value(1);
    // SAFETY: the kernel accesses only the two words in its arguments.
    unsafe { running.launch(launch) }.unwrap();
    control.kill();
    for stream in [&waiting, &running] {
        let error = stream.synchronize(test_timeout()).unwrap_err();
        assert!(error.to_string().contains("killed"), "{error}");
    }
    assert_eq!(gpu.alloc(64).unwrap_err().kind(), &Kind::DeviceLost);
    assert_eq!(gpu.stream().unwrap_err().kind(), &Kind::DeviceLost);
    drop((waiting, running, ask, answer, words));
    control.wait_empty(test_timeout()).unwrap();
    // The other device still works.
    sim.device(1).unwrap().alloc(64).unwrap();
}

fn kernels_with_faults_fail_their_stream(f: &Fixture) {
    let program = Program::new("faulty")
        .block("panics", |_| panic!("on purpose: a block that panics"))
        .block("wants_more", |block| block.value(3).map(|_| ()))
        .block("half", |block| {
            if block.index() % 2 == 0 {
                Err(warpwire::mem::sim::KernelFault::new("even"))
            } else {
                Ok(())
            }
        });
    let module = f.gpu.load(&program).unwrap();
    for (name, text) in [("panics", "panicked"), ("wants_more", "argument 3"), ("half", "even")] {
        let stream = f.gpu.stream().unwrap();
        let kernel = module.kernel(name).unwrap();
        // SAFETY: these kernels access no memory.
        unsafe { stream.launch(Launch::new(&kernel).grid(8)) }.unwrap();
        let error = stream.synchronize(test_timeout()).unwrap_err();
        assert!(error.to_string().contains(text), "{error}");
        assert!(error.to_string().contains(name), "{error}");
    }
}

fn the_environment_sets_up_the_machine(_: &Fixture) {
    let variable = warpwire::mem::sim::ENV_VAR;
    Task::Discover.spawn_with(&[(variable, "gpus=5,memory=1MiB")]).expect_success();
}

/// Runs in a child with `WARPWIRE_SIM` set.
pub fn discover() {
    let found = warpwire::mem::discover();
    let sims = found.devices_of(warpwire::mem::Backend::Sim);
    assert_eq!(sims.len(), 5);
    assert_eq!(sims[4].info().total_memory, 1 << 20);
    assert_eq!(warpwire::mem::open("sim:4").unwrap(), sims[4]);
    let error = warpwire::mem::open("sim:5").unwrap_err();
    assert!(error.to_string().contains("5 GPUs"), "{error}");
    for label in ["sim", "sim:", "sim:x", "gpu:0", "", "sim:-1"] {
        assert!(warpwire::mem::open(label).is_err(), "{label}");
    }
}

fn huge_memory_costs_nothing_until_written(_: &Fixture) {
    let sim = Sim::start(SimConfig::default().with_memory(1 << 40)).unwrap();
    let gpu = sim.device(0).unwrap();
    let memory = gpu.alloc(512 << 30).unwrap();
    memory.write((512 << 30) - 8, &[7; 8]).unwrap();
    let start = Instant::now();
    sim.control(0).unwrap().relocate(&memory).unwrap();
    assert!(start.elapsed() < Duration::from_secs(5), "holes are not copied");
    let mut bytes = [0; 8];
    memory.read((512 << 30) - 8, &mut bytes).unwrap();
    assert_eq!(bytes, [7; 8]);
}

fn a_fault_ends_the_whole_grid(f: &Fixture) {
    let program = Program::new("half faulty").block("wait_for_it", |block| {
        if block.index() == 0 {
            return Err(warpwire::mem::sim::KernelFault::new("block 0 failed on purpose"));
        }
        block.spin_until(|| Ok(false))
    });
    let kernel = f.gpu.load(&program).unwrap().kernel("wait_for_it").unwrap();
    let stream = f.gpu.stream().unwrap();
    // SAFETY: the kernel accesses no memory.
    unsafe { stream.launch(Launch::new(&kernel).grid(4)) }.unwrap();
    let error = stream.synchronize(test_timeout()).unwrap_err();
    assert!(error.to_string().contains("failed on purpose"), "{error}");
}

fn a_panicking_listener_fails_the_stream(_: &Fixture) {
    let sim = Sim::start(SimConfig::default().with_move_every(1)).unwrap();
    let gpu = sim.device(0).unwrap();
    let memory = gpu.alloc(64).unwrap();
    let _watch = memory.watch(Arc::new(|_| panic!("on purpose: a listener that panics"))).unwrap();
    let stream = gpu.stream().unwrap();
    stream.fill(&memory.whole().unwrap(), 1).unwrap();
    let error = stream.synchronize(test_timeout()).unwrap_err();
    assert!(error.to_string().contains("panicked"), "{error}");
    drop((stream, _watch, memory));
    sim.control(0).unwrap().wait_empty(test_timeout()).unwrap();
}

fn watches_may_own_watches(f: &Fixture) {
    let memory = f.gpu.alloc(64).unwrap();
    let inner = Mutex::new(Some(memory.watch(Arc::new(|_| ())).unwrap()));
    let outer = memory.watch(Arc::new(move |_| drop(inner.lock().take()))).unwrap();
    f.control().relocate(&memory).unwrap();
    drop(outer);
}

fn memory_files_cannot_be_resized(f: &Fixture) {
    let memory = f.gpu.alloc(8192).unwrap();
    put_pattern(&memory, 2);
    let file = std::fs::File::from(memory.export_dmabuf(0, 8192).unwrap().into_fd());
    assert!(file.set_len(0).is_err());
    assert!(file.set_len(1 << 20).is_err());
    expect_pattern(&memory, 2);
}

fn memory_can_be_freed_after_n_operations(_: &Fixture) {
    let sim = Sim::start(SimConfig::default().with_free_at(3)).unwrap();
    let gpu = sim.device(0).unwrap();
    let (memory, stream) = (gpu.alloc(64).unwrap(), gpu.stream().unwrap());
    for _ in 0..4 {
        stream.fill(&memory.whole().unwrap(), 1).unwrap();
    }
    let error = stream.synchronize(test_timeout()).unwrap_err();
    assert_eq!(error.kind(), &Kind::Freed, "{error}");
}

fn block_functions_have_no_variables(f: &Fixture) {
    let error = kernels::load(&f.gpu).unwrap().set("word", &[0; 8]).unwrap_err();
    assert_eq!(error.kind(), &Kind::Unsupported, "{error}");
    assert!(error.to_string().contains("capture"), "{error}");
}
