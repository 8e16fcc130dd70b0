//! Transfers and notifications.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::time::Duration;

use warpwire::Error;
use warpwire::agent::{
    Agent, Descriptor, PreparedTransfer, Transfer, TransferOp, TransferOptions, TransferState,
};
use warpwire::error::{Kind, Result};
use warpwire::mem::{self, ForeignStream};

use crate::abi::{self, Handle};
use crate::agent::{AGENTS, PEERS};
use crate::status::{IN_PROGRESS, OK, guard};
use crate::table::Table;
use crate::{block, pointer};

static PREPARED: Table<PreparedTransfer> = Table::new("ww_prepared");
static TRANSFERS: Table<Transfer> = Table::new("ww_transfer");

/// A time to wait; negative is forever.
fn wait_time(milliseconds: i64) -> Duration {
    u64::try_from(milliseconds).map_or(Duration::MAX, Duration::from_millis)
}

/// Checks two lists, and looks their registrations up.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_agent_prepare(
    agent: Handle,
    peer: Handle,
    local: *const abi::Range,
    remote: *const abi::Range,
    count: usize,
    prepared: *mut Handle,
) -> c_int {
    guard(|| {
        let out = pointer::out(prepared, "prepared")?;
        let (agent, peer) = (AGENTS.get(agent)?, PEERS.get(peer)?);
        // SAFETY: guaranteed by the caller.
        let (local, remote) = unsafe {
            (pointer::array(local, count, "local")?, pointer::array(remote, count, "remote")?)
        };
        let made = agent.prepare(&peer, &descriptors(local), &descriptors(remote))?;
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(PREPARED.insert(made)) };
        Ok(OK)
    })
}

fn descriptors(ranges: &[abi::Range]) -> Vec<Descriptor> {
    ranges.iter().map(|range| Descriptor::new(range.address, range.len)).collect()
}

/// Releases a handle.
#[unsafe(no_mangle)]
pub extern "C" fn ww_prepared_release(prepared: Handle) -> c_int {
    guard(|| PREPARED.remove(prepared).map(|_| OK))
}

/// Posts a transfer.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_agent_post(
    agent: Handle,
    op: c_int,
    prepared: Handle,
    options: *const abi::TransferOptions,
    transfer: *mut Handle,
) -> c_int {
    let post = |agent: &Agent, prepared: &PreparedTransfer, with| {
        agent.post_with(operation(op)?, prepared, with)
    };
    // SAFETY: guaranteed by the caller.
    unsafe { post_by(agent, prepared, options, transfer, post) }
}

/// # Safety
/// As the header says of its pointers.
unsafe fn post_by(
    agent: Handle,
    prepared: Handle,
    options: *const abi::TransferOptions,
    transfer: *mut Handle,
    post: impl FnOnce(&Agent, &PreparedTransfer, TransferOptions) -> Result<Transfer>,
) -> c_int {
    guard(|| {
        let out = pointer::out(transfer, "transfer")?;
        let (agent, prepared) = (AGENTS.get(agent)?, PREPARED.get(prepared)?);
        // SAFETY: guaranteed by the caller.
        let posted = post(&agent, &prepared, unsafe { transfer_options(options) }?)?;
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(TRANSFERS.insert(posted)) };
        Ok(OK)
    })
}

/// Posts a transfer in the order of a CUDA stream.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_agent_post_on_stream(
    agent: Handle,
    op: c_int,
    prepared: Handle,
    options: *const abi::TransferOptions,
    device: *const c_char,
    stream: *mut c_void,
    transfer: *mut Handle,
) -> c_int {
    let post = |agent: &Agent, prepared: &PreparedTransfer, with| {
        let op = operation(op)?;
        // SAFETY: guaranteed by the caller.
        let stream = unsafe { cuda_stream(device, stream) }?;
        agent.post_on_stream(&stream, op, prepared, with)
    };
    // SAFETY: guaranteed by the caller.
    unsafe { post_by(agent, prepared, options, transfer, post) }
}

/// Makes a CUDA stream wait for a transfer.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_transfer_wait_on_stream(
    transfer: Handle,
    device: *const c_char,
    stream: *mut c_void,
) -> c_int {
    guard(|| {
        let transfer = TRANSFERS.get(transfer)?;
        // SAFETY: guaranteed by the caller.
        let stream = unsafe { cuda_stream(device, stream) }?;
        transfer.wait_on_stream(&stream)?;
        Ok(OK)
    })
}

fn operation(op: c_int) -> Result<TransferOp> {
    match op {
        0 => Ok(TransferOp::Write),
        1 => Ok(TransferOp::Read),
        _ => Err(Error::new(Kind::InvalidArgument, format!("post operation {op}"))
            .why("there is none of that number")
            .fix("use WW_WRITE or WW_READ")),
    }
}

/// # Safety
/// As the header says of its pointers.
unsafe fn transfer_options(options: *const abi::TransferOptions) -> Result<TransferOptions> {
    let mut with = TransferOptions::default();
    // SAFETY: guaranteed by the caller.
    if let Some(given) = unsafe { pointer::options(options, "options") }? {
        let (bytes, len) = (given.notification.cast::<u8>(), given.notification_len);
        if !bytes.is_null() || len > 0 {
            // SAFETY: guaranteed by the caller.
            let bytes = unsafe { pointer::array(bytes, len, "options.notification") }?;
            with = with.with_notification(bytes.to_vec());
        }
        if given.timeout_ms > 0 {
            with = with.with_timeout(Duration::from_millis(given.timeout_ms));
        }
    }
    Ok(with)
}

/// # Safety
/// `device` is null or a string, and `stream` a stream of that device or null.
unsafe fn cuda_stream(device: *const c_char, stream: *mut c_void) -> Result<ForeignStream> {
    // SAFETY: guaranteed by the caller.
    let label = unsafe { pointer::text(device, "device") }?;
    let device = mem::open(label)?;
    // SAFETY: guaranteed by the caller.
    unsafe { ForeignStream::new(&device, stream as u64) }
}

fn state(transfer: &Transfer) -> Result<c_int> {
    match transfer.state() {
        TransferState::Done => Ok(OK),
        TransferState::InProgress => Ok(IN_PROGRESS),
        TransferState::Failed(why) => Err(why),
    }
}

/// The state of a transfer.
#[unsafe(no_mangle)]
pub extern "C" fn ww_transfer_state(transfer: Handle) -> c_int {
    guard(|| state(&TRANSFERS.get(transfer)?))
}

/// Waits for the end of a transfer.
#[unsafe(no_mangle)]
pub extern "C" fn ww_transfer_wait(transfer: Handle, timeout_ms: i64) -> c_int {
    guard(|| {
        let transfer = TRANSFERS.get(transfer)?;
        match transfer.wait(wait_time(timeout_ms)) {
            Ok(()) => Ok(OK),
            // Either it is still in progress, or its own deadline has passed.
            Err(error) if error.kind() == &Kind::Timeout => state(&transfer),
            Err(error) => Err(error),
        }
    })
}

/// Cancels a transfer.
#[unsafe(no_mangle)]
pub extern "C" fn ww_transfer_cancel(transfer: Handle) -> c_int {
    guard(|| {
        TRANSFERS.get(transfer)?.cancel();
        Ok(OK)
    })
}

/// Releases a handle.
#[unsafe(no_mangle)]
pub extern "C" fn ww_transfer_release(transfer: Handle) -> c_int {
    guard(|| TRANSFERS.remove(transfer).map(|_| OK))
}

/// Sends a notification.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_agent_notify(
    agent: Handle,
    peer: Handle,
    bytes: *const c_void,
    len: usize,
    transfer: *mut Handle,
) -> c_int {
    guard(|| {
        let (agent, peer) = (AGENTS.get(agent)?, PEERS.get(peer)?);
        // SAFETY: guaranteed by the caller.
        let bytes = unsafe { pointer::array(bytes.cast::<u8>(), len, "bytes") }?;
        let posted = agent.notify(&peer, bytes)?;
        if let Ok(out) = pointer::out(transfer, "transfer") {
            // SAFETY: guaranteed by the caller.
            unsafe { out.set(TRANSFERS.insert(posted)) };
        }
        Ok(OK)
    })
}

/// Takes a notification, or waits for one.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_agent_next_notification(
    agent: Handle,
    timeout_ms: i64,
    notification: *mut *mut abi::Notification,
) -> c_int {
    guard(|| {
        let out = pointer::out(notification, "notification")?;
        let agent = AGENTS.get(agent)?;
        let next = match timeout_ms {
            0 => agent.next_notification(),
            _ => agent.wait_notification(wait_time(timeout_ms))?,
        };
        let given = match next {
            None => std::ptr::null_mut(),
            Some(next) => {
                let len = next.bytes().len();
                block::pack(1, &[next.from().as_bytes(), next.bytes()], |parts| {
                    vec![abi::Notification { from: parts[0], bytes: parts[1].cast(), len }]
                })?
            }
        };
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(given) };
        Ok(OK)
    })
}
