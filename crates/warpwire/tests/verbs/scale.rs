//! Many queue pairs, no leaks, and no access for foreign packets.

use std::net::UdpSocket;
use std::time::Duration;

use warpwire::link::{Hub, Link, MIN_PACKET, Udp, UdpOptions};
use warpwire::verbs::{
    Completion, ProgressMode, Qp, QpOptions, ReceiveRequest, SendRequest, SrqOptions, State, WrOp,
};
use warpwire_proto::Psn;
use warpwire_proto::wire::packet::Transport;
use warpwire_proto::wire::{Aeth, Extension, Headers, Nak, Opcode, Syndrome};

use crate::verbs::fixture::{Fixture, Rng, TestLink, Testbed, connect, same};
use testkit::cases;

cases!(Fixture; CASES: a_thousand_queue_pairs, strangers_are_dropped);
cases!(Fixture; ONCE:
    nothing_is_left_over,
    queue_pair_numbers_are_not_reused_soon,
    other_ports_of_the_peers_host_are_dropped,
);

fn a_thousand_queue_pairs(fixture: &Fixture) {
    const PAIRS: usize = 1000;
    let testbed = fixture.testbed();
    let [cq, there] = [&testbed.a, &testbed.b].map(|end| end.context.create_cq(4096).unwrap());
    let (near, far) = (
        fixture.host(&testbed.a, PAIRS as u64 * 4096),
        fixture.host(&testbed.b, PAIRS as u64 * 4096),
    );
    let options = QpOptions::default().with_send_depth(4).with_receive_depth(4);
    let mut all = Vec::new();
    for _ in 0..PAIRS {
        let one = testbed.a.context.create_qp(&testbed.a.pd, &cq, &cq, options.clone()).unwrap();
        let two =
            testbed.b.context.create_qp(&testbed.b.pd, &there, &there, options.clone()).unwrap();
        connect(&one, &two);
        all.push((one, two));
    }
    let wanted: Vec<_> =
        (0..PAIRS as u64).map(|n| near.pattern(n * 4096, 3000 + n as usize, n)).collect();
    for (n, (one, two)) in all.iter().enumerate() {
        let (id, at) = (n as u64, n as u64 * 4096);
        two.post_receive(&[ReceiveRequest { id, data: &[] }]).unwrap();
        let data = [near.mr.sge(at, 3000 + n as u32)];
        let write = SendRequest::new(id, WrOp::Write(far.mr.remote(at))).with(&data).unsignaled();
        one.post_send(&[write, SendRequest::new(id, WrOp::Send)]).unwrap();
    }
    let mut done = [Completion::EMPTY; 64];
    let (mut sent, mut received) = (0, 0);
    testbed.until("all completions", || {
        let count = cq.poll(&mut done).unwrap();
        assert!(done[..count].iter().all(Completion::is_success));
        sent += count;
        let count = there.poll(&mut done).unwrap();
        for arrived in &done[..count] {
            let n = arrived.id as usize;
            assert!(arrived.is_success() && arrived.qpn == all[n].1.number());
            same(&far.read(n as u64 * 4096, 3000 + n), &wanted[n], "a write before its message");
        }
        received += count;
        (sent, received) == (2 * PAIRS, PAIRS)
    });
    let counts = testbed.a.context.soft().is_some();
    assert!(!counts || testbed.a.context.stats().unwrap().queue_pairs == PAIRS);
    drop(all);
    assert_eq!(testbed.a.context.stats().unwrap().queue_pairs, 0);
}

fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

/// Queue pairs and SRQs are created and dropped repeatedly, also with work in flight, without
/// leaking.
fn nothing_is_left_over(fixture: &Fixture) {
    // Runs in a child process: concurrent cases open and close file descriptors too.
    const ALONE: &str = "WARPWIRE_TEST_ALONE";
    if std::env::var_os(ALONE).is_none() {
        let ran = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "verbs::loopback::nothing_is_left_over", "--test-threads=1"])
            .env(ALONE, "1")
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&ran.stdout);
        assert!(ran.status.success() && text.contains("1 passed"), "{text}");
        return;
    }
    let testbed = fixture.testbed();
    let far = fixture.host(&testbed.b, 1 << 20);
    let near = fixture.host(&testbed.a, 1 << 20);
    let mut max_descriptors = 0;
    for round in 0..200u64 {
        let conn = testbed.join(QpOptions::default());
        let srq = testbed.a.context.create_srq(&testbed.a.pd, SrqOptions::default()).unwrap();
        let shared = testbed.test_qp(&testbed.a, QpOptions::default().with_srq(srq));
        let data = [near.mr.sge(0, 1 << 16)];
        conn.a
            .qp
            .post_send(&[SendRequest::new(1, WrOp::Write(far.mr.remote(0))).with(&data)])
            .unwrap();
        conn.b.qp.post_send(&[SendRequest::new(1, WrOp::Send)]).unwrap();
        for _ in 0..round % 5 {
            testbed.step();
        }
        drop((conn, shared));
        testbed.step();
        for end in [&testbed.a, &testbed.b] {
            assert_eq!(end.context.stats().unwrap().queue_pairs, 0);
        }
        if round < 100 {
            max_descriptors = max_descriptors.max(descriptors());
        }
    }
    assert!(
        descriptors() <= max_descriptors,
        "{} descriptors, {max_descriptors} before",
        descriptors()
    );
    let registered = testbed.a.context.registry().unwrap().len();
    for _ in 0..100 {
        drop(fixture.host(&testbed.a, 4096));
    }
    assert_eq!(testbed.a.context.registry().unwrap().len(), registered);
    // Devices and their threads as well.
    for _ in 0..20 {
        let testbed = fixture.with_progress(warpwire::verbs::ProgressMode::Auto);
        testbed.join(QpOptions::default());
    }
}

/// A late packet must not reach a new queue pair that reuses the number of its destination.
fn queue_pair_numbers_are_not_reused_soon(fixture: &Fixture) {
    let testbed = fixture.testbed();
    let cq = testbed.a.context.create_cq(1).unwrap();
    let small = QpOptions::default().with_send_depth(1).with_receive_depth(1);
    let mut seen = std::collections::HashSet::new();
    for _ in 0..10_000 {
        let qp = testbed.a.context.create_qp(&testbed.a.pd, &cq, &cq, small.clone()).unwrap();
        assert!(seen.insert(qp.number()), "{:#x} was reused", qp.number());
    }
}

/// Well-formed packets from a foreign address change nothing, and are counted.
fn strangers_are_dropped(fixture: &Fixture) {
    if matches!(fixture.test_link, TestLink::Loopback | TestLink::Shm | TestLink::ShmPackets) {
        return; // no foreign sender can reach this link
    }
    let testbed = fixture.testbed();
    let conn = testbed.join(QpOptions::default());
    let far = fixture.host(&testbed.b, 4096);
    testbed.check_traffic(&conn);
    let target = testbed.b.context.path().local;
    let number = conn.b.qp.number();
    let mut rng = Rng::new(5);
    let mut packet = |n: usize| {
        let mut packet = vec![0; MIN_PACKET + 16 + n % 64 * 4];
        packet.iter_mut().for_each(|byte| *byte = rng.next_u64() as u8);
        // WRITE, SEND, READ, ACK, CAS, WRITE FIRST
        packet[0] = [0x0a, 0x04, 0x0c, 0x11, 0x13, 0x06][n % 6];
        packet[1] = 0;
        packet[2..4].copy_from_slice(&[0xff, 0xff]);
        packet[4..8].copy_from_slice(&number.to_be_bytes());
        packet
    };
    // With an invalid ICRC (the socket), and with a valid one (the link).
    let socket = UdpSocket::bind((target.ip(), 0)).unwrap();
    let mut link = Udp::bind((target.ip(), 0).into(), UdpOptions::default()).unwrap();
    let flow = link.open(target, 0).unwrap();
    let mut valid = 0;
    for n in 0..200 {
        socket.send_to(&packet(n), target).unwrap();
        let packet = packet(n);
        valid += u64::from(Transport::new_checked(&packet[..]).is_ok());
        link.reserve(flow, packet.len()).unwrap().copy_from_slice(&packet);
        link.commit();
        assert_eq!(link.flush().unwrap().waiting, 0);
    }
    assert!(valid > 100);
    // On a busy machine the packets may arrive late.
    let hca = testbed.b.context.soft().unwrap();
    let lost = |name| {
        let stats = testbed.b.context.stats().unwrap();
        stats.dropped.iter().find(|(reason, _)| *reason == name).unwrap().1
    };
    let passed = || lost("stranger") + lost("malformed");
    // One in 32768 of the invalid ICRCs fits some IP identification: held for a while, and dropped.
    let refused = || {
        let drops = hca.link_counters().drops;
        drops.icrc + drops.unverified
    };
    testbed.until("all packets dropped", || refused() + passed() >= 400);
    testbed.poll_for(Duration::from_millis(20));
    assert_eq!((passed(), refused()), (200, 200), "{:?}", hca.link_counters().drops);
    assert_eq!(lost("stranger"), valid, "{:?}", testbed.b.context.stats());
    assert_eq!(conn.b.qp.state().unwrap(), State::Rts);
    same(&far.read(0, 4096), &[0; 4096], "memory named in foreign packets");
    testbed.check_traffic(&conn);
}

/// On port 4791 too, a software peer's packets come from its own port: whoever else sends from its
/// host is dropped. Hardware does not say which port it sends from, and is believed.
fn other_ports_of_the_peers_host_are_dropped(_: &Fixture) {
    let hub = Hub::new();
    let end = |at: &str| hub.endpoint(at.parse().unwrap()).unwrap();
    let testbed = Testbed::over(end("10.0.0.1:4791"), end("10.0.0.2:4791"), ProgressMode::Manual);
    let mut stranger = end("10.0.0.1:5000");
    let flow = stranger.open(testbed.b.context.path().local, 0).unwrap();
    let mut reset = |qp: &Qp, psn: u32| {
        // An answer that ends the connection if it is believed.
        let aeth =
            Extension::Aeth(Aeth { syndrome: Syndrome::Nak(Nak::RemoteOperational), msn: 0 });
        let headers = Headers::new(Opcode::Acknowledge, qp.number(), Psn::new(psn), aeth);
        let slot = stranger.reserve(flow, headers.wire_len(0)).unwrap();
        headers.emit(slot, 0).unwrap();
        stranger.commit();
        stranger.flush().unwrap();
        testbed.poll_for(Duration::from_millis(1));
    };
    let dropped = || testbed.b.context.stats().unwrap().dropped;
    let strangers = || dropped().iter().find(|(reason, _)| *reason == "stranger").unwrap().1;
    for known in [true, false] {
        let (a, b) = (
            testbed.test_qp(&testbed.a, QpOptions::default()),
            testbed.test_qp(&testbed.b, QpOptions::default()),
        );
        let mut there = a.qp.endpoint();
        assert_eq!(there.source_port, 4791);
        if !known {
            there.source_port = 0;
        }
        b.qp.connect(&there).unwrap();
        let psn = b.qp.endpoint().psn;
        // Its peer is not connected yet, so nothing but the forged answer comes.
        b.qp.post_send(&[SendRequest::new(1, WrOp::Send)]).unwrap();
        testbed.poll_for(Duration::from_millis(1));
        let before = strangers();
        reset(&b.qp, psn);
        assert_eq!(strangers() - before, u64::from(known));
        let state = if known { State::Rts } else { State::Err };
        assert_eq!(b.qp.state().unwrap(), state);
        if known {
            a.qp.connect(&b.qp.endpoint()).unwrap();
            a.qp.post_receive(&[ReceiveRequest { id: 2, data: &[] }]).unwrap();
            testbed.done(&b.sends, 1);
            testbed.done(&a.receives, 2);
        }
    }
}
