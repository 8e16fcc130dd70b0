//! Capture files that Wireshark opens: packets from the IP header on, stamped in nanoseconds.
//!
//! Nothing is written here; a caller with a file puts these bytes and the packets into it.

use crate::time::Instant;

/// The longest packet that a capture holds.
const SNAP_LEN: u32 = 65_535;
/// Packets begin with an IP header.
const LINK_TYPE_RAW: u32 = 101;
/// Little-endian, nanoseconds.
const MAGIC: u32 = 0xa1b2_3c4d;

/// What a capture file begins with.
pub fn file_header() -> [u8; 24] {
    let mut header = [0; 24];
    header[..4].copy_from_slice(&MAGIC.to_le_bytes());
    header[4..6].copy_from_slice(&2_u16.to_le_bytes());
    header[6..8].copy_from_slice(&4_u16.to_le_bytes());
    header[16..20].copy_from_slice(&SNAP_LEN.to_le_bytes());
    header[20..].copy_from_slice(&LINK_TYPE_RAW.to_le_bytes());
    header
}

/// What stands before each packet of `len` bytes.
pub fn record_header(at: Instant, len: usize) -> [u8; 16] {
    const NANOS: u64 = 1_000_000_000;
    let mut header = [0; 16];
    let len = len.min(SNAP_LEN as usize) as u32;
    header[..4].copy_from_slice(&((at.as_nanos() / NANOS) as u32).to_le_bytes());
    header[4..8].copy_from_slice(&((at.as_nanos() % NANOS) as u32).to_le_bytes());
    header[8..12].copy_from_slice(&len.to_le_bytes());
    header[12..].copy_from_slice(&len.to_le_bytes());
    header
}
