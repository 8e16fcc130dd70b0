//! Short operations on a peer's device memory: the CPU executes them through a window onto it.

use std::sync::Arc;

use warpwire_proto::qp::{SendOp, SendWr as WireWork};

use super::super::qpc::QpMemory;
use super::device_copies::{self, LocalSpans};
use super::imported::ImportedMemory;
use crate::error::Result;
use crate::mem::copy::{CopyDirection, CopyPlan};
use crate::mem::{Allocation, Window, last_word_len};
use crate::mlx5::{Data, DataSegment};
use crate::mr::{Access, AccessDenied, PdId, Registry, Span};

/// No window onto longer memory: some GPUs have little address space for windows.
const MAX_WINDOW: u64 = 1 << 30;
/// The longest operation.
const MAX_LEN: usize = device_copies::MIN_COPY as usize - 1;
/// Most are not longer than this.
pub(super) const SHORT_LEN: usize = 256;

/// A window onto a peer's device memory, and the lengths for which it is the fastest way.
pub(super) struct PeerWindow {
    window: Window,
    max_write: u64,
    max_read: u64,
}

impl PeerWindow {
    /// `None` if the memory is too long.
    pub(super) fn open(memory: &Allocation) -> Result<Option<Self>> {
        if memory.len() > MAX_WINDOW {
            return Ok(None);
        }
        let plan = CopyPlan::for_device(memory.device())?;
        let max = |direction| plan.max_window_copy(direction).min(MAX_LEN as u64);
        let (max_write, max_read) = (max(CopyDirection::Write), max(CopyDirection::Read));
        Ok(Some(Self { window: memory.window()?, max_write, max_read }))
    }

    /// Whether it is the way for an operation that needs this right.
    #[inline]
    pub(super) fn is_for(&self, need: Access, len: u32) -> bool {
        match need {
            Access::REMOTE_WRITE => u64::from(len) <= self.max_write,
            Access::REMOTE_READ => u64::from(len) <= self.max_read,
            // Not atomic with respect to those that the owner executes.
            _ => false,
        }
    }

    /// Executes a write or read at this offset of the memory.
    #[inline]
    pub(super) fn execute(
        &self,
        at: u64,
        qp_memory: &mut QpMemory,
        registry: &Registry,
        work: &WireWork,
    ) -> std::result::Result<(), AccessDenied> {
        let (mut short, mut long);
        let bytes = match work.len as usize {
            len @ 0..=SHORT_LEN => {
                short = [0; SHORT_LEN];
                &mut short[..len]
            }
            len @ ..=MAX_LEN => {
                long = [0; MAX_LEN];
                &mut long[..len]
            }
            _ => return Err(AccessDenied::Range),
        };
        match work.op {
            SendOp::Write(_) => {
                qp_memory.gather(registry, work.id, 0, bytes).map_err(local)?;
                self.write(at, bytes)
            }
            SendOp::Read(_) => {
                check_target(qp_memory, registry, work).map_err(local)?;
                self.window.read(at, bytes).map_err(|_| AccessDenied::Range)?;
                qp_memory.scatter(registry, work.id, 0, bytes).map_err(local)
            }
            _ => Err(AccessDenied::Range),
        }
    }

    /// Executes a write of one range, or of inline bytes, of which there are at most
    /// [`SHORT_LEN`].
    #[inline]
    pub(super) fn put(
        &self,
        at: u64,
        payload: DataSegment<'_>,
        pd: PdId,
        registry: &Registry,
    ) -> std::result::Result<(), AccessDenied> {
        match payload {
            DataSegment::Inline(bytes) => self.write(at, bytes),
            DataSegment::Memory(Data { len, lkey, address }) => {
                let mut buffer = [0; SHORT_LEN];
                let bytes = buffer.get_mut(..len as usize).ok_or(AccessDenied::Range)?;
                let span = registry.resolve(lkey, pd, Access::NONE, address, len.into())?;
                span.gather(0, bytes)?;
                self.write(at, bytes)
            }
        }
    }

    /// Writes the last word after everything before it: a program may be waiting for it.
    #[inline]
    fn write(&self, at: u64, bytes: &[u8]) -> std::result::Result<(), AccessDenied> {
        let start = self.window.address().raw().wrapping_add(at);
        let tail = last_word_len(start, bytes.len() as u64) as usize;
        let (body, tail) = bytes.split_at(bytes.len() - tail);
        if !body.is_empty() {
            self.window.write(at, body).map_err(|_| AccessDenied::Range)?;
        }
        self.window.write(at + body.len() as u64, tail).map_err(|_| AccessDenied::Range)
    }
}

/// Whatever it is about local memory, packets report it.
fn local(_: AccessDenied) -> AccessDenied {
    AccessDenied::Failed
}

/// Opens a peer's memory for short operations on the GPU that this one's local memory is on.
#[cold]
pub(super) fn request(
    memory: &Arc<ImportedMemory>,
    qp_memory: &QpMemory,
    work: &WireWork,
    registry: &Registry,
) {
    let writes = matches!(work.op, SendOp::Write(_));
    if let Ok(local) = LocalSpans::resolve(qp_memory, registry, work, writes)
        && let Some(device) = local.iter().next().and_then(Span::device)
    {
        memory.open_on(device, false);
    }
}

/// Data for staged memory would arrive after the completion.
fn check_target(
    qp_memory: &QpMemory,
    registry: &Registry,
    work: &WireWork,
) -> std::result::Result<(), AccessDenied> {
    qp_memory.data_segments(work.id, 0, work.len, |segment, skip, len| {
        let DataSegment::Memory(data) = segment else { return Err(AccessDenied::Range) };
        let address = data.address.wrapping_add(skip.into());
        let need = Access::LOCAL_WRITE;
        let span = registry.resolve(data.lkey, qp_memory.pd, need, address, len.into())?;
        if span.is_staged() { Err(AccessDenied::Failed) } else { Ok(()) }
    })
}
