//! Tests specific to the shared-memory link: real processes, and peers that misbehave, exit,
//! return, or belong to another user.

use std::io::{BufRead, BufReader};
use std::os::fd::AsRawFd;
use std::process::{Child, Command, Stdio};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketType, connect, send as send_bytes, socket,
};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::*;
use crate::link::tests::{fill, receive, send};
use crate::link::{Auto, Udp, UdpOptions};

/// The role of the process that a test starts, and the address of the test that started it.
const ROLE: &str = "WARPWIRE_TEST_SHM_ROLE";
const PEER: &str = "WARPWIRE_TEST_SHM_PEER";
/// The test that serves as the other process's main function.
const OTHER: &str = "link::shm::tests::other_process";

fn bind() -> Shm {
    Shm::bind("127.0.0.1:0".parse().unwrap(), ShmOptions::default()).unwrap()
}

/// This program in another role.
fn command(role: &str, peer: SocketAddr) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", OTHER, "--nocapture", "--test-threads=1"])
        .env(ROLE, role)
        .env(PEER, peer.to_string())
        .stdout(Stdio::piped());
    command
}

/// Starts the process and waits for the line with its address.
fn start(role: &str, peer: SocketAddr) -> (Child, SocketAddr) {
    let mut child = command(role, peer).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let address = lines.find_map(|line| line.unwrap().strip_prefix("address ")?.parse().ok());
    // Drain the rest, so that the child never blocks on its output.
    std::thread::spawn(move || lines.for_each(drop));
    (child, address.expect("the other process prints its address"))
}

/// Waits for something to receive; `false` on timeout.
fn sleep(link: &Shm, time: Duration) -> bool {
    let fd = link.wait_fd().unwrap();
    let timeout = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap() > 0
}

fn wait_until(what: &str, mut happens: impl FnMut() -> bool) {
    let deadline = Instant::now() + testkit::deadline(Duration::from_secs(20));
    while !happens() {
        assert!(Instant::now() < deadline, "timed out: {what}");
        std::thread::sleep(Duration::from_micros(200));
    }
}

/// Binds an address that was just freed: a child that another test is starting has a copy of all
/// descriptors until it executes its program.
fn bind_again(address: SocketAddr, options: ShmOptions) -> Shm {
    let mut link = None;
    wait_until("the address is free", || {
        link = Shm::bind(address, options.clone()).ok();
        link.is_some()
    });
    link.unwrap()
}

#[test]
fn other_process() {
    let Ok(role) = std::env::var(ROLE) else { return };
    let peer: SocketAddr = std::env::var(PEER).unwrap().parse().unwrap();
    let mut link = bind();
    println!("\naddress {}", link.local());
    match role.as_str() {
        "exchange" => {
            let flow = link.open(peer, 0).unwrap();
            exchange(&mut link, flow, COUNT);
        }
        "flood" => {
            let flow = link.open(peer, 0).unwrap();
            for number in 0.. {
                send(&mut link, flow, 1000, number);
                link.flush().unwrap();
            }
        }
        // Listens, and never receives.
        "idle" => std::thread::sleep(Duration::from_secs(60)),
        "echo" => echo(link, peer),
        "exhausted" => exhausted(&link),
        other => panic!("no such role: {other}"),
    }
}

/// Echoes packets, sleeping in between, until one carries the end mark.
fn echo(mut link: Shm, peer: SocketAddr) {
    let flow = link.open(peer, 0).unwrap();
    let mut enough = false;
    while !enough {
        let mut received = Vec::new();
        sleep(&link, Duration::from_secs(20));
        link.receive(&mut |frame| received.push(frame.bytes.to_vec())).unwrap();
        for packet in received {
            enough |= packet[..4] == u32::MAX.to_be_bytes();
            link.reserve(flow, packet.len()).unwrap().copy_from_slice(&packet);
            link.commit();
        }
        link.flush().unwrap();
    }
}

const COUNT: u32 = 10_000;
/// An address that no process uses.
const ADDRESS: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 1);

/// Mixed lengths: small ones mostly, some up to RoCE's maximum, some up to the link's.
fn length(number: u32, max_packet: usize) -> usize {
    let draw = number.wrapping_mul(2_654_435_761) as usize;
    match number % 16 {
        0 => MIN_PACKET + draw % (max_packet - MIN_PACKET + 1),
        1 => MIN_PACKET + draw % 4125,
        _ => MIN_PACKET + draw % 200,
    }
}

/// Sends packets of all sizes and receives as many, verifying both, in whatever order they
/// progress.
fn exchange(link: &mut Shm, flow: FlowId, count: u32) {
    let (mut sent, mut got, max_packet) = (0, 0, link.max_packet());
    let deadline = Instant::now() + Duration::from_secs(120);
    let mut want = vec![0; max_packet];
    while sent < count || got < count {
        assert!(Instant::now() < deadline, "{sent} sent and {got} received of {count}");
        for _ in 0..1 + sent % 40 {
            if sent == count {
                break;
            }
            let Ok(packet) = link.reserve(flow, length(sent, max_packet)) else { break };
            fill(packet, sent);
            link.commit();
            sent += 1;
        }
        link.flush().unwrap();
        let received = link.receive(&mut |frame| {
            let len = length(got, max_packet);
            assert_eq!(frame.bytes.len(), len, "packet {got}");
            fill(&mut want[..len], got);
            assert!(
                frame.bytes[..len - 4] == want[..len - 4],
                "packet {got} differs from what was sent"
            );
            got += 1;
        });
        if received.unwrap() == 0 {
            sleep(link, Duration::from_millis(1));
        }
    }
    assert_eq!(link.counters().drops.total(), 0);
}

#[test]
fn two_processes_exchange_packets_of_all_sizes() {
    // 10 000 packets of mixed sizes per process.
    let meetings = testkit::Effort::choose([1, 3, 100]);
    let mut link = bind();
    for _ in 0..meetings {
        let (mut child, address) = start("exchange", link.local());
        let flow = link.open(address, 0).unwrap();
        exchange(&mut link, flow, COUNT);
        link.close(flow);
        assert!(child.wait().unwrap().success());
    }
    assert_eq!(link.counters().received, u64::from(COUNT * meetings));
    assert_eq!(link.rejects(), RejectCounters::default());
}

#[test]
fn a_sender_that_is_killed_leaves_what_it_published() {
    let mut link = bind();
    let (mut child, _) = start("flood", link.local());
    let mut next = 0_u32;
    let mut take = |link: &mut Shm| {
        link.receive(&mut |frame| {
            assert_eq!(frame.bytes[..4], next.to_be_bytes());
            next += 1;
        })
        .unwrap()
    };
    wait_until("packets arrive", || take(&mut link) > 0);
    for _ in 0..100 {
        take(&mut link);
    }
    child.kill().unwrap();
    child.wait().unwrap();
    wait_until("the ring is drained and removed", || {
        while take(&mut link) > 0 {}
        sleep(&link, Duration::from_millis(1));
        link.incoming.borrow().count() == 0
    });
    assert_eq!(link.rejects(), RejectCounters::default());
    // Nothing wakes the link any more.
    assert!(!sleep(&link, Duration::from_millis(5)));
}

#[test]
fn packets_to_a_killed_receiver_are_counted_and_its_successor_is_found() {
    let mut link = bind();
    let (mut child, address) = start("idle", link.local());
    let flow = link.open(address, 0).unwrap();
    // It never reads, so the ring fills up.
    let mut number = 0;
    while link.reserve(flow, 4000).is_ok() || link.writer_has_batch(flow) {
        if link.reserve(flow, 4000).is_ok() {
            link.commit();
            number += 1;
        }
        link.flush().unwrap();
        assert!(number < 10_000);
    }
    assert_eq!(link.reserve(flow, 4000).err(), Some(ReserveError::Full));
    child.kill().unwrap();
    child.wait().unwrap();
    // A sender that only sends must detect the exit as well.
    wait_until("the sender is unblocked", || (0..1024).any(|_| link.reserve(flow, 4000).is_ok()));
    for number in 0..1000 {
        send(&mut link, flow, 4000, number);
        link.flush().unwrap();
    }
    assert!(link.counters().drops.no_peer >= 1000);
    let error = link.open(address, 0).unwrap_err();
    assert_eq!(error.kind(), &ErrorKind::Unavailable, "{error}");
    // Another process binds the address: the same flow reaches it.
    let mut successor = bind_again(address, ShmOptions::default());
    let lost = link.counters().drops.no_peer;
    wait_until("the successor is found", || {
        send(&mut link, flow, 64, 7);
        link.flush().unwrap();
        successor.receive(&mut |frame| assert_eq!(frame.bytes[..4], 7_u32.to_be_bytes())).unwrap()
            > 0
    });
    let lost = link.counters().drops.no_peer - lost;
    assert!(lost < 20_000, "{lost} were lost meanwhile");
    // When that one exits, the descriptor wakes an idle sender.
    drop(successor);
    wait_until("the exit is detected", || {
        sleep(&link, Duration::from_millis(1));
        link.peer_lost.get()
    });
}

impl Shm {
    /// Whether the flow's ring has packets that wait for a flush: then a flush may free space.
    fn writer_has_batch(&mut self, flow: FlowId) -> bool {
        let ring = self.flows.get(flow).unwrap().ring;
        self.outgoing[ring].as_ref().unwrap().writer.packets > 0
    }

    /// The writer of the ring to `peer`, for writing arbitrary contents.
    fn writer_to(&mut self, peer: SocketAddr) -> &mut Writer {
        let at = self.ring_to(peer).unwrap();
        &mut self.outgoing[at].as_mut().unwrap().writer
    }
}

/// A link with a ring so small that anything written to it will be read.
fn malicious() -> Shm {
    let options = "ring=16KiB,max_packet=2000".parse().unwrap();
    Shm::bind("127.0.0.1:0".parse().unwrap(), options).unwrap()
}

#[test]
fn arbitrary_ring_contents_are_handled() {
    let mut link = bind();
    let peer = link.local();
    let mut seed = 0x1234_5678_9abc_def1_u64;
    let mut draw = move || {
        seed ^= seed << 13;
        seed ^= seed >> 7;
        seed ^= seed << 17;
        seed
    };
    let (mut delivered, mut rounds) = (0_u64, 0);
    for _ in 0..100 {
        let mut malicious = malicious();
        malicious.open(peer, 0).unwrap();
        for _ in 0..50 {
            malicious.writer_to(peer).corrupt(&mut draw, 200);
            // Accepts the connection.
            link.wait_fd();
            delivered +=
                link.receive(&mut |frame| assert!(frame.bytes.len() >= MIN_PACKET)).unwrap() as u64;
            rounds += 1;
        }
    }
    let rejects = link.rejects();
    assert!(delivered > 0 && rejects.broken > 50, "{rounds}: {delivered} packets, {rejects:?}");
    // A correct sender is not affected by the others.
    let mut honest = bind();
    let flow = honest.open(peer, 0).unwrap();
    send(&mut honest, flow, 64, 1);
    honest.flush().unwrap();
    wait_until("the honest packet", || {
        let mut found = false;
        link.receive(&mut |frame| found |= frame.from == honest.local()).unwrap();
        found
    });
}

#[test]
fn ring_contents_that_change_while_being_read_are_handled() {
    let mut link = bind();
    let peer = link.local();
    let stop = std::sync::atomic::AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut seed = 7_u64;
            let mut draw = move || {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                seed ^ seed >> 29
            };
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                let mut malicious = malicious();
                let Ok(_) = malicious.open(peer, 0) else { continue };
                for _ in 0..200 {
                    malicious.writer_to(peer).corrupt(&mut draw, 50);
                }
            }
        });
        let deadline = Instant::now() + Duration::from_millis(500);
        while Instant::now() < deadline {
            link.receive(&mut |frame| {
                assert!(frame.bytes.len() <= ShmOptions::default().max_packet)
            })
            .unwrap();
        }
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
    });
}

/// A plain connection to a link.
fn raw_connection(link: &Shm) -> OwnedFd {
    let name = format!("warpwire shm {} {}", handshake::VERSION, link.local());
    let name = SocketAddrUnix::new_abstract_name(name.as_bytes()).unwrap();
    let socket = socket(AddressFamily::UNIX, SocketType::SEQPACKET, None).unwrap();
    connect(&socket, &name).unwrap();
    socket
}

/// Runs in a process of its own, because it changes the descriptor limit.
fn exhausted(link: &Shm) {
    let untrusted = [raw_connection(link), raw_connection(link)];
    let next = rustix::io::fcntl_dupfd_cloexec(&untrusted[0], 0).unwrap();
    let limit = Rlimit { current: Some(next.as_raw_fd() as u64), ..getrlimit(Resource::Nofile) };
    drop(next);
    setrlimit(Resource::Nofile, limit).unwrap();
    wait_until("both are rejected", || {
        sleep(link, Duration::from_millis(1));
        link.rejects().too_many == 2
    });
    for socket in &untrusted {
        let end = rustix::net::recv(socket, &mut [0_u8; 1][..], rustix::net::RecvFlags::empty());
        assert!(matches!(end, Ok((_, 0)) | Err(_)), "the connection is closed");
    }
    assert!(!sleep(link, Duration::from_millis(10)), "nothing wakes the link any more");
}

#[test]
fn connections_without_descriptors_are_rejected_and_do_not_wake() {
    let status = command("exhausted", ADDRESS).status().unwrap();
    assert!(status.success(), "{status}");
}

#[test]
fn other_versions_and_invalid_messages_are_rejected() {
    let mut link = bind();
    let mut other = Vec::from(*b"warpshm\0");
    other.extend((handshake::VERSION + 1).to_le_bytes());
    for (message, what) in [(&other[..], "version"), (b"hello", "invalid"), (&[0; 200], "long")] {
        let socket = raw_connection(&link);
        send_bytes(&socket, message, SendFlags::empty()).unwrap();
        let before = link.rejects();
        wait_until(what, || {
            sleep(&link, Duration::from_millis(1));
            link.rejects() != before
        });
        let mut byte = [0_u8; 1];
        let end = rustix::net::recv(&socket, &mut byte[..], rustix::net::RecvFlags::empty());
        assert!(matches!(end, Ok((_, 0)) | Err(_)), "{what}: the connection is closed");
    }
    assert_eq!(
        link.rejects(),
        RejectCounters { wrong_version: 1, malformed: 2, ..RejectCounters::default() }
    );
    // A connection that sends nothing, and one that closes, do no harm.
    let silent = raw_connection(&link);
    drop(raw_connection(&link));
    assert_eq!(link.receive(&mut |_| ()).unwrap(), 0);
    drop(silent);
    assert!(!sleep(&link, Duration::from_millis(2)));
    assert!(link.incoming.borrow().count() == 0);
}

#[test]
fn memory_that_differs_from_the_hello_is_rejected() {
    let mut link = bind();
    let to = link.local();
    let ((_, ring), (_, page)) =
        (SealedMapping::new(1 << 16).unwrap(), ControlPage::new().unwrap());
    let mut elsewhere = to;
    elsewhere.set_port(1);
    let from = "127.0.0.1:5".parse().unwrap();
    let valid = RingHello { from, to, ring: 1 << 16, wants_direct: true };
    for (hello, files) in [
        (RingHello { ring: 1 << 17, ..valid }, [&ring, &page]),
        (RingHello { to: elsewhere, ..valid }, [&ring, &page]),
        (RingHello { from: "[::1]:5".parse().unwrap(), ..valid }, [&ring, &page]),
        (RingHello { from: "127.0.0.1:0".parse().unwrap(), ..valid }, [&ring, &page]),
        (valid, [&page, &ring]),
        (valid, [&page, &page]),
    ] {
        let before = link.rejects().malformed;
        let socket = raw_connection(&link);
        hello.send_on(&socket, files[0], files[1]).unwrap();
        wait_until("the hello is rejected", || {
            sleep(&link, Duration::from_millis(1));
            link.rejects().malformed > before
        });
    }
    let socket = raw_connection(&link);
    valid.send_on(&socket, &ring, &page).unwrap();
    wait_until("the valid hello is accepted", || {
        link.receive(&mut |_| ()).unwrap();
        link.incoming.borrow().count() == 1
    });
}

#[test]
fn another_users_process_is_rejected() {
    use std::os::unix::process::CommandExt;
    if !rustix::process::geteuid().is_root() {
        return println!("skipped: only root can start another user's process");
    }
    // In a place where that user may read it.
    let folder = tempfile::tempdir().unwrap();
    let program = folder.path().join("other");
    std::fs::copy(std::env::current_exe().unwrap(), &program).unwrap();
    let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(folder.path(), open).unwrap();
    let mut link = bind();
    let mut command = command("flood", link.local());
    let mut theirs = Command::new(&program);
    theirs.args(command.get_args()).envs(command.get_envs().filter_map(|(k, v)| Some((k, v?))));
    command = theirs;
    command.uid(65_534).current_dir("/").stdout(Stdio::null()).stderr(Stdio::piped());
    let child = match command.spawn() {
        Ok(child) => child,
        Err(why) => return println!("skipped: another user's process: {why}"),
    };
    // Neither trusts the other.
    wait_until("the other user is rejected", || {
        assert_eq!(link.receive(&mut |_| panic!("a packet of another user")).unwrap(), 0);
        sleep(&link, Duration::from_millis(1));
        link.rejects().untrusted > 0
    });
    let mut child = child;
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn no_wake_up_is_lost() {
    const SLEEPS: u32 = 10_000;
    let mut link = bind();
    let (mut child, address) = start("echo", link.local());
    let flow = link.open(address, 0).unwrap();
    let mut best = Duration::MAX;
    for number in 0..SLEEPS {
        // Sometimes the other side is asleep by then, sometimes about to sleep.
        (0..number % 97 * 10).for_each(|_| std::hint::spin_loop());
        let start = Instant::now();
        send(&mut link, flow, 64, if number + 1 == SLEEPS { u32::MAX } else { number });
        link.flush().unwrap();
        let mut received = 0;
        while received == 0 {
            assert!(sleep(&link, Duration::from_secs(5)), "sleep {number} never ended");
            received = link.receive(&mut |_| ()).unwrap();
        }
        best = best.min(start.elapsed());
    }
    assert!(child.wait().unwrap().success());
    println!("a round trip with both asleep: {best:?} at best");
}

#[test]
fn no_system_calls_unless_a_receiver_sleeps() {
    let (mut one, mut two) = (bind(), bind());
    let flow = one.open(two.local(), 0).unwrap();
    for number in 0..1000 {
        send(&mut one, flow, 64, number);
        one.flush().unwrap();
        assert_eq!(receive(&mut two, 1).len(), 1);
    }
    assert_eq!(one.counters().calls, 0, "no wake-up was sent");
}

#[test]
fn names_are_exclusive_and_released() {
    let one = bind();
    let error = Shm::bind(one.local(), ShmOptions::default()).err().unwrap();
    assert_eq!(error.kind(), &ErrorKind::Busy, "{error}");
    let address = one.local();
    drop(one);
    bind_again(address, ShmOptions::default());
    // A link on the unspecified address is found under every address.
    let mut wide = Shm::bind("0.0.0.0:0".parse().unwrap(), ShmOptions::default()).unwrap();
    let mut reach = wide.local();
    // An address that no other test uses.
    reach.set_ip("127.9.9.9".parse().unwrap());
    let mut narrow = bind();
    let (there, back) = (narrow.open(reach, 0).unwrap(), wide.open(narrow.local(), 0).unwrap());
    send(&mut narrow, there, 64, 1);
    narrow.flush().unwrap();
    let mut to = None;
    assert_eq!(wide.receive(&mut |frame| to = Some(frame.to)).unwrap(), 1);
    assert_eq!(to, Some(reach));
    send(&mut wide, back, 64, 1);
    wide.flush().unwrap();
    // From the address that Linux would send from.
    reach.set_ip(narrow.local().ip());
    assert_eq!(receive(&mut narrow, 1)[0].0, reach);
}

#[test]
fn packets_longer_than_the_receiver_accepts_are_counted() {
    let mut small =
        Shm::bind("127.0.0.1:0".parse().unwrap(), "max_packet=1000".parse().unwrap()).unwrap();
    let mut large = bind();
    let flow = large.open(small.local(), 0).unwrap();
    for (number, len) in [(0, 1000), (1, 1001), (2, 65_000), (3, 64)] {
        send(&mut large, flow, len, number);
    }
    large.flush().unwrap();
    assert_eq!(receive(&mut small, 2).len(), 2);
    assert_eq!(small.counters().drops.long, 2);
    large.force_icrc();
    assert_eq!(large.max_packet(), MAX_ICRC_PACKET);
    send(&mut large, flow, 64, 1);
}

fn bind_auto() -> Auto {
    let any = "127.0.0.1:0".parse().unwrap();
    Auto::bind(any, UdpOptions::default(), ShmOptions::default()).unwrap()
}

/// What a sender sent before it exited arrives, also if the receiver accepts its connection later.
#[test]
fn packets_of_a_sender_that_has_exited_are_received() {
    let mut receiver = bind();
    let mut sender = bind();
    let flow = sender.open(receiver.local(), 0).unwrap();
    send(&mut sender, flow, 64, 1);
    sender.flush().unwrap();
    drop(sender);
    assert_eq!(receive(&mut receiver, 1).len(), 1);
    // Then its ring is gone.
    testkit::until("the ring is dropped", || {
        receiver.poll_sockets_now();
        receiver.senders() == 0
    });
}

/// A peer that refuses shared memory is reached by UDP, from the first packet that it gets on;
/// one that accepts is not.
#[test]
fn a_flow_that_is_refused_moves_to_udp() {
    let (mut one, mut kept) = (bind_auto(), bind_auto());
    let mut peer = Udp::bind("127.0.0.1:0".parse().unwrap(), UdpOptions::default()).unwrap();
    let listener = Names::new(Namespace::Auto, None).listen(peer.local()).unwrap();
    let flows = [one.open(peer.local(), 7).unwrap(), one.open(peer.local(), 8).unwrap()];
    let to_kept = one.open(kept.local(), 0).unwrap();
    for flow in [flows[0], flows[1], to_kept] {
        assert_eq!(one.flow_path(flow).kind, LinkKind::Shm);
        send(&mut one, flow, 64, 1);
    }
    one.flush().unwrap();
    assert_eq!(receive(&mut kept, 1).len(), 1);
    // As a listener does that has no descriptor left.
    drop(handshake::accept(&listener.socket).unwrap());
    let start = std::time::Instant::now();
    while flows.iter().any(|flow| one.flow_path(*flow).kind == LinkKind::Shm) {
        one.receive(&mut |_| ()).unwrap();
        one.flush().unwrap();
        assert!(start.elapsed() < Duration::from_secs(20));
    }
    for flow in flows {
        let path = one.flow_path(flow);
        assert!(path.why.contains("the peer refused the connection"), "{path}");
        assert!(one.direct_peer(flow).is_err());
        send(&mut one, flow, 64, 2);
        one.flush().unwrap();
        assert_eq!(receive(&mut peer, 1).len(), 1);
    }
    assert_eq!(one.flow_path(to_kept).kind, LinkKind::Shm);
    // A peer that accepted and then exits is not one that refuses.
    drop(kept);
    while one.counters().drops.no_peer == 0 {
        send(&mut one, to_kept, 64, 3);
        one.receive(&mut |_| ()).unwrap();
        one.flush().unwrap();
        assert!(start.elapsed() < Duration::from_secs(20));
    }
    assert_eq!(one.flow_path(to_kept).kind, LinkKind::Shm);
}

fn in_directory(directory: &std::path::Path) -> ShmOptions {
    ShmOptions::default().with_directory(directory.to_owned())
}

/// Links of other network namespaces have addresses that do not belong to this one.
#[test]
fn links_find_each_other_in_a_directory() {
    let shared = tempfile::tempdir().unwrap();
    let bind = |address: &str| Shm::bind(address.parse().unwrap(), in_directory(shared.path()));
    for (here, there) in [("10.1.2.3:5000", "10.1.2.4:5000"), ("[fd00::1]:7", "[fd00::2]:7")] {
        let (mut one, mut other) = (bind(here).unwrap(), bind(there).unwrap());
        let flow = one.open(other.local(), 0).unwrap();
        send(&mut one, flow, 64, 1);
        one.flush().unwrap();
        assert_eq!(receive(&mut other, 1).len(), 1);
        let files = std::fs::read_dir(shared.path()).unwrap().count();
        assert_eq!(files, 2, "{here}");
        assert_eq!(bind(here).err().unwrap().kind(), &ErrorKind::Busy);
        // One that listens elsewhere is not found, nor finds.
        let mut stranger = Shm::bind("127.0.0.1:0".parse().unwrap(), ShmOptions::default());
        assert!(stranger.as_mut().unwrap().open(other.local(), 0).is_err());
        drop((one, other));
        assert_eq!(std::fs::read_dir(shared.path()).unwrap().count(), 0, "{here}");
    }
}

/// Every network namespace has its own loopback: the same address would be two processes.
#[test]
fn a_directory_has_no_loopback_addresses() {
    let shared = tempfile::tempdir().unwrap();
    for address in ["127.0.0.1:0", "[::1]:0", "0.0.0.0:0", "169.254.1.1:9", "[fe80::1]:9"] {
        let options = in_directory(shared.path());
        let link = Shm::bind(address.parse().unwrap(), options).unwrap();
        assert_eq!(std::fs::read_dir(shared.path()).unwrap().count(), 0, "{}", link.local());
    }
    // A file with such a name leads nowhere.
    let mut one = Shm::bind("127.0.0.1:0".parse().unwrap(), in_directory(shared.path())).unwrap();
    let _trap = std::os::unix::net::UnixListener::bind(
        shared.path().join(format!("shm-{}-127.0.0.1:9", handshake::VERSION)),
    );
    let refused = one.open("127.0.0.1:9".parse().unwrap(), 0).unwrap_err();
    assert_eq!(refused.kind(), &ErrorKind::Unavailable);
}

#[test]
fn a_file_of_a_killed_process_is_replaced() {
    let shared = tempfile::tempdir().unwrap();
    let at = "10.1.2.3:5000".parse().unwrap();
    let link = Shm::bind(at, in_directory(shared.path())).unwrap();
    let file = std::fs::read_dir(shared.path()).unwrap().next().unwrap().unwrap().path();
    let kept = shared.path().join("kept");
    std::fs::rename(&file, &kept).unwrap(); // so that the drop does not remove it
    drop(link);
    std::fs::rename(&kept, &file).unwrap();
    let other = "10.1.2.4:5000".parse().unwrap();
    let mut caller = Shm::bind(other, in_directory(shared.path())).unwrap();
    wait_until("no process listens", || match caller.open(at, 0) {
        Ok(flow) => {
            caller.close(flow);
            false
        }
        Err(refused) => {
            assert_eq!(refused.kind(), &ErrorKind::Unavailable, "{refused}");
            true
        }
    });
    let again = bind_again(at, in_directory(shared.path()));
    caller.open(again.local(), 0).unwrap();
}

/// A link that is bound, but does not listen yet, is not taken for one of a killed process.
#[test]
fn one_of_many_gets_a_name_in_a_directory() {
    let shared = tempfile::tempdir().unwrap();
    let at = "10.1.2.3:5000".parse().unwrap();
    for round in 0..50 {
        let together = std::sync::Barrier::new(4);
        let links = std::thread::scope(|scope| {
            let bind = || {
                together.wait();
                Shm::bind(at, in_directory(shared.path()))
            };
            let threads = [(); 4].map(|()| scope.spawn(bind));
            threads.map(|thread| thread.join().unwrap())
        });
        assert_eq!(links.iter().flatten().count(), 1, "round {round}");
        let mut caller =
            Shm::bind("10.1.2.4:5000".parse().unwrap(), in_directory(shared.path())).unwrap();
        caller.open(at, 0).unwrap();
        drop((links, caller));
        assert_eq!(std::fs::read_dir(shared.path()).unwrap().count(), 0, "round {round}");
    }
}

#[test]
fn a_directory_that_cannot_be_used_is_an_error() {
    let shared = tempfile::tempdir().unwrap();
    let file = shared.path().join("file");
    std::fs::write(&file, "").unwrap();
    let long = format!("/{}", "x".repeat(60));
    let any = "127.0.0.1:0".parse().unwrap();
    for directory in [shared.path().join("absent"), file, long.into()] {
        let options = in_directory(&directory);
        let error = Auto::bind(any, UdpOptions::default(), options.clone()).err().unwrap();
        assert_eq!(error.kind(), &ErrorKind::InvalidArgument, "{error}");
        assert!(error.to_string().contains(&*directory.to_string_lossy()), "{error}");
        assert!(Shm::bind(any, options).is_err());
    }
}
