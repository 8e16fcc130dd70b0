//! Flow control of a connection: how much may be written, how much was read, and validation of the
//! peer's counters.

use crate::error::{Error, Kind, Result};

/// Top bit of the word `received`: the stream has ended, and the other bits are its total length.
pub const FIN: u64 = 1 << 63;

/// Top bit of the word `taken`: the receiver has shut down and reads no more.
pub const READ_CLOSED: u64 = 1 << 63;

/// The receiving direction: our ring and the peer's count of it.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveFlow {
    size: u64,
    received: u64,
    consumed: u64,
    reported: u64,
    /// Unreported bytes after which the peer is notified.
    report_at: u64,
    ended: bool,
}

impl ReceiveFlow {
    /// An empty ring of `size` bytes, a power of two.
    pub fn new(size: u64) -> Self {
        Self { size, received: 0, consumed: 0, reported: 0, report_at: size / 4, ended: false }
    }

    /// As [`new`](Self::new), for a peer that keeps at most `window` bytes in flight or unread:
    /// reports are sent after a quarter of that, if it is less than the ring.
    pub fn from_window(size: u64, window: Option<u64>) -> Self {
        let report_at = (window.unwrap_or(size).min(size) / 4).max(1);
        Self { report_at, ..Self::new(size) }
    }

    /// Takes over the word `received`.
    ///
    /// # Errors
    /// [`Kind::Malformed`] if the value is impossible: more than the ring holds, less than before,
    /// or a change after the end. The connection must be reset.
    #[inline]
    pub fn update(&mut self, word: u64) -> Result<()> {
        let (count, ended) = (word & !FIN, word & FIN != 0);
        if count == self.received && ended == self.ended {
            return Ok(());
        }
        let is_valid = count >= self.received
            && count - self.consumed <= self.size
            && !(self.ended && (count != self.received || !ended));
        if !is_valid {
            return Err(self.violation(word));
        }
        (self.received, self.ended) = (count, ended);
        Ok(())
    }

    /// Bytes in the ring that were not read.
    #[inline]
    pub fn waiting(&self) -> u64 {
        self.received - self.consumed
    }

    /// Whether the stream has ended and everything was read.
    #[inline]
    pub fn is_at_end(&self) -> bool {
        self.ended && self.waiting() == 0
    }

    /// Whether the peer has sent FIN.
    #[inline]
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Offset of the first unread byte in the ring, and the number of contiguous ones.
    #[inline]
    pub fn piece(&self) -> (u64, u64) {
        let offset = self.consumed & (self.size - 1);
        (offset, self.waiting().min(self.size - offset))
    }

    /// Marks `count` bytes, at most those waiting, as read. Returns the value for the peer's word
    /// `taken` if a report is due: when a quarter of the ring, or of the peer's window, is
    /// unreported.
    #[inline]
    pub fn consume(&mut self, count: u64) -> Option<u64> {
        self.consumed += count.min(self.waiting());
        let is_time = self.consumed - self.reported >= self.report_at && !self.ended;
        is_time.then(|| self.report())
    }

    /// The value for the peer's word `taken`, due or not.
    #[inline]
    pub fn report(&mut self) -> u64 {
        self.reported = self.consumed;
        self.reported
    }

    #[cold]
    fn violation(&self, word: u64) -> Error {
        let Self { size, received, consumed, ended, .. } = self;
        Error::new(Kind::Malformed, "receive")
            .why(format!(
                "the peer wrote {word:#x} to `received`, after {received} (ended: {ended}), with \
                 {consumed} bytes read and a ring of {size}"
            ))
            .fix("the connection is reset; check the implementation of the peer")
    }
}

/// The sending direction: the peer's ring and its count of what was read.
#[derive(Clone, Copy, Debug)]
pub struct SendFlow {
    size: u64,
    sent: u64,
    taken: u64,
    ended: bool,
    read_closed: bool,
}

impl SendFlow {
    /// An empty ring of the peer, of `size` bytes, a power of two.
    pub fn new(size: u64) -> Self {
        Self { size, sent: 0, taken: 0, ended: false, read_closed: false }
    }

    /// Takes over the word `taken`.
    ///
    /// # Errors
    /// [`Kind::Malformed`] if the value is impossible: more than was sent, less than before, or
    /// without READ_CLOSED after it was set.
    #[inline]
    pub fn update(&mut self, word: u64) -> Result<()> {
        let (count, read_closed) = (word & !READ_CLOSED, word & READ_CLOSED != 0);
        if count < self.taken || count > self.sent || self.read_closed && !read_closed {
            let Self { sent, taken, .. } = self;
            let why = format!("the peer wrote {word:#x} to `taken`, after {taken}, of {sent} sent");
            return Err(Error::new(Kind::Malformed, "send")
                .why(why)
                .fix("the connection is reset; check the implementation of the peer"));
        }
        (self.taken, self.read_closed) = (count, read_closed);
        Ok(())
    }

    /// Whether the peer has shut down its receiving direction.
    #[inline]
    pub fn is_read_closed(&self) -> bool {
        self.read_closed
    }

    /// Free bytes of the peer's ring; 0 after [`close`](Self::close).
    #[inline]
    pub fn room(&self) -> u64 {
        if self.ended { 0 } else { self.size - (self.sent - self.taken) }
    }

    /// Offset of the next byte in the peer's ring, and the number of contiguous free bytes.
    #[inline]
    pub fn piece(&self) -> (u64, u64) {
        let offset = self.sent & (self.size - 1);
        (offset, self.room().min(self.size - offset))
    }

    /// Marks `count` bytes, at most those that fit, as written.
    #[inline]
    pub fn wrote(&mut self, count: u64) {
        self.sent += count.min(self.room());
    }

    /// Ends the stream: [`word`](Self::word) has FIN from here on.
    pub fn close(&mut self) {
        self.ended = true;
    }

    /// Whether [`close`](Self::close) was called.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Total bytes written.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// The current value for the peer's word `received`.
    #[inline]
    pub fn word(&self) -> u64 {
        self.sent | if self.ended { FIN } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_wraps_and_ends() {
        let (mut from, mut to) = (SendFlow::new(4096), ReceiveFlow::new(4096));
        let mut total = 0;
        for count in [4096, 1, 1023, 4096, 7] {
            let mut left = count;
            while left > 0 {
                let (offset, fits) = from.piece();
                assert!(offset + fits <= 4096);
                let now = fits.min(left);
                from.wrote(now);
                to.update(from.word()).unwrap();
                left -= now;
                while to.waiting() > 0 {
                    let (_, piece) = to.piece();
                    if let Some(taken) = to.consume(piece.min(1000)) {
                        from.update(taken).unwrap();
                    }
                }
                from.update(to.report()).unwrap();
            }
            total += count;
        }
        from.close();
        assert_eq!((from.room(), from.word()), (0, total | FIN));
        assert!(!to.is_at_end());
        to.update(from.word()).unwrap();
        assert!(to.is_at_end());
    }

    #[test]
    fn consumption_is_reported_by_quarters() {
        let mut to = ReceiveFlow::new(4096);
        to.update(4096).unwrap();
        assert_eq!(to.consume(1023), None);
        assert_eq!(to.consume(1), Some(1024));
        assert_eq!(to.consume(1023), None);
        assert_eq!(to.consume(1023), Some(3070));
        assert_eq!(to.consume(u64::MAX), Some(4096), "clamped to the bytes waiting");
        let mut to = ReceiveFlow::from_window(1 << 20, Some(4096));
        to.update(4096).unwrap();
        assert_eq!(
            (to.consume(1000), to.consume(24)),
            (None, Some(1024)),
            "a quarter of the window"
        );
        let mut to = ReceiveFlow::from_window(4096, Some(1 << 20));
        to.update(4096).unwrap();
        assert_eq!((to.consume(1000), to.consume(24)), (None, Some(1024)));
    }

    #[test]
    fn impossible_counters_are_rejected() {
        let mut to = ReceiveFlow::new(4096);
        to.update(100).unwrap();
        for violation in [99, 4097, u64::MAX, FIN | 50] {
            to.update(violation).expect_err("impossible");
        }
        to.update(FIN | 200).unwrap();
        for violation in [200, FIN | 201, 100] {
            to.update(violation).expect_err("after the end");
        }
        assert_eq!(to.waiting(), 200);
        let mut from = SendFlow::new(4096);
        from.wrote(10);
        from.update(4).unwrap();
        for violation in [11, 3, u64::MAX, READ_CLOSED | 3, READ_CLOSED | 11] {
            from.update(violation).expect_err("impossible");
        }
        assert_eq!(from.room(), 4090);
        assert!(!from.is_read_closed());
        from.update(READ_CLOSED | 5).unwrap();
        assert!(from.is_read_closed());
        for violation in [5, 10, READ_CLOSED | 4] {
            from.update(violation).expect_err("after READ_CLOSED");
        }
    }
}
