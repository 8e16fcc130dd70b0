//! What may be done with registered memory.

use std::fmt;
use std::ops::{BitOr, BitOrAssign};

use crate::error::{Error, Kind, Result};

/// A set of rights to registered memory. Reading it locally needs none.
///
/// ```
/// use warpwire::mr::Access;
/// let rights = Access::LOCAL_WRITE | Access::REMOTE_READ;
/// assert!(rights.contains(Access::REMOTE_READ) && !rights.contains(Access::REMOTE_WRITE));
/// assert_eq!(rights.to_string(), "local-write remote-read");
/// assert!(Access::REMOTE_WRITE.check().is_err()); // it needs local write
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Access(u8);

impl Access {
    /// Nothing but local reads.
    pub const NONE: Self = Self(0);
    /// Receives, reads and atomics of this side may write it.
    pub const LOCAL_WRITE: Self = Self(1);
    /// Peers may read it.
    pub const REMOTE_READ: Self = Self(1 << 1);
    /// Peers may write it.
    pub const REMOTE_WRITE: Self = Self(1 << 2);
    /// Peers may change words of it atomically.
    pub const REMOTE_ATOMIC: Self = Self(1 << 3);
    /// Its addresses are offsets: it begins at zero.
    pub const ZERO_BASED: Self = Self(1 << 4);
    /// Writes to it may pass each other. A completion is never weakened by it, and here it changes nothing.
    pub const RELAXED_ORDERING: Self = Self(1 << 5);
    /// Its pages are found when they are needed, and not before: they may go away and come back.
    pub const ON_DEMAND: Self = Self(1 << 6);
    /// Every right of both sides.
    pub const ALL: Self = Self(0b1111);

    const REMOTE: Self = Self(0b1110);

    const NAMES: [(Self, &'static str); 7] = [
        (Self::LOCAL_WRITE, "local-write"),
        (Self::REMOTE_READ, "remote-read"),
        (Self::REMOTE_WRITE, "remote-write"),
        (Self::REMOTE_ATOMIC, "remote-atomic"),
        (Self::ZERO_BASED, "zero-based"),
        (Self::RELAXED_ORDERING, "relaxed-ordering"),
        (Self::ON_DEMAND, "on-demand"),
    ];

    /// Whether everything in `other` is in this set too.
    #[inline]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether anything of `other` is in this set.
    #[inline]
    pub const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// As bits, for peers on this machine; the same for every build of this version.
    pub(crate) const fn bits(self) -> u8 {
        self.0
    }

    /// A set from bits; those that mean nothing are left out.
    pub(crate) const fn from_bits(bits: u8) -> Self {
        Self(bits & 0b11_1111)
    }

    /// Whether a peer has, or needs, any of it.
    #[inline]
    pub const fn is_remote(self) -> bool {
        self.0 & Self::REMOTE.0 != 0
    }

    /// Refuses sets that verbs refuse: who lets peers write must be able to write.
    pub fn check(self) -> Result<()> {
        let writes = self.0 & (Self::REMOTE_WRITE.0 | Self::REMOTE_ATOMIC.0) != 0;
        if !writes || self.contains(Self::LOCAL_WRITE) {
            return Ok(());
        }
        Err(Error::new(Kind::InvalidArgument, format!("register memory for {self}"))
            .why("remote-write and remote-atomic need local-write too")
            .fix("add local-write"))
    }
}

impl BitOr for Access {
    type Output = Self;

    fn bitor(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

impl BitOrAssign for Access {
    fn bitor_assign(&mut self, other: Self) {
        self.0 |= other.0;
    }
}

impl fmt::Display for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mine = Self::NAMES.iter().filter(|(right, _)| self.contains(*right));
        let names: Vec<_> = mine.map(|(_, name)| *name).collect();
        f.pad(&if names.is_empty() { "local-read".to_owned() } else { names.join(" ") })
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Access({self})")
    }
}
