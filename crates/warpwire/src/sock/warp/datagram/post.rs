//! A datagram socket of a CPU program, as its callers and the service thread share it.
//!
//! What always holds: an office is pumped by the service thread alone; callers send and take what has come. Whoever sleeps has asked
//! the queue pairs for an event before, under the lock, so that the thread hears of what comes.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::{Condvar, Mutex};

use super::office::{Devices, Office, Tally};
use crate::error::Result;
use crate::sock::warp::end::For;
use crate::sock::warp::net::Inner;
use crate::sock::warp::service::Command;
use crate::verbs::{Context, Signal};

/// How long a call looks by itself before it sleeps.
const SPIN: Duration = Duration::from_micros(50);

pub(in crate::sock::warp) struct Post {
    state: Mutex<State>,
    woken: Condvar,
    /// The descriptor of readiness. It begins raised.
    pub(super) signal: Signal,
    pub(super) net: Arc<Inner>,
    pub(in crate::sock::warp) number: u64,
}

struct State {
    office: Office,
    /// How many sleep, for each direction.
    waiters: [u32; 2],
    /// What calls returned that would have waited.
    armed: u8,
    /// The thread knows that something will be due.
    is_minded: bool,
}

impl State {
    fn is_ready(&mut self, what: For) -> bool {
        let office = &mut self.office;
        office.has_failed()
            || match what {
                For::Reading => office.next_len().is_some(),
                For::Writing => office.has_room(),
            }
    }

    fn is_armed_and_ready(&mut self) -> bool {
        For::BOTH.into_iter().any(|what| self.armed & what.bit() != 0 && self.is_ready(what))
    }

    /// Whether events of the queue pairs matter to anybody.
    fn wants_events(&self) -> bool {
        self.waiters != [0; 2] || self.armed != 0 || self.office.has_parked()
    }
}

impl Devices for &Inner {
    fn device(&mut self, local: std::net::SocketAddr) -> Result<Context> {
        Inner::device(self, local.ip())
    }
}

impl Post {
    pub(super) fn new(office: Office, net: &Arc<Inner>) -> Result<Self> {
        let state = State { office, waiters: [0; 2], armed: 0, is_minded: false };
        let signal = Signal::new()?;
        signal.raise();
        Ok(Self {
            state: Mutex::new(state),
            woken: Condvar::new(),
            signal,
            net: net.clone(),
            number: net.number(),
        })
    }

    /// Asks the office for something that needs no waiting.
    pub(super) fn with<T>(&self, ask: impl FnOnce(&mut Office, &mut dyn Devices) -> T) -> T {
        ask(&mut self.state.lock().office, &mut &*self.net)
    }

    /// Calls until it has an outcome, or the time is over (`None`).
    pub(super) fn until_done<T>(
        &self,
        what: For,
        wait: Wait,
        mut call: impl FnMut(&mut Office, &mut dyn Devices) -> io::Result<Option<T>>,
    ) -> io::Result<Option<T>> {
        let begun = Instant::now();
        loop {
            let mut state = self.state.lock();
            state.armed &= !what.bit();
            let outcome = call(&mut state.office, &mut &*self.net);
            self.mind(&mut state);
            if let Some(done) = outcome? {
                return Ok(Some(done));
            }
            let until = match wait {
                Wait::Not => {
                    self.arm(&mut state, what);
                    return Err(io::ErrorKind::WouldBlock.into());
                }
                Wait::ForEver => None,
                Wait::For(time) => Some(begun + time),
            };
            let now = Instant::now();
            if until.is_some_and(|until| now >= until) {
                return Ok(None);
            }
            if now - begun < SPIN {
                drop(state);
                std::hint::spin_loop();
                continue;
            }
            state.waiters[what as usize] += 1;
            state.office.arm();
            match until {
                None => self.woken.wait(&mut state),
                Some(until) => drop(self.woken.wait_until(&mut state, until)),
            }
            state.waiters[what as usize] -= 1;
        }
    }

    /// Lets the thread know of what will be due, and of what waits for room.
    fn mind(&self, state: &mut State) {
        let is_due = state.office.next_due().is_some() || state.office.is_broken();
        if is_due && !std::mem::replace(&mut state.is_minded, true) {
            self.net.tell(Command::Mind(self.number));
        }
        if state.office.has_parked() {
            state.office.arm();
        }
    }

    /// A call would have waited: the descriptor is raised when it would not.
    fn arm(&self, state: &mut State, what: For) {
        state.armed |= what.bit();
        self.signal.take();
        if state.is_armed_and_ready() {
            self.signal.raise();
        } else {
            state.office.arm();
        }
    }

    /// The thread's part: does what there is to do, and wakes those who may go on. Tells when something is due.
    pub(in crate::sock::warp) fn look(&self, now: Instant) -> Option<Instant> {
        let mut state = self.state.lock();
        state.office.pump(now, &mut &*self.net);
        let sleeps = |what: For, waiters: [u32; 2]| waiters[what as usize] > 0;
        let waiters = state.waiters;
        if For::BOTH.into_iter().any(|what| sleeps(what, waiters) && state.is_ready(what)) {
            self.woken.notify_all();
        }
        if state.is_armed_and_ready() {
            self.signal.raise();
        }
        if state.wants_events() {
            state.office.arm();
        }
        let due = state.office.next_due();
        state.is_minded = due.is_some();
        due
    }

    /// Whether nothing is left to do for a socket that nobody has any more.
    pub(in crate::sock::warp) fn is_over(&self) -> bool {
        self.state.lock().office.is_idle()
    }

    /// Ends it: its name is free from now on, though the thread may be about to look at it.
    pub(in crate::sock::warp) fn close(&self) {
        self.state.lock().office.close();
    }

    /// Nobody has it any more: nobody waits.
    pub(super) fn abandon(&self) {
        self.state.lock().armed = 0;
    }

    pub(super) fn tally(&self) -> Tally {
        self.state.lock().office.tally()
    }
}

impl std::fmt::Debug for Post {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?}", self.state.lock().office)
    }
}

/// Whether a call waits.
#[derive(Clone, Copy, Debug)]
pub(super) enum Wait {
    Not,
    ForEver,
    For(Duration),
}
