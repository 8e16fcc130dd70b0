//! The service thread's part for datagrams: it hears questions and answers, asks again in time, and wakes those who sleep.

use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use super::datagram::Post;

/// How often it is looked whether something is due.
const TICK: Duration = Duration::from_millis(5);
/// How long the last datagrams of a socket that was dropped may take to go.
const LAST_WORDS: Duration = Duration::from_secs(2);

#[derive(Default)]
pub(super) struct Posts {
    all: HashMap<u64, Weak<Post>>,
    /// Those that have asked for names, and when they are to be looked at.
    minded: Vec<(Weak<Post>, Instant)>,
    leaving: Vec<(Arc<Post>, Instant)>,
}

impl Posts {
    pub(super) fn add(&mut self, post: Weak<Post>) {
        // Those that are gone make room now and then.
        if self.all.len().is_power_of_two() {
            self.all.retain(|_, post| post.strong_count() > 0);
        }
        if let Some(strong) = post.upgrade() {
            self.all.insert(strong.number, post);
        }
    }

    /// Something will be due for it.
    pub(super) fn mind(&mut self, number: u64) {
        if let Some(post) = self.all.get(&number) {
            self.minded.push((post.clone(), Instant::now()));
        }
    }

    /// Nobody has it any more, and something of it is still to be sent.
    pub(super) fn leave(&mut self, post: Arc<Post>) {
        self.leaving.push((post, Instant::now() + LAST_WORDS));
    }

    /// Something happened to a socket; false if it is none of these.
    pub(super) fn hear(&mut self, number: u64) -> bool {
        let Some(weak) = self.all.get(&number) else { return false };
        match weak.upgrade() {
            Some(post) => {
                if let Some(due) = post.look(Instant::now())
                    && !self.minded.iter().any(|(minded, _)| minded.ptr_eq(weak))
                {
                    self.minded.push((weak.clone(), due));
                }
            }
            None => drop(self.all.remove(&number)),
        }
        true
    }

    /// Does what is due.
    pub(super) fn look(&mut self, now: Instant) {
        self.minded.retain_mut(|(post, due)| {
            if *due > now {
                return true;
            }
            match post.upgrade().and_then(|post| post.look(now)) {
                Some(next) => {
                    *due = next;
                    true
                }
                None => false,
            }
        });
        self.leaving.retain(|(post, until)| {
            post.look(now);
            let stays = !post.is_over() && now < *until;
            if !stays {
                post.close();
            }
            stays
        });
    }

    /// The longest nap that it bears.
    pub(super) fn nap(&self) -> Option<Duration> {
        let is_busy = !(self.minded.is_empty() && self.leaving.is_empty());
        is_busy.then_some(TICK)
    }
}
