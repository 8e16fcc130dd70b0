//! Why a work request was not posted.

use std::fmt;

use warpwire_proto::qp::State;

use crate::error::{Error, Kind};

/// The result of posting.
pub(crate) type PostResult<T = ()> = Result<T, PostError>;

/// Why work requests were not posted. `Copy`, without allocations or formatting, because programs
/// post in a loop until a full queue has room again; `?` converts it to [`Error`].
///
/// ```
/// use warpwire::verbs::PostError;
/// use warpwire::error::Kind;
/// # let (qp, cq) = (PostError::Full, ());
/// match Err::<(), _>(qp) {
///     Err(PostError::Full) => {} // poll completions, then post again
///     Err(other) => return Err(other.into()),
///     Ok(()) => {}
/// }
/// assert_eq!(warpwire::Error::from(PostError::Full).kind(), &Kind::Busy);
/// # Ok::<(), warpwire::Error>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum PostError {
    /// The queue has no room for all requests: poll completions, then post again.
    Full,
    /// The calling thread holds a batch of the queue pair: post or drop it first.
    BatchHeld,
    /// The queue pair is in this state, and sends may be posted from `RTS` on.
    NotReady(State),
    /// A request has more scatter-gather entries than the queue accepts, or one of 2 GiB or more.
    TooManySge {
        /// The request's number of entries.
        count: u32,
        /// The maximum of the queue.
        max: u32,
    },
    /// A request has more inline bytes than the queue accepts.
    InlineTooLong {
        /// The request's inline bytes.
        len: u32,
        /// The maximum of the queue.
        max: u32,
    },
    /// A request is invalid on this queue: the reason, and what to do.
    Invalid(&'static str),
    /// The device does not support a request: the reason, and what to do.
    Unsupported(&'static str),
    /// The device or its driver failed with this errno.
    Device(i32),
}

impl PostError {
    pub(crate) const NO_DESTINATION: Self =
        Self::Invalid("a UD send needs a destination; set it with SendRequest::to");
    pub(crate) const SURPLUS_DESTINATION: Self =
        Self::Invalid("only sends of UD queue pairs have a destination; omit the destination");
    pub(crate) const FOREIGN_HANDLE: Self = Self::Invalid(
        "the address handle belongs to another context; create one from this context",
    );
    pub(crate) const DIRECT_UD: Self = Self::Unsupported(
        "direct verbs cannot build the address vector of a UD message; use Qp::post_send on a queue \
         pair without them",
    );
    pub(crate) const NO_WINDOWS: Self = Self::Unsupported(
        "memory windows of a NIC are not supported; use the software HCA, or a memory region of its \
         own",
    );
    pub(crate) const USES_SRQ: Self =
        Self::Invalid("the queue pair uses an SRQ; post the receive to the SRQ");

    /// The kind of [`Error`] that it converts to.
    fn kind(self) -> Kind {
        match self {
            Self::Full | Self::BatchHeld => Kind::Busy,
            Self::Unsupported(_) => Kind::Unsupported,
            Self::Device(errno) => Kind::Os(errno),
            _ => Kind::InvalidArgument,
        }
    }

    /// The failure of a call that a post depends on.
    #[cold]
    pub(crate) fn device(error: &Error) -> Self {
        match error.kind() {
            Kind::Os(errno) => Self::Device(*errno),
            _ => Self::Device(libc::EIO),
        }
    }
}

impl fmt::Display for PostError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Full => {
                f.pad("the queue is full; poll completions first, or create a deeper queue")
            }
            Self::BatchHeld => f.pad(
                "this thread holds a batch of the queue pair; post or drop it first, or push to it",
            ),
            Self::NotReady(state) => write!(
                f,
                "the queue pair is in {state}, and sends may be posted from RTS on; call connect \
                 first, or activate_ud for a UD queue pair"
            ),
            Self::TooManySge { count, max } => write!(
                f,
                "it has {count} scatter-gather entries; the maximum is {max}, each below 2 GiB; \
                 split it, or create the queue with a larger maximum"
            ),
            Self::InlineTooLong { len, max } => write!(
                f,
                "{len} inline bytes do not fit into a WQE, the queue allows {max}; use registered \
                 memory, or split it into several requests"
            ),
            Self::Invalid(text) | Self::Unsupported(text) => f.pad(text),
            Self::Device(errno) => std::io::Error::from_raw_os_error(*errno).fmt(f),
        }
    }
}

impl std::error::Error for PostError {}

impl From<PostError> for Error {
    #[cold]
    fn from(error: PostError) -> Self {
        let (text, what) = (error.to_string(), "post a work request");
        // All texts but those of the system end with the advice.
        match text.rsplit_once("; ") {
            Some((why, fix)) => {
                Self::new(error.kind(), what).why(why.to_owned()).fix(fix.to_owned())
            }
            None => Self::new(error.kind(), what).why(text),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_post_error_is_small_and_its_text_says_what_to_do() {
        assert!(size_of::<PostError>() <= 24, "{}", size_of::<PostError>());
        assert_eq!(size_of::<PostResult>(), size_of::<PostError>());
        let text = |error: PostError| Error::from(error).to_string();
        assert_eq!(
            text(PostError::Full),
            "cannot post a work request: the queue is full; poll completions first, or create a \
             deeper queue"
        );
        assert_eq!(Error::from(PostError::Full).reason(), "the queue is full");
        assert!(text(PostError::NotReady(State::Init)).contains("in INIT"));
        assert!(text(PostError::TooManySge { count: 20, max: 16 }).contains("20 scatter"));
        assert!(text(PostError::InlineTooLong { len: 99, max: 64 }).contains("99 inline bytes"));
        let device = Error::from(PostError::Device(libc::EINVAL));
        assert_eq!(device.kind(), &Kind::Os(libc::EINVAL));
        assert!(device.to_string().contains("Invalid argument"), "{device}");
    }
}
