//! `warpwire async sanity`: checks of stream-ordered and kernel-initiated communication.

use std::process::ExitCode;
use std::time::Duration;

use clap::Args;
use serde::Serialize;
use warpwire::hca::HcaOptions;
use warpwire::link::Hub;
use warpwire::mem::{Backend, Condition, Device, Stream, Word};
use warpwire::stream::kernel::SignalWait;
use warpwire::stream::{Descriptors, KernelQp, KernelQpOptions, StreamQp, StreamQpOptions};
use warpwire::verbs::{
    Access, Context, Mr, Pd, ProgressMode, ReceiveRequest, Remote, SendRequest, Status, WrOp,
};
use warpwire_apps::pattern::Pattern;
use warpwire_apps::pingpong_kernels::{KernelTransfer, PingPongEnd, PingPongKernels};

use super::endpoint::TIMEOUT;
use super::{Failure, Reporter};
use crate::copy::target::DeviceChoice;

/// Check ordering, graphs, kernels and error handling
///
/// Uses two contexts of this process on an in-memory link, and streams of one GPU. Prints a line
/// per check; the exit status is 0 only if all pass.
#[derive(Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct Arguments {
    #[command(flatten)]
    device: DeviceChoice,

    /// Print JSON: {"device": …, "checks": [{"name": …, "why_not": null}]}
    #[arg(long)]
    json: bool,
}

const EXAMPLES: &str = "\
Examples:
  warpwire async sanity
  warpwire async sanity -d sim:0 --json | jq '.checks[] | select(.why_not)'";

type Check = fn(&Fixture) -> Result<(), Failure>;

const CHECKS: [(&str, Check); 9] = [
    ("a chain of waits and writes runs in order", chain),
    ("all four wait conditions block and release", conditions),
    ("a message carries what the kernel before it wrote", message),
    ("a thousand messages arrive in order", thousand),
    ("failed work releases the stream, with its cause", failure),
    ("a wait for a silent peer times out", silent_peer),
    ("every replay of a graph posts new work", graphs),
    ("kernels post work and wait for signals", kernels),
    ("a kernel whose work fails exits, with its cause", kernel_failure),
];

#[derive(Serialize)]
struct Outcome {
    name: &'static str,
    why_not: Option<String>,
}

#[derive(Serialize)]
struct Report {
    device: String,
    simulated: bool,
    checks: Vec<Outcome>,
}

pub(super) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let (device, no_cuda) = arguments.device.open()?;
    let reporter = Reporter::new(arguments.json);
    reporter.print(&format!("# Warpwire async sanity: {}\n", device.label()))?;
    if let Some(why) = no_cuda {
        reporter.print(&format!("# simulated: {why}\n"))?;
    }
    let mut checks = Vec::new();
    for (name, check) in CHECKS {
        reporter.set_status(name);
        let outcome = Fixture::new(&device, TIMEOUT).and_then(|fixture| check(&fixture));
        let why_not = outcome.err().map(|(Failure::Usage(why) | Failure::Runtime(why))| why);
        match &why_not {
            None => reporter.print(&format!("ok      {name}\n"))?,
            Some(why) => reporter.print(&format!("FAILED  {name}: {why}\n"))?,
        }
        checks.push(Outcome { name, why_not });
    }
    let failed = checks.iter().filter(|check| check.why_not.is_some()).count();
    match failed {
        0 => reporter.print(">>> SUCCESS\n")?,
        _ => reporter.print(&format!(">>> FAILURE: {failed} of {}\n", checks.len()))?,
    }
    let simulated = device.info().backend == Backend::Sim;
    reporter.finish(&Report { device: device.label(), simulated, checks })?;
    Ok(if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Two connected endpoints.
struct Fixture {
    device: Device,
    ends: [(Context, Pd); 2],
    qps: [StreamQp; 2],
}

const LEN: u64 = 4096;

impl Fixture {
    fn new(device: &Device, wait_timeout: Duration) -> Result<Self, Failure> {
        let hub = Hub::new();
        let progress_mode = ProgressMode::Thread { spin: Duration::from_millis(1), core: None };
        let open = |address: [u8; 4]| -> Result<(Context, Pd), Failure> {
            let link = hub.endpoint((address, 4791).into())?;
            let options = HcaOptions::default().with_progress_mode(progress_mode);
            let context = Context::open_with(link, options)?;
            let pd = context.alloc_pd();
            Ok((context, pd))
        };
        let ends = [open([10, 0, 0, 1])?, open([10, 0, 0, 2])?];
        let wait_timeout = Some(wait_timeout);
        let make = |(context, pd): &(Context, Pd)| {
            let options = StreamQpOptions::default().with_wait_timeout(wait_timeout);
            StreamQp::create(context, pd, device, options)
        };
        let qps = [make(&ends[0])?, make(&ends[1])?];
        qps[0].connect(&qps[1].endpoint())?;
        qps[1].connect(&qps[0].endpoint())?;
        Ok(Self { device: device.clone(), ends, qps })
    }

    /// Two more connected queue pairs, for kernels.
    fn for_kernels(&self) -> Result<[KernelQp; 2], Failure> {
        let make = |(context, pd): &(Context, Pd)| {
            KernelQp::create(context, pd, &self.device, KernelQpOptions::default())
        };
        let qps = [make(&self.ends[0])?, make(&self.ends[1])?];
        qps[0].connect(&qps[1].endpoint())?;
        qps[1].connect(&qps[0].endpoint())?;
        Ok(qps)
    }

    fn stream(&self) -> Result<Stream, Failure> {
        Ok(self.device.stream()?)
    }

    fn word(&self) -> Result<Word, Failure> {
        let word = self.device.alloc_pinned(64)?.word64(0)?;
        word.store(0)?;
        Ok(word)
    }

    fn memory(&self, end: usize) -> Result<(warpwire::mem::Allocation, Mr), Failure> {
        let memory = self.device.alloc(LEN)?;
        memory.write(0, &[0; LEN as usize])?;
        let (context, pd) = &self.ends[end];
        let mr = context.register(pd, memory.whole()?, Access::ALL)?;
        Ok((memory, mr))
    }
}

fn expect(condition_holds: bool, what: impl FnOnce() -> String) -> Result<(), Failure> {
    if condition_holds { Ok(()) } else { Err(Failure::Runtime(what())) }
}

fn chain(fixture: &Fixture) -> Result<(), Failure> {
    let (first, second) = (fixture.stream()?, fixture.stream()?);
    let [gate, middle, end] = [fixture.word()?, fixture.word()?, fixture.word()?];
    let memory = fixture.device.alloc(LEN)?;
    let bytes = [0x5a; LEN as usize];
    let mut list = Descriptors::on(&second);
    list.wait_value(&middle, Condition::Equal, 7)?;
    list.write_memory(&memory.whole()?, &bytes)?;
    list.write_value(&end, 9)?;
    list.post()?;
    let mut list = Descriptors::on(&first);
    list.wait_value(&gate, Condition::AtLeast, 1)?;
    list.write_value(&middle, 7)?;
    list.wait_value(&end, Condition::Equal, 9)?;
    list.post()?;
    std::thread::sleep(Duration::from_millis(5));
    expect(end.load()? == 0, || "the chain ran before its gate was open".to_owned())?;
    gate.store(1)?;
    first.synchronize(TIMEOUT)?;
    let mut found = [0; LEN as usize];
    memory.read(0, &mut found)?;
    expect(found == bytes, || "the memory does not hold the written bytes".to_owned())
}

fn conditions(fixture: &Fixture) -> Result<(), Failure> {
    let stream = fixture.stream()?;
    let has_nor = fixture.device.capabilities().stream_wait_nor.is_yes();
    for (condition, value, before, after) in [
        (Condition::AtLeast, 5, 4, 5),
        (Condition::Equal, 5, 6, 5),
        (Condition::And, 4, 3, 5),
        (Condition::Nor, u64::MAX << 1, 1, 2),
    ] {
        if condition == Condition::Nor && !has_nor {
            continue;
        }
        let word = fixture.word()?;
        word.store(before)?;
        stream.wait_value(&word, condition, value)?;
        std::thread::sleep(Duration::from_millis(5));
        expect(!stream.is_idle()?, || format!("{condition:?} released the stream too early"))?;
        word.store(after)?;
        stream.synchronize(TIMEOUT)?;
    }
    Ok(())
}

fn message(fixture: &Fixture) -> Result<(), Failure> {
    let [a, b] = &fixture.qps;
    let pattern = Pattern::load(&fixture.device)?;
    let ((from, source), (to, target)) = (fixture.memory(0)?, fixture.memory(1)?);
    let (sender, receiver, wrong) = (fixture.stream()?, fixture.stream()?, fixture.word()?);
    b.post_receive(&[ReceiveRequest { id: 1, data: &[target.sge(0, LEN as u32)] }])?;
    b.wait_receive(&receiver)?;
    pattern.check(&receiver, &to.whole()?, 3, &wrong)?;
    pattern.fill(&sender, &from.whole()?, 3)?;
    a.queue(&sender, &SendRequest::new(1, WrOp::Send).with(&[source.sge(0, LEN as u32)]))?;
    receiver.synchronize(TIMEOUT)?;
    let wrong = wrong.load()?;
    expect(wrong == 0, || format!("{wrong} words of the message are wrong"))
}

fn thousand(fixture: &Fixture) -> Result<(), Failure> {
    let [a, b] = &fixture.qps;
    let (to, target) = fixture.memory(1)?;
    let log = fixture.device.alloc(8000)?;
    let (sender, receiver) = (fixture.stream()?, fixture.stream()?);
    for number in 0..1000_u64 {
        b.post_receive(&[ReceiveRequest { id: number, data: &[target.sge(0, 8)] }])?;
        b.wait_receive(&receiver)?;
        receiver.copy(&log.region(number * 8, 8)?, &to.region(0, 8)?)?;
        let bytes = (number + 1).to_le_bytes();
        a.queue(&sender, &SendRequest::new(number, WrOp::Send).inline(&bytes))?;
        // The next message uses the same buffer.
        receiver.synchronize(TIMEOUT)?;
        for (qp, what) in [(a, "request"), (b, "receive")] {
            let done = qp.wait_next(TIMEOUT)?;
            expect(done.is_some_and(|done| done.id == number && done.is_success()), || {
                format!("{what} {number} completed as {done:?}")
            })?;
        }
    }
    let mut found = vec![0; 8000];
    log.read(0, &mut found)?;
    for (number, bytes) in found.chunks(8).enumerate() {
        expect(bytes == (number as u64 + 1).to_le_bytes(), || {
            format!("message {number} holds {bytes:?}")
        })?;
    }
    Ok(())
}

fn failure(fixture: &Fixture) -> Result<(), Failure> {
    let [a, _] = &fixture.qps;
    let (_memory, source) = fixture.memory(0)?;
    let stream = fixture.stream()?;
    let nowhere = Remote { address: 0x10, rkey: 0x00de_ad00 };
    let request = SendRequest::new(5, WrOp::Write(nowhere));
    let ticket = a.queue(&stream, &request.with(&[source.sge(0, 8)]))?;
    a.wait_send(&stream, ticket)?;
    stream.synchronize(TIMEOUT)?;
    let failure = a.failure();
    let status = failure.as_ref().and_then(|failure| failure.status);
    expect(status == Some(Status::RemoteAccess), || format!("the cause is {failure:?}"))
}

fn silent_peer(fixture: &Fixture) -> Result<(), Failure> {
    let fixture = Fixture::new(&fixture.device, Duration::from_millis(500))?;
    let [a, _] = &fixture.qps;
    let (_memory, target) = fixture.memory(0)?;
    let stream = fixture.stream()?;
    a.post_receive(&[ReceiveRequest { id: 1, data: &[target.sge(0, 8)] }])?;
    a.wait_receive(&stream)?;
    stream.synchronize(TIMEOUT)?;
    expect(a.failure().is_some_and(|failure| failure.waiters.len() == 1), || {
        "the failure does not name the waiter".to_owned()
    })
}

/// Offset of the kernels' data, after the signal word that the peer adds to.
const DATA: u64 = 64;

fn graphs(fixture: &Fixture) -> Result<(), Failure> {
    const REPLAYS: u64 = 100;
    let [a, b] = fixture.for_kernels()?;
    let ((from, source), (to, target)) = (fixture.memory(0)?, fixture.memory(1)?);
    let (sender, receiver) = (fixture.stream()?, fixture.stream()?);
    let word = to.word64(0)?;
    let wait = SignalWait::new(&word, 0, 1)?;
    let send = sender.capture(|stream| {
        let (there, here) = (target.remote(DATA), source.sge(DATA, 8));
        a.put_signal_on_stream(stream, there, here, target.remote(0), 1)?;
        a.wait_on_stream(stream)
    })?;
    let receive = receiver.capture(|stream| b.wait_signal_on_stream(stream, &wait))?;
    for number in 1..=REPLAYS {
        from.write(DATA, &number.to_le_bytes())?;
        receiver.replay(&receive)?;
        sender.replay(&send)?;
        receiver.synchronize(TIMEOUT)?;
        let mut found = [0; 8];
        to.read(DATA, &mut found)?;
        expect(found == number.to_le_bytes(), || format!("replay {number} delivered {found:?}"))?;
        sender.synchronize(TIMEOUT)?;
    }
    a.check()?;
    b.check()?;
    let count = word.load()?;
    expect(count == REPLAYS, || format!("{count} signals of {REPLAYS} replays"))
}

fn kernels(fixture: &Fixture) -> Result<(), Failure> {
    const ROUNDS: u64 = 100;
    let qps = fixture.for_kernels()?;
    let memories = [fixture.memory(0)?, fixture.memory(1)?];
    let (kernels, streams) =
        (PingPongKernels::load(&fixture.device)?, [fixture.stream()?, fixture.stream()?]);
    for (at, byte) in [(0, 0xa0), (1, 0xb0)] {
        memories[at].0.write(LEN / 2, &[byte; 256])?;
    }
    for at in [1, 0] {
        let ((memory, mine), (_, theirs)) = (&memories[at], &memories[at ^ 1]);
        let side = PingPongEnd {
            qp: &qps[at],
            to: theirs.remote(DATA),
            from: mine.sge(LEN / 2, 256),
            signal: theirs.remote(0),
            own: &memory.word64(0)?,
            start: 0,
            sends_first: at == 0,
        };
        kernels.ping_pong(&streams[at], &side, ROUNDS, Duration::ZERO, TIMEOUT)?;
    }
    streams.iter().try_for_each(|stream| stream.synchronize(TIMEOUT))?;
    kernels.check()?;
    for (at, byte) in [(0, 0xb0), (1, 0xa0)] {
        let (memory, mut found) = (&memories[at].0, [0; 256]);
        memory.read(DATA, &mut found)?;
        expect(found == [byte; 256], || format!("kernel {at} received wrong data"))?;
        let rounds = memory.word64(0)?.load()?;
        expect(rounds == ROUNDS, || format!("{rounds} signals in {ROUNDS} rounds"))?;
    }
    Ok(())
}

fn kernel_failure(fixture: &Fixture) -> Result<(), Failure> {
    let [qp, _peer] = &fixture.for_kernels()?;
    let (_memory, source) = fixture.memory(0)?;
    let (kernels, stream) = (PingPongKernels::load(&fixture.device)?, fixture.stream()?);
    let there = Remote { address: 0x10, rkey: 0x00de_ad00 };
    let work = KernelTransfer { qp, there, here: source.sge(0, 8), reads: false };
    kernels.transfer(&stream, &work, 1, Duration::ZERO, TIMEOUT)?;
    stream.synchronize(TIMEOUT)?;
    let failure = qp.progress()?.failure;
    expect(kernels.check().is_err(), || "the kernel reported success".to_owned())?;
    expect(failure.is_some_and(|(_, status)| status == Status::RemoteAccess), || {
        format!("the cause is {failure:?}")
    })
}
