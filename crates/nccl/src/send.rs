//! The sending end: it waits for the descriptors of receives, and writes data where they say.

use std::net::TcpStream;

use parking_lot::Mutex;
use warpwire::mr::HostMemory;
use warpwire::verbs::{Access, Mr, Remote, SendRequest, Sge, WrOp};

use crate::abi::MAX_RECVS;
use crate::comm::{Done, not_outstanding};
use crate::control::{Control, PeerState};
use crate::devices::Device;
use crate::frames::Reply;
use crate::lanes::{self, HEARTBEAT, Lanes, MAX_LANES, remotes};
use crate::memory::MemoryHandle;
use crate::result::{Failure, INTERNAL, INVALID_ARGUMENT, INVALID_USAGE, REMOTE, Result};
use crate::ring::{self, Descriptor, ENTRY_LEN, RING_LEN};
use crate::stripes::Stripes;

/// Outstanding isends. NCCL wants 32 groups of 8.
pub(crate) const MAX_SEND_REQUESTS: usize = 256;
/// Maximum bytes of a message, and of one work request.
const MAX_MESSAGE: u64 = 1 << 31;
const MAX_WORK_REQUEST: u64 = 1 << 30;
/// Work requests of a part: its data and its word.
const MAX_PER_PART: usize = (MAX_MESSAGE / MAX_WORK_REQUEST) as usize + 1;
/// Invariant 5: all requests fit into one queue.
const DEPTH: u32 = (MAX_SEND_REQUESTS * 4) as u32;
const _: () = assert!(MAX_PER_PART * MAX_SEND_REQUESTS <= DEPTH as usize);

/// Queue pairs and the ring of descriptors, before the peer is known.
pub(crate) struct Prepared {
    pub lanes: Lanes,
    ring: HostMemory,
    regions: Vec<Mr>,
}

impl Prepared {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let lanes = Lanes::create(device, DEPTH)?;
        // A peer on this machine maps it, and writes descriptors without packets.
        let ring = HostMemory::new(RING_LEN)?;
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let regions =
            lanes.iter().map(|lane| lane.context.register(&lane.pd, ring.clone(), access));
        let regions = regions.collect::<warpwire::Result<Vec<Mr>>>()?;
        Ok(Self { lanes, ring, regions })
    }

    pub(crate) fn ring(&self) -> Vec<Remote> {
        remotes(&self.regions)
    }

    /// Connects to the peer's queue pairs.
    ///
    /// # Errors
    /// If the answer does not fit what was offered.
    pub(crate) fn connect(&mut self, reply: &Reply) -> Result {
        if reply.words.len() != reply.endpoints.len() {
            return Err(Failure::new(REMOTE, "the peer's answer is incomplete"));
        }
        self.lanes.connect(&reply.endpoints)
    }

    pub(crate) fn finish(self, reply: Reply, stripe: u64, stream: TcpStream) -> SendComm {
        let Self { lanes, ring, regions } = self;
        let stripes = Stripes::new(lanes.len(), stripe);
        let state = Mutex::new(Box::new(State {
            head: 0,
            group: Group::EMPTY,
            requests: [Outstanding::FREE; MAX_SEND_REQUESTS],
            free: (0..MAX_SEND_REQUESTS).rev().collect(),
            outstanding: [0; MAX_LANES],
            control: Control::new(stream),
        }));
        SendComm { state, lanes, stripes, words: reply.words, ring, _regions: regions }
    }
}

pub(crate) struct SendComm {
    // Dropped first: its goodbye precedes the end of the queue pairs.
    state: Mutex<Box<State>>,
    pub lanes: Lanes,
    stripes: Stripes,
    /// The receiver's words, for each lane.
    words: Vec<Remote>,
    ring: HostMemory,
    _regions: Vec<Mr>,
}

struct State {
    /// Sequence number of the group that messages are matched with.
    head: u64,
    /// Its receives, once they are here.
    group: Group,
    requests: [Outstanding; MAX_SEND_REQUESTS],
    free: Vec<usize>,
    /// Signaled work requests on each lane.
    outstanding: [u32; MAX_LANES],
    control: Control,
}

/// The receives of the group at the head.
struct Group {
    count: usize,
    descriptors: [Descriptor; MAX_RECVS],
    /// A bit for each receive that has its message.
    used: u32,
}

impl Group {
    const EMPTY: Self = Self { count: 0, descriptors: [Descriptor::EMPTY; MAX_RECVS], used: 0 };

    /// The first receive of this tag that has no message.
    #[inline]
    fn find(&self, tag: i32) -> Option<usize> {
        let mut entries = self.descriptors[..self.count].iter().enumerate();
        let found = entries.find(|(at, entry)| entry.tag == tag && self.used & (1 << at) == 0);
        found.map(|(at, _)| at)
    }
}

/// An isend.
#[derive(Clone, Copy)]
struct Outstanding {
    is_active: bool,
    /// Parts that are not acknowledged.
    parts: u32,
    size: u64,
    sequence: u64,
}

impl Outstanding {
    const FREE: Self = Self { is_active: false, parts: 0, size: 0, sequence: 0 };
}

/// A message to be sent.
#[derive(Clone, Copy)]
pub(crate) struct Message<'a> {
    pub address: u64,
    pub size: u64,
    pub tag: i32,
    pub memory: Option<&'a MemoryHandle>,
}

impl SendComm {
    /// Sends a message if its receive is posted; else `None`: try again.
    ///
    /// # Errors
    /// If the connection has failed, or the message is longer than its receive.
    pub(crate) fn isend(&self, message: &Message<'_>) -> Result<Option<usize>> {
        let mut state = self.state.lock();
        let state = &mut **state;
        if message.size > MAX_MESSAGE {
            let text = format!("a message of {} bytes; the maximum is {MAX_MESSAGE}", message.size);
            return Err(Failure::new(INVALID_ARGUMENT, text));
        }
        let receive = match state.control.is_usable() && !state.free.is_empty() {
            true => self.find(state, message.tag)?,
            false => None,
        };
        let Some(entry) = receive else {
            self.progress(state);
            return state.control.result().map(|()| None);
        };
        let room = state.group.descriptors[entry].size;
        if message.size > room {
            let (size, tag) = (message.size, message.tag);
            let text = format!("a message of {size} bytes (tag {tag}) for a receive of {room}");
            return Err(Failure::new(INVALID_USAGE, text));
        }
        if message.size > 0 {
            // Before the first part is posted: a message is sent whole, or not at all.
            let memory = message.memory.ok_or_else(no_memory)?;
            memory.region(self.lanes.len() - 1)?;
        }
        let Some(index) = state.free.pop() else { return Ok(None) };
        let posted = self.post(state, message, entry, index);
        posted.inspect_err(|failure| state.control.fail(failure.clone()))?;
        state.group.used |= 1 << entry;
        if state.group.used.count_ones() as usize == state.group.count {
            state.head += 1;
            state.group.count = 0;
        }
        Ok(Some(index))
    }

    /// The receive for a message with this tag, if it is posted in the group at the head.
    #[inline]
    fn find(&self, state: &mut State, tag: i32) -> Result<Option<usize>> {
        if state.group.count == 0 && !self.read_group(state)? {
            return Ok(None);
        }
        Ok(state.group.find(tag))
    }

    /// Reads the descriptors of the group at the head, if they are here.
    fn read_group(&self, state: &mut State) -> Result<bool> {
        let (slot, bytes) = (ring::slot(state.head), self.ring.bytes());
        // Acquire: the descriptors were written before the marker.
        let marker = bytes.load_u64(ring::marker_at(slot))?;
        let Some(count) = ring::marked(marker, state.head) else { return Ok(false) };
        if count == 0 || count > MAX_RECVS {
            let text = format!("the peer posted a group of {count} receives");
            return Err(Failure::new(REMOTE, text));
        }
        for (at, descriptor) in state.group.descriptors[..count].iter_mut().enumerate() {
            let mut entry = [0; ENTRY_LEN];
            bytes.read(ring::entries_at(slot) + (at * ENTRY_LEN) as u64, &mut entry)?;
            *descriptor = Descriptor::parse(&entry);
        }
        (state.group.count, state.group.used) = (count, 0);
        Ok(true)
    }

    /// Posts the parts of a message, each with its word behind it.
    fn post(&self, state: &mut State, message: &Message<'_>, entry: usize, index: usize) -> Result {
        let (sequence, receive) = (state.head, state.group.descriptors[entry]);
        let (slot, word) = (ring::slot(sequence), ring::word(sequence, message.size).to_ne_bytes());
        let (parts, part_len) = self.stripes.split(message.size);
        for part in 0..parts {
            let at = self.stripes.lane(sequence, entry, part);
            let (Some(lane), Some(words)) = (self.lanes.get(at), self.words.get(at)) else {
                return Err(Failure::new(INTERNAL, format!("there is no lane {at}")));
            };
            let begin = part as u64 * part_len;
            let end = message.size.min(begin + part_len);
            let mut requests = [SendRequest::new(index as u64, WrOp::Nop); MAX_PER_PART];
            let mut entries = [[Sge { address: 0, len: 0, lkey: 0 }; 1]; MAX_PER_PART];
            let (mut count, mut offset) = (0, begin);
            while offset < end {
                let len = (end - offset).min(MAX_WORK_REQUEST);
                let memory = message.memory.ok_or_else(no_memory)?;
                let address = message.address.wrapping_add(offset);
                let lkey = memory.region(at)?.lkey();
                entries[count] = [Sge { address, len: len as u32, lkey }];
                (count, offset) = (count + 1, offset + len);
            }
            let mut target = receive.address.wrapping_add(begin);
            for (request, entry) in requests.iter_mut().zip(&entries[..count]) {
                let remote = Remote { address: target, rkey: receive.rkeys[at] };
                let write = SendRequest::new(index as u64, WrOp::Write(remote));
                *request = write.with(entry).unsignaled();
                target = target.wrapping_add(u64::from(entry[0].len));
            }
            let word_at = ring::word_at(slot, entry, at) as u64 * size_of::<u64>() as u64;
            let remote = Remote { address: words.address.wrapping_add(word_at), rkey: words.rkey };
            requests[count] = SendRequest::new(index as u64, WrOp::Write(remote)).inline(&word);
            lane.qp.post_send(&requests[..=count]).map_err(warpwire::Error::from)?;
            state.outstanding[at] += 1;
        }
        let (parts, size) = (parts as u32, message.size);
        state.requests[index] = Outstanding { is_active: true, parts, size, sequence };
        Ok(())
    }

    /// Takes completions; a failure is kept.
    #[inline]
    fn progress(&self, state: &mut State) {
        let State { requests, outstanding, control, .. } = state;
        let outcome = self.lanes.progress(outstanding, |completion| {
            if !completion.is_success() {
                return Err(lanes::failed(completion));
            }
            if completion.id != HEARTBEAT
                && let Some(request) = requests.get_mut(completion.id as usize)
            {
                request.parts = request.parts.saturating_sub(1);
            }
            Ok(())
        });
        if let Err(why) = outcome {
            control.fail(why);
        }
        if control.on_idle()
            && outstanding.iter().all(|count| *count == 0)
            && let Some(words) = self.words.first()
        {
            self.lanes.post_heartbeat(*words, outstanding);
        }
    }

    /// Whether an isend is complete: all of its parts are acknowledged.
    pub(crate) fn test(&self, index: usize) -> Result<Option<Done>> {
        let mut state = self.state.lock();
        let state = &mut **state;
        if !state.requests.get(index).is_some_and(|request| request.is_active) {
            return Err(not_outstanding());
        }
        if !state.is_done(index) {
            self.progress(state);
            if !state.is_done(index) {
                return state.control.result().map(|()| None);
            }
        }
        let size = state.requests[index].size;
        state.requests[index] = Outstanding::FREE;
        state.free.push(index);
        let mut sizes = [0; MAX_RECVS];
        sizes[0] = size;
        Ok(Some(Done { count: 1, sizes }))
    }
}

impl State {
    #[inline]
    fn is_done(&self, index: usize) -> bool {
        let Outstanding { parts, sequence, .. } = self.requests[index];
        let has_reported =
            matches!(self.control.state(), PeerState::Closed(completed) if sequence < completed);
        parts == 0 || has_reported
    }
}

impl Drop for State {
    fn drop(&mut self) {
        self.control.say_goodbye(0);
    }
}

#[cold]
fn no_memory() -> Failure {
    Failure::new(INVALID_ARGUMENT, "isend of data without its memory handle")
}
