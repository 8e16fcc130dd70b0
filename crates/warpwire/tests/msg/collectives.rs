//! Collective operations.

use std::sync::atomic::{AtomicUsize, Ordering};

use warpwire::error::Kind;
use warpwire::msg::{DataType, ReduceOp};

use crate::msg::fixture::{
    Fixture, MEMORY_KINDS, SHORT_WAIT, buffer, pattern, read, same, test_timeout,
};
use testkit::{ascending_words, cases};

cases!(Fixture; CASES:
    barriers_hold_every_rank,
    broadcasts,
    blocks_are_gathered,
    blocks_are_exchanged,
    blocks_are_reduced,
    reductions,
    invalid_use_is_refused,
);

fn barriers_hold_every_rank(fixture: &Fixture) {
    for size in [1, 2, 3, 8] {
        let arrived = AtomicUsize::new(0);
        fixture.ranks(size, |comm| {
            for round in 1..=20 {
                arrived.fetch_add(1, Ordering::SeqCst);
                comm.barrier(test_timeout()).unwrap();
                // All ranks have entered this barrier, and none has passed the next one.
                let count = arrived.load(Ordering::SeqCst);
                assert!((round * size..=(round + 1) * size).contains(&count), "{count}");
            }
            comm.finish(test_timeout()).unwrap();
        });
    }
}

fn broadcasts(fixture: &Fixture) {
    for size in [1, 2, 3, 5, 8] {
        fixture.ranks(size, |comm| {
            for (root, len) in
                (0..size).flat_map(|root| [0, 1, 9000, 300_000].map(|len| (root, len)))
            {
                for memory_kind in MEMORY_KINDS {
                    let memory = buffer(&comm, memory_kind, 300_001);
                    if comm.rank() == root {
                        memory.write(1, &pattern(len as u64, len)).unwrap();
                    }
                    comm.broadcast(root, memory.slice(1, len as u64).unwrap(), test_timeout())
                        .unwrap();
                    same(&read(&memory, 1, len), &pattern(len as u64, len), "a broadcast");
                }
            }
            comm.finish(test_timeout()).unwrap();
        });
    }
}

/// What the block of one rank for another contains.
fn block_of(from: usize, to: usize, len: usize) -> Vec<u8> {
    pattern((from * 100 + to) as u64, len)
}

fn blocks_are_gathered(fixture: &Fixture) {
    for size in [1, 2, 3, 8] {
        fixture.ranks(size, |comm| {
            for (memory_kind, len) in MEMORY_KINDS
                .into_iter()
                .flat_map(|kind| [0, 1, 9000, 100_000].map(|len| (kind, len)))
            {
                let memory = buffer(&comm, memory_kind, (size * len + 1) as u64);
                let own = comm.rank() * len + 1;
                memory.write(own as u64, &block_of(comm.rank(), 0, len)).unwrap();
                let slice = memory.slice(1, (size * len) as u64).unwrap();
                comm.all_gather(slice, test_timeout()).unwrap();
                for rank in 0..size {
                    let found = read(&memory, (rank * len + 1) as u64, len);
                    same(&found, &block_of(rank, 0, len), "a gathered block");
                }
            }
            comm.finish(test_timeout()).unwrap();
        });
    }
}

fn blocks_are_exchanged(fixture: &Fixture) {
    for size in [1, 2, 3, 8] {
        fixture.ranks(size, |comm| {
            for (memory_kind, len) in MEMORY_KINDS
                .into_iter()
                .flat_map(|kind| [0, 1, 9000, 100_000].map(|len| (kind, len)))
            {
                let send = buffer(&comm, memory_kind, (size * len) as u64 + 1);
                let recv = buffer(&comm, memory_kind, (size * len) as u64 + 1);
                for to in 0..size {
                    send.write((to * len) as u64, &block_of(comm.rank(), to, len)).unwrap();
                }
                let total = (size * len) as u64;
                let slices = (send.slice(0, total).unwrap(), recv.slice(1, total).unwrap());
                comm.all_to_all(slices.0, slices.1, test_timeout()).unwrap();
                for from in 0..size {
                    let found = read(&recv, (from * len + 1) as u64, len);
                    same(&found, &block_of(from, comm.rank(), len), "an exchanged block");
                }
            }
            comm.finish(test_timeout()).unwrap();
        });
    }
}

fn blocks_are_reduced(fixture: &Fixture) {
    for size in [1, 2, 3, 7] {
        fixture.ranks(size, |comm| {
            // The last is more than one piece.
            for count in [0, 1, 1000, (5 << 20) / 8 / size] {
                let memory = comm.alloc((size * count * 8 + 8) as u64).unwrap();
                // Element i of rank r is (r + 1) * (i + 7).
                let factor = comm.rank() as u64 + 1;
                let input = ascending_words(7 * factor, factor, size * count);
                memory.write(0, &input).unwrap();
                let slice = memory.slice(0, input.len() as u64).unwrap();
                let (element, sum) = (DataType::U64, ReduceOp::Sum);
                comm.reduce_scatter(slice, element, sum, test_timeout()).unwrap();
                let (first, factors) = (comm.rank() * count, (size * (size + 1) / 2) as u64);
                let mut wanted = input;
                wanted[first * 8..(first + count) * 8].copy_from_slice(&ascending_words(
                    (first as u64 + 7) * factors,
                    factors,
                    count,
                ));
                same(&read(&memory, 0, wanted.len()), &wanted, "its block, and no other");
            }
            comm.finish(test_timeout()).unwrap();
        });
    }
}

fn reductions(fixture: &Fixture) {
    for size in [1, 2, 3, 7] {
        fixture.ranks(size, |comm| {
            let rank = comm.rank();
            let count = 5000;
            let memory = comm.alloc(count as u64 * 8).unwrap();
            let whole = |memory: &warpwire::msg::Buffer| read(memory, 0, count * 8);
            let numbers: Vec<u8> =
                (0..count).flat_map(|i| ((i + rank) as f64 * 0.5).to_le_bytes()).collect();
            memory.write(0, &numbers).unwrap();
            comm.all_reduce(&memory, DataType::F64, ReduceOp::Sum, test_timeout()).unwrap();
            for (i, word) in whole(&memory).chunks_exact(8).enumerate() {
                let sum: f64 = (0..size).map(|rank| (i + rank) as f64 * 0.5).sum();
                assert_eq!(f64::from_le_bytes(word.try_into().unwrap()), sum, "element {i}");
            }
            let each = |element: DataType, reduce: ReduceOp, mine: i64| -> i64 {
                memory.write(0, &mine.to_le_bytes()).unwrap();
                let slice = memory.slice(0, element.bytes()).unwrap();
                comm.all_reduce(slice, element, reduce, test_timeout()).unwrap();
                i64::from_le_bytes(read(&memory, 0, 8).try_into().unwrap())
            };
            let last = size as i64 - 1;
            assert_eq!(each(DataType::I64, ReduceOp::Min, -(rank as i64)), -last);
            assert_eq!(each(DataType::I64, ReduceOp::Max, rank as i64), last);
            assert_eq!(each(DataType::U64, ReduceOp::Sum, 1 << 40), (size as i64) << 40);
            assert_eq!(each(DataType::I32, ReduceOp::Max, rank as i64), last);
            let wrapped = each(DataType::I32, ReduceOp::Sum, i64::from(i32::MAX as u32)) as i32;
            assert_eq!(wrapped, i32::MAX.wrapping_mul(size as i32));
            let float = i64::from((rank as f32 - 1.0).to_bits());
            assert_eq!(f32::from_bits(each(DataType::F32, ReduceOp::Min, float) as u32), -1.0);
            // More than one chunk.
            let big = comm.alloc(9 << 20).unwrap();
            big.write(0, &vec![1; 9 << 20]).unwrap();
            comm.all_reduce(&big, DataType::U64, ReduceOp::Sum, test_timeout()).unwrap();
            let word = 0x0101_0101_0101_0101u64.wrapping_mul(size as u64);
            same(&read(&big, 0, 9 << 20), &ascending_words(word, 0, 9 << 17), "the sums");
            comm.finish(test_timeout()).unwrap();
        });
    }
}

fn invalid_use_is_refused(fixture: &Fixture) {
    fixture.ranks(2, |comm| {
        let memory = comm.alloc(100).unwrap();
        let odd = comm.all_reduce(
            memory.slice(0, 7).unwrap(),
            DataType::F32,
            ReduceOp::Sum,
            test_timeout(),
        );
        assert_eq!(odd.unwrap_err().kind(), &Kind::InvalidArgument);
        assert!(comm.broadcast(2, &memory, test_timeout()).is_err());
        // 99 bytes are no two blocks, and blocks of 50 bytes no whole numbers.
        let uneven = memory.slice(0, 99).unwrap();
        for (refused, why) in [
            (comm.all_gather(uneven.clone(), test_timeout()), "99 bytes"),
            (comm.all_to_all(uneven.clone(), uneven, test_timeout()), "99 bytes"),
            (
                comm.all_to_all(&memory, memory.slice(0, 98).unwrap(), test_timeout()),
                "98 to receive",
            ),
            (
                comm.reduce_scatter(&memory, DataType::F32, ReduceOp::Sum, test_timeout()),
                "50 bytes",
            ),
        ] {
            let error = refused.unwrap_err();
            assert_eq!(error.kind(), &Kind::InvalidArgument);
            assert!(error.to_string().contains(why), "{error}");
        }
        comm.barrier(test_timeout()).unwrap();
        // A barrier that the other rank does not enter times out.
        if comm.rank() == 0 {
            let late = comm.barrier(SHORT_WAIT).unwrap_err();
            assert_eq!(late.kind(), &Kind::Timeout, "{late}");
            comm.send_ready(1, test_timeout()).unwrap();
        } else {
            comm.wait_ready(0, test_timeout()).unwrap();
            comm.barrier(test_timeout()).unwrap();
        }
        // Lengths that differ between ranks are reported.
        let len = 10 + comm.rank() as u64;
        let outcome = comm.broadcast(0, memory.slice(0, len).unwrap(), test_timeout());
        match comm.rank() {
            0 => outcome.unwrap(),
            _ => {
                let error = outcome.unwrap_err().to_string();
                assert!(error.contains("rank 0 has 10 bytes, this one 11"), "{error}");
            }
        }
        // Rank 0 stays until the other has made up for the barrier that timed out.
        match comm.rank() {
            0 => comm.wait_ready(1, test_timeout()).unwrap(),
            _ => comm.send_ready(0, test_timeout()).unwrap(),
        }
        comm.finish(test_timeout()).unwrap();
    });
}
