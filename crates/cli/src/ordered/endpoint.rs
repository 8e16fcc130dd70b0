//! One side of a ping-pong: a context with a progress thread, queue pairs driven by streams and
//! kernels, and device memory.

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

/// Longer than a working device takes for one batch.
pub(super) const TIMEOUT: Duration = Duration::from_secs(20);

/// `Ping` sends first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Ping,
    Pong,
}

/// One batch of round trips.
#[derive(Clone, Copy, Debug)]
pub(super) struct Job {
    pub(super) size: u64,
    pub(super) rounds: u64,
    /// How long a kernel computes before each message; no kernel if zero.
    pub(super) compute: Duration,
    /// The message is copied into the work request when it is prepared, not read from device
    /// memory.
    pub(super) inline: bool,
    /// Each message carries its round number, which is verified; the batch is not timed.
    pub(super) stamped: bool,
}

pub(super) struct Endpoint {
    pub(super) role: Role,
    pub(super) qp: StreamQp,
    pub(super) kernel_qp: KernelEndpoint,
    pub(super) stream: Stream,
    pub(super) spin: Spin,
    /// Set to 1 to let the stream send the first message.
    pub(super) gate: Word,
    pub(super) outgoing: Allocation,
    incoming: Allocation,
    log: Allocation,
    polled: Cell<[u64; 2]>,
    /// Ticket of the first receive of the last [`Endpoint::post_receives`].
    first: Cell<Option<Ticket>>,
    out: Mr,
    into: Mr,
    // Must outlive the queue pairs.
    _context: Context,
}

/// Parameters that must be the same on both sides.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan<'a> {
    pub(super) link: &'a str,
    /// The context of both sides with `--one-engine`.
    pub(super) shared: Option<&'a Context>,
    pub(super) max_size: u64,
    pub(super) rounds: u64,
    pub(super) cq_memory: CqMemory,
    pub(super) wait_timeout: bool,
}

/// Opens a context whose progress thread polls doorbells.
pub(super) fn engine(device: &Device, link: &str, address: IpAddr) -> Result<Context, Failure> {
    let (link, _) = links::make(link, address, None, None)?;
    // The simulated GPU's streams need CPU cores too, so spin only briefly there.
    let spin = match device.info().backend {
        Backend::Cuda => Duration::from_millis(200),
        Backend::Sim => Duration::from_micros(50),
    };
    let progress_mode = ProgressMode::Thread { spin, core: None };
    Ok(Context::open_with(link, HcaOptions::default().with_progress_mode(progress_mode))?)
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
        let pd = context.alloc_pd();
        let depth = (plan.rounds as u32).max(16) * 2;
        // ACK timeout 4.096 us * 2^18, about 1 s: a busy machine must not look like a dead peer.
        let qp =
            QpOptions::default().with_send_depth(depth).with_receive_depth(depth).with_timeout(18);
        let options = StreamQpOptions::default()
            .with_qp(qp)
            .with_max_waits(depth * 2)
            .with_cq_memory(plan.cq_memory)
            .with_wait_timeout(plan.wait_timeout.then_some(TIMEOUT));
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

    /// Ticket of a round's receive, of the last [`Endpoint::post_receives`].
    pub(super) fn receive(&self, round: u64) -> Result<Ticket, Failure> {
        let first = self.first.get().ok_or_else(|| self.failed("no receive was posted"))?;
        Ok(first.after(round))
    }

    /// Calls `act` with a round's work request, which borrows memory of this frame.
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

    /// The outgoing message, for kernels.
    pub(super) fn data(&self, job: &Job) -> Sge {
        self.out.sge(0, job.size as u32)
    }

    /// Clears the incoming message and the log, so that verification cannot see data of an earlier
    /// batch.
    pub(super) fn clear_log(&self, job: &Job) -> Result<(), Failure> {
        self.incoming.write(0, &vec![0; job.size as usize])?;
        Ok(self.log.write(0, &vec![0; job.rounds as usize * 8])?)
    }

    /// Enqueues a copy of the arrived message's number to the log.
    pub(super) fn log_on_stream(&self, round: u64) -> Result<(), Failure> {
        let (to, from) = (self.log.region(round * 8, 4)?, self.incoming.region(0, 4)?);
        Ok(self.stream.copy(&to, &from)?)
    }

    /// Polls until at least `wanted` sends and receives have completed since the endpoint was
    /// opened.
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
                return Err(self.failed("no completion in time"));
            }
        }
    }

    /// Sends and receives whose completions were polled.
    pub(super) fn polled(&self) -> [u64; 2] {
        self.polled.get()
    }

    fn failed(&self, why: &str) -> Failure {
        match self.qp.failure() {
            Some(failure) => Failure::Runtime(failure.to_string()),
            None => Failure::Runtime(format!("ping-pong failed: {why}")),
        }
    }

    /// Waits until the stream is done; fails if the queue pair has.
    pub(super) fn finish_stream(&self) -> Result<(), Failure> {
        self.stream.synchronize(TIMEOUT * 2)?;
        match self.qp.failure() {
            Some(failure) => Err(Failure::Runtime(failure.to_string())),
            None => Ok(()),
        }
    }

    /// Verifies every number in the log, and the pattern of the last message.
    pub(super) fn verify(&self, job: &Job) -> Result<(), Failure> {
        let mut log = vec![0; job.rounds as usize * 8];
        self.log.read(0, &mut log)?;
        let stamp_in = |found: &[u8]| u32::from_le_bytes([found[0], found[1], found[2], found[3]]);
        let wrong: Vec<_> = (0..).zip(log.chunks(8).map(stamp_in)).collect();
        let mut wrong = wrong.iter().filter(|(round, found)| *found != stamp(*round)).peekable();
        if let Some((round, found)) = wrong.peek() {
            let why = format!("message {round} has stamp {found:#x}, not {:#x}", stamp(*round));
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

    /// Writes the number of the next message, from the CPU.
    pub(super) fn stamp_now(&self, round: u64) -> Result<(), Failure> {
        Ok(self.outgoing.write(0, &stamp(round).to_le_bytes())?)
    }

    /// Copies the arrived message's number to the log, from the CPU.
    pub(super) fn log_now(&self, round: u64) -> Result<(), Failure> {
        let mut bytes = [0; 4];
        self.incoming.read(0, &mut bytes)?;
        Ok(self.log.write(round * 8, &bytes)?)
    }
}

/// Max bytes of a message that is copied into the work request.
pub(super) const INLINE: u64 = 64;

/// The first 4 bytes of a round's message; never zero.
pub(super) fn stamp(round: u64) -> u32 {
    0xa500_0000 | round as u32
}
