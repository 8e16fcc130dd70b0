//! Transfers that are cancelled, take too long, or use memory that is gone; agents that are closed.

use std::time::{Duration, Instant};

use testkit::{Effort, cases};
use warpwire::agent::{Agent, Peer, PreparedTransfer, Transfer, TransferOp, TransferOptions};
use warpwire::error::Kind;
use warpwire::verbs::Access;

use crate::agent::fixture::{Block, Fixture, Place, limit, same};

cases!(Fixture; CASES:
    memory_that_was_deregistered_fails_one_transfer,
    memory_without_the_right,
    memory_in_use_stays_registered,
    a_transfer_that_is_cancelled,
    a_transfer_that_takes_too_long,
    an_agent_that_is_closed,
    nobody_listens,
);

const LEN: u64 = 16 << 20;

/// One transfer uses a key that is no more; those before and behind it are done all the same.
fn memory_that_was_deregistered_fails_one_transfer(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let near = fixture.block(&alice, Place::Host, 1 << 20);
    let wanted = near.fill(1);
    let far = fixture.block(&bob, Place::Host, 1 << 20);
    for op in [TransferOp::Write, TransferOp::Read] {
        let gone = fixture.block(&bob, Place::Host, 4096);
        let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
        let good = (near.range(0, 1 << 20), far.range(0, 1 << 20));
        let good = alice.prepare(&peer, &[good.0], &[good.1]).unwrap();
        let bad = (near.range(0, 64), gone.range(0, 64));
        let bad = alice.prepare(&peer, &[bad.0], &[bad.1]).unwrap();
        drop(gone);
        for _ in 0..5 {
            far.fill(2);
            let post = |text: &[u8]| alice.post(TransferOp::Write, &good, Some(text)).unwrap();
            let before: Vec<Transfer> = (0..4).map(|_| post(b"before")).collect();
            let failing = alice.post(op, &bad, Some(b"never")).unwrap();
            let behind: Vec<Transfer> = (0..4).map(|_| post(b"behind")).collect();
            let error = failing.wait(limit()).unwrap_err();
            assert_eq!(error.kind(), &Kind::Stale, "{error}");
            assert!(error.to_string().contains("get the peer's metadata again"), "{error}");
            for transfer in before.iter().chain(&behind) {
                transfer.wait(limit()).unwrap();
            }
            same(&far.read(0, 1 << 20), &wanted, "what the others wrote");
            for number in 0..8 {
                let text: &[u8] = if number < 4 { b"before" } else { b"behind" };
                let notification = bob.wait_notification(limit()).unwrap().unwrap();
                assert_eq!(notification.bytes(), text, "{number}");
            }
            assert!(bob.next_notification().is_none());
        }
    }
}

fn memory_without_the_right(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let near = fixture.block(&alice, Place::Host, 64);
    let host = warpwire::mr::HostMemory::new(64).unwrap();
    let readable = bob.register_with(host, Access::REMOTE_READ).unwrap();
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    let lists = ([near.range(0, 64)], [readable.range(0, 64).unwrap()]);
    let prepared = alice.prepare(&peer, &lists.0, &lists.1).unwrap();
    alice.post(TransferOp::Read, &prepared, None).unwrap().wait(limit()).unwrap();
    let write = alice.post(TransferOp::Write, &prepared, None).unwrap();
    assert_eq!(write.wait(limit()).unwrap_err().kind(), &Kind::Stale);
    alice.post(TransferOp::Read, &prepared, None).unwrap().wait(limit()).unwrap();
}

fn memory_in_use_stays_registered(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let near = fixture.block(&alice, Place::Host, 64);
    let far = fixture.block(&bob, Place::Host, 64);
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    let prepared = alice.prepare(&peer, &[near.range(0, 64)], &[far.range(0, 64)]).unwrap();
    let error = near.memory.deregister().unwrap_err();
    assert_eq!(error.kind(), &Kind::Busy, "{error}");
    assert!(error.to_string().contains("prepared list"), "{error}");
    alice.post(TransferOp::Write, &prepared, None).unwrap().wait(limit()).unwrap();
    drop(prepared);
    // That was the last use: the registration has ended, and is not in the metadata.
    let metadata = String::from_utf8(alice.metadata().unwrap()).unwrap();
    assert!(metadata.contains("\"memory\":[]"), "{metadata}");
}

/// More ranges than can be posted at a time.
fn many_ranges(agent: &Agent, peer: &Peer, (near, far): (&Block, &Block)) -> PreparedTransfer {
    let count = 20_000;
    let step = LEN / count;
    let lists: (Vec<_>, Vec<_>) = (0..count)
        .map(|at| (near.range(at * step, step - 1), far.range(at * step, step - 1)))
        .unzip();
    agent.prepare(peer, &lists.0, &lists.1).unwrap()
}

fn a_transfer_that_is_cancelled(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let near = fixture.block(&alice, Place::Host, LEN);
    let far = fixture.block(&bob, Place::Host, LEN);
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    let mut cancelled = 0;
    let rounds = Effort::choose([2, 4, 10_u64]);
    for op in [TransferOp::Write, TransferOp::Read] {
        let prepared = many_ranges(&alice, &peer, (&near, &far));
        for round in 0..10 {
            if round >= rounds && cancelled > 0 {
                break;
            }
            let posted: Vec<_> =
                (0..3).map(|_| alice.post(op, &prepared, Some(b"whole")).unwrap()).collect();
            std::thread::sleep(Duration::from_micros(round * 300));
            let (kept, others) = posted.split_first().unwrap();
            others.iter().for_each(Transfer::cancel);
            let mut arrive = 1;
            for transfer in others {
                match transfer.wait(limit()) {
                    Ok(()) => arrive += 1,
                    Err(error) => {
                        assert_eq!(error.kind(), &Kind::Cancelled, "{error}");
                        cancelled += 1;
                    }
                }
            }
            kept.wait(limit()).unwrap();
            // Those that were done have notified, and the others have not.
            for _ in 0..arrive {
                assert_eq!(bob.wait_notification(limit()).unwrap().unwrap().bytes(), b"whole");
            }
            assert!(bob.wait_notification(Duration::from_millis(1)).unwrap().is_none());
            let target = if op == TransferOp::Write { &far } else { &near };
            target.write(0, &[0; 4096]);
            std::thread::sleep(Duration::from_millis(2));
            same(&target.read(0, 4096), &[0; 4096], "memory after a transfer has ended");
            target.fill(round);
        }
        posted_after_cancel(&alice, &prepared);
    }
    assert!(cancelled > 0, "all were faster");
}

/// A connection on which transfers were cancelled goes on.
fn posted_after_cancel(alice: &Agent, prepared: &PreparedTransfer) {
    let transfer = alice.post(TransferOp::Read, prepared, None).unwrap();
    transfer.wait(limit()).unwrap();
    transfer.cancel();
    assert!(transfer.wait(limit()).is_ok(), "what is done stays done");
}

fn a_transfer_that_takes_too_long(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let near = fixture.block(&alice, Place::Host, LEN);
    let far = fixture.block(&bob, Place::Host, LEN);
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    let prepared = many_ranges(&alice, &peer, (&near, &far));
    let options = TransferOptions::default();
    // Several at a time, so that the last are late: what was posted in time is done.
    let short = options.clone().with_timeout(Duration::from_millis(1));
    let post = |_| alice.post_with(TransferOp::Write, &prepared, short.clone()).unwrap();
    let posted: Vec<_> = (0..5).map(post).collect();
    let late = posted.iter().filter(|transfer| match transfer.wait(limit()) {
        Ok(()) => false,
        Err(error) => {
            assert_eq!(error.kind(), &Kind::Timeout, "{error}");
            assert!(error.to_string().contains("took too long"), "{error}");
            true
        }
    });
    assert!(late.count() > 0, "all were faster");
    let long = options.with_timeout(limit());
    let transfer = alice.post_with(TransferOp::Write, &prepared, long).unwrap();
    transfer.wait(limit()).unwrap();
    let waiting = alice.post(TransferOp::Write, &prepared, None).unwrap();
    if let Err(error) = waiting.wait(Duration::ZERO) {
        assert!(error.to_string().contains("still in progress"), "{error}");
    }
    waiting.wait(limit()).unwrap();
}

fn an_agent_that_is_closed(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let near = fixture.block(&alice, Place::Host, LEN);
    let far = fixture.block(&bob, Place::Host, LEN);
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    let lists = ([near.range(0, LEN)], [far.range(0, LEN)]);
    let prepared = alice.prepare(&peer, &lists.0, &lists.1).unwrap();
    let post = || alice.post(TransferOp::Write, &prepared, None).unwrap();
    post().wait(limit()).unwrap();
    // The peer goes.
    let posted: Vec<_> = (0..50).map(|_| post()).collect();
    let start = Instant::now();
    drop(bob);
    let lost = posted.iter().filter_map(|transfer| transfer.wait(limit()).err());
    let kinds: Vec<_> = lost.map(|error| error.kind().clone()).collect();
    assert!(kinds.iter().all(|kind| *kind == Kind::PeerLost), "{kinds:?}");
    assert!(start.elapsed() < limit(), "{:?}", start.elapsed());
    // This one goes: its transfers end, and the call does not wait.
    let bob = fixture.agent("bob");
    let far = fixture.block(&bob, Place::Host, LEN);
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    let prepared = alice.prepare(&peer, &lists.0, &[far.range(0, LEN)]).unwrap();
    let posted: Vec<_> =
        (0..50).map(|_| alice.post(TransferOp::Write, &prepared, None).unwrap()).collect();
    drop(alice);
    for transfer in posted {
        if let Err(error) = transfer.wait(limit()) {
            assert_eq!(error.kind(), &Kind::Freed, "{error}");
        }
    }
}

fn nobody_listens(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let metadata = bob.metadata().unwrap();
    drop(bob);
    let peer = alice.add_peer(&metadata).unwrap();
    for _ in 0..3 {
        let start = Instant::now();
        // Posting fails at once while the failure of the one before is being told.
        let notified = alice.notify(&peer, b"hello?");
        let error = notified.and_then(|sent| sent.wait(limit())).unwrap_err();
        assert_eq!(error.kind(), &Kind::PeerLost, "{error}");
        let text = error.to_string();
        // The first may still reach a listener that is being closed.
        let said = ["check that the peer runs", "has closed the connection"];
        assert!(said.iter().any(|said| text.contains(said)), "{error}");
        assert!(start.elapsed() < limit(), "{:?}", start.elapsed());
    }
}
