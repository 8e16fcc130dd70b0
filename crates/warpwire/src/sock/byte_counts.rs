//! Bytes of the family `warp`, which pass the host by: what kernels say when they close, and until then what stands on
//! their desks.
//!
//! 1. A connection is written down when it stands, and crossed out when its kernel closes it, or when it goes unseen.
//! 2. While it is written down its desk is asked, if that is this connection's; else what was seen last counts. So the sums
//!    never go back, and what an earlier user of the desk has left is not counted.

use parking_lot::Mutex;

use super::layout::device_state;

/// Bytes that kernels have sent, and that they have read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct ByteCounts {
    pub(super) sent: u64,
    pub(super) received: u64,
}

impl ByteCounts {
    fn add(&mut self, more: Self) {
        self.sent = self.sent.saturating_add(more.sent);
        self.received = self.received.saturating_add(more.received);
    }
}

/// A connection that stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct LiveConn {
    index: u16,
    generation: u16,
    last_seen: ByteCounts,
}

#[derive(Debug, Default)]
struct Totals {
    closed: ByteCounts,
    live: Vec<LiveConn>,
}

/// The sums, for the thread that serves and for whoever asks.
#[derive(Debug, Default)]
pub(super) struct WarpByteCounts(Mutex<Totals>);

impl WarpByteCounts {
    /// A connection stands.
    pub(super) fn open(&self, index: u16, generation: u16) {
        let last_seen = ByteCounts::default();
        self.0.lock().live.push(LiveConn { index, generation, last_seen });
    }

    /// Its kernel has closed it, and says how much went; or it goes, and what was seen last counts.
    pub(super) fn close(&self, index: u16, generation: u16, final_counts: Option<ByteCounts>) {
        let mut totals = self.0.lock();
        let is_it = |one: &LiveConn| (one.index, one.generation) == (index, generation);
        let Some(at) = totals.live.iter().position(is_it) else { return };
        let one = totals.live.swap_remove(at);
        totals.closed.add(final_counts.unwrap_or(one.last_seen));
    }

    /// All bytes so far. `device_states` reads so many desks, from the first on, if there is a connection; where it cannot, what was
    /// seen last counts.
    pub(super) fn count(&self, device_states: impl FnOnce(usize) -> Vec<u8>) -> ByteCounts {
        let mut totals = self.0.lock();
        let Some(last) = totals.live.iter().map(|one| one.index).max() else {
            return totals.closed;
        };
        let lines = device_states(usize::from(last) + 1);
        let mut all = totals.closed;
        for one in &mut totals.live {
            let at = usize::from(one.index) * device_state::LEN as usize;
            if let Some(line) = lines.get(at..at + device_state::LEN as usize) {
                one.sample(line);
            }
            all.add(one.last_seen);
        }
        all
    }
}

impl LiveConn {
    fn sample(&mut self, line: &[u8]) {
        let word = |at: u64| {
            let mut word = [0; 8];
            word.copy_from_slice(&line[at as usize..at as usize + 8]);
            u64::from_le_bytes(word)
        };
        if word(device_state::GENERATION) as u32 == u32::from(self.generation) {
            self.last_seen = ByteCounts {
                sent: word(device_state::SENT),
                received: word(device_state::CONSUMED),
            };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn device_states(lines: &[(u32, u64, u64)]) -> Vec<u8> {
        let mut bytes = vec![0; lines.len() * device_state::LEN as usize];
        for (line, (generation, sent, consumed)) in
            bytes.chunks_mut(device_state::LEN as usize).zip(lines)
        {
            line[..4].copy_from_slice(&generation.to_le_bytes());
            line[8..16].copy_from_slice(&sent.to_le_bytes());
            line[16..24].copy_from_slice(&consumed.to_le_bytes());
        }
        bytes
    }

    fn counted(byte_counts: &WarpByteCounts, lines: &[(u32, u64, u64)]) -> (u64, u64) {
        let bytes = byte_counts.count(|count| device_states(&lines[..count]));
        (bytes.sent, bytes.received)
    }

    #[test]
    fn what_another_has_left_on_a_desk_is_not_counted() {
        let byte_counts = WarpByteCounts::default();
        let empty = byte_counts.count(|_| unreachable!("no desk is asked for nothing"));
        assert_eq!(empty, ByteCounts::default());
        byte_counts.open(1, 7);
        assert_eq!(counted(&byte_counts, &[(9, 1, 1), (6, 50, 60)]), (0, 0), "not accepted yet");
        assert_eq!(counted(&byte_counts, &[(9, 1, 1), (7, 5, 6)]), (5, 6));
        assert_eq!(counted(&byte_counts, &[(9, 1, 1), (0, 5, 6)]), (5, 6), "it is being closed");
        byte_counts.close(1, 6, Some(ByteCounts { sent: 900, received: 900 }));
        byte_counts.close(1, 7, Some(ByteCounts { sent: 8, received: 9 }));
        byte_counts.close(1, 7, Some(ByteCounts { sent: 8, received: 9 }));
        assert_eq!(counted(&byte_counts, &[]), (8, 9), "once");
    }

    #[test]
    fn one_that_goes_unseen_counts_as_it_was_seen_last() {
        let byte_counts = WarpByteCounts::default();
        byte_counts.open(0, 1);
        byte_counts.open(1, 1);
        assert_eq!(counted(&byte_counts, &[(1, 2, 3), (1, 10, 20)]), (12, 23));
        byte_counts.close(0, 1, None);
        assert_eq!(counted(&byte_counts, &[(4, 99, 99), (1, u64::MAX, 21)]), (u64::MAX, 24));
        assert_eq!(byte_counts.count(|_| Vec::new()).received, 24, "desks that cannot be read");
    }
}
