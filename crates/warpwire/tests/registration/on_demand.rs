//! On-demand host memory: pages are faulted in when needed, and unmapped memory is an error, not a
//! crash.

use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use rustix::mm::{
    Advice, MapFlags, MprotectFlags, MremapFlags, ProtFlags, madvise, mmap, mprotect, mremap,
    munmap,
};
use warpwire::error::Kind;
use warpwire::mr::AccessPath;
use warpwire::verbs::{
    Access, Mr, QpAttributes, QpOptions, ReceiveRequest, SendRequest, State, Status, WrOp,
};

use crate::registration::harness::{Buffer, Harness, MemKind, Pages, refused};
use crate::verbs::fixture::{Endpoint, QpPair, Rng, Testbed, connect, same};
use testkit::cases;

cases!(Harness; CASES:
    file_backed_memory,
    pages_are_faulted_in_when_needed,
    unmapped_under_traffic_bad_flow,
    a_hole_does_not_affect_its_neighbours,
    pages_made_read_only_bad_flow,
    mappings_moved_away_and_back,
    dropped_pages_read_as_zero,
    a_truncated_file_bad_flow,
    prefetch_and_its_counters,
    a_huge_range_registers_quickly,
    many_queue_pairs_fault_one_page,
    atomics_bad_flow,
);

const PAGE: usize = 4096;

fn rights() -> Access {
    Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE | Access::ON_DEMAND
}

fn on_demand(end: &Endpoint, address: u64, len: u64) -> Mr {
    // SAFETY: the cases only copy the memory. Some unmap it, which on-demand registrations allow.
    unsafe { end.context.register_address(&end.pd, address, len, None, rights()) }.unwrap()
}

fn reconnect(testbed: &Testbed, conn: &QpPair) {
    for test_qp in [&conn.a, &conn.b] {
        test_qp.qp.modify(&QpAttributes::new(State::Reset)).unwrap();
    }
    connect(&conn.a.qp, &conn.b.qp);
    testbed.check_traffic(conn);
}

fn transfer(testbed: &Testbed, conn: &QpPair, op: WrOp, data: warpwire::verbs::Sge) -> Status {
    conn.a.qp.post_send(&[SendRequest::new(1, op).with(&[data])]).unwrap();
    testbed.next(&conn.a.sends).status
}

/// A mapping of a file on disk, which the kernel reads when needed.
struct Mapped {
    file: std::fs::File,
    base: *mut std::ffi::c_void,
    len: usize,
}

impl Mapped {
    fn new(bytes: &[u8], protection: ProtFlags) -> Self {
        use std::io::Write;
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(bytes).unwrap();
        let (len, null) = (bytes.len(), std::ptr::null_mut());
        // SAFETY: a new mapping at an address chosen by the kernel.
        let base = unsafe { mmap(null, len, protection, MapFlags::SHARED, file.as_fd(), 0) };
        Self { file, base: base.unwrap(), len }
    }

    fn address(&self) -> u64 {
        self.base.expose_provenance() as u64
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        // SAFETY: mapped with this base and length.
        unsafe { munmap(self.base, self.len) }.unwrap();
    }
}

fn file_backed_memory(harness: &Harness) {
    use std::io::{Read, Seek};
    let testbed = harness.fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let mut bytes = vec![0; 1 << 20];
    warpwire_apps::pattern::fill_bytes(&mut bytes, 5, 0);
    let mapped = Mapped::new(&bytes, ProtFlags::READ | ProtFlags::WRITE);
    let far = on_demand(&testbed.b, mapped.address() + 1, (1 << 20) - 1);
    assert_eq!(far.path(), AccessPath::OnDemand);
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 1 << 20, 0);
    let read = transfer(&testbed, &conn, WrOp::Read(far.remote(9)), near.mr().sge(0, 900_001));
    assert_eq!(read, Status::Success);
    same(&near.read(0, 900_001), &bytes[10..900_011], "a read of a file");
    let wanted = near.pattern(0, 300_007, 6);
    let write =
        transfer(&testbed, &conn, WrOp::Write(far.remote(500_000)), near.mr().sge(0, 300_007));
    assert_eq!(write, Status::Success);
    let mut found = Vec::new();
    (&mapped.file).rewind().unwrap();
    (&mapped.file).read_to_end(&mut found).unwrap();
    same(&found[500_001..800_008], &wanted, "a write into a file");
    same(&found[..500_001], &bytes[..500_001], "the bytes before it");
    // A read-only mapping can be registered for reading only.
    let readable = Mapped::new(&bytes, ProtFlags::READ);
    let (context, pd) = (&testbed.b.context, &testbed.b.pd);
    // SAFETY: mapped until the end of the case.
    let register =
        |access| unsafe { context.register_address(pd, readable.address(), 1 << 20, None, access) };
    refused(register(rights()), &["read-only"]);
    let far = register(Access::REMOTE_READ | Access::ON_DEMAND).unwrap();
    let read = transfer(&testbed, &conn, WrOp::Read(far.remote(0)), near.mr().sge(0, 1 << 20));
    assert_eq!(read, Status::Success);
    same(&near.read(0, 1 << 20), &bytes, "a read of a read-only mapping");
}

fn resident(pages: &Pages, len: usize) -> usize {
    let mut seen = vec![0u8; len / PAGE];
    // SAFETY: the range is mapped, and `seen` has a byte for each of its pages.
    assert_eq!(unsafe { libc::mincore(pages.at(0), len, seen.as_mut_ptr()) }, 0);
    seen.iter().filter(|byte| **byte & 1 == 1).count()
}

fn pages_are_faulted_in_when_needed(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let len = 64 << 20;
    let pages = Pages::new(len);
    let far = on_demand(&testbed.b, pages.address(), len as u64);
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 1 << 20, 0);
    assert_eq!((resident(&pages, len), far.faults()), (0, Default::default()));
    let wanted = near.pattern(0, 100, 3);
    let at = (32 << 20) + 5;
    let write = transfer(&testbed, &conn, WrOp::Write(far.remote(at)), near.mr().sge(0, 100));
    assert_eq!(write, Status::Success);
    let mut found = [0; 100];
    pages.read(at, &mut found);
    same(&found, &wanted, "a write on demand");
    let count = resident(&pages, len);
    assert!((1..=16).contains(&count), "{count} pages are resident after a write of 100 bytes");
    let faults = far.faults();
    assert_eq!((faults.faults, faults.lost, faults.refused), (1, 0, 0));
    // A resident page causes no further fault.
    assert_eq!(
        transfer(&testbed, &conn, WrOp::Write(far.remote(at)), near.mr().sge(0, 100)),
        Status::Success
    );
    assert_eq!(far.faults(), faults);
    // A write over several 64 KiB blocks faults all of them together.
    let write = transfer(&testbed, &conn, WrOp::Write(far.remote(1)), near.mr().sge(0, 1 << 20));
    assert_eq!(write, Status::Success);
    assert_eq!(far.faults().faults, 1 + 17);
}

/// Memory unmapped during a transfer, on either side: that side's protection error, or the transfer
/// was complete before.
fn unmapped_under_traffic_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    // No retransmission timeout: the error is detected by the access, not by a timer.
    let conn = testbed.join(QpOptions::default().with_timeout(0));
    let bystander = testbed.join(QpOptions::default());
    let mut rng = Rng::new(5);
    let (len, mut failures) = (1 << 18, 0);
    for round in 0..48u64 {
        let ours = round % 2 == 0;
        let (mine, other) = if ours { (&testbed.a, &testbed.b) } else { (&testbed.b, &testbed.a) };
        let pages = Pages::new(len);
        pages.write(0, &vec![7; len]);
        let mr = on_demand(mine, pages.address(), len as u64);
        let other = Buffer::new(harness, other, MemKind::HostHandle, len as u64, 0);
        let (near, far) = if ours { (&mr, other.mr()) } else { (other.mr(), &mr) };
        if round % 3 == 0 {
            mr.prefetch(0, len as u64).unwrap();
        }
        let op = match (round / 2) % 3 {
            0 => WrOp::Write(far.remote(0)),
            1 => WrOp::Read(far.remote(0)),
            _ => WrOp::Send,
        };
        let into = [far.sge(0, len as u32)];
        conn.b.qp.post_receive(&[ReceiveRequest { id: 2, data: &into }]).unwrap();
        let data = [near.sge(0, len as u32)];
        conn.a.qp.post_send(&[SendRequest::new(1, op).with(&data)]).unwrap();
        (0..rng.below(12)).for_each(|_| testbed.step());
        let from = rng.below(60) as usize * PAGE;
        pages.unmap(from, len - from);
        let done = testbed.next(&conn.a.sends);
        let protection = match (ours, op) {
            (true, _) => Status::LocalProtection,
            (false, WrOp::Send) => Status::RemoteOperation,
            (false, _) => Status::RemoteAccess,
        };
        assert!(done.status == protection || done.is_success(), "{round} {op:?}: {done:?}");
        failures += u32::from(!done.is_success());
        // The receive has the same result, unless its message never ended.
        if op == WrOp::Send && (done.is_success() || !ours) {
            let received = testbed.next(&conn.b.receives);
            let wanted = if done.is_success() { Status::Success } else { Status::LocalProtection };
            assert_eq!((received.id, received.status), (2, wanted), "{round}");
        }
        testbed.check_traffic(&bystander);
        reconnect(&testbed, &conn);
        while conn.b.receives.poll(&mut [warpwire::verbs::Completion::EMPTY]).unwrap() > 0 {}
    }
    assert!(failures > 20, "too few transfers were in flight: {failures}");
}

/// Access to an unmapped page fails; the pages beside it work on every queue pair.
fn a_hole_does_not_affect_its_neighbours(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let neighbour = testbed.join(QpOptions::default());
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 1 << 17, 0);
    for before in [false, true] {
        let pages = Pages::new(32 * PAGE);
        let far = on_demand(&testbed.b, pages.address(), (32 * PAGE) as u64);
        if before {
            far.prefetch(0, (32 * PAGE) as u64).unwrap();
        }
        pages.unmap(5 * PAGE, PAGE);
        let at = |page: usize| far.remote((page * PAGE) as u64);
        let one = near.mr().sge(0, PAGE as u32);
        for op in
            [WrOp::Write(at(5)), WrOp::Read(at(5)), WrOp::Write(far.remote((5 * PAGE - 1) as u64))]
        {
            assert_eq!(transfer(&testbed, &conn, op, one), Status::RemoteAccess, "{op:?}");
            reconnect(&testbed, &conn);
            for page in [4, 6, 0, 20] {
                for op in [WrOp::Write(at(page)), WrOp::Read(at(page))] {
                    let done = transfer(&testbed, &neighbour, op, one);
                    assert_eq!(done, Status::Success, "{op:?} beside a hole at page {page}");
                }
            }
        }
        let error =
            refused(far.prefetch((4 * PAGE) as u64, (2 * PAGE) as u64), &["not mapped", "map"]);
        assert_eq!(error.kind(), &Kind::Freed);
        // Memory mapped there again is used again.
        let addr_hint = std::ptr::with_exposed_provenance_mut(pages.address() as usize + 5 * PAGE);
        let both = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: replaces only the hole unmapped above.
        unsafe {
            rustix::mm::mmap_anonymous(addr_hint, PAGE, both, MapFlags::PRIVATE | MapFlags::FIXED)
        }
        .unwrap();
        let wanted = near.pattern(0, PAGE, 9);
        assert_eq!(transfer(&testbed, &conn, WrOp::Write(at(5)), one), Status::Success);
        let mut found = vec![0; PAGE];
        pages.read((5 * PAGE) as u64, &mut found);
        same(&found, &wanted, "a write into a page mapped again");
    }
}

fn pages_made_read_only_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 4096, 0);
    let pages = Pages::new(16 * PAGE);
    let far = on_demand(&testbed.b, pages.address(), (16 * PAGE) as u64);
    let one = near.mr().sge(0, 64);
    pages.write(0, &[7; 64]);
    assert_eq!(transfer(&testbed, &conn, WrOp::Write(far.remote(4096)), one), Status::Success);
    let protect = |flags| {
        // SAFETY: pages of this case; no pointer into them is used now.
        unsafe { mprotect(pages.at(0), 16 * PAGE, flags) }.unwrap();
    };
    protect(MprotectFlags::READ);
    assert_eq!(transfer(&testbed, &conn, WrOp::Write(far.remote(0)), one), Status::RemoteAccess);
    reconnect(&testbed, &conn);
    // It can still be read.
    assert_eq!(transfer(&testbed, &conn, WrOp::Read(far.remote(0)), one), Status::Success);
    assert_eq!(near.read(0, 64), [7; 64]);
    protect(MprotectFlags::empty());
    for op in [WrOp::Read(far.remote(0)), WrOp::Write(far.remote(0))] {
        assert_eq!(transfer(&testbed, &conn, op, one), Status::RemoteAccess);
        reconnect(&testbed, &conn);
    }
    protect(MprotectFlags::READ | MprotectFlags::WRITE);
    for op in [WrOp::Read(far.remote(0)), WrOp::Write(far.remote(0))] {
        assert_eq!(transfer(&testbed, &conn, op, one), Status::Success);
    }
}

fn mappings_moved_away_and_back(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 4096, 0);
    let (pages, elsewhere) = (Pages::new(16 * PAGE), Pages::new(16 * PAGE));
    let far = on_demand(&testbed.b, pages.address(), (16 * PAGE) as u64);
    pages.write(100, &[7; 64]);
    let (one, at) = (near.mr().sge(0, 64), far.remote(100));
    assert_eq!(transfer(&testbed, &conn, WrOp::Read(at), one), Status::Success);
    let remap = |from: &Pages, to: &Pages| {
        let flags = MremapFlags::MAYMOVE;
        // SAFETY: whole mappings of this case, the source and the target.
        unsafe { rustix::mm::mremap_fixed(from.at(0), 16 * PAGE, 16 * PAGE, flags, to.at(0)) }
            .unwrap();
    };
    remap(&pages, &elsewhere);
    // The registration refers to the addresses, where nothing is mapped now.
    assert_eq!(transfer(&testbed, &conn, WrOp::Read(at), one), Status::RemoteAccess);
    reconnect(&testbed, &conn);
    remap(&elsewhere, &pages);
    near.write(0, &[0; 64]);
    assert_eq!(transfer(&testbed, &conn, WrOp::Read(at), one), Status::Success);
    assert_eq!(near.read(0, 64), [7; 64]);
    // SAFETY: shrinks a mapping of this case.
    unsafe { mremap(pages.at(0), 16 * PAGE, PAGE, MremapFlags::empty()) }.unwrap();
    let behind = far.remote(8 * PAGE as u64);
    assert_eq!(transfer(&testbed, &conn, WrOp::Read(behind), one), Status::RemoteAccess);
    reconnect(&testbed, &conn);
    assert_eq!(transfer(&testbed, &conn, WrOp::Read(at), one), Status::Success);
}

fn dropped_pages_read_as_zero(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 4096, 0);
    let pages = Pages::new(64 * PAGE);
    let far = on_demand(&testbed.b, pages.address(), (64 * PAGE) as u64);
    let one = near.mr().sge(0, 4000);
    for round in 0..50u64 {
        let at = round * 5000 % (60 * PAGE as u64);
        let wanted = near.pattern(0, 4000, round);
        assert_eq!(transfer(&testbed, &conn, WrOp::Write(far.remote(at)), one), Status::Success);
        let mut found = vec![0; 4000];
        pages.read(at, &mut found);
        same(&found, &wanted, "a write into pages that were dropped");
        // SAFETY: anonymous pages of this case: they read as zero from now on.
        unsafe { madvise(pages.at(0), 64 * PAGE, Advice::LinuxDontNeed) }.unwrap();
        assert_eq!(transfer(&testbed, &conn, WrOp::Read(far.remote(at)), one), Status::Success);
        assert_eq!(near.read(0, 4000), vec![0; 4000]);
    }
}

/// Access beyond the end of a truncated file: the CPU would get SIGBUS, work requests get an error.
fn a_truncated_file_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 4096, 0);
    for before in [false, true] {
        let mapped = Mapped::new(&[7; 64 * PAGE], ProtFlags::READ | ProtFlags::WRITE);
        let far = on_demand(&testbed.b, mapped.address(), (64 * PAGE) as u64);
        if before {
            far.prefetch(0, (64 * PAGE) as u64).unwrap();
        }
        mapped.file.set_len(4 * PAGE as u64).unwrap();
        let one = near.mr().sge(0, 64);
        for op in
            [WrOp::Read(far.remote(40 * PAGE as u64)), WrOp::Write(far.remote(40 * PAGE as u64))]
        {
            assert_eq!(transfer(&testbed, &conn, op, one), Status::RemoteAccess);
            reconnect(&testbed, &conn);
        }
        assert_eq!(transfer(&testbed, &conn, WrOp::Read(far.remote(64)), one), Status::Success);
        assert_eq!(near.read(0, 64), [7; 64]);
    }
}

fn prefetch_and_its_counters(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 1 << 20, 0);
    let len = 4 << 20;
    let pages = Pages::new(len);
    let far = on_demand(&testbed.b, pages.address(), len as u64);
    far.prefetch(1 << 20, 1 << 20).unwrap();
    assert_eq!(resident(&pages, len), 256);
    let prefetched = far.faults();
    assert_eq!((prefetched.prefetched, prefetched.faults), (16, 0));
    let inside = WrOp::Write(far.remote(1 << 20));
    assert_eq!(transfer(&testbed, &conn, inside, near.mr().sge(0, 1 << 20)), Status::Success);
    assert_eq!(far.faults(), prefetched, "no fault after a prefetch");
    far.prefetch(1 << 20, 1 << 20).unwrap();
    assert_eq!(far.faults(), prefetched, "already resident");
    far.prefetch_later(3 << 20, 1 << 20).unwrap();
    let start = Instant::now();
    while far.faults().prefetched < 32 {
        assert!(start.elapsed() < crate::verbs::fixture::test_timeout());
        std::thread::yield_now();
    }
    assert_eq!(resident(&pages, len), 512);
    // Unmapped memory: `prefetch` fails, `prefetch_later` only counts it.
    let gone = far.faults().refused;
    pages.unmap(0, PAGE);
    refused(far.prefetch(0, 64), &["prefetch", "not mapped"]);
    far.prefetch_later(0, 64).unwrap();
    while far.faults().refused < gone + 2 {
        assert!(start.elapsed() < crate::verbs::fixture::test_timeout());
        std::thread::yield_now();
    }
    // Prefetching memory that is always resident does nothing.
    near.mr().prefetch(0, 64).unwrap();
    assert_eq!(near.mr().faults(), Default::default());
}

fn a_huge_range_registers_quickly(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 4096, 0);
    let both = ProtFlags::READ | ProtFlags::WRITE;
    let huge = 64usize << 30;
    let pages = Pages::with(huge, both, MapFlags::PRIVATE | MapFlags::NORESERVE);
    let time = |len: usize| {
        let mut best = Duration::MAX;
        for _ in 0..50 {
            let start = Instant::now();
            drop(on_demand(&testbed.b, pages.address(), len as u64));
            best = best.min(start.elapsed());
        }
        best
    };
    let (small, large) = (time(64 << 10), time(huge));
    eprintln!("on demand: 64 KiB in {small:?}, 64 GiB in {large:?}");
    assert!(large < small * 20 + Duration::from_micros(200), "{small:?} against {large:?}");
    let far = on_demand(&testbed.b, pages.address(), huge as u64);
    for offset in [0, 1 << 30, (37u64 << 30) + 4097, huge as u64 - 100] {
        let wanted = near.pattern(0, 100, offset);
        let write = WrOp::Write(far.remote(offset));
        let done = transfer(&testbed, &conn, write, near.mr().sge(0, 100));
        assert_eq!(done, Status::Success);
        let mut found = [0; 100];
        pages.read(offset, &mut found);
        same(&found, &wanted, "a write far into a huge range");
    }
    assert_eq!(far.faults().faults, 4);
    let beyond = WrOp::Write(far.remote(huge as u64 - 99));
    assert_eq!(transfer(&testbed, &conn, beyond, near.mr().sge(0, 100)), Status::RemoteAccess);
}

fn many_queue_pairs_fault_one_page(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 4096, 0);
    let several: Vec<_> = (0..16).map(|_| testbed.join(QpOptions::default())).collect();
    let bystander = testbed.join(QpOptions::default());
    for round in 0..10u64 {
        let pages = Pages::new(16 * PAGE);
        let far = on_demand(&testbed.b, pages.address(), (16 * PAGE) as u64);
        let wanted = near.pattern(0, 64, round);
        for (n, conn) in several.iter().enumerate() {
            let data = [near.mr().sge(0, 64)];
            let write = SendRequest::new(1, WrOp::Write(far.remote(n as u64 * 64 + 1))).with(&data);
            conn.a.qp.post_send(&[write]).unwrap();
        }
        testbed.check_traffic(&bystander);
        for conn in &several {
            testbed.done(&conn.a.sends, 1);
        }
        assert_eq!(far.faults().faults, 1, "all wait for one fault");
        for n in 0..several.len() as u64 {
            let mut found = [0; 64];
            pages.read(n * 64 + 1, &mut found);
            same(&found, &wanted, "writes of many queue pairs to one page");
        }
        // Each of them fails after the page is unmapped; another queue pair is unaffected.
        pages.unmap(0, 16 * PAGE);
        for (n, conn) in several.iter().enumerate() {
            let data = [near.mr().sge(0, 64)];
            let read = SendRequest::new(1, WrOp::Read(far.remote(n as u64 * 64))).with(&data);
            conn.a.qp.post_send(&[read]).unwrap();
        }
        testbed.check_traffic(&bystander);
        for conn in &several {
            testbed.failed(&conn.a.sends, 1, Status::RemoteAccess);
            reconnect(&testbed, conn);
        }
    }
}

fn atomics_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let pages = Pages::new(PAGE);
    let access = Access::ALL | Access::ON_DEMAND;
    let (context, pd) = (&testbed.a.context, &testbed.a.pd);
    // SAFETY: refused.
    let made = unsafe { context.register_address(pd, pages.address(), 64, None, access) };
    let error = refused(made, &["atomic", "leave out remote-atomic"]);
    assert_eq!(error.kind(), &Kind::Unsupported);
    // As the local buffer for the result it is accepted.
    let conn = testbed.join(QpOptions::default());
    let near = on_demand(&testbed.a, pages.address() + 3, 64);
    let far = Buffer::new(harness, &testbed.b, MemKind::HostHandle, 64, 0);
    far.write(0, &77u64.to_ne_bytes());
    let add = WrOp::Atomic(far.mr().remote(0), warpwire::verbs::Atomic::FetchAdd { add: 1 });
    assert_eq!(transfer(&testbed, &conn, add, near.sge(1, 8)), Status::Success);
    let mut word = [0; 8];
    pages.read(4, &mut word);
    assert_eq!((u64::from_ne_bytes(word), far.word(0)), (77, 78));
}
