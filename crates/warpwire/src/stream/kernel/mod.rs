//! GPU-initiated verbs: a running kernel posts work requests and waits for completions, without the
//! CPU.
//!
//! The host creates a [`KernelQp`], connects it, and passes [`KernelQp::handle`] to the
//! application's kernels, which include `warpwire/verbs.cuh`. The methods that end in `_on_stream`
//! do the same from a stream, by small kernels of the library: each run posts new work, so that a
//! CUDA graph that contains them can be replayed any number of times.
//!
//! | type | what it is |
//! |---|---|
//! | [`KernelQp`], [`KernelQpOptions`] | a queue pair whose queues kernels can access |
//! | [`Kernels`] | the library's kernels, loaded once for many queue pairs |
//! | [`SignalWait`] | a signal word that a stream waits for, one step further each time |
//! | [`Progress`], [`KernelStatus`] | counters of a queue pair; results of operations and waits |
//! | [`device`] | the API of `verbs.cuh` for block functions of the simulated GPU |
//! | [`layout`] | the byte layout of the handle |
//!
//! ```
//! use std::time::Duration;
//! use warpwire::hca::HcaOptions;
//! use warpwire::link::Hub;
//! use warpwire::mem::sim::{Sim, SimConfig};
//! use warpwire::stream::{KernelQp, KernelQpOptions};
//! use warpwire::verbs::{Access, Context, ProgressMode};
//!
//! let gpu = Sim::start(SimConfig::default())?.device(0)?;
//! let hub = Hub::new();
//! let progress_mode = ProgressMode::Thread { spin: Duration::ZERO, core: None };
//! let [a, b] = ["10.0.0.1:4791", "10.0.0.2:4791"].map(|address| {
//!     let link = hub.endpoint(address.parse().unwrap()).unwrap();
//!     Context::open_with(link, HcaOptions::default().with_progress_mode(progress_mode)).unwrap()
//! });
//! let (pd, there) = (a.alloc_pd(), b.alloc_pd());
//! let qp = KernelQp::create(&a, &pd, &gpu, KernelQpOptions::default())?;
//! let peer = KernelQp::create(&b, &there, &gpu, KernelQpOptions::default())?;
//! qp.connect(&peer.endpoint())?;
//! peer.connect(&qp.endpoint())?;
//!
//! let (from, to) = (gpu.alloc(4096)?, gpu.alloc(4096)?);
//! let source = a.register(&pd, from.whole()?, Access::LOCAL_WRITE)?;
//! let target = b.register(&there, to.whole()?, Access::LOCAL_WRITE | Access::REMOTE_WRITE)?;
//! let stream = gpu.stream()?;
//! let graph = stream.capture(|stream| {
//!     stream.fill(&from.whole()?, 0x5a)?; // a kernel would do
//!     qp.put_on_stream(stream, target.remote(0), source.sge(0, 4096))?;
//!     qp.wait_on_stream(stream)
//! })?;
//! for _ in 0..3 {
//!     stream.replay(&graph)?; // a new message each time
//! }
//! stream.synchronize(Duration::from_secs(10))?;
//! qp.check()?;
//! assert_eq!(qp.progress()?.posted, 3);
//! # Ok::<(), warpwire::Error>(())
//! ```

pub mod device;
mod hardware;
mod kernels;
#[doc(hidden)]
pub mod layout;
mod on;
mod prealloc;
mod status;
mod target;

use std::sync::Arc;
use std::time::Duration;

pub use kernels::Kernels;
pub use on::SignalWait;
pub(crate) use prealloc::PreallocQp;
pub use status::KernelStatus;

use crate::error::{Error, Kind, Result};
use crate::hca::kernel_table_layout;
use crate::mem::{Device, DeviceAddr, Launch};
use crate::mlx5::{CqeSyndrome, MAX_SEND_WQEBBS, Status};
use crate::mr::HostMemory;
use crate::verbs::{
    Access, Context, Cq, CqOptions, Mr, Pd, ProgressMode, Qp, QpEndpoint, QpOptions, Service, State,
};
use layout::{Constants, NO_FAILURE, RECEIVE, SEND, queue};
use target::{KernelMemory, KernelTarget};

/// Where the completion queues are allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum CqPlacement {
    /// Device memory if the CPU can map it, else pinned memory.
    #[default]
    Auto,
    /// Device memory mapped into the CPU's address space: waiting kernels poll local memory.
    Device,
    /// Pinned host memory.
    Pinned,
}

/// Options of a [`KernelQp`].
#[derive(Clone, Debug)]
#[non_exhaustive]
pub struct KernelQpOptions {
    /// Send queue size in WQEBBs, a power of two from 2 to 32768. Most operations take one,
    /// `put_signal` takes two.
    pub send_depth: u32,
    /// Receive queue depth, a power of two from 1 to 32768.
    pub receive_depth: u32,
    /// Where the completion queues are allocated. Ignored for hardware queue pairs.
    pub completions: CqPlacement,
    /// Promises that only one thread, or one group of threads, posts at a time, which makes posting
    /// faster. The `_on_stream` methods count as posters too.
    pub single_poster: bool,
    /// Lets kernels access the peer's device memory by themselves, with loads and stores, where it
    /// is mapped on their GPU: both ends are on one machine, connected by shared memory. The order
    /// of work is kept.
    pub direct: bool,
    /// With `direct`, kernels also apply atomic operations, and those of `put_signal`, by
    /// themselves. They are then atomic with respect to other kernels, but not with respect to
    /// operations on the same words that the peer's HCA executes for other queue pairs.
    pub direct_atomics: bool,
    /// How long the `_on_stream` methods let a stream wait before they release it and report a
    /// timeout.
    pub wait_timeout: Duration,
    /// The library's kernels, if they are loaded already; otherwise they are loaded.
    pub kernels: Option<Kernels>,
    /// Connection options. Those of the queues are ignored: depths, SGE counts, inline data,
    /// memory, `signal_all`, `poll_doorbell`.
    pub connection: QpOptions,
}

setters! {
    KernelQpOptions {
        with_send_depth => send_depth: u32,
        with_receive_depth => receive_depth: u32,
        with_completions => completions: CqPlacement,
        with_single_poster => single_poster: bool,
        with_direct => direct: bool,
        with_direct_atomics => direct_atomics: bool,
        with_wait_timeout => wait_timeout: Duration,
        with_connection => connection: QpOptions,
    } optional {
        with_kernels => kernels: Kernels,
    }
}

impl Default for KernelQpOptions {
    fn default() -> Self {
        Self {
            send_depth: 256,
            receive_depth: 256,
            completions: CqPlacement::default(),
            single_poster: false,
            direct: true,
            direct_atomics: false,
            wait_timeout: Duration::from_secs(10),
            kernels: None,
            connection: QpOptions::default(),
        }
    }
}

/// A queue pair that kernels drive. Clones share it.
///
/// Dropping the last clone closes it: waits of kernels that are still running then return
/// [`KernelStatus::Closed`]. Kernels that are launched with [`pass`](Self::pass) keep its memory
/// alive; those that get the [`handle`](Self::handle) in another way must have finished before.
#[derive(Clone, Debug)]
pub struct KernelQp(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    handle: KernelMemory,
    /// Memory that kernels access through the handle.
    mapped: Vec<KernelMemory>,
    kernels: Option<Kernels>,
    wait_timeout: Duration,
    context: Context,
    constants: Constants,
    // Field order: the queue pair is dropped before the memory of its queues.
    qp: Qp,
    _cqs: [Cq; 2],
    _sink: Mr,
}

/// The counters of a queue pair, as its kernels last updated them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Number of operations posted.
    pub posted: u64,
    /// Number of operations that kernels executed by themselves: not posted, and complete.
    pub direct: u64,
    /// Lower bound of the operations completed. Kernels update it when they need free queue
    /// entries.
    pub completed: u64,
    /// Number of receives posted.
    pub receives_posted: u64,
    /// The first operation that failed, and its status. All later ones were flushed.
    pub failure: Option<(u64, Status)>,
    /// The first receive that failed, and its status.
    pub receive_failure: Option<(u64, Status)>,
    /// The status that all waits return, if the queue pair is closed.
    pub closed: Option<KernelStatus>,
    /// The first `_on_stream` operation that failed: its name and status.
    pub stream_failure: Option<(&'static str, KernelStatus)>,
}

impl Inner {
    fn close(&self) {
        let code = KernelStatus::Closed.code().unsigned_abs().to_le_bytes();
        for queue in [SEND, RECEIVE] {
            // The memory lives as long as this; if the write fails, waits still have a timeout.
            let _ = self.handle.write(queue + queue::CLOSED, &code);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.close();
    }
}

impl KernelQp {
    /// Creates a queue pair for kernels of `device`.
    ///
    /// The send queue, its doorbell and the receive queue are in pinned memory, completions where
    /// [`KernelQpOptions::completions`] specifies, the handle and its counters in device memory.
    ///
    /// On an mlx5 NIC the provider allocates all of them but the handle. They are registered with
    /// `device`, together with the page that holds the doorbell register.
    ///
    /// # Errors
    /// If no thread drives the context ([`ProgressMode::Thread`]): a kernel's doorbell write wakes
    /// none. If the hardware is not mlx5, so that the addresses of its queues are unknown, or if it
    /// creates queues of other lengths than requested.
    pub fn create(
        context: &Context,
        pd: &Pd,
        device: &Device,
        options: KernelQpOptions,
    ) -> Result<Self> {
        let kernels = match &options.kernels {
            Some(kernels) if kernels.device() != device => {
                return Err(wrong(format!(
                    "the kernels are loaded onto {}",
                    kernels.device().label()
                ))
                .fix("load them onto the queue pair's device"));
            }
            Some(kernels) => kernels.clone(),
            None => Kernels::load(device)?,
        };
        let target = KernelTarget::Device(device.clone(), options.completions);
        Self::create_at(context, pd, &target, Some(kernels), options)
    }

    /// Creates a queue pair for CPU threads of this process that include `verbs.cuh` as C++. Its
    /// [`handle`](Self::handle) is a pointer in this process.
    pub fn create_for_cpu(context: &Context, pd: &Pd, options: KernelQpOptions) -> Result<Self> {
        Self::create_at(context, pd, &KernelTarget::Cpu, None, options)
    }

    fn create_at(
        context: &Context,
        pd: &Pd,
        target: &KernelTarget,
        kernels: Option<Kernels>,
        options: KernelQpOptions,
    ) -> Result<Self> {
        check(context, &options)?;
        let KernelQpOptions {
            send_depth,
            receive_depth,
            single_poster,
            direct,
            direct_atomics,
            wait_timeout,
            connection,
            ..
        } = options;
        let connection = prealloc::connection(send_depth, receive_depth, connection);
        let depths = [send_depth, receive_depth];
        let KernelQpParts { qp, cqs, mapped, mut constants } = match context.soft() {
            Some(_) => create_soft_qp(context, pd, target, connection, depths)?,
            None => hardware::create_hardware_qp(context, pd, target, connection, depths)?,
        };
        let sink = context.register(pd, HostMemory::new(8)?, Access::LOCAL_WRITE)?;
        (constants.sink, constants.sink_lkey) = (sink.iova(), sink.lkey());
        constants.flags |= if single_poster { layout::SINGLE_POSTER } else { 0 };
        let handle = target.handle(layout::TABLE + kernel_table_layout::LEN)?;
        if let Some(table) = handle.kernel_table().filter(|_| direct)
            && let (Some(hca), KernelTarget::Device(device, _)) = (context.soft(), target)
        {
            handle.write(layout::TABLE, &[0; kernel_table_layout::LEN as usize])?;
            if hca.set_kernel_table(qp.number(), table, device)? {
                constants.direct = handle.address()?.raw() + layout::TABLE;
                constants.flags |= if direct_atomics { layout::DIRECT_ATOMICS } else { 0 };
            }
        }
        handle.write(0, &constants.encode())?;
        Ok(Self(Arc::new(Inner {
            handle,
            mapped,
            kernels,
            wait_timeout,
            context: context.clone(),
            constants,
            qp,
            _cqs: cqs,
            _sink: sink,
        })))
    }

    /// Device address of the handle: the kernel argument for a `warpwire::Qp *`.
    pub fn handle(&self) -> DeviceAddr {
        // `address` succeeds for every kind of memory.
        self.0.handle.address().unwrap_or_default()
    }

    /// Adds the handle to a kernel's arguments. The launch keeps everything alive that the kernel
    /// accesses through it.
    pub fn pass(&self, launch: Launch) -> Result<Launch> {
        let handle = self.0.handle.region()?;
        let mapped: Result<Vec<_>> = self.0.mapped.iter().map(KernelMemory::region).collect();
        Ok(mapped?.iter().fold(launch.region(&handle), Launch::keep_alive))
    }

    /// The constant part of the handle.
    pub fn constants(&self) -> &Constants {
        &self.0.constants
    }

    /// The queue pair number (QPN).
    pub fn number(&self) -> u32 {
        self.0.qp.number()
    }

    /// The state of the queue pair.
    pub fn state(&self) -> Result<State> {
        self.0.qp.state()
    }

    /// The underlying queue pair, for its state, path and counters. Only kernels may post work.
    pub fn qp(&self) -> &Qp {
        &self.0.qp
    }

    /// The connection data that the peer passes to [`connect`](Self::connect).
    pub fn endpoint(&self) -> QpEndpoint {
        self.0.qp.endpoint()
    }

    /// Connects the queue pair to the peer with this endpoint. Work that kernels posted before is
    /// sent then.
    pub fn connect(&self, peer: &QpEndpoint) -> Result<()> {
        self.0.qp.connect(peer)
    }

    /// Makes all current and future waits of kernels return [`KernelStatus::Closed`].
    pub fn close(&self) {
        self.0.close();
    }

    /// Reads the counters. Without a CPU mapping of the handle this copies from the device.
    pub fn progress(&self) -> Result<Progress> {
        let mut bytes = [0; layout::TOTAL as usize];
        self.0.handle.read(0, &mut bytes)?;
        let word = |at: u64| {
            let at = at as usize;
            bytes
                .get(at..at + 8)
                .and_then(|part| part.try_into().ok())
                .map_or(0, u64::from_le_bytes)
        };
        let mut direct = [0; 8];
        if self.0.constants.direct != 0 {
            self.0.handle.read(layout::TABLE + kernel_table_layout::OPERATIONS, &mut direct)?;
        }
        let failure = |queue: u64| match word(queue + queue::FAILURE) {
            NO_FAILURE => None,
            failure => Some((failure >> 8, CqeSyndrome(failure as u8).into())),
        };
        let closed = word(SEND + queue::CLOSED) as u32 as i32;
        Ok(Progress {
            posted: word(SEND + queue::PUBLISHED) >> 1,
            direct: u64::from_le_bytes(direct),
            completed: word(SEND + queue::COMPLETED),
            receives_posted: word(RECEIVE + queue::PUBLISHED) >> 1,
            failure: failure(SEND),
            receive_failure: failure(RECEIVE),
            closed: (closed != 0).then(|| KernelStatus::from_code(closed.wrapping_neg())),
            stream_failure: kernels::read_report(word(layout::REPORT)),
        })
    }

    /// Returns an error that describes the first failure, if there was one.
    ///
    /// Kernels notice a failure when they wait or need free entries: a failure that no kernel has
    /// noticed is not reported here.
    pub fn check(&self) -> Result<()> {
        let Progress { failure, receive_failure, closed, stream_failure, .. } = self.progress()?;
        let about = |kind, what: String| Error::new(kind, what).on(self.label());
        let failed = |what, status| self.explain(about(Kind::StreamFailed, what), status);
        if let Some((number, status)) = failure {
            return Err(failed(format!("complete operation {number}"), status));
        }
        if let Some((number, status)) = receive_failure {
            return Err(failed(format!("complete receive {number}"), status));
        }
        match (stream_failure, closed) {
            (Some((what, KernelStatus::Timeout)), _) => {
                let error = about(Kind::Timeout, format!("finish a {what} from a stream"));
                Err(error
                    .why(format!("it did not finish in {:?}", self.0.wait_timeout))
                    .fix("check that the peer is running, or raise `wait_timeout`"))
            }
            (Some((what, status)), _) => {
                let error = about(Kind::StreamFailed, format!("run a {what} from a stream"));
                Err(error.why(status.to_string()))
            }
            (None, Some(status)) => {
                Err(about(Kind::Freed, "use the queue pair".into()).why(status.to_string()))
            }
            (None, None) => Ok(()),
        }
    }

    /// Adds the cause and a remedy for a status.
    fn explain(&self, error: Error, status: Status) -> Error {
        // Hardware gives no reason beside the status.
        let denied = self.0.context.soft().and_then(|hca| hca.qp_denied(self.number()));
        let why = match denied {
            Some(denied) if matches!(status, Status::LocalProtection | Status::LocalAccess) => {
                format!("{status}: {denied}")
            }
            _ => status.to_string(),
        };
        let error = error.why(why);
        match status {
            Status::RemoteAccess => {
                error.fix("check rkey, address, length and access against the peer's registration")
            }
            Status::LocalProtection => {
                error.fix("check lkey, address and length against the local registration")
            }
            Status::RetryExceeded => {
                error.fix("check that the peer is running and connected to this queue pair")
            }
            Status::RnrRetryExceeded => error.fix("have the peer post receives"),
            _ => error,
        }
    }

    fn label(&self) -> String {
        format!("kernel queue pair {:#x}", self.number())
    }
}

/// A queue pair with the constants of its handle, except for the sink.
struct KernelQpParts {
    qp: Qp,
    cqs: [Cq; 2],
    mapped: Vec<KernelMemory>,
    constants: Constants,
}

/// Creates a queue pair of the software HCA.
fn create_soft_qp(
    context: &Context,
    pd: &Pd,
    target: &KernelTarget,
    mut connection: QpOptions,
    depths: [u32; 2],
) -> Result<KernelQpParts> {
    let queue = |entries| -> Result<(Cq, KernelMemory)> {
        let memory = target.completions(Cq::required_memory(entries))?;
        let queue = memory.queue()?;
        let options = CqOptions {
            entries,
            memory: Some(queue),
            ignore_overrun: true,
            ..CqOptions::default()
        };
        Ok((context.create_cq_with(options)?, memory))
    };
    let (send_cq, send_cqes) = queue(depths[0])?;
    let (receive_cq, receive_cqes) = queue(depths[1])?;
    let queues = target.queues(Qp::required_memory(&connection)?)?;
    connection.memory = Some(queues.queue()?);
    let qp = context.create_qp(pd, &send_cq, &receive_cq, connection)?;
    let completions = [send_cqes.address()?.raw(), receive_cqes.address()?.raw()];
    let constants = prealloc::constants(&qp, queues.address()?.raw(), completions, depths)?;
    let mapped = vec![queues, send_cqes, receive_cqes];
    Ok(KernelQpParts { qp, cqs: [send_cq, receive_cq], mapped, constants })
}

#[cold]
fn wrong(why: String) -> Error {
    Error::new(Kind::InvalidArgument, "create a kernel queue pair").why(why)
}

/// Checks that the context and options permit a kernel queue pair.
fn check(context: &Context, options: &KernelQpOptions) -> Result<()> {
    if context.soft().is_some_and(|hca| !matches!(hca.progress_mode(), ProgressMode::Thread { .. }))
    {
        return Err(wrong(
            "no thread drives the context, and a kernel's doorbell write wakes none".into(),
        )
        .fix(
            "open the context with HcaOptions { progress_mode: ProgressMode::Thread { .. }, .. }",
        ));
    }
    for (name, depth, least) in
        [("send_depth", options.send_depth, 2), ("receive_depth", options.receive_depth, 1)]
    {
        if !depth.is_power_of_two() || !(least..=MAX_SEND_WQEBBS).contains(&depth) {
            return Err(wrong(format!("{name} is {depth}"))
                .fix(format!("use a power of two from {least} to {MAX_SEND_WQEBBS}")));
        }
    }
    if options.connection.service != Service::Rc {
        return Err(wrong("kernel queue pairs are RC, and this one would be UD".into())
            .fix("use Service::Rc"));
    }
    if options.connection.srq.is_some() {
        return Err(wrong("in an SRQ, kernels cannot identify the sender of a message".into())
            .fix("leave the SRQ unset: kernels post their own receives"));
    }
    Ok(())
}
