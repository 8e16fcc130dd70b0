//! Lanes: messages that streams and kernels of a device send and wait for.
//!
//! The CPU matches nothing here. Beside the connection that the CPU's messages use, a lane has one of its own to each
//! rank. A receive is posted by the CPU, and names the memory that the next message of that rank goes to; messages and
//! receives meet in the order in which they were posted, without tags. A message that comes before its receive waits at
//! its sender. So a stream needs to know only that *its* receive has ended, which is a word in memory.
//!
//! | | by the CPU, now | on a stream | later | several at once |
//! |---|---|---|---|---|
//! | send | | [`DeviceChannel::send_on_stream`] | [`DeviceChannel::prepare_send`] | [`ChannelBatch::send`] |
//! | receive | [`DeviceChannel::receive`] | | | |
//! | wait for it | [`ChannelRequest::wait`] | [`DeviceChannel::wait_on_stream`], [`DeviceChannel::wait_all_on_stream`] | | [`ChannelBatch::wait`] |
//! | put, get | | [`DeviceChannel::put_on_stream`], [`DeviceChannel::put_signal_on_stream`], [`DeviceChannel::get_on_stream`] | [`DeviceChannel::prepare_put`] | [`ChannelBatch::put`] |
//! | words | | [`DeviceChannel::wait_word_on_stream`] | | [`ChannelBatch::wait_word`], [`ChannelBatch::write_word`] |
//! | ready to receive | | [`DeviceChannel::send_ready_on_stream`], [`DeviceChannel::wait_ready_on_stream`] | | |
//! | all together | | [`DeviceChannel::barrier_on_stream`] | | |
//!
//! Kernels of the program, and graphs, use the queue pair of [`DeviceChannel::kernel`]: with
//! [`Window::remote`](super::Window::remote) and [`BufferSlice::sge`](super::Part::sge) it has all that the calls of `verbs.cuh`
//! and those of [`KernelQp`] ask for.

mod batch;
mod on;
mod tracker;

use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

pub use batch::ChannelBatch;
pub use on::PreparedWork;
pub use tracker::ChannelRequest;

use super::buffer::{Buffer, BufferSlice};
use super::comm::Comm;
use super::header::MAX_SLICES;
use super::shared::Shared;
use super::state::{Loss, OnLost};
use crate::error::{Error, Kind, Result};
use crate::mem::{Allocation, Condition, Device, Word};
use crate::stream::kernel::Kernels;
use crate::stream::{KernelQp, KernelQpOptions, StreamQp, StreamQpOptions};
use crate::verbs::{QpAttributes, QpEndpoint, QpOptions, Remote, State};
use tracker::CompletionTracker;

/// How a lane is made.
#[derive(Clone, Debug)]
pub struct ChannelOptions {
    /// How many sends, and how many receives, with each rank may be under way: a power of two.
    pub depth: u32,
    /// How long a stream may wait before the connection counts as failed.
    pub wait_timeout: Duration,
    /// Whether there are queue pairs for kernels and graphs too.
    pub kernels: bool,
}

impl Default for ChannelOptions {
    fn default() -> Self {
        Self { depth: 256, wait_timeout: Duration::from_secs(30), kernels: true }
    }
}

/// Connections to all ranks for streams and kernels of one device. Clones are the same lane.
///
/// ```
/// use std::time::Duration;
/// use warpwire::link::Hub;
/// use warpwire::mem::sim::{Sim, SimConfig};
/// use warpwire::msg::{Comm, CommOptions, ChannelOptions, CommLink};
///
/// const SOON: Duration = Duration::from_secs(20);
/// let options = CommOptions { link: CommLink::Hub(Hub::new()), ..CommOptions::for_streams() };
/// std::thread::scope(|scope| {
///     for comm in Comm::local_with(2, &options)? {
///         scope.spawn(move || -> warpwire::Result<()> {
///             let gpu = Sim::start(SimConfig::default())?.device(0)?;
///             let device_channel = comm.device_channel(&gpu, ChannelOptions::default())?;
///             let stream = gpu.stream()?;
///             let (mine, theirs) = (gpu.alloc(4096)?.whole()?, gpu.alloc(4096)?.whole()?);
///             let (out, into) = (comm.register(mine.clone())?, comm.register(theirs)?);
///             let other = 1 - comm.rank();
///             let receive = device_channel.receive(other, &into)?;
///             stream.fill(&mine, 0x5a)?; // a kernel would do
///             device_channel.send_on_stream(&stream, other, &out)?;
///             device_channel.wait_on_stream(&stream, &receive)?;
///             stream.synchronize(SOON)?; // only now does the CPU wait
///             device_channel.check()?;
///             comm.finish(SOON)
///         });
///     }
///     Ok::<(), warpwire::Error>(())
/// })?;
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone)]
pub struct DeviceChannel(Arc<Inner>);

struct Inner {
    shared: Arc<Shared>,
    device: Device,
    /// By rank; nothing at our own place.
    peers: Vec<Option<ChannelPeer>>,
    /// Words that peers write: how often each is ready, and the steps of barriers.
    table: Allocation,
    _registered: Buffer,
    sync_counters: Mutex<SyncCounters>,
    waits: Mutex<Vec<WordWait>>,
}

struct ChannelPeer {
    stream: StreamQp,
    kernel: Option<KernelQp>,
    tracker: Mutex<CompletionTracker>,
    /// Where its table begins.
    table: Remote,
}

/// How often things were done.
struct SyncCounters {
    /// We told that rank that we are ready.
    ready_sent: Vec<u32>,
    /// We waited until that rank was.
    ready_awaited: Vec<u32>,
    barriers: u32,
}

/// A word that a stream waits for.
struct WordWait {
    word: Word,
    condition: Condition,
    value: u64,
    /// Who writes it; any rank if nothing.
    writer: Option<usize>,
}

/// The steps of a barrier of the most ranks.
const MAX_BARRIER_STEPS: usize = 10;

/// What ranks tell each other.
#[derive(Serialize, Deserialize)]
struct ChannelInfo {
    stream: QpEndpoint,
    kernel: Option<QpEndpoint>,
    table: (u64, u32),
}

/// An invitation's room in a message.
const CHANNEL_INFO_LEN: usize = 1024;

impl std::fmt::Debug for DeviceChannel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Lane({}, {} ranks)", self.0.device.label(), self.0.peers.len())
    }
}

impl Comm {
    /// Connects streams and kernels of a device to all ranks: every rank does so, in the same order among all that ranks
    /// do together.
    ///
    /// # Errors
    /// If the communicator was not made [for streams](super::CommOptions::for_streams), or the device's streams cannot
    /// write and wait for words.
    pub fn device_channel(
        &self,
        device: &Device,
        options: ChannelOptions,
    ) -> Result<DeviceChannel> {
        let (size, own) = (self.size(), self.rank());
        let table = device.alloc_pinned((size + MAX_BARRIER_STEPS) as u64 * 4)?;
        table.host_bytes()?.fill(0, table.len(), &[0])?;
        let registered = self.register(table.whole()?)?;
        let kernels = match options.kernels {
            true => Some(Kernels::load(device)?),
            false => None,
        };
        let mut peers = Vec::new();
        let mut send_buf = vec![0; size * CHANNEL_INFO_LEN];
        for rank in 0..size {
            if rank == own {
                peers.push(None);
                continue;
            }
            let peer = self.channel_peer(device, &options, kernels.clone())?;
            let channel_info = ChannelInfo {
                stream: peer.stream.endpoint(),
                kernel: peer.kernel.as_ref().map(KernelQp::endpoint),
                table: registered.remote(0),
            };
            let text = serde_json::to_vec(&channel_info).unwrap_or_default();
            let slot = &mut send_buf[rank * CHANNEL_INFO_LEN..(rank + 1) * CHANNEL_INFO_LEN];
            slot[..text.len()].copy_from_slice(&text);
            peers.push(Some(peer));
        }
        let recv_buf = self.all_to_all(&send_buf, CHANNEL_INFO_LEN)?;
        for (rank, peer) in peers.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            connect_peer(
                peer,
                rank,
                &recv_buf[rank * CHANNEL_INFO_LEN..(rank + 1) * CHANNEL_INFO_LEN],
            )?;
        }
        // Nobody sends to a queue pair that is not connected.
        self.barrier(self.shared.options.timeout)?;
        let sync_counters =
            SyncCounters { ready_sent: vec![0; size], ready_awaited: vec![0; size], barriers: 0 };
        let inner = Arc::new(Inner {
            shared: self.shared.clone(),
            device: device.clone(),
            peers,
            table,
            _registered: registered,
            sync_counters: Mutex::new(sync_counters),
            waits: Mutex::new(Vec::new()),
        });
        let mut state = self.shared.state.lock();
        let weak = Arc::downgrade(&inner);
        state.hooks.push(weak);
        // Ranks may have gone before this was there to be told.
        let lost: Vec<_> = (0..size).filter_map(|rank| Some((rank, state.loss(rank)?))).collect();
        drop(state);
        lost.into_iter().for_each(|(rank, loss)| inner.lost(rank, loss));
        Ok(DeviceChannel(inner))
    }

    fn channel_peer(
        &self,
        device: &Device,
        options: &ChannelOptions,
        kernels: Option<Kernels>,
    ) -> Result<ChannelPeer> {
        // As those of the CPU's messages: who dies is told of otherwise.
        let connection = QpOptions { timeout: 18, retry_count: 7, ..QpOptions::default() };
        let (context, pd) = (&self.shared.context, &self.shared.pd);
        let queues = StreamQpOptions {
            qp: QpOptions {
                send_depth: options.depth,
                receive_depth: options.depth,
                max_send_sge: MAX_SLICES as u32,
                max_recv_sge: MAX_SLICES as u32,
                ..connection.clone()
            },
            waits: options.depth * 2,
            wait_timeout: Some(options.wait_timeout),
            ..StreamQpOptions::default()
        };
        let advice = |error: Error| match error.kind() {
            Kind::InvalidArgument => {
                error.fix("make the communicator with CommOptions::for_streams")
            }
            _ => error,
        };
        let stream = StreamQp::create(context, pd, device, queues).map_err(advice)?;
        let kernel = match kernels {
            Some(kernels) => {
                let options = KernelQpOptions {
                    send_depth: options.depth.next_power_of_two(),
                    receive_depth: options.depth.next_power_of_two(),
                    wait_timeout: options.wait_timeout,
                    kernels: Some(kernels),
                    connection,
                    ..KernelQpOptions::default()
                };
                Some(KernelQp::create(context, pd, device, options)?)
            }
            None => None,
        };
        let tracker = Mutex::new(CompletionTracker::new(options.depth));
        Ok(ChannelPeer { stream, kernel, tracker, table: Remote { address: 0, rkey: 0 } })
    }
}

/// Connects to what a rank has told of.
fn connect_peer(peer: &mut ChannelPeer, rank: usize, text: &[u8]) -> Result<()> {
    let what = || format!("connect streams to rank {rank}");
    let end = text.iter().position(|byte| *byte == 0).unwrap_or(text.len());
    let theirs: ChannelInfo = serde_json::from_slice(&text[..end])
        .map_err(|why| Error::new(Kind::Malformed, what()).why(why.to_string()))?;
    peer.stream.connect(&theirs.stream).map_err(|why| why.during(what()))?;
    match (&peer.kernel, &theirs.kernel) {
        (Some(kernel), Some(endpoint)) => kernel.connect(endpoint)?,
        (None, None) => {}
        _ => {
            let error = Error::new(Kind::InvalidArgument, what());
            return Err(error.why("one side has queue pairs for kernels, the other has not"));
        }
    }
    peer.table = Remote { address: theirs.table.0, rkey: theirs.table.1 };
    Ok(())
}

impl DeviceChannel {
    /// The device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The queue pair to a rank that kernels and graphs use.
    pub fn kernel(&self, rank: usize) -> Result<&KernelQp> {
        let peer = self.0.peer(rank, "reach")?;
        peer.kernel.as_ref().ok_or_else(|| {
            let error = Error::new(Kind::Unsupported, format!("reach rank {rank} from kernels"));
            error.why("the lane was made without them").fix("set LaneOptions::kernels")
        })
    }

    /// The queue pair to a rank that streams use. Work that is posted there beside the lane's calls must be waited for
    /// there too.
    pub fn stream_qp(&self, rank: usize) -> Result<&StreamQp> {
        Ok(&self.0.peer(rank, "reach")?.stream)
    }

    /// An error if a connection of the lane has failed, with the cause: streams go on when what they wait for fails, so
    /// whoever has synchronized one asks this.
    pub fn check(&self) -> Result<()> {
        for rank in 0..self.0.peers.len() {
            if let Some(why) = self.failure(rank) {
                return Err(why);
            }
        }
        Ok(())
    }

    /// Why the connections to a rank have failed, if they have.
    pub fn failure(&self, rank: usize) -> Option<Error> {
        let peer = self.0.peers.get(rank)?.as_ref()?;
        let of_stream = peer.stream.failure().map(|failure| failure.error.clone());
        let of_kernel = peer.kernel.as_ref().and_then(|kernel| kernel.check().err());
        // Last, because a rank's end is noted before its connections are shut: read first, it could
        // be missing for a connection that is found shut a moment later.
        let (end, has_left) = {
            let state = self.0.shared.state.lock();
            (state.peers[rank].end.clone(), state.peers[rank].has_left)
        };
        // Kernels are shut out when a rank leaves; those that waited then have reported it.
        let closed = |error: &Error| error.kind() == &Kind::Freed && has_left;
        let failed = of_stream.or(of_kernel.filter(|error| !closed(error)))?;
        // The rank's own end says more than what its connection died of.
        Some(end.unwrap_or_else(|| failed.during(format!("reach rank {rank} from streams"))))
    }

    /// Takes completions, so that there is room for more. Other calls do so when they need to.
    pub fn progress(&self) -> Result<()> {
        self.0.peers.iter().flatten().try_for_each(|peer| peer.tracker.lock().take(&peer.stream))
    }
}

impl Inner {
    fn peer(&self, rank: usize, verb: &str) -> Result<&ChannelPeer> {
        self.shared.check_rank(rank, verb)?;
        self.peers[rank].as_ref().ok_or_else(|| {
            Error::new(Kind::Unsupported, format!("{verb} rank {rank}"))
                .why("a lane does not lead back to its own rank")
                .fix("copy by the stream itself")
        })
    }

    fn check_slices(&self, slices: &[BufferSlice], verb: &str, rank: usize) -> Result<()> {
        let wrong = |why: String| {
            Err(Error::new(Kind::InvalidArgument, format!("{verb} rank {rank}")).why(why))
        };
        if slices.len() > MAX_SLICES {
            return wrong(format!("it has {} parts, and may have {MAX_SLICES}", slices.len()));
        }
        if slices.iter().any(|slice| !slice.buffer.is_of(&self.shared.pd)) {
            return wrong("the buffer was registered with another communicator".to_owned());
        }
        let total: u64 = slices.iter().map(|slice| slice.len).sum();
        if total > 1 << 30 {
            return wrong(format!("{total} bytes are more than a message of a stream has, 1 GiB"));
        }
        Ok(())
    }
}

impl OnLost for Inner {
    /// Whoever waits for that rank goes on. What a rank that leaves has sent is there, and what was sent to it may still be
    /// acknowledged: then only those are released who wait for more.
    fn lost(&self, rank: usize, loss: Loss) {
        let Some(Some(peer)) = self.peers.get(rank) else { return };
        let mut waits = self.waits.lock();
        let concerned = |wait: &WordWait| match wait.writer {
            Some(writer) => writer == rank,
            None => loss.all || !loss.left,
        };
        let mut released = false;
        for wait in waits.iter().filter(|wait| concerned(wait) && !wait.is_satisfied()) {
            wait.release();
            released = true;
        }
        waits.retain(|wait| !concerned(wait));
        drop(waits);
        let mut tracker = peer.tracker.lock();
        let pending = tracker.take(&peer.stream).is_err()
            || tracker.awaits_messages()
            || loss.broken && tracker.is_busy();
        drop(tracker);
        // A rank that has left and owes nothing is no failure, also when its connections end.
        if released || pending || !loss.left {
            peer.stream.abort();
        }
        if let Some(kernel) = &peer.kernel {
            kernel.close();
            if loss.broken {
                let _ = kernel.qp().modify(&QpAttributes::new(State::Err));
            }
        }
    }

    fn is_busy(&self) -> bool {
        let busy = |peer: &ChannelPeer| {
            let mut tracker = peer.tracker.lock();
            tracker.take(&peer.stream).is_ok()
                && tracker.is_busy()
                && peer.stream.failure().is_none()
        };
        self.peers.iter().flatten().any(busy)
    }
}

impl WordWait {
    /// Whether the word satisfies the condition.
    fn is_satisfied(&self) -> bool {
        let seen = self.word.load();
        seen.map_or(true, |seen| self.condition.holds(self.word.width(), seen, self.value))
    }

    /// Gives the word a value that satisfies the condition.
    fn release(&self) {
        if !self.is_satisfied() {
            let value = match self.condition {
                Condition::Nor => 0,
                _ => self.value,
            };
            let _ = self.word.store(value);
        }
    }
}
