//! Missing requirements of a test: a log line, or a failure if `WARPWIRE_REQUIRE` lists them.

/// Whether `WARPWIRE_REQUIRE` (a comma-separated list) contains this name.
pub(crate) fn required(name: &str) -> bool {
    let list = std::env::var("WARPWIRE_REQUIRE").unwrap_or_default();
    list.split(',').any(|entry| entry.trim() == name)
}

/// The panic payload of [`skip`].
pub(crate) struct Skipped(pub String);

/// Skips the current case on this backend; the runner prints `skipped: CASE: why`.
pub fn skip(why: &str) -> ! {
    std::panic::resume_unwind(Box::new(Skipped(why.to_owned())))
}

/// Whether a panic payload is from [`skip`], and not a failure.
pub fn is_skip(payload: &(dyn std::any::Any + Send)) -> bool {
    payload.is::<Skipped>()
}
