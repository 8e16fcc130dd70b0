//! Transfer agents: lists of memory ranges written to, or read from, peers that come and go.
//!
//! An agent registers memory and publishes [`metadata`](Agent::metadata): bytes that any store or
//! socket carries to other agents. A peer that has them posts transfers: one-sided writes and reads
//! of whole lists, with an optional notification that arrives after all data.
//!
//! | type | what it is |
//! |---|---|
//! | [`Agent`], [`AgentOptions`] | one end: a name, devices, registered memory, peers |
//! | [`Memory`] | memory that is registered with an agent |
//! | [`Peer`], [`RemoteMemory`] | another agent, and what it has registered |
//! | [`Descriptor`], [`PreparedTransfer`] | a range of memory; lists of them, looked up |
//! | [`Transfer`], [`TransferState`] | a transfer that was posted; also a future |
//! | [`Notification`] | what a peer sent with a transfer, or on its own |
//!
//! ```
//! use std::time::Duration;
//! use warpwire::agent::{Agent, AgentOptions, TransferOp};
//! use warpwire::mr::HostMemory;
//! # let options = || AgentOptions::default().with_address(std::net::IpAddr::from([127, 0, 0, 1]));
//! # /*
//! let options = AgentOptions::default;
//! # */
//!
//! // In practice these are two processes, and the metadata travels by a store or a socket.
//! let alice = Agent::open("alice", options())?;
//! let bob = Agent::open("bob", options())?;
//! let (source, target) = (HostMemory::new(1 << 20)?, HostMemory::new(1 << 20)?);
//! source.bytes().write(4096, b"hello")?;
//! let local = alice.register(source)?;
//! let _registered = bob.register(target.clone())?;
//! let peer = alice.add_peer(&bob.metadata()?)?;
//!
//! // Two ranges, one transfer, one notification.
//! let there = peer.memory()[0].clone();
//! let list = [local.range(4096, 5)?, local.range(0, 64)?];
//! let remote = [there.range(0, 5)?, there.range(512, 64)?];
//! let prepared = alice.prepare(&peer, &list, &remote)?;
//! let transfer = alice.post(TransferOp::Write, &prepared, Some(b"block 7"))?;
//! transfer.wait(Duration::from_secs(5))?;
//!
//! let notification = bob.wait_notification(Duration::from_secs(5))?.expect("it arrives");
//! assert_eq!((notification.from(), notification.bytes()), ("alice", &b"block 7"[..]));
//! let mut received = [0; 5];
//! target.bytes().read(0, &mut received)?;
//! assert_eq!(&received, b"hello");
//! # Ok::<(), warpwire::Error>(())
//! ```
//!
//! # Promises
//! 1. **A notification arrives after all data of its transfer**, and once. Transfers have no order
//!    among each other.
//! 2. **When a transfer has ended, nothing of it is written any more**, here or at the peer,
//!    however it ended: done, failed, timed out or cancelled. If the peer cannot be asked (its
//!    machine does not answer), its memory is out of our reach, and the error says so.
//! 3. **Every transfer ends**: with success, or with a cause. A peer that dies is noticed by its
//!    connection; one that does not answer by the transport's retries; a deadline may be set.
//! 4. **A transfer that fails for its own reason does not take others with it**: access to memory
//!    that the peer has deregistered fails that transfer, and the others go on.
//! 5. Nothing that a peer sends is trusted: see `SECURITY.md`. Metadata is a capability: whoever
//!    has it may read and write the memory in it.
//!
//! # Cost
//! Preparing a list costs one look-up per range, and neighbours are merged. Posting writes one work
//! request per range. An agent has one thread, which sleeps while nothing happens; calls that ask
//! for a state poll the completion queues themselves.

mod connection;
mod control;
mod inbox;
mod incoming;
mod lanes;
mod memory;
mod metadata;
mod options;
mod peer;
mod prepared;
mod progress;
mod rail;
mod stream_order;
mod transfer;

use std::any::Any;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub use inbox::Notification;
pub use memory::Memory;
#[doc(hidden)]
pub use metadata::is_metadata;
pub use options::AgentOptions;
pub use peer::{Peer, RemoteMemory};
pub use prepared::{Descriptor, PreparedTransfer};
pub use transfer::{Transfer, TransferOp, TransferOptions, TransferState};

use crate::error::{Error, Kind, Result};
use crate::link::LinkKind;
use crate::mem::StreamRef;
use crate::mr::MemorySource;
use crate::verbs::Access;
use crate::verbs::bootstrap::BootstrapListener;
use metadata::Metadata;
use progress::Shared;
use rail::Rail;

/// The longest name of an agent, in bytes.
pub const MAX_NAME_LEN: usize = 256;
/// The longest notification, in bytes.
pub const MAX_NOTIFICATION_LEN: usize = 1 << 20;

/// A transfer agent. Clones are the same agent; dropping the last one closes its connections, and
/// transfers in progress end.
///
/// Any thread may use it. See the [module](self) for an example.
#[derive(Clone)]
pub struct Agent(Arc<Handle>);

/// Closes the agent when the last handle is dropped: the agent's thread keeps `Shared` alive.
struct Handle(Arc<Shared>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.close();
    }
}

impl std::fmt::Debug for Agent {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Agent").field(&self.name()).finish()
    }
}

impl Agent {
    /// Opens an agent. `name` tells peers apart: a peer with the same name as another replaces it.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if the name is empty, longer than [`MAX_NAME_LEN`] or contains
    /// control characters, or an option is out of range; or if a device cannot be opened.
    pub fn open(name: &str, options: AgentOptions) -> Result<Self> {
        check_name(name).map_err(|error| error.during("open an agent"))?;
        options.check()?;
        let contexts = options.open_contexts()?;
        let rails = contexts.into_iter().map(Rail::open).collect::<Result<Vec<_>>>()?;
        let listener = listen(&rails)?;
        let shared = Shared::new(name, options, rails, listener.local_addr()?)?;
        progress::start(&shared, listener)?;
        Ok(Self(Arc::new(Handle(shared))))
    }

    fn shared(&self) -> &Arc<Shared> {
        &self.0.0
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.shared().name
    }

    /// The devices that it uses and the reason for each, one line per rail.
    pub fn path(&self) -> Vec<String> {
        self.shared().rails.iter().map(|rail| rail.context.path().to_string()).collect()
    }

    /// Registers memory: peers that have the metadata of afterwards may read and write it.
    ///
    /// # Errors
    /// As for [`Context::register`](crate::verbs::Context::register).
    pub fn register(&self, memory: impl Into<MemorySource>) -> Result<Memory> {
        self.register_with(memory, Access::ALL)
    }

    /// Registers memory with less than all rights: for instance [`Access::REMOTE_READ`] alone.
    /// Without [`Access::LOCAL_WRITE`] it cannot be the target of reads that are posted here.
    ///
    /// # Errors
    /// As for [`Context::register`](crate::verbs::Context::register).
    pub fn register_with(&self, memory: impl Into<MemorySource>, access: Access) -> Result<Memory> {
        let memory = memory.into();
        let kind = memory::kind_of(&memory);
        let mrs = self
            .shared()
            .rails
            .iter()
            .map(|rail| rail.context.register(&rail.pd, memory.clone(), access));
        Ok(Memory::new(self.shared(), mrs.collect::<Result<Vec<_>>>()?, kind, None))
    }

    /// Registers `len` bytes at `address`: memory of this process, or of a GPU that this process
    /// uses, whoever allocated it.
    ///
    /// # Errors
    /// As for [`Context::register_address`](crate::verbs::Context::register_address).
    ///
    /// # Safety
    /// As for [`Context::register_address`](crate::verbs::Context::register_address): the memory
    /// stays allocated until the registration has ended ([`Memory::deregister`]), and is accessed
    /// meanwhile only as memory that devices write.
    #[allow(unsafe_code)]
    pub unsafe fn register_address(
        &self,
        address: u64,
        len: u64,
        access: Access,
    ) -> Result<Memory> {
        // SAFETY: guaranteed by the caller.
        unsafe { self.register_owned(address, len, access, None) }
    }

    /// Like [`register_address`](Self::register_address), with the owner of the memory, which is
    /// dropped when the registration has ended: on the thread that ends it, which may be the
    /// agent's.
    ///
    /// # Errors
    /// As for [`register_address`](Self::register_address).
    ///
    /// # Safety
    /// As for [`register_address`](Self::register_address); the memory stays allocated while
    /// `owner` lives.
    #[allow(unsafe_code)]
    pub unsafe fn register_owned(
        &self,
        address: u64,
        len: u64,
        access: Access,
        owner: Option<Box<dyn Any + Send + Sync>>,
    ) -> Result<Memory> {
        let mut mrs = Vec::new();
        for rail in &self.shared().rails {
            // SAFETY: guaranteed by the caller.
            let mr = unsafe { rail.context.register_address(&rail.pd, address, len, None, access) };
            mrs.push(mr?);
        }
        let kind = memory::kind_at(address);
        Ok(Memory::new(self.shared(), mrs, kind, owner))
    }

    /// What peers need: name, address, and all memory that is registered now. It is text, and
    /// carries a version. Whoever has it may access the memory.
    ///
    /// # Errors
    /// If the agent has failed.
    pub fn metadata(&self) -> Result<Vec<u8>> {
        let memory = self.shared().memory.all();
        self.shared().metadata(memory.iter().map(Arc::as_ref), false).encode()
    }

    /// Metadata with this memory alone, for peers that are to see no other, or that have been given
    /// the rest before: [`add_peer`](Self::add_peer) adds the memory to what it knows. With an
    /// empty list it is the agent's address.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if the memory is another agent's.
    pub fn metadata_of(&self, memory: &[&Memory]) -> Result<Vec<u8>> {
        if memory.iter().any(|memory| !memory.belongs_to(self.shared())) {
            return Err(Error::new(Kind::InvalidArgument, "encode metadata")
                .why("the memory is registered with another agent"));
        }
        self.shared().metadata(memory.iter().map(|memory| memory.inner()), true).encode()
    }

    /// Adds a peer, or what has changed of one: its metadata of now replaces what was known of its
    /// memory (partial metadata, from [`metadata_of`](Self::metadata_of), adds to it). If the peer
    /// has been restarted since, its transfers in progress fail, and the new one takes its place.
    /// Starts to connect; transfers may be posted at once.
    ///
    /// # Errors
    /// [`Kind::Malformed`] if these bytes are no metadata, [`Kind::Unsupported`] if they are of
    /// another version.
    pub fn add_peer(&self, metadata: &[u8]) -> Result<Peer> {
        let metadata = Metadata::decode(metadata)?;
        self.shared().add_peer(metadata)
    }

    /// The peer of this name.
    pub fn peer(&self, name: &str) -> Option<Peer> {
        self.shared().peers.lock().get(name).cloned()
    }

    /// Removes a peer: its transfers in progress end as cancelled. Returns whether it was known.
    pub fn remove_peer(&self, name: &str) -> bool {
        let Some(peer) = self.shared().peers.lock().remove(name) else { return false };
        let why = format!("peer {name:?} was removed");
        peer.disconnect(Error::new(Kind::Cancelled, "transfer").why(why));
        self.shared().wake.raise();
        true
    }

    /// Checks two lists, of equally many ranges with equal lengths in pairs, and looks their
    /// registrations up. The result can be posted many times, also concurrently, and keeps the
    /// local memory registered.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if the lists do not match, [`Kind::OutOfRange`] if a range is not
    /// in memory that this agent, or the peer by what is known of it, has registered: the text has
    /// its index.
    pub fn prepare(
        &self,
        peer: &Peer,
        local: &[Descriptor],
        remote: &[Descriptor],
    ) -> Result<PreparedTransfer> {
        PreparedTransfer::new(self.shared(), peer, local, remote)
    }

    /// Posts a transfer: [`post_with`](Self::post_with) without a deadline.
    ///
    /// # Errors
    /// As for [`post_with`](Self::post_with).
    pub fn post(
        &self,
        op: TransferOp,
        prepared: &PreparedTransfer,
        notification: Option<&[u8]>,
    ) -> Result<Transfer> {
        let notification = notification.map(<[u8]>::to_vec);
        self.post_with(op, prepared, TransferOptions::default().with_notification(notification))
    }

    /// Posts a transfer. Returns as soon as it is queued; it may even be done. What happens to it
    /// later is its state.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if the lists were prepared by another agent or the notification is
    /// longer than [`MAX_NOTIFICATION_LEN`]; [`Kind::Stale`] if the peer was removed or restarted
    /// since.
    pub fn post_with(
        &self,
        op: TransferOp,
        prepared: &PreparedTransfer,
        options: TransferOptions,
    ) -> Result<Transfer> {
        transfer::post(self.shared(), op, prepared, options)
    }

    /// Posts a transfer in the order of a device's stream: it starts when the stream gets to this
    /// point, and the work behind it does not wait. What the stream did before is in the data. A
    /// deadline counts from this call.
    ///
    /// To let the stream wait, use [`Transfer::wait_on_stream`]. Streams of other libraries are
    /// [`ForeignStream`](crate::mem::ForeignStream)s.
    ///
    /// ```
    /// use std::time::Duration;
    /// use warpwire::agent::{Agent, AgentOptions, TransferOp, TransferOptions};
    /// use warpwire::mem::sim::{Sim, SimConfig};
    /// # let loopback = std::net::IpAddr::from([127, 0, 0, 1]);
    /// # let options = || AgentOptions::default().with_address(loopback);
    /// # let (alice, bob) = (Agent::open("alice", options())?, Agent::open("bob", options())?);
    /// # let bytes = warpwire::mr::HostMemory::new(4096)?;
    /// # let theirs = bob.register(bytes.clone())?;
    /// # let peer = alice.add_peer(&bob.metadata()?)?;
    /// let gpu = Sim::start(SimConfig::default())?.device(0)?;
    /// let (memory, stream) = (gpu.alloc(4096)?, gpu.stream()?);
    /// let mine = alice.register(memory.whole()?)?;
    /// let prepared = alice.prepare(&peer, &[mine.range(0, 4096)?], &[theirs.range(0, 4096)?])?;
    ///
    /// stream.fill(&memory.whole()?, 7)?; // a kernel would do
    /// let options = TransferOptions::default();
    /// let write = alice.post_on_stream(&stream, TransferOp::Write, &prepared, options)?;
    /// write.wait_on_stream(&stream)?;
    /// stream.fill(&memory.whole()?, 8)?; // the next step, when the data has been sent
    /// stream.synchronize(Duration::from_secs(20))?;
    /// write.wait(Duration::ZERO)?; // whether it succeeded
    /// # let mut byte = [0];
    /// # bytes.bytes().read(4095, &mut byte)?;
    /// # assert_eq!(byte, [7]);
    /// # Ok::<(), warpwire::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`post_with`](Self::post_with); [`Kind::Unsupported`] if the stream is being captured
    /// into a graph.
    pub fn post_on_stream<'a>(
        &self,
        stream: impl Into<StreamRef<'a>>,
        op: TransferOp,
        prepared: &PreparedTransfer,
        options: TransferOptions,
    ) -> Result<Transfer> {
        transfer::post_on_stream(self.shared(), stream.into(), op, prepared, options)
    }

    /// Sends a notification alone.
    ///
    /// # Errors
    /// As for [`post_with`](Self::post_with).
    pub fn notify(&self, peer: &Peer, bytes: &[u8]) -> Result<Transfer> {
        let nothing = PreparedTransfer::new(self.shared(), peer, &[], &[])?;
        self.post(TransferOp::Write, &nothing, Some(bytes))
    }

    /// Takes the oldest notification that has arrived, of any peer. Never blocks.
    pub fn next_notification(&self) -> Option<Notification> {
        self.shared().poll();
        self.shared().take_notification()
    }

    /// Waits for a notification; `None` when `timeout` has passed.
    ///
    /// # Errors
    /// If the agent has failed.
    pub fn wait_notification(&self, timeout: Duration) -> Result<Option<Notification>> {
        let deadline = Instant::now().checked_add(timeout);
        self.shared().wait(deadline, || self.shared().take_notification())
    }

    /// A task will wait for [the descriptor](AsFd): the agent's thread takes completions at once.
    #[cfg(feature = "tokio")]
    pub(crate) fn prepare_wait(&self) {
        self.shared().wake_for_sleeper();
    }

    /// Makes [the descriptor](AsFd) readable if there are more notifications: it was cleared for
    /// the one that was taken.
    #[cfg(feature = "tokio")]
    pub(crate) fn pass_event_on(&self) {
        if self.shared().has_notifications() {
            self.shared().events.raise();
        }
    }

    /// Clears [the descriptor](AsFd). Call it before looking at transfers and notifications, so
    /// that what happens meanwhile raises it again; returns whether it was raised.
    pub fn clear_events(&self) -> bool {
        self.shared().events.take()
    }
}

impl AsFd for Agent {
    /// Readable when a transfer has ended or a notification has arrived, until
    /// [`clear_events`](Agent::clear_events): for `poll`, `epoll` and event loops.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.shared().events.as_fd()
    }
}

/// Listens for peers at the first device's address, where that is one of this machine.
fn listen(rails: &[Rail]) -> Result<BootstrapListener> {
    let in_process = rails[0].context.path().kind == LinkKind::Loopback;
    let ip = match rails[0].address()?.ip() {
        _ if in_process => IpAddr::V4(Ipv4Addr::LOCALHOST),
        ip => ip,
    };
    let listener = TcpListener::bind(SocketAddr::new(ip, 0))
        .map_err(|why| Error::os("listen for peers of an agent", &why).on(ip.to_string()))?;
    BootstrapListener::new(listener)
}

/// Checks a name, ours or a peer's.
fn check_name(name: &str) -> Result<()> {
    let wrong = |why: String| Err(Error::new(Kind::InvalidArgument, "use a name").why(why));
    match name {
        "" => wrong("the agent's name is empty".into()),
        _ if name.len() > MAX_NAME_LEN => {
            wrong(format!("the agent's name is longer than {MAX_NAME_LEN} bytes"))
        }
        _ if name.chars().any(char::is_control) => {
            wrong("the agent's name contains control characters".into())
        }
        _ => Ok(()),
    }
}
