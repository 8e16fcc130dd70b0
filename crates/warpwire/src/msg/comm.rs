//! Communicators: groups of ranks that exchange messages.

use std::any::Any;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};
use warpwire_proto::wire::UDP_PORT;

use super::buffer::{Buffer, BufferSlice, Domain};
use super::entries::Match;
use super::header::{Channel, MAX_SLICES};
use super::peer::{Area, CONTROL_RECEIVES, CONTROL_WORK, Peer, USER_WORK};
use super::rank_info::{Launcher, MAX_RANKS, RankInfo, Rendezvous};
use super::rendezvous::{BootstrapMsg, Hello, RankLinks, connect_ranks, secret, unexpected};
use super::request::{Outcome, Request};
use super::shared::{Events, Shared};
use super::state::State;
use super::watch::Watcher;
use crate::error::{Error, Kind, Result};
use crate::hca::HcaOptions;
use crate::host::runtime_folder;
use crate::link::Hub;
use crate::mr::HostMemory;
use crate::units;
use crate::verbs::{
    Access, Context, Cq, EventFd, LinkChoice, MemorySource, ProgressMode, QpOptions,
};

/// Options of a communicator.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CommOptions {
    /// How long to wait for all ranks to join, and for each internal collective. Default: 60 s.
    pub timeout: Duration,
    /// The device: a software HCA and its link, or hardware.
    pub link: LinkChoice,
    /// Eager limit in bytes, at most 1 MiB. Messages up to this length are sent without handshake
    /// and buffered by the receiver until a receive matches; for longer ones the receiver reads the
    /// data once a receive matches (rendezvous protocol). Default: 8 KiB.
    pub eager_limit: u64,
    /// Number of unexpected messages buffered per peer, 4 to 4096. A sender that exceeds it waits
    /// (credit flow control). Default: 64.
    pub receive_credits: u32,
    /// Maximum number of requests in flight, to all peers together. Default: 4096.
    pub max_requests: u32,
    /// Maximum number of queued sends to a peer, and of receives from it; more fail with
    /// [`Kind::Busy`]. Default: 1024.
    pub queue_depth: u32,
    /// Which threads drive the engine.
    pub progress_mode: ProgressMode,
}

setters! {
    CommOptions {
        with_timeout => timeout: Duration,
        with_link => link: LinkChoice,
        with_eager_limit => eager_limit: u64,
        with_receive_credits => receive_credits: u32,
        with_max_requests => max_requests: u32,
        with_queue_depth => queue_depth: u32,
        with_progress_mode => progress_mode: ProgressMode,
    }
}

impl Default for CommOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            link: LinkChoice::default(),
            eager_limit: 8 << 10,
            receive_credits: 64,
            max_requests: 4096,
            queue_depth: 1024,
            progress_mode: ProgressMode::default(),
        }
    }
}

impl CommOptions {
    /// The defaults, with an engine thread that polls doorbells of streams and kernels: needed for
    /// [device channels](super::device_channel).
    pub fn for_streams() -> Self {
        let progress_mode = ProgressMode::Thread { spin: Duration::from_micros(200), core: None };
        Self { progress_mode, ..Self::default() }
    }

    /// The defaults, modified by the environment: see [`with_env`](Self::with_env).
    pub fn from_env() -> Result<Self> {
        Self::default().with_env()
    }

    /// These options, modified by `WARPWIRE_LINK` (see [`LinkChoice`]) and `WARPWIRE_TIMEOUT` (such
    /// as `30s`) where they are set.
    ///
    /// # Errors
    /// [`Kind::Malformed`] or [`Kind::InvalidArgument`] if a variable cannot be parsed; as for
    /// [`Context::open_device`] if it names a device.
    pub fn with_env(mut self) -> Result<Self> {
        if let Ok(text) = std::env::var("WARPWIRE_LINK") {
            self.link = text.parse()?;
        }
        if let Ok(text) = std::env::var("WARPWIRE_TIMEOUT") {
            self.timeout = units::parse_duration(&text)?;
        }
        Ok(self)
    }

    fn check(&self) -> Result<()> {
        let wrong = |why: &'static str| {
            Err(Error::new(Kind::InvalidArgument, "create a communicator").why(why))
        };
        match self {
            _ if self.eager_limit > 1 << 20 => wrong("eager_limit must be at most 1 MiB"),
            _ if !(4..=4096).contains(&self.receive_credits) => {
                wrong("receive_credits must be 4 to 4096")
            }
            _ if !(1..=1 << 20).contains(&self.max_requests) => {
                wrong("max_requests must be 1 to 1048576")
            }
            _ if !(1..=1 << 20).contains(&self.queue_depth) => {
                wrong("queue_depth must be 1 to 1048576")
            }
            _ => Ok(()),
        }
    }
}

/// A communicator: ranks that exchange messages. Clones share it; dropping the last clone leaves
/// the communicator.
///
/// Progress is made by calls that wait or test; for requests that are awaited, by a thread of the
/// communicator. See the [module](super) for an example.
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

/// Announces that this rank leaves when the last handle is dropped.
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
        // The ACK of the last packet received is sent in a later engine step; without it the peer
        // would report our leaving as a loss.
        const LAST_STEPS: u32 = 8;
        for _ in 0..LAST_STEPS {
            let _ = self.shared.domain.context.soft().map(|hca| hca.poll());
        }
        let message = BootstrapMsg::Bye { why };
        for link in self.shared.links.iter().flatten() {
            // If this fails, the peer detects that the connection is closed.
            let _ = link.lock().send(&message);
        }
    }
}

impl Drop for LeaveGuard {
    fn drop(&mut self) {
        const LINGER: Duration = Duration::from_secs(1);
        if !std::thread::panicking() {
            // Let messages in flight arrive.
            let _ = self.shared.poll_until(LINGER, |state| Ok((!state.is_busy()).then_some(())));
        }
        self.announce_leave(std::thread::panicking().then(|| "it panicked".to_owned()));
        drop(self.watcher.take());
        for link in self.shared.links.iter().flatten() {
            let _ = link.lock().stream().shutdown(std::net::Shutdown::Both);
        }
        let mut state = self.shared.lock();
        for rank in 0..state.peers.len() {
            let error = Error::new(Kind::Freed, format!("reach rank {rank}"));
            let error = error.why("this rank has left the communicator");
            match rank == state.rank {
                true => state.fail_own(error),
                false => state.fail_peer(rank, error),
            }
        }
        drop(state);
        self.shared.wake_all();
    }
}

impl Comm {
    /// Joins the ranks that a launcher started: torchrun, mpirun, srun, or `warpwire run`. Without
    /// a launcher, creates a communicator of one rank.
    ///
    /// # Errors
    /// If the environment is invalid, or the ranks do not connect in time; the text names the
    /// missing ranks.
    pub fn from_env() -> Result<Self> {
        Self::from_env_with(CommOptions::default())
    }

    /// As [`from_env`](Self::from_env), with options: `WARPWIRE_LINK` and `WARPWIRE_TIMEOUT` take
    /// precedence over them.
    pub fn from_env_with(options: CommOptions) -> Result<Self> {
        Self::open(RankInfo::from_env()?, options.with_env()?)
    }

    /// Joins the ranks described by `rank_info`.
    pub fn open(rank_info: RankInfo, options: CommOptions) -> Result<Self> {
        options.check()?;
        if rank_info.rank >= rank_info.size || rank_info.size > MAX_RANKS {
            let error = Error::new(Kind::InvalidArgument, "create a communicator");
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

    /// Creates all ranks of a communicator inside this process, for threads and tests.
    pub fn local(size: usize) -> Result<Vec<Self>> {
        let link = LinkChoice::Hub(Hub::new());
        Self::local_with(size, &CommOptions { link, ..CommOptions::default() })
    }

    /// As [`local`](Self::local), with options.
    pub fn local_with(size: usize, options: &CommOptions) -> Result<Vec<Self>> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = format!("local-{}-{number}.address", std::process::id());
        let folder = runtime_folder(std::env::var_os("XDG_RUNTIME_DIR"));
        let (rendezvous, token) = (Rendezvous::File(folder.join(name)), secret()?);
        let open = |rank: usize| {
            let (rendezvous, token) = (rendezvous.clone(), token.clone());
            let launcher = Launcher::Run;
            let rank_info = RankInfo { rank, size, local_rank: rank, rendezvous, token, launcher };
            Self::open(rank_info, options.clone())
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> = (0..size).map(|rank| scope.spawn(move || open(rank))).collect();
            let lost =
                || Error::new(Kind::PeerLost, "create a communicator").why("a rank panicked");
            threads
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|_| Err(lost())))
                .collect()
        })
    }

    /// The rank of this process, from 0 to `size` − 1.
    pub fn rank(&self) -> usize {
        self.shared.rank_info.rank
    }

    /// The number of ranks.
    pub fn size(&self) -> usize {
        self.shared.rank_info.size
    }

    /// The rank among those on this machine, for choosing a GPU.
    pub fn local_rank(&self) -> usize {
        self.shared.rank_info.local_rank
    }

    /// Launcher and meeting point of the ranks.
    pub fn rank_info(&self) -> &RankInfo {
        &self.shared.rank_info
    }

    /// The underlying device.
    pub fn context(&self) -> &Context {
        &self.shared.domain.context
    }

    /// Which path messages to a rank take, and why not a better one.
    pub fn path(&self, rank: usize) -> Result<crate::link::LinkPath> {
        self.shared.check_rank(rank, "reach")?;
        match &self.shared.lock().peers[rank].qp {
            Some(qp) => qp.path(),
            None => Ok(self.shared.domain.context.path().clone()),
        }
    }

    /// Why a rank is lost: it died, left or aborted. `None` while it is alive.
    pub fn lost(&self, rank: usize) -> Option<Error> {
        self.shared.lock().peers.get(rank)?.end.clone()
    }

    /// Allocates and registers host memory.
    pub fn alloc(&self, len: u64) -> Result<Buffer> {
        self.register(HostMemory::new(len)?)
    }

    /// Registers memory of the host or of a device.
    pub fn register(&self, memory: impl Into<MemorySource>) -> Result<Buffer> {
        self.shared.domain.register(memory)
    }

    /// Registers `len` bytes at `address`: memory of this process, or of a GPU that this process
    /// uses, whoever allocated it. `access` may be less than all rights: [`Access::REMOTE_READ`]
    /// alone for memory that is only sent.
    ///
    /// `owner` is dropped when the memory is not used any more: when no buffer and no request in
    /// flight has it, on the thread that finds that out, under a lock of the communicator. So its
    /// destructor must not call the communicator.
    ///
    /// # Errors
    /// As for [`Context::register_address`].
    ///
    /// # Safety
    /// As for [`Context::register_address`]; the memory stays allocated while `owner` lives, and
    /// without an owner until no buffer and no request in flight has it.
    #[allow(unsafe_code)]
    pub unsafe fn register_owned(
        &self,
        address: u64,
        len: u64,
        access: Access,
        owner: Option<Box<dyn Any + Send + Sync>>,
    ) -> Result<Buffer> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.shared.domain.register_address(address, len, access, owner) }
    }

    /// Starts to send. The memory must not change until the request has completed.
    ///
    /// Messages to one rank arrive in order; a receive takes the first that matches. A short
    /// message (see [`CommOptions::eager_limit`]) has completed when the peer has received it, a
    /// longer one when the peer has read it.
    ///
    /// # Errors
    /// [`Kind::Busy`] if too many requests are queued: wait for some of them. [`Kind::PeerLost`] if
    /// the rank is lost.
    pub fn isend(&self, to: usize, tag: u32, slice: impl Into<BufferSlice>) -> Result<Request> {
        self.isendv(to, tag, &[slice.into()])
    }

    /// Starts to send a message gathered from slices, in order; at most 15.
    pub fn isendv(&self, to: usize, tag: u32, slices: &[BufferSlice]) -> Result<Request> {
        self.shared.start_send(Channel::User, to, tag, slices)
    }

    /// Starts to receive a message with a matching tag from a rank. If the message is longer than
    /// the memory it is dropped and the request fails; the sender is not notified.
    pub fn irecv(
        &self,
        from: usize,
        tag: impl Into<Match>,
        slice: impl Into<BufferSlice>,
    ) -> Result<Request> {
        self.irecvv(from, tag, &[slice.into()])
    }

    /// Starts to receive a message scattered to slices, in order; at most 15.
    pub fn irecvv(
        &self,
        from: usize,
        tag: impl Into<Match>,
        slices: &[BufferSlice],
    ) -> Result<Request> {
        self.shared.start_receive(Channel::User, from, tag.into(), slices)
    }

    /// Sends and waits for completion.
    pub fn send(
        &self,
        to: usize,
        tag: u32,
        slice: impl Into<BufferSlice>,
        timeout: Duration,
    ) -> Result<Outcome> {
        self.isend(to, tag, slice)?.wait(timeout)
    }

    /// Receives and waits for completion.
    pub fn recv(
        &self,
        from: usize,
        tag: impl Into<Match>,
        slice: impl Into<BufferSlice>,
        timeout: Duration,
    ) -> Result<Outcome> {
        self.irecv(from, tag, slice)?.wait(timeout)
    }

    /// Makes progress with all requests, without blocking.
    pub fn progress(&self) -> Result<()> {
        self.shared.step(&mut self.shared.lock())
    }

    /// Clears [the descriptor](AsFd) and makes progress with all requests, without blocking;
    /// returns whether the descriptor was readable. Call it before looking at requests
    /// ([`Request::test`]), so that what happens meanwhile makes it readable again.
    ///
    /// # Errors
    /// If the device has failed.
    pub fn clear_events(&self) -> Result<bool> {
        self.shared.clear_events()
    }

    /// Leaves the communicator collectively: waits until each rank has called this, while the
    /// engine still answers them.
    ///
    /// # Errors
    /// If a rank died instead, naming it; [`Kind::Timeout`] naming the ranks that have not called
    /// it.
    pub fn finish(&self, timeout: Duration) -> Result<()> {
        let (start, own) = (Instant::now(), self.rank());
        // Messages of streams may not have been matched by a receive yet.
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
                let state = self.shared.lock();
                let here = others.filter(|rank| state.peers[*rank].end.is_none());
                let names: Vec<String> = here.map(|rank| format!("rank {rank}")).collect();
                Err(Error::new(Kind::Timeout, "leave together")
                    .why(format!("{} did not call finish in time", names.join(", "))))
            }
        }
    }

    /// Leaves with a reason, which is sent to the others: all of their requests to this rank fail
    /// with it.
    pub fn abort(&self, why: impl Into<String>) {
        self.leave_guard.announce_leave(Some(why.into()));
    }
}

impl AsFd for Comm {
    /// For `poll`, `epoll` and event loops, of which only one watches it. Readable when requests
    /// may have ended or a rank was lost, until [`clear_events`](Comm::clear_events); also when it
    /// is asked for the first time. It may be readable for nothing: completions make it so, and not
    /// each ends a request.
    ///
    /// A loop clears it, looks at every request once with [`Request::test`], and waits until it is
    /// readable:
    ///
    /// ```
    /// use rustix::event::{PollFd, PollFlags, poll};
    /// use warpwire::msg::Comm;
    /// # let comm = Comm::local(1)?.remove(0);
    /// # let (mine, theirs) = (comm.alloc(64)?, comm.alloc(64)?);
    /// # let _send = comm.isend(0, 7, &mine)?;
    /// let mut request = comm.irecv(0, 7, &theirs)?;
    /// let outcome = loop {
    ///     comm.clear_events()?;
    ///     if let Some(outcome) = request.test()? {
    ///         break outcome;
    ///     }
    ///     let _ = poll(&mut [PollFd::new(&comm, PollFlags::IN)], None);
    /// };
    /// # assert_eq!(outcome.len, 64);
    /// # Ok::<(), warpwire::Error>(())
    /// ```
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared.events.watch();
        self.shared.events.epoll.as_fd()
    }
}

/// The cause, if a peer died instead of leaving.
fn died(peer: &Peer) -> Option<Error> {
    peer.end.clone().filter(|_| !peer.has_left)
}

/// Opens the device and connects queue pairs to all ranks.
fn connect(
    rank_info: RankInfo,
    options: CommOptions,
    rank_links: &mut RankLinks,
) -> Result<Arc<Shared>> {
    let deadline = Instant::now() + options.timeout;
    let (rank, size) = (rank_info.rank, rank_info.size);
    let at = match options.link {
        LinkChoice::Hub(_) => ([10, 87, (rank >> 8) as u8, rank as u8], UDP_PORT).into(),
        _ => SocketAddr::new(rank_links.local_ip, 0),
    };
    let hca_options = HcaOptions::default().with_progress_mode(options.progress_mode);
    let domain = Domain::new(options.link.open(at, hca_options)?);
    let Domain { context, pd, .. } = &*domain;
    let area = Area::new(context, pd, size, options.eager_limit, options.receive_credits)?;
    let per_peer = USER_WORK + CONTROL_WORK + area.receives;
    let cq = context.create_cq(per_peer * size as u32)?;
    let table = domain.register(HostMemory::new(size as u64 * 8)?)?;
    let mut peers: Vec<Peer> =
        (0..size).map(|_| Peer::new(area.receives, options.queue_depth)).collect();
    for (other, peer) in peers.iter_mut().enumerate().filter(|(other, _)| *other != rank) {
        create_peer_qp((&domain, &cq), &options, (&area, &table), peer, rank_links, other)?;
    }
    let (requests, queue) = (options.max_requests, options.queue_depth);
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
            bootstrap.set_timeout(Duration::from_secs(2));
        }
        links.push(bootstrap.take().map(Mutex::new));
    }
    let events = Events::new(&cq)?;
    Ok(Arc::new(Shared {
        rank_info,
        options,
        domain,
        cq,
        state: Mutex::new(state),
        woken: Condvar::new(),
        wakeup: EventFd::new()?,
        drive: EventFd::new()?,
        events,
        links,
        table,
        consumed: Mutex::new(vec![0; size]),
        ready_sent: Mutex::new(vec![0; size]),
        round: Mutex::new(0),
        scratch: Mutex::new(None),
    }))
}

/// Creates the queue pair to a rank and sends its endpoint.
fn create_peer_qp(
    (domain, cq): (&Domain, &Cq),
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
        // 9 s in total: the TCP connections detect death, and a rank that is merely stopped is
        // waited for.
        timeout: 18,
        retry_count: 7,
        ..QpOptions::default()
    };
    let qp = domain.context.create_qp(&domain.pd, cq, cq, queues)?;
    let (address, rkey) = table.remote(0);
    let hello = Hello {
        endpoint: qp.endpoint(),
        receives: options.receive_credits,
        slot: area.slot,
        table: (address, rkey),
    };
    peer.qp = Some(qp);
    rank_links.send(other, &BootstrapMsg::Hello(hello))
}

/// Connects to a rank after its hello.
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

// Receives for control messages, which need no credits, come on top.
const _: () = assert!(CONTROL_RECEIVES < CONTROL_WORK);
