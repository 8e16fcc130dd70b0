//! Processes that are killed, in every state of a connection with them. Each blocked call returns
//! soon, with the right errno; the resources of the process are released; other connections are not
//! affected.
//!
//! For TCP, the operating system ends the connections of a dead process: with an end of stream, or
//! with a reset if it had unread bytes. In the `warp` family a death is a reset.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Stdio;
use std::time::Duration;

use rustix::io::Errno;
use warpwire::link::{Auto, ShmOptions, UdpOptions};
use warpwire::sock::layout::events;
use warpwire::sock::warp;
use warpwire::verbs::Context;
use warpwire_apps::pattern;

use crate::sock::peer::{Family, Peer};
use crate::sock::scripted::{KernelOp, ScriptedKernel, test_timeout};
use crate::sock::testbed::{Harness, Platform, STREAM, Testbed, errno, loopbacks, until};
use testkit::{Process, Role, cases};

cases!(Testbed; CASES:
    killed_under_every_waiting_call,
    killed_while_it_sends,
    killed_while_the_kernel_sends,
    killed_before_it_is_accepted,
    the_process_of_a_host_is_killed,
    the_process_of_another_kernel_is_killed,
);

/// Handshake cases, for the `warp` family only.
pub mod of_warp {
    use super::{Testbed, killed_before_it_answers, killed_in_the_middle_of_its_hello};
    testkit::cases!(Testbed; CASES: killed_before_it_answers, killed_in_the_middle_of_its_hello);
}

/// The death of a peer is noticed within this time, also on a busy machine.
fn bound() -> Duration {
    testkit::deadline(Duration::from_secs(5))
}

/// The role of a child process of the suite, until it is killed.
pub fn run_role(role: &str) {
    let words: Vec<&str> = role.split(' ').collect();
    let family = |name: &str| if name == "Warp" { Family::Warp } else { Family::Inet };
    match words[..] {
        ["call", name, address, count, "greet"] => {
            greet(family(name), address.parse().unwrap(), count.parse().unwrap());
        }
        ["call", name, address, count, mode] => {
            let dial = |_| family(name).dial(address.parse().unwrap());
            let mut peers: Vec<Peer> = (0..count.parse().unwrap()).map(dial).collect();
            println!("ready");
            if mode == "stream" {
                stream_forever(&mut peers[0]);
            }
            sleep_forever();
        }
        ["half-hello", address] => {
            let mut peer = TcpStream::connect(address).unwrap();
            peer.write_all(b"warpwire").unwrap(); // an incomplete line
            println!("ready");
            sleep_forever();
        }
        ["answer"] => {
            let server = TcpListener::bind("127.0.0.1:0").unwrap();
            println!("{}", server.local_addr().unwrap());
            let _peer = server.accept().unwrap();
            println!("ready");
            sleep_forever();
        }
        ["host", platform, name] => host(platform, family(name)),
        _ => panic!("unknown role {role}"),
    }
}

/// Connections that say goodbye: when this prints "ready", the bytes are in the receivers' rings,
/// or in the operating system's buffers, where the death of the sender does not reach them.
fn greet(family: Family, address: SocketAddr, count: u64) {
    let udp = UdpOptions::default();
    let link = Auto::bind((address.ip(), 0).into(), udp, ShmOptions::default()).unwrap();
    let context = Context::open(link).unwrap();
    let net = warp::Net::over(&context, warp::NetOptions::default()).unwrap();
    let dial = |_| match family {
        Family::Inet => family.dial(address),
        Family::Warp => Peer::Warp(net.connect(address).unwrap()),
    };
    let mut peers: Vec<Peer> = (0..count).map(dial).collect();
    let before = context.stats().unwrap().completions;
    for peer in &mut peers {
        peer.write_all(b"goodbye").unwrap();
    }
    if family == Family::Warp {
        let acknowledged = || context.stats().unwrap().completions >= before + count;
        until("the peer has acknowledged", acknowledged);
    }
    println!("ready");
    sleep_forever();
}

/// A kernel that accepts two connections and waits for bytes of the first.
fn host(platform: &str, family: Family) {
    // For threads the simulated GPU is used instead, as the header would have to be compiled again.
    let platforms = [Platform::Sim, Platform::SimPinned, Platform::Cuda, Platform::CudaPinned];
    let platform =
        platforms.into_iter().find(|known| known.to_string() == platform).unwrap_or(Platform::Sim);
    let harness = Testbed::new(platform, family).harness(2);
    let (listener, address) = harness.first().listener(loopbacks()[0], 8);
    println!("{address}");
    let sockets = [(); 2].map(|()| {
        let socket = harness.first().expect(KernelOp::Accept, &[listener], None) as u64;
        println!("ready");
        socket
    });
    harness.scripted_kernels[1].start(KernelOp::Recv, &[sockets[0], 0, 1], None);
    sleep_forever();
}

fn sleep_forever() {
    std::thread::sleep(test_timeout());
}

fn stream_forever(peer: &mut Peer) {
    let mut bytes = vec![0; 1 << 16];
    for number in 0.. {
        pattern::fill_bytes(&mut bytes, 1, number << 16);
        peer.write_all(&bytes).unwrap();
    }
}

/// Starts a child process with a role; it is killed when this is dropped.
fn start(role: &str) -> Process {
    Process::start(Role::new("sock", role).command().stdout(Stdio::piped()))
}

/// A process with `count` connections to a kernel.
fn call(family: Family, to: SocketAddr, count: usize, mode: &str) -> Process {
    start(&format!("call {family:?} {to} {count} {mode}"))
}

/// A harness with so few slots that a leak is noticed, and a connection that must not be affected.
struct KillTest {
    harness: Harness,
    family: Family,
    bystander: (u64, Peer),
}

impl KillTest {
    fn new(testbed: &Testbed) -> Self {
        let options = testbed
            .options()
            .with_sockets(10)
            .with_warp_sockets(8)
            .with_ring(64 << 10)
            .with_arena(640 << 10);
        let harness = testbed.harness_with(4, options);
        let bystander = harness.scripted_kernels[3].connected(loopbacks()[0]);
        Self { harness, family: testbed.family, bystander }
    }

    /// Connections of a listener with a process in this mode.
    fn accept_from_process(&self, at: SocketAddr, count: usize, mode: &str) -> (Process, Vec<u64>) {
        let scripted = self.harness.first();
        let (listener, name) = scripted.listener(at, 8);
        let mut peer_process = call(self.family, name, count, mode);
        let accept = |_| scripted.expect(KernelOp::Accept, &[listener], None) as u64;
        let sockets = (0..count).map(accept).collect();
        assert_eq!(peer_process.line(), "ready");
        scripted.expect(KernelOp::Close, &[listener], None);
        (peer_process, sockets)
    }

    /// What a receive returns after a death: a reset, or the end of the stream.
    fn reset_result(&self) -> i64 {
        match self.family {
            Family::Warp => errno(Errno::CONNRESET),
            Family::Inet => 0,
        }
    }

    /// The bystander is not affected, and all resources of the dead process are released.
    fn check_bystander(&mut self) {
        let (socket, peer) = &mut self.bystander;
        let scripted = &self.harness.scripted_kernels[3];
        assert_eq!(scripted.send(*socket, b"still here"), 10);
        let mut bytes = [0; 10];
        peer.read_exact(&mut bytes).unwrap();
        peer.write_all(&bytes).unwrap();
        assert_eq!(scripted.recv(*socket, 100).unwrap(), b"still here");
        until("only the bystander is left", || self.harness.host.stats().open == 1);
    }
}

/// After a death every send fails; TCP may accept a few bytes before.
fn sending_fails(scripted: &ScriptedKernel, socket: u64) {
    let known = [errno(Errno::CONNRESET), errno(Errno::PIPE)];
    until("sending fails", || {
        let result = scripted.send(socket, b"are you there?");
        assert!(result > 0 || known.contains(&result), "{result}");
        result < 0
    });
}

fn killed_under_every_waiting_call(testbed: &Testbed) {
    let mut kill_test = KillTest::new(testbed);
    for at in [0, 1, 0].map(|v6| loopbacks()[v6]) {
        let (mut peer_process, sockets) = kill_test.accept_from_process(at, 3, "idle");
        let [receiver, poller, borrower] = &kill_test.harness.scripted_kernels[..3] else {
            panic!("three")
        };
        receiver.start(KernelOp::Recv, &[sockets[0], 0, 10], None);
        poller.put(0, &(sockets[1] as u32).to_le_bytes());
        poller.put(4, &[events::IN as u8, 0, 0, 0]);
        poller.start(KernelOp::Poll, &[0, 1, u64::MAX], None);
        borrower.start(KernelOp::Borrow, &[sockets[2], 0, 10], None);
        std::thread::sleep(Duration::from_millis(30));
        assert!(
            kill_test.harness.scripted_kernels[..3].iter().all(|scripted| !scripted.is_done()),
            "all are blocked"
        );
        let killed = peer_process.kill();
        assert_eq!(receiver.finish().result, kill_test.reset_result());
        assert_eq!(poller.finish().result, 1);
        assert_eq!(borrower.finish().result, kill_test.reset_result());
        assert!(killed.elapsed() < bound(), "{:?}", killed.elapsed());
        let found = poller.show(6, 2);
        let found = u16::from_le_bytes([found[0], found[1]]);
        let expected_events =
            if kill_test.family == Family::Warp { events::ERR | events::HUP } else { 0 };
        assert_eq!(
            found & (expected_events | events::IN),
            expected_events | events::IN,
            "{found:#x}"
        );
        for (scripted, socket) in kill_test.harness.scripted_kernels.iter().zip(&sockets) {
            assert_eq!(
                scripted.recv(*socket, 1).map_or_else(|e| e, |b| b.len() as i64),
                kill_test.reset_result()
            );
            sending_fails(scripted, *socket);
            scripted.expect(KernelOp::Close, &[*socket], None);
        }
        kill_test.check_bystander();
    }
}

fn killed_while_it_sends(testbed: &Testbed) {
    let mut kill_test = KillTest::new(testbed);
    for _ in 0..3 {
        let (mut peer_process, sockets) =
            kill_test.accept_from_process(loopbacks()[0], 1, "stream");
        let scripted = kill_test.harness.first();
        let before = kill_test.harness.host.stats().received;
        scripted.start(KernelOp::StreamIn, &[sockets[0], 1, 1 << 40, 50_000], None);
        if kill_test.family == Family::Inet {
            until("the peer sends", || kill_test.harness.host.stats().received > before);
        }
        std::thread::sleep(Duration::from_millis(60));
        assert!(!scripted.is_done());
        let killed = peer_process.kill();
        let result = scripted.finish().result;
        assert!(killed.elapsed() < bound(), "{:?}", killed.elapsed());
        match kill_test.family {
            Family::Warp => assert_eq!(result, errno(Errno::CONNRESET)),
            Family::Inet => assert!(result > 0, "the end, and no wrong byte: {result}"),
        }
        scripted.expect(KernelOp::Close, &[sockets[0]], None);
        kill_test.check_bystander();
    }
}

fn killed_while_the_kernel_sends(testbed: &Testbed) {
    let mut kill_test = KillTest::new(testbed);
    for _ in 0..3 {
        let (mut peer_process, sockets) = kill_test.accept_from_process(loopbacks()[0], 2, "idle");
        // One waits with the ring full, another holds a reserved span.
        let [sender, other] = &kill_test.harness.scripted_kernels[..2] else { panic!("two") };
        sender.start(KernelOp::StreamOut, &[sockets[0], 1, 1 << 40, 100_000], None);
        other.expect(KernelOp::Reserve, &[sockets[1], 0, 100], None);
        std::thread::sleep(Duration::from_millis(100));
        assert!(!sender.is_done(), "the peer reads nothing");
        let killed = peer_process.kill();
        let result = sender.finish().result;
        assert!(killed.elapsed() < bound(), "{:?}", killed.elapsed());
        let broken = [errno(Errno::CONNRESET), errno(Errno::PIPE)];
        assert!(broken.contains(&result), "{result}");
        // Bytes committed now are lost, with or without an error, and the span ends.
        let committed = other.call(KernelOp::Commit, &[sockets[1], 0, 100], None).result;
        assert!(committed == 0 || broken.contains(&committed), "{committed}");
        sending_fails(other, sockets[1]);
        for socket in sockets {
            sender.expect(KernelOp::Close, &[socket], None);
        }
        kill_test.check_bystander();
    }
}

fn killed_before_it_is_accepted(testbed: &Testbed) {
    let mut kill_test = KillTest::new(testbed);
    let scripted = kill_test.harness.first();
    let (listener, name) = scripted.listener(loopbacks()[0], 8);
    for round in 1..3 {
        let before = kill_test.harness.host.stats().accepted;
        let mut peer_process = call(kill_test.family, name, 4, "greet");
        assert_eq!(peer_process.line(), "ready");
        until("all four wait", || kill_test.harness.host.stats().accepted == before + 4);
        let killed = peer_process.kill();
        for _ in 0..4 {
            let socket = scripted.expect(KernelOp::Accept, &[listener], None) as u64;
            assert_eq!(scripted.recv(socket, 100).unwrap(), b"goodbye", "round {round}");
            let end =
                scripted.recv(socket, 1).map_or_else(|error| error, |bytes| bytes.len() as i64);
            assert_eq!(end, kill_test.reset_result());
            scripted.expect(KernelOp::Close, &[socket], None);
        }
        assert!(killed.elapsed() < bound(), "{:?}", killed.elapsed());
        until("the four are gone", || kill_test.harness.host.stats().open == 2);
    }
    scripted.expect(KernelOp::Close, &[listener], None);
    kill_test.check_bystander();
}

/// The peer accepts the TCP connection, and is killed before its hello.
fn killed_before_it_answers(testbed: &Testbed) {
    let mut kill_test = KillTest::new(testbed);
    for _ in 0..3 {
        let mut peer_process = start("answer");
        let address: SocketAddr = peer_process.line().parse().unwrap();
        let scripted = kill_test.harness.first();
        let socket = scripted.socket(address, STREAM);
        scripted.start(KernelOp::Connect, &[socket], Some(address));
        assert_eq!(peer_process.line(), "ready");
        std::thread::sleep(Duration::from_millis(10));
        assert!(!scripted.is_done(), "the handshake is not complete");
        let killed = peer_process.kill();
        assert_eq!(scripted.finish().result, errno(Errno::CONNRESET));
        assert!(killed.elapsed() < bound(), "{:?}", killed.elapsed());
        scripted.expect(KernelOp::Close, &[socket], None);
        kill_test.check_bystander();
    }
}

/// The peer connects, and is killed in the middle of its hello: accept returns the next connection.
fn killed_in_the_middle_of_its_hello(testbed: &Testbed) {
    let mut kill_test = KillTest::new(testbed);
    let scripted = kill_test.harness.first();
    let (listener, name) = scripted.listener(loopbacks()[0], 8);
    for _ in 0..3 {
        scripted.start(KernelOp::Accept, &[listener], None);
        let mut peer_process = start(&format!("half-hello {name}"));
        assert_eq!(peer_process.line(), "ready");
        peer_process.kill();
        std::thread::sleep(Duration::from_millis(20));
        assert!(!scripted.is_done(), "no connection to accept");
        let peer = kill_test.family.dial(name);
        let answer = scripted.finish();
        assert_eq!(answer.address, Some(peer.local_addr()));
        scripted.expect(KernelOp::Close, &[answer.result as u64], None);
        until("only two are left", || kill_test.harness.host.stats().open == 2);
    }
    scripted.expect(KernelOp::Close, &[listener], None);
    kill_test.check_bystander();
}

/// A process with a kernel that accepts connections, and its address.
fn other_host(testbed: &Testbed) -> (Process, SocketAddr) {
    let mut peer_process = start(&format!("host {} {:?}", testbed.platform, testbed.family));
    let address = peer_process.line().parse().unwrap();
    (peer_process, address)
}

/// A CPU program's connections with kernels whose process is killed.
fn the_process_of_a_host_is_killed(testbed: &Testbed) {
    let (mut peer_process, address) = other_host(testbed);
    let peers = [(); 2].map(|()| {
        let peer = testbed.family.dial(address);
        assert_eq!(peer_process.line(), "ready");
        peer
    });
    let [mut reader, mut writer] = peers;
    let mut idle = reader.try_clone();
    std::thread::scope(|scope| {
        let reading = scope.spawn(move || reader.read(&mut [0; 1]).map_err(|error| error.kind()));
        // More than all buffers hold.
        let writing = scope.spawn(move || {
            loop {
                if let Err(error) = writer.write(&[1; 100_000]) {
                    return error.kind();
                }
            }
        });
        std::thread::sleep(Duration::from_millis(100));
        assert!(!reading.is_finished() && !writing.is_finished(), "both are blocked");
        let killed = peer_process.kill();
        let (read, wrote) = (reading.join().unwrap(), writing.join().unwrap());
        assert!(killed.elapsed() < bound(), "{:?}", killed.elapsed());
        match testbed.family {
            Family::Warp => assert_eq!(
                (read, wrote),
                (Err(ErrorKind::ConnectionReset), ErrorKind::ConnectionReset)
            ),
            Family::Inet => {
                assert!(matches!(read, Ok(0) | Err(ErrorKind::ConnectionReset)), "{read:?}");
                assert!(
                    matches!(wrote, ErrorKind::ConnectionReset | ErrorKind::BrokenPipe),
                    "{wrote:?}"
                );
            }
        }
    });
    if testbed.family == Family::Warp {
        let again = idle.read(&mut [0; 1]).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::ConnectionReset, "repeatedly");
    }
}

/// A kernel's connections with kernels of another process, which is killed.
fn the_process_of_another_kernel_is_killed(testbed: &Testbed) {
    let mut kill_test = KillTest::new(testbed);
    let (mut peer_process, address) = other_host(testbed);
    let [receiver, sender] = &kill_test.harness.scripted_kernels[..2] else { panic!("two") };
    let sockets = [receiver, sender].map(|scripted| {
        let socket = scripted.socket(address, STREAM);
        scripted.expect(KernelOp::Connect, &[socket], Some(address));
        assert_eq!(peer_process.line(), "ready");
        socket
    });
    receiver.start(KernelOp::Recv, &[sockets[0], 0, 10], None);
    sender.start(KernelOp::StreamOut, &[sockets[1], 1, 1 << 40, 100_000], None);
    std::thread::sleep(Duration::from_millis(100));
    assert!(!receiver.is_done() && !sender.is_done(), "both are blocked");
    let killed = peer_process.kill();
    let (received, sent) = (receiver.finish().result, sender.finish().result);
    assert!(killed.elapsed() < bound(), "{:?}", killed.elapsed());
    assert_eq!(received, kill_test.reset_result());
    assert!([errno(Errno::CONNRESET), errno(Errno::PIPE)].contains(&sent), "{sent}");
    for (scripted, socket) in [receiver, sender].into_iter().zip(sockets) {
        scripted.expect(KernelOp::Close, &[socket], None);
    }
    kill_test.check_bystander();
}
