//! The failure detector: a thread that receives leave messages of ranks and detects closed
//! connections. It also makes progress for tasks that await requests, while no thread waits.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, poll};
use rustix::net::sockopt;

use super::rendezvous::BootstrapMsg;
use super::shared::Shared;
use crate::error::{Error, Kind, Result};
use crate::units::printable;
use crate::verbs::EventFd;

/// TCP keep-alive: a silent machine is declared dead after 5 s + 4 × 2 s.
const KEEPALIVE_IDLE: Duration = Duration::from_secs(5);
const KEEPALIVE_PROBES: u32 = 4;
const KEEPALIVE_INTERVAL: Duration = Duration::from_secs(2);

/// The failure detector's thread, which is joined on drop; unless it drops this itself, with a task
/// that it wakes: then it ends afterwards.
pub(super) struct Watcher {
    stop: Arc<EventFd>,
    thread: Option<JoinHandle<()>>,
}

impl Drop for Watcher {
    fn drop(&mut self) {
        self.stop.raise();
        if let Some(thread) = self.thread.take()
            && thread.thread().id() != std::thread::current().id()
        {
            let _ = thread.join();
        }
    }
}

impl Watcher {
    pub fn start(shared: &Arc<Shared>) -> Result<Self> {
        let failed = |why: &std::io::Error| Error::os("start the failure detector", why);
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

/// A machine that vanishes sends nothing: TCP keep-alive probes detect it. If they cannot be
/// enabled, only the retries of the queue pairs remain.
fn enable_keepalive(stream: &std::net::TcpStream) {
    let enabled = sockopt::set_socket_keepalive(stream, true)
        .and_then(|()| sockopt::set_tcp_keepidle(stream, KEEPALIVE_IDLE))
        .and_then(|()| sockopt::set_tcp_keepcnt(stream, KEEPALIVE_PROBES))
        .and_then(|()| sockopt::set_tcp_keepintvl(stream, KEEPALIVE_INTERVAL));
    if let Err(why) = enabled {
        tracing::debug!(%why, "no TCP keep-alive: a vanished machine is detected late");
    }
}

fn watch(shared: &Shared, stop: &EventFd, mut watched: Vec<(usize, OwnedFd)>) {
    // Bytes buffered with an earlier message do not make the descriptor readable.
    watched.retain(|(rank, _)| recv(shared, *rank));
    while !stop.wait(Duration::ZERO).unwrap_or(true) {
        let leads = shared.lead_for_tasks();
        let mut fds =
            vec![PollFd::new(stop, PollFlags::IN), PollFd::new(&shared.drive, PollFlags::IN)];
        fds.extend(watched.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::IN)));
        if leads {
            fds.extend(shared.leader_fds());
        }
        let slept = poll(&mut fds, None);
        if leads {
            shared.stop_leading();
        }
        if let Err(why) = slept
            && why != rustix::io::Errno::INTR
        {
            tracing::error!(%why, "the failure detector has stopped");
            return;
        }
        let ready: Vec<bool> = fds.iter().skip(2).map(|fd| !fd.revents().is_empty()).collect();
        let mut ready = ready.into_iter();
        watched.retain(|(rank, _)| !ready.next().unwrap_or(false) || recv(shared, *rank));
    }
}

/// How long packets of a rank that has ended are received, beside those of others.
const LAST_PACKETS: Duration = Duration::from_millis(50);

/// Receives the complete messages of a rank and wakes waiting threads. False once the rank is lost.
fn recv(shared: &Shared, rank: usize) -> bool {
    let Some(link) = &shared.links[rank] else { return false };
    let mut link = link.lock();
    loop {
        // A part of a message must not block this thread, nor others that wait for the lock.
        let Some(message) = link.try_recv::<BootstrapMsg>().transpose() else { return true };
        if !on_message(shared, rank, message) {
            return false;
        }
    }
}

fn on_message(shared: &Shared, rank: usize, message: Result<BootstrapMsg>) -> bool {
    let lost = |why: String| Error::new(Kind::PeerLost, format!("reach rank {rank}")).why(why);
    // First process the messages that it had sent before, also those not received yet.
    if let Some(hca) = shared.domain.context.soft() {
        hca.flush(LAST_PACKETS);
    }
    let mut state = shared.lock();
    if let Err(why) = state.progress(&shared.cq) {
        tracing::error!(%why, "the device has failed");
    }
    let is_alive = match message {
        Ok(BootstrapMsg::Bye { why: None }) => {
            state.mark_left(rank, lost(format!("rank {rank} has left")));
            true
        }
        Ok(BootstrapMsg::Bye { why: Some(why) } | BootstrapMsg::Failed { why }) => {
            let error = lost(format!("rank {rank} aborted: {}", printable(&why)));
            state.fail_peer(rank, error);
            false
        }
        Ok(other) => {
            state.fail_peer(rank, lost(format!("rank {rank} sent an unexpected {other:?}")));
            false
        }
        Err(error) => {
            let why = match error.kind() {
                Kind::Freed | Kind::Os(_) => {
                    format!("rank {rank} exited without leaving: it crashed or was killed")
                }
                _ => format!("rank {rank}: {}", error.reason()),
            };
            let error = lost(why).fix(format!("see the output of rank {rank}"));
            state.fail_peer(rank, error);
            false
        }
    };
    drop(state);
    shared.wake_all();
    is_alive
}
