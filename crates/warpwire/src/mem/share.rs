//! Handles with which another process or a NIC accesses memory.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

use super::device::Backend;
use super::exports::DmaBufExport;
use crate::error::{Error, Kind, Result};

/// The bus by which a dma-buf's importer accesses device memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DmaBufRoute {
    /// The driver's choice.
    #[default]
    Default,
    /// PCIe, on platforms whose CPUs also have a direct link to the GPU.
    Pcie,
}

/// A dma-buf: a file descriptor that refers to device memory, for other drivers to import.
#[derive(Debug)]
pub struct DmaBuf {
    fd: OwnedFd,
    offset: u64,
    len: u64,
    /// Entry in the export table, for importers in this process.
    export: Option<Arc<DmaBufExport>>,
}

impl DmaBuf {
    /// A dma-buf whose exported range is `offset..offset + len` of `fd`.
    pub fn new(fd: OwnedFd, offset: u64, len: u64) -> Self {
        Self { fd, offset, len, export: None }
    }

    pub(super) fn attach_export(&mut self, export: Arc<DmaBufExport>) {
        self.export = Some(export);
    }

    /// Offset of the exported range in the descriptor.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Length of the exported range in bytes.
    #[allow(clippy::len_without_is_empty)] // an empty range is not exported
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Maps one exported page for the CPU and unmaps it, as a probe. Most drivers do not support
    /// this.
    #[allow(unsafe_code)]
    pub fn try_map(&self) -> Result<()> {
        use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
        let page = rustix::param::page_size();
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice disturbs nothing, and it is
        // not accessed before it is unmapped.
        unsafe {
            mmap(std::ptr::null_mut(), page, protection, MapFlags::SHARED, &self.fd, 0)
                .and_then(|base| munmap(base, page))
        }
        .map_err(|error| Error::os("map a dma-buf", &error.into()))
    }

    /// Returns the descriptor, to hand over. Importers in this process can still find the memory by
    /// it.
    pub fn into_fd(self) -> OwnedFd {
        if let Some(export) = self.export {
            export.keep_alive();
        }
        self.fd
    }
}

impl AsFd for DmaBuf {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

const MAGIC: &[u8; 4] = b"WWIH";
const VERSION: u8 = 1;
const HEADER_LEN: usize = 16;
/// Virtual memory that consists of many allocations needs the most.
const MAX_BODY_LEN: usize = 60_000;

/// A handle with which another process opens device memory: bytes to send over any channel.
///
/// It is neither a secret nor a permission: the opener also needs the operating system's
/// permission.
///
/// ```
/// use warpwire::mem::{IpcHandle, sim::{Sim, SimConfig}};
/// let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
/// let memory = gpu.alloc(4096).unwrap();
/// memory.write(0, b"shared").unwrap();
/// let sent: Vec<u8> = memory.export_ipc().unwrap().to_bytes();
///
/// let received = IpcHandle::from_bytes(&sent).unwrap();
/// let opened = gpu.open_ipc(&received).unwrap();
/// let mut back = [0; 6];
/// opened.read(0, &mut back).unwrap();
/// assert_eq!(&back, b"shared");
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpcHandle {
    backend: Backend,
    len: u64,
    body: Vec<u8>,
}

impl IpcHandle {
    /// A handle of `backend` to `len` bytes; `body` is private to that backend.
    pub(super) fn new(backend: Backend, len: u64, body: Vec<u8>) -> Self {
        debug_assert!(body.len() <= MAX_BODY_LEN);
        Self { backend, len, body }
    }

    /// Size of the memory in bytes.
    #[allow(clippy::len_without_is_empty)] // it names memory, which is never empty
    pub fn len(&self) -> u64 {
        self.len
    }

    /// What other processes open, for people: `CUDA VMM descriptors`, `memfd`.
    pub fn handle_type(&self) -> &'static str {
        match self.backend {
            Backend::Cuda => super::cuda::handle_type(&self.body),
            Backend::Sim => "memfd",
        }
    }

    /// The backend-specific part. Fails if the handle belongs to another backend.
    pub(super) fn body_for(&self, backend: Backend) -> Result<&[u8]> {
        if self.backend == backend {
            return Ok(&self.body);
        }
        let why = format!("it names memory of a {} device", self.backend);
        Err(Error::new(Kind::InvalidArgument, "open an inter-process handle")
            .on(format!("a {backend} device"))
            .why(why)
            .fix("open it on a device of the same backend"))
    }

    /// Serializes the handle.
    pub fn to_bytes(&self) -> Vec<u8> {
        let backend = match self.backend {
            Backend::Cuda => 1,
            Backend::Sim => 2,
        };
        let mut bytes = Vec::with_capacity(HEADER_LEN + self.body.len());
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&[VERSION, backend]);
        bytes.extend_from_slice(&(self.body.len() as u16).to_le_bytes());
        bytes.extend_from_slice(&self.len.to_le_bytes());
        bytes.extend_from_slice(&self.body);
        bytes
    }

    /// Parses a handle received from another process. Fails with `Malformed`.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let malformed = |why: &str| {
            Error::new(Kind::Malformed, "read an inter-process handle")
                .why(why.to_string())
                .fix("send the bytes of IpcHandle::to_bytes unchanged, between equal versions")
        };
        let (header, body) = bytes
            .split_at_checked(HEADER_LEN)
            .ok_or_else(|| malformed("it is shorter than the header"))?;
        let backend = match (&header[..4], header[4], header[5]) {
            (magic, VERSION, 1) if magic == MAGIC => Backend::Cuda,
            (magic, VERSION, 2) if magic == MAGIC => Backend::Sim,
            _ => {
                return Err(malformed("magic, version or backend is wrong"));
            }
        };
        let declared_len = usize::from(u16::from_le_bytes([header[6], header[7]]));
        if declared_len != body.len() || declared_len > MAX_BODY_LEN {
            return Err(malformed("its length field is wrong"));
        }
        let mut len = [0; 8];
        len.copy_from_slice(&header[8..16]);
        let len = u64::from_le_bytes(len);
        if len == 0 || isize::try_from(len).is_err() {
            return Err(malformed("its memory size is impossible"));
        }
        Ok(Self { backend, len, body: body.to_vec() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn handles_round_trip() {
        for backend in [Backend::Cuda, Backend::Sim] {
            let handle = IpcHandle::new(backend, 4096, vec![1, 2, 3]);
            assert_eq!(IpcHandle::from_bytes(&handle.to_bytes()).unwrap(), handle);
        }
    }

    #[test]
    fn damaged_handles_are_refused() {
        let good = IpcHandle::new(Backend::Sim, 4096, vec![1, 2, 3]).to_bytes();
        for cut in 0..good.len() {
            let error = IpcHandle::from_bytes(&good[..cut]).unwrap_err();
            assert_eq!(error.kind(), &Kind::Malformed, "cut at {cut}");
        }
        for (at, value) in [(0, b'X'), (4, 9), (5, 3), (6, 4), (15, 0x80)] {
            let mut bad = good.clone();
            bad[at] = value;
            assert!(IpcHandle::from_bytes(&bad).is_err(), "byte {at}");
        }
        let other = IpcHandle::new(Backend::Sim, 1, vec![]);
        assert!(other.body_for(Backend::Cuda).is_err());
    }
}
