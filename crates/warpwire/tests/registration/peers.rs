//! Memory that its client copies itself, under traffic: here, away for a while, gone, taken back.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use warpwire::error::Kind;
use warpwire::mlx5;
use warpwire::mr::{Denied, End as Ended, Invalidate, PeerClient, PeerPages, Persistence, Reach};
use warpwire::verbs::{Access, Atomic, Memory, Mr, Op, QpOptions, ReceiveRequest, Request, Status};
use warpwire::{Error, Result};

use parking_lot::Mutex;

use crate::registration::stage::{Buffer, Reached, Sort, Stage};
use crate::verbs::fixture::{End, Joined, Rng, World, connect, same};
use testkit::cases;

cases!(Stage; CASES:
    traffic_with_memory_of_a_client,
    memory_that_is_away_for_a_while,
    memory_that_goes_away_in_the_middle,
    memory_that_is_denied_bad_flow,
    memory_that_goes_between_the_look_and_the_copy,
    memory_taken_back_under_traffic_bad_flow,
);

const BASE: u64 = 0xbeef_0000_0000_0000;
const LEN: usize = 1 << 18;

/// A client with one piece of memory.
struct Remote {
    memory: Arc<dyn Reach>,
    handles: Mutex<Vec<Invalidate>>,
}

struct Pages(Arc<Remote>, u64, u64);

impl PeerClient for Remote {
    fn name(&self) -> &str {
        "remote"
    }

    fn persistence(&self) -> Persistence {
        Persistence::Invalidates
    }

    fn acquire(self: Arc<Self>, address: u64, len: u64) -> Result<Box<dyn PeerPages>> {
        let offset = address.wrapping_sub(BASE);
        if offset.checked_add(len).is_none_or(|end| end > LEN as u64) {
            return Err(Error::new(Kind::NotDeviceMemory, "find it").why("not of this client"));
        }
        assert_eq!(offset, 0, "the cases register all of it");
        Ok(Box::new(Pages(self, address, len)))
    }
}

impl PeerPages for Pages {
    fn page_size(&self) -> u64 {
        4096
    }

    fn get_pages(&self, _: bool, invalidate: Invalidate) -> Result<()> {
        self.0.handles.lock().push(invalidate);
        Ok(())
    }

    fn dma_map(&self, _: &str) -> Result<Memory> {
        Ok(Memory::reached_by(self.0.memory.clone(), self.1, self.2))
    }

    fn dma_unmap(&self, _: &str) {}

    fn put_pages(&self, _: Ended) {}
}

fn offer(end: &End, memory: Arc<dyn Reach>) -> (Mr, Arc<Remote>) {
    let client = Arc::new(Remote { memory, handles: Mutex::default() });
    end.context.add_client(client.clone());
    // SAFETY: the client keeps its memory, and copies it under a lock.
    let mr = unsafe { end.context.register_address(&end.pd, BASE, LEN as u64, None, Access::ALL) };
    (mr.unwrap(), client)
}

fn traffic_with_memory_of_a_client(stage: &Stage) {
    for slow in [false, true] {
        let world = stage.fixture.world();
        let joined = world.join(QpOptions::default());
        let (near, far) = (Reached::new(LEN, slow), Reached::new(LEN, slow));
        let (near_mr, _one) = offer(&world.a, near.clone());
        let (far_mr, _two) = offer(&world.b, far.clone());
        let mut wanted = vec![0; 100_001];
        warpwire_apps::pattern::fill_bytes(&mut wanted, 77, 0);
        near.set(3, &wanted);
        let (from, back) = ([near_mr.sge(3, 100_001)], [near_mr.sge(120_005, 100_001)]);
        let room = [far_mr.sge(120_001, 100_001)];
        joined.b.qp.post_receive(&[ReceiveRequest { id: 9, data: &room }]).unwrap();
        let word = [near_mr.sge(255_000, 8)];
        let add = Op::Atomic(far_mr.remote(256_000), Atomic::FetchAdd { add: 9 });
        let odd = Op::Atomic(far_mr.remote(256_001), Atomic::FetchAdd { add: 9 });
        let work = [
            Request::new(1, Op::Write(far_mr.remote(7))).with(&from),
            Request::new(2, Op::Read(far_mr.remote(7))).with(&back),
            Request::new(3, Op::Send).with(&from),
            Request::new(4, add).with(&word),
            Request::new(5, odd).with(&word),
        ];
        joined.a.qp.post_send(&work).unwrap();
        (1..=4).for_each(|id| {
            world.done(&joined.a.sends, id);
        });
        // A word that is not aligned is no request.
        let odd = world.next(&joined.a.sends);
        assert!(!odd.is_success(), "{odd:?}");
        world.done(&joined.b.receives, 9);
        same(&far.get(7, 100_001), &wanted, "a write");
        same(&near.get(120_005, 100_001), &wanted, "a read");
        same(&far.get(120_001, 100_001), &wanted, "a message");
        assert_eq!(far.get(256_000, 8), 9u64.to_ne_bytes());
        assert_eq!(far.get(0, 7), [0; 7]);
    }
}

/// Longer than all tries together: the requester pauses, the responder parks the sender, and nothing is lost.
fn memory_that_is_away_for_a_while(stage: &Stage) {
    // Tries for 14 ms in all.
    let options = QpOptions { timeout: 9, retry_count: 6, ..QpOptions::default() };
    for (near_goes, far_goes) in [(true, false), (false, true), (true, true)] {
        let world = stage.fixture.world();
        let joined = world.join(options.clone());
        let bystander = world.join(options.clone());
        let (near, far) = (Reached::new(LEN, false), Reached::new(LEN, false));
        let (near_mr, _one) = offer(&world.a, near.clone());
        let (far_mr, _two) = offer(&world.b, far.clone());
        let mut wanted = vec![0; 50_000];
        warpwire_apps::pattern::fill_bytes(&mut wanted, 5, 0);
        near.set(0, &wanted);
        let (from, back, word) =
            ([near_mr.sge(0, 50_000)], [near_mr.sge(60_000, 50_000)], [near_mr.sge(255_000, 8)]);
        let room = [far_mr.sge(120_000, 50_000)];
        let add = Op::Atomic(far_mr.remote(256_000), Atomic::FetchAdd { add: 3 });
        let work = [
            Request::new(1, Op::Write(far_mr.remote(0))).with(&from),
            Request::new(2, add).with(&word),
            Request::new(3, Op::Read(far_mr.remote(0))).with(&back),
            Request::new(4, Op::Send).with(&from),
            Request::new(5, add).with(&word),
        ];
        for round in 0..4u64 {
            joined.b.qp.post_receive(&[ReceiveRequest { id: 9, data: &room }]).unwrap();
            near.set(60_000, &[0; 50_000]);
            let gone = [(near_goes, &near), (far_goes, &far)];
            let gone = gone.into_iter().filter(|(goes, _)| *goes).map(|(_, memory)| memory);
            gone.clone().for_each(|memory| memory.vanish_for(Duration::from_secs(3600)));
            joined.a.qp.post_send(&work).unwrap();
            // Others go on meanwhile.
            for _ in 0..20 {
                world.works(&bystander);
            }
            world.drive_for(Duration::from_millis(30));
            world.quiet(&joined.a.sends);
            gone.for_each(|memory| memory.vanish_for(Duration::ZERO));
            for id in 1..=5 {
                let done = world.next(&joined.a.sends);
                let stats = [&joined.a, &joined.b].map(|side| side.qp.stats());
                assert!(done.is_success() && done.id == id, "{done:?} {near_goes} {stats:?}");
            }
            world.done(&joined.b.receives, 9);
            same(&far.get(0, 50_000), &wanted, "a write");
            same(&near.get(60_000, 50_000), &wanted, "a read");
            same(&far.get(120_000, 50_000), &wanted, "a message");
            let sum = u64::from_ne_bytes(far.get(256_000, 8).try_into().unwrap());
            assert_eq!(sum, 6 * (round + 1), "each addition once");
        }
    }
}

/// In the middle of a transfer, for longer than all tries together: a read that was granted is parked too.
fn memory_that_goes_away_in_the_middle(stage: &Stage) {
    // Tries for 14 ms in all.
    let options = QpOptions { timeout: 9, retry_count: 6, ..QpOptions::default() };
    for round in 0..24u64 {
        let world = stage.fixture.world();
        let mtu = Some(warpwire::verbs::Mtu::new(1024).unwrap());
        let joined = world.join(QpOptions { mtu, ..options.clone() });
        let (near, far) = (Reached::new(LEN, false), Reached::new(LEN, false));
        let (near_mr, _one) = offer(&world.a, near.clone());
        let (far_mr, _two) = offer(&world.b, far.clone());
        let mut wanted = vec![0; LEN];
        warpwire_apps::pattern::fill_bytes(&mut wanted, round, 0);
        let is_read = round % 2 == 0;
        if is_read {
            far.set(0, &wanted)
        } else {
            near.set(0, &wanted)
        }
        let data = [near_mr.sge(0, LEN as u32)];
        let at = far_mr.remote(0);
        let op = if is_read { Op::Read(at) } else { Op::Write(at) };
        joined.a.qp.post_send(&[Request::new(1, op).with(&data)]).unwrap();
        (0..1 + round / 4).for_each(|_| world.step());
        let goes = if round % 4 < 2 { &far } else { &near };
        goes.vanish_for(Duration::from_millis(40));
        world.done(&joined.a.sends, 1);
        same(&near.get(0, LEN), &wanted, "this end");
        same(&far.get(0, LEN), &wanted, "the other end");
    }
}

/// What does not pass by itself is a protection error of the side whose memory it is.
fn memory_that_is_denied_bad_flow(stage: &Stage) {
    let world = stage.fixture.world();
    let host = [&world.a, &world.b].map(|end| Buffer::new(stage, end, Sort::HostHandle, 4096, 0));
    let (near, far) = (Reached::new(LEN, false), Reached::new(LEN, false));
    let (near_mr, _one) = offer(&world.a, near.clone());
    let (far_mr, _two) = offer(&world.b, far.clone());
    for denied in [Denied::Gone, Denied::Failed, Denied::Rights, Denied::Range] {
        let atomic = Atomic::FetchAdd { add: 1 };
        *far.denied.lock() = Some(denied);
        let plain = [host[0].mr().sge(0, 8)];
        for op in [
            Op::Write(far_mr.remote(0)),
            Op::Read(far_mr.remote(0)),
            Op::Atomic(far_mr.remote(0), atomic),
        ] {
            let joined = world.join(QpOptions::default());
            joined.a.qp.post_send(&[Request::new(1, op).with(&plain)]).unwrap();
            world.failed(&joined.a.sends, 1, Status::RemoteAccess);
        }
        let joined = world.join(QpOptions::default());
        let room = [far_mr.sge(0, 64)];
        joined.b.qp.post_receive(&[ReceiveRequest { id: 2, data: &room }]).unwrap();
        joined.a.qp.post_send(&[Request::new(1, Op::Send).with(&plain)]).unwrap();
        world.failed(&joined.a.sends, 1, Status::RemoteOperation);
        world.failed(&joined.b.receives, 2, Status::LocalProtection);
        *far.denied.lock() = None;
        *near.denied.lock() = Some(denied);
        let own = [near_mr.sge(0, 8)];
        for op in [
            Op::Write(host[1].mr().remote(0)),
            Op::Read(host[1].mr().remote(0)),
            Op::Atomic(host[1].mr().remote(0), atomic),
            Op::Send,
        ] {
            let joined = world.join(QpOptions::default());
            joined.b.qp.post_receive(&[ReceiveRequest { id: 2, data: &[] }]).unwrap();
            joined.a.qp.post_send(&[Request::new(1, op).with(&own)]).unwrap();
            world.failed(&joined.a.sends, 1, Status::LocalProtection);
        }
        *near.denied.lock() = None;
    }
}

/// Memory that is there when it is looked at, and away when it is copied: at every n-th copy.
struct Fickle {
    memory: Arc<Reached>,
    copies: AtomicU64,
    every: u64,
}

impl Fickle {
    fn lapse(&self) -> std::result::Result<(), Denied> {
        match self.copies.fetch_add(1, Ordering::Relaxed) % self.every {
            0 => Err(Denied::Absent),
            _ => Ok(()),
        }
    }
}

impl Reach for Fickle {
    fn check(&self, offset: u64, len: u64, writes: bool) -> std::result::Result<(), Denied> {
        self.memory.check(offset, len, writes)
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> std::result::Result<(), Denied> {
        self.lapse().and_then(|()| self.memory.read(offset, into))
    }

    fn write(&self, offset: u64, from: &[u8]) -> std::result::Result<(), Denied> {
        self.lapse().and_then(|()| self.memory.write(offset, from))
    }

    fn atomic(&self, offset: u64, op: &mlx5::Atomic) -> std::result::Result<u64, Denied> {
        self.lapse().and_then(|()| self.memory.atomic(offset, op))
    }
}

/// That costs no try, and needs no timer: queue pairs that wait for ever and never try again get everything.
fn memory_that_goes_between_the_look_and_the_copy(stage: &Stage) {
    for every in [2, 3, 7] {
        let world = stage.fixture.world();
        let options = QpOptions { timeout: 0, retry_count: 0, ..QpOptions::default() };
        let joined = world.join(options);
        let memories = [Reached::new(LEN, false), Reached::new(LEN, false)];
        let fickle = |n: usize| {
            let memory = memories[n].clone();
            Arc::new(Fickle { memory, copies: AtomicU64::new(0), every })
        };
        let (near_mr, _one) = offer(&world.a, fickle(0));
        let (far_mr, _two) = offer(&world.b, fickle(1));
        let mut wanted = vec![0; 50_000];
        warpwire_apps::pattern::fill_bytes(&mut wanted, every, 0);
        memories[0].set(0, &wanted);
        let (from, back, word) =
            ([near_mr.sge(0, 50_000)], [near_mr.sge(60_000, 50_000)], [near_mr.sge(255_000, 8)]);
        let room = [far_mr.sge(120_000, 50_000)];
        let add = Op::Atomic(far_mr.remote(256_000), Atomic::FetchAdd { add: 3 });
        let work = [
            Request::new(1, Op::Write(far_mr.remote(0))).with(&from),
            Request::new(2, Op::Read(far_mr.remote(0))).with(&back),
            Request::new(3, add).with(&word),
            Request::new(4, Op::Send).with(&from),
        ];
        for round in 1..=5u64 {
            joined.b.qp.post_receive(&[ReceiveRequest { id: 9, data: &room }]).unwrap();
            memories[0].set(60_000, &[0; 50_000]);
            joined.a.qp.post_send(&work).unwrap();
            (1..=4).for_each(|id| {
                world.done(&joined.a.sends, id);
            });
            world.done(&joined.b.receives, 9);
            same(&memories[1].get(0, 50_000), &wanted, "a write");
            same(&memories[0].get(60_000, 50_000), &wanted, "a read");
            same(&memories[1].get(120_000, 50_000), &wanted, "a message");
            let sum = u64::from_ne_bytes(memories[1].get(256_000, 8).try_into().unwrap());
            assert_eq!(sum, 3 * round, "each addition once");
        }
    }
}

/// The client takes its memory back in the middle of transfers, at many places, on either side.
fn memory_taken_back_under_traffic_bad_flow(stage: &Stage) {
    let mut rng = Rng::new(11);
    let mut seen = [0; 2];
    for round in 0..120u64 {
        let world = stage.fixture.world();
        let joined = world.join(QpOptions::default());
        let memory = Reached::new(LEN, false);
        let ours = round % 2 == 0;
        let (mr, client) = offer(if ours { &world.a } else { &world.b }, memory.clone());
        let other_end = if ours { &world.b } else { &world.a };
        let other = Buffer::new(stage, other_end, Sort::HostHandle, LEN as u64, 0);
        let (near, far) = if ours { (&mr, other.mr()) } else { (other.mr(), &mr) };
        let data = [near.sge(0, LEN as u32)];
        let op = match (round / 2) % 2 {
            0 => Op::Write(far.remote(0)),
            _ => Op::Read(far.remote(0)),
        };
        joined.a.qp.post_send(&[Request::new(1, op).with(&data)]).unwrap();
        (0..rng.below(14)).for_each(|_| world.step());
        let handle = client.handles.lock().pop().unwrap();
        handle.invalidate();
        // From now on the memory is the client's alone.
        memory.set(0, &[0xde; LEN]);
        let done = world.next(&joined.a.sends);
        let protection = if ours { Status::LocalProtection } else { Status::RemoteAccess };
        assert!(done.status == protection || done.is_success(), "round {round}: {done:?}");
        seen[usize::from(done.is_success())] += 1;
        assert!(memory.get(0, LEN).iter().all(|byte| *byte == 0xde), "it was written after that");
        assert!(other.read(0, LEN).iter().all(|byte| *byte == 0), "it was read after that");
        revive(&world, &joined);
    }
    assert!(seen.iter().all(|count| *count > 5), "failures and successes: {seen:?}");
}

/// The queue pairs can be used again.
fn revive(world: &World, joined: &Joined) {
    for side in [&joined.a, &joined.b] {
        side.qp.modify(&warpwire::verbs::Change::to(warpwire::verbs::State::Reset)).unwrap();
    }
    connect(&joined.a.qp, &joined.b.qp);
    world.works(joined);
}
