//! The engine as the protocol's [`Host`]: keys, ranges and receives of one queue pair while a
//! packet is handled.

use warpwire_proto::qp::{
    Access, Atomic, Host, HostStatus, MwBind, Receive, Remote, Source, Target,
};

use super::qpc::QpMemory;
use super::ring::SharedReceiveQueue;
use crate::mr::{AccessDenied, Registry};

/// What a queue pair sees of the engine.
pub(super) struct HostView<'a> {
    pub qp_memory: &'a mut QpMemory,
    pub registry: &'a Registry,
    pub srqs: &'a mut [Option<SharedReceiveQueue>],
    /// The payload of the received packet; empty while one is transmitted.
    pub payload: &'a [u8],
    /// The received packet, if it may be kept: see [`Host::hold`].
    pub packet: &'a [u8],
}

impl HostView<'_> {
    pub(super) fn verdict(&mut self, outcome: Result<(), AccessDenied>) -> HostStatus {
        match outcome {
            Ok(()) => HostStatus::Ready,
            Err(denied) if denied.is_transient() => {
                self.qp_memory.retry_soon = true;
                HostStatus::Retry
            }
            Err(denied) => {
                self.qp_memory.denied = Some(denied);
                HostStatus::Denied
            }
        }
    }

    fn resolve(&self, need: Access, at: Remote, len: u32) -> Result<(), AccessDenied> {
        let found =
            self.registry.resolve(at.rkey, self.qp_memory.pd, need, at.address, u64::from(len));
        found.map(drop)
    }

    #[inline]
    fn put(&self, to: Target, payload: &[u8]) -> Result<(), AccessDenied> {
        match to {
            Target::Remote(at) => {
                let (pd, need, len) =
                    (self.qp_memory.pd, Access::REMOTE_WRITE, payload.len() as u64);
                let span = self.registry.resolve(at.rkey, pd, need, at.address, len)?;
                self.qp_memory.put(&span, payload)
            }
            Target::Receive { id, offset } => {
                self.qp_memory.scatter_received(self.registry, id, offset, payload)
            }
            Target::Response { id, offset } => {
                self.qp_memory.scatter(self.registry, id, offset, payload)
            }
            // Datagrams are handled by `DatagramHostView`.
            Target::Grh { .. } => Err(AccessDenied::Range),
        }
    }
}

impl Host for HostView<'_> {
    fn take_receive(&mut self) -> Option<Receive> {
        self.qp_memory.take_receive(self.srqs)
    }

    fn may_access(&mut self, need: Access, at: Remote, len: u32) -> HostStatus {
        let outcome = self.resolve(need, at, len);
        self.verdict(outcome)
    }

    fn place(&mut self, to: Target, len: u32) -> HostStatus {
        let Some(payload) = self.payload.get(..len as usize) else { return HostStatus::Denied };
        let outcome = self.put(to, payload);
        self.verdict(outcome)
    }

    fn execute(&mut self, at: Remote, atomic: Atomic) -> Result<u64, HostStatus> {
        let (pd, need) = (self.qp_memory.pd, Access::REMOTE_ATOMIC);
        let len = u64::from(atomic.width().bytes());
        // A program that polls this word must see the writes before it: they may lie in
        // write-combining buffers, or be staged for other memory than this.
        self.registry.publish_all();
        let outcome = self
            .registry
            .resolve(at.rkey, pd, need, at.address, len)
            .and_then(|span| span.atomic(0, &atomic));
        outcome.map_err(|denied| self.verdict(Err(denied)))
    }

    fn invalidate(&mut self, key: u32) -> HostStatus {
        let outcome = self.registry.invalidate(key, self.qp_memory.pd);
        self.verdict(outcome)
    }

    fn bind(&mut self, bind: &MwBind) -> HostStatus {
        let outcome = self.registry.bind_window(self.qp_memory.pd, bind);
        self.verdict(outcome)
    }

    fn store_result(&mut self, id: u64, value: u64) -> HostStatus {
        // A four-byte result is stored big-endian, as ConnectX does; an eight-byte one in host byte
        // order.
        let outcome = match self.qp_memory.wr_state(id).len {
            4 => self.qp_memory.scatter(self.registry, id, 0, &(value as u32).to_be_bytes()),
            _ => self.qp_memory.scatter(self.registry, id, 0, &value.to_ne_bytes()),
        };
        self.verdict(outcome)
    }

    fn fetch(&mut self, from: Source, len: u32, _: usize) -> HostStatus {
        let outcome = match from {
            Source::SendWr { id, offset } => {
                self.qp_memory.check_gather(self.registry, id, offset, len)
            }
            Source::Remote { at, .. } => {
                let found = self.resolve(Access::REMOTE_READ, at, len);
                // The peer gets a NAK without an error on this side, if it had requested the same
                // before.
                self.qp_memory.resets_faults |=
                    found.as_ref().is_err_and(|denied| *denied == AccessDenied::Gone);
                found
            }
        };
        self.verdict(outcome)
    }

    fn hold(&mut self, slot: u32) -> bool {
        self.qp_memory.held.keep(slot, self.packet)
    }
}
