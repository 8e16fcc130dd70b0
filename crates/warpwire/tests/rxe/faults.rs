//! The local link loses, duplicates, reorders and corrupts packets: everything still arrives
//! exactly once.

use warpwire::verbs::{Atomic, SendRequest, WrOp};
use warpwire_proto::qp::{DiscardReason, Stats};

use crate::rxe::lab::{Bench, Family};
use crate::rxe::peer::PeerPost;
use crate::rxe::testbed::{ConnParams, Testbed};
use testkit::cases;

cases!(Bench; CASES:
    lost_packets,
    duplicated_packets,
    reordered_arrivals,
    reordered_departures,
    everything_at_once,
    corrupted_packets,
);

/// Whether the guest reads while the local packets are reordered. rxe cannot handle read responses
/// out of order: it treats them as an error, and the kernel prints a warning (`rxe_comp.c`, see
/// docs/interop.md).
#[derive(Clone, Copy, PartialEq, Eq)]
enum TheirReads {
    Yes,
    No,
}

/// Writes, reads, messages and atomics in both directions, all verified.
fn everything(testbed: &mut Testbed, rounds: u64, reads: TheirReads) {
    const LEN: usize = 9000;
    let far = testbed.far;
    for n in 0..rounds {
        testbed.near.fill(0, LEN, n);
        let out = [testbed.near.mr.sge(0, LEN as u32)];
        let back = [testbed.near.mr.sge(20_000, LEN as u32)];
        let word = [testbed.near.mr.sge(40_000, 8)];
        testbed.peer.receive(0, 50, &far, 20_000, LEN as u32);
        testbed
            .qp()
            .post_send(&[
                SendRequest::new(1, WrOp::Write(far.remote(0))).with(&out),
                SendRequest::new(2, WrOp::Read(far.remote(0))).with(&back),
                SendRequest::new(3, WrOp::Send).with(&out),
                SendRequest::new(4, WrOp::Atomic(far.remote(40_000), Atomic::FetchAdd { add: 1 }))
                    .with(&word),
            ])
            .unwrap();
        for id in 1..=4 {
            testbed.done(id);
        }
        testbed.peer.done(50);
        testbed.near.check(20_000, LEN, n);
        testbed.peer.check(&far, 20_000, LEN, n);
        // Executed exactly once.
        assert_eq!((testbed.near.get(40_000), testbed.peer.get(&far, 40_000)), (n, n + 1));

        testbed.peer.fill(&far, 60_000, LEN, n + 100);
        testbed.receive(60, 80_000, LEN as u32);
        let at = |offset| testbed.near.mr.remote(offset);
        let posts = [
            PeerPost::new(11, "write").from(60_000, LEN as u32).at(at(60_000)),
            PeerPost::new(12, "send").from(60_000, LEN as u32),
            PeerPost::new(13, "read").from(80_000, LEN as u32).at(at(60_000)),
            PeerPost { first: 1, ..PeerPost::new(14, "fadd").from(100_000, 8).at(at(100_000)) },
        ];
        let wanted = |post: &&PeerPost<'_>| reads == TheirReads::Yes || post.op != "read";
        for post in posts.iter().filter(wanted) {
            testbed.peer.post(&far, *post);
        }
        for post in posts.iter().filter(wanted) {
            testbed.peer.done(post.id);
        }
        testbed.done(60);
        testbed.near.check(60_000, LEN, n + 100);
        testbed.near.check(80_000, LEN, n + 100);
        if reads == TheirReads::Yes {
            testbed.peer.check(&far, 80_000, LEN, n + 100);
        }
        assert_eq!((testbed.peer.get(&far, 100_000), testbed.near.get(100_000)), (n, n + 1));
    }
}

fn under(bench: &Bench, faults: &'static [&'static str], rounds: u64, reads: TheirReads) -> Stats {
    // A short timeout keeps the case fast: the guest is slow.
    let params = ConnParams { faults, timeout: 14, ..ConnParams::default() };
    let mut testbed = Testbed::open(bench, params);
    everything(&mut testbed, rounds, reads);
    testbed.qp().stats().unwrap()
}

fn lost_packets(bench: &Bench) {
    let stats = under(bench, &["loss=5%,seed=7"], 12, TheirReads::Yes);
    assert!(stats.resent > 0, "{stats:?}");
    // A gap is detected either by the peer's NAK or by the timer.
    assert!(stats.sequence_naks_received + stats.timeouts > 0, "{stats:?}");
}

fn duplicated_packets(bench: &Bench) {
    let stats = under(bench, &["dup=20%,seed=3"], 8, TheirReads::Yes);
    assert!(stats.dropped(DiscardReason::Duplicate) > 0, "{stats:?}");
}

fn reordered_arrivals(bench: &Bench) {
    let stats = under(bench, &["reorder=5%,dir=in,seed=5"], 8, TheirReads::Yes);
    assert!(stats.sequence_naks_sent > 0, "{stats:?}");
}

fn reordered_departures(bench: &Bench) {
    let stats = under(bench, &["reorder=5%,dir=out,seed=6"], 8, TheirReads::No);
    assert!(stats.sequence_naks_received > 0, "{stats:?}");
}

fn everything_at_once(bench: &Bench) {
    const OUT: &str = "loss=3%,dup=3%,dir=out,seed=11";
    const IN: &str = "loss=3%,dup=3%,reorder=3%,delay=100us,jitter=200us,dir=in,seed=12";
    let stats = under(bench, &[OUT, IN], 8, TheirReads::Yes);
    assert!(stats.resent > 0, "{stats:?}");
}

fn corrupted_packets(bench: &Bench) {
    // A separate source address, so that the capture checks skip these packets.
    let from = Some(bench.damaged());
    // A packet shorter than its BTH, over IPv6, crashes the guest's kernel in rxe
    // (docs/interop.md).
    let faults: &[&str] = match bench.family {
        Family::V4 => &["corrupt=5%,cut=2%,seed=9"],
        Family::V6 => &["corrupt=7%,seed=9"],
    };
    let mut testbed =
        Testbed::open(bench, ConnParams { from, faults, timeout: 14, ..ConnParams::default() });
    everything(&mut testbed, 8, TheirReads::Yes);
    let stats = testbed.qp().stats().unwrap();
    assert!(stats.resent > 0, "{stats:?}");
}
