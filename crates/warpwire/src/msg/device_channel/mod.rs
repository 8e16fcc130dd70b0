//! Device channels: messages that streams and kernels of a device send and wait for.
//!
//! The CPU does no tag matching here. A device channel has its own connection to each rank, besides
//! the one for the CPU's messages. The CPU posts a receive, which names the memory for the next
//! message of that rank; messages and receives match in the order in which they were posted,
//! without tags. A message that arrives before its receive waits at its sender (RNR retries). So a
//! stream only has to wait for the completion of *its* receive, which is a word in memory.
//!
//! Operations of [`DeviceChannel`] on a stream, and their variants:
//!
//! | | on a stream | prepared, or in a batch |
//! |---|---|---|
//! | send | [`send_on_stream`] | [`prepare_send`], [`ChannelBatch::send`] |
//! | wait for a request | [`wait_on_stream`], [`wait_all_on_stream`] | [`ChannelBatch::wait`] |
//! | put | [`put_on_stream`], [`put_signal_on_stream`] | [`prepare_put`], [`ChannelBatch::put`] |
//! | get | [`get_on_stream`] | |
//! | wait for a word | [`wait_word_on_stream`] | [`ChannelBatch::wait_word`] |
//! | write a word | | [`ChannelBatch::write_word`] |
//! | ready to receive | [`send_ready_on_stream`], [`wait_ready_on_stream`] | |
//! | barrier | [`barrier_on_stream`] | |
//!
//! The CPU posts receives with [`DeviceChannel::receive`], and may wait with
//! [`ChannelRequest::wait`].
//!
//! [`send_on_stream`]: DeviceChannel::send_on_stream
//! [`prepare_send`]: DeviceChannel::prepare_send
//! [`wait_on_stream`]: DeviceChannel::wait_on_stream
//! [`wait_all_on_stream`]: DeviceChannel::wait_all_on_stream
//! [`put_on_stream`]: DeviceChannel::put_on_stream
//! [`put_signal_on_stream`]: DeviceChannel::put_signal_on_stream
//! [`prepare_put`]: DeviceChannel::prepare_put
//! [`get_on_stream`]: DeviceChannel::get_on_stream
//! [`wait_word_on_stream`]: DeviceChannel::wait_word_on_stream
//! [`send_ready_on_stream`]: DeviceChannel::send_ready_on_stream
//! [`wait_ready_on_stream`]: DeviceChannel::wait_ready_on_stream
//! [`barrier_on_stream`]: DeviceChannel::barrier_on_stream
//!
//! Kernels of the application, and graphs, use the queue pair of [`DeviceChannel::kernel`]:
//! [`RmaWindow::remote`](super::RmaWindow::remote) and
//! [`BufferSlice::sge`](super::BufferSlice::sge) give the arguments for the calls of `verbs.cuh`
//! and of [`KernelQp`].

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

use super::buffer::{Buffer, BufferSlice, Domain};
use super::comm::Comm;
use super::header::MAX_SLICES;
use super::shared::Shared;
use super::state::{Loss, OnLost};
use crate::error::{Error, Kind, Result};
use crate::mem::{Allocation, Condition, Device, KeptMemory, Word};
use crate::stream::kernel::Kernels;
use crate::stream::{KernelQp, KernelQpOptions, StreamQp, StreamQpOptions};
use crate::verbs::{QpAttributes, QpEndpoint, QpOptions, Remote, State};
use tracker::CompletionTracker;

/// Options of a device channel.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct ChannelOptions {
    /// Queue depth: maximum number of sends, and of receives, in flight with each rank; a power of
    /// two. Default: 256.
    pub depth: u32,
    /// How long a stream may wait before the connection fails. Default: 30 s.
    pub wait_timeout: Duration,
    /// Whether to create queue pairs for kernels and graphs too. Default: true.
    pub kernels: bool,
    /// As [`KernelQpOptions::direct_atomics`], for the queue pairs for kernels: with device memory
    /// of this machine, kernels then signal without the HCA. Default: false.
    pub direct_atomics: bool,
}

setters! {
    ChannelOptions {
        with_depth => depth: u32,
        with_wait_timeout => wait_timeout: Duration,
        with_kernels => kernels: bool,
        with_direct_atomics => direct_atomics: bool,
    }
}

impl Default for ChannelOptions {
    fn default() -> Self {
        Self {
            depth: 256,
            wait_timeout: Duration::from_secs(30),
            kernels: true,
            direct_atomics: false,
        }
    }
}

/// Connections to all ranks for streams and kernels of one device. Clones share it.
///
/// ```
/// use std::time::Duration;
/// use warpwire::link::Hub;
/// use warpwire::mem::sim::{Sim, SimConfig};
/// use warpwire::msg::{Comm, CommOptions, ChannelOptions};
/// use warpwire::verbs::LinkChoice;
///
/// const SOON: Duration = Duration::from_secs(20);
/// let options = CommOptions::for_streams().with_link(LinkChoice::Hub(Hub::new()));
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
    /// By rank; `None` for this rank.
    peers: Vec<Option<ChannelPeer>>,
    /// Words that peers write: ready counters by rank, then the rounds of barriers.
    table: Allocation,
    _registered: Buffer,
    sync_counters: Mutex<SyncCounters>,
    waits: Mutex<Vec<WordWait>>,
    /// Words that streams of other libraries use.
    kept: Mutex<KeptMemory>,
}

struct ChannelPeer {
    stream: StreamQp,
    kernel: Option<KernelQp>,
    tracker: Mutex<CompletionTracker>,
    /// Address and rkey of its table.
    table: Remote,
}

/// Counts of synchronization operations.
struct SyncCounters {
    /// Ready notifications sent, by rank.
    ready_sent: Vec<u32>,
    /// Ready notifications waited for, by rank.
    ready_awaited: Vec<u32>,
    barriers: u32,
}

/// A word that a stream waits for.
struct WordWait {
    word: Word,
    condition: Condition,
    value: u64,
    /// The rank that writes it; `None` for any.
    writer: Option<usize>,
}

/// Rounds of a barrier of the maximum number of ranks, 1024.
const MAX_BARRIER_STEPS: usize = 10;

/// Connection data that ranks exchange.
#[derive(Serialize, Deserialize)]
struct ChannelInfo {
    stream: QpEndpoint,
    kernel: Option<QpEndpoint>,
    table: (u64, u32),
}

/// Space for an encoded [`ChannelInfo`], in bytes.
const CHANNEL_INFO_LEN: usize = 1024;

impl std::fmt::Debug for DeviceChannel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "DeviceChannel({}, {} ranks)", self.0.device.label(), self.0.peers.len())
    }
}

impl Comm {
    /// Connects streams and kernels of a device to all ranks. Collective: every rank calls it, in
    /// the same order as other collectives.
    ///
    /// # Errors
    /// If the communicator was not created [for streams](super::CommOptions::for_streams), or if
    /// the device's streams cannot write and wait for words.
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
        let recv_buf = self.all_to_all_bytes(&send_buf, CHANNEL_INFO_LEN)?;
        for (rank, peer) in peers.iter_mut().enumerate() {
            let Some(peer) = peer else { continue };
            connect_peer(
                peer,
                rank,
                &recv_buf[rank * CHANNEL_INFO_LEN..(rank + 1) * CHANNEL_INFO_LEN],
            )?;
        }
        // No rank may send to a queue pair that is not connected yet.
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
            waits: Mutex::default(),
            kept: Mutex::default(),
        });
        let mut state = self.shared.lock();
        let weak = Arc::downgrade(&inner);
        state.hooks.push(weak);
        // Ranks may have been lost before the hook was registered.
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
        // As for the CPU's messages: TCP connections detect death.
        let connection = QpOptions { timeout: 18, retry_count: 7, ..QpOptions::default() };
        let Domain { context, pd, .. } = &*self.shared.domain;
        let queues = StreamQpOptions {
            qp: QpOptions {
                send_depth: options.depth,
                receive_depth: options.depth,
                max_send_sge: MAX_SLICES as u32,
                max_recv_sge: MAX_SLICES as u32,
                ..connection.clone()
            },
            max_waits: options.depth * 2,
            wait_timeout: Some(options.wait_timeout),
            ..StreamQpOptions::default()
        };
        let advice = |error: Error| match error.kind() {
            Kind::InvalidArgument => {
                error.fix("create the communicator with CommOptions::for_streams")
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
                    direct_atomics: options.direct_atomics,
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

/// Connects to the endpoints that a rank has sent.
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
            return Err(error.why("one rank has queue pairs for kernels, the other has none"));
        }
    }
    peer.table = Remote { address: theirs.table.0, rkey: theirs.table.1 };
    Ok(())
}

impl DeviceChannel {
    /// The device whose streams and kernels are connected.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// The queue pair to a rank that kernels and graphs use.
    pub fn kernel(&self, rank: usize) -> Result<&KernelQp> {
        let peer = self.0.peer(rank, "reach")?;
        peer.kernel.as_ref().ok_or_else(|| {
            let error = Error::new(Kind::Unsupported, format!("reach rank {rank} from kernels"));
            error
                .why("the device channel has no kernel queue pairs")
                .fix("set ChannelOptions::kernels")
        })
    }

    /// The queue pair to a rank that streams use. Work that is posted to it directly must be waited
    /// for directly too.
    pub fn stream_qp(&self, rank: usize) -> Result<&StreamQp> {
        Ok(&self.0.peer(rank, "reach")?.stream)
    }

    /// Returns an error with the cause if a connection of the device channel has failed. Streams
    /// continue when a wait fails, so call this after synchronizing one.
    pub fn check(&self) -> Result<()> {
        for rank in 0..self.0.peers.len() {
            if let Some(why) = self.failure(rank) {
                return Err(why);
            }
        }
        Ok(())
    }

    /// Why the connections to a rank have failed; `None` if they have not.
    pub fn failure(&self, rank: usize) -> Option<Error> {
        let peer = self.0.peers.get(rank)?.as_ref()?;
        let of_stream = peer.stream.failure().map(|failure| failure.error.clone());
        let of_kernel = peer.kernel.as_ref().and_then(|kernel| kernel.check().err());
        // Read last: a lost rank is recorded before its connections are closed. Read first, the
        // record could be missing for a connection that is found closed a moment later.
        let (end, has_left) = {
            let state = self.0.shared.lock();
            (state.peers[rank].end.clone(), state.peers[rank].has_left)
        };
        // Kernel queue pairs are closed when a rank leaves; kernels that waited then have reported
        // it.
        let closed = |error: &Error| error.kind() == &Kind::Freed && has_left;
        let failed = of_stream.or(of_kernel.filter(|error| !closed(error)))?;
        // The cause of the rank's loss is more specific than the failure of its connection.
        Some(end.unwrap_or_else(|| failed.during(format!("reach rank {rank} from streams"))))
    }

    /// Polls completions to free queue space. Other methods do so when they need to.
    pub fn progress(&self) -> Result<()> {
        self.0.peers.iter().flatten().try_for_each(|peer| peer.tracker.lock().take(&peer.stream))
    }
}

impl Inner {
    fn peer(&self, rank: usize, verb: &str) -> Result<&ChannelPeer> {
        self.shared.check_rank(rank, verb)?;
        self.peers[rank].as_ref().ok_or_else(|| {
            Error::new(Kind::Unsupported, format!("{verb} rank {rank}"))
                .why("a device channel has no connection to its own rank")
                .fix("use a copy on the stream")
        })
    }

    fn check_slices(&self, slices: &[BufferSlice], verb: &str, rank: usize) -> Result<()> {
        let wrong = |why: String| {
            Err(Error::new(Kind::InvalidArgument, format!("{verb} rank {rank}")).why(why))
        };
        if slices.len() > MAX_SLICES {
            return wrong(format!("it has {} slices, and may have {MAX_SLICES}", slices.len()));
        }
        if slices.iter().any(|slice| !slice.buffer.is_of(&self.shared.domain)) {
            return wrong("the buffer was registered with another communicator".to_owned());
        }
        let total: u64 = slices.iter().map(|slice| slice.len).sum();
        if total > 1 << 30 {
            return wrong(format!("{total} bytes exceed the maximum of a stream's message, 1 GiB"));
        }
        Ok(())
    }
}

impl OnLost for Inner {
    /// Releases streams that wait for this rank. All messages of a rank that left have arrived, and
    /// those sent to it may still be acknowledged: then only waits that can no longer be satisfied
    /// are released.
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
        // A rank that has left with nothing outstanding is not a failure, even when its connections
        // close.
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

    /// Stores a value that satisfies the condition.
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
