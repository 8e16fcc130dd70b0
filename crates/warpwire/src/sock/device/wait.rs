//! Bounded waiting, and the lock of each direction.

use std::cell::Cell;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use super::{SockError, SockResult, SocketRef, Sockets, at, device_state};
use crate::sock::layout::heartbeat;

/// How long a call may wait.
#[derive(Clone, Copy, Debug)]
pub(super) enum WaitLimit {
    /// Do not wait.
    None,
    /// Up to this time.
    Within(Duration),
    /// As long as the host is alive.
    Unlimited,
}

impl WaitLimit {
    fn from_nanos(nanos: u64) -> Self {
        if nanos == 0 { Self::Unlimited } else { Self::Within(Duration::from_nanos(nanos)) }
    }
}

/// The last heartbeat seen, and when it changed.
struct HeartbeatWatch {
    heartbeat: Cell<u64>,
    since: Cell<Instant>,
}

impl Sockets<'_> {
    /// The wait limit of a call, from the timeout at offset `timeout` of the device state.
    pub(super) fn wait_limit(&self, socket_ref: SocketRef, timeout: u64) -> SockResult<WaitLimit> {
        let flags = self.block.load_u32(at(socket_ref.device_state + device_state::FLAGS))?;
        if flags & device_state::NON_BLOCKING != 0 {
            return Ok(WaitLimit::None);
        }
        Ok(WaitLimit::from_nanos(self.block.load_u64(at(socket_ref.device_state + timeout))?))
    }

    /// Calls `check` until it returns a value. On expiry: `EAGAIN` for non-blocking calls, else
    /// `ETIMEDOUT`; `ECONNABORTED` if the host is gone.
    pub(super) fn wait<T>(
        &self,
        wait_limit: WaitLimit,
        mut check: impl FnMut() -> SockResult<Option<T>>,
    ) -> SockResult<T> {
        if let Some(answer) = check()? {
            return Ok(answer);
        }
        if matches!(wait_limit, WaitLimit::None) {
            return Err(Errno::AGAIN.into());
        }
        let start = Instant::now();
        let watch =
            HeartbeatWatch { heartbeat: Cell::new(self.heartbeat()?), since: Cell::new(start) };
        let mut end = None;
        self.block.spin_until(|| {
            match check() {
                Ok(None) => {}
                Ok(Some(answer)) => end = Some(Ok(answer)),
                Err(failure) => end = Some(Err(failure)),
            }
            if end.is_some() {
                return Ok(true);
            }
            if let Err(failure) = self.check_host(&watch) {
                end = Some(Err(failure));
            } else if matches!(wait_limit, WaitLimit::Within(limit) if start.elapsed() >= limit) {
                end = Some(Err(Errno::TIMEDOUT.into()));
            }
            Ok(end.is_some())
        })?;
        end.unwrap_or(Err(SockError::Errno(Errno::TIMEDOUT)))
    }

    fn heartbeat(&self) -> SockResult<u64> {
        Ok(self.block.load_u64(at(self.heartbeat + heartbeat::COUNT))?)
    }

    /// `ECONNABORTED` if the host has ended.
    pub(super) fn check_open(&self) -> SockResult<()> {
        match self.block.load_u32(at(self.heartbeat + heartbeat::CLOSED))? {
            0 => Ok(()),
            _ => Err(Errno::CONNABORTED.into()),
        }
    }

    fn check_host(&self, watch: &HeartbeatWatch) -> SockResult<()> {
        self.check_open()?;
        let heartbeat = self.heartbeat()?;
        if heartbeat != watch.heartbeat.get() {
            watch.heartbeat.set(heartbeat);
            watch.since.set(Instant::now());
            return Ok(());
        }
        if watch.since.get().elapsed() > Duration::from_millis(u64::from(self.heartbeat_timeout_ms))
        {
            return Err(Errno::CONNABORTED.into());
        }
        Ok(())
    }

    /// Takes the lock of one direction; `None` if another block holds it, `EBADF` if the socket is
    /// closed.
    pub(super) fn try_lock(&self, socket_ref: SocketRef, lock: u64) -> SockResult<Option<()>> {
        let word = at(socket_ref.device_state + lock);
        match self.block.compare_exchange_u32(word, device_state::UNLOCKED, device_state::LOCKED)? {
            device_state::UNLOCKED => {}
            device_state::CLOSED => return Err(Errno::BADF.into()),
            _ => return Ok(None),
        }
        // The slot may have been reused for another socket in the meantime.
        let generation =
            self.block.load_u32(at(socket_ref.device_state + device_state::GENERATION))?;
        if generation != u32::from(socket_ref.generation) {
            self.unlock(socket_ref, lock)?;
            return Err(Errno::BADF.into());
        }
        Ok(Some(()))
    }

    pub(super) fn unlock(&self, socket_ref: SocketRef, lock: u64) -> SockResult<()> {
        Ok(self.block.store_u32(at(socket_ref.device_state + lock), device_state::UNLOCKED)?)
    }

    /// Runs `work` with the lock, which the caller has taken, and releases it.
    pub(super) fn with_lock<T>(
        &self,
        socket_ref: SocketRef,
        lock: u64,
        work: impl FnOnce() -> SockResult<T>,
    ) -> SockResult<T> {
        let outcome = work();
        self.unlock(socket_ref, lock)?;
        outcome
    }
}
