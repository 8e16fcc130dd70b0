//! Peers that do not say what they must, and peers that lie, by hand: the test speaks the protocol itself.

use std::io::{BufRead, BufReader, ErrorKind, Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use warpwire::link::{Link, Shm, Udp, shm, udp};
use warpwire::mr::HostMemory;
use warpwire::sock::warp::{ENDED, Handshake, Hello, NetOptions, Spot, Stream};
use warpwire::verbs::{Access, Context, Cq, Mr, Op, Qp, QpOptions, Remote, Request};

use crate::warp::world::{Way, World, soon};
use testkit::cases;

cases!(World; CASES:
    whoever_speaks_otherwise_is_put_out_with_the_reason,
    slow_ones_are_put_out_and_harm_no_other,
    more_guests_than_there_are_places,
    a_server_that_says_nothing,
    a_server_that_is_no_warp_socket,
    counters_that_cannot_be_true,
    a_word_on_the_tcp_connection,
    a_peer_that_writes_where_it_must_not,
);

fn hello_line() -> Vec<u8> {
    let text = r#"{"warpwire":1,"words":{"hello":{"magic":"warp socket","version":1,"offer":{"address":"127.0.0.1:9","qpn":1,"psn":1,"mtu":1024,"max_rd_atomic":1},"ring":{"address":0,"rkey":0},"ring_size":4096,"received":{"address":0,"rkey":0},"taken":{"address":8,"rkey":0}}}}"#;
    [text.as_bytes(), b"\n"].concat()
}

fn still_works(world: &World, listener: &warpwire::sock::warp::Listener) {
    let mut here = world.here.connect(listener.local_addr().unwrap()).unwrap();
    let (mut there, _) = listener.accept().unwrap();
    here.write_all(b"ok").unwrap();
    let mut word = [0; 2];
    there.read_exact(&mut word).unwrap();
    assert_eq!(&word, b"ok");
}

fn whoever_speaks_otherwise_is_put_out_with_the_reason(world: &World) {
    let listener = world.listen();
    let text = String::from_utf8(hello_line()).unwrap();
    for (said, answer) in [
        ("GET / HTTP/1.1\r\n\r\n".to_owned(), "not our language"),
        ("x".repeat(5000), "longer than"),
        (text.replace("4096", "4097"), "ring has 4097"),
        (text.replace("\"version\":1", "\"version\":7"), "version 7"),
        (text.repeat(2), "hello twice"),
        ("{\"warpwire\":1,\"words\":\"ready\"}\n".to_owned(), "before its hello"),
    ] {
        let mut tcp = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        tcp.set_read_timeout(Some(soon())).unwrap();
        tcp.write_all(said.as_bytes()).unwrap();
        let mut heard = String::new();
        // A reset may take the last words away.
        let ended = tcp.read_to_string(&mut heard);
        assert!(heard.contains(answer) || ended.is_err(), "{said:.40}: {heard}");
        still_works(world, &listener);
    }
}

fn slow_ones_are_put_out_and_harm_no_other(world: &World) {
    let patience = Duration::from_millis(300);
    let world = World::with(world.way, NetOptions { patience, ..NetOptions::default() });
    let listener = world.listen();
    let begun = Instant::now();
    let mut slow: Vec<TcpStream> =
        (0..20).map(|_| TcpStream::connect(listener.local_addr().unwrap()).unwrap()).collect();
    let line = hello_line();
    for at in 0..10 {
        for tcp in &mut slow {
            let _ = tcp.write_all(&line[at..=at]);
        }
        still_works(&world, &listener);
        std::thread::sleep(Duration::from_millis(20));
    }
    for mut tcp in slow {
        tcp.set_read_timeout(Some(soon())).unwrap();
        let mut heard = Vec::new();
        // Our hello, then the end.
        let _ = tcp.read_to_end(&mut heard);
    }
    assert!(begun.elapsed() >= Duration::from_millis(250) && begun.elapsed() < soon());
}

fn more_guests_than_there_are_places(world: &World) {
    let options = NetOptions { meeting: 8, backlog: 4, ..NetOptions::default() };
    let world = World::with(world.way, options);
    let listener = world.listen();
    let flood: Vec<TcpStream> =
        (0..60).map(|_| TcpStream::connect(listener.local_addr().unwrap()).unwrap()).collect();
    still_works(&world, &listener);
    drop(flood);
    // More connections than may wait: the rest waits in the operating system, and comes later.
    let address = listener.local_addr().unwrap();
    std::thread::scope(|scope| {
        let clients: Vec<_> =
            (0..12).map(|_| scope.spawn(|| world.here.connect(address).unwrap())).collect();
        for _ in 0..12 {
            listener.accept().unwrap();
        }
        for client in clients {
            client.join().unwrap();
        }
    });
}

fn a_server_that_says_nothing(world: &World) {
    let mute = TcpListener::bind("127.0.0.1:0").unwrap();
    let brief = Duration::from_millis(80);
    let begun = Instant::now();
    let error = world.here.connect_timeout(&mute.local_addr().unwrap(), brief).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::TimedOut);
    assert!(error.to_string().contains("did not say hello"), "{error}");
    assert!(begun.elapsed() >= brief && begun.elapsed() < soon());
}

fn a_server_that_is_no_warp_socket(world: &World) {
    let other = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other.local_addr().unwrap();
    let server = std::thread::spawn(move || {
        let (mut tcp, _) = other.accept().unwrap();
        tcp.write_all(b"220 mail.example ESMTP\r\n").unwrap();
        let mut heard = String::new();
        let _ = tcp.read_to_string(&mut heard);
        heard
    });
    let error = world.here.connect(address).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidData);
    assert!(error.to_string().contains("not our language"), "{error}");
    assert!(server.join().unwrap().contains("refused"), "it is told why");
    let gone = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = gone.local_addr().unwrap();
    let server = std::thread::spawn(move || drop(gone.accept().unwrap()));
    let kind = world.here.connect(address).unwrap_err().kind();
    assert_eq!(kind, ErrorKind::ConnectionReset);
    server.join().unwrap();
}

/// A peer whose every word the test chooses.
struct Liar {
    tcp: TcpStream,
    qp: Qp,
    cq: Cq,
    peer: Hello,
    _memory: Mr,
}

impl Liar {
    fn meet(world: &World) -> (Self, Stream) {
        let listener = world.listen();
        let any = "127.0.0.1:0".parse().unwrap();
        let link: Box<dyn Link> = match world.way {
            Way::Shm => Box::new(Shm::bind(any, shm::Options::default()).unwrap()),
            Way::Udp | Way::ByAddress => Box::new(Udp::bind(any, udp::Options::default()).unwrap()),
        };
        let context = Context::open(link).unwrap();
        let (pd, cq) = (context.pd(), context.create_cq(64).unwrap());
        let qp = context.create_qp(&pd, &cq, &cq, QpOptions::default()).unwrap();
        let access = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let memory = context.register(&pd, HostMemory::new(8192).unwrap(), access).unwrap();
        let spot = |at| Spot { address: memory.remote(at).address, rkey: memory.rkey() };
        let hello = Hello {
            offer: qp.offer(),
            ring: spot(4096),
            ring_size: 4096,
            received: spot(0),
            taken: spot(8),
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
                && !handshake.has_met()
            {
                qp.connect(&peer.offer).unwrap();
                handshake.met();
            }
            if handshake.has_met() {
                let bytes = handshake.to_send().to_vec();
                (&tcp).write_all(&bytes).unwrap();
                handshake.sent(bytes.len());
            }
        }
        let peer = *handshake.peer().unwrap();
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(soon())).unwrap();
        stream.set_write_timeout(Some(soon())).unwrap();
        (Self { tcp, qp, cq, peer, _memory: memory }, stream)
    }

    fn write(&self, at: Remote, value: u64) -> bool {
        let word = value.to_le_bytes();
        self.qp.post_send(&[Request::new(1, Op::Write(at)).inline(&word)]).unwrap();
        self.cq.next(soon()).unwrap().unwrap().is_success()
    }

    /// Whether the other side has ended the TCP connection.
    fn is_put_out(&mut self) -> bool {
        self.tcp.set_read_timeout(Some(soon())).unwrap();
        !matches!(self.tcp.read(&mut [0]), Ok(1..))
    }
}

fn counters_that_cannot_be_true(world: &World) {
    let size = Liar::meet(world).0.peer.ring_size;
    for lie in [size + 1, u64::MAX >> 1, ENDED | (size + 1)] {
        let (mut liar, mut stream) = Liar::meet(world);
        let received = liar.peer.received.plus(0);
        assert!(liar.write(received, 0));
        assert!(liar.write(received, lie));
        let error = stream.read(&mut [0; 10]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ConnectionReset);
        assert!(error.to_string().contains("the peer claims"), "{error}");
        assert!(stream.write(b"x").is_err());
        assert!(liar.is_put_out());
    }
    let (mut liar, mut stream) = Liar::meet(world);
    liar.write(liar.peer.received.plus(0), 10);
    assert_eq!(stream.read(&mut [0; 100]).unwrap(), 10, "true, whatever the bytes are");
    liar.write(liar.peer.received.plus(0), 9);
    assert_eq!(stream.read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
    assert!(liar.is_put_out());
    let (mut liar, mut stream) = Liar::meet(world);
    stream.write_all(b"seven").unwrap();
    liar.write(liar.peer.taken.plus(0), 6);
    let error = stream.write(b"x").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(error.to_string().contains("claims to have read"), "{error}");
    assert!(liar.is_put_out());
}

fn a_word_on_the_tcp_connection(world: &World) {
    let (mut liar, mut stream) = Liar::meet(world);
    liar.tcp.write_all(b"psst").unwrap();
    let error = stream.read(&mut [0]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionReset);
    assert!(error.to_string().contains("spoke on the TCP connection"), "{error}");
    assert!(liar.is_put_out());
}

fn a_peer_that_writes_where_it_must_not(world: &World) {
    let (liar, stream) = Liar::meet(world);
    // What lies behind the ring is staged, and not the peer's to write.
    let behind = liar.peer.ring.plus(liar.peer.ring_size);
    assert!(!liar.write(behind, 1), "it is denied");
    // The peer goes: the connection ends, and nothing else.
    drop(liar);
    assert_eq!((&stream).read(&mut [0]).unwrap_err().kind(), ErrorKind::ConnectionReset);
}
