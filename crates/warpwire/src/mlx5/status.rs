//! Completion status as a CQE encodes it.

use warpwire_proto::qp::Status;

/// The syndrome of a CQE: ConnectX's encoding of a [`Status`].
///
/// ```
/// use warpwire::mlx5::CqeSyndrome;
/// use warpwire::verbs::Status;
/// assert_eq!(CqeSyndrome::from(Status::RemoteAccess), CqeSyndrome(0x13));
/// assert_eq!(Status::from(CqeSyndrome(0x13)), Status::RemoteAccess);
/// assert_eq!(Status::from(CqeSyndrome(0x77)), Status::General); // unknown
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CqeSyndrome(pub u8);

/// Every failure with its syndrome.
const TABLE: [(u8, Status); 13] = [
    (0x01, Status::LocalLength),
    (0x02, Status::LocalQpOperation),
    (0x04, Status::LocalProtection),
    (0x05, Status::Flushed),
    (0x06, Status::MwBind),
    (0x10, Status::BadResponse),
    (0x11, Status::LocalAccess),
    (0x12, Status::RemoteInvalidRequest),
    (0x13, Status::RemoteAccess),
    (0x14, Status::RemoteOperation),
    (0x15, Status::RetryExceeded),
    (0x16, Status::RnrRetryExceeded),
    (0x22, Status::RemoteAbort),
];

/// CqeSyndrome of [`Status::General`]; no producer uses it otherwise.
const OTHER: u8 = 0xff;

impl From<CqeSyndrome> for Status {
    /// The status of a syndrome; unknown ones are [`Status::General`].
    fn from(CqeSyndrome(code): CqeSyndrome) -> Self {
        let known = TABLE.iter().find(|(known, _)| *known == code);
        known.map_or(Self::General, |(_, status)| *status)
    }
}

impl From<Status> for CqeSyndrome {
    /// The syndrome of a status; 0 for success.
    fn from(status: Status) -> Self {
        Self(match status {
            Status::Success => 0,
            other => TABLE.iter().find(|(_, known)| *known == other).map_or(OTHER, |row| row.0),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn syndromes_round_trip_and_unknown_ones_are_general_errors() {
        for byte in 0..=u8::MAX {
            let status = Status::from(CqeSyndrome(byte));
            match TABLE.iter().find(|(code, _)| *code == byte) {
                Some((_, expected)) => {
                    assert_eq!(status, *expected);
                    assert_eq!(CqeSyndrome::from(status), CqeSyndrome(byte));
                }
                None => assert_eq!(status, Status::General),
            }
        }
        assert_eq!(Status::from(CqeSyndrome::from(Status::General)), Status::General);
        assert_eq!(CqeSyndrome::from(Status::Success), CqeSyndrome(0));
    }
}
