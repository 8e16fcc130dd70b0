//! Protection domains and memory regions.

use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;

use super::device::{Context, ContextInner};
use super::explain::{Attempt, explain, last_errno};
use super::library::{Raw, create, created, destroy, function};
use super::staging::StagingBuffer;
use super::{address, sys};
use crate::error::{Error, Kind, Result};
use crate::host::System;
use crate::mem::Region;
use crate::mr::{Access, DmaBufRange, HostMemory};
use crate::work::{Remote, Sge};

/// A protection domain (`ibv_pd`): work of its queue pairs can only access its memory regions.
/// Clones refer to the same domain.
#[derive(Clone, Debug)]
pub struct Pd(pub(super) Arc<PdInner>);

#[derive(Debug)]
pub(super) struct PdInner {
    pub(super) context: Arc<ContextInner>,
    pub(super) raw: Raw<sys::Pd>,
}

impl Drop for PdInner {
    fn drop(&mut self) {
        destroy!(self.context.library, dealloc_pd(self.raw.ptr()));
    }
}

/// A memory region (`ibv_mr`). Dropping it deregisters the memory.
#[derive(Debug)]
pub struct Mr {
    raw: Raw<sys::Mr>,
    iova: u64,
    len: u64,
    access: Access,
    /// Keeps the domain alive until the memory is deregistered.
    pd: Arc<PdInner>,
    /// Keeps the memory alive.
    _memory: Option<HostMemory>,
    /// The region is a staging buffer for memory that the device cannot reach.
    is_staged: bool,
}

impl Drop for Mr {
    fn drop(&mut self) {
        let lkey = self.lkey();
        destroy!(self.pd.context.library, dereg_mr(self.raw.ptr()));
        if self.is_staged {
            self.pd.context.staging_table.remove(lkey);
        }
    }
}

impl Context {
    /// Allocates a protection domain (`ibv_alloc_pd`).
    ///
    /// # Errors
    /// If the device has none left.
    pub fn create_pd(&self) -> Result<Pd> {
        let context = self.0.clone();
        let raw = create!(context.library, Attempt::CreatePd, alloc_pd(context.raw.ptr()))?;
        Ok(Pd(Arc::new(PdInner { context, raw })))
    }
}

impl Pd {
    /// The device that the domain belongs to.
    pub fn context(&self) -> Context {
        Context(self.0.context.clone())
    }

    /// Registers host memory; work requests address its first byte as `iova`, by default its own
    /// address. The region keeps the memory alive.
    ///
    /// # Errors
    /// [`Kind::OutOfMemory`] if the locked-memory limit is reached; [`Kind::InvalidArgument`] if
    /// the device does not support the access flags; [`Kind::Unavailable`] if `iova` or relaxed
    /// ordering need a newer library (rdma-core 28).
    pub fn register(&self, memory: &HostMemory, iova: Option<u64>, access: Access) -> Result<Mr> {
        // SAFETY: the region keeps the memory alive; it is shared memory, without references to it.
        let mut mr =
            unsafe { self.register_address(memory.address(), memory.len(), iova, access) }?;
        mr._memory = Some(memory.clone());
        Ok(mr)
    }

    /// Registers `len` bytes at `address`.
    ///
    /// # Errors
    /// As for [`register`](Self::register).
    ///
    /// # Safety
    /// Until the region is dropped, the range stays mapped, and no references exist to bytes that
    /// `access` lets the device write.
    pub unsafe fn register_address(
        &self,
        address: u64,
        len: u64,
        iova: Option<u64>,
        access: Access,
    ) -> Result<Mr> {
        access.check()?;
        let domain = &*self.0;
        let library = domain.context.library;
        let on_demand = access.contains(Access::ON_DEMAND);
        let size = usize::try_from(len).map_err(|_| too_long(len))?;
        let flags = access_flags(access);
        let start = address as *mut std::ffi::c_void;
        // ibv_reg_mr rejects optional flags and always uses the memory's own address.
        let plain =
            iova.is_none_or(|iova| iova == address) && flags & sys::ACCESS_RELAXED_ORDERING == 0;
        let pd = domain.raw.ptr();
        let raw = if plain {
            let register = function!(library, reg_mr)?;
            // SAFETY: the domain is alive; the caller guarantees the range.
            unsafe { register(pd, start, size, flags as i32) }
        } else {
            let register = function!(library, reg_mr_iova2)?;
            // SAFETY: as above.
            unsafe { register(pd, start, size, iova.unwrap_or(address), flags) }
        };
        let raw = NonNull::new(raw).map(Raw).ok_or_else(|| {
            let errno = last_errno();
            let memlock = System::live().memlock();
            let attempt = Attempt::Register { len, on_demand, memlock };
            explain(errno, attempt).into_error(attempt)
        })?;
        let zero_based = access.contains(Access::ZERO_BASED);
        let iova = if zero_based { 0 } else { iova.unwrap_or(address) };
        Ok(Mr { raw, iova, len, access, pd: self.0.clone(), _memory: None, is_staged: false })
    }

    /// Registers a range of a dma-buf, such as GPU memory (`ibv_reg_dmabuf_mr`). Work requests
    /// address its first byte as `iova`, by default the range's offset; the two must be equal
    /// modulo the page size. The kernel keeps the dma-buf alive.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] if the driver cannot: use [`register_staged`](Self::register_staged)
    /// then. [`Kind::Unavailable`] before rdma-core 34.
    pub fn register_dmabuf(
        &self,
        range: DmaBufRange<'_>,
        iova: Option<u64>,
        access: Access,
    ) -> Result<Mr> {
        access.check()?;
        let domain = &*self.0;
        let library = domain.context.library;
        let attempt = Attempt::RegisterDmaBuf(&domain.context.device.name);
        let DmaBufRange { fd, offset, len } = range;
        let size = usize::try_from(len).map_err(|_| too_long(len))?;
        let (iova, flags) = (iova.unwrap_or(offset), access_flags(access) as i32);
        let register = function!(library, reg_dmabuf_mr)?;
        // SAFETY: the domain is alive; the kernel checks the descriptor and keeps the dma-buf.
        let raw = unsafe { register(domain.raw.ptr(), offset, size, iova, fd.as_raw_fd(), flags) };
        let raw = created(raw, attempt)?;
        Ok(Mr { raw, iova, len, access, pd: self.0.clone(), _memory: None, is_staged: false })
    }

    /// Registers GPU memory that the device cannot reach, through pinned memory of the same size.
    /// Data to send is copied when it is posted; received data is copied before its completion is
    /// polled. The region keeps the memory alive.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] if `access` has remote rights: RDMA operations of peers would not
    /// trigger a copy.
    pub fn register_staged(
        &self,
        memory: &Region,
        iova: Option<u64>,
        access: Access,
    ) -> Result<Mr> {
        access.check()?;
        let begins = match access.contains(Access::ZERO_BASED) {
            true => 0,
            false => iova.unwrap_or(memory.address().raw()),
        };
        let stage = StagingBuffer::new(memory, begins, access)?;
        let (address, len) = (stage.address()?, memory.len());
        let iova = Some(begins).filter(|_| !access.contains(Access::ZERO_BASED));
        // SAFETY: pinned memory is shared with a device in any case; the staging table keeps it
        // alive until the region is deregistered.
        let mut mr = unsafe { self.register_address(address, len, iova, access) }?;
        self.0.context.staging_table.add(mr.lkey(), stage);
        mr.is_staged = true;
        Ok(mr)
    }

    /// Creates an address handle (`ibv_create_ah`).
    ///
    /// # Errors
    /// If the address does not resolve, or the GID index is invalid.
    pub fn create_address_handle(
        &self,
        route: &address::AhAttributes,
    ) -> Result<address::AddressHandle> {
        address::AddressHandle::create(self, route)
    }
}

/// The `ibv_access_flags` for these rights.
pub(super) fn access_flags(access: Access) -> u32 {
    const FLAGS: [(Access, u32); 8] = [
        (Access::LOCAL_WRITE, sys::ACCESS_LOCAL_WRITE),
        (Access::REMOTE_READ, sys::ACCESS_REMOTE_READ),
        (Access::REMOTE_WRITE, sys::ACCESS_REMOTE_WRITE),
        (Access::REMOTE_ATOMIC, sys::ACCESS_REMOTE_ATOMIC),
        (Access::ZERO_BASED, sys::ACCESS_ZERO_BASED),
        (Access::RELAXED_ORDERING, sys::ACCESS_RELAXED_ORDERING),
        (Access::ON_DEMAND, sys::ACCESS_ON_DEMAND),
        (Access::MW_BIND, sys::ACCESS_MW_BIND),
    ];
    FLAGS
        .iter()
        .filter(|(right, _)| access.contains(*right))
        .fold(0, |flags, (_, flag)| flags | flag)
}

#[cold]
fn too_long(len: u64) -> Error {
    Error::new(Kind::InvalidArgument, format!("register {len} bytes"))
        .why("the length exceeds the address space")
}

impl Mr {
    /// Local key, for scatter-gather entries.
    pub fn lkey(&self) -> u32 {
        // SAFETY: the library's object lives as long as this, and its keys do not change.
        unsafe { (*self.raw.ptr()).lkey }
    }

    /// Remote key, for RDMA operations of peers.
    pub fn rkey(&self) -> u32 {
        // SAFETY: as for `lkey`.
        unsafe { (*self.raw.ptr()).rkey }
    }

    /// I/O virtual address: the address of the first byte in work requests, local and remote.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// Length in bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Access flags given at registration.
    pub fn access(&self) -> Access {
        self.access
    }

    /// A scatter-gather entry for `len` bytes at `offset`. Not checked here: work that names a
    /// range outside the region fails.
    pub fn sge(&self, offset: u64, len: u32) -> Sge {
        Sge { address: self.iova.wrapping_add(offset), len, lkey: self.lkey() }
    }

    /// The remote address of byte `offset` with its rkey, to be sent to a peer.
    pub fn remote(&self, offset: u64) -> Remote {
        Remote { address: self.iova.wrapping_add(offset), rkey: self.rkey() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn access_rights_convert_to_ibv_flags() {
        assert_eq!(access_flags(Access::NONE), 0);
        assert_eq!(access_flags(Access::ALL), 15);
        assert_eq!(access_flags(Access::LOCAL_WRITE | Access::REMOTE_READ), 1 | 4);
        assert_eq!(access_flags(Access::RELAXED_ORDERING), 1 << 20);
        assert_eq!(access_flags(Access::ON_DEMAND | Access::ZERO_BASED), 1 << 6 | 1 << 5);
    }
}
