//! Copy lists: many copies as one operation of a stream.

use warpwire::error::Kind;
use warpwire::mem::{Allocation, CopyRange, IpcHandle, Region, ScatterGather};
use warpwire_apps::pattern;

use crate::conformance::child::Task;
use crate::conformance::fixture::{Fixture, expect_pattern, put_pattern, test_timeout};
use testkit::{Rng, cases};

cases!(Fixture; CASES:
    lists_of_every_alignment_and_length,
    a_list_is_ordered_with_its_stream,
    long_ranges_and_many_short_ones,
    lists_between_host_and_device,
    lists_to_memory_of_another_process,
    invalid_lists_are_refused,
);

/// The bytes of `len` bytes of memory.
fn bytes_of(memory: &Allocation) -> Vec<u8> {
    let mut bytes = vec![0; memory.len() as usize];
    memory.read(0, &mut bytes).unwrap();
    bytes
}

/// Executes a list, and compares all of the target with what a loop over the ranges makes of it.
fn check(
    f: &Fixture,
    lists: &ScatterGather,
    to: &Allocation,
    from: &Allocation,
    ranges: &[CopyRange],
) {
    put_pattern(from, 1);
    put_pattern(to, 2);
    let (source, mut wanted) = (bytes_of(from), bytes_of(to));
    for CopyRange { to, from, len } in ranges {
        let [to, from, len] = [to, from, len].map(|number| *number as usize);
        wanted[to..to + len].copy_from_slice(&source[from..from + len]);
    }
    let list = lists.prepare(&to.whole().unwrap(), &from.whole().unwrap(), ranges).unwrap();
    assert_eq!(list.len(), ranges.len());
    assert_eq!(list.bytes(), ranges.iter().map(|range| range.len).sum::<u64>());
    let stream = f.gpu.stream().unwrap();
    stream.copy_list(&list).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    let found = bytes_of(to);
    let wrong = found.iter().zip(&wanted).position(|(found, wanted)| found != wanted);
    assert_eq!(wrong, None, "the first wrong byte");
}

fn lists_of_every_alignment_and_length(f: &Fixture) {
    let lists = ScatterGather::new(&f.gpu).unwrap();
    let (to, from) = (f.gpu.alloc(1 << 18).unwrap(), f.gpu.alloc(1 << 18).unwrap());
    let mut ranges = Vec::new();
    let mut at = 0;
    for to_offset in 0..17 {
        for from_offset in [0, 1, 2, 4, 8, 15] {
            for len in [0, 1, 3, 4, 15, 16, 17, 31, 64, 100] {
                ranges.push(CopyRange { to: at + to_offset, from: at + from_offset, len });
                at += 128;
            }
        }
    }
    check(f, &lists, &to, &from, &ranges);
}

fn a_list_is_ordered_with_its_stream(f: &Fixture) {
    let lists = ScatterGather::new(&f.gpu).unwrap();
    let [first, second, third] = [(); 3].map(|()| f.gpu.alloc(4096).unwrap());
    let whole = |memory: &Allocation| -> Region { memory.whole().unwrap() };
    let halves =
        [CopyRange { to: 2048, from: 2048, len: 2048 }, CopyRange { to: 0, from: 0, len: 2048 }];
    let list = lists.prepare(&whole(&second), &whole(&first), &halves).unwrap();
    let stream = f.gpu.stream().unwrap();
    for value in 1..20 {
        stream.fill(&whole(&first), value).unwrap();
        stream.copy_list(&list).unwrap();
        stream.copy(&whole(&third), &whole(&second)).unwrap();
        stream.synchronize(test_timeout()).unwrap();
        assert_eq!(bytes_of(&third), [value; 4096]);
    }
}

fn long_ranges_and_many_short_ones(f: &Fixture) {
    let lists = ScatterGather::new(&f.gpu).unwrap();
    let len = 8 << 20;
    let (to, from) = (f.gpu.alloc(len).unwrap(), f.gpu.alloc(len).unwrap());
    // One range over several chunks, with an odd start and end.
    check(f, &lists, &to, &from, &[CopyRange { to: 3, from: 3, len: (1 << 20) + 77 }]);
    // More ranges than blocks, in another order at the target.
    let pieces = len / 1000;
    let ranges: Vec<_> = (0..pieces)
        .map(|n| CopyRange { to: n * 7919 % pieces * 1000, from: n * 1000, len: 1000 })
        .collect();
    assert!(ranges.len() > 8000);
    check(f, &lists, &to, &from, &ranges);
    let mut rng = Rng::new(11);
    let random: Vec<_> = (0..500)
        .map(|n| {
            let (slot, len) = (n * 16_000, rng.next_u64() % 15_000);
            CopyRange { to: slot + rng.next_u64() % 1000, from: rng.next_u64() % 8_000_000, len }
        })
        .collect();
    check(f, &lists, &to, &from, &random);
}

fn lists_between_host_and_device(f: &Fixture) {
    let lists = ScatterGather::new(&f.gpu).unwrap();
    let (device, host) = (f.gpu.alloc(1 << 16).unwrap(), f.gpu.alloc_pinned(1 << 16).unwrap());
    let ranges: Vec<_> =
        (0..64).map(|n| CopyRange { to: n * 1024, from: (63 - n) * 1024, len: 900 }).collect();
    check(f, &lists, &device, &host, &ranges);
    check(f, &lists, &host, &device, &ranges);
}

fn lists_to_memory_of_another_process(f: &Fixture) {
    for kind in f.device_kinds() {
        let memory = f.gpu.alloc_kind(1 << 20, kind).unwrap();
        put_pattern(&memory, 1);
        let handle = memory.export_ipc().unwrap();
        // The child checks pattern 1, and writes pattern 2 in pieces.
        Task::CopyListToIpc(f.backend, handle.to_bytes()).spawn().expect_success();
        expect_pattern(&memory, 2);
    }
}

/// In the child of [`lists_to_memory_of_another_process`].
pub fn copy_list_to_ipc(f: &Fixture, bytes: &[u8]) {
    let theirs = f.gpu.open_ipc(&IpcHandle::from_bytes(bytes).unwrap()).unwrap();
    expect_pattern(&theirs, 1);
    let (ours, back) = (f.gpu.alloc(1 << 20).unwrap(), f.gpu.alloc(1 << 20).unwrap());
    let mut content = vec![0; 1 << 20];
    pattern::fill_bytes(&mut content, 2, 0);
    ours.write(0, &content).unwrap();
    let ranges: Vec<_> =
        (0..1024).map(|n| CopyRange { to: n * 1024, from: n * 1024, len: 1024 }).collect();
    let lists = ScatterGather::new(&f.gpu).unwrap();
    let [ours, theirs, back] = [&ours, &theirs, &back].map(|memory| memory.whole().unwrap());
    let stream = f.gpu.stream().unwrap();
    stream.copy_list(&lists.prepare(&theirs, &ours, &ranges).unwrap()).unwrap();
    stream.copy_list(&lists.prepare(&back, &theirs, &ranges).unwrap()).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    expect_pattern(back.allocation(), 2);
}

fn invalid_lists_are_refused(f: &Fixture) {
    let lists = ScatterGather::new(&f.gpu).unwrap();
    let (to, from) = (f.gpu.alloc(4096).unwrap(), f.gpu.alloc(8192).unwrap());
    put_pattern(&to, 1);
    let (to_region, from_region) = (to.whole().unwrap(), from.region(0, 5000).unwrap());
    let good = CopyRange { to: 0, from: 0, len: 64 };
    for wrong in [
        CopyRange { to: 4090, from: 0, len: 7 },
        CopyRange { to: 0, from: 4999, len: 2 },
        CopyRange { to: u64::MAX, from: 0, len: 2 },
        CopyRange { to: 0, from: 0, len: u64::MAX },
        CopyRange { to: 5000, from: 0, len: 0 },
    ] {
        let error = lists.prepare(&to_region, &from_region, &[good, wrong]).unwrap_err();
        assert_eq!(error.kind(), &Kind::OutOfRange, "{error}");
        assert!(error.to_string().contains("range 1"), "{error}");
    }
    for empty in [&[][..], &[CopyRange { to: 0, from: 0, len: 0 }]] {
        let error = lists.prepare(&to_region, &from_region, empty).unwrap_err();
        assert_eq!(error.kind(), &Kind::InvalidArgument, "{error}");
    }
    expect_pattern(&to, 1);
    let Some(other) = f.other() else { return };
    let foreign = other.alloc(4096).unwrap();
    let error = lists.prepare(&foreign.whole().unwrap(), &from_region, &[good]).unwrap_err();
    assert!(error.to_string().contains("belongs to"), "{error}");
    let list = lists.prepare(&to_region, &from_region, &[good]).unwrap();
    let error = other.stream().unwrap().copy_list(&list).unwrap_err();
    assert_eq!(error.kind(), &Kind::InvalidArgument, "{error}");
}
