//! Whole packets: checked views, parsed headers, and building.

use core::fmt;
use core::ops::Range;

use super::ext::{Aeth, AtomicEth, Deth, MaskedAtomicEth, Nak, Reth, Sack, Syndrome};
use super::icrc::{self, Crc32};
use super::ip::{IPV4_LEN, IpRepr, UDP_LEN, UdpRepr};
use super::opcode::{ExtKind, Opcode};
use super::{Writer, bytes_at, u16_at, u24_at, u32_at, u64_at};
use crate::psn::Psn;

/// Length of the base transport header (BTH) in bytes.
pub const BTH_LEN: usize = 12;
/// Length of the ICRC in bytes.
pub const ICRC_LEN: usize = 4;
/// Maximum length of the transport headers: BTH and a masked atomic's.
pub const MAX_HEADERS_LEN: usize = BTH_LEN + 44;
/// The default partition key.
pub const DEFAULT_PARTITION: u16 = 0xffff;

/// Offsets of the fields of the BTH.
mod field {
    pub(super) const OPCODE: usize = 0;
    pub(super) const FLAGS: usize = 1;
    pub(super) const PARTITION: usize = 2;
    pub(super) const CONGESTION: usize = 4;
    pub(super) const DESTINATION: usize = 4;
    pub(super) const ACK_REQUEST: usize = 8;
    pub(super) const PSN: usize = 8;
}

const SOLICITED: u8 = 0x80;
const MIGRATED: u8 = 0x40;
const VERSION: u8 = 0x0f;
const FECN: u8 = 0x80;
const BECN: u8 = 0x40;
const ACK_REQUEST: u8 = 0x80;

/// Why bytes are not a valid packet. Such packets are counted by reason and dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Malformed {
    /// Not IPv4 or IPv6 with UDP, or with options or fragments.
    Ip,
    /// The UDP header is truncated, or its length is wrong.
    Udp,
    /// Shorter than its headers, pad and ICRC.
    Short,
    /// Unknown transport version.
    Version,
    /// Unknown opcode.
    Opcode,
}

impl fmt::Display for Malformed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Ip => "not UDP over IP",
            Self::Udp => "an invalid UDP header",
            Self::Short => "shorter than its headers",
            Self::Version => "an unknown transport version",
            Self::Opcode => "an unknown opcode",
        })
    }
}

/// The extension headers, determined by the opcode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extension {
    /// No extension header.
    None,
    /// Immediate data.
    Imm(u32),
    /// RETH: remote memory.
    Reth(Reth),
    /// RETH and immediate data.
    RethImm(Reth, u32),
    /// AETH: an acknowledgement.
    Aeth(Aeth),
    /// AETH and the value before an atomic operation.
    AethAtomic(Aeth, u64),
    /// AETH of a sequence-error NAK, and which packets behind the gap have arrived.
    AethSack(Aeth, Sack),
    /// AtomicETH.
    Atomic(AtomicEth),
    /// An atomic with masks, see [`MaskedAtomicEth`].
    MaskedAtomic(MaskedAtomicEth),
    /// IETH: the rkey that the receiver is to invalidate.
    Invalidate(u32),
    /// DETH: a datagram.
    Deth(Deth),
    /// DETH and immediate data.
    DethImm(Deth, u32),
    /// Congestion notification: 16 reserved bytes.
    Cnp,
}

impl Extension {
    #[inline]
    fn ext_kind(&self) -> ExtKind {
        match self {
            Self::None => ExtKind::Plain,
            Self::Imm(_) => ExtKind::Imm,
            Self::Reth(_) => ExtKind::Reth,
            Self::RethImm(..) => ExtKind::RethImm,
            Self::Aeth(_) => ExtKind::Aeth,
            Self::AethAtomic(..) => ExtKind::AethAtomic,
            Self::AethSack(..) => ExtKind::AethSack,
            Self::Atomic(_) => ExtKind::Atomic,
            Self::MaskedAtomic(_) => ExtKind::MaskedAtomic,
            Self::Invalidate(_) => ExtKind::Invalidate,
            Self::Deth(_) => ExtKind::Deth,
            Self::DethImm(..) => ExtKind::DethImm,
            Self::Cnp => ExtKind::Cnp,
        }
    }

    #[inline]
    fn parse(ext_kind: ExtKind, bytes: &[u8]) -> Self {
        match ext_kind {
            ExtKind::Plain => Self::None,
            ExtKind::Imm => Self::Imm(u32_at(bytes, 0)),
            ExtKind::Reth => Self::Reth(Reth::parse(&bytes_at(bytes, 0))),
            ExtKind::RethImm => Self::RethImm(Reth::parse(&bytes_at(bytes, 0)), u32_at(bytes, 16)),
            ExtKind::Aeth => Self::Aeth(Aeth::parse(&bytes_at(bytes, 0))),
            ExtKind::AethAtomic => {
                Self::AethAtomic(Aeth::parse(&bytes_at(bytes, 0)), u64_at(bytes, 4))
            }
            ExtKind::AethSack => {
                Self::AethSack(Aeth::parse(&bytes_at(bytes, 0)), Sack(bytes_at(bytes, 4)))
            }
            ExtKind::Atomic => Self::Atomic(AtomicEth::parse(&bytes_at(bytes, 0))),
            ExtKind::MaskedAtomic => {
                Self::MaskedAtomic(MaskedAtomicEth::parse(&bytes_at(bytes, 0)))
            }
            ExtKind::Invalidate => Self::Invalidate(u32_at(bytes, 0)),
            ExtKind::Deth => Self::Deth(Deth::parse(&bytes_at(bytes, 0))),
            ExtKind::DethImm => Self::DethImm(Deth::parse(&bytes_at(bytes, 0)), u32_at(bytes, 8)),
            ExtKind::Cnp => Self::Cnp,
        }
    }

    #[inline]
    fn emit(&self, writer: &mut Writer<'_>) {
        match *self {
            Self::None => {}
            Self::Imm(value) | Self::Invalidate(value) => writer.u32(value),
            Self::Reth(reth) => reth.emit(writer),
            Self::RethImm(reth, imm) => {
                reth.emit(writer);
                writer.u32(imm);
            }
            Self::Aeth(aeth) => aeth.emit(writer),
            Self::AethAtomic(aeth, before) => {
                aeth.emit(writer);
                writer.u64(before);
            }
            Self::AethSack(aeth, sack) => {
                aeth.emit(writer);
                writer.put(sack.0);
            }
            Self::Atomic(atomic) => atomic.emit(writer),
            Self::MaskedAtomic(atomic) => atomic.emit(writer),
            Self::Deth(deth) => deth.emit(writer),
            Self::DethImm(deth, imm) => {
                deth.emit(writer);
                writer.u32(imm);
            }
            Self::Cnp => writer.put([0; 16]),
        }
    }
}

/// The parsed transport headers of a packet.
///
/// ```
/// use warpwire_proto::Psn;
/// use warpwire_proto::wire::{Extension, Headers, Opcode, Transport};
/// let headers = Headers {
///     ack_request: true,
///     ..Headers::new(Opcode::SendOnly, 0x11, Psn::new(7), Extension::None)
/// };
/// let mut bytes = [0; 64];
/// let at = headers.emit(&mut bytes, 5).unwrap();
/// bytes[at..at + 5].copy_from_slice(b"hello");
/// let packet = Transport::new_checked(&bytes[..headers.wire_len(5)]).unwrap();
/// assert_eq!(packet.headers(), headers);
/// assert_eq!(packet.payload(), b"hello");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Headers {
    /// The operation, and the packet's position in its message.
    pub opcode: Opcode,
    /// Solicited event: the completion wakes waiters that are armed for solicited events.
    pub solicited: bool,
    /// The migration bit: sent by some devices, ignored on receipt.
    pub migrated: bool,
    /// The partition key.
    pub partition: u16,
    /// Forward congestion notification (InfiniBand networks).
    pub fecn: bool,
    /// Backward congestion notification: set in CNPs.
    pub becn: bool,
    /// The destination queue pair, 24 bits.
    pub destination_qp: u32,
    /// Whether the receiver must acknowledge this packet.
    pub ack_request: bool,
    /// The packet sequence number.
    pub psn: Psn,
    /// The extension headers.
    pub extension: Extension,
}

impl Headers {
    /// Headers without flags, in the default partition. The extension must match the opcode.
    pub fn new(opcode: Opcode, destination_qp: u32, psn: Psn, extension: Extension) -> Self {
        Self {
            opcode,
            solicited: false,
            migrated: false,
            partition: DEFAULT_PARTITION,
            fecn: false,
            becn: false,
            destination_qp,
            ack_request: false,
            psn,
            extension,
        }
    }

    /// The length of the headers in bytes.
    #[inline]
    pub fn len(&self) -> usize {
        BTH_LEN + self.extension.ext_kind().len()
    }

    /// Always false: the BTH is always present.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// The length of a packet with `payload` bytes, from the BTH through the ICRC. Saturates.
    #[inline]
    pub fn wire_len(&self, payload: usize) -> usize {
        // Headers and ICRC are multiples of 4: rounding up the sum rounds up the payload.
        payload.saturating_add(self.len() + ICRC_LEN + 3) & !3
    }

    /// Writes the headers, leaves space for `payload` bytes, and writes the padding zeroes. Returns
    /// the offset of the payload; `None`, with undefined contents of `buffer`, if `buffer` is
    /// shorter than [`Headers::wire_len`] or the extension does not match the opcode. The caller
    /// adds the ICRC, which covers the payload.
    pub fn emit(&self, buffer: &mut [u8], payload: usize) -> Option<usize> {
        let ext_kind = self.extension.ext_kind();
        if self.opcode.ext_kind() != Some(ext_kind)
            && (self.opcode, ext_kind) != (Opcode::Acknowledge, ExtKind::AethSack)
        {
            return None;
        }
        let start = self.len();
        let packet = buffer.get_mut(..self.wire_len(payload))?;
        let pad = payload.wrapping_neg() & 3;
        let mut writer = Writer::new(packet);
        self.base(pad as u8).into_iter().for_each(|word| writer.u32(word));
        self.extension.emit(&mut writer);
        if pad > 0 {
            packet[start + payload..start + payload + pad].fill(0);
        }
        Some(start)
    }

    /// The BTH of a packet with `pad` bytes of padding. Built in words, which are stored faster
    /// than bytes.
    #[inline]
    fn base(&self, pad: u8) -> [u32; 3] {
        let flag = |set: bool, bit: u8| u8::from(set) * bit;
        let flags = flag(self.solicited, SOLICITED) | flag(self.migrated, MIGRATED) | pad << 4;
        let congestion = flag(self.fecn, FECN) | flag(self.becn, BECN);
        let request = flag(self.ack_request, ACK_REQUEST);
        let high = |byte: u8| u32::from(byte) << 24;
        [
            high(self.opcode.byte()) | u32::from(flags) << 16 | u32::from(self.partition),
            high(congestion) | self.destination_qp & 0xff_ffff,
            high(request) | self.psn.value(),
        ]
    }
}

/// A checked view of a packet from the BTH through the ICRC: what a UDP socket receives.
#[derive(Clone, Copy)]
pub struct Transport<'a> {
    /// Separate from `rest`, so that its fields are read without bounds checks.
    base: &'a [u8; BTH_LEN],
    /// Extension headers, payload, pad and ICRC: at least as long as `base` requires.
    rest: &'a [u8],
    ext_kind: ExtKind,
}

impl<'a> Transport<'a> {
    /// Checks that the version and opcode are known, and the bytes long enough for their headers.
    #[inline]
    pub fn new_checked(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let (base, rest) = bytes.split_first_chunk::<BTH_LEN>().ok_or(Malformed::Short)?;
        if base[field::FLAGS] & VERSION != 0 {
            return Err(Malformed::Version);
        }
        let ext_kind =
            Opcode::from_byte(base[field::OPCODE]).ext_kind().ok_or(Malformed::Opcode)?;
        let mut view = Self { base, rest, ext_kind };
        if ext_kind == ExtKind::Aeth && view.has_sack() {
            view.ext_kind = ExtKind::AethSack;
        } else if rest.len() < ext_kind.len() + view.pad() + ICRC_LEN {
            return Err(Malformed::Short);
        }
        Ok(view)
    }

    /// The operation.
    #[inline]
    pub fn opcode(&self) -> Opcode {
        Opcode::from_byte(self.base[field::OPCODE])
    }

    /// The destination queue pair.
    #[inline]
    pub fn destination_qp(&self) -> u32 {
        u24_at(self.base, field::DESTINATION)
    }

    /// The packet sequence number.
    #[inline]
    pub fn psn(&self) -> Psn {
        Psn::new(u32_at(self.base, field::PSN))
    }

    /// Parses the headers.
    #[inline]
    pub fn headers(&self) -> Headers {
        let (flags, congestion) = (self.base[field::FLAGS], self.base[field::CONGESTION]);
        Headers {
            opcode: self.opcode(),
            solicited: flags & SOLICITED != 0,
            migrated: flags & MIGRATED != 0,
            partition: u16_at(self.base, field::PARTITION),
            fecn: congestion & FECN != 0,
            becn: congestion & BECN != 0,
            destination_qp: self.destination_qp(),
            ack_request: self.base[field::ACK_REQUEST] & ACK_REQUEST != 0,
            psn: self.psn(),
            extension: Extension::parse(self.ext_kind, self.rest),
        }
    }

    /// The range of the payload in the view.
    #[inline]
    pub fn payload_range(&self) -> Range<usize> {
        let end = BTH_LEN + self.rest.len() - self.pad() - ICRC_LEN;
        BTH_LEN + self.ext_kind.len()..end
    }

    /// The payload.
    #[inline]
    pub fn payload(&self) -> &'a [u8] {
        &self.rest[self.ext_kind.len()..self.rest.len() - self.pad() - ICRC_LEN]
    }

    /// The ICRC in the packet.
    #[inline]
    pub fn icrc(&self) -> u32 {
        u32::from_le_bytes(bytes_at(self.rest, self.rest.len() - ICRC_LEN))
    }

    /// Whether it is a sequence-error NAK with the data of a selective acknowledgement, which no
    /// other ACK has.
    fn has_sack(&self) -> bool {
        const SEQUENCE: u8 = Syndrome::Nak(Nak::Sequence).byte();
        self.opcode() == Opcode::Acknowledge
            && self.rest.len() == ExtKind::AethSack.len() + self.pad() + ICRC_LEN
            && self.rest.first() == Some(&SEQUENCE)
    }

    #[inline]
    fn pad(&self) -> usize {
        usize::from(self.base[field::FLAGS] >> 4 & 3)
    }
}

/// A checked view of a packet from the IP header on: the contents of a raw socket or a capture.
#[derive(Clone, Copy)]
pub struct Packet<'a> {
    bytes: &'a [u8],
    ip: IpRepr,
    ip_len: usize,
    udp: UdpRepr,
    transport: Transport<'a>,
}

impl<'a> Packet<'a> {
    /// Checks everything down to the transport headers. Bytes behind the packet (an Ethernet
    /// frame's padding) are ignored.
    pub fn new_checked(bytes: &'a [u8]) -> Result<Self, Malformed> {
        let (ip, ip_len) = IpRepr::parse(bytes).ok_or(Malformed::Ip)?;
        let bytes = &bytes[..ip_len + usize::from(ip.payload_len)];
        let udp = UdpRepr::parse(&bytes[ip_len..]).ok_or(Malformed::Udp)?;
        let start = ip_len + UDP_LEN;
        let end = start + usize::from(udp.payload_len);
        let transport = Transport::new_checked(&bytes[start..end])?;
        Ok(Self { bytes: &bytes[..end], ip, ip_len, udp, transport })
    }

    /// The parsed IP header.
    pub fn ip(&self) -> IpRepr {
        self.ip
    }

    /// The parsed UDP header.
    pub fn udp(&self) -> UdpRepr {
        self.udp
    }

    /// The transport headers, payload and ICRC.
    pub fn transport(&self) -> Transport<'a> {
        self.transport
    }

    /// Whether the ICRC in the packet is correct.
    pub fn has_valid_icrc<C: Crc32>(&self) -> bool {
        let covered = &self.bytes[..self.bytes.len() - ICRC_LEN];
        icrc::begin::<C>(covered, self.ip_len) == self.transport.icrc()
    }
}

/// Builds a whole packet: IP, UDP, headers, payload, pad and ICRC. Returns its length, or `None` if
/// the buffer is too short, or a length does not fit into its header field.
///
/// For tests and captures; an engine writes headers and payload separately.
pub fn build<C: Crc32>(
    buffer: &mut [u8],
    mut ip: IpRepr,
    mut udp: UdpRepr,
    headers: &Headers,
    payload: &[u8],
) -> Option<usize> {
    let len = headers.wire_len(payload.len());
    udp.payload_len = u16::try_from(len).ok()?;
    ip.payload_len = udp.payload_len.checked_add(UDP_LEN as u16)?;
    let ip_len = ip.header_len();
    let (start, end) = (ip_len + UDP_LEN, ip_len + UDP_LEN + len);
    if ip_len == IPV4_LEN && end > usize::from(u16::MAX) {
        return None; // the IPv4 length includes the header
    }
    let packet = buffer.get_mut(..end)?;
    ip.emit(packet);
    udp.emit(&mut packet[ip_len..]);
    let at = start + headers.emit(&mut packet[start..], payload.len())?;
    packet[at..at + payload.len()].copy_from_slice(payload);
    let crc = icrc::begin::<C>(&packet[..end - ICRC_LEN], ip_len);
    packet[end - ICRC_LEN..].copy_from_slice(&crc.to_le_bytes());
    Some(end)
}
