//! Registration of memory by file descriptor: dma-bufs and memfds.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

use rustix::fs::{FileType, fstat};

use super::Access;
use super::host::HostMemory;
use super::memory::{MemorySource, SourceKind};
use super::registration::{AttachMode, RegisteredBy, SoftMr};
use super::registry::{Provenance, Registry, SoftPd};
use crate::error::{Error, Kind, Result};
use crate::mem::{self, Allocation, DeviceAddr, DmaBuf};
use crate::units;

/// A range of a dma-buf.
#[derive(Clone, Copy, Debug)]
pub struct DmaBufRange<'a> {
    /// The dma-buf or memfd.
    pub fd: BorrowedFd<'a>,
    /// Offset of the range in it, in bytes.
    pub offset: u64,
    /// Length of the range in bytes.
    pub len: u64,
}

impl<'a> From<&'a DmaBuf> for DmaBufRange<'a> {
    fn from(buffer: &'a DmaBuf) -> Self {
        Self { fd: buffer.as_fd(), offset: buffer.offset(), len: buffer.len() }
    }
}

/// The rights that the registration of a dma-buf may grant, as in `ibv_reg_dmabuf_mr`.
const ALLOWED: [Access; 5] = [
    Access::LOCAL_WRITE,
    Access::REMOTE_READ,
    Access::REMOTE_WRITE,
    Access::REMOTE_ATOMIC,
    Access::RELAXED_ORDERING,
];

/// The kernel's `DMA_BUF_MAGIC` ("DMAB"): the file system type of dma-bufs.
const DMA_BUF_MAGIC: rustix::fs::FsWord = 0x444d_4142;

/// The name of the memfd behind simulated device memory in `/proc/self/fd`.
const SIMULATED: &str = "/memfd:warpwire-sim";

impl Registry {
    /// Registers a range of a dma-buf. `iova` is the address of its first byte in work requests, by
    /// default its offset.
    ///
    /// Accepts dma-bufs that this process exported (of simulated and CUDA memory, including memory
    /// that another library allocated), foreign dma-bufs that the CPU may map, and memfds that are
    /// sealed against shrinking. `iova` and offset must be equal modulo the page size; the rights
    /// are those that `ibv_reg_dmabuf_mr` accepts.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] for a dma-buf whose memory cannot be reached through it: one that the
    /// CPU may not map, or simulated memory of another process.
    ///
    /// ```
    /// use warpwire::{mem, mr::{Access, AttachMode, RegisteredBy, Registry}};
    /// let memory = mem::open("sim:0")?.alloc(1 << 20)?;
    /// let buffer = memory.export_dmabuf(8192, 4096)?;
    /// let (registry, rights) = (Registry::new(), Access::LOCAL_WRITE | Access::REMOTE_WRITE);
    /// let pd = registry.pd();
    /// let mode = AttachMode::Dynamic;
    /// let mr = registry.register_dmabuf(&pd, (&buffer).into(), None, rights, mode)?;
    /// assert_eq!((mr.iova(), mr.registered_by()), (8192, &RegisteredBy::DmaBuf(mode)));
    ///
    /// let odd = registry.register_dmabuf(&pd, (&buffer).into(), Some(100), rights, mode);
    /// assert!(odd.unwrap_err().to_string().contains("within a page"));
    /// # Ok::<(), warpwire::Error>(())
    /// ```
    pub fn register_dmabuf(
        &self,
        pd: &SoftPd,
        range: DmaBufRange<'_>,
        iova: Option<u64>,
        access: Access,
        attach: AttachMode,
    ) -> Result<SoftMr> {
        let what = || format!("register {} of a dma-buf", units::bytes(range.len));
        self.attach(pd, range, iova, access, attach).map_err(|error| error.during(what()))
    }

    fn attach(
        &self,
        pd: &SoftPd,
        range: DmaBufRange<'_>,
        iova: Option<u64>,
        access: Access,
        attach: AttachMode,
    ) -> Result<SoftMr> {
        check(range, iova, access)?;
        let iova = Some(iova.unwrap_or(range.offset));
        let mut provenance =
            Provenance { registered_by: RegisteredBy::DmaBuf(attach), ..Provenance::default() };
        let memory = match mem::exported_range(range.fd, range.offset, range.len)? {
            Some((memory, start)) => {
                if attach == AttachMode::Static {
                    provenance.pin = Some(memory.pin()?);
                }
                of_device(&memory, start, range, attach)?
            }
            None => of_file(range)?,
        };
        self.register_source(pd, memory, iova, access, provenance)
    }
}

/// The checks that do not need the descriptor.
fn check(range: DmaBufRange<'_>, iova: Option<u64>, access: Access) -> Result<()> {
    let refused = |kind, why: String| Error::new(kind, "register a dma-buf").why(why);
    access.check()?;
    let allowed = ALLOWED.into_iter().fold(Access::NONE, |all, right| all | right);
    if !allowed.contains(access) {
        let why = format!("{access} is more than the registration of a dma-buf may grant");
        let fix = "leave out zero-based and on-demand; a dynamic attachment is always on demand";
        return Err(refused(Kind::InvalidArgument, why).fix(fix));
    }
    if range.len == 0 || range.offset.checked_add(range.len).is_none() {
        let why = "the range is empty, or passes the last offset".to_owned();
        return Err(refused(Kind::InvalidArgument, why));
    }
    let page = rustix::param::page_size() as u64;
    if let Some(iova) = iova.filter(|iova| iova % page != range.offset % page) {
        let why = format!("iova {iova:#x} and offset {:#x} differ within a page", range.offset);
        let fix = format!("choose an iova that is {:#x} modulo {page:#x}", range.offset % page);
        return Err(refused(Kind::Misaligned, why).fix(fix));
    }
    Ok(())
}

fn beyond(range: DmaBufRange<'_>, size: u64) -> Error {
    Error::new(Kind::OutOfRange, "register a dma-buf").why(format!(
        "it has {size} bytes, but the range is from {} to {}",
        range.offset,
        range.offset + range.len
    ))
}

/// The source for device memory that this process exported.
fn of_device(
    memory: &Allocation,
    start: DeviceAddr,
    range: DmaBufRange<'_>,
    attach: AttachMode,
) -> Result<MemorySource> {
    // A dma-buf consists of whole pages, so it may begin before the allocation and end after it.
    // Those bytes belong to other allocations.
    let at = start.raw().wrapping_add(range.offset);
    let offset = at.wrapping_sub(memory.address().raw());
    if offset.checked_add(range.len).is_none_or(|end| end > memory.len()) {
        let first = memory.address().raw().wrapping_sub(start.raw());
        return Err(beyond(range, first.wrapping_add(memory.len())));
    }
    let mut found = MemorySource::from(memory.region(offset, range.len)?);
    if let SourceKind::Device { device_access, .. } = &mut found.what {
        device_access.on_demand = attach == AttachMode::Dynamic;
    }
    Ok(found)
}

/// The source for a file that is mapped in this process.
fn of_file(range: DmaBufRange<'_>) -> Result<MemorySource> {
    let refused = |kind, why: String| Error::new(kind, "register a dma-buf").why(why);
    let name = std::fs::read_link(format!("/proc/self/fd/{}", range.fd.as_raw_fd()));
    let name = name.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    if name.starts_with(SIMULATED) {
        return Err(refused(
            Kind::Unsupported,
            "it is simulated memory of another process, whose moves are not reported here".into(),
        )
        .fix("open it with an inter-process handle (Device::open_ipc), and register that"));
    }
    let is_memfd = name.starts_with("/memfd:");
    // Decided by the file system, not by the name: any file can have that name, and be truncated.
    let is_dmabuf = || rustix::fs::fstatfs(range.fd).is_ok_and(|fs| fs.f_type == DMA_BUF_MAGIC);
    if !is_memfd && !is_dmabuf() {
        let why = format!("the descriptor is not a dma-buf: it is {}", describe(range.fd, &name));
        return Err(refused(Kind::InvalidArgument, why).fix(
            "pass the descriptor of DmaBuf, of cuMemGetHandleForAddressRange, or of a sealed memfd",
        ));
    }
    let own = range.fd.try_clone_to_owned();
    let own = own.map_err(|error| Error::os("duplicate a descriptor", &error))?;
    let pages = match is_memfd {
        true => HostMemory::open(own)?,
        false => HostMemory::map_dmabuf(own).map_err(|error| {
            let why = "another library or process exported it, and the CPU may not map it";
            let fix = "register the memory by address, or export it with mem::export_address";
            refused(Kind::Unsupported, format!("{why} ({})", error.reason())).fix(fix)
        })?,
    };
    let size = pages.len();
    pages.into_slice(range.offset, range.len).ok_or_else(|| beyond(range, size))
}

fn describe(fd: BorrowedFd<'_>, name: &str) -> String {
    let kind = match fstat(fd).map(|status| FileType::from_raw_mode(status.st_mode)) {
        Ok(FileType::RegularFile) => "a file",
        Ok(FileType::Directory) => "a folder",
        Ok(FileType::Fifo) => "a pipe",
        Ok(FileType::Socket) => "a socket",
        Ok(FileType::CharacterDevice) => "a device",
        Ok(_) => "something else",
        Err(error) => return format!("not readable ({error})"),
    };
    format!("{kind} ({name})")
}
