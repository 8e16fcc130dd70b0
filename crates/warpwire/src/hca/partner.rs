//! A peer whose memory is mapped: what is known of its keys, and operations in it. See [`direct`](super::direct).

use std::sync::{Arc, Weak};
use std::time::Duration;

use warpwire_proto::Instant;
use warpwire_proto::qp::{self, Op, State, Work as WireWork};

use super::direct::{AtOnce, FIRST_KEY, Reach, row_of, words};
use super::engine::place_of;
use super::pair::{Pair, Side, from_wire};
use super::stats::Indirect;
use crate::link::Peer;
use crate::mem::SharedBytes;
use crate::mlx5::Piece;
use crate::mr::{Access, Denied, Foreign, PdId, Registry};

/// From this length on, work waits until it can be done directly.
const WORTH_WAITING: u32 = 16 << 10;
/// Work that is shorter gives way so often, and then waits.
const GIVES_WAY: u32 = 16;
/// An answer that has not come by then is asked for again.
const ASK_AGAIN: Duration = Duration::from_millis(20);

/// A peer's memory that is mapped here, while somebody uses it.
pub(super) struct Memory {
    number: u64,
    writable: bool,
    mapped: Weak<Foreign>,
}

impl Memory {
    pub(super) fn is_alive(&self) -> bool {
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
    /// Where in that memory it begins.
    start: u64,
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
    pub memories: Vec<Memory>,
    users: u32,
    /// How many keys were known after the last sweep.
    swept: usize,
}

/// All of them.
#[derive(Default)]
pub(super) struct Partners(Vec<Option<Partner>>);

impl Partners {
    pub(super) fn get(&self, at: u32) -> Option<&Partner> {
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
        let asked = Asked { remote, need, len: work.len };
        let tried = partner.attempt(pair, &asked, now, turn, |there, side, from, len| {
            there.execute(side, registry, work, from, len)
        });
        tried.unwrap_or_else(|why| Tried::No(Some(why)))
    }

    /// Tries a write that was handed over without an entry, all of it at once, to the queue pair with that row. Whatever
    /// is not as it was the last time is left to [`Partners::attempt`].
    #[inline]
    pub(super) fn attempt_write(
        &mut self,
        reach: &mut Reach,
        row: u32,
        write: &AtOnce<'_>,
        len: u32,
        pd: PdId,
        registry: &Registry,
    ) -> bool {
        let need = Access::REMOTE_WRITE;
        let at = reach.partner.and_then(|at| self.0.get(at as usize));
        let Some(Some(partner)) = at else { return false };
        let peer = &*partner.peer;
        if peer.has_news() || reach.may & u64::from(need.bits()) == 0 {
            return false;
        }
        let place = (write.remote.rkey >> 8) as usize;
        let Some(Some(known)) = partner.keys.get(place) else { return false };
        let Found::Mapped(memory) = &known.found else { return false };
        if known.key != write.remote.rkey {
            return false;
        }
        let Ok(at) = known.place(reach.pd, need, write.remote.address, len) else { return false };
        let Some(theirs) = memory.bytes(true) else { return false };
        let rows = [row, FIRST_KEY + place as u32];
        let Some(visit) = peer.visit(rows, [reach.opening, known.opening], len.into()) else {
            return false;
        };
        let moved = match write.payload {
            Piece::Inline(bytes) => theirs.write_cached(at, bytes).is_ok(),
            piece => There { memory, at }.put(&theirs, at, piece, 0, len, pd, registry).is_ok(),
        };
        drop(visit);
        write.aim.take(&write.remote, theirs.address().wrapping_add(at));
        reach.gave_way = 0;
        moved
    }

    /// Whether the partner's connection has ended, so that the link should be asked for the next one.
    pub(super) fn is_gone(&self, at: u32) -> bool {
        self.get(at).is_none_or(|partner| partner.peer.is_gone())
    }
}

/// What an operation needs of the peer.
struct Asked {
    remote: qp::Remote,
    need: Access,
    len: u32,
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
    /// Does what is asked, or a turn of it, by `execute`, which is told from which byte on and how many.
    #[inline]
    fn attempt(
        &mut self,
        pair: &mut Pair,
        asked: &Asked,
        now: Instant,
        turn: &mut u32,
        execute: impl FnOnce(&There<'_>, &mut Side, u32, u32) -> Result<(), Denied>,
    ) -> Result<Tried, Indirect> {
        let &Asked { remote, need, len } = asked;
        if self.peer.has_news() {
            self.hear();
        }
        let Pair { qp, side, reach, .. } = pair;
        let qp = qp.connection().ok_or(Indirect::PairNotOpen)?;
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
        let offset = known.place(reach.pd, need, remote.address, len)?;
        if qp.outstanding() > 0 {
            let waits = len >= WORTH_WAITING || reach.gave_way >= GIVES_WAY;
            reach.gave_way += 1;
            return if waits { Ok(Tried::AfterOthers) } else { Err(Indirect::Outstanding) };
        }
        reach.gave_way = 0;
        if *turn == 0 {
            return Ok(Tried::NotYet);
        }
        let step = (len - reach.done).min(*turn);
        let rows = [pair_row, FIRST_KEY + at as u32];
        let openings = [reach.opening, known.opening];
        let Some(visit) = self.peer.visit(rows, openings, step.into()) else {
            if self.peer.opening(rows[1]) != openings[1] {
                self.forget(at);
            }
            return Err(Indirect::TakenBack);
        };
        let there = There { memory, at: offset.saturating_add(reach.done.into()) };
        let moved = execute(&there, side, reach.done, step);
        drop(visit);
        moved.map_err(|_| Indirect::LocalMemory)?;
        *turn -= step;
        reach.done += step;
        if reach.done < len {
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
        let Some((opening, [number, pd, access, iova, len, memory, start])) = self.peer.row(row)
        else {
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
        let known = Key { key, opening, pd, access, iova, len, number: memory, start, found };
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
        // Whatever the owner wrote there: a place outside the mapping is found out when it is used.
        Ok(self.start.saturating_add(offset))
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
            at = at.saturating_add(len.into());
            self.put(&theirs, to, piece, skip, len, side.pd, registry)
        })
    }

    /// Writes `len` bytes of a piece, after `skip` of it, to the peer's memory.
    #[allow(clippy::too_many_arguments)] // a copy has two ends
    #[inline]
    fn put(
        &self,
        theirs: &SharedBytes<'_>,
        to: u64,
        piece: Piece<'_>,
        skip: u32,
        len: u32,
        pd: PdId,
        registry: &Registry,
    ) -> Result<(), Denied> {
        match piece {
            Piece::Inline(bytes) => {
                let part = bytes.get(skip as usize..(skip + len) as usize);
                theirs.write_cached(to, part.ok_or(Denied::Range)?).map_err(|_| Denied::Range)
            }
            Piece::Memory(data) => {
                let address = data.address.wrapping_add(u64::from(skip));
                let own = Own { key: data.lkey, pd, need: Access::NONE, address, len };
                own.with(registry, |own| theirs.copy_cached(to, &own, 0, len.into()))
            }
        }
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
            at = at.saturating_add(len.into());
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
