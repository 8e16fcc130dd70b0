//! What a rank knows of another: the connection, what waits to go out, and what came in.
//!
//! 1. A message takes a receive of the peer that is known to be free: a *credit*. Credits come back with headers, or
//!    alone when many are owed or nothing else is to be said.
//! 2. What nobody has asked for yet stays in the receive in which it came. So there are at most as many unexpected
//!    messages as receives, and who sends more waits.
//! 3. Words that need no credit (a message was fetched; credits) have receives of their own. Should there be none,
//!    the device tries again until there is one.
//! 4. What the program posts goes out in order, through one queue. What the protocol posts passes it, and has room of
//!    its own in the send queue, so that neither waits for the other.

use std::collections::VecDeque;

use super::header::{Channel, HEADER_LEN, MAX_SLICES, RANGE_LEN};
use super::rendezvous::Hello;
use crate::error::{Error, Result};
use crate::mr::HostMemory;
use crate::verbs::{Access, Context, Mr, Pd, Qp};

/// Work of the program in a send queue, at most.
pub(super) const USER_WORK: u32 = 64;
/// Work of the protocol in a send queue, at most.
pub(super) const CONTROL_WORK: u32 = 64;
/// Messages whose fetching is under way, at most.
pub(super) const MAX_FETCHED: u32 = 32;
/// Receives for words without credits.
pub(super) const CONTROL_RECEIVES: u32 = MAX_FETCHED + 4;
/// How long the place of a header is: with the ranges that may follow.
pub(super) const HEADER_SLOT_LEN: u64 =
    (HEADER_LEN + MAX_SLICES * RANGE_LEN).next_multiple_of(64) as u64;

/// What uses the place of a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum HeaderUse {
    Nothing,
    /// A message that is complete with it.
    Eager(u32),
    /// A message that the peer fetches.
    Rendezvous(u32),
    /// A word of the protocol.
    Control,
}

/// What the protocol has to post.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ControlOp {
    /// Tell that the message with this number was fetched.
    Done(u64),
    /// Fetch what this receive needs.
    Fetch(u32),
}

/// A message that nobody has asked for yet.
#[derive(Debug)]
pub(super) struct Unexpected {
    pub channel: Channel,
    pub tag: u32,
    pub len: u64,
    pub from: Source,
}

/// Where it is.
#[derive(Debug)]
pub(super) enum Source {
    /// In this receive.
    Slot(u32),
    /// At its sender, who calls it so; the receive names its ranges.
    Sender { slot: u32, ranges: u8, id: u64 },
    /// Here: from this rank to itself.
    Buffered(Box<[u8]>),
    /// In the parts of this request, from this rank to itself.
    SelfSend(u32),
}

/// A rank, as another sees it.
pub(super) struct Peer {
    /// Nothing for this rank itself.
    pub qp: Option<Qp>,
    pub hello: Option<Hello>,
    /// How many messages it has room for.
    pub credits: u32,
    /// How many it may be told that we have room for.
    pub owed: u32,
    pub send_queue: VecDeque<u32>,
    pub control_queue: VecDeque<ControlOp>,
    pub user_work: u32,
    pub control_work: u32,
    /// Our messages that it has not fetched.
    pub unfetched: u32,
    pub headers: Vec<u32>,
    pub header_uses: Box<[HeaderUse]>,
    pub receives: VecDeque<u32>,
    pub unexpected: VecDeque<Unexpected>,
    /// Why nothing more comes from it.
    pub end: Option<Error>,
    /// It said that it leaves.
    pub has_left: bool,
    /// The connection is of no use any more: the peer died, or is gone.
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

    /// The longest message that it takes whole.
    pub fn eager(&self) -> u64 {
        self.hello.as_ref().map_or(0, |hello| hello.slot - HEADER_LEN as u64)
    }
}

/// Registered memory for headers that go out, and messages that come in.
pub(super) struct Area {
    pub headers: HostMemory,
    pub headers_mr: Mr,
    pub slots: HostMemory,
    pub slots_mr: Mr,
    /// How long a place for a message is, and how many each peer has.
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
        // One line more: what atomics bring back, which nobody looks at.
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
