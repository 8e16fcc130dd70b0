//! Message headers: kind, tag, length, and for rendezvous messages the ranges of the sender's
//! memory.

use super::rendezvous::VERSION;

/// Header length in bytes; the payload follows.
pub(super) const HEADER_LEN: usize = 64;
/// Encoded length of a [`RemoteRange`] in bytes.
pub(super) const RANGE_LEN: usize = 24;
/// Maximum number of slices of a message.
pub(super) const MAX_SLICES: usize = 15;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The payload follows the header.
    Eager,
    /// Ranges of the sender's memory follow, from which the receiver reads the message.
    Rendezvous,
    /// The receiver has read the rendezvous message with this id.
    Done,
    /// Returns credits only.
    Credit,
}

/// Messages of different channels never match.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Channel {
    /// Messages of the application.
    User,
    /// Messages of windows and collectives.
    Internal,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: Kind,
    pub channel: Channel,
    /// Number of ranges that follow.
    pub ranges: u8,
    /// Number of receives that the sender has reposted (piggy-backed credits).
    pub credits: u32,
    pub tag: u32,
    /// Length of the message.
    pub len: u64,
    /// The sender's id of the message.
    pub id: u64,
}

/// A range of registered memory of a peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RemoteRange {
    pub address: u64,
    pub len: u64,
    pub rkey: u32,
}

/// The first byte of each header.
const MARK: u8 = 0x57;

impl Header {
    pub fn encode(&self) -> [u8; HEADER_LEN] {
        let mut bytes = [0; HEADER_LEN];
        bytes[0] = MARK;
        bytes[1] = VERSION as u8;
        bytes[2] = match self.kind {
            Kind::Eager => 1,
            Kind::Rendezvous => 2,
            Kind::Done => 3,
            Kind::Credit => 4,
        };
        bytes[3] = match self.channel {
            Channel::User => 0,
            Channel::Internal => 1,
        };
        bytes[4] = self.ranges;
        bytes[8..12].copy_from_slice(&self.credits.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.tag.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.len.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.id.to_le_bytes());
        bytes
    }

    /// Parses a header; `None` if it is malformed.
    pub fn parse(bytes: &[u8; HEADER_LEN]) -> Option<Self> {
        let kind = match bytes[2] {
            1 => Kind::Eager,
            2 => Kind::Rendezvous,
            3 => Kind::Done,
            4 => Kind::Credit,
            _ => return None,
        };
        let channel = match bytes[3] {
            0 => Channel::User,
            1 => Channel::Internal,
            _ => return None,
        };
        if bytes[0] != MARK || u32::from(bytes[1]) != VERSION {
            return None;
        }
        Some(Self {
            kind,
            channel,
            ranges: bytes[4],
            credits: u32::from_le_bytes(bytes[8..12].try_into().ok()?),
            tag: u32::from_le_bytes(bytes[12..16].try_into().ok()?),
            len: u64::from_le_bytes(bytes[16..24].try_into().ok()?),
            id: u64::from_le_bytes(bytes[24..32].try_into().ok()?),
        })
    }

    /// Whether a message of `arrived` bytes, including the header, is consistent with this header.
    pub fn fits(&self, arrived: u64) -> bool {
        let body = match self.kind {
            Kind::Eager => self.len,
            Kind::Rendezvous => u64::from(self.ranges) * RANGE_LEN as u64,
            Kind::Done | Kind::Credit => 0,
        };
        let ranges = match self.kind {
            Kind::Rendezvous => 1..=MAX_SLICES,
            _ => 0..=0,
        };
        ranges.contains(&usize::from(self.ranges))
            && body.checked_add(HEADER_LEN as u64) == Some(arrived)
    }
}

impl RemoteRange {
    pub fn encode(&self) -> [u8; RANGE_LEN] {
        let mut bytes = [0; RANGE_LEN];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.len.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.rkey.to_le_bytes());
        bytes
    }

    pub fn parse(bytes: &[u8; RANGE_LEN]) -> Self {
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|index| bytes[at + index]));
        Self { address: word(0), len: word(8), rkey: word(16) as u32 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_round_trip() {
        let all = [Kind::Eager, Kind::Rendezvous, Kind::Done, Kind::Credit];
        for (ranges, kind) in all.into_iter().enumerate() {
            for channel in [Channel::User, Channel::Internal] {
                let (credits, tag, len, id) = (7, u32::MAX, 1 << 40, u64::MAX - 3);
                let header = Header { kind, channel, ranges: ranges as u8, credits, tag, len, id };
                assert_eq!(Header::parse(&header.encode()), Some(header));
            }
        }
        let range = RemoteRange { address: u64::MAX - 9, len: 1 << 33, rkey: 0xdead_beef };
        assert_eq!(RemoteRange::parse(&range.encode()), range);
    }

    #[test]
    fn malformed_headers_are_rejected() {
        let good = Header {
            kind: Kind::Eager,
            channel: Channel::User,
            ranges: 0,
            credits: 0,
            tag: 1,
            len: 10,
            id: 0,
        };
        let bytes = good.encode();
        for (at, value) in [(0, 0), (1, 9), (2, 0), (2, 5), (3, 2)] {
            let mut wrong = bytes;
            wrong[at] = value;
            assert_eq!(Header::parse(&wrong), None, "byte {at}");
        }
        assert!(good.fits(74) && !good.fits(73) && !good.fits(64));
        assert!(!Header { len: u64::MAX, ..good }.fits(63));
        assert!(!Header { ranges: 1, ..good }.fits(74));
        let rendezvous = Header { kind: Kind::Rendezvous, len: 1 << 50, ..good };
        assert!(!rendezvous.fits(64), "no ranges");
        assert!(Header { ranges: 2, ..rendezvous }.fits(112));
        assert!(!Header { ranges: 16, ..rendezvous }.fits(64 + 16 * 24));
    }
}
