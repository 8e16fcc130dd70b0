//! The family `warp`: the block itself writes into the peer's ring and words, by a queue pair of its own.
//!
//! The rules are those of [`warp`](crate::sock::warp). What the peer's device writes here is two counters, and neither is
//! believed: one that cannot be true ends the connection.

use std::time::Duration;

use rustix::io::Errno;

use super::wait::Patience;
use super::{Failure, Outcome, Place, Seen, Sockets, at, desk, inbox, state};
use crate::sock::layout::{berth, peer, wire};
use crate::sock::warp::{DEAF, ENDED};
use crate::stream::kernel::device::{Local, Qp, Work};
use crate::stream::kernel::layout as handle;
use crate::stream::kernel::{Ended, layout::NO_FAILURE};
use crate::verbs::Remote;

/// How long posting may take: it waits for another block that posts, and for the device to take what was posted before.
const POSTING: Duration = Duration::from_secs(10);

/// What the peer said of itself.
struct Peer {
    ring: Remote,
    ring_size: u64,
    received: Remote,
    taken: Remote,
    send_key: u32,
}

impl Sockets<'_> {
    /// What there is to receive, by what the peer says, for who holds the lock: without it, another block moves our own
    /// counter meanwhile, and the truth looks like a lie. A lie ends the connection.
    pub(super) fn available(&self, place: Place, seen: &Seen) -> Outcome<u64> {
        let available = seen.received.wrapping_sub(self.consumed(place)?);
        if seen.is_warp() && available > self.receive_ring(place)?.1 {
            return Err(self.give_up(place, Errno::PROTO)?);
        }
        Ok(available)
    }

    /// What the send ring holds, by what the peer says, for who holds the lock.
    pub(super) fn outstanding(&self, place: Place, seen: &Seen, size: u64) -> Outcome<u64> {
        let sent = self.sent(place)?;
        let is_deaf = seen.is_warp() && seen.taken & DEAF != 0;
        let taken = if is_deaf { seen.taken & !DEAF } else { seen.taken };
        let outstanding = sent.wrapping_sub(taken);
        if seen.is_warp() && (taken > sent || outstanding > size) {
            return Err(self.give_up(place, Errno::PROTO)?);
        }
        if is_deaf {
            return Err(Errno::PIPE.into());
        }
        Ok(outstanding)
    }

    /// Has the host end a connection that is of no use.
    fn give_up(&self, place: Place, why: Errno) -> Outcome<Failure> {
        match self.fail(place.handle, why) {
            // A socket that was closed meanwhile has ended already.
            Ok(()) | Err(Failure::Errno(Errno::BADF)) => Ok(why.into()),
            Err(failure) => Err(failure),
        }
    }

    /// Sends what the ring holds from counter `from` on, and says so.
    pub(super) fn post_sent(&self, place: Place, from: u64, to: u64) -> Outcome<()> {
        let (begin, size) = self.send_ring(place)?;
        self.post(place, |peer| {
            let local = |at| Local { address: begin + (at & (size - 1)), lkey: peer.send_key };
            let remote = |at: u64| Remote {
                address: peer.ring.address + (at & (peer.ring_size - 1)),
                rkey: peer.ring.rkey,
            };
            // The peer's ring is a multiple of ours: it ends where ours does, or not at all.
            let turn = to.min((from | (size - 1)) + 1);
            let mut works = vec![(remote(from), local(from), (turn - from) as u32)];
            if turn < to {
                works.push((remote(turn), local(turn), (to - turn) as u32));
            }
            (works, peer.received, to)
        })
    }

    /// Says that no more will come.
    pub(super) fn post_end(&self, place: Place) -> Outcome<()> {
        if self.block.load_u32(at(place.desk + desk::FLAGS))? & desk::ENDED != 0 {
            return Ok(());
        }
        self.change_flags(place, |before| before | desk::ENDED)?;
        let sent = self.sent(place)?;
        self.post(place, |peer| (Vec::new(), peer.received, sent | ENDED))
    }

    /// Tells the peer what was taken, if that is worth it.
    pub(super) fn report(&self, place: Place, consumed: u64) -> Outcome<()> {
        let reported = self.block.load_u64(at(place.desk + desk::REPORTED))?;
        let least = self.block.load_u32(at(place.inbox + inbox::REPORT_AT))?;
        let is_deaf = self.block.load_u32(at(place.desk + desk::FLAGS))? & desk::SHUT_RECEIVE != 0;
        if consumed - reported < u64::from(least) && !is_deaf {
            return Ok(());
        }
        self.block.store_u64(at(place.desk + desk::REPORTED), consumed)?;
        let word = consumed | if is_deaf { DEAF } else { 0 };
        self.post(place, |peer| (Vec::new(), peer.taken, word))
    }

    /// How many operations were posted.
    pub(super) fn posted(&self, place: Place) -> Outcome<u64> {
        match self.berth(place)? {
            Some(berth) => Ok(Qp::open(self.block, at(berth + berth::HANDLE))?.posted()?),
            None => Ok(0),
        }
    }

    /// Its berth, if that is made.
    fn berth(&self, place: Place) -> Outcome<Option<u64>> {
        let number = self.block.load_u32(at(place.desk + desk::BERTH))?;
        Ok(number.checked_sub(1).map(|number| self.berths + u64::from(number) * berth::LEN))
    }

    /// Posts spans of the send ring, and then a word, with one doorbell. What cannot be posted ends the connection, of
    /// which the next call tells.
    fn post(
        &self,
        place: Place,
        work: impl Fn(&Peer) -> (Vec<(Remote, Local, u32)>, Remote, u64),
    ) -> Outcome<()> {
        let lock = at(place.desk + desk::POST_LOCK);
        self.wait(Patience::For(POSTING), || {
            let before = self.block.compare_exchange_u32(lock, desk::FREE, desk::COPYING)?;
            Ok((before == desk::FREE).then_some(()))
        })?;
        let posted = self.post_alone(place, work);
        self.block.store_u32(lock, desk::FREE)?;
        match posted? {
            None => Ok(()),
            Some(why) => self.give_up(place, why).map(|_| ()),
        }
    }

    /// The same by who holds the lock. Gives why it cannot be.
    fn post_alone(
        &self,
        place: Place,
        work: impl Fn(&Peer) -> (Vec<(Remote, Local, u32)>, Remote, u64),
    ) -> Outcome<Option<Errno>> {
        let Some((qp, peer)) = self.board(place)? else { return Ok(Some(Errno::NOTCONN)) };
        let (spans, word, value) = work(&peer);
        let value = value.to_le_bytes();
        let mut works: Vec<Work<'_>> =
            spans.into_iter().map(|(to, from, len)| Work::Write(to, from, len)).collect();
        works.push(Work::Inline(word, &value));
        let posted = self.wait(Patience::For(POSTING), || {
            Ok(match qp.post(&works, Duration::ZERO)?.ended {
                // A queue pair that was taken away ends nothing any more.
                Ended::NotYet if self.has_failed(place)? => Some(Some(Errno::CONNRESET)),
                Ended::NotYet => None,
                Ended::Ok => Some(None),
                _ => Some(Some(Errno::CONNRESET)),
            })
        });
        match posted {
            Err(Failure::Errno(Errno::TIMEDOUT)) => Ok(Some(Errno::TIMEDOUT)),
            posted => posted,
        }
    }

    fn has_failed(&self, place: Place) -> Outcome<bool> {
        let state = self.block.load_u64(at(place.inbox + inbox::STATE))?;
        Ok(state >> state::SEND_ERROR & 0xff != 0)
    }

    /// The queue pair and the peer, from the berth, which is made when it is first needed.
    fn board(&self, place: Place) -> Outcome<Option<(Qp<'_>, Peer)>> {
        let berth = match self.berth(place)? {
            Some(berth) => berth,
            None => match self.block.load_u64(at(place.inbox + inbox::WIRE))? {
                0 => return Ok(None),
                wire => self.make_berth(place, wire)?,
            },
        };
        let wide = |offset: u64| self.block.load_u64(at(berth + berth::PEER + offset));
        let narrow = |offset: u64| self.block.load_u32(at(berth + berth::PEER + offset));
        let peer = Peer {
            ring: Remote { address: wide(peer::RING)?, rkey: narrow(peer::RING_KEY)? },
            ring_size: narrow(peer::RING_SIZE)?.into(),
            received: Remote { address: wide(peer::RECEIVED)?, rkey: narrow(peer::RECEIVED_KEY)? },
            taken: Remote { address: wide(peer::TAKEN)?, rkey: narrow(peer::TAKEN_KEY)? },
            send_key: narrow(peer::SEND_KEY)?,
        };
        Ok(Some((Qp::open(self.block, at(berth + berth::HANDLE))?, peer)))
    }

    fn make_berth(&self, place: Place, wire: u64) -> Outcome<u64> {
        let mut line = [0; wire::LEN as usize];
        self.block.read(at(wire), &mut line)?;
        let mut made = vec![0; berth::LEN as usize];
        let (constants, said) = line.split_at(wire::PEER as usize);
        made[..constants.len()].copy_from_slice(constants);
        made[berth::PEER as usize..][..said.len()].copy_from_slice(said);
        for side in [handle::SEND, handle::RECEIVE] {
            let failure = (side + handle::side::FAILURE) as usize;
            made[failure..failure + 8].copy_from_slice(&NO_FAILURE.to_le_bytes());
        }
        let number = self.block.load_u32(at(wire + wire::PEER + peer::BERTH))?;
        let berth = self.berths + u64::from(number) * berth::LEN;
        self.block.write(at(berth), &made)?;
        self.block.store_u32(at(place.desk + desk::BERTH), number + 1)?;
        Ok(berth)
    }
}
