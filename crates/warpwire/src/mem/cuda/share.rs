//! Handles with which another process opens this GPU's memory.
//!
//! CUDA has three kinds: `cuMemAlloc` memory has a handle that consists of bytes only; virtual
//! memory and pools are exported as file descriptors. The exporter sends them beside the bytes, or
//! the importer duplicates them from the exporting process with `pidfd_getfd`.
//!
//! Virtual memory may consist of several allocations that are mapped side by side, as with
//! PyTorch's expandable segments: there is a descriptor for each, and the importer maps them side
//! by side again. Memory that CUDA does not export is described in the same way, by its memory
//! objects (`object_export.rs`).

use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::super::device::Backend;
use super::super::share::IpcHandle;
use super::device::CudaDevice;
use super::driver::{call, get};
use super::memory::{self, CudaMemory, ImportedPieces, Origin};
use super::object_export;
use super::sys::{self, AccessDesc, Opaque64, PoolHandle, pointer};
use crate::error::{Error, Kind, Result};

const PLAIN: u8 = 1;
const VMM: u8 = 2;
const POOL: u8 = 3;
const OBJECTS: u8 = 4;
const UUID_LEN: usize = 40;
/// Bytes of a piece in a handle: its descriptor, and its size.
const PIECE_LEN: usize = 12;
/// As many as fit into the handle, which has a 16-bit length.
const MAX_PIECES: usize = 4096;

/// Contents of a handle's body, after the device UUID.
enum IpcPayload {
    Plain { offset: u64, handle: Opaque64 },
    Vmm { by: ExportedBy, pid: u32, offset: u64, pieces: Vec<Piece> },
    Pool { pid: u32, fd: i32, pointer: Opaque64 },
}

/// What made the descriptors of pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExportedBy {
    Cuda,
    ResourceManager,
}

/// The allocations behind exported memory, side by side.
pub(super) struct Exported {
    by: ExportedBy,
    /// Where the memory begins in the first of them.
    offset: u64,
    /// Their descriptors and sizes.
    pieces: Vec<(OwnedFd, u64)>,
}

/// A virtual memory allocation: a descriptor of the exporting process, and the mapped size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Piece {
    fd: i32,
    size: u64,
}

pub(super) fn export(memory: &CudaMemory) -> Result<IpcHandle> {
    let device = &memory.device;
    let _current = device.make_current()?;
    let pid = std::process::id();
    let body = match memory.origin {
        Origin::Plain => export_plain(memory)?,
        Origin::Borrowed if is_legacy_capable(memory) => export_plain(memory)?,
        Origin::Vmm(_) | Origin::Borrowed => {
            let mut exported = memory.exported.lock();
            let Exported { by, offset, pieces } = match &mut *exported {
                Some(known) => known,
                none => none.insert(export_pieces(memory)?),
            };
            let pieces = pieces.iter().map(|(fd, size)| Piece { fd: fd.as_raw_fd(), size: *size });
            IpcPayload::Vmm { by: *by, pid, offset: *offset, pieces: pieces.collect() }
        }
        Origin::Pool => {
            let mut exported = memory.exported.lock();
            let exported = match &mut *exported {
                Some(known) => known,
                none => none.insert(export_pool(device, memory.len)?),
            };
            let fd = exported.pieces.first().map_or(-1, |(fd, _)| fd.as_raw_fd());
            let pointer =
                get!(device.driver, Opaque64([0; 64]), pool_export_address(memory.address.raw()))?;
            IpcPayload::Pool { pid, fd, pointer }
        }
        Origin::Pinned(_)
        | Origin::Registered { .. }
        | Origin::Imported { .. }
        | Origin::ImportedVmm(_)
        | Origin::ImportedPool(_) => {
            return Err(Error::new(Kind::Unsupported, "")
                .why("it is host memory, or memory of another process")
                .fix("export it where it was allocated"));
        }
    };
    Ok(IpcHandle::new(Backend::Cuda, memory.len, encode(device.uuid(), &body)))
}

/// The descriptors that belong to a handle of this memory, duplicated.
pub(super) fn descriptors(memory: &CudaMemory) -> Result<Vec<OwnedFd>> {
    export(memory)?;
    let exported = memory.exported.lock();
    let pieces = exported.iter().flat_map(|exported| &exported.pieces);
    let copies: std::io::Result<_> = pieces.map(|(fd, _)| fd.try_clone()).collect();
    copies.map_err(|why| Error::os("", &why))
}

fn is_legacy_capable(memory: &CudaMemory) -> bool {
    let (device, address) = (&memory.device, memory.address.raw());
    let capable = memory::pointer_attribute_u32(device, pointer::IS_LEGACY_IPC_CAPABLE, address);
    capable.is_ok_and(|capable| capable != 0)
}

fn export_plain(memory: &CudaMemory) -> Result<IpcPayload> {
    let (device, address) = (&memory.device, memory.address.raw());
    let (mut base, mut size) = (0, 0);
    call!(device.driver, address_range(&mut base, &mut size, address))?;
    let handle = get!(device.driver, Opaque64([0; 64]), ipc_export(address))?;
    Ok(IpcPayload::Plain { offset: address - base, handle })
}

fn export_pool(device: &CudaDevice, len: u64) -> Result<Exported> {
    let pool = device.pool()?;
    let fd = get!(device.driver, -1, pool_export(pool, sys::HANDLE_POSIX_FD, 0))?;
    // SAFETY: the driver has just opened the descriptor for the caller.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    Ok(Exported { by: ExportedBy::Cuda, offset: 0, pieces: vec![(fd, len)] })
}

/// The allocations behind memory, as CUDA exports them, or else the memory objects.
fn export_pieces(memory: &CudaMemory) -> Result<Exported> {
    let exported = export_allocations(memory).or_else(|refused| {
        match object_export::export(&memory.device, memory.address.raw(), memory.len) {
            Ok(objects) => Ok(Exported {
                by: ExportedBy::ResourceManager,
                offset: objects.offset,
                pieces: objects.pieces,
            }),
            Err(error) => {
                let why =
                    format!("{}; by its memory objects: {}", refused.reason(), error.reason());
                Err(refused.why(why))
            }
        }
    })?;
    if exported.pieces.len() > MAX_PIECES {
        return Err(Error::new(Kind::Unsupported, "")
            .why(format!("it consists of more than {MAX_PIECES} allocations"))
            .fix("export a smaller range"));
    }
    Ok(exported)
}

/// The virtual memory allocations behind memory, and where in the first of them it begins.
fn export_allocations(memory: &CudaMemory) -> Result<Exported> {
    let driver = memory.device.driver;
    let start = memory.address.raw();
    let end = start + memory.len;
    let mut pieces = Vec::new();
    let (mut at, mut first) = (start, start);
    while at < end && pieces.len() <= MAX_PIECES {
        let (mut base, mut size) = (0, 0);
        call!(driver, address_range(&mut base, &mut size, at))?;
        if base > at || base + size as u64 <= at {
            return Err(Error::new(Kind::Unsupported, "").why("CUDA names no allocation there"));
        }
        if pieces.is_empty() {
            first = base;
        }
        pieces.push((export_piece(&memory.device, base)?, size as u64));
        at = base + size as u64;
    }
    Ok(Exported { by: ExportedBy::Cuda, offset: start - first, pieces })
}

/// A descriptor of the virtual memory allocation that is mapped at `base`.
pub(super) fn export_piece(device: &CudaDevice, base: u64) -> Result<OwnedFd> {
    let driver = device.driver;
    let handle = get!(driver, 0, vmm_retain(base)).map_err(|error| {
        error
            .why("CUDA does not export it: memory of a pool, or managed memory")
            .fix("allocate it with cuMemAlloc or cuMemCreate")
    })?;
    let exported = get!(driver, -1, vmm_export(handle, sys::HANDLE_POSIX_FD, 0));
    drop(call!(driver, vmm_release(handle)));
    let fd = exported.map_err(|error| {
        error.why("it was allocated without a shareable handle").fix(
            "request CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR in cuMemCreate, or use cuMemAlloc",
        )
    })?;
    // SAFETY: the driver has just opened the descriptor for the caller.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Opens memory of another process: with the descriptors that came with the handle, or with those
/// that it names.
pub(super) fn open(
    device: Arc<CudaDevice>,
    handle: &IpcHandle,
    descriptors: Option<Vec<OwnedFd>>,
) -> Result<CudaMemory> {
    let body = handle.body_for(Backend::Cuda)?;
    let opened = decode(device.uuid(), body).and_then(|body| {
        let _current = device.make_current()?;
        open_body(&device, &body, handle.len(), descriptors)
    });
    let (address, origin) = opened.map_err(device.error_context("open an inter-process handle"))?;
    Ok(CudaMemory::new(device, address, handle.len(), origin))
}

fn open_body(
    device: &CudaDevice,
    body: &IpcPayload,
    len: u64,
    descriptors: Option<Vec<OwnedFd>>,
) -> Result<(u64, Origin)> {
    let driver = device.driver;
    match body {
        IpcPayload::Plain { offset, handle } => {
            let base = get!(driver, 0, ipc_open(*handle, sys::IPC_LAZY_PEER_ACCESS))
                .map_err(explain_open)?;
            let (mut start, mut size) = (0, 0);
            let whole = call!(driver, address_range(&mut start, &mut size, base))
                .is_ok_and(|()| offset.checked_add(len).is_some_and(|end| end <= size as u64));
            if !whole {
                drop(call!(driver, ipc_close(base)));
                return Err(malformed("it describes more than the memory's size"));
            }
            Ok((base + offset, Origin::Imported { base, handle: *handle }))
        }
        IpcPayload::Vmm { pid, offset, pieces, .. } => {
            let total = pieces.iter().try_fold(0, |sum: u64, piece| sum.checked_add(piece.size));
            let total = total.filter(|total| isize::try_from(*total).is_ok()).unwrap_or(0);
            if offset.checked_add(len).is_none_or(|end| end > total) {
                return Err(malformed("it describes more than the memory's size"));
            }
            let numbers: Vec<_> = pieces.iter().map(|piece| piece.fd).collect();
            let fds = take_descriptors(descriptors, *pid, &numbers)?;
            let sizes: Vec<_> = pieces.iter().map(|piece| piece.size as usize).collect();
            let base = memory::import_vmm(device, &fds, &sizes)?;
            let imported = ImportedPieces { base, sizes: sizes.into() };
            Ok((base + offset, Origin::ImportedVmm(imported)))
        }
        IpcPayload::Pool { pid, fd, pointer } => {
            let fds = take_descriptors(descriptors, *pid, &[*fd])?;
            let shareable = fds.first().map_or(-1, AsRawFd::as_raw_fd) as usize as *mut c_void;
            let pool =
                get!(driver, PoolHandle::NULL, pool_import(shareable, sys::HANDLE_POSIX_FD, 0))?;
            let access = AccessDesc::read_write(device.ordinal());
            let mut pointer = *pointer;
            let address = call!(driver, pool_set_access(pool, &access, 1))
                .and_then(|()| get!(driver, 0, pool_import_address(pool, &mut pointer)))
                .inspect_err(|_| drop(call!(driver, pool_destroy(pool))))?;
            Ok((address, Origin::ImportedPool(pool)))
        }
    }
}

/// The descriptors of a handle: those that came with it, or duplicates of the exporter's.
fn take_descriptors(given: Option<Vec<OwnedFd>>, pid: u32, fds: &[i32]) -> Result<Vec<OwnedFd>> {
    match given {
        Some(given) if given.len() == fds.len() => Ok(given),
        Some(given) => Err(malformed(&format!(
            "{} descriptors came with it, and it has {}",
            given.len(),
            fds.len()
        ))),
        None => copy_remote_fds(pid, fds),
    }
}

#[cold]
fn explain_open(error: Error) -> Error {
    match error.kind() {
        Kind::Cuda(sys::INVALID_CONTEXT | sys::INVALID_VALUE) => error.fix(
            "open it in another process than the exporter's, while the exporter keeps the memory",
        ),
        _ => error,
    }
}

fn copy_remote_fds(owner: u32, fds: &[i32]) -> Result<Vec<OwnedFd>> {
    let stale = |why: String| {
        Error::new(Kind::Stale, "")
            .why(why)
            .fix("keep the memory alive in the process that exported it")
    };
    let pid = i32::try_from(owner).ok().and_then(Pid::from_raw);
    let process = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let process = process.ok_or_else(|| stale(format!("process {owner} is gone")))?;
    let copy = |fd: &i32| {
        pidfd_getfd(&process, *fd, PidfdGetfdFlags::empty()).map_err(|error| match error {
            rustix::io::Errno::BADF => stale(format!("process {owner} has closed the descriptor")),
            rustix::io::Errno::PERM => Error::new(Kind::PermissionDenied, "")
                .why(format!("this user may not duplicate descriptors of process {owner}"))
                .fix(
                    "send the descriptors (Allocation::ipc_descriptors) beside the handle, or run \
                     both processes as one user and set kernel.yama.ptrace_scope=0",
                ),
            other => Error::os("", &other.into()),
        })
    };
    fds.iter().map(copy).collect()
}

/// What the body of a handle names.
pub(in crate::mem) fn handle_type(body: &[u8]) -> &'static str {
    match body.get(UUID_LEN) {
        Some(&PLAIN) => "CUDA IPC handle",
        Some(&VMM) => "CUDA VMM descriptors",
        Some(&POOL) => "CUDA pool descriptor",
        Some(&OBJECTS) => "descriptors of GPU memory objects",
        _ => "unknown handle",
    }
}

fn encode(uuid: &str, body: &IpcPayload) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(128);
    let mut name = [0; UUID_LEN];
    let len = uuid.len().min(UUID_LEN);
    name[..len].copy_from_slice(&uuid.as_bytes()[..len]);
    bytes.extend_from_slice(&name);
    match body {
        IpcPayload::Plain { offset, handle } => {
            bytes.push(PLAIN);
            bytes.extend_from_slice(&offset.to_le_bytes());
            bytes.extend_from_slice(&handle.0);
        }
        IpcPayload::Vmm { by, pid, offset, pieces } => {
            bytes.push(match by {
                ExportedBy::Cuda => VMM,
                ExportedBy::ResourceManager => OBJECTS,
            });
            bytes.extend_from_slice(&offset.to_le_bytes());
            bytes.extend_from_slice(&pid.to_le_bytes());
            for piece in pieces {
                bytes.extend_from_slice(&piece.fd.to_le_bytes());
                bytes.extend_from_slice(&piece.size.to_le_bytes());
            }
        }
        IpcPayload::Pool { pid, fd, pointer } => {
            bytes.push(POOL);
            bytes.extend_from_slice(&pid.to_le_bytes());
            bytes.extend_from_slice(&fd.to_le_bytes());
            bytes.extend_from_slice(&pointer.0);
        }
    }
    bytes
}

fn decode(uuid: &str, bytes: &[u8]) -> Result<IpcPayload> {
    let short = || malformed("it is shorter than its kind requires");
    let (name, rest) = bytes.split_at_checked(UUID_LEN).ok_or_else(short)?;
    let name = String::from_utf8_lossy(name);
    let name = name.trim_end_matches('\0');
    if name != uuid {
        return Err(Error::new(Kind::InvalidArgument, "")
            .why(format!("it belongs to {name}, and this is {uuid}"))
            .fix("open it on that device"));
    }
    let (kind, rest) = rest.split_first().ok_or_else(short)?;
    let (head, tail) = rest.split_first_chunk::<8>().ok_or_else(short)?;
    match *kind {
        PLAIN => Ok(IpcPayload::Plain {
            offset: u64::from_le_bytes(*head),
            handle: Opaque64(tail.try_into().map_err(|_| short())?),
        }),
        VMM | OBJECTS => {
            let (pid, tail) = tail.split_first_chunk::<4>().ok_or_else(short)?;
            let (pieces, rest) = tail.as_chunks::<PIECE_LEN>();
            if pieces.is_empty() || !rest.is_empty() {
                return Err(short());
            }
            Ok(IpcPayload::Vmm {
                by: if *kind == VMM { ExportedBy::Cuda } else { ExportedBy::ResourceManager },
                pid: u32::from_le_bytes(*pid),
                offset: u64::from_le_bytes(*head),
                pieces: pieces.iter().map(Piece::decode).collect(),
            })
        }
        POOL => {
            let [pid, fd] = halves(*head);
            let pointer = Opaque64(tail.try_into().map_err(|_| short())?);
            Ok(IpcPayload::Pool { pid, fd: fd as i32, pointer })
        }
        other => Err(malformed(&format!("its kind {other} is unknown"))),
    }
}

impl Piece {
    fn decode(bytes: &[u8; PIECE_LEN]) -> Self {
        let word = |at: usize| bytes.get(at..).and_then(|rest| rest.first_chunk::<4>().copied());
        let [fd, low, high] = [0, 4, 8].map(|at| word(at).map_or(0, u32::from_le_bytes));
        Self { fd: fd as i32, size: u64::from(high) << 32 | u64::from(low) }
    }
}

fn halves(bytes: [u8; 8]) -> [u32; 2] {
    let both = u64::from_le_bytes(bytes);
    [both as u32, (both >> 32) as u32]
}

#[cold]
fn malformed(why: &str) -> Error {
    Error::new(Kind::Malformed, "")
        .why(why.to_string())
        .fix("send the bytes of IpcHandle::to_bytes complete and unchanged")
}

#[cfg(test)]
mod tests {
    use super::*;

    const UUID: &str = "GPU-00112233-4455-6677-8899-aabbccddeeff";

    fn pieces() -> Vec<Piece> {
        vec![Piece { fd: 12, size: 2 << 20 }, Piece { fd: -1, size: u64::MAX }]
    }

    #[test]
    fn payloads_round_trip() {
        assert_eq!(UUID.len(), UUID_LEN);
        for made_by in [ExportedBy::Cuda, ExportedBy::ResourceManager] {
            let sent = IpcPayload::Vmm { by: made_by, pid: 77, offset: 5 << 40, pieces: pieces() };
            let bytes = encode(UUID, &sent);
            let IpcPayload::Vmm { by, pid, offset, pieces: found } = decode(UUID, &bytes).unwrap()
            else {
                panic!("wrong kind")
            };
            assert_eq!((by, pid, offset), (made_by, 77, 5 << 40));
            assert_eq!(found, pieces());
            for cut in 0..bytes.len() {
                // A handle with fewer pieces is one of less memory.
                let pieces = (cut.checked_sub(UUID_LEN + 13)).filter(|rest| *rest > 0);
                let whole = pieces.is_some_and(|rest| rest % PIECE_LEN == 0);
                assert_eq!(decode(UUID, &bytes[..cut]).is_ok(), whole, "cut at {cut}");
            }
        }
        let pool = IpcPayload::Pool { pid: 8, fd: -3, pointer: Opaque64([9; 64]) };
        let IpcPayload::Pool { pid, fd, pointer } = decode(UUID, &encode(UUID, &pool)).unwrap()
        else {
            panic!("wrong kind")
        };
        assert_eq!((pid, fd, pointer.0), (8, -3, [9; 64]));
    }

    #[test]
    fn descriptors_must_be_as_many_as_the_handle_names() {
        let file = || OwnedFd::from(std::fs::File::open("/dev/null").unwrap());
        assert_eq!(take_descriptors(Some(vec![file()]), 0, &[7]).unwrap().len(), 1);
        for (given, fds) in [(vec![], &[7][..]), (vec![file(), file()], &[7])] {
            let error = take_descriptors(Some(given), 0, fds).unwrap_err();
            assert_eq!(error.kind(), &Kind::Malformed, "{error}");
        }
        let error = take_descriptors(None, u32::MAX, &[7]).unwrap_err();
        assert_eq!(error.kind(), &Kind::Stale, "{error}");
    }

    #[test]
    fn damaged_and_misdirected_payloads_are_rejected() {
        let good = encode(UUID, &IpcPayload::Plain { offset: 8, handle: Opaque64([7; 64]) });
        for cut in 0..good.len() {
            assert!(decode(UUID, &good[..cut]).is_err(), "cut at {cut}");
        }
        let Err(other) = decode("GPU-other", &good) else { panic!("accepted") };
        assert!(other.to_string().contains("GPU-other"), "{other}");
        let mut bad = good;
        bad[UUID_LEN] = 9;
        assert!(decode(UUID, &bad).is_err());
    }
}
