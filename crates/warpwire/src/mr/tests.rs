//! Registrations in use: access checks, races with deregistration, freed and moved memory, and
//! cost.

use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use super::*;
use crate::error::Kind;
use crate::mem::sim::{POISON, Sim, SimConfig};
use crate::mem::{Allocation, CopyAgent, Device};
use crate::mlx5::{Atomic, AtomicWidth};

fn gpu() -> (Sim, Device) {
    let sim = Sim::start(SimConfig::default()).unwrap();
    let gpu = sim.device(0).unwrap();
    (sim, gpu)
}

/// A registration under the key of another one: the key stays, everything else is the new one's.
#[test]
fn a_registration_takes_the_key_of_another() {
    let (registry, memory) = (Registry::new(), HostMemory::new(8192).unwrap());
    let (pd, other_pd) = (registry.pd(), registry.pd());
    let first = registry.register(&pd, memory, Some(0), Access::ALL).unwrap();
    let (key, at) = (first.lkey(), 1 << 20);
    let memory = HostMemory::new(4096).unwrap();
    let mut second = registry.register(&other_pd, memory, Some(at), Access::NONE).unwrap();
    let own = second.lkey();
    second.take_key(first).unwrap();
    assert_eq!((second.lkey(), second.is_live(), registry.len()), (key, true, 1));
    let find = |key, pd: &SoftPd, need, address, len| {
        registry.resolve(key, pd.id(), need, address, len).err()
    };
    assert_eq!(find(key, &other_pd, Access::NONE, at, 4096), None);
    assert_eq!(find(key, &other_pd, Access::NONE, at, 4097), Some(AccessDenied::Range));
    assert_eq!(find(key, &other_pd, Access::REMOTE_WRITE, at, 8), Some(AccessDenied::Rights));
    assert_eq!(find(key, &pd, Access::NONE, at, 8), Some(AccessDenied::WrongPd));
    assert!(find(own, &other_pd, Access::NONE, at, 8).is_some(), "its own key is invalid");
    // One of another registry is refused, and both go on as they are.
    let elsewhere = Registry::new();
    let memory = HostMemory::new(4096).unwrap();
    let foreign = elsewhere.register(&elsewhere.pd(), memory, None, Access::ALL).unwrap();
    assert_eq!(second.take_key(foreign).unwrap_err().kind(), &Kind::InvalidArgument);
    assert_eq!((second.lkey(), second.is_live(), elsewhere.len()), (key, true, 0));
    second.deregister().unwrap();
    assert_eq!(registry.len(), 0);
    assert!(find(key, &other_pd, Access::NONE, at, 8).is_some());
}

/// Memory of each kind with a name, registered from address zero with all rights.
fn every_kind(len: u64) -> Vec<(&'static str, Registry, SoftPd, SoftMr)> {
    let (_, gpu) = gpu();
    let region = |memory: Allocation| memory.region(64, len).unwrap();
    let device = || MemorySource::from(region(gpu.alloc(len + 128).unwrap()));
    let pinned = region(gpu.alloc_pinned(len + 128).unwrap());
    let kinds = [
        ("host", MemorySource::from(HostMemory::new(len).unwrap())),
        ("pinned", MemorySource::from(pinned)),
        ("window", device()),
        ("engine", device().without_window()),
        ("staged", device().staged()),
        ("window only", device().window_only()),
    ];
    let register = |(name, memory)| {
        let registry = Registry::new();
        let pd = registry.pd();
        let mr = registry.register(&pd, memory, Some(0), Access::ALL).unwrap();
        (name, registry, pd, mr)
    };
    kinds.into_iter().map(register).collect()
}

#[test]
fn every_kind_reports_its_path() {
    let paths: Vec<_> = every_kind(4096).iter().map(|(_, _, _, mr)| mr.path()).collect();
    let window = AccessPath::Window(crate::mem::WindowPath::Memfd);
    assert_eq!(
        paths,
        [
            AccessPath::Host,
            AccessPath::Host,
            window,
            AccessPath::Engine,
            AccessPath::Staged,
            window
        ]
    );
    for (name, _, _, mr) in every_kind(4096) {
        let direct = !["engine", "staged"].contains(&name);
        assert_eq!(mr.why().is_empty(), direct, "{name} {:?}", mr.why());
    }
}

#[test]
fn copies_work_at_any_offset_and_length() {
    for (name, registry, pd, mr) in every_kind(300_000) {
        for len in [1usize, 7, 8, 63, 64, 127, 128, 129, 1000, 4096, 4097, 200_000] {
            for at in [0u64, 1, 5, 64, 4095] {
                let data: Vec<u8> = (0..len).map(|i| (i * 7 + len + at as usize) as u8).collect();
                let need = Access::REMOTE_WRITE;
                let span = registry.resolve(mr.rkey(), pd.id(), need, at, len as u64 + 2).unwrap();
                span.scatter(0, &[0xee]).unwrap();
                span.scatter(1, &data).unwrap();
                span.scatter(len as u64 + 1, &[0xdd]).unwrap();
                span.publish();
                let mut back = vec![0; len + 2];
                span.gather(0, &mut back).unwrap();
                assert_eq!((back[0], back[len + 1]), (0xee, 0xdd), "{name} {len} {at}");
                assert!(back[1..=len] == data, "{name} {len} {at}");
                assert_eq!(span.gather(3, &mut back).unwrap_err(), AccessDenied::Range);
                assert_eq!(span.scatter(u64::MAX, &data).unwrap_err(), AccessDenied::Range);
                assert_eq!(span.host_bytes().is_some(), mr.path() == AccessPath::Host);
            }
        }
    }
}

/// A device that is lost answers no driver call any more; its memory is still mapped.
#[test]
fn memory_accessed_through_a_window_only_needs_no_driver() {
    const LEN: usize = 16 << 20;
    let (sim, gpu) = gpu();
    let (registry, memory) = (Registry::new(), gpu.alloc(LEN as u64).unwrap());
    let pd = registry.pd();
    let whole = || MemorySource::from(memory.whole().unwrap());
    let mrs = [whole().window_only(), whole().without_window()]
        .map(|memory| registry.register(&pd, memory, Some(0), Access::ALL).unwrap());
    sim.control(0).unwrap().kill();
    let data: Vec<u8> = (0..LEN).map(|at| ((at * 31) >> 7) as u8).collect();
    let copy = |mr: &SoftMr| {
        let span =
            registry.resolve(mr.rkey(), pd.id(), Access::REMOTE_WRITE, 0, LEN as u64).unwrap();
        let mut back = vec![0; LEN];
        span.scatter(0, &data)?;
        mr.flush();
        span.gather(0, &mut back)?;
        assert!(!span.is_device() && back == data);
        Ok(())
    };
    assert_eq!(mrs.each_ref().map(copy), [Ok(()), Err(AccessDenied::Failed)]);
}

#[test]
fn copies_with_an_agent_are_correct() {
    let (_, gpu) = gpu();
    let agent = CopyAgent::start(&gpu).unwrap();
    let registry = Registry::new();
    let pd = registry.pd();
    let memory = MemorySource::from(gpu.alloc(1 << 20).unwrap().whole().unwrap()).with_agent(agent);
    let mr = registry.register(&pd, memory, Some(0), Access::ALL).unwrap();
    for len in [8u64, 4096, 65_536, 1 << 20] {
        let data: Vec<u8> = (0..len).map(|at| (at * 31 + len) as u8).collect();
        let span = registry.resolve(mr.rkey(), pd.id(), Access::REMOTE_WRITE, 0, len).unwrap();
        span.scatter(0, &data).unwrap();
        let mut back = vec![0; len as usize];
        span.gather(0, &mut back).unwrap();
        assert!(back == data, "{len}");
    }
}

#[test]
fn access_is_checked_against_key_pd_rights_and_range() {
    let registry = Registry::new();
    let (pd, other) = (registry.pd(), registry.pd());
    let rights = Access::LOCAL_WRITE | Access::REMOTE_READ;
    let memory = HostMemory::new(4096).unwrap();
    let mr = registry.register(&pd, memory, Some(0x1000), rights).unwrap();
    let key = mr.rkey();
    let ask = |key, pd: &SoftPd, need, at, len| registry.resolve(key, pd.id(), need, at, len).err();

    assert_eq!(ask(key, &pd, Access::REMOTE_READ, 0x1000, 4096), None);
    assert_eq!(ask(key, &pd, Access::NONE, 0x1000, 4096), None);
    assert_eq!(ask(key, &pd, Access::LOCAL_WRITE, 0x1fff, 1), None);

    // Keys are random, but those of a few regions differ in few bits.
    assert_eq!(ask(key ^ 0x80_0000, &pd, Access::NONE, 0x1000, 1), Some(AccessDenied::Unknown));
    assert_eq!(ask(0xffff_ff01, &pd, Access::NONE, 0x1000, 1), Some(AccessDenied::Unknown));
    // Their indices may have been used.
    for key in [0, crate::mlx5::INVALID_KEY] {
        let denied = ask(key, &pd, Access::NONE, 0x1000, 1);
        assert!(matches!(denied, Some(AccessDenied::Stale | AccessDenied::Unknown)), "{denied:?}");
    }
    assert_eq!(ask(key ^ 1, &pd, Access::NONE, 0x1000, 1), Some(AccessDenied::Stale));
    assert_eq!(ask(key, &other, Access::NONE, 0x1000, 1), Some(AccessDenied::WrongPd));
    assert_eq!(ask(key, &pd, Access::REMOTE_WRITE, 0x1000, 1), Some(AccessDenied::Rights));
    assert_eq!(ask(key, &pd, Access::REMOTE_ATOMIC, 0x1000, 1), Some(AccessDenied::Rights));
    for (at, len) in [(0xfff, 1), (0xfff, 2), (0x2000, 1), (0x1001, 4096), (0x1000, u64::MAX)] {
        assert_eq!(
            ask(key, &pd, Access::NONE, at, len),
            Some(AccessDenied::Range),
            "{at:#x} {len}"
        );
    }
    assert_eq!(ask(key, &pd, Access::NONE, u64::MAX, u64::MAX), Some(AccessDenied::Range));

    // An empty range is not checked at all.
    assert_eq!(ask(77, &other, Access::REMOTE_WRITE, 5, 0), None);
    let empty = registry.resolve(77, other.id(), Access::ALL, 5, 0).unwrap();
    assert!(empty.is_empty() && empty.gather(0, &mut []).is_ok() && empty.scatter(0, &[]).is_ok());
    assert_eq!(empty.fetch_add(0, 1), Err(AccessDenied::Range));
    assert_eq!(empty.gather(0, &mut [0]), Err(AccessDenied::Range));

    mr.deregister().unwrap();
    assert_eq!(ask(key, &pd, Access::NONE, 0x1000, 1), Some(AccessDenied::Stale));
    assert!(registry.is_empty());
}

#[test]
fn invalid_registrations_are_rejected() {
    let registry = Registry::new();
    let pd = registry.pd();
    let memory = HostMemory::new(4096).unwrap();
    let register = |iova, access| registry.register(&pd, memory.clone(), iova, access);
    for rights in [Access::REMOTE_WRITE, Access::REMOTE_ATOMIC] {
        let refused = register(None, rights).unwrap_err();
        assert_eq!(refused.kind(), &Kind::InvalidArgument);
        assert!(register(None, rights | Access::LOCAL_WRITE).is_ok());
    }
    assert!(register(Some(u64::MAX - 4095), Access::NONE).is_ok());
    assert!(register(Some(u64::MAX - 4094), Access::NONE).is_err());
    assert_eq!(register(None, Access::ZERO_BASED).unwrap().iova(), 0);
    assert_eq!(register(Some(0), Access::ZERO_BASED).unwrap().iova(), 0);
    assert!(register(Some(8), Access::ZERO_BASED).is_err());
    assert_eq!(register(None, Access::RELAXED_ORDERING).unwrap().iova(), memory.address());
    let (_, gpu) = gpu();
    let empty = gpu.alloc(64).unwrap().region(0, 0).unwrap();
    assert!(registry.register(&pd, empty, None, Access::NONE).is_err());
    assert!(registry.is_empty());
}

#[test]
fn the_end_of_the_address_space_is_accessible() {
    let registry = Registry::new();
    let pd = registry.pd();
    let iova = u64::MAX - 4095;
    let memory = HostMemory::new(4096).unwrap();
    let mr = registry.register(&pd, memory, Some(iova), Access::ALL).unwrap();
    let ask = |at, len| registry.resolve(mr.rkey(), pd.id(), Access::NONE, at, len).err();
    assert_eq!(ask(u64::MAX, 1), None);
    assert_eq!(ask(iova, 4096), None);
    assert_eq!(ask(u64::MAX, 2), Some(AccessDenied::Range));
    assert_eq!(ask(iova, 4097), Some(AccessDenied::Range));
    assert_eq!(ask(0, 1), Some(AccessDenied::Range));
}

#[test]
fn invalidation_ends_remote_access_only() {
    let registry = Registry::new();
    let (pd, other) = (registry.pd(), registry.pd());
    let memory = HostMemory::new(4096).unwrap();
    let mr = registry.register(&pd, memory.clone(), Some(0), Access::ALL).unwrap();
    let quiet = registry.register(&pd, memory.clone(), Some(0), Access::LOCAL_WRITE).unwrap();
    let ask = |need| registry.resolve(mr.rkey(), pd.id(), need, 0, 8).err();
    assert_eq!(ask(Access::REMOTE_WRITE), None);
    assert_eq!(registry.invalidate(mr.rkey(), other.id()), Err(AccessDenied::WrongPd));
    assert_eq!(registry.invalidate(quiet.rkey(), pd.id()), Err(AccessDenied::Rights));
    assert_eq!(registry.invalidate(mr.rkey() ^ 1, pd.id()), Err(AccessDenied::Stale));
    assert_eq!(registry.invalidate(mr.rkey() ^ 0x80_0000, pd.id()), Err(AccessDenied::Unknown));
    assert_eq!(ask(Access::REMOTE_WRITE), None);
    assert_eq!(registry.invalidate(mr.rkey(), pd.id()), Ok(()));
    assert_eq!(registry.invalidate(mr.rkey(), pd.id()), Err(AccessDenied::Invalidated));
    assert_eq!(ask(Access::REMOTE_WRITE), Some(AccessDenied::Invalidated));
    assert_eq!(ask(Access::REMOTE_READ), Some(AccessDenied::Invalidated));
    assert_eq!((ask(Access::LOCAL_WRITE), ask(Access::NONE)), (None, None));
    drop(mr);
    let anew = registry.register(&pd, memory, Some(0), Access::ALL).unwrap();
    let remote = registry.resolve(anew.rkey(), pd.id(), Access::REMOTE_WRITE, 0, 8);
    assert!(remote.is_ok());
}

#[test]
fn invalidation_waits_for_remote_access_only() {
    let registry = Registry::new();
    let pd = registry.pd();
    let stop = AtomicBool::new(false);
    for _ in 0..50 {
        let memory = HostMemory::new(64).unwrap();
        let mr = registry.register(&pd, memory.clone(), Some(0), Access::ALL).unwrap();
        stop.store(false, Ordering::Relaxed);
        std::thread::scope(|scope| {
            // One thread reads locally until it is stopped; one writes as a peer until it is
            // denied.
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    let span = registry.resolve(mr.lkey(), pd.id(), Access::NONE, 0, 8).unwrap();
                    span.gather(0, &mut [0; 8]).unwrap();
                }
            });
            scope.spawn(|| {
                let need = Access::REMOTE_WRITE;
                while let Ok(span) = registry.resolve(mr.rkey(), pd.id(), need, 0, 8) {
                    span.scatter(0, &[1; 8]).unwrap();
                }
            });
            std::thread::yield_now();
            registry.invalidate(mr.rkey(), pd.id()).unwrap();
            memory.bytes().store_u64(0, 7).unwrap();
            std::thread::yield_now();
            assert_eq!(memory.bytes().load_u64(0).unwrap(), 7);
            stop.store(true, Ordering::Relaxed);
        });
    }
}

#[test]
fn no_access_after_deregistration() {
    let registry = Registry::new();
    let pd = registry.pd();
    let (stop, key, placed) = (AtomicBool::new(false), AtomicU64::new(0), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for engine in 1..=2u8 {
            let (registry, pd, stop, key, placed) = (&registry, &pd, &stop, &key, &placed);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    let key = key.load(Ordering::Relaxed) as u32;
                    let need = Access::REMOTE_WRITE;
                    match registry.resolve(key, pd.id(), need, 0, 256) {
                        Ok(span) => {
                            span.scatter(0, &[engine; 256]).unwrap();
                            placed.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(denied) => {
                            assert!(
                                matches!(denied, AccessDenied::Stale | AccessDenied::Unknown),
                                "{denied}"
                            );
                        }
                    }
                }
            });
        }
        let memory = HostMemory::new(4096).unwrap();
        for round in 0..2000u32 {
            let mr = registry.register(&pd, memory.clone(), Some(0), Access::ALL).unwrap();
            key.store(u64::from(mr.rkey()), Ordering::Relaxed);
            // In every 8th round wait until a thread has used it; otherwise deregister immediately.
            let before = placed.load(Ordering::Relaxed);
            while round % 8 == 0 && placed.load(Ordering::Relaxed) == before {
                std::thread::yield_now();
            }
            mr.deregister().unwrap();
            // From here on no other thread accesses the memory.
            memory.bytes().write(0, &[0xaa; 256]).unwrap();
            let mut back = [0; 256];
            memory.bytes().read(0, &mut back).unwrap();
            assert!(back.iter().all(|byte| *byte == 0xaa), "round {round}");
        }
        stop.store(true, Ordering::Relaxed);
    });
}

#[test]
fn atomics_are_atomic_on_every_kind() {
    const EACH: u64 = 2000;
    for (name, registry, pd, mr) in every_kind(4096) {
        let masked = Atomic::MaskedFetchAdd { width: AtomicWidth::Four, add: 1, boundary: 1 << 15 };
        let need = Access::REMOTE_ATOMIC;
        registry.resolve(mr.rkey(), pd.id(), need, 64, 24).unwrap().scatter(0, &[0; 24]).unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..EACH {
                        let find = |at| registry.resolve(mr.rkey(), pd.id(), need, at, 8).unwrap();
                        find(64).fetch_add(0, 3).unwrap();
                        find(80).atomic(4, &masked).unwrap();
                        let counter = find(72);
                        let mut seen = 0;
                        loop {
                            let old = counter.compare_swap(0, seen, seen + 1).unwrap();
                            if old == seen {
                                break;
                            }
                            seen = old;
                        }
                    }
                });
            }
        });
        let mut back = [0; 24];
        let span = registry.resolve(mr.rkey(), pd.id(), Access::NONE, 64, 24).unwrap();
        span.gather(0, &mut back).unwrap();
        let words = [0, 8, 16].map(|at| u64::from_ne_bytes(back[at..at + 8].try_into().unwrap()));
        assert_eq!(words, [4 * EACH * 3, 4 * EACH, (4 * EACH) << 32], "{name}");
    }
}

#[test]
fn masked_atomics_work_on_every_kind() {
    for (name, registry, pd, mr) in every_kind(4096) {
        let span = registry.resolve(mr.rkey(), pd.id(), Access::REMOTE_ATOMIC, 0, 64).unwrap();
        span.scatter(0, &0x1122_3344_5566_7788u64.to_ne_bytes()).unwrap();
        let op = Atomic::MaskedCompareSwap {
            width: AtomicWidth::Eight,
            compare: 0x88,
            swap: 0xff00_0000_0000_0001,
            compare_mask: 0xff,
            swap_mask: 0xff00_0000_0000_00ff,
        };
        assert_eq!(span.atomic(0, &op), Ok(0x1122_3344_5566_7788), "{name}");
        assert_eq!(span.atomic(0, &op), Ok(0xff22_3344_5566_7701), "{name}");
        let narrow = Atomic::MaskedFetchAdd { width: AtomicWidth::Four, add: 0xff, boundary: 0x80 };
        // A 4-byte word at an odd multiple of four; the adjacent word must not change.
        span.scatter(4, &0x0000_0155u32.to_ne_bytes()).unwrap();
        assert_eq!(span.atomic(4, &narrow), Ok(0x155), "{name}");
        let mut back = [0; 8];
        span.gather(0, &mut back).unwrap();
        assert_eq!(back[4..], 0x154u32.to_ne_bytes(), "{name}");
        assert_eq!(back[..4], 0x5566_7701u32.to_ne_bytes(), "{name}");
        assert_eq!(span.fetch_add(4, 1), Err(AccessDenied::Misaligned), "{name}");
        assert_eq!(span.atomic(2, &narrow), Err(AccessDenied::Misaligned), "{name}");
        assert_eq!(span.fetch_add(64, 1), Err(AccessDenied::Range), "{name}");
    }
}

#[test]
fn a_registration_keeps_its_memory_and_its_pd_alive() {
    let (sim, gpu) = gpu();
    let registry = Registry::new();
    let pd = registry.pd();
    let memory = gpu.alloc(4096).unwrap();
    let mr = registry.register(&pd, memory.whole().unwrap(), Some(0), Access::ALL).unwrap();
    assert!(pd.is_in_use());
    assert_eq!(memory.free().unwrap_err().kind(), &Kind::Busy);
    drop(memory);
    let span = registry.resolve(mr.rkey(), pd.id(), Access::REMOTE_READ, 0, 8).unwrap();
    span.gather(0, &mut [0; 8]).unwrap();
    drop(span);
    drop(registry);
    mr.deregister().unwrap();
    assert!(!pd.is_in_use());
    drop(gpu);
    let empty = sim.control(0).unwrap().wait_empty(Duration::from_secs(5));
    assert!(empty.is_ok(), "{empty:?}");
}

#[test]
fn access_to_memory_freed_under_its_registration_is_denied() {
    let (sim, gpu) = gpu();
    let control = sim.control(0).unwrap();
    for no_window in [false, true] {
        let registry = Registry::new();
        let pd = registry.pd();
        let (memory, other) = (gpu.alloc(4096).unwrap(), gpu.alloc(4096).unwrap());
        let of = |memory: &Allocation| {
            let memory = MemorySource::from(memory.whole().unwrap());
            let memory = if no_window { memory.without_window() } else { memory };
            registry.register(&pd, memory, Some(0), Access::ALL).unwrap()
        };
        let (mr, twin) = (of(&memory), of(&other));
        let ask = |mr: &SoftMr| registry.resolve(mr.rkey(), pd.id(), Access::NONE, 0, 8).map(drop);
        assert_eq!((ask(&mr), ask(&twin)), (Ok(()), Ok(())));
        let held = registry.resolve(mr.rkey(), pd.id(), Access::NONE, 0, 8).unwrap();
        control.force_free(&memory).unwrap();
        assert_eq!((ask(&mr), ask(&twin)), (Err(AccessDenied::Gone), Ok(())));
        // A span resolved before the free is denied too, and copies no byte.
        let mut byte = [1];
        assert_eq!(held.gather(0, &mut byte), Err(AccessDenied::Gone));
        assert_eq!(held.scatter(0, &[2]), Err(AccessDenied::Gone));
        assert_eq!(held.fetch_add(0, 2), Err(AccessDenied::Gone));
        assert_eq!(byte, [1]);
        // Freed memory cannot be registered again.
        let whole = memory.whole().unwrap();
        let again = registry.register(&pd, whole, Some(0), Access::ALL).unwrap_err();
        assert_eq!(again.kind(), &Kind::Freed);
    }
}

#[test]
fn moved_memory_shows_no_stale_bytes() {
    let (sim, gpu) = gpu();
    let control = sim.control(0).unwrap();
    let registry = Registry::new();
    let pd = registry.pd();
    let memory = gpu.alloc(64 << 10).unwrap();
    let mr = registry.register(&pd, memory.whole().unwrap(), Some(0), Access::ALL).unwrap();
    let (stop, copied) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        for engine in 0..2u64 {
            let (registry, pd, mr, stop, copied) = (&registry, &pd, &mr, &stop, &copied);
            scope.spawn(move || {
                let mut done = 0u64;
                let at = engine * 1024;
                while !stop.load(Ordering::Relaxed) {
                    let need = Access::REMOTE_WRITE;
                    let write = [done as u8 & 0x7f; 512];
                    let mut back = [0; 512];
                    let outcome = registry.resolve(mr.rkey(), pd.id(), need, at, 512);
                    match outcome.and_then(|span| {
                        span.scatter(0, &write)?;
                        span.gather(0, &mut back)
                    }) {
                        Ok(()) => {
                            assert!(!back.contains(&POISON));
                            assert_eq!(back, write);
                            done += 1;
                            copied.fetch_add(1, Ordering::Relaxed);
                        }
                        Err(AccessDenied::Moving) => std::hint::spin_loop(),
                        Err(other) => panic!("{other}"),
                    }
                }
            });
        }
        for round in 0..300 {
            let before = copied.load(Ordering::Relaxed);
            while round % 4 == 0 && copied.load(Ordering::Relaxed) == before {
                std::thread::yield_now();
            }
            control.relocate(&memory).unwrap();
        }
        stop.store(true, Ordering::Relaxed);
    });
    assert_eq!(mr.failure().map(|error| error.to_string()), None);
}

#[test]
fn thousands_of_registrations_share_one_window() {
    let (_, gpu) = gpu();
    let registry = Registry::new();
    let pd = registry.pd();
    let memory = gpu.alloc(4 << 20).unwrap();
    let mrs: Vec<_> = (0..4096u64)
        .map(|page| {
            let region = memory.region(page * 1024, 1024).unwrap();
            registry.register(&pd, region, Some(page << 32), Access::ALL).unwrap()
        })
        .collect();
    assert_eq!(registry.len(), 4096);
    for (page, mr) in mrs.iter().enumerate() {
        let at = (page as u64) << 32;
        let span = registry.resolve(mr.rkey(), pd.id(), Access::REMOTE_WRITE, at, 8).unwrap();
        span.scatter(0, &(page as u64).to_ne_bytes()).unwrap();
    }
    let mut word = [0; 8];
    memory.read(77 * 1024, &mut word).unwrap();
    assert_eq!(u64::from_ne_bytes(word), 77);
    let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
    assert!(maps.lines().count() < 2000, "{}", maps.lines().count());
}

#[test]
fn registration_cost_does_not_depend_on_size() {
    let registry = Registry::new();
    let pd = registry.pd();
    let time = |len: u64| {
        let memory = HostMemory::new(len).unwrap();
        let start = Instant::now();
        for _ in 0..200 {
            registry.register(&pd, memory.clone(), None, Access::ALL).unwrap();
        }
        start.elapsed()
    };
    // The best of eight runs, to exclude other load on the machine.
    let best = |len| (0..8).map(|_| time(len)).min().unwrap();
    let (small, large) = (best(4096), best(1 << 36));
    assert!(large < small * 4 + Duration::from_millis(1), "{small:?} {large:?}");
}

#[test]
fn a_span_and_a_slot_stay_small() {
    assert!(size_of::<Span<'_>>() <= 48, "{}", size_of::<Span<'_>>());
    assert!(size_of::<super::table::Slot>() <= 256, "{}", size_of::<super::table::Slot>());
    assert_eq!(size_of::<AccessDenied>(), 1);
}

/// ```console
/// $ WARPWIRE_MEASURE=1 cargo test --release --test unit mr::tests::cost -- --nocapture
/// ```
#[test]
fn cost_of_resolving_and_copying() {
    if std::env::var_os("WARPWIRE_MEASURE").is_none() {
        return println!("skipped: a measurement; WARPWIRE_MEASURE=1 runs it");
    }
    // The best of many short runs, to exclude other load on the machine.
    const ROUNDS: u32 = 2000;
    fn time(mut work: impl FnMut()) -> f64 {
        let run = |work: &mut dyn FnMut()| {
            let start = Instant::now();
            (0..ROUNDS).for_each(|_| work());
            start.elapsed().as_nanos() as f64 / f64::from(ROUNDS)
        };
        (0..1000).map(|_| run(&mut work)).fold(f64::INFINITY, f64::min)
    }
    let registry = Registry::new();
    let pd = registry.pd();
    let memory = HostMemory::new(1 << 20).unwrap();
    memory.bytes().fill(0, 1 << 20, &[1]).unwrap();
    let mr = registry.register(&pd, memory, Some(0), Access::ALL).unwrap();
    let find = |at: u64, len| {
        registry.resolve(black_box(mr.rkey()), pd.id(), Access::REMOTE_WRITE, at, len).unwrap()
    };
    println!("resolve alone {:.1} ns", time(|| drop(black_box(find(0, 64)))));
    println!("bytes     memcpy   resolve+gather  ratio   resolve+scatter  ratio");
    for len in [8usize, 64, 256, 1024, 4096, 16384] {
        let (from, mut to) = (vec![1u8; 1 << 20], vec![0u8; len]);
        let mut at = 0;
        let mut next = || {
            at = (at + 4096 + 64) % ((1 << 20) - 16384);
            at
        };
        let plain = time(|| {
            let at = next();
            black_box(&mut to).copy_from_slice(black_box(&from[at..at + len]));
        });
        let gather = time(|| {
            let at = next() as u64;
            find(at, len as u64).gather(0, black_box(&mut to)).unwrap();
        });
        let scatter = time(|| {
            let at = next() as u64;
            find(at, len as u64).scatter(0, black_box(&to)).unwrap();
        });
        let (a, b) = (gather / plain, scatter / plain);
        println!("{len:6} {plain:8.1} ns {gather:11.1} ns {a:6.2} {scatter:14.1} ns {b:6.2}");
    }
}
