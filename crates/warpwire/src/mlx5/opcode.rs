//! Send opcodes.

use std::fmt;

/// Opcode of a send WQE.
///
/// ```
/// use warpwire::mlx5::Opcode;
/// assert_eq!(Opcode::from_code(0x08), Opcode::RdmaWrite);
/// assert_eq!(Opcode::RdmaWrite.code(), 0x08);
/// assert_eq!(Opcode::from_code(0x77), Opcode::Unknown(0x77));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Opcode {
    /// No operation; completes in order.
    Nop,
    /// A send that invalidates an rkey of the receiver.
    SendInvalidate,
    /// RDMA write.
    RdmaWrite,
    /// RDMA write that also consumes a receive of the peer, with immediate data.
    RdmaWriteImm,
    /// Send.
    Send,
    /// Send with immediate data.
    SendImm,
    /// Stalls the queue until a completion queue has reached an index.
    Wait,
    /// RDMA read.
    RdmaRead,
    /// Compare-and-swap of a remote 64-bit word.
    CompareSwap,
    /// Fetch-and-add of a remote 64-bit word.
    FetchAdd,
    /// Masked compare-and-swap.
    MaskedCompareSwap,
    /// Masked fetch-and-add.
    MaskedFetchAdd,
    /// Local invalidation of a key; not supported here.
    LocalInvalidate,
    /// Signature set-up; not supported here.
    SetPsv,
    /// Reads local memory and discards the data.
    Dump,
    /// User-mode memory registration; not supported here.
    Umr,
    /// Memory-to-memory offloads of the NIC; not supported here.
    Mmo,
    /// An unknown opcode.
    Unknown(u8),
}

/// Every opcode with its code and name.
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

/// The table by code, so that a lookup is one load.
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
    /// The opcode with this code.
    #[inline]
    pub const fn from_code(code: u8) -> Self {
        BY_CODE[code as usize]
    }

    /// Its code in the control segment.
    #[inline]
    pub fn code(self) -> u8 {
        match self {
            Self::Unknown(code) => code,
            known => TABLE.iter().find(|(_, one, _)| *one == known).map_or(0, |(code, ..)| *code),
        }
    }

    /// Whether its WQE has a remote address segment.
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
