//! Counters of a device and of its engines.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::{Deserialize, Serialize};
use warpwire_proto::qp;

/// Why the engine dropped a packet, before it reached a queue pair or after it left one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropReason {
    /// Not a valid packet.
    Malformed,
    /// Addressed to a queue pair that does not exist.
    NoQueuePair,
    /// Not from the peer of its queue pair.
    WrongPeer,
    /// The link has closed the flow to the peer.
    NoFlow,
    /// Longer than the link's maximum packet.
    TooLong,
    /// The memory of the payload was deregistered in between.
    MemoryGone,
    /// A datagram, while the peer's queue on the link is full.
    NoRoom,
}

impl DropReason {
    /// All reasons with their names, in counting order.
    pub const ALL: [(Self, &'static str); 7] = [
        (Self::Malformed, "malformed"),
        (Self::NoQueuePair, "no-queue-pair"),
        (Self::WrongPeer, "stranger"),
        (Self::NoFlow, "no-flow"),
        (Self::TooLong, "too-long"),
        (Self::MemoryGone, "memory-gone"),
        (Self::NoRoom, "no-room"),
    ];
}

/// Why a write, a read or an atomic was sent as packets although the peer's process is on this
/// machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndirectReason {
    /// The peer exports no memory, or not yet.
    NoExports,
    /// The peer's queue pair does not accept our requests, or not yet.
    QpNotReady,
    /// The key cannot be mapped: another kind of memory, or an invalid key.
    KeyNotExported,
    /// The mapping was requested; later operations use it.
    MappingRequested,
    /// Access flags, protection domain or bounds forbid it; the protocol reports that on both
    /// sides.
    AccessDenied,
    /// Earlier work of the queue pair was still in flight.
    Outstanding,
    /// The local memory is of another kind than the peer's, or the WQE names it wrongly.
    LocalMemory,
    /// The owner revoked the memory or the queue pair.
    Revoked,
    /// A short operation, or an atomic, on memory that the GPU or the kernel would copy.
    Small,
}

impl IndirectReason {
    /// All reasons with their names, in counting order.
    pub const ALL: [(Self, &'static str); 9] = [
        (Self::NoExports, "no-exports"),
        (Self::QpNotReady, "qp-not-ready"),
        (Self::KeyNotExported, "key-not-exported"),
        (Self::MappingRequested, "mapping-requested"),
        (Self::AccessDenied, "access-denied"),
        (Self::Outstanding, "outstanding"),
        (Self::LocalMemory, "local-memory"),
        (Self::Revoked, "revoked"),
        (Self::Small, "small"),
    ];

    /// Its name in [`DirectStats::not`].
    pub fn name(self) -> &'static str {
        Self::ALL[self as usize].1
    }
}

/// Direct access: operations without packets in memory of other processes on this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectStats {
    /// Writes, reads and atomics executed directly.
    pub operations: u64,
    /// Bytes of these operations.
    pub bytes: u64,
    /// Direct accesses by peers to our memory; a long operation counts once per quantum.
    pub by_peers: u64,
    /// Bytes of these accesses.
    pub bytes_by_peers: u64,
    /// Operations sent as packets to a peer on this machine, by [`IndirectReason`] name; only
    /// nonzero counts.
    pub not: BTreeMap<String, u64>,
}

impl DirectStats {
    fn add(&mut self, other: &Self) {
        self.operations += other.operations;
        self.bytes += other.bytes;
        self.by_peers += other.by_peers;
        self.bytes_by_peers += other.bytes_by_peers;
        for (name, count) in &other.not {
            *self.not.entry(name.clone()).or_default() += count;
        }
    }
}

/// Counters of the engine outside its queue pairs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub packets_received: u64,
    pub completions: u64,
    pub steps: u64,
    pub direct_operations: u64,
    pub direct_bytes: u64,
    indirect: [u64; IndirectReason::ALL.len()],
    dropped: [u64; DropReason::ALL.len()],
    /// Of destroyed queue pairs.
    removed_qps: QpTotals,
}

/// Counters summed over all queue pairs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpTotals {
    /// Packets sent.
    pub packets_sent: u64,
    /// Payload bytes sent.
    pub bytes_sent: u64,
    /// Packets received.
    pub packets_received: u64,
    /// Payload bytes received.
    pub bytes_received: u64,
    /// Requests retransmitted.
    pub resent: u64,
    /// Expiries of the retransmission timer.
    pub timeouts: u64,
    /// Sequence-error NAKs, sent and received.
    pub sequence_errors: u64,
    /// RNR NAKs, sent and received.
    pub rnr_naks: u64,
    /// Packets that queue pairs discarded.
    pub discarded: u64,
}

impl QpTotals {
    fn add_totals(&mut self, other: &Self) {
        self.packets_sent += other.packets_sent;
        self.bytes_sent += other.bytes_sent;
        self.packets_received += other.packets_received;
        self.bytes_received += other.bytes_received;
        self.resent += other.resent;
        self.timeouts += other.timeouts;
        self.sequence_errors += other.sequence_errors;
        self.rnr_naks += other.rnr_naks;
        self.discarded += other.discarded;
    }

    pub(super) fn add(&mut self, stats: &qp::Stats) {
        self.packets_sent += stats.packets_sent;
        self.bytes_sent += stats.bytes_sent;
        self.packets_received += stats.packets_received;
        self.bytes_received += stats.bytes_received;
        self.resent += stats.resent;
        self.timeouts += stats.timeouts;
        self.sequence_errors += stats.sequence_naks_sent + stats.sequence_naks_received;
        self.rnr_naks += stats.rnr_sent + stats.rnr_received;
        self.discarded += stats.drops.iter().sum::<u64>();
    }
}

impl Totals {
    #[cold]
    pub(super) fn count_drop(&mut self, reason: DropReason) {
        self.dropped[reason as usize] += 1;
    }

    pub(super) fn count_indirect(&mut self, why: IndirectReason) {
        self.indirect[why as usize] += 1;
    }

    pub(super) fn direct(&self) -> DirectStats {
        let counts = IndirectReason::ALL.map(|(why, name)| (name, self.indirect[why as usize]));
        let not = counts.into_iter().filter(|(_, count)| *count > 0);
        DirectStats {
            operations: self.direct_operations,
            bytes: self.direct_bytes,
            not: not.map(|(name, count)| (name.to_owned(), count)).collect(),
            ..DirectStats::default()
        }
    }

    /// Adds the counters of a queue pair that is destroyed.
    pub(super) fn absorb(&mut self, stats: &qp::Stats) {
        self.removed_qps.add(stats);
    }
}

/// Counters of a software HCA since it was opened.
///
/// ```
/// use warpwire::hca::{Hca, HcaOptions};
/// use warpwire::link::Hub;
/// let hub = Hub::new();
/// let hca = Hca::open(hub.endpoint("10.0.0.1:4791".parse().unwrap())?, HcaOptions::default())?;
/// assert_eq!(hca.stats().pairs.packets_sent, 0);
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone, Debug, Serialize)]
pub struct HcaStats {
    /// All queue pairs together, including destroyed ones.
    pub pairs: QpTotals,
    /// Number of existing queue pairs.
    pub queue_pairs: usize,
    /// Direct access.
    pub direct: DirectStats,
    /// CQEs written.
    pub completions: u64,
    /// Steps of the engines.
    pub steps: u64,
    /// Packets dropped outside queue pairs, by [`DropReason`] name.
    pub dropped: Vec<(&'static str, u64)>,
    /// Packets that queue pairs discarded, by reason.
    pub discarded: Vec<(&'static str, u64)>,
    /// The part of each engine.
    pub engines: Vec<EngineStats>,
}

/// Counters of one engine of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct EngineStats {
    /// The address of its socket: what peers send to.
    pub local: SocketAddr,
    /// Number of existing queue pairs.
    pub queue_pairs: usize,
    /// Its queue pairs together, including destroyed ones.
    pub pairs: QpTotals,
    /// CQEs written.
    pub completions: u64,
    /// Steps.
    pub steps: u64,
}

/// Counters of one queue pair.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QpStats {
    /// Its number.
    pub qpn: u32,
    /// Its transport service: RC, UC or UD.
    pub service: String,
    /// Its state, as in RTS.
    pub state: String,
    /// Its counters since it was created.
    pub totals: QpTotals,
}

impl QpStats {
    pub(super) fn of(qp: &super::protocol::Protocol) -> Self {
        let service = match qp.service() {
            qp::Service::Rc => "RC",
            qp::Service::Uc => "UC",
            qp::Service::Ud => "UD",
        };
        let mut totals = QpTotals::default();
        totals.add(qp.stats());
        Self {
            qpn: qp.number(),
            service: service.to_owned(),
            state: qp.state().to_string(),
            totals,
        }
    }
}

impl HcaStats {
    /// Of one engine, at `local`.
    pub(super) fn of<'a>(
        local: SocketAddr,
        totals: &Totals,
        pairs: impl Iterator<Item = &'a qp::Stats>,
    ) -> Self {
        let (mut sum, mut count) = (totals.removed_qps, 0);
        let mut drops = [0; qp::DiscardReason::COUNT];
        for stats in pairs {
            sum.add(stats);
            count += 1;
            drops.iter_mut().zip(stats.drops).for_each(|(sum, more)| *sum += more);
        }
        let named =
            |(reason, name): (DropReason, &'static str)| (name, totals.dropped[reason as usize]);
        let reasons = qp::DiscardReason::ALL.map(qp::DiscardReason::name);
        let Totals { completions, steps, .. } = *totals;
        Self {
            pairs: sum,
            queue_pairs: count,
            direct: totals.direct(),
            completions,
            steps,
            dropped: DropReason::ALL.into_iter().map(named).collect(),
            discarded: reasons.into_iter().zip(drops).collect(),
            engines: vec![EngineStats {
                local,
                queue_pairs: count,
                pairs: sum,
                completions,
                steps,
            }],
        }
    }

    /// Adds another engine of the device.
    pub(super) fn add_engine(&mut self, other: Self) {
        self.pairs.add_totals(&other.pairs);
        self.queue_pairs += other.queue_pairs;
        self.direct.add(&other.direct);
        self.completions += other.completions;
        self.steps += other.steps;
        let drops = [(&mut self.dropped, other.dropped), (&mut self.discarded, other.discarded)];
        for (sum, more) in drops {
            // Both list all reasons, in the same order.
            sum.iter_mut().zip(more).for_each(|((_, sum), (_, more))| *sum += more);
        }
        self.engines.extend(other.engines);
    }
}
