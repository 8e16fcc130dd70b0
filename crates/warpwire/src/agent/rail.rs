//! A device of an agent: its completion queue, and the receives that notifications arrive in.

use std::net::SocketAddr;

use parking_lot::Mutex;

use super::inbox::FRAGMENT_LEN;
use super::options::AgentOptions;
use crate::error::{Error, Kind, Result};
use crate::mr::HostMemory;
use crate::verbs::{
    Access, Completion, Context, Cq, Mr, Pd, Qp, QpOptions, ReceiveRequest, Sge, Srq, SrqOptions,
};

/// Receives for fragments of notifications.
const RECEIVES: u32 = 512;
/// Entries of a completion queue that cannot grow, where the device allows it.
const FIXED_ENTRIES: u32 = 1 << 16;
/// Completions that one poll takes.
const POLL_BATCH: usize = 64;

pub(super) struct Rail {
    pub context: Context,
    pub pd: Pd,
    pub cq: Cq,
    /// Its length, if it cannot grow: on hardware.
    fixed_entries: Option<u32>,
    srq: Srq,
    fragments: HostMemory,
    mr: Mr,
    /// Held by the thread that polls. Completions are taken here, and receives not yet posted again
    /// because too many notifications wait.
    pub polling: Mutex<Polling>,
    /// Queue pairs that exist.
    qps: Mutex<u32>,
}

pub(super) struct Polling {
    pub completions: Box<[Completion; POLL_BATCH]>,
    pub withheld: Vec<u64>,
}

impl Rail {
    pub(super) fn open(context: Context) -> Result<Self> {
        let pd = context.alloc_pd();
        let fixed_entries = match context.device() {
            Some(device) => Some(device.attributes()?.max_cq_entries.min(FIXED_ENTRIES)),
            None => None,
        };
        let cq = context.create_cq(fixed_entries.unwrap_or(2 * RECEIVES))?;
        let srq = context.create_srq(&pd, SrqOptions::default().with_depth(RECEIVES))?;
        let fragments = HostMemory::new(u64::from(RECEIVES) * FRAGMENT_LEN as u64)?;
        let mr = context.register(&pd, fragments.clone(), Access::LOCAL_WRITE)?;
        let polling = Polling {
            completions: Box::new([Completion::EMPTY; POLL_BATCH]),
            withheld: Vec::new(),
        };
        let qps = Mutex::new(0);
        let polling = Mutex::new(polling);
        let rail = Self { context, pd, cq, fixed_entries, srq, fragments, mr, polling, qps };
        (0..u64::from(RECEIVES)).try_for_each(|slot| rail.post_receive(slot))?;
        Ok(rail)
    }

    /// The address that peers send to.
    pub(super) fn address(&self) -> Result<SocketAddr> {
        let one = QpOptions::default().with_send_depth(1).with_receive_depth(1);
        Ok(self.context.create_qp(&self.pd, &self.cq, &self.cq, one)?.endpoint().address)
    }

    /// Creates a queue pair for a connection, with room for its completions: all of its work
    /// completes when it fails.
    pub(super) fn create_qp(&self, options: &AgentOptions) -> Result<Qp> {
        let mut qps = self.qps.lock();
        let entries = RECEIVES + (*qps + 1) * options.send_depth;
        match self.fixed_entries {
            None => self.cq.resize(entries)?,
            Some(fixed) if entries > fixed => {
                return Err(Error::new(Kind::OutOfMemory, "create a queue pair for a peer")
                    .why(format!("the completion queue has room for {qps} of them"))
                    .fix("remove peers, or reduce queue_pairs or send_depth"));
            }
            Some(_) => {}
        }
        *qps += 1;
        drop(qps);
        let attributes = QpOptions::default()
            .with_send_depth(options.send_depth)
            .with_receive_depth(1)
            .with_max_send_sge(1)
            .with_max_inline_data(FRAGMENT_LEN as u32)
            .with_signal_all(false)
            .with_srq(self.srq.clone());
        self.context.create_qp(&self.pd, &self.cq, &self.cq, attributes)
    }

    /// The queue pairs of a connection have been destroyed.
    pub(super) fn destroyed_qps(&self, count: u32) {
        let mut qps = self.qps.lock();
        *qps = qps.saturating_sub(count);
    }

    /// Lets the next fragment arrive in this slot.
    pub(super) fn post_receive(&self, slot: u64) -> Result<()> {
        let data = [Sge {
            address: self.mr.iova() + slot * FRAGMENT_LEN as u64,
            len: FRAGMENT_LEN as u32,
            lkey: self.mr.lkey(),
        }];
        Ok(self.srq.post_receive(&[ReceiveRequest { id: slot, data: &data }])?)
    }

    /// Copies a fragment out of its slot.
    pub(super) fn read_fragment(&self, slot: u64, into: &mut [u8]) -> Result<()> {
        self.fragments.bytes().read(slot * FRAGMENT_LEN as u64, into)
    }
}
