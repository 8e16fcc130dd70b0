//! Outstanding operations: a table for each peer, allocated with the communicator. NCCL holds
//! numbers and no pointers, so one that is wrong is refused.

use super::abi::Id;

/// Operations of one context to one rank: 32 × [`MAX_RECVS`](crate::abi::MAX_RECVS), as NCCL
/// computes it from the properties of the device.
pub(super) const PER_CONTEXT: usize = 256;

/// Which operation of which peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RequestId {
    pub rank: u32,
    pub slot: u32,
}

impl RequestId {
    /// As work requests carry it.
    #[inline]
    pub(super) fn wr_id(self) -> u64 {
        u64::from(self.rank) << 32 | u64::from(self.slot)
    }

    #[inline]
    pub(super) fn of_wr(id: u64) -> Self {
        Self { rank: (id >> 32) as u32, slot: id as u32 }
    }

    /// As NCCL holds it: never NULL.
    #[inline]
    pub(super) fn to_nccl(self) -> Id {
        std::ptr::without_provenance((self.wr_id() + 1) as usize)
    }

    #[inline]
    pub(super) fn of_nccl(id: Id) -> Option<Self> {
        (id.addr() as u64).checked_sub(1).map(Self::of_wr)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    Free,
    Posted,
    Done,
}

struct Peer {
    slots: Vec<Slot>,
    free: Vec<u32>,
}

pub(super) struct Requests {
    peers: Box<[Peer]>,
    /// Operations whose completion is expected.
    posted: usize,
}

impl Requests {
    pub(super) fn new(ranks: usize) -> Self {
        let peers = (0..ranks).map(|_| Peer { slots: Vec::new(), free: Vec::new() });
        let mut requests = Self { peers: peers.collect(), posted: 0 };
        requests.add_context();
        requests
    }

    /// Makes room for the operations of one more context.
    pub(super) fn add_context(&mut self) {
        for peer in &mut self.peers {
            let begin = peer.slots.len();
            let end = begin + PER_CONTEXT;
            peer.slots.resize(end, Slot::Free);
            // The table of free slots never grows beyond that of slots.
            peer.free.reserve_exact(end - peer.free.len());
            peer.free.extend((begin as u32..end as u32).rev());
        }
    }

    #[inline]
    pub(super) fn posted(&self) -> usize {
        self.posted
    }

    /// Operations that a peer may have outstanding.
    pub(super) fn room(&self, rank: u32) -> usize {
        self.peers.get(rank as usize).map_or(0, |peer| peer.slots.len())
    }

    /// A free slot, which becomes a posted operation.
    #[inline]
    pub(super) fn post(&mut self, rank: u32) -> Option<RequestId> {
        let peer = self.peers.get_mut(rank as usize)?;
        let slot = peer.free.pop()?;
        peer.slots[slot as usize] = Slot::Posted;
        self.posted += 1;
        Some(RequestId { rank, slot })
    }

    /// Nothing of the operation was posted.
    #[cold]
    pub(super) fn cancel(&mut self, id: RequestId) {
        self.complete(id);
        self.release(id);
    }

    #[inline]
    pub(super) fn complete(&mut self, id: RequestId) {
        if let Some(slot) = self.slot_mut(id).filter(|slot| **slot == Slot::Posted) {
            *slot = Slot::Done;
            self.posted -= 1;
        }
    }

    #[inline]
    pub(super) fn slot(&self, id: RequestId) -> Option<Slot> {
        self.peers.get(id.rank as usize)?.slots.get(id.slot as usize).copied()
    }

    #[inline]
    fn slot_mut(&mut self, id: RequestId) -> Option<&mut Slot> {
        self.peers.get_mut(id.rank as usize)?.slots.get_mut(id.slot as usize)
    }

    /// NCCL knows that the operation is complete.
    #[inline]
    pub(super) fn release(&mut self, id: RequestId) {
        if let Some(slot) = self.slot_mut(id).filter(|slot| **slot == Slot::Done) {
            *slot = Slot::Free;
            self.peers[id.rank as usize].free.push(id.slot);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_taken_completed_and_released_once() {
        let mut requests = Requests::new(3);
        let taken: Vec<RequestId> = (0..PER_CONTEXT).map(|_| requests.post(1).unwrap()).collect();
        assert_eq!((requests.post(1), requests.posted()), (None, PER_CONTEXT));
        assert!(requests.post(2).is_some() && requests.post(3).is_none());
        let one = taken[7];
        requests.release(one);
        assert_eq!(requests.slot(one), Some(Slot::Posted), "not complete");
        requests.complete(one);
        requests.complete(one);
        assert_eq!((requests.slot(one), requests.posted()), (Some(Slot::Done), PER_CONTEXT));
        requests.release(one);
        requests.release(one);
        assert_eq!(requests.post(1), Some(one));
        assert_eq!(requests.post(1), None);
        requests.cancel(one);
        assert_eq!(requests.slot(one), Some(Slot::Free));
        requests.add_context();
        let more = (0..=PER_CONTEXT).filter(|_| requests.post(1).is_some()).count();
        assert_eq!(more, PER_CONTEXT + 1);
    }

    #[test]
    fn numbers_are_never_null_and_survive_the_trip() {
        for id in [RequestId { rank: 0, slot: 0 }, RequestId { rank: 70_000, slot: 255 }] {
            assert!(!id.to_nccl().is_null());
            assert_eq!(RequestId::of_nccl(id.to_nccl()), Some(id));
            assert_eq!(RequestId::of_wr(id.wr_id()), id);
        }
        assert_eq!(RequestId::of_nccl(std::ptr::null()), None);
        let other = RequestId { rank: 9, slot: 9 };
        assert_eq!(Requests::new(2).slot(other), None);
    }
}
