//! The receiving end: it tells the sender where data goes, and waits for the words behind it.

use std::net::TcpStream;

use parking_lot::Mutex;
use warpwire::mr::HostMemory;
use warpwire::verbs::{Access, Mr, PostError, Remote, SendRequest, WrOp};

use crate::abi::MAX_RECVS;
use crate::comm::{Done, not_outstanding};
use crate::control::Control;
use crate::devices::Device;
use crate::frames::{Hello, Reply};
use crate::lanes::{self, Lanes, MAX_LANES};
use crate::memory::{MemoryHandle, Words};
use crate::result::{Failure, INTERNAL, INVALID_ARGUMENT, REMOTE, Result};
use crate::ring::{self, Descriptor, ENTRY_LEN, RING_LEN, SLOTS};
use crate::stripes::Stripes;

/// Two work requests for each group, and some that are acknowledged late.
const DEPTH: u32 = 256;
/// Smallest and largest part of a message that a sender may choose.
const STRIPES: std::ops::RangeInclusive<u64> = 4096..=1 << 30;

/// A receiver whose sender has not yet connected.
pub(crate) struct Prepared {
    lanes: Lanes,
    stripes: Stripes,
    words: Words,
    ring: Vec<Remote>,
    staging: HostMemory,
    regions: Vec<Mr>,
}

impl Prepared {
    /// Queue pairs that are connected to those of the sender, and the answer to it.
    ///
    /// # Errors
    /// [`REMOTE`] if its message is not usable.
    pub(crate) fn new(device: &Device, hello: &Hello) -> Result<(Self, Reply)> {
        let mut lanes = Lanes::create(device, DEPTH)?;
        let count = lanes.len().min(hello.endpoints.len());
        if hello.ring.len() != hello.endpoints.len() || !STRIPES.contains(&hello.stripe) {
            return Err(Failure::new(REMOTE, "the sender's offer is incomplete"));
        }
        lanes.connect(&hello.endpoints[..count])?;
        let words = Words::new(&lanes)?;
        let staging = HostMemory::new(RING_LEN)?;
        let regions = lanes
            .iter()
            .map(|lane| lane.context.register(&lane.pd, staging.clone(), Access::LOCAL_WRITE));
        let regions = regions.collect::<warpwire::Result<Vec<Mr>>>()?;
        let reply = Reply { endpoints: lanes.endpoints(), words: words.remotes() };
        let stripes = Stripes::new(lanes.len(), hello.stripe);
        let ring = hello.ring[..count].to_vec();
        Ok((Self { lanes, stripes, words, ring, staging, regions }, reply))
    }

    pub(crate) fn finish(self, stream: TcpStream) -> RecvComm {
        let Self { lanes, stripes, words, ring, staging, regions } = self;
        let state = Mutex::new(Box::new(State {
            next: 0,
            groups: [Group::FREE; SLOTS],
            outstanding: [0; MAX_LANES],
            control: Control::new(stream),
        }));
        RecvComm { state, lanes, stripes, words, ring, staging, regions }
    }
}

pub(crate) struct RecvComm {
    // Dropped first: its goodbye precedes the end of the queue pairs.
    state: Mutex<Box<State>>,
    pub lanes: Lanes,
    stripes: Stripes,
    words: Words,
    /// The sender's ring, for each lane.
    ring: Vec<Remote>,
    /// Descriptors, as they are written to the sender's ring.
    staging: HostMemory,
    regions: Vec<Mr>,
}

struct State {
    /// Sequence number of the next group.
    next: u64,
    groups: [Group; SLOTS],
    /// Signaled work requests on each lane.
    outstanding: [u32; MAX_LANES],
    control: Control,
}

/// An irecv.
#[derive(Clone, Copy)]
struct Group {
    is_active: bool,
    sequence: u64,
    count: usize,
    rooms: [u64; MAX_RECVS],
}

impl Group {
    const FREE: Self = Self { is_active: false, sequence: 0, count: 0, rooms: [0; MAX_RECVS] };
}

/// A buffer of an irecv.
#[derive(Clone, Copy)]
pub(crate) struct Buffer<'a> {
    pub address: u64,
    pub size: u64,
    pub tag: i32,
    pub memory: Option<&'a MemoryHandle>,
}

impl RecvComm {
    /// Posts a group of receives; `None` if too many are outstanding: try again.
    ///
    /// # Errors
    /// If the connection has failed, or a buffer has no memory handle.
    pub(crate) fn irecv(&self, buffers: &[Buffer<'_>]) -> Result<Option<usize>> {
        if buffers.is_empty() || buffers.len() > MAX_RECVS {
            let text = format!("irecv of {} buffers; 1 to {MAX_RECVS} are possible", buffers.len());
            return Err(Failure::new(INVALID_ARGUMENT, text));
        }
        let mut state = self.state.lock();
        let state = &mut **state;
        let slot = ring::slot(state.next);
        if state.groups[slot].is_active || !state.control.is_usable() {
            self.progress(state);
            return state.control.result().map(|()| None);
        }
        let mut group = Group { is_active: true, sequence: state.next, ..Group::FREE };
        group.count = buffers.len();
        for (at, buffer) in buffers.iter().enumerate() {
            group.rooms[at] = buffer.size;
            self.describe(slot, at, buffer)?;
        }
        if !self.publish(state, slot, buffers.len())? {
            self.progress(state);
            return state.control.result().map(|()| None);
        }
        state.groups[slot] = group;
        state.next += 1;
        Ok(Some(slot))
    }

    /// Clears the words of a receive and writes its descriptor to the staging memory.
    #[inline]
    fn describe(&self, slot: usize, at: usize, buffer: &Buffer<'_>) -> Result {
        let lanes = self.lanes.len();
        self.words.clear(slot, at, lanes);
        let Buffer { address, size, tag, memory } = *buffer;
        let mut descriptor = Descriptor { address, size, tag, ..Descriptor::EMPTY };
        if size > 0 {
            let memory = memory.ok_or_else(|| {
                Failure::new(INVALID_ARGUMENT, "irecv into a buffer without its memory handle")
            })?;
            for (lane, rkey) in descriptor.rkeys[..lanes].iter_mut().enumerate() {
                *rkey = memory.region(lane)?.rkey();
            }
        }
        let offset = ring::entries_at(slot) + (at * ENTRY_LEN) as u64;
        Ok(self.staging.bytes().write(offset, &descriptor.bytes())?)
    }

    /// Writes the descriptors of a group to the sender, then its marker; false if the queue is
    /// full.
    fn publish(&self, state: &mut State, slot: usize, count: usize) -> Result<bool> {
        let at = self.stripes.lane(state.next, 0, 0);
        let (Some(lane), Some(ring), Some(region)) =
            (self.lanes.get(at), self.ring.get(at), self.regions.get(at))
        else {
            return Err(Failure::new(INTERNAL, format!("there is no lane {at}")));
        };
        let remote =
            |offset: u64| Remote { address: ring.address.wrapping_add(offset), rkey: ring.rkey };
        let entries = [region.sge(ring::entries_at(slot), (count * ENTRY_LEN) as u32)];
        let marker = ring::marker(state.next, count).to_ne_bytes();
        let descriptors = SendRequest::new(0, WrOp::Write(remote(ring::entries_at(slot))));
        let mark = SendRequest::new(0, WrOp::Write(remote(ring::marker_at(slot))));
        match lane.qp.post_send(&[descriptors.with(&entries).unsignaled(), mark.inline(&marker)]) {
            Ok(()) => state.outstanding[at] += 1,
            Err(PostError::Full) => return Ok(false),
            Err(why) => return Err(warpwire::Error::from(why).into()),
        }
        Ok(true)
    }

    /// Takes completions of descriptors; a failure is kept.
    #[inline]
    fn progress(&self, state: &mut State) {
        let State { outstanding, control, .. } = state;
        let outcome = self.lanes.progress(outstanding, |completion| {
            if completion.is_success() { Ok(()) } else { Err(lanes::failed(completion)) }
        });
        if let Err(why) = outcome {
            control.fail(why);
        }
        if control.on_idle()
            && outstanding.iter().all(|count| *count == 0)
            && let Some(ring) = self.ring.first()
        {
            self.lanes.post_heartbeat(*ring, outstanding);
        }
    }

    /// Whether all messages of a group have arrived.
    pub(crate) fn test(&self, index: usize) -> Result<Option<Done>> {
        let mut state = self.state.lock();
        let state = &mut **state;
        let group = state.groups.get(index).filter(|group| group.is_active).copied();
        let group = group.ok_or_else(not_outstanding)?;
        let mut done = self.arrived(index, &group)?;
        if done.is_none() {
            self.progress(state);
            let outcome = state.control.result();
            // What arrived before the peer ended counts.
            done = self.arrived(index, &group)?;
            if done.is_none() {
                return outcome.map(|()| None);
            }
        }
        state.groups[index].is_active = false;
        Ok(done)
    }

    /// The sizes of a group's messages, if all parts of all have arrived.
    #[inline]
    fn arrived(&self, slot: usize, group: &Group) -> Result<Option<Done>> {
        let mut sizes = [0; MAX_RECVS];
        let rooms = group.rooms[..group.count].iter().enumerate();
        for ((entry, room), size) in rooms.zip(&mut sizes) {
            let lane = |part: usize| self.stripes.lane(group.sequence, entry, part);
            let word = self.words.load(slot, entry, lane(0));
            let Some(sent) = ring::size_in(word, group.sequence) else { return Ok(None) };
            if sent > *room {
                let text = format!("the peer sent {sent} bytes into a buffer of {room}");
                return Err(Failure::new(REMOTE, text));
            }
            let (parts, _) = self.stripes.split(sent);
            if (1..parts).any(|part| self.words.load(slot, entry, lane(part)) != word) {
                return Ok(None);
            }
            *size = sent;
        }
        Ok(Some(Done { count: group.count, sizes }))
    }
}

impl Drop for State {
    fn drop(&mut self) {
        let active = self.groups.iter().filter(|group| group.is_active);
        let completed = active.map(|group| group.sequence).min().unwrap_or(self.next);
        self.control.say_goodbye(completed);
    }
}
