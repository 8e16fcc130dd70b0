//! What an engine counts.

use serde::{Deserialize, Serialize};
use warpwire_proto::qp;

/// Why a packet was lost before it reached a queue pair, or after it left one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lost {
    /// Not a packet.
    Malformed,
    /// For a queue pair that does not exist.
    NoQueuePair,
    /// Not from the peer of its queue pair.
    Stranger,
    /// The link takes no packets for that peer any more.
    NoFlow,
    /// Longer than the link carries.
    TooLong,
    /// Its memory went away in between.
    MemoryGone,
    /// A datagram for a peer that takes no packets.
    NoRoom,
}

impl Lost {
    /// All of them, in the order in which they are counted.
    pub const ALL: [(Self, &'static str); 7] = [
        (Self::Malformed, "malformed"),
        (Self::NoQueuePair, "no-queue-pair"),
        (Self::Stranger, "stranger"),
        (Self::NoFlow, "no-flow"),
        (Self::TooLong, "too-long"),
        (Self::MemoryGone, "memory-gone"),
        (Self::NoRoom, "no-room"),
    ];
}

/// What the engine has counted beside its queue pairs.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Totals {
    pub packets_received: u64,
    pub completions: u64,
    pub steps: u64,
    lost: [u64; Lost::ALL.len()],
    /// Of queue pairs that are gone.
    past: Sum,
}

/// The counts of all queue pairs together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Sum {
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

impl Sum {
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
    pub(super) fn lose(&mut self, reason: Lost) {
        self.lost[reason as usize] += 1;
    }

    /// Keeps the counts of a queue pair that goes.
    pub(super) fn absorb(&mut self, stats: &qp::Stats) {
        self.past.add(stats);
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
    pub pairs: Sum,
    /// How many queue pairs there are.
    pub queue_pairs: usize,
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
        let (mut sum, mut count) = (totals.past, 0);
        let mut drops = [0; qp::Discard::COUNT];
        for stats in pairs {
            sum.add(stats);
            count += 1;
            drops.iter_mut().zip(stats.drops).for_each(|(sum, more)| *sum += more);
        }
        let named = |(reason, name): (Lost, &'static str)| (name, totals.lost[reason as usize]);
        let reasons = qp::Discard::ALL.map(qp::Discard::name);
        Self {
            pairs: sum,
            queue_pairs: count,
            completions: totals.completions,
            steps: totals.steps,
            lost: Lost::ALL.into_iter().map(named).collect(),
            discarded: reasons.into_iter().zip(drops).collect(),
        }
    }
}
