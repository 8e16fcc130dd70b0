//! What sockets of the family `warp` have beside lines and rings: queues that kernels fill, completions and lines that they
//! watch, berths that are their own. All of it is laid out at the start: while kernels run, CUDA may keep an allocation waiting.

use super::layout::{berth, peer, wire};
use super::warp::Hello;
use super::{Place, SockOptions};
use crate::error::Result;
use crate::hca::QueueMemory;
use crate::mem::copy::Plan;
use crate::mem::{Allocation, Device, MemoryKind};
use crate::stream::kernel::LaidQp;
use crate::verbs::{Context, Pd, QpOptions};

/// How many operations of a socket may be under way. A send takes two or three.
const DEPTH: u32 = 64;

/// Memory for so many sockets at a time.
pub(super) struct Berths {
    queues: QueueMemory,
    queues_at: u64,
    queues_len: u64,
    watched: QueueMemory,
    /// A window does not keep the memory that it shows.
    _watched_memory: Allocation,
    watched_at: u64,
    watched_len: u64,
    _berths: Allocation,
    berths_at: u64,
    free: Vec<u32>,
}

impl Berths {
    /// Lays out the memory; nothing if no socket is to be of the family.
    pub(super) fn lay(device: &Device, options: &SockOptions) -> Result<Option<Self>> {
        let count = u64::from(options.warp_sockets.min(options.sockets));
        if count == 0 {
            return Ok(None);
        }
        let (queues_len, completions_len) = LaidQp::memory_for(DEPTH)?;
        let watched_len = (wire::LEN + completions_len).next_multiple_of(128);
        let is_near = options.place == Place::Auto;
        let at = |memory: &Allocation| match options.place {
            // Threads of this process look at host addresses.
            Place::Threads => Ok(memory.host_bytes()?.address()),
            Place::Auto | Place::Pinned => Ok(memory.address().raw()),
        };
        let queues = device.alloc_pinned(count * queues_len)?;
        let near = match is_near {
            true => {
                // How the device's memory is copied best is measured now, if nobody knows: later a kernel may be in the way.
                Plan::for_device(device)?;
                let memory = device.alloc_kind(count * watched_len, MemoryKind::Vmm)?;
                memory.window().ok().map(|window| (memory, QueueMemory::window(window)))
            }
            false => None,
        };
        let (watched_memory, watched) = match near {
            Some(near) => near,
            None => {
                let memory = device.alloc_pinned(count * watched_len)?;
                (memory.clone(), QueueMemory::pinned(memory)?)
            }
        };
        let berths = match options.place {
            Place::Threads => device.alloc_pinned(count * berth::LEN)?,
            Place::Auto | Place::Pinned => {
                device.alloc_kind(count * berth::LEN, MemoryKind::Vmm)?
            }
        };
        Ok(Some(Self {
            queues_at: at(&queues)?,
            queues: QueueMemory::pinned(queues)?,
            queues_len,
            watched_at: at(&watched_memory)?,
            _watched_memory: watched_memory,
            watched,
            watched_len,
            berths_at: at(&berths)?,
            _berths: berths,
            free: (0..count as u32).rev().collect(),
        }))
    }

    /// A berth that nobody has.
    pub(super) fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Gives one back.
    pub(super) fn give(&mut self, berth: u32) {
        self.free.push(berth);
    }

    /// Makes a berth's queue pair.
    pub(super) fn queue_pair(
        &self,
        berth: u32,
        context: &Context,
        pd: &Pd,
        options: QpOptions,
    ) -> Result<LaidQp> {
        let (queues, watched) =
            (u64::from(berth) * self.queues_len, u64::from(berth) * self.watched_len);
        let completions = watched + wire::LEN;
        LaidQp::create(
            context,
            pd,
            (self.queues.part(queues, self.queues_len), self.queues_at + queues),
            (
                self.watched.part(completions, self.watched_len - wire::LEN),
                self.watched_at + completions,
            ),
            DEPTH,
            options,
        )
    }

    /// Where kernels find a berth's wire line.
    pub(super) fn wire_at(&self, berth: u32) -> u64 {
        self.watched_at + u64::from(berth) * self.watched_len
    }

    /// Where they find berths.
    pub(super) fn berths_at(&self) -> u64 {
        self.berths_at
    }

    /// Tells kernels how to post, and where the peer may be written to.
    pub(super) fn tell(
        &self,
        berth: u32,
        qp: &LaidQp,
        theirs: &Hello,
        send_key: u32,
    ) -> Result<()> {
        let mut line = [0; wire::LEN as usize];
        let constants = qp.constants().encode();
        let part = wire::PEER as usize;
        line[..part].copy_from_slice(&constants[..part]);
        let mut put = |at: u64, bytes: &[u8]| {
            let at = (wire::PEER + at) as usize;
            line[at..at + bytes.len()].copy_from_slice(bytes);
        };
        for (at, address) in [
            (peer::RING, theirs.ring.address),
            (peer::RECEIVED, theirs.received.address),
            (peer::TAKEN, theirs.taken.address),
        ] {
            put(at, &address.to_le_bytes());
        }
        for (at, word) in [
            (peer::RING_KEY, theirs.ring.rkey),
            (peer::RECEIVED_KEY, theirs.received.rkey),
            (peer::TAKEN_KEY, theirs.taken.rkey),
            (peer::RING_SIZE, theirs.ring_size as u32),
            (peer::SEND_KEY, send_key),
            (peer::BERTH, berth),
        ] {
            put(at, &word.to_le_bytes());
        }
        self.watched.bytes().write(u64::from(berth) * self.watched_len, &line)?;
        self.watched.send_off();
        Ok(())
    }
}
