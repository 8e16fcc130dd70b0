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

/// A list of sends, puts, waits and words that goes to a stream in one submission, all of it or nothing.
#[must_use = "nothing happens until it is posted"]
pub struct ChannelBatch {
    device_channel: DeviceChannel,
    list: Descriptors,
    /// What it will have posted.
    requests: Vec<ChannelRequest>,
}

impl std::fmt::Debug for ChannelBatch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Batch({} operations)", self.list.len())
    }
}

impl DeviceChannel {
    /// An empty list for that stream.
    pub fn batch(&self, stream: &Stream) -> ChannelBatch {
        ChannelBatch {
            device_channel: self.clone(),
            list: Descriptors::on(stream),
            requests: Vec::new(),
        }
    }
}

impl ChannelBatch {
    /// How many operations there are.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether there are none.
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

    /// Adds what was prepared before.
    pub fn prepared(&mut self, work: PreparedWork) -> Result<ChannelRequest> {
        self.list.send_prepared(work.work)?;
        self.requests.push(work.request.clone());
        Ok(work.request)
    }

    /// Adds a wait for the end of a request, which may stand earlier in this list.
    pub fn wait(&mut self, request: &ChannelRequest) -> Result<()> {
        let qp = self.device_channel.stream_qp(request.rank)?;
        self.list.wait_for(qp, request.ticket)
    }

    /// Adds a wait for a word, which that rank writes.
    pub fn wait_word(
        &mut self,
        word: &Word,
        (condition, value): (Condition, u64),
        writer: Writer,
    ) -> Result<()> {
        self.device_channel.note_wait(word, condition, value, writer)?;
        self.list.wait_value(word, condition, value)
    }

    /// Adds a write of a word of our own.
    pub fn write_word(&mut self, word: &Word, value: u64) -> Result<()> {
        self.list.write_value(word, value)
    }

    /// Puts all of it on the stream. The list is empty then.
    pub fn post(&mut self) -> Result<()> {
        let posted = self.list.post();
        let requests = self.requests.drain(..);
        if posted.is_ok() {
            requests.for_each(|request| request.note_posted());
        }
        posted
    }
}
