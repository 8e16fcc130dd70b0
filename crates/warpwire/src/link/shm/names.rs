//! Names of the sockets on which links listen: after the link's address, in the abstract namespace
//! or in a directory.
//!
//! The abstract namespace belongs to the network namespace, as the address does: processes that
//! share one share the other, nothing is left behind in a file system, and a name is free as soon
//! as its owner exits.
//!
//! Containers with a network namespace each share a directory instead ([`ShmOptions::directory`]).
//! Only addresses that belong to one of them have names there: every network namespace has its own
//! loopback, link-local and unspecified addresses.
//!
//! [`ShmOptions::directory`]: super::ShmOptions::directory

use std::fs;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{FlockOperation, Mode, OFlags};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::handshake::VERSION;

const FLAGS: SocketFlags = SocketFlags::CLOEXEC.union(SocketFlags::NONBLOCK);
/// Maximum number of connections that wait to be accepted; the kernel may allow fewer.
const BACKLOG: i32 = 1024;
/// The longest path of a directory: the kernel's limit of 107 bytes for a socket's path, less the
/// name of a file.
pub(super) const MAX_DIRECTORY_LEN: usize = 50;

/// The namespace of a link's name. A UDP socket may have the same address as a shared-memory-only
/// link of another process: the two are unrelated. So a link that belongs to a UDP socket has a
/// name in a separate namespace, which only the owner of the UDP port binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Namespace {
    Shm,
    Auto,
}

impl Namespace {
    fn prefix(self) -> &'static str {
        match self {
            Self::Shm => "shm",
            Self::Auto => "auto",
        }
    }

    fn abstract_name(self, address: SocketAddr) -> io::Result<SocketAddrUnix> {
        let text = format!("warpwire {} {VERSION} {}", self.prefix(), without_flowinfo(address));
        Ok(SocketAddrUnix::new_abstract_name(text.as_bytes())?)
    }

    fn file(self, directory: &Path, address: SocketAddr) -> PathBuf {
        directory.join(format!("{}-{VERSION}-{}", self.prefix(), without_flowinfo(address)))
    }

    /// The order in which namespaces are searched: the link's own first.
    fn search_order(self) -> [Self; 2] {
        match self {
            Self::Shm => [Self::Shm, Self::Auto],
            Self::Auto => [Self::Auto, Self::Shm],
        }
    }
}

/// Where a link listens and looks for peers.
#[derive(Debug)]
pub(super) struct Names {
    namespace: Namespace,
    directory: Option<PathBuf>,
}

/// A listening socket; its file, if it has one, is removed with it.
#[derive(Debug)]
pub(super) struct Listener {
    pub(super) socket: OwnedFd,
    file: Option<PathBuf>,
}

impl Drop for Listener {
    fn drop(&mut self) {
        if let Some(file) = &self.file {
            let _ = fs::remove_file(file);
        }
    }
}

impl Names {
    pub(super) fn new(namespace: Namespace, directory: Option<&Path>) -> Self {
        Self { namespace, directory: directory.map(Path::to_owned) }
    }

    /// A socket that peers connect to under this address.
    pub(super) fn listen(&self, address: SocketAddr) -> io::Result<Listener> {
        let socket = unix_socket()?;
        let directory = self.directory_of(address);
        let file = directory.map(|at| self.namespace.file(at, address));
        let _alone = directory.and_then(lock);
        match &file {
            None => rustix::net::bind(&socket, &self.namespace.abstract_name(address)?)?,
            Some(file) => bind_file(&socket, file)?,
        }
        // A peer that connects before this is refused, as if nobody had the address.
        let listener = Listener { socket, file };
        rustix::net::listen(&listener.socket, BACKLOG)?;
        Ok(listener)
    }

    /// Connects from `local` to the link with this address, or with the unspecified address and
    /// the same port, in one namespace or in all; returns which.
    pub(super) fn connect(
        &self,
        local: SocketAddr,
        peer: SocketAddr,
        only: Option<Namespace>,
    ) -> io::Result<(OwnedFd, Namespace)> {
        let socket = unix_socket()?;
        let order = self.namespace.search_order();
        let namespaces = only.as_ref().map_or(&order[..], std::slice::from_ref);
        let files = self.files(local, peer, namespaces);
        for (namespace, file) in &files {
            match rustix::net::connect(&socket, &SocketAddrUnix::new(file)?) {
                Ok(()) => return Ok((socket, *namespace)),
                Err(Errno::CONNREFUSED | Errno::NOENT) => {}
                Err(code) => return Err(code.into()),
            }
        }
        if !files.is_empty() {
            return Err(Errno::CONNREFUSED.into()); // the address belongs to a process that exited
        }
        let every: IpAddr = match peer {
            SocketAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            SocketAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        };
        for namespace in namespaces {
            for address in [peer, SocketAddr::new(every, peer.port())] {
                match rustix::net::connect(&socket, &namespace.abstract_name(address)?) {
                    Ok(()) => return Ok((socket, *namespace)),
                    Err(Errno::CONNREFUSED) => {}
                    Err(code) => return Err(code.into()),
                }
            }
        }
        Err(Errno::CONNREFUSED.into())
    }

    /// Whether the directory has a file for this peer of `local`.
    pub(super) fn has_file(&self, local: SocketAddr, peer: SocketAddr) -> bool {
        !self.files(local, peer, &self.namespace.search_order()).is_empty()
    }

    /// The files of the directory under which `local` finds this peer.
    fn files(
        &self,
        local: SocketAddr,
        peer: SocketAddr,
        namespaces: &[Namespace],
    ) -> Vec<(Namespace, PathBuf)> {
        // A peer in another network namespace cannot answer to a loopback or unspecified address.
        let Some(directory) = self.directory_of(local).and(self.directory_of(peer)) else {
            return Vec::new();
        };
        let named = |namespace: &Namespace| (*namespace, namespace.file(directory, peer));
        let exists = |(_, file): &(Namespace, PathBuf)| file.symlink_metadata().is_ok();
        namespaces.iter().map(named).filter(exists).collect()
    }

    /// The directory, if an address has a name there.
    fn directory_of(&self, address: SocketAddr) -> Option<&Path> {
        let every_namespace_has_it = match address.ip().to_canonical() {
            IpAddr::V4(v4) => v4.is_loopback() || v4.is_unspecified() || v4.is_link_local(),
            IpAddr::V6(v6) => v6.is_loopback() || v6.is_unspecified() || v6.is_unicast_link_local(),
        };
        self.directory.as_deref().filter(|_| !every_namespace_has_it)
    }
}

fn unix_socket() -> rustix::io::Result<OwnedFd> {
    rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, FLAGS, None)
}

/// Locks a directory until the result is dropped: another process must not take the file of a
/// socket that is bound, but does not listen yet, for that of a killed one. `None` if it cannot be
/// locked, or if a process has been stopped while it had the lock.
fn lock(directory: &Path) -> Option<OwnedFd> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let directory = rustix::fs::open(directory, flags, Mode::empty()).ok()?;
    for _ in 0..1000 {
        match rustix::fs::flock(&directory, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => return Some(directory),
            Err(Errno::WOULDBLOCK) => std::thread::sleep(Duration::from_millis(1)),
            Err(_) => return None,
        }
    }
    None
}

/// Binds a socket to a file, in place of one that a killed process left behind.
fn bind_file(socket: &OwnedFd, file: &Path) -> io::Result<()> {
    let name = SocketAddrUnix::new(file)?;
    for _ in 0..2 {
        match rustix::net::bind(socket, &name) {
            Err(Errno::ADDRINUSE) => {}
            result => return Ok(result?),
        }
        match rustix::net::connect(unix_socket()?, &name) {
            Err(Errno::CONNREFUSED) => fs::remove_file(file)?,
            Err(Errno::NOENT) => {}
            _ => break, // somebody listens
        }
    }
    Err(Errno::ADDRINUSE.into())
}

/// Clears the flow label, which is not part of an address.
fn without_flowinfo(address: SocketAddr) -> SocketAddr {
    match address {
        SocketAddr::V4(_) => address,
        SocketAddr::V6(v6) => SocketAddrV6::new(*v6.ip(), v6.port(), 0, v6.scope_id()).into(),
    }
}

/// Binds a free UDP port of the address, so that no UDP socket gets the same name; `None` if the
/// address does not belong to this machine. The socket is never read, and its receive buffer is
/// minimal.
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
