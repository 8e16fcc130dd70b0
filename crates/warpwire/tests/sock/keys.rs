//! The key-value server: its answers, and bad clients.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use warpwire::sock::SockHost;
use warpwire_apps::kv::{KvOptions, KvServer};

use crate::sock::scripted::test_timeout;
use crate::sock::testbed::{Testbed, until};
use testkit::cases;

cases!(Testbed; CASES:
    commands_are_answered,
    keys_of_many_clients,
    a_contended_counter,
    a_pipeline_in_pieces,
    values_of_every_length,
    a_full_store_is_reported,
    malformed_input_closes_its_connection_only,
    huge_lengths_are_refused,
    incomplete_commands_time_out,
    a_client_that_does_not_read,
    too_many_clients,
    a_server_stops_and_another_takes_its_place,
    bad_options_and_addresses,
);

const ANYWHERE: SocketAddr =
    SocketAddr::V4(std::net::SocketAddrV4::new(std::net::Ipv4Addr::LOCALHOST, 0));

fn host(testbed: &Testbed) -> SockHost {
    let options = testbed.options().with_sockets(256).with_ring(16 << 10).with_fitting_arena();
    SockHost::start(&testbed.gpu, options).unwrap()
}

fn small() -> KvOptions {
    KvOptions { buckets: 64, workers: 2, clients: 32, ..KvOptions::at(ANYWHERE) }
}

fn client(server: &KvServer<'_>) -> TcpStream {
    let stream = TcpStream::connect(server.address()).unwrap();
    stream.set_read_timeout(Some(test_timeout())).unwrap();
    stream.set_nodelay(true).unwrap();
    stream
}

/// A command in the wire format.
fn command(words: &[&[u8]]) -> Vec<u8> {
    let mut bytes = format!("*{}\r\n", words.len()).into_bytes();
    for word in words {
        bytes.extend(format!("${}\r\n", word.len()).as_bytes());
        bytes.extend(*word);
        bytes.extend(b"\r\n");
    }
    bytes
}

/// Sends, and expects exactly this answer.
fn ask(stream: &mut TcpStream, bytes: &[u8], answer: &[u8]) {
    stream.write_all(bytes).unwrap();
    let mut found = vec![0; answer.len()];
    stream.read_exact(&mut found).unwrap_or_else(|error| {
        panic!("{:?}: {error}", String::from_utf8_lossy(&bytes[..bytes.len().min(60)]))
    });
    assert_eq!(String::from_utf8_lossy(&found), String::from_utf8_lossy(answer));
}

/// Everything until the server closes the connection.
fn rest(stream: &mut TcpStream) -> String {
    let mut text = Vec::new();
    match stream.read_to_end(&mut text) {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset),
    }
    String::from_utf8_lossy(&text).into_owned()
}

fn commands_are_answered(testbed: &Testbed) {
    let host = host(testbed);
    let server = testbed.kv(&host, small());
    let mut one = client(&server);
    let cases: [(&[&[u8]], &str); 24] = [
        (&[b"PING"], "+PONG\r\n"),
        (&[b"ping", b"hello"], "$5\r\nhello\r\n"),
        (&[b"ECHO", b""], "$0\r\n\r\n"),
        (&[b"GET", b"k"], "$-1\r\n"),
        (&[b"SET", b"k", b"v1"], "+OK\r\n"),
        (&[b"GET", b"k"], "$2\r\nv1\r\n"),
        (&[b"set", b"k", b"longer value"], "+OK\r\n"),
        (&[b"get", b"k"], "$12\r\nlonger value\r\n"),
        (&[b"EXISTS", b"k", b"no"], ":1\r\n"),
        (&[b"INCR", b"n"], ":1\r\n"),
        (&[b"INCR", b"n"], ":2\r\n"),
        (&[b"DECR", b"n"], ":1\r\n"),
        (&[b"INCR", b"k"], "-ERR value is not an integer or out of range\r\n"),
        (&[b"MGET", b"k", b"no", b"n"], "*3\r\n$12\r\nlonger value\r\n$-1\r\n$1\r\n1\r\n"),
        (&[b"DBSIZE"], ":2\r\n"),
        (&[b"DEL", b"k", b"n", b"no"], ":2\r\n"),
        (&[b"GET", b"k"], "$-1\r\n"),
        (&[b"SET", b"", b"empty key"], "+OK\r\n"),
        (&[b"GET", b""], "$9\r\nempty key\r\n"),
        (&[b"COMMAND", b"DOCS"], "*0\r\n"),
        (&[b"CONFIG", b"GET", b"save"], "*0\r\n"),
        (&[b"FLUSHEVERYTHING"], "-ERR unknown command\r\n"),
        (&[b"GET"], "-ERR wrong number of arguments\r\n"),
        (&[b"SET", b"k", b"v", b"EX", b"5"], "-ERR syntax error\r\n"),
    ];
    for (words, answer) in cases {
        ask(&mut one, &command(words), answer.as_bytes());
    }
    ask(&mut one, b"PING\r\n", b"+PONG\r\n");
    ask(&mut one, b"SET typed by-hand\r\nGET typed\r\n", b"+OK\r\n$7\r\nby-hand\r\n");
    ask(&mut one, &command(&[b"GET", &[b'k'; 113]]), b"-ERR the key is too long\r\n");
    ask(&mut one, &command(&[b"QUIT"]), b"+OK\r\n");
    assert_eq!(rest(&mut one), "");
    assert_eq!(server.stats().unwrap().commands, 29);
}

fn keys_of_many_clients(testbed: &Testbed) {
    let host = host(testbed);
    let server = testbed.kv(&host, KvOptions { workers: 4, ..small() });
    let clients: Vec<_> = (0..8).map(|_| client(&server)).collect();
    let working: Vec<_> = clients
        .into_iter()
        .enumerate()
        .map(|(number, mut stream)| {
            std::thread::spawn(move || {
                for round in 0..30 {
                    let key = format!("key {number} {round}");
                    let value = format!("value {}", number * round);
                    ask(
                        &mut stream,
                        &command(&[b"SET", key.as_bytes(), value.as_bytes()]),
                        b"+OK\r\n",
                    );
                    stream.write_all(&command(&[b"INCR", b"together"])).unwrap();
                    let mut sink = [0; 1];
                    while sink[0] != b'\n' {
                        stream.read_exact(&mut sink).unwrap();
                    }
                    let wanted = format!("${}\r\n{value}\r\n", value.len());
                    ask(&mut stream, &command(&[b"GET", key.as_bytes()]), wanted.as_bytes());
                }
            })
        })
        .collect();
    for one in working {
        one.join().unwrap();
    }
    let mut last = client(&server);
    ask(&mut last, &command(&[b"GET", b"together"]), b"$3\r\n240\r\n");
    ask(&mut last, &command(&[b"DBSIZE"]), b":241\r\n");
}

/// All clients increment one key, while others read it, and set and delete its neighbours.
fn a_contended_counter(testbed: &Testbed) {
    let host = host(testbed);
    // One bucket: all keys share one lock.
    let server = testbed.kv(&host, KvOptions { workers: 4, buckets: 1, ..small() });
    let answer = |stream: &mut TcpStream, words: &[&[u8]]| {
        stream.write_all(&command(words)).unwrap();
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            let mut byte = [0];
            stream.read_exact(&mut byte).unwrap();
            line.push(byte[0]);
        }
        String::from_utf8(line).unwrap()
    };
    let number = |line: String| line.trim_start_matches(':').trim().parse::<i64>().unwrap();
    let clients: Vec<_> = (0..8).map(|_| client(&server)).collect();
    std::thread::scope(|scope| {
        for (index, mut stream) in clients.into_iter().enumerate() {
            scope.spawn(move || {
                let (mut last, key) = (0, format!("own {index}"));
                for _ in 0..40 {
                    if index < 6 {
                        // The values that one client sees never decrease.
                        let now = number(answer(&mut stream, &[b"INCR", b"hot"]));
                        assert!(now > last, "{now} after {last}");
                        last = now;
                    } else {
                        assert_eq!(answer(&mut stream, &[b"SET", key.as_bytes(), b"7"]), "+OK\r\n");
                        assert_eq!(answer(&mut stream, &[b"INCR", key.as_bytes()]), ":8\r\n");
                        assert_eq!(answer(&mut stream, &[b"DEL", key.as_bytes()]), ":1\r\n");
                    }
                }
            });
        }
    });
    let mut last = client(&server);
    ask(&mut last, &command(&[b"GET", b"hot"]), b"$3\r\n240\r\n");
    ask(&mut last, &command(&[b"DBSIZE"]), b":1\r\n");
    // Text and numbers convert to each other.
    let cases: [(&[&[u8]], &str); 11] = [
        (&[b"SET", b"hot", b"-5"], "+OK\r\n"),
        (&[b"GET", b"hot"], "$2\r\n-5\r\n"),
        (&[b"INCR", b"hot"], ":-4\r\n"),
        (&[b"MGET", b"hot", b"cold"], "*2\r\n$2\r\n-4\r\n$-1\r\n"),
        (&[b"SET", b"hot", b"four"], "+OK\r\n"),
        (&[b"INCR", b"hot"], "-ERR value is not an integer or out of range\r\n"),
        (&[b"GET", b"hot"], "$4\r\nfour\r\n"),
        (&[b"SET", b"hot", b"999999999999999998"], "+OK\r\n"),
        (&[b"INCR", b"hot"], ":999999999999999999\r\n"),
        (&[b"INCR", b"hot"], ":1000000000000000000\r\n"),
        (&[b"INCR", b"hot"], "-ERR value is not an integer or out of range\r\n"),
    ];
    for (words, answer) in cases {
        ask(&mut last, &command(words), answer.as_bytes());
    }
    ask(&mut last, &command(&[b"GET", b"hot"]), b"$19\r\n1000000000000000000\r\n");
    ask(&mut last, &command(&[b"DEL", b"hot"]), b":1\r\n");
    ask(&mut last, &command(&[b"INCR", b"hot"]), b":1\r\n");
}

fn a_pipeline_in_pieces(testbed: &Testbed) {
    let host = host(testbed);
    let server = testbed.kv(&host, small());
    let mut stream = client(&server);
    let mut bytes = Vec::new();
    for number in 0..500_u32 {
        let key = (number % 50).to_string();
        bytes.extend(command(&[b"SET", key.as_bytes(), number.to_string().as_bytes()]));
        bytes.extend(command(&[b"GET", key.as_bytes()]));
    }
    let mut writer = stream.try_clone().unwrap();
    let writing = std::thread::spawn(move || {
        for piece in bytes.chunks(777) {
            writer.write_all(piece).unwrap();
        }
    });
    for number in 0..500_u32 {
        let text = number.to_string();
        ask(&mut stream, b"", format!("+OK\r\n${}\r\n{text}\r\n", text.len()).as_bytes());
    }
    writing.join().unwrap();
}

fn values_of_every_length(testbed: &Testbed) {
    let host = host(testbed);
    let server = testbed.kv(&host, small());
    let mut stream = client(&server);
    for len in [0, 1, 15, 16, 17, 100, 1023, 1024] {
        let value = vec![b'x'; len];
        ask(&mut stream, &command(&[b"SET", b"v", &value]), b"+OK\r\n");
        let mut wanted = format!("${len}\r\n").into_bytes();
        wanted.extend(&value);
        wanted.extend(b"\r\n");
        ask(&mut stream, &command(&[b"GET", b"v"]), &wanted);
    }
    // One byte more than the maximum length of a value, which is that of any argument.
    stream.write_all(&command(&[b"SET", b"v", &[b'x'; 1025]])).unwrap();
    assert_eq!(rest(&mut stream), "-ERR Protocol error: invalid bulk length\r\n");
}

fn a_full_store_is_reported(testbed: &Testbed) {
    let host = host(testbed);
    let server = testbed.kv(&host, KvOptions { buckets: 1, ..small() });
    let mut stream = client(&server);
    for number in 0..16_u8 {
        ask(&mut stream, &command(&[b"SET", &[number], b"x"]), b"+OK\r\n");
    }
    let full = b"-OOM the store has no room for this key\r\n";
    ask(&mut stream, &command(&[b"SET", b"more", b"x"]), full);
    ask(&mut stream, &command(&[b"INCR", b"more"]), full);
    ask(&mut stream, &command(&[b"SET", &[3], b"other"]), b"+OK\r\n");
    ask(&mut stream, &command(&[b"DEL", &[7]]), b":1\r\n");
    ask(&mut stream, &command(&[b"SET", b"more", b"x"]), b"+OK\r\n");
}

fn malformed_input_closes_its_connection_only(testbed: &Testbed) {
    let host = host(testbed);
    let server = testbed.kv(&host, small());
    let mut good = client(&server);
    for malformed in [
        &b"*-7\r\n"[..],
        b"*1000000000\r\n",
        b"*65\r\n",
        b"*1\r\n+OK\r\n",
        b"*1\r\n$-1\r\n",
        b"*2\r\n$3\r\nGET\r\n:5\r\n",
        b"*1\r\n$4\r\nPINGxx",
        b"*x\r\n",
        b"*1\r\n$\r\n",
    ] {
        let mut bad = client(&server);
        bad.write_all(malformed).unwrap();
        let reply = rest(&mut bad);
        assert!(reply.starts_with("-ERR Protocol error"), "{malformed:?}: {reply:?}");
        ask(&mut good, &command(&[b"PING"]), b"+PONG\r\n");
    }
    // Random bytes without a line feed.
    let mut bad = client(&server);
    let mut random = 5;
    let noise: Vec<u8> =
        (0..20_000).map(|_| crate::sock::scripted::scramble(&mut random) as u8 | 0x80).collect();
    let _ = bad.write_all(&noise);
    let _ = bad.shutdown(Shutdown::Write);
    rest(&mut bad);
    ask(&mut good, &command(&[b"PING"]), b"+PONG\r\n");
    until("all are counted", || server.stats().unwrap().refused >= 9);
    until("all are closed", || server.stats().unwrap().clients == 1);
}

fn huge_lengths_are_refused(testbed: &Testbed) {
    let host = host(testbed);
    let server = testbed.kv(&host, small());
    for huge in ["*1\r\n$1025\r\n", "*1\r\n$4294967296\r\n", "*1\r\n$9999999999999999999\r\n"] {
        let mut bad = client(&server);
        bad.write_all(huge.as_bytes()).unwrap();
        assert!(rest(&mut bad).starts_with("-ERR Protocol error"), "{huge:?}");
    }
    // Many keys whose values would not fit into one answer.
    let mut greedy = client(&server);
    let words: Vec<&[u8]> = std::iter::once(&b"MGET"[..]).chain(vec![&b"k"[..]; 60]).collect();
    ask(&mut greedy, &command(&words), b"-ERR too many keys\r\n");
    ask(&mut greedy, &command(&[b"PING"]), b"+PONG\r\n");
}

fn incomplete_commands_time_out(testbed: &Testbed) {
    let host = host(testbed);
    let idle_timeout = Duration::from_millis(300);
    let server = testbed.kv(&host, KvOptions { idle_timeout, ..small() });
    let mut idle = client(&server);
    ask(&mut idle, &command(&[b"PING"]), b"+PONG\r\n");
    let mut slow = client(&server);
    let begun = Instant::now();
    // A byte at a time, and never a complete command.
    for byte in b"*2\r\n$3\r\nGET\r\n$1000\r\n".iter().chain([b'x'; 1000].iter()) {
        if slow.write_all(&[*byte]).is_err() {
            break;
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    assert_eq!(rest(&mut slow), "");
    assert!(
        begun.elapsed() >= idle_timeout && begun.elapsed() < test_timeout() / 3,
        "{:?}",
        begun.elapsed()
    );
    ask(&mut idle, &command(&[b"PING"]), b"+PONG\r\n");
}

fn a_client_that_does_not_read(testbed: &Testbed) {
    let host = host(testbed);
    let idle_timeout = Duration::from_millis(300);
    let server = testbed.kv(&host, KvOptions { idle_timeout, ..small() });
    let mut good = client(&server);
    ask(&mut good, &command(&[b"SET", b"big", &[b'x'; 1000]]), b"+OK\r\n");
    let mut stalled = client(&server);
    stalled.set_write_timeout(Some(Duration::from_millis(200))).unwrap();
    let many: Vec<u8> = command(&[b"GET", b"big"]).repeat(2000);
    // Until the server reads no more, or has closed the connection.
    while stalled.write_all(&many).is_ok() {}
    until("the server has closed it", || server.stats().unwrap().clients == 1);
    ask(&mut good, &command(&[b"PING"]), b"+PONG\r\n");
}

fn too_many_clients(testbed: &Testbed) {
    let host = host(testbed);
    let server = testbed.kv(&host, KvOptions { clients: 6, workers: 2, ..small() });
    let mut clients: Vec<_> = (0..6).map(|_| client(&server)).collect();
    for client in &mut clients {
        ask(client, &command(&[b"PING"]), b"+PONG\r\n");
    }
    for _ in 0..20 {
        let mut more = client(&server);
        assert_eq!(rest(&mut more), "-ERR max number of clients reached\r\n");
    }
    for client in &mut clients {
        ask(client, &command(&[b"PING"]), b"+PONG\r\n");
    }
    clients.pop();
    until("a slot is free", || server.stats().unwrap().clients == 5);
    let mut late = client(&server);
    ask(&mut late, &command(&[b"PING"]), b"+PONG\r\n");
}

fn a_server_stops_and_another_takes_its_place(testbed: &Testbed) {
    let host = host(testbed);
    let server = testbed.kv(&host, small());
    let address = server.address();
    let mut stream = client(&server);
    ask(&mut stream, &command(&[b"SET", b"k", b"v"]), b"+OK\r\n");
    drop(server);
    assert_eq!(rest(&mut stream), "");
    until("all are closed", || host.stats().open == 0);
    let server = testbed.kv(&host, KvOptions { address, ..small() });
    let mut stream = client(&server);
    ask(&mut stream, &command(&[b"GET", b"k"]), b"$-1\r\n");
}

fn bad_options_and_addresses(testbed: &Testbed) {
    let host = host(testbed);
    for bad in [
        KvOptions { workers: 0, ..small() },
        KvOptions { clients: 0, ..small() },
        KvOptions { buckets: 3, ..small() },
        KvOptions { max_value: 7, ..small() },
    ] {
        let error = KvServer::start(&host, bad).unwrap_err();
        assert_eq!(error.kind(), &warpwire::error::Kind::InvalidArgument, "{error}");
    }
    if testbed.platform == crate::sock::testbed::Platform::Threads {
        return; // KvServer::start needs kernels
    }
    let taken = std::net::TcpListener::bind(ANYWHERE).unwrap();
    let options = KvOptions { address: taken.local_addr().unwrap(), ..small() };
    let error = KvServer::start(&host, options).unwrap_err();
    assert!(error.to_string().contains("in use"), "{error}");
}
