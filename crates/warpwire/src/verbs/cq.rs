//! Completion queues, as programs read them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::event::epoll;

use super::hardware::Hardware;
use super::in_place::{InPlaceCq, no_events};
use super::qp::Core;
use super::{Context, Device};
use crate::error::{Error, Kind, Result};
use crate::hca::{CQE_LEN, CqSpec, QueueMemory, Signal};
use crate::ibv;
use crate::mlx5::{Arm as Armed, Cqe, EMPTY, Outcome, Queue, Sent, Tail, owner_bit};
use crate::sync::{Biased, barrier};
use crate::work::Completion;

/// How a completion queue is made.
#[derive(Clone, Debug)]
pub struct CqOptions {
    /// How many completions it has room for, at least.
    pub entries: u32,
    /// Memory of another sort than the host's for it: at least [`Cq::memory_for`] its entries.
    pub memory: Option<QueueMemory>,
    /// Every completion goes to the first entry; for pollers that look at its counter alone.
    pub collapsed: bool,
    /// Completions that were not read are overwritten. Of hardware, mlx5 devices alone can, and it is as with `held`.
    pub ignore_overrun: bool,
    /// Completions that were read stay where they are until [`Cq::give_back`]: a stream or a kernel may look at them
    /// still. Of hardware, mlx5 devices alone can: such a queue is read past its provider, and makes no events.
    pub held: bool,
}

impl Default for CqOptions {
    fn default() -> Self {
        Self { entries: 256, memory: None, collapsed: false, ignore_overrun: false, held: false }
    }
}

/// A completion queue. It ends when this is dropped, and outlives the queue pairs that use it.
#[derive(Clone, Debug)]
pub struct Cq(pub(super) Arc<Shared>);

#[derive(Debug)]
pub(super) struct Shared {
    /// How many sleep in [`Cq::next`].
    sleepers: AtomicU32,
    arm: Arm,
}

#[derive(Debug)]
enum Arm {
    Soft(Soft),
    Hard(Hard),
}

/// A queue that the software HCA fills.
#[derive(Debug)]
struct Soft {
    device: Arc<Device>,
    number: u32,
    memory: QueueMemory,
    entries: u32,
    /// The device does not wait for the reader.
    overwritten: bool,
    /// Places are given back by [`Cq::give_back`] alone.
    held: bool,
    signal: Arc<Signal>,
    reader: Biased<Reader>,
}

#[derive(Debug)]
struct Reader {
    /// How many were read.
    consumed: u64,
    /// The queue pair of the last one, with its place among the device's: often that of the next.
    last: Option<(u32, Arc<Core>)>,
    /// Advances with each event, so that arming twice is seen.
    sequence: u8,
}

impl Drop for Soft {
    fn drop(&mut self) {
        self.device.hca.destroy_cq(self.number);
    }
}

impl Cq {
    /// How much memory a queue with room for so many completions takes.
    pub fn memory_for(entries: u32) -> u64 {
        u64::from(entries.max(1).next_power_of_two()) * CQE_LEN + 64
    }

    pub(super) fn create(context: &Context, options: CqOptions) -> Result<Self> {
        if options.entries == 0 || options.entries > 1 << 22 {
            let why = format!("{} is not a number of completions", options.entries);
            let error = Error::new(Kind::InvalidArgument, "make a completion queue").why(why);
            return Err(error.fix("ask for 1 to 4194304"));
        }
        if let Some(hardware) = &context.0.hardware {
            let hard = Hard::create(hardware, &options)?;
            return Ok(Self(Arc::new(Shared {
                sleepers: AtomicU32::new(0),
                arm: Arm::Hard(hard),
            })));
        }
        let entries = options.entries.next_power_of_two();
        let memory = match options.memory {
            Some(memory) => memory,
            None => QueueMemory::host(Self::memory_for(entries))?,
        };
        let record = u64::from(entries) * CQE_LEN;
        let bytes = memory.bytes();
        bytes.fill(0, record, &[EMPTY])?;
        bytes.fill(record, 64, &[0])?;
        memory.send_off();
        let signal = Arc::new(Signal::new()?);
        let number = context.0.hca.create_cq(CqSpec {
            memory: memory.clone(),
            entries,
            record,
            collapsed: options.collapsed,
            ignore_overrun: options.ignore_overrun,
            signal: Some(signal.clone()),
        })?;
        let reader = Biased::new(Reader { consumed: 0, last: None, sequence: 1 });
        let device = context.0.clone();
        let overwritten = options.collapsed || options.ignore_overrun;
        let held = options.held;
        let soft = Soft { device, number, memory, entries, overwritten, held, signal, reader };
        Ok(Self(Arc::new(Shared { sleepers: AtomicU32::new(0), arm: Arm::Soft(soft) })))
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        match &self.0.arm {
            Arm::Soft(soft) => soft.number,
            Arm::Hard(hard) => hard.cq.number(),
        }
    }

    /// Its memory, for those who read it themselves. Of hardware it is nothing, unless it is held.
    pub fn memory(&self) -> &QueueMemory {
        match &self.0.arm {
            Arm::Soft(soft) => &soft.memory,
            Arm::Hard(hard) => hard.in_place.as_ref().map_or(&hard.nothing, |queue| &queue.entries),
        }
    }

    /// The queue, of hardware that is read past its provider.
    pub(super) fn in_place(&self) -> Option<&InPlaceCq> {
        match &self.0.arm {
            Arm::Soft(_) => None,
            Arm::Hard(hard) => hard.in_place.as_ref(),
        }
    }

    /// The queue, of hardware.
    pub(super) fn hardware(&self) -> Option<&ibv::Cq> {
        match &self.0.arm {
            Arm::Soft(_) => None,
            Arm::Hard(hard) => Some(&hard.cq),
        }
    }

    /// Takes completions; returns how many of `into` were filled. If none is there, the device is driven a step, and
    /// the queue is looked at once more. Never blocks.
    ///
    /// # Errors
    /// If the device is beyond repair.
    #[inline]
    pub fn poll(&self, into: &mut [Completion]) -> Result<usize> {
        let soft = match &self.0.arm {
            Arm::Soft(soft) => soft,
            Arm::Hard(Hard { in_place: None, cq, .. }) => return cq.poll(into),
            Arm::Hard(Hard { in_place: Some(queue), .. }) => return Ok(queue.poll(into)),
        };
        let found = soft.take(into);
        if found > 0 || into.is_empty() {
            return Ok(found);
        }
        soft.device.hca.poll()?;
        Ok(soft.take(into))
    }

    /// Makes the completions of a queue pair that wait here void: it was reset, or is no more.
    pub(super) fn forget(&self, core: &Core) {
        if let Arm::Soft(soft) = &self.0.arm {
            soft.forget(core);
        }
    }

    /// Forgets whose the last completion was: its number may come again one day, and mean another.
    pub(super) fn forget_last(&self) {
        if let Arm::Soft(soft) = &self.0.arm {
            soft.reader.lock().last = None;
        }
    }

    /// Gives the places of the first so many completions of a queue that is [held](CqOptions::held) back to the
    /// device. More than were read are not given.
    pub fn give_back(&self, count: u64) {
        match &self.0.arm {
            Arm::Soft(soft) => soft.give_back(count),
            Arm::Hard(hard) => drop(hard.in_place.as_ref().map(|queue| queue.give_back(count))),
        }
    }

    /// The completion that lies so many behind the next, if it is there; it stays unread. What a queue pair called
    /// the work is not asked for. Of hardware, those that are held are looked at.
    pub(crate) fn peek(&self, ahead: u64) -> Option<Cqe> {
        match &self.0.arm {
            Arm::Soft(soft) => soft.peek(ahead),
            Arm::Hard(hard) => hard.in_place.as_ref()?.peek(ahead),
        }
    }

    /// Whether the completion of that number has been made. It must not be more than the queue holds away from those
    /// that were given back.
    pub(crate) fn is_there(&self, number: u64) -> bool {
        match &self.0.arm {
            Arm::Soft(soft) => soft.is_there(number),
            Arm::Hard(hard) => hard.in_place.as_ref().is_some_and(|queue| queue.is_there(number)),
        }
    }

    /// How many entries it has.
    pub fn entries(&self) -> u32 {
        match &self.0.arm {
            Arm::Soft(soft) => soft.entries,
            Arm::Hard(hard) => hard.entries,
        }
    }

    /// The next completion, waiting for it if need be; `None` when the time is over.
    ///
    /// It drives the device for a short while, then sleeps. Several threads may wait here, for one completion each.
    pub fn next(&self, timeout: Duration) -> Result<Option<Completion>> {
        const SPIN: Duration = Duration::from_micros(50);
        let start = Instant::now();
        let mut one = [Completion::EMPTY];
        loop {
            if self.poll(&mut one)? == 1 {
                // The event that woke this one may have been the only one for several.
                if self.0.sleepers.load(Ordering::SeqCst) > 0 {
                    self.arm(false)?;
                }
                return Ok(Some(one[0]));
            }
            let waited = start.elapsed();
            if waited >= timeout {
                return Ok(None);
            }
            if waited > SPIN && self.wakes_sleepers() {
                self.0.sleepers.fetch_add(1, Ordering::SeqCst);
                let woken = self.arm(false).and_then(|()| self.wait(timeout - waited));
                self.0.sleepers.fetch_sub(1, Ordering::SeqCst);
                woken?;
            }
        }
    }

    /// Asks for an event at the next completion, or at the next that is solicited or an error. If one is there
    /// already, the event comes at once.
    pub fn arm(&self, solicited_only: bool) -> Result<()> {
        match &self.0.arm {
            Arm::Soft(soft) => soft.arm(solicited_only),
            Arm::Hard(hard) => hard.arm(solicited_only),
        }
    }

    /// Waits for the event that was asked for, and takes it; tells whether it came in that time.
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        let came = match &self.0.arm {
            Arm::Soft(soft) => soft.signal.wait(timeout)?,
            Arm::Hard(hard) => Signal::wait_for(&hard.either, timeout)?,
        };
        if came {
            self.take_event();
        }
        Ok(came)
    }

    /// Takes an event back, for those who wait on the file descriptor themselves.
    pub fn take_event(&self) -> bool {
        match &self.0.arm {
            Arm::Soft(soft) => soft.take_event(),
            Arm::Hard(hard) => hard.take_event(),
        }
    }

    /// Whether somebody who sleeps is woken.
    fn wakes_sleepers(&self) -> bool {
        match &self.0.arm {
            Arm::Soft(soft) => soft.device.hca.wakes_sleepers(),
            Arm::Hard(_) => true,
        }
    }
}

impl AsFd for Cq {
    /// Readable when the event that was asked for has come.
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0.arm {
            Arm::Soft(soft) => soft.signal.as_fd(),
            Arm::Hard(hard) => hard.either.as_fd(),
        }
    }
}

impl Soft {
    /// The queue pair that a completion is of; none if it had the place of another that is there now.
    #[inline]
    fn core_of<'a>(&self, reader: &'a mut Reader, qpn: u32, index: u32) -> Option<&'a Core> {
        let is_last =
            reader.last.as_ref().is_some_and(|(last, core)| *last == index && core.number == qpn);
        if !is_last {
            self.look_up(reader, qpn, index);
        }
        reader.last.as_ref().map(|(_, core)| &**core)
    }

    #[inline(never)]
    fn look_up(&self, reader: &mut Reader, qpn: u32, index: u32) {
        let pairs = self.device.pairs.lock();
        let core = pairs.get(index as usize).and_then(Option::as_ref);
        let core = core.filter(|core| core.number == qpn);
        reader.last = core.map(|core| (index, core.clone()));
    }

    /// Puts down what a completion says, in the words of the program; false if its queue pair is gone.
    #[inline]
    fn read(&self, reader: &mut Reader, entry: &[u64; 8], into: &mut Completion) -> bool {
        let Some(sent) = Sent::parse_words(entry) else {
            return self.read_rare(reader, entry, into);
        };
        let Some(core) = self.core_of(reader, sent.qpn, sent.user_index) else { return false };
        *into = Completion::sent(&sent, core.ledger.send_ended(sent.counter));
        true
    }

    #[inline(never)]
    fn read_rare(&self, reader: &mut Reader, entry: &[u64; 8], into: &mut Completion) -> bool {
        // What is no completion was not written by the device; it is passed over.
        let Ok(cqe) = Cqe::parse_words(entry) else { return false };
        let Some(core) = self.core_of(reader, cqe.qpn, cqe.user_index) else { return false };
        *into = complete(core, &cqe);
        true
    }

    /// Tells the device which entries are free.
    fn tell_consumed(&self, count: u64) {
        let word = u32::from_ne_bytes(Armed::consumed_word(count as u32));
        // What was cleared before goes first: the device may write there as soon as it sees this.
        self.memory.send_off();
        let _ = self.memory.bytes().store_u32(u64::from(self.entries) * CQE_LEN, word);
        self.memory.send_off();
    }

    /// Takes completions that are there, without driving the device.
    fn take(&self, into: &mut [Completion]) -> usize {
        let shared = self;
        let mut reader = shared.reader.lock();
        let bytes = shared.memory.bytes();
        let entries = u64::from(shared.entries);
        let (before, mut count) = (reader.consumed, 0);
        while count < into.len() {
            let at = (reader.consumed & (entries - 1)) * CQE_LEN;
            // Acquire: the body was written before this word.
            let tail = bytes.load_u32(at + 60).unwrap_or(u32::MAX).to_ne_bytes();
            if !Tail::parse(tail).is_owned(owner_bit(reader.consumed, entries)) {
                break;
            }
            let Some(entry) = bytes.load_line(at) else { break };
            reader.consumed += 1;
            count += usize::from(shared.read(&mut reader, &entry, &mut into[count]));
        }
        if reader.consumed != before && !shared.held {
            shared.tell_consumed(reader.consumed);
        }
        count
    }

    fn give_back(&self, count: u64) {
        let reader = self.reader.lock();
        if self.held {
            self.tell_consumed(count.min(reader.consumed));
        }
    }

    fn peek(&self, ahead: u64) -> Option<Cqe> {
        let number = self.reader.lock().consumed + ahead;
        let mut entry = [0; CQE_LEN as usize];
        if ahead >= u64::from(self.entries) || !self.is_there(number) {
            return None;
        }
        let place = (number & (u64::from(self.entries) - 1)) * CQE_LEN;
        self.memory.bytes().read(place, &mut entry).ok()?;
        Cqe::parse(&entry).ok()
    }

    fn is_there(&self, number: u64) -> bool {
        let (bytes, entries) = (self.memory.bytes(), u64::from(self.entries));
        let at = (number & (entries - 1)) * CQE_LEN;
        let tail = bytes.load_u32(at + 60).unwrap_or(u32::MAX).to_ne_bytes();
        Tail::parse(tail).is_owned(owner_bit(number, entries))
    }

    /// Makes the completions of a queue pair that wait here void: it was reset, or is no more.
    fn forget(&self, core: &Core) {
        let shared = self;
        // The device may be writing what would be changed here, or a stream be looking at it.
        if shared.overwritten || shared.held {
            return;
        }
        let mut reader = shared.reader.lock();
        let (bytes, entries) = (shared.memory.bytes(), u64::from(shared.entries));
        for number in reader.consumed..reader.consumed + entries {
            let at = (number & (entries - 1)) * CQE_LEN;
            let tail = bytes.load_u32(at + 60).unwrap_or(u32::MAX).to_ne_bytes();
            let entry = bytes.load_line(at);
            let Some(entry) =
                entry.filter(|_| Tail::parse(tail).is_owned(owner_bit(number, entries)))
            else {
                break;
            };
            match Cqe::parse_words(&entry) {
                Ok(cqe) if cqe.qpn == core.number => {
                    if !is_of_send(&cqe) {
                        core.receive_ended(cqe.counter);
                    }
                    let _ = bytes.store_u32(at + 60, u32::from_ne_bytes(Tail::void(tail)));
                }
                Ok(_) => continue,
                Err(_) => {}
            }
            // Where nothing else is before it, its place is free at once: nobody may ever look.
            if number == reader.consumed {
                reader.consumed += 1;
            }
        }
        shared.tell_consumed(reader.consumed);
    }

    fn arm(&self, solicited_only: bool) -> Result<()> {
        let shared = self;
        let reader = shared.reader.lock();
        let consumer = reader.consumed as u32 & 0xff_ffff;
        let arm = Armed { sequence: reader.sequence, solicited_only, consumer };
        let entries = u64::from(shared.entries);
        let bytes = shared.memory.bytes();
        bytes.store_u32(entries * CQE_LEN + 4, u32::from_ne_bytes(arm.word()))?;
        // The device sees the arming, or this sees its completion.
        barrier::heavy();
        let at = (reader.consumed & (entries - 1)) * CQE_LEN;
        let tail = Tail::parse(bytes.load_u32(at + 60)?.to_ne_bytes());
        if tail.is_owned(owner_bit(reader.consumed, entries)) {
            shared.signal.raise();
        }
        // Whoever arms is done with polling, as far as we know.
        shared.device.hca.hand_over();
        Ok(())
    }

    fn take_event(&self) -> bool {
        let mut reader = self.reader.lock();
        reader.sequence = (reader.sequence + 1) & 3;
        self.signal.take()
    }
}

/// The completion in the words of the program: the queue pair knows what it called the work.
#[inline]
fn complete(core: &Core, cqe: &Cqe) -> Completion {
    let id = match is_of_send(cqe) {
        true => core.ledger.send_ended(cqe.counter),
        false => core.receive_ended(cqe.counter),
    };
    Completion::of(cqe, id)
}

fn is_of_send(cqe: &Cqe) -> bool {
    matches!(cqe.outcome, Outcome::Sent { .. } | Outcome::Failed { queue: Queue::Send, .. })
}

/// A queue that hardware fills.
#[derive(Debug)]
struct Hard {
    cq: ibv::Cq,
    /// Raised when a completion was there already as it was armed: of that, hardware tells nothing.
    already: Signal,
    /// Readable when that is raised, or the device's own event has come.
    either: OwnedFd,
    /// How many it has room for.
    entries: u32,
    nothing: QueueMemory,
    /// Where it is read, if that is past the provider.
    in_place: Option<InPlaceCq>,
}

impl Hard {
    fn create(hardware: &Hardware, options: &CqOptions) -> Result<Self> {
        if options.memory.is_some() || options.collapsed {
            return Err(Error::new(Kind::Unsupported, "make a completion queue")
                .on(hardware.context.device().name.clone())
                .why("libibverbs chooses its memory, and has no collapsed queues")
                .fix("leave these options out, or use the software HCA"));
        }
        let cq = match options.ignore_overrun {
            true => hardware.context.create_overwritten_cq(options.entries)?,
            false => hardware.context.create_cq(options.entries)?,
        };
        let already = Signal::new()?;
        let failed = |why: rustix::io::Errno| Error::os("make an event descriptor", &why.into());
        let either = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        for fd in [cq.as_fd(), already.as_fd()] {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&either, fd, data, epoll::EventFlags::IN).map_err(failed)?;
        }
        let in_place = options.held || options.ignore_overrun;
        let in_place = in_place.then(|| cq.direct().map(InPlaceCq::new)).transpose()?;
        let entries = in_place.as_ref().map_or(options.entries, |queue| queue.count);
        Ok(Self { cq, already, either, entries, nothing: QueueMemory::nothing(), in_place })
    }

    fn arm(&self, solicited_only: bool) -> Result<()> {
        if self.in_place.is_some() {
            return Err(no_events());
        }
        self.cq.arm(solicited_only)?;
        if self.cq.is_waiting()? {
            self.already.raise();
        }
        Ok(())
    }

    fn take_event(&self) -> bool {
        let was = self.already.take();
        self.cq.take_event().unwrap_or(false) || was
    }
}
