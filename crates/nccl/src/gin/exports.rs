//! The tables of functions for device-initiated networking that NCCL looks up.
#![allow(unsafe_code)]
#![allow(clippy::too_many_arguments)] // NCCL's signatures

use std::ffi::{c_int, c_void};
use std::ptr::{null, null_mut};

use super::abi::{GIN_PROXY, GinV11, Id, RmaConfigV14, RmaV14};
use super::coll::{Buffer, Coll, Handle};
use super::context::RmaContext;
use super::put::{Direction, Range, Signal, Transfer};
use crate::abi::{
    Code, HandleBytes, Logger, Opaque, Out, PTR_CUDA, PTR_HOST, PropertiesV11, PropertiesV12,
};
use crate::exports::{
    close_listener, count_devices, finalize, init_v11, listen_v11, properties_v11, properties_v12,
};
use crate::handle::ConnectHandle;
use crate::listen::Listener;
use crate::result::{Failure, INVALID_ARGUMENT, Result, SUCCESS, call, some};

// SAFETY: functions and a string that never change.
unsafe impl Sync for GinV11 {}
// SAFETY: as above.
unsafe impl Sync for RmaV14 {}

/// GIN version 11: NCCL 2.28.7 to 2.29.
#[allow(non_upper_case_globals)] // NCCL's name
#[unsafe(no_mangle)]
pub(crate) static ncclGinPlugin_v11: GinV11 = GinV11 {
    name: c"Warpwire".as_ptr(),
    init,
    devices: count_devices,
    get_properties: gin_properties,
    listen: listen_v11,
    connect,
    create_context: null_mut(),
    reg_mr_sym: register_v11,
    reg_mr_sym_dma_buf: register_dma_buf_v11,
    dereg_mr_sym: deregister,
    destroy_context: null_mut(),
    close_coll,
    close_listen: close_listener,
    iput: iput_v11,
    iput_signal: iput_signal_v11,
    test,
    gin_progress: progress_v11,
    query_last_error: query_last_error_v11,
    finalize,
};

/// RMA version 14: NCCL 2.30 to 2.32, which builds GIN of type proxy on it.
#[allow(non_upper_case_globals)] // NCCL's name
#[unsafe(no_mangle)]
pub(crate) static ncclRmaPlugin_v14: RmaV14 = RmaV14 {
    name: c"Warpwire".as_ptr(),
    init,
    devices: count_devices,
    get_properties: rma_properties,
    listen: listen_v11,
    connect,
    create_context,
    reg_mr_sym: register_v14,
    reg_mr_sym_dma_buf: register_dma_buf_v14,
    dereg_mr_sym: deregister,
    destroy_context,
    close_coll,
    close_listen: close_listener,
    iput: iput_v14,
    iput_signal: iput_signal_v14,
    iget,
    iflush,
    test,
    rma_progress,
    query_last_error: query_last_error_v14,
    finalize,
};

extern "C" fn init(context: Out<'_, c_void>, communicator: u64, logger: Option<Logger>) -> Code {
    init_v11(context, communicator, null_mut(), logger, null_mut())
}

extern "C" fn gin_properties(number: c_int, mut into: Option<&mut PropertiesV11>) -> Code {
    let code = properties_v11(number, into.as_deref_mut());
    if code == SUCCESS
        && let Some(properties) = into
    {
        properties.v9.ptr_support = PTR_HOST | PTR_CUDA;
        properties.v9.net_device_type = GIN_PROXY;
    }
    code
}

extern "C" fn rma_properties(number: c_int, mut into: Option<&mut PropertiesV12>) -> Code {
    let code = properties_v12(number, into.as_deref_mut());
    if code == SUCCESS
        && let Some(properties) = into
    {
        properties.v9.ptr_support = PTR_HOST | PTR_CUDA;
        properties.v9.net_device_type = GIN_PROXY;
    }
    code
}

extern "C" fn connect(
    _context: Opaque,
    handles: *const *const HandleBytes,
    ranks: c_int,
    rank: c_int,
    listener: Option<&Listener>,
    coll: Out<'_, Handle>,
) -> Code {
    call("GIN connect", || {
        let (listener, into) = (some(listener)?, some(coll)?);
        *into = null();
        let wrong = || {
            let text = format!("rank {rank} of {ranks} ranks");
            Failure::new(INVALID_ARGUMENT, text)
        };
        let count = usize::try_from(ranks).ok().filter(|count| *count > 0).ok_or_else(wrong)?;
        let rank = u32::try_from(rank).ok().filter(|rank| (*rank as usize) < count);
        let rank = rank.ok_or_else(wrong)?;
        if handles.is_null() {
            return Err(Failure::new(INVALID_ARGUMENT, "the array of handles is NULL"));
        }
        let handles = (0..count).map(|at| {
            // SAFETY: NCCL's array has a pointer to a handle for each rank.
            let handle = unsafe { (*handles.add(at)).as_ref() };
            ConnectHandle::parse(some(handle)?)
        });
        let handles = handles.collect::<Result<Vec<ConnectHandle>>>()?;
        *into = Box::into_raw(Box::new(Handle::connect(listener, &handles, rank)?));
        Ok(())
    })
}

extern "C" fn create_context(
    coll: Option<&Handle>,
    config: Option<&RmaConfigV14>,
    context: Out<'_, RmaContext>,
) -> Code {
    call("RMA createContext", || {
        let into = some(context)?;
        *into = null();
        let made = RmaContext::new(some(coll)?, some(config)?.contexts)?;
        *into = Box::into_raw(Box::new(made));
        Ok(())
    })
}

extern "C" fn destroy_context(context: Option<Box<RmaContext>>) -> Code {
    call("RMA destroyContext", || {
        drop(context);
        Ok(())
    })
}

fn register(coll: Option<&Handle>, buffer: &Buffer, memory: Option<&mut Id>) -> Result<Id> {
    let (coll, into) = (some(coll)?, some(memory)?);
    *into = null();
    // SAFETY: NCCL keeps the memory allocated until it deregisters it.
    *into = unsafe { coll.0.register(buffer) }?;
    Ok(*into)
}

extern "C" fn register_v11(
    coll: Option<&Handle>,
    base: *mut u8,
    len: usize,
    kind: c_int,
    _flags: u64,
    memory: Option<&mut Id>,
    gin_memory: Option<&mut Id>,
) -> Code {
    // All memory is strongly ordered, so no flag asks for more.
    call("GIN regMrSym", || {
        let gin_memory = some(gin_memory)?;
        *gin_memory = null();
        *gin_memory = register(coll, &Buffer { base, len, kind }, memory)?;
        Ok(())
    })
}

extern "C" fn register_dma_buf_v11(
    coll: Option<&Handle>,
    base: *mut u8,
    len: usize,
    kind: c_int,
    _offset: u64,
    _fd: c_int,
    flags: u64,
    memory: Option<&mut Id>,
    gin_memory: Option<&mut Id>,
) -> Code {
    // The memory is this process's own, so its address does as well.
    register_v11(coll, base, len, kind, flags, memory, gin_memory)
}

extern "C" fn register_v14(
    coll: Option<&Handle>,
    base: *mut u8,
    len: usize,
    kind: c_int,
    _flags: u64,
    memory: Option<&mut Id>,
) -> Code {
    call("RMA regMrSym", || register(coll, &Buffer { base, len, kind }, memory).map(|_| ()))
}

extern "C" fn register_dma_buf_v14(
    coll: Option<&Handle>,
    base: *mut u8,
    len: usize,
    kind: c_int,
    _offset: u64,
    _fd: c_int,
    flags: u64,
    memory: Option<&mut Id>,
) -> Code {
    register_v14(coll, base, len, kind, flags, memory)
}

extern "C" fn deregister(coll: Option<&Handle>, memory: Id) -> Code {
    call("deregMrSym", || match memory.is_null() {
        true => Ok(()),
        false => some(coll)?.0.deregister(memory),
    })
}

extern "C" fn close_coll(coll: Option<Box<Handle>>) -> Code {
    call("closeColl", || {
        drop(coll);
        Ok(())
    })
}

/// Posts an operation; its number goes to NCCL.
#[inline]
fn post(
    name: &'static str,
    coll: Result<&Coll>,
    transfer: &Transfer,
    request: Option<&mut Id>,
) -> Code {
    call(name, || {
        let into = some(request)?;
        *into = null();
        *into = coll?.post(transfer)?;
        Ok(())
    })
}

#[inline]
fn put(own: (Id, u64), len: usize, theirs: (Id, u64), rank: u32) -> Transfer {
    let range = |(memory, offset): (Id, u64)| Range { memory, offset };
    let (own, theirs, len) = (range(own), range(theirs), len as u64);
    Transfer { direction: Direction::Put, rank, own, theirs, len, signal: None }
}

#[inline]
fn of_handle(coll: Option<&Handle>) -> Result<&Coll> {
    Ok(&some(coll)?.0)
}

#[inline]
fn of_context(context: Option<&RmaContext>, number: c_int) -> Result<&Coll> {
    some(context)?.checked(number)
}

extern "C" fn iput_v11(
    coll: Option<&Handle>,
    source_at: u64,
    source: Id,
    len: usize,
    target_at: u64,
    target: Id,
    rank: u32,
    request: Option<&mut Id>,
) -> Code {
    let transfer = put((source, source_at), len, (target, target_at), rank);
    post("GIN iput", of_handle(coll), &transfer, request)
}

extern "C" fn iput_signal_v11(
    coll: Option<&Handle>,
    source_at: u64,
    source: Id,
    len: usize,
    target_at: u64,
    target: Id,
    rank: u32,
    signal_at: u64,
    signal: Id,
    value: u64,
    op: u32,
    request: Option<&mut Id>,
) -> Code {
    let mut transfer = put((source, source_at), len, (target, target_at), rank);
    transfer.signal = Some(Signal { at: Range { memory: signal, offset: signal_at }, value, op });
    post("GIN iputSignal", of_handle(coll), &transfer, request)
}

extern "C" fn iput_v14(
    context: Option<&RmaContext>,
    number: c_int,
    source_at: u64,
    source: Id,
    len: usize,
    target_at: u64,
    target: Id,
    rank: u32,
    request: Option<&mut Id>,
) -> Code {
    let transfer = put((source, source_at), len, (target, target_at), rank);
    post("RMA iput", of_context(context, number), &transfer, request)
}

extern "C" fn iput_signal_v14(
    context: Option<&RmaContext>,
    number: c_int,
    source_at: u64,
    source: Id,
    len: usize,
    target_at: u64,
    target: Id,
    rank: u32,
    signal_at: u64,
    signal: Id,
    value: u64,
    op: u32,
    _is_strong: bool,
    request: Option<&mut Id>,
) -> Code {
    // Every signal is strong: it follows all earlier operations to the rank.
    let mut transfer = put((source, source_at), len, (target, target_at), rank);
    transfer.signal = Some(Signal { at: Range { memory: signal, offset: signal_at }, value, op });
    post("RMA iputSignal", of_context(context, number), &transfer, request)
}

extern "C" fn iget(
    context: Option<&RmaContext>,
    number: c_int,
    remote_at: u64,
    remote: Id,
    len: usize,
    local_at: u64,
    local: Id,
    rank: u32,
    request: Option<&mut Id>,
) -> Code {
    let mut transfer = put((local, local_at), len, (remote, remote_at), rank);
    transfer.direction = Direction::Get;
    post("RMA iget", of_context(context, number), &transfer, request)
}

extern "C" fn iflush(
    context: Option<&RmaContext>,
    number: c_int,
    _memory: Id,
    rank: u32,
    request: Option<&mut Id>,
) -> Code {
    call("RMA iflush", || {
        let into = some(request)?;
        *into = null();
        *into = some(context)?.checked(number)?.post_flush(rank)?;
        Ok(())
    })
}

extern "C" fn test(coll: Option<&Handle>, request: Id, done: Option<&mut c_int>) -> Code {
    call("test", || {
        let done = some(done)?;
        *done = 0;
        *done = c_int::from(some(coll)?.0.test(request)?);
        Ok(())
    })
}

extern "C" fn progress_v11(coll: Option<&Handle>) -> Code {
    call("ginProgress", || some(coll)?.0.progress_all())
}

extern "C" fn rma_progress(context: Option<&RmaContext>) -> Code {
    call("rmaProgress", || some(context)?.coll().progress_all())
}

extern "C" fn query_last_error_v11(coll: Option<&Handle>, has_error: Option<&mut u8>) -> Code {
    call("queryLastError", || {
        *some(has_error)? = u8::from(some(coll)?.0.has_failed());
        Ok(())
    })
}

extern "C" fn query_last_error_v14(
    context: Option<&RmaContext>,
    has_error: Option<&mut u8>,
) -> Code {
    call("queryLastError", || {
        *some(has_error)? = u8::from(some(context)?.coll().has_failed());
        Ok(())
    })
}
