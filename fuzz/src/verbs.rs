//! Fuzzes libibverbs through its C ABI: `src/verbs.c` plays the input as a script of calls, between
//! two devices of this process.

/// Runs one input. The devices of `WARPWIRE_IB_DEVICES=lo` are two of this process, whatever else
/// the machine has.
pub fn run(bytes: &[u8]) {
    #[cfg(has_verbs_header)]
    scripts::run(bytes);
    #[cfg(not(has_verbs_header))]
    let _ = bytes;
}

#[cfg(has_verbs_header)]
#[allow(unsafe_code, reason = "the script is C")]
mod scripts {
    use ibverbs as _; // linked for its C symbols

    unsafe extern "C" {
        fn verbs_script(bytes: *const u8, count: usize);
    }

    pub fn run(bytes: &[u8]) {
        // SAFETY: the script is read only, and within its length.
        unsafe { verbs_script(bytes.as_ptr(), bytes.len()) };
    }
}
