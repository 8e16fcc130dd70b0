//! Why memory is not given.

use std::fmt;

/// Why a key does not give the memory that was asked for.
///
/// A work request that names the key ends with a protection error on the side that used it; the reason is
/// for counters and logs. [`Moving`](Denied::Moving) and [`NotResident`](Denied::Absent) alone pass by themselves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AccessDenied {
    /// No memory was ever registered under this index.
    Unknown,
    /// The key named memory once; its registration has ended.
    Stale,
    /// The memory belongs to another protection domain.
    WrongPd,
    /// The registration does not give that right.
    Rights,
    /// The range does not lie inside the memory.
    Range,
    /// A peer's message has invalidated the key for remote use.
    Invalidated,
    /// The memory was freed under its registration.
    Gone,
    /// The memory is about to move; ask again.
    Moving,
    /// The memory is being found; ask again.
    NotResident,
    /// The word of an atomic operation is not aligned.
    Misaligned,
    /// The device failed; [`SoftMr::failure`](super::Mr::failure) says how.
    Failed,
}

impl AccessDenied {
    /// Whether it passes by itself: who asks again later may get the memory.
    pub fn is_transient(self) -> bool {
        matches!(self, Self::Moving | Self::NotResident)
    }
}

impl fmt::Display for AccessDenied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Unknown => "no memory was registered under this key",
            Self::Stale => "the registration of this key has ended",
            Self::WrongPd => "the memory belongs to another protection domain",
            Self::Rights => "the registration does not give that right",
            Self::Range => "the range does not lie inside the memory",
            Self::Invalidated => "the key has been invalidated",
            Self::Gone => "the memory was freed under its registration",
            Self::Moving => "the memory is moving",
            Self::NotResident => "the memory is being found",
            Self::Misaligned => "the word is not aligned",
            Self::Failed => "the device failed",
        })
    }
}

impl std::error::Error for AccessDenied {}
