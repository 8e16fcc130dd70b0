//! Protection domains, thread domains and memory regions.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::Mutex;
use warpwire::error::Kind;
use warpwire::mem::{self, DeviceAddr};
use warpwire::verbs::{self, Access, AttachMode, DmaBufRange};

use crate::abi::{self, Pointer};
use crate::boundary::{Errno, INVALID, Result, UNSUPPORTED, give, pointer, some, status};
use crate::context::ContextPtr;
use crate::log;

/// `struct ibv_pd`: a protection domain, or a parent domain of one.
#[repr(C)]
pub(crate) struct Pd {
    pub abi: abi::Pd,
    pub verbs: verbs::Pd,
    users: Users,
    /// The device, and the domain that a parent domain stands for.
    _uses: (Used, Option<Used>),
}

/// How many objects use another one: it cannot be destroyed as long as there are any.
#[derive(Default)]
pub(crate) struct Users(std::sync::Arc<AtomicU32>);

/// One use; ends when it is dropped.
pub(crate) struct Used(std::sync::Arc<AtomicU32>);

impl Users {
    pub(crate) fn add(&self) -> Used {
        self.0.fetch_add(1, Ordering::Relaxed);
        Used(self.0.clone())
    }

    /// # Errors
    /// `EBUSY` if there are users.
    pub(crate) fn check_none(&self) -> Result<()> {
        match self.0.load(Ordering::Relaxed) {
            0 => Ok(()),
            _ => Err(Errno(libc::EBUSY)),
        }
    }
}

impl Drop for Used {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Pd {
    pub(crate) fn context(&self) -> ContextPtr {
        ContextPtr(self.abi.context)
    }

    pub(crate) fn add_user(&self) -> Used {
        self.users.add()
    }
}

/// An object that C passes in a structure; null is none.
///
/// # Errors
/// `EINVAL` if it is null.
pub(crate) fn object<'a, A, T>(pointer: *const A) -> Result<&'a T> {
    // SAFETY: pointers in structures of C are null or point to objects of this library, whose
    // beginning is the C structure.
    some(unsafe { pointer.cast::<T>().as_ref() })
}

/// Destroys an object unless `check` refuses.
pub(crate) fn destroy<T>(
    object: Option<Box<T>>,
    check: impl FnOnce(&T) -> Result<()>,
) -> Result<()> {
    let object = some(object)?;
    if let Err(refused) = check(&object) {
        // It stays with the program.
        Box::leak(object);
        return Err(refused);
    }
    drop(object);
    Ok(())
}

fn new_pd(context: ContextPtr, verbs: verbs::Pd, of: Option<Used>) -> Result<*mut Pd> {
    static LAST: AtomicU32 = AtomicU32::new(0);
    let uses = (context.get()?.users.add(), of);
    let abi = abi::Pd { context: context.0, handle: LAST.fetch_add(1, Ordering::Relaxed) };
    Ok(give(Pd { abi, verbs, users: Users::default(), _uses: uses }))
}

pub(crate) fn alloc_pd(context: ContextPtr) -> Result<*mut Pd> {
    let (_, open) = context.of()?;
    new_pd(context, open.verbs.alloc_pd(), None)
}

pub(crate) fn dealloc_pd(pd: Option<Box<Pd>>) -> Result<()> {
    destroy(pd, |pd| pd.users.check_none())
}

pub(crate) extern "C" fn alloc_parent_domain(
    context: ContextPtr,
    attr: Option<&abi::ParentDomainInitAttr>,
) -> *mut Pd {
    pointer(|| {
        let attr = some(attr)?;
        let pd: &Pd = object(attr.pd)?;
        // Allocators of the program, and a pointer for them: nothing is allocated through them.
        if attr.comp_mask & !0b11 != 0 || !std::ptr::eq(pd.abi.context, context.0) {
            return Err(INVALID);
        }
        new_pd(context, pd.verbs.clone(), Some(pd.add_user()))
    })
}

/// A thread domain promises that one thread uses its objects, which are fast then anyway.
pub(crate) extern "C" fn alloc_td(context: ContextPtr, attr: Option<&u32>) -> *mut abi::Td {
    pointer(|| {
        context.get()?;
        if *some(attr)? != 0 {
            return Err(INVALID);
        }
        Ok(give(abi::Td { context: context.0 }))
    })
}

pub(crate) extern "C" fn dealloc_td(td: Option<Box<abi::Td>>) -> c_int {
    status(|| destroy(td, |_| Ok(())))
}

/// `struct ibv_mr`.
#[repr(C)]
pub(crate) struct Mr {
    abi: abi::Mr,
    access: Cell<u32>,
    /// The registration, and its use of the domain.
    verbs: Mutex<(verbs::Mr, Used)>,
}

/// The access flags of a registration.
///
/// # Errors
/// `EINVAL` for flags that are neither known nor optional.
pub(crate) fn access(flags: u32) -> Result<Access> {
    let known = [
        (abi::ACCESS_LOCAL_WRITE, Access::LOCAL_WRITE),
        (abi::ACCESS_REMOTE_WRITE, Access::REMOTE_WRITE),
        (abi::ACCESS_REMOTE_READ, Access::REMOTE_READ),
        (abi::ACCESS_REMOTE_ATOMIC, Access::REMOTE_ATOMIC),
        (abi::ACCESS_ZERO_BASED, Access::ZERO_BASED),
        (abi::ACCESS_ON_DEMAND, Access::ON_DEMAND),
        (abi::ACCESS_RELAXED_ORDERING, Access::RELAXED_ORDERING),
        (abi::ACCESS_MW_BIND, Access::MW_BIND),
        // Hints.
        (abi::ACCESS_HUGETLB | abi::ACCESS_OPTIONAL, Access::NONE),
    ];
    let all = known.iter().fold(0, |all, (bit, _)| all | bit);
    if flags & !all != 0 {
        return Err(INVALID);
    }
    let set = known.iter().filter(|(bit, _)| flags & bit != 0);
    Ok(set.fold(Access::NONE, |set, (_, right)| set | *right))
}

/// Registers memory of this process or of a GPU.
pub(crate) fn reg_mr(
    pd: Option<&Pd>,
    addr: Pointer,
    len: usize,
    iova: Option<u64>,
    flags: u32,
) -> Result<*mut Mr> {
    let pd = some(pd)?;
    if addr.is_null() && len == usize::MAX {
        return Err(UNSUPPORTED); // the whole address space, on demand
    }
    let verbs = register(pd, (addr, len), iova, flags)?;
    Ok(give(Mr::new(pd, (addr, len), flags, verbs)))
}

fn register(
    pd: &Pd,
    (addr, len): (Pointer, usize),
    iova: Option<u64>,
    flags: u32,
) -> Result<verbs::Mr> {
    let (_, open) = pd.context().of()?;
    let access = access(flags)?;
    let iova = iova.filter(|_| !access.contains(Access::ZERO_BASED));
    // SAFETY: as with any libibverbs, the program keeps the memory mapped until it deregisters it,
    // and expects peers to change it.
    let registered = unsafe {
        open.verbs.register_address(&pd.verbs, addr.addr() as u64, len as u64, iova, access)
    };
    Ok(registered?)
}

/// Registers a dma-buf. The probe with a negative descriptor is answered with `EBADF`, which tells
/// programs that dma-bufs are supported.
///
/// CUDA's dma-bufs cannot be mapped by the CPU. Programs that export them (NCCL, UCX) pass the
/// memory's own address as `iova`: where that is device memory of this process, it is registered by
/// this address instead.
pub(crate) fn reg_dmabuf_mr(
    pd: Option<&Pd>,
    (offset, len): (u64, usize),
    iova: u64,
    fd: c_int,
    flags: u32,
) -> Result<*mut Mr> {
    let pd = some(pd)?;
    let (_, open) = pd.context().of()?;
    if fd < 0 {
        return Err(Errno(libc::EBADF));
    }
    // SAFETY: the program's own descriptor, which it keeps open during the call.
    let fd = unsafe { BorrowedFd::borrow_raw(fd) };
    let range = DmaBufRange { fd, offset, len: len as u64 };
    let access = access(flags)?;
    let attach = AttachMode::Dynamic;
    let verbs = match open.verbs.register_dmabuf(&pd.verbs, range, Some(iova), access, attach) {
        Err(error) if *error.kind() == Kind::Unsupported && is_device_memory(iova) => {
            log::line(|| format!("{error}; registered by its address {iova:#x}"));
            let addr = std::ptr::without_provenance(iova as usize);
            register(pd, (addr, len), Some(iova), flags)?
        }
        registered => registered?,
    };
    let addr = std::ptr::without_provenance::<c_void>(offset as usize);
    Ok(give(Mr::new(pd, (addr, len), flags, verbs)))
}

fn is_device_memory(address: u64) -> bool {
    mem::owner_of(DeviceAddr::new(address)).is_ok()
}

impl Mr {
    fn new(pd: &Pd, (addr, len): (Pointer, usize), flags: u32, verbs: verbs::Mr) -> Self {
        Self {
            abi: abi::Mr {
                context: pd.abi.context,
                pd: Cell::new(&raw const pd.abi),
                addr: Cell::new(addr),
                length: Cell::new(len),
                handle: verbs.lkey() >> 8,
                lkey: Cell::new(verbs.lkey()),
                rkey: Cell::new(verbs.rkey()),
            },
            access: Cell::new(flags),
            verbs: Mutex::new((verbs, pd.add_user())),
        }
    }

    pub(crate) fn domain(&self) -> *const abi::Pd {
        self.abi.pd.get()
    }

    pub(crate) fn lkey(&self) -> u32 {
        self.abi.lkey.get()
    }

    /// # Errors
    /// `EBUSY` if memory windows are bound to it.
    fn check_unbound(&self) -> Result<()> {
        match self.verbs.lock().0.bound_windows() {
            0 => Ok(()),
            _ => Err(Errno(libc::EBUSY)),
        }
    }
}

pub(crate) fn dereg_mr(mr: Option<Box<Mr>>) -> Result<()> {
    destroy(mr, Mr::check_unbound)
}

/// Changes a registration: registers anew, then ends the old one, whose keys the new one gets. On
/// failure the old registration stays. The keys change only if a process of this machine was
/// stopped while it accessed the memory.
pub(crate) fn rereg_mr(
    mr: Option<&Mr>,
    flags: u32,
    pd: Option<&Pd>,
    (addr, len): (Pointer, usize),
    access: u32,
) -> Result<()> {
    let mr = some(mr)?;
    let known = abi::REREG_TRANSLATION | abi::REREG_PD | abi::REREG_ACCESS;
    if flags == 0 || flags & !known != 0 {
        return Err(INVALID);
    }
    mr.check_unbound()?;
    let place = match flags & abi::REREG_TRANSLATION {
        0 => (mr.abi.addr.get(), mr.abi.length.get()),
        _ => (addr, len),
    };
    let access = if flags & abi::REREG_ACCESS == 0 { mr.access.get() } else { access };
    let pd = match flags & abi::REREG_PD {
        0 => object(mr.abi.pd.get())?,
        _ => some(pd)?,
    };
    let verbs = register(pd, place, Some(place.0.addr() as u64), access)?;
    mr.abi.pd.set(&raw const pd.abi);
    mr.abi.addr.set(place.0);
    mr.abi.length.set(place.1);
    mr.access.set(access);
    let mut current = mr.verbs.lock();
    let (old, _used) = std::mem::replace(&mut *current, (verbs, pd.add_user()));
    if let Err(error) = current.0.take_key(old) {
        log::line(|| error);
    }
    mr.abi.lkey.set(current.0.lkey());
    mr.abi.rkey.set(current.0.rkey());
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};

    use super::*;
    use crate::{context, devices};

    /// CUDA's dma-bufs are like this: this process has the memory, but not through the descriptor.
    #[test]
    fn a_dma_buf_that_cannot_be_mapped_is_registered_by_its_address() {
        const LEN: usize = 1 << 16;
        let memory = mem::open("sim:0").unwrap().alloc(LEN as u64).unwrap();
        let buffer = memory.export_dmabuf(0, LEN as u64).unwrap();
        let fd = buffer.as_fd().try_clone_to_owned().unwrap();
        drop(buffer);
        let context = ContextPtr(context::open_device(&devices::all().unwrap()[0]).unwrap());
        let pd = alloc_pd(context).unwrap();
        let register = |iova, fd| {
            // SAFETY: a domain that is not destroyed before the last call.
            let pd = unsafe { pd.as_ref() };
            reg_dmabuf_mr(pd, (0, LEN), iova, fd, abi::ACCESS_LOCAL_WRITE)
        };
        let address = memory.address().raw();
        let mr = register(address, fd.as_raw_fd()).unwrap();
        // SAFETY: made above, and destroyed once.
        let mr = unsafe { Box::from_raw(mr) };
        let registered = mr.verbs.lock();
        assert_eq!((registered.0.iova(), registered.0.len()), (address, LEN as u64));
        drop(registered);
        dereg_mr(Some(mr)).unwrap();
        let (other, null) = (4096, std::fs::File::open("/dev/null").unwrap());
        assert_eq!(register(other, fd.as_raw_fd()).err(), Some(UNSUPPORTED), "no device memory");
        assert_eq!(register(address, null.as_raw_fd()).err(), Some(INVALID), "no dma-buf");
        assert_eq!(register(address, -1).err(), Some(Errno(libc::EBADF)));
        // SAFETY: made above, and destroyed once.
        dealloc_pd(Some(unsafe { Box::from_raw(pd) })).unwrap();
        context::close_device(context).unwrap();
    }
}
