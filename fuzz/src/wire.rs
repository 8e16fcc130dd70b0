//! Fuzzes packet parsing with arbitrary bytes, and encoding with arbitrary headers.

use std::net::IpAddr;

use arbitrary::{Result, Unstructured};
use warpwire_proto::wire::icrc::Portable;
use warpwire_proto::wire::packet::{MAX_HEADERS_LEN, build};
use warpwire_proto::wire::{
    Aeth, AtomicEth, Deth, Extension, Headers, IpRepr, MaskedAtomicEth, Opcode, Packet, Reth,
    Syndrome, Transport, UDP_PORT, UdpRepr, pcap,
};
use warpwire_proto::{Instant, Psn};

/// Runs one input.
pub fn run(bytes: &[u8]) {
    if let Ok(transport) = Transport::new_checked(bytes) {
        check_round_trip(&transport);
    }
    if let Ok(packet) = Packet::new_checked(bytes) {
        check_round_trip(&packet.transport());
        check_rebuild(&packet);
    }
    // Too few bytes for headers are no failure.
    let _ = any_headers(bytes);
}

/// Parsed headers, encoded again, parse to the same.
fn check_round_trip(transport: &Transport<'_>) {
    let (headers, payload) = (transport.headers(), transport.payload());
    assert_eq!(headers.opcode, transport.opcode());
    assert_eq!(headers.psn, transport.psn());
    assert_eq!(headers.destination_qp, transport.destination_qp());
    let _ = (headers.to_string(), transport.icrc());
    let mut buffer = vec![0xee; headers.wire_len(payload.len())];
    let at = headers.emit(&mut buffer, payload.len()).expect("encodable headers");
    buffer[at..at + payload.len()].copy_from_slice(payload);
    let again = Transport::new_checked(&buffer).expect("a parsable packet");
    assert_eq!(again.headers(), headers);
    assert_eq!(again.payload(), payload);
}

/// A packet rebuilt from parsed parts parses to the same parts and has a valid ICRC; with a bit
/// flipped, it has not.
fn check_rebuild(packet: &Packet<'_>) {
    let (ip, udp, transport) = (packet.ip(), packet.udp(), packet.transport());
    let (headers, payload) = (transport.headers(), transport.payload());
    let _ = (packet.to_string(), packet.has_valid_icrc::<Portable>());
    let mut buffer = vec![0; 40 + 8 + headers.wire_len(payload.len())];
    // The encoded pad may be longer than the parsed one, and the packet then too long.
    let Some(len) = build::<Portable>(&mut buffer, ip, udp, &headers, payload) else { return };
    let again = Packet::new_checked(&buffer[..len]).expect("a parsable packet");
    assert_eq!(again.transport().headers(), headers);
    assert_eq!(again.transport().payload(), payload);
    assert_eq!((again.ip().source, again.ip().destination), (ip.source, ip.destination));
    assert_eq!(again.udp().source_port, udp.source_port);
    assert!(again.has_valid_icrc::<Portable>());
    buffer[len - 5] ^= 1; // in the payload, the pad or the last header
    if let Ok(corrupted) = Packet::new_checked(&buffer[..len]) {
        assert!(!corrupted.has_valid_icrc::<Portable>());
    }
}

/// Builds headers field by field from `bytes`.
fn any_headers(bytes: &[u8]) -> Result<()> {
    let mut any = Unstructured::new(bytes);
    let opcode = Opcode::from_byte(any.arbitrary()?);
    let psn = Psn::new(any.arbitrary()?);
    let mut headers = Headers {
        solicited: any.arbitrary()?,
        migrated: any.arbitrary()?,
        partition: any.arbitrary()?,
        fecn: any.arbitrary()?,
        becn: any.arbitrary()?,
        ack_request: any.arbitrary()?,
        ..Headers::new(opcode, any.arbitrary::<u32>()? & 0xff_ffff, psn, Extension::None)
    };
    let (ip, udp) = any_addresses(&mut any)?;
    let (payload, buffer_len) = (any.arbitrary::<usize>()?, any.int_in_range(0..=600)?);
    let _ = pcap::record_header(Instant::from_nanos(any.arbitrary()?), payload);
    let extensions = any_extensions(&mut any)?;
    let mut taken = 0;
    for extension in extensions {
        headers.extension = extension;
        let mut buffer = [0xee; 600];
        if headers.emit(&mut buffer[..buffer_len], payload).is_some() {
            assert!(headers.wire_len(payload) <= buffer_len);
        }
        // What follows the AETH of an acknowledgement is its bitmap, not a payload.
        let some = if opcode == Opcode::Acknowledge { 0 } else { payload % 56 };
        let mut buffer = [0xee; MAX_HEADERS_LEN + 64];
        if headers.emit(&mut buffer, some).is_some() {
            taken += 1;
            let view = Transport::new_checked(&buffer[..headers.wire_len(some)]);
            assert_eq!(view.expect("a parsable packet").headers(), headers);
            check_whole_packet(ip, udp, &headers, &buffer[..some]);
        }
    }
    // A known opcode accepts exactly one extension.
    assert_eq!(taken, usize::from(!matches!(opcode, Opcode::Unknown(_))));
    Ok(())
}

/// A packet built from these parts parses to the same parts.
fn check_whole_packet(ip: IpRepr, udp: UdpRepr, headers: &Headers, payload: &[u8]) {
    let mut buffer = [0; 256];
    let len = build::<Portable>(&mut buffer, ip, udp, headers, payload)
        .expect("a packet that fits the buffer");
    let packet = Packet::new_checked(&buffer[..len]).expect("a parsable packet");
    assert_eq!(packet.transport().headers(), *headers);
    assert_eq!(packet.transport().payload(), payload);
    assert!(packet.has_valid_icrc::<Portable>());
}

/// Addresses of either IP version, also mixed.
fn any_addresses(any: &mut Unstructured<'_>) -> Result<(IpRepr, UdpRepr)> {
    let mut address = || -> Result<IpAddr> {
        let v6: bool = any.arbitrary()?;
        Ok(if v6 {
            IpAddr::V6(any.arbitrary::<u128>()?.into())
        } else {
            IpAddr::V4(any.arbitrary::<u32>()?.into())
        })
    };
    let (source, destination) = (address()?, address()?);
    let ip = IpRepr {
        source,
        destination,
        traffic_class: any.arbitrary()?,
        hop_limit: any.arbitrary()?,
        identification: any.arbitrary()?,
        payload_len: any.arbitrary()?,
    };
    let source_port = any.arbitrary()?;
    Ok((ip, UdpRepr { source_port, destination_port: UDP_PORT, payload_len: 0 }))
}

/// One extension of each kind, with values that the wire format can hold.
fn any_extensions(any: &mut Unstructured<'_>) -> Result<[Extension; 12]> {
    let reth = Reth { address: any.arbitrary()?, rkey: any.arbitrary()?, len: any.arbitrary()? };
    let syndrome = Syndrome::from_byte(any.arbitrary()?);
    let aeth = Aeth { syndrome, msn: any.arbitrary::<u32>()? & 0xff_ffff };
    let source_qp = any.arbitrary::<u32>()? & 0xff_ffff;
    let deth = Deth { qkey: any.arbitrary()?, source_qp };
    let (imm, before) = (any.arbitrary()?, any.arbitrary()?);
    let atomic = AtomicEth {
        address: any.arbitrary()?,
        rkey: any.arbitrary()?,
        swap_or_add: any.arbitrary()?,
        compare: any.arbitrary()?,
    };
    let masked = MaskedAtomicEth {
        address: any.arbitrary()?,
        rkey: any.arbitrary()?,
        swap: any.arbitrary()?,
        compare: any.arbitrary()?,
        swap_mask: any.arbitrary()?,
        compare_mask: any.arbitrary()?,
    };
    Ok([
        Extension::None,
        Extension::Imm(imm),
        Extension::Reth(reth),
        Extension::RethImm(reth, imm),
        Extension::Aeth(aeth),
        Extension::AethAtomic(aeth, before),
        Extension::Atomic(atomic),
        Extension::MaskedAtomic(masked),
        Extension::Invalidate(imm),
        Extension::Deth(deth),
        Extension::DethImm(deth, imm),
        Extension::Cnp,
    ])
}
