//! The two rings of a socket and their counters.

/// A ring: its offset in the arena and its size, 0 if none is allocated.
pub(in crate::sock) type Ring = (u64, u64);

/// The rings of a socket. A listener has a receive ring only, of records.
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::sock) struct Rings {
    pub(in crate::sock) receive: Ring,
    pub(in crate::sock) send: Ring,
    /// Total bytes put into the receive ring, and taken from it by kernels.
    pub(in crate::sock) received: u64,
    pub(in crate::sock) consumed: u64,
    /// Total bytes put into the send ring by kernels, and taken from it.
    pub(in crate::sock) sent: u64,
    pub(in crate::sock) taken: u64,
}

impl Rings {
    pub(in crate::sock) fn new(receive: Ring, send: Ring) -> Self {
        Self { receive, send, ..Self::default() }
    }

    pub(in crate::sock) fn is_allocated(&self) -> bool {
        self.receive.1 != 0
    }

    /// Bytes in the send ring that are not sent yet.
    pub(in crate::sock) fn unsent(&self) -> u64 {
        self.sent - self.taken
    }

    /// Free bytes of the receive ring.
    pub(in crate::sock) fn room(&self) -> u64 {
        self.receive.1 - (self.received - self.consumed)
    }

    /// Whether the device counters are those that were last taken over.
    #[inline]
    pub(in crate::sock) fn is_current(&self, word: u64) -> bool {
        word as u32 == self.sent as u32 && (word >> 32) as u32 == self.consumed as u32
    }

    /// Takes over the device counters, the lower 32 bits of each. False if they are impossible:
    /// more was sent than the ring holds, or more consumed than received, or something was sent
    /// although the socket may not send. A stream that was never connected may not: its ring may
    /// still be replaced by a smaller one.
    pub(in crate::sock) fn update(&mut self, word: u64, may_send: bool) -> bool {
        let sent = advance(self.sent, word as u32);
        let consumed = advance(self.consumed, (word >> 32) as u32);
        if sent - self.taken > self.send.1
            || consumed > self.received
            || sent != self.sent && !may_send
        {
            return false;
        }
        (self.sent, self.consumed) = (sent, consumed);
        true
    }
}

/// The 64-bit counter after `before` whose lower half is `low`.
fn advance(before: u64, low: u32) -> u64 {
    before + u64::from(low.wrapping_sub(before as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_pass_32_bits() {
        assert_eq!(advance(0xffff_fff0, 0x10), 0x1_0000_0010);
        assert_eq!(advance(5, 5), 5);
    }

    #[test]
    fn impossible_counters_are_rejected() {
        let mut rings = Rings::new((0, 4096), (0, 4096));
        assert!(!rings.update(1, false), "sent before it was connected");
        rings.received = 10;
        assert!(rings.update(10 << 32 | 4096, true));
        assert_eq!((rings.sent, rings.consumed), (4096, 10));
        assert!(!rings.update(10 << 32 | 4097, true), "more sent than the ring holds");
        assert!(!rings.update(11 << 32 | 4096, true), "more consumed than received");
        assert!(
            !rings.update(9 << 32 | 4096, true),
            "a smaller value means that the counter has wrapped"
        );
        assert_eq!((rings.sent, rings.consumed), (4096, 10));
    }
}
