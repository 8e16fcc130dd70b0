//! Scripted kernels: they run the commands of a test, call by call.
//!
//! A scripted kernel is a block (or, for the header as C++, a thread) with a mailbox. It runs the
//! command in the mailbox and writes the result. So cases are written once, and the calls are those
//! of the Rust API, of the header as CUDA, or of the header as C++. `scripted.cu` implements the
//! same commands.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use warpwire::mem::sim::{Block, KernelFault};
use warpwire::mem::{Allocation, Device, DeviceAddr};
use warpwire::sock::device::{
    Family, PollEntry, ShutdownHow, Sock, SockError, SockOption, SockResult, SocketKind, Sockets,
};
use warpwire::sock::layout::{ADDRESS_LEN, address_bytes, address_from, events};
use warpwire_apps::pattern;

/// Longer than any successful operation takes.
pub fn test_timeout() -> Duration {
    testkit::deadline(Duration::from_secs(60))
}
/// The PTX that CUDA loads.
pub const PTX: &str = "sock/scripted";
/// Size of a kernel's buffer in bytes.
pub const BUFFER: u64 = 1 << 20;
/// Size of a mailbox in bytes.
pub const MAILBOX: u64 = 256;

/// Offsets in a mailbox.
pub mod mailbox_field {
    pub const NUMBER: u64 = 0;
    pub const DONE: u64 = 8;
    pub const OP: u64 = 16;
    pub const ARGS: u64 = 24;
    pub const RESULT: u64 = 80;
    pub const SECOND: u64 = 88;
    pub const ADDRESS: u64 = 96;
    pub const FOUND: u64 = 120;
}

/// Commands of a scripted kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum KernelOp {
    Socket = 1,
    Bind,
    Listen,
    Accept,
    Connect,
    Send,
    Recv,
    SendTo,
    RecvFrom,
    Poll,
    Shutdown,
    Close,
    Set,
    Get,
    LocalName,
    PeerName,
    Borrow,
    Consume,
    Reserve,
    Commit,
    /// Sends a number of bytes of a pattern, in pieces of random length.
    StreamOut,
    /// Receives a number of bytes and compares them with the pattern.
    StreamIn,
    /// Echoes until the end of the stream.
    Echo,
    /// Echoes on many sockets, with poll, until all have ended.
    EchoMany,
    Stop,
    /// Sends a number of messages to an echo server and compares what it returns; with GPUnet's
    /// calls where the header has them.
    Gpunet,
    /// As [`Gpunet`](Self::Gpunet), with datagrams.
    GpunetDatagrams,
}

/// The header as C++ has one GPUnet table for all threads of this process: one case at a time uses
/// it.
pub static GPUNET: Mutex<()> = Mutex::new(());

/// A pseudo-random number: the lengths of pieces.
pub fn scramble(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

const MISMATCH: i64 = -84; // EILSEQ

/// The command loop, as a block function.
pub fn scripted_block(block: &Block<'_>) -> Result<(), KernelFault> {
    let sockets = Sockets::open(block, block.address(0)?)?;
    let mailbox = block.value(1)? + u64::from(block.index()) * MAILBOX;
    let buffer = block.value(2)? + u64::from(block.index()) * BUFFER;
    let at = DeviceAddr::new;
    let mut last = 0;
    loop {
        block.spin_until(|| Ok(block.load_u64(at(mailbox + mailbox_field::NUMBER))? != last))?;
        last = block.load_u64(at(mailbox + mailbox_field::NUMBER))?;
        let op = block.load_u64(at(mailbox + mailbox_field::OP))?;
        if op == KernelOp::Stop as u64 {
            return block.store_u64(at(mailbox + mailbox_field::DONE), last);
        }
        let mut args = [0; 5];
        for (number, arg) in args.iter_mut().enumerate() {
            *arg = block.load_u64(at(mailbox + mailbox_field::ARGS + number as u64 * 8))?;
        }
        let mut address = [0; ADDRESS_LEN];
        block.read(at(mailbox + mailbox_field::ADDRESS), &mut address)?;
        let one = BlockRunner { block, sockets: &sockets, buffer };
        let (result, second, found) = match one.run(op, args, address_from(&address)) {
            Ok(outcome) => outcome,
            Err(SockError::Errno(errno)) => (-i64::from(errno.raw_os_error()), 0, None),
            Err(SockError::KernelFault(fault)) => {
                // A faulted kernel does not answer any more.
                eprintln!("scripted kernel {} faulted: {fault:?}", block.index());
                return Err(fault);
            }
        };
        block.write(at(mailbox + mailbox_field::FOUND), &address_bytes(found))?;
        block.store_u64(at(mailbox + mailbox_field::SECOND), second)?;
        block.store_u64(at(mailbox + mailbox_field::RESULT), result as u64)?;
        block.store_u64(at(mailbox + mailbox_field::DONE), last)?;
    }
}

type OpResult = (i64, u64, Option<SocketAddr>);

struct BlockRunner<'a> {
    block: &'a Block<'a>,
    sockets: &'a Sockets<'a>,
    buffer: u64,
}

impl BlockRunner<'_> {
    fn run(&self, op: u64, args: [u64; 5], address: Option<SocketAddr>) -> SockResult<OpResult> {
        let sockets = self.sockets;
        let socket = Sock::from_raw(args[0] as u32 as i32);
        let nowhere = SocketAddr::from(([0, 0, 0, 0], 0));
        let to = address.unwrap_or(nowhere);
        let nothing = |_: ()| (0, 0, None);
        let is = |wanted: KernelOp| op == wanted as u64;
        if is(KernelOp::Socket) {
            let family = if args[0] == 6 { Family::V6 } else { Family::V4 };
            let made = sockets.socket_of_kind(family, args[1] as u32);
            return made.map(|made| (i64::from(made.raw()), 0, None));
        } else if is(KernelOp::Bind) {
            return sockets.bind(socket, to).map(nothing);
        } else if is(KernelOp::Listen) {
            return sockets.listen(socket, args[1] as u32).map(nothing);
        } else if is(KernelOp::Accept) {
            return sockets.accept(socket).map(|(made, from)| (i64::from(made.raw()), 0, from));
        } else if is(KernelOp::Connect) {
            return sockets.connect(socket, to).map(nothing);
        } else if is(KernelOp::Poll) {
            return self.poll(args[1], args[2]);
        } else if is(KernelOp::Shutdown) {
            let how =
                [ShutdownHow::Receive, ShutdownHow::Send, ShutdownHow::Both][args[1] as usize % 3];
            return sockets.shutdown(socket, how).map(nothing);
        } else if is(KernelOp::Close) {
            return sockets.close(socket).map(nothing);
        } else if is(KernelOp::Set) {
            let setting = SockOption::from_raw(args[1] as u32).unwrap_or(SockOption::Error);
            return sockets.set(socket, setting, args[2] as i64).map(nothing);
        } else if is(KernelOp::Get) {
            let setting = SockOption::from_raw(args[1] as u32).unwrap_or(SockOption::Error);
            return sockets.get(socket, setting).map(|value| (value, 0, None));
        } else if is(KernelOp::LocalName) {
            return sockets.local_name(socket).map(|name| (0, 0, Some(name)));
        } else if is(KernelOp::PeerName) {
            return sockets.peer_name(socket).map(|name| (0, 0, Some(name)));
        }
        self.transfer(op, args, socket, address)
    }

    fn transfer(
        &self,
        op: u64,
        args: [u64; 5],
        socket: Sock,
        address: Option<SocketAddr>,
    ) -> SockResult<OpResult> {
        let sockets = self.sockets;
        let is = |wanted: KernelOp| op == wanted as u64;
        let mut bytes = vec![0; args[2].min(BUFFER) as usize];
        let here = DeviceAddr::new(self.buffer + args[1]);
        let count = if is(KernelOp::Send) {
            self.block.read(here, &mut bytes)?;
            sockets.send(socket, &bytes)?
        } else if is(KernelOp::SendTo) {
            self.block.read(here, &mut bytes)?;
            sockets.send_to(socket, &bytes, address)?
        } else if is(KernelOp::Recv) {
            let count = sockets.recv(socket, &mut bytes)?;
            self.block.write(here, &bytes[..count])?;
            count
        } else if is(KernelOp::RecvFrom) {
            let (count, from) = sockets.recv_from(socket, &mut bytes)?;
            self.block.write(here, &bytes[..count])?;
            return Ok((count as i64, 0, from));
        } else if is(KernelOp::Borrow) || is(KernelOp::Reserve) {
            let span = match is(KernelOp::Borrow) {
                true => sockets.borrow(socket, args[2])?,
                false => sockets.reserve(socket, args[2])?,
            };
            let mut bytes = vec![0; span.len as usize];
            // A borrowed span is copied out, a reserved one is filled.
            if is(KernelOp::Borrow) && span.len > 0 {
                self.block.read(span.address, &mut bytes)?;
                self.block.write(here, &bytes)?;
            } else if span.len > 0 {
                self.block.read(here, &mut bytes)?;
                self.block.write(span.address, &bytes)?;
            }
            return Ok((span.len as i64, span.address.raw(), None));
        } else if is(KernelOp::Consume) {
            sockets.consume(socket, args[2])?;
            0
        } else if is(KernelOp::Commit) {
            sockets.commit(socket, args[2])?;
            0
        } else if is(KernelOp::StreamOut) {
            return self.stream_out(socket, args[1], args[2], args[3]);
        } else if is(KernelOp::StreamIn) {
            return self.stream_in(socket, args[1], args[2], args[3]);
        } else if is(KernelOp::Echo) {
            return self.echo(socket);
        } else if is(KernelOp::Gpunet) {
            return self.echo_client(args, address);
        } else if is(KernelOp::GpunetDatagrams) {
            return self.datagram_client(args, address);
        } else if is(KernelOp::EchoMany) {
            return self.echo_many(args[1]);
        } else {
            return Ok((-38, 0, None)); // ENOSYS
        };
        Ok((count as i64, 0, None))
    }

    fn poll(&self, count: u64, timeout: u64) -> SockResult<OpResult> {
        let mut bytes = vec![0; count as usize * 8];
        self.block.read(DeviceAddr::new(self.buffer), &mut bytes)?;
        let mut list: Vec<_> = bytes
            .chunks_exact(8)
            .map(|entry| {
                let socket = i32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
                PollEntry::new(Sock::from_raw(socket), u16::from_le_bytes([entry[4], entry[5]]))
            })
            .collect();
        let timeout = (timeout != u64::MAX).then(|| Duration::from_nanos(timeout));
        let ready = self.sockets.poll(&mut list, timeout)?;
        for (entry, polled) in bytes.chunks_exact_mut(8).zip(&list) {
            entry[6..].copy_from_slice(&polled.revents.to_le_bytes());
        }
        self.block.write(DeviceAddr::new(self.buffer), &bytes)?;
        Ok((ready as i64, 0, None))
    }

    fn stream_out(&self, socket: Sock, seed: u64, total: u64, most: u64) -> SockResult<OpResult> {
        let (mut random, mut done) = (seed | 1, 0);
        let mut bytes = vec![0; most as usize + 8];
        while done < total {
            let piece = (1 + scramble(&mut random) % most).min(total - done) as usize;
            let skip = (done % 8) as usize;
            pattern::fill_bytes(&mut bytes[..piece + skip], seed, done - done % 8);
            done += self.sockets.send(socket, &bytes[skip..skip + piece])? as u64;
        }
        Ok((done as i64, 0, None))
    }

    fn stream_in(&self, socket: Sock, seed: u64, total: u64, most: u64) -> SockResult<OpResult> {
        let (mut random, mut done) = (seed | 1, 0);
        let (mut bytes, mut wanted) = (vec![0; most as usize], vec![0; most as usize + 8]);
        while done < total {
            let piece = (1 + scramble(&mut random) % most).min(total - done) as usize;
            let count = self.sockets.recv(socket, &mut bytes[..piece])?;
            if count == 0 {
                break;
            }
            let skip = (done % 8) as usize;
            pattern::fill_bytes(&mut wanted[..count + skip], seed, done - done % 8);
            if bytes[..count] != wanted[skip..skip + count] {
                return Ok((MISMATCH, done, None));
            }
            done += count as u64;
        }
        Ok((done as i64, 0, None))
    }

    fn echo(&self, socket: Sock) -> SockResult<OpResult> {
        let (mut bytes, mut total) = (vec![0; 4096], 0);
        loop {
            let count = self.sockets.recv(socket, &mut bytes)?;
            if count == 0 {
                return Ok((total, 0, None));
            }
            total += self.sockets.send(socket, &bytes[..count])? as i64;
        }
    }

    /// The block function of what scripted.cu does with GPUnet's calls.
    fn echo_client(&self, args: [u64; 5], to: Option<SocketAddr>) -> SockResult<OpResult> {
        let kind = if args[0] == SocketKind::WarpStream as u64 {
            SocketKind::WarpStream
        } else {
            SocketKind::Stream
        };
        let socket = self.sockets.socket(Family::V4, kind)?;
        self.sockets.connect(socket, to.ok_or(rustix::io::Errno::DESTADDRREQ)?)?;
        let (mut bytes, mut back) = (vec![0; args[2] as usize], vec![0; args[2] as usize]);
        let mut total = 0;
        for message in 0..args[1] {
            pattern::fill_bytes(&mut bytes, message, 0);
            self.sockets.send(socket, &bytes)?;
            total += self.sockets.recv_all(socket, &mut back)?;
            if bytes != back {
                return Ok((MISMATCH, total as u64, None));
            }
        }
        self.sockets.close(socket)?;
        Ok((total as i64, 0, None))
    }

    fn datagram_client(&self, args: [u64; 5], to: Option<SocketAddr>) -> SockResult<OpResult> {
        let socket = self.sockets.socket(Family::V4, SocketKind::Datagram)?;
        let talked = self.exchange_datagrams(socket, args[1], args[2] as usize, to);
        self.sockets.close(socket)?;
        talked.map(|total| (total, 0, None))
    }

    fn exchange_datagrams(
        &self,
        socket: Sock,
        count: u64,
        size: usize,
        to: Option<SocketAddr>,
    ) -> SockResult<i64> {
        let (mut bytes, mut back, mut total) = (vec![0; size], vec![0; size], 0);
        for message in 0..count {
            pattern::fill_bytes(&mut bytes, message, 0);
            self.sockets.send_to(socket, &bytes, to)?;
            let (came, from) = self.sockets.recv_from(socket, &mut back)?;
            if from != to || back != bytes {
                return Ok(MISMATCH);
            }
            total += came as i64;
        }
        Ok(total)
    }

    fn echo_many(&self, count: u64) -> SockResult<OpResult> {
        let mut bytes = vec![0; count as usize * 4];
        self.block.read(DeviceAddr::new(self.buffer), &mut bytes)?;
        let handle = |entry: &[u8]| i32::from_le_bytes([entry[0], entry[1], entry[2], entry[3]]);
        let mut open: Vec<_> = bytes
            .chunks_exact(4)
            .map(|entry| PollEntry::new(Sock::from_raw(handle(entry)), events::IN))
            .collect();
        let (mut total, mut buffer) = (0, vec![0; 4096]);
        while !open.is_empty() {
            self.sockets.poll(&mut open, None)?;
            let mut ended = Vec::new();
            for polled in open.iter().filter(|polled| polled.revents != 0) {
                let got = self.sockets.recv(polled.socket, &mut buffer)?;
                match got {
                    0 => {
                        self.sockets.close(polled.socket)?;
                        ended.push(polled.socket);
                    }
                    _ => total += self.sockets.send(polled.socket, &buffer[..got])? as i64,
                }
            }
            open.retain(|polled| !ended.contains(&polled.socket));
        }
        Ok((total, 0, None))
    }
}

/// The test's handle of a scripted kernel.
pub struct ScriptedKernel {
    mailboxes: Allocation,
    buffers: Allocation,
    index: u64,
    number: std::cell::Cell<u64>,
    pub family: crate::sock::peer::Family,
}

/// The result of a command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Answer {
    pub result: i64,
    pub second: u64,
    pub address: Option<SocketAddr>,
}

impl ScriptedKernel {
    /// Mailboxes and buffers for `count` kernels.
    pub fn memory(gpu: &Device, count: u64) -> (Allocation, Allocation) {
        let mailboxes = gpu.alloc_pinned(count * MAILBOX).unwrap();
        mailboxes.write(0, &vec![0; (count * MAILBOX) as usize]).unwrap();
        (mailboxes, gpu.alloc_pinned(count * BUFFER).unwrap())
    }

    pub fn new(
        mailboxes: &Allocation,
        buffers: &Allocation,
        index: u64,
        family: crate::sock::peer::Family,
    ) -> Self {
        let number = std::cell::Cell::new(0);
        Self { mailboxes: mailboxes.clone(), buffers: buffers.clone(), index, number, family }
    }

    /// Writes a command, and does not wait.
    pub fn start(&self, what: KernelOp, args: &[u64], address: Option<SocketAddr>) {
        let bytes = self.mailboxes.host_bytes().unwrap();
        let base = self.index * MAILBOX;
        bytes.store_u64(base + mailbox_field::OP, what as u64).unwrap();
        for (number, arg) in args.iter().enumerate() {
            bytes.store_u64(base + mailbox_field::ARGS + number as u64 * 8, *arg).unwrap();
        }
        bytes.write(base + mailbox_field::ADDRESS, &address_bytes(address)).unwrap();
        self.number.set(self.number.get() + 1);
        bytes.store_u64(base + mailbox_field::NUMBER, self.number.get()).unwrap();
    }

    /// Whether the last command has finished.
    pub fn is_done(&self) -> bool {
        let at = self.index * MAILBOX + mailbox_field::DONE;
        self.mailboxes.host_bytes().unwrap().load_u64(at).unwrap() == self.number.get()
    }

    /// Waits for the result of the last command.
    pub fn finish(&self) -> Answer {
        let start = Instant::now();
        while !self.is_done() {
            assert!(start.elapsed() < test_timeout(), "scripted kernel {} hangs", self.index);
            std::thread::sleep(Duration::from_micros(20));
        }
        let bytes = self.mailboxes.host_bytes().unwrap();
        let base = self.index * MAILBOX;
        let mut address = [0; ADDRESS_LEN];
        bytes.read(base + mailbox_field::FOUND, &mut address).unwrap();
        Answer {
            result: bytes.load_u64(base + mailbox_field::RESULT).unwrap() as i64,
            second: bytes.load_u64(base + mailbox_field::SECOND).unwrap(),
            address: address_from(&address),
        }
    }

    pub fn call(&self, what: KernelOp, args: &[u64], address: Option<SocketAddr>) -> Answer {
        self.start(what, args, address);
        self.finish()
    }

    /// Writes bytes into its buffer.
    pub fn put(&self, at: u64, bytes: &[u8]) {
        self.buffers.host_bytes().unwrap().write(self.index * BUFFER + at, bytes).unwrap();
    }

    /// Reads bytes of its buffer.
    pub fn show(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.buffers.host_bytes().unwrap().read(self.index * BUFFER + at, &mut bytes).unwrap();
        bytes
    }
}
