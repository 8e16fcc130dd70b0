//! CPU windows onto device memory, and the copy agent.

use std::sync::Arc;

use warpwire::error::Kind;
use warpwire::mem::copy::{Copier, CopyDirection, CopyMethod, CopyPlan, Routine};
use warpwire::mem::{Backend, CopyAgent, DeviceAddr, MemoryKind, WindowOptions, WindowPath};
use warpwire_apps::pattern;

use crate::conformance::child::Task;
use crate::conformance::fixture::{Fixture, borrow, expect_pattern, put_pattern, test_timeout};
use crate::conformance::kernels;
use testkit::cases;

cases!(Fixture; CASES:
    every_kind_of_device_memory_has_a_window,
    small_neighbours_have_windows_of_their_own,
    any_range_of_borrowed_memory_has_a_window,
    windows_report_their_path,
    every_routine_copies_exactly,
    single_words_go_through_windows,
    unaligned_writes_are_visible_immediately,
    several_threads_write_together,
    a_running_kernel_sees_what_the_cpu_writes,
    freed_memory_stays_readable_through_a_window,
    wrong_windows_are_refused,
    many_threads_open_and_close_windows,
    a_child_process_does_not_inherit_windows,
    the_agent_copies_in_both_directions,
    the_agent_serves_many_threads,
    the_agent_refuses_what_it_cannot_do,
    an_agent_that_fell_asleep_wakes_up,
    copiers_are_exact_by_every_method,
    plans_are_measured_quickly,
);

fn every_kind_of_device_memory_has_a_window(f: &Fixture) {
    for kind in f.device_kinds() {
        let memory = f.gpu.alloc_kind(3 << 20, kind).unwrap();
        put_pattern(&memory, 1);
        let window = memory.window().unwrap();
        assert_eq!((window.len(), window.address()), (memory.len(), memory.address()));
        let (mut found, mut wanted) = (vec![0; 70_001], vec![0; 70_001]);
        for offset in [0, 13, 4095, (3 << 20) - 70_001] {
            window.read(offset, &mut found).unwrap();
            memory.read(offset, &mut wanted).unwrap();
            assert!(found == wanted, "{kind} at {offset}");
        }
        let mut bytes = vec![0; 3 << 20];
        pattern::fill_bytes(&mut bytes, 2, 0);
        window.write(0, &bytes).unwrap();
        expect_pattern(&memory, 2);
    }
}

fn small_neighbours_have_windows_of_their_own(f: &Fixture) {
    for kind in [MemoryKind::Plain, MemoryKind::Pool] {
        let small: Vec<_> = (0..6).map(|_| f.gpu.alloc_kind(100, kind).unwrap()).collect();
        for (number, memory) in small.iter().enumerate() {
            memory.window().unwrap().write(0, &[number as u8 + 1; 100]).unwrap();
        }
        for (number, memory) in small.iter().enumerate() {
            let mut found = [0; 100];
            memory.read(0, &mut found).unwrap();
            assert!(
                found.iter().all(|byte| *byte == number as u8 + 1),
                "{kind} {number}: {found:?}"
            );
        }
    }
}

fn any_range_of_borrowed_memory_has_a_window(f: &Fixture) {
    for kind in f.device_kinds() {
        let owner = f.gpu.alloc_kind(5 << 20, kind).unwrap();
        put_pattern(&owner, 4);
        for (offset, len) in [(0, 1), (4097, 3), (2_100_000, 65_537), ((5 << 20) - 9, 9)] {
            let address = DeviceAddr::new(owner.address().raw() + offset);
            let part = borrow(&f.gpu, address, len).unwrap();
            let window = part.window().unwrap();
            let (mut found, mut wanted) = (vec![0; len as usize], vec![0; len as usize]);
            window.read(0, &mut found).unwrap();
            owner.read(offset, &mut wanted).unwrap();
            assert!(found == wanted, "{kind} at {offset}");
        }
        expect_pattern(&owner, 4);
    }
}

fn windows_report_their_path(f: &Fixture) {
    let window = f.gpu.alloc(4096).unwrap().window().unwrap();
    match f.backend {
        Backend::Sim => assert_eq!(window.path(), WindowPath::Memfd),
        Backend::Cuda => {
            assert_ne!(window.path(), WindowPath::Memfd);
            for refusal in window.rejected_paths() {
                assert!(!refusal.why.to_string().is_empty());
                eprintln!("{}: {}", refusal.path, refusal.why);
            }
        }
    }
}

fn every_routine_copies_exactly(f: &Fixture) {
    let memory = f.gpu.alloc(20_000).unwrap();
    let window = memory.window().unwrap();
    let mut data = vec![0; 9000];
    pattern::fill_bytes(&mut data, 7, 0);
    for routine in Routine::available() {
        for (offset, len) in [(0, 9000), (1, 64), (63, 4097), (5, 7), (8, 8), (4, 4), (100, 0)] {
            memory.write(0, &[0xee; 20_000]).unwrap();
            window.write_with(routine, offset, &data[..len]).unwrap();
            let mut found = vec![0; 20_000];
            memory.read(0, &mut found).unwrap();
            let (start, end) = (offset as usize, offset as usize + len);
            assert!(found[start..end] == data[..len], "{routine} store at {offset}, {len} bytes");
            assert!(found[..start].iter().chain(&found[end..]).all(|byte| *byte == 0xee));
            let mut back = vec![0; len];
            window.read_with(routine, offset, &mut back).unwrap();
            assert!(back == data[..len], "{routine} load at {offset}, {len} bytes");
        }
    }
}

/// Unaligned writes are split on the bus; the copy engine must see all parts right after the write.
fn unaligned_writes_are_visible_immediately(f: &Fixture) {
    let memory = f.gpu.alloc(8192).unwrap();
    let window = memory.window().unwrap();
    let mut model = vec![0; 8192];
    memory.write(0, &model).unwrap();
    let mut data = [0; 128];
    for round in 0..3000_u64 {
        let random = pattern::word(77, round);
        let (offset, len) = ((random % 8000) as usize, (random >> 32) as usize % 128 + 1);
        pattern::fill_bytes(&mut data, round, 0);
        window.write(offset as u64, &data[..len]).unwrap();
        model[offset..offset + len].copy_from_slice(&data[..len]);
        let mut found = vec![0; len + 64];
        memory.read(offset as u64, &mut found).unwrap();
        assert!(
            found == model[offset..offset + len + 64],
            "round {round}: {len} bytes at {offset}"
        );
    }
}

fn several_threads_write_together(f: &Fixture) {
    let memory = f.gpu.alloc((3 << 20) + 77).unwrap();
    let window = memory.window().unwrap();
    let mut data = vec![0; (3 << 20) + 50];
    pattern::fill_bytes(&mut data, 6, 0);
    for threads in [0, 1, 3, 64] {
        memory.write(0, &vec![0; (3 << 20) + 77]).unwrap();
        window.write_parallel(threads, 9, &data).unwrap();
        let mut found = vec![0; data.len()];
        memory.read(9, &mut found).unwrap();
        assert!(found == data, "{threads} threads");
    }
    assert!(window.write_parallel(2, 100, &data).is_err(), "past the end");
    window.write_parallel(2, 0, &[]).unwrap();
}

fn single_words_go_through_windows(f: &Fixture) {
    let memory = f.gpu.alloc(64).unwrap();
    let window = memory.window().unwrap();
    window.bytes().store_u32(4, 0x1122_3344).unwrap();
    window.bytes().store_u64(8, u64::MAX - 1).unwrap();
    window.flush();
    assert_eq!(memory.word32(4).unwrap().load().unwrap(), 0x1122_3344);
    assert_eq!(memory.word64(8).unwrap().load().unwrap(), u64::MAX - 1);
    memory.word64(16).unwrap().store(77).unwrap();
    assert_eq!(window.bytes().load_u64(16).unwrap(), 77);
    assert_eq!(window.bytes().load_u64(3).unwrap_err().kind(), &Kind::Misaligned);
    assert_eq!(window.bytes().load_u64(60).unwrap_err().kind(), &Kind::OutOfRange);
}

fn a_running_kernel_sees_what_the_cpu_writes(f: &Fixture) {
    let kernel = kernels::load(&f.gpu).unwrap().kernel("answer").unwrap();
    let ask = f.gpu.alloc(8).unwrap();
    ask.write(0, &[0; 8]).unwrap();
    let (window, answer) = (ask.window().unwrap(), f.gpu.alloc_pinned(8).unwrap());
    let answer = answer.word64(0).unwrap();
    answer.store(0).unwrap();
    let stream = f.gpu.stream().unwrap();
    crate::conformance::fixture::launch_answer(
        &stream,
        &kernel,
        &ask.whole().unwrap(),
        answer.region(),
        200,
    );
    for round in 1..=200_u64 {
        window.write(0, &round.to_le_bytes()).unwrap();
        let start = std::time::Instant::now();
        while answer.load().unwrap() < round {
            assert!(start.elapsed() < test_timeout(), "no answer to {round}");
            std::hint::spin_loop();
        }
    }
    stream.synchronize(test_timeout()).unwrap();
}

fn freed_memory_stays_readable_through_a_window(f: &Fixture) {
    for kind in f.device_kinds() {
        let memory = f.gpu.alloc_kind(1 << 16, kind).unwrap();
        put_pattern(&memory, 6);
        let window = memory.window().unwrap();
        memory.free().unwrap();
        drop(memory);
        // New allocations must not reuse the memory while the window exists.
        let others: Vec<_> = (0..8).map(|_| f.gpu.alloc_kind(1 << 16, kind).unwrap()).collect();
        others.iter().for_each(|other| put_pattern(other, 9));
        let (mut found, mut wanted) = (vec![0; 1 << 16], vec![0; 1 << 16]);
        window.read(0, &mut found).unwrap();
        pattern::fill_bytes(&mut wanted, 6, 0);
        if kind == MemoryKind::Pool {
            // A pool reuses its pages: the access must not fault, but the contents may change.
            continue;
        }
        assert!(found == wanted, "{kind}");
    }
}

fn wrong_windows_are_refused(f: &Fixture) {
    let memory = f.gpu.alloc(4096).unwrap();
    let options = WindowOptions::default();
    let refuse = |offset, len| memory.window_with(offset, len, &options).unwrap_err();
    assert_eq!(refuse(0, 0).kind(), &Kind::InvalidArgument);
    assert_eq!(refuse(0, 4097).kind(), &Kind::OutOfRange);
    assert_eq!(refuse(u64::MAX, 2).kind(), &Kind::OutOfRange);
    let window = memory.window_with(100, 50, &options).unwrap();
    assert_eq!(window.write(49, &[1, 2]).unwrap_err().kind(), &Kind::OutOfRange);
    assert_eq!(window.read(u64::MAX, &mut [0]).unwrap_err().kind(), &Kind::OutOfRange);
    let absent = match f.backend {
        Backend::Sim => WindowPath::ResourceManager,
        Backend::Cuda => WindowPath::Memfd,
    };
    let only = options.with_path(absent);
    assert_eq!(memory.window_with(0, 64, &only).unwrap_err().kind(), &Kind::Unsupported);
    let mapping = Some(warpwire::mem::MappingType::Device);
    let odd = options.with_mapping(mapping);
    assert!(memory.window_with(0, 64, &odd).unwrap_err().to_string().contains("device"));
    let pinned = f.gpu.alloc_pinned(64).unwrap();
    assert!(pinned.window().unwrap_err().to_string().contains("host memory"));
    memory.free().unwrap();
    assert_eq!(memory.window().unwrap_err().kind(), &Kind::Freed);
}

fn many_threads_open_and_close_windows(f: &Fixture) {
    let descriptors = || std::fs::read_dir("/proc/self/fd").unwrap().count();
    let mappings = || std::fs::read_to_string("/proc/self/maps").unwrap().lines().count();
    let memory = f.gpu.alloc(1 << 20).unwrap();
    put_pattern(&memory, 3);
    drop(memory.window().unwrap()); // device files opened by the first window stay open
    let before = (descriptors(), mappings());
    std::thread::scope(|scope| {
        for thread in 0..8_u64 {
            let memory = memory.clone();
            scope.spawn(move || {
                let (mut found, mut wanted) = ([0; 64], [0; 64]);
                for round in 0..1250_u64 {
                    let offset = (thread * 131_072 + round * 97) % ((1 << 20) - 64) / 8 * 8;
                    let options = WindowOptions::default();
                    let window = memory.window_with(offset, 64, &options).unwrap();
                    window.read(0, &mut found).unwrap();
                    pattern::fill_bytes(&mut wanted, 3, offset);
                    assert_eq!(found, wanted);
                }
            });
        }
    });
    let after = (descriptors(), mappings());
    // Threads leave stacks and malloc arenas behind, and other cases run at the same time. Windows
    // must leave nothing: there were 10 000.
    assert!(after.0 < before.0 + 1000 && after.1 < before.1 + 1000, "{before:?} became {after:?}");
}

fn a_child_process_does_not_inherit_windows(f: &Fixture) {
    Task::ForkWithWindow(f.backend).spawn().expect_success();
}

fn the_agent_copies_in_both_directions(f: &Fixture) {
    let agent = CopyAgent::start(&f.gpu).unwrap();
    let (device, host) = (f.gpu.alloc(1 << 20).unwrap(), f.gpu.alloc_pinned(1 << 20).unwrap());
    for (at, other, len) in
        [(0, 0, 1 << 20), (3, 3, 65_537), (5, 8, 1000), (16, 16, 15), (0, 1, 1), (7, 7, 0)]
    {
        put_pattern(&device, 1);
        host.write(0, &vec![0xee; 1 << 20]).unwrap();
        agent.copy(&host.region(other, len).unwrap(), &device.region(at, len).unwrap()).unwrap();
        let (mut found, mut wanted) = (vec![0; len as usize], vec![0; len as usize]);
        host.read(other, &mut found).unwrap();
        device.read(at, &mut wanted).unwrap();
        assert!(found == wanted, "to the host, {at} {other} {len}");
        put_pattern(&host, 2);
        agent.copy(&device.region(at, len).unwrap(), &host.region(other, len).unwrap()).unwrap();
        device.read(at, &mut found).unwrap();
        host.read(other, &mut wanted).unwrap();
        assert!(found == wanted, "to the device, {at} {other} {len}");
    }
}

fn the_agent_serves_many_threads(f: &Fixture) {
    let agent = CopyAgent::start(&f.gpu).unwrap();
    std::thread::scope(|scope| {
        for seed in 0..4_u64 {
            let (agent, gpu) = (Arc::clone(&agent), f.gpu.clone());
            scope.spawn(move || {
                let kind = MemoryKind::Vmm;
                let (device, host) =
                    (gpu.alloc_kind(5000, kind).unwrap(), gpu.alloc_pinned(5000).unwrap());
                for round in 0..50 {
                    put_pattern(&host, seed + round);
                    agent.copy(&device.whole().unwrap(), &host.whole().unwrap()).unwrap();
                    host.write(0, &[0; 5000]).unwrap();
                    agent.copy(&host.whole().unwrap(), &device.whole().unwrap()).unwrap();
                    expect_pattern(&host, seed + round);
                }
            });
        }
    });
}

fn the_agent_refuses_what_it_cannot_do(f: &Fixture) {
    let agent = CopyAgent::start(&f.gpu).unwrap();
    let memory = f.gpu.alloc(100).unwrap();
    let region = |offset, len| memory.region(offset, len).unwrap();
    for (to, from) in [((0, 10), (20, 11)), ((0, 10), (9, 10))] {
        let error = agent.copy(&region(to.0, to.1), &region(from.0, from.1)).unwrap_err();
        assert_eq!(error.kind(), &Kind::InvalidArgument);
    }
    agent.copy(&region(0, 10), &region(50, 10)).unwrap();
    if let Some(other) = f.other() {
        let (theirs, pinned) = (other.alloc(10).unwrap(), other.alloc_pinned(10).unwrap());
        let error = agent.copy(&region(0, 10), &theirs.whole().unwrap()).unwrap_err();
        assert_eq!(error.kind(), &Kind::InvalidArgument);
        agent.copy(&pinned.whole().unwrap(), &region(0, 10)).unwrap();
    }
}

fn an_agent_that_fell_asleep_wakes_up(f: &Fixture) {
    let agent = CopyAgent::start(&f.gpu).unwrap();
    let (device, host) = (f.gpu.alloc(4096).unwrap(), f.gpu.alloc_pinned(4096).unwrap());
    std::thread::sleep(std::time::Duration::from_millis(1800));
    put_pattern(&device, 5);
    agent.copy(&host.whole().unwrap(), &device.whole().unwrap()).unwrap();
    expect_pattern(&host, 5);
}

fn copiers_are_exact_by_every_method(f: &Fixture) {
    let memory = f.gpu.alloc_kind(3 << 20, MemoryKind::Vmm).unwrap();
    let agent = CopyAgent::start(&f.gpu).unwrap();
    let all_ways = Arc::new(CopyPlan::with_thresholds(100_000, 400));
    let no_window = Arc::new(CopyPlan::with_thresholds(0, 0));
    let staged = Arc::new(CopyPlan::with_thresholds(0, 0).with_min_staged_read(100));
    let plans =
        [(all_ways.clone(), None), (all_ways, Some(agent)), (no_window, None), (staged, None)];
    for (plan, agent) in plans {
        let copier = Copier::with(&memory, plan, agent).unwrap();
        for (offset, len) in
            [(0, 1), (7, 400), (9, 401), (13, 99_999), (5, 100_001), (3, 3_000_000)]
        {
            let (mut data, mut back) = (vec![0; len], vec![0; len]);
            pattern::fill_bytes(&mut data, len as u64, 0);
            copier.write(offset, &data).unwrap();
            copier.read(offset, &mut back).unwrap();
            assert!(back == data, "{len} bytes at {offset}");
            memory.read(offset, &mut back).unwrap();
            assert!(back == data, "{len} bytes at {offset}, by the engine");
        }
        let error = copier.write((3 << 20) - 1, &[0; 2]).unwrap_err();
        assert_eq!(error.kind(), &Kind::OutOfRange);
        assert!(copier.read(u64::MAX, &mut [0; 600]).is_err());
    }
    let copier = Copier::with(&memory, Arc::new(CopyPlan::with_thresholds(64, 64)), None).unwrap();
    memory.free().unwrap();
    assert_eq!(copier.write(0, &[0; 8]).unwrap_err().kind(), &Kind::Freed);
    assert_eq!(copier.read(0, &mut [0; 8]).unwrap_err().kind(), &Kind::Freed);
}

fn plans_are_measured_quickly(f: &Fixture) {
    let start = std::time::Instant::now();
    let plan = CopyPlan::calibrate(&f.gpu).unwrap();
    let limit = testkit::deadline(std::time::Duration::from_secs(3));
    assert!(start.elapsed() < limit, "{:?}", start.elapsed());
    assert_eq!(plan.method(CopyDirection::Write, 8), CopyMethod::Window, "{plan}");
    eprintln!("{plan}");
}
