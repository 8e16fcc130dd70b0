//! The invariant CRC (ICRC), over everything that routers do not change.
//!
//! It is the CRC-32 of Ethernet and zlib over eight bytes of ones (in place of InfiniBand's LRH,
//! which RoCEv2 does not have) and the packet from the IP header through the pad, where the fields
//! that may change on the way count as ones: IPv4 traffic class, time to live and checksum; IPv6
//! traffic class, flow label and hop limit; the UDP checksum; the byte of the BTH with the
//! congestion bits. It covers the IPv4 identification. It is stored least significant byte first.
//!
//! A sender knows its identification and its flag "don't fragment"; a receiver with a plain UDP
//! socket sees neither. [`IpIdSolver`] recovers them from the packet: the CRC is linear, so the
//! difference between the ICRC carried and the ICRC computed with another identification depends
//! only on the two identifications and the length, and can be inverted.

use core::net::SocketAddr;

use super::ip::{IPV4_LEN, IPV6_LEN, IpRepr, UDP_LEN, UdpRepr};
use super::packet::{BTH_LEN, ICRC_LEN};

/// An incremental CRC-32: from the state so far and more bytes to the next state. Callers with a
/// faster implementation than [`Portable`] provide their own.
pub trait Crc32 {
    /// The state after `bytes`. The state is the finished CRC of what came before (zlib's
    /// convention).
    fn update(state: u32, bytes: &[u8]) -> u32;
}

/// A table-driven implementation, eight bytes at a time, for any CPU.
pub struct Portable;

/// The CRC of the eight bytes of ones, in zlib's convention.
const AFTER_ONES: u32 = !0xdebb_20e3;
/// Offset in the IPv4 header of the byte with the flags, and the flag "don't fragment" in it.
const FLAGS: usize = 6;
const DONT_FRAGMENT: u8 = 0x40;
/// Offset in the BTH of the byte with the congestion bits.
const BTH_VARIANT: usize = 4;
/// Maximum length of the headers with masked fields: IPv6, UDP and BTH.
const MAX_MASKED_LEN: usize = IPV6_LEN + UDP_LEN + BTH_LEN;

/// The bits that count as ones, from the IP header through the BTH.
const MASK_V4: [u8; IPV4_LEN + UDP_LEN + BTH_LEN] = {
    let mut mask = [0; IPV4_LEN + UDP_LEN + BTH_LEN];
    // Traffic class, time to live, checksum.
    (mask[1], mask[8], mask[10], mask[11]) = (0xff, 0xff, 0xff, 0xff);
    mask_udp_and_bth(mask, IPV4_LEN)
};
const MASK_V6: [u8; IPV6_LEN + UDP_LEN + BTH_LEN] = {
    let mut mask = [0; IPV6_LEN + UDP_LEN + BTH_LEN];
    // Traffic class and flow label, which follow the four bits of the version; hop limit.
    (mask[0], mask[1], mask[2], mask[3], mask[7]) = (0x0f, 0xff, 0xff, 0xff, 0xff);
    mask_udp_and_bth(mask, IPV6_LEN)
};

const fn mask_udp_and_bth<const N: usize>(mut mask: [u8; N], ip_len: usize) -> [u8; N] {
    // The UDP checksum, and the congestion bits.
    (mask[ip_len + 6], mask[ip_len + 7]) = (0xff, 0xff);
    mask[ip_len + UDP_LEN + BTH_VARIANT] = 0xff;
    mask
}

/// The CRC state after `ip_udp_bth`: the IP, UDP and base transport headers as in the packet, and
/// any bytes that follow them. The rest is added with [`Crc32::update`]; after the pad the state is
/// the ICRC, which is stored little-endian. `ip_len` is 40 for IPv6, else 20.
pub fn begin<C: Crc32>(ip_udp_bth: &[u8], ip_len: usize) -> u32 {
    if ip_len == IPV6_LEN {
        masked::<C, _>(ip_udp_bth, MASK_V6)
    } else {
        masked::<C, _>(ip_udp_bth, MASK_V4)
    }
}

/// Applies the mask to all bytes in one loop: single-byte stores would stall the wide loads of a
/// CRC (store forwarding).
#[inline]
fn masked<C: Crc32, const N: usize>(bytes: &[u8], mut mask: [u8; N]) -> u32 {
    if let Some((head, rest)) = bytes.split_first_chunk::<N>() {
        mask.iter_mut().zip(head).for_each(|(mask, byte)| *mask |= byte);
        return C::update(C::update(AFTER_ONES, &mask), rest);
    }
    // Shorter than the headers: not a packet, but no reason to panic.
    mask.iter_mut().zip(bytes).for_each(|(mask, byte)| *mask |= byte);
    C::update(AFTER_ONES, mask.get(..bytes.len()).unwrap_or(&mask))
}

/// The IP and UDP headers that the ICRC covers, for packets of one sender to one receiver: prepared
/// once, so that the ICRC of a packet costs its own bytes and 40 or 60 more.
///
/// ```
/// use warpwire_proto::wire::icrc::{IcrcPrefix, Portable};
/// // An acknowledgement: base header, AETH, and the ICRC that belongs to it.
/// let packet = [
///     0x11, 0, 0xff, 0xff, 0, 0, 0, 0x12, 0, 0, 1, 0x23, 0x1f, 0, 0, 1, 0x5e, 0x98, 0x9f, 0xb1,
/// ];
/// let source = "192.0.2.2:49443".parse().unwrap();
/// let destination = "192.0.2.1:4791".parse().unwrap();
/// let mut icrc_prefix = IcrcPrefix::new(source, destination);
/// assert_eq!(icrc_prefix.icrc::<Portable>(0, &packet), Some(0xb19f_985e));
/// ```
#[derive(Clone, Debug)]
pub struct IcrcPrefix {
    masked: [u8; MAX_MASKED_LEN],
    ip_len: usize,
}

impl IcrcPrefix {
    /// For packets from `source` to `destination`.
    pub fn new(source: SocketAddr, destination: SocketAddr) -> Self {
        let ip = IpRepr {
            source: source.ip(),
            destination: destination.ip(),
            traffic_class: 0,
            hop_limit: 0,
            identification: 0,
            payload_len: 0,
        };
        let udp = UdpRepr {
            source_port: source.port(),
            destination_port: destination.port(),
            payload_len: 0,
        };
        let mut masked = [0; MAX_MASKED_LEN];
        // A pair of mixed versions is written as IPv6, with the IPv4 address mapped.
        let ip_len = ip.emit(&mut masked);
        udp.emit(&mut masked[ip_len..]);
        let mask: &[u8] = if ip_len == IPV6_LEN { &MASK_V6 } else { &MASK_V4 };
        masked.iter_mut().zip(mask).for_each(|(byte, mask)| *byte |= mask);
        Self { masked, ip_len }
    }

    /// Changes whether packets have the flag "don't fragment", which they have at first (IPv6 has
    /// none).
    pub fn toggle_dont_fragment(&mut self) {
        if self.ip_len != IPV6_LEN {
            self.masked[FLAGS] ^= DONT_FRAGMENT;
        }
    }

    /// The ICRC of `packet`, from the BTH through the space of its ICRC, with this IPv4
    /// identification (IPv6 has none). `None` if it is too short for BTH and ICRC, or longer than
    /// IP allows.
    #[inline]
    pub fn icrc<C: Crc32>(&mut self, identification: u16, packet: &[u8]) -> Option<u32> {
        let covered = packet.get(..packet.len().checked_sub(ICRC_LEN)?)?;
        self.begin::<C>(identification, packet.len(), covered)
    }

    /// The state after `head`, the beginning of a packet of `len` bytes: at least its BTH. The rest
    /// is added with [`Crc32::update`], as with the free function [`begin`]; for packets that are
    /// not contiguous in memory. `None` as for [`IcrcPrefix::icrc`].
    ///
    /// ```
    /// use warpwire_proto::wire::icrc::{IcrcPrefix, Crc32, Portable};
    /// let source = "192.0.2.2:4791".parse().unwrap();
    /// let destination = "192.0.2.1:4791".parse().unwrap();
    /// let mut icrc_prefix = IcrcPrefix::new(source, destination);
    /// let packet = [7; 100];
    /// let state = icrc_prefix.begin::<Portable>(0, 100, &packet[..28]).unwrap();
    /// let icrc = Portable::update(state, &packet[28..96]);
    /// assert_eq!(icrc_prefix.icrc::<Portable>(0, &packet), Some(icrc));
    /// assert_eq!(icrc_prefix.begin::<Portable>(0, 100, &packet[..11]), None);
    /// ```
    #[inline]
    pub fn begin<C: Crc32>(&mut self, identification: u16, len: usize, head: &[u8]) -> Option<u32> {
        let (base, rest) = head.split_at_checked(BTH_LEN)?;
        let udp_len = u16::try_from(len + UDP_LEN).ok()?;
        let (ip, at) = (self.ip_len, self.ip_len + UDP_LEN);
        if ip == IPV6_LEN {
            self.masked[4..6].copy_from_slice(&udp_len.to_be_bytes());
        } else {
            let total = udp_len.checked_add(ip as u16)?;
            self.masked[2..4].copy_from_slice(&total.to_be_bytes());
            self.masked[4..6].copy_from_slice(&identification.to_be_bytes());
        }
        self.masked[ip + 4..ip + 6].copy_from_slice(&udp_len.to_be_bytes());
        self.masked[at..at + BTH_LEN].copy_from_slice(base);
        self.masked[at + BTH_VARIANT] = 0xff;
        let state = C::update(AFTER_ONES, &self.masked[..at + BTH_LEN]);
        Some(C::update(state, rest))
    }
}

/// Recovers the IPv4 identification of packets of one length from their ICRC, and whether they have
/// the flag "don't fragment".
///
/// That leaves fifteen bits of the ICRC as a check: one in 32 768 randomly damaged packets has some
/// solution. The caller must know which ones are plausible.
///
/// ```
/// use warpwire_proto::wire::icrc::{IcrcPrefix, IpIdSolver, Portable};
/// let source = "192.0.2.1:4791".parse().unwrap();
/// let destination = "192.0.2.2:4791".parse().unwrap();
/// let mut icrc_prefix = IcrcPrefix::new(source, destination);
/// let packet = [0x5a; 100];
/// let carried = icrc_prefix.icrc::<Portable>(0xbeef, &packet).unwrap();
/// let computed = icrc_prefix.icrc::<Portable>(0, &packet).unwrap();
/// assert_eq!(IpIdSolver::new(100).solve(0, carried ^ computed), Some((0xbeef, false)));
/// assert_eq!(IpIdSolver::new(100).solve(0, carried ^ computed ^ 1), None);
/// ```
#[derive(Clone, Copy, Debug)]
pub struct IpIdSolver {
    len: usize,
    /// x^(-8n) in the CRC's field, where n is the number of bytes from the identification on.
    inverse: u32,
}

impl IpIdSolver {
    /// For packets of `len` bytes from the BTH through the ICRC.
    pub const fn new(len: usize) -> Self {
        // The identification's two bytes and the rest of the IP header, UDP, and what the ICRC
        // covers behind them.
        let mut bytes = len + 16 + UDP_LEN - ICRC_LEN;
        let (mut inverse, mut power) = (ONE, X_POW_MINUS_8);
        while bytes > 0 {
            if bytes & 1 == 1 {
                inverse = multiply(inverse, power);
            }
            power = multiply(power, power);
            bytes >>= 1;
        }
        Self { len, inverse }
    }

    /// The packet length that this is for.
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether that length is zero.
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The identification that the sender used, if the packet's ICRC differs by `difference` from
    /// the one computed with the identification `assumed`, and whether its "don't fragment" differs
    /// from the assumed one; `None` if nothing explains the difference.
    pub const fn solve(&self, assumed: u16, difference: u32) -> Option<(u16, bool)> {
        // The identification is followed by the byte with the flags.
        const FLAG: u32 = (DONT_FRAGMENT as u32) << 16;
        let register = multiply(self.inverse, difference);
        if register & !(FLAG | 0xffff) != 0 {
            return None;
        }
        // The first byte on the wire is the lowest of the register.
        Some(((register as u16).swap_bytes() ^ assumed, register & FLAG != 0))
    }
}

const POLYNOMIAL: u32 = 0xedb8_8320;
/// The field's one: the highest bit is the lowest coefficient.
const ONE: u32 = 1 << 31;
const X_POW_MINUS_8: u32 = {
    let (mut value, mut bit) = (ONE, 0);
    while bit < 8 {
        value = if value >> 31 == 1 { (value ^ POLYNOMIAL) << 1 | 1 } else { value << 1 };
        bit += 1;
    }
    value
};

/// The product of two elements of the CRC's field.
const fn multiply(a: u32, mut b: u32) -> u32 {
    let (mut product, mut bit) = (0, 32);
    while bit > 0 {
        bit -= 1;
        product ^= b & (a >> bit & 1).wrapping_neg();
        b = b >> 1 ^ POLYNOMIAL & (b & 1).wrapping_neg();
    }
    product
}

const TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    let mut tables = [[0; 256]; 8];
    let mut byte = 0;
    while byte < 256 {
        let (mut crc, mut bit) = (byte as u32, 0);
        while bit < 8 {
            crc = if crc & 1 == 1 { crc >> 1 ^ POLYNOMIAL } else { crc >> 1 };
            bit += 1;
        }
        tables[0][byte] = crc;
        byte += 1;
    }
    let mut table = 1;
    while table < 8 {
        let mut byte = 0;
        while byte < 256 {
            let before = tables[table - 1][byte];
            tables[table][byte] = before >> 8 ^ tables[0][(before & 0xff) as usize];
            byte += 1;
        }
        table += 1;
    }
    tables
}

impl Crc32 for Portable {
    fn update(state: u32, bytes: &[u8]) -> u32 {
        let mut crc = !state;
        let (blocks, rest) = bytes.as_chunks::<8>();
        for block in blocks {
            let word = u64::from_le_bytes(*block) ^ u64::from(crc);
            crc = (0..8).fold(0, |sum, at| {
                let byte = (word >> (at * 8)) as u8;
                sum ^ TABLES[7 - at][usize::from(byte)]
            });
        }
        for byte in rest {
            crc = crc >> 8 ^ TABLES[0][usize::from(crc as u8 ^ byte)];
        }
        !crc
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn portable_crc_matches_zlib() {
        assert_eq!(Portable::update(0, b"123456789"), 0xcbf4_3926);
        assert_eq!(Portable::update(0, &[0xff; 8]), AFTER_ONES);
    }

    fn addresses(v6: bool) -> (SocketAddr, SocketAddr) {
        let texts = if v6 {
            ("[2001:db8::1]:49443", "[2001:db8::2]:4791")
        } else {
            ("192.0.2.1:49443", "192.0.2.2:4791")
        };
        (texts.0.parse().unwrap(), texts.1.parse().unwrap())
    }

    #[test]
    fn packet_of_invalid_length_has_no_icrc() {
        let (source, destination) = addresses(false);
        let mut icrc_prefix = IcrcPrefix::new(source, destination);
        for len in [0, 3, 4, 15] {
            assert_eq!(icrc_prefix.icrc::<Portable>(0, &[0; 16][..len]), None, "{len}");
        }
        assert!(icrc_prefix.icrc::<Portable>(0, &[0; 16]).is_some());
        assert!(icrc_prefix.icrc::<Portable>(0, &[0; 65_507]).is_some());
        assert_eq!(icrc_prefix.icrc::<Portable>(0, &[0; 65_508]), None);
    }

    #[test]
    fn single_bit_errors_do_not_solve_to_an_identification() {
        let (source, destination) = addresses(false);
        let mut icrc_prefix = IcrcPrefix::new(source, destination);
        let mut bytes = [0x5a; 1064];
        let ip_id_solver = IpIdSolver::new(bytes.len());
        let carried = icrc_prefix.icrc::<Portable>(0, &bytes).unwrap();
        for bit in (BTH_LEN * 8)..(bytes.len() - ICRC_LEN) * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            let computed = icrc_prefix.icrc::<Portable>(0, &bytes).unwrap();
            // With another flag some have a solution, but none with a small identification.
            let solved = ip_id_solver.solve(0, carried ^ computed);
            assert!(solved.is_none_or(|(id, flag_differs)| id > 63 && flag_differs), "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn mixed_ip_versions_do_not_panic() {
        let mut icrc_prefix = IcrcPrefix::new(addresses(false).0, addresses(true).1);
        assert!(icrc_prefix.icrc::<Portable>(0, &[0; 64]).is_some());
    }

    proptest! {
        #[test]
        fn prefix_gives_the_icrc_of_the_whole_packet(
            v6 in any::<bool>(),
            id in any::<u16>(),
            payload in proptest::collection::vec(any::<u8>(), 0..300),
        ) {
            use crate::wire::{Extension, Headers, Opcode, Packet, packet};
            let (source, destination) = addresses(v6);
            let headers = Headers::new(Opcode::SendOnly, 1, crate::Psn::new(2), Extension::None);
            let ip = IpRepr {
                source: source.ip(),
                destination: destination.ip(),
                traffic_class: 2,
                hop_limit: 64,
                identification: id,
                payload_len: 0,
            };
            let udp = UdpRepr { source_port: 49_443, destination_port: 4791, payload_len: 0 };
            let mut bytes = [0; 512];
            let len = packet::build::<Portable>(&mut bytes, ip, udp, &headers, &payload).unwrap();
            let whole = Packet::new_checked(&bytes[..len]).unwrap();
            let start = len - headers.wire_len(payload.len());
            let mut icrc_prefix = IcrcPrefix::new(source, destination);
            let icrc = icrc_prefix.icrc::<Portable>(id, &bytes[start..len]);
            prop_assert_eq!(icrc, Some(whole.transport().icrc()));
        }

        #[test]
        fn identification_is_recovered_from_any_assumption(
            bytes in proptest::collection::vec(any::<u8>(), 16..3000),
            actual in any::<u16>(),
            assumed in any::<u16>(),
            flag_differs in any::<bool>(),
        ) {
            let (source, destination) = addresses(false);
            let mut icrc_prefix = IcrcPrefix::new(source, destination);
            let computed = icrc_prefix.icrc::<Portable>(assumed, &bytes).unwrap();
            if flag_differs {
                icrc_prefix.toggle_dont_fragment();
            }
            let carried = icrc_prefix.icrc::<Portable>(actual, &bytes).unwrap();
            let ip_id_solver = IpIdSolver::new(bytes.len());
            prop_assert_eq!(
                ip_id_solver.solve(assumed, carried ^ computed),
                Some((actual, flag_differs))
            );
        }

        #[test]
        fn incremental_update_equals_one_update(
            bytes in proptest::collection::vec(any::<u8>(), 0..300),
            cut in any::<prop::sample::Index>(),
        ) {
            let cut = cut.index(bytes.len() + 1);
            let whole = Portable::update(0, &bytes);
            let pieces = Portable::update(Portable::update(0, &bytes[..cut]), &bytes[cut..]);
            prop_assert_eq!(whole, pieces);
        }
    }
}
