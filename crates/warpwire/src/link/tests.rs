//! One test suite for all links, bare and wrapped.

use std::net::{SocketAddr, UdpSocket};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::fault::FaultPlan;
use super::udp::UdpOptions;
use super::*;
use crate::error::Kind as ErrorKind;

type Boxed = Box<dyn Link>;

/// Two links that reach each other, and a third that reaches both.
struct Trio {
    name: String,
    links: [Boxed; 3],
}

fn loopbacks(options: LoopbackOptions) -> [Boxed; 3] {
    let hub = Hub::with(options);
    [1, 2, 3].map(|host| {
        Box::new(hub.endpoint(SocketAddr::from(([10, 0, 0, host], 4791))).unwrap()) as Boxed
    })
}

/// Three UDP links, if this machine has the IP version of the address.
fn udps(address: &str, options: UdpOptions) -> Option<[Boxed; 3]> {
    let address: SocketAddr = address.parse().unwrap();
    if UdpSocket::bind(address).is_err() {
        println!("skipped: {address} does not belong to this machine");
        return None;
    }
    Some([(); 3].map(|()| Box::new(Udp::bind(address, options).unwrap()) as Boxed))
}

/// As [`udps`], for links that only need an address.
fn bound(address: &str, make: impl Fn(SocketAddr) -> Boxed) -> Option<[Boxed; 3]> {
    let address: SocketAddr = address.parse().unwrap();
    UdpSocket::bind(address).ok()?;
    Some([(); 3].map(|()| make(address)))
}

fn auto(address: SocketAddr) -> Boxed {
    Box::new(Auto::bind(address, UdpOptions::default(), ShmOptions::default()).unwrap())
}

/// All combinations of offloads.
fn combinations() -> Vec<UdpOptions> {
    let bit = |at: u32, number: u32| number >> at & 1 == 0;
    let all = (0..16).map(|number| UdpOptions {
        gso: bit(0, number),
        gro: bit(1, number),
        mmsg: bit(2, number),
        no_checksum: bit(3, number),
        ..UdpOptions::default()
    });
    all.collect()
}

fn trios() -> Vec<Trio> {
    type Make = Box<dyn Fn() -> Option<[Boxed; 3]>>;
    let mut makes: Vec<(String, Make)> =
        vec![("loopback".to_owned(), Box::new(|| Some(loopbacks(LoopbackOptions::default()))))];
    for address in ["127.0.0.1:0", "[::1]:0"] {
        for options in combinations() {
            let make: Make = Box::new(move || udps(address, options));
            makes.push((format!("udp {address} {options}"), make));
        }
        for options in ["", "ring=16KiB,max_packet=2000"] {
            let shm = move |address| {
                Box::new(Shm::bind(address, options.parse().unwrap()).unwrap()) as Boxed
            };
            makes.push((format!("shm {address} {options}"), Box::new(move || bound(address, shm))));
        }
        makes.push((format!("auto {address}"), Box::new(move || bound(address, auto))));
        // An auto link among UDP links.
        let mixed = move || {
            let [_, two, three] = udps(address, UdpOptions::default())?;
            Some([auto(address.parse().unwrap()), two, three])
        };
        makes.push((format!("auto among UDP {address}"), Box::new(mixed)));
    }
    let mut trios = Vec::new();
    for (name, make) in makes {
        let Some(links) = make() else { continue };
        trios.push(Trio { name: name.clone(), links });
        let harmless =
            |link: Boxed| Box::new(FaultInjector::new(link, FaultPlan::default())) as Boxed;
        if let Some(links) = make() {
            trios.push(Trio { name: format!("fault({name})"), links: links.map(harmless) });
        }
        let capture = Capture::to(Box::new(std::io::sink()), "nowhere");
        let tap = |link: Boxed| Box::new(Tap::new(link, &capture)) as Boxed;
        if let Some(links) = make() {
            trios.push(Trio { name: format!("tap({name})"), links: links.map(tap) });
        }
    }
    trios
}

/// Fills a packet with content that is unique to `number`.
pub(super) fn fill(packet: &mut [u8], number: u32) {
    let end = packet.len() - 4;
    packet[..end].copy_from_slice(&testkit::random_bytes(number.into(), end));
    packet[..4].copy_from_slice(&number.to_be_bytes());
}

pub(super) fn send(link: &mut dyn Link, flow: FlowId, len: usize, number: u32) {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        match link.reserve(flow, len) {
            Ok(packet) => {
                fill(packet, number);
                link.commit();
                return;
            }
            Err(ReserveError::Full) => {
                assert!(Instant::now() < deadline, "the link is still full");
                link.flush().unwrap();
            }
            Err(other) => panic!("{other}"),
        }
    }
}

/// Receives packets until there are `count`, for at most half a second; returns senders and
/// contents without the ICRC.
pub(super) fn receive(link: &mut dyn Link, count: usize) -> Vec<(SocketAddr, Vec<u8>)> {
    let deadline = Instant::now() + testkit::deadline(Duration::from_secs(10));
    let mut got = Vec::new();
    while got.len() < count && Instant::now() < deadline {
        let some = link
            .receive(&mut |frame| {
                got.push((frame.from, frame.bytes[..frame.bytes.len() - 4].to_vec()));
            })
            .unwrap();
        if some == 0 {
            wait(link, Duration::from_millis(20));
        }
    }
    got
}

/// Receives until the link has dropped so many packets; it must deliver none. `icrc` and
/// `unverified` together are those with a wrong ICRC: one in 32 768 fits some identification.
pub(super) fn receive_until_dropped(link: &mut dyn Link, count: u64) -> Drops {
    testkit::until("all packets are dropped", || {
        link.receive(&mut |frame| panic!("{} bytes delivered", frame.bytes.len())).unwrap();
        link.counters().drops.total() >= count && link.poll_delay().is_none()
    });
    link.counters().drops
}

pub(super) fn wait(link: &dyn Link, time: Duration) -> bool {
    let time = link.poll_delay().unwrap_or(time).min(time);
    let fd = link.wait_fd().unwrap();
    let timeout = Timespec { tv_sec: 0, tv_nsec: time.as_nanos() as i64 };
    poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&timeout)).unwrap() > 0
}

fn expected(from: SocketAddr, len: usize, number: u32) -> (SocketAddr, Vec<u8>) {
    let mut packet = vec![0; len];
    fill(&mut packet, number);
    packet.truncate(len - 4);
    (from, packet)
}

#[test]
fn packets_of_all_sizes_arrive_complete_and_in_order() {
    for Trio { name, links: [mut one, mut two, _] } in trios() {
        let flow = one.open(two.local(), 1).unwrap();
        let max_packet = one.max_packet_to(flow);
        let sizes: Vec<usize> = (MIN_PACKET..=max_packet)
            .filter(|&len| {
                let apart = if len < 5000 { 97 } else { 679 };
                let apart = apart * testkit::Effort::choose([5, 1, 1]);
                len < 100 || len > max_packet - 5 || len % apart == 0
            })
            .collect();
        for (number, len) in sizes.iter().enumerate() {
            send(&mut *one, flow, *len, number as u32);
            // Runs of equal size, of every length, and single packets in between.
            for more in 0..number % 5 {
                send(&mut *one, flow, *len, (number * 10 + more) as u32);
            }
            assert_eq!(one.flush().unwrap().waiting, 0, "{name}");
            let got = receive(&mut *two, 1 + number % 5);
            let from = one.local();
            let numbers =
                std::iter::once(number).chain((0..number % 5).map(|more| number * 10 + more));
            let want: Vec<_> = numbers.map(|number| expected(from, *len, number as u32)).collect();
            assert!(got == want, "{name}: {len} bytes: {} packets of {}", got.len(), want.len());
        }
        assert_eq!(one.counters().drops.total() + two.counters().drops.total(), 0, "{name}");
        assert_eq!(one.counters().sent, two.counters().received, "{name}");
        assert_eq!(one.counters().sent_bytes, two.counters().received_bytes, "{name}");
    }
}

#[test]
fn every_peer_receives_its_own_packets() {
    for Trio { name, links: [mut one, mut two, mut three] } in trios() {
        let to_two = one.open(two.local(), 1).unwrap();
        let to_three = one.open(three.local(), 2).unwrap();
        let also_two = one.open(two.local(), 3).unwrap();
        let back = two.open(one.local(), 1).unwrap();
        for number in 0..30 {
            let flow = [to_two, to_three, also_two][number as usize % 3];
            send(&mut *one, flow, 64, number);
        }
        send(&mut *two, back, 20, 77);
        one.flush().unwrap();
        two.flush().unwrap();
        let at_two = receive(&mut *two, 20);
        let want = (0..30).filter(|number| number % 3 != 1);
        let want: Vec<_> = want.map(|number| expected(one.local(), 64, number)).collect();
        assert_eq!(at_two, want, "{name}");
        assert_eq!(receive(&mut *three, 10).len(), 10, "{name}");
        assert_eq!(receive(&mut *one, 1), [expected(two.local(), 20, 77)], "{name}");
        one.close(to_two);
        assert_eq!(one.reserve(to_two, 64).err(), Some(ReserveError::Closed), "{name}");
        one.close(to_two);
        send(&mut *one, also_two, 64, 5);
        // Committed packets are sent although their flow is closed.
        one.close(also_two);
        one.flush().unwrap();
        assert_eq!(receive(&mut *two, 1).len(), 1, "{name}");
        let again = one.open(two.local(), 1).unwrap();
        assert_ne!(again, to_two);
        assert_eq!(one.reserve(also_two, 64).err(), Some(ReserveError::Closed), "{name}");
    }
}

#[test]
fn invalid_requests_are_rejected() {
    for Trio { name, links: [mut one, two, _] } in trios() {
        let flow = one.open(two.local(), 0).unwrap();
        assert_eq!(one.reserve(flow, MIN_PACKET - 1).err(), Some(ReserveError::Length), "{name}");
        assert!(one.max_packet_to(flow) >= one.max_packet(), "{name}");
        let long = one.max_packet_to(flow) + 1;
        assert_eq!(one.reserve(flow, long).err(), Some(ReserveError::Length), "{name}");
        for len in [MIN_PACKET - 1, long] {
            assert_eq!(one.has_room(flow, len), Err(ReserveError::Length), "{name}");
        }
        assert!(one.commit().is_none(), "{name}: nothing was reserved");
        assert_eq!(one.flush().unwrap(), Flushed::default(), "{name}");
        let other = if one.local().is_ipv4() { "[::1]:5" } else { "127.0.0.1:5" };
        let (unspecified, group) = if one.local().is_ipv4() {
            ("0.0.0.0:5", "224.0.0.1:5")
        } else {
            ("[::]:5", "[ff02::1]:5")
        };
        let mut no_port = two.local();
        no_port.set_port(0);
        for (peer, why) in [
            (other.parse().unwrap(), "other IP version"),
            (unspecified.parse().unwrap(), "every address"),
            (group.parse().unwrap(), "multicast"),
            (no_port, "port 0"),
        ] {
            let error = one.open(peer, 0).unwrap_err();
            assert_eq!(error.kind(), &ErrorKind::InvalidArgument, "{name}");
            assert!(error.to_string().contains(why), "{name}: {error}");
            assert!(error.advice().is_some(), "{name}: {error}");
        }
    }
}

#[test]
fn a_full_batch_is_reported_and_a_flush_empties_it() {
    for Trio { name, links: [mut one, mut two, _] } in trios() {
        let flow = one.open(two.local(), 0).unwrap();
        let mut count = 0;
        while let Ok(packet) = one.reserve(flow, 64) {
            fill(packet, count);
            one.commit();
            count += 1;
            assert!(count < 10_000, "{name}: the batch never fills");
        }
        assert_eq!(one.reserve(flow, 64).err(), Some(ReserveError::Full), "{name}");
        assert_eq!(one.has_room(flow, 64), Err(ReserveError::Full), "{name}");
        let flushed = one.flush().unwrap();
        assert_eq!((flushed.sent, flushed.waiting), (count as usize, 0), "{name}");
        assert_eq!(one.has_room(flow, 64), Ok(()), "{name}");
        assert!(one.reserve(flow, 64).is_ok(), "{name}");
        assert_eq!(receive(&mut *two, count as usize).len(), count as usize, "{name}");
        one.close(flow);
        assert_eq!(one.has_room(flow, 64), Err(ReserveError::Closed), "{name}");
    }
}

/// Where there is room for a long packet, there is for a short one, whatever has been sent before.
#[test]
fn room_for_a_long_packet_is_room_for_a_short_one() {
    for Trio { name, links: [mut one, mut two, _] } in trios() {
        let flow = one.open(two.local(), 0).unwrap();
        let longest = one.max_packet_to(flow);
        let (mut full, mut number) = (0, 0);
        while number < 300 {
            if one.has_room(flow, longest).is_err() {
                full += 1;
                testkit::until("the peer has read", || {
                    two.receive(&mut |_| ()).unwrap();
                    one.flush().unwrap();
                    one.has_room(flow, longest).is_ok()
                });
            }
            send_at_once(&mut *one, flow, MIN_PACKET + number as usize * 37 % 1500, number, &name);
            number += 1;
        }
        assert!(full > 0 || !name.contains("ring="), "{name}");
    }
}

fn send_at_once(link: &mut dyn Link, flow: FlowId, len: usize, number: u32, name: &str) {
    match link.reserve(flow, len) {
        Ok(packet) => fill(packet, number),
        Err(why) => panic!("{name}: {why}"),
    }
    link.commit();
}

/// Early, where that is cheap, and otherwise by the flush: once, and in order.
#[test]
fn packets_that_are_published_arrive_once() {
    for Trio { name, links: [mut one, mut two, _] } in trios() {
        let flow = one.open(two.local(), 0).unwrap();
        let mut got = Vec::new();
        for number in 0..8 {
            send(&mut *one, flow, 64, number);
            if number % 3 == 1 {
                one.publish();
            }
            if name.starts_with("shm") && number == 1 {
                got = receive(&mut *two, 2);
            }
        }
        one.publish();
        one.publish();
        one.flush().unwrap();
        let missing = 8 - got.len();
        got.extend(receive(&mut *two, missing));
        let wanted: Vec<_> = (0..8).map(|number| expected(one.local(), 64, number)).collect();
        assert_eq!(got, wanted, "{name}");
        assert_eq!(one.counters().sent, 8, "{name}");
    }
}

#[test]
fn an_uncommitted_reservation_is_discarded() {
    for Trio { name, links: [mut one, mut two, _] } in trios() {
        let flow = one.open(two.local(), 0).unwrap();
        fill(one.reserve(flow, 100).unwrap(), 1);
        send(&mut *one, flow, 64, 2);
        one.flush().unwrap();
        assert_eq!(receive(&mut *two, 1), [expected(one.local(), 64, 2)], "{name}");
        assert_eq!(two.receive(&mut |_| ()).unwrap(), 0, "{name}");
    }
}

#[test]
fn the_descriptor_wakes_a_waiting_thread() {
    for Trio { name, links: [mut one, mut two, _] } in trios() {
        let flow = one.open(two.local(), 0).unwrap();
        assert!(!wait(&*two, Duration::from_millis(1)), "{name}: nothing was sent");
        send(&mut *one, flow, 64, 1);
        one.flush().unwrap();
        assert!(wait(&*two, Duration::from_millis(500)), "{name}");
        assert_eq!(receive(&mut *two, 1).len(), 1, "{name}");
        assert!(!wait(&*two, Duration::from_millis(1)), "{name}: everything was received");
        // Packets that arrived before the wait wake it as well.
        send(&mut *one, flow, 64, 2);
        one.flush().unwrap();
        assert!(wait(&*two, Duration::from_millis(500)), "{name}");
    }
}

#[test]
fn corrupted_packets_are_detected_and_counted() {
    for Trio { name, links: [mut one, mut two, _] } in trios() {
        one.force_icrc();
        let flow = one.open(two.local(), 0).unwrap();
        let corruptions = [
            Corruption::FlipBit(100),
            Corruption::Intact,
            Corruption::Truncate(10),
            Corruption::Truncate(40),
            Corruption::FlipBit(799),
        ];
        for (number, corruption) in corruptions.iter().enumerate() {
            fill(one.reserve(flow, 100).unwrap(), number as u32);
            one.commit_corrupted(*corruption);
        }
        one.flush().unwrap();
        assert_eq!(receive(&mut *two, 1), [expected(one.local(), 100, 1)], "{name}");
        let drops = receive_until_dropped(&mut *two, 4);
        let icrc = drops.icrc + drops.unverified;
        assert_eq!((icrc, drops.short), (3, 1), "{name}: {drops:?}");
    }
}

#[test]
fn the_path_reports_what_is_in_use() {
    for Trio { name, links: [one, ..] } in trios() {
        let path = one.path();
        assert_eq!(path.local, one.local(), "{name}");
        let kinds = [(LinkKind::Udp, "udp"), (LinkKind::Shm, "shm"), (LinkKind::Auto, "auto")];
        let kind = kinds.into_iter().find(|(_, word)| name.contains(word));
        let kind = kind.map_or(LinkKind::Loopback, |(kind, _)| kind);
        assert_eq!(path.kind, kind, "{name}");
        if name.contains("gso=off") {
            assert!(path.why.contains("UDP_SEGMENT) off (it was turned off)"), "{path}");
        }
        if name.starts_with("tap") {
            assert!(path.why.contains("captured in nowhere"), "{path}");
        }
    }
}

#[test]
fn a_full_queue_blocks_its_sender_only() {
    let options = LoopbackOptions { queue: 8, ..LoopbackOptions::default() };
    let [mut one, mut two, mut three] = loopbacks(options);
    let (to_two, to_three) =
        (one.open(two.local(), 0).unwrap(), one.open(three.local(), 0).unwrap());
    for number in 0..20 {
        send(&mut *one, to_two, 64, number);
    }
    send(&mut *one, to_three, 64, 99);
    assert_eq!(one.flush().unwrap(), Flushed { sent: 9, waiting: 12 });
    assert_eq!(receive(&mut *three, 1), [expected(one.local(), 64, 99)]);
    let mut got = receive(&mut *two, 8);
    assert_eq!(one.flush().unwrap(), Flushed { sent: 8, waiting: 4 });
    got.extend(receive(&mut *two, 8));
    assert_eq!(one.flush().unwrap(), Flushed { sent: 4, waiting: 0 });
    got.extend(receive(&mut *two, 4));
    let want: Vec<_> = (0..20).map(|number| expected(one.local(), 64, number)).collect();
    assert_eq!(got, want);
    assert_eq!(one.counters().drops.total(), 0);
}

#[test]
fn a_full_queue_drops_packets_with_full_drop() {
    let options =
        LoopbackOptions { queue: 8, full: loopback::Full::Drop, ..LoopbackOptions::default() };
    let [mut one, mut two, _] = loopbacks(options);
    let flow = one.open(two.local(), 0).unwrap();
    for number in 0..20 {
        send(&mut *one, flow, 64, number);
    }
    assert_eq!(one.flush().unwrap(), Flushed { sent: 8, waiting: 0 });
    assert_eq!(one.counters().drops.overrun, 12);
    assert_eq!(receive(&mut *two, 8).len(), 8);
}

#[test]
fn packets_to_an_unused_address_are_counted_as_dropped() {
    let hub = Hub::new();
    let mut one = hub.endpoint("10.0.0.1:1".parse().unwrap()).unwrap();
    let unused = "10.0.0.9:1".parse().unwrap();
    let flow = one.open(unused, 0).unwrap();
    send(&mut one, flow, 64, 1);
    one.flush().unwrap();
    assert_eq!(one.counters().drops.no_peer, 1);
    for _ in 0..2 {
        // In the second round the first endpoint at this address has been dropped.
        let mut endpoint = hub.endpoint(unused).unwrap();
        send(&mut one, flow, 64, 2);
        one.flush().unwrap();
        assert_eq!(receive(&mut endpoint, 1).len(), 1);
    }
    send(&mut one, flow, 64, 3);
    one.flush().unwrap();
    assert_eq!(one.counters().drops.no_peer, 2);
}

#[test]
fn endpoints_work_across_threads() {
    const COUNT: u32 = 20_000;
    let hub = Hub::new();
    let mut sink = hub.endpoint("10.0.0.1:1".parse().unwrap()).unwrap();
    let to = sink.local();
    std::thread::scope(|scope| {
        for host in 2..5 {
            let mut link = hub.endpoint(SocketAddr::from(([10, 0, 0, host], 1))).unwrap();
            scope.spawn(move || {
                let flow = link.open(to, 0).unwrap();
                for number in 0..COUNT {
                    send(&mut link, flow, 64, number);
                }
                while link.flush().unwrap().waiting > 0 {
                    std::thread::yield_now();
                }
            });
        }
        let mut next = [0; 5];
        let mut left = 3 * COUNT;
        while left > 0 {
            let got = sink.receive(&mut |frame| {
                let SocketAddr::V4(from) = frame.from else { panic!() };
                let host = usize::from(from.ip().octets()[3]);
                assert_eq!(frame.bytes[..4], u32::to_be_bytes(next[host]));
                next[host] += 1;
            });
            left -= got.unwrap() as u32;
            if left > 0 {
                wait(&sink, Duration::from_millis(1));
            }
        }
        assert_eq!(next, [0, 0, COUNT, COUNT, COUNT]);
    });
}
