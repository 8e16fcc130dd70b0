//! Memory windows: what a key is bound to.

use super::Access;

/// How a memory window is bound, and who may use it (`ibv_mw_type`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MwType {
    /// Any queue pair of the protection domain may use it. Binding it again, or to no bytes,
    /// invalidates the previous key.
    Type1,
    /// Only the queue pair that bound it may use it (type 2B of the specification). Invalidated by
    /// its owner or by its peer, and bound only while it is invalid. The owner chooses the low
    /// eight bits of its key.
    Type2,
}

/// What a memory window is bound to (`ibv_mw_bind_info`), and the key that it has then.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MwBind {
    /// The type of the window.
    pub kind: MwType,
    /// The window's next rkey: the upper 24 bits are those of any of its keys.
    pub rkey: u32,
    /// The local key of the registration, which needs [`Access::MW_BIND`].
    pub lkey: u32,
    /// The first byte, in the address space of the registration.
    pub address: u64,
    /// Length in bytes; 0 only invalidates a window of type 1.
    pub len: u64,
    /// What peers may do: remote rights. With [`Access::ZERO_BASED`] their addresses are offsets.
    pub access: Access,
}

/// The key after this one of the same window: its low eight bits are incremented (`ibv_inc_rkey`).
///
/// ```
/// assert_eq!(warpwire_proto::qp::next_rkey(0x1234_56ff), 0x1234_5600);
/// ```
pub const fn next_rkey(rkey: u32) -> u32 {
    rkey & !0xff | rkey.wrapping_add(1) & 0xff
}
