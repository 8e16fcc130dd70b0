//! The counters of a connection: who may write how much, who has taken what, and whether the peer tells the truth.

use crate::error::{Error, Kind, Result};

/// The top bit of the landing word `received`: the stream has ended, and the other bits are its whole length.
pub const FIN: u64 = 1 << 63;

/// The top bit of the landing word `taken`: the receiver has shut down, and reads no more.
pub const READ_CLOSED: u64 = 1 << 63;

/// What comes: our ring, and what the peer says of it.
#[derive(Clone, Copy, Debug)]
pub struct ReceiveFlow {
    size: u64,
    received: u64,
    consumed: u64,
    reported: u64,
    /// So much that the peer does not know of is told.
    report_at: u64,
    ended: bool,
}

impl ReceiveFlow {
    /// Nothing has come into a ring of that size, a power of two.
    pub fn new(size: u64) -> Self {
        Self { size, received: 0, consumed: 0, reported: 0, report_at: size / 4, ended: false }
    }

    /// The same, from a peer that never has more than so much on its way or unread: it is told earlier.
    pub fn from_window(size: u64, window: Option<u64>) -> Self {
        let report_at = (window.unwrap_or(size).min(size) / 4).max(1);
        Self { report_at, ..Self::new(size) }
    }

    /// Hears the landing word `received`.
    ///
    /// # Errors
    /// [`Kind::Malformed`] if the peer lies: it claims more than the ring holds, takes something back, or goes on after the
    /// end. The connection must be reset.
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

    /// How many bytes wait in the ring.
    #[inline]
    pub fn waiting(&self) -> u64 {
        self.received - self.consumed
    }

    /// Whether everything has been read, and no more will come.
    #[inline]
    pub fn is_at_end(&self) -> bool {
        self.ended && self.waiting() == 0
    }

    /// Whether the peer has said that no more will come.
    #[inline]
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Where the first waiting byte lies in the ring, and how many lie there in one piece.
    #[inline]
    pub fn piece(&self) -> (u64, u64) {
        let offset = self.consumed & (self.size - 1);
        (offset, self.waiting().min(self.size - offset))
    }

    /// So many bytes, of those that wait, were read. Returns what to write to the peer's word `taken`, if it is time: when
    /// a quarter of the ring, or of what the peer can use of it, is free that the peer does not know of.
    #[inline]
    pub fn consume(&mut self, count: u64) -> Option<u64> {
        self.consumed += count.min(self.waiting());
        let is_time = self.consumed - self.reported >= self.report_at && !self.ended;
        is_time.then(|| self.report())
    }

    /// What to write to the peer's word `taken` now, time or not.
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
                "the peer claims {word:#x}, with {received} bytes told (ended: {ended}), {consumed} read, and a ring of {size}"
            ))
            .fix("look for the fault in the peer; the connection is reset")
    }
}

/// What goes: the peer's ring, and what it says of it.
#[derive(Clone, Copy, Debug)]
pub struct SendFlow {
    size: u64,
    sent: u64,
    taken: u64,
    ended: bool,
    read_closed: bool,
}

impl SendFlow {
    /// Nothing has been written into the peer's ring of that size, a power of two.
    pub fn new(size: u64) -> Self {
        Self { size, sent: 0, taken: 0, ended: false, read_closed: false }
    }

    /// Hears the landing word `taken`.
    ///
    /// # Errors
    /// [`Kind::Malformed`] if the peer lies: it claims to have taken more than was sent, or less than before, or to read again.
    #[inline]
    pub fn update(&mut self, word: u64) -> Result<()> {
        let (count, read_closed) = (word & !READ_CLOSED, word & READ_CLOSED != 0);
        if count < self.taken || count > self.sent || self.read_closed && !read_closed {
            let Self { sent, taken, .. } = self;
            let why = format!("the peer claims to have read {word:#x} of {sent}, after {taken}");
            return Err(Error::new(Kind::Malformed, "send")
                .why(why)
                .fix("look for the fault in the peer; the connection is reset"));
        }
        (self.taken, self.read_closed) = (count, read_closed);
        Ok(())
    }

    /// Whether the peer reads no more.
    #[inline]
    pub fn is_read_closed(&self) -> bool {
        self.read_closed
    }

    /// How many bytes the peer's ring has room for.
    #[inline]
    pub fn room(&self) -> u64 {
        if self.ended { 0 } else { self.size - (self.sent - self.taken) }
    }

    /// Where the next byte goes in the peer's ring, and how many fit there in one piece.
    #[inline]
    pub fn piece(&self) -> (u64, u64) {
        let offset = self.sent & (self.size - 1);
        (offset, self.room().min(self.size - offset))
    }

    /// So many bytes, of those that fit, were written.
    #[inline]
    pub fn wrote(&mut self, count: u64) {
        self.sent += count.min(self.room());
    }

    /// No more will be sent.
    pub fn close(&mut self) {
        self.ended = true;
    }

    /// Whether that was said.
    pub fn has_ended(&self) -> bool {
        self.ended
    }

    /// Bytes ever written.
    pub fn sent(&self) -> u64 {
        self.sent
    }

    /// What the peer's word `received` must say now.
    #[inline]
    pub fn word(&self) -> u64 {
        self.sent | if self.ended { FIN } else { 0 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_goes_around_and_ends() {
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
    fn consumption_is_told_a_quarter_at_a_time() {
        let mut to = ReceiveFlow::new(4096);
        to.update(4096).unwrap();
        assert_eq!(to.consume(1023), None);
        assert_eq!(to.consume(1), Some(1024));
        assert_eq!(to.consume(1023), None);
        assert_eq!(to.consume(1023), Some(3070));
        assert_eq!(to.consume(u64::MAX), Some(4096), "no more than there is");
        let mut to = ReceiveFlow::from_window(1 << 20, Some(4096));
        to.update(4096).unwrap();
        assert_eq!(
            (to.consume(1000), to.consume(24)),
            (None, Some(1024)),
            "a quarter of what it uses"
        );
        let mut to = ReceiveFlow::from_window(4096, Some(1 << 20));
        to.update(4096).unwrap();
        assert_eq!((to.consume(1000), to.consume(24)), (None, Some(1024)));
    }

    #[test]
    fn peers_that_lie_are_caught() {
        let mut to = ReceiveFlow::new(4096);
        to.update(100).unwrap();
        for violation in [99, 4097, u64::MAX, FIN | 50] {
            to.update(violation).expect_err("a lie");
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
            from.update(violation).expect_err("a lie");
        }
        assert_eq!(from.room(), 4090);
        assert!(!from.is_read_closed());
        from.update(READ_CLOSED | 5).unwrap();
        assert!(from.is_read_closed());
        for violation in [5, 10, READ_CLOSED | 4] {
            from.update(violation).expect_err("after it went deaf");
        }
    }
}
