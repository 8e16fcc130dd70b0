//! Queue pairs for kernels: a running kernel posts work and waits for it, without the CPU.
//!
//! The host makes a [`KernelQp`], connects it, and passes [`KernelQp::handle`] to kernels of the program, which include
//! `warpwire/verbs.cuh`. The calls that end in `_on` do the same from a stream, by small kernels of the library: each
//! run of them is new work, so that a CUDA graph with them can be replayed any number of times.
//!
//! | type | what it is |
//! |---|---|
//! | [`KernelQp`], [`KernelQpOptions`] | a queue pair whose queues lie where a kernel reaches them |
//! | [`Kernels`] | the library's kernels, to load once for many queue pairs |
//! | [`SignalWait`] | a word that a stream waits for, one step further each time |
//! | [`Progress`], [`KernelStatus`] | how far a queue pair has got, and how things end |
//! | [`device`] | the header's calls for block functions of the simulated GPU |
//! | [`layout`] | the handle, byte by byte |
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
//!     Context::open_with(link, HcaOptions { progress_mode, ..HcaOptions::default() }).unwrap()
//! });
//! let (pd, there) = (a.pd(), b.pd());
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
use crate::mem::{Device, DeviceAddr, Launch};
use crate::mlx5::{MAX_SEND_WQEBBS, Status};
use crate::mr::HostMemory;
use crate::verbs::{
    Access, Context, Cq, CqOptions, Mr, Pd, ProgressMode, Qp, QpEndpoint, QpOptions, Service, State,
};
use layout::{Constants, NO_FAILURE, RECEIVE, SEND, queue};
use target::{KernelMemory, KernelTarget};

/// Where completions go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum CqPlacement {
    /// Device memory if the CPU has a window onto it, else pinned memory.
    #[default]
    Auto,
    /// Device memory behind a window: kernels that wait look into their own memory.
    Device,
    /// Pinned host memory.
    Pinned,
}

/// How a queue pair for kernels is made.
#[derive(Clone, Debug)]
pub struct KernelQpOptions {
    /// How many operations may be underway: a power of two from 2 to 32768. Most take one place, `put_signal` two.
    pub send_depth: u32,
    /// How many receives may wait: a power of two from 1 to 32768.
    pub receive_depth: u32,
    /// Where completions go.
    pub completions: CqPlacement,
    /// One thread, or one group of threads, posts at a time, as the program promises: posting is then quicker. Calls
    /// from a stream count as well.
    pub single_poster: bool,
    /// How long the calls that end in `_on` let a stream wait, before they release it and report a time-out.
    pub wait_timeout: Duration,
    /// The library's kernels, if they are loaded already.
    pub kernels: Option<Kernels>,
    /// How it is connected. What says how its queues are made is not looked at: depths, ranges, inline bytes, memory,
    /// `signal_all`, `watched`.
    pub connection: QpOptions,
}

impl Default for KernelQpOptions {
    fn default() -> Self {
        Self {
            send_depth: 256,
            receive_depth: 256,
            completions: CqPlacement::default(),
            single_poster: false,
            wait_timeout: Duration::from_secs(10),
            kernels: None,
            connection: QpOptions::default(),
        }
    }
}

/// A queue pair that kernels use by themselves. Clones are the same one.
///
/// It ends with the last clone: waits of kernels that still run then end with [`KernelStatus::Closed`]. Kernels that are started
/// with [`pass`](Self::pass) keep its memory; those that get the [`handle`](Self::handle) in another way must have ended
/// before.
#[derive(Clone, Debug)]
pub struct KernelQp(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    handle: KernelMemory,
    /// What kernels reach through the handle.
    mapped: Vec<KernelMemory>,
    kernels: Option<Kernels>,
    wait_timeout: Duration,
    context: Context,
    constants: Constants,
    // The queue pair ends before the memory of its queues.
    qp: Qp,
    _cqs: [Cq; 2],
    _sink: Mr,
}

/// How far a queue pair has got, as its kernels know.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Operations that were posted.
    pub posted: u64,
    /// Operations that are known to have ended: at least so many have. Kernels note it when they need the room.
    pub completed: u64,
    /// Receives that were posted.
    pub receives_posted: u64,
    /// The first operation that failed, and why. All after it came back.
    pub failure: Option<(u64, Status)>,
    /// The first receive that failed, and why.
    pub receive_failure: Option<(u64, Status)>,
    /// Why all waits end, if they do.
    pub closed: Option<KernelStatus>,
    /// The first call from a stream that did not end well: what it was, and how it ended.
    pub stream_failure: Option<(&'static str, KernelStatus)>,
}

impl Inner {
    fn close(&self) {
        let code = KernelStatus::Closed.code().unsigned_abs().to_le_bytes();
        for queue in [SEND, RECEIVE] {
            // The memory is there as long as this is; and whoever waits also has a time-out.
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
    /// Makes one for kernels of that device.
    ///
    /// The send queue, its doorbell and the receive queue lie in pinned memory, completions where
    /// [`KernelQpOptions::completions`] says, the handle and its counters in device memory.
    ///
    /// On an mlx5 device of the machine, all of them but the handle lie where its provider has put them, and the device is
    /// let reach them: also the page with the NIC's doorbell.
    ///
    /// # Errors
    /// If the context is not driven by a thread of its own ([`ProgressMode::Thread`]): doorbells that a kernel rings wake nobody. If it
    /// is hardware that is not mlx5, whose queues nobody tells of, or makes queues of other lengths.
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

    /// Makes one for CPU threads of this process that include `verbs.cuh` as C++. Its [`handle`](Self::handle) is a
    /// pointer of this process.
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
        let handle = target.handle(layout::TOTAL)?;
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

    /// Where kernels find it: the argument for a `warpwire::Qp *`.
    pub fn handle(&self) -> DeviceAddr {
        // It was found when this was made.
        self.0.handle.address().unwrap_or_default()
    }

    /// Adds the handle to a kernel's arguments; the kernel keeps all that it reaches through it.
    pub fn pass(&self, launch: Launch) -> Result<Launch> {
        let handle = self.0.handle.region()?;
        let mapped: Result<Vec<_>> = self.0.mapped.iter().map(KernelMemory::region).collect();
        Ok(mapped?.iter().fold(launch.region(&handle), Launch::keep_alive))
    }

    /// What never changes in the handle.
    pub fn constants(&self) -> &Constants {
        &self.0.constants
    }

    /// Its number.
    pub fn number(&self) -> u32 {
        self.0.qp.number()
    }

    /// Its state.
    pub fn state(&self) -> Result<State> {
        self.0.qp.state()
    }

    /// The queue pair as the rest of the library knows it. Work must be posted by kernels alone.
    pub fn qp(&self) -> &Qp {
        &self.0.qp
    }

    /// What a peer must know to connect to it.
    pub fn endpoint(&self) -> QpEndpoint {
        self.0.qp.endpoint()
    }

    /// Connects it to the peer that made this offer. What kernels post before waits until then.
    pub fn connect(&self, peer: &QpEndpoint) -> Result<()> {
        self.0.qp.connect(peer)
    }

    /// Ends all waits of kernels, now and later, with [`KernelStatus::Closed`].
    pub fn close(&self) {
        self.0.close();
    }

    /// How far it has got.
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
        let failure = |queue: u64| match word(queue + queue::FAILURE) {
            NO_FAILURE => None,
            failure => Some((failure >> 8, Status::from_syndrome(failure as u8))),
        };
        let closed = word(SEND + queue::CLOSED) as u32 as i32;
        Ok(Progress {
            posted: word(SEND + queue::PUBLISHED) >> 1,
            completed: word(SEND + queue::COMPLETED),
            receives_posted: word(RECEIVE + queue::PUBLISHED) >> 1,
            failure: failure(SEND),
            receive_failure: failure(RECEIVE),
            closed: (closed != 0).then(|| KernelStatus::from_code(closed.wrapping_neg())),
            stream_failure: kernels::read_report(word(layout::REPORT)),
        })
    }

    /// Nothing if all is well; else an error that says what failed first, and why.
    ///
    /// A kernel learns of a failure when it waits, or needs room: what nobody has looked at is not known here.
    pub fn check(&self) -> Result<()> {
        let Progress { failure, receive_failure, closed, stream_failure, .. } = self.progress()?;
        let about = |kind, what: String| Error::new(kind, what).on(self.label());
        let failed = |what, status| self.explain(about(Kind::StreamFailed, what), status);
        if let Some((number, status)) = failure {
            return Err(failed(format!("do operation {number}"), status));
        }
        if let Some((number, status)) = receive_failure {
            return Err(failed(format!("take a message into receive {number}"), status));
        }
        match (stream_failure, closed) {
            (Some((what, KernelStatus::Timeout)), _) => {
                let error = about(Kind::Timeout, format!("finish a {what} from a stream"));
                Err(error
                    .why(format!("it did not end in {:?}", self.0.wait_timeout))
                    .fix("see whether the peer is there, or raise `patience`"))
            }
            (Some((what, status)), _) => {
                let error = about(Kind::StreamFailed, format!("do a {what} from a stream"));
                Err(error.why(status.to_string()))
            }
            (None, Some(status)) => {
                Err(about(Kind::Freed, "use it".into()).why(status.to_string()))
            }
            (None, None) => Ok(()),
        }
    }

    /// What a status means here.
    fn explain(&self, error: Error, status: Status) -> Error {
        let denied = self.0.context.hca().qp_denied(self.number());
        let why = match denied {
            Some(denied) if matches!(status, Status::LocalProtection | Status::LocalAccess) => {
                format!("{status}: {denied}")
            }
            _ => status.to_string(),
        };
        let error = error.why(why);
        match status {
            Status::RemoteAccess => error.fix("compare key, address and length with what the peer registered, and its access rights"),
            Status::LocalProtection => error.fix("compare key, address and length with what was registered here"),
            Status::RetryExceeded => error.fix("see whether the peer is there, and connected to this queue pair"),
            Status::RnrRetryExceeded => error.fix("let the peer post receives"),
            _ => error,
        }
    }

    fn label(&self) -> String {
        format!("queue pair {:#x} for kernels", self.number())
    }
}

/// A queue pair that kernels reach, and what they must know of it but for its sink.
struct KernelQpParts {
    qp: Qp,
    cqs: [Cq; 2],
    mapped: Vec<KernelMemory>,
    constants: Constants,
}

/// A queue pair of the software HCA.
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
    let constants = prealloc::constants(&qp, queues.address()?.raw(), completions, depths);
    let mapped = vec![queues, send_cqes, receive_cqes];
    Ok(KernelQpParts { qp, cqs: [send_cq, receive_cq], mapped, constants })
}

#[cold]
fn wrong(why: String) -> Error {
    Error::new(Kind::InvalidArgument, "make a queue pair for kernels").why(why)
}

/// Whether one can be made so.
fn check(context: &Context, options: &KernelQpOptions) -> Result<()> {
    if context.soft().is_some_and(|hca| !matches!(hca.progress_mode(), ProgressMode::Thread { .. }))
    {
        return Err(wrong(
            "no thread of its own drives the context, and a kernel's doorbell wakes nobody".into(),
        )
        .fix("open the context with HcaOptions { drive: Drive::Thread { .. }, .. }"));
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
        return Err(wrong("kernels use connections, and this would be for datagrams".into())
            .fix("leave the service as Service::Rc"));
    }
    if options.connection.srq.is_some() {
        return Err(wrong("a shared receive queue does not say whose message came".into())
            .fix("leave out the shared receive queue: kernels post receives of their own"));
    }
    Ok(())
}
