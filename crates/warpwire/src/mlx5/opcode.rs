//! What a send queue entry asks for.

use std::fmt;

/// The operations of a send queue.
///
/// ```
/// use warpwire::mlx5::Opcode;
/// assert_eq!(Opcode::from_code(0x08), Opcode::RdmaWrite);
/// assert_eq!(Opcode::RdmaWrite.code(), 0x08);
/// assert_eq!(Opcode::from_code(0x77), Opcode::Unknown(0x77));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Opcode {
    /// Nothing, in order.
    Nop,
    /// A message that also invalidates a key of the receiver.
    SendInvalidate,
    /// Bytes placed in the peer's memory.
    RdmaWrite,
    /// The same, and a receive of the peer completes with four bytes.
    RdmaWriteImm,
    /// A message.
    Send,
    /// A message with four bytes beside it.
    SendImm,
    /// Hold the queue until a completion queue has got so far.
    Wait,
    /// Bytes fetched from the peer's memory.
    RdmaRead,
    /// Compare and swap of a 64-bit word of the peer.
    CompareSwap,
    /// Addition to a 64-bit word of the peer.
    FetchAdd,
    /// Compare and swap under masks.
    MaskedCompareSwap,
    /// Addition to fields of a word.
    MaskedFetchAdd,
    /// Invalidation of a local key.
    LocalInvalidate,
    /// Signature set-up.
    SetPsv,
    /// A read of local memory that goes nowhere.
    Dump,
    /// A change of memory keys.
    Umr,
    /// Memory-to-memory work of the NIC.
    Mmo,
    /// A number that is in no table of ours.
    Unknown(u8),
}

/// Every operation with its number and its name.
const TABLE: [(u8, Opcode, &str); 17] = [
    (0x00, Opcode::Nop, "NOP"),
    (0x01, Opcode::SendInvalidate, "SEND_INVAL"),
    (0x08, Opcode::RdmaWrite, "RDMA_WRITE"),
    (0x09, Opcode::RdmaWriteImm, "RDMA_WRITE_IMM"),
    (0x0a, Opcode::Send, "SEND"),
    (0x0b, Opcode::SendImm, "SEND_IMM"),
    (0x0f, Opcode::Wait, "WAIT"),
    (0x10, Opcode::RdmaRead, "RDMA_READ"),
    (0x11, Opcode::CompareSwap, "ATOMIC_CS"),
    (0x12, Opcode::FetchAdd, "ATOMIC_FA"),
    (0x14, Opcode::MaskedCompareSwap, "MASKED_CS"),
    (0x15, Opcode::MaskedFetchAdd, "MASKED_FA"),
    (0x1b, Opcode::LocalInvalidate, "LOCAL_INVAL"),
    (0x20, Opcode::SetPsv, "SET_PSV"),
    (0x23, Opcode::Dump, "DUMP"),
    (0x25, Opcode::Umr, "UMR"),
    (0x2f, Opcode::Mmo, "MMO"),
];

/// The table by number, so that the engine finds an operation by one load.
const BY_CODE: [Opcode; 256] = {
    let mut all = [Opcode::Nop; 256];
    let mut code = 0;
    while code < 256 {
        all[code] = Opcode::Unknown(code as u8);
        code += 1;
    }
    let mut row = 0;
    while row < TABLE.len() {
        all[TABLE[row].0 as usize] = TABLE[row].1;
        row += 1;
    }
    all
};

impl Opcode {
    /// The operation of that number.
    #[inline]
    pub const fn from_code(code: u8) -> Self {
        BY_CODE[code as usize]
    }

    /// Its number.
    #[inline]
    pub fn code(self) -> u8 {
        match self {
            Self::Unknown(code) => code,
            known => TABLE.iter().find(|(_, one, _)| *one == known).map_or(0, |(code, ..)| *code),
        }
    }

    /// Whether the peer's memory is named by a segment of its own.
    pub const fn has_remote(self) -> bool {
        matches!(
            self,
            Self::RdmaWrite
                | Self::RdmaWriteImm
                | Self::RdmaRead
                | Self::CompareSwap
                | Self::FetchAdd
                | Self::MaskedCompareSwap
                | Self::MaskedFetchAdd
        )
    }
}

impl fmt::Display for Opcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self, TABLE.iter().find(|(_, one, _)| one == self)) {
            (_, Some((_, _, name))) => f.pad(name),
            (other, None) => write!(f, "opcode {:#04x}", other.code()),
        }
    }
}
