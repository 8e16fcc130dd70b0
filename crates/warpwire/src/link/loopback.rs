//! Packets within one process: a [`Hub`] with any number of endpoints, each with a bounded queue.
//!
//! Packets are passed by swapping buffers: the sender fills a buffer of its batch, `flush` swaps it
//! for an empty one of the receiver's queue, and `receive` swaps it out of the queue. Nothing is
//! copied or allocated, and the queue's lock is taken once per batch.
//!
//! # When a queue is full
//! Packets wait at the sender ([`Full::Wait`], the default): dropping a packet in memory gains
//! nothing, and the sender would need a retransmission timer to recover. A stalled receiver
//! therefore blocks its senders, but not other receivers until a sender's batch is full of packets
//! for it (head-of-line blocking). [`Full::Drop`] drops and counts packets instead, as a network
//! does.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};

use parking_lot::{Mutex, MutexGuard};
use rustix::event::{EventfdFlags, eventfd};
use warpwire_proto::wire::icrc::IcrcPrefix;
use warpwire_proto::wire::packet::ICRC_LEN;

use super::flows::{FlowId, Flows};
use super::{
    Corruption, Counters, Flushed, Frame, Link, LinkKind, LinkPath, MAX_ROCE_PACKET, MIN_PACKET,
    ReserveError, SimdCrc32,
};
use crate::error::{Error, Kind as ErrorKind, Result};

/// Capacity of a sender's batch, and of one `receive`, in packets.
const BATCH: usize = 64;
/// Port range for endpoints bound to port 0.
const ANY_PORTS: std::ops::RangeInclusive<u16> = 0xc000..=0xffff;

/// What happens to packets for a full queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Full {
    /// Packets wait at the sender.
    Wait,
    /// Packets are dropped; the sender counts them as `overrun`.
    Drop,
}

/// Options of a hub, for all of its endpoints.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct LoopbackOptions {
    /// Capacity of an endpoint's queue in packets; default 512, at least 1.
    pub queue: usize,
    /// Maximum packet length in bytes; default [`MAX_ROCE_PACKET`], at least [`MIN_PACKET`] and at
    /// most 65 507.
    pub max_packet: usize,
    /// What happens to packets for a full queue; default [`Full::Wait`].
    pub full: Full,
}

setters! {
    LoopbackOptions {
        with_queue => queue: usize,
        with_max_packet => max_packet: usize,
        with_full => full: Full,
    }
}

impl Default for LoopbackOptions {
    fn default() -> Self {
        Self { queue: 512, max_packet: MAX_ROCE_PACKET, full: Full::Wait }
    }
}

/// A network within the process: endpoints by address.
///
/// ```
/// use warpwire::link::{Hub, Link};
/// let hub = Hub::new();
/// let one = hub.endpoint("10.0.0.1:0".parse().unwrap())?;
/// assert_ne!(one.local().port(), 0);
/// assert!(hub.endpoint(one.local()).is_err());
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone)]
pub struct Hub {
    shared: Arc<Shared>,
}

impl std::fmt::Debug for Hub {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Hub({} endpoints)", self.shared.endpoints.lock().len())
    }
}

struct Shared {
    endpoints: Mutex<HashMap<SocketAddr, Arc<EndpointQueue>>>,
    options: LoopbackOptions,
}

/// An endpoint's receive queue, shared with its senders.
struct EndpointQueue {
    ring: Mutex<Ring>,
    /// Number of queued packets, for the receiver to read without the lock.
    filled: AtomicUsize,
    /// The endpoint was dropped.
    closed: AtomicBool,
    event: OwnedFd,
}

struct Ring {
    slots: Vec<Slot>,
    head: usize,
    len: usize,
    /// The receiver sleeps or is about to: the next sender must write the eventfd.
    armed: bool,
    /// The eventfd was written and has not been read yet.
    signalled: bool,
}

/// A packet buffer.
struct Slot {
    bytes: Box<[u8]>,
    len: usize,
    from: SocketAddr,
    to: SocketAddr,
    has_icrc: bool,
}

impl Slot {
    fn allocate(count: usize, max_packet: usize, address: SocketAddr) -> Vec<Self> {
        let slot = |_| Self {
            bytes: vec![0; max_packet].into_boxed_slice(),
            len: 0,
            from: address,
            to: address,
            has_icrc: false,
        };
        (0..count).map(slot).collect()
    }

    fn frame(&self) -> Frame<'_> {
        Frame {
            from: self.from,
            to: self.to,
            bytes: self.bytes.get(..self.len).unwrap_or_default(),
            traffic_class: Frame::TRAFFIC_CLASS,
            hop_limit: Frame::HOP_LIMIT,
            identification: 0,
            has_icrc: self.has_icrc,
        }
    }
}

impl Hub {
    /// A hub with the default options.
    pub fn new() -> Self {
        Self::with(LoopbackOptions::default())
    }

    /// A hub with these options, clamped to the ranges that [`LoopbackOptions`] documents.
    pub fn with(mut options: LoopbackOptions) -> Self {
        options.queue = options.queue.max(1);
        options.max_packet = options.max_packet.clamp(MIN_PACKET, 65_507);
        Self { shared: Arc::new(Shared { endpoints: Mutex::new(HashMap::new()), options }) }
    }

    /// Creates an endpoint with this address; port 0 selects a free port.
    ///
    /// # Errors
    /// `Busy` if another endpoint has the address, or if no port is free.
    pub fn endpoint(&self, address: SocketAddr) -> Result<Loopback> {
        let event =
            eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(|source| {
                Error::os("create an eventfd for a loopback endpoint", &source.into())
            })?;
        let options = self.shared.options;
        let mut endpoints = self.shared.endpoints.lock();
        let free = |port: &u16| !endpoints.contains_key(&SocketAddr::new(address.ip(), *port));
        let port = if address.port() == 0 {
            ANY_PORTS.into_iter().find(free)
        } else {
            Some(address.port()).filter(free)
        };
        let Some(port) = port else {
            return Err(Error::new(ErrorKind::Busy, "create a loopback endpoint")
                .on(address.to_string())
                .why("another endpoint of this hub has that address")
                .fix("choose another address, or port 0 for a free one"));
        };
        let local = SocketAddr::new(address.ip(), port);
        let ring = Ring {
            slots: Slot::allocate(options.queue, options.max_packet, local),
            head: 0,
            len: 0,
            armed: false,
            signalled: false,
        };
        let rx_queue = Arc::new(EndpointQueue {
            ring: Mutex::new(ring),
            filled: AtomicUsize::new(0),
            closed: AtomicBool::new(false),
            event,
        });
        endpoints.insert(local, Arc::clone(&rx_queue));
        drop(endpoints);
        Ok(Loopback {
            hub: Arc::clone(&self.shared),
            local,
            rx_queue,
            flows: Flows::new(),
            batch: Slot::allocate(BATCH, options.max_packet, local),
            targets: [None; BATCH],
            used: 0,
            reserved: None,
            rx_batch: Slot::allocate(BATCH, options.max_packet, local),
            append_icrc: false,
            flushes: 0,
            counters: Counters::default(),
        })
    }
}

impl Default for Hub {
    fn default() -> Self {
        Self::new()
    }
}

/// Per-peer state of an endpoint.
struct Flow {
    peer: SocketAddr,
    rx_queue: Option<Arc<EndpointQueue>>,
    icrc_prefix: IcrcPrefix,
    /// The flush in which the peer's queue was found full: later packets of the flow must not
    /// overtake.
    blocked_in: u64,
}

/// An endpoint of a [`Hub`].
pub struct Loopback {
    hub: Arc<Shared>,
    local: SocketAddr,
    rx_queue: Arc<EndpointQueue>,
    flows: Flows<Flow>,
    batch: Vec<Slot>,
    /// The flow of each packet in the batch.
    targets: [Option<FlowId>; BATCH],
    used: usize,
    reserved: Option<(FlowId, usize)>,
    rx_batch: Vec<Slot>,
    append_icrc: bool,
    flushes: u64,
    counters: Counters,
}

impl Loopback {
    /// The queue of a flow's peer. Looks up a new endpoint if the old one was dropped; `None` if
    /// there is none.
    fn connect<'a>(hub: &Shared, flow: &'a mut Flow) -> Option<&'a Arc<EndpointQueue>> {
        let alive = |rx_queue: &Arc<EndpointQueue>| !rx_queue.closed.load(Ordering::Acquire);
        if !flow.rx_queue.as_ref().is_some_and(alive) {
            flow.rx_queue = hub.endpoints.lock().get(&flow.peer).cloned();
        }
        flow.rx_queue.as_ref()
    }

    /// Swaps queued packets into `rx_batch` and returns their number.
    fn take(&mut self) -> usize {
        if self.rx_queue.filled.load(Ordering::Acquire) == 0 {
            return 0;
        }
        let mut ring = self.rx_queue.ring.lock();
        let count = ring.len.min(BATCH);
        for slot in &mut self.rx_batch[..count] {
            let head = ring.head;
            std::mem::swap(slot, &mut ring.slots[head]);
            ring.head = (head + 1) % ring.slots.len();
        }
        ring.len -= count;
        ring.armed = false;
        self.rx_queue.filled.store(ring.len, Ordering::Release);
        if std::mem::take(&mut ring.signalled) {
            self.counters.calls += 1;
            // The count of an eventfd is cleared by reading it.
            let _ = rustix::io::read(&self.rx_queue.event, &mut [0; 8]);
        }
        count
    }
}

/// A receiver's queue, locked while a sender appends packets.
struct QueueWriter<'a> {
    rx_queue: &'a EndpointQueue,
    ring: MutexGuard<'a, Ring>,
}

impl<'a> QueueWriter<'a> {
    fn new(rx_queue: &'a EndpointQueue) -> Self {
        Self { rx_queue, ring: rx_queue.ring.lock() }
    }

    /// Swaps the packet for an empty buffer; `false` if the queue is full.
    fn push(&mut self, packet: &mut Slot) -> bool {
        let ring = &mut *self.ring;
        if ring.len == ring.slots.len() {
            return false;
        }
        let tail = (ring.head + ring.len) % ring.slots.len();
        std::mem::swap(packet, &mut ring.slots[tail]);
        ring.len += 1;
        true
    }

    /// Publishes the new length and wakes a sleeping receiver. Returns whether it had to be woken.
    fn finish(mut self) -> bool {
        self.rx_queue.filled.store(self.ring.len, Ordering::Release);
        let wake = self.ring.armed && self.ring.len > 0 && !self.ring.signalled;
        if wake {
            self.ring.armed = false;
            self.ring.signalled = true;
            self.rx_queue.wake();
        }
        wake
    }
}

impl EndpointQueue {
    fn wake(&self) {
        // The write fails only at a count of 2^64 - 2, and then the eventfd is readable anyway.
        let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
    }
}

impl Link for Loopback {
    fn path(&self) -> LinkPath {
        let LoopbackOptions { queue, full, .. } = self.hub.options;
        let append_icrc =
            if self.append_icrc { "with" } else { "without (memory does not corrupt packets)" };
        let full = match full {
            Full::Wait => "wait at the sender",
            Full::Drop => "are dropped",
        };
        let why = format!(
            "endpoints of one process; zero-copy by buffer swap, {append_icrc} ICRC; queues of \
             {queue}, packets for a full one {full}"
        );
        LinkPath { kind: LinkKind::Loopback, local: self.local, why }
    }

    fn local(&self) -> SocketAddr {
        self.local
    }

    fn max_packet(&self) -> usize {
        self.hub.options.max_packet
    }

    /// The address may be unused: packets are dropped and counted until an endpoint has it.
    fn open(&mut self, peer: SocketAddr, _label: u32) -> Result<FlowId> {
        super::check_peer(self.local, peer)?;
        let rx_queue = self.hub.endpoints.lock().get(&peer).cloned();
        let icrc_prefix = IcrcPrefix::new(self.local, peer);
        Ok(self.flows.insert(Flow { peer, rx_queue, icrc_prefix, blocked_in: 0 }))
    }

    fn close(&mut self, flow: FlowId) {
        // After removal, the packets of the flow would have no destination.
        if self.targets[..self.used].contains(&Some(flow)) {
            let _ = self.flush();
        }
        self.flows.remove(flow);
    }

    fn reserve(
        &mut self,
        flow: FlowId,
        len: usize,
    ) -> std::result::Result<&mut [u8], ReserveError> {
        if !(MIN_PACKET..=self.hub.options.max_packet).contains(&len) {
            return Err(ReserveError::Length);
        }
        let Some(known) = self.flows.get_mut(flow) else { return Err(ReserveError::Closed) };
        let to = known.peer;
        let slot = self.batch.get_mut(self.used).ok_or(ReserveError::Full)?;
        slot.to = to;
        self.reserved = Some((flow, len));
        slot.bytes.get_mut(..len).ok_or(ReserveError::Length)
    }

    fn commit_corrupted(&mut self, corruption: Corruption) -> Option<Frame<'_>> {
        let (id, len) = self.reserved.take()?;
        let flow = self.flows.get_mut(id)?;
        let slot = self.batch.get_mut(self.used)?;
        let packet = slot.bytes.get_mut(..len)?;
        if self.append_icrc {
            let icrc = flow.icrc_prefix.icrc::<SimdCrc32>(0, packet)?;
            packet[len - ICRC_LEN..].copy_from_slice(&icrc.to_le_bytes());
        }
        slot.len = corruption.apply(packet);
        slot.from = self.local;
        slot.has_icrc = self.append_icrc;
        self.targets[self.used] = Some(id);
        self.used += 1;
        Some(slot.frame())
    }

    fn flush(&mut self) -> Result<Flushed> {
        let mut flushed = Flushed::default();
        self.flushes += 1;
        let (mut next, mut kept) = (0, 0);
        while next < self.used {
            let id = self.targets[next];
            let same = |target: &&Option<FlowId>| **target == id;
            let run = self.targets[next..self.used].iter().take_while(same).count();
            let packets = next..next + run;
            next += run;
            let flow = id.and_then(|id| self.flows.get_mut(id));
            let Some(flow) = flow else {
                self.counters.drops.no_peer += run as u64;
                continue;
            };
            let blocked = flow.blocked_in == self.flushes;
            let mut waiting = packets.start;
            if !blocked {
                let Some(rx_queue) = Self::connect(&self.hub, flow) else {
                    self.counters.drops.no_peer += run as u64;
                    continue;
                };
                let mut queue_writer = QueueWriter::new(rx_queue);
                while waiting < packets.end {
                    let bytes = self.batch[waiting].len as u64;
                    if !queue_writer.push(&mut self.batch[waiting]) {
                        break;
                    }
                    self.counters.sent += 1;
                    self.counters.sent_bytes += bytes;
                    waiting += 1;
                }
                self.counters.calls += u64::from(queue_writer.finish());
                flushed.sent += waiting - packets.start;
            }
            if waiting < packets.end {
                flow.blocked_in = self.flushes;
            }
            let left = packets.end - waiting;
            if left > 0 && self.hub.options.full == Full::Drop {
                self.counters.drops.overrun += left as u64;
                continue;
            }
            for at in waiting..packets.end {
                self.batch.swap(kept, at);
                self.targets[kept] = id;
                kept += 1;
            }
        }
        self.used = kept;
        flushed.waiting = kept;
        // The reserved slot was behind the packets just sent, and may have moved.
        self.reserved = None;
        Ok(flushed)
    }

    fn receive(&mut self, take: &mut dyn FnMut(Frame<'_>)) -> Result<usize> {
        let count = self.take();
        let mut delivered = 0;
        for slot in &self.rx_batch[..count] {
            let frame = slot.frame();
            if let Err(reason) = check(&frame) {
                *reason(&mut self.counters.drops) += 1;
                continue;
            }
            delivered += 1;
            self.counters.received += 1;
            self.counters.received_bytes += frame.bytes.len() as u64;
            take(frame);
        }
        Ok(delivered)
    }

    fn wait_fd(&self) -> Option<BorrowedFd<'_>> {
        let mut ring = self.rx_queue.ring.lock();
        ring.armed = true;
        if ring.len > 0 && !ring.signalled {
            ring.signalled = true;
            self.rx_queue.wake();
        }
        Some(self.rx_queue.event.as_fd())
    }

    fn force_icrc(&mut self) {
        self.append_icrc = true;
    }

    fn counters(&self) -> Counters {
        self.counters
    }
}

impl Drop for Loopback {
    fn drop(&mut self) {
        self.rx_queue.closed.store(true, Ordering::Release);
        self.hub.endpoints.lock().remove(&self.local);
    }
}

type Reason = fn(&mut super::Drops) -> &mut u64;

/// Checks length and ICRC, so that corruption by fault injection is detected as on other links.
fn check(frame: &Frame<'_>) -> std::result::Result<(), Reason> {
    if frame.bytes.len() < MIN_PACKET {
        return Err(|drops| &mut drops.short);
    }
    let carried = frame.bytes.last_chunk::<ICRC_LEN>().map(|bytes| u32::from_le_bytes(*bytes));
    if frame.has_icrc
        && carried != IcrcPrefix::new(frame.from, frame.to).icrc::<SimdCrc32>(0, frame.bytes)
    {
        return Err(|drops| &mut drops.icrc);
    }
    Ok(())
}
