//! Runs one operation many times, so that `tools/instructions` can count its instructions.
//!
//! ```text
//! 90_count                    lists the names
//! 90_count "encode headers" 1000
//! ```

use std::hint::black_box;
use std::process::ExitCode;

#[path = "../benches/pump/mod.rs"]
mod pump;

use pump::{Pump, WORK, len_of};
use warpwire_proto::Psn;
use warpwire_proto::wire::{Aeth, Extension, Headers, Opcode, Reth, Syndrome, Transport};

/// Name, and function that runs it `count` times. The cost is the difference between two counts, so
/// that setup before the loop does not matter. Every pass handles one packet.
type Row = (&'static str, fn(usize));

const ROWS: &[Row] = &[
    ("encode headers", encode_headers),
    ("decode headers", decode_headers),
    ("send, one packet", |count| pump(0, count)),
    ("write, one packet", |count| pump(1, count)),
    ("write, packet of 64", |count| pump(2, count)),
    ("read, packet of 64", |count| pump(3, count)),
    ("fetch-add", |count| pump(4, count)),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments.is_empty() {
        ROWS.iter().for_each(|(name, _)| println!("{name}"));
        return ExitCode::SUCCESS;
    }
    let row = ROWS.iter().find(|(name, _)| arguments[0] == *name);
    let (Some((_, run)), Some(Ok(count))) = (row, arguments.get(1).map(|count| count.parse()))
    else {
        eprintln!("usage: 90_count [NAME COUNT]");
        return ExitCode::from(2);
    };
    run(count);
    ExitCode::SUCCESS
}

/// The packets of a large write and its ACK, with 1024 bytes of payload or none.
fn transfer() -> [(Headers, usize); 4] {
    let reth = Reth { address: 0x7f00_0000_1000, rkey: 0x1234, len: 3072 };
    let aeth = Aeth { syndrome: Syndrome::ACK, msn: 5 };
    let packet = |opcode, extension| Headers::new(opcode, 0x11, Psn::new(0x123), extension);
    [
        (packet(Opcode::WriteFirst, Extension::Reth(reth)), 1024),
        (packet(Opcode::WriteMiddle, Extension::None), 1024),
        (packet(Opcode::WriteLast, Extension::None), 1024),
        (packet(Opcode::Acknowledge, Extension::Aeth(aeth)), 0),
    ]
}

fn encode_headers(count: usize) {
    let transfer = transfer();
    let mut buffer = [0; 2048];
    for (headers, payload) in transfer.iter().cycle().take(count) {
        let offset = black_box(headers).emit(black_box(&mut buffer), black_box(*payload));
        black_box(offset);
    }
}

fn decode_headers(count: usize) {
    let packets = transfer().map(|(headers, payload)| {
        let mut bytes = vec![0; headers.wire_len(payload)];
        assert_eq!(headers.emit(&mut bytes, payload), Some(headers.len()));
        bytes
    });
    for bytes in packets.iter().cycle().take(count) {
        if let Ok(view) = Transport::new_checked(black_box(bytes)) {
            // By reference, to avoid measuring a copy.
            black_box(&view.headers());
            black_box(&view.payload_range());
        }
    }
}

/// Both ends of a connection: posting, sending, receiving, acknowledging, completing; everything
/// except payload bytes.
fn pump(row: usize, count: usize) {
    let (_, op, packets) = WORK[row];
    let (forward, reverse) = Pump::new(1024, 64).run(op, len_of(op, packets, 1024), count as u64);
    black_box((forward, reverse));
}
