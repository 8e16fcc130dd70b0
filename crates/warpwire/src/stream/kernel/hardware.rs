//! Kernel queue pairs on mlx5 NICs, with queues allocated by the provider.

use super::layout::{self, Constants};
use super::target::{KernelMemory, KernelTarget};
use super::{KernelQpParts, wrong};
use crate::error::{Error, Result};
use crate::hca::QueueMemory;
use crate::stream::hardware::map_pages;
use crate::verbs::{Context, CqOptions, Pd, QpOptions};

/// Creates a queue pair whose entries kernels index as `verbs.cuh` does: as many CQEs as WQEBBs in
/// the send queue, and as many as entries in the receive queue.
pub(super) fn create_hardware_qp(
    context: &Context,
    pd: &Pd,
    target: &KernelTarget,
    connection: QpOptions,
    depths: [u32; 2],
) -> Result<KernelQpParts> {
    let failed = |error: Error| error.during("create a kernel queue pair");
    let queue = |depth: u32| {
        // mlx5 allocates one entry more than requested and rounds up to a power of two.
        let entries = (depth - 1).max(1);
        let options = CqOptions { entries, ignore_overrun: true, ..CqOptions::default() };
        context.create_cq_with(options).map_err(failed)
    };
    let cqs = [queue(depths[0])?, queue(depths[1])?];
    let qp = context.create_qp(pd, &cqs[0], &cqs[1], connection).map_err(failed)?;
    let queues = qp.direct_queues()?;
    let made = [[queues.send_wqebbs, cqs[0].entries()], [queues.receive_entries, cqs[1].entries()]];
    for (name, asked, made) in
        [("send_depth", depths[0], made[0]), ("receive_depth", depths[1], made[1])]
    {
        if made != [asked; 2] {
            let [slots, completions] = made;
            let why = format!(
                "with {name} {asked} the device has {slots} entries and {completions} CQEs"
            );
            return Err(
                wrong(why).fix(format!("all three must be equal: try {}", slots.max(completions)))
            );
        }
    }
    let Some(receive) = &queues.receive else {
        return Err(wrong("the device created no receive queue".into()));
    };
    let mut mapped = Vec::new();
    let mut at = |memory: &QueueMemory, io: bool| -> Result<u64> {
        let KernelTarget::Device(device, _) = target else { return Ok(memory.bytes().address()) };
        let (pages, offset) = map_pages(device, memory, io)?;
        let address = pages.address().raw() + offset;
        mapped.push(KernelMemory::Pinned(pages));
        Ok(address)
    };
    let constants = Constants {
        send_queue: at(&queues.send, false)?,
        receive_queue: at(receive, false)?,
        dbrec: at(&queues.dbrec, false)?,
        doorbell: at(&queues.doorbell, true)?,
        send_cq: at(cqs[0].mapped_memory()?, false)?,
        receive_cq: at(cqs[1].mapped_memory()?, false)?,
        sink: 0,
        send_mask: depths[0] - 1,
        receive_mask: depths[1] - 1,
        number: qp.number(),
        receive_stride: queues.receive_stride,
        sink_lkey: 0,
        flags: layout::DBREC_FIRST,
        direct: 0,
    };
    Ok(KernelQpParts { qp, cqs, mapped, constants })
}
