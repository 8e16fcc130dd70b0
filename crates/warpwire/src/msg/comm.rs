//! Communicators: ranks that can send to each other.

use std::net::{IpAddr, SocketAddr};
use std::str::FromStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::buffer::{Buffer, BufferSlice};
use super::entries::Match;
use super::header::{Channel, MAX_SLICES};
use super::peer::{Area, CONTROL_RECEIVES, CONTROL_WORK, Peer, USER_WORK};
use super::rank_info::{Launcher, MAX_RANKS, RankInfo, Rendezvous};
use super::rendezvous::{BootstrapMsg, Hello, RankLinks, connect_ranks, unexpected};
use super::request::{Outcome, Request};
use super::shared::Shared;
use super::state::State;
use super::watch::Watcher;
use crate::error::{Error, Kind, Result};
use crate::hca::HcaOptions;
use crate::link::{Auto, Hub, Link, Shm, Udp, shm, udp};
use crate::mr::HostMemory;
use crate::units;
use crate::verbs::{Context, Cq, EventFd, MemorySource, Pd, ProgressMode, QpOptions};

/// What packets go through.
#[derive(Clone, Debug, Default)]
pub enum CommLink {
    /// Shared memory where the peer is on this machine, UDP elsewhere.
    #[default]
    Auto,
    /// UDP.
    Udp,
    /// Shared memory: all ranks on one machine.
    Shm,
    /// This process's memory: all ranks in one process.
    Hub(Hub),
}

impl FromStr for CommLink {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "auto" => Ok(Self::Auto),
            "udp" => Ok(Self::Udp),
            "shm" => Ok(Self::Shm),
            _ => Err(Error::new(Kind::Malformed, format!("use link {text:?}"))
                .why("there is no such link")
                .fix("write auto, udp or shm")),
        }
    }
}

impl CommLink {
    fn open(&self, address: IpAddr, rank: usize) -> Result<Box<dyn Link>> {
        let any = SocketAddr::new(address, 0);
        Ok(match self {
            Self::Auto => {
                Box::new(Auto::bind(any, udp::Options::from_env()?, shm::Options::from_env()?)?)
            }
            Self::Udp => Box::new(Udp::bind(any, udp::Options::from_env()?)?),
            Self::Shm => Box::new(Shm::bind(any, shm::Options::from_env()?)?),
            Self::Hub(hub) => {
                let address = [10, 87, (rank >> 8) as u8, rank as u8];
                Box::new(hub.endpoint(SocketAddr::from((address, 4791)))?)
            }
        })
    }
}

/// How a communicator is made.
#[derive(Clone, Debug)]
pub struct CommOptions {
    /// How long to wait for all ranks, and for each step that they make together.
    pub timeout: Duration,
    /// What packets go through.
    pub link: CommLink,
    /// Messages up to this length are sent at once, and kept by the receiver until they are asked for. Longer ones are
    /// fetched when they are asked for.
    pub eager: u64,
    /// How many messages of each peer are kept until they are asked for; who sends more waits.
    pub receives: u32,
    /// How many requests may be under way, with all peers together.
    pub requests: u32,
    /// How many requests to a peer, and receives from it, may wait; one more is [`Kind::Busy`].
    pub queue: u32,
    /// Who drives the device.
    pub progress_mode: ProgressMode,
}

impl Default for CommOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            link: CommLink::default(),
            eager: 8 << 10,
            receives: 64,
            requests: 4096,
            queue: 1024,
            progress_mode: ProgressMode::default(),
        }
    }
}

impl CommOptions {
    /// The defaults, with a thread that sees what streams and kernels post: for [lanes](super::lane).
    pub fn for_streams() -> Self {
        let progress_mode = ProgressMode::Thread { spin: Duration::from_micros(200), core: None };
        Self { progress_mode, ..Self::default() }
    }

    /// The defaults, with what `WARPWIRE_LINK` (auto, udp, shm) and `WARPWIRE_TIMEOUT` (as in `30s`) say.
    pub fn from_env() -> Result<Self> {
        let mut options = Self::default();
        if let Ok(text) = std::env::var("WARPWIRE_LINK") {
            options.link = text.parse()?;
        }
        if let Ok(text) = std::env::var("WARPWIRE_TIMEOUT") {
            options.timeout = units::parse_duration(&text)?;
        }
        Ok(options)
    }

    fn check(&self) -> Result<()> {
        let wrong = |why: &'static str| {
            Err(Error::new(Kind::InvalidArgument, "make a communicator").why(why))
        };
        match self {
            _ if self.eager > 1 << 20 => wrong("eager messages have 1 MiB at most"),
            _ if !(4..=4096).contains(&self.receives) => wrong("receives must be 4 to 4096"),
            _ if !(1..=1 << 20).contains(&self.requests) => wrong("requests must be 1 to 1048576"),
            _ if !(1..=1 << 20).contains(&self.queue) => wrong("queue must be 1 to 1048576"),
            _ => Ok(()),
        }
    }
}

/// Ranks that send to each other. Clones are the same communicator; with the last of them this rank leaves it.
///
/// Progress is made by calls: those that wait, and those that test. See the [room](super) for an example.
#[derive(Clone)]
pub struct Comm {
    pub(super) shared: Arc<Shared>,
    leave_guard: Arc<LeaveGuard>,
}

impl std::fmt::Debug for Comm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Comm(rank {} of {})", self.rank(), self.size())
    }
}

/// Says goodbye when the last handle goes.
struct LeaveGuard {
    shared: Arc<Shared>,
    watcher: Option<Watcher>,
    announced: Mutex<bool>,
}

impl LeaveGuard {
    fn announce_leave(&self, why: Option<String>) {
        if std::mem::replace(&mut *self.announced.lock(), true) {
            return;
        }
        // An answer to what came last goes out with a later step; whoever waits for it would take our leaving for a loss.
        const LAST_STEPS: u32 = 8;
        for _ in 0..LAST_STEPS {
            let _ = self.shared.context.hca().poll();
        }
        let message = BootstrapMsg::Bye { why };
        for link in self.shared.links.iter().flatten() {
            // Who does not hear it sees the connection end.
            let _ = link.lock().send(&message);
        }
    }
}

impl Drop for LeaveGuard {
    fn drop(&mut self) {
        const LINGER: Duration = Duration::from_secs(1);
        if !std::thread::panicking() {
            // What was said to others should arrive.
            let _ = self.shared.poll_until(LINGER, |state| Ok((!state.is_busy()).then_some(())));
        }
        self.announce_leave(std::thread::panicking().then(|| "it panicked".to_owned()));
        drop(self.watcher.take());
        for link in self.shared.links.iter().flatten() {
            let _ = link.lock().stream().shutdown(std::net::Shutdown::Both);
        }
        let mut state = self.shared.state.lock();
        for rank in 0..state.peers.len() {
            let error = Error::new(Kind::Freed, format!("reach rank {rank}"));
            state.fail_peer(rank, error.why("this rank has left the communicator"));
        }
        drop(state);
        self.shared.wake_all();
    }
}

impl Comm {
    /// Joins the ranks that a launcher started: torchrun, mpirun, srun, or `warpwire run`. Without a launcher it is
    /// one rank alone.
    ///
    /// # Errors
    /// If the environment makes no sense, or the ranks do not meet; the text says who is missing.
    pub fn from_env() -> Result<Self> {
        Self::open(RankInfo::from_env()?, CommOptions::from_env()?)
    }

    /// Joins the ranks that meet at that place.
    pub fn open(rank_info: RankInfo, options: CommOptions) -> Result<Self> {
        options.check()?;
        if rank_info.rank >= rank_info.size || rank_info.size > MAX_RANKS {
            let error = Error::new(Kind::InvalidArgument, "make a communicator");
            let why = format!("there is no rank {} of {}", rank_info.rank, rank_info.size);
            return Err(error.why(why));
        }
        let mut rank_links = connect_ranks(&rank_info, options.timeout)?;
        let connected = connect(rank_info, options, &mut rank_links);
        let shared = connected.inspect_err(|why| rank_links.abort(why))?;
        let watcher = Watcher::start(&shared)?;
        let leave_guard =
            LeaveGuard { shared: shared.clone(), watcher: Some(watcher), announced: false.into() };
        Ok(Self { shared, leave_guard: Arc::new(leave_guard) })
    }

    /// All ranks of a communicator inside this process, for threads and tests.
    pub fn local(size: usize) -> Result<Vec<Self>> {
        let link = CommLink::Hub(Hub::new());
        Self::local_with(size, &CommOptions { link, ..CommOptions::default() })
    }

    /// The same, made in that way.
    pub fn local_with(size: usize, options: &CommOptions) -> Result<Vec<Self>> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("warpwire-local-{}-{number}.address", std::process::id());
        let rendezvous = Rendezvous::File(std::env::temp_dir().join(name));
        let open = |rank: usize| {
            let (rendezvous, token, launcher) = (rendezvous.clone(), String::new(), Launcher::Run);
            let rank_info = RankInfo { rank, size, local_rank: rank, rendezvous, token, launcher };
            Self::open(rank_info, options.clone())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..size).map(|rank| scope.spawn(move || open(rank))).collect();
            let lost = || Error::new(Kind::PeerLost, "make a communicator").why("a rank panicked");
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|_| Err(lost())))
                .collect()
        })
    }

    /// Which rank this is.
    pub fn rank(&self) -> usize {
        self.shared.rank_info.rank
    }

    /// How many ranks there are.
    pub fn size(&self) -> usize {
        self.shared.rank_info.size
    }

    /// Which rank of its machine this is: for choosing a GPU.
    pub fn local_rank(&self) -> usize {
        self.shared.rank_info.local_rank
    }

    /// Who started the ranks, and where they met.
    pub fn rank_info(&self) -> &RankInfo {
        &self.shared.rank_info
    }

    /// The device below.
    pub fn context(&self) -> &Context {
        &self.shared.context
    }

    /// Which way messages to a rank take, and why.
    pub fn path(&self, rank: usize) -> Result<crate::link::LinkPath> {
        self.shared.check_rank(rank, "reach")?;
        match &self.shared.state.lock().peers[rank].qp {
            Some(qp) => qp.path(),
            None => Ok(self.shared.context.path().clone()),
        }
    }

    /// Why nothing more comes from a rank, if that is so.
    pub fn lost(&self, rank: usize) -> Option<Error> {
        self.shared.state.lock().peers.get(rank)?.end.clone()
    }

    /// Host memory, registered.
    pub fn alloc(&self, len: u64) -> Result<Buffer> {
        self.register(HostMemory::new(len)?)
    }

    /// Registers memory of the host or of a device.
    pub fn register(&self, memory: impl Into<MemorySource>) -> Result<Buffer> {
        Buffer::register(&self.shared.context, &self.shared.pd, memory)
    }

    /// Begins to send. The memory must not change until it has ended.
    ///
    /// Messages to one rank arrive in order; a receive takes the first that fits it. A short message (see
    /// [`CommOptions::eager`]) has ended when it is at the peer, a longer one when the peer has fetched it.
    ///
    /// # Errors
    /// [`Kind::Busy`] if too many wait already: wait for some of them. [`Kind::PeerLost`] if the rank is gone.
    pub fn isend(&self, to: usize, tag: u32, slice: impl Into<BufferSlice>) -> Result<Request> {
        self.isendv(to, tag, &[slice.into()])
    }

    /// Begins to send a message that is made of parts, one after the other; 15 at most.
    pub fn isendv(&self, to: usize, tag: u32, slices: &[BufferSlice]) -> Result<Request> {
        self.shared.start_send(Channel::User, to, tag, slices)
    }

    /// Begins to receive a message with that tag from a rank. A message that is longer than the memory is lost, and
    /// the request fails; its sender notices nothing.
    pub fn irecv(
        &self,
        from: usize,
        tag: impl Into<Match>,
        slice: impl Into<BufferSlice>,
    ) -> Result<Request> {
        self.irecvv(from, tag, &[slice.into()])
    }

    /// Begins to receive a message into parts, one after the other; 15 at most.
    pub fn irecvv(
        &self,
        from: usize,
        tag: impl Into<Match>,
        slices: &[BufferSlice],
    ) -> Result<Request> {
        self.shared.start_receive(Channel::User, from, tag.into(), slices)
    }

    /// Sends, and waits for the end of it.
    pub fn send(
        &self,
        to: usize,
        tag: u32,
        slice: impl Into<BufferSlice>,
        timeout: Duration,
    ) -> Result<Outcome> {
        self.isend(to, tag, slice)?.wait(timeout)
    }

    /// Receives, and waits for the end of it.
    pub fn recv(
        &self,
        from: usize,
        tag: impl Into<Match>,
        slice: impl Into<BufferSlice>,
        timeout: Duration,
    ) -> Result<Outcome> {
        self.irecv(from, tag, slice)?.wait(timeout)
    }

    /// Makes progress with all that is under way, without waiting.
    pub fn progress(&self) -> Result<()> {
        self.shared.step(&mut self.shared.state.lock())
    }

    /// Leaves together with all others: waits until each rank has come to this point, while the device still answers
    /// them.
    ///
    /// # Errors
    /// If a rank died instead, naming it; [`Kind::Timeout`] naming those who do not come.
    pub fn finish(&self, timeout: Duration) -> Result<()> {
        let (start, own) = (Instant::now(), self.rank());
        // What streams have sent may not have found a receive yet.
        self.shared.poll_until(timeout, |state| Ok((!state.is_busy()).then_some(())))?;
        self.leave_guard.announce_leave(None);
        let left = timeout.saturating_sub(start.elapsed());
        let others = (0..self.size()).filter(|rank| *rank != own);
        let gone = |state: &mut State| {
            let all = others.clone().all(|rank| state.peers[rank].end.is_some());
            all.then(|| others.clone().find_map(|rank| died(&state.peers[rank])))
        };
        match self.shared.wait_until(left, gone)? {
            Some(None) => Ok(()),
            Some(Some(error)) => Err(error.during("leave together")),
            None => {
                let state = self.shared.state.lock();
                let here = others.filter(|rank| state.peers[*rank].end.is_none());
                let names: Vec<String> = here.map(|rank| format!("rank {rank}")).collect();
                Err(Error::new(Kind::Timeout, "leave together")
                    .why(format!("{} did not come", names.join(", "))))
            }
        }
    }

    /// Leaves with a reason, which the others are told: every request of theirs with this rank fails with it.
    pub fn abort(&self, why: impl Into<String>) {
        self.leave_guard.announce_leave(Some(why.into()));
    }
}

/// Why a peer did not leave in an orderly way.
fn died(peer: &Peer) -> Option<Error> {
    peer.end.clone().filter(|_| !peer.has_left)
}

/// The devices' part: queue pairs to all ranks.
fn connect(
    rank_info: RankInfo,
    options: CommOptions,
    rank_links: &mut RankLinks,
) -> Result<Arc<Shared>> {
    let deadline = Instant::now() + options.timeout;
    let (rank, size) = (rank_info.rank, rank_info.size);
    let link = options.link.open(rank_links.local_ip, rank)?;
    let progress_mode =
        HcaOptions { progress_mode: options.progress_mode, ..HcaOptions::default() };
    let context = Context::open_with(link, progress_mode)?;
    let pd = context.pd();
    let area = Area::new(&context, &pd, size, options.eager, options.receives)?;
    let per_peer = USER_WORK + CONTROL_WORK + area.receives;
    let cq = context.create_cq(per_peer * size as u32)?;
    let table = Buffer::register(&context, &pd, HostMemory::new(size as u64 * 8)?)?;
    let mut peers: Vec<Peer> = (0..size).map(|_| Peer::new(area.receives, options.queue)).collect();
    for (other, peer) in peers.iter_mut().enumerate().filter(|(other, _)| *other != rank) {
        create_peer_qp((&context, &pd, &cq), &options, (&area, &table), peer, rank_links, other)?;
    }
    let (requests, queue) = (options.requests, options.queue);
    let mut state = State::new(rank, peers, area, requests, queue);
    for other in (0..size).filter(|other| *other != rank) {
        let hello = match rank_links.recv(other, deadline)? {
            BootstrapMsg::Hello(hello) => hello,
            message => return Err(unexpected(other, &message)),
        };
        connect_peer(&mut state, other, hello)?;
    }
    let others = || (0..size).filter(|other| *other != rank);
    others().try_for_each(|other| rank_links.send(other, &BootstrapMsg::Ready))?;
    for other in others() {
        match rank_links.recv(other, deadline)? {
            BootstrapMsg::Ready => {}
            message => return Err(unexpected(other, &message)),
        }
    }
    let mut links = Vec::new();
    for bootstrap in rank_links.links.iter_mut() {
        if let Some(bootstrap) = bootstrap.as_mut() {
            bootstrap.set_timeout(Duration::from_secs(2))?;
        }
        links.push(bootstrap.take().map(Mutex::new));
    }
    Ok(Arc::new(Shared {
        rank_info,
        options,
        context,
        pd,
        cq,
        state: Mutex::new(state),
        woken: Condvar::new(),
        wakeup: EventFd::new()?,
        links,
        table,
        consumed: Mutex::new(vec![0; size]),
        ready_sent: Mutex::new(vec![0; size]),
        round: Mutex::new(0),
    }))
}

/// Makes the queue pair for a rank, and tells it of it.
fn create_peer_qp(
    (context, pd, cq): (&Context, &Pd, &Cq),
    options: &CommOptions,
    (area, table): (&Area, &Buffer),
    peer: &mut Peer,
    rank_links: &mut RankLinks,
    other: usize,
) -> Result<()> {
    let queues = QpOptions {
        send_depth: USER_WORK + CONTROL_WORK,
        receive_depth: area.receives,
        max_send_sge: MAX_SLICES as u32 + 1,
        max_recv_sge: 1,
        // Nine seconds in all: death is told by the connections, and a rank that only stands still is waited for.
        timeout: 18,
        retry_count: 7,
        ..QpOptions::default()
    };
    let qp = context.create_qp(pd, cq, cq, queues)?;
    let (address, rkey) = table.remote(0);
    let hello = Hello {
        endpoint: qp.endpoint(),
        receives: options.receives,
        slot: area.slot,
        table: (address, rkey),
    };
    peer.qp = Some(qp);
    rank_links.send(other, &BootstrapMsg::Hello(hello))
}

/// Connects to a rank that has told of itself.
fn connect_peer(state: &mut State, other: usize, hello: Hello) -> Result<()> {
    let max_slot = (1 << 21) + 64;
    if hello.slot < 512 || hello.slot > max_slot || hello.receives == 0 {
        return Err(unexpected(other, &BootstrapMsg::Hello(hello)));
    }
    let peer = &mut state.peers[other];
    peer.credits = hello.receives;
    let endpoint = hello.endpoint;
    peer.hello = Some(hello);
    let slots = state.area.receives;
    if let Some(qp) = &state.peers[other].qp {
        let connected = qp.connect(&endpoint);
        connected.map_err(|why| why.during(format!("connect to rank {other}")))?;
    }
    (0..slots).try_for_each(|slot| state.post_receive(other, slot))
}

// Receives for words without credits come on top.
const _: () = assert!(CONTROL_RECEIVES < CONTROL_WORK);
