//! The result of a kernel's operation or wait: `enum Status` of `verbs.cuh`.

use std::fmt;

use crate::mlx5::{CqeSyndrome, Status};

/// The result of a kernel's operation or wait.
///
/// ```
/// use warpwire::stream::kernel::KernelStatus;
/// use warpwire::verbs::Status;
/// assert_eq!(KernelStatus::from_code(-0x13), KernelStatus::Failed(Status::RemoteAccess));
/// assert_eq!(KernelStatus::Failed(Status::RemoteAccess).code(), -0x13);
/// assert_eq!(KernelStatus::Timeout.to_string(), "timed out");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum KernelStatus {
    /// Success.
    Ok,
    /// Polled once (timeout 0): not complete yet.
    NotReady,
    /// Not complete within the timeout.
    Timeout,
    /// The work failed. After a first failure all later work is [`Status::Flushed`].
    Failed(Status),
    /// The host closed the queue pair.
    Closed,
    /// The transfer is longer than one entry can carry.
    TooLong,
    /// The operation needs more entries than the queue has.
    TooMany,
    /// The message arrived, but its CQE was overwritten because later receives were posted.
    TooLate,
    /// Another thread reserved an earlier entry and did not fill it.
    Stuck,
    /// The ticket does not refer to posted work.
    BadTicket,
}

/// The codes that are not syndromes, with their texts.
const TABLE: [(i32, KernelStatus, &str); 9] = [
    (0, KernelStatus::Ok, "ok"),
    (1, KernelStatus::NotReady, "not ready"),
    (2, KernelStatus::Timeout, "timed out"),
    (-0x100, KernelStatus::Closed, "the queue pair was closed"),
    (-0x101, KernelStatus::TooLong, "too many bytes for one entry"),
    (-0x102, KernelStatus::TooMany, "more entries than the queue has"),
    (-0x103, KernelStatus::TooLate, "the completion was overwritten"),
    (-0x104, KernelStatus::Stuck, "an earlier entry was reserved and never filled"),
    (-0x105, KernelStatus::BadTicket, "no such operation was posted"),
];

impl KernelStatus {
    /// Decodes a kernel's status code. Unknown codes become [`Status::General`].
    pub fn from_code(code: i32) -> Self {
        match TABLE.iter().find(|(known, ..)| *known == code) {
            Some((_, status, _)) => *status,
            None => {
                Self::Failed(CqeSyndrome(u8::try_from(-i64::from(code)).unwrap_or(0xff)).into())
            }
        }
    }

    /// The code that kernels use for it: 0 success, 1 and 2 not complete, negative on failure.
    pub fn code(self) -> i32 {
        match self {
            Self::Failed(status) => -i32::from(CqeSyndrome::from(status).0),
            other => TABLE.iter().find(|(_, known, _)| *known == other).map_or(0, |row| row.0),
        }
    }

    /// Whether it is [`Ok`](Self::Ok).
    pub fn is_ok(self) -> bool {
        self == Self::Ok
    }

    /// Whether the work failed, as opposed to completed or still in progress.
    pub fn is_failure(self) -> bool {
        self.code() < 0
    }
}

impl fmt::Display for KernelStatus {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(status) => status.fmt(f),
            other => {
                f.pad(TABLE.iter().find(|(_, known, _)| known == other).map_or("", |row| row.2))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_round_trip() {
        for (code, status, _) in TABLE {
            assert_eq!((KernelStatus::from_code(code), status.code()), (status, code));
        }
        for syndrome in 1..=0xff_u8 {
            let status = KernelStatus::from_code(-i32::from(syndrome));
            assert_eq!(status, KernelStatus::Failed(CqeSyndrome(syndrome).into()));
            assert!(status.is_failure() && !status.is_ok());
            assert_eq!(KernelStatus::from_code(status.code()), status);
        }
        for strange in [i32::MIN, -0x106, 3, i32::MAX] {
            assert_eq!(KernelStatus::from_code(strange), KernelStatus::Failed(Status::General));
        }
    }
}
