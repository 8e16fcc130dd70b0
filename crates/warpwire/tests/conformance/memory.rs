//! Devices and their memory.

use warpwire::error::Kind;
use warpwire::mem::{Capability, DeviceAddr, MemoryKind};

use crate::conformance::fixture::{
    Fixture, SHORT_WAIT, borrow, expect_pattern, put_pattern, test_timeout,
};
use testkit::cases;

cases!(Fixture; CASES:
    device_describes_itself,
    missing_capabilities_have_reasons,
    every_memory_kind_holds_what_is_written,
    odd_offsets_and_lengths_are_exact,
    impossible_lengths_are_refused,
    an_exhausted_device_reports_it_and_keeps_working,
    ranges_outside_are_refused,
    words_are_aligned_and_wide_enough,
    freed_memory_is_refused,
    memory_in_use_is_not_freed,
    foreign_memory_can_be_borrowed,
    borrowing_other_addresses_is_refused,
    pinned_memory_is_seen_by_both_sides,
    dropping_memory_never_waits_for_a_stream,
    many_threads_at_once,
    freed_memory_can_be_allocated_again,
    views_of_pinned_memory_outlive_a_free,
);

fn device_describes_itself(f: &Fixture) {
    let info = f.gpu.info();
    assert_eq!(info.backend, f.backend);
    assert_eq!(info.label(), format!("{}:0", f.backend));
    assert!(!info.name.is_empty());
    assert_eq!(info.uuid.len(), 40, "{}", info.uuid);
    assert!(info.uuid.starts_with("GPU-"));
    let usage = f.gpu.memory_usage().unwrap();
    assert!(usage.free <= usage.total && usage.total > 0);
    assert_eq!(info.total_memory, usage.total);
}

fn missing_capabilities_have_reasons(f: &Fixture) {
    for (name, capability) in f.gpu.capabilities().each() {
        if let Capability::No(reason) = capability {
            assert!(reason.len() > 10, "{name}: {reason:?}");
            let error = capability.require("try", f.gpu.info()).unwrap_err();
            assert_eq!(error.kind(), &Kind::Unsupported);
            assert!(error.to_string().contains(reason.as_str()));
        }
    }
}

fn every_memory_kind_holds_what_is_written(f: &Fixture) {
    for kind in f.device_kinds().into_iter().chain([MemoryKind::Pinned]) {
        for len in [1, 8, 4097, 3 << 20] {
            let memory = f.gpu.alloc_kind(len, kind).unwrap();
            assert_eq!((memory.len(), memory.kind()), (len, kind));
            put_pattern(&memory, len);
            expect_pattern(&memory, len);
        }
    }
}

fn odd_offsets_and_lengths_are_exact(f: &Fixture) {
    let memory = f.gpu.alloc(4096).unwrap();
    for (offset, len) in
        [(0, 1), (1, 1), (3, 7), (7, 64), (63, 65), (4095, 1), (17, 3001), (4096, 0)]
    {
        memory.write(0, &[0xee; 4096]).unwrap();
        let data: Vec<u8> = (0..len).map(|i| (i * 7 + offset) as u8).collect();
        memory.write(offset as u64, &data).unwrap();
        let mut whole = [0; 4096];
        memory.read(0, &mut whole).unwrap();
        assert_eq!(&whole[offset..offset + len], &data[..]);
        assert!(whole[..offset].iter().chain(&whole[offset + len..]).all(|byte| *byte == 0xee));
        let mut part = vec![0; len];
        memory.read(offset as u64, &mut part).unwrap();
        assert_eq!(part, data);
    }
}

fn impossible_lengths_are_refused(f: &Fixture) {
    let total = f.gpu.info().total_memory;
    for kind in f.device_kinds() {
        for (len, expected) in [
            (0, Kind::InvalidArgument),
            (u64::MAX, Kind::InvalidArgument),
            (1 << 63, Kind::InvalidArgument),
            (total + 1, Kind::OutOfMemory),
            (i64::MAX as u64, Kind::OutOfMemory),
        ] {
            let error = f.gpu.alloc_kind(len, kind).unwrap_err();
            assert_eq!(error.kind(), &expected, "{kind} {len}: {error}");
        }
    }
    assert_eq!(f.gpu.alloc_pinned(0).unwrap_err().kind(), &Kind::InvalidArgument);
    for kind in [MemoryKind::Borrowed, MemoryKind::Imported] {
        assert_eq!(f.gpu.alloc_kind(64, kind).unwrap_err().kind(), &Kind::InvalidArgument);
    }
}

fn an_exhausted_device_reports_it_and_keeps_working(f: &Fixture) {
    // Other processes may use the device as well, so the test asks for more than can be left.
    let usage = f.gpu.memory_usage().unwrap();
    let half = f.gpu.alloc(usage.total / 2).unwrap();
    let error = f.gpu.alloc(usage.total / 2 + (64 << 20)).unwrap_err();
    assert_eq!(error.kind(), &Kind::OutOfMemory);
    assert!(error.to_string().contains("are free") && error.advice().is_some(), "{error}");
    let small = f.gpu.alloc(4096).unwrap();
    put_pattern(&small, 1);
    expect_pattern(&small, 1);
    drop(half);
}

fn ranges_outside_are_refused(f: &Fixture) {
    let memory = f.gpu.alloc(100).unwrap();
    for (offset, len) in [(0, 101), (100, 1), (101, 0), (u64::MAX, 1), (1, u64::MAX)] {
        let error = memory.region(offset, len).unwrap_err();
        assert_eq!(error.kind(), &Kind::OutOfRange, "{error}");
    }
    assert_eq!(memory.write(99, &[0; 2]).unwrap_err().kind(), &Kind::OutOfRange);
    assert_eq!(memory.read(u64::MAX, &mut [0]).unwrap_err().kind(), &Kind::OutOfRange);
    assert!(memory.region(100, 0).unwrap().is_empty());
}

fn words_are_aligned_and_wide_enough(f: &Fixture) {
    let memory = f.gpu.alloc(64).unwrap();
    for offset in [1, 2, 3, 5, 9] {
        assert_eq!(memory.word32(offset).unwrap_err().kind(), &Kind::Misaligned);
        assert_eq!(memory.word64(offset).unwrap_err().kind(), &Kind::Misaligned);
    }
    assert_eq!(memory.word64(4).unwrap_err().kind(), &Kind::Misaligned);
    assert_eq!(memory.word64(60).unwrap_err().kind(), &Kind::OutOfRange);
    let narrow = memory.word32(4).unwrap();
    assert_eq!(narrow.store(1 << 32).unwrap_err().kind(), &Kind::InvalidArgument);
    narrow.store(0xffff_ffff).unwrap();
    assert_eq!(narrow.load().unwrap(), 0xffff_ffff);
    let wide = memory.word64(8).unwrap();
    wide.store(u64::MAX - 1).unwrap();
    assert_eq!(wide.load().unwrap(), u64::MAX - 1);
}

fn freed_memory_is_refused(f: &Fixture) {
    for kind in f.device_kinds().into_iter().chain([MemoryKind::Pinned]) {
        let memory = f.gpu.alloc_kind(4096, kind).unwrap();
        let copy = memory.clone();
        memory.free().unwrap();
        assert_eq!(memory.free().unwrap_err().kind(), &Kind::Freed, "{kind}: double free");
        assert_eq!(copy.free().unwrap_err().kind(), &Kind::Freed);
        assert_eq!(copy.whole().unwrap_err().kind(), &Kind::Freed);
        assert_eq!(copy.write(0, &[1]).unwrap_err().kind(), &Kind::Freed);
        assert_eq!(copy.read(0, &mut [0]).unwrap_err().kind(), &Kind::Freed);
        assert_eq!(copy.word32(0).unwrap_err().kind(), &Kind::Freed);
        assert_eq!(copy.export_dmabuf(0, 64).unwrap_err().kind(), &Kind::Freed);
        assert_eq!(copy.export_ipc().unwrap_err().kind(), &Kind::Freed);
        assert!(copy.host_bytes().is_err());
    }
}

fn memory_in_use_is_not_freed(f: &Fixture) {
    let memory = f.gpu.alloc(4096).unwrap();
    let region = memory.region(0, 16).unwrap();
    let second = region.clone();
    drop(region);
    let error = memory.free().unwrap_err();
    assert_eq!(error.kind(), &Kind::Busy, "{error}");
    drop(second);

    let gate = f.gpu.alloc_pinned(8).unwrap().word64(0).unwrap();
    gate.store(0).unwrap();
    let stream = f.gpu.stream().unwrap();
    stream.wait_value(&gate, warpwire::mem::Condition::AtLeast, 1).unwrap();
    stream.fill(&memory.whole().unwrap(), 1).unwrap();
    assert_eq!(memory.free().unwrap_err().kind(), &Kind::Busy);
    gate.store(1).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    memory.free().unwrap();
}

fn foreign_memory_can_be_borrowed(f: &Fixture) {
    let owner = f.gpu.alloc(1 << 20).unwrap();
    put_pattern(&owner, 5);
    let whole = borrow(&f.gpu, owner.address(), owner.len()).unwrap();
    expect_pattern(&whole, 5);
    // Unaligned offset and length.
    let inner = DeviceAddr::new(owner.address().raw() + 12_345);
    let part = borrow(&f.gpu, inner, 777).unwrap();
    assert_eq!(part.kind(), MemoryKind::Borrowed);
    part.write(0, &[9; 777]).unwrap();
    let mut seen = [0; 779];
    owner.read(12_344, &mut seen).unwrap();
    assert!(seen[1..778].iter().all(|byte| *byte == 9));
    assert_ne!((seen[0], seen[778]), (9, 9));

    let stream = f.gpu.stream().unwrap();
    stream.fill(&part.whole().unwrap(), 0x44).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    owner.read(12_345, &mut seen[..777]).unwrap();
    assert!(seen[..777].iter().all(|byte| *byte == 0x44));

    assert_eq!(part.free().unwrap_err().kind(), &Kind::InvalidArgument);
    drop((part, whole));
    let mut byte = [0];
    owner.read(12_345, &mut byte).unwrap();
    assert_eq!(byte, [0x44], "the owner's memory outlives the borrow");
}

fn borrowing_other_addresses_is_refused(f: &Fixture) {
    let refuse = |address: u64, len: u64, expected: Kind| {
        let error = borrow(&f.gpu, DeviceAddr::new(address), len).unwrap_err();
        assert_eq!(error.kind(), &expected, "{address:#x}+{len}: {error}");
    };
    let local = 0_u64;
    let heap = vec![0_u8; 4096];
    refuse(&raw const local as u64, 8, Kind::NotDeviceMemory);
    refuse(heap.as_ptr() as u64, 4096, Kind::NotDeviceMemory);
    refuse(0, 8, Kind::NotDeviceMemory);
    refuse(u64::MAX, 2, Kind::InvalidArgument);
    let memory = f.gpu.alloc(4096).unwrap();
    let address = memory.address().raw();
    refuse(address, 0, Kind::InvalidArgument);
    refuse(address, u64::MAX - address + 1, Kind::InvalidArgument);
    refuse(address, 1 << 40, Kind::NotDeviceMemory);
    if let Some(other) = f.other() {
        let error = borrow(other, memory.address(), 64).unwrap_err();
        assert!(error.to_string().contains(&f.gpu.label()), "{error}");
    }
}

fn pinned_memory_is_seen_by_both_sides(f: &Fixture) {
    let pinned = f.gpu.alloc_pinned(4096).unwrap();
    let device = f.gpu.alloc(4096).unwrap();
    let bytes = pinned.host_bytes().unwrap();
    bytes.write(100, b"from the host").unwrap();
    let stream = f.gpu.stream().unwrap();
    stream.copy(&device.region(5, 13).unwrap(), &pinned.region(100, 13).unwrap()).unwrap();
    stream.copy(&pinned.region(200, 13).unwrap(), &device.region(5, 13).unwrap()).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    let mut back = [0; 13];
    bytes.read(200, &mut back).unwrap();
    assert_eq!(&back, b"from the host");
    assert_eq!(device.host_bytes().err().unwrap().kind(), &Kind::Unsupported);
}

fn dropping_memory_never_waits_for_a_stream(f: &Fixture) {
    let gate = f.gpu.alloc_pinned(8).unwrap().word64(0).unwrap();
    gate.store(0).unwrap();
    let stream = f.gpu.stream().unwrap();
    stream.wait_value(&gate, warpwire::mem::Condition::AtLeast, 1).unwrap();
    std::thread::sleep(SHORT_WAIT);
    for kind in f.device_kinds().into_iter().chain([MemoryKind::Pinned]) {
        let memory = f.gpu.alloc_kind(1 << 20, kind).unwrap();
        drop(memory);
        f.gpu.alloc_kind(1 << 20, kind).unwrap().free().unwrap();
    }
    assert!(!stream.is_idle().unwrap(), "dropping must not have waited for the stream");
    gate.store(1).unwrap();
    stream.synchronize(test_timeout()).unwrap();
}

fn many_threads_at_once(f: &Fixture) {
    std::thread::scope(|scope| {
        for thread in 0..8_u64 {
            let gpu = f.gpu.clone();
            scope.spawn(move || {
                let stream = gpu.stream().unwrap();
                for round in 0..10 {
                    let len = 1000 * (thread + 1) + round;
                    let (from, to) = (gpu.alloc(len).unwrap(), gpu.alloc(len).unwrap());
                    put_pattern(&from, thread);
                    stream.copy(&to.whole().unwrap(), &from.whole().unwrap()).unwrap();
                    stream.synchronize(test_timeout()).unwrap();
                    expect_pattern(&to, thread);
                }
            });
        }
    });
}

fn freed_memory_can_be_allocated_again(f: &Fixture) {
    let before = f.gpu.memory_usage().unwrap().free;
    let size = before / 4;
    for kind in f.device_kinds() {
        // More in total than the device has, so that a leak makes an allocation fail.
        for _ in 0..8 {
            let memory = f.gpu.alloc_kind(size, kind).unwrap();
            memory.write(size - 1, &[1]).unwrap();
        }
    }
}

fn views_of_pinned_memory_outlive_a_free(f: &Fixture) {
    let pinned = f.gpu.alloc_pinned(4096).unwrap();
    let view = pinned.host_bytes().unwrap();
    view.store_u64(8, 5).unwrap();
    pinned.free().unwrap();
    assert_eq!(view.load_u64(8).unwrap(), 5);
    assert_eq!(pinned.host_bytes().err().unwrap().kind(), &Kind::Freed);
    assert!(borrow(&f.gpu, pinned.address(), 8).is_err());
}
