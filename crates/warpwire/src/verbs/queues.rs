//! Queues where they lie: for streams, kernels and programs that post past the verbs, on either sort of device.
#![allow(unsafe_code)]

use super::post::{SendRequest, ring_doorbell, write_wqe};
use crate::error::{Error, Kind, Result};
use crate::hca::QueueMemory;
use crate::ibv::{DirectQp, MappedRange};
use crate::mem::SharedBytes;
use crate::mlx5::Scratch;

/// Where work is written and told of, whatever device takes it.
pub(super) trait QueueAccess {
    /// Whether the doorbell is a device's own page, to which stores go in an order of their own.
    const IS_MMIO: bool;
    /// The queue pair's number.
    fn number(&self) -> u32;
    /// How many blocks the send queue has.
    fn wqebbs(&self) -> u32;
    /// The memory of the send queue, and where it begins there.
    fn send(&self) -> (SharedBytes<'_>, u64);
    /// The same of the doorbell record.
    fn dbrec(&self) -> (SharedBytes<'_>, u64);
    /// The same of the doorbell.
    fn doorbell(&self) -> (SharedBytes<'_>, u64);
    /// The same of the receive queue, and how long its entries are.
    fn receive(&self) -> (SharedBytes<'_>, u64, u32);
}

/// Earlier stores are seen by a device before later ones, and go out now.
pub(super) fn mmio_flush_writes() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every such processor has it.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier, which changes nothing.
    unsafe {
        std::arch::asm!("dsb st", options(nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

/// The queues of a queue pair, in ConnectX's format: of the software HCA, or of an mlx5 device.
#[derive(Clone, Debug)]
pub struct DirectQueues {
    /// The queue pair's number.
    pub number: u32,
    /// The send queue.
    pub send: QueueMemory,
    /// How many blocks of 64 bytes it has: a power of two.
    pub send_wqebbs: u32,
    /// The receive queue; `None` if it shares one.
    pub receive: Option<QueueMemory>,
    /// How many entries that has: a power of two.
    pub receive_entries: u32,
    /// How long each of them is.
    pub receive_stride: u32,
    /// The doorbell record: two words, of receives and of blocks.
    pub dbrec: QueueMemory,
    /// The doorbell: eight bytes.
    pub doorbell: QueueMemory,
}

impl DirectQueues {
    /// Queues as libmlx5 told of them.
    #[doc(hidden)]
    pub fn recorded(mlx5dv: DirectQp) -> Self {
        Self::from_mlx5dv(mlx5dv)
    }

    pub(super) fn memory(mapped: MappedRange) -> QueueMemory {
        let (base, len) = (mapped.base(), mapped.len());
        // SAFETY: it is mapped as long as its owner lives, which goes along, and is shared memory.
        unsafe { QueueMemory::mapped(base, len, std::sync::Arc::new(mapped)) }
    }

    pub(super) fn from_mlx5dv(mlx5dv: DirectQp) -> Self {
        let memory = Self::memory;
        let DirectQp { number, send_wqebbs, receive_entries, receive_stride, .. } = mlx5dv;
        Self {
            number,
            send: memory(mlx5dv.send),
            send_wqebbs,
            receive: mlx5dv.receive.map(memory),
            receive_entries,
            receive_stride,
            dbrec: memory(mlx5dv.dbrec),
            doorbell: memory(mlx5dv.doorbell),
        }
    }
}

impl QueueAccess for DirectQueues {
    const IS_MMIO: bool = true;

    fn number(&self) -> u32 {
        self.number
    }

    fn wqebbs(&self) -> u32 {
        self.send_wqebbs
    }

    fn send(&self) -> (SharedBytes<'_>, u64) {
        (self.send.bytes(), 0)
    }

    fn dbrec(&self) -> (SharedBytes<'_>, u64) {
        (self.dbrec.bytes(), 0)
    }

    fn doorbell(&self) -> (SharedBytes<'_>, u64) {
        (self.doorbell.bytes(), 0)
    }

    fn receive(&self) -> (SharedBytes<'_>, u64, u32) {
        let bytes = self.receive.as_ref().map_or_else(SharedBytes::empty, QueueMemory::bytes);
        (bytes, 0, self.receive_stride)
    }
}

/// Writes work into the queues of a queue pair, as [`Batch`](super::Batch) does, past everything else: who uses it is the
/// only one who posts there, and reads the completion queue himself.
pub struct Poster {
    queues: DirectQueues,
    scratch: Box<Scratch>,
    /// The next free block, counted without end.
    next: u64,
    /// The block up to which the queue is free again.
    freed: u64,
}

impl std::fmt::Debug for Poster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Poster(block {} of {:?})", self.next, self.queues)
    }
}

impl Poster {
    /// Begins at that block: 0 for a queue pair to which nothing was posted yet.
    pub fn new(queues: DirectQueues, next: u64) -> Self {
        Self { queues, scratch: Box::default(), next, freed: next }
    }

    /// The queues that it writes to.
    pub fn queues(&self) -> &DirectQueues {
        &self.queues
    }

    /// The next free block.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Writes an entry; returns the block at which it begins, which its completion will name. The device sees it after
    /// [`ring`](Self::ring).
    ///
    /// # Errors
    /// [`Kind::Busy`] if there is no room, and [`Kind::InvalidArgument`] if it is longer than an entry may be.
    pub fn push(&mut self, request: &SendRequest<'_>) -> Result<u64> {
        if request.destination.is_some() {
            return Err(Error::new(Kind::Unsupported, "write an entry")
                .why("hardware knows the peers of datagrams by more than their addresses")
                .fix("post datagrams by Qp::post_send"));
        }
        let used = self.next - self.freed;
        let wqe_index = self.next;
        self.next += write_wqe(&self.queues, &mut self.scratch, request, (wqe_index, used))?;
        Ok(wqe_index)
    }

    /// Tells the device of all entries so far.
    pub fn ring(&self) {
        ring_doorbell(&self.queues, self.next);
    }

    /// All blocks before that one are free again: a completion named one that began there, or later.
    pub fn free_up_to(&mut self, wqe_index: u64) {
        self.freed = self.freed.max(wqe_index.min(self.next));
    }
}
