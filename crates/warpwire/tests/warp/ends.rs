//! How connections end, by will and by death; and peers that lie.

use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::process::Stdio;
use std::time::{Duration, Instant};

use warpwire::sock::warp::NetOptions;

use crate::warp::world::{Way, World, byte, check_all, send_all, soon};
use testkit::{Process, Role, cases, until};

cases!(World; CASES:
    a_reset_reaches_both_directions,
    a_peer_that_closes_is_a_broken_pipe,
    a_dropped_stream_still_delivers,
    a_dropped_listener_refuses,
    a_peer_process_that_is_killed,
    another_process_as_the_peer,
    sleepers_are_woken_by_a_reset,
    a_reader_that_shuts_down_is_a_broken_pipe,
);

fn way_of(text: &str) -> Way {
    Way::ALL.into_iter().find(|way| format!("{way:?}") == text).unwrap()
}

/// What a process of the suite does.
pub fn play(role: &str) {
    let (role, way) = role.rsplit_once(' ').unwrap();
    let way = way_of(way);
    if role == "rest" {
        println!("{}", crate::warp::streams::rest(way));
        return;
    }
    let net = way.net(NetOptions::default());
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
        "say and hang" => {
            stream.write_all(b"last words").unwrap();
            std::thread::sleep(soon());
        }
        other => panic!("no part is called {other}"),
    }
}

/// A process that plays a part; it does not outlive this.
fn start(role: &str, way: Way) -> Process {
    let role = Role::new("warp", format!("{role} {way:?}"));
    Process::start(role.command().stdout(Stdio::piped()))
}

/// The share of a processor that a process takes whose one reader waits.
pub fn spent_at_rest(way: Way) -> f64 {
    start("rest", way).line().parse().unwrap()
}

fn another_process_as_the_peer(world: &World) {
    let mut player = start("echo", world.way);
    let address = player.line();
    let stream = world.here.connect(address.as_str()).unwrap();
    stream.set_read_timeout(Some(soon())).unwrap();
    std::thread::scope(|scope| {
        scope.spawn(|| send_all(&stream, 5, 3_000_000, 200_000));
        check_all(&stream, 5, 3_000_000, 200_000);
    });
    drop(stream);
    assert!(player.wait().success());
}

fn a_peer_process_that_is_killed(world: &World) {
    let mut player = start("say and hang", world.way);
    let address = player.line();
    let mut stream = world.here.connect(address.as_str()).unwrap();
    stream.set_read_timeout(Some(soon())).unwrap();
    let mut words = [0; 4];
    stream.read_exact(&mut words).unwrap();
    let mut writer = stream.try_clone().unwrap();
    std::thread::scope(|scope| {
        // One waits for bytes, another for room.
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
        assert!(begun.elapsed() < Duration::from_secs(10));
    });
}

fn a_reset_reaches_both_directions(world: &World) {
    let (mut here, mut there) = world.pair();
    there.write_all(b"before").unwrap();
    let mut word = [0; 3];
    here.read_exact(&mut word).unwrap();
    there.reset();
    assert_eq!(there.write(b"x").unwrap_err().kind(), ErrorKind::ConnectionReset);
    drop(there);
    let mut rest = Vec::new();
    let error = here.read_to_end(&mut rest).unwrap_err();
    assert_eq!((rest.as_slice(), error.kind()), (&b"ore"[..], ErrorKind::ConnectionReset));
    assert!(error.to_string().contains("connect anew"), "{error}");
    assert_eq!(here.write(b"x").unwrap_err().kind(), ErrorKind::ConnectionReset);
}

fn sleepers_are_woken_by_a_reset(world: &World) {
    let (here, there) = world.pair();
    here.set_read_timeout(None).unwrap();
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| (&here).read(&mut [0]).unwrap_err().kind());
        std::thread::sleep(Duration::from_millis(50));
        there.reset();
        assert_eq!(sleeper.join().unwrap(), ErrorKind::ConnectionReset);
    });
    let (here, _there) = world.pair();
    std::thread::scope(|scope| {
        let sleeper = scope.spawn(|| (&here).read(&mut [0]).unwrap());
        std::thread::sleep(Duration::from_millis(50));
        here.shutdown(Shutdown::Read).unwrap();
        assert_eq!(sleeper.join().unwrap(), 0);
    });
}

fn a_peer_that_closes_is_a_broken_pipe(world: &World) {
    let (mut here, there) = world.pair();
    drop(there);
    assert_eq!(here.read(&mut [0]).unwrap(), 0);
    let mut found = None;
    until("an error", || {
        found = here.write(b"x").err();
        found.is_some()
    });
    assert_eq!(found.unwrap().kind(), ErrorKind::BrokenPipe);
    assert_eq!(here.read(&mut [0]).unwrap(), 0, "still the end");
}

fn a_dropped_stream_still_delivers(world: &World) {
    for nonblocking in [false, true] {
        let (here, mut there) = world.pair();
        here.set_nonblocking(nonblocking).unwrap();
        let bytes: Vec<u8> = (0..200_000).map(|at| byte(9, at)).collect();
        assert_eq!((&mut &here).write(&bytes).unwrap(), bytes.len());
        drop(here);
        let mut found = Vec::new();
        there.read_to_end(&mut found).unwrap();
        assert!(found == bytes);
    }
}

fn a_dropped_listener_refuses(world: &World) {
    let listener = world.listen();
    let address = listener.local_addr().unwrap();
    let mut orphan = world.here.connect(address).unwrap();
    orphan.set_read_timeout(Some(soon())).unwrap();
    drop(listener);
    assert_eq!(orphan.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    until("a refusal", || world.here.connect(address).is_err());
    let error = world.here.connect(address).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused);
}

fn a_reader_that_shuts_down_is_a_broken_pipe(world: &World) {
    let (mut here, mut there) = world.pair();
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
        assert!(!blocked.is_finished(), "nobody reads");
        let begun = Instant::now();
        there.shutdown(Shutdown::Read).unwrap();
        let error = blocked.join().unwrap();
        assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
        assert_eq!(error.kind(), ErrorKind::BrokenPipe, "{error}");
        assert!(error.to_string().contains("receiving"), "{error}");
    });
    assert_eq!(there.read(&mut [0; 8]).unwrap(), 0);
    // The other direction goes on, and one that does not block is told as well.
    there.write_all(b" and after").unwrap();
    let mut words = [0; 16];
    here.read_exact(&mut words).unwrap();
    assert_eq!(&words, b"before and after");
    here.set_nonblocking(true).unwrap();
    assert_eq!(here.write(b"x").unwrap_err().kind(), ErrorKind::BrokenPipe);
}
