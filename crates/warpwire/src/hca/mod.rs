//! The software HCA: ConnectX queues in memory, RoCEv2 on a link.
//!
//! A CPU thread, a CUDA stream or a kernel fills mlx5 queues and rings a doorbell. The engine takes
//! WQEs from send queues, runs the transport protocol over a [`Link`], moves bytes between packets
//! and registered memory, and writes CQEs. The contents of queues and packets are never trusted:
//! invalid ones produce an error completion, or are counted and dropped.
//!
//! | type | what it is |
//! |---|---|
//! | [`Hca`] | the device: engines, registry, queues by number |
//! | [`QpSpec`], [`CqSpec`], [`SrqSpec`] | the memory and layout of queues |
//! | [`QueueMemory`] | host, pinned or device memory for queues |
//! | [`ProgressMode`] | which threads run the engines |
//! | [`EventFd`], [`AsyncEvent`] | wake-ups, and events outside completions |
//! | [`HcaStats`] | counters |
//! | [`publish`] | counters for other processes, through a Unix socket |
//!
//! This is the level of registers and bytes; programs use [`verbs`](crate::verbs).
//!
//! # A step of the engine
//! 1. Doorbells: WQEs are copied out of send queues and posted.
//! 2. Transmit: every queue pair with packets due sends a bounded number of them, in one batch.
//! 3. Receive: packets are dispatched to the state machines of their queue pairs, payload is
//!    placed, CQEs are written.
//! 4. Timers.
//!
//! Polling a CQ also advances the engine ([`Hca::poll`]), so no hand-off to another thread is
//! needed. A fallback thread advances it when nothing polls.
//!
//! # Several engines
//! A device may have several ([`HcaOptions::engines`]), each with its own link, lock, doorbells,
//! timers, congestion windows and thread. They share the registry; `placement.rs` has the rules
//! that give each queue to one of them.

mod complete;
mod cq;
mod doorbell_bitmap;
mod engine;
mod event;
mod held;
mod host;
mod mapped;
mod memory;
mod numbers;
mod open;
mod paths;
mod placement;
mod progress_mode;
mod protocol;
pub mod publish;
mod qpc;
mod read_ahead;
mod ring;
mod shared;
mod stats;

use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use parking_lot::Mutex;
use warpwire_proto::qp::{self, QpAttributes, State};

pub use cq::{CQE_LEN, CqSpec};
pub use engine::StepSummary;
pub use event::{AsyncEvent, EventFd};
pub(crate) use held::MAX_HELD_PAYLOAD;
pub use mapped::{FastPath, FastWrite, PrefetchHint};
pub(crate) use mapped::{ListPost, ListRange, RangeList, kernel_table_layout};
pub use memory::QueueMemory;
pub use numbers::QpnSlot;
pub use progress_mode::ProgressMode;
pub use qpc::QpSpec;
pub use ring::QpLayout;
pub use stats::{
    DirectStats, DropReason, EngineStats, HcaStats, IndirectReason, QpStats, QpTotals,
};

use crate::error::{Error, Kind, Result};
use crate::link::{self, Link};
use crate::mem::Device;
use crate::mr::Registry;
use cq::{CompletionRing, CqSlot, PublishedCount};
use engine::Engine;
use event::AsyncEventQueue;
use mapped::KernelTable;
use numbers::Numbering;
use placement::{Placement, home};
use ring::{MAX_RECV_WQE_LEN, SharedReceiveQueue};
pub(crate) use shared::EngineRef;
use shared::EngineShared;

/// Engines of one device, at most.
pub const MAX_ENGINES: u32 = 16;

/// How to open a software HCA.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct HcaOptions {
    /// Which threads run the engine.
    pub progress_mode: ProgressMode,
    /// Whether peers on this machine may map registered memory and access it without packets, and
    /// this device theirs (direct access). Links that wrap others, such as fault injection, disable
    /// it. Default: true.
    pub direct: bool,
    /// How many memories of peers an engine maps at a time for direct access: beyond that, those
    /// that were not used recently are unmapped, and mapped again by their next use. Default: 4096.
    pub max_mappings: u32,
    /// Whether ACKs are sent in the step that received the request, as a NIC sends them, so before
    /// a thread that polls sees the completion. Default: false: the next step sends them, together
    /// with a reply that the program has posted by then.
    pub immediate_acks: bool,
    /// A slot that all numbers of queue pairs carry, for devices that share an IP address. The
    /// device then has at most 4096 queue pairs. Default: none, and at most 65 536.
    pub qpn_slot: Option<QpnSlot>,
    /// How many engines the device has, 1 to 16: each has its own socket and port, and is run by
    /// other threads than the others. Queue pairs are spread over them; those that share a
    /// completion queue or an SRQ are on one. More than one needs a UDP link on a port other than
    /// 4791. Default: 1, because polling a completion queue then advances all queue pairs of the
    /// device, also those that use another one.
    pub engines: u32,
}

setters! {
    HcaOptions {
        with_engines => engines: u32,
        with_progress_mode => progress_mode: ProgressMode,
        with_direct => direct: bool,
        with_max_mappings => max_mappings: u32,
        with_immediate_acks => immediate_acks: bool,
    } optional {
        with_qpn_slot => qpn_slot: QpnSlot,
    }
}

impl Default for HcaOptions {
    fn default() -> Self {
        Self {
            progress_mode: ProgressMode::default(),
            direct: true,
            max_mappings: 4096,
            immediate_acks: false,
            qpn_slot: None,
            engines: 1,
        }
    }
}

/// The memory and layout of a shared receive queue.
#[derive(Clone, Debug)]
pub struct SrqSpec {
    /// Memory of the queue: entries from offset 0, each linked to the next.
    pub memory: QueueMemory,
    /// Number of entries, a power of two.
    pub entries: u32,
    /// Bytes per entry, a power of two.
    pub stride: u32,
    /// Offset of the doorbell record: the producer counter.
    pub dbrec: u64,
}

/// A software HCA. Clones share the device; dropping the last one closes it.
#[derive(Clone)]
pub struct Hca(Arc<HcaInner>);

struct HcaInner {
    /// One to [`MAX_ENGINES`]; queue pairs name theirs by number.
    engines: Box<[Arc<EngineShared>]>,
    placement: Mutex<Placement>,
    registry: Registry,
    async_events: Arc<AsyncEventQueue>,
    path: link::LinkPath,
    max_packet: usize,
    /// To peers at the link's own IP address.
    max_packet_on_host: usize,
    numbering: Numbering,
    progress_mode: ProgressMode,
}

impl fmt::Debug for Hca {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Hca({})", self.0.path)
    }
}

impl Hca {
    /// Opens a device on a link.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if the number of engines is out of range, or a device with a
    /// [`QpnSlot`] is to have several; [`Kind::Unsupported`] if the link allows only one. Else if
    /// a socket, an eventfd or a thread cannot be created.
    pub fn open(link: impl Link + 'static, options: HcaOptions) -> Result<Self> {
        let shared = Arc::new(open::open(link, options)?);
        publish::add(Arc::downgrade(&shared));
        Ok(Self(shared))
    }

    /// The number of its engines.
    pub fn engines(&self) -> usize {
        self.0.engines.len()
    }

    /// The engine of a queue pair; a number that no queue pair of this device has may give one,
    /// too.
    #[inline]
    fn engine_of(&self, qpn: u32) -> Result<&Arc<EngineShared>> {
        let engine = self.0.engines.get(self.0.numbering.engine_of(qpn) as usize);
        engine.ok_or_else(|| engine::no_such_qp(qpn))
    }

    /// The engine of a queue pair, for threads that post to it.
    pub(crate) fn engine_ref(&self, qpn: u32) -> Result<EngineRef> {
        Ok(EngineRef(self.engine_of(qpn)?.clone()))
    }

    /// The set of engines that a thread must run to make progress on a queue pair.
    pub(crate) fn engine_set(&self, qpn: u32) -> u32 {
        1 << self.0.numbering.engine_of(qpn)
    }

    /// The memory registrations of this device.
    pub fn registry(&self) -> &Registry {
        &self.0.registry
    }

    /// The link, and why it was chosen.
    pub fn path(&self) -> &link::LinkPath {
        &self.0.path
    }

    /// The maximum payload of a packet on the link, in bytes.
    pub fn max_payload(&self) -> usize {
        self.0.max_packet.saturating_sub(engine::MAX_PACKET_OVERHEAD)
    }

    /// The maximum payload of a packet to a peer at the link's own IP address, in bytes.
    pub(crate) fn max_payload_on_host(&self) -> usize {
        self.0.max_packet_on_host.saturating_sub(engine::MAX_PACKET_OVERHEAD)
    }

    /// Whether both handles refer to one device.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }

    /// Whether a thread advances the engines while nothing polls, so that a program may block until
    /// it is woken. False in [`ProgressMode::Manual`].
    pub fn supports_blocking_wait(&self) -> bool {
        self.0.progress_mode != ProgressMode::Manual
    }

    /// Which threads run the engines.
    pub fn progress_mode(&self) -> ProgressMode {
        self.0.progress_mode
    }

    /// Advances every engine by one step, unless another thread is doing so; returns the sum.
    ///
    /// # Errors
    /// If the link has failed permanently.
    #[inline]
    pub fn poll(&self) -> Result<StepSummary> {
        let mut sum = self.0.engines[0].poll()?;
        for engine in &self.0.engines[1..] {
            sum = sum + engine.poll()?;
        }
        Ok(sum)
    }

    /// Advances the engines until they are idle, for at most `limit`, so that the acknowledgements
    /// of a process that exits reach its peers. Safe in a handler of `exit`: it waits for no lock,
    /// which the thread that a signal interrupted might hold.
    pub fn flush(&self, limit: Duration) {
        /// Between two steps, for packets under way and for steps of other threads.
        const PAUSE: Duration = Duration::from_micros(200);
        let start = std::time::Instant::now();
        // Two idle steps in a row.
        let mut idle_steps = 0;
        while idle_steps < 2 && start.elapsed() < limit {
            let (mut is_idle, mut pauses) = (true, false);
            for engine in &self.0.engines {
                match engine.step_in_turn() {
                    Ok(Some(progress)) => is_idle &= progress.is_idle(),
                    Ok(None) => (is_idle, pauses) = (false, true),
                    Err(_) => {}
                }
            }
            idle_steps = if is_idle { idle_steps + 1 } else { 0 };
            if pauses || idle_steps == 1 {
                std::thread::sleep(PAUSE);
            }
        }
    }

    /// The set of all engines, one bit each.
    pub(crate) fn all_engines(&self) -> u32 {
        (1 << self.0.engines.len()) - 1
    }

    /// Advances some engines, one bit each, by one step.
    #[inline]
    pub(crate) fn poll_engines(&self, mut engines: u32) -> Result<()> {
        while engines != 0 {
            if let Some(engine) = self.0.engines.get(engines.trailing_zeros() as usize) {
                engine.poll()?;
            }
            engines &= engines - 1;
        }
        Ok(())
    }

    /// Creates a completion queue; returns its number.
    ///
    /// # Errors
    /// If a size is not a power of two, or the memory is too small.
    pub fn create_cq(&self, spec: CqSpec) -> Result<u32> {
        check_power_of_two(spec.entries, "completion queue entries")?;
        check_fits(&spec.memory, u64::from(spec.entries) * CQE_LEN, "the completion queue")?;
        check_fits(&spec.memory, spec.dbrec.saturating_add(8), "its doorbell record")?;
        let mut placement = self.0.placement.lock();
        let number = placement.add_cq()?;
        let (first, others) = (&self.0.engines[0], &self.0.engines[1..]);
        let published: Option<Arc<PublishedCount>> = (!others.is_empty()).then(Arc::default);
        let ring = CompletionRing::new(spec, published.clone());
        first.engine.lock().put_cq(number, Some(CqSlot::Own(ring)));
        for shared in others {
            let elsewhere = published.clone().map(CqSlot::Elsewhere);
            shared.engine.lock().put_cq(number, elsewhere);
        }
        Ok(number)
    }

    /// Continues a completion queue in larger memory: `entries` CQEs, a power of two, all empty,
    /// and the doorbell record behind them. CQEs from number `consumed` on are copied. The caller
    /// holds off the queue's readers.
    ///
    /// # Errors
    /// If the queue does not exist, or the memory is too small.
    pub(crate) fn resize_cq(
        &self,
        cqn: u32,
        memory: QueueMemory,
        entries: u32,
        consumed: u64,
    ) -> Result<()> {
        check_power_of_two(entries, "completion queue entries")?;
        check_fits(&memory, u64::from(entries) * CQE_LEN + 8, "the completion queue")?;
        let placement = self.0.placement.lock();
        let mut engine = self.0.engines[home(placement.cq(cqn).unwrap_or(0))].engine.lock();
        let resized =
            engine.cq(cqn).and_then(|cq| cq.with_ring(|cq| cq.resize(memory, entries, consumed)));
        resized.unwrap_or_else(|| Err(invalid("the completion queue", "one that exists")))
    }

    /// How many completions a queue has received since it was created.
    pub(crate) fn cq_produced(&self, cqn: u32) -> u64 {
        self.0.engines[0].engine.lock().cq(cqn).map_or(0, |cq| cq.produced())
    }

    /// Destroys a completion queue; further completions for it are dropped.
    pub fn destroy_cq(&self, cqn: u32) {
        let mut placement = self.0.placement.lock();
        if placement.cq(cqn).is_some() {
            self.0.engines.iter().for_each(|shared| shared.engine.lock().put_cq(cqn, None));
            placement.remove_cq(cqn);
        }
    }

    /// Creates a shared receive queue; returns its number.
    ///
    /// # Errors
    /// If a size is not a power of two or out of range, or the memory is too small.
    pub fn create_srq(&self, spec: SrqSpec) -> Result<u32> {
        check_power_of_two(spec.entries, "shared receive queue entries")?;
        check_stride(spec.stride, 32, MAX_RECV_WQE_LEN as u32 * 2)?;
        let bytes = u64::from(spec.entries) * u64::from(spec.stride);
        check_fits(&spec.memory, bytes, "the shared receive queue")?;
        check_fits(&spec.memory, spec.dbrec.saturating_add(4), "its doorbell record")?;
        let ring = SharedReceiveQueue::new(spec.memory, spec.dbrec, spec.entries, spec.stride);
        let mut placement = self.0.placement.lock();
        let number = placement.add_srq()?;
        self.0.engines[0].engine.lock().put_srq(number, Some((ring, None)));
        Ok(number)
    }

    /// Requests one [`AsyncEvent::LimitReached`] when fewer than `limit` receives are posted; 0
    /// disarms.
    pub fn arm_srq(&self, srqn: u32, limit: u32) {
        self.with_srq_engine(srqn, |engine| engine.set_limit(srqn, limit));
    }

    /// The limit that a shared receive queue is armed with; 0 if it is not armed.
    pub fn srq_limit(&self, srqn: u32) -> u32 {
        self.with_srq_engine(srqn, |engine| engine.limit(srqn))
    }

    /// Destroys a shared receive queue.
    pub fn destroy_srq(&self, srqn: u32) {
        let mut placement = self.0.placement.lock();
        if let Some(engines) = placement.srq(srqn) {
            self.0.engines[home(engines)].engine.lock().put_srq(srqn, None);
            placement.remove_srq(srqn);
        }
    }

    /// Calls `apply` with the engine of a shared receive queue.
    fn with_srq_engine<R>(&self, srqn: u32, apply: impl FnOnce(&mut Engine) -> R) -> R {
        let placement = self.0.placement.lock();
        let shared = &self.0.engines[home(placement.srq(srqn).unwrap_or(0))];
        apply(&mut shared.engine.lock())
    }

    /// Creates a queue pair in the state `RESET`; returns its number.
    ///
    /// # Errors
    /// If a size or an alignment is invalid, the memory is too small, the datagram MTU exceeds the
    /// link's packets, or no number is free.
    pub fn create_qp(&self, spec: QpSpec) -> Result<u32> {
        check_power_of_two(spec.send_wqebbs, "send queue WQEBBs")?;
        if spec.send_wqebbs > crate::mlx5::MAX_SEND_WQEBBS {
            return Err(invalid("send queue WQEBBs", "at most 32768"));
        }
        let QpLayout { receive, send, dbrec, doorbell } = spec.layout;
        let send_end = send.saturating_add(u64::from(spec.send_wqebbs) * 64);
        check_fits(&spec.memory, send_end, "the send queue")?;
        check_fits(&spec.memory, dbrec.saturating_add(8), "the doorbell record")?;
        check_fits(&spec.memory, doorbell.saturating_add(264), "the doorbell")?;
        if dbrec % 8 != 0 || doorbell % 8 != 0 {
            return Err(invalid("the doorbell and its record", "aligned to 8 bytes"));
        }
        if spec.srq.is_none() {
            check_power_of_two(spec.receive_entries, "receive queue entries")?;
            check_stride(spec.receive_stride, 16, MAX_RECV_WQE_LEN as u32)?;
            let bytes = u64::from(spec.receive_entries) * u64::from(spec.receive_stride);
            check_fits(&spec.memory, receive.saturating_add(bytes), "the receive queue")?;
        }
        if let Some(mtu) = spec.datagrams
            && mtu.bytes() as usize > self.max_payload()
        {
            let max = format!("at most {}, the maximum of the link", self.max_payload());
            return Err(invalid("the datagram MTU", &max));
        }
        let poll_doorbell = spec.poll_doorbell;
        let mut placement = self.0.placement.lock();
        let at = placement.choose(&spec);
        for cqn in [spec.send_cq, spec.receive_cq] {
            self.move_cq(&mut placement, cqn, at);
        }
        if let Some(srqn) = spec.srq {
            self.move_srq(&mut placement, srqn, at);
        }
        let shared = &self.0.engines[at];
        let number = shared.engine.lock().add_qp(spec)?;
        placement.add_qp(at);
        if poll_doorbell {
            shared.polled_doorbells.fetch_add(1, Ordering::Relaxed);
            shared.waker.wake();
        }
        Ok(number)
    }

    /// Lets an engine write to a completion queue.
    fn move_cq(&self, placement: &mut Placement, cqn: u32, to: usize) {
        let Some(engines) = placement.cq(cqn) else { return };
        if home(engines) != to && engines & (1 << to) == 0 {
            let mut engine = self.0.engines[home(engines)].engine.lock();
            let moved = engine.cq(cqn).and_then(|cq| match engines {
                // No queue pair uses it yet.
                0 => cq.take().map(CqSlot::Own),
                _ => cq.share().map(CqSlot::Shared),
            });
            drop(engine);
            self.0.engines[to].engine.lock().put_cq(cqn, moved);
        }
        placement.place_cq(cqn, to);
    }

    /// Moves a shared receive queue that no queue pair uses yet to an engine.
    fn move_srq(&self, placement: &mut Placement, srqn: u32, to: usize) {
        let Some(engines) = placement.srq(srqn) else { return };
        if home(engines) != to {
            let moved = self.0.engines[home(engines)].engine.lock().take_srq(srqn);
            self.0.engines[to].engine.lock().put_srq(srqn, moved);
        }
        placement.place_srq(srqn, to);
    }

    /// Prepares to send datagrams to `peer`, so that WQEs may name it. Slow: for setup only. Every
    /// call needs a [`close_destination`](Self::close_destination).
    ///
    /// # Errors
    /// If the address cannot be reached from here, with the reason.
    pub fn open_destination(&self, peer: SocketAddr) -> Result<()> {
        for (opened, shared) in self.0.engines.iter().enumerate() {
            if let Err(why) = shared.engine.lock().open_destination(peer) {
                let before = &self.0.engines[..opened];
                before.iter().for_each(|shared| shared.engine.lock().close_destination(peer));
                return Err(why);
            }
        }
        Ok(())
    }

    /// Undoes one [`open_destination`](Self::open_destination). Datagrams to a peer that is not
    /// open fail.
    pub fn close_destination(&self, peer: SocketAddr) {
        self.0.engines.iter().for_each(|shared| shared.engine.lock().close_destination(peer));
    }

    /// Destroys a queue pair, after its pending ACKs were sent: once this returns, nothing of it is
    /// sent, received or completed.
    pub fn destroy_qp(&self, qpn: u32) {
        let Ok(shared) = self.engine_of(qpn) else { return };
        let now = shared.now();
        let existed = {
            let mut engine = shared.engine.lock();
            if engine.qpc(qpn).is_ok_and(|qpc| qpc.poll_doorbell) {
                shared.polled_doorbells.fetch_sub(1, Ordering::Relaxed);
            }
            engine.remove_qp(qpn, now)
        };
        if existed {
            self.0.placement.lock().remove_qp(self.0.numbering.engine_of(qpn) as usize);
        }
        shared.drain_peer(qpn);
    }

    /// Changes the state or the attributes of a queue pair. A rejected change has no effect.
    pub fn modify_qp(&self, qpn: u32, change: &QpAttributes) -> Result<()> {
        let shared = self.engine_of(qpn)?;
        let now = shared.now();
        shared.engine.lock().modify(qpn, change, now)?;
        shared.waker.wake();
        if matches!(change.to, State::Reset | State::Err) {
            shared.drain_peer(qpn);
        }
        Ok(())
    }

    /// The state of a queue pair.
    pub fn qp_state(&self, qpn: u32) -> Result<State> {
        Ok(self.engine_of(qpn)?.engine.lock().qpc(qpn)?.qp.state())
    }

    /// The counters of a queue pair.
    pub fn qp_stats(&self, qpn: u32) -> Result<qp::Stats> {
        Ok(*self.engine_of(qpn)?.engine.lock().qpc(qpn)?.qp.stats())
    }

    /// Why the last key or range of a queue pair was denied, if one was.
    pub fn qp_denied(&self, qpn: u32) -> Option<crate::mr::AccessDenied> {
        self.engine_of(qpn).ok()?.engine.lock().qpc(qpn).ok()?.qp_memory.denied
    }

    /// Lets kernels of `device` access memory by themselves where that is possible, with a table in
    /// this memory: [`kernel_table_layout::LEN`] bytes, zeroed or with the table of a queue pair
    /// that is gone. `false` if peers on the link cannot map memory, or if kernels still use that
    /// table.
    pub(crate) fn set_kernel_table(
        &self,
        qpn: u32,
        memory: QueueMemory,
        device: &Device,
    ) -> Result<bool> {
        // Reads device memory, which takes its time: not under the lock.
        let is_clear = KernelTable::clear(&memory)?;
        let mut engine = self.engine_of(qpn)?.engine.lock();
        if engine.core.mapped.export_table.is_err() || !is_clear {
            return Ok(false);
        }
        engine.set_kernel_table(qpn, KernelTable::new(memory, device.clone()))?;
        Ok(true)
    }

    /// A guard through which RDMA writes are executed inline (fast path) into a peer's mapped
    /// memory, as if they had been posted and their doorbell rung. `None` if there is no such peer,
    /// or another thread is running the engine.
    #[inline]
    pub fn fast_path(&self, qpn: u32) -> Option<FastPath<'_>> {
        self.engine_of(qpn).ok()?.fast_path(qpn)
    }

    /// To be called by a poller before it blocks on a completion: the fallback threads take over
    /// the engines immediately.
    pub fn wake_fallback(&self) {
        self.wake_fallbacks(u32::MAX);
    }

    /// The same for some engines, one bit each.
    pub(crate) fn wake_fallbacks(&self, engines: u32) {
        for (at, engine) in self.0.engines.iter().enumerate() {
            if engines & (1 << at) != 0 {
                engine.waker.wake_fallback();
            }
        }
    }

    /// Notifies the engine that a doorbell was rung. A doorbell rung without this call is seen only
    /// on queue pairs with [`QpSpec::poll_doorbell`].
    #[inline]
    pub fn ring(&self, qpn: u32) {
        if let Ok(engine) = self.engine_of(qpn) {
            engine.ring(qpn);
        }
    }

    /// Takes the oldest pending asynchronous event.
    pub fn next_event(&self) -> Option<AsyncEvent> {
        self.0.async_events.take()
    }

    /// Readable while asynchronous events are pending.
    pub fn events(&self) -> &EventFd {
        &self.0.async_events.signal
    }

    /// The counters of the device since it was opened.
    pub fn stats(&self) -> HcaStats {
        let of_engine = |shared: &EngineShared| {
            let engine = shared.engine.lock();
            let pairs = engine.qpcs().map(|qpc| qpc.qp.stats());
            let mut stats = HcaStats::of(shared.local, &engine.core.totals, pairs);
            if let Ok(export_table) = &engine.core.mapped.export_table {
                let direct = &mut stats.direct;
                [direct.by_peers, direct.bytes_by_peers] = export_table.access_counts();
            }
            stats
        };
        let mut sum = of_engine(&self.0.engines[0]);
        self.0.engines[1..].iter().for_each(|engine| sum.add_engine(of_engine(engine)));
        sum
    }

    /// The counters of up to `max` existing queue pairs, in the order of their slots.
    ///
    /// ```
    /// use warpwire::hca::{Hca, HcaOptions};
    /// use warpwire::link::Hub;
    /// let endpoint = Hub::new().endpoint("10.0.0.1:4791".parse().unwrap())?;
    /// assert!(Hca::open(endpoint, HcaOptions::default())?.all_qp_stats(16).is_empty());
    /// # Ok::<(), warpwire::Error>(())
    /// ```
    pub fn all_qp_stats(&self, max: usize) -> Vec<QpStats> {
        let mut found = Vec::new();
        for shared in &self.0.engines {
            let engine = shared.engine.lock();
            let left = max.saturating_sub(found.len());
            found.extend(engine.qpcs().take(left).map(|qpc| QpStats::of(&qpc.qp)));
        }
        found
    }

    /// The path that a queue pair's work takes, and why: its link, and whether direct access is
    /// possible.
    pub fn qp_path(&self, qpn: u32) -> Result<link::LinkPath> {
        self.engine_of(qpn)?.engine.lock().qp_path(qpn)
    }

    /// The counters of the link; of several, their sum.
    pub fn link_counters(&self) -> link::Counters {
        let counters = self.0.engines.iter().map(|shared| shared.engine.lock().link().counters());
        counters.fold(link::Counters::default(), std::ops::Add::add)
    }
}

fn invalid(what: &str, must_be: &str) -> Error {
    Error::new(Kind::InvalidArgument, "create a queue").why(format!("{what} must be {must_be}"))
}

fn check_power_of_two(count: u32, what: &str) -> Result<()> {
    if count.is_power_of_two() { Ok(()) } else { Err(invalid(what, "a power of two")) }
}

fn check_stride(stride: u32, min: u32, max: u32) -> Result<()> {
    if stride.is_power_of_two() && (min..=max).contains(&stride) {
        return Ok(());
    }
    Err(invalid("the entry stride", &format!("a power of two from {min} to {max}")))
}

fn check_fits(memory: &QueueMemory, end: u64, what: &str) -> Result<()> {
    if end <= memory.bytes().len() {
        return Ok(());
    }
    let why = format!("{what} ends at byte {end}, the memory at {}", memory.bytes().len());
    Err(Error::new(Kind::OutOfRange, "create a queue").why(why).fix("provide more memory"))
}
