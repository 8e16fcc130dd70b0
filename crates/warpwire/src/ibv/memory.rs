//! Protection domains and registered memory.

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

/// A protection domain: work of its queue pairs reaches memory of its registrations. Clones are the same one.
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

/// Registered memory. The registration ends when this is dropped.
#[derive(Debug)]
pub struct Mr {
    raw: Raw<sys::Mr>,
    iova: u64,
    len: u64,
    access: Access,
    /// The domain ends after it.
    pd: Arc<PdInner>,
    /// Memory that this registration keeps.
    _memory: Option<HostMemory>,
    /// It stands in for memory that the device cannot reach.
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
    /// A new protection domain.
    pub fn create_pd(&self) -> Result<Pd> {
        let context = self.0.clone();
        let raw = create!(context.library, Attempt::CreatePd, alloc_pd(context.raw.ptr()))?;
        Ok(Pd(Arc::new(PdInner { context, raw })))
    }
}

impl Pd {
    /// The device that it belongs to.
    pub fn context(&self) -> Context {
        Context(self.0.context.clone())
    }

    /// Registers memory of the host; work finds its first byte at `iova`, or at its own address if none is given.
    /// The registration keeps the memory.
    ///
    /// # Errors
    /// If the process may not lock so much memory, or the device does not take these rights; if the library is too old
    /// for an address of one's own or relaxed ordering (rdma-core 28).
    pub fn register(&self, memory: &HostMemory, iova: Option<u64>, access: Access) -> Result<Mr> {
        // SAFETY: the registration keeps the memory, of which nobody has references: it is shared memory.
        let mut mr =
            unsafe { self.register_address(memory.address(), memory.len(), iova, access) }?;
        mr._memory = Some(memory.clone());
        Ok(mr)
    }

    /// Registers `len` bytes at `address`.
    ///
    /// # Safety
    /// Until the registration is dropped the range stays mapped, and whatever the rights let the device write, nobody
    /// has references to.
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
        // The older call refuses flags that devices may ignore, and knows no address but the memory's own.
        let plain =
            iova.is_none_or(|iova| iova == address) && flags & sys::ACCESS_RELAXED_ORDERING == 0;
        let pd = domain.raw.ptr();
        let raw = if plain {
            let register = function!(library, reg_mr)?;
            // SAFETY: a domain that lives, and a range that the caller vouches for.
            unsafe { register(pd, start, size, flags as i32) }
        } else {
            let register = function!(library, reg_mr_iova2)?;
            // SAFETY: the same.
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

    /// Registers a range of a dma-buf: memory of a GPU, say. Work finds its first byte at `iova`, or at the range's
    /// offset if none is given; the two must be equal within a page. The registration keeps the dma-buf.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] where the device's driver cannot: use staged memory then. [`Kind::Unavailable`] where the
    /// library is older than rdma-core 34.
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
        // SAFETY: a domain that lives, and a descriptor that the kernel checks and keeps what it names.
        let raw = unsafe { register(domain.raw.ptr(), offset, size, iova, fd.as_raw_fd(), flags) };
        let raw = created(raw, attempt)?;
        Ok(Mr { raw, iova, len, access, pd: self.0.clone(), _memory: None, is_staged: false })
    }

    /// Registers memory of a GPU that the device cannot reach: through pinned memory, which is as long. What is sent is
    /// copied as it is posted, what arrives before its completion is taken. Registration and copies keep the memory.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] if peers should have rights: nobody would copy what they write and read by themselves.
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
        // SAFETY: pinned memory that is shared with a device anyhow; the table keeps it until the registration has ended.
        let mut mr = unsafe { self.register_address(address, len, iova, access) }?;
        self.0.context.staging_table.add(mr.lkey(), stage);
        mr.is_staged = true;
        Ok(mr)
    }

    /// Makes ready to send datagrams along that route.
    pub fn create_address_handle(
        &self,
        route: &address::AhAttributes,
    ) -> Result<address::AddressHandle> {
        address::AddressHandle::create(self, route)
    }
}

/// The flags that the library has for these rights.
pub(super) fn access_flags(access: Access) -> u32 {
    const FLAGS: [(Access, u32); 7] = [
        (Access::LOCAL_WRITE, sys::ACCESS_LOCAL_WRITE),
        (Access::REMOTE_READ, sys::ACCESS_REMOTE_READ),
        (Access::REMOTE_WRITE, sys::ACCESS_REMOTE_WRITE),
        (Access::REMOTE_ATOMIC, sys::ACCESS_REMOTE_ATOMIC),
        (Access::ZERO_BASED, sys::ACCESS_ZERO_BASED),
        (Access::RELAXED_ORDERING, sys::ACCESS_RELAXED_ORDERING),
        (Access::ON_DEMAND, sys::ACCESS_ON_DEMAND),
    ];
    FLAGS
        .iter()
        .filter(|(right, _)| access.contains(*right))
        .fold(0, |flags, (_, flag)| flags | flag)
}

#[cold]
fn too_long(len: u64) -> Error {
    Error::new(Kind::InvalidArgument, format!("register {len} bytes"))
        .why("no address reaches that far")
}

impl Mr {
    /// The key for work of this side.
    pub fn lkey(&self) -> u32 {
        // SAFETY: the library's object, which lives as long as this; nobody changes its keys.
        unsafe { (*self.raw.ptr()).lkey }
    }

    /// The key for peers.
    pub fn rkey(&self) -> u32 {
        // SAFETY: as for the other key.
        unsafe { (*self.raw.ptr()).rkey }
    }

    /// The address of its first byte, in work and for peers.
    pub fn iova(&self) -> u64 {
        self.iova
    }

    /// How many bytes it has.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether it has none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What may be done with it.
    pub fn access(&self) -> Access {
        self.access
    }

    /// `len` bytes of it, `offset` bytes from its beginning, for a work request. Nothing is checked here: a range
    /// that is not in it fails the work.
    pub fn sge(&self, offset: u64, len: u32) -> Sge {
        Sge { address: self.iova.wrapping_add(offset), len, lkey: self.lkey() }
    }

    /// The place `offset` bytes from its beginning, for a peer.
    pub fn remote(&self, offset: u64) -> Remote {
        Remote { address: self.iova.wrapping_add(offset), rkey: self.rkey() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_become_the_librarys_flags() {
        assert_eq!(access_flags(Access::NONE), 0);
        assert_eq!(access_flags(Access::ALL), 15);
        assert_eq!(access_flags(Access::LOCAL_WRITE | Access::REMOTE_READ), 1 | 4);
        assert_eq!(access_flags(Access::RELAXED_ORDERING), 1 << 20);
        assert_eq!(access_flags(Access::ON_DEMAND | Access::ZERO_BASED), 1 << 6 | 1 << 5);
    }
}
