//! One side of a ping-pong: a device, a context with a thread, queue pairs that streams and kernels drive, memory.

use std::cell::Cell;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use warpwire::hca::HcaOptions;
use warpwire::mem::{Allocation, Backend, Device, Stream, Word};
use warpwire::stream::{CqMemory, StreamQp, StreamQpOptions, Ticket};
use warpwire::verbs::bootstrap::Bootstrap;
use warpwire::verbs::{
    Access, Completion, Context, Mr, ProgressMode, QpEndpoint, QpOptions, ReceiveRequest,
    SendRequest, Sge, WrOp,
};
use warpwire_apps::{pattern, spin::Spin};

use super::Failure;
use super::kernel_qp::KernelEndpoint;
use crate::perf::links;

/// No round takes as long.
pub(super) const TIMEOUT: Duration = Duration::from_secs(20);

/// Who begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Ping,
    Pong,
}

/// What is done so many times.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub(super) size: u64,
    pub(super) rounds: u64,
    /// How long a kernel computes before each message; none if zero.
    pub(super) compute: Duration,
    /// The message is copied into the request when it is prepared.
    pub(super) inline: bool,
    /// Each message bears its number, which is looked at: not timed.
    pub(super) stamped: bool,
}

pub(super) struct Endpoint {
    pub(super) role: Role,
    pub(super) qp: StreamQp,
    pub(super) kernel_qp: KernelEndpoint,
    pub(super) stream: Stream,
    pub(super) spin: Spin,
    /// Opened to let the first message go.
    pub(super) gate: Word,
    pub(super) outgoing: Allocation,
    incoming: Allocation,
    log: Allocation,
    polled: Cell<[u64; 2]>,
    /// The first of the receives that were posted last.
    first: Cell<Option<Ticket>>,
    out: Mr,
    into: Mr,
    // Kept while the queue pair is used.
    _context: Context,
}

/// What both sides must have alike.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan<'a> {
    pub(super) link: &'a str,
    /// The engine of both ends, where they share one.
    pub(super) shared: Option<&'a Context>,
    pub(super) max_size: u64,
    pub(super) rounds: u64,
    pub(super) cq_memory: CqMemory,
    pub(super) wait_timeout: bool,
}

/// A context with a thread that looks at doorbells all the time.
pub(super) fn engine(device: &Device, link: &str, address: IpAddr) -> Result<Context, Failure> {
    let (link, _) = links::make(link, address, None, None)?;
    // The simulated GPU's streams want processors too.
    let spin = match device.info().backend {
        Backend::Cuda => Duration::from_millis(200),
        Backend::Sim => Duration::from_micros(50),
    };
    let progress_mode = ProgressMode::Thread { spin, core: None };
    Ok(Context::open_with(link, HcaOptions { progress_mode, ..HcaOptions::default() })?)
}

impl Endpoint {
    pub(super) fn open(
        role: Role,
        device: &Device,
        plan: &Plan<'_>,
        bootstrap: &mut Bootstrap,
    ) -> Result<Self, Failure> {
        let context = match plan.shared {
            Some(context) => context.clone(),
            None => engine(device, plan.link, bootstrap.local()?.ip())?,
        };
        let pd = context.pd();
        let depth = (plan.rounds as u32).max(16) * 2;
        // A second for an answer: a busy machine is no dead peer.
        let qp = QpOptions {
            send_depth: depth,
            receive_depth: depth,
            timeout: 18,
            ..QpOptions::default()
        };
        let options = StreamQpOptions {
            qp,
            waits: depth * 2,
            cq_memory: plan.cq_memory,
            wait_timeout: plan.wait_timeout.then_some(TIMEOUT),
            ..StreamQpOptions::default()
        };
        let qp = StreamQp::create(&context, &pd, device, options)?;
        let len = plan.max_size.max(64);
        let (outgoing, incoming) = (device.alloc(len)?, device.alloc(len)?);
        let mut bytes = vec![0; len as usize];
        incoming.write(0, &bytes)?;
        pattern::fill_bytes(&mut bytes, 7, 0);
        outgoing.write(0, &bytes)?;
        let out = context.register(&pd, outgoing.whole()?, Access::LOCAL_WRITE)?;
        let written = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let into = context.register(&pd, incoming.whole()?, written)?;
        let peer: QpEndpoint = bootstrap.swap(&qp.endpoint())?;
        qp.connect(&peer)?;
        let kernel_qp = KernelEndpoint::open(device, (&context, &pd), &into, bootstrap)?;
        let gate = device.alloc_pinned(64)?.word64(0)?;
        Ok(Self {
            role,
            qp,
            kernel_qp,
            stream: device.stream()?,
            spin: Spin::load(device)?,
            gate,
            outgoing,
            incoming,
            log: device.alloc(plan.rounds * 8)?,
            polled: Cell::new([0; 2]),
            first: Cell::new(None),
            out,
            into,
            _context: context,
        })
    }

    /// Posts a receive for each round.
    pub(super) fn post_receives(&self, job: &Job) -> Result<(), Failure> {
        for id in 0..job.rounds {
            let data = [self.into.sge(0, job.size as u32)];
            let ticket = self.qp.post_receive(&[ReceiveRequest { id, data: &data }])?;
            if id == 0 {
                self.first.set(Some(ticket));
            }
        }
        Ok(())
    }

    /// The receive of a round, of those that were posted last.
    pub(super) fn receive(&self, round: u64) -> Result<Ticket, Failure> {
        let first = self.first.get().ok_or_else(|| self.failed("no receive was posted"))?;
        Ok(first.after(round))
    }

    /// The request of a round, handed to `act`: its memory lives no longer.
    pub(super) fn with_request<T>(
        &self,
        job: &Job,
        round: u64,
        act: impl FnOnce(&SendRequest<'_>) -> warpwire::Result<T>,
    ) -> Result<T, Failure> {
        let send = SendRequest::new(round, WrOp::Send);
        if job.inline {
            let mut bytes = [0; INLINE as usize];
            pattern::fill_bytes(&mut bytes, 7, 0);
            if job.stamped {
                bytes[..4].copy_from_slice(&stamp(round).to_le_bytes());
            }
            return Ok(act(&send.inline(&bytes[..job.size as usize]))?);
        }
        let data = [self.out.sge(0, job.size as u32)];
        Ok(act(&send.with(&data))?)
    }

    /// The memory of a message, for kernels.
    pub(super) fn data(&self, job: &Job) -> Sge {
        self.out.sge(0, job.size as u32)
    }

    /// Forgets what arrived before: what is compared next must have come since.
    pub(super) fn clear_log(&self, job: &Job) -> Result<(), Failure> {
        self.incoming.write(0, &vec![0; job.size as usize])?;
        Ok(self.log.write(0, &vec![0; job.rounds as usize * 8])?)
    }

    /// Copies the number that the message bears to the log, on the stream.
    pub(super) fn log_on_stream(&self, round: u64) -> Result<(), Failure> {
        let (to, from) = (self.log.region(round * 8, 4)?, self.incoming.region(0, 4)?);
        Ok(self.stream.copy(&to, &from)?)
    }

    /// Takes completions until so many requests and receives have ended since the beginning.
    pub(super) fn poll_until(&self, wanted: [u64; 2]) -> Result<(), Failure> {
        let mut some = [Completion::EMPTY; 16];
        let start = Instant::now();
        loop {
            let mut polled = self.polled.get();
            if polled[0] >= wanted[0] && polled[1] >= wanted[1] {
                return Ok(());
            }
            let count = self.qp.poll(&mut some)?;
            for done in &some[..count] {
                if !done.is_success() {
                    return Err(self.failed(&format!("{}", done.status)));
                }
                polled[usize::from(done.is_receive())] += 1;
            }
            self.polled.set(polled);
            if count == 0 && start.elapsed() > TIMEOUT {
                return Err(self.failed("nothing came in time"));
            }
        }
    }

    /// How many requests and receives have ended and were taken.
    pub(super) fn polled(&self) -> [u64; 2] {
        self.polled.get()
    }

    fn failed(&self, why: &str) -> Failure {
        match self.qp.failure() {
            Some(failure) => Failure::Runtime(failure.to_string()),
            None => Failure::Runtime(format!("cannot play ping-pong: {why}")),
        }
    }

    /// Waits until the stream is done, and sees that nothing failed.
    pub(super) fn finish_stream(&self) -> Result<(), Failure> {
        self.stream.synchronize(TIMEOUT * 2)?;
        match self.qp.failure() {
            Some(failure) => Err(Failure::Runtime(failure.to_string())),
            None => Ok(()),
        }
    }

    /// What arrived is what was sent: every number in the log, and the pattern of the last message.
    pub(super) fn verify(&self, job: &Job) -> Result<(), Failure> {
        let mut log = vec![0; job.rounds as usize * 8];
        self.log.read(0, &mut log)?;
        let stamp_in = |found: &[u8]| u32::from_le_bytes([found[0], found[1], found[2], found[3]]);
        let wrong: Vec<_> = (0..).zip(log.chunks(8).map(stamp_in)).collect();
        let mut wrong = wrong.iter().filter(|(round, found)| *found != stamp(*round)).peekable();
        if let Some((round, found)) = wrong.peek() {
            let why = format!("message {round} bears {found:#x}, not {:#x}", stamp(*round));
            let (rounds, count) = (job.rounds, wrong.count());
            return Err(Failure::Runtime(format!("WRONG DATA: {why}; {count} of {rounds}")));
        }
        let (mut wanted, mut found) = (vec![0; job.size as usize], vec![0; job.size as usize]);
        pattern::fill_bytes(&mut wanted, 7, 0);
        self.incoming.read(0, &mut found)?;
        match wanted.iter().zip(&found).skip(4).position(|(wanted, found)| wanted != found) {
            Some(at) => Err(Failure::Runtime(format!("WRONG DATA: byte {} of a message", at + 4))),
            None => Ok(()),
        }
    }

    /// Where the CPU writes the number of the next message.
    pub(super) fn stamp_now(&self, round: u64) -> Result<(), Failure> {
        Ok(self.outgoing.write(0, &stamp(round).to_le_bytes())?)
    }

    /// Notes what arrived, from the CPU.
    pub(super) fn log_now(&self, round: u64) -> Result<(), Failure> {
        let mut bytes = [0; 4];
        self.incoming.read(0, &mut bytes)?;
        Ok(self.log.write(round * 8, &bytes)?)
    }
}

/// The most bytes that go into a request.
pub(super) const INLINE: u64 = 64;

/// The number that the message of a round bears.
pub(super) fn stamp(round: u64) -> u32 {
    0xa500_0000 | round as u32
}
