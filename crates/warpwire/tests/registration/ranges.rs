//! Registering by address: which client owns it, and addresses that no client owns.

use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{MapFlags, MprotectFlags, ProtFlags, mprotect};
use warpwire::Result;
use warpwire::error::Kind;
use warpwire::mem::sim::{Sim, SimConfig};
use warpwire::verbs::{Access, Mr, QpOptions, SendRequest, Status, WrOp};

use crate::registration::harness::{Buffer, Harness, MemKind, Pages, refused};
use crate::verbs::fixture::Endpoint;
use testkit::cases;

cases!(Harness; CASES:
    addresses_without_an_owner_bad_flow,
    impossible_lengths_bad_flow,
    half_mapped_ranges_bad_flow,
    protected_mappings_bad_flow,
    many_mappings_are_one_range,
    freed_simulated_memory_bad_flow,
    memory_of_other_devices,
    memory_of_a_killed_device_bad_flow,
    keys_are_not_reused_soon_bad_flow,
);

const PAGE: usize = 4096;

fn by_address(end: &Endpoint, address: u64, len: u64, access: Access) -> Result<Mr> {
    // SAFETY: either refused, or memory that the case keeps.
    unsafe { end.context.register_address(&end.pd, address, len, None, access) }
}

const BOTH: [Access; 2] = [Access::ALL, Access::REMOTE_READ];

fn addresses_without_an_owner_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let end = &testbed.a;
    let unmapped = Pages::new(4 * PAGE);
    let hole = unmapped.address();
    drop(unmapped);
    // Below all mappings, a hole, above user space, simulated addresses never allocated, the last
    // page.
    for address in [0, 4096, hole, 0x8000_0000_0000, 0x5157_0fff_0000_0000, u64::MAX - 4096] {
        for access in BOTH.into_iter().chain([Access::REMOTE_READ | Access::ON_DEMAND]) {
            let words = ["no client owns the address", "host:", "sim:", "cuda:", "pass memory"];
            let error = refused(by_address(end, address, 64, access), &words);
            assert_eq!(error.kind(), &Kind::NotDeviceMemory);
        }
    }
    assert!(end.context.registry().unwrap().is_empty());
}

fn impossible_lengths_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let memory = harness.gpu().alloc(1 << 16).unwrap();
    let pages = Pages::new(PAGE);
    for address in [memory.address().raw(), pages.address()] {
        for len in [0, u64::MAX, u64::MAX - address + 1] {
            let error = refused(by_address(&testbed.a, address, len, Access::ALL), &["register"]);
            assert_eq!(error.kind(), &Kind::InvalidArgument, "{len}");
        }
        let size = if address == pages.address() { PAGE as u64 } else { 1 << 16 };
        for (skip, len) in [(0, size + (1 << 24)), (size - 1, 1 << 24), (1, u64::MAX / 2)] {
            let made = by_address(&testbed.a, address + skip, len, Access::ALL);
            refused(made, &["no client owns the address"]);
        }
        drop(by_address(&testbed.a, address, size, Access::ALL).unwrap());
        drop(by_address(&testbed.a, address + size - 1, 1, Access::ALL).unwrap());
    }
    // Not one byte after simulated memory is accepted.
    refused(
        by_address(&testbed.a, memory.address().raw(), (1 << 16) + 1, Access::ALL),
        &["no client owns the address"],
    );
}

fn half_mapped_ranges_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let pages = Pages::new(8 * PAGE);
    pages.unmap(3 * PAGE, PAGE);
    let at = |page: usize| pages.address() + (page * PAGE) as u64;
    for (from, count) in [(0, 4), (0, 8), (2, 2), (3, 1), (3, 2)] {
        let len = (count * PAGE) as u64;
        let hole = format!("nothing is mapped at {:#x}", at(3));
        refused(by_address(&testbed.a, at(from), len, Access::ALL), &[&hole]);
    }
    for (from, count) in [(0, 3), (4, 4)] {
        by_address(&testbed.a, at(from), (count * PAGE) as u64, Access::ALL).unwrap();
    }
}

fn protected_mappings_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let pages = Pages::new(4 * PAGE);
    // SAFETY: pages of this case, not in use now.
    unsafe { mprotect(pages.at(PAGE), PAGE, MprotectFlags::READ) }.unwrap();
    let (at, len) = (pages.address(), (2 * PAGE) as u64);
    for access in [Access::ALL, Access::LOCAL_WRITE, Access::LOCAL_WRITE | Access::ON_DEMAND] {
        let words = ["read-only", "leave out local-write"];
        let error = refused(by_address(&testbed.a, at, len, access), &words);
        assert_eq!(error.kind(), &Kind::PermissionDenied);
    }
    for access in [Access::NONE, Access::REMOTE_READ, Access::REMOTE_READ | Access::ON_DEMAND] {
        by_address(&testbed.a, at, len, access).unwrap();
    }
    let reserved = Pages::with(PAGE, ProtFlags::empty(), MapFlags::PRIVATE);
    for access in BOTH.into_iter().chain([Access::ON_DEMAND]) {
        refused(by_address(&testbed.a, reserved.address(), 64, access), &["reserved"]);
    }
    assert!(testbed.a.context.registry().unwrap().is_empty());
}

fn many_mappings_are_one_range(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let pages = Pages::new(64 * PAGE);
    // Every second page has other rights, so that the kernel merges no two mappings.
    for page in (0..64).step_by(2) {
        let all = MprotectFlags::READ | MprotectFlags::WRITE | MprotectFlags::EXEC;
        // SAFETY: pages of this case, not in use now.
        unsafe { mprotect(pages.at(page * PAGE), PAGE, all) }.unwrap();
    }
    let far =
        by_address(&testbed.b, pages.address() + 1, (64 * PAGE - 2) as u64, Access::ALL).unwrap();
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 64 * PAGE as u64, 0);
    let len = 64 * PAGE - 2;
    let wanted = near.pattern(0, len, 3);
    let data = [near.mr().sge(0, len as u32)];
    conn.a.qp.post_send(&[SendRequest::new(1, WrOp::Write(far.remote(0))).with(&data)]).unwrap();
    testbed.done(&conn.a.sends, 1);
    let mut found = vec![0; len];
    pages.read(1, &mut found);
    crate::verbs::fixture::same(&found, &wanted, "a write over many mappings");
}

fn freed_simulated_memory_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let dropped = harness.gpu().alloc(4096).unwrap().address().raw();
    refused(by_address(&testbed.a, dropped, 64, Access::ALL), &["no client owns the address"]);
    let memory = harness.gpu().alloc(4096).unwrap();
    harness.control().force_free(&memory).unwrap();
    for access in [Access::ALL, Access::ALL | Access::ON_DEMAND] {
        let made = by_address(&testbed.a, memory.address().raw(), 64, access);
        refused(made, &["no client owns the address"]);
    }
    refused(
        memory.whole().and_then(|all| testbed.a.context.register(&testbed.a.pd, all, Access::ALL)),
        &["freed"],
    );
    assert!(testbed.a.context.registry().unwrap().is_empty());
}

/// The address alone identifies the device and the simulated machine of the memory.
fn memory_of_other_devices(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let other = Sim::start(SimConfig::default()).unwrap();
    let devices =
        [harness.gpu(), harness.fixture.sim().device(1).unwrap(), other.device(0).unwrap()];
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 4096, 0);
    let memories = devices.map(|gpu| gpu.alloc(4096).unwrap());
    let mrs = [0, 1, 2].map(|n| {
        by_address(&testbed.b, memories[n].address().raw() + 7, 100, Access::ALL).unwrap()
    });
    for (n, mr) in mrs.iter().enumerate() {
        let wanted = near.pattern(0, 100, n as u64);
        let data = [near.mr().sge(0, 100)];
        conn.a.qp.post_send(&[SendRequest::new(1, WrOp::Write(mr.remote(0))).with(&data)]).unwrap();
        testbed.done(&conn.a.sends, 1);
        let mut found = [0; 100];
        memories[n].read(7, &mut found).unwrap();
        crate::verbs::fixture::same(&found, &wanted, "memory of another device");
    }
    // The control of one device does not move the memory of another.
    refused(harness.control().relocate(&memories[1]), &["no live memory"]);
    drop(mrs);
    drop(memories);
    other.control(0).unwrap().wait_empty(crate::verbs::fixture::test_timeout()).unwrap();
}

fn memory_of_a_killed_device_bad_flow(harness: &Harness) {
    let sim = Sim::start(SimConfig::default()).unwrap();
    let gpu = sim.device(0).unwrap();
    let testbed = harness.fixture.testbed();
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 4096, 0);
    let memory = gpu.alloc(1 << 20).unwrap();
    let buffer = memory.export_dmabuf(0, 4096).unwrap();
    let slow = warpwire::verbs::MemorySource::from(memory.whole().unwrap()).without_window();
    let slow = testbed.b.context.register(&testbed.b.pd, slow, Access::ALL).unwrap();
    sim.control(0).unwrap().kill();
    let lost = |made: Result<Mr>| {
        let error = refused(made, &["it was killed"]);
        assert_eq!(error.kind(), &Kind::DeviceLost, "{error}");
    };
    let (end, at) = (&testbed.b, memory.address().raw());
    for access in [Access::ALL, Access::ALL | Access::ON_DEMAND] {
        refused(by_address(end, at, 4096, access), &["sim: it was killed"]);
    }
    lost(end.context.register(&end.pd, memory.region(0, 64).unwrap(), Access::ALL));
    for attach in [warpwire::verbs::AttachMode::Static, warpwire::verbs::AttachMode::Dynamic] {
        lost(end.context.register_dmabuf(&end.pd, (&buffer).into(), None, Access::ALL, attach));
    }
    // An earlier registration that is accessed through the device fails the work; nothing hangs.
    for op in [WrOp::Write(slow.remote(0)), WrOp::Read(slow.remote(0))] {
        let conn = testbed.join(crate::verbs::fixture::short_timeouts());
        let data = [near.mr().sge(0, 64)];
        conn.a.qp.post_send(&[SendRequest::new(1, op).with(&data)]).unwrap();
        let done = testbed.next(&conn.a.sends);
        assert!(
            matches!(done.status, Status::RemoteAccess | Status::RetryExceeded),
            "{op:?}: {done:?}"
        );
        assert_eq!(slow.failure().unwrap().kind(), &Kind::DeviceLost);
    }
}

/// A deregistered key is refused, even when its index has a new owner; keys are not reused soon.
fn keys_are_not_reused_soon_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 4096, 0);
    let words: Vec<AtomicU64> = (0..512).map(|_| AtomicU64::new(0)).collect();
    let at = words.as_ptr().expose_provenance() as u64;
    let mut seen = std::collections::HashSet::new();
    let mut old = Vec::new();
    for _ in 0..2000 {
        let mr = by_address(&testbed.b, at, 4096, Access::ALL).unwrap();
        assert!(seen.insert(mr.rkey()), "{:#x} was reused", mr.rkey());
        old.push(mr.remote(0));
        drop(mr);
    }
    let _new: Vec<_> =
        (0..300).map(|_| by_address(&testbed.b, at, 4096, Access::ALL).unwrap()).collect();
    for remote in old.into_iter().step_by(97) {
        let conn = testbed.join(QpOptions::default());
        let data = [near.mr().sge(0, 64)];
        conn.a.qp.post_send(&[SendRequest::new(1, WrOp::Write(remote)).with(&data)]).unwrap();
        testbed.failed(&conn.a.sends, 1, Status::RemoteAccess);
    }
    assert_eq!(words[0].load(Ordering::Relaxed), 0);
}
