//! The `warp` family: the block writes into the peer's ring and counters through its own queue
//! pair.
//!
//! The protocol is that of [`warp`](crate::sock::warp). The peer's HCA writes two counters here,
//! and neither is trusted: an impossible value aborts the connection.

use std::time::Duration;

use rustix::io::Errno;

use super::wait::WaitLimit;
use super::{
    SockError, SockResult, SocketRef, Sockets, StateSnapshot, at, device_state, host_state, state,
};
use crate::sock::layout::{peer, qp_descriptor, qp_slot};
use crate::sock::warp::{FIN, READ_CLOSED};
use crate::stream::kernel::device::{DeviceQp, Local, Work};
use crate::stream::kernel::layout as handle;
use crate::stream::kernel::{KernelStatus, layout::NO_FAILURE};
use crate::verbs::Remote;

/// Limit for posting, which waits for other blocks that post and for space in the send queue.
const POST_TIMEOUT: Duration = Duration::from_secs(10);

/// The peer's addresses and keys, from its hello.
struct PeerInfo {
    ring: Remote,
    ring_size: u64,
    received: Remote,
    taken: Remote,
    send_key: u32,
}

impl Sockets<'_> {
    /// Bytes available to receive. The caller holds the lock: without it, another block could
    /// advance our own counter between the loads, and a valid counter would look impossible. An
    /// impossible one aborts the connection.
    pub(super) fn available(
        &self,
        socket_ref: SocketRef,
        snapshot: &StateSnapshot,
    ) -> SockResult<u64> {
        let available = snapshot.received.wrapping_sub(self.consumed(socket_ref)?);
        if snapshot.is_warp() && available > self.receive_ring(socket_ref)?.1 {
            return Err(self.give_up(socket_ref, Errno::PROTO)?);
        }
        Ok(available)
    }

    /// Bytes in the send ring that the peer has not taken. The caller holds the lock.
    pub(super) fn outstanding(
        &self,
        socket_ref: SocketRef,
        snapshot: &StateSnapshot,
        size: u64,
    ) -> SockResult<u64> {
        let sent = self.sent(socket_ref)?;
        let is_read_closed = snapshot.is_warp() && snapshot.taken & READ_CLOSED != 0;
        let taken = if is_read_closed { snapshot.taken & !READ_CLOSED } else { snapshot.taken };
        let outstanding = sent.wrapping_sub(taken);
        if snapshot.is_warp() && (taken > sent || outstanding > size) {
            return Err(self.give_up(socket_ref, Errno::PROTO)?);
        }
        if is_read_closed {
            return Err(Errno::PIPE.into());
        }
        Ok(outstanding)
    }

    /// Requests the host to abort the connection.
    fn give_up(&self, socket_ref: SocketRef, why: Errno) -> SockResult<SockError> {
        match self.fail(socket_ref.handle, why) {
            // The socket was closed in the meantime.
            Ok(()) | Err(SockError::Errno(Errno::BADF)) => Ok(why.into()),
            Err(failure) => Err(failure),
        }
    }

    /// Stores bytes into the peer's ring at counter `from`, then the new counter; `false` if that
    /// must be posted. The caller holds the lock, and the bytes fit.
    pub(super) fn store_sent(
        &self,
        socket_ref: SocketRef,
        from: u64,
        bytes: &[u8],
    ) -> SockResult<bool> {
        let Some(qp_slot) = self.qp_slot(socket_ref)? else { return Ok(false) };
        let (qp, peer) = self.open_qp_slot(qp_slot)?;
        let ring = (peer.ring, peer.ring_size);
        Ok(qp.try_put_ring(ring, from, bytes, (peer.received, from + bytes.len() as u64))?)
    }

    /// Stores a counter of the peer, or posts it.
    fn put_counter(
        &self,
        socket_ref: SocketRef,
        of: impl Fn(&PeerInfo) -> Remote,
        value: u64,
    ) -> SockResult<()> {
        if let Some(qp_slot) = self.qp_slot(socket_ref)? {
            let (qp, peer) = self.open_qp_slot(qp_slot)?;
            if qp.try_put_word(of(&peer), value)? {
                return Ok(());
            }
        }
        self.post(socket_ref, |peer| (Vec::new(), of(peer), value))
    }

    /// Posts the bytes of the send ring from counter `from` to `to`, then the new counter.
    pub(super) fn post_sent(&self, socket_ref: SocketRef, from: u64, to: u64) -> SockResult<()> {
        let (begin, size) = self.send_ring(socket_ref)?;
        self.post(socket_ref, |peer| {
            let local = |at| Local { address: begin + (at & (size - 1)), lkey: peer.send_key };
            let remote = |at: u64| Remote {
                address: peer.ring.address + (at & (peer.ring_size - 1)),
                rkey: peer.ring.rkey,
            };
            // The peer's ring size is a multiple of ours, so it wraps only where ours does.
            let wrap = to.min((from | (size - 1)) + 1);
            let mut works = vec![(remote(from), local(from), (wrap - from) as u32)];
            if wrap < to {
                works.push((remote(wrap), local(wrap), (to - wrap) as u32));
            }
            (works, peer.received, to)
        })
    }

    /// Posts FIN once.
    pub(super) fn post_fin(&self, socket_ref: SocketRef) -> SockResult<()> {
        if self.block.load_u32(at(socket_ref.device_state + device_state::FLAGS))?
            & device_state::FIN
            != 0
        {
            return Ok(());
        }
        self.change_flags(socket_ref, |before| before | device_state::FIN)?;
        let word = self.sent(socket_ref)? | FIN;
        self.put_counter(socket_ref, |peer| peer.received, word)
    }

    /// Posts the consumed count to the peer, if the report threshold is reached.
    pub(super) fn report(&self, socket_ref: SocketRef, consumed: u64) -> SockResult<()> {
        let reported = self.block.load_u64(at(socket_ref.device_state + device_state::REPORTED))?;
        let least = self.block.load_u32(at(socket_ref.host_state + host_state::REPORT_AT))?;
        let is_read_closed =
            self.block.load_u32(at(socket_ref.device_state + device_state::FLAGS))?
                & device_state::SHUT_RECEIVE
                != 0;
        if consumed - reported < u64::from(least) && !is_read_closed {
            return Ok(());
        }
        self.block.store_u64(at(socket_ref.device_state + device_state::REPORTED), consumed)?;
        let word = consumed | if is_read_closed { READ_CLOSED } else { 0 };
        self.put_counter(socket_ref, |peer| peer.taken, word)
    }

    /// Number of work requests posted so far.
    pub(super) fn posted(&self, socket_ref: SocketRef) -> SockResult<u64> {
        match self.qp_slot(socket_ref)? {
            Some(qp_slot) => {
                Ok(DeviceQp::open(self.block, at(qp_slot + qp_slot::HANDLE))?.posted()?)
            }
            None => Ok(0),
        }
    }

    /// Address of the QP slot, if it is initialised.
    fn qp_slot(&self, socket_ref: SocketRef) -> SockResult<Option<u64>> {
        let number = self.block.load_u32(at(socket_ref.device_state + device_state::QP_SLOT))?;
        Ok(number.checked_sub(1).map(|number| self.qp_slots + u64::from(number) * qp_slot::LEN))
    }

    /// Posts spans of the send ring, then a word, with one doorbell. If that fails, the connection
    /// is aborted, and the next call returns the error.
    fn post(
        &self,
        socket_ref: SocketRef,
        work: impl Fn(&PeerInfo) -> (Vec<(Remote, Local, u32)>, Remote, u64),
    ) -> SockResult<()> {
        let lock = at(socket_ref.device_state + device_state::POST_LOCK);
        self.wait(WaitLimit::Within(POST_TIMEOUT), || {
            let before = self.block.compare_exchange_u32(
                lock,
                device_state::UNLOCKED,
                device_state::LOCKED,
            )?;
            Ok((before == device_state::UNLOCKED).then_some(()))
        })?;
        let posted = self.post_locked(socket_ref, work);
        self.block.store_u32(lock, device_state::UNLOCKED)?;
        match posted? {
            None => Ok(()),
            Some(why) => self.give_up(socket_ref, why).map(|_| ()),
        }
    }

    /// As [`post`](Self::post), with the lock held. Returns the errno if it failed.
    fn post_locked(
        &self,
        socket_ref: SocketRef,
        work: impl Fn(&PeerInfo) -> (Vec<(Remote, Local, u32)>, Remote, u64),
    ) -> SockResult<Option<Errno>> {
        let Some((qp, peer)) = self.open_qp(socket_ref)? else { return Ok(Some(Errno::NOTCONN)) };
        let (spans, word, value) = work(&peer);
        let value = value.to_le_bytes();
        let mut works: Vec<Work<'_>> =
            spans.into_iter().map(|(to, from, len)| Work::Write(to, from, len)).collect();
        works.push(Work::Inline(word, &value));
        let posted = self.wait(WaitLimit::Within(POST_TIMEOUT), || {
            Ok(match qp.post(&works, Duration::ZERO)?.status {
                // The host has released the queue pair: there will be no more completions.
                KernelStatus::NotReady if self.has_failed(socket_ref)? => {
                    Some(Some(Errno::CONNRESET))
                }
                KernelStatus::NotReady => None,
                KernelStatus::Ok => Some(None),
                _ => Some(Some(Errno::CONNRESET)),
            })
        });
        match posted {
            Err(SockError::Errno(Errno::TIMEDOUT)) => Ok(Some(Errno::TIMEDOUT)),
            posted => posted,
        }
    }

    fn has_failed(&self, socket_ref: SocketRef) -> SockResult<bool> {
        let state = self.block.load_u64(at(socket_ref.host_state + host_state::STATE))?;
        Ok(state >> state::SEND_ERROR & 0xff != 0)
    }

    /// The queue pair and the peer, from the QP slot, which is initialised on first use.
    fn open_qp(&self, socket_ref: SocketRef) -> SockResult<Option<(DeviceQp<'_>, PeerInfo)>> {
        let qp_slot = match self.qp_slot(socket_ref)? {
            Some(qp_slot) => qp_slot,
            None => {
                match self.block.load_u64(at(socket_ref.host_state + host_state::QP_DESCRIPTOR))? {
                    0 => return Ok(None),
                    qp_descriptor => self.init_qp_slot(socket_ref, qp_descriptor)?,
                }
            }
        };
        self.open_qp_slot(qp_slot).map(Some)
    }

    /// The queue pair and the peer, from an initialised slot.
    fn open_qp_slot(&self, qp_slot: u64) -> SockResult<(DeviceQp<'_>, PeerInfo)> {
        let wide = |offset: u64| self.block.load_u64(at(qp_slot + qp_slot::PEER + offset));
        let narrow = |offset: u64| self.block.load_u32(at(qp_slot + qp_slot::PEER + offset));
        let peer = PeerInfo {
            ring: Remote { address: wide(peer::RING)?, rkey: narrow(peer::RING_KEY)? },
            ring_size: narrow(peer::RING_SIZE)?.into(),
            received: Remote { address: wide(peer::RECEIVED)?, rkey: narrow(peer::RECEIVED_KEY)? },
            taken: Remote { address: wide(peer::TAKEN)?, rkey: narrow(peer::TAKEN_KEY)? },
            send_key: narrow(peer::SEND_KEY)?,
        };
        Ok((DeviceQp::open(self.block, at(qp_slot + qp_slot::HANDLE))?, peer))
    }

    fn init_qp_slot(&self, socket_ref: SocketRef, qp_descriptor: u64) -> SockResult<u64> {
        let mut line = [0; qp_descriptor::LEN as usize];
        self.block.read(at(qp_descriptor), &mut line)?;
        let mut made = vec![0; qp_slot::LEN as usize];
        let (constants, peer_bytes) = line.split_at(qp_descriptor::PEER as usize);
        made[..constants.len()].copy_from_slice(constants);
        made[qp_slot::PEER as usize..][..peer_bytes.len()].copy_from_slice(peer_bytes);
        for queue in [handle::SEND, handle::RECEIVE] {
            let failure = (queue + handle::queue::FAILURE) as usize;
            made[failure..failure + 8].copy_from_slice(&NO_FAILURE.to_le_bytes());
        }
        let number =
            self.block.load_u32(at(qp_descriptor + qp_descriptor::PEER + peer::QP_SLOT))?;
        let qp_slot = self.qp_slots + u64::from(number) * qp_slot::LEN;
        self.block.write(at(qp_slot), &made)?;
        self.block.store_u32(at(socket_ref.device_state + device_state::QP_SLOT), number + 1)?;
        Ok(qp_slot)
    }
}
