//! Peers that violate the handshake or the protocol: the test implements the peer itself.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use warpwire::hca::publish;
use warpwire::link::{Link, Shm, ShmOptions, Udp, UdpOptions};
use warpwire::mr::HostMemory;
use warpwire::sock::warp::{FIN, Handshake, Hello, Net, NetOptions, RemoteAddr, WarpStream};
use warpwire::verbs::{Access, Context, Cq, Mr, Qp, QpOptions, Remote, SendRequest, WrOp};

use crate::warp::testbed::{TestLink, Testbed, test_timeout};
use testkit::cases;

cases!(Testbed; CASES:
    invalid_messages_are_refused_with_the_reason,
    slow_handshakes_are_dropped_and_harm_no_other,
    more_handshakes_than_slots,
    a_server_that_sends_nothing,
    a_server_that_is_no_warp_socket,
    impossible_counters,
    data_on_the_tcp_connection,
    a_peer_that_writes_where_it_must_not,
    a_hello_for_a_third_party_is_refused,
    many_local_addresses_open_few_devices,
);

fn hello_line() -> Vec<u8> {
    let text = concat!(
        r#"{"warpwire":1,"words":{"hello":{"magic":"warp socket","version":1,"#,
        r#""endpoint":{"address":"127.0.0.1:9","qpn":1,"psn":1,"mtu":1024,"max_rd_atomic":1},"#,
        r#""ring":{"address":0,"rkey":0},"ring_size":4096,"#,
        r#""received":{"address":0,"rkey":0},"taken":{"address":8,"rkey":0}}}}"#,
    );
    [text.as_bytes(), b"\n"].concat()
}

fn still_works(testbed: &Testbed, listener: &warpwire::sock::warp::WarpListener) {
    let mut here = testbed.here.connect(listener.local_addr().unwrap()).unwrap();
    let (mut there, _) = listener.accept().unwrap();
    here.write_all(b"ok").unwrap();
    let mut word = [0; 2];
    there.read_exact(&mut word).unwrap();
    assert_eq!(&word, b"ok");
}

fn invalid_messages_are_refused_with_the_reason(testbed: &Testbed) {
    let listener = testbed.listen();
    let text = String::from_utf8(hello_line()).unwrap();
    for (message, answer) in [
        ("GET / HTTP/1.1\r\n\r\n".to_owned(), "not a warpwire message"),
        ("x".repeat(5000), "longer than"),
        (text.replace("4096", "4097"), "ring_size is 4097"),
        (text.replace("\"version\":1", "\"version\":7"), "version 7"),
        (text.repeat(2), "second hello"),
        ("{\"warpwire\":1,\"words\":\"ready\"}\n".to_owned(), "before its hello"),
    ] {
        let mut tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        tcp.set_read_timeout(Some(test_timeout())).unwrap();
        tcp.write_all(message.as_bytes()).unwrap();
        let mut answer_text = String::new();
        // A reset may discard the refusal.
        let ended = tcp.read_to_string(&mut answer_text);
        assert!(answer_text.contains(answer) || ended.is_err(), "{message:.40}: {answer_text}");
        still_works(testbed, &listener);
    }
}

fn slow_handshakes_are_dropped_and_harm_no_other(testbed: &Testbed) {
    // It holds for the others as well, which must not be called slow because the machine is.
    let handshake_timeout = Duration::from_secs(3);
    let testbed = Testbed::with(
        testbed.test_link,
        NetOptions::default().with_handshake_timeout(handshake_timeout),
    );
    let listener = testbed.listen();
    let begun = Instant::now();
    let mut slow: Vec<TcpStream> =
        (0..20).map(|_| TcpStream::connect(listener.local_addr().unwrap()).unwrap()).collect();
    let line = hello_line();
    for at in 0..10 {
        for tcp in &mut slow {
            let _ = tcp.write_all(&line[at..=at]);
        }
        still_works(&testbed, &listener);
        std::thread::sleep(Duration::from_millis(20));
    }
    for mut tcp in slow {
        tcp.set_read_timeout(Some(test_timeout())).unwrap();
        let mut answer_text = Vec::new();
        // Our hello, then the end of the stream.
        let _ = tcp.read_to_end(&mut answer_text);
    }
    let taken = begun.elapsed();
    assert!(taken >= handshake_timeout * 4 / 5 && taken < test_timeout(), "{taken:?}");
}

fn more_handshakes_than_slots(testbed: &Testbed) {
    let options = NetOptions::default().with_max_handshakes(8).with_backlog(4);
    let testbed = Testbed::with(testbed.test_link, options);
    let listener = testbed.listen();
    let flood: Vec<TcpStream> =
        (0..60).map(|_| TcpStream::connect(listener.local_addr().unwrap()).unwrap()).collect();
    still_works(&testbed, &listener);
    drop(flood);
    // More connections than may wait, but no more than may be in their handshake: the oldest of
    // those may be a thread that waits for a CPU. The rest is accepted later.
    let address = listener.local_addr().unwrap();
    std::thread::scope(|scope| {
        let clients: Vec<_> =
            (0..8).map(|_| scope.spawn(|| testbed.here.connect(address).unwrap())).collect();
        for _ in 0..8 {
            listener.accept().unwrap();
        }
        for client in clients {
            client.join().unwrap();
        }
    });
}

fn a_server_that_sends_nothing(testbed: &Testbed) {
    let silent = TcpListener::bind("127.0.0.1:0").unwrap();
    let brief = Duration::from_millis(500);
    let begun = Instant::now();
    let error = testbed.here.connect_timeout(&silent.local_addr().unwrap(), brief).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(error.to_string().contains("sent no hello"), "{error}");
    assert!(begun.elapsed() >= brief && begun.elapsed() < test_timeout());
}

fn a_server_that_is_no_warp_socket(testbed: &Testbed) {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let (mut tcp, _) = other.accept().unwrap();
        tcp.write_all(b"220 mail.example ESMTP\r\n").unwrap();
        let mut answer_text = String::new();
        let _ = tcp.read_to_string(&mut answer_text);
        answer_text
    });
    let error = testbed.here.connect(address).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidData);
    assert!(error.to_string().contains("not a warpwire message"), "{error}");
    assert!(server.join().unwrap().contains("refused"), "the peer gets the reason");
    let gone = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = gone.local_addr().unwrap();
    let server = std::thread::spawn(move || drop(gone.accept().unwrap()));
    let kind = testbed.here.connect(address).unwrap_err().kind();
    assert_eq!(kind, ErrorKind::ConnectionReset);
    server.join().unwrap();
}

/// A peer whose every message and write the test controls.
struct RawPeer {
    tcp: TcpStream,
    qp: Qp,
    cq: Cq,
    peer: Hello,
    _memory: Mr,
}

impl RawPeer {
    fn handshake_raw(testbed: &Testbed) -> (Self, WarpStream) {
        let listener = testbed.listen();
        let any = "127.0.0.1:0".parse().unwrap();
        let link: Box<dyn Link> = match testbed.test_link {
            TestLink::Shm => Box::new(Shm::bind(any, ShmOptions::default()).unwrap()),
            TestLink::Udp | TestLink::ByAddress => {
                Box::new(Udp::bind(any, UdpOptions::default()).unwrap())
            }
        };
        let context = Context::open(link).unwrap();
        let (pd, cq) = (context.alloc_pd(), context.create_cq(64).unwrap());
        let qp = context.create_qp(&pd, &cq, &cq, QpOptions::default()).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let memory = context.register(&pd, HostMemory::new(8192).unwrap(), access).unwrap();
        let remote_addr =
            |at| RemoteAddr { address: memory.remote(at).address, rkey: memory.rkey() };
        let hello = Hello {
            endpoint: qp.endpoint(),
            ring: remote_addr(4096),
            ring_size: 4096,
            received: remote_addr(0),
            taken: remote_addr(8),
            window: Some(4096),
        };
        let mut handshake = Handshake::new(&hello).unwrap();
        let tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut reader = BufReader::new(tcp.try_clone().unwrap());
        while !handshake.is_done() {
            let bytes = handshake.to_send().to_vec();
            (&tcp).write_all(&bytes).unwrap();
            handshake.sent(bytes.len());
            let mut line = Vec::new();
            reader.read_until(b'\n', &mut line).unwrap();
            handshake.take(&line).unwrap();
            if let Some(peer) = handshake.peer()
                && !handshake.is_ready()
            {
                qp.connect(&peer.endpoint).unwrap();
                handshake.mark_ready();
            }
            if handshake.is_ready() {
                let bytes = handshake.to_send().to_vec();
                (&tcp).write_all(&bytes).unwrap();
                handshake.sent(bytes.len());
            }
        }
        let peer = *handshake.peer().unwrap();
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(test_timeout())).unwrap();
        stream.set_write_timeout(Some(test_timeout())).unwrap();
        (Self { tcp, qp, cq, peer, _memory: memory }, stream)
    }

    fn write(&self, at: Remote, value: u64) -> bool {
        let word = value.to_le_bytes();
        self.qp.post_send(&[SendRequest::new(1, WrOp::Write(at)).inline(&word)]).unwrap();
        self.cq.wait_next(test_timeout()).unwrap().unwrap().is_success()
    }

    /// Whether the other end has closed the TCP connection.
    fn is_rejected(&mut self) -> bool {
        self.tcp.set_read_timeout(Some(test_timeout())).unwrap();
        !matches!(self.tcp.read(&mut [0]), Ok(1..))
    }
}

fn impossible_counters(testbed: &Testbed) {
    let size = RawPeer::handshake_raw(testbed).0.peer.ring_size;
    for bad_write in [size + 1, u64::MAX >> 1, FIN | (size + 1)] {
        let (mut raw_peer, mut stream) = RawPeer::handshake_raw(testbed);
        let received = raw_peer.peer.received.at_offset(0);
        assert!(raw_peer.write(received, 0));
        assert!(raw_peer.write(received, bad_write));
        let error = stream.read(&mut [0; 10]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        assert!(error.to_string().contains("to `received`"), "{error}");
        assert!(stream.write(b"x").is_err());
        assert!(raw_peer.is_rejected());
    }
    let (mut raw_peer, mut stream) = RawPeer::handshake_raw(testbed);
    raw_peer.write(raw_peer.peer.received.at_offset(0), 10);
    assert_eq!(stream.read(&mut [0; 100]).unwrap(), 10, "a valid counter, whatever the bytes are");
    raw_peer.write(raw_peer.peer.received.at_offset(0), 9);
    assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert!(raw_peer.is_rejected());
    let (mut raw_peer, mut stream) = RawPeer::handshake_raw(testbed);
    stream.write_all(b"seven").unwrap();
    raw_peer.write(raw_peer.peer.taken.at_offset(0), 6);
    let error = stream.write(b"x").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(error.to_string().contains("to `taken`"), "{error}");
    assert!(raw_peer.is_rejected());
}

fn data_on_the_tcp_connection(testbed: &Testbed) {
    let (mut raw_peer, mut stream) = RawPeer::handshake_raw(testbed);
    raw_peer.tcp.write_all(b"psst").unwrap();
    let error = stream.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(error.to_string().contains("sent data on the TCP connection"), "{error}");
    assert!(raw_peer.is_rejected());
}

fn a_peer_that_writes_where_it_must_not(testbed: &Testbed) {
    let (raw_peer, stream) = RawPeer::handshake_raw(testbed);
    // The memory behind the ring is the send buffer, which the peer must not write.
    let behind = raw_peer.peer.ring.at_offset(raw_peer.peer.ring_size);
    assert!(!raw_peer.write(behind, 1), "remote access error");
    // The peer exits: only this connection ends.
    drop(raw_peer);
    assert_eq!((&stream).read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
}

/// Whoever connects cannot make either end send packets to an address of their choice.
fn a_hello_for_a_third_party_is_refused(testbed: &Testbed) {
    let third = std::net::UdpSocket::bind("127.0.0.9:0").unwrap();
    third.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let text = String::from_utf8(hello_line()).unwrap();
    let lie = text.replace("127.0.0.1:9", &third.local_addr().unwrap().to_string());
    let ready = "{\"warpwire\":1,\"words\":\"ready\"}\n";
    let listener = testbed.listen();
    let mut tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    tcp.set_read_timeout(Some(test_timeout())).unwrap();
    tcp.write_all(lie.as_bytes()).unwrap();
    let mut answer = String::new();
    let ended = tcp.read_to_string(&mut answer);
    assert!(answer.contains("comes from 127.0.0.1") || ended.is_err(), "{answer}");
    still_works(testbed, &listener);
    // A server that lies to a client.
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = server.local_addr().unwrap();
    let serving = std::thread::spawn(move || {
        let (mut tcp, _) = server.accept().unwrap();
        let _ = tcp.write_all(format!("{lie}{ready}").as_bytes());
        let _ = tcp.read_to_string(&mut String::new());
    });
    let error = testbed.here.connect(address).map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidData, "{error}");
    serving.join().unwrap();
    assert!(third.recv(&mut [0; 64]).is_err(), "the third party got a packet");
}

/// A client chooses at which local address it reaches a wildcard listener: the devices that are
/// opened for them do not stay.
fn many_local_addresses_open_few_devices(_: &Testbed) {
    let net = Net::new(NetOptions::default()).unwrap();
    let listener = net.listen("0.0.0.0:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    let meet = |number: u8| {
        let address = (Ipv4Addr::new(127, 77, 0, number), port);
        // Refused while too many connections are still being closed.
        testkit::until("a connection", || match net.connect(address) {
            Ok(_here) => listener.accept().is_ok(),
            Err(_) => false,
        });
    };
    let open = || {
        let stats = publish::query(std::process::id()).ok()?;
        let ours = stats.devices.iter().filter(|device| device.link.contains("127.77.0."));
        Some(ours.count())
    };
    (1..=60).for_each(meet);
    testkit::until("devices are counted", || open().is_some_and(|count| count <= 32));
    let mut number = 60;
    testkit::until("unused ones are closed", || {
        number = if number < 250 { number + 1 } else { 61 };
        meet(number);
        open().is_some_and(|count| (1..=2).contains(&count))
    });
}
