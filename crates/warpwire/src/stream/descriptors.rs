//! Several operations of several queue pairs, submitted to a stream in one batch.

use std::sync::Arc;

use parking_lot::MutexGuard;

use super::StreamQp;
use super::prepared::{Prepared, PreparedWait, check_stream};
use super::queue::{Posted, Shared, State};
use super::ticket::Ticket;
use super::waits::ProgressMarker;
use crate::error::{Error, Kind, Result};
use crate::mem::{Condition, MemOp, Region, Stream, Word};
use crate::verbs::SendRequest;

/// Writes of up to this many bytes become word writes in the same batch, instead of a copy.
const MAX_WORD_WRITE: u64 = 64;

#[derive(Debug)]
enum Element {
    Send(Prepared),
    Wait(PreparedWait),
    Word(MemOp),
}

impl Element {
    fn shared(&self) -> Option<&Arc<Shared>> {
        match self {
            Self::Send(work) => Some(&work.shared),
            Self::Wait(wait) => Some(&wait.shared),
            Self::Word(_) => None,
        }
    }

    /// Whether the stream may block there.
    fn waits(&self) -> bool {
        matches!(self, Self::Wait(_) | Self::Word(MemOp::Wait { .. }))
    }
}

/// Operations for one stream that are submitted as one batch: all of them, or none.
///
/// After [`post`](Self::post) the list is empty and can be filled again. Dropping it cancels all of
/// its operations.
#[derive(Debug)]
#[must_use = "nothing happens until it is posted"]
pub struct Descriptors {
    stream: Stream,
    elements: Vec<Element>,
    ops: Vec<MemOp>,
}

impl Descriptors {
    /// An empty list for `stream`.
    pub fn on(stream: &Stream) -> Self {
        Self { stream: stream.clone(), elements: Vec::new(), ops: Vec::new() }
    }

    /// Number of operations.
    pub fn len(&self) -> usize {
        self.elements.len()
    }

    /// Whether the list is empty.
    pub fn is_empty(&self) -> bool {
        self.elements.is_empty()
    }

    /// Prepares a request now and adds it; returns its ticket.
    pub fn send(&mut self, qp: &StreamQp, request: &SendRequest<'_>) -> Result<Ticket> {
        self.send_prepared(qp.prepare(request)?)
    }

    /// Adds a prepared request.
    pub fn send_prepared(&mut self, work: Prepared) -> Result<Ticket> {
        check_stream(&work.shared, (&self.stream).into())?;
        let ticket = work.ticket();
        self.elements.push(Element::Send(work));
        Ok(ticket)
    }

    /// Adds a wait for the completion of a request that is posted already or is earlier in this
    /// list.
    pub fn wait_send(&mut self, qp: &StreamQp, ticket: Ticket) -> Result<()> {
        ticket.check_send()?;
        self.wait_for(qp, ticket)
    }

    /// Adds a wait for the completion of a request or receive.
    pub fn wait_for(&mut self, qp: &StreamQp, ticket: Ticket) -> Result<()> {
        self.wait_prepared(qp.prepare_wait(ticket)?)
    }

    /// Adds a wait for the next receive; returns its ticket.
    pub fn wait_receive(&mut self, qp: &StreamQp) -> Result<Ticket> {
        let wait = qp.prepare_wait_receive()?;
        let ticket = wait.ticket();
        self.wait_prepared(wait)?;
        Ok(ticket)
    }

    /// Adds a prepared wait.
    pub fn wait_prepared(&mut self, wait: PreparedWait) -> Result<()> {
        check_stream(&wait.shared, (&self.stream).into())?;
        self.elements.push(Element::Wait(wait));
        Ok(())
    }

    /// Adds a wait until a word satisfies a condition.
    pub fn wait_value(&mut self, word: &Word, condition: Condition, value: u64) -> Result<()> {
        self.word(MemOp::Wait { word: word.clone(), condition, value })
    }

    /// Adds a write of a word.
    pub fn write_value(&mut self, word: &Word, value: u64) -> Result<()> {
        self.word(MemOp::Write { word: word.clone(), value })
    }

    /// Adds a write of bytes. They are copied now: the caller may change them as soon as this
    /// returns.
    pub fn write_memory(&mut self, to: &Region, bytes: &[u8]) -> Result<()> {
        if to.len() != bytes.len() as u64 {
            let what = format!("write {} bytes to {} bytes", bytes.len(), to.len());
            let error = Error::new(Kind::InvalidArgument, what).on(self.stream.label());
            return Err(error.why("the lengths differ"));
        }
        let in_words = to.len() <= MAX_WORD_WRITE
            && to.len().is_multiple_of(4)
            && to.address().is_aligned_to(4);
        if !in_words {
            let from = self.stream.stage(bytes)?;
            return self.word(MemOp::Copy { to: to.clone(), from });
        }
        for (at, value) in bytes.as_chunks::<4>().0.iter().enumerate() {
            let word = to.allocation().word32(to.offset() + 4 * at as u64)?;
            self.write_value(&word, u32::from_le_bytes(*value).into())?;
        }
        Ok(())
    }

    fn word(&mut self, op: MemOp) -> Result<()> {
        self.stream.check(&op)?;
        self.elements.push(Element::Word(op));
        Ok(())
    }

    /// Submits the whole list to the stream, as one batch.
    ///
    /// # Errors
    /// Those of [`Prepared::post`] and [`PreparedWait::post`], of any operation. Nothing is
    /// submitted then, the requests are cancelled as if they had been dropped, and the list is
    /// empty.
    pub fn post(&mut self) -> Result<()> {
        let mut elements = std::mem::take(&mut self.elements);
        let mut ops = std::mem::take(&mut self.ops);
        let posted = submit(&self.stream, &mut elements, &mut ops);
        elements.clear(); // drops, and so cancels, what was not posted
        ops.clear();
        (self.elements, self.ops) = (elements, ops);
        posted
    }
}

/// A queue pair of the list, locked while the list is posted.
struct LockedQp<'a> {
    shared: &'a Arc<Shared>,
    state: MutexGuard<'a, State>,
    before: Posted,
}

fn submit(stream: &Stream, elements: &mut [Element], ops: &mut Vec<MemOp>) -> Result<()> {
    if elements.is_empty() {
        return Ok(());
    }
    let mut pairs: Vec<_> = elements.iter().filter_map(Element::shared).cloned().collect();
    // One global lock order, so that two lists with the same queue pairs cannot deadlock.
    pairs.sort_unstable_by_key(Arc::as_ptr);
    pairs.dedup_by_key(|pair| Arc::as_ptr(pair));
    let mut locked: Vec<_> = pairs
        .iter()
        .map(|shared| {
            let state = shared.state.lock();
            LockedQp { shared, before: state.posted(), state }
        })
        .collect();
    let posted = plan(stream, elements, &mut locked, ops).and_then(|()| stream.batch(ops));
    if posted.is_err() {
        for locked in &mut locked {
            locked.state.unpost_to(locked.before);
        }
    }
    for element in elements {
        match element {
            Element::Send(work) => work.is_posted = posted.is_ok(),
            Element::Wait(wait) => {
                wait.is_posted = posted.is_ok();
                if posted.is_err()
                    && let Some(locked) = find(&mut locked, &wait.shared)
                {
                    locked.state.unpost_wait(wait.slot);
                }
            }
            Element::Word(_) => {}
        }
    }
    posted
}

fn find<'h, 'a>(
    locked: &'h mut [LockedQp<'a>],
    shared: &Arc<Shared>,
) -> Option<&'h mut LockedQp<'a>> {
    locked.iter_mut().find(|locked| Arc::ptr_eq(locked.shared, shared))
}

/// The stream's operations for each element, in order.
fn plan(
    stream: &Stream,
    elements: &[Element],
    locked: &mut [LockedQp<'_>],
    ops: &mut Vec<MemOp>,
) -> Result<()> {
    for (at, element) in elements.iter().enumerate() {
        match element {
            Element::Word(op) => ops.push(op.clone()),
            Element::Send(work) => {
                if let Some(LockedQp { shared, state, .. }) = find(locked, &work.shared) {
                    shared.post(state, work.ticket.number, stream.into(), ops)?;
                }
            }
            Element::Wait(wait) => {
                if let Some(LockedQp { shared, state, .. }) = find(locked, &wait.shared) {
                    let markers = markers_of(elements, at, wait);
                    shared.post_wait(state, wait.ticket, wait.slot, stream.into(), markers, ops)?;
                }
            }
        }
    }
    Ok(())
}

/// What shows that the stream has reached and passed a wait: a doorbell of the same queue pair
/// directly before or after it, or the wait's own words.
fn markers_of(elements: &[Element], at: usize, wait: &PreparedWait) -> [ProgressMarker; 2] {
    let marker_of = |element: &Element| match element {
        Element::Send(work) if Arc::ptr_eq(&work.shared, &wait.shared) => {
            Some(ProgressMarker::Ring(work.ticket.number))
        }
        _ => None,
    };
    let mut before = elements[..at].iter().rev().take_while(|element| !element.waits());
    let arrived = before.find_map(marker_of).unwrap_or(ProgressMarker::Word);
    let mut after = elements[at + 1..].iter().take_while(|element| !element.waits());
    let passed = after.find_map(marker_of).unwrap_or(ProgressMarker::Word);
    [arrived, passed]
}
