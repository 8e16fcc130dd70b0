//! Operations that a stream executes.

use super::tracker::ChannelRequest;
use super::{ChannelPeer, DeviceChannel, WordWait};
use crate::error::{Error, Kind, Result};
use crate::mem::{Condition, MemOp, StreamRef, Word};
use crate::mlx5::Queue;
use crate::msg::buffer::BufferSlice;
use crate::msg::header::MAX_SLICES;
use crate::msg::window::{RmaWindow, Signal};
use crate::msg::words::Writer;
use crate::stream::Prepared;
use crate::verbs::{ReceiveRequest, Remote, SendRequest, Sge, WrOp};

const NOTHING: Sge = Sge { address: 0, len: 0, lkey: 0 };

/// The slices as scatter-gather elements.
pub(super) fn sges(slices: &[BufferSlice]) -> ([Sge; MAX_SLICES], usize) {
    let mut sges = [NOTHING; MAX_SLICES];
    let mut count = 0;
    for slice in slices.iter().filter(|slice| slice.len > 0).take(MAX_SLICES) {
        sges[count] = slice.buffer.sge(slice.offset, slice.len as u32);
        count += 1;
    }
    (sges, count)
}

/// A prepared send or put that is not posted on a stream yet. Those to one rank must be posted in
/// the order in which they were prepared; dropping one cancels it.
#[must_use = "nothing happens until it is posted"]
pub struct PreparedWork {
    pub(super) request: ChannelRequest,
    pub(super) work: Prepared,
}

impl std::fmt::Debug for PreparedWork {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PreparedWork(rank {}, {})", self.request.rank, self.request.ticket)
    }
}

impl PreparedWork {
    /// Posts the work on a stream, which executes it when it reaches that point.
    pub fn post<'s>(self, stream: impl Into<StreamRef<'s>>) -> Result<ChannelRequest> {
        self.work.post(stream)?;
        self.request.note_posted();
        Ok(self.request)
    }
}

impl DeviceChannel {
    /// Posts a receive for the next message that streams of a rank send to this one with
    /// [`send_on_stream`](Self::send_on_stream). Wait for it with
    /// [`wait_on_stream`](Self::wait_on_stream), or on the CPU with [`ChannelRequest::wait`].
    ///
    /// A message that is longer than the memory fails the connection, on both sides.
    ///
    /// # Errors
    /// [`Kind::Busy`] if the receive queue is full.
    pub fn receive(&self, from: usize, slice: impl Into<BufferSlice>) -> Result<ChannelRequest> {
        self.receivev(from, &[slice.into()])
    }

    /// As [`receive`](Self::receive), scattered to slices in order; at most 15.
    pub fn receivev(&self, from: usize, slices: &[BufferSlice]) -> Result<ChannelRequest> {
        let peer = self.0.peer(from, "receive from")?;
        self.0.check_slices(slices, "receive from", from)?;
        let (data, count) = sges(slices);
        let mut tracker = peer.tracker.lock();
        let id = tracker.next(Queue::Receive);
        let receive = ReceiveRequest { id, data: &data[..count] };
        let ticket = match peer.stream.post_receive(&[receive]) {
            Err(error) if error.kind() == &Kind::Busy => {
                tracker.take(&peer.stream)?;
                peer.stream.post_receive(&[receive])?
            }
            other => other.map_err(|error| self.explain(from, error))?,
        };
        let number = tracker.begin(Queue::Receive, slices);
        let len = slices.iter().map(|slice| slice.len).sum();
        let (device_channel, queue) = (self.0.clone(), Queue::Receive);
        Ok(ChannelRequest { device_channel, rank: from, queue, number, ticket, len })
    }

    /// Sends when the stream reaches this point: everything the stream did before is in the
    /// message. If the peer has posted no receive, the message waits; the stream does not.
    pub fn send_on_stream<'s>(
        &self,
        stream: impl Into<StreamRef<'s>>,
        to: usize,
        slice: impl Into<BufferSlice>,
    ) -> Result<ChannelRequest> {
        self.sendv_on_stream(stream, to, &[slice.into()])
    }

    /// As [`send_on_stream`](Self::send_on_stream), gathered from slices; at most 15.
    pub fn sendv_on_stream<'s>(
        &self,
        stream: impl Into<StreamRef<'s>>,
        to: usize,
        slices: &[BufferSlice],
    ) -> Result<ChannelRequest> {
        self.prepare_sendv(to, slices)?.post(stream)
    }

    /// Prepares a send, to be posted later.
    pub fn prepare_send(&self, to: usize, slice: impl Into<BufferSlice>) -> Result<PreparedWork> {
        self.prepare_sendv(to, &[slice.into()])
    }

    /// Prepares a send gathered from slices; at most 15.
    pub fn prepare_sendv(&self, to: usize, slices: &[BufferSlice]) -> Result<PreparedWork> {
        self.prepare(to, WrOp::Send, slices, "send to")
    }

    /// Writes to a rank's memory of a window when the stream reaches this point.
    pub fn put_on_stream<'s>(
        &self,
        stream: impl Into<StreamRef<'s>>,
        (window, rank, offset): (&RmaWindow, usize, u64),
        slice: impl Into<BufferSlice>,
    ) -> Result<ChannelRequest> {
        self.prepare_put((window, rank, offset), slice)?.post(stream)
    }

    /// Prepares a put.
    pub fn prepare_put(
        &self,
        (window, rank, offset): (&RmaWindow, usize, u64),
        slice: impl Into<BufferSlice>,
    ) -> Result<PreparedWork> {
        let slice = slice.into();
        let at = window.remote(rank, offset, slice.len)?;
        self.prepare(rank, WrOp::Write(at), &[slice], "put to")
    }

    /// Writes when the stream reaches this point, and then updates a word of the window: a peer
    /// that sees the updated word sees the data. The returned request is that of the word.
    pub fn put_signal_on_stream<'s>(
        &self,
        stream: impl Into<StreamRef<'s>>,
        (window, rank, offset): (&RmaWindow, usize, u64),
        slice: impl Into<BufferSlice>,
        (word, signal): (u64, Signal),
    ) -> Result<ChannelRequest> {
        let width = signal.width().bytes();
        let at = window.word(rank, word, width)?;
        let put = self.prepare_put((window, rank, offset), slice)?;
        let then = match signal {
            Signal::Set32(value) => self.prepare_inline(rank, at, &value.to_le_bytes())?,
            Signal::Set64(value) => self.prepare_inline(rank, at, &value.to_le_bytes())?,
            Signal::Add64(_) => {
                let error = Error::new(Kind::Unsupported, format!("signal rank {rank}"));
                return Err(error
                    .why("a stream can set words, but not add to them")
                    .fix("use Signal::Set64, or put_signal_on_stream of DeviceChannel::kernel"));
            }
        };
        let stream = stream.into();
        let _data = put.post(stream)?;
        then.post(stream)
    }

    /// Reads from a rank's memory of a window when the stream reaches this point.
    pub fn get_on_stream<'s>(
        &self,
        stream: impl Into<StreamRef<'s>>,
        (window, rank, offset): (&RmaWindow, usize, u64),
        slice: impl Into<BufferSlice>,
    ) -> Result<ChannelRequest> {
        let slice = slice.into();
        let at = window.remote(rank, offset, slice.len)?;
        self.prepare(rank, WrOp::Read(at), &[slice], "get from")?.post(stream)
    }

    /// Blocks a stream until a request has completed or failed; the stream then sees received data.
    /// [`check`](Self::check) reports failures.
    pub fn wait_on_stream<'s>(
        &self,
        stream: impl Into<StreamRef<'s>>,
        request: &ChannelRequest,
    ) -> Result<()> {
        let peer = self.0.peer(request.rank, "wait for")?;
        let stream = stream.into();
        let waits = || peer.stream.wait_for(stream, request.ticket);
        match waits() {
            Err(error) if error.kind() == &Kind::Busy => {
                peer.tracker.lock().take(&peer.stream)?;
                waits()
            }
            other => other,
        }
    }

    /// Blocks a stream until all requests have completed or failed.
    pub fn wait_all_on_stream<'s>(
        &self,
        stream: impl Into<StreamRef<'s>>,
        requests: &[ChannelRequest],
    ) -> Result<()> {
        let stream = stream.into();
        requests.iter().try_for_each(|request| self.wait_on_stream(stream, request))
    }

    /// Blocks a stream until a word of this device's memory satisfies a condition. If the rank that
    /// writes it is lost, a value that satisfies the condition is stored, and
    /// [`check`](Self::check) reports the loss.
    pub fn wait_word_on_stream<'s>(
        &self,
        stream: impl Into<StreamRef<'s>>,
        word: &Word,
        (condition, value): (Condition, u64),
        writer: Writer,
    ) -> Result<()> {
        self.note_wait(word, condition, value, writer)?;
        let wait = MemOp::Wait { word: word.clone(), condition, value };
        self.0.kept.lock().batch(stream.into(), &[wait])
    }

    /// Records which rank a stream waits for, so that [`OnLost`](super::OnLost) can release it.
    pub(super) fn note_wait(
        &self,
        word: &Word,
        condition: Condition,
        value: u64,
        writer: Writer,
    ) -> Result<()> {
        let writer = match writer {
            Writer::Rank(rank) => {
                self.0.peer(rank, "wait for")?;
                Some(rank)
            }
            Writer::Any => None,
        };
        let wait = WordWait { word: word.clone(), condition, value, writer };
        let mut waits = self.0.waits.lock();
        waits.retain(|wait| !wait.is_satisfied());
        waits.push(wait);
        drop(waits);
        // The hook is not called again for a rank that was lost before the wait was recorded.
        let state = self.0.shared.lock();
        let lost = match writer {
            Some(rank) => state.peers[rank].end.clone(),
            None => {
                state.peers.iter().find(|peer| peer.is_broken).and_then(|peer| peer.end.clone())
            }
        };
        lost.map_or(Ok(()), |why| Err(why.during("wait for a word on a stream")))
    }

    /// Notifies a rank, when the stream reaches this point, that this one is ready to receive.
    pub fn send_ready_on_stream<'s>(
        &self,
        stream: impl Into<StreamRef<'s>>,
        to: usize,
    ) -> Result<()> {
        let table = self.0.peer(to, "notify")?.table;
        let mut sync_counters = self.0.sync_counters.lock();
        let value = sync_counters.ready_sent[to].wrapping_add(1);
        let own = self.0.shared.rank_info.rank as u64;
        let at = Remote { address: table.address + own * 4, ..table };
        let _sent = self.prepare_inline(to, at, &value.to_le_bytes())?.post(stream)?;
        sync_counters.ready_sent[to] = value;
        Ok(())
    }

    /// Blocks a stream until the next ready notification of a rank, and consumes it.
    pub fn wait_ready_on_stream<'s>(
        &self,
        stream: impl Into<StreamRef<'s>>,
        from: usize,
    ) -> Result<()> {
        self.0.peer(from, "wait for")?;
        let mut sync_counters = self.0.sync_counters.lock();
        let value = sync_counters.ready_awaited[from].wrapping_add(1);
        let word = self.0.table.word32(from as u64 * 4)?;
        let at_least = (Condition::AtLeast, value.into());
        self.wait_word_on_stream(stream, &word, at_least, Writer::Rank(from))?;
        sync_counters.ready_awaited[from] = value;
        Ok(())
    }

    /// Blocks a stream until a stream of every rank has reached the barrier with the same sequence
    /// number.
    pub fn barrier_on_stream<'s>(&self, stream: impl Into<StreamRef<'s>>) -> Result<()> {
        let (stream, rank_info) = (stream.into(), &self.0.shared.rank_info);
        let (rank, size) = (rank_info.rank, rank_info.size);
        let mut sync_counters = self.0.sync_counters.lock();
        let value = sync_counters.barriers.wrapping_add(1);
        let (mut distance, mut step) = (1, size as u64);
        while distance < size {
            let (to, from) = ((rank + distance) % size, (rank + size - distance) % size);
            let table = self.0.peer(to, "synchronize with")?.table;
            let at = Remote { address: table.address + step * 4, ..table };
            let _sent = self.prepare_inline(to, at, &value.to_le_bytes())?.post(stream)?;
            let word = self.0.table.word32(step * 4)?;
            self.wait_word_on_stream(
                stream,
                &word,
                (Condition::AtLeast, value.into()),
                Writer::Rank(from),
            )?;
            (distance, step) = (distance * 2, step + 1);
        }
        sync_counters.barriers = value;
        Ok(())
    }

    pub(super) fn prepare(
        &self,
        rank: usize,
        op: WrOp,
        slices: &[BufferSlice],
        verb: &str,
    ) -> Result<PreparedWork> {
        let peer = self.0.peer(rank, verb)?;
        self.0.check_slices(slices, verb, rank)?;
        let (data, count) = sges(slices);
        self.ready(peer, rank, slices, &|id| SendRequest::new(id, op).with(&data[..count]))
    }

    fn prepare_inline(&self, rank: usize, at: Remote, bytes: &[u8]) -> Result<PreparedWork> {
        let peer = self.0.peer(rank, "write to")?;
        self.ready(peer, rank, &[], &|id| SendRequest::new(id, WrOp::Write(at)).inline(bytes))
    }

    fn ready<'r>(
        &self,
        peer: &ChannelPeer,
        rank: usize,
        slices: &[BufferSlice],
        request: &dyn Fn(u64) -> SendRequest<'r>,
    ) -> Result<PreparedWork> {
        let mut tracker = peer.tracker.lock();
        let id = tracker.next(Queue::Send);
        let work = match peer.stream.prepare(&request(id)) {
            Err(error) if error.kind() == &Kind::Busy => {
                tracker.take(&peer.stream)?;
                peer.stream.prepare(&request(id))?
            }
            other => other.map_err(|error| self.explain(rank, error))?,
        };
        let number = tracker.begin(Queue::Send, slices);
        let len = slices.iter().map(|slice| slice.len).sum();
        let (device_channel, queue, ticket) = (self.0.clone(), Queue::Send, work.ticket());
        let request = ChannelRequest { device_channel, rank, queue, number, ticket, len };
        Ok(PreparedWork { request, work })
    }

    /// The failure of a connection, with the loss of its rank if that is the cause.
    #[cold]
    fn explain(&self, rank: usize, error: Error) -> Error {
        self.failure(rank).unwrap_or(error)
    }
}
