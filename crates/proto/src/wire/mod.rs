//! RoCEv2 as bytes: checked views, and representations that say what they mean.
//!
//! ```text
//! IPv4 20 or IPv6 40 | UDP 8 | BTH 12 | extension headers | payload | pad 0..3 | ICRC 4
//! ```
//!
//! A [`Packet`] is a checked view of such bytes: nothing in this module panics, whatever they hold. [`Headers`]
//! is what the transport's part means, to be matched on and to be written. Payload is never copied here: a
//! view gives its range, and a writer leaves its place free, because it may lie in GPU memory.
//!
//! | module | what it holds |
//! |---|---|
//! | [`opcode`] | what a packet does, and which headers follow |
//! | [`ext`] | the extension headers, acknowledge syndromes, timers |
//! | [`ip`] | IPv4, IPv6 and UDP, as far as RoCEv2 needs them |
//! | [`icrc`] | the checksum that covers all of it |
//! | [`packet`] | the view, and writing |
//! | [`pcap`] | captures that Wireshark opens |

pub mod ext;
pub mod icrc;
pub mod ip;
pub mod opcode;
pub mod packet;
pub mod pcap;
mod print;

pub use ext::{Aeth, AtomicEth, Deth, Nak, Reth, Syndrome};
pub use ip::{IpRepr, UDP_PORT, UdpRepr};
pub use opcode::{Opcode, Position};
pub use packet::{Extension, Headers, Malformed, Packet, Transport};

/// Reads the `N` bytes at `at`; zeros if they are not there. Views check their length first, so that
/// the zeros are never seen.
fn bytes_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let found = bytes.get(at..at + N).and_then(|part| part.try_into().ok());
    found.unwrap_or([0; N])
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes(bytes_at(bytes, at))
}

/// The low 24 bits of the 32-bit word at `at`.
fn u24_at(bytes: &[u8], at: usize) -> u32 {
    u32_at(bytes, at) & 0xff_ffff
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_be_bytes(bytes_at(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_be_bytes(bytes_at(bytes, at))
}

/// Writes headers one after the other; what does not fit is left out, which its users rule out by asking
/// for the length first.
struct Writer<'a> {
    buffer: &'a mut [u8],
    at: usize,
}

impl<'a> Writer<'a> {
    fn new(buffer: &'a mut [u8]) -> Self {
        Self { buffer, at: 0 }
    }

    fn put(&mut self, bytes: &[u8]) {
        let end = self.at + bytes.len();
        if let Some(place) = self.buffer.get_mut(self.at..end) {
            place.copy_from_slice(bytes);
        }
        self.at = end;
    }

    fn u8(&mut self, value: u8) {
        self.put(&[value]);
    }

    fn u16(&mut self, value: u16) {
        self.put(&value.to_be_bytes());
    }

    fn u32(&mut self, value: u32) {
        self.put(&value.to_be_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.put(&value.to_be_bytes());
    }
}
