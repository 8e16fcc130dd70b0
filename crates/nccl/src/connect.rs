//! Connecting: NCCL calls again until there is a communicator, with the same handle. What is under
//! way is found by the handle's secret, so the handle's memory may be copied or written anew.

use std::net::{SocketAddr, TcpStream};
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with, sockopt};

use crate::comm::{End, Handle};
use crate::devices::{self, Device};
use crate::frames::{Frames, Hello, ReadError, Ready, Reply};
use crate::handle::{ConnectHandle, Cookie};
use crate::log;
use crate::result::{Failure, REMOTE, Result, SYSTEM};
use crate::send::Prepared;

/// The whole of a connection, with the time until the peer accepts.
const LIMIT: Duration = Duration::from_secs(300);
/// The pause before a connection that the peer closed is made again.
const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// What is under way: the number of the device, the secret, the connection.
static PENDING: Mutex<Vec<(i32, Cookie, Connecting)>> = Mutex::new(Vec::new());

struct Connecting {
    device: &'static Device,
    handle: ConnectHandle,
    deadline: Instant,
    stage: Stage,
    prepared: Option<Prepared>,
}

enum Stage {
    /// Nothing is sent before this time.
    Pause(Instant),
    Tcp(OwnedFd),
    Reply(Frames),
    /// All that is left is to write the last message.
    Ready(Frames, Reply),
}

/// Connects to a listener; `None` if it is not done yet: call again.
///
/// # Errors
/// If nothing listens there any more, or the limit has passed.
pub(crate) fn connect(number: i32, handle: ConnectHandle) -> Result<Option<Box<Handle>>> {
    let now = Instant::now();
    let found = {
        let mut pending = PENDING.lock();
        let is_this =
            |known: &(i32, Cookie, Connecting)| (known.0, known.1) == (number, handle.cookie);
        let found = pending.iter().position(is_this).map(|at| pending.swap_remove(at).2);
        // Those that NCCL gave up.
        pending.retain(|(_, _, known)| now < known.deadline + LIMIT);
        found
    };
    let mut connecting = match found {
        Some(connecting) => connecting,
        None => Connecting {
            device: devices::get(number)?,
            handle,
            deadline: now + LIMIT,
            stage: Stage::Pause(now),
            prepared: None,
        },
    };
    loop {
        match connecting.advance(now)? {
            Step::Again => {}
            Step::Done(comm) => return Ok(Some(comm)),
            Step::Wait => {
                PENDING.lock().push((number, handle.cookie, connecting));
                return Ok(None);
            }
        }
    }
}

enum Step {
    Again,
    Wait,
    Done(Box<Handle>),
}

impl Connecting {
    fn advance(&mut self, now: Instant) -> Result<Step> {
        let address = self.handle.address;
        if now > self.deadline {
            let text = format!("the peer at {address} did not accept within {LIMIT:?}");
            return Err(Failure::new(SYSTEM, text));
        }
        let stage = std::mem::replace(&mut self.stage, Stage::Pause(now));
        let (stage, step) = match stage {
            Stage::Pause(until) if now < until => (Stage::Pause(until), Step::Wait),
            Stage::Pause(_) => (Stage::Tcp(start(address)?), Step::Again),
            Stage::Tcp(socket) if !is_connected(&socket, address)? => {
                (Stage::Tcp(socket), Step::Wait)
            }
            Stage::Tcp(socket) => (Stage::Reply(self.greet(socket)?), Step::Again),
            Stage::Reply(frames) => self.await_reply(frames, now)?,
            Stage::Ready(mut frames, reply) => match frames.flush()? {
                true => return self.finish(frames, reply),
                false => (Stage::Ready(frames, reply), Step::Wait),
            },
        };
        self.stage = stage;
        Ok(step)
    }

    /// The queue pairs, made once.
    fn prepared(&mut self) -> Result<&mut Prepared> {
        if self.prepared.is_none() {
            self.prepared = Some(Prepared::new(self.device)?);
        }
        let missing = || Failure::new(SYSTEM, "there are no queue pairs");
        self.prepared.as_mut().ok_or_else(missing)
    }

    fn greet(&mut self, socket: OwnedFd) -> Result<Frames> {
        let mut frames = Frames::new(TcpStream::from(socket))?;
        frames.queue_preamble(&self.handle.cookie);
        let (settings, _) = devices::all()?;
        let prepared = self.prepared()?;
        let (endpoints, ring) = (prepared.lanes.endpoints(), prepared.ring());
        frames.queue(&Hello { endpoints, ring, stripe: settings.stripe })?;
        Ok(frames)
    }

    /// A peer that is crowded by strangers may close the connection: it is made again.
    fn await_reply(&mut self, mut frames: Frames, now: Instant) -> Result<(Stage, Step)> {
        let again = (Stage::Pause(now + RETRY_PAUSE), Step::Wait);
        match frames.flush() {
            Ok(true) => {}
            Ok(false) => return Ok((Stage::Reply(frames), Step::Wait)),
            Err(_) => return Ok(again),
        }
        match frames.read::<Reply>() {
            Ok(None) => Ok((Stage::Reply(frames), Step::Wait)),
            Err(ReadError::Closed) => Ok(again),
            Err(ReadError::Malformed(why)) => {
                let text =
                    format!("the peer at {} is not of this version: {why}", self.handle.address);
                Err(Failure::new(REMOTE, text))
            }
            Ok(Some(reply)) => {
                self.prepared()?.connect(&reply)?;
                frames.queue(&Ready { ready: true })?;
                Ok((Stage::Ready(frames, reply), Step::Again))
            }
        }
    }

    fn finish(&mut self, frames: Frames, reply: Reply) -> Result<Step> {
        let missing = || Failure::new(SYSTEM, "there are no queue pairs");
        let prepared = self.prepared.take().ok_or_else(missing)?;
        let (settings, _) = devices::all()?;
        let send = prepared.finish(reply, settings.stripe, frames.into_stream());
        let (peer, lanes) = (self.handle.address.ip(), send.lanes.describe());
        log::info(format_args!("sends to {peer} through {lanes}"));
        Ok(Step::Done(Box::new(Handle::new(End::Send(send)))))
    }
}

/// Begins a connection, without waiting for it.
fn start(address: SocketAddr) -> Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket),
        Err(why) => Err(refused(address, why)),
    }
}

fn is_connected(socket: &OwnedFd, address: SocketAddr) -> Result<bool> {
    let mut fds = [PollFd::new(socket, PollFlags::OUT)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    match poll(&mut fds, Some(&now)) {
        Ok(0) | Err(Errno::INTR) => return Ok(false),
        Ok(_) => {}
        Err(why) => return Err(why.into()),
    }
    sockopt::socket_error(socket)?.map_err(|why| refused(address, why))?;
    Ok(true)
}

#[cold]
fn refused(address: SocketAddr, why: Errno) -> Failure {
    let why = std::io::Error::from(why);
    Failure::new(REMOTE, format!("cannot connect to the peer at {address}: {why}"))
}
