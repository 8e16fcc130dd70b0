//! What the two ends tell each other over TCP, and how long they wait for it.

use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use warpwire::verbs::exchange::Exchange;
use warpwire::verbs::{Context, Offer};

use super::table::Row;
use super::test::Test;
use crate::output::Failure;

/// What one side is: for the peer, and for the table's head.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Side {
    pub(super) link: String,
    /// The kind of memory that was asked for.
    pub(super) memory: String,
    /// How the device reaches it, and why not by a better way.
    pub(super) path: String,
    pub(super) why: Vec<String>,
    /// How it was named to the device.
    pub(super) registered: String,
    pub(super) qpn: u32,
    pub(super) psn: u32,
    pub(super) rkey: u32,
    pub(super) address: u64,
    pub(super) mtu: u32,
}

/// What an end offers.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Ready {
    pub(super) side: Side,
    pub(super) offers: Vec<Offer>,
}

/// The end of a size.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Done {
    /// Messages on each queue pair, those for warming up too.
    pub(super) per_qp: Vec<u64>,
    pub(super) row: Row,
}

/// Everything that is said.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Word {
    Test(Test),
    Ready(Ready),
    /// This end is ready for the next step.
    Go,
    Done(Done),
    /// What was found in memory: nothing wrong, or what.
    Verdict(Option<String>),
    /// This end gives up.
    Failed(String),
}

/// The peer, and the patience that we have with it.
pub(super) struct Peer {
    exchange: Exchange,
    pub(super) name: String,
    patience: Duration,
}

impl Peer {
    pub(super) fn new(exchange: Exchange, patience: Duration) -> Self {
        let name = exchange.peer().to_string();
        Self { exchange, name, patience }
    }

    /// The address at which it sees us.
    pub(super) fn sees(&self) -> Result<std::net::IpAddr, Failure> {
        Ok(self.exchange.local()?.ip())
    }

    pub(super) fn tell(&mut self, word: &Word) -> Result<(), Failure> {
        Ok(self.exchange.tell(word)?)
    }

    pub(super) fn hear(&mut self) -> Result<Word, Failure> {
        match self.exchange.hear()? {
            Word::Failed(why) => Err(Failure::Broken(format!("{} gave up: {why}", self.name))),
            word => Ok(word),
        }
    }

    pub(super) fn swap(&mut self, mine: &Word) -> Result<Word, Failure> {
        self.tell(mine)?;
        self.hear()
    }

    /// Waits until both ends are here.
    pub(super) fn meet(&mut self) -> Result<(), Failure> {
        match self.swap(&Word::Go)? {
            Word::Go => Ok(()),
            other => Err(self.unexpected(&other)),
        }
    }

    pub(super) fn unexpected(&self, word: &Word) -> Failure {
        let text = format!("{word:?}");
        let word = text.split(['(', ' ']).next().unwrap_or_default();
        Failure::Broken(format!(
            "{} said {word:?} out of turn; use one version on both ends",
            self.name
        ))
    }

    /// Tells the peer why this end gives up, if it still listens.
    pub(super) fn despair(&mut self, failure: &Failure) {
        let (Failure::Usage(why) | Failure::Broken(why)) = failure;
        let _ = self.exchange.tell(&Word::Failed(why.clone()));
    }

    pub(super) fn watch<'a>(&'a mut self, context: &'a Context) -> Watch<'a> {
        let (now, packets) = (Instant::now(), 0);
        Watch { peer: self, context, calls: 0, heard: now, looked: now, packets }
    }
}

/// Watches the peer while we spin: whether it said something, and whether it lives.
pub(super) struct Watch<'a> {
    pub(super) peer: &'a mut Peer,
    context: &'a Context,
    calls: u32,
    /// The last sign of life.
    heard: Instant,
    looked: Instant,
    packets: u64,
}

/// System calls between packets would be felt; this is often enough to notice the end.
const SELDOM: u32 = 512;

/// Fruitless polls before the core is offered to others.
const SPINS: u32 = 64;

impl Watch<'_> {
    /// To be called when there is nothing to do; tells whether the peer said something.
    #[inline]
    pub(super) fn idle(&mut self) -> Result<bool, Failure> {
        self.calls = self.calls.wrapping_add(1);
        if self.calls.is_multiple_of(SPINS) {
            // On a machine with fewer cores than work, the peer may wait for this one.
            std::thread::yield_now();
        }
        if !self.calls.is_multiple_of(SELDOM) {
            return Ok(false);
        }
        self.look()
    }

    #[cold]
    fn look(&mut self) -> Result<bool, Failure> {
        if self.peer.exchange.is_heard(Duration::ZERO)? {
            return Ok(true);
        }
        if self.looked.elapsed() < Duration::from_millis(500) {
            return Ok(false);
        }
        self.looked = Instant::now();
        // What the peer does without packets is a sign of life too.
        let stats = self.context.stats();
        let packets = stats.pairs.packets_received.wrapping_add(stats.direct.by_peers);
        // Hardware tells nothing of packets: there the connection must end for the peer to be gone.
        let lives = self.context.soft().is_none();
        if std::mem::replace(&mut self.packets, packets) != packets || lives {
            self.heard = self.looked;
        }
        if self.heard.elapsed() < self.peer.patience {
            return Ok(false);
        }
        Err(Failure::Broken(format!(
            "no packet and no word from {} for {} s; look whether it runs, and whether a firewall drops UDP",
            self.peer.name,
            self.peer.patience.as_secs_f64()
        )))
    }

    /// As [`Watch::idle`], for those who do not expect a word: it can only be bad news.
    #[inline]
    pub(super) fn silent(&mut self) -> Result<(), Failure> {
        if !self.idle()? {
            return Ok(());
        }
        let word = self.peer.hear()?;
        Err(self.peer.unexpected(&word))
    }
}
