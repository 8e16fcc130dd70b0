//! Direct verbs from streams, kernels and the CPU on the queues of a fake ConnectX: `nic.c`
//! replaces libibverbs and libmlx5, and a thread of it executes the queues. Its post and poll
//! functions abort the test, because direct verbs must not call them.
#![allow(unsafe_code)] // to set environment variables

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use testkit::{Collector, Suite, cases};
use warpwire::error::Kind;
use warpwire::mem::sim::{Sim, SimConfig};
use warpwire::mem::{Device, Stream};
use warpwire::mr::HostMemory;
use warpwire::stream::{KernelQp, KernelQpOptions, StreamQp, StreamQpOptions};
use warpwire::verbs::{
    Access, Completion, Context, CqOptions, Mr, Pd, PostError, QpOptions, ReceiveRequest, Remote,
    SendRequest, State, Status, WrOp,
};

/// Path of the fake library, if it was compiled elsewhere.
const NIC: &str = "WARPWIRE_TEST_NIC";
/// Label of a GPU, such as `cuda:0`, instead of the simulated one. Cases then run one at a time.
const GPU: &str = "WARPWIRE_TEST_GPU";
fn test_timeout() -> Duration {
    testkit::deadline(Duration::from_secs(20))
}

pub const SUITE: Suite = Suite { name: "mlx5", env: &[], collect, role: |_| {} };

cases!(CASES:
    streams_ring_the_doorbell_and_wait_on_cqes,
    prepared_work_and_the_cpu,
    failures_release_streams,
    kernels_post_and_wait,
    the_cpu_posts_and_polls_with_direct_verbs,
    other_devices_and_invalid_options_are_refused,
);

fn collect(suite: &mut Collector) {
    if suite.backend("mlx5dv", build_fake_nic()).is_some() {
        suite.add("", CASES, |case| (case.run)(&()));
    }
    if std::env::var_os(GPU).is_some() {
        suite.run_serially();
    }
}

/// Compiles the fake library and makes the process load it.
fn build_fake_nic() -> Result<PathBuf, String> {
    if let Some(library) = std::env::var_os(NIC) {
        return Ok(set_library_env(library.into()));
    }
    let folder = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    let (source, library) = (
        concat!(env!("CARGO_MANIFEST_DIR"), "/mlx5/nic.c"),
        folder.join(format!("nic-{}.so", std::process::id())),
    );
    if !std::path::Path::new("/usr/include/infiniband/mlx5dv.h").exists() {
        return Err("no infiniband/mlx5dv.h (Debian: libibverbs-dev)".into());
    }
    let flags =
        ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"];
    let output = Command::new("cc").args(flags).arg("-o").arg(&library).arg(source).output();
    let output = output.map_err(|why| format!("no C compiler: {why}"))?;
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    Ok(set_library_env(library))
}

/// Makes the process load this library instead of libibverbs and libmlx5.
fn set_library_env(library: PathBuf) -> PathBuf {
    for variable in ["WARPWIRE_IBVERBS", "WARPWIRE_MLX5"] {
        // SAFETY: this process has no other thread yet.
        unsafe { std::env::set_var(variable, &library) };
    }
    library
}

/// A simulated GPU, or the one that [`GPU`] names.
fn gpu() -> Device {
    match std::env::var(GPU) {
        Ok(label) => warpwire::mem::open(&label).unwrap(),
        Err(_) => Sim::start(SimConfig::default()).unwrap().device(0).unwrap(),
    }
}

struct Bench {
    gpu: Device,
    context: Context,
    pd: Pd,
    memory: HostMemory,
    mr: Mr,
}

/// Opens the RDMA device of that name and a GPU.
fn bench(name: &str) -> Bench {
    let gpu = gpu();
    let context = Context::open_device(name).unwrap();
    let pd = context.alloc_pd();
    let memory = HostMemory::new(1 << 16).unwrap();
    let mr = context.register(&pd, memory.clone(), Access::ALL).unwrap();
    Bench { gpu, context, pd, memory, mr }
}

impl Bench {
    fn stream_pair(&self) -> [StreamQp; 2] {
        let qp = QpOptions::default().with_send_depth(4).with_receive_depth(8);
        let wait_timeout = Some(Duration::from_secs(10));
        let options = StreamQpOptions::default().with_qp(qp).with_wait_timeout(wait_timeout);
        let [a, b] = [(); 2].map(|()| {
            StreamQp::create(&self.context, &self.pd, &self.gpu, options.clone()).unwrap()
        });
        a.connect(&b.endpoint()).unwrap();
        b.connect(&a.endpoint()).unwrap();
        [a, b]
    }

    fn put(&self, at: u64, bytes: &[u8]) {
        self.memory.bytes().write(at, bytes).unwrap();
    }

    fn get(&self, at: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.memory.bytes().read(at, &mut bytes).unwrap();
        bytes
    }
}

fn finish(streams: &[&Stream]) {
    streams.iter().for_each(|stream| stream.synchronize(test_timeout()).unwrap());
}

fn take(qp: &StreamQp) -> Completion {
    qp.wait_next(test_timeout()).unwrap().expect("no completion in time")
}

/// Messages from stream to stream, for many laps of every queue.
fn streams_ring_the_doorbell_and_wait_on_cqes() {
    let bench = bench("nic_0");
    let [a, b] = bench.stream_pair();
    assert_eq!(a.qp().path().unwrap().local.to_string(), "10.0.0.7:4791");
    let [sender, receiver] = [(); 2].map(|()| bench.gpu.stream().unwrap());
    for round in 0..100_u64 {
        let into = [bench.mr.sge(4096, 100), bench.mr.sge(8192, 1000)];
        b.post_receive(&[ReceiveRequest { id: round, data: &into }]).unwrap();
        b.wait_receive(&receiver).unwrap();
        let sent: Vec<u8> = (0..300).map(|n| (n as u64 * 7 + round) as u8).collect();
        bench.put(0, &sent);
        let from = [bench.mr.sge(0, 300)];
        let ticket =
            a.queue(&sender, &SendRequest::new(1000 + round, WrOp::Send).with(&from)).unwrap();
        let target = bench.mr.remote(16_384);
        a.queue(&sender, &SendRequest::new(2000 + round, WrOp::Write(target)).inline(&sent[..20]))
            .unwrap();
        a.wait_send(&sender, ticket.after(1)).unwrap();
        finish(&[&sender, &receiver]);
        assert_eq!(bench.get(4096, 100), sent[..100]);
        assert_eq!(bench.get(8192, 200), sent[100..]);
        assert_eq!(bench.get(16_384, 20), sent[..20]);
        let ids = [take(&a), take(&a), take(&b)].map(|done| (done.id, done.status));
        let wanted = [1000 + round, 2000 + round, round].map(|id| (id, Status::Success));
        assert_eq!(ids, wanted);
    }
    assert!(a.failure().is_none() && b.failure().is_none());
}

/// A prepared request that is dropped between others does nothing; the CPU can post as well.
fn prepared_work_and_the_cpu() {
    let bench = bench("nic_0");
    let [a, _b] = bench.stream_pair();
    let stream = bench.gpu.stream().unwrap();
    let write = |id, at, byte: &'static [u8]| {
        SendRequest::new(id, WrOp::Write(bench.mr.remote(at))).inline(byte)
    };
    let first = a.prepare(&write(1, 0, b"a")).unwrap();
    let dropped = a.prepare(&write(2, 1, b"b")).unwrap();
    let last = a.prepare(&write(3, 2, b"c")).unwrap();
    drop(dropped);
    first.post(&stream).unwrap();
    let last = last.post(&stream).unwrap();
    a.wait_send(&stream, last).unwrap();
    finish(&[&stream]);
    assert_eq!(bench.get(0, 3), b"a\0c");
    assert_eq!([take(&a).id, take(&a).id], [1, 3]);
    a.post_now(&write(4, 1, b"d")).unwrap();
    assert_eq!((take(&a).id, bench.get(0, 3)), (4, b"adc".to_vec()));
}

/// A failure releases waiting streams and is reported with its cause.
fn failures_release_streams() {
    let bench = bench("nic_0");
    let [a, b] = bench.stream_pair();
    let stream = bench.gpu.stream().unwrap();
    let nowhere = Remote { address: 0x1000, rkey: 0xbad };
    b.post_receive(&[ReceiveRequest { id: 9, data: &[] }]).unwrap();
    a.queue(&stream, &SendRequest::new(7, WrOp::Write(nowhere)).inline(b"x")).unwrap();
    let last = a.queue(&stream, &SendRequest::new(8, WrOp::Send)).unwrap();
    a.wait_send(&stream, last).unwrap();
    finish(&[&stream]);
    let [first, second] = [take(&a), take(&a)];
    assert_eq!((first.id, first.status), (7, Status::RemoteAccess));
    assert_eq!((second.id, second.status), (8, Status::Flushed));
    let failure = a.failure().expect("a failure").to_string();
    assert!(failure.contains("remote access"), "{failure}");
    assert!(a.prepare(&SendRequest::new(9, WrOp::Send)).is_err());
    // Aborting the peer flushes its receive.
    b.abort();
    assert_eq!((take(&b).id, b.qp().state().unwrap()), (9, State::Err));
}

/// Kernels on a stream post and wait through the device handle, for many laps of every queue.
fn kernels_post_and_wait() {
    let bench = bench("nic_0");
    let options = KernelQpOptions::default().with_send_depth(8).with_receive_depth(4);
    let make = || KernelQp::create(&bench.context, &bench.pd, &bench.gpu, options.clone()).unwrap();
    let (qp, peer) = (make(), make());
    qp.connect(&peer.endpoint()).unwrap();
    peer.connect(&qp.endpoint()).unwrap();
    let stream = bench.gpu.stream().unwrap();
    bench.put(0, &[1; 64]);
    let graph = stream
        .capture(|stream| {
            qp.put_on_stream(stream, bench.mr.remote(4096), bench.mr.sge(0, 64))?;
            qp.put_on_stream(stream, bench.mr.remote(8192), bench.mr.sge(0, 64))?;
            qp.wait_on_stream(stream)
        })
        .unwrap();
    for round in 0..50 {
        bench.put(0, &[round; 64]);
        stream.replay(&graph).unwrap();
        finish(&[&stream]);
        qp.check().unwrap();
        assert_eq!((bench.get(4096, 64), bench.get(8192, 64)), (vec![round; 64], vec![round; 64]));
    }
    assert_eq!(qp.progress().unwrap().posted, 100);
}

/// CPU verbs on a queue pair that is driven with direct verbs.
fn the_cpu_posts_and_polls_with_direct_verbs() {
    let bench = bench("nic_0");
    let manual_release = || CqOptions::default().with_entries(15).with_manual_release(true);
    let make = || {
        let [sends, receives] =
            [(); 2].map(|()| bench.context.create_cq_with(manual_release()).unwrap());
        let options = QpOptions::default().with_poll_doorbell(true).with_send_depth(4);
        let qp = bench.context.create_qp(&bench.pd, &sends, &receives, options).unwrap();
        (qp, sends, receives)
    };
    let ((a, sends, _), (b, _, receives)) = (make(), make());
    let early = a.post_send(&[SendRequest::new(1, WrOp::Send)]).unwrap_err();
    assert!(early.to_string().contains("may be posted from RTS on"), "{early}");
    a.connect(&b.endpoint()).unwrap();
    b.connect(&a.endpoint()).unwrap();
    let next = |cq: &warpwire::verbs::Cq| {
        let (mut one, start) = ([Completion::EMPTY], std::time::Instant::now());
        while cq.poll(&mut one).unwrap() == 0 {
            assert!(start.elapsed() < test_timeout(), "no completion in time");
            std::thread::yield_now();
        }
        one[0]
    };
    for round in 0..40_u64 {
        b.post_receive(&[ReceiveRequest { id: round, data: &[bench.mr.sge(512, 64)] }]).unwrap();
        let mut batch = a.batch().unwrap();
        batch.push(&SendRequest::new(2 * round, WrOp::Nop)).unwrap();
        batch.push(&SendRequest::new(2 * round + 1, WrOp::Send).inline(&[round as u8; 5])).unwrap();
        batch.post();
        assert_eq!([next(&sends).id, next(&sends).id], [2 * round, 2 * round + 1]);
        let done = next(&receives);
        assert_eq!((done.id, done.len, done.status), (round, 5, Status::Success));
        assert_eq!(bench.get(512, 5), [round as u8; 5]);
        sends.release(2 * round + 2);
        receives.release(round + 1);
    }
    let full = a.post_send(&[SendRequest::new(0, WrOp::Nop); 60]).unwrap_err();
    assert_eq!(full, PostError::Full);
    assert!(sends.arm(false).unwrap_err().to_string().contains("poll it"));
}

fn other_devices_and_invalid_options_are_refused() {
    let bench = bench("nic_0");
    let plain = bench.context.create_cq(4).unwrap();
    let poll_doorbell = QpOptions::default().with_poll_doorbell(true);
    let refused = bench.context.create_qp(&bench.pd, &plain, &plain, poll_doorbell).unwrap_err();
    assert!(refused.to_string().contains("CqOptions::manual_release"), "{refused}");
    // 48 inline bytes make each WQE two WQEBBs, and a depth of 3 is no power of two.
    let odd = QpOptions::default().with_send_depth(3);
    let options = StreamQpOptions::default().with_qp(odd);
    assert!(StreamQp::create(&bench.context, &bench.pd, &bench.gpu, options).is_ok());
    let options = KernelQpOptions::default().with_receive_depth(1);
    let refused = KernelQp::create(&bench.context, &bench.pd, &bench.gpu, options).unwrap_err();
    assert!(refused.to_string().contains("receive_depth 1"), "{refused}");
    assert!(refused.to_string().contains("try 2"), "{refused}");
    drop(bench);
    let other = self::bench("other_0");
    let (context, pd, gpu) = (&other.context, &other.pd, &other.gpu);
    let streams = StreamQp::create(context, pd, gpu, StreamQpOptions::default()).unwrap_err();
    let kernels = KernelQp::create(context, pd, gpu, KernelQpOptions::default()).unwrap_err();
    for (refused, what) in [(streams, "a stream queue pair"), (kernels, "a kernel queue pair")] {
        assert_eq!(refused.kind(), &Kind::Unsupported);
        let text = refused.to_string();
        for part in [what, "no direct verbs: its driver is unknown, not mlx5", "software HCA"] {
            assert!(text.contains(part), "no {part}: {text}");
        }
    }
}
