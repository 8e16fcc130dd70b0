//! Memory of `warp` connections: send queues that kernels fill, completions and descriptors that
//! they poll, and QP slots that only they use. All of it is allocated at start, because CUDA may
//! block an allocation while kernels run.

use super::layout::{PeerMemory, QpDescriptor, qp_descriptor, qp_slot};
use super::warp::Hello;
use super::{SockMemory, SockOptions};
use crate::error::Result;
use crate::hca::QueueMemory;
use crate::mem::copy::CopyPlan;
use crate::mem::{Allocation, Device, MemoryKind};
use crate::stream::kernel::PreallocQp;
use crate::verbs::{Context, Pd, QpOptions};

/// Work requests in flight per connection. A send takes two or three.
const DEPTH: u32 = 64;

/// Memory for all `warp` connections.
pub(super) struct QpSlots {
    queues: QueueMemory,
    queues_addr: u64,
    queues_len: u64,
    polled: QueueMemory,
    /// A window does not keep its memory alive.
    _polled_memory: Allocation,
    polled_addr: u64,
    polled_len: u64,
    _qp_slots: Allocation,
    qp_slots_addr: u64,
    free: Vec<u32>,
}

impl QpSlots {
    /// Allocates the memory; `None` if the `warp` family is disabled.
    pub(super) fn allocate(device: &Device, options: &SockOptions) -> Result<Option<Self>> {
        let count = u64::from(options.warp_sockets.min(options.sockets));
        if count == 0 {
            return Ok(None);
        }
        let (queues_len, completions_len) = PreallocQp::required_memory(DEPTH)?;
        let polled_len = (qp_descriptor::LEN + completions_len).next_multiple_of(128);
        let use_window = options.memory == SockMemory::Auto;
        let at = |memory: &Allocation| match options.memory {
            // Threads of this process use host addresses.
            SockMemory::Threads => memory.host_bytes().map(|bytes| bytes.address()),
            SockMemory::Auto | SockMemory::Pinned => Ok(memory.address().raw()),
        };
        let queues = device.alloc_pinned(count * queues_len)?;
        let windowed = match use_window {
            true => {
                // Measure how to copy to and from this device now, if it is unknown: a running
                // kernel could block the measurement later.
                CopyPlan::for_device(device)?;
                let memory = device.alloc_kind(count * polled_len, MemoryKind::Vmm)?;
                memory.window().ok().map(|window| (memory, QueueMemory::window(window)))
            }
            false => None,
        };
        let (polled_memory, polled) = match windowed {
            Some(windowed) => windowed,
            None => {
                let memory = device.alloc_pinned(count * polled_len)?;
                (memory.clone(), QueueMemory::pinned(memory)?)
            }
        };
        let qp_slots = match options.memory {
            SockMemory::Threads => device.alloc_pinned(count * qp_slot::LEN)?,
            SockMemory::Auto | SockMemory::Pinned => {
                device.alloc_kind(count * qp_slot::LEN, MemoryKind::Vmm)?
            }
        };
        Ok(Some(Self {
            queues_addr: at(&queues)?,
            queues: QueueMemory::pinned(queues)?,
            queues_len,
            polled_addr: at(&polled_memory)?,
            _polled_memory: polled_memory,
            polled,
            polled_len,
            qp_slots_addr: at(&qp_slots)?,
            _qp_slots: qp_slots,
            free: (0..count as u32).rev().collect(),
        }))
    }

    /// Takes a free slot.
    pub(super) fn take(&mut self) -> Option<u32> {
        self.free.pop()
    }

    /// Frees a slot.
    pub(super) fn release(&mut self, qp_slot: u32) {
        self.free.push(qp_slot);
    }

    /// Creates the queue pair of a slot.
    pub(super) fn queue_pair(
        &self,
        qp_slot: u32,
        context: &Context,
        pd: &Pd,
        options: QpOptions,
    ) -> Result<PreallocQp> {
        let (queues, polled) =
            (u64::from(qp_slot) * self.queues_len, u64::from(qp_slot) * self.polled_len);
        let completions = polled + qp_descriptor::LEN;
        PreallocQp::create(
            context,
            pd,
            (self.queues.slice(queues, self.queues_len), self.queues_addr + queues),
            (
                self.polled.slice(completions, self.polled_len - qp_descriptor::LEN),
                self.polled_addr + completions,
            ),
            DEPTH,
            options,
        )
    }

    /// Device address of a slot's [`qp_descriptor`].
    pub(super) fn qp_descriptor_addr(&self, qp_slot: u32) -> u64 {
        self.polled_addr + u64::from(qp_slot) * self.polled_len
    }

    /// Device address of the [`qp_slot`] array.
    pub(super) fn qp_slots_addr(&self) -> u64 {
        self.qp_slots_addr
    }

    /// Publishes to kernels how to post, and the peer's addresses and keys.
    pub(super) fn write_descriptor(
        &self,
        qp_slot: u32,
        qp: &PreallocQp,
        peer_hello: &Hello,
        send_key: u32,
    ) -> Result<()> {
        let mut descriptor = QpDescriptor {
            peer: PeerMemory {
                ring: peer_hello.ring.address,
                received: peer_hello.received.address,
                taken: peer_hello.taken.address,
                ring_key: peer_hello.ring.rkey,
                received_key: peer_hello.received.rkey,
                taken_key: peer_hello.taken.rkey,
                ring_size: peer_hello.ring_size as u32,
                send_key,
                qp_slot,
                ..PeerMemory::default()
            },
            ..QpDescriptor::default()
        };
        let constants = qp.constants().encode();
        for (word, bytes) in descriptor.constants.iter_mut().zip(constants.as_chunks().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        let line = descriptor.encode();
        self.polled.bytes().write(u64::from(qp_slot) * self.polled_len, &line)?;
        self.polled.flush_stores();
        Ok(())
    }
}
