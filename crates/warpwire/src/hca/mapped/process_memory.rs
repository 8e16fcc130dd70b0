//! Operations on a peer's host memory that is not in a file: the kernel copies between the two
//! processes (`process_vm_writev`), once and without the peer's help.

use warpwire_proto::qp::{SendOp, SendWr as WireWork};

use super::super::qpc::QpMemory;
use super::host_memory::LocalRange;
use crate::link::ShmPeer;
use crate::mem::SharedBytes;
use crate::mem::copy::CopyDirection;
use crate::mlx5::DataSegment;
use crate::mr::{Access, AccessDenied, Registry};

/// Shorter operations are faster as packets than by a system call.
pub(super) const MIN_COPY: u32 = 4 << 10;

/// The memory of a peer that an operation accesses.
pub(super) struct ProcessTarget<'a> {
    pub peer: &'a ShmPeer,
    /// In the peer's address space.
    pub address: u64,
}

impl ProcessTarget<'_> {
    /// Executes `len` bytes of a write or read, from byte `from` of its payload on.
    ///
    /// # Errors
    /// [`AccessDenied::NotResident`] if the kernel cannot access the peer's memory.
    pub(super) fn execute(
        &self,
        qp_memory: &QpMemory,
        registry: &Registry,
        work: &WireWork,
        from: u32,
        len: u32,
    ) -> Result<(), AccessDenied> {
        let (direction, need) = match work.op {
            SendOp::Write(_) => (CopyDirection::Write, Access::NONE),
            SendOp::Read(_) => (CopyDirection::Read, Access::LOCAL_WRITE),
            _ => return Err(AccessDenied::Range),
        };
        let mut at = self.address;
        let copy = |local: SharedBytes<'_>, at: u64| {
            let copied = self.peer.copy_process_memory(&local, at, direction);
            copied.map_err(|why| {
                tracing::debug!(%why, "cannot copy a peer's memory; packets are used");
                AccessDenied::NotResident
            })
        };
        qp_memory.data_segments(work.id, from, len, |segment, skip, len| {
            let remote = at;
            at = at.wrapping_add(len.into());
            // Inline payload is short.
            let DataSegment::Memory(data) = segment else { return Err(AccessDenied::Range) };
            let (key, address) = (data.lkey, data.address.wrapping_add(skip.into()));
            LocalRange { key, pd: qp_memory.pd, need, address, len }
                .with(registry, |local| copy(local, remote))
        })
    }
}
