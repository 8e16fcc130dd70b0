//! The crate's error type: what failed, on which object, why, and what to do about it.
//!
//! Programs match on [`Error::kind`]; people read the text, which is one line:
//!
//! ```text
//! cannot allocate 200 GiB on cuda:0: the device has 139.1 GiB in all; allocate less
//! ```

use std::borrow::Cow;
use std::fmt;
use std::sync::Arc;

use warpwire_proto::qp::AccessError;

/// The result of fallible calls in this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// The cause of an [`Error`], for programs to match on.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Kind {
    /// A parameter is invalid regardless of the state (a zero length, an unknown option).
    InvalidArgument,
    /// A range exceeds the object that it refers to.
    OutOfRange,
    /// An address or offset is not aligned as the operation requires.
    Misaligned,
    /// The device or the host has not enough memory.
    OutOfMemory,
    /// The address is not memory of this device.
    NotDeviceMemory,
    /// The object has been freed or revoked while in use.
    Freed,
    /// The object is in use; the same call may succeed later.
    Busy,
    /// A library, symbol, device node or file is missing on this machine.
    Unavailable,
    /// This device, driver or platform does not support it.
    Unsupported,
    /// The timeout expired; the work continues.
    Timeout,
    /// It was cancelled before it was complete.
    Cancelled,
    /// Work queued earlier on the stream failed; the stream accepts no more.
    StreamFailed,
    /// The whole device context is lost.
    DeviceLost,
    /// A handle from another process refers to an object that no longer exists.
    Stale,
    /// A peer has died, has disconnected, or does not answer.
    PeerLost,
    /// The operating system denied permission.
    PermissionDenied,
    /// Input (a file, a variable, a handle) has the wrong format.
    Malformed,
    /// A system call failed with this errno.
    Os(i32),
    /// A CUDA driver call failed with this `CUresult`.
    Cuda(i32),
}

/// A failure: what was attempted, on which object, why it failed, and what to do.
///
/// ```
/// use warpwire::{Error, error::Kind};
/// let e = Error::new(Kind::OutOfRange, "copy 64 bytes")
///     .on("sim:0")
///     .why("the source ends at byte 4096")
///     .fix("shorten the copy");
/// assert_eq!(e.kind(), &Kind::OutOfRange);
/// assert_eq!(e.what(), "copy 64 bytes on sim:0");
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
    source: Option<Arc<std::io::Error>>,
}

impl From<AccessError> for Error {
    #[cold]
    fn from(error: AccessError) -> Self {
        let AccessError(access) = error;
        Self::new(Kind::InvalidArgument, format!("register memory for {access}"))
            .why(error.to_string())
            .fix("add local-write")
    }
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
            source: None,
        }))
    }

    /// An error from a failed system call: its text becomes the reason, its errno the kind, and a
    /// copy the [source](std::error::Error::source).
    #[cold]
    pub fn os(what: impl Into<Cow<'static, str>>, source: &std::io::Error) -> Self {
        let kind = match (source.kind(), source.raw_os_error()) {
            (std::io::ErrorKind::NotFound, _) => Kind::Unavailable,
            (std::io::ErrorKind::PermissionDenied, _) => Kind::PermissionDenied,
            (std::io::ErrorKind::OutOfMemory, _) => Kind::OutOfMemory,
            (_, Some(errno)) => Kind::Os(errno),
            (_, None) => Kind::Malformed,
        };
        let mut error = Self::new(kind, what).why(source.to_string());
        // `io::Error` cannot be cloned.
        let copy = match source.raw_os_error() {
            Some(errno) => std::io::Error::from_raw_os_error(errno),
            None => std::io::Error::new(source.kind(), source.to_string()),
        };
        error.0.source = Some(Arc::new(copy));
        error
    }

    /// Sets the object that the attempt was made on (a device, a stream, a file).
    #[must_use]
    pub fn on(mut self, object: impl Into<Cow<'static, str>>) -> Self {
        self.0.on = Some(object.into());
        self
    }

    /// Replaces the description of the attempt, for callers that know the operation's purpose.
    #[must_use]
    pub fn during(mut self, what: impl Into<Cow<'static, str>>) -> Self {
        self.0.what = what.into();
        self
    }

    /// Sets the reason.
    #[must_use]
    pub fn why(mut self, reason: impl Into<Cow<'static, str>>) -> Self {
        self.0.why = reason.into();
        self
    }

    /// Sets the advice: what the reader can do.
    #[must_use]
    pub fn fix(mut self, advice: impl Into<Cow<'static, str>>) -> Self {
        self.0.fix = Some(advice.into());
        self
    }

    /// The cause, for programs to match on.
    pub fn kind(&self) -> &Kind {
        &self.0.kind
    }

    /// Whether it is a shortage that may pass: the same call may succeed a moment later.
    ///
    /// ```
    /// use warpwire::{Error, error::Kind};
    /// assert!(Error::new(Kind::OutOfMemory, "open a window").is_transient());
    /// assert!(!Error::new(Kind::Freed, "open a window").is_transient());
    /// ```
    pub fn is_transient(&self) -> bool {
        // Too many open files, in the process or on the machine; interrupted; try again.
        const TRANSIENT_ERRNOS: [i32; 4] = [libc::EMFILE, libc::ENFILE, libc::EINTR, libc::EAGAIN];
        // CUDA_ERROR_NOT_READY, CUDA_ERROR_SYSTEM_NOT_READY, CUDA_ERROR_OPERATING_SYSTEM.
        const TRANSIENT_CUDA_RESULTS: [i32; 3] = [600, 802, 304];
        match self.kind() {
            Kind::OutOfMemory | Kind::Busy => true,
            Kind::Os(errno) => TRANSIENT_ERRNOS.contains(errno),
            Kind::Cuda(code) => TRANSIENT_CUDA_RESULTS.contains(code),
            _ => false,
        }
    }

    /// What failed, as it follows "cannot": the operation, and the object that it was on.
    pub fn what(&self) -> Cow<'_, str> {
        match &self.0.on {
            Some(on) => Cow::Owned(format!("{} on {on}", self.0.what)),
            None => Cow::Borrowed(&self.0.what),
        }
    }

    /// The reason, without the attempt.
    pub fn reason(&self) -> &str {
        &self.0.why
    }

    /// The advice, if there is any.
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

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        self.0.source.as_ref().map(|source| &**source as _)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn result_is_one_word() {
        assert_eq!(size_of::<Result<()>>(), size_of::<usize>());
    }

    #[test]
    fn unset_error_parts_are_not_printed() {
        let bare = Error::new(Kind::Busy, "free memory");
        assert_eq!(bare.to_string(), "cannot free memory");
        assert_eq!(bare.what(), "free memory");
        assert_eq!(bare.on("cuda:0").what(), "free memory on cuda:0");
    }

    #[test]
    fn os_errors_map_to_kinds() {
        let missing = std::io::Error::from_raw_os_error(2);
        assert_eq!(Error::os("open x", &missing).kind(), &Kind::Unavailable);
        let odd = std::io::Error::from_raw_os_error(22);
        assert_eq!(Error::os("open x", &odd).kind(), &Kind::Os(22));
    }

    #[test]
    fn system_call_errors_are_sources() {
        use std::error::Error as _;
        let error = Error::os("open x", &std::io::Error::from_raw_os_error(22));
        let source = error.source().and_then(|source| source.downcast_ref::<std::io::Error>());
        assert_eq!(source.and_then(std::io::Error::raw_os_error), Some(22));
        assert!(Error::new(Kind::Busy, "free memory").source().is_none());
    }
}
