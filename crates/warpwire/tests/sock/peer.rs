//! The test's end of a connection: an ordinary socket, or a `warp` socket in this process.

use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

use rustix::net::sockopt;
use warpwire::sock::warp;

use crate::sock::scripted::test_timeout;

/// The family of the sockets of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Inet,
    Warp,
}

impl Family {
    /// Connects to a kernel that listens at `name`.
    pub fn dial(self, name: SocketAddr) -> Peer {
        match self {
            Self::Inet => Peer::Tcp(TcpStream::connect(name).unwrap()),
            Self::Warp => Peer::Warp(warp::WarpStream::connect(name).unwrap()),
        }
        .with_timeouts()
    }

    /// Listens for a kernel.
    pub fn serve(self, at: SocketAddr) -> Server {
        match self {
            Self::Inet => Server::Tcp(TcpListener::bind(at).unwrap()),
            Self::Warp => Server::Warp(warp::WarpListener::bind(at).unwrap()),
        }
    }
}

pub enum Server {
    Tcp(TcpListener),
    Warp(warp::WarpListener),
}

impl Server {
    pub fn accept(&self) -> Peer {
        match self {
            Self::Tcp(server) => Peer::Tcp(server.accept().unwrap().0),
            Self::Warp(server) => Peer::Warp(server.accept().unwrap().0),
        }
        .with_timeouts()
    }

    pub fn local_addr(&self) -> SocketAddr {
        match self {
            Self::Tcp(server) => server.local_addr().unwrap(),
            Self::Warp(server) => server.local_addr().unwrap(),
        }
    }
}

pub enum Peer {
    Tcp(TcpStream),
    Warp(warp::WarpStream),
}

impl Peer {
    fn with_timeouts(self) -> Self {
        if let Self::Tcp(peer) = &self {
            peer.set_nodelay(true).unwrap();
        }
        self.set_read_timeout(test_timeout());
        self
    }

    pub fn set_read_timeout(&self, limit: Duration) {
        match self {
            Self::Tcp(peer) => peer.set_read_timeout(Some(limit)).unwrap(),
            Self::Warp(peer) => peer.set_read_timeout(Some(limit)).unwrap(),
        }
    }

    pub fn try_clone(&self) -> Self {
        match self {
            Self::Tcp(peer) => Self::Tcp(peer.try_clone().unwrap()),
            Self::Warp(peer) => Self::Warp(peer.try_clone().unwrap()),
        }
    }

    pub fn shutdown(&self, how: Shutdown) {
        match self {
            Self::Tcp(peer) => peer.shutdown(how).unwrap(),
            Self::Warp(peer) => peer.shutdown(how).unwrap(),
        }
    }

    pub fn local_addr(&self) -> SocketAddr {
        match self {
            Self::Tcp(peer) => peer.local_addr().unwrap(),
            Self::Warp(peer) => peer.local_addr().unwrap(),
        }
    }

    pub fn peer_addr(&self) -> SocketAddr {
        match self {
            Self::Tcp(peer) => peer.peer_addr().unwrap(),
            Self::Warp(peer) => peer.peer_addr().unwrap(),
        }
    }

    /// Resets the connection.
    pub fn reset(self) {
        match self {
            Self::Tcp(peer) => {
                sockopt::set_socket_linger(&peer, Some(Duration::ZERO)).unwrap();
            }
            Self::Warp(peer) => peer.reset(),
        }
    }
}

impl Read for Peer {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(peer) => peer.read(into),
            Self::Warp(peer) => peer.read(into),
        }
    }
}

impl Write for Peer {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Self::Tcp(peer) => peer.write(from),
            Self::Warp(peer) => peer.write(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match self {
            Self::Tcp(peer) => peer.flush(),
            Self::Warp(peer) => peer.flush(),
        }
    }
}
