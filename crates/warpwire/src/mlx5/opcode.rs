//! Send opcodes.

use std::fmt;

/// WqeOpcode of a send WQE.
///
/// ```
/// use warpwire::mlx5::WqeOpcode;
/// assert_eq!(WqeOpcode::from_code(0x08), WqeOpcode::RdmaWrite);
/// assert_eq!(WqeOpcode::RdmaWrite.code(), 0x08);
/// assert_eq!(WqeOpcode::from_code(0x77), WqeOpcode::Unknown(0x77));
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WqeOpcode {
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
    /// Binds a memory window: the operation of ConnectX-3, for which later NICs use [`Umr`].
    ///
    /// [`Umr`]: Self::Umr
    BindMw,
    /// Local invalidation of a key: the operation of ConnectX-3, as for
    /// [`BindMw`](Self::BindMw).
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
const TABLE: [(u8, WqeOpcode, &str); 18] = [
    (0x00, WqeOpcode::Nop, "NOP"),
    (0x01, WqeOpcode::SendInvalidate, "SEND_INVAL"),
    (0x08, WqeOpcode::RdmaWrite, "RDMA_WRITE"),
    (0x09, WqeOpcode::RdmaWriteImm, "RDMA_WRITE_IMM"),
    (0x0a, WqeOpcode::Send, "SEND"),
    (0x0b, WqeOpcode::SendImm, "SEND_IMM"),
    (0x0f, WqeOpcode::Wait, "WAIT"),
    (0x10, WqeOpcode::RdmaRead, "RDMA_READ"),
    (0x11, WqeOpcode::CompareSwap, "ATOMIC_CS"),
    (0x12, WqeOpcode::FetchAdd, "ATOMIC_FA"),
    (0x14, WqeOpcode::MaskedCompareSwap, "MASKED_CS"),
    (0x15, WqeOpcode::MaskedFetchAdd, "MASKED_FA"),
    (0x18, WqeOpcode::BindMw, "BIND_MW"),
    (0x1b, WqeOpcode::LocalInvalidate, "LOCAL_INVAL"),
    (0x20, WqeOpcode::SetPsv, "SET_PSV"),
    (0x23, WqeOpcode::Dump, "DUMP"),
    (0x25, WqeOpcode::Umr, "UMR"),
    (0x2f, WqeOpcode::Mmo, "MMO"),
];

/// The table by code, so that a lookup is one load.
const BY_CODE: [WqeOpcode; 256] = {
    let mut all = [WqeOpcode::Nop; 256];
    let mut code = 0;
    while code < 256 {
        all[code] = WqeOpcode::Unknown(code as u8);
        code += 1;
    }
    let mut row = 0;
    while row < TABLE.len() {
        all[TABLE[row].0 as usize] = TABLE[row].1;
        row += 1;
    }
    all
};

impl WqeOpcode {
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

impl fmt::Display for WqeOpcode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self, TABLE.iter().find(|(_, one, _)| one == self)) {
            (_, Some((_, _, name))) => f.pad(name),
            (other, None) => write!(f, "opcode {:#04x}", other.code()),
        }
    }
}
