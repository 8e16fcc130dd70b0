//! Counters of a queue pair.

/// Why a packet was discarded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum DiscardReason {
    /// Not accepted in the queue pair's state.
    State,
    /// Of another transport service, or neither a request nor a response.
    Service,
    /// Another partition key.
    Partition,
    /// A datagram with the wrong Q_Key.
    Qkey,
    /// A request that was executed before; it is acknowledged again.
    Duplicate,
    /// A duplicate read or atomic whose record no longer exists, or differs.
    NoRecord,
    /// A request beyond a missing one.
    Gap,
    /// A response to a request that is already acknowledged.
    StaleResponse,
    /// A response to a request that was never sent.
    UnexpectedResponse,
    /// A response beyond a missing one.
    ResponseGap,
    /// The last receive completion is still pending, or the host cannot place the data now.
    Busy,
    /// A datagram, or a message of an unreliable connection, without a posted receive.
    NoReceive,
    /// A datagram longer than the receive's buffers, or than the MTU; a packet of an unreliable
    /// connection whose length does not fit its message.
    Length,
    /// An RDMA write of an unreliable connection without the right to it.
    Access,
}

impl DiscardReason {
    /// Number of reasons.
    pub const COUNT: usize = 14;

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
        Self::Access,
    ];

    /// The name in reports.
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
            Self::Access => "access",
        }
    }
}

/// Counters of a queue pair since it was created.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct Stats {
    /// Packets sent, of all kinds.
    pub packets_sent: u64,
    /// Payload bytes sent.
    pub bytes_sent: u64,
    /// Packets received, of all kinds.
    pub packets_received: u64,
    /// Payload bytes received.
    pub bytes_received: u64,
    /// Requests retransmitted.
    pub resent: u64,
    /// With selective repeat: packets that were found lost before a timeout.
    pub lost: u64,
    /// With selective repeat: packets that arrived before an earlier one, and were kept.
    pub held: u64,
    /// Expiries of the retransmission timer.
    pub timeouts: u64,
    /// Sequence-error NAKs received.
    pub sequence_naks_received: u64,
    /// Sequence-error NAKs sent.
    pub sequence_naks_sent: u64,
    /// RNR NAKs received.
    pub rnr_received: u64,
    /// RNR NAKs sent.
    pub rnr_sent: u64,
    /// Missing responses detected by later ones.
    pub response_gaps: u64,
    /// Congestion notifications received.
    pub cnp_received: u64,
    /// Congestion notifications sent.
    pub cnp_sent: u64,
    /// Packets discarded, by reason; see [`Stats::dropped`].
    pub drops: [u64; DiscardReason::COUNT],
}

impl Stats {
    /// Packets discarded for this reason.
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
    fn all_lists_reasons_in_discriminant_order() {
        for (at, reason) in DiscardReason::ALL.into_iter().enumerate() {
            assert_eq!(reason as usize, at);
        }
    }
}
