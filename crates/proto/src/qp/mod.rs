//! The queue pair: reliable connected ([`RcQp`]), unreliable connected ([`Uc`]) and unreliable
//! datagram ([`Ud`]), sans-IO.
//!
//! There are three inputs: packets ([`RcQp::handle_packet`]), time ([`RcQp::handle_timeout`], and
//! `now` everywhere) and work ([`RcQp::post`]); and three outputs: packets
//! ([`RcQp::poll_transmit`]), deadlines ([`RcQp::poll_timeout`]) and events ([`RcQp::poll_event`]).
//! Memory is never accessed here: packets name their payload by [`Source`] and [`Target`], and a
//! [`Host`] resolves keys and moves bytes on request.
//!
//! # Order of calls
//! Any call may produce events. Poll them all after each `handle_packet`: while a receive
//! completion is pending, the queue pair drops the next packet that would produce one. Handle all
//! available packets first, then poll for packets to send: ACKs are then coalesced. The result of
//! `poll_timeout` is valid until the next call of any other method. After the host has answered
//! [`HostStatus::Retry`], it polls again when the condition has changed: the queue pair is not
//! notified.
//!
//! # Promises
//! The tests cite these numbers.
//! 1. Each message is delivered exactly once, in order and complete, or its work request fails.
//!    After the failure is reported, no more of it is delivered.
//! 2. Completions come in the order of posting; each posted work request has exactly one.
//! 3. The first failure carries its reason; all that follows is flushed.
//! 4. Atomics are executed once, however often they are retransmitted.
//! 5. Memory is allocated when a queue pair is created and when it is connected, never afterwards:
//!    [`RcQp::footprint`] is all of it.
//! 6. With a timeout set, no work waits forever for a silent peer.
//! 7. No packet, whatever it contains, causes a panic or affects anything but the queue pair that
//!    it is passed to.
//!
//! | module | contents |
//! |---|---|
//! | [`attr`] | states, and the table of transitions |
//! | `requester`, `completer` | our requests, and the responses to them |
//! | `responder`, `resource`, `response` | the peer's requests, and our responses |
//! | `atomic` | atomics on the wire |
//! | `selective` | what is known about packets that arrived out of order |
//! | `rto` | the retransmission timeout, from measured round trips |
//! | `uc` | unreliable connections |
//! | `ud` | datagrams |
//! | `window` | memory windows |

mod access;
mod atomic;
pub mod attr;
mod completer;
mod host;
mod requester;
mod resource;
mod responder;
mod response;
mod rto;
mod selective;
mod stats;
mod uc;
mod ud;
mod window;
mod work;

use core::time::Duration;

pub use access::{Access, AccessError};
pub use attr::{ModifyError, Mtu, PathAttributes, QpAttributes, Service, State};
pub use host::{
    Atomic, AtomicWidth, FollowingReads, Host, HostStatus, Receive, Remote, Source, Target,
};
pub use selective::HOLD_SLOTS;
pub use stats::{DiscardReason, Stats};
pub use uc::Uc;
pub use ud::{Datagram, GRH_LEN, Ud};
pub use window::{MwBind, MwType, next_rkey};
pub use work::{
    Fence, ProtocolEvent, QpEvent, ReceiveCompletion, ReceiveKind, SendCompletion, SendOp,
    SendQueueError, SendWr, Status,
};

use crate::congestion::PathSignals;
use crate::psn::Psn;
use crate::time::Instant;
use crate::wire::packet::DEFAULT_PARTITION;
use crate::wire::{Extension, Headers, Opcode};
use alloc::boxed::Box;

use requester::Requester;
use responder::Responder;

/// Maximum of outstanding reads and atomics, in either direction.
pub const MAX_QP_RD_ATOM: u8 = 128;
/// Maximum of packets in a message of ours: PSNs compare on half of the circle. One less than 2^31
/// bytes need at the smallest MTU.
const MAX_MESSAGE_PACKETS: u32 = (1 << 23) - 1;
/// Minimum time between two congestion notifications (CNPs) of a queue pair.
pub const CNP_INTERVAL: Duration = Duration::from_micros(50);

/// Options of a queue pair, fixed when it is created.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct TransportOptions {
    /// Maximum of posted, not yet completed work requests; clamped to 1..=2^20. Default 128.
    pub send_depth: u32,
    /// Maximum of unacknowledged packets; clamped to 1..=65536. Default 256. Reduced for packets
    /// beyond RoCE's maximum of 4096 bytes, so that the bytes in flight stay the same; for the same
    /// reason, with selective repeat, more if the MTU is smaller.
    pub window: u32,
    /// Maximum of packets per read request, longer reads are split; clamped to 1..=16384. Default
    /// 16: what a read may exceed the window of its path by. Reduced for long packets as above.
    pub read_chunk: u32,
}

setters! {
    TransportOptions {
        with_send_depth => send_depth: u32,
        with_window => window: u32,
        with_read_chunk => read_chunk: u32,
    }
}

impl Default for TransportOptions {
    fn default() -> Self {
        Self { send_depth: 128, window: 256, read_chunk: 16 }
    }
}

/// A received packet, whose ICRC and sender have been checked.
#[derive(Clone, Copy, Debug)]
pub struct RxPacket<'a> {
    /// The parsed transport headers.
    pub headers: &'a Headers,
    /// The length of the payload in bytes.
    pub payload_len: u32,
    /// Whether the network marked it: congestion experienced (ECN CE).
    pub marked: bool,
}

/// Payload to be copied into a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Payload {
    /// Where to read it.
    pub from: Source,
    /// Its length: from 1 to the MTU.
    pub len: u32,
}

/// A packet to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    /// The transport headers.
    pub headers: Headers,
    /// The payload, if there is any.
    pub payload: Option<Payload>,
}

/// What a queue pair may have to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pending {
    /// Nothing until another input.
    Nothing,
    /// Answers to the peer's requests only.
    Responses,
    /// Requests, or anything else.
    Requests,
}

impl Transmit {
    /// A packet for [`RcQp::transmit_into`] to fill.
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
/// let mut qp = RcQp::new(0x11, TransportOptions::default());
/// let init = QpAttributes::new(State::Init).with_partition_index(0).with_port(1);
/// qp.modify(&init.with_access(Access::NONE))?;
/// let refused = qp.modify(&QpAttributes::new(State::Rtr).with_mtu(Mtu::new(1024)));
/// let error = refused.unwrap_err().to_string();
/// assert!(error.starts_with("the transition from INIT to RTR also requires"));
/// # Ok::<(), ModifyError>(())
/// ```
#[derive(Debug)]
pub struct RcQp {
    number: u32,
    state: State,
    options: TransportOptions,
    path: Option<PathAttributes>,
    requester_params: requester::ConnParams,
    responder_params: responder::ConnParams,
    requester: Requester,
    responder: Responder,
    stats: Stats,
    qp_event: Option<QpEvent>,
    established: Established,
    notify_drained: bool,
    /// The last packet was a request rather than a response: a response is sent next.
    last_was_request: bool,
    cnp_due: bool,
    last_cnp: Option<Instant>,
}

/// Whether a packet of the peer arrived in RTR.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Established {
    No,
    Pending,
    Reported,
}

impl RcQp {
    /// Creates a queue pair in `RESET`.
    pub fn new(number: u32, options: TransportOptions) -> Self {
        let options = TransportOptions {
            send_depth: options.send_depth.clamp(1, 1 << 20),
            window: options.window.clamp(1, 1 << 16),
            read_chunk: options.read_chunk.clamp(1, 1 << 14),
        };
        let mtu = Mtu::ALL[0];
        Self {
            number,
            state: State::Reset,
            options,
            path: None,
            requester_params: requester::ConnParams {
                destination: 0,
                mtu,
                timeout: None,
                max_rd_atomic: 0,
                window: options.window,
                full_mtu_window: options.window,
                read_chunk: options.read_chunk,
            },
            responder_params: responder::ConnParams {
                destination: 0,
                mtu,
                access: Access::NONE,
                min_rnr_timer: 0,
            },
            requester: Requester::new(options.send_depth),
            responder: Responder::new(),
            stats: Stats::default(),
            qp_event: None,
            established: Established::No,
            notify_drained: false,
            last_was_request: false,
            cnp_due: false,
            last_cnp: None,
        }
    }

    /// The queue pair number.
    pub fn number(&self) -> u32 {
        self.number
    }

    /// The current state.
    pub fn state(&self) -> State {
        self.state
    }

    /// The path to the peer, once connected.
    pub fn path(&self) -> Option<&PathAttributes> {
        self.path.as_ref()
    }

    /// The peer's queue pair number, once connected.
    pub fn destination(&self) -> u32 {
        self.requester_params.destination
    }

    /// The path MTU.
    pub fn mtu(&self) -> Mtu {
        self.requester_params.mtu
    }

    /// The counters since the queue pair was created.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }

    /// All memory that it holds, in bytes; changes only with [`RcQp::modify`].
    pub fn footprint(&self) -> usize {
        let held = self.responder.held.as_ref().map_or(0, |_| size_of::<selective::PsnSet>());
        size_of::<Self>() + held + self.requester.footprint() + self.responder.resource.footprint()
    }

    /// Packets in flight: requests that are not acknowledged, and data that was asked for.
    #[inline]
    pub fn in_flight(&self) -> u32 {
        match self.state {
            State::Rts | State::Sqd => self.requester.in_flight(),
            _ => 0,
        }
    }

    /// Limits [`in_flight`](Self::in_flight) until the next call: see
    /// [`congestion`](crate::congestion). A read may exceed the limit by one request.
    #[inline]
    pub fn set_allowance(&mut self, packets: u32) {
        self.requester.allowance = packets;
    }

    /// Whether, since the last call, a packet could not be sent because of the allowance alone.
    #[inline]
    pub fn take_blocked_by_path(&mut self) -> bool {
        core::mem::take(&mut self.requester.blocked_by_path)
    }

    /// What it has seen of the path since the last call.
    #[inline]
    pub fn take_path_signals(&mut self) -> PathSignals {
        core::mem::take(&mut self.requester.signals)
    }

    /// Posted work requests whose completion has not been polled yet.
    pub fn outstanding(&self) -> u32 {
        self.requester.outstanding()
    }

    /// Changes state or attributes according to the [table](attr::TRANSITIONS). A rejected change
    /// has no effect.
    pub fn modify(&mut self, attr: &QpAttributes) -> Result<(), ModifyError> {
        attr.check(Service::Rc, self.state)?;
        match attr.to {
            State::Reset => {
                let mut requester = core::mem::replace(&mut self.requester, Requester::new(0));
                requester.reset();
                let stats = self.stats;
                *self = Self { requester, stats, ..Self::new_like(self) };
                return Ok(());
            }
            State::Err => self.fail(None),
            State::Sqd if self.state == State::Rts => {
                self.notify_drained = attr.notify_drained.unwrap_or(false);
            }
            _ => {}
        }
        self.apply(attr);
        self.state = attr.to;
        Ok(())
    }

    fn new_like(other: &Self) -> Self {
        let options = other.options;
        Self { options, ..Self::new(other.number, TransportOptions { send_depth: 1, ..options }) }
    }

    fn apply(&mut self, attr: &QpAttributes) {
        fn set<T: Copy>(field: &mut T, value: Option<T>) {
            *field = value.unwrap_or(*field);
        }
        set(&mut self.responder_params.access, attr.access);
        set(&mut self.responder_params.min_rnr_timer, attr.min_rnr_timer);
        self.requester.set_retries(attr.retry_count, attr.rnr_retry);
        set(&mut self.requester_params.max_rd_atomic, attr.max_rd_atomic.map(u32::from));
        for params_mtu in [&mut self.requester_params.mtu, &mut self.responder_params.mtu] {
            set(params_mtu, attr.mtu);
        }
        if let Some(selective) = attr.selective_repeat {
            self.responder.held = selective.then(Box::default);
            self.requester.selective = selective.then(|| Box::new(selective::Recovery::new()));
        }
        let (mut window, mut read_chunk) = (self.options.window, self.options.read_chunk);
        if self.has_selective_repeat() {
            // All PSNs in flight have a bit; a read may exceed the window by one request.
            read_chunk = read_chunk.min(selective::SPAN / 4);
            window = requester::scale_to_mtu(window, self.requester_params.mtu);
            window = window.min(selective::SPAN - read_chunk);
        }
        let max_payload = self.requester_params.mtu.bytes();
        self.requester_params.window = window;
        self.requester_params.full_mtu_window = requester::scale_to_payload(window, max_payload);
        self.requester_params.read_chunk = requester::scale_to_payload(read_chunk, max_payload);
        for destination in
            [&mut self.requester_params.destination, &mut self.responder_params.destination]
        {
            set(destination, attr.destination);
        }
        if let Some(code) = attr.timeout {
            let units = 1u64 << code.min(31);
            self.requester_params.timeout = (code != 0).then_some(4096 * units);
        }
        if let Some(records) = attr.max_dest_rd_atomic {
            self.responder.resource = self.responder.resource.resized(records);
        }
        if let Some(psn) = attr.receive_psn {
            (self.responder.expected, self.responder.acknowledged) = (psn, psn.previous());
        }
        if let Some(psn) = attr.send_psn {
            self.requester.begin_at(psn);
        }
        self.path = attr.path.or(self.path);
    }

    /// Posts work. It starts in queue order and completes with an [`ProtocolEvent::Sent`].
    pub fn post(&mut self, work: SendWr) -> Result<(), SendQueueError> {
        if !matches!(self.state, State::Rts | State::Sqd | State::Err) {
            return Err(SendQueueError::State(self.state));
        }
        if work.len > requester::MAX_MESSAGE_LEN
            || self.requester_params.mtu.packets(work.len) > MAX_MESSAGE_PACKETS
        {
            return Err(SendQueueError::Length(work.len));
        }
        self.requester.post(work, self.options.send_depth)
    }

    /// Handles a packet received for this queue pair. `Err` is the reason for which it was
    /// discarded.
    pub fn handle_packet<H: Host>(
        &mut self,
        now: Instant,
        rx: &RxPacket<'_>,
        host: &mut H,
    ) -> Result<(), DiscardReason> {
        self.stats.packets_received += 1;
        self.stats.bytes_received += u64::from(rx.payload_len);
        let outcome = self.dispatch(now, rx, host);
        if let Err(reason) = outcome {
            self.stats.count(reason);
        }
        outcome
    }

    /// Whether selective repeat was negotiated.
    #[inline]
    pub fn has_selective_repeat(&self) -> bool {
        self.responder.held.is_some()
    }

    /// The slot of a packet that the host holds, and whose turn has come: pass that packet to
    /// [`RcQp::handle_held`], poll events, and call this again until `None`. Call it after each
    /// [`RcQp::handle_packet`] once events were polled, if selective repeat was negotiated.
    #[inline]
    pub fn take_held(&mut self) -> Option<u32> {
        if !self.has_selective_repeat()
            || !matches!(self.state, State::Rtr | State::Rts | State::Sqd)
        {
            return None;
        }
        self.responder.take_held().or_else(|| self.requester.take_held())
    }

    /// Handles a packet that [`RcQp::take_held`] named, as [`RcQp::handle_packet`].
    pub fn handle_held<H: Host>(
        &mut self,
        now: Instant,
        rx: &RxPacket<'_>,
        host: &mut H,
    ) -> Result<(), DiscardReason> {
        let outcome = self.dispatch(now, rx, host);
        if let Err(reason) = outcome {
            self.stats.count(reason);
        }
        outcome
    }

    fn dispatch<H: Host>(
        &mut self,
        now: Instant,
        rx: &RxPacket<'_>,
        host: &mut H,
    ) -> Result<(), DiscardReason> {
        let headers = rx.headers;
        // The top bit only distinguishes full from limited members.
        if headers.partition | 0x8000 != DEFAULT_PARTITION {
            return Err(DiscardReason::Partition);
        }
        // A CNP is not answered by another one: they would go back and forth forever.
        if rx.marked && headers.opcode != Opcode::CongestionNotification {
            self.schedule_cnp(now);
        }
        if headers.opcode.is_response() {
            // The window that data of reads counts in is ours, not that of the end that sends it.
            self.requester.signals.marked |= rx.marked;
            return self.dispatch_response(now, rx, host);
        }
        match headers.opcode {
            Opcode::UdSendOnly | Opcode::UdSendOnlyImm | Opcode::Unknown(_) => {
                Err(DiscardReason::Service)
            }
            opcode if opcode.is_uc() => Err(DiscardReason::Service),
            Opcode::CongestionNotification => {
                if !matches!(self.state, State::Rts | State::Sqd | State::Rtr) {
                    return Err(DiscardReason::State);
                }
                self.stats.cnp_received += 1;
                self.requester.signals.marked = true;
                Ok(())
            }
            _ => self.dispatch_request(rx, host),
        }
    }

    fn dispatch_response<H: Host>(
        &mut self,
        now: Instant,
        rx: &RxPacket<'_>,
        host: &mut H,
    ) -> Result<(), DiscardReason> {
        if !matches!(self.state, State::Rts | State::Sqd) {
            return Err(DiscardReason::State);
        }
        let stats = &mut self.stats;
        match self.requester.handle_response(now, &self.requester_params, rx, host, stats) {
            completer::Outcome::Accepted => Ok(()),
            completer::Outcome::Dropped(reason) => Err(reason),
            completer::Outcome::Failed(status) => {
                self.fail(Some(status));
                Ok(())
            }
        }
    }

    fn dispatch_request<H: Host>(
        &mut self,
        rx: &RxPacket<'_>,
        host: &mut H,
    ) -> Result<(), DiscardReason> {
        match self.state {
            State::Rtr | State::Rts | State::Sqd => {}
            State::Err => {
                self.responder.repeat_fatal_nak(&self.responder_params, rx.headers);
                return Err(DiscardReason::State);
            }
            State::Reset | State::Init | State::Sqe => return Err(DiscardReason::State),
        }
        let stats = &mut self.stats;
        match self.responder.handle_request(&self.responder_params, rx, host, stats) {
            responder::Outcome::Accepted => {
                if self.state == State::Rtr && self.established == Established::No {
                    self.established = Established::Pending;
                }
                Ok(())
            }
            responder::Outcome::Held => Ok(()),
            responder::Outcome::Dropped(reason) => Err(reason),
            responder::Outcome::Failed(qp_event) => {
                self.fail(None);
                self.qp_event = Some(qp_event);
                Ok(())
            }
        }
    }

    /// Moves the queue pair to the error state; `status` is that of the oldest unfinished work, if
    /// it was the cause.
    fn fail(&mut self, status: Option<Status>) {
        if self.state != State::Err {
            self.state = State::Err;
            self.requester.stop(status);
        }
    }

    fn schedule_cnp(&mut self, now: Instant) {
        let due = self.last_cnp.is_none_or(|last| now - last >= CNP_INTERVAL);
        if due && matches!(self.state, State::Rtr | State::Rts | State::Sqd) {
            self.cnp_due = true;
            self.last_cnp = Some(now);
        }
    }

    /// The next packet to send; `None` if there is none until another input. Call it until then, or
    /// until the link is full.
    pub fn poll_transmit<H: Host>(&mut self, now: Instant, host: &mut H) -> Option<Transmit> {
        let mut packet = Transmit::new();
        self.transmit_into(now, host, &mut packet).then_some(packet)
    }

    /// What [`RcQp::transmit_into`] may find to send: much cheaper than the call itself.
    #[inline]
    pub fn pending(&mut self, now: Instant) -> Pending {
        let is_connected = matches!(self.state, State::Rts | State::Sqd | State::Rtr);
        if !is_connected || self.cnp_due || self.requester.may_transmit(now) {
            return Pending::Requests;
        }
        match self.responder.has_responses() {
            true => Pending::Responses,
            false => Pending::Nothing,
        }
    }

    /// As [`RcQp::poll_transmit`], into a packet that is reused, which saves clearing it. Returns
    /// whether there is a packet; if not, the contents of `packet` are undefined.
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
        }
        true
    }

    /// The packet that [`RcQp::transmit_into`] just produced could not be sent: its data was
    /// accessible when the host was asked, and is not any more. The next call produces it again,
    /// and asks the host again. No retry is consumed.
    #[cold]
    pub fn undo_transmit(&mut self, packet: &Transmit) {
        self.stats.packets_sent -= 1;
        self.stats.bytes_sent -= packet.payload.map_or(0, |payload| u64::from(payload.len));
        match packet.payload.map(|payload| payload.from) {
            Some(Source::SendWr { .. }) => self.requester.undo(packet.headers.psn),
            Some(Source::Remote { .. }) => self.responder.resource.undo_sent(packet.headers.psn),
            None => {}
        }
    }

    /// Makes `packet` the next one to send.
    fn next_packet<H: Host>(&mut self, now: Instant, host: &mut H, packet: &mut Transmit) -> bool {
        match self.state {
            State::Rts | State::Sqd | State::Rtr => {}
            State::Err if self.responder.has_fatal_nak() => {}
            _ => return false,
        }
        if core::mem::take(&mut self.cnp_due) {
            self.stats.cnp_sent += 1;
            packet.headers = cnp_headers(self.requester_params.destination);
            packet.payload = None;
            return true;
        }
        packet.headers.becn = false;
        // Requests and responses alternate, so that neither starves. A request is sent first: the
        // application waits for its result, while an ACK only frees resources.
        let request_first = !self.last_was_request && self.responder.has_responses();
        if request_first && self.next_request(now, host, packet) {
            self.last_was_request = true;
            return true;
        }
        self.last_was_request = false;
        let (params, stats) = (&self.responder_params, &mut self.stats);
        match self.responder.poll_transmit(params, host, stats, packet) {
            Ok(true) => return true,
            Ok(false) => {}
            Err(qp_event) => {
                self.fail(None);
                self.qp_event = Some(qp_event);
                return self.next_packet(now, host, packet);
            }
        }
        self.next_request(now, host, packet)
    }

    fn next_request<H: Host>(&mut self, now: Instant, host: &mut H, packet: &mut Transmit) -> bool {
        if !matches!(self.state, State::Rts | State::Sqd) {
            return false;
        }
        let may_start = self.state == State::Rts;
        let stats = &mut self.stats;
        match self.requester.poll_transmit(
            now,
            &self.requester_params,
            may_start,
            host,
            stats,
            packet,
        ) {
            Ok(found) => found,
            Err(status) => {
                self.fail(Some(status));
                false
            }
        }
    }

    /// When [`RcQp::handle_timeout`] or [`RcQp::poll_transmit`] must be called next if nothing else
    /// happens.
    pub fn poll_timeout(&self, now: Instant) -> Instant {
        match self.state {
            State::Rts | State::Sqd | State::Rtr => {}
            _ => return Instant::NEVER,
        }
        let requester = &self.requester;
        let backing_off = requester.has_work() && requester.resume > now;
        let resume = if backing_off { requester.resume } else { Instant::NEVER };
        requester.deadline.min(resume)
    }

    /// Reports that the link had no room for a packet of this queue pair. While that lasts it
    /// counts as packet loss, and retries are consumed.
    pub fn on_link_full(&mut self, now: Instant) {
        if self.state == State::Rts {
            self.requester.on_link_full(now, &self.requester_params);
        }
    }

    /// Handles expired timers.
    pub fn handle_timeout(&mut self, now: Instant) {
        if matches!(self.state, State::Rts | State::Sqd)
            && let Err(status) =
                self.requester.handle_timeout(now, &self.requester_params, &mut self.stats)
        {
            self.fail(Some(status));
        }
    }

    /// Whether [`RcQp::poll_event`] has an event; cheaper to call after each packet.
    #[inline]
    pub fn has_events(&self) -> bool {
        self.requester.reported != self.requester.tail
            || self.responder.has_receive_completion()
            || self.qp_event.is_some()
            || self.established == Established::Pending
            || !matches!(self.state, State::Rts | State::Rtr)
    }

    /// The next event. Call it until `None`.
    pub fn poll_event(&mut self) -> Option<ProtocolEvent> {
        let failed = self.state == State::Err;
        if let Some(completion) = self.requester.poll_completion(failed) {
            return Some(ProtocolEvent::Sent(completion));
        }
        if let Some(receive_completion) = self.responder.poll_receive_completion(failed) {
            return Some(ProtocolEvent::Received(receive_completion));
        }
        if self.established == Established::Pending {
            self.established = Established::Reported;
            return Some(ProtocolEvent::Async(QpEvent::Established));
        }
        if let Some(qp_event) = self.qp_event.take() {
            return Some(ProtocolEvent::Async(qp_event));
        }
        let drained = self.state == State::Sqd && self.requester.is_drained();
        if drained && core::mem::take(&mut self.notify_drained) {
            return Some(ProtocolEvent::Async(QpEvent::Drained));
        }
        None
    }

    /// Whether all work that was started has completed: a queue pair in `SQD` may then be modified.
    pub fn is_drained(&self) -> bool {
        self.requester.is_drained()
    }

    /// The PSN of the next request that it expects, and of the next that it sends.
    pub fn next_psns(&self) -> (Psn, Psn) {
        (self.responder.expected, self.requester.next)
    }
}

/// A congestion notification packet: not acknowledged, and without a PSN.
fn cnp_headers(destination: u32) -> Headers {
    let opcode = Opcode::CongestionNotification;
    Headers { becn: true, ..Headers::new(opcode, destination, Psn::new(0), Extension::Cnp) }
}
