//! Anything at all in queues, records and doorbells: errors, but never a crash, a hang, or harm to others.

use std::time::{Duration, Instant};

use warpwire::mlx5::{Atomic, AtomicWidth, Builder, Opcode, Record, Scratch};
use warpwire::verbs::{
    Change, Completion, Op, Qp, QpOptions, ReceiveRequest, Request, SrqOptions, State,
};

use crate::verbs::fixture::{Fixture, Joined, Patch, Rng, Side, World, connect, same, soon};
use testkit::{Effort, cases, for_each_seed};

cases!(Fixture; ONCE:
    random_entries,
    mutated_entries,
    random_doorbells_and_records,
    random_receives,
    random_links_of_shared_receives,
    random_completions,
    queues_that_change_while_they_are_read,
);

/// Seeds of a case: a tenth of them in the inner loop, ten times as many in `./ci.sh full`.
pub fn seeds(change: u64) -> std::ops::Range<u64> {
    0..Effort::pick("WARPWIRE_SEEDS", [change / 10, change, change * 10])
}

/// A connection to be abused, one beside it that must not suffer, and memory whose guards must not change.
struct Abuse {
    world: World,
    victim: Joined,
    bystander: Joined,
    near: Patch,
    far: Patch,
    secret: [Patch; 2],
}

impl Abuse {
    fn new(fixture: &Fixture, options: QpOptions) -> Self {
        let world = fixture.world();
        let bystander = world.join(QpOptions::default());
        let victim = world.join(options);
        let [near, far] = [&world.a, &world.b].map(|end| fixture.host(end, 4096));
        // Registered under another domain: no key of the victim's opens it.
        let secret = [&world.a, &world.b].map(|end| {
            let other =
                crate::verbs::fixture::End { context: end.context.clone(), pd: end.context.pd() };
            fixture.host(&other, 4096)
        });
        Self { world, victim, bystander, near, far, secret }
    }

    /// Drives both for a bounded number of steps, and takes what completes.
    fn settle(&self) -> usize {
        let mut done = [Completion::EMPTY; 32];
        let mut count = 0;
        for _ in 0..40 {
            self.world.step();
            for side in [&self.victim.a, &self.victim.b] {
                count +=
                    side.sends.poll(&mut done).unwrap() + side.receives.poll(&mut done).unwrap();
            }
        }
        count
    }

    fn again(&self) {
        for side in [&self.victim.a, &self.victim.b] {
            side.qp.modify(&Change::to(State::Reset)).unwrap();
        }
        connect(&self.victim.a.qp, &self.victim.b.qp);
    }

    fn afterwards(&self) {
        self.world.works(&self.bystander);
        for secret in &self.secret {
            same(&secret.read(0, 4096), &[0; 4096], "memory of another domain");
        }
        self.again();
        self.world.works(&self.victim);
        self.again(); // the next one begins at the first block
        self.world.a.news();
        self.world.b.news();
    }
}

fn options() -> QpOptions {
    QpOptions { timeout: 6, retry_count: 1, rnr_retry: 1, send_depth: 8, ..QpOptions::default() }
}

/// Writes bytes into a send queue from `index` on, going round, and rings.
fn put(world: &World, side: &Side, index: u16, bytes: &[u8]) {
    let (memory, layout) = side.qp.queues();
    let size = layout.record - layout.send;
    let at = u64::from(index) * 64 % size;
    let first = ((size - at) as usize).min(bytes.len());
    memory.bytes().write(layout.send + at, &bytes[..first]).unwrap();
    memory.bytes().write(layout.send, &bytes[first..]).unwrap();
    let next = index.wrapping_add(bytes.len().div_ceil(64) as u16);
    let word = u32::from_ne_bytes(Record::word(next));
    memory.bytes().store_u32(layout.record + 4, word).unwrap();
    world.a.context.hca().ring(side.qp.number());
}

/// Pure noise, in which the index and the size of the first entry are right: it would never be looked at else.
fn random_entries(fixture: &Fixture) {
    let abuse = Abuse::new(fixture, options());
    for_each_seed(seeds(3000), |seed| {
        let mut rng = Rng::new(seed);
        let mut entry = vec![0; 64 * (1 + rng.below(4) as usize)];
        entry.iter_mut().for_each(|byte| *byte = rng.next_u64() as u8);
        let index = 0u16;
        entry[1..3].copy_from_slice(&index.to_be_bytes());
        if seed % 4 != 0 {
            let codes = [0, 1, 8, 9, 0xa, 0xb, 0xf, 0x10, 0x11, 0x12, 0x14, 0x15, 0x23, 0x25];
            entry[3] = codes[rng.below(codes.len() as u64) as usize];
            entry[7] = 1 + rng.below(entry.len() as u64 / 16) as u8;
        }
        // What is not there within a millisecond is an error: the rest of the noise, mostly.
        put(&abuse.world, &abuse.victim.a, index, &entry);
        abuse.settle();
        if seed % 200 == 0 {
            abuse.world.drive_for(Duration::from_millis(25));
            abuse.settle();
        }
        abuse.afterwards();
    });
}

/// A right entry of every sort.
fn right_entry(abuse: &Abuse, rng: &mut Rng, scratch: &mut Scratch, index: u16) -> Vec<u8> {
    let (near, far) = (&abuse.near.mr, &abuse.far.mr);
    let number = abuse.victim.a.qp.number();
    let build = |scratch: &mut Scratch, opcode, with: &dyn Fn(Builder<'_>) -> Option<Vec<u8>>| {
        with(Builder::new(scratch, opcode, index, number).signaled()).unwrap()
    };
    let data = |b: Builder<'_>| {
        b.data(100, near.lkey(), near.iova()).finish().ok().map(|i| i.bytes().to_vec())
    };
    let remote = far.remote(64);
    match rng.below(8) {
        0 => build(scratch, Opcode::Send, &|b| data(b)),
        1 => build(scratch, Opcode::SendInvalidate, &|b| data(b.invalidate(far.rkey() ^ 1))),
        2 => build(scratch, Opcode::RdmaWrite, &|b| data(b.remote(remote.address, remote.rkey))),
        3 => build(scratch, Opcode::RdmaWriteImm, &|b| {
            data(b.imm([1; 4]).remote(remote.address, remote.rkey))
        }),
        4 => build(scratch, Opcode::RdmaRead, &|b| data(b.remote(remote.address, remote.rkey))),
        5 => build(scratch, Opcode::FetchAdd, &|b| {
            data(b.remote(remote.address, remote.rkey).atomic(&Atomic::FetchAdd { add: 1 }))
        }),
        6 => build(scratch, Opcode::MaskedCompareSwap, &|b| {
            let width = AtomicWidth::Eight;
            let op = Atomic::MaskedCompareSwap {
                width,
                compare: 1,
                swap: 2,
                compare_mask: 3,
                swap_mask: 4,
            };
            data(b.remote(remote.address, remote.rkey).atomic(&op))
        }),
        _ => build(scratch, Opcode::RdmaWrite, &|b| {
            let b = b.remote(remote.address, remote.rkey).inline(&[7; 90]);
            b.finish().ok().map(|i| i.bytes().to_vec())
        }),
    }
}

/// Entries of every sort with a few bits or bytes changed: each ends, well or not.
fn mutated_entries(fixture: &Fixture) {
    let abuse = Abuse::new(fixture, options());
    let mut scratch = Scratch::default();
    let scratch = std::cell::RefCell::new(&mut scratch);
    for_each_seed(seeds(4000), |seed| {
        let mut rng = Rng::new(seed);
        let mut entry = right_entry(&abuse, &mut rng, &mut scratch.borrow_mut(), 0);
        for _ in 0..1 + rng.below(3) {
            // Not the index: an entry with another is not there yet.
            let at = 3 + rng.below(entry.len() as u64 - 3) as usize;
            if rng.below(2) == 0 {
                entry[at] ^= 1 << rng.below(8);
            } else {
                entry[at] = [0, 0xff, 0x80, rng.next_u64() as u8][rng.below(4) as usize];
            }
        }
        abuse
            .victim
            .b
            .qp
            .post_receive(&[ReceiveRequest { id: 1, data: &[abuse.far.mr.sge(0, 128)] }])
            .unwrap();
        put(&abuse.world, &abuse.victim.a, 0, &entry);
        // Unless it became a wait, or asks for no completion. One that is longer than what was promised takes its time.
        let silent = entry[11] & 0x0c != 0x08 || entry[3] == 0x0f;
        let start = Instant::now();
        let mut ended = abuse.settle();
        while ended == 0 && !silent {
            ended += abuse.settle();
            assert!(start.elapsed() < soon(), "seed {seed}: nothing came of {entry:02x?}");
        }
        abuse.afterwards();
    });
}

fn random_doorbells_and_records(fixture: &Fixture) {
    let abuse = Abuse::new(fixture, QpOptions { watched: true, ..options() });
    for_each_seed(seeds(3000), |seed| {
        let mut rng = Rng::new(seed);
        let (memory, layout) = abuse.victim.a.qp.queues();
        for _ in 0..6 {
            let places = [layout.record, layout.doorbell, layout.doorbell + 256];
            let at = places[rng.below(3) as usize];
            let value = match rng.below(3) {
                0 => rng.next_u64(),
                1 => u64::from_be(rng.below(40) << 40),
                _ => u64::from_be(rng.below(40)),
            };
            memory.bytes().store_u64(at, value).unwrap();
            abuse.world.step();
        }
        abuse.settle();
        if seed % 200 == 0 {
            abuse.world.drive_for(Duration::from_millis(25)); // entries that never come
            abuse.settle();
        }
        abuse.afterwards();
    });
}

fn random_receives(fixture: &Fixture) {
    let abuse = Abuse::new(fixture, QpOptions { receive_ranges: 4, ..options() });
    for_each_seed(seeds(3000), |seed| {
        let mut rng = Rng::new(seed);
        let (memory, layout) = abuse.victim.b.qp.queues();
        let mut entries = [0; 256];
        entries.iter_mut().for_each(|byte| *byte = rng.next_u64() as u8);
        for segment in 0..16 {
            match rng.below(4) {
                0 => entries[segment * 16..][..16]
                    .copy_from_slice(&[0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
                1 => {
                    let range = abuse.far.mr.sge(rng.below(4000), rng.below(200) as u32);
                    entries[segment * 16..][..4].copy_from_slice(&range.len.to_be_bytes());
                    entries[segment * 16 + 4..][..4].copy_from_slice(&range.lkey.to_be_bytes());
                    entries[segment * 16 + 8..][..8].copy_from_slice(&range.address.to_be_bytes());
                }
                _ => entries[segment * 16] &= 0x80, // lengths that could be
            }
        }
        memory.bytes().write(layout.receive, &entries).unwrap();
        let count = [1, 2, 4, rng.next_u64() as u16][rng.below(4) as usize];
        memory.bytes().store_u32(layout.record, u32::from_ne_bytes(Record::word(count))).unwrap();
        for id in 0..3 {
            let data = [abuse.near.mr.sge(0, rng.below(500) as u32)];
            abuse.victim.a.qp.post_send(&[Request::new(id, Op::Send).with(&data)]).unwrap();
        }
        abuse.settle();
        abuse.afterwards();
    });
}

/// Links that lead anywhere: in circles, to themselves, beyond the end. Its memory is not ours to write through
/// verbs, so this one is made by hand.
fn random_links_of_shared_receives(fixture: &Fixture) {
    use warpwire::hca::{Layout, QpSpec, QueueMemory, SrqSpec};
    let world = fixture.world();
    let bystander = world.join(QpOptions::default());
    let hca = world.b.context.hca();
    let near = fixture.host(&world.a, 4096);
    for_each_seed(seeds(1000), |seed| {
        let mut rng = Rng::new(seed);
        let memory = QueueMemory::host(16 * 64 + 64).unwrap();
        let mut noise = vec![0; 16 * 64];
        noise.iter_mut().for_each(|byte| *byte = rng.next_u64() as u8);
        for entry in noise.chunks_mut(64) {
            entry[16] &= 0x7f & rng.next_u64() as u8;
            if rng.below(2) == 0 {
                entry[16..32].copy_from_slice(&[0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]);
            }
        }
        memory.bytes().write(0, &noise).unwrap();
        let count = Record::word([3, 16, 17, rng.next_u64() as u16][rng.below(4) as usize]);
        memory.bytes().store_u32(1024, u32::from_ne_bytes(count)).unwrap();
        let srq =
            hca.create_srq(SrqSpec { memory, entries: 16, stride: 64, record: 1024 }).unwrap();
        let cq = world.b.context.create_cq(64).unwrap();
        let layout = Layout { receive: 0, send: 0, record: 1024, doorbell: 1088 };
        let side = world.side(&world.a, options());
        let number = hca
            .create_qp(QpSpec {
                memory: QueueMemory::host(2048).unwrap(),
                layout,
                send_blocks: 16,
                receive_entries: 0,
                receive_stride: 0,
                send_cq: cq.number(),
                receive_cq: cq.number(),
                srq: Some(srq),
                pd: world.b.pd.id(),
                signal_all: true,
                user_index: 0xffff,
                watched: false,
                options: QpOptions::default().tuning,
                datagrams: None,
            })
            .unwrap();
        let peer = world.side(&world.b, options()); // lends its steps
        let steps = [
            peer.qp.to_init(),
            peer.qp.to_rtr(&side.qp.offer()).unwrap(),
            peer.qp.to_rts(&side.qp.offer()),
        ];
        steps.iter().for_each(|step| hca.modify_qp(number, step).unwrap());
        let mut offer = peer.qp.offer();
        offer.qpn = number;
        side.qp.connect(&offer).unwrap();
        for id in 0..8 {
            let data = [near.mr.sge(0, rng.below(3) as u32)];
            side.qp.post_send(&[Request::new(id, Op::Send).with(&data)]).unwrap();
        }
        (0..30).for_each(|_| world.step());
        hca.destroy_qp(number);
        hca.destroy_srq(srq);
        world.works(&bystander);
    });
}

/// Completions and consumer counts that nobody wrote: reading them is harmless, and so is what follows.
fn random_completions(fixture: &Fixture) {
    let world = fixture.world();
    let bystander = world.join(QpOptions::default());
    let srq = world.a.context.create_srq(&world.a.pd, SrqOptions { depth: 7, ranges: 1 }).unwrap();
    for_each_seed(seeds(1500), |seed| {
        let mut rng = Rng::new(seed);
        let srq = (seed % 2 == 0).then(|| srq.clone());
        let joined = world.join_with(QpOptions { srq, ..options() }, options());
        let cq = &joined.a.sends;
        let bytes = cq.memory().bytes();
        for place in 0..bytes.len() / 8 {
            if rng.below(3) == 0 {
                bytes.store_u64(place * 8, rng.next_u64()).unwrap();
            }
        }
        // Some that could be: of this queue pair, with the right owner.
        for place in 0..8 {
            bytes.store_u32(place * 64 + 32, 0).unwrap();
            bytes.store_u32(place * 64 + 56, u32::from_be(joined.a.qp.number())).unwrap();
            let code = [0, 2, 13, 14][rng.below(4) as usize];
            let tail = [rng.next_u64() as u8, rng.next_u64() as u8, 0, code << 4];
            bytes.store_u32(place * 64 + 60, u32::from_ne_bytes(tail)).unwrap();
        }
        let mut done = [Completion::EMPTY; 16];
        for id in 0..20 {
            let _ = joined.a.qp.post_send(&[Request::new(id, Op::Nop)]);
            let _ = cq.poll(&mut done).unwrap();
            cq.arm(id % 2 == 0).unwrap();
            bytes.store_u32(bytes.len() - 64, rng.next_u64() as u32).unwrap();
        }
        drop(joined);
        world.works(&bystander);
    });
}

/// A writer that keeps changing a queue, its record and its doorbell while the engine reads them.
fn queues_that_change_while_they_are_read(fixture: &Fixture) {
    let abuse = Abuse::new(fixture, QpOptions { watched: true, ..options() });
    let stop = std::sync::atomic::AtomicBool::new(false);
    let scribble = |qp: &Qp, seed: u64| {
        let mut rng = Rng::new(seed);
        let (memory, layout) = qp.queues();
        let bytes = memory.bytes();
        while !stop.load(std::sync::atomic::Ordering::Relaxed) {
            let at = rng.below((bytes.len() - layout.receive) / 8) * 8;
            let value = if rng.below(4) == 0 {
                rng.next_u64()
            } else {
                rng.below(64) << (8 * rng.below(8))
            };
            bytes.store_u64(at, value).unwrap();
            bytes.store_u64(layout.doorbell, u64::from_be(rng.below(64) << 40)).unwrap();
        }
    };
    std::thread::scope(|scope| {
        for (n, side) in [&abuse.victim.a, &abuse.victim.b].into_iter().enumerate() {
            scope.spawn(move || scribble(&side.qp, n as u64));
        }
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(500) {
            abuse.settle();
            for side in [&abuse.victim.a, &abuse.victim.b] {
                side.qp.modify(&Change::to(State::Reset)).unwrap();
            }
            connect(&abuse.victim.a.qp, &abuse.victim.b.qp);
            abuse.world.works(&abuse.bystander);
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    for secret in &abuse.secret {
        same(&secret.read(0, 4096), &[0; 4096], "memory of another domain");
    }
    abuse.world.works(&abuse.bystander);
}
