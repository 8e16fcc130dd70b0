//! Registration trials: registers each kind of memory on this machine in each way, and moves data
//! through it.
#![allow(unsafe_code)]

use std::fmt::Write;
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use serde::Serialize;

use warpwire::error::{Error, Kind, Result};
use warpwire::link::Hub;
use warpwire::mem::{self, Allocation, MemoryKind};
use warpwire::mr::HostMemory;
use warpwire::verbs::{
    Access, AttachMode, Context, Cq, DmaBufRange, MemorySource, Mr, Pd, Qp, QpOptions, SendRequest,
    WrOp,
};

/// Length of the registered memory, in bytes.
const LEN: u64 = 1 << 20;
/// Offset of the data in it: deliberately unaligned.
const AT: u64 = 4099;
const DATA: usize = 100_003;
const TIMEOUT: Duration = Duration::from_secs(10);

/// The result of registering one kind of memory in one way.
#[derive(Clone, Debug, Serialize)]
pub struct Trial {
    /// The kind of memory: `host`, `cuda:0 plain`, …
    pub memory: String,
    /// How it was registered: `handle`, `address`, `dma-buf, pinned`, …
    pub by: &'static str,
    /// How processes of this machine map device memory that is registered by its handle.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub peers: Option<PeerAccess>,
    /// The result.
    #[serde(flatten)]
    pub outcome: TrialOutcome,
}

/// How other processes of this machine access registered device memory.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PeerAccess {
    /// They map it by this, and their GPU copies.
    Mapped(&'static str),
    /// They send packets; the reason.
    Packets(String),
}

/// The result of a [`Trial`].
#[derive(Clone, Debug, Serialize)]
#[serde(tag = "outcome", rename_all = "lowercase")]
pub enum TrialOutcome {
    /// The memory was registered, and an RDMA write and a read transferred the right data.
    Works {
        /// How the memory is accessed.
        path: String,
        /// Time to register, in microseconds.
        register_us: f64,
        /// Why no better path is used.
        why: Vec<String>,
    },
    /// The registration or the transfer failed.
    Refused {
        /// The reason, and what to do.
        why: String,
    },
}

/// How memory is registered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Handle,
    Address,
    OnDemand,
    DmaBuf(AttachMode),
    Staged,
}

impl By {
    const ALL: [Self; 6] = [
        Self::Handle,
        Self::Address,
        Self::OnDemand,
        Self::DmaBuf(AttachMode::Static),
        Self::DmaBuf(AttachMode::Dynamic),
        Self::Staged,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Handle => "handle",
            Self::Address => "address",
            Self::OnDemand => "address, on demand",
            Self::DmaBuf(AttachMode::Static) => "dma-buf, pinned",
            Self::DmaBuf(AttachMode::Dynamic) => "dma-buf, may move",
            Self::Staged => "handle, staged",
        }
    }
}

/// The memory under test, which can be read without its registration.
enum Subject {
    Host(HostMemory),
    Device(Allocation),
}

/// Registers each kind of memory that this machine has, in each way, and moves data through it from
/// one software HCA of this process to another. Takes about a second.
///
/// ```
/// use warpwire_doctor::{PeerAccess, TrialOutcome, try_registrations};
/// let trials = try_registrations()?;
/// let find = |memory, by| trials.iter().find(move |t| t.memory == memory && t.by == by).unwrap();
/// let (host, gpu) = (find("host", "address"), find("sim:0 vmm", "handle"));
/// assert!(matches!(host.outcome, TrialOutcome::Works { .. }));
/// assert!(matches!(gpu.peers, Some(PeerAccess::Mapped("memfd"))), "{:?}", gpu.peers);
/// # Ok::<(), warpwire::Error>(())
/// ```
pub fn try_registrations() -> Result<Vec<Trial>> {
    let bench = Bench::new()?;
    let mut trials = Vec::new();
    let mut all = |memory: &str, subject: &Result<Subject>| {
        // Warm-up: excludes one-time costs of the process, such as measuring the fastest copies.
        if let Ok(subject) = subject {
            let _ = bench.register(subject, By::Handle);
        }
        let host = matches!(subject, Ok(Subject::Host(_)));
        for by in By::ALL.into_iter().filter(|by| !host || *by != By::Staged) {
            let registered =
                subject.as_ref().map_err(Clone::clone).and_then(|subject| bench.run(subject, by));
            let outcome = match registered {
                Ok(works) => works,
                Err(error) => TrialOutcome::Refused { why: error.to_string() },
            };
            let peers = match (subject, by, &outcome) {
                (Ok(Subject::Device(memory)), By::Handle, TrialOutcome::Works { .. }) => {
                    peer_access(memory)
                }
                _ => None,
            };
            trials.push(Trial { memory: memory.to_owned(), by: by.name(), peers, outcome });
        }
    };
    all("host", &HostMemory::new(LEN).map(Subject::Host));
    for device in mem::discover().devices.iter().filter(|device| device.info().ordinal == 0) {
        for kind in [MemoryKind::Plain, MemoryKind::Vmm, MemoryKind::Pool, MemoryKind::Pinned] {
            let subject = device.alloc_kind(LEN, kind).map(Subject::Device);
            all(&format!("{} {kind}", device.label()), &subject);
        }
    }
    Ok(trials)
}

/// How processes of this machine would map this memory; `None` for memory of the host.
fn peer_access(memory: &Allocation) -> Option<PeerAccess> {
    if memory.host_bytes().is_ok() {
        return None;
    }
    Some(match memory.export_ipc() {
        Ok(handle) => PeerAccess::Mapped(handle.handle_type()),
        Err(why) => PeerAccess::Packets(why.reason().to_owned()),
    })
}

/// Two connected software HCAs; the second one registers the memory under test.
struct Bench {
    near: Context,
    far: Context,
    pd: Pd,
    far_pd: Pd,
    cq: Cq,
    qp: Qp,
    _far: (Cq, Qp),
}

impl Bench {
    fn new() -> Result<Self> {
        let hub = Hub::new();
        let open = |last: u8| Context::open(hub.endpoint(([10, 0, 0, last], 4791).into())?);
        let (near, far) = (open(1)?, open(2)?);
        let (pd, far_pd) = (near.alloc_pd(), far.alloc_pd());
        let (cq, far_cq) = (near.create_cq(16)?, far.create_cq(16)?);
        let qp = near.create_qp(&pd, &cq, &cq, QpOptions::default())?;
        let peer = far.create_qp(&far_pd, &far_cq, &far_cq, QpOptions::default())?;
        qp.connect(&peer.endpoint())?;
        peer.connect(&qp.endpoint())?;
        Ok(Self { near, far, pd, far_pd, cq, qp, _far: (far_cq, peer) })
    }

    fn run(&self, subject: &Subject, by: By) -> Result<TrialOutcome> {
        let start = Instant::now();
        let mr = self.register(subject, by)?;
        let register_us = start.elapsed().as_secs_f64() * 1e6;
        self.exercise(subject, &mr)?;
        Ok(TrialOutcome::Works { path: mr.path().to_string(), register_us, why: mr.why() })
    }

    fn register(&self, subject: &Subject, by: By) -> Result<Mr> {
        let rights = Access::LOCAL_WRITE | Access::REMOTE_READ | Access::REMOTE_WRITE;
        let (context, pd) = (&self.far, &self.far_pd);
        let address = match subject {
            Subject::Host(memory) => memory.address(),
            Subject::Device(memory) => match memory.host_bytes() {
                Ok(bytes) => bytes.address(),
                Err(_) => memory.address().raw(),
            },
        };
        match (subject, by) {
            // SAFETY: the subject outlives the registration, and is accessed through shared views
            // only.
            (_, By::Address) => unsafe { context.register_address(pd, address, LEN, None, rights) },
            // SAFETY: as above.
            (_, By::OnDemand) => unsafe {
                context.register_address(pd, address, LEN, None, rights | Access::ON_DEMAND)
            },
            (Subject::Host(memory), By::DmaBuf(attach)) => {
                let range = DmaBufRange { fd: memory.as_fd(), offset: 0, len: LEN };
                context.register_dmabuf(pd, range, None, rights, attach)
            }
            (Subject::Device(memory), By::DmaBuf(attach)) => {
                let buffer = memory.export_dmabuf(0, LEN)?;
                context.register_dmabuf(pd, (&buffer).into(), None, rights, attach)
            }
            (Subject::Host(memory), _) => context.register(pd, memory.clone(), rights),
            (Subject::Device(memory), By::Staged) => {
                context.register(pd, MemorySource::from(memory.whole()?).staged(), rights)
            }
            (Subject::Device(memory), _) => context.register(pd, memory.whole()?, rights),
        }
    }

    /// Writes to the memory and reads it back by RDMA, and compares the data.
    fn exercise(&self, subject: &Subject, mr: &Mr) -> Result<()> {
        let sent: Vec<u8> = (0..DATA).map(|i| (i * 7 + i / 251) as u8).collect();
        let own = HostMemory::new(2 * DATA as u64)?;
        own.bytes().write(0, &sent)?;
        let local = self.near.register(&self.pd, own.clone(), Access::LOCAL_WRITE)?;
        let remote = mr.remote(AT);
        self.finish(SendRequest::new(1, WrOp::Write(remote)).with(&[local.sge(0, DATA as u32)]))?;
        let mut seen = vec![0; DATA];
        match subject {
            Subject::Host(memory) => memory.bytes().read(AT, &mut seen)?,
            Subject::Device(memory) => memory.read(AT, &mut seen)?,
        }
        let wrong = |what: &'static str| {
            Error::new(Kind::DeviceLost, what).why("the data differs from what was sent")
        };
        if seen != sent {
            return Err(wrong("write to registered memory"));
        }
        let back = local.sge(DATA as u64, DATA as u32);
        self.finish(SendRequest::new(2, WrOp::Read(remote)).with(&[back]))?;
        own.bytes().read(DATA as u64, &mut seen)?;
        if seen != sent { Err(wrong("read from registered memory")) } else { Ok(()) }
    }

    fn finish(&self, request: SendRequest<'_>) -> Result<()> {
        self.qp.post_send(&[request])?;
        let failed = |why: String| Error::new(Kind::DeviceLost, "use registered memory").why(why);
        let done = self.cq.wait_next(TIMEOUT)?;
        match done {
            Some(done) if done.is_success() => Ok(()),
            Some(done) => Err(failed(format!("the request completed with {:?}", done.status))),
            None => Err(failed("the request did not complete in time".into())),
        }
    }
}

/// The trials as a table: successful ones first, then failed ones, with reasons.
pub fn registrations_to_text(trials: &[Trial]) -> String {
    let mut text = String::new();
    // Writing to a string cannot fail.
    let _ = writeln!(text, "{:<14} {:<19} {:<27} {:>9}", "MEMORY", "REGISTERED BY", "PATH", "TIME");
    for trial in trials {
        if let TrialOutcome::Works { path, register_us, why } = &trial.outcome {
            let (memory, by) = (&trial.memory, trial.by);
            let _ = writeln!(text, "{memory:<14} {by:<19} {path:<27} {register_us:>6.1} µs");
            for why in why {
                let _ = writeln!(text, "{:34} {}", "", super::printable(why));
            }
            let _ = match &trial.peers {
                None => Ok(()),
                Some(PeerAccess::Mapped(handle_type)) => {
                    writeln!(text, "{:34} mapped by peers of this machine: {handle_type}", "")
                }
                Some(PeerAccess::Packets(why)) => {
                    let why = super::printable(why);
                    writeln!(text, "{:34} packets of peers of this machine: {why}", "")
                }
            };
        }
    }
    let refused = |trial: &&Trial| matches!(trial.outcome, TrialOutcome::Refused { .. });
    if trials.iter().any(|trial| refused(&trial)) {
        let _ = writeln!(text, "\nRefused");
    }
    for trial in trials.iter().filter(refused) {
        if let TrialOutcome::Refused { why } = &trial.outcome {
            let _ =
                writeln!(text, "{:<14} {:<19} {}", trial.memory, trial.by, super::printable(why));
        }
    }
    text
}
