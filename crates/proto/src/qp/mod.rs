//! The queue pair: reliable connected ([`Qp`]) and unreliable datagram ([`Ud`]), sans-IO.
//!
//! Three things go in: packets ([`Qp::handle_packet`]), time ([`Qp::handle_timeout`], and `now` everywhere)
//! and work ([`Qp::post`]). Three come out: packets ([`Qp::poll_transmit`]), deadlines
//! ([`Qp::poll_timeout`]) and events ([`Qp::poll_event`]). Memory is never touched: packets name their
//! payload by [`Source`] and [`Target`], and a [`Host`] resolves keys and moves bytes when it is told to.
//!
//! # The order of calls
//! Any call may give rise to events. After each `handle_packet` take them all; a receipt that is not taken makes
//! the queue pair drop the next packet that needs its place. Handle as many packets as there are, then poll for
//! packets to send: acknowledgements are then told in one. `poll_timeout` is valid until the next call of any
//! other sort. After the host has answered [`Verdict::NotNow`], it polls again when that has changed: the queue
//! pair does not know.
//!
//! # What is promised
//! The tests cite these numbers.
//! 1. A message is delivered once, in order and whole, or its work ends with an error; after that nothing of
//!    it is delivered any more once the error is reported.
//! 2. Completions come in the order of posting; each posted work has exactly one.
//! 3. The first failure carries its reason; all that follows is flushed.
//! 4. Atomics are executed once, however often they are asked for.
//! 5. Memory is allocated when a queue pair is made and when it is connected, never afterwards:
//!    [`Qp::footprint`] is all of it.
//! 6. With a timeout set, no work waits for ever on a peer that is silent.
//! 7. No packet, whatever it holds, panics, or changes anything but the queue pair that it is handed to.
//!
//! | module | what it holds |
//! |---|---|
//! | [`attr`] | states and the table of steps between them |
//! | `requester`, `answer` | our requests, and the answers to them |
//! | `responder`, `saved`, `reply` | the peer's requests, and our answers |
//! | `atomic` | atomics as packets |
//! | `pace` | the rate that congestion leaves |
//! | `ud` | datagrams |

mod answer;
mod atomic;
pub mod attr;
mod host;
mod pace;
mod reply;
mod requester;
mod responder;
mod saved;
mod stats;
mod ud;
mod work;

use core::time::Duration;

pub use attr::{Change, Mtu, Path, Refused, Service, State};
pub use host::{Access, Atomic, Host, Receive, Remote, Source, Target, Verdict, Width};
pub use pace::{CUT_INTERVAL, RAISE_INTERVAL};
pub use stats::{Discard, Stats};
pub use ud::{Datagram, GLOBAL_ROUTE_LEN, Ud};
pub use work::{Carried, Completion, Event, Fence, Notice, Op, PostError, Receipt, Status, Work};

use crate::psn::Psn;
use crate::time::Instant;
use crate::wire::packet::DEFAULT_PARTITION;
use crate::wire::{Extension, Headers, Opcode};
use pace::Pace;
use requester::Requester;
use responder::Responder;

/// The most reads and atomics that may be outstanding in either direction.
pub const MOST_RD_ATOMIC: u8 = 128;
/// The most packets in a message: numbers compare on half a circle.
const MOST_PACKETS: u32 = (1 << 23) - 1;

/// What a queue pair is made with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// How much work may be posted and not completed.
    pub send_depth: u32,
    /// How many packets may be unanswered; fewer of those that are longer than RoCE's, so that they are no more bytes.
    pub window: u32,
    /// How many packets a read request may ask for; longer reads become several requests. Fewer, as above.
    pub read_chunk: u32,
    /// The line's rate in bytes a second, to be slowed by congestion notifications; `None` ignores them.
    pub line_rate: Option<u64>,
}

impl Default for Options {
    fn default() -> Self {
        Self { send_depth: 128, window: 256, read_chunk: 64, line_rate: None }
    }
}

/// A packet that came in, and what its carrier said of it. Its ICRC and its sender have been checked.
#[derive(Clone, Copy, Debug)]
pub struct Arrived<'a> {
    /// What its transport headers say.
    pub headers: &'a Headers,
    /// The length of its payload.
    pub payload_len: u32,
    /// Whether the network marked it: congestion experienced.
    pub marked: bool,
}

/// Payload to be put into a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payload {
    /// Where it lies.
    pub from: Source,
    /// Its length: at most the MTU, at least 1.
    pub len: u32,
}

/// A packet to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// Its transport headers.
    pub headers: Headers,
    /// Its payload.
    pub payload: Option<Payload>,
}

impl Transmit {
    /// A place for packets, to be filled by [`Qp::transmit_into`].
    pub fn new() -> Self {
        let opcode = Opcode::CongestionNotification;
        let headers = Headers::new(opcode, 0, Psn::new(0), Extension::Cnp);
        Self { headers, payload: None }
    }
}

impl Default for Transmit {
    fn default() -> Self {
        Self::new()
    }
}

/// A reliable-connected queue pair.
///
/// ```
/// # use warpwire_proto::{Instant, Psn, qp::*};
/// let mut qp = Qp::new(0x11, Options::default());
/// qp.modify(&Change {
///     partition_index: Some(0),
///     port: Some(1),
///     access: Some(Access::NONE),
///     ..Change::to(State::Init)
/// })?;
/// let refused = qp.modify(&Change { mtu: Mtu::new(1024), ..Change::to(State::Rtr) });
/// assert!(refused.unwrap_err().to_string().starts_with("the step from INIT to RTR also needs"));
/// # Ok::<(), Refused>(())
/// ```
#[derive(Debug)]
pub struct Qp {
    number: u32,
    state: State,
    options: Options,
    path: Option<Path>,
    asking: requester::Terms,
    answering: responder::Terms,
    requester: Requester,
    responder: Responder,
    pace: Pace,
    stats: Stats,
    notice: Option<Notice>,
    established: Established,
    notify_drained: bool,
    /// The last packet was one of ours rather than an answer: the next turn is the answer's.
    asked_last: bool,
    cnp_due: bool,
    last_cnp: Option<Instant>,
}

/// Whether the peer spoke before we were told to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Established {
    No,
    Untold,
    Told,
}

impl Qp {
    /// A queue pair with that number, in `RESET`.
    pub fn new(number: u32, options: Options) -> Self {
        let options = Options {
            send_depth: options.send_depth.clamp(1, 1 << 20),
            window: options.window.clamp(1, 1 << 16),
            read_chunk: options.read_chunk.clamp(1, 1 << 14),
            line_rate: options.line_rate,
        };
        let mtu = Mtu::ALL[0];
        Self {
            number,
            state: State::Reset,
            options,
            path: None,
            asking: requester::Terms {
                destination: 0,
                mtu,
                timeout: None,
                max_rd_atomic: 0,
                window: options.window,
                read_chunk: options.read_chunk,
            },
            answering: responder::Terms {
                destination: 0,
                mtu,
                access: Access::NONE,
                min_rnr_timer: 0,
            },
            requester: Requester::new(options.send_depth),
            responder: Responder::new(),
            pace: Pace::new(options.line_rate),
            stats: Stats::default(),
            notice: None,
            established: Established::No,
            notify_drained: false,
            asked_last: false,
            cnp_due: false,
            last_cnp: None,
        }
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// Its state.
    pub fn state(&self) -> State {
        self.state
    }

    /// Where its peer is, once connected.
    pub fn path(&self) -> Option<&Path> {
        self.path.as_ref()
    }

    /// The number of its peer, once connected.
    pub fn destination(&self) -> u32 {
        self.asking.destination
    }

    /// The most payload in a packet.
    pub fn mtu(&self) -> Mtu {
        self.asking.mtu
    }

    /// What it has counted.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// The rate in bytes a second to which congestion has slowed it; `None` if it has not.
    pub fn slowed_to(&self) -> Option<u64> {
        self.pace.rate()
    }

    /// All memory that it holds, in bytes; it changes only with [`Qp::modify`].
    pub fn footprint(&self) -> usize {
        size_of::<Self>() + self.requester.footprint() + self.responder.saved.footprint()
    }

    /// How much posted work has not been reported yet.
    pub fn outstanding(&self) -> u32 {
        self.requester.held()
    }

    /// Takes a step from the [table](attr::TRANSITIONS). A step that is refused changes nothing.
    pub fn modify(&mut self, change: &Change) -> Result<(), Refused> {
        change.check(Service::Rc, self.state)?;
        match change.to {
            State::Reset => {
                let mut requester = core::mem::replace(&mut self.requester, Requester::new(0));
                requester.reset();
                let stats = self.stats;
                *self = Self { requester, stats, ..Self::new_like(self) };
                return Ok(());
            }
            State::Err => self.fail(None),
            State::Sqd if self.state == State::Rts => {
                self.notify_drained = change.notify_drained.unwrap_or(false);
            }
            _ => {}
        }
        self.apply(change);
        self.state = change.to;
        Ok(())
    }

    fn new_like(other: &Self) -> Self {
        let options = other.options;
        Self { options, ..Self::new(other.number, Options { send_depth: 1, ..options }) }
    }

    fn apply(&mut self, change: &Change) {
        fn set<T: Copy>(place: &mut T, value: Option<T>) {
            *place = value.unwrap_or(*place);
        }
        set(&mut self.answering.access, change.access);
        set(&mut self.answering.min_rnr_timer, change.min_rnr_timer);
        self.requester.set_retries(change.retry_count, change.rnr_retry);
        set(&mut self.asking.max_rd_atomic, change.max_rd_atomic.map(u32::from));
        for terms_mtu in [&mut self.asking.mtu, &mut self.answering.mtu] {
            set(terms_mtu, change.mtu);
        }
        let longest = self.asking.mtu.bytes();
        self.asking.read_chunk = requester::as_many_bytes(self.options.read_chunk, longest);
        for destination in [&mut self.asking.destination, &mut self.answering.destination] {
            set(destination, change.destination);
        }
        if let Some(code) = change.timeout {
            let units = 1u64 << code.min(31);
            self.asking.timeout = (code != 0).then(|| Duration::from_nanos(4096 * units));
        }
        if let Some(records) = change.max_dest_rd_atomic {
            self.responder.saved = self.responder.saved.resized(records);
        }
        if let Some(psn) = change.receive_psn {
            (self.responder.expected, self.responder.acknowledged) = (psn, psn.previous());
        }
        if let Some(psn) = change.send_psn {
            self.requester.begin_at(psn);
        }
        self.path = change.path.or(self.path);
    }

    /// Posts work. It is begun in its turn; its end comes as [`Event::Sent`].
    pub fn post(&mut self, work: Work) -> Result<(), PostError> {
        if !matches!(self.state, State::Rts | State::Sqd | State::Err) {
            return Err(PostError::State(self.state));
        }
        if work.len > requester::LONGEST || self.asking.mtu.packets(work.len) > MOST_PACKETS {
            return Err(PostError::Length(work.len));
        }
        self.requester.post(work, self.options.send_depth)
    }

    /// Takes a packet that came in for this queue pair. Says why, if it was not acted upon.
    pub fn handle_packet<H: Host>(
        &mut self,
        now: Instant,
        arrived: &Arrived<'_>,
        host: &mut H,
    ) -> Result<(), Discard> {
        self.stats.packets_received += 1;
        self.stats.bytes_received += u64::from(arrived.payload_len);
        let outcome = self.sort(now, arrived, host);
        if let Err(reason) = outcome {
            self.stats.count(reason);
        }
        outcome
    }

    fn sort<H: Host>(
        &mut self,
        now: Instant,
        arrived: &Arrived<'_>,
        host: &mut H,
    ) -> Result<(), Discard> {
        let headers = arrived.headers;
        // The upper bit only tells full members from limited ones.
        if headers.partition | 0x8000 != DEFAULT_PARTITION {
            return Err(Discard::Partition);
        }
        // A notification is not answered by another: they would go back and forth without end.
        if arrived.marked && headers.opcode != Opcode::CongestionNotification {
            self.owe_notification(now);
        }
        if headers.opcode.is_response() {
            return self.sort_answer(now, arrived, host);
        }
        match headers.opcode {
            Opcode::UdSendOnly | Opcode::UdSendOnlyImm | Opcode::Unknown(_) => {
                Err(Discard::Service)
            }
            Opcode::CongestionNotification => {
                if !matches!(self.state, State::Rts | State::Sqd | State::Rtr) {
                    return Err(Discard::State);
                }
                self.stats.cnp_received += 1;
                self.pace.cut(now);
                Ok(())
            }
            _ => self.sort_request(arrived, host),
        }
    }

    fn sort_answer<H: Host>(
        &mut self,
        now: Instant,
        arrived: &Arrived<'_>,
        host: &mut H,
    ) -> Result<(), Discard> {
        if !matches!(self.state, State::Rts | State::Sqd) {
            return Err(Discard::State);
        }
        let stats = &mut self.stats;
        match self.requester.handle_answer(now, &self.asking, arrived, host, stats) {
            answer::Outcome::Used => Ok(()),
            answer::Outcome::Dropped(reason) => Err(reason),
            answer::Outcome::Failed(status) => {
                self.fail(Some(status));
                Ok(())
            }
        }
    }

    fn sort_request<H: Host>(
        &mut self,
        arrived: &Arrived<'_>,
        host: &mut H,
    ) -> Result<(), Discard> {
        match self.state {
            State::Rtr | State::Rts | State::Sqd => {}
            State::Err => {
                self.responder.repeat_last_words(arrived.headers.psn);
                return Err(Discard::State);
            }
            State::Reset | State::Init | State::Sqe => return Err(Discard::State),
        }
        let stats = &mut self.stats;
        match self.responder.handle_request(&self.answering, arrived, host, stats) {
            responder::Outcome::Used => {
                if self.state == State::Rtr && self.established == Established::No {
                    self.established = Established::Untold;
                }
                Ok(())
            }
            responder::Outcome::Dropped(reason) => Err(reason),
            responder::Outcome::Failed(notice) => {
                self.fail(None);
                self.notice = Some(notice);
                Ok(())
            }
        }
    }

    /// The queue pair fails; `status` is that of the oldest unfinished work, if it was the cause.
    fn fail(&mut self, status: Option<Status>) {
        if self.state != State::Err {
            self.state = State::Err;
            self.requester.stop(status);
        }
    }

    fn owe_notification(&mut self, now: Instant) {
        let due = self.last_cnp.is_none_or(|last| now - last >= CUT_INTERVAL);
        if due && matches!(self.state, State::Rtr | State::Rts | State::Sqd) {
            self.cnp_due = true;
            self.last_cnp = Some(now);
        }
    }

    /// The next packet to send; `None` until something else happens. Call it until then, or until the link
    /// is full.
    pub fn poll_transmit<H: Host>(&mut self, now: Instant, host: &mut H) -> Option<Transmit> {
        let mut packet = Transmit::new();
        self.transmit_into(now, host, &mut packet).then_some(packet)
    }

    /// As [`Qp::poll_transmit`], into a place that is used again and again: nothing is cleared that is then filled.
    /// Tells whether there is a packet; if not, the place holds nothing of use.
    #[inline]
    pub fn transmit_into<H: Host>(
        &mut self,
        now: Instant,
        host: &mut H,
        packet: &mut Transmit,
    ) -> bool {
        if !self.next_packet(now, host, packet) {
            return false;
        }
        self.stats.packets_sent += 1;
        if let Some(payload) = packet.payload {
            self.stats.bytes_sent += u64::from(payload.len);
            self.pace.spend(now, payload.len);
        }
        true
    }

    /// The packet that [`Qp::transmit_into`] just made does not go: its data was there when the host was asked, and is
    /// not any more. It is made anew at the next call, which asks the host again. No try is spent on it.
    #[cold]
    pub fn take_back(&mut self, packet: &Transmit) {
        match packet.payload.map(|payload| payload.from) {
            Some(Source::Work { .. }) => self.requester.go_back(),
            Some(Source::Remote { .. }) => self.responder.saved.unsent(packet.headers.psn),
            None => {}
        }
    }

    /// Makes `packet` the next one to send.
    fn next_packet<H: Host>(&mut self, now: Instant, host: &mut H, packet: &mut Transmit) -> bool {
        match self.state {
            State::Rts | State::Sqd | State::Rtr => {}
            State::Err if self.responder.owes_last_words() => {}
            _ => return false,
        }
        if core::mem::take(&mut self.cnp_due) {
            self.stats.cnp_sent += 1;
            packet.headers = notification(self.asking.destination);
            packet.payload = None;
            return true;
        }
        packet.headers.becn = false;
        let open = self.pace.is_open(now);
        // Requests and answers take turns, so that neither waits for long; a request goes first, because somebody
        // waits for what it brings, and an acknowledgement only makes room.
        let turn = !self.asked_last && self.responder.has_answers();
        if turn && self.next_request(now, open, host, packet) {
            self.asked_last = true;
            return true;
        }
        self.asked_last = false;
        match self.responder.poll_transmit(&self.answering, open, host, &mut self.stats, packet) {
            Ok(true) => return true,
            Ok(false) => {}
            Err(notice) => {
                self.fail(None);
                self.notice = Some(notice);
                return self.next_packet(now, host, packet);
            }
        }
        self.next_request(now, open, host, packet)
    }

    fn next_request<H: Host>(
        &mut self,
        now: Instant,
        open: bool,
        host: &mut H,
        packet: &mut Transmit,
    ) -> bool {
        if !open || !matches!(self.state, State::Rts | State::Sqd) {
            return false;
        }
        let may_begin = self.state == State::Rts;
        let stats = &mut self.stats;
        match self.requester.poll_transmit(now, &self.asking, may_begin, host, stats, packet) {
            Ok(found) => found,
            Err(status) => {
                self.fail(Some(status));
                false
            }
        }
    }

    /// When [`Qp::handle_timeout`] or [`Qp::poll_transmit`] wants to be called next, if nothing else happens.
    pub fn poll_timeout(&self, now: Instant) -> Instant {
        match self.state {
            State::Rts | State::Sqd | State::Rtr => {}
            State::Err if self.responder.owes_last_words() => return self.pace.opens_at(now),
            _ => return Instant::NEVER,
        }
        let requester = &self.requester;
        let waits = requester.has_work() && requester.resume > now;
        let resume = if waits { requester.resume } else { Instant::NEVER };
        requester.deadline.min(resume).min(self.pace.opens_at(now))
    }

    /// The link had no room for a packet of this queue pair. Tries are spent while that lasts, as if packets were lost.
    pub fn held_up(&mut self, now: Instant) {
        if self.state == State::Rts {
            self.requester.held_up(now, &self.asking);
        }
    }

    /// Time has passed.
    pub fn handle_timeout(&mut self, now: Instant) {
        if matches!(self.state, State::Rts | State::Sqd)
            && let Err(status) = self.requester.handle_timeout(now, &mut self.stats)
        {
            self.fail(Some(status));
        }
    }

    /// Whether [`Qp::poll_event`] has something to say: quicker to ask after each packet.
    #[inline]
    pub fn has_events(&self) -> bool {
        self.requester.reported != self.requester.tail
            || self.responder.has_receipt()
            || self.notice.is_some()
            || self.established == Established::Untold
            || !matches!(self.state, State::Rts | State::Rtr)
    }

    /// What there is to say. Call it until `None`.
    pub fn poll_event(&mut self) -> Option<Event> {
        let failed = self.state == State::Err;
        if let Some(completion) = self.requester.poll_completion(failed) {
            return Some(Event::Sent(completion));
        }
        if let Some(receipt) = self.responder.poll_receipt(failed) {
            return Some(Event::Received(receipt));
        }
        if self.established == Established::Untold {
            self.established = Established::Told;
            return Some(Event::Notice(Notice::Established));
        }
        if let Some(notice) = self.notice.take() {
            return Some(Event::Notice(notice));
        }
        let drained = self.state == State::Sqd && self.requester.is_drained();
        if drained && core::mem::take(&mut self.notify_drained) {
            return Some(Event::Notice(Notice::Drained));
        }
        None
    }

    /// Whether all that was begun is done: a queue pair in `SQD` may then be changed.
    pub fn is_drained(&self) -> bool {
        self.requester.is_drained()
    }

    /// The number of the next request that it expects, and of the next that it sends.
    pub fn positions(&self) -> (Psn, Psn) {
        (self.responder.expected, self.requester.next)
    }
}

/// "Your packets to me meet congestion": not acknowledged, and without a number.
fn notification(destination: u32) -> Headers {
    let opcode = Opcode::CongestionNotification;
    Headers { becn: true, ..Headers::new(opcode, destination, Psn::new(0), Extension::Cnp) }
}
