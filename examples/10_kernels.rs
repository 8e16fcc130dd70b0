//! Kernels that post verbs, on a real GPU: every call between two processes, a million operations
//! by a thousand threads, the round trip of a put compared with a relay without HCA, posted, by
//! direct stores, and by stores to mapped memory, also between two processes; replayed graphs.
//!
//! ```console
//! $ 10_kernels                 # cuda:0; a line for each part: PASS, FAIL or skipped, and figures
//! $ 10_kernels sim:0           # the simulated GPU, with fewer rounds
//! $ 10_kernels cuda:0 latency  # one part only
//! ```
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, missing_docs, unsafe_code)]

#[path = "../crates/warpwire/tests/kernels"]
#[allow(dead_code)] // shared with the tests
mod kernels {
    pub mod calls;
    pub mod fixture;
}
#[path = "../crates/warpwire/tests/ptx.rs"]
mod ptx;

use std::net::TcpListener;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use warpwire::hca::HcaOptions;
use warpwire::link::{Shm, ShmOptions};
use warpwire::mem::{self, Backend, Launch, MemoryKind};
use warpwire::stream::KernelQpOptions;
use warpwire::stream::kernel::SignalWait;
use warpwire::verbs::bootstrap::Bootstrap;
use warpwire::verbs::{Context, ProgressMode, QpEndpoint, Remote};

use kernels::fixture::{Endpoint, Fixture, LEN, TestLink, WORD, bytes, test_timeout};

type BenchPart = fn(&Fixture) -> Result<String, String>;

const BENCH_PARTS: [(&str, BenchPart); 7] = [
    ("latency", latency),
    ("direct", direct_latency),
    ("direct-processes", direct_processes),
    ("storm", storm),
    ("storm-by-warps", storm_by_warps),
    ("graphs", graphs),
    ("processes", processes),
];

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match &args[..] {
        [role, label, address] if role == "child" => return child(label, address, answer_calls),
        [role, label, address] if role == "pong" => return child(label, address, pong),
        _ => {}
    }
    let label = args.first().map_or("cuda:0", String::as_str);
    let gpu = match mem::open(label) {
        Ok(gpu) => gpu,
        Err(why) => {
            println!("skipped: {why}");
            return ExitCode::SUCCESS;
        }
    };
    println!("{} ({})", gpu.label(), gpu.info().name);
    if gpu.info().backend == Backend::Cuda
        && let Err(why) = ptx::cuda_with(&[kernels::calls::PTX])
    {
        println!("skipped: {why}");
        return ExitCode::SUCCESS;
    }
    let mut failed = false;
    for (name, run) in BENCH_PARTS {
        if args.get(1).is_some_and(|only| !name.starts_with(only)) {
            continue;
        }
        let fixture = Fixture::new(gpu.info().backend, TestLink::Loopback);
        match run(&fixture) {
            Ok(text) => println!("PASS {name}: {text}"),
            Err(text) => {
                println!("FAIL {name}: {text}");
                failed = true;
            }
        }
    }
    if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS }
}

fn scaled_rounds(fixture: &Fixture, on_cuda: u64, on_sim: u64) -> u64 {
    if fixture.backend == Backend::Cuda { on_cuda } else { on_sim }
}

/// Devices whose engine threads spin for the whole measurement.
fn spinning_contexts(fixture: &Fixture, test_link: TestLink) -> [Context; 2] {
    // The simulated GPU needs the CPU cores itself.
    let spin = Duration::from_millis(scaled_rounds(fixture, 2000, 1));
    let progress_mode = ProgressMode::Thread { spin, core: None };
    test_link.ends().map(|link| {
        Context::open_with(link, HcaOptions::default().with_progress_mode(progress_mode)).unwrap()
    })
}

fn deep_options(fixture: &Fixture) -> KernelQpOptions {
    fixture.options().with_send_depth(1024)
}

/// Round trip of a put between two kernels, compared with a relay: a CPU thread that copies words.
fn latency(fixture: &Fixture) -> Result<String, String> {
    let rounds = scaled_rounds(fixture, 20_000, 50);
    let best = |times: [Result<f64, String>; 3]| -> Result<f64, String> {
        times.into_iter().try_fold(f64::MAX, |best, time| Ok(best.min(time?)))
    };
    let baseline = best([(); 3].map(|()| relay(fixture, rounds)))?;
    println!("     relay without HCA: {baseline:.2} µs round trip");
    let mut best_ratio = f64::MAX;
    for (name, test_link, shared) in [
        ("one engine", TestLink::Loopback, true),
        ("two engines, loopback", TestLink::Loopback, false),
        ("two engines, shm", TestLink::Shm, false),
    ] {
        for (single_poster, poster_mode) in [(true, "single poster"), (false, "shared")] {
            let options = deep_options(fixture).with_single_poster(single_poster);
            let time = best([(); 3].map(|()| ping(fixture, rounds, test_link, shared, &options)))?;
            let ratio = time / baseline;
            println!(
                "     put and wait, {name}, {poster_mode}: {time:.2} µs round trip, \
                 {ratio:.2} × the relay"
            );
            best_ratio = best_ratio.min(ratio);
        }
    }
    let text = format!("at best {best_ratio:.2} × the relay (limit: 1.5)");
    if fixture.backend == Backend::Sim || best_ratio <= 1.5 { Ok(text) } else { Err(text) }
}

fn ping(
    fixture: &Fixture,
    rounds: u64,
    test_link: TestLink,
    shared: bool,
    options: &KernelQpOptions,
) -> Result<f64, String> {
    let [first, second] = spinning_contexts(fixture, test_link);
    let second = if shared { first.clone() } else { second };
    time_pings(fixture, &fixture.connected([first, second], options.clone()), PUTS, rounds)
}

/// The kernels that play ping-pong: by puts, and by stores to mapped memory.
const PUTS: &str = "calls_ping";
const STORES: &str = "calls_ping_mapped";

/// Microseconds of a round trip between two kernels.
fn time_pings(
    fixture: &Fixture,
    ends: &[Endpoint; 2],
    kernel: &str,
    rounds: u64,
) -> Result<f64, String> {
    for end in ends {
        end.memory.write(WORD, &[0; 8]).map_err(|why| why.to_string())?;
    }
    let ended = fixture.gpu.alloc(16).unwrap();
    ended.write(0, &[0xff; 16]).unwrap();
    let streams = [(); 2].map(|()| fixture.gpu.stream().unwrap());
    let kernel = fixture.kernel(kernel);
    let start = Instant::now();
    for (side, end) in ends.iter().enumerate().rev() {
        let at = ended.address().raw() + side as u64 * 8;
        end.start(&streams[side], &kernel, 1, &[side as u64, rounds, at]);
    }
    for stream in &streams {
        stream.synchronize(test_timeout()).map_err(|why| why.to_string())?;
    }
    let time = start.elapsed();
    for end in ends {
        end.qp.check().map_err(|why| why.to_string())?;
        if end.word() != rounds {
            return Err(format!("a counter is {} instead of {rounds}", end.word()));
        }
    }
    Ok(time.as_secs_f64() * 1e6 / rounds as f64)
}

/// The same by direct stores: the peer's memory is mapped.
fn direct_latency(fixture: &Fixture) -> Result<String, String> {
    let rounds = scaled_rounds(fixture, 20_000, 50);
    let contexts = spinning_contexts(fixture, TestLink::Shm);
    let ends = fixture.connected_with(contexts, MemoryKind::Vmm, deep_options(fixture));
    let start = Instant::now();
    while ends.iter().any(|end| direct(end) == 0) {
        time_pings(fixture, &ends, PUTS, 10)?;
        if start.elapsed() > test_timeout() {
            return Err(format!("never direct: {}", ends[0].qp.qp().path().unwrap()));
        }
    }
    let (mut relays, mut pings, mut stores) = (f64::MAX, f64::MAX, f64::MAX);
    for _ in 0..3 {
        relays = relays.min(relay(fixture, rounds)?);
        pings = pings.min(time_pings(fixture, &ends, PUTS, rounds)?);
        stores = stores.min(time_pings(fixture, &ends, STORES, rounds)?);
    }
    println!("     store to mapped memory and wait: {stores:.2} µs round trip");
    let posted = ends[0].qp.progress().unwrap().posted;
    let text = format!(
        "put by a direct store and wait: {pings:.2} µs round trip, {:.2} × the relay (limit: 1.0); \
         {posted} puts were posted before",
        pings / relays
    );
    if fixture.backend == Backend::Sim || pings <= relays { Ok(text) } else { Err(text) }
}

fn direct(end: &Endpoint) -> u64 {
    end.qp.progress().unwrap().direct
}

fn relay(fixture: &Fixture, rounds: u64) -> Result<f64, String> {
    let gpu = &fixture.gpu;
    let (doorbells, words) = (gpu.alloc_pinned(8192).unwrap(), gpu.alloc(8192 + 16).unwrap());
    doorbells.host_bytes().unwrap().fill(0, 8192, &[0]).unwrap();
    words.write(0, &[0; 8208]).unwrap();
    let window = match words.window() {
        Ok(window) => window,
        Err(why) => return Err(format!("no window: {why}")),
    };
    let stop = AtomicBool::new(false);
    let kernel = fixture.kernel("calls_relay");
    let streams = [(); 2].map(|()| gpu.stream().unwrap());
    let region = words.whole().unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let (doorbells, mut last) = (doorbells.host_bytes().unwrap(), [0; 2]);
            while !stop.load(Ordering::Relaxed) {
                for (side, last) in last.iter_mut().enumerate() {
                    let bell = doorbells.load_u64(side as u64 * 4096).unwrap();
                    if bell != *last {
                        *last = bell;
                        let value = doorbells.load_u64(side as u64 * 4096 + 64).unwrap();
                        window.write((1 - side as u64) * 4096, &value.to_le_bytes()).unwrap();
                    }
                }
                std::hint::spin_loop();
            }
        });
        let start = Instant::now();
        for side in [1, 0_u64] {
            let launch = Launch::new(&kernel).value(side).value(rounds);
            let launch = launch
                .value(doorbells.address().raw() + side * 4096)
                .keep_alive(&doorbells.whole().unwrap());
            let launch = launch.value(words.address().raw() + side * 4096).keep_alive(&region);
            let launch = launch.value(test_timeout().as_nanos() as u64 / 2);
            let launch = launch.value(words.address().raw() + 8192 + side * 8);
            // SAFETY: the kernel accesses only the doorbells and words that the launch keeps alive.
            unsafe { streams[side as usize].launch(launch) }.unwrap();
        }
        let done = streams.iter().try_for_each(|stream| stream.synchronize(test_timeout()));
        let time = start.elapsed();
        stop.store(true, Ordering::Relaxed);
        done.map_err(|why| why.to_string())?;
        Ok(time.as_secs_f64() * 1e6 / rounds as f64)
    })
}

fn storm(fixture: &Fixture) -> Result<String, String> {
    storm_in(fixture, 0)
}

fn storm_by_warps(fixture: &Fixture) -> Result<String, String> {
    if fixture.backend == Backend::Sim {
        return Ok("skipped: the simulated GPU has no warps".into());
    }
    storm_in(fixture, 1)
}

/// A million operations by 1024 threads that share 8 queue pairs: none is lost or executed twice.
fn storm_in(fixture: &Fixture, mode: u64) -> Result<String, String> {
    const PAIRS: usize = 8;
    let (grid, threads, rounds) = match fixture.backend {
        Backend::Cuda => (8, 128, 489),
        Backend::Sim => (16, 1, 100),
    };
    let contexts = spinning_contexts(fixture, TestLink::Loopback);
    let ends: Vec<[Endpoint; 2]> =
        (0..PAIRS).map(|_| fixture.connected(contexts.clone(), deep_options(fixture))).collect();
    let table = fixture.gpu.alloc(4096).unwrap();
    table.write(0, &[0; 4096]).unwrap();
    for (number, [a, _]) in ends.iter().enumerate() {
        let at = number as u64 * 8;
        table.write(at, &a.qp.handle().raw().to_le_bytes()).unwrap();
        table.write(1024 + at, &a.list.address().raw().to_le_bytes()).unwrap();
    }
    let stream = fixture.gpu.stream().unwrap();
    let mut launch = Launch::new(&fixture.kernel("calls_storm")).grid(grid).threads(threads);
    for offset in [0, 1024] {
        launch = launch.region(&table.region(offset, 1024).unwrap());
    }
    launch = launch.value(PAIRS as u64).value(rounds).value(mode);
    launch = launch.region(&table.region(2048, 8).unwrap());
    let start = Instant::now();
    // SAFETY: the kernel accesses the handles and lists in the table, whose endpoints outlive the
    // stream's work.
    unsafe { stream.launch(launch) }.unwrap();
    stream.synchronize(test_timeout() * 3).map_err(|why| why.to_string())?;
    let time = start.elapsed();
    let mut wrong = [0; 8];
    table.read(2048, &mut wrong).unwrap();
    let all = u64::from(grid * threads);
    let added: u64 = ends.iter().map(|[_, b]| b.word()).sum();
    let posted: u64 = ends.iter().map(|[a, _]| a.qp.progress().unwrap().posted).sum();
    let at = |end: &Endpoint, thread: u64| end.read64(thread * 8);
    let placed = ends
        .iter()
        .map(|[_, b]| (0..all).filter(|thread| at(b, *thread) == rounds).count())
        .sum::<usize>();
    let rate = posted as f64 / time.as_secs_f64() / 1e6;
    let text = format!(
        "{posted} operations by {all} threads over {PAIRS} queue pairs in {time:.2?}, {rate:.2} M/s"
    );
    if u64::from_le_bytes(wrong) == 0
        && added == all * rounds
        && placed as u64 == all
        && posted == 2 * all * rounds
    {
        return Ok(text);
    }
    let why = ends.iter().find_map(|[a, _]| a.qp.check().err());
    Err(format!(
        "{text}; {} failed, {added} added, {placed} placed; {why:?}",
        u64::from_le_bytes(wrong)
    ))
}

/// Two graphs that play ping-pong, replayed 10 000 times.
fn graphs(fixture: &Fixture) -> Result<String, String> {
    let rounds = scaled_rounds(fixture, 10_000, 500);
    let [a, b] =
        fixture.connected(spinning_contexts(fixture, TestLink::Loopback), deep_options(fixture));
    let [out, back] = [(); 2].map(|()| fixture.gpu.stream().unwrap());
    let word = |end: &Endpoint| end.memory.word64(WORD).unwrap();
    let at_a = SignalWait::new(&word(&a), 0, 1).unwrap();
    let at_b = SignalWait::new(&word(&b), 0, 1).unwrap();
    let ping = out.capture(|stream| {
        a.qp.put_signal_on_stream(stream, b.mr.remote(0), a.mr.sge(0, 1024), b.mr.remote(WORD), 1)?;
        a.qp.wait_signal_on_stream(stream, &at_a)
    });
    let pong = back.capture(|stream| {
        b.qp.wait_signal_on_stream(stream, &at_b)?;
        b.qp.put_signal_on_stream(
            stream,
            a.mr.remote(4096),
            b.mr.sge(0, 1024),
            a.mr.remote(WORD),
            1,
        )
    });
    let (ping, pong) = (ping.map_err(|why| why.to_string())?, pong.map_err(|why| why.to_string())?);
    let sent = bytes(1024, 9);
    a.memory.write(0, &sent).unwrap();
    let start = Instant::now();
    for _ in 0..rounds {
        out.replay(&ping).map_err(|why| why.to_string())?;
        back.replay(&pong).map_err(|why| why.to_string())?;
    }
    for stream in [&out, &back] {
        stream.synchronize(test_timeout() * 3).map_err(|why| why.to_string())?;
    }
    let time = start.elapsed();
    a.qp.check().and(b.qp.check()).map_err(|why| why.to_string())?;
    if (a.word(), b.word()) != (rounds, rounds) || a.read(4096, 1024) != sent {
        return Err(format!("the counters are {} and {} of {rounds}", a.word(), b.word()));
    }
    let each = time.as_secs_f64() * 1e6 / rounds as f64;
    Ok(format!("{rounds} replays of two ping-pong graphs, {each:.1} µs each"))
}

/// What the two processes exchange: the endpoint, and address and rkey of buffer and counter.
type ConnectionData = (QpEndpoint, [u64; 4]);

fn connection_data(end: &Endpoint) -> ConnectionData {
    let (there, word) = (end.mr.remote(0), end.mr.remote(WORD));
    (end.qp.endpoint(), [there.address, there.rkey.into(), word.address, word.rkey.into()])
}

fn connect_peer(end: &Endpoint, bootstrap: &mut Bootstrap) -> warpwire::Result<()> {
    let (endpoint, [there, rkey, word, word_rkey]): ConnectionData =
        bootstrap.swap(&connection_data(end))?;
    end.qp.connect(&endpoint)?;
    end.write_params(
        Remote { address: there, rkey: rkey as u32 },
        Remote { address: word, rkey: word_rkey as u32 },
    );
    Ok(())
}

fn open_endpoint(fixture: &Fixture) -> Endpoint {
    let link = Shm::bind("127.0.0.1:0".parse().unwrap(), ShmOptions::default()).unwrap();
    let progress_mode = ProgressMode::Thread { spin: Duration::from_millis(50), core: None };
    let context =
        Context::open_with(link, HcaOptions::default().with_progress_mode(progress_mode)).unwrap();
    Endpoint::with_kind(context, &fixture.gpu, MemoryKind::Vmm, deep_options(fixture))
}

/// Every call, from a kernel of this process to one of another; the processes time-slice the GPU.
fn processes(fixture: &Fixture) -> Result<String, String> {
    with_peer(fixture, "child", active_process)
}

/// Round trips between kernels of two processes by direct stores, compared with the relay. Without
/// MPS the kernels take turns on the GPU.
fn direct_processes(fixture: &Fixture) -> Result<String, String> {
    with_peer(fixture, "pong", ping_process)
}

fn with_peer(
    fixture: &Fixture,
    role: &str,
    run: fn(&Fixture, &TcpListener) -> warpwire::Result<String>,
) -> Result<String, String> {
    let listener = TcpListener::bind("127.0.0.1:0").map_err(|why| why.to_string())?;
    let address = listener.local_addr().map_err(|why| why.to_string())?.to_string();
    let mut child = Command::new(std::env::current_exe().map_err(|why| why.to_string())?)
        .args([role, &fixture.gpu.label(), &address])
        .stdout(Stdio::inherit())
        .spawn()
        .map_err(|why| why.to_string())?;
    let outcome = run(fixture, &listener);
    if outcome.is_err() {
        let _ = child.kill();
    }
    let status = child.wait().map_err(|why| why.to_string())?;
    let text = outcome.map_err(|why| why.to_string())?;
    if status.success() { Ok(text) } else { Err(format!("the other process: {status}")) }
}

fn active_process(fixture: &Fixture, listener: &TcpListener) -> warpwire::Result<String> {
    let mut bootstrap = Bootstrap::accept(listener, test_timeout())?;
    let a = open_endpoint(fixture);
    connect_peer(&a, &mut bootstrap)?;
    a.memory.write(0, &bytes(8192, 1))?;
    bootstrap.swap(&"waiting for the peer's kernel".to_owned())?;
    let (stream, start) = (fixture.gpu.stream()?, Instant::now());
    a.start(&stream, &fixture.kernel("calls_active"), 256, &[2]);
    stream.synchronize(test_timeout())?;
    let time = start.elapsed();
    let results: [i64; 15] = a.results();
    bootstrap.swap(&"kernel finished".to_owned())?;
    bootstrap.swap(&"results checked".to_owned())?;
    a.qp.check()?;
    assert_eq!(results, [0, 0, 0, 0, 0, 5, 0, 12, 0, 0, 0, 0, 0, -0x101, -0x105]);
    assert_eq!(a.read(16384, 4096), bytes(4096, 2));
    Ok(format!("every call, by a block of 256 threads, verified on both sides, in {time:.2?}"))
}

/// Runs a side of [`ping`] once; returns the time of a round trip.
fn run_side(
    fixture: &Fixture,
    end: &Endpoint,
    kernel: &str,
    side: u64,
    rounds: u64,
) -> warpwire::Result<f64> {
    let (stream, ended) = (fixture.gpu.stream()?, fixture.gpu.alloc(8)?);
    ended.write(0, &[0xff; 8])?;
    let (start, at) = (Instant::now(), ended.address().raw());
    end.start(&stream, &fixture.kernel(kernel), 1, &[side, rounds, at]);
    stream.synchronize(test_timeout())?;
    end.qp.check()?;
    assert_eq!(end.word(), rounds);
    Ok(start.elapsed().as_secs_f64() * 1e6 / rounds as f64)
}

/// What [`ping_process`] asks the other process for: a kernel and rounds; none ends it.
type PingRequest = (String, u64);

fn pong(fixture: &Fixture, bootstrap: &mut Bootstrap) -> warpwire::Result<()> {
    let end = open_endpoint(fixture);
    connect_peer(&end, bootstrap)?;
    loop {
        end.memory.write(WORD, &[0; 8])?;
        let nothing: PingRequest = (String::new(), 0);
        let ((kernel, rounds), _): (PingRequest, u64) = bootstrap.swap(&(nothing, direct(&end)))?;
        if rounds == 0 {
            return Ok(());
        }
        run_side(fixture, &end, &kernel, 1, rounds)?;
    }
}

fn ping_process(fixture: &Fixture, listener: &TcpListener) -> warpwire::Result<String> {
    let has_mps = std::env::var_os("CUDA_MPS_PIPE_DIRECTORY").is_some();
    let (warm_up, rounds) = match (fixture.backend, has_mps) {
        (Backend::Cuda, true) => (10, 20_000),
        (Backend::Cuda, false) => (2, 20),
        (Backend::Sim, _) => (10, 50),
    };
    let mut bootstrap = Bootstrap::accept(listener, test_timeout())?;
    let end = open_endpoint(fixture);
    connect_peer(&end, &mut bootstrap)?;
    let mut run = |kernel: &str, rounds| -> warpwire::Result<(f64, u64)> {
        end.memory.write(WORD, &[0; 8])?;
        let request: PingRequest = (kernel.to_owned(), rounds);
        let (_, theirs): (PingRequest, u64) = bootstrap.swap(&(request, direct(&end)))?;
        match rounds {
            0 => Ok((0.0, theirs)),
            _ => Ok((run_side(fixture, &end, kernel, 0, rounds)?, theirs)),
        }
    };
    let start = Instant::now();
    while run(PUTS, warm_up)?.1 == 0 || direct(&end) == 0 {
        assert!(start.elapsed() < test_timeout(), "never direct: {}", end.qp.qp().path()?);
    }
    let (mut best, mut stores) = (f64::MAX, f64::MAX);
    for _ in 0..3 {
        best = best.min(run(PUTS, rounds)?.0);
        stores = stores.min(run(STORES, rounds)?.0);
    }
    run(PUTS, 0)?;
    println!("     store to mapped memory and wait: {stores:.2} µs round trip");
    let sharing = if has_mps { "MPS" } else { "taking turns" };
    let Ok(relay) = relay(fixture, scaled_rounds(fixture, 20_000, 50)) else {
        return Ok(format!("{best:.2} µs round trip ({sharing})"));
    };
    let ratio = best / relay;
    Ok(format!("{best:.2} µs round trip ({sharing}), {ratio:.2} × the relay of one process"))
}

fn child(
    label: &str,
    address: &str,
    role: fn(&Fixture, &mut Bootstrap) -> warpwire::Result<()>,
) -> ExitCode {
    let run = || -> warpwire::Result<()> {
        let gpu = mem::open(label)?;
        let fixture = Fixture::new(gpu.info().backend, TestLink::Loopback);
        role(&fixture, &mut Bootstrap::connect(address, test_timeout())?)
    };
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            println!("the other process: {why}");
            ExitCode::FAILURE
        }
    }
}

/// The other side of [`active_process`].
fn answer_calls(fixture: &Fixture, bootstrap: &mut Bootstrap) -> warpwire::Result<()> {
    let b = open_endpoint(fixture);
    b.memory.write(16384, &bytes(4096, 2))?;
    connect_peer(&b, bootstrap)?;
    let stream = fixture.gpu.stream()?;
    b.start(&stream, &fixture.kernel("calls_passive"), 32, &[1]);
    bootstrap.swap(&"kernel started".to_owned())?;
    stream.synchronize(test_timeout())?;
    bootstrap.swap(&"kernel finished".to_owned())?;
    let imm = |length: i64, imm: i64| length << 32 | 1 << 31 | imm;
    assert_eq!(b.results(), [0, 0, 100 << 32, 0, imm(50, 77), 0, imm(16, 88)]);
    assert_eq!((b.word(), b.read(16, 4080)), (99, bytes(8192, 1)[16..4096].to_vec()));
    assert!(b.memory.len() > LEN);
    b.qp.check()?;
    bootstrap.swap(&"results checked".to_owned()).map(drop)
}
