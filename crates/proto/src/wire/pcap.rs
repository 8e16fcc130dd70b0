//! Capture files for Wireshark: packets from the IP header on, with nanosecond timestamps.
//!
//! Does no I/O: the caller writes these headers and the packets to a file.

use crate::time::Instant;

/// The maximum length of a captured packet.
const SNAP_LEN: u32 = 65_535;
/// Link type: packets start with an IP header.
const LINK_TYPE_RAW: u32 = 101;
/// Little-endian, nanosecond timestamps.
const MAGIC: u32 = 0xa1b2_3c4d;

/// The header of a capture file.
pub fn file_header() -> [u8; 24] {
    let mut header = [0; 24];
    header[..4].copy_from_slice(&MAGIC.to_le_bytes());
    header[4..6].copy_from_slice(&2_u16.to_le_bytes());
    header[6..8].copy_from_slice(&4_u16.to_le_bytes());
    header[16..20].copy_from_slice(&SNAP_LEN.to_le_bytes());
    header[20..].copy_from_slice(&LINK_TYPE_RAW.to_le_bytes());
    header
}

/// The header of a captured packet of `len` bytes.
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
