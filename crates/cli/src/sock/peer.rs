//! CPU sockets of either family, and peers that run on a CPU thread.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::OnceLock;
use std::thread::JoinHandle;
use std::time::Duration;

use clap::ValueEnum;
use warpwire::mem::Device;
use warpwire::sock::device::SocketKind;
use warpwire::sock::warp;

use super::device_copy::{self, DeviceCopy};
use crate::output::Failure;

/// Socket family.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Family {
    /// TCP through the host: the peer is any program
    Inet,
    /// RDMA between the two rings: the peer is a kernel or a program that uses this library
    Warp,
}

impl Family {
    pub(super) fn kind(self) -> SocketKind {
        match self {
            Self::Inet => SocketKind::Stream,
            Self::Warp => SocketKind::WarpStream,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Inet => "inet",
            Self::Warp => "warp",
        }
    }

    /// Connects from the CPU.
    pub(super) fn connect(self, address: SocketAddr) -> Result<Connection, Failure> {
        let connected = match self {
            Self::Inet => tcp(address).map(Connection::Tcp),
            Self::Warp => shared_net()?.connect(address).map(Connection::Warp),
        };
        connected.map_err(|error| Failure::Runtime(format!("cannot connect to {address}: {error}")))
    }
}

/// The [`warp::Net`] shared by connecting sockets. Listeners use another one, as a separate program
/// would.
fn shared_net() -> Result<warp::Net, Failure> {
    static NET: OnceLock<warp::Net> = OnceLock::new();
    if let Some(net) = NET.get() {
        return Ok(net.clone());
    }
    let net = warp::Net::new(warp::NetOptions::default())?;
    Ok(NET.get_or_init(|| net).clone())
}

fn tcp(address: SocketAddr) -> io::Result<TcpStream> {
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

/// Connects by TCP, with `TCP_NODELAY`.
pub(super) fn connect(address: SocketAddr) -> Result<TcpStream, Failure> {
    tcp(address).map_err(|error| Failure::Runtime(format!("cannot connect to {address}: {error}")))
}

/// A connected CPU socket.
pub(super) enum Connection {
    Tcp(TcpStream),
    Warp(warp::WarpStream),
}

impl Connection {
    /// Sets the timeout of each read and write.
    pub(super) fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        let timeout = Some(timeout);
        match self {
            Self::Tcp(stream) => {
                stream.set_read_timeout(timeout).and_then(|()| stream.set_write_timeout(timeout))
            }
            Self::Warp(stream) => {
                stream.set_read_timeout(timeout).and_then(|()| stream.set_write_timeout(timeout))
            }
        }
    }

    pub(super) fn shutdown(&self, how: Shutdown) -> io::Result<()> {
        match self {
            Self::Tcp(stream) => stream.shutdown(how),
            Self::Warp(stream) => stream.shutdown(how),
        }
    }
}

impl Read for &Connection {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            Connection::Tcp(stream) => (&mut &*stream).read(into),
            Connection::Warp(stream) => (&mut &*stream).read(into),
        }
    }
}

impl Write for &Connection {
    fn write(&mut self, from: &[u8]) -> io::Result<usize> {
        match self {
            Connection::Tcp(stream) => (&mut &*stream).write(from),
            Connection::Warp(stream) => (&mut &*stream).write(from),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What a peer does with its one connection.
#[derive(Clone, Copy)]
pub(super) enum Role {
    /// Sends back what it receives.
    Echo,
    /// Receives until the client shuts down writing, then sends one byte.
    Sink,
    /// Sends this many bytes.
    Source(u64),
}

pub(super) enum Listener {
    Tcp(TcpListener),
    Warp(warp::WarpListener),
}

impl Listener {
    pub(super) fn bind(family: Family, at: SocketAddr) -> io::Result<(Self, SocketAddr)> {
        match family {
            Family::Inet => {
                let listener = TcpListener::bind(at)?;
                let address = listener.local_addr()?;
                Ok((Self::Tcp(listener), address))
            }
            Family::Warp => {
                let listener = warp::WarpListener::bind(at)?;
                let address = listener.local_addr()?;
                Ok((Self::Warp(listener), address))
            }
        }
    }

    pub(super) fn accept(&self) -> io::Result<Connection> {
        match self {
            Self::Tcp(listener) => {
                let (stream, _) = listener.accept()?;
                stream.set_nodelay(true)?;
                Ok(Connection::Tcp(stream))
            }
            Self::Warp(listener) => Ok(Connection::Warp(listener.accept()?.0)),
        }
    }
}

/// A peer on the loopback interface, in its own thread.
pub(super) struct CpuPeer {
    pub(super) address: SocketAddr,
    thread: JoinHandle<io::Result<()>>,
}

impl CpuPeer {
    /// Starts a peer. With `device`, received bytes are copied to device memory, and an echo is
    /// copied back from there.
    pub(super) fn start(
        family: Family,
        role: Role,
        chunk: usize,
        device: Option<Device>,
    ) -> Result<Self, Failure> {
        let broken = |error: io::Error| Failure::Runtime(format!("cannot listen: {error}"));
        let any = ([127, 0, 0, 1], 0).into();
        let (listener, address) = Listener::bind(family, any).map_err(broken)?;
        let thread = std::thread::spawn(move || serve(&listener, role, chunk, device));
        Ok(Self { address, thread })
    }

    pub(super) fn finish(self) -> Result<(), Failure> {
        match self.thread.join() {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(Failure::Runtime(format!("the CPU peer failed: {error}"))),
            Err(_) => Err(Failure::Runtime("the CPU peer's thread panicked".to_owned())),
        }
    }
}

fn serve(listener: &Listener, role: Role, chunk: usize, device: Option<Device>) -> io::Result<()> {
    // `DriverCopies` must be created on the thread that uses it.
    let device = device.map(|device| DeviceCopy::new(&device, chunk.max(4096) as u64));
    let device = device.transpose().map_err(device_copy::other)?;
    let device = device.as_ref();
    let connection = listener.accept()?;
    let mut stream = &connection;
    let mut buffer = vec![0; chunk.max(4096)];
    let copy_in = |bytes: &[u8]| device.map_or(Ok(()), |device| device.upload(bytes));
    match role {
        Role::Echo => loop {
            match stream.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(count) => {
                    copy_in(&buffer[..count])?;
                    if let Some(device) = device {
                        device.download(&mut buffer[..count])?;
                    }
                    stream.write_all(&buffer[..count])?;
                }
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(()),
                Err(error) => return Err(error),
            }
        },
        Role::Sink => {
            loop {
                match stream.read(&mut buffer)? {
                    0 => break,
                    count => copy_in(&buffer[..count])?,
                }
            }
            stream.write_all(&[1])
        }
        Role::Source(total) => {
            let mut left = total;
            while left > 0 {
                let chunk_len = left.min(buffer.len() as u64) as usize;
                stream.write_all(&buffer[..chunk_len])?;
                left -= chunk_len as u64;
            }
            // Wait until the client closes.
            while stream.read(&mut buffer).is_ok_and(|count| count > 0) {}
            Ok(())
        }
    }
}
