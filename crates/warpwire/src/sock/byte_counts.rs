//! Byte counters of `warp` sockets. Their data bypasses the host, so live connections are sampled
//! from device memory, and the final values come with the close request.
//!
//! 1. A connection is added when it is established, and removed when its kernel closes it or when
//!    the host releases it without a close request.
//! 2. While it is live, its device state is sampled if the generation matches; otherwise the last
//!    sample counts. So the totals never decrease, and values that an earlier user of the slot left
//!    are not counted.

use parking_lot::Mutex;

use super::layout::device_state;

/// Bytes that kernels have sent and read.
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

/// An established connection.
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

/// The totals, shared by the service thread and [`SockHost::stats`](super::SockHost::stats).
#[derive(Debug, Default)]
pub(super) struct WarpByteCounts(Mutex<Totals>);

impl WarpByteCounts {
    /// Adds an established connection.
    pub(super) fn open(&self, index: u16, generation: u16) {
        let last_seen = ByteCounts::default();
        self.0.lock().live.push(LiveConn { index, generation, last_seen });
    }

    /// Removes a connection. `final_counts` come from its close request; without them the last
    /// sample counts.
    pub(super) fn close(&self, index: u16, generation: u16, final_counts: Option<ByteCounts>) {
        let mut totals = self.0.lock();
        let is_it = |one: &LiveConn| (one.index, one.generation) == (index, generation);
        let Some(at) = totals.live.iter().position(is_it) else { return };
        let one = totals.live.swap_remove(at);
        totals.closed.add(final_counts.unwrap_or(one.last_seen));
    }

    /// All bytes so far. `device_states` reads the given number of device state lines, from the
    /// first on, and is called only if there is a live connection; for lines that it does not
    /// return, the last sample counts.
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
    fn values_of_an_earlier_generation_are_not_counted() {
        let byte_counts = WarpByteCounts::default();
        let empty = byte_counts.count(|_| unreachable!("read without a live connection"));
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
    fn a_connection_without_a_close_request_counts_its_last_sample() {
        let byte_counts = WarpByteCounts::default();
        byte_counts.open(0, 1);
        byte_counts.open(1, 1);
        assert_eq!(counted(&byte_counts, &[(1, 2, 3), (1, 10, 20)]), (12, 23));
        byte_counts.close(0, 1, None);
        assert_eq!(counted(&byte_counts, &[(4, 99, 99), (1, u64::MAX, 21)]), (u64::MAX, 24));
        assert_eq!(
            byte_counts.count(|_| Vec::new()).received,
            24,
            "device states that cannot be read"
        );
    }
}
