//! `rdma_getaddrinfo`. Results and what they point to are allocated with `calloc`, one by one:
//! programs replace the addresses in them.
#![allow(unsafe_code)]

use std::ffi::{CStr, c_int};
use std::net::SocketAddr;
use std::ptr::{null, null_mut};

use crate::abi::{self, AddrInfo, Sockaddr};
use crate::boundary::{Errno, INVALID, Result, address};
use crate::devices;

/// Resolves a name and a service. Of several addresses, the first one is taken whose family a
/// device has.
///
/// # Errors
/// `ENODATA` if there is no such name or service.
fn resolve(
    node: Option<&CStr>,
    service: Option<&CStr>,
    hints: Option<&AddrInfo>,
) -> Result<SocketAddr> {
    let has = |flag: u32| hints.is_some_and(|hints| hints.ai_flags as u32 & flag != 0);
    // SAFETY: all zeros is a valid value.
    let mut wanted: libc::addrinfo = unsafe { std::mem::zeroed() };
    wanted.ai_socktype = libc::SOCK_STREAM;
    wanted.ai_flags = if has(abi::RAI_PASSIVE) { libc::AI_PASSIVE } else { 0 };
    wanted.ai_flags |= if has(abi::RAI_NUMERICHOST) { libc::AI_NUMERICHOST } else { 0 };
    if has(abi::RAI_FAMILY) {
        wanted.ai_family = hints.map_or(0, |hints| hints.ai_family);
    }
    let text = |text: Option<&CStr>| text.map_or(null(), CStr::as_ptr);
    let (mut list, mut found) = (null_mut(), Vec::new());
    // SAFETY: C strings or null, valid hints; on success the list is valid until it is freed.
    unsafe {
        let result = libc::getaddrinfo(text(node), text(service), &raw const wanted, &raw mut list);
        if result != 0 {
            return Err(Errno(libc::ENODATA));
        }
        let mut entry = list;
        while let Some(known) = entry.as_ref() {
            found.extend(address(known.ai_addr).and_then(|address| address.get()));
            entry = known.ai_next;
        }
        libc::freeaddrinfo(list);
    }
    let devices = devices::all().unwrap_or_default();
    let has_device = |found: &&SocketAddr| {
        devices.iter().any(|device| abi::ip(device.gid).is_ipv4() == found.is_ipv4())
    };
    found.iter().find(has_device).or(found.first()).copied().ok_or(Errno(libc::ENODATA))
}

fn allocate<T>() -> Result<*mut T> {
    // SAFETY: allocates, or returns null.
    let room = unsafe { libc::calloc(1, size_of::<T>()) };
    if room.is_null() { Err(Errno(libc::ENOMEM)) } else { Ok(room.cast()) }
}

/// A copy of an address for C, and its length.
fn copy(of: &Sockaddr) -> Result<(*const libc::sockaddr, u32)> {
    let room = allocate::<Sockaddr>()?;
    // SAFETY: just allocated, for this type.
    unsafe { room.write(*of) };
    Ok((room.cast(), of.len() as u32))
}

/// The address in hints, if there is one.
fn hinted(at: *const libc::sockaddr, len: u32) -> Option<Sockaddr> {
    if len == 0 { None } else { address(at) }
}

pub(crate) fn get(
    node: Option<&CStr>,
    service: Option<&CStr>,
    hints: Option<&AddrInfo>,
) -> Result<*mut AddrInfo> {
    let is_passive = hints.is_some_and(|hints| hints.ai_flags as u32 & abi::RAI_PASSIVE != 0);
    let mut source = hints.and_then(|hints| hinted(hints.ai_src_addr, hints.ai_src_len));
    let mut destination = hints.and_then(|hints| hinted(hints.ai_dst_addr, hints.ai_dst_len));
    if node.is_some() || service.is_some() {
        let resolved = Some(resolve(node, service, hints)?.into());
        match is_passive {
            true => source = resolved,
            false => destination = resolved,
        }
    }
    let any = source.or(destination).and_then(|any| any.get()).ok_or(INVALID)?;
    if !is_passive && source.is_none() {
        // The address that a connection would come from, if that is known already.
        let to = destination.and_then(|to| to.get());
        let device = to.and_then(|to| devices::towards(to.ip()).ok());
        source = device.map(|device| SocketAddr::new(abi::ip(device.gid), 0).into());
    }
    let space = hints.map_or(0, |hints| hints.ai_port_space as u32);
    let qp_type = hints.map_or(0, |hints| hints.ai_qp_type as u32);
    let (space, qp_type) = match (space, qp_type) {
        (0, abi::QPT_UD) => (abi::PS_UDP, abi::QPT_UD),
        (0, 0) => (abi::PS_TCP, abi::QPT_RC),
        (0, other) => (abi::PS_TCP, other),
        (abi::PS_UDP, 0) => (abi::PS_UDP, abi::QPT_UD),
        (space, 0) => (space, abi::QPT_RC),
        known => known,
    };
    let made = allocate::<AddrInfo>()?;
    let copied = |of: Option<Sockaddr>| of.map_or(Ok((null(), 0)), |of| copy(&of));
    let (src, dst) = match (copied(source), copied(destination)) {
        (Ok(src), Ok(dst)) => (src, dst),
        _ => {
            free(made);
            return Err(Errno(libc::ENOMEM));
        }
    };
    let info = AddrInfo {
        ai_flags: hints.map_or(0, |hints| hints.ai_flags),
        ai_family: if any.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 },
        ai_qp_type: qp_type as c_int,
        ai_port_space: space as c_int,
        ai_src_len: src.1,
        ai_dst_len: dst.1,
        ai_src_addr: src.0,
        ai_dst_addr: dst.0,
        ai_src_canonname: null(),
        ai_dst_canonname: null(),
        ai_route_len: 0,
        ai_route: null_mut(),
        ai_connect_len: 0,
        ai_connect: null_mut(),
        ai_next: null_mut(),
    };
    // SAFETY: just allocated, for this type.
    unsafe { made.write(info) };
    Ok(made)
}

pub(crate) fn free(list: *mut AddrInfo) {
    let mut entry = list;
    while !entry.is_null() {
        // SAFETY: an entry of `get`, or one that the program has changed; everything that it points
        // to was allocated with libc's allocator, or is null.
        unsafe {
            let known = *entry;
            libc::free(known.ai_src_addr.cast_mut().cast());
            libc::free(known.ai_dst_addr.cast_mut().cast());
            libc::free(known.ai_src_canonname.cast_mut().cast());
            libc::free(known.ai_dst_canonname.cast_mut().cast());
            libc::free(known.ai_route);
            libc::free(known.ai_connect);
            libc::free(entry.cast());
            entry = known.ai_next.cast();
        }
    }
}

/// `poll`, under the name that programs of rsockets use for descriptors of any kind.
pub(crate) fn poll(set: *mut libc::pollfd, count: libc::nfds_t, timeout: c_int) -> c_int {
    // SAFETY: the caller's own arguments.
    unsafe { libc::poll(set, count, timeout) }
}
