//! Several operations in one submission to a stream.

use super::Lane;
use super::on::PreparedWork;
use super::track::LaneRequest;
use crate::error::Result;
use crate::mem::{Condition, Stream, Word};
use crate::msg::buffer::Part;
use crate::msg::window::Window;
use crate::msg::words::Writer;
use crate::stream::Descriptors;

/// A list of sends, puts, waits and words that goes to a stream in one submission, all of it or nothing.
#[must_use = "nothing happens until it is posted"]
pub struct Batch {
    lane: Lane,
    list: Descriptors,
    /// What it will have posted.
    requests: Vec<LaneRequest>,
}

impl std::fmt::Debug for Batch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Batch({} operations)", self.list.len())
    }
}

impl Lane {
    /// An empty list for that stream.
    pub fn batch(&self, stream: &Stream) -> Batch {
        Batch { lane: self.clone(), list: Descriptors::on(stream), requests: Vec::new() }
    }
}

impl Batch {
    /// How many operations there are.
    pub fn len(&self) -> usize {
        self.list.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Adds a send.
    pub fn send(&mut self, to: usize, part: impl Into<Part>) -> Result<LaneRequest> {
        let work = self.lane.prepare_send(to, part)?;
        self.prepared(work)
    }

    /// Adds a put.
    pub fn put(&mut self, at: (&Window, usize, u64), part: impl Into<Part>) -> Result<LaneRequest> {
        let work = self.lane.prepare_put(at, part)?;
        self.prepared(work)
    }

    /// Adds what was prepared before.
    pub fn prepared(&mut self, work: PreparedWork) -> Result<LaneRequest> {
        self.list.send_prepared(work.work)?;
        self.requests.push(work.request.clone());
        Ok(work.request)
    }

    /// Adds a wait for the end of a request, which may stand earlier in this list.
    pub fn wait(&mut self, request: &LaneRequest) -> Result<()> {
        let qp = self.lane.stream_qp(request.rank)?;
        self.list.wait_for(qp, request.ticket)
    }

    /// Adds a wait for a word, which that rank writes.
    pub fn wait_word(
        &mut self,
        word: &Word,
        (condition, value): (Condition, u64),
        writer: Writer,
    ) -> Result<()> {
        self.lane.note_wait(word, condition, value, writer)?;
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
