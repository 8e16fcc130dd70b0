//! One error style for the whole house: what failed, on what, why, and what to do about it.
//!
//! Programs match on [`Error::kind`]; people read the text, which is one line:
//!
//! ```text
//! cannot allocate 200 GiB on cuda:0: the device has 139.1 GiB in all; ask for less, or use another GPU
//! ```

use std::borrow::Cow;
use std::fmt;

/// The result of every fallible call in this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What sort of failure an [`Error`] is: for programs to match on.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// A parameter makes no sense by itself (a zero length, an unknown option).
    InvalidArgument,
    /// A range does not lie inside the object that it refers to.
    OutOfRange,
    /// An address or offset lacks the alignment that the operation needs.
    Misaligned,
    /// The device, or the host, has no memory left for the request.
    OutOfMemory,
    /// The address is not memory of this device.
    NotDeviceMemory,
    /// The object has been freed, or went away underneath its users.
    Freed,
    /// The object is in use; the same call may succeed later.
    Busy,
    /// A library, symbol, device node or file that the call needs is not on this machine.
    Unavailable,
    /// This device, driver or platform cannot do it.
    Unsupported,
    /// The time given ran out; the work goes on.
    Timeout,
    /// Work queued earlier failed; the stream takes no more.
    StreamFailed,
    /// The whole device context is lost.
    DeviceLost,
    /// A handle from another process no longer names what it named.
    Stale,
    /// A peer has died, has left, or does not answer.
    PeerLost,
    /// The operating system refuses this user.
    PermissionDenied,
    /// Text from outside (a file, a variable, a handle) does not have the form that it must have.
    Malformed,
    /// The operating system failed a call, with this errno.
    Os(i32),
    /// The CUDA driver failed a call, with this CUresult.
    Cuda(i32),
}

/// A failure: what was tried, on what, why it failed, and what to do.
///
/// ```
/// use warpwire::{Error, error::Kind};
/// let e = Error::new(Kind::OutOfRange, "copy 64 bytes")
///     .on("sim:0")
///     .why("the source ends at byte 4096")
///     .fix("shorten the copy");
/// assert_eq!(e.kind(), &Kind::OutOfRange);
/// assert_eq!(
///     e.to_string(),
///     "cannot copy 64 bytes on sim:0: the source ends at byte 4096; shorten the copy"
/// );
/// ```
#[derive(Clone)]
pub struct Error(Box<Detail>);

#[derive(Clone)]
struct Detail {
    kind: Kind,
    what: Cow<'static, str>,
    on: Option<Cow<'static, str>>,
    why: Cow<'static, str>,
    fix: Option<Cow<'static, str>>,
}

impl Error {
    /// An error about an attempt to `what` (a verb phrase: "copy 64 bytes").
    #[cold]
    pub fn new(kind: Kind, what: impl Into<Cow<'static, str>>) -> Self {
        Self(Box::new(Detail {
            kind,
            what: what.into(),
            on: None,
            why: Cow::Borrowed(""),
            fix: None,
        }))
    }

    /// An error from a failed system call.
    #[cold]
    pub fn os(what: impl Into<Cow<'static, str>>, source: &std::io::Error) -> Self {
        let kind = match (source.kind(), source.raw_os_error()) {
            (std::io::ErrorKind::NotFound, _) => Kind::Unavailable,
            (std::io::ErrorKind::PermissionDenied, _) => Kind::PermissionDenied,
            (std::io::ErrorKind::OutOfMemory, _) => Kind::OutOfMemory,
            (_, Some(errno)) => Kind::Os(errno),
            (_, None) => Kind::Malformed,
        };
        Self::new(kind, what).why(source.to_string())
    }

    /// Names the object that the attempt was made on (a device, a stream, a file).
    #[must_use]
    pub fn on(mut self, object: impl Into<Cow<'static, str>>) -> Self {
        self.0.on = Some(object.into());
        self
    }

    /// Says what was tried, in the words of a caller who knows better.
    #[must_use]
    pub fn during(mut self, what: impl Into<Cow<'static, str>>) -> Self {
        self.0.what = what.into();
        self
    }

    /// Says why it failed.
    #[must_use]
    pub fn why(mut self, reason: impl Into<Cow<'static, str>>) -> Self {
        self.0.why = reason.into();
        self
    }

    /// Says what the reader can do.
    #[must_use]
    pub fn fix(mut self, advice: impl Into<Cow<'static, str>>) -> Self {
        self.0.fix = Some(advice.into());
        self
    }

    /// The sort of failure.
    pub fn kind(&self) -> &Kind {
        &self.0.kind
    }

    /// Whether it is a shortage that may be over by itself: the same call may succeed a moment later.
    ///
    /// ```
    /// use warpwire::{Error, error::Kind};
    /// assert!(Error::new(Kind::OutOfMemory, "open a window").is_transient());
    /// assert!(!Error::new(Kind::Freed, "open a window").is_transient());
    /// ```
    pub fn is_transient(&self) -> bool {
        // Too many open files, here or in all; interrupted; for now.
        const TRANSIENT_ERRNOS: [i32; 4] = [libc::EMFILE, libc::ENFILE, libc::EINTR, libc::EAGAIN];
        // CUDA: not ready, the system is not ready, the operating system failed a call.
        const TRANSIENT_CUDA_RESULTS: [i32; 3] = [600, 802, 304];
        match self.kind() {
            Kind::OutOfMemory | Kind::Busy => true,
            Kind::Os(errno) => TRANSIENT_ERRNOS.contains(errno),
            Kind::Cuda(code) => TRANSIENT_CUDA_RESULTS.contains(code),
            _ => false,
        }
    }

    /// Why it failed, without what was tried.
    pub fn reason(&self) -> &str {
        &self.0.why
    }

    /// What to do about it, where that is known.
    pub fn advice(&self) -> Option<&str> {
        self.0.fix.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let detail = &*self.0;
        write!(f, "cannot {}", detail.what)?;
        if let Some(on) = &detail.on {
            write!(f, " on {on}")?;
        }
        if !detail.why.is_empty() {
            write!(f, ": {}", detail.why)?;
        }
        match &detail.fix {
            Some(fix) => write!(f, "; {fix}"),
            None => Ok(()),
        }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}: {self}", self.0.kind)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_stays_one_word() {
        assert_eq!(size_of::<Result<()>>(), size_of::<usize>());
    }

    #[test]
    fn unset_error_parts_are_not_printed() {
        let bare = Error::new(Kind::Busy, "free memory");
        assert_eq!(bare.to_string(), "cannot free memory");
    }

    #[test]
    fn system_errors_keep_their_meaning() {
        let missing = std::io::Error::from_raw_os_error(2);
        assert_eq!(Error::os("open x", &missing).kind(), &Kind::Unavailable);
        let odd = std::io::Error::from_raw_os_error(22);
        assert_eq!(Error::os("open x", &odd).kind(), &Kind::Os(22));
    }
}
