//! Incoming messages: matched to receives, or queued as unexpected.

use super::buffer::{self, BufferSlice};
use super::entries::RequestKind;
use super::header::{HEADER_LEN, Header, Kind as Message, RANGE_LEN, RemoteRange};
use super::peer::{ControlOp, Source, Unexpected};
use super::state::{RECEIVE, State, id_of};
use crate::error::{Error, Kind, Result};
use crate::mr::Access;
use crate::verbs::{Completion, CompletionKind, ReceiveRequest};

impl State {
    pub(super) fn arrived(&mut self, rank: usize, slot: u32, completion: &Completion) {
        let mut bytes = [0; HEADER_LEN];
        let read = self.area.slots.bytes().read(self.area.slot_at(rank, slot), &mut bytes);
        let header = read.ok().and_then(|()| Header::parse(&bytes));
        let sensible = matches!(completion.kind, CompletionKind::Receive);
        let Some(header) = header.filter(|header| sensible && header.fits(completion.len.into()))
        else {
            let error = Error::new(Kind::Malformed, format!("parse a message of rank {rank}"));
            self.fail_peer(rank, error.why(format!("rank {rank} sent a malformed message")));
            return;
        };
        let peer = &mut self.peers[rank];
        let limit = peer.hello.as_ref().map_or(0, |hello| hello.receives);
        peer.credits = peer.credits.saturating_add(header.credits).min(limit);
        let Header { channel, tag, len, id, ranges, .. } = header;
        match header.kind {
            Message::Eager => {
                self.take(rank, Unexpected { channel, tag, len, from: Source::Slot(slot) });
            }
            Message::Rendezvous => {
                let from = Source::Sender { slot, ranges, id };
                self.take(rank, Unexpected { channel, tag, len, from });
            }
            Message::Done => {
                self.repost(rank, slot, false);
                self.fetched(rank, id);
            }
            Message::Credit => self.repost(rank, slot, false),
        }
    }

    /// The peer has read a rendezvous message of ours.
    pub(super) fn fetched(&mut self, rank: usize, id: u64) {
        let Some(index) = self.entries.by_id(id) else { return };
        let entry = self.entries.get(index);
        let is_fetched = entry.kind == RequestKind::Send && !entry.remote.is_empty();
        if !is_fetched || entry.peer != rank || entry.peer_done {
            return; // not an outstanding rendezvous message of ours: ignore
        }
        entry.peer_done = true;
        self.peers[rank].unfetched -= 1;
        self.complete_if_done(index);
    }

    /// Matches an incoming message to a receive, or queues it as unexpected.
    pub(super) fn take(&mut self, rank: usize, message: Unexpected) {
        let entries = &mut self.entries;
        let wants = |index: &u32| {
            let entry = entries.get(*index);
            entry.channel == message.channel && entry.wants.matches(message.tag)
        };
        match self.peers[rank].receives.iter().position(wants) {
            Some(at) => {
                let index = self.peers[rank].receives.remove(at).unwrap_or_default();
                self.deliver(rank, index, message);
            }
            None => self.peers[rank].unexpected.push_back(message),
        }
    }

    /// Delivers a message to a matched receive.
    pub(super) fn deliver(&mut self, rank: usize, index: u32, message: Unexpected) {
        let Unexpected { tag, len, from, .. } = message;
        let entry = self.entries.get(index);
        (entry.tag, entry.arrived) = (tag, len);
        let room = entry.total;
        if len > room {
            entry.failure = Some(truncated(rank, len, room));
        }
        let fits = len <= room;
        match from {
            Source::Slot(slot) => {
                let copied = if fits { self.copy_out(rank, slot, index, len) } else { Ok(()) };
                self.repost(rank, slot, true);
                self.received(index, copied);
            }
            Source::Buffered(bytes) => {
                let slices = &self.entries.get(index).slices;
                let copied = if fits { buffer::scatter(slices, &bytes) } else { Ok(()) };
                self.received(index, copied);
            }
            Source::SelfSend(sender) => {
                let copied = if fits { self.copy_own(index, sender, len) } else { Ok(()) };
                self.received(index, copied);
                let entry = self.entries.get(sender);
                entry.peer_done = true;
                self.complete_if_done(sender);
            }
            Source::Sender { slot, ranges, id } => {
                let known = self.read_ranges(rank, slot, index, ranges, len);
                self.repost(rank, slot, true);
                self.fetch(rank, index, id, known && fits);
            }
        }
    }

    /// Completes a receive whose message is in memory.
    pub(super) fn received(&mut self, index: u32, copied: Result<()>) {
        let entry = self.entries.get(index);
        (entry.posted, entry.peer_done) = (entry.arrived, true);
        if let Err(why) = copied {
            entry.failure = Some(why);
        }
        self.complete_if_done(index);
    }

    pub(super) fn copy_out(&mut self, rank: usize, slot: u32, index: u32, len: u64) -> Result<()> {
        let at = self.area.slot_at(rank, slot) + HEADER_LEN as u64;
        let bytes = self.area.slots.bytes();
        let slices = &self.entries.get(index).slices;
        // A single slice in host memory needs one copy only.
        if let [slice] = &slices[..]
            && len > 0
        {
            let span = slice.buffer.span(Access::LOCAL_WRITE, slice.offset, len)?;
            if let Some(host) = span.host_bytes() {
                return host.copy_from(0, &bytes, at, len);
            }
        }
        let whole = &mut self.scratch[..len as usize];
        bytes.read(at, whole)?;
        buffer::scatter(slices, whole)
    }

    /// Copies a message of this rank to itself.
    pub(super) fn copy_own(&mut self, index: u32, sender: u32, len: u64) -> Result<()> {
        let to: Vec<BufferSlice> = self.entries.get(index).slices.clone();
        let from: Vec<BufferSlice> = self.entries.get(sender).slices.clone();
        buffer::copy(&to, &from, len)
    }

    /// Reads the ranges of a rendezvous message; false if they do not add up to its length.
    pub(super) fn read_ranges(
        &mut self,
        rank: usize,
        slot: u32,
        index: u32,
        ranges: u8,
        len: u64,
    ) -> bool {
        let at = self.area.slot_at(rank, slot) + HEADER_LEN as u64;
        let entry = self.entries.get(index);
        let mut sum = 0u64;
        for number in 0..u64::from(ranges) {
            let mut bytes = [0; RANGE_LEN];
            let offset = at + number * RANGE_LEN as u64;
            if self.area.slots.bytes().read(offset, &mut bytes).is_err() {
                return false;
            }
            let range = RemoteRange::parse(&bytes);
            sum = sum.saturating_add(range.len);
            entry.remote.push(range);
        }
        sum == len
    }

    pub(super) fn fetch(&mut self, rank: usize, index: u32, id: u64, good: bool) {
        let broken = self.broken(rank);
        let entry = self.entries.get(index);
        entry.sender_id = id;
        if broken.is_some() {
            entry.failure = broken;
        }
        if good && entry.failure.is_none() {
            self.peers[rank].control_queue.push_back(ControlOp::Fetch(index));
        } else {
            if entry.failure.is_none() {
                let error = Error::new(Kind::Malformed, format!("receive from rank {rank}"));
                entry.failure = Some(error.why(format!(
                    "the ranges sent by rank {rank} do not add up to the length of the message"
                )));
            }
            // Release the sender, even though the receive failed.
            self.peers[rank].control_queue.push_back(ControlOp::Done(id));
            self.complete_if_done(index);
        }
        self.pump(rank);
    }

    /// Reposts a receive. `credit`: its message had used a credit.
    pub(super) fn repost(&mut self, rank: usize, slot: u32, credit: bool) {
        if self.peers[rank].is_broken {
            return;
        }
        match self.post_receive(rank, slot) {
            Ok(()) if credit => self.peers[rank].owed += 1,
            Ok(()) => {}
            Err(why) => self.fail_peer(rank, why),
        }
    }

    /// Posts a receive for messages of a rank.
    pub(super) fn post_receive(&mut self, rank: usize, slot: u32) -> Result<()> {
        let at = self.area.slot_at(rank, slot);
        let data = [self.area.slots_mr.sge(at, self.area.slot as u32)];
        let Some(qp) = &self.peers[rank].qp else { return Ok(()) };
        qp.post_receive(&[ReceiveRequest { id: id_of(RECEIVE, rank, slot), data: &data }])?;
        Ok(())
    }
}

#[cold]
fn truncated(rank: usize, len: u64, room: u64) -> Error {
    Error::new(Kind::OutOfRange, format!("receive from rank {rank}"))
        .why(format!("the message has {len} bytes, the buffer {room}"))
        .fix("use a buffer of at least that length")
}
