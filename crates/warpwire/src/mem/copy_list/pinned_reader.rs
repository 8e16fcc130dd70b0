//! Copies from device memory to pinned buffers, on a stream of their own, whose ends are seen by a
//! load from host memory.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::super::allocation::{Region, Word};
use super::super::bytes::SharedBytes;
use super::super::device::Device;
use super::super::stream::Stream;
use super::queue::{CopyTicket, QueueState};
use crate::error::{Error, Kind, Result};
use crate::sync::Backoff;

/// Where the first buffer begins, behind the word that counts.
const FIRST_BUFFER: u64 = 4096;

/// Pinned buffers that the copy engine fills. Creating one may wait for the device; starting a copy
/// does not.
pub(crate) struct PinnedReader {
    device: Device,
    stream: Stream,
    state: Arc<QueueState>,
    word: Word,
    buffer_len: u64,
    started: u64,
}

impl PinnedReader {
    /// `buffers` of `buffer_len` bytes each.
    pub(crate) fn new(device: &Device, buffers: usize, buffer_len: u64) -> Result<Self> {
        let memory = device.alloc_pinned(FIRST_BUFFER + buffers as u64 * buffer_len)?;
        memory.host_bytes()?.store_u64(0, 0)?;
        let (stream, word) = (device.stream()?, memory.word64(0)?);
        let state = Arc::new(QueueState::with_stream(memory, stream.clone()));
        Ok(Self { device: device.clone(), stream, state, word, buffer_len, started: 0 })
    }

    /// The ticket of a copy that was started.
    pub(crate) fn ticket(&self, number: u64) -> CopyTicket {
        self.state.ticket(number)
    }

    /// Starts a copy into a buffer; returns its number. It runs after those before it. After an
    /// error call [`fail`](Self::fail).
    pub(crate) fn start(&mut self, buffer: usize, from: &Region) -> Result<u64> {
        let to = self.state.memory().region(self.offset(buffer), from.len())?;
        self.stream.copy(&to, from)?;
        self.stream.write_value(&self.word, self.started + 1)?;
        self.started += 1;
        Ok(self.started)
    }

    /// Whether a copy has ended.
    #[inline]
    pub(crate) fn is_done(&self, number: u64) -> bool {
        self.state.completed() >= number
    }

    /// Waits for a copy; `false` if it has not ended after `limit`.
    ///
    /// # Errors
    /// [`Kind::DeviceLost`] and those of the driver, if it never will.
    pub(crate) fn wait(&self, number: u64, limit: Duration) -> Result<bool> {
        let (deadline, mut backoff) = (Instant::now() + limit, Backoff::default());
        while !self.is_done(number) {
            if Instant::now() < deadline {
                backoff.snooze();
                continue;
            }
            if self.stream.is_idle()? && !self.is_done(number) {
                return Err(Error::new(Kind::DeviceLost, "read device memory")
                    .on(self.device.label())
                    .why("the stream is idle, but its last copy has not ended"));
            }
            return Ok(false);
        }
        Ok(true)
    }

    /// Declares all copies ended, after the device has failed.
    pub(crate) fn fail(&self) {
        self.state.fail();
    }

    /// The first `len` bytes of a buffer.
    #[inline]
    pub(crate) fn bytes(&self, buffer: usize, len: u64) -> Result<SharedBytes<'_>> {
        self.state.bytes()?.slice(self.offset(buffer), len.min(self.buffer_len))
    }

    fn offset(&self, buffer: usize) -> u64 {
        FIRST_BUFFER + buffer as u64 * self.buffer_len
    }
}

impl std::fmt::Debug for PinnedReader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PinnedReader({}, {} started)", self.device.label(), self.started)
    }
}
