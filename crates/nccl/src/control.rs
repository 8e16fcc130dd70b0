//! The TCP connection that set up a pair of communicators, afterwards: it tells that the peer has
//! ended, at once if its process was killed. A peer that closes says how many groups of receives it
//! has completed, so that a sender whose last acknowledgement was lost does not fail.

use std::io::{ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::result::{Failure, REMOTE, Result};

/// Calls without progress between two looks at the clock.
const CALLS_PER_CHECK: u32 = 64;
/// Time between two looks at the connection, while nothing else makes progress.
const CHECK_INTERVAL: Duration = Duration::from_millis(1);
/// Time between two heartbeats, which find out that a machine or network has failed.
const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PeerState {
    Alive,
    /// It closed its communicator after it had completed that many groups.
    Closed(u64),
    /// Its connection ended without a word.
    Lost,
}

pub(crate) struct Control {
    stream: TcpStream,
    goodbye: Vec<u8>,
    state: PeerState,
    idle_calls: u32,
    checked: Instant,
    heartbeat: Instant,
    failure: Option<Failure>,
}

impl Control {
    pub(crate) fn new(stream: TcpStream) -> Self {
        let now = Instant::now();
        let (goodbye, state) = (Vec::with_capacity(8), PeerState::Alive);
        Self { stream, goodbye, state, idle_calls: 0, checked: now, heartbeat: now, failure: None }
    }

    pub(crate) fn state(&self) -> PeerState {
        self.state
    }

    /// A call made no progress: now and then looks whether the peer lives. Returns whether a
    /// heartbeat is due.
    #[inline]
    pub(crate) fn on_idle(&mut self) -> bool {
        self.idle_calls = self.idle_calls.wrapping_add(1);
        self.idle_calls.is_multiple_of(CALLS_PER_CHECK) && self.check_by_clock()
    }

    fn check_by_clock(&mut self) -> bool {
        let now = Instant::now();
        if now - self.checked < CHECK_INTERVAL {
            return false;
        }
        self.checked = now;
        self.check();
        let is_due = now - self.heartbeat >= HEARTBEAT_INTERVAL;
        if is_due {
            self.heartbeat = now;
        }
        is_due
    }

    /// Looks whether the peer lives.
    #[cold]
    pub(crate) fn check(&mut self) {
        let mut byte = [0; 1];
        while self.state == PeerState::Alive {
            match self.stream.read(&mut byte) {
                Ok(0) => self.state = PeerState::Lost,
                Ok(_) => self.goodbye.push(byte[0]),
                Err(why) if why.kind() == ErrorKind::WouldBlock => return,
                Err(why) if why.kind() == ErrorKind::Interrupted => {}
                Err(_) => self.state = PeerState::Lost,
            }
            if let Some(completed) = self.goodbye.first_chunk() {
                self.state = PeerState::Closed(u64::from_le_bytes(*completed));
            }
        }
    }

    /// Tells the peer that this end closes.
    pub(crate) fn say_goodbye(&mut self, completed: u64) {
        // The socket's buffer is empty, so this does not block; a peer that is gone does not care.
        let _ = self.stream.write(&completed.to_le_bytes());
    }

    /// A queue pair has failed. The peer may have said goodbye before.
    #[cold]
    pub(crate) fn fail(&mut self, why: Failure) {
        self.check();
        self.failure.get_or_insert(why);
    }

    /// Whether new work may be posted.
    #[inline]
    pub(crate) fn is_usable(&self) -> bool {
        self.state == PeerState::Alive && self.failure.is_none()
    }

    /// # Errors
    /// If the peer has ended or the connection has failed; the former explains the latter.
    #[inline]
    pub(crate) fn result(&self) -> Result {
        match (self.state, &self.failure) {
            (PeerState::Alive, None) => Ok(()),
            (PeerState::Alive, Some(failure)) => Err(failure.clone()),
            (PeerState::Closed(_), _) => {
                Err(Failure::new(REMOTE, "the peer has closed its communicator"))
            }
            (PeerState::Lost, _) => Err(Failure::new(REMOTE, "the peer's process has ended")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::TcpListener;

    fn pair() -> [Control; 2] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let other = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        [other, listener.accept().unwrap().0].map(|stream| {
            stream.set_nonblocking(true).unwrap();
            Control::new(stream)
        })
    }

    #[test]
    fn a_goodbye_is_told_from_a_death() {
        let [mut ours, mut theirs] = pair();
        ours.check();
        assert_eq!((ours.state(), ours.result()), (PeerState::Alive, Ok(())));
        assert!(ours.is_usable());
        theirs.say_goodbye(7);
        drop(theirs);
        testkit::until("the goodbye arrives", || {
            let is_due = (0..CALLS_PER_CHECK).any(|_| ours.on_idle());
            assert!(!is_due || ours.heartbeat.elapsed() < HEARTBEAT_INTERVAL);
            ours.state() != PeerState::Alive
        });
        assert_eq!(ours.state(), PeerState::Closed(7));
        assert!(!ours.is_usable());
        let [mut ours, mut theirs] = pair();
        theirs.stream.write_all(&[1, 2, 3]).unwrap();
        drop(theirs);
        testkit::until("the end is seen", || {
            ours.check();
            ours.state() == PeerState::Lost
        });
        assert!(ours.result().unwrap_err().text.contains("process has ended"));
        let [mut ours, _theirs] = pair();
        ours.fail(Failure::new(REMOTE, "first"));
        ours.fail(Failure::new(REMOTE, "second"));
        assert!(!ours.is_usable());
        assert_eq!(ours.result().unwrap_err().text, "first");
    }
}
