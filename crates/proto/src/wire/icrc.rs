//! The invariant CRC: over everything that routers do not change.
//!
//! It is the CRC-32 of Ethernet and zlib over eight bytes of ones (in place of a header that RoCEv2 does not
//! have) and the packet from the IP header through the pad, where the fields that change on the way count as
//! ones: IPv4 traffic class, time to live and checksum; IPv6 traffic class, flow label and hop limit; the
//! UDP checksum; the byte of the base header that holds the congestion bits. It covers IPv4's
//! identification, which a plain UDP socket must therefore know. It is stored least significant byte first.

use super::ip::{IPV4_LEN, IPV6_LEN, UDP_LEN};
use super::packet::BTH_LEN;

/// Computes CRC-32 piece by piece: from the state so far and more bytes to the next state. Callers with a
/// faster implementation than [`Portable`] bring their own.
pub trait Crc32 {
    /// The state after `bytes`. The state is the finished CRC of what came before (zlib's convention).
    fn update(state: u32, bytes: &[u8]) -> u32;
}

/// Eight bytes at a time from tables: works everywhere.
pub struct Portable;

/// The CRC of the eight bytes of ones, in zlib's convention.
const AFTER_ONES: u32 = !0xdebb_20e3;
/// The base header's byte with the congestion bits.
const BTH_VARIANT: usize = 4;

/// The bits that count as ones, from the IP header through the base header.
const ONES_V4: [u8; IPV4_LEN + UDP_LEN + BTH_LEN] = {
    let mut ones = [0; IPV4_LEN + UDP_LEN + BTH_LEN];
    // Traffic class, time to live, checksum.
    (ones[1], ones[8], ones[10], ones[11]) = (0xff, 0xff, 0xff, 0xff);
    ones_behind(ones, IPV4_LEN)
};
const ONES_V6: [u8; IPV6_LEN + UDP_LEN + BTH_LEN] = {
    let mut ones = [0; IPV6_LEN + UDP_LEN + BTH_LEN];
    // Traffic class and flow label, which begin behind the four bits of the version; hop limit.
    (ones[0], ones[1], ones[2], ones[3], ones[7]) = (0x0f, 0xff, 0xff, 0xff, 0xff);
    ones_behind(ones, IPV6_LEN)
};

const fn ones_behind<const N: usize>(mut ones: [u8; N], ip_len: usize) -> [u8; N] {
    // The UDP checksum, then the congestion bits.
    (ones[ip_len + 6], ones[ip_len + 7]) = (0xff, 0xff);
    ones[ip_len + UDP_LEN + BTH_VARIANT] = 0xff;
    ones
}

/// The state after `ip_udp_bth`: the IP, UDP and base transport headers as they stand in the packet, and as
/// much of what follows as the caller has at hand. The rest goes in with [`Crc32::update`]; after the pad, the
/// state is the ICRC, which is stored little-endian. `ip_len` is 40 for IPv6, else 20.
pub fn begin<C: Crc32>(ip_udp_bth: &[u8], ip_len: usize) -> u32 {
    if ip_len == IPV6_LEN {
        masked::<C, _>(ip_udp_bth, ONES_V6)
    } else {
        masked::<C, _>(ip_udp_bth, ONES_V4)
    }
}

/// All bytes of a mask at once: single bytes put into a copy would hold up the wide loads of a CRC.
#[inline]
fn masked<C: Crc32, const N: usize>(bytes: &[u8], mut ones: [u8; N]) -> u32 {
    if let Some((head, rest)) = bytes.split_first_chunk::<N>() {
        ones.iter_mut().zip(head).for_each(|(ones, byte)| *ones |= byte);
        return C::update(C::update(AFTER_ONES, &ones), rest);
    }
    // Shorter than headers are: no packet, but no reason to panic.
    ones.iter_mut().zip(bytes).for_each(|(ones, byte)| *ones |= byte);
    C::update(AFTER_ONES, ones.get(..bytes.len()).unwrap_or(&ones))
}

const TABLES: [[u32; 256]; 8] = tables();

const fn tables() -> [[u32; 256]; 8] {
    const POLYNOMIAL: u32 = 0xedb8_8320;
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
    fn it_is_the_crc_of_zlib() {
        assert_eq!(Portable::update(0, b"123456789"), 0xcbf4_3926);
        assert_eq!(Portable::update(0, &[0xff; 8]), AFTER_ONES);
    }

    proptest! {
        #[test]
        fn pieces_give_the_same_as_the_whole(
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
