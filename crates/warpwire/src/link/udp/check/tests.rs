//! Tests of the ICRC checker.

use std::time::Duration;

use super::super::held::HOLD_TIME;
use super::*;

/// No packet is delivered.
const NOTHING: [u16; 0] = [];

/// A packet with the ICRC for this identification, and with or without "don't fragment".
fn built(from: SocketAddr, id: u16, dont_fragment: bool, bytes: &[u8]) -> Vec<u8> {
    let mut packet = bytes.to_vec();
    let mut icrc_prefix = IcrcPrefix::new(from, here());
    if !dont_fragment {
        icrc_prefix.toggle_dont_fragment();
    }
    let icrc = icrc_prefix.icrc::<SimdCrc32>(id, &packet).unwrap();
    *packet.last_chunk_mut::<4>().unwrap() = icrc.to_le_bytes();
    packet
}

/// The bytes of a request with this number.
fn request(number: u32, len: usize) -> Vec<u8> {
    let mut packet = vec![0x5a; len];
    packet[..4].copy_from_slice(&[4, 0x40, 0xff, 0xff]);
    packet[8..12].copy_from_slice(&number.to_be_bytes());
    packet
}

fn packet_with_icrc(id: u16, len: usize) -> Vec<u8> {
    built(from(), id, true, &request(u32::from(id), len))
}

fn acknowledgement(from: SocketAddr, id: u16, syndrome: u8) -> Vec<u8> {
    let head = [0x11, 0, 0xff, 0xff, 0, 0, 0, 0x12, 0, 0, 1, 0x23, syndrome, 0, 0, 1];
    built(from, id, true, &[&head[..], &[0; 4]].concat())
}

fn from() -> SocketAddr {
    "192.0.2.1:50000".parse().unwrap()
}

fn here() -> SocketAddr {
    SocketAddr::new(to(), 4791)
}

fn to() -> IpAddr {
    "192.0.2.2".parse().unwrap()
}

/// Checks a packet as the link does. Returns the identifications of the packets that are
/// delivered.
fn delivered(checker: &mut IcrcChecker, from: SocketAddr, packet: &[u8]) -> Vec<u16> {
    match checker.check(from, to(), packet) {
        Verdict::Valid(id) => vec![id],
        Verdict::Confirms(id) => {
            let (_, held) = checker.take_confirmed(from.ip()).unwrap();
            vec![held.identification, id]
        }
        Verdict::Unsettled(solution) => {
            let (traffic_class, hop_limit) = (2, 64);
            let arrival = Arrival { from, to: to(), traffic_class, hop_limit, bytes: packet };
            checker.hold(&arrival, solution);
            vec![]
        }
        Verdict::Invalid => vec![],
    }
}

/// As `delivered`; the identification of this packet, if it is delivered.
fn check(checker: &mut IcrcChecker, from: SocketAddr, packet: &[u8]) -> Option<u16> {
    delivered(checker, from, packet).last().copied()
}

fn checked(ids: &[u16]) -> Vec<Option<u16>> {
    let mut checker = IcrcChecker::new(here());
    ids.iter().map(|id| check(&mut checker, from(), &packet_with_icrc(*id, 100))).collect()
}

#[test]
fn small_identifications_are_found_in_any_order() {
    let mut checker = IcrcChecker::new(here());
    for id in [0, 0, 1, 2, 3, 0, 1, 2, 0, 0, 17, 63, 0] {
        for len in [16, 60, 1064, 4140] {
            assert_eq!(check(&mut checker, from(), &packet_with_icrc(id, len)), Some(id));
        }
    }
}

#[test]
fn a_counting_sender_costs_one_crc_per_packet() {
    let mut checker = IcrcChecker::new(here());
    for id in 0..60 {
        assert_eq!(check(&mut checker, from(), &packet_with_icrc(id, 100)), Some(id));
    }
    let known = sender(&mut checker.senders, 4791, from(), to()).unwrap();
    assert_eq!((known.last, known.step), (59, 1));
}

#[test]
fn a_counter_that_jumps_costs_no_packet() {
    let far = 0x9003 + MAX_STEP;
    let sent = [5, 0x9000, 0x9001, 0x9003, far, 0x1234, 0x1236, 0x1237];
    let mut checker = IcrcChecker::new(here());
    let all = sent.map(|id| delivered(&mut checker, from(), &packet_with_icrc(id, 100)));
    let [jump, again]: [&[u16]; 2] = [&[0x9000, 0x9001], &[0x1234, 0x1236]];
    assert_eq!(all, [&[5], &[][..], jump, &[0x9003], &[far], &[], again, &[0x1237]]);
    // Packets that overtake one another do not move the counter back.
    let overtaken = checked(&[0x9000, 0x9001, 0x9005, 0x9003, 0x9004, 0x9006, 0x9006 - 40]);
    assert_eq!(
        overtaken.iter().map(Option::is_some).collect::<Vec<_>>(),
        [false, true, true, true, true, true, false]
    );
    // Also if the first two do.
    let mut checker = IcrcChecker::new(here());
    let all = [0x9001, 0x9000].map(|id| packet_with_icrc(id, 100));
    let all = all.map(|packet| delivered(&mut checker, from(), &packet));
    assert_eq!(all, [vec![], vec![0x9001, 0x9000]]);
}

#[test]
fn a_counter_that_leaves_the_small_ids_in_small_steps_is_followed() {
    let ids: Vec<u16> = (3..1000).step_by(7).collect();
    let mut checker = IcrcChecker::new(here());
    let packets = ids.iter().map(|id| packet_with_icrc(*id, 100));
    let all: Vec<u16> =
        packets.flat_map(|packet| delivered(&mut checker, from(), &packet)).collect();
    assert_eq!(all, ids);
}

#[test]
fn a_counter_may_advance_while_it_is_idle() {
    let mut checker = IcrcChecker::new(here());
    for id in [700, 701] {
        let _ = check(&mut checker, from(), &packet_with_icrc(id, 100));
    }
    let counter = host(&mut checker.hosts, from().ip()).unwrap();
    let now = counter.at;
    assert!(!counter.may_be_at(701 + MAX_STEP + 400, now));
    assert!(counter.may_be_at(701 + MAX_STEP + 400, now + Duration::from_millis(400)));
    assert!(!counter.may_be_at(701 + MAX_STEP + 400, now + Duration::from_millis(399)));
    let long = now + Duration::from_secs(1000);
    assert!(counter.may_be_at(701 + MAX_STEP + 1024, long));
    assert!(!counter.may_be_at(701 + MAX_STEP + 1025, long));
}

#[test]
fn the_senders_of_a_host_share_its_counter() {
    let mut checker = IcrcChecker::new(here());
    let ports = [50_000, 50_001, 50_002].map(|port| SocketAddr::new(from().ip(), port));
    let mut all = Vec::new();
    for id in 0x7000..0x7100 {
        let port = ports[usize::from(id) % 3];
        let packet = built(port, id, true, &request(u32::from(id), 100));
        all.extend(delivered(&mut checker, port, &packet));
    }
    assert_eq!(all, (0x7000..0x7100).collect::<Vec<u16>>());
}

#[test]
fn random_identifications_need_every_packet_twice() {
    let mut checker = IcrcChecker::new(here());
    assert_eq!(check(&mut checker, from(), &packet_with_icrc(0, 100)), Some(0));
    for (number, ids) in [[0x9000, 0xa123], [0xb456, 0x8200], [0xffff, 0x4444]].iter().enumerate() {
        let sent = ids.map(|id| built(from(), id, true, &request(number as u32, 100)));
        assert_eq!(check(&mut checker, from(), &sent[0]), None);
        // The repeated packet may request an acknowledgement.
        let mut again = request(number as u32, 100);
        again[8] |= 0x80;
        let again = built(from(), ids[1], true, &again);
        assert_eq!(check(&mut checker, from(), &again), Some(ids[1]), "{number}");
    }
}

#[test]
fn the_first_packet_of_a_host_waits_for_another_one() {
    // An ACK, a request, of the same port or another one: any packet of the host will do.
    let other = SocketAddr::new(from().ip(), 50_001);
    let first = packet_with_icrc(0xabcd, 100);
    let numbered = |port, id| built(port, id, true, &request(9, 60));
    for second in [
        (from(), numbered(from(), 0xabce)),
        (other, numbered(other, 0xabcd + MAX_STEP)),
        (other, acknowledgement(other, 0xabd0, 0)),
    ] {
        let mut checker = IcrcChecker::new(here());
        assert_eq!(delivered(&mut checker, from(), &first), NOTHING);
        let both = delivered(&mut checker, second.0, &second.1);
        assert_eq!((both.len(), both[0]), (2, 0xabcd));
        // From now on the counter is known, for both ports.
        let third = packet_with_icrc(both[1] + 1, 60);
        assert_eq!(delivered(&mut checker, from(), &third), [both[1] + 1]);
        assert_eq!(checker.next_expiry(), None);
    }
    // Neither a host's small identification nor another host says anything about it.
    let mut checker = IcrcChecker::new(here());
    assert_eq!(delivered(&mut checker, from(), &first), NOTHING);
    assert_eq!(delivered(&mut checker, other, &numbered(other, 0)), [0]);
    let stranger = "192.0.2.17:50000".parse().unwrap();
    assert_eq!(delivered(&mut checker, stranger, &numbered(stranger, 0xabce)), NOTHING);
    // Another flag, or too far away: not the same counter.
    let fragmented = built(from(), 0xabce, false, &request(9, 60));
    assert_eq!(delivered(&mut checker, from(), &fragmented), NOTHING);
    assert_eq!(delivered(&mut checker, from(), &packet_with_icrc(0x1234, 60)), NOTHING);
}

#[test]
fn a_held_packet_that_is_sent_again_is_delivered_once() {
    let mut checker = IcrcChecker::new(here());
    let sent = [0xabcd, 0x1234, 0x1235].map(|id| built(from(), id, true, &request(7, 100)));
    assert_eq!(delivered(&mut checker, from(), &sent[0]), NOTHING);
    assert_eq!(delivered(&mut checker, from(), &sent[1]), [0x1234]);
    assert_eq!(delivered(&mut checker, from(), &sent[2]), [0x1235]);
    // Also after its time, or after another one took its place.
    let mut checker = IcrcChecker::new(here());
    assert_eq!(delivered(&mut checker, from(), &sent[0]), NOTHING);
    let other = built(from(), 0x5555, true, &request(8, 100));
    assert_eq!(delivered(&mut checker, from(), &other), NOTHING);
    let late = Instant::now() + HOLD_TIME;
    let (_, expired, is_final) = checker.expire(late).unwrap();
    assert_eq!((expired.identification, is_final), (0x5555, false));
    assert!(checker.expire(late).is_none());
    assert_eq!(delivered(&mut checker, from(), &sent[1]), [0x1234]);
    let other = built(from(), 0x7777, true, &request(8, 100));
    assert_eq!(delivered(&mut checker, from(), &other), [0x7777]);
}

#[test]
fn a_datagram_that_nothing_followed_settles_the_next_one() {
    let mut checker = IcrcChecker::new(here());
    assert_eq!(delivered(&mut checker, from(), &packet_with_icrc(0xabcd, 100)), NOTHING);
    assert!(!checker.expire(Instant::now() + HOLD_TIME).unwrap().2);
    assert_eq!(delivered(&mut checker, from(), &packet_with_icrc(0xabd7, 100)), [0xabd7]);
}

/// rxe reports a rejection once. If it were dropped, the requester would wait in vain.
#[test]
fn a_final_nak_that_nothing_contradicts_is_delivered() {
    let checker = |packet: &[u8]| {
        let mut checker = IcrcChecker::new(here());
        assert_eq!(delivered(&mut checker, from(), packet), NOTHING);
        checker
    };
    let late = Instant::now() + HOLD_TIME * 2;
    for (syndrome, wanted) in
        [(0x61, true), (0x62, true), (0x64, true), (0x60, false), (0x65, false), (0x1f, false)]
    {
        let packet = acknowledgement(from(), 0xabcd, syndrome);
        let mut checker = checker(&packet);
        let (held, solution, is_final) = checker.expire(late).unwrap();
        assert_eq!((solution.identification, held.bytes), (0xabcd, &packet[..]));
        assert_eq!(is_final, wanted, "{syndrome:x}");
        assert_eq!(checker.next_expiry(), None);
    }
    // Bytes that such a packet does not have.
    for (at, byte) in [(0, 0x12), (1, 0x20), (2, 0x12), (8, 0x80)] {
        let mut other = acknowledgement(from(), 0xabcd, 0x62);
        other[at] = byte;
        let other = built(from(), 0xabcd, true, &other);
        assert!(!checker(&other).expire(late).unwrap().2, "byte {at}");
    }
    // A packet that is where the counter was expected, or that shows that there is none.
    for before in [0x1000, 0] {
        let mut checker = IcrcChecker::new(here());
        let valid = |id| acknowledgement(from(), id, 0x1f);
        for id in [before, before + before.min(1)] {
            let _ = delivered(&mut checker, from(), &valid(id));
        }
        assert_eq!(
            delivered(&mut checker, from(), &acknowledgement(from(), 0xabcd, 0x62)),
            NOTHING
        );
        let next = before + before.min(1) * 2;
        assert_eq!(delivered(&mut checker, from(), &valid(next)), [next]);
        assert!(!checker.expire(late).unwrap().2, "after {before:x}");
    }
    // An answer with another identification: the held one is not confirmed, and stays behind.
    let mut checker = checker(&acknowledgement(from(), 0xabcd, 0x62));
    let answers = [0x1234, 0x1235].map(|id| acknowledgement(from(), id, 0x1f));
    assert_eq!(delivered(&mut checker, from(), &answers[0]), NOTHING);
    assert_eq!(delivered(&mut checker, from(), &answers[1]), [0x1235]);
    assert!(checker.expire(late).is_none());
}

/// Before anything is known about the host: damaged packets whose ICRC fits some identification are
/// not delivered, and the packets behind them are.
#[test]
fn a_damaged_first_packet_is_not_confirmed_by_the_next_ones() {
    let packet = packet_with_icrc(0xabcd, 64);
    let mut icrc_prefix = IcrcPrefix::new(from(), here());
    let solver = IpIdSolver::new(packet.len());
    let mut random = 88_172_645_463_325_252_u64;
    let mut solved = 0;
    for _ in 0..400_000 {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let mut damaged = packet.clone();
        let at = 12 + (random >> 40) as usize % 40;
        for (byte, change) in damaged[at..at + 8].iter_mut().zip(random.to_le_bytes()) {
            *byte ^= change;
        }
        let computed = icrc_prefix.icrc::<SimdCrc32>(0, &damaged).unwrap();
        if solver.solve(0, carried(&damaged).unwrap() ^ computed).is_none() {
            continue;
        }
        solved += 1;
        let mut checker = IcrcChecker::new(here());
        assert_eq!(delivered(&mut checker, from(), &damaged), NOTHING);
        let next = [0xabce, 0xabcf].map(|id| packet_with_icrc(id, 64));
        let next = next.map(|packet| delivered(&mut checker, from(), &packet));
        assert_eq!(next, [vec![], vec![0xabce, 0xabcf]]);
    }
    assert!(solved > 0, "1 of 32768 has a solution");
}

/// Four bytes of payload that differ, and an ICRC that fits another identification.
#[test]
fn a_damaged_first_packet_as_captured_is_not_delivered() {
    let (from, to) = ("10.77.0.1:56178".parse().unwrap(), "10.77.0.2".parse().unwrap());
    let mut packet = [0x78; 32];
    packet[..12].copy_from_slice(&[4, 0, 0xff, 0xff, 0, 1, 0, 0xa2, 0x80, 0x70, 0, 3]);
    packet[12..16].copy_from_slice(&[0x78, 0x0e, 0x18, 0x5a]);
    packet[28..].copy_from_slice(&[0xba, 0xb0, 0xd8, 0xda]);
    let mut checker = IcrcChecker::new(SocketAddr::new(to, 4791));
    assert!(matches!(checker.check(from, to, &packet), Verdict::Unsettled(_)));
}

#[test]
fn any_damage_to_the_syndrome_alone_is_detected_without_the_identification() {
    let packet = acknowledgement(from(), 0, 0x1f);
    let mut icrc_prefix = IcrcPrefix::new(from(), here());
    let solver = IpIdSolver::new(packet.len());
    for change in 1..=255 {
        let mut damaged = packet.clone();
        damaged[BTH_LEN] ^= change;
        let computed = icrc_prefix.icrc::<SimdCrc32>(0, &damaged).unwrap();
        assert_eq!(solver.solve(0, carried(&damaged).unwrap() ^ computed), None, "{change}");
    }
}

#[test]
fn two_wrong_bits_of_an_acknowledgement_are_detected_without_its_identification() {
    let packet = acknowledgement(from(), 0, 0x62);
    let mut icrc_prefix = IcrcPrefix::new(from(), here());
    // The difference that each bit makes; those of byte 4 are not covered.
    let effects: Vec<u32> = (0..packet.len() * 8)
        .filter(|bit| bit / 8 != 4)
        .map(|bit| {
            let mut flipped = packet.clone();
            flipped[bit / 8] ^= 1 << (bit % 8);
            carried(&flipped).unwrap() ^ icrc_prefix.icrc::<SimdCrc32>(0, &flipped).unwrap()
        })
        .collect();
    let solver = IpIdSolver::new(packet.len());
    for (a, one) in effects.iter().enumerate() {
        assert_eq!(solver.solve(0, *one), None);
        for two in &effects[a + 1..] {
            assert_eq!(solver.solve(0, one ^ two), None);
        }
    }
}

#[test]
fn packets_without_dont_fragment_are_accepted() {
    let mut checker = IcrcChecker::new(here());
    for id in [0, 0, 1, 2, 0] {
        let packet = built(from(), id, false, &request(u32::from(id), 100));
        assert_eq!(check(&mut checker, from(), &packet), Some(id));
    }
    // A sender that changes its mind loses nothing.
    for (number, wanted) in [&[][..], &[0, 0], &[0]].into_iter().enumerate() {
        let packet = built(from(), 0, true, &request(number as u32, 100));
        assert_eq!(delivered(&mut checker, from(), &packet), wanted, "{number}");
    }
    let found: Vec<_> = (0x9000..0x9004)
        .map(|id| built(from(), id, false, &request(u32::from(id), 100)))
        .map(|packet| delivered(&mut checker, from(), &packet).len())
        .collect();
    assert_eq!(found, [0, 2, 1, 1]);
}

#[test]
fn a_packet_as_captured_without_dont_fragment_is_accepted() {
    let (from, to) = ("10.77.0.1:57345".parse().unwrap(), "10.77.0.2".parse().unwrap());
    let packet = [
        0x04, 0x00, 0xff, 0xff, 0x00, 0x01, 0x00, 0x10, 0x80, 0x70, 0x00, 0x00, 0x78, 0x78, 0x78,
        0x78, 0x78, 0x78, 0x78, 0x78, 0x78, 0x78, 0x78, 0x78, 0x78, 0x78, 0x78, 0x78, 0xf6, 0x11,
        0x8b, 0xbd,
    ];
    let mut checker = IcrcChecker::new(SocketAddr::new(to, 4791));
    assert_eq!(checker.check(from, to, &packet), Verdict::Valid(0));
}

/// Payload that was damaged so that the ICRC fits another identification.
#[test]
fn damage_that_fits_another_identification_is_rejected() {
    let mut checker = IcrcChecker::new(here());
    let ids = [0xabcb, 0xabcc, 0xabcd];
    let _ = ids.map(|id| check(&mut checker, from(), &packet_with_icrc(id, 100)));
    let mut packet = packet_with_icrc(0xabce, 100);
    let mut icrc_prefix = IcrcPrefix::new(from(), here());
    // The payload changes at will; its last four bytes restore the ICRC of another one.
    packet[40] ^= 1;
    let wrong = icrc_prefix.icrc::<SimdCrc32>(0x1111, &packet).unwrap();
    packet[96..].copy_from_slice(&wrong.to_le_bytes());
    assert_eq!(check(&mut checker, from(), &packet), None);
    assert_eq!(check(&mut checker, from(), &packet_with_icrc(0xabce, 100)), Some(0xabce));
}

#[test]
fn corruption_is_detected_whatever_the_sender_did_before() {
    let mut checker = IcrcChecker::new(here());
    for id in [0, 0xabcd, 0xabce, 0xabcf, 0xabd0] {
        let _ = check(&mut checker, from(), &packet_with_icrc(id, 200));
    }
    let mut packet = packet_with_icrc(7, 200);
    for bit in 5 * 8..200 * 8 {
        packet[bit / 8] ^= 1 << (bit % 8);
        assert_eq!(check(&mut checker, from(), &packet), None, "bit {bit}");
        packet[bit / 8] ^= 1 << (bit % 8);
    }
    assert_eq!(check(&mut checker, from(), &packet), Some(7));
}

#[test]
fn random_damage_does_not_pass() {
    let mut checker = IcrcChecker::new(here());
    for id in [0x7000, 0x7001] {
        let _ = check(&mut checker, from(), &packet_with_icrc(id, 64));
    }
    let packet = packet_with_icrc(0x7002, 64);
    let mut random = 88_172_645_463_325_252_u64;
    for round in 0..200_000 {
        let mut damaged = packet.clone();
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        let at = 12 + (random >> 40) as usize % 40;
        for (byte, change) in damaged[at..at + 8].iter_mut().zip(random.to_le_bytes()) {
            *byte ^= change;
        }
        assert_eq!(check(&mut checker, from(), &damaged), None, "round {round}");
    }
    assert_eq!(check(&mut checker, from(), &packet), Some(0x7002));
}

#[test]
fn packets_that_are_too_short_are_rejected() {
    let mut checker = IcrcChecker::new(here());
    for len in 0..16 {
        assert_eq!(checker.check(from(), to(), &[0; 16][..len]), Verdict::Invalid);
    }
}
