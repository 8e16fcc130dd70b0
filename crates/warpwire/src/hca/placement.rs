//! Which engine of a device has which queue.
//!
//! 1. A queue pair belongs to one engine, from its creation to its end. Its number tells which.
//! 2. A shared receive queue belongs to the engine of its first queue pair. All others that use it
//!    go there.
//! 3. A completion queue belongs to the engine of its first queue pair. Others that use it go
//!    there, unless rule 2 sends them elsewhere, or their two completion queues belong to different
//!    engines. Then both engines write to the queue, under a lock of its own.
//! 4. A queue pair that shares no queue goes to the engine that has the fewest.
//!
//! So where every queue pair has completion queues of its own, engines share no queue and no lock.
//! The lock of this table is taken before an engine's, and never while one is held.

use super::QpSpec;
use crate::error::{Error, Kind, Result};

/// Engines, one bit each.
pub(super) type EngineSet = u32;

#[derive(Debug)]
pub(super) struct Placement {
    /// The engines that write to each completion queue: none until it has a queue pair.
    cqs: Vec<Option<EngineSet>>,
    /// The engine of each shared receive queue: none until it has a queue pair.
    srqs: Vec<Option<EngineSet>>,
    /// Queue pairs per engine.
    queue_pairs: Box<[usize]>,
}

impl Placement {
    pub(super) fn new(engines: usize) -> Self {
        Self { cqs: Vec::new(), srqs: Vec::new(), queue_pairs: vec![0; engines].into() }
    }

    /// All engines of the device.
    fn all(&self) -> EngineSet {
        EngineSet::MAX >> (EngineSet::BITS - self.queue_pairs.len() as u32)
    }

    /// A number for a new completion queue.
    pub(super) fn add_cq(&mut self) -> Result<u32> {
        add(&mut self.cqs, "create a completion queue")
    }

    /// A number for a new shared receive queue.
    pub(super) fn add_srq(&mut self) -> Result<u32> {
        add(&mut self.srqs, "create a shared receive queue")
    }

    pub(super) fn remove_cq(&mut self, cqn: u32) {
        remove(&mut self.cqs, cqn);
    }

    pub(super) fn remove_srq(&mut self, srqn: u32) {
        remove(&mut self.srqs, srqn);
    }

    /// The engines that write to a completion queue; `None` if it does not exist.
    pub(super) fn cq(&self, cqn: u32) -> Option<EngineSet> {
        self.cqs.get(cqn as usize).copied().flatten()
    }

    /// The engine of a shared receive queue, as a set; `None` if it does not exist.
    pub(super) fn srq(&self, srqn: u32) -> Option<EngineSet> {
        self.srqs.get(srqn as usize).copied().flatten()
    }

    /// The engine for a new queue pair.
    pub(super) fn choose(&self, spec: &QpSpec) -> usize {
        let srq = spec.srq.and_then(|srqn| self.srq(srqn));
        let [receive, send] = [spec.receive_cq, spec.send_cq].map(|cqn| self.cq(cqn));
        let both = receive.unwrap_or(0) & send.unwrap_or(0);
        let candidates = [srq, Some(both), receive, send].into_iter().flatten();
        let candidates = candidates.chain([self.all()]).find(|engines| *engines != 0);
        let is_candidate =
            |engine: &usize| candidates.is_some_and(|engines| engines & (1 << engine) != 0);
        let found = (0..self.queue_pairs.len()).filter(is_candidate);
        found.min_by_key(|engine| self.queue_pairs[*engine]).unwrap_or(0)
    }

    /// Notes that an engine writes to a completion queue, too.
    pub(super) fn place_cq(&mut self, cqn: u32, engine: usize) {
        if let Some(Some(engines)) = self.cqs.get_mut(cqn as usize) {
            *engines |= 1 << engine;
        }
    }

    pub(super) fn place_srq(&mut self, srqn: u32, engine: usize) {
        if let Some(Some(engines)) = self.srqs.get_mut(srqn as usize) {
            *engines |= 1 << engine;
        }
    }

    pub(super) fn add_qp(&mut self, engine: usize) {
        self.queue_pairs[engine] += 1;
    }

    pub(super) fn remove_qp(&mut self, engine: usize) {
        self.queue_pairs[engine] -= 1;
    }
}

/// The engine that has a queue: the first of those that write to it, or of the device if none does.
pub(super) fn home(engines: EngineSet) -> usize {
    match engines {
        0 => 0,
        engines => engines.trailing_zeros() as usize,
    }
}

/// A free number. Numbers have 24 bits; 0 is never used, so that zeroed memory names no queue.
fn add(slots: &mut Vec<Option<EngineSet>>, what: &'static str) -> Result<u32> {
    if slots.is_empty() {
        slots.push(None);
    }
    let free = slots.iter().skip(1).position(Option::is_none).map(|at| at + 1);
    let index = match free {
        Some(free) => free,
        None if slots.len() < 1 << 20 => {
            slots.push(None);
            slots.len() - 1
        }
        None => {
            let error =
                Error::new(Kind::OutOfMemory, what).why("the device has its maximum of 2^20");
            return Err(error.fix("destroy those that are no longer needed"));
        }
    };
    slots[index] = Some(0);
    Ok(index as u32)
}

fn remove(slots: &mut [Option<EngineSet>], number: u32) {
    if let Some(slot) = slots.get_mut(number as usize) {
        *slot = None;
    }
}
