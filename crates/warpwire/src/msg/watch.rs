//! The failure detector: a thread that hears when a rank leaves, or when its connection ends.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt;

use super::rendezvous::BootstrapMsg;
use super::shared::Shared;
use crate::error::{Error, Kind, Result};
use crate::verbs::EventFd;

/// A machine that says nothing for so long is asked, so often, at such intervals.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 4;
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);

/// The thread. It ends with this.
pub(super) struct Watcher {
    stop: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.stop.raise();
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Watcher {
    pub fn start(shared: &Arc<Shared>) -> Result<Self> {
        let failed = |why: &std::io::Error| Error::os("watch the other ranks", why);
        let stop = Arc::new(EventFd::new()?);
        let mut watched = Vec::new();
        for (rank, link) in shared.links.iter().enumerate() {
            let Some(link) = link else { continue };
            let link = link.lock();
            enable_keepalive(link.stream());
            let fd = link.stream().as_fd().try_clone_to_owned().map_err(|why| failed(&why))?;
            watched.push((rank, fd));
        }
        let (theirs, shared) = (stop.clone(), shared.clone());
        let run = move || watch(&shared, &theirs, watched);
        let thread = std::thread::Builder::new().name("warpwire-ranks".to_owned()).spawn(run);
        Ok(Self { stop, thread: Some(thread.map_err(|why| failed(&why))?) })
    }
}

/// A machine that vanishes says nothing: the kernel asks it. Where it cannot be told to, the queue pairs' own retries
/// are left.
fn enable_keepalive(stream: &std::net::TcpStream) {
    let enabled = sockopt::set_socket_keepalive(stream, true)
        .and_then(|()| sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE))
        .and_then(|()| sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES))
        .and_then(|()| sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL));
    if let Err(why) = enabled {
        tracing::debug!(%why, "a machine that vanishes will be noticed late");
    }
}

fn watch(shared: &Shared, stop: &EventFd, mut watched: Vec<(usize, OwnedFd)>) {
    // What was read ahead with an earlier word makes no descriptor readable.
    watched.retain(|(rank, _)| !is_readable(shared, *rank) || recv(shared, *rank));
    while !stop.wait(Duration::ZERO).unwrap_or(true) {
        let mut fds = vec![PollFd::new(stop, PollFlags::IN)];
        fds.extend(watched.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::IN)));
        if let Err(why) = poll(&mut fds, None)
            && why != rustix::io::Errno::INTR
        {
            tracing::error!(%why, "the other ranks are no longer watched");
            return;
        }
        let ready: Vec<bool> = fds.iter().skip(1).map(|fd| !fd.revents().is_empty()).collect();
        let mut ready = ready.into_iter();
        watched.retain(|(rank, _)| !ready.next().unwrap_or(false) || recv(shared, *rank));
    }
}

fn is_readable(shared: &Shared, rank: usize) -> bool {
    let link = shared.links[rank].as_ref();
    link.is_some_and(|link| link.lock().is_readable(Duration::ZERO).unwrap_or(true))
}

/// Hears a rank, and tells those who wait. False when there is nothing more to hear.
fn recv(shared: &Shared, rank: usize) -> bool {
    let Some(link) = &shared.links[rank] else { return false };
    let mut link = link.lock();
    loop {
        let message = link.recv::<BootstrapMsg>();
        let is_alive = on_message(shared, rank, message);
        if !is_alive || !link.is_readable(Duration::ZERO).unwrap_or(true) {
            return is_alive;
        }
    }
}

fn on_message(shared: &Shared, rank: usize, message: Result<BootstrapMsg>) -> bool {
    let lost = |why: String| Error::new(Kind::PeerLost, format!("reach rank {rank}")).why(why);
    let mut state = shared.state.lock();
    // What it sent before is there: that goes first.
    if let Err(why) = state.progress(&shared.cq) {
        tracing::error!(%why, "the device has failed");
    }
    let is_alive = match message {
        Ok(BootstrapMsg::Bye { why: None }) => {
            state.mark_left(rank, lost(format!("rank {rank} has left")));
            true
        }
        Ok(BootstrapMsg::Bye { why: Some(why) } | BootstrapMsg::Failed { why }) => {
            let error = lost(format!("rank {rank} gave up: {why}"));
            state.fail_peer(rank, error);
            false
        }
        Ok(other) => {
            state
                .fail_peer(rank, lost(format!("rank {rank} says {other:?}, which makes no sense")));
            false
        }
        Err(error) => {
            let why = match error.kind() {
                Kind::Freed | Kind::Os(_) => {
                    format!("rank {rank} has ended without a word: it died or was killed")
                }
                _ => format!("rank {rank}: {}", error.reason()),
            };
            let error = lost(why).fix(format!("look at what rank {rank} printed"));
            state.fail_peer(rank, error);
            false
        }
    };
    drop(state);
    shared.wake_all();
    is_alive
}
