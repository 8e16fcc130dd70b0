//! Operations without packets: where a peer of this machine lets us map its memory, the requester writes, reads and
//! changes words there by itself.
//!
//! The owner's side is a table that peers read ([`Offer`]): a row per queue pair that takes requests, a row per
//! registration that peers may use. [`Grants`] keeps it. The requester's side is a [`Partner`](super::partner::Partner) per connection, with what it knows of
//! the peer's keys, and a [`Reach`] per queue pair.
//!
//! # Promises
//! 1. **An operation is done directly only if the protocol would do it, with success.** The rows say all that the peer's
//!    responder looks at: the queue pair's state, its peer, its rights, its domain, the key and its tag, domain, rights, bounds.
//!    Whatever does not fit takes the protocol, which then fails on the right side with the right status.
//! 2. **Order is kept**: nothing of the queue pair is outstanding in the protocol when an operation is done directly. Work that is large, or that
//!    had to give way often, waits for that; the rest goes by packets behind what is under way.
//! 3. **What has ended is not touched**: each visit is announced, and each row looked at again after that
//!    ([`Peer::visit`](crate::link::Peer::visit)).
//! 4. No step is longer than [`TURN`] bytes: others have their turn in between, and who takes memory back waits for
//!    one turn at most.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use warpwire_proto::qp::{self, Change, State, Work as WireWork};

use super::complete;
use super::engine::{Core, Engine, place_of};
use super::pair::Pair;
use super::partner::Partners;
use crate::link::Offer;
use crate::link::shm::grant::Content;
use crate::mem::copy::expect_store;
use crate::mlx5::{self, Piece};
use crate::mr::{Access, Export, Watch};
use crate::sync::Guard;

/// How many bytes one turn of a queue pair moves.
pub(super) const TURN: u32 = 1 << 20;
/// How many turns a poster makes at most before it goes on.
pub(super) const MOST_TURNS: u32 = 2;

/// Rows of queue pairs come first, then those of keys.
pub(super) const FIRST_KEY: u32 = 1 << 16;
const MOST_KEYS: u32 = 1 << 16;

/// The row of a key, if it has one: those beyond the first 65 536 registrations have none.
pub(super) fn row_of(key: u32) -> Option<u32> {
    (key >> 8 < MOST_KEYS).then_some(FIRST_KEY + (key >> 8))
}

/// The owner's side. Registrations may outlive the device; its table ends with it, and with the table all rows.
pub(super) struct Grants(pub Weak<Offer>);

impl Watch for Grants {
    fn opened(&self, export: &Export) {
        let (Some(row), Some(offer)) = (row_of(export.key), self.0.upgrade()) else { return };
        let Export { key, pd, access, iova, len, memory, offset } = *export;
        let content = [key.into(), pd, access.bits().into(), iova, len, memory, offset];
        offer.open(row as usize, &content);
    }

    fn closing(&self, key: u32) {
        if let (Some(row), Some(offer)) = (row_of(key), self.0.upgrade()) {
            offer.close(row as usize);
        }
    }
}

/// An address in words that compare.
pub(super) fn words(address: SocketAddr) -> [u64; 3] {
    let (ip, scope) = match address {
        SocketAddr::V4(v4) => (v4.ip().to_ipv6_mapped(), 0),
        SocketAddr::V6(v6) => (*v6.ip(), v6.scope_id()),
    };
    let ip = u128::from(ip);
    [(ip >> 64) as u64, ip as u64, u64::from(scope) << 32 | u64::from(address.port())]
}

/// The bits of a queue pair's rights.
fn rights(access: qp::Access, reads: bool) -> u64 {
    let pairs = [
        (qp::Access::REMOTE_WRITE, Access::REMOTE_WRITE, true),
        (qp::Access::REMOTE_READ, Access::REMOTE_READ, reads),
        (qp::Access::REMOTE_ATOMIC, Access::REMOTE_ATOMIC, reads),
    ];
    let held = pairs.iter().filter(|(right, _, so)| *so && access.contains(*right));
    held.fold(0, |bits, (_, right, _)| bits | u64::from(right.bits()))
}

/// What a turn has left of posted work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Left {
    Nothing,
    /// More of the same.
    ForTurns,
    /// What is not for the poster to do.
    ForSteps,
}

/// What a queue pair says and knows about operations without packets.
#[derive(Debug)]
pub(super) struct Reach {
    /// What its peer may do here, and how many of its reads and atomics there may be.
    access: qp::Access,
    answers: u8,
    /// How many reads and atomics of its own there may be.
    pub asks: u8,
    /// What stands in its row.
    told: Option<Content>,
    /// The partner whose memory it reaches.
    pub partner: Option<u32>,
    /// Why there is none.
    pub why: &'static str,
    /// The opening of the peer's queue pair that was found right, with its domain and rights.
    pub opening: u64,
    pub pd: u64,
    pub may: u64,
    /// Work that waits, or is done in part.
    pub held: Option<WireWork>,
    pub done: u32,
    /// So often did work take the protocol because something was outstanding.
    pub gave_way: u32,
}

impl Reach {
    pub(super) fn new() -> Self {
        Self {
            access: qp::Access::NONE,
            answers: 0,
            asks: 0,
            told: None,
            partner: None,
            why: "not connected",
            opening: 0,
            pd: 0,
            may: 0,
            held: None,
            done: 0,
            gave_way: 0,
        }
    }

    /// Keeps what the protocol keeps for itself.
    pub(super) fn note(&mut self, change: &Change) {
        self.access = change.access.unwrap_or(self.access);
        self.answers = change.max_dest_rd_atomic.unwrap_or(self.answers);
        self.asks = change.max_rd_atomic.unwrap_or(self.asks);
    }

    /// Forgets all work, and what the peer was.
    pub(super) fn reset(&mut self) {
        (self.held, self.done, self.opening, self.gave_way) = (None, 0, 0, 0);
        (self.access, self.answers, self.asks) = (qp::Access::NONE, 0, 0);
    }

    /// For people: whether this queue pair needs packets.
    pub(super) fn describe(&self, partners: &Partners) -> String {
        match self.partner.and_then(|at| partners.get(at)) {
            None => format!("packets only: {}", self.why),
            Some(partner) if !partner.peer.offers() => {
                "packets only: the peer has offered no memory".to_owned()
            }
            Some(_) if self.opening == 0 => {
                "direct where the peer's memory can be mapped; not used so far".to_owned()
            }
            Some(partner) => {
                let count = partner.memories.iter().filter(|known| known.is_alive()).count();
                format!("direct: writes, reads and atomics in {count} mapped memories of the peer")
            }
        }
    }
}

impl Pair {
    /// Brings the row of a queue pair up to date: open while it takes requests.
    pub(super) fn tell(&mut self, offer: Option<&Arc<Offer>>) {
        let Some(offer) = offer else { return };
        let row = place_of(self.qp.number()) as usize;
        let takes = matches!(self.qp.state(), State::Rts | State::Sqd);
        let connection = self.qp.connection().filter(|_| takes);
        let content =
            connection.and_then(|qp| qp.path().map(|path| (qp, path))).map(|(qp, path)| {
                let ids = u64::from(qp.number()) << 32 | u64::from(qp.destination());
                let may = rights(self.reach.access, self.reach.answers > 0);
                let [a, b, c] = words(path.peer);
                [ids, may, self.side.pd.raw(), a, b, c, 0]
            });
        if content == self.reach.told {
            return;
        }
        if self.reach.told.take().is_some() {
            offer.close(row);
        }
        if let Some(content) = content {
            offer.open(row, &content);
            self.reach.told = Some(content);
        }
    }

    /// Shuts the row for good.
    pub(super) fn tell_end(&mut self, offer: Option<&Arc<Offer>>) {
        if let (Some(offer), Some(_)) = (offer, self.reach.told.take()) {
            offer.close(place_of(self.qp.number()) as usize);
        }
    }
}

impl Core {
    /// Does what was posted, as far as that needs no packets, for one turn. The time is that of the last step: what depends on
    /// it is left to the next one.
    pub(super) fn do_at_once(&mut self, index: u32) -> Left {
        let Some(Some(pair)) = self.pairs.get(index as usize) else { return Left::ForSteps };
        if pair.reach.partner.is_none()
            || pair.qp.state() != State::Rts
            || pair.qp.outstanding() > 0
        {
            return Left::ForSteps;
        }
        let done = self.totals.direct_operations;
        self.look_at(self.last, index);
        let Some(Some(pair)) = self.pairs.get_mut(index as usize) else { return Left::ForSteps };
        pair.side.ring.forget_waiting();
        let is_empty = !pair.active && pair.wait.is_none() && pair.reach.held.is_none();
        match self.totals.direct_operations != done {
            true if is_empty => Left::Nothing,
            true => Left::ForTurns,
            false => Left::ForSteps,
        }
    }

    /// Does a write that has no entry, if nothing is in its way; else it must be posted like any other.
    #[inline]
    fn write_at_once(&mut self, index: u32, write: &AtOnce<'_>, len: u32) -> bool {
        let Core { pairs, partners, registry, .. } = self;
        let Some(Some(pair)) = pairs.get_mut(index as usize) else { return false };
        let Pair { qp, side, reach, wait, watched, .. } = &mut **pair;
        let Some(qp) = qp.connection() else { return false };
        let is_next = side.ring.is_at(write.block) && qp.outstanding() == 0;
        let waits = wait.is_some() || reach.held.is_some() || *watched;
        if !is_next || waits || qp.state() != State::Rts {
            return false;
        }
        let row = place_of(qp.destination());
        if !partners.attempt_write(reach, row, write, len, side.pd, registry) {
            return false;
        }
        side.ring.pass();
        self.totals.direct_operations += 1;
        self.totals.direct_bytes += u64::from(len);
        if pair.signal_all || write.signaled {
            let (sent, cqn) = (complete::written(pair, write.block), pair.send_cq);
            self.push_at_once(cqn, &sent);
        }
        true
    }

    /// Tells of work that was done without packets.
    #[inline]
    pub(super) fn complete_direct(&mut self, index: u32, work: &WireWork) {
        let Some(Some(pair)) = self.pairs.get_mut(index as usize) else { return };
        self.totals.direct_operations += 1;
        self.totals.direct_bytes += u64::from(work.len);
        let done =
            qp::Completion { id: work.id, status: qp::Status::Success, signaled: work.signaled };
        let (cqe, cqn) = (complete::sent(pair, &done), pair.send_cq);
        if let Some(cqe) = cqe {
            self.push(cqn, &cqe);
        }
    }

    /// A peer that went may be back: its queue pairs ask the link.
    #[cold]
    pub(super) fn look_for_partner(&mut self, index: u32) {
        let Some(Some(pair)) = self.pairs.get(index as usize) else { return };
        self.parted |= pair.reach.partner.is_some_and(|at| self.partners.is_gone(at));
    }
}

impl Engine {
    /// Asks the link whose memory a queue pair may reach.
    pub(super) fn find_partner(&mut self, index: u32) {
        let Core { pairs, partners, offer, .. } = &mut self.core;
        let Some(Some(pair)) = pairs.get_mut(index as usize) else { return };
        if let Some(at) = pair.reach.partner.take() {
            partners.detach(at);
        }
        let found = match (&offer, pair.flow) {
            (Err(why), _) => Err(*why),
            (Ok(_), None) => Err("not connected"),
            (Ok(_), Some(flow)) => self.link.peer(flow),
        };
        match found {
            Ok(peer) => {
                pair.reach.partner = Some(partners.attach(peer));
                self.core.reaches.store(true, Ordering::Relaxed);
            }
            Err(why) => pair.reach.why = why,
        }
    }

    /// The same for all whose partner went.
    #[cold]
    pub(super) fn find_partners(&mut self) {
        self.core.parted = false;
        for index in 0..self.core.pairs.len() {
            let Some(Some(pair)) = self.core.pairs.get(index) else { continue };
            if pair.reach.partner.is_some_and(|at| self.core.partners.is_gone(at)) {
                self.find_partner(index as u32);
            }
        }
    }

    /// Which way a queue pair's work takes, and why.
    pub(super) fn pair_path(&self, number: u32) -> crate::error::Result<crate::link::Path> {
        let pair = self.pair(number)?;
        let mut path = pair.flow.map_or_else(|| self.link.path(), |flow| self.link.flow_path(flow));
        path.why = format!("{}; {}", path.why, pair.reach.describe(&self.core.partners));
        Ok(path)
    }

    /// Takes back all that peers may reach.
    pub(super) fn end(&mut self) {
        let Core { pairs, offer, .. } = &mut self.core;
        pairs.iter_mut().flatten().for_each(|pair| pair.tell_end(offer.as_ref().ok()));
    }
}

/// The device, held for writes that are done here and now. See [`Hca::express`](super::Hca::express).
pub struct Express<'a> {
    pub(super) engine: Guard<'a, Engine>,
    pub(super) index: u32,
    /// So many bytes may still be moved before others have their turn.
    pub(super) left: u32,
}

impl Express<'_> {
    /// Does a write, only if its queue is empty. If not (`false`), nothing has happened.
    #[inline]
    pub fn write(&mut self, write: &AtOnce<'_>) -> bool {
        let len = write.len();
        if !(1..=self.left).contains(&len)
            || !self.engine.core.write_at_once(self.index, write, len)
        {
            return false;
        }
        self.left -= len;
        true
    }
}

/// Where a queue pair's last such write found the memory of its key. A peer that waits for a word looks at it all the time,
/// and so has its line; to fetch that takes longer than all that is to be made sure of before the store, and goes on meanwhile.
#[derive(Debug, Default)]
pub struct Aim {
    key: AtomicU32,
    /// What is to be added to the peer's address.
    shift: AtomicU64,
}

impl Aim {
    /// A write to `remote` is about to be tried. That the memory may be another by now, or gone, does no harm: it is a hint.
    #[inline]
    pub fn expect(&self, remote: &mlx5::Remote) {
        if self.key.load(Ordering::Relaxed) == remote.rkey {
            expect_store(remote.address.wrapping_add(self.shift.load(Ordering::Relaxed)));
        }
    }

    #[inline]
    pub(super) fn take(&self, remote: &mlx5::Remote, mapped_at: u64) {
        self.key.store(remote.rkey, Ordering::Relaxed);
        self.shift.store(mapped_at.wrapping_sub(remote.address), Ordering::Relaxed);
    }
}

/// A write that its poster hands over without an entry in the queue, to be done now or not at all.
pub struct AtOnce<'a> {
    /// The block of the send queue that its entry would begin with, counted without end.
    pub block: u64,
    /// Where it goes.
    pub remote: mlx5::Remote,
    /// What is written: bytes, or one range of memory.
    pub payload: Piece<'a>,
    /// Whether success makes a completion.
    pub signaled: bool,
    /// Keeps where it went.
    pub aim: &'a Aim,
}

impl AtOnce<'_> {
    #[inline]
    fn len(&self) -> u32 {
        u32::try_from(self.payload.len()).unwrap_or(u32::MAX)
    }
}
