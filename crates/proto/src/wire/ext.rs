//! The extension headers and their fields.

use core::time::Duration;

use super::{Writer, u24_at, u32_at, u64_at};

/// RDMA extended transport header (RETH).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reth {
    /// The remote address.
    pub address: u64,
    /// The remote key.
    pub rkey: u32,
    /// The length of the whole message in bytes.
    pub len: u32,
}

impl Reth {
    #[inline]
    pub(super) fn parse(bytes: &[u8; 16]) -> Self {
        Self { address: u64_at(bytes, 0), rkey: u32_at(bytes, 8), len: u32_at(bytes, 12) }
    }

    #[inline]
    pub(super) fn emit(self, writer: &mut Writer<'_>) {
        writer.u64(self.address);
        writer.u32(self.rkey);
        writer.u32(self.len);
    }
}

/// Atomic extended transport header (AtomicETH).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AtomicEth {
    /// The remote address, a multiple of 8.
    pub address: u64,
    /// The remote key.
    pub rkey: u32,
    /// The value to store or to add.
    pub swap_or_add: u64,
    /// The value to compare with.
    pub compare: u64,
}

impl AtomicEth {
    #[inline]
    pub(super) fn parse(bytes: &[u8; 28]) -> Self {
        Self {
            address: u64_at(bytes, 0),
            rkey: u32_at(bytes, 8),
            swap_or_add: u64_at(bytes, 12),
            compare: u64_at(bytes, 20),
        }
    }

    #[inline]
    pub(super) fn emit(self, writer: &mut Writer<'_>) {
        writer.u64(self.address);
        writer.u32(self.rkey);
        writer.u64(self.swap_or_add);
        writer.u64(self.compare);
    }
}

/// The header of a masked compare-and-swap: defined here, in no specification.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MaskedAtomicEth {
    /// The remote address, a multiple of the width.
    pub address: u64,
    /// The remote key.
    pub rkey: u32,
    /// The value to store.
    pub swap: u64,
    /// The value to compare with.
    pub compare: u64,
    /// The bits to store.
    pub swap_mask: u64,
    /// The bits to compare.
    pub compare_mask: u64,
}

impl MaskedAtomicEth {
    #[inline]
    pub(super) fn parse(bytes: &[u8; 44]) -> Self {
        Self {
            address: u64_at(bytes, 0),
            rkey: u32_at(bytes, 8),
            swap: u64_at(bytes, 12),
            compare: u64_at(bytes, 20),
            swap_mask: u64_at(bytes, 28),
            compare_mask: u64_at(bytes, 36),
        }
    }

    #[inline]
    pub(super) fn emit(self, writer: &mut Writer<'_>) {
        writer.u64(self.address);
        writer.u32(self.rkey);
        for operand in [self.swap, self.compare, self.swap_mask, self.compare_mask] {
            writer.u64(operand);
        }
    }
}

/// Datagram extended transport header (DETH).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Deth {
    /// The Q_Key, which the receiving queue pair checks.
    pub qkey: u32,
    /// The sending queue pair, 24 bits.
    pub source_qp: u32,
}

impl Deth {
    #[inline]
    pub(super) fn parse(bytes: &[u8; 8]) -> Self {
        Self { qkey: u32_at(bytes, 0), source_qp: u24_at(bytes, 4) }
    }

    #[inline]
    pub(super) fn emit(self, writer: &mut Writer<'_>) {
        writer.u32(self.qkey);
        writer.u32(self.source_qp & 0xff_ffff);
    }
}

/// Acknowledge extended transport header (AETH).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Aeth {
    /// ACK, or the kind of NAK.
    pub syndrome: Syndrome,
    /// Message sequence number: messages completed by the responder, modulo 2^24.
    pub msn: u32,
}

impl Aeth {
    #[inline]
    pub(super) fn parse(bytes: &[u8; 4]) -> Self {
        Self { syndrome: Syndrome::from_byte(bytes[0]), msn: u24_at(bytes, 0) }
    }

    #[inline]
    pub(super) fn emit(self, writer: &mut Writer<'_>) {
        writer.u32(u32::from(self.syndrome.byte()) << 24 | self.msn & 0xff_ffff);
    }
}

/// Selective acknowledgement: which packets behind a missing one have arrived. It follows the AETH
/// of a sequence-error NAK between two ends that negotiated it; defined here, in no specification.
///
/// The lowest bit of the first byte is the packet behind the one with the NAK's PSN, the highest
/// bit of the last byte the 256th.
///
/// ```
/// use warpwire_proto::wire::Sack;
/// let mut sack = Sack::default();
/// sack.insert(1);
/// sack.insert(10);
/// assert!(sack.contains(1) && !sack.contains(2) && sack.0[1] == 2);
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sack(pub [u8; Self::LEN]);

impl Sack {
    /// Its length in bytes.
    pub const LEN: usize = 32;
    /// How many packets it has bits for.
    pub const SPAN: u32 = 8 * Self::LEN as u32;

    /// Whether the packet `behind` packets behind the missing one has arrived.
    pub const fn contains(&self, behind: u32) -> bool {
        match behind {
            1..=Self::SPAN => self.0[(behind - 1) as usize / 8] >> ((behind - 1) % 8) & 1 == 1,
            _ => false,
        }
    }

    /// Adds the packet `behind` packets behind the missing one: 1 to 256.
    pub const fn insert(&mut self, behind: u32) {
        if let 1..=Self::SPAN = behind {
            self.0[(behind - 1) as usize / 8] |= 1 << ((behind - 1) % 8);
        }
    }

    /// Whether it has no packet.
    pub fn is_empty(&self) -> bool {
        self.0 == [0; Self::LEN]
    }
}

/// The syndrome of an acknowledgement.
///
/// ```
/// use warpwire_proto::wire::{Nak, Syndrome};
/// assert_eq!(Syndrome::from_byte(0x62), Syndrome::Nak(Nak::RemoteAccess));
/// assert_eq!(Syndrome::ACK.byte(), 0x1f);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Syndrome {
    /// ACK. The value encodes receive credits; 31 means that credits are not used.
    Ack(u8),
    /// Receiver not ready: retry after the time that this code encodes ([`rnr_time`]).
    RnrNak(u8),
    /// NAK: the request failed.
    Nak(Nak),
    /// Reserved values.
    Reserved(u8),
}

/// Why a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Nak {
    /// PSN sequence error: a packet before this one is missing.
    Sequence,
    /// The request is malformed, or not allowed on this queue pair.
    InvalidRequest,
    /// Remote access error: the memory may not be accessed.
    RemoteAccess,
    /// Remote operational error: the responder failed.
    RemoteOperational,
    /// Any other code.
    Unknown(u8),
}

impl Syndrome {
    /// ACK without credits: what this implementation sends.
    pub const ACK: Self = Self::Ack(31);

    /// Whether it is an ACK, of any credit count.
    pub const fn is_ack(self) -> bool {
        matches!(self, Self::Ack(_))
    }

    /// Whether it is an RNR NAK, of any time.
    pub const fn is_rnr(self) -> bool {
        matches!(self, Self::RnrNak(_))
    }

    /// Parses the byte on the wire.
    pub const fn from_byte(byte: u8) -> Self {
        let code = byte & 0x1f;
        match byte >> 5 {
            0b000 => Self::Ack(code),
            0b001 => Self::RnrNak(code),
            0b011 => Self::Nak(match code {
                0 => Nak::Sequence,
                1 => Nak::InvalidRequest,
                2 => Nak::RemoteAccess,
                3 => Nak::RemoteOperational,
                other => Nak::Unknown(other),
            }),
            _ => Self::Reserved(byte),
        }
    }

    /// The byte on the wire.
    pub const fn byte(self) -> u8 {
        match self {
            Self::Ack(code) => code & 0x1f,
            Self::RnrNak(code) => 0x20 | code & 0x1f,
            Self::Nak(nak) => {
                0x60 | match nak {
                    Nak::Sequence => 0,
                    Nak::InvalidRequest => 1,
                    Nak::RemoteAccess => 2,
                    Nak::RemoteOperational => 3,
                    Nak::Unknown(other) => other & 0x1f,
                }
            }
            Self::Reserved(byte) => byte,
        }
    }
}

/// RNR timeouts by code, in units of 10 µs.
const RNR_TIMES: [u32; 32] = [
    65_536, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1_024,
    1_536, 2_048, 3_072, 4_096, 6_144, 8_192, 12_288, 16_384, 24_576, 32_768, 49_152,
];

/// How long a requester waits after an RNR NAK with this code.
///
/// ```
/// use core::time::Duration;
/// assert_eq!(warpwire_proto::wire::ext::rnr_time(12), Duration::from_micros(640));
/// ```
pub fn rnr_time(code: u8) -> Duration {
    Duration::from_micros(u64::from(RNR_TIMES[usize::from(code & 0x1f)]) * 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_syndrome_round_trips() {
        for byte in 0..=255 {
            assert_eq!(Syndrome::from_byte(byte).byte(), byte);
        }
    }

    #[test]
    fn rnr_times_match_the_specification() {
        assert_eq!(rnr_time(0), Duration::from_micros(655_360));
        assert_eq!(rnr_time(1), Duration::from_micros(10));
        assert_eq!(rnr_time(31), Duration::from_micros(491_520));
    }
}
