//! The engine as the protocol's host: keys, ranges and receives of one queue pair while a packet is handled.

use warpwire_proto::qp::{self, Host, Receive, Remote, Source, Target, Verdict};

use super::pair::{Side, from_wire};
use super::ring::SharedRing;
use crate::link::Rest;
use crate::mr::{Access, Denied, Registry};

/// What a queue pair sees of the engine.
pub(super) struct View<'a> {
    pub side: &'a mut Side,
    pub registry: &'a Registry,
    pub srqs: &'a mut [Option<SharedRing>],
    /// The payload of the packet at hand.
    pub payload: Body<'a>,
}

/// A packet's payload.
pub(super) enum Body<'a> {
    Here(&'a [u8]),
    /// The link has it still, behind so many bytes of headers.
    Unread {
        rest: &'a mut dyn Rest,
        headers: usize,
    },
}

impl Body<'_> {
    /// That of packets that have none, or have it yet to be fetched.
    pub(super) const NONE: Self = Self::Here(&[]);
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

    #[inline]
    fn put(&self, to: Target, payload: &[u8]) -> Result<(), Denied> {
        match to {
            Target::Remote(at) => {
                let (pd, need, len) = (self.side.pd, Access::REMOTE_WRITE, payload.len() as u64);
                let span = self.registry.resolve(at.key, pd, need, at.address, len)?;
                self.side.put(&span, payload)
            }
            Target::Receive { id, offset } => {
                self.side.place_received(self.registry, id, offset, payload)
            }
            Target::Response { id, offset } => {
                self.side.scatter(self.registry, id, offset, payload)
            }
            // Datagrams come to queue pairs of another sort.
            Target::Route { .. } => Err(Denied::Range),
        }
    }

    /// Lets the link put the payload where it belongs, if that is one piece of the host's memory; else it is copied there, as others are.
    #[inline(never)]
    fn place_unread(&mut self, to: Target, len: u32) -> Verdict {
        let payload = std::mem::replace(&mut self.payload, Body::NONE);
        let Body::Unread { rest, headers } = payload else { return Verdict::Refused };
        // Held while the link works on it: the memory stays.
        let span = self.side.target_span(self.registry, to, len);
        if let Some(bytes) = span.as_ref().and_then(|span| span.host_bytes()) {
            // What was not right is as if it had not come; but the protocol has begun with it.
            return if rest.read_into(headers, &bytes) { Verdict::Yes } else { Verdict::NotNow };
        }
        drop(span);
        let Some(packet) = rest.read() else { return Verdict::NotNow };
        let end = headers + len as usize;
        let outcome = packet.get(headers..end).ok_or(Denied::Range);
        let outcome = outcome.and_then(|payload| self.put(to, payload));
        self.verdict(outcome)
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
        let Body::Here(payload) = self.payload else { return self.place_unread(to, len) };
        let Some(payload) = payload.get(..len as usize) else { return Verdict::Refused };
        let outcome = self.put(to, payload);
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
