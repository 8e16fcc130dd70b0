//! A host with scripted answers that records its calls and their effects.

use std::collections::{BTreeMap, VecDeque};

use warpwire_proto::qp::{
    Access, Atomic, HOLD_SLOTS, Host, HostStatus, MwBind, Receive, Remote, Source, Target,
};
use warpwire_proto::wire::Headers;

/// Host calls whose answers can be scripted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum HostCall {
    TakeReceive,
    MayAccess,
    PlaceReceive,
    PlaceGrh,
    PlaceRemote,
    PlaceResponse,
    Execute,
    Invalidate,
    Bind,
    StoreResult,
    FetchWork,
    FetchRemote,
    Hold,
}

/// Effects on memory, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostEffect {
    Placed(Target, u32),
    Executed(Remote, Atomic),
    Stored(u64, u64),
    Invalidated(u32),
    Bound(MwBind),
}

#[derive(Debug, Default)]
pub struct ScriptedHost {
    receives: VecDeque<Receive>,
    answers: BTreeMap<HostCall, VecDeque<HostStatus>>,
    pub done: Vec<HostEffect>,
    /// Number of calls of each kind, whatever the answer.
    pub calls: BTreeMap<HostCall, u32>,
    /// The word that all atomics modify.
    pub atomic_word: u64,
    /// The packet being handled, and packets that are kept, by slot.
    pub current: Option<(Headers, u32)>,
    pub held: BTreeMap<u32, (Headers, u32)>,
}

impl ScriptedHost {
    pub fn add_receive(&mut self, id: u64, capacity: u32) {
        self.receives.push_back(Receive { id, capacity });
    }

    pub fn receives_left(&self) -> usize {
        self.receives.len()
    }

    /// Sets the next answers to `call`; later calls get `Ready`.
    pub fn answer(&mut self, call: HostCall, answers: impl IntoIterator<Item = HostStatus>) {
        self.answers.entry(call).or_default().extend(answers);
    }

    pub fn call_count(&self, call: HostCall) -> u32 {
        self.calls.get(&call).copied().unwrap_or(0)
    }

    fn next(&mut self, call: HostCall) -> HostStatus {
        *self.calls.entry(call).or_default() += 1;
        self.answers.get_mut(&call).and_then(VecDeque::pop_front).unwrap_or(HostStatus::Ready)
    }

    fn apply(&mut self, call: HostCall, done: HostEffect) -> HostStatus {
        let verdict = self.next(call);
        if verdict == HostStatus::Ready {
            self.done.push(done);
        }
        verdict
    }
}

impl Host for ScriptedHost {
    fn take_receive(&mut self) -> Option<Receive> {
        match self.next(HostCall::TakeReceive) {
            HostStatus::Ready => self.receives.pop_front(),
            _ => None,
        }
    }

    fn may_access(&mut self, _: Access, _: Remote, _: u32) -> HostStatus {
        self.next(HostCall::MayAccess)
    }

    fn place(&mut self, to: Target, len: u32) -> HostStatus {
        let call = match to {
            Target::Receive { .. } => HostCall::PlaceReceive,
            Target::Grh { .. } => HostCall::PlaceGrh,
            Target::Remote(_) => HostCall::PlaceRemote,
            Target::Response { .. } => HostCall::PlaceResponse,
        };
        self.apply(call, HostEffect::Placed(to, len))
    }

    fn execute(&mut self, at: Remote, atomic: Atomic) -> Result<u64, HostStatus> {
        match self.apply(HostCall::Execute, HostEffect::Executed(at, atomic)) {
            HostStatus::Ready => {}
            other => return Err(other),
        }
        let before = self.atomic_word;
        self.atomic_word = match atomic {
            Atomic::FetchAdd { add } => before.wrapping_add(add),
            Atomic::CompareSwap { compare, swap } if compare == before => swap,
            Atomic::CompareSwap { .. } => before,
            // The masks are the host's concern; these tests check that it executes once.
            Atomic::MaskedCompareSwap { .. } | Atomic::MaskedFetchAdd { .. } => !before,
        };
        Ok(before)
    }

    fn invalidate(&mut self, key: u32) -> HostStatus {
        self.apply(HostCall::Invalidate, HostEffect::Invalidated(key))
    }

    fn bind(&mut self, bind: &MwBind) -> HostStatus {
        self.apply(HostCall::Bind, HostEffect::Bound(*bind))
    }

    fn store_result(&mut self, id: u64, value: u64) -> HostStatus {
        self.apply(HostCall::StoreResult, HostEffect::Stored(id, value))
    }

    fn hold(&mut self, slot: u32) -> bool {
        assert!(slot < HOLD_SLOTS);
        let verdict = self.next(HostCall::Hold) == HostStatus::Ready;
        if verdict {
            self.held.insert(slot, self.current.expect("a packet that is being handled"));
        }
        verdict
    }

    fn fetch(&mut self, from: Source, _: u32, _: usize) -> HostStatus {
        self.next(match from {
            Source::SendWr { .. } => HostCall::FetchWork,
            Source::Remote { .. } => HostCall::FetchRemote,
        })
    }
}
