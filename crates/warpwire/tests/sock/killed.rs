//! Processes that are killed, in every state that a connection with them can be in. Each blocked call ends soon, with the right
//! errno; what the process had is given back; nobody else notices.
//!
//! What ends a connection of TCP is what the operating system says for a dead process: an end, or a reset if bytes had come that
//! it never read. In the family `warp` a death is a reset.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::process::Stdio;
use std::time::Duration;

use rustix::io::Errno;
use warpwire::sock::SockOptions;
use warpwire::sock::layout::events;
use warpwire_apps::pattern;

use crate::sock::peer::{Family, Peer};
use crate::sock::puppet::{Do, Puppet, soon};
use crate::sock::world::{STREAM, Stage, Way, World, errno, loopbacks, until};
use testkit::{Process, Role, cases};

cases!(World; CASES:
    killed_under_every_waiting_call,
    killed_while_it_sends,
    killed_while_the_kernel_sends,
    killed_before_it_is_accepted,
    the_process_of_a_host_is_killed,
    the_process_of_another_kernel_is_killed,
);

/// Those of a handshake, which only one family has.
pub mod of_warp {
    use super::{World, killed_before_it_answers, killed_before_it_has_said_hello};
    testkit::cases!(World; CASES: killed_before_it_answers, killed_before_it_has_said_hello);
}

/// A death is known by then, on a busy machine too.
fn bound() -> Duration {
    testkit::deadline(Duration::from_secs(5))
}

/// What a process of the suite does, until it is killed.
pub fn play(role: &str) {
    let words: Vec<&str> = role.split(' ').collect();
    let family = |name: &str| if name == "Warp" { Family::Warp } else { Family::Inet };
    match words[..] {
        ["call", name, address, count, manner] => {
            let dial = |_| family(name).dial(address.parse().unwrap());
            let mut peers: Vec<Peer> = (0..count.parse().unwrap()).map(dial).collect();
            for peer in &mut peers {
                if manner == "greet" {
                    peer.write_all(b"goodbye").unwrap();
                }
            }
            println!("ready");
            if manner == "stream" {
                stream_for_ever(&mut peers[0]);
            }
            hang();
        }
        ["knock", address] => {
            let mut peer = TcpStream::connect(address).unwrap();
            peer.write_all(b"warpwire").unwrap(); // not yet a line
            println!("ready");
            hang();
        }
        ["answer"] => {
            let server = TcpListener::bind("127.0.0.1:0").unwrap();
            println!("{}", server.local_addr().unwrap());
            let _peer = server.accept().unwrap();
            println!("ready");
            hang();
        }
        ["host", way, name] => host(way, family(name)),
        _ => panic!("no part is called {role}"),
    }
}

/// A kernel that accepts two connections, and waits for bytes of the first.
fn host(way: &str, family: Family) {
    // With the header as threads it would be compiled once more, and die like any other.
    let ways = [Way::Sim, Way::SimPinned, Way::Cuda, Way::CudaPinned];
    let way = ways.into_iter().find(|known| known.to_string() == way).unwrap_or(Way::Sim);
    let stage = World::new(way, family).stage(2);
    let (listener, address) = stage.first().listener(loopbacks()[0], 8);
    println!("{address}");
    let sockets = [(); 2].map(|()| {
        let socket = stage.first().expect(Do::Accept, &[listener], None) as u64;
        println!("ready");
        socket
    });
    stage.puppets[1].start(Do::Recv, &[sockets[0], 0, 1], None);
    hang();
}

fn hang() {
    std::thread::sleep(soon());
}

fn stream_for_ever(peer: &mut Peer) {
    let mut bytes = vec![0; 1 << 16];
    for number in 0.. {
        pattern::fill_bytes(&mut bytes, 1, number << 16);
        peer.write_all(&bytes).unwrap();
    }
}

/// A process that plays a part; it does not outlive this.
fn start(role: &str) -> Process {
    Process::start(Role::new("sock", role).command().stdout(Stdio::piped()))
}

/// One that has so many connections to a kernel.
fn call(family: Family, to: SocketAddr, count: usize, manner: &str) -> Process {
    start(&format!("call {family:?} {to} {count} {manner}"))
}

/// A stage with just enough of everything that a leak of a few places is found, and a connection that must go on.
struct Scene {
    stage: Stage,
    family: Family,
    bystander: (u64, Peer),
}

impl Scene {
    fn new(world: &World) -> Self {
        let options = SockOptions {
            sockets: 10,
            warp_sockets: 8,
            ring: 64 << 10,
            arena: 640 << 10,
            ..world.options()
        };
        let stage = world.stage_with(4, options);
        let bystander = stage.puppets[3].connected(loopbacks()[0]);
        Self { stage, family: world.family, bystander }
    }

    /// A listener's connections with a process of that manner.
    fn called(&self, at: SocketAddr, count: usize, manner: &str) -> (Process, Vec<u64>) {
        let puppet = self.stage.first();
        let (listener, name) = puppet.listener(at, 8);
        let mut player = call(self.family, name, count, manner);
        let accept = |_| puppet.expect(Do::Accept, &[listener], None) as u64;
        let sockets = (0..count).map(accept).collect();
        assert_eq!(player.line(), "ready");
        puppet.expect(Do::Close, &[listener], None);
        (player, sockets)
    }

    /// The errno of a death, or the end.
    fn death(&self) -> i64 {
        match self.family {
            Family::Warp => errno(Errno::CONNRESET),
            Family::Inet => 0,
        }
    }

    /// Nobody else has noticed, and all that the dead had is free.
    fn goes_on(&mut self) {
        let (socket, peer) = &mut self.bystander;
        let puppet = &self.stage.puppets[3];
        assert_eq!(puppet.send(*socket, b"still here"), 10);
        let mut bytes = [0; 10];
        peer.read_exact(&mut bytes).unwrap();
        peer.write_all(&bytes).unwrap();
        assert_eq!(puppet.recv(*socket, 100).unwrap(), b"still here");
        until("only the bystander is left", || self.stage.host.stats().open == 1);
    }
}

/// After a death every send fails; TCP may take a few bytes before it knows.
fn sending_fails(puppet: &Puppet, socket: u64) {
    let known = [errno(Errno::CONNRESET), errno(Errno::PIPE)];
    until("sending fails", || {
        let result = puppet.send(socket, b"anybody there?");
        assert!(result > 0 || known.contains(&result), "{result}");
        result < 0
    });
}

fn killed_under_every_waiting_call(world: &World) {
    let mut scene = Scene::new(world);
    for at in [0, 1, 0].map(|v6| loopbacks()[v6]) {
        let (mut player, sockets) = scene.called(at, 3, "idle");
        let [receiver, poller, borrower] = &scene.stage.puppets[..3] else { panic!("three") };
        receiver.start(Do::Recv, &[sockets[0], 0, 10], None);
        poller.put(0, &(sockets[1] as u32).to_le_bytes());
        poller.put(4, &[events::IN as u8, 0, 0, 0]);
        poller.start(Do::Poll, &[0, 1, u64::MAX], None);
        borrower.start(Do::Borrow, &[sockets[2], 0, 10], None);
        std::thread::sleep(Duration::from_millis(30));
        assert!(scene.stage.puppets[..3].iter().all(|puppet| !puppet.is_done()), "all wait");
        let killed = player.kill();
        assert_eq!(receiver.finish().result, scene.death());
        assert_eq!(poller.finish().result, 1);
        assert_eq!(borrower.finish().result, scene.death());
        assert!(killed.elapsed() < bound(), "{:?}", killed.elapsed());
        let found = poller.show(6, 2);
        let found = u16::from_le_bytes([found[0], found[1]]);
        let told = if scene.family == Family::Warp { events::ERR | events::HUP } else { 0 };
        assert_eq!(found & (told | events::IN), told | events::IN, "{found:#x}");
        for (puppet, socket) in scene.stage.puppets.iter().zip(&sockets) {
            assert_eq!(
                puppet.recv(*socket, 1).map_or_else(|e| e, |b| b.len() as i64),
                scene.death()
            );
            sending_fails(puppet, *socket);
            puppet.expect(Do::Close, &[*socket], None);
        }
        scene.goes_on();
    }
}

fn killed_while_it_sends(world: &World) {
    let mut scene = Scene::new(world);
    for _ in 0..3 {
        let (mut player, sockets) = scene.called(loopbacks()[0], 1, "stream");
        let puppet = scene.stage.first();
        puppet.start(Do::StreamIn, &[sockets[0], 1, 1 << 40, 50_000], None);
        std::thread::sleep(Duration::from_millis(60));
        assert!(!puppet.is_done());
        let killed = player.kill();
        let result = puppet.finish().result;
        assert!(killed.elapsed() < bound(), "{:?}", killed.elapsed());
        match scene.family {
            Family::Warp => assert_eq!(result, errno(Errno::CONNRESET)),
            Family::Inet => assert!(result > 0, "an end, and no byte wrong: {result}"),
        }
        puppet.expect(Do::Close, &[sockets[0]], None);
        scene.goes_on();
    }
}

fn killed_while_the_kernel_sends(world: &World) {
    let mut scene = Scene::new(world);
    for _ in 0..3 {
        let (mut player, sockets) = scene.called(loopbacks()[0], 2, "idle");
        // One waits with the ring full, another would send a span of its own.
        let [sender, other] = &scene.stage.puppets[..2] else { panic!("two") };
        sender.start(Do::StreamOut, &[sockets[0], 1, 1 << 40, 100_000], None);
        other.expect(Do::Reserve, &[sockets[1], 0, 100], None);
        std::thread::sleep(Duration::from_millis(100));
        assert!(!sender.is_done(), "nobody takes anything");
        let killed = player.kill();
        let result = sender.finish().result;
        assert!(killed.elapsed() < bound(), "{:?}", killed.elapsed());
        let broken = [errno(Errno::CONNRESET), errno(Errno::PIPE)];
        assert!(broken.contains(&result), "{result}");
        // What is filled now goes nowhere, in one way or another, and the span is over.
        let committed = other.call(Do::Commit, &[sockets[1], 0, 100], None).result;
        assert!(committed == 0 || broken.contains(&committed), "{committed}");
        sending_fails(other, sockets[1]);
        for socket in sockets {
            sender.expect(Do::Close, &[socket], None);
        }
        scene.goes_on();
    }
}

fn killed_before_it_is_accepted(world: &World) {
    let mut scene = Scene::new(world);
    let puppet = scene.stage.first();
    let (listener, name) = puppet.listener(loopbacks()[0], 8);
    for round in 1..3 {
        let before = scene.stage.host.stats().accepted;
        let mut player = call(scene.family, name, 4, "greet");
        assert_eq!(player.line(), "ready");
        until("all four wait", || scene.stage.host.stats().accepted == before + 4);
        if scene.family == Family::Warp {
            std::thread::sleep(Duration::from_millis(20)); // the last words land without the host
        }
        let killed = player.kill();
        for _ in 0..4 {
            let socket = puppet.expect(Do::Accept, &[listener], None) as u64;
            assert_eq!(puppet.recv(socket, 100).unwrap(), b"goodbye", "round {round}");
            let end = puppet.recv(socket, 1).map_or_else(|error| error, |bytes| bytes.len() as i64);
            assert_eq!(end, scene.death());
            puppet.expect(Do::Close, &[socket], None);
        }
        assert!(killed.elapsed() < bound(), "{:?}", killed.elapsed());
        until("the four are gone", || scene.stage.host.stats().open == 2);
    }
    puppet.expect(Do::Close, &[listener], None);
    scene.goes_on();
}

/// It has taken the connection, and never says hello.
fn killed_before_it_answers(world: &World) {
    let mut scene = Scene::new(world);
    for _ in 0..3 {
        let mut player = start("answer");
        let address: SocketAddr = player.line().parse().unwrap();
        let puppet = scene.stage.first();
        let socket = puppet.socket(address, STREAM);
        puppet.start(Do::Connect, &[socket], Some(address));
        assert_eq!(player.line(), "ready");
        std::thread::sleep(Duration::from_millis(10));
        assert!(!puppet.is_done(), "they have not met");
        let killed = player.kill();
        assert_eq!(puppet.finish().result, errno(Errno::CONNRESET));
        assert!(killed.elapsed() < bound(), "{:?}", killed.elapsed());
        puppet.expect(Do::Close, &[socket], None);
        scene.goes_on();
    }
}

/// It connects, and dies in the middle of its hello: whoever accepts gets the next.
fn killed_before_it_has_said_hello(world: &World) {
    let mut scene = Scene::new(world);
    let puppet = scene.stage.first();
    let (listener, name) = puppet.listener(loopbacks()[0], 8);
    for _ in 0..3 {
        puppet.start(Do::Accept, &[listener], None);
        let mut player = start(&format!("knock {name}"));
        assert_eq!(player.line(), "ready");
        player.kill();
        std::thread::sleep(Duration::from_millis(20));
        assert!(!puppet.is_done(), "nobody is there");
        let peer = scene.family.dial(name);
        let answer = puppet.finish();
        assert_eq!(answer.address, Some(peer.local_addr()));
        puppet.expect(Do::Close, &[answer.result as u64], None);
        until("only two are left", || scene.stage.host.stats().open == 2);
    }
    puppet.expect(Do::Close, &[listener], None);
    scene.goes_on();
}

/// A process with a kernel that accepts connections; and its address.
fn other_host(world: &World) -> (Process, SocketAddr) {
    let mut player = start(&format!("host {} {:?}", world.way, world.family));
    let address = player.line().parse().unwrap();
    (player, address)
}

/// A CPU program's connections with kernels whose process is killed.
fn the_process_of_a_host_is_killed(world: &World) {
    let (mut player, address) = other_host(world);
    let peers = [(); 2].map(|()| {
        let peer = world.family.dial(address);
        assert_eq!(player.line(), "ready");
        peer
    });
    let [mut reader, mut writer] = peers;
    let mut idle = reader.try_clone();
    std::thread::scope(|scope| {
        let reading = scope.spawn(move || reader.read(&mut [0; 1]).map_err(|error| error.kind()));
        // More than fits anywhere.
        let writing = scope.spawn(move || {
            loop {
                if let Err(error) = writer.write(&[1; 100_000]) {
                    return error.kind();
                }
            }
        });
        std::thread::sleep(Duration::from_millis(100));
        assert!(!reading.is_finished() && !writing.is_finished(), "both wait");
        let killed = player.kill();
        let (read, wrote) = (reading.join().unwrap(), writing.join().unwrap());
        assert!(killed.elapsed() < bound(), "{:?}", killed.elapsed());
        match world.family {
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
    if world.family == Family::Warp {
        let again = idle.read(&mut [0; 1]).unwrap_err();
        assert_eq!(again.kind(), ErrorKind::ConnectionReset, "and stays so");
    }
}

/// A kernel's connections with those of another process, which is killed.
fn the_process_of_another_kernel_is_killed(world: &World) {
    let mut scene = Scene::new(world);
    let (mut player, address) = other_host(world);
    let [receiver, sender] = &scene.stage.puppets[..2] else { panic!("two") };
    let sockets = [receiver, sender].map(|puppet| {
        let socket = puppet.socket(address, STREAM);
        puppet.expect(Do::Connect, &[socket], Some(address));
        assert_eq!(player.line(), "ready");
        socket
    });
    receiver.start(Do::Recv, &[sockets[0], 0, 10], None);
    sender.start(Do::StreamOut, &[sockets[1], 1, 1 << 40, 100_000], None);
    std::thread::sleep(Duration::from_millis(100));
    assert!(!receiver.is_done() && !sender.is_done(), "both wait");
    let killed = player.kill();
    let (received, sent) = (receiver.finish().result, sender.finish().result);
    assert!(killed.elapsed() < bound(), "{:?}", killed.elapsed());
    assert_eq!(received, scene.death());
    assert!([errno(Errno::CONNRESET), errno(Errno::PIPE)].contains(&sent), "{sent}");
    for (puppet, socket) in [receiver, sender].into_iter().zip(sockets) {
        puppet.expect(Do::Close, &[socket], None);
    }
    scene.goes_on();
}
