//! Operations without packets: where a peer of this machine lets us map its memory, the requester writes, reads and
//! changes words there by itself.
//!
//! The owner's side is a table that peers read ([`Offer`]): a row per queue pair that takes requests, a row per
//! registration that peers may use. [`Grants`] keeps it. The requester's side is a [`Partner`] per connection, with what it knows of
//! the peer's keys, and a [`Reach`] per queue pair.
//!
//! # Promises
//! 1. **An operation is done directly only if the protocol would do it, with success.** The rows say all that the peer's
//!    responder looks at: the queue pair's state, its peer, its rights, its domain, the key and its tag, domain, rights, bounds.
//!    Whatever does not fit takes the protocol, which then fails on the right side with the right status.
//! 2. **Order is kept**: nothing of the queue pair is outstanding in the protocol when an operation is done directly. Work that is large, or that
//!    had to give way often, waits for that; the rest goes by packets behind what is under way.
//! 3. **What has ended is not touched**: each visit is announced, and each row looked at again after that
//!    ([`Peer::visit`]).
//! 4. No step is longer than [`TURN`] bytes: others have their turn in between, and who takes memory back waits for
//!    one turn at most.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, Weak};
use std::time::Duration;

use warpwire_proto::Instant;
use warpwire_proto::qp::{self, Change, Op, State, Work as WireWork};

use super::complete;
use super::engine::{Core, Engine, place_of};
use super::pair::{Pair, Side, from_wire};
use super::stats::Indirect;
use crate::link::shm::grant::Content;
use crate::link::{Offer, Peer};
use crate::mem::SharedBytes;
use crate::mlx5::Piece;
use crate::mr::{Access, Denied, Export, Foreign, PdId, Registry, Watch};

/// How many bytes one turn of a queue pair moves.
pub(super) const TURN: u32 = 256 << 10;
/// From this length on, work waits until it can be done directly.
const WORTH_WAITING: u32 = 16 << 10;
/// Work that is shorter gives way so often, and then waits.
const GIVES_WAY: u32 = 16;
/// An answer that has not come by then is asked for again.
const ASK_AGAIN: Duration = Duration::from_millis(20);

/// Rows of queue pairs come first, then those of keys.
const FIRST_KEY: u32 = 1 << 16;
const MOST_KEYS: u32 = 1 << 16;

/// The row of a key, if it has one: those beyond the first 65 536 registrations have none.
fn row_of(key: u32) -> Option<u32> {
    (key >> 8 < MOST_KEYS).then_some(FIRST_KEY + (key >> 8))
}

/// The owner's side. Registrations may outlive the device; its table ends with it, and with the table all rows.
pub(super) struct Grants(pub Weak<Offer>);

impl Watch for Grants {
    fn opened(&self, export: &Export) {
        let (Some(row), Some(offer)) = (row_of(export.key), self.0.upgrade()) else { return };
        let Export { key, pd, access, iova, len, memory } = *export;
        let content = [key.into(), pd, access.bits().into(), iova, len, memory, 0];
        offer.open(row as usize, &content);
    }

    fn closing(&self, key: u32) {
        if let (Some(row), Some(offer)) = (row_of(key), self.0.upgrade()) {
            offer.close(row as usize);
        }
    }
}

/// An address in words that compare.
fn words(address: SocketAddr) -> [u64; 3] {
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

/// What a queue pair says and knows about operations without packets.
#[derive(Debug)]
pub(super) struct Reach {
    /// What its peer may do here, and how many of its reads and atomics there may be.
    access: qp::Access,
    answers: u8,
    /// How many reads and atomics of its own there may be.
    asks: u8,
    /// What stands in its row.
    told: Option<Content>,
    /// The partner whose memory it reaches.
    pub partner: Option<u32>,
    /// Why there is none.
    pub why: &'static str,
    /// The opening of the peer's queue pair that was found right, with its domain and rights.
    opening: u64,
    pd: u64,
    may: u64,
    /// Work that waits, or is done in part.
    pub held: Option<WireWork>,
    pub done: u32,
    /// So often did work take the protocol because something was outstanding.
    gave_way: u32,
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
        let content = self.qp.path().filter(|_| takes).map(|path| {
            let ids = u64::from(self.qp.number()) << 32 | u64::from(self.qp.destination());
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
    /// Does what was just posted, as far as that needs no packets; true if nothing is left for a step. The time is that of
    /// the last step: what depends on it is left to the next one.
    pub(super) fn do_at_once(&mut self, index: u32) -> bool {
        let Some(Some(pair)) = self.pairs.get(index as usize) else { return false };
        if pair.reach.partner.is_none()
            || pair.qp.state() != State::Rts
            || pair.qp.outstanding() > 0
        {
            return false;
        }
        let done = self.totals.direct_operations;
        self.look_at(self.last, index);
        let Some(Some(pair)) = self.pairs.get_mut(index as usize) else { return false };
        pair.side.ring.forget_waiting();
        let nothing_left = !pair.active && pair.wait.is_none() && pair.reach.held.is_none();
        nothing_left && self.totals.direct_operations != done
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

/// A peer's memory that is mapped here, while somebody uses it.
struct Memory {
    number: u64,
    writable: bool,
    mapped: Weak<Foreign>,
}

impl Memory {
    fn is_alive(&self) -> bool {
        self.mapped.strong_count() > 0
    }
}

/// What is known of a key.
struct Key {
    key: u32,
    opening: u64,
    pd: u64,
    access: Access,
    iova: u64,
    len: u64,
    number: u64,
    found: Found,
}

enum Found {
    Mapped(Arc<Foreign>),
    Asked(Instant),
    Refused,
}

/// A connection to a process whose memory can be reached.
pub(super) struct Partner {
    pub peer: Arc<Peer>,
    keys: Vec<Option<Box<Key>>>,
    /// The places in `keys` that are taken.
    known: Vec<u32>,
    memories: Vec<Memory>,
    users: u32,
    /// How many keys were known after the last sweep.
    swept: usize,
}

/// All of them.
#[derive(Default)]
pub(super) struct Partners(Vec<Option<Partner>>);

impl Partners {
    fn get(&self, at: u32) -> Option<&Partner> {
        self.0.get(at as usize)?.as_ref()
    }

    /// Joins the users of this peer's memory.
    pub(super) fn attach(&mut self, peer: Arc<Peer>) -> u32 {
        let same = |known: &Option<Partner>| {
            known.as_ref().is_some_and(|known| Arc::ptr_eq(&known.peer, &peer))
        };
        let at = self.0.iter().position(same).unwrap_or_else(|| {
            let free = self.0.iter().position(Option::is_none).unwrap_or(self.0.len());
            if free == self.0.len() {
                self.0.push(None);
            }
            let (keys, known, memories) = (Vec::new(), Vec::new(), Vec::new());
            self.0[free] = Some(Partner { peer, keys, known, memories, users: 0, swept: 0 });
            free
        });
        if let Some(partner) = &mut self.0[at] {
            partner.users += 1;
        }
        at as u32
    }

    /// Leaves; the last one takes the mappings with it.
    pub(super) fn detach(&mut self, at: u32) {
        if let Some(place) = self.0.get_mut(at as usize)
            && let Some(partner) = place
        {
            partner.users -= 1;
            if partner.users == 0 {
                *place = None;
            }
        }
    }

    /// Lets go of memory whose registrations have ended.
    pub(super) fn sweep(&mut self) {
        self.0.iter_mut().flatten().for_each(Partner::sweep);
    }

    /// Tries work without packets; see [`Tried`].
    pub(super) fn attempt(
        &mut self,
        pair: &mut Pair,
        work: &WireWork,
        registry: &Registry,
        now: Instant,
        turn: &mut u32,
    ) -> Tried {
        let Some(at) = pair.reach.partner else { return Tried::No(None) };
        let (remote, need) = match work.op {
            Op::Write(remote) => (remote, Access::REMOTE_WRITE),
            Op::Read(remote) => (remote, Access::REMOTE_READ),
            Op::Atomic(remote, _) => (remote, Access::REMOTE_ATOMIC),
            _ => return Tried::No(None),
        };
        let Some(Some(partner)) = self.0.get_mut(at as usize) else { return Tried::No(None) };
        if work.len == 0 || pair.qp.state() != State::Rts {
            return Tried::No(None);
        }
        match partner.attempt(pair, work, remote, need, registry, now, turn) {
            Ok(tried) => tried,
            Err(why) => Tried::No(Some(why)),
        }
    }

    /// Whether the partner's connection has ended, so that the link should be asked for the next one.
    pub(super) fn is_gone(&self, at: u32) -> bool {
        self.get(at).is_none_or(|partner| partner.peer.is_gone())
    }
}

/// What came of an attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tried {
    /// It is done, all of it.
    Done,
    /// It is not done, and nothing is in the way but the others' turn.
    NotYet,
    /// What is under way by packets must end first.
    AfterOthers,
    /// It must go by packets.
    No(Option<Indirect>),
}

impl Partner {
    #[allow(clippy::too_many_arguments)] // an operation has these parts
    #[inline]
    fn attempt(
        &mut self,
        pair: &mut Pair,
        work: &WireWork,
        remote: qp::Remote,
        need: Access,
        registry: &Registry,
        now: Instant,
        turn: &mut u32,
    ) -> Result<Tried, Indirect> {
        if self.peer.has_news() {
            self.hear();
        }
        let Pair { qp, side, reach, .. } = pair;
        let pair_row = place_of(qp.destination());
        if reach.opening == 0 || reach.opening != self.peer.opening(pair_row) {
            self.know_pair(qp, reach, pair_row)?;
        }
        if reach.may & u64::from(need.bits()) == 0
            || need != Access::REMOTE_WRITE && reach.asks == 0
        {
            return Err(Indirect::NotAllowed);
        }
        let at = (remote.key >> 8) as usize;
        let known = match self.keys.get(at) {
            Some(Some(known)) if known.key == remote.key => known,
            _ => return Err(self.learn(remote.key, now)),
        };
        let Found::Mapped(memory) = &known.found else {
            return Err(self.learn(remote.key, now));
        };
        let offset = known.place(reach.pd, need, remote.address, work.len)?;
        if qp.outstanding() > 0 {
            let waits = work.len >= WORTH_WAITING || reach.gave_way >= GIVES_WAY;
            reach.gave_way += 1;
            return if waits { Ok(Tried::AfterOthers) } else { Err(Indirect::Outstanding) };
        }
        reach.gave_way = 0;
        if *turn == 0 {
            return Ok(Tried::NotYet);
        }
        let step = (work.len - reach.done).min(*turn);
        let rows = [pair_row, FIRST_KEY + at as u32];
        let openings = [reach.opening, known.opening];
        let Some(visit) = self.peer.visit(rows, openings, step.into()) else {
            if self.peer.opening(rows[1]) != openings[1] {
                self.forget(at);
            }
            return Err(Indirect::TakenBack);
        };
        let there = There { memory, at: offset + u64::from(reach.done) };
        let moved = there.execute(side, registry, work, reach.done, step);
        drop(visit);
        moved.map_err(|_| Indirect::LocalMemory)?;
        *turn -= step;
        reach.done += step;
        if reach.done < work.len {
            return Ok(Tried::NotYet);
        }
        reach.done = 0;
        Ok(Tried::Done)
    }

    /// Whether the peer's queue pair is connected to ours, and takes requests.
    #[cold]
    fn know_pair(&self, own: &qp::Qp, reach: &mut Reach, row: u32) -> Result<(), Indirect> {
        reach.opening = 0;
        if self.peer.is_gone() || !self.peer.offers() {
            return Err(Indirect::NothingOffered);
        }
        let (opening, [ids, may, pd, a, b, c, _]) =
            self.peer.row(row).ok_or(Indirect::PairNotOpen)?;
        let right = u64::from(own.destination()) << 32 | u64::from(own.number());
        if ids != right || [a, b, c] != words(self.peer.from()) {
            return Err(Indirect::PairNotOpen);
        }
        (reach.opening, reach.pd, reach.may) = (opening, pd, may);
        Ok(())
    }

    /// Looks a key up in the peer's table, and asks for its memory if that is not mapped yet.
    #[cold]
    fn learn(&mut self, key: u32, now: Instant) -> Indirect {
        let Some(row) = row_of(key) else { return Indirect::KeyNotGranted };
        let at = (key >> 8) as usize;
        let opening = self.peer.opening(row);
        if let Some(Some(known)) = self.keys.get(at)
            && (known.key, known.opening) == (key, opening)
        {
            match known.found {
                Found::Asked(when) if now - when < ASK_AGAIN => return Indirect::KeyAskedFor,
                Found::Refused => return Indirect::KeyNotGranted,
                _ => {}
            }
        }
        self.forget(at);
        let Some((opening, [number, pd, access, iova, len, memory, _])) = self.peer.row(row) else {
            return Indirect::KeyNotGranted;
        };
        if number != u64::from(key) {
            return Indirect::KeyNotGranted;
        }
        let access = Access::from_bits(access as u8);
        let writes = access.has_any(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
        let same = |known: &&Memory| known.number == memory && (known.writable || !writes);
        let mapped = self.memories.iter().filter(same).find_map(|known| known.mapped.upgrade());
        let found = match mapped {
            Some(mapped) => Found::Mapped(mapped),
            None => {
                self.peer.ask(key, opening);
                Found::Asked(now)
            }
        };
        let known = Key { key, opening, pd, access, iova, len, number: memory, found };
        if self.keys.len() <= at {
            self.keys.resize_with(at + 1, || None);
        }
        self.keys[at] = Some(Box::new(known));
        self.known.push(at as u32);
        if self.known.len() > 2 * self.swept + 64 {
            self.sweep();
        }
        // The next operation finds it.
        Indirect::KeyAskedFor
    }

    /// Takes the answers that came.
    #[cold]
    fn hear(&mut self) {
        for answer in self.peer.answers() {
            let Some(Some(known)) = self.keys.get_mut((answer.key >> 8) as usize) else { continue };
            if (known.key, known.opening) != (answer.key, answer.word) {
                continue;
            }
            let writable = known.access.has_any(Access::REMOTE_WRITE | Access::REMOTE_ATOMIC);
            let mapped = answer.file.and_then(|file| match Foreign::open(file, writable) {
                Ok(mapped) => Some(Arc::new(mapped)),
                Err(why) => {
                    tracing::debug!(%why, "a peer's memory is reached by packets");
                    None
                }
            });
            known.found = match mapped {
                Some(mapped) => {
                    let number = known.number;
                    self.memories.retain(Memory::is_alive);
                    let mapped_weakly = Arc::downgrade(&mapped);
                    self.memories.push(Memory { number, writable, mapped: mapped_weakly });
                    Found::Mapped(mapped)
                }
                None => Found::Refused,
            };
        }
    }

    /// Forgets a key that was taken back.
    #[cold]
    fn forget(&mut self, at: usize) {
        if let Some(place) = self.keys.get_mut(at)
            && place.take().is_some()
        {
            self.known.retain(|known| *known as usize != at);
        }
    }

    /// Lets go of keys that were taken back, and with them of their memory.
    fn sweep(&mut self) {
        let Self { peer, keys, known, swept, .. } = self;
        known.retain(|at| {
            let place = &mut keys[*at as usize];
            let holds = place
                .as_ref()
                .is_some_and(|key| !peer.is_gone() && key.opening == peer.opening(FIRST_KEY + *at));
            if !holds {
                *place = None;
            }
            holds
        });
        *swept = known.len();
    }
}

impl Key {
    /// Where a range lies in the memory, if the key admits it.
    #[inline]
    fn place(&self, pd: u64, need: Access, address: u64, len: u32) -> Result<u64, Indirect> {
        if self.pd != pd || !self.access.contains(need) {
            return Err(Indirect::NotAllowed);
        }
        let offset = address.wrapping_sub(self.iova);
        if address < self.iova || offset > self.len || u64::from(len) > self.len - offset {
            return Err(Indirect::NotAllowed);
        }
        Ok(offset)
    }
}

/// The place in a peer's memory that an operation touches.
struct There<'a> {
    memory: &'a Foreign,
    at: u64,
}

impl There<'_> {
    /// Does `len` bytes of work, from byte `from` of its payload on.
    #[inline]
    fn execute(
        &self,
        side: &mut Side,
        registry: &Registry,
        work: &WireWork,
        from: u32,
        len: u32,
    ) -> Result<(), Denied> {
        match work.op {
            Op::Write(_) => self.write(side, registry, work.id, from, len),
            Op::Read(_) => self.read(side, registry, work.id, from, len),
            Op::Atomic(_, atomic) => self.change(side, registry, work.id, atomic),
            _ => Err(Denied::Range),
        }
    }

    #[inline]
    fn write(
        &self,
        side: &Side,
        registry: &Registry,
        block: u64,
        from: u32,
        len: u32,
    ) -> Result<(), Denied> {
        let theirs = self.memory.bytes(true).ok_or(Denied::Rights)?;
        let mut at = self.at;
        side.pieces(block, from, len, |piece, skip, len| {
            let to = at;
            at += u64::from(len);
            match piece {
                Piece::Inline(bytes) => {
                    let part = bytes.get(skip as usize..(skip + len) as usize);
                    theirs.write_cached(to, part.ok_or(Denied::Range)?).map_err(|_| Denied::Range)
                }
                Piece::Memory(data) => {
                    let address = data.address.wrapping_add(u64::from(skip));
                    let own = Own { key: data.lkey, pd: side.pd, need: Access::NONE, address, len };
                    own.with(registry, |own| theirs.copy_cached(to, &own, 0, len.into()))
                }
            }
        })
    }

    #[inline]
    fn read(
        &self,
        side: &Side,
        registry: &Registry,
        block: u64,
        from: u32,
        len: u32,
    ) -> Result<(), Denied> {
        let theirs = self.memory.bytes(false).ok_or(Denied::Rights)?;
        let mut at = self.at;
        side.pieces(block, from, len, |piece, skip, len| {
            let Piece::Memory(data) = piece else { return Err(Denied::Range) };
            let source = at;
            at += u64::from(len);
            let address = data.address.wrapping_add(u64::from(skip));
            let need = Access::LOCAL_WRITE;
            let own = Own { key: data.lkey, pd: side.pd, need, address, len };
            own.with(registry, |own| own.copy_cached(0, &theirs, source, len.into()))
        })
    }

    fn change(
        &self,
        side: &Side,
        registry: &Registry,
        block: u64,
        atomic: qp::Atomic,
    ) -> Result<(), Denied> {
        let width = atomic.len();
        // One range, and one that takes the result, whatever that is: nothing may fail once the word has changed.
        let data = side.underway(block).single.ok_or(Denied::Range)?;
        if data.len < width {
            return Err(Denied::Range);
        }
        let (key, address) = (data.lkey, data.address);
        let own = Own { key, pd: side.pd, need: Access::LOCAL_WRITE, address, len: width };
        let mut outcome = Ok(());
        own.with(registry, |own| {
            outcome = self.memory.atomic(self.at, &from_wire(atomic)).map(|old| {
                // As the protocol does: a word of four bytes arrives big-endian.
                let placed = match width {
                    4 => own.write(0, &(old as u32).to_be_bytes()),
                    _ => own.write(0, &old.to_ne_bytes()),
                };
                debug_assert!(placed.is_ok());
            });
            Ok(())
        })?;
        outcome
    }
}

/// A range of our own memory that work names.
struct Own {
    key: u32,
    pd: PdId,
    need: Access,
    address: u64,
    len: u32,
}

impl Own {
    /// Uses its bytes, if they are the host's.
    #[inline]
    fn with(
        &self,
        registry: &Registry,
        then: impl FnOnce(SharedBytes<'_>) -> crate::error::Result<()>,
    ) -> Result<(), Denied> {
        let span = registry.resolve(self.key, self.pd, self.need, self.address, self.len.into())?;
        let bytes = span.host_bytes().ok_or(Denied::Failed)?;
        then(bytes).map_err(|_| Denied::Range)
    }
}
