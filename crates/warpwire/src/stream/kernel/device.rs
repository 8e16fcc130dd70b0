//! The calls of `verbs.cuh` for block functions of the simulated GPU: the same handle, queues and
//! algorithm.
//!
//! A block function is a single thread, so there are no thread groups here. The header documents
//! the guarantees of each call.

mod direct;

pub use direct::Mapping;

use std::time::{Duration, Instant};

use super::layout::{self, Constants, NO_FAILURE, field, queue};
use super::status::KernelStatus;
use crate::mem::sim::{Block, KernelFault};
use crate::mem::{Condition, DeviceAddr, WordWidth};
use crate::mlx5::{
    Atomic, Builder, CqeSyndrome, CqeTail, Doorbell, DoorbellRecord, ReceiveWqe, Scratch, Status,
    WQEBB_LEN, WqeOpcode, owner_bit,
};
use crate::verbs::Remote;

/// Maximum bytes per entry; longer transfers are split.
pub const MAX_BYTES: u64 = 1 << 30;
/// Maximum bytes of a [`DeviceQp::put_inline`].
pub const MAX_INLINE: usize = 28;
/// How long a thread waits for other threads to fill the entries before its own.
const FILL_TIMEOUT: Duration = Duration::from_secs(10);

type FaultResult<T> = std::result::Result<T, KernelFault>;

/// Registered local memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Local {
    /// The address, in the address space of the registration.
    pub address: u64,
    /// The lkey of the registration.
    pub lkey: u32,
}

/// Identifies posted work. If posting failed, `status` has the reason, and waiting returns the
/// same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceTicket {
    /// Index of the entry in its queue.
    pub number: u64,
    /// The result of posting.
    pub status: KernelStatus,
}

/// A received message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReceivedMessage {
    /// Length in bytes.
    pub length: u32,
    /// The immediate data, if any.
    pub imm: Option<u32>,
}

/// A queue pair as used by a block function.
pub struct DeviceQp<'b> {
    block: &'b Block<'b>,
    handle: u64,
    constants: Constants,
}

/// A work request: one WQE.
#[derive(Clone, Copy)]
pub(crate) enum Work<'a> {
    Write(Remote, Local, u32),
    WriteImm(Remote, Local, u32, u32),
    Inline(Remote, &'a [u8]),
    Read(Local, Remote, u32),
    Send(Local, u32),
    SendImm(Local, u32, u32),
    Add(Remote, u64, Local),
    Swap(Remote, [u64; 2], Local),
}

impl<'b> DeviceQp<'b> {
    /// Opens the queue pair whose handle is at `handle`.
    ///
    /// # Errors
    /// If there is no handle of this version at that address.
    pub fn open(block: &'b Block<'b>, handle: DeviceAddr) -> FaultResult<Self> {
        let base = handle.raw();
        let wide = |at| block.load_u64(DeviceAddr::new(base.wrapping_add(at)));
        let narrow = |at| block.load_u32(DeviceAddr::new(base.wrapping_add(at)));
        if narrow(field::VERSION)? != layout::VERSION {
            return Err(KernelFault::new(format!("there is no queue pair handle at {handle}")));
        }
        let constants = Constants {
            send_queue: wide(field::SEND_QUEUE)?,
            receive_queue: wide(field::RECEIVE_QUEUE)?,
            dbrec: wide(field::DBREC)?,
            doorbell: wide(field::DOORBELL)?,
            send_cq: wide(field::SEND_CQ)?,
            receive_cq: wide(field::RECEIVE_CQ)?,
            sink: wide(field::SINK)?,
            send_mask: narrow(field::SEND_MASK)?,
            receive_mask: narrow(field::RECEIVE_MASK)?,
            number: narrow(field::NUMBER)?,
            receive_stride: narrow(field::RECEIVE_STRIDE)?,
            sink_lkey: narrow(field::SINK_LKEY)?,
            flags: narrow(field::FLAGS)?,
            direct: wide(field::DIRECT)?,
        };
        Ok(Self { block, handle: base, constants })
    }

    /// RDMA WRITE of `len` bytes to the peer's memory.
    pub fn put(
        &self,
        to: Remote,
        from: Local,
        len: u64,
        timeout: Duration,
    ) -> FaultResult<DeviceTicket> {
        if let Some(done) = self.try_put(to, from, len, None)? {
            return Ok(done);
        }
        self.pieces(to, from, len, timeout, Work::Write, |to, from, len| {
            vec![Work::Write(to, from, len)]
        })
    }

    /// RDMA WRITE with immediate: completes a receive of the peer with `imm`.
    pub fn put_imm(
        &self,
        to: Remote,
        from: Local,
        len: u64,
        imm: u32,
        timeout: Duration,
    ) -> FaultResult<DeviceTicket> {
        let last = |to, from, len| vec![Work::WriteImm(to, from, len, imm)];
        self.pieces(to, from, len, timeout, Work::Write, last)
    }

    /// RDMA WRITE, then an atomic add to a 64-bit word of the peer. The ticket is that of the add.
    pub fn put_signal(
        &self,
        to: Remote,
        from: Local,
        len: u64,
        (word, add): (Remote, u64),
        timeout: Duration,
    ) -> FaultResult<DeviceTicket> {
        if let Some(done) = self.try_put(to, from, len, Some((word, add)))? {
            return Ok(done);
        }
        let then = Work::Add(word, add, self.sink());
        let last = |to, from, len| vec![Work::Write(to, from, len), then];
        self.pieces(to, from, len, timeout, Work::Write, last)
    }

    /// Writes at most [`MAX_INLINE`] bytes, which are copied into the WQE.
    pub fn put_inline(
        &self,
        to: Remote,
        bytes: &[u8],
        timeout: Duration,
    ) -> FaultResult<DeviceTicket> {
        match bytes.len() {
            ..=MAX_INLINE => match self.try_put_inline(to, bytes)? {
                Some(done) => Ok(done),
                None => self.post(&[Work::Inline(to, bytes)], timeout),
            },
            _ => Ok(refused(KernelStatus::TooLong)),
        }
    }

    /// RDMA READ of `len` bytes of the peer's memory.
    pub fn get(
        &self,
        to: Local,
        from: Remote,
        len: u64,
        timeout: Duration,
    ) -> FaultResult<DeviceTicket> {
        if let Some(done) = self.try_get(to, from, len)? {
            return Ok(done);
        }
        let piece = |from, to, len| Work::Read(to, from, len);
        self.pieces(from, to, len, timeout, piece, |from, to, len| vec![Work::Read(to, from, len)])
    }

    /// Sends a message of at most [`MAX_BYTES`] bytes into a receive of the peer, with immediate
    /// data or without.
    pub fn send(
        &self,
        from: Local,
        len: u64,
        imm: Option<u32>,
        timeout: Duration,
    ) -> FaultResult<DeviceTicket> {
        if len > MAX_BYTES {
            return Ok(refused(KernelStatus::TooLong));
        }
        let work = match imm {
            None => Work::Send(from, len as u32),
            Some(imm) => Work::SendImm(from, len as u32, imm),
        };
        self.post(&[work], timeout)
    }

    /// Atomic add to a 64-bit word of the peer. The previous value is stored to `result` or
    /// discarded.
    pub fn fetch_add(
        &self,
        word: Remote,
        add: u64,
        result: Option<Local>,
        timeout: Duration,
    ) -> FaultResult<DeviceTicket> {
        let done = self.try_atomic(word, result, |at| self.block.fetch_add_u64(at, add))?;
        match done {
            Some(done) => Ok(done),
            None => self.post(&[Work::Add(word, add, result.unwrap_or(self.sink()))], timeout),
        }
    }

    /// Atomic compare and swap. The previous value is stored to `result` or discarded.
    pub fn compare_swap(
        &self,
        word: Remote,
        [expected, desired]: [u64; 2],
        result: Option<Local>,
        timeout: Duration,
    ) -> FaultResult<DeviceTicket> {
        let swap = |at| self.block.compare_exchange_u64(at, expected, desired);
        if let Some(done) = self.try_atomic(word, result, swap)? {
            return Ok(done);
        }
        let result = result.unwrap_or(self.sink());
        self.post(&[Work::Swap(word, [expected, desired], result)], timeout)
    }

    /// Posts a receive for a message of at most `len` bytes.
    pub fn post_receive(
        &self,
        into: Local,
        len: u32,
        timeout: Duration,
    ) -> FaultResult<DeviceTicket> {
        if u64::from(len) > MAX_BYTES {
            return Ok(refused(KernelStatus::TooLong));
        }
        let queue = self.receives();
        let number = match queue.reserve(1, timeout)? {
            Ok(number) => number,
            Err(status) => return Ok(refused(status)),
        };
        let stride = u64::from(self.constants.receive_stride);
        let mut entry = vec![0; stride as usize];
        if ReceiveWqe::write(&mut entry, &[(len, into.lkey, into.address)]).is_none() {
            return Err(KernelFault::new("a receive does not fit into its entry"));
        }
        let at = self.constants.receive_queue + (number & (queue.depth - 1)) * stride;
        self.block.write(DeviceAddr::new(at), &entry)?;
        if let Err(status) = queue.wait_for_predecessors(number)? {
            return Ok(refused(status));
        }
        let posted = u32::from_ne_bytes(DoorbellRecord::word((number + 1) as u16));
        self.block.store_u32(DeviceAddr::new(self.constants.dbrec), posted)?;
        queue.store(queue::PUBLISHED, (number + 1) << 1)?;
        Ok(DeviceTicket { number, status: KernelStatus::Ok })
    }

    /// Waits until the operation has completed.
    pub fn wait(&self, ticket: DeviceTicket, timeout: Duration) -> FaultResult<KernelStatus> {
        match ticket {
            DeviceTicket { number: direct::DONE, status: KernelStatus::Ok } => Ok(ticket.status),
            _ => self.sends().wait(ticket, timeout),
        }
    }

    /// Waits until all operations posted before have completed. On failure returns the status of
    /// the first operation that failed.
    pub fn quiet(&self, timeout: Duration) -> FaultResult<KernelStatus> {
        let queue = self.sends();
        let Some(number) = queue.filled()?.checked_sub(1) else { return Ok(KernelStatus::Ok) };
        let status = queue.wait(DeviceTicket { number, status: KernelStatus::Ok }, timeout)?;
        Ok(match queue.load(queue::FAILURE)? {
            failure if status.is_failure() && failure != NO_FAILURE => cause(failure),
            _ => status,
        })
    }

    /// Waits for the message of a receive.
    pub fn wait_receive(
        &self,
        ticket: DeviceTicket,
        timeout: Duration,
    ) -> FaultResult<std::result::Result<ReceivedMessage, KernelStatus>> {
        let queue = self.receives();
        let status = queue.wait(ticket, timeout)?;
        if !status.is_ok() {
            return Ok(Err(status));
        }
        let seen = queue.poll_cqe(ticket.number)?;
        let message = queue.message(ticket.number)?;
        // The CQE slot is reused once the receive one lap later is posted.
        let is_late = queue.load(queue::RESERVED)? > ticket.number + queue.depth;
        Ok(if is_late || seen != Some(KernelStatus::Ok) {
            Err(KernelStatus::TooLate)
        } else {
            Ok(message)
        })
    }

    /// Waits for the next message in order and consumes it; returns the index of its receive.
    pub fn next_receive(
        &self,
        timeout: Duration,
    ) -> FaultResult<std::result::Result<(u64, ReceivedMessage), KernelStatus>> {
        let queue = self.receives();
        let found = queue.until(timeout, || {
            let number = queue.load(queue::TAKEN)?;
            let status = KernelStatus::Ok;
            let found = self.wait_receive(DeviceTicket { number, status }, Duration::ZERO)?;
            let take = |result| {
                let mine = queue.replace(queue::TAKEN, number, number + 1)?;
                Ok(mine.then_some(result))
            };
            match found {
                Err(KernelStatus::NotReady | KernelStatus::BadTicket) => Ok(None),
                Err(KernelStatus::TooLate) => take(Err(KernelStatus::TooLate)),
                // Failures are not consumed, so that every caller sees them.
                Err(failed) => Ok(Some(Err(failed))),
                Ok(message) => take(Ok((number, message))),
            }
        })?;
        Ok(found.and_then(|result| result))
    }

    /// Number of operations posted.
    pub(crate) fn posted(&self) -> FaultResult<u64> {
        self.sends().filled()
    }

    fn sends(&self) -> DeviceQueue<'_> {
        let Constants { send_cq: completions, send_mask, .. } = self.constants;
        let (base, depth) = (self.handle.wrapping_add(layout::SEND), u64::from(send_mask) + 1);
        DeviceQueue { block: self.block, base, completions, depth }
    }

    fn receives(&self) -> DeviceQueue<'_> {
        let Constants { receive_cq: completions, receive_mask, .. } = self.constants;
        let (base, depth) =
            (self.handle.wrapping_add(layout::RECEIVE), u64::from(receive_mask) + 1);
        DeviceQueue { block: self.block, base, completions, depth }
    }

    fn sink(&self) -> Local {
        Local { address: self.constants.sink, lkey: self.constants.sink_lkey }
    }

    /// Splits a transfer into pieces of at most [`MAX_BYTES`].
    fn pieces<'w>(
        &self,
        mut remote: Remote,
        mut local: Local,
        mut len: u64,
        timeout: Duration,
        piece: impl Fn(Remote, Local, u32) -> Work<'w>,
        last: impl Fn(Remote, Local, u32) -> Vec<Work<'w>>,
    ) -> FaultResult<DeviceTicket> {
        while len > MAX_BYTES {
            let ticket = self.post(&[piece(remote, local, MAX_BYTES as u32)], timeout)?;
            if !ticket.status.is_ok() {
                return Ok(ticket);
            }
            remote.address = remote.address.wrapping_add(MAX_BYTES);
            local.address = local.address.wrapping_add(MAX_BYTES);
            len -= MAX_BYTES;
        }
        self.post(&last(remote, local, len as u32), timeout)
    }

    /// Posts work requests with one doorbell. Returns the ticket of the last.
    pub(crate) fn post(&self, works: &[Work<'_>], timeout: Duration) -> FaultResult<DeviceTicket> {
        let queue = self.sends();
        let count = works.len() as u64;
        let first = match queue.reserve(count, timeout)? {
            Ok(first) => first,
            Err(status) => return Ok(refused(status)),
        };
        let mut scratch = Scratch::default();
        for (number, work) in (first..).zip(works) {
            let image = work.build(&mut scratch, number as u16, self.constants.number);
            let image = image.map_err(|full| KernelFault::new(full.to_string()))?;
            let offset = (number & (queue.depth - 1)) * WQEBB_LEN as u64;
            self.block.write(DeviceAddr::new(self.constants.send_queue + offset), image.bytes())?;
        }
        let status = self.publish(&queue, first, count)?;
        Ok(DeviceTicket { number: first + count - 1, status })
    }

    /// Publishes filled entries. One thread rings the doorbell for all that are ready.
    fn publish(
        &self,
        queue: &DeviceQueue<'_>,
        first: u64,
        count: u64,
    ) -> FaultResult<KernelStatus> {
        let mut until = first + count;
        match queue.publish_in_order(first, until)? {
            Ok(true) => {}
            Ok(false) => return Ok(KernelStatus::Ok),
            Err(status) => return Ok(status),
        }
        loop {
            self.ring_doorbell(until)?;
            let seen = queue.compare_exchange(queue::PUBLISHED, until << 1 | 1, until << 1)?;
            if seen == until << 1 | 1 {
                return Ok(KernelStatus::Ok);
            }
            until = seen >> 1;
        }
    }

    fn ring_doorbell(&self, until: u64) -> FaultResult<()> {
        let Constants { dbrec, doorbell, number, flags, .. } = self.constants;
        let index = until as u16;
        if flags & layout::DBREC_FIRST != 0 {
            let at = DeviceAddr::new(dbrec + DoorbellRecord::SEND as u64);
            self.block.store_u32(at, u32::from_ne_bytes(DoorbellRecord::word(index)))?;
        }
        let bell = u64::from_ne_bytes(Doorbell::next(number, index));
        self.block.store_u64(DeviceAddr::new(doorbell), bell)
    }
}

/// Waits until a word of the block's own memory satisfies the condition.
pub fn wait_signal(
    block: &Block<'_>,
    word: DeviceAddr,
    width: WordWidth,
    condition: Condition,
    value: u64,
    timeout: Duration,
) -> FaultResult<KernelStatus> {
    let waited = until(block, timeout, || {
        let seen = match width {
            WordWidth::Bits32 => u64::from(block.load_u32(word)?),
            WordWidth::Bits64 => block.load_u64(word)?,
        };
        Ok(condition.holds(width, seen, value).then_some(Ok(())))
    })?;
    Ok(waited.map_or_else(|status| status, |()| KernelStatus::Ok))
}

fn refused(status: KernelStatus) -> DeviceTicket {
    DeviceTicket { number: 0, status }
}

/// The status of a recorded failure.
fn cause(failure: u64) -> KernelStatus {
    KernelStatus::Failed(CqeSyndrome(failure as u8).into())
}

/// Polls `ask` until it returns a value or an error, or until the timeout.
fn until<T>(
    block: &Block<'_>,
    timeout: Duration,
    mut ask: impl FnMut() -> FaultResult<Option<std::result::Result<T, KernelStatus>>>,
) -> FaultResult<std::result::Result<T, KernelStatus>> {
    let (start, mut answer) = (Instant::now(), None);
    block.spin_until(|| {
        answer = ask()?;
        if answer.is_none() && timeout.is_zero() {
            answer = Some(Err(KernelStatus::NotReady));
        } else if answer.is_none() && start.elapsed() >= timeout {
            answer = Some(Err(KernelStatus::Timeout));
        }
        Ok(answer.is_some())
    })?;
    Ok(answer.unwrap_or(Err(KernelStatus::Timeout)))
}

struct DeviceQueue<'b> {
    block: &'b Block<'b>,
    base: u64,
    completions: u64,
    depth: u64,
}

impl DeviceQueue<'_> {
    fn at(&self, offset: u64) -> DeviceAddr {
        DeviceAddr::new(self.base.wrapping_add(offset))
    }

    fn load(&self, counter: u64) -> FaultResult<u64> {
        self.block.load_u64(self.at(counter))
    }

    fn store(&self, counter: u64, value: u64) -> FaultResult<()> {
        self.block.store_u64(self.at(counter), value)
    }

    fn compare_exchange(&self, counter: u64, old: u64, new: u64) -> FaultResult<u64> {
        self.block.compare_exchange_u64(self.at(counter), old, new)
    }

    fn replace(&self, counter: u64, old: u64, new: u64) -> FaultResult<bool> {
        Ok(self.compare_exchange(counter, old, new)? == old)
    }

    /// Number of entries filled, without a gap.
    fn filled(&self) -> FaultResult<u64> {
        Ok(self.load(queue::PUBLISHED)? >> 1)
    }

    /// As the function [`until`], and also ends when the queue pair is closed.
    fn until<T>(
        &self,
        timeout: Duration,
        mut ask: impl FnMut() -> FaultResult<Option<T>>,
    ) -> FaultResult<std::result::Result<T, KernelStatus>> {
        until(self.block, timeout, || {
            if let Some(answer) = ask()? {
                return Ok(Some(Ok(answer)));
            }
            let closed = self.block.load_u32(self.at(queue::CLOSED))?;
            Ok((closed != 0).then(|| Err(KernelStatus::from_code((closed as i32).wrapping_neg()))))
        })
    }

    fn cqe(&self, number: u64, offset: u64) -> FaultResult<[u8; 4]> {
        let at = self.completions + (number & (self.depth - 1)) * WQEBB_LEN as u64 + offset;
        Ok(self.block.load_u32(DeviceAddr::new(at))?.to_ne_bytes())
    }

    /// The status of entry `number` if its CQE slot holds its completion. The caller must use
    /// `completed` to rule out that the CQE belongs to a later lap.
    fn poll_cqe(&self, number: u64) -> FaultResult<Option<KernelStatus>> {
        let tail = CqeTail::parse(self.cqe(number, 60)?);
        if !tail.is_owned(owner_bit(number, self.depth)) || tail.counter != number as u16 {
            return Ok(None);
        }
        Ok(Some(match tail.is_error() {
            true => KernelStatus::Failed(CqeSyndrome(self.cqe(number, 52)?[3]).into()),
            false => KernelStatus::Ok,
        }))
    }

    fn message(&self, number: u64) -> FaultResult<ReceivedMessage> {
        // CQE opcodes 1 and 3: RDMA WRITE with immediate, and SEND with immediate.
        let has_imm = matches!(CqeTail::parse(self.cqe(number, 60)?).code, 1 | 3);
        let imm = u32::from_be_bytes(self.cqe(number, 36)?);
        let length = u32::from_be_bytes(self.cqe(number, 44)?);
        Ok(ReceivedMessage { length, imm: has_imm.then_some(imm) })
    }

    /// The status of an entry that is before `completed`.
    fn outcome(&self, number: u64) -> FaultResult<KernelStatus> {
        let failure = self.load(queue::FAILURE)?;
        Ok(match number.cmp(&(failure >> 8)) {
            _ if failure == NO_FAILURE => KernelStatus::Ok,
            std::cmp::Ordering::Less => KernelStatus::Ok,
            std::cmp::Ordering::Equal => cause(failure),
            std::cmp::Ordering::Greater => KernelStatus::Failed(Status::Flushed),
        })
    }

    /// Called when the CQE of `number` is an error: finds the first entry that failed, which has
    /// the cause.
    fn record_failure(&self, number: u64) -> FaultResult<()> {
        for _ in 0..64 {
            let mut at = self.load(queue::COMPLETED)?;
            if self.load(queue::FAILURE)? != NO_FAILURE || at > number {
                return Ok(());
            }
            let mut found = Some(KernelStatus::Ok);
            while at <= number {
                found = self.poll_cqe(at)?;
                if found != Some(KernelStatus::Ok) {
                    break;
                }
                at += 1;
            }
            if let Some(KernelStatus::Failed(status)) = found {
                return self
                    .atomic_min(queue::FAILURE, at << 8 | u64::from(CqeSyndrome::from(status).0));
            }
        }
        self.atomic_min(queue::FAILURE, number << 8 | 0xff)
    }

    fn atomic_min(&self, counter: u64, value: u64) -> FaultResult<()> {
        loop {
            let seen = self.load(counter)?;
            if seen <= value || self.replace(counter, seen, value)? {
                return Ok(());
            }
        }
    }

    fn atomic_max(&self, counter: u64, value: u64) -> FaultResult<()> {
        loop {
            let seen = self.load(counter)?;
            if seen >= value || self.replace(counter, seen, value)? {
                return Ok(());
            }
        }
    }

    /// Whether all entries up to `number` have completed; if so, advances `completed`.
    fn advance_completed(&self, number: u64) -> FaultResult<bool> {
        let Some(found) = self.poll_cqe(number)? else { return Ok(false) };
        if self.load(queue::COMPLETED)? > number {
            return Ok(true);
        }
        if found.is_failure() {
            self.record_failure(number)?;
        }
        self.atomic_max(queue::COMPLETED, number + 1)?;
        Ok(true)
    }

    /// Reserves consecutive entries, waiting for free ones. On failure none are reserved.
    fn reserve(
        &self,
        count: u64,
        timeout: Duration,
    ) -> FaultResult<std::result::Result<u64, KernelStatus>> {
        if count > self.depth {
            return Ok(Err(KernelStatus::TooMany));
        }
        let taken = self.until(timeout, || {
            loop {
                let first = self.load(queue::RESERVED)?;
                let completed = self.load(queue::COMPLETED)?;
                if self.load(queue::FAILURE)? != NO_FAILURE {
                    return Ok(Some(Err(KernelStatus::Failed(Status::Flushed))));
                }
                let closed = self.block.load_u32(self.at(queue::CLOSED))?;
                if closed != 0 {
                    return Ok(None); // `until` reports it
                }
                let needed = (first + count).saturating_sub(self.depth);
                if needed <= completed {
                    if self.replace(queue::RESERVED, first, first + count)? {
                        return Ok(Some(Ok(first)));
                    }
                } else if !self.advance_completed(needed - 1)? {
                    return Ok(None);
                }
            }
        })?;
        Ok(taken.and_then(|result| result))
    }

    /// Publishes filled entries once those before them are published. Returns whether this thread
    /// must ring the doorbell; if not, the thread that is ringing does so, since it checks again
    /// before it stops.
    fn publish_in_order(
        &self,
        first: u64,
        end: u64,
    ) -> FaultResult<std::result::Result<bool, KernelStatus>> {
        let joined = until(self.block, FILL_TIMEOUT, || {
            for rings in [true, false] {
                let wanted = first << 1 | u64::from(!rings);
                if self.replace(queue::PUBLISHED, wanted, end << 1 | 1)? {
                    return Ok(Some(Ok(rings)));
                }
            }
            Ok(None)
        })?;
        self.or_stuck(joined)
    }

    /// Waits until all entries before `first` are filled.
    fn wait_for_predecessors(
        &self,
        first: u64,
    ) -> FaultResult<std::result::Result<(), KernelStatus>> {
        let waited = until(self.block, FILL_TIMEOUT, || {
            Ok((self.load(queue::PUBLISHED)? == first << 1).then_some(Ok(())))
        })?;
        self.or_stuck(waited)
    }

    /// On timeout closes the queue: the missing entry will never be filled.
    fn or_stuck<T>(
        &self,
        waited: std::result::Result<T, KernelStatus>,
    ) -> FaultResult<std::result::Result<T, KernelStatus>> {
        if waited.is_err() {
            self.block
                .store_u32(self.at(queue::CLOSED), KernelStatus::Stuck.code().unsigned_abs())?;
        }
        Ok(waited.map_err(|_| KernelStatus::Stuck))
    }

    fn wait(&self, ticket: DeviceTicket, timeout: Duration) -> FaultResult<KernelStatus> {
        let DeviceTicket { number, status } = ticket;
        if !status.is_ok() {
            return Ok(status);
        }
        if number >= self.filled()? {
            return Ok(KernelStatus::BadTicket);
        }
        let waited = self.until(timeout, || {
            if self.load(queue::COMPLETED)? > number {
                return self.outcome(number).map(Some);
            }
            let Some(found) = self.poll_cqe(number)? else { return Ok(None) };
            // The CQE belongs to this entry only if `completed` has not passed it; otherwise it may
            // be of a later lap.
            if self.load(queue::COMPLETED)? > number {
                return self.outcome(number).map(Some);
            }
            if found.is_failure() {
                self.record_failure(number)?;
            }
            Ok(Some(found))
        })?;
        Ok(waited.unwrap_or_else(|status| status))
    }
}

impl Work<'_> {
    fn build<'s>(
        &self,
        scratch: &'s mut Scratch,
        index: u16,
        qpn: u32,
    ) -> std::result::Result<crate::mlx5::EncodedWqe<'s>, crate::mlx5::WqeTooLong> {
        let opcode = match self {
            Self::Write(..) | Self::Inline(..) => WqeOpcode::RdmaWrite,
            Self::WriteImm(..) => WqeOpcode::RdmaWriteImm,
            Self::Read(..) => WqeOpcode::RdmaRead,
            Self::Send(..) => WqeOpcode::Send,
            Self::SendImm(..) => WqeOpcode::SendImm,
            Self::Add(..) => WqeOpcode::FetchAdd,
            Self::Swap(..) => WqeOpcode::CompareSwap,
        };
        let entry = Builder::new(scratch, opcode, index, qpn).signaled();
        let entry = match *self {
            Self::Write(to, from, len) => {
                entry.remote(to.address, to.rkey).data(len, from.lkey, from.address)
            }
            Self::WriteImm(to, from, len, imm) => {
                let entry = entry.imm(imm.to_be_bytes()).remote(to.address, to.rkey);
                entry.data(len, from.lkey, from.address)
            }
            Self::Inline(to, bytes) => entry.remote(to.address, to.rkey).inline(bytes),
            Self::Read(to, from, len) => {
                entry.remote(from.address, from.rkey).data(len, to.lkey, to.address)
            }
            Self::Send(from, len) => entry.data(len, from.lkey, from.address),
            Self::SendImm(from, len, imm) => {
                entry.imm(imm.to_be_bytes()).data(len, from.lkey, from.address)
            }
            Self::Add(word, add, result) => entry
                .remote(word.address, word.rkey)
                .atomic(&Atomic::FetchAdd { add })
                .data(8, result.lkey, result.address),
            Self::Swap(word, [compare, swap], result) => entry
                .remote(word.address, word.rkey)
                .atomic(&Atomic::CompareSwap { compare, swap })
                .data(8, result.lkey, result.address),
        };
        entry.finish()
    }
}
