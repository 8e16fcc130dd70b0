//! Bytes of the family `warp`, which pass the host by: what kernels say when they close, and until then what stands on
//! their desks.
//!
//! 1. A connection is written down when it stands, and crossed out when its kernel closes it, or when it goes unseen.
//! 2. While it is written down its desk is asked, if that is this connection's; else what was seen last counts. So the sums
//!    never go back, and what an earlier user of the desk has left is not counted.

use parking_lot::Mutex;

use super::layout::desk;

/// Bytes that kernels have sent, and that they have read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Bytes {
    pub(super) sent: u64,
    pub(super) received: u64,
}

impl Bytes {
    fn add(&mut self, more: Self) {
        self.sent = self.sent.saturating_add(more.sent);
        self.received = self.received.saturating_add(more.received);
    }
}

/// A connection that stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Standing {
    index: u16,
    generation: u16,
    seen: Bytes,
}

#[derive(Debug, Default)]
struct Sums {
    closed: Bytes,
    standing: Vec<Standing>,
}

/// The sums, for the thread that serves and for whoever asks.
#[derive(Debug, Default)]
pub(super) struct Ledger(Mutex<Sums>);

impl Ledger {
    /// A connection stands.
    pub(super) fn open(&self, index: u16, generation: u16) {
        let seen = Bytes::default();
        self.0.lock().standing.push(Standing { index, generation, seen });
    }

    /// Its kernel has closed it, and says how much went; or it goes, and what was seen last counts.
    pub(super) fn close(&self, index: u16, generation: u16, said: Option<Bytes>) {
        let mut sums = self.0.lock();
        let is_it = |one: &Standing| (one.index, one.generation) == (index, generation);
        let Some(at) = sums.standing.iter().position(is_it) else { return };
        let one = sums.standing.swap_remove(at);
        sums.closed.add(said.unwrap_or(one.seen));
    }

    /// All bytes so far. `desks` reads so many desks, from the first on, if there is a connection; where it cannot, what was
    /// seen last counts.
    pub(super) fn count(&self, desks: impl FnOnce(usize) -> Vec<u8>) -> Bytes {
        let mut sums = self.0.lock();
        let Some(last) = sums.standing.iter().map(|one| one.index).max() else {
            return sums.closed;
        };
        let lines = desks(usize::from(last) + 1);
        let mut all = sums.closed;
        for one in &mut sums.standing {
            let at = usize::from(one.index) * desk::LEN as usize;
            if let Some(line) = lines.get(at..at + desk::LEN as usize) {
                one.look(line);
            }
            all.add(one.seen);
        }
        all
    }
}

impl Standing {
    fn look(&mut self, line: &[u8]) {
        let word = |at: u64| {
            let mut word = [0; 8];
            word.copy_from_slice(&line[at as usize..at as usize + 8]);
            u64::from_le_bytes(word)
        };
        if word(desk::GENERATION) as u32 == u32::from(self.generation) {
            self.seen = Bytes { sent: word(desk::SENT), received: word(desk::CONSUMED) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn desks(lines: &[(u32, u64, u64)]) -> Vec<u8> {
        let mut bytes = vec![0; lines.len() * desk::LEN as usize];
        for (line, (generation, sent, consumed)) in bytes.chunks_mut(desk::LEN as usize).zip(lines)
        {
            line[..4].copy_from_slice(&generation.to_le_bytes());
            line[8..16].copy_from_slice(&sent.to_le_bytes());
            line[16..24].copy_from_slice(&consumed.to_le_bytes());
        }
        bytes
    }

    fn counted(ledger: &Ledger, lines: &[(u32, u64, u64)]) -> (u64, u64) {
        let bytes = ledger.count(|count| desks(&lines[..count]));
        (bytes.sent, bytes.received)
    }

    #[test]
    fn what_another_has_left_on_a_desk_is_not_counted() {
        let ledger = Ledger::default();
        let nobody = ledger.count(|_| unreachable!("no desk is asked for nothing"));
        assert_eq!(nobody, Bytes::default());
        ledger.open(1, 7);
        assert_eq!(counted(&ledger, &[(9, 1, 1), (6, 50, 60)]), (0, 0), "not accepted yet");
        assert_eq!(counted(&ledger, &[(9, 1, 1), (7, 5, 6)]), (5, 6));
        assert_eq!(counted(&ledger, &[(9, 1, 1), (0, 5, 6)]), (5, 6), "it is being closed");
        ledger.close(1, 6, Some(Bytes { sent: 900, received: 900 }));
        ledger.close(1, 7, Some(Bytes { sent: 8, received: 9 }));
        ledger.close(1, 7, Some(Bytes { sent: 8, received: 9 }));
        assert_eq!(counted(&ledger, &[]), (8, 9), "once");
    }

    #[test]
    fn one_that_goes_unseen_counts_as_it_was_seen_last() {
        let ledger = Ledger::default();
        ledger.open(0, 1);
        ledger.open(1, 1);
        assert_eq!(counted(&ledger, &[(1, 2, 3), (1, 10, 20)]), (12, 23));
        ledger.close(0, 1, None);
        assert_eq!(counted(&ledger, &[(4, 99, 99), (1, u64::MAX, 21)]), (u64::MAX, 24));
        assert_eq!(ledger.count(|_| Vec::new()).received, 24, "desks that cannot be read");
    }
}
