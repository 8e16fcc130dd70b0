//! What a queue pair counts.

/// Why a packet was not acted upon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DiscardReason {
    /// The queue pair's state takes no such packet.
    State,
    /// Of another transport service, or an opcode that is no request and no answer.
    Service,
    /// Of another partition.
    Partition,
    /// A datagram with another queue key.
    Qkey,
    /// A request that was executed before; it is acknowledged again.
    Duplicate,
    /// A read or atomic that was executed before, and whose record is gone or differs.
    NoRecord,
    /// A request behind one that is missing.
    Gap,
    /// An answer to something that is answered already.
    StaleResponse,
    /// An answer to something that was never asked.
    UnexpectedResponse,
    /// An answer behind one that is missing.
    ResponseGap,
    /// The host has not taken the last receipt yet, or has no place for the data now.
    Busy,
    /// A datagram, and no receive for it.
    NoReceive,
    /// A datagram longer than the receive's buffers, or than the MTU.
    Length,
}

impl DiscardReason {
    /// How many reasons there are.
    pub const COUNT: usize = 13;

    /// All reasons, in the order in which [`Stats::drops`] counts them.
    pub const ALL: [Self; Self::COUNT] = [
        Self::State,
        Self::Service,
        Self::Partition,
        Self::Qkey,
        Self::Duplicate,
        Self::NoRecord,
        Self::Gap,
        Self::StaleResponse,
        Self::UnexpectedResponse,
        Self::ResponseGap,
        Self::Busy,
        Self::NoReceive,
        Self::Length,
    ];

    /// Its name in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::State => "state",
            Self::Service => "service",
            Self::Partition => "partition",
            Self::Qkey => "qkey",
            Self::Duplicate => "duplicate",
            Self::NoRecord => "forgotten",
            Self::Gap => "gap",
            Self::StaleResponse => "stale",
            Self::UnexpectedResponse => "ghost",
            Self::ResponseGap => "response-gap",
            Self::Busy => "busy",
            Self::NoReceive => "no-receive",
            Self::Length => "length",
        }
    }
}

/// What a queue pair has counted since it was made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Stats {
    /// Packets sent, of all sorts.
    pub packets_sent: u64,
    /// Payload bytes sent.
    pub bytes_sent: u64,
    /// Packets received, of all sorts.
    pub packets_received: u64,
    /// Payload bytes received.
    pub bytes_received: u64,
    /// Requests sent again.
    pub resent: u64,
    /// Times that no answer came.
    pub timeouts: u64,
    /// Sequence errors that the peer told us of.
    pub sequence_naks_received: u64,
    /// Sequence errors that we told the peer of.
    pub sequence_naks_sent: u64,
    /// Times that the peer was not ready.
    pub rnr_received: u64,
    /// Times that we were not ready.
    pub rnr_sent: u64,
    /// Answers found missing by the answers behind them.
    pub response_gaps: u64,
    /// Congestion notifications received.
    pub cnp_received: u64,
    /// Congestion notifications sent.
    pub cnp_sent: u64,
    /// Packets not acted upon, by reason; see [`Stats::dropped`].
    pub drops: [u64; DiscardReason::COUNT],
}

impl Stats {
    /// How many packets were dropped for that reason.
    pub fn dropped(&self, reason: DiscardReason) -> u64 {
        self.drops[reason as usize]
    }

    #[cold]
    pub(super) fn count(&mut self, reason: DiscardReason) {
        self.drops[reason as usize] += 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_reason_has_its_place() {
        for (at, reason) in DiscardReason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, at);
        }
    }
}
