//! Registering by file descriptor (dma-buf, memfd), and descriptors that are refused.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{
    MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create, open,
};
use warpwire::error::Kind;
use warpwire::mem::{self, DmaBuf};
use warpwire::mr::HostMemory;
use warpwire::verbs::{Access, AttachMode, DmaBufRange, Mr, QpOptions, Remote, SendRequest, WrOp};
use warpwire::{Error, Result};

use crate::registration::child;
use crate::registration::harness::{Buffer, Harness, MemKind, refused};
use crate::verbs::fixture::{Endpoint, Testbed, same};
use testkit::cases;

cases!(Harness; CASES:
    descriptors_of_other_objects_bad_flow,
    memfds_that_may_shrink_bad_flow,
    ranges_of_a_buffer_bad_flow,
    chosen_iovas_bad_flow,
    a_closed_descriptor_bad_flow,
    one_memory_by_many_descriptors,
    a_duplicated_descriptor,
    parts_exported_by_address,
    memory_freed_before_it_is_imported_bad_flow,
    memory_is_kept_by_its_importers,
    simulated_memory_of_another_process_bad_flow,
    a_memfd_of_another_process,
    any_offset_can_be_registered,
);

const RIGHTS: Access = Access::ALL;

fn import(end: &Endpoint, range: DmaBufRange<'_>, iova: Option<u64>) -> Result<Mr> {
    end.context.register_dmabuf(&end.pd, range, iova, RIGHTS, AttachMode::Dynamic)
}

fn whole(fd: BorrowedFd<'_>) -> DmaBufRange<'_> {
    DmaBufRange { fd, offset: 0, len: 4096 }
}

fn memfd(len: u64, seals: SealFlags) -> OwnedFd {
    let file = memfd_create("theirs", MemfdFlags::ALLOW_SEALING).unwrap();
    ftruncate(&file, len).unwrap();
    fcntl_add_seals(&file, seals).unwrap();
    file
}

/// Writes from the peer through a registration and returns the bytes written.
fn write_through(harness: &Harness, testbed: &Testbed, mr: &Mr, offset: u64, seed: u64) -> Vec<u8> {
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 4096, 0);
    let conn = testbed.join(QpOptions::default());
    let wanted = near.pattern(0, 1000, seed);
    let data = [near.mr().sge(0, 1000)];
    let write = SendRequest::new(1, WrOp::Write(mr.remote(offset))).with(&data);
    conn.a.qp.post_send(&[write]).unwrap();
    testbed.done(&conn.a.sends, 1);
    wanted
}

fn descriptors_of_other_objects_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let (end, folder) = (&testbed.b, tempfile::tempdir().unwrap());
    let (reader, writer) = std::io::pipe().unwrap();
    let socket = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    let file = tempfile::tempfile().unwrap();
    file.set_len(1 << 20).unwrap();
    // A plain file whose name looks like a dma-buf's.
    let disguised = folder.path().join("dmabuf:");
    let disguised = std::fs::File::create_new(disguised).unwrap();
    let opened = open(folder.path(), OFlags::RDONLY, Mode::empty()).unwrap();
    let null = std::fs::File::open("/dev/null").unwrap();
    let event = rustix::event::eventfd(0, rustix::event::EventfdFlags::empty()).unwrap();
    for (fd, kind) in [
        (reader.as_fd(), "a pipe"),
        (writer.as_fd(), "a pipe"),
        (socket.as_fd(), "a socket"),
        (file.as_fd(), "a file"),
        (disguised.as_fd(), "a file"),
        (opened.as_fd(), "a folder"),
        (null.as_fd(), "a device"),
        (event.as_fd(), "not a dma-buf"),
    ] {
        let error = refused(import(end, whole(fd), None), &["not a dma-buf", kind]);
        assert_eq!(error.kind(), &Kind::InvalidArgument, "{error}");
        assert!(error.to_string().contains("pass the descriptor"), "no fix: {error}");
    }
    assert!(end.context.registry().unwrap().is_empty());
}

fn memfds_that_may_shrink_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let end = &testbed.b;
    let unsealed = memfd(8192, SealFlags::empty());
    refused(import(end, whole(unsealed.as_fd()), None), &["against shrinking", "F_SEAL"]);
    let growing = memfd(8192, SealFlags::GROW | SealFlags::SEAL);
    refused(import(end, whole(growing.as_fd()), None), &["against shrinking"]);
    for seal in [SealFlags::WRITE, SealFlags::FUTURE_WRITE] {
        let closed = memfd(8192, SealFlags::SHRINK | seal);
        let error = refused(import(end, whole(closed.as_fd()), None), &["writing"]);
        assert_eq!(error.kind(), &Kind::PermissionDenied, "{error}");
    }
    let sealed = memfd(8192, SealFlags::SHRINK);
    let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&sealed));
    let readable = open(path, OFlags::RDONLY, Mode::empty()).unwrap();
    let error = refused(import(end, whole(readable.as_fd()), None), &["writing"]);
    assert_eq!(error.kind(), &Kind::PermissionDenied, "{error}");
    let empty = memfd(0, SealFlags::SHRINK);
    refused(import(end, whole(empty.as_fd()), None), &["empty"]);
    // The same memfd, sealed against shrinking only, is accepted.
    let mr = import(end, whole(sealed.as_fd()), None).unwrap();
    let wanted = write_through(harness, &testbed, &mr, 77, 5);
    let mut back = vec![0; 1000];
    rustix::io::pread(&sealed, &mut back, 77).unwrap();
    same(&back, &wanted, "a write into a memfd");
}

fn ranges_of_a_buffer_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let end = &testbed.b;
    let memory = harness.gpu().alloc(1 << 16).unwrap();
    let buffer = memory.export_dmabuf(4096, 8192).unwrap();
    let host = HostMemory::new(1 << 16).unwrap();
    for fd in [buffer.as_fd(), host.as_fd()] {
        for (offset, len) in [
            (1 << 16, 1),
            ((1 << 16) - 4095, 4096),
            (0, (1 << 16) + 1),
            (4096, 1 << 16),
            (1 << 40, 4096),
            (u64::MAX - 4096, 4096),
        ] {
            let error = refused(import(end, DmaBufRange { fd, offset, len }, None), &["65536"]);
            assert_eq!(error.kind(), &Kind::OutOfRange, "{offset} {len}: {error}");
        }
        for (offset, len) in [(0, 0), (4096, 0), (u64::MAX, 1), (1, u64::MAX), (u64::MAX, u64::MAX)]
        {
            let error = refused(import(end, DmaBufRange { fd, offset, len }, None), &["empty"]);
            assert_eq!(error.kind(), &Kind::InvalidArgument, "{offset} {len}: {error}");
        }
        // The last byte alone and the whole buffer are accepted.
        import(end, DmaBufRange { fd, offset: (1 << 16) - 1, len: 1 }, None).unwrap();
        import(end, DmaBufRange { fd, offset: 0, len: 1 << 16 }, None).unwrap();
    }
    assert!(end.context.registry().unwrap().is_empty());
}

fn chosen_iovas_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let end = &testbed.b;
    let memory = harness.gpu().alloc(1 << 16).unwrap();
    let buffer = memory.export_dmabuf(100, 8192).unwrap();
    let range: DmaBufRange<'_> = (&buffer).into();
    for iova in [0, 99, 101, 4096, 8192 + 101, u64::MAX] {
        let error = refused(import(end, range, Some(iova)), &["within a page", "choose an iova"]);
        assert_eq!(error.kind(), &Kind::Misaligned, "{error}");
    }
    // The correct offset within a page, but the range would wrap around.
    let last = !0xfff | 100;
    refused(import(end, range, Some(last)), &["pass the last address"]);
    let address = memory.address().raw() + 100;
    for (iova, wanted) in [(None, 100), (Some(100), 100), (Some(address), address)] {
        assert_eq!(import(end, range, iova).unwrap().iova(), wanted);
    }
}

fn a_closed_descriptor_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    // Higher than any descriptor that this process opens.
    // SAFETY: the descriptor is not open; calls with it fail with EBADF.
    let closed = unsafe { BorrowedFd::borrow_raw(1_000_000) };
    let error = refused(import(&testbed.b, whole(closed), None), &["Bad file descriptor"]);
    assert_eq!(error.kind(), &Kind::Os(libc::EBADF));
    refused(mem::exported(closed), &["Bad file descriptor"]);
}

fn any_offset_can_be_registered(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let memory = harness.gpu().alloc(1 << 16).unwrap();
    memory.write(0, &[0; 1 << 16]).unwrap();
    // A part of a whole export may be registered. The descriptor of a partial export still refers
    // to the whole allocation.
    for (exported, offset) in [((0, 1 << 16), 4097), ((4096, 4096), 30_001)] {
        let buffer = memory.export_dmabuf(exported.0, exported.1).unwrap();
        let range = DmaBufRange { fd: buffer.as_fd(), offset, len: 5000 };
        let mr = import(&testbed.b, range, None).unwrap();
        let wanted = write_through(harness, &testbed, &mr, 13, offset);
        let mut found = vec![0; 1000];
        memory.read(offset + 13, &mut found).unwrap();
        same(&found, &wanted, "a write at an offset of a dma-buf");
        let mut around = [0; 26];
        memory.read(offset, &mut around[..13]).unwrap();
        memory.read(offset + 1013, &mut around[13..]).unwrap();
        assert_eq!(around, [0; 26]);
    }
}

/// Each descriptor of an allocation stays valid, in whatever order the others are closed.
fn one_memory_by_many_descriptors(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let end = &testbed.b;
    let memory = harness.gpu().alloc(1 << 16).unwrap();
    let exports: Vec<DmaBuf> =
        (0..3).map(|n| memory.export_dmabuf(n * 4096, 4096).unwrap()).collect();
    let mrs: Vec<Mr> =
        exports.iter().map(|buffer| import(end, buffer.into(), None).unwrap()).collect();
    // All registrations refer to the same memory.
    let again = import(end, (&exports[0]).into(), None).unwrap();
    assert_ne!(again.rkey(), mrs[0].rkey());
    let wanted = write_through(harness, &testbed, &again, 3, 9);
    let mut found = vec![0; 1000];
    memory.read(3, &mut found).unwrap();
    same(&found, &wanted, "a write by a second registration");
    let mut exports = exports.into_iter();
    let first = exports.next().unwrap();
    drop(exports);
    import(end, (&first).into(), None)
        .expect("the first descriptor works after the others were closed");
    let (found, start) = mem::exported(first.as_fd()).unwrap().expect("a known export");
    assert_eq!((found.address(), start), (memory.address(), memory.address()));
    // After a move the memory has another file; old descriptors still refer to this allocation.
    drop((again, mrs));
    harness.control().relocate(&memory).unwrap();
    let later = memory.export_dmabuf(0, 4096).unwrap();
    for buffer in [&first, &later] {
        let mr = import(end, buffer.into(), None).unwrap();
        let wanted = write_through(harness, &testbed, &mr, 0, 11);
        let mut found = vec![0; 1000];
        memory.read(0, &mut found).unwrap();
        same(&found, &wanted, "a write after a move");
    }
}

fn parts_exported_by_address(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let end = &testbed.b;
    let memory = harness.gpu().alloc(1 << 16).unwrap();
    let all = memory.export_dmabuf(0, 1 << 16).unwrap();
    let address = |offset| memory.address().checked_add(offset).unwrap();
    // SAFETY: the memory outlives the dma-bufs.
    let parts = [4096u64, 32_768].map(|at| unsafe { mem::export_address(address(at), 8192) });
    let parts = parts.map(Result::unwrap);
    for (part, at) in parts.iter().zip([4096u64, 32_768]) {
        assert_eq!((part.offset(), part.len()), (at, 8192));
        let mr = import(end, part.into(), None).unwrap();
        let wanted = write_through(harness, &testbed, &mr, 1, at);
        let mut found = vec![0; 1000];
        memory.read(at + 1, &mut found).unwrap();
        same(&found, &wanted, "a write to memory exported by address");
    }
    // The descriptor of the whole allocation is unaffected by later exports of parts.
    import(end, (&all).into(), None).unwrap();
    // SAFETY: refused.
    let beyond = unsafe { mem::export_address(address(60_000), 8192) };
    refused(beyond, &["holds all of that range"]);
    // SAFETY: as above.
    let unowned = unsafe { mem::export_address(mem::DeviceAddr::new(4096), 64) };
    assert!(unowned.is_err());
}

fn a_duplicated_descriptor(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let end = &testbed.b;
    let memory = harness.gpu().alloc(1 << 16).unwrap();
    let fd = memory.export_dmabuf(4096, 4096).unwrap().into_fd();
    // A second export of the same memory is closed.
    drop(memory.export_dmabuf(0, 4096).unwrap());
    let copy = fd.try_clone().unwrap();
    drop(fd);
    let range = DmaBufRange { fd: copy.as_fd(), offset: 4096, len: 4096 };
    let mr = import(end, range, None).unwrap();
    let wanted = write_through(harness, &testbed, &mr, 5, 21);
    let mut found = vec![0; 1000];
    memory.read(4096 + 5, &mut found).unwrap();
    same(&found, &wanted, "a write through a duplicated descriptor");
    // The memory is freed while the descriptor stays open.
    drop(mr);
    drop(memory);
    let error = refused(import(end, range, None), &["freed", "keep the allocation"]);
    assert_eq!(error.kind(), &Kind::Freed);
}

fn memory_freed_before_it_is_imported_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let end = &testbed.b;
    let gone = |import: Result<Mr>| {
        let error: Error = refused(import, &["freed"]);
        assert_eq!(error.kind(), &Kind::Freed, "{error}");
    };
    let dropped = harness.gpu().alloc(4096).unwrap();
    let buffer = dropped.export_dmabuf(0, 4096).unwrap();
    drop(dropped);
    gone(import(end, (&buffer).into(), None));
    let freed = harness.gpu().alloc(4096).unwrap();
    let buffer = freed.export_dmabuf(0, 4096).unwrap();
    freed.free().unwrap();
    gone(import(end, (&buffer).into(), None));
    let pulled = harness.gpu().alloc(4096).unwrap();
    let buffer = pulled.export_dmabuf(0, 4096).unwrap();
    harness.control().force_free(&pulled).unwrap();
    gone(import(end, (&buffer).into(), None));
    let attach = AttachMode::Static;
    gone(end.context.register_dmabuf(&end.pd, (&buffer).into(), None, RIGHTS, attach));
    refused(pulled.export_dmabuf(0, 4096), &["freed"]);
    // The same for memory exported by its address.
    let owner = harness.gpu().alloc(4096).unwrap();
    // SAFETY: freed early on purpose; the simulator detects that.
    let buffer = unsafe { mem::export_address(owner.address(), 4096) }.unwrap();
    drop(owner);
    gone(import(end, (&buffer).into(), None));
    assert!(end.context.registry().unwrap().is_empty());
}

fn memory_is_kept_by_its_importers(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let memory = harness.gpu().alloc(4096).unwrap();
    memory.write(0, &[7; 4096]).unwrap();
    let buffer = memory.export_dmabuf(0, 4096).unwrap();
    let mr = import(&testbed.b, (&buffer).into(), None).unwrap();
    drop(buffer);
    let error = refused(memory.free(), &["still use it"]);
    assert_eq!(error.kind(), &Kind::Busy);
    drop(memory);
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 4096, 0);
    let conn = testbed.join(QpOptions::default());
    let data = [near.mr().sge(0, 4096)];
    conn.a.qp.post_send(&[SendRequest::new(1, WrOp::Read(mr.remote(0))).with(&data)]).unwrap();
    testbed.done(&conn.a.sends, 1);
    assert_eq!(near.read(0, 4096), vec![7; 4096]);
}

/// This process is not notified of moves in another one, so the import is refused; the error text
/// names the alternative.
fn simulated_memory_of_another_process_bad_flow(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let (fd, child) = child::export("sim");
    let error = refused(
        import(&testbed.b, whole(fd.as_fd()), None),
        &["another process", "inter-process handle"],
    );
    assert_eq!(error.kind(), &Kind::Unsupported);
    assert!(mem::exported(fd.as_fd()).unwrap().is_none());
    child.end();
}

/// Plain memory of another process does not move, so it can be imported.
fn a_memfd_of_another_process(harness: &Harness) {
    let testbed = harness.fixture.testbed();
    let (fd, child) = child::export("host");
    let mr = import(&testbed.b, whole(fd.as_fd()), Some(0)).unwrap();
    let near = Buffer::new(harness, &testbed.a, MemKind::HostHandle, 4096, 0);
    let conn = testbed.join(QpOptions::default());
    let data = [near.mr().sge(0, 4096)];
    let at = Remote { address: 0, rkey: mr.rkey() };
    conn.a.qp.post_send(&[SendRequest::new(1, WrOp::Read(at)).with(&data)]).unwrap();
    testbed.done(&conn.a.sends, 1);
    assert_eq!(near.read(0, 4096), vec![child::FILL; 4096]);
    // The shared memory outlives the process that created it.
    child.end();
    conn.a.qp.post_send(&[SendRequest::new(2, WrOp::Read(at)).with(&data)]).unwrap();
    testbed.done(&conn.a.sends, 2);
    assert_eq!(near.read(0, 4096), vec![child::FILL; 4096]);
}
