//! `warp` sockets between two kernels, each served by a host of its own, and between a kernel and
//! peers that violate the protocol.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use warpwire::hca::HcaOptions;
use warpwire::link::{Auto, ShmOptions, UdpOptions};
use warpwire::mr::HostMemory;
use warpwire::sock::device::SockOption;
use warpwire::sock::layout::events;
use warpwire::sock::warp::{FIN, Handshake, Hello, READ_CLOSED, RemoteAddr};
use warpwire::sock::{SockHost, SockOptions};
use warpwire::verbs::{
    Access, Context, Cq, Mr, Pd, ProgressMode, Qp, QpOptions, Remote, SendRequest, WrOp,
};

use crate::sock::polling::poll;
use crate::sock::scripted::{KernelOp, ScriptedKernel};
use crate::sock::testbed::{Harness, Testbed, WARP_STREAM, errno, loopbacks, until};
use testkit::{cases, deadline};

cases!(Testbed; CASES:
    one_byte_each_way,
    random_pieces_between_kernels,
    rings_of_different_sizes,
    half_closed_between_kernels,
    bytes_arrive_after_close,
    a_reset_between_kernels,
    the_other_host_ends,
    the_other_host_dies,
    a_storm_between_kernels,
    strangers_are_refused,
    silent_strangers_do_no_harm,
    servers_that_are_not_warp_sockets,
    the_family_is_limited,
    impossible_counters_of_a_peer,
    peers_reach_nothing_else,
    a_device_that_does_not_answer,
    bytes_are_counted,
    a_peer_that_reads_no_more_breaks_the_pipe,
    a_kernel_that_reads_no_more_breaks_the_pipe,
);
cases!(Testbed; SCALE: ; change: a_thousand_between_kernels);

/// Two hosts with scripted kernels.
pub struct HostPair {
    pub here: Harness,
    pub there: Harness,
}

impl HostPair {
    pub fn new(testbed: &Testbed, scripted_kernels: u64, options: SockOptions) -> Self {
        Self::with(testbed, scripted_kernels, [options; 2])
    }

    fn with(testbed: &Testbed, scripted_kernels: u64, options: [SockOptions; 2]) -> Self {
        let [here, there] = testbed.harnesses(scripted_kernels, options);
        Self { here, there }
    }

    pub fn small(testbed: &Testbed, scripted_kernels: u64) -> Self {
        Self::new(
            testbed,
            scripted_kernels,
            testbed.options().with_sockets(64).with_arena(16 << 20),
        )
    }

    /// A connection that a kernel of one host made and one of the other has accepted.
    pub fn connected(&self, at: SocketAddr) -> (u64, u64) {
        connect(self.here.first(), self.there.first(), at)
    }
}

/// A listener at a free port, and its address.
fn listen(server: &ScriptedKernel, at: SocketAddr, backlog: u64) -> (u64, SocketAddr) {
    let listener = server.socket(at, WARP_STREAM);
    server.expect(KernelOp::Bind, &[listener], Some(at));
    server.expect(KernelOp::Listen, &[listener, backlog], None);
    (listener, server.call(KernelOp::LocalName, &[listener], None).address.unwrap())
}

fn connect(client: &ScriptedKernel, server: &ScriptedKernel, at: SocketAddr) -> (u64, u64) {
    let (listener, name) = listen(server, at, 8);
    let socket = client.socket(at, WARP_STREAM);
    client.expect(KernelOp::Connect, &[socket], Some(name));
    let accepted = server.expect(KernelOp::Accept, &[listener], None) as u64;
    server.expect(KernelOp::Close, &[listener], None);
    (socket, accepted)
}

fn one_byte_each_way(testbed: &Testbed) {
    let hosts = HostPair::small(testbed, 1);
    let (client, server) = (hosts.here.first(), hosts.there.first());
    for at in loopbacks() {
        let (socket, accepted) = hosts.connected(at);
        assert_eq!(client.send(socket, b"a"), 1);
        assert_eq!(server.recv(accepted, 10).unwrap(), b"a");
        assert_eq!(server.send(accepted, b"bc"), 2);
        assert_eq!(client.recv(socket, 10).unwrap(), b"bc");
        client.expect(KernelOp::Close, &[socket], None);
        assert_eq!(server.recv(accepted, 10).unwrap(), b"");
        server.expect(KernelOp::Close, &[accepted], None);
    }
}

fn random_pieces_between_kernels(testbed: &Testbed) {
    let hosts = HostPair::new(testbed, 2, testbed.options().with_sockets(16));
    for (number, total) in [1, 2, 100, 65_535, 65_537, 1 << 20, 16 << 20].into_iter().enumerate() {
        let (socket, accepted) = hosts.connected(loopbacks()[number % 2]);
        hosts.here.scripted_kernels[0].start(
            KernelOp::StreamOut,
            &[socket, 11, total, 50_000],
            None,
        );
        hosts.here.scripted_kernels[1].start(
            KernelOp::StreamIn,
            &[socket, 12, total, 50_000],
            None,
        );
        hosts.there.scripted_kernels[0].start(
            KernelOp::StreamOut,
            &[accepted, 12, total, 70_000],
            None,
        );
        hosts.there.scripted_kernels[1].start(
            KernelOp::StreamIn,
            &[accepted, 11, total, 30_000],
            None,
        );
        for scripted in hosts.here.scripted_kernels.iter().chain(&hosts.there.scripted_kernels) {
            assert_eq!(scripted.finish().result, total as i64, "or -84: a byte differs");
        }
        hosts.here.first().expect(KernelOp::Close, &[socket], None);
        hosts.there.first().expect(KernelOp::Close, &[accepted], None);
    }
}

fn rings_of_different_sizes(testbed: &Testbed) {
    let large = testbed.options().with_sockets(16).with_ring(256 << 10).with_arena(16 << 20);
    let hosts = HostPair::with(testbed, 2, [large.with_ring(4096), large]);
    let total = 1_000_003;
    let (socket, accepted) = hosts.connected(loopbacks()[0]);
    // The small end has at most 4096 bytes in flight, much less than the large one's default report
    // threshold.
    hosts.here.scripted_kernels[0].start(KernelOp::StreamOut, &[socket, 11, total, 9_000], None);
    hosts.there.scripted_kernels[1].start(KernelOp::StreamIn, &[accepted, 11, total, 70_000], None);
    hosts.there.scripted_kernels[0].start(
        KernelOp::StreamOut,
        &[accepted, 12, total, 70_000],
        None,
    );
    hosts.here.scripted_kernels[1].start(KernelOp::StreamIn, &[socket, 12, total, 9_000], None);
    for scripted in hosts.here.scripted_kernels.iter().chain(&hosts.there.scripted_kernels) {
        assert_eq!(scripted.finish().result, total as i64, "or -84: a byte differs");
    }
}

fn half_closed_between_kernels(testbed: &Testbed) {
    let hosts = HostPair::small(testbed, 1);
    let (client, server) = (hosts.here.first(), hosts.there.first());
    let (socket, accepted) = hosts.connected(loopbacks()[1]);
    assert_eq!(client.send(socket, b"question"), 8);
    client.expect(KernelOp::Shutdown, &[socket, 1], None);
    assert_eq!(client.send(socket, b"x"), errno(Errno::PIPE));
    assert_eq!(server.recv(accepted, 100).unwrap(), b"question");
    assert_eq!(server.recv(accepted, 100).unwrap(), b"");
    assert_eq!(server.send(accepted, b"answer"), 6);
    assert_eq!(client.recv(socket, 100).unwrap(), b"answer");
    server.expect(KernelOp::Close, &[accepted], None);
    assert_eq!(client.recv(socket, 100).unwrap(), b"");
    client.expect(KernelOp::Close, &[socket], None);
    for harness in [&hosts.here, &hosts.there] {
        until("all are closed", || harness.host.stats().open == 0);
    }
}

fn bytes_arrive_after_close(testbed: &Testbed) {
    let hosts = HostPair::small(testbed, 1);
    let (client, server) = (hosts.here.first(), hosts.there.first());
    let (socket, accepted) = hosts.connected(loopbacks()[0]);
    // As much as the ring holds: the sender is closed before the receiver reads.
    client.expect(KernelOp::StreamOut, &[socket, 5, 64 << 10, 60_000], None);
    client.expect(KernelOp::Close, &[socket], None);
    until("the sender is released", || hosts.here.host.stats().open == 0);
    assert_eq!(
        server.call(KernelOp::StreamIn, &[accepted, 5, 1 << 20, 5_000], None).result,
        64 << 10
    );
    assert_eq!(server.recv(accepted, 1).unwrap(), b"");
    until("the error is known", || server.send(accepted, b"are you there?") == errno(Errno::PIPE));
    server.expect(KernelOp::Close, &[accepted], None);
    until("both are released", || hosts.there.host.stats().open == 0);
}

fn a_reset_between_kernels(testbed: &Testbed) {
    let hosts = HostPair::small(testbed, 2);
    let (client, server) = (hosts.here.first(), hosts.there.first());
    for waits in [KernelOp::Recv, KernelOp::StreamOut, KernelOp::Borrow] {
        let (socket, accepted) = hosts.connected(loopbacks()[0]);
        server.start(waits, &[accepted, 0, 1 << 30, 60_000], None);
        std::thread::sleep(Duration::from_millis(20));
        assert!(!server.is_done(), "{waits:?} is blocked");
        client.expect(KernelOp::Set, &[socket, SockOption::Linger as u64, 0], None);
        client.expect(KernelOp::Close, &[socket], None);
        assert_eq!(server.finish().result, errno(Errno::CONNRESET), "{waits:?}");
        assert!(server.send(accepted, b"x") < 0);
        server.expect(KernelOp::Close, &[accepted], None);
    }
    // Bytes that arrived before the reset are received.
    let (socket, accepted) = hosts.connected(loopbacks()[0]);
    assert_eq!(client.send(socket, b"last bytes before reset"), 23);
    assert_eq!(poll(server, &[(accepted, events::IN)], u64::MAX).0, 1, "they are in the ring");
    client.expect(KernelOp::Set, &[socket, SockOption::Linger as u64, 0], None);
    client.expect(KernelOp::Close, &[socket], None);
    assert_eq!(server.recv(accepted, 100).unwrap(), b"last bytes before reset");
    assert_eq!(server.recv(accepted, 100), Err(errno(Errno::CONNRESET)));
}

/// All kinds of calls are blocked at one host, when something happens to the other.
fn with_other_host(testbed: &Testbed, happens: fn(&SockHost)) {
    let hosts = HostPair::small(testbed, 3);
    let server = &hosts.there.scripted_kernels;
    let pairs: Vec<_> = (0..3).map(|_| hosts.connected(loopbacks()[0])).collect();
    server[0].start(KernelOp::Recv, &[pairs[0].1, 0, 10], None);
    server[1].start(KernelOp::StreamOut, &[pairs[1].1, 1, 1 << 30, 60_000], None);
    server[2].put(0, &(pairs[2].1 as u32).to_le_bytes());
    server[2].put(4, &[1, 0, 0, 0]);
    server[2].start(KernelOp::Poll, &[0, 1, u64::MAX], None);
    std::thread::sleep(Duration::from_millis(30));
    assert!(server.iter().all(|scripted| !scripted.is_done()), "all are blocked");
    let start = Instant::now();
    happens(&hosts.here.host);
    assert_eq!(server[0].finish().result, errno(Errno::CONNRESET));
    assert_eq!(server[1].finish().result, errno(Errno::CONNRESET));
    assert_eq!(server[2].finish().result, 1, "HUP is always reported");
    assert!(start.elapsed() < deadline(Duration::from_secs(2)), "{:?}", start.elapsed());
    for (_, accepted) in pairs {
        server[0].expect(KernelOp::Close, &[accepted], None);
    }
    until("nothing is left", || hosts.there.host.stats().open == 0);
}

fn the_other_host_ends(testbed: &Testbed) {
    with_other_host(testbed, SockHost::stop);
}

fn the_other_host_dies(testbed: &Testbed) {
    with_other_host(testbed, SockHost::simulate_crash);
}

fn a_thousand_between_kernels(testbed: &Testbed) {
    let options = testbed.options().with_sockets(1100).with_ring(4096).with_fitting_arena();
    let hosts = HostPair::new(testbed, 1, options.with_warp_sockets(1100));
    let (client, server) = (hosts.here.first(), hosts.there.first());
    let at = loopbacks()[0];
    let (listener, name) = listen(server, at, 2000);
    let (mut sockets, mut handles) = (Vec::new(), Vec::new());
    let start = Instant::now();
    for _ in 0..1000 {
        let socket = client.socket(at, WARP_STREAM);
        client.expect(KernelOp::Connect, &[socket], Some(name));
        sockets.push(socket);
        handles.extend((server.expect(KernelOp::Accept, &[listener], None) as u32).to_le_bytes());
    }
    assert!(start.elapsed() < deadline(Duration::from_secs(40)), "opened in {:?}", start.elapsed());
    assert_eq!(hosts.there.host.stats().open, 1001);
    server.put(0, &handles);
    server.start(KernelOp::EchoMany, &[0, 1000], None);
    for (number, socket) in sockets.iter().enumerate() {
        assert_eq!(client.send(*socket, &(number as u64).to_le_bytes()), 8);
    }
    for (number, socket) in sockets.iter().enumerate() {
        assert_eq!(client.recv(*socket, 100).unwrap(), (number as u64).to_le_bytes());
        client.expect(KernelOp::Close, &[*socket], None);
    }
    assert_eq!(server.finish().result, 8000);
    until("all are closed", || hosts.there.host.stats().open == 1);
}

fn a_storm_between_kernels(testbed: &Testbed) {
    let options = testbed.options().with_sockets(64).with_ring(4096).with_fitting_arena();
    let hosts = HostPair::new(testbed, 4, options);
    let at = loopbacks()[0];
    let (listener, name) = listen(hosts.there.first(), at, 64);
    // Four blocks connect without waiting, ten times each, before the first accept.
    let mut sockets = Vec::new();
    for client in &hosts.here.scripted_kernels {
        for _ in 0..10 {
            let socket = client.socket(at, WARP_STREAM);
            client.expect(KernelOp::Set, &[socket, SockOption::NonBlocking as u64, 1], None);
            let begun = client.call(KernelOp::Connect, &[socket], Some(name)).result;
            assert!(begun == 0 || begun == errno(Errno::INPROGRESS), "{begun}");
            sockets.push(socket);
        }
    }
    let accepted: Vec<_> = (0..40)
        .map(|number| {
            let server = &hosts.there.scripted_kernels[number % 4];
            server.expect(KernelOp::Accept, &[listener], None) as u64
        })
        .collect();
    let client = hosts.here.first();
    for (number, socket) in sockets.iter().enumerate() {
        until("it is connected", || client.send(*socket, &[number as u8]) == 1);
    }
    let mut seen: Vec<_> =
        accepted.iter().map(|socket| hosts.there.first().recv(*socket, 10).unwrap()[0]).collect();
    seen.sort_unstable();
    assert_eq!(seen, (0..40).collect::<Vec<u8>>(), "each connection once");
}

fn strangers_are_refused(testbed: &Testbed) {
    let hosts = HostPair::small(testbed, 1);
    let server = hosts.there.first();
    let (listener, name) = listen(server, loopbacks()[0], 8);
    let long = vec![b'x'; 5000];
    // A valid hello, with a queue pair elsewhere.
    let third = std::net::UdpSocket::bind("127.0.0.9:0").unwrap();
    let lie = format!(
        concat!(
            r#"{{"warpwire":1,"words":{{"hello":{{"magic":"warp socket","version":1,"#,
            r#""endpoint":{{"address":"{}","qpn":1,"psn":1,"mtu":1024,"max_rd_atomic":1}},"#,
            r#""ring":{{"address":0,"rkey":0}},"ring_size":4096,"#,
            r#""received":{{"address":0,"rkey":0}},"taken":{{"address":8,"rkey":0}}}}}}}}"#,
            "\n"
        ),
        third.local_addr().unwrap()
    );
    let ready = b"{\"warpwire\":1,\"words\":\"ready\"}\n";
    for message in [&b"GET / HTTP/1.1\r\n\r\n"[..], b"\n", ready, &long, lie.as_bytes()] {
        let mut stranger = TcpStream::connect(name).unwrap();
        stranger.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        stranger.write_all(message).unwrap();
        // The stranger gets the reason, unless the reset is faster, and is disconnected.
        let mut answer = Vec::new();
        let _ = stranger.read_to_end(&mut answer);
        assert!(stranger.read(&mut [0]).is_ok_and(|count| count == 0));
    }
    let socket = hosts.here.first().socket(loopbacks()[0], WARP_STREAM);
    hosts.here.first().expect(KernelOp::Connect, &[socket], Some(name));
    assert!(
        server.expect(KernelOp::Accept, &[listener], None) > 0,
        "the first accepted connection is not a stranger"
    );
    until("nothing else is left", || hosts.there.host.stats().open == 2);
    third.set_nonblocking(true).unwrap();
    assert!(third.recv(&mut [0; 64]).is_err(), "the third party got a packet");
}

fn silent_strangers_do_no_harm(testbed: &Testbed) {
    let hosts = HostPair::small(testbed, 1);
    let server = hosts.there.first();
    let (listener, name) = listen(server, loopbacks()[0], 100);
    // More than there are slots; some of them send a part of a hello.
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
        let socket = hosts.here.first().socket(loopbacks()[0], WARP_STREAM);
        hosts.here.first().expect(KernelOp::Connect, &[socket], Some(name));
        let accepted = server.expect(KernelOp::Accept, &[listener], None) as u64;
        assert_eq!(server.send(accepted, b"welcome"), 7);
        assert_eq!(hosts.here.first().recv(socket, 10).unwrap(), b"welcome");
    }
    drop(strangers);
}

fn servers_that_are_not_warp_sockets(testbed: &Testbed) {
    let harness = testbed.harness(1);
    let scripted = harness.first();
    let at = loopbacks()[0];
    type Serve = fn(TcpStream);
    let cases: [(Serve, Errno); 3] = [
        (|mut peer| peer.write_all(b"220 mail.example.org ESMTP\r\n").unwrap(), Errno::PROTO),
        (drop, Errno::CONNRESET),
        // A server that sends nothing for longer than the timeout.
        (|mut peer| drop(peer.read_to_end(&mut Vec::new())), Errno::TIMEDOUT),
    ];
    for (serve, expected) in cases {
        let server = TcpListener::bind(at).unwrap();
        let name = server.local_addr().unwrap();
        let serving = std::thread::spawn(move || serve(server.accept().unwrap().0));
        let socket = scripted.socket(at, WARP_STREAM);
        assert_eq!(scripted.call(KernelOp::Connect, &[socket], Some(name)).result, errno(expected));
        assert_eq!(scripted.send(socket, b"x"), errno(expected));
        scripted.expect(KernelOp::Close, &[socket], None);
        serving.join().unwrap();
    }
    until("nothing is left", || harness.host.stats().open == 0);
}

fn the_family_is_limited(testbed: &Testbed) {
    let small = testbed.options().with_sockets(16).with_arena(2 << 20);
    let [few, none] = [2, 0].map(|warp_sockets| small.with_warp_sockets(warp_sockets));
    let [here, there, none] = testbed.harnesses(1, [few, small, none]);
    let hosts = HostPair { here, there };
    let (client, server) = (hosts.here.first(), hosts.there.first());
    let at = loopbacks()[0];
    let (listener, name) = listen(server, at, 8);
    let [first, second, third, fourth] = [0; 4].map(|_| client.socket(at, WARP_STREAM));
    client.expect(KernelOp::Connect, &[first], Some(name));
    client.expect(KernelOp::Connect, &[second], Some(name));
    let full = client.call(KernelOp::Connect, &[third], Some(name)).result;
    assert_eq!(full, errno(Errno::NOBUFS));
    client.expect(KernelOp::Close, &[first], None);
    until("its queue pair is free", || hosts.here.host.stats().open == 3);
    client.expect(KernelOp::Connect, &[third], Some(name));
    // A kernel may be using the queue pair of a connection that fails: it is not given to others.
    let [_, reset, _] = [0; 3].map(|_| server.expect(KernelOp::Accept, &[listener], None) as u64);
    server.expect(KernelOp::Set, &[reset, SockOption::Linger as u64, 0], None);
    server.expect(KernelOp::Close, &[reset], None);
    until("it is reset", || client.send(second, b"x") == errno(Errno::CONNRESET));
    let full = client.call(KernelOp::Connect, &[fourth], Some(name)).result;
    assert_eq!(full, errno(Errno::NOBUFS));
    client.expect(KernelOp::Close, &[second], None);
    client.expect(KernelOp::Connect, &[fourth], Some(name));
    let off = none.first().call(KernelOp::Socket, &[4, WARP_STREAM], None).result;
    assert_eq!(off, errno(Errno::OPNOTSUPP), "the family is disabled");
}

/// A peer implemented by the test: it completes the handshake, and then does what the case needs.
pub struct RawPeer {
    tcp: TcpStream,
    qp: Qp,
    cq: Cq,
    memory: Mr,
    theirs: Hello,
    _context: Context,
}

impl RawPeer {
    pub const RING: u64 = 4096;

    /// Connects to a warp listener.
    fn connect(name: SocketAddr) -> Self {
        Self::with(name, HcaOptions::default())
    }

    fn with(name: SocketAddr, options: HcaOptions) -> Self {
        let all = Access::LOCAL_WRITE | Access::REMOTE_WRITE;
        Self::with_memory(name, options, |context, pd| {
            context.register(pd, HostMemory::new(2 * Self::RING).unwrap(), all).unwrap()
        })
    }

    /// With a ring, and counters behind it, in memory that the caller registers.
    pub fn with_memory(
        name: SocketAddr,
        options: HcaOptions,
        register: impl FnOnce(&Context, &Pd) -> Mr,
    ) -> Self {
        let tcp = TcpStream::connect(name).unwrap();
        let any = SocketAddr::new(name.ip(), 0);
        let link = Auto::bind(any, UdpOptions::default(), ShmOptions::default()).unwrap();
        let context = Context::open_with(link, options).unwrap();
        let (pd, cq) = (context.alloc_pd(), context.create_cq(64).unwrap());
        let qp = context.create_qp(&pd, &cq, &cq, QpOptions::default()).unwrap();
        let memory = register(&context, &pd);
        let remote_addr = |offset| {
            let Remote { address, rkey } = memory.remote(offset);
            RemoteAddr { address, rkey }
        };
        let hello = Hello {
            endpoint: qp.endpoint(),
            ring: remote_addr(0),
            ring_size: Self::RING,
            received: remote_addr(Self::RING),
            taken: remote_addr(Self::RING + 8),
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
            assert!(count > 0, "the connection was closed");
            handshake.take(&bytes[..count]).unwrap();
            if let Some(theirs) = handshake.peer().copied()
                && !handshake.is_ready()
            {
                qp.connect(&theirs.endpoint).unwrap();
                handshake.mark_ready();
            }
        }
        let theirs = *handshake.peer().unwrap();
        Self { tcp, qp, cq, memory, theirs, _context: context }
    }

    /// Writes a remote word; returns whether that succeeded.
    fn write(&self, to: Remote, value: u64) -> bool {
        let bytes = value.to_le_bytes();
        let request = SendRequest::new(1, WrOp::Write(to)).inline(&bytes);
        self.qp.post_send(&[request]).unwrap();
        self.cq.wait_next(Duration::from_secs(10)).unwrap().unwrap().is_success()
    }

    fn write_received(&self, value: u64) {
        assert!(self.write(self.theirs.received.at_offset(0), value));
    }

    fn write_taken(&self, value: u64) {
        assert!(self.write(self.theirs.taken.at_offset(0), value));
    }
}

/// A listener, and a connection between two correct kernels.
pub fn with_bystanders(hosts: &HostPair) -> (u64, SocketAddr, (u64, u64)) {
    let bystanders = hosts.connected(loopbacks()[0]);
    let (listener, name) = listen(hosts.there.first(), loopbacks()[0], 8);
    (listener, name, bystanders)
}

fn impossible_counters_of_a_peer(testbed: &Testbed) {
    let hosts = HostPair::small(testbed, 1);
    let server = hosts.there.first();
    let (listener, name, (socket, accepted)) = with_bystanders(&hosts);
    let ring = 64 << 10;
    let connect_raw = || {
        let raw_peer = RawPeer::connect(name);
        (raw_peer, server.expect(KernelOp::Accept, &[listener], None) as u64)
    };
    // More than the ring holds, by a byte or by far; and a FIN with such a count.
    for bad_write in [ring + 1, u64::MAX >> 1, FIN | (ring + 1), FIN | 1 << 62] {
        let (raw_peer, victim) = connect_raw();
        raw_peer.write_received(ring);
        assert_eq!(server.recv(victim, 10).unwrap().len(), 10, "a count that fits is accepted");
        raw_peer.write_received(bad_write + 10);
        assert_eq!(server.recv(victim, 100), Err(errno(Errno::PROTO)), "{bad_write:#x}");
        assert_eq!(server.recv(victim, 100), Err(errno(Errno::PROTO)), "repeatedly");
        assert_eq!(server.send(victim, b"x"), errno(Errno::PROTO));
        let end = (&raw_peer.tcp).read(&mut [0]);
        assert!(end.is_err_and(|why| why.kind() == std::io::ErrorKind::ConnectionReset));
        server.expect(KernelOp::Close, &[victim], None);
    }
    // A counter less than what was read.
    let (raw_peer, victim) = connect_raw();
    raw_peer.write_received(10);
    assert_eq!(server.recv(victim, 10).unwrap().len(), 10);
    raw_peer.write_received(9);
    assert_eq!(server.recv(victim, 10), Err(errno(Errno::PROTO)));
    server.expect(KernelOp::Close, &[victim], None);
    // More taken than sent.
    for bad_write in [6, u64::MAX, 1 << 40, READ_CLOSED | 6] {
        let (raw_peer, victim) = connect_raw();
        assert_eq!(server.send(victim, b"hello"), 5);
        raw_peer.write_taken(bad_write);
        assert_eq!(server.send(victim, b"hello"), errno(Errno::PROTO), "{bad_write:#x}");
        server.expect(KernelOp::Close, &[victim], None);
        drop(raw_peer);
    }
    // A byte on the TCP connection after the handshake.
    let (raw_peer, victim) = connect_raw();
    (&raw_peer.tcp).write_all(b"!").unwrap();
    assert_eq!(server.recv(victim, 10), Err(errno(Errno::PROTO)));
    server.expect(KernelOp::Close, &[victim], None);
    assert_eq!(hosts.here.first().send(socket, b"fine"), 4);
    assert_eq!(server.recv(accepted, 10).unwrap(), b"fine");
}

fn peers_reach_nothing_else(testbed: &Testbed) {
    let hosts = HostPair::small(testbed, 1);
    let server = hosts.there.first();
    let (listener, name, (socket, accepted)) = with_bystanders(&hosts);
    let other = RawPeer::connect(name);
    server.expect(KernelOp::Accept, &[listener], None);
    let targets: [fn(&Hello, &Hello) -> Remote; 6] = [
        |mine, _| mine.ring.at_offset(mine.ring_size - 4),
        |mine, _| mine.ring.at_offset(0_u64.wrapping_sub(8)),
        |mine, _| mine.received.at_offset(16),
        |mine, _| mine.received.at_offset(0_u64.wrapping_sub(8)),
        |_, others| others.ring.at_offset(0),
        |_, others| others.received.at_offset(0),
    ];
    for (number, target) in targets.into_iter().enumerate() {
        let raw_peer = RawPeer::connect(name);
        let victim = server.expect(KernelOp::Accept, &[listener], None) as u64;
        assert!(!raw_peer.write(target(&raw_peer.theirs, &other.theirs), 7), "target {number}");
        // Only its own connection has failed.
        let ended = server.recv(victim, 1);
        assert_eq!(ended, Err(errno(Errno::CONNRESET)), "target {number}");
        server.expect(KernelOp::Close, &[victim], None);
        assert_eq!(raw_peer.memory.len(), 2 * RawPeer::RING);
    }
    assert_eq!(hosts.here.first().send(socket, b"fine"), 4);
    assert_eq!(server.recv(accepted, 10).unwrap(), b"fine");
}

fn a_device_that_does_not_answer(testbed: &Testbed) {
    let hosts = HostPair::small(testbed, 2);
    let [server, other] = &hosts.there.scripted_kernels[..] else { panic!("two scripted kernels") };
    let (listener, name, (socket, accepted)) = with_bystanders(&hosts);
    // Its engine does not run, as if its network were down. The TCP connection is intact.
    let raw_peer = RawPeer::with(
        name,
        HcaOptions::default().with_progress_mode(ProgressMode::Manual).with_direct(false),
    );
    let victim = server.expect(KernelOp::Accept, &[listener], None) as u64;
    let start = Instant::now();
    server.start(KernelOp::Recv, &[victim, 0, 10], None);
    assert_eq!(other.send(victim, b"hello?"), 6, "it is posted");
    assert_eq!(server.finish().result, errno(Errno::TIMEDOUT), "the blocked call returns");
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    assert_eq!(other.send(victim, b"hello?"), errno(Errno::TIMEDOUT));
    server.expect(KernelOp::Close, &[victim], None);
    assert_eq!(hosts.here.first().send(socket, b"fine"), 4);
    assert_eq!(server.recv(accepted, 10).unwrap(), b"fine");
    until("its slot is free", || hosts.there.host.stats().open == 2);
    drop(raw_peer);
}

fn bytes_are_counted(testbed: &Testbed) {
    let hosts = HostPair::small(testbed, 2);
    let counted = || {
        [&hosts.here, &hosts.there].map(|harness| {
            let stats = harness.host.stats();
            assert_eq!((stats.received, stats.sent), (0, 0), "nothing went through the host");
            (stats.warp_sent, stats.warp_received)
        })
    };
    let (client, server) = (hosts.here.first(), hosts.there.first());
    let (socket, accepted) = hosts.connected(loopbacks()[0]);
    assert_eq!(counted(), [(0, 0); 2]);
    assert_eq!(client.send(socket, b"twelve bytes"), 12);
    assert_eq!(server.recv(accepted, 5).unwrap().len(), 5);
    assert_eq!(counted(), [(12, 0), (0, 5)], "while connected; received counts bytes read");
    server.expect(KernelOp::Close, &[accepted], None);
    assert_eq!(counted(), [(12, 0), (0, 5)], "when one end is closed");
    client.expect(KernelOp::Close, &[socket], None);
    assert_eq!(counted(), [(12, 0), (0, 5)], "and when both are");

    // The slots are reused; one connection is never accepted.
    let (listener, name) = listen(server, loopbacks()[0], 8);
    let socket = client.socket(name, WARP_STREAM);
    client.expect(KernelOp::Connect, &[socket], Some(name));
    assert_eq!(client.send(socket, b"it is not read!"), 15);
    assert_eq!(counted(), [(27, 0), (0, 5)]);
    server.expect(KernelOp::Close, &[listener], None);
    client.expect(KernelOp::Close, &[socket], None);
    assert_eq!(counted(), [(27, 0), (0, 5)]);

    // More bytes than the rings hold, in both directions, and a reset at the end.
    let (socket, accepted) = hosts.connected(loopbacks()[1]);
    let total = 3_000_000;
    hosts.here.scripted_kernels[1].start(KernelOp::StreamIn, &[socket, 2, total, 9_000], None);
    hosts.there.scripted_kernels[1].start(KernelOp::StreamIn, &[accepted, 1, total, 9_000], None);
    server.start(KernelOp::StreamOut, &[accepted, 2, total, 70_000], None);
    client.expect(KernelOp::StreamOut, &[socket, 1, total, 70_000], None);
    server.finish();
    for harness in [&hosts.here, &hosts.there] {
        assert_eq!(harness.scripted_kernels[1].finish().result, total as i64);
    }
    assert_eq!(counted(), [(total + 27, total), (total, total + 5)]);
    client.expect(KernelOp::Set, &[socket, SockOption::Linger as u64, 0], None);
    client.expect(KernelOp::Close, &[socket], None);
    assert_eq!(server.recv(accepted, 1), Err(errno(Errno::CONNRESET)));
    assert_eq!(counted(), [(total + 27, total), (total, total + 5)]);
    hosts.there.host.stop();
    assert_eq!(counted(), [(total + 27, total), (total, total + 5)], "after the reset, too");
}

/// A CPU program shuts down its receiving direction: blocked and later sends of the kernel fail.
fn a_peer_that_reads_no_more_breaks_the_pipe(testbed: &Testbed) {
    let harness = testbed.harness(2);
    let (scripted, other) = (&harness.scripted_kernels[0], &harness.scripted_kernels[1]);
    let (socket, mut peer) = scripted.connected(loopbacks()[0]);
    scripted.start(KernelOp::StreamOut, &[socket, 1, 1 << 30, 100_000], None);
    std::thread::sleep(Duration::from_millis(50));
    assert!(!scripted.is_done());
    peer.shutdown(std::net::Shutdown::Read);
    assert_eq!(scripted.finish().result, errno(Errno::PIPE));
    assert_eq!(scripted.send(socket, b"x"), errno(Errno::PIPE), "repeatedly");
    assert_eq!(scripted.call(KernelOp::Reserve, &[socket, 0, 10], None).result, errno(Errno::PIPE));
    other.put(0, &(socket as u32).to_le_bytes());
    other.put(4, &[4, 0, 0, 0]);
    assert_eq!(
        other.call(KernelOp::Poll, &[0, 1, u64::MAX], None).result,
        1,
        "a send would not block"
    );
    // The peer can still send.
    peer.write_all(b"not a listener!").unwrap();
    assert_eq!(scripted.recv(socket, 100).unwrap(), b"not a listener!");
    scripted.expect(KernelOp::Close, &[socket], None);

    // With a reserved span at that time.
    let (socket, peer) = scripted.accepted(loopbacks()[1]);
    scripted.expect(KernelOp::Reserve, &[socket, 0, 10], None);
    peer.shutdown(std::net::Shutdown::Read);
    let mut result = 0;
    until("READ_CLOSED has arrived", || {
        result = scripted.call(KernelOp::Commit, &[socket, 0, 10], None).result;
        if result == 0 {
            result = scripted.call(KernelOp::Reserve, &[socket, 0, 10], None).result;
        }
        result < 0
    });
    assert_eq!(result, errno(Errno::PIPE));
    scripted.expect(KernelOp::Close, &[socket], None);
    until("both are released", || harness.host.stats().open == 0);
}

/// Between kernels, with a borrowed span.
fn a_kernel_that_reads_no_more_breaks_the_pipe(testbed: &Testbed) {
    let hosts = HostPair::small(testbed, 1);
    let (client, server) = (hosts.here.first(), hosts.there.first());
    for span in [false, true] {
        let (socket, accepted) = hosts.connected(loopbacks()[0]);
        client.start(KernelOp::StreamOut, &[socket, 1, 1 << 30, 100_000], None);
        std::thread::sleep(Duration::from_millis(50));
        assert!(!client.is_done());
        if span {
            server.expect(KernelOp::Borrow, &[accepted, 0, 10], None);
        }
        server.expect(KernelOp::Shutdown, &[accepted, 0], None);
        if span {
            server.expect(KernelOp::Consume, &[accepted, 0, 1], None);
        }
        assert_eq!(client.finish().result, errno(Errno::PIPE), "span: {span}");
        assert_eq!(server.send(accepted, b"no more data"), 12);
        assert_eq!(client.recv(socket, 100).unwrap(), b"no more data");
        client.expect(KernelOp::Close, &[socket], None);
        server.expect(KernelOp::Close, &[accepted], None);
        until("everything is released", || {
            [&hosts.here, &hosts.there].iter().all(|harness| harness.host.stats().open == 0)
        });
    }
}
