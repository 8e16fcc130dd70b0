//! The socket calls that take pointers: options, batched sends, batched receives. The only unsafe
//! code of the UDP link.
//!
//! The kernel's message headers point to names, buffers and control bytes. They are kept between
//! calls, so that nothing is allocated per batch, and all of their pointers are rewritten before
//! each call.
#![allow(unsafe_code)]

use std::io;
use std::mem::{size_of, zeroed};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::ptr;

use libc::{c_int, c_void, cmsghdr, iovec, mmsghdr, sockaddr_in, sockaddr_in6, sockaddr_storage};

/// Bytes for the control messages of one packet or run: segment size, traffic class, hop limit,
/// address, and what the kernel may add unrequested.
const CONTROL: usize = 128;

/// An unbound socket of the address's IP version.
pub(super) fn socket(address: SocketAddr) -> io::Result<OwnedFd> {
    let family = if address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let kind = libc::SOCK_DGRAM | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // SAFETY: no pointers.
    let fd = check(unsafe { libc::socket(family, kind, 0) })?;
    // SAFETY: the descriptor is new and has no other owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

pub(super) fn bind(socket: BorrowedFd<'_>, address: SocketAddr) -> io::Result<()> {
    let name = SockAddr::from(address);
    // SAFETY: the name is valid during the call, and `len` is its length.
    check(unsafe { libc::bind(socket.as_raw_fd(), name.pointer(), name.len) }).map(drop)
}

pub(super) fn connect(socket: BorrowedFd<'_>, address: SocketAddr) -> io::Result<()> {
    let name = SockAddr::from(address);
    // SAFETY: as in `bind`.
    check(unsafe { libc::connect(socket.as_raw_fd(), name.pointer(), name.len) }).map(drop)
}

pub(super) fn local(socket: BorrowedFd<'_>) -> io::Result<SocketAddr> {
    let mut name = SockAddr::empty();
    // SAFETY: the kernel writes at most `len` bytes, which is the storage's size.
    check(unsafe {
        libc::getsockname(socket.as_raw_fd(), (&raw mut name.storage).cast(), &raw mut name.len)
    })?;
    name.address().ok_or_else(|| io::Error::other("the socket has no IP address"))
}

pub(super) fn set(
    socket: BorrowedFd<'_>,
    level: c_int,
    name: c_int,
    value: c_int,
) -> io::Result<()> {
    // SAFETY: the value is valid during the call, and the size is that of an int.
    check(unsafe {
        libc::setsockopt(
            socket.as_raw_fd(),
            level,
            name,
            (&raw const value).cast(),
            size_of::<c_int>() as u32,
        )
    })
    .map(drop)
}

pub(super) fn get(socket: BorrowedFd<'_>, level: c_int, name: c_int) -> io::Result<c_int> {
    let [value] = get_words::<1>(socket, level, name)?;
    Ok(value as c_int)
}

/// Reads an option of several words; words that the kernel does not write are zero.
pub(super) fn get_words<const N: usize>(
    socket: BorrowedFd<'_>,
    level: c_int,
    name: c_int,
) -> io::Result<[u32; N]> {
    let mut words = [0_u32; N];
    let mut len = size_of::<[u32; N]>() as u32;
    // SAFETY: the kernel writes at most `len` bytes, which is the array's size.
    check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            level,
            name,
            words.as_mut_ptr().cast::<c_void>(),
            &raw mut len,
        )
    })?;
    Ok(words)
}

/// The name of the interface that has this address.
pub(super) fn interface_of(address: IpAddr) -> Option<String> {
    let mut list = ptr::null_mut();
    // SAFETY: on success the list is valid until it is freed below.
    check(unsafe { libc::getifaddrs(&raw mut list) }).ok()?;
    let (mut entry, mut found) = (list, None);
    while !entry.is_null() && found.is_none() {
        // SAFETY: a non-null entry of the list; its name is a C string, its address may be null.
        unsafe {
            let name = SockAddr::copied((*entry).ifa_addr);
            if name.and_then(|name| name.address()).is_some_and(|known| known.ip() == address) {
                let text = std::ffi::CStr::from_ptr((*entry).ifa_name);
                found = Some(text.to_string_lossy().into_owned());
            }
            entry = (*entry).ifa_next;
        }
    }
    // SAFETY: the list returned above, freed once.
    unsafe { libc::freeifaddrs(list) };
    found
}

/// A socket address in the kernel's format.
#[derive(Clone, Copy)]
pub(super) struct SockAddr {
    storage: sockaddr_storage,
    len: u32,
}

impl SockAddr {
    fn empty() -> Self {
        // SAFETY: all zeros are a valid address, of no family.
        Self { storage: unsafe { zeroed() }, len: size_of::<sockaddr_storage>() as u32 }
    }

    /// # Safety
    /// `address` is null or points to an address of the size that its family implies.
    unsafe fn copied(address: *const libc::sockaddr) -> Option<Self> {
        if address.is_null() {
            return None;
        }
        // SAFETY: guaranteed by the caller.
        let family = unsafe { (*address).sa_family };
        let len = match c_int::from(family) {
            libc::AF_INET => size_of::<sockaddr_in>(),
            libc::AF_INET6 => size_of::<sockaddr_in6>(),
            _ => return None,
        };
        let mut name = Self::empty();
        // SAFETY: the family implies that `len` bytes are readable; the storage is larger.
        unsafe {
            ptr::copy_nonoverlapping(address.cast::<u8>(), (&raw mut name.storage).cast(), len)
        };
        name.len = len as u32;
        Some(name)
    }

    fn pointer(&self) -> *const libc::sockaddr {
        (&raw const self.storage).cast()
    }

    fn address(&self) -> Option<SocketAddr> {
        let len = self.len as usize;
        match c_int::from(self.storage.ss_family) {
            libc::AF_INET if len >= size_of::<sockaddr_in>() => {
                // SAFETY: the family and the length show that the storage holds this type; it is
                // aligned for every address type.
                let name = unsafe { &*(&raw const self.storage).cast::<sockaddr_in>() };
                let ip = Ipv4Addr::from(u32::from_be(name.sin_addr.s_addr));
                Some(SocketAddrV4::new(ip, u16::from_be(name.sin_port)).into())
            }
            libc::AF_INET6 if len >= size_of::<sockaddr_in6>() => {
                // SAFETY: as above.
                let name = unsafe { &*(&raw const self.storage).cast::<sockaddr_in6>() };
                let ip = Ipv6Addr::from(name.sin6_addr.s6_addr);
                let port = u16::from_be(name.sin6_port);
                // The flow label is chosen by the sender, and would make one peer look like
                // several.
                Some(SocketAddrV6::new(ip, port, 0, name.sin6_scope_id).into())
            }
            _ => None,
        }
    }
}

impl From<SocketAddr> for SockAddr {
    fn from(address: SocketAddr) -> Self {
        let mut name = Self::empty();
        match address {
            SocketAddr::V4(address) => {
                // SAFETY: all zeros are a valid address.
                let mut raw: sockaddr_in = unsafe { zeroed() };
                raw.sin_family = libc::AF_INET as u16;
                raw.sin_port = address.port().to_be();
                raw.sin_addr.s_addr = u32::from(*address.ip()).to_be();
                // SAFETY: the storage is larger than every address type, and aligned for it.
                unsafe { (&raw mut name.storage).cast::<sockaddr_in>().write(raw) };
                name.len = size_of::<sockaddr_in>() as u32;
            }
            SocketAddr::V6(address) => {
                // SAFETY: all zeros are a valid address.
                let mut raw: sockaddr_in6 = unsafe { zeroed() };
                raw.sin6_family = libc::AF_INET6 as u16;
                raw.sin6_port = address.port().to_be();
                raw.sin6_addr.s6_addr = address.ip().octets();
                raw.sin6_scope_id = address.scope_id();
                // SAFETY: as above.
                unsafe { (&raw mut name.storage).cast::<sockaddr_in6>().write(raw) };
                name.len = size_of::<sockaddr_in6>() as u32;
            }
        }
        name
    }
}

/// Control bytes, aligned as `cmsghdr` requires.
#[derive(Clone, Copy)]
#[repr(C, align(8))]
struct Control([u8; CONTROL]);

/// One message to send: one packet, or a run that the kernel segments.
#[derive(Clone, Copy)]
pub(super) struct Outgoing<'a> {
    pub to: &'a SockAddr,
    pub bytes: &'a [u8],
    /// Segment size of a run in bytes; 0 for a single packet.
    pub segment: u16,
    /// The source address, if the socket has several.
    pub source: Option<IpAddr>,
}

/// Whether a system call carries one message or several.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CallMode {
    Batched,
    Single,
}

impl CallMode {
    fn max_messages(self) -> usize {
        match self {
            Self::Batched => usize::MAX,
            Self::Single => 1,
        }
    }
}

/// Message headers for a batch, kept between calls.
pub(super) struct Headers {
    messages: Vec<mmsghdr>,
    slices: Vec<iovec>,
    names: Vec<SockAddr>,
    controls: Vec<Control>,
}

// SAFETY: the pointers in the headers are written before each call and used by that call only,
// which borrows everything that they point to.
unsafe impl Send for Headers {}

impl Headers {
    pub(super) fn new(count: usize) -> Self {
        // SAFETY: all zeros are a valid header: no name, no buffers, no control bytes.
        let (message, slice) = unsafe { (zeroed::<mmsghdr>(), zeroed::<iovec>()) };
        Self {
            messages: vec![message; count],
            slices: vec![slice; count],
            names: vec![SockAddr::empty(); count],
            controls: vec![Control([0; CONTROL]); count],
        }
    }

    /// Sends messages until the kernel rejects one or the batch ends, and returns the number sent;
    /// an error is that of the first message.
    pub(super) fn send<'a>(
        &mut self,
        socket: BorrowedFd<'_>,
        batch: impl Iterator<Item = Outgoing<'a>>,
        calls: CallMode,
    ) -> io::Result<usize> {
        let mut count = 0_usize;
        let rows = self.messages.iter_mut().zip(&mut self.slices).zip(&mut self.controls);
        for (((message, slice), control), outgoing) in rows.zip(batch.take(calls.max_messages())) {
            *slice = iovec {
                iov_base: outgoing.bytes.as_ptr().cast_mut().cast(),
                iov_len: outgoing.bytes.len(),
            };
            let header = &mut message.msg_hdr;
            header.msg_name = (&raw const outgoing.to.storage).cast_mut().cast();
            header.msg_namelen = outgoing.to.len;
            header.msg_iov = slice;
            header.msg_iovlen = 1;
            header.msg_control = control.0.as_mut_ptr().cast();
            header.msg_controllen = write_cmsgs(control, &outgoing);
            count += 1;
        }
        let (fd, flags) = (socket.as_raw_fd(), libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL);
        if let (CallMode::Single, Some(message)) = (calls, self.messages.first()) {
            let header = &raw const message.msg_hdr;
            // SAFETY: as below, for the first header alone.
            let sent = unsafe { libc::syscall(libc::SYS_sendmsg, fd, header, flags) };
            return check_len(sent).map(|_| count);
        }
        // SAFETY: the headers point to names and bytes that `'a` keeps alive, which the kernel only
        // reads, and to slices and control bytes of `self`; `count` headers are initialized.
        let sent = unsafe { libc::sendmmsg(fd, self.messages.as_mut_ptr(), count as u32, flags) };
        check(sent).map(|sent| sent as usize)
    }

    /// Receives messages into `buffer`, one per slot of `size` bytes; returns their number.
    pub(super) fn receive(
        &mut self,
        socket: BorrowedFd<'_>,
        buffer: &mut [u8],
        size: usize,
        calls: CallMode,
    ) -> io::Result<usize> {
        let mut count = 0;
        let rows = self.messages.iter_mut().zip(&mut self.slices).zip(&mut self.controls);
        let rows = rows.zip(&mut self.names);
        let pieces = buffer.chunks_exact_mut(size.max(1)).take(calls.max_messages());
        for ((((message, slice), control), name), piece) in rows.zip(pieces) {
            *slice = iovec { iov_base: piece.as_mut_ptr().cast(), iov_len: piece.len() };
            let header = &mut message.msg_hdr;
            header.msg_name = (&raw mut name.storage).cast();
            header.msg_namelen = size_of::<sockaddr_storage>() as u32;
            header.msg_iov = slice;
            header.msg_iovlen = 1;
            header.msg_control = control.0.as_mut_ptr().cast();
            header.msg_controllen = CONTROL;
            header.msg_flags = 0;
            count += 1;
        }
        let (fd, flags) = (socket.as_raw_fd(), libc::MSG_DONTWAIT);
        let received = if let (CallMode::Single, Some(message)) = (calls, self.messages.first_mut())
        {
            let header = &raw mut message.msg_hdr;
            // SAFETY: as below, for the first header alone.
            let len = unsafe { libc::syscall(libc::SYS_recvmsg, fd, header, flags) };
            message.msg_len = check_len(len)?;
            1
        } else {
            let messages = self.messages.as_mut_ptr();
            // SAFETY: the headers point to slots of `buffer`, which is borrowed mutably and whose
            // slots do not overlap, and to parts of `self`, each with its length; `count` headers
            // are initialized.
            check(unsafe { libc::recvmmsg(fd, messages, count, flags, ptr::null_mut()) })? as usize
        };
        for (message, name) in self.messages[..received].iter().zip(&mut self.names) {
            name.len = message.msg_hdr.msg_namelen;
        }
        Ok(received)
    }

    /// Metadata of message `at` of the last receive; `None` if its sender has no IP address.
    pub(super) fn received(&self, at: usize) -> Option<Received> {
        let (message, name) = (self.messages.get(at)?, self.names.get(at)?);
        let mut received = Received {
            from: name.address()?,
            len: message.msg_len as usize,
            segment: 0,
            traffic_class: 0,
            hop_limit: 0,
            to: None,
            truncated: message.msg_hdr.msg_flags & libc::MSG_TRUNC != 0,
        };
        let control = &self.controls.get(at)?.0;
        let filled = message.msg_hdr.msg_controllen.min(CONTROL);
        parse_cmsgs(&control[..filled], &mut received);
        Some(received)
    }
}

/// Metadata of a received message.
#[derive(Clone, Copy, Debug)]
pub(super) struct Received {
    pub from: SocketAddr,
    pub len: usize,
    /// Length of each packet if the kernel coalesced several; else 0.
    pub segment: usize,
    pub traffic_class: u8,
    /// Time to live (IPv4) or hop limit (IPv6).
    pub hop_limit: u8,
    /// The destination address, if the socket has several.
    pub to: Option<IpAddr>,
    /// The message was longer than its buffer.
    pub truncated: bool,
}

const HEADER: usize = size_of::<cmsghdr>();

/// Writes the control messages of a message and returns their length. Each is a header and a value,
/// aligned to words; the values here have at most 20 bytes, and two of them fit.
fn write_cmsgs(control: &mut Control, outgoing: &Outgoing<'_>) -> usize {
    let mut at = 0;
    if outgoing.segment != 0 {
        let value = outgoing.segment.to_ne_bytes();
        at = push_cmsg(control, at, libc::SOL_UDP, libc::UDP_SEGMENT, &value);
    }
    match outgoing.source {
        Some(IpAddr::V4(source)) => {
            // An in_pktinfo: interface, source, destination (which is ignored).
            let mut value = [0; 12];
            value[4..8].copy_from_slice(&source.octets());
            at = push_cmsg(control, at, libc::IPPROTO_IP, libc::IP_PKTINFO, &value);
        }
        Some(IpAddr::V6(source)) => {
            // An in6_pktinfo: source, interface.
            let mut value = [0; 20];
            value[..16].copy_from_slice(&source.octets());
            at = push_cmsg(control, at, libc::IPPROTO_IPV6, libc::IPV6_PKTINFO, &value);
        }
        None => {}
    }
    at
}

fn push_cmsg(control: &mut Control, at: usize, level: c_int, kind: c_int, value: &[u8]) -> usize {
    // SAFETY: all zeros are a valid header; it has padding on some systems, hence not a literal.
    let mut header: cmsghdr = unsafe { zeroed() };
    header.cmsg_len = HEADER + value.len();
    header.cmsg_level = level;
    header.cmsg_type = kind;
    let end = (at + HEADER + value.len()).next_multiple_of(size_of::<usize>());
    let Some(cmsg_bytes) = control.0.get_mut(at..end) else { return at };
    // SAFETY: `cmsg_bytes` is at least as long as a header; the write needs no alignment.
    unsafe { cmsg_bytes.as_mut_ptr().cast::<cmsghdr>().write_unaligned(header) };
    cmsg_bytes[HEADER..HEADER + value.len()].copy_from_slice(value);
    end
}

fn parse_cmsgs(mut control: &[u8], received: &mut Received) {
    while control.len() >= HEADER {
        // SAFETY: the slice is at least as long as a header, and every bit pattern is valid.
        let header: cmsghdr = unsafe { control.as_ptr().cast::<cmsghdr>().read_unaligned() };
        let len = header.cmsg_len;
        let Some(value) = control.get(HEADER..len) else { return };
        let byte = value.first().copied().unwrap_or_default();
        let word = || value.first_chunk::<4>().map_or(0, |bytes| c_int::from_ne_bytes(*bytes));
        match (header.cmsg_level, header.cmsg_type) {
            (libc::SOL_UDP, libc::UDP_GRO) => {
                received.segment = usize::try_from(word()).unwrap_or(0)
            }
            (libc::IPPROTO_IP, libc::IP_TOS) => received.traffic_class = byte,
            (libc::IPPROTO_IPV6, libc::IPV6_TCLASS) => received.traffic_class = word() as u8,
            (libc::IPPROTO_IP, libc::IP_TTL) | (libc::IPPROTO_IPV6, libc::IPV6_HOPLIMIT) => {
                received.hop_limit = word() as u8;
            }
            (libc::IPPROTO_IP, libc::IP_PKTINFO) => {
                // The third word: the destination in the packet.
                let address = value.get(8..12).and_then(|bytes| <[u8; 4]>::try_from(bytes).ok());
                received.to = address.map(|address| Ipv4Addr::from(address).into());
            }
            (libc::IPPROTO_IPV6, libc::IPV6_PKTINFO) => {
                let address = value.first_chunk::<16>();
                received.to = address.map(|address| Ipv6Addr::from(*address).into());
            }
            _ => {}
        }
        control = control.get(len.next_multiple_of(size_of::<usize>())..).unwrap_or_default();
    }
}

/// Converts the result of a raw system call. Single messages bypass the C library, whose wrappers
/// are cancellation points: no thread here is ever cancelled, and the check is measurable for small
/// messages.
#[inline]
fn check_len(result: libc::c_long) -> io::Result<u32> {
    u32::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn check(result: c_int) -> io::Result<c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// A socket that captures packets between two UDP ports on the loopback interface; for tests.
///
/// The kernel filters out all others, which could fill the socket's buffer and displace packets
/// that matter.
#[cfg(test)]
pub(super) fn sniffer(from: u16, to: u16) -> io::Result<OwnedFd> {
    const PACKET_IGNORE_OUTGOING: c_int = 23;
    let kind = libc::SOCK_RAW | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    // With protocol 0 the socket receives nothing until the filter is attached.
    // SAFETY: no pointers.
    let fd = check(unsafe { libc::socket(libc::AF_PACKET, kind, 0) })?;
    // SAFETY: the descriptor is new and has no other owner.
    let socket = unsafe { OwnedFd::from_raw_fd(fd) };
    let mut filter = port_filter(from, to);
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program and its instructions are valid during the call, each with its length.
    check(unsafe {
        libc::setsockopt(
            fd,
            libc::SOL_SOCKET,
            libc::SO_ATTACH_FILTER,
            (&raw const program).cast(),
            size_of::<libc::sock_fprog>() as u32,
        )
    })?;
    // Otherwise each packet is captured twice, on transmit and on receive.
    set(std::os::fd::AsFd::as_fd(&socket), libc::SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)?;
    // SAFETY: all zeros are a valid address; the name of the interface is a C string.
    let (mut name, index) =
        unsafe { (zeroed::<libc::sockaddr_ll>(), libc::if_nametoindex(c"lo".as_ptr())) };
    name.sll_family = libc::AF_PACKET as u16;
    name.sll_protocol = (libc::ETH_P_ALL as u16).to_be();
    name.sll_ifindex = index as c_int;
    let len = size_of::<libc::sockaddr_ll>() as u32;
    // SAFETY: the name is valid during the call, and `len` is its length.
    check(unsafe { libc::bind(fd, (&raw const name).cast(), len) })?;
    Ok(socket)
}

/// A BPF program that accepts Ethernet frames with UDP between these ports, in IP headers without
/// options.
#[cfg(test)]
fn port_filter(from: u16, to: u16) -> Vec<libc::sock_filter> {
    const HALF: u16 = 0x28; // load two bytes
    const BYTE: u16 = 0x30; // load one byte
    const SAME: u16 = 0x15; // skip `yes` instructions if equal, else `no`
    const PASS: u16 = 0x06; // accept `k` bytes of the packet
    let step = |code, k, yes, no| libc::sock_filter { code, jt: yes, jf: no, k };
    let (ipv4, ipv6, udp) = (0x0800, 0x86dd, libc::IPPROTO_UDP as u32);
    vec![
        step(HALF, 12, 0, 0),
        step(SAME, ipv4, 0, 6),
        step(BYTE, 23, 0, 0),
        step(SAME, udp, 0, 12),
        step(HALF, 34, 0, 0),
        step(SAME, u32::from(from), 0, 10),
        step(HALF, 36, 0, 0),
        step(SAME, u32::from(to), 7, 8),
        step(SAME, ipv6, 0, 7),
        step(BYTE, 20, 0, 0),
        step(SAME, udp, 0, 5),
        step(HALF, 54, 0, 0),
        step(SAME, u32::from(from), 0, 3),
        step(HALF, 56, 0, 0),
        step(SAME, u32::from(to), 0, 1),
        step(PASS, 1 << 18, 0, 0),
        step(PASS, 0, 0, 0),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_round_trip() {
        for text in ["127.0.0.1:4791", "[::1]:4791", "[fe80::1%3]:1", "0.0.0.0:0"] {
            let address: SocketAddr = text.parse().unwrap();
            assert_eq!(SockAddr::from(address).address(), Some(address));
        }
        assert_eq!(SockAddr::empty().address(), None);
    }

    #[test]
    fn arbitrary_control_bytes_are_parsed_safely() {
        let blank = Received {
            from: "127.0.0.1:1".parse().unwrap(),
            len: 0,
            segment: 0,
            traffic_class: 0,
            hop_limit: 0,
            to: None,
            truncated: false,
        };
        for fill in [0, 1, 16, 17, 0x7f, 0xff] {
            for len in 0..CONTROL {
                parse_cmsgs(&vec![fill; len], &mut { blank });
            }
        }
        let mut control = Control([0; CONTROL]);
        let end = push_cmsg(&mut control, 0, libc::SOL_UDP, libc::UDP_GRO, &1000_i32.to_ne_bytes());
        let end = push_cmsg(&mut control, end, libc::IPPROTO_IP, libc::IP_TOS, &[3]);
        let mut received = blank;
        parse_cmsgs(&control.0[..end], &mut received);
        assert_eq!((received.segment, received.traffic_class), (1000, 3));
    }
}
