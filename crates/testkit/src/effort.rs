//! How thoroughly a run tests.

/// The three levels. `WARPWIRE_EFFORT` selects one; the default is [`Quick`](Self::Quick).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effort {
    /// `cargo test`: each suite on one backend, a few hundred seeds, no stress tests.
    Quick,
    /// `./ci.sh`: each suite on every backend, 2000 seeds, short stress tests. Required for a
    /// change.
    Change,
    /// `./ci.sh full`: 10 000 seeds and more, long stress and soak tests.
    Full,
}

impl Effort {
    /// The effort of this run.
    pub fn current() -> Self {
        match std::env::var("WARPWIRE_EFFORT").as_deref() {
            Err(_) | Ok("" | "quick") => Self::Quick,
            Ok("change") => Self::Change,
            Ok("full") => Self::Full,
            Ok(other) => panic!("WARPWIRE_EFFORT must be quick, change or full, not {other:?}"),
        }
    }

    /// The value for this run: `[quick, change, full]`.
    pub fn choose<T: Copy>(values: [T; 3]) -> T {
        values[Self::current() as usize]
    }

    /// The value for this run: `[quick, change, full]`, unless an environment variable
    /// (`WARPWIRE_SEEDS`, for example) overrides it with a number.
    pub fn pick(variable: &str, values: [u64; 3]) -> u64 {
        match std::env::var(variable) {
            Ok(text) => text.parse().unwrap_or_else(|_| panic!("{variable}={text}: not a number")),
            Err(_) => Self::choose(values),
        }
    }
}
