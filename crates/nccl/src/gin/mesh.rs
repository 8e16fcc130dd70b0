//! Set-up of a communicator: a queue pair and a TCP connection between each two ranks.
//!
//! Of two ranks, the one with the higher number connects to the listener of the other, shows its
//! secret, and both exchange the addresses of their queue pairs. A rank that waits for another
//! keeps a connection to that one's listener meanwhile: if the other process ends, the listener
//! refuses, and the wait ends at once instead of at the deadline.

use std::io::{ErrorKind, Read};
use std::net::TcpStream;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use warpwire::verbs::{Access, Context, Cq, Pd, Qp, QpEndpoint};

use super::requests::PER_CONTEXT;
use crate::connect::{LIMIT, RETRY_PAUSE, is_connected, start};
use crate::devices;
use crate::frames::{Frames, ReadError, Ready};
use crate::handle::ConnectHandle;
use crate::lanes::qp_options;
use crate::listen::{Listener, reason};
use crate::log;
use crate::result::{Failure, INVALID_ARGUMENT, REMOTE, Result};

/// Outstanding work requests of a queue pair: data and signal of each operation. Where longer data
/// takes more of them, operations wait for room.
const DEPTH: u32 = 2 * PER_CONTEXT as u32;
/// Ranks of a communicator, at most: a completion queue has room for all work of all queue pairs.
const MAX_RANKS: usize = (4 << 20) / DEPTH as usize;
/// Between two looks at connections that are being set up.
const PAUSE: Duration = Duration::from_micros(200);

/// The first message of the rank that connects.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Hello {
    rank: u32,
    ranks: u32,
    endpoint: QpEndpoint,
}

/// The answer to it.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct Reply {
    endpoint: QpEndpoint,
}

/// The queue pairs of a rank.
pub(super) struct Mesh {
    pub rank: u32,
    /// To each rank.
    pub qps: Vec<Qp>,
    /// The other end of the queue pair to this rank itself.
    _own_end: Qp,
    pub cq: Cq,
    pub pd: Pd,
    pub context: Context,
}

impl Mesh {
    fn create(context: &Context, rank: u32, ranks: usize) -> Result<Self> {
        let (pd, cq) = (context.alloc_pd(), context.create_cq(DEPTH * (ranks as u32 + 1))?);
        let access = Access::REMOTE_WRITE | Access::REMOTE_ATOMIC | Access::REMOTE_READ;
        let create = || context.create_qp(&pd, &cq, &cq, qp_options(DEPTH, access));
        let qps = (0..ranks).map(|_| create()).collect::<warpwire::Result<Vec<Qp>>>()?;
        let own_end = create()?;
        let mesh = Self { rank, qps, _own_end: own_end, cq, pd, context: context.clone() };
        let own = mesh.qp(rank)?;
        own.connect(&mesh._own_end.endpoint())?;
        mesh._own_end.connect(&own.endpoint())?;
        Ok(mesh)
    }

    #[inline]
    pub(super) fn qp(&self, rank: u32) -> Result<&Qp> {
        let none = || Failure::new(INVALID_ARGUMENT, format!("there is no rank {rank}"));
        self.qps.get(rank as usize).ok_or_else(none)
    }

    fn hello(&self, to: u32) -> Result<Hello> {
        let endpoint = self.qp(to)?.endpoint();
        Ok(Hello { rank: self.rank, ranks: self.qps.len() as u32, endpoint })
    }
}

/// The connection with a rank, while it is set up.
enum Stage {
    /// This rank connects.
    Dialing(Dial),
    /// It has connected, and waits for the answer.
    Reply(Frames),
    /// This rank waits until the other connects.
    Awaited(Watch),
    /// It has answered, and waits until the other's queue pair is connected.
    Ready(Frames),
    Done(Frames),
}

/// A TCP connection that is being made.
struct Dial {
    not_before: Instant,
    socket: Option<OwnedFd>,
}

impl Dial {
    fn at(not_before: Instant) -> Self {
        Self { not_before, socket: None }
    }

    fn advance(&mut self, handle: &ConnectHandle, now: Instant) -> Result<Option<TcpStream>> {
        if now < self.not_before {
            return Ok(None);
        }
        let socket = match self.socket.take() {
            Some(socket) => socket,
            None => start(handle.address)?,
        };
        if is_connected(&socket, handle.address)? {
            return Ok(Some(TcpStream::from(socket)));
        }
        self.socket = Some(socket);
        Ok(None)
    }
}

/// Finds out that a rank has ended which has not connected yet.
struct Watch {
    dial: Dial,
    open: Option<TcpStream>,
}

impl Watch {
    fn new(now: Instant) -> Self {
        Self { dial: Dial::at(now), open: None }
    }

    /// # Errors
    /// [`REMOTE`] if nothing listens there any more.
    fn look(&mut self, handle: &ConnectHandle, now: Instant) -> Result {
        let Some(stream) = &mut self.open else {
            self.open = self.dial.advance(handle, now)?;
            if let Some(stream) = &self.open {
                stream.set_nonblocking(true)?;
            }
            return Ok(());
        };
        match stream.read(&mut [0]) {
            Err(why) if matches!(why.kind(), ErrorKind::WouldBlock | ErrorKind::Interrupted) => {}
            // The listener drops connections that do not say what they are: then it lives.
            _ => (self.open, self.dial) = (None, Dial::at(now + RETRY_PAUSE)),
        }
        Ok(())
    }
}

/// A set-up in progress.
struct Setup<'a> {
    listener: &'a Listener,
    handles: &'a [ConnectHandle],
    mesh: Mesh,
    /// By rank; `None` for this one.
    stages: Vec<Option<Stage>>,
    /// Connections whose first message has not arrived.
    unnamed: Vec<(Frames, String)>,
}

/// Connects all ranks. Returns the queue pairs, and the TCP connection to each other rank.
///
/// # Errors
/// [`REMOTE`] if a rank ends meanwhile, or does not come within five minutes.
pub(super) fn connect(
    listener: &Listener,
    handles: &[ConnectHandle],
    rank: u32,
    context: &Context,
) -> Result<(Mesh, Vec<Option<Frames>>)> {
    let ranks = handles.len();
    if ranks > MAX_RANKS || rank as usize >= ranks {
        let text = format!("rank {rank} of {ranks}; up to {MAX_RANKS} ranks are possible");
        return Err(Failure::new(INVALID_ARGUMENT, text));
    }
    let now = Instant::now();
    let stages = (0..ranks as u32).map(|peer| match peer.cmp(&rank) {
        std::cmp::Ordering::Less => Some(Stage::Dialing(Dial::at(now))),
        std::cmp::Ordering::Equal => None,
        std::cmp::Ordering::Greater => Some(Stage::Awaited(Watch::new(now))),
    });
    let stages = stages.collect();
    let mesh = Mesh::create(context, rank, ranks)?;
    let mut setup = Setup { listener, handles, mesh, stages, unnamed: Vec::new() };
    let deadline = now + LIMIT;
    while !setup.advance()? {
        if Instant::now() > deadline {
            return Err(setup.overdue());
        }
        std::thread::sleep(PAUSE);
    }
    let streams = setup.stages.into_iter().map(|stage| match stage {
        Some(Stage::Done(frames)) => Some(frames),
        _ => None,
    });
    Ok((setup.mesh, streams.collect()))
}

impl Setup<'_> {
    /// Whether all ranks are connected.
    fn advance(&mut self) -> Result<bool> {
        while let Some(greeted) = self.listener.accept_greeted() {
            self.unnamed.push(greeted);
        }
        self.name_connections()?;
        let (now, mut is_done) = (Instant::now(), true);
        for rank in 0..self.stages.len() {
            let Some(stage) = self.stages[rank].take() else { continue };
            let next = self
                .step(rank as u32, stage, now)
                .map_err(|why| Failure::new(why.code, format!("rank {rank}: {}", why.text)))?;
            is_done &= matches!(next, Stage::Done(_));
            self.stages[rank] = Some(next);
        }
        Ok(is_done)
    }

    /// Reads the first messages of connections, and assigns them to ranks.
    fn name_connections(&mut self) -> Result {
        for (mut frames, peer) in std::mem::take(&mut self.unnamed) {
            match frames.read::<Hello>() {
                Ok(None) => self.unnamed.push((frames, peer)),
                Ok(Some(hello)) => self.welcome(frames, &hello)?,
                Err(why) => {
                    let why = reason(why);
                    log::info(format_args!("a connection from {peer} is dropped: {why}"));
                }
            }
        }
        Ok(())
    }

    fn welcome(&mut self, mut frames: Frames, hello: &Hello) -> Result {
        let (rank, ranks) = (hello.rank as usize, self.stages.len());
        let wrong = |why: &str| {
            let text = format!("rank {rank} of {}: {why}", hello.ranks);
            Err(Failure::new(REMOTE, text))
        };
        if hello.ranks as usize != ranks {
            return wrong(&format!("this communicator has {ranks} ranks"));
        }
        let qp = self.mesh.qp(hello.rank)?;
        match self.stages.get(rank) {
            Some(Some(Stage::Awaited(_))) => qp.connect(&hello.endpoint)?,
            // Its first connection broke before the answer arrived.
            Some(Some(Stage::Ready(_))) => {}
            _ => return wrong("it should not connect to this rank, or has done so"),
        }
        frames.queue(&Reply { endpoint: qp.endpoint() })?;
        self.stages[rank] = Some(Stage::Ready(frames));
        Ok(())
    }

    fn step(&self, rank: u32, stage: Stage, now: Instant) -> Result<Stage> {
        let handle = &self.handles[rank as usize];
        Ok(match stage {
            Stage::Awaited(mut watch) => {
                watch.look(handle, now)?;
                Stage::Awaited(watch)
            }
            Stage::Dialing(mut dial) => match dial.advance(handle, now)? {
                None => Stage::Dialing(dial),
                Some(stream) => {
                    let mut frames = Frames::new(stream)?;
                    frames.queue_preamble(&handle.cookie);
                    frames.queue(&self.mesh.hello(rank)?)?;
                    Stage::Reply(frames)
                }
            },
            Stage::Reply(frames) => self.await_reply(rank, frames, now)?,
            Stage::Ready(mut frames) => match frames.flush()? {
                false => Stage::Ready(frames),
                true => match frames.read::<Ready>() {
                    Ok(None) => Stage::Ready(frames),
                    Ok(Some(_)) => Stage::Done(frames),
                    Err(why) => return Err(Failure::new(REMOTE, reason(why))),
                },
            },
            // The last message may not be written yet.
            Stage::Done(mut frames) => match frames.flush()? {
                true | false => Stage::Done(frames),
            },
        })
    }

    fn await_reply(&self, rank: u32, mut frames: Frames, now: Instant) -> Result<Stage> {
        // A listener that is crowded by strangers may close the connection: it is made again.
        let again = || Ok(Stage::Dialing(Dial::at(now + RETRY_PAUSE)));
        match frames.flush() {
            Ok(true) => {}
            Ok(false) => return Ok(Stage::Reply(frames)),
            Err(_) => return again(),
        }
        match frames.read::<Reply>() {
            Ok(None) => Ok(Stage::Reply(frames)),
            Err(ReadError::Closed) => again(),
            Err(ReadError::Malformed(why)) => Err(Failure::new(REMOTE, why)),
            Ok(Some(reply)) => {
                self.mesh.qp(rank)?.connect(&reply.endpoint)?;
                frames.queue(&Ready { ready: true })?;
                frames.flush()?;
                Ok(Stage::Done(frames))
            }
        }
    }

    #[cold]
    fn overdue(&self) -> Failure {
        let missing = self.stages.iter().enumerate().filter(|(_, stage)| {
            stage.as_ref().is_some_and(|stage| !matches!(stage, Stage::Done(_)))
        });
        let missing: Vec<String> = missing.map(|(rank, _)| rank.to_string()).collect();
        let text = format!("ranks {} did not connect within {LIMIT:?}", missing.join(", "));
        Failure::new(REMOTE, text)
    }
}

/// The engine of the next communicator: they take turns.
pub(super) fn next_engine(device: &devices::Device) -> Result<&Context> {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static NEXT: AtomicUsize = AtomicUsize::new(0);
    let engines = device.gin_engines()?;
    let at = NEXT.fetch_add(1, Ordering::Relaxed) % engines.len().max(1);
    let none = || Failure::new(crate::result::INTERNAL, "the device has no engine");
    engines.get(at).ok_or_else(none)
}
