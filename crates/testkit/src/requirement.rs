//! What a machine lacks: said in a line, or a failure where `WARPWIRE_REQUIRE` asks for it.

/// Whether `WARPWIRE_REQUIRE` (a comma-separated list) names this.
pub(crate) fn required(name: &str) -> bool {
    let list = std::env::var("WARPWIRE_REQUIRE").unwrap_or_default();
    list.split(',').any(|entry| entry.trim() == name)
}

/// The panic payload of [`skip`].
pub(crate) struct Skipped(pub String);

/// Leaves a case that cannot run on this backend; the runner prints `skipped: CASE: why`.
pub fn skip(why: &str) -> ! {
    std::panic::resume_unwind(Box::new(Skipped(why.to_owned())))
}

/// Whether a panic's payload is one of [`skip`]: not a failure.
pub fn is_skip(payload: &(dyn std::any::Any + Send)) -> bool {
    payload.is::<Skipped>()
}
