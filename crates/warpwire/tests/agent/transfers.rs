//! Writes and reads: lengths, lists, places, queue pairs and devices.

use testkit::{Effort, Rng, cases, for_each_seed};
use warpwire::agent::{Agent, Descriptor, TransferOp, TransferState};
use warpwire::verbs::{Access, LinkChoice};

use crate::agent::fixture::{Block, Fixture, PLACES, Place, limit, only, same};

cases!(Fixture; CASES:
    every_length_in_every_place,
    random_lists,
    neighbours_are_merged,
    many_descriptors,
    several_queue_pairs_and_devices,
    several_engines,
    one_list_many_times,
    an_agent_is_its_own_peer,
    memory_by_address,
    transfers_are_futures,
    the_descriptor_tells_of_the_end;
    full: a_long_list_of_long_ranges,
);

/// Posts one range and waits.
fn transfer(agent: &Agent, op: TransferOp, lists: (&[Descriptor], &[Descriptor]), to: &Agent) {
    let peer = agent.add_peer(&to.metadata().unwrap()).unwrap();
    let prepared = agent.prepare(&peer, lists.0, lists.1).unwrap();
    agent.post(op, &prepared, None).unwrap().wait(limit()).unwrap();
}

fn every_length_in_every_place(fixture: &Fixture) {
    const LEN: u64 = 300_000;
    let (alice, bob) = fixture.pair();
    for (here, there) in PLACES.into_iter().flat_map(|here| PLACES.map(|there| (here, there))) {
        let near = fixture.block(&alice, here, LEN);
        let far = fixture.block(&bob, there, LEN);
        let (mut near_bytes, mut far_bytes) = (near.fill(1), far.fill(2));
        for (number, len) in [0, 1, 7, 64, 4095, 16_384, 70_000, LEN - 9].into_iter().enumerate() {
            let (at, len) = (number, len as usize);
            let lists = (near.range(at as u64, len as u64), far.range(9, len as u64));
            transfer(&alice, TransferOp::Write, (&[lists.0], &[lists.1]), &bob);
            far_bytes[9..9 + len].copy_from_slice(&near_bytes[at..at + len]);
            same(&far.read(0, LEN as usize), &far_bytes, "a write");
            far_bytes = far.fill(len as u64 + 3);
            transfer(&alice, TransferOp::Read, (&[lists.0], &[lists.1]), &bob);
            near_bytes[at..at + len].copy_from_slice(&far_bytes[9..9 + len]);
            same(&near.read(0, LEN as usize), &near_bytes, "a read");
        }
    }
}

/// Lists of random ranges in several registrations, which do not overlap in the target.
fn random_lists(fixture: &Fixture) {
    const LEN: u64 = 40_000;
    let seeds = Effort::pick("WARPWIRE_AGENT_SEEDS", [6, 20, 200]);
    let (alice, bob) = fixture.pair();
    let places = [Place::Host, Place::Device, Place::Host];
    let blocks = |agent: &Agent| places.map(|place| fixture.block(agent, place, LEN));
    let (near, far) = (blocks(&alice), blocks(&bob));
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    for_each_seed(0..seeds, |seed| {
        let mut rng = Rng::new(seed);
        let op = [TransferOp::Write, TransferOp::Read][rng.below(2) as usize];
        let sides = [&near, &far];
        let (from, to) = match op {
            TransferOp::Write => (sides[0], sides[1]),
            TransferOp::Read => (sides[1], sides[0]),
        };
        let sources: Vec<_> = from.iter().map(|block| block.fill(rng.next_u64())).collect();
        let mut targets: Vec<_> = to.iter().map(|block| block.fill(rng.next_u64())).collect();
        let (mut list, mut their_list) = (Vec::new(), Vec::new());
        let mut at = [0_u64; 3];
        for _ in 0..rng.below(300) {
            let (source, target) = (rng.below(3) as usize, rng.below(3) as usize);
            let len = [rng.below(100), rng.below(3000)][rng.below(2) as usize];
            let start = at[target] + rng.below(50);
            if start + len > LEN {
                continue;
            }
            at[target] = start + len;
            let offset = rng.below(LEN - len);
            list.push(from[source].range(offset, len));
            their_list.push(to[target].range(start, len));
            let (offset, start, len) = (offset as usize, start as usize, len as usize);
            let bytes = &sources[source][offset..offset + len];
            targets[target][start..start + len].copy_from_slice(bytes);
        }
        let prepared = match op {
            TransferOp::Write => alice.prepare(&peer, &list, &their_list),
            TransferOp::Read => alice.prepare(&peer, &their_list, &list),
        };
        alice.post(op, &prepared.unwrap(), None).unwrap().wait(limit()).unwrap();
        for (block, wanted) in to.iter().zip(&targets) {
            same(&block.read(0, LEN as usize), wanted, "the target of a list");
        }
    });
}

fn neighbours_are_merged(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let (near, far) =
        (fixture.block(&alice, Place::Host, 1 << 20), fixture.block(&bob, Place::Host, 1 << 20));
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    let ranges = |block: &Block, step: u64| -> Vec<_> {
        (0..100).map(|at| block.range(at * step, 100)).collect()
    };
    let requests = |here: u64, there: u64| {
        let lists = (ranges(&near, here), ranges(&far, there));
        let prepared = alice.prepare(&peer, &lists.0, &lists.1).unwrap();
        assert_eq!(prepared.bytes(), 10_000);
        prepared.work_requests()
    };
    assert_eq!(requests(100, 100), 1);
    assert_eq!(requests(100, 101), 100);
    assert_eq!(requests(101, 100), 100);
}

/// More descriptors than any queue has entries.
fn many_descriptors(fixture: &Fixture) {
    let count = Effort::pick("WARPWIRE_AGENT_DESCRIPTORS", [10_000, 100_000, 400_000]);
    let (alice, bob) = fixture.pair();
    let (near, far) = (
        fixture.block(&alice, Place::Host, count * 16),
        fixture.block(&bob, Place::Host, count * 24),
    );
    let (source, mut wanted) = (near.fill(1), far.fill(2));
    let list: Vec<_> = (0..count).map(|at| near.range(at * 16, 16)).collect();
    let their_list: Vec<_> = (0..count).map(|at| far.range((count - 1 - at) * 24, 16)).collect();
    for at in 0..count as usize {
        let to = (count as usize - 1 - at) * 24;
        wanted[to..to + 16].copy_from_slice(&source[at * 16..at * 16 + 16]);
    }
    transfer(&alice, TransferOp::Write, (&list, &their_list), &bob);
    same(&far.read(0, wanted.len()), &wanted, "many writes");
    near.fill(3);
    transfer(&alice, TransferOp::Read, (&list, &their_list), &bob);
    same(&near.read(0, source.len()), &source, "many reads");
}

fn several_queue_pairs_and_devices(fixture: &Fixture) {
    const LEN: u64 = 5_000_000;
    for (rails, queue_pairs) in [(1, 3), (2, 1), (2, 2)] {
        let open = |name: &str| {
            Agent::open(name, fixture.options(rails).with_queue_pairs(queue_pairs)).unwrap()
        };
        let (alice, bob) = (open("alice"), open("bob"));
        let near = fixture.block(&alice, Place::Host, LEN);
        let far = fixture.block(&bob, Place::Host, LEN);
        let wanted = near.fill(4);
        let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
        let lists = ([near.range(0, LEN)], [far.range(0, LEN)]);
        let prepared = alice.prepare(&peer, &lists.0, &lists.1).unwrap();
        assert!(prepared.work_requests() >= rails * queue_pairs, "{prepared:?}");
        let sent = alice.post(TransferOp::Write, &prepared, Some(b"all of it")).unwrap();
        let notification = bob.wait_notification(limit()).unwrap().unwrap();
        assert_eq!(notification.bytes(), b"all of it");
        same(&far.read(0, LEN as usize), &wanted, "a write by several queue pairs");
        sent.wait(limit()).unwrap();
        assert_eq!(peer.path().len(), rails * queue_pairs);
    }
    // Other devices than the peer's.
    let (alice, bob) = (fixture.agent("alice"), Agent::open("bob", fixture.options(2)).unwrap());
    let error = alice.add_peer(&bob.metadata().unwrap()).unwrap_err();
    assert!(error.to_string().contains("as many rails"), "{error}");
}

fn one_list_many_times(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let near = fixture.block(&alice, Place::Host, 4096);
    let far = fixture.block(&bob, Place::Host, 4096);
    let wanted = near.fill(1);
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    let lists = ([near.range(0, 4096)], [only(&peer).range(0, 4096).unwrap()]);
    let prepared = alice.prepare(&peer, &lists.0, &lists.1).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let post = |_| alice.post(TransferOp::Write, &prepared, None).unwrap();
                let posted: Vec<_> = (0..400).map(post).collect();
                posted.iter().for_each(|transfer| transfer.wait(limit()).unwrap());
            });
        }
    });
    same(&far.read(0, 4096), &wanted, "what was written often");
}

fn an_agent_is_its_own_peer(fixture: &Fixture) {
    let alice = fixture.agent("alice");
    let (one, two) =
        (fixture.block(&alice, Place::Host, 9000), fixture.block(&alice, Place::Device, 9000));
    let wanted = one.fill(1);
    let lists = ([one.range(0, 9000)], [two.range(0, 9000)]);
    transfer(&alice, TransferOp::Write, (&lists.0, &lists.1), &alice);
    same(&two.read(0, 9000), &wanted, "a write to itself");
}

/// Each engine is a device of its own, with its thread and port.
fn several_engines(fixture: &Fixture) {
    let options = fixture.options(1);
    if !options.rails.is_empty() || matches!(options.link, LinkChoice::Device(_)) {
        return; // devices that were opened before, or have engines of their own
    }
    let open = |name, engines| Agent::open(name, fixture.options(1).with_engines(engines));
    let (alice, bob) = (open("alice", 3).unwrap(), open("bob", 3).unwrap());
    let len = 5 << 20;
    let [near, far] = [&alice, &bob].map(|agent| fixture.block(agent, Place::Host, len));
    let wanted = near.fill(21);
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    let prepared = alice.prepare(&peer, &[near.range(0, len)], &[far.range(0, len)]).unwrap();
    for op in [TransferOp::Write, TransferOp::Read] {
        alice.post(op, &prepared, None).unwrap().wait(limit()).unwrap();
    }
    same(&far.read(0, len as usize), &wanted, "written by three engines");
    let mut paths = alice.path();
    paths.sort();
    paths.dedup();
    assert_eq!((paths.len(), peer.path().len()), (3, 3), "{paths:?}");
    let one = open("one", 1).unwrap();
    let error = one.add_peer(&bob.metadata().unwrap()).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("engines"), "{error}");
    for wrong in [0, 17] {
        let refused = open("wrong", wrong).map(|_| ()).unwrap_err();
        assert!(refused.to_string().contains("1 to 16"), "{refused}");
    }
}

#[allow(unsafe_code)]
fn memory_by_address(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let (near, mut far) = (vec![7_u8; 50_000], vec![0_u8; 50_000]);
    let (from, to) = (near.as_ptr() as u64, far.as_mut_ptr() as u64);
    // SAFETY: the vectors outlive the registrations, and are not accessed until those have ended.
    let [here, there] = unsafe {
        [
            alice.register_address(from, 50_000, Access::ALL).unwrap(),
            bob.register_address(to, 50_000, Access::ALL).unwrap(),
        ]
    };
    assert_eq!((here.address(), here.len(), here.kind()), (from, 50_000, "host"));
    let lists = ([here.range(0, 50_000).unwrap()], [there.range(0, 50_000).unwrap()]);
    transfer(&alice, TransferOp::Write, (&lists.0, &lists.1), &bob);
    here.deregister().unwrap();
    there.deregister().unwrap();
    assert!(far == near);
    // SAFETY: nothing is registered.
    assert!(unsafe { alice.register_address(from, 0, Access::ALL) }.is_err());
}

fn transfers_are_futures(fixture: &Fixture) {
    struct Unpark(std::thread::Thread);
    impl std::task::Wake for Unpark {
        fn wake(self: std::sync::Arc<Self>) {
            self.0.unpark();
        }
    }
    let (alice, bob) = fixture.pair();
    let near = fixture.block(&alice, Place::Host, 1 << 20);
    let far = fixture.block(&bob, Place::Host, 1 << 20);
    let wanted = near.fill(1);
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    let lists = ([near.range(0, 1 << 20)], [far.range(0, 1 << 20)]);
    let prepared = alice.prepare(&peer, &lists.0, &lists.1).unwrap();
    for _ in 0..20 {
        let mut future = std::pin::pin!(alice.post(TransferOp::Write, &prepared, None).unwrap());
        let waker = std::sync::Arc::new(Unpark(std::thread::current())).into();
        let mut task = std::task::Context::from_waker(&waker);
        let start = std::time::Instant::now();
        while future.as_mut().poll(&mut task).is_pending() {
            std::thread::park_timeout(limit());
            assert!(start.elapsed() < limit(), "nothing woke the task");
        }
        assert!(matches!(future.state(), TransferState::Done));
    }
    same(&far.read(0, 1 << 20), &wanted, "what a future has written");
}

fn the_descriptor_tells_of_the_end(fixture: &Fixture) {
    use rustix::event::{PollFd, PollFlags, poll};
    let readable = |agent: &Agent, timeout: std::time::Duration| {
        let timeout = rustix::event::Timespec {
            tv_sec: timeout.as_secs() as i64,
            tv_nsec: timeout.subsec_nanos().into(),
        };
        poll(&mut [PollFd::new(agent, PollFlags::IN)], Some(&timeout)).unwrap() > 0
    };
    let (alice, bob) = fixture.pair();
    let near = fixture.block(&alice, Place::Host, 64);
    let far = fixture.block(&bob, Place::Host, 64);
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    let prepared = alice.prepare(&peer, &[near.range(0, 64)], &[far.range(0, 64)]).unwrap();
    assert!(!readable(&bob, std::time::Duration::ZERO) && !bob.clear_events());
    for round in 0..20_u8 {
        let sent = alice.post(TransferOp::Write, &prepared, Some(&[round])).unwrap();
        assert!(readable(&alice, limit()), "the transfer has not ended");
        assert!(alice.clear_events() && sent.is_ended());
        assert!(readable(&bob, limit()), "no notification");
        bob.clear_events();
        assert_eq!(bob.next_notification().unwrap().bytes(), [round]);
        assert!(bob.next_notification().is_none());
    }
}

/// More than can be posted at a time, in length and number.
fn a_long_list_of_long_ranges(fixture: &Fixture) {
    const LEN: u64 = 200 << 20;
    let (alice, bob) = fixture.pair();
    let near = fixture.block(&alice, Place::Host, LEN);
    let far = fixture.block(&bob, Place::Host, LEN);
    let wanted = near.fill(1);
    let lists = ([near.range(0, LEN)], [far.range(0, LEN)]);
    transfer(&alice, TransferOp::Write, (&lists.0, &lists.1), &bob);
    assert!(far.read(0, LEN as usize) == wanted);
}
