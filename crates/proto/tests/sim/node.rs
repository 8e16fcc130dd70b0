//! A machine of the virtual network: memory, and queue pairs with a user behind each.

use std::collections::{BTreeSet, VecDeque};

use warpwire_proto::qp::{
    Access, Atomic, Fence, Host, Op, Qp, Receive, Remote, Source, Status, Target, Verdict, Work,
};

use crate::sim::random::{Random, byte_of, bytes_of};

/// Memory that peers may reach. Keys are 0x1000 + the index of the side that may use them.
#[derive(Debug, Default)]
pub struct Memory {
    pub bytes: Vec<u8>,
}

pub const BASE: u64 = 0x7f00_0000_0000;

impl Memory {
    /// A fresh range, filled with the data that `name` stands for, aligned to 8.
    pub fn range(&mut self, len: u32, name: u64) -> u64 {
        let start = self.bytes.len().next_multiple_of(8);
        self.bytes.resize(start, 0);
        self.bytes.extend(bytes_of(name, 0, len));
        BASE + start as u64
    }

    pub fn slice(&mut self, at: Remote, len: u32) -> Option<&mut [u8]> {
        let start = at.address.checked_sub(BASE)? as usize;
        self.bytes.get_mut(start..start.checked_add(len as usize)?)
    }

    pub fn word(&mut self, at: Remote) -> Option<u64> {
        let bytes = self.slice(at, 8)?;
        Some(u64::from_le_bytes(bytes.try_into().unwrap()))
    }
}

/// Work of the plan, and what became of it.
#[derive(Clone, Debug)]
pub struct Planned {
    pub work: Work,
    /// What its data is called: sent bytes, or those that must be read.
    pub name: u64,
    /// The data of a read, as it arrives; the result of an atomic.
    pub read: Vec<u8>,
    pub result: Option<u64>,
    pub status: Option<Status>,
}

/// A receive in use.
#[derive(Clone, Debug)]
pub struct Buffer {
    pub id: u64,
    pub bytes: Vec<u8>,
}

/// The user behind a queue pair.
#[derive(Debug, Default)]
pub struct App {
    pub key: u32,
    pub plan: Vec<Planned>,
    pub posted: usize,
    pub completed: usize,
    /// Receives that wait for a message, by id.
    pub receives: VecDeque<u64>,
    pub receive_capacity: u32,
    pub in_use: VecDeque<Buffer>,
    /// How many receives were made.
    pub made: u64,
    /// How many messages with a receive have come in whole.
    pub delivered: usize,
    /// Atomics that the peer had executed here: what was there before each.
    pub executed: Vec<u64>,
    pub invalidated: Vec<u32>,
    /// Where the peer's writes were placed: each place once.
    pub written: BTreeSet<u64>,
    /// Chance, in thousandths, that memory is not there at the moment.
    pub page_faults: u32,
    /// What comes in was not sent by the peer: it is taken, and not compared.
    pub expects_forgeries: bool,
    /// Where the send queue stood when it said that it was drained.
    pub drained_at: Option<warpwire_proto::Psn>,
    /// Set when an answer was "not now": the user must poll again.
    pub faulted: bool,
}

impl App {
    pub fn is_done(&self) -> bool {
        self.completed == self.plan.len()
    }

    pub fn make_receive(&mut self) {
        self.receives.push_back(self.made);
        self.made += 1;
    }
}

/// One end of a connection.
#[derive(Debug)]
pub struct Side {
    pub qp: Qp,
    pub app: App,
    /// The other end: node and side.
    pub peer: (usize, usize),
    pub timer: warpwire_proto::Instant,
    pub poll_planned: bool,
    pub footprint: usize,
    /// It gives up before the seventh try.
    pub few_tries: bool,
}

#[derive(Debug)]
pub struct Node {
    pub memory: Memory,
    pub sides: Vec<Side>,
    pub alive: bool,
    /// Packets that were no packets, by reason.
    pub malformed: u64,
}

/// What the queue pair sees of its node while a packet is handled.
pub struct View<'a> {
    pub memory: &'a mut Memory,
    pub app: &'a mut App,
    pub payload: &'a [u8],
    pub random: &'a mut Random,
}

impl View<'_> {
    fn fault(&mut self) -> bool {
        let fault = self.random.chance(self.app.page_faults);
        self.app.faulted |= fault;
        fault
    }

    fn check(&mut self, at: Remote, len: u32) -> Verdict {
        if at.key != self.app.key || self.memory.slice(at, len).is_none() {
            Verdict::Refused
        } else if self.fault() {
            Verdict::NotNow
        } else {
            Verdict::Yes
        }
    }
}

impl Host for View<'_> {
    fn take_receive(&mut self) -> Option<Receive> {
        let id = self.app.receives.pop_front()?;
        let capacity = self.app.receive_capacity;
        self.app.in_use.push_back(Buffer { id, bytes: Vec::new() });
        Some(Receive { id, capacity })
    }

    fn may_access(&mut self, _: Access, at: Remote, len: u32) -> Verdict {
        self.check(at, len)
    }

    fn place(&mut self, to: Target, len: u32) -> Verdict {
        assert_eq!(len as usize, self.payload.len(), "the payload is that of the packet at hand");
        match to {
            Target::Receive { id, offset } => {
                if self.fault() {
                    return Verdict::NotNow;
                }
                let buffer = self.app.in_use.back_mut().expect("a receive was taken");
                assert_eq!((buffer.id, buffer.bytes.len()), (id, offset as usize), "invariant 1");
                buffer.bytes.extend_from_slice(self.payload);
                Verdict::Yes
            }
            Target::Remote(at) => {
                let verdict = self.check(at, len);
                if verdict == Verdict::Yes {
                    let once = self.app.expects_forgeries || self.app.written.insert(at.address);
                    assert!(once, "invariant 1: a write is placed once");
                    self.memory.slice(at, len).unwrap().copy_from_slice(self.payload);
                }
                verdict
            }
            Target::Response { id, offset } => {
                if self.fault() {
                    return Verdict::NotNow;
                }
                let read = &mut self.app.plan[id as usize].read;
                assert_eq!(read.len(), offset as usize, "invariant 1: data of a read comes once");
                read.extend_from_slice(self.payload);
                Verdict::Yes
            }
            Target::Route { .. } => Verdict::Refused,
        }
    }

    fn execute(&mut self, at: Remote, atomic: Atomic) -> Result<u64, Verdict> {
        match self.check(at, 8) {
            Verdict::Yes => {}
            other => return Err(other),
        }
        let before = self.memory.word(at).unwrap();
        let after = match atomic {
            Atomic::FetchAdd { add } => before.wrapping_add(add),
            Atomic::CompareSwap { compare, swap } if compare == before => swap,
            Atomic::CompareSwap { .. } => before,
            Atomic::MaskedFetchAdd { add, boundary, .. } => masked_add(before, add, boundary),
            Atomic::MaskedCompareSwap { compare, swap, compare_mask, swap_mask, .. } => {
                match (before ^ compare) & compare_mask {
                    0 => before & !swap_mask | swap & swap_mask,
                    _ => before,
                }
            }
        };
        self.memory.slice(at, 8).unwrap().copy_from_slice(&after.to_le_bytes());
        self.app.executed.push(before);
        Ok(before)
    }

    fn invalidate(&mut self, key: u32) -> Verdict {
        self.app.invalidated.push(key);
        Verdict::Yes
    }

    fn store_result(&mut self, id: u64, value: u64) -> Verdict {
        if self.fault() {
            return Verdict::NotNow;
        }
        let planned = &mut self.app.plan[id as usize];
        assert!(planned.result.replace(value).is_none(), "invariant 4: a result comes once");
        Verdict::Yes
    }

    fn fetch(&mut self, from: Source, len: u32, _: usize) -> Verdict {
        match from {
            Source::Remote { at, .. } => self.check(at, len),
            Source::Work { .. } if self.fault() => Verdict::NotNow,
            Source::Work { .. } => Verdict::Yes,
        }
    }
}

/// Whether everything that fenced work waits for is done.
pub fn fence_holds(app: &App, index: usize) -> bool {
    let is_done = |planned: &Planned| match planned.work.op {
        Op::Read(_) => planned.read.len() == planned.work.len as usize,
        Op::Atomic(..) => planned.result.is_some(),
        _ => true,
    };
    match app.plan[index].work.fence {
        Fence::None => true,
        Fence::Reads => app.plan[..index].iter().all(is_done),
        // Work that sends nothing may be done and not told yet.
        Fence::All => app.plan[app.completed..index].iter().all(|p| p.work.op == Op::Local),
    }
}

/// The payload of a packet that goes out.
pub fn fetch(memory: &mut Memory, app: &App, from: Source, len: u32) -> Vec<u8> {
    match from {
        Source::Work { id, offset } => {
            let planned = &app.plan[id as usize];
            assert!(offset + len <= planned.work.len, "payload lies inside its message");
            assert!(fence_holds(app, id as usize), "a fence holds back what is behind it");
            (offset..offset + len).map(|at| byte_of(planned.name, at)).collect()
        }
        Source::Remote { at, .. } => memory.slice(at, len).expect("it was checked").to_vec(),
    }
}

/// Bit by bit, dropping the carry out of the marked ones.
fn masked_add(before: u64, add: u64, boundary: u64) -> u64 {
    let (mut sum, mut carry) = (0, 0);
    for bit in 0..64 {
        let total = (before >> bit & 1) + (add >> bit & 1) + carry;
        sum |= (total & 1) << bit;
        carry = if boundary >> bit & 1 == 1 { 0 } else { total >> 1 };
    }
    sum
}

/// Whether work takes a receive of the peer.
pub fn takes_receive(op: &Op) -> bool {
    matches!(op, Op::Send | Op::SendImm(_) | Op::SendInvalidate(_) | Op::WriteImm(..))
}
