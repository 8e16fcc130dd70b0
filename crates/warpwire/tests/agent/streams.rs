//! Transfers in the order of a device's stream.

use std::time::Duration;

use testkit::cases;
use warpwire::agent::{Agent, PreparedTransfer, TransferOp, TransferOptions, TransferState};
use warpwire::error::Kind;
use warpwire::mem::sim::{Sim, SimConfig};
use warpwire::mem::{Condition, Device, ForeignStream, Stream, StreamRef};

use crate::agent::fixture::{Block, Fixture, Place, limit, same};

cases!(Fixture; CASES:
    writes_follow_the_stream,
    writes_follow_a_stream_of_another_library,
    reads_are_there_for_the_stream,
    many_streams_wait_for_one_transfer,
    transfers_that_no_stream_reaches,
    failed_transfers_release_streams,
    graphs_are_refused,
);

const LEN: u64 = 100_000;

/// Host memory of both agents, and its transfer from the first to the second.
fn blocks(fixture: &Fixture, alice: &Agent, bob: &Agent) -> (Block, Block, PreparedTransfer) {
    let [near, far] = [alice, bob].map(|agent| fixture.block(agent, Place::Host, LEN));
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    let prepared = alice.prepare(&peer, &[near.range(0, LEN)], &[far.range(0, LEN)]).unwrap();
    (near, far, prepared)
}

fn writes_follow_the_stream(fixture: &Fixture) {
    let gpu = fixture.gpu();
    let stream = gpu.stream().unwrap();
    write_in_order(fixture, &gpu, &stream, (&stream).into());
}

/// The library knows the stream by its handle alone.
#[allow(unsafe_code)]
fn writes_follow_a_stream_of_another_library(fixture: &Fixture) {
    let gpu = Sim::start(SimConfig::default()).unwrap().device(0).unwrap();
    let stream = gpu.stream().unwrap();
    // SAFETY: of this device, and alive until the end; the simulated GPU checks numbers.
    let by_handle = |number| unsafe { ForeignStream::new(&gpu, number) };
    write_in_order(fixture, &gpu, &stream, (&by_handle(stream.number()).unwrap()).into());
    assert_eq!(by_handle(stream.number() + 99).unwrap_err().kind(), &Kind::InvalidArgument);
}

/// The stream changes the memory before and after each write, and no write sees what comes after.
fn write_in_order(fixture: &Fixture, gpu: &Device, stream: &Stream, posts: StreamRef<'_>) {
    const ROUNDS: u8 = 50;
    let (alice, bob) = fixture.pair();
    let memory = gpu.alloc(LEN).unwrap();
    let near = alice.register(memory.whole().unwrap()).unwrap();
    let far = fixture.block(&bob, Place::Host, LEN * u64::from(ROUNDS));
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    let mut writes = Vec::new();
    for round in 0..ROUNDS {
        let to = far.range(u64::from(round) * LEN, LEN);
        let prepared = alice.prepare(&peer, &[near.range(0, LEN).unwrap()], &[to]).unwrap();
        stream.fill(&memory.whole().unwrap(), round + 1).unwrap();
        let options = TransferOptions::default().with_notification(vec![round]);
        let write = alice.post_on_stream(posts, TransferOp::Write, &prepared, options).unwrap();
        write.wait_on_stream(posts).unwrap();
        writes.push(write);
    }
    stream.fill(&memory.whole().unwrap(), 0xff).unwrap();
    stream.synchronize(limit()).unwrap();
    writes.iter().for_each(|write| write.wait(Duration::ZERO).unwrap());
    for round in 0..ROUNDS {
        let bytes = far.read(u64::from(round) * LEN, LEN as usize);
        same(&bytes, &vec![round + 1; LEN as usize], "what the stream had written before");
        let notification = bob.wait_notification(limit()).unwrap().unwrap();
        assert_eq!(notification.bytes(), [round]);
    }
}

/// What the stream does behind a wait sees the data.
fn reads_are_there_for_the_stream(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let gpu = fixture.gpu();
    let stream = gpu.stream().unwrap();
    let [memory, copy] = [(); 2].map(|()| gpu.alloc(LEN).unwrap());
    let near = alice.register(memory.whole().unwrap()).unwrap();
    let far = fixture.block(&bob, Place::Host, LEN);
    let peer = alice.add_peer(&bob.metadata().unwrap()).unwrap();
    let prepared =
        alice.prepare(&peer, &[near.range(0, LEN).unwrap()], &[far.range(0, LEN)]).unwrap();
    for round in 1..20_u8 {
        far.write(0, &vec![round; LEN as usize]);
        let read = alice.post(TransferOp::Read, &prepared, None).unwrap();
        read.wait_on_stream(&stream).unwrap();
        stream.copy(&copy.whole().unwrap(), &memory.whole().unwrap()).unwrap();
        stream.synchronize(limit()).unwrap();
        assert!(matches!(read.state(), TransferState::Done));
        let mut bytes = vec![0; LEN as usize];
        copy.read(0, &mut bytes).unwrap();
        same(&bytes, &vec![round; LEN as usize], "the data of the peer");
    }
}

/// More waits than words are allocated at a time, on several devices, before and after the end.
fn many_streams_wait_for_one_transfer(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let (_near, _far, prepared) = blocks(fixture, &alice, &bob);
    let streams = [fixture.gpu(), fixture.gpu()].map(|gpu| gpu.stream().unwrap());
    for _ in 0..3 {
        let write = alice.post(TransferOp::Write, &prepared, None).unwrap();
        for _ in 0..100 {
            streams.iter().for_each(|stream| write.wait_on_stream(stream).unwrap());
        }
        streams.iter().for_each(|stream| stream.synchronize(limit()).unwrap());
        write.wait(Duration::ZERO).unwrap();
    }
}

/// They are cancelled, expire, or end with their agent; nothing is written.
fn transfers_that_no_stream_reaches(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let gpu = fixture.gpu();
    let (gate, stream) = (gpu.alloc_pinned(8).unwrap(), gpu.stream().unwrap());
    let gate = gate.word64(0).unwrap();
    gate.store(0).unwrap();
    let (near, far, prepared) = blocks(fixture, &alice, &bob);
    near.write(0, &vec![9; LEN as usize]);
    stream.wait_value(&gate, Condition::AtLeast, 1).unwrap();
    let post = |options: TransferOptions| {
        alice.post_on_stream(&stream, TransferOp::Write, &prepared, options).unwrap()
    };
    let cancelled = post(TransferOptions::default());
    let expired = post(TransferOptions::default().with_timeout(Duration::from_millis(20)));
    let closed = post(TransferOptions::default());
    assert!(matches!(cancelled.state(), TransferState::InProgress));
    cancelled.cancel();
    assert_eq!(cancelled.wait(limit()).unwrap_err().kind(), &Kind::Cancelled);
    assert_eq!(expired.wait(limit()).unwrap_err().kind(), &Kind::Timeout);
    drop(alice);
    assert_eq!(closed.wait(limit()).unwrap_err().kind(), &Kind::Freed);
    // The stream gets there when they are gone.
    gate.store(1).unwrap();
    stream.synchronize(limit()).unwrap();
    same(&far.read(0, LEN as usize), &vec![0; LEN as usize], "the memory of the peer");
}

/// A stream that waits for a transfer goes on when that fails.
fn failed_transfers_release_streams(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let stream = fixture.gpu().stream().unwrap();
    let (_near, far, prepared) = blocks(fixture, &alice, &bob);
    far.memory.deregister().unwrap();
    let options = TransferOptions::default();
    let write = alice.post_on_stream(&stream, TransferOp::Write, &prepared, options).unwrap();
    write.wait_on_stream(&stream).unwrap();
    stream.synchronize(limit()).unwrap();
    assert!(matches!(write.state(), TransferState::Failed(_)), "{write:?}");
}

fn graphs_are_refused(fixture: &Fixture) {
    let (alice, bob) = fixture.pair();
    let stream = fixture.gpu().stream().unwrap();
    let (_near, _far, prepared) = blocks(fixture, &alice, &bob);
    let done = alice.post(TransferOp::Write, &prepared, None).unwrap();
    done.wait(limit()).unwrap();
    let captured = stream.capture(|stream| {
        let options = TransferOptions::default();
        let posted = alice.post_on_stream(stream, TransferOp::Write, &prepared, options);
        assert_eq!(posted.unwrap_err().kind(), &Kind::Unsupported);
        assert_eq!(done.wait_on_stream(stream).unwrap_err().kind(), &Kind::Unsupported);
        Ok(())
    });
    assert!(captured.unwrap().is_empty());
}
