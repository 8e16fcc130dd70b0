//! How work ended: the verbs' statuses and the syndromes that say them in a completion.

use std::fmt;

/// How a work request ended; the numbers are those of `ibv_wc_status`.
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
    /// It was done.
    Success = 0,
    /// A message longer than its buffer, or than any may be.
    LocalLength = 1,
    /// The request itself makes no sense.
    LocalQpOperation = 2,
    /// A local buffer that the queue pair may not use so.
    LocalProtection = 4,
    /// It was never begun: the queue pair failed before.
    Flushed = 5,
    /// A memory window could not be bound.
    MwBind = 6,
    /// The peer answered with something that is no answer.
    BadResponse = 7,
    /// The peer reached for memory of ours that it may not.
    LocalAccess = 8,
    /// The peer could not make sense of the request.
    RemoteInvalidRequest = 9,
    /// The peer does not let us reach that memory.
    RemoteAccess = 10,
    /// The peer could not carry it out.
    RemoteOperation = 11,
    /// The peer does not answer.
    RetryExceeded = 12,
    /// The peer had no receive posted for too long.
    RnrRetryExceeded = 13,
    /// The peer gave it up.
    RemoteAbort = 16,
    /// Anything else.
    General = 21,
}

/// Every failure with its syndrome and the name that verbs give it.
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

/// What the table does not have; no producer gives it a meaning of its own.
const OTHER: u8 = 0xff;

impl Status {
    /// The status that a completion's syndrome says.
    pub fn from_syndrome(syndrome: u8) -> Self {
        let known = TABLE.iter().find(|(code, ..)| *code == syndrome);
        known.map_or(Self::General, |(_, status, _)| *status)
    }

    /// The syndrome that says it; success has none and gives zero.
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
    fn every_syndrome_comes_back_and_no_other_byte_is_a_failure_of_the_table() {
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
