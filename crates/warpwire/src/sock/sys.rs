//! Sends and receives with the bytes in a ring (scatter-gather I/O). The only unsafe code of the
//! sockets.
//!
//! Kernels may change a ring at any time, so there are no references to its bytes, which
//! `std::io::IoSlice` would need: the operating system gets their addresses. It copies during the
//! call and keeps none.
#![allow(unsafe_code)]

use std::mem::{size_of, zeroed};
use std::net::SocketAddr;
use std::os::fd::{AsRawFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{RecvFlags, SendFlags, SocketAddrAny};

use crate::mem::SharedBytes;

/// The bytes of a ring between two counters: up to its end, and from its start.
pub(super) type RingParts<'a> = [SharedBytes<'a>; 2];

fn iovecs(parts: RingParts<'_>) -> [libc::iovec; 2] {
    parts.map(|part| libc::iovec {
        iov_base: part.base().as_ptr().cast(),
        iov_len: part.len() as usize,
    })
}

fn message(iovecs: &mut [libc::iovec; 2]) -> libc::msghdr {
    // SAFETY: a plain structure, for which zeroes mean: no name, no buffers, no control bytes.
    let mut message: libc::msghdr = unsafe { zeroed() };
    (message.msg_iov, message.msg_iovlen) = (iovecs.as_mut_ptr(), iovecs.len() as _);
    message
}

/// The result of a call that returns a negative number on failure.
fn checked(count: isize) -> Result<usize, Errno> {
    usize::try_from(count).map_err(|_| {
        let error = std::io::Error::last_os_error();
        Errno::from_io_error(&error).unwrap_or(Errno::IO)
    })
}

/// Sends bytes of a ring: as many as possible of a stream, or all as one datagram, to `to` or to
/// the connected peer. Does not block.
pub(super) fn send(
    fd: &OwnedFd,
    parts: RingParts<'_>,
    to: Option<SocketAddr>,
) -> Result<usize, Errno> {
    let mut iovecs = iovecs(parts);
    let mut message = message(&mut iovecs);
    let name = to.map(SocketAddrAny::from);
    if let Some(name) = &name {
        // The call does not write to it.
        (message.msg_name, message.msg_namelen) =
            (name.as_ptr().cast_mut().cast(), name.addr_len());
    }
    let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
    // SAFETY: the views' memory is mapped during the call, as is `name`; the lengths are theirs.
    checked(unsafe { libc::sendmsg(fd.as_raw_fd(), &raw const message, flags.bits() as i32) })
}

/// Receives into a ring, with the sender's address if the socket has datagrams. Does not block.
pub(super) fn receive(
    fd: &OwnedFd,
    parts: RingParts<'_>,
    flags: RecvFlags,
) -> Result<(usize, Option<SocketAddr>), Errno> {
    let mut iovecs = iovecs(parts);
    let mut message = message(&mut iovecs);
    // SAFETY: a plain structure.
    let mut name: libc::sockaddr_storage = unsafe { zeroed() };
    message.msg_name = (&raw mut name).cast();
    message.msg_namelen = size_of::<libc::sockaddr_storage>() as u32;
    let flags = (flags | RecvFlags::DONTWAIT).bits() as i32;
    // SAFETY: the views' memory is mapped and writable during the call, as is `name`; the lengths
    // are theirs. Views permit other writers.
    let count = checked(unsafe { libc::recvmsg(fd.as_raw_fd(), &raw mut message, flags) })?;
    let has_name = message.msg_namelen as usize >= size_of::<libc::sa_family_t>();
    let from = has_name.then(|| {
        // SAFETY: the call has written that many bytes of an address.
        unsafe { SocketAddrAny::read((&raw const name).cast(), message.msg_namelen) }
    });
    Ok((count, from.and_then(|from| SocketAddr::try_from(from).ok())))
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::net::{TcpListener, TcpStream, UdpSocket};

    use super::*;
    use crate::mem::Allocation;
    use crate::mem::sim::{Sim, SimConfig};

    fn memory() -> Allocation {
        let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
        gpu.alloc_pinned(4096).unwrap()
    }

    fn parts<'a>(bytes: &SharedBytes<'a>, first: (u64, u64), second: (u64, u64)) -> RingParts<'a> {
        [bytes.slice(first.0, first.1).unwrap(), bytes.slice(second.0, second.1).unwrap()]
    }

    #[test]
    fn both_parts_of_a_stream_are_moved_in_order() {
        let server = TcpListener::bind("127.0.0.1:0").unwrap();
        let ours = TcpStream::connect(server.local_addr().unwrap()).unwrap();
        let (mut peer, _) = server.accept().unwrap();
        let fd = OwnedFd::from(ours);
        let memory = memory();
        let bytes = memory.host_bytes().unwrap();
        bytes.write(4090, b"before").unwrap();
        bytes.write(0, b"after").unwrap();
        assert_eq!(send(&fd, parts(&bytes, (4090, 6), (0, 5)), None), Ok(11));
        let mut text = [0; 11];
        peer.read_exact(&mut text).unwrap();
        assert_eq!(&text, b"beforeafter");
        let into = parts(&bytes, (4092, 4), (0, 100));
        assert_eq!(receive(&fd, into, RecvFlags::empty()), Err(Errno::AGAIN));
        peer.write_all(b"answers").unwrap();
        testkit::until("the answer arrives", || {
            receive(&fd, into, RecvFlags::PEEK).is_ok_and(|(count, _)| count == 7)
        });
        assert_eq!(receive(&fd, into, RecvFlags::empty()), Ok((7, None)));
        let mut text = [0; 7];
        bytes.read(4092, &mut text[..4]).unwrap();
        bytes.read(0, &mut text[4..]).unwrap();
        assert_eq!(&text, b"answers");
        drop(peer);
        testkit::until("the end arrives", || {
            receive(&fd, into, RecvFlags::empty()) == Ok((0, None))
        });
    }

    #[test]
    fn datagrams_have_addresses_and_are_not_split() {
        let [ours, peer] = [0, 1].map(|_| UdpSocket::bind("127.0.0.1:0").unwrap());
        let name = ours.local_addr().unwrap();
        let fd = OwnedFd::from(ours);
        let memory = memory();
        let bytes = memory.host_bytes().unwrap();
        bytes.write(100, b"one").unwrap();
        let one = parts(&bytes, (100, 3), (0, 0));
        assert_eq!(send(&fd, one, None), Err(Errno::DESTADDRREQ));
        assert_eq!(send(&fd, one, peer.local_addr().ok()), Ok(3));
        let mut text = [0; 8];
        assert_eq!(peer.recv_from(&mut text).unwrap(), (3, name));
        peer.send_to(b"longer than the parts", name).unwrap();
        let into = parts(&bytes, (0, 4), (8, 4));
        let mut outcome = Err(Errno::AGAIN);
        testkit::until("the datagram arrives", || {
            outcome = receive(&fd, into, RecvFlags::TRUNC);
            outcome != Err(Errno::AGAIN)
        });
        assert_eq!(outcome, Ok((21, peer.local_addr().ok())), "the whole length");
        bytes.read(8, &mut text[..4]).unwrap();
        assert_eq!(&text[..4], b"er t");
        assert_eq!(receive(&fd, into, RecvFlags::empty()), Err(Errno::AGAIN), "one datagram");
    }
}
