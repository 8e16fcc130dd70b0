//! Packets that stay on this machine and are longer than RoCE's.
//!
//! A link that is bound to a loopback address reaches this machine alone, and only two of our own ends agree on packets that are longer than
//! [`MAX_ROCE_PACKET`]. What such a packet carries goes from memory to memory, as it does through shared memory, and no ICRC is computed over it: that would be
//! most of what a sender does beside the kernel's copy. In the place of the ICRC stands a short sum, over the addresses, the length and the base header:
//! a packet of anybody else does not have it by chance.
//!
//! A receiver takes either, so that each sender may choose: one below faults seals everything ([`force_icrc`](crate::link::Link::force_icrc)), and so
//! does one with the option `seal=on`.

use warpwire_proto::wire::icrc::IcrcPrefix;
use warpwire_proto::wire::packet::{BTH_LEN, ICRC_LEN};

use crate::link::{MAX_ROCE_PACKET, SimdCrc32};

/// Whether a packet of that length may go without an ICRC, where it stays on this machine.
#[inline]
pub(super) fn exceeds_roce(len: usize) -> bool {
    len > MAX_ROCE_PACKET
}

/// What stands in the place of the ICRC, in a packet of `len` bytes that begins with `head`. Inverted, so that it is not the ICRC of a packet that has a
/// base header only.
pub(super) fn header_checksum(
    icrc_prefix: &mut IcrcPrefix,
    len: usize,
    head: &[u8],
) -> Option<u32> {
    // The identification is the kernel's, and this need not know it.
    icrc_prefix.begin::<SimdCrc32>(0, len, head.get(..BTH_LEN)?).map(|sum| !sum)
}

/// Puts it in its place, which is the end of `tail`.
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
