//! Writes one packet of every kind, over IPv4 and IPv6, into a pcap file for Wireshark.
//!
//! ```text
//! cargo run -p warpwire-proto --example 01_capture -- /tmp/all.pcap && tshark -r /tmp/all.pcap
//! ```

use std::fs::File;
use std::io::{BufWriter, Result, Write};
use std::net::IpAddr;
use std::time::Duration;

use warpwire_proto::wire::icrc::Portable;
use warpwire_proto::wire::packet::build;
use warpwire_proto::wire::{
    Aeth, AtomicEth, Deth, Extension, Headers, IpRepr, Nak, Opcode, Reth, Sack, Syndrome, UDP_PORT,
    UdpRepr, pcap,
};
use warpwire_proto::{Instant, Psn};

fn main() -> Result<()> {
    let Some(path) = std::env::args().nth(1) else {
        eprintln!("usage: 01_capture FILE");
        std::process::exit(2);
    };
    let mut file = BufWriter::new(File::create(path)?);
    file.write_all(&pcap::file_header())?;
    let addresses = [["192.0.2.1", "192.0.2.2"], ["2001:db8::1", "2001:db8::2"]];
    let (mut now, mut psn) = (Instant::from_nanos(1_000_000_000), Psn::new(0xff_fff0));
    for [source, destination] in addresses.map(|pair| pair.map(str::parse::<IpAddr>)) {
        let (Ok(source), Ok(destination)) = (source, destination) else { continue };
        for (opcode, extension, payload) in samples() {
            let ip = IpRepr {
                source,
                destination,
                traffic_class: 2,
                hop_limit: 64,
                identification: 0,
                payload_len: 0,
            };
            let udp = UdpRepr { source_port: 0xc001, destination_port: UDP_PORT, payload_len: 0 };
            let headers =
                Headers { ack_request: true, ..Headers::new(opcode, 0x11, psn, extension) };
            let mut buffer = [0; 5000];
            let len = build::<Portable>(&mut buffer, ip, udp, &headers, &payload).unwrap_or(0);
            file.write_all(&pcap::record_header(now, len))?;
            file.write_all(&buffer[..len])?;
            now = now + Duration::from_micros(10);
            psn = psn.next();
        }
    }
    file.flush()
}

/// Every opcode with its headers, and payloads with every pad length.
fn samples() -> Vec<(Opcode, Extension, Vec<u8>)> {
    let reth = Reth { address: 0x7f00_0000_1000, rkey: 0x1234, len: 4096 };
    let ack = |syndrome| Aeth { syndrome, msn: 5 };
    let sack = Sack([0x5a; Sack::LEN]);
    let deth = Deth { qkey: 0x8001_0000, source_qp: 0x77 };
    let atomic = AtomicEth { address: 0x7f00_0000_2000, rkey: 9, swap_or_add: 3, compare: 4 };
    // Long enough for the heuristics that dissectors apply to payloads of sends.
    let bytes = |len: u8| (0..len).map(|at| at ^ 0xa5).collect::<Vec<u8>>();
    vec![
        (Opcode::SendFirst, Extension::None, bytes(128)),
        (Opcode::SendMiddle, Extension::None, bytes(128)),
        (Opcode::SendLast, Extension::None, bytes(41)),
        (Opcode::SendLastImm, Extension::Imm(0xdead_beef), bytes(42)),
        (Opcode::SendOnly, Extension::None, bytes(43)),
        (Opcode::SendOnlyImm, Extension::Imm(1), bytes(0)),
        (Opcode::SendLastInvalidate, Extension::Invalidate(0x55), bytes(44)),
        (Opcode::SendOnlyInvalidate, Extension::Invalidate(0x66), bytes(45)),
        (Opcode::WriteFirst, Extension::Reth(reth), bytes(128)),
        (Opcode::WriteMiddle, Extension::None, bytes(128)),
        (Opcode::WriteLast, Extension::None, bytes(46)),
        (Opcode::WriteLastImm, Extension::Imm(2), bytes(47)),
        (Opcode::WriteOnly, Extension::Reth(reth), bytes(48)),
        (Opcode::WriteOnlyImm, Extension::RethImm(reth, 3), bytes(49)),
        (Opcode::ReadRequest, Extension::Reth(reth), bytes(0)),
        (Opcode::ReadResponseFirst, Extension::Aeth(ack(Syndrome::ACK)), bytes(128)),
        (Opcode::ReadResponseMiddle, Extension::None, bytes(128)),
        (Opcode::ReadResponseLast, Extension::Aeth(ack(Syndrome::ACK)), bytes(50)),
        (Opcode::ReadResponseOnly, Extension::Aeth(ack(Syndrome::ACK)), bytes(51)),
        (Opcode::Acknowledge, Extension::Aeth(ack(Syndrome::ACK)), bytes(0)),
        (Opcode::Acknowledge, Extension::Aeth(ack(Syndrome::RnrNak(12))), bytes(0)),
        (Opcode::Acknowledge, Extension::Aeth(ack(Syndrome::Nak(Nak::Sequence))), bytes(0)),
        (
            Opcode::Acknowledge,
            Extension::AethSack(ack(Syndrome::Nak(Nak::Sequence)), sack),
            bytes(0),
        ),
        (Opcode::AtomicAcknowledge, Extension::AethAtomic(ack(Syndrome::ACK), 99), bytes(0)),
        (Opcode::CompareSwap, Extension::Atomic(atomic), bytes(0)),
        (Opcode::FetchAdd, Extension::Atomic(atomic), bytes(0)),
        (Opcode::UcSendFirst, Extension::None, bytes(128)),
        (Opcode::UcSendMiddle, Extension::None, bytes(128)),
        (Opcode::UcSendLast, Extension::None, bytes(54)),
        (Opcode::UcSendLastImm, Extension::Imm(5), bytes(55)),
        (Opcode::UcSendOnly, Extension::None, bytes(56)),
        (Opcode::UcSendOnlyImm, Extension::Imm(6), bytes(57)),
        (Opcode::UcWriteFirst, Extension::Reth(reth), bytes(128)),
        (Opcode::UcWriteMiddle, Extension::None, bytes(128)),
        (Opcode::UcWriteLast, Extension::None, bytes(58)),
        (Opcode::UcWriteLastImm, Extension::Imm(7), bytes(59)),
        (Opcode::UcWriteOnly, Extension::Reth(reth), bytes(60)),
        (Opcode::UcWriteOnlyImm, Extension::RethImm(reth, 8), bytes(61)),
        (Opcode::UdSendOnly, Extension::Deth(deth), bytes(52)),
        (Opcode::UdSendOnlyImm, Extension::DethImm(deth, 4), bytes(53)),
        (Opcode::CongestionNotification, Extension::Cnp, bytes(0)),
    ]
}
