//! Peers: what is known of them, restarts, removal, and metadata that is wrong.

use testkit::{Rng, cases};
use warpwire::agent::{Agent, Descriptor, TransferOp, TransferState};
use warpwire::error::Kind;

use crate::agent::fixture::{Block, Fixture, Place, limit, only, same};

cases!(Fixture; CASES:
    metadata_of_a_part,
    metadata_of_now_replaces_that_of_before,
    a_peer_that_is_restarted,
    a_peer_that_is_removed,
    a_peer_that_connects_to_another_incarnation,
    names_and_lists_that_are_wrong,
    random_metadata,
);

fn write(agent: &Agent, name: &str, lists: (Descriptor, Descriptor)) -> warpwire::Result<()> {
    let peer = agent.peer(name).expect("it was added");
    let prepared = agent.prepare(&peer, &[lists.0], &[lists.1])?;
    agent.post(TransferOp::Write, &prepared, None)?.wait(limit())
}

fn metadata_of_a_part(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let near = fixture.block(&alice, Place::Host, 64);
    let [one, two] = [1, 2].map(|_| fixture.block(&bob, Place::Host, 64));
    let at = |block: &Block| (near.range(0, 64), block.range(0, 64));
    let address = bob.metadata_of(&[]).unwrap();
    let peer = alice.add_peer(&address).unwrap();
    assert!(peer.memory().is_empty());
    let error = write(&alice, "bob", at(&one)).unwrap_err();
    assert_eq!(error.kind(), &Kind::OutOfRange, "{error}");
    alice.add_peer(&bob.metadata_of(&[&one.memory]).unwrap()).unwrap();
    assert_eq!(peer.memory().len(), 1);
    write(&alice, "bob", at(&one)).unwrap();
    write(&alice, "bob", at(&two)).unwrap_err();
    // Added to what is known, and not twice.
    for _ in 0..2 {
        alice.add_peer(&bob.metadata_of(&[&two.memory]).unwrap()).unwrap();
    }
    assert_eq!(peer.memory().len(), 2);
    write(&alice, "bob", at(&one)).unwrap();
    write(&alice, "bob", at(&two)).unwrap();
    let error = alice.metadata_of(&[&one.memory]).unwrap_err();
    assert!(error.to_string().contains("another agent"), "{error}");
}

fn metadata_of_now_replaces_that_of_before(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let near = fixture.block(&alice, Place::Host, 64);
    let old = fixture.block(&bob, Place::Host, 64);
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    let before = old.range(0, 64);
    write(&alice, "bob", (near.range(0, 64), before)).unwrap();
    drop(old);
    let new = fixture.block(&bob, Place::Device, 128);
    assert_eq!(alice.add_peer(&bob.metadata().unwrap()).unwrap().name(), "bob");
    assert_eq!(only(&peer).len(), 128);
    assert!(only(&peer).kind().starts_with("sim:"));
    write(&alice, "bob", (near.range(0, 64), new.range(0, 64))).unwrap();
    let error = write(&alice, "bob", (near.range(0, 64), before)).unwrap_err();
    assert!(error.to_string().contains("get the peer's metadata again"), "{error}");
}

fn a_peer_that_is_restarted(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let near = fixture.block(&alice, Place::Host, 64);
    let far = fixture.block(&bob, Place::Host, 64);
    let old = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    let lists = ([near.range(0, 64)], [far.range(0, 64)]);
    let prepared = alice.prepare(&old, &lists.0, &lists.1).unwrap();
    alice.post(TransferOp::Write, &prepared, None).unwrap().wait(limit()).unwrap();
    drop((bob, far));
    let bob = fixture.agent("bob");
    let far = fixture.block(&bob, Place::Host, 64);
    let wanted = near.fill(9);
    alice.add_peer(&bob.metadata().unwrap()).unwrap();
    write(&alice, "bob", (near.range(0, 64), far.range(0, 64))).unwrap();
    same(&far.read(0, 64), &wanted, "what the new peer has");
    // The lists of the old one are of no use any more.
    let error = alice.post(TransferOp::Write, &prepared, None).unwrap_err();
    assert_eq!(error.kind(), &Kind::Stale, "{error}");
    assert!(error.to_string().contains("restarted"), "{error}");
    bob.notify(&bob.add_peer(&alice.metadata().unwrap()).unwrap(), b"hi").unwrap();
    assert_eq!(alice.wait_notification(limit()).unwrap().unwrap().bytes(), b"hi");
}

fn a_peer_that_is_removed(fixture: &Fixture) {
    const LEN: u64 = 64 << 20;
    let (alice, bob) = fixture.pair();
    let near = fixture.block(&alice, Place::Host, LEN);
    let far = fixture.block(&bob, Place::Host, LEN);
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    let lists = ([near.range(0, LEN)], [far.range(0, LEN)]);
    let prepared = alice.prepare(&peer, &lists.0, &lists.1).unwrap();
    let posted: Vec<_> =
        (0..20).map(|_| alice.post(TransferOp::Write, &prepared, None).unwrap()).collect();
    assert!(alice.remove_peer("bob") && !alice.remove_peer("bob"));
    assert!(alice.peer("bob").is_none());
    let failed = posted.iter().filter(|transfer| match transfer.wait(limit()) {
        Ok(()) => false,
        Err(error) => {
            assert_eq!(error.kind(), &Kind::Cancelled, "{error}");
            true
        }
    });
    assert!(failed.count() > 0, "all were faster");
    // Nothing is written after that.
    far.write(0, &vec![0; LEN as usize]);
    std::thread::sleep(std::time::Duration::from_millis(100));
    assert!(far.read(0, LEN as usize).iter().all(|byte| *byte == 0));
    let error = alice.post(TransferOp::Write, &prepared, None).unwrap_err();
    assert!(error.to_string().contains("was removed"), "{error}");
    alice.add_peer(&bob.metadata().unwrap()).unwrap();
    write(&alice, "bob", (near.range(0, 64), far.range(0, 64))).unwrap();
}

/// A listener that is not the one of the metadata refuses.
fn a_peer_that_connects_to_another_incarnation(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let metadata = String::from_utf8(bob.metadata().unwrap()).unwrap();
    let value = |text: &str, field: &str| -> String {
        let (_, rest) = text.split_once(&format!("\"{field}\":")).unwrap();
        rest.split([',', '}']).next().unwrap().to_owned()
    };
    let token = value(&metadata, "token");
    let wrong_token = format!("\"{}\"", "0".repeat(token.len() - 2));
    let incarnation = value(&metadata, "incarnation");
    for (from, to, why) in [
        (token.as_str(), wrong_token.as_str(), "token"),
        (incarnation.as_str(), "7", "earlier agent"),
    ] {
        let peer = alice.add_peer(metadata.replacen(from, to, 1).as_bytes()).unwrap();
        let sent = alice.notify(&peer, b"let me in").unwrap();
        let error = sent.wait(limit()).unwrap_err();
        assert_eq!(error.kind(), &Kind::Stale, "{error}");
        assert!(error.to_string().contains(why), "{error}");
        alice.remove_peer("bob");
    }
    assert!(bob.next_notification().is_none());
    let peer = alice.add_peer(metadata.as_bytes()).unwrap();
    alice.notify(&peer, b"hello").unwrap().wait(limit()).unwrap();
}

fn names_and_lists_that_are_wrong(fixture: &Fixture) {
    for name in ["", "a\u{1b}[2J", &"x".repeat(257)] {
        let error = Agent::open(name, fixture.options(1)).unwrap_err();
        assert_eq!(error.kind(), &Kind::InvalidArgument, "{error}");
    }
    for options in [
        fixture.options(1).with_queue_pairs(0),
        fixture.options(1).with_queue_pairs(17),
        fixture.options(1).with_send_depth(15),
        fixture.options(1).with_send_depth(4097),
    ] {
        let error = Agent::open("alice", options).unwrap_err();
        assert!(error.to_string().contains("must be"), "{error}");
    }
    let (alice, bob) = fixture.pair();
    let near = fixture.block(&alice, Place::Host, 64);
    let far = fixture.block(&bob, Place::Host, 64);
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    let (good, there) = (near.range(0, 64), far.range(0, 64));
    let prepare = |local: &[Descriptor], remote: &[Descriptor]| alice.prepare(&peer, local, remote);
    for (local, remote, why) in [
        (&[good][..], &[][..], "1 local ranges for 0"),
        (&[good], &[Descriptor::new(there.address, 63)], "range 0 has 64 bytes here and 63"),
        (&[good, Descriptor::new(good.address, 65)], &[there, there], "range 1 has 65"),
        (&[Descriptor::new(good.address + 1, 64)], &[there], "range 0: 64 bytes"),
        (&[Descriptor::new(good.address - 1, 64)], &[there], "registered with this agent"),
        (&[Descriptor::new(u64::MAX, 64)], &[there], "registered with this agent"),
        (&[good], &[Descriptor::new(there.address + 1, 64)], "peer \"bob\" has registered"),
        (&[good], &[Descriptor::new(0, 64)], "add it with add_peer"),
    ] {
        let error = prepare(local, remote).unwrap_err();
        assert!(error.to_string().contains(why), "{error} does not contain {why}");
    }
    assert!(near.memory.range(60, 5).is_err() && only(&peer).range(65, 0).is_err());
    assert!(near.memory.range(u64::MAX, 2).is_err());
    let prepared = prepare(&[good], &[there]).unwrap();
    let error = bob.post(TransferOp::Write, &prepared, None).unwrap_err();
    assert!(error.to_string().contains("another agent"), "{error}");
    let error = bob.prepare(&peer, &[], &[]).unwrap_err();
    assert!(error.to_string().contains("added to another agent"), "{error}");
    // An empty list is done.
    let empty = prepare(&[], &[]).unwrap();
    let done = alice.post(TransferOp::Read, &empty, None).unwrap();
    done.wait(limit()).unwrap();
    assert!(matches!(done.state(), TransferState::Done));
}

/// Changed and cut metadata is refused, or names something that does not answer.
fn random_metadata(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let _far = fixture.block(&bob, Place::Host, 64);
    let good = bob.metadata().unwrap();
    let mut rng = Rng::new(7);
    let mut refused = 0;
    for _ in 0..300 {
        let mut bytes = good.clone();
        for _ in 0..1 + rng.below(4) {
            let at = rng.below(bytes.len() as u64) as usize;
            bytes[at] = rng.next_u64() as u8;
        }
        bytes.truncate(1 + rng.below(bytes.len() as u64) as usize);
        if let Err(error) = alice.add_peer(&bytes) {
            assert!(!error.to_string().contains('\u{1b}'), "{error}");
            refused += 1;
        }
    }
    assert!(refused > 250, "{refused}");
    alice.add_peer(&good).unwrap();
}
