//! What a packet does, and which headers follow.

/// A transport opcode. Those of other services, and those to come, are [`Opcode::Unknown`].
///
/// ```
/// use warpwire_proto::wire::{Opcode, Position};
/// let opcode = Opcode::from_byte(0x0a);
/// assert_eq!(opcode, Opcode::WriteOnly);
/// assert_eq!(opcode.position(), Position::Only);
/// assert_eq!(Opcode::from_byte(0x42).byte(), 0x42);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the names are the specification's
pub enum Opcode {
    SendFirst,
    SendMiddle,
    SendLast,
    SendLastImm,
    SendOnly,
    SendOnlyImm,
    WriteFirst,
    WriteMiddle,
    WriteLast,
    WriteLastImm,
    WriteOnly,
    WriteOnlyImm,
    ReadRequest,
    ReadResponseFirst,
    ReadResponseMiddle,
    ReadResponseLast,
    ReadResponseOnly,
    Acknowledge,
    AtomicAcknowledge,
    CompareSwap,
    FetchAdd,
    SendLastInvalidate,
    SendOnlyInvalidate,
    UdSendOnly,
    UdSendOnlyImm,
    CongestionNotification,
    /// Any other.
    Unknown(u8),
}

/// Where in its message a packet stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// The first of several.
    First,
    /// Neither the first nor the last.
    Middle,
    /// The last of several.
    Last,
    /// The only one.
    Only,
}

/// Which headers follow the base header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Plain,
    Imm,
    Reth,
    RethImm,
    Aeth,
    AethAtomic,
    Atomic,
    Invalidate,
    Deth,
    DethImm,
    Cnp,
}

impl Shape {
    /// The length of those headers.
    pub(super) const fn len(self) -> usize {
        match self {
            Self::Plain => 0,
            Self::Imm | Self::Aeth | Self::Invalidate => 4,
            Self::Reth | Self::Cnp => 16,
            Self::RethImm => 20,
            Self::AethAtomic | Self::DethImm => 12,
            Self::Atomic => 28,
            Self::Deth => 8,
        }
    }
}

use Position::{First, Last, Middle, Only};

/// All opcodes that are known here: byte, name in logs, place in the message, headers that follow.
const TABLE: [(u8, Opcode, &str, Position, Shape); 26] = [
    (0x00, Opcode::SendFirst, "SEND_FIRST", First, Shape::Plain),
    (0x01, Opcode::SendMiddle, "SEND_MIDDLE", Middle, Shape::Plain),
    (0x02, Opcode::SendLast, "SEND_LAST", Last, Shape::Plain),
    (0x03, Opcode::SendLastImm, "SEND_LAST_IMM", Last, Shape::Imm),
    (0x04, Opcode::SendOnly, "SEND_ONLY", Only, Shape::Plain),
    (0x05, Opcode::SendOnlyImm, "SEND_ONLY_IMM", Only, Shape::Imm),
    (0x06, Opcode::WriteFirst, "WRITE_FIRST", First, Shape::Reth),
    (0x07, Opcode::WriteMiddle, "WRITE_MIDDLE", Middle, Shape::Plain),
    (0x08, Opcode::WriteLast, "WRITE_LAST", Last, Shape::Plain),
    (0x09, Opcode::WriteLastImm, "WRITE_LAST_IMM", Last, Shape::Imm),
    (0x0a, Opcode::WriteOnly, "WRITE_ONLY", Only, Shape::Reth),
    (0x0b, Opcode::WriteOnlyImm, "WRITE_ONLY_IMM", Only, Shape::RethImm),
    (0x0c, Opcode::ReadRequest, "READ_REQUEST", Only, Shape::Reth),
    (0x0d, Opcode::ReadResponseFirst, "READ_RESPONSE_FIRST", First, Shape::Aeth),
    (0x0e, Opcode::ReadResponseMiddle, "READ_RESPONSE_MIDDLE", Middle, Shape::Plain),
    (0x0f, Opcode::ReadResponseLast, "READ_RESPONSE_LAST", Last, Shape::Aeth),
    (0x10, Opcode::ReadResponseOnly, "READ_RESPONSE_ONLY", Only, Shape::Aeth),
    (0x11, Opcode::Acknowledge, "ACK", Only, Shape::Aeth),
    (0x12, Opcode::AtomicAcknowledge, "ATOMIC_ACK", Only, Shape::AethAtomic),
    (0x13, Opcode::CompareSwap, "CMP_SWAP", Only, Shape::Atomic),
    (0x14, Opcode::FetchAdd, "FETCH_ADD", Only, Shape::Atomic),
    (0x16, Opcode::SendLastInvalidate, "SEND_LAST_INV", Last, Shape::Invalidate),
    (0x17, Opcode::SendOnlyInvalidate, "SEND_ONLY_INV", Only, Shape::Invalidate),
    (0x64, Opcode::UdSendOnly, "UD_SEND_ONLY", Only, Shape::Deth),
    (0x65, Opcode::UdSendOnlyImm, "UD_SEND_ONLY_IMM", Only, Shape::DethImm),
    (0x81, Opcode::CongestionNotification, "CNP", Only, Shape::Cnp),
];

/// From a byte to its row in the table; `NONE` where there is none.
const ROWS: [u8; 256] = {
    let mut rows = [NONE; 256];
    let mut row = 0;
    while row < TABLE.len() {
        rows[TABLE[row].0 as usize] = row as u8;
        row += 1;
    }
    rows
};
const NONE: u8 = u8::MAX;

impl Opcode {
    /// All that are known.
    pub fn all() -> impl Iterator<Item = Self> {
        TABLE.iter().map(|(_, opcode, ..)| *opcode)
    }

    /// The opcode in that byte.
    pub fn from_byte(byte: u8) -> Self {
        TABLE.get(usize::from(ROWS[usize::from(byte)])).map_or(Self::Unknown(byte), |row| row.1)
    }

    /// The byte on the wire.
    pub fn byte(self) -> u8 {
        match self {
            Self::Unknown(byte) => byte,
            known => known.row().map_or(0, |row| row.0),
        }
    }

    /// Its name in logs.
    pub fn name(self) -> &'static str {
        self.row().map_or("UNKNOWN", |row| row.2)
    }

    /// Where in its message such a packet stands.
    pub fn position(self) -> Position {
        self.row().map_or(Only, |row| row.3)
    }

    /// Whether it answers a request: such packets go to the requester.
    pub fn is_response(self) -> bool {
        matches!(
            self,
            Self::ReadResponseFirst
                | Self::ReadResponseMiddle
                | Self::ReadResponseLast
                | Self::ReadResponseOnly
                | Self::Acknowledge
                | Self::AtomicAcknowledge
        )
    }

    pub(super) fn shape(self) -> Option<Shape> {
        self.row().map(|row| row.4)
    }

    fn row(self) -> Option<&'static (u8, Self, &'static str, Position, Shape)> {
        TABLE.iter().find(|row| row.1 == self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_is_an_opcode_and_comes_back() {
        for byte in 0..=255 {
            assert_eq!(Opcode::from_byte(byte).byte(), byte);
        }
        assert_eq!(Opcode::all().count(), TABLE.len());
        assert_eq!(Opcode::Unknown(0x55).shape(), None);
    }
}
