//! Access rights of registered memory and of queue pairs.

use alloc::vec::Vec;
use core::fmt;
use core::ops::{BitOr, BitOrAssign};

/// A set of access rights to registered memory; local reads need none. Of a queue pair only the
/// remote rights count: what its peer may do.
///
/// ```
/// use warpwire_proto::qp::Access;
/// let rights = Access::LOCAL_WRITE | Access::REMOTE_READ;
/// assert!(rights.contains(Access::REMOTE_READ) && !rights.contains(Access::REMOTE_WRITE));
/// assert_eq!(rights.to_string(), "local-write remote-read");
/// assert!(Access::REMOTE_WRITE.check().is_err()); // it needs local write
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Access(u8);

impl Access {
    /// Local reads only.
    pub const NONE: Self = Self(0);
    /// Local receives, and the results of RDMA reads and atomics, may be written to the memory.
    pub const LOCAL_WRITE: Self = Self(1);
    /// Peers may read the memory.
    pub const REMOTE_READ: Self = Self(1 << 1);
    /// Peers may write the memory. Needs [`LOCAL_WRITE`](Self::LOCAL_WRITE).
    pub const REMOTE_WRITE: Self = Self(1 << 2);
    /// Peers may apply atomic operations to it. Needs [`LOCAL_WRITE`](Self::LOCAL_WRITE).
    pub const REMOTE_ATOMIC: Self = Self(1 << 3);
    /// Addresses in work requests are offsets into the memory.
    pub const ZERO_BASED: Self = Self(1 << 4);
    /// Writes may be reordered with each other, never with the completion. No effect in software.
    pub const RELAXED_ORDERING: Self = Self(1 << 5);
    /// On-demand paging: pages are faulted in at first use, and may be unmapped and mapped again.
    pub const ON_DEMAND: Self = Self(1 << 6);
    /// Memory windows may be bound to the memory.
    pub const MW_BIND: Self = Self(1 << 7);
    /// All local and remote rights, without the options (zero-based, relaxed ordering, on-demand,
    /// windows).
    pub const ALL: Self = Self(0b1111);

    const REMOTE: Self = Self(0b1110);

    const NAMES: [(Self, &'static str); 8] = [
        (Self::LOCAL_WRITE, "local-write"),
        (Self::REMOTE_READ, "remote-read"),
        (Self::REMOTE_WRITE, "remote-write"),
        (Self::REMOTE_ATOMIC, "remote-atomic"),
        (Self::ZERO_BASED, "zero-based"),
        (Self::RELAXED_ORDERING, "relaxed-ordering"),
        (Self::ON_DEMAND, "on-demand"),
        (Self::MW_BIND, "mw-bind"),
    ];

    /// Whether `other` is a subset of this set.
    #[inline]
    pub const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Whether the two sets have an element in common.
    #[inline]
    pub const fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// The bits, as exchanged with local peers; the same in every build of this version.
    pub const fn bits(self) -> u8 {
        self.0
    }

    /// A set from bits, all of which are known.
    pub const fn from_bits_truncate(bits: u8) -> Self {
        Self(bits)
    }

    /// Whether the set contains any remote right.
    #[inline]
    pub const fn is_remote(self) -> bool {
        self.0 & Self::REMOTE.0 != 0
    }

    /// Rejects the sets that memory cannot be registered with: remote write and remote atomic need
    /// local write.
    pub const fn check(self) -> Result<(), AccessError> {
        match self.intersects(Self(Self::REMOTE_WRITE.0 | Self::REMOTE_ATOMIC.0)) {
            true if !self.contains(Self::LOCAL_WRITE) => Err(AccessError(self)),
            _ => Ok(()),
        }
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
        if self.0 == 0 {
            return f.pad("local-read");
        }
        let set = Self::NAMES.iter().filter(|(right, _)| self.contains(*right));
        let names: Vec<_> = set.map(|(_, name)| *name).collect();
        f.pad(&names.join(" "))
    }
}

impl fmt::Debug for Access {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Access({self})")
    }
}

/// A set that [`Access::check`] rejects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AccessError(pub Access);

impl fmt::Display for AccessError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad("remote-write and remote-atomic need local-write as well")
    }
}

impl core::error::Error for AccessError {}
