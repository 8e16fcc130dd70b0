//! What is said about datagrams: who has a name (a question and its answer, over UDP), and the header of each datagram.
//!
//! Both words have [`WORDS_LEN`] bytes, so that nobody who asks in another's name makes more traffic than he sends:
//!
//! | at | bytes | |
//! |---|---|---|
//! | 0 | 4 | `WDGM` |
//! | 4 | 1 | the version |
//! | 5 | 1 | 1 is a question, 2 an answer |
//! | 6 | 2 | 0 |
//! | 8 | 8 | the nonce, which the answer repeats |
//! | 16 | 16 | the address that was asked; IPv4 as IPv6 maps it |
//! | 32 | 2 | the port that was asked |
//! | 34 | 2 | an answer: the port of the device |
//! | 36 | 4 | its queue pair |
//! | 40 | 4 | its queue key |
//! | 44 | 4 | the longest datagram that it takes |
//!
//! Numbers are little-endian; what a question does not use is 0. The device has the address that was asked: an answer can send
//! nobody anywhere else.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};

/// How long a question is, and an answer.
pub const WORDS_LEN: usize = 48;
/// How long the header of a datagram is.
pub const HEADER_LEN: usize = 8;
/// The version of both.
pub const DATAGRAM_VERSION: u8 = 1;
/// The longest datagram that there is: less where packets are smaller.
pub const LONGEST_DATAGRAM: usize = 4096 - HEADER_LEN;

const MAGIC: [u8; 4] = *b"WDGM";
const QUESTION: u8 = 1;
const ANSWER: u8 = 2;
/// With it set in a queue key, devices send another key than they were told.
const OWN_KEY: u32 = 1 << 31;

/// How a socket is reached, at the address that was asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Card {
    /// The port of its device.
    pub port: u16,
    /// Its queue pair.
    pub qpn: u32,
    /// The key that datagrams must bear.
    pub qkey: u32,
    /// The longest datagram that it takes.
    pub longest: u32,
}

impl Card {
    fn check(&self) -> Result<(), Strange> {
        let is_good = self.port != 0
            && (1..1 << 24).contains(&self.qpn)
            && self.qkey & OWN_KEY == 0
            && self.longest <= u32::from(u16::MAX);
        if is_good { Ok(()) } else { Err(Strange::Card) }
    }
}

/// A question, or an answer.
///
/// ```
/// use warpwire::sock::warp::{Card, Words};
/// let asked = "10.0.0.2:7000".parse().unwrap();
/// let question = Words::Question { nonce: 5, asked };
/// assert_eq!(Words::read(&question.bytes()), Ok(question));
/// let card = Card { port: 4791, qpn: 17, qkey: 3, longest: 4088 };
/// let answer = Words::Answer { nonce: 5, asked, card };
/// assert_eq!(Words::read(&answer.bytes()), Ok(answer));
/// assert!(Words::read(b"anything else").is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Words {
    /// Who has that name?
    Question {
        /// What the answer must repeat.
        nonce: u64,
        /// The name.
        asked: SocketAddr,
    },
    /// It is reached like this.
    Answer {
        /// What the question said.
        nonce: u64,
        /// The name.
        asked: SocketAddr,
        /// How its socket is reached.
        card: Card,
    },
}

/// Why bytes are no words of ours, or no header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strange {
    /// Another length.
    Length,
    /// Another language.
    Magic,
    /// Another version.
    Version(u8),
    /// Neither a question nor an answer.
    Sort(u8),
    /// Something where nothing may be.
    Padding,
    /// Numbers that no socket has.
    Card,
}

impl fmt::Display for Strange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Length => f.write_str("it has another length"),
            Self::Magic => f.write_str("it is not our language"),
            Self::Version(version) => {
                write!(f, "it speaks version {version}, we speak {DATAGRAM_VERSION}")
            }
            Self::Sort(sort) => write!(f, "{sort} is neither a question nor an answer"),
            Self::Padding => f.write_str("something stands where nothing may"),
            Self::Card => f.write_str("no socket has such numbers"),
        }
    }
}

impl std::error::Error for Strange {}

impl Words {
    /// As bytes.
    pub fn bytes(&self) -> [u8; WORDS_LEN] {
        let (sort, nonce, asked, card) = match *self {
            Self::Question { nonce, asked } => (QUESTION, nonce, asked, None),
            Self::Answer { nonce, asked, card } => (ANSWER, nonce, asked, Some(card)),
        };
        let mut bytes = [0; WORDS_LEN];
        let mut put = |at: usize, part: &[u8]| bytes[at..at + part.len()].copy_from_slice(part);
        put(0, &MAGIC);
        put(4, &[DATAGRAM_VERSION, sort]);
        put(8, &nonce.to_le_bytes());
        let ip = match asked.ip().to_canonical() {
            IpAddr::V4(ip) => ip.to_ipv6_mapped(),
            IpAddr::V6(ip) => ip,
        };
        put(16, &ip.octets());
        put(32, &asked.port().to_le_bytes());
        if let Some(card) = card {
            put(34, &card.port.to_le_bytes());
            put(36, &card.qpn.to_le_bytes());
            put(40, &card.qkey.to_le_bytes());
            put(44, &card.longest.to_le_bytes());
        }
        bytes
    }

    /// Reads them.
    ///
    /// # Errors
    /// If these are no such words.
    pub fn read(bytes: &[u8]) -> Result<Self, Strange> {
        let bytes: &[u8; WORDS_LEN] = bytes.try_into().map_err(|_| Strange::Length)?;
        if bytes[..4] != MAGIC {
            return Err(Strange::Magic);
        }
        if bytes[4] != DATAGRAM_VERSION {
            return Err(Strange::Version(bytes[4]));
        }
        let nonce = u64::from_le_bytes(part(bytes, 8));
        let ip = IpAddr::V6(Ipv6Addr::from(part::<16>(bytes, 16))).to_canonical();
        let asked = SocketAddr::new(ip, u16::from_le_bytes(part(bytes, 32)));
        if bytes[6..8] != [0; 2] {
            return Err(Strange::Padding);
        }
        match bytes[5] {
            QUESTION if bytes[34..] != [0; 14] => Err(Strange::Padding),
            QUESTION => Ok(Self::Question { nonce, asked }),
            ANSWER => {
                let word = |at| u32::from_le_bytes(part(bytes, at));
                let port = u16::from_le_bytes(part(bytes, 34));
                let card = Card { port, qpn: word(36), qkey: word(40), longest: word(44) };
                card.check()?;
                Ok(Self::Answer { nonce, asked, card })
            }
            sort => Err(Strange::Sort(sort)),
        }
    }
}

/// What stands before a datagram's bytes: the port of its sender. The sender's address is that of the packet.
///
/// ```
/// use warpwire::sock::warp::Header;
/// let header = Header { port: 7000 };
/// assert_eq!(Header::read(&header.bytes()), Ok(header));
/// assert!(Header::read(&[0; 8]).is_err());
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The port that the sender's socket is bound to.
    pub port: u16,
}

impl Header {
    const MAGIC: [u8; 2] = *b"Wd";

    /// As bytes.
    pub fn bytes(self) -> [u8; HEADER_LEN] {
        let [low, high] = self.port.to_le_bytes();
        [Self::MAGIC[0], Self::MAGIC[1], DATAGRAM_VERSION, 0, low, high, 0, 0]
    }

    /// Reads it.
    ///
    /// # Errors
    /// If it is none.
    pub fn read(bytes: &[u8]) -> Result<Self, Strange> {
        let bytes: &[u8; HEADER_LEN] = bytes.try_into().map_err(|_| Strange::Length)?;
        if bytes[..2] != Self::MAGIC {
            return Err(Strange::Magic);
        }
        if bytes[2] != DATAGRAM_VERSION {
            return Err(Strange::Version(bytes[2]));
        }
        if bytes[3] != 0 || bytes[6..] != [0; 2] {
            return Err(Strange::Padding);
        }
        let port = u16::from_le_bytes([bytes[4], bytes[5]]);
        if port == 0 { Err(Strange::Card) } else { Ok(Self { port }) }
    }
}

fn part<const N: usize>(bytes: &[u8; WORDS_LEN], at: usize) -> [u8; N] {
    std::array::from_fn(|n| bytes[at + n])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const CARD: Card = Card { port: 4791, qpn: 17, qkey: 0x1234, longest: 4088 };

    fn answer() -> [u8; WORDS_LEN] {
        Words::Answer { nonce: 7, asked: "[fd00::1]:9".parse().unwrap(), card: CARD }.bytes()
    }

    #[test]
    fn what_is_said_is_heard() {
        for asked in ["127.0.0.1:7", "[fd00::2]:65535", "0.0.0.0:0"] {
            let asked = asked.parse().unwrap();
            for words in [
                Words::Question { nonce: u64::MAX, asked },
                Words::Answer { nonce: 1, asked, card: CARD },
            ] {
                assert_eq!(Words::read(&words.bytes()), Ok(words));
            }
        }
        let mapped = Words::Question { nonce: 1, asked: "[::ffff:10.0.0.1]:5".parse().unwrap() };
        let plain = Words::Question { nonce: 1, asked: "10.0.0.1:5".parse().unwrap() };
        assert_eq!(Words::read(&mapped.bytes()), Ok(plain));
    }

    #[test]
    fn the_bytes_are_as_documented() {
        let bytes =
            Words::Answer { nonce: 0x0807, asked: "1.2.3.4:258".parse().unwrap(), card: CARD };
        let expected = [
            b'W', b'D', b'G', b'M', 1, 2, 0, 0, 7, 8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
            0, 0xff, 0xff, 1, 2, 3, 4, 2, 1, 0xb7, 0x12, 17, 0, 0, 0, 0x34, 0x12, 0, 0, 0xf8, 0x0f,
            0, 0,
        ];
        assert_eq!(bytes.bytes(), expected);
        assert_eq!(Header { port: 0x0102 }.bytes(), [b'W', b'd', 1, 0, 2, 1, 0, 0]);
    }

    #[test]
    fn what_makes_no_sense_is_strange() {
        let spoilt: [(usize, u8, Strange); 8] = [
            (0, b'X', Strange::Magic),
            (4, 2, Strange::Version(2)),
            (5, 3, Strange::Sort(3)),
            (6, 1, Strange::Padding),
            (39, 1, Strange::Card),
            (43, 0x80, Strange::Card),
            (46, 1, Strange::Card),
            (36, 0, Strange::Card),
        ];
        for (at, value, why) in spoilt {
            let mut bytes = answer();
            bytes[at] = value;
            assert_eq!(Words::read(&bytes), Err(why), "byte {at}");
        }
        let mut question = answer();
        question[5] = QUESTION;
        assert_eq!(Words::read(&question), Err(Strange::Padding), "a question with a card");
        assert_eq!(Words::read(&answer()[1..]), Err(Strange::Length));
        assert_eq!(Words::read(&[answer().as_slice(), &[0]].concat()), Err(Strange::Length));
        for (at, value, why) in [
            (0, 0, Strange::Magic),
            (2, 9, Strange::Version(9)),
            (3, 1, Strange::Padding),
            (7, 1, Strange::Padding),
            (4, 0, Strange::Card),
        ] {
            let mut bytes = Header { port: 5 }.bytes();
            bytes[at] = value;
            assert_eq!(Header::read(&bytes), Err(why), "byte {at}");
            assert!(!why.to_string().is_empty());
        }
        assert_eq!(Header::read(&[]), Err(Strange::Length));
    }

    proptest! {
        #[test]
        fn what_is_understood_is_said_in_the_same_bytes(
            mut bytes in prop::collection::vec(any::<u8>(), WORDS_LEN..=WORDS_LEN),
            sort in 0_u8..4,
        ) {
            bytes[..8].copy_from_slice(&[b'W', b'D', b'G', b'M', 1, sort, 0, 0]);
            if let Ok(words) = Words::read(&bytes) {
                prop_assert_eq!(&words.bytes()[..], &bytes[..]);
            }
            let _ = Header::read(&bytes[..8]);
        }
    }
}
