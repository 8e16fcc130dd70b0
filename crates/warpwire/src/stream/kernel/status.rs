//! How an operation or a wait of a kernel ended: `enum Status` of `verbs.cuh`.

use std::fmt;

use crate::mlx5::Status;

/// How an operation or a wait of a kernel ended.
///
/// ```
/// use warpwire::stream::kernel::KernelStatus;
/// use warpwire::verbs::Status;
/// assert_eq!(KernelStatus::from_code(-0x13), KernelStatus::Failed(Status::RemoteAccess));
/// assert_eq!(KernelStatus::Failed(Status::RemoteAccess).code(), -0x13);
/// assert_eq!(KernelStatus::Timeout.to_string(), "timed out");
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum KernelStatus {
    /// As it should.
    Ok,
    /// Looked once, and it was not there.
    NotReady,
    /// Waited, and it did not come.
    Timeout,
    /// The work failed. After a first failure all later work is [`Status::Flushed`].
    Failed(Status),
    /// The host ended the queue pair.
    Closed,
    /// More bytes than one entry carries.
    TooLong,
    /// More entries at once than the queue has.
    TooMany,
    /// The message came; its length was overwritten, as later receives were posted.
    TooLate,
    /// A thread that had reserved an entry before did not fill it.
    Stuck,
    /// Nobody has posted that.
    BadTicket,
}

/// Those that are no syndromes, with their codes and texts.
const TABLE: [(i32, KernelStatus, &str); 9] = [
    (0, KernelStatus::Ok, "ok"),
    (1, KernelStatus::NotReady, "not yet"),
    (2, KernelStatus::Timeout, "timed out"),
    (-0x100, KernelStatus::Closed, "the queue pair was closed"),
    (-0x101, KernelStatus::TooLong, "too many bytes for one entry"),
    (-0x102, KernelStatus::TooMany, "more entries than the queue has"),
    (-0x103, KernelStatus::TooLate, "waited too late for its length"),
    (-0x104, KernelStatus::Stuck, "an earlier entry was reserved and never filled"),
    (-0x105, KernelStatus::BadTicket, "no such operation was posted"),
];

impl KernelStatus {
    /// What a kernel's number says. Numbers of no meaning are a general error.
    pub fn from_code(code: i32) -> Self {
        match TABLE.iter().find(|(known, ..)| *known == code) {
            Some((_, status, _)) => *status,
            None => {
                Self::Failed(Status::from_syndrome(u8::try_from(-i64::from(code)).unwrap_or(0xff)))
            }
        }
    }

    /// The number that kernels have for it.
    pub fn code(self) -> i32 {
        match self {
            Self::Failed(status) => -i32::from(status.syndrome()),
            other => TABLE.iter().find(|(_, known, _)| *known == other).map_or(0, |row| row.0),
        }
    }

    /// Whether it ended as it should.
    pub fn is_ok(self) -> bool {
        self == Self::Ok
    }

    /// Whether it failed for good: it is neither done nor merely late.
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
    fn every_number_means_something_and_what_has_a_name_comes_back() {
        for (code, status, _) in TABLE {
            assert_eq!((KernelStatus::from_code(code), status.code()), (status, code));
        }
        for syndrome in 1..=0xff_u8 {
            let status = KernelStatus::from_code(-i32::from(syndrome));
            assert_eq!(status, KernelStatus::Failed(Status::from_syndrome(syndrome)));
            assert!(status.is_failure() && !status.is_ok());
            assert_eq!(KernelStatus::from_code(status.code()), status);
        }
        for strange in [i32::MIN, -0x106, 3, i32::MAX] {
            assert_eq!(KernelStatus::from_code(strange), KernelStatus::Failed(Status::General));
        }
    }
}
