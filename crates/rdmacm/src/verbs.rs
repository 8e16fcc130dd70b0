//! The calls of libibverbs that are used here. They are resolved when the library is first used, in
//! the `libibverbs.so.1` that the program has loaded: both libraries must have the same devices and
//! objects.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_uint};
use std::sync::OnceLock;

use crate::abi::{
    self, DeviceAttr, Gid, Pointer, PortAttr, PortAttrRoom, Qp, QpAttr, QpInitAttr, QpInitAttrEx,
    SrqInitAttr,
};
use crate::boundary::{Errno, INVALID, Result, UNSUPPORTED};
use crate::log;

const LIBRARY: &str = "libibverbs.so.1";

macro_rules! calls {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        struct Calls {
            $($name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Calls {
            fn load() -> std::result::Result<Self, libloading::Error> {
                // SAFETY: libibverbs' initializers may run at any time.
                let library = unsafe { libloading::Library::new(LIBRARY) }?;
                // It stays loaded: its objects are the program's.
                let library = std::mem::ManuallyDrop::new(library);
                // SAFETY: the declarations are those of infiniband/verbs.h.
                unsafe {
                    Ok(Self { $($name: *library.get(concat!(stringify!($name), "\0").as_bytes())?,)* })
                }
            }
        }
    };
}

calls! {
    ibv_get_device_list: fn(*mut c_int) -> *mut Pointer;
    ibv_free_device_list: fn(*mut Pointer);
    ibv_open_device: fn(Pointer) -> Pointer;
    ibv_query_device: fn(Pointer, *mut DeviceAttr) -> c_int;
    ibv_query_port: fn(Pointer, u8, *mut PortAttr) -> c_int;
    ibv_query_gid: fn(Pointer, u8, c_int, *mut Gid) -> c_int;
    ibv_alloc_pd: fn(Pointer) -> Pointer;
    ibv_create_comp_channel: fn(Pointer) -> Pointer;
    ibv_destroy_comp_channel: fn(Pointer) -> c_int;
    ibv_create_cq: fn(Pointer, c_int, Pointer, Pointer, c_int) -> Pointer;
    ibv_destroy_cq: fn(Pointer) -> c_int;
    ibv_create_qp: fn(Pointer, *mut QpInitAttr) -> Pointer;
    ibv_modify_qp: fn(Pointer, *const QpAttr, c_int) -> c_int;
    ibv_destroy_qp: fn(Pointer) -> c_int;
    ibv_create_srq: fn(Pointer, *mut SrqInitAttr) -> Pointer;
    ibv_destroy_srq: fn(Pointer) -> c_int;
}

/// libibverbs. Its calls take pointers that the program or libibverbs has passed: like any
/// librdmacm, this one trusts that they are valid.
pub(crate) struct Verbs(Calls);

/// The library, loaded if it was not.
///
/// # Errors
/// `ENOSYS` if there is none, or one that lacks calls.
pub(crate) fn verbs() -> Result<&'static Verbs> {
    static VERBS: OnceLock<Option<Verbs>> = OnceLock::new();
    let loaded = VERBS.get_or_init(|| {
        let loaded = Calls::load();
        loaded.inspect_err(|why| log::line(|| format!("{LIBRARY}: {why}"))).ok().map(Verbs)
    });
    loaded.as_ref().ok_or(Errno(libc::ENOSYS))
}

/// The result of a call that returns null with `errno`.
fn made(object: Pointer) -> Result<Pointer> {
    match object.is_null() {
        true => Err(std::io::Error::last_os_error().into()),
        false => Ok(object),
    }
}

/// The result of a call that returns an errno value.
fn done(errno: c_int) -> Result<()> {
    match errno {
        0 => Ok(()),
        -1 => Err(std::io::Error::last_os_error().into()),
        errno => Err(Errno(errno.abs())),
    }
}

/// An open device, kept for the life of the process.
pub(crate) struct OpenDevice {
    context: Pointer,
    pub gid: Gid,
    /// As verbs number it.
    pub mtu: u8,
    pub max_resources: u8,
    pub max_depth: u8,
    pd: OnceLock<Shared>,
}

struct Shared(Pointer);

// SAFETY: libibverbs' objects may be used by any thread.
unsafe impl Send for Shared {}
// SAFETY: as above.
unsafe impl Sync for Shared {}
// SAFETY: as above.
unsafe impl Send for OpenDevice {}
// SAFETY: as above.
unsafe impl Sync for OpenDevice {}

impl OpenDevice {
    pub(crate) fn context(&self) -> Pointer {
        self.context
    }

    /// The protection domain of ids without one of their own.
    pub(crate) fn default_pd(&self) -> Result<Pointer> {
        if self.pd.get().is_none() {
            // SAFETY: an open device.
            let pd = Shared(made(unsafe { (verbs()?.0.ibv_alloc_pd)(self.context) })?);
            // Of two threads one may lose, and its domain stays unused.
            let _ = self.pd.set(pd);
        }
        self.pd.get().map(|pd| pd.0).ok_or(INVALID)
    }
}

impl Verbs {
    /// Opens every device that has a GID.
    pub(crate) fn open_devices(&self) -> Result<Vec<OpenDevice>> {
        let (calls, mut count) = (&self.0, 0);
        let mut opened = Vec::new();
        // SAFETY: the list has this many devices until it is freed; all other pointers are to
        // local variables or to a device that was just opened.
        unsafe {
            let list = (calls.ibv_get_device_list)(&raw mut count);
            if list.is_null() {
                return Err(std::io::Error::last_os_error().into());
            }
            for at in 0..usize::try_from(count).unwrap_or(0) {
                let context = (calls.ibv_open_device)(*list.add(at));
                if context.is_null() {
                    continue;
                }
                let mut gid = [0; 16];
                let mut port: PortAttrRoom = std::mem::zeroed();
                let mut device: DeviceAttr = std::mem::zeroed();
                let is_usable = (calls.ibv_query_gid)(context, 1, 0, &raw mut gid) == 0
                    && (calls.ibv_query_port)(context, 1, &raw mut port.attr) == 0
                    && (calls.ibv_query_device)(context, &raw mut device) == 0;
                let limit = |count: c_int| count.clamp(0, 254) as u8;
                opened.extend(is_usable.then(|| OpenDevice {
                    context,
                    gid,
                    mtu: port.attr.active_mtu.clamp(1, 5) as u8,
                    max_resources: limit(device.max_qp_rd_atom),
                    max_depth: limit(device.max_qp_init_rd_atom),
                    pd: OnceLock::new(),
                }));
            }
            (calls.ibv_free_device_list)(list);
        }
        Ok(opened)
    }

    /// A completion queue with a channel of its own.
    pub(crate) fn create_cq(
        &self,
        context: Pointer,
        cqe: u32,
        cq_context: Pointer,
    ) -> Result<(Pointer, Pointer)> {
        let calls = &self.0;
        // SAFETY: an open device, and objects that were just made.
        unsafe {
            let channel = made((calls.ibv_create_comp_channel)(context))?;
            let cqe = c_int::try_from(cqe.max(1)).unwrap_or(c_int::MAX);
            let cq = made((calls.ibv_create_cq)(context, cqe, cq_context, channel, 0));
            if cq.is_err() {
                (calls.ibv_destroy_comp_channel)(channel);
            }
            Ok((channel, cq?))
        }
    }

    pub(crate) fn destroy_cq(&self, channel: Pointer, cq: Pointer) {
        // SAFETY: objects of `create_cq`, destroyed once. A queue in use stays.
        unsafe {
            if !cq.is_null() {
                (self.0.ibv_destroy_cq)(cq);
            }
            if !channel.is_null() {
                (self.0.ibv_destroy_comp_channel)(channel);
            }
        }
    }

    pub(crate) fn create_qp(&self, pd: Pointer, attr: &mut QpInitAttr) -> Result<Pointer> {
        // SAFETY: the program's domain, and its attributes.
        made(unsafe { (self.0.ibv_create_qp)(pd, attr) })
    }

    /// As `ibv_create_qp_ex` of the header: through the device's table of calls.
    pub(crate) fn create_qp_ex(
        &self,
        context: Pointer,
        attr: &mut QpInitAttrEx,
    ) -> Result<Pointer> {
        use abi::verbs_context::{
            ABI_COMPAT, CREATE_QP_EX_BEFORE, SIZE_WITH_CREATE_QP_EX, SZ_BEFORE,
        };
        type Create = unsafe extern "C" fn(Pointer, *mut QpInitAttrEx) -> Pointer;
        // SAFETY: an open device. All ones in `abi_compat` say that `struct verbs_context` lies
        // before it, `sz` how much of it there is.
        unsafe {
            let compat = *context.byte_add(ABI_COMPAT).cast::<usize>();
            let size = || *context.byte_sub(SZ_BEFORE).cast::<usize>();
            if compat != usize::MAX || size() < SIZE_WITH_CREATE_QP_EX {
                return Err(UNSUPPORTED);
            }
            let create = *context.byte_sub(CREATE_QP_EX_BEFORE).cast::<Option<Create>>();
            made(create.ok_or(UNSUPPORTED)?(context, attr))
        }
    }

    pub(crate) fn modify_qp(&self, qp: Pointer, attr: &QpAttr, mask: u32) -> Result<()> {
        // SAFETY: the queue pair of an id.
        done(unsafe { (self.0.ibv_modify_qp)(qp, attr, mask as c_int) })
    }

    pub(crate) fn destroy_qp(&self, qp: Pointer) -> Result<()> {
        // SAFETY: the queue pair of an id, destroyed once.
        done(unsafe { (self.0.ibv_destroy_qp)(qp) })
    }

    pub(crate) fn create_srq(&self, pd: Pointer, attr: &mut SrqInitAttr) -> Result<Pointer> {
        // SAFETY: the program's domain, and its attributes.
        made(unsafe { (self.0.ibv_create_srq)(pd, attr) })
    }

    pub(crate) fn destroy_srq(&self, srq: Pointer) -> Result<()> {
        // SAFETY: the queue of an id, destroyed once.
        done(unsafe { (self.0.ibv_destroy_srq)(srq) })
    }
}

/// The number of a queue pair.
pub(crate) fn qp_num(qp: Pointer) -> Option<c_uint> {
    // SAFETY: null, or a queue pair, whose beginning is declared so.
    unsafe { qp.cast::<Qp>().as_ref() }.map(|qp| qp.qp_num)
}
