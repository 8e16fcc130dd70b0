//! Arbitrary bytes in queues, doorbell records and doorbells cause errors, but never a crash, a
//! hang, or harm to other queue pairs.

use std::time::{Duration, Instant};

use warpwire::mlx5::{
    AddressVector, Atomic, AtomicWidth, Builder, DoorbellRecord, Scratch, WqeOpcode,
};
use warpwire::verbs::{
    Completion, Qp, QpAttributes, QpOptions, ReceiveRequest, SendRequest, SrqOptions, State, WrOp,
};

use crate::verbs::datagrams::{self, QKEY, UdPair, address, reset};
use crate::verbs::fixture::{
    Fixture, QpPair, Rng, TestBuffer, TestQp, Testbed, connect, same, test_timeout,
};
use testkit::{Effort, cases, for_each_seed};

cases!(Fixture; ONCE:
    random_wqes,
    mutated_wqes,
    random_doorbells_and_records,
    random_receives,
    random_srq_links,
    random_completions,
    queues_that_change_while_they_are_read,
    random_datagram_wqes,
);

/// Seeds of a case: `change / 10` in the inner loop, `10 * change` in `./ci.sh full`.
pub fn seeds(change: u64) -> std::ops::Range<u64> {
    0..Effort::pick("WARPWIRE_SEEDS", [change / 10, change, change * 10])
}

/// A connection under attack, a bystander that must keep working, and memory that must not change.
struct GarbageTest {
    testbed: Testbed,
    victim: QpPair,
    bystander: QpPair,
    near: TestBuffer,
    far: TestBuffer,
    secret: [TestBuffer; 2],
}

impl GarbageTest {
    fn new(fixture: &Fixture, options: QpOptions) -> Self {
        let testbed = fixture.testbed();
        let bystander = testbed.join(QpOptions::default());
        let victim = testbed.join(options);
        let [near, far] = [&testbed.a, &testbed.b].map(|end| fixture.host(end, 4096));
        // Registered in another protection domain: no key of the victim gives access to it.
        let secret = [&testbed.a, &testbed.b].map(|end| {
            let other = crate::verbs::fixture::Endpoint {
                context: end.context.clone(),
                pd: end.context.alloc_pd(),
            };
            fixture.host(&other, 4096)
        });
        Self { testbed, victim, bystander, near, far, secret }
    }

    /// Drives both devices for 40 steps and returns the number of completions.
    fn drain(&self) -> usize {
        let mut done = [Completion::EMPTY; 32];
        let mut count = 0;
        for _ in 0..40 {
            self.testbed.step();
            for test_qp in [&self.victim.a, &self.victim.b] {
                count += test_qp.sends.poll(&mut done).unwrap()
                    + test_qp.receives.poll(&mut done).unwrap();
            }
        }
        count
    }

    fn reconnect(&self) {
        for test_qp in [&self.victim.a, &self.victim.b] {
            test_qp.qp.modify(&QpAttributes::new(State::Reset)).unwrap();
        }
        connect(&self.victim.a.qp, &self.victim.b.qp);
    }

    fn check_unaffected(&self) {
        self.testbed.check_traffic(&self.bystander);
        for secret in &self.secret {
            same(&secret.read(0, 4096), &[0; 4096], "memory of another domain");
        }
        self.reconnect();
        self.testbed.check_traffic(&self.victim);
        self.reconnect(); // the next WQE starts at WQEBB 0
        self.testbed.a.async_events();
        self.testbed.b.async_events();
    }
}

/// After that, WQEs that are never written are an error.
const WQE_ARRIVAL: Duration = Duration::from_millis(310);

fn options() -> QpOptions {
    QpOptions::default().with_timeout(12).with_retry_count(1).with_rnr_retry(1).with_send_depth(8)
}

/// Writes bytes into a send queue from WQEBB `index` on, wrapping, and rings the doorbell.
fn put(testbed: &Testbed, test_qp: &TestQp, index: u16, bytes: &[u8]) {
    let (memory, layout) = test_qp.qp.queues().unwrap();
    let size = layout.dbrec - layout.send;
    let at = u64::from(index) * 64 % size;
    let first = ((size - at) as usize).min(bytes.len());
    memory.bytes().write(layout.send + at, &bytes[..first]).unwrap();
    memory.bytes().write(layout.send, &bytes[first..]).unwrap();
    let next = index.wrapping_add(bytes.len().div_ceil(64) as u16);
    let word = u32::from_ne_bytes(DoorbellRecord::word(next));
    memory.bytes().store_u32(layout.dbrec + 4, word).unwrap();
    testbed.a.context.soft().unwrap().ring(test_qp.qp.number());
}

/// Random bytes. The index and the size of the first WQE are mostly valid; otherwise the engine
/// would reject it immediately.
fn random_wqes(fixture: &Fixture) {
    let garbage = GarbageTest::new(fixture, options());
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
        put(&garbage.testbed, &garbage.victim.a, index, &entry);
        garbage.drain();
        if seed % 1000 == 0 {
            garbage.testbed.poll_for(WQE_ARRIVAL);
            garbage.drain();
        }
        garbage.check_unaffected();
    });
}

/// A valid WQE of a random kind.
fn valid_wqe(garbage: &GarbageTest, rng: &mut Rng, scratch: &mut Scratch, index: u16) -> Vec<u8> {
    let (near, far) = (&garbage.near.mr, &garbage.far.mr);
    let number = garbage.victim.a.qp.number();
    let build = |scratch: &mut Scratch, opcode, with: &dyn Fn(Builder<'_>) -> Option<Vec<u8>>| {
        with(Builder::new(scratch, opcode, index, number).signaled()).unwrap()
    };
    let data = |b: Builder<'_>| {
        b.data(100, near.lkey(), near.iova()).finish().ok().map(|i| i.bytes().to_vec())
    };
    let remote = far.remote(64);
    match rng.below(8) {
        0 => build(scratch, WqeOpcode::Send, &|b| data(b)),
        1 => build(scratch, WqeOpcode::SendInvalidate, &|b| data(b.invalidate(far.rkey() ^ 1))),
        2 => build(scratch, WqeOpcode::RdmaWrite, &|b| data(b.remote(remote.address, remote.rkey))),
        3 => build(scratch, WqeOpcode::RdmaWriteImm, &|b| {
            data(b.imm([1; 4]).remote(remote.address, remote.rkey))
        }),
        4 => build(scratch, WqeOpcode::RdmaRead, &|b| data(b.remote(remote.address, remote.rkey))),
        5 => build(scratch, WqeOpcode::FetchAdd, &|b| {
            data(b.remote(remote.address, remote.rkey).atomic(&Atomic::FetchAdd { add: 1 }))
        }),
        6 => build(scratch, WqeOpcode::MaskedCompareSwap, &|b| {
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
        _ => build(scratch, WqeOpcode::RdmaWrite, &|b| {
            let b = b.remote(remote.address, remote.rkey).inline(&[7; 90]);
            b.finish().ok().map(|i| i.bytes().to_vec())
        }),
    }
}

/// Mutated WQEs that are longer than the doorbell announces.
const MAX_LONGER: u32 = 8;

/// WQEs of every kind with a few bits or bytes changed: each completes, successfully or not.
fn mutated_wqes(fixture: &Fixture) {
    let garbage = GarbageTest::new(fixture, options());
    let longer = std::cell::Cell::new(0);
    let mut scratch = Scratch::default();
    let scratch = std::cell::RefCell::new(&mut scratch);
    for_each_seed(seeds(4000), |seed| {
        let mut rng = Rng::new(seed);
        let mut entry = valid_wqe(&garbage, &mut rng, &mut scratch.borrow_mut(), 0);
        for _ in 0..1 + rng.below(3) {
            // Not the index: a WQE with another index counts as not yet written.
            let at = 3 + rng.below(entry.len() as u64 - 3) as usize;
            if rng.below(2) == 0 {
                entry[at] ^= 1 << rng.below(8);
            } else {
                entry[at] = [0, 0xff, 0x80, rng.next_u64() as u8][rng.below(4) as usize];
            }
        }
        // The engine waits long for the rest of a WQE that the doorbell did not announce: a few of
        // these.
        if usize::from(entry[7] & 0x3f) * 16 > entry.len() {
            longer.set(longer.get() + 1);
            if longer.get() > MAX_LONGER {
                return;
            }
        }
        garbage
            .victim
            .b
            .qp
            .post_receive(&[ReceiveRequest { id: 1, data: &[garbage.far.mr.sge(0, 128)] }])
            .unwrap();
        put(&garbage.testbed, &garbage.victim.a, 0, &entry);
        // Unless it became a WAIT or is unsignaled.
        let silent = entry[11] & 0x0c != 0x08 || entry[3] == 0x0f;
        let start = Instant::now();
        let mut ended = garbage.drain();
        while ended == 0 && !silent {
            ended += garbage.drain();
            assert!(
                start.elapsed() < test_timeout(),
                "seed {seed}: no completion for {entry:02x?}"
            );
        }
        garbage.check_unaffected();
    });
}

fn random_doorbells_and_records(fixture: &Fixture) {
    let garbage = GarbageTest::new(fixture, options().with_poll_doorbell(true));
    for_each_seed(seeds(3000), |seed| {
        let mut rng = Rng::new(seed);
        let (memory, layout) = garbage.victim.a.qp.queues().unwrap();
        for _ in 0..6 {
            let places = [layout.dbrec, layout.doorbell, layout.doorbell + 256];
            let at = places[rng.below(3) as usize];
            let value = match rng.below(3) {
                0 => rng.next_u64(),
                1 => u64::from_be(rng.below(40) << 40),
                _ => u64::from_be(rng.below(40)),
            };
            memory.bytes().store_u64(at, value).unwrap();
            garbage.testbed.step();
        }
        garbage.drain();
        if seed % 1000 == 0 {
            garbage.testbed.poll_for(WQE_ARRIVAL);
            garbage.drain();
        }
        garbage.check_unaffected();
    });
}

fn random_receives(fixture: &Fixture) {
    let garbage = GarbageTest::new(fixture, options().with_max_recv_sge(4));
    for_each_seed(seeds(3000), |seed| {
        let mut rng = Rng::new(seed);
        let (memory, layout) = garbage.victim.b.qp.queues().unwrap();
        let mut entries = [0; 256];
        entries.iter_mut().for_each(|byte| *byte = rng.next_u64() as u8);
        for segment in 0..16 {
            match rng.below(4) {
                0 => entries[segment * 16..][..16]
                    .copy_from_slice(&[0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
                1 => {
                    let range = garbage.far.mr.sge(rng.below(4000), rng.below(200) as u32);
                    entries[segment * 16..][..4].copy_from_slice(&range.len.to_be_bytes());
                    entries[segment * 16 + 4..][..4].copy_from_slice(&range.lkey.to_be_bytes());
                    entries[segment * 16 + 8..][..8].copy_from_slice(&range.address.to_be_bytes());
                }
                _ => entries[segment * 16] &= 0x80, // plausible lengths
            }
        }
        memory.bytes().write(layout.receive, &entries).unwrap();
        let count = [1, 2, 4, rng.next_u64() as u16][rng.below(4) as usize];
        memory
            .bytes()
            .store_u32(layout.dbrec, u32::from_ne_bytes(DoorbellRecord::word(count)))
            .unwrap();
        for id in 0..3 {
            let data = [garbage.near.mr.sge(0, rng.below(500) as u32)];
            garbage.victim.a.qp.post_send(&[SendRequest::new(id, WrOp::Send).with(&data)]).unwrap();
        }
        garbage.drain();
        garbage.check_unaffected();
    });
}

/// SRQ links that point anywhere: in circles, to themselves, beyond the end. Verbs give no write
/// access to the SRQ's memory, so this SRQ is built by hand.
fn random_srq_links(fixture: &Fixture) {
    use warpwire::hca::{QpLayout, QpSpec, QueueMemory, SrqSpec};
    let testbed = fixture.testbed();
    let bystander = testbed.join(QpOptions::default());
    let hca = testbed.b.context.soft().unwrap();
    let near = fixture.host(&testbed.a, 4096);
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
        let count = DoorbellRecord::word([3, 16, 17, rng.next_u64() as u16][rng.below(4) as usize]);
        memory.bytes().store_u32(1024, u32::from_ne_bytes(count)).unwrap();
        let srq = hca.create_srq(SrqSpec { memory, entries: 16, stride: 64, dbrec: 1024 }).unwrap();
        let cq = testbed.b.context.create_cq(64).unwrap();
        let layout = QpLayout { receive: 0, send: 0, dbrec: 1024, doorbell: 1088 };
        let test_qp = testbed.test_qp(&testbed.a, options());
        let number = hca
            .create_qp(QpSpec {
                memory: QueueMemory::host(2048).unwrap(),
                layout,
                send_wqebbs: 16,
                receive_entries: 0,
                receive_stride: 0,
                send_cq: cq.number(),
                receive_cq: cq.number(),
                srq: Some(srq),
                pd: testbed.b.pd.soft().unwrap().id(),
                signal_all: true,
                user_index: 0xffff,
                poll_doorbell: false,
                options: QpOptions::default().tuning,
                datagrams: None,
                is_unreliable: false,
            })
            .unwrap();
        let peer = testbed.test_qp(&testbed.b, options()); // only for its attributes
        let steps = [
            peer.qp.init_attr(),
            peer.qp.rtr_attr(&test_qp.qp.endpoint()).unwrap(),
            peer.qp.rts_attr(&test_qp.qp.endpoint()),
        ];
        steps.iter().for_each(|step| hca.modify_qp(number, step).unwrap());
        let mut endpoint = peer.qp.endpoint();
        endpoint.qpn = number;
        test_qp.qp.connect(&endpoint).unwrap();
        for id in 0..8 {
            let data = [near.mr.sge(0, rng.below(3) as u32)];
            test_qp.qp.post_send(&[SendRequest::new(id, WrOp::Send).with(&data)]).unwrap();
        }
        (0..30).for_each(|_| testbed.step());
        hca.destroy_qp(number);
        hca.destroy_srq(srq);
        testbed.check_traffic(&bystander);
    });
}

/// Random CQEs and consumer indices: polling them is harmless, and so is what follows.
fn random_completions(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let bystander = testbed.join(QpOptions::default());
    let srq = testbed
        .a
        .context
        .create_srq(&testbed.a.pd, SrqOptions::default().with_depth(7).with_max_sge(1))
        .unwrap();
    for_each_seed(seeds(1500), |seed| {
        let mut rng = Rng::new(seed);
        let srq = (seed % 2 == 0).then(|| srq.clone());
        let conn = testbed.join_with(options().with_srq(srq), options());
        let cq = &conn.a.sends;
        let bytes = cq.memory().unwrap().bytes();
        for word in 0..bytes.len() / 8 {
            if rng.below(3) == 0 {
                bytes.store_u64(word * 8, rng.next_u64()).unwrap();
            }
        }
        // Some plausible ones: of this queue pair, with the right owner bit.
        for slot in 0..8 {
            bytes.store_u32(slot * 64 + 32, 0).unwrap();
            bytes.store_u32(slot * 64 + 56, u32::from_be(conn.a.qp.number())).unwrap();
            let code = [0, 2, 13, 14][rng.below(4) as usize];
            let tail = [rng.next_u64() as u8, rng.next_u64() as u8, 0, code << 4];
            bytes.store_u32(slot * 64 + 60, u32::from_ne_bytes(tail)).unwrap();
        }
        let mut done = [Completion::EMPTY; 16];
        for id in 0..20 {
            let _ = conn.a.qp.post_send(&[SendRequest::new(id, WrOp::Nop)]);
            let _ = cq.poll(&mut done).unwrap();
            cq.arm(id % 2 == 0).unwrap();
            bytes.store_u32(bytes.len() - 64, rng.next_u64() as u32).unwrap();
        }
        drop(conn);
        testbed.check_traffic(&bystander);
    });
}

/// Threads keep changing a queue, its doorbell record and its doorbell while the engine reads them.
fn queues_that_change_while_they_are_read(fixture: &Fixture) {
    let garbage = GarbageTest::new(fixture, options().with_poll_doorbell(true));
    let stop = std::sync::atomic::AtomicBool::new(false);
    let scribble = |qp: &Qp, seed: u64| {
        let mut rng = Rng::new(seed);
        let (memory, layout) = qp.queues().unwrap();
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
        for (n, test_qp) in [&garbage.victim.a, &garbage.victim.b].into_iter().enumerate() {
            scope.spawn(move || scribble(&test_qp.qp, n as u64));
        }
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(500) {
            garbage.drain();
            for test_qp in [&garbage.victim.a, &garbage.victim.b] {
                test_qp.qp.modify(&QpAttributes::new(State::Reset)).unwrap();
            }
            connect(&garbage.victim.a.qp, &garbage.victim.b.qp);
            garbage.testbed.check_traffic(&garbage.bystander);
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
    for secret in &garbage.secret {
        same(&secret.read(0, 4096), &[0; 4096], "memory of another domain");
    }
    garbage.testbed.check_traffic(&garbage.bystander);
}

/// Random bytes in the send queue of a UD queue pair.
fn random_datagram_wqes(fixture: &Fixture) {
    let ud_pair = UdPair::new(fixture);
    let peer = address(&ud_pair.testbed.b);
    for_each_seed(seeds(1500), |seed| {
        let mut rng = Rng::new(seed);
        let mut entry = vec![0; 64 * (1 + rng.below(3) as usize)];
        entry.iter_mut().for_each(|byte| *byte = rng.next_u64() as u8);
        entry[1..3].copy_from_slice(&[0, 0]);
        let codes = [0, 8, 0xa, 0xa, 0xa, 0xb, 0xb, 0xf, 0x10, 0x23];
        entry[3] = codes[rng.below(codes.len() as u64) as usize];
        entry[7] = 1 + rng.below(entry.len() as u64 / 16) as u8;
        if rng.below(2) == 0 {
            let valid = AddressVector::new(peer, ud_pair.b.qp.number(), QKEY);
            entry[16..64].copy_from_slice(&valid.encode());
        }
        ud_pair.receive(1, 0, 4096);
        datagrams::put(&ud_pair, 0, &entry);
        (0..6).for_each(|_| ud_pair.testbed.step());
        [&ud_pair.a, &ud_pair.b].into_iter().for_each(reset);
        if seed % 10 == 0 {
            ud_pair.check_traffic();
            reset(&ud_pair.a);
        }
    });
}
