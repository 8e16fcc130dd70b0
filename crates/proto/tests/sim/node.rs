//! A machine of the virtual network: memory, and queue pairs with a user behind each.

use std::collections::{BTreeSet, VecDeque};

use warpwire_proto::qp::{
    Access, Atomic, Fence, Host, HostStatus, Qp, Receive, Remote, SendWr, Source, Status, Target,
    WrOp,
};

use crate::sim::random::{Random, byte_of, bytes_of};

/// Memory that peers may reach. Keys are 0x1000 + the index of the side that may use them.
#[derive(Debug, Default)]
pub struct SimMemory {
    pub bytes: Vec<u8>,
}

pub const BASE: u64 = 0x7f00_0000_0000;

impl SimMemory {
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
pub struct PlannedWr {
    pub work: SendWr,
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
    pub plan: Vec<PlannedWr>,
    pub posted: usize,
    pub completed: usize,
    /// Receives that wait for a message, by id.
    pub receives: VecDeque<u64>,
    pub receive_capacity: u32,
    pub in_use: VecDeque<Buffer>,
    /// How many receives were made.
    pub next_receive: u64,
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
    pub expects_forged_packets: bool,
    /// Where the send queue stood when it said that it was drained.
    pub drained_at: Option<warpwire_proto::Psn>,
    /// Set when an answer was "not now": the user must poll again.
    pub faulted: bool,
}

impl App {
    pub fn is_done(&self) -> bool {
        self.completed == self.plan.len()
    }

    pub fn post_receive(&mut self) {
        self.receives.push_back(self.next_receive);
        self.next_receive += 1;
    }
}

/// One end of a connection.
#[derive(Debug)]
pub struct SimConn {
    pub qp: Qp,
    pub app: App,
    /// The other end: node and side.
    pub peer: (usize, usize),
    pub timer: warpwire_proto::Instant,
    pub poll_scheduled: bool,
    pub footprint: usize,
    /// It gives up before the seventh try.
    pub few_retries: bool,
}

#[derive(Debug)]
pub struct Node {
    pub memory: SimMemory,
    pub conns: Vec<SimConn>,
    pub alive: bool,
    /// Packets that were no packets, by reason.
    pub malformed: u64,
}

/// What the queue pair sees of its node while a packet is handled.
pub struct SimHost<'a> {
    pub memory: &'a mut SimMemory,
    pub app: &'a mut App,
    pub payload: &'a [u8],
    pub random: &'a mut Random,
}

impl SimHost<'_> {
    fn fault(&mut self) -> bool {
        let fault = self.random.chance(self.app.page_faults);
        self.app.faulted |= fault;
        fault
    }

    fn check(&mut self, at: Remote, len: u32) -> HostStatus {
        if at.key != self.app.key || self.memory.slice(at, len).is_none() {
            HostStatus::Denied
        } else if self.fault() {
            HostStatus::Retry
        } else {
            HostStatus::Ready
        }
    }
}

impl Host for SimHost<'_> {
    fn take_receive(&mut self) -> Option<Receive> {
        let id = self.app.receives.pop_front()?;
        let capacity = self.app.receive_capacity;
        self.app.in_use.push_back(Buffer { id, bytes: Vec::new() });
        Some(Receive { id, capacity })
    }

    fn may_access(&mut self, _: Access, at: Remote, len: u32) -> HostStatus {
        self.check(at, len)
    }

    fn place(&mut self, to: Target, len: u32) -> HostStatus {
        assert_eq!(len as usize, self.payload.len(), "the payload is that of the packet at hand");
        match to {
            Target::Receive { id, offset } => {
                if self.fault() {
                    return HostStatus::Retry;
                }
                let buffer = self.app.in_use.back_mut().expect("a receive was taken");
                assert_eq!((buffer.id, buffer.bytes.len()), (id, offset as usize), "invariant 1");
                buffer.bytes.extend_from_slice(self.payload);
                HostStatus::Ready
            }
            Target::Remote(at) => {
                let verdict = self.check(at, len);
                if verdict == HostStatus::Ready {
                    let once =
                        self.app.expects_forged_packets || self.app.written.insert(at.address);
                    assert!(once, "invariant 1: a write is placed once");
                    self.memory.slice(at, len).unwrap().copy_from_slice(self.payload);
                }
                verdict
            }
            Target::Response { id, offset } => {
                if self.fault() {
                    return HostStatus::Retry;
                }
                let read = &mut self.app.plan[id as usize].read;
                assert_eq!(read.len(), offset as usize, "invariant 1: data of a read comes once");
                read.extend_from_slice(self.payload);
                HostStatus::Ready
            }
            Target::Grh { .. } => HostStatus::Denied,
        }
    }

    fn execute(&mut self, at: Remote, atomic: Atomic) -> Result<u64, HostStatus> {
        match self.check(at, 8) {
            HostStatus::Ready => {}
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

    fn invalidate(&mut self, key: u32) -> HostStatus {
        self.app.invalidated.push(key);
        HostStatus::Ready
    }

    fn store_result(&mut self, id: u64, value: u64) -> HostStatus {
        if self.fault() {
            return HostStatus::Retry;
        }
        let planned = &mut self.app.plan[id as usize];
        assert!(planned.result.replace(value).is_none(), "invariant 4: a result comes once");
        HostStatus::Ready
    }

    fn fetch(&mut self, from: Source, len: u32, _: usize) -> HostStatus {
        match from {
            Source::Remote { at, .. } => self.check(at, len),
            Source::SendWr { .. } if self.fault() => HostStatus::Retry,
            Source::SendWr { .. } => HostStatus::Ready,
        }
    }
}

/// Whether everything that fenced work waits for is done.
pub fn fence_holds(app: &App, index: usize) -> bool {
    let is_done = |planned: &PlannedWr| match planned.work.op {
        WrOp::Read(_) => planned.read.len() == planned.work.len as usize,
        WrOp::Atomic(..) => planned.result.is_some(),
        _ => true,
    };
    match app.plan[index].work.fence {
        Fence::None => true,
        Fence::Reads => app.plan[..index].iter().all(is_done),
        // Work that sends nothing may be done and not told yet.
        Fence::All => app.plan[app.completed..index].iter().all(|p| p.work.op == WrOp::Local),
    }
}

/// The payload of a packet that goes out.
pub fn fetch(memory: &mut SimMemory, app: &App, from: Source, len: u32) -> Vec<u8> {
    match from {
        Source::SendWr { id, offset } => {
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
pub fn takes_receive(op: &WrOp) -> bool {
    matches!(op, WrOp::Send | WrOp::SendImm(_) | WrOp::SendInvalidate(_) | WrOp::WriteImm(..))
}
