//! Who has which name: what was asked, what is known, and for how long.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::words::{Card, Words};

/// After how long a question is asked again; each time it is twice as long.
const FIRST_WAIT: Duration = Duration::from_millis(20);
/// For how long a name is asked for.
const PATIENCE: Duration = Duration::from_secs(1);
/// For how long what is known is not asked for again: a peer that began anew under its old name is found after that.
const FRESH: Duration = Duration::from_secs(1);
/// What was not confirmed for so long is not used any more.
const BEST_BEFORE: Duration = Duration::from_secs(5);
/// How many names may be known; one more drives out that which was used longest ago.
const MOST_KNOWN: usize = 1024;
/// How many may be asked for at a time.
const MOST_ASKED: usize = 32;

/// What is known of a name; `R` is what the caller keeps for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Found<R> {
    /// It is reached like this.
    Known {
        /// How.
        card: Card,
        /// What the caller keeps for it.
        reach: R,
        /// It should be asked for again meanwhile.
        is_stale: bool,
    },
    /// It is being asked for.
    Asked,
    /// It must be asked for.
    Unknown,
}

/// What is to be done now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// Ask.
    Ask {
        /// Whom.
        to: SocketAddr,
        /// With these words.
        words: Words,
    },
    /// Nobody has answered for this name: it is given up.
    GivenUp {
        /// Which.
        to: SocketAddr,
    },
}

#[derive(Debug)]
struct Peer<R> {
    card: Card,
    reach: R,
    confirmed: Instant,
    used: Instant,
}

#[derive(Debug)]
struct Ask {
    to: SocketAddr,
    asked: SocketAddr,
    nonce: u64,
    due: Instant,
    wait: Duration,
    until: Instant,
}

/// Names and who has them. It does no I/O and has no clock: whoever has both asks [`find`](Self::find) before each datagram,
/// begins to [`ask`](Self::ask) for a name that is unknown or stale, does what is [`due`](Self::due), and brings answers to
/// [`answered`](Self::answered), then what it made of one to [`learn`](Self::learn).
///
/// A question is asked at once, then after 20, 40, 80 … ms, and given up after a second. An answer is used for a second; then it
/// is used while the name is asked for again, for up to five. Nothing grows without a limit.
///
/// ```
/// use std::time::Instant;
/// use warpwire::sock::warp::{Card, Due, Found, Resolver};
/// let (now, to) = (Instant::now(), "10.0.0.2:7000".parse().unwrap());
/// let mut names = Resolver::new();
/// assert_eq!(names.find(now, to), Found::Unknown);
/// assert!(names.ask(now, to, to, 5));
/// assert!(matches!(names.due(now), Some(Due::Ask { .. })));
/// let card = Card { port: 4791, qpn: 17, qkey: 3, longest: 4088 };
/// assert_eq!(names.answered(6, to), None);
/// assert_eq!(names.answered(5, to), Some(to));
/// names.learn(now, to, card, "what we keep for it");
/// assert!(matches!(names.find(now, to), Found::Known { is_stale: false, .. }));
/// ```
#[derive(Debug)]
pub struct Resolver<R> {
    peers: HashMap<SocketAddr, Peer<R>>,
    asks: Vec<Ask>,
}

impl<R> Default for Resolver<R> {
    fn default() -> Self {
        Self { peers: HashMap::new(), asks: Vec::new() }
    }
}

impl<R: Clone> Resolver<R> {
    /// One that knows nobody.
    pub fn new() -> Self {
        Self::default()
    }

    /// What is known of that name.
    pub fn find(&mut self, now: Instant, to: SocketAddr) -> Found<R> {
        let is_asked = self.is_asked(to);
        if let Some(peer) = self.peers.get_mut(&to) {
            let age = now.saturating_duration_since(peer.confirmed);
            if age < BEST_BEFORE {
                peer.used = now;
                let is_stale = age >= FRESH && !is_asked;
                return Found::Known { card: peer.card, reach: peer.reach.clone(), is_stale };
            }
            self.peers.remove(&to);
        }
        if is_asked { Found::Asked } else { Found::Unknown }
    }

    /// Begins to ask for a name, which is asked at that address; false if that goes on already, or too many are asked for.
    pub fn ask(&mut self, now: Instant, to: SocketAddr, asked: SocketAddr, nonce: u64) -> bool {
        if self.asks.len() >= MOST_ASKED || self.is_asked(to) {
            return false;
        }
        let (wait, until) = (FIRST_WAIT, now + PATIENCE);
        self.asks.push(Ask { to, asked, nonce, due: now, wait, until });
        true
    }

    /// Whether one more name may be asked for.
    pub fn may_ask(&self) -> bool {
        self.asks.len() < MOST_ASKED
    }

    /// For how long a name has been asked for; `None` if it is not.
    pub fn asked_for(&self, now: Instant, to: SocketAddr) -> Option<Duration> {
        let ask = self.asks.iter().find(|ask| ask.to == to)?;
        Some(PATIENCE.saturating_sub(ask.until.saturating_duration_since(now)))
    }

    /// What is to be done now, one at a time. A name that is given up is forgotten.
    pub fn due(&mut self, now: Instant) -> Option<Due> {
        let at = self.asks.iter().position(|ask| ask.due <= now)?;
        let ask = &mut self.asks[at];
        if now >= ask.until {
            let to = self.asks.swap_remove(at).to;
            self.peers.remove(&to);
            return Some(Due::GivenUp { to });
        }
        // From now on, not from when it was due: a caller that comes late does not ask twice at once.
        ask.due = (now + ask.wait).min(ask.until);
        ask.wait *= 2;
        let words = Words::Question { nonce: ask.nonce, asked: ask.asked };
        Some(Due::Ask { to: ask.to, words })
    }

    /// When something will be due.
    pub fn next_due(&self) -> Option<Instant> {
        self.asks.iter().map(|ask| ask.due).min()
    }

    /// The name that an answer is for, which is asked for no more. `None` if nobody asked that.
    pub fn answered(&mut self, nonce: u64, asked: SocketAddr) -> Option<SocketAddr> {
        let is_it = |ask: &Ask| ask.nonce == nonce && is_same(ask.asked, asked);
        let at = self.asks.iter().position(is_it)?;
        Some(self.asks.swap_remove(at).to)
    }

    /// A name is reached like this.
    pub fn learn(&mut self, now: Instant, to: SocketAddr, card: Card, reach: R) {
        if self.peers.len() >= MOST_KNOWN && !self.peers.contains_key(&to) {
            let oldest = self.peers.iter().min_by_key(|(_, peer)| peer.used).map(|(to, _)| *to);
            oldest.and_then(|oldest| self.peers.remove(&oldest));
        }
        self.peers.insert(to, Peer { card, reach, confirmed: now, used: now });
    }

    /// A name is still reached as it was: true if it was so.
    pub fn confirm(&mut self, now: Instant, to: SocketAddr, card: &Card) -> bool {
        match self.peers.get_mut(&to).filter(|peer| peer.card == *card) {
            Some(peer) => {
                peer.confirmed = now;
                true
            }
            None => false,
        }
    }

    /// Nobody has that name: it is neither known nor asked for.
    pub fn forget(&mut self, to: SocketAddr) {
        self.asks.retain(|ask| ask.to != to);
        self.peers.remove(&to);
    }

    /// What is known is of no use any more; what is asked for goes on.
    pub fn forget_known(&mut self) {
        self.peers.clear();
    }

    fn is_asked(&self, to: SocketAddr) -> bool {
        self.asks.iter().any(|ask| ask.to == to)
    }
}

/// Whether two addresses are one: written in IPv4 or in IPv6, whatever the scope.
pub(crate) fn is_same(one: SocketAddr, other: SocketAddr) -> bool {
    one.port() == other.port() && one.ip().to_canonical() == other.ip().to_canonical()
}

#[cfg(test)]
mod tests {
    use super::*;

    const CARD: Card = Card { port: 4791, qpn: 17, qkey: 3, longest: 4088 };

    fn peer(port: usize) -> SocketAddr {
        SocketAddr::from(([10, 0, 0, 1], port as u16))
    }

    fn ms(start: Instant, count: u64) -> Instant {
        start + Duration::from_millis(count)
    }

    #[test]
    fn questions_are_asked_again_and_given_up() {
        let start = Instant::now();
        let mut names = Resolver::<u8>::new();
        assert!(names.ask(start, peer(1), peer(1), 9));
        assert!(!names.ask(start, peer(1), peer(1), 10), "one at a time");
        assert_eq!(names.asked_for(ms(start, 30), peer(1)), Some(Duration::from_millis(30)));
        assert_eq!(names.asked_for(start, peer(2)), None);
        let (mut asked, mut given_up) = (Vec::new(), None);
        for at in 0..1100 {
            match names.due(ms(start, at)) {
                Some(Due::Ask { to, words: Words::Question { nonce: 9, asked: name } }) => {
                    assert_eq!((to, name), (peer(1), peer(1)));
                    asked.push(at);
                }
                Some(Due::GivenUp { to }) => given_up = Some((to, at)),
                other => assert_eq!(other, None),
            }
        }
        assert_eq!(asked, [0, 20, 60, 140, 300, 620]);
        assert_eq!(given_up, Some((peer(1), 1000)));
        assert_eq!((names.next_due(), names.find(start, peer(1))), (None, Found::Unknown));
    }

    #[test]
    fn who_comes_late_asks_once() {
        let start = Instant::now();
        let mut names = Resolver::<u8>::new();
        names.ask(start, peer(1), peer(1), 1);
        assert!(matches!(names.due(ms(start, 500)), Some(Due::Ask { .. })));
        assert_eq!(names.due(ms(start, 500)), None);
        assert_eq!(names.next_due(), Some(ms(start, 520)));
    }

    #[test]
    fn answers_must_be_to_what_was_asked() {
        let start = Instant::now();
        let mut names = Resolver::<u8>::new();
        names.ask(start, peer(1), peer(1), 1);
        names.ask(start, peer(2), peer(2), 2);
        assert_eq!(names.answered(1, peer(2)), None, "another's nonce");
        assert_eq!(names.answered(3, peer(1)), None, "nobody's nonce");
        assert_eq!(names.answered(1, "[::ffff:10.0.0.1]:1".parse().unwrap()), Some(peer(1)));
        assert_eq!(names.answered(1, peer(1)), None, "once");
        assert_eq!(names.find(start, peer(2)), Found::Asked);
    }

    #[test]
    fn knowledge_grows_old() {
        let start = Instant::now();
        let mut names = Resolver::new();
        names.learn(start, peer(1), CARD, 7);
        let known = |is_stale| Found::Known { card: CARD, reach: 7, is_stale };
        assert_eq!(names.find(ms(start, 999), peer(1)), known(false));
        assert_eq!(names.find(ms(start, 1000), peer(1)), known(true));
        names.ask(ms(start, 1000), peer(1), peer(1), 3);
        assert_eq!(names.find(ms(start, 1001), peer(1)), known(false), "it is asked for");
        assert_eq!(names.answered(3, peer(1)), Some(peer(1)));
        let other = Card { qpn: 18, ..CARD };
        assert!(!names.confirm(ms(start, 1001), peer(1), &other), "another has the name now");
        assert!(names.confirm(ms(start, 1001), peer(1), &CARD));
        assert_eq!(names.find(ms(start, 2000), peer(1)), known(false));
        assert_eq!(names.find(ms(start, 6001), peer(1)), Found::Unknown, "too old");
    }

    #[test]
    fn whoever_is_gone_is_forgotten() {
        let start = Instant::now();
        let mut names = Resolver::new();
        names.learn(start, peer(1), CARD, 7);
        names.ask(ms(start, 1500), peer(1), peer(1), 3);
        assert_eq!(names.due(ms(start, 2600)), Some(Due::GivenUp { to: peer(1) }));
        assert_eq!(names.find(ms(start, 2600), peer(1)), Found::Unknown);
        names.learn(start, peer(2), CARD, 8);
        names.ask(start, peer(2), peer(2), 4);
        names.forget(peer(2));
        assert_eq!(names.find(start, peer(2)), Found::Unknown);
        names.learn(start, peer(3), CARD, 8);
        names.forget_known();
        assert_eq!(names.find(start, peer(3)), Found::Unknown);
    }

    #[test]
    fn nothing_grows_without_a_limit() {
        let start = Instant::now();
        let mut names = Resolver::new();
        for number in 1..=MOST_ASKED {
            assert!(names.may_ask() && names.ask(start, peer(number), peer(number), number as u64));
        }
        assert!(!names.may_ask() && !names.ask(start, peer(9999), peer(9999), 0));
        for number in 0..MOST_KNOWN {
            names.learn(ms(start, number as u64 / 2), peer(number + 1), CARD, number);
        }
        names.find(ms(start, 600), peer(1));
        names.learn(ms(start, 600), peer(5000), CARD, 0);
        assert_eq!(names.peers.len(), MOST_KNOWN);
        assert!(names.peers.contains_key(&peer(1)), "it was used just now");
        assert!(!names.peers.contains_key(&peer(2)), "it was not used for the longest time");
    }
}
