//! TCP sockets of the connection manager, and its ports.
//!
//! A port space of RDMA is one of its own: a program may listen on one number by TCP and by RDMA.
//! So a port of RDMA stands for another one of TCP, by a fixed distance for each space; ports below
//! 1024 stand for themselves.

use std::net::SocketAddr;
use std::os::fd::OwnedFd;

use rustix::net::sockopt;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use crate::boundary::{INVALID, Result};
use crate::message::Space;

/// The first port that is shifted, and how many there are.
const FIRST: u32 = 1024;
const COUNT: u32 = 65536 - FIRST;

/// Usual ports of RDMA programs stay below Linux's ephemeral ports.
const fn distance(space: Space) -> u32 {
    match space {
        Space::Tcp => 9973,
        Space::Udp => 12289,
    }
}

fn shift(port: u16, distance: u32) -> u16 {
    match u32::from(port).checked_sub(FIRST) {
        Some(above) => (FIRST + (above + distance) % COUNT) as u16,
        None => port,
    }
}

/// The TCP port for a port of RDMA.
pub(crate) fn tcp_port(space: Space, port: u16) -> u16 {
    shift(port, distance(space))
}

/// The port of RDMA for a TCP port.
pub(crate) fn rdma_port(space: Space, port: u16) -> u16 {
    shift(port, COUNT - distance(space))
}

/// A socket that is bound to an address of RDMA; port 0 stands for any.
///
/// # Returns
/// The socket, and its address with the port of RDMA.
pub(crate) fn bind(
    space: Space,
    address: SocketAddr,
    is_v6_only: bool,
) -> Result<(OwnedFd, SocketAddr)> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    let mut at = address;
    if address.port() != 0 {
        // A server that is started again does not wait for old connections.
        sockopt::set_socket_reuseaddr(&socket, true)?;
        at.set_port(tcp_port(space, address.port()));
    }
    if address.is_ipv6() {
        sockopt::set_ipv6_v6only(&socket, is_v6_only)?;
    }
    rustix::net::bind(&socket, &at)?;
    let bound = local(&socket).ok_or(INVALID)?;
    let mut visible = address;
    visible.set_port(rdma_port(space, bound.port()));
    Ok((socket, visible))
}

/// Begins to connect.
pub(crate) fn connect(socket: &OwnedFd, to: SocketAddr) -> Result<()> {
    let mut result = rustix::net::connect(socket, &to);
    if result == Err(rustix::io::Errno::CONNABORTED) {
        // The end of an attempt before, whose error was read from the socket.
        result = rustix::net::connect(socket, &to);
    }
    match result {
        Err(rustix::io::Errno::INPROGRESS | rustix::io::Errno::INTR) => Ok(()),
        result => Ok(result?),
    }
}

pub(crate) fn accept(listener: &OwnedFd) -> Result<(OwnedFd, SocketAddr)> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let (socket, _) = rustix::net::acceptfrom_with(listener, flags)?;
    sockopt::set_tcp_nodelay(&socket, true)?;
    let peer = peer(&socket).ok_or(INVALID)?;
    Ok((socket, peer))
}

pub(crate) fn local(socket: &OwnedFd) -> Option<SocketAddr> {
    rustix::net::getsockname(socket).ok()?.try_into().ok()
}

pub(crate) fn peer(socket: &OwnedFd) -> Option<SocketAddr> {
    rustix::net::getpeername(socket).ok()??.try_into().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_port_has_a_tcp_port_of_its_own() {
        for space in [Space::Tcp, Space::Udp] {
            let mut seen = vec![false; 65536];
            for port in 0..=u16::MAX {
                let tcp = tcp_port(space, port);
                assert_eq!(rdma_port(space, tcp), port);
                assert!(!std::mem::replace(&mut seen[usize::from(tcp)], true), "{port}");
            }
        }
        // rdma-core's examples, perftest, libfabric.
        for port in [7174, 7471, 18515, 20079] {
            assert!(tcp_port(Space::Tcp, port) < 32768, "{port}");
            assert!(tcp_port(Space::Udp, port) < 32768 || port == 20079, "{port}");
        }
    }

    #[test]
    fn a_port_is_bound_once_and_any_is_found() {
        let any: SocketAddr = "127.0.0.1:0".parse().unwrap();
        let (first, at) = bind(Space::Tcp, any, false).unwrap();
        assert_ne!(at.port(), 0);
        assert_eq!(local(&first).unwrap().port(), tcp_port(Space::Tcp, at.port()));
        rustix::net::listen(&first, 1).unwrap();
        assert!(bind(Space::Tcp, at, false).is_err(), "something listens there");
        // An address of another machine.
        assert!(bind(Space::Tcp, "198.51.100.1:0".parse().unwrap(), false).is_err());
    }
}
