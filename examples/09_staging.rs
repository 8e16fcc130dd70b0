//! Searches for the best staging options of a device: device memory without a window is staged
//! (copied through pinned memory), in chunks whose sizes can be tuned.
//!
//! ```console
//! $ cargo run --release -p examples --example 09_staging -- cuda:0
//! $ cargo run --release -p examples --example 09_staging -- sim:0 0.05
//! ```
//!
//! Two software HCAs in one process, with staged memory of one GPU on both sides. First, values of
//! `half` and `step` are compared by the throughput of long messages. Then, with the best of them,
//! values of `small` (writes) and `reads`, below which one copy from or to pageable memory is
//! faster, are compared by the latency of short messages. Figures are ratios to the current
//! options: more than 1 is faster. Each is the best of several interleaved rounds, to exclude
//! interference by other processes. The result can be set with `WARPWIRE_STAGING`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use warpwire::hca::HcaOptions;
use warpwire::link::Hub;
use warpwire::mem::copy::StagingOptions;
use warpwire::mem::{self, Device};
use warpwire::verbs::{
    Access, Completion, Context, Cq, MemorySource, Mr, ProgressMode, Qp, QpOptions, SendRequest,
    WrOp,
};
use warpwire::{Error, Result, error::Kind};

const KIB: u64 = 1 << 10;
const MAX_LEN: u64 = 4 << 20;
const ROUNDS: usize = 3;
/// Messages in flight when throughput is measured.
const DEPTH: u64 = 8;
/// The minimum improvement for which options are changed.
const SIGNIFICANT_RATIO: f64 = 1.02;
const TIMEOUT: Duration = Duration::from_secs(20);

/// A measured load: message length in bytes, read or write, messages in flight.
#[derive(Clone, Copy)]
struct Load {
    name: &'static str,
    len: u64,
    reads: bool,
    depth: u64,
}

const fn load(name: &'static str, len: u64, reads: bool, depth: u64) -> Load {
    Load { name, len, reads, depth }
}

const LONG: [Load; 4] = [
    load("write 1 MiB", 1024 * KIB, false, DEPTH),
    load("read 1 MiB", 1024 * KIB, true, DEPTH),
    load("write 64 KiB", 64 * KIB, false, DEPTH),
    load("write 4 MiB", MAX_LEN, false, 2),
];
const SHORT_WRITES: [Load; 4] = [
    load("write 8 B", 8, false, 1),
    load("write 4 KiB", 4 * KIB, false, 1),
    load("write 16 KiB", 16 * KIB, false, 1),
    load("write 64 KiB", 64 * KIB, false, 1),
];
const SHORT_READS: [Load; 4] = [
    load("read 8 B", 8, true, 1),
    load("read 4 KiB", 4 * KIB, true, 1),
    load("read 16 KiB", 16 * KIB, true, 1),
    load("read 64 KiB", 64 * KIB, true, 1),
];

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let device = mem::open(&arguments.next().unwrap_or_else(|| "sim:0".into()))?;
    let seconds = match arguments.next() {
        Some(text) => text.parse().ok().filter(|time| (0.001..=60.0).contains(time)),
        None => Some(0.05),
    };
    let time = seconds.map(Duration::from_secs_f64).ok_or_else(|| {
        Error::new(Kind::InvalidArgument, "read the time of a measurement")
            .why("it is not a number of seconds between 0.001 and 60")
            .fix("for instance: 09_staging cuda:0 0.05")
    })?;
    let now = StagingOptions::from_env()?;
    println!("{} ({}), current options: {now}", device.label(), device.info().name);
    let search = Search { device, time, now };

    let halves = [128, 256, 512, 1024, 2048].map(|half| half * KIB);
    let steps = [16, 32, 64, 128, 256, 512].map(|step| step * KIB);
    let pairs = halves.into_iter().flat_map(|half| steps.map(|step| (half, step)));
    let options = pairs
        .filter(|(half, step)| step <= half)
        .map(|(half, step)| now.with_half(half).with_step(step).with_small(now.small.min(half)));
    let best = search.table("half and step", &LONG, options.collect())?;

    let smalls = [0, 64, 1024, 4096, 8192, 16384, 32768, 65536].into_iter();
    let smalls = smalls.filter(|small| *small <= best.half).map(|small| best.with_small(small));
    let best = search.table("small (writes)", &SHORT_WRITES, smalls.collect())?;

    let reads = [1, 1024, 4096, 16384, 32768, 65536, 131_072].into_iter();
    let best =
        search.table("reads", &SHORT_READS, reads.map(|reads| best.with_reads(reads)).collect())?;
    println!("\nbest options: WARPWIRE_STAGING={best}");
    Ok(())
}

struct Search {
    device: Device,
    time: Duration,
    now: StagingOptions,
}

impl Search {
    /// Measures all of these options, prints a line for each, and returns the best.
    fn table(
        &self,
        title: &str,
        loads: &[Load],
        tried: Vec<StagingOptions>,
    ) -> Result<StagingOptions> {
        let mut all = vec![self.now];
        all.extend(tried.into_iter().filter(|staging| *staging != self.now));
        let mut rates = vec![vec![0.0_f64; loads.len()]; all.len()];
        for _ in 0..ROUNDS {
            for (staging, rates) in all.iter().zip(&mut rates) {
                let bench = Bench::new(&self.device, *staging)?;
                for (load, rate) in loads.iter().zip(rates) {
                    *rate = rate.max(bench.rate(*load, self.time)?);
                }
            }
        }
        print!("\n{title}\n{:>9} {:>9} {:>9} {:>9}", "half", "step", "small", "reads");
        loads.iter().for_each(|load| print!(" {:>13}", load.name));
        println!(" {:>7}", "mean");
        let mut best = (1.0_f64, self.now);
        for (staging, rate) in all.iter().zip(&rates) {
            let ratios: Vec<f64> = rate.iter().zip(&rates[0]).map(|(own, now)| own / now).collect();
            let product: f64 = ratios.iter().product();
            let mean = product.powf(1.0 / ratios.len() as f64);
            let StagingOptions { half, step, small, reads, .. } = *staging;
            print!("{half:>9} {step:>9} {small:>9} {reads:>9}");
            ratios.iter().for_each(|ratio| print!(" {ratio:>13.3}"));
            println!(" {mean:>7.3}");
            if mean > best.0.max(SIGNIFICANT_RATIO) {
                best = (mean, *staging);
            }
        }
        print!("current options:");
        for (load, rate) in loads.iter().zip(&rates[0]) {
            match load.depth {
                1 => print!("  {} {:.1} µs", load.name, 1e6 / rate),
                _ => print!("  {} {:.0} MiB/s", load.name, rate * load.len as f64 / 1048576.0),
            }
        }
        println!("\nbest of these: {} ({:.3} times the current rate)", best.1, best.0);
        Ok(best.1)
    }
}

/// Two connected devices with staged memory.
struct Bench {
    near: Mr,
    far: Mr,
    qp: Qp,
    cq: Cq,
    /// The responder, whose engine has a thread of its own.
    _peer: (Context, Qp, Cq),
}

impl Bench {
    fn new(device: &Device, staging: StagingOptions) -> Result<Self> {
        let hub = Arc::new(Hub::new());
        let open = |host: u8, progress_mode| {
            let address = ([10, 0, 0, host], 4791).into();
            Context::open_with(
                hub.endpoint(address)?,
                HcaOptions::default().with_progress_mode(progress_mode).with_direct(false),
            )
        };
        let spin = ProgressMode::Thread { spin: Duration::from_millis(5), core: None };
        let (ours, theirs) = (open(1, ProgressMode::Manual)?, open(2, spin)?);
        let end = |context: &Context| {
            let pd = context.alloc_pd();
            let memory = MemorySource::from(device.alloc(MAX_LEN)?.whole()?).with_staging(staging);
            let mr = context.register(&pd, memory, Access::ALL)?;
            let cq = context.create_cq(64)?;
            let qp = context.create_qp(&pd, &cq, &cq, QpOptions::default())?;
            Ok::<_, Error>((mr, cq, qp))
        };
        let ((near, cq, qp), (far, peer_cq, peer_qp)) = (end(&ours)?, end(&theirs)?);
        qp.connect(&peer_qp.endpoint())?;
        peer_qp.connect(&qp.endpoint())?;
        Ok(Self { near, far, qp, cq, _peer: (theirs, peer_qp, peer_cq) })
    }

    /// Messages per second, measured for about `time`.
    fn rate(&self, load: Load, time: Duration) -> Result<f64> {
        let data = [self.near.sge(0, load.len as u32)];
        let remote = self.far.remote(0);
        let op = if load.reads { WrOp::Read(remote) } else { WrOp::Write(remote) };
        let (mut posted, mut ended, mut warm) = (0, 0, 0);
        let mut start = Instant::now();
        loop {
            while posted - ended < load.depth {
                self.qp.post_send(&[SendRequest::new(posted, op).with(&data)])?;
                posted += 1;
            }
            self.wait(load.name)?;
            ended += 1;
            if warm == 0 && start.elapsed() > time / 5 {
                // The warm-up, which creates what exists once, does not count.
                (warm, start) = (ended, Instant::now());
            }
            if warm > 0 && ended > warm && start.elapsed() >= time {
                let rate = (ended - warm) as f64 / start.elapsed().as_secs_f64();
                while ended < posted {
                    self.wait(load.name)?;
                    ended += 1;
                }
                return Ok(rate);
            }
        }
    }

    /// Waits for a completion by polling, so that the wake-up time is not measured.
    fn wait(&self, name: &str) -> Result<()> {
        let mut one = [Completion::EMPTY];
        let start = Instant::now();
        loop {
            for _ in 0..100 {
                if self.cq.poll(&mut one)? == 0 {
                    continue;
                }
                return match one[0].is_success() {
                    true => Ok(()),
                    false => Err(Error::new(Kind::StreamFailed, format!("measure {name}"))
                        .why(format!("a work request failed: {:?}", one[0].status))
                        .fix("check the device with `warpwire doctor`")),
                };
            }
            // With fewer cores than threads, the responder may need this core.
            std::thread::yield_now();
            if start.elapsed() > TIMEOUT {
                return Err(Error::new(Kind::Timeout, format!("measure {name}"))
                    .why(format!("no completion within {TIMEOUT:?}")));
            }
        }
    }
}
