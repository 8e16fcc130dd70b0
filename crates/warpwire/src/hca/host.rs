//! The engine as the protocol's host: keys, ranges and receives of one queue pair while a packet is handled.

use warpwire_proto::qp::{self, Host, Receive, Remote, Source, Target, Verdict};

use super::pair::{Side, from_wire};
use super::ring::SharedRing;
use crate::mr::{Access, Denied, Registry};

/// What a queue pair sees of the engine.
pub(super) struct View<'a> {
    pub side: &'a mut Side,
    pub registry: &'a Registry,
    pub srqs: &'a mut [Option<SharedRing>],
    /// The payload of the packet at hand.
    pub payload: &'a [u8],
}

impl View<'_> {
    pub(super) fn verdict(&mut self, outcome: Result<(), Denied>) -> Verdict {
        match outcome {
            Ok(()) => Verdict::Yes,
            Err(denied) if denied.passes() => {
                self.side.later = true;
                Verdict::NotNow
            }
            Err(denied) => {
                self.side.denied = Some(denied);
                Verdict::Refused
            }
        }
    }

    fn resolve(&self, need: Access, at: Remote, len: u32) -> Result<(), Denied> {
        let found = self.registry.resolve(at.key, self.side.pd, need, at.address, u64::from(len));
        found.map(drop)
    }
}

impl Host for View<'_> {
    fn take_receive(&mut self) -> Option<Receive> {
        self.side.take_receive(self.srqs)
    }

    fn may_access(&mut self, access: qp::Access, at: Remote, len: u32) -> Verdict {
        let need = match access {
            qp::Access::REMOTE_WRITE => Access::REMOTE_WRITE,
            qp::Access::REMOTE_READ => Access::REMOTE_READ,
            _ => Access::REMOTE_ATOMIC,
        };
        let outcome = self.resolve(need, at, len);
        self.verdict(outcome)
    }

    fn place(&mut self, to: Target, len: u32) -> Verdict {
        let Some(payload) = self.payload.get(..len as usize) else { return Verdict::Refused };
        let outcome = match to {
            Target::Remote(at) => {
                let (pd, need) = (self.side.pd, Access::REMOTE_WRITE);
                let span = self.registry.resolve(at.key, pd, need, at.address, u64::from(len));
                span.and_then(|span| self.side.put(&span, payload))
            }
            Target::Receive { id, offset } => {
                self.side.place_received(self.registry, id, offset, payload)
            }
            Target::Response { id, offset } => {
                self.side.scatter(self.registry, id, offset, payload)
            }
            // Datagrams come to queue pairs of another sort.
            Target::Route { .. } => Err(Denied::Range),
        };
        self.verdict(outcome)
    }

    fn execute(&mut self, at: Remote, atomic: qp::Atomic) -> Result<u64, Verdict> {
        let (pd, need) = (self.side.pd, Access::REMOTE_ATOMIC);
        let len = u64::from(atomic.len());
        let outcome = self
            .registry
            .resolve(at.key, pd, need, at.address, len)
            .and_then(|span| span.atomic(0, &from_wire(atomic)));
        outcome.map_err(|denied| self.verdict(Err(denied)))
    }

    fn invalidate(&mut self, key: u32) -> Verdict {
        let outcome = self.registry.invalidate(key, self.side.pd);
        self.verdict(outcome)
    }

    fn store_result(&mut self, id: u64, value: u64) -> Verdict {
        // A word of four bytes arrives big-endian, as ConnectX's does; one of eight in the host's order.
        let outcome = match self.side.underway(id).len {
            4 => self.side.scatter(self.registry, id, 0, &(value as u32).to_be_bytes()),
            _ => self.side.scatter(self.registry, id, 0, &value.to_ne_bytes()),
        };
        self.verdict(outcome)
    }

    fn fetch(&mut self, from: Source, len: u32, _: usize) -> Verdict {
        let outcome = match from {
            Source::Work { id, offset } => self.side.may_gather(self.registry, id, offset, len),
            Source::Remote { at, .. } => {
                let found = self.resolve(Access::REMOTE_READ, at, len);
                // The peer may be told so without a failure of this side, if it had asked before.
                self.side.concludes |= found.as_ref().is_err_and(|denied| *denied == Denied::Gone);
                found
            }
        };
        self.verdict(outcome)
    }
}
