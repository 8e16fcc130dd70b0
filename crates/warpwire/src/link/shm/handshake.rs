//! Connection setup between two processes: a unix socket named after the link's address (`names`),
//! and one message on it.
//!
//! The sender connects, sends a [`RingHello`] with the files of a new ring, and may write
//! immediately. The receiver says that it has accepted the ring, or closes the connection without
//! having read a packet. The socket stays open: bytes on it wake the receiver, and closing it ends
//! the ring.

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer,
    SendAncillaryMessage, SendFlags, SocketFlags,
};

use super::super::{address_bytes, address_from};
use super::ring::SIZES;
use super::sys;
use crate::host::is_own_user;

/// Incremented when the hello or the ring changes. Part of the socket name too, so that different
/// versions do not connect.
pub(super) const VERSION: u32 = 4;
const MAGIC: [u8; 8] = *b"warpshm\0";
const HELLO_LEN: usize = 72;
/// Whether the process at the other end may share memory with us: it runs as the same user.
///
/// Any process on the machine can bind any name and connect to any; hence both sides check. The
/// rule is symmetric, so that a sender which trusts a listener is trusted by it.
pub(super) fn is_trusted(socket: BorrowedFd<'_>) -> io::Result<bool> {
    Ok(is_own_user(sys::peer_credentials(socket)?.0))
}

/// The process that connected or listens, and its pidfd, readable once it has exited; `None` if the
/// kernel has no pidfds, or if the process is in another PID namespace and has no number here.
pub(super) fn peer_process(socket: &OwnedFd) -> Option<(i32, OwnedFd)> {
    let (_, number) = sys::peer_credentials(socket.as_fd()).ok()?;
    let process = rustix::process::Pid::from_raw(number)?;
    let pidfd = rustix::process::pidfd_open(process, rustix::process::PidfdFlags::empty()).ok()?;
    Some((number, pidfd))
}

/// The first message on a connection: describes a new ring, whose two files come along.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RingHello {
    pub from: SocketAddr,
    pub to: SocketAddr,
    /// Size of the ring in bytes.
    pub ring: usize,
    /// The sender requests direct access to the receiver's exports.
    pub wants_direct: bool,
}

/// The result of waiting for the first message of a connection.
#[derive(Debug)]
pub(super) enum HelloResult {
    /// No message yet.
    Pending,
    /// The connection was closed.
    Closed,
    RingHello(RingHello, [OwnedFd; 2]),
    /// A hello of another version.
    WrongVersion,
    /// Any other message.
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

    /// Sends the hello with the file of the ring and that of the receiver's page.
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

/// Receives the first message of a connection.
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
    let files = received_files(&mut control);
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

/// The address at this offset of the hello.
fn address_at(hello: &[u8], at: usize) -> Option<SocketAddr> {
    address_from(hello.get(at..)?.first_chunk()?)
}

/// Accepts the next pending connection.
pub(super) fn accept(listener: &OwnedFd) -> Result<OwnedFd, Errno> {
    rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK)
}

/// Wakes the receiver; `false` if it has exited. A full socket already holds wake-ups.
pub(super) fn wake(socket: &OwnedFd) -> bool {
    let flags = SendFlags::DONTWAIT | SendFlags::NOSIGNAL;
    matches!(rustix::net::send(socket, &[1], flags), Ok(_) | Err(Errno::AGAIN | Errno::INTR))
}

/// A message after the hello.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ControlMsg {
    pub kind: u8,
    pub key: u32,
    pub word: u64,
}

const CONTROL_MSG_LEN: usize = 16;
/// Files that come with one message, at most: the kernel's own limit.
pub(super) const MAX_FILES: usize = 253;

impl ControlMsg {
    /// Sends the message with these files, at most [`MAX_FILES`]; `false` if it cannot be sent now.
    pub(super) fn send(&self, socket: &OwnedFd, files: &[BorrowedFd<'_>]) -> bool {
        self.try_send(socket, files).is_ok()
    }

    /// As [`send`](Self::send), with the reason.
    pub(super) fn try_send(
        &self,
        socket: &OwnedFd,
        files: &[BorrowedFd<'_>],
    ) -> rustix::io::Result<()> {
        let mut bytes = [0; CONTROL_MSG_LEN];
        bytes[0] = self.kind;
        bytes[4..8].copy_from_slice(&self.key.to_le_bytes());
        bytes[8..].copy_from_slice(&self.word.to_le_bytes());
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut control = SendAncillaryBuffer::new(&mut space);
        if !files.is_empty() && !control.push(SendAncillaryMessage::ScmRights(files)) {
            return Err(Errno::TOOMANYREFS);
        }
        let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
        rustix::net::sendmsg(socket, &[IoSlice::new(&bytes)], &mut control, flags).map(drop)
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes = <&[u8; CONTROL_MSG_LEN]>::try_from(bytes).ok()?;
        let key = u32::from_le_bytes(*bytes[4..8].first_chunk()?);
        Some(Self { kind: bytes[0], key, word: u64::from_le_bytes(*bytes[8..].first_chunk()?) })
    }
}

/// Reads what has arrived: bytes that only wake the receiver, and messages, for which `on_msg` is
/// called; `false` if the other end is closed. Unread messages keep the socket readable.
pub(super) fn read(socket: &OwnedFd, mut on_msg: impl FnMut(ControlMsg, Vec<OwnedFd>)) -> bool {
    const MAX_MSGS: usize = 16;
    for _ in 0..MAX_MSGS {
        let mut bytes = [0; CONTROL_MSG_LEN + 1];
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_FILES))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let flags = RecvFlags::DONTWAIT | RecvFlags::CMSG_CLOEXEC;
        let parts = &mut [IoSliceMut::new(&mut bytes)];
        let len = match rustix::net::recvmsg(socket, parts, &mut control, flags) {
            // End of the connection, or an empty message, which a link never sends.
            Ok(message) if message.bytes == 0 => return false,
            Ok(message) => message.bytes,
            Err(Errno::AGAIN | Errno::INTR) => return true,
            Err(_) => return false,
        };
        let files = received_files(&mut control);
        if let Some(msg) = bytes.get(..len).and_then(ControlMsg::parse) {
            on_msg(msg, files);
        }
    }
    true
}

/// The files that came with a message.
fn received_files(control: &mut RecvAncillaryBuffer<'_>) -> Vec<OwnedFd> {
    let rights = control.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(rights) => Some(rights),
        _ => None,
    });
    rights.flatten().collect()
}

#[cfg(test)]
mod tests {
    use rustix::net::{AddressFamily, SocketType};

    use super::*;

    #[test]
    fn control_messages_carry_files_and_other_bytes_are_skipped() {
        let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
        let (near, far) =
            rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, flags, None)
                .unwrap();
        let msg = ControlMsg { kind: 2, key: 0x1234_5678, word: u64::MAX - 7 };
        assert!(wake(&near));
        assert!(msg.send(&near, &[]));
        let file: OwnedFd = tempfile::tempfile().unwrap().into();
        assert!(msg.send(&near, &[file.as_fd()]));
        assert!(msg.send(&near, &[file.as_fd(); MAX_FILES]));
        assert!(!msg.send(&near, &[file.as_fd(); MAX_FILES + 1]));
        for invalid in [&[7; 15][..], &[7; 17], &[7; 400]] {
            rustix::net::send(&near, invalid, SendFlags::empty()).unwrap();
        }
        let mut got = Vec::new();
        assert!(read(&far, |msg, files| got.push((msg, files.len()))));
        assert_eq!(got, [(msg, 0), (msg, 1), (msg, MAX_FILES)]);
        // A child that another test starts may have a copy for a moment.
        rustix::net::shutdown(&near, rustix::net::Shutdown::Both).unwrap();
        assert!(!read(&far, |msg, _| panic!("{msg:?}")));
    }

    #[test]
    fn a_hello_round_trips() {
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
