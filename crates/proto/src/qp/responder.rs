//! The answering half: requests are executed once and in order, and answered as often as they are asked.
//!
//! A request is judged in this order: its number, its place in its message, the queue pair's access flags,
//! resources (a receive, a record for a read or atomic), its length, the memory that it names. Whatever is
//! not ready leaves the state as it was, so that the peer may come again.

use super::Discard;
use super::host::{Access, Host, Receive, Remote, Target, Verdict};
use super::requester::LONGEST;
use super::saved::{Asked, Saved, SavedRing};
use super::work::{Carried, Notice, Receipt, Status};
use super::{Arrived, MOST_PACKETS, Mtu, Stats};
use crate::psn::Psn;
use crate::wire::ext::Reth;
use crate::wire::{Extension, Headers, Nak, Opcode};

/// What the responder needs to know about its queue pair.
#[derive(Clone, Copy, Debug)]
pub(super) struct Terms {
    pub destination: u32,
    pub mtu: Mtu,
    pub access: Access,
    pub min_rnr_timer: u8,
}

/// The message that is coming in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Message {
    None,
    Send { receive: Receive, len: u32 },
    Write { at: Remote, done: u32, total: u32 },
}

/// What to tell the peer, after all reads and atomics have been answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reply {
    None,
    /// All before the expected number is done.
    Ack,
    /// The expected number is missing: this one came before it.
    Sequence(Psn),
    /// Come again for the expected number.
    NotReady,
    /// Come again for this number: the data that a read asks for is not there now.
    Stalled(Psn),
    /// This number failed, and with it the queue pair.
    Fatal(Nak, Psn),
}

/// Why a request was not executed.
enum Stop {
    /// The peer is to come again: there is no receive.
    NotReady,
    /// The peer is to come again: the memory is not there now.
    Absent,
    /// The host has not taken the last receipt: as if the packet had been lost.
    Busy,
    /// The queue pair fails.
    Fatal { nak: Nak, receive: Status, notice: Notice },
}

impl Stop {
    #[cold]
    fn invalid() -> Self {
        let (nak, receive) = (Nak::InvalidRequest, Status::RemoteInvalidRequest);
        Self::Fatal { nak, receive, notice: Notice::RequestError }
    }

    #[cold]
    fn too_long() -> Self {
        let (nak, receive) = (Nak::InvalidRequest, Status::LocalLength);
        Self::Fatal { nak, receive, notice: Notice::RequestError }
    }

    #[cold]
    fn access() -> Self {
        let (nak, receive) = (Nak::RemoteAccess, Status::LocalAccess);
        Self::Fatal { nak, receive, notice: Notice::AccessError }
    }

    #[cold]
    fn operation() -> Self {
        let (nak, receive) = (Nak::RemoteOperational, Status::LocalProtection);
        Self::Fatal { nak, receive, notice: Notice::Fatal }
    }
}

/// Whether to go on, where a refusal means `refused`.
fn judge(verdict: Verdict, refused: fn() -> Stop) -> Result<(), Stop> {
    match verdict {
        Verdict::Yes => Ok(()),
        Verdict::NotNow => Err(Stop::Absent),
        Verdict::Refused => Err(refused()),
    }
}

/// What became of a request.
pub(super) enum Outcome {
    /// It was executed.
    Used,
    /// It was not.
    Dropped(Discard),
    /// It fails the queue pair.
    Failed(Notice),
}

/// The responder's state.
#[derive(Debug)]
pub(super) struct Responder {
    /// The number that is to come next.
    pub(super) expected: Psn,
    /// Messages completed, modulo 2^24.
    pub(super) completed: u32,
    message: Message,
    /// A receive that was taken for a packet that then had to be refused for now.
    taken: Option<Receive>,
    /// Set while the peer knows that `expected` is missing: the highest number that came since we said so.
    told: Option<Psn>,
    /// The last number of a send or write that was executed. An acknowledgement bears it and no later one: of
    /// reads and atomics only their data tells.
    pub(super) acknowledged: Psn,
    pub(super) reply: Reply,
    pub(super) saved: SavedRing,
    /// The data that is to be sent next was not there when it was last asked for.
    pub(super) stalled: bool,
    /// The peer has been told to come later for it, and has not got it yet.
    pub(super) parked: bool,
    /// How often in a row the memory for the expected number was not there.
    pub(super) absences: u8,
    receipt: Option<Receipt>,
    /// What failed the queue pair; said again when the peer asks again.
    fatal: Option<(Nak, Psn)>,
}

impl Responder {
    pub(super) fn new() -> Self {
        Self {
            expected: Psn::new(0),
            completed: 0,
            message: Message::None,
            taken: None,
            told: None,
            acknowledged: Psn::new(0),
            reply: Reply::None,
            saved: SavedRing::new(0),
            stalled: false,
            parked: false,
            absences: 0,
            receipt: None,
            fatal: None,
        }
    }

    /// Whether the peer is still owed the reason of our failure.
    pub(super) fn owes_last_words(&self) -> bool {
        matches!(self.reply, Reply::Fatal(..))
    }

    pub(super) fn has_receipt(&self) -> bool {
        self.receipt.is_some()
    }

    /// The end of a receive; once the queue pair has failed, also of one whose message will not end.
    pub(super) fn poll_receipt(&mut self, failed: bool) -> Option<Receipt> {
        if let Some(receipt) = self.receipt.take() {
            return Some(receipt);
        }
        if !failed {
            return None;
        }
        let receive = self.receive_in_use()?;
        Some(receipt_of(receive.id, Status::Flushed, 0, Carried::Data))
    }

    /// The receive of the message that is coming in, taken out of it.
    fn receive_in_use(&mut self) -> Option<Receive> {
        let of_message = match core::mem::replace(&mut self.message, Message::None) {
            Message::Send { receive, .. } => Some(receive),
            _ => None,
        };
        of_message.or(self.taken.take())
    }

    pub(super) fn handle_request<H: Host>(
        &mut self,
        terms: &Terms,
        arrived: &Arrived<'_>,
        host: &mut H,
        stats: &mut Stats,
    ) -> Outcome {
        let psn = arrived.headers.psn;
        let distance = psn.distance_from(self.expected);
        if distance > 0 {
            self.gap(psn);
            return Outcome::Dropped(Discard::Gap);
        }
        if distance < 0 {
            return Outcome::Dropped(self.duplicate(terms, arrived.headers));
        }
        match self.execute(terms, arrived, host) {
            Ok(()) => {
                self.told = None;
                self.absences = 0;
                Outcome::Used
            }
            Err(stop @ (Stop::NotReady | Stop::Absent)) => {
                // Nobody knows how long it takes: each time the peer is asked for more patience.
                let absent = matches!(stop, Stop::Absent);
                self.absences = if absent { self.absences.saturating_add(1) } else { 0 };
                self.reply = Reply::NotReady;
                self.told = Some(psn);
                stats.rnr_sent += 1;
                Outcome::Dropped(Discard::Busy)
            }
            Err(Stop::Busy) => Outcome::Dropped(Discard::Busy),
            Err(Stop::Fatal { nak, receive, notice }) => {
                if let Some(taken) = self.receive_in_use() {
                    self.receipt = Some(receipt_of(taken.id, receive, 0, Carried::Data));
                }
                self.fail(nak, psn);
                Outcome::Failed(notice)
            }
        }
    }

    pub(super) fn fail(&mut self, nak: Nak, psn: Psn) {
        self.fatal = Some((nak, psn));
        self.reply = Reply::Fatal(nak, psn);
    }

    /// A request with that number after the failure. The peer may have missed the reason: say it again.
    ///
    /// What failed may have been data that the peer has: a copy of its request that came late began the answer anew. It
    /// would not listen to that number any more: then the reason is given for the one that it asks for, or for the first
    /// one that was not executed, so that nothing is acknowledged that was not done.
    pub(super) fn repeat_last_words(&mut self, asked: Psn) {
        if let Some((nak, psn)) = self.fatal {
            let first = if asked.distance_from(self.expected) > 0 { self.expected } else { asked };
            let psn = if first.distance_from(psn) > 0 { first } else { psn };
            self.reply = Reply::Fatal(nak, psn);
        }
    }

    /// A request from behind one that has not come: say so once, and again when the peer has gone back and
    /// the number is missing still, which shows in a number that is not beyond those that came since.
    fn gap(&mut self, psn: Psn) {
        if self.told.is_none_or(|highest| psn.distance_from(highest) <= 0) {
            self.reply = Reply::Sequence(psn);
        }
        self.told = Some(psn);
    }

    /// A request that was executed before: answered again, never executed again.
    fn duplicate(&mut self, terms: &Terms, headers: &Headers) -> Discard {
        let psn = headers.psn;
        // It asks for the very data that is missing, and so has all before it.
        let misses = |saved: &mut Saved| saved.first.add(saved.next) == psn;
        let stalled = self.stalled && self.saved.pending().is_some_and(misses);
        let found = match headers.extension {
            Extension::Reth(reth) if headers.opcode == Opcode::ReadRequest => {
                if reth.len > LONGEST {
                    return Discard::Forgotten;
                }
                self.saved.ask_again(psn, terms.mtu.packets(reth.len), |saved, index| {
                    let Asked::Read { at, len } = saved.asked else { return false };
                    let offset = terms.mtu.offset(index);
                    let same_place = at.forward(offset).address == reth.address;
                    // It may stop short of the end, but at the end of a packet: packets are whole.
                    let whole = reth.len == terms.mtu.offset(terms.mtu.packets(reth.len));
                    let left = len.wrapping_sub(offset);
                    let fits = offset <= len && (reth.len == left || whole && reth.len < left);
                    at.key == reth.rkey && (same_place || len == 0) && fits
                })
            }
            Extension::Atomic(_) | Extension::MaskedAtomic(_) => {
                self.saved.ask_again(psn, 1, |saved, _| matches!(saved.asked, Asked::Atomic { .. }))
            }
            _ => {
                if self.reply == Reply::None {
                    self.reply = Reply::Ack;
                }
                true
            }
        };
        if found && stalled {
            self.park(psn);
        }
        if found { Discard::Duplicate } else { Discard::Forgotten }
    }

    /// The peer waits for data that is not there: so that it does not give up, it is told to come later. What stands
    /// behind that data it will ask for again too.
    #[cold]
    pub(super) fn park(&mut self, psn: Psn) {
        if self.fatal.is_none() {
            self.saved.park();
            self.reply = Reply::Stalled(psn);
            (self.stalled, self.parked) = (false, true);
            self.absences = self.absences.saturating_add(1);
        }
    }

    #[inline(always)]
    fn execute<H: Host>(
        &mut self,
        terms: &Terms,
        arrived: &Arrived<'_>,
        host: &mut H,
    ) -> Result<(), Stop> {
        let (headers, len) = (arrived.headers, arrived.payload_len);
        let (opcode, extension) = (headers.opcode, headers.extension);
        use Opcode as O;
        match opcode {
            O::SendFirst | O::SendOnly | O::SendOnlyImm | O::SendOnlyInvalidate => {
                self.must_be_between_messages()?;
                let receive = self.receive(host)?;
                check_len(terms.mtu, opcode == O::SendFirst, true, len)?;
                self.send_packet(headers, receive, 0, len, host)
            }
            O::SendMiddle | O::SendLast | O::SendLastImm | O::SendLastInvalidate => {
                let Message::Send { receive, len: done } = self.message else {
                    return Err(Stop::invalid());
                };
                check_len(terms.mtu, opcode == O::SendMiddle, false, len)?;
                self.send_packet(headers, receive, done, len, host)
            }
            O::WriteFirst | O::WriteOnly | O::WriteOnlyImm => {
                self.must_be_between_messages()?;
                must_allow(terms.access, Access::REMOTE_WRITE)?;
                if opcode == O::WriteOnlyImm {
                    self.receive(host)?;
                }
                check_len(terms.mtu, opcode == O::WriteFirst, true, len)?;
                let (Extension::Reth(reth) | Extension::RethImm(reth, _)) = extension else {
                    return Err(Stop::invalid());
                };
                self.begin_write(headers, reth, len, host)
            }
            O::WriteMiddle | O::WriteLast | O::WriteLastImm => {
                let Message::Write { at, done, total } = self.message else {
                    return Err(Stop::invalid());
                };
                must_allow(terms.access, Access::REMOTE_WRITE)?;
                if opcode == O::WriteLastImm {
                    self.receive(host)?;
                }
                check_len(terms.mtu, opcode == O::WriteMiddle, false, len)?;
                self.write_packet(headers, (at, done, total), len, host)
            }
            O::ReadRequest => {
                self.must_be_between_messages()?;
                must_allow(terms.access, Access::REMOTE_READ)?;
                let Extension::Reth(reth) = extension else { return Err(Stop::invalid()) };
                self.read(terms, headers.psn, reth, len, host)
            }
            O::CompareSwap
            | O::FetchAdd
            | O::MaskedCompareSwap
            | O::MaskedFetchAdd
            | O::MaskedCompareSwap4
            | O::MaskedFetchAdd4 => {
                self.must_be_between_messages()?;
                must_allow(terms.access, Access::REMOTE_ATOMIC)?;
                self.atomic(headers, len, host)
            }
            _ => Err(Stop::invalid()),
        }
    }

    fn must_be_between_messages(&self) -> Result<(), Stop> {
        if self.message == Message::None { Ok(()) } else { Err(Stop::invalid()) }
    }

    /// The receive for the message at hand: one that was taken for it before, or the next.
    fn receive<H: Host>(&mut self, host: &mut H) -> Result<Receive, Stop> {
        self.taken = self.taken.or_else(|| host.take_receive());
        self.taken.ok_or(Stop::NotReady)
    }

    fn send_packet<H: Host>(
        &mut self,
        headers: &Headers,
        receive: Receive,
        done: u32,
        len: u32,
        host: &mut H,
    ) -> Result<(), Stop> {
        let total = done.saturating_add(len);
        let goes_on = matches!(headers.opcode, Opcode::SendFirst | Opcode::SendMiddle);
        if !goes_on && self.receipt.is_some() {
            return Err(Stop::Busy);
        }
        if total > LONGEST {
            return Err(Stop::invalid());
        }
        if total > receive.capacity {
            return Err(Stop::too_long());
        }
        if len > 0 {
            let to = Target::Receive { id: receive.id, offset: done };
            judge(host.place(to, len), Stop::operation)?;
        }
        if goes_on {
            self.taken = None;
            self.message = Message::Send { receive, len: total };
            self.advance(headers);
            return Ok(());
        }
        let carried = match headers.extension {
            Extension::Imm(imm) => Carried::Imm(imm),
            Extension::Invalidate(key) => {
                judge(host.invalidate(key), Stop::access)?;
                Carried::Invalidated(key)
            }
            _ => Carried::Data,
        };
        self.finish(headers, Some((receive, total, carried)));
        Ok(())
    }

    fn begin_write<H: Host>(
        &mut self,
        headers: &Headers,
        reth: Reth,
        len: u32,
        host: &mut H,
    ) -> Result<(), Stop> {
        let is_first = headers.opcode == Opcode::WriteFirst;
        let fits = if is_first { reth.len > len } else { reth.len == len };
        if !fits || reth.len > LONGEST {
            return Err(Stop::invalid());
        }
        let at = Remote { address: reth.address, key: reth.rkey };
        if reth.len > 0 {
            judge(host.may_access(Access::REMOTE_WRITE, at, reth.len), Stop::access)?;
        }
        self.write_packet(headers, (at, 0, reth.len), len, host)
    }

    #[inline(always)]
    fn write_packet<H: Host>(
        &mut self,
        headers: &Headers,
        (at, done, total): (Remote, u32, u32),
        len: u32,
        host: &mut H,
    ) -> Result<(), Stop> {
        let goes_on = matches!(headers.opcode, Opcode::WriteFirst | Opcode::WriteMiddle);
        let left = total - done;
        let fits = if goes_on { len < left } else { len == left };
        if !fits {
            return Err(Stop::invalid());
        }
        let imm = match headers.extension {
            Extension::Imm(_) | Extension::RethImm(..) if self.receipt.is_some() => {
                return Err(Stop::Busy);
            }
            Extension::Imm(imm) | Extension::RethImm(_, imm) => Some((self.receive(host)?, imm)),
            _ => None,
        };
        if len > 0 {
            judge(host.place(Target::Remote(at.forward(done)), len), Stop::access)?;
        }
        if goes_on {
            self.message = Message::Write { at, done: done + len, total };
            self.advance(headers);
        } else {
            let receipt = imm.map(|(receive, imm)| (receive, total, Carried::WriteImm(imm)));
            self.finish(headers, receipt);
        }
        Ok(())
    }

    fn read<H: Host>(
        &mut self,
        terms: &Terms,
        psn: Psn,
        reth: Reth,
        payload_len: u32,
        host: &mut H,
    ) -> Result<(), Stop> {
        let packets = terms.mtu.packets(reth.len.min(LONGEST));
        let sound = payload_len == 0 && reth.len <= LONGEST && packets <= MOST_PACKETS;
        if !sound || !self.saved.has_room() {
            return Err(Stop::invalid());
        }
        let at = Remote { address: reth.address, key: reth.rkey };
        if reth.len > 0 {
            judge(host.may_access(Access::REMOTE_READ, at, reth.len), Stop::access)?;
        }
        self.saved.push(psn, packets, Asked::Read { at, len: reth.len });
        self.complete_message();
        self.answered_by_data(packets);
        Ok(())
    }

    fn atomic<H: Host>(
        &mut self,
        headers: &Headers,
        payload_len: u32,
        host: &mut H,
    ) -> Result<(), Stop> {
        let asked = super::atomic::asked(headers.opcode, headers.extension);
        let (at, atomic) = asked.ok_or_else(Stop::invalid)?;
        let aligned = at.address.is_multiple_of(u64::from(atomic.len()));
        if payload_len != 0 || !aligned || !self.saved.has_room() {
            return Err(Stop::invalid());
        }
        judge(host.may_access(Access::REMOTE_ATOMIC, at, atomic.len()), Stop::access)?;
        let before = match host.execute(at, atomic) {
            Ok(before) => before,
            Err(Verdict::NotNow) => return Err(Stop::Absent),
            Err(_) => return Err(Stop::access()),
        };
        self.saved.push(headers.psn, 1, Asked::Atomic { before });
        self.complete_message();
        self.answered_by_data(1);
        Ok(())
    }

    /// A message is complete; with it, perhaps, a receive.
    fn finish(&mut self, headers: &Headers, receipt: Option<(Receive, u32, Carried)>) {
        self.message = Message::None;
        self.complete_message();
        if let Some((receive, len, carried)) = receipt {
            self.taken = None;
            let receipt = receipt_of(receive.id, Status::Success, len, carried);
            self.receipt = Some(Receipt { solicited: headers.solicited, ..receipt });
        }
        self.advance(headers);
    }

    fn complete_message(&mut self) {
        self.completed = self.completed.wrapping_add(1) & 0xff_ffff;
    }

    fn advance(&mut self, headers: &Headers) {
        self.acknowledged = self.expected;
        self.expected = self.expected.next();
        let told = match self.reply {
            // What came from behind a gap was thrown away: that is still to be told.
            Reply::Sequence(_) => false,
            Reply::NotReady => true,
            _ => headers.ack_request,
        };
        if told {
            self.reply = Reply::Ack;
        }
    }

    /// The answer to a read or an atomic acknowledges what came before it.
    fn answered_by_data(&mut self, numbers: u32) {
        self.expected = self.expected.add(numbers);
        if !matches!(self.reply, Reply::Sequence(_)) {
            self.reply = Reply::None;
        }
    }
}

fn receipt_of(id: u64, status: Status, len: u32, carried: Carried) -> Receipt {
    Receipt { id, status, len, carried, solicited: false, source_qp: 0 }
}

/// All packets of a message but the last are as long as the MTU; the last has at least a byte, unless it is
/// the only one.
fn check_len(mtu: Mtu, goes_on: bool, is_first: bool, len: u32) -> Result<(), Stop> {
    let sound = match (goes_on, is_first) {
        (true, _) => len == mtu.bytes(),
        (false, true) => len <= mtu.bytes(),
        (false, false) => len >= 1 && len <= mtu.bytes(),
    };
    if sound { Ok(()) } else { Err(Stop::invalid()) }
}

fn must_allow(allowed: Access, wanted: Access) -> Result<(), Stop> {
    if allowed.contains(wanted) { Ok(()) } else { Err(Stop::invalid()) }
}
