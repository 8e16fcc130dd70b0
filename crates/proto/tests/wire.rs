//! Packet formats: known vectors, round trips, and malformed bytes.

use std::net::IpAddr;

use proptest::prelude::*;
use warpwire_proto::Psn;
use warpwire_proto::wire::icrc::Portable;
use warpwire_proto::wire::packet::build;
use warpwire_proto::wire::{
    Aeth, AtomicEth, Deth, Extension, Headers, IpRepr, Malformed, MaskedAtomicEth, Nak, Opcode,
    Packet, Reth, Sack, Syndrome, Transport, UDP_PORT, UdpRepr,
};

fn unhex(text: &str) -> Vec<u8> {
    let digits: Vec<u8> = text.bytes().filter(u8::is_ascii_hexdigit).collect();
    let pair = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).unwrap(), 16).unwrap();
    digits.chunks(2).map(pair).collect()
}

fn ip(source: &str, destination: &str) -> IpRepr {
    IpRepr {
        source: source.parse().unwrap(),
        destination: destination.parse().unwrap(),
        traffic_class: 0,
        hop_limit: 64,
        identification: 0,
        payload_len: 0,
    }
}

const UDP: UdpRepr = UdpRepr { source_port: 0xc123, destination_port: UDP_PORT, payload_len: 0 };

fn built(ip: IpRepr, headers: &Headers, payload: &[u8]) -> Vec<u8> {
    let mut buffer = [0; 9000];
    let len = build::<Portable>(&mut buffer, ip, UDP, headers, payload).unwrap();
    buffer[..len].to_vec()
}

/// Building from the parts gives the vector, and parsing the vector gives the parts.
fn check_vector(vector: &str, ip: IpRepr, headers: &Headers, payload: &[u8]) {
    let vector = unhex(vector);
    assert_eq!(built(ip, headers, payload), vector);
    let packet = Packet::new_checked(&vector).unwrap();
    assert_eq!(packet.transport().headers(), *headers);
    assert_eq!(packet.transport().payload(), payload);
    assert!(packet.has_valid_icrc::<Portable>());
}

#[test]
fn known_packets() {
    let there = ip("192.0.2.1", "192.0.2.2");
    let send = Headers {
        ack_request: true,
        ..Headers::new(Opcode::SendOnly, 0x11, Psn::new(0x123), Extension::None)
    };
    check_vector(
        "4500003c 00004000 4011b6ad c0000201 c0000202 c12312b7 00280000 0420ffff 00000011 80000123
         48656c6c 6f2c2052 4f434576 3221 0000 ce211db8",
        there,
        &send,
        b"Hello, ROCEv2!",
    );
    let aeth = Aeth { syndrome: Syndrome::ACK, msn: 1 };
    check_vector(
        "45000030 00004000 4011b6b9 c0000202 c0000201 c12312b7 001c0000 1100ffff 00000012 00000123
         1f000001 5e989fb1",
        ip("192.0.2.2", "192.0.2.1"),
        &Headers::new(Opcode::Acknowledge, 0x12, Psn::new(0x123), Extension::Aeth(aeth)),
        b"",
    );
    let reth = Reth { address: 0x7f00_0000_1000, rkey: 0x1234, len: 8 };
    let write = Headers {
        ack_request: true,
        ..Headers::new(Opcode::WriteOnly, 0x11, Psn::new(0x124), Extension::Reth(reth))
    };
    check_vector(
        "45020044 00004000 4011b6a3 c0000201 c0000202 c12312b7 00300000 0a00ffff 00000011 80000124
         00007f00 00001000 00001234 00000008 01020304 05060708 f881dba9",
        IpRepr { traffic_class: 2, ..there },
        &write,
        &[1, 2, 3, 4, 5, 6, 7, 8],
    );
    let six = ip("2001:db8::1", "2001:db8::2");
    let send = Headers {
        ack_request: true,
        ..Headers::new(Opcode::SendOnly, 0x11, Psn::new(0), Extension::None)
    };
    let packet = built(six, &send, &unhex("deadbeef"));
    assert_eq!(
        packet[40..],
        unhex("c12312b7 001c0000 0400ffff 00000011 80000000 deadbeef 6a9d1d55")
    );
}

#[test]
fn the_icrc_covers_the_identification_but_not_the_hop_limit() {
    let headers = Headers::new(Opcode::SendOnly, 1, Psn::new(1), Extension::None);
    let (here, there) = ("192.0.2.1", "192.0.2.2");
    let crc = |ip| built(ip, &headers, b"same").split_off(20 + 8 + 12 + 4);
    let plain = crc(ip(here, there));
    assert_eq!(plain, crc(IpRepr { hop_limit: 3, traffic_class: 7, ..ip(here, there) }));
    assert_ne!(plain, crc(IpRepr { identification: 1, ..ip(here, there) }));
}

#[test]
fn packets_print_in_one_line() {
    let nak = Aeth { syndrome: Syndrome::Nak(Nak::RemoteAccess), msn: 3 };
    let headers = Headers::new(Opcode::Acknowledge, 0x12, Psn::new(0x99), Extension::Aeth(nak));
    let bytes = built(ip("192.0.2.1", "192.0.2.2"), &headers, b"");
    assert_eq!(
        Packet::new_checked(&bytes).unwrap().to_string(),
        "192.0.2.1 > 192.0.2.2: ACK qp 0x12 psn 0x99 Nak(RemoteAccess) msn 3, 0 bytes"
    );
}

#[test]
fn malformed_packets_are_rejected_with_the_reason() {
    let headers = Headers::new(Opcode::SendOnly, 1, Psn::new(1), Extension::None);
    let good = built(ip("192.0.2.1", "192.0.2.2"), &headers, b"four");
    let corrupt = |at: usize, value: u8| {
        let mut bytes = good.clone();
        bytes[at] = value;
        Packet::new_checked(&bytes).map(|_| ()).unwrap_err()
    };
    assert_eq!(corrupt(0, 0x46), Malformed::Ip); // options
    assert_eq!(corrupt(6, 0x20), Malformed::Ip); // a fragment
    assert_eq!(corrupt(9, 6), Malformed::Ip); // TCP
    assert_eq!(corrupt(25, 0xff), Malformed::Udp);
    assert_eq!(corrupt(28, 0x42), Malformed::Opcode);
    assert_eq!(corrupt(29, 0x01), Malformed::Version);
    assert_eq!(corrupt(28, 0x13), Malformed::Short); // too short for an atomic's headers
    let mut flipped = good.clone();
    flipped[42] ^= 1;
    assert!(!Packet::new_checked(&flipped).unwrap().has_valid_icrc::<Portable>());
    let mut headers = headers;
    assert_eq!(headers.emit(&mut [0; 19], 4), None, "too short a buffer");
    headers.extension = Extension::Imm(1);
    assert_eq!(headers.emit(&mut [0; 64], 4), None, "an extension of another opcode");
}

#[test]
fn addresses_of_two_versions_use_ipv6() {
    let headers = Headers::new(Opcode::SendOnly, 1, Psn::new(1), Extension::None);
    for (from, to) in [("192.0.2.1", "2001:db8::2"), ("2001:db8::2", "192.0.2.1")] {
        let bytes = built(ip(from, to), &headers, b"four");
        let packet = Packet::new_checked(&bytes).unwrap();
        assert_eq!(packet.ip().header_len(), 40);
        assert_eq!(packet.transport().payload(), b"four");
        assert!(packet.has_valid_icrc::<Portable>());
    }
}

#[test]
fn lengths_that_do_not_fit_a_header_are_rejected() {
    let headers = Headers::new(Opcode::SendOnly, 1, Psn::new(1), Extension::None);
    let build_len = |ip: IpRepr, len: usize| {
        let mut buffer = vec![0; 70_000];
        build::<Portable>(&mut buffer, ip, UDP, &headers, &vec![7; len])
    };
    // 65535 minus the headers, rounded down to a multiple of 4; only IPv4 counts its own header.
    let (four, six) = (65_488, 65_508);
    assert_eq!(build_len(ip("192.0.2.1", "192.0.2.2"), four), Some(four + 20 + 8 + 12 + 4));
    assert_eq!(build_len(ip("192.0.2.1", "192.0.2.2"), four + 1), None);
    assert_eq!(build_len(ip("::1", "::2"), six), Some(six + 40 + 8 + 12 + 4));
    assert_eq!(build_len(ip("::1", "::2"), six + 1), None);
    for payload in usize::MAX - 20..=usize::MAX {
        assert_eq!(headers.emit(&mut [0; 64], payload), None);
        assert!(headers.wire_len(payload) > isize::MAX as usize);
    }
}

fn address(v6: bool, seed: u128) -> IpAddr {
    if v6 { IpAddr::V6(seed.into()) } else { IpAddr::V4((seed as u32).into()) }
}

fn extension(opcode: Opcode, a: u64, b: u64, c: u32) -> Extension {
    let reth = Reth { address: a, rkey: c, len: b as u32 };
    let aeth = Aeth { syndrome: Syndrome::from_byte(a as u8), msn: c & 0xff_ffff };
    let deth = Deth { qkey: c, source_qp: a as u32 & 0xff_ffff };
    match opcode {
        Opcode::SendLastImm
        | Opcode::SendOnlyImm
        | Opcode::WriteLastImm
        | Opcode::UcSendLastImm
        | Opcode::UcSendOnlyImm
        | Opcode::UcWriteLastImm => Extension::Imm(c),
        Opcode::WriteFirst
        | Opcode::WriteOnly
        | Opcode::ReadRequest
        | Opcode::UcWriteFirst
        | Opcode::UcWriteOnly => Extension::Reth(reth),
        Opcode::WriteOnlyImm | Opcode::UcWriteOnlyImm => Extension::RethImm(reth, c),
        Opcode::ReadResponseFirst
        | Opcode::ReadResponseLast
        | Opcode::ReadResponseOnly
        | Opcode::Acknowledge => Extension::Aeth(aeth),
        Opcode::AtomicAcknowledge => Extension::AethAtomic(aeth, b),
        Opcode::CompareSwap
        | Opcode::FetchAdd
        | Opcode::MaskedFetchAdd
        | Opcode::MaskedFetchAdd4 => {
            Extension::Atomic(AtomicEth { address: a, rkey: c, swap_or_add: b, compare: !b })
        }
        Opcode::SendLastInvalidate | Opcode::SendOnlyInvalidate => Extension::Invalidate(c),
        Opcode::UdSendOnly => Extension::Deth(deth),
        Opcode::UdSendOnlyImm => Extension::DethImm(deth, c),
        Opcode::CongestionNotification => Extension::Cnp,
        Opcode::MaskedCompareSwap | Opcode::MaskedCompareSwap4 => {
            let (address, rkey, swap, compare) = (a, c, b, a ^ b);
            let (swap_mask, compare_mask) = (!a, !b);
            Extension::MaskedAtomic(MaskedAtomicEth {
                address,
                rkey,
                swap,
                compare,
                swap_mask,
                compare_mask,
            })
        }
        _ => Extension::None,
    }
}

/// A selective acknowledgement is an ACK to those that do not know it: BTH, AETH, data, ICRC.
#[test]
fn only_sequence_naks_of_one_length_are_selective() {
    let nak = Aeth { syndrome: Syndrome::Nak(Nak::Sequence), msn: 7 };
    let mut sack = Sack::default();
    sack.insert(2);
    let selective = Extension::AethSack(nak, sack);
    let headers = Headers::new(Opcode::Acknowledge, 1, Psn::new(9), selective);
    let mut bytes = [0; 12 + 4 + Sack::LEN + 4];
    assert_eq!((headers.wire_len(0), headers.emit(&mut bytes, 0)), (52, Some(48)));
    assert_eq!((bytes[12], bytes[16]), (0x60, 2));
    let parsed = Transport::new_checked(&bytes).unwrap();
    assert_eq!((parsed.headers(), parsed.payload().len()), (headers, 0));
    assert!(headers.to_string().ends_with("1 arrived behind it"), "{headers}");
    // Padding that this length does not need is no data; without it, it is the same packet.
    let mut padded = [&bytes[..], &[0]].concat();
    padded[1] |= 0x10;
    let parsed = Transport::new_checked(&padded).unwrap();
    assert_eq!((parsed.headers(), parsed.payload().len()), (headers, 0));
    // A byte less or more, another syndrome, padding: data behind an AETH, as on any other ACK.
    let aeth = |bytes: &[u8]| {
        let parsed = Transport::new_checked(bytes).unwrap();
        (matches!(parsed.headers().extension, Extension::Aeth(_)), parsed.payload().len())
    };
    assert_eq!(aeth(&bytes[..48]), (true, 28));
    assert_eq!(aeth(&[&bytes[..], &[0; 4]].concat()), (true, 36));
    for (at, byte, len) in [(12, 0x1f, 32), (12, 0x61, 32), (1, 0x10, 31), (0, 0x10, 32)] {
        let mut other = bytes;
        other[at] = byte;
        assert_eq!(aeth(&other), (true, len), "{at} {byte:#x}");
    }
    let on_data = Headers::new(Opcode::ReadResponseOnly, 1, Psn::new(9), selective);
    assert_eq!(on_data.emit(&mut [0; 64], 0), None);
}

proptest! {
    #[test]
    fn every_packet_round_trips(
        opcode in prop::sample::select(Opcode::all().collect::<Vec<_>>()),
        (a, b, c, flags) in any::<(u64, u64, u32, u8)>(),
        (v6, from, to, class, id) in any::<(bool, u128, u128, u8, u16)>(),
        payload in prop::collection::vec(any::<u8>(), 0..4097),
    ) {
        let mut extension = extension(opcode, a, b, c);
        let mut payload = payload;
        if let Extension::Aeth(aeth) = extension && opcode == Opcode::Acknowledge && flags > 127 {
            let aeth = Aeth { syndrome: Syndrome::Nak(Nak::Sequence), ..aeth };
            extension = Extension::AethSack(aeth, Sack([a as u8; Sack::LEN]));
            payload.clear();
        } else if opcode == Opcode::Acknowledge && payload.len() == Sack::LEN {
            payload.clear(); // that is what a selective acknowledgement looks like
        }
        let headers = Headers {
            solicited: flags & 1 != 0,
            migrated: flags & 2 != 0,
            partition: c as u16,
            fecn: flags & 4 != 0,
            becn: flags & 8 != 0,
            ack_request: flags & 16 != 0,
            ..Headers::new(opcode, c & 0xff_ffff, Psn::new(b as u32), extension)
        };
        let ip = IpRepr {
            source: address(v6, from),
            destination: address(v6, to),
            traffic_class: class,
            hop_limit: 9,
            identification: if v6 { 0 } else { id },
            payload_len: 0,
        };
        let mut bytes = built(ip, &headers, &payload);
        bytes.extend_from_slice(&[0; 7]); // Ethernet padding
        let packet = Packet::new_checked(&bytes).unwrap();
        prop_assert_eq!(packet.transport().headers(), headers);
        prop_assert_eq!(packet.transport().payload(), &payload[..]);
        prop_assert_eq!(packet.ip().source, ip.source);
        prop_assert_eq!(packet.ip().traffic_class, class);
        prop_assert!(packet.has_valid_icrc::<Portable>());
    }

    #[test]
    fn arbitrary_bytes_do_not_panic(
        bytes in prop::collection::vec(any::<u8>(), 0..200),
        first in 0_u8..3,
    ) {
        let mut bytes = bytes;
        if let Some(byte) = bytes.first_mut() && first > 0 {
            *byte = if first == 1 { 0x45 } else { 0x60 };
        }
        if let Ok(packet) = Packet::new_checked(&bytes) {
            let _ = (packet.to_string(), packet.has_valid_icrc::<Portable>());
        }
        if let Ok(transport) = Transport::new_checked(&bytes) {
            let _ = (transport.headers().to_string(), transport.payload(), transport.icrc());
        }
    }
}
