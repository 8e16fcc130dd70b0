//! Operations on a peer's host memory that is mapped here: the CPU executes them.

use warpwire_proto::qp::{Atomic, SendOp, SendWr as WireWork};

use super::super::qpc::QpMemory;
use crate::mem::SharedBytes;
use crate::mlx5::DataSegment;
use crate::mr::{Access, AccessDenied, PdId, PeerMapping, Registry};

/// The memory of a peer that an operation accesses.
pub(super) struct RemoteTarget<'a> {
    pub memory: &'a PeerMapping,
    pub at: u64,
}

impl RemoteTarget<'_> {
    /// Executes `len` bytes of work, from byte `from` of its payload on.
    #[inline]
    pub(super) fn execute(
        &self,
        qp_memory: &mut QpMemory,
        registry: &Registry,
        work: &WireWork,
        from: u32,
        len: u32,
    ) -> Result<(), AccessDenied> {
        match work.op {
            SendOp::Write(_) => self.write(qp_memory, registry, work.id, from, len),
            SendOp::Read(_) => self.read(qp_memory, registry, work.id, from, len),
            SendOp::Atomic(_, atomic) => self.execute_atomic(qp_memory, registry, work.id, atomic),
            _ => Err(AccessDenied::Range),
        }
    }

    #[inline]
    fn write(
        &self,
        qp_memory: &QpMemory,
        registry: &Registry,
        wqe_index: u64,
        from: u32,
        len: u32,
    ) -> Result<(), AccessDenied> {
        let peer_bytes = self.memory.bytes(true).ok_or(AccessDenied::Rights)?;
        let mut at = self.at;
        qp_memory.data_segments(wqe_index, from, len, |segment, skip, len| {
            let to = at;
            at = at.saturating_add(len.into());
            self.put(&peer_bytes, to, segment, skip, len, qp_memory.pd, registry)
        })
    }

    /// Writes `len` bytes of a segment, from byte `skip` on, to the peer's memory.
    #[allow(clippy::too_many_arguments)] // source and destination
    #[inline]
    pub(super) fn put(
        &self,
        peer_bytes: &SharedBytes<'_>,
        to: u64,
        segment: DataSegment<'_>,
        skip: u32,
        len: u32,
        pd: PdId,
        registry: &Registry,
    ) -> Result<(), AccessDenied> {
        match segment {
            DataSegment::Inline(bytes) => {
                let part = bytes.get(skip as usize..(skip + len) as usize);
                peer_bytes
                    .write_cached(to, part.ok_or(AccessDenied::Range)?)
                    .map_err(|_| AccessDenied::Range)
            }
            DataSegment::Memory(data) => {
                let address = data.address.wrapping_add(u64::from(skip));
                let local = LocalRange { key: data.lkey, pd, need: Access::NONE, address, len };
                local.with(registry, |local| {
                    let copied = peer_bytes.copy_cached(to, &local, 0, len.into());
                    copied.map_err(|_| AccessDenied::Range)
                })
            }
        }
    }

    #[inline]
    fn read(
        &self,
        qp_memory: &QpMemory,
        registry: &Registry,
        wqe_index: u64,
        from: u32,
        len: u32,
    ) -> Result<(), AccessDenied> {
        let peer_bytes = self.memory.bytes(false).ok_or(AccessDenied::Rights)?;
        let mut at = self.at;
        qp_memory.data_segments(wqe_index, from, len, |segment, skip, len| {
            let DataSegment::Memory(data) = segment else { return Err(AccessDenied::Range) };
            let source = at;
            at = at.saturating_add(len.into());
            let address = data.address.wrapping_add(u64::from(skip));
            let need = Access::LOCAL_WRITE;
            let local = LocalRange { key: data.lkey, pd: qp_memory.pd, need, address, len };
            local.with(registry, |local| {
                let copied = local.copy_cached(0, &peer_bytes, source, len.into());
                copied.map_err(|_| AccessDenied::Range)
            })
        })
    }

    fn execute_atomic(
        &self,
        qp_memory: &QpMemory,
        registry: &Registry,
        wqe_index: u64,
        atomic: Atomic,
    ) -> Result<(), AccessDenied> {
        let width = atomic.width().bytes();
        // One writable range for the result, checked before: nothing may fail once the word has
        // changed.
        let data = qp_memory.wr_state(wqe_index).single_sge.ok_or(AccessDenied::Range)?;
        if data.len < width {
            return Err(AccessDenied::Range);
        }
        let (key, address) = (data.lkey, data.address);
        let local =
            LocalRange { key, pd: qp_memory.pd, need: Access::LOCAL_WRITE, address, len: width };
        let mut outcome = Ok(());
        local.with(registry, |local| {
            outcome = self.memory.atomic(self.at, &atomic).map(|old| {
                // As in the protocol, a four-byte result is big-endian.
                let placed = match width {
                    4 => local.write(0, &(old as u32).to_be_bytes()),
                    _ => local.write(0, &old.to_ne_bytes()),
                };
                debug_assert!(placed.is_ok());
            });
            Ok(())
        })?;
        outcome
    }
}

/// A range of local memory that a WQE names.
pub(super) struct LocalRange {
    pub key: u32,
    pub pd: PdId,
    pub need: Access,
    pub address: u64,
    pub len: u32,
}

impl LocalRange {
    /// Passes its bytes to `then`; fails unless it is host memory.
    #[inline]
    pub(super) fn with(
        &self,
        registry: &Registry,
        then: impl FnOnce(SharedBytes<'_>) -> Result<(), AccessDenied>,
    ) -> Result<(), AccessDenied> {
        let span = registry.resolve(self.key, self.pd, self.need, self.address, self.len.into())?;
        then(span.host_bytes().ok_or(AccessDenied::Failed)?)
    }
}
