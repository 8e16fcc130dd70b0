//! Notifications: their order after the data, lengths, numbers, and readers that are slow.

use std::collections::HashMap;
use std::time::Duration;

use testkit::cases;
use warpwire::agent::{Agent, MAX_NOTIFICATION_LEN, TransferOp};

use crate::agent::fixture::{Fixture, PLACES, Place, limit, same};

cases!(Fixture; CASES:
    notifications_arrive_after_their_data,
    notifications_after_reads,
    notifications_of_every_length,
    notifications_of_many_peers,
    a_slow_reader_loses_nothing,
);

fn notifications_arrive_after_their_data(fixture: &Fixture) {
    const LEN: usize = 20_000;
    let (alice, bob) = fixture.pair();
    for place in PLACES {
        let near = fixture.block(&alice, place, LEN as u64);
        let far = fixture.block(&bob, place, LEN as u64);
        let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
        let range = |at: usize| (at * 100) as u64;
        // Many ranges, so that the last is far behind the first.
        let lists: (Vec<_>, Vec<_>) =
            (0..199).map(|at| (near.range(range(at), 99), far.range(range(at) + 1, 99))).unzip();
        let prepared = alice.prepare(&peer, &lists.0, &lists.1).unwrap();
        for round in 0..50_u8 {
            near.write(0, &[round; LEN]);
            let sent = alice.post(TransferOp::Write, &prepared, Some(&[round])).unwrap();
            let notification = bob.wait_notification(limit()).unwrap().unwrap();
            assert_eq!((notification.from(), notification.bytes()), ("alice", &[round][..]));
            for at in 0..199 {
                same(&far.read(range(at) + 1, 99), &[round; 99], "data of a notification");
            }
            sent.wait(limit()).unwrap();
        }
    }
}

/// The peer may change its memory after the notification: nothing of the change is read.
fn notifications_after_reads(fixture: &Fixture) {
    const LEN: usize = 100_000;
    let (alice, bob) = fixture.pair();
    for place in PLACES {
        let near = fixture.block(&alice, place, LEN as u64);
        let far = fixture.block(&bob, place, LEN as u64);
        let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
        let lists = ([near.range(0, LEN as u64)], [far.range(0, LEN as u64)]);
        let prepared = alice.prepare(&peer, &lists.0, &lists.1).unwrap();
        far.write(0, &[0; LEN]);
        for round in 0..30_u8 {
            let read = alice.post(TransferOp::Read, &prepared, Some(b"have it")).unwrap();
            bob.wait_notification(limit()).unwrap().unwrap();
            far.write(0, &[round + 1; LEN]);
            read.wait(limit()).unwrap();
            same(&near.read(0, LEN), &[round; LEN], "what was read before the change");
        }
    }
}

fn notifications_of_every_length(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    for len in [0, 1, 200, 248, 249, 4096, 100_000, MAX_NOTIFICATION_LEN] {
        let bytes: Vec<u8> = (0..len).map(|at| at as u8).collect();
        let sent = alice.notify(&peer, &bytes).unwrap();
        let notification = bob.wait_notification(limit()).unwrap().unwrap();
        same(notification.bytes(), &bytes, "a notification");
        assert_eq!(notification.into_bytes().len(), len);
        sent.wait(limit()).unwrap();
    }
    let error = alice.notify(&peer, &vec![0; MAX_NOTIFICATION_LEN + 1]).unwrap_err();
    assert!(error.to_string().contains("1048577 bytes"), "{error}");
    assert!(bob.wait_notification(Duration::from_millis(20)).unwrap().is_none());
}

fn notifications_of_many_peers(fixture: &Fixture) {
    const EACH: usize = 100;
    let bob = fixture.agent("bob");
    let others: Vec<Agent> = (0..5).map(|number| fixture.agent(&format!("p{number}"))).collect();
    std::thread::scope(|scope| {
        for other in &others {
            let metadata = bob.metadata().unwrap();
            scope.spawn(move || {
                let peer = other.add_peer(&metadata).unwrap();
                let sent: Vec<_> = (0..EACH)
                    .map(|number| other.notify(&peer, number.to_string().as_bytes()).unwrap())
                    .collect();
                sent.iter().for_each(|sent| sent.wait(limit()).unwrap());
            });
        }
        let mut counts: HashMap<String, usize> = HashMap::new();
        for _ in 0..EACH * others.len() {
            let notification = bob.wait_notification(limit()).unwrap().unwrap();
            let count = counts.entry(notification.from().to_owned()).or_default();
            // Those of one peer that were posted one after the other arrive in order.
            assert_eq!(notification.bytes(), count.to_string().as_bytes());
            *count += 1;
        }
        assert_eq!(counts.len(), others.len());
    });
}

/// More notifications than the receiver keeps: the sender waits, and all arrive.
fn a_slow_reader_loses_nothing(fixture: &Fixture) {
    let alice = fixture.agent("alice");
    let options = fixture.options(1).with_max_pending_notifications(20_000);
    let bob = Agent::open("bob", options).unwrap();
    let near = fixture.block(&alice, Place::Host, 64);
    let far = fixture.block(&bob, Place::Host, 64);
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    let text = |number: usize| format!("{number:01000}");
    let sent: Vec<_> =
        (0..600).map(|number| alice.notify(&peer, text(number).as_bytes()).unwrap()).collect();
    std::thread::sleep(Duration::from_millis(50));
    assert!(!sent[599].is_ended(), "nothing limits what is kept");
    for number in 0..600 {
        let notification = bob.wait_notification(limit()).unwrap().unwrap();
        assert_eq!(notification.bytes(), text(number).as_bytes());
    }
    sent.iter().for_each(|sent| sent.wait(limit()).unwrap());
    let prepared = alice.prepare(&peer, &[near.range(0, 64)], &[far.range(0, 64)]).unwrap();
    alice.post(TransferOp::Write, &prepared, None).unwrap().wait(limit()).unwrap();
}
