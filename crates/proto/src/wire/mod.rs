//! RoCEv2 packets as bytes: checked views, and parsed representations.
//!
//! ```text
//! IPv4 20 or IPv6 40 | UDP 8 | BTH 12 | extension headers | payload | pad 0..3 | ICRC 4
//! ```
//!
//! A [`Packet`] is a checked view of such bytes: nothing in this module panics, whatever they
//! contain. [`Headers`] is the parsed form of the transport headers, for matching and for building.
//! Payload is never copied here: a view returns its range, and a builder leaves its space free,
//! because the payload may be in GPU memory.
//!
//! | module | contents |
//! |---|---|
//! | [`opcode`] | opcodes, and which headers follow them |
//! | [`ext`] | extension headers, AETH syndromes, RNR timers |
//! | [`ip`] | IPv4, IPv6 and UDP, as far as RoCEv2 needs them |
//! | [`icrc`] | the invariant CRC |
//! | [`packet`] | the views, and building packets |
//! | [`pcap`] | capture files for Wireshark |

pub mod ext;
pub mod icrc;
pub mod ip;
pub mod opcode;
pub mod packet;
pub mod pcap;
mod print;

pub use ext::{Aeth, AtomicEth, Deth, MaskedAtomicEth, Nak, Reth, Sack, Syndrome};
pub use ip::{IpRepr, UDP_PORT, UdpRepr};
pub use opcode::{Opcode, Position};
pub use packet::{Extension, Headers, Malformed, Packet, Transport};

/// Reads the `N` bytes at `at`; zeroes if out of range. Views check their length first, so that the
/// zeroes are never used.
#[inline]
fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let found = bytes.get(at..at + N).and_then(|chunk| chunk.try_into().ok());
    found.unwrap_or([0; N])
}

#[inline]
fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(bytes_at(bytes, at))
}

/// The low 24 bits of the 32-bit word at `at`.
#[inline]
fn u24_at(bytes: &[u8], at: usize) -> u32 {
    u32_at(bytes, at) & 0xff_ffff
}

#[inline]
fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes_at(bytes, at))
}

#[inline]
fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes_at(bytes, at))
}

/// Writes headers one after the other. What does not fit is dropped; callers check the length
/// first.
struct Writer<'a> {
    rest: &'a mut [u8],
}

impl<'a> Writer<'a> {
    fn new(buffer: &'a mut [u8]) -> Self {
        Self { rest: buffer }
    }

    /// Takes arrays, not slices: with a constant length a single store writes them.
    #[inline]
    fn put<const N: usize>(&mut self, bytes: [u8; N]) {
        if let Some((dst, rest)) = core::mem::take(&mut self.rest).split_first_chunk_mut() {
            *dst = bytes;
            self.rest = rest;
        }
    }

    #[inline]
    fn u16(&mut self, value: u16) {
        self.put(value.to_be_bytes());
    }

    #[inline]
    fn u32(&mut self, value: u32) {
        self.put(value.to_be_bytes());
    }

    #[inline]
    fn u64(&mut self, value: u64) {
        self.put(value.to_be_bytes());
    }
}
