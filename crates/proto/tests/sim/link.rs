//! A simulated link between two nodes.

use crate::sim::random::Random;
use core::time::Duration;
use warpwire_proto::Instant;

/// Faults of a link; probabilities per mille.
#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    pub loss: u32,
    pub duplicate: u32,
    pub reorder: u32,
    pub corrupt: u32,
    pub truncate: u32,
    pub mark: u32,
    pub delay: Duration,
    /// Maximum random extra delay; does not change the order.
    pub jitter: Duration,
    /// Bytes per second; 0 for no limit.
    pub bandwidth: u64,
    /// Longer packets are lost, as in a network with a smaller MTU.
    pub max_packet: usize,
}

impl Faults {
    pub fn is_clean(&self) -> bool {
        self.loss_per_mille() + self.duplicate + self.reorder == 0
    }

    pub fn loss_per_mille(&self) -> u32 {
        self.loss + self.corrupt + self.truncate
    }
}

/// One direction between two nodes.
#[derive(Clone, Debug, Default)]
pub struct Link {
    pub faults: Faults,
    pub cut: bool,
    free_at: Instant,
    last_arrival: Instant,
}

/// A packet that will arrive.
pub struct Arrival {
    pub at: Instant,
    pub bytes: Vec<u8>,
    pub marked: bool,
}

impl Link {
    pub fn new(faults: Faults) -> Self {
        Self { faults, ..Self::default() }
    }

    /// Sends a packet; none, one or two copies arrive.
    pub fn carry(&mut self, now: Instant, bytes: &[u8], random: &mut Random) -> Vec<Arrival> {
        let faults = self.faults;
        let mut arrivals = Vec::with_capacity(1);
        let too_long = faults.max_packet > 0 && bytes.len() > faults.max_packet;
        if self.cut || too_long || random.chance(faults.loss) {
            return arrivals;
        }
        if let Some(nanos) = (bytes.len() as u64 * 1_000_000_000).checked_div(faults.bandwidth) {
            self.free_at = self.free_at.max(now) + Duration::from_nanos(nanos);
        }
        let copies = if random.chance(faults.duplicate) { 2 } else { 1 };
        for _ in 0..copies {
            let jitter = Duration::from_nanos(random.below(faults.jitter.as_nanos() as u64 + 1));
            let mut at = self.free_at.max(now) + faults.delay + jitter;
            if random.chance(faults.reorder) {
                // Delayed, so that later packets overtake it.
                at = at + Duration::from_nanos(random.between(1, 50_000));
            } else {
                at = at.max(self.last_arrival);
                self.last_arrival = at;
            }
            let mut bytes = bytes.to_vec();
            if random.chance(faults.corrupt) {
                for _ in 0..random.between(1, 3) {
                    let bit = random.below(bytes.len() as u64 * 8) as usize;
                    bytes[bit / 8] ^= 1 << (bit % 8);
                }
            }
            if random.chance(faults.truncate) {
                bytes.truncate(random.below(bytes.len() as u64) as usize);
            }
            arrivals.push(Arrival { at, bytes, marked: random.chance(faults.mark) });
        }
        arrivals
    }
}
