//! The asking half: posted work becomes requests, and goes back to the first unanswered one when an answer
//! stays away.
//!
//! ```text
//!            reported      tail         current      started        posted
//!  ring  ───────┼───────────┼─────────────┼────────────┼──────────────┼───▶
//!     told to   │ done, to  │ waiting for │ to be sent │ never begun  │ free
//!     the host  │ be told   │ answers     │ again      │              │
//!  PSNs                   unacked        next        unsent
//! ```
//!
//! Going back always goes to `unacked`: everything before it is answered, so that `current` becomes `tail`.
//! A read is asked for in pieces of at most `read_chunk` packets, each a request of its own on the wire;
//! that bounds what the peer streams at us, and lets a read that lost a packet go on from there.

use alloc::boxed::Box;
use alloc::vec;
use core::time::Duration;

use super::attr::Mtu;
use super::host::{Host, Remote, Source, Verdict};
use super::work::{Completion, Fence, Op, PostError, Status, Work};
use super::{Payload, Stats, Transmit};
use crate::psn::Psn;
use crate::time::Instant;
use crate::wire::ext::Reth;
use crate::wire::{Extension, Headers, Opcode};

/// The longest message.
pub(super) const LONGEST: u32 = 1 << 31;

/// What the requester needs to know about its queue pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub destination: u32,
    pub mtu: Mtu,
    /// How long to wait for an answer; `None` for ever.
    pub timeout: Option<Duration>,
    pub max_rd_atomic: u32,
    /// How many packets of the longest sort that RoCE knows may be unanswered.
    pub window: u32,
    /// How many packets one read request may ask for.
    pub read_chunk: u32,
}

impl Terms {
    /// How many packets may be unanswered when one of a message of that length is sent: fewer of those that are longer than RoCE's.
    /// What lies between two ends fills buffers by its bytes.
    #[inline]
    fn window_for(&self, len: u32) -> u32 {
        match len {
            0..=LONGEST_OF_ROCE => self.window,
            _ => as_many_bytes(self.window, len.min(self.mtu.bytes())),
        }
    }
}

/// The longest payload of a packet that RoCE knows.
const LONGEST_OF_ROCE: u32 = 4096;

/// So many packets of RoCE's longest, as packets of that length: at least one.
pub(super) fn as_many_bytes(packets: u32, len: u32) -> u32 {
    match len {
        0..=LONGEST_OF_ROCE => packets,
        _ => (packets / len.div_ceil(LONGEST_OF_ROCE)).max(1),
    }
}

/// Work in the ring, with the sequence numbers that it was given when it was begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub work: Work,
    pub first: Psn,
    pub packets: u32,
}

impl Entry {
    const EMPTY: Self = Self { work: Work::new(0, Op::Local, 0), first: Psn::new(0), packets: 0 };

    /// The number after its last.
    pub fn end(&self) -> Psn {
        self.first.add(self.packets)
    }
}

/// The requester's state. Ring positions run freely; numbers compare by distance.
#[derive(Debug)]
pub(super) struct Requester {
    ring: Box<[Entry]>,
    pub(super) reported: u32,
    pub(super) tail: u32,
    pub(super) current: u32,
    pub(super) started: u32,
    posted: u32,
    /// The first number without an answer.
    pub(super) unacked: Psn,
    /// The next number to send.
    pub(super) next: Psn,
    /// The first number that was never sent.
    pub(super) unsent: Psn,
    /// Read requests and atomics between `unacked` and `next`.
    pub(super) reading: u32,
    /// Packets since we last asked for an acknowledgement.
    since_request: u32,
    /// The number after the last packet that must be answered: the timer runs while it is ahead of `unacked`.
    asked: Psn,
    /// How often to try again, and how often that is still possible; refilled when answers come.
    pub(super) retry_count: u8,
    rnr_retry: u8,
    pub(super) retries_left: u8,
    pub(super) rnr_left: u8,
    /// How often in a row the host had no place for an answer.
    pub(super) faults: u8,
    /// When to stop waiting for an answer.
    pub(super) deadline: Instant,
    /// Not to send before: the peer was not ready.
    pub(super) resume: Instant,
    /// The value of `unacked` at which a missing answer already made us go back.
    pub(super) went_back_at: Option<Psn>,
    /// What the work at `tail` failed with.
    failure: Option<Status>,
}

impl Requester {
    pub(super) fn new(depth: u32) -> Self {
        let ring = vec![Entry::EMPTY; depth.max(1).next_power_of_two() as usize].into();
        Self {
            ring,
            reported: 0,
            tail: 0,
            current: 0,
            started: 0,
            posted: 0,
            unacked: Psn::new(0),
            next: Psn::new(0),
            unsent: Psn::new(0),
            reading: 0,
            since_request: 0,
            asked: Psn::new(0),
            retry_count: 0,
            rnr_retry: 0,
            retries_left: 0,
            rnr_left: 0,
            faults: 0,
            deadline: Instant::NEVER,
            resume: Instant::default(),
            went_back_at: None,
            failure: None,
        }
    }

    /// Forgets everything but its memory.
    pub(super) fn reset(&mut self) {
        let ring = core::mem::take(&mut self.ring);
        *self = Self { ring, ..Self::new(0) };
    }

    pub(super) fn begin_at(&mut self, psn: Psn) {
        (self.unacked, self.next, self.unsent, self.asked) = (psn, psn, psn, psn);
    }

    pub(super) fn set_retries(&mut self, retry_count: Option<u8>, rnr_retry: Option<u8>) {
        if let Some(count) = retry_count {
            (self.retry_count, self.retries_left) = (count, count);
        }
        if let Some(count) = rnr_retry {
            (self.rnr_retry, self.rnr_left) = (count, count);
        }
    }

    /// Answers have come up to `psn`: all tries begin anew.
    pub(super) fn answered_to(&mut self, psn: Psn) {
        self.unacked = psn;
        (self.retries_left, self.rnr_left) = (self.retry_count, self.rnr_retry);
        self.faults = 0;
    }

    pub(super) fn footprint(&self) -> usize {
        size_of_val(&*self.ring)
    }

    pub(super) fn entry(&self, position: u32) -> &Entry {
        &self.ring[position as usize & (self.ring.len() - 1)]
    }

    fn entry_mut(&mut self, position: u32) -> &mut Entry {
        let mask = self.ring.len() - 1;
        &mut self.ring[position as usize & mask]
    }

    /// How much work the ring holds that the host has not been told the end of.
    pub(super) fn held(&self) -> u32 {
        self.posted.wrapping_sub(self.reported)
    }

    pub(super) fn post(&mut self, work: Work, depth: u32) -> Result<(), PostError> {
        let wanted_len = match work.op {
            Op::Atomic(_, atomic) => work.len == atomic.len(),
            _ => work.len <= LONGEST,
        };
        if !wanted_len {
            return Err(PostError::Length(work.len));
        }
        if self.held() >= depth {
            return Err(PostError::Full);
        }
        *self.entry_mut(self.posted) = Entry { work, ..Entry::EMPTY };
        self.posted = self.posted.wrapping_add(1);
        Ok(())
    }

    /// Whether every message that was begun is done.
    pub(super) fn is_drained(&self) -> bool {
        self.tail == self.started
    }

    /// Whether there may be something to send now.
    pub(super) fn has_work(&self) -> bool {
        self.current != self.posted
    }

    /// Puts the next request into `packet`; tells whether there is one. `may_begin` tells whether a new message
    /// may be begun. `Err` fails the queue pair.
    #[inline]
    pub(super) fn poll_transmit<H: Host>(
        &mut self,
        now: Instant,
        terms: &Terms,
        may_begin: bool,
        host: &mut H,
        stats: &mut Stats,
        packet: &mut Transmit,
    ) -> Result<bool, Status> {
        if now < self.resume {
            return Ok(false);
        }
        while self.current != self.posted {
            let begins = self.current == self.started;
            if begins && !may_begin {
                return Ok(false);
            }
            let entry = self.entry(self.current);
            let at_start = begins || self.next == entry.first;
            let waits = match entry.work.fence {
                Fence::None => false,
                Fence::Reads => self.reading > 0,
                Fence::All => self.current != self.tail,
            };
            if at_start && waits {
                return Ok(false);
            }
            match entry.work.op {
                Op::Bad(status) if self.current == self.tail => return Err(status),
                Op::Bad(_) => return Ok(false),
                Op::Local => self.pass_local(begins),
                _ => return self.request(now, terms, begins, host, stats, packet),
            }
        }
        Ok(false)
    }

    /// Work that sends nothing: done as soon as all before it is.
    fn pass_local(&mut self, begins: bool) {
        if begins {
            let next = self.next;
            self.entry_mut(self.current).first = next;
            self.started = self.started.wrapping_add(1);
        }
        self.current = self.current.wrapping_add(1);
        self.settle(self.unacked);
    }

    #[inline(always)] // the only caller is hot, and seven arguments cost more than the body
    fn request<H: Host>(
        &mut self,
        now: Instant,
        terms: &Terms,
        begins: bool,
        host: &mut H,
        stats: &mut Stats,
        packet: &mut Transmit,
    ) -> Result<bool, Status> {
        let in_flight = self.next.distance_from(self.unacked) as u32;
        let (next, unsent, reading) = (self.next, self.unsent, self.reading);
        let is_last_open = self.current == self.tail;
        let entry = self.entry_mut(self.current);
        let awaits_data = entry.work.op.awaits_data();
        let window = terms.window_for(entry.work.len);
        // What goes again has been counted once: a limit that was lowered since must not hold it up.
        let is_new = next == unsent;
        if in_flight >= window || awaits_data && is_new && reading >= terms.max_rd_atomic {
            let never = awaits_data && terms.max_rd_atomic == 0 && is_last_open;
            return if never { Err(Status::LocalOperation) } else { Ok(false) };
        }
        if begins {
            // Harmless if it is not begun after all: the numbers are then given again.
            (entry.first, entry.packets) = (next, terms.mtu.packets(entry.work.len));
        }
        let entry = &*entry;
        let index = next.distance_from(entry.first) as u32;
        let headers = &mut packet.headers;
        let piece = Piece::at(entry, index, terms, headers);
        packet.payload = None;
        if piece.len > 0 {
            let from = Source::Work { id: entry.work.id, offset: piece.offset };
            match host.fetch(from, piece.len, headers.len()) {
                Verdict::Yes => {}
                Verdict::Refused if self.current == self.tail => {
                    return Err(Status::LocalProtection);
                }
                // What is refused fails in its turn, when all before it is answered.
                Verdict::NotNow | Verdict::Refused => return Ok(false),
            }
            packet.payload = Some(Payload { from, len: piece.len });
        }
        let is_last = index + piece.numbers == entry.packets;
        headers.solicited = is_last && entry.work.solicited && piece.can_solicit;
        headers.destination_qp = terms.destination;
        headers.psn = next;
        self.started = self.started.wrapping_add(u32::from(begins));
        self.current = self.current.wrapping_add(u32::from(is_last));
        self.reading += u32::from(awaits_data);
        stats.resent += u64::from(!is_new);
        self.since_request += 1;
        // Ask at the end of a message, before the window closes, now and then in between, and at once when
        // sending again: the answer may only have been lost.
        headers.ack_request = is_last
            || in_flight + piece.numbers >= window
            || self.since_request * 4 >= window
            || !is_new && next == self.unacked;
        self.next = next.add(piece.numbers);
        if self.next.distance_from(unsent) > 0 {
            self.unsent = self.next;
        }
        if headers.ack_request || awaits_data {
            self.since_request = 0;
            self.asked = self.next;
            if self.deadline == Instant::NEVER {
                self.restart_timer(now, terms);
            }
        }
        Ok(true)
    }

    /// Lets the timer begin anew, if an answer must come.
    pub(super) fn restart_timer(&mut self, now: Instant, terms: &Terms) {
        let waits = self.asked.distance_from(self.unacked) > 0;
        let timeout = terms.timeout.filter(|_| waits);
        self.deadline = timeout.map_or(Instant::NEVER, |timeout| now + timeout);
    }

    /// There is something to send, and no room for it on the link: the timer runs as if it had been sent, so that a peer who
    /// takes nothing any more is not waited for without end.
    pub(super) fn held_up(&mut self, now: Instant, terms: &Terms) {
        if self.deadline == Instant::NEVER && self.has_work() && self.resume <= now {
            self.deadline = terms.timeout.map_or(Instant::NEVER, |timeout| now + timeout);
        }
    }

    /// Sends again from the first number without an answer.
    pub(super) fn go_back(&mut self) {
        self.next = self.unacked;
        self.current = self.tail;
        self.asked = self.unacked;
        self.reading = 0;
        self.deadline = Instant::NEVER;
    }

    /// No answer came in time. `Err` fails the queue pair.
    pub(super) fn handle_timeout(&mut self, now: Instant, stats: &mut Stats) -> Result<(), Status> {
        if now < self.deadline {
            return Ok(());
        }
        stats.timeouts += 1;
        self.went_back_at = None;
        self.retry()
    }

    /// Goes back, if tries are left.
    pub(super) fn retry(&mut self) -> Result<(), Status> {
        self.retries_left = self.retries_left.checked_sub(1).ok_or(Status::RetryExceeded)?;
        self.go_back();
        Ok(())
    }

    /// The work at `tail` failed with `failure`; without one, nothing of our own failed, and all is flushed.
    pub(super) fn stop(&mut self, failure: Option<Status>) {
        self.failure = failure;
        self.deadline = Instant::NEVER;
        self.resume = Instant::default();
    }

    /// The end of the next work: a success, or, once the queue pair has failed, a failure.
    pub(super) fn poll_completion(&mut self, failed: bool) -> Option<Completion> {
        let status = if self.reported != self.tail {
            Status::Success
        } else if failed && self.reported != self.posted {
            let after = self.tail.wrapping_add(1);
            (self.tail, self.current, self.started) = (after, after, after);
            self.failure.take().unwrap_or(Status::Flushed)
        } else {
            return None;
        };
        let work = &self.entry(self.reported).work;
        let (id, signaled) = (work.id, work.signaled);
        self.reported = self.reported.wrapping_add(1);
        Some(Completion { id, status, signaled })
    }
}

/// What one packet of a request carries.
struct Piece {
    /// Where its payload begins in the message, and how long it is.
    offset: u32,
    len: u32,
    /// How many sequence numbers it takes.
    numbers: u32,
    can_solicit: bool,
}

impl Piece {
    /// The packet of that index; for a read, the request for what is left of the chunk that it lies in. Puts
    /// opcode and extension into `headers`.
    #[inline(always)]
    fn at(entry: &Entry, index: u32, terms: &Terms, headers: &mut Headers) -> Self {
        let work = &entry.work;
        let offset = terms.mtu.offset(index);
        let is_first = index == 0;
        let is_last = index + 1 == entry.packets;
        // Most packets of long messages are like that: they carry no extension, and none is put together.
        if !is_first && !is_last && !work.op.awaits_data() {
            headers.opcode = work.op.middle();
            headers.extension = Extension::None;
            let len = terms.mtu.bytes();
            return Self { offset, len, numbers: 1, can_solicit: false };
        }
        let len = if is_last { work.len.wrapping_sub(offset) } else { terms.mtu.bytes() };
        let (opcode, extension) = match work.op {
            Op::Read(at) => return Self::read(entry, index, terms, at, headers),
            Op::Atomic(at, atomic) => return Self::atomic(at, atomic, headers),
            Op::Write(at) => (WRITE.at(is_first, is_last), write_header(is_first, at, work.len)),
            Op::Send | Op::Local | Op::Bad(_) => (SEND.at(is_first, is_last), Extension::None),
            Op::SendImm(imm) if is_last => {
                let opcode = if is_first { Opcode::SendOnlyImm } else { Opcode::SendLastImm };
                (opcode, Extension::Imm(imm))
            }
            Op::SendInvalidate(key) if is_last => {
                let last = Opcode::SendLastInvalidate;
                let opcode = if is_first { Opcode::SendOnlyInvalidate } else { last };
                (opcode, Extension::Invalidate(key))
            }
            Op::SendImm(_) | Op::SendInvalidate(_) => (SEND.at(is_first, false), Extension::None),
            Op::WriteImm(at, imm) if is_last => {
                let reth = Reth { address: at.address, rkey: at.key, len: work.len };
                match is_first {
                    true => (Opcode::WriteOnlyImm, Extension::RethImm(reth, imm)),
                    false => (Opcode::WriteLastImm, Extension::Imm(imm)),
                }
            }
            Op::WriteImm(at, _) => {
                (WRITE.at(is_first, false), write_header(is_first, at, work.len))
            }
        };
        (headers.opcode, headers.extension) = (opcode, extension);
        let can_solicit = !matches!(work.op, Op::Write(_));
        Self { offset, len, numbers: 1, can_solicit }
    }

    fn read(entry: &Entry, index: u32, terms: &Terms, at: Remote, headers: &mut Headers) -> Self {
        let numbers = (entry.packets - index).min(terms.read_chunk - index % terms.read_chunk);
        let offset = terms.mtu.offset(index);
        let len = match index + numbers == entry.packets {
            true => entry.work.len - offset,
            false => terms.mtu.offset(numbers),
        };
        let from = at.forward(offset);
        headers.opcode = Opcode::ReadRequest;
        headers.extension = Extension::Reth(Reth { address: from.address, rkey: from.key, len });
        Self { offset, len: 0, numbers, can_solicit: false }
    }

    fn atomic(at: Remote, atomic: super::Atomic, headers: &mut Headers) -> Self {
        (headers.opcode, headers.extension) = super::atomic::request(at, atomic);
        Self { offset: 0, len: 0, numbers: 1, can_solicit: false }
    }
}

/// The four opcodes of an operation without extras.
struct Opcodes {
    first: Opcode,
    middle: Opcode,
    last: Opcode,
    only: Opcode,
}

const SEND: Opcodes = Opcodes {
    first: Opcode::SendFirst,
    middle: Opcode::SendMiddle,
    last: Opcode::SendLast,
    only: Opcode::SendOnly,
};
const WRITE: Opcodes = Opcodes {
    first: Opcode::WriteFirst,
    middle: Opcode::WriteMiddle,
    last: Opcode::WriteLast,
    only: Opcode::WriteOnly,
};

impl Opcodes {
    fn at(&self, is_first: bool, is_last: bool) -> Opcode {
        match (is_first, is_last) {
            (true, true) => self.only,
            (true, false) => self.first,
            (false, true) => self.last,
            (false, false) => self.middle,
        }
    }
}

fn write_header(is_first: bool, at: Remote, len: u32) -> Extension {
    match is_first {
        true => Extension::Reth(Reth { address: at.address, rkey: at.key, len }),
        false => Extension::None,
    }
}
