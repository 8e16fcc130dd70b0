//! Many sockets, many concurrent connections, and reuse of slots.

use std::io::{Read, Write};
use std::time::Duration;

use crate::sock::peer::Peer;
use crate::sock::scripted::KernelOp;
use crate::sock::testbed::{STREAM, Testbed, loopbacks, until};
use testkit::cases;

cases!(Testbed; CASES:
    blocks_share_a_listener,
    blocks_share_a_stream,
    slots_are_reused,
    more_connections_than_slots,
    an_idle_host_is_cheap;
    change: a_thousand_sockets_echo,
    an_accept_storm,
    blocks_share_a_storm,
    pausing_blocks_share_a_storm,
);

fn a_thousand_sockets_echo(testbed: &Testbed) {
    let options = testbed.options().with_sockets(1100).with_ring(4096).with_fitting_arena();
    let harness = testbed.harness_with(1, options);
    let scripted = harness.first();
    let (listener, name) = scripted.listener(loopbacks()[0], 2000);
    let mut peers = Vec::new();
    let mut handles = Vec::new();
    for _ in 0..1000 {
        peers.push(testbed.family.dial(name));
        handles.extend((scripted.expect(KernelOp::Accept, &[listener], None) as u32).to_le_bytes());
    }
    assert_eq!(harness.host.stats().open, 1001);
    scripted.put(0, &handles);
    scripted.start(KernelOp::EchoMany, &[0, 1000], None);
    for (number, peer) in peers.iter_mut().enumerate() {
        peer.write_all(&(number as u64).to_le_bytes()).unwrap();
    }
    for (number, mut peer) in peers.into_iter().enumerate() {
        let mut back = [0; 8];
        peer.read_exact(&mut back).unwrap();
        assert_eq!(u64::from_le_bytes(back), number as u64);
    }
    assert_eq!(scripted.finish().result, 8000);
    until("all are closed", || harness.host.stats().open == 1);
}

fn an_accept_storm(testbed: &Testbed) {
    let options = testbed.options().with_sockets(600).with_ring(4096).with_fitting_arena();
    let harness = testbed.harness_with(1, options);
    let scripted = harness.first();
    let (listener, name) = scripted.listener(loopbacks()[0], 1024);
    let family = testbed.family;
    let storm: Vec<_> = (0..4)
        .map(|_| {
            std::thread::spawn(move || -> Vec<Peer> {
                (0..125).map(|_| family.dial(name)).collect()
            })
        })
        .collect();
    let peers: Vec<_> = storm.into_iter().flat_map(|storm| storm.join().unwrap()).collect();
    let mut seen = std::collections::HashSet::new();
    for _ in 0..500 {
        let answer = scripted.call(KernelOp::Accept, &[listener], None);
        assert!(answer.result > 0, "{answer:?}");
        assert!(seen.insert(answer.address.unwrap()), "each peer once");
        scripted.expect(KernelOp::Close, &[answer.result as u64], None);
    }
    for mut peer in peers {
        assert!(seen.contains(&peer.local_addr()));
        assert_eq!(peer.read(&mut [0]).unwrap(), 0, "an orderly close");
    }
}

fn blocks_share_a_listener(testbed: &Testbed) {
    let harness = testbed.harness(4);
    let (listener, name) = harness.first().listener(loopbacks()[1], 64);
    for round in 0..5 {
        for scripted in &harness.scripted_kernels {
            scripted.start(KernelOp::Accept, &[listener], None);
        }
        let mut peers: Vec<_> = (0..4).map(|_| testbed.family.dial(name)).collect();
        let handles: Vec<_> =
            harness.scripted_kernels.iter().map(|scripted| scripted.finish()).collect();
        for (scripted, accepted) in harness.scripted_kernels.iter().zip(&handles) {
            assert!(accepted.result > 0, "{accepted:?}");
            let peer =
                peers.iter_mut().find(|peer| Some(peer.local_addr()) == accepted.address).unwrap();
            let text = format!("round {round}");
            assert_eq!(scripted.send(accepted.result as u64, text.as_bytes()), text.len() as i64);
            let mut back = vec![0; text.len()];
            peer.read_exact(&mut back).unwrap();
            assert_eq!(back, text.as_bytes());
            scripted.expect(KernelOp::Close, &[accepted.result as u64], None);
        }
    }
}

/// Concurrent updates of the counters must not look like an impossible counter of the peer.
fn blocks_share_a_stream(testbed: &Testbed) {
    let options = testbed.options().with_ring(4096);
    let harness = testbed.harness_with(4, options);
    let (socket, mut peer) = harness.first().connected(loopbacks()[0]);
    for scripted in &harness.scripted_kernels {
        scripted.start(KernelOp::Echo, &[socket], None);
    }
    let bytes: Vec<u8> = (0..1_000_000_u32).map(|i| (i % 251) as u8).collect();
    let mut writer = peer.try_clone();
    let outgoing = bytes.clone();
    let writing = std::thread::spawn(move || {
        for piece in outgoing.chunks(777) {
            writer.write_all(piece).unwrap();
        }
        writer.shutdown(std::net::Shutdown::Write);
    });
    let mut back = vec![0; bytes.len()];
    peer.read_exact(&mut back).unwrap();
    writing.join().unwrap();
    // Pieces may interleave; no byte is lost or duplicated.
    let byte_counts = |bytes: &[u8]| {
        let mut counts = [0; 256];
        bytes.iter().for_each(|byte| counts[usize::from(*byte)] += 1);
        counts
    };
    assert_eq!(byte_counts(&back), byte_counts(&bytes));
    let echoed: i64 =
        harness.scripted_kernels.iter().map(|scripted| scripted.finish().result).sum();
    assert_eq!(echoed, bytes.len() as i64);
    harness.first().expect(KernelOp::Close, &[socket], None);
    assert_eq!(peer.read(&mut [0]).unwrap(), 0);
}

/// A block that loses the race for a connection must not accept one that is not there.
fn blocks_share_a_storm(testbed: &Testbed) {
    accept_a_storm(testbed);
}

/// The same with blocks that pause between checking and acting.
fn pausing_blocks_share_a_storm(testbed: &Testbed) {
    for _ in 0..8 {
        accept_a_storm(&testbed.with_jitter(Duration::from_millis(1)));
    }
}

fn accept_a_storm(testbed: &Testbed) {
    let options = testbed.options().with_sockets(250).with_ring(4096).with_fitting_arena();
    let harness = testbed.harness_with(4, options);
    let (listener, name) = harness.first().listener(loopbacks()[0], 256);
    let family = testbed.family;
    let storm: Vec<_> = (0..2)
        .map(|_| {
            std::thread::spawn(move || -> Vec<Peer> {
                (0..100).map(|_| family.dial(name)).collect()
            })
        })
        .collect();
    let mut seen = std::collections::HashSet::new();
    for _ in 0..50 {
        for scripted in &harness.scripted_kernels {
            scripted.start(KernelOp::Accept, &[listener], None);
        }
        for scripted in &harness.scripted_kernels {
            let accepted = scripted.finish();
            assert!(accepted.result > 0, "{accepted:?}");
            assert!(seen.insert(accepted.address.unwrap()), "each peer once");
        }
    }
    let peers: Vec<_> = storm.into_iter().flat_map(|storm| storm.join().unwrap()).collect();
    assert!(peers.iter().all(|peer| seen.contains(&peer.local_addr())));
    assert_eq!(harness.host.stats().misused, 0);
}

fn slots_are_reused(testbed: &Testbed) {
    let options = testbed.options().with_sockets(3).with_arena(1 << 20);
    let harness = testbed.harness_with(1, options);
    let scripted = harness.first();
    let mut handles = std::collections::HashSet::new();
    for round in 0..200_u32 {
        let (socket, mut peer) = scripted.connected(loopbacks()[round as usize % 2]);
        assert!(handles.insert(socket), "handles are unique");
        assert_eq!(scripted.send(socket, &round.to_le_bytes()), 4);
        scripted.expect(KernelOp::Close, &[socket], None);
        let mut bytes = Vec::new();
        peer.read_to_end(&mut bytes).unwrap();
        assert_eq!(bytes, round.to_le_bytes());
    }
    until("all are closed", || harness.host.stats().open == 0);
}

fn more_connections_than_slots(testbed: &Testbed) {
    let options = testbed.options().with_sockets(4).with_arena(1 << 20);
    let harness = testbed.harness_with(1, options);
    let scripted = harness.first();
    let (listener, name) = scripted.listener(loopbacks()[0], 64);
    // Connections without a free slot wait until one is freed.
    let family = testbed.family;
    let peers: Vec<_> = (0..12).map(|_| std::thread::spawn(move || family.dial(name))).collect();
    for _ in 0..12 {
        let accepted = scripted.expect(KernelOp::Accept, &[listener], None) as u64;
        assert_eq!(scripted.send(accepted, b"welcome"), 7);
        scripted.expect(KernelOp::Close, &[accepted], None);
    }
    for peer in peers {
        let mut peer = peer.join().unwrap();
        let mut text = String::new();
        peer.read_to_string(&mut text).unwrap();
        assert_eq!(text, "welcome");
    }
    let spare = scripted.socket(loopbacks()[0], STREAM);
    scripted.expect(KernelOp::Close, &[spare], None);
}

fn an_idle_host_is_cheap(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (_listener, _) = scripted.listener(loopbacks()[0], 16);
    let cpu = || thread_time(&format!("sock {}", harness.host.device().label()));
    std::thread::sleep(Duration::from_millis(200));
    let Some(before) = cpu() else { return };
    std::thread::sleep(Duration::from_millis(500));
    let used = cpu().unwrap_or(before).saturating_sub(before);
    // Other cases run concurrently and have threads of the same name, so only the one with the
    // least CPU time counts.
    assert!(used < 150_000_000, "{used} ns of 500 ms idle");
}

/// The least CPU time of any thread of that name in this process, in nanoseconds.
fn thread_time(name: &str) -> Option<u64> {
    let tasks = std::fs::read_dir("/proc/self/task").ok()?;
    let times = tasks.flatten().filter_map(|task| {
        let comm = std::fs::read_to_string(task.path().join("comm")).ok()?;
        let stat = std::fs::read_to_string(task.path().join("schedstat")).ok()?;
        (comm.trim() == name).then(|| stat.split_whitespace().next()?.parse().ok()).flatten()
    });
    times.min()
}
