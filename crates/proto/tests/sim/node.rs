//! A node of the simulated network: memory, and queue pairs with an application behind each.

use std::collections::{BTreeSet, VecDeque};

use warpwire_proto::qp::{
    Access, Atomic, Fence, Host, HostStatus, RcQp, Receive, Remote, SendOp, SendWr, Source, Status,
    Target,
};

use crate::sim::random::{Random, byte_of, bytes_of};

/// Memory that peers may access. Keys are 0x1000 + the index of the connection that may use them.
#[derive(Debug, Default)]
pub struct SimMemory {
    pub bytes: Vec<u8>,
}

pub const BASE: u64 = 0x7f00_0000_0000;

impl SimMemory {
    /// Appends a range filled with the data of `name`, aligned to 8; returns its address.
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

/// A planned work request and its outcome.
#[derive(Clone, Debug)]
pub struct PlannedWr {
    pub work: SendWr,
    /// Seed of its data: the bytes sent, or the bytes that a read must return.
    pub name: u64,
    /// Data of a read as it arrives.
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

/// The application behind a queue pair.
#[derive(Debug, Default)]
pub struct App {
    pub key: u32,
    pub plan: Vec<PlannedWr>,
    pub posted: usize,
    pub completed: usize,
    /// Ids of posted receives.
    pub receives: VecDeque<u64>,
    pub receive_capacity: u32,
    pub in_use: VecDeque<Buffer>,
    /// Id of the next receive.
    pub next_receive: u64,
    /// Number of messages delivered to receives.
    pub delivered: usize,
    /// Values before each atomic that the peer executed here.
    pub executed: Vec<u64>,
    pub invalidated: Vec<u32>,
    /// Addresses of the peer's writes: each occurs once.
    pub written: BTreeSet<u64>,
    /// Probability per mille that memory is absent.
    pub page_faults: u32,
    /// Probability per mille that a packet cannot be kept.
    pub hold_failures: u32,
    /// Incoming messages are forged: accepted, but not compared.
    pub expects_forged_packets: bool,
    /// Next send PSN at the time of the drained event.
    pub drained_at: Option<warpwire_proto::Psn>,
    /// Set when a host call answered `Retry`: the application must poll again.
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
    pub qp: RcQp,
    pub app: App,
    /// The peer: node and connection index.
    pub peer: (usize, usize),
    pub timer: warpwire_proto::Instant,
    pub poll_scheduled: bool,
    /// Packets that are kept until their turn comes, by slot.
    pub held: Vec<Vec<u8>>,
    pub footprint: usize,
    /// Packets in flight, as its path has counted them, and whether it waits for room there.
    pub path_in_flight: u32,
    pub waits: bool,
    /// Whether `retry_count` is below 7.
    pub few_retries: bool,
}

#[derive(Debug)]
pub struct Node {
    pub memory: SimMemory,
    pub conns: Vec<SimConn>,
    pub alive: bool,
    /// Number of malformed packets.
    pub malformed: u64,
}

/// The queue pair's host while a packet is handled.
pub struct SimHost<'a> {
    pub memory: &'a mut SimMemory,
    pub app: &'a mut App,
    pub payload: &'a [u8],
    pub random: &'a mut Random,
    /// The whole packet, and where to keep it.
    pub frame: &'a [u8],
    pub held: &'a mut [Vec<u8>],
}

impl SimHost<'_> {
    pub fn fault(&mut self) -> bool {
        let fault = self.random.chance(self.app.page_faults);
        self.app.faulted |= fault;
        fault
    }

    fn check(&mut self, at: Remote, len: u32) -> HostStatus {
        if at.rkey != self.app.key || self.memory.slice(at, len).is_none() {
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
        assert_eq!(
            len as usize,
            self.payload.len(),
            "the length differs from the packet's payload"
        );
        match to {
            Target::Receive { id, offset } => {
                if self.fault() {
                    return HostStatus::Retry;
                }
                let buffer = self.app.in_use.back_mut().expect("a taken receive");
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
                assert_eq!(
                    read.len(),
                    offset as usize,
                    "invariant 1: data of a read is placed once"
                );
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
        assert!(planned.result.replace(value).is_none(), "invariant 4: a result is stored once");
        HostStatus::Ready
    }

    fn hold(&mut self, slot: u32) -> bool {
        assert!(!self.frame.is_empty(), "no packet is being handled");
        // A store that is full refuses.
        let refused = self.random.chance(self.app.hold_failures);
        if !refused {
            self.held[slot as usize] = self.frame.to_vec();
        }
        !refused
    }

    fn fetch(&mut self, from: Source, len: u32, _: usize) -> HostStatus {
        match from {
            Source::Remote { at, .. } => self.check(at, len),
            Source::SendWr { .. } if self.fault() => HostStatus::Retry,
            Source::SendWr { .. } => HostStatus::Ready,
        }
    }
}

/// Whether the conditions of a request's fence are met.
pub fn fence_holds(app: &App, index: usize) -> bool {
    let is_done = |planned: &PlannedWr| match planned.work.op {
        SendOp::Read(_) => planned.read.len() == planned.work.len as usize,
        SendOp::Atomic(..) => planned.result.is_some(),
        _ => true,
    };
    match app.plan[index].work.fence {
        Fence::None => true,
        Fence::Reads => app.plan[..index].iter().all(is_done),
        // Local work may be complete but not reported yet.
        Fence::All => app.plan[app.completed..index].iter().all(|p| p.work.op == SendOp::Local),
    }
}

/// The payload of an outgoing packet.
pub fn fetch(memory: &mut SimMemory, app: &App, from: Source, len: u32) -> Vec<u8> {
    match from {
        Source::SendWr { id, offset } => {
            let planned = &app.plan[id as usize];
            assert!(offset + len <= planned.work.len, "payload beyond its message");
            assert!(fence_holds(app, id as usize), "a fenced request was sent too early");
            (offset..offset + len).map(|at| byte_of(planned.name, at)).collect()
        }
        Source::Remote { at, .. } => memory.slice(at, len).expect("a checked range").to_vec(),
    }
}

/// Adds bit by bit, dropping the carry out of the boundary bits.
fn masked_add(before: u64, add: u64, boundary: u64) -> u64 {
    let (mut sum, mut carry) = (0, 0);
    for bit in 0..64 {
        let total = (before >> bit & 1) + (add >> bit & 1) + carry;
        sum |= (total & 1) << bit;
        carry = if boundary >> bit & 1 == 1 { 0 } else { total >> 1 };
    }
    sum
}

/// Whether the operation consumes a receive of the peer.
pub fn takes_receive(op: &SendOp) -> bool {
    matches!(
        op,
        SendOp::Send | SendOp::SendImm(_) | SendOp::SendInvalidate(_) | SendOp::WriteImm(..)
    )
}
