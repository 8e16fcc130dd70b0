//! Device channels: messages that streams and kernels send and wait for.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use warpwire::error::Kind;
use warpwire::mem::{Backend, Condition, Device, ForeignStream, MemoryKind, Stream};
use warpwire::msg::{Buffer, ChannelOptions, Comm, CommOptions, DeviceChannel, Signal, Writer};
use warpwire::stream::kernel::SignalWait;
use warpwire::verbs::Remote;
use warpwire_apps::pingpong_kernels::{KernelTransfer, PingPongEnd, PingPongKernels, Relay};

use crate::msg::fixture::{
    Fixture, SHORT_WAIT, TestLink, gpu, pattern, read, same, simulated_gpu, test_timeout,
};
use testkit::cases;

cases!(Fixture; CASES:
    streams_exchange_all_sizes,
    prepared_and_batched,
    messages_keep_their_order,
    streams_put_get_and_signal,
    handshakes_and_barriers,
    graphs_replay_messages,
    kernels_play_ping_pong,
    kernels_signal_by_themselves,
    kernels_put_and_get,
    a_lost_rank_releases_streams,
    a_rank_that_leaves_releases_streams,
    an_orderly_leave_is_no_failure,
);
cases!(Fixture; ONCE:
    channels_check_their_arguments,
    channels_apply_back_pressure,
    streams_of_other_libraries,
    one_stream_waits_for_many,
    compute_occupies_the_stream_for_its_duration,
    kernels_pass_words_without_an_hca,
);

/// A rank with a GPU of its own.
struct Endpoint {
    comm: Comm,
    gpu: Device,
    stream: Stream,
    device_channel: DeviceChannel,
}

impl Endpoint {
    fn new(comm: Comm, options: ChannelOptions) -> Self {
        let gpu = gpu();
        let device_channel = comm.device_channel(&gpu, options).unwrap();
        let stream = gpu.stream().unwrap();
        Self { comm, gpu, stream, device_channel }
    }

    fn other(&self) -> usize {
        1 - self.comm.rank()
    }

    fn memory(&self, len: u64) -> Buffer {
        self.comm.register(self.gpu.alloc(len).unwrap().whole().unwrap()).unwrap()
    }

    fn finish_stream(&self) {
        self.stream.synchronize(test_timeout()).unwrap();
        self.device_channel.check().unwrap();
    }
}

fn run_endpoints(fixture: &Fixture, size: usize, run: impl Fn(Endpoint) + Sync) {
    run_endpoints_with(fixture, size, &ChannelOptions::default(), run);
}

fn run_endpoints_with(
    fixture: &Fixture,
    size: usize,
    channel: &ChannelOptions,
    run: impl Fn(Endpoint) + Sync,
) {
    let options = fixture.options().with_progress_mode(CommOptions::for_streams().progress_mode);
    fixture.ranks_with(size, &options, |comm| run(Endpoint::new(comm, channel.clone())));
}

fn streams_exchange_all_sizes(fixture: &Fixture) {
    run_endpoints(fixture, 2, |end| {
        let (out, into) = (end.memory(3 << 20), end.memory(3 << 20));
        for len in [0, 1, 4096, 100_000, (2 << 20) + 5] {
            let seed = |rank: usize| (rank + len) as u64;
            out.write(3, &pattern(seed(end.comm.rank()), len)).unwrap();
            let receive = end
                .device_channel
                .receive(end.other(), into.slice(1, len as u64 + 7).unwrap())
                .unwrap();
            let slice = out.slice(3, len as u64).unwrap();
            let send = end.device_channel.send_on_stream(&end.stream, end.other(), slice).unwrap();
            end.device_channel.wait_on_stream(&end.stream, &receive).unwrap();
            end.device_channel
                .wait_all_on_stream(&end.stream, &[send.clone(), receive.clone()])
                .unwrap();
            end.finish_stream();
            same(&read(&into, 1, len), &pattern(seed(end.other()), len), &format!("{len} bytes"));
            // The CPU can wait for the same requests.
            assert_eq!(receive.wait(test_timeout()).unwrap().len, len as u64);
            assert_eq!(send.wait(test_timeout()).unwrap().peer, end.other());
        }
        // Scatter-gather on both sides.
        let seed = |rank: usize| 900 + rank as u64;
        out.write(0, &pattern(seed(end.comm.rank()), 30_000)).unwrap();
        let slices = [into.slice(50_000, 9_999).unwrap(), into.slice(0, 20_001).unwrap()];
        let receive = end.device_channel.receivev(end.other(), &slices).unwrap();
        let slices =
            [out.slice(0, 1).unwrap(), out.slice(1, 0).unwrap(), out.slice(1, 29_999).unwrap()];
        let _send = end.device_channel.sendv_on_stream(&end.stream, end.other(), &slices).unwrap();
        end.device_channel.wait_on_stream(&end.stream, &receive).unwrap();
        end.finish_stream();
        let mut received = read(&into, 50_000, 9_999);
        received.extend(read(&into, 0, 20_001));
        same(&received, &pattern(seed(end.other()), 30_000), "slices");
        end.comm.finish(test_timeout()).unwrap();
    });
}

fn prepared_and_batched(fixture: &Fixture) {
    run_endpoints(fixture, 2, |end| {
        let (out, into) = (end.memory(4096), end.memory(4096));
        let word = end.gpu.alloc(8).unwrap();
        word.write(0, &[0; 8]).unwrap();
        let word = word.word32(0).unwrap();
        for round in 0..20u64 {
            let seed = |rank: usize| round * 2 + rank as u64;
            let receives: Vec<_> = (0..3)
                .map(|at| {
                    end.device_channel
                        .receive(end.other(), into.slice(at * 1000, 1000).unwrap())
                        .unwrap()
                })
                .collect();
            let prepare = |at: u64| {
                end.device_channel.prepare_send(end.other(), out.slice(at * 1000, 1000).unwrap())
            };
            let first = prepare(0).unwrap();
            // A prepared send that is dropped has no effect.
            drop(prepare(2).unwrap());
            out.write(0, &pattern(seed(end.comm.rank()), 3000)).unwrap();
            let _first = first.post(&end.stream).unwrap();
            let mut batch = end.device_channel.batch(&end.stream);
            let later = prepare(1).unwrap();
            let _second = batch.prepared(later).unwrap();
            let third = batch.send(end.other(), out.slice(2000, 1000).unwrap()).unwrap();
            batch.wait(&third).unwrap();
            receives.iter().for_each(|receive| batch.wait(receive).unwrap());
            batch.write_word(&word, round + 1).unwrap();
            let reached = (Condition::Equal, round + 1);
            batch.wait_word(&word, reached, Writer::Rank(end.other())).unwrap();
            assert!(batch.len() >= 8, "{batch:?}");
            batch.post().unwrap();
            assert!(batch.is_empty());
            end.finish_stream();
            same(&read(&into, 0, 3000), &pattern(seed(end.other()), 3000), "batched");
            end.comm.barrier(test_timeout()).unwrap();
        }
        end.comm.finish(test_timeout()).unwrap();
    });
}

fn messages_keep_their_order(fixture: &Fixture) {
    run_endpoints(fixture, 2, |end| {
        const COUNT: u64 = 400;
        let memory = end.memory(COUNT * 8);
        let numbers: Vec<u8> = (0..COUNT).flat_map(u64::to_le_bytes).collect();
        let slice = |number: u64| memory.slice(number * 8, 8).unwrap();
        if end.comm.rank() == 0 {
            memory.write(0, &numbers).unwrap();
            for number in 0..COUNT {
                // The CPU waits only while the queue is full.
                let start = Instant::now();
                while let Err(busy) =
                    end.device_channel.send_on_stream(&end.stream, 1, slice(number)).map(drop)
                {
                    assert_eq!(busy.kind(), &Kind::Busy, "{busy}");
                    assert!(start.elapsed() < test_timeout(), "number {number}: still full");
                    std::thread::sleep(Duration::from_micros(100));
                }
            }
        } else {
            memory.write(0, &vec![0xff; COUNT as usize * 8]).unwrap();
            for number in 0..COUNT {
                let start = Instant::now();
                let receive = loop {
                    match end.device_channel.receive(0, slice(number)) {
                        Ok(receive) => break receive,
                        Err(busy) => assert_eq!(busy.kind(), &Kind::Busy, "{busy}"),
                    }
                    assert!(start.elapsed() < test_timeout(), "number {number}: still full");
                    std::thread::sleep(Duration::from_micros(100));
                };
                while let Err(busy) = end.device_channel.wait_on_stream(&end.stream, &receive) {
                    assert_eq!(busy.kind(), &Kind::Busy, "{busy}");
                    assert!(start.elapsed() < test_timeout());
                    std::thread::sleep(Duration::from_micros(100));
                }
            }
        }
        end.finish_stream();
        if end.comm.rank() == 1 {
            same(&read(&memory, 0, COUNT as usize * 8), &numbers, "numbers");
        }
        end.comm.finish(test_timeout()).unwrap();
    });
}

fn streams_put_get_and_signal(fixture: &Fixture) {
    run_endpoints(fixture, 2, |end| {
        let device = end.gpu.alloc(64 << 10).unwrap();
        device.write(0, &[0; 64]).unwrap();
        let exposed = end.comm.register(device.whole().unwrap()).unwrap();
        let (mine, back) = (end.memory(64 << 10), end.memory(64 << 10));
        let window = end.comm.window(&exposed).unwrap();
        let other = end.other();
        for round in 1..=20u64 {
            let len = 1000 + round as usize * 999;
            mine.write(0, &pattern(round, len)).unwrap();
            let slice = mine.slice(0, len as u64).unwrap();
            let (offset, width) = if round % 2 == 0 { (8, 8) } else { (16, 4) };
            let signal = match width {
                8 => Signal::Set64(round),
                _ => Signal::Set32(round as u32),
            };
            let at = (&window, other, 64);
            let put = end
                .device_channel
                .put_signal_on_stream(&end.stream, at, slice, (offset, signal))
                .unwrap();
            let word = match width {
                8 => device.word64(offset).unwrap(),
                _ => device.word32(offset).unwrap(),
            };
            let wanted = (Condition::Equal, round);
            end.device_channel
                .wait_word_on_stream(&end.stream, &word, wanted, Writer::Rank(other))
                .unwrap();
            end.device_channel.wait_on_stream(&end.stream, &put).unwrap();
            end.finish_stream();
            same(&read(&exposed, 64, len), &pattern(round, len), "put before its signal");
            end.comm.barrier(test_timeout()).unwrap();
            let into = back.slice(0, len as u64).unwrap();
            let get =
                end.device_channel.get_on_stream(&end.stream, (&window, other, 64), into).unwrap();
            end.device_channel.wait_on_stream(&end.stream, &get).unwrap();
            end.finish_stream();
            same(&read(&back, 0, len), &pattern(round, len), "fetched");
            end.comm.barrier(test_timeout()).unwrap();
        }
        let plain = end
            .device_channel
            .prepare_put((&window, other, 30_000), mine.slice(0, 100).unwrap())
            .unwrap();
        plain.post(&end.stream).unwrap().wait(test_timeout()).unwrap();
        let beyond = end.device_channel.put_on_stream(
            &end.stream,
            (&window, other, 65_000),
            mine.slice(0, 1000).unwrap(),
        );
        assert_eq!(beyond.unwrap_err().kind(), &Kind::OutOfRange);
        let slice = || mine.slice(0, 8).unwrap();
        let signal = |word, signal| {
            end.device_channel
                .put_signal_on_stream(&end.stream, (&window, other, 64), slice(), (word, signal))
                .unwrap_err()
        };
        assert_eq!(signal(9, Signal::Set64(1)).kind(), &Kind::Misaligned);
        assert_eq!(signal(8, Signal::Add64(1)).kind(), &Kind::Unsupported);
        end.comm.barrier(test_timeout()).unwrap();
        end.comm.finish(test_timeout()).unwrap();
    });
}

fn handshakes_and_barriers(fixture: &Fixture) {
    let arrived = AtomicU64::new(0);
    run_endpoints(fixture, 3, |end| {
        let (rank, size) = (end.comm.rank(), end.comm.size());
        for round in 1..=10u64 {
            for to in (0..size).filter(|to| *to != rank) {
                end.device_channel.send_ready_on_stream(&end.stream, to).unwrap();
            }
            for from in (0..size).filter(|from| *from != rank) {
                end.device_channel.wait_ready_on_stream(&end.stream, from).unwrap();
            }
            end.finish_stream();
            arrived.fetch_add(1, Ordering::SeqCst);
            end.device_channel.barrier_on_stream(&end.stream).unwrap();
            end.finish_stream();
            // All ranks entered the barrier before any left it.
            let count = arrived.load(Ordering::SeqCst);
            assert!((round * 3..=round * 3 + 3).contains(&count), "round {round}: {count}");
        }
        end.comm.barrier(test_timeout()).unwrap();
        end.comm.finish(test_timeout()).unwrap();
    });
}

/// A stream that the library knows by its handle alone sends and waits in its order, and is
/// released when the other rank is lost.
#[allow(unsafe_code)]
fn streams_of_other_libraries(fixture: &Fixture) {
    if gpu().info().backend != Backend::Sim {
        testkit::skip("only the simulated GPU's streams have their number as handle");
    }
    const LEN: u64 = 100_000;
    run_endpoints(fixture, 2, |end| {
        let Endpoint { comm, gpu, stream, device_channel } = &end;
        // SAFETY: of this device, and alive until the end.
        let foreign = unsafe { ForeignStream::new(gpu, stream.number()) }.unwrap();
        let [out, into] = [(); 2].map(|()| gpu.alloc(LEN).unwrap());
        let [sent, received] = [&out, &into].map(|memory| comm.register(memory.whole().unwrap()));
        let (sent, received) = (sent.unwrap(), received.unwrap());
        let other = end.other();
        for round in 1..=20_u8 {
            let receive = device_channel.receive(other, &received).unwrap();
            stream.fill(&out.whole().unwrap(), round + end.comm.rank() as u8).unwrap();
            let send = device_channel.send_on_stream(&foreign, other, &sent).unwrap();
            device_channel.wait_all_on_stream(&foreign, &[send, receive]).unwrap();
            stream.fill(&out.whole().unwrap(), 0xff).unwrap();
            device_channel.send_ready_on_stream(&foreign, other).unwrap();
            device_channel.wait_ready_on_stream(&foreign, other).unwrap();
            device_channel.barrier_on_stream(&foreign).unwrap();
            end.finish_stream();
            let expected = vec![round + other as u8; LEN as usize];
            same(&read(&received, 0, LEN as usize), &expected, "what was there before the send");
        }
        let met = comm.barrier(test_timeout());
        if comm.rank() == 1 {
            met.unwrap();
            return comm.abort("out of luck");
        }
        // The other rank may abort while this one still waits for the barrier's end.
        assert!(met.is_ok() || met.unwrap_err().to_string().contains("out of luck"));
        let never = device_channel.receive(1, &received);
        let waits = never.and_then(|never| device_channel.wait_on_stream(&foreign, &never));
        stream.synchronize(test_timeout()).unwrap();
        let why = waits.and_then(|()| device_channel.check()).unwrap_err();
        assert!(why.to_string().contains("out of luck"), "{why}");
    });
}

fn graphs_replay_messages(fixture: &Fixture) {
    run_endpoints(fixture, 2, |end| {
        const LEN: u64 = 4096;
        const ROUNDS: u64 = 200;
        let device = end.gpu.alloc(LEN + 64).unwrap();
        device.write(0, &[0; 64]).unwrap();
        let exposed = end.comm.register(device.whole().unwrap()).unwrap();
        let mine = end.memory(LEN);
        mine.write(0, &pattern(end.comm.rank() as u64, LEN as usize)).unwrap();
        let window = end.comm.window(&exposed).unwrap();
        let other = end.other();
        let kernel = end.device_channel.kernel(other).unwrap();
        let to = window.remote(other, 64, LEN).unwrap();
        let word = window.word(other, 0, 8).unwrap();
        let wait = SignalWait::new(&device.word64(0).unwrap(), 0, 1).unwrap();
        let slice = mine.whole().sge().unwrap();
        let graph = end
            .stream
            .capture(|stream| {
                kernel.put_signal_on_stream(stream, to, slice, word, 1)?;
                kernel.wait_signal_on_stream(stream, &wait)
            })
            .unwrap();
        for _ in 0..ROUNDS {
            end.stream.replay(&graph).unwrap();
        }
        end.finish_stream();
        assert_eq!(device.word64(0).unwrap().load().unwrap(), ROUNDS);
        same(&read(&exposed, 64, LEN as usize), &pattern(other as u64, LEN as usize), "replayed");
        end.comm.barrier(test_timeout()).unwrap();
        end.comm.finish(test_timeout()).unwrap();
    });
}

fn kernels_play_ping_pong(fixture: &Fixture) {
    ping_pong(fixture, &ChannelOptions::default());
}

/// The same without the HCA, where the other rank's memory is mapped.
fn kernels_signal_by_themselves(fixture: &Fixture) {
    ping_pong(fixture, &ChannelOptions::default().with_direct_atomics(true));
}

fn ping_pong(fixture: &Fixture, options: &ChannelOptions) {
    run_endpoints_with(fixture, 2, options, |end| {
        // A thread alone copies no more than 512 bytes.
        let len: u64 = if options.direct_atomics { 400 } else { 1000 };
        let kernels = PingPongKernels::load(&end.gpu).unwrap();
        // Memory that other processes can map.
        let alloc = |bytes| end.gpu.alloc_kind(bytes, MemoryKind::Vmm).unwrap();
        let device = alloc(len + 64);
        device.write(0, &[0; 64]).unwrap();
        let exposed = end.comm.register(device.whole().unwrap()).unwrap();
        let mine = end.comm.register(alloc(len).whole().unwrap()).unwrap();
        mine.write(0, &pattern(end.comm.rank() as u64 + 5, len as usize)).unwrap();
        let window = end.comm.window(&exposed).unwrap();
        let other = end.other();
        let own = device.word64(0).unwrap();
        let mut start = 0;
        for rounds in [1, 50, 100] {
            let side = PingPongEnd {
                qp: end.device_channel.kernel(other).unwrap(),
                to: window.remote(other, 64, len).unwrap(),
                from: mine.whole().sge().unwrap(),
                signal: window.word(other, 0, 8).unwrap(),
                own: &own,
                start,
                sends_first: end.comm.rank() == 0,
            };
            kernels.ping_pong(&end.stream, &side, rounds, Duration::ZERO, test_timeout()).unwrap();
            end.finish_stream();
            kernels.check().unwrap();
            start += rounds;
            assert_eq!(own.load().unwrap(), start);
            end.comm.barrier(test_timeout()).unwrap();
        }
        same(
            &read(&exposed, 64, len as usize),
            &pattern(other as u64 + 5, len as usize),
            "ping-pong",
        );
        let is_mapped = matches!(fixture.test_link, TestLink::Shm | TestLink::Auto);
        let direct = end.device_channel.kernel(other).unwrap().progress().unwrap().direct;
        assert_eq!(direct > 0, is_mapped && options.direct_atomics, "{direct} direct puts");
        // The other side does not answer: the kernel times out.
        if end.comm.rank() == 0 {
            let side = PingPongEnd {
                qp: end.device_channel.kernel(other).unwrap(),
                to: window.remote(other, 64, len).unwrap(),
                from: mine.whole().sge().unwrap(),
                signal: window.word(other, 0, 8).unwrap(),
                own: &own,
                start,
                sends_first: true,
            };
            kernels.ping_pong(&end.stream, &side, 1, Duration::ZERO, SHORT_WAIT).unwrap();
            end.stream.synchronize(test_timeout()).unwrap();
            let error = kernels.check().unwrap_err();
            assert!(error.to_string().contains("time"), "{error}");
        }
        end.comm.barrier(test_timeout()).unwrap();
        end.comm.finish(test_timeout()).unwrap();
    });
}

/// Rank 1 leaves by `go` while streams of the other ranks wait for it in every way.
fn releases(fixture: &Fixture, go: impl Fn(&Comm) + Sync, text: &str) {
    let waiting = AtomicUsize::new(0);
    run_endpoints(fixture, 3, |end| {
        let into = end.memory(64);
        end.comm.barrier(test_timeout()).unwrap();
        if end.comm.rank() == 1 {
            testkit::until("the others wait", || waiting.load(Ordering::Relaxed) == 2);
            std::thread::sleep(SHORT_WAIT);
            return go(&end.comm);
        }
        let streams: Vec<Stream> = (0..4).map(|_| end.gpu.stream().unwrap()).collect();
        let receive = end.device_channel.receive(1, &into).unwrap();
        end.device_channel.wait_on_stream(&streams[0], &receive).unwrap();
        end.device_channel.wait_ready_on_stream(&streams[1], 1).unwrap();
        end.device_channel.barrier_on_stream(&streams[2]).unwrap();
        let word = end.gpu.alloc(8).unwrap();
        word.write(0, &[0; 8]).unwrap();
        let wanted = (Condition::Equal, 77);
        end.device_channel
            .wait_word_on_stream(&streams[3], &word.word32(0).unwrap(), wanted, Writer::Rank(1))
            .unwrap();
        waiting.fetch_add(1, Ordering::Relaxed);
        let start = Instant::now();
        for stream in &streams {
            stream.synchronize(test_timeout()).unwrap();
        }
        assert!(start.elapsed() < test_timeout() / 3, "{:?}", start.elapsed());
        for error in [
            end.device_channel.check().unwrap_err(),
            receive.wait(test_timeout()).unwrap_err(),
            end.device_channel.send_on_stream(&streams[0], 1, &into).unwrap_err(),
            end.device_channel.receive(1, &into).unwrap_err(),
            end.device_channel.wait_ready_on_stream(&streams[0], 1).unwrap_err(),
        ] {
            assert!(error.to_string().contains(text), "{error}");
        }
        // The channel to the surviving rank still works.
        let other = 2 - end.comm.rank();
        let receive = end.device_channel.receive(other, &into).unwrap();
        let _send = end.device_channel.send_on_stream(&streams[0], other, &into).unwrap();
        end.device_channel.wait_on_stream(&streams[0], &receive).unwrap();
        streams[0].synchronize(test_timeout()).unwrap();
        receive.wait(test_timeout()).unwrap();
        let _ = end.comm.finish(test_timeout());
    });
}

fn a_lost_rank_releases_streams(fixture: &Fixture) {
    releases(fixture, |comm| comm.abort("out of luck"), "rank 1 aborted: out of luck");
}

fn a_rank_that_leaves_releases_streams(fixture: &Fixture) {
    releases(fixture, |_| {}, "rank 1 has left");
}

/// `check` never fails while the other ranks leave in order.
fn an_orderly_leave_is_no_failure(fixture: &Fixture) {
    for _ in 0..10 {
        run_endpoints(fixture, 4, |end| {
            let left = AtomicBool::new(false);
            std::thread::scope(|scope| {
                scope.spawn(|| {
                    while !left.load(Ordering::Relaxed) {
                        end.device_channel.check().unwrap();
                    }
                });
                let ended = end.comm.finish(test_timeout());
                left.store(true, Ordering::Relaxed);
                ended.unwrap();
            });
        });
    }
}

fn channels_check_their_arguments(fixture: &Fixture) {
    run_endpoints(fixture, 2, |end| {
        let memory = end.memory(100);
        let own = end.comm.rank();
        assert_eq!(
            end.device_channel.receive(own, &memory).unwrap_err().kind(),
            &Kind::Unsupported
        );
        assert_eq!(
            end.device_channel.send_on_stream(&end.stream, 2, &memory).unwrap_err().kind(),
            &Kind::InvalidArgument
        );
        let many = vec![memory.slice(0, 1).unwrap(); 16];
        assert!(end.device_channel.sendv_on_stream(&end.stream, end.other(), &many).is_err());
        assert!(end.device_channel.receivev(end.other(), &many).is_err());
        let foreign_rank = Comm::local(1).unwrap().remove(0);
        let theirs = foreign_rank.alloc(8).unwrap();
        let error =
            end.device_channel.send_on_stream(&end.stream, end.other(), &theirs).unwrap_err();
        assert!(error.to_string().contains("another communicator"), "{error}");
        // Streams of another device are refused.
        let elsewhere = simulated_gpu().stream().unwrap();
        assert!(end.device_channel.send_on_stream(&elsewhere, end.other(), &memory).is_err());
        // A communicator whose engine has no thread.
        let lazy = Comm::local(1).unwrap().remove(0);
        assert!(
            lazy.device_channel(&end.gpu, ChannelOptions::default()).is_ok(),
            "a single rank needs no queue pair"
        );
        end.comm.barrier(test_timeout()).unwrap();
        end.comm.finish(test_timeout()).unwrap();
    });
    fixture.ranks(2, |comm| {
        let error = comm.device_channel(&gpu(), ChannelOptions::default()).unwrap_err();
        assert!(error.to_string().contains("CommOptions::for_streams"), "{error}");
    });
    // A channel without kernel support has no kernel queue pair.
    let options = fixture.options().with_progress_mode(CommOptions::for_streams().progress_mode);
    fixture.ranks_with(2, &options, |comm| {
        let plain = ChannelOptions::default().with_kernels(false);
        let device_channel = comm.device_channel(&gpu(), plain).unwrap();
        assert_eq!(device_channel.kernel(1 - comm.rank()).unwrap_err().kind(), &Kind::Unsupported);
        comm.finish(test_timeout()).unwrap();
    });
}

fn channels_apply_back_pressure(fixture: &Fixture) {
    let options = fixture.options().with_progress_mode(CommOptions::for_streams().progress_mode);
    fixture.ranks_with(2, &options, |comm| {
        let gpu = gpu();
        let device_channel =
            comm.device_channel(&gpu, ChannelOptions::default().with_depth(8)).unwrap();
        let stream = gpu.stream().unwrap();
        let memory = comm.register(gpu.alloc(64).unwrap().whole().unwrap()).unwrap();
        let other = 1 - comm.rank();
        if comm.rank() == 0 {
            // The peer has posted no receives: sends queue up until the queue is full.
            let mut sends = Vec::new();
            let busy = loop {
                match device_channel.send_on_stream(&stream, other, &memory) {
                    Ok(send) => sends.push(send),
                    Err(error) => break error,
                }
                assert!(sends.len() < 1000);
            };
            assert_eq!(busy.kind(), &Kind::Busy, "{busy}");
            assert!(sends.len() >= 8, "{}", sends.len());
            // The stream itself is not blocked by that.
            stream.synchronize(test_timeout()).unwrap();
            comm.send(1, 0, &memory, test_timeout()).unwrap();
            let count = sends.len() as u64;
            let number = comm.alloc(8).unwrap();
            number.write(0, &count.to_le_bytes()).unwrap();
            comm.send(1, 1, &number, test_timeout()).unwrap();
            for send in sends {
                send.wait(test_timeout()).unwrap();
            }
        } else {
            let number = comm.alloc(64).unwrap();
            comm.recv(0, 0, &memory, test_timeout()).unwrap();
            comm.recv(0, 1, &number, test_timeout()).unwrap();
            let count = u64::from_le_bytes(read(&number, 0, 8).try_into().unwrap());
            for _ in 0..count {
                assert_eq!(
                    device_channel.receive(0, &memory).unwrap().wait(test_timeout()).unwrap().len,
                    64
                );
            }
        }
        comm.barrier(test_timeout()).unwrap();
        comm.finish(test_timeout()).unwrap();
    });
}

fn one_stream_waits_for_many(fixture: &Fixture) {
    run_endpoints(fixture, 5, |end| {
        let (rank, size) = (end.comm.rank(), end.comm.size());
        let memory = end.memory(size as u64 * 8);
        let number = end.memory(8);
        number.write(0, &(rank as u64 * 11).to_le_bytes()).unwrap();
        for _ in 0..20 {
            let receives: Vec<_> = (0..size)
                .filter(|from| *from != rank)
                .map(|from| {
                    end.device_channel
                        .receive(from, memory.slice(from as u64 * 8, 8).unwrap())
                        .unwrap()
                })
                .collect();
            for to in (0..size).filter(|to| *to != rank) {
                let _send = end.device_channel.send_on_stream(&end.stream, to, &number).unwrap();
            }
            end.device_channel.wait_all_on_stream(&end.stream, &receives).unwrap();
            end.finish_stream();
            for from in (0..size).filter(|from| *from != rank) {
                let bytes = read(&memory, from as u64 * 8, 8);
                assert_eq!(u64::from_le_bytes(bytes.try_into().unwrap()), from as u64 * 11);
            }
        }
        end.comm.barrier(test_timeout()).unwrap();
        end.comm.finish(test_timeout()).unwrap();
    });
}

fn kernels_put_and_get(fixture: &Fixture) {
    run_endpoints(fixture, 2, |end| {
        const LEN: u64 = 5000;
        let kernels = PingPongKernels::load(&end.gpu).unwrap();
        let (mine, exposed, back) = (end.memory(LEN), end.memory(LEN), end.memory(LEN));
        let window = end.comm.window(&exposed).unwrap();
        let (rank, other) = (end.comm.rank() as u64, end.other());
        mine.write(0, &pattern(rank, LEN as usize)).unwrap();
        let (qp, there) =
            (end.device_channel.kernel(other).unwrap(), window.remote(other, 0, LEN).unwrap());
        let put = KernelTransfer { qp, there, here: mine.whole().sge().unwrap(), reads: false };
        kernels.transfer(&end.stream, &put, 20, Duration::ZERO, test_timeout()).unwrap();
        end.finish_stream();
        kernels.check().unwrap();
        end.comm.barrier(test_timeout()).unwrap();
        same(&read(&exposed, 0, LEN as usize), &pattern(other as u64, LEN as usize), "put");
        let get = KernelTransfer { here: back.whole().sge().unwrap(), reads: true, ..put };
        kernels.transfer(&end.stream, &get, 20, Duration::ZERO, test_timeout()).unwrap();
        end.finish_stream();
        kernels.check().unwrap();
        same(&read(&back, 0, LEN as usize), &pattern(rank, LEN as usize), "got back");
        end.comm.barrier(test_timeout()).unwrap();
        // A wrong rkey fails with the cause, and puts the queue pairs of both sides in error.
        if rank == 0 {
            let nowhere = KernelTransfer { there: Remote { rkey: !there.rkey, ..there }, ..get };
            kernels.transfer(&end.stream, &nowhere, 1, Duration::ZERO, test_timeout()).unwrap();
            end.stream.synchronize(test_timeout()).unwrap();
            let error = kernels.check().unwrap_err();
            assert!(error.to_string().contains("access"), "{error}");
        }
        end.comm.barrier(test_timeout()).unwrap();
        end.comm.finish(test_timeout()).unwrap();
    });
}

fn kernels_pass_words_without_an_hca(_: &Fixture) {
    const ROUNDS: u64 = 40;
    let gpu = gpu();
    let (kernels, stream) = (PingPongKernels::load(&gpu).unwrap(), gpu.stream().unwrap());
    let (bells, own) = (gpu.alloc_pinned(128).unwrap(), gpu.alloc_pinned(8).unwrap());
    let (bell, value) = (bells.word64(0).unwrap(), bells.word64(64).unwrap());
    let (whole, word) = (bells.whole().unwrap(), own.word64(0).unwrap());
    for sends_first in [true, false] {
        bell.store(0).unwrap();
        word.store(0).unwrap();
        let relay = Relay { bell: &whole, own: &word, sends_first };
        kernels.relay(&stream, &relay, ROUNDS, test_timeout()).unwrap();
        for round in 1..=ROUNDS {
            if !sends_first {
                assert_eq!(bell.load().unwrap(), round - 1, "the kernel rang too early");
                word.store(round).unwrap();
            }
            let start = Instant::now();
            while bell.load().unwrap() != round {
                assert!(start.elapsed() < test_timeout(), "round {round}");
            }
            assert_eq!(value.load().unwrap(), round);
            if sends_first {
                word.store(round).unwrap();
            }
        }
        stream.synchronize(test_timeout()).unwrap();
        kernels.check().unwrap();
    }
    let short = bells.region(0, 64).unwrap();
    let error = kernels.relay(
        &stream,
        &Relay { bell: &short, own: &word, sends_first: true },
        1,
        test_timeout(),
    );
    assert!(error.unwrap_err().to_string().contains("its doorbell has 64 bytes"));
    let narrow = own.word32(0).unwrap();
    let error = kernels.relay(
        &stream,
        &Relay { bell: &whole, own: &narrow, sends_first: true },
        1,
        test_timeout(),
    );
    assert!(error.unwrap_err().to_string().contains("32 bits"));
    // The host does not answer: the kernel times out.
    word.store(0).unwrap();
    let relay = Relay { bell: &whole, own: &word, sends_first: true };
    kernels.relay(&stream, &relay, 1, SHORT_WAIT).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    assert!(kernels.check().unwrap_err().to_string().contains("time"));
}

fn compute_occupies_the_stream_for_its_duration(_: &Fixture) {
    let gpu = gpu();
    let (kernels, stream) = (PingPongKernels::load(&gpu).unwrap(), gpu.stream().unwrap());
    let start = Instant::now();
    kernels.compute(&stream, Duration::from_millis(30)).unwrap();
    stream.synchronize(test_timeout()).unwrap();
    assert!(start.elapsed() >= Duration::from_millis(30), "{:?}", start.elapsed());
    kernels.check().unwrap();
}
