//! Datagrams between CPU programs: whole, with their sender, or counted.

use std::io::ErrorKind;
use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use warpwire::mr::HostMemory;
use warpwire::sock::warp::{
    Card, Datagram, HEADER_LEN, Header, LONGEST_DATAGRAM, WORDS_LEN, Words,
};
use warpwire::verbs::{Access, Context, Mtu, Op, QpOptions, Request, Service};

use crate::warp::readiness::Poll;
use crate::warp::world::{Way, World, byte, soon};
use testkit::{cases, until};

cases!(World; CASES:
    datagrams_of_every_size,
    too_long_a_datagram,
    both_versions_of_ip,
    a_socket_at_any_address,
    a_peer_that_is_named,
    a_name_that_nobody_has,
    nobody_answers,
    a_peer_begins_anew,
    what_cannot_be_sent_to,
    names_that_are_taken,
    questions_of_strangers,
    answers_of_liars,
    datagrams_of_rogues,
    a_flood_is_received_or_counted,
    many_threads_share_a_socket,
    datagrams_that_would_block,
    a_descriptor_tells_of_datagrams,
    a_descriptor_tells_of_failures,
    times_run_out,
    last_words_of_a_socket,
    dropped_while_it_asks,
);

const ANY: &str = "127.0.0.1:0";

fn patient(socket: Datagram) -> Datagram {
    socket.set_read_timeout(Some(soon())).unwrap();
    socket.set_write_timeout(Some(soon())).unwrap();
    socket
}

fn name(socket: &Datagram) -> SocketAddr {
    socket.local_addr().unwrap()
}

/// Two sockets that reach each other.
fn pair(world: &World) -> (Datagram, Datagram) {
    (patient(world.here.datagram(ANY).unwrap()), patient(world.there.datagram(ANY).unwrap()))
}

fn datagrams_of_every_size(world: &World) {
    let (here, there) = pair(world);
    assert_eq!(here.longest(), LONGEST_DATAGRAM);
    let mut back = vec![0; LONGEST_DATAGRAM + 1];
    for size in (0..=LONGEST_DATAGRAM).step_by(7).chain([1, 2, 3, 4, 5, 6, LONGEST_DATAGRAM]) {
        let bytes: Vec<u8> = (0..size).map(|at| byte(size as u64, at)).collect();
        assert_eq!(here.send_to(&bytes, name(&there)).unwrap(), size);
        assert_eq!(there.recv_from(&mut back).unwrap(), (size, name(&here)));
        assert!(back[..size] == bytes, "{size} bytes");
    }
    // What does not fit is lost, and not given to the next.
    here.send_to(b"first", name(&there)).unwrap();
    here.send_to(b"second", name(&there)).unwrap();
    assert_eq!(there.recv(&mut back[..2]).unwrap(), 2);
    assert_eq!(&back[..2], b"fi");
    assert_eq!(there.recv(&mut back[..9]).unwrap(), 6);
}

fn too_long_a_datagram(world: &World) {
    let (here, there) = pair(world);
    let error = here.send_to(&[1; LONGEST_DATAGRAM + 1], name(&there)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidInput);
    assert!(error.to_string().contains("4088"), "{error}");
    here.send_to(b"short", name(&there)).unwrap();
    assert_eq!(there.recv(&mut [0; 9]).unwrap(), 5);
}

fn both_versions_of_ip(world: &World) {
    let bound = |net: &warpwire::sock::warp::Net| net.datagram("[::1]:0");
    if world.way != Way::ByAddress {
        let error = bound(&world.here).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::AddrNotAvailable, "the device has another address");
        return;
    }
    let (here, there) =
        (patient(bound(&world.here).unwrap()), patient(bound(&world.there).unwrap()));
    here.send_to(b"six", name(&there)).unwrap();
    assert_eq!(there.recv_from(&mut [0; 9]).unwrap(), (3, name(&here)));
    let four = there.send_to(b"four", "127.0.0.1:9").unwrap_err();
    assert_eq!(four.kind(), ErrorKind::InvalidInput, "{four}");
}

fn a_socket_at_any_address(world: &World) {
    let any = patient(world.there.datagram("0.0.0.0:0").unwrap());
    let port = name(&any).port();
    let here = patient(world.here.datagram(ANY).unwrap());
    here.send_to(b"hello", ("127.0.0.1", port)).unwrap();
    assert_eq!(any.recv_from(&mut [0; 9]).unwrap(), (5, name(&here)));
    any.send_to(b"yes", name(&here)).unwrap();
    let from = here.recv_from(&mut [0; 9]).unwrap().1;
    assert_eq!(from, ([127, 0, 0, 1], port).into());
    if world.way == Way::ByAddress {
        // IPv6's any address has IPv4's peers too.
        let both = patient(world.there.datagram("[::]:0").unwrap());
        here.send_to(b"hello", ("127.0.0.1", name(&both).port())).unwrap();
        let (_, from) = both.recv_from(&mut [0; 9]).unwrap();
        assert_eq!((from.is_ipv6(), from.ip().to_canonical()), (true, name(&here).ip()));
        both.send_to(b"yes", from).unwrap();
        assert_eq!(here.recv(&mut [0; 9]).unwrap(), 3);
    }
}

fn a_peer_that_is_named(world: &World) {
    let (here, there) = pair(world);
    let stranger = patient(world.there.datagram(ANY).unwrap());
    assert_eq!(here.send(b"to whom?").unwrap_err().kind(), ErrorKind::NotConnected);
    assert_eq!(here.peer_addr().unwrap_err().kind(), ErrorKind::NotConnected);
    here.connect(name(&there)).unwrap();
    assert_eq!(here.peer_addr().unwrap(), name(&there));
    here.send(b"hello").unwrap();
    assert_eq!(there.recv_from(&mut [0; 9]).unwrap(), (5, name(&here)));
    stranger.send_to(b"a stranger", name(&here)).unwrap();
    there.send_to(b"a peer", name(&here)).unwrap();
    let mut bytes = [0; 20];
    assert_eq!(here.recv_from(&mut bytes).unwrap(), (6, name(&there)));
    assert_eq!(&bytes[..6], b"a peer");
    until("the stranger is counted", || {
        here.set_read_timeout(Some(Duration::from_millis(1))).unwrap();
        here.recv(&mut bytes).unwrap_err();
        here.stats().strange == 1
    });
}

fn a_name_that_nobody_has(world: &World) {
    let (here, there) = pair(world);
    let deserted = UdpSocket::bind(ANY).unwrap().local_addr().unwrap();
    here.send_to(b"hello?", deserted).unwrap();
    let error = here.recv(&mut [0; 9]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::ConnectionRefused, "{error}");
    // It is told once, and the socket goes on.
    here.send_to(b"hello!", name(&there)).unwrap();
    assert_eq!(there.recv(&mut [0; 9]).unwrap(), 6);
    assert_eq!(here.stats().dropped, 1);
    here.connect(deserted).unwrap();
    here.send(b"hello?").unwrap();
    until("the next call that sends is told", || {
        here.send(b"hello?").is_err_and(|error| error.kind() == ErrorKind::ConnectionRefused)
    });
}

fn nobody_answers(world: &World) {
    let (here, there) = pair(world);
    let silent = UdpSocket::bind(ANY).unwrap();
    let begun = Instant::now();
    here.send_to(b"hello?", silent.local_addr().unwrap()).unwrap();
    // Others do not wait for it.
    here.send_to(b"hello!", name(&there)).unwrap();
    assert_eq!(there.recv(&mut [0; 9]).unwrap(), 6);
    let soon_enough = begun.elapsed() < Duration::from_millis(900);
    let error = here.recv(&mut [0; 9]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::HostUnreachable, "{error}");
    let took = begun.elapsed();
    assert!(took >= Duration::from_millis(950) && took < Duration::from_secs(10), "{took:?}");
    assert!(soon_enough, "a datagram waited for the silent one");
    assert_eq!(here.stats().dropped, 1);
    silent.set_nonblocking(true).unwrap();
    let mut questions = 0;
    while silent.recv(&mut [0; 100]).is_ok() {
        questions += 1;
    }
    assert!((2..=6).contains(&questions), "it was asked {questions} times");
}

fn a_peer_begins_anew(world: &World) {
    let (here, mut there) = pair(world);
    let at = name(&there);
    for _ in 0..2 {
        there.set_read_timeout(Some(Duration::from_millis(10))).unwrap();
        until("it is found", || {
            // It may be refused while nobody has the name.
            let _ = here.send_to(b"hello", at);
            there.recv(&mut [0; 9]).is_ok()
        });
        drop(there);
        there = world.there.datagram(at).unwrap();
    }
}

fn what_cannot_be_sent_to(world: &World) {
    let (here, there) = pair(world);
    for (to, kind) in [
        ("224.0.0.1:9", ErrorKind::Unsupported),
        ("255.255.255.255:9", ErrorKind::Unsupported),
        ("127.0.0.1:0", ErrorKind::InvalidInput),
        ("[::1]:9", ErrorKind::InvalidInput),
    ] {
        assert_eq!(here.send_to(b"x", to).unwrap_err().kind(), kind, "{to}");
        assert_eq!(here.connect(to).unwrap_err().kind(), kind, "{to}");
    }
    here.send_to(b"x", name(&there)).unwrap();
    assert_eq!(there.recv(&mut [0; 9]).unwrap(), 1);
}

fn names_that_are_taken(world: &World) {
    let (here, there) = pair(world);
    let error = world.here.datagram(name(&there)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::AddrInUse);
    let far = world.here.datagram("192.0.2.1:0").unwrap_err();
    assert_eq!(far.kind(), ErrorKind::AddrNotAvailable);
    let again = name(&here);
    drop(here);
    world.here.datagram(again).unwrap();
}

/// Asks by hand.
fn ask(udp: &UdpSocket, words: &[u8], at: SocketAddr) -> Option<Words> {
    udp.send_to(words, at).unwrap();
    let mut bytes = [0; 200];
    let (count, from) = udp.recv_from(&mut bytes).ok()?;
    assert_eq!((count, from), (WORDS_LEN, at), "no answer is longer than its question");
    Some(Words::read(&bytes[..count]).unwrap())
}

/// How a socket is reached.
fn card(of: SocketAddr) -> Card {
    let udp = UdpSocket::bind(ANY).unwrap();
    udp.set_read_timeout(Some(soon())).unwrap();
    match ask(&udp, &Words::Question { nonce: 3, asked: of }.bytes(), of) {
        Some(Words::Answer { nonce: 3, asked, card }) if asked == of => card,
        other => panic!("{other:?}"),
    }
}

fn questions_of_strangers(world: &World) {
    let (here, there) = pair(world);
    let udp = UdpSocket::bind(ANY).unwrap();
    udp.set_read_timeout(Some(Duration::from_millis(30))).unwrap();
    let good = Words::Question { nonce: 1, asked: name(&there) };
    let mut other_port = name(&there);
    other_port.set_port(other_port.port() ^ 1);
    let spoilt = |at: usize| {
        let mut bytes = good.bytes();
        bytes[at] ^= 0x40;
        bytes.to_vec()
    };
    let strange = [
        Vec::new(),
        vec![0; WORDS_LEN],
        vec![b'W'; 3000],
        good.bytes()[..WORDS_LEN - 1].to_vec(),
        [&good.bytes()[..], b"!"].concat(),
        Words::Question { nonce: 1, asked: other_port }.bytes().to_vec(),
        Words::Question { nonce: 1, asked: "10.1.2.3:4".parse().unwrap() }.bytes().to_vec(),
        Words::Answer { nonce: 1, asked: name(&there), card: card(name(&there)) }.bytes().to_vec(),
        spoilt(0),
        spoilt(4),
        spoilt(5),
        spoilt(6),
        spoilt(40),
    ];
    for bytes in &strange {
        assert_eq!(ask(&udp, bytes, name(&there)), None, "{bytes:?}");
    }
    assert_eq!(there.stats().strange, strange.len() as u64);
    assert_eq!(card(name(&there)).longest, LONGEST_DATAGRAM as u32);
    here.send_to(b"hello", name(&there)).unwrap();
    assert_eq!(there.recv(&mut [0; 9]).unwrap(), 5);
}

fn answers_of_liars(world: &World) {
    let (here, real) = pair(world);
    let liar = UdpSocket::bind(ANY).unwrap();
    liar.set_read_timeout(Some(soon())).unwrap();
    let at = liar.local_addr().unwrap();
    let card = card(name(&real));
    here.send_to(b"hello", at).unwrap();
    let mut bytes = [0; 100];
    let (count, from) = liar.recv_from(&mut bytes).unwrap();
    let Ok(Words::Question { nonce, asked }) = Words::read(&bytes[..count]) else { panic!() };
    assert_eq!(asked, at);
    let right = Words::Answer { nonce, asked, card };
    let mut wrong_card = right.bytes();
    wrong_card[43] = 0x80;
    for wrong in [
        Words::Answer { nonce: !nonce, asked, card }.bytes(),
        Words::Answer { nonce, asked: name(&real), card }.bytes(),
        Words::Question { nonce, asked }.bytes(),
        wrong_card,
    ] {
        liar.send_to(&wrong, from).unwrap();
    }
    // Another than was asked may know everything, and is not heard.
    UdpSocket::bind(ANY).unwrap().send_to(&right.bytes(), from).unwrap();
    let (count, _) = liar.recv_from(&mut bytes).unwrap();
    assert_eq!(Words::read(&bytes[..count]), Ok(Words::Question { nonce, asked }), "asked again");
    until("the lies are counted", || here.stats().strange == 4);
    liar.send_to(&right.bytes(), from).unwrap();
    assert_eq!(real.recv_from(&mut bytes).unwrap(), (5, name(&here)));
}

/// Sends whatever it likes to a queue pair of datagrams.
fn rogue(world: &World, to: SocketAddr, wrong_key: bool, bytes: &[u8]) {
    let context = match world.way {
        Way::Shm => Context::open(
            warpwire::link::Shm::bind(
                ANY.parse().unwrap(),
                warpwire::link::shm::Options::default(),
            )
            .unwrap(),
        ),
        _ => Context::open(
            warpwire::link::Udp::bind(
                ANY.parse().unwrap(),
                warpwire::link::udp::Options::default(),
            )
            .unwrap(),
        ),
    }
    .unwrap();
    let card = card(to);
    let (pd, cq) = (context.pd(), context.create_cq(4).unwrap());
    let options =
        QpOptions { service: Service::Ud, mtu: Mtu::new(16 << 10), ..QpOptions::default() };
    let qp = context.create_qp(&pd, &cq, &cq, options).unwrap();
    qp.ready(1).unwrap();
    let memory = HostMemory::new(16 << 10).unwrap();
    memory.bytes().write(0, bytes).unwrap();
    let mr = context.register(&pd, memory, Access::NONE).unwrap();
    let handle = context.address_handle((to.ip(), card.port).into()).unwrap();
    let qkey = card.qkey ^ u32::from(wrong_key);
    let range = [mr.sge(0, bytes.len() as u32)];
    let request = Request::new(1, Op::Send).with(&range).to(&handle, card.qpn, qkey);
    qp.post_send(&[request]).unwrap();
    assert!(cq.next(soon()).unwrap().unwrap().is_success());
    // It leaves by the next step at the latest.
    for _ in 0..10 {
        cq.poll(&mut [warpwire::verbs::Completion::EMPTY]).unwrap();
    }
}

fn datagrams_of_rogues(world: &World) {
    let (here, there) = pair(world);
    let good = [&Header { port: 77 }.bytes()[..], b"good"].concat();
    let long = [&Header { port: 77 }.bytes()[..], &[1; 5000]].concat();
    there.set_read_timeout(Some(Duration::from_millis(5))).unwrap();
    for (strange, bytes) in
        [&b""[..], b"short", b"neither a header nor anything"].iter().enumerate()
    {
        rogue(world, name(&there), false, bytes);
        until("it is counted", || {
            there.recv(&mut [0; 9]).unwrap_err();
            there.stats().strange == strange as u64 + 1
        });
    }
    rogue(world, name(&there), false, &long);
    until("it is dropped", || there.stats().dropped == 1);
    rogue(world, name(&there), true, &good);
    there.recv(&mut [0; 9]).unwrap_err();
    // One who keeps the rules is heard, whoever he is: his address is that of his packets.
    rogue(world, name(&there), false, &good);
    there.set_read_timeout(Some(soon())).unwrap();
    let mut bytes = [0; 20];
    let (count, from) = there.recv_from(&mut bytes).unwrap();
    assert_eq!((&bytes[..count], from), (&b"good"[..], ([127, 0, 0, 1], 77).into()));
    assert_eq!(good.len(), HEADER_LEN + 4);
    here.send_to(b"hello", name(&there)).unwrap();
    assert_eq!(there.recv_from(&mut bytes).unwrap(), (5, name(&here)));
}

fn a_flood_is_received_or_counted(world: &World) {
    const COUNT: u64 = 2000;
    let (here, there) = pair(world);
    for number in 0..COUNT {
        here.send_to(&number.to_le_bytes(), name(&there)).unwrap();
    }
    there.set_read_timeout(Some(Duration::from_millis(200))).unwrap();
    let (mut received, mut next) = (0, 0);
    let mut bytes = [0; 8];
    while there.recv(&mut bytes).is_ok() {
        let number = u64::from_le_bytes(bytes);
        assert!(number >= next, "{number} before {next}");
        (received, next) = (received + 1, number + 1);
    }
    let (from, to) = (here.stats(), there.stats());
    assert_eq!((to.received, from.sent, from.dropped), (received, COUNT, 0));
    assert!(received >= 200, "{to:?}");
    match world.way {
        // The operating system drops by itself, and does not say so.
        Way::Udp => assert!(received + to.dropped <= COUNT, "{to:?}"),
        _ => assert_eq!(received + to.dropped, COUNT, "{to:?}"),
    }
    here.send_to(b"and on", name(&there)).unwrap();
    there.set_read_timeout(Some(soon())).unwrap();
    assert_eq!(there.recv(&mut bytes).unwrap(), 6);
}

fn many_threads_share_a_socket(world: &World) {
    const EACH: usize = 200;
    let (here, there) = pair(world);
    let to = name(&there);
    std::thread::scope(|scope| {
        // An echo in two threads, and three that ask it.
        for _ in 0..2 {
            let there = there.try_clone().unwrap();
            scope.spawn(move || {
                let mut bytes = [0; 9];
                loop {
                    let (count, from) = there.recv_from(&mut bytes).unwrap();
                    if &bytes[..count] == b"stop" {
                        return;
                    }
                    there.send_to(&bytes[..count], from).unwrap();
                }
            });
        }
        let askers: Vec<_> = (0..3)
            .map(|_| {
                let one = patient(world.here.datagram(ANY).unwrap());
                scope.spawn(move || {
                    for number in 0..EACH as u64 {
                        one.send_to(&number.to_le_bytes(), to).unwrap();
                        let mut back = [0; 8];
                        assert_eq!(one.recv(&mut back).unwrap(), 8);
                        assert_eq!(u64::from_le_bytes(back), number);
                    }
                })
            })
            .collect();
        askers.into_iter().for_each(|asker| asker.join().unwrap());
        for _ in 0..2 {
            here.send_to(b"stop", to).unwrap();
        }
    });
}

fn datagrams_that_would_block(world: &World) {
    let (here, there) = pair(world);
    there.set_nonblocking(true).unwrap();
    here.set_nonblocking(true).unwrap();
    assert_eq!(there.recv(&mut [0]).unwrap_err().kind(), ErrorKind::WouldBlock);
    let silent = UdpSocket::bind(ANY).unwrap();
    // What waits for a name has its limit; others do not mind.
    let mut waiting = 0;
    let error = loop {
        match here.send_to(b"hello?", silent.local_addr().unwrap()) {
            Ok(_) => waiting += 1,
            Err(error) => break error,
        }
    };
    assert_eq!((error.kind(), waiting), (ErrorKind::WouldBlock, 64));
    here.send_to(b"hello!", name(&there)).unwrap();
    until("it comes", || there.recv(&mut [0; 9]).is_ok());
}

fn a_descriptor_tells_of_datagrams(world: &World) {
    const A_MOMENT: Duration = Duration::from_millis(30);
    for edge in [false, true] {
        let (here, there) = pair(world);
        there.set_nonblocking(true).unwrap();
        let poll = Poll::new();
        poll.add(&there, 7, edge);
        assert_eq!(poll.wait(soon()), [7], "it begins ready");
        for _ in 0..3 {
            assert_eq!(there.recv(&mut [0; 9]).unwrap_err().kind(), ErrorKind::WouldBlock);
            assert_eq!(poll.wait(A_MOMENT), [0; 0], "nothing has come");
            here.send_to(b"news", name(&there)).unwrap();
            assert_eq!(poll.wait(soon()), [7]);
            assert_eq!(there.recv(&mut [0; 9]).unwrap(), 4);
        }
    }
}

fn a_descriptor_tells_of_failures(world: &World) {
    let (here, _) = pair(world);
    here.set_nonblocking(true).unwrap();
    let poll = Poll::new();
    poll.add(&here, 1, true);
    poll.wait(soon());
    let silent = UdpSocket::bind(ANY).unwrap();
    while here.send_to(b"hello?", silent.local_addr().unwrap()).is_ok() {}
    assert_eq!(poll.wait(Duration::from_millis(30)), [0; 0], "no room yet");
    assert_eq!(poll.wait(soon()), [1]);
    let error = here.send_to(b"hello?", silent.local_addr().unwrap()).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::HostUnreachable);
    assert!(here.send_to(b"hello?", silent.local_addr().unwrap()).is_ok(), "there is room again");
}

fn times_run_out(world: &World) {
    let (here, _) = pair(world);
    assert!(here.set_read_timeout(Some(Duration::ZERO)).is_err());
    here.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
    assert_eq!(here.read_timeout().unwrap(), Some(Duration::from_millis(20)));
    let begun = Instant::now();
    assert_eq!(here.recv(&mut [0]).unwrap_err().kind(), ErrorKind::TimedOut);
    assert!(begun.elapsed() >= Duration::from_millis(20));
    here.set_write_timeout(Some(Duration::from_millis(20))).unwrap();
    let silent = UdpSocket::bind(ANY).unwrap();
    let error = loop {
        match here.send_to(b"hello?", silent.local_addr().unwrap()) {
            Ok(_) => {}
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::TimedOut, "{error}");
}

fn last_words_of_a_socket(world: &World) {
    let there = patient(world.there.datagram(ANY).unwrap());
    for number in 0..10_u8 {
        let here = world.here.datagram(ANY).unwrap();
        here.set_nonblocking(number % 2 == 1).unwrap();
        here.send_to(&[number], name(&there)).unwrap();
        drop(here);
        let mut bytes = [0; 9];
        assert_eq!(there.recv(&mut bytes).unwrap(), 1);
        assert_eq!(bytes[0], number);
    }
}

fn dropped_while_it_asks(world: &World) {
    let here = world.here.datagram(ANY).unwrap();
    let (at, silent) = (name(&here), UdpSocket::bind(ANY).unwrap());
    here.send_to(b"hello?", silent.local_addr().unwrap()).unwrap();
    let begun = Instant::now();
    drop(here);
    assert!(begun.elapsed() < Duration::from_millis(900), "dropping waits for nobody");
    until("its name is free", || world.here.datagram(at).is_ok());
}
