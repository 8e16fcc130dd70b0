//! Results of calls: NCCL's codes, and the text for its log.

use std::fmt::Display;

use warpwire_cabi::process::is_forked_child;

use crate::abi::Code;
use crate::log;

/// `ncclSuccess`, and the failures that the plugin reports.
pub(crate) const SUCCESS: Code = 0;
pub(crate) const SYSTEM: Code = 2;
pub(crate) const INTERNAL: Code = 3;
pub(crate) const INVALID_ARGUMENT: Code = 4;
pub(crate) const INVALID_USAGE: Code = 5;
pub(crate) const REMOTE: Code = 6;

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Failure {
    pub code: Code,
    /// Empty if it was reported before.
    pub text: String,
}

pub(crate) type Result<T = ()> = std::result::Result<T, Failure>;

impl Failure {
    /// A failure that was reported before: NCCL polls, and its log is to have one line.
    #[cold]
    pub(crate) fn repeated(code: Code) -> Self {
        Self { code, text: String::new() }
    }

    #[cold]
    pub(crate) fn new(code: Code, text: impl Display) -> Self {
        Self { code, text: text.to_string() }
    }
}

impl From<warpwire::Error> for Failure {
    #[cold]
    fn from(error: warpwire::Error) -> Self {
        Self::new(SYSTEM, error)
    }
}

impl From<std::io::Error> for Failure {
    #[cold]
    fn from(error: std::io::Error) -> Self {
        Self::new(SYSTEM, error)
    }
}

impl From<rustix::io::Errno> for Failure {
    #[cold]
    fn from(errno: rustix::io::Errno) -> Self {
        std::io::Error::from(errno).into()
    }
}

/// An argument that must not be null.
#[inline]
pub(crate) fn some<T>(argument: Option<T>) -> Result<T> {
    argument.ok_or_else(|| Failure::new(INVALID_ARGUMENT, "an argument is NULL"))
}

/// Runs a call of NCCL's. A failure is logged with its reason; a panic, which is a defect of this
/// library, stops here.
#[inline]
pub(crate) fn call(name: &'static str, body: impl FnOnce() -> Result) -> Code {
    let outcome = warpwire_cabi::guard("nccl", body);
    let Failure { code, text } = match outcome {
        Some(Ok(())) => return SUCCESS,
        Some(Err(failure)) => failure,
        None if is_forked_child() => {
            Failure::new(INTERNAL, "a forked child cannot use its parent's network; exec first")
        }
        None => Failure::new(INTERNAL, "internal error (a panic); please report it"),
    };
    if !text.is_empty() {
        log::warn(format_args!("{name}: {text}"));
    }
    code
}
