//! Queue pairs of libibverbs, RC and UD.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use parking_lot::{Mutex, MutexGuard};

use warpwire_proto::Psn;
use warpwire_proto::qp::{self as protocol, Access, Mtu, QpAttributes, Service, State};

use super::address::{AhAttributes, AsAddressHandle};
use super::cq::{Cq, unsupported};
use super::device::{PortState, mtu_of};
use super::explain::Attempt;
use super::library::{Raw, call, create, created, destroy};
use super::memory::Pd;
use super::mlx5dv::mlx5dv_create_qp;
use super::post::{self, PartialPost, PendingBatch, QpCaps, SendQueue};
use super::srq::Srq;
use super::wr_ids::{QueueEntry, RingAllocator, WrIdAllocator};
use super::{Context, sys};
use crate::error::{Error, Kind, Result};
use crate::mlx5::Status;
use crate::work::{self, Completion, CompletionKind, PostError, PostResult, ReceiveRequest};

/// Attributes of a new queue pair, and of the connection that [`Qp::connect`] makes.
#[derive(Clone, Debug)]
pub struct QpOptions {
    /// Transport service: reliable connection (RC, the default) or unreliable datagram (UD).
    pub service: Service,
    /// Minimum number of outstanding sends (`max_send_wr`). Default: 128.
    pub send_depth: u32,
    /// Minimum number of outstanding receives (`max_recv_wr`). Default: 128. Unused with an SRQ.
    pub receive_depth: u32,
    /// Maximum number of scatter-gather entries of a send (`max_send_sge`). Default: 2.
    pub max_send_sge: u32,
    /// Maximum number of scatter-gather entries of a receive (`max_recv_sge`). Default: 2.
    pub max_recv_sge: u32,
    /// Maximum number of inline bytes of a send (`max_inline_data`). Default: 64.
    pub max_inline_data: u32,
    /// Every send generates a completion (`sq_sig_all`). Default: true.
    pub signal_all: bool,
    /// Shared receive queue, used instead of a receive queue of its own. Default: none.
    pub srq: Option<Srq>,
    /// Local port, counted from 1. Default: 1.
    pub port: u8,
    /// Index into the port's GID table, which [`Context::gids`] lists. Default: 0.
    pub gid_index: u8,
    /// Path MTU. Default: the smaller of the port's active MTU and the peer's.
    pub mtu: Option<Mtu>,
    /// Remote access flags (`qp_access_flags`). Default: all.
    pub access: Access,
    /// Local ACK timeout: 4.096 µs · 2^n, 1 to 31; 0 waits forever. Default: 14 (67 ms).
    pub timeout: u8,
    /// Retransmissions without an answer before work fails, 0 to 7. Default: 7.
    pub retry_count: u8,
    /// Retries after an RNR NAK, 0 to 6; 7 (the default) retries without limit.
    pub rnr_retry: u8,
    /// Minimum RNR NAK timer: the code of the delay that peers must observe. Default: 1 (10 µs).
    pub min_rnr_timer: u8,
    /// Maximum number of RDMA reads and atomics in flight, as initiator and as responder. Default:
    /// 16.
    pub max_rd_atomic: u8,
    /// The queues will be driven with direct verbs, on an mlx5 device: see [`Qp::mlx5dv`]. Disables
    /// scatter-to-CQE. Default: false.
    pub use_direct_verbs: bool,
}

impl Default for QpOptions {
    fn default() -> Self {
        Self {
            service: Service::Rc,
            send_depth: 128,
            receive_depth: 128,
            max_send_sge: 2,
            max_recv_sge: 2,
            max_inline_data: 64,
            signal_all: true,
            srq: None,
            port: 1,
            gid_index: 0,
            mtu: None,
            access: Access::ALL,
            timeout: 14,
            retry_count: 7,
            rnr_retry: 7,
            min_rnr_timer: 1,
            max_rd_atomic: 16,
            use_direct_verbs: false,
        }
    }
}

/// Connection data of a queue pair, for its peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IbvEndpoint {
    /// GID of its port.
    pub gid: [u8; 16],
    /// LID of its port; 0 on Ethernet.
    pub lid: u16,
    /// Queue pair number, 24 bits.
    pub qpn: u32,
    /// Packet sequence number of its first request, 24 bits.
    pub psn: u32,
    /// Maximum path MTU in bytes.
    pub mtu: u32,
    /// Maximum number of RDMA reads and atomics that it executes at a time.
    pub max_rd_atomic: u8,
}

/// A queue pair (`ibv_qp`). Clones refer to the same one; it is destroyed when the last is dropped.
#[derive(Clone, Debug)]
pub struct Qp(Arc<QpInner>);

#[derive(Debug)]
struct QpInner {
    raw: Raw<sys::Qp>,
    post_send: sys::PostSend,
    post_receive: sys::PostRecv,
    caps: QpCaps,
    options: QpOptions,
    /// Initial packet sequence number of the next connection.
    psn: AtomicU32,
    queue_entry: Arc<QueueEntry>,
    pending_batch: Mutex<PendingBatch>,
    /// Keeps the domain and the completion queues alive.
    pd: Pd,
    cqs: [Cq; 2],
}

impl Drop for QpInner {
    fn drop(&mut self) {
        self.discard_completions();
        destroy!(self.pd.0.context.library, destroy_qp(self.raw.ptr()));
        self.pd.0.context.staging_table.discard(self.queue_entry.wr_ids());
        // Later completions no longer resolve.
        self.pd.0.context.wr_ids.remove(&self.queue_entry);
    }
}

impl QpInner {
    fn number(&self) -> u32 {
        // SAFETY: the library's object lives as long as this, and its number does not change.
        unsafe { (*self.raw.ptr()).qp_num }
    }

    /// With an SRQ: drops unpolled completions, which frees their SRQ slots.
    fn discard_completions(&self) {
        if self.options.srq.is_some() {
            self.cqs[1].discard(self.number());
        }
    }

    fn send_queue(&self) -> SendQueue<'_> {
        let (post, qp) = (self.post_send, self.raw.ptr());
        SendQueue { post, qp, pd: &self.pd, caps: &self.caps }
    }
}

impl Pd {
    /// Creates a queue pair in `RESET` (`ibv_create_qp`). Completions of sends go to `send_cq`,
    /// those of receives to `receive_cq`; both may be the same queue.
    ///
    /// # Errors
    /// If the device's limits are exceeded, or a queue belongs to another device.
    pub fn create_qp(&self, send_cq: &Cq, receive_cq: &Cq, options: QpOptions) -> Result<Qp> {
        let (pd, context) = (&self.0, &self.0.context);
        let shared = options.srq.as_ref().map(|srq| &srq.0);
        let wrong_context = shared.is_some_and(|srq| srq.pd.context.raw.ptr() != context.raw.ptr());
        if wrong_context || !send_cq.belongs_to(context) || !receive_cq.belongs_to(context) {
            return Err(Error::new(Kind::InvalidArgument, "create a queue pair")
                .on(context.device.name.clone())
                .why("one of its queues belongs to another context")
                .fix("create all of them from one context"));
        }
        // SAFETY: the device is open; its operations table does not change after that.
        let ops = unsafe { &(*context.raw.ptr()).ops };
        let (Some(post_send), Some(post_receive)) = (ops.post_send, ops.post_recv) else {
            return Err(unsupported(context, "queue pairs"));
        };
        let qp_type = match options.service {
            Service::Rc => sys::QPT_RC,
            Service::Uc => sys::QPT_UC,
            Service::Ud => sys::QPT_UD,
        };
        let mut init = sys::QpInitAttr {
            qp_context: std::ptr::null_mut(),
            send_cq: send_cq.0.raw.ptr(),
            recv_cq: receive_cq.0.raw.ptr(),
            srq: shared.map_or(std::ptr::null_mut(), |srq| srq.raw.ptr()),
            cap: sys::QpCap {
                max_send_wr: options.send_depth,
                max_recv_wr: if shared.is_some() { 0 } else { options.receive_depth },
                max_send_sge: options.max_send_sge,
                max_recv_sge: if shared.is_some() { 0 } else { options.max_recv_sge },
                max_inline_data: options.max_inline_data,
            },
            qp_type: qp_type as i32,
            sq_sig_all: i32::from(options.signal_all),
        };
        let raw = match options.use_direct_verbs {
            true => created(mlx5dv_create_qp(pd, &mut init)?, Attempt::CreateQp),
            false => {
                create!(context.library, Attempt::CreateQp, create_qp(pd.raw.ptr(), &mut init))
            }
        }?;
        let caps = QpCaps {
            service: options.service,
            max_send_sge: init.cap.max_send_sge,
            max_recv_sge: init.cap.max_recv_sge,
            max_inline_data: init.cap.max_inline_data,
        };
        let depths = [
            init.cap.max_send_wr.max(options.send_depth),
            init.cap.max_recv_wr.max(options.receive_depth),
        ];
        let queue_entry = context.wr_ids.add_qp(depths, shared.is_none());
        let queue_entry =
            queue_entry.inspect_err(|_| destroy!(context.library, destroy_qp(raw.ptr())))?;
        // SAFETY: just created.
        let psn = random_psn(unsafe { (*raw.ptr()).qp_num }).into();
        let cqs = [send_cq.clone(), receive_cq.clone()];
        let pending_batch = Mutex::default();
        let pd = self.clone();
        Ok(Qp(Arc::new(QpInner {
            raw,
            post_send,
            post_receive,
            caps,
            options,
            psn,
            queue_entry,
            pending_batch,
            pd,
            cqs,
        })))
    }
}

/// An initial packet sequence number that differs between connections.
fn random_psn(number: u32) -> u32 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let seed = now.map_or(0, |since| since.as_nanos() as u64) ^ u64::from(number) << 40;
    (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u32
}

impl Qp {
    /// Queue pair number, 24 bits.
    pub fn number(&self) -> u32 {
        self.0.number()
    }

    /// Maximum number of inline bytes of a send: at least what was asked for.
    pub fn max_inline_data(&self) -> u32 {
        self.0.caps.max_inline_data
    }

    /// Packet sequence number of its first request; changes with each reset.
    pub fn psn(&self) -> u32 {
        self.0.psn.load(Ordering::Relaxed)
    }

    pub(super) fn raw(&self) -> *mut sys::Qp {
        self.0.raw.ptr()
    }

    /// Its protection domain.
    pub fn pd(&self) -> &Pd {
        &self.0.pd
    }

    /// Current state, as the device has it: a system call (`ibv_query_qp`).
    pub fn state(&self) -> Result<State> {
        // SAFETY: plain numbers and pointers, which may be zero.
        let (mut attr, mut init): (sys::QpAttr, sys::QpInitAttr) = unsafe { std::mem::zeroed() };
        let (inner, mask) = (&*self.0, sys::QP_STATE as i32);
        let library = inner.pd.0.context.library;
        call!(library, Attempt::QueryQp, query_qp(inner.raw.ptr(), &mut attr, mask, &mut init))?;
        Ok(match u32::try_from(attr.qp_state).unwrap_or(sys::QPS_ERR) {
            sys::QPS_RESET => State::Reset,
            sys::QPS_INIT => State::Init,
            sys::QPS_RTR => State::Rtr,
            sys::QPS_RTS => State::Rts,
            sys::QPS_SQD => State::Sqd,
            sys::QPS_SQE => State::Sqe,
            _ => State::Err,
        })
    }

    /// Connection data for the peer's [`connect`](Self::connect).
    ///
    /// # Errors
    /// If its port is not active, or has no such GID.
    pub fn endpoint(&self) -> Result<IbvEndpoint> {
        let inner = &*self.0;
        let options = &inner.options;
        let context = Context(inner.pd.0.context.clone());
        let port = context.port(options.port)?;
        let gid = match port.lid {
            0 => context.gid(options.port, options.gid_index.into())?.bytes,
            _ => {
                context.gid(options.port, options.gid_index.into()).map_or([0; 16], |gid| gid.bytes)
            }
        };
        let mtu = options.mtu.map_or(port.active_mtu, Mtu::bytes);
        let (qpn, psn) = (self.number(), inner.psn.load(Ordering::Relaxed));
        Ok(IbvEndpoint { gid, lid: port.lid, qpn, psn, mtu, max_rd_atomic: options.max_rd_atomic })
    }

    /// Moves an RC queue pair from `RESET` through `INIT` and `RTR` to `RTS`, connected to `peer`.
    ///
    /// # Errors
    /// [`Kind::Malformed`] if the peer's MTU is not a valid one; else as for
    /// [`modify`](Self::modify).
    pub fn connect(&self, peer: &IbvEndpoint) -> Result<()> {
        let own = self.endpoint()?;
        let options = &self.0.options;
        let mtu =
            Mtu::new(own.mtu.min(peer.mtu)).filter(|mtu| mtu.bytes() <= 4096).ok_or_else(|| {
                Error::new(Kind::Malformed, format!("connect queue pair {:#x}", self.number()))
                    .why(format!("the peer offers an MTU of {} bytes", peer.mtu))
                    .fix("offer 256, 512, 1024, 2048 or 4096")
            })?;
        self.modify(&self.init_attr(), None)?;
        let route = AhAttributes {
            gid: peer.gid,
            lid: peer.lid,
            flow_label: (own.qpn ^ peer.qpn) & 0xf_ffff,
            ..AhAttributes::to([0, 0, 0, 0].into(), options.port, options.gid_index)
        };
        let rtr_attr = QpAttributes::new(State::Rtr)
            .with_mtu(mtu)
            .with_destination(peer.qpn)
            .with_receive_psn(Psn::new(peer.psn))
            .with_max_dest_rd_atomic(options.max_rd_atomic)
            .with_min_rnr_timer(options.min_rnr_timer);
        self.modify(&rtr_attr, Some(&route))?;
        let rts_attr = QpAttributes::new(State::Rts)
            .with_send_psn(Psn::new(own.psn))
            .with_timeout(options.timeout)
            .with_retry_count(options.retry_count)
            .with_rnr_retry(options.rnr_retry)
            .with_max_rd_atomic(options.max_rd_atomic.min(peer.max_rd_atomic));
        self.modify(&rts_attr, None)
    }

    /// Moves a UD queue pair from `RESET` through `INIT` and `RTR` to `RTS`. It receives messages
    /// that carry `qkey`.
    pub fn activate_ud(&self, qkey: u32) -> Result<()> {
        let init = self.init_attr().with_access(None).with_qkey(qkey);
        self.modify(&init, None)?;
        self.modify(&QpAttributes::new(State::Rtr), None)?;
        self.modify(
            &QpAttributes::new(State::Rts)
                .with_send_psn(Psn::new(self.0.psn.load(Ordering::Relaxed))),
            None,
        )
    }

    /// Attributes for the transition to `INIT`, from the options.
    pub fn init_attr(&self) -> QpAttributes {
        QpAttributes::new(State::Init)
            .with_partition_index(0)
            .with_port(self.0.options.port)
            .with_access(self.0.options.access)
    }

    /// Changes state or attributes (`ibv_modify_qp`). The peer is at `route` or, without one, at
    /// the IP address of the change's path, reached from the port and GID of the options. A
    /// transition to `RESET` empties the queues and chooses a new PSN.
    ///
    /// # Errors
    /// If the transition is invalid (the text names what is missing), the port is not active, the
    /// GID does not exist, or the peer's address does not resolve.
    pub fn modify(&self, change: &QpAttributes, route: Option<&AhAttributes>) -> Result<()> {
        let inner = &*self.0;
        let options = &inner.options;
        let from_path = change
            .path
            .as_ref()
            .map(|path| AhAttributes::from_path(path, options.port, options.gid_index));
        let route = route.copied().or(from_path);
        self.check_transition(change, route.as_ref())?;
        let (mut attr, mask) = attributes(change, route.as_ref());
        let attempt = Attempt::Modify(change.to);
        let library = inner.pd.0.context.library;
        let done = call!(library, attempt, modify_qp(inner.raw.ptr(), &mut attr, mask as i32));
        done.map_err(|error| self.explain_modify_error(error, change, route.as_ref()))?;
        if change.to == State::Reset {
            inner.discard_completions();
            inner.pd.0.context.staging_table.discard(inner.queue_entry.wr_ids());
            inner.queue_entry.reset();
            inner.psn.store(random_psn(self.number()), Ordering::Relaxed);
        }
        Ok(())
    }

    /// Replaces the device's error by a more specific one, if port or GID are unusable.
    #[cold]
    fn explain_modify_error(
        &self,
        error: Error,
        change: &QpAttributes,
        route: Option<&AhAttributes>,
    ) -> Error {
        let context = Context(self.0.pd.0.context.clone());
        if let Some(route) = route {
            let usable = context.gid(route.port, route.gid_index.into());
            let on_infiniband = context
                .port(route.port)
                .is_ok_and(|port| port.state == PortState::Active && port.lid != 0);
            if let Err(better) = usable
                && !on_infiniband
            {
                return better.during(format!(
                    "move queue pair {:#x} to {}",
                    self.number(),
                    change.to
                ));
            }
        }
        error
    }

    /// Checks the transition: providers check some attributes and ignore others.
    fn check_transition(&self, change: &QpAttributes, route: Option<&AhAttributes>) -> Result<()> {
        // The state table knows one port, one partition, and a path in place of a route.
        let as_listed = (*change)
            .with_port(change.port.map(|_| 1))
            .with_partition_index(change.partition_index.map(|_| 0))
            .with_path(change.path.or(route.map(|_| protocol::PathAttributes {
                peer: ([0, 0, 0, 0], 0).into(),
                traffic_class: 0,
                hop_limit: 0,
                flow_label: 0,
                source_port: None,
            })));
        as_listed.check(self.0.options.service, self.state()?).map_err(|refused| {
            let what = format!("move queue pair {:#x} to {}", self.number(), change.to);
            Error::new(Kind::InvalidArgument, what)
                .why(refused.to_string())
                .fix("go through RESET, INIT, RTR and RTS in order, with the attributes of each")
        })
    }

    /// Posts requests in order (`ibv_post_send`). Allocates nothing.
    ///
    /// # Errors
    /// [`PartialPost::posted`] requests were posted before the failure.
    #[inline]
    pub fn post_send<A: AsAddressHandle>(
        &self,
        requests: &[work::SendRequest<'_, A>],
    ) -> std::result::Result<(), PartialPost> {
        let inner = &*self.0;
        inner.send_queue().send(&mut inner.queue_entry.alloc_send(), requests)
    }

    /// Posts all requests or none, unless the device rejects a request that passed all checks.
    ///
    /// # Errors
    /// [`PostError::Full`] if the queue has no room for all of them.
    #[inline]
    pub fn post_all<A: AsAddressHandle>(
        &self,
        requests: &[work::SendRequest<'_, A>],
    ) -> PostResult {
        let inner = &*self.0;
        let (send_queue, mut allocator) = (inner.send_queue(), inner.queue_entry.alloc_send());
        // A single request is posted or not: nothing to check.
        if requests.len() > 1 {
            send_queue.check(allocator.room(), requests)?;
        }
        send_queue.send(&mut allocator, requests).map_err(|refused| refused.error)
    }

    /// Starts a batch of requests. It holds the lock of the send queue until it is posted or
    /// dropped: other threads that post wait, and the same thread deadlocks.
    pub fn batch(&self) -> Batch<'_> {
        let inner = &*self.0;
        let allocator = inner.queue_entry.alloc_send();
        Batch { inner, allocator, pending_batch: inner.pending_batch.lock() }
    }

    /// Posts receives in order (`ibv_post_recv`). Allocates nothing.
    ///
    /// # Errors
    /// [`PartialPost::posted`] receives were posted before the failure.
    #[inline]
    pub fn post_receive(
        &self,
        requests: &[ReceiveRequest<'_>],
    ) -> std::result::Result<(), PartialPost> {
        let inner = &*self.0;
        if inner.options.srq.is_some() {
            return Err(PartialPost { posted: 0, error: PostError::USES_SRQ });
        }
        self.receive(requests, &mut inner.queue_entry.alloc_receive())
    }

    /// Posts all receives or none.
    ///
    /// # Errors
    /// [`PostError::Full`] if the queue has no room for all of them.
    pub fn post_all_receives(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        let inner = &*self.0;
        if inner.options.srq.is_some() {
            return Err(PostError::USES_SRQ);
        }
        let mut allocator = inner.queue_entry.alloc_receive();
        post::check_receives(requests, inner.caps.max_recv_sge, allocator.room())?;
        self.receive(requests, &mut allocator).map_err(|refused| refused.error)
    }

    fn receive(
        &self,
        requests: &[ReceiveRequest<'_>],
        allocator: &mut impl WrIdAllocator,
    ) -> std::result::Result<(), PartialPost> {
        let inner = &*self.0;
        let staging_table = &inner.pd.0.context.staging_table;
        post::receive(
            requests,
            inner.caps.max_recv_sge,
            (allocator, staging_table),
            |first, bad| {
                // SAFETY: the queue pair is alive, and so is the chain until the call returns.
                unsafe { (inner.post_receive)(inner.raw.ptr(), first, bad) }
            },
        )
    }
}

/// Requests being collected. The device sees none of them before [`Batch::post`]; dropping the
/// batch discards them.
#[must_use = "nothing happens until the batch is posted"]
#[derive(Debug)]
pub struct Batch<'q> {
    inner: &'q QpInner,
    allocator: RingAllocator<'q>,
    pending_batch: MutexGuard<'q, PendingBatch>,
}

impl Drop for Batch<'_> {
    fn drop(&mut self) {
        self.pending_batch.clear();
    }
}

impl Batch<'_> {
    /// Adds a request. The scatter-gather list and inline data are copied.
    ///
    /// # Errors
    /// [`PostError::Full`] if the queue is full: post the batch and poll completions.
    pub fn push<A: AsAddressHandle>(&mut self, request: &work::SendRequest<'_, A>) -> PostResult {
        self.pending_batch.push(&self.inner.send_queue(), &mut self.allocator, request)
    }

    /// Posts all requests.
    ///
    /// # Errors
    /// [`PartialPost::posted`] requests were posted, if the device rejects one that passed all
    /// checks.
    pub fn post(mut self) -> std::result::Result<(), PartialPost> {
        self.pending_batch.post(&self.inner.send_queue(), &mut self.allocator)
    }

    /// Posts all requests. Those that the device rejects complete with
    /// [`Status::LocalQpOperation`].
    pub fn post_or_fail(mut self) {
        let Err(refused) = self.pending_batch.post(&self.inner.send_queue(), &mut self.allocator)
        else {
            return;
        };
        tracing::warn!(%refused, "the device rejected work that passed all checks");
        let number = self.inner.number();
        let completed = self.pending_batch.wr_ids_from(refused.posted).map(|id| Completion {
            id,
            status: Status::LocalQpOperation,
            kind: CompletionKind::SendFailed,
            qpn: number,
            ..Completion::EMPTY
        });
        self.inner.cqs[0].push_backlog(completed);
    }
}

/// Converts a change to `ibv_qp_attr` and its attribute mask.
fn attributes(change: &QpAttributes, route: Option<&AhAttributes>) -> (sys::QpAttr, u32) {
    // SAFETY: plain numbers, which may be zero.
    let mut attr: sys::QpAttr = unsafe { std::mem::zeroed() };
    attr.qp_state = state_number(change.to) as i32;
    let mut mask = sys::QP_STATE;
    macro_rules! put {
        ($($value:expr => $field:ident, $flag:ident;)*) => {
            $(if let Some(value) = $value {
                attr.$field = value;
                mask |= sys::$flag;
            })*
        };
    }
    put! {
        change.current_state.map(|state| state_number(state) as i32) => cur_qp_state, QP_CUR_STATE;
        change.partition_index => pkey_index, QP_PKEY_INDEX;
        change.port => port_num, QP_PORT;
        change.access.map(access_flags) => qp_access_flags, QP_ACCESS_FLAGS;
        change.qkey => qkey, QP_QKEY;
        route.map(AhAttributes::attributes) => ah_attr, QP_AV;
        change.mtu.map(mtu_code) => path_mtu, QP_PATH_MTU;
        change.destination => dest_qp_num, QP_DEST_QPN;
        change.receive_psn.map(Psn::value) => rq_psn, QP_RQ_PSN;
        change.max_dest_rd_atomic => max_dest_rd_atomic, QP_MAX_DEST_RD_ATOMIC;
        change.min_rnr_timer => min_rnr_timer, QP_MIN_RNR_TIMER;
        change.send_psn.map(Psn::value) => sq_psn, QP_SQ_PSN;
        change.timeout => timeout, QP_TIMEOUT;
        change.retry_count => retry_cnt, QP_RETRY_CNT;
        change.rnr_retry => rnr_retry, QP_RNR_RETRY;
        change.max_rd_atomic => max_rd_atomic, QP_MAX_QP_RD_ATOMIC;
        change.notify_drained.map(u8::from) => en_sqd_async_notify, QP_EN_SQD_ASYNC_NOTIFY;
    }
    (attr, mask)
}

fn state_number(state: State) -> u32 {
    match state {
        State::Reset => sys::QPS_RESET,
        State::Init => sys::QPS_INIT,
        State::Rtr => sys::QPS_RTR,
        State::Rts => sys::QPS_RTS,
        State::Sqd => sys::QPS_SQD,
        State::Sqe => sys::QPS_SQE,
        State::Err => sys::QPS_ERR,
    }
}

fn access_flags(access: Access) -> u32 {
    const FLAGS: [(Access, u32); 3] = [
        (Access::REMOTE_WRITE, sys::ACCESS_REMOTE_WRITE),
        (Access::REMOTE_READ, sys::ACCESS_REMOTE_READ),
        (Access::REMOTE_ATOMIC, sys::ACCESS_REMOTE_ATOMIC),
    ];
    FLAGS.iter().filter(|(right, _)| access.contains(*right)).fold(0, |all, (_, flag)| all | flag)
}

/// The `ibv_mtu` code; MTUs beyond verbs' become 0, which every device rejects.
fn mtu_code(mtu: Mtu) -> i32 {
    (sys::MTU_256 as i32..=sys::MTU_4096 as i32)
        .find(|code| mtu_of(*code) == Some(mtu))
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_set_only_the_given_fields() {
        let (attr, mask) = attributes(&QpAttributes::new(State::Err), None);
        assert_eq!((attr.qp_state, mask), (6, 1));
        let change = QpAttributes::new(State::Rtr)
            .with_mtu(Mtu::new(1024))
            .with_destination(0x1234)
            .with_receive_psn(Psn::new(7))
            .with_access(Access::REMOTE_READ);
        let route = AhAttributes::to([10, 0, 0, 1].into(), 2, 3);
        let (attr, mask) = attributes(&change, Some(&route));
        assert_eq!(
            (attr.qp_state, attr.path_mtu, attr.dest_qp_num, attr.rq_psn),
            (2, 3, 0x1234, 7)
        );
        assert_eq!(
            (attr.ah_attr.port_num, attr.ah_attr.grh.sgid_index, attr.qp_access_flags),
            (2, 3, 4)
        );
        assert_eq!(mask, 1 | 1 << 3 | 1 << 7 | 1 << 8 | 1 << 12 | 1 << 20);
    }

    #[test]
    fn only_verbs_mtus_have_a_code() {
        let codes = Mtu::ALL.map(mtu_code);
        assert_eq!(codes, [1, 2, 3, 4, 5]);
        assert_eq!(mtu_code(Mtu::new(65_536).unwrap()), 0);
    }
}
