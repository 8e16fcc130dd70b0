//! Completion queues: polling, completion events, and the two backends.

use std::collections::HashMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use rustix::event::epoll;

use super::direct_verbs::{DirectVerbsCq, no_events};
use super::hardware::Hardware;
use super::qp::Core;
use super::{Context, Device, SoftDevice};
use crate::error::{Error, Kind, Result};
use crate::hca::{CQE_LEN, CqSpec, EventFd, QueueMemory};
use crate::ibv;
use crate::mlx5::{CqArm, Cqe, CqeOutcome, CqeTail, EMPTY_CQE_BYTE, Queue, SendCqe, owner_bit};
use crate::sync::{BiasedMutex, asymmetric_fence};
use crate::work::Completion;

/// Attributes of a new completion queue.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct CqOptions {
    /// Minimum number of entries, 1 to 4194304; rounded up to a power of two. Default: 256. The
    /// queue must hold the completions of all outstanding work: an overrun fails it.
    pub entries: u32,
    /// Memory for the entries, such as pinned or device memory, of at least [`Cq::required_memory`]
    /// bytes. Default: host memory. Software HCA only.
    pub memory: Option<QueueMemory>,
    /// Every completion overwrites entry 0, for pollers that only read its WQE counter. Default:
    /// false. Software HCA only.
    pub collapsed: bool,
    /// Completions overwrite unread ones instead of failing the queue
    /// (`IBV_CREATE_CQ_ATTR_IGNORE_OVERRUN`). Default: false. Hardware: mlx5 only, with the
    /// restrictions of `manual_release`.
    pub ignore_overrun: bool,
    /// Entries that were polled stay valid until [`Cq::release`], because a stream or a kernel may
    /// still read them. Default: false. Hardware: mlx5 only; the queue is read with direct verbs
    /// (mlx5dv) and generates no completion events.
    pub manual_release: bool,
}

setters! {
    CqOptions {
        with_entries => entries: u32,
        with_collapsed => collapsed: bool,
        with_ignore_overrun => ignore_overrun: bool,
        with_manual_release => manual_release: bool,
    } optional {
        with_memory => memory: QueueMemory,
    }
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

/// A completion queue. Clones refer to the same queue; it is destroyed when the last clone and the
/// last queue pair that uses it are dropped.
///
/// Any thread may poll it. Completions of one send queue, and those of one unshared receive queue,
/// are polled in posting order; a signaled completion implies that all earlier work of its send
/// queue is complete.
#[derive(Clone, Debug)]
pub struct Cq(pub(super) Arc<CqInner>);

/// A thread or a task that sleeps until there is a completion.
pub(crate) struct CqWaiter<'a>(&'a Cq);

impl Drop for CqWaiter<'_> {
    fn drop(&mut self) {
        self.0.0.waiters.fetch_sub(1, Ordering::SeqCst);
    }
}

// Aligned so that it shares no cache line with another queue's.
#[derive(Debug)]
#[repr(align(128))]
pub(super) struct CqInner {
    /// Threads and tasks that sleep until there is a completion.
    waiters: AtomicU32,
    backend: Backend,
}

#[derive(Debug)]
enum Backend {
    Soft(Soft),
    Hard(Hard),
}

/// A queue that the software HCA writes.
#[derive(Debug)]
struct Soft {
    device: Arc<SoftDevice>,
    number: u32,
    /// The engines that a thread which polls the queue runs, one bit each: those of its queue
    /// pairs, or all where nothing else runs them.
    engines: AtomicU32,
    first: Ring,
    /// The rings that replaced it, each at least twice as large; earlier ones are kept, because
    /// [`Cq::memory`] lends them.
    larger: Box<[OnceLock<Ring>; 22]>,
    /// How many of `larger` exist; changed under the reader's lock.
    resized: AtomicUsize,
    /// Its memory belongs to this library, and only `poll` reads it.
    resizable: bool,
    /// Entries may be overwritten before they are read.
    ignores_overrun: bool,
    /// Entries are released by [`Cq::release`] only.
    manual_release: bool,
    signal: Arc<EventFd>,
    reader: BiasedMutex<Reader>,
}

/// The entries of a queue, and the doorbell record behind them.
#[derive(Debug)]
struct Ring {
    memory: QueueMemory,
    entries: u32,
}

impl Ring {
    /// All entries empty.
    fn new(memory: QueueMemory, entries: u32) -> Result<Self> {
        let ring = Self { memory, entries };
        let bytes = ring.memory.bytes();
        bytes.fill(0, ring.dbrec(), &[EMPTY_CQE_BYTE])?;
        bytes.fill(ring.dbrec(), 64, &[0])?;
        ring.memory.flush_stores();
        Ok(ring)
    }

    fn dbrec(&self) -> u64 {
        u64::from(self.entries) * CQE_LEN
    }
}

#[derive(Debug)]
struct Reader {
    /// Completions read since creation.
    consumed: u64,
    /// Cache: the queue pair of the last completion, with its user index. The next completion is
    /// often of the same one.
    last: Option<(u32, Arc<Core>)>,
    /// The queue pairs that use this queue, by user index.
    pairs: HashMap<u32, Arc<Core>>,
    /// Two bits that advance with each event, so that re-arming is a change of the record.
    sequence: u8,
}

impl Drop for Soft {
    fn drop(&mut self) {
        self.device.hca.destroy_cq(self.number);
    }
}

impl Cq {
    /// Bytes of memory that a queue of at least `entries` entries needs, doorbell record included.
    pub fn required_memory(entries: u32) -> u64 {
        u64::from(entries.max(1).next_power_of_two()) * CQE_LEN + 64
    }

    pub(super) fn create(context: &Context, options: CqOptions) -> Result<Self> {
        if options.entries == 0 || options.entries > 1 << 22 {
            let why = format!("{} entries are out of range", options.entries);
            let error = Error::new(Kind::InvalidArgument, "create a completion queue").why(why);
            return Err(error.fix("ask for 1 to 4194304"));
        }
        let device = match &context.0 {
            Device::Soft(device) => device.clone(),
            Device::Hard(hardware) => {
                let backend = Backend::Hard(Hard::create(hardware, &options)?);
                return Ok(Self(Arc::new(CqInner { waiters: AtomicU32::new(0), backend })));
            }
        };
        let entries = options.entries.next_power_of_two();
        let has_memory = options.memory.is_some();
        let memory = match options.memory {
            Some(memory) => memory,
            None => QueueMemory::host(Self::required_memory(entries))?,
        };
        let first = Ring::new(memory, entries)?;
        let signal = Arc::new(EventFd::new()?);
        let number = device.hca.create_cq(CqSpec {
            memory: first.memory.clone(),
            entries,
            dbrec: first.dbrec(),
            collapsed: options.collapsed,
            ignore_overrun: options.ignore_overrun,
            signal: Some(signal.clone()),
        })?;
        let reader = BiasedMutex::new(Reader {
            consumed: 0,
            last: None,
            pairs: HashMap::new(),
            sequence: 1,
        });
        let ignores_overrun = options.collapsed || options.ignore_overrun;
        let manual_release = options.manual_release;
        let runs_all = device.hca.engines() == 1 || !device.hca.supports_blocking_wait();
        let soft = Soft {
            engines: AtomicU32::new(if runs_all { device.hca.all_engines() } else { 0 }),
            device,
            number,
            first,
            larger: Default::default(),
            resized: AtomicUsize::new(0),
            resizable: !(has_memory || ignores_overrun || manual_release),
            ignores_overrun,
            manual_release,
            signal,
            reader,
        };
        Ok(Self(Arc::new(CqInner { waiters: AtomicU32::new(0), backend: Backend::Soft(soft) })))
    }

    /// The queue's number, which asynchronous events and [`WrOp::Wait`](super::WrOp::Wait) name.
    pub fn number(&self) -> u32 {
        match &self.0.backend {
            Backend::Soft(soft) => soft.number,
            Backend::Hard(hard) => hard.cq.number(),
        }
    }

    /// Memory of the entries, for callers that read them directly. `None` on hardware, unless the
    /// queue uses direct verbs ([`CqOptions::manual_release`]).
    pub fn memory(&self) -> Option<&QueueMemory> {
        match &self.0.backend {
            Backend::Soft(soft) => Some(&soft.ring().memory),
            Backend::Hard(hard) => hard.direct_verbs.as_ref().map(|queue| &queue.entries),
        }
    }

    /// The same, for callers that cannot do without.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] if there is none.
    pub(crate) fn mapped_memory(&self) -> Result<&QueueMemory> {
        self.memory().ok_or_else(|| {
            Error::new(Kind::Unsupported, "access the entries of a completion queue")
                .why("the queue does not use direct verbs")
                .fix("set CqOptions::manual_release on an mlx5 device, or use the software HCA")
        })
    }

    /// The mapped queue, if it is read with direct verbs.
    pub(super) fn direct_verbs(&self) -> Option<&DirectVerbsCq> {
        match &self.0.backend {
            Backend::Soft(_) => None,
            Backend::Hard(hard) => hard.direct_verbs.as_ref(),
        }
    }

    /// The libibverbs queue; `None` for the software HCA.
    pub(super) fn hardware(&self) -> Option<&ibv::Cq> {
        match &self.0.backend {
            Backend::Soft(_) => None,
            Backend::Hard(hard) => Some(&hard.cq),
        }
    }

    /// Polls up to `into.len()` completions (`ibv_poll_cq`); returns how many entries of `into`
    /// were written. Never blocks.
    ///
    /// On the software HCA, an empty queue is polled again after one step of the engine, so polling
    /// also sends and receives packets: on a device with several engines, those of this queue's
    /// queue pairs. Acquire ordering: data that the completed work placed in
    /// memory is visible to the caller. Completions of destroyed queue pairs are skipped.
    ///
    /// # Errors
    /// If the link or the device has failed, or, on hardware, the queue has overrun. Failed work is
    /// no error here: see [`Completion::status`].
    #[inline]
    pub fn poll(&self, into: &mut [Completion]) -> Result<usize> {
        let soft = match &self.0.backend {
            Backend::Soft(soft) => soft,
            Backend::Hard(Hard { direct_verbs: None, cq, .. }) => return cq.poll(into),
            Backend::Hard(Hard { direct_verbs: Some(queue), .. }) => return Ok(queue.poll(into)),
        };
        let found = soft.take(into);
        if found > 0 || into.is_empty() {
            return Ok(found);
        }
        soft.device.hca.poll_engines(soft.engines.load(Ordering::Relaxed))?;
        Ok(soft.take(into))
    }

    /// Polls completions that are there already, without a step of the engine: for threads beside
    /// engines that have threads of their own ([`ProgressMode::Thread`](super::ProgressMode)), with
    /// which a step would contend. On hardware the same as [`poll`](Self::poll).
    ///
    /// ```
    /// use warpwire::link::Hub;
    /// use warpwire::verbs::{Completion, Context, HcaOptions, ProgressMode, QpOptions};
    /// use warpwire::verbs::{SendRequest, WrOp};
    /// let link = Hub::new().endpoint("10.0.0.1:4791".parse().unwrap())?;
    /// let options = HcaOptions::default().with_progress_mode(ProgressMode::Manual);
    /// let context = Context::open_with(link, options)?;
    /// let (pd, cq) = (context.alloc_pd(), context.create_cq(16)?);
    /// let qp = context.create_qp(&pd, &cq, &cq, QpOptions::default())?;
    /// qp.connect(&qp.endpoint())?;
    /// qp.post_send(&[SendRequest::new(1, WrOp::Nop), SendRequest::new(2, WrOp::Nop)])?;
    /// let mut one = [Completion::EMPTY];
    /// assert_eq!(cq.poll_ready(&mut one)?, 0); // no thread has made a step
    /// assert_eq!((cq.poll(&mut one)?, one[0].id), (1, 1)); // this one has
    /// assert_eq!((cq.poll_ready(&mut one)?, one[0].id), (1, 2));
    /// # Ok::<(), warpwire::Error>(())
    /// ```
    ///
    /// # Errors
    /// As for [`poll`](Self::poll), on hardware.
    #[inline]
    pub fn poll_ready(&self, into: &mut [Completion]) -> Result<usize> {
        match &self.0.backend {
            Backend::Soft(soft) => Ok(soft.take(into)),
            Backend::Hard(_) => self.poll(into),
        }
    }

    /// Adds a new queue pair, and its engine to those that polling runs.
    pub(super) fn add_qp(&self, user_index: u32, core: &Arc<Core>, engines: u32) {
        if let Backend::Soft(soft) = &self.0.backend {
            soft.engines.fetch_or(engines, Ordering::Relaxed);
            soft.reader.lock().pairs.insert(user_index, core.clone());
        }
    }

    /// Voids the unread completions of a queue pair that was reset or destroyed.
    pub(super) fn clean(&self, core: &Core) {
        if let Backend::Soft(soft) = &self.0.backend {
            soft.clean(core);
        }
    }

    /// Removes a queue pair: its user index may be reused.
    pub(super) fn remove_qp(&self, user_index: u32) {
        if let Backend::Soft(soft) = &self.0.backend {
            let mut reader = soft.reader.lock();
            reader.last = None;
            reader.pairs.remove(&user_index);
        }
    }

    /// Returns entries to the device: the first `count` completions since creation may be
    /// overwritten. Capped at the number polled. Does nothing unless the queue has
    /// [`CqOptions::manual_release`].
    pub fn release(&self, count: u64) {
        match &self.0.backend {
            Backend::Soft(soft) => soft.release(count),
            Backend::Hard(hard) => {
                if let Some(queue) = &hard.direct_verbs {
                    queue.release(count);
                }
            }
        }
    }

    /// The completion `offset` entries after the next one, if it has been written; it stays unread.
    /// Work request ids are not looked up. On hardware: direct verbs only, else `None`.
    pub(crate) fn peek(&self, offset: u64) -> Option<Cqe> {
        match &self.0.backend {
            Backend::Soft(soft) => soft.peek(offset),
            Backend::Hard(hard) => hard.direct_verbs.as_ref()?.peek(offset),
        }
    }

    /// Whether completion `number`, counted from 0, has been written. `number` must be within one
    /// queue length of the released ones.
    pub(crate) fn has_cqe(&self, number: u64) -> bool {
        match &self.0.backend {
            Backend::Soft(soft) => soft.has_cqe(number),
            Backend::Hard(hard) => {
                hard.direct_verbs.as_ref().is_some_and(|queue| queue.has_cqe(number))
            }
        }
    }

    /// Number of entries. On hardware without direct verbs it is the number asked for; the provider
    /// may have allocated more.
    pub fn entries(&self) -> u32 {
        match &self.0.backend {
            Backend::Soft(soft) => soft.ring().entries,
            Backend::Hard(hard) => hard.entries,
        }
    }

    /// Grows the queue to at least `entries` entries (`ibv_resize_cq`); completions that were not
    /// polled stay in it. A queue that is large enough is left as it is: queues do not shrink.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if `entries` is not 1 to 4194304, or less than the number of
    /// completions that were not polled. [`Kind::Unsupported`] on hardware, and on queues with
    /// memory of the caller's, `collapsed`, `ignore_overrun` or `manual_release`: streams and
    /// kernels may be reading their entries.
    pub fn resize(&self, entries: u32) -> Result<()> {
        let what = "resize a completion queue";
        if entries == 0 || entries > 1 << 22 {
            let why = format!("{entries} entries are out of range");
            return Err(Error::new(Kind::InvalidArgument, what)
                .why(why)
                .fix("ask for 1 to 4194304"));
        }
        match &self.0.backend {
            Backend::Soft(soft) if soft.resizable => soft.resize(entries),
            Backend::Soft(_) => Err(Error::new(Kind::Unsupported, what)
                .why("its options let a stream or a kernel read the entries")
                .fix("create a larger queue")),
            Backend::Hard(_) => Err(Error::new(Kind::Unsupported, what)
                .why("the queue belongs to an RDMA device")
                .fix("create a larger queue")),
        }
    }

    /// Waits for the next completion; `None` when `timeout` has passed.
    ///
    /// Polls for 50 µs, then sleeps until a completion event; it keeps polling where nothing would
    /// wake it ([`ProgressMode::Manual`](super::ProgressMode::Manual)). Several threads may wait:
    /// each gets one completion.
    ///
    /// # Errors
    /// As for [`poll`](Self::poll) and [`arm`](Self::arm).
    pub fn wait_next(&self, timeout: Duration) -> Result<Option<Completion>> {
        const SPIN: Duration = Duration::from_micros(50);
        let start = Instant::now();
        let mut one = [Completion::EMPTY];
        loop {
            if self.poll(&mut one)? == 1 {
                self.pass_event_on()?;
                return Ok(Some(one[0]));
            }
            let waited = start.elapsed();
            if waited >= timeout {
                return Ok(None);
            }
            if waited > SPIN && self.supports_blocking_wait() {
                let _waiter = self.add_waiter();
                self.arm(false).and_then(|()| self.wait_event(timeout - waited))?;
            }
        }
    }

    /// Counts a waiter until the value returned is dropped.
    pub(crate) fn add_waiter(&self) -> CqWaiter<'_> {
        self.0.waiters.fetch_add(1, Ordering::SeqCst);
        CqWaiter(self)
    }

    /// One event may stand for several completions: after one was taken, passes it on to the other
    /// waiters.
    pub(crate) fn pass_event_on(&self) -> Result<()> {
        match self.0.waiters.load(Ordering::SeqCst) {
            0 => Ok(()),
            _ => self.arm(false),
        }
    }

    /// Requests one completion event (`ibv_req_notify_cq`): for the next completion or, if
    /// `solicited_only`, for the next one that is solicited or failed. Unlike in rdma-core, a
    /// completion that is already in the queue also triggers it, so no second poll is needed after
    /// arming.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] on a hardware queue that uses direct verbs.
    pub fn arm(&self, solicited_only: bool) -> Result<()> {
        match &self.0.backend {
            Backend::Soft(soft) => soft.arm(solicited_only),
            Backend::Hard(hard) => hard.arm(solicited_only),
        }
    }

    /// Waits for the requested event and consumes it; returns whether it occurred within `timeout`.
    /// Poll the queue afterwards: the event may be spurious.
    pub fn wait_event(&self, timeout: Duration) -> Result<bool> {
        let signaled = match &self.0.backend {
            Backend::Soft(soft) => soft.signal.wait(timeout)?,
            Backend::Hard(hard) => EventFd::wait_readable(&hard.epoll_fd, timeout)?,
        };
        if signaled {
            self.take_event();
        }
        Ok(signaled)
    }

    /// Consumes the event without blocking, for callers that wait on the file descriptor; returns
    /// whether there was one.
    pub fn take_event(&self) -> bool {
        match &self.0.backend {
            Backend::Soft(soft) => soft.take_event(),
            Backend::Hard(hard) => hard.take_event(),
        }
    }

    /// Whether some thread advances the engine, and so wakes one that sleeps.
    pub(crate) fn supports_blocking_wait(&self) -> bool {
        match &self.0.backend {
            Backend::Soft(soft) => soft.device.hca.supports_blocking_wait(),
            Backend::Hard(_) => true,
        }
    }
}

impl AsFd for Cq {
    /// Readable once the requested event has occurred, until [`take_event`](Cq::take_event). An
    /// event loop polls until the queue is empty, [arms](Cq::arm) it, waits until this is readable,
    /// and takes the event.
    fn as_fd(&self) -> BorrowedFd<'_> {
        match &self.0.backend {
            Backend::Soft(soft) => soft.signal.as_fd(),
            Backend::Hard(hard) => hard.epoll_fd.as_fd(),
        }
    }
}

impl Soft {
    /// The queue pair of a completion; `None` if it is gone, even if another one now has its user
    /// index.
    #[inline]
    fn find_qp(reader: &mut Reader, qpn: u32, index: u32) -> Option<&Core> {
        let is_last =
            reader.last.as_ref().is_some_and(|(last, core)| *last == index && core.number == qpn);
        if !is_last {
            Self::look_up(reader, qpn, index);
        }
        reader.last.as_ref().map(|(_, core)| &**core)
    }

    #[inline(never)]
    fn look_up(reader: &mut Reader, qpn: u32, index: u32) {
        let core = reader.pairs.get(&index).filter(|core| core.number == qpn);
        reader.last = core.map(|core| (index, core.clone()));
    }

    /// Decodes a completion; false if its queue pair is gone.
    #[inline]
    fn read(&self, reader: &mut Reader, entry: &[u64; 8], into: &mut Completion) -> bool {
        let Some(sent) = SendCqe::parse_words(entry) else {
            return self.read_slow(reader, entry, into);
        };
        let Some(core) = Self::find_qp(reader, sent.qpn, sent.user_index) else { return false };
        *into = Completion::sent(&sent, core.wr_table.complete_send(sent.counter));
        true
    }

    #[inline(never)]
    fn read_slow(&self, reader: &mut Reader, entry: &[u64; 8], into: &mut Completion) -> bool {
        // Skip entries that are not valid CQEs: voided ones, or not written by the device.
        let Ok(cqe) = Cqe::parse_words(entry) else { return false };
        let Some(core) = Self::find_qp(reader, cqe.qpn, cqe.user_index) else { return false };
        *into = complete(core, &cqe);
        true
    }

    /// The entries in use. They change under the reader's lock, and only if the queue is resizable.
    #[inline]
    fn ring(&self) -> &Ring {
        match self.resized.load(Ordering::Acquire) {
            0 => &self.first,
            count => self.larger.get(count - 1).and_then(OnceLock::get).unwrap_or(&self.first),
        }
    }

    fn resize(&self, asked: u32) -> Result<()> {
        let entries = asked.next_power_of_two();
        let reader = self.reader.lock();
        if entries <= self.ring().entries {
            let produced = self.device.hca.cq_produced(self.number);
            let unread = produced.saturating_sub(reader.consumed);
            if unread <= asked.into() {
                return Ok(());
            }
            return Err(Error::new(Kind::InvalidArgument, "resize a completion queue")
                .why(format!("it has {unread} completions that were not polled"))
                .fix("poll them first, or ask for more entries"));
        }
        let memory = QueueMemory::host(Cq::required_memory(entries))?;
        let larger = Ring::new(memory.clone(), entries)?;
        // From here on the device writes to the new entries.
        self.device.hca.resize_cq(self.number, memory, entries, reader.consumed)?;
        let count = self.resized.load(Ordering::Relaxed);
        if self.larger.get(count).is_some_and(|slot| slot.set(larger).is_ok()) {
            self.resized.store(count + 1, Ordering::Release);
        }
        Ok(())
    }

    /// Writes the consumer index to the doorbell record: earlier entries may be overwritten.
    fn update_consumer_index(&self, count: u64) {
        let word = u32::from_ne_bytes(CqArm::consumed_word(count as u32));
        let ring = self.ring();
        // Earlier stores first: the device may write an entry as soon as it sees the new index.
        ring.memory.flush_stores();
        let _ = ring.memory.bytes().store_u32(ring.dbrec(), word);
        ring.memory.flush_stores();
    }

    /// Takes completions that have been written, without a step of the engine.
    fn take(&self, into: &mut [Completion]) -> usize {
        let shared = self;
        let mut reader = shared.reader.lock();
        let ring = shared.ring();
        let (bytes, entries) = (ring.memory.bytes(), u64::from(ring.entries));
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
        let ring = self.ring();
        let mut entry = [0; CQE_LEN as usize];
        if offset >= u64::from(ring.entries) || !self.has_cqe(number) {
            return None;
        }
        let slot = (number & (u64::from(ring.entries) - 1)) * CQE_LEN;
        ring.memory.bytes().read(slot, &mut entry).ok()?;
        Cqe::parse(&entry).ok()
    }

    fn has_cqe(&self, number: u64) -> bool {
        let ring = self.ring();
        let (bytes, entries) = (ring.memory.bytes(), u64::from(ring.entries));
        let at = (number & (entries - 1)) * CQE_LEN;
        let tail = bytes.load_u32(at + 60).unwrap_or(u32::MAX).to_ne_bytes();
        CqeTail::parse(tail).is_owned(owner_bit(number, entries))
    }

    /// Voids the unread completions of a queue pair that was reset or destroyed.
    fn clean(&self, core: &Core) {
        let shared = self;
        // The device may be overwriting these entries, or a stream may be reading them.
        if shared.ignores_overrun || shared.manual_release {
            return;
        }
        let mut reader = shared.reader.lock();
        let ring = shared.ring();
        let (bytes, entries) = (ring.memory.bytes(), u64::from(ring.entries));
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
            // Free leading void entries here: the queue may never be polled again.
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
        let ring = shared.ring();
        let (bytes, entries) = (ring.memory.bytes(), u64::from(ring.entries));
        bytes.store_u32(entries * CQE_LEN + 4, u32::from_ne_bytes(arm.word()))?;
        // Either the device sees the arming, or the load below sees its completion.
        asymmetric_fence::heavy();
        let at = (reader.consumed & (entries - 1)) * CQE_LEN;
        let tail = CqeTail::parse(bytes.load_u32(at + 60)?.to_ne_bytes());
        if tail.is_owned(owner_bit(reader.consumed, entries)) {
            shared.signal.raise();
        }
        // A thread that arms usually stops polling: let the fallback thread take over.
        shared.device.hca.wake_fallbacks(shared.engines.load(Ordering::Relaxed));
        Ok(())
    }

    fn take_event(&self) -> bool {
        let mut reader = self.reader.lock();
        let was = self.signal.take();
        // Only with an event: the sequence has two bits, and without completions a word that came
        // again would be taken for one that was answered, or for that of a queue never armed.
        reader.sequence = (reader.sequence + u8::from(was)) & 3;
        was
    }
}

/// Converts a CQE; the queue pair's table has the work request id.
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

/// A queue that hardware writes.
#[derive(Debug)]
struct Hard {
    cq: ibv::Cq,
    /// Raised if a completion was already there when the queue was armed: hardware generates no
    /// event for it.
    pending_event: EventFd,
    /// Readable when `pending_event` is raised or the device's own event has occurred.
    epoll_fd: OwnedFd,
    entries: u32,
    /// Set if the queue is read with direct verbs.
    direct_verbs: Option<DirectVerbsCq>,
}

impl Hard {
    fn create(hardware: &Hardware, options: &CqOptions) -> Result<Self> {
        if options.memory.is_some() || options.collapsed {
            return Err(Error::new(Kind::Unsupported, "create a completion queue")
                .on(hardware.context.device().name.clone())
                .why("libibverbs allocates its memory, and has no collapsed queues")
                .fix("omit these options, or use the software HCA"));
        }
        let cq = match options.ignore_overrun {
            true => hardware.context.create_cq_ignoring_overrun(options.entries)?,
            false => hardware.context.create_cq(options.entries)?,
        };
        let pending_event = EventFd::new()?;
        let failed = |why: rustix::io::Errno| Error::os("create an epoll descriptor", &why.into());
        let epoll_fd = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(failed)?;
        for fd in [cq.as_fd(), pending_event.as_fd()] {
            let data = epoll::EventData::new_u64(0);
            epoll::add(&epoll_fd, fd, data, epoll::EventFlags::IN).map_err(failed)?;
        }
        let direct_verbs = options.manual_release || options.ignore_overrun;
        let direct_verbs = direct_verbs.then(|| cq.mlx5dv().map(DirectVerbsCq::new)).transpose()?;
        let entries = direct_verbs.as_ref().map_or(options.entries, |queue| queue.count);
        Ok(Self { cq, pending_event, epoll_fd, entries, direct_verbs })
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
