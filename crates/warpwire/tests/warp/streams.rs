//! All bytes arrive, in order.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::time::{Duration, Instant};

use warpwire::sock::warp::NetOptions;

use crate::warp::testbed::{TestLink, Testbed, check_all, send_all, test_timeout};
use testkit::{cases, cpu_share};

cases!(Testbed; CASES:
    all_sizes_in_random_pieces_both_ways,
    small_rings_and_unequal_ones,
    half_close_leaves_the_other_direction,
    a_ping_pong_of_small_messages,
    a_thousand_connections,
    an_accept_storm,
    timeouts,
    names_and_paths,
    an_idle_reader_is_cheap,
);

fn both_ways(testbed: &Testbed, len: usize, max_chunk: usize) {
    let (here, there) = testbed.pair();
    std::thread::scope(|scope| {
        scope.spawn(|| send_all(&here, 1, len, max_chunk));
        scope.spawn(|| send_all(&there, 2, len, max_chunk));
        scope.spawn(|| check_all(&there, 1, len, max_chunk));
        check_all(&here, 2, len, max_chunk);
    });
}

fn all_sizes_in_random_pieces_both_ways(testbed: &Testbed) {
    for (len, max_chunk) in [(0, 1), (1, 1), (2, 7), (4095, 100), (65_537, 5000)] {
        both_ways(testbed, len, max_chunk);
    }
    both_ways(testbed, 1 << 20, 100_000);
    both_ways(testbed, 16 << 20, 700_000);
}

fn small_rings_and_unequal_ones(testbed: &Testbed) {
    for (ring, stage) in [(4096, 4096), (4096, 65_536), (65_536, 4096)] {
        let options = NetOptions::default().with_ring(ring).with_send_buffer(stage);
        let small =
            Testbed { here: testbed.test_link.net(options), ..Testbed::new(testbed.test_link) };
        both_ways(&small, 300_001, 9000);
    }
    for (ring, stage) in [(5000, 4096), (4096, 2048), (1 << 31, 4096)] {
        let options = NetOptions::default().with_ring(ring).with_send_buffer(stage);
        let error = warpwire::sock::warp::Net::new(options).unwrap_err();
        assert!(error.to_string().contains("power of two"), "{error}");
    }
}

fn half_close_leaves_the_other_direction(testbed: &Testbed) {
    let (mut here, mut there) = testbed.pair();
    here.write_all(b"question").unwrap();
    here.shutdown(Shutdown::Write).unwrap();
    assert_eq!(here.write(b"more").unwrap_err().kind(), ErrorKind::BrokenPipe);
    let mut text = String::new();
    there.read_to_string(&mut text).unwrap();
    assert_eq!((text.as_str(), there.read(&mut [0]).unwrap()), ("question", 0));
    there.write_all(b"answer").unwrap();
    drop(there);
    let mut text = String::new();
    here.read_to_string(&mut text).unwrap();
    assert_eq!((text.as_str(), here.read(&mut [0]).unwrap()), ("answer", 0), "the end is repeated");
    let (here, mut there) = testbed.pair();
    here.shutdown(Shutdown::Read).unwrap();
    assert_eq!((&here).read(&mut [0]).unwrap(), 0);
    // Discarded by the peer, or READ_CLOSED has arrived already.
    let sent = there.write_all(b"unread").map_err(|why| why.kind());
    assert!(matches!(sent, Ok(()) | Err(ErrorKind::BrokenPipe)), "{sent:?}");
}

fn a_ping_pong_of_small_messages(testbed: &Testbed) {
    let (mut here, mut there) = testbed.pair();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let mut message = [0; 64];
            while there.read_exact(&mut message).is_ok() {
                there.write_all(&message).unwrap();
            }
        });
        for round in 0_u64..2000 {
            let message = [round as u8; 64];
            here.write_all(&message).unwrap();
            let mut back = [0; 64];
            here.read_exact(&mut back).unwrap();
            assert_eq!(back, message);
        }
        drop(here);
    });
}

/// `many`, or the number of connections that this process has descriptors for.
fn descriptors_for(many: u64) -> u64 {
    /// For both ends of a connection, with a margin for cases that run concurrently.
    const EACH: u64 = 16;
    use rustix::process::{Resource, getrlimit, setrlimit};
    let mut limit = getrlimit(Resource::Nofile);
    limit.current = limit.maximum;
    setrlimit(Resource::Nofile, limit).unwrap();
    let fit = limit.maximum.map_or(many, |most| most / EACH);
    if fit < many {
        eprintln!("skipped: {} of {many} connections (too few descriptors)", many - fit);
    }
    fit.min(many)
}

fn a_thousand_connections(testbed: &Testbed) {
    let options = NetOptions::default().with_ring(4096).with_send_buffer(4096);
    let testbed = Testbed::with(testbed.test_link, options);
    let listener = testbed.listen();
    let address = listener.local_addr().unwrap();
    let many = descriptors_for(1000);
    let pairs: Vec<_> = (0..many)
        .map(|_| {
            let here = testbed.here.connect(address).unwrap();
            (here, listener.accept().unwrap().0)
        })
        .collect();
    for (number, (here, _)) in pairs.iter().enumerate() {
        (&mut &*here).write_all(&(number as u32).to_le_bytes()).unwrap();
    }
    for (number, (_, there)) in pairs.iter().enumerate().rev() {
        let mut found = [0; 4];
        (&mut &*there).read_exact(&mut found).unwrap();
        assert_eq!(u32::from_le_bytes(found), number as u32);
        (&mut &*there).write_all(&found).unwrap();
    }
    for (number, (here, there)) in pairs.into_iter().enumerate() {
        let mut found = [0; 4];
        (&mut &here).read_exact(&mut found).unwrap();
        assert_eq!(u32::from_le_bytes(found), number as u32);
        drop(here);
        assert_eq!(
            (&mut &there).read(&mut found).unwrap(),
            0,
            "the end of the stream, not a reset"
        );
    }
}

fn an_accept_storm(testbed: &Testbed) {
    const THREADS: usize = 8;
    const EACH: usize = 40;
    let listener = testbed.listen();
    let address = listener.local_addr().unwrap();
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let here = &testbed.here;
            scope.spawn(move || {
                for round in 0..EACH {
                    let mut stream = here.connect(address).unwrap();
                    stream.set_read_timeout(Some(test_timeout())).unwrap();
                    let word = ((thread * EACH + round) as u64).to_le_bytes();
                    stream.write_all(&word).unwrap();
                    let mut back = [0; 8];
                    stream.read_exact(&mut back).unwrap();
                    assert_eq!(back, word);
                }
            });
        }
        let mut seen = std::collections::HashSet::new();
        for stream in listener.incoming().take(THREADS * EACH) {
            let mut stream = stream.unwrap();
            let mut word = [0; 8];
            stream.read_exact(&mut word).unwrap();
            stream.write_all(&word).unwrap();
            assert!(seen.insert(word), "each once");
        }
    });
}

fn timeouts(testbed: &Testbed) {
    let (mut here, there) = testbed.pair();
    let brief = Duration::from_millis(30);
    here.set_read_timeout(Some(brief)).unwrap();
    here.set_write_timeout(Some(brief)).unwrap();
    assert_eq!(here.read_timeout().unwrap(), Some(brief));
    let begun = Instant::now();
    let error = here.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(error.to_string().contains("no data arrived in 30ms"), "{error}");
    assert!(begun.elapsed() >= brief && begun.elapsed() < test_timeout());
    let mut sent = 0;
    let error = loop {
        match here.write(&[7; 50_000]) {
            Ok(count) => sent += count,
            Err(error) => break error,
        }
    };
    assert_eq!((error.kind(), sent), (ErrorKind::TimedOut, 256 << 10), "the peer's ring is full");
    // What was sent has arrived, and the connection continues.
    let mut bytes = vec![0; sent];
    (&mut &there).read_exact(&mut bytes).unwrap();
    assert!(bytes.iter().all(|byte| *byte == 7));
    here.set_write_timeout(Some(test_timeout())).unwrap();
    here.write_all(b"on").unwrap();
    assert_eq!(
        here.set_read_timeout(Some(Duration::ZERO)).unwrap_err().kind(),
        ErrorKind::InvalidInput
    );
}

fn names_and_paths(testbed: &Testbed) {
    let (here, there) = testbed.pair();
    assert_eq!(here.peer_addr().unwrap(), there.local_addr().unwrap());
    assert_eq!(here.local_addr().unwrap(), there.peer_addr().unwrap());
    let kind = here.path().unwrap().kind;
    let expected = if testbed.test_link == TestLink::Udp { "udp" } else { "shm" };
    assert_eq!(kind.to_string(), expected);
}

fn an_idle_reader_is_cheap(testbed: &Testbed) {
    // In its own process, because other cases run concurrently.
    let spent = crate::warp::ends::idle_cpu_time(testbed.test_link);
    assert!(spent < 0.03, "{:.1} % of a CPU while idle", spent * 100.0);
}

/// The child process: a thread waits for a byte that is sent late.
pub fn rest(test_link: TestLink) -> f64 {
    let testbed = Testbed::new(test_link);
    let (mut here, mut there) = testbed.pair();
    let reader = std::thread::spawn(move || here.read(&mut [0]).unwrap());
    std::thread::sleep(Duration::from_millis(300));
    let [share] = cpu_share([std::process::id()], Duration::from_secs(1));
    there.write_all(b"x").unwrap();
    assert_eq!(reader.join().unwrap(), 1);
    share
}
