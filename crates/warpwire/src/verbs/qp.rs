//! Queue pairs: creation, state transitions and posting.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use warpwire_proto::Psn;
use warpwire_proto::qp as protocol;
use warpwire_proto::qp::{Access, QpAttributes};

use super::bootstrap::QpEndpoint;
use super::direct_verbs::DirectVerbsQp;
use super::hard::{Hard, same_device};
use super::post::{Batch, BatchThread, SendBatch, SendRequest, SendState};
use super::queues::{DirectQueues, QueueAccess};
use super::wr_table::WrTable;
use super::{Context, Cq, Device, Mtu, PathAttributes, Pd, Service, SoftDevice, Srq, State};
use crate::error::{Error, Kind, Result};
use crate::hca::{
    EngineRef, ListPost, MAX_HELD_PAYLOAD, PrefetchHint, QpLayout, QpSpec, QueueMemory, RangeList,
};
use crate::mem::SharedBytes;
use crate::mlx5::{self, WQEBB_LEN};
use crate::sync::{BiasedMutex, random_u64};
use crate::work::{PostError, ReceiveRequest};

/// Attributes of a new queue pair, and of the connection that [`Qp::connect`] makes.
///
/// ```
/// use warpwire::verbs::QpOptions;
/// let options = QpOptions::default().with_send_depth(512).with_timeout(16);
/// assert_eq!((options.send_depth, options.mtu), (512, None));
/// ```
/// Like all options it is built with setters, so that a new field breaks no program:
/// ```compile_fail,E0639
/// # use warpwire::verbs::QpOptions;
/// let options = QpOptions { send_depth: 512, ..QpOptions::default() };
/// ```
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct QpOptions {
    /// Transport service: reliable connection (RC, the default), unreliable connection (UC: sends
    /// and writes, without acknowledgement) or unreliable datagram (UD).
    pub service: Service,
    /// Minimum number of outstanding sends (`max_send_wr`). Default: 128. The send queue holds at
    /// most 32768 WQEBBs of 64 bytes.
    pub send_depth: u32,
    /// Minimum number of outstanding receives (`max_recv_wr`), at most 32768. Default: 128. Unused
    /// with an SRQ.
    pub receive_depth: u32,
    /// Maximum number of scatter-gather entries of a send (`max_send_sge`). Default: 2.
    pub max_send_sge: u32,
    /// Maximum number of scatter-gather entries of a receive (`max_recv_sge`), up to 16. Default:
    /// 2.
    pub max_recv_sge: u32,
    /// Maximum number of inline bytes of a send (`max_inline_data`). Default: 64. Inline data is
    /// copied when it is posted and needs no memory region.
    pub max_inline_data: u32,
    /// Every send generates a completion (`sq_sig_all`). Default: true. If false, only sends with
    /// `SendRequest::signaled` do, and failed ones; unsignaled sends occupy the queue until a later
    /// completion is polled.
    pub signal_all: bool,
    /// Shared receive queue, used instead of a receive queue of its own. Default: none.
    pub srq: Option<Srq>,
    /// Hardware port, counted from 1. Default: the context's. Ignored by the software HCA.
    pub port: Option<u8>,
    /// Index into the GID table of the hardware port. Default: the context's. Ignored by the
    /// software HCA.
    pub gid_index: Option<u8>,
    /// Memory for the queues, such as pinned or device memory, of at least [`Qp::required_memory`]
    /// bytes. Default: host memory. Software HCA only.
    pub memory: Option<QueueMemory>,
    /// A stream or a kernel will ring the doorbell, so the engine must poll it. Default: false.
    /// Latency while the engine is idle: 1/32 of the idle time, clamped to 50 µs to 4 ms.
    /// Hardware: mlx5 only; the queue pair is driven with direct verbs and needs completion queues
    /// with [`manual_release`](super::CqOptions::manual_release).
    pub poll_doorbell: bool,
    /// Path MTU. Default: the maximum that the link and the peer support.
    pub mtu: Option<Mtu>,
    /// Remote access flags (`qp_access_flags`). Default: all.
    pub access: Access,
    /// Local ACK timeout: 4.096 µs · 2^n, 1 to 31; 0 waits forever. Default: 17 (0.54 s). The
    /// software HCA sends packets again sooner, by the round trips that it measures.
    pub timeout: u8,
    /// Retries without an answer before work fails with
    /// [`RetryExceeded`](crate::mlx5::Status::RetryExceeded), 0 to 7: the peer may be silent for
    /// `retry_count` + 1 timeouts. Default: 7 (4.3 s in all).
    pub retry_count: u8,
    /// Retries after an RNR NAK (the peer has no receive posted) before work fails with
    /// [`RnrRetryExceeded`](crate::mlx5::Status::RnrRetryExceeded), 0 to 6; 7 (the default) retries
    /// without limit.
    pub rnr_retry: u8,
    /// Minimum RNR NAK timer: the code of the delay that peers must observe after an RNR NAK.
    /// Default: 12 (0.64 ms). The software HCA doubles the delay with each NAK for one message.
    pub min_rnr_timer: u8,
    /// Maximum number of RDMA reads and atomics in flight, as initiator and as responder
    /// (`max_rd_atomic`, `max_dest_rd_atomic`). Default: 16; reduced to what hardware and the peer
    /// support.
    pub max_rd_atomic: u8,
    /// Tuning of the software HCA's requester: packet window, read chunking, line rate. Ignored by
    /// hardware.
    pub tuning: protocol::TransportOptions,
}

setters! {
    QpOptions {
        with_service => service: Service,
        with_send_depth => send_depth: u32,
        with_receive_depth => receive_depth: u32,
        with_max_send_sge => max_send_sge: u32,
        with_max_recv_sge => max_recv_sge: u32,
        with_max_inline_data => max_inline_data: u32,
        with_signal_all => signal_all: bool,
        with_poll_doorbell => poll_doorbell: bool,
        with_access => access: Access,
        with_timeout => timeout: u8,
        with_retry_count => retry_count: u8,
        with_rnr_retry => rnr_retry: u8,
        with_min_rnr_timer => min_rnr_timer: u8,
        with_max_rd_atomic => max_rd_atomic: u8,
        with_tuning => tuning: protocol::TransportOptions,
    } optional {
        with_srq => srq: Srq,
        with_port => port: u8,
        with_gid_index => gid_index: u8,
        with_memory => memory: QueueMemory,
        with_mtu => mtu: Mtu,
    }
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
            port: None,
            gid_index: None,
            memory: None,
            poll_doorbell: false,
            mtu: None,
            access: Access::ALL,
            timeout: 17,
            retry_count: 7,
            rnr_retry: 7,
            min_rnr_timer: 12,
            max_rd_atomic: 16,
            tuning: protocol::TransportOptions::default(),
        }
    }
}

/// Sizes of a queue pair's queues and their layout in memory.
struct Sizes {
    wqebbs: u32,
    receives: u32,
    stride: u32,
    layout: QpLayout,
    len: u64,
}

impl QpOptions {
    fn sizes(&self) -> Result<Sizes> {
        let wrong = |why: &str| {
            Error::new(Kind::InvalidArgument, "create a queue pair").why(why.to_owned())
        };
        // A UD address vector takes two segments more than the remote address of a write.
        let inline = match self.service {
            Service::Rc | Service::Uc => self.max_inline_data,
            Service::Ud => self.max_inline_data.saturating_add(2 * mlx5::SEGMENT_LEN as u32),
        };
        let wqebbs = mlx5::send_queue_wqebbs(self.send_depth.max(1), self.max_send_sge, inline)
            .filter(|wqebbs| *wqebbs <= mlx5::MAX_SEND_WQEBBS)
            .ok_or_else(|| {
                wrong("its send queue would have more than 32768 WQEBBs")
                    .fix("reduce send_depth, max_send_sge or inline")
            })?;
        let receives = self.receive_depth.clamp(1, 1 << 15).next_power_of_two();
        let stride = mlx5::receive_stride(self.max_recv_sge)
            .filter(|stride| *stride <= 256)
            .ok_or_else(|| wrong("max_recv_sge is more than 16"))?;
        if self.receive_depth > 1 << 15 {
            return Err(wrong("receive_depth is more than 32768"));
        }
        let receive_len = match self.srq {
            Some(_) => 0,
            None => u64::from(receives) * u64::from(stride),
        };
        let send = receive_len.next_multiple_of(WQEBB_LEN as u64);
        let dbrec = send + u64::from(wqebbs) * WQEBB_LEN as u64;
        // Doorbell record and doorbell on separate cache lines, to avoid false sharing.
        let doorbell = dbrec + 64;
        let layout = QpLayout { receive: 0, send, dbrec, doorbell };
        Ok(Sizes { wqebbs, receives, stride, layout, len: doorbell + 512 })
    }
}

/// A queue pair (`ibv_qp`): reliable or unreliable connected, or unreliable datagram. Clones refer
/// to the same queue pair; it is destroyed when the last one is dropped. Outstanding work then
/// never completes, and completions that were not polled are lost.
///
/// Any thread may use it. Sends execute in posting order. Posting is serialized by one lock for
/// sends and one for receives, which is nearly free while one thread posts.
#[derive(Clone, Debug)]
pub struct Qp(pub(super) Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    backend: Backend,
    context: Context,
    options: QpOptions,
    // Keeps the domain alive.
    _pd: Pd,
    cqs: [Cq; 2],
    batch_thread: BatchThread,
}

#[derive(Debug)]
enum Backend {
    Soft(Soft),
    Hard(Hard),
}

/// A queue pair of the software HCA.
#[derive(Debug)]
struct Soft {
    device: Arc<SoftDevice>,
    core: Arc<Core>,
    user_index: u32,
    /// Initial packet sequence number of the next connection.
    psn: AtomicU32,
}

/// State shared by posting and polling.
// Aligned so that it shares no cache line with that of another queue pair.
#[derive(Debug)]
#[repr(align(128))]
pub(crate) struct Core {
    pub number: u32,
    pub service: Service,
    /// The queue pair has reached `RTS`, or has failed since: sends may be posted.
    pub accepts_posts: AtomicBool,
    pub hca: crate::hca::Hca,
    pub engine: EngineRef,
    pub memory: QueueMemory,
    pub layout: QpLayout,
    pub wqebbs: u32,
    pub send: BiasedMutex<SendState>,
    pub wr_table: WrTable,
    /// Mapping of the last fast-path write's target, to prefetch the cache line of the next one.
    pub prefetch_hint: PrefetchHint,
    pub receive: BiasedMutex<()>,
    pub stride: u32,
    srq: Option<Srq>,
}

impl QueueAccess for Core {
    const IS_MMIO: bool = false;

    #[inline]
    fn number(&self) -> u32 {
        self.number
    }

    #[inline]
    fn wqebbs(&self) -> u32 {
        self.wqebbs
    }

    #[inline]
    fn send(&self) -> (SharedBytes<'_>, u64) {
        (self.memory.bytes(), self.layout.send)
    }

    #[inline]
    fn dbrec(&self) -> (SharedBytes<'_>, u64) {
        (self.memory.bytes(), self.layout.dbrec)
    }

    #[inline]
    fn doorbell(&self) -> (SharedBytes<'_>, u64) {
        (self.memory.bytes(), self.layout.doorbell)
    }

    #[inline]
    fn receive(&self) -> (SharedBytes<'_>, u64, u32) {
        (self.memory.bytes(), self.layout.receive, self.stride)
    }
}

impl Core {
    /// Its queues as separate slices.
    fn queues(&self) -> DirectQueues {
        let QpLayout { receive, send, dbrec, doorbell } = self.layout;
        let entries = if self.srq.is_some() { 0 } else { self.wr_table.recv_wr_ids.len() as u32 };
        let receives = u64::from(entries) * u64::from(self.stride);
        DirectQueues {
            number: self.number,
            send: self.memory.slice(send, u64::from(self.wqebbs) * WQEBB_LEN as u64),
            send_wqebbs: self.wqebbs,
            receive: (entries > 0).then(|| self.memory.slice(receive, receives)),
            receive_entries: entries,
            receive_stride: self.stride,
            dbrec: self.memory.slice(dbrec, 8),
            doorbell: self.memory.slice(doorbell, 512),
        }
    }

    /// Frees a completed receive; returns its work request id.
    pub(super) fn complete_receive(&self, counter: u16) -> u64 {
        match &self.srq {
            Some(srq) => srq.complete_receive(counter),
            None => self.wr_table.complete_receive(counter),
        }
    }

    fn clean(&self) -> Result<()> {
        let mut send = self.send.lock();
        let _receive = self.receive.lock();
        send.producer = 0;
        self.wr_table.clear();
        let bytes = self.memory.bytes();
        bytes.store_u64(self.layout.dbrec, 0)?;
        bytes.store_u64(self.layout.doorbell, 0)?;
        bytes.store_u64(self.layout.doorbell + mlx5::BLUEFLAME_BUFFER_LEN as u64, 0)
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let Backend::Soft(Soft { device, core, user_index, .. }) = &self.backend else { return };
        core.hca.destroy_qp(core.number);
        // Unpolled completions still refer to it.
        self.clean_cqs(core);
        // Before its user index is free for another one.
        self.cqs.iter().for_each(|cq| cq.remove_qp(*user_index));
        if let Some(used) = device.user_indices.lock().get_mut(*user_index as usize) {
            *used = false;
        }
    }
}

impl Inner {
    /// Drops unpolled completions; those of an SRQ free their slots.
    fn clean_cqs(&self, core: &Core) {
        let [sends, receives] = &self.cqs;
        sends.clean(core);
        if sends.number() != receives.number() {
            receives.clean(core);
        }
    }
}

impl Qp {
    /// Bytes of memory that the queues of a queue pair with these options need.
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if no queue pair can have these options.
    pub fn required_memory(options: &QpOptions) -> Result<u64> {
        Ok(options.sizes()?.len)
    }

    pub(super) fn create(
        context: &Context,
        pd: &Pd,
        send_cq: &Cq,
        receive_cq: &Cq,
        mut options: QpOptions,
    ) -> Result<Self> {
        same_device(context, [send_cq, receive_cq], options.srq.as_ref())?;
        let cqs = [send_cq.clone(), receive_cq.clone()];
        let batch_thread = BatchThread::default();
        let backend = match &context.0 {
            Device::Soft(device) => Backend::Soft(Soft::create(device, pd, &cqs, &options)?),
            Device::Hard(hardware) => {
                Backend::Hard(Hard::create(hardware, pd, &cqs, &mut options)?)
            }
        };
        let (context, _pd) = (context.clone(), pd.clone());
        Ok(Self(Arc::new(Inner { backend, context, options, _pd, cqs, batch_thread })))
    }

    /// Queue pair number, 24 bits; unique within its device.
    pub fn number(&self) -> u32 {
        match &self.0.backend {
            Backend::Soft(soft) => soft.core.number,
            Backend::Hard(hard) => hard.qp.number(),
        }
    }

    /// Current state, as the device has it. On hardware this is a system call (`ibv_query_qp`).
    pub fn state(&self) -> Result<State> {
        match &self.0.backend {
            Backend::Soft(soft) => soft.core.hca.qp_state(soft.core.number),
            Backend::Hard(hard) => hard.qp.state(),
        }
    }

    /// Memory of the queues and their offsets in it, for callers that post by other means. `None`
    /// on hardware: use [`direct_queues`](Self::direct_queues).
    pub fn queues(&self) -> Option<(&QueueMemory, QpLayout)> {
        self.soft_core().map(|core| (&core.memory, core.layout))
    }

    /// Offsets in the memory of the queues.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] on hardware.
    pub(crate) fn soft_layout(&self) -> Result<QpLayout> {
        let core = self.soft_core().ok_or_else(|| super::soft_only("access the queues' memory"))?;
        Ok(core.layout)
    }

    /// The mapped queues in ConnectX format, of the software HCA or an mlx5 device. A caller that
    /// posts there must be the only one: see [`Poster`](super::Poster).
    ///
    /// # Errors
    /// [`Kind::Unsupported`] on other devices; [`Kind::Unavailable`] if libmlx5 is not installed.
    pub fn direct_queues(&self) -> Result<DirectQueues> {
        match &self.0.backend {
            Backend::Soft(soft) => Ok(soft.core.queues()),
            Backend::Hard(Hard { direct_verbs: Some(pair), .. }) => Ok(pair.queues.clone()),
            Backend::Hard(hard) => Ok(DirectQueues::from_mlx5dv(hard.qp.mlx5dv()?)),
        }
    }

    /// Packet and error counters of this queue pair.
    ///
    /// # Errors
    /// [`Kind::Unsupported`] on hardware, which has counters per port only.
    pub fn stats(&self) -> Result<protocol::Stats> {
        match &self.0.backend {
            Backend::Soft(soft) => soft.core.hca.qp_stats(soft.core.number),
            Backend::Hard(_) => {
                Err(Error::new(Kind::Unsupported, "read the counters of a queue pair")
                    .why("hardware has counters per port only")
                    .fix("read /sys/class/infiniband/*/ports/*/hw_counters"))
            }
        }
    }

    /// The path of its work, and why: the link, and whether a peer on this machine allows direct
    /// access; or device, port and GID.
    pub fn path(&self) -> Result<crate::link::LinkPath> {
        match &self.0.backend {
            Backend::Soft(soft) => soft.core.hca.qp_path(soft.core.number),
            Backend::Hard(hard) => Ok(hard.path()),
        }
    }

    /// Connection data for the peer's [`connect`](Self::connect). The PSN changes with each reset.
    pub fn endpoint(&self) -> QpEndpoint {
        let options = &self.0.options;
        let soft = match &self.0.backend {
            Backend::Soft(soft) => soft,
            Backend::Hard(hard) => return hard.endpoint(options),
        };
        let context = &self.0.context;
        let mtu = options.mtu.unwrap_or_else(|| context.max_mtu());
        // Each engine of a device has an address of its own.
        let address = soft.core.engine.local();
        QpEndpoint {
            address,
            source_port: address.port(),
            qpn: self.number(),
            psn: soft.psn.load(Ordering::Relaxed),
            mtu: mtu.bytes(),
            mtu_on_host: options.mtu.unwrap_or_else(|| context.max_mtu_on_host()).bytes(),
            max_rd_atomic: options.max_rd_atomic,
            lid: 0,
            gid: 0,
            selective_repeat: true,
        }
    }

    /// Transport service.
    pub fn service(&self) -> Service {
        self.0.options.service
    }

    /// Moves a UD queue pair from `RESET` through `INIT` and `RTR` to `RTS`. It receives messages
    /// that carry `qkey`.
    ///
    /// # Errors
    /// As for [`modify`](Self::modify).
    pub fn activate_ud(&self, qkey: u32) -> Result<()> {
        let init = self.init_attr().with_access(None).with_qkey(qkey);
        let psn = Psn::new(self.endpoint().psn);
        self.modify(&init)?;
        self.modify(&QpAttributes::new(State::Rtr))?;
        self.modify(&QpAttributes::new(State::Rts).with_send_psn(psn))
    }

    /// Moves an RC or UC queue pair from `RESET` through `INIT` and `RTR` to `RTS`, connected to
    /// `peer`. The peer must connect too: with RC before the retries of the first request are used
    /// up, with UC before the first message, which is lost otherwise.
    ///
    /// # Errors
    /// As for [`modify`](Self::modify) and [`rtr_attr`](Self::rtr_attr). On hardware also if the
    /// peer's address does not resolve. On failure the queue pair stays in the last state reached.
    pub fn connect(&self, peer: &QpEndpoint) -> Result<()> {
        self.modify(&self.init_attr())?;
        let rtr_attr = self.rtr_attr(peer)?;
        match &self.0.backend {
            Backend::Soft(_) => self.modify(&rtr_attr)?,
            Backend::Hard(hard) => hard.modify_to_rtr(&rtr_attr, peer)?,
        }
        self.modify(&self.rts_attr(peer))
    }

    /// Attributes for the transition to `INIT`, from the options.
    pub fn init_attr(&self) -> QpAttributes {
        QpAttributes::new(State::Init)
            .with_partition_index(0)
            .with_port(match &self.0.backend {
                Backend::Soft(_) => 1,
                Backend::Hard(hard) => hard.local_port.port,
            })
            .with_access(self.0.options.access)
    }

    /// Attributes for the transition to `RTR`, connected to `peer`, with the
    /// [path MTU](QpEndpoint::path_mtu) of both; RC with selective repeat if both ends support it
    /// and packets are not longer than RoCE's.
    ///
    /// # Errors
    /// [`Kind::Malformed`] if the peer's MTU is not a valid one.
    pub fn rtr_attr(&self, peer: &QpEndpoint) -> Result<QpAttributes> {
        let own = self.endpoint();
        let mtu = own.path_mtu(peer);
        let mtu = Mtu::new(mtu).ok_or_else(|| {
            Error::new(Kind::Malformed, format!("connect queue pair {:#x}", self.number()))
                .why(format!("the peer offers an MTU of {mtu} bytes"))
                .fix("offer 256, 512, 1024, 2048 or 4096")
        })?;
        let flow_label = (own.qpn ^ peer.qpn) & 0xf_ffff;
        let path = PathAttributes {
            peer: peer.address,
            traffic_class: 0,
            hop_limit: 64,
            flow_label,
            source_port: (peer.source_port != 0).then_some(peer.source_port),
        };
        let rtr_attr = QpAttributes::new(State::Rtr)
            .with_path(path)
            .with_mtu(mtu)
            .with_destination(peer.qpn)
            .with_receive_psn(Psn::new(peer.psn));
        if self.service() == Service::Uc {
            return Ok(rtr_attr);
        }
        let selective = own.selective_repeat && peer.selective_repeat;
        Ok(rtr_attr
            .with_selective_repeat((selective && mtu.bytes() <= MAX_HELD_PAYLOAD).then_some(true))
            .with_max_dest_rd_atomic(self.0.options.max_rd_atomic)
            .with_min_rnr_timer(self.0.options.min_rnr_timer))
    }

    /// Attributes for the transition to `RTS`.
    pub fn rts_attr(&self, peer: &QpEndpoint) -> QpAttributes {
        let options = &self.0.options;
        let rts_attr = QpAttributes::new(State::Rts).with_send_psn(Psn::new(self.endpoint().psn));
        if options.service == Service::Uc {
            return rts_attr;
        }
        rts_attr
            .with_timeout(options.timeout)
            .with_retry_count(options.retry_count)
            .with_rnr_retry(options.rnr_retry)
            .with_max_rd_atomic(options.max_rd_atomic.min(peer.max_rd_atomic))
    }

    /// Changes state or attributes (`ibv_modify_qp`). A rejected change has no effect.
    ///
    /// A transition to `RESET` empties the queues, drops unpolled completions and chooses a new
    /// PSN. `ERR` flushes outstanding work with [`Flushed`](crate::mlx5::Status::Flushed).
    ///
    /// # Errors
    /// [`Kind::InvalidArgument`] if the transition or its attributes are invalid in the current
    /// state: the text names them.
    pub fn modify(&self, change: &QpAttributes) -> Result<()> {
        match &self.0.backend {
            Backend::Soft(soft) => soft.modify(&self.0, change),
            Backend::Hard(hard) => hard.modify(change, None),
        }
    }

    /// State shared by posting and polling; `None` on hardware.
    pub(super) fn soft_core(&self) -> Option<&Core> {
        match &self.0.backend {
            Backend::Soft(soft) => Some(&soft.core),
            Backend::Hard(_) => None,
        }
    }

    /// The mapped queues, if it is driven with direct verbs.
    pub(super) fn direct_verbs(&self) -> Option<&DirectVerbsQp> {
        match &self.0.backend {
            Backend::Soft(_) => None,
            Backend::Hard(hard) => hard.direct_verbs.as_deref(),
        }
    }

    /// Checks that hardware accepts sends; the software HCA checks when it is posted to.
    pub(super) fn check_hardware_state(&self) -> Result<(), PostError> {
        match &self.0.backend {
            Backend::Soft(_) => Ok(()),
            Backend::Hard(hard) => hard.check_state(),
        }
    }

    /// Starts a batch, which collects requests for one doorbell. It holds the lock of the send
    /// queue until it is posted or dropped; see [`Batch`] for what that means.
    ///
    /// # Errors
    /// [`PostError::BatchHeld`] if the calling thread has a batch of this queue pair.
    pub fn batch(&self) -> Result<Batch<'_>, PostError> {
        let thread = &self.0.batch_thread;
        thread.check()?;
        Ok(match &self.0.backend {
            Backend::Soft(soft) => Batch::soft(&soft.core, thread),
            Backend::Hard(hard) => Batch::hard(hard, thread),
        })
    }

    /// Posts a list of writes or reads as one signaled work request, if both ends are memory of one
    /// GPU and the peer's is mapped.
    ///
    /// # Errors
    /// Those of [`post_send`](Self::post_send).
    pub(crate) fn post_list(&self, id: u64, list: &Arc<RangeList>) -> Result<ListPost, PostError> {
        self.0.batch_thread.check()?;
        match &self.0.backend {
            Backend::Soft(soft) => SendBatch::new(&soft.core).post_list(id, list),
            Backend::Hard(_) => Ok(ListPost::Refused),
        }
    }

    /// Whether the peer's memory of a list is being mapped; asks for it.
    pub(crate) fn is_mapping(&self, list: &RangeList) -> bool {
        match &self.0.backend {
            Backend::Soft(soft) => soft.core.engine.is_mapping(soft.core.number, list),
            Backend::Hard(_) => false,
        }
    }

    /// Posts all requests, or none (`ibv_post_send`), with one doorbell. They execute in this
    /// order.
    ///
    /// Buffers must stay valid, and unchanged, until the completion; inline data is copied. Stores
    /// that happen before this call are visible to the device. RDMA writes to a peer whose memory
    /// is mapped may have been executed when it returns (fast path).
    ///
    /// # Errors
    /// [`PostError::Full`] if the send queue has no room for all: poll completions first.
    /// [`PostError::BatchHeld`] if the calling thread holds a [`Batch`] of this queue pair.
    /// [`PostError::NotReady`] if the queue pair is not yet in `RTS`. Other variants if a request
    /// is malformed or does not fit the service.
    pub fn post_send(&self, requests: &[SendRequest<'_>]) -> Result<(), PostError> {
        self.0.batch_thread.check()?;
        let core = match &self.0.backend {
            Backend::Soft(soft) => &soft.core,
            Backend::Hard(hard) => return hard.post(requests),
        };
        let mut batch = SendBatch::with(core, requests);
        let done = batch.try_fast_path(requests);
        for request in &requests[done..] {
            batch.push(request)?;
        }
        batch.post();
        Ok(())
    }

    /// Posts all receives, or none (`ibv_post_recv`). Messages consume them in this order. Buffers
    /// must stay valid until the completion.
    ///
    /// # Errors
    /// [`PostError::Full`] if the receive queue is full. [`PostError::TooManySge`] if a receive has
    /// too many scatter-gather entries; [`PostError::Invalid`] if the queue pair uses an SRQ.
    pub fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<(), PostError> {
        let core = match &self.0.backend {
            Backend::Soft(soft) => &soft.core,
            Backend::Hard(hard) => return hard.post_receive(requests),
        };
        if core.srq.is_some() {
            return Err(PostError::USES_SRQ);
        }
        super::receive::post(core, requests)
    }
}

impl Soft {
    fn create(
        device: &Arc<SoftDevice>,
        pd: &Pd,
        cqs: &[Cq; 2],
        options: &QpOptions,
    ) -> Result<Self> {
        let pd = pd.soft()?.id();
        let Sizes { wqebbs, receives, stride, layout, len } = options.sizes()?;
        let memory = match &options.memory {
            Some(memory) => memory.clone(),
            None => QueueMemory::host(len)?,
        };
        memory.bytes().fill(0, len, &[0])?;
        let mut user_indices = device.user_indices.lock();
        let free = user_indices.iter().position(|used| !used);
        let user_index = free.unwrap_or(user_indices.len());
        let datagrams = match options.service {
            Service::Rc | Service::Uc => None,
            Service::Ud => Some(options.mtu.unwrap_or_else(|| device.max_mtu())),
        };
        let number = device.hca.create_qp(QpSpec {
            memory: memory.clone(),
            layout,
            send_wqebbs: wqebbs,
            receive_entries: receives,
            receive_stride: stride,
            send_cq: cqs[0].number(),
            receive_cq: cqs[1].number(),
            srq: options.srq.as_ref().map(Srq::number),
            pd,
            signal_all: options.signal_all,
            user_index: user_index as u32,
            poll_doorbell: options.poll_doorbell,
            options: options.tuning,
            datagrams,
            is_unreliable: options.service == Service::Uc,
        })?;
        let core = Arc::new(Core {
            number,
            service: options.service,
            accepts_posts: AtomicBool::new(false),
            engine: device.hca.engine_ref(number)?,
            hca: device.hca.clone(),
            memory,
            layout,
            wqebbs,
            send: BiasedMutex::new(SendState::default()),
            wr_table: WrTable::new(wqebbs, receives),
            prefetch_hint: PrefetchHint::default(),
            receive: BiasedMutex::new(()),
            stride,
            srq: options.srq.clone(),
        });
        if user_index == user_indices.len() {
            user_indices.push(false);
        }
        user_indices[user_index] = true;
        drop(user_indices);
        for cq in cqs {
            cq.add_qp(user_index as u32, &core, device.hca.engine_set(number));
        }
        let (device, psn) = (device.clone(), random_psn().into());
        Ok(Self { device, core, user_index: user_index as u32, psn })
    }

    fn modify(&self, handle: &Inner, change: &QpAttributes) -> Result<()> {
        let core = &self.core;
        let state = core.hca.qp_state(core.number)?;
        let is_reset = change.to == State::Reset && change.check(core.service, state).is_ok();
        if is_reset {
            core.accepts_posts.store(false, Ordering::Relaxed);
            // Before the device resets its counters: it must find the queues empty.
            core.clean()?;
        }
        core.hca.modify_qp(core.number, change)?;
        let accepts_posts = !matches!(change.to, State::Reset | State::Init | State::Rtr);
        core.accepts_posts.store(accepts_posts, Ordering::Relaxed);
        if is_reset {
            handle.clean_cqs(core);
            self.psn.store(random_psn(), Ordering::Relaxed);
        }
        Ok(())
    }
}

/// An initial packet sequence number that differs between connections, so that late packets of an
/// old one are not taken for new ones, and that strangers cannot guess.
fn random_psn() -> u32 {
    (random_u64() >> 40) as u32
}
