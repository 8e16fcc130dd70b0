//! How connections end: close, shutdown, reset, and death of the peer.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::process::Stdio;
use std::time::{Duration, Instant};

use warpwire::sock::warp::NetOptions;

use crate::warp::testbed::{TestLink, Testbed, byte, check_all, send_all, test_timeout};
use testkit::{Process, Role, cases, deadline, until};

cases!(Testbed; CASES:
    a_reset_reaches_both_directions,
    a_peer_that_closes_is_a_broken_pipe,
    a_dropped_stream_still_delivers,
    a_dropped_listener_refuses,
    a_peer_process_that_is_killed,
    another_process_as_the_peer,
    sleepers_are_woken_by_a_reset,
    a_reader_that_shuts_down_is_a_broken_pipe,
);

fn test_link_of(text: &str) -> TestLink {
    TestLink::ALL.into_iter().find(|test_link| format!("{test_link:?}") == text).unwrap()
}

/// The role of a child process of the suite.
pub fn run_role(role: &str) {
    let (role, test_link) = role.rsplit_once(' ').unwrap();
    let test_link = test_link_of(test_link);
    if role == "rest" {
        println!("{}", crate::warp::streams::rest(test_link));
        return;
    }
    let net = test_link.net(NetOptions::default());
    let listener = net.listen("127.0.0.1:0").unwrap();
    println!("{}", listener.local_addr().unwrap());
    let (mut stream, _) = listener.accept().unwrap();
    match role {
        "echo" => {
            let mut buffer = vec![0; 100_000];
            while let Ok(count @ 1..) = stream.read(&mut buffer) {
                stream.write_all(&buffer[..count]).unwrap();
            }
        }
        "write and hang" => {
            stream.write_all(b"last words").unwrap();
            std::thread::sleep(test_timeout());
        }
        other => panic!("unknown role {other}"),
    }
}

/// Starts a child process with a role; it is killed when this is dropped.
fn start(role: &str, test_link: TestLink) -> Process {
    let role = Role::new("warp", format!("{role} {test_link:?}"));
    Process::start(role.command().stdout(Stdio::piped()))
}

/// The fraction of a CPU that a process uses whose only reader waits.
pub fn idle_cpu_time(test_link: TestLink) -> f64 {
    start("rest", test_link).line().parse().unwrap()
}

fn another_process_as_the_peer(testbed: &Testbed) {
    let mut player = start("echo", testbed.test_link);
    let address = player.line();
    let stream = testbed.here.connect(address.as_str()).unwrap();
    stream.set_read_timeout(Some(test_timeout())).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| send_all(&stream, 5, 3_000_000, 200_000));
        check_all(&stream, 5, 3_000_000, 200_000);
    });
    drop(stream);
    assert!(player.wait().success());
}

fn a_peer_process_that_is_killed(testbed: &Testbed) {
    let mut player = start("write and hang", testbed.test_link);
    let address = player.line();
    let mut stream = testbed.here.connect(address.as_str()).unwrap();
    stream.set_read_timeout(Some(test_timeout())).unwrap();
    let mut words = [0; 4];
    stream.read_exact(&mut words).unwrap();
    let mut writer = stream.try_clone().unwrap();
    std::thread::scope(|scope| {
        // One thread waits for bytes, another for room.
        let blocked = scope.spawn(move || {
            loop {
                if let Err(error) = writer.write(&[1; 100_000]) {
                    return error.kind();
                }
            }
        });
        std::thread::sleep(Duration::from_millis(100));
        let begun = player.kill();
        let mut rest = Vec::new();
        let error = stream.read_to_end(&mut rest).unwrap_err();
        assert_eq!((rest.as_slice(), error.kind()), (&b" words"[..], ErrorKind::ConnectionReset));
        let kind = blocked.join().unwrap();
        assert!(matches!(kind, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe), "{kind}");
        assert!(begun.elapsed() < deadline(Duration::from_secs(10)));
    });
}

fn a_reset_reaches_both_directions(testbed: &Testbed) {
    let (mut here, mut there) = testbed.pair();
    there.write_all(b"before").unwrap();
    let mut word = [0; 3];
    here.read_exact(&mut word).unwrap();
    there.reset();
    assert_eq!(there.write(b"x").unwrap_err().kind(), ErrorKind::ConnectionReset);
    drop(there);
    let mut rest = Vec::new();
    let error = here.read_to_end(&mut rest).unwrap_err();
    assert_eq!((rest.as_slice(), error.kind()), (&b"ore"[..], ErrorKind::ConnectionReset));
    assert!(error.to_string().contains("reconnect"), "{error}");
    assert_eq!(here.write(b"x").unwrap_err().kind(), ErrorKind::ConnectionReset);
}

fn sleepers_are_woken_by_a_reset(testbed: &Testbed) {
    let (here, there) = testbed.pair();
    here.set_read_timeout(None).unwrap();
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| (&here).read(&mut [0]).unwrap_err().kind());
        std::thread::sleep(Duration::from_millis(50));
        there.reset();
        assert_eq!(sleeper.join().unwrap(), ErrorKind::ConnectionReset);
    });
    let (here, _there) = testbed.pair();
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| (&here).read(&mut [0]).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        here.shutdown(Shutdown::Read).unwrap();
        assert_eq!(sleeper.join().unwrap(), 0);
    });
}

fn a_peer_that_closes_is_a_broken_pipe(testbed: &Testbed) {
    let (mut here, there) = testbed.pair();
    drop(there);
    assert_eq!(here.read(&mut [0]).unwrap(), 0);
    let mut found = None;
    until("an error", || {
        found = here.write(b"x").err();
        found.is_some()
    });
    assert_eq!(found.unwrap().kind(), ErrorKind::BrokenPipe);
    assert_eq!(here.read(&mut [0]).unwrap(), 0, "still the end of the stream");
}

fn a_dropped_stream_still_delivers(testbed: &Testbed) {
    for nonblocking in [false, true] {
        let (here, mut there) = testbed.pair();
        here.set_nonblocking(nonblocking).unwrap();
        let bytes: Vec<u8> = (0..200_000).map(|at| byte(9, at)).collect();
        assert_eq!((&mut &here).write(&bytes).unwrap(), bytes.len());
        drop(here);
        let mut found = Vec::new();
        there.read_to_end(&mut found).unwrap();
        assert!(found == bytes);
    }
}

fn a_dropped_listener_refuses(testbed: &Testbed) {
    let listener = testbed.listen();
    let address = listener.local_addr().unwrap();
    let mut dropped_stream = testbed.here.connect(address).unwrap();
    dropped_stream.set_read_timeout(Some(test_timeout())).unwrap();
    drop(listener);
    assert_eq!(dropped_stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    // One that was accepted meanwhile is reset.
    until("a refusal", || {
        let error = testbed.here.connect(address).err();
        error.is_some_and(|error| error.kind() == ErrorKind::ConnectionRefused)
    });
}

fn a_reader_that_shuts_down_is_a_broken_pipe(testbed: &Testbed) {
    let (mut here, mut there) = testbed.pair();
    there.write_all(b"before").unwrap();
    let mut writer = here.try_clone().unwrap();
    std::thread::scope(|scope| {
        let blocked = scope.spawn(move || {
            loop {
                if let Err(error) = writer.write(&[1; 100_000]) {
                    return error;
                }
            }
        });
        std::thread::sleep(Duration::from_millis(50));
        assert!(!blocked.is_finished(), "the peer does not read");
        let begun = Instant::now();
        there.shutdown(Shutdown::Read).unwrap();
        let error = blocked.join().unwrap();
        assert!(begun.elapsed() < deadline(Duration::from_secs(5)), "{:?}", begun.elapsed());
        assert_eq!(error.kind(), ErrorKind::BrokenPipe, "{error}");
        assert!(error.to_string().contains("receiving"), "{error}");
    });
    assert_eq!(there.read(&mut [0; 8]).unwrap(), 0);
    // The other direction continues, and a non-blocking writer gets the error as well.
    there.write_all(b" and after").unwrap();
    let mut words = [0; 16];
    here.read_exact(&mut words).unwrap();
    assert_eq!(&words, b"before and after");
    here.set_nonblocking(true).unwrap();
    assert_eq!(here.write(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
}
