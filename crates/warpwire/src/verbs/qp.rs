//! Queue pairs, as programs use them.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use warpwire_proto::qp as protocol;
use warpwire_proto::{Psn, qp::QpAttributes};

use super::bootstrap::QpEndpoint;
use super::direct_verbs::DirectVerbsQp;
use super::hard::{Hard, same_device};
use super::post::{Batch, SendBatch, SendRequest, SendState};
use super::queues::{DirectQueues, QueueAccess};
use super::wr_table::WrTable;
use super::{Context, Cq, Device, Mtu, PathAttributes, Pd, Service, Srq, State};
use crate::error::{Error, Kind, Result};
use crate::hca::{PrefetchHint, QpLayout, QpSpec, QueueMemory};
use crate::mem::SharedBytes;
use crate::mlx5::{self, WQEBB_LEN};
use crate::sync::BiasedMutex;
use crate::work::ReceiveRequest;

/// How a queue pair is made and connected.
#[derive(Clone, Debug)]
pub struct QpOptions {
    /// What it is for: a connection, or datagrams.
    pub service: Service,
    /// How many work requests the send queue has room for, at least.
    pub send_depth: u32,
    /// How many receives, at least; not used with a shared queue.
    pub receive_depth: u32,
    /// How many ranges of memory a work request may name.
    pub max_send_sge: u32,
    /// How many ranges a receive may name.
    pub max_recv_sge: u32,
    /// How many bytes a work request may carry in itself.
    pub inline: u32,
    /// Whether every work request makes a completion.
    pub signal_all: bool,
    /// The shared receive queue that takes the place of its own.
    pub srq: Option<Srq>,
    /// The port of hardware that it uses, the first is 1; by default the context's. The software HCA has one.
    pub port: Option<u8>,
    /// Which of the port's addresses hardware uses; by default the context's. The software HCA has one.
    pub gid_index: Option<u8>,
    /// Memory of another sort than the host's for its queues: at least [`Qp::required_memory`] these options. Not for hardware.
    pub memory: Option<QueueMemory>,
    /// A stream or a kernel will ring its doorbell. A thread of the device that has gone to sleep sees it within a 32nd
    /// of the time for which nothing happened: 50 µs to 4 ms. Of an mlx5 device it is posted to past its provider, and needs
    /// completion queues that are [held](super::CqOptions::held).
    pub poll_doorbell: bool,
    /// The most payload in a packet; by default the largest that the link carries and the peer offers.
    pub mtu: Option<Mtu>,
    /// What the peer may do.
    pub access: protocol::Access,
    /// How long to wait for an answer: 4.096 µs · 2^n; 0 waits for ever.
    pub timeout: u8,
    /// How often to try again without an answer: 0 to 7.
    pub retry_count: u8,
    /// How often to try again when the peer has no receive: 0 to 6; 7 is without end.
    pub rnr_retry: u8,
    /// The code of the time that a peer waits when there is no receive: 1 is 10 µs, which suits the software HCA; 12 is
    /// 0.64 ms, which suits devices with many peers, all of whom try again.
    pub min_rnr_timer: u8,
    /// How many reads and atomics may be outstanding, in either direction.
    pub max_rd_atomic: u8,
    /// How many packets may be unanswered, and how reads are cut. Hardware has its own ways.
    pub tuning: protocol::Options,
}

impl Default for QpOptions {
    fn default() -> Self {
        Self {
            service: Service::Rc,
            send_depth: 128,
            receive_depth: 128,
            max_send_sge: 2,
            max_recv_sge: 2,
            inline: 64,
            signal_all: true,
            srq: None,
            port: None,
            gid_index: None,
            memory: None,
            poll_doorbell: false,
            mtu: None,
            access: protocol::Access::ALL,
            timeout: 14,
            retry_count: 7,
            rnr_retry: 7,
            min_rnr_timer: 1,
            max_rd_atomic: 16,
            tuning: protocol::Options::default(),
        }
    }
}

/// The sizes of a queue pair's parts.
struct Sizes {
    wqebbs: u32,
    receives: u32,
    stride: u32,
    layout: QpLayout,
    len: u64,
}

impl QpOptions {
    fn sizes(&self) -> Result<Sizes> {
        let wrong =
            |why: &str| Error::new(Kind::InvalidArgument, "make a queue pair").why(why.to_owned());
        // The address of a datagram takes two segments more than a write's.
        let inline = match self.service {
            Service::Rc => self.inline,
            Service::Ud => self.inline.saturating_add(2 * mlx5::SEGMENT as u32),
        };
        let wqebbs = mlx5::send_queue_wqebbs(self.send_depth.max(1), self.max_send_sge, inline)
            .filter(|wqebbs| *wqebbs <= mlx5::MAX_SEND_WQEBBS)
            .ok_or_else(|| {
                wrong("its send queue would have more than 32768 blocks")
                    .fix("ask for a smaller depth, fewer ranges or less inline data")
            })?;
        let receives = self.receive_depth.clamp(1, 1 << 15).next_power_of_two();
        let stride = mlx5::receive_stride(self.max_recv_sge)
            .filter(|stride| *stride <= 256)
            .ok_or_else(|| wrong("a receive may name 16 ranges at most"))?;
        if self.receive_depth > 1 << 15 {
            return Err(wrong("a receive queue has 32768 entries at most"));
        }
        let receive_len = match self.srq {
            Some(_) => 0,
            None => u64::from(receives) * u64::from(stride),
        };
        let send = receive_len.next_multiple_of(WQEBB_LEN as u64);
        let dbrec = send + u64::from(wqebbs) * WQEBB_LEN as u64;
        // Record and doorbell on cache lines of their own: others write the one, the CPU the other.
        let doorbell = dbrec + 64;
        let layout = QpLayout { receive: 0, send, dbrec, doorbell };
        Ok(Sizes { wqebbs, receives, stride, layout, len: doorbell + 512 })
    }
}

/// A queue pair: reliable-connected, or for datagrams. It ends when the last clone is dropped.
#[derive(Clone, Debug)]
pub struct Qp(pub(super) Arc<Inner>);

#[derive(Debug)]
pub(super) struct Inner {
    pair: Backend,
    device: Arc<Device>,
    options: QpOptions,
    // Held so that it outlives this.
    _pd: Pd,
    cqs: [Cq; 2],
}

#[derive(Debug)]
enum Backend {
    Soft(Soft),
    Hard(Hard),
}

/// A queue pair of the software HCA.
#[derive(Debug)]
struct Soft {
    core: Arc<Core>,
    user_index: u32,
    /// The sequence number that it will begin with.
    psn: AtomicU32,
}

/// What posting and polling share.
#[derive(Debug)]
pub(crate) struct Core {
    pub number: u32,
    pub service: Service,
    /// It has come to `RTS`, or has failed: work may be posted.
    pub accepts_posts: AtomicBool,
    pub hca: crate::hca::Hca,
    pub memory: QueueMemory,
    pub layout: QpLayout,
    pub wqebbs: u32,
    pub send: BiasedMutex<SendState>,
    pub wr_table: WrTable,
    /// Where its writes go.
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
    /// Its queues, each by itself.
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

    /// A receive ended. Returns what the program called it.
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
        let Backend::Soft(Soft { core, user_index, .. }) = &self.pair else { return };
        core.hca.destroy_qp(core.number);
        // Completions that wait in a queue name it still.
        self.clean_cqs(core);
        if let Some(slot) = self.device.pairs.lock().get_mut(*user_index as usize) {
            *slot = None;
        }
        // Now that nobody finds it any more.
        self.cqs.iter().for_each(Cq::drop_cached_qp);
    }
}

impl Inner {
    /// Completions that nobody has taken are nobody's any more; those of a shared queue give their slots back.
    fn clean_cqs(&self, core: &Core) {
        let [sends, receives] = &self.cqs;
        sends.clean(core);
        if sends.number() != receives.number() {
            receives.clean(core);
        }
    }
}

impl Qp {
    /// How much memory the queues of a queue pair with these options take.
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
        if let Some(hardware) = &context.0.hardware {
            let pair = Backend::Hard(Hard::create(hardware, pd, &cqs, &mut options)?);
            let (device, _pd) = (context.0.clone(), pd.clone());
            return Ok(Self(Arc::new(Inner { pair, device, options, _pd, cqs })));
        }
        let soft = Soft::create(context, pd, &cqs, &options)?;
        let (device, _pd) = (context.0.clone(), pd.clone());
        let pair = Backend::Soft(soft);
        Ok(Self(Arc::new(Inner { pair, device, options, _pd, cqs })))
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        match &self.0.pair {
            Backend::Soft(soft) => soft.core.number,
            Backend::Hard(hard) => hard.qp.number(),
        }
    }

    /// Its state.
    pub fn state(&self) -> Result<State> {
        match &self.0.pair {
            Backend::Soft(soft) => soft.core.hca.qp_state(soft.core.number),
            Backend::Hard(hard) => hard.qp.state(),
        }
    }

    /// The memory of its queues, and where things lie in it: for those who post by other means. Of hardware it is nothing:
    /// see [`direct_queues`](Self::direct_queues).
    pub fn queues(&self) -> (&QueueMemory, QpLayout) {
        match &self.0.pair {
            Backend::Soft(soft) => (&soft.core.memory, soft.core.layout),
            Backend::Hard(hard) => {
                (&hard.no_memory, QpLayout { receive: 0, send: 0, dbrec: 0, doorbell: 0 })
            }
        }
    }

    /// Its queues in ConnectX's format, each where it lies: of the software HCA, and of mlx5 devices. Who posts there is
    /// the only one who does: see [`Poster`](super::Poster).
    ///
    /// # Errors
    /// If it is a device of another sort, or libmlx5 is not installed.
    pub fn direct_queues(&self) -> Result<DirectQueues> {
        match &self.0.pair {
            Backend::Soft(soft) => Ok(soft.core.queues()),
            Backend::Hard(Hard { direct_verbs: Some(pair), .. }) => Ok(pair.queues.clone()),
            Backend::Hard(hard) => Ok(DirectQueues::from_mlx5dv(hard.qp.mlx5dv()?)),
        }
    }

    /// What it has counted.
    ///
    /// # Errors
    /// Hardware does not count by queue pair.
    pub fn stats(&self) -> Result<protocol::Stats> {
        match &self.0.pair {
            Backend::Soft(soft) => soft.core.hca.qp_stats(soft.core.number),
            Backend::Hard(_) => Err(Error::new(Kind::Unsupported, "count a queue pair's packets")
                .why("hardware does not count by queue pair")
                .fix("see the port's counters: /sys/class/infiniband/*/ports/*/hw_counters")),
        }
    }

    /// Which way its work takes, and why: the link, and whether a peer of this machine lets it do without packets; or the
    /// device, port and address.
    pub fn path(&self) -> Result<crate::link::LinkPath> {
        match &self.0.pair {
            Backend::Soft(soft) => soft.core.hca.qp_path(soft.core.number),
            Backend::Hard(hard) => Ok(hard.path()),
        }
    }

    /// What a peer must know to connect to it.
    pub fn endpoint(&self) -> QpEndpoint {
        let options = &self.0.options;
        let soft = match &self.0.pair {
            Backend::Soft(soft) => soft,
            Backend::Hard(hard) => return hard.endpoint(options),
        };
        let context = Context(self.0.device.clone());
        let mtu = options.mtu.unwrap_or_else(|| context.max_mtu());
        QpEndpoint {
            address: context.path().local,
            qpn: self.number(),
            psn: soft.psn.load(Ordering::Relaxed),
            mtu: mtu.bytes(),
            max_rd_atomic: options.max_rd_atomic,
            lid: 0,
            gid: 0,
        }
    }

    /// What it is for.
    pub fn service(&self) -> Service {
        self.0.options.service
    }

    /// Takes a datagram queue pair through `INIT` and `RTR` to `RTS`: it takes datagrams that bear this key.
    pub fn activate_ud(&self, qkey: u32) -> Result<()> {
        let init = QpAttributes { access: None, qkey: Some(qkey), ..self.init_attr() };
        let psn = Psn::new(self.endpoint().psn);
        self.modify(&init)?;
        self.modify(&QpAttributes::new(State::Rtr))?;
        self.modify(&QpAttributes { send_psn: Some(psn), ..QpAttributes::new(State::Rts) })
    }

    /// Takes it through `INIT` and `RTR` to `RTS`, connected to the peer that made this offer.
    pub fn connect(&self, peer: &QpEndpoint) -> Result<()> {
        self.modify(&self.init_attr())?;
        let rtr_attr = self.rtr_attr(peer)?;
        match &self.0.pair {
            Backend::Soft(_) => self.modify(&rtr_attr)?,
            Backend::Hard(hard) => hard.modify_to_rtr(&rtr_attr, peer)?,
        }
        self.modify(&self.rts_attr(peer))
    }

    /// The step to `INIT` that its options ask for.
    pub fn init_attr(&self) -> QpAttributes {
        QpAttributes {
            partition_index: Some(0),
            port: Some(match &self.0.pair {
                Backend::Soft(_) => 1,
                Backend::Hard(hard) => hard.local_port.port,
            }),
            access: Some(self.0.options.access),
            ..QpAttributes::new(State::Init)
        }
    }

    /// The step to `RTR`, connected to that peer.
    pub fn rtr_attr(&self, peer: &QpEndpoint) -> Result<QpAttributes> {
        let own = self.endpoint();
        let mtu = Mtu::new(own.mtu.min(peer.mtu)).ok_or_else(|| {
            Error::new(Kind::Malformed, format!("connect queue pair {:#x}", self.number()))
                .why(format!("the peer offers an MTU of {} bytes", peer.mtu))
                .fix("offer 256, 512, 1024, 2048 or 4096")
        })?;
        let flow_label = (own.qpn ^ peer.qpn) & 0xf_ffff;
        let path =
            PathAttributes { peer: peer.address, traffic_class: 0, hop_limit: 64, flow_label };
        Ok(QpAttributes {
            path: Some(path),
            mtu: Some(mtu),
            destination: Some(peer.qpn),
            receive_psn: Some(Psn::new(peer.psn)),
            max_dest_rd_atomic: Some(self.0.options.max_rd_atomic),
            min_rnr_timer: Some(self.0.options.min_rnr_timer),
            ..QpAttributes::new(State::Rtr)
        })
    }

    /// The step to `RTS`.
    pub fn rts_attr(&self, peer: &QpEndpoint) -> QpAttributes {
        let options = &self.0.options;
        QpAttributes {
            send_psn: Some(Psn::new(self.endpoint().psn)),
            timeout: Some(options.timeout),
            retry_count: Some(options.retry_count),
            rnr_retry: Some(options.rnr_retry),
            max_rd_atomic: Some(options.max_rd_atomic.min(peer.max_rd_atomic)),
            ..QpAttributes::new(State::Rts)
        }
    }

    /// Takes a step, or changes attributes. What is refused changes nothing.
    pub fn modify(&self, change: &QpAttributes) -> Result<()> {
        match &self.0.pair {
            Backend::Soft(soft) => soft.modify(&self.0, change),
            Backend::Hard(hard) => hard.modify(change, None),
        }
    }

    /// What posting and polling share, of the software HCA.
    pub(super) fn soft_core(&self) -> Option<&Core> {
        match &self.0.pair {
            Backend::Soft(soft) => Some(&soft.core),
            Backend::Hard(_) => None,
        }
    }

    /// Its queues, of hardware that is posted to past its provider.
    pub(super) fn direct_verbs(&self) -> Option<&DirectVerbsQp> {
        match &self.0.pair {
            Backend::Soft(_) => None,
            Backend::Hard(hard) => hard.direct_verbs.as_deref(),
        }
    }

    /// Whether hardware takes work now; the software HCA is asked as it is posted.
    pub(super) fn check_hardware_state(&self) -> Result<()> {
        match &self.0.pair {
            Backend::Soft(_) => Ok(()),
            Backend::Hard(hard) => hard.check_state(),
        }
    }

    /// Begins a batch of work. It holds the send queue until it is posted or dropped.
    #[inline]
    pub fn batch(&self) -> Batch<'_> {
        match &self.0.pair {
            Backend::Soft(soft) => Batch::soft(&soft.core),
            Backend::Hard(hard) => Batch::hard(hard),
        }
    }

    /// Posts work, all of it or none.
    ///
    /// # Errors
    /// [`Kind::Busy`] if there is no room for it: take completions first.
    pub fn post_send(&self, requests: &[SendRequest<'_>]) -> Result<()> {
        let core = match &self.0.pair {
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

    /// Posts receives, all of them or none.
    pub fn post_receive(&self, requests: &[ReceiveRequest<'_>]) -> Result<()> {
        let core = match &self.0.pair {
            Backend::Soft(soft) => &soft.core,
            Backend::Hard(hard) => return hard.post_receive(requests),
        };
        if core.srq.is_some() {
            let error = Error::new(Kind::InvalidArgument, "post a receive");
            return Err(error.why("the queue pair uses a shared one").fix("post it there"));
        }
        super::receive::post(core, requests)
    }
}

impl Soft {
    fn create(context: &Context, pd: &Pd, cqs: &[Cq; 2], options: &QpOptions) -> Result<Self> {
        let Sizes { wqebbs, receives, stride, layout, len } = options.sizes()?;
        let memory = match &options.memory {
            Some(memory) => memory.clone(),
            None => QueueMemory::host(len)?,
        };
        memory.bytes().fill(0, len, &[0])?;
        let device = context.0.clone();
        let mut pairs = device.pairs.lock();
        let free = pairs.iter().position(Option::is_none);
        let user_index = free.unwrap_or(pairs.len());
        let datagrams = match options.service {
            Service::Rc => None,
            Service::Ud => Some(options.mtu.unwrap_or_else(|| context.max_mtu())),
        };
        let number = context.0.hca.create_qp(QpSpec {
            memory: memory.clone(),
            layout,
            send_wqebbs: wqebbs,
            receive_entries: receives,
            receive_stride: stride,
            send_cq: cqs[0].number(),
            receive_cq: cqs[1].number(),
            srq: options.srq.as_ref().map(Srq::number),
            pd: pd.id(),
            signal_all: options.signal_all,
            user_index: user_index as u32,
            poll_doorbell: options.poll_doorbell,
            options: options.tuning,
            datagrams,
        })?;
        let core = Arc::new(Core {
            number,
            service: options.service,
            accepts_posts: AtomicBool::new(false),
            hca: context.0.hca.clone(),
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
        if user_index == pairs.len() {
            pairs.push(None);
        }
        pairs[user_index] = Some(core.clone());
        drop(pairs);
        Ok(Self { core, user_index: user_index as u32, psn: random_psn(number).into() })
    }

    fn modify(&self, handle: &Inner, change: &QpAttributes) -> Result<()> {
        let core = &self.core;
        let state = core.hca.qp_state(core.number)?;
        let is_reset = change.to == State::Reset && change.check(core.service, state).is_ok();
        if is_reset {
            core.accepts_posts.store(false, Ordering::Relaxed);
            // In this order: the device must find the queues as it forgets them.
            core.clean()?;
        }
        core.hca.modify_qp(core.number, change)?;
        let accepts_posts = !matches!(change.to, State::Reset | State::Init | State::Rtr);
        core.accepts_posts.store(accepts_posts, Ordering::Relaxed);
        if is_reset {
            handle.clean_cqs(core);
            self.psn.store(random_psn(core.number), Ordering::Relaxed);
        }
        Ok(())
    }
}

/// A first sequence number that differs from one connection to the next, so that late packets of an old one are
/// not taken for new ones.
fn random_psn(number: u32) -> u32 {
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let seed = now.map_or(0, |since| since.as_nanos() as u64) ^ u64::from(number) << 40;
    (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 40) as u32
}
