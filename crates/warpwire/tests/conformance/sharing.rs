//! Exporting memory to other processes (IPC handles) and to NICs (dma-buf).

use std::os::fd::{AsFd, OwnedFd};

use warpwire::error::Kind;
use warpwire::mem::{Allocation, Backend, IpcHandle, MemoryKind};

use crate::conformance::child::Task;
use crate::conformance::fixture::{Fixture, expect_pattern, put_pattern};
use testkit::cases;

cases!(Fixture; CASES:
    another_process_opens_memory,
    descriptors_travel_with_a_handle,
    stale_handles_are_refused,
    handles_of_another_backend_are_refused,
    dmabufs_name_the_right_pages,
    wrong_dmabuf_ranges_are_refused,
);

fn another_process_opens_memory(f: &Fixture) {
    for kind in f.device_kinds() {
        for len in [4096, 300_001] {
            let memory = f.gpu.alloc_kind(len, kind).unwrap();
            put_pattern(&memory, 1);
            let handle = memory.export_ipc().unwrap();
            assert_eq!(handle.len(), len);
            // The child checks pattern 1 and writes pattern 2.
            Task::OpenIpc(f.backend, handle.to_bytes()).spawn().expect_success();
            expect_pattern(&memory, 2);
            // Again, with a second handle to the same memory.
            put_pattern(&memory, 1);
            let again = memory.export_ipc().unwrap();
            Task::OpenIpc(f.backend, again.to_bytes()).spawn().expect_success();
            expect_pattern(&memory, 2);
        }
    }
}

pub fn open_ipc(f: &Fixture, bytes: &[u8]) {
    let handle = IpcHandle::from_bytes(bytes).unwrap();
    check_opened(f, f.gpu.open_ipc(&handle).unwrap());
}

fn check_opened(f: &Fixture, memory: Allocation) {
    assert_eq!(memory.kind(), MemoryKind::Imported);
    expect_pattern(&memory, 1);
    put_pattern(&memory, 2);
    let stream = f.gpu.stream().unwrap();
    let copy = f.gpu.alloc(memory.len()).unwrap();
    stream.copy(&copy.whole().unwrap(), &memory.whole().unwrap()).unwrap();
    stream.synchronize(crate::conformance::fixture::test_timeout()).unwrap();
    expect_pattern(&copy, 2);
    check_window(&memory);
    memory.free().unwrap();
    assert_eq!(memory.whole().unwrap_err().kind(), &Kind::Freed);
}

/// The CPU sees the memory through a window, where it can have one: CUDA's pools cannot.
fn check_window(memory: &Allocation) {
    let Ok(window) = memory.window() else { return };
    let len = memory.len() as usize;
    let (mut through_window, mut copied) = (vec![0; len], vec![0; len]);
    window.read(0, &mut through_window).unwrap();
    memory.read(0, &mut copied).unwrap();
    assert!(through_window == copied, "the window shows other memory");
    let flipped: Vec<u8> = copied.iter().map(|byte| !byte).collect();
    window.write(0, &flipped).unwrap();
    window.flush();
    memory.read(0, &mut through_window).unwrap();
    assert!(through_window == flipped, "the window changes other memory");
    memory.write(0, &copied).unwrap();
}

fn descriptors_travel_with_a_handle(f: &Fixture) {
    for kind in f.device_kinds() {
        let memory = f.gpu.alloc_kind(300_001, kind).unwrap();
        put_pattern(&memory, 1);
        let (handle, fds) = (memory.export_ipc().unwrap(), memory.ipc_descriptors().unwrap());
        let bytes_only = f.backend == Backend::Cuda && kind == MemoryKind::Plain;
        assert_eq!(fds.len(), usize::from(!bytes_only), "{kind}");
        // The child inherits them, as a stand-in for a Unix socket.
        let fds = fds.into_iter().map(|fd| inheritable(&fd)).collect::<Vec<_>>();
        let task = Task::OpenIpcWith(
            f.backend,
            handle.to_bytes(),
            fds.iter().map(std::os::fd::AsRawFd::as_raw_fd).collect(),
        );
        task.spawn().expect_success();
        expect_pattern(&memory, 2);
        // Too few, and too many.
        if !bytes_only {
            for given in [0, 2] {
                let given = (0..given).map(|_| inheritable(&fds[0])).collect();
                let error = f.gpu.open_ipc_with(&handle, given).unwrap_err();
                assert_eq!(error.kind(), &Kind::Malformed, "{error}");
            }
        }
    }
}

/// A duplicate that child processes inherit.
fn inheritable(fd: &OwnedFd) -> OwnedFd {
    rustix::io::dup(fd).unwrap()
}

/// In the child of [`descriptors_travel_with_a_handle`].
pub fn open_ipc_with(f: &Fixture, bytes: &[u8], fds: Vec<OwnedFd>) {
    let handle = IpcHandle::from_bytes(bytes).unwrap();
    check_opened(f, f.gpu.open_ipc_with(&handle, fds).unwrap());
}

fn stale_handles_are_refused(f: &Fixture) {
    for kind in f.device_kinds() {
        let memory = f.gpu.alloc_kind(4096, kind).unwrap();
        let bytes = memory.export_ipc().unwrap().to_bytes();
        drop(memory);
        Task::FailToOpenIpc(f.backend, bytes).spawn().expect_success();
    }
}

pub fn fail_to_open_ipc(f: &Fixture, bytes: &[u8]) {
    let handle = IpcHandle::from_bytes(bytes).unwrap();
    let error = f.gpu.open_ipc(&handle).unwrap_err();
    assert!(error.advice().is_some() || matches!(error.kind(), Kind::Cuda(_)), "{error}");
    println!("refused, as expected: {error}");
}

fn handles_of_another_backend_are_refused(f: &Fixture) {
    let mut bytes = f.gpu.alloc(4096).unwrap().export_ipc().unwrap().to_bytes();
    bytes[5] = if f.backend == Backend::Cuda { 2 } else { 1 };
    let handle = IpcHandle::from_bytes(&bytes).unwrap();
    let error = f.gpu.open_ipc(&handle).unwrap_err();
    assert_eq!(error.kind(), &Kind::InvalidArgument, "{error}");
    // A handle truncated inside the backend's part.
    let good = f.gpu.alloc(4096).unwrap().export_ipc().unwrap().to_bytes();
    let mut cut = good[..good.len() - 1].to_vec();
    cut[6] -= 1;
    let handle = IpcHandle::from_bytes(&cut).unwrap();
    assert_eq!(f.gpu.open_ipc(&handle).unwrap_err().kind(), &Kind::Malformed);
}

fn dmabufs_name_the_right_pages(f: &Fixture) {
    if let Err(error) = f.gpu.capabilities().dmabuf_export.require("export", f.gpu.info()) {
        eprintln!("skipped: {error}");
        return;
    }
    for kind in f.device_kinds() {
        let memory = f.gpu.alloc_kind(1 << 20, kind).unwrap();
        put_pattern(&memory, 3);
        for (offset, len) in [(0, 1 << 20), (4096, 4096), (12_345, 6_789), ((1 << 20) - 1, 1)] {
            let exported = memory.export_dmabuf(offset, len).unwrap();
            assert_eq!(exported.len(), len);
            if f.backend == Backend::Sim {
                // Only the simulator's descriptor can be read, which verifies the offset.
                let (mut found, mut wanted) = ([0; 64], [0; 64]);
                let count = rustix::io::pread(&exported, &mut found, exported.offset()).unwrap();
                let count = count.min(len as usize);
                memory.read(offset, &mut wanted[..count]).unwrap();
                assert_eq!(found[..count], wanted[..count]);
            }
            let size = rustix::fs::seek(exported.as_fd(), rustix::fs::SeekFrom::End(0)).unwrap();
            assert!(
                exported.offset() + len <= size,
                "{kind}: {} + {len} > {size}",
                exported.offset()
            );
        }
    }
    // Small allocations share pages; each has an export of its own range.
    let small: Vec<_> = (0..4).map(|_| f.gpu.alloc(100).unwrap()).collect();
    for memory in &small {
        let exported = memory.export_dmabuf(3, 90).unwrap();
        assert_eq!(exported.len(), 90);
    }
}

fn wrong_dmabuf_ranges_are_refused(f: &Fixture) {
    let memory = f.gpu.alloc(8192).unwrap();
    assert_eq!(memory.export_dmabuf(0, 0).unwrap_err().kind(), &Kind::InvalidArgument);
    assert_eq!(memory.export_dmabuf(0, 8193).unwrap_err().kind(), &Kind::OutOfRange);
    assert_eq!(memory.export_dmabuf(u64::MAX, 2).unwrap_err().kind(), &Kind::OutOfRange);
}
