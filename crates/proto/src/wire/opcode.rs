//! Transport opcodes, and which headers follow them.

use super::ext::Sack;

/// The position of a packet in its message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Position {
    /// The first of several.
    First,
    /// Neither the first nor the last.
    Middle,
    /// The last of several.
    Last,
    /// The only packet of its message.
    Only,
}

/// The extension headers of a packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExtKind {
    Plain,
    Imm,
    Reth,
    RethImm,
    Aeth,
    AethAtomic,
    /// Of a sequence-error NAK between ends that negotiated it; no opcode has it always.
    AethSack,
    Atomic,
    MaskedAtomic,
    Invalidate,
    Deth,
    DethImm,
    Cnp,
}

impl ExtKind {
    /// Their total length in bytes.
    #[inline]
    pub(super) const fn len(self) -> usize {
        match self {
            Self::Plain => 0,
            Self::Imm | Self::Aeth | Self::Invalidate => 4,
            Self::Reth | Self::Cnp => 16,
            Self::RethImm => 20,
            Self::AethAtomic | Self::DethImm => 12,
            Self::Atomic => 28,
            Self::MaskedAtomic => 44,
            Self::AethSack => 4 + Sack::LEN,
            Self::Deth => 8,
        }
    }
}

/// The properties of an opcode.
struct Row {
    byte: u8,
    name: &'static str,
    position: Position,
    ext_kind: Option<ExtKind>,
}

/// Generates the enum and its lookup table from one list, so that they cannot disagree.
macro_rules! opcodes {
    ($($byte:literal $opcode:ident $name:literal $position:ident $ext_kind:ident,)*) => {
        /// A transport opcode. Opcodes of other services and reserved ones are [`Opcode::Unknown`].
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
            $($opcode,)*
            /// Any other value.
            Unknown(u8),
        }

        const KNOWN: &[Opcode] = &[$(Opcode::$opcode,)*];

        /// In the order of the enum; the last row is for unknown opcodes.
        static TABLE: [Row; KNOWN.len() + 1] = [
            $(Row {
                byte: $byte,
                name: $name,
                position: Position::$position,
                ext_kind: Some(ExtKind::$ext_kind),
            },)*
            Row { byte: 0, name: "UNKNOWN", position: Position::Only, ext_kind: None },
        ];

        impl Opcode {
            /// The table row, without a search: this is called several times per packet.
            #[inline]
            fn row(self) -> &'static Row {
                enum RowIndex {
                    $($opcode,)*
                    Unknown,
                }
                // Both enums have the same discriminants: this match compiles to nothing.
                let index = match self {
                    $(Self::$opcode => RowIndex::$opcode,)*
                    Self::Unknown(_) => RowIndex::Unknown,
                };
                &TABLE[index as usize]
            }
        }
    };
}

// Byte, opcode, name in logs, position in the message, extension headers. Opcodes from 0xc0 on are
// in the range reserved for manufacturers and defined here: ConnectX supports masked atomics, and
// no specification defines them on the wire.
opcodes! {
    0x00 SendFirst "SEND_FIRST" First Plain,
    0x01 SendMiddle "SEND_MIDDLE" Middle Plain,
    0x02 SendLast "SEND_LAST" Last Plain,
    0x03 SendLastImm "SEND_LAST_IMM" Last Imm,
    0x04 SendOnly "SEND_ONLY" Only Plain,
    0x05 SendOnlyImm "SEND_ONLY_IMM" Only Imm,
    0x06 WriteFirst "WRITE_FIRST" First Reth,
    0x07 WriteMiddle "WRITE_MIDDLE" Middle Plain,
    0x08 WriteLast "WRITE_LAST" Last Plain,
    0x09 WriteLastImm "WRITE_LAST_IMM" Last Imm,
    0x0a WriteOnly "WRITE_ONLY" Only Reth,
    0x0b WriteOnlyImm "WRITE_ONLY_IMM" Only RethImm,
    0x0c ReadRequest "READ_REQUEST" Only Reth,
    0x0d ReadResponseFirst "READ_RESPONSE_FIRST" First Aeth,
    0x0e ReadResponseMiddle "READ_RESPONSE_MIDDLE" Middle Plain,
    0x0f ReadResponseLast "READ_RESPONSE_LAST" Last Aeth,
    0x10 ReadResponseOnly "READ_RESPONSE_ONLY" Only Aeth,
    0x11 Acknowledge "ACK" Only Aeth,
    0x12 AtomicAcknowledge "ATOMIC_ACK" Only AethAtomic,
    0x13 CompareSwap "CMP_SWAP" Only Atomic,
    0x14 FetchAdd "FETCH_ADD" Only Atomic,
    0x16 SendLastInvalidate "SEND_LAST_INV" Last Invalidate,
    0x17 SendOnlyInvalidate "SEND_ONLY_INV" Only Invalidate,
    0x20 UcSendFirst "UC_SEND_FIRST" First Plain,
    0x21 UcSendMiddle "UC_SEND_MIDDLE" Middle Plain,
    0x22 UcSendLast "UC_SEND_LAST" Last Plain,
    0x23 UcSendLastImm "UC_SEND_LAST_IMM" Last Imm,
    0x24 UcSendOnly "UC_SEND_ONLY" Only Plain,
    0x25 UcSendOnlyImm "UC_SEND_ONLY_IMM" Only Imm,
    0x26 UcWriteFirst "UC_WRITE_FIRST" First Reth,
    0x27 UcWriteMiddle "UC_WRITE_MIDDLE" Middle Plain,
    0x28 UcWriteLast "UC_WRITE_LAST" Last Plain,
    0x29 UcWriteLastImm "UC_WRITE_LAST_IMM" Last Imm,
    0x2a UcWriteOnly "UC_WRITE_ONLY" Only Reth,
    0x2b UcWriteOnlyImm "UC_WRITE_ONLY_IMM" Only RethImm,
    0x64 UdSendOnly "UD_SEND_ONLY" Only Deth,
    0x65 UdSendOnlyImm "UD_SEND_ONLY_IMM" Only DethImm,
    0x81 CongestionNotification "CNP" Only Cnp,
    0xc0 MaskedCompareSwap "MASKED_CMP_SWAP" Only MaskedAtomic,
    0xc1 MaskedFetchAdd "MASKED_FETCH_ADD" Only Atomic,
    0xc2 MaskedCompareSwap4 "MASKED_CMP_SWAP_4" Only MaskedAtomic,
    0xc3 MaskedFetchAdd4 "MASKED_FETCH_ADD_4" Only Atomic,
}

/// The opcode of every byte.
static BY_BYTE: [Opcode; 256] = {
    let mut opcodes = [Opcode::Unknown(0); 256];
    let mut byte = 0;
    while byte < opcodes.len() {
        opcodes[byte] = Opcode::Unknown(byte as u8);
        byte += 1;
    }
    let mut row = 0;
    while row < KNOWN.len() {
        opcodes[TABLE[row].byte as usize] = KNOWN[row];
        row += 1;
    }
    opcodes
};

impl Opcode {
    /// Parses the byte on the wire.
    #[inline]
    pub fn from_byte(byte: u8) -> Self {
        BY_BYTE[usize::from(byte)]
    }

    /// The byte on the wire.
    #[inline]
    pub fn byte(self) -> u8 {
        match self {
            Self::Unknown(byte) => byte,
            known => known.row().byte,
        }
    }

    /// The name in logs.
    pub fn name(self) -> &'static str {
        self.row().name
    }

    /// The position of such a packet in its message.
    #[inline]
    pub fn position(self) -> Position {
        self.row().position
    }

    /// Whether it is of the service UC.
    #[inline]
    pub const fn is_uc(self) -> bool {
        use Opcode::{
            UcSendFirst, UcSendLast, UcSendLastImm, UcSendMiddle, UcSendOnly, UcSendOnlyImm,
        };
        let is_send = matches!(
            self,
            UcSendFirst | UcSendMiddle | UcSendLast | UcSendLastImm | UcSendOnly | UcSendOnlyImm
        );
        is_send || self.is_uc_write()
    }

    /// Whether it is of an RDMA write of the service UC.
    #[inline]
    pub const fn is_uc_write(self) -> bool {
        use Opcode::{
            UcWriteFirst, UcWriteLast, UcWriteLastImm, UcWriteMiddle, UcWriteOnly, UcWriteOnlyImm,
        };
        matches!(
            self,
            UcWriteFirst
                | UcWriteMiddle
                | UcWriteLast
                | UcWriteLastImm
                | UcWriteOnly
                | UcWriteOnlyImm
        )
    }

    #[inline]
    pub(super) fn ext_kind(self) -> Option<ExtKind> {
        self.row().ext_kind
    }

    /// All known opcodes.
    pub fn all() -> impl Iterator<Item = Self> {
        KNOWN.iter().copied()
    }

    /// Whether it is a response, to be handled by the requester.
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
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_round_trips() {
        for byte in 0..=255 {
            assert_eq!(Opcode::from_byte(byte).byte(), byte);
        }
        assert_eq!(Opcode::all().count(), 42);
        assert_eq!(Opcode::Unknown(0x55).ext_kind(), None);
    }
}
