//! Control: slow calls, under the engine's lock.

use warpwire_proto::Instant;
use warpwire_proto::qp::{Change, State};

use super::{Engine, LONGEST_AROUND};
use crate::error::{Error, Kind, Result};
use crate::hca::cq::CompletionRing;
use crate::hca::pair::Pair;
use crate::hca::ring::SharedRing;
use crate::hca::{CqSpec, QpSpec};

impl Engine {
    pub(in crate::hca) fn add_pair(&mut self, spec: QpSpec) -> Result<u32> {
        let core = &mut self.core;
        let index = core.free_place();
        let full = || {
            Error::new(Kind::OutOfMemory, "make a queue pair")
                .why("65 520 of them exist")
                .fix("destroy those that are no longer needed, or open another context")
        };
        let index = index.ok_or_else(full)?;
        core.generations.resize(core.pairs.len(), 0);
        let generation = &mut core.generations[index as usize];
        *generation = generation.wrapping_add(1);
        let number = core.number_of(index);
        let watched = spec.watched;
        core.pairs[index as usize] = Some(Box::new(Pair::new(number, spec)));
        core.active.reserve(core.pairs.len());
        core.timers.reserve(2 * core.pairs.len());
        core.looked_at.reserve(core.pairs.len());
        core.rung.grow_to(core.pairs.len());
        if watched {
            core.watched.push(index);
        }
        Ok(number)
    }

    pub(in crate::hca) fn remove_pair(&mut self, number: u32) {
        let Some(index) = self.core.index_of(number) else { return };
        let core = &mut self.core;
        let Some(mut pair) = core.pairs.get_mut(index as usize).and_then(Option::take) else {
            return;
        };
        pair.tell_end(core.offer.as_ref().ok());
        if let Some(at) = pair.reach.partner.take() {
            core.partners.detach(at);
        }
        core.totals.absorb(pair.qp.stats());
        if let Some(flow) = pair.flow {
            self.link.close(flow);
        }
        pair.side.give_back(&mut core.srqs);
        core.free.push_back(index);
        core.watched.retain(|watched| *watched != index);
        core.active.retain(|active| *active != index);
    }

    pub(in crate::hca) fn modify(
        &mut self,
        number: u32,
        change: &Change,
        now: Instant,
    ) -> Result<()> {
        let index = self.pair_index(number)?;
        let core = &mut self.core;
        let Some(Some(pair)) = core.pairs.get_mut(index as usize) else { return Err(gone(number)) };
        let refused = |why: String| {
            Error::new(Kind::InvalidArgument, format!("change queue pair {number:#x}")).why(why)
        };
        // Before the step is taken: a step that cannot be taken whole is not taken.
        let mut flow = None;
        if let (Some(path), State::Rtr) = (change.path, change.to) {
            change
                .check(pair.qp.service(), pair.qp.state())
                .map_err(|why| refused(why.to_string()))?;
            let label = path.flow_label ^ number;
            let opened = self.link.open(path.peer, label)?;
            let carried = self.link.largest().saturating_sub(LONGEST_AROUND);
            if change.mtu.is_some_and(|mtu| mtu.bytes() as usize > carried) {
                self.link.close(opened);
                let why = format!("the link carries packets with at most {carried} bytes in them");
                return Err(refused(why).fix("choose a smaller path MTU"));
            }
            flow = Some(opened);
        }
        if let Err(why) = pair.qp.modify(change) {
            if let Some(flow) = flow {
                self.link.close(flow);
            }
            return Err(refused(why.to_string()));
        }
        if change.to == State::Reset {
            pair.reset(&mut core.srqs);
        }
        let leaves = change.to == State::Reset;
        if let Some(old) = pair.flow.take_if(|_| flow.is_some() || leaves) {
            self.link.close(old);
        }
        pair.flow = flow.or(pair.flow);
        pair.reach.note(change);
        pair.tell(core.offer.as_ref().ok());
        if flow.is_some() || leaves {
            self.find_partner(index);
        }
        let core = &mut self.core;
        // What was posted before may be begun now, or must come back.
        core.rung.ring(index);
        core.look_at(now, index);
        core.activate(index);
        core.after(now, index);
        Ok(())
    }

    fn pair_index(&self, number: u32) -> Result<u32> {
        self.core.index_of(number).ok_or_else(|| gone(number))
    }

    /// The queue pair's own state, for questions.
    pub(in crate::hca) fn pair(&self, number: u32) -> Result<&Pair> {
        let index = self.pair_index(number)?;
        match self.core.pairs.get(index as usize) {
            Some(Some(pair)) => Ok(pair),
            _ => Err(gone(number)),
        }
    }

    pub(in crate::hca) fn pairs(&self) -> impl Iterator<Item = &Pair> {
        self.core.pairs.iter().flatten().map(|pair| &**pair)
    }

    pub(in crate::hca) fn add_cq(&mut self, spec: CqSpec) -> Result<u32> {
        let ring = CompletionRing::new(spec);
        add(&mut self.core.cqs, ring, "make a completion queue")
    }

    pub(in crate::hca) fn add_srq(&mut self, ring: SharedRing) -> Result<u32> {
        let number = add(&mut self.core.srqs, ring, "make a shared receive queue")?;
        self.core.srq_limits.resize(self.core.srqs.len(), None);
        self.core.srq_limits[number as usize] = None;
        Ok(number)
    }

    pub(in crate::hca) fn set_limit(&mut self, srqn: u32, limit: u32) {
        if let Some(place) = self.core.srq_limits.get_mut(srqn as usize) {
            *place = (limit > 0).then_some(limit);
        }
        self.core.check_limit(srqn);
    }
}

fn gone(number: u32) -> Error {
    Error::new(Kind::Freed, format!("use queue pair {number:#x}")).why("it does not exist any more")
}

/// Numbers of queues have 24 bits; number 0 is never given: zeroed memory must not name a queue.
fn add<T>(places: &mut Vec<Option<T>>, value: T, what: &'static str) -> Result<u32> {
    if places.is_empty() {
        places.push(None);
    }
    let free = places.iter().skip(1).position(Option::is_none).map(|at| at + 1);
    let index = match free {
        Some(free) => free,
        None if places.len() < 1 << 20 => {
            places.push(None);
            places.len() - 1
        }
        None => {
            let error = Error::new(Kind::OutOfMemory, what).why("there are 2^20 of them");
            return Err(error.fix("destroy those that are no longer needed"));
        }
    };
    places[index] = Some(value);
    Ok(index as u32)
}
