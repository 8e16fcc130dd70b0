//! The programs for the simulated GPU: equivalents of programs.cu.

use std::time::Instant;

use rustix::io::Errno;
use warpwire::mem::DeviceAddr;
use warpwire::mem::sim::{Block, KernelFault};
use warpwire::sock::device::{
    Family, ShutdownHow, Sock, SockError, SockOption, SockResult, SocketKind, Sockets,
};
use warpwire::sock::layout::{address_bytes, address_from};

use super::{Setup, control};

struct Actor<'a> {
    block: &'a Block<'a>,
    setup: Setup,
    sockets: Sockets<'a>,
}

impl<'a> Actor<'a> {
    fn new(block: &'a Block<'a>) -> Result<Self, KernelFault> {
        let setup = Setup::read(block)?;
        let sockets = Sockets::open(block, DeviceAddr::new(setup.table))?;
        Ok(Self { block, setup, sockets })
    }

    fn control(&self, word: u64) -> DeviceAddr {
        DeviceAddr::new(self.setup.control + word)
    }

    fn stopped(&self) -> Result<bool, KernelFault> {
        Ok(self.block.load_u64(self.control(control::STOP))? != 0)
    }

    fn stream(&self) -> SockResult<(Sock, std::net::SocketAddr)> {
        let address = address_from(&self.setup.address).ok_or(Errno::AFNOSUPPORT)?;
        let family = if address.is_ipv6() { Family::V6 } else { Family::V4 };
        let warp = self.setup.kind == SocketKind::WarpStream as u64;
        let kind = if warp { SocketKind::WarpStream } else { SocketKind::Stream };
        Ok((self.sockets.socket(family, kind)?, address))
    }

    fn open_listener(&self) -> SockResult<Sock> {
        let (listener, address) = self.stream()?;
        self.sockets.bind(listener, address)?;
        self.sockets.listen(listener, 256)?;
        self.sockets.set(listener, SockOption::ReceiveTimeout, self.setup.timeout as i64)?;
        let name = address_bytes(Some(self.sockets.local_name(listener)?));
        self.block.write(self.control(control::NAME), &name)?;
        Ok(listener)
    }

    /// The listener, which the first worker opens and the others wait for.
    fn listener(&self) -> Result<Option<Sock>, KernelFault> {
        if self.block.index() == 0 {
            return match self.open_listener() {
                Ok(listener) => {
                    let published = listener.raw() as u64 + 1;
                    self.block.store_u64(self.control(control::LISTENER), published)?;
                    Ok(Some(listener))
                }
                Err(failure) => self.failed(failure).map(|()| None),
            };
        }
        let mut listener = 0;
        self.block.spin_until(|| {
            listener = self.block.load_u64(self.control(control::LISTENER))?;
            let failed = self.block.load_u64(self.control(control::FAILED))?;
            Ok(listener != 0 || failed != 0 || self.stopped()?)
        })?;
        Ok((listener != 0).then(|| Sock::from_raw(listener as i32 - 1)))
    }

    fn failed(&self, failure: SockError) -> Result<(), KernelFault> {
        match failure {
            SockError::Errno(errno) => {
                self.block.store_u64(self.control(control::FAILED), errno.raw_os_error() as u64)
            }
            SockError::KernelFault(fault) => Err(fault),
        }
    }

    fn serve_one(&self, peer: Sock) -> SockResult<()> {
        if self.setup.mode == super::Mode::Http as u64 {
            self.sockets.set(peer, SockOption::ReceiveTimeout, 5_000_000_000)?;
            return self.answer_http(peer);
        }
        self.sockets.set(peer, SockOption::ReceiveTimeout, self.setup.timeout as i64)?;
        let mut buffer = vec![0; self.setup.buffer_size as usize];
        loop {
            let count = match self.sockets.recv(peer, &mut buffer) {
                Err(SockError::Errno(Errno::TIMEDOUT)) if !self.stopped()? => continue,
                outcome => outcome?,
            };
            if count == 0 {
                if self.setup.mode == super::ServerKind::Sink as u64 {
                    self.sockets.send(peer, &[1])?;
                }
                return Ok(());
            }
            if self.setup.mode == super::Mode::Echo as u64 {
                self.sockets.send(peer, &buffer[..count])?;
            }
        }
    }

    /// Reads a request up to its empty line, then replies.
    fn answer_http(&self, peer: Sock) -> SockResult<()> {
        let mut request = vec![0; self.setup.buffer_size as usize / 2];
        let mut have = 0;
        let is_whole = |bytes: &[u8]| bytes.windows(4).any(|part| part == b"\r\n\r\n");
        while have < request.len() && !is_whole(&request[..have]) {
            match self.sockets.recv(peer, &mut request[have..])? {
                0 => return Ok(()),
                count => have += count,
            }
        }
        let status = match is_whole(&request[..have]) {
            true => "200 OK\r\nContent-Type: text/plain",
            false => "431 Request Header Fields Too Large",
        };
        let body = "hello from a kernel\n";
        let answer = format!(
            "HTTP/1.1 {status}\r\nConnection: close\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        self.sockets.send(peer, answer.as_bytes()).map(|_| ())
    }

    fn measure(&self, peer: Sock, bytes: &mut u64) -> SockResult<()> {
        use super::Mode;
        let setup = &self.setup;
        let is = |mode: Mode| setup.mode == mode as u64;
        if is(Mode::Talk) {
            return self.talk(peer, bytes);
        }
        let mut buffer = vec![0; setup.size as usize];
        for _ in 0..setup.rounds {
            if is(Mode::Ping) || is(Mode::Push) {
                // From and to device memory, as a kernel does.
                self.block.read(DeviceAddr::new(setup.buffers), &mut buffer)?;
                *bytes += self.sockets.send(peer, &buffer)? as u64;
            }
            if is(Mode::Ping) || is(Mode::Pull) {
                if self.sockets.recv_all(peer, &mut buffer)? < buffer.len() {
                    return Err(Errno::PIPE.into());
                }
                self.block.write(DeviceAddr::new(setup.buffers), &buffer)?;
                *bytes += if is(Mode::Pull) { setup.size } else { 0 };
            }
        }
        if is(Mode::Push) {
            self.sockets.shutdown(peer, ShutdownHow::Send)?;
            if self.sockets.recv_all(peer, &mut [0])? != 1 {
                return Err(Errno::PIPE.into());
            }
        }
        Ok(())
    }

    /// Sends a request and receives everything until the peer closes.
    fn talk(&self, peer: Sock, bytes: &mut u64) -> SockResult<()> {
        let mut buffer = vec![0; self.setup.buffer_size as usize];
        let question = &mut buffer[..self.setup.size as usize];
        self.block.read(DeviceAddr::new(self.setup.buffers), question)?;
        self.sockets.send(peer, question)?;
        let count = self.sockets.recv_all(peer, &mut buffer)?;
        self.block.write(DeviceAddr::new(self.setup.buffers), &buffer[..count])?;
        *bytes = count as u64;
        Ok(())
    }

    fn client(&self, nanoseconds: &mut u64, bytes: &mut u64) -> SockResult<()> {
        let (peer, address) = self.stream()?;
        self.sockets.set(peer, SockOption::ReceiveTimeout, self.setup.timeout as i64)?;
        self.sockets.set(peer, SockOption::SendTimeout, self.setup.timeout as i64)?;
        let outcome = self.sockets.connect(peer, address).and_then(|()| {
            let begun = Instant::now();
            let outcome = self.measure(peer, bytes);
            *nanoseconds = begun.elapsed().as_nanos() as u64;
            outcome
        });
        self.sockets.close(peer)?;
        outcome
    }
}

pub(super) fn serve_block(block: &Block<'_>) -> Result<(), KernelFault> {
    let actor = Actor::new(block)?;
    let Some(listener) = actor.listener()? else { return Ok(()) };
    while !actor.stopped()? {
        let peer = match actor.sockets.accept(listener) {
            Ok((peer, _)) => peer,
            Err(SockError::Errno(Errno::TIMEDOUT | Errno::AGAIN)) => continue,
            Err(SockError::Errno(_)) => return Ok(()),
            Err(SockError::KernelFault(fault)) => return Err(fault),
        };
        // Errors of one connection do not stop the server.
        for outcome in [actor.serve_one(peer), actor.sockets.close(peer)] {
            if let Err(SockError::KernelFault(fault)) = outcome {
                return Err(fault);
            }
        }
    }
    if block.index() == 0
        && let Err(SockError::KernelFault(fault)) = actor.sockets.close(listener)
    {
        return Err(fault);
    }
    Ok(())
}

pub(super) fn client_block(block: &Block<'_>) -> Result<(), KernelFault> {
    let actor = Actor::new(block)?;
    let (mut nanoseconds, mut bytes) = (0, 0);
    let outcome = actor.client(&mut nanoseconds, &mut bytes);
    block.store_u64(actor.control(control::NANOSECONDS), nanoseconds)?;
    block.store_u64(actor.control(control::BYTES), bytes)?;
    if let Err(failure) = outcome {
        actor.failed(failure)?;
    }
    block.store_u64(actor.control(control::DONE), 1)
}
