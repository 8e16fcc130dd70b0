//! How two processes find each other: a unix socket whose name is the link's address, and one message on it.
//!
//! The name lies in the abstract namespace, which is the network namespace's, like the address itself: who shares the
//! one shares the other, nothing is left behind in a file system, and a name is free as soon as its owner is gone.
//!
//! The sender connects, says [`RingHello`] with the files of a new ring, and may write at once. The socket stays open: bytes on
//! it wake the receiver, and its end is the end of the ring.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    AddressFamily, RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags, SocketType,
};

use super::super::{address_bytes, address_from};
use super::ring::SIZES;
use super::sys;

/// Counted up when the hello or the ring changes. It is part of the name too, so that versions do not meet.
pub(super) const VERSION: u32 = 2;
const MAGIC: [u8; 8] = *b"warpshm\0";
const HELLO_LEN: usize = 72;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
/// Connections that wait to be taken up; the kernel may allow fewer.
const BACKLOG: i32 = 1024;

/// What an address belongs to. A UDP socket may have the same address as a link of somebody else that has no UDP: the two
/// know nothing of each other. So a link that stands beside a UDP socket has another sort of name, which nobody else can have taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Namespace {
    Shm,
    Auto,
}

impl Namespace {
    fn name(self, address: SocketAddr) -> io::Result<SocketAddrUnix> {
        let prefix = match self {
            Self::Shm => "shm",
            Self::Auto => "auto",
        };
        let text = format!("warpwire {prefix} {VERSION} {}", without_flowinfo(address));
        Ok(SocketAddrUnix::new_abstract_name(text.as_bytes())?)
    }

    /// In which order names are tried: first the peer that is as we are.
    pub(super) fn search_order(self) -> [Self; 2] {
        match self {
            Self::Shm => [Self::Shm, Self::Auto],
            Self::Auto => [Self::Auto, Self::Shm],
        }
    }
}

/// Without the flow label, which does not belong to an address.
fn without_flowinfo(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(_) => address,
        SocketAddr::V6(v6) => SocketAddrV6::new(*v6.ip(), v6.port(), 0, v6.scope_id()).into(),
    }
}

/// A socket that peers of this address connect to.
pub(super) fn listen(address: SocketAddr, namespace: Namespace) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
    rustix::net::bind(&socket, &namespace.name(address)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Holds a free UDP port of the address, so that nobody with UDP gets the name that is made of it; none if the address is not
/// this machine's. Nobody reads the socket, and it keeps next to nothing of what strangers send.
pub(super) fn reserve_port(ip: IpAddr) -> Option<(OwnedFd, SocketAddr)> {
    let family = if ip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket_with(family, SocketType::DGRAM, FLAGS, None).ok()?;
    if ip.is_ipv6() {
        rustix::net::sockopt::set_ipv6_v6only(&socket, true).ok()?;
    }
    rustix::net::sockopt::set_socket_recv_buffer_size(&socket, 0).ok()?;
    rustix::net::bind(&socket, &SocketAddr::new(ip, 0)).ok()?;
    let address = SocketAddr::try_from(rustix::net::getsockname(&socket).ok()?).ok()?;
    Some((socket, without_flowinfo(address)))
}

/// Connects to whoever has this address, or all addresses of its port, with one of those names; tells which.
pub(super) fn connect(peer: SocketAddr, names: &[Namespace]) -> io::Result<(OwnedFd, Namespace)> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
    let every: IpAddr = match peer {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    for namespace in names {
        for address in [peer, SocketAddr::new(every, peer.port())] {
            match rustix::net::connect(&socket, &namespace.name(address)?) {
                Ok(()) => return Ok((socket, *namespace)),
                Err(Errno::CONNREFUSED) => {}
                Err(code) => return Err(code.into()),
            }
        }
    }
    Err(Errno::CONNREFUSED.into())
}

/// Whether the process at the other end may share memory with us: our own user's, or root's.
///
/// Anyone on the machine can take any name, and connect to any; hence both sides ask.
pub(super) fn is_trusted(socket: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(is_allowed_uid(rustix::process::geteuid().as_raw(), sys::peer_credentials(socket)?.0))
}

/// The process that connected, as a descriptor that is readable once it has ended; none if the kernel has none, or if
/// the process lives in another namespace and has no number here.
pub(super) fn peer_pidfd(socket: &OwnedFd) -> Option<OwnedFd> {
    let (_, process) = sys::peer_credentials(socket.as_fd()).ok()?;
    let process = rustix::process::Pid::from_raw(process)?;
    rustix::process::pidfd_open(process, rustix::process::PidfdFlags::empty()).ok()
}

fn is_allowed_uid(mine: u32, theirs: u32) -> bool {
    theirs == mine || theirs == 0
}

/// What a sender says of a new ring. Its two files come along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RingHello {
    pub from: SocketAddr,
    pub to: SocketAddr,
    pub ring: usize,
    /// The sender would reach memory that the receiver offers by itself.
    pub wants_direct: bool,
}

/// What a connection brought first.
#[derive(Debug)]
pub(super) enum HelloResult {
    /// Nothing yet.
    Pending,
    /// Its end.
    Closed,
    RingHello(RingHello, [OwnedFd; 2]),
    /// Another version's hello.
    WrongVersion,
    /// Something else.
    Malformed,
}

impl RingHello {
    fn emit(&self) -> [u8; HELLO_LEN] {
        let mut bytes = [0; HELLO_LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12] = u8::from(self.wants_direct);
        bytes[16..24].copy_from_slice(&(self.ring as u64).to_le_bytes());
        bytes[24..48].copy_from_slice(&address_bytes(self.from));
        bytes[48..72].copy_from_slice(&address_bytes(self.to));
        bytes
    }

    /// Sends it, with the ring's file and the receiver's page.
    pub(super) fn send_on(
        &self,
        socket: &OwnedFd,
        ring: &OwnedFd,
        page: &OwnedFd,
    ) -> io::Result<()> {
        let bytes = self.emit();
        let files = [ring.as_fd(), page.as_fd()];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        control.push(SendAncillaryMessage::ScmRights(&files));
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags)?;
        Ok(())
    }
}

/// The first message of a connection.
pub(super) fn recv_hello(socket: &OwnedFd) -> HelloResult {
    let mut bytes = [0; HELLO_LEN + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let parts = &mut [IoSliceMut::new(&mut bytes)];
    let len = match rustix::net::recvmsg(socket, parts, &mut control, flags) {
        Ok(message) => message.bytes,
        Err(Errno::AGAIN | Errno::INTR) => return HelloResult::Pending,
        Err(_) => return HelloResult::Closed,
    };
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            files.extend(rights);
        }
    }
    if len == 0 {
        return HelloResult::Closed;
    }
    parse(&bytes[..len.min(HELLO_LEN + 1)], files)
}

fn parse(bytes: &[u8], files: Vec<OwnedFd>) -> HelloResult {
    if bytes.len() < 12 || bytes[..8] != MAGIC {
        return HelloResult::Malformed;
    }
    if bytes[8..12] != VERSION.to_le_bytes() {
        return HelloResult::WrongVersion;
    }
    let Ok(bytes) = <&[u8; HELLO_LEN]>::try_from(bytes) else { return HelloResult::Malformed };
    let mut size = [0; 8];
    size.copy_from_slice(&bytes[16..24]);
    let ring = usize::try_from(u64::from_le_bytes(size)).unwrap_or(0);
    let addresses = (address_at(bytes, 24), address_at(bytes, 48));
    let ((Some(from), Some(to)), Ok(files)) = (addresses, <[OwnedFd; 2]>::try_from(files)) else {
        return HelloResult::Malformed;
    };
    if !SIZES.contains(&ring) || !ring.is_power_of_two() {
        return HelloResult::Malformed;
    }
    HelloResult::RingHello(RingHello { from, to, ring, wants_direct: bytes[12] != 0 }, files)
}

/// The address in the hello at that byte.
fn address_at(hello: &[u8], at: usize) -> Option<SocketAddr> {
    address_from(hello.get(at..)?.first_chunk()?)
}

/// Takes up the next connection that waits.
pub(super) fn accept(listener: &OwnedFd) -> Result<OwnedFd, Errno> {
    rustix::net::accept_with(listener, FLAGS)
}

/// Wakes the receiver; `false` if it is gone. A socket that takes no more is full of wake-ups already.
pub(super) fn wake(socket: &OwnedFd) -> bool {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    matches!(rustix::net::send(socket, &[1], flags), Ok(_) | Err(Errno::AGAIN | Errno::INTR))
}

/// What is said over a socket after the hello: what it is about, a key, and a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ControlMsg {
    pub kind: u8,
    pub key: u32,
    pub word: u64,
}

const CONTROL_MSG_LEN: usize = 16;

impl ControlMsg {
    /// Sends it, with a file perhaps; false if it does not go now.
    pub(super) fn send(&self, socket: &OwnedFd, file: Option<BorrowedFd<'_>>) -> bool {
        let mut bytes = [0; CONTROL_MSG_LEN];
        bytes[0] = self.kind;
        bytes[4..8].copy_from_slice(&self.key.to_le_bytes());
        bytes[8..].copy_from_slice(&self.word.to_le_bytes());
        let files: Vec<_> = file.into_iter().collect();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() {
            control.push(SendAncillaryMessage::ScmRights(&files));
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags).is_ok()
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes = <&[u8; CONTROL_MSG_LEN]>::try_from(bytes).ok()?;
        let key = u32::from_le_bytes(*bytes[4..8].first_chunk()?);
        Some(Self { kind: bytes[0], key, word: u64::from_le_bytes(*bytes[8..].first_chunk()?) })
    }
}

/// Reads what came: bytes that only woke us, and letters, of which `on_msg` hears; `false` if the other end is gone.
/// What is left for the next time keeps the socket readable.
pub(super) fn read(socket: &OwnedFd, mut on_msg: impl FnMut(ControlMsg, Option<OwnedFd>)) -> bool {
    const MAX_MSGS: usize = 16;
    for _ in 0..MAX_MSGS {
        let mut bytes = [0; CONTROL_MSG_LEN + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        let len = match rustix::net::recvmsg(socket, parts, &mut control, flags) {
            // An end, or an empty message, which none of ours is.
            Ok(message) if message.bytes == 0 => return false,
            Ok(message) => message.bytes,
            Err(Errno::AGAIN | Errno::INTR) => return true,
            Err(_) => return false,
        };
        let file = control.drain().find_map(|message| match message {
            RecvAncillaryMessage::ScmRights(mut rights) => rights.next(),
            _ => None,
        });
        if let Some(msg) = bytes.get(..len).and_then(ControlMsg::parse) {
            on_msg(msg, file);
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_user_and_root_are_allowed() {
        assert!(is_allowed_uid(1000, 1000) && is_allowed_uid(1000, 0) && is_allowed_uid(0, 0));
        assert!(!is_allowed_uid(1000, 1001) && !is_allowed_uid(0, 1000));
    }

    #[test]
    fn control_messages_carry_files_and_other_bytes_are_skipped() {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (near, far) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .unwrap();
        let msg = ControlMsg { kind: 2, key: 0x1234_5678, word: u64::MAX - 7 };
        assert!(wake(&near));
        assert!(msg.send(&near, None));
        let file: OwnedFd = tempfile::tempfile().unwrap().into();
        assert!(msg.send(&near, Some(file.as_fd())));
        for nonsense in [&[7; 15][..], &[7; 17], &[7; 400]] {
            rustix::net::send(&near, nonsense, SendFlags::empty()).unwrap();
        }
        let mut got = Vec::new();
        assert!(read(&far, |msg, file| got.push((msg, file.is_some()))));
        assert_eq!(got, [(msg, false), (msg, true)]);
        drop(near);
        assert!(!read(&far, |msg, _| panic!("{msg:?}")));
    }

    #[test]
    fn a_hello_reads_as_it_was_written() {
        let files = || {
            let file = || tempfile::tempfile().unwrap().into();
            vec![file(), file()]
        };
        for (from, to) in [("127.0.0.1:4791", "10.0.0.1:1"), ("[fe80::1%3]:5", "[::1]:6")] {
            let (from, to) = (from.parse().unwrap(), to.parse().unwrap());
            let hello = RingHello { from, to, ring: 1 << 20, wants_direct: from.is_ipv4() };
            let bytes = hello.emit();
            assert!(
                matches!(parse(&bytes, files()), HelloResult::RingHello(read, _) if read == hello)
            );
            assert!(matches!(parse(&bytes, Vec::new()), HelloResult::Malformed));
            for len in 0..HELLO_LEN {
                assert!(matches!(parse(&bytes[..len], files()), HelloResult::Malformed));
            }
            let mut other = bytes;
            other[8] = 99;
            assert!(matches!(parse(&other, files()), HelloResult::WrongVersion));
            for size in [0_u64, 4095, 4097, 1 << 27, u64::MAX] {
                let mut other = bytes;
                other[16..24].copy_from_slice(&size.to_le_bytes());
                assert!(matches!(parse(&other, files()), HelloResult::Malformed), "{size}");
            }
        }
    }
}
