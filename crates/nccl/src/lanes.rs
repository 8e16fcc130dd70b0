//! The queue pairs of a connection: one per engine of the device.

use warpwire::verbs::{
    Access, Completion, Context, Cq, Mr, Pd, Qp, QpEndpoint, QpOptions, Remote, SendRequest, WrOp,
};

use crate::devices::{self, Device};
use crate::result::{Failure, REMOTE, Result};

/// Queue pairs of a connection, at most.
pub(crate) const MAX_LANES: usize = 8;
/// The peer may be silent for (1 + 7) · 2.1 s before its connection counts as lost.
const TIMEOUT: u8 = 19;
/// Completions taken at a time.
pub(crate) const POLL_BATCH: usize = 16;
/// Work request id of a heartbeat.
pub(crate) const HEARTBEAT: u64 = u64::MAX;

/// A queue pair and its completion queue.
pub(crate) struct Lane {
    pub qp: Qp,
    pub cq: Cq,
    pub pd: Pd,
    pub context: Context,
}

pub(crate) struct Lanes {
    lanes: Vec<Lane>,
    /// Engines have threads of their own: calls of NCCL's need not run them.
    is_threaded: bool,
}

impl Lanes {
    /// Creates a queue pair on each engine; `depth` is the number of outstanding work requests.
    pub(crate) fn create(device: &Device, depth: u32) -> Result<Self> {
        let (settings, _) = devices::all()?;
        let lanes = device.engines()?.iter().take(MAX_LANES);
        let lanes = lanes.map(|context| Lane::create(context, depth));
        Ok(Self { lanes: lanes.collect::<Result<_>>()?, is_threaded: settings.is_threaded() })
    }

    pub(crate) fn endpoints(&self) -> Vec<QpEndpoint> {
        self.lanes.iter().map(|lane| lane.qp.endpoint()).collect()
    }

    /// Connects to the peer's queue pairs; those that it does not have are dropped.
    ///
    /// # Errors
    /// If the peer offers none or too many, or one that cannot be connected to.
    pub(crate) fn connect(&mut self, peers: &[QpEndpoint]) -> Result {
        if peers.is_empty() || peers.len() > self.lanes.len() {
            let (count, own) = (peers.len(), self.lanes.len());
            let text = format!("the peer has {count} queue pairs for the {own} of this end");
            return Err(Failure::new(REMOTE, text));
        }
        self.lanes.truncate(peers.len());
        for (lane, peer) in self.lanes.iter().zip(peers) {
            lane.qp.connect(peer)?;
        }
        Ok(())
    }

    #[inline]
    pub(crate) fn len(&self) -> usize {
        self.lanes.len()
    }

    #[inline]
    pub(crate) fn get(&self, lane: usize) -> Option<&Lane> {
        self.lanes.get(lane)
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &Lane> {
        self.lanes.iter()
    }

    /// How packets of this connection travel, for people.
    pub(crate) fn describe(&self) -> String {
        let path = self.lanes.first().and_then(|lane| lane.qp.path().ok());
        let kind = path.map(|path| path.kind.to_string()).unwrap_or_default();
        format!("{} queue pairs ({kind})", self.lanes.len())
    }

    /// Polls the lanes on which work is outstanding, and, where engines have no threads, runs all
    /// of them. `on_completion` gets each completion.
    ///
    /// # Errors
    /// If a link has failed, or `on_completion` says so.
    #[inline]
    pub(crate) fn progress(
        &self,
        outstanding: &mut [u32; MAX_LANES],
        mut on_completion: impl FnMut(&Completion) -> Result,
    ) -> Result {
        for (lane, outstanding) in self.lanes.iter().zip(outstanding) {
            let mut found = [Completion::EMPTY; POLL_BATCH];
            let count = match self.is_threaded {
                true if *outstanding == 0 => continue,
                true => lane.cq.poll_ready(&mut found)?,
                false => lane.cq.poll(&mut found)?,
            };
            for completion in &found[..count] {
                *outstanding = outstanding.saturating_sub(1);
                on_completion(completion)?;
            }
        }
        Ok(())
    }

    /// Posts a write of no bytes on the first lane, which fails if the peer does not answer. Not
    /// posted if the queue is full: what fills it is answered or fails as well.
    pub(crate) fn post_heartbeat(&self, remote: Remote, outstanding: &mut [u32; MAX_LANES]) {
        let beat = SendRequest::new(HEARTBEAT, WrOp::Write(remote));
        if let Some(lane) = self.lanes.first()
            && lane.qp.post_send(&[beat]).is_ok()
        {
            outstanding[0] += 1;
        }
    }
}

impl Lane {
    fn create(context: &Context, depth: u32) -> Result<Self> {
        let (pd, cq) = (context.alloc_pd(), context.create_cq(depth)?);
        let qp = context.create_qp(&pd, &cq, &cq, qp_options(depth, Access::REMOTE_WRITE))?;
        Ok(Self { qp, cq, pd, context: context.clone() })
    }
}

/// A queue pair for one-sided operations of one scatter-gather entry each.
pub(crate) fn qp_options(depth: u32, access: Access) -> QpOptions {
    QpOptions::default()
        .with_send_depth(depth)
        .with_receive_depth(1)
        .with_max_send_sge(1)
        .with_max_inline_data(8)
        .with_signal_all(false)
        .with_timeout(TIMEOUT)
        .with_access(access)
}

/// The text for a completion that failed.
#[cold]
pub(crate) fn failed(completion: &Completion) -> Failure {
    let text = format!("the connection has failed: {:?}", completion.status);
    Failure::new(REMOTE, text)
}

/// The remote address of byte 0 of a memory region, for each lane.
pub(crate) fn remotes(regions: &[Mr]) -> Vec<Remote> {
    regions.iter().map(|region| region.remote(0)).collect()
}
