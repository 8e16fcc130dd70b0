//! Control path: slow calls, under the engine's lock.

use warpwire_proto::Instant;
use warpwire_proto::qp::{QpAttributes, State};

use super::{Engine, MAX_PACKET_OVERHEAD};
use crate::error::{Error, Kind, Result};
use crate::hca::QpSpec;
use crate::hca::cq::CqSlot;
use crate::hca::mapped::KernelTable;
use crate::hca::numbers::Generation;
use crate::hca::qpc::QpContext;
use crate::hca::ring::SharedReceiveQueue;
use crate::link::MAX_ROCE_PACKET;

impl Engine {
    pub(in crate::hca) fn add_qp(&mut self, spec: QpSpec) -> Result<u32> {
        let core = &mut self.core;
        let index = core.alloc_slot();
        let max = core.numbering.max_qps();
        let full = || {
            Error::new(Kind::OutOfMemory, "create a queue pair")
                .why(format!("the device has its maximum of {max}"))
                .fix("destroy those that are no longer needed, or open another context")
        };
        let index = index.ok_or_else(full)?;
        core.generations.resize_with(core.qpcs.len(), Generation::random);
        core.generations[index as usize].advance();
        let number = core.qpn_of(index);
        let poll_doorbell = spec.poll_doorbell;
        core.qpcs[index as usize] = Some(Box::new(QpContext::new(index, number, spec)));
        core.active.reserve(core.qpcs.len());
        core.timers.reserve(2 * core.qpcs.len());
        core.rung_scratch.reserve(core.qpcs.len());
        core.doorbell_bitmap.grow_to(core.qpcs.len());
        if poll_doorbell {
            core.poll_doorbell.push(index);
        }
        Ok(number)
    }

    /// Removes a queue pair; returns whether it existed.
    pub(in crate::hca) fn remove_qp(&mut self, number: u32, now: Instant) -> bool {
        let Some(index) = self.core.lookup_qpn(number) else { return false };
        self.send_acks(now, index);
        let core = &mut self.core;
        let Some(mut qpc) = core.qpcs.get_mut(index as usize).and_then(Option::take) else {
            return false;
        };
        qpc.unpublish(core.mapped.export_table.as_ref().ok());
        if let Some(at) = qpc.direct.direct_peer.take() {
            core.mapped.peers.detach(at);
        }
        if let Some(table) = qpc.direct.kernel_table.take() {
            core.mapped.kernel_tables.remove(index, *table, now);
        }
        core.leave_path(&mut qpc.path_use);
        core.totals.absorb(qpc.qp.stats());
        if let Some(flow) = qpc.flow {
            self.link.close(flow);
        }
        qpc.qp_memory.release(&mut core.srqs);
        core.free.push_back(index);
        core.poll_doorbell.retain(|poll_doorbell| *poll_doorbell != index);
        core.active.retain(|active| *active != index);
        true
    }

    /// Sends what a queue pair still owes its peer before it stops: a program that has polled its
    /// last receive may end the queue pair, and the sender must not take that for a failure.
    fn send_acks(&mut self, now: Instant, index: u32) {
        let is_active = |qpc: &Option<Box<QpContext>>| qpc.as_ref().is_some_and(|qpc| qpc.active);
        if self.core.qpcs.get(index as usize).is_some_and(is_active) {
            self.transmit_one(now, index);
            // If the link has failed, so have its queue pairs.
            let _ = self.link.flush();
        }
    }

    pub(in crate::hca) fn modify(
        &mut self,
        number: u32,
        change: &QpAttributes,
        now: Instant,
    ) -> Result<()> {
        let index = self.qp_index(number)?;
        if matches!(change.to, State::Reset | State::Err) {
            self.send_acks(now, index);
        }
        let core = &mut self.core;
        let Some(Some(qpc)) = core.qpcs.get_mut(index as usize) else {
            return Err(no_such_qp(number));
        };
        let refused = |why: String| {
            Error::new(Kind::InvalidArgument, format!("change queue pair {number:#x}")).why(why)
        };
        // The flow is opened and the MTU checked first, so that a transition happens completely or
        // not at all.
        let mut flow = None;
        if let (Some(path), State::Rtr) = (change.path, change.to) {
            change
                .check(qpc.qp.service(), qpc.qp.state())
                .map_err(|why| refused(why.to_string()))?;
            let label = path.flow_label ^ number;
            let opened = self.link.open(path.peer, label)?;
            // A flow may carry more than others, but a jumbo frame only where all do: it may move
            // to another link.
            let on_flow = self.link.max_packet_to(opened).min(MAX_ROCE_PACKET);
            let carried = self.link.max_packet().max(on_flow).saturating_sub(MAX_PACKET_OVERHEAD);
            if change.mtu.is_some_and(|mtu| mtu.bytes() as usize > carried) {
                self.link.close(opened);
                let why = format!("the link carries at most {carried} bytes of payload per packet");
                return Err(refused(why).fix("choose a smaller path MTU"));
            }
            flow = Some(opened);
        }
        if let Err(why) = qpc.qp.modify(change) {
            if let Some(flow) = flow {
                self.link.close(flow);
            }
            return Err(refused(why.to_string()));
        }
        if change.to == State::Reset {
            qpc.reset(&mut core.srqs);
        }
        let is_reset = change.to == State::Reset;
        if let Some(old) = qpc.flow.take_if(|_| flow.is_some() || is_reset) {
            self.link.close(old);
        }
        qpc.flow = flow.or(qpc.flow);
        qpc.direct.update_attr(change);
        qpc.publish(core.mapped.export_table.as_ref().ok());
        if flow.is_some() || is_reset {
            self.find_direct_peer(index);
            self.find_path(index);
        }
        let core = &mut self.core;
        // Work posted before may start now, or must be flushed.
        core.doorbell_bitmap.ring(index);
        core.service_qp(now, index);
        core.activate(index);
        core.post_process(now, index);
        Ok(())
    }

    fn qp_index(&self, number: u32) -> Result<u32> {
        self.core.lookup_qpn(number).ok_or_else(|| no_such_qp(number))
    }

    /// A queue pair's context, for queries.
    /// Gives a queue pair a table for kernels that access memory by themselves.
    pub(in crate::hca) fn set_kernel_table(
        &mut self,
        number: u32,
        table: KernelTable,
    ) -> Result<()> {
        let index = self.qp_index(number)?;
        let Some(Some(qpc)) = self.core.qpcs.get_mut(index as usize) else {
            return Err(no_such_qp(number));
        };
        qpc.direct.kernel_table = Some(Box::new(table));
        self.core.mapped.kernel_tables.add(index);
        Ok(())
    }

    pub(in crate::hca) fn qpc(&self, number: u32) -> Result<&QpContext> {
        let index = self.qp_index(number)?;
        match self.core.qpcs.get(index as usize) {
            Some(Some(qpc)) => Ok(qpc),
            _ => Err(no_such_qp(number)),
        }
    }

    pub(in crate::hca) fn qpcs(&self) -> impl Iterator<Item = &QpContext> {
        self.core.qpcs.iter().flatten().map(|qpc| &**qpc)
    }

    /// Sets a completion queue of this engine's table.
    pub(in crate::hca) fn put_cq(&mut self, cqn: u32, slot: Option<CqSlot>) {
        put(&mut self.core.cqs, cqn, slot);
    }

    /// A completion queue of this engine's table.
    pub(in crate::hca) fn cq(&mut self, cqn: u32) -> Option<&mut CqSlot> {
        self.core.cqs.get_mut(cqn as usize)?.as_mut()
    }

    /// Sets a shared receive queue, and its limit if it is armed.
    pub(in crate::hca) fn put_srq(
        &mut self,
        srqn: u32,
        srq: Option<(SharedReceiveQueue, Option<u32>)>,
    ) {
        let (ring, limit) = srq.map_or((None, None), |(ring, limit)| (Some(ring), limit));
        put(&mut self.core.srqs, srqn, ring);
        put(&mut self.core.srq_limits, srqn, limit);
    }

    /// Takes a shared receive queue out, with its limit.
    pub(in crate::hca) fn take_srq(
        &mut self,
        srqn: u32,
    ) -> Option<(SharedReceiveQueue, Option<u32>)> {
        let ring = self.core.srqs.get_mut(srqn as usize)?.take()?;
        Some((ring, self.core.srq_limits.get_mut(srqn as usize)?.take()))
    }

    pub(in crate::hca) fn limit(&self, srqn: u32) -> u32 {
        self.core.srq_limits.get(srqn as usize).copied().flatten().unwrap_or(0)
    }

    pub(in crate::hca) fn set_limit(&mut self, srqn: u32, limit: u32) {
        if let Some(slot) = self.core.srq_limits.get_mut(srqn as usize) {
            *slot = (limit > 0).then_some(limit);
        }
        self.core.check_limit(srqn);
    }
}

#[cold]
pub(in crate::hca) fn no_such_qp(number: u32) -> Error {
    Error::new(Kind::Freed, format!("use queue pair {number:#x}")).why("it no longer exists")
}

/// Sets an entry of a table that is as long as its highest number requires.
fn put<T>(slots: &mut Vec<Option<T>>, number: u32, value: Option<T>) {
    let at = number as usize;
    if at >= slots.len() {
        slots.resize_with(at + 1, || None);
    }
    slots[at] = value;
}
