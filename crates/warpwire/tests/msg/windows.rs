//! One-sided operations: windows, signals and waits on words.

use std::time::Duration;

use warpwire::error::Kind;
use warpwire::mem::Condition;
use warpwire::msg::{Signal, Writer, wait_all};

use crate::msg::fixture::{
    Fixture, MEMORY_KINDS, SHORT_WAIT, buffer, pattern, read, same, test_timeout,
};
use testkit::{Effort, cases};

cases!(Fixture; CASES:
    put_and_get,
    ranges_are_checked,
    signals_come_after_their_data,
    every_wait_condition,
    ready_notifications,
    windows_of_several_lengths,
);

fn sizes() -> [usize; 7] {
    [0, 1, 8, 63, 5000, 70_000, Effort::choose([4 << 20, 4 << 20, 16 << 20]) + 1]
}

fn put_and_get(fixture: &Fixture) {
    fixture.ranks(3, |comm| {
        let (rank, size) = (comm.rank(), comm.size());
        for memory_kind in MEMORY_KINDS {
            let exposed = buffer(&comm, memory_kind, 20 << 20);
            let mine = buffer(&comm, memory_kind, 40 << 20);
            let window = comm.window(&exposed).unwrap();
            for len in sizes() {
                for step in 0..size {
                    // To itself, to the next rank, to the one after that.
                    let to = (rank + step) % size;
                    let from = (rank + size - step) % size;
                    let seed = |rank: usize| (rank * 10 + step) as u64 + len as u64;
                    mine.write(1, &pattern(seed(rank), len)).unwrap();
                    let slice = mine.slice(1, len as u64).unwrap();
                    assert_eq!(
                        window.put(to, 77, slice).unwrap().wait(test_timeout()).unwrap().peer,
                        to
                    );
                    comm.barrier(test_timeout()).unwrap();
                    let what = format!("{memory_kind:?}: {len} bytes from {from} to {rank}");
                    same(&read(&exposed, 77, len), &pattern(seed(from), len), &what);
                    // Get the same bytes back, into two slices.
                    let half = len as u64 / 2;
                    let slices = [
                        mine.slice(20 << 20, half).unwrap(),
                        mine.slice(31 << 20, len as u64 - half).unwrap(),
                    ];
                    window.getv(to, 77, &slices).unwrap().wait(test_timeout()).unwrap();
                    let mut back = read(&mine, 20 << 20, half as usize);
                    back.extend(read(&mine, 31 << 20, len - half as usize));
                    same(&back, &pattern(seed(rank), len), "fetched back");
                    comm.barrier(test_timeout()).unwrap();
                }
            }
            window.close(test_timeout()).unwrap();
        }
        comm.finish(test_timeout()).unwrap();
    });
}

fn ranges_are_checked(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        let memory = comm.alloc(1000).unwrap();
        let window = comm.window(memory.slice(100, 500).unwrap()).unwrap();
        let other = 1 - comm.rank();
        assert_eq!((window.len_of(other), window.len_of(2)), (500, 0));
        let slice = |len| memory.slice(0, len).unwrap();
        for (offset, len) in [(0, 501), (500, 1), (499, 2), (u64::MAX, 1), (501, 0)] {
            for refused in
                [window.put(other, offset, slice(len)), window.get(other, offset, slice(len))]
            {
                let error = refused.unwrap_err();
                assert_eq!(error.kind(), &Kind::OutOfRange, "{offset} {len}");
                assert!(error.to_string().contains("500 bytes"), "{error}");
            }
        }
        let signal = |offset, signal| window.put_signal(other, 0, slice(8), offset, signal);
        assert_eq!(signal(496, Signal::Set64(1)).unwrap_err().kind(), &Kind::OutOfRange);
        assert_eq!(signal(498, Signal::Set32(1)).unwrap_err().kind(), &Kind::OutOfRange);
        assert_eq!(signal(6, Signal::Set32(1)).unwrap_err().kind(), &Kind::Misaligned);
        assert_eq!(window.put(2, 0, slice(1)).unwrap_err().kind(), &Kind::InvalidArgument);
        // The connection still works.
        window.put(other, 0, slice(500)).unwrap().wait(test_timeout()).unwrap();
        window.put(other, 500, slice(0)).unwrap().wait(test_timeout()).unwrap();
        window.close(test_timeout()).unwrap();
        comm.finish(test_timeout()).unwrap();
    });
}

fn signals_come_after_their_data(fixture: &Fixture) {
    for memory_kind in MEMORY_KINDS {
        fixture.ranks(2, |comm| {
            const LEN: usize = 100_000;
            let other = 1 - comm.rank();
            let exposed = buffer(&comm, memory_kind, 256 << 10);
            let mine = buffer(&comm, memory_kind, 256 << 10);
            exposed.write(0, &[0; 64]).unwrap();
            let window = comm.window(&exposed).unwrap();
            for round in 1..=30u64 {
                mine.write(0, &pattern(round, LEN)).unwrap();
                let slice = mine.slice(0, LEN as u64).unwrap();
                let signal = match round % 3 {
                    0 => Signal::Set32(round as u32),
                    1 => Signal::Set64(round),
                    _ => Signal::Add64(1),
                };
                let mut put = window.put_signal(other, 64, slice, 8, signal).unwrap();
                let from = Writer::Rank(other);
                comm.wait64(&exposed, 8, (Condition::Equal, round), from, test_timeout()).unwrap();
                same(&read(&exposed, 64, LEN), &pattern(round, LEN), "before its signal");
                put.wait(test_timeout()).unwrap();
                comm.barrier(test_timeout()).unwrap();
            }
            window.close(test_timeout()).unwrap();
            comm.finish(test_timeout()).unwrap();
        });
    }
}

fn every_wait_condition(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        let memory = comm.alloc(64).unwrap();
        let other = 1 - comm.rank();
        let set = |value: u64| memory.write(8, &value.to_le_bytes()).unwrap();
        let holds32 = |condition, value| {
            comm.wait32(&memory, 8, (condition, value), Writer::Rank(other), Duration::ZERO).is_ok()
        };
        let holds64 = |condition, value| {
            comm.wait64(&memory, 8, (condition, value), Writer::Any, Duration::ZERO).is_ok()
        };
        use Condition::{And, AtLeast, Equal, Nor};
        set(5);
        assert!(holds32(Equal, 5) && !holds32(Equal, 4) && !holds32(Equal, 6));
        assert!(holds32(AtLeast, 5) && holds32(AtLeast, 4) && !holds32(AtLeast, 6));
        assert!(holds32(And, 4) && !holds32(And, 2));
        // The comparison wraps around: 5 is 6 after the maximum.
        assert!(holds32(AtLeast, u32::MAX) && holds64(AtLeast, u64::MAX));
        set(0xffff_0000);
        assert!(holds32(Nor, 0x7fff) && !holds32(Nor, 0xffff));
        assert!(holds64(Nor, 0xffff));
        set(u64::MAX << 32);
        assert!(holds64(And, 1 << 40) && !holds64(And, 1) && !holds32(And, u32::MAX));
        assert!(holds64(Equal, u64::MAX << 32) && holds32(Equal, 0));
        let late =
            comm.wait32(&memory, 8, (Equal, 7), Writer::Rank(other), SHORT_WAIT).unwrap_err();
        assert_eq!(late.kind(), &Kind::Timeout, "{late}");
        let wrong = |offset| {
            let wanted = (Equal, 0);
            comm.wait64(&memory, offset, wanted, Writer::Any, SHORT_WAIT).unwrap_err()
        };
        assert_eq!(wrong(4).kind(), &Kind::Misaligned);
        assert_eq!(wrong(64).kind(), &Kind::OutOfRange);
        assert!(comm.wait32(&memory, 0, (Equal, 0), Writer::Rank(2), SHORT_WAIT).is_err());
        comm.barrier(test_timeout()).unwrap();
        comm.finish(test_timeout()).unwrap();
    });
}

fn ready_notifications(fixture: &Fixture) {
    fixture.ranks(4, |comm| {
        let (rank, size) = (comm.rank(), comm.size());
        for round in 0..50 {
            for to in 0..size {
                for _ in 0..round % 3 {
                    comm.send_ready(to, test_timeout()).unwrap();
                }
            }
            for from in 0..size {
                for _ in 0..round % 3 {
                    comm.wait_ready(from, test_timeout()).unwrap();
                }
            }
        }
        comm.barrier(test_timeout()).unwrap();
        for from in 0..size {
            // No notification is left over.
            assert!(!comm.test_ready(from).unwrap(), "rank {rank} from {from}");
        }
        comm.barrier(test_timeout()).unwrap();
        assert_eq!(comm.send_ready(4, test_timeout()).unwrap_err().kind(), &Kind::InvalidArgument);
        assert_eq!(comm.wait_ready(4, test_timeout()).unwrap_err().kind(), &Kind::InvalidArgument);
        comm.finish(test_timeout()).unwrap();
    });
}

fn windows_of_several_lengths(fixture: &Fixture) {
    fixture.ranks(3, |comm| {
        let rank = comm.rank();
        let memory = comm.alloc(10_000).unwrap();
        let source = comm.alloc(10_000).unwrap();
        source.write(0, &[rank as u8 + 1; 10_000]).unwrap();
        // Rank 0 exposes no bytes. Three windows exist at the same time.
        let len = rank as u64 * 1000;
        let windows: Vec<_> = (0..3)
            .map(|index| comm.window(memory.slice(index * 3000, len).unwrap()).unwrap())
            .collect();
        assert_eq!([0, 1, 2].map(|rank| windows[1].len_of(rank)), [0, 1000, 2000]);
        assert!(windows[0].put(0, 0, source.slice(0, 1).unwrap()).is_err());
        let mut puts: Vec<_> = (0..3)
            .flat_map(|index| [1, 2].map(|to| (index, to)))
            .map(|(index, to)| {
                let at = rank as u64 * 300;
                windows[index].put(to, at, source.slice(0, 300).unwrap()).unwrap()
            })
            .collect();
        wait_all(&mut puts, test_timeout()).unwrap();
        comm.barrier(test_timeout()).unwrap();
        if rank > 0 {
            for (index, from) in (0..3).flat_map(|index| [0, 1, 2].map(|from| (index, from))) {
                let at = index * 3000 + from * 300;
                assert_eq!(read(&memory, at, 300), [from as u8 + 1; 300]);
            }
        }
        comm.finish(test_timeout()).unwrap();
    });
}
