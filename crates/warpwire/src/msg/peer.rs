//! Per-peer state: the connection, queued requests, and received messages.
//!
//! 1. A message uses a receive of the peer that is known to be posted: a *credit*. Credits are
//!    returned in headers (piggy-backed), or in messages of their own when many are owed or nothing
//!    else is being sent.
//! 2. An unexpected message stays in the receive slot into which it arrived. So there are at most
//!    as many unexpected messages as receives, and a sender that exceeds them waits.
//! 3. Control messages that need no credit (done, credits) have additional receives. If none is
//!    posted, the device retries (RNR) until there is one.
//! 4. Requests of the application are posted in order, through one queue. Requests of the protocol
//!    overtake them and have reserved space in the send queue, so that neither waits for the other.

use std::collections::VecDeque;

use super::header::{Channel, HEADER_LEN, MAX_SLICES, RANGE_LEN};
use super::rendezvous::Hello;
use crate::error::{Error, Result};
use crate::mr::HostMemory;
use crate::verbs::{Access, Context, Mr, Pd, Qp};

/// Maximum number of the application's work requests in a send queue.
pub(super) const USER_WORK: u32 = 64;
/// Maximum number of the protocol's work requests in a send queue.
pub(super) const CONTROL_WORK: u32 = 64;
/// Maximum number of rendezvous messages that the peer has not read yet.
pub(super) const MAX_FETCHED: u32 = 32;
/// Receives for control messages, which need no credits.
pub(super) const CONTROL_RECEIVES: u32 = MAX_FETCHED + 4;
/// Length of a header slot in bytes, including ranges.
pub(super) const HEADER_SLOT_LEN: u64 =
    (HEADER_LEN + MAX_SLICES * RANGE_LEN).next_multiple_of(64) as u64;

/// What uses a header slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeaderUse {
    Nothing,
    /// An eager message of this request.
    Eager(u32),
    /// A rendezvous message of this request.
    Rendezvous(u32),
    /// A control message.
    Control,
}

/// Work that the protocol has to post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ControlOp {
    /// Notify the sender that its rendezvous message with this id was read.
    Done(u64),
    /// Read the rendezvous message of this receive.
    Fetch(u32),
}

/// A message without a matching receive.
#[derive(Debug)]
pub(super) struct Unexpected {
    pub channel: Channel,
    pub tag: u32,
    pub len: u64,
    pub from: Source,
}

/// Where an unexpected message is.
#[derive(Debug)]
pub(super) enum Source {
    /// In this receive slot (eager).
    Slot(u32),
    /// In the sender's memory (rendezvous): `slot` holds its ranges, `id` is the sender's id.
    Sender { slot: u32, ranges: u8, id: u64 },
    /// A copy: sent by this rank to itself.
    Buffered(Box<[u8]>),
    /// In the slices of this request, sent by this rank to itself.
    SelfSend(u32),
}

/// A peer rank.
pub(super) struct Peer {
    /// `None` for this rank itself.
    pub qp: Option<Qp>,
    pub hello: Option<Hello>,
    /// Number of messages that may be sent to it.
    pub credits: u32,
    /// Number of credits to be returned to it.
    pub owed: u32,
    pub send_queue: VecDeque<u32>,
    pub control_queue: VecDeque<ControlOp>,
    pub user_work: u32,
    pub control_work: u32,
    /// Our rendezvous messages that it has not read.
    pub unfetched: u32,
    pub headers: Vec<u32>,
    pub header_uses: Box<[HeaderUse]>,
    pub receives: VecDeque<u32>,
    pub unexpected: VecDeque<Unexpected>,
    /// Why the peer is lost; `None` while it is alive.
    pub end: Option<Error>,
    /// The peer announced that it leaves.
    pub has_left: bool,
    /// The connection is unusable: the peer died, or the queue pair failed.
    pub is_broken: bool,
}

impl Peer {
    pub fn new(receives: u32, queue: u32) -> Self {
        let headers = USER_WORK + CONTROL_WORK;
        Self {
            qp: None,
            hello: None,
            credits: 0,
            owed: 0,
            send_queue: VecDeque::with_capacity(queue as usize),
            control_queue: VecDeque::with_capacity((CONTROL_RECEIVES + receives) as usize),
            user_work: 0,
            control_work: 0,
            unfetched: 0,
            headers: (0..headers).rev().collect(),
            header_uses: vec![HeaderUse::Nothing; headers as usize].into(),
            receives: VecDeque::with_capacity(queue as usize),
            unexpected: VecDeque::with_capacity(receives as usize),
            end: None,
            has_left: false,
            is_broken: false,
        }
    }

    /// Maximum length of an eager message to this peer.
    pub fn eager(&self) -> u64 {
        self.hello.as_ref().map_or(0, |hello| hello.slot - HEADER_LEN as u64)
    }
}

/// Registered memory for outgoing headers and incoming messages.
pub(super) struct Area {
    pub headers: HostMemory,
    pub headers_mr: Mr,
    pub slots: HostMemory,
    pub slots_mr: Mr,
    /// Length of a receive slot in bytes, and number of slots per peer.
    pub slot: u64,
    pub receives: u32,
}

impl Area {
    pub fn new(
        context: &Context,
        pd: &Pd,
        peers: usize,
        eager: u64,
        receives: u32,
    ) -> Result<Self> {
        let max_body = eager.max((MAX_SLICES * RANGE_LEN) as u64);
        let slot = (HEADER_LEN as u64 + max_body).next_multiple_of(64);
        let receives = receives + CONTROL_RECEIVES;
        let headers_len = peers as u64 * u64::from(USER_WORK + CONTROL_WORK) * HEADER_SLOT_LEN;
        // One more cache line for the results of atomics, which are discarded.
        let headers = HostMemory::new(headers_len + 64)?;
        let slots = HostMemory::new(peers as u64 * u64::from(receives) * slot)?;
        let headers_mr = context.register(pd, headers.clone(), Access::LOCAL_WRITE)?;
        let slots_mr = context.register(pd, slots.clone(), Access::LOCAL_WRITE)?;
        Ok(Self { headers, headers_mr, slots, slots_mr, slot, receives })
    }

    pub fn header_at(&self, rank: usize, header_slot: u32) -> u64 {
        (rank as u64 * u64::from(USER_WORK + CONTROL_WORK) + u64::from(header_slot))
            * HEADER_SLOT_LEN
    }

    pub fn slot_at(&self, rank: usize, slot: u32) -> u64 {
        (rank as u64 * u64::from(self.receives) + u64::from(slot)) * self.slot
    }
}
