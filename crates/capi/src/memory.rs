//! Registered memory, device memory, and CPU windows.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ffi::{c_char, c_int, c_void};
use std::sync::Arc;

use parking_lot::Mutex;
use warpwire::Error;
use warpwire::agent::Memory;
use warpwire::error::{Kind, Result};
use warpwire::mem::{self, Allocation, DeviceAddr, Window, WindowOptions};
use warpwire::verbs::Access;

use crate::abi::{self, Handle};
use crate::agent::AGENTS;
use crate::status::{OK, guard};
use crate::table::Table;
use crate::{block, pointer};

pub(crate) static MEMORY: Table<Memory> = Table::new("ww_memory");
static WINDOWS: Table<Arc<Window>> = Table::new("ww_window");

/// Memory that was allocated here, by address.
static ALLOCATED: Mutex<BTreeMap<u64, Allocation>> = Mutex::new(BTreeMap::new());

const ACCESS: [(u32, Access); 4] = [
    (1, Access::LOCAL_WRITE),
    (2, Access::REMOTE_READ),
    (4, Access::REMOTE_WRITE),
    (REMOTE_ATOMIC, Access::REMOTE_ATOMIC),
];
const REMOTE_ATOMIC: u32 = 8;

/// The access of these bits.
pub(crate) fn access_of(bits: u32) -> Result<Access> {
    if bits >> ACCESS.len() != 0 {
        return Err(Error::new(Kind::InvalidArgument, format!("register memory for {bits:#x}"))
            .why("a kind of access is unknown")
            .fix("use a sum of WW_LOCAL_WRITE and the constants beside it in warpwire.h"));
    }
    let wanted = ACCESS.iter().filter(|(bit, _)| bits & bit != 0);
    Ok(wanted.fold(Access::NONE, |all, (_, access)| all | *access))
}

/// The same for an agent.
fn agent_access(bits: u32) -> Result<Access> {
    if bits & REMOTE_ATOMIC != 0 {
        return Err(Error::new(Kind::InvalidArgument, "register memory for remote atomics")
            .why("agents have none")
            .fix("leave WW_REMOTE_ATOMIC out, or register with ww_context_register"));
    }
    access_of(bits)
}

/// The allocation of ours that contains a range.
pub(crate) fn allocation_of(address: u64, len: u64) -> Option<Allocation> {
    let allocated = ALLOCATED.lock();
    let (start, memory) = allocated.range(..=address).next_back()?;
    let offset = address - start;
    (offset <= memory.len() && len <= memory.len() - offset).then(|| memory.clone())
}

/// Registers memory by its address.
///
/// # Safety
/// As the header says of the memory and its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_agent_register(
    agent: Handle,
    address: u64,
    len: u64,
    access_bits: u32,
    memory: *mut Handle,
) -> c_int {
    guard(|| {
        let out = pointer::out(memory, "memory")?;
        let (agent, access) = (AGENTS.get(agent)?, agent_access(access_bits)?);
        // A region of ours is held by the registration, so that it is not freed meanwhile.
        let registered = match allocation_of(address, len) {
            Some(memory) => {
                let region = memory.region(address - memory.address().raw(), len)?;
                agent.register_with(region, access)
            }
            // SAFETY: guaranteed by the caller.
            None => unsafe { agent.register_address(address, len, access) },
        };
        let registered = MEMORY.insert(registered?);
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(registered) };
        Ok(OK)
    })
}

/// What registered memory is.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_memory_describe(
    memory: Handle,
    info: *mut *mut abi::MemoryInfo,
) -> c_int {
    guard(|| {
        let out = pointer::out(info, "info")?;
        let memory = MEMORY.get(memory)?;
        let (path, why) = (memory.path().to_string(), memory.why().join("\n"));
        let texts = [memory.kind().as_bytes(), path.as_bytes(), why.as_bytes()];
        let made = block::pack(1, &texts, |texts| {
            vec![abi::MemoryInfo {
                address: memory.address(),
                len: memory.len(),
                kind: texts[0],
                path: texts[1],
                why: texts[2],
            }]
        })?;
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(made) };
        Ok(OK)
    })
}

/// Ends a registration.
#[unsafe(no_mangle)]
pub extern "C" fn ww_memory_deregister(memory: Handle) -> c_int {
    guard(|| MEMORY.remove(memory)?.deregister().map(|()| OK))
}

/// Allocates device memory.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_device_alloc(
    device: *const c_char,
    len: u64,
    address: *mut u64,
) -> c_int {
    guard(|| {
        let out = pointer::out(address, "address")?;
        // SAFETY: guaranteed by the caller.
        let label = unsafe { pointer::text(device, "device") }?;
        let memory = mem::open(label)?.alloc(len)?;
        let address = memory.address().raw();
        ALLOCATED.lock().insert(address, memory);
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(address) };
        Ok(OK)
    })
}

/// Frees device memory.
#[unsafe(no_mangle)]
pub extern "C" fn ww_device_free(address: u64) -> c_int {
    guard(|| {
        // Not under the lock: the device may call back into this library's clients.
        let Some(memory) = ALLOCATED.lock().remove(&address) else {
            return Err(Error::new(Kind::InvalidArgument, format!("free memory at {address:#x}"))
                .why("ww_device_alloc has not returned this address, or it was freed"));
        };
        memory.free().map(|()| OK).inspect_err(|error| {
            if error.kind() == &Kind::Busy {
                ALLOCATED.lock().insert(address, memory.clone());
            }
        })
    })
}

/// Maps device memory for the CPU.
///
/// # Safety
/// As the header says of the memory and its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_window_open(address: u64, len: u64, window: *mut Handle) -> c_int {
    guard(|| {
        let out = pointer::out(window, "window")?;
        let start = DeviceAddr::new(address);
        // SAFETY: guaranteed by the caller: it stays allocated.
        let memory = unsafe { mem::owner_of(start)?.borrow(start, len) }?;
        let opened = memory.window_with(0, len, &WindowOptions::from_env()?)?;
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(WINDOWS.insert(Arc::new(opened))) };
        Ok(OK)
    })
}

/// Where and how a window is mapped.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_window_describe(
    window: Handle,
    info: *mut *mut abi::WindowInfo,
) -> c_int {
    guard(|| {
        let out = pointer::out(info, "info")?;
        let window = WINDOWS.get(window)?;
        let rejected = window.rejected_paths().iter();
        let why: Vec<_> = rejected.map(|other| format!("{}: {}", other.path, other.why)).collect();
        let texts = [window.path().to_string(), window.mapping().to_string(), why.join("\n")];
        let made = block::pack(1, &texts.each_ref().map(|text| text.as_bytes()), |texts| {
            vec![abi::WindowInfo {
                pointer: window.as_ptr().as_ptr().cast(),
                address: window.address().raw(),
                len: window.len(),
                path: texts[0],
                mapping: texts[1],
                why: texts[2],
            }]
        })?;
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(made) };
        Ok(OK)
    })
}

/// Copies to device memory.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_window_write(
    window: Handle,
    offset: u64,
    from: *const c_void,
    len: usize,
) -> c_int {
    guard(|| {
        let window = WINDOWS.get(window)?;
        // SAFETY: guaranteed by the caller.
        let from = unsafe { pointer::array(from.cast::<u8>(), len, "from") }?;
        window.write(offset, from).map(|()| OK)
    })
}

/// Copies from device memory.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_window_read(
    window: Handle,
    offset: u64,
    to: *mut c_void,
    len: usize,
) -> c_int {
    guard(|| {
        let window = WINDOWS.get(window)?;
        // SAFETY: guaranteed by the caller.
        let to = unsafe { pointer::array_mut(to.cast::<u8>(), len, "to") }?;
        window.read(offset, to).map(|()| OK)
    })
}

/// Unmaps a window.
#[unsafe(no_mangle)]
pub extern "C" fn ww_window_close(window: Handle) -> c_int {
    guard(|| WINDOWS.remove(window).map(|_| OK))
}
