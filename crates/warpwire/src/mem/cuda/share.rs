//! Handles with which another process opens this GPU's memory.
//!
//! CUDA has three kinds: `cuMemAlloc` memory has a handle that consists of bytes only; virtual
//! memory and pools are exported as a file descriptor, which the importer duplicates from the
//! exporting process with `pidfd_getfd`.

use std::ffi::c_void;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::sync::Arc;

use rustix::process::{Pid, PidfdFlags, PidfdGetfdFlags, pidfd_getfd, pidfd_open};

use super::super::device::Backend;
use super::super::share::IpcHandle;
use super::device::CudaDevice;
use super::driver::{call, get};
use super::memory::{self, CudaMemory, Origin, VmmAllocation};
use super::sys::{self, AccessDesc, Opaque64, PoolHandle, pointer};
use crate::error::{Error, Kind, Result};

const PLAIN: u8 = 1;
const VMM: u8 = 2;
const POOL: u8 = 3;
const UUID_LEN: usize = 40;

/// Contents of a handle's body, after the device UUID.
enum IpcPayload {
    Plain { offset: u64, handle: Opaque64 },
    Vmm { owner: RemoteFd, size: u64 },
    Pool { owner: RemoteFd, pointer: Opaque64 },
}

/// A file descriptor of another process.
#[derive(Clone, Copy)]
struct RemoteFd {
    pid: u32,
    fd: i32,
}

pub(super) fn export(memory: &CudaMemory) -> Result<IpcHandle> {
    let device = &memory.device;
    let _current = device.make_current()?;
    let body = match memory.origin {
        Origin::Plain | Origin::Borrowed => export_plain(memory)?,
        Origin::Vmm(vmm_allocation) => {
            let export = || {
                get!(device.driver, -1, vmm_export(vmm_allocation.handle, sys::HANDLE_POSIX_FD, 0))
            };
            IpcPayload::Vmm { owner: shared_fd(memory, export)?, size: vmm_allocation.size as u64 }
        }
        Origin::Pool => {
            let pool = device.pool()?;
            let export = || get!(device.driver, -1, pool_export(pool, sys::HANDLE_POSIX_FD, 0));
            let owner = shared_fd(memory, export)?;
            let pointer =
                get!(device.driver, Opaque64([0; 64]), pool_export_address(memory.address.raw()))?;
            IpcPayload::Pool { owner, pointer }
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

fn export_plain(memory: &CudaMemory) -> Result<IpcPayload> {
    let (device, address) = (&memory.device, memory.address.raw());
    let capable = memory::pointer_attribute_u32(device, pointer::IS_LEGACY_IPC_CAPABLE, address);
    if capable.is_ok_and(|capable| capable == 0) {
        return Err(Error::new(Kind::Unsupported, "")
            .why("borrowed memory from a pool or from cuMemCreate has no inter-process handle")
            .fix("export it through its owner"));
    }
    let (mut base, mut size) = (0, 0);
    call!(device.driver, address_range(&mut base, &mut size, address))?;
    let handle = get!(device.driver, Opaque64([0; 64]), ipc_export(address))?;
    Ok(IpcPayload::Plain { offset: address - base, handle })
}

/// The descriptor that other processes duplicate: exported once, kept with the memory.
fn shared_fd(memory: &CudaMemory, export: impl FnOnce() -> Result<i32>) -> Result<RemoteFd> {
    let mut exported = memory.exported.lock();
    let fd = match &*exported {
        Some(fd) => fd.as_raw_fd(),
        None => {
            let fd = export()?;
            // SAFETY: the driver has just opened the descriptor for the caller.
            *exported = Some(unsafe { OwnedFd::from_raw_fd(fd) });
            fd
        }
    };
    Ok(RemoteFd { pid: std::process::id(), fd })
}

pub(super) fn open(device: Arc<CudaDevice>, handle: &IpcHandle) -> Result<CudaMemory> {
    let body = handle.body_for(Backend::Cuda)?;
    let opened = decode(device.uuid(), body).and_then(|body| {
        let _current = device.make_current()?;
        open_body(&device, &body, handle.len())
    });
    let (address, origin) = opened.map_err(device.error_context("open an inter-process handle"))?;
    Ok(CudaMemory::new(device, address, handle.len(), origin))
}

fn open_body(device: &CudaDevice, body: &IpcPayload, len: u64) -> Result<(u64, Origin)> {
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
            Ok((base + offset, Origin::Imported { base }))
        }
        IpcPayload::Vmm { owner, size } => {
            if *size < len || isize::try_from(*size).is_err() {
                return Err(malformed("it describes more than the memory's size"));
            }
            let fd = copy_remote_fd(*owner)?;
            let shareable = fd.as_raw_fd() as usize as *mut c_void;
            let handle = get!(driver, 0, vmm_import(shareable, sys::HANDLE_POSIX_FD))?;
            let vmm_allocation = VmmAllocation { handle, size: *size as usize };
            Ok((memory::map_vmm(device, vmm_allocation)?, Origin::ImportedVmm(vmm_allocation)))
        }
        IpcPayload::Pool { owner, pointer } => {
            let fd = copy_remote_fd(*owner)?;
            let shareable = fd.as_raw_fd() as usize as *mut c_void;
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

#[cold]
fn explain_open(error: Error) -> Error {
    match error.kind() {
        Kind::Cuda(sys::INVALID_CONTEXT | sys::INVALID_VALUE) => error.fix(
            "open it in another process than the exporter's, while the exporter keeps the memory",
        ),
        _ => error,
    }
}

fn copy_remote_fd(owner: RemoteFd) -> Result<OwnedFd> {
    let stale = |why: String| {
        Error::new(Kind::Stale, "")
            .why(why)
            .fix("keep the memory alive in the process that exported it")
    };
    let pid = i32::try_from(owner.pid).ok().and_then(Pid::from_raw);
    let process = pid.and_then(|pid| pidfd_open(pid, PidfdFlags::empty()).ok());
    let process = process.ok_or_else(|| stale(format!("process {} is gone", owner.pid)))?;
    pidfd_getfd(&process, owner.fd, PidfdGetfdFlags::empty()).map_err(|error| match error {
        rustix::io::Errno::BADF => {
            stale(format!("process {} has closed the descriptor", owner.pid))
        }
        rustix::io::Errno::PERM => Error::new(Kind::PermissionDenied, "")
            .why(format!("this user may not duplicate descriptors of process {}", owner.pid))
            .fix(
                "run both processes as one user, and set kernel.yama.ptrace_scope=0 or let the \
                 exporter be a child of the importer",
            ),
        other => Error::os("", &other.into()),
    })
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
        IpcPayload::Vmm { owner, size } => {
            bytes.push(VMM);
            bytes.extend_from_slice(&owner.encode());
            bytes.extend_from_slice(&size.to_le_bytes());
        }
        IpcPayload::Pool { owner, pointer } => {
            bytes.push(POOL);
            bytes.extend_from_slice(&owner.encode());
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
        VMM => Ok(IpcPayload::Vmm {
            owner: RemoteFd::decode(*head),
            size: u64::from_le_bytes(tail.try_into().map_err(|_| short())?),
        }),
        POOL => Ok(IpcPayload::Pool {
            owner: RemoteFd::decode(*head),
            pointer: Opaque64(tail.try_into().map_err(|_| short())?),
        }),
        other => Err(malformed(&format!("its kind {other} is unknown"))),
    }
}

impl RemoteFd {
    fn encode(self) -> [u8; 8] {
        (u64::from(self.pid) | u64::from(self.fd as u32) << 32).to_le_bytes()
    }

    fn decode(bytes: [u8; 8]) -> Self {
        let both = u64::from_le_bytes(bytes);
        Self { pid: both as u32, fd: (both >> 32) as i32 }
    }
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

    #[test]
    fn payloads_round_trip() {
        assert_eq!(UUID.len(), UUID_LEN);
        let owner = RemoteFd { pid: 77, fd: 12 };
        let vmm = encode(UUID, &IpcPayload::Vmm { owner, size: 2 << 20 });
        let IpcPayload::Vmm { owner, size } = decode(UUID, &vmm).unwrap() else {
            panic!("wrong kind")
        };
        assert_eq!((owner.pid, owner.fd, size), (77, 12, 2 << 20));
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
