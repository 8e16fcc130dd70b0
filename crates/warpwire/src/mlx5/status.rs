//! Completion status, and its encoding as a CQE syndrome.

use std::fmt;

/// Status of a completion; the numbers are those of `ibv_wc_status`.
///
/// ```
/// use warpwire::mlx5::Status;
/// assert_eq!(Status::RemoteAccess.syndrome(), 0x13);
/// assert_eq!(Status::from_syndrome(0x13), Status::RemoteAccess);
/// assert_eq!(Status::from_syndrome(0x77), Status::General);
/// assert_eq!(Status::RemoteAccess as u32, 10);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Status {
    /// The work succeeded.
    Success = 0,
    /// A message is longer than its receive buffer, or than the maximum.
    LocalLength = 1,
    /// The work request is malformed or not valid on this queue pair.
    LocalQpOperation = 2,
    /// A local buffer is not in a memory region of the QP's domain, or lacks the access right.
    LocalProtection = 4,
    /// Flushed: the queue pair was in the error state before the work was executed.
    Flushed = 5,
    /// A memory window could not be bound.
    MwBind = 6,
    /// The peer sent an unexpected response.
    BadResponse = 7,
    /// An operation of the peer violated the access rights of local memory.
    LocalAccess = 8,
    /// The peer rejected the request as invalid.
    RemoteInvalidRequest = 9,
    /// The peer's memory protection rejected the access: rkey, range or access right.
    RemoteAccess = 10,
    /// The peer failed to execute the operation.
    RemoteOperation = 11,
    /// The transport retries were used up without an answer.
    RetryExceeded = 12,
    /// The RNR retries were used up: the peer had no receive posted.
    RnrRetryExceeded = 13,
    /// The peer aborted the operation.
    RemoteAbort = 16,
    /// Any other error; see the vendor syndrome.
    General = 21,
}

/// Every failure with its CQE syndrome and name.
const TABLE: [(u8, Status, &str); 13] = [
    (0x01, Status::LocalLength, "local length error"),
    (0x02, Status::LocalQpOperation, "local QP operation error"),
    (0x04, Status::LocalProtection, "local protection error"),
    (0x05, Status::Flushed, "work request flushed"),
    (0x06, Status::MwBind, "memory window bind error"),
    (0x10, Status::BadResponse, "bad response"),
    (0x11, Status::LocalAccess, "local access error"),
    (0x12, Status::RemoteInvalidRequest, "remote invalid request"),
    (0x13, Status::RemoteAccess, "remote access error"),
    (0x14, Status::RemoteOperation, "remote operation error"),
    (0x15, Status::RetryExceeded, "transport retry counter exceeded"),
    (0x16, Status::RnrRetryExceeded, "receiver-not-ready retry counter exceeded"),
    (0x22, Status::RemoteAbort, "remote aborted"),
];

/// Syndrome of [`Status::General`]; no producer uses it otherwise.
const OTHER: u8 = 0xff;

impl Status {
    /// The status of a CQE syndrome; unknown ones are [`Status::General`].
    pub fn from_syndrome(syndrome: u8) -> Self {
        let known = TABLE.iter().find(|(code, ..)| *code == syndrome);
        known.map_or(Self::General, |(_, status, _)| *status)
    }

    /// The CQE syndrome; 0 for success.
    pub fn syndrome(self) -> u8 {
        match self {
            Self::Success => 0,
            other => TABLE.iter().find(|(_, one, _)| *one == other).map_or(OTHER, |row| row.0),
        }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = TABLE.iter().find(|(_, one, _)| one == self);
        f.pad(match (self, known) {
            (_, Some((_, _, name))) => name,
            (Self::Success, None) => "success",
            (_, None) => "general error",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn syndromes_round_trip_and_unknown_ones_are_general_errors() {
        for byte in 0..=u8::MAX {
            let status = Status::from_syndrome(byte);
            match TABLE.iter().find(|(code, ..)| *code == byte) {
                Some((_, expected, _)) => {
                    assert_eq!(status, *expected);
                    assert_eq!(status.syndrome(), byte);
                }
                None => assert_eq!(status, Status::General),
            }
        }
        assert_eq!(Status::from_syndrome(Status::General.syndrome()), Status::General);
        assert_eq!(Status::Success.to_string(), "success");
    }
}
