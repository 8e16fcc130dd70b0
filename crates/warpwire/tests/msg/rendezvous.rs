//! The rendezvous of ranks: success, and every kind of failure.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicU16, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketType};
use warpwire::error::Kind;
use warpwire::msg::{Comm, CommOptions, Launcher, RankInfo, Rendezvous};
use warpwire::{Error, Result};

use crate::msg::fixture::{Fixture, test_timeout};
use testkit::cases;

cases!(Fixture; ONCE:
    one_rank_alone,
    a_missing_rank,
    a_wrong_token,
    a_wrong_size,
    a_rank_that_joins_twice,
    a_port_in_use,
    no_listener_at_the_address,
    another_version,
    foreign_connections_are_refused,
    a_rank_that_disconnects_early,
    the_address_file_is_replaced_and_removed,
    strangers_that_dawdle_delay_no_rank,
    a_stranger_does_not_outlast_the_timeout,
    names_in_place_of_the_address_file,
    every_address_of_a_name_is_tried,
);

const SHORT: Duration = Duration::from_secs(2);

/// An address that nobody uses, of this process alone: a port of 127.0.0.1 that is free now may be
/// another's a moment later.
fn free_address() -> String {
    static NEXT_PORT: AtomicU16 = AtomicU16::new(20_000);
    let [_, high, middle, low] = std::process::id().to_be_bytes();
    let port = NEXT_PORT.fetch_add(1, Ordering::Relaxed);
    format!("127.{}.{middle}.{low}:{port}", 128 | high)
}

fn rank_info(rank: usize, size: usize, address: &str, token: &str) -> RankInfo {
    RankInfo {
        rank,
        size,
        local_rank: rank,
        rendezvous: Rendezvous::Address(address.to_owned()),
        token: token.to_owned(),
        launcher: Launcher::Run,
    }
}

fn open(rank_info: RankInfo, timeout: Duration) -> JoinHandle<Result<Comm>> {
    let options = CommOptions::default().with_timeout(timeout);
    std::thread::spawn(move || Comm::open(rank_info, options))
}

fn expect_error(thread: JoinHandle<Result<Comm>>) -> Error {
    thread.join().unwrap().unwrap_err()
}

fn one_rank_alone(_: &Fixture) {
    let comm = open(rank_info(0, 1, "127.0.0.1:0", ""), test_timeout()).join().unwrap().unwrap();
    assert_eq!((comm.rank(), comm.size()), (0, 1));
    comm.barrier(test_timeout()).unwrap();
    comm.finish(test_timeout()).unwrap();
    let none = Comm::open(rank_info(1, 1, "127.0.0.1:0", ""), CommOptions::default()).unwrap_err();
    assert_eq!(none.kind(), &Kind::InvalidArgument);
}

fn a_missing_rank(_: &Fixture) {
    let address = free_address();
    let start = Instant::now();
    let ranks = [0, 2].map(|rank| open(rank_info(rank, 4, &address, ""), SHORT));
    for (rank, thread) in [0, 2].into_iter().zip(ranks) {
        let error = expect_error(thread).to_string();
        // The ranks that joined learn which ones are missing.
        assert!(error.contains("2 of 4 did not join: rank 1, rank 3"), "rank {rank}: {error}");
    }
    assert!(start.elapsed() < Duration::from_secs(10), "{:?}", start.elapsed());
}

fn a_wrong_token(_: &Fixture) {
    let address = free_address();
    let host = open(rank_info(0, 2, &address, "right"), SHORT);
    let error = expect_error(open(rank_info(1, 2, &address, "wrong"), SHORT));
    assert!(error.to_string().contains("token is not that of this job"), "{error}");
    let error = expect_error(host);
    assert!(error.to_string().contains("rank 1"), "{error}");
    assert_eq!(error.kind(), &Kind::Timeout);
}

fn a_wrong_size(_: &Fixture) {
    let address = free_address();
    let host = open(rank_info(0, 2, &address, ""), test_timeout());
    let error = expect_error(open(rank_info(1, 3, &address, ""), test_timeout()));
    assert!(error.to_string().contains("its size is 3 ranks, rank 0's is 2"), "{error}");
    // A rank of the same job with other parameters makes rank 0 fail immediately.
    let error = expect_error(host);
    assert!(error.to_string().contains("connect to rank 1"), "{error}");
}

fn a_rank_that_joins_twice(_: &Fixture) {
    let address = free_address();
    let host = open(rank_info(0, 3, &address, ""), test_timeout());
    let duplicates = [0; 2].map(|_| open(rank_info(1, 3, &address, ""), test_timeout()));
    for thread in duplicates.into_iter().chain([host]) {
        let error = expect_error(thread).to_string();
        assert!(error.contains("two processes have rank 1"), "{error}");
    }
}

fn a_port_in_use(_: &Fixture) {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap().to_string();
    let error = expect_error(open(rank_info(0, 2, &address, ""), SHORT));
    let text = error.to_string();
    assert!(
        text.contains(&address) && text.contains("WARPWIRE_MASTER with another port"),
        "{text}"
    );
    // An address that is not local.
    let error = expect_error(open(rank_info(0, 2, "192.0.2.1:4000", ""), SHORT));
    assert!(error.to_string().contains("rank 0 must run on that host"), "{error}");
    let error = expect_error(open(rank_info(0, 2, "no.such.host.invalid:4000", ""), SHORT));
    assert!(error.to_string().contains("no.such.host.invalid"), "{error}");
}

fn no_listener_at_the_address(_: &Fixture) {
    // Bound but not listening: another case could take a port that is merely free.
    let held = rustix::net::socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    rustix::net::bind(&held, &SocketAddr::from(([127, 0, 0, 1], 0))).unwrap();
    let address = rustix::net::getsockname(&held).unwrap();
    let address = SocketAddr::try_from(address).unwrap().to_string();
    let start = Instant::now();
    let error = expect_error(open(rank_info(1, 2, &address, ""), SHORT));
    assert!(error.to_string().contains(&address), "{error}");
    assert!(error.to_string().contains("start rank 0"), "{error}");
    assert!(start.elapsed() < Duration::from_secs(10));
}

/// Connects to rank 0 as soon as it listens.
fn connect_to(address: &str) -> TcpStream {
    let start = Instant::now();
    loop {
        match TcpStream::connect(address) {
            Ok(stream) => return stream,
            Err(_) if start.elapsed() < test_timeout() => {
                std::thread::sleep(Duration::from_millis(5))
            }
            Err(why) => panic!("{why}"),
        }
    }
}

/// Sends a line to rank 0 and returns its answer.
fn send_line(address: &str, line: &str) -> String {
    let mut stream = connect_to(address);
    stream.set_read_timeout(Some(test_timeout())).unwrap();
    stream.write_all(line.as_bytes()).unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer
}

fn another_version(_: &Fixture) {
    let address = free_address();
    let host = open(rank_info(0, 2, &address, "t"), test_timeout());
    let join = r#"{"warpwire":1,"words":{"Join":{"version":99,"token":"t","rank":1,"size":2,"listens":"127.0.0.1:1"}}}"#;
    let answer = send_line(&address, &format!("{join}\n"));
    for text in [answer, expect_error(host).to_string()] {
        assert!(text.contains("protocol version 99, rank 0 uses 1"), "{text}");
    }
}

fn foreign_connections_are_refused(_: &Fixture) {
    let address = free_address();
    let host = open(rank_info(0, 2, &address, "t"), test_timeout());
    assert_eq!(send_line(&address, "GET / HTTP/1.1\r\n\r\n"), "");
    assert_eq!(send_line(&address, "{\"warpwire\":7,\"words\":1}\n"), "");
    let answer = send_line(&address, "{\"warpwire\":1,\"words\":\"Ready\"}\n");
    assert!(answer.contains("it sent no rank"), "{answer}");
    let wrong = r#"{"warpwire":1,"words":{"Join":{"version":1,"token":"x","rank":1,"size":2,"listens":"127.0.0.1:1"}}}"#;
    assert!(send_line(&address, &format!("{wrong}\n")).contains("token"));
    // A connection that sends nothing delays no rank.
    let silent = TcpStream::connect(&address).unwrap();
    let other = open(rank_info(1, 2, &address, "t"), test_timeout());
    let (host, other) = (host.join().unwrap().unwrap(), other.join().unwrap().unwrap());
    drop(silent);
    std::thread::scope(|scope| {
        scope.spawn(|| host.barrier(test_timeout()).unwrap());
        other.barrier(test_timeout()).unwrap();
    });
}

fn a_rank_that_disconnects_early(_: &Fixture) {
    let address = free_address();
    let host = open(rank_info(0, 3, &address, "t"), test_timeout());
    let join = r#"{"warpwire":1,"words":{"Join":{"version":1,"token":"t","rank":1,"size":3,"listens":"127.0.0.1:1"}}}"#;
    // Rank 1 joins and disconnects.
    let start = Instant::now();
    let mut stream = loop {
        match TcpStream::connect(&address) {
            Ok(stream) => break stream,
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    };
    stream.write_all(format!("{join}\n").as_bytes()).unwrap();
    std::thread::sleep(Duration::from_millis(50));
    drop(stream);
    let error = expect_error(host).to_string();
    assert!(error.contains("connect to rank 1") && error.contains("left before all"), "{error}");
    assert!(start.elapsed() < test_timeout() / 2);
}

fn the_address_file_is_replaced_and_removed(_: &Fixture) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("address");
    let at = |rank| {
        let mut rank_info = rank_info(rank, 2, "", "");
        rank_info.rendezvous = Rendezvous::File(path.clone());
        rank_info
    };
    // A stale file of an earlier job, with an address where nothing listens.
    std::fs::write(&path, format!("{}\n", free_address())).unwrap();
    let second = open(at(1), test_timeout());
    std::thread::sleep(Duration::from_millis(50));
    let ranks = [open(at(0), test_timeout()), second].map(|rank| rank.join().unwrap().unwrap());
    assert!(!path.exists());
    drop(ranks);
    let nowhere = RankInfo { rendezvous: Rendezvous::File("/no/such/folder/x".into()), ..at(0) };
    let error = Comm::open(nowhere, CommOptions::default()).unwrap_err();
    assert!(error.to_string().contains("/no/such/folder/x"), "{error}");
}

/// Connects, and sends a blank every 50 ms until it is disconnected.
fn drip(address: &str) -> JoinHandle<()> {
    let mut stream = connect_to(address);
    stream.write_all(b" ").unwrap();
    std::thread::spawn(move || {
        while stream.write_all(b" ").is_ok() {
            std::thread::sleep(Duration::from_millis(50));
        }
    })
}

/// Rank 0 reads several connections at a time.
fn strangers_that_dawdle_delay_no_rank(_: &Fixture) {
    let address = free_address();
    let start = Instant::now();
    let host = open(rank_info(0, 2, &address, "t"), test_timeout());
    let strangers: Vec<_> = (0..4).map(|_| drip(&address)).collect();
    let other = open(rank_info(1, 2, &address, "t"), test_timeout());
    let ranks = [host, other].map(|rank| rank.join().unwrap().unwrap());
    assert!(start.elapsed() < test_timeout() / 2, "{:?}", start.elapsed());
    drop(ranks);
    strangers.into_iter().for_each(|stranger| stranger.join().unwrap());
}

/// The timeout covers the whole rendezvous, not each byte that arrives.
fn a_stranger_does_not_outlast_the_timeout(_: &Fixture) {
    let address = free_address();
    let start = Instant::now();
    let host = open(rank_info(0, 2, &address, "t"), SHORT);
    let stranger = drip(&address);
    let error = expect_error(host);
    assert!(error.to_string().contains("1 of 2 did not join: rank 1"), "{error}");
    assert!(start.elapsed() < testkit::deadline(Duration::from_secs(6)), "{:?}", start.elapsed());
    stranger.join().unwrap();
    // The other way round: a stranger in the place of rank 0.
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let dripping = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        while stream.write_all(b" ").is_ok() {
            std::thread::sleep(Duration::from_millis(50));
        }
    });
    let start = Instant::now();
    let error = expect_error(open(rank_info(1, 2, &address, "t"), SHORT));
    assert!(error.to_string().contains("no complete message"), "{error}");
    assert!(start.elapsed() < testkit::deadline(Duration::from_secs(6)), "{:?}", start.elapsed());
    dripping.join().unwrap();
}

/// A FIFO, a link and a folder, where others may have put them.
fn names_in_place_of_the_address_file(_: &Fixture) {
    let folder = tempfile::tempdir().unwrap();
    let (fifo, link) = (folder.path().join("fifo"), folder.path().join("link"));
    rustix::fs::mknodat(
        rustix::fs::CWD,
        &fifo,
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RWXU,
        0,
    )
    .unwrap();
    std::fs::write(folder.path().join("file"), "127.0.0.1:1\n").unwrap();
    std::os::unix::fs::symlink(folder.path().join("file"), &link).unwrap();
    for path in [fifo, link, folder.path().to_owned()] {
        let start = Instant::now();
        let mut second = rank_info(1, 2, "", "");
        second.rendezvous = Rendezvous::File(path.clone());
        let error = expect_error(open(second, Duration::from_millis(100)));
        assert!(error.to_string().contains("has not published its address"), "{path:?}: {error}");
        let limit = testkit::deadline(Duration::from_secs(6));
        assert!(start.elapsed() < limit, "{path:?}: {:?}", start.elapsed());
    }
}

/// `localhost` may be ::1 first, and rank 0 listen on 127.0.0.1.
fn every_address_of_a_name_is_tried(_: &Fixture) {
    use std::net::ToSocketAddrs;
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let name = format!("localhost:{port}");
    if !name.to_socket_addrs().is_ok_and(|mut found| found.any(|address| address.is_ipv4())) {
        return; // a machine whose localhost has no IPv4 address
    }
    let host = open(rank_info(0, 2, &format!("127.0.0.1:{port}"), ""), test_timeout());
    let other = open(rank_info(1, 2, &name, ""), test_timeout());
    drop([host, other].map(|rank| rank.join().unwrap().unwrap()));
}
