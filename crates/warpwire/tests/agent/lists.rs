//! Lists of device memory, which a GPU executes as one work request where the peer's is mapped.

use testkit::{Rng, cases, until};
use warpwire::agent::{Agent, AgentOptions, Descriptor, PreparedTransfer, Transfer, TransferOp};
use warpwire::error::Kind;
use warpwire::verbs::Context;

use crate::agent::fixture::{Block, Fixture, Place, TestLink, limit, same};

cases!(Fixture; CASES:
    lists_are_one_work_request,
    the_first_list_waits_for_mapped_memory,
    lists_of_many_registrations,
    lists_in_flight_keep_their_order,
    more_lists_than_fit,
    a_list_into_memory_that_was_deregistered,
);

const OPS: [TransferOp; 2] = [TransferOp::Write, TransferOp::Read];

/// Two agents, and the first one's device.
fn pair(fixture: &Fixture) -> (Agent, Agent, Context) {
    let options = fixture.options(2);
    let context = options.rails[0].clone();
    let one = |options: AgentOptions| {
        let rail = options.rails[0].clone();
        options.with_rails(vec![rail])
    };
    let alice = Agent::open("alice", one(options)).unwrap();
    (alice, Agent::open("bob", one(fixture.options(2))).unwrap(), context)
}

/// Whether the peer's device memory is mapped on this link.
fn is_mapped(fixture: &Fixture) -> bool {
    matches!(fixture.test_link, TestLink::Shm | TestLink::Auto)
}

fn direct_operations(context: &Context) -> (u64, u64) {
    let direct = context.stats().unwrap().direct;
    (direct.operations, direct.bytes)
}

/// Transfers a list until it is one operation; the first times, memory is being mapped.
fn until_one_operation(alice: &Agent, context: &Context, prepared: &PreparedTransfer) {
    for op in OPS {
        until("a list is one operation", || {
            let before = direct_operations(context);
            alice.post(op, prepared, None).unwrap().wait(limit()).unwrap();
            let after = direct_operations(context);
            after == (before.0 + 1, before.1 + prepared.bytes())
        });
    }
}

/// Ranges of many lengths that cover `len` bytes, in another order at the target.
fn shuffled(rng: &mut Rng, (near, far): (&Block, &Block), len: u64) -> Vec<[Descriptor; 2]> {
    let (mut lens, mut left) = (Vec::new(), len);
    while left > 0 {
        let limit = if rng.below(8) == 0 { 40_000 } else { 300 };
        let len = (1 + rng.below(limit)).min(left);
        lens.push(len);
        left -= len;
    }
    let mut end = 0;
    let starts = lens.iter().map(|len| {
        end += len;
        end - len
    });
    let starts: Vec<u64> = starts.collect();
    let mut order: Vec<usize> = (0..lens.len()).collect();
    for last in (1..order.len()).rev() {
        order.swap(last, rng.below(last as u64 + 1) as usize);
    }
    let (mut there, mut pairs) = (0, Vec::new());
    for index in order {
        let len = lens[index];
        pairs.push([near.range(starts[index], len), far.range(there, len)]);
        there += len;
    }
    pairs
}

fn prepare(alice: &Agent, bob: &Agent, pairs: &[[Descriptor; 2]]) -> PreparedTransfer {
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    let [near, far] = [0, 1].map(|at| pairs.iter().map(|pair| pair[at]).collect::<Vec<_>>());
    alice.prepare(&peer, &near, &far).unwrap()
}

/// The bytes of the target after the pairs were moved.
fn moved(source: &[u8], pairs: &[[Descriptor; 2]], near: &Block, far: &Block) -> Vec<u8> {
    let mut target = vec![0; far.memory.len() as usize];
    for [from, to] in pairs {
        let at =
            |range: &Descriptor, block: &Block| (range.address - block.memory.address()) as usize;
        let (from_at, to_at, len) = (at(from, near), at(to, far), from.len as usize);
        target[to_at..to_at + len].copy_from_slice(&source[from_at..from_at + len]);
    }
    target
}

fn lists_are_one_work_request(fixture: &Fixture) {
    const LEN: u64 = 2_000_003;
    let (alice, bob, context) = pair(fixture);
    let near = fixture.block(&alice, Place::Device, LEN);
    let far = fixture.block(&bob, Place::Device, LEN);
    for seed in 0..3 {
        let pairs = shuffled(&mut Rng::new(seed), (&near, &far), LEN);
        let prepared = prepare(&alice, &bob, &pairs);
        if is_mapped(fixture) {
            until_one_operation(&alice, &context, &prepared);
        }
        let source = near.fill(seed + 10);
        far.fill(99);
        alice.post(TransferOp::Write, &prepared, None).unwrap().wait(limit()).unwrap();
        let wanted = moved(&source, &pairs, &near, &far);
        same(&far.read(0, LEN as usize), &wanted, "a written list");
        near.fill(98);
        alice.post(TransferOp::Read, &prepared, None).unwrap().wait(limit()).unwrap();
        same(&near.read(0, LEN as usize), &source, "a list that was read");
    }
}

/// A long list is one operation from the first time on, unless mapping takes too long; a short one
/// does not wait.
fn the_first_list_waits_for_mapped_memory(fixture: &Fixture) {
    const LEN: u64 = 1 << 20;
    until("the first list is one operation", || {
        let (alice, bob, context) = pair(fixture);
        let near = fixture.block(&alice, Place::Device, LEN);
        let far = fixture.block(&bob, Place::Device, LEN);
        let pairs = shuffled(&mut Rng::new(1), (&near, &far), LEN);
        let prepared = prepare(&alice, &bob, &pairs);
        let source = near.fill(2);
        let posted = alice.post(TransferOp::Write, &prepared, Some(b"all")).unwrap();
        assert_eq!(bob.wait_notification(limit()).unwrap().unwrap().bytes(), b"all");
        posted.wait(limit()).unwrap();
        let wanted = moved(&source, &pairs, &near, &far);
        same(&far.read(0, LEN as usize), &wanted, "the first list");
        !is_mapped(fixture) || direct_operations(&context) == (1, LEN)
    });
    // One that is cancelled while it waits ends; those behind it go on.
    let (alice, bob, _) = pair(fixture);
    let near = fixture.block(&alice, Place::Device, LEN);
    let far = fixture.block(&bob, Place::Device, LEN);
    let pairs = shuffled(&mut Rng::new(2), (&near, &far), LEN);
    let prepared = prepare(&alice, &bob, &pairs);
    let first = alice.post(TransferOp::Write, &prepared, None).unwrap();
    let second = alice.post(TransferOp::Write, &prepared, Some(b"second")).unwrap();
    first.cancel();
    second.wait(limit()).unwrap();
    assert_eq!(bob.wait_notification(limit()).unwrap().unwrap().bytes(), b"second");
    if let Err(error) = first.wait(limit()) {
        assert_eq!(error.kind(), &Kind::Cancelled, "{error}");
    }
}

/// Up to 16 registrations are one list; more are posted range by range.
fn lists_of_many_registrations(fixture: &Fixture) {
    for count in [3, 16, 17] {
        let (alice, bob, context) = pair(fixture);
        let blocks = |agent: &Agent| -> Vec<Block> {
            (0..count).map(|_| fixture.block(agent, Place::Device, 40_000)).collect()
        };
        let (near, far) = (blocks(&alice), blocks(&bob));
        let mut pairs = Vec::new();
        for (at, near) in near.iter().enumerate() {
            let far = &far[(at * 5 + 1) % count];
            pairs.extend((0..5).map(|part| {
                let offset = part * 8000;
                [near.range(offset, 7000), far.range(offset + 1000, 7000)]
            }));
        }
        let prepared = prepare(&alice, &bob, &pairs);
        if is_mapped(fixture) && count <= 16 {
            until_one_operation(&alice, &context, &prepared);
        }
        let sources: Vec<_> = near.iter().zip(1..).map(|(block, seed)| block.fill(seed)).collect();
        alice.post(TransferOp::Write, &prepared, None).unwrap().wait(limit()).unwrap();
        for (at, source) in sources.iter().enumerate() {
            let to = (at * 5 + 1) % count;
            for part in 0..5 {
                let offset = part * 8000;
                let found = far[to].read(offset as u64 + 1000, 7000);
                same(&found, &source[offset..offset + 7000], "a list of many registrations");
            }
        }
    }
}

/// Each list moves what the one before it has written; the last one's notification comes last.
fn lists_in_flight_keep_their_order(fixture: &Fixture) {
    const PART: u64 = 30_000;
    const STEPS: u64 = 8;
    let (alice, bob, context) = pair(fixture);
    let near = fixture.block(&alice, Place::Device, PART);
    let far = fixture.block(&bob, Place::Device, PART * STEPS);
    let list = |at: u64| -> Vec<[Descriptor; 2]> {
        let len = PART / 6;
        (0..6).map(|i| [near.range(i * len, len), far.range(at * PART + i * len, len)]).collect()
    };
    // Neighbours would be merged.
    let gaps = |at| list(at).into_iter().rev().collect::<Vec<_>>();
    let prepared: Vec<_> = (0..STEPS).map(|at| prepare(&alice, &bob, &gaps(at))).collect();
    if is_mapped(fixture) {
        until_one_operation(&alice, &context, &prepared[0]);
    }
    for round in 0..20 {
        far.fill(round);
        let first = near.fill(round + 1000);
        let mut posted: Vec<Transfer> = Vec::new();
        for (at, list) in prepared.iter().enumerate() {
            posted.push(alice.post(TransferOp::Write, list, None).unwrap());
            let text = format!("{round} {at}");
            posted.push(alice.post(TransferOp::Read, list, Some(text.as_bytes())).unwrap());
        }
        for at in 0..STEPS {
            let notification = bob.wait_notification(limit()).unwrap().unwrap();
            assert_eq!(notification.bytes(), format!("{round} {at}").as_bytes());
        }
        posted.iter().for_each(|transfer| transfer.wait(limit()).unwrap());
        let wanted = first.repeat(STEPS as usize);
        same(&far.read(0, wanted.len()), &wanted, "lists in a row");
        same(&near.read(0, first.len()), &first, "what was read back");
    }
}

/// More descriptors than the ring of a GPU's queue holds, in several transfers and in one.
fn more_lists_than_fit(fixture: &Fixture) {
    let count = if is_mapped(fixture) { 150_000 } else { 5_000 };
    let (alice, bob, context) = pair(fixture);
    let near = fixture.block(&alice, Place::Device, count * 8);
    let far = fixture.block(&bob, Place::Device, count * 8);
    let pairs: Vec<_> =
        (0..count).map(|at| [near.range(at * 8, 8), far.range((count - 1 - at) * 8, 8)]).collect();
    let prepared = prepare(&alice, &bob, &pairs);
    if is_mapped(fixture) {
        until("a long list is two operations", || {
            let before = direct_operations(&context).0;
            alice.post(TransferOp::Write, &prepared, None).unwrap().wait(limit()).unwrap();
            direct_operations(&context).0 == before + 2
        });
    }
    let source = near.fill(5);
    far.fill(6);
    let posted: Vec<_> =
        (0..4).map(|_| alice.post(TransferOp::Write, &prepared, None).unwrap()).collect();
    posted.iter().for_each(|transfer| transfer.wait(limit()).unwrap());
    let wanted = moved(&source, &pairs, &near, &far);
    same(&far.read(0, wanted.len()), &wanted, "several long lists");
}

/// It fails alone, with the cause.
fn a_list_into_memory_that_was_deregistered(fixture: &Fixture) {
    const LEN: u64 = 100_000;
    let (alice, bob, context) = pair(fixture);
    let near = fixture.block(&alice, Place::Device, LEN);
    let far = fixture.block(&bob, Place::Device, LEN);
    for op in OPS {
        let gone = fixture.block(&bob, Place::Device, LEN);
        let mut rng = Rng::new(3);
        let good_pairs = shuffled(&mut rng, (&near, &far), LEN);
        let good = prepare(&alice, &bob, &good_pairs);
        let bad = prepare(&alice, &bob, &shuffled(&mut rng, (&near, &gone), LEN));
        if is_mapped(fixture) {
            until_one_operation(&alice, &context, &good);
            until_one_operation(&alice, &context, &bad);
        }
        let source = near.fill(7);
        far.fill(8);
        drop(gone);
        let before = alice.post(TransferOp::Write, &good, None).unwrap();
        let failing = alice.post(op, &bad, Some(b"never")).unwrap();
        let behind = alice.post(TransferOp::Write, &good, Some(b"behind")).unwrap();
        let error = failing.wait(limit()).unwrap_err();
        assert_eq!(error.kind(), &Kind::Stale, "{error}");
        before.wait(limit()).unwrap();
        behind.wait(limit()).unwrap();
        assert_eq!(bob.wait_notification(limit()).unwrap().unwrap().bytes(), b"behind");
        let wanted = moved(&source, &good_pairs, &near, &far);
        same(&far.read(0, wanted.len()), &wanted, "what the others wrote");
    }
}
