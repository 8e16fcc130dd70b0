//! Agents and peers.
#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::net::IpAddr;
use std::os::fd::{AsFd, AsRawFd};
use std::time::Duration;

use warpwire::Error;
use warpwire::agent::{Agent, AgentOptions, Memory, Peer};
use warpwire::error::{Kind, Result};

use crate::abi::{self, Handle};
use crate::memory::MEMORY;
use crate::status::{OK, guard};
use crate::table::Table;
use crate::{block, pointer};

pub(crate) static AGENTS: Table<Agent> = Table::new("ww_agent");
pub(crate) static PEERS: Table<Peer> = Table::new("ww_peer");

/// Opens an agent.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_agent_open(
    name: *const c_char,
    options: *const abi::AgentOptions,
    agent: *mut Handle,
) -> c_int {
    guard(|| {
        let out = pointer::out(agent, "agent")?;
        // SAFETY: guaranteed by the caller.
        let (name, options) =
            unsafe { (pointer::text(name, "name")?, pointer::options(options, "options")?) };
        // SAFETY: guaranteed by the caller.
        let options = unsafe { agent_options(options) }?;
        let opened = AGENTS.insert(Agent::open(name, options)?);
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(opened) };
        Ok(OK)
    })
}

/// # Safety
/// The texts of the options are null or valid.
unsafe fn agent_options(given: Option<abi::AgentOptions>) -> Result<AgentOptions> {
    let mut options = AgentOptions::default().with_env()?;
    let Some(given) = given else { return Ok(options) };
    // SAFETY: guaranteed by the caller.
    let (link, address) = unsafe {
        (
            pointer::optional_text(given.link, "link")?,
            pointer::optional_text(given.address, "address")?,
        )
    };
    if let Some(link) = link {
        options.link = link.parse()?;
    }
    if let Some(text) = address {
        options.address = Some(ip_address(text)?);
    }
    if given.engines > 0 {
        options.engines = given.engines;
    }
    if given.queue_pairs > 0 {
        options.queue_pairs = given.queue_pairs as usize;
    }
    if given.send_depth > 0 {
        options.send_depth = given.send_depth;
    }
    if given.connect_timeout_ms > 0 {
        options.connect_timeout = Duration::from_millis(given.connect_timeout_ms.into());
    }
    if given.max_pending_notifications > 0 {
        options.max_pending_notifications = given.max_pending_notifications;
    }
    Ok(options)
}

/// An address of this machine.
pub(crate) fn ip_address(text: &str) -> Result<IpAddr> {
    text.parse().map_err(|_| {
        Error::new(Kind::Malformed, format!("use address {text:?}"))
            .why("it is no IP address")
            .fix("give an IP address of this machine, such as 127.0.0.1")
    })
}

/// Closes an agent.
#[unsafe(no_mangle)]
pub extern "C" fn ww_agent_close(agent: Handle) -> c_int {
    guard(|| AGENTS.remove(agent).map(|_| OK))
}

/// The descriptor to sleep on.
#[unsafe(no_mangle)]
pub extern "C" fn ww_agent_fd(agent: Handle) -> c_int {
    guard(|| Ok(AGENTS.get(agent)?.as_fd().as_raw_fd()))
}

/// Clears the descriptor; returns whether it was readable.
#[unsafe(no_mangle)]
pub extern "C" fn ww_agent_clear(agent: Handle) -> c_int {
    guard(|| Ok(AGENTS.get(agent)?.clear_events().into()))
}

/// The devices that it uses, and why.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_agent_path(agent: Handle, text: *mut *mut c_char) -> c_int {
    guard(|| {
        let out = pointer::out(text, "text")?;
        let path = block::bytes(AGENTS.get(agent)?.path().join("\n").as_bytes())?;
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(path.cast()) };
        Ok(OK)
    })
}

/// Name, address, and all registered memory.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_agent_metadata(
    agent: Handle,
    bytes: *mut *mut c_void,
    len: *mut usize,
) -> c_int {
    // SAFETY: guaranteed by the caller.
    guard(|| unsafe { give(bytes, len, || AGENTS.get(agent)?.metadata()) })
}

/// Name, address, and some memory.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_agent_metadata_of(
    agent: Handle,
    memory: *const Handle,
    count: usize,
    bytes: *mut *mut c_void,
    len: *mut usize,
) -> c_int {
    let some = || {
        // SAFETY: guaranteed by the caller.
        let handles = unsafe { pointer::array(memory, count, "memory") }?;
        let memory = handles.iter().map(|handle| MEMORY.get(*handle));
        let memory = memory.collect::<Result<Vec<Memory>>>()?;
        AGENTS.get(agent)?.metadata_of(&memory.iter().collect::<Vec<_>>())
    };
    // SAFETY: guaranteed by the caller.
    guard(|| unsafe { give(bytes, len, some) })
}

/// Gives bytes to the program.
///
/// # Safety
/// The pointers are null or valid for a write.
unsafe fn give(
    bytes: *mut *mut c_void,
    len: *mut usize,
    made: impl FnOnce() -> Result<Vec<u8>>,
) -> Result<c_int> {
    let (bytes, len) = (pointer::out(bytes, "bytes")?, pointer::out(len, "len")?);
    let made = made()?;
    let given = block::bytes(&made)?;
    // SAFETY: guaranteed by the caller.
    unsafe {
        bytes.set(given);
        len.set(made.len());
    }
    Ok(OK)
}

/// Adds a peer, or what has changed of it.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_agent_add_peer(
    agent: Handle,
    metadata: *const c_void,
    len: usize,
    peer: *mut Handle,
) -> c_int {
    guard(|| {
        let out = pointer::out(peer, "peer")?;
        let agent = AGENTS.get(agent)?;
        // SAFETY: guaranteed by the caller.
        let metadata = unsafe { pointer::array(metadata.cast::<u8>(), len, "metadata") }?;
        let added = PEERS.insert(agent.add_peer(metadata)?);
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(added) };
        Ok(OK)
    })
}

fn no_peer(name: &str) -> Error {
    Error::new(Kind::Stale, format!("use peer {name:?}"))
        .why("this agent has no peer of that name")
        .fix("add it with its metadata")
}

/// The peer of this name.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_agent_find_peer(
    agent: Handle,
    name: *const c_char,
    peer: *mut Handle,
) -> c_int {
    guard(|| {
        let out = pointer::out(peer, "peer")?;
        // SAFETY: guaranteed by the caller.
        let name = unsafe { pointer::text(name, "name") }?;
        let found = AGENTS.get(agent)?.peer(name).ok_or_else(|| no_peer(name))?;
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(PEERS.insert(found)) };
        Ok(OK)
    })
}

/// Removes a peer.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_agent_remove_peer(agent: Handle, name: *const c_char) -> c_int {
    guard(|| {
        // SAFETY: guaranteed by the caller.
        let name = unsafe { pointer::text(name, "name") }?;
        match AGENTS.get(agent)?.remove_peer(name) {
            true => Ok(OK),
            false => Err(no_peer(name)),
        }
    })
}

/// A peer's name and path.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_peer_describe(peer: Handle, info: *mut *mut abi::PeerInfo) -> c_int {
    guard(|| {
        let out = pointer::out(info, "info")?;
        let peer = PEERS.get(peer)?;
        let path = peer.path().join("\n");
        let is_connected = peer.is_connected().into();
        let texts = [peer.name().as_bytes(), path.as_bytes()];
        let made = block::pack(1, &texts, |texts| {
            vec![abi::PeerInfo { name: texts[0], is_connected, path: texts[1] }]
        })?;
        // SAFETY: guaranteed by the caller.
        unsafe { out.set(made) };
        Ok(OK)
    })
}

/// A peer's memory.
///
/// # Safety
/// As the header says of its pointers.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn ww_peer_memory(
    peer: Handle,
    memory: *mut *mut abi::RemoteMemory,
    count: *mut usize,
) -> c_int {
    guard(|| {
        let (out, count) = (pointer::out(memory, "memory")?, pointer::out(count, "count")?);
        let memory = PEERS.get(peer)?.memory();
        let kinds: Vec<_> = memory.iter().map(|memory| memory.kind().as_bytes()).collect();
        let list = block::pack(memory.len(), &kinds, |kinds| {
            let one = |(memory, kind): (&warpwire::agent::RemoteMemory, &*const c_char)| {
                abi::RemoteMemory { address: memory.address(), len: memory.len(), kind: *kind }
            };
            memory.iter().zip(kinds).map(one).collect()
        })?;
        // SAFETY: guaranteed by the caller.
        unsafe {
            out.set(list);
            count.set(memory.len());
        }
        Ok(OK)
    })
}

/// Releases a handle.
#[unsafe(no_mangle)]
pub extern "C" fn ww_peer_release(peer: Handle) -> c_int {
    guard(|| PEERS.remove(peer).map(|_| OK))
}
