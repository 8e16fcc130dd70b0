//! Packets per second on one core: encoding and decoding of headers and ICRC, and the CRC alone.
//!
//! ```text
//! cargo bench -p warpwire-proto
//! ```

use std::net::{IpAddr, Ipv4Addr};

use divan::counter::{BytesCount, ItemsCount};
use divan::{Bencher, black_box};
use warpwire_proto::Psn;
use warpwire_proto::wire::icrc::{self, Crc32, Portable};
use warpwire_proto::wire::packet::{ICRC_LEN, build};
use warpwire_proto::wire::{Extension, Headers, IpRepr, Opcode, Packet, Reth, UDP_PORT, UdpRepr};

/// CRC with the processor's carry-less multiplication, if it has one.
struct SimdCrc32;

impl Crc32 for SimdCrc32 {
    fn update(state: u32, bytes: &[u8]) -> u32 {
        let mut hasher = crc32fast::Hasher::new_with_initial(state);
        hasher.update(bytes);
        hasher.finalize()
    }
}

const PAYLOADS: [usize; 4] = [0, 256, 1024, 4096];
const START: usize = 20 + 8;
const UDP: UdpRepr = UdpRepr { source_port: 0xc123, destination_port: UDP_PORT, payload_len: 0 };

fn main() {
    let data = packet(1001);
    assert_eq!(SimdCrc32::update(1, &data), Portable::update(1, &data));
    divan::main();
}

fn headers() -> Headers {
    let reth = Reth { address: 0x7f00_0000_1000, rkey: 0x1234, len: 4096 };
    Headers::new(Opcode::WriteOnly, 0x11, Psn::new(0x123), Extension::Reth(reth))
}

fn ip() -> IpRepr {
    IpRepr {
        source: IpAddr::V4(Ipv4Addr::new(192, 0, 2, 1)),
        destination: IpAddr::V4(Ipv4Addr::new(192, 0, 2, 2)),
        traffic_class: 2,
        hop_limit: 64,
        identification: 0,
        payload_len: 0,
    }
}

fn packet(payload: usize) -> Vec<u8> {
    let mut bytes = vec![0; 5000];
    let len = build::<Portable>(&mut bytes, ip(), UDP, &headers(), &vec![0x5a; payload]);
    bytes.truncate(len.unwrap_or(0));
    bytes
}

/// Writes all headers and the ICRC around a payload that is already in the buffer.
#[divan::bench(types = [Portable, SimdCrc32], args = PAYLOADS)]
fn encode<C: Crc32>(bencher: Bencher, payload: usize) {
    let (headers, mut ip, mut udp) = (headers(), ip(), UDP);
    let mut bytes = packet(payload);
    let end = bytes.len() - ICRC_LEN;
    udp.payload_len = headers.wire_len(payload) as u16;
    ip.payload_len = udp.payload_len + 8;
    bencher.counter(ItemsCount::new(1_usize)).bench_local(|| {
        let bytes = black_box(&mut bytes);
        black_box(&ip).emit(bytes);
        black_box(&udp).emit(&mut bytes[START - 8..]);
        black_box(&headers).emit(&mut bytes[START..], payload);
        let crc = icrc::begin::<C>(&bytes[..end], START - 8);
        bytes[end..].copy_from_slice(&crc.to_le_bytes());
    });
}

/// Checks a packet including its ICRC, and parses its headers.
#[divan::bench(types = [Portable, SimdCrc32], args = PAYLOADS)]
fn decode<C: Crc32>(bencher: Bencher, payload: usize) {
    let bytes = packet(payload);
    bencher.counter(ItemsCount::new(1_usize)).bench_local(|| {
        let packet = Packet::new_checked(black_box(&bytes)).ok()?;
        packet.has_valid_icrc::<C>().then(|| packet.transport().headers())
    });
}

/// The CRC alone.
#[divan::bench(types = [Portable, SimdCrc32], args = [64, 1024, 4096, 65_536])]
fn crc<C: Crc32>(bencher: Bencher, len: usize) {
    let bytes = vec![0x5a; len];
    bencher
        .counter(BytesCount::new(len))
        .bench_local(|| C::update(black_box(1), black_box(&bytes)));
}
