//! Several operations in one submission to a stream.

use super::DeviceChannel;
use super::on::PreparedWork;
use super::tracker::ChannelRequest;
use crate::error::Result;
use crate::mem::{Condition, Stream, Word};
use crate::msg::buffer::BufferSlice;
use crate::msg::window::RmaWindow;
use crate::msg::words::Writer;
use crate::stream::Descriptors;

/// A list of sends, puts, waits and word writes that is submitted to a stream as one batch: all of
/// it, or nothing.
#[must_use = "nothing happens until it is posted"]
pub struct ChannelBatch {
    device_channel: DeviceChannel,
    list: Descriptors,
    /// The requests of the list, to be marked as posted.
    requests: Vec<ChannelRequest>,
}

impl std::fmt::Debug for ChannelBatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ChannelBatch({} operations)", self.list.len())
    }
}

impl DeviceChannel {
    /// An empty batch for `stream`.
    pub fn batch(&self, stream: &Stream) -> ChannelBatch {
        ChannelBatch {
            device_channel: self.clone(),
            list: Descriptors::on(stream),
            requests: Vec::new(),
        }
    }
}

impl ChannelBatch {
    /// Number of operations.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether the batch is empty.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Adds a send.
    pub fn send(&mut self, to: usize, slice: impl Into<BufferSlice>) -> Result<ChannelRequest> {
        let work = self.device_channel.prepare_send(to, slice)?;
        self.prepared(work)
    }

    /// Adds a put.
    pub fn put(
        &mut self,
        at: (&RmaWindow, usize, u64),
        slice: impl Into<BufferSlice>,
    ) -> Result<ChannelRequest> {
        let work = self.device_channel.prepare_put(at, slice)?;
        self.prepared(work)
    }

    /// Adds prepared work.
    pub fn prepared(&mut self, work: PreparedWork) -> Result<ChannelRequest> {
        self.list.send_prepared(work.work)?;
        self.requests.push(work.request.clone());
        Ok(work.request)
    }

    /// Adds a wait for the completion of a request, which may be earlier in this batch.
    pub fn wait(&mut self, request: &ChannelRequest) -> Result<()> {
        let qp = self.device_channel.stream_qp(request.rank)?;
        self.list.wait_for(qp, request.ticket)
    }

    /// Adds a wait for a word, which `writer` writes.
    pub fn wait_word(
        &mut self,
        word: &Word,
        (condition, value): (Condition, u64),
        writer: Writer,
    ) -> Result<()> {
        self.device_channel.note_wait(word, condition, value, writer)?;
        self.list.wait_value(word, condition, value)
    }

    /// Adds a write of a word of this device.
    pub fn write_word(&mut self, word: &Word, value: u64) -> Result<()> {
        self.list.write_value(word, value)
    }

    /// Submits the batch to the stream. It is empty afterwards, also on failure.
    pub fn post(&mut self) -> Result<()> {
        let posted = self.list.post();
        let requests = self.requests.drain(..);
        if posted.is_ok() {
            requests.for_each(|request| request.note_posted());
        }
        posted
    }
}
