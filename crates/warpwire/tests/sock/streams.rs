//! Bytes in both directions, in pieces of every size; ends and timeouts.

use std::io::{Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use warpwire::sock::SockOptions;
use warpwire::sock::device::SockOption;
use warpwire_apps::pattern;

use crate::sock::peer::{Family, Peer};
use crate::sock::scripted::{GPUNET, KernelOp, scramble};
use crate::sock::testbed::{STREAM, Testbed, errno, loopbacks};
use testkit::{cases, deadline};

cases!(Testbed; CASES:
    one_byte_there_and_back,
    accepted_and_connected_sockets_behave_alike,
    random_pieces_both_ways,
    small_rings_carry_megabytes,
    an_ordered_end_is_zero,
    half_closed_by_the_kernel,
    half_closed_by_the_peer,
    receiving_is_shut_down,
    shutdown_of_receiving_releases_the_sender,
    sending_after_shutdown_is_a_broken_pipe,
    bytes_are_sent_after_close,
    non_blocking_calls,
    calls_with_timeouts,
    connecting_without_waiting,
    two_kernels_talk,
    gpunets_echo_client,
);

fn one_byte_there_and_back(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    for at in loopbacks() {
        let (socket, mut peer) = scripted.connected(at);
        assert_eq!(scripted.send(socket, b"a"), 1);
        let mut byte = [0];
        peer.read_exact(&mut byte).unwrap();
        assert_eq!(&byte, b"a");
        peer.write_all(b"b").unwrap();
        assert_eq!(scripted.recv(socket, 10).unwrap(), b"b");
        assert_eq!(scripted.send(socket, b""), 0);
        scripted.expect(KernelOp::Close, &[socket], None);
    }
}

fn accepted_and_connected_sockets_behave_alike(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    for at in loopbacks() {
        for (socket, mut peer) in [scripted.connected(at), scripted.accepted(at)] {
            scripted.start(KernelOp::Echo, &[socket], None);
            let mut random = 7;
            for size in [1_usize, 63, 64, 65, 4095, 4096, 4097, 65_536, 65_537, 200_000] {
                let sent: Vec<u8> = (0..size).map(|_| scramble(&mut random) as u8).collect();
                let mut writer = peer.try_clone();
                let copy = sent.clone();
                let writing = std::thread::spawn(move || writer.write_all(&copy).unwrap());
                let mut back = vec![0; size];
                peer.read_exact(&mut back).unwrap();
                writing.join().unwrap();
                assert!(sent == back, "{size} bytes: wrong data");
            }
            peer.shutdown(Shutdown::Write);
            let echoed = scripted.finish().result;
            assert_eq!(echoed, 1 + 63 + 64 + 65 + 4095 + 4096 + 4097 + 65_536 + 65_537 + 200_000);
            scripted.expect(KernelOp::Close, &[socket], None);
        }
    }
}

/// The test's end of a stream: sends one pattern and compares another.
fn exchange(mut peer: Peer, sends: u64, expects: u64, total: usize) {
    let mut writer = peer.try_clone();
    let writing = std::thread::spawn(move || {
        let (mut bytes, mut random, mut done) = (vec![0; total], 99, 0);
        pattern::fill_bytes(&mut bytes, sends, 0);
        while done < total {
            let piece = (1 + scramble(&mut random) as usize % 100_000).min(total - done);
            writer.write_all(&bytes[done..done + piece]).unwrap();
            done += piece;
        }
    });
    let mut found = vec![0; total];
    let mut wanted = vec![0; total];
    peer.read_exact(&mut found).unwrap();
    pattern::fill_bytes(&mut wanted, expects, 0);
    let wrong = wanted.iter().zip(&found).position(|(a, b)| a != b);
    assert_eq!(wrong, None, "of {total} bytes");
    writing.join().unwrap();
}

fn both_ways(testbed: &Testbed, options: SockOptions, totals: &[usize], most: u64) {
    let harness = testbed.harness_with(2, options);
    let (sender, receiver) = (&harness.scripted_kernels[0], &harness.scripted_kernels[1]);
    for (number, total) in totals.iter().enumerate() {
        let at = loopbacks()[number % 2];
        let (socket, peer) = sender.connected(at);
        // Two blocks use the two directions of one socket concurrently.
        sender.start(KernelOp::StreamOut, &[socket, 11, *total as u64, most], None);
        receiver.start(KernelOp::StreamIn, &[socket, 12, *total as u64, most], None);
        exchange(peer, 12, 11, *total);
        assert_eq!(sender.finish().result, *total as i64);
        assert_eq!(receiver.finish().result, *total as i64, "or -84: a byte differs");
        sender.expect(KernelOp::Close, &[socket], None);
    }
}

fn random_pieces_both_ways(testbed: &Testbed) {
    let totals = [1, 2, 100, 65_535, 65_537, 1 << 20, 16 << 20];
    both_ways(testbed, testbed.options().with_sockets(16), &totals, 50_000);
}

fn small_rings_carry_megabytes(testbed: &Testbed) {
    let options = testbed.options().with_sockets(16).with_ring(4096).with_arena(1 << 20);
    both_ways(testbed, options, &[1_000_000, 300_001], 9_000);
}

fn an_ordered_end_is_zero(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, mut peer) = scripted.accepted(loopbacks()[0]);
    peer.write_all(b"last words").unwrap();
    drop(peer);
    assert_eq!(scripted.recv(socket, 4).unwrap(), b"last");
    assert_eq!(scripted.recv(socket, 100).unwrap(), b" words");
    assert_eq!(scripted.recv(socket, 100).unwrap(), b"");
    assert_eq!(scripted.recv(socket, 100).unwrap(), b"", "repeatedly");
}

fn half_closed_by_the_kernel(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    for at in loopbacks() {
        let (socket, mut peer) = scripted.connected(at);
        assert_eq!(scripted.send(socket, b"question"), 8);
        scripted.expect(KernelOp::Shutdown, &[socket, 1], None);
        let mut text = String::new();
        peer.read_to_string(&mut text).unwrap();
        assert_eq!(text, "question");
        peer.write_all(b"answer").unwrap();
        assert_eq!(scripted.recv(socket, 100).unwrap(), b"answer");
        scripted.expect(KernelOp::Close, &[socket], None);
    }
}

fn half_closed_by_the_peer(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, mut peer) = scripted.connected(loopbacks()[1]);
    peer.write_all(b"question").unwrap();
    peer.shutdown(Shutdown::Write);
    assert_eq!(scripted.recv(socket, 100).unwrap(), b"question");
    assert_eq!(scripted.recv(socket, 100).unwrap(), b"");
    assert_eq!(scripted.send(socket, b"answer"), 6);
    scripted.expect(KernelOp::Close, &[socket], None);
    let mut text = String::new();
    peer.read_to_string(&mut text).unwrap();
    assert_eq!(text, "answer");
}

fn receiving_is_shut_down(testbed: &Testbed) {
    let harness = testbed.harness(2);
    let (scripted, other) = (&harness.scripted_kernels[0], &harness.scripted_kernels[1]);
    let (socket, mut peer) = scripted.connected(loopbacks()[0]);
    // A blocked call returns too.
    scripted.start(KernelOp::Recv, &[socket, 0, 10], None);
    std::thread::sleep(Duration::from_millis(20));
    assert!(!scripted.is_done());
    other.expect(KernelOp::Shutdown, &[socket, 0], None);
    assert_eq!(scripted.finish().result, 0);
    assert_eq!(scripted.send(socket, b"still sends"), 11);
    let mut text = [0; 11];
    peer.read_exact(&mut text).unwrap();
    assert_eq!(scripted.call(KernelOp::Shutdown, &[socket, 2], None).result, 0);
    assert_eq!(peer.read(&mut text).unwrap(), 0);
}

fn shutdown_of_receiving_releases_the_sender(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, peer) = scripted.connected(loopbacks()[0]);
    let mut writer = peer.try_clone();
    std::thread::scope(|scope| {
        // More than all buffers hold: the writer blocks.
        let writing =
            scope.spawn(move || (0..400).try_for_each(|_| writer.write_all(&[7; 100_000])));
        std::thread::sleep(Duration::from_millis(80));
        assert!(!writing.is_finished());
        // Bytes that had arrived are still available, and so is a borrowed span.
        assert_eq!(scripted.recv(socket, 3).unwrap(), [7; 3]);
        scripted.expect(KernelOp::Borrow, &[socket, 0, 100], None);
        scripted.expect(KernelOp::Shutdown, &[socket, 0], None);
        scripted.expect(KernelOp::Consume, &[socket, 0, 100], None);
        let wrote = writing.join().unwrap().map_err(|error| error.kind());
        match testbed.family {
            // A TCP sender is not notified; its bytes are discarded.
            Family::Inet => assert_eq!(wrote, Ok(())),
            Family::Warp => assert_eq!(wrote, Err(std::io::ErrorKind::BrokenPipe)),
        }
    });
    // The other direction continues, and ends in an orderly way.
    let mut peer = peer;
    assert_eq!(scripted.send(socket, b"all is well"), 11);
    let mut text = [0; 11];
    peer.read_exact(&mut text).unwrap();
    scripted.expect(KernelOp::Close, &[socket], None);
    // TCP sends a reset if there are unread bytes at close.
    let end = peer.read(&mut text).map_err(|error| error.kind());
    let resets = testbed.family == Family::Inet && end == Err(std::io::ErrorKind::ConnectionReset);
    assert!(end == Ok(0) || resets, "{end:?}");
}

fn sending_after_shutdown_is_a_broken_pipe(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, _peer) = scripted.connected(loopbacks()[0]);
    scripted.expect(KernelOp::Shutdown, &[socket, 1], None);
    assert_eq!(scripted.send(socket, b"x"), errno(Errno::PIPE));
}

fn bytes_are_sent_after_close(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let (socket, mut peer) = scripted.accepted(loopbacks()[0]);
    // The kernel closes before the peer reads: with more than its ring holds, if the operating
    // system has buffers.
    let total = if testbed.family == Family::Warp { 60_001_u64 } else { 400_000 };
    scripted.expect(KernelOp::StreamOut, &[socket, 5, total, 60_000], None);
    scripted.expect(KernelOp::Close, &[socket], None);
    std::thread::sleep(Duration::from_millis(30));
    let mut found = Vec::new();
    peer.read_to_end(&mut found).unwrap();
    let mut wanted = vec![0; total as usize];
    pattern::fill_bytes(&mut wanted, 5, 0);
    assert!(found == wanted, "{} of {total} bytes arrived", found.len());
}

fn non_blocking_calls(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let at = loopbacks()[0];
    let (socket, mut peer) = scripted.connected(at);
    let again = errno(Errno::AGAIN);
    scripted.expect(KernelOp::Set, &[socket, SockOption::NonBlocking as u64, 1], None);
    assert_eq!(scripted.recv(socket, 10), Err(again));
    peer.write_all(b"now").unwrap();
    crate::sock::testbed::until("it arrives", || {
        scripted.recv(socket, 10).is_ok_and(|bytes| bytes == b"now")
    });
    // The peer does not read: after a partial send nothing fits any more.
    let piece = vec![7; 60_000];
    let (mut total, mut partial) = (0, false);
    loop {
        match scripted.send(socket, &piece) {
            sent if sent == again => break,
            sent => {
                assert!(sent > 0, "errno {}", -sent);
                partial |= sent < 60_000;
                total += sent as usize;
            }
        }
        assert!(total < 1 << 30);
    }
    assert!(partial, "a piece was sent partially");
    // The operating system may take a little more after that; nothing is lost.
    scripted.expect(KernelOp::Shutdown, &[socket, 1], None);
    let mut found = Vec::new();
    peer.read_to_end(&mut found).unwrap();
    assert_eq!(found.len(), total);
    let (listener, name) = scripted.listener(at, 4);
    scripted.expect(KernelOp::Set, &[listener, SockOption::NonBlocking as u64, 1], None);
    assert_eq!(scripted.call(KernelOp::Accept, &[listener], None).result, again);
    // Blocking again.
    scripted.expect(KernelOp::Set, &[listener, SockOption::NonBlocking as u64, 0], None);
    scripted.start(KernelOp::Accept, &[listener], None);
    std::thread::sleep(Duration::from_millis(10));
    assert!(!scripted.is_done(), "it blocks again");
    let _late = testbed.family.dial(name);
    assert!(scripted.finish().result > 0);
}

fn calls_with_timeouts(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let at = loopbacks()[0];
    let (socket, peer) = scripted.connected(at);
    let limit = Duration::from_millis(60);
    let nanos = limit.as_nanos() as u64;
    let late = errno(Errno::TIMEDOUT);
    scripted.expect(KernelOp::Set, &[socket, SockOption::ReceiveTimeout as u64, nanos], None);
    let start = Instant::now();
    assert_eq!(scripted.recv(socket, 1), Err(late));
    let most = deadline(limit * 40);
    assert!(start.elapsed() >= limit && start.elapsed() < most, "{:?}", start.elapsed());
    scripted.expect(KernelOp::Set, &[socket, SockOption::SendTimeout as u64, nanos], None);
    let piece = vec![1; 600_000];
    let mut results = (0..1000).map(|_| scripted.send(socket, &piece));
    let stopped = results.find(|sent| *sent < 600_000).unwrap();
    assert!(stopped == late || stopped > 0, "a part, or nothing");
    crate::sock::testbed::until("nothing can be sent", || {
        scripted.send(socket, &piece[..1000]) == late
    });
    let (listener, _) = scripted.listener(at, 4);
    scripted.expect(KernelOp::Set, &[listener, SockOption::ReceiveTimeout as u64, nanos], None);
    assert_eq!(scripted.call(KernelOp::Accept, &[listener], None).result, late);
    drop(peer);
}

fn connecting_without_waiting(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let at = loopbacks()[0];
    let server = testbed.family.serve(at);
    let name = server.local_addr();
    let socket = scripted.socket(at, STREAM);
    scripted.expect(KernelOp::Set, &[socket, SockOption::NonBlocking as u64, 1], None);
    let begun = scripted.call(KernelOp::Connect, &[socket], Some(name)).result;
    assert!(begun == 0 || begun == errno(Errno::INPROGRESS), "{begun}");
    let again = scripted.call(KernelOp::Connect, &[socket], Some(name)).result;
    assert!([Errno::ISCONN, Errno::ALREADY].map(errno).contains(&again), "{again}");
    let mut peer = server.accept();
    crate::sock::testbed::until("it is connected", || scripted.send(socket, b"!") == 1);
    let mut byte = [0];
    peer.read_exact(&mut byte).unwrap();
}

fn gpunets_echo_client(testbed: &Testbed) {
    let _alone = GPUNET.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    let harness = testbed.harness(2);
    let (server, client) = (&harness.scripted_kernels[0], &harness.scripted_kernels[1]);
    let (listener, name) = server.listener(loopbacks()[0], 4);
    client.start(KernelOp::Gpunet, &[client.kind(STREAM), 20, 65_537], Some(name));
    let accepted = server.expect(KernelOp::Accept, &[listener], None) as u64;
    assert_eq!(server.call(KernelOp::Echo, &[accepted], None).result, 20 * 65_537);
    assert_eq!(client.finish().result, 20 * 65_537, "or -84: a byte differs");
    // Without a listener.
    server.expect(KernelOp::Close, &[listener], None);
    let refused = client.call(KernelOp::Gpunet, &[client.kind(STREAM), 1, 8], Some(name)).result;
    assert_eq!(refused, errno(Errno::CONNREFUSED));
}

fn two_kernels_talk(testbed: &Testbed) {
    let harness = testbed.harness(2);
    let (server, client) = (&harness.scripted_kernels[0], &harness.scripted_kernels[1]);
    for at in loopbacks() {
        let (listener, name) = server.listener(at, 4);
        server.start(KernelOp::Accept, &[listener], None);
        let socket = client.socket(at, STREAM);
        client.expect(KernelOp::Connect, &[socket], Some(name));
        let accepted = server.finish().result as u64;
        server.start(KernelOp::StreamIn, &[accepted, 3, 3_000_000, 30_000], None);
        client.expect(KernelOp::StreamOut, &[socket, 3, 3_000_000, 70_000], None);
        assert_eq!(server.finish().result, 3_000_000);
        client.expect(KernelOp::Close, &[socket], None);
        assert_eq!(server.recv(accepted, 1).unwrap(), b"");
        server.expect(KernelOp::Close, &[accepted], None);
        server.expect(KernelOp::Close, &[listener], None);
    }
}
