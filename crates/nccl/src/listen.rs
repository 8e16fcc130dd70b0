//! Listening and accepting: no call waits, and strangers do not stop the peer.

use std::fs::File;
use std::io::{ErrorKind, Read};
use std::net::{SocketAddr, TcpListener};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::comm::{End, Handle, peer_of};
use crate::devices::Device;
use crate::frames::{Frames, Hello, ReadError, Ready};
use crate::handle::{ConnectHandle, Cookie};
use crate::log;
use crate::recv::Prepared;
use crate::result::{REMOTE, Result};

/// How long a connection may take to say what it is, and to be complete after that.
const HELLO_LIMIT: Duration = Duration::from_secs(10);
const READY_LIMIT: Duration = Duration::from_secs(60);
/// Connections that are being set up. If there are more, the oldest that has not shown the secret
/// is closed; a peer whose connection is closed tries again.
const MAX_PENDING: usize = 64;
const TOO_LONG: &str = "it took too long";
/// Connections accepted in one call.
const MAX_ACCEPTED: usize = 16;

/// What NCCL holds of a listener.
pub(crate) struct Listener {
    pub device: &'static Device,
    socket: TcpListener,
    cookie: Cookie,
    pending: Mutex<Vec<Pending>>,
}

/// A connection that is being set up.
struct Pending {
    frames: Frames,
    stage: Stage,
    deadline: Instant,
    peer: String,
}

enum Stage {
    /// Waiting for the secret.
    Unknown,
    /// Waiting for the sender's offer.
    Hello,
    /// Waiting until the sender's queue pairs are connected.
    Ready(Box<Prepared>),
}

/// What a look at a pending connection gave.
enum Step {
    Wait,
    /// It is closed, for this reason.
    Drop(String),
    /// Its sender is connected.
    Done,
}

impl Listener {
    pub(crate) fn new(device: &'static Device) -> Result<(Self, ConnectHandle)> {
        let socket = TcpListener::bind(SocketAddr::new(device.ip, 0))?;
        socket.set_nonblocking(true)?;
        let mut cookie = Cookie::default();
        File::open("/dev/urandom")?.read_exact(&mut cookie)?;
        let handle = ConnectHandle { address: socket.local_addr()?, cookie };
        Ok((Self { device, socket, cookie, pending: Mutex::default() }, handle))
    }

    /// A communicator whose peer has connected, if there is one.
    ///
    /// # Errors
    /// If this end cannot set up its own; never because of what a stranger sends.
    pub(crate) fn accept(&self) -> Result<Option<Box<Handle>>> {
        let mut pending = self.pending.lock();
        self.take_connections(&mut pending);
        let now = Instant::now();
        let mut at = 0;
        while let Some(connection) = pending.get_mut(at) {
            match self.advance(connection, now)? {
                Step::Wait => at += 1,
                Step::Drop(why) => {
                    let Pending { peer, .. } = pending.remove(at);
                    log::info(format_args!("a connection from {peer} is dropped: {why}"));
                }
                Step::Done => return Ok(pending.remove(at).finish()),
            }
        }
        Ok(None)
    }

    /// A connection that has shown the secret, and its peer for people, if there is one. Its next
    /// message says what it is.
    pub(crate) fn accept_greeted(&self) -> Option<(Frames, String)> {
        let mut pending = self.pending.lock();
        self.take_connections(&mut pending);
        let now = Instant::now();
        pending.retain_mut(|connection| {
            let outcome = match now > connection.deadline {
                true => Err(TOO_LONG.to_owned()),
                false if matches!(connection.stage, Stage::Unknown) => self.show_secret(connection),
                false => Ok(()),
            };
            let dropped = outcome.as_ref().err();
            if let Some(why) = dropped {
                log::info(format_args!("a connection from {} is dropped: {why}", connection.peer));
            }
            dropped.is_none()
        });
        let greeted = pending.iter().position(|known| matches!(known.stage, Stage::Hello))?;
        let Pending { frames, peer, .. } = pending.remove(greeted);
        Some((frames, peer))
    }

    fn take_connections(&self, pending: &mut Vec<Pending>) {
        for _ in 0..MAX_ACCEPTED {
            let stream = match self.socket.accept() {
                Ok((stream, _)) => stream,
                Err(why) if why.kind() == ErrorKind::Interrupted => continue,
                // Nobody is there; or descriptors are short, and the next call may have one.
                Err(_) => return,
            };
            let peer = peer_of(&stream);
            let Ok(frames) = Frames::new(stream) else { continue };
            if pending.len() >= MAX_PENDING {
                let is_unknown = |known: &Pending| matches!(known.stage, Stage::Unknown);
                match pending.iter().position(is_unknown) {
                    Some(oldest) => drop(pending.remove(oldest)),
                    None => continue,
                }
            }
            let deadline = Instant::now() + HELLO_LIMIT;
            let mut new = Pending { frames, stage: Stage::Unknown, deadline, peer };
            // A peer's secret usually comes with its connection: then no stranger evicts it.
            match self.show_secret(&mut new) {
                Ok(()) => pending.push(new),
                Err(why) => {
                    log::info(format_args!("a connection from {} is dropped: {why}", new.peer));
                }
            }
        }
    }

    /// Looks for the secret.
    fn show_secret(&self, connection: &mut Pending) -> std::result::Result<(), String> {
        match connection.frames.read_preamble(&self.cookie) {
            Ok(true) => connection.stage = Stage::Hello,
            Ok(false) => {}
            Err(why) => return Err(reason(why)),
        }
        Ok(())
    }

    fn advance(&self, connection: &mut Pending, now: Instant) -> Result<Step> {
        if now > connection.deadline {
            return Ok(Step::Drop(TOO_LONG.to_owned()));
        }
        if matches!(connection.stage, Stage::Unknown)
            && let Err(why) = self.show_secret(connection)
        {
            return Ok(Step::Drop(why));
        }
        if matches!(connection.stage, Stage::Hello) {
            let hello = match connection.frames.read::<Hello>() {
                Ok(Some(hello)) => hello,
                Ok(None) => return Ok(Step::Wait),
                Err(why) => return Ok(Step::Drop(reason(why))),
            };
            let (prepared, reply) = match Prepared::new(self.device, &hello) {
                Ok(made) => made,
                Err(why) if why.code == REMOTE => return Ok(Step::Drop(why.text)),
                Err(why) => return Err(why),
            };
            connection.frames.queue(&reply)?;
            connection.stage = Stage::Ready(Box::new(prepared));
            connection.deadline = now + READY_LIMIT;
        }
        if matches!(connection.stage, Stage::Ready(_)) {
            return Ok(connection.await_sender());
        }
        Ok(Step::Wait)
    }
}

impl Pending {
    /// Waits for the sender's last message.
    fn await_sender(&mut self) -> Step {
        match self.frames.flush() {
            Ok(true) => {}
            Ok(false) => return Step::Wait,
            Err(why) => return Step::Drop(why.text),
        }
        match self.frames.read::<Ready>() {
            Ok(Some(_)) => Step::Done,
            Ok(None) => Step::Wait,
            Err(why) => Step::Drop(reason(why)),
        }
    }

    /// The communicator; `None` if it is not ready.
    fn finish(self) -> Option<Box<Handle>> {
        let Stage::Ready(prepared) = self.stage else { return None };
        let recv = prepared.finish(self.frames.into_stream());
        log::info(format_args!("receives from {} through {}", self.peer, recv.lanes.describe()));
        Some(Box::new(Handle::new(End::Recv(recv))))
    }
}

pub(crate) fn reason(why: ReadError) -> String {
    match why {
        ReadError::Closed => "its peer closed it".to_owned(),
        ReadError::Malformed(why) => why,
    }
}
