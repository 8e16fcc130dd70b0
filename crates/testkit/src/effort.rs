//! How much a run of the tests should try.

/// The three loops. `WARPWIRE_EFFORT` names one; without it, it is [`Quick`](Self::Quick).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Effort {
    /// `cargo test`: each suite on one backend, a few hundred seeds, no storms.
    Quick,
    /// `./ci.sh`: each suite on every backend, 2000 seeds, short storms. A change must pass it.
    Change,
    /// `./ci.sh full`: 10 000 seeds and more, long storms and soaks.
    Full,
}

impl Effort {
    /// The effort of this run.
    pub fn current() -> Self {
        match std::env::var("WARPWIRE_EFFORT").as_deref() {
            Err(_) | Ok("" | "quick") => Self::Quick,
            Ok("change") => Self::Change,
            Ok("full") => Self::Full,
            Ok(other) => panic!("WARPWIRE_EFFORT is quick, change or full, not {other:?}"),
        }
    }

    /// The value for this run: `[quick, change, full]`.
    pub fn choose<T: Copy>(values: [T; 3]) -> T {
        values[Self::current() as usize]
    }

    /// The value for this run: `[quick, change, full]`. A variable of the environment wins: a
    /// number in `WARPWIRE_SEEDS`, say.
    pub fn pick(variable: &str, values: [u64; 3]) -> u64 {
        match std::env::var(variable) {
            Ok(text) => text.parse().unwrap_or_else(|_| panic!("{variable}={text}: not a number")),
            Err(_) => Self::choose(values),
        }
    }
}
