//! The family `warp` between two kernels, each served by a host of its own; and between a kernel and peers that do not keep
//! the rules.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use warpwire::hca::HcaOptions;
use warpwire::link::{Auto, shm, udp};
use warpwire::mr::HostMemory;
use warpwire::sock::device::Setting;
use warpwire::sock::warp::{DEAF, ENDED, Handshake, Hello, Spot};
use warpwire::sock::{SockHost, SockOptions};
use warpwire::verbs::{Access, Context, Cq, Drive, Mr, Op, Qp, QpOptions, Remote, Request};

use crate::sock::puppet::{Do, Puppet};
use crate::sock::world::{Stage, WARP_STREAM, World, errno, loopbacks, until};
use testkit::cases;

cases!(World; CASES:
    one_byte_each_way,
    random_pieces_between_kernels,
    rings_of_different_sizes,
    half_closed_between_kernels,
    what_was_sent_lands_after_close,
    a_reset_between_kernels,
    the_other_host_ends,
    the_other_host_dies,
    a_thousand_between_kernels,
    a_storm_between_kernels,
    strangers_are_turned_away,
    silent_strangers_harm_nobody,
    servers_that_are_no_warp_sockets,
    the_family_is_limited,
    peers_that_lie_are_found_out,
    peers_reach_nothing_else,
    a_device_that_does_not_answer,
    bytes_are_counted,
    a_peer_that_reads_no_more_breaks_the_pipe,
    a_kernel_that_reads_no_more_breaks_the_pipe,
);

/// Two hosts with puppets.
struct Two {
    here: Stage,
    there: Stage,
}

impl Two {
    fn new(world: &World, puppets: u64, options: SockOptions) -> Self {
        Self::with(world, puppets, [options; 2])
    }

    fn with(world: &World, puppets: u64, options: [SockOptions; 2]) -> Self {
        let [here, there] = world.stages(puppets, options);
        Self { here, there }
    }

    fn small(world: &World, puppets: u64) -> Self {
        Self::new(world, puppets, SockOptions { sockets: 64, arena: 16 << 20, ..world.options() })
    }

    /// A connection that the puppet of the one side made and that of the other has accepted.
    fn connected(&self, at: SocketAddr) -> (u64, u64) {
        connect(self.here.first(), self.there.first(), at)
    }
}

/// A listener at a port of its own, and its address.
fn listen(server: &Puppet, at: SocketAddr, backlog: u64) -> (u64, SocketAddr) {
    let listener = server.socket(at, WARP_STREAM);
    server.expect(Do::Bind, &[listener], Some(at));
    server.expect(Do::Listen, &[listener, backlog], None);
    (listener, server.call(Do::LocalName, &[listener], None).address.unwrap())
}

fn connect(client: &Puppet, server: &Puppet, at: SocketAddr) -> (u64, u64) {
    let (listener, name) = listen(server, at, 8);
    let socket = client.socket(at, WARP_STREAM);
    client.expect(Do::Connect, &[socket], Some(name));
    let accepted = server.expect(Do::Accept, &[listener], None) as u64;
    server.expect(Do::Close, &[listener], None);
    (socket, accepted)
}

fn one_byte_each_way(world: &World) {
    let two = Two::small(world, 1);
    let (client, server) = (two.here.first(), two.there.first());
    for at in loopbacks() {
        let (socket, accepted) = two.connected(at);
        assert_eq!(client.send(socket, b"a"), 1);
        assert_eq!(server.recv(accepted, 10).unwrap(), b"a");
        assert_eq!(server.send(accepted, b"bc"), 2);
        assert_eq!(client.recv(socket, 10).unwrap(), b"bc");
        client.expect(Do::Close, &[socket], None);
        assert_eq!(server.recv(accepted, 10).unwrap(), b"");
        server.expect(Do::Close, &[accepted], None);
    }
}

fn random_pieces_between_kernels(world: &World) {
    let two = Two::new(world, 2, SockOptions { sockets: 16, ..world.options() });
    for (number, total) in [1, 2, 100, 65_535, 65_537, 1 << 20, 16 << 20].into_iter().enumerate() {
        let (socket, accepted) = two.connected(loopbacks()[number % 2]);
        two.here.puppets[0].start(Do::StreamOut, &[socket, 11, total, 50_000], None);
        two.here.puppets[1].start(Do::StreamIn, &[socket, 12, total, 50_000], None);
        two.there.puppets[0].start(Do::StreamOut, &[accepted, 12, total, 70_000], None);
        two.there.puppets[1].start(Do::StreamIn, &[accepted, 11, total, 30_000], None);
        for puppet in two.here.puppets.iter().chain(&two.there.puppets) {
            assert_eq!(puppet.finish().result, total as i64, "or -84: a byte differs");
        }
        two.here.first().expect(Do::Close, &[socket], None);
        two.there.first().expect(Do::Close, &[accepted], None);
    }
}

fn rings_of_different_sizes(world: &World) {
    let large = SockOptions { sockets: 16, ring: 256 << 10, arena: 16 << 20, ..world.options() };
    let two = Two::with(world, 2, [SockOptions { ring: 4096, ..large }, large]);
    let total = 1_000_003;
    let (socket, accepted) = two.connected(loopbacks()[0]);
    // The small one can have 4096 bytes on their way, much less than the large one tells of by itself.
    two.here.puppets[0].start(Do::StreamOut, &[socket, 11, total, 9_000], None);
    two.there.puppets[1].start(Do::StreamIn, &[accepted, 11, total, 70_000], None);
    two.there.puppets[0].start(Do::StreamOut, &[accepted, 12, total, 70_000], None);
    two.here.puppets[1].start(Do::StreamIn, &[socket, 12, total, 9_000], None);
    for puppet in two.here.puppets.iter().chain(&two.there.puppets) {
        assert_eq!(puppet.finish().result, total as i64, "or -84: a byte differs");
    }
}

fn half_closed_between_kernels(world: &World) {
    let two = Two::small(world, 1);
    let (client, server) = (two.here.first(), two.there.first());
    let (socket, accepted) = two.connected(loopbacks()[1]);
    assert_eq!(client.send(socket, b"question"), 8);
    client.expect(Do::Shutdown, &[socket, 1], None);
    assert_eq!(client.send(socket, b"x"), errno(Errno::PIPE));
    assert_eq!(server.recv(accepted, 100).unwrap(), b"question");
    assert_eq!(server.recv(accepted, 100).unwrap(), b"");
    assert_eq!(server.send(accepted, b"answer"), 6);
    assert_eq!(client.recv(socket, 100).unwrap(), b"answer");
    server.expect(Do::Close, &[accepted], None);
    assert_eq!(client.recv(socket, 100).unwrap(), b"");
    client.expect(Do::Close, &[socket], None);
    for stage in [&two.here, &two.there] {
        until("all are closed", || stage.host.stats().open == 0);
    }
}

fn what_was_sent_lands_after_close(world: &World) {
    let two = Two::small(world, 1);
    let (client, server) = (two.here.first(), two.there.first());
    let (socket, accepted) = two.connected(loopbacks()[0]);
    // As much as the ring holds: the one is gone before the other begins.
    client.expect(Do::StreamOut, &[socket, 5, 64 << 10, 60_000], None);
    client.expect(Do::Close, &[socket], None);
    until("it is gone", || two.here.host.stats().open == 0);
    assert_eq!(server.call(Do::StreamIn, &[accepted, 5, 1 << 20, 5_000], None).result, 64 << 10);
    assert_eq!(server.recv(accepted, 1).unwrap(), b"");
    until("it is known", || server.send(accepted, b"anybody there?") == errno(Errno::PIPE));
    server.expect(Do::Close, &[accepted], None);
    until("both are gone", || two.there.host.stats().open == 0);
}

fn a_reset_between_kernels(world: &World) {
    let two = Two::small(world, 2);
    let (client, server) = (two.here.first(), two.there.first());
    for waits in [Do::Recv, Do::StreamOut, Do::Borrow] {
        let (socket, accepted) = two.connected(loopbacks()[0]);
        server.start(waits, &[accepted, 0, 1 << 30, 60_000], None);
        std::thread::sleep(Duration::from_millis(20));
        assert!(!server.is_done(), "{waits:?} waits");
        client.expect(Do::Set, &[socket, Setting::Linger as u64, 0], None);
        client.expect(Do::Close, &[socket], None);
        assert_eq!(server.finish().result, errno(Errno::CONNRESET), "{waits:?}");
        assert!(server.send(accepted, b"x") < 0);
        server.expect(Do::Close, &[accepted], None);
    }
    // What came before is received.
    let (socket, accepted) = two.connected(loopbacks()[0]);
    assert_eq!(client.send(socket, b"the last you hear of me"), 23);
    std::thread::sleep(Duration::from_millis(20));
    client.expect(Do::Set, &[socket, Setting::Linger as u64, 0], None);
    client.expect(Do::Close, &[socket], None);
    assert_eq!(server.recv(accepted, 100).unwrap(), b"the last you hear of me");
    assert_eq!(server.recv(accepted, 100), Err(errno(Errno::CONNRESET)));
}

/// Somebody waits at the one host in each way, while something happens to the other.
fn the_other_ends(world: &World, happens: fn(&SockHost)) {
    let two = Two::small(world, 3);
    let server = &two.there.puppets;
    let pairs: Vec<_> = (0..3).map(|_| two.connected(loopbacks()[0])).collect();
    server[0].start(Do::Recv, &[pairs[0].1, 0, 10], None);
    server[1].start(Do::StreamOut, &[pairs[1].1, 1, 1 << 30, 60_000], None);
    server[2].put(0, &(pairs[2].1 as u32).to_le_bytes());
    server[2].put(4, &[1, 0, 0, 0]);
    server[2].start(Do::Poll, &[0, 1, u64::MAX], None);
    std::thread::sleep(Duration::from_millis(30));
    assert!(server.iter().all(|puppet| !puppet.is_done()), "all wait");
    let start = Instant::now();
    happens(&two.here.host);
    assert_eq!(server[0].finish().result, errno(Errno::CONNRESET));
    assert_eq!(server[1].finish().result, errno(Errno::CONNRESET));
    assert_eq!(server[2].finish().result, 1, "the end is told unasked");
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    for (_, accepted) in pairs {
        server[0].expect(Do::Close, &[accepted], None);
    }
    until("nothing is left", || two.there.host.stats().open == 0);
}

fn the_other_host_ends(world: &World) {
    the_other_ends(world, SockHost::stop);
}

fn the_other_host_dies(world: &World) {
    the_other_ends(world, SockHost::vanish);
}

fn a_thousand_between_kernels(world: &World) {
    let options = SockOptions { sockets: 1100, ring: 4096, ..world.options() }.fitted();
    let two = Two::new(world, 1, SockOptions { warp_sockets: 1100, ..options });
    let (client, server) = (two.here.first(), two.there.first());
    let at = loopbacks()[0];
    let (listener, name) = listen(server, at, 2000);
    let (mut sockets, mut handles) = (Vec::new(), Vec::new());
    let start = Instant::now();
    for _ in 0..1000 {
        let socket = client.socket(at, WARP_STREAM);
        client.expect(Do::Connect, &[socket], Some(name));
        sockets.push(socket);
        handles.extend((server.expect(Do::Accept, &[listener], None) as u32).to_le_bytes());
    }
    assert!(start.elapsed() < Duration::from_secs(40), "opened in {:?}", start.elapsed());
    assert_eq!(two.there.host.stats().open, 1001);
    server.put(0, &handles);
    server.start(Do::EchoMany, &[0, 1000], None);
    for (number, socket) in sockets.iter().enumerate() {
        assert_eq!(client.send(*socket, &(number as u64).to_le_bytes()), 8);
    }
    for (number, socket) in sockets.iter().enumerate() {
        assert_eq!(client.recv(*socket, 100).unwrap(), (number as u64).to_le_bytes());
        client.expect(Do::Close, &[*socket], None);
    }
    assert_eq!(server.finish().result, 8000);
    until("all are closed", || two.there.host.stats().open == 1);
}

fn a_storm_between_kernels(world: &World) {
    let options = SockOptions { sockets: 64, ring: 4096, ..world.options() }.fitted();
    let two = Two::new(world, 4, options);
    let at = loopbacks()[0];
    let (listener, name) = listen(two.there.first(), at, 64);
    // Four blocks connect without waiting, ten each, before anybody accepts.
    let mut sockets = Vec::new();
    for client in &two.here.puppets {
        for _ in 0..10 {
            let socket = client.socket(at, WARP_STREAM);
            client.expect(Do::Set, &[socket, Setting::NonBlocking as u64, 1], None);
            let begun = client.call(Do::Connect, &[socket], Some(name)).result;
            assert!(begun == 0 || begun == errno(Errno::INPROGRESS), "{begun}");
            sockets.push(socket);
        }
    }
    let accepted: Vec<_> = (0..40)
        .map(|number| {
            let server = &two.there.puppets[number % 4];
            server.expect(Do::Accept, &[listener], None) as u64
        })
        .collect();
    let client = two.here.first();
    for (number, socket) in sockets.iter().enumerate() {
        until("it stands", || client.send(*socket, &[number as u8]) == 1);
    }
    let mut seen: Vec<_> =
        accepted.iter().map(|socket| two.there.first().recv(*socket, 10).unwrap()[0]).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..40).collect::<Vec<u8>>(), "each once");
}

fn strangers_are_turned_away(world: &World) {
    let two = Two::small(world, 1);
    let server = two.there.first();
    let (listener, name) = listen(server, loopbacks()[0], 8);
    let long = vec![b'x'; 5000];
    for said in
        [&b"GET / HTTP/1.1\r\n\r\n"[..], b"\n", b"{\"warpwire\":1,\"words\":\"ready\"}\n", &long]
    {
        let mut stranger = TcpStream::connect(name).unwrap();
        stranger.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stranger.write_all(said).unwrap();
        // It is told why, if it reads that before the reset, and is let go.
        let mut answer = Vec::new();
        let _ = stranger.read_to_end(&mut answer);
        assert!(stranger.read(&mut [0]).is_ok_and(|count| count == 0));
    }
    let socket = two.here.first().socket(loopbacks()[0], WARP_STREAM);
    two.here.first().expect(Do::Connect, &[socket], Some(name));
    assert!(
        server.expect(Do::Accept, &[listener], None) > 0,
        "the first that is handed out is no stranger"
    );
    until("nothing else is left", || two.there.host.stats().open == 2);
}

fn silent_strangers_harm_nobody(world: &World) {
    let two = Two::small(world, 1);
    let server = two.there.first();
    let (listener, name) = listen(server, loopbacks()[0], 100);
    // More than there are places; some of them say a little.
    let strangers: Vec<_> = (0..100)
        .map(|number| {
            let mut stranger = TcpStream::connect(name).unwrap();
            if number % 2 == 0 {
                stranger.write_all(b"{\"warpwire\":").unwrap();
            }
            stranger
        })
        .collect();
    for _ in 0..5 {
        let socket = two.here.first().socket(loopbacks()[0], WARP_STREAM);
        two.here.first().expect(Do::Connect, &[socket], Some(name));
        let accepted = server.expect(Do::Accept, &[listener], None) as u64;
        assert_eq!(server.send(accepted, b"welcome"), 7);
        assert_eq!(two.here.first().recv(socket, 10).unwrap(), b"welcome");
    }
    drop(strangers);
}

fn servers_that_are_no_warp_sockets(world: &World) {
    let stage = world.stage(1);
    let puppet = stage.first();
    let at = loopbacks()[0];
    type Serve = fn(TcpStream);
    let cases: [(Serve, Errno); 3] = [
        (|mut peer| peer.write_all(b"220 mail.example.org ESMTP\r\n").unwrap(), Errno::PROTO),
        (drop, Errno::CONNRESET),
        // It says nothing, for longer than anybody waits.
        (|mut peer| drop(peer.read_to_end(&mut Vec::new())), Errno::TIMEDOUT),
    ];
    for (serve, expected) in cases {
        let server = TcpListener::bind(at).unwrap();
        let name = server.local_addr().unwrap();
        let serving = std::thread::spawn(move || serve(server.accept().unwrap().0));
        let socket = puppet.socket(at, WARP_STREAM);
        assert_eq!(puppet.call(Do::Connect, &[socket], Some(name)).result, errno(expected));
        assert_eq!(puppet.send(socket, b"x"), errno(expected));
        puppet.expect(Do::Close, &[socket], None);
        serving.join().unwrap();
    }
    until("nothing is left", || stage.host.stats().open == 0);
}

fn the_family_is_limited(world: &World) {
    let small = SockOptions { sockets: 16, arena: 2 << 20, ..world.options() };
    let [few, none] = [2, 0].map(|warp_sockets| SockOptions { warp_sockets, ..small });
    let [here, there, none] = world.stages(1, [few, small, none]);
    let two = Two { here, there };
    let (client, server) = (two.here.first(), two.there.first());
    let at = loopbacks()[0];
    let (_, name) = listen(server, at, 8);
    let [first, second, third] = [0; 3].map(|_| client.socket(at, WARP_STREAM));
    client.expect(Do::Connect, &[first], Some(name));
    client.expect(Do::Connect, &[second], Some(name));
    let full = client.call(Do::Connect, &[third], Some(name)).result;
    assert_eq!(full, errno(Errno::NOBUFS));
    client.expect(Do::Close, &[first], None);
    until("its queue pair is free", || two.here.host.stats().open == 2);
    client.expect(Do::Connect, &[third], Some(name));
    let off = none.first().call(Do::Socket, &[4, WARP_STREAM], None).result;
    assert_eq!(off, errno(Errno::OPNOTSUPP), "the family is switched off");
}

/// A peer that the test plays by hand: it meets a kernel by the rules, and then does as it likes.
struct Rogue {
    tcp: TcpStream,
    qp: Qp,
    cq: Cq,
    memory: Mr,
    theirs: Hello,
    _context: Context,
}

impl Rogue {
    const RING: u64 = 4096;

    /// Connects to a warp listener.
    fn connect(name: SocketAddr) -> Self {
        Self::with(name, HcaOptions::default())
    }

    fn with(name: SocketAddr, options: HcaOptions) -> Self {
        let tcp = TcpStream::connect(name).unwrap();
        let any = SocketAddr::new(name.ip(), 0);
        let link = Auto::bind(any, udp::Options::default(), shm::Options::default()).unwrap();
        let context = Context::open_with(link, options).unwrap();
        let (pd, cq) = (context.pd(), context.create_cq(64).unwrap());
        let qp = context.create_qp(&pd, &cq, &cq, QpOptions::default()).unwrap();
        let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        let memory = context.register(&pd, HostMemory::new(2 * Self::RING).unwrap(), all).unwrap();
        let spot = |offset| {
            let Remote { address, rkey } = memory.remote(offset);
            Spot { address, rkey }
        };
        let hello = Hello {
            offer: qp.offer(),
            ring: spot(0),
            ring_size: Self::RING,
            received: spot(Self::RING),
            taken: spot(Self::RING + 8),
            window: None,
        };
        let mut handshake = Handshake::new(&hello).unwrap();
        let mut tcp_side = &tcp;
        while !handshake.is_done() {
            let count = tcp_side.write(handshake.to_send()).unwrap();
            handshake.sent(count);
            if handshake.is_done() {
                break;
            }
            let mut bytes = [0; 1024];
            let count = tcp_side.read(&mut bytes).unwrap();
            assert!(count > 0, "it hung up");
            handshake.take(&bytes[..count]).unwrap();
            if let Some(theirs) = handshake.peer().copied()
                && !handshake.has_met()
            {
                qp.connect(&theirs.offer).unwrap();
                handshake.met();
            }
        }
        let theirs = *handshake.peer().unwrap();
        Self { tcp, qp, cq, memory, theirs, _context: context }
    }

    /// Writes a word somewhere; whether it was let.
    fn write(&self, to: Remote, value: u64) -> bool {
        let bytes = value.to_le_bytes();
        let request = Request::new(1, Op::Write(to)).inline(&bytes);
        self.qp.post_send(&[request]).unwrap();
        self.cq.next(Duration::from_secs(10)).unwrap().unwrap().is_success()
    }

    fn says_received(&self, value: u64) {
        assert!(self.write(self.theirs.received.plus(0), value));
    }

    fn says_taken(&self, value: u64) {
        assert!(self.write(self.theirs.taken.plus(0), value));
    }
}

/// A listener, and a connection between two honest kernels.
fn with_bystanders(two: &Two) -> (u64, SocketAddr, (u64, u64)) {
    let bystanders = two.connected(loopbacks()[0]);
    let (listener, name) = listen(two.there.first(), loopbacks()[0], 8);
    (listener, name, bystanders)
}

fn peers_that_lie_are_found_out(world: &World) {
    let two = Two::small(world, 1);
    let server = two.there.first();
    let (listener, name, (socket, accepted)) = with_bystanders(&two);
    let ring = 64 << 10;
    let meet = || {
        let rogue = Rogue::connect(name);
        (rogue, server.expect(Do::Accept, &[listener], None) as u64)
    };
    // More than the ring holds, by a byte or by all; and an end that lies far beyond.
    for lie in [ring + 1, u64::MAX >> 1, ENDED | (ring + 1), ENDED | 1 << 62] {
        let (rogue, victim) = meet();
        rogue.says_received(ring);
        assert_eq!(server.recv(victim, 10).unwrap().len(), 10, "all that fits is believed");
        rogue.says_received(lie + 10);
        assert_eq!(server.recv(victim, 100), Err(errno(Errno::PROTO)), "{lie:#x}");
        assert_eq!(server.recv(victim, 100), Err(errno(Errno::PROTO)), "and stays so");
        assert_eq!(server.send(victim, b"x"), errno(Errno::PROTO));
        let end = (&rogue.tcp).read(&mut [0]);
        assert!(end.is_err_and(|why| why.kind() == std::io::ErrorKind::ConnectionReset));
        server.expect(Do::Close, &[victim], None);
    }
    // A counter that goes back behind what was read.
    let (rogue, victim) = meet();
    rogue.says_received(10);
    assert_eq!(server.recv(victim, 10).unwrap().len(), 10);
    rogue.says_received(9);
    assert_eq!(server.recv(victim, 10), Err(errno(Errno::PROTO)));
    server.expect(Do::Close, &[victim], None);
    // More was taken than sent.
    for lie in [6, u64::MAX, 1 << 40, DEAF | 6] {
        let (rogue, victim) = meet();
        assert_eq!(server.send(victim, b"hello"), 5);
        rogue.says_taken(lie);
        assert_eq!(server.send(victim, b"hello"), errno(Errno::PROTO), "{lie:#x}");
        server.expect(Do::Close, &[victim], None);
        drop(rogue);
    }
    // A byte on the connection where nobody speaks any more.
    let (rogue, victim) = meet();
    (&rogue.tcp).write_all(b"!").unwrap();
    assert_eq!(server.recv(victim, 10), Err(errno(Errno::PROTO)));
    server.expect(Do::Close, &[victim], None);
    assert_eq!(two.here.first().send(socket, b"fine"), 4);
    assert_eq!(server.recv(accepted, 10).unwrap(), b"fine");
}

fn peers_reach_nothing_else(world: &World) {
    let two = Two::small(world, 1);
    let server = two.there.first();
    let (listener, name, (socket, accepted)) = with_bystanders(&two);
    let other = Rogue::connect(name);
    server.expect(Do::Accept, &[listener], None);
    let targets: [fn(&Hello, &Hello) -> Remote; 6] = [
        |mine, _| mine.ring.plus(mine.ring_size - 4),
        |mine, _| mine.ring.plus(0_u64.wrapping_sub(8)),
        |mine, _| mine.received.plus(16),
        |mine, _| mine.received.plus(0_u64.wrapping_sub(8)),
        |_, others| others.ring.plus(0),
        |_, others| others.received.plus(0),
    ];
    for (number, target) in targets.into_iter().enumerate() {
        let rogue = Rogue::connect(name);
        let victim = server.expect(Do::Accept, &[listener], None) as u64;
        assert!(!rogue.write(target(&rogue.theirs, &other.theirs), 7), "target {number}");
        // Its connection has failed by that, and no other.
        let ended = server.recv(victim, 1);
        assert_eq!(ended, Err(errno(Errno::CONNRESET)), "target {number}");
        server.expect(Do::Close, &[victim], None);
        assert_eq!(rogue.memory.len(), 2 * Rogue::RING);
    }
    assert_eq!(two.here.first().send(socket, b"fine"), 4);
    assert_eq!(server.recv(accepted, 10).unwrap(), b"fine");
}

fn a_device_that_does_not_answer(world: &World) {
    let two = Two::small(world, 2);
    let [server, other] = &two.there.puppets[..] else { panic!("two puppets") };
    let (listener, name, (socket, accepted)) = with_bystanders(&two);
    // Nobody drives it, as if its network were cut. Its TCP connection stands.
    let rogue = Rogue::with(name, HcaOptions { drive: Drive::Inline, direct: false });
    let victim = server.expect(Do::Accept, &[listener], None) as u64;
    let start = Instant::now();
    server.start(Do::Recv, &[victim, 0, 10], None);
    assert_eq!(other.send(victim, b"hello?"), 6, "it is on its way");
    assert_eq!(server.finish().result, errno(Errno::TIMEDOUT), "what waits is released");
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    assert_eq!(other.send(victim, b"hello?"), errno(Errno::TIMEDOUT));
    server.expect(Do::Close, &[victim], None);
    assert_eq!(two.here.first().send(socket, b"fine"), 4);
    assert_eq!(server.recv(accepted, 10).unwrap(), b"fine");
    until("its place is free", || two.there.host.stats().open == 2);
    drop(rogue);
}

fn bytes_are_counted(world: &World) {
    let two = Two::small(world, 2);
    let counted = || {
        [&two.here, &two.there].map(|stage| {
            let stats = stage.host.stats();
            assert_eq!((stats.received, stats.sent), (0, 0), "nothing went through the host");
            (stats.warp_sent, stats.warp_received)
        })
    };
    let (client, server) = (two.here.first(), two.there.first());
    let (socket, accepted) = two.connected(loopbacks()[0]);
    assert_eq!(counted(), [(0, 0); 2]);
    assert_eq!(client.send(socket, b"twelve bytes"), 12);
    assert_eq!(server.recv(accepted, 5).unwrap().len(), 5);
    assert_eq!(counted(), [(12, 0), (0, 5)], "while it stands, and as far as they were read");
    server.expect(Do::Close, &[accepted], None);
    assert_eq!(counted(), [(12, 0), (0, 5)], "when one end is closed");
    client.expect(Do::Close, &[socket], None);
    assert_eq!(counted(), [(12, 0), (0, 5)], "and when both are");

    // The places are used again; one is never accepted.
    let (listener, name) = listen(server, loopbacks()[0], 8);
    let socket = client.socket(name, WARP_STREAM);
    client.expect(Do::Connect, &[socket], Some(name));
    assert_eq!(client.send(socket, b"nobody reads it"), 15);
    assert_eq!(counted(), [(27, 0), (0, 5)]);
    server.expect(Do::Close, &[listener], None);
    client.expect(Do::Close, &[socket], None);
    assert_eq!(counted(), [(27, 0), (0, 5)]);

    // More than 32 bits count is tried elsewhere; here more than rings hold, both ways, and a reset in the end.
    let (socket, accepted) = two.connected(loopbacks()[1]);
    let total = 3_000_000;
    two.here.puppets[1].start(Do::StreamIn, &[socket, 2, total, 9_000], None);
    two.there.puppets[1].start(Do::StreamIn, &[accepted, 1, total, 9_000], None);
    server.start(Do::StreamOut, &[accepted, 2, total, 70_000], None);
    client.expect(Do::StreamOut, &[socket, 1, total, 70_000], None);
    server.finish();
    for stage in [&two.here, &two.there] {
        assert_eq!(stage.puppets[1].finish().result, total as i64);
    }
    assert_eq!(counted(), [(total + 27, total), (total, total + 5)]);
    client.expect(Do::Set, &[socket, Setting::Linger as u64, 0], None);
    client.expect(Do::Close, &[socket], None);
    assert_eq!(server.recv(accepted, 1), Err(errno(Errno::CONNRESET)));
    assert_eq!(counted(), [(total + 27, total), (total, total + 5)]);
    two.there.host.stop();
    assert_eq!(counted(), [(total + 27, total), (total, total + 5)], "after its end, too");
}

/// A CPU program that has shut down: the kernel that waits for room, and whoever comes later, are told.
fn a_peer_that_reads_no_more_breaks_the_pipe(world: &World) {
    let stage = world.stage(2);
    let (puppet, other) = (&stage.puppets[0], &stage.puppets[1]);
    let (socket, mut peer) = puppet.connected(loopbacks()[0]);
    puppet.start(Do::StreamOut, &[socket, 1, 1 << 30, 100_000], None);
    std::thread::sleep(Duration::from_millis(50));
    assert!(!puppet.is_done());
    peer.shutdown(std::net::Shutdown::Read);
    assert_eq!(puppet.finish().result, errno(Errno::PIPE));
    assert_eq!(puppet.send(socket, b"x"), errno(Errno::PIPE), "and stays so");
    assert_eq!(puppet.call(Do::Reserve, &[socket, 0, 10], None).result, errno(Errno::PIPE));
    other.put(0, &(socket as u32).to_le_bytes());
    other.put(4, &[4, 0, 0, 0]);
    assert_eq!(other.call(Do::Poll, &[0, 1, u64::MAX], None).result, 1, "sending would not wait");
    // It still talks.
    peer.write_all(b"I am no listener").unwrap();
    assert_eq!(puppet.recv(socket, 100).unwrap(), b"I am no listener");
    puppet.expect(Do::Close, &[socket], None);

    // A span that is out when it happens.
    let (socket, peer) = puppet.accepted(loopbacks()[1]);
    puppet.expect(Do::Reserve, &[socket, 0, 10], None);
    peer.shutdown(std::net::Shutdown::Read);
    let mut told = 0;
    until("it has landed", || {
        told = puppet.call(Do::Commit, &[socket, 0, 10], None).result;
        if told == 0 {
            told = puppet.call(Do::Reserve, &[socket, 0, 10], None).result;
        }
        told < 0
    });
    assert_eq!(told, errno(Errno::PIPE));
    puppet.expect(Do::Close, &[socket], None);
    until("both are gone", || stage.host.stats().open == 0);
}

/// Between kernels, with a span that is out.
fn a_kernel_that_reads_no_more_breaks_the_pipe(world: &World) {
    let two = Two::small(world, 1);
    let (client, server) = (two.here.first(), two.there.first());
    for span in [false, true] {
        let (socket, accepted) = two.connected(loopbacks()[0]);
        client.start(Do::StreamOut, &[socket, 1, 1 << 30, 100_000], None);
        std::thread::sleep(Duration::from_millis(50));
        assert!(!client.is_done());
        if span {
            server.expect(Do::Borrow, &[accepted, 0, 10], None);
        }
        server.expect(Do::Shutdown, &[accepted, 0], None);
        if span {
            server.expect(Do::GiveBack, &[accepted, 0, 1], None);
        }
        assert_eq!(client.finish().result, errno(Errno::PIPE), "span: {span}");
        assert_eq!(server.send(accepted, b"heard enough"), 12);
        assert_eq!(client.recv(socket, 100).unwrap(), b"heard enough");
        client.expect(Do::Close, &[socket], None);
        server.expect(Do::Close, &[accepted], None);
        until("all is given back", || {
            [&two.here, &two.there].iter().all(|stage| stage.host.stats().open == 0)
        });
    }
}
