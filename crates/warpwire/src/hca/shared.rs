//! An engine as threads outside its lock see it: its lock, doorbells, waker and thread.
//!
//! Engines of one device share the registry, the queue of asynchronous events, and what never
//! changes. Each of these structures lies on cache lines of its own.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::time::Duration;

use warpwire_proto::Instant;

use super::doorbell_bitmap::DoorbellBitmap;
use super::engine::{Clock, Engine, StepSummary};
use super::mapped::{self, FastPath, ListPost, ListRegions, RangeList};
use super::numbers::{Numbering, qp_row};
use super::progress_mode::Waker;
use super::stats::IndirectReason;
use crate::error;
use crate::link;
use crate::mem::ListDescriptors;
use crate::sync::BiasedMutex;

/// An engine and what threads need that ring its doorbells, run it, or wait for it.
#[repr(align(128))]
pub(super) struct EngineShared {
    pub engine: BiasedMutex<Engine>,
    pub doorbell_bitmap: Arc<DoorbellBitmap>,
    pub waker: Arc<Waker>,
    pub clock: Clock,
    pub polled_doorbells: AtomicU32,
    /// Whether any queue pair has a peer whose memory it may access directly.
    pub has_direct_peers: Arc<AtomicBool>,
    /// Our memory that peers may access directly.
    pub export_table: Option<Arc<link::ExportTable>>,
    pub numbering: Numbering,
    /// The address of its link.
    pub local: SocketAddr,
}

impl Drop for EngineShared {
    fn drop(&mut self) {
        self.waker.stop();
        self.engine.get_mut().end();
    }
}

/// How long closing a queue pair waits for a direct access of its peer, which takes some 100 µs
/// unless the peer is stopped. Only deregistration promises that none is in progress.
const DRAIN_LIMIT: Duration = Duration::from_millis(20);

impl EngineShared {
    /// Waits for the peer's direct access through a queue pair that accepts no more, outside the
    /// engine's lock.
    pub(super) fn drain_peer(&self, qpn: u32) {
        if let Some(export_table) = &self.export_table
            && !export_table.wait_until_unused(qp_row(qpn) as usize, DRAIN_LIMIT)
        {
            tracing::debug!(qpn, "a peer that does not run is still accessing memory");
        }
    }

    pub(super) fn now(&self) -> Instant {
        self.clock.now()
    }

    pub(super) fn step(&self) -> error::Result<StepSummary> {
        let mut engine = self.engine.lock();
        engine.core.totals.steps += 1;
        engine.step(self.now())
    }

    /// How long the engine's thread may sleep: until the next deadline, at most `limit`, or
    /// `polling_limit` if doorbells are polled.
    pub(super) fn sleep_duration(&self, polling_limit: Duration, limit: Duration) -> Duration {
        let mut engine = self.engine.lock();
        engine.core.mapped.peers.sweep();
        // Asking for the descriptor arms links that signal only on request.
        let _ = engine.link().wait_fd();
        let now = self.now();
        let limit = match self.polled_doorbells.load(Ordering::Relaxed) {
            0 => limit,
            _ => polling_limit,
        };
        (engine.next_deadline(now) - now).min(limit)
    }

    /// See [`Hca::poll`](super::Hca::poll).
    #[inline]
    pub(super) fn poll(&self) -> error::Result<StepSummary> {
        Ok(self.try_step()?.unwrap_or_default())
    }

    /// Makes a step, in turn with a thread that makes one after the other; `None` if another thread
    /// has the engine for longer.
    pub(super) fn step_in_turn(&self) -> error::Result<Option<StepSummary>> {
        /// Some microseconds.
        const ATTEMPTS: u32 = 2000;
        for _ in 0..ATTEMPTS {
            if let Some(progress) = self.try_step()? {
                return Ok(Some(progress));
            }
            std::hint::spin_loop();
        }
        Ok(None)
    }

    /// Makes a step; `None` if another thread is making one.
    #[inline]
    pub(super) fn try_step(&self) -> error::Result<Option<StepSummary>> {
        let steps = &self.waker.poller_steps;
        let Some(mut engine) = self.engine.try_lock() else {
            steps.fetch_add(1, Ordering::Relaxed);
            return Ok(None);
        };
        // Observers look only for a change, so an increment lost to a thread that did not get the
        // lock does no harm.
        steps.store(steps.load(Ordering::Relaxed).wrapping_add(1), Ordering::Relaxed);
        engine.core.totals.steps += 1;
        let progress = engine.step(self.now());
        self.waker.on_poller_step();
        progress.map(Some)
    }

    /// See [`Hca::fast_path`](super::Hca::fast_path).
    #[inline]
    pub(super) fn fast_path(&self, qpn: u32) -> Option<FastPath<'_>> {
        if !self.has_direct_peers.load(Ordering::Relaxed) {
            return None;
        }
        let engine = self.engine.try_lock()?;
        Some(FastPath { engine, index: self.numbering.index(qpn), budget: mapped::QUANTUM })
    }

    /// See [`Hca::ring`](super::Hca::ring).
    #[inline]
    pub(super) fn ring(&self, qpn: u32) {
        let index = self.numbering.index(qpn);
        // Where a peer's memory is mapped, the poster executes most work itself if no other thread
        // is running the engine. It drains leftovers of earlier posts too: the inline fast path
        // requires an empty send queue.
        let quanta = if self.has_direct_peers.load(Ordering::Relaxed) {
            mapped::MAX_POSTER_QUANTA
        } else {
            0
        };
        for _ in 0..quanta {
            let Some(mut engine) = self.engine.try_lock() else { break };
            match engine.core.execute_posted(index) {
                mapped::Remaining::Nothing => return,
                mapped::Remaining::MoreQuanta => {}
                mapped::Remaining::Packets => {
                    engine.transmit_posted(self.now(), index);
                    break;
                }
                mapped::Remaining::NeedsEngine => break,
            }
        }
        self.request_service(index);
    }

    /// Lets the next step look at a queue pair.
    #[inline]
    fn request_service(&self, index: u32) {
        self.doorbell_bitmap.ring(index);
        self.waker.wake();
    }
}

impl EngineShared {
    /// The memory of a list, if the queue pair can execute the list now.
    fn list_regions(&self, qpn: u32, list: &RangeList) -> Result<ListRegions, ListPost> {
        if !self.has_direct_peers.load(Ordering::Relaxed) {
            return Err(ListPost::Refused);
        }
        let index = self.numbering.index(qpn);
        let found = self.engine.lock().core.list_regions(index, list);
        found.map_err(|why| match why {
            IndirectReason::MappingRequested => ListPost::Mapping,
            why => {
                tracing::trace!(?why, "a list is posted range by range");
                ListPost::Refused
            }
        })
    }
}

/// The engine of a queue pair, for threads that post to it. It keeps the engine's socket open, not
/// the device.
#[derive(Clone)]
pub(crate) struct EngineRef(pub(super) Arc<EngineShared>);

impl std::fmt::Debug for EngineRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EngineRef({})", self.0.local)
    }
}

impl EngineRef {
    /// The address that packets of its queue pairs come from and go to.
    pub(crate) fn local(&self) -> SocketAddr {
        self.0.local
    }

    /// See [`Hca::fast_path`](super::Hca::fast_path).
    #[inline]
    pub(crate) fn fast_path(&self, qpn: u32) -> Option<FastPath<'_>> {
        self.0.fast_path(qpn)
    }

    /// The descriptors of a list, if the queue pair can execute the list now.
    pub(crate) fn list_descriptors(
        &self,
        qpn: u32,
        list: &RangeList,
    ) -> Result<Arc<ListDescriptors>, ListPost> {
        // Made outside of the engine's lock.
        list.descriptors(&self.0.list_regions(qpn, list)?).ok_or(ListPost::Refused)
    }

    /// Whether the peer's memory of a list is being mapped; asks for it.
    pub(crate) fn is_mapping(&self, qpn: u32, list: &RangeList) -> bool {
        matches!(self.0.list_regions(qpn, list), Err(ListPost::Mapping))
    }

    /// Attaches a list to a NOP that is about to be posted at this index.
    pub(crate) fn attach_list(
        &self,
        qpn: u32,
        wqe_index: u64,
        list: &Arc<RangeList>,
        descriptors: Arc<ListDescriptors>,
    ) {
        let index = self.0.numbering.index(qpn);
        self.0.engine.lock().core.attach_list(index, wqe_index, list.clone(), descriptors);
    }

    /// See [`Hca::ring`](super::Hca::ring).
    #[inline]
    pub(crate) fn ring(&self, qpn: u32) {
        self.0.ring(qpn);
    }

    /// Receives were posted: a failed queue pair flushes them; a working one reads its queue when a
    /// message arrives.
    #[inline]
    pub(crate) fn ring_receives(&self, qpn: u32) {
        self.0.request_service(self.0.numbering.index(qpn));
    }
}
