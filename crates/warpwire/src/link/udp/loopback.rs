//! Packets that never leave this machine and exceed RoCE's maximum length.
//!
//! A link bound to a loopback address reaches this machine only, and only two Warpwire links agree
//! on packets longer than [`MAX_ROCE_PACKET`]. The payload is not covered by an ICRC, as with
//! shared memory: computing it would cost about as much as the kernel's copy. In place of the ICRC
//! the packet carries a checksum over the addresses, the length and the BTH, which foreign packets
//! do not match by chance.
//!
//! A receiver accepts both forms, so each sender may choose.
//! [`force_icrc`](crate::link::Link::force_icrc), which fault injection calls, and the option
//! `always_icrc=on` make a sender append ICRCs to all packets.

use warpwire_proto::wire::icrc::IcrcPrefix;
use warpwire_proto::wire::packet::{BTH_LEN, ICRC_LEN};

use crate::link::{MAX_ROCE_PACKET, SimdCrc32};

/// Whether a packet of this length may omit the ICRC where it never leaves this machine.
#[inline]
pub(super) fn exceeds_roce(len: usize) -> bool {
    len > MAX_ROCE_PACKET
}

/// The header checksum of a packet of `len` bytes that begins with `head`. Inverted, so that it
/// differs from the ICRC of a packet that consists of a BTH only.
pub(super) fn header_checksum(
    icrc_prefix: &mut IcrcPrefix,
    len: usize,
    head: &[u8],
) -> Option<u32> {
    // The identification is chosen by the kernel, and the checksum does not cover it.
    icrc_prefix.begin::<SimdCrc32>(0, len, head.get(..BTH_LEN)?).map(|sum| !sum)
}

/// Writes the header checksum to the last four bytes of `tail`.
pub(super) fn write_header_checksum(
    icrc_prefix: &mut IcrcPrefix,
    len: usize,
    head: &[u8],
    tail: &mut [u8],
) -> Option<()> {
    let sum = header_checksum(icrc_prefix, len, head)?;
    *tail.last_chunk_mut::<ICRC_LEN>()? = sum.to_le_bytes();
    Some(())
}
