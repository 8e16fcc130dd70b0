//! The tables of functions that NCCL looks up. All versions call the same functions of this crate;
//! only the types of some arguments differ.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

use warpwire::host::ElfNote;
use warpwire::verbs::Access;

use crate::abi::{
    Code, Completion, Context, HandleBytes, Logger, MAX_RECVS, Memory, Net, Opaque, Out, PTR_CUDA,
    PTR_HOST, PropertiesV8, PropertiesV9, PropertiesV11, PropertiesV12, V8, V9, V10, V11, V12,
    Version,
};
use crate::comm::{Handle, Request};
use crate::connect;
use crate::devices;
use crate::gdr;
use crate::handle::ConnectHandle;
use crate::listen::Listener;
use crate::log;
use crate::memory::MemoryHandle;
use crate::process;
use crate::recv::Buffer;
use crate::result::{Failure, INVALID_ARGUMENT, Result, call, some};
use crate::send::Message;

/// By this note `warpwire doctor` recognizes the library; `readelf -n` prints it.
#[used]
#[unsafe(link_section = ".note.warpwire")]
static VERSION_NOTE: ElfNote = ElfNote::new(env!("CARGO_PKG_VERSION"));

// SAFETY: functions and a string that never change.
unsafe impl<V: Version> Sync for Net<V> {}

/// What all versions have in common.
macro_rules! net {
    ($properties:expr, $init:expr, $listen:expr, $connect:expr, $isend:expr, $irecv:expr, $rest:expr) => {
        Net {
            name: c"Warpwire".as_ptr(),
            init: $init,
            devices: count_devices,
            get_properties: $properties,
            listen: $listen,
            connect: $connect,
            memory: Memory {
                accept,
                reg_mr: register,
                reg_mr_dma_buf: register_dma_buf,
                dereg_mr: deregister,
            },
            isend: $isend,
            irecv: $irecv,
            completion: Completion {
                iflush: flush,
                test,
                close_send: close_comm,
                close_recv: close_comm,
                close_listen: close_listener,
                get_device_mr: null_mut(),
                irecv_consumed: null_mut(),
            },
            rest: $rest,
        }
    };
}

const CONTEXT: Context = Context { make_v_device: null_mut(), finalize, set_net_attr: null_mut() };

/// Version 8: NCCL 2.19 to 2.23.
#[allow(non_upper_case_globals)] // NCCL's name
#[unsafe(no_mangle)]
pub(crate) static ncclNetPlugin_v8: Net<V8> =
    net!(properties_v8, init_v8, listen_v8, connect_v8, isend_v8, irecv_v8, ());

/// Version 9: NCCL 2.24 and 2.25.
#[allow(non_upper_case_globals)] // NCCL's name
#[unsafe(no_mangle)]
pub(crate) static ncclNetPlugin_v9: Net<V9> =
    net!(properties_v9, init_v8, listen_v8, connect_v8, isend_v9, irecv_v9, null_mut());

/// Version 10: NCCL 2.26 and 2.27.
#[allow(non_upper_case_globals)] // NCCL's name
#[unsafe(no_mangle)]
pub(crate) static ncclNetPlugin_v10: Net<V10> =
    net!(properties_v9, init_v10, listen_v8, connect_v10, isend_v10, irecv_v10, null_mut());

/// Version 11: NCCL 2.28 and 2.29.
#[allow(non_upper_case_globals)] // NCCL's name
#[unsafe(no_mangle)]
pub(crate) static ncclNetPlugin_v11: Net<V11> =
    net!(properties_v11, init_v11, listen_v11, connect_v11, isend_v10, irecv_v10, CONTEXT);

/// Version 12: NCCL 2.30 and later.
#[allow(non_upper_case_globals)] // NCCL's name
#[unsafe(no_mangle)]
pub(crate) static ncclNetPlugin_v12: Net<V12> =
    net!(properties_v12, init_v11, listen_v11, connect_v11, isend_v10, irecv_v10, CONTEXT);

fn init(logger: Option<Logger>) -> Code {
    log::set(logger);
    call("init", || {
        process::watch();
        let (settings, devices) = devices::all()?;
        if settings.gdr {
            gdr::prepare();
        }
        let list: Vec<String> = devices.iter().map(devices::Device::describe).collect();
        log::info(format_args!("version {}: {}", env!("CARGO_PKG_VERSION"), list.join(", ")));
        Ok(())
    })
}

extern "C" fn init_v8(logger: Option<Logger>) -> Code {
    init(logger)
}

extern "C" fn init_v10(logger: Option<Logger>, _profiler: Opaque) -> Code {
    init(logger)
}

pub(crate) extern "C" fn init_v11(
    context: Out<'_, c_void>,
    _communicator: u64,
    _config: Opaque,
    logger: Option<Logger>,
    _profiler: Opaque,
) -> Code {
    /// Contexts of communicators have nothing of their own.
    static SHARED: u8 = 0;
    if let Some(context) = context {
        *context = (&raw const SHARED).cast();
    }
    init(logger)
}

pub(crate) extern "C" fn finalize(_context: Opaque) -> Code {
    // Engines stay: the next communicator uses them.
    call("finalize", || Ok(()))
}

pub(crate) extern "C" fn count_devices(count: Option<&mut c_int>) -> Code {
    call("devices", || {
        *some(count)? = devices::all()?.1.len() as c_int;
        Ok(())
    })
}

extern "C" fn properties_v8(number: c_int, into: Option<&mut PropertiesV8>) -> Code {
    call("getProperties", || {
        *some(into)? = devices::get(number)?.properties_v8();
        Ok(())
    })
}

extern "C" fn properties_v9(number: c_int, into: Option<&mut PropertiesV9<4>>) -> Code {
    call("getProperties", || {
        *some(into)? = devices::get(number)?.properties(number);
        Ok(())
    })
}

pub(crate) extern "C" fn properties_v11(number: c_int, into: Option<&mut PropertiesV11>) -> Code {
    call("getProperties", || {
        let v9 = devices::get(number)?.properties(number);
        *some(into)? = PropertiesV11 { v9, max_multi_request_size: 1 };
        Ok(())
    })
}

pub(crate) extern "C" fn properties_v12(number: c_int, into: Option<&mut PropertiesV12>) -> Code {
    call("getProperties", || {
        let v9 = devices::get(number)?.properties(number);
        *some(into)? = PropertiesV12 { v9, max_multi_request_size: 1, rail: -1, plane: -1 };
        Ok(())
    })
}

extern "C" fn listen_v8(
    number: c_int,
    handle: Option<&mut HandleBytes>,
    listener: Out<'_, Listener>,
) -> Code {
    call("listen", || {
        let (handle, into) = (some(handle)?, some(listener)?);
        let (listener, connect_handle) = Listener::new(devices::get(number)?)?;
        *handle = connect_handle.bytes();
        *into = Box::into_raw(Box::new(listener));
        Ok(())
    })
}

pub(crate) extern "C" fn listen_v11(
    _context: Opaque,
    number: c_int,
    handle: Option<&mut HandleBytes>,
    listener: Out<'_, Listener>,
) -> Code {
    listen_v8(number, handle, listener)
}

extern "C" fn connect_v8(
    number: c_int,
    handle: Option<&HandleBytes>,
    comm: Out<'_, Handle>,
    _device_comm: Opaque,
) -> Code {
    call("connect", || {
        let into = some(comm)?;
        *into = null();
        let handle = ConnectHandle::parse(some(handle)?)?;
        *into = connect::connect(number, handle)?.map_or(null(), |comm| Box::into_raw(comm));
        Ok(())
    })
}

extern "C" fn connect_v10(
    number: c_int,
    _config: Opaque,
    handle: Option<&HandleBytes>,
    comm: Out<'_, Handle>,
    device_comm: Opaque,
) -> Code {
    connect_v8(number, handle, comm, device_comm)
}

extern "C" fn connect_v11(
    _context: Opaque,
    number: c_int,
    handle: Option<&HandleBytes>,
    comm: Out<'_, Handle>,
    device_comm: Opaque,
) -> Code {
    connect_v8(number, handle, comm, device_comm)
}

extern "C" fn accept(listener: Option<&Listener>, comm: Out<'_, Handle>, _device: Opaque) -> Code {
    call("accept", || {
        let into = some(comm)?;
        *into = null();
        *into = some(listener)?.accept()?.map_or(null(), |comm| Box::into_raw(comm));
        Ok(())
    })
}

extern "C" fn register(
    comm: Option<&Handle>,
    base: *mut u8,
    len: usize,
    kind: c_int,
    memory: Out<'_, MemoryHandle>,
) -> Code {
    call("regMr", || {
        let (comm, into) = (some(comm)?, some(memory)?);
        *into = null();
        let remote = if comm.is_recv() { Access::REMOTE_WRITE } else { Access::NONE };
        let (lanes, access) = (comm.lanes(), Access::LOCAL_WRITE | remote);
        let made = match (kind, devices::all()?.0.gdr) {
            // SAFETY: NCCL keeps the memory mapped until it deregisters it.
            (PTR_HOST, _) => unsafe { MemoryHandle::register(lanes, base, len, access) }?,
            // SAFETY: NCCL keeps the memory allocated until it deregisters it.
            (PTR_CUDA, true) => unsafe { MemoryHandle::register_device(lanes, base, len, access) }?,
            (_, gdr) => return Err(gdr::wrong_type(kind, gdr)),
        };
        *into = Box::into_raw(Box::new(made));
        Ok(())
    })
}

extern "C" fn register_dma_buf(
    comm: Option<&Handle>,
    base: *mut u8,
    len: usize,
    kind: c_int,
    _offset: u64,
    _fd: c_int,
    memory: Out<'_, MemoryHandle>,
) -> Code {
    // The memory is this process's own, so its address does as well.
    register(comm, base, len, kind, memory)
}

extern "C" fn deregister(_comm: Opaque, memory: Option<Box<MemoryHandle>>) -> Code {
    // The communicator may be closed already. NCCL deregisters what was never registered as well.
    call("deregMr", || memory.map_or(Ok(()), |memory| memory.deregister()))
}

#[inline]
fn isend(comm: Option<&Handle>, message: Result<Message<'_>>, request: Out<'_, Request>) -> Code {
    call("isend", || {
        let (comm, into) = (some(comm)?, some(request)?);
        *into = null();
        *into = comm.request(comm.send()?.isend(&message?)?);
        Ok(())
    })
}

extern "C" fn isend_v8(
    comm: Option<&Handle>,
    data: *mut u8,
    size: c_int,
    tag: c_int,
    memory: Option<&MemoryHandle>,
    request: Out<'_, Request>,
) -> Code {
    let message =
        length(size).map(|size| Message { address: data.addr() as u64, size, tag, memory });
    isend(comm, message, request)
}

extern "C" fn isend_v9(
    comm: Option<&Handle>,
    data: *mut u8,
    size: usize,
    tag: c_int,
    memory: Option<&MemoryHandle>,
    request: Out<'_, Request>,
) -> Code {
    let message = Message { address: data.addr() as u64, size: size as u64, tag, memory };
    isend(comm, Ok(message), request)
}

extern "C" fn isend_v10(
    comm: Option<&Handle>,
    data: *mut u8,
    size: usize,
    tag: c_int,
    memory: Option<&MemoryHandle>,
    _profile: Opaque,
    request: Out<'_, Request>,
) -> Code {
    isend_v9(comm, data, size, tag, memory, request)
}

/// A size that C passes as an `int`.
fn length(size: c_int) -> Result<u64> {
    let negative = |_| Failure::new(INVALID_ARGUMENT, format!("a size of {size} bytes"));
    u64::try_from(size).map_err(negative)
}

/// The arrays of an irecv.
struct Arrays<'a, Size> {
    data: *const *mut u8,
    sizes: *const Size,
    tags: *const c_int,
    memory: *const Option<&'a MemoryHandle>,
}

#[inline]
fn irecv<Size: Copy>(
    comm: Option<&Handle>,
    count: c_int,
    arrays: &Arrays<'_, Size>,
    len: impl Fn(Size) -> Result<u64>,
    request: Out<'_, Request>,
) -> Code {
    call("irecv", || {
        let (comm, into) = (some(comm)?, some(request)?);
        *into = null();
        let count = usize::try_from(count).unwrap_or(0);
        if !(1..=MAX_RECVS).contains(&count) {
            let text = format!("a group of {count} receives; 1 to {MAX_RECVS} are announced");
            return Err(Failure::new(INVALID_ARGUMENT, text));
        }
        let Arrays { data, sizes, tags, memory } = arrays;
        if data.is_null() || sizes.is_null() || tags.is_null() || memory.is_null() {
            return Err(Failure::new(INVALID_ARGUMENT, "an array is NULL"));
        }
        let mut buffers = [Buffer { address: 0, size: 0, tag: 0, memory: None }; MAX_RECVS];
        for (at, buffer) in buffers[..count].iter_mut().enumerate() {
            // SAFETY: NCCL's arrays have `count` entries each.
            let (data, size, tag, memory) =
                unsafe { (*data.add(at), *sizes.add(at), *tags.add(at), *memory.add(at)) };
            *buffer = Buffer { address: data.addr() as u64, size: len(size)?, tag, memory };
        }
        *into = comm.request(comm.recv()?.irecv(&buffers[..count])?);
        Ok(())
    })
}

extern "C" fn irecv_v8(
    comm: Option<&Handle>,
    count: c_int,
    data: *const *mut u8,
    sizes: *const c_int,
    tags: *const c_int,
    memory: *const Option<&MemoryHandle>,
    request: Out<'_, Request>,
) -> Code {
    irecv(comm, count, &Arrays { data, sizes, tags, memory }, length, request)
}

extern "C" fn irecv_v9(
    comm: Option<&Handle>,
    count: c_int,
    data: *const *mut u8,
    sizes: *const usize,
    tags: *const c_int,
    memory: *const Option<&MemoryHandle>,
    request: Out<'_, Request>,
) -> Code {
    let arrays = Arrays { data, sizes, tags, memory };
    irecv(comm, count, &arrays, |size| Ok(size as u64), request)
}

extern "C" fn irecv_v10(
    comm: Option<&Handle>,
    count: c_int,
    data: *const *mut u8,
    sizes: *const usize,
    tags: *const c_int,
    memory: *const Option<&MemoryHandle>,
    _profile: Opaque,
    request: Out<'_, Request>,
) -> Code {
    irecv_v9(comm, count, data, sizes, tags, memory, request)
}

extern "C" fn flush(
    comm: Option<&Handle>,
    count: c_int,
    _data: *const Opaque,
    _sizes: *const c_int,
    memory: *const Option<&MemoryHandle>,
    request: Out<'_, Request>,
) -> Code {
    call("iflush", || {
        *some(request)? = null();
        some(comm)?.recv()?;
        let count = usize::try_from(count).unwrap_or(0);
        if !(1..=MAX_RECVS).contains(&count) || memory.is_null() {
            let text = format!("a flush of {count} receives, or without their memory");
            return Err(Failure::new(INVALID_ARGUMENT, text));
        }
        for at in 0..count {
            // SAFETY: NCCL's array has `count` entries.
            if let Some(memory) = unsafe { *memory.add(at) } {
                memory.flush();
            }
        }
        // It is done when this returns: NCCL takes no request for that.
        Ok(())
    })
}

extern "C" fn test(request: Option<&Request>, done: Option<&mut c_int>, sizes: *mut c_int) -> Code {
    call("test", || {
        let done = some(done)?;
        *done = 0;
        let Some(finished) = some(request)?.test()? else { return Ok(()) };
        *done = 1;
        if !sizes.is_null() {
            for (at, size) in finished.sizes[..finished.count].iter().enumerate() {
                // SAFETY: NCCL's array has an entry for each receive of the group.
                unsafe { *sizes.add(at) = c_int::try_from(*size).unwrap_or(c_int::MAX) };
            }
        }
        Ok(())
    })
}

extern "C" fn close_comm(comm: Option<Box<Handle>>) -> Code {
    call("close", || {
        drop(comm);
        Ok(())
    })
}

pub(crate) extern "C" fn close_listener(listener: Option<Box<Listener>>) -> Code {
    call("closeListen", || {
        drop(listener);
        Ok(())
    })
}
