//! Tests specific to the UDP link: the kernel's actual headers, garbage from outside, failing
//! offloads.

use std::net::UdpSocket;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use warpwire_proto::wire::{Extension, Headers as WireHeaders, Opcode, Packet};

use warpwire_proto::wire::ip::{ECN_MARKED, ECN_MASK};

use super::*;
use crate::link::MAX_ROCE_PACKET;
use crate::link::tests::{fill, receive, receive_until_dropped, send};

fn bind(address: &str, options: UdpOptions) -> Udp {
    Udp::bind(address.parse().unwrap(), options).unwrap()
}

/// One loopback address per IP version that this machine has.
fn addresses() -> Vec<&'static str> {
    let available = |address: &&str| {
        let bound = UdpSocket::bind(*address).is_ok();
        if !bound {
            println!("skipped: {address} does not belong to this machine");
        }
        bound
    };
    ["127.0.0.1:0", "[::1]:0"].into_iter().filter(available).collect()
}

/// The next `count` packets, from the IP header on, or those captured within two seconds.
fn sniff(sniffer: &OwnedFd, count: usize) -> Vec<Vec<u8>> {
    let deadline = Instant::now() + Duration::from_secs(2);
    let mut found = Vec::new();
    let mut frame = vec![0; 1 << 17];
    while found.len() < count && Instant::now() < deadline {
        let Ok(bytes) = rustix::io::read(sniffer, &mut frame[..]) else {
            std::thread::sleep(Duration::from_millis(1));
            continue;
        };
        // Skip the Ethernet header.
        found.push(frame[..bytes].get(14..).unwrap_or_default().to_vec());
    }
    found
}

/// Sends a packet with valid headers.
fn put(link: &mut Udp, flow: FlowId, payload: usize, number: u32) {
    let headers =
        WireHeaders::new(Opcode::SendOnly, 7, warpwire_proto::Psn::new(number), Extension::None);
    let packet = link.reserve(flow, headers.wire_len(payload)).unwrap();
    let at = headers.emit(packet, payload).unwrap();
    packet[at..at + payload].fill(number as u8);
    link.commit().unwrap();
}

/// Set in a network namespace whose loopback interface accepts no runs, so that the kernel segments
/// them before they can be captured.
const SEGMENTED: &str = "WARPWIRE_TEST_SEGMENTED";

#[test]
fn the_icrc_matches_the_headers_that_the_kernel_writes() {
    // Needs a socket that captures every packet of the loopback interface.
    if let Err(why) = sys::sniffer(1, 1) {
        return println!("skipped: no AF_PACKET socket: {why} (it needs CAP_NET_RAW)");
    }
    for address in addresses() {
        for options in ["gso=off", "gso=off,nocheck=off"] {
            check_headers(address, options);
        }
    }
    if std::env::var_os(SEGMENTED).is_some() {
        for address in addresses() {
            check_headers(address, "gso=on");
        }
        println!("segmented");
    }
}

#[test]
fn the_icrc_matches_the_packets_that_the_kernel_segments() {
    let script = "ip link set lo up gso_max_segs 1 && exec \"$@\"";
    let test = "link::udp::tests::the_icrc_matches_the_headers_that_the_kernel_writes";
    let ran = std::process::Command::new("unshare")
        .args(["-rn", "sh", "-c", script, "sh"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", "--nocapture", test])
        .env(SEGMENTED, "1")
        .output();
    let output = match ran {
        Ok(output) => output,
        Err(why) => return println!("skipped: unshare: {why}"),
    };
    let text = String::from_utf8_lossy(&output.stdout).into_owned()
        + &String::from_utf8_lossy(&output.stderr);
    if output.status.success() {
        assert!(text.contains("segmented") || text.contains("skipped:"), "{text}");
    } else if text.contains("running 1 test") {
        panic!("{text}");
    } else {
        println!(
            "skipped: no network namespace with a loopback interface that segments runs: {text}"
        );
    }
}

const SIZES: [usize; 8] = [4, 100, 100, 100, 60, 1024, 1024, 0];

/// Sends single packets and runs, and returns them as captured on the wire.
fn exchange(address: &str, options: &str) -> (Udp, Vec<Vec<u8>>) {
    let mut one = bind(address, options.parse().unwrap());
    let two = bind(address, UdpOptions::default());
    let sniffer = sys::sniffer(one.local().port(), two.local().port()).unwrap();
    let flow = one.open(two.local(), 0).unwrap();
    for (number, payload) in SIZES.into_iter().enumerate() {
        put(&mut one, flow, payload, number as u32);
    }
    one.flush().unwrap();
    let found = sniff(&sniffer, SIZES.len());
    for bytes in &found {
        let packet = Packet::new_checked(bytes).unwrap();
        let id = packet.ip().identification;
        assert!(packet.has_valid_icrc::<crate::link::SimdCrc32>(), "{address} {options} {id}");
    }
    (one, found)
}

/// Checks the headers on the wire. The capture may lose packets on a busy machine, so it is
/// repeated: each captured packet must be valid, and one attempt must capture all of them.
fn check_headers(address: &str, options: &str) {
    const ATTEMPTS: usize = 5;
    let mut seen = (0..ATTEMPTS).map(|_| exchange(address, options));
    let whole = seen.find(|(_, found)| found.len() == SIZES.len());
    let (one, found) = whole.expect("one attempt must capture all packets");
    let mut ids = Vec::new();
    for (number, bytes) in found.iter().enumerate() {
        let packet = Packet::new_checked(bytes).unwrap();
        assert_eq!(packet.transport().psn().value(), number as u32);
        ids.push(packet.ip().identification);
        assert_eq!(packet.ip().traffic_class & ECN_MASK, ECN_CAPABLE);
        let at = packet.ip().header_len() + 6;
        if one.setup.no_checksum.is_ok() {
            assert_eq!(bytes[at..at + 2], [0, 0], "{address} {options}: a UDP checksum");
        }
    }
    if one.setup.gso.is_ok() && one.local().is_ipv4() {
        assert_eq!(ids, [0, 0, 1, 2, 3, 0, 1, 2]);
    } else {
        assert_eq!(ids, [0; 8]);
    }
}

#[test]
fn garbage_is_counted_and_does_no_harm() {
    for address in addresses() {
        for options in
            ["", "gro=off", "gro=off,mmsg=off", "max_packet=1000,gro=off", "max_packet=1000"]
        {
            let mut link = bind(address, options.parse().unwrap());
            let stranger = UdpSocket::bind(address).unwrap();
            stranger.connect(link.local()).unwrap();
            let (short, long) = (15, link.max_packet() + 1);
            let sizes = [0, 1, short, 16, 100, link.max_packet(), long, 65_000];
            for len in sizes {
                stranger.send(&vec![0xa5; len]).unwrap();
            }
            let drops = receive_until_dropped(&mut link, sizes.len() as u64);
            let icrc = drops.icrc + drops.unverified;
            assert_eq!((drops.short, icrc, drops.long), (3, 3, 2), "{address} {options}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn random_bytes_never_pass_nor_panic(
        packets in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..200), 1..20),
    ) {
        let mut link = bind("127.0.0.1:0", UdpOptions::default());
        let stranger = UdpSocket::bind("127.0.0.1:0").unwrap();
        for packet in &packets {
            stranger.send_to(packet, link.local()).unwrap();
        }
        let drops = receive_until_dropped(&mut link, packets.len() as u64);
        prop_assert_eq!(drops.total(), packets.len() as u64);
    }
}

/// A peer whose IP identifications come from a counter. What the kernel writes into the IP header
/// does not matter: only the ICRC depends on it here.
struct Counting {
    socket: UdpSocket,
    prefix: IcrcPrefix,
}

impl Counting {
    fn new(link: &Udp) -> Self {
        let socket = UdpSocket::bind("127.0.0.1:0").unwrap();
        socket.connect(link.local()).unwrap();
        let prefix = IcrcPrefix::new(socket.local_addr().unwrap(), link.local());
        Self { socket, prefix }
    }

    /// Sends this packet, with its ICRC appended.
    fn send(&mut self, id: u16, packet: &[u8]) {
        let mut packet = [packet, &[0; 4]].concat();
        let icrc = self.prefix.icrc::<crate::link::SimdCrc32>(id, &packet).unwrap();
        packet.last_chunk_mut::<4>().unwrap().copy_from_slice(&icrc.to_le_bytes());
        self.socket.send(&packet).unwrap();
    }

    fn send_request(&mut self, id: u16, number: u8) {
        self.send(id, &[4, 0, 0xff, 0xff, 0, 0, 0, 7, 0, 0, 0, number, 1, 2, 3, 4]);
    }
}

/// Receives until nothing more is to come; returns the PSNs and identifications.
fn receive_all(link: &mut Udp, expired: bool) -> Vec<(u8, u16)> {
    let mut found = Vec::new();
    let end = Instant::now() + if expired { held::HOLD_TIME * 2 } else { held::HOLD_TIME / 6 };
    while Instant::now() < end || expired && link.poll_delay().is_some() {
        link.receive(&mut |frame| found.push((frame.bytes[11], frame.identification))).unwrap();
        std::thread::sleep(Duration::from_millis(1));
    }
    found
}

#[test]
fn the_first_packet_of_a_counting_host_is_delivered_with_the_second() {
    for options in ["", "gro=off,mmsg=off"] {
        let mut link = bind("127.0.0.1:0", options.parse().unwrap());
        let mut peer = Counting::new(&link);
        peer.send_request(0xabcd, 1);
        assert_eq!(receive_all(&mut link, false), [], "{options}");
        assert!(link.poll_delay().is_some_and(|wait| wait <= held::HOLD_TIME));
        peer.send_request(0xabce, 2);
        assert_eq!(receive_all(&mut link, false), [(1, 0xabcd), (2, 0xabce)], "{options}");
        assert_eq!(link.poll_delay(), None);
        peer.send_request(0xabcf, 3);
        assert_eq!(receive_all(&mut link, false), [(3, 0xabcf)]);
        let counters = link.counters();
        assert_eq!((counters.received, counters.received_bytes), (3, 60));
        assert_eq!(counters.drops.total(), 0);
    }
}

#[test]
fn a_lone_first_packet_is_counted_and_accepted_when_it_is_sent_again() {
    let mut link = bind("127.0.0.1:0", UdpOptions::default());
    let mut peer = Counting::new(&link);
    peer.send_request(0xabcd, 1);
    assert_eq!(receive_all(&mut link, true), []);
    let drops = link.counters().drops;
    assert_eq!((drops.unverified, drops.icrc, link.poll_delay()), (1, 0, None));
    peer.send_request(0x1234, 1);
    assert_eq!(receive_all(&mut link, false), [(1, 0x1234)]);
}

#[test]
fn a_lone_final_nak_is_delivered_late_and_another_one_is_not() {
    let nak = |syndrome| [0x11, 0, 0xff, 0xff, 0, 0, 0, 7, 0, 0, 0, 9, syndrome, 0, 0, 1];
    for (syndrome, wanted) in [(0x62, &[(9, 0xabcd)][..]), (0x60, &[])] {
        let mut link = bind("127.0.0.1:0", UdpOptions::default());
        let mut peer = Counting::new(&link);
        peer.send(0xabcd, &nak(syndrome));
        assert_eq!(receive_all(&mut link, false), []);
        assert_eq!(receive_all(&mut link, true), wanted);
        assert_eq!(link.counters().drops.unverified, u64::from(syndrome == 0x60));
    }
}

#[test]
fn congestion_marks_are_reported() {
    for address in addresses() {
        for options in ["", "gso=off,gro=off"] {
            let mut one = bind(address, options.parse().unwrap());
            let mut two = bind(address, options.parse().unwrap());
            let flow = one.open(two.local(), 0).unwrap();
            for mark in [false, true, false] {
                let (level, name) = if one.local().is_ipv4() {
                    (libc::IPPROTO_IP, libc::IP_TOS)
                } else {
                    (libc::IPPROTO_IPV6, libc::IPV6_TCLASS)
                };
                // As a switch would mark it.
                let class = if mark { ECN_MARKED } else { ECN_CAPABLE };
                sys::set(one.socket.as_fd(), level, name, i32::from(class)).unwrap();
                (0..3).for_each(|number| send(&mut one, flow, 64, number));
                one.flush().unwrap();
                let mut left = 3;
                while left > 0 {
                    left -= two.receive(&mut |frame| assert_eq!(frame.is_marked(), mark)).unwrap();
                }
            }
        }
    }
}

#[test]
fn hop_limit_and_traffic_class_are_the_packets_own() {
    for address in addresses() {
        for options in ["", "gso=off,gro=off"] {
            let mut one = bind(address, options.parse().unwrap());
            let mut two = bind(address, options.parse().unwrap());
            let flow = one.open(two.local(), 0).unwrap();
            for (hops, class) in [(64, 2), (1, 0x48), (255, 0xb8), (7, 0)] {
                let options = match one.local().is_ipv4() {
                    true => [(libc::IPPROTO_IP, libc::IP_TTL), (libc::IPPROTO_IP, libc::IP_TOS)],
                    false => [
                        (libc::IPPROTO_IPV6, libc::IPV6_UNICAST_HOPS),
                        (libc::IPPROTO_IPV6, libc::IPV6_TCLASS),
                    ],
                };
                for ((level, name), value) in options.into_iter().zip([hops, class]) {
                    sys::set(one.socket.as_fd(), level, name, value).unwrap();
                }
                (0..3).for_each(|number| send(&mut one, flow, 64, number));
                one.flush().unwrap();
                let mut left = 3;
                while left > 0 {
                    left -= two
                        .receive(&mut |frame| {
                            let found = (frame.hop_limit, frame.traffic_class);
                            assert_eq!(found, (hops as u8, class as u8), "{address}");
                        })
                        .unwrap();
                }
            }
        }
    }
}

#[test]
fn a_link_on_the_wildcard_address_reports_the_destination() {
    for (any, one) in [("0.0.0.0:0", "127.0.0.1:0"), ("[::]:0", "[::1]:0")] {
        if !addresses().contains(&one) {
            continue;
        }
        let options = UdpOptions { max_packet: Some(1000), ..UdpOptions::default() };
        let mut wide = bind(any, options);
        assert!(wide.path().why.contains("every address"));
        let mut narrow = bind(one, options);
        let mut reach = narrow.local();
        reach.set_port(wide.local().port());
        let (to_wide, to_narrow) =
            (narrow.open(reach, 0).unwrap(), wide.open(narrow.local(), 0).unwrap());
        for number in 0..5 {
            send(&mut narrow, to_wide, 100, number);
            send(&mut wide, to_narrow, 100, number);
        }
        narrow.flush().unwrap();
        wide.flush().unwrap();
        let at_narrow = receive(&mut narrow, 5);
        assert_eq!(at_narrow.len(), 5);
        assert_eq!(at_narrow[0].0, reach, "the source is the route's source address");
        let mut to = None;
        let mut count = 0;
        while count < 5 {
            count += wide.receive(&mut |frame| to = Some(frame.to)).unwrap();
        }
        assert_eq!(to, Some(reach));
    }
}

#[test]
fn runs_that_a_route_rejects_are_sent_packet_by_packet() {
    let mut one = bind("127.0.0.1:0", UdpOptions::default());
    let mut two = bind("127.0.0.1:0", UdpOptions::default());
    let flow = one.open(two.local(), 0).unwrap();
    for number in 0..10 {
        send(&mut one, flow, 100, number);
    }
    fill(one.reserve(flow, 100).unwrap(), 10);
    one.commit_corrupted(Corruption::FlipBit(0));
    // Linux rejects a run on a socket without checksums.
    sys::set(one.socket.as_fd(), libc::SOL_SOCKET, libc::SO_NO_CHECK, 1).unwrap();
    assert_eq!(one.flush().unwrap(), Flushed { sent: 11, waiting: 0 });
    assert_eq!(receive(&mut two, 10).len(), 10);
    let drops = receive_until_dropped(&mut two, 1);
    assert_eq!(drops.icrc + drops.unverified, 1, "injected corruption is preserved");
    assert_eq!(one.counters().drops.total(), 0);
}

#[test]
fn a_route_without_segmentation_disables_it() {
    let mut counters = Counters::default();
    let mut one = bind("127.0.0.1:0", UdpOptions::default());
    let flow = one.open("127.0.0.1:9".parse().unwrap(), 0).unwrap();
    for number in 0..3 {
        send(&mut one, flow, 100, number);
    }
    assert!(one.batch.recover(&io::Error::from_raw_os_error(libc::EIO), &mut counters));
    assert!(one.path().why.contains("a route refused it"));
    assert_eq!(one.flush().unwrap(), Flushed { sent: 3, waiting: 0 });
    send(&mut one, flow, 100, 3);
    send(&mut one, flow, 100, 4);
    assert!(!one.batch.recover(&io::Error::from_raw_os_error(libc::EAGAIN), &mut counters));
    assert!(one.batch.recover(&io::Error::from_raw_os_error(libc::EPERM), &mut counters));
    assert_eq!(counters.drops.refused, 1, "a packet that a firewall rejects is counted");
    assert!(one.batch.recover(&io::Error::from_raw_os_error(libc::ENOSYS), &mut counters));
    assert_eq!(one.batch.calls, CallMode::Single);
    assert_eq!(one.flush().unwrap(), Flushed { sent: 1, waiting: 0 });
}

#[test]
fn a_batch_is_one_call() {
    let mut one = bind("127.0.0.1:0", UdpOptions::default());
    let mut two = bind("127.0.0.1:0", UdpOptions::default());
    let flow = one.open(two.local(), 0).unwrap();
    for number in 0..40 {
        send(&mut one, flow, MAX_ROCE_PACKET - (number as usize % 2), number);
    }
    one.flush().unwrap();
    assert_eq!(one.counters().calls, 1);
    let (mut got, mut calls) = (0, 0);
    testkit::until("all packets arrive", || {
        let some = two.receive(&mut |_| ()).unwrap();
        (got, calls) = (got + some, calls + u64::from(some > 0));
        got >= 40
    });
    // The first calls request one message each, later calls as many as are available; one more if
    // Linux delivers the batch in two parts.
    let most = 40 / 2 / MESSAGES.0 as u64 + 2 + u64::from(BATCH_AFTER);
    assert!(calls <= most, "{calls} calls");
}

#[test]
fn a_full_socket_buffer_is_counted() {
    let mut one = bind("127.0.0.1:0", UdpOptions::default());
    let mut two = bind("127.0.0.1:0", "buffer=4096,gro=off".parse().unwrap());
    let flow = one.open(two.local(), 0).unwrap();
    for number in 0..64 {
        send(&mut one, flow, 1000, number);
    }
    one.flush().unwrap();
    let (mut got, mut lost) = (0, 0);
    testkit::until("every packet is received or counted as lost", || {
        got += two.receive(&mut |_| ()).unwrap() as u64;
        lost = two.counters().drops.overrun;
        got + lost >= 64
    });
    assert!(lost > 0 && got + lost == 64, "{got} received, {lost} counted as lost");
}

#[test]
fn bind_and_open_errors_name_the_cause() {
    let taken = bind("127.0.0.1:0", UdpOptions::default());
    for (address, why) in [
        (taken.local().to_string(), "another port"),
        ("192.0.2.77:0".to_owned(), "address of this machine"),
    ] {
        let error = Udp::bind(address.parse().unwrap(), UdpOptions::default()).err().unwrap();
        assert!(error.advice().is_some_and(|advice| advice.contains(why)), "{error}");
    }
    let mut link = taken;
    let error = link.open("198.51.100.1:4791".parse().unwrap(), 0).unwrap_err();
    assert!(error.to_string().contains("198.51.100.1"), "{error}");
    assert!(error.advice().is_some_and(|advice| advice.contains("route")), "{error}");
}
