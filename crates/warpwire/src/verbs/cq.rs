//! Completion queues, as programs read them.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use rustix::event::epoll;

use super::direct_verbs::{DirectVerbsCq, no_events};
use super::hardware::Hardware;
use super::qp::Core;
use super::{Context, Device};
use crate::error::{Error, Kind, Result};
use crate::hca::{CQE_LEN, CqSpec, EventFd, QueueMemory};
use crate::ibv;
use crate::mlx5::{CqArm, Cqe, CqeOutcome, CqeTail, EMPTY, Queue, Sent, owner_bit};
use crate::sync::{BiasedMutex, asymmetric_fence};
use crate::work::Completion;

/// How a completion queue is made.
#[derive(Clone, Debug)]
pub struct CqOptions {
    /// How many completions it has room for, at least.
    pub entries: u32,
    /// Memory of another sort than the host's for it: at least [`Cq::required_memory`] its entries.
    pub memory: Option<QueueMemory>,
    /// Every completion goes to the first entry; for pollers that look at its counter alone.
    pub collapsed: bool,
    /// Completions that were not read are overwritten. Of hardware, mlx5 devices alone can, and it is as with `manual_release`.
    pub ignore_overrun: bool,
    /// Completions that were read stay where they are until [`Cq::release`]: a stream or a kernel may look at them
    /// still. Of hardware, mlx5 devices alone can: such a queue is read past its provider, and makes no events.
    pub manual_release: bool,
}

impl Default for CqOptions {
    fn default() -> Self {
        Self {
            entries: 256,
            memory: None,
            collapsed: false,
            ignore_overrun: false,
            manual_release: false,
        }
    }
}

/// A completion queue. It ends when this is dropped, and outlives the queue pairs that use it.
#[derive(Clone, Debug)]
pub struct Cq(pub(super) Arc<CqInner>);

#[derive(Debug)]
pub(super) struct CqInner {
    /// How many sleep in [`Cq::next`].
    waiters: AtomicU32,
    arm: Backend,
}

#[derive(Debug)]
enum Backend {
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
    ignores_overrun: bool,
    /// Places are given back by [`Cq::release`] alone.
    manual_release: bool,
    signal: Arc<EventFd>,
    reader: BiasedMutex<Reader>,
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
    pub fn required_memory(entries: u32) -> u64 {
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
            return Ok(Self(Arc::new(CqInner {
                waiters: AtomicU32::new(0),
                arm: Backend::Hard(hard),
            })));
        }
        let entries = options.entries.next_power_of_two();
        let memory = match options.memory {
            Some(memory) => memory,
            None => QueueMemory::host(Self::required_memory(entries))?,
        };
        let dbrec = u64::from(entries) * CQE_LEN;
        let bytes = memory.bytes();
        bytes.fill(0, dbrec, &[EMPTY])?;
        bytes.fill(dbrec, 64, &[0])?;
        memory.flush_stores();
        let signal = Arc::new(EventFd::new()?);
        let number = context.0.hca.create_cq(CqSpec {
            memory: memory.clone(),
            entries,
            dbrec,
            collapsed: options.collapsed,
            ignore_overrun: options.ignore_overrun,
            signal: Some(signal.clone()),
        })?;
        let reader = BiasedMutex::new(Reader { consumed: 0, last: None, sequence: 1 });
        let device = context.0.clone();
        let ignores_overrun = options.collapsed || options.ignore_overrun;
        let manual_release = options.manual_release;
        let soft = Soft {
            device,
            number,
            memory,
            entries,
            ignores_overrun,
            manual_release,
            signal,
            reader,
        };
        Ok(Self(Arc::new(CqInner { waiters: AtomicU32::new(0), arm: Backend::Soft(soft) })))
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        match &self.0.arm {
            Backend::Soft(soft) => soft.number,
            Backend::Hard(hard) => hard.cq.number(),
        }
    }

    /// Its memory, for those who read it themselves. Of hardware it is nothing, unless it is held.
    pub fn memory(&self) -> &QueueMemory {
        match &self.0.arm {
            Backend::Soft(soft) => &soft.memory,
            Backend::Hard(hard) => {
                hard.direct_verbs.as_ref().map_or(&hard.no_memory, |queue| &queue.entries)
            }
        }
    }

    /// The queue, of hardware that is read past its provider.
    pub(super) fn direct_verbs(&self) -> Option<&DirectVerbsCq> {
        match &self.0.arm {
            Backend::Soft(_) => None,
            Backend::Hard(hard) => hard.direct_verbs.as_ref(),
        }
    }

    /// The queue, of hardware.
    pub(super) fn hardware(&self) -> Option<&ibv::Cq> {
        match &self.0.arm {
            Backend::Soft(_) => None,
            Backend::Hard(hard) => Some(&hard.cq),
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
            Backend::Soft(soft) => soft,
            Backend::Hard(Hard { direct_verbs: None, cq, .. }) => return cq.poll(into),
            Backend::Hard(Hard { direct_verbs: Some(queue), .. }) => return Ok(queue.poll(into)),
        };
        let found = soft.take(into);
        if found > 0 || into.is_empty() {
            return Ok(found);
        }
        soft.device.hca.poll()?;
        Ok(soft.take(into))
    }

    /// Makes the completions of a queue pair that wait here void: it was reset, or is no more.
    pub(super) fn clean(&self, core: &Core) {
        if let Backend::Soft(soft) = &self.0.arm {
            soft.clean(core);
        }
    }

    /// Forgets whose the last completion was: its number may come again one day, and mean another.
    pub(super) fn drop_cached_qp(&self) {
        if let Backend::Soft(soft) = &self.0.arm {
            soft.reader.lock().last = None;
        }
    }

    /// Gives the places of the first so many completions of a queue that is [held](CqOptions::held) back to the
    /// device. More than were read are not given.
    pub fn release(&self, count: u64) {
        match &self.0.arm {
            Backend::Soft(soft) => soft.release(count),
            Backend::Hard(hard) => {
                if let Some(queue) = &hard.direct_verbs {
                    queue.release(count);
                }
            }
        }
    }

    /// The completion that lies so many behind the next, if it is there; it stays unread. What a queue pair called
    /// the work is not asked for. Of hardware, those that are held are looked at.
    pub(crate) fn peek(&self, offset: u64) -> Option<Cqe> {
        match &self.0.arm {
            Backend::Soft(soft) => soft.peek(offset),
            Backend::Hard(hard) => hard.direct_verbs.as_ref()?.peek(offset),
        }
    }

    /// Whether the completion of that number has been made. It must not be more than the queue holds away from those
    /// that were given back.
    pub(crate) fn has_cqe(&self, number: u64) -> bool {
        match &self.0.arm {
            Backend::Soft(soft) => soft.has_cqe(number),
            Backend::Hard(hard) => {
                hard.direct_verbs.as_ref().is_some_and(|queue| queue.has_cqe(number))
            }
        }
    }

    /// How many entries it has.
    pub fn entries(&self) -> u32 {
        match &self.0.arm {
            Backend::Soft(soft) => soft.entries,
            Backend::Hard(hard) => hard.entries,
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
                if self.0.waiters.load(Ordering::SeqCst) > 0 {
                    self.arm(false)?;
                }
                return Ok(Some(one[0]));
            }
            let waited = start.elapsed();
            if waited >= timeout {
                return Ok(None);
            }
            if waited > SPIN && self.supports_blocking_wait() {
                self.0.waiters.fetch_add(1, Ordering::SeqCst);
                let woken = self.arm(false).and_then(|()| self.wait(timeout - waited));
                self.0.waiters.fetch_sub(1, Ordering::SeqCst);
                woken?;
            }
        }
    }

    /// Asks for an event at the next completion, or at the next that is solicited or an error. If one is there
    /// already, the event comes at once.
    pub fn arm(&self, solicited_only: bool) -> Result<()> {
        match &self.0.arm {
            Backend::Soft(soft) => soft.arm(solicited_only),
            Backend::Hard(hard) => hard.arm(solicited_only),
        }
    }

    /// Waits for the event that was asked for, and takes it; tells whether it came in that time.
    pub fn wait(&self, timeout: Duration) -> Result<bool> {
        let signaled = match &self.0.arm {
            Backend::Soft(soft) => soft.signal.wait(timeout)?,
            Backend::Hard(hard) => EventFd::wait_readable(&hard.epoll_fd, timeout)?,
        };
        if signaled {
            self.take_event();
        }
        Ok(signaled)
    }

    /// Takes an event back, for those who wait on the file descriptor themselves.
    pub fn take_event(&self) -> bool {
        match &self.0.arm {
            Backend::Soft(soft) => soft.take_event(),
            Backend::Hard(hard) => hard.take_event(),
        }
    }

    /// Whether somebody who sleeps is woken.
    fn supports_blocking_wait(&self) -> bool {
        match &self.0.arm {
            Backend::Soft(soft) => soft.device.hca.supports_blocking_wait(),
            Backend::Hard(_) => true,
        }
    }
}

impl AsFd for Cq {
    /// Readable when the event that was asked for has come.
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0.arm {
            Backend::Soft(soft) => soft.signal.as_fd(),
            Backend::Hard(hard) => hard.epoll_fd.as_fd(),
        }
    }
}

impl Soft {
    /// The queue pair that a completion is of; none if it had the place of another that is there now.
    #[inline]
    fn find_qp<'a>(&self, reader: &'a mut Reader, qpn: u32, index: u32) -> Option<&'a Core> {
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
            return self.read_slow(reader, entry, into);
        };
        let Some(core) = self.find_qp(reader, sent.qpn, sent.user_index) else { return false };
        *into = Completion::sent(&sent, core.wr_table.complete_send(sent.counter));
        true
    }

    #[inline(never)]
    fn read_slow(&self, reader: &mut Reader, entry: &[u64; 8], into: &mut Completion) -> bool {
        // What is no completion was not written by the device; it is passed over.
        let Ok(cqe) = Cqe::parse_words(entry) else { return false };
        let Some(core) = self.find_qp(reader, cqe.qpn, cqe.user_index) else { return false };
        *into = complete(core, &cqe);
        true
    }

    /// Tells the device which entries are free.
    fn update_consumer_index(&self, count: u64) {
        let word = u32::from_ne_bytes(CqArm::consumed_word(count as u32));
        // What was cleared before goes first: the device may write there as soon as it sees this.
        self.memory.flush_stores();
        let _ = self.memory.bytes().store_u32(u64::from(self.entries) * CQE_LEN, word);
        self.memory.flush_stores();
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
            if !CqeTail::parse(tail).is_owned(owner_bit(reader.consumed, entries)) {
                break;
            }
            let Some(entry) = bytes.load_line(at) else { break };
            reader.consumed += 1;
            count += usize::from(shared.read(&mut reader, &entry, &mut into[count]));
        }
        if reader.consumed != before && !shared.manual_release {
            shared.update_consumer_index(reader.consumed);
        }
        count
    }

    fn release(&self, count: u64) {
        let reader = self.reader.lock();
        if self.manual_release {
            self.update_consumer_index(count.min(reader.consumed));
        }
    }

    fn peek(&self, offset: u64) -> Option<Cqe> {
        let number = self.reader.lock().consumed + offset;
        let mut entry = [0; CQE_LEN as usize];
        if offset >= u64::from(self.entries) || !self.has_cqe(number) {
            return None;
        }
        let slot = (number & (u64::from(self.entries) - 1)) * CQE_LEN;
        self.memory.bytes().read(slot, &mut entry).ok()?;
        Cqe::parse(&entry).ok()
    }

    fn has_cqe(&self, number: u64) -> bool {
        let (bytes, entries) = (self.memory.bytes(), u64::from(self.entries));
        let at = (number & (entries - 1)) * CQE_LEN;
        let tail = bytes.load_u32(at + 60).unwrap_or(u32::MAX).to_ne_bytes();
        CqeTail::parse(tail).is_owned(owner_bit(number, entries))
    }

    /// Makes the completions of a queue pair that wait here void: it was reset, or is no more.
    fn clean(&self, core: &Core) {
        let shared = self;
        // The device may be writing what would be changed here, or a stream be looking at it.
        if shared.ignores_overrun || shared.manual_release {
            return;
        }
        let mut reader = shared.reader.lock();
        let (bytes, entries) = (shared.memory.bytes(), u64::from(shared.entries));
        for number in reader.consumed..reader.consumed + entries {
            let at = (number & (entries - 1)) * CQE_LEN;
            let tail = bytes.load_u32(at + 60).unwrap_or(u32::MAX).to_ne_bytes();
            let entry = bytes.load_line(at);
            let Some(entry) =
                entry.filter(|_| CqeTail::parse(tail).is_owned(owner_bit(number, entries)))
            else {
                break;
            };
            match Cqe::parse_words(&entry) {
                Ok(cqe) if cqe.qpn == core.number => {
                    if !is_send_cqe(&cqe) {
                        core.complete_receive(cqe.counter);
                    }
                    let _ = bytes.store_u32(at + 60, u32::from_ne_bytes(CqeTail::void(tail)));
                }
                Ok(_) => continue,
                Err(_) => {}
            }
            // Where nothing else is before it, its place is free at once: nobody may ever look.
            if number == reader.consumed {
                reader.consumed += 1;
            }
        }
        shared.update_consumer_index(reader.consumed);
    }

    fn arm(&self, solicited_only: bool) -> Result<()> {
        let shared = self;
        let reader = shared.reader.lock();
        let consumer = reader.consumed as u32 & 0xff_ffff;
        let arm = CqArm { sequence: reader.sequence, solicited_only, consumer };
        let entries = u64::from(shared.entries);
        let bytes = shared.memory.bytes();
        bytes.store_u32(entries * CQE_LEN + 4, u32::from_ne_bytes(arm.word()))?;
        // The device sees the arming, or this sees its completion.
        asymmetric_fence::heavy();
        let at = (reader.consumed & (entries - 1)) * CQE_LEN;
        let tail = CqeTail::parse(bytes.load_u32(at + 60)?.to_ne_bytes());
        if tail.is_owned(owner_bit(reader.consumed, entries)) {
            shared.signal.raise();
        }
        // Whoever arms is done with polling, as far as we know.
        shared.device.hca.wake_fallback();
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
    let id = match is_send_cqe(cqe) {
        true => core.wr_table.complete_send(cqe.counter),
        false => core.complete_receive(cqe.counter),
    };
    Completion::of(cqe, id)
}

fn is_send_cqe(cqe: &Cqe) -> bool {
    matches!(cqe.outcome, CqeOutcome::Sent { .. } | CqeOutcome::Failed { queue: Queue::Send, .. })
}

/// A queue that hardware fills.
#[derive(Debug)]
struct Hard {
    cq: ibv::Cq,
    /// Raised when a completion was there already as it was armed: of that, hardware tells nothing.
    pending_event: EventFd,
    /// Readable when that is raised, or the device's own event has come.
    epoll_fd: OwnedFd,
    /// How many it has room for.
    entries: u32,
    no_memory: QueueMemory,
    /// Where it is read, if that is past the provider.
    direct_verbs: Option<DirectVerbsCq>,
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
            true => hardware.context.create_cq_ignoring_overrun(options.entries)?,
            false => hardware.context.create_cq(options.entries)?,
        };
        let pending_event = EventFd::new()?;
        let failed = |why: rustix::io::Errno| Error::os("make an event descriptor", &why.into());
        let epoll_fd = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        for fd in [cq.as_fd(), pending_event.as_fd()] {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&epoll_fd, fd, data, epoll::EventFlags::IN).map_err(failed)?;
        }
        let direct_verbs = options.manual_release || options.ignore_overrun;
        let direct_verbs = direct_verbs.then(|| cq.mlx5dv().map(DirectVerbsCq::new)).transpose()?;
        let entries = direct_verbs.as_ref().map_or(options.entries, |queue| queue.count);
        Ok(Self {
            cq,
            pending_event,
            epoll_fd,
            entries,
            no_memory: QueueMemory::no_memory(),
            direct_verbs,
        })
    }

    fn arm(&self, solicited_only: bool) -> Result<()> {
        if self.direct_verbs.is_some() {
            return Err(no_events());
        }
        self.cq.arm(solicited_only)?;
        if self.cq.has_completions()? {
            self.pending_event.raise();
        }
        Ok(())
    }

    fn take_event(&self) -> bool {
        let was = self.pending_event.take();
        self.cq.take_event().unwrap_or(false) || was
    }
}
