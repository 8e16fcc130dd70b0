//! What kernels are given: queue pairs for `<warpwire/verbs.cuh>`, sockets for
//! `<warpwire/sock.cuh>`.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use warpwire::Error;
use warpwire::error::{Kind, Result};
use warpwire::hca::HcaOptions;
use warpwire::mem;
use warpwire::sock::{SockHost, SockMemory, SockOptions};
use warpwire::stream::{KernelQp, KernelQpOptions};
use warpwire::verbs::{Context, LinkChoice, Mr, Pd, ProgressMode, QpEndpoint};

use crate::abi::{self, Handle};
use crate::memory::{access_of, allocation_of};
use crate::status::{OK, guard};
use crate::table::Table;
use crate::{agent, block, pointer};

static CONTEXTS: Table<Domain> = Table::new("ww_context");
static MRS: Table<Arc<Mr>> = Table::new("ww_mr");
static KERNEL_QPS: Table<KernelQp> = Table::new("ww_kernel_qp");
static SOCK_HOSTS: Table<Arc<SockHost>> = Table::new("ww_sock_host");

/// How long the engine polls after its last work: a kernel's doorbell wakes no thread.
const SPIN: Duration = Duration::from_millis(100);
/// The device whose pinned memory the sockets of CPU threads use.
const CPU_MEMORY: &str = "sim:0";
/// No endpoint is longer.
const MAX_ENDPOINT_LEN: usize = 1024;
/// Of the endpoint's bytes.
const ENDPOINT_VERSION: u32 = 1;

/// An RDMA device, and the protection domain of everything that is made with it.
#[derive(Clone)]
struct Domain {
    context: Context,
    pd: Pd,
}

/// What a program passes on to the peer.
#[derive(Serialize, Deserialize)]
struct EndpointBytes {
    version: u32,
    #[serde(flatten)]
    endpoint: QpEndpoint,
}

/// Opens an RDMA device for kernels.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_context_open(
    options: *const abi::ContextOptions,
    context: *mut Handle,
) -> c_int {
    guard(|| {
        let out = pointer::out(context, "context")?;
        let (mut link, mut address) = (LinkChoice::default(), None);
        // SAFETY: guaranteed by the caller.
        if let Some(given) = unsafe { pointer::options(options, "options") }? {
            // SAFETY: guaranteed by the caller.
            let texts = unsafe {
                (
                    pointer::optional_text(given.link, "link")?,
                    pointer::optional_text(given.address, "address")?,
                )
            };
            link = texts.0.map_or(Ok(link), str::parse)?;
            address = texts.1.map(agent::ip_address).transpose()?;
        }
        let progress_mode = ProgressMode::Thread { spin: SPIN, core: None };
        let hca = HcaOptions::default().with_progress_mode(progress_mode);
        let context = link.open_context(address, hca)?;
        let domain = Domain { pd: context.alloc_pd(), context };
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(CONTEXTS.insert(domain)) };
        Ok(OK)
    })
}

/// Closes a context.
#[unsafe(no_mangle)]
pub extern "C" fn ww_context_close(context: Handle) -> c_int {
    guard(|| CONTEXTS.remove(context).map(|_| OK))
}

/// Registers memory by its address.
///
/// # Safety
/// As the header says of the memory and its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_context_register(
    context: Handle,
    address: u64,
    len: u64,
    access_bits: u32,
    mr: *mut Handle,
) -> c_int {
    guard(|| {
        let out = pointer::out(mr, "mr")?;
        let Domain { context, pd } = CONTEXTS.get(context)?;
        let access = access_of(access_bits)?;
        let registered = match allocation_of(address, len) {
            Some(memory) => {
                let region = memory.region(address - memory.address().raw(), len)?;
                context.register_at(&pd, region, Some(address), access)
            }
            // SAFETY: guaranteed by the caller.
            None => unsafe { context.register_address(&pd, address, len, None, access) },
        };
        let registered = MRS.insert(Arc::new(registered?));
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(registered) };
        Ok(OK)
    })
}

/// Keys and path of registered memory.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_mr_describe(mr: Handle, info: *mut *mut abi::MrInfo) -> c_int {
    guard(|| {
        let out = pointer::out(info, "info")?;
        let mr = MRS.get(mr)?;
        let (path, why) = (mr.path().to_string(), mr.why().join("\n"));
        let made = block::pack(1, &[path.as_bytes(), why.as_bytes()], |texts| {
            vec![abi::MrInfo {
                address: mr.iova(),
                len: mr.len(),
                lkey: mr.lkey(),
                rkey: mr.rkey(),
                path: texts[0],
                why: texts[1],
            }]
        })?;
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(made) };
        Ok(OK)
    })
}

/// Ends a registration.
#[unsafe(no_mangle)]
pub extern "C" fn ww_mr_deregister(mr: Handle) -> c_int {
    guard(|| match Arc::into_inner(MRS.remove(mr)?) {
        Some(mr) => mr.deregister().map(|()| OK),
        // Another thread describes it, and ends it then.
        None => Ok(OK),
    })
}

/// Creates a queue pair for kernels.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_kernel_qp_create(
    context: Handle,
    device: *const c_char,
    options: *const abi::KernelQpOptions,
    qp: *mut Handle,
) -> c_int {
    guard(|| {
        let out = pointer::out(qp, "qp")?;
        let Domain { context, pd } = CONTEXTS.get(context)?;
        // SAFETY: guaranteed by the caller.
        let (device, given) = unsafe {
            (pointer::optional_text(device, "device")?, pointer::options(options, "options")?)
        };
        let mut options = KernelQpOptions::default();
        if let Some(given) = given {
            if given.send_depth > 0 {
                options.send_depth = given.send_depth;
            }
            if given.receive_depth > 0 {
                options.receive_depth = given.receive_depth;
            }
            options.single_poster = given.is_single_poster != 0;
            options.direct = given.is_direct_off == 0;
            options.direct_atomics = given.has_direct_atomics != 0;
        }
        let created = match device {
            Some(device) => KernelQp::create(&context, &pd, &mem::open(device)?, options),
            None => KernelQp::create_for_cpu(&context, &pd, options),
        };
        let created = KERNEL_QPS.insert(created?);
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(created) };
        Ok(OK)
    })
}

/// What the peer needs to connect.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_kernel_qp_endpoint(
    qp: Handle,
    bytes: *mut *mut c_void,
    len: *mut usize,
) -> c_int {
    guard(|| {
        let (out, out_len) = (pointer::out(bytes, "bytes")?, pointer::out(len, "len")?);
        let endpoint = KERNEL_QPS.get(qp)?.endpoint();
        let text = serde_json::to_vec(&EndpointBytes { version: ENDPOINT_VERSION, endpoint })
            .map_err(|why| Error::new(Kind::Malformed, "write an endpoint").why(why.to_string()))?;
        let made = block::bytes(&text)?;
        // SAFETY: guaranteed by the caller.
        unsafe {
            out.set(made);
            out_len.set(text.len());
        }
        Ok(OK)
    })
}

fn parse_endpoint(bytes: &[u8]) -> Result<QpEndpoint> {
    let refused = |kind, why: String| {
        Error::new(kind, "connect a queue pair for kernels")
            .why(why)
            .fix("pass the bytes of the peer's ww_kernel_qp_endpoint unchanged")
    };
    if bytes.len() > MAX_ENDPOINT_LEN {
        return Err(refused(Kind::Malformed, format!("{} bytes are no endpoint", bytes.len())));
    }
    let parsed: EndpointBytes = serde_json::from_slice(bytes)
        .map_err(|why| refused(Kind::Malformed, format!("they are no endpoint: {why}")))?;
    match parsed.version {
        ENDPOINT_VERSION => Ok(parsed.endpoint),
        other => Err(refused(Kind::Unsupported, format!("it is of version {other}"))),
    }
}

/// Connects a queue pair to the peer's.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_kernel_qp_connect(
    qp: Handle,
    endpoint: *const c_void,
    len: usize,
) -> c_int {
    guard(|| {
        let qp = KERNEL_QPS.get(qp)?;
        // SAFETY: guaranteed by the caller.
        let bytes = unsafe { pointer::array(endpoint.cast::<u8>(), len, "endpoint") }?;
        qp.connect(&parse_endpoint(bytes)?).map(|()| OK)
    })
}

/// The address of a queue pair's `warpwire::Qp`.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_kernel_qp_handle(qp: Handle, address: *mut u64) -> c_int {
    guard(|| {
        let out = pointer::out(address, "address")?;
        let handle = KERNEL_QPS.get(qp)?.handle().raw();
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(handle) };
        Ok(OK)
    })
}

/// The first failure that a kernel has noticed.
#[unsafe(no_mangle)]
pub extern "C" fn ww_kernel_qp_check(qp: Handle) -> c_int {
    guard(|| KERNEL_QPS.get(qp)?.check().map(|()| OK))
}

/// Ends all waits of kernels.
#[unsafe(no_mangle)]
pub extern "C" fn ww_kernel_qp_close(qp: Handle) -> c_int {
    guard(|| {
        KERNEL_QPS.get(qp)?.close();
        Ok(OK)
    })
}

/// Destroys a queue pair.
#[unsafe(no_mangle)]
pub extern "C" fn ww_kernel_qp_release(qp: Handle) -> c_int {
    guard(|| KERNEL_QPS.remove(qp).map(|_| OK))
}

/// Starts the sockets of a device.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_sock_host_start(
    device: *const c_char,
    options: *const abi::SockOptions,
    host: *mut Handle,
) -> c_int {
    guard(|| {
        let out = pointer::out(host, "host")?;
        // SAFETY: guaranteed by the caller.
        let (device, given) = unsafe {
            (pointer::optional_text(device, "device")?, pointer::options(options, "options")?)
        };
        let mut options = sock_options(given);
        if device.is_none() {
            options.memory = SockMemory::Threads;
        }
        let device = mem::open(device.unwrap_or(CPU_MEMORY))?;
        let started = SockHost::start(&device, options)?;
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(SOCK_HOSTS.insert(Arc::new(started))) };
        Ok(OK)
    })
}

fn sock_options(given: Option<abi::SockOptions>) -> SockOptions {
    let mut options = SockOptions::default();
    let Some(given) = given else { return options };
    if given.sockets > 0 {
        options.sockets = given.sockets;
        options.warp_sockets = options.warp_sockets.min(given.sockets);
    }
    if given.ring > 0 {
        options.ring = given.ring;
    }
    match given.arena {
        0 => options = options.with_fitting_arena(),
        arena => options.arena = arena,
    }
    options
}

/// The address of the table that kernels are given.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_sock_host_table(host: Handle, address: *mut u64) -> c_int {
    guard(|| {
        let out = pointer::out(address, "address")?;
        let table = SOCK_HOSTS.get(host)?.table();
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(table) };
        Ok(OK)
    })
}

/// Ends all sockets; calls of kernels fail.
#[unsafe(no_mangle)]
pub extern "C" fn ww_sock_host_stop(host: Handle) -> c_int {
    guard(|| {
        SOCK_HOSTS.get(host)?.stop();
        Ok(OK)
    })
}

/// Ends all sockets and frees their memory.
#[unsafe(no_mangle)]
pub extern "C" fn ww_sock_host_release(host: Handle) -> c_int {
    guard(|| SOCK_HOSTS.remove(host).map(|_| OK))
}
