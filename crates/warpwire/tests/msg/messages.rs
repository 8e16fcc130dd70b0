//! Two-sided messages: send, receive, matching by tag, back-pressure.

use std::time::{Duration, Instant};

use warpwire::error::Kind;
use warpwire::msg::{BufferSlice, Comm, Match, wait_all, wait_any};

use crate::msg::fixture::{
    Fixture, MEMORY_KINDS, SHORT_WAIT, buffer, pattern, read, same, test_timeout,
};
use testkit::{Effort, cases};

cases!(Fixture; CASES:
    all_sizes_and_memory_kinds,
    order_is_kept,
    tags_select_messages,
    unexpected_messages_are_kept,
    vectors,
    to_itself,
    back_pressure,
    a_message_that_is_too_long,
    dropped_requests,
    random_traffic,
);
cases!(Fixture; ONCE:
    arguments_are_checked,
    waiting_for_any,
    several_threads_of_a_rank,
    timeouts;
    change: a_gigabyte,
);

/// Around the eager limit (8192 bytes), and several fragments.
const SIZES: [usize; 10] = [0, 1, 7, 64, 4096, 8191, 8192, 8193, 100_000, (8 << 20) + 3];

fn all_sizes_and_memory_kinds(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        let other = 1 - comm.rank();
        for (from, to) in MEMORY_KINDS.iter().flat_map(|from| MEMORY_KINDS.map(|to| (*from, to))) {
            let out = buffer(&comm, from, 9 << 20);
            let into = buffer(&comm, to, 9 << 20);
            for (tag, size) in SIZES.into_iter().enumerate() {
                let seed = |rank: usize| (rank * 100 + tag) as u64;
                out.write(3, &pattern(seed(comm.rank()), size)).unwrap();
                let slice = out.slice(3, size as u64).unwrap();
                let mut receive =
                    comm.irecv(other, tag as u32, into.slice(5, size as u64 + 9).unwrap()).unwrap();
                let mut send = comm.isend(other, tag as u32, slice).unwrap();
                let outcome = receive.wait(test_timeout()).unwrap();
                assert_eq!((outcome.peer, outcome.tag), (other, tag as u32));
                assert_eq!(outcome.len, size as u64);
                send.wait(test_timeout()).unwrap();
                let what = format!("{from:?} to {to:?}, {size} bytes");
                same(&read(&into, 5, size), &pattern(seed(other), size), &what);
            }
        }
        comm.finish(test_timeout()).unwrap();
    });
}

fn order_is_kept(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        const COUNT: u64 = 300;
        let memory = comm.alloc(64 << 10).unwrap();
        if comm.rank() == 0 {
            for number in 0..COUNT {
                // Eager and rendezvous messages must not overtake each other.
                let len = if number % 3 == 0 { 20_000 } else { 8 };
                memory.write(0, &number.to_le_bytes()).unwrap();
                comm.send(1, 7, memory.slice(0, len).unwrap(), test_timeout()).unwrap();
            }
        } else {
            for number in 0..COUNT {
                comm.recv(0, 7, &memory, test_timeout()).unwrap();
                assert_eq!(read(&memory, 0, 8), number.to_le_bytes());
            }
        }
        comm.finish(test_timeout()).unwrap();
    });
}

fn tags_select_messages(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        let memory = comm.alloc(64 << 10).unwrap();
        if comm.rank() == 0 {
            // The long message is read by the receiver only when a receive matches, so it needs a
            // buffer of its own.
            let long = comm.alloc(30_000).unwrap();
            long.write(0, &[7]).unwrap();
            let mut requests = Vec::new();
            for tag in [5, 6, 7, 6] {
                if tag == 7 {
                    requests.push(comm.isend(1, 7, &long).unwrap());
                } else {
                    memory.write(0, &[tag as u8]).unwrap();
                    comm.send(1, tag, memory.slice(0, 1).unwrap(), test_timeout()).unwrap();
                }
            }
            comm.barrier(test_timeout()).unwrap();
            wait_all(&mut requests, test_timeout()).unwrap();
        } else {
            comm.barrier(test_timeout()).unwrap();
            let take = |tag: Match| {
                let outcome = comm.recv(0, tag, &memory, test_timeout()).unwrap();
                (outcome.tag, outcome.len, read(&memory, 0, 1)[0])
            };
            assert_eq!(take(7.into()), (7, 30_000, 7));
            assert_eq!(take(6.into()), (6, 1, 6));
            assert_eq!(take(Match::Any), (5, 1, 5));
            assert_eq!(take(Match::Any), (6, 1, 6));
        }
        comm.finish(test_timeout()).unwrap();
    });
}

fn unexpected_messages_are_kept(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        let memory = comm.alloc(1 << 20).unwrap();
        if comm.rank() == 0 {
            memory.write(0, &pattern(9, 1 << 20)).unwrap();
            let mut sends: Vec<_> = (0..40u64)
                .map(|number| {
                    comm.isend(1, 1, memory.slice(number, number * 500).unwrap()).unwrap()
                })
                .collect();
            comm.barrier(test_timeout()).unwrap();
            wait_all(&mut sends, test_timeout()).unwrap();
        } else {
            // All eager messages have arrived before the first receive is posted.
            comm.barrier(test_timeout()).unwrap();
            let wanted = pattern(9, 1 << 20);
            for number in 0..40usize {
                let outcome = comm.recv(0, 1, &memory, test_timeout()).unwrap();
                assert_eq!(outcome.len as usize, number * 500);
                let bytes = read(&memory, 0, number * 500);
                same(&bytes, &wanted[number..number + number * 500], "an early message");
            }
        }
        comm.finish(test_timeout()).unwrap();
    });
}

fn vectors(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        let other = 1 - comm.rank();
        for (memory_kind, len) in MEMORY_KINDS
            .iter()
            .flat_map(|memory_kind| [(*memory_kind, 300), (*memory_kind, 40_000)])
        {
            let out = buffer(&comm, memory_kind, 1 << 20);
            let into = buffer(&comm, memory_kind, 1 << 20);
            let whole = pattern(len, 15 * len as usize);
            // Slices at descending offsets, one of them empty.
            let cut = |memory: &warpwire::msg::Buffer, lens: &[u64]| -> Vec<BufferSlice> {
                let mut at = 1 << 20;
                let mut slice = |len: &u64| {
                    at -= len + 3;
                    memory.slice(at, *len).unwrap()
                };
                lens.iter().map(&mut slice).collect()
            };
            let lens: Vec<u64> = (0..15).map(|n| if n == 4 { 0 } else { len - n }).collect();
            let slices = cut(&out, &lens);
            let mut at = 0;
            for slice in &slices {
                let end = at + slice.len() as usize;
                out.write(slice.offset(), &whole[at..end]).unwrap();
                at = end;
            }
            let halves = cut(&into, &[at as u64 / 3, at as u64 / 2, at as u64]);
            let mut receive = comm.irecvv(other, 0, &halves).unwrap();
            let mut send = comm.isendv(other, 0, &slices).unwrap();
            assert_eq!(receive.wait(test_timeout()).unwrap().len, at as u64);
            send.wait(test_timeout()).unwrap();
            let mut received = Vec::new();
            for half in &halves {
                received.extend(read(&into, half.offset(), half.len() as usize));
            }
            same(&received[..at], &whole[..at], "a vector");
        }
        let one = comm.alloc(16).unwrap();
        let many = vec![one.whole(); 16];
        let refused = comm.isendv(other, 0, &many).unwrap_err();
        assert_eq!(refused.kind(), &Kind::InvalidArgument, "{refused}");
        assert!(comm.irecvv(other, 0, &many).is_err());
        comm.finish(test_timeout()).unwrap();
    });
}

fn to_itself(fixture: &Fixture) {
    fixture.ranks(1, |comm| {
        let (out, into) = (comm.alloc(1 << 20).unwrap(), comm.alloc(1 << 20).unwrap());
        out.write(0, &pattern(1, 1 << 20)).unwrap();
        for len in [0, 1, 5000, 1 << 20] {
            // An eager message is buffered; a long one waits for its receive.
            let mut send = comm.isend(0, 3, out.slice(0, len).unwrap()).unwrap();
            assert_eq!(send.test().unwrap().is_some(), len <= 8192, "{len}");
            let outcome = comm.recv(0, 3, &into, test_timeout()).unwrap();
            assert_eq!((outcome.peer, outcome.len), (0, len));
            send.wait(test_timeout()).unwrap();
            same(&read(&into, 0, len as usize), &pattern(1, 1 << 20)[..len as usize], "own");
            // The receive first.
            let mut receive = comm.irecv(0, Match::Any, &into).unwrap();
            assert_eq!(receive.test().unwrap(), None);
            comm.send(0, 4, out.slice(0, len).unwrap(), test_timeout()).unwrap();
            assert_eq!(receive.wait(test_timeout()).unwrap().tag, 4);
        }
        let short = into.slice(0, 10).unwrap();
        comm.send(0, 5, out.slice(0, 11).unwrap(), test_timeout()).unwrap();
        assert_eq!(comm.recv(0, 5, short, test_timeout()).unwrap_err().kind(), &Kind::OutOfRange);
    });
}

fn back_pressure(fixture: &Fixture) {
    let options = fixture.options().with_receive_credits(8).with_queue_depth(16);
    fixture.ranks_with(2, &options, |comm| {
        let memory = comm.alloc(4096).unwrap();
        if comm.rank() == 0 {
            let mut sends = Vec::new();
            let busy = loop {
                match comm.isend(1, 0, memory.slice(0, 100).unwrap()) {
                    Ok(send) => sends.push(send),
                    Err(error) => break error,
                }
            };
            assert_eq!(busy.kind(), &Kind::Busy, "{busy}");
            // Eight fill the peer's receives and are complete; sixteen are queued here.
            assert_eq!(sends.len(), 24);
            sends[7].wait(test_timeout()).unwrap();
            let waits = sends[8].wait(SHORT_WAIT).unwrap_err();
            assert_eq!(waits.kind(), &Kind::Timeout, "{waits}");
            comm.send_ready(1, test_timeout()).unwrap();
            wait_all(&mut sends, test_timeout()).unwrap();
        } else {
            comm.wait_ready(0, test_timeout()).unwrap();
            for _ in 0..24 {
                assert_eq!(comm.recv(0, 0, &memory, test_timeout()).unwrap().len, 100);
            }
            // The number of posted receives is limited too.
            let mut receives = Vec::new();
            let busy = loop {
                match comm.irecv(0, 1, &memory) {
                    Ok(receive) => receives.push(receive),
                    Err(error) => break error,
                }
            };
            assert_eq!((receives.len(), busy.kind()), (16, &Kind::Busy));
        }
        comm.barrier(test_timeout()).unwrap();
        comm.finish(test_timeout()).unwrap();
    });
}

fn a_message_that_is_too_long(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        let memory = comm.alloc(1 << 20).unwrap();
        for len in [100, 100_000] {
            if comm.rank() == 0 {
                // The send succeeds, and the next message is intact.
                comm.send(1, 0, memory.slice(0, len).unwrap(), test_timeout()).unwrap();
                comm.send(1, 0, memory.slice(0, len - 1).unwrap(), test_timeout()).unwrap();
            } else {
                let short = || memory.slice(0, len - 1).unwrap();
                let error = comm.recv(0, 0, short(), test_timeout()).unwrap_err();
                assert_eq!(error.kind(), &Kind::OutOfRange);
                let text = error.to_string();
                assert!(text.contains(&format!("{len} bytes")), "{text}");
                assert!(text.contains(&format!("the buffer {}", len - 1)), "{text}");
                assert_eq!(comm.recv(0, 0, short(), test_timeout()).unwrap().len, len - 1);
            }
        }
        comm.finish(test_timeout()).unwrap();
    });
}

fn dropped_requests(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        let other = 1 - comm.rank();
        let memory = comm.alloc(1 << 20).unwrap();
        for len in [10, 500_000] {
            // A receive that is dropped before a message arrives consumes none.
            drop(comm.irecv(other, 0, &memory).unwrap());
            comm.barrier(test_timeout()).unwrap();
            // A send whose request is dropped continues and keeps its memory alive.
            let mine = comm.alloc(len).unwrap();
            mine.write(0, &pattern(len, len as usize)).unwrap();
            drop(comm.isend(other, 0, &mine).unwrap());
            drop(mine);
            assert_eq!(comm.recv(other, 0, &memory, test_timeout()).unwrap().len, len);
            same(&read(&memory, 0, len as usize), &pattern(len, len as usize), "of a dropped send");
            comm.barrier(test_timeout()).unwrap();
        }
        // A receive may be dropped while its message is being transferred.
        for round in 0..20 {
            let mut send = comm.isend(other, 1, &memory).unwrap();
            let target = comm.alloc(1 << 20).unwrap();
            let mut receive = comm.irecv(other, 1, &target).unwrap();
            if round % 2 == 0 {
                let _ = receive.test();
            }
            comm.barrier(test_timeout()).unwrap();
            let _ = receive.test();
            drop(receive);
            drop(target);
            // If it was cancelled before the message arrived, this receive consumes the message.
            let mut rest = comm.irecv(other, 1, &memory).unwrap();
            let start = Instant::now();
            while send.test().unwrap().is_none() && start.elapsed() < test_timeout() {
                let _ = rest.test().unwrap();
            }
            send.wait(Duration::ZERO).unwrap();
            comm.barrier(test_timeout()).unwrap();
        }
        comm.finish(test_timeout()).unwrap();
    });
}

/// Random sizes and order, with receives posted before and after arrival; compares every byte.
fn random_traffic(fixture: &Fixture) {
    let seed = std::env::var("WARPWIRE_SEED").ok().and_then(|text| text.parse().ok());
    for seed in seed.map_or(1..1 + Effort::choose([1, 1, 10]), |seed: u64| seed..seed + 1) {
        for size in [2, 3, 5] {
            fixture.ranks(size, |comm| {
                exchange(&comm, seed);
                comm.finish(test_timeout()).unwrap();
            });
        }
    }
}

/// The messages from one rank to another (tag and length), computed from the seed on both sides.
fn plan(seed: u64, from: usize, to: usize) -> Vec<(u32, usize)> {
    let bytes = pattern(seed << 16 | (from << 8 | to) as u64, 60 * 8);
    let words = bytes.chunks_exact(8).map(|word| u64::from_le_bytes(word.try_into().unwrap()));
    let message = |word: u64| {
        let len = match word % 5 {
            0 => 0,
            1 => word >> 8 & 0xff,
            2 | 3 => word >> 8 & 0x3fff,
            _ => word >> 8 & 0x3_ffff,
        };
        ((word >> 40 & 3) as u32, len as usize)
    };
    words.map(message).collect()
}

/// Sends and receives all messages in the plans of this seed.
pub fn exchange(comm: &Comm, seed: u64) {
    let (rank, size) = (comm.rank(), comm.size());
    let mut requests = Vec::new();
    let mut checks = Vec::new();
    let random_bytes = pattern(seed ^ (rank as u64) << 40, 4096);
    let mut at = 0;
    let mut roll = |sides: u8| {
        at = (at + 1) % random_bytes.len();
        random_bytes[at] % sides
    };
    let others: Vec<usize> = (0..size).collect();
    let mut sends: Vec<_> =
        others.iter().map(|to| plan(seed, rank, *to).into_iter().enumerate()).collect();
    // Receives are posted in random order of tags; messages of one tag arrive in order.
    let mut receives: Vec<Vec<Vec<(usize, usize)>>> = Vec::new();
    for from in &others {
        let mut by_tag = vec![Vec::new(); 4];
        for (number, (tag, len)) in plan(seed, *from, rank).into_iter().enumerate() {
            by_tag[tag as usize].push((number, len));
        }
        by_tag.iter_mut().for_each(|list| list.reverse());
        receives.push(by_tag);
    }
    let name =
        |from: usize, to: usize, number: usize| (from * 64 + to) as u64 * 1000 + number as u64;
    let start = Instant::now();
    loop {
        assert!(start.elapsed() < test_timeout() * 2, "seed {seed}: rank {rank} hangs");
        let peer = usize::from(roll(size as u8));
        if roll(2) == 0 {
            if let Some((number, (tag, len))) = sends[peer].next() {
                let memory = comm.alloc(len.max(1) as u64).unwrap();
                memory.write(0, &pattern(name(rank, peer, number), len)).unwrap();
                requests.push(comm.isend(peer, tag, memory.slice(0, len as u64).unwrap()).unwrap());
            }
        } else {
            let tag = usize::from(roll(4));
            if let Some((number, len)) = receives[peer][tag].pop() {
                let memory = comm.alloc(len as u64 + 1).unwrap();
                let request = comm.irecv(peer, tag as u32, &memory).unwrap();
                checks.push((request, memory, peer, number, len));
            }
        }
        if roll(8) == 0 {
            comm.progress().unwrap();
        }
        let left = receives.iter().flatten().map(Vec::len).sum::<usize>();
        if left == 0 && sends.iter().all(|list| list.len() == 0) {
            break;
        }
    }
    for (mut request, memory, peer, number, len) in checks {
        assert_eq!(request.wait(test_timeout()).unwrap().len as usize, len, "seed {seed}");
        let wanted = pattern(name(peer, rank, number), len);
        same(&read(&memory, 0, len), &wanted, &format!("seed {seed}: {peer} to {rank}, {number}"));
    }
    wait_all(&mut requests, test_timeout()).unwrap();
}

fn arguments_are_checked(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        let memory = comm.alloc(100).unwrap();
        let no_rank = comm.isend(2, 0, &memory).unwrap_err();
        assert_eq!(no_rank.kind(), &Kind::InvalidArgument);
        assert!(no_rank.to_string().contains("there are 2 ranks"), "{no_rank}");
        assert!(comm.irecv(2, 0, &memory).is_err());
        for (offset, len) in [(0, 101), (101, 0), (100, 1), (u64::MAX, 1), (1, u64::MAX)] {
            let error = memory.slice(offset, len).unwrap_err();
            assert_eq!(error.kind(), &Kind::OutOfRange, "{offset} {len}");
        }
        assert!(memory.slice(100, 0).unwrap().is_empty());
        assert!(memory.write(99, &[0; 2]).is_err() && memory.read(99, &mut [0; 2]).is_err());
        // Memory of another communicator.
        let foreign = Comm::local(1).unwrap().remove(0);
        let theirs = foreign.alloc(10).unwrap();
        let error = comm.isend(1, 0, &theirs).unwrap_err();
        assert!(error.to_string().contains("another communicator"), "{error}");
        for options in [
            fixture.options().with_eager_limit(2 << 20),
            fixture.options().with_receive_credits(1),
            fixture.options().with_max_requests(0),
            fixture.options().with_queue_depth(0),
        ] {
            let error = Comm::local_with(1, &options).unwrap_err();
            assert_eq!(error.kind(), &Kind::InvalidArgument);
        }
        comm.finish(test_timeout()).unwrap();
    });
}

fn waiting_for_any(fixture: &Fixture) {
    fixture.ranks(3, |comm| {
        let memory = comm.alloc(300).unwrap();
        let slice = |rank: usize| memory.slice(rank as u64 * 100, 100).unwrap();
        if comm.rank() == 0 {
            let mut requests =
                vec![comm.irecv(1, 0, slice(1)).unwrap(), comm.irecv(2, 0, slice(2)).unwrap()];
            let none = wait_any(&mut requests, SHORT_WAIT).unwrap_err();
            assert_eq!(none.kind(), &Kind::Timeout);
            comm.send_ready(2, test_timeout()).unwrap();
            let (index, outcome) = wait_any(&mut requests, test_timeout()).unwrap();
            assert_eq!((index, outcome.unwrap().peer), (1, 2));
            drop(requests.remove(1));
            comm.send_ready(1, test_timeout()).unwrap();
            let (index, outcome) = wait_any(&mut requests, test_timeout()).unwrap();
            assert_eq!((index, outcome.unwrap().peer), (0, 1));
            assert_eq!(
                wait_any(&mut [], test_timeout()).unwrap_err().kind(),
                &Kind::InvalidArgument
            );
        } else {
            comm.wait_ready(0, test_timeout()).unwrap();
            comm.send(0, 0, slice(0), test_timeout()).unwrap();
        }
        comm.finish(test_timeout()).unwrap();
    });
}

fn several_threads_of_a_rank(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        let other = 1 - comm.rank();
        std::thread::scope(|scope| {
            for tag in 0..4u32 {
                let comm = &comm;
                scope.spawn(move || {
                    let memory = comm.alloc(64 << 10).unwrap();
                    for round in 0..100u64 {
                        let len = 1 + (round * 997 + u64::from(tag)) % 20_000;
                        memory.write(0, &pattern(round, len as usize)).unwrap();
                        let into = memory.slice(32 << 10, 32 << 10).unwrap();
                        let mut receive = comm.irecv(other, tag, into).unwrap();
                        comm.send(other, tag, memory.slice(0, len).unwrap(), test_timeout())
                            .unwrap();
                        assert_eq!(receive.wait(test_timeout()).unwrap().len, len);
                        let received = read(&memory, 32 << 10, len as usize);
                        same(&received, &pattern(round, len as usize), "of a thread");
                    }
                });
            }
        });
        comm.finish(test_timeout()).unwrap();
    });
}

fn a_gigabyte(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        const LEN: u64 = 1 << 30;
        let memory = comm.alloc(LEN).unwrap();
        if comm.rank() == 0 {
            for at in [0, LEN / 2 + 12345, LEN - 4096] {
                memory.write(at, &pattern(at, 4096)).unwrap();
            }
            comm.send(1, 0, &memory, test_timeout() * 4).unwrap();
        } else {
            assert_eq!(comm.recv(0, 0, &memory, test_timeout() * 4).unwrap().len, LEN);
            for at in [0, LEN / 2 + 12345, LEN - 4096] {
                same(&read(&memory, at, 4096), &pattern(at, 4096), "a gigabyte");
            }
        }
        comm.finish(test_timeout()).unwrap();
    });
}

fn timeouts(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        let memory = comm.alloc(100).unwrap();
        if comm.rank() == 0 {
            let start = Instant::now();
            let mut receive = comm.irecv(1, 0, &memory).unwrap();
            let error = receive.wait(SHORT_WAIT).unwrap_err();
            assert_eq!(error.kind(), &Kind::Timeout);
            assert!(error.to_string().contains("receive from rank 1"), "{error}");
            assert!(start.elapsed() >= SHORT_WAIT && start.elapsed() < test_timeout());
            comm.send_ready(1, test_timeout()).unwrap();
            // The receive is still posted after the timeout.
            assert_eq!(receive.wait(test_timeout()).unwrap().len, 100);
            assert_eq!(receive.wait(Duration::ZERO).unwrap().len, 100);
        } else {
            comm.wait_ready(0, test_timeout()).unwrap();
            assert!(!comm.test_ready(0).unwrap(), "it was taken");
            comm.send(0, 0, &memory, test_timeout()).unwrap();
            // A receive that no message matches times out.
            let late = comm.recv(0, 9, &memory, SHORT_WAIT).unwrap_err();
            assert_eq!(late.kind(), &Kind::Timeout);
        }
        comm.barrier(test_timeout()).unwrap();
        comm.finish(test_timeout()).unwrap();
    });
}
