//! Reasons for refusing access to registered memory.

use std::fmt;

/// Why a key did not resolve to the requested memory.
///
/// A work request that uses the key fails with a protection error on the side that used it; the
/// reason is for counters and logs. Only [`Moving`](AccessDenied::Moving) and
/// [`NotResident`](AccessDenied::NotResident) are transient.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AccessDenied {
    /// No memory was ever registered under this key's index.
    Unknown,
    /// The key was valid once; its memory has been deregistered.
    Stale,
    /// The memory belongs to another protection domain.
    WrongPd,
    /// The registration does not grant the right.
    Rights,
    /// The range is not inside the registered memory.
    Range,
    /// The key was invalidated for remote use, or its window is not bound.
    Invalidated,
    /// The window is bound to another queue pair.
    WrongQp,
    /// The window is bound, and must be invalidated before it is bound again.
    Bound,
    /// The memory was freed under its registration.
    Gone,
    /// The memory is being moved; retry later.
    Moving,
    /// The memory is being paged in or mapped; retry later.
    NotResident,
    /// The word of an atomic operation is not aligned.
    Misaligned,
    /// The device failed; [`SoftMr::failure`](super::SoftMr::failure) has the error.
    Failed,
}

impl AccessDenied {
    /// Whether the same request may succeed later without any action by the caller.
    pub fn is_transient(self) -> bool {
        matches!(self, Self::Moving | Self::NotResident)
    }
}

impl fmt::Display for AccessDenied {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Unknown => "no memory was registered under this key",
            Self::Stale => "the memory of this key has been deregistered",
            Self::WrongPd => "the memory belongs to another protection domain",
            Self::Rights => "the registration does not grant the right",
            Self::Range => "the range is not inside the registered memory",
            Self::Invalidated => "the key has been invalidated",
            Self::WrongQp => "the window is bound to another queue pair",
            Self::Bound => "the window is bound already",
            Self::Gone => "the memory was freed under its registration",
            Self::Moving => "the memory is moving",
            Self::NotResident => "the memory is not resident",
            Self::Misaligned => "the word is not aligned",
            Self::Failed => "the device failed",
        })
    }
}

impl std::error::Error for AccessDenied {}
