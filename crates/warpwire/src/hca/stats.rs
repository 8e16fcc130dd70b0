//! What an engine counts.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use warpwire_proto::qp;

/// Why a packet was lost before it reached a queue pair, or after it left one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DropReason {
    /// Not a packet.
    Malformed,
    /// For a queue pair that does not exist.
    NoQueuePair,
    /// Not from the peer of its queue pair.
    WrongPeer,
    /// The link takes no packets for that peer any more.
    NoFlow,
    /// Longer than the link carries.
    TooLong,
    /// Its memory went away in between.
    MemoryGone,
    /// A datagram for a peer that takes no packets.
    NoRoom,
}

impl DropReason {
    /// All of them, in the order in which they are counted.
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

/// Why a write, a read or an atomic went by packets although the peer's process is on this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IndirectReason {
    /// The peer has offered no memory, or not yet.
    NoExports,
    /// The peer's queue pair takes no requests of ours, or not yet.
    QpNotReady,
    /// The key is not one that can be mapped: another sort of memory, or no key at all.
    KeyNotExported,
    /// The memory was asked for, and is used as soon as it is mapped.
    MappingRequested,
    /// Rights, domain or bounds forbid it; the protocol says so on both sides.
    AccessDenied,
    /// Other work of the queue pair was under way.
    Outstanding,
    /// Our own memory is not the host's, or the work names it wrongly.
    LocalMemory,
    /// The owner took the memory, or the queue pair, back.
    Revoked,
}

impl IndirectReason {
    /// All of them, in the order in which they are counted.
    pub const ALL: [(Self, &'static str); 8] = [
        (Self::NoExports, "nothing-offered"),
        (Self::QpNotReady, "pair-not-open"),
        (Self::KeyNotExported, "key-not-granted"),
        (Self::MappingRequested, "key-asked-for"),
        (Self::AccessDenied, "not-allowed"),
        (Self::Outstanding, "outstanding"),
        (Self::LocalMemory, "local-memory"),
        (Self::Revoked, "taken-back"),
    ];
}

/// Operations without packets, in memory of other processes of this machine.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DirectStats {
    /// Writes, reads and atomics done so.
    pub operations: u64,
    /// Their bytes.
    pub bytes: u64,
    /// What peers did so in our memory: a long operation is several.
    pub by_peers: u64,
    /// Their bytes.
    pub bytes_by_peers: u64,
    /// Those that went by packets to a peer of this machine, by reason. None is left out that is not zero.
    pub not: BTreeMap<String, u64>,
}

/// What the engine has counted beside its queue pairs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub packets_received: u64,
    pub completions: u64,
    pub steps: u64,
    pub direct_operations: u64,
    pub direct_bytes: u64,
    indirect: [u64; IndirectReason::ALL.len()],
    lost: [u64; DropReason::ALL.len()],
    /// Of queue pairs that are gone.
    removed_qps: QpTotals,
}

/// The counts of all queue pairs together.
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
    /// Requests sent again.
    pub resent: u64,
    /// Times that no answer came.
    pub timeouts: u64,
    /// Sequence errors told to peers, and told by them.
    pub sequence_errors: u64,
    /// Times that a receiver was not ready, on either side.
    pub not_ready: u64,
    /// Packets that queue pairs did not act upon.
    pub discarded: u64,
}

impl QpTotals {
    pub(super) fn add(&mut self, stats: &qp::Stats) {
        self.packets_sent += stats.packets_sent;
        self.bytes_sent += stats.bytes_sent;
        self.packets_received += stats.packets_received;
        self.bytes_received += stats.bytes_received;
        self.resent += stats.resent;
        self.timeouts += stats.timeouts;
        self.sequence_errors += stats.sequence_naks_sent + stats.sequence_naks_received;
        self.not_ready += stats.rnr_sent + stats.rnr_received;
        self.discarded += stats.drops.iter().sum::<u64>();
    }
}

impl Totals {
    #[cold]
    pub(super) fn count_drop(&mut self, reason: DropReason) {
        self.lost[reason as usize] += 1;
    }

    /// An operation needs packets.
    pub(super) fn count_indirect(&mut self, why: IndirectReason) {
        self.indirect[why as usize] += 1;
    }

    /// Operations without packets.
    pub(super) fn direct(&self) -> DirectStats {
        let named =
            IndirectReason::ALL.into_iter().map(|(why, name)| (name, self.indirect[why as usize]));
        let not = named.filter(|(_, count)| *count > 0);
        DirectStats {
            operations: self.direct_operations,
            bytes: self.direct_bytes,
            not: not.map(|(name, count)| (name.to_owned(), count)).collect(),
            ..DirectStats::default()
        }
    }

    /// Keeps the counts of a queue pair that goes.
    pub(super) fn absorb(&mut self, stats: &qp::Stats) {
        self.removed_qps.add(stats);
    }
}

/// What a software HCA has counted since it was opened.
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
pub struct Stats {
    /// All queue pairs together, those that are gone too.
    pub pairs: QpTotals,
    /// How many queue pairs there are.
    pub queue_pairs: usize,
    /// Operations without packets.
    pub direct: DirectStats,
    /// Completions written.
    pub completions: u64,
    /// Steps of the engine.
    pub steps: u64,
    /// Packets lost outside queue pairs, by reason.
    pub lost: Vec<(&'static str, u64)>,
    /// Packets that queue pairs did not act upon, by reason.
    pub discarded: Vec<(&'static str, u64)>,
}

impl Stats {
    pub(super) fn of<'a>(totals: &Totals, pairs: impl Iterator<Item = &'a qp::Stats>) -> Self {
        let (mut sum, mut count) = (totals.removed_qps, 0);
        let mut drops = [0; qp::DiscardReason::COUNT];
        for stats in pairs {
            sum.add(stats);
            count += 1;
            drops.iter_mut().zip(stats.drops).for_each(|(sum, more)| *sum += more);
        }
        let named =
            |(reason, name): (DropReason, &'static str)| (name, totals.lost[reason as usize]);
        let reasons = qp::DiscardReason::ALL.map(qp::DiscardReason::name);
        Self {
            pairs: sum,
            queue_pairs: count,
            direct: totals.direct(),
            completions: totals.completions,
            steps: totals.steps,
            lost: DropReason::ALL.into_iter().map(named).collect(),
            discarded: reasons.into_iter().zip(drops).collect(),
        }
    }
}
