//! A host that answers as a script says, and remembers what it was asked to do.

use std::collections::{BTreeMap, VecDeque};

use warpwire_proto::qp::{Access, Atomic, Host, Receive, Remote, Source, Target, Verdict};

/// The calls whose answers can be preset.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Call {
    TakeReceive,
    MayAccess,
    PlaceReceive,
    PlaceRoute,
    PlaceRemote,
    PlaceResponse,
    Execute,
    Invalidate,
    StoreResult,
    FetchWork,
    FetchRemote,
}

/// What was done, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Done {
    Placed(Target, u32),
    Executed(Remote, Atomic),
    Stored(u64, u64),
    Invalidated(u32),
}

#[derive(Debug, Default)]
pub struct Script {
    receives: VecDeque<Receive>,
    answers: BTreeMap<Call, VecDeque<Verdict>>,
    pub done: Vec<Done>,
    /// How often each call was made, whatever the answer.
    pub asked: BTreeMap<Call, u32>,
    /// The word that all atomics work on.
    pub word: u64,
}

impl Script {
    pub fn add_receive(&mut self, id: u64, capacity: u32) {
        self.receives.push_back(Receive { id, capacity });
    }

    pub fn receives_left(&self) -> usize {
        self.receives.len()
    }

    /// The next answers to that call; after them it is "yes".
    pub fn answer(&mut self, call: Call, answers: impl IntoIterator<Item = Verdict>) {
        self.answers.entry(call).or_default().extend(answers);
    }

    pub fn times_asked(&self, call: Call) -> u32 {
        self.asked.get(&call).copied().unwrap_or(0)
    }

    fn next(&mut self, call: Call) -> Verdict {
        *self.asked.entry(call).or_default() += 1;
        self.answers.get_mut(&call).and_then(VecDeque::pop_front).unwrap_or(Verdict::Yes)
    }

    fn act(&mut self, call: Call, done: Done) -> Verdict {
        let verdict = self.next(call);
        if verdict == Verdict::Yes {
            self.done.push(done);
        }
        verdict
    }
}

impl Host for Script {
    fn take_receive(&mut self) -> Option<Receive> {
        match self.next(Call::TakeReceive) {
            Verdict::Yes => self.receives.pop_front(),
            _ => None,
        }
    }

    fn may_access(&mut self, _: Access, _: Remote, _: u32) -> Verdict {
        self.next(Call::MayAccess)
    }

    fn place(&mut self, to: Target, len: u32) -> Verdict {
        let call = match to {
            Target::Receive { .. } => Call::PlaceReceive,
            Target::Route { .. } => Call::PlaceRoute,
            Target::Remote(_) => Call::PlaceRemote,
            Target::Response { .. } => Call::PlaceResponse,
        };
        self.act(call, Done::Placed(to, len))
    }

    fn execute(&mut self, at: Remote, atomic: Atomic) -> Result<u64, Verdict> {
        match self.act(Call::Execute, Done::Executed(at, atomic)) {
            Verdict::Yes => {}
            other => return Err(other),
        }
        let before = self.word;
        self.word = match atomic {
            Atomic::FetchAdd { add } => before.wrapping_add(add),
            Atomic::CompareSwap { compare, swap } if compare == before => swap,
            Atomic::CompareSwap { .. } => before,
            // What masks do is the host's business; that it is done once is not.
            Atomic::MaskedCompareSwap { .. } | Atomic::MaskedFetchAdd { .. } => !before,
        };
        Ok(before)
    }

    fn invalidate(&mut self, key: u32) -> Verdict {
        self.act(Call::Invalidate, Done::Invalidated(key))
    }

    fn store_result(&mut self, id: u64, value: u64) -> Verdict {
        self.act(Call::StoreResult, Done::Stored(id, value))
    }

    fn fetch(&mut self, from: Source, _: u32, _: usize) -> Verdict {
        self.next(match from {
            Source::Work { .. } => Call::FetchWork,
            Source::Remote { .. } => Call::FetchRemote,
        })
    }
}
