//! Direct access to the memory of queues: for streams, kernels and programs that post without
//! verbs, on the software HCA and on mlx5 devices.
#![allow(unsafe_code)]

use super::post::{SendRequest, ring_doorbell, write_wqe};
use crate::error::Result;
use crate::hca::QueueMemory;
use crate::ibv::{DirectQp, MappedRange};
use crate::mem::SharedBytes;
use crate::mlx5::Scratch;
use crate::work::PostError;

/// Memory of a queue pair's queues, on any device.
pub(super) trait QueueAccess {
    /// Whether the doorbell is a device register (UAR page), so that stores to it need explicit
    /// barriers.
    const IS_MMIO: bool;
    fn number(&self) -> u32;
    /// Length of the send queue in WQEBBs.
    fn wqebbs(&self) -> u32;
    /// Memory that holds the send queue, and its offset there.
    fn send(&self) -> (SharedBytes<'_>, u64);
    /// The same for the doorbell record.
    fn dbrec(&self) -> (SharedBytes<'_>, u64);
    /// The same for the doorbell.
    fn doorbell(&self) -> (SharedBytes<'_>, u64);
    /// The same for the receive queue, and its stride in bytes.
    fn receive(&self) -> (SharedBytes<'_>, u64, u32);
}

/// Orders earlier stores before later ones as seen by a device, and flushes write-combining
/// buffers.
pub(super) fn mmio_flush_writes() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 processor has SSE.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a barrier, which changes no state.
    unsafe {
        std::arch::asm!("dsb st", options(nostack, preserves_flags));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
}

/// The mapped queues of a queue pair in ConnectX format: of the software HCA or an mlx5 device.
#[derive(Clone, Debug)]
pub struct DirectQueues {
    /// Queue pair number, 24 bits.
    pub number: u32,
    /// The send queue's memory.
    pub send: QueueMemory,
    /// Length of the send queue in WQEBBs of 64 bytes, a power of two.
    pub send_wqebbs: u32,
    /// The receive queue's memory; `None` if the queue pair uses a shared one.
    pub receive: Option<QueueMemory>,
    /// Length of the receive queue in entries, a power of two; 0 if there is none.
    pub receive_entries: u32,
    /// Size of a receive queue entry in bytes.
    pub receive_stride: u32,
    /// The doorbell record: two big-endian words, of the receive and of the send queue.
    pub dbrec: QueueMemory,
    /// The doorbell register, at offset 0; 8 bytes are written.
    pub doorbell: QueueMemory,
}

impl DirectQueues {
    /// Queues from a recorded `mlx5dv_qp`, for tests.
    #[doc(hidden)]
    pub fn recorded(mlx5dv: DirectQp) -> Self {
        Self::from_mlx5dv(mlx5dv)
    }

    pub(super) fn memory(mapped: MappedRange) -> QueueMemory {
        let (base, len) = (mapped.base(), mapped.len());
        // SAFETY: mapped for as long as its owner lives, which the result keeps; shared memory.
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

/// Writes WQEs directly to the queues of a queue pair, bypassing verbs. The caller must be the only
/// poster on that queue pair, and must read the completion queue itself.
pub struct Poster {
    queues: DirectQueues,
    scratch: Box<Scratch>,
    /// Index of the next free WQEBB; it does not wrap.
    next: u64,
    /// End of the WQEBBs that are free again.
    freed: u64,
}

impl std::fmt::Debug for Poster {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Poster(WQEBB {} of {:?})", self.next, self.queues)
    }
}

impl Poster {
    /// Starts at WQEBB `next`: 0 for a queue pair to which nothing was posted yet. The queue is
    /// taken to be empty.
    pub fn new(queues: DirectQueues, next: u64) -> Self {
        Self { queues, scratch: Box::default(), next, freed: next }
    }

    /// The queues that this poster writes to.
    pub fn queues(&self) -> &DirectQueues {
        &self.queues
    }

    /// Index of the next free WQEBB, counted from the first and not wrapped.
    pub fn next(&self) -> u64 {
        self.next
    }

    /// Writes a WQE; returns the index of its first WQEBB, whose low 16 bits its completion will
    /// carry. The device sees it after [`ring`](Self::ring).
    ///
    /// # Errors
    /// [`PostError::Full`] if the queue is full, [`PostError::TooManySge`] or
    /// [`PostError::InlineTooLong`] if the WQE would be too long, [`PostError::Unsupported`] if the
    /// request has a destination (UD).
    pub fn push(&mut self, request: &SendRequest<'_>) -> Result<u64, PostError> {
        if request.destination.is_some() {
            return Err(PostError::DIRECT_UD);
        }
        let used = self.next - self.freed;
        let wqe_index = self.next;
        self.next += write_wqe(&self.queues, &mut self.scratch, request, (wqe_index, used))?;
        Ok(wqe_index)
    }

    /// Rings the doorbell for all WQEs written so far. They become visible to the device first.
    pub fn ring(&self) {
        ring_doorbell(&self.queues, self.next);
    }

    /// Frees all WQEBBs before `wqe_index`; call it when a completion shows that the device has
    /// consumed them.
    pub fn free_up_to(&mut self, wqe_index: u64) {
        self.freed = self.freed.max(wqe_index.min(self.next));
    }
}
