//! Queue pairs for kernels in memory that somebody else has laid out, by the thousand: nothing is allocated for one.

use crate::error::Result;
use crate::hca::{QpLayout, QueueMemory};
use crate::mlx5::{self, CqeTail, Status, WQEBB_LEN, owner_bit};
use crate::verbs::{Context, Cq, CqOptions, Pd, Qp, QpOptions};

use super::layout::{self, Constants};
use super::{KernelQpOptions, check, device, wrong};

/// Memory of queues, and where kernels find it.
pub(crate) type MappedQueue = (QueueMemory, u64);

/// A queue pair that kernels post to. Its handle is made by the kernels themselves, from [`constants`](Self::constants):
/// no receive is ever posted, and one thread posts at a time.
pub(crate) struct PreallocQp {
    // The queue pair ends before its completion queue.
    qp: Qp,
    _cq: Cq,
    constants: Constants,
    completions: QueueMemory,
    depth: u32,
}

/// What a connection's queues need: the options that [`Qp::required_memory`] counts by.
pub(super) fn connection(send_depth: u32, receive_depth: u32, connection: QpOptions) -> QpOptions {
    // Two blocks for each request, of which every entry here takes one.
    QpOptions {
        send_depth: send_depth / 2,
        receive_depth,
        max_send_sge: 1,
        max_recv_sge: 1,
        inline: device::MAX_INLINE as u32,
        signal_all: true,
        poll_doorbell: true,
        ..connection
    }
}

/// Where everything is, as a handle has it.
pub(super) fn constants(
    qp: &Qp,
    queues: u64,
    completions: [u64; 2],
    depths: [u32; 2],
) -> Constants {
    let (_, QpLayout { receive, send, dbrec, doorbell }) = qp.queues();
    Constants {
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
        receive_stride: mlx5::SEGMENT as u32,
        sink_lkey: 0,
        flags: 0,
    }
}

impl PreallocQp {
    /// How much memory one needs: for its queues, which should be pinned, and for its completions, which kernels watch.
    pub(crate) fn required_memory(depth: u32) -> Result<(u64, u64)> {
        let queues = Qp::required_memory(&connection(depth, 1, QpOptions::default()))?;
        Ok((queues.next_multiple_of(128), Cq::required_memory(depth).next_multiple_of(128)))
    }

    /// Makes one. It keeps the memory.
    pub(crate) fn create(
        context: &Context,
        pd: &Pd,
        queues: MappedQueue,
        completions: MappedQueue,
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
        if context.soft().is_none() {
            let why = "an RDMA device lays out its queues by itself";
            return Err(wrong(why.into()).fix("open the software HCA for it"));
        }
        let cq = context.create_cq_with(CqOptions {
            entries: depth,
            memory: Some(completions.0.clone()),
            ignore_overrun: true,
            ..CqOptions::default()
        })?;
        let mut connection = connection(depth, 1, options.connection);
        connection.memory = Some(queues.0);
        // Nothing is ever received by a message, so that one queue does for both.
        let qp = context.create_qp(pd, &cq, &cq, connection)?;
        let at = completions.1;
        let mut constants = constants(&qp, queues.1, [at, at], [depth, 1]);
        constants.flags |= layout::SINGLE_POSTER;
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

    /// Whether everything has ended, of so many that a kernel says it has posted.
    pub(crate) fn is_drained(&self, posted: u64) -> bool {
        posted.checked_sub(1).is_none_or(|last| self.tail(last).is_some())
    }

    /// Why it failed, as the completions that are there tell; `None` if they know of no failure.
    pub(crate) fn failure(&self) -> Option<Status> {
        let bytes = self.completions.bytes();
        let failures = (0..u64::from(self.depth)).filter_map(|slot| {
            let at = slot * WQEBB_LEN as u64;
            let tail = CqeTail::parse(bytes.load_u32(at + 60).ok()?.to_ne_bytes());
            let is_error = tail.code != 0xf && tail.is_error();
            let [.., syndrome] = bytes.load_u32(at + 52).ok()?.to_ne_bytes();
            is_error.then(|| Status::from_syndrome(syndrome))
        });
        // What was flushed only follows.
        failures.min_by_key(|status| *status == Status::Flushed)
    }
}
