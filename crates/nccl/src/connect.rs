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
use crate::devices;
use crate::frames::{Frames, Hello, ReadError, Ready, Reply};
use crate::handle::{ConnectHandle, Cookie};
use crate::log;
use crate::result::{Failure, REMOTE, Result, SYSTEM};
use crate::send::Prepared;

/// The whole of a connection, with the time until the peer accepts.
pub(crate) const LIMIT: Duration = Duration::from_secs(300);
/// The pause before a connection that the peer closed is made again.
pub(crate) const RETRY_PAUSE: Duration = Duration::from_millis(20);

/// What is under way: the number of the device, the secret, the connection.
static PENDING: Mutex<Vec<(i32, Cookie, Connecting)>> = Mutex::new(Vec::new());

struct Connecting {
    handle: ConnectHandle,
    deadline: Instant,
    stage: Stage,
    prepared: Prepared,
}

enum Stage {
    /// Nothing is sent before this time.
    Pause(Instant),
    Tcp(OwnedFd),
    Reply(Frames),
    /// All that is left is to write the last message.
    Ready(Frames, Reply),
}

/// What a look at a connection gave.
enum Step {
    Again(Connecting),
    Wait(Connecting),
    Done(Box<Handle>),
}

/// Connects to a listener; `None` if it is not done yet: call again.
///
/// # Errors
/// If nothing listens there any more, or the limit has passed.
pub(crate) fn connect(number: i32, handle: ConnectHandle) -> Result<Option<Box<Handle>>> {
    let now = Instant::now();
    let mut connecting = match find(number, &handle.cookie, now) {
        Some(connecting) => connecting,
        None => Connecting {
            handle,
            deadline: now + LIMIT,
            stage: Stage::Pause(now),
            prepared: Prepared::new(devices::get(number)?)?,
        },
    };
    loop {
        match connecting.advance(now)? {
            Step::Again(same) => connecting = same,
            Step::Done(comm) => return Ok(Some(comm)),
            Step::Wait(same) => {
                PENDING.lock().push((number, handle.cookie, same));
                return Ok(None);
            }
        }
    }
}

/// Takes what is under way.
fn find(number: i32, cookie: &Cookie, now: Instant) -> Option<Connecting> {
    let mut pending = PENDING.lock();
    let found = pending.iter().position(|known| (known.0, &known.1) == (number, cookie));
    let found = found.map(|at| pending.swap_remove(at).2);
    // Those that NCCL gave up.
    pending.retain(|(_, _, known)| now < known.deadline + LIMIT);
    found
}

impl Connecting {
    fn advance(self, now: Instant) -> Result<Step> {
        let Self { handle, deadline, stage, mut prepared } = self;
        let address = handle.address;
        if now > deadline {
            let text = format!("the peer at {address} did not accept within {LIMIT:?}");
            return Err(Failure::new(SYSTEM, text));
        }
        let (stage, waits) = match stage {
            Stage::Pause(until) if now < until => (Stage::Pause(until), true),
            Stage::Pause(_) => (Stage::Tcp(start(address)?), false),
            Stage::Tcp(socket) => match is_connected(&socket, address)? {
                true => (Stage::Reply(greet(&handle, &prepared, socket)?), false),
                false => (Stage::Tcp(socket), true),
            },
            Stage::Reply(frames) => await_reply(&handle, &mut prepared, frames, now)?,
            Stage::Ready(mut frames, reply) => match frames.flush()? {
                true => return finish(&handle, prepared, frames, reply).map(Step::Done),
                false => (Stage::Ready(frames, reply), true),
            },
        };
        let same = Self { handle, deadline, stage, prepared };
        Ok(if waits { Step::Wait(same) } else { Step::Again(same) })
    }
}

/// Shows the secret, and offers queue pairs.
fn greet(handle: &ConnectHandle, prepared: &Prepared, socket: OwnedFd) -> Result<Frames> {
    let mut frames = Frames::new(TcpStream::from(socket))?;
    frames.queue_preamble(&handle.cookie);
    let (settings, _) = devices::all()?;
    let (endpoints, ring) = (prepared.lanes.endpoints(), prepared.ring());
    frames.queue(&Hello { endpoints, ring, stripe: settings.stripe })?;
    Ok(frames)
}

/// The next stage, and whether it waits. A peer that is crowded by strangers may close the
/// connection: it is made again.
fn await_reply(
    handle: &ConnectHandle,
    prepared: &mut Prepared,
    mut frames: Frames,
    now: Instant,
) -> Result<(Stage, bool)> {
    let again = (Stage::Pause(now + RETRY_PAUSE), true);
    match frames.flush() {
        Ok(true) => {}
        Ok(false) => return Ok((Stage::Reply(frames), true)),
        Err(_) => return Ok(again),
    }
    match frames.read::<Reply>() {
        Ok(None) => Ok((Stage::Reply(frames), true)),
        Err(ReadError::Closed) => Ok(again),
        Err(ReadError::Malformed(why)) => {
            let text = format!("the peer at {} is not of this version: {why}", handle.address);
            Err(Failure::new(REMOTE, text))
        }
        Ok(Some(reply)) => {
            prepared.connect(&reply)?;
            frames.queue(&Ready { ready: true })?;
            Ok((Stage::Ready(frames, reply), false))
        }
    }
}

fn finish(
    handle: &ConnectHandle,
    prepared: Prepared,
    frames: Frames,
    reply: Reply,
) -> Result<Box<Handle>> {
    let (settings, _) = devices::all()?;
    let send = prepared.finish(reply, settings.stripe, frames.into_stream());
    let (peer, lanes) = (handle.address.ip(), send.lanes.describe());
    log::info(format_args!("sends to {peer} through {lanes}"));
    Ok(Box::new(Handle::new(End::Send(send))))
}

/// Begins a connection, without waiting for it.
pub(crate) fn start(address: SocketAddr) -> Result<OwnedFd> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(Errno::INPROGRESS | Errno::INTR) => Ok(socket),
        Err(why) => Err(refused(address, why)),
    }
}

/// Whether a connection that was begun is there.
///
/// # Errors
/// [`REMOTE`] if nothing listens there.
pub(crate) fn is_connected(socket: &OwnedFd, address: SocketAddr) -> Result<bool> {
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
