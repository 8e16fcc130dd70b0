//! Shared receive queues: receives that any attached queue pair may consume.

use std::collections::VecDeque;
use std::sync::Arc;

use parking_lot::Mutex;

use super::receive::{MAX_RECV_SGE, too_many};
use super::{Context, Device, Pd, SoftDevice};
use crate::error::{Error, Kind, Result};
use crate::hca::{QueueMemory, SrqSpec};
use crate::ibv;
use crate::mlx5::{DoorbellRecord, SEGMENT_LEN, SrqEntry};
use crate::work::{PostError, ReceiveRequest};

/// Attributes of a new shared receive queue.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct SrqOptions {
    /// Minimum number of outstanding receives (`max_wr`), 1 to 32767. Default: 256.
    pub depth: u32,
    /// Maximum number of scatter-gather entries of a receive, 1 to 15. Default: 1.
    pub max_sge: u32,
}

setters! {
    SrqOptions {
        with_depth => depth: u32,
        with_max_sge => max_sge: u32,
    }
}

impl Default for SrqOptions {
    fn default() -> Self {
        Self { depth: 256, max_sge: 1 }
    }
}

/// A shared receive queue (`ibv_srq`). Clones refer to the same queue; it is destroyed when the
/// last clone and the last queue pair that uses it are dropped.
///
/// Queue pairs consume its receives in the order in which they were posted; their completions may
/// come in any order.
#[derive(Clone, Debug)]
pub struct Srq(Backend);

#[derive(Clone, Debug)]
enum Backend {
    Soft(Arc<SrqInner>),
    Hard(ibv::Srq),
}

#[derive(Debug)]
struct SrqInner {
    device: Arc<SoftDevice>,
    number: u32,
    memory: QueueMemory,
    dbrec: u64,
    stride: u32,
    state: Mutex<Slots>,
    _pd: Pd,
}

/// The slots: the free ones are linked in the order in which the device will consume them.
#[derive(Debug)]
struct Slots {
    wr_ids: Box<[u64]>,
    free: VecDeque<u16>,
    /// Slot of the next receive: the one that the last entry already links to.
    next: u16,
    posted: u32,
}

impl Drop for SrqInner {
    fn drop(&mut self) {
        self.device.hca.destroy_srq(self.number);
    }
}

impl Srq {
    pub(super) fn create(context: &Context, pd: &Pd, options: SrqOptions) -> Result<Self> {
        let wrong = |why: &str| {
            Error::new(Kind::InvalidArgument, "create a shared receive queue").why(why.to_owned())
        };
        if options.depth == 0 || options.depth >= 1 << 15 {
            return Err(wrong("the depth must be 1 to 32767"));
        }
        if options.max_sge == 0 || options.max_sge as usize >= MAX_RECV_SGE {
            return Err(wrong("max_sge must be 1 to 15"));
        }
        let Device::Soft(device) = &context.0 else {
            let made = pd.hardware()?.create_srq(options.depth, options.max_sge)?;
            return Ok(Self(Backend::Hard(made)));
        };
        // One slot more than receives: the last entry always links to a free slot.
        let entries = (options.depth + 1).next_power_of_two();
        let stride = ((options.max_sge + 1) * SEGMENT_LEN as u32).next_power_of_two();
        let dbrec = u64::from(entries) * u64::from(stride);
        let memory = QueueMemory::host(dbrec + 64)?;
        let spec = SrqSpec { memory: memory.clone(), entries, stride, dbrec };
        let number = device.hca.create_srq(spec)?;
        let state = Mutex::new(Slots {
            wr_ids: vec![0; entries as usize].into(),
            free: (1..entries as u16).collect(),
            next: 0,
            posted: 0,
        });
        let device = device.clone();
        let shared = SrqInner { device, number, memory, dbrec, stride, state, _pd: pd.clone() };
        Ok(Self(Backend::Soft(Arc::new(shared))))
    }

    /// The queue's number, which asynchronous events name.
    pub fn number(&self) -> u32 {
        match &self.0 {
            Backend::Soft(shared) => shared.number,
            Backend::Hard(srq) => srq.number(),
        }
    }

    /// Sets the limit (`IBV_SRQ_LIMIT`): when fewer than `limit` receives are outstanding,
    /// [`AsyncEvent::LimitReached`](super::AsyncEvent::LimitReached) is generated, once. 0 disarms.
    /// A failure of hardware is logged.
    pub fn arm(&self, limit: u32) {
        match &self.0 {
            Backend::Soft(shared) => shared.device.hca.arm_srq(shared.number, limit),
            Backend::Hard(srq) => {
                if let Err(error) = srq.arm(limit) {
                    tracing::warn!(%error, "cannot arm a shared receive queue");
                }
            }
        }
    }

    /// The limit that is armed: 0 if none is, or the event has been generated since. On hardware
    /// always 0.
    pub fn limit(&self) -> u32 {
        match &self.0 {
            Backend::Soft(shared) => shared.device.hca.srq_limit(shared.number),
            Backend::Hard(_) => 0,
        }
    }

    /// Posts all receives, or none (`ibv_post_srq_recv`). Buffers must stay valid until the
    /// completion.
    ///
    /// # Errors
    /// [`PostError::Full`] if the queue is full; [`PostError::TooManySge`] if a receive has too
    /// many scatter-gather entries.
    pub fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        let shared = match &self.0 {
            Backend::Soft(shared) => &**shared,
            Backend::Hard(srq) => return srq.post_all_receives(requests),
        };
        let mut slots = shared.state.lock();
        if slots.free.len() < requests.len() {
            return Err(PostError::Full);
        }
        let stride = shared.stride as usize;
        let bytes = shared.memory.bytes();
        let (mut slot, mut used) = (slots.next, 0);
        for request in requests {
            let next = slots.free[used];
            let mut entry = [0; (MAX_RECV_SGE + 1) * SEGMENT_LEN];
            let entry = &mut entry[..stride];
            let (sges, count) = request.sges();
            let fits = sges.get(..count).and_then(|r| SrqEntry::write(entry, next, r));
            fits.ok_or_else(|| too_many(request, stride / SEGMENT_LEN - 1))?;
            let written = bytes.write(u64::from(slot) * stride as u64, entry);
            written.map_err(|error| PostError::device(&error))?;
            slots.wr_ids[usize::from(slot)] = request.id;
            (slot, used) = (next, used + 1);
        }
        slots.free.drain(..used);
        slots.next = slot;
        slots.posted = slots.posted.wrapping_add(used as u32);
        let word = u32::from_ne_bytes(DoorbellRecord::word(slots.posted as u16));
        bytes.store_u32(shared.dbrec, word).map_err(|error| PostError::device(&error))
    }

    /// The libibverbs queue; `None` for the software HCA.
    pub(super) fn hardware(&self) -> Option<&ibv::Srq> {
        match &self.0 {
            Backend::Soft(_) => None,
            Backend::Hard(srq) => Some(srq),
        }
    }

    /// Frees the slot of a completed receive; returns its work request id.
    pub(super) fn complete_receive(&self, slot: u16) -> u64 {
        let Backend::Soft(shared) = &self.0 else { return 0 };
        let mut slots = shared.state.lock();
        let index = usize::from(slot) & (slots.wr_ids.len() - 1);
        // The device completes each receive once; surplus completions are forged, and ignored.
        if slots.free.len() + 1 < slots.wr_ids.len() {
            slots.free.push_back(index as u16);
        }
        slots.wr_ids[index]
    }
}
