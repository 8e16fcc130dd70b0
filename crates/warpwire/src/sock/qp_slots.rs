//! Memory of `warp` connections: send queues that kernels fill, completions and descriptors that
//! they poll, tables of the peer's memory, and QP slots that only they use. All of it is allocated
//! at start, because CUDA may block an allocation while kernels run.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::layout::{PeerMemory, QpDescriptor, qp_descriptor, qp_slot};
use super::warp::Hello;
use super::{SockMemory, SockOptions};
use crate::error::Result;
use crate::hca::{QueueMemory, kernel_table_layout};
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
    polled_memory: Allocation,
    polled_addr: u64,
    polled_len: u64,
    /// Where the table of a slot begins in its part of `polled`, and the device whose kernels use
    /// it; `None` without [`SockOptions::direct`], and where the CPU cannot access device memory
    /// while kernels run.
    tables: Option<(u64, Device)>,
    _qp_slots: Allocation,
    qp_slots_addr: u64,
    free: Vec<u32>,
    /// All slots that were ever used are below this one.
    used: Arc<AtomicU32>,
}

/// Counters of what kernels executed by themselves, of all slots since the start.
pub(super) struct DirectCounts {
    polled: QueueMemory,
    _polled_memory: Allocation,
    first: u64,
    stride: u64,
    used: Arc<AtomicU32>,
}

impl DirectCounts {
    /// Work requests that kernels did not need to post.
    pub(super) fn sum(&self) -> u64 {
        let used = u64::from(self.used.load(Ordering::Relaxed));
        let counts = (0..used).map(|slot| self.first + slot * self.stride);
        counts.map(|at| self.polled.bytes().load_u64(at).unwrap_or(0)).sum()
    }
}

impl QpSlots {
    /// Allocates the memory; `None` if the `warp` family is disabled.
    pub(super) fn allocate(device: &Device, options: &SockOptions) -> Result<Option<Self>> {
        let count = u64::from(options.warp_sockets.min(options.sockets));
        if count == 0 {
            return Ok(None);
        }
        let (queues_len, completions_len) = PreallocQp::required_memory(DEPTH)?;
        let table = qp_descriptor::LEN + completions_len;
        let table_len = if options.direct { kernel_table_layout::LEN } else { 0 };
        let polled_len = (table + table_len).next_multiple_of(128);
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
                if options.direct {
                    memory.write(0, &vec![0; (count * polled_len) as usize])?;
                }
                memory.window().ok().map(|window| (memory, QueueMemory::window(window)))
            }
            false => None,
        };
        let tables = windowed.as_ref().filter(|_| options.direct);
        let tables = tables.map(|_| (table, device.clone()));
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
            polled_memory,
            polled,
            polled_len,
            tables,
            qp_slots_addr: at(&qp_slots)?,
            _qp_slots: qp_slots,
            free: (0..count as u32).rev().collect(),
            used: Arc::default(),
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
        let (queues, begin) =
            (u64::from(qp_slot) * self.queues_len, u64::from(qp_slot) * self.polled_len);
        self.used.fetch_max(qp_slot + 1, Ordering::Relaxed);
        let (_, completions_len) = PreallocQp::required_memory(DEPTH)?;
        let queues = (self.queues.slice(queues, self.queues_len), self.queues_addr + queues);
        let polled = |at: u64, len| (self.polled.slice(at, len), self.polled_addr + at);
        let completions = polled(begin + qp_descriptor::LEN, completions_len);
        let table = self
            .tables
            .as_ref()
            .map(|(at, device)| (device, polled(begin + at, kernel_table_layout::LEN)));
        PreallocQp::create(context, pd, (queues, completions), table, DEPTH, options)
    }

    /// Counts what kernels have executed by themselves, for [`DirectCounts::sum`].
    pub(super) fn direct_counts(&self) -> Option<DirectCounts> {
        let (table, _) = self.tables.as_ref()?;
        let first = table + kernel_table_layout::OPERATIONS;
        Some(DirectCounts {
            polled: self.polled.clone(),
            _polled_memory: self.polled_memory.clone(),
            first,
            stride: self.polled_len,
            used: self.used.clone(),
        })
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
