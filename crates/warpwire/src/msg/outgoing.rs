//! Outgoing headers, transfers and word updates, limited by credits and send queue space.

use super::buffer::BufferSlice;
use super::entries::{RequestKind, WordUpdate};
use super::header::{
    Channel, HEADER_LEN, Header, Kind as Message, MAX_SLICES, RANGE_LEN, RemoteRange,
};
use super::peer::{CONTROL_WORK, ControlOp, HeaderUse, MAX_FETCHED, USER_WORK};
use super::state::{FETCHED, HEADER_SENT, MOVED, STANDALONE_WORD, State, id_of};
use crate::error::{Error, Kind, Result};
use crate::verbs::{Remote, SendRequest, Sge, WrOp};

/// Transfers are split into pieces of this length, to avoid head-of-line blocking.
const PIECE: u64 = 8 << 20;

const NOTHING: Sge = Sge { address: 0, len: 0, lkey: 0 };

impl State {
    /// Posts everything to a peer that can be posted.
    pub(super) fn pump(&mut self, rank: usize) {
        if self.peers[rank].qp.is_none() || self.peers[rank].is_broken {
            return;
        }
        if let Err(why) = self.try_pump(rank) {
            self.fail_peer(rank, why);
        }
    }

    pub(super) fn try_pump(&mut self, rank: usize) -> Result<()> {
        while let Some(&op) = self.peers[rank].control_queue.front()
            && self.peers[rank].control_work < CONTROL_WORK
        {
            match op {
                ControlOp::Done(id) => {
                    let header = plain(Message::Done, id);
                    self.post_header(rank, HeaderUse::Control, header, &[])?;
                }
                ControlOp::Fetch(index) => {
                    if !self.transfer(rank, index, FETCHED)? {
                        break;
                    }
                    self.entries.get(index).peer_done = true;
                    self.complete_if_done(index);
                }
            }
            self.peers[rank].control_queue.pop_front();
        }
        while let Some(&index) = self.peers[rank].send_queue.front()
            && self.peers[rank].user_work < USER_WORK
        {
            let is_posted = match self.entries.get(index).kind {
                RequestKind::Send => self.post_message(rank, index)?,
                _ => self.transfer(rank, index, MOVED)? && self.post_word_update(rank, index)?,
            };
            if !is_posted {
                break;
            }
            self.peers[rank].send_queue.pop_front();
            self.complete_if_done(index);
        }
        let limit = self.area.receives;
        if self.peers[rank].owed >= limit / 4 {
            self.return_credits(rank)?;
        }
        Ok(())
    }

    /// Returns credits to a peer in a message of their own.
    pub(super) fn return_credits(&mut self, rank: usize) -> Result<()> {
        let peer = &self.peers[rank];
        // Needs a free header slot and send queue space; otherwise a later header carries the
        // credits.
        if peer.owed > 0 && peer.control_work < CONTROL_WORK && !peer.headers.is_empty() {
            self.post_header(rank, HeaderUse::Control, plain(Message::Credit, 0), &[])?;
        }
        Ok(())
    }

    /// Called before sleeping, so that no peer waits for credits that are available.
    pub(super) fn return_all_credits(&mut self) {
        for rank in 0..self.peers.len() {
            if self.peers[rank].owed > 0
                && !self.peers[rank].is_broken
                && let Err(why) = self.return_credits(rank)
            {
                self.fail_peer(rank, why);
            }
        }
    }

    /// Posts a message; false if it must wait for credits or space.
    pub(super) fn post_message(&mut self, rank: usize, index: u32) -> Result<bool> {
        let id = self.entries.id(index);
        let entry = self.entries.get(index);
        let (channel, tag, len) = (entry.channel, entry.tag, entry.total);
        let peer = &mut self.peers[rank];
        let eager = len <= peer.eager();
        if peer.credits == 0 || peer.headers.is_empty() {
            return Ok(false);
        }
        if !eager && peer.unfetched == MAX_FETCHED {
            return Ok(false);
        }
        peer.credits -= 1;
        entry.in_flight += 1;
        entry.posted = len.max(1);
        let header = |kind, ranges| Header { kind, channel, ranges, credits: 0, tag, len, id };
        if eager {
            let mut data = [NOTHING; MAX_SLICES];
            let mut count = 0;
            for slice in entry.slices.iter().filter(|slice| slice.len > 0) {
                data[count] = slice.buffer.sge(slice.offset, slice.len as u32);
                count += 1;
            }
            let header = header(Message::Eager, 0);
            self.post_header(rank, HeaderUse::Eager(index), header, &data[..count])?;
            return Ok(true);
        }
        peer.unfetched += 1;
        let mut ranges = 0;
        entry.remote.clear();
        for slice in entry.slices.iter().filter(|slice| slice.len > 0) {
            let (address, rkey) = slice.buffer.remote(slice.offset);
            entry.remote.push(RemoteRange { address, len: slice.len, rkey });
            ranges += 1;
        }
        let header = header(Message::Rendezvous, ranges);
        self.post_header(rank, HeaderUse::Rendezvous(index), header, &[])?;
        Ok(true)
    }

    pub(super) fn post_header(
        &mut self,
        rank: usize,
        used: HeaderUse,
        mut header: Header,
        body: &[Sge],
    ) -> Result<()> {
        let peer = &mut self.peers[rank];
        let Some(header_slot) = peer.headers.pop() else {
            return Err(Error::new(Kind::Busy, "post a header").why("all header slots are in use"));
        };
        peer.header_uses[header_slot as usize] = used;
        header.credits = std::mem::take(&mut peer.owed);
        match used {
            HeaderUse::Control => peer.control_work += 1,
            _ => peer.user_work += 1,
        }
        let at = self.area.header_at(rank, header_slot);
        let bytes = self.area.headers.bytes();
        bytes.write(at, &header.encode())?;
        let mut len = HEADER_LEN as u64;
        if let HeaderUse::Rendezvous(index) = used {
            for range in &self.entries.get(index).remote {
                bytes.write(at + len, &range.encode())?;
                len += RANGE_LEN as u64;
            }
        }
        let mut data = [NOTHING; MAX_SLICES + 1];
        data[0] = self.area.headers_mr.sge(at, len as u32);
        data[1..=body.len()].copy_from_slice(body);
        let id = id_of(HEADER_SENT, rank, header_slot);
        let request = SendRequest::new(id, WrOp::Send).with(&data[..=body.len()]);
        if let Some(qp) = &self.peers[rank].qp {
            qp.post_send(&[request])?;
        }
        Ok(())
    }

    /// Posts pieces of a transfer; true once all are posted.
    pub(super) fn transfer(&mut self, rank: usize, index: u32, kind: u64) -> Result<bool> {
        loop {
            let peer = &mut self.peers[rank];
            let room = match kind {
                FETCHED => peer.control_work < CONTROL_WORK,
                _ => peer.user_work < USER_WORK,
            };
            let entry = self.entries.get(index);
            let total = match entry.kind {
                RequestKind::Receive => entry.arrived,
                _ => entry.total,
            };
            if entry.posted == total {
                return Ok(true);
            }
            if !room {
                return Ok(false);
            }
            let Some((sge, remote)) = piece(&entry.slices, &entry.remote, entry.posted, total)
            else {
                let error = Error::new(Kind::Malformed, entry.name());
                return Err(error.why("the ranges end before the message"));
            };
            let op = match entry.kind {
                RequestKind::Put => WrOp::Write(remote),
                _ => WrOp::Read(remote),
            };
            entry.posted += u64::from(sge.len);
            entry.in_flight += 1;
            match kind {
                FETCHED => peer.control_work += 1,
                _ => peer.user_work += 1,
            }
            if let Some(qp) = &peer.qp {
                qp.post_send(&[SendRequest::new(id_of(kind, rank, index), op).with(&[sge])])?;
            }
        }
    }

    /// Posts the word update that follows a put.
    pub(super) fn post_word_update(&mut self, rank: usize, index: u32) -> Result<bool> {
        let Some((word_update, address, rkey)) = self.entries.get(index).word_update else {
            return Ok(true);
        };
        if self.peers[rank].user_work == USER_WORK {
            return Ok(false);
        }
        let entry = self.entries.get(index);
        entry.word_update = None;
        entry.in_flight += 1;
        self.peers[rank].user_work += 1;
        self.change_word(rank, id_of(MOVED, rank, index), word_update, Remote { address, rkey })?;
        Ok(true)
    }

    pub(super) fn change_word(
        &mut self,
        rank: usize,
        id: u64,
        word_update: WordUpdate,
        at: Remote,
    ) -> Result<()> {
        let Some(qp) = &self.peers[rank].qp else { return Ok(()) };
        match word_update {
            WordUpdate::Write(bytes, len) => {
                let bytes = &bytes[..usize::from(len)];
                qp.post_send(&[SendRequest::new(id, WrOp::Write(at)).inline(bytes)])?;
            }
            WordUpdate::Atomic(atomic) => {
                let width = atomic.width().bytes();
                let before = [self.area.headers_mr.sge(self.area.headers.len() - 64, width)];
                qp.post_send(&[SendRequest::new(id, WrOp::Atomic(at, atomic)).with(&before)])?;
            }
        }
        Ok(())
    }

    /// Writes a word of a peer's table immediately, ahead of messages that wait for credits. False
    /// if the send queue is full.
    pub(super) fn write_word(&mut self, rank: usize, value: u64, at: Remote) -> Result<bool> {
        let peer = &mut self.peers[rank];
        if let Some(why) = &peer.end {
            return Err(why.clone().during(format!("write to rank {rank}")));
        }
        if peer.user_work == USER_WORK {
            return Ok(false);
        }
        peer.user_work += 1;
        let word_update = WordUpdate::Write(value.to_le_bytes(), 8);
        self.change_word(rank, id_of(STANDALONE_WORD, rank, 0), word_update, at)?;
        Ok(true)
    }
}

fn plain(kind: Message, id: u64) -> Header {
    Header { kind, channel: Channel::User, ranges: 0, credits: 0, tag: 0, len: 0, id }
}

/// The next piece of a transfer of which `done` bytes are posted.
fn piece(
    slices: &[BufferSlice],
    ranges: &[RemoteRange],
    done: u64,
    total: u64,
) -> Option<(Sge, Remote)> {
    let (mut skip, mut local) = (done, None);
    for slice in slices {
        if skip < slice.len {
            local = Some((slice, skip));
            break;
        }
        skip -= slice.len;
    }
    let (mut skip, mut remote) = (done, None);
    for range in ranges {
        if skip < range.len {
            remote = Some((range, skip));
            break;
        }
        skip -= range.len;
    }
    let ((slice, at), (range, begin)) = (local?, remote?);
    let len = (slice.len - at).min(range.len - begin).min(total - done).min(PIECE);
    let address = range.address.wrapping_add(begin);
    let remote = Remote { address, rkey: range.rkey };
    Some((slice.buffer.sge(slice.offset + at, len as u32), remote))
}
