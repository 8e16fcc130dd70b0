//! Congestion control between queue pairs and their peers: which path a queue pair uses, and who
//! waits for room on it.
//!
//! Queue pairs to one IP address share a [`Path`]: its window limits the packets that they have in
//! flight together. A queue pair that finds no room waits in the path's list, and is served again,
//! in turn, when acknowledgements make room. Links on which packets cannot be lost to congestion
//! (shared memory, loopback) have no paths.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;

use warpwire_proto::Instant;
use warpwire_proto::congestion::{Path, PathSignals};
use warpwire_proto::qp::RcQp;

use super::engine::{Core, Engine};
use super::protocol::Protocol;
use super::qpc::QpContext;

/// A queue pair's part in a path.
#[derive(Debug, Default)]
pub(super) struct PathUse {
    /// The index of the path; `None` if the link needs none.
    path: Option<u32>,
    /// Packets in flight, as the path has counted them.
    in_flight: u32,
    /// It is in the list of those that wait for room.
    waits: bool,
}

#[derive(Debug, Default)]
pub(super) struct Paths {
    slots: Vec<Option<Slot>>,
    by_peer: HashMap<IpAddr, u32>,
}

#[derive(Debug)]
struct Slot {
    path: Path,
    peer: IpAddr,
    users: u32,
    waiting: VecDeque<u32>,
}

impl Paths {
    /// Adds a user of the path to a peer; returns the path's index.
    fn attach(&mut self, peer: IpAddr, mtu: u32) -> u32 {
        let Self { slots, by_peer } = self;
        let at = *by_peer.entry(peer).or_insert_with(|| {
            let slot = Slot { path: Path::default(), peer, users: 0, waiting: VecDeque::new() };
            let free = slots.iter().position(Option::is_none).unwrap_or(slots.len());
            if free == slots.len() {
                slots.push(None);
            }
            slots[free] = Some(slot);
            free as u32
        });
        if let Some(slot) = self.get_mut(at) {
            slot.users += 1;
            slot.path.add_mtu(mtu);
            // All of them may wait: pushing never allocates.
            slot.waiting.reserve(slot.users as usize);
        }
        at
    }

    fn detach(&mut self, at: u32) {
        let Some(slot) = self.slots.get_mut(at as usize) else { return };
        let Some(known) = slot else { return };
        known.users -= 1;
        if known.users == 0 {
            self.by_peer.remove(&known.peer);
            *slot = None;
        }
    }

    #[inline]
    fn get_mut(&mut self, at: u32) -> Option<&mut Slot> {
        self.slots.get_mut(at as usize)?.as_mut()
    }
}

impl PathUse {
    /// Before a queue pair transmits: limits what it may have in flight.
    #[inline]
    pub(super) fn admit(&self, paths: &mut Paths, qp: &mut RcQp) {
        let slot = self.path.and_then(|at| paths.get_mut(at));
        let allowance = slot.map(|slot| self.in_flight.saturating_add(slot.path.room()));
        qp.set_allowance(allowance.unwrap_or(u32::MAX));
    }

    /// After it has transmitted what it could: waits for room if that was all that it lacked.
    #[inline]
    pub(super) fn wait_if_blocked(&mut self, paths: &mut Paths, qp: &mut RcQp, index: u32) {
        if qp.take_blocked_by_path()
            && !self.waits
            && let Some(slot) = self.path.and_then(|at| paths.get_mut(at))
        {
            self.waits = true;
            slot.waiting.push_back(index);
        }
    }
}

impl Core {
    /// Follows every call into a queue pair: reports to its path what it saw, and lets others send.
    #[inline]
    pub(super) fn update_path(&mut self, now: Instant, index: u32) {
        let Some(Some(qpc)) = self.qpcs.get_mut(index as usize) else { return };
        let QpContext { qp: Protocol::Connected(qp), path_use, .. } = &mut **qpc else { return };
        let Some(at) = path_use.path else { return };
        let (in_flight, signals) = (qp.in_flight(), qp.take_path_signals());
        let Some(slot) = self.paths.get_mut(at) else { return };
        if in_flight != path_use.in_flight || signals != PathSignals::default() {
            slot.path.set_in_flight(path_use.in_flight, in_flight);
            path_use.in_flight = in_flight;
            slot.path.on_signals(now, &signals);
        }
        // Also if nothing has changed: one that was served because there was room, and had nothing
        // to send any more, leaves that room to the next. Nothing else may ever wake that one.
        if !slot.waiting.is_empty() {
            self.wake_waiting(at);
        }
    }

    /// Serves as many of the waiting queue pairs as there is room for packets.
    fn wake_waiting(&mut self, at: u32) {
        let Some(slot) = self.paths.get_mut(at) else { return };
        let mut room = slot.path.room();
        while room > 0 {
            let Some(slot) = self.paths.get_mut(at) else { return };
            let Some(index) = slot.waiting.pop_front() else { return };
            let Some(Some(qpc)) = self.qpcs.get_mut(index as usize) else { continue };
            // It may have left the path, or be a new one in the slot of one that did.
            if qpc.path_use.path == Some(at) && std::mem::take(&mut qpc.path_use.waits) {
                self.activate(index);
                room -= 1;
            }
        }
    }

    /// A queue pair no longer uses its path: what it had in flight is gone.
    pub(super) fn leave_path(&mut self, path_use: &mut PathUse) {
        let PathUse { path: Some(at), in_flight, .. } = std::mem::take(path_use) else { return };
        if let Some(slot) = self.paths.get_mut(at) {
            slot.path.set_in_flight(in_flight, 0);
        }
        self.wake_waiting(at);
        self.paths.detach(at);
    }
}

impl Engine {
    /// Gives a queue pair the path of its flow, after the flow has changed.
    pub(super) fn find_path(&mut self, index: u32) {
        let Some(Some(qpc)) = self.core.qpcs.get_mut(index as usize) else { return };
        let mut path_use = std::mem::take(&mut qpc.path_use);
        let peer = match (&qpc.qp, qpc.flow) {
            (Protocol::Connected(qp), Some(flow)) if self.link.can_congest(flow) => {
                qp.path().map(|path| (path.peer.ip(), qp.mtu().bytes()))
            }
            _ => None,
        };
        self.core.leave_path(&mut path_use);
        let path = peer.map(|(peer, mtu)| self.core.paths.attach(peer, mtu));
        if let Some(Some(qpc)) = self.core.qpcs.get_mut(index as usize) {
            qpc.path_use = PathUse { path, ..PathUse::default() };
        }
    }
}
