//! Kernel queue pairs in caller-provided memory, for thousands of them: creating one allocates no
//! memory.

use crate::error::Result;
use crate::hca::{QpLayout, QueueMemory};
use crate::mem::Device;
use crate::mlx5::{self, CqeSyndrome, CqeTail, Status, WQEBB_LEN, owner_bit};
use crate::verbs::{Context, Cq, CqOptions, Pd, Qp, QpOptions};

use super::layout::{self, Constants};
use super::{KernelQpOptions, check, device, wrong};

/// Memory of a queue, and its address as kernels see it.
pub(crate) type MappedQueue = (QueueMemory, u64);

/// A queue pair that kernels post to. The kernels build its handle themselves, from
/// [`constants`](Self::constants): no receives are posted, and one thread posts at a time.
pub(crate) struct PreallocQp {
    // Field order: the queue pair is dropped before its completion queue.
    qp: Qp,
    _cq: Cq,
    constants: Constants,
    completions: QueueMemory,
    depth: u32,
}

/// The queue options of a connection, which [`Qp::required_memory`] uses.
pub(super) fn connection(send_depth: u32, receive_depth: u32, connection: QpOptions) -> QpOptions {
    // `send_depth` counts requests of two WQEBBs; each entry here takes one.
    QpOptions {
        send_depth: send_depth / 2,
        receive_depth,
        max_send_sge: 1,
        max_recv_sge: 1,
        max_inline_data: device::MAX_INLINE as u32,
        signal_all: true,
        poll_doorbell: true,
        ..connection
    }
}

/// The constants of a handle.
pub(super) fn constants(
    qp: &Qp,
    queues: u64,
    completions: [u64; 2],
    depths: [u32; 2],
) -> Result<Constants> {
    let QpLayout { receive, send, dbrec, doorbell } = qp.soft_layout()?;
    Ok(Constants {
        send_queue: queues + send,
        receive_queue: queues + receive,
        dbrec: queues + dbrec,
        doorbell: queues + doorbell,
        send_cq: completions[0],
        receive_cq: completions[1],
        sink: 0,
        send_mask: depths[0] - 1,
        receive_mask: depths[1] - 1,
        number: qp.number(),
        receive_stride: mlx5::SEGMENT_LEN as u32,
        sink_lkey: 0,
        flags: 0,
        direct: 0,
    })
}

impl PreallocQp {
    /// Bytes needed for the queues, which should be pinned, and for the CQEs, which kernels poll.
    pub(crate) fn required_memory(depth: u32) -> Result<(u64, u64)> {
        let queues = Qp::required_memory(&connection(depth, 1, QpOptions::default()))?;
        Ok((queues.next_multiple_of(128), Cq::required_memory(depth).next_multiple_of(128)))
    }

    /// Creates a queue pair, which keeps the memory alive. With a table, kernels of the device
    /// access the peer's memory by themselves where that is possible.
    pub(crate) fn create(
        context: &Context,
        pd: &Pd,
        (queues, completions): (MappedQueue, MappedQueue),
        table: Option<(&Device, MappedQueue)>,
        depth: u32,
        options: QpOptions,
    ) -> Result<Self> {
        let options = KernelQpOptions {
            send_depth: depth,
            receive_depth: 1,
            connection: options,
            ..KernelQpOptions::default()
        };
        check(context, &options)?;
        let Some(hca) = context.soft() else {
            let why = "an RDMA NIC allocates its own queues";
            return Err(wrong(why.into()).fix("open the software HCA"));
        };
        let cq = context.create_cq_with(CqOptions {
            entries: depth,
            memory: Some(completions.0.clone()),
            ignore_overrun: true,
            ..CqOptions::default()
        })?;
        let mut connection = connection(depth, 1, options.connection);
        connection.memory = Some(queues.0);
        // No messages are received, so one completion queue serves both directions.
        let qp = context.create_qp(pd, &cq, &cq, connection)?;
        let at = completions.1;
        let mut constants = constants(&qp, queues.1, [at, at], [depth, 1])?;
        constants.flags |= layout::SINGLE_POSTER;
        if let Some((device, (memory, address))) = table
            && hca.set_kernel_table(qp.number(), memory, device)?
        {
            constants.direct = address;
        }
        Ok(Self { qp, _cq: cq, constants, completions: completions.0, depth })
    }

    pub(crate) fn qp(&self) -> &Qp {
        &self.qp
    }

    pub(crate) fn constants(&self) -> &Constants {
        &self.constants
    }

    fn tail(&self, number: u64) -> Option<CqeTail> {
        let depth = u64::from(self.depth);
        let at = (number & (depth - 1)) * WQEBB_LEN as u64 + 60;
        let tail = CqeTail::parse(self.completions.bytes().load_u32(at).ok()?.to_ne_bytes());
        let is_there = tail.is_owned(owner_bit(number, depth)) && tail.counter == number as u16;
        is_there.then_some(tail)
    }

    /// Whether all of the `posted` operations have completed; a kernel reports that count.
    pub(crate) fn is_drained(&self, posted: u64) -> bool {
        posted.checked_sub(1).is_none_or(|last| self.tail(last).is_some())
    }

    /// The failure recorded in the CQEs; `None` if there is none.
    pub(crate) fn failure(&self) -> Option<Status> {
        let bytes = self.completions.bytes();
        let failures = (0..u64::from(self.depth)).filter_map(|slot| {
            let at = slot * WQEBB_LEN as u64;
            let tail = CqeTail::parse(bytes.load_u32(at + 60).ok()?.to_ne_bytes());
            let is_error = tail.code != 0xf && tail.is_error();
            let [.., syndrome] = bytes.load_u32(at + 52).ok()?.to_ne_bytes();
            is_error.then(|| CqeSyndrome(syndrome).into())
        });
        // Prefer the cause: flushed work follows the work that failed.
        failures.min_by_key(|status| *status == Status::Flushed)
    }
}
