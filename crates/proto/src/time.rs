//! The clock that callers pass in: nanoseconds since an arbitrary epoch.

use core::ops::{Add, Sub};
use core::time::Duration;

/// A point in time, in nanoseconds since the caller's epoch.
///
/// The protocol never reads a clock; tests run in virtual time, an engine passes its monotonic
/// clock. Arithmetic saturates, so that [`Instant::NEVER`] stays in the future.
///
/// ```
/// use core::time::Duration;
/// use warpwire_proto::Instant;
/// let start = Instant::from_nanos(1_000);
/// assert_eq!(start + Duration::from_nanos(24) - start, Duration::from_nanos(24));
/// assert!(start < Instant::NEVER);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Instant(u64);

impl Instant {
    /// A time that no clock reaches.
    pub const NEVER: Self = Self(u64::MAX);

    /// The time `nanos` nanoseconds after the epoch.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the epoch.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }
}

impl Add<Duration> for Instant {
    type Output = Self;

    fn add(self, step: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(step.as_nanos()).unwrap_or(u64::MAX)))
    }
}

impl Sub for Instant {
    type Output = Duration;

    fn sub(self, earlier: Self) -> Duration {
        Duration::from_nanos(self.0.saturating_sub(earlier.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arithmetic_saturates_at_both_ends() {
        assert_eq!(Instant::NEVER + Duration::from_secs(1), Instant::NEVER);
        assert_eq!(Instant::from_nanos(5) + Duration::MAX, Instant::NEVER);
        assert_eq!(Instant::default() - Instant::NEVER, Duration::ZERO);
    }
}
