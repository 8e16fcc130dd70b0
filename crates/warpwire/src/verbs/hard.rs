//! Hardware queue pairs, through libibverbs or direct verbs.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use warpwire_proto::qp::{Mtu, QpAttributes, State};

use super::bootstrap::QpEndpoint;
use super::direct_verbs::{DirectVerbsBatch, DirectVerbsQp};
use super::hardware::{Hardware, LocalPort};
use super::post::SendRequest;
use super::queues::DirectQueues;
use super::{Context, Cq, Pd, QpOptions, Srq};
use crate::error::{Error, Kind, Result};
use crate::work::{PostError, PostResult, ReceiveRequest};
use crate::{ibv, link};

/// A hardware queue pair.
#[derive(Debug)]
pub(super) struct Hard {
    pub(super) qp: ibv::Qp,
    pub(super) local_port: LocalPort,
    /// The queue pair has reached `RTS`, or has failed since: sends may be posted.
    accepts_posts: AtomicBool,
    /// Set if the queue pair is driven with direct verbs.
    pub(super) direct_verbs: Option<Arc<DirectVerbsQp>>,
    name: String,
}

/// Attempts to resolve the peer's address: the first ARP request or neighbour solicitation may be
/// lost, or time out in the kernel.
const MAX_RESOLVE_ATTEMPTS: u32 = 4;

impl Hard {
    pub(super) fn create(
        hardware: &Hardware,
        pd: &Pd,
        cqs: &[Cq; 2],
        options: &mut QpOptions,
    ) -> Result<Self> {
        let name = hardware.context.device().name.clone();
        if options.memory.is_some() {
            return Err(Error::new(Kind::Unsupported, "create a queue pair")
                .on(name)
                .why("its provider allocates the memory of the queues")
                .fix("omit QpOptions::memory, or use the software HCA"));
        }
        let local_port = hardware.endpoint(options.port, options.gid_index)?;
        let (Some(sends), Some(receives)) = (cqs[0].hardware(), cqs[1].hardware()) else {
            return Err(wrong_context());
        };
        let attributes = hardware.context.attributes()?;
        let max = attributes.max_rd_atomic.min(attributes.max_dest_rd_atomic);
        // The endpoint carries this limit, so peers issue no more than the device supports.
        options.max_rd_atomic = options.max_rd_atomic.min(u8::try_from(max).unwrap_or(u8::MAX));
        let qp = pd.hardware()?.create_qp(
            sends,
            receives,
            ibv::QpOptions {
                service: options.service,
                send_depth: options.send_depth.max(1),
                receive_depth: options.receive_depth.max(1),
                max_send_sge: options.max_send_sge,
                max_recv_sge: options.max_recv_sge,
                max_inline_data: options.max_inline_data,
                signal_all: options.signal_all,
                srq: options.srq.as_ref().and_then(Srq::hardware).cloned(),
                port: local_port.port,
                gid_index: local_port.gid_index,
                mtu: options.mtu,
                access: options.access,
                timeout: options.timeout,
                retry_count: options.retry_count,
                rnr_retry: options.rnr_retry,
                min_rnr_timer: options.min_rnr_timer,
                max_rd_atomic: options.max_rd_atomic,
                use_direct_verbs: options.poll_doorbell
                    || cqs.iter().any(|cq| cq.direct_verbs().is_some()),
            },
        )?;
        let direct_verbs = direct_verbs(&qp, cqs, options.poll_doorbell)?;
        let accepts_posts = AtomicBool::new(false);
        Ok(Self { qp, local_port, accepts_posts, direct_verbs, name })
    }

    pub(super) fn path(&self) -> link::LinkPath {
        let LocalPort { port, gid_index, address, .. } = self.local_port;
        let why = format!("{}, port {port}, GID {gid_index}", self.name);
        link::LinkPath { kind: link::LinkKind::Hardware, local: address, why }
    }

    pub(super) fn endpoint(&self, options: &QpOptions) -> QpEndpoint {
        let LocalPort { address, gid, lid, mtu, .. } = self.local_port;
        QpEndpoint {
            address,
            source_port: 0,
            qpn: self.qp.number(),
            psn: self.qp.psn(),
            mtu: options.mtu.map_or(mtu, Mtu::bytes),
            mtu_on_host: 0,
            max_rd_atomic: options.max_rd_atomic,
            lid,
            // On Ethernet the GID is the IP address.
            gid: if lid == 0 { 0 } else { u128::from_be_bytes(gid) },
            selective_repeat: false,
        }
    }

    /// Modifies to `RTR`, connected to `peer`; retries while the address does not resolve.
    pub(super) fn modify_to_rtr(&self, rtr_attr: &QpAttributes, peer: &QpEndpoint) -> Result<()> {
        let mut route = ibv::AhAttributes {
            lid: peer.lid,
            ..ibv::AhAttributes::to(
                peer.address.ip(),
                self.local_port.port,
                self.local_port.gid_index,
            )
        };
        if peer.lid != 0 {
            route.gid = peer.gid.to_be_bytes();
        }
        if let Some(path) = &rtr_attr.path {
            (route.traffic_class, route.hop_limit) = (path.traffic_class, path.hop_limit);
            route.flow_label = path.flow_label;
        }
        let is_unresolved = |done: &Result<()>| {
            done.as_ref().is_err_and(|error| error.reason().contains("no reply to ARP"))
        };
        let mut done = self.modify(rtr_attr, Some(&route));
        for _ in 1..MAX_RESOLVE_ATTEMPTS {
            if is_unresolved(&done) {
                done = self.modify(rtr_attr, Some(&route));
            }
        }
        done
    }

    pub(super) fn modify(
        &self,
        change: &QpAttributes,
        route: Option<&ibv::AhAttributes>,
    ) -> Result<()> {
        if change.to == State::Reset {
            self.accepts_posts.store(false, Ordering::Relaxed);
        }
        self.qp.modify(change, route)?;
        if let Some(direct_qp) = self.direct_verbs.as_ref().filter(|_| change.to == State::Reset) {
            direct_qp.reset();
        }
        let accepts_posts = !matches!(change.to, State::Reset | State::Init | State::Rtr);
        self.accepts_posts.store(accepts_posts, Ordering::Relaxed);
        Ok(())
    }

    /// Checks that sends may be posted: providers accept work in any state and then ignore it.
    #[inline]
    pub(super) fn check_state(&self) -> PostResult {
        if self.accepts_posts.load(Ordering::Relaxed) {
            return Ok(());
        }
        match self.qp.state().map_err(|error| PostError::device(&error))? {
            state @ (State::Reset | State::Init | State::Rtr) => Err(PostError::NotReady(state)),
            _ => {
                self.accepts_posts.store(true, Ordering::Relaxed);
                Ok(())
            }
        }
    }

    /// Posts all requests or none.
    #[inline]
    pub(super) fn post(&self, requests: &[SendRequest<'_>]) -> PostResult {
        if requests.is_empty() {
            return Ok(());
        }
        self.check_state()?;
        let Some(direct_qp) = &self.direct_verbs else { return self.qp.post_all(requests) };
        let mut batch = direct_qp.begin();
        requests.iter().try_for_each(|request| batch.push(request))?;
        batch.post();
        Ok(())
    }

    /// Posts all receives or none.
    #[inline]
    pub(super) fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> PostResult {
        match &self.direct_verbs {
            Some(direct_qp) => direct_qp.post_receive(requests),
            None => self.qp.post_all_receives(requests),
        }
    }

    pub(super) fn batch(&self) -> HardBatch<'_> {
        let batch = match &self.direct_verbs {
            Some(direct_qp) => HardBatchKind::DirectVerbsQp(direct_qp.begin()),
            None => HardBatchKind::Provider(self.qp.batch()),
        };
        HardBatch { hard: self, batch }
    }
}

/// Maps the queues for direct verbs, if the options or the CQs ask for it.
fn direct_verbs(
    qp: &ibv::Qp,
    cqs: &[Cq; 2],
    poll_doorbell: bool,
) -> Result<Option<Arc<DirectVerbsQp>>> {
    let direct_cqs = cqs.each_ref().map(Cq::direct_verbs);
    if !poll_doorbell && direct_cqs.iter().all(Option::is_none) {
        return Ok(None);
    }
    let [Some(sends), Some(receives)] = direct_cqs else {
        return Err(Error::new(Kind::InvalidArgument, "create a queue pair for direct verbs")
            .why("one of its completion queues does not use direct verbs")
            .fix("create both with CqOptions::manual_release"));
    };
    let direct_qp = Arc::new(DirectVerbsQp::new(DirectQueues::from_mlx5dv(qp.mlx5dv()?)));
    sends.attach(&direct_qp);
    if !std::ptr::eq(sends, receives) {
        receives.attach(&direct_qp);
    }
    Ok(Some(direct_qp))
}

/// Work requests for hardware, not yet posted.
#[derive(Debug)]
pub(super) struct HardBatch<'q> {
    hard: &'q Hard,
    batch: HardBatchKind<'q>,
}

#[derive(Debug)]
enum HardBatchKind<'q> {
    Provider(ibv::Batch<'q>),
    DirectVerbsQp(DirectVerbsBatch<'q>),
}

impl HardBatch<'_> {
    pub(super) fn push(&mut self, request: &SendRequest<'_>) -> PostResult {
        self.hard.check_state()?;
        match &mut self.batch {
            HardBatchKind::Provider(batch) => batch.push(request),
            HardBatchKind::DirectVerbsQp(batch) => batch.push(request),
        }
    }

    pub(super) fn post(self) {
        match self.batch {
            HardBatchKind::Provider(batch) => batch.post_or_fail(),
            HardBatchKind::DirectVerbsQp(batch) => batch.post(),
        }
    }
}

/// Checks that the queues belong to the same kind of device as the context.
pub(super) fn same_device(context: &Context, cqs: [&Cq; 2], srq: Option<&Srq>) -> Result<()> {
    let hardware = context.device().is_some();
    let same = cqs.iter().all(|cq| cq.hardware().is_some() == hardware)
        && srq.is_none_or(|srq| srq.hardware().is_some() == hardware);
    if same { Ok(()) } else { Err(wrong_context()) }
}

#[cold]
fn wrong_context() -> Error {
    Error::new(Kind::InvalidArgument, "create a queue pair")
        .why("one of its queues belongs to another context")
        .fix("create all of them from one context")
}
