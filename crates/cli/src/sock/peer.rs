//! The other end: ordinary sockets of the CPU.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread::JoinHandle;

use crate::output::Failure;

/// What the other end does with its one connection.
#[derive(Clone, Copy)]
pub(super) enum Role {
    /// Sends back whatever comes.
    Echo,
    /// Takes everything, then sends one byte.
    Sink,
    /// Sends so many bytes.
    Source(u64),
}

/// A peer on the loopback interface, in a thread.
pub(super) struct Peer {
    pub(super) address: SocketAddr,
    thread: JoinHandle<std::io::Result<()>>,
}

impl Peer {
    pub(super) fn start(role: Role, piece: usize) -> Result<Self, Failure> {
        let broken = |error: std::io::Error| Failure::Broken(format!("cannot listen: {error}"));
        let listener = TcpListener::bind("127.0.0.1:0").map_err(broken)?;
        let address = listener.local_addr().map_err(broken)?;
        let thread = std::thread::spawn(move || serve(&listener, role, piece));
        Ok(Self { address, thread })
    }

    pub(super) fn finish(self) -> Result<(), Failure> {
        match self.thread.join() {
            Ok(Ok(())) => Ok(()),
            Ok(Err(error)) => Err(Failure::Broken(format!("the CPU's end failed: {error}"))),
            Err(_) => Err(Failure::Broken("the CPU's end stopped".to_owned())),
        }
    }
}

fn serve(listener: &TcpListener, role: Role, piece: usize) -> std::io::Result<()> {
    let (mut stream, _) = listener.accept()?;
    stream.set_nodelay(true)?;
    let mut buffer = vec![0; piece.max(4096)];
    match role {
        Role::Echo => loop {
            match stream.read(&mut buffer) {
                Ok(0) => return Ok(()),
                Ok(count) => stream.write_all(&buffer[..count])?,
                Err(error) if error.kind() == ErrorKind::ConnectionReset => return Ok(()),
                Err(error) => return Err(error),
            }
        },
        Role::Sink => {
            while stream.read(&mut buffer)? > 0 {}
            stream.write_all(&[1])
        }
        Role::Source(total) => {
            let mut left = total;
            while left > 0 {
                let part = left.min(buffer.len() as u64) as usize;
                stream.write_all(&buffer[..part])?;
                left -= part as u64;
            }
            // Until the other side closes.
            while stream.read(&mut buffer).is_ok_and(|count| count > 0) {}
            Ok(())
        }
    }
}

/// A connection of the CPU's own to a peer.
pub(super) fn connect(address: SocketAddr) -> Result<TcpStream, Failure> {
    let stream = TcpStream::connect(address).and_then(|stream| {
        stream.set_nodelay(true)?;
        Ok(stream)
    });
    stream.map_err(|error| Failure::Broken(format!("cannot connect to {address}: {error}")))
}
