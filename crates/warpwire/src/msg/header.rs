//! What stands before a message: who it is for, how long it is, and where the rest lies.

use super::rendezvous::VERSION;

/// How long a header is; the message follows.
pub(super) const HEADER_LEN: usize = 64;
/// How long the name of a range of the sender's memory is.
pub(super) const RANGE_LEN: usize = 24;
/// The most parts that a message is made of.
pub(super) const MAX_SLICES: usize = 15;

/// What a message is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The whole message is here.
    Eager,
    /// The message lies in these ranges, and is fetched from there.
    Rendezvous,
    /// The message with this number was fetched.
    Done,
    /// Nothing but credits.
    Credit,
}

/// Messages of different channels do not meet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Channel {
    /// The program's.
    User,
    /// Windows and collectives.
    Internal,
}

/// A header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Header {
    pub kind: Kind,
    pub channel: Channel,
    /// How many ranges follow.
    pub ranges: u8,
    /// How many receives are free again.
    pub credits: u32,
    pub tag: u32,
    /// How long the message is.
    pub len: u64,
    /// What its sender calls it.
    pub id: u64,
}

/// A range of the sender's memory.
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

    /// Reads a header; nothing if it is none.
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

    /// Whether a message of so many bytes, header included, is what this header says.
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
    fn headers_come_back() {
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
    fn what_is_none_is_refused() {
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
