//! How two processes find each other: a unix socket whose name is the link's address, and one message on it.
//!
//! The name lies in the abstract namespace, which is the network namespace's, like the address itself: who shares the
//! one shares the other, nothing is left behind in a file system, and a name is free as soon as its owner is gone.
//!
//! The sender connects, says [`Hello`] with the files of a new ring, and may write at once. The socket stays open: bytes on
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
const HELLO: usize = 72;
const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
/// Connections that wait to be taken up; the kernel may allow fewer.
const BACKLOG: i32 = 1024;

/// What an address belongs to. A UDP socket may have the same address as a link of somebody else that has no UDP: the two
/// know nothing of each other. So a link that stands beside a UDP socket has another sort of name, which nobody else can have taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    Alone,
    BesideUdp,
}

impl Standing {
    fn name(self, address: SocketAddr) -> io::Result<SocketAddrUnix> {
        let sort = match self {
            Self::Alone => "shm",
            Self::BesideUdp => "auto",
        };
        let text = format!("warpwire {sort} {VERSION} {}", plain(address));
        Ok(SocketAddrUnix::new_abstract_name(text.as_bytes())?)
    }

    /// In which order names are tried: first the peer that is as we are.
    pub(super) fn order(self) -> [Self; 2] {
        match self {
            Self::Alone => [Self::Alone, Self::BesideUdp],
            Self::BesideUdp => [Self::BesideUdp, Self::Alone],
        }
    }
}

/// Without the flow label, which does not belong to an address.
fn plain(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(_) => address,
        SocketAddr::V6(v6) => SocketAddrV6::new(*v6.ip(), v6.port(), 0, v6.scope_id()).into(),
    }
}

/// A socket that peers of this address connect to.
pub(super) fn listen(address: SocketAddr, standing: Standing) -> io::Result<OwnedFd> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
    rustix::net::bind(&socket, &standing.name(address)?)?;
    rustix::net::listen(&socket, BACKLOG)?;
    Ok(socket)
}

/// Holds a free UDP port of the address, so that nobody with UDP gets the name that is made of it; none if the address is not
/// this machine's. Nobody reads the socket, and it keeps next to nothing of what strangers send.
pub(super) fn hold_port(ip: IpAddr) -> Option<(OwnedFd, SocketAddr)> {
    let family = if ip.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let socket = rustix::net::socket_with(family, SocketType::DGRAM, FLAGS, None).ok()?;
    if ip.is_ipv6() {
        rustix::net::sockopt::set_ipv6_v6only(&socket, true).ok()?;
    }
    rustix::net::sockopt::set_socket_recv_buffer_size(&socket, 0).ok()?;
    rustix::net::bind(&socket, &SocketAddr::new(ip, 0)).ok()?;
    let address = SocketAddr::try_from(rustix::net::getsockname(&socket).ok()?).ok()?;
    Some((socket, plain(address)))
}

/// Connects to whoever has this address, or all addresses of its port, with one of those names; tells which.
pub(super) fn connect(peer: SocketAddr, names: &[Standing]) -> io::Result<(OwnedFd, Standing)> {
    let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)?;
    let every: IpAddr = match peer {
        SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
        SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
    };
    for standing in names {
        for address in [peer, SocketAddr::new(every, peer.port())] {
            match rustix::net::connect(&socket, &standing.name(address)?) {
                Ok(()) => return Ok((socket, *standing)),
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
    Ok(may_meet(rustix::process::geteuid().as_raw(), sys::peer_credentials(socket)?.0))
}

/// The process that connected, as a descriptor that is readable once it has ended; none if the kernel has none, or if
/// the process lives in another namespace and has no number here.
pub(super) fn process_of(socket: &OwnedFd) -> Option<OwnedFd> {
    let (_, process) = sys::peer_credentials(socket.as_fd()).ok()?;
    let process = rustix::process::Pid::from_raw(process)?;
    rustix::process::pidfd_open(process, rustix::process::PidfdFlags::empty()).ok()
}

fn may_meet(mine: u32, theirs: u32) -> bool {
    theirs == mine || theirs == 0
}

/// What a sender says of a new ring. Its two files come along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Hello {
    pub from: SocketAddr,
    pub to: SocketAddr,
    pub ring: usize,
    /// The sender would reach memory that the receiver offers by itself.
    pub reaches: bool,
}

/// What a connection brought first.
#[derive(Debug)]
pub(super) enum Heard {
    /// Nothing yet.
    Nothing,
    /// Its end.
    End,
    Hello(Hello, [OwnedFd; 2]),
    /// Another version's hello.
    Version,
    /// Something else.
    Nonsense,
}

impl Hello {
    fn emit(&self) -> [u8; HELLO] {
        let mut bytes = [0; HELLO];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        bytes[12] = u8::from(self.reaches);
        bytes[16..24].copy_from_slice(&(self.ring as u64).to_le_bytes());
        bytes[24..48].copy_from_slice(&address_bytes(self.from));
        bytes[48..72].copy_from_slice(&address_bytes(self.to));
        bytes
    }

    /// Sends it, with the ring's file and the receiver's page.
    pub(super) fn say(&self, socket: &OwnedFd, ring: &OwnedFd, page: &OwnedFd) -> io::Result<()> {
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
pub(super) fn hear(socket: &OwnedFd) -> Heard {
    let mut bytes = [0; HELLO + 1];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
    let parts = &mut [IoSliceMut::new(&mut bytes)];
    let len = match rustix::net::recvmsg(socket, parts, &mut control, flags) {
        Ok(message) => message.bytes,
        Err(Errno::AGAIN | Errno::INTR) => return Heard::Nothing,
        Err(_) => return Heard::End,
    };
    let mut files = Vec::new();
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(rights) = message {
            files.extend(rights);
        }
    }
    if len == 0 {
        return Heard::End;
    }
    parse(&bytes[..len.min(HELLO + 1)], files)
}

fn parse(bytes: &[u8], files: Vec<OwnedFd>) -> Heard {
    if bytes.len() < 12 || bytes[..8] != MAGIC {
        return Heard::Nonsense;
    }
    if bytes[8..12] != VERSION.to_le_bytes() {
        return Heard::Version;
    }
    let Ok(bytes) = <&[u8; HELLO]>::try_from(bytes) else { return Heard::Nonsense };
    let mut size = [0; 8];
    size.copy_from_slice(&bytes[16..24]);
    let ring = usize::try_from(u64::from_le_bytes(size)).unwrap_or(0);
    let addresses = (address_at(bytes, 24), address_at(bytes, 48));
    let ((Some(from), Some(to)), Ok(files)) = (addresses, <[OwnedFd; 2]>::try_from(files)) else {
        return Heard::Nonsense;
    };
    if !SIZES.contains(&ring) || !ring.is_power_of_two() {
        return Heard::Nonsense;
    }
    Heard::Hello(Hello { from, to, ring, reaches: bytes[12] != 0 }, files)
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
pub(super) struct Letter {
    pub about: u8,
    pub key: u32,
    pub word: u64,
}

const LETTER: usize = 16;

impl Letter {
    /// Sends it, with a file perhaps; false if it does not go now.
    pub(super) fn post(&self, socket: &OwnedFd, file: Option<BorrowedFd<'_>>) -> bool {
        let mut bytes = [0; LETTER];
        bytes[0] = self.about;
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
        let bytes = <&[u8; LETTER]>::try_from(bytes).ok()?;
        let key = u32::from_le_bytes(*bytes[4..8].first_chunk()?);
        Some(Self { about: bytes[0], key, word: u64::from_le_bytes(*bytes[8..].first_chunk()?) })
    }
}

/// Reads what came: bytes that only woke us, and letters, of which `each` hears; `false` if the other end is gone.
/// What is left for the next time keeps the socket readable.
pub(super) fn read(socket: &OwnedFd, mut each: impl FnMut(Letter, Option<OwnedFd>)) -> bool {
    const MOST: usize = 16;
    for _ in 0..MOST {
        let mut bytes = [0; LETTER + 1];
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
        if let Some(letter) = bytes.get(..len).and_then(Letter::parse) {
            each(letter, file);
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_own_user_and_root_are_met() {
        assert!(may_meet(1000, 1000) && may_meet(1000, 0) && may_meet(0, 0));
        assert!(!may_meet(1000, 1001) && !may_meet(0, 1000));
    }

    #[test]
    fn letters_arrive_with_their_files_and_other_bytes_are_passed_over() {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (near, far) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .unwrap();
        let letter = Letter { about: 2, key: 0x1234_5678, word: u64::MAX - 7 };
        assert!(wake(&near));
        assert!(letter.post(&near, None));
        let file: OwnedFd = tempfile::tempfile().unwrap().into();
        assert!(letter.post(&near, Some(file.as_fd())));
        for nonsense in [&[7; 15][..], &[7; 17], &[7; 400]] {
            rustix::net::send(&near, nonsense, SendFlags::empty()).unwrap();
        }
        let mut got = Vec::new();
        assert!(read(&far, |letter, file| got.push((letter, file.is_some()))));
        assert_eq!(got, [(letter, false), (letter, true)]);
        drop(near);
        assert!(!read(&far, |letter, _| panic!("{letter:?}")));
    }

    #[test]
    fn a_hello_reads_as_it_was_written() {
        let files = || {
            let file = || tempfile::tempfile().unwrap().into();
            vec![file(), file()]
        };
        for (from, to) in [("127.0.0.1:4791", "10.0.0.1:1"), ("[fe80::1%3]:5", "[::1]:6")] {
            let (from, to) = (from.parse().unwrap(), to.parse().unwrap());
            let hello = Hello { from, to, ring: 1 << 20, reaches: from.is_ipv4() };
            let bytes = hello.emit();
            assert!(matches!(parse(&bytes, files()), Heard::Hello(read, _) if read == hello));
            assert!(matches!(parse(&bytes, Vec::new()), Heard::Nonsense));
            for len in 0..HELLO {
                assert!(matches!(parse(&bytes[..len], files()), Heard::Nonsense));
            }
            let mut other = bytes;
            other[8] = 99;
            assert!(matches!(parse(&other, files()), Heard::Version));
            for size in [0_u64, 4095, 4097, 1 << 27, u64::MAX] {
                let mut other = bytes;
                other[16..24].copy_from_slice(&size.to_le_bytes());
                assert!(matches!(parse(&other, files()), Heard::Nonsense), "{size}");
            }
        }
    }
}
