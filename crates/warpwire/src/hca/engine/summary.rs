//! What a step of the engine did.

use std::ops::Add;

/// What a step did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepSummary {
    /// Packets received.
    pub received: usize,
    /// Packets sent.
    pub sent: usize,
    /// Operations executed without packets.
    pub direct: usize,
    /// Work is left that can be done immediately.
    pub more: bool,
    /// Packets are left, but their peers have no room for them.
    pub is_full: bool,
}

impl Add for StepSummary {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            received: self.received + other.received,
            sent: self.sent + other.sent,
            direct: self.direct + other.direct,
            more: self.more || other.more,
            is_full: self.is_full || other.is_full,
        }
    }
}

impl StepSummary {
    /// Whether it did nothing, and no work is left.
    pub fn is_idle(&self) -> bool {
        self.is_waiting() && !self.is_full
    }

    /// Whether it did nothing, and all work that is left waits for a peer.
    pub fn is_waiting(&self) -> bool {
        self.received == 0 && self.sent == 0 && self.direct == 0 && !self.more
    }
}
